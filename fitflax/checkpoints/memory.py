"""Memory for copies of a state: arrays fetched from devices; host memory, either new and in huge pages, or reused; and whether devices have room for a copy."""

import collections
import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from fitflax.leaves import aligned_memory, on_host

# An array keeps its whole slab alive. So tiny arrays, which callbacks may keep, and large ones get their own memory.
_TINY_BYTES = 2**14
_LARGE_BYTES = 2**24
_SLAB_BYTES = 2**25
# The alignment of arrays; see `_memory`.
_ALIGNMENT = 64
_PIECE_BYTES = 2**24
# The size of a huge page, and the size from which NumPy requests them.
_PAGE_BYTES = 2**21
_PAGES_BYTES = 2**22
# The fraction of a device's memory that copies leave free, for fragmentation and for later steps and evaluations that need more memory.
_SPARE = 0.1


class Arena:
    """Creates arrays like `np.empty`, but in huge pages: touching new memory page by page takes longer than reading it from a disk.

    Tiny and large arrays get their own memory. The others share slabs of up to 32 MB.
    """

    def __init__(self, num_bytes: int) -> None:
        self._remaining = num_bytes  # Bytes that are still expected to be requested.
        self._slab = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Returns a new uninitialized array."""
        num_bytes = math.prod(shape) * dtype.itemsize
        aligned = Loan.size_of(num_bytes)
        self._remaining -= aligned
        if num_bytes < _TINY_BYTES:
            return np.empty(shape, dtype)
        if num_bytes >= _LARGE_BYTES:
            return _memory(num_bytes).view(dtype).reshape(shape)
        if num_bytes > len(self._slab):
            self._slab = _memory(max(aligned, min(self._remaining + aligned, _SLAB_BYTES)))
        data, self._slab = self._slab[:num_bytes], self._slab[aligned:]
        return data.view(dtype).reshape(shape)


class Loan:
    """A block of memory that is in use while this object lives. Arrays in it, their views and each `memoryview` keep it alive."""

    def __init__(self, block: np.ndarray[Any, Any]) -> None:
        # Makes this object the base of its arrays. Slices of the block would keep only the block alive, not the loan.
        self.__array_interface__ = block.__array_interface__
        self.block = block
        self._begin = 0

    @staticmethod
    def size_of(num_bytes: int) -> int:
        """Returns how many bytes of a block an array takes."""
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Returns the next uninitialized array of the block. Raises `ValueError` if the block has not enough room."""
        num_bytes = math.prod(shape) * dtype.itemsize
        begin, self._begin = self._begin, self._begin + self.size_of(num_bytes)
        if self._begin > len(self.block):
            raise ValueError(f"An array of {num_bytes} bytes does not fit the {len(self.block) - begin} bytes that are left of the block.")
        return np.asarray(self)[begin : begin + num_bytes].view(dtype).reshape(shape)


class ReusedMemory:
    """Memory that is reused for one copy of a state after another, so that only the first copy waits for the kernel to supply it.

    A block is reused once nothing refers to its last loan, so a reader of an array prevents it from being overwritten. All methods except `touch` and
    `release` must be called from one thread.
    """

    def __init__(self) -> None:
        self._blocks: list[np.ndarray[Any, Any]] = []
        self._loans: list[weakref.ref[Loan]] = []
        self._untouched: collections.deque[np.ndarray[Any, Any]] = collections.deque()  # Pieces of reserved blocks. They keep their loan alive.

    @property
    def num_lent(self) -> int:
        """The number of loans that are still referenced."""
        return len(self._living())

    def lend(self, num_bytes: int, *, max_blocks: int = 1) -> Loan:
        """Returns a block of exactly this size, the sum of `Loan.size_of` of all arrays, reused or new.

        Blocks of other sizes are released first. Blocks beyond `max_blocks` are freed after use.
        """
        lent = {id(loan.block) for loan in self._living()}
        self._blocks = [block for block in self._blocks if len(block) == num_bytes]
        free = [block for block in self._blocks if id(block) not in lent]
        block = free[0] if free else _memory(num_bytes)
        if not free and len(self._blocks) < max_blocks:
            self._blocks.append(block)
        loan = Loan(block)
        self._loans.append(weakref.ref(loan))
        return loan

    def reserve(self, num_bytes: int, *, max_blocks: int = 1) -> None:
        """Lends a block, as `lend` does, until `touch` is done with it."""
        block = np.asarray(self.lend(num_bytes, max_blocks=max_blocks))
        self._untouched.extend(block[begin : begin + _PIECE_BYTES] for begin in range(0, num_bytes, _PIECE_BYTES))

    def touch(self) -> None:
        """Writes to all pages of reserved blocks, so that the kernel supplies them; piecewise, so that other threads can run Python code.

        Threads that call it at the same time share the work, and return when no piece is left to begin.
        """
        with contextlib.suppress(IndexError):
            while True:
                self._untouched.popleft().fill(0)

    def release(self) -> None:
        """Frees all blocks; those in use live until their last array is gone."""
        self._blocks = []
        self._untouched.clear()

    def _living(self) -> list[Loan]:
        living = [loan for reference in self._loans if (loan := reference()) is not None]
        self._loans = [weakref.ref(loan) for loan in living]
        return living


def peak_with_copy(num_bytes: int, *, limit: int, peak: int, expected: int = 0) -> int | None:
    """Returns the peak of a device's memory if a copy of `num_bytes` is added to its peak so far, which includes the activations of a step.

    `None` if there is no room for it. `expected` is the last result, and a later peak up to it is accepted. Such a peak may not include a copy, so there
    must be room for two from the beginning.

    >>> peak_with_copy(10, limit=100, peak=70), peak_with_copy(10, limit=100, peak=71), peak_with_copy(10, limit=100, peak=80, expected=80)
    (80, None, 80)
    """
    if peak <= expected:
        return expected
    return peak + num_bytes if peak + 2 * num_bytes <= (1 - _SPARE) * limit else None


class DeviceRoom:
    """Decides whether devices have room for a copy of a state during the next steps, from the statistics of their memory."""

    def __init__(self) -> None:
        self._expected: dict[jax.Device, int] = {}  # See `peak_with_copy`.

    def has(self, num_bytes: int, devices: Iterable[jax.Device]) -> bool:
        """Returns whether each device has room for a copy of `num_bytes`; `False` if one does not report its memory."""
        peaks: dict[jax.Device, int] = {}
        for device in devices:
            stats = device.memory_stats() or {}  # A CPU has none.
            if not {"bytes_limit", "peak_bytes_in_use"} <= stats.keys():
                return False
            expected = self._expected.get(device, 0)
            peak = peak_with_copy(num_bytes, limit=stats["bytes_limit"], peak=stats["peak_bytes_in_use"], expected=expected)
            if peak is None:
                return False
            peaks[device] = peak
        self._expected |= peaks
        return True


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    """Returns the memory of a contiguous array, as bytes because `memoryview` does not support bfloat16."""
    data: memoryview = array.reshape(-1).view(np.uint8).data
    return data


def _memory(num_bytes: int) -> np.ndarray[Any, Any]:
    alignment = _PAGE_BYTES if num_bytes >= _PAGES_BYTES else _ALIGNMENT
    # 16 bytes off, as in NumPy's own memory: on a CPU, JAX borrows memory with an alignment of 64 instead of copying it, and would keep the slab.
    return aligned_memory(num_bytes, alignment=alignment, offset=16)


def fetch(arrays: Iterable[jax.Array], *, ahead_bytes: float) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the values of fully addressable arrays on the host, one after another, copying `ahead_bytes` of the next ones in the background.

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
