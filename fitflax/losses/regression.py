"""Regression losses on numbers, counts or vectors, reduced over the last axis, with the formulas of Keras."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fitflax.errors import LossError
from fitflax.losses.shapes import mean_of_last_axis, same_shape, vectors

__all__ = ["cosine_similarity", "huber", "log_cosh", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_error"]
__all__ += ["mean_squared_logarithmic_error", "poisson"]

# The epsilon of Keras: a lower bound for divisors and arguments of logarithms.
_EPSILON = 1e-7
# The lower bound of Keras for squared norms; without it the gradient of a row of zeros is NaN.
_MIN_SQUARED_NORM = 1e-12


def mean_squared_error(outputs: Any, targets: Any) -> jax.Array:
    """Returns the squared error, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `mean(|outputs - targets|^2, axis=-1)`; for inputs `[batch]` there is no axis to average. Values may be complex.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: Values of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> mean_squared_error(jnp.array([[1.0, 2.0], [0.0, 0.0]]), jnp.array([[1.0, 4.0], [0.0, 1.0]]))
    Array([2. , 0.5], dtype=float32)
    """
    outputs, targets = same_shape("mean_squared_error", outputs, targets, takes_complex=True)
    if jnp.iscomplexobj(outputs):
        return mean_of_last_axis((outputs - targets).real ** 2 + (outputs - targets).imag ** 2)
    return mean_of_last_axis(optax.losses.squared_error(outputs, targets))


def mean_absolute_error(outputs: Any, targets: Any) -> jax.Array:
    """Returns the absolute error, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `mean(|outputs - targets|, axis=-1)`; for inputs `[batch]` there is no axis to average. Values may be complex.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: Values of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> mean_absolute_error(jnp.array([[1.0, 2.0], [0.0, 0.0]]), jnp.array([[1.0, 4.0], [0.0, 1.0]]))
    Array([1. , 0.5], dtype=float32)
    """
    outputs, targets = same_shape("mean_absolute_error", outputs, targets, takes_complex=True)
    return mean_of_last_axis(jnp.abs(outputs - targets))


def mean_absolute_percentage_error(outputs: Any, targets: Any) -> jax.Array:
    """Returns the absolute error in percent of the targets, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `100 * mean(|outputs - targets| / max(|targets|, 1e-7), axis=-1)`. Use it only for targets far from 0: with a target of 0, an error of 1 is 1e9
    percent.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: Values of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> mean_absolute_percentage_error(jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([[1.0, 4.0], [4.0, 5.0]]))
    Array([25. , 62.5], dtype=float32)
    """
    outputs, targets = same_shape("mean_absolute_percentage_error", outputs, targets)
    return 100.0 * mean_of_last_axis(jnp.abs(outputs - targets) / jnp.maximum(jnp.abs(targets), _EPSILON))


def mean_squared_logarithmic_error(outputs: Any, targets: Any) -> jax.Array:
    """Returns the squared difference of the logarithms, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `mean((log(1 + outputs) - log(1 + targets))^2, axis=-1)`, for quantities that span orders of magnitude. Values below 1e-7 are replaced by 1e-7, so
    outputs below that have no gradient.

    Args:
        outputs: Non-negative values (no logarithm taken), `[batch]` or `[batch, ..., features]`.
        targets: Non-negative values of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> mean_squared_logarithmic_error(jnp.array([9.0, 0.0]), jnp.array([99.0, 0.0])).round(4)
    Array([5.3019, 0.    ], dtype=float32)
    """
    outputs, targets = same_shape("mean_squared_logarithmic_error", outputs, targets)
    difference = jnp.log1p(jnp.maximum(outputs, _EPSILON)) - jnp.log1p(jnp.maximum(targets, _EPSILON))
    return mean_of_last_axis(difference**2)


def huber(outputs: Any, targets: Any, *, delta: float = 1.0) -> jax.Array:
    """Returns the Huber loss, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    Quadratic near zero and linear beyond `delta`. With `e = |outputs - targets|`: `e^2 / 2` where `e <= delta`, else `delta * e - delta^2 / 2`.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: Values of the same shape. Either side may omit a trailing axis of length 1.
        delta: Error where the loss becomes linear; larger than 0, in the unit of the targets.

    Raises:
        LossError: The shapes do not match, or `delta` is not positive.

    >>> huber(jnp.array([0.0, 0.0]), jnp.array([0.5, 3.0]))
    Array([0.125, 2.5  ], dtype=float32)
    """
    if not delta > 0:
        raise LossError(f"huber(delta=...) must be larger than 0. Received: {delta!r}.")
    outputs, targets = same_shape("huber", outputs, targets)
    return mean_of_last_axis(optax.losses.huber_loss(outputs, targets, delta=delta))


def log_cosh(outputs: Any, targets: Any) -> jax.Array:
    """Returns the logarithm of the hyperbolic cosine of the error, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `mean(log(cosh(outputs - targets)), axis=-1)`. With `e = |outputs - targets|` it is about `e^2 / 2` near zero and `e - log(2)` far from it, a smooth
    version of the Huber loss.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: Values of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> [round(value, 4) for value in log_cosh(jnp.array([0.0, 1.0, 9.0]), jnp.array([0.0, 0.0, 0.0])).tolist()]
    [0.0, 0.4338, 8.3069]
    """
    outputs, targets = same_shape("log_cosh", outputs, targets)
    error = jnp.abs(outputs - targets)
    # Optax and Keras subtract log(2) from a number just above it, which rounds small errors such as 1e-4 to 0, or below.
    near = jnp.log1p(2.0 * jnp.sinh(jnp.minimum(error, 1.0) / 2.0) ** 2)
    far = error + jnp.log1p(jnp.exp(-2.0 * error)) - np.float32(np.log(2.0))
    return mean_of_last_axis(jnp.where(error < 1.0, near, far))


def cosine_similarity(outputs: Any, targets: Any) -> jax.Array:
    """Returns the negative cosine similarity: float32, `[batch, ...]`, -1 for the same direction, 0 for a right angle, 1 for opposite directions.

    `-sum(outputs * targets, axis=-1) / (|outputs| * |targets|)`, negated as in Keras because a loss is minimized. A row of zeros gives 0. Norms are at
    least 1e-6 in the formula, which keeps gradients finite.

    Args:
        outputs: Vectors of any norm, `[batch, ..., features]`, at least two features.
        targets: Vectors of the same shape.

    Raises:
        LossError: The shapes do not match, or there is only one feature.

    >>> cosine_similarity(jnp.array([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]]), jnp.array([[6.0, 8.0], [1.0, 0.0], [1.0, 1.0]])) + 0.0
    Array([-1.,  0.,  0.], dtype=float32)
    """
    outputs, targets = vectors("cosine_similarity", outputs, targets)
    cosines: jax.Array = optax.losses.cosine_similarity(outputs, targets, epsilon=_MIN_SQUARED_NORM)
    return -cosines


def poisson(outputs: Any, targets: Any) -> jax.Array:
    """Returns the Poisson negative log-likelihood without its constant term, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `mean(exp(outputs) - targets * outputs, axis=-1)`: the formula of Keras for log rates. The omitted term is `log(targets!)`. The rate overflows
    float32 for log rates above 88.

    Args:
        outputs: Log rates (no exp or softplus applied), `[batch]` or `[batch, ..., features]`.
        targets: Counts or other non-negative values of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> poisson(jnp.array([0.0, 1.0]), jnp.array([3, 3])).round(4)
    Array([ 1.    , -0.2817], dtype=float32)
    """
    outputs, targets = same_shape("poisson", outputs, targets)
    return mean_of_last_axis(jnp.exp(outputs) - targets * outputs)
