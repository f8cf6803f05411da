"""Losses between numbers: `(outputs, targets) -> values`, a mean over the last axis, in Keras's formulas."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fitflax.errors import LossError
from fitflax.losses.shapes import mean_of_last_axis, same_shape

__all__ = ["huber", "mean_absolute_error", "mean_squared_error"]


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
