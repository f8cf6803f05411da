"""Memory for many arrays: new memory, and memory that is lent repeatedly."""

import gc
import math
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest

from fitflax.checkpoints import memory as module
from fitflax.checkpoints.memory import Arena, DeviceRoom, Loan, ReusedMemory, peak_with_copy
from tests.checkpoints.samples import kept_bytes

FLOAT = np.dtype(np.float32)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (100, 41), (2**20 + 3,), (2**22 + 1,)], ids=str)
@pytest.mark.parametrize("dtype", [np.dtype(np.uint8), FLOAT, np.dtype(ml_dtypes.bfloat16), np.dtype(np.complex128)], ids=str)
def test_arrays_are_like_those_of_numpy(shape, dtype):
    array = Arena(math.prod(shape) * dtype.itemsize).empty(shape, dtype)
    assert (array.shape, array.dtype) == (shape, dtype)
    assert array.flags.writeable and array.flags.c_contiguous and array.flags.aligned
    array[...] = 1


def test_no_two_arrays_overlap():
    sizes = [5000, 20000, 4097, 1, 0, 70000, 999_999, 4096, 2**20 + 1]
    for expected in (0, sum(sizes) * 4, 10**8):  # Too little, exactly enough, and too much.
        arena = Arena(expected)
        arrays = [arena.empty((size,), FLOAT) for size in sizes]
        for index, array in enumerate(arrays):
            array[...] = index
        assert all((array == index).all() for index, array in enumerate(arrays))


def test_a_slab_that_is_a_little_too_small_is_not_used():
    for expected in range(40000, 40100):
        arena = Arena(expected)
        assert [arena.empty((20000,), np.dtype(np.uint8)).nbytes for _ in range(3)] == [20000] * 3


def test_medium_sized_arrays_share_slabs_but_tiny_and_large_ones_do_not():
    arena = Arena(40 * 2**20)
    medium = [arena.empty((2**18,), FLOAT) for _ in range(40)]
    assert len({id(array.base) for array in medium}) == 2  # 32 MB, and the rest.
    assert sorted({array.base.nbytes >> 20 for array in medium}) == [8 + 2, 32 + 2]  # 2 MB for the alignment, which are never touched.
    assert all(arena.empty((size,), FLOAT).base is None for size in (1, 4095))
    large = [arena.empty((2**22,), FLOAT) for _ in range(2)]
    assert large[0].base is not large[1].base and large[0].base.nbytes >> 20 == 16 + 2


def test_a_slab_is_freed_with_its_last_array():
    arena = Arena(2**17)
    first, second = arena.empty((2**14,), FLOAT), arena.empty((2**14,), FLOAT)
    slab = weakref.ref(first.base)
    del arena, first
    gc.collect()
    assert slab() is second.base
    del second
    gc.collect()
    assert slab() is None


def test_jax_copies_arrays_that_share_a_slab():
    arena = Arena(2**20)
    assert {arena.empty((size,), FLOAT).ctypes.data % 64 for size in (5000, 4097, 6000, 16384)} == {16}


def test_large_arrays_and_slabs_start_at_a_huge_page():
    arena = Arena(2**25)
    assert [arena.empty((size,), FLOAT).ctypes.data % 2**21 for size in (2**18, 2**22, 2**22 + 1)] == [16, 16, 16]


# -- lent memory --


def filled(loan, sizes=(5, 20000, 0, 3)):
    """Returns arrays in a loan, each filled with its index."""
    arrays = [loan.empty((size,), FLOAT) for size in sizes]
    for index, array in enumerate(arrays):
        array[...] = index
    return arrays


def size_of(sizes=(5, 20000, 0, 3)):
    return sum(Loan.size_of(size * 4) for size in sizes)


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (100, 41)], ids=str)
@pytest.mark.parametrize("dtype", [np.dtype(np.bool_), FLOAT, np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.int4), np.dtype(np.complex128)], ids=str)
def test_arrays_of_a_loan_are_like_those_of_numpy(shape, dtype):
    loan = ReusedMemory().lend(2 * Loan.size_of(math.prod(shape) * dtype.itemsize))
    for _ in range(2):
        array = loan.empty(shape, dtype)
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.flags.writeable and array.flags.c_contiguous and array.flags.aligned
        array[...] = 1


def test_arrays_of_a_loan_do_not_overlap_and_jax_copies_them():
    arrays = filled(ReusedMemory().lend(size_of()))
    assert all((array == index).all() for index, array in enumerate(arrays))
    assert {array.ctypes.data % 64 for array in arrays if array.size} == {16}


def test_a_loan_has_no_more_room_than_requested():
    loan = ReusedMemory().lend(size_of())
    filled(loan)
    with pytest.raises(ValueError, match="An array of 4 bytes does not fit the 0 bytes that are left"):
        loan.empty((1,), FLOAT)


