"""`R2` and `ExplainedVariance`: fractions of the variance of the targets."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from typing_extensions import override

from fitflax.losses.shapes import IT, nan_unless, same_shape
from fitflax.metrics.base import Direction, ResetMetric, add_pairs, broadcast_weights, naming, pair, pair_field, ratio, static_field


@struct.dataclass
class _ExplainedShare(ResetMetric):
    """The base class of `R2` and `ExplainedVariance`, with the weight, the mean and the squared deviations of the targets."""

    _: dataclasses.KW_ONLY
    direction: Direction | None = static_field("max")
    weight: jax.Array = pair_field()
    mean: jax.Array = pair_field()
    spread: jax.Array = pair_field()

    @override
    def merge(self, other: Self) -> Self:
        mean, spread = _join((self.mean, self.spread), (other.mean, other.spread), self.weight, other.weight)
        return dataclasses.replace(self, weight=add_pairs(self.weight, other.weight), mean=mean, spread=spread)

    def _explained(self, rest: jax.Array, is_zero: jax.Array) -> jax.Array:
        """Returns the mean over columns of `1 - rest / spread`; for constant targets 1 if the rest is zero, else 0."""
        constant = _constant(self.mean, self.spread, self.weight)
        score = jnp.where(constant, jnp.where(is_zero, 1.0, 0.0), 1.0 - rest / jnp.where(constant, 1.0, self.spread.sum(-1)))
        return nan_unless(self.weight.sum(-1) != 0, score.mean())


@struct.dataclass
class R2(_ExplainedShare):
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
    residual: jax.Array = pair_field()

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
        return dataclasses.replace(super().merge(other), residual=add_pairs(self.residual, other.residual))

    @override
    def compute(self) -> jax.Array:
        residual = jnp.sum(self.residual, axis=-1)
        return self._explained(residual, residual == 0)


@struct.dataclass
class ExplainedVariance(_ExplainedShare):
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
    error_mean: jax.Array = pair_field()
    error_spread: jax.Array = pair_field()

    @override
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        outputs, targets, rows = _columns(outputs, targets, weights, name=self.name)
        mean, spread = _moments(targets, rows)
        error_mean, error_spread = _moments(targets - outputs, rows)
        batch = dataclasses.replace(self, weight=pair(rows.sum()), mean=mean, spread=spread, error_mean=error_mean, error_spread=error_spread)
        return self.merge(batch)

    @override
    def merge(self, other: Self) -> Self:
        errors = (self.error_mean, self.error_spread), (other.error_mean, other.error_spread)
        error_mean, error_spread = _join(*errors, self.weight, other.weight)
        return dataclasses.replace(super().merge(other), error_mean=error_mean, error_spread=error_spread)

    @override
    def compute(self) -> jax.Array:
        constant = _constant(self.error_mean, self.error_spread, self.weight)
        return self._explained(jnp.sum(self.error_spread, axis=-1), constant)


def _columns(outputs: Any, targets: Any, weights: Any, *, name: str, takes_complex: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns outputs and targets, `[rows, columns]`, 0 where the weight is 0, and weights `[rows, 1]`; float32, or complex64 if either is complex."""
    with naming(name):
        outputs, targets = same_shape(IT, outputs, targets, takes_complex=takes_complex)
        if outputs.ndim == 1:
            outputs, targets = outputs[:, None], targets[:, None]
        rows = broadcast_weights(weights, outputs.shape[:-1]).reshape(-1, 1)
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
    share = ratio(their_weight.sum(-1), both)
    shift = add_pairs(theirs[0], -mine[0])
    between = _joined_parts(shift.sum(-1) ** 2 * my_weight.sum(-1) * share, jnp.broadcast_shapes(mine[1].shape, theirs[1].shape)[:-1])
    return add_pairs(mine[0], shift * share), add_pairs(add_pairs(mine[1], theirs[1]), pair(between))


def _constant(mean: jax.Array, spread: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns whether there is no spread: for constants, rounding leaves about 1e-14 of their size, which must not be a divisor."""
    size = jnp.abs(mean.sum(-1))
    if size.shape != spread.shape[:-1]:
        size = jnp.sqrt(_joined_parts(size**2, spread.shape[:-1]))
    return jnp.sqrt(spread.sum(-1)) <= 1e-9 * size * jnp.sqrt(weight.sum(-1))
