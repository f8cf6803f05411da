"""Sources whose rows are read by number. Their order depends on `(seed, pass)` only, so they can seek to any position."""

import abc
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from typing_extensions import override

from fitflax.data.batch import Position, Triple
from fitflax.data.resumable import RowsPass
from fitflax.data.sources import Source
from fitflax.errors import ConfigError, DataError
from fitflax.integers import is_integer

__all__ = ["IndexedSource", "check_batch_size"]


class IndexedSource(Source):
    """Batches of `rows` rows that are read by number; other arguments as in `adapt`."""

    knows_length = True
    owns_batches = True

    def __init__(self, rows: int, *, batch_size: int, shuffle: bool, seed: int, drop_remainder: bool) -> None:
        check_batch_size(batch_size)
        self.num_examples = rows - rows % batch_size if drop_remainder else rows
        if not self.num_examples:
            raise DataError(
                f"The data yields no batches. Received: {rows} examples, batch_size={batch_size}, drop_remainder={drop_remainder}. "
                "Pass more examples, or a smaller batch_size."
            )
        self._rows = rows
        self.batch_size = int(batch_size)
        self.num_batches = math.ceil(self.num_examples / batch_size)
        self.shuffles = shuffle
        self._seed = seed
        self._drop_remainder = drop_remainder

    @abc.abstractmethod
    def read(self, rows: Any) -> Triple:
        """Returns rows, given as a slice or as an array of row numbers."""

    @abc.abstractmethod
    def divide(self, fraction: float, batch_size: int | None = None) -> "tuple[IndexedSource, IndexedSource]":
        """Returns two sources: the first rows, to train on, and the last `fraction` of the rows, before any shuffling, with its own `batch_size` if given."""

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        assert self.batch_size is not None and self.num_examples is not None
        order = np.random.default_rng([self._seed, position.passes]).permutation(self._rows) if self.shuffles else None
        return RowsPass(self.read, range(position.examples, self.num_examples), self.batch_size, order)

    def cut(self, fraction: float) -> int:
        """Returns the number of rows of the first part when `fraction` of them is held out. Raises a `DataError` if a part would be empty."""
        cut = math.floor(self._rows * (1.0 - fraction))
        if not 0 < cut < self._rows:
            raise DataError(
                f"validation_split={fraction} of {self._rows} examples leaves {cut} for training and {self._rows - cut} for validation. "
                "Choose a fraction that leaves at least one for each."
            )
        return cut

    @property
    def options(self) -> dict[str, Any]:
        """The arguments with which to create the part to train on."""
        return {"batch_size": self.batch_size, "shuffle": bool(self.shuffles), "seed": self._seed, "drop_remainder": self._drop_remainder}


def check_batch_size(batch_size: Any) -> None:
    """Checks that a batch size is a positive integer."""
    if not is_integer(batch_size, 1):
        raise ConfigError(f"batch_size must be a positive integer. Received: {batch_size!r}.")
