"""Copies of arrays that are split over devices, in the memory of the host and split as they are: nothing is put together."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from fitflax.state import PyTree

__all__ = ["copy_to_host_memory", "is_spread", "spans_processes"]


def is_spread(array: object) -> bool:
    """Returns whether an array is one of JAX's that no device holds whole.

    >>> is_spread(jax.numpy.zeros(3))
    False
    """
    return isinstance(array, jax.Array) and not array.is_fully_replicated


def spans_processes(tree: PyTree) -> bool:
    """Returns whether arrays of a tree are split between processes: none of them holds them whole. The same in all processes.

    >>> spans_processes({"w": jax.numpy.zeros(3)})
    False
    """
    if jax.process_count() == 1:
        return False
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    return any(not (array.is_fully_addressable or array.is_fully_replicated) for array in arrays)


def copy_to_host_memory(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns copies in the host's memory that whatever is done to the originals cannot touch, split as these are; waits for them.

    Each process copies its own parts, and no other process needs to take part. Of a part that several of its devices hold there is one copy.

    >>> array = jax.numpy.arange(3)
    >>> copy = copy_to_host_memory([array])[0]
    >>> array.delete()
    >>> copy.tolist(), copy.sharding.memory_kind
    ([0, 1, 2], 'pinned_host')
    """
    once = [_once(array) for array in arrays]
    parts = [[shard.data for shard in array.addressable_shards] for array in once]
    # Not the arrays themselves: of one that spans processes that is a computation of all of them, in which training steps must not come between.
    copies = jax.device_put(parts, [[part.sharding.with_memory_kind("pinned_host") for part in own] for own in parts])
    jax.block_until_ready(copies)
    shardings = [array.sharding.with_memory_kind("pinned_host") for array in once]
    return [
        jax.make_array_from_single_device_arrays(array.shape, sharding, own, dtype=array.dtype)
        for array, sharding, own in zip(once, shardings, copies, strict=True)
    ]


def _once(array: jax.Array) -> jax.Array:
    """Returns an array of which devices of one process hold the same parts as one of which they hold each part once; the same memory.

    Each process still has a device in the mesh: an array of which a process has nothing cannot be written by all of them together.
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
    """Returns the places along an axis that are needed to have devices of all processes that have some."""
    kept, seen = [], set[int]()
    for index in range(devices.shape[axis]):
        owners = {device.process_index for device in devices.take([index], axis).flat}
        if not owners <= seen:
            kept.append(index)
            seen |= owners
    return kept
