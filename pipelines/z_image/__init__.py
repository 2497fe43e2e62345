"""Z-Image: ``ZImagePipeline``."""
