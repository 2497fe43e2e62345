"""Bria FIBO: ``BriaFiboPipeline``."""
