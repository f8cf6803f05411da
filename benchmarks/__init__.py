"""What fitflax costs, measured: `python -m benchmarks.run` against peers, `python benchmarks/checkpoint.py` against the disk."""
