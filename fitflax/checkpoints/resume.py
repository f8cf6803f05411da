"""Finds and reads a checkpoint: the one at a path, whichever library wrote it, or the one to resume from; and restores a state from it.

A directory can hold a pointer, a file with the path or URL of a checkpoint elsewhere, which is read in its place.
"""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from fitflax.checkpoints.checkpoint_files import FOR_INFERENCE, METADATA_FILE, WHOLE, CollectiveRead, Saved, is_checkpoint, read_checkpoint
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.checkpoints.directories import disk_errors, replaced_by
from fitflax.checkpoints.foreign import read_foreign
from fitflax.checkpoints.json_documents import read_document, replace_document
from fitflax.checkpoints.restore import Advice, advice_on, from_saved, refit, restore_tree
from fitflax.checkpoints.safetensors_format import INDEX_SUFFIX, SUFFIX, find_weights
from fitflax.checkpoints.weight_rules import is_weights, saved_weights
from fitflax.errors import CheckpointError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError, RestoreError, warn
from fitflax.state import InferenceState, PyTree, TrainState
from fitflax.storage import Location, ObjectPath, locate

_MOST_NAMED = 5  # Directories, in an error.
_POINTER_FILE = "checkpoint_path.json"


def load_checkpoint(
    path: str | os.PathLike[str], roots: Collection[str] = WHOLE, *, storage_options: Mapping[str, Any] | None = None, together: CollectiveRead | None = None
) -> Saved:
    """Returns a checkpoint of fitflax, verified; one of Orbax or `flax.training.checkpoints`, verified as far as possible; or safetensors weights.

    `path` is a checkpoint, or a directory of checkpoints, of which the newest intact one is used, with a warning if newer ones fail their checks; or the URL of
    either; or a directory with a pointer. `roots` are the parts to read, as in `checkpoint_files.read_checkpoint`.
    """
    path = locate(path, owner="The path of a checkpoint", error=CheckpointError, options=storage_options)
    with disk_errors("read", path):
        if path.name.endswith((SUFFIX, INDEX_SUFFIX)) and not path.is_dir():
            weights = find_weights(path)
            assert weights is not None
            return saved_weights(weights)[0]
        checkpoint = path if is_checkpoint(path) else _pointed_to(path, storage_options)
        if checkpoint is not None:
            return read_checkpoint(checkpoint, roots, share=None if together is None else together.share)
    try:
        return _newest_good_in(path, roots, together)
    except CheckpointNotFoundError:
        foreign = None if isinstance(path, ObjectPath) else read_foreign(path)
        # Weights next to damaged checkpoints are not a substitute for them.
        weights = find_weights(path) if foreign is None and not (path.is_dir() and CheckpointStore(path).steps()) else None
        if weights is not None:
            return saved_weights(weights)[0]
        if foreign is None:
            raise
    train, metadata = foreign
    return Saved(path=Path(metadata["path"]), metadata=metadata, train=train, run={})


def write_pointer(directory: Path, checkpoint: Location) -> None:
    """Writes a file to `directory` that points to a checkpoint elsewhere."""
    path = checkpoint if isinstance(checkpoint, ObjectPath) else checkpoint.absolute()
    replace_document(directory / _POINTER_FILE, {"path": str(path)}, is_durable=False)


def read_pointer(directory: Location) -> str | None:
    """Returns the path or URL that `write_pointer` wrote to `directory`, `None` if it wrote none. Raises `CorruptCheckpointError` if the file is damaged."""
    file = directory / _POINTER_FILE
    return str(read_document(file)["path"]) if file.is_file() else None


def _pointed_to(directory: Location, storage_options: Mapping[str, Any] | None) -> Location | None:
    target = read_pointer(directory)
    if target is None:
        return None
    location = locate(target, owner=str(directory / _POINTER_FILE), error=CheckpointError, options=storage_options)
    if not is_checkpoint(location):
        raise CheckpointNotFoundError(
            f"There is no checkpoint at {location}, the target of {directory / _POINTER_FILE}. It was deleted or moved, or this machine cannot access it. "
            "To keep more checkpoints, pass ModelCheckpoint(keep=...)."
        )
    return location


def _newest_good_in(path: Location, roots: Collection[str], together: CollectiveRead | None) -> Saved:
    if isinstance(path, Path) and not path.is_dir():
        aside = "".join(f" An unfinished save set an earlier one aside as {entry}. To use it, rename it." for entry in replaced_by(path))
        raise CheckpointNotFoundError(f"There is no checkpoint at {path}: {'it is a file' if path.exists() else 'no such directory'}.{aside}")
    saved, skipped = CheckpointStore(path).newest_good(roots, together=together)
    if saved is None:
        faults = "".join(f" {error}" for error in skipped)
        names = f"{METADATA_FILE} or an intact step_* directory"
        below = list(itertools.islice(_stores_in(path), _MOST_NAMED)) if isinstance(path, Path) else []
        hint = f" Pass one of its subdirectories that contain checkpoints: {', '.join(below)}." if below else ""
        raise CheckpointNotFoundError(f"There is no checkpoint in {path}: looked for {names}.{hint}{faults}")
    if skipped:
        warn(f"Using {saved.path}, because newer checkpoints cannot be read. {' '.join(map(str, skipped))}")
    return saved


