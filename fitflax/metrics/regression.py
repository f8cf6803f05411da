"""Metrics of numbers that are no mean of a loss: roots, angles, and shares of variance with moments of their own."""

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
from fitflax.metrics.shapes import mismatch, same_shape

__all__ = ["R2", "CosineSimilarity", "ExplainedVariance", "RootMeanSquaredError"]


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
        outputs, targets, rows = _columns(outputs, targets, weights, name=self.name)
        mean, spread = _moments(targets, rows)
        residual = pair(jnp.sum(rows * (targets - outputs) ** 2, axis=0))
        return self.merge(dataclasses.replace(self, weight=pair(rows.sum()), mean=mean, spread=spread, residual=residual))

    @override
    def merge(self, other: Self) -> Self:
        mean, spread = _join((self.mean, self.spread), (other.mean, other.spread), self.weight, other.weight)
        return dataclasses.replace(
            self, weight=add_pairs(self.weight, other.weight), mean=mean, spread=spread, residual=add_pairs(self.residual, other.residual)
        )

    @override
    def compute(self) -> jax.Array:
        residual = jnp.sum(self.residual, axis=-1)
        return _share_explained(residual, residual == 0, self.mean, self.spread, self.weight)


@struct.dataclass
class ExplainedVariance(Metric):
    """The share of the targets' variance that the outputs explain, `1 - var(targets - outputs) / var(targets)`, per column and then averaged over columns.

    As scikit-learn's `explained_variance_score`; unlike `R2` it forgives outputs that are off by a constant. Constant targets give 1 if the errors are
    constant too, else 0. Variances are weighted; means and squares around them are joined as in `R2`, and shapes are the same.

    Attributes:
        name: The log key.
        direction: `"max"`.
        weight: `sum(w)`, a pair, float32 `[2]`.
        mean: The targets' mean, float32 pairs `[columns, 2]`; `[2]` while empty, as those below.
        spread: `sum(w * (targets - mean)^2)`, float32 pairs `[columns, 2]`.
        error_mean: The mean of the errors, `targets - outputs`, float32 pairs `[columns, 2]`.
        error_spread: `sum(w * (errors - error_mean)^2)`, float32 pairs `[columns, 2]`.

    >>> metric = ExplainedVariance().update(jnp.array([11.0, 12.0, 13.0]), jnp.array([1.0, 2.0, 3.0]), jnp.ones(3))
    >>> float(metric.compute())
    1.0
    """

    _: dataclasses.KW_ONLY
    name: str = static_field("explained_variance")
    direction: Direction | None = static_field("max")
    weight: jax.Array = pair_field()
    mean: jax.Array = pair_field()
    spread: jax.Array = pair_field()
    error_mean: jax.Array = pair_field()
    error_spread: jax.Array = pair_field()

    @override
    def empty(self) -> Self:
        zero = zero_pair()
        return dataclasses.replace(self, weight=zero, mean=zero, spread=zero, error_mean=zero, error_spread=zero)

    @override
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        outputs, targets, rows = _columns(outputs, targets, weights, name=self.name)
        mean, spread = _moments(targets, rows)
        error_mean, error_spread = _moments(targets - outputs, rows)
        batch = dataclasses.replace(self, weight=pair(rows.sum()), mean=mean, spread=spread, error_mean=error_mean, error_spread=error_spread)
        return self.merge(batch)

    @override
    def merge(self, other: Self) -> Self:
        mean, spread = _join((self.mean, self.spread), (other.mean, other.spread), self.weight, other.weight)
        errors = (self.error_mean, self.error_spread), (other.error_mean, other.error_spread)
        error_mean, error_spread = _join(*errors, self.weight, other.weight)
        weight = add_pairs(self.weight, other.weight)
        return dataclasses.replace(self, weight=weight, mean=mean, spread=spread, error_mean=error_mean, error_spread=error_spread)

    @override
    def compute(self) -> jax.Array:
        constant = _constant(self.error_mean, self.error_spread, self.weight)
        return _share_explained(jnp.sum(self.error_spread, axis=-1), constant, self.mean, self.spread, self.weight)


