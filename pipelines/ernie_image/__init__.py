"""ERNIE-Image: ``ErnieImagePipeline``."""
