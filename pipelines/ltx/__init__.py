"""LTX-Video: ``LTXPipeline``."""
