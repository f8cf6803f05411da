"""The leaves of pytrees: the names of their paths, and typed keys, which are arrays to JAX but not to NumPy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["is_key", "named_leaves", "path_name", "through_key_data"]


def path_name(path: tuple[Any, ...]) -> str:
    """Returns the name of a path of JAX's.

    >>> [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path({"Dense_0": {"kernel": 1}, "x": (2, 3)})]
    ['Dense_0/kernel', 'x/0', 'x/1']
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a tree with the names of their paths.

    >>> named_leaves({"Dense_0": {"kernel": 1, "bias": 2}})
    [('Dense_0/bias', 2), ('Dense_0/kernel', 1)]
    """
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf, an array or its shape, holds typed keys.

    >>> is_key(jax.random.key(0)), is_key(jax.random.PRNGKey(0)), is_key(1.5)
    (True, False, False)
    """
    # Only JAX's extended dtypes are not NumPy's; the full question takes much longer.
    return hasattr(leaf, "dtype") and not isinstance(leaf.dtype, np.dtype) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def through_key_data(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns `fn` such that it also takes typed keys, by their data.

    >>> jax.random.key_data(through_key_data(lambda data: data + 1)(jax.random.key(0))).tolist()
    [1, 1]
    """

    def apply(leaf: Any) -> Any:
        if not is_key(leaf):
            return fn(leaf)
        return jax.random.wrap_key_data(fn(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))

    return apply
