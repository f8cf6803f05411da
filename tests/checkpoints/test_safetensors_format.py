"""The safetensors format: compared with the real package in both directions, and files that do not match their headers."""

import contextlib
import json
import os
import re
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from fitflax.checkpoints import safetensors_format
from fitflax.checkpoints.safetensors_format import contents_of, find_weights, read_arrays, read_weights, write_weights
from fitflax.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from fitflax.storage import ObjectPath, locate

RNG = np.random.default_rng(0)
DTYPES = [np.dtype(each) for each in safetensors_format._DTYPES.values()]


def array_of(dtype, shape=(3, 5)):
    count = int(np.prod(shape)) * dtype.itemsize
    raw = RNG.integers(0, 2 if dtype == np.bool_ else 256, count).astype(np.uint8)
    return raw.view(dtype).reshape(shape)


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def write(path, arrays, metadata=None):
    path.write_bytes(b"".join(contents_of(arrays, metadata or {})))
    return path


def file_of(header, data=b"", *, path):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (1,)], ids=str)
def test_arrays_round_trip_with_their_dtypes_and_bits(dtype, shape, tmp_path):
    array = array_of(dtype, shape)
    found, metadata = read_arrays(write(tmp_path / "a", {"a.b": array}, {"format": "flax"}))
    assert same(found["a.b"], array) and metadata == {"format": "flax"}


def test_the_real_package_reads_what_is_written(tmp_path):
    arrays = {f"x.{dtype.name}": array_of(dtype) for dtype in DTYPES} | {"ä": np.arange(3.0), "empty": np.zeros((0, 2), np.float32)}
    path = write(tmp_path / "a", arrays, {"format": "pt", "note": "ü"})
    entries = dict(safetensors.deserialize(path.read_bytes()))  # The numpy functions on top of it do not know float8.
    assert entries.keys() == arrays.keys()
    for name, array in arrays.items():
        assert entries[name]["data"] == array.tobytes() and tuple(entries[name]["shape"]) == array.shape
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt", "note": "ü"}
        assert same(file.get_tensor("x.bfloat16"), arrays["x.bfloat16"])


def test_files_of_the_real_package_are_read(tmp_path):
    arrays = {f"x.{dtype.name}": array_of(dtype) for dtype in DTYPES} | {"empty": np.zeros((0, 2), np.float32), "scalar": np.array(3, np.float32)}
    safetensors.numpy.save_file(arrays, tmp_path / "a", metadata={"format": "pt"})
    found, metadata = read_arrays(tmp_path / "a")
    assert metadata == {"format": "pt"} and found.keys() == arrays.keys() and all(same(found[name], arrays[name]) for name in arrays)


