"""Reads checkpoints of other libraries: `flax.training.checkpoints`, `flax.serialization`, and Orbax.

The kind is detected from the files:

* a file of `flax.serialization.to_bytes` or `msgpack_serialize` with any name, such as an older `checkpoint_100` of `flax.training.checkpoints`;
* a directory written by Orbax's PyTree or Standard handlers or `v1.save_pytree`, such as a current `checkpoint_100` of `flax.training.checkpoints`;
* a directory of several of these, with names that end in their step: of `flax.training.checkpoints`, with any prefix, or of Orbax's `CheckpointManager`.
  The newest step is used; unfinished saves are ignored.

The contents may be a `flax.training.train_state.TrainState` (fields besides `step`, `params` and `opt_state` become collections), a linen variables dict,
either of these one level down (`{"model": state, "config": ...}`), or a bare tree of parameters. They are converted to the dicts that
`plain_tree.to_plain` makes of fitflax's TrainState, without running any code of the program that wrote them. There is no `key`.

These formats have few or no checksums, so damage is detected only where the format notices it.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.serialization
import numpy as np

from fitflax.checkpoints.json_documents import read_errors
from fitflax.checkpoints.orbax_format import TRAIN_DIRECTORY, restore_numpy
from fitflax.checkpoints.plain_tree import MAX_DEPTH, walk
from fitflax.errors import CheckpointError, CorruptCheckpointError
from fitflax.leaves import listed

FLAX_PREFIX = "checkpoint_"
# A minus is a sign at the beginning or after an underscore; elsewhere, as in `ckpt-5`, it belongs to the prefix.
_NUMBERED = re.compile(r"(?P<prefix>|.*?_|.*?[^\d.])(?P<step>(?:(?<=_)-|^-)?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
_TEMPORARY = ".orbax-checkpoint-tmp"
_TREE, _STEP = "_METADATA", "_CHECKPOINT_METADATA"
_FITFLAX_FILES = ("metadata.json", "state.msgpack")
_FIELDS = {"step", "params", "opt_state", "ema_params"}
# Common custom fields of a TrainState that are not collections of the module.
_NOT_COLLECTIONS = {"metrics", "dynamic_scale"}
# Flax's placeholder for an array that is split between processes.
_PLACEHOLDER = "//GDAPlaceholder:"


def read_foreign(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns the contents of another library's checkpoint, a file or directory, or `None` if `path` is not one.

    Returns:
        The TrainState as nested dicts of NumPy arrays, for `restore.restore_tree`: `step` (from the state, else from the name, else 0), `params`,
        `model_state`, and if present `opt_state` and `ema_params`. And the metadata: `step`, `metrics` and `key_impls` (empty), `written_by` (`"flax"` or
        `"orbax"`), `path` (the file or directory that was read), and `left_out` (names of contents outside the state).
    """
    with read_errors(path):
        source = _find(path)
        if source is None:
            return None
        written_by, tree = ("orbax", _read_orbax(source)) if source.is_dir() else ("flax", _read_msgpack(source))
    tree = _as_dicts(tree, source)
    if not _has_arrays(tree):
        return None
    elsewhere = [name for name, leaf in walk(tree, "") if isinstance(leaf, str) and leaf.startswith(_PLACEHOLDER)]
    if elsewhere:
        advice = f"Save it again with Orbax. Arrays: {listed(elsewhere, most=3)}."
        raise CheckpointError(f"{source} cannot be read: arrays that were split between processes are in {source}_gda. {advice}")
    if not isinstance(tree, dict):
        raise CheckpointError(f"{source} holds a single array instead of named parameters.")
    match = _NUMBERED.fullmatch(source.name)
    train, left_out = _train_state(tree, int(float(match["step"])) if match else 0)
    metadata = {"step": int(train["step"]), "metrics": {}, "key_impls": {}, "written_by": written_by, "path": str(source), "left_out": left_out}
    return train, metadata


def _find(path: Path) -> Path | None:
    """Returns the file or directory of one checkpoint."""
    if not path.is_dir():
        return path if path.is_file() and _is_flax_file(path) else None
    if _is_fitflax(path) or _is_orbax(path):
        return None if _is_fitflax(path) else path
    # Old Orbax checkpoints have no marker files. Test for them last: a directory of checkpoints looks the same.
    return _newest_in(path) or (path if _items(path) else None)


def _newest_in(path: Path) -> Path | None:
    """Returns the finished checkpoint with the highest number in its name."""
    steps = []
    for entry in path.iterdir():
        match = _NUMBERED.fullmatch(entry.name)
        if match and (_is_finished_orbax(entry) if entry.is_dir() else entry.is_file() and _is_flax_file(entry)):
            steps.append((float(match["step"]), entry, match["prefix"]))
    newest = {prefix: entry for _, entry, prefix in sorted(steps)}
    if len(newest) > 1 and FLAX_PREFIX not in newest:
        names = ", ".join(sorted(entry.name for entry in newest.values()))
        raise CheckpointError(f"{path} holds checkpoints of several kinds: {names}. Pass the path of one of them.")
    return newest.get(FLAX_PREFIX) or next(iter(newest.values()), None)


def _is_fitflax(path: Path) -> bool:
    # A damaged checkpoint of fitflax must not be read as one of Orbax, which always writes `_STEP` today.
    return any((path / name).exists() for name in _FITFLAX_FILES) or ((path / TRAIN_DIRECTORY / _TREE).exists() and not (path / _STEP).exists())


