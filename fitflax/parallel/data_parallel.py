"""Data parallelism over `jax.pmap`: every device holds the whole state and works on its shard of the batch.

The state has no leading axis of devices: it is passed with axis `None`, and donated. With `out_axes=None`, `pmap` returns the value of replica 0 without
a check, so a step makes replicated results equal before it returns them. `jit(shard_map)` compiles the same step with the same axis name for a single device,
where it has less overhead per call, and for several processes. Without jit, a step runs on the first device as the only replica.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from typing_extensions import override

from fitflax.errors import ConfigError, ReplicaError, chain_of
from fitflax.leaves import is_key, path_name, through_key_data
from fitflax.parallel.placement import check_devices, copy_leaf, count_processes, dense_outside_mesh, part_of, put
from fitflax.parallel.strategy import Compiled, Debuggable, Layout, Places, Strategy, copy_aliased, eager_step_error, traced_or_eager
from fitflax.parallel.transfer import MAX_SHORT_STEPS, InFlight, Transfer, limit_for, of_feed
from fitflax.state import PyTree

Reducer = str | Callable[[jax.Array, str], jax.Array]


class DataParallel(Strategy):
    """Replicates the state over devices and splits each batch between them.

    Losses and metrics that treat each example separately give the same values for any number of devices. Operations that combine examples (batch
    statistics, in-batch negatives) see one replica's shard, unless the module uses the axis name, as in `nn.BatchNorm(axis_name="replica")`. Random keys
    differ between replicas.

    Args:
        devices: Devices to use; by default all, including those of other processes.
        axis_name: Axis name for collectives inside the module.
        reduce: How to make each mutable collection equal on all replicas after a step, by name: `"mean"`, `"sum"`, `"max"`, or a function
            `(array, axis_name) -> array`. By default floating-point values are averaged and others take the value of replica 0. Arrays that a step returns
            as they were, outside of `nn.remat` and `nn.scan`, are kept. The default of Flax's `_overwrite_with_gradient` is `"max"`.
        combine_whole_batches: Whether a step takes one batch for each of N devices if batches are passed whole, as graphs are. An update is then that of N
            consecutive batches, so it depends on N. Otherwise, training on several devices with such batches is an error, and evaluation and prediction
            take one at a time.

    Raises:
        ConfigError: There are no devices, a device is repeated, or a reducer is unknown.

    >>> DataParallel(jax.devices()[:1]).num_replicas
    1
    """

    def __init__(
        self,
        devices: Sequence[jax.Device] | None = None,
        axis_name: str = "replica",
        reduce: Mapping[str, Reducer] | None = None,
        *,
        combine_whole_batches: bool = False,
    ) -> None:
        self.devices = tuple(check_devices("DataParallel", jax.devices() if devices is None else devices))
        for name, reducer in (reduce or {}).items():
            if reducer not in ("mean", "sum", "max") and not callable(reducer):
                raise ConfigError(f"DataParallel(reduce=...) must map collections to 'mean', 'sum', 'max' or a function. Received: {name!r}: {reducer!r}.")
        self.axis_name = axis_name
        self.combine_whole_batches = combine_whole_batches
        self.reduce: dict[str, Reducer] = dict(reduce or {})
        self.num_replicas = self.num_batch_shards = len(self.devices)
        self.num_partitions = 1
        self.part, self.num_processes = part_of(self.devices), count_processes(self.devices)
        # With several processes, `jax.pmap` converts all arguments and results at every call, and loses donated ones.
        self._is_distributed = self.num_processes > 1 or jax.distributed.is_initialized()
        self._uses_pmap = self.num_replicas > 1 and not self._is_distributed
        self._is_single_replica = self.num_replicas == 1  # Whether the running step is the only replica: there is one device, or jit is disabled.
        self.max_in_flight = limit_for(self.devices[0].platform, self.num_replicas)
        is_single_cpu = self.devices[0].platform == "cpu" and self.num_replicas == 1
        self.in_flight = InFlight(self.max_in_flight, MAX_SHORT_STEPS if is_single_cpu else 0)
        mesh = Mesh(np.array(self.devices), (axis_name,))
        self._mesh = mesh
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec(axis_name))
        whole = self._is_distributed
        self._group = NamedSharding(mesh, PartitionSpec(None, axis_name)) if whole else self._split
        self.transfer = Transfer(1 if whole else self.num_replicas, self._split, self._group, self.part[1], spans_processes=whole)

    def __repr__(self) -> str:
        return f"DataParallel({self.num_replicas} {self.devices[0].platform} devices, axis_name={self.axis_name!r})"

    @override
    def compile(self, fn: Callable[..., Any], *, inputs: Sequence[Layout], outputs: Layout | Sequence[Layout], donate: Sequence[int] = ()) -> Compiled:
        if not jax.sharding.get_abstract_mesh().empty:
            raise ConfigError(
                "DataParallel cannot be used inside jax.set_mesh(), because it creates a mesh. Leave that context, or use parallel.Sharded(mesh)."
            )
        plain, fn = of_feed(fn), _with_dense_outside_mesh(of_feed(fn))
        spread = self._shard_map(fn, inputs, outputs)
        either = traced_or_eager(spread, self._eager(plain, inputs, outputs))
        # pmap requires a split argument.
        if not self._uses_pmap or all(map(_is_replicated, inputs)):
            return Debuggable(jax.jit(either, donate_argnums=tuple(donate)), jax.jit(either))
        # The empty last argument keeps JAX 0.10 from applying `in_axes` to leaves if there are as many leaves as arguments.
        mapped = jax.pmap(
            lambda *arguments: fn(*arguments[:-1]),
            axis_name=self.axis_name,
            in_axes=(*(None if _is_replicated(layout) else 0 for layout in inputs), ()),
            out_axes=_each(lambda layout, _: None if _is_replicated(layout) else 0, outputs, outputs),
            devices=self.devices,
            donate_argnums=tuple(donate),
        )
        return Debuggable(_WithEmptyArgument(mapped), jax.jit(either))

    def _shard_map(self, fn: Callable[..., Any], inputs: Sequence[Layout], outputs: Layout | Sequence[Layout]) -> Callable[..., Any]:
        """Returns `fn` for all replicas, for arguments in the form that `feed` returns."""
        whole = self._is_distributed
        return jax.shard_map(
            self._with_gathered_results(fn, outputs) if whole else _with_replica_axis(fn, inputs, outputs) if self._uses_pmap else fn,
            mesh=self._mesh,
            in_specs=tuple(map(self._spec, inputs)),
            out_specs=_each(lambda layout, _: PartitionSpec() if whole else self._spec(layout), outputs, outputs),
            check_vma=False,
        )

    def _eager(self, fn: Callable[..., Any], inputs: Sequence[Layout], outputs: Layout | Sequence[Layout]) -> Callable[..., Any]:
        """Returns `fn` as plain operations on all rows on the first device, for arguments and results in the form that `feed` returns.

        The axis name is bound only for functions that use it, because a mapped function would hide its values from a debugger.
        """
        needs_axis, mapped = False, self._vmapped(fn, inputs, 1)

        def bound(*arguments: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf[0], mapped(*arguments))

        def eager(*arguments: Any) -> Any:
            nonlocal needs_axis
            if self.num_processes > 1:
                raise eager_step_error()
            placed = tuple(self._to_first_device(layout, tree) for layout, tree in zip(inputs, arguments, strict=True))
            with self._as_single_replica():
                try:
                    results = bound(*placed) if needs_axis else fn(*placed)
                except Exception as error:
                    texts = map(str, chain_of(error))
                    if needs_axis or not any("unbound axis name" in text and self.axis_name in text for text in texts):
                        raise
                    needs_axis = True
                    results = bound(*placed)
            return _each(self._from_first_device, outputs, copy_aliased(results, placed))

        return eager

    @contextlib.contextmanager
    def _as_single_replica(self) -> Iterator[None]:
        before, self._is_single_replica = self._is_single_replica, True
        try:
            yield
        finally:
            self._is_single_replica = before

    def _vmapped(self, fn: Callable[..., Any], inputs: Sequence[Layout], count: int, *, has_replica_axis: bool = False) -> Callable[..., Any]:
        """Returns `fn` for `count` replicas on one device with the axis name bound; results have a leading axis of replicas.

        Split arguments have the rows of all replicas along one axis, unless they already have a leading axis of replicas.
        """
        axes = tuple(None if _is_replicated(layout) else 0 for layout in inputs)
        mapped = jax.vmap(of_feed(fn), in_axes=axes, axis_name=self.axis_name, axis_size=count)

        def fold(axis: int | None, tree: PyTree) -> PyTree:
            if axis is None or has_replica_axis:
                return tree
            return jax.tree.map(lambda leaf: leaf[None] if count == 1 else leaf.reshape(count, -1, *leaf.shape[1:]), tree)

        return lambda *arguments: mapped(*map(fold, axes, arguments))

    def _to_first_device(self, layout: Layout, tree: PyTree) -> PyTree:
        """Returns an argument on the first device, with the rows of all replicas along one axis."""
        axis = int(self._uses_pmap) + (layout == "group")
        if self.num_replicas > 1 and not _is_replicated(layout) and len({leaf.shape[axis] for leaf in jax.tree.leaves(tree)}) > 1:
            raise ConfigError(
                "Without jit, several devices cannot process inputs that share no axis of examples. Debug the program on one device: "
                "Trainer(parallel=DataParallel(jax.devices()[:1]))."
            )

        def move(leaf: Any) -> Any:
            if self.num_replicas == 1:
                return leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf, self._replicated)
            leaf = jax.device_put(leaf, self.devices[0])
            if not self._uses_pmap or _is_replicated(layout):
                return leaf
            if layout == "group":
                leaf = jnp.moveaxis(leaf, 1, 0)
                return leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])
            return leaf.reshape(-1, *leaf.shape[2:])

        return jax.tree.map(move, tree)

    def _from_first_device(self, layout: Layout, tree: PyTree) -> PyTree:
        """Returns the result of an eager step, on the first device, in the form of a compiled step."""

        def move(leaf: Any) -> Any:
            if _is_replicated(layout) or self._is_distributed:
                return jax.device_put(leaf, self._replicated)
            if not self._uses_pmap:
                return leaf
            if layout == "group":
                return jnp.moveaxis(leaf.reshape(leaf.shape[0], self.num_replicas, -1, *leaf.shape[2:]), 1, 0)
            return leaf.reshape(self.num_replicas, -1, *leaf.shape[1:])

        return jax.tree.map(move, tree)

    def _spec(self, layout: Layout) -> PartitionSpec:
        return PartitionSpec() if _is_replicated(layout) else self._group.spec if layout == "group" else self._split.spec

    def _with_gathered_results(self, fn: Callable[..., Any], outputs: Layout | Sequence[Layout]) -> Callable[..., Any]:
        """Returns `fn` with its split results gathered on all devices, so that each process can read them."""

        def whole(layout: Layout, tree: PyTree) -> PyTree:
            if _is_replicated(layout):
                return tree
            return lax.all_gather(tree, self.axis_name, axis=1 if layout == "group" else 0, tiled=True)

        def gathered(*arguments: Any) -> Any:
            return _each(whole, outputs, fn(*arguments))

        return gathered

    @override
    def trace(self, fn: Callable[..., Any], *, inputs: Sequence[Layout]) -> Callable[..., Any]:
        return self.compile(fn, inputs=inputs, outputs="replicated")

    @override
    def emulate(self, fn: Callable[..., Any], *, inputs: Sequence[Layout]) -> Callable[..., Any]:
        return self._vmapped(fn, inputs, self.num_replicas, has_replica_axis=self._uses_pmap)

    @override
    def alone(self, fn: Callable[..., Any]) -> Any:
        def call(*arguments: Any) -> Any:
            inputs: list[Layout] = ["split" for _ in arguments]
            return jax.tree.map(lambda leaf: leaf[0], self._vmapped(fn, inputs, 1)(*arguments))

        return jax.jit(call)

    @override
    def put(self, tree: PyTree) -> PyTree:
        # Copy first: `may_alias=False` still shares aligned NumPy memory, and JAX buffers that are already on one of the devices.
        if self.num_processes > 1:
            return jax.tree.map(lambda leaf: put(leaf, self._replicated), tree)
        return jax.device_put(jax.tree.map(copy_leaf, tree), self._replicated)

    @override
    def abstract_put(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype, True), sharding=self._replicated), tree)

    @override
    def why_not_whole(self, is_training: bool) -> str | None:
        if not is_training or self.combine_whole_batches or self.num_replicas == 1:
            return None
        return (
            f"A step on {self.num_replicas} devices would take {self.num_replicas} batches, so training would depend on the number of devices. Train on "
            "one device, with Trainer(model, parallel=DataParallel(jax.devices()[:1])), or allow it with DataParallel(combine_whole_batches=True)."
        )

    @override
    def replica_index(self) -> Any:
        return jnp.int32(0) if self._is_single_replica else lax.axis_index(self.axis_name)

    @override
    def sum(self, tree: PyTree) -> PyTree:
        return tree if self._is_single_replica else lax.psum(tree, self.axis_name)

    @override
    def gather(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[None], tree) if self._is_single_replica else lax.all_gather(tree, self.axis_name)

    @override
    def first(self, tree: PyTree) -> PyTree:
        return tree if self._is_single_replica else jax.tree.map(through_key_data(self._first), tree)

    @override
    def agree(self, tree: PyTree) -> PyTree:
        return tree if self._is_single_replica else jax.tree.map(through_key_data(self._agree), tree)

    @override
    def split(self, tree: PyTree, steps: int) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.reshape(steps, -1, *leaf.shape[1:]), tree)

    @override
    def unsplit(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)

    @override
    def unify(self, collections: dict[str, PyTree], before: dict[str, PyTree]) -> dict[str, PyTree]:
        unknown = sorted(set(self.reduce) - set(collections))
        if unknown:
            raise ConfigError(f"DataParallel(reduce=...) names unknown collections: {unknown}. The module has {sorted(collections)}.")
        # The scales of fp8 operations depend on the largest magnitude in the batch.
        reducers: dict[str, Reducer] = {OVERWRITE_WITH_GRADIENT: "max", **self.reduce}
        # The mean of equal floats may differ from them by rounding, so constants would change.
        unchanged = {id(leaf) for leaf in jax.tree.leaves(before)}

        def one(reducer: Reducer | None, leaf: jax.Array) -> Any:
            return leaf if reducer in (None, "mean") and id(leaf) in unchanged else self._unify(reducer, leaf)

        return {name: jax.tree.map(functools.partial(one, reducers.get(name)), tree) for name, tree in collections.items()}

    def _unify(self, reducer: Reducer | None, leaf: jax.Array) -> Any:
        if callable(reducer):
            return reducer(leaf, self.axis_name)
        if self._is_single_replica:
            return leaf
        if reducer is None and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return through_key_data(self._first)(leaf)
        collectives: dict[str, Any] = {"sum": lax.psum, "max": lax.pmax, "mean": lax.pmean}
        return collectives[reducer or "mean"](leaf, self.axis_name).astype(leaf.dtype)

    def _first(self, leaf: jax.Array) -> Any:
        """Returns the value of replica 0 on all replicas: the sum of it and of zeros elsewhere."""
        wide = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
        return lax.psum(jnp.where(self.replica_index() == 0, wide, jnp.zeros_like(wide)), self.axis_name).astype(leaf.dtype)

    def _agree(self, leaf: jax.Array) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return self._first(leaf)
        mean = lax.pmean(leaf, self.axis_name)
        # The mean of equal floats may differ from them by rounding. On CPUs, `pmax` and `pmin` ignore NaN.
        is_equal = (lax.pmax(leaf, self.axis_name) == lax.pmin(leaf, self.axis_name)) & ~jnp.isnan(mean)
        return jnp.where(is_equal, leaf, mean).astype(leaf.dtype)


class _WithEmptyArgument:
    """A pmapped function that is called with an additional empty argument."""

    def __init__(self, mapped: Any) -> None:
        self._mapped = mapped

    def __call__(self, *arguments: Any) -> Any:
        return self._mapped(*arguments, ())

    def lower(self, *arguments: Any) -> Any:
        return self._mapped.lower(*arguments, ())


def _with_dense_outside_mesh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` with a method interceptor, because the mesh of replicas has none of the axes that a module may name."""

    @functools.wraps(fn)
    def inside(*arguments: Any) -> Any:
        with nn.intercept_methods(dense_outside_mesh):
            return fn(*arguments)

    return inside


