"""HunyuanVideo: ``HunyuanVideoPipeline``."""
