"""A copy of many small arrays in few large ones, which costs a call of the device and a transfer less for each array that is spared."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.state import PyTree

__all__ = ["Form", "Packed"]


class _Leaf(NamedTuple):
    """Where a leaf lies: its vector, its stretch of that, its shape (of the key's data for a typed key), and the key's implementation."""

    vector: str
    begin: int
    end: int
    shape: tuple[int, ...]
    impl: Any


class Form:
    """How a tree is packed; the same object for all trees of the same structure, shapes and dtypes, so that what follows from these can be cached by it.

    Args:
        treedef: The structure.
        types: Shape, dtype and, of a typed key, implementation of each leaf.
    """

    def __init__(self, treedef: Any, types: Sequence[tuple[tuple[int, ...], Any, Any]]) -> None:
        self.treedef = treedef
        self.leaves: list[_Leaf] = []
        sizes: dict[str, int] = {}
        for shape, dtype, impl in types:
            if impl is not None:
                data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
                shape, dtype = data.shape, data.dtype
            begin = sizes.get(dtype.name, 0)
            sizes[dtype.name] = begin + math.prod(shape)
            self.leaves.append(_Leaf(dtype.name, begin, sizes[dtype.name], shape, impl))


def _impl(leaf: jax.Array) -> Any:
    return None if isinstance(leaf.dtype, np.dtype) else jax.random.key_impl(leaf)  # No other dtypes than those of keys are not NumPy's.


_form = functools.lru_cache(maxsize=64)(Form)


@jax.jit
def _pack(leaves: list[jax.Array]) -> dict[str, jax.Array]:
    groups: dict[str, list[jax.Array]] = {}
    for leaf in leaves:
        data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        groups.setdefault(data.dtype.name, []).append(data.reshape(-1))
    return {name: jnp.concatenate(group) for name, group in groups.items()}


class Packed:
    """A copy of a tree of arrays on one device that nothing done to the originals can touch: a vector for each dtype.

    Making one waits for nothing.

    Args:
        tree: Arrays that lie on the same device.

    >>> packed = Packed({"w": jnp.ones(2), "b": jnp.zeros(()), "n": jnp.arange(3)})
    >>> packed.form.treedef.unflatten(packed.leaves())
    {'b': array(0., dtype=float32), 'n': array([0, 1, 2], dtype=int32), 'w': array([1., 1.], dtype=float32)}
    """

    def __init__(self, tree: PyTree) -> None:
        leaves, treedef = jax.tree.flatten(tree)
        self.form: Form = _form(treedef, tuple((leaf.shape, leaf.dtype, _impl(leaf)) for leaf in leaves))
        self._vectors = _pack(leaves)

    def leaves(self) -> list[np.ndarray[Any, Any]]:
        """Returns the leaves, those that are typed keys as key data; waits until they are there. They are views of larger arrays."""
        vectors = {name: np.asarray(vector) for name, vector in self._vectors.items()}
        return [vectors[leaf.vector][leaf.begin : leaf.end].reshape(leaf.shape) for leaf in self.form.leaves]
