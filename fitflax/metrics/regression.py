"""Regression metrics that are not means of a loss: roots, angles, and explained variance."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from typing_extensions import override

import fitflax.losses as losses
from fitflax.errors import MetricError
from fitflax.losses.shapes import nan_unless
from fitflax.metrics.base import Direction, Metric, add_pairs, broadcast_weights, pair, pair_field, static_field, zero_pair
from fitflax.metrics.mean import Mean
from fitflax.metrics.shapes import mismatch, same_shape

__all__ = ["R2", "CosineSimilarity", "ExplainedVariance", "RootMeanSquaredError"]


@struct.dataclass
class R2(Metric):
    """Computes the coefficient of determination, `1 - sum(w * (targets - outputs)^2) / sum(w * (targets - mean)^2)`, averaged over columns.

    Same as scikit-learn's `r2_score`: 1 is perfect, 0 is as good as the mean of the targets. Constant targets give 1 if they are predicted exactly, else
    0. Outputs and targets are `[batch]` or `[batch, ..., columns]`; either side may omit a trailing axis of length 1. Weights have the leading axes
    without the columns. Squares of complex numbers are those of their magnitudes. Means and squared deviations are merged by the formula of Chan, Golub
    and LeVeque (1979), because float32 sums of squares are off by 3e-3 for targets around 1000.

    Attributes:
        name: Log key.
        direction: `"max"`.
        weight: `sum(w)`, a float32 pair `[2]`.
        mean: Mean of the targets, float32 pairs `[columns, 2]`; `[2]` while empty, like the sums below. For complex targets `[2 * columns, 2]`: the real
            parts, then the imaginary parts.
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
        outputs, targets, rows = _columns(outputs, targets, weights, name=self.name, takes_complex=True)
        columns = outputs.shape[1]
        if jnp.iscomplexobj(outputs):
            outputs, targets = _parts(outputs), _parts(targets)
        mean, spread = _moments(targets, rows)
        residual = pair(_joined_parts(jnp.sum(rows * (targets - outputs) ** 2, axis=0), (columns,)))
        spread = pair(_joined_parts(spread[:, 0], (columns,)))
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
    """Computes the explained variance, `1 - var(targets - outputs) / var(targets)`, averaged over columns.

    Same as scikit-learn's `explained_variance_score`; unlike `R2`, it ignores constant offsets of the outputs. Constant targets give 1 if the errors are
    constant too, else 0. Variances are weighted. Shapes, merging and the other attributes are those of `R2`.

    Attributes:
        error_mean: Mean of the errors, `targets - outputs`, float32 pairs `[columns, 2]`.
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


def _columns(outputs: Any, targets: Any, weights: Any, *, name: str, takes_complex: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns outputs and targets, `[rows, columns]`, 0 where the weight is 0, and weights `[rows, 1]`; float32, or complex64 if one of both is complex."""
    try:
        outputs, targets = same_shape(outputs, targets, takes_complex=takes_complex)
        if outputs.ndim == 1:
            outputs, targets = outputs[:, None], targets[:, None]
        rows = broadcast_weights(weights, outputs.shape[:-1]).reshape(-1, 1)
    except MetricError as error:
        raise MetricError(f"Metric {name!r}: {error}") from error
    columns = outputs.shape[-1]
    dtype = jnp.complex64 if jnp.iscomplexobj(outputs) or jnp.iscomplexobj(targets) else jnp.float32
    outputs = jnp.where(rows != 0, outputs.astype(dtype).reshape(-1, columns), 0.0)
    targets = jnp.where(rows != 0, targets.astype(dtype).reshape(-1, columns), 0.0)
    return outputs, targets, rows


def _parts(values: jax.Array) -> jax.Array:
    """Returns complex `[rows, columns]` as `[rows, 2 * columns]`: the real parts, then the imaginary parts."""
    return jnp.concatenate([values.real, values.imag], axis=-1)


def _joined_parts(squares: jax.Array, columns: tuple[int, ...]) -> jax.Array:
    """Returns squares of real and imaginary parts, `[2 * columns]`, as squares of magnitudes, `[columns]`; squares of real numbers unchanged."""
    return squares if squares.shape == columns else squares.reshape(2, *columns).sum(axis=0)


