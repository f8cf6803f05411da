"""Copies of arrays in the memory of the host that remain JAX arrays and keep their shards."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from fitflax.state import PyTree

__all__ = ["copy_to_host_memory", "has_host_memory", "is_spread", "spans_processes", "whole"]


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
    # Shards, because copying an array that spans processes is a computation of all of them, whose order relative to the steps may differ.
    copies = jax.device_put(parts, [[part.sharding.with_memory_kind("pinned_host") for part in own] for own in parts])
    if wait:
        jax.block_until_ready(copies)
    shardings = [array.sharding.with_memory_kind("pinned_host") for array in once]
    return [
        jax.make_array_from_single_device_arrays(array.shape, sharding, own, dtype=array.dtype)
        for array, sharding, own in zip(once, shardings, copies, strict=True)
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
    """Returns the indices along an axis that are needed to keep a device of every process."""
    kept, seen = [], set[int]()
    for index in range(devices.shape[axis]):
        owners = {device.process_index for device in devices.take([index], axis).flat}
        if not owners <= seen:
            kept.append(index)
            seen |= owners
    return kept
