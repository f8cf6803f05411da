"""Copies of arrays that are split over devices, in the memory of the host and split as they are: nothing is put together."""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding

__all__ = ["copy_to_host_memory", "is_spread"]


def is_spread(array: object) -> bool:
    """Returns whether an array is one of JAX's that no device holds whole.

    >>> is_spread(jax.numpy.zeros(3))
    False
    """
    return isinstance(array, jax.Array) and not array.is_fully_replicated


def copy_to_host_memory(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns copies in the host's memory that whatever is done to the originals cannot touch, split as these are; waits for them.

    Of a part that several devices hold there is one copy.

    >>> array = jax.numpy.arange(3)
    >>> copy = copy_to_host_memory([array])[0]
    >>> array.delete()
    >>> copy.tolist(), copy.sharding.memory_kind
    ([0, 1, 2], 'pinned_host')
    """
    once = [_once(array) for array in arrays]
    copies = [jax.device_put(array, array.sharding.with_memory_kind("pinned_host")) for array in once]
    return list(jax.block_until_ready(copies))


def _once(array: jax.Array) -> jax.Array:
    """Returns an array of which several devices hold the same parts as one of which each part is held once; the same memory."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return array
    mesh, used = sharding.mesh, {axis for axes in sharding.spec for axis in ((axes,) if isinstance(axes, str) else axes or ())}
    if len(used) == len(mesh.axis_names):
        return array
    index = tuple(slice(None) if name in used else 0 for name in mesh.axis_names)
    types = tuple(kind for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if name in used)
    smaller = Mesh(mesh.devices[index], tuple(name for name in mesh.axis_names if name in used), axis_types=types)
    parts = {shard.device: shard.data for shard in array.addressable_shards}
    return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(smaller, sharding.spec), [parts[device] for device in smaller.devices.flat])