def _stores_in(path: Path) -> Iterator[str]:
    """Yields the names of subdirectories that contain checkpoints; unreadable ones are skipped."""
    for child in sorted(path.iterdir()):
        with contextlib.suppress(OSError, CheckpointError):
            if child.is_dir() and CheckpointStore(child).steps():
                yield child.name


INFERENCE_STATE = "The InferenceState"
"""What `check_fits` calls a state that is not from a file."""


def find_resume(resume: str | os.PathLike[str] | bool | None, stores: Sequence[CheckpointStore], together: CollectiveRead | None = None) -> Saved | None:
    """Returns the checkpoint to resume from, or `None` to start from the beginning. Warns of damaged checkpoints that are skipped.

    `resume` is the argument of `fit`, and `stores` are those of each `ModelCheckpoint` of the run.
    """
    if resume is None or resume is False:
        return None
    if resume is not True and resume != "auto":
        if not isinstance(resume, str | os.PathLike):
            raise ConfigError(f"resume must be None, 'auto', True, or the path of a checkpoint. Received: {resume!r}.")
        return load_checkpoint(resume, storage_options=stores[0].storage_options if len(stores) == 1 else None, together=together)
    if len(stores) != 1:
        advice = "Pass resume=path." if stores else "Add one to callbacks, or pass resume=path."
        raise ConfigError(f"resume={resume!r} needs exactly one ModelCheckpoint, whose directory it uses, but there are {len(stores)}. {advice}")
    stores[0].recover()
    saved, skipped = stores[0].newest_good(together=together)
    unreadable = [error for error in skipped if not isinstance(error, CorruptCheckpointError)]
    if saved is None and unreadable:
        # They may be intact, and a new run would replace them.
        faults = " ".join(map(str, unreadable))
        raise CheckpointError(f"The checkpoints in {stores[0].directory} cannot be read here. They may be intact, so nothing was changed. {faults}")
    for error in skipped:
        what = "a damaged checkpoint" if isinstance(error, CorruptCheckpointError) else "a checkpoint that cannot be read here"
        warn(f"Resuming: skipped {what}: {error}")
    if saved is None and resume is True:
        raise CheckpointNotFoundError(f"resume=True, but {stores[0].directory} has no intact checkpoint. To start a new run, pass resume='auto'.")
    if saved is None and skipped:
        warn(
            f"No checkpoint in {stores[0].directory} is intact, so a new run begins. Saves in the old run's directories replace its checkpoints. "
            "To keep them, copy the directories before the first save."
        )
    return saved


def check_settings(saved: Saved, settings: Mapping[str, Any]) -> None:
    """Raises `RestoreError` if the checkpoint does not belong to a run, or settings that determine the order of examples differ."""
    if "progress" not in saved.metadata:
        raise RestoreError(f"{saved.path} holds a state, but no run to resume. Call trainer.restore(path), and start a new run.")
    before = saved.metadata.get("settings", {})
    differing = [f"{key} was {before.get(key)!r} and is now {value!r}" for key, value in settings.items() if before.get(key) != value]
    if differing:
        raise RestoreError(
            f"{saved.path} cannot be resumed, because the order of examples or the numbers would change: {'; '.join(differing)}. "
            "Pass the same settings, or call restore(path, weights_only=True) and start a new run in another directory."
        )


def warn_of_changes(saved: Saved, compiled: Mapping[str, Any], *, to_resume: bool) -> None:
    """Warns if a run resumes with another loss, learning rate or other setting, which may be intended, but cannot be seen later.

    `compiled` are descriptions of the arguments of `compile` and `fit`. Without `to_resume`, only the learning rate is compared, because it comes with the
    optimizer state.
    """
    before = saved.metadata.get("compiled")
    if before is None:
        return
    names = sorted({*before, *compiled}) if to_resume else ["learning_rate"] * (before.get("optimizer") == compiled.get("optimizer"))
    was, now = ({name: repr(given[name]) if name in given else "not given" for name in names} for given in (before, compiled))
    changes = [f"{name} was {was[name]} and is now {now[name]}" for name in names if before.get(name) != compiled.get(name)]
    if changes:
        rate = ""
        if "learning_rate" in str(changes):
            is_schedule = any(isinstance(given.get("learning_rate"), str) for given in (before, compiled))
            rate = " The new schedule is used." if is_schedule else " The checkpoint's learning rate is used. To change it, set trainer.learning_rate."
        warn(f"{saved.path} was saved with other settings: {'; '.join(changes)}.{rate}")