def _is_orbax(path: Path) -> bool:
    return any((path / name).exists() for name in (_TREE, _STEP, "manifest.ocdbt"))


def _is_finished_orbax(path: Path) -> bool:
    if _TEMPORARY in path.name or _is_fitflax(path) or not (_is_orbax(path) or _items(path)):
        return False
    try:
        step = json.loads((path / _STEP).read_bytes())
    except (FileNotFoundError, ValueError):
        return True  # Old versions wrote none; a damaged checkpoint must be reported, not skipped.
    return not isinstance(step, dict) or step.get("commit_timestamp_nsecs", 0) is not None


def _is_flax_file(path: Path) -> bool:
    """Returns whether a file begins like one of `flax.serialization` (a map whose first key is a string), or is named like one."""
    match = _NUMBERED.fullmatch(path.name)
    if match and match["prefix"] == FLAX_PREFIX:
        return True  # An empty or overwritten file must be reported, not skipped.
    if path.name in _FITFLAX_FILES:
        return False
    with open(path, "rb") as file:
        head = file.read(6)
    key = {0xDE: 3, 0xDF: 5}.get(head[0], 1 if 0x80 < head[0] < 0x90 else len(head)) if head else 0
    return key < len(head) and (0xA0 <= head[key] < 0xC0 or head[key] in (0xD9, 0xDA, 0xDB))


def _items(path: Path) -> dict[str, Path]:
    """Returns the trees of one Orbax checkpoint by name: the directory itself, or its subdirectories."""
    if (path / _TREE).exists():
        return {"": path}
    return {entry.name: entry for entry in sorted(path.iterdir()) if (entry / _TREE).exists() and _TEMPORARY not in entry.name}


def _read_msgpack(path: Path) -> Any:
    data = path.read_bytes()
    try:
        return flax.serialization.msgpack_restore(data)
    except Exception as error:  # msgpack, NumPy and flax raise many kinds of errors for invalid bytes.
        fault = "is empty" if not data else f"is damaged, or has another format ({type(error).__name__}: {error})"
        raise CorruptCheckpointError(f"{path} cannot be read as a msgpack file of Flax: it {fault}.") from error


def _read_orbax(path: Path) -> Any:
    items = _items(path)
    if not items:
        raise CorruptCheckpointError(f"{path} cannot be read as a checkpoint of Orbax: neither it nor a subdirectory contains {_TREE}.")
    if len(items) > 1 and "params" not in items:
        known = [name for name in ("default", "state", "train_state") if name in items]
        if not known:
            raise CheckpointError(f"{path} holds several items: {', '.join(sorted(items))}. Pass the path of one of them.")
        items = {known[0]: items[known[0]]}
    trees = {}
    for name, item in items.items():
        try:
            trees[name] = restore_numpy(item)
        except (CheckpointError, OSError) as error:
            raise CorruptCheckpointError(f"{item} cannot be read as a checkpoint of Orbax: it is damaged, or from another version of Orbax. {error}") from error
    # Separate items for parameters and the rest are fields of the state.
    return trees if "params" in trees else next(iter(trees.values()))


def _as_dicts(node: Any, where: Path, depth: int = 0) -> Any:
    """Returns all containers as dicts, with the names that flax gives to their entries."""
    if depth > MAX_DEPTH:
        raise CorruptCheckpointError(f"{where} is not a training state: it is nested more than {MAX_DEPTH} levels deep.")
    if isinstance(node, (list, tuple)):
        node = dict(enumerate(node))
    if isinstance(node, Mapping):
        return {str(key): _as_dicts(child, where, depth + 1) for key, child in node.items()}
    return node


def _train_state(tree: dict[str, Any], path_step: int) -> tuple[dict[str, Any], list[str]]:
    """Returns the state in `tree`, and the names of the remaining entries."""
    state, left_out = tree, []
    if not _is_state(tree):
        inner = [name for name, child in tree.items() if _is_state(child)]
        if len(inner) == 1:
            state, left_out = tree[inner[0]], [name for name in tree if name != inner[0]]
        else:
            state = {"params": tree}
    fields = {name: state[name] for name in _FIELDS & state.keys()}
    others = {name: child for name, child in state.items() if name not in _FIELDS}
    if _is_state(fields["params"]):
        # TrainState.create(params=module.init(...)) has all variables in place of the parameters.
        others |= fields["params"]
        fields["params"] = others.pop("params")
        fields |= {"opt_state": _unwrap_params(fields["opt_state"])} if "opt_state" in fields else {}
    step = np.asarray(path_step if fields.get("step") is None else fields["step"])
    if step.shape or not np.issubdtype(step.dtype, np.integer):
        step = np.asarray(path_step)  # For example, one step per device in a replicated state.
    if fields.get("ema_params") is None:
        fields.pop("ema_params", None)
    collections = {name: child for name, child in others.items() if name not in _NOT_COLLECTIONS and isinstance(child, dict) and _has_arrays(child)}
    left_out += [name for name in others if name not in collections and others[name] is not None]
    return {**fields, "step": step.astype(np.int32), "model_state": collections}, left_out


def _is_state(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("params"), dict)


def _has_arrays(node: Any) -> bool:
    return any(isinstance(leaf, np.ndarray) for _, leaf in walk(node, ""))


def _unwrap_params(node: Any) -> Any:
    """Returns a tree without dicts whose only key is `params`."""
    if not isinstance(node, dict):
        return node
    return _unwrap_params(node["params"]) if node.keys() == {"params"} else {key: _unwrap_params(child) for key, child in node.items()}
