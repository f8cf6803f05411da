"""Losses between what a model says of a distribution and a distribution or count: `(outputs, targets) -> values`, Keras's formulas on logits and log rates."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fitflax.losses.shapes import class_rows, mean_of_last_axis, same_shape

__all__ = ["kl_divergence", "poisson"]


def kl_divergence(outputs: Any, targets: Any) -> jax.Array:
    """Returns the Kullback-Leibler divergence of the outputs' distribution from the targets'.

    `sum(y * (log(y) - log_softmax(outputs)), axis=-1)`: the crossentropy less what of it no model can avoid, so that 0 is perfect. The gradient is that of
    `categorical_crossentropy`. Targets of 0 add 0, to value and gradients, whatever the output.

    Args:
        outputs: Logits (no softmax applied), `[batch, ..., classes]`, at least two classes.
        targets: Probabilities, the same shape.

    Returns:
        float32 values, `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit.

    >>> kl_divergence(jnp.array([[0.0, 0.0], [0.0, 0.0]]), jnp.array([[0.5, 0.5], [1.0, 0.0]])).round(4)
    Array([0.    , 0.6931], dtype=float32)
    """
    advice = "For integer labels use 'sparse_categorical_crossentropy'."
    outputs, targets = class_rows("kl_divergence", outputs, targets, binary="binary_crossentropy", labels=advice, role="probabilities")
    # optax guards the value of log(0) but not its gradient, nor 0 * -inf: targets of 0 are replaced before the formula, and left out of its sum.
    counted = targets != 0
    values: jax.Array = optax.losses.kl_divergence(jax.nn.log_softmax(outputs), jnp.where(counted, targets, 1.0), where=counted)
    return values


def poisson(outputs: Any, targets: Any) -> jax.Array:
    """Returns the negative log likelihood of counts under Poisson distributions, averaged over the last axis, without the term of the counts alone.

    `mean(exp(outputs) - targets * outputs, axis=-1)`: Keras's formula with the logarithm of the rate for an output, which may be any number. The term left
    out is `log(targets!)`. A log rate above 88 is a rate above what float32 holds.

    Args:
        outputs: Logarithms of rates (no exp or softplus applied), `[batch]` or `[batch, ..., features]`.
        targets: Counts, or other values of 0 or more; the same shape; a last axis of length 1 may be missing on either side.

    Returns:
        float32 values, `[batch]` or `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit.

    >>> poisson(jnp.array([0.0, 1.0]), jnp.array([3, 3])).round(4)
    Array([ 1.    , -0.2817], dtype=float32)
    """
    outputs, targets = same_shape("poisson", outputs, targets)
    return mean_of_last_axis(jnp.exp(outputs) - targets * outputs)
