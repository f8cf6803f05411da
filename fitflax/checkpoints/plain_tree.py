"""Converts pytrees to the nested dicts that a checkpoint can store: `train` gets flax's names, and `run` keeps its lists. `restore.py` converts them back.

A path joins the keys from the root with `/`. In a key, `~` is written `~0` and `/` is written `~1` (RFC 6901), so paths are unique.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.serialization
import jax
import numpy as np

from fitflax.errors import CheckpointError
from fitflax.leaves import is_key, listed
from fitflax.parallel.placement import spans_processes
from fitflax.state import PyTree, TrainState, arrays_of

# The key of the maps in which flax stores large arrays; users' dicts must not contain it.
CHUNKED = "__msgpack_chunked_array__"
# Far below the recursion limits of Python and msgpack (1024).
MAX_DEPTH = 100


@dataclasses.dataclass(frozen=True)
class Plain:
    """A tree as a checkpoint stores it: nested dicts (and lists, if they were kept) of arrays, NumPy scalars, and Python's scalars, strings and `None`."""

    tree: Any
    key_impls: dict[str, str]  # The implementations of typed keys, by path; in the tree, they are key data.
    integer_keys: tuple[str, ...] = ()  # The paths of dicts with integer keys, such as NNX's lists of layers; in the tree, all keys are strings.


def to_plain(tree: PyTree | Plain, *, root: str = "", keep_lists: bool = False, may_span: bool = False) -> Plain:
    """Returns `tree` as nested dicts, after checking that everything in it can be saved.

    Like `flax.serialization.to_state_dict`, but typed keys become key data, and pytrees that only JAX knows (`OrderedDict`, registered dataclasses) are
    supported. No array is copied from its device: `host_copy` and the writers do that.

    Args:
        tree: A pytree; leaves are arrays, NumPy scalars, `str`, `bytes`, `bool`, `int`, `float` and `None`. A `Plain` is returned unchanged.
        root: The prefix of paths.
        keep_lists: Whether lists and tuples become lists, not dicts with the keys `"0"`, `"1"`, ...: for trees that are read without a target.
        may_span: Whether arrays may be split between processes, because all of them save together.

    >>> import jax.numpy as jnp
    >>> to_plain({"dense": {"bias": jnp.zeros(2)}, "key": jax.random.key(7)}, root="train")
    Plain(tree={'dense': {'bias': Array([0., 0.], dtype=float32)}, 'key': Array([0, 7], dtype=uint32)}, key_impls={'train/key': 'threefry2x32'}, ...)
    """
    if isinstance(tree, Plain):
        return tree
    faults: list[str] = []
    impls: dict[str, str] = {}

    def stored(path: str, leaf: Any) -> Any:
        try:
            if not isinstance(leaf, jax.Array):
                return _stored(leaf)
            _check_array(leaf, may_span)
        except _UnstorableError as error:
            faults.append(f"{path} {error}")
            return None
        if is_key(leaf):
            impls[path] = str(jax.random.key_impl(leaf))
            return jax.random.key_data(leaf)
        return leaf

    plain, integers = nested(tree, root, keep_lists=keep_lists, leaf=stored)
    if faults:
        raise CheckpointError(f"Cannot be saved in a checkpoint: {listed(faults, most=5, separator='; ')}.")
    return Plain(plain, impls, integers)


def only_split(plain: Plain) -> Plain:
    """Returns only the arrays of a tree that are split between processes: what processes other than the first have to save."""
    split: dict[str, Any] = {"train": {}}
    for path, leaf in walk(plain.tree, "train"):
        if spans_processes(leaf):
            put(split, path, leaf)
    return Plain(split["train"], {})


def leaves_of(node: Any) -> Iterator[Any]:
    """Yields the leaves of a `Plain` tree."""
    if isinstance(node, (dict, list)):
        for child in node.values() if isinstance(node, dict) else node:
            yield from leaves_of(child)
    else:
        yield node


