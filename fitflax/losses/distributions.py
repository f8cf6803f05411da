"""Losses that compare predicted distributions with target distributions or counts, with the formulas of Keras on logits and log rates."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fitflax.losses.shapes import class_rows, mean_of_last_axis, same_shape

__all__ = ["kl_divergence", "poisson"]


def kl_divergence(outputs: Any, targets: Any) -> jax.Array:
    """Returns the Kullback-Leibler divergence from the predicted distribution to the target distribution: float32, `[batch, ...]`.

    `sum(y * (log(y) - log_softmax(outputs)), axis=-1)`: `categorical_crossentropy` minus the entropy of the targets, so 0 is perfect and the gradients
    are equal. Targets of 0 add 0 to the value and the gradients, whatever the output.

    Args:
        outputs: Logits (no softmax applied), `[batch, ..., classes]`, at least two classes.
        targets: Probabilities of the same shape.

    Raises:
        LossError: The shapes do not match.

    >>> kl_divergence(jnp.array([[0.0, 0.0], [0.0, 0.0]]), jnp.array([[0.5, 0.5], [1.0, 0.0]])).round(4)
    Array([0.    , 0.6931], dtype=float32)
    """
    advice = "For integer labels use 'sparse_categorical_crossentropy'."
    outputs, targets = class_rows("kl_divergence", outputs, targets, binary="binary_crossentropy", labels=advice, role="probabilities")
    # optax guards the value of log(0), but not its gradient, nor 0 * -inf. So replace targets of 0 first, and exclude them from the sum.
    counted = targets != 0
    values: jax.Array = optax.losses.kl_divergence(jax.nn.log_softmax(outputs), jnp.where(counted, targets, 1.0), where=counted)
    return values


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
