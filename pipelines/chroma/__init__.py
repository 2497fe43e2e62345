"""Chroma: ``ChromaPipeline``."""
