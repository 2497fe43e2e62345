"""FLUX.1: ``FluxPipeline`` and its relatives."""
