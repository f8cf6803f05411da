"""In-memory arrays as a source."""

import math
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from fitflax.data.batch import Triple, check_weights, num_examples, to_numpy
from fitflax.data.indexed import IndexedSource, check_batch_size
from fitflax.errors import DataError
from fitflax.state import PyTree

__all__ = ["ArraySource"]

# Of what is read in one go: so many batches, if they stay in a core's cache.
_MAX_BATCHES = 16
_BLOCK_BYTES = 2**22
# In bytes, of XLA's buffers on CPUs.
_ALIGNMENT = 64


class ArraySource(IndexedSource):
    """Batches cut from arrays `[examples, ...]`.

    Args:
        x: Inputs, any pytree of arrays.
        y: Targets, `()` for none.
        weights: Sample weights `[examples]` or `[examples, ...]`, `None` for none.
        batch_size: Rows of a batch; the last one of a pass may be shorter.
        shuffle: Whether each pass has its own order.
        seed: What the order of a pass follows from, together with its number.
        drop_remainder: Whether the short last batch is left out.

    Raises:
        DataError: Unequal lengths, no examples, or none left by `drop_remainder`.
        ConfigError: `batch_size` is not a positive integer.
    """

    is_checked = True

    def __init__(
        self, x: PyTree, y: PyTree = (), weights: Any = None, *, batch_size: int = 32, shuffle: bool = False, seed: int = 0, drop_remainder: bool = False
    ) -> None:
        check_batch_size(batch_size)
        check_weights(weights)
        named = {"x": _canonical(x, "x"), "y": _canonical(y, "y"), "sample_weight": _canonical(weights, "sample_weight")}
        lengths = {name: num_examples(tree, name=name) for name, tree in named.items() if jax.tree.leaves(tree)}
        if len(set(lengths.values())) > 1:
            raise DataError("All arrays must have the same number of examples: " + ", ".join(f"`{k}` has {v}" for k, v in lengths.items()) + ".")
        self.x, self.y, self.weights = named.values()
        self._leaves, self._structure = jax.tree.flatten((self.x, self.y, self.weights))
        super().__init__(lengths.get("x", 0), batch_size=batch_size, shuffle=shuffle, seed=seed, drop_remainder=drop_remainder)

    @property
    @override
    def batches_at_once(self) -> int:
        row_bytes = sum(leaf.nbytes for leaf in self._leaves) / self._rows
        return max(1, min(_MAX_BATCHES, int(_BLOCK_BYTES / (row_bytes * self.options["batch_size"]))))

    @override
    def read(self, rows: Any) -> Triple:
        # A slice is a view; only shuffled rows are copied.
        cut = [leaf[rows] if isinstance(rows, slice) else _take(leaf, rows) for leaf in self._leaves]
        return Triple(*jax.tree.unflatten(self._structure, cut))

    @override
    def divide(self, fraction: float, batch_size: int | None = None) -> "tuple[ArraySource, ArraySource]":
        head, tail = self.split(fraction)
        return ArraySource(*head, **self.options), ArraySource(*tail, batch_size=batch_size or self.options["batch_size"])

    def split(self, fraction: float) -> "tuple[tuple[PyTree, PyTree, Any], tuple[PyTree, PyTree, Any]]":
        """Returns `(x, y, weights)` of the first part and of the last `fraction`, in the order given, before any shuffling.

        Raises:
            DataError: One of the parts would be empty.
        """
        cut = self.cut(fraction)
        return tuple(self.read(slice(cut))), tuple(self.read(slice(cut, None)))


def _take(leaf: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns `leaf[rows]` in memory that is aligned so that JAX on a CPU need not copy it once more."""
    shape = (len(rows), *leaf.shape[1:])
    num_bytes = math.prod(shape) * leaf.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    begin = -memory.__array_interface__["data"][0] % _ALIGNMENT
    taken = memory[begin : begin + num_bytes].view(leaf.dtype).reshape(shape)
    return leaf.take(rows, axis=0, out=taken, mode="clip")  # Other modes make a copy on the way.


def _canonical(tree: PyTree, name: str) -> PyTree:
    """Returns `tree` as NumPy arrays in the dtypes that JAX computes in (float64 becomes float32), converted once instead of in every step."""
    arrays = to_numpy(tree, name=name)
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False), arrays)
