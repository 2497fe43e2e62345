"""Sana: ``SanaPipeline``."""
