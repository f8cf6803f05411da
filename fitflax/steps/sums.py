"""What is added up from step to step: metrics by log key, the loss among them, and which of them leave a step as rows."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from typing_extensions import override

from fitflax.metrics import Mean, Metric
from fitflax.state import PyTree

__all__ = ["EvalSums", "TotalLoss", "TrainSums", "as_vector", "collects", "rows_of", "summed"]


@struct.dataclass
class TrainSums:
    """Sums over the batches of an epoch so far.

    Attributes:
        metrics: By log key.
        steps_since_bad: Steps since the loss or gradient first was not finite; -1 for never. int32.
        culprit: The number of what was to blame, of `Suspects`; -1 for nobody, or where nobody looked. int32.
    """

    metrics: dict[str, Metric]
    steps_since_bad: jax.Array
    culprit: jax.Array


@struct.dataclass
class EvalSums:
    """Sums over the batches of an evaluation so far.

    Attributes:
        metrics: By log key.
        index: Number of the next batch; its random keys follow from it. int32.
    """

    metrics: dict[str, Metric]
    index: jax.Array


@struct.dataclass
class TotalLoss(Metric):
    """The loss as logged: weighted means of several parts, added up."""

    parts: dict[str, Mean]
    name: str = struct.field(pytree_node=False, default="loss")
    direction: Any = struct.field(pytree_node=False, default="min")
    additive = True

    @override
    def empty(self) -> "TotalLoss":
        return dataclasses.replace(self, parts={key: part.empty() for key, part in self.parts.items()})

    @override
    def update(self, outputs: PyTree, targets: PyTree, weights: jax.Array) -> "TotalLoss":
        raise NotImplementedError("The step makes the parts of the loss.")

    @override
    def merge(self, other: "TotalLoss") -> "TotalLoss":
        return dataclasses.replace(self, parts={key: part.merge(other.parts[key]) for key, part in self.parts.items()})

    @override
    def compute(self) -> jax.Array:
        return sum((part.compute() for part in self.parts.values()), start=jnp.float32(0))


def collects(metric: Any) -> bool:
    """Returns whether a metric's rows leave the step, instead of being summed in it."""
    return bool(getattr(metric, "collect", False))


def summed(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Returns the metrics whose sums go on from step to step."""
    return {key: metric for key, metric in metrics.items() if not collects(metric)}


def rows_of(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Returns the metrics whose rows leave the step."""
    return {key: metric for key, metric in metrics.items() if collects(metric)}


def as_vector(values: list[jax.Array], metrics: Mapping[str, Metric]) -> jax.Array:
    """Returns all that a step logs as one vector: values of its own, then the metrics by key, arrays row by row."""
    # Sorted, because JAX sorts the keys of dicts wherever they pass through a transformation; `Program` knows the order in which they are shown.
    parts = [*values, *(jnp.asarray(metrics[key].compute(), jnp.float32) for key in sorted(metrics))]
    if any(part.ndim for part in parts):
        return jnp.concatenate([part.ravel() for part in parts])
    return jnp.stack(parts) if parts else jnp.zeros(0, jnp.float32)
