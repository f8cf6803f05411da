"""docs/checkpoint-format.md matches what is written: its example equals the file, and its reader reads and verifies all kinds of checkpoints."""

import json
import pathlib
import re

import flax.serialization
import jax
import numpy as np
import pytest

from fitflax.checkpoints import msgpack_format
from fitflax.checkpoints.checkpoint_files import read_metadata, write_checkpoint
from tests.checkpoints.samples import METADATA, RUN, assert_same, read, train_state

TEXT = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")
BLOCKS = {language: re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE) for language in ("python", "text", "json")}


@pytest.fixture(scope="module")
def read_checkpoint():
    (block,) = (block for block in BLOCKS["python"] if "def read_checkpoint" in block)
    names: dict = {}
    exec(block, names)
    return names["read_checkpoint"]


@pytest.fixture
def example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = (block for block in BLOCKS["python"] if "write_checkpoint(" in block)
    exec(block, {})
    return tmp_path / "example"


def test_the_hex_dump_equals_the_file(example):
    (dump,) = BLOCKS["text"]
    columns = [re.match(r" *\[?((?:[0-9a-f]{2}\b ?)+)", line)[1] for line in dump.splitlines()]
    assert bytes.fromhex("".join(columns)) == (example / "state.msgpack").read_bytes()
    assert f"these {len(bytes.fromhex(''.join(columns)))} bytes" in TEXT


def test_the_metadata_shown_equals_the_file_except_for_versions_and_can_be_read(example):
    (shown,) = BLOCKS["json"]
    written = (example / "metadata.json").read_text()

    def rest(text):
        return re.sub(r'"crc32": \d+\n}', "", re.sub(r'"versions": \{[^}]*\}', "", text))

    assert rest(shown) == rest(written)
    (example / "metadata.json").write_text(shown)
    assert read_metadata(example)["step"] == 5


def test_every_key_of_the_metadata_is_described(example):
    described = set(re.findall(r"`(\w+)`", TEXT.partition("## `metadata.json`")[2].partition("### Checksums")[0]))
    assert set(json.loads((example / "metadata.json").read_text())) <= described


@pytest.mark.parametrize("chunk_bytes", [2**30, 16])
def test_the_reader_reads_what_fitflax_reads(tmp_path, monkeypatch, read_checkpoint, chunk_bytes):
    monkeypatch.setattr(msgpack_format, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", chunk_bytes)
    run = RUN | {"a/b~": [np.ones(3)], "edges": [-1, -33, 200, 70000, -(2**40), 2.5, "x" * 300, b"b" * 70000, [0] * 20, {str(key): key for key in range(20)}]}
    write_checkpoint(tmp_path, train=train_state(), run=run, metadata=METADATA)
    metadata, state = read_checkpoint(tmp_path)
    expected, expected_metadata = read(tmp_path)
    scalars = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, np.generic) else leaf, expected)
    assert_same(state, scalars)
    assert metadata["history"] == expected_metadata["history"]


def test_the_reader_detects_a_flipped_bit_in_any_byte(example, read_checkpoint):
    for name in ("state.msgpack", "metadata.json"):
        data = (example / name).read_bytes()
        for position, bit in ((position, bit) for position in range(len(data)) for bit in (0, 5)):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            if name == "metadata.json" and json_of(changed) == json_of(data):
                continue  # The reader ignores spaces.
            (example / name).write_bytes(changed)
            with pytest.raises((AssertionError, AttributeError, LookupError, TypeError, ValueError)):
                read_checkpoint(example)
        (example / name).write_bytes(data)


def json_of(data):
    try:
        return json.loads(bytes(data).decode("ascii"))
    except ValueError:
        return None
