"""Qwen-Image: ``QwenImagePipeline``, ``QwenImageEditPipeline`` and their relatives."""
