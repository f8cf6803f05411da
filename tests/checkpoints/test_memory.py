"""Fresh memory for many arrays."""

import gc
import math
import weakref

import ml_dtypes
import numpy as np
import pytest

from fitflax.checkpoints.memory import Arena

FLOAT = np.dtype(np.float32)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (100, 41), (2**20 + 3,), (2**22 + 1,)], ids=str)
@pytest.mark.parametrize("dtype", [np.dtype(np.uint8), FLOAT, np.dtype(ml_dtypes.bfloat16), np.dtype(np.complex128)], ids=str)
def test_arrays_are_as_numpy_makes_them(shape, dtype):
    array = Arena(math.prod(shape) * dtype.itemsize).empty(shape, dtype)
    assert (array.shape, array.dtype) == (shape, dtype)
    assert array.flags.writeable and array.flags.c_contiguous and array.flags.aligned
    array[...] = 1


def test_no_two_arrays_overlap():
    sizes = [5000, 20000, 4097, 1, 0, 70000, 999_999, 4096, 2**20 + 1]
    for expected in (0, sum(sizes) * 4, 10**9):  # Too little, what comes, and too much.
        arena = Arena(min(expected, 2**23))
        arrays = [arena.empty((size,), FLOAT) for size in sizes]
        for index, array in enumerate(arrays):
            array[...] = index
        assert all((array == index).all() for index, array in enumerate(arrays))


def test_a_slab_that_is_a_little_too_small_is_not_used():
    for expected in range(40000, 40100):
        arena = Arena(expected)
        assert [arena.empty((20000,), np.dtype(np.uint8)).nbytes for _ in range(3)] == [20000] * 3


def test_middle_sized_arrays_share_slabs_and_tiny_and_large_ones_do_not():
    arena = Arena(40 * 2**20)
    middle = [arena.empty((2**18,), FLOAT) for _ in range(40)]
    assert len({id(array.base) for array in middle}) == 2  # 32 MB, and the rest.
    assert sorted({array.base.nbytes >> 20 for array in middle}) == [8 + 2, 32 + 2]  # Two for the alignment, which are never touched.
    assert all(arena.empty((size,), FLOAT).base is None for size in (1, 4095))
    large = [arena.empty((2**22,), FLOAT) for _ in range(2)]
    assert large[0].base is not large[1].base and large[0].base.nbytes >> 20 == 16 + 2


def test_a_slab_goes_with_its_last_array():
    arena = Arena(2**17)
    first, second = arena.empty((2**14,), FLOAT), arena.empty((2**14,), FLOAT)
    slab = weakref.ref(first.base)
    del arena, first
    gc.collect()
    assert slab() is second.base
    del second
    gc.collect()
    assert slab() is None


def test_jax_copies_what_shares_a_slab():
    arena = Arena(2**20)
    assert {arena.empty((size,), FLOAT).ctypes.data % 64 for size in (5000, 4097, 6000, 16384)} == {16}


def test_large_arrays_and_slabs_begin_with_a_huge_page():
    arena = Arena(2**25)
    assert [arena.empty((size,), FLOAT).ctypes.data % 2**21 for size in (2**18, 2**22, 2**22 + 1)] == [16, 16, 16]
