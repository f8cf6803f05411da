"""Hinge losses between scores and labels, with the formulas of Keras."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fitflax.losses.shapes import class_rows, mean_of_last_axis, same_shape

__all__ = ["categorical_hinge", "hinge", "squared_hinge"]


def hinge(outputs: Any, targets: Any) -> jax.Array:
    """Returns the hinge loss, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `mean(max(1 - y * outputs, 0), axis=-1)`, where `y` is the target with 0 replaced by -1. Unlike in Keras, each target is converted independently, so
    the value of an example does not depend on the rest of the batch.

    Args:
        outputs: Scores (no sigmoid or tanh applied), `[batch]` or `[batch, ..., labels]`.
        targets: 0 or 1, or -1 or 1, of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> hinge(jnp.array([2.0, 0.5, 0.5, 0.5]), jnp.array([1, 1, 0, -1]))
    Array([0. , 0.5, 1.5, 1.5], dtype=float32)
    """
    outputs, targets = same_shape("hinge", outputs, targets)
    return mean_of_last_axis(optax.losses.hinge_loss(outputs, _signs(targets)))


def squared_hinge(outputs: Any, targets: Any) -> jax.Array:
    """Returns the squared hinge loss, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `mean(max(1 - y * outputs, 0)^2, axis=-1)`, where `y` is the target with 0 replaced by -1, independently for each target.

    Args:
        outputs: Scores (no sigmoid or tanh applied), `[batch]` or `[batch, ..., labels]`.
        targets: 0 or 1, or -1 or 1, of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> squared_hinge(jnp.array([2.0, 0.5, 0.5, 0.5]), jnp.array([1, 1, 0, -1]))
    Array([0.  , 0.25, 2.25, 2.25], dtype=float32)
    """
    outputs, targets = same_shape("squared_hinge", outputs, targets)
    return mean_of_last_axis(optax.losses.hinge_loss(outputs, _signs(targets)) ** 2)


def categorical_hinge(outputs: Any, targets: Any) -> jax.Array:
    """Returns the categorical hinge loss of one-hot targets: float32, `[batch, ...]`.

    `max(max((1 - y) * outputs) - sum(y * outputs) + 1, 0)` over the last axis. As in Keras, the score of the true class also competes with 0: it must
    reach 1 even if all other scores are negative. To compare scores only with each other, use `"multiclass_hinge_loss"` with integer labels.

    Args:
        outputs: Scores (no softmax applied), `[batch, ..., classes]`, at least two classes.
        targets: One-hot rows of the same shape.

    Raises:
        LossError: The shapes do not match.

    >>> categorical_hinge(jnp.array([[3.0, 1.0], [3.0, 1.0], [-2.0, -9.0]]), jnp.array([[1, 0], [0, 1], [1, 0]]))
    Array([0., 3., 3.], dtype=float32)
    """
    advice = "For integer labels use 'multiclass_hinge_loss', or make them one-hot: jax.nn.one_hot(labels, classes)."
    outputs, targets = class_rows("categorical_hinge", outputs, targets, binary="hinge", labels=advice)
    right = jnp.sum(targets * outputs, axis=-1)
    wrong = jnp.max((1.0 - targets) * outputs, axis=-1)
    return jnp.maximum(wrong - right + 1.0, 0.0)


def _signs(targets: jax.Array) -> jax.Array:
    return jnp.where(targets == 0, -1.0, targets)
