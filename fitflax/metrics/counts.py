"""`Counts`, the base class of metrics that are functions of weighted counts."""

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
    """Weighted counts that add up; a subclass defines what is counted in a batch and computes the metric from the counts.

    Attributes:
        counts: Sums of weights, float32 pairs `[..., 2]`; `[2]` while empty, because the shape follows from the first batch.
    """

    additive: ClassVar[bool] = True

    _: dataclasses.KW_ONLY
    name: str = static_field("counts")
    direction: Direction | None = static_field(None)
    counts: jax.Array = pair_field()

    @abc.abstractmethod
    def count(self, outputs: Any, targets: Any, weights: Any) -> jax.Array:
        """Returns the counts of a batch, float32 `[...]`, with at least one axis."""

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
            # Broadcasting would hide the mismatch.
            raise MetricError(
                f"Metric {self.name!r} cannot merge counts of different shapes: {list(mine[:-1])} and {list(theirs[:-1])}. "
                "All batches must have the same number of classes."
            )
        return dataclasses.replace(self, counts=add_pairs(self.counts, other.counts))
