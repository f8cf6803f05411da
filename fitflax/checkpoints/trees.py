"""From pytrees to nested dicts that a checkpoint can hold, and back; `train` by flax's names, `run` with its lists as lists.

A path is the keys from the root joined with `/`; in a key, `~` is written `~0` and `/` is written `~1` (RFC 6901), so no two leaves share a path.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import flax.serialization
import jax
import numpy as np

from fitflax.checkpoints.memory import Arena
from fitflax.errors import CheckpointError, RestoreError
from fitflax.leaves import is_key
from fitflax.parallel.host_memory import copy_to_host_memory, is_spread, spans_processes
from fitflax.parallel.packed import Form, Packed
from fitflax.state import PyTree, TrainState, arrays_of

__all__ = [
    "Plain",
    "fetch",
    "fit_leaf",
    "from_saved",
    "host_copy",
    "leaf_paths",
    "leaves_of",
    "only_split",
    "refit",
    "restore_tree",
    "shown",
    "to_plain",
    "unpack",
]

# The key of the maps in which flax writes large arrays; no dict of the user's may have it.
CHUNKED = "__msgpack_chunked_array__"
# Well inside Python's recursion limit and msgpack's own (1024); no model comes near this.
MAX_DEPTH = 100


@dataclasses.dataclass(frozen=True)
class Plain:
    """A tree as a checkpoint holds it.

    Attributes:
        tree: Nested dicts (and lists, where they were kept) of arrays, NumPy scalars, `str`, `bytes`, `bool`, `int`, `float` and `None`. Typed keys are key
            data.
        key_impls: `{path: implementation}` of the typed keys.
    """

    tree: Any
    key_impls: dict[str, str]


def to_plain(tree: PyTree | Plain, *, root: str = "", keep_lists: bool = False, may_span: bool = False) -> Plain:
    """Returns `tree` as nested dicts, with everything checked that could keep it from being saved.

    The same as `flax.serialization.to_state_dict`, but typed keys become key data, and pytrees that JAX knows and flax does not (an `OrderedDict`, registered
    dataclasses) are taken apart as well. No array is fetched from its device: `host_copy` and the writers do that.

    Args:
        tree: Dicts, lists, tuples, named tuples, flax.struct dataclasses and other pytrees; leaves are arrays, NumPy scalars, `str`, `bytes`, `bool`, `int`,
            `float` and `None`. A `Plain` comes back as it is.
        root: What paths begin with.
        keep_lists: Lists and tuples become lists instead of dicts with the keys `"0"`, `"1"`, ...: for trees that are read without a target.
        may_span: Whether arrays may be split between processes, because all of them save together.

    Raises:
        CheckpointError: Leaves that cannot be saved (all of them are named), or two keys of a dict that are the same string.

    >>> import jax.numpy as jnp
    >>> to_plain({"dense": {"bias": jnp.zeros(2)}, "key": jax.random.key(7)}, root="train")
    Plain(tree={'dense': {'bias': Array([0., 0.], dtype=float32)}, 'key': Array([0, 7], dtype=uint32)}, key_impls={'train/key': 'threefry2x32'})
    """
    if isinstance(tree, Plain):
        return tree
    faults: list[str] = []
    impls: dict[str, str] = {}

    def checked(path: str, leaf: Any) -> Any:
        fault = _fault(leaf, may_span)
        if fault is not None:
            faults.append(f"{path} {fault}")
            return None
        if is_key(leaf):
            impls[path] = str(jax.random.key_impl(leaf))
            return jax.random.key_data(leaf)
        return _native(leaf)

    plain = _plain(tree, root, keep_lists, checked)
    if faults:
        raise CheckpointError(f"Cannot be saved in a checkpoint: {'; '.join(faults)}.")
    return Plain(plain, impls)


def only_split(plain: Plain) -> Plain:
    """Returns of a tree the arrays that are split between processes, and nothing else: what processes but the first have to do with a save."""

    def pruned(node: Any) -> dict[str, Any]:
        children = {key: pruned(child) if isinstance(child, dict) else child for key, child in node.items()}
        return {key: child for key, child in children.items() if (child if isinstance(child, dict) else spans_processes(child))}

    return Plain(pruned(plain.tree) if isinstance(plain.tree, dict) else {}, {})


def unpack(packed: Packed, *, lists_in: Collection[str] = ()) -> dict[str, Plain]:
    """Returns the subtrees of a copy that the device made, as `to_plain` does; waits until it is there.

    Args:
        packed: Of a dict of trees.
        lists_in: The names of those whose lists and tuples become lists.

    Raises:
        CheckpointError: As `to_plain`.

    >>> import jax.numpy as jnp
    >>> unpack(Packed({"train": {"w": jnp.zeros(2), "key": jax.random.key(7)}}))
    {'train': Plain(tree={'key': array([0, 7], dtype=uint32), 'w': array([0., 0.], dtype=float32)}, key_impls={'train/key': 'threefry2x32'})}
    """
    leaves = packed.leaves()

    def filled(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: filled(child) for key, child in node.items()}
        if isinstance(node, list):
            return [filled(child) for child in node]
        return None if node is None else leaves[node]

    return {root: Plain(filled(plain.tree), plain.key_impls) for root, plain in _numbered(packed.form, tuple(lists_in)).items()}


@functools.lru_cache(maxsize=16)
def _numbered(form: Form, lists_in: tuple[str, ...]) -> dict[str, Plain]:
    """Returns the subtrees with leaves' numbers in place of leaves."""
    trees = form.treedef.unflatten(range(len(form.leaves)))
    plains = {}
    for root, tree in trees.items():
        impls: dict[str, str] = {}

        def numbered(path: str, number: int | None, impls: dict[str, str] = impls) -> int | None:
            impl = None if number is None else form.leaves[number].impl
            if impl is not None and not isinstance(impl, str):
                raise CheckpointError(f"Cannot be saved in a checkpoint: {path} is a key of the unregistered implementation {impl}.")
            impls |= {path: impl} if impl else {}
            return number

        plains[root] = Plain(_plain(tree, root, root in lists_in, numbered), impls)
    return plains


