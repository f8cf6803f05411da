"""Splits a replica's rows of a batch into micro-batches, and joins their results."""

import dataclasses
import math
import operator
from typing import Any, cast

import jax
import jax.numpy as jnp

from fitflax.errors import DataError
from fitflax.metrics import Metric
from fitflax.parallel import Strategy
from fitflax.state import Batch, PyTree

__all__ = ["Totals", "first_of", "merge_all", "split"]


def split(batch: Batch, steps: int, strategy: Strategy) -> Batch:
    """Returns a batch of `[rows, ...]` as micro-batches, `[steps, rows / steps, ...]`."""
    rows = batch.mask.shape[0]
    if rows % steps:
        raise DataError(
            f"compile(accumulate_steps={steps}) cannot split the {rows} examples of a replica into {steps} equal micro-batches. Use a batch size that is "
            "divisible by accumulate_steps times the number of replicas."
        )
    return cast(Batch, strategy.split(batch, steps))


def first_of(tree: PyTree) -> Any:
    """Returns the first entry along the axis of micro-batches."""
    return jax.tree.map(operator.itemgetter(0), tree)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Weights of all micro-batches of all replicas, which do not depend on the values of the loss."""

    real: jax.Array  # Number of real examples.
    weight: jax.Array  # Sum of the weights.
    shape: tuple[int, ...]  # Shape of the weights after the axis of examples.

    @classmethod
    def of(cls, weights: jax.Array, mask: jax.Array, strategy: Strategy) -> "Totals":
        """Returns the totals over all replicas, given a replica's weights, `[rows, ...]`, and mask, float32 `[rows]`."""
        real, weight = strategy.sum((jnp.sum(mask), jnp.sum(weights)))
        return cls(real, weight, weights.shape[1:])

    def weight_of(self, shape: tuple[int, ...]) -> jax.Array:
        """Returns the weight of a part of the loss with values of this shape for a micro-batch; a scalar has the number of real examples."""
        if not shape:
            return self.real
        return self.weight * (math.prod(shape[1:]) // math.prod(self.shape))


def merge_all(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Returns metrics merged along the first axis of their leaves, in order."""
    if jax.tree.leaves(metrics)[0].shape[0] == 1:
        return cast(dict[str, Metric], first_of(metrics))
    # A loop compiles much faster than a chain of merges.
    first, rest = (jax.tree.map(operator.itemgetter(part), metrics) for part in (0, slice(1, None)))
    return cast(dict[str, Metric], jax.lax.scan(lambda sums, share: ({key: sums[key].merge(share[key]) for key in sums}, None), first, rest)[0])
