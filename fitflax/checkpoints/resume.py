"""From a saved checkpoint back to a state: finding it, and fitting it to the model."""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fitflax.checkpoints.store import CheckpointStore, Saved, load_checkpoint
from fitflax.checkpoints.trees import from_saved, restore_tree
from fitflax.errors import CheckpointNotFoundError, ConfigError, FitflaxWarning, RestoreError
from fitflax.state import PyTree, TrainState

__all__ = ["check_fits", "check_settings", "find_resume", "fit_to", "restored_state"]


def find_resume(resume: str | os.PathLike[str] | bool | None, stores: Sequence[CheckpointStore]) -> Saved | None:
    """Returns the checkpoint to go on from, or `None` for a run from the beginning.

    Args:
        resume: `None`, `"auto"`, `True`, or a path.
        stores: The directories of the run's `ModelCheckpoint`s.

    Raises:
        ConfigError: `"auto"` or `True` without exactly one directory to look in.
        CheckpointNotFoundError: `True`, or a path, without a good checkpoint.
        CorruptCheckpointError: The path's checkpoint is damaged.

    Warns:
        FitflaxWarning: Damaged checkpoints were passed over.
    """
    if resume is None or resume is False:
        return None
    if resume is not True and resume != "auto":
        if not isinstance(resume, str | os.PathLike):
            raise ConfigError(f"resume must be None, 'auto', True, or the path of a checkpoint. Received: {resume!r}.")
        return load_checkpoint(Path(resume))
    if len(stores) != 1:
        advice = "Pass resume=path." if stores else "Add one to callbacks, or pass resume=path."
        raise ConfigError(f"resume={resume!r} looks in the directory of the one ModelCheckpoint, but there are {len(stores)}. {advice}")
    stores[0].recover()
    saved, skipped = stores[0].newest_good()
    for message in skipped:
        warnings.warn(f"Resuming: a damaged checkpoint is passed over: {message}", FitflaxWarning, stacklevel=4)
    if saved is None and resume is True:
        raise CheckpointNotFoundError(f"resume=True, but {stores[0].directory} holds no good checkpoint. resume='auto' would begin a run.")
    return saved


def check_settings(saved: Saved, settings: Mapping[str, Any]) -> None:
    """Checks that a run goes on with the settings that the order of examples follows from.

    Raises:
        RestoreError: The checkpoint is of no run, or settings differ.
    """
    if "progress" not in saved.metadata:
        raise RestoreError(f"{saved.path} holds a state, but no run that could go on. Use trainer.restore(path) and fit without resume.")
    before = saved.metadata.get("settings", {})
    differing = [f"{key} was {before.get(key)!r} and is {value!r}" for key, value in settings.items() if before.get(key) != value]
    if differing:
        raise RestoreError(f"{saved.path} cannot be resumed, because the order of examples would differ: {'; '.join(differing)}.")


def fit_to(target: PyTree, found: Any, saved: Saved, root: str) -> PyTree:
    """Returns a saved part in the structure of `target`.

    Raises:
        RestoreError: It does not fit; all differences are listed.
    """
    return restore_tree(target, found, where=str(saved.path), root=root, key_impls=saved.metadata["key_impls"])


def restored_state(
    saved: Saved, *, target: TrainState | None, optimizer: optax.GradientTransformation | None, key: jax.Array, weights_only: bool
) -> TrainState:
    """Returns the state of a checkpoint, on the host.

    Args:
        saved: The checkpoint.
        target: A state, or its shapes, that it must fit; `None` takes the file's own structure.
        optimizer: Whose state is taken; `None` leaves it out.
        key: The key where none is taken, and the kind that it must have.
        weights_only: Whether only parameters and collections are taken.

    Raises:
        RestoreError: It does not fit; all differences are listed.
    """
    model = ("params", "model_state") if weights_only else ("params", "model_state", "ema_params")
    if target is None:
        impls = saved.metadata["key_impls"]
        parts = {name: from_saved(saved.train[name], root=f"train/{name}", key_impls=impls) for name in model}
    else:
        parts = _fit_parts({name: getattr(target, name) for name in model}, saved)
    if weights_only:
        return TrainState(step=np.int32(0), key=key, opt_state=(), **parts)  # type: ignore[arg-type]
    rest: dict[str, Any] = {"step": np.int32(0), "key": key}
    if optimizer is not None:
        rest["opt_state"] = jax.eval_shape(optimizer.init, parts["params"]) if target is None else target.opt_state
    return TrainState(**{"opt_state": (), **parts, **_fit_parts(rest, saved)})


def _fit_parts(targets: dict[str, Any], saved: Saved) -> dict[str, Any]:
    return dict(fit_to(targets, {name: saved.train[name] for name in targets}, saved, "train"))


def check_fits(target: TrainState, state: TrainState, where: str) -> None:
    """Checks a state's parameters and collections against the module's own, path by path.

    Args:
        target: The shapes of the module's own state.
        state: The state.
        where: Where it came from, for the error.

    Raises:
        RestoreError: It does not fit; all differences are listed.
    """
    model = ("params", "model_state")
    found = flax.serialization.to_state_dict({name: jax.tree.map(_shape_of, getattr(state, name)) for name in model})
    restore_tree({name: getattr(target, name) for name in model}, found, where=where, root="train", key_impls={})


def _shape_of(leaf: Any) -> Any:
    # The comparison needs no values: an array that takes no memory stands for them.
    return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
