"""HunyuanVideo 1.5: ``HunyuanVideo15Pipeline``."""
