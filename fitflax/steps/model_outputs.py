"""The outputs of a module by name, and a pytree that keeps their containers in JAX transformations.

Only this module distinguishes tuples, mappings and classes with named attributes. Losses, metrics and checks ask for an output by name; code that
handles all of them uses `Returned`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
from flax.core import FrozenDict

from fitflax.state import PyTree

__all__ = ["Returned", "in_plain_containers", "map_outputs", "named_outputs", "output_names", "places_of"]


def named_outputs(outputs: PyTree) -> dict[Any, PyTree] | None:
    """Returns outputs by name, in the module's order, or `None` for a single output, which has no name.

    The names are the keys of a mapping, or the attributes of a registered class: a NamedTuple, `flax.struct.dataclass`, `chex.dataclass`, or a
    `ModelOutput` of transformers. The members of a tuple or list are `output_1`, `output_2`. Members that are `None` are left out.

    >>> named_outputs((1, 2)), named_outputs({"b": 1, "a": None}), named_outputs(3)
    ({'output_1': 1, 'output_2': 2}, {'b': 1}, None)
    """
    members = _members_of(outputs)
    return None if members is None else {name: output for name, output in members.items() if output is not None}


def _members_of(outputs: PyTree) -> dict[Any, PyTree] | None:
    if type(outputs) in (list, tuple):
        return {f"output_{number}": output for number, output in enumerate(outputs, 1)}
    children = jax.tree_util.tree_leaves_with_path(outputs, is_leaf=lambda node: node is not outputs)
    found = {_name_of(path[0]): child for path, child in children if path}
    if isinstance(outputs, Mapping):  # JAX sorts the keys.
        return {name: found.get(name, output) for name, output in outputs.items()}
    return None if not found or None in found else found


def places_of(outputs: PyTree) -> tuple[Any, ...]:
    """Returns the names of all outputs, including those that are `None`, for arguments that are given by position."""
    return tuple(_members_of(outputs) or ())


def _name_of(key: Any) -> Any:
    """Returns the attribute or key of a child; `None` if it has only an index."""
    return getattr(key, "name", getattr(key, "key", None)) if not isinstance(key, jax.tree_util.FlattenedIndexKey) else None


def output_names(outputs: PyTree) -> tuple[Any, ...] | None:
    """Returns the names of several outputs, or `None` for a single one."""
    named = named_outputs(outputs)
    return None if named is None else tuple(named)


class _Members(NamedTuple):
    """Where the leaves of outputs with names are."""

    # By name: the index of an array, those of a container without names, other members, or `None` for `None`.
    places: "tuple[tuple[Any, int | tuple[int, ...] | _Members | None], ...]"


@dataclasses.dataclass(frozen=True)
class _Form:
    """How leaves make up outputs; static in JAX transformations."""

    treedef: Any = dataclasses.field(hash=False)  # JAX's structure of the outputs. Not hashed, because a class may have static parts that are not hashable.
    orders: Any  # The order of keys, which JAX does not keep; see `_order_of`.
    members: _Members | None  # `None` for a single output.


@jax.tree_util.register_pytree_node_class
class Returned:
    """The outputs of a module as a pytree of the same leaves that remembers their containers.

    JAX transformations rebuild containers, sort the keys of dicts, and fill classes with shapes or placeholders, which a user's class may reject.
    This class can be mapped and traced, and rebuilds the module's containers once, with arrays.

    >>> returned = Returned.of({"b": 1, "a": (2, None)})
    >>> jax.tree.map(lambda leaf: 10 * leaf, returned).rebuilt()
    {'b': 10, 'a': (20, None)}
    """

    def __init__(self, leaves: tuple[Any, ...], form: _Form) -> None:
        self._leaves = leaves
        self._form = form

    @classmethod
    def of(cls, outputs: PyTree) -> Self:
        """Returns the outputs in this form."""
        leaves, treedef = jax.tree.flatten(outputs)
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        places = _places_of(outputs, numbers)
        return cls(tuple(leaves), _Form(treedef, _order_of(outputs), places if isinstance(places, _Members) else None))

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Form]:
        """Returns the leaves and the static form."""
        return self._leaves, self._form

    @classmethod
    def tree_unflatten(cls, form: _Form, leaves: Any) -> Self:
        """Returns an instance with other leaves of any type."""
        return cls(tuple(leaves), form)

    def rebuilt(self) -> PyTree:
        """Returns the outputs in the module's containers, with keys in their original order."""
        return _in_order(jax.tree.unflatten(self._form.treedef, self._leaves), self._form.orders)

    def by_name(self) -> PyTree:
        """Returns the outputs in plain containers, whatever the leaves are: nested dicts of leaves and lists of leaves by name, or a single output."""
        if self._form.members is None:
            return self._leaves[0] if _is_leaf(self._form.treedef) else self
        return self._output(self._form.members)

    def _output(self, at: int | tuple[int, ...] | _Members | None) -> PyTree:
        if at is None:
            return None
        if isinstance(at, _Members):
            return {name: self._output(place) for name, place in at.places}
        return self._leaves[at] if isinstance(at, int) else [self._leaves[number] for number in at]

    def __repr__(self) -> str:
        named = self.by_name()
        return repr(list(self._leaves) if named is self else named)


def map_outputs(fn: Callable[[Any], Any], outputs: PyTree) -> PyTree:
    """Returns outputs with `fn` applied to their arrays; they keep their containers, and dicts their order, which `jax.tree.map` would sort."""
    return jax.tree.map(fn, Returned.of(outputs)).rebuilt()


def in_plain_containers(outputs: PyTree) -> PyTree:
    """Returns outputs with nested mappings and classes replaced by dicts, for readers without these classes.

    >>> from flax.core import FrozenDict
    >>> in_plain_containers((FrozenDict(b=1), 2))
    ({'b': 1}, 2)
    """
    if type(outputs) in (list, tuple):
        return type(outputs)(map(in_plain_containers, outputs))
    named = named_outputs(outputs)
    return outputs if named is None else {name: in_plain_containers(output) for name, output in named.items()}


def _places_of(output: PyTree, numbers: Mapping[int, int]) -> int | tuple[int, ...] | _Members | None:
    if output is None:
        return None
    members = _members_of(output)
    if members is not None:
        return _Members(tuple((name, _places_of(member, numbers)) for name, member in members.items()))
    leaves, treedef = jax.tree.flatten(output)
    places = tuple(numbers[id(leaf)] for leaf in leaves)
    return places[0] if _is_leaf(treedef) else places


def _is_leaf(treedef: Any) -> bool:
    return jax.tree_util.treedef_is_leaf(treedef) and treedef.num_leaves == 1  # JAX also returns True for None.


def _order_of(tree: PyTree) -> Any:
    """Returns the order of keys of nested dicts, which JAX sorts, also inside tuples and lists; `None` if there are no dicts."""
    if type(tree) in (dict, FrozenDict):
        return tuple((key, _order_of(value)) for key, value in tree.items())
    if isinstance(tree, tuple) or type(tree) is list:
        orders = tuple(map(_order_of, tree))
        return orders if any(order is not None for order in orders) else None
    return None


def _in_order(tree: PyTree, order: Any) -> PyTree:
    if order is None:
        return tree
    if isinstance(tree, tuple | list):
        members = [_in_order(member, one) for member, one in zip(tree, order, strict=True)]
        return type(tree)(*members) if hasattr(tree, "_fields") else type(tree)(members)
    return type(tree)({key: _in_order(tree[key], one) for key, one in order})
