"""Logical axis names from linen's metadata, for parameters, collections and the optimizer state."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from flax.core import meta
from flax.linen.partitioning import AxisMetadata, get_axis_names
from flax.linen.spmd import LogicallyPartitioned
from jax.sharding import PartitionSpec

from fitflax.errors import ModelError
from fitflax.leaves import listed, named_leaves, path_name

__all__ = ["AxisNames", "Name", "is_axes_collection"]

Name = str | tuple[str, ...] | None

_AXES = "_axes"


def is_axes_collection(name: str, tree: Any) -> bool:
    """Returns whether a collection holds only axis names, such as `params_axes` of `flax.linen.partitioning.param_with_axes`."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, AxisMetadata))
    return name.endswith(_AXES) and bool(leaves) and all(isinstance(leaf, AxisMetadata) for leaf in leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class AxisNames:
    """The logical axis names of a module's variables by path, such as `params/Dense_0/kernel`.

    A static field of states. All instances are equal, so neither tree structures nor compiled functions depend on the names. As a result, a user's compiled
    function that returns a state returns the names of the state that it was compiled for.

    Attributes:
        by_path: One name, a tuple of names or `None` for each axis of an array with metadata.
        is_known: Whether the names were read from the module.
        of_mesh: The paths of arrays whose names are axes of the mesh, as those of `nn.with_partitioning` are.
    """

    by_path: Mapping[str, tuple[Name, ...]] = dataclasses.field(default_factory=dict)
    is_known: bool = True
    of_mesh: frozenset[str] = frozenset()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AxisNames)

    def __hash__(self) -> int:
        return hash(AxisNames)

    def __repr__(self) -> str:
        return f"AxisNames({len(self.by_path)} arrays)"

    @classmethod
    def of(cls, boxed: Mapping[str, Any]) -> "AxisNames":
        """Returns the names in the metadata of variables from `init`, as set by `nn.with_logical_partitioning` or `param_with_axes`."""
        leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=lambda node: isinstance(node, meta.AxisMetadata))
        specs = {
            path_name(path): leaf.get_partition_spec() for path, leaf in leaves if isinstance(leaf, meta.AxisMetadata) and hasattr(leaf, "get_partition_spec")
        }
        for collection, tree in boxed.items():
            if is_axes_collection(collection, tree):
                names = jax.tree_util.tree_leaves_with_path(get_axis_names(tree), is_leaf=lambda node: isinstance(node, PartitionSpec))
                specs |= {f"{collection.removesuffix(_AXES)}/{path_name(path)}": spec for path, spec in names}
        of_mesh = {path_name(path) for path, leaf in leaves if isinstance(leaf, meta.Partitioned) and not isinstance(leaf, LogicallyPartitioned)}
        return cls({path: tuple(spec) for path, spec in specs.items()}, of_mesh=frozenset(of_mesh))

    def without_missing(self, axes: Collection[str], named: Collection[str]) -> "AxisNames":
        """Returns the names without axes that the mesh lacks, for arrays in `of_mesh`; `axes` are those of the mesh, and `named` have rules.

        >>> names = AxisNames({"a": (None, "model"), "b": (("data", "model"),), "c": ("model",)}, of_mesh=frozenset("ab"))
        >>> names.without_missing(["data"], []).by_path
        {'a': (None, None), 'b': (('data',),), 'c': ('model',)}
        """

        def kept(name: Name) -> Name:
            return tuple(axis for axis in name if axis in axes) if isinstance(name, tuple) else name if name in axes or name in named else None

        by_path = {path: tuple(map(kept, names)) if path in self.of_mesh else names for path, names in self.by_path.items()}
        return dataclasses.replace(self, by_path=by_path)

    def missing(self, axes: Collection[str], named: Collection[str]) -> dict[str, list[str]]:
        """Returns the axes that `without_missing` removes, with the paths of the arrays that name them.

        >>> names = AxisNames({"a": (None, "model"), "b": (("data", "model"),), "c": ("model",)}, of_mesh=frozenset("ab"))
        >>> names.missing(["data"], [])
        {'model': ['a', 'b']}
        """
        found: dict[str, list[str]] = {}
        for path in sorted(self.of_mesh):
            for name in self.by_path[path]:
                for axis in name if isinstance(name, tuple) else () if name is None or name in named else (name,):
                    if axis not in axes:
                        found.setdefault(axis, []).append(path)
        return found

    def each(self, fn: Callable[[str, Any, "tuple[Name, ...] | None"], Any], params: Any, model_state: Any, opt_state: Any) -> tuple[Any, Any, Any]:
        """Returns parameters, collections and optimizer state with each array replaced by `fn(path, array, names)`.

        `names` is `None` for arrays without names. An optimizer array has the names of a parameter if its path ends with the parameter's path and the shapes
        are equal.
        """

        def of_variables(root: str) -> Callable[[Any, Any], Any]:
            def call(path: Any, leaf: Any) -> Any:
                name = "/".join(part for part in (root, path_name(path)) if part)
                return fn(name, leaf, self.by_path.get(name))

            return call

        shapes = {path: leaf.shape for path, leaf in named_leaves(params)}

        def of_optimizer(path: Any, leaf: Any) -> Any:
            parts = [path_name((entry,)) for entry in path]
            param = next((name for start in range(len(parts) + 1) if (name := "/".join(parts[start:])) in shapes), None)
            has_param_shape = param is not None and shapes[param] == leaf.shape
            return fn(f"opt_state/{path_name(path)}", leaf, self.by_path.get(f"params/{param}") if has_param_shape else None)

        return (
            jax.tree_util.tree_map_with_path(of_variables("params"), params),
            jax.tree_util.tree_map_with_path(of_variables(""), model_state),
            jax.tree_util.tree_map_with_path(of_optimizer, opt_state),
        )

    def specs(self, params: Any, model_state: Any, opt_state: Any, *, strict: bool) -> tuple[Any, Any, Any]:
        """Returns `PartitionSpec`s of logical names for parameters, collections and optimizer state, in their structures.

        Raises a `ModelError` if an array has more names than axes or, if `strict`, no names.
        """
        faults: list[str] = []

        def spec(path: str, leaf: Any, names: tuple[Name, ...] | None) -> PartitionSpec:
            is_variable = not path.startswith("opt_state/")
            if is_variable and names is not None and len(names) > leaf.ndim:
                faults.append(f"{path} {list(leaf.shape)} has the names {list(names)}")
            elif is_variable and names is None and leaf.ndim and strict:
                faults.append(f"{path} {list(leaf.shape)} has no names")
            return PartitionSpec(*(names or ()), *[None] * (leaf.ndim - len(names or ())))

        trees = self.each(spec, params, model_state, opt_state)
        if faults:
            raise ModelError(f"Each axis of an array needs one logical name: {listed(faults, '; ')}. Set names with nn.with_logical_partitioning(init, names).")
        return trees
