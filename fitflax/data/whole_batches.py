"""Batches that are passed whole: their input arrays share no axis of examples, as in graphs, so only the user can split, pad or shuffle them.

This module distinguishes them from batches of rows, counts their examples, and concatenates several of them, one for each device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.errors import DataError
from fitflax.leaves import listed
from fitflax.state import PyTree

__all__ = [
    "Form",
    "Scalar",
    "boxed",
    "describe_leaves",
    "form_of",
    "has_rows",
    "is_structure",
    "joined",
    "leaf_paths",
    "num_examples",
    "unboxed",
    "without_padding",
]


def leaf_paths(tree: PyTree, name: str) -> list[tuple[str, Any]]:
    """Returns `(path, leaf)` for every leaf, with paths in Python syntax: `x['image'][0]`."""
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def describe_leaves(x: PyTree, y: PyTree, weights: Any) -> dict[str, str]:
    """Returns the dtypes and shapes of a batch: `{"x": "float32[32, 28]", "y['label']": "int32[32]"}`.

    >>> describe_leaves({"a": np.ones((2, 3))}, (), None)
    {"x['a']": 'float64[2, 3]'}
    """
    named = [*leaf_paths(x, "x"), *leaf_paths(y, "y"), *leaf_paths(weights, "sample_weight")]
    return {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in named}


def num_examples(tree: PyTree, *, name: str) -> int:
    """Returns the length of the leading axis that all leaves of `tree` share. Raises a `DataError` if there is none."""
    leaves = leaf_paths(tree, name)
    if not leaves:
        raise DataError(f"`{name}` holds no arrays.")
    for path, leaf in leaves:
        if not getattr(leaf, "shape", ()):
            raise DataError(f"Every array must have a leading axis of examples: {path} is {_describe(leaf)}. Put single examples into batches first.")
    lengths = {path: int(leaf.shape[0]) for path, leaf in leaves}
    if len(set(lengths.values())) > 1:
        received = listed([f"{path} has {length}" for path, length in lengths.items()])
        raise DataError(f"All arrays must have the same number of examples: {received}.")
    return next(iter(lengths.values()))


def _describe(leaf: Any) -> str:
    shape = getattr(leaf, "shape", None)
    return f"a {type(leaf).__name__}" if shape is None else f"a {type(leaf).__name__} of shape {tuple(shape)}"


@jax.tree_util.register_pytree_with_keys_class
class Scalar:
    """A scalar of a batch that is passed whole, with an axis so that each device can have its own value; a step sees it without that axis."""

    def __init__(self, value: Any) -> None:
        self.value = value  # `[devices]`; in several batches for one call of a step, devices are the last axis.

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], None]:
        """Returns the array under a key that prints as nothing, because this class is invisible to users."""
        return ((_EmptyKey(), self.value),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> "Scalar":
        """Returns a scalar from its array."""
        return cls(children[0])


class _EmptyKey:
    """A key that adds nothing to a path."""

    def __str__(self) -> str:
        return ""


def unboxed(tree: PyTree) -> PyTree:
    """Returns a tree as a device sees it: scalars without their extra axis."""
    return jax.tree.map(lambda node: node.value[..., 0] if isinstance(node, Scalar) else node, tree, is_leaf=lambda node: isinstance(node, Scalar))


def boxed(tree: PyTree) -> PyTree:
    """Returns a tree whose scalars have an extra axis, as `Scalar`."""
    return jax.tree.map(lambda leaf: leaf if leaf.shape else Scalar(leaf.reshape(1)), tree)


def joined(trees: Sequence[PyTree]) -> PyTree:
    """Returns trees of the same structure with their arrays concatenated."""
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *leaves: (jnp if isinstance(leaves[0], jax.Array) else np).concatenate(leaves), *trees)


class Form(NamedTuple):
    """Whether a batch has rows or is passed whole, and its number of examples."""

    rows: int  # Of all its arrays; of `y` and the weights if it is passed whole; 1 if it cannot be counted.
    real: Any = None  # bool `[rows]`, which rows are examples, if it is passed whole; `None` if all its arrays have rows.
    is_counted: bool = True  # Whether its examples can be counted.

    @property
    def examples(self) -> int:
        """By how many examples it advances the position of the data: the real ones, at least one."""
        return self.rows if self.real is None else max(1, int(self.real.sum()))


def form_of(x: PyTree, y: PyTree, weights: Any, *, must_count: bool = True) -> Form:
    """Returns whether a batch has rows or is passed whole, and its number of examples. This depends on shapes and weights only.

    With `must_count`, it raises a `DataError` if the examples cannot be counted.

    >>> ragged = {"nodes": np.ones((7, 2)), "num_nodes": np.array([3, 4])}
    >>> form_of(ragged, (), np.array([1.0, 0.0])).real.tolist(), form_of(np.ones((2, 3)), np.ones(2), None)
    ([True, False], Form(rows=2, real=None, is_counted=True))
    """
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(x)}
    counting = {np.shape(leaf)[:1] for leaf in jax.tree.leaves((y, weights))}
    if len(lengths | counting) == 1 and len(lengths) == 1 and lengths != {()}:
        return Form(next(iter(lengths))[0])
    named = {"x": x, "y": y} | ({} if weights is None else {"sample_weight": weights})
    is_one = is_structure(x)
    if not (is_one or len(lengths) > 1) or _has_number_lists(x):
        return Form(num_examples(named, name="batch"))
    if not counting:
        if must_count:
            received = listed([f"{path} has {np.shape(leaf)[0] if np.shape(leaf) else 'no axis'}" for path, leaf in leaf_paths(x, "x")])
            raise DataError(
                f"All arrays must have the same number of examples: {received}. For graphs, or other inputs that the module takes whole, targets or weights "
                "must give the number of examples: yield (x, y), or (x, (), sample_weight) with weights [examples], 0 for padding."
            )
        return Form(1, np.ones(1, bool), is_counted=False)
    rows = num_examples({name: tree for name, tree in named.items() if name != "x"}, name="batch")
    return Form(rows, np.ones(rows, bool) if weights is None else (np.asarray(weights).reshape(rows, -1) != 0).any(axis=1))


def is_structure(tree: PyTree) -> bool:
    """Returns whether a tree is, or contains, a pytree node other than a list, tuple or dict, such as a NamedTuple or a dataclass.

    >>> is_structure({"a": (1, [2])}), is_structure(Form(3))
    (False, True)
    """
    if type(tree) in (tuple, list):
        return any(is_structure(part) for part in tree)
    if isinstance(tree, dict):
        return any(is_structure(part) for part in tree.values())
    return tree is not None and not jax.tree_util.all_leaves([tree])


def _has_number_lists(tree: PyTree) -> bool:
    """Returns whether a tree contains lists of numbers instead of arrays."""

    def is_list(node: Any) -> bool:
        return type(node) is list and any(jax.tree_util.all_leaves([part]) and not np.shape(part) for part in node)

    return any(map(is_list, jax.tree.leaves(tree, is_leaf=is_list)))


def has_rows(x: PyTree, rows: int) -> bool:
    """Returns whether all arrays of a batch's inputs have `rows` rows, so that it is not passed whole."""
    return all(leaf.shape[:1] == (rows,) for leaf in jax.tree.leaves(x))


def without_padding(outputs: PyTree, real: Any) -> PyTree:
    """Returns the rows of outputs that are examples, for a batch that is passed whole.

    `outputs` are NumPy arrays with one row, or an equal number of rows, for each entry of `real`, which is bool, as in `Form`.

    >>> without_padding(np.arange(6), np.array([True, False])).tolist()
    [0, 1, 2]
    """
    return jax.tree.map(lambda leaf: leaf[np.repeat(real, len(leaf) // len(real))], outputs)