def host_copy(plain: Plain, *, only_numpy: bool = False) -> Plain:
    """Returns `plain` with all arrays in host memory of their own: what is done to the originals afterwards (donation, changes in place) does not reach them.

    All copies from devices are started before the first is waited for; a replicated array is copied once, and one that is on the host already once. One that is
    split over devices stays split, in the memory of the host.

    Args:
        plain: The tree.
        only_numpy: Whether JAX's arrays stay as they are, because nobody donates them.

    >>> state = {"w": np.zeros(2)}
    >>> copy = host_copy(to_plain(state))
    >>> state["w"] += 1
    >>> copy.tree
    {'w': array([0., 0.])}
    """
    # Paths are not needed, and making them takes longer than copying a small model.
    kinds: Any = np.ndarray if only_numpy else (jax.Array, np.ndarray)
    leaves = list(leaves_of(plain.tree))
    spread = iter([] if only_numpy else copy_to_host_memory([leaf for leaf in leaves if is_spread(leaf)]))
    arrays = [leaf for leaf in leaves if isinstance(leaf, kinds) and not is_spread(leaf)]
    fetched = fetch((array for array in arrays if isinstance(array, jax.Array)), ahead_bytes=math.inf)
    arena = Arena(sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays))

    def copy(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: copy(child) for key, child in node.items()}
        if isinstance(node, list):
            return [copy(child) for child in node]
        if not isinstance(node, kinds):
            return node
        if is_spread(node):
            return next(spread)
        value = next(fetched) if isinstance(node, jax.Array) else node
        if isinstance(node, jax.Array) and not _may_share(node):
            return value
        own = arena.empty(value.shape, value.dtype)
        own[...] = value
        return own

    return Plain(copy(plain.tree), plain.key_impls)


def leaves_of(node: Any) -> Iterator[Any]:
    """Yields the leaves of a `Plain` tree."""
    if isinstance(node, (dict, list)):
        for child in node.values() if isinstance(node, dict) else node:
            yield from leaves_of(child)
    else:
        yield node


def fetch(arrays: Iterable[jax.Array], *, ahead_bytes: float) -> Iterator[np.ndarray[Any, Any]]:
    """Yields arrays' values on the host, one after another; on a CPU they may be the arrays' own memory.

    Nothing is kept: an array that was fetched this way does not hold its value on the host afterwards, as one does that went through `np.asarray`.

    Args:
        arrays: Whole on this process.
        ahead_bytes: How much of the next arrays is copied from their device meanwhile.
    """
    started: collections.deque[tuple[int, Callable[[], np.ndarray[Any, Any]]]] = collections.deque()
    num_bytes = 0
    for array in arrays:
        started.append((array.nbytes, _start(array)))
        num_bytes += started[-1][0]
        while started and num_bytes > ahead_bytes:
            size, value = started.popleft()
            num_bytes -= size
            yield value()
    while started:
        yield started.popleft()[1]()


