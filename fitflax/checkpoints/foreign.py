"""Reads checkpoints that fitflax did not write: those of `flax.training.checkpoints`, of `flax.serialization`, and of Orbax.

What is read, found out from the files and not from the target:

* a file of `flax.serialization.to_bytes` or `msgpack_serialize`, whatever its name, and so a `checkpoint_100` that `flax.training.checkpoints` wrote as a file;
* a directory that Orbax's PyTree or Standard handlers wrote, or its `v1.save_pytree`, and so a `checkpoint_100` of `flax.training.checkpoints` today;
* a directory of several such, with names that end in their step: of `flax.training.checkpoints`, with any prefix, or of Orbax's `CheckpointManager`. The newest
  step counts; what a save left unfinished does not.

What is in it may be a `flax.training.train_state.TrainState` (its fields beside `step`, `params` and `opt_state` become collections), a linen variables dict,
either of these one level down (`{"model": state, "config": ...}`), or a bare tree of parameters. It becomes the dicts that `fitflax.checkpoints.trees.to_plain`
makes of fitflax's own TrainState; that needs no code of the program that wrote it, and none is executed. There is no `key` in it.

These formats hold few checksums or none: a damaged file is an error where the format notices, and only there.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.serialization
import msgpack
import numpy as np

from fitflax.checkpoints.orbax_format import TRAIN_DIRECTORY, restore_numpy
from fitflax.checkpoints.trees import MAX_DEPTH, walk
from fitflax.errors import CheckpointError, CorruptCheckpointError

__all__ = ["read_foreign"]

FLAX_PREFIX = "checkpoint_"
# A minus is a sign at the very front and after an underscore; elsewhere, as in `ckpt-5`, it belongs to the prefix.
_NUMBERED = re.compile(r"(?P<prefix>|.*?_|.*?[^\d.])(?P<step>(?:(?<=_)-|^-)?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
_TEMPORARY = ".orbax-checkpoint-tmp"
_TREE, _STEP = "_METADATA", "_CHECKPOINT_METADATA"
_ORBAX_FILES = (_TREE, _STEP, "manifest.ocdbt")
_FITFLAX_FILES = ("metadata.json", "state.msgpack")
_FIELDS = {"step", "params", "opt_state", "ema_params"}
# Fields that people give their TrainState and that are no collections of the module.
_NO_COLLECTIONS = {"metrics", "dynamic_scale"}
# What flax writes in place of an array that is spread over several processes.
_ELSEWHERE = "//GDAPlaceholder:"


def read_foreign(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns what a checkpoint holds that another library wrote, or `None` if `path` is no such thing.

    Args:
        path: A file or directory.

    Returns:
        The TrainState as nested dicts of NumPy arrays, for `trees.restore_tree`: `step` (of the state, else of the name, else 0), `params`, `model_state`, and
        where there are such `opt_state` and `ema_params`. And its metadata: `step`, `metrics` and `key_impls` (empty), `written_by` (`"flax"` or `"orbax"`),
        `path` (the file or directory that was taken), and `left_out` (what it holds beside the state).

    Raises:
        CorruptCheckpointError: It is one, but cannot be read.
        CheckpointError: It is one of several kinds and it is not clear which is meant, its arrays are elsewhere, or the disk fails.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = Path(directory, "model.msgpack")
    ...     count = path.write_bytes(flax.serialization.to_bytes({"params": {"w": np.ones(2)}, "batch_stats": {"mean": np.zeros(1)}}))
    ...     train, metadata = read_foreign(path)
    >>> train["params"], train["model_state"], metadata["written_by"]
    ({'w': array([1., 1.])}, {'batch_stats': {'mean': array([0.])}}, 'flax')
    """
    try:
        found = _find(path)
        if found is None:
            return None
        if found.is_dir():
            written_by, tree = "orbax", _read_orbax(found)
        else:
            written_by, tree = "flax", _read_msgpack(found)
    except CheckpointError:
        raise  # Some are OSErrors, too.
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} could not be read: {error.strerror}.") from error
    tree = _named(tree, found)
    if not any(isinstance(leaf, np.ndarray) for _, leaf in walk(tree, "")):
        return None
    elsewhere = [name for name, leaf in walk(tree, "") if isinstance(leaf, str) and leaf.startswith(_ELSEWHERE)]
    if elsewhere:
        raise CheckpointError(
            f"{found} cannot be read: {', '.join(elsewhere)} was spread over several processes and is in {found}_gda. Save it again with Orbax."
        )
    train, left_out = _train_state(tree, _step_of(found), str(found))
    metadata = {"step": int(train["step"]), "metrics": {}, "key_impls": {}, "written_by": written_by, "path": str(found), "left_out": left_out}
    return train, metadata


