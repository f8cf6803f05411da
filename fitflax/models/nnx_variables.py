"""The variables of an NNX module, read before each call of the trainer and written back after it."""

import weakref
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from typing_extensions import override

from fitflax.errors import ModelError
from fitflax.leaves import is_key, listed
from fitflax.models.nnx_graph import Filter, Path, as_state, collected, in_mode, raw, split_module
from fitflax.models.own import OwnVariables
from fitflax.state import AxisNames, PyTree

__all__ = ["ModuleVariables"]


class ModuleVariables(OwnVariables):
    """The variables of an NNX module."""

    def __init__(self, module: nnx.Module, filters: Filter) -> None:
        self._module, self._filters = module, filters
        self.definition, leaves = filters.define(in_mode(module, filters, train=True))
        specs = [(slot, leaf) for slot, leaf in zip(self.definition.slots, leaves, strict=True) if isinstance(leaf, nnx.Variable)]
        self._axes = AxisNames({f"{slot.collection}/{slot.name}": spec for slot, leaf in specs if (spec := _axes_of(leaf)) is not None})
        # The last graph definition of the module that passed the check.
        self._checked_graph = split_module(module)[0]
        self._written: list[Any] | None = None

    @property
    @override
    def model(self) -> nnx.Module:
        return self._module

    @property
    @override
    def axes(self) -> AxisNames:
        return self._axes

    @override
    def copy(self) -> Self:
        return type(self)(nnx.clone(self._module), self._filters)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the variables that are arrays, by path."""
        found = dict(split_module(self._module)[1])
        values = {f"{slot.collection}/{slot.name}": raw(found[slot.path]) for slot in self.definition.slots if slot.template is None}
        return {path: jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value)) for path, value in values.items() if not is_key(value)}

    @override
    def read(self) -> dict[str, PyTree]:
        return collected(self.definition.slots, jax.tree.map(self._as_array, self._leaves()))

    @override
    def read_changed(self) -> dict[str, PyTree] | None:
        leaves = self._leaves()
        now, written = jax.tree.leaves(leaves), self._written
        if written is not None and len(now) == len(written) and all(old() is new for old, new in zip(written, now, strict=True)):
            return None
        return collected(self.definition.slots, jax.tree.map(self._as_array, leaves))

    @override
    def write(self, variables: dict[str, PyTree]) -> None:
        nnx.update(self._module, as_state(self.definition.slots, variables))
        self._written = [weakref.ref(leaf) for leaf in jax.tree.leaves(self._leaves())]

    def _leaves(self) -> list[Any]:
        """Returns the values of the module's variables, in the order of the slots. Raises a `ModelError` if its variables or configuration have changed."""
        graph, entries = split_module(self._module)
        found = dict(entries)
        if graph != self._checked_graph:
            self._check_same(found)
            self._checked_graph = graph
        return [raw(found[slot.path]) for slot in self.definition.slots]

    def _check_same(self, found: Mapping[Path, Any]) -> None:
        definition = self._filters.define(in_mode(self._module, self._filters, train=True))[0]
        if definition.graph == self.definition.graph:
            return  # Only its mode or sown values differ.
        before, now = ({slot.name: slot for slot in each.slots} for each in (self.definition, definition))
        changes = [f"{name} was removed" for name in before if name not in now] + [f"{name} was added" for name in now if name not in before]
        how = listed(changes) or "its configuration, or the type of a variable, differs"
        raise ModelError(f"The {type(self._module).__name__} was changed after the trainer was created: {how}. Create a new Trainer for the changed module.")

    def _as_array(self, leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ModelError(f"The {type(self._module).__name__} holds shapes instead of arrays. Create it without nnx.eval_shape, or restore it first.")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ModelError(
                f"An array of the {type(self._module).__name__} was deleted, because it was donated to a custom compiled function. "
                "Do not donate the module's arrays, or create the module again."
            )
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise ModelError(f"A variable of the {type(self._module).__name__} holds a {type(leaf).__name__}. Variables must hold arrays or numbers.")
        return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)


def _axes_of(variable: nnx.Variable[Any]) -> tuple[Any, ...] | None:
    """Returns the axis names in a variable's metadata; `None` if there are none."""
    if not variable.get_metadata().get("out_sharding"):
        return None
    return tuple(nnx.spmd.get_var_pspec(variable) or ())
