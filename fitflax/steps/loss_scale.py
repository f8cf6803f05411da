"""Dynamic loss scaling for float16, whose smallest number is 6e-8: the loss is multiplied before differentiation, and the gradient divided after it.

If a gradient is not finite, the update is skipped and the scale halved; after many good steps in a row it is doubled. The scale is part of the
optimizer state, so it is saved and restored with it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fitflax.state import PyTree

__all__ = ["LossScaled", "is_finite", "scaled_state", "unscaled", "with_loss_scale"]

FIRST_SCALE = 2.0**15
MIN_SCALE = 1.0
MAX_SCALE = 2.0**24
# Number of good steps in a row after which the scale is doubled.
PATIENCE = 2000


class LossScaled(NamedTuple):
    """An optimizer state with the loss scale."""

    inner_state: PyTree  # State of the wrapped optimizer.
    scale: jax.Array  # Factor of the loss in the next step, a power of two; float32 `[]`.
    good_steps: jax.Array  # Steps with a finite gradient since the last change of the scale; int32 `[]`.


def scaled_state(opt_state: PyTree) -> LossScaled:
    """Returns an optimizer state with the initial scale."""
    return LossScaled(opt_state, jnp.float32(FIRST_SCALE), jnp.int32(0))


def unscaled(grads: PyTree, scale: jax.Array) -> PyTree:
    """Returns the gradient of the loss, given that of the loss times `scale`; exact, because the scale is a power of two."""
    return jax.tree.map(lambda grad: grad / scale.astype(grad.dtype), grads)


def is_finite(grads: PyTree) -> jax.Array:
    """Returns whether all of the gradient is finite; bool `[]`."""
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(grad)) for grad in jax.tree.leaves(grads)], bool))


def with_loss_scale(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that adds a loss scale to its state, and does not change the wrapped state if the gradient is not finite.

    It takes gradients that are already `unscaled`. If a gradient is not finite, its updates are invalid, and the caller must skip them.

    >>> optimizer = with_loss_scale(optax.sgd(0.1, momentum=0.9))
    >>> state = optimizer.init({"w": jnp.zeros(1)})
    >>> _, state = optimizer.update({"w": jnp.array([jnp.inf])}, state, {"w": jnp.zeros(1)})
    >>> float(state.scale), state.inner_state[0].trace
    (16384.0, {'w': Array([0.], dtype=float32)})
    """

    def init(params: PyTree) -> LossScaled:
        return scaled_state(optimizer.init(params))

    def update(grads: PyTree, state: LossScaled, params: PyTree = None, **extra: Any) -> tuple[PyTree, LossScaled]:
        updates, inner_state = optimizer.update(grads, state.inner_state, params, **extra)
        is_good = is_finite(grads)
        good_steps = jnp.where(is_good, state.good_steps + 1, 0)
        grows = good_steps >= PATIENCE
        grown = jnp.where(grows, jnp.minimum(state.scale * 2, MAX_SCALE), state.scale)
        scale = jnp.where(is_good, grown, jnp.maximum(state.scale / 2, MIN_SCALE))
        return updates, LossScaled(optax.tree.where(is_good, inner_state, state.inner_state), scale, jnp.where(grows, 0, good_steps))

    return optax.GradientTransformationExtraArgs(init, update)
