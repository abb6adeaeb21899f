"""Measurements with their aims, in one run: `python -m benchmarks.run`."""
