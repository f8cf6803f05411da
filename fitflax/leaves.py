"""Leaves of pytrees: path names, descriptions of shapes, and typed keys, which are arrays to JAX but not to NumPy."""

import itertools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["describe_shapes", "is_key", "key_of", "listed", "named_leaves", "on_host", "path_name", "through_key_data"]


def path_name(path: tuple[Any, ...]) -> str:
    """Returns the name of a JAX key path.

    >>> [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path({"Dense_0": {"kernel": 1}, "x": (2, 3)})]
    ['Dense_0/kernel', 'x/0', 'x/1']
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a tree with their path names.

    >>> named_leaves({"Dense_0": {"kernel": 1, "bias": 2}})
    [('Dense_0/bias', 2), ('Dense_0/kernel', 1)]
    """
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def listed(names: Collection[Any], separator: str = ", ", *, most: int = 5) -> str:
    """Returns the first path names, or other texts, as a list for a message, and how many more there are.

    >>> listed(["a", "b"]), listed(["a", "b", "c", "d"], most=2)
    ('a, b', 'a, b, and 2 more')
    """
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return separator.join([*map(str, itertools.islice(names, most)), *more])


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf, an array or its shape, holds typed keys.

    >>> is_key(jax.random.key(0)), is_key(jax.random.PRNGKey(0)), is_key(1.5)
    (True, False, False)
    """
    # A quick check first: only JAX's extended dtypes are not NumPy dtypes.
    return hasattr(leaf, "dtype") and not isinstance(leaf.dtype, np.dtype) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def on_host(array: Any) -> np.ndarray[Any, Any]:
    """Returns an array as NumPy, with an explicit transfer for `jax_transfer_guard`; unlike `jax.device_get`, it does not copy CPU arrays.

    >>> on_host(jnp.ones(2))
    array([1., 1.], dtype=float32)
    """
    with jax.transfer_guard_device_to_host("allow"):
        return np.asarray(array)


def key_of(data: Any, impl: Any) -> Any:
    """Returns typed keys from key data on the host.

    >>> key_of(np.array([0, 7], np.uint32), "threefry2x32") == jax.random.key(7)
    Array(True, dtype=bool)
    """
    return jax.random.wrap_key_data(jax.device_put(data), impl=impl)  # An explicit transfer, for `jax_transfer_guard`.


def through_key_data(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns `fn` extended to typed keys: it is applied to their key data.

    >>> jax.random.key_data(through_key_data(lambda data: data + 1)(jax.random.key(0))).tolist()
    [1, 1]
    """

    def apply(leaf: Any) -> Any:
        if not is_key(leaf):
            return fn(leaf)
        return jax.random.wrap_key_data(fn(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))

    return apply


def describe_shapes(tree: Any) -> str:
    """Returns the shapes and dtypes of a tree of arrays, in one line.

    >>> describe_shapes({"image": np.zeros((8, 28), np.float32)})
    "{'image': float32[8,28]}"
    """

    class Text(str):
        __slots__ = ()
        __repr__ = str.__str__

    def describe(leaf: Any) -> str:
        if not hasattr(leaf, "shape"):
            return Text(type(leaf).__name__)
        return Text(f"{leaf.dtype}[{','.join(str(size) for size in leaf.shape)}]")

    return repr(jax.tree.map(describe, tree))
