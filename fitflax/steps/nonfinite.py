"""Finds the first value of a step that is not finite: a part of the loss, a gradient, or a parameter."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import struct

from fitflax.leaves import named_leaves
from fitflax.state import PyTree

__all__ = ["Suspects", "find_suspects", "named_suspects"]


@struct.dataclass
class Suspects:
    """Names of the checked values of a step, such as "the gradient of Dense_0/kernel", in the order of `TrainSums.culprit`.

    It has no arrays, so a compiled step returns it as part of its structure.
    """

    names: tuple[str, ...] = struct.field(pytree_node=False, default=())


def named_suspects(parts: Mapping[str, jax.Array], loss: jax.Array, grads: PyTree, params: PyTree) -> list[tuple[str, jax.Array]]:
    """Returns the values to check with their names, in the order in which one affects the next; the updated parameters come last.

    `parts` are the parts of the loss; `grads` may be `()`.

    >>> [name for name, _ in named_suspects({}, jnp.float32(1), {"w": jnp.ones(2)}, {"w": jnp.ones(2)})]
    ['the loss', 'the gradient of w', 'the parameter w']
    """
    named = [(f"the loss of {name!r}", part) for name, part in parts.items()] if len(parts) > 1 else [("the loss", loss)]
    for kind, tree in (("gradient of", grads), ("parameter", params)):
        named += [(f"the {kind} {path}", leaf) for path, leaf in named_leaves(tree)]
    return named


def find_suspects(suspects: Sequence[tuple[str, jax.Array]]) -> tuple[Suspects, jax.Array]:
    """Returns the names of suspects, and which of them are not finite, bool `[suspects]`.

    >>> suspects, are_bad = find_suspects([("the loss", jnp.float32(1)), ("the parameter w", jnp.array([1.0, jnp.inf]))])
    >>> suspects.names, are_bad.tolist()
    (('the loss', 'the parameter w'), [False, True])
    """
    are_bad = [~jnp.isfinite(leaf).all() if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.bool_(False) for _, leaf in suspects]
    return Suspects(tuple(name for name, _ in suspects)), jnp.stack(are_bad)