def _start(array: jax.Array) -> Callable[[], np.ndarray[Any, Any]]:
    """Starts the copy of an array to the host and returns what waits for it."""
    if array.is_fully_replicated:
        piece = array.addressable_data(0)
        if not _may_share(array):
            piece.copy_to_host_async()
        return functools.partial(np.asarray, piece)
    # addressable_data again, because shards live as long as their array, and so would the values that they cache.
    pieces = [(shard.index, shard.data.addressable_data(0)) for shard in array.addressable_shards if shard.replica_id == 0]
    for _, piece in pieces:
        piece.copy_to_host_async()

    def put_together() -> np.ndarray[Any, Any]:
        whole = np.empty(array.shape, array.dtype)
        for index, piece in pieces:
            whole[index] = np.asarray(piece)
        return whole

    return put_together


def _may_share(array: jax.Array) -> bool:
    """Returns whether the value that `fetch` yields may be the memory of `array` itself."""
    return array.is_fully_replicated and _is_on_host(array.sharding)


@functools.lru_cache(maxsize=256)
def _is_on_host(sharding: jax.sharding.Sharding) -> bool:
    return sharding.memory_kind != "device" or any(device.platform == "cpu" for device in sharding.device_set)  # type: ignore[attr-defined]


def _plain(node: Any, path: str, keep_lists: bool, leaf: Callable[[str, Any], Any], depth: int = 0) -> Any:
    """Returns `node` as nested dicts, with what `leaf(path, leaf)` returns in place of each leaf."""
    if node is None or isinstance(node, (str, bytes, bool, int, float, np.generic, np.ndarray, jax.Array)):
        return leaf(path, node)
    if depth > MAX_DEPTH:
        raise CheckpointError(f"Cannot be saved in a checkpoint: {path[:100]}... is nested more than {MAX_DEPTH} levels deep.")
    if isinstance(node, (list, tuple)) and not hasattr(node, "_fields"):
        items = [_plain(item, join(path, str(index)), keep_lists, leaf, depth + 1) for index, item in enumerate(node)]
        return items if keep_lists else {str(index): item for index, item in enumerate(items)}
    children = _children(node, path)
    if children is None:
        return leaf(path, node)
    return {key: _plain(child, join(path, key), keep_lists, leaf, depth + 1) for key, child in children.items()}


def _as_it_is(path: str, leaf: Any) -> Any:
    return leaf


def _children(node: Any, path: str) -> dict[str, Any] | None:
    """Returns what `node` holds by the names flax gives it, or those JAX gives it where flax does not know its type; `None` for a leaf."""
    if isinstance(node, Mapping):
        pairs = [(str(key), child) for key, child in node.items()]
    elif isinstance(node, TrainState):
        pairs = list(arrays_of(node).items())  # flax's function would go all the way down.
    elif hasattr(node, "_fields"):
        # Not flax's function: it would turn the lists deeper inside into dicts.
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
        raise CheckpointError(f"Cannot be saved in a checkpoint: two keys of {path or 'the tree'} are the same string: {[key for key, _ in pairs]}.")
    if CHUNKED in children:
        raise CheckpointError(f"Cannot be saved in a checkpoint: {path or 'the tree'} has the key {CHUNKED!r}, which marks large arrays in the file.")
    return children


def _fault(leaf: Any, may_span: bool) -> str | None:
    """Returns why a leaf cannot be saved, as the end of a sentence that begins with its path."""
    if isinstance(leaf, jax.Array):
        return _array_fault(leaf, may_span)
    if isinstance(leaf, np.str_) or leaf is None or isinstance(leaf, (bool, bytes)):
        return None
    if isinstance(leaf, (np.ndarray, np.generic)):
        return None if is_storable(leaf.dtype.newbyteorder("=")) else f"has dtype {leaf.dtype}, only numbers and booleans can be saved"
    if isinstance(leaf, str):
        return None if leaf.isascii() or _is_unicode(leaf) else f"is {leaf!r}, which is not valid Unicode"
    if isinstance(leaf, int):
        return None if -(2**63) <= leaf < 2**64 else f"is the integer {leaf}, which needs more than 64 bits; save it as a string"
    return None if isinstance(leaf, float) else f"is a {type(leaf).__name__}; only arrays, numbers, strings, bytes and None can be saved"


def _array_fault(leaf: jax.Array, may_span: bool) -> str | None:
    if leaf.is_deleted():
        return "has been deleted (it was donated to a compiled function)"
    if not may_span and spans_processes(leaf):
        return "is spread over several processes, which this format cannot write"
    if is_key(leaf) and not isinstance(jax.random.key_impl(leaf), str):
        return f"is a key of the unregistered implementation {jax.random.key_impl(leaf)}"
    return None


