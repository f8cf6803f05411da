"""In-memory arrays as a source: order by `(seed, pass)` alone, so that any position can be sought at once."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from fitflax.data.batch import Position, Triple, check_weights, num_examples, to_numpy
from fitflax.data.streams import Source
from fitflax.errors import ConfigError, DataError
from fitflax.state import PyTree

__all__ = ["ArraySource"]


class ArraySource(Source):
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

    knows_length = True
    owns_batches = True

    def __init__(
        self, x: PyTree, y: PyTree = (), weights: Any = None, *, batch_size: int = 32, shuffle: bool = False, seed: int = 0, drop_remainder: bool = False
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise ConfigError(f"batch_size must be a positive integer. Received: {batch_size!r}.")
        check_weights(weights)
        named = {"x": _canonical(x, "x"), "y": _canonical(y, "y"), "sample_weight": _canonical(weights, "sample_weight")}
        lengths = {name: num_examples(tree, name=name) for name, tree in named.items() if jax.tree.leaves(tree)}
        if len(set(lengths.values())) > 1:
            raise DataError("All arrays must have the same number of examples: " + ", ".join(f"`{k}` has {v}" for k, v in lengths.items()) + ".")
        self.x, self.y, self.weights = named.values()
        rows = lengths.get("x", 0)
        self.num_examples = rows - rows % batch_size if drop_remainder else rows
        if not self.num_examples:
            raise DataError(f"There is nothing to work on: {rows} examples, batch_size={batch_size}, drop_remainder={drop_remainder}.")
        self._rows = rows
        self.batch_size = int(batch_size)
        self.num_batches = math.ceil(self.num_examples / batch_size)
        self.shuffles = shuffle
        self._seed = seed

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        assert self.batch_size is not None and self.num_examples is not None
        order = np.random.default_rng([self._seed, position.passes]).permutation(self._rows) if self.shuffles else None
        for begin in range(position.examples, self.num_examples, self.batch_size):
            end = min(begin + self.batch_size, self.num_examples)
            # A slice is a view; only shuffled rows are copied.
            rows: Any = slice(begin, end) if order is None else order[begin:end]
            yield Triple(*jax.tree.map(lambda leaf, rows=rows: leaf[rows], (self.x, self.y, self.weights)))

    def split(self, fraction: float) -> "tuple[tuple[PyTree, PyTree, Any], tuple[PyTree, PyTree, Any]]":
        """Returns `(x, y, weights)` of the first part and of the last `fraction`, in the order given, before any shuffling.

        Raises:
            DataError: One of the parts would be empty.
        """
        cut = math.floor(self._rows * (1.0 - fraction))
        if not 0 < cut < self._rows:
            raise DataError(f"validation_split={fraction} of {self._rows} examples leaves {cut} to train on and {self._rows - cut} to validate on.")
        whole = (self.x, self.y, self.weights)
        head, tail = jax.tree.map(lambda leaf: leaf[:cut], whole), jax.tree.map(lambda leaf: leaf[cut:], whole)
        return head, tail


def _canonical(tree: PyTree, name: str) -> PyTree:
    """Returns `tree` as NumPy arrays in the dtypes that JAX computes in (float64 becomes float32), converted once instead of in every step."""
    arrays = to_numpy(tree, name=name)
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False), arrays)
