"""Fresh memory for many arrays, at the speed at which the kernel can give it."""

import math
from typing import Any

import numpy as np

__all__ = ["Arena"]

# Whoever keeps one array keeps its slab: tiny ones, which live in callbacks, get memory of their own, and large ones have no need of others.
_TINY_BYTES = 2**14
_LARGE_BYTES = 2**24
_SLAB_BYTES = 2**25
# A huge page, and the size from which on NumPy asks for them.
_PAGE_BYTES = 2**21
_PAGES_BYTES = 2**22


class Arena:
    """Makes arrays as `np.empty` does, but in huge pages: first touching memory small page by small page takes longer than to read it from a disk.

    Huge pages begin at multiples of their size, so large arrays do too, and others share slabs of up to 32 MB that do.

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
        aligned = -(-num_bytes // 64) * 64
        self._left -= aligned
        if num_bytes < _TINY_BYTES:
            return np.empty(shape, dtype)
        if num_bytes >= _LARGE_BYTES:
            return _memory(num_bytes).view(dtype).reshape(shape)
        if num_bytes > len(self._slab):
            self._slab = _memory(max(aligned, min(self._left + aligned, _SLAB_BYTES)))
        data, self._slab = self._slab[:num_bytes], self._slab[aligned:]
        return data.view(dtype).reshape(shape)


def _memory(num_bytes: int) -> np.ndarray[Any, Any]:
    alignment = _PAGE_BYTES if num_bytes >= _PAGES_BYTES else 64
    # 16 bytes after the multiple, as NumPy's own memory. On a CPU, JAX borrows what is aligned to 64 instead of copying it, and would hold the slab.
    offset = 16
    memory = np.empty(num_bytes + alignment + offset, np.uint8)
    begin = -memory.ctypes.data % alignment + offset
    return memory[begin : begin + num_bytes]