def _is_unicode(text: str) -> bool:
    # A lone surrogate, as in a file name that is not UTF-8, has no encoding.
    return not any("\ud800" <= character <= "\udfff" for character in text)


def is_storable(dtype: np.dtype[Any]) -> bool:
    """Returns whether flax's reader finds `dtype` again by its name; not so objects, strings, records and dates."""
    try:
        return not dtype.hasobject and dtype.itemsize > 0 and dtype.name.isidentifier() and np.dtype(dtype.name) == dtype
    except TypeError:
        return False


def _native(leaf: Any) -> Any:
    """Returns a leaf as the file holds it: arrays in the machine's byte order (the file does not name one), no subclasses of NumPy's and Python's types."""
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, np.ndarray):
        return np.asarray(leaf, dtype=leaf.dtype.newbyteorder("="))
    if isinstance(leaf, str):
        return str.__str__(leaf)  # str(leaf) of an enum would be its name.
    if isinstance(leaf, bytes):
        return bytes(leaf)
    if leaf is None or isinstance(leaf, (bool, np.generic)):
        return leaf
    return int(leaf) if isinstance(leaf, int) else float(leaf)


def join(path: str, key: str) -> str:
    key = key.replace("~", "~0").replace("/", "~1")
    return f"{path}/{key}" if path else key


def walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields `(path, leaf)` of nested dicts and lists; `None` is a leaf, empty containers hold none."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield from walk(child, join(path, key))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from walk(child, join(path, str(index)))
    else:
        yield path, node


def map_leaves(node: Any, path: str, function: Callable[[str, Any], Any]) -> Any:
    if isinstance(node, dict):
        return {key: map_leaves(child, join(path, key), function) for key, child in node.items()}
    if isinstance(node, list):
        return [map_leaves(child, join(path, str(index)), function) for index, child in enumerate(node)]
    return function(path, node)


class _Leaf:
    """A leaf of the target by its place in `jax.tree.leaves`; a class that neither JAX nor flax knows, so both take it for a leaf."""

    def __init__(self, index: int) -> None:
        self.index = index


def shown(path: str) -> str:
    """Returns a path in the file as users know it: parameters begin with `params/`, a collection with its own name, the rest of the state with its field.

    >>> shown("train/params/Dense_0/kernel"), shown("train/model_state/batch_stats/BatchNorm_0/mean"), shown("run/sums/loss")
    ('params/Dense_0/kernel', 'batch_stats/BatchNorm_0/mean', 'run/sums/loss')
    """
    return path.removeprefix("train/").removeprefix("model_state/")


def leaf_paths(target: PyTree, root: str = "") -> tuple[list[Any], Any, dict[str, int]]:
    """Returns `jax.tree.flatten(target)`, and for the path of each leaf its place among them."""
    leaves, treedef = jax.tree.flatten(target)
    # flax's names, JAX's order: number the leaves, let the same walk as in saving find the paths, then put the tree together by number. So everything that
    # can be saved can be restored, whoever registered its type.
    numbered = jax.tree.unflatten(treedef, [_Leaf(index) for index in range(len(leaves))])
    return leaves, treedef, {path: leaf.index for path, leaf in walk(_plain(numbered, root, False, _as_it_is), root) if isinstance(leaf, _Leaf)}


def fit_leaf(target: Any, saved: Any, impl: str | None) -> tuple[Any, str | None]:
    """Returns a saved leaf as `target` has it, and in what the two differ, as the end of a sentence that begins with its path, or `None`.

    Args:
        target: An array, a `jax.ShapeDtypeStruct` or a Python value.
        saved: The leaf; a typed key as key data.
        impl: The implementation of a typed key.

    >>> fit_leaf(jax.ShapeDtypeStruct((2,), np.float32), np.ones(3, np.float32), None)[1]
    'is (3,) on disk but (2,) here'
    """
    try:
        leaf = _with_key(saved, impl)
    except (TypeError, ValueError) as error:
        return saved, f"is a key that this JAX cannot make ({error})"
    return _like(target, leaf), _difference(leaf, target)