def _moments(values: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean of a batch and its squared deviations, pairs `[columns, 2]`, for values `[rows, columns]` with weights `rows`, `[rows, 1]`."""
    weight = rows.sum()
    divisor = jnp.where(weight == 0, 1.0, weight)
    # Add the mean of the residuals to the mean: float32 alone is too coarse to merge the squared deviations later.
    mean = jnp.sum(rows * values, axis=0, keepdims=True) / divisor
    finer = jnp.sum(rows * (values - mean), axis=0, keepdims=True) / divisor
    return jnp.stack([mean[0], finer[0]], axis=-1), pair(jnp.sum(rows * ((values - mean) - finer) ** 2, axis=0))


def _join(mine: tuple[jax.Array, jax.Array], theirs: tuple[jax.Array, jax.Array], my_weight: jax.Array, their_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the merged mean and squared deviations of two parts, by the formula of Chan, Golub and LeVeque."""
    both = add_pairs(my_weight, their_weight).sum(-1)
    share = jnp.where(both == 0, 0.0, their_weight.sum(-1) / jnp.where(both == 0, 1.0, both))
    shift = add_pairs(theirs[0], -mine[0])
    between = _joined_parts(shift.sum(-1) ** 2 * my_weight.sum(-1) * share, jnp.broadcast_shapes(mine[1].shape, theirs[1].shape)[:-1])
    return add_pairs(mine[0], shift * share), add_pairs(add_pairs(mine[1], theirs[1]), pair(between))


def _constant(mean: jax.Array, spread: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns whether there is no spread: for constants, rounding leaves about 1e-14 of their size, which must not be a divisor."""
    size = jnp.abs(mean.sum(-1))
    if size.shape != spread.shape[:-1]:
        size = jnp.sqrt(_joined_parts(size**2, spread.shape[:-1]))
    return jnp.sqrt(spread.sum(-1)) <= 1e-9 * size * jnp.sqrt(weight.sum(-1))


def _share_explained(rest: jax.Array, is_zero: jax.Array, mean: jax.Array, spread: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the mean over columns of `1 - rest / spread`; for constant targets 1 if the rest is zero, else 0."""
    constant = _constant(mean, spread, weight)
    score = jnp.where(constant, jnp.where(is_zero, 1.0, 0.0), 1.0 - rest / jnp.where(constant, 1.0, spread.sum(-1)))
    return nan_unless(weight.sum(-1) != 0, score.mean())


def RootMeanSquaredError(*, name: str = "rmse") -> Mean:
    """Returns the square root of the mean squared error over all examples; not the mean of the roots of batches.

    Args:
        name: Log key.

    >>> float(RootMeanSquaredError().update(jnp.array([3.0, 5.0]), jnp.array([0.0, 0.0]), jnp.array([1.0, 0.0])).compute())
    3.0
    """
    return Mean(losses.mean_squared_error, name=name, direction="min", transform="sqrt")


def CosineSimilarity(*, name: str = "cosine_similarity") -> Mean:
    """Returns the mean cosine similarity over the last axis: 1 for the same direction, -1 for opposite directions.

    `sum(outputs * targets) / (|outputs| * |targets|)`; 0 if either one is all zeros. The loss of the same name is its negative. Outputs and targets are
    `[batch, ..., features]` with at least two features.

    Args:
        name: Log key.

    >>> metric = CosineSimilarity().update(jnp.array([[3.0, 0.0], [1.0, 1.0]]), jnp.array([[1.0, 0.0], [0.0, 0.0]]), jnp.ones(2))
    >>> float(metric.compute()), metric.direction
    (0.5, 'max')
    """
    return Mean(_cosine, name=name, direction="max")


def _cosine(outputs: Any, targets: Any) -> jax.Array:
    outputs, targets = same_shape(outputs, targets)
    if outputs.ndim < 2 or outputs.shape[-1] < 2:
        raise mismatch("outputs and targets of the same shape [batch, ..., features] with at least two features", outputs, targets)
    return jnp.sum(_direction(outputs) * _direction(targets), axis=-1)


def _direction(rows: jax.Array) -> jax.Array:
    """Returns rows scaled to norm 1; rows of zeros stay zero."""
    rows = rows.astype(jnp.float32)
    # Scale before squaring: squares of values below 1e-19 or above 1e19 are out of the range of float32.
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    rows = rows / jnp.where(largest == 0, 1.0, largest)
    return rows / jnp.where(largest == 0, 1.0, jnp.linalg.norm(rows, axis=-1, keepdims=True))
