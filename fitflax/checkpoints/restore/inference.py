"""Loads what evaluation and prediction need from a checkpoint, without the rest."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fitflax.checkpoints.formats.checkpoint_files import FOR_INFERENCE
from fitflax.checkpoints.restore.fit import from_saved
from fitflax.checkpoints.restore.load import load_checkpoint
from fitflax.checkpoints.restore.weights import is_weights
from fitflax.errors import warn
from fitflax.state import InferenceState

__all__ = ["load_inference_state"]


def load_inference_state(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> InferenceState:
    """Returns a checkpoint's state for evaluation and prediction, as NumPy arrays, without reading the optimizer state.

    If the run used `compile(eval_params=...)`, this returns the trained parameters, with a warning: the evaluated ones depend on the optimizer state. For
    those, call `restore` and then `Trainer.inference_state`.

    Orbax keeps all arrays in common files, which are verified as a whole. Checkpoints of other libraries are also read as a whole.

    Args:
        path: A checkpoint directory, or a directory of checkpoints, of which the newest intact one is used; or the URL of either.
        storage_options: Options for a URL, as in `CheckpointStore`.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CorruptCheckpointError: It is damaged. Parts that are not read are not checked.

    Warns:
        FitflaxWarning: The run evaluated parameters other than the trained ones.

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
    saved = load_checkpoint(path, FOR_INFERENCE, storage_options=storage_options)
    if is_weights(saved):  # Copied: these are views of a mapped file, which may change.
        saved = dataclasses.replace(saved, train=jax.tree.map(np.array, saved.train))
    evaluated = (saved.metadata.get("compiled") or {}).get("eval_params")
    if evaluated is not None:
        warn(
            f"{saved.path} is from a run with compile(eval_params={evaluated}). This returns the trained parameters, not those that the run evaluated. "
            "For those, restore the checkpoint into a trainer that is compiled the same way, and call trainer.inference_state()."
        )
    averages = saved.train.get("ema_params")
    options = {"key_impls": saved.metadata["key_impls"], "integer_keys": saved.metadata.get("integer_keys", ())}
    name = "params" if averages is None else "ema_params"
    return InferenceState(
        step=np.int32(saved.train.get("step", 0)),  # type: ignore[arg-type]
        params=from_saved(saved.train[name], root=f"train/{name}", **options),
        model_state=from_saved(saved.train.get("model_state") or {}, root="train/model_state", **options),
    )