# --- Which file or directory ---


def _find(path: Path) -> Path | None:
    if not path.is_dir():
        return path if path.is_file() and _is_flax_file(path) else None
    if _is_own(path):
        return None
    if _is_orbax(path):
        return path
    # Last what Orbax wrote before its checkpoints had files of their own, else a directory of checkpoints would pass for one.
    return _newest_in(path) or (path if _items(path) else None)


def _newest_in(path: Path) -> Path | None:
    """Returns the entry with the highest number in its name that is a checkpoint and finished."""
    steps: dict[str, list[tuple[float, Path]]] = {}
    for entry in path.iterdir():
        match = _NUMBERED.fullmatch(entry.name)
        if match and (_is_finished_orbax(entry) if entry.is_dir() else entry.is_file() and _is_flax_file(entry)):
            steps.setdefault(match["prefix"], []).append((float(match["step"]), entry))
    if not steps:
        return None
    if len(steps) > 1 and FLAX_PREFIX not in steps:
        names = ", ".join(sorted(max(entries)[1].name for entries in steps.values()))
        raise CheckpointError(f"{path} holds checkpoints of several kinds: {names}. Pass the path of one of them.")
    return max(steps[FLAX_PREFIX if FLAX_PREFIX in steps else next(iter(steps))])[1]


def _is_own(path: Path) -> bool:
    # Without its own checks a damaged checkpoint of fitflax's could pass for Orbax's, which always writes `_STEP` today.
    return any((path / name).exists() for name in _FITFLAX_FILES) or ((path / TRAIN_DIRECTORY / _TREE).exists() and not (path / _STEP).exists())


def _is_orbax(path: Path) -> bool:
    return any((path / name).exists() for name in _ORBAX_FILES)


def _is_finished_orbax(path: Path) -> bool:
    if _TEMPORARY in path.name or _is_own(path) or not (_is_orbax(path) or _items(path)):
        return False
    try:
        with open(path / _STEP, "rb") as file:
            step = json.load(file)
    except (FileNotFoundError, ValueError):
        return True  # Older versions wrote none; and what is damaged shall be reported as such.
    return not isinstance(step, dict) or step.get("commit_timestamp_nsecs", 0) is not None


def _is_flax_file(path: Path) -> bool:
    """Returns whether a file begins as `flax.serialization` begins one, with a map whose first key is a string, or has the name of one."""
    match = _NUMBERED.fullmatch(path.name)
    if match and match["prefix"] == FLAX_PREFIX:
        return True  # So that an empty or overwritten one is not passed over.
    if path.name in _FITFLAX_FILES:
        return False
    with open(path, "rb") as file:
        head = file.read(6)
    key = {0xDE: 3, 0xDF: 5}.get(head[0], 1 if 0x80 < head[0] < 0x90 else len(head)) if head else 0
    return key < len(head) and (0xA0 <= head[key] < 0xC0 or head[key] in (0xD9, 0xDA, 0xDB))


def _step_of(path: Path) -> int:
    match = _NUMBERED.fullmatch(path.name)
    return int(float(match["step"])) if match else 0


# --- What is in it ---


def _read_msgpack(path: Path) -> Any:
    data = path.read_bytes()
    try:
        return flax.serialization.msgpack_restore(data)
    except Exception as error:  # Whatever msgpack, NumPy and flax raise for bytes that are not theirs.
        fault = "empty" if not data else f"damaged, or is no such file ({type(error).__name__}: {error})"
        raise CorruptCheckpointError(f"{path} was read as a msgpack file of flax, but is {fault}.") from error


