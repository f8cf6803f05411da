"""Fresh memory for many arrays, at the speed at which the kernel can give it."""

import math
from typing import Any

import numpy as np

__all__ = ["Arena"]

# NumPy asks for huge pages from this size on; smaller arrays come to it by sharing.
_HUGE_BYTES = 2**22
# Whoever keeps one array keeps its slab: tiny ones, which live in callbacks, get memory of their own.
_TINY_BYTES = 2**14
_SLAB_BYTES = 2**25


class Arena:
    """Makes arrays as `np.empty` does, but middle-sized ones in slabs of up to 32 MB: first touching memory page by page takes longer than a disk to read it.

    >>> arena = Arena(80_000)
    >>> first, second = arena.empty((5000,), np.dtype(float)), arena.empty((50, 100), np.dtype(float))
    >>> first.base is second.base, second.shape
    (True, (50, 100))
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes  # What is still expected to be asked for.
        self._slab = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Returns a new array, whose values are arbitrary."""
        num_bytes = math.prod(shape) * dtype.itemsize
        # A multiple of 16, as NumPy aligns. JAX borrows memory aligned to 64 on a CPU instead of copying it, and so would hold the slab.
        aligned = -(-num_bytes // 64) * 64
        self._left -= aligned
        if not _TINY_BYTES <= num_bytes < _HUGE_BYTES:
            return np.empty(shape, dtype)
        if aligned > len(self._slab):
            self._slab = _slab(max(aligned, min(self._left + aligned, _SLAB_BYTES)))
        data, self._slab = self._slab[:num_bytes], self._slab[aligned:]
        return data.view(dtype).reshape(shape)


def _slab(num_bytes: int) -> np.ndarray[Any, Any]:
    memory = np.empty(num_bytes + 64, np.uint8)
    begin = (16 - memory.ctypes.data) % 64
    return memory[begin : begin + num_bytes]
