"""CogView 4: ``CogView4Pipeline``."""