def test_arrays_of_another_layout_and_byte_order_are_written_by_value(tmp_path):
    arrays = {"turned": np.arange(6.0).reshape(2, 3).T, "big": np.arange(3).astype(">i4"), "part": np.arange(10)[::2]}
    found, _ = read_arrays(write(tmp_path / "a", arrays))
    assert all(np.array_equal(found[name], array) for name, array in arrays.items()) and found["big"].dtype == np.int32


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "match"),
    [
        (b"", b"", "does not begin with"),
        (b"[]", b"", "does not begin with"),
        (b"{", b"", "cannot be read"),
        (b'{"a": NaN}', b"", "NaN is not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, b"", "cannot be read"),
        (b'{"a": ' + b"9" * 10_000 + b"}", b"", "cannot be read"),
        (b'{"\xff": 1}', b"", "cannot be read"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"\0" * 8, "'a' appears twice"),
        (b'{"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}', b"\0" * 8, "'shape' appears twice"),
        ({"__metadata__": {"a": 1}}, b"", "dict of strings"),
        ({"__metadata__": []}, b"", "dict of strings"),
        ({"a": 1}, b"", "must have data_offsets, dtype, shape"),
        ({"a": {**GOOD, "more": 1}}, b"\0" * 8, "nothing else"),
        ({"a": {**GOOD, "dtype": 7}}, b"\0" * 8, "7, not a string"),
        ({"a": {**GOOD, "shape": [-2]}}, b"\0" * 8, "not a list of at most 32 sizes"),
        ({"a": {**GOOD, "shape": [2.0]}}, b"\0" * 8, "not a list of at most 32 sizes"),
        ({"a": {**GOOD, "shape": [True, 2]}}, b"\0" * 8, "not a list of at most 32 sizes"),
        ({"a": {**GOOD, "shape": "2"}}, b"\0" * 8, "not a list of at most 32 sizes"),
        ({"a": {**GOOD, "shape": [1] * 33}}, b"\0" * 8, "at most 32"),
        ({"a": {**GOOD, "shape": [2**40, 2**40]}}, b"\0" * 8, "which is too large"),
        ({"a": {**GOOD, "shape": [0, 2**62], "data_offsets": [0, 0]}}, b"", "which is too large"),
        ({"a": {**GOOD, "shape": [10**400]}}, b"\0" * 8, "not a list of at most 32 sizes"),
        ({"a": {**GOOD, "shape": [3]}}, b"\0" * 8, "needs 12 bytes"),
        ({"a": {**GOOD, "data_offsets": [8, 0]}}, b"\0" * 8, "not a begin and an end"),
        ({"a": {**GOOD, "data_offsets": [-8, 0]}}, b"\0" * 8, "not a begin and an end"),
        ({"a": {**GOOD, "data_offsets": [0, 8, 9]}}, b"\0" * 8, "not a begin and an end"),
        ({"a": GOOD}, b"\0" * 7, "truncated"),
        ({"a": {**GOOD, "data_offsets": [2**62, 2**62 + 8]}}, b"\0" * 8, "truncated"),
        ({"a": GOOD, "b": GOOD}, b"\0" * 8, "'b' begins at byte 0, expected 8, because arrays must be contiguous"),
        ({"a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}}, b"\0" * 12, "'b' begins at byte 4, expected 8, because arrays must be contiguous"),
        ({"a": {**GOOD, "data_offsets": [4, 12]}}, b"\0" * 12, "'a' begins at byte 4, expected 0, because arrays must be contiguous"),
        ({"a": GOOD}, b"\0" * 9, "1 bytes at its end"),
        ({"a": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}}, b"\1\2", "neither 0 nor 1"),
    ],
)
def test_a_header_that_does_not_describe_the_file_is_an_error(header, data, match, tmp_path):
    with pytest.raises(CorruptCheckpointError, match=match):
        read_arrays(file_of(header, data, path=tmp_path / "a"))


def test_files_without_a_complete_header_are_errors(tmp_path):
    path = tmp_path / "a"
    for data, match in (
        (b"", "has 0 bytes"),
        (b"1234567", "has 7 bytes"),
        (b"\xff" * 16, "more than the maximum of"),
        (struct.pack("<Q", 99) + b"{}", "only 2 follow"),
    ):
        path.write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match=match):
            read_arrays(path)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "f32", "object", "O", ""])
def test_an_unknown_dtype_is_named(dtype, tmp_path):
    with pytest.raises(CheckpointError, match=f"'a' has the dtype '{dtype}'. Supported dtypes:"):
        read_arrays(file_of({"a": {**GOOD, "dtype": dtype}}, b"\0" * 8, path=tmp_path / "a"))


def test_a_file_truncated_or_changed_anywhere_is_an_error_or_gives_as_many_bytes(tmp_path):
    whole = write(tmp_path / "a", {"a": np.arange(4, dtype=np.float32), "b": np.arange(3)}).read_bytes()
    for end in range(len(whole)):
        (tmp_path / "b").write_bytes(whole[:end])
        with pytest.raises(CheckpointError):
            read_arrays(tmp_path / "b")
    for place in range(len(whole)):
        for flip in (1, 0x80):
            changed = bytearray(whole)
            changed[place] ^= flip
            (tmp_path / "b").write_bytes(changed)
            try:
                found, _ = read_arrays(tmp_path / "b")
            except CheckpointError:
                continue
            assert sum(array.nbytes for array in found.values()) == 40  # Nothing from outside the file.


