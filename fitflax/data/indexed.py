"""Sources whose rows can be had by their numbers: order by `(seed, pass)` alone, so that any position can be sought at once."""

import abc
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from typing_extensions import override

from fitflax.data.batch import Position, Triple
from fitflax.data.passes import RowsPass
from fitflax.data.streams import Source
from fitflax.errors import ConfigError, DataError
from fitflax.integers import is_integer

__all__ = ["IndexedSource", "check_batch_size"]


class IndexedSource(Source):
    """Batches of rows that can be had by their numbers.

    Args:
        rows: How many there are.
        batch_size: Rows of a batch; the last one of a pass may be shorter.
        shuffle: Whether each pass has its own order.
        seed: What the order of a pass follows from, together with its number.
        drop_remainder: Whether the short last batch is left out.

    Raises:
        DataError: There are no examples, or none are left by `drop_remainder`.
        ConfigError: `batch_size` is not a positive integer.
    """

    knows_length = True
    owns_batches = True

    def __init__(self, rows: int, *, batch_size: int, shuffle: bool, seed: int, drop_remainder: bool) -> None:
        check_batch_size(batch_size)
        self.num_examples = rows - rows % batch_size if drop_remainder else rows
        if not self.num_examples:
            raise DataError(f"There is nothing to work on: {rows} examples, batch_size={batch_size}, drop_remainder={drop_remainder}.")
        self._rows = rows
        self.batch_size = int(batch_size)
        self.num_batches = math.ceil(self.num_examples / batch_size)
        self.shuffles = shuffle
        self._seed = seed
        self._drop_remainder = drop_remainder

    @abc.abstractmethod
    def read(self, rows: Any) -> Triple:
        """Returns the given rows: a slice, or an array of their numbers."""

    @abc.abstractmethod
    def divide(self, fraction: float, batch_size: int | None = None) -> "tuple[IndexedSource, IndexedSource]":
        """Returns the first part, to train on, and the last `fraction` of the rows, in the order given, before any shuffling.

        Args:
            fraction: How much of it is held out.
            batch_size: Rows of a batch of the part held out; by default as of the other.

        Raises:
            DataError: One of the parts would be empty.
        """

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        assert self.batch_size is not None and self.num_examples is not None
        order = np.random.default_rng([self._seed, position.passes]).permutation(self._rows) if self.shuffles else None
        return RowsPass(self.read, range(position.examples, self.num_examples), self.batch_size, order)

    def cut(self, fraction: float) -> int:
        """Returns how many rows the first part has.

        Raises:
            DataError: One of the parts would be empty.
        """
        cut = math.floor(self._rows * (1.0 - fraction))
        if not 0 < cut < self._rows:
            raise DataError(f"validation_split={fraction} of {self._rows} examples leaves {cut} to train on and {self._rows - cut} to validate on.")
        return cut

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that the part to train on takes over."""
        return {"batch_size": self.batch_size, "shuffle": bool(self.shuffles), "seed": self._seed, "drop_remainder": self._drop_remainder}


def check_batch_size(batch_size: Any) -> None:
    """Checks the number of rows of a batch.

    Raises:
        ConfigError: It is not a positive integer.
    """
    if not is_integer(batch_size, 1):
        raise ConfigError(f"batch_size must be a positive integer. Received: {batch_size!r}.")
