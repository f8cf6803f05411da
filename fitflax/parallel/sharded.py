"""FSDP, tensor parallelism, or both: splits the state and the batch over a mesh of devices, by `jax.jit` with shardings.

A step is traced once for the whole batch, as for a single large device, and XLA partitions it. So there is one replica, and results do not depend on the
number of devices, up to rounding. This module only determines shardings. The compiler derives the collectives from them.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from typing_extensions import override

from fitflax.errors import ConfigError, FitflaxError, ModelError, integer_of, is_integer
from fitflax.leaves import is_key
from fitflax.parallel.partition import BATCH, FSDP_MIN_SIZE, MeshAxes, Partition, checked_rules
from fitflax.parallel.placement import SMALL_BYTES, check_devices, count_processes, dense_outside_mesh, part_of, put
from fitflax.parallel.strategy import Compiled, Debuggable, Layout, Places, Strategy, copy_aliased, eager_step_error, traced_or_eager
from fitflax.parallel.transfer import InFlight, Transfer, limit_for, of_feed
from fitflax.state import PyTree, TrainState

# Mesh axes over which batches are split without a rule for `batch`.
_BATCH_AXES = ("data", "fsdp")


class Sharded(Strategy):
    """Splits the state and batches over a mesh of devices.

    A step sees the whole batch: batch statistics and in-batch negatives cover all its examples, and dropout does not depend on the number of devices.
    Modules must not use the name of a mapped axis, as in `nn.BatchNorm(axis_name=...)`. With `accumulate_steps=k`, micro-batch `i` holds the rows
    `i, i + k, i + 2 k, ...` of the batch, so that no row moves to another device.

    The logical names of an array's axes, from `nn.with_logical_partitioning`, and `rules` determine how the array is split; for arrays without names
    `fsdp` does. Parameter averages and the moments of an optimizer are placed like their parameters. `nn.with_logical_constraint` constrains activations
    by the same rules, in training, evaluation and prediction.

    Args:
        mesh: Sizes of the mesh axes, the slowest first; one may be -1 for the remaining devices. Or a `jax.sharding.Mesh`.
        rules: Mesh axes of logical names, in order of precedence, as pairs or a dict: `[("mlp", "model"), ("embed", None)]`. The mesh axes may also be used
            directly as names. Without a rule for `"batch"`, batches are split over the axes `"data"` and `"fsdp"`, and the one that the argument `fsdp` names.
        fsdp: Whether to split arrays without axis names, along their largest axis that is divisible by the number of devices. `True` splits them over the mesh
            axis `"fsdp"`, else `"data"`, else the only axis; a string names the axis. `None` is like `False`, with a warning if large parameters are
            replicated.
        fsdp_min_size: Minimum number of elements of arrays that `fsdp` splits.
        devices: Devices to use; by default all.

    Raises:
        ConfigError: The mesh does not fit the devices, or the rules do not fit the mesh.

    Warns:
        FitflaxWarning: When the state is created: large parameters are replicated, or it is unclear which of several axes splits batches.

    >>> Sharded({"data": -1}, devices=jax.devices()[:1])
    Sharded(mesh={'data': 1} of cpu devices, batches over ('data',))
    """

    def __init__(
        self,
        mesh: Mapping[str, int] | Mesh,
        *,
        rules: Mapping[str, MeshAxes] | Sequence[tuple[str, MeshAxes]] | None = None,
        fsdp: bool | str | None = None,
        fsdp_min_size: int = FSDP_MIN_SIZE,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        self.mesh = _make_mesh(mesh, devices)
        self.devices = tuple(self.mesh.devices.flat)
        sizes = dict(self.mesh.shape)
        user_rules = checked_rules(rules, sizes)
        fsdp_axes = _fsdp_axes(fsdp, sizes)
        fsdp_min_size = integer_of("Sharded(fsdp_min_size=...)", fsdp_min_size)
        self.batch_axes = _batch_axes(user_rules, sizes, fsdp_axes, is_bare=rules is None)
        self._warns = fsdp is not False
        named = {name for name, _ in user_rules}
        self._allows_whole_batches = (BATCH, None) in user_rules
        all_rules = (*user_rules, *[(BATCH, self.batch_axes)] * (BATCH not in named), *((axis, axis) for axis in sizes if axis not in named))
        self.partition = Partition(sizes, all_rules, fsdp_axes, fsdp_min_size)
        self.num_replicas = 1
        self.num_partitions = self.mesh.size
        self.num_batch_shards = math.prod(sizes[axis] for axis in self.batch_axes)
        self.max_in_flight = limit_for(self.devices[0].platform, self.mesh.size)
        self.in_flight = InFlight(self.max_in_flight)
        rows = self.batch_axes if len(self.batch_axes) != 1 else self.batch_axes[0]
        split = PartitionSpec(rows) if self.batch_axes else PartitionSpec()
        group = PartitionSpec(None, rows) if self.batch_axes else PartitionSpec()
        self._by_layout = {"replicated": self._sharding(PartitionSpec()), "split": self._sharding(split), "group": self._sharding(group)}
        self.part = part_of(self.devices, self._by_layout["split"], self.num_batch_shards)
        self.num_processes = count_processes(self.devices)
        self.transfer = Transfer(1, self._by_layout["split"], self._by_layout["group"], self.part[1], spans_processes=self.num_processes > 1)

    def __repr__(self) -> str:
        fsdp = f", fsdp over {self.partition.fsdp_axes}" if self.partition.fsdp_axes else ""
        return f"Sharded(mesh={dict(self.mesh.shape)} of {self.devices[0].platform} devices, batches over {self.batch_axes}{fsdp})"

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    # -- compiling --

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Applies the mesh and the rules to constraints in the code inside the block, while a step is traced."""
        mesh = jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)
        with mesh, nn.logical_axis_rules(self.partition.rules), nn.intercept_methods(dense_outside_mesh):
            try:
                yield
            except (NameError, FitflaxError) as error:
                text = str(error).partition(". To fix this")[0]
                if "unbound axis name" not in text or isinstance(error, ModelError):
                    raise
                kind = type(error) if isinstance(error, FitflaxError) else ModelError
                raise kind(f"{text}. Under Sharded, a step sees the whole batch, so there is no such axis. Leave out collectives such as psum.") from error

    @override
    def compile(self, fn: Callable[..., Any], *, inputs: Sequence[Layout], outputs: Layout | Sequence[Layout], donate: Sequence[int] = ()) -> Compiled:
        single = isinstance(outputs, str | Places)
        places = tuple(map(self._shardings, inputs))
        results = self._result_shardings(outputs) if single else tuple(map(self._result_shardings, cast(Sequence[Layout], outputs)))
        either = traced_or_eager(self.trace(fn, inputs=inputs), self._eager(fn, places, results))
        kept = jax.jit(either, in_shardings=places, out_shardings=results)
        return Debuggable(jax.jit(either, in_shardings=places, out_shardings=results, donate_argnums=tuple(donate)), kept)

    def _eager(self, fn: Callable[..., Any], places: Sequence[Any], results: Any) -> Callable[..., Any]:
        """Returns `fn` as plain operations, each of which runs on the devices of its operands."""

        def eager(*arguments: Any) -> Any:
            if self.num_processes > 1:
                raise eager_step_error()
            placed = tuple(jax.device_put(tree, place) for tree, place in zip(arguments, places, strict=True))
            with self._tracing():
                outputs = copy_aliased(of_feed(fn)(*placed), placed)
            return jax.device_put(outputs, results)

        return eager

    def _shardings(self, layout: Any) -> Any:
        return layout.tree if isinstance(layout, Places) else self._by_layout[layout]

    def _result_shardings(self, layout: Any) -> Any:
        """Returns the shardings of results; with several processes split results are replicated, so that each process can read them."""
        return self._by_layout["replicated"] if self.num_processes > 1 and layout in ("split", "group") else self._shardings(layout)

    @override
    def trace(self, fn: Callable[..., Any], *, inputs: Sequence[Layout]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def inside(*arguments: Any) -> Any:
            with self._tracing():
                return of_feed(fn)(*arguments)

        return inside

    @override
    def emulate(self, fn: Callable[..., Any], *, inputs: Sequence[Layout]) -> Callable[..., Any]:
        alone = self._on_one_device(fn)
        return lambda *arguments: jax.tree.map(lambda leaf: leaf[None], alone(*arguments))

    @override
    def alone(self, fn: Callable[..., Any]) -> Any:
        return jax.jit(self._on_one_device(fn))

    def _on_one_device(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `fn` for one device, in a mesh with the same axes of size 1, which constraints by mesh axes require."""
        names = self.mesh.axis_names
        mesh = AbstractMesh((1,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))

        def inside(*arguments: Any) -> Any:
            with jax.sharding.use_abstract_mesh(mesh), nn.intercept_methods(dense_outside_mesh):
                return of_feed(fn)(*arguments)

        return inside

    # -- placing --

    @override
    def put(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: put(leaf, self._by_layout["replicated"]), tree)

    @override
    def abstract_put(self, tree: PyTree) -> PyTree:
        def place(leaf: Any) -> NamedSharding:
            sharding = getattr(leaf, "sharding", None)
            is_placed = isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh
            return cast(NamedSharding, sharding) if is_placed else self._by_layout["replicated"]

        return jax.tree.map(lambda leaf: _abstract(leaf, place(leaf)), tree)

    @override
    def put_at(self, tree: PyTree, shapes: PyTree) -> PyTree:
        leaves, places = jax.tree.leaves(tree), [leaf.sharding for leaf in jax.tree.leaves(shapes)]
        treedef: Any = jax.tree.structure(tree)
        placed: list[Any] = [None] * len(leaves)
        small: list[int] = []
        for index, (leaf, place) in enumerate(zip(leaves, places, strict=True)):
            if not isinstance(leaf, jax.Array) or is_key(leaf) or (self.num_processes > 1 and leaf.is_fully_addressable):
                placed[index] = put(leaf, place)
            elif leaf.nbytes < SMALL_BYTES:
                small.append(index)
            else:
                # Copy explicitly, because `device_put` reuses shards that are already in place. One large array at a time.
                placed[index] = self.copy(jax.device_put(leaf, place))
        moved = self.copy(jax.device_put([leaves[index] for index in small], [places[index] for index in small]))
        for index, leaf in zip(small, moved, strict=True):
            placed[index] = leaf
        return treedef.unflatten(placed)

    @override
    def move(self, leaves: list[Any], shapes: Sequence[Any]) -> list[Any]:
        return [jax.device_put(leaves.pop(0), shape.sharding) for shape in shapes]

    @override
    def abstract_state(self, state: TrainState) -> TrainState:
        return cast(TrainState, jax.tree.map(_abstract, state, self._state_shardings(state)))

    def _state_shardings(self, state: TrainState) -> TrainState:
        specs = self.partition.specs(state)
        return cast(TrainState, jax.tree.map(self._sharding, specs, is_leaf=lambda node: isinstance(node, PartitionSpec)))

    @override
    def places(self, tree: PyTree) -> Layout:
        return Places(jax.tree.map(lambda leaf: leaf.sharding, tree))

    @override
    def pin(self, state: TrainState) -> TrainState:
        return cast(TrainState, jax.tree.map(jax.lax.with_sharding_constraint, state, self._state_shardings(state)))

    @override
    def missing_axes(self, state: TrainState) -> dict[str, list[str]]:
        return state.axes.missing(self.partition.sizes, self.partition.named)

    @override
    def describe_whole(self, state: TrainState) -> str | None:
        remarks = []
        axes = [axis for axis, size in self.partition.sizes.items() if size > 1]
        if len(axes) > 1 and not self.batch_axes and not self._allows_whole_batches:
            remarks.append(
                f"Each device processes whole batches, because the mesh {dict(self.mesh.shape)} has no axis 'data' or 'fsdp', and there is no rule for "
                f"'batch'. Add the rule ('batch', {axes[0]!r}), or ('batch', None) if this is intended."
            )
        whole = self.partition.describe_large(state) if self._warns else None
        if whole is not None:
            advice = " Pass Sharded(fsdp=True) to split arrays without axis names, or fsdp=False if this is intended." if not self.partition.fsdp_axes else ""
            remarks.append(f"Large parameters are replicated on {self.mesh.size} devices: {whole}.{advice}")
        return " ".join(remarks) or None

    @override
    def why_not_whole(self, is_training: bool) -> str | None:
        if self.num_batch_shards == 1:
            return None
        return (
            f"This strategy splits the rows of each batch over {self.num_batch_shards} devices. Use one device, DataParallel(jax.devices()[:1]); or "
            "Sharded with rules=[('batch', None)], where all devices process the same batch; or DataParallel(combine_whole_batches=True), which gives each "
            "device its own batch."
        )

    @override
    def copy(self, tree: PyTree) -> PyTree:
        if self.num_processes > 1:
            return super().copy(tree)
        leaves = jax.tree.leaves(tree)
        treedef: Any = jax.tree.structure(tree)
        return treedef.unflatten(_copy_function(tuple(leaf.sharding for leaf in leaves))(leaves))

    @override
    def idle_axes(self, state: TrainState) -> list[str]:
        return self.partition.idle_axes(state, self.batch_axes)

    # -- inside of a step --

    @override
    def split(self, tree: PyTree, steps: int) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf.reshape(-1, steps, *leaf.shape[1:]), 1, 0), tree)

    @override
    def unsplit(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0).reshape(-1, *leaf.shape[2:]), tree)


def _make_mesh(mesh: Any, devices: Sequence[jax.Device] | None) -> Mesh:
    if isinstance(mesh, Mesh):
        if devices is not None:
            raise ConfigError("Sharded(devices=...) cannot be combined with a jax.sharding.Mesh, which has its own devices. Leave devices= out.")
        return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    used = check_devices("Sharded", jax.devices() if devices is None else devices)
    is_mesh = isinstance(mesh, Mapping) and mesh and all(isinstance(axis, str) for axis in mesh)
    sizes = dict(mesh) if is_mesh else {}
    if not sizes or any(not is_integer(size) or (size < 1 and size != -1) for size in sizes.values()):
        raise ConfigError(f"Sharded(mesh=...) takes a jax.sharding.Mesh, or sizes of axes such as {{'data': -1, 'model': 2}}. Received: {mesh!r}.")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(open_axes) > 1:
        raise ConfigError(f"Sharded(mesh=...): only one axis may be -1. Received: {mesh!r}.")
    if open_axes and len(used) % known == 0:
        sizes[open_axes[0]] = len(used) // known
    elif open_axes or known != len(used):
        wanted = f"a multiple of {known}" if open_axes else f"{known}"
        most = len(used) // known * known if open_axes else known
        advice = f", or pass devices=jax.devices()[:{most}]" if 0 < most < len(used) else ""
        raise ConfigError(f"Sharded(mesh={mesh!r}) needs {wanted} devices, but there are {len(used)}. Change the sizes or set one of them to -1{advice}.")
    shape = tuple(int(size) for size in sizes.values())
    return jax.make_mesh(shape, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape), devices=used)


def _fsdp_axes(fsdp: Any, sizes: Mapping[str, int]) -> tuple[str, ...]:
    if fsdp is None or fsdp is False:
        return ()
    if fsdp is True:
        axis = next((axis for axis in ("fsdp", "data") if axis in sizes), None)
        axis = next(iter(sizes)) if axis is None and len(sizes) == 1 else axis
        if axis is None:
            raise ConfigError(f"Sharded(fsdp=True) needs a mesh axis 'fsdp' or 'data'. The mesh has {list(sizes)}. Name the axis to use: fsdp='...'.")
        return (axis,)
    if not isinstance(fsdp, str) or fsdp not in sizes:
        raise ConfigError(f"Sharded(fsdp=...) takes True, False, None, or an axis of the mesh {list(sizes)}. Received: {fsdp!r}.")
    return (fsdp,)


def _batch_axes(rules: Sequence[tuple[str, MeshAxes]], sizes: Mapping[str, int], fsdp_axes: Sequence[str], *, is_bare: bool) -> tuple[str, ...]:
    """Returns the mesh axes over which batches are split; a mesh of one axis without rules uses that axis."""
    batch_rules = [axes for name, axes in rules if name == BATCH]
    if batch_rules:
        axes = batch_rules[0]
        return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    usual = tuple(axis for axis in sizes if axis in _BATCH_AXES or axis in fsdp_axes)
    return tuple(sizes) if not usual and is_bare and len(sizes) == 1 else usual


@functools.lru_cache(maxsize=64)
def _copy_function(places: tuple[NamedSharding, ...]) -> Any:
    return jax.jit(lambda leaves: [jnp.copy(leaf) for leaf in leaves], out_shardings=list(places))


def _abstract(leaf: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype, True), sharding=place)
