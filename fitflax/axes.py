"""Logical axis names: what linen's metadata says about the axes of parameters and collections, and what follows for the optimizer's state."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.core import meta
from flax.linen.partitioning import AxisMetadata, get_axis_names
from jax.sharding import PartitionSpec

from fitflax.errors import ModelError
from fitflax.leaves import named_leaves, path_name

__all__ = ["AxisNames", "Name", "is_axes_collection"]

Name = str | tuple[str, ...] | None


_AXES = "_axes"


def is_axes_collection(name: str, tree: Any) -> bool:
    """Returns whether a collection holds nothing but names, as `flax.linen.partitioning.param_with_axes` makes one beside the parameters, `params_axes`."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, AxisMetadata))
    return name.endswith(_AXES) and bool(leaves) and all(isinstance(leaf, AxisMetadata) for leaf in leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class AxisNames:
    """The names of the axes of a module's variables, by path, such as `params/Dense_0/kernel`.

    It is a static field of states, and says nothing about which state they are: all of them are equal, so that neither a tree's structure nor a compiled
    function depends on it. A compiled function of the user's that returns a state returns the names of the state that it was compiled for.

    Attributes:
        by_path: One name, several, or none, for each axis of an array that has metadata.
        is_known: Whether the module was asked for them.
    """

    by_path: Mapping[str, tuple[Name, ...]] = dataclasses.field(default_factory=dict)
    is_known: bool = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AxisNames)

    def __hash__(self) -> int:
        return hash(AxisNames)

    def __repr__(self) -> str:
        return f"AxisNames({len(self.by_path)} arrays)"

    @classmethod
    def of(cls, boxed: Mapping[str, Any]) -> "AxisNames":
        """Returns the names in the metadata of what a module's `init` returned, such as `nn.with_logical_partitioning` puts there, or `param_with_axes`."""
        leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=lambda node: isinstance(node, meta.AxisMetadata))
        specs = {
            path_name(path): leaf.get_partition_spec() for path, leaf in leaves if isinstance(leaf, meta.AxisMetadata) and hasattr(leaf, "get_partition_spec")
        }
        for collection, tree in boxed.items():
            if is_axes_collection(collection, tree):
                names = jax.tree_util.tree_leaves_with_path(get_axis_names(tree), is_leaf=lambda node: isinstance(node, PartitionSpec))
                specs |= {f"{collection.removesuffix(_AXES)}/{path_name(path)}": spec for path, spec in names}
        return cls({path: tuple(spec) for path, spec in specs.items()})

    def each(self, fn: Callable[[str, Any, "tuple[Name, ...] | None"], Any], params: Any, model_state: Any, opt_state: Any) -> tuple[Any, Any, Any]:
        """Returns parameters, collections and optimizer state with `fn(path, array, names)` in place of each array.

        The names are `None` where there are none. An array of the optimizer has its parameter's if it has its shape: a moment's path ends with that of its
        parameter, whatever transformations it lies in.
        """

        def own(root: str) -> Callable[[Any, Any], Any]:
            def call(path: Any, leaf: Any) -> Any:
                name = "/".join(part for part in (root, path_name(path)) if part)
                return fn(name, leaf, self.by_path.get(name))

            return call

        shapes = {path: leaf.shape for path, leaf in named_leaves(params)}

        def of_optimizer(path: Any, leaf: Any) -> Any:
            parts = [path_name((entry,)) for entry in path]
            param = next((name for start in range(len(parts) + 1) if (name := "/".join(parts[start:])) in shapes), None)
            is_alike = param is not None and shapes[param] == leaf.shape
            return fn(f"opt_state/{path_name(path)}", leaf, self.by_path.get(f"params/{param}") if is_alike else None)

        return (
            jax.tree_util.tree_map_with_path(own("params"), params),
            jax.tree_util.tree_map_with_path(own(""), model_state),
            jax.tree_util.tree_map_with_path(of_optimizer, opt_state),
        )

    def specs(self, params: Any, model_state: Any, opt_state: Any, *, strict: bool) -> tuple[Any, Any, Any]:
        """Returns `PartitionSpec`s of logical names for parameters, collections and optimizer state, in their structures.

        Raises:
            ModelError: `strict`, and arrays have no names; or one has another number of axes than names. All of them are listed.
        """
        faults: list[str] = []

        def spec(path: str, leaf: Any, names: tuple[Name, ...] | None) -> PartitionSpec:
            is_own = not path.startswith("opt_state/")
            if is_own and names is not None and len(names) != leaf.ndim:
                faults.append(f"{path} {list(leaf.shape)} has the names {list(names)}")
            elif is_own and names is None and leaf.ndim and strict:
                faults.append(f"{path} {list(leaf.shape)} has none")
            return PartitionSpec(*([None] * leaf.ndim if names is None else names))

        trees = self.each(spec, params, model_state, opt_state)
        if faults:
            raise ModelError(f"Each axis of an array needs a logical name: {'; '.join(faults)}. Give them with nn.with_logical_partitioning(init, names).")
        return trees
