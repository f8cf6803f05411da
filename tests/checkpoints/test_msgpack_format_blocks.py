"""The writer and the reader themselves: blocks, threads, system calls, and entries that do not describe an array."""

import errno
import itertools
import mmap
import os
import threading
import zlib

import flax.serialization
import jax.numpy as jnp
import numpy as np
import pytest

from fitflax.checkpoints import msgpack_format
from fitflax.checkpoints.msgpack_format import read_state, write_state
from fitflax.checkpoints.plain_tree import Plain, to_plain
from fitflax.errors import CheckpointError, CorruptCheckpointError
from tests.checkpoints.samples import assert_same

RNG = np.random.default_rng(0)
TRAIN = {
    "large": RNG.standard_normal(1000),
    "small": {str(index): np.full(index, index, np.int16) for index in range(40)},
    "jax": jnp.arange(300.0),
    "bfloat16": jnp.arange(77, dtype=jnp.bfloat16),
    "empty": np.zeros((0, 3)),
    "text": "x" * 500,
}
RUN = [np.float32(1.5), {"rows": [1, 2, RNG.integers(0, 9, (20, 30))]}]


@pytest.fixture
def blocks(monkeypatch):
    """Makes blocks so small that these trees have many."""
    monkeypatch.setattr(msgpack_format, "_BLOCK_BYTES", 256)


def save(directory, train=TRAIN, run=RUN):
    return write_state(directory, to_plain(train, root="train"), to_plain(run, root="run", keep_lists=True))


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "fitflax-crc32"]


def expected_bytes():
    return flax.serialization.msgpack_serialize({"train": TRAIN, "run": RUN}, in_place=True)


def expected_sums():
    return {
        path: zlib.crc32(np.asarray(array).tobytes())
        for path, array in {"train/large": TRAIN["large"], "train/jax": TRAIN["jax"], "run/1/rows/2": RUN[1]["rows"][2]}.items()
    }


# --- Writing ---


def test_blocks_are_written_and_checksummed_in_order(tmp_path, blocks):
    metadata = save(tmp_path)
    data = (tmp_path / "state.msgpack").read_bytes()
    assert data == expected_bytes() and metadata["state_bytes"] == len(data)
    assert {path: metadata["arrays"][path]["crc32"] for path in expected_sums()} == expected_sums()
    assert metadata["arrays"]["train/empty"] == {"shape": [0, 3], "dtype": "float64", "crc32": 0}


def test_the_sizes_of_blocks_and_buffers_do_not_change_the_file(tmp_path, monkeypatch):
    whole = save(tmp_path)
    for block_bytes, buffer_bytes in ((1, 1024), (7, 3), (256, 2), (4096, 1024)):
        monkeypatch.setattr(msgpack_format, "_BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(msgpack_format, "_BUFFER_BYTES", buffer_bytes)
        assert save(tmp_path) == whole
        assert_same(read_state(tmp_path, whole), {"train": TRAIN, "run": RUN})


def test_array_headers_equal_those_of_flax_at_every_length_where_they_change():
    for length in (*range(260), *range(2**16 - 50, 2**16 + 2)):
        array = np.zeros(length, np.uint8)
        (part,) = msgpack_format._layout(array.shape, array.dtype, 1, 2**30)
        assert part.header + array.tobytes() == flax.serialization.msgpack_serialize(array)


def test_chunks_are_cut_into_blocks(tmp_path, monkeypatch):
    whole = TRAIN["large"]
    for chunk_bytes, block_bytes in ((1000, 256), (256, 1000), (512, 256), (whole.nbytes, 256), (whole.nbytes - 1, 256)):
        monkeypatch.setattr(msgpack_format, "CHUNK_BYTES", chunk_bytes)
        monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", chunk_bytes)
        monkeypatch.setattr(msgpack_format, "_BLOCK_BYTES", block_bytes)
        metadata = save(tmp_path, {"w": whole}, None)
        assert (tmp_path / "state.msgpack").read_bytes() == flax.serialization.msgpack_serialize({"train": {"w": whole}, "run": None}, in_place=True)
        assert metadata["arrays"]["train/w"]["crc32"] == zlib.crc32(whole.tobytes())
        assert_same(read_state(tmp_path, metadata)["train"], {"w": whole})


def test_the_kernel_is_told_to_write_each_byte_except_at_the_end_and_to_free_the_bytes_before_it(tmp_path, blocks, monkeypatch):
    asked = []
    monkeypatch.setattr(msgpack_format, "_WRITE_BACK_BYTES", 1000)
    monkeypatch.setattr(msgpack_format, "_FREED_BYTES", 3000)
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, begin, length, advice: asked.append((begin, begin + length)), raising=False)
    total = save(tmp_path)["state_bytes"]
    begins, ends = zip(*asked, strict=True)
    assert begins == tuple(max(0, end - 3000) for end in (0, *ends[:-1])) and begins[-1] > 0
    assert total - 1000 < ends[-1] <= total and all(later - earlier >= 1000 for earlier, later in itertools.pairwise((0, *ends)))


