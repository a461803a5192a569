"""Benchmarks: `python -m bench NAME` from the repository root."""
