"""Places host arrays on devices, including those of other processes, copies arrays, and determines the shard of a batch that a process feeds."""

import abc
import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from fitflax.errors import ConfigError
from fitflax.leaves import aligned_copy, is_key, key_of, on_host
from fitflax.state import PyTree

_CONFIG: Any = jax.config  # Type checkers do not know its attributes.

SMALL_BYTES = 2**20
"""Smaller arrays are copied together, or on the host."""


def outside_mesh() -> Any:
    """Returns a context manager in which there is no mesh, so that linen does not constrain arrays by their axis names."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def dense_outside_mesh(call: Callable[..., Any], arguments: Any, keywords: Any, context: Any) -> Any:
    """Calls a method of a module, outside the mesh if it is one of `nn.DenseGeneral`; for `nn.intercept_methods`.

    `nn.DenseGeneral` creates its kernel as a matrix, which linen would constrain by the names of all axes of the kernel
    (https://github.com/google/flax/issues/3676). It contains no custom constraints.
    """
    if isinstance(context.module, nn.DenseGeneral):
        with outside_mesh():
            return call(*arguments, **keywords)
    return call(*arguments, **keywords)


def check_devices(owner: str, devices: Any) -> list[Any]:
    """Returns devices as a list, after checking that they are distinct devices."""
    used = list(devices) if isinstance(devices, Iterable) and not isinstance(devices, str | Mapping) else []
    if not used or len(set(used)) != len(used) or not all(isinstance(device, jax.Device) for device in used):
        raise ConfigError(f"{owner}(devices=...) must be a nonempty list of distinct devices, such as jax.devices()[:4]. Received: {devices!r}.")
    return used


def count_processes(devices: Iterable[Any]) -> int:
    """Returns the number of processes that own some devices; raises `ConfigError` if they belong to several, but not all of them."""
    owners = {device.process_index for device in devices}
    if 1 < len(owners) < jax.process_count():
        raise ConfigError(
            f"The devices belong to {len(owners)} of {jax.process_count()} processes: {sorted(owners)}. Pass devices of one process, or some of every process."
        )
    return len(owners)


def copy_leaf(leaf: Any) -> Any:
    """Returns a copy of a leaf without weak types; typed keys remain typed. Large arrays are copied on their devices, others on the host."""
    if isinstance(leaf, jax.Array) and not is_key(leaf) and leaf.nbytes >= SMALL_BYTES:
        return jnp.array(leaf, leaf.dtype)
    if is_key(leaf):
        return key_of(np.array(jax.device_get(jax.random.key_data(leaf))), jax.random.key_impl(leaf))
    return aligned_copy(leaf) if _may_be_memory_mapped(leaf) else np.array(jax.device_get(leaf))


def _may_be_memory_mapped(leaf: Any) -> bool:
    """Returns whether an array may be memory-mapped, so that copying reads a file."""
    return isinstance(leaf, np.ndarray) and not leaf.flags.writeable


class RemoteArray(abc.ABC):
    """An array that is stored elsewhere, such as in a bucket; only the shards of this process are read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @abc.abstractmethod
    def read(self, index: Sequence[slice]) -> np.ndarray[Any, Any]:
        """Returns a part of the array, one slice per axis, in new memory; raises `CheckpointError` if it cannot be read."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self.read([slice(None)] * len(self.shape)).astype(self.dtype if dtype is None else dtype, copy=False)


def put(leaf: Any, place: NamedSharding) -> Any:
    """Returns a host array or a key placed as `place`, in new memory; each device only gets its shard."""
    if isinstance(leaf, RemoteArray):
        to = jax.dtypes.canonicalize_dtype(leaf.dtype)
        with explicitly():
            return jax.make_array_from_callback(leaf.shape, place, lambda index: leaf.read(index or ()).astype(to, copy=False))
    if is_key(leaf):
        data = put(jax.random.key_data(leaf), NamedSharding(place.mesh, place.spec))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host: np.ndarray[Any, Any] = np.asarray(jax.device_get(leaf))
    dtype = jax.dtypes.canonicalize_dtype(host.dtype)
    # Copy, because JAX may share the memory of host arrays.
    with explicitly():
        if _may_be_memory_mapped(leaf):
            return jax.make_array_from_callback(host.shape, place, lambda index: aligned_copy(np.asarray(host[index]), dtype))
        return jax.make_array_from_callback(host.shape, place, lambda index: np.array(host[index], dtype))


def copy_here(tree: PyTree) -> PyTree:
    """Returns a copy of arrays with the same shardings, for which each process copies its own shards.

    One process may call it alone. A compiled copy would use all devices, so all processes would have to call it.

    >>> copy_here({"w": jnp.zeros(2)})
    {'w': Array([0., 0.], dtype=float32)}
    """
    leaves, treedef = jax.tree.flatten(tree)
    plain = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves]
    by_device: dict[Any, list[Any]] = {}
    for leaf in plain:
        for shard in leaf.addressable_shards:
            by_device.setdefault(shard.device, []).append(shard.data)
    copies = {device: iter(_copy(parts)) for device, parts in by_device.items()}
    copied = []
    for leaf, original in zip(plain, leaves, strict=True):
        parts = [next(copies[shard.device]) for shard in leaf.addressable_shards]
        copy = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
        copied.append(jax.random.wrap_key_data(copy, impl=jax.random.key_impl(original)) if is_key(original) else copy)
    return jax.tree.unflatten(treedef, copied)


_copy = jax.jit(lambda parts: [jnp.copy(part) for part in parts])


def part_of(devices: Iterable[Any], split: NamedSharding | None = None, num_shards: int = 0) -> tuple[int, int]:
    """Returns which shard of each batch this process feeds, `(index, count)`.

    Batches are split evenly over the devices, in the order of the rows. `split` is the sharding of the rows into `num_shards` shards; `None` if each device
    has a separate shard.
    """
    used = list(devices)
    owners = {device.process_index for device in used}
    if len(owners) == 1:
        return 0, 1
    if jax.process_index() not in owners:
        raise ConfigError(f"Process {jax.process_index()} has none of the devices of the strategy. Pass some devices of every process. Received: {used}.")
    rows: dict[int, set[int]] = {}
    if split is None:
        for row, device in enumerate(used):
            rows.setdefault(device.process_index, set()).add(row)
    else:
        places: Any = split.devices_indices_map((num_shards,))
        for device, (where, *_) in places.items():
            rows.setdefault(device.process_index, set()).update(range(*where.indices(num_shards)))
    parts = sorted({tuple(sorted(process_rows)) for process_rows in rows.values()})
    lengths, covered = {len(part) for part in parts}, [row for part in parts for row in part]
    if len(lengths) > 1 or covered != list(range(len(covered))):
        raise ConfigError(
            "The processes must have equal, contiguous parts of a batch. Give each process the same number of devices, and split batches over the first axis "
            f"of the mesh. Received rows, by process: { {process: sorted(process_rows) for process, process_rows in sorted(rows.items())} }."
        )
    return parts.index(tuple(sorted(rows[jax.process_index()]))), len(parts)


class _Leaf(NamedTuple):
    """The place of a leaf: its vector, its range in the vector, its shape (of the key data for a typed key), and the implementation of the key."""

    vector: str
    begin: int
    end: int
    shape: tuple[int, ...]
    impl: Any


class Form:
    """How a tree is packed; the same object for all trees of the same structure, shapes and dtypes, so it can be a key of caches.

    `types` are the shape, the dtype and, for a typed key, the implementation of each leaf. Leaves larger than `largest` get a separate vector.

    >>> tree = {"w": jnp.ones(2), "b": jnp.zeros(()), "n": jnp.arange(3)}
    >>> form = Form.of(tree)
    >>> packed = form.pack(tree)
    >>> {name: vector.shape for name, vector in packed.items()}, form.unpack(packed)["w"].tolist()
    ({'float32': (3,), 'int32': (3,)}, [1.0, 1.0])
    """

    def __init__(self, treedef: Any, types: Sequence[tuple[tuple[int, ...], Any, Any]], largest: int | None = None) -> None:
        self.treedef = treedef
        self.leaves: list[_Leaf] = []
        sizes: dict[str, int] = {}
        for index, (shape, dtype, impl) in enumerate(types):
            if impl is not None:
                data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
                shape, dtype = data.shape, data.dtype
            size = math.prod(shape)
            name = dtype.name if largest is None or size <= largest else f"{dtype.name} {index}"
            begin = sizes.get(name, 0)
            sizes[name] = begin + size
            self.leaves.append(_Leaf(name, begin, begin + size, shape, impl))

    @staticmethod
    def of(tree: PyTree, largest: int | None = None) -> "Form":
        """Returns the form of a tree of arrays or shapes."""
        leaves, treedef = jax.tree.flatten(tree)
        return _form(treedef, tuple((leaf.shape, leaf.dtype, _impl(leaf)) for leaf in leaves), largest)

    def pack(self, tree: PyTree) -> dict[str, Any]:
        """Returns the vectors of a tree, in NumPy for a tree of NumPy arrays; may be traced."""
        groups: dict[str, list[Any]] = {}
        leaves = jax.tree.leaves(tree)
        for place, leaf in zip(self.leaves, leaves, strict=True):
            data = leaf if place.impl is None else jax.random.key_data(leaf)
            groups.setdefault(place.vector, []).append(data.reshape(-1))
        concatenate: Any = np.concatenate if all(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves) else jnp.concatenate
        return {name: concatenate(group) for name, group in groups.items()}

    def unpack(self, vectors: Mapping[str, Any]) -> PyTree:
        """Returns the tree that was packed; may be traced."""
        leaves = [vectors[leaf.vector][leaf.begin : leaf.end].reshape(leaf.shape) for leaf in self.leaves]
        typed = [data if leaf.impl is None else jax.random.wrap_key_data(data, impl=leaf.impl) for leaf, data in zip(self.leaves, leaves, strict=True)]
        return self.treedef.unflatten(typed)

    def unpack_arrays(self, vectors: Mapping[str, jax.Array]) -> PyTree:
        """Returns the tree that was packed, unpacked on the device in one call."""
        return _unpack(self, vectors)


def _impl(leaf: jax.Array) -> Any:
    return None if isinstance(leaf.dtype, np.dtype) else jax.random.key_impl(leaf)  # Only the dtypes of keys are not NumPy dtypes.


_form = functools.lru_cache(maxsize=64)(Form)

_pack = jax.jit(Form.pack, static_argnums=0)
_unpack = jax.jit(Form.unpack, static_argnums=0)


class Packed:
    """A copy of a tree of arrays on one device, independent of the originals, with one vector per dtype; creating it does not block."""

    def __init__(self, tree: PyTree) -> None:
        self.form = Form.of(tree)
        self._vectors = _pack(self.form, tree)

    def leaves(self) -> list[np.ndarray[Any, Any]]:
        """Returns the leaves, views of larger arrays, with typed keys as key data; waits until they are available."""
        vectors = {name: on_host(vector) for name, vector in self._vectors.items()}
        return [vectors[leaf.vector][leaf.begin : leaf.end].reshape(leaf.shape) for leaf in self.form.leaves]


def is_spread(array: object) -> bool:
    """Returns whether a value is a JAX array that no device holds whole."""
    return isinstance(array, jax.Array) and not array.is_fully_replicated


def spans_processes(tree: PyTree) -> bool:
    """Returns whether any array of a tree is split between processes, so that none of them holds it whole. The same in all processes."""
    if jax.process_count() == 1:
        return False
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    return any(not (array.is_fully_addressable or array.is_fully_replicated) for array in arrays)


def whole(array: Any) -> np.ndarray[Any, Any]:
    """Returns a whole array on the host. If it is split between processes, all of them must call this."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return np.asarray(jax.device_get(array))
    if array.is_fully_replicated:
        return np.asarray(jax.device_get(array.addressable_data(0)))
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def has_host_memory(array: jax.Array) -> bool:
    """Returns whether all devices of an array can copy to pinned memory of the host."""
    return _have_host_memory(array.sharding)


@functools.lru_cache(maxsize=256)
def _have_host_memory(sharding: jax.sharding.Sharding) -> bool:
    devices: Any = sharding.addressable_devices
    return all("pinned_host" in {memory.kind for memory in device.addressable_memories()} for device in devices)


def copy_to_host_memory(arrays: Sequence[jax.Array], *, wait: bool = True) -> list[jax.Array]:
    """Returns copies in the memory of the host, split like the originals and independent of them.

    Each process copies its own shards, without the other processes. A shard that several of its devices hold is copied once. Without `wait`, the copies
    are only dispatched, like a step; a later step that reuses the buffers runs after them.
    """
    once = [array.addressable_data(0) if array.is_fully_replicated else _without_duplicates(array) for array in arrays]
    parts = [[shard.data for shard in array.addressable_shards] for array in once]
    # Copy shards: copying an array that spans processes is a computation of all of them, and its order relative to the steps may differ between them.
    copies = jax.device_put(parts, [[part.sharding.with_memory_kind("pinned_host") for part in shards] for shards in parts])
    if wait:
        jax.block_until_ready(copies)
    shardings = [array.sharding.with_memory_kind("pinned_host") for array in once]
    return [
        jax.make_array_from_single_device_arrays(array.shape, sharding, shards, dtype=array.dtype)
        for array, sharding, shards in zip(once, shardings, copies, strict=True)
    ]


def _without_duplicates(array: jax.Array) -> jax.Array:
    """Returns an array without duplicates of shards within a process, in the same memory.

    Each process keeps a device in the mesh, because an array must have shards on all processes to be written by all of them together.
    """
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return array
    mesh, used = sharding.mesh, {axis for axes in sharding.spec for axis in ((axes,) if isinstance(axes, str) else axes or ())}
    devices = mesh.devices
    for axis, name in enumerate(mesh.axis_names):
        if name not in used:
            devices = devices.take(_one_for_each_process(devices, axis), axis)
    if devices.size == mesh.devices.size:
        return array
    smaller = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    parts = {shard.device: shard.data for shard in array.addressable_shards}
    kept = [parts[device] for device in devices.flat if device in parts]
    return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(smaller, sharding.spec), kept, dtype=array.dtype)


def _one_for_each_process(devices: Any, axis: int) -> list[int]:
    """Returns indices along an axis that keep at least one device of every process."""
    kept, seen = [], set[int]()
    for index in range(devices.shape[axis]):
        owners = {device.process_index for device in devices.take([index], axis).flat}
        if not owners <= seen:
            kept.append(index)
            seen |= owners
    return kept


def guards_transfers() -> bool:
    """Returns whether `jax_transfer_guard` checks transfers to the devices, so that fitflax's transfers must be explicit."""
    return _CONFIG.jax_transfer_guard_host_to_device not in (None, "allow")


@contextlib.contextmanager
def explicitly() -> Iterator[None]:
    """Allows implicit transfers to the devices inside the block, such as small constants of JAX functions, even if `jax_transfer_guard` forbids them."""
    with jax.transfer_guard_host_to_device("allow"):
        yield