def test_arrays_that_are_not_used_are_not_read(tmp_path):
    array = read_arrays(write(tmp_path / "a", {"a": np.zeros(10)}))[0]["a"]
    assert not array.flags.owndata and not array.flags.writeable


# -- several files --


def arrays_of(count=5, size=100):
    return {f"layer_{index}.kernel": RNG.normal(size=size).astype(np.float32) for index in range(count)}


@pytest.fixture(params=["disk", "bucket"])
def place(request, tmp_path):
    url = f"memory://weights-{tmp_path.name}/run" if request.param == "bucket" else tmp_path / "run"
    return locate(url, owner="test", error=CheckpointError)


def names_in(place):
    return sorted(entry.name for entry in place.iterdir())


def test_weights_larger_than_the_limit_are_written_as_several_files_with_an_index(place):
    arrays = arrays_of()
    index = write_weights(place / "model.safetensors", arrays, metadata={"format": "pt"}, max_shard_bytes=900)
    document = json.loads(index.read_bytes())
    files = sorted(set(document["weight_map"].values()))
    assert names_in(place) == [*files, "model.safetensors.index.json"] and index == place / "model.safetensors.index.json"
    assert all(re.fullmatch(rf"model-[0-9a-f]{{8}}-0000{number}-of-00003.safetensors", file) for number, file in enumerate(files, 1))
    assert document["metadata"] == {"total_size": 2000} and document["weight_map"]["layer_4.kernel"] == files[2]
    for path in (index, place / "model.safetensors", place):
        found, metadata = read_weights(find_weights(path))
        assert metadata == {"format": "pt"} and all(same(found[name], array) for name, array in arrays.items())


def test_one_file_replaces_several_and_vice_versa(place):
    path, arrays = place / "model.safetensors", arrays_of()
    for limit in (10_000, 900, 500, 10_000, 500, 900):
        write_weights(path, arrays, metadata={}, max_shard_bytes=limit)
        count = {10_000: 1, 900: 3, 500: 5}[limit]
        assert len(names_in(place)) == (1 if count == 1 else count + 1)
        assert len(read_weights(find_weights(path))[0]) == 5


def test_an_array_larger_than_the_limit_gets_a_separate_file(place):
    arrays = {"a": np.zeros(10), "b": np.zeros(1000), "c": np.zeros(10)}
    write_weights(place / "m.safetensors", arrays, metadata={}, max_shard_bytes=100)
    assert len(names_in(place)) == 4 and read_weights(find_weights(place))[0].keys() == arrays.keys()


def test_no_other_files_are_removed(tmp_path):
    (tmp_path / "other-00001-of-00002.safetensors").write_bytes(b"mine")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "other-00001-of-00002.safetensors", "b": "model.safetensors"}}')
    write_weights(tmp_path / "model.safetensors", arrays_of(1), metadata={}, max_shard_bytes=10_000)
    assert names_in(tmp_path) == ["model.safetensors", "other-00001-of-00002.safetensors"]


