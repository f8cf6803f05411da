"""Checkpoints on disk: a directory of them is a `CheckpointStore`."""

from fitflax.checkpoints.store import CheckpointStore, Saved

__all__ = ["CheckpointStore", "Saved"]