def test_memory_is_lent_again_when_nothing_refers_to_it():
    memory = ReusedMemory()
    arrays = filled(memory.lend(size_of()))
    address = arrays[0].ctypes.data
    arrays = None  # Before the next ones are made.
    assert filled(memory.lend(size_of()))[0].ctypes.data == address and kept_bytes(memory) == size_of()


@pytest.mark.parametrize(
    "keep", [lambda arrays: arrays[3], lambda arrays: arrays[1][5:9].view(np.int32), lambda arrays: arrays[1].data[7:]], ids=["array", "view", "bytes"]
)
def test_memory_is_not_lent_again_while_any_part_of_it_can_be_read(keep):
    memory = ReusedMemory()
    kept = keep(filled(memory.lend(size_of())))
    before = np.array(kept)
    assert memory.num_lent == 1
    other = memory.lend(size_of())
    for array in filled(other):
        array[...] = 77
    assert np.array_equal(np.array(kept), before) and memory.num_lent == 2
    del kept
    assert memory.num_lent == 1


def test_blocks_lent_beyond_the_maximum_are_freed_when_they_are_returned():
    memory = ReusedMemory()
    loans = [memory.lend(1000, max_blocks=2) for _ in range(3)]
    blocks = [weakref.ref(loan.block) for loan in loans]
    del loans
    assert [block() is None for block in blocks] == [False, False, True] and kept_bytes(memory) == 2000


def test_memory_of_another_size_is_released_but_arrays_still_lent_stay_unchanged():
    memory = ReusedMemory()
    for is_lent in (False, True):
        loan = memory.lend(size_of())
        block, arrays = weakref.ref(loan.block), filled(loan) if is_lent else []
        del loan
        memory.lend(1000)
        assert kept_bytes(memory) == 1000 and (block() is not None) == is_lent
        assert all((array == index).all() for index, array in enumerate(arrays))
        del arrays
        assert block() is None


def test_threads_share_the_work_of_touching_reserved_memory(monkeypatch):
    monkeypatch.setattr(module, "_PIECE_BYTES", 300)
    monkeypatch.setattr(module, "_memory", lambda num_bytes: np.full(num_bytes, 7, np.uint8))
    memory = ReusedMemory()
    memory.reserve(100_000)
    (block,) = memory._blocks
    assert memory.num_lent == 1 and (block == 7).all()
    threads = [threading.Thread(target=memory.touch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.num_lent == 0 and (block == 0).all()
    assert memory.lend(100_000).block is block


def test_reserved_memory_is_released_even_if_it_was_never_touched():
    memory = ReusedMemory()
    memory.reserve(1000)
    block = weakref.ref(memory._blocks[0])
    memory.release()
    assert memory.num_lent == 0 and block() is None
    memory.touch()


def test_memory_is_released_when_it_is_no_longer_lent():
    memory = ReusedMemory()
    loan = memory.lend(1000)
    block = weakref.ref(loan.block)
    memory.release()
    assert kept_bytes(memory) == 0 and block() is not None
    del loan
    assert block() is None


# -- the memory of devices --


@pytest.mark.parametrize(
    ("num_bytes", "limit", "peak", "expected", "found"),
    [
        (15, 1000, 500, 0, 515),
        (200, 1000, 500, 0, 700),  # A tenth of the memory stays free, and there is room for another copy.
        (201, 1000, 500, 0, None),
        (200, 1000, 700, 700, 700),  # The peak includes an earlier copy, or steps need more memory: another copy still fits.
        (200, 1000, 701, 700, None),  # Steps need more memory.
        (50, 1000, 600, 500, 650),
        (1, 0, 0, 0, 0),
    ],
)
def test_two_copies_fit_above_the_peak_of_a_run_and_leave_a_tenth_of_the_memory(num_bytes, limit, peak, expected, found):
    assert peak_with_copy(num_bytes, limit=limit, peak=peak, expected=expected) == found


class Device:
    """A device that reports the given statistics of its memory."""

    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_all_devices_must_have_room_and_a_copy_that_was_made_is_not_counted_twice():
    roomy, full = Device({"bytes_limit": 100, "peak_bytes_in_use": 40}), Device({"bytes_limit": 100, "peak_bytes_in_use": 70})
    room = DeviceRoom()
    assert not room.has(25, [roomy, full]) and room.has(25, [roomy])
    roomy.stats["peak_bytes_in_use"] = 65  # With the copy, which is no longer needed.
    assert room.has(25, [roomy]) and not DeviceRoom().has(25, [roomy])
    roomy.stats["peak_bytes_in_use"] = 66
    assert not room.has(25, [roomy])


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 5, "peak_bytes_in_use": 5}])
def test_a_device_that_does_not_report_its_memory_has_no_room(stats):
    assert not DeviceRoom().has(1, [Device({"bytes_limit": 100, "peak_bytes_in_use": 0}), Device(stats)])