@pytest.mark.parametrize("limit", [10_000, 900])
def test_a_failed_write_leaves_the_existing_file(limit, tmp_path, monkeypatch):
    path, arrays = tmp_path / "model.safetensors", arrays_of()
    write_weights(path, arrays, metadata={}, max_shard_bytes=10_000)
    before = path.read_bytes()
    calls = iter([None] * (0 if limit == 10_000 else 2))

    def fail(descriptor):
        if next(calls, "full") == "full":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_format.os, "fsync", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        write_weights(path, arrays_of(), metadata={}, max_shard_bytes=limit)
    assert path.read_bytes() == before and names_in(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("replace", [1, 2, 4])
def test_a_save_in_shards_that_fails_at_any_point_leaves_the_old_shards(replace, tmp_path, monkeypatch):
    path, arrays = tmp_path / "model.safetensors", arrays_of()
    write_weights(path, arrays, metadata={}, max_shard_bytes=900)
    before, real, calls = names_in(tmp_path), os.replace, []

    def fail(source, target):
        calls.append(target)
        if len(calls) == replace:
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(safetensors_format.os, "replace", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_weights(path, arrays_of(), metadata={}, max_shard_bytes=900)
    assert names_in(tmp_path) == before
    found, _ = read_weights(find_weights(path))
    assert all(same(found[name], array) for name, array in arrays.items())


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("replace", [1, 2, 4])
def test_ctrl_c_in_a_save_in_shards_leaves_the_old_or_the_new_weights(replace, is_after, tmp_path, monkeypatch):
    """The interrupt comes before or after a rename. That of the index is the last one."""
    path, old, new = tmp_path / "model.safetensors", arrays_of(), arrays_of()
    write_weights(path, old, metadata={}, max_shard_bytes=900)
    real, calls = os.replace, []

    def interrupted(source, target):
        calls.append(target)
        if len(calls) == replace and not is_after:
            raise KeyboardInterrupt
        real(source, target)
        if len(calls) == replace:
            raise KeyboardInterrupt

    monkeypatch.setattr(safetensors_format.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_weights(path, new, metadata={}, max_shard_bytes=900)
    found, _ = read_weights(find_weights(path))
    assert all(same(found[name], array) for name, array in (new if replace == 4 and is_after else old).items())


@pytest.mark.parametrize("fails_at", ["-00002-of", "index.json"])
def test_a_failed_upload_leaves_the_old_shards(fails_at, tmp_path, monkeypatch):
    path, arrays = locate(f"memory://weights-{tmp_path.name}/model.safetensors", owner="test", error=CheckpointError), arrays_of()
    write_weights(path, arrays, metadata={}, max_shard_bytes=900)
    real = ObjectPath.write_bytes

    def fail(self, data):
        if fails_at in self.name:
            raise CheckpointError("The store fails.")
        real(self, data)

    monkeypatch.setattr(ObjectPath, "write_bytes", fail)
    with pytest.raises(CheckpointError, match="The store fails"):
        write_weights(path, arrays_of(), metadata={}, max_shard_bytes=900)
    found, _ = read_weights(find_weights(path))
    assert all(same(found[name], array) for name, array in arrays.items())
    monkeypatch.undo()
    assert len(names_in(path.parent)) == (4 if fails_at != "index.json" else 7)


def test_a_reader_with_the_old_index_gets_an_error_and_never_a_mixture(place, monkeypatch):
    path = place / "model.safetensors"
    write_weights(path, {name: np.zeros(100) for name in "abc"}, metadata={}, max_shard_bytes=900)
    real = safetensors_format._read_index

    def read_and_lose(path):
        places = real(path)
        monkeypatch.setattr(safetensors_format, "_read_index", real)
        write_weights(path.parent / "model.safetensors", {name: np.ones(100) for name in "abc"}, metadata={}, max_shard_bytes=900)
        return places

    monkeypatch.setattr(safetensors_format, "_read_index", read_and_lose)
    with pytest.raises(
        CorruptCheckpointError, match=r"is incomplete\. If another process is replacing the weights, read them again\. Missing: .*\.safetensors"
    ):
        read_weights(path.parent / "model.safetensors.index.json")
    assert all(array.all() for array in read_weights(find_weights(path))[0].values())


def test_shards_that_were_written_without_an_identifier_are_replaced_too(tmp_path):
    for number, name in enumerate("ab", 1):
        write(tmp_path / f"model-0000{number}-of-00002.safetensors", {name: np.zeros(2)})
    places = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate("ab", 1)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert read_weights(find_weights(tmp_path))[0].keys() == {"a", "b"}
    write_weights(tmp_path / "model.safetensors", {"c": np.ones(2)}, metadata={}, max_shard_bytes=10_000)
    assert names_in(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_a_name_that_the_format_does_not_allow_is_refused_before_anything_is_written(name, tmp_path):
    with pytest.raises(CheckpointError, match=r"has a name that .*Rename it with mapping="):
        write_weights(tmp_path / "model.safetensors", {name: np.zeros(2)}, metadata={}, max_shard_bytes=10)
    assert names_in(tmp_path) == []


def test_disk_errors_are_raised_as_checkpoint_errors(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="could not be read: File name too long"):
        find_weights(tmp_path / f"{'a' * 300}.safetensors")

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(tmp_path), "iterdir", refuse)
    with pytest.raises(CheckpointError, match="could not be read: Permission denied"):
        find_weights(tmp_path)


def test_long_text_from_a_file_is_truncated_in_errors(tmp_path):
    for entry in ({**GOOD, "dtype": "x" * 10**6}, 7, {**GOOD, "shape": [2**40] * 32}):
        with pytest.raises(CheckpointError) as caught:
            read_arrays(file_of({"n" * 10**6: entry}, b"\0" * 8, path=tmp_path / "a"))
        assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "not an index"),
        ("[]", "no weight_map"),
        ('{"weight_map": {"a": 1}}', "no weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not .safetensors files next to it"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not .safetensors files next to it"),
        ('{"weight_map": {"a": "model.bin"}}', "not .safetensors files next to it"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "Missing: gone.safetensors"),
        ('{"weight_map": {"layer_0.kernel": "one.safetensors", "b": "one.safetensors"}}', "the index has 'b' in one.safetensors, which does not contain it"),
        ('{"weight_map": {"layer_0.kernel": "one.safetensors", "layer_0.kernel": "two.safetensors"}}', "'layer_0.kernel' appears twice"),
        ('{"weight_map": {}}', "its weight_map is empty"),
        ('{"weight_map": {"a": "' + "x" * 10_000 + '"}}', "not .safetensors files next to it.{0,250}$"),
        ('{"weight_map": {"layer_1.kernel": "one.safetensors"}}', "one.safetensors contains 'layer_0.kernel', which the index does not list"),
    ],
)
def test_an_index_that_does_not_match_its_files_is_an_error(text, match, tmp_path):
    write(tmp_path / "one.safetensors", arrays_of(1))
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptCheckpointError, match=match):
        read_weights(find_weights(tmp_path / "model.safetensors"))


