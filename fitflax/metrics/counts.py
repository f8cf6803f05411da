"""`Counts`, the base of metrics that are functions of weighted counts: of hits and misses, of pairs of classes, of scores in bins."""

import abc
import dataclasses
from typing import Any, ClassVar, Self

import jax
import numpy as np
from flax import struct
from typing_extensions import override

from fitflax.errors import MetricError
from fitflax.metrics.base import Direction, Metric, add_pairs, pair, pair_field, static_field, zero_pair

__all__ = ["Counts"]


@struct.dataclass
class Counts(Metric):
    """Weighted counts that add up: a subclass says what is counted in a batch, and what follows from the counts.

    Attributes:
        name: The log key.
        direction: What is better.
        counts: Sums of weights, float32 pairs `[..., 2]`; `[2]` while empty, because what there is to count follows from the first batch's shapes.
    """

    additive: ClassVar[bool] = True

    _: dataclasses.KW_ONLY
    name: str = static_field("counts")
    direction: Direction | None = static_field(None)
    counts: jax.Array = pair_field()

    @abc.abstractmethod
    def count(self, outputs: Any, targets: Any, weights: Any) -> jax.Array:
        """Returns the counts of one batch, float32 `[...]`, at least one axis."""

    @override
    def empty(self) -> Self:
        return dataclasses.replace(self, counts=zero_pair())

    @override
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        return self.merge(dataclasses.replace(self, counts=pair(self.count(outputs, targets, weights))))

    @override
    def merge(self, other: Self) -> Self:
        mine, theirs = np.shape(self.counts), np.shape(other.counts)
        if mine != theirs and (2,) not in (mine, theirs):
            # Broadcasting would make a number of it.
            raise MetricError(f"Metric {self.name!r} cannot join counts of other shapes: {list(mine[:-1])} and {list(theirs[:-1])}. They are of other classes.")
        return dataclasses.replace(self, counts=add_pairs(self.counts, other.counts))