def nested(tree: PyTree, root: str, *, keep_lists: bool = False, leaf: Callable[[str, Any], Any] = lambda path, leaf: leaf) -> tuple[Any, tuple[str, ...]]:
    """Returns a tree as nested dicts by flax's names, and the paths of dicts with integer keys.

    `leaf` maps the path of each leaf and the leaf to its replacement; `root` and `keep_lists` are as in `to_plain`.
    """
    integers: list[str] = []
    return _plain(tree, root, keep_lists, leaf, integers), tuple(integers)


def _plain(node: Any, path: str, keep_lists: bool, leaf: Callable[[str, Any], Any], integers: list[str], depth: int = 0) -> Any:
    if node is None or isinstance(node, (str, bytes, bool, int, float, np.generic, np.ndarray, jax.Array)):
        return leaf(path, node)
    if type(node) is dict and all(type(child) is float for child in node.values()) and all(type(key) is str for key in node) and CHUNKED not in node:
        return dict(node)  # A fast path for rows of the history, of which long runs have thousands.
    if depth > MAX_DEPTH:
        raise CheckpointError(f"Cannot be saved in a checkpoint: {path[:100]}... is nested more than {MAX_DEPTH} levels deep.")
    if isinstance(node, (list, tuple)) and not hasattr(node, "_fields"):
        items = [_plain(item, join(path, str(index)), keep_lists, leaf, integers, depth + 1) for index, item in enumerate(node)]
        return items if keep_lists else {str(index): item for index, item in enumerate(items)}
    children = _children(node, path)
    if children is None:
        return leaf(path, node)
    if isinstance(node, Mapping) and node and all(type(key) is int for key in node):
        integers.append(path)
    return {key: _plain(child, join(path, key), keep_lists, leaf, integers, depth + 1) for key, child in children.items()}


def _children(node: Any, path: str) -> dict[str, Any] | None:
    """Returns the children of `node` by flax's names, or by JAX's names if flax does not know its type; `None` for a leaf."""
    if isinstance(node, Mapping):
        pairs = [(str(key), child) for key, child in node.items()]
    elif isinstance(node, TrainState):
        pairs = list(arrays_of(node).items())  # flax's function would recurse.
    elif hasattr(node, "_fields"):
        # flax's function would convert nested lists to dicts.
        pairs = [(name, getattr(node, name)) for name in node._fields]
    elif flax.serialization.is_serializable(node):
        pairs = list(flax.serialization.to_state_dict(node).items())
    else:
        entries = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
        if len(entries) == 1 and entries[0][0] == ():
            return None
        pairs = [(jax.tree_util.keystr(entry, simple=True), child) for entry, child in entries]
    children = dict(pairs)
    if len(children) < len(pairs):
        twice = collections.Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise CheckpointError(f"Cannot be saved in a checkpoint: two keys of {path or 'the tree'} become the same string, {twice!r}. Rename one of them.")
    if CHUNKED in children:
        raise CheckpointError(f"Cannot be saved in a checkpoint: {path or 'the tree'} has the key {CHUNKED!r}, which is reserved for large arrays. Rename it.")
    return children


class _UnstorableError(Exception):
    """Why a leaf cannot be saved, as the end of a sentence that begins with its path."""


def _check_array(leaf: jax.Array, may_span: bool) -> None:
    if leaf.is_deleted():
        raise _UnstorableError("has been deleted (it was donated to a compiled function)")
    if not may_span and spans_processes(leaf):
        raise _UnstorableError("is split between processes, which this format does not support")
    if is_key(leaf) and not isinstance(jax.random.key_impl(leaf), str):
        raise _UnstorableError(f"is a random key of an unregistered implementation, {jax.random.key_impl(leaf)}")


