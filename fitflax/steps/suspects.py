"""Who is to blame for values that are not finite: the parts of a loss, a gradient, or parameters."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import struct

from fitflax.leaves import named_leaves
from fitflax.state import PyTree

__all__ = ["Suspects", "find_suspects", "named_suspects"]


@struct.dataclass
class Suspects:
    """What `TrainSums.culprit` counts, by number. It has no arrays, and leaves a compiled step as part of its structure.

    Attributes:
        names: As in "the gradient of Dense_0/kernel".
    """

    names: tuple[str, ...] = struct.field(pytree_node=False, default=())


def named_suspects(parts: Mapping[str, jax.Array], loss: jax.Array, grads: PyTree, params: PyTree) -> list[tuple[str, jax.Array]]:
    """Returns what may be to blame and what it is called, in the order in which one leads to another; the parameters come last.

    Args:
        parts: The losses that add up to the whole, by name.
        loss: The whole.
        grads: The gradient, or `()`.
        params: The updated parameters.

    >>> [name for name, _ in named_suspects({}, jnp.float32(1), {"w": jnp.ones(2)}, {"w": jnp.ones(2)})]
    ['the loss', 'the gradient of w', 'the parameter w']
    """
    named = [(f"the loss of {name!r}", part) for name, part in parts.items()] if len(parts) > 1 else [("the loss", loss)]
    for kind, tree in (("gradient of", grads), ("parameter", params)):
        named += [(f"the {kind} {path}", leaf) for path, leaf in named_leaves(tree)]
    return named


def find_suspects(suspects: Sequence[tuple[str, jax.Array]]) -> tuple[Suspects, jax.Array]:
    """Returns the names of suspects, and which of them are not finite, bool `[suspects]`.

    Args:
        suspects: What `named_suspects` returned.

    >>> suspects, are_bad = find_suspects([("the loss", jnp.float32(1)), ("the parameter w", jnp.array([1.0, jnp.inf]))])
    >>> suspects.names, are_bad.tolist()
    (('the loss', 'the parameter w'), [False, True])
    """
    are_bad = [~jnp.isfinite(leaf).all() if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.bool_(False) for _, leaf in suspects]
    return Suspects(tuple(name for name, _ in suspects)), jnp.stack(are_bad)
