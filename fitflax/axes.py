"""Logical axis names: what linen's metadata says about the axes of parameters and collections, and what follows for the optimizer's state."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.core import meta
from jax.sharding import PartitionSpec

from fitflax.errors import ModelError

__all__ = ["AxisNames"]

Name = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, eq=False)
class AxisNames:
    """The names of the axes of a module's variables, by path, such as `params/Dense_0/kernel`.

    It is a static field of states, and says nothing about which state they are: all of them are equal, so that neither a tree's structure nor a compiled
    function depends on it. A compiled function of the user's that returns a state returns the names of the state that it was compiled for.

    Attributes:
        by_path: One name, several, or none, for each axis of an array that has metadata.
    """

    by_path: Mapping[str, tuple[Name, ...]] = dataclasses.field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AxisNames)

    def __hash__(self) -> int:
        return hash(AxisNames)

    def __repr__(self) -> str:
        return f"AxisNames({len(self.by_path)} arrays)"

    @classmethod
    def of(cls, boxed: Mapping[str, Any]) -> "AxisNames":
        """Returns the names in the metadata of what a module's `init` returned, such as `nn.with_logical_partitioning` puts there."""
        leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=lambda node: isinstance(node, meta.AxisMetadata))
        specs = {_name(path): leaf.get_partition_spec() for path, leaf in leaves if isinstance(leaf, meta.AxisMetadata) and hasattr(leaf, "get_partition_spec")}
        return cls({path: tuple(spec) for path, spec in specs.items()})

    def specs(self, params: Any, model_state: Any, opt_state: Any, *, strict: bool) -> tuple[Any, Any, Any]:
        """Returns `PartitionSpec`s of logical names for parameters, collections and optimizer state, in their structures.

        Raises:
            ModelError: `strict`, and arrays have no names; or one has another number of axes than names. All of them are listed.
        """
        faults: list[str] = []

        def own(root: str) -> Callable[[Any, Any], PartitionSpec]:
            def spec(path: Any, leaf: Any) -> PartitionSpec:
                name = "/".join(part for part in (root, _name(path)) if part)
                names = self.by_path.get(name)
                if names is not None and len(names) != leaf.ndim:
                    faults.append(f"{name} {list(leaf.shape)} has the names {list(names)}")
                elif names is None and leaf.ndim and strict:
                    faults.append(f"{name} {list(leaf.shape)} has none")
                return PartitionSpec(*([None] * leaf.ndim if names is None else names))

            return spec

        params_specs = jax.tree_util.tree_map_with_path(own("params"), params)
        state_specs = jax.tree_util.tree_map_with_path(own(""), model_state)
        if faults:
            raise ModelError(f"Each axis of an array needs a logical name: {'; '.join(faults)}. Give them with nn.with_logical_partitioning(init, names).")
        shapes = {_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

        def of_optimizer(path: Any, leaf: Any) -> PartitionSpec:
            parts = [_name((entry,)) for entry in path]
            # A moment's path ends with that of its parameter, whatever transformations it lies in.
            param = next((name for start in range(len(parts) + 1) if (name := "/".join(parts[start:])) in shapes), None)
            is_alike = param is not None and shapes[param] == leaf.shape
            return PartitionSpec(*self.by_path.get(f"params/{param}", [None] * leaf.ndim) if is_alike else [None] * leaf.ndim)

        return params_specs, state_specs, jax.tree_util.tree_map_with_path(of_optimizer, opt_state)


def _name(path: Any) -> str:
    return str(jax.tree_util.keystr(path, simple=True, separator="/"))
