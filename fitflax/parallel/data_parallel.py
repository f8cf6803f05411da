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
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from typing_extensions import override

from fitflax.data.batch import full_mask
from fitflax.errors import ConfigError
from fitflax.parallel.base import Compiled, Layout, Strategy
from fitflax.parallel.in_flight import InFlight
from fitflax.parallel.packed import Packed
from fitflax.state import Batch, PyTree

__all__ = ["DataParallel"]

Reducer = str | Callable[[jax.Array, str], jax.Array]


class DataParallel(Strategy):
    """Replicates the state over devices and splits each batch between them.

    A loss or metric whose value for an example depends on that example alone comes out the same for any number of devices. Whatever couples examples
    (batch statistics, in-batch negatives) sees one replica's share, unless the module asks for all by the axis name, as `nn.BatchNorm(axis_name="replica")`.
    Random keys differ between replicas.

    Args:
        devices: The devices to use; all local ones by default.
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
        self.devices: tuple[jax.Device, ...] = tuple(jax.local_devices() if devices is None else devices)
        if not self.devices or len(set(self.devices)) != len(self.devices):
            raise ConfigError(f"DataParallel needs at least one device, and each only once. Received: devices={devices!r}.")
        for name, reducer in (reduce or {}).items():
            if reducer not in ("mean", "sum", "max") and not callable(reducer):
                raise ConfigError(f"DataParallel(reduce=...) takes 'mean', 'sum', 'max' or a function for a collection. Received: {name!r}: {reducer!r}.")
        self.axis_name = axis_name
        self.reduce: dict[str, Reducer] = dict(reduce or {})
        self.num_replicas = len(self.devices)
        # Two on several CPU devices: more can fill XLA's thread pool with collectives that wait for each other. Others only need enough to hide the dispatch; a
        # GPU makes a small step while the host wakes up from its wait for another.
        on_cpu = self.devices[0].platform == "cpu"
        self.max_in_flight = (2 if self.num_replicas > 1 else 8) if on_cpu else 32
        self.in_flight = InFlight(self.max_in_flight)
        self.compiles_ahead = jax.process_count() == 1  # With more, pmap makes other arguments of those that it is given.
        mesh = Mesh(np.array(self.devices), (axis_name,))
        self._mesh = mesh
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec(axis_name))
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        self._norm = jax.jit(optax.tree.norm)
        self._put_mask = functools.lru_cache(maxsize=8)(self._put_full_mask)

    def __repr__(self) -> str:
        return f"DataParallel({self.num_replicas} {self.devices[0].platform} devices, axis_name={self.axis_name!r})"

    @override
    def compile(self, fn: Callable[..., Any], *, inputs: Sequence[Layout], outputs: Layout | Sequence[Layout], donate: Sequence[int] = ()) -> Compiled:
        results = (outputs,) if isinstance(outputs, str) else tuple(outputs)
        # pmap insists on an argument that is split.
        if self.num_replicas == 1 or "split" not in inputs:
            spec = {"replicated": PartitionSpec(), "split": PartitionSpec(self.axis_name)}
            out_specs = tuple(spec[layout] for layout in results)
            mapped = jax.shard_map(
                fn,
                mesh=self._mesh,
                in_specs=tuple(spec[layout] for layout in inputs),
                out_specs=out_specs[0] if isinstance(outputs, str) else out_specs,
                check_vma=False,
            )
            return cast(Compiled, jax.jit(mapped, donate_argnums=tuple(donate)))
        axis = {"replicated": None, "split": 0}
        out_axes = tuple(axis[layout] for layout in results)
        # The last argument holds nothing. Without it JAX 0.10 takes `in_axes` leaf by leaf where there happen to be as many leaves as arguments.
        mapped = jax.pmap(
            lambda *arguments: fn(*arguments[:-1]),
            axis_name=self.axis_name,
            in_axes=(*(axis[layout] for layout in inputs), ()),
            out_axes=out_axes[0] if isinstance(outputs, str) else out_axes,
            devices=self.devices,
            donate_argnums=tuple(donate),
        )
        return _WithNothing(mapped)

    @override
    def emulate(self, fn: Callable[..., Any], *, inputs: Sequence[Layout]) -> Callable[..., Any]:
        axes = tuple(None if layout == "replicated" else 0 for layout in inputs)
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
        return jax.device_put(jax.tree.map(_own, tree), self._replicated)

    @override
    def abstract_put(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype, True), sharding=self._replicated), tree)

    @override
    def feed(self, batch: Batch) -> Batch:
        # Arrays go to the compiled call as they are, which is cheaper on CPU than placing them first. Masks are the exception: the mask of a full
        # batch stays on the device, and a short batch's must be placed like it, or the step would be compiled a second time.
        size = len(batch.mask)
        mask = self._put_mask(size) if batch.mask is full_mask(size) else jax.device_put(self._fold(batch.mask), self._split)
        x, y, _, weights = batch
        is_plain = type(x) is np.ndarray and type(y) is np.ndarray and weights is None  # Looking at trees takes longer than many a step.
        if self.num_replicas > 1 or not (is_plain or all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((x, y, weights)))):
            x, y, weights = jax.tree.map(self._feed_leaf, (x, y, weights))
        return Batch(x, y, mask, weights)

    @override
    def feed_group(self, batches: Sequence[Batch], size: int, whole: PyTree = None) -> Batch:
        rows = len(batches[0].mask)
        full = full_mask(rows)
        if all(batch.mask is full for batch in batches):
            mask = self._put_mask(rows, size)
        else:
            mask = jax.device_put(self._stack(size, *(batch.mask for batch in batches)), self._split)
        if whole is None:
            x, y, weights = jax.tree.map(functools.partial(self._stack, size), *((batch.x, batch.y, batch.weights) for batch in batches))
        else:
            x, y, weights = jax.tree.map(functools.partial(self._fold_group, len(batches), size), tuple(whole))
        return Batch(x, y, mask, weights)

    def _fold_group(self, count: int, size: int, leaf: Any) -> Any:
        """Returns `[count * batch, ...]` as `_stack` returns it, a view if it can be one."""
        steps = leaf.reshape(count, -1, *leaf.shape[1:])
        if self.num_replicas == 1 and count == size:
            return steps
        return self._stack(size, *steps)

    def _stack(self, size: int, *leaves: Any) -> Any:
        """Returns `[batch, ...]` of several steps as `[size, batch, ...]`, or `[replicas, size, batch / replicas, ...]`, in fresh memory."""
        if any(isinstance(leaf, jax.Array) for leaf in leaves):
            whole = jnp.stack([*leaves, *[leaves[-1]] * (size - len(leaves))])
            if self.num_replicas > 1:
                whole = jnp.moveaxis(whole.reshape(size, self.num_replicas, -1, *whole.shape[2:]), 1, 0)
            return jax.device_put(whole, self._split)
        first = leaves[0] if self.num_replicas == 1 else self._fold(leaves[0])
        shape = (size, *first.shape) if self.num_replicas == 1 else (first.shape[0], size, *first.shape[1:])
        stack: np.ndarray[Any, Any] = np.empty(shape, first.dtype)
        steps = stack if self.num_replicas == 1 else np.moveaxis(stack, 1, 0)
        for step, leaf in zip(steps, leaves, strict=False):  # Views: the rest of the memory is never read.
            step[...] = leaf if self.num_replicas == 1 else self._fold(leaf)
        return stack

    @override
    def abstract_feed(self, batch: Batch, steps: int | None = None) -> Batch:
        group = () if steps is None else (steps,)

        def abstract(leaf: Any, is_placed: bool) -> jax.ShapeDtypeStruct:
            shape = (*group, *leaf.shape)
            if self.num_replicas > 1:
                shape = (self.num_replicas, *group, leaf.shape[0] // self.num_replicas, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=self._split if is_placed else None)

        x, y, mask, weights = batch
        x, y, weights = jax.tree.map(lambda leaf: abstract(leaf, isinstance(leaf, jax.Array)), (x, y, weights))
        return Batch(x, y, abstract(mask, True), weights)

    @override
    def join(self, outputs: PyTree, steps: int | None = None) -> PyTree:
        def unfold(leaf: Any) -> np.ndarray[Any, Any]:
            array = np.asarray(leaf)
            if steps is not None:
                array = array[:steps] if self.num_replicas == 1 else np.moveaxis(array, 1, 0)[:steps]
                array = array.reshape(-1, *array.shape[2:])
            return array if self.num_replicas == 1 else array.reshape(-1, *array.shape[2:])

        return jax.tree.map(unfold, outputs)

    @override
    def copy(self, tree: PyTree) -> PyTree:
        return self._copy(tree)

    @override
    def norm(self, tree: PyTree) -> Any:
        return self._norm(tree)

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
        return tree if self.num_replicas == 1 else jax.tree.map(_through_key_data(self._first), tree)

    @override
    def agree(self, tree: PyTree) -> PyTree:
        return tree if self.num_replicas == 1 else jax.tree.map(_through_key_data(self._agree), tree)

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
            return _through_key_data(self._first)(leaf)
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

    def _feed_leaf(self, leaf: Any) -> Any:
        # JAX arrays may lie on any device; NumPy arrays are placed by the call.
        return jax.device_put(self._fold(leaf), self._split) if isinstance(leaf, jax.Array) else self._fold(leaf)

    def _fold(self, leaf: Any) -> Any:
        """Returns `[batch, ...]` as `[replicas, batch / replicas, ...]`, a view."""
        return leaf if self.num_replicas == 1 else leaf.reshape(self.num_replicas, -1, *leaf.shape[1:])

    def _put_full_mask(self, rows: int, steps: int | None = None) -> Any:
        mask = full_mask(rows)
        return jax.device_put(self._fold(mask) if steps is None else self._stack(steps, *[mask] * steps), self._split)


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


def _own(leaf: Any) -> Any:
    """Returns a copy of a leaf on the host, without weak types; typed keys stay such."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.array(np.array(jax.random.key_data(leaf))), impl=jax.random.key_impl(leaf))
    return np.array(leaf)


def _through_key_data(fn: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """Returns `fn` such that it also takes typed keys, by their data."""

    def apply(leaf: jax.Array) -> Any:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return fn(leaf)
        return jax.random.wrap_key_data(fn(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))

    return apply
