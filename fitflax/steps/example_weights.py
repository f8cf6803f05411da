"""Weights of the examples of a batch, and means that are 0 if all weights are 0."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fitflax.state import Batch

__all__ = ["masked_weights", "per_example", "ratio"]


def per_example(parts: Mapping[str, Any], rows: int) -> jax.Array:
    """Returns the sum of the parts of the loss for each example, `[rows]`; a scalar part counts for all of them."""
    values = [jnp.asarray(part, jnp.float32) for part in parts.values()]
    return sum((value if value.ndim < 2 else value.reshape(rows, -1).mean(axis=1) for value in values), start=jnp.zeros(rows, jnp.float32))


def ratio(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `total / weight`, 0 where the weight is 0, with a finite gradient there."""
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)


def masked_weights(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns which rows are real, float32 `[batch]`, and their weights, `[batch]` or `[batch, ...]`."""
    mask = batch.mask.astype(jnp.float32)
    if batch.weights is None:
        return mask, mask
    return mask, mask.reshape(mask.shape + (1,) * (batch.weights.ndim - mask.ndim)) * batch.weights
