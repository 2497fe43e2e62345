"""Mochi 1: ``MochiPipeline``."""