def _columns(outputs: Any, targets: Any, weights: Any, *, name: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns outputs and targets, float32 `[rows, columns]`, 0 where the weight is, and weights `[rows, 1]`."""
    try:
        outputs, targets = same_shape(outputs, targets)
        if outputs.ndim == 1:
            outputs, targets = outputs[:, None], targets[:, None]
        rows = broadcast_weights(weights, outputs.shape[:-1]).reshape(-1, 1)
    except MetricError as error:
        raise MetricError(f"Metric {name!r}: {error}") from error
    columns = outputs.shape[-1]
    outputs = jnp.where(rows != 0, outputs.astype(jnp.float32).reshape(-1, columns), 0.0)
    targets = jnp.where(rows != 0, targets.astype(jnp.float32).reshape(-1, columns), 0.0)
    return outputs, targets, rows


def _moments(values: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a batch's mean, and the squares around it, pairs `[columns, 2]`; of values `[rows, columns]`, weighted by `rows`, `[rows, 1]`."""
    weight = rows.sum()
    divisor = jnp.where(weight == 0, 1.0, weight)
    # The mean once more, of what the first one leaves: float32 alone is too coarse for the squares around it to be joined later.
    mean = jnp.sum(rows * values, axis=0, keepdims=True) / divisor
    finer = jnp.sum(rows * (values - mean), axis=0, keepdims=True) / divisor
    return jnp.stack([mean[0], finer[0]], axis=-1), pair(jnp.sum(rows * ((values - mean) - finer) ** 2, axis=0))


def _join(mine: tuple[jax.Array, jax.Array], theirs: tuple[jax.Array, jax.Array], my_weight: jax.Array, their_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean of two parts, and the squares around it, from those of each, by the formula of Chan, Golub and LeVeque."""
    both = add_pairs(my_weight, their_weight).sum(-1)
    share = jnp.where(both == 0, 0.0, their_weight.sum(-1) / jnp.where(both == 0, 1.0, both))
    shift = add_pairs(theirs[0], -mine[0])
    between = shift.sum(-1) ** 2 * my_weight.sum(-1) * share
    return add_pairs(mine[0], shift * share), add_pairs(add_pairs(mine[1], theirs[1]), pair(between))


def _constant(mean: jax.Array, spread: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns whether there is no spread: of constants, rounding leaves some 1e-14 of their size, which must not divide anything."""
    return jnp.sqrt(spread.sum(-1)) <= 1e-9 * jnp.abs(mean.sum(-1)) * jnp.sqrt(weight.sum(-1))


def _share_explained(rest: jax.Array, is_zero: jax.Array, mean: jax.Array, spread: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the mean over columns of `1 - rest / spread`; of constant targets 1 where the rest is zero, else 0."""
    constant = _constant(mean, spread, weight)
    score = jnp.where(constant, jnp.where(is_zero, 1.0, 0.0), 1.0 - rest / jnp.where(constant, 1.0, spread.sum(-1)))
    return jnp.where(weight.sum(-1) == 0, 0.0, score.mean())


def RootMeanSquaredError(*, name: str = "rmse") -> Mean:
    """Returns the square root of the mean squared error over all examples; not the mean of the batches' roots.

    Args:
        name: The log key.

    >>> float(RootMeanSquaredError().update(jnp.array([3.0, 5.0]), jnp.array([0.0, 0.0]), jnp.array([1.0, 0.0])).compute())
    3.0
    """
    return Mean(losses.mean_squared_error, name=name, direction="min", transform="sqrt")


def CosineSimilarity(*, name: str = "cosine_similarity") -> Mean:
    """Returns the mean cosine of the angle between outputs and targets, over the last axis: 1 where they point the same way, -1 for opposite ways.

    `sum(outputs * targets) / (|outputs| * |targets|)`; 0 where one of them is all zeros. The loss of that name is its negative, so that it can be minimized.
    Outputs and targets are `[batch, ..., features]`, two features at least: one number has no direction but its sign.

    Args:
        name: The log key.

    >>> metric = CosineSimilarity().update(jnp.array([[3.0, 0.0], [1.0, 1.0]]), jnp.array([[1.0, 0.0], [0.0, 0.0]]), jnp.ones(2))
    >>> float(metric.compute()), metric.direction
    (0.5, 'max')
    """
    return Mean(_cosine, name=name, direction="max")


def _cosine(outputs: Any, targets: Any) -> jax.Array:
    outputs, targets = same_shape(outputs, targets)
    if outputs.ndim < 2 or outputs.shape[-1] < 2:
        raise mismatch("outputs and targets of one shape [batch, ..., features], two features at least", outputs, targets)
    return jnp.sum(_direction(outputs) * _direction(targets), axis=-1)


def _direction(rows: jax.Array) -> jax.Array:
    """Returns rows of length 1, zeros for zeros."""
    rows = rows.astype(jnp.float32)
    # Before they are squared: what is smaller than 1e-19 or larger than 1e19 has no square in float32.
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    rows = rows / jnp.where(largest == 0, 1.0, largest)
    return rows / jnp.where(largest == 0, 1.0, jnp.linalg.norm(rows, axis=-1, keepdims=True))
