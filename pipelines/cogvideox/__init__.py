"""CogVideoX: ``CogVideoXPipeline``."""
