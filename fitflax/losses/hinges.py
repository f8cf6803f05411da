"""Hinge losses between scores and labels: `(outputs, targets) -> values`, in Keras's formulas. A score far enough on the right side costs nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fitflax.losses.shapes import class_rows, mean_of_last_axis, same_shape

__all__ = ["categorical_hinge", "hinge", "squared_hinge"]


def hinge(outputs: Any, targets: Any) -> jax.Array:
    """Returns how far the scores of each example fall short of the margin, averaged over the last axis.

    `mean(max(1 - y * outputs, 0), axis=-1)`, `y` being the targets with -1 for 0. Each target is converted by itself, where Keras looks at all of them at once,
    so that an example's value never depends on the others in its batch.

    Args:
        outputs: Scores (no sigmoid or tanh applied), `[batch]` or `[batch, ..., labels]`.
        targets: 0 or 1, or -1 or 1; the same shape; a last axis of length 1 may be missing on either side.

    Returns:
        float32 values, `[batch]` or `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit.

    >>> hinge(jnp.array([2.0, 0.5, 0.5, 0.5]), jnp.array([1, 1, 0, -1]))
    Array([0. , 0.5, 1.5, 1.5], dtype=float32)
    """
    outputs, targets = same_shape("hinge", outputs, targets)
    return mean_of_last_axis(optax.losses.hinge_loss(outputs, _signs(targets)))


def squared_hinge(outputs: Any, targets: Any) -> jax.Array:
    """Returns the square of how far the scores of each example fall short of the margin, averaged over the last axis.

    `mean(max(1 - y * outputs, 0)^2, axis=-1)`, `y` being the targets with -1 for 0, each converted by itself.

    Args:
        outputs: Scores (no sigmoid or tanh applied), `[batch]` or `[batch, ..., labels]`.
        targets: 0 or 1, or -1 or 1; the same shape; a last axis of length 1 may be missing on either side.

    Returns:
        float32 values, `[batch]` or `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit.

    >>> squared_hinge(jnp.array([2.0, 0.5, 0.5, 0.5]), jnp.array([1, 1, 0, -1]))
    Array([0.  , 0.25, 2.25, 2.25], dtype=float32)
    """
    outputs, targets = same_shape("squared_hinge", outputs, targets)
    return mean_of_last_axis(optax.losses.hinge_loss(outputs, _signs(targets)) ** 2)


def categorical_hinge(outputs: Any, targets: Any) -> jax.Array:
    """Returns how far the score of the right class falls short of the best other one and the margin.

    `max(max((1 - y) * outputs) - sum(y * outputs) + 1, 0)` over the last axis. In Keras's formula the right class competes with a score of 0: if all other
    scores are negative, its own must still reach 1. For scores compared with each other alone there is `"multiclass_hinge_loss"`, for integer labels.

    Args:
        outputs: Scores (no softmax applied), `[batch, ..., classes]`, at least two classes.
        targets: One-hot rows, the same shape.

    Returns:
        float32 values, `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit.

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
