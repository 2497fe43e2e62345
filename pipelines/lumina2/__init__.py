"""Lumina-Image 2: ``Lumina2Pipeline``."""
