"""The part of a checkpoint that evaluation and prediction need, read without the rest."""

import os

import numpy as np

from fitflax.checkpoints.by_path import load_checkpoint
from fitflax.checkpoints.saved import FOR_INFERENCE
from fitflax.checkpoints.trees import from_saved
from fitflax.state import InferenceState

__all__ = ["load_inference_state"]


def load_inference_state(path: str | os.PathLike[str]) -> InferenceState:
    """Returns what a checkpoint of a training has for evaluation and prediction, as NumPy arrays; the bytes of its optimizer are not read.

    Orbax keeps all arrays in common files, which are verified whole; and of checkpoints of other libraries everything is read.

    Args:
        path: A checkpoint directory, or a directory of them, whose newest good one is taken.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CorruptCheckpointError: It is damaged; what is not read is not looked at.

    >>> import fitflax, tempfile
    >>> from flax import linen as nn
    >>> trainer = fitflax.Trainer(nn.Dense(1))
    >>> trainer.compile("adam", "mse")
    >>> trainer.build((np.ones((2, 3), np.float32), np.ones((2, 1), np.float32)))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     state = load_inference_state(trainer.save(f"{directory}/final"))
    >>> state.params["kernel"].shape
    (3, 1)
    """
    saved = load_checkpoint(path, FOR_INFERENCE)
    averages, impls = saved.train.get("ema_params"), saved.metadata["key_impls"]
    name = "params" if averages is None else "ema_params"
    return InferenceState(
        step=np.int32(saved.train.get("step", 0)),  # type: ignore[arg-type]
        params=from_saved(saved.train[name], root=f"train/{name}", key_impls=impls),
        model_state=from_saved(saved.train.get("model_state") or {}, root="train/model_state", key_impls=impls),
    )
