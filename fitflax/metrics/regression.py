"""Metrics of regression that are no plain means: roots, and shares of variance with moments of their own."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from typing_extensions import override

import fitflax.losses as losses
from fitflax.errors import MetricError
from fitflax.metrics.base import Direction, Metric, add_pairs, broadcast_weights, pair, pair_field, static_field, zero_pair
from fitflax.metrics.mean import Mean
from fitflax.metrics.shapes import same_shape

__all__ = ["R2", "RootMeanSquaredError"]


@struct.dataclass
class R2(Metric):
    """The coefficient of determination, `1 - sum(w * (targets - outputs)^2) / sum(w * (targets - mean)^2)`, per column and then averaged over columns.

    As scikit-learn's `r2_score`: 1 is perfect, 0 as good as the mean of the targets. Constant targets give 1 if they are met exactly, else 0. The mean and
    the squares around it are joined by the formula of Chan, Golub and LeVeque (1979): sums of raw squares in float32 are off by 3e-3 for targets around 1000.
    Outputs and targets are `[batch]` or `[batch, ..., columns]` (a last axis of length 1 may be missing on either side), weights their leading axes without
    the columns.

    Attributes:
        name: The log key.
        direction: `"max"`.
        weight: `sum(w)`, a pair, float32 `[2]`.
        mean: The targets' mean, float32 pairs `[columns, 2]`; `[2]` while empty, as those below.
        spread: `sum(w * (targets - mean)^2)`, float32 pairs `[columns, 2]`.
        residual: `sum(w * (targets - outputs)^2)`, float32 pairs `[columns, 2]`.

    >>> r2 = R2().update(jnp.array([1.0, 2.0, 4.0]), jnp.array([1.0, 2.0, 3.0]), jnp.ones(3))
    >>> float(r2.compute())
    0.5
    """

    _: dataclasses.KW_ONLY
    name: str = static_field("r2")
    direction: Direction | None = static_field("max")
    weight: jax.Array = pair_field()
    mean: jax.Array = pair_field()
    spread: jax.Array = pair_field()
    residual: jax.Array = pair_field()

    @override
    def empty(self) -> Self:
        return dataclasses.replace(self, weight=zero_pair(), mean=zero_pair(), spread=zero_pair(), residual=zero_pair())

    @override
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        try:
            outputs, targets = same_shape(outputs, targets)
            if outputs.ndim == 1:
                outputs, targets = outputs[:, None], targets[:, None]
            rows = broadcast_weights(weights, outputs.shape[:-1]).reshape(-1, 1)
        except MetricError as error:
            raise MetricError(f"Metric {self.name!r}: {error}") from error
        columns = outputs.shape[-1]
        counted = rows != 0
        outputs = jnp.where(counted, outputs.astype(jnp.float32).reshape(-1, columns), 0.0)
        targets = jnp.where(counted, targets.astype(jnp.float32).reshape(-1, columns), 0.0)
        weight = rows.sum()
        divisor = jnp.where(weight == 0, 1.0, weight)
        # The mean once more, of what the first one leaves: float32 alone is too coarse for the squares around it to be joined later.
        mean = jnp.sum(rows * targets, axis=0, keepdims=True) / divisor
        finer = jnp.sum(rows * (targets - mean), axis=0, keepdims=True) / divisor
        batch = dataclasses.replace(
            self,
            weight=pair(weight),
            mean=jnp.stack([mean[0], finer[0]], axis=-1),
            spread=pair(jnp.sum(rows * ((targets - mean) - finer) ** 2, axis=0)),
            residual=pair(jnp.sum(rows * (targets - outputs) ** 2, axis=0)),
        )
        return self.merge(batch)

    @override
    def merge(self, other: Self) -> Self:
        weight = add_pairs(self.weight, other.weight)
        both = weight.sum(-1)
        share = jnp.where(both == 0, 0.0, other.weight.sum(-1) / jnp.where(both == 0, 1.0, both))
        shift = add_pairs(other.mean, -self.mean)
        between = shift.sum(-1) ** 2 * self.weight.sum(-1) * share
        return dataclasses.replace(
            self,
            weight=weight,
            mean=add_pairs(self.mean, shift * share),
            spread=add_pairs(add_pairs(self.spread, other.spread), pair(between)),
            residual=add_pairs(self.residual, other.residual),
        )

    @override
    def compute(self) -> jax.Array:
        weight, mean, spread, residual = (pair.sum(-1) for pair in (self.weight, self.mean, self.spread, self.residual))
        # Of constant targets rounding leaves a spread of some 1e-14 of their size, which must not divide anything.
        constant = jnp.sqrt(spread) <= 1e-9 * jnp.abs(mean) * jnp.sqrt(weight)
        score = jnp.where(constant, jnp.where(residual == 0, 1.0, 0.0), 1.0 - residual / jnp.where(constant, 1.0, spread))
        return jnp.where(weight == 0, 0.0, score.mean())


def RootMeanSquaredError(*, name: str = "rmse") -> Mean:
    """Returns the square root of the mean squared error over all examples; not the mean of the batches' roots.

    Args:
        name: The log key.

    >>> float(RootMeanSquaredError().update(jnp.array([3.0, 5.0]), jnp.array([0.0, 0.0]), jnp.array([1.0, 0.0])).compute())
    3.0
    """
    return Mean(losses.mean_squared_error, name=name, direction="min", transform="sqrt")
