"""FLUX.2 Klein: ``Flux2KleinPipeline``."""
