"""Many small arrays in few large ones: each array that is spared is a transfer less, or an argument and a result less of every call of the device."""

import functools
import math
from collections.abc import Mapping, Sequence
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
        largest: Leaves with more elements have a vector of their own.

    >>> tree = {"w": jnp.ones(2), "b": jnp.zeros(()), "n": jnp.arange(3)}
    >>> form = Form.of(tree)
    >>> packed = form.pack(tree)
    >>> {name: vector.shape for name, vector in packed.items()}, form.unpack(packed)["w"].tolist()
    ({'float32': (3,), 'int32': (3,)}, [1.0, 1.0])
    """

    def __init__(self, treedef: Any, types: Sequence[tuple[tuple[int, ...], Any, Any]], largest: int | None = None) -> None:
        self.treedef = treedef
        self.leaves: list[_Leaf] = []
        sizes: dict[str, int] = {}
        for index, (shape, dtype, impl) in enumerate(types):
            if impl is not None:
                data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
                shape, dtype = data.shape, data.dtype
            size = math.prod(shape)
            name = dtype.name if largest is None or size <= largest else f"{dtype.name} {index}"
            begin = sizes.get(name, 0)
            sizes[name] = begin + size
            self.leaves.append(_Leaf(name, begin, begin + size, shape, impl))

    @staticmethod
    def of(tree: PyTree, largest: int | None = None) -> "Form":
        """Returns the form of a tree of arrays or shapes."""
        leaves, treedef = jax.tree.flatten(tree)
        return _form(treedef, tuple((leaf.shape, leaf.dtype, _impl(leaf)) for leaf in leaves), largest)

    def pack(self, tree: PyTree) -> dict[str, Any]:
        """Returns the vectors of a tree, NumPy of a tree of NumPy; may be traced."""
        groups: dict[str, list[Any]] = {}
        leaves = jax.tree.leaves(tree)
        for place, leaf in zip(self.leaves, leaves, strict=True):
            data = leaf if place.impl is None else jax.random.key_data(leaf)
            groups.setdefault(place.vector, []).append(data.reshape(-1))
        concatenate: Any = np.concatenate if all(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves) else jnp.concatenate
        return {name: concatenate(group) for name, group in groups.items()}

    def unpack(self, vectors: Mapping[str, Any]) -> PyTree:
        """Returns the tree that `pack` was called with; may be traced."""
        leaves = [vectors[leaf.vector][leaf.begin : leaf.end].reshape(leaf.shape) for leaf in self.leaves]
        typed = [data if leaf.impl is None else jax.random.wrap_key_data(data, impl=leaf.impl) for leaf, data in zip(self.leaves, leaves, strict=True)]
        return self.treedef.unflatten(typed)

    def unpack_arrays(self, vectors: Mapping[str, jax.Array]) -> PyTree:
        """Returns the tree of vectors on the device, in one call of it."""
        return _unpack(self, vectors)


def _impl(leaf: jax.Array) -> Any:
    return None if isinstance(leaf.dtype, np.dtype) else jax.random.key_impl(leaf)  # No other dtypes than those of keys are not NumPy's.


_form = functools.lru_cache(maxsize=64)(Form)

_pack = jax.jit(Form.pack, static_argnums=0)
_unpack = jax.jit(Form.unpack, static_argnums=0)


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
        self.form = Form.of(tree)
        self._vectors = _pack(self.form, tree)

    def leaves(self) -> list[np.ndarray[Any, Any]]:
        """Returns the leaves, those that are typed keys as key data; waits until they are there. They are views of larger arrays."""
        vectors = {name: np.asarray(vector) for name, vector in self._vectors.items()}
        return [vectors[leaf.vector][leaf.begin : leaf.end].reshape(leaf.shape) for leaf in self.form.leaves]