def test_weights_are_found_in_a_directory(tmp_path):
    assert find_weights(tmp_path) is None
    write(tmp_path / "b.safetensors", arrays_of(1))
    assert find_weights(tmp_path).name == "b.safetensors"
    write(tmp_path / "a.safetensors", arrays_of(1))
    with pytest.raises(CheckpointError, match=r"several files of weights: a.safetensors, b.safetensors"):
        find_weights(tmp_path)
    write(tmp_path / "model.safetensors", arrays_of(1))
    assert find_weights(tmp_path).name == "model.safetensors"
    with pytest.raises(CheckpointNotFoundError, match="no such file, and no index of shards"):
        find_weights(tmp_path / "c.safetensors")


def test_a_dtype_that_the_format_lacks_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"safetensors does not support some dtypes\..*: 'a' is complex128"):
        write_weights(tmp_path / "m.safetensors", {"a": np.zeros(2, np.complex128)}, metadata={}, max_shard_bytes=10)
    assert names_in(tmp_path) == []
    for dtype, fits in ((ml_dtypes.float8_e5m2, True), (ml_dtypes.int4, False)):
        with contextlib.nullcontext() if fits else pytest.raises(CheckpointError, match="'a' is int4"):
            write_weights(tmp_path / "m.safetensors", {"a": np.zeros(2, dtype)}, metadata={}, max_shard_bytes=10)
