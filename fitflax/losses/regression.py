"""Losses between numbers or vectors of them: `(outputs, targets) -> values`, reduced over the last axis, in Keras's formulas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fitflax.errors import LossError
from fitflax.losses.shapes import mean_of_last_axis, same_shape, vectors

__all__ = [
    "cosine_similarity",
    "huber",
    "log_cosh",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
]

# Keras's: below it a target, or what a logarithm is taken of, counts as this much.
_EPSILON = 1e-7
# Keras's bound of the squared length of a vector; without it a row of zeros has NaN for its gradient.
_SQUARED_LENGTH = 1e-12


def mean_squared_error(outputs: Any, targets: Any) -> jax.Array:
    """Returns the squared error of each example, averaged over the last axis.

    `mean((outputs - targets)^2, axis=-1)`; with one number per example (`[batch]`) there is no axis to average.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: The same shape; a last axis of length 1 may be missing on either side.

    Returns:
        float32 values, `[batch]` or `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit.

    >>> mean_squared_error(jnp.array([[1.0, 2.0], [0.0, 0.0]]), jnp.array([[1.0, 4.0], [0.0, 1.0]]))
    Array([2. , 0.5], dtype=float32)
    """
    outputs, targets = same_shape("mean_squared_error", outputs, targets)
    return mean_of_last_axis(optax.losses.squared_error(outputs, targets))


def mean_absolute_error(outputs: Any, targets: Any) -> jax.Array:
    """Returns the absolute error of each example, averaged over the last axis.

    `mean(|outputs - targets|, axis=-1)`; with one number per example (`[batch]`) there is no axis to average.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: The same shape; a last axis of length 1 may be missing on either side.

    Returns:
        float32 values, `[batch]` or `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit.

    >>> mean_absolute_error(jnp.array([[1.0, 2.0], [0.0, 0.0]]), jnp.array([[1.0, 4.0], [0.0, 1.0]]))
    Array([1. , 0.5], dtype=float32)
    """
    outputs, targets = same_shape("mean_absolute_error", outputs, targets)
    return mean_of_last_axis(jnp.abs(outputs - targets))


def mean_absolute_percentage_error(outputs: Any, targets: Any) -> jax.Array:
    """Returns the error of each example in percent of its targets, averaged over the last axis.

    `100 * mean(|outputs - targets| / max(|targets|, 1e-7), axis=-1)`. For targets that are far from 0: one of 0 makes an error of 1 count 1e9 percent.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: The same shape; a last axis of length 1 may be missing on either side.

    Returns:
        float32 values in percent, `[batch]` or `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit.

    >>> mean_absolute_percentage_error(jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([[1.0, 4.0], [4.0, 5.0]]))
    Array([25. , 62.5], dtype=float32)
    """
    outputs, targets = same_shape("mean_absolute_percentage_error", outputs, targets)
    return 100.0 * mean_of_last_axis(jnp.abs(outputs - targets) / jnp.maximum(jnp.abs(targets), _EPSILON))


def mean_squared_logarithmic_error(outputs: Any, targets: Any) -> jax.Array:
    """Returns the squared difference of the logarithms of each example, averaged over the last axis.

    `mean((log(1 + outputs) - log(1 + targets))^2, axis=-1)`, for quantities of many sizes. On either side values below 1e-7 count as 1e-7, so that an output
    below has no gradient.

    Args:
        outputs: Values of 0 or more (no logarithm taken), `[batch]` or `[batch, ..., features]`.
        targets: Values of 0 or more, the same shape; a last axis of length 1 may be missing on either side.

    Returns:
        float32 values, `[batch]` or `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit.

    >>> mean_squared_logarithmic_error(jnp.array([9.0, 0.0]), jnp.array([99.0, 0.0])).round(4)
    Array([5.3019, 0.    ], dtype=float32)
    """
    outputs, targets = same_shape("mean_squared_logarithmic_error", outputs, targets)
    difference = jnp.log1p(jnp.maximum(outputs, _EPSILON)) - jnp.log1p(jnp.maximum(targets, _EPSILON))
    return mean_of_last_axis(difference**2)


def huber(outputs: Any, targets: Any, *, delta: float = 1.0) -> jax.Array:
    """Returns the Huber loss of each example: squared near zero, linear beyond `delta`, averaged over the last axis.

    With `e = |outputs - targets|`: `e^2 / 2` where `e <= delta`, else `delta * e - delta^2 / 2`.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: The same shape; a last axis of length 1 may be missing on either side.
        delta: Where the loss turns linear; larger than 0, in the unit of the targets.

    Returns:
        float32 values, `[batch]` or `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit, or `delta` is not positive.

    >>> huber(jnp.array([0.0, 0.0]), jnp.array([0.5, 3.0]))
    Array([0.125, 2.5  ], dtype=float32)
    """
    if not delta > 0:
        raise LossError(f"huber(delta=...) must be larger than 0. Received: {delta!r}.")
    outputs, targets = same_shape("huber", outputs, targets)
    return mean_of_last_axis(optax.losses.huber_loss(outputs, targets, delta=delta))


def log_cosh(outputs: Any, targets: Any) -> jax.Array:
    """Returns the logarithm of the hyperbolic cosine of each example's error, averaged over the last axis.

    `mean(log(cosh(outputs - targets)), axis=-1)`: with `e = |outputs - targets|` about `e^2 / 2` near zero and `e - log(2)` far from it, as the Huber loss, but
    smooth everywhere.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: The same shape; a last axis of length 1 may be missing on either side.

    Returns:
        float32 values, `[batch]` or `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit.

    >>> [round(value, 4) for value in log_cosh(jnp.array([0.0, 1.0, 9.0]), jnp.array([0.0, 0.0, 0.0])).tolist()]
    [0.0, 0.4338, 8.3069]
    """
    outputs, targets = same_shape("log_cosh", outputs, targets)
    error = jnp.abs(outputs - targets)
    # optax and Keras subtract log(2) from something just above it, which leaves nothing of an error of 1e-4 (and may leave less than 0).
    near = jnp.log1p(2.0 * jnp.sinh(jnp.minimum(error, 1.0) / 2.0) ** 2)
    far = error + jnp.log1p(jnp.exp(-2.0 * error)) - np.float32(np.log(2.0))
    return mean_of_last_axis(jnp.where(error < 1.0, near, far))


def cosine_similarity(outputs: Any, targets: Any) -> jax.Array:
    """Returns minus the cosine of the angle between outputs and targets: -1 for one direction, 0 for a right angle, 1 for opposite directions.

    `-sum(outputs * targets, axis=-1) / (|outputs| * |targets|)`; a row of zeros gives 0. Minus, as in Keras, because a loss is minimized. Lengths below 1e-6
    count as 1e-6, which keeps gradients finite.

    Args:
        outputs: Vectors of any length, `[batch, ..., features]`, at least two features.
        targets: The same shape.

    Returns:
        float32 values in -1..1, `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit, or there is only one feature.

    >>> cosine_similarity(jnp.array([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]]), jnp.array([[6.0, 8.0], [1.0, 0.0], [1.0, 1.0]])) + 0.0
    Array([-1.,  0.,  0.], dtype=float32)
    """
    outputs, targets = vectors("cosine_similarity", outputs, targets)
    cosines: jax.Array = optax.losses.cosine_similarity(outputs, targets, epsilon=_SQUARED_LENGTH)
    return -cosines
