"""Dynamic loss scaling for float16, whose smallest number is 6e-8: the loss is multiplied before it is differentiated, and the gradient divided afterwards.

The scale is found by trying: halved when a gradient is not finite, which skips the update, and doubled after many good steps in a row. It is a part of the
optimizer's state, so it is saved and restored with it.
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
# Good steps in a row after which a larger scale is tried.
PATIENCE = 2000


class LossScaled(NamedTuple):
    """An optimizer's state with the scale of the loss.

    Attributes:
        inner_state: The optimizer's own state.
        scale: What the loss of the next step is multiplied with, a power of two; float32 `[]`.
        good_steps: Steps with a finite gradient since the scale was changed; int32 `[]`.
    """

    inner_state: PyTree
    scale: jax.Array
    good_steps: jax.Array


def scaled_state(opt_state: PyTree) -> LossScaled:
    """Returns an optimizer's state with the first scale.

    >>> float(scaled_state(()).scale)
    32768.0
    """
    return LossScaled(opt_state, jnp.float32(FIRST_SCALE), jnp.int32(0))


def unscaled(grads: PyTree, scale: jax.Array) -> PyTree:
    """Returns the gradient of the loss, given that of the loss times `scale`; exact, because the scale is a power of two."""
    return jax.tree.map(lambda grad: grad / scale.astype(grad.dtype), grads)


def is_finite(grads: PyTree) -> jax.Array:
    """Returns whether all of a gradient is finite; bool `[]`."""
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(grad)) for grad in jax.tree.leaves(grads)], bool))


def with_loss_scale(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that keeps a scale beside its state, and keeps that state where a gradient is not finite.

    It takes gradients that are `unscaled` already. The updates of a gradient that is not finite mean nothing: whoever applies updates must skip those, too.

    Args:
        optimizer: Any optax transformation.

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
