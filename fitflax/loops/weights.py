"""Saves weights as safetensors and loads them: parameters and collections, without the optimizer state, the step, or random streams."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fitflax.checkpoints.checkpoint_files import Saved, read_collectively
from fitflax.checkpoints.memory import fetch
from fitflax.checkpoints.plain_tree import leaf_paths, nested, shown, walk
from fitflax.checkpoints.restore import STREAMS, RestoreReport
from fitflax.checkpoints.safetensors_format import SUFFIX, find_weights, write_weights
from fitflax.checkpoints.weight_rules import (
    COLLECTIONS,
    PATHS,
    WeightMapping,
    as_floats,
    is_weights,
    leaves_out_only,
    name_of,
    rules_of,
    saved_weights,
    to_file,
)
from fitflax.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from fitflax.leaves import is_key
from fitflax.loops.configuration import RestoreOptions, check_counts
from fitflax.loops.session import Session
from fitflax.parallel.placement import spans_processes, whole
from fitflax.parallel.processes import exchange
from fitflax.state import PyTree
from fitflax.storage import Location, locate

# The collection of an NNX module's parameters that are not trained.
_FROZEN = "frozen"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def save_weights(
    session: Session,
    path: str | os.PathLike[str],
    *,
    mapping: WeightMapping | None,
    dtype: Any,
    metadata: Mapping[str, str] | None,
    max_shard_bytes: int,
    storage_options: Mapping[str, Any] | None,
) -> Location:
    """See `Trainer.save_weights`."""
    place = locate(path, owner="save_weights(path)", error=CheckpointError, options=storage_options)
    if not place.name.endswith(SUFFIX):
        raise ConfigError(
            f"save_weights writes safetensors, so the file name must end with {SUFFIX}. Received: {os.fspath(path)!r}. To save a checkpoint, use save(path)."
        )
    check_counts(max_shard_bytes=max_shard_bytes)
    mapping = None if leaves_out_only(mapping) else mapping  # Such a mapping only leaves out names of the file, which are not in the model.
    about = {"format": "flax" if mapping is None else "pt"} if metadata is None else dict(metadata)
    if not all(isinstance(each, str) for item in about.items() for each in item):
        raise ConfigError(f"save_weights(metadata=...) must map strings to strings. Received: {metadata!r}.")
    if mapping is None:
        about[PATHS] = COLLECTIONS
    if callable(mapping):
        raise ConfigError(
            "save_weights(mapping=...) cannot be a function, which maps names only from the file to the model. Pass a dict or rules, which work both ways."
        )
    rules = None if mapping is None else rules_of(mapping, ())
    dtype = _dtype_of(dtype, "save_weights")
    state = session.state.need("save_weights", evaluates=True).borrow()
    params = session.task.any_program().eval_params(state)
    leaves = dict(_weights(params, state.model_state, has_streams=session.state.module_variables is not None))

    def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Location:
        named = {name_of(name, str(place)): array for name, array in arrays.items()} if rules is None else to_file(arrays, rules, where=str(place))
        return write_weights(place, as_floats(named, dtype, where=str(place)), metadata=about, max_shard_bytes=max_shard_bytes)

    if session.strategy.num_processes > 1 or spans_processes(list(leaves.values())):
        written = _write_together(leaves, write)
        return locate(written, owner="save_weights(path)", error=CheckpointError, options=storage_options)
    if jax.process_index():
        return place  # Each process has all arrays, so only the first one writes.
    arrays = fetch(map(jnp.asarray, leaves.values()), ahead_bytes=2**28)
    return write(dict(zip(leaves, arrays, strict=True)))


def _write_together(leaves: Mapping[str, Any], write: Callable[[Mapping[str, np.ndarray[Any, Any]]], Location]) -> str:
    """Gathers the arrays in all processes, writes them in the first one, and returns the path. If writing fails, all processes raise."""
    is_writer = jax.process_index() == 0
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, leaf in leaves.items():  # One array at a time, because the other processes keep none.
        array = whole(leaf)
        if is_writer:
            arrays[name] = array
    place, failure = "", None
    if is_writer:
        try:
            place = str(write(arrays))
        except Exception as error:  # noqa: BLE001 (raised below, after the others are informed)
            failure = error
    place, fault = exchange([place, None if failure is None else str(failure)], "saving weights")[0]
    if failure is not None:
        raise failure
    if fault is not None:
        raise CheckpointError(f"Process 0 could not save the weights: {fault}")
    return str(place)


def load_weights(
    session: Session, path: str | os.PathLike[str], *, mapping: WeightMapping | None, partial: bool, dtype: Any, storage_options: Mapping[str, Any] | None
) -> RestoreReport:
    """See `Trainer.load_weights`."""
    place = locate(path, owner="load_weights(path)", error=CheckpointError, options=storage_options)
    kind = _dtype_of(dtype, "load_weights")
    left: list[str] = []

    def find(_: Any) -> Saved:
        weights_path = find_weights(place)
        if weights_path is None:
            raise CheckpointNotFoundError(_no_weights(place))
        saved, names = saved_weights(weights_path, mapping=mapping, partial=partial, dtype=kind, suggests_mapping=True)
        left[:] = names
        return saved

    saved = split_frozen(session, read_collectively(find, num_processes=session.strategy.num_processes))
    report = session.restore(saved, None, RestoreOptions(weights_only=True, partial=partial))
    initialized = tuple(name for name in report.initialized if session.state.module_variables is None or not name.startswith(f"{STREAMS}/"))
    return dataclasses.replace(report, initialized=initialized, unused=tuple(sorted({*report.unused, *left})))


def split_frozen(session: Session, saved: Saved) -> Saved:
    """Returns weights in which the parameters that are frozen in an NNX module are in the collection `frozen`."""
    if session.state.module_variables is None or session.state.live is None or not is_weights(saved):
        return saved
    state = session.state.live.borrow()
    collections = dict(saved.train["model_state"])
    params = saved.train["params"]
    if _FROZEN in state.model_state and _FROZEN not in collections:
        frozen = {path for path, _ in walk(nested(state.model_state[_FROZEN], "")[0], "")}
        leaves = flatten_dict(params)
        params, collections[_FROZEN] = (
            unflatten_dict({keys: leaf for keys, leaf in leaves.items() if ("/".join(map(str, keys)) in frozen) is is_frozen}) for is_frozen in (False, True)
        )
    names = saved.metadata.get("names", {})
    frozen_names = {f"{_FROZEN}/{path.removeprefix('params/')}": name for path, name in names.items()}
    metadata = {**saved.metadata, "names": {**frozen_names, **names}} if names else saved.metadata
    return dataclasses.replace(saved, metadata=metadata, train={**saved.train, "params": params, "model_state": collections})


def _weights(params: PyTree, model_state: Mapping[str, PyTree], *, has_streams: bool) -> Iterator[tuple[str, Any]]:
    kept = {name: tree for name, tree in model_state.items() if not (has_streams and name in (STREAMS, _FROZEN))}
    trees = [{"params": params, "model_state": kept}]
    if has_streams and _FROZEN in model_state:
        trees.append({"params": model_state[_FROZEN]})
    for tree in trees:
        leaves, _, paths = leaf_paths(tree, "train")
        yield from ((shown(path), leaves[index]) for path, index in paths.items() if not is_key(leaves[index]))


def _dtype_of(dtype: Any, owner: str) -> Any:
    if dtype is None:
        return None
    with contextlib.suppress(TypeError):
        resolved = jnp.dtype(dtype)
        if jnp.issubdtype(resolved, jnp.floating):
            return resolved
    raise ConfigError(f"{owner}(dtype=...) takes a floating-point dtype, such as 'float32'. Received: {dtype!r}.")


def _no_weights(place: Location) -> str:
    names = sorted(entry.name for entry in place.iterdir()) if place.is_dir() else [place.name]
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if pickled:
        advice = "Save them as safetensors with the library that wrote them."
        return f"{place} has pickled weights, {pickled[0]}, which are not loaded, because unpickling can run code. {advice}"
    if not place.exists():
        return f"There are no weights at {place}: no such file or directory."
    return f"There are no safetensors at {place}. To load a checkpoint, use restore(path, weights_only=True)."