def _read_orbax(path: Path) -> Any:
    items = _items(path)
    if not items:
        raise CorruptCheckpointError(f"{path} was read as a checkpoint of Orbax, but holds no trees: neither it nor a directory in it has a {_TREE}.")
    if len(items) > 1 and "params" not in items:
        known = [name for name in ("default", "state", "train_state") if name in items]
        if not known:
            raise CheckpointError(f"{path} holds several items: {', '.join(sorted(items))}. Pass the path of one of them.")
        items = {known[0]: items[known[0]]}
    trees = {name: _read_item(item) for name, item in items.items()}
    # Parameters and the rest as items of their own are the state's fields.
    return trees if "params" in trees else next(iter(trees.values()))


def _items(path: Path) -> dict[str, Path]:
    """Returns the trees of one checkpoint by name: the directory itself, or those in it."""
    if (path / _TREE).exists():
        return {"": path}
    return {entry.name: entry for entry in sorted(path.iterdir()) if (entry / _TREE).exists() and _TEMPORARY not in entry.name}


def _read_item(path: Path) -> Any:
    try:
        return restore_numpy(path)
    except (CheckpointError, OSError) as error:
        raise CorruptCheckpointError(f"{path} was read as a checkpoint of Orbax, but is damaged or of another version of it. {error}") from error


def _named(node: Any, where: Path, depth: int = 0) -> Any:
    """Returns dicts for all containers, with the names that flax gives to what is in them."""
    if depth > MAX_DEPTH:
        raise CorruptCheckpointError(f"{where} is nested more than {MAX_DEPTH} levels deep, which no state is.")
    if isinstance(node, Mapping):
        return {str(key): _named(child, where, depth + 1) for key, child in node.items()}
    if isinstance(node, (list, tuple)) and not isinstance(node, msgpack.ExtType):
        return {str(index): _named(child, where, depth + 1) for index, child in enumerate(node)}
    return node


def _train_state(tree: Any, step: int, where: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the state in `tree`, and the names of what was left out."""
    if not isinstance(tree, dict):
        raise CheckpointError(f"{where} holds a single array, and no parameters with names.")
    state, left_out = tree, []
    if not _is_state(state):
        inner = [name for name, child in tree.items() if _is_state(child)]
        if len(inner) != 1:
            return _train(step, params=tree), []
        state, left_out = tree[inner[0]], [name for name in tree if name != inner[0]]
    state = dict(state)
    fields = {name: state.pop(name) for name in _FIELDS & state.keys()}
    if _is_state(fields["params"]):
        # TrainState.create(params=module.init(...)): all variables where the parameters should be.
        state |= fields["params"]
        fields["params"] = state.pop("params")
        fields |= {"opt_state": _unwrapped(fields["opt_state"])} if "opt_state" in fields else {}
    collections = {name: child for name, child in state.items() if name not in _NO_COLLECTIONS and _is_collection(child)}
    left_out += [name for name in state if name not in collections and state[name] is not None]
    return _train(step, model_state=collections, **fields), left_out


def _is_state(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("params"), dict)


def _is_collection(node: Any) -> bool:
    return isinstance(node, dict) and any(isinstance(leaf, np.ndarray) for _, leaf in walk(node, ""))


def _unwrapped(node: Any) -> Any:
    """Returns a tree without the dicts that hold nothing but `params`."""
    if not isinstance(node, dict):
        return node
    return _unwrapped(node["params"]) if node.keys() == {"params"} else {key: _unwrapped(child) for key, child in node.items()}


def _train(path_step: int, *, step: Any = None, params: Any, model_state: Any = None, **others: Any) -> dict[str, Any]:
    value = np.asarray(path_step if step is None else step)
    if value.shape or not np.issubdtype(value.dtype, np.integer):
        value = np.asarray(path_step)  # Such as one a device, of a state that was replicated by hand.
    if others.get("ema_params") is None:
        others.pop("ema_params", None)
    return {"step": value.astype(np.int32), "params": params, "model_state": model_state or {}, **others}