def _is_replicated(layout: Layout) -> bool:
    return layout == "replicated"


def _each(fn: Callable[[Layout, Any], Any], outputs: Layout | Sequence[Layout], results: Any) -> Any:
    """Returns `fn(layout, result)`, or a tuple of these if there are several results."""
    if isinstance(outputs, str | Places):
        return fn(outputs, results)
    return tuple(fn(layout, tree) for layout, tree in zip(outputs, results, strict=True))


def _with_replica_axis(fn: Callable[..., Any], inputs: Sequence[Layout], outputs: Layout | Sequence[Layout]) -> Callable[..., Any]:
    """Returns `fn` with a leading axis of one replica in its split arguments and results."""

    def fold(layout: Layout, tree: PyTree) -> PyTree:
        return tree if _is_replicated(layout) else jax.tree.map(lambda leaf: leaf[None], tree)

    def wrapped(*arguments: Any) -> Any:
        shards = (tree if _is_replicated(layout) else jax.tree.map(lambda leaf: leaf[0], tree) for layout, tree in zip(inputs, arguments, strict=True))
        return _each(fold, outputs, fn(*shards))

    return wrapped


# Maximum number of arrays that a message names.
_MAX_LISTED = 10


def check_replicas(tree: PyTree, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Checks that the copies of arrays on several devices are equal, or within a tolerance; reads all of them.

    Use it to find the arrays that diverge in a custom step; `fit` keeps the state bit-for-bit identical on all replicas. NaN equals NaN. For a split array,
    the shards that several devices hold are compared. Leaves that are not JAX arrays are ignored.

    Args:
        tree: Arrays, such as `trainer.state`.
        atol: Absolute tolerance; `|a - b| <= atol + rtol * |b|`, where `b` is the copy on the first device. Only for floating-point and complex numbers.
        rtol: Relative tolerance.

    Raises:
        ReplicaError: Copies differ; the message names up to ten arrays with path, shape, device and difference.

    >>> check_replicas({"w": jnp.zeros((2, 3))})
    """
    differences = [difference for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if (difference := _difference(path, leaf, atol, rtol))]
    if differences:
        more = f"; and {len(differences) - _MAX_LISTED} more" if len(differences) > _MAX_LISTED else ""
        raise ReplicaError(f"Replicas that should be equal differ: {'; '.join(differences[:_MAX_LISTED])}{more}.")


def _difference(path: Any, leaf: Any, atol: float, rtol: float) -> str | None:
    """Returns a message about the first copy of an array that differs; `None` if all are equal."""
    if not isinstance(leaf, jax.Array):
        return None
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    firsts: dict[str, Any] = {}
    for shard in leaf.addressable_shards:
        data = jax.device_get(shard.data)
        where = str(shard.index)
        if where not in firsts:
            firsts[where] = shard.device, data
            continue
        device, first = firsts[where]
        is_inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        wide = np.complex128 if np.iscomplexobj(data) else np.float64
        one, other = (part.astype(wide) if is_inexact else part for part in (data, first))
        equal = np.isclose(one, other, rtol=rtol, atol=atol, equal_nan=True) if is_inexact else one == other
        if not equal.all():
            name = path_name(path)
            most = f", by up to {np.nanmax(np.abs(one - other)):.3g}" if is_inexact else ""
            return f"{name or 'the array'} {leaf.dtype}{list(leaf.shape)} on {shard.device} and {device} in {int((~equal).sum())} of {equal.size} numbers{most}"
    return None
