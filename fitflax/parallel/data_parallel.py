"""Data parallelism over `jax.pmap`: every device holds the whole state and works on its share of the batch.

The state has no leading device axis: it goes in and out with axis `None`, and stays where it is, donated. `out_axes=None` takes replica 0's value on
trust, so whatever leaves a step replicated is made equal inside it. On a single device the same step, axis name included, is compiled by
`jit(shard_map)`, which costs less per call than `pmap` and means the same.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from typing_extensions import override

from fitflax.errors import ConfigError
from fitflax.leaves import through_key_data
from fitflax.parallel.base import Compiled, Layout, Places, Strategy
from fitflax.parallel.board import Board
from fitflax.parallel.in_flight import InFlight, limit_for
from fitflax.parallel.packed import Packed
from fitflax.parallel.placing import check_devices, copy_here, count_processes, own_copy, part_of, put
from fitflax.parallel.transfer import Transfer
from fitflax.state import PyTree, TrainState

__all__ = ["DataParallel"]

Reducer = str | Callable[[jax.Array, str], jax.Array]


class DataParallel(Strategy):
    """Replicates the state over devices and splits each batch between them.

    A loss or metric whose value for an example depends on that example alone comes out the same for any number of devices. Whatever couples examples
    (batch statistics, in-batch negatives) sees one replica's share, unless the module asks for all by the axis name, as `nn.BatchNorm(axis_name="replica")`.
    Random keys differ between replicas.

    Args:
        devices: The devices to use; all by default, of all processes where there are several.
        axis_name: The name under which collectives inside the module reach the other replicas.
        reduce: How a mutable collection is made equal on all replicas after a step, by its name: `"mean"`, `"sum"`, `"max"`, or a function
            `(array, axis_name) -> array`. By default floating-point values are averaged and all others take replica 0's value.

    Raises:
        ConfigError: No devices, the same device twice, or an unknown reducer.

    >>> DataParallel(jax.devices()[:1]).num_replicas
    1
    """

    def __init__(
        self,
        devices: Sequence[jax.Device] | None = None,
        axis_name: str = "replica",
        reduce: Mapping[str, Reducer] | None = None,
    ) -> None:
        self.devices: tuple[jax.Device, ...] = tuple(check_devices("DataParallel", jax.devices() if devices is None else devices))
        for name, reducer in (reduce or {}).items():
            if reducer not in ("mean", "sum", "max") and not callable(reducer):
                raise ConfigError(f"DataParallel(reduce=...) takes 'mean', 'sum', 'max' or a function for a collection. Received: {name!r}: {reducer!r}.")
        self.axis_name = axis_name
        self.reduce: dict[str, Reducer] = dict(reduce or {})
        self.num_replicas = self.num_batch_shards = len(self.devices)
        self.num_partitions = 1
        self.part, self.num_processes = part_of(self.devices), count_processes(self.devices)
        # Where there are several processes `jax.pmap` would convert each argument and each result at every call, and loses donated ones.
        self._is_among_others = self.num_processes > 1 or Board.is_there()
        self._maps = self.num_replicas > 1 and not self._is_among_others
        self.max_in_flight = limit_for(self.devices[0].platform, self.num_replicas)
        self.in_flight = InFlight(self.max_in_flight)
        mesh = Mesh(np.array(self.devices), (axis_name,))
        self._mesh = mesh
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec(axis_name))
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        whole = self._is_among_others
        self._group = NamedSharding(mesh, PartitionSpec(None, axis_name)) if whole else self._split
        self.transfer = Transfer(1 if whole else self.num_replicas, self._split, self._group, self.part[1], spans_processes=whole)

    def __repr__(self) -> str:
        return f"DataParallel({self.num_replicas} {self.devices[0].platform} devices, axis_name={self.axis_name!r})"

    @override
    def compile(self, fn: Callable[..., Any], *, inputs: Sequence[Layout], outputs: Layout | Sequence[Layout], donate: Sequence[int] = ()) -> Compiled:
        if not jax.sharding.get_abstract_mesh().empty:
            raise ConfigError("DataParallel has a mesh of its own, unusable within jax.set_mesh(): leave that, or train with parallel.Sharded(mesh).")
        results = (outputs,) if isinstance(outputs, str | Places) else tuple(outputs)
        # pmap insists on an argument that is split.
        if not self._maps or all(map(_is_whole, inputs)):
            whole = self._is_among_others
            out_specs = tuple(PartitionSpec() if whole else self._spec(layout) for layout in results)
            mapped = jax.shard_map(
                self._gathering(fn, outputs) if whole else fn,
                mesh=self._mesh,
                in_specs=tuple(map(self._spec, inputs)),
                out_specs=out_specs[0] if isinstance(outputs, str) else out_specs,
                check_vma=False,
            )
            return cast(Compiled, jax.jit(mapped, donate_argnums=tuple(donate)))
        out_axes = tuple(None if _is_whole(layout) else 0 for layout in results)
        # The last argument holds nothing. Without it JAX 0.10 takes `in_axes` leaf by leaf where there happen to be as many leaves as arguments.
        mapped = jax.pmap(
            lambda *arguments: fn(*arguments[:-1]),
            axis_name=self.axis_name,
            in_axes=(*(None if _is_whole(layout) else 0 for layout in inputs), ()),
            out_axes=out_axes[0] if isinstance(outputs, str) else out_axes,
            devices=self.devices,
            donate_argnums=tuple(donate),
        )
        return _WithNothing(mapped)

    def _spec(self, layout: Layout) -> PartitionSpec:
        return PartitionSpec() if _is_whole(layout) else self._group.spec if layout == "group" else self._split.spec

    def _gathering(self, fn: Callable[..., Any], outputs: Layout | Sequence[Layout]) -> Callable[..., Any]:
        """Returns `fn` such that its split results are whole on all devices, so that each process can read them."""

        def whole(layout: Layout, tree: PyTree) -> PyTree:
            if _is_whole(layout):
                return tree
            return lax.all_gather(tree, self.axis_name, axis=1 if layout == "group" else 0, tiled=True)

        def gathered(*arguments: Any) -> Any:
            results = fn(*arguments)
            if isinstance(outputs, str | Places):
                return whole(outputs, results)
            return tuple(whole(layout, tree) for layout, tree in zip(outputs, results, strict=True))

        return gathered

    @override
    def trace(self, fn: Callable[..., Any], *, inputs: Sequence[Layout]) -> Callable[..., Any]:
        return self.compile(fn, inputs=inputs, outputs="replicated")

    @override
    def emulate(self, fn: Callable[..., Any], *, inputs: Sequence[Layout]) -> Callable[..., Any]:
        axes = tuple(None if _is_whole(layout) else 0 for layout in inputs)
        mapped = jax.vmap(fn, in_axes=axes, axis_name=self.axis_name, axis_size=self.num_replicas)
        if self.num_replicas > 1:
            return mapped

        def call(*arguments: Any) -> Any:
            return mapped(*(tree if axis is None else jax.tree.map(lambda leaf: leaf[None], tree) for axis, tree in zip(axes, arguments, strict=True)))

        return call

    @override
    def alone(self, fn: Callable[..., Any]) -> Any:
        mapped = jax.vmap(fn, axis_name=self.axis_name, axis_size=1)

        def call(*arguments: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf[0], mapped(*jax.tree.map(lambda leaf: leaf[None], arguments)))

        return jax.jit(call)

    @override
    def put(self, tree: PyTree) -> PyTree:
        # By way of private NumPy copies: `may_alias=False` still shares aligned NumPy memory, and keeps a JAX buffer that lies on one of the devices.
        if self.num_processes > 1:
            return jax.tree.map(lambda leaf: put(leaf, self._replicated), tree)
        return jax.device_put(jax.tree.map(own_copy, tree), self._replicated)

    @override
    def abstract_put(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype, True), sharding=self._replicated), tree)

    @override
    def put_at(self, tree: PyTree, shapes: PyTree) -> PyTree:
        return self.put(tree)

    @override
    def move(self, leaves: list[Any], shapes: Sequence[Any]) -> list[Any]:
        return [leaves.pop(0) for _ in shapes]

    @override
    def abstract_state(self, state: TrainState) -> TrainState:
        return cast(TrainState, self.abstract_put(state))

    @override
    def places(self, tree: PyTree) -> Layout:
        return "replicated"

    @override
    def pin(self, state: TrainState) -> TrainState:
        return state

    @override
    def idle_axes(self, state: TrainState) -> list[str]:
        return []

    @override
    def describe_whole(self, state: TrainState) -> str | None:
        return None

    @override
    def copy(self, tree: PyTree) -> PyTree:
        return self._copy(tree) if self.num_processes == 1 else copy_here(tree)

    @property
    @override
    def is_on_host(self) -> bool:
        return bool(self.devices[0].platform == "cpu")

    @override
    def copy_once(self, tree: PyTree) -> Packed:
        return Packed(tree if self.num_replicas == 1 else jax.tree.map(lambda leaf: leaf.addressable_data(0), tree))

    @override
    def replica_index(self) -> Any:
        return lax.axis_index(self.axis_name)

    @override
    def sum(self, tree: PyTree) -> PyTree:
        return tree if self.num_replicas == 1 else lax.psum(tree, self.axis_name)

    @override
    def gather(self, tree: PyTree) -> PyTree:
        return lax.all_gather(tree, self.axis_name)

    @override
    def first(self, tree: PyTree) -> PyTree:
        return tree if self.num_replicas == 1 else jax.tree.map(through_key_data(self._first), tree)

    @override
    def agree(self, tree: PyTree) -> PyTree:
        return tree if self.num_replicas == 1 else jax.tree.map(through_key_data(self._agree), tree)

    @override
    def split(self, tree: PyTree, steps: int) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.reshape(steps, -1, *leaf.shape[1:]), tree)

    @override
    def unsplit(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)

    @override
    def unify(self, collections: dict[str, PyTree]) -> dict[str, PyTree]:
        unknown = sorted(set(self.reduce) - set(collections))
        if unknown:
            raise ConfigError(f"DataParallel(reduce=...) names the collections {unknown}, but the module has {sorted(collections)}.")
        return {name: jax.tree.map(functools.partial(self._unify, self.reduce.get(name)), tree) for name, tree in collections.items()}

    def _unify(self, reducer: Reducer | None, leaf: jax.Array) -> Any:
        if callable(reducer):
            return reducer(leaf, self.axis_name)
        if self.num_replicas == 1:
            return leaf
        if reducer is None and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return through_key_data(self._first)(leaf)
        collectives: dict[str, Any] = {"sum": lax.psum, "max": lax.pmax, "mean": lax.pmean}
        return collectives[reducer or "mean"](leaf, self.axis_name).astype(leaf.dtype)

    def _first(self, leaf: jax.Array) -> Any:
        """Returns replica 0's value on all replicas: the sum of it and of zeros elsewhere."""
        wide = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
        return lax.psum(jnp.where(self.replica_index() == 0, wide, jnp.zeros_like(wide)), self.axis_name).astype(leaf.dtype)

    def _agree(self, leaf: jax.Array) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return self._first(leaf)
        # The mean of three equal floats need not be that float.
        is_equal = lax.pmax(leaf, self.axis_name) == lax.pmin(leaf, self.axis_name)
        return jnp.where(is_equal, leaf, lax.pmean(leaf, self.axis_name)).astype(leaf.dtype)


class _WithNothing:
    """A pmapped function that is called with one more argument, which holds nothing.

    Args:
        mapped: The function.
    """

    def __init__(self, mapped: Any) -> None:
        self._mapped = mapped

    def __call__(self, *arguments: Any) -> Any:
        return self._mapped(*arguments, ())

    def lower(self, *arguments: Any) -> Any:
        return self._mapped.lower(*arguments, ())


def _is_whole(layout: Layout) -> bool:
    """Returns whether every device holds all of it."""
    return layout == "replicated"
