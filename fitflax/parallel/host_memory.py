"""Copies of arrays that are split over devices, in the memory of the host and split as they are: nothing is put together."""

from collections.abc import Sequence

import jax

__all__ = ["copy_to_host_memory", "is_spread"]


def is_spread(array: object) -> bool:
    """Returns whether an array is one of JAX's that no device holds whole.

    >>> is_spread(jax.numpy.zeros(3))
    False
    """
    return isinstance(array, jax.Array) and not array.is_fully_replicated


def copy_to_host_memory(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns copies in the host's memory that whatever is done to the originals cannot touch, each with the sharding of its original; waits for them.

    >>> array = jax.numpy.arange(3)
    >>> copy = copy_to_host_memory([array])[0]
    >>> array.delete()
    >>> copy.tolist(), copy.sharding.memory_kind
    ([0, 1, 2], 'pinned_host')
    """
    copies = [jax.device_put(array, array.sharding.with_memory_kind("pinned_host")) for array in arrays]
    return list(jax.block_until_ready(copies))
