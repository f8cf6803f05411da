"""Benchmarks of what fitflax costs: `python -m benchmarks.run` against peers, `python benchmarks/checkpoint.py` against the disk."""
