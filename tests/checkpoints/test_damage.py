"""For any damage to the files of a checkpoint, reading raises an error that names the file. It never raises another exception or returns a wrong state."""

import json
import math
import re
from collections.abc import Callable

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from fitflax.checkpoints.checkpoint_files import read_metadata, read_state, write_checkpoint
from fitflax.checkpoints.json_documents import replace_document
from fitflax.errors import CheckpointError, CorruptCheckpointError

FILES = ("state.msgpack", "metadata.json")
TRAIN = {"kernel": np.arange(300, dtype=np.uint8), "shape": np.zeros((2, 300, 0)), "step": np.int32(1), "none": None, "key": jax.random.key(1)}
RUN = {"list": [1, -1, 300, -300, 70000, 2**40, 1.5, True, None, "text", "x" * 300, b"b", {}], "scalar": np.float32(1)}


class Victim:
    """A small checkpoint with every kind of leaf. Tests damage its files and then repair them."""

    def __init__(self, path, **contents):
        self.path = path
        write_checkpoint(path, **contents)
        self.files = {name: (path / name).read_bytes() for name in FILES}
        self.metadata = read_metadata(path)

    def check(self, name: str, data: bytes) -> None:
        """Fails unless reading raises an error that names the file `name` when it contains `data`."""
        if data == self.files[name]:
            return
        (self.path / name).write_bytes(data)
        try:
            with pytest.raises(CheckpointError, match=re.escape(str(self.path / name))):
                read_state(self.path, read_metadata(self.path) if name == "metadata.json" else self.metadata)
        finally:
            (self.path / name).write_bytes(self.files[name])


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    return Victim(tmp_path_factory.mktemp("victim"), train=TRAIN, run=RUN, metadata={"run_id": "a", "metrics": {"train": {"loss": math.nan}}})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Victim(tmp_path_factory.mktemp("tiny"), train={"w": np.arange(3, dtype=np.int16), "s": np.float32(1)}, run=[None, 1, "x"], metadata={"step": 1})


def test_the_checkpoints_are_intact_before_they_are_damaged(victim, tiny):
    for each in (victim, tiny):
        assert set(read_state(each.path, read_metadata(each.path))) == {"train", "run"}


# --- Random damage ---


def some(name: str) -> st.SearchStrategy:
    return st.sampled_from(FILES) if name == "name" else st.floats(0, 1, exclude_max=True)


@hypothesis.settings(max_examples=150, derandomize=True, deadline=None)
@hypothesis.given(name=some("name"), where=some("where"), mask=st.integers(1, 255))
def test_any_changed_byte_is_detected(victim, name, where, mask):
    data = bytearray(victim.files[name])
    data[int(where * len(data))] ^= mask
    victim.check(name, bytes(data))


@hypothesis.settings(max_examples=50, derandomize=True, deadline=None)
@hypothesis.given(name=some("name"), where=some("where"))
def test_any_truncation_is_detected(victim, name, where):
    victim.check(name, victim.files[name][: int(where * len(victim.files[name]))])


@hypothesis.settings(max_examples=50, derandomize=True, deadline=None)
@hypothesis.given(name=some("name"), tail=st.binary(min_size=1, max_size=20) | st.sampled_from([b"\0", b"\n", b" ", b"\xc0", b"}"]))
def test_anything_appended_is_detected(victim, name, tail):
    victim.check(name, victim.files[name] + tail)


@hypothesis.settings(max_examples=100, derandomize=True, deadline=None)
@hypothesis.given(name=some("name"), garbage=st.binary(min_size=1, max_size=40), where=some("where"))
def test_garbage_in_place_of_some_bytes_is_detected(victim, name, garbage, where):
    data = victim.files[name]
    begin = int(where * (len(data) - len(garbage)))
    victim.check(name, data[:begin] + garbage + data[begin + len(garbage) :])


@hypothesis.settings(max_examples=60, derandomize=True, deadline=None)
@hypothesis.given(name=some("name"), where=some("where"), other=some("where"), count=st.integers(1, 200))
def test_a_misplaced_or_zeroed_part_of_the_file_is_detected(victim, name, where, other, count):
    """As if a disk wrote a sector twice, or zeros instead."""
    data = victim.files[name]
    begin, source = int(where * (len(data) - count)), int(other * (len(data) - count))
    for piece in (data[source : source + count], bytes(count)):
        victim.check(name, data[:begin] + piece + data[begin + count :])


@hypothesis.settings(max_examples=80, derandomize=True, deadline=None)
@hypothesis.given(name=some("name"), data=st.binary(max_size=100))
def test_arbitrary_bytes_are_not_a_checkpoint(victim, name, data):
    victim.check(name, data)