def _stored(leaf: Any) -> Any:
    """Returns a leaf as the file stores it: arrays in native byte order (the file does not record it), and no subclasses of NumPy's and Python's types."""
    if leaf is None or isinstance(leaf, bool):
        return leaf
    if isinstance(leaf, str):
        # A lone surrogate, as in a file name that is not UTF-8, cannot be encoded.
        if not leaf.isascii() and any("\ud800" <= character <= "\udfff" for character in leaf):
            raise _UnstorableError(f"is {leaf!r}, which is not valid Unicode")
        return str.__str__(leaf)  # str(leaf) of an enum is its name.
    if isinstance(leaf, bytes):
        return bytes(leaf)
    if isinstance(leaf, (np.ndarray, np.generic)):
        native = _native(leaf.dtype)
        if not is_storable(native):
            raise _UnstorableError(f"has dtype {leaf.dtype} (only numbers and booleans can be saved)")
        return leaf if isinstance(leaf, np.generic) else np.asarray(leaf, dtype=native)
    if isinstance(leaf, int):
        if not -(2**63) <= leaf < 2**64:
            raise _UnstorableError(f"is the integer {leaf}, which needs more than 64 bits (save it as a string)")
        return int(leaf)
    if isinstance(leaf, float):
        return float(leaf)
    raise _UnstorableError(f"is of type {type(leaf).__name__} (only arrays, numbers, strings, bytes and None can be saved)")


@functools.lru_cache
def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("=")


@functools.lru_cache
def is_storable(dtype: np.dtype[Any]) -> bool:
    """Returns whether flax's reader can reconstruct `dtype` from its name; false for objects, strings, records and dates."""
    try:
        return not dtype.hasobject and dtype.itemsize > 0 and dtype.name.isidentifier() and np.dtype(dtype.name) == dtype
    except TypeError:
        return False


def join(path: str, key: str) -> str:
    """Returns the path of a key below `path`."""
    key = key.replace("~", "~0").replace("/", "~1")
    return f"{path}/{key}" if path else key


def keys_of(path: str) -> list[str]:
    """Returns the keys that `join` joined to a path."""
    return [key.replace("~1", "/").replace("~0", "~") for key in path.split("/")]


def put(tree: dict[str, Any], path: str, leaf: Any) -> bool:
    """Puts a leaf into nested dicts, which is the inverse of `walk`. Returns `False` if its path and that of another leaf contain each other."""
    *parents, last = keys_of(path)
    node: Any = tree
    for key in parents:
        node = node.setdefault(key, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict) or last in node:
        return False
    node[last] = leaf
    return True


def walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields `(path, leaf)` of nested dicts and lists; `None` is a leaf."""
    if isinstance(node, (dict, list)):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from walk(child, join(path, str(key)))
    else:
        yield path, node


def map_leaves(node: Any, path: str, function: Callable[[str, Any], Any]) -> Any:
    """Returns nested dicts and lists with `function(path, leaf)` in place of each leaf."""
    if isinstance(node, dict):
        return {key: map_leaves(child, join(path, key), function) for key, child in node.items()}
    if isinstance(node, list):
        return [map_leaves(child, join(path, str(index)), function) for index, child in enumerate(node)]
    return function(path, node)


class _Leaf:
    """A placeholder for a leaf of the target. JAX and flax do not know the class, so both treat it as a leaf."""

    def __init__(self, index: int) -> None:
        self.index = index


def shown(path: str) -> str:
    """Returns a path in the file as users know it: `params/...`, `<collection>/...`, or the field of the state."""
    return path.removeprefix("train/").removeprefix("model_state/")


def leaf_paths(target: PyTree, root: str = "") -> tuple[list[Any], Any, dict[str, int]]:
    """Returns `jax.tree.flatten(target)`, and the index of each leaf by its path."""
    leaves, treedef = jax.tree.flatten(target)
    # Paths are flax's, and the order is JAX's. Leaves are replaced by their indices, and the tree is walked as in a save, so every tree that can be saved
    # can be restored.
    numbered = jax.tree.unflatten(treedef, [_Leaf(index) for index in range(len(leaves))])
    return leaves, treedef, {path: leaf.index for path, leaf in walk(nested(numbered, root)[0], root) if isinstance(leaf, _Leaf)}
