"""What is summed from step to step: metrics by log key, including the loss. Metrics that collect rows are returned from each step instead."""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from typing_extensions import override

from fitflax.errors import MetricError
from fitflax.leaves import describe_shapes
from fitflax.logs import UNDEFINED
from fitflax.metrics import Mean, Metric
from fitflax.state import PyTree

__all__ = ["EvalSums", "TotalLoss", "TrainSums", "as_vector", "collects", "computed", "rows_of", "summed"]


@struct.dataclass
class TrainSums:
    """Sums over the batches of an epoch so far."""

    metrics: dict[str, Metric]  # By log key.
    steps_since_bad: jax.Array  # Steps since the loss or gradient first was not finite; -1 if it never was. int32.
    culprit: jax.Array  # Index in `Suspects` of what was not finite; -1 if there is none or it was not checked. int32.


@struct.dataclass
class EvalSums:
    """Sums over the batches of an evaluation so far."""

    metrics: dict[str, Metric]  # By log key.
    index: jax.Array  # Index of the next batch; its random keys follow from it. int32.


@struct.dataclass
class TotalLoss(Metric):
    """The logged loss: the sum of the weighted means of its parts."""

    parts: dict[str, Mean]
    name: str = struct.field(pytree_node=False, default="loss")
    direction: Any = struct.field(pytree_node=False, default="min")
    additive = True

    @override
    def empty(self) -> "TotalLoss":
        return dataclasses.replace(self, parts={key: part.empty() for key, part in self.parts.items()})

    @override
    def update(self, outputs: PyTree, targets: PyTree, weights: jax.Array) -> "TotalLoss":
        raise NotImplementedError("The step creates the parts of the loss.")

    @override
    def merge(self, other: "TotalLoss") -> "TotalLoss":
        return dataclasses.replace(self, parts={key: part.merge(other.parts[key]) for key, part in self.parts.items()})

    @override
    def compute(self) -> jax.Array:
        return sum((part.compute() for part in self.parts.values()), start=jnp.float32(0))


def collects(metric: Any) -> bool:
    """Returns whether a metric collects rows instead of summing."""
    return bool(getattr(metric, "collect", False))


def summed(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Returns the metrics that are summed from step to step."""
    return {key: metric for key, metric in metrics.items() if not collects(metric)}


def rows_of(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Returns the metrics that collect rows."""
    return {key: metric for key, metric in metrics.items() if collects(metric)}


def computed(metric: Metric) -> tuple[jax.Array, jax.Array]:
    """Returns a metric's value, float32 `[...]`, and whether it is NaN because the total weight is 0, bool `[...]`."""
    with jax.debug_nans(False):  # For steps without jit.
        value = metric.compute()
        if jnp.iscomplexobj(value):
            raise MetricError(f"Its value must be real. Received: {describe_shapes(value)}.")
        value = jnp.asarray(value, jnp.float32)
        return value, jnp.isnan(value) & _is_empty(metric)


def _is_empty(metric: Metric) -> Any:
    """Returns whether nothing was added to a metric that would change its sums, or to a part of the loss."""
    parts = getattr(metric, "parts", None)
    if parts:
        return functools.reduce(operator.or_, map(_is_empty, parts.values()))
    leaves = [leaf for leaf in jax.tree.leaves(metric) if jnp.issubdtype(leaf.dtype, jnp.number)]
    return functools.reduce(operator.and_, (jnp.all(leaf == 0) for leaf in leaves), jnp.bool_(True))


def as_vector(values: list[jax.Array], metrics: Mapping[str, Metric]) -> jax.Array:
    """Returns all values that a step logs as one vector: `values`, then the metrics by key, with arrays flattened."""
    # Sorted, because JAX transformations sort the keys of dicts. `Program` knows the order in which they are shown.
    found = [computed(metrics[key]) for key in sorted(metrics)]
    parts = [*values, *(jnp.where(is_undefined, UNDEFINED, value) for value, is_undefined in found)]
    if any(part.ndim for part in parts):
        return jnp.concatenate([part.ravel() for part in parts])
    return jnp.stack(parts) if parts else jnp.zeros(0, jnp.float32)
