"""From a saved checkpoint back to a state: finding it, and fitting it to the model."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from fitflax.checkpoints.by_path import load_checkpoint
from fitflax.checkpoints.saved import Saved
from fitflax.checkpoints.store import CheckpointStore
from fitflax.checkpoints.trees import from_saved, refit, restore_tree
from fitflax.errors import CheckpointError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError, RestoreError, warn
from fitflax.state import PyTree, TrainState

__all__ = ["check_fits", "check_settings", "find_resume", "fit_to", "restored_state", "warn_of_changes"]

_TAKE_PART = "Trainer.restore(path, partial=True) takes what matches."


def find_resume(resume: str | os.PathLike[str] | bool | None, stores: Sequence[CheckpointStore]) -> Saved | None:
    """Returns the checkpoint to go on from, or `None` for a run from the beginning.

    Args:
        resume: `None`, `"auto"`, `True`, or a path.
        stores: The directories of the run's `ModelCheckpoint`s.

    Raises:
        ConfigError: `"auto"` or `True` without exactly one directory to look in.
        CheckpointNotFoundError: `True`, or a path, without a good checkpoint.
        CorruptCheckpointError: The path's checkpoint is damaged.
        CheckpointError: There are only checkpoints of another version, or the disk fails.

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
    unreadable = [error for error in skipped if not isinstance(error, CorruptCheckpointError)]
    if saved is None and unreadable:
        # They may well be whole, and a run that begins anew would replace them.
        faults = " ".join(map(str, unreadable))
        raise CheckpointError(f"{stores[0].directory} holds checkpoints that cannot be read here, and none that can. Nothing was changed. {faults}")
    for error in skipped:
        what = "a damaged checkpoint" if isinstance(error, CorruptCheckpointError) else "a checkpoint that cannot be read here"
        warn(f"Resuming: {what} is passed over: {error}")
    if saved is None and resume is True:
        raise CheckpointNotFoundError(f"resume=True, but {stores[0].directory} holds no good checkpoint. resume='auto' would begin a run.")
    return saved


def check_settings(saved: Saved, settings: Mapping[str, Any]) -> None:
    """Checks that a run goes on with the settings that the order of examples follows from.

    Raises:
        RestoreError: The checkpoint is of no run, or settings differ.
    """
    if "progress" not in saved.metadata:
        raise RestoreError(f"{saved.path} holds a state, but no run that could go on. Use trainer.restore(path), and begin a run with it.")
    before = saved.metadata.get("settings", {})
    differing = [f"{key} was {before.get(key)!r} and is {value!r}" for key, value in settings.items() if before.get(key) != value]
    if differing:
        raise RestoreError(f"{saved.path} cannot be resumed, because the order of examples or the numbers would differ: {'; '.join(differing)}.")


def warn_of_changes(saved: Saved, compiled: Mapping[str, Any], *, to_resume: bool) -> None:
    """Warns where a run goes on with another loss, rate or the like than it had: that may be meant, but is nothing that anybody can see later.

    Args:
        saved: The checkpoint; one that does not say what its run had is taken as it is.
        compiled: What `compile` and `fit` were given, in words.
        to_resume: Whether its run goes on; otherwise only the learning rate is looked at, which the checkpoint's optimizer state brings with it.
    """
    before = saved.metadata.get("compiled")
    if before is None:
        return
    names = sorted({*before, *compiled}) if to_resume else ["learning_rate"] * (before.get("optimizer") == compiled.get("optimizer"))
    was, now = ({name: repr(given[name]) if name in given else "not given" for name in names} for given in (before, compiled))
    changes = [f"{name} was {was[name]} and is {now[name]}" for name in names if before.get(name) != compiled.get(name)]
    if changes:
        rate = " The checkpoint's optimizer state counts, its rate as well: set trainer.learning_rate for another." if "learning_rate" in str(changes) else ""
        warn(f"{saved.path} was saved with other settings: {'; '.join(changes)}.{rate}")


def fit_to(target: PyTree, found: Any, saved: Saved, root: str, *, advice: str = "") -> PyTree:
    """Returns a saved part in the structure of `target`.

    Raises:
        RestoreError: It does not fit; all differences are listed, and `advice` follows.
    """
    return restore_tree(target, found, where=str(saved.path), root=root, key_impls=saved.metadata["key_impls"], advice=advice)


def restored_state(
    saved: Saved, *, target: TrainState | None, optimizer: optax.GradientTransformation | None, key: jax.Array, weights_only: bool
) -> TrainState:
    """Returns the state of a checkpoint, on the host.

    A checkpoint of another library may lack averaged parameters and the key: then there are none, and `key` is kept.

    Args:
        saved: The checkpoint.
        target: A state, or its shapes, that it must fit; `None` takes the file's own structure.
        optimizer: Whose state is taken; `None` leaves it out.
        key: The key where none is taken, and the kind that it must have.
        weights_only: Whether only parameters and collections are taken.

    Raises:
        RestoreError: It does not fit, or has parameters alone and `weights_only` is not set; all differences are listed.
    """
    lacks = [what for name, what in (("step", "step"), ("opt_state", "optimizer state")) if name not in saved.train]
    if lacks and not weights_only:
        raise RestoreError(f"{saved.path} has no {' and no '.join(lacks)}. Pass weights_only=True to take its parameters and collections.")
    names = ("params", "model_state") if weights_only else ("params", "model_state", "ema_params")
    found = {name: saved.train.get(name) for name in names}
    if target is None:
        impls = saved.metadata["key_impls"]
        parts = {
            name: from_saved({} if tree is None and name == "model_state" else tree, root=f"train/{name}", key_impls=impls) for name, tree in found.items()
        }
    else:
        parts = dict(fit_to({name: getattr(target, name) for name in names}, found, saved, "train", advice=_TAKE_PART))
    if weights_only:
        return TrainState(step=np.int32(0), key=key, opt_state=(), **parts)  # type: ignore[arg-type]
    rest: dict[str, Any] = {"step": np.int32(0)} | ({"key": key} if "key" in saved.train else {})
    if optimizer is not None:
        rest["opt_state"] = jax.eval_shape(optimizer.init, parts["params"]) if target is None else target.opt_state
    return TrainState(**{"opt_state": (), "key": key, **parts, **fit_to(rest, {name: saved.train[name] for name in rest}, saved, "train")})


def check_fits(target: TrainState, state: TrainState, where: str) -> TrainState:
    """Checks a live state's parameters and collections against the module's own, path by path, and returns it in the module's own containers.

    Args:
        target: The shapes of the module's own state.
        state: The state.
        where: Where it came from, for the error.

    Raises:
        RestoreError: It does not fit; all differences are listed.
    """
    # The optimizer's state after the rest: where parameters differ, it repeats that.
    state = dataclasses.replace(state, axes=target.axes)
    for names in (("params", "model_state"), ("opt_state",)):
        parts = ({name: getattr(each, name) for name in names} for each in (target, state))
        state = dataclasses.replace(state, **refit(*parts, where=where, root="train", advice=_TAKE_PART))
    return state
