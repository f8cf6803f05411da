"""Determines which axis of an array is split over which axes of the mesh, from axis names and sizes, without touching a device."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import PartitionSpec

from fitflax.errors import ConfigError, ShardingError, did_you_mean
from fitflax.leaves import is_key, listed
from fitflax.state import Name, TrainState

MeshAxes = str | tuple[str, ...] | None
Rules = tuple[tuple[str, MeshAxes], ...]

BATCH = "batch"
"""The logical name of the axis of examples."""

FSDP_MIN_SIZE = 2**12
"""Minimum number of elements of an array without axis names to be split; gathering smaller ones costs more than splitting saves."""

# Minimum size of a replicated parameter to warn about.
_LARGE_BYTES = 2**20


def checked_rules(rules: Any, sizes: Mapping[str, int]) -> Rules:
    """Returns the rules `logical name -> mesh axes`, pairs or a dict, as pairs in order of precedence."""
    if rules is not None and (not isinstance(rules, Mapping | Sequence) or isinstance(rules, str)):
        raise ConfigError(f"Sharded(rules=...) takes pairs (logical name, mesh axis), such as [('mlp', 'model')], or a dict of them. Received: {rules!r}.")
    pairs: Any = () if rules is None else tuple(rules.items() if isinstance(rules, Mapping) else rules)
    checked: list[tuple[str, MeshAxes]] = []
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ConfigError(f"Sharded(rules=...) takes pairs (logical name, mesh axis), such as [('mlp', 'model')]. Received: {pair!r}.")
        name, axes = pair
        axes = tuple(axes) if isinstance(axes, list | tuple) else axes
        if not (axes is None or isinstance(axes, str) or (isinstance(axes, tuple) and all(isinstance(axis, str) for axis in axes))):
            raise ConfigError(f"Sharded(rules=...) must map each logical name to a mesh axis, a tuple of them, or None. Received: {name!r}: {axes!r}.")
        if len(set(_as_tuple(axes))) < len(_as_tuple(axes)):
            raise ConfigError(f"Sharded(rules=...) maps {name!r} to the same mesh axis twice: {axes!r}.")
        unknown = [axis for axis in _as_tuple(axes) if axis not in sizes]
        if unknown:
            hint = did_you_mean(unknown[0], sizes)
            raise ConfigError(f"Sharded(rules=...) maps {name!r} to {axes!r}, but the mesh has the axes {list(sizes)}.{hint}")
        checked.append((name, axes))
    return tuple(checked)


@dataclasses.dataclass(frozen=True)
class Partition:
    """The rules by which arrays are split over a mesh.

    >>> partition = Partition({"data": 4, "model": 2}, (("mlp", "model"),), ("data",), 16)
    >>> partition.spec("params/a", (8, 6), (None, "mlp")), partition.spec("params/b", (8, 6), None), partition.spec("params/c", (6,), None)
    (P(None, 'model'), P('data',), P())
    """

    sizes: Mapping[str, int]  # Sizes of the mesh axes.
    rules: Rules  # Mesh axes of logical names. Earlier rules take precedence, and an array uses each mesh axis once, as with `nn.logical_axis_rules`.
    fsdp_axes: tuple[str, ...]  # Mesh axes over which arrays without names are split; may be empty.
    fsdp_min_size: int  # Minimum number of elements of such arrays.

    def spec(self, path: str, shape: tuple[int, ...], names: tuple[Name, ...] | None) -> PartitionSpec:
        """Returns how an array is split; `names` are the logical name or mesh axes of each axis, or of the first axes, and `path` is for errors."""
        if names is None:
            return self._by_size(shape, self.fsdp_axes)
        if len(names) > len(shape):
            raise ShardingError(f"{path} {list(shape)} has {len(names)} axis names, {list(names)}, for {len(shape)} axes")
        # As in `PartitionSpec`, trailing axes without names are not split: kernels of linen's attention have more axes than names.
        names = (*names, *[None] * (len(shape) - len(names)))
        unknown = self._unknown(names)
        if unknown:
            known = [name for name, _ in self.rules]
            hints = {name: did_you_mean(name, known).strip().lower() for name in unknown}
            listed_names = ", ".join(f"{name!r} ({hint})" if hint else repr(name) for name, hint in hints.items())
            raise ShardingError(f"{path} has axis names that are neither in rules nor axes of the mesh: {listed_names}")
        repeated = [name for name, count in collections.Counter(name for name in names if isinstance(name, str)).items() if count > 1]
        if repeated:
            raise ShardingError(f"{path} {list(shape)} has the axis name {repeated[0]!r} more than once")
        spec: Any = logical_to_mesh_axes(names, self.rules)  # type: ignore[arg-type]
        taken = [axis for axes in spec for axis in _as_tuple(axes)]
        if len(set(taken)) < len(taken):
            raise ShardingError(f"{path} {list(shape)} with the axis names {list(names)} would be split over the same mesh axis twice: {spec}")
        for size, name, axes in zip(shape, names, spec, strict=True):
            parts = math.prod(self.sizes[axis] for axis in _as_tuple(axes))
            if size % parts:
                over = ", ".join(f"{axis}={self.sizes[axis]}" for axis in _as_tuple(axes))
                advice = f"choose a multiple of {parts}, or add the rule ({name!r}, None)"
                raise ShardingError(f"{path} {list(shape)}: axis {name!r} of size {size} cannot be split evenly over {over} ({advice})")
        return _canonical(spec)

    @property
    def named(self) -> frozenset[str]:
        """The names that have rules."""
        return frozenset(name for name, _ in self.rules)

    def _unknown(self, names: tuple[Name, ...]) -> list[str]:
        unknown = [name for name in names if isinstance(name, str) and name not in self.named]
        return unknown + [axis for name in names if isinstance(name, tuple) for axis in name if axis not in self.sizes]

    def _by_size(self, shape: tuple[int, ...], *choices: tuple[str, ...]) -> PartitionSpec:
        """Returns how an array without names is split: over the first of `choices`, which are sets of mesh axes, that divides any of its axes.

        It is split along its largest divisible axis, or the first of them if several have the same size.
        """
        if math.prod(shape) >= self.fsdp_min_size:
            for axes in choices:
                parts = math.prod(self.sizes[axis] for axis in axes)
                fitting = [axis for axis, size in enumerate(shape) if size and size % parts == 0]
                if parts > 1 and fitting:
                    chosen = max(fitting, key=lambda axis: (shape[axis], -axis))
                    return _canonical(PartitionSpec(*[None] * chosen, axes))
        return PartitionSpec()

    @property
    def _axis_choices(self) -> list[tuple[str, ...]]:
        """Every set of mesh axes, those with the most devices first."""
        names = list(self.sizes)
        sets = [each for count in range(len(names), 0, -1) for each in itertools.combinations(names, count)]
        return sorted(sets, key=lambda axes: -math.prod(self.sizes[axis] for axis in axes))

    def specs(self, state: TrainState) -> TrainState:
        """Returns a state with a `PartitionSpec` of mesh axes for each array, or shape.

        Parameter averages, and arrays of the optimizer with the shape of their parameter, are split like the parameter.
        """
        faults: list[str] = []
        seen: set[str] = set()  # Unknown names that were reported.

        def spec(path: str, leaf: Any, names: tuple[Name, ...] | None) -> PartitionSpec:
            if not state.axes.is_known:
                return self._by_size(tuple(leaf.shape), *self._axis_choices)  # This lasts only until the names of the module are known.
            try:
                return self.spec(path, tuple(leaf.shape), names)
            except ShardingError as error:
                unknown = self._unknown(names or ())
                if not path.startswith("opt_state/") and not (unknown and seen.issuperset(unknown)):  # Otherwise, reported for the parameter or another array.
                    faults.append(str(error))
                    seen.update(unknown)
                return PartitionSpec()

        axes = state.axes.without_missing(self.sizes, self.named)
        params, model_state, opt_state = axes.each(spec, state.params, state.model_state, state.opt_state)
        averages = None if state.ema_params is None else axes.each(spec, state.ema_params, {}, ())[0]
        if faults:
            listed_faults = listed(list(dict.fromkeys(faults)), "; ")
            rules = [(name, axes) for name, axes in self.rules if name != axes]
            advice = " Add a rule for every name, such as ('name', None) for an axis that is not split." if seen else ""
            raise ShardingError(f"The state does not fit the mesh {dict(self.sizes)} with the rules {rules}: {listed_faults}.{advice}")
        none: Any = PartitionSpec()
        step, key = (jax.tree.map(lambda leaf: none, each) for each in (state.step, state.key))
        return dataclasses.replace(state, step=step, params=params, model_state=model_state, opt_state=opt_state, key=key, ema_params=averages)

    def idle_axes(self, state: TrainState, batch_axes: Sequence[str]) -> list[str]:
        """Returns the mesh axes over which neither batches nor any array of a state is split, so that devices along them do the same work."""
        specs = jax.tree.leaves(self.specs(state), is_leaf=lambda node: isinstance(node, PartitionSpec))
        used = {*batch_axes, *(axis for spec in specs for axes in spec for axis in _as_tuple(axes))}
        return [axis for axis, size in self.sizes.items() if size > 1 and axis not in used]

    def describe_large(self, state: TrainState) -> str | None:
        """Returns a message about which large parameters are replicated, and why; `None` if there are none."""
        if math.prod(self.sizes.values()) == 1:
            return None
        whole: list[tuple[int, str]] = []

        def check(path: str, leaf: Any, names: tuple[Name, ...] | None) -> None:
            num_bytes = 0 if is_key(leaf) else leaf.size * leaf.dtype.itemsize
            if num_bytes >= _LARGE_BYTES and not any(self.spec(path, tuple(leaf.shape), names)):
                whole.append((num_bytes, f"{path} ({num_bytes / 2**20:.1f} MB, {self._why_replicated(tuple(leaf.shape), names)})"))

        state.axes.without_missing(self.sizes, self.named).each(check, state.params, {}, ())
        if not whole:
            return None
        whole.sort(key=lambda each: -each[0])
        total = sum(num_bytes for num_bytes, _ in whole) / 2**20
        return f"{listed([words for _, words in whole])}; {total:.1f} MB in total, and as much again for each moment of the optimizer"

    def _why_replicated(self, shape: tuple[int, ...], names: tuple[Name, ...] | None) -> str:
        if names is not None:
            return "not split by the rules for its axis names"
        if not self.fsdp_axes:
            return "no axis names"
        parts = math.prod(self.sizes[axis] for axis in self.fsdp_axes)
        return f"no axis of {list(shape)} is a multiple of {parts}" if math.prod(shape) >= self.fsdp_min_size else "smaller than fsdp_min_size"


def _as_tuple(axes: Any) -> tuple[str, ...]:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def _canonical(spec: PartitionSpec) -> PartitionSpec:
    """Returns the canonical form of a spec, because JAX treats equivalent specs as different shardings and compiles for each."""
    parts = [axes[0] if isinstance(axes, tuple) and len(axes) == 1 else axes or None for axes in spec]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)
