"""Wan 2.1 and 2.2: ``WanPipeline`` and ``WanImageToVideoPipeline``."""
