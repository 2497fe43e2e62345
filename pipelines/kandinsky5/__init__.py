"""Kandinsky 5: ``Kandinsky5T2VPipeline`` and its relatives."""
