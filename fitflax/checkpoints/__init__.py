"""Checkpoints on disk: a directory of them is a `CheckpointStore`."""

from fitflax.checkpoints.formats.checkpoint_files import Saved
from fitflax.checkpoints.restore.inference import load_inference_state
from fitflax.checkpoints.restore.partial import RestoreReport
from fitflax.checkpoints.restore.weight_rules import WeightRule
from fitflax.checkpoints.store.checkpoint_store import CheckpointStore

__all__ = ["CheckpointStore", "RestoreReport", "Saved", "WeightRule", "load_inference_state"]
