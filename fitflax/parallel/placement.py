"""Placement of host arrays on devices, also of other processes, and the shard of a batch that a process feeds."""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import AbstractMesh, NamedSharding

from fitflax.errors import ConfigError
from fitflax.leaves import is_key, key_of
from fitflax.parallel.eager import explicitly
from fitflax.state import PyTree

__all__ = ["SMALL_BYTES", "RemoteArray", "check_devices", "copy_here", "count_processes", "dense_outside_mesh", "outside_mesh", "own_copy", "part_of", "put"]

# Alignment in bytes that lets CPU devices use memory without a copy.
_ALIGNMENT = 64

SMALL_BYTES = 2**20
"""Smaller arrays are copied together, or on the host."""


def outside_mesh() -> Any:
    """Returns a context manager in which there is no mesh, so that linen does not constrain arrays by their axis names."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def dense_outside_mesh(call: Callable[..., Any], arguments: Any, keywords: Any, context: Any) -> Any:
    """Calls the method of a module, and that of `nn.DenseGeneral` outside the mesh; for `nn.intercept_methods`.

    It creates its kernel as a matrix, which linen would constrain by the names of all axes of the kernel (https://github.com/google/flax/issues/3676).
    There are no custom constraints inside of it.
    """
    if isinstance(context.module, nn.DenseGeneral):
        with outside_mesh():
            return call(*arguments, **keywords)
    return call(*arguments, **keywords)


def check_devices(owner: str, devices: Any) -> list[Any]:
    """Returns devices as a list, after checking that they are devices, and unique."""
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


def own_copy(leaf: Any) -> Any:
    """Returns a copy of a leaf without weak types; typed keys remain typed. Large arrays are copied on their devices, others on the host."""
    if isinstance(leaf, jax.Array) and not is_key(leaf) and leaf.nbytes >= SMALL_BYTES:
        return jnp.array(leaf, leaf.dtype)
    if is_key(leaf):
        return key_of(np.array(jax.device_get(jax.random.key_data(leaf))), jax.random.key_impl(leaf))
    return _aligned_copy(leaf) if _may_be_memory_mapped(leaf) else np.array(jax.device_get(leaf))


def _may_be_memory_mapped(leaf: Any) -> bool:
    """Returns whether an array may be memory-mapped, so that copying reads a file."""
    return isinstance(leaf, np.ndarray) and not leaf.flags.writeable


def _aligned_copy(array: np.ndarray[Any, Any], dtype: Any = None) -> np.ndarray[Any, Any]:
    """Returns an aligned copy, which CPU devices use without copying it again.

    XLA does not write into external memory: the first step allocates its result elsewhere, and the copy is released.
    """
    kind = np.dtype(array.dtype if dtype is None else dtype)
    memory: np.ndarray[Any, Any] = np.empty(array.size * kind.itemsize + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    copy: np.ndarray[Any, Any] = memory[begin : begin + array.size * kind.itemsize].view(kind).reshape(array.shape)
    copy[...] = array
    return copy


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
            return jax.make_array_from_callback(host.shape, place, lambda index: _aligned_copy(np.asarray(host[index]), dtype))
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

    Batches are split evenly over the devices, in the order of the rows; `split` is the sharding of the rows, in `num_shards` shards, unless each device
    has a separate one.
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
    parts = sorted({tuple(sorted(own)) for own in rows.values()})
    lengths, covered = {len(part) for part in parts}, [row for part in parts for row in part]
    if len(lengths) > 1 or covered != list(range(len(covered))):
        raise ConfigError(
            "The processes must have equal, contiguous parts of a batch. Give each process the same number of devices, and split batches over the first axis "
            f"of the mesh. Received rows, by process: { {process: sorted(own) for process, own in sorted(rows.items())} }."
        )
    return parts.index(tuple(sorted(rows[jax.process_index()]))), len(parts)
