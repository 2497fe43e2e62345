"""Benchmarks of bcg: each module is a script, run as ``python -m benchmarks.step`` from the repository's root."""