def test_advice_that_the_file_system_rejects_is_not_an_error(tmp_path, blocks, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(msgpack_format, "_WRITE_BACK_BYTES", 1000)
    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    whole = save(tmp_path)
    monkeypatch.delattr(os, "posix_fadvise")  # As on a Mac.
    assert save(tmp_path) == whole
    assert (tmp_path / "state.msgpack").read_bytes() == expected_bytes()


def test_a_full_disk_is_an_error_and_leaves_no_thread(tmp_path, blocks, monkeypatch):
    running, flush = [], msgpack_format._FileSink.send
    monkeypatch.setattr(msgpack_format._FileSink, "send", lambda self, buffers: running.append(threads()) or flush(self, buffers))
    monkeypatch.setattr(msgpack_format, "_BUFFER_BYTES", 5000)
    (tmp_path / "state.msgpack").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        save(tmp_path)
    assert running[-1] == ["fitflax-crc32"] and threads() == []  # The thread was running when the disk failed.


def test_an_error_of_fsync_is_raised_and_leaves_no_thread(tmp_path, blocks, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        save(tmp_path)
    assert threads() == []


def test_an_error_in_the_checksum_thread_is_raised_and_does_not_block_the_writer(tmp_path, blocks, monkeypatch):
    metadata, crc32 = save(tmp_path), zlib.crc32

    def fail(data, value=0):
        if threading.current_thread().name == "fitflax-crc32":
            raise MemoryError("no memory for a sum")
        return crc32(data, value)

    monkeypatch.setattr(zlib, "crc32", fail)
    for act in (lambda: save(tmp_path), lambda: read_state(tmp_path, metadata)):
        with pytest.raises(MemoryError, match="no memory for a sum"):
            act()
        assert threads() == []


def test_thousands_of_tiny_arrays_round_trip(tmp_path):
    train = {str(index): np.full(2, index, np.int16) for index in range(2500)}
    assert_same(read_state(tmp_path, save(tmp_path, train, None))["train"], train)


def test_a_small_checkpoint_needs_no_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread was started"))
    assert_same(read_state(tmp_path, save(tmp_path)), {"train": TRAIN, "run": RUN})


def test_no_thread_is_left_after_saving_and_reading(tmp_path, blocks):
    metadata = save(tmp_path)
    assert threads() == []
    read_state(tmp_path, metadata)
    assert threads() == []


# --- Reading ---


def test_values_of_any_size_round_trip(tmp_path):
    numbers = [number for bits in (0, 5, 7, 8, 15, 16, 31, 32, 63) for each in (2**bits, -(2**bits)) for number in (each - 1, each, each + 1)]
    run = {
        "numbers": [number for number in numbers if number >= -(2**63)] + [2**64 - 1, 0.1, None, True],
        "texts": ["x" * length for length in (0, 31, 32, 255, 256, 2**16 - 1, 2**16)],
        "bytes": [bytes(length) for length in (0, 255, 256, 2**16 - 1, 2**16)],
        "lists": [[7] * length for length in (0, 15, 16, 300, 2**16)],
        "dicts": [{str(key): key for key in range(length)} for length in (0, 15, 16, 300, 2**16)],
    }
    assert_same(read_state(tmp_path, save(tmp_path, {}, run)), {"train": {}, "run": run})


@pytest.mark.parametrize("block_bytes", [256, 2**22])
def test_damage_in_any_block_of_an_array_is_detected(tmp_path, monkeypatch, block_bytes):
    metadata = save(tmp_path)
    monkeypatch.setattr(msgpack_format, "_BLOCK_BYTES", block_bytes)
    data = (tmp_path / "state.msgpack").read_bytes()
    begin = data.index(TRAIN["large"].tobytes())
    for position in (0, 255, 256, 4000, 7999):
        changed = bytearray(data)
        changed[begin + position] ^= 4
        (tmp_path / "state.msgpack").write_bytes(changed)
        with pytest.raises(CorruptCheckpointError, match=r"state.msgpack is damaged: train/large does not match its checksum in metadata\.json\.$"):
            read_state(tmp_path, metadata)
        assert threads() == []
        assert read_state(tmp_path, metadata, roots=["run"])["run"][0] == 1.5


def test_no_memory_is_allocated_before_the_header_is_verified(tmp_path, monkeypatch):
    metadata = save(tmp_path, {"w": np.zeros(1000)}, None)
    monkeypatch.setattr(msgpack_format.Arena, "empty", lambda *arguments: pytest.fail("memory was taken"))
    for shape, match in (([999], "does not have the shape"), ([10**15], "needs 8000000000000000 bytes, but only"), ([8, 125], "does not have the shape")):
        entry = metadata["arrays"]["train/w"] | {"shape": shape}
        with pytest.raises(CorruptCheckpointError, match=f"train/w {match}"):
            read_state(tmp_path, metadata | {"arrays": {"train/w": entry}})


@pytest.mark.parametrize(
    "change",
    [
        {"shape": "ab"},
        {"shape": [-1, -1000]},
        {"shape": [1000.0]},
        {"shape": None},
        {"shape": [1] * 70 + [1000]},
        {"shape": [2**62, 2**62, 0]},
        {"shape": [2**70, 0]},
        {"dtype": "object"},
        {"dtype": "V8"},
        {"dtype": "nothing"},
        {"dtype": None},
        {"dtype": {"names": ["a"], "formats": ["f8"]}},
        {"crc32": "1"},
    ],
    ids=str,
)
def test_entries_that_do_not_describe_an_array_are_reported_as_damage(tmp_path, change):
    metadata = save(tmp_path, {"w": np.zeros(1000)}, None)
    entry = metadata["arrays"]["train/w"] | change
    with pytest.raises(CorruptCheckpointError, match=r"state.msgpack is damaged: train/w "):
        read_state(tmp_path, metadata | {"arrays": {"train/w": entry}})
    for entry in ([], {}, None, {"shape": [1000], "dtype": "float64"}):
        with pytest.raises(CorruptCheckpointError, match=r"train/w has an invalid entry in metadata.json"):
            read_state(tmp_path, metadata | {"arrays": {"train/w": entry}})


def test_a_file_that_asks_for_python_objects_is_refused(tmp_path):
    """An attacker can also make metadata that matches the file, and an array of objects would be an array of addresses."""
    head = b"\x82\xa5train\x81\xa1w" + msgpack_format._layout((3,), np.dtype(object), 1, 2**30)[0].header
    (tmp_path / "state.msgpack").write_bytes(head + bytes(24) + b"\xa3run\xc0")
    arrays = {"train/w": {"shape": [3], "dtype": "object", "crc32": zlib.crc32(bytes(24))}}
    metadata = {"arrays": arrays, "structure_crc32": zlib.crc32(head + b"\xa3run\xc0"), "state_bytes": len(head) + 29}
    with pytest.raises(CorruptCheckpointError, match="train/w has an invalid entry in metadata"):
        read_state(tmp_path, metadata)


def test_bytes_after_the_map_are_damage_even_if_the_metadata_counts_them(tmp_path):
    metadata = save(tmp_path)
    with open(tmp_path / "state.msgpack", "ab") as file:
        file.write(b"\xc0")
    with pytest.raises(CorruptCheckpointError, match="the map ends 1 bytes before the file"):
        read_state(tmp_path, metadata | {"state_bytes": metadata["state_bytes"] + 1})


def test_arrays_must_be_listed(tmp_path):
    metadata = save(tmp_path, {"w": np.zeros(3)}, None)
    with pytest.raises(CorruptCheckpointError, match=r"train/w is not listed as an array in metadata.json"):
        read_state(tmp_path, metadata | {"arrays": {}})


def test_a_file_that_shrinks_while_it_is_read_is_reported_as_damaged(tmp_path, monkeypatch):
    metadata = save(tmp_path)
    data = (tmp_path / "state.msgpack").read_bytes()
    with open(tmp_path / "whole", "wb") as whole:
        whole.write(data)
    status = os.stat(tmp_path / "whole")
    monkeypatch.setattr(msgpack_format.os, "fstat", lambda descriptor: status)
    for length in (0, 9, data.index(TRAIN["large"].tobytes()) + 5000, len(data) - 1):
        (tmp_path / "state.msgpack").write_bytes(data[:length])
        with pytest.raises(CorruptCheckpointError, match="ends too early"):
            read_state(tmp_path, metadata)


def test_a_read_error_of_the_disk_is_a_checkpoint_error(tmp_path):
    metadata = save(tmp_path)
    (tmp_path / "state.msgpack").unlink()
    (tmp_path / "state.msgpack").mkdir()
    with pytest.raises(CheckpointError, match=r"state.msgpack could not be read: Is a directory") as caught:
        read_state(tmp_path, metadata)
    assert not isinstance(caught.value, CorruptCheckpointError)


# --- Large arrays ---


@pytest.mark.slow
def test_arrays_of_several_gigabytes_round_trip(tmp_path):
    num_bytes = 2**32 + 2**26 + 5  # Four chunks and part of a fifth; more than 32 bits can count.
    array = np.zeros(num_bytes, np.uint8)  # Takes memory only where it is written to.
    marks = [0, 2**30 - 1, 2**30, num_bytes - 1, num_bytes // 2]
    array[marks] = [1, 2, 3, 4, 5]
    metadata = write_state(tmp_path, Plain({"w": array, "after": 7}, {}), Plain(None, {}))
    assert metadata["arrays"]["train/w"]["crc32"] == zlib.crc32(array)
    found = read_state(tmp_path, metadata)["train"]
    assert found["after"] == 7 and found["w"].shape == array.shape
    assert np.count_nonzero(found["w"]) == 5 and found["w"][marks].tolist() == [1, 2, 3, 4, 5]
    del found
    with open(tmp_path / "state.msgpack", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        by_flax = flax.serialization.msgpack_restore(data)["train"]["w"]
    assert np.count_nonzero(by_flax) == 5 and by_flax[marks].tolist() == [1, 2, 3, 4, 5]
    (tmp_path / "state.msgpack").unlink()  # pytest would keep it for a while.


def test_trees_that_differ_in_order_dtype_shape_or_kind_are_written_as_flax_writes_them(tmp_path):
    def written(tree: dict) -> bytes:
        save(tmp_path, tree, {"n": 1})
        return (tmp_path / "state.msgpack").read_bytes()

    first = {"b": np.arange(3.0), "a": {"w": np.ones((2, 2), np.float32), "none": None}}
    others = [
        {"a": first["a"], "b": first["b"]},  # Another order of the keys.
        {"b": np.arange(3), "a": first["a"]},
        {"b": np.arange(3.0)[None], "a": first["a"]},
        {"c": np.arange(3.0), "a": first["a"]},
        {"b": np.arange(3.0), "a": [first["a"]["w"], None]},
        {"b": np.float64(3.0), "a": first["a"]},
        {"b": 3.0, "a": first["a"]},
        {"b": 4.0, "a": first["a"]},
    ]
    for tree in [first, *others]:
        plain = {"train": to_plain(tree, root="train").tree, "run": {"n": 1}}
        assert written(tree) == flax.serialization.msgpack_serialize(plain, in_place=True)
    assert written({"b": np.zeros(3), "a": first["a"]}) != written(first)
