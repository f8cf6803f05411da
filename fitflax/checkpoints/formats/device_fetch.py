"""Copies arrays from devices to the host, one after another, with a bounded number of bytes in flight."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from fitflax.leaves import on_host

__all__ = ["fetch", "may_share"]


def fetch(arrays: Iterable[jax.Array], *, ahead_bytes: float) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the values of arrays on the host, copying `ahead_bytes` of the next ones in the background. The arrays must be fully addressable.

    On a CPU, the values may share memory with the arrays. Unlike `np.asarray`, this does not leave a cached host copy in the array.
    """
    started: collections.deque[tuple[int, Callable[[], np.ndarray[Any, Any]]]] = collections.deque()
    num_bytes = 0
    for array in arrays:
        started.append((array.nbytes, _start_copy(array)))
        num_bytes += started[-1][0]
        while started and num_bytes > ahead_bytes:
            size, value = started.popleft()
            num_bytes -= size
            yield value()
    while started:
        yield started.popleft()[1]()


def _start_copy(array: jax.Array) -> Callable[[], np.ndarray[Any, Any]]:
    """Starts the copy of an array to the host, and returns a function that waits for it."""
    if array.is_fully_replicated:
        piece = array.addressable_data(0)
        if not may_share(array):
            piece.copy_to_host_async()
        return functools.partial(on_host, piece)
    # addressable_data again: shards live as long as their array, and so would their cached host copies.
    pieces = [(shard.index, shard.data.addressable_data(0)) for shard in array.addressable_shards if shard.replica_id == 0]
    for _, piece in pieces:
        piece.copy_to_host_async()

    def assemble() -> np.ndarray[Any, Any]:
        whole = np.empty(array.shape, array.dtype)
        for index, piece in pieces:
            whole[index] = on_host(piece)
        return whole

    return assemble


def may_share(array: jax.Array) -> bool:
    """Returns whether the value that `fetch` yields may share memory with `array`."""
    return array.is_fully_replicated and _is_on_host(array.sharding)


@functools.lru_cache(maxsize=256)
def _is_on_host(sharding: jax.sharding.Sharding) -> bool:
    return sharding.memory_kind != "device" or any(device.platform == "cpu" for device in sharding.device_set)  # type: ignore[attr-defined]