NAMES = st.sampled_from(["format_version", "crc32", "arrays", "train/kernel", "x", ""])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["NaN", "~NaN", 10**400, -(10**19)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@hypothesis.settings(max_examples=80, derandomize=True, deadline=None)
@hypothesis.given(value=JSON, indent=st.sampled_from([None, 2]))
@pytest.mark.slow
def test_arbitrary_json_is_not_valid_metadata(victim, value, indent):
    victim.check("metadata.json", json.dumps(value, indent=indent).encode())


# --- Deliberate damage: the checksums of the files are right, but their contents are not ---


@hypothesis.settings(max_examples=150, derandomize=True, deadline=None)
@hypothesis.given(head=st.sampled_from([b"", b"\x82\xa5train", b"\x81\xa5train\x83\xa6kernel"]), data=st.binary(max_size=60))
def test_arbitrary_bytes_of_the_expected_length_are_not_a_state(victim, head, data):
    """The reader alone: the size of the file does not reveal the damage."""
    (victim.path / "state.msgpack").write_bytes(head + data)
    try:
        with pytest.raises(CorruptCheckpointError, match=re.escape(str(victim.path / "state.msgpack"))):
            read_state(victim.path, victim.metadata | {"state_bytes": len(head + data)})
    finally:
        (victim.path / "state.msgpack").write_bytes(victim.files["state.msgpack"])


@pytest.mark.slow
@hypothesis.settings(max_examples=80, derandomize=True, deadline=None)
@hypothesis.given(entry=JSON, key=st.sampled_from(["shape", "dtype", "crc32"]), whole=st.booleans())
def test_entries_that_do_not_describe_an_array_are_detected_despite_a_valid_checksum(victim, entry, key, whole):
    values = {name: value for name, value in victim.metadata.items() if name not in {"format_version", "crc32"}}
    arrays = victim.metadata["arrays"] | {"train/kernel": entry if whole else victim.metadata["arrays"]["train/kernel"] | {key: entry}}
    replace_document(victim.path / "metadata.json", values | {"arrays": arrays})
    try:
        with pytest.raises(CorruptCheckpointError, match=r"state\.msgpack is damaged: train/kernel "):
            read_state(victim.path, read_metadata(victim.path))
    finally:
        (victim.path / "metadata.json").write_bytes(victim.files["metadata.json"])


HEADS = [b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01"]


@pytest.mark.parametrize("head", HEADS, ids=bytes.hex)
def test_absurd_lengths_are_reported_as_damage_and_not_as_memory_errors(victim, head):
    data = victim.files["state.msgpack"]
    victim.check("state.msgpack", head + data[len(head) :])
    victim.check("state.msgpack", b"\x81\xa5train" + head + data[7 + len(head) :])


@pytest.mark.parametrize(("name", "data"), [("state.msgpack", b"\x91"), ("state.msgpack", b"\x81\xa0"), ("metadata.json", b"["), ("metadata.json", b'{"":')])
def test_extremely_deep_nesting_is_reported_as_damage_and_not_as_a_recursion_error(victim, name, data):
    victim.check(name, (data * 100_000)[: len(victim.files[name])])
    victim.check(name, data * 100_000)


def test_numbers_with_a_million_digits_are_reported_as_damage(victim):
    victim.check("metadata.json", b'{"format_version": 1, "step": ' + b"9" * 1_000_000 + b"}\n")


# --- Every position ---


def flips(bits: list[int]) -> Callable[[bytes], list[bytes]]:
    def flipped(data: bytes) -> list[bytes]:
        return [data[:index] + bytes([data[index] ^ 1 << bit]) + data[index + 1 :] for index in range(len(data)) for bit in bits]

    return flipped


def cuts(data: bytes) -> list[bytes]:
    return [data[:length] for length in range(len(data))]


def undetected(victim: Victim, name: str, damage: Callable[[bytes], list[bytes]]) -> list[int]:
    missed = []
    for index, data in enumerate(damage(victim.files[name])):
        try:
            victim.check(name, data)
        except pytest.fail.Exception:
            missed.append(index)
    return missed


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_any_byte_and_truncation_at_any_byte_are_detected(tiny, name):
    # Bit 5 turns capitals into lowercase letters and zero bytes into spaces.
    assert undetected(tiny, name, flips([5])) == []
    assert undetected(tiny, name, cuts) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_detected(victim, name):
    assert undetected(victim, name, flips(list(range(8)))) == []
    assert undetected(victim, name, cuts) == []
