"""From names and sizes to places on a mesh: which axis of an array is split over which axes of the mesh. Nothing here touches a device."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import PartitionSpec

from fitflax.axes import Name
from fitflax.errors import ConfigError, ShardingError, did_you_mean
from fitflax.leaves import is_key
from fitflax.state import TrainState

__all__ = ["BATCH", "FSDP_MIN_SIZE", "MeshAxes", "Partition", "Rules", "checked_rules"]

MeshAxes = str | tuple[str, ...] | None
Rules = tuple[tuple[str, MeshAxes], ...]

BATCH = "batch"
"""The logical name of the axis of examples."""

FSDP_MIN_SIZE = 2**12
"""How many elements an array without axis names must have to be split: less is gained by splitting smaller ones than gathering them costs."""

# An array that every device holds whole is worth a word from here on.
_LARGE_BYTES = 2**20
# More of them would bury the rest of a message.
_MOST_NAMED = 5


def checked_rules(rules: Any, sizes: Mapping[str, int]) -> Rules:
    """Returns rules `logical name -> mesh axes` as pairs, in order of precedence.

    Args:
        rules: A dict or pairs; `None` for none.
        sizes: The mesh.

    Raises:
        ConfigError: They are no such rules, or name an axis that the mesh does not have.

    >>> checked_rules({"mlp": "model", "embed": None}, {"data": 4, "model": 2})
    (('mlp', 'model'), ('embed', None))
    """
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
            raise ConfigError(f"Sharded(rules=...) maps a logical name to a mesh axis, a tuple of some, or None. Received: {name!r}: {axes!r}.")
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

    Attributes:
        sizes: The mesh: `{axis: size}`.
        rules: Mesh axes of logical names; an earlier rule goes before a later one, and in an array each mesh axis serves once. As `nn.logical_axis_rules`.
        fsdp_axes: The mesh axes over which arrays without names are split; none if there are none.
        fsdp_min_size: How many elements such an array must have.

    >>> partition = Partition({"data": 4, "model": 2}, (("mlp", "model"),), ("data",), 16)
    >>> partition.spec("params/a", (8, 6), (None, "mlp")), partition.spec("params/b", (8, 6), None), partition.spec("params/c", (6,), None)
    (P(None, 'model'), P('data',), P())
    """

    sizes: Mapping[str, int]
    rules: Rules
    fsdp_axes: tuple[str, ...]
    fsdp_min_size: int

    def spec(self, path: str, shape: tuple[int, ...], names: tuple[Name, ...] | None) -> PartitionSpec:
        """Returns how an array is split.

        Args:
            path: What it is called in errors.
            shape: Its shape.
            names: A logical name, or mesh axes, for each of its axes; `None` if it has no names.

        Raises:
            ShardingError: A name is unknown, a mesh axis serves twice, or the size of an axis does not divide.
        """
        if names is None:
            return self._by_size(shape, self.fsdp_axes)
        if len(names) != len(shape):
            raise ShardingError(f"{path} {list(shape)} has {len(names)} axis names, {list(names)}, for {len(shape)} axes")
        unknown = self._unknown(names)
        if unknown:
            known = [name for name, _ in self.rules]
            hints = {name: did_you_mean(name, known).strip().lower() for name in unknown}
            listed = ", ".join(f"{name!r} ({hint})" if hint else repr(name) for name, hint in hints.items())
            raise ShardingError(f"{path} has axis names that are neither in rules nor axes of the mesh: {listed}")
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
                advice = f"choose a multiple of {parts}, or the rule ({name!r}, None)"
                raise ShardingError(f"{path} {list(shape)}: its axis {name!r} of {size} cannot be split evenly over {over} ({advice})")
        return _short(spec)

    def _unknown(self, names: tuple[Name, ...]) -> list[str]:
        """Returns the names that mean nothing here."""
        known = {name for name, _ in self.rules}
        unknown = [name for name in names if isinstance(name, str) and name not in known]
        return unknown + [axis for name in names if isinstance(name, tuple) for axis in name if axis not in self.sizes]

    def _by_size(self, shape: tuple[int, ...], *choices: tuple[str, ...]) -> PartitionSpec:
        """Returns how an array without names is split: along its largest axis that the devices divide, the first of equals.

        Args:
            shape: Its shape.
            choices: Over which mesh axes; the first choice that divides is taken.
        """
        if math.prod(shape) >= self.fsdp_min_size:
            for axes in choices:
                parts = math.prod(self.sizes[axis] for axis in axes)
                fitting = [axis for axis, size in enumerate(shape) if size and size % parts == 0]
                if parts > 1 and fitting:
                    chosen = max(fitting, key=lambda axis: (shape[axis], -axis))
                    return _short(PartitionSpec(*[None] * chosen, axes))
        return PartitionSpec()

    @property
    def _all_choices(self) -> list[tuple[str, ...]]:
        """Every set of mesh axes, those of most devices first."""
        names = list(self.sizes)
        sets = [each for count in range(len(names), 0, -1) for each in itertools.combinations(names, count)]
        return sorted(sets, key=lambda axes: -math.prod(self.sizes[axis] for axis in axes))

    def specs(self, state: TrainState) -> TrainState:
        """Returns a state with a `PartitionSpec` of mesh axes in place of each array, or shape.

        An array of the optimizer lies as its parameter does if it has its shape, averaged parameters do as well.

        Raises:
            ShardingError: Arrays of which that cannot be said; all of them are listed.
        """
        faults: list[str] = []
        seen: set[str] = set()  # Names that were said to be unknown.

        def spec(path: str, leaf: Any, names: tuple[Name, ...] | None) -> PartitionSpec:
            if not state.axes.is_known:
                return self._by_size(tuple(leaf.shape), *self._all_choices)  # Only until the module's own names are known.
            try:
                return self.spec(path, tuple(leaf.shape), names)
            except ShardingError as error:
                unknown = self._unknown(names or ())
                if not path.startswith("opt_state/") and not (unknown and seen.issuperset(unknown)):  # The same as its parameter's, or as another array's.
                    faults.append(str(error))
                    seen.update(unknown)
                return PartitionSpec()

        params, model_state, opt_state = state.axes.each(spec, state.params, state.model_state, state.opt_state)
        averages = None if state.ema_params is None else state.axes.each(spec, state.ema_params, {}, ())[0]
        if faults:
            listed = "; ".join(dict.fromkeys(faults))
            rules = [(name, axes) for name, axes in self.rules if name != axes]
            advice = " Every name needs a rule, such as ('name', None) for an axis that stays whole." if seen else ""
            raise ShardingError(f"The state does not fit the mesh {dict(self.sizes)} with the rules {rules}: {listed}.{advice}")
        none: Any = PartitionSpec()
        step, key = (jax.tree.map(lambda leaf: none, each) for each in (state.step, state.key))
        return dataclasses.replace(state, step=step, params=params, model_state=model_state, opt_state=opt_state, key=key, ema_params=averages)

    def idle_axes(self, state: TrainState, batch_axes: Sequence[str]) -> list[str]:
        """Returns the mesh axes over which neither batches nor any array of a state is split, so that devices along them do the same work."""
        specs = jax.tree.leaves(self.specs(state), is_leaf=lambda node: isinstance(node, PartitionSpec))
        used = {*batch_axes, *(axis for spec in specs for axes in spec for axis in _as_tuple(axes))}
        return [axis for axis, size in self.sizes.items() if size > 1 and axis not in used]

    def describe_large(self, state: TrainState) -> str | None:
        """Returns, in words, which large parameters are on each of several devices whole, and why; `None` if there are none."""
        if math.prod(self.sizes.values()) == 1:
            return None
        whole: list[tuple[int, str]] = []

        def look(path: str, leaf: Any, names: tuple[Name, ...] | None) -> None:
            num_bytes = 0 if is_key(leaf) else leaf.size * leaf.dtype.itemsize
            if num_bytes >= _LARGE_BYTES and not any(self.spec(path, tuple(leaf.shape), names)):
                whole.append((num_bytes, f"{path} ({num_bytes / 2**20:.1f} MB, {self._why_whole(tuple(leaf.shape), names)})"))

        state.axes.each(look, state.params, {}, ())
        if not whole:
            return None
        whole.sort(key=lambda each: -each[0])
        more = f", and {len(whole) - _MOST_NAMED} more" if len(whole) > _MOST_NAMED else ""
        total = sum(num_bytes for num_bytes, _ in whole) / 2**20
        return f"{', '.join(words for _, words in whole[:_MOST_NAMED])}{more}; {total:.1f} MB in all, and as much for each moment of the optimizer"

    def _why_whole(self, shape: tuple[int, ...], names: tuple[Name, ...] | None) -> str:
        if names is not None:
            return "as the rules for its axis names say"
        if not self.fsdp_axes:
            return "without axis names"
        parts = math.prod(self.sizes[axis] for axis in self.fsdp_axes)
        return f"no axis of {list(shape)} is a multiple of {parts}" if math.prod(shape) >= self.fsdp_min_size else "less than fsdp_min_size"


def _as_tuple(axes: Any) -> tuple[str, ...]:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def _short(spec: PartitionSpec) -> PartitionSpec:
    """Returns a spec in the shortest of several ways to say the same: JAX takes them for different places, and compiles for each."""
    parts = [axes[0] if isinstance(axes, tuple) and len(axes) == 1 else axes or None for axes in spec]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)
