"""Reads safetensors weights as a checkpoint, converting names of arrays to paths of parameters and collections.

In fitflax's files, names are paths joined by `.`, such as `params.Dense_0.kernel` or `batch_stats.BatchNorm_0.mean`, and the metadata says so. In other
files, all arrays are parameters if no name begins with `params.`.
"""

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from fitflax.checkpoints.formats.checkpoint_files import Saved
from fitflax.checkpoints.formats.plain_tree import MAX_DEPTH, join, keys_of, put, walk
from fitflax.checkpoints.formats.weight_files import INDEX_SUFFIX, read_weights
from fitflax.checkpoints.restore.weight_rules import WeightMapping, from_file, leaves_out_only, rules_of
from fitflax.checkpoints.store.local_files import disk_errors
from fitflax.errors import CheckpointError, CorruptCheckpointError, RestoreError, did_you_mean
from fitflax.leaves import listed
from fitflax.storage import Location

__all__ = ["COLLECTIONS", "PATHS", "WRITTEN_BY", "as_floats", "is_weights", "name_of", "saved_weights"]

WRITTEN_BY = "safetensors"
# The metadata entry which says that names begin with a collection, even if none is `params`.
PATHS, COLLECTIONS = "paths", "collections"

Array = np.ndarray[Any, Any]


def saved_weights(
    path: Location, *, mapping: WeightMapping | None = None, partial: bool = False, dtype: Any = None, tells_names: bool = False
) -> tuple[Saved, list[str]]:
    """Returns weights as a checkpoint of only parameters and collections, and the names that match no rule of the mapping.

    `path` is a result of `find_weights`. By default, names are paths joined by `.`. With `partial`, the mapping may omit names. Floating-point arrays are
    converted to `dtype`. With `tells_names`, errors suggest a mapping of the file's names, as for `load_weights`, instead of one for `restore`.
    """
    arrays, about = read_weights(path)
    left: list[str] = []
    origins: dict[str, tuple[str, ...]] = {}
    form = "default" if mapping is None else "dict" if isinstance(mapping, Mapping) else "function" if callable(mapping) else "rules"
    if mapping is not None and leaves_out_only(mapping):
        arrays = _without(arrays, dict(mapping), where=str(path))  # type: ignore[arg-type]
        mapping = None
    if mapping is None:
        has_collections = about.get(PATHS) == COLLECTIONS or any(name.startswith("params.") for name in arrays)
        paths = {name: functools.reduce(join, name.split("."), "" if has_collections else "params") for name in arrays}
        found = {paths[name]: array for name, array in arrays.items()}
        origins = {place: (name,) for name, place in paths.items()}
    else:
        found, left = from_file(arrays, rules_of(mapping, list(arrays)), where=str(path), partial=partial, origins=origins)
    tree = _nested(as_floats(found, dtype, where=str(path)), path)
    train = {"params": tree.pop("params", {}), "model_state": tree}
    loose = [name for name, child in tree.items() if not isinstance(child, dict)]
    if loose or not isinstance(train["params"], dict):
        raise RestoreError(
            f"{path}: every path must start with `params/` or another collection's name, followed by at least one more part. Received: "
            f"{listed(loose or ['params'], most=3)}."
        )
    metadata = {"step": 0, "metrics": {}, "key_impls": {}, "written_by": WRITTEN_BY, "path": str(path), "left_out": [], "metadata": about}
    metadata["digest"] = _digest(found, about, path)
    if tells_names:
        metadata |= {"names": origins, "mapping_form": form}
    return Saved(path=path, metadata=metadata, train=train, run={}), left


def _digest(arrays: Mapping[str, Array], about: Mapping[str, str], path: Location) -> str:
    """Returns a fingerprint of weights without reading all data: names, shapes, dtypes, metadata, and the file's size or the index."""
    digest = hashlib.sha256(repr((sorted((name, str(array.dtype), array.shape) for name, array in arrays.items()), sorted(about.items()))).encode())
    with disk_errors("read", path):
        digest.update(path.read_bytes() if path.name.endswith(INDEX_SUFFIX) else str(path.stat().st_size).encode())
    return digest.hexdigest()


def is_weights(saved: Saved) -> bool:
    """Returns whether a checkpoint is only weights."""
    return bool(saved.metadata.get("written_by") == WRITTEN_BY)


def as_floats(arrays: Mapping[str, Array], dtype: Any, *, where: str) -> dict[str, Array]:
    """Returns arrays with floating-point ones converted to `dtype`, unless it is `None`. Raises `CheckpointError` if finite numbers are too large for it."""
    if dtype is None:
        return dict(arrays)
    converted: dict[str, Array] = {}
    overflowing: list[str] = []
    for name, array in arrays.items():
        converted[name] = array
        if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype != dtype:
            with np.errstate(over="ignore", invalid="ignore"):
                converted[name] = array.astype(dtype)
            if _largest(dtype) < _largest(array.dtype) and (~np.isfinite(converted[name]) & np.isfinite(array)).any():
                overflowing.append(name)
    if overflowing:
        advice = "Pass a dtype with a larger range, such as 'bfloat16'."
        raise CheckpointError(f"{where}: numbers are too large for dtype={jnp.dtype(dtype).name!r}. {advice} Arrays: {listed(overflowing, most=3)}.")
    return converted


def _largest(dtype: Any) -> float:
    return float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]


def name_of(path: str, where: str) -> str:
    """Returns the name in a file for a path in a model, such as `batch_stats.BatchNorm_0.mean`. Raises `CheckpointError` if a key contains a `.`."""
    keys = keys_of(path)
    if any("." in key for key in keys):
        raise CheckpointError(f"{where} cannot be written: {path} contains a '.', which separates names in the file. Rename it with mapping=.")
    return ".".join(keys)


def _without(arrays: Mapping[str, Array], names: Mapping[str, Any], *, where: str) -> dict[str, Array]:
    """Returns the arrays without the named ones, which must exist."""
    gone = [name for name in names if name not in arrays]
    if gone:
        hint = did_you_mean(gone[0], arrays)
        raise RestoreError(f"{where}: the mapping does not fit: there is no {gone[0]!r}{f' ({hint.strip()})' if hint else ''}.")
    return {name: array for name, array in arrays.items() if name not in names}


def _nested(arrays: Mapping[str, Array], where: Location) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        if path.count("/") >= MAX_DEPTH:
            raise CorruptCheckpointError(f"{where} is not a model: {path[:80]}... is nested more than {MAX_DEPTH} levels deep.")
        if not put(tree, path, array):
            others = [each for each, _ in walk(tree, "") if each.startswith(f"{path}/") or path.startswith(f"{each}/")]
            raise RestoreError(f"{where}: {path} conflicts with {listed(others, most=3)}, because one path contains the other. Use mapping= to rename them.")
    return tree
