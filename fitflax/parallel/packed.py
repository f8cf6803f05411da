"""Many small arrays packed into few large ones, to save transfers and arguments of calls."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.leaves import on_host
from fitflax.state import PyTree

__all__ = ["Form", "Packed"]


class _Leaf(NamedTuple):
    """The place of a leaf: its vector, its range in the vector, its shape (of the key data for a typed key), and the implementation of the key."""

    vector: str
    begin: int
    end: int
    shape: tuple[int, ...]
    impl: Any


class Form:
    """How a tree is packed; the same object for all trees of the same structure, shapes and dtypes, so it can be a key of caches.

    `types` are the shape, the dtype and, for a typed key, the implementation of each leaf. Leaves larger than `largest` get a separate vector.

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
        """Returns the vectors of a tree, in NumPy for a tree of NumPy arrays; may be traced."""
        groups: dict[str, list[Any]] = {}
        leaves = jax.tree.leaves(tree)
        for place, leaf in zip(self.leaves, leaves, strict=True):
            data = leaf if place.impl is None else jax.random.key_data(leaf)
            groups.setdefault(place.vector, []).append(data.reshape(-1))
        concatenate: Any = np.concatenate if all(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves) else jnp.concatenate
        return {name: concatenate(group) for name, group in groups.items()}

    def unpack(self, vectors: Mapping[str, Any]) -> PyTree:
        """Returns the tree that was packed; may be traced."""
        leaves = [vectors[leaf.vector][leaf.begin : leaf.end].reshape(leaf.shape) for leaf in self.leaves]
        typed = [data if leaf.impl is None else jax.random.wrap_key_data(data, impl=leaf.impl) for leaf, data in zip(self.leaves, leaves, strict=True)]
        return self.treedef.unflatten(typed)

    def unpack_arrays(self, vectors: Mapping[str, jax.Array]) -> PyTree:
        """Returns the tree that was packed, unpacked on the device in one call."""
        return _unpack(self, vectors)


def _impl(leaf: jax.Array) -> Any:
    return None if isinstance(leaf.dtype, np.dtype) else jax.random.key_impl(leaf)  # Only the dtypes of keys are not NumPy dtypes.


_form = functools.lru_cache(maxsize=64)(Form)

_pack = jax.jit(Form.pack, static_argnums=0)
_unpack = jax.jit(Form.unpack, static_argnums=0)


class Packed:
    """A copy of a tree of arrays on one device, independent of the originals, with one vector per dtype; creating it does not block."""

    def __init__(self, tree: PyTree) -> None:
        self.form = Form.of(tree)
        self._vectors = _pack(self.form, tree)

    def leaves(self) -> list[np.ndarray[Any, Any]]:
        """Returns the leaves, views of larger arrays, with typed keys as key data; waits until they are available."""
        vectors = {name: on_host(vector) for name, vector in self._vectors.items()}
        return [vectors[leaf.vector][leaf.begin : leaf.end].reshape(leaf.shape) for leaf in self.form.leaves]
