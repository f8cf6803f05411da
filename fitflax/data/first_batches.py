"""A source of the first few batches of another source, the same in every pass."""

import itertools
from collections.abc import Iterator

import jax
import numpy as np
from typing_extensions import override

from fitflax.data.batch import Position, Triple, count_examples, to_numpy
from fitflax.data.resumable import drop
from fitflax.data.sources import Source
from fitflax.errors import DataError

__all__ = ["FirstBatches"]


class FirstBatches(Source):
    """The first `count` batches, or fewer, of another source's first pass, kept in memory.

    >>> from fitflax.data import adapt
    >>> few = FirstBatches(adapt(np.arange(7.0), batch_size=2, shuffle=False), 2)
    >>> [triple.x.tolist() for triple in few.open(Position(passes=3))], few.num_examples
    ([[0.0, 1.0], [2.0, 3.0]], 4)
    """

    owns_batches = True
    knows_length = True
    shuffles = False

    def __init__(self, source: Source, count: int) -> None:
        self._batches: list[Triple] = []
        for x, y, weights in itertools.islice(source.open(Position()), count):
            named = {"x": x, "y": y, "sample_weight": weights}
            arrays = {name: jax.tree.map(np.array, to_numpy(tree, name=name)) for name, tree in named.items()}
            self._batches.append(Triple(*arrays.values()))
        if not self._batches:
            raise DataError("The data yields no batches.")
        self.num_batches = len(self._batches)
        self.num_examples = sum(map(count_examples, self._batches))
        self.batch_size = source.batch_size
        self.is_shard = source.is_shard

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        return drop(iter(self._batches), position.examples, warns=False)
