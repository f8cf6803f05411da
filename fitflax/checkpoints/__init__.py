"""Checkpoints on disk: a directory of them is a `CheckpointStore`."""

from fitflax.checkpoints.inference import load_inference_state
from fitflax.checkpoints.partial import RestoreReport
from fitflax.checkpoints.saved import Saved
from fitflax.checkpoints.store import CheckpointStore

__all__ = ["CheckpointStore", "RestoreReport", "Saved", "load_inference_state"]