def restore_tree(target: PyTree, saved: Any, *, where: str, root: str, key_impls: Mapping[str, str], advice: str = "") -> PyTree:
    """Returns `saved` in the structure of `target`.

    `None` and empty containers hold nothing, so they fit each other.

    Args:
        target: What the tree should look like; leaves are arrays, `jax.ShapeDtypeStruct` or Python values. Its values are not read.
        saved: Nested dicts as `read_state` returns them.
        where: What errors call the checkpoint, such as its path.
        root: The path of `saved` in the file, such as `train` or `train/params`.
        key_impls: `metadata["key_impls"]`.
        advice: A sentence that the error ends with.

    Returns:
        A tree like `target` with NumPy arrays, typed keys, and Python values where the target has them.

    Raises:
        RestoreError: Paths, shapes, dtypes or key implementations differ; one error names them all.

    >>> target = {"w": jax.ShapeDtypeStruct((2,), np.float32), "b": 0}
    >>> restore_tree(target, {"w": np.ones(3, np.float32)}, where="runs/a/step_00000001", root="train", key_impls={})
    Traceback (most recent call last):
    fitflax.errors.RestoreError: runs/a/step_00000001 does not fit this model: missing b; w is (3,) on disk but (2,) here.
    """
    leaves, treedef, paths = leaf_paths(target, root)
    found = {path: leaf for path, leaf in walk(saved, root) if leaf is not None}
    differing = (("missing", paths.keys() - found), ("unexpected", found.keys() - paths))
    faults = [f"{title} {', '.join(sorted(map(shown, names)))}" for title, names in differing if names]
    differing_leaves: list[str] = []
    for path in sorted(paths.keys() & found):
        leaves[paths[path]], difference = fit_leaf(leaves[paths[path]], found[path], key_impls.get(path))
        faults += [f"{shown(path)} {difference}"] if difference else []
        differing_leaves += [path] if difference else []
    if faults:
        # Of parameters that fit, another optimizer's state.
        is_optimizers = root in ("train", "train/opt_state") and all(
            path.startswith("train/opt_state") for path in {*paths.keys() ^ found.keys(), *differing_leaves}
        )
        what, also = ("optimizer", "Compile with the one it was saved with, or restore it with weights_only=True.") if is_optimizers else ("model", advice)
        raise RestoreError(f"{where} does not fit this {what}: {'; '.join(faults)}.{f' {also}' if also else ''}")
    return jax.tree.unflatten(treedef, leaves)


def refit(target: PyTree, tree: PyTree, *, where: str, root: str, advice: str = "") -> PyTree:
    """Returns the leaves of `tree`, wherever they lie, in the structure of `target`, which has the same paths.

    Args:
        target: As in `restore_tree`.
        tree: Any tree, such as a live state whose containers are a checkpoint's nested dicts.
        where: As in `restore_tree`.
        root: As in `restore_tree`.
        advice: As in `restore_tree`.

    Raises:
        RestoreError: As in `restore_tree`.

    >>> refit({"b": (0, 0)}, {"b": {"0": 1, "1": 2}}, where="a state", root="train")
    {'b': (1, 2)}
    """
    return restore_tree(target, _plain(tree, root, False, _as_it_is), where=where, root=root, key_impls={}, advice=advice)


def from_saved(saved: Any, *, root: str = "run", key_impls: Mapping[str, str] | None = None) -> Any:
    """Returns a tree that was saved without a target in mind, as plain dicts and lists, Python values and NumPy arrays.

    Args:
        saved: As `read_state` returns it.
        root: The path of `saved` in the file.
        key_impls: `metadata["key_impls"]`; typed keys become typed keys again. Without it they stay key data.

    Returns:
        New dicts and lists; the arrays are those of `saved`. Tuples have become lists, and all keys strings.

    Raises:
        RestoreError: This JAX does not have the implementation of a key.

    >>> from_saved({"rows": [1, 2.0, None, "x"]})
    {'rows': [1, 2.0, None, 'x']}
    """

    def restore(path: str, leaf: Any) -> Any:
        try:
            return _with_key(leaf, (key_impls or {}).get(path))
        except (TypeError, ValueError) as error:
            raise RestoreError(f"{path} is a key that this JAX cannot make ({error}).") from error

    return map_leaves(saved, root, restore)


def _with_key(leaf: Any, impl: str | None) -> Any:
    return leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)


def _difference(saved: Any, target: Any) -> str | None:
    (saved_type, saved_shape), (target_type, target_shape) = _describe(saved), _describe(target)
    if saved_type == target_type:
        return None if saved_shape == target_shape else f"is {saved_shape} on disk but {target_shape} here"
    if saved_shape == target_shape:
        return f"is {saved_type} on disk but {target_type} here"
    return f"is {f'{saved_type} {saved_shape}'.strip()} on disk but {f'{target_type} {target_shape}'.strip()} here"


def _describe(leaf: Any) -> tuple[str, str]:
    if hasattr(leaf, "dtype"):
        return str(leaf.dtype.name), str(tuple(leaf.shape))
    return type(leaf).__name__, ""


def _like(target: Any, saved: Any) -> Any:
    if isinstance(target, np.generic):
        return np.asarray(saved)[()]
    return np.asarray(saved) if isinstance(saved, np.generic) else saved
