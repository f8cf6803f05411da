"""A replica's share of a batch cut into micro-batches, and what they yield put together again; the step in between is `fitflax.steps.task`'s."""

import operator
from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp

from fitflax.errors import DataError
from fitflax.metrics import Metric
from fitflax.metrics.base import broadcast_weights
from fitflax.parallel import Strategy
from fitflax.state import Batch, PyTree

__all__ = ["first_of", "join_rows", "last_of", "merge_all", "split", "total_weight"]


def split(batch: Batch, steps: int, strategy: Strategy) -> Batch:
    """Returns a batch of `[rows, ...]` as its micro-batches, `[steps, rows / steps, ...]`.

    Raises:
        DataError: The rows do not divide.

    >>> from fitflax.parallel import DataParallel
    >>> split(Batch(x=jnp.arange(4), y=(), mask=jnp.ones(4, bool)), 2, DataParallel()).x.tolist()
    [[0, 1], [2, 3]]
    """
    rows = batch.mask.shape[0]
    if rows % steps:
        raise DataError(f"A share of {rows} examples cannot be split into {steps} micro-batches, compile(accumulate_steps={steps}).")
    return cast(Batch, strategy.split(batch, steps))


def first_of(batches: Batch) -> Batch:
    """Returns the first of the micro-batches."""
    return cast(Batch, jax.tree.map(operator.itemgetter(0), batches))


def last_of(tree: PyTree) -> PyTree:
    """Returns what the last micro-batch yielded, given that of all of them along a first axis."""
    return jax.tree.map(operator.itemgetter(-1), tree)


def total_weight(shape: tuple[int, ...], weights: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the weight of one part of the loss over a replica's whole share, which does not depend on the loss's values.

    Args:
        shape: The shape of the part's values for a micro-batch; `()` for one number, which counts as often as there are real examples.
        weights: What the examples of the share count, `[rows, ...]`.
        mask: Which of them are real, float32 `[rows]`.
    """
    return jnp.sum(broadcast_weights(weights, (mask.shape[0], *shape[1:])) if shape else mask)


def join_rows(metrics: Mapping[str, Metric], strategy: Strategy) -> dict[str, Metric]:
    """Returns metrics that collect rows, given those of all micro-batches, `[steps, rows, ...]`, with rows in the order of the batch."""
    return {key: strategy.unsplit(metric) for key, metric in metrics.items()}


def merge_all(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Returns metrics merged in the order of their leaves' first axis."""
    # A loop, not a chain of merges, which XLA would take long to compile.
    first, rest = (jax.tree.map(operator.itemgetter(part), dict(metrics)) for part in (0, slice(1, None)))
    return cast(dict[str, Metric], jax.lax.scan(lambda sums, share: ({key: sums[key].merge(share[key]) for key in sums}, None), first, rest)[0])
