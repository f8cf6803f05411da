"""Checkpoints on disk: a directory of them is a `CheckpointStore`."""

from fitflax.checkpoints.checkpoint_files import Saved
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.checkpoints.restore import RestoreReport
from fitflax.checkpoints.resume import load_inference_state
from fitflax.checkpoints.weight_rules import WeightRule

__all__ = ["CheckpointStore", "RestoreReport", "Saved", "WeightRule", "load_inference_state"]
