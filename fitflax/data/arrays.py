"""A source over in-memory arrays."""

import math
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from fitflax.data.batch import Triple, check_not_negative, check_weights, to_numpy
from fitflax.data.indexed import IndexedSource, check_batch_size
from fitflax.data.whole_batches import is_structure, num_examples
from fitflax.errors import DataError
from fitflax.state import PyTree

__all__ = ["ArraySource"]

# A block of batches is read at once if it fits into a core's cache.
_MAX_BATCHES = 16
_BLOCK_BYTES = 2**22
# Of XLA's CPU buffers, in bytes.
_ALIGNMENT = 64


class ArraySource(IndexedSource):
    """Batches of arrays `[examples, ...]`: inputs, targets (`()` for none) and sample weights (`None` for none); other arguments as in `adapt`."""

    is_checked = True

    def __init__(
        self, x: PyTree, y: PyTree = (), weights: Any = None, *, batch_size: int = 32, shuffle: bool = False, seed: int = 0, drop_remainder: bool = False
    ) -> None:
        check_batch_size(batch_size)
        check_weights(weights)
        named = {"x": _canonical(x, "x"), "y": _canonical(y, "y"), "sample_weight": _canonical(weights, "sample_weight")}
        lengths = {name: _num_rows(tree, name) for name, tree in named.items() if jax.tree.leaves(tree)}
        if len(set(lengths.values())) > 1:
            raise DataError("All arrays must have the same number of examples: " + ", ".join(f"`{k}` has {v}" for k, v in lengths.items()) + ".")
        self.x, self.y, self.weights = named.values()
        check_not_negative(self.weights)
        self._leaves, self._structure = jax.tree.flatten((self.x, self.y, self.weights))
        super().__init__(lengths.get("x", 0), batch_size=batch_size, shuffle=shuffle, seed=seed, drop_remainder=drop_remainder)

    @property
    @override
    def batches_at_once(self) -> int:
        row_bytes = sum(leaf.nbytes for leaf in self._leaves) / self._rows
        return max(1, min(_MAX_BATCHES, int(_BLOCK_BYTES / (row_bytes * self.options["batch_size"]))))

    @override
    def read(self, rows: Any) -> Triple:
        cut = [leaf[rows] if isinstance(rows, slice) else _take_aligned(leaf, rows) for leaf in self._leaves]
        return Triple(*jax.tree.unflatten(self._structure, cut))

    @override
    def divide(self, fraction: float, batch_size: int | None = None) -> "tuple[ArraySource, ArraySource]":
        head, tail = self.split(fraction)
        return ArraySource(*head, **self.options), ArraySource(*tail, batch_size=batch_size or self.options["batch_size"])

    def split(self, fraction: float) -> "tuple[tuple[PyTree, PyTree, Any], tuple[PyTree, PyTree, Any]]":
        """Returns `(x, y, weights)` of the first part and of the last `fraction` of the rows, before any shuffling."""
        cut = self.cut(fraction)
        return tuple(self.read(slice(cut))), tuple(self.read(slice(cut, None)))


def _take_aligned(leaf: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns `leaf[rows]` in aligned memory, which JAX on CPU uses without another copy."""
    shape = (len(rows), *leaf.shape[1:])
    num_bytes = math.prod(shape) * leaf.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    begin = -memory.__array_interface__["data"][0] % _ALIGNMENT
    taken = memory[begin : begin + num_bytes].view(leaf.dtype).reshape(shape)
    return leaf.take(rows, axis=0, out=taken, mode="clip")  # Other modes copy twice.


def _num_rows(tree: PyTree, name: str) -> int:
    try:
        return num_examples(tree, name=name)
    except DataError as error:
        if not is_structure(tree):
            raise
        advice = "To pass graphs, or other inputs that the module takes whole, use a function that yields batches: (x, y) or (x, y, sample_weight)."
        raise DataError(f"In-memory data is split into batches, so its arrays must share an axis of examples. {error} {advice}") from None


def _canonical(tree: PyTree, name: str) -> PyTree:
    """Returns `tree` as NumPy arrays of JAX's canonical dtypes (float64 becomes float32), so that steps need not convert them."""
    arrays = to_numpy(tree, name=name)
    return jax.tree.map(lambda leaf: np.asarray(jax.device_get(leaf)).astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False), arrays)
