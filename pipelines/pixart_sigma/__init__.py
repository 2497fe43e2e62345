"""PixArt-Sigma: ``PixArtSigmaPipeline``."""