def warn_of_eval_params(saved: Saved) -> None:
    """Warns that the trained parameters are used, if the run of the checkpoint evaluated parameters that depend on the optimizer state."""
    function = eval_params_of(saved)
    if function is not None:
        warn(
            f"The run of {saved.path} evaluated parameters that {function} computes from the optimizer state. The trained parameters are used here instead. "
            "To get the evaluated ones, compile a trainer in the same way, call restore(path) without weights_only or partial, and then inference_state()."
        )


def eval_params_of(saved: Saved) -> str | None:
    """Returns the name of the function that computed the run's evaluated parameters from the optimizer state; `None` if there was none."""
    name = (saved.metadata.get("compiled") or {}).get("eval_params")
    return None if name is None else str(name)


def fit_to(target: PyTree, saved_part: Any, saved: Saved, root: str, *, advice: Advice | None = None, cast: bool = False) -> PyTree:
    """Returns a part of a checkpoint in the structure of `target`. Raises `RestoreError` with `advice` and the differences."""
    return restore_tree(target, saved_part, where=str(saved.path), root=root, key_impls=saved.metadata["key_impls"], advice=advice, cast=cast)


def restored_state(
    saved: Saved, *, target: TrainState | None, optimizer: optax.GradientTransformation | None, key: jax.Array, weights_only: bool, cast: bool = False
) -> TrainState:
    """Returns the state of a checkpoint, on the host; with `weights_only`, only parameters and collections.

    The checkpoint must match `target`, a state or its shapes, if there is one. Without an optimizer, no optimizer state is restored. `key` is used if none is
    restored, and is the required kind of key. If another library's checkpoint has no averaged parameters, there are none. With `cast`,
    floating dtypes are converted.
    """
    lacks = [what for name, what in (("step", "step"), ("opt_state", "optimizer state")) if name not in saved.train]
    if lacks and not weights_only:
        raise RestoreError(f"{saved.path} has no {' and no '.join(lacks)}. To restore only its parameters and collections, pass weights_only=True.")
    names = ("params", "model_state") if weights_only else ("params", "model_state", "ema_params")
    saved_parts = {name: saved.train.get(name) for name in names}
    if target is None:
        impls = saved.metadata["key_impls"]
        parts = {
            name: from_saved({} if tree is None and name == "model_state" else tree, root=f"train/{name}", key_impls=impls)
            for name, tree in saved_parts.items()
        }
    else:
        parts = dict(
            fit_to({name: getattr(target, name) for name in names}, saved_parts, saved, "train", advice=_advice(str(saved.path), saved.metadata), cast=cast)
        )
    if weights_only:
        return TrainState(step=np.int32(0), key=key, opt_state=(), **parts)  # type: ignore[arg-type]
    rest: dict[str, Any] = {"step": np.int32(0)} | ({"key": key} if "key" in saved.train else {})
    if optimizer is not None:
        rest["opt_state"] = jax.eval_shape(optimizer.init, parts["params"]) if target is None else target.opt_state
    return TrainState(**{"opt_state": (), "key": key, **parts, **fit_to(rest, {name: saved.train[name] for name in rest}, saved, "train", cast=cast)})


def _advice(where: str, metadata: Mapping[str, Any] | None = None) -> Advice | None:
    if where == INFERENCE_STATE:
        return None
    is_weights = where.endswith((SUFFIX, INDEX_SUFFIX))
    if is_weights and metadata is None:  # The names in the file are not known.
        return lambda pairs, different: "To load only what matches, call Trainer.load_weights(path, partial=True)."
    return lambda pairs, different: advice_on(pairs, different, metadata or {}, is_weights=is_weights)


def check_fits(target: TrainState, state: TrainState, where: str, *, cast: bool = False) -> TrainState:
    """Returns a live state in the module's containers. Raises `RestoreError` if it does not fit the module's own shapes."""
    # The optimizer state last: it would repeat differences of the parameters.
    state = dataclasses.replace(state, axes=target.axes)
    for names in (("params", "model_state"), ("opt_state",)):
        parts = ({name: getattr(each, name) for name in names} for each in (target, state))
        state = dataclasses.replace(state, **refit(*parts, where=where, root="train", advice=_advice(where), cast=cast))
    return state


def load_inference_state(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> InferenceState:
    """Returns a checkpoint's state for evaluation and prediction, as NumPy arrays, without reading the optimizer state.

    If the run used `eval_params` or a schedule-free optimizer, this returns the trained parameters, with a warning: the evaluated ones depend on the
    optimizer state. To get those, call `restore` and then `Trainer.inference_state`.

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
    warn_of_eval_params(saved)
    averages = saved.train.get("ema_params")
    options = {"key_impls": saved.metadata["key_impls"], "integer_keys": saved.metadata.get("integer_keys", ())}
    name = "params" if averages is None else "ema_params"
    return InferenceState(
        step=np.int32(saved.train.get("step", 0)),  # type: ignore[arg-type]
        params=from_saved(saved.train[name], root=f"train/{name}", **options),
        model_state=from_saved(saved.train.get("model_state") or {}, root="train/model_state", **options),
    )
