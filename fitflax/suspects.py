"""Who is to blame for values that are not finite: the parts of a loss, a gradient, or parameters."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import struct

from fitflax.state import PyTree

__all__ = ["Suspects", "find_suspects"]


@struct.dataclass
class Suspects:
    """What `TrainSums.culprit` counts, by number. It has no arrays, and leaves a compiled step as part of its structure.

    Attributes:
        names: As in "the gradient of Dense_0/kernel".
    """

    names: tuple[str, ...] = struct.field(pytree_node=False, default=())


def find_suspects(parts: Mapping[str, jax.Array], loss: jax.Array, grads: PyTree, params: PyTree) -> tuple[Suspects, jax.Array]:
    """Returns what may be to blame, in the order in which one leads to another, and which of it is not finite, bool `[suspects]`; the parameters come last.

    Args:
        parts: The losses that add up to the whole, by name.
        loss: The whole.
        grads: The gradient, or `()`.
        params: The updated parameters.

    >>> suspects, are_bad = find_suspects({}, jnp.float32(1), {"w": jnp.ones(2)}, {"w": jnp.array([1.0, jnp.inf])})
    >>> suspects.names, are_bad.tolist()
    (('the loss', 'the gradient of w', 'the parameter w'), [False, False, True])
    """
    named = [(f"the loss of {name!r}", part) for name, part in parts.items()] if len(parts) > 1 else [("the loss", loss)]
    for kind, tree in (("gradient of", grads), ("parameter", params)):
        named += [(f"the {kind} {jax.tree_util.keystr(path, simple=True, separator='/')}", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    are_bad = [~jnp.isfinite(leaf).all() if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.bool_(False) for _, leaf in named]
    return Suspects(tuple(name for name, _ in named)), jnp.stack(are_bad)
