"""Arrays that are split between processes, in a bucket: a process reads and verifies what it needs, and all processes use the same checkpoint."""

import functools
import itertools
import json
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fitflax.checkpoints import CheckpointStore, collective_read
from fitflax.checkpoints.collective_read import CollectiveRead, read_collectively
from fitflax.checkpoints.formats import shard_format, split_array
from fitflax.checkpoints.formats.checkpoint_files import Saved
from fitflax.checkpoints.formats.plain_tree import to_plain
from fitflax.checkpoints.formats.split_array import Region, SplitArray
from fitflax.errors import CheckpointError, ConfigError, CorruptCheckpointError, FitflaxWarning
from fitflax.parallel import Sharded
from fitflax.storage import locate, parts

pytest.importorskip("obstore")

VALUES = {"w": np.arange(48.0, dtype=np.float32).reshape(8, 6), "b": np.arange(8, dtype=np.int16), "scale": np.float32(3)}
_names = itertools.count()


class FakeCollectiveSave:
    """A fake collective save: this process writes, and the others write nothing."""

    def write(self, path, write):
        write(path)
        return {}


@pytest.fixture
def saved(monkeypatch):
    """The path of a checkpoint with arrays that are split over 4 by 2 devices, and its metadata."""
    monkeypatch.setattr(parts, "PART_BYTES", 40)  # Most pieces are in two parts.
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    specs = {"w": PartitionSpec("x", "y"), "b": PartitionSpec("x"), "scale": PartitionSpec()}
    tree = {name: jax.device_put(value, NamedSharding(mesh, specs[name])) for name, value in VALUES.items()}
    place = locate(f"memory://split-{next(_names)}/step_00000001", owner="test", error=ConfigError)
    metadata = shard_format.write_state(place, to_plain(tree, root="train"), to_plain({"n": 1}, root="run"), collective=FakeCollectiveSave())
    return place, metadata


@pytest.fixture
def fetched(monkeypatch):
    """Records the lengths of the ranges that are fetched."""
    ranges = []
    read = split_array._read_range
    monkeypatch.setattr(split_array, "_read_range", lambda path, begin, length: ranges.append(length) or read(path, begin, length))
    return ranges


def test_one_process_reads_all(saved, fetched):
    place, metadata = saved
    state = shard_format.read_state(place, metadata)
    assert all(np.array_equal(state["train"][name], VALUES[name]) and type(state["train"][name]) is np.ndarray for name in ("w", "b"))
    assert state["train"]["scale"] == 3 and state["run"] == {"n": 1} and fetched == []


@pytest.mark.parametrize("copied", [False, True])
def test_a_process_reads_its_share_immediately_and_only_what_it_needs_of_the_rest(copied, saved, fetched, tmp_path):
    place, metadata = saved
    if copied:
        for info in place.objects():
            (tmp_path / info.key.rpartition("/")[2]).write_bytes((place / info.key.rpartition("/")[2]).read_bytes())
    read = functools.partial(shard_format.read_state, tmp_path if copied else place, metadata)
    w = read(share=(0, 2))["train"]["w"]
    assert isinstance(w, SplitArray) and np.array_equal(w, VALUES["w"]) and fetched == []  # The only file is in its share.
    w = read(share=(1, 2))["train"]["w"]
    assert fetched == [] and (w.shape, w.dtype) == ((8, 6), np.float32)
    assert np.array_equal(w.read((slice(1, 3), slice(0, 3))), VALUES["w"][1:3, :3])
    assert sum(fetched) == 2 * 2 * 3 * 4  # Two pieces of 2 by 3.
    for index in itertools.product([slice(None), slice(0, 1), slice(3, 8)], [slice(2, 5), slice(None)]):
        assert np.array_equal(w.read(index), VALUES["w"][index])


def test_placing_reads_only_what_is_on_devices_of_this_process(saved, fetched, monkeypatch):
    place, metadata = saved
    w = shard_format.read_state(place, metadata, share=(1, 2))["train"]["w"]
    strategy = Sharded({"fsdp": 2}, devices=jax.devices()[:2], fsdp=True, fsdp_min_size=1)
    half = NamedSharding(strategy.mesh, PartitionSpec("fsdp"))
    asked, read = [], SplitArray.read
    monkeypatch.setattr(SplitArray, "read", lambda self, index: asked.append(Region.of(index, self.shape).bounds) or read(self, index))
    placed = strategy.put_at([w], [jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=half)])[0]
    assert np.array_equal(placed, VALUES["w"]) and [shard.data.shape for shard in placed.addressable_shards] == [(4, 6)] * 2
    assert asked == [((0, 4), (0, 6)), ((4, 8), (0, 6))] and sum(fetched) == VALUES["w"].nbytes
    assert strategy.abstract_put([w])[0].shape == (8, 6)
    assert jax.eval_shape(lambda x: x + jnp.float32(1), w).shape == (8, 6)


def test_a_long_piece_is_fetched_in_ranges_and_damage_anywhere_is_detected(saved, fetched, monkeypatch):
    place, metadata = saved
    monkeypatch.setattr(split_array, "_RANGE_BYTES", 16)
    read = functools.partial(shard_format.read_state, place, metadata, share=(1, 2))
    assert np.array_equal(read()["train"]["w"], VALUES["w"]) and max(fetched) <= 16
    name = next(info.key.rpartition("/")[2] for info in place.objects() if ".p00000.00000" in info.key)
    good = (place / name).read_bytes()
    for data, match in (
        (b"\xff" + good[1:], "train/. does not match its checksum in shards-"),
        (good[:-1], "does not match its checksum"),
        (None, f"{name} is missing"),
    ):
        w = read()["train"]
        if data is None:
            (place / name).unlink()
        else:
            (place / name).write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match=match):
            np.asarray(w["w"]), np.asarray(w["b"])
    (place / name).write_bytes(good)
    index = metadata["shards"]["indexes"]
    (place / next(iter(index))).write_bytes(b"{}")
    with pytest.raises(CorruptCheckpointError, match=r"its checksum does not match metadata\.json"):
        read()


def test_an_array_with_a_piece_that_is_not_in_any_index_is_reported_as_damaged(saved):
    place, metadata = saved
    (name,) = metadata["shards"]["indexes"]
    index = json.loads((place / name).read_bytes())
    del index["pieces"][[piece["path"] for piece in index["pieces"]].index("train/b")]
    data = json.dumps(index).encode()
    (place / name).write_bytes(data)
    metadata["shards"]["indexes"] = {name: {"bytes": len(data), "crc32": zlib.crc32(data)}}
    for share in (None, (0, 2), (1, 2)):
        with pytest.raises(CorruptCheckpointError, match=r"is damaged: pieces of these arrays are missing: train/b\."):
            shard_format.read_state(place, metadata, share=share)


def test_a_failure_of_the_store_while_a_part_is_read_is_a_checkpoint_error(saved, monkeypatch):
    place, metadata = saved
    w = shard_format.read_state(place, metadata, share=(1, 2))["train"]["w"]

    def fail(path, begin, length):
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(split_array, "_read_range", fail)
    with pytest.raises(CheckpointError, match=re.escape("train/w could not be read from its checkpoint: reset by peer")):
        np.asarray(w)


def test_regions_overlap():
    region = Region(((2, 5), (0, 4)))
    assert region.overlap(Region(((4, 9), (1, 9)))) == Region(((4, 5), (1, 4))) and region.overlap(Region(((5, 6), (0, 4)))) is None
    assert Region.of((slice(None), slice(2, 3)), (7, 9)) == Region(((0, 7), (2, 3)))
    assert Region(()).overlap(Region(())) == Region(()) and Region(()).shape == ()


# -- what processes find together --


def test_a_store_reports_damage_to_others_and_skips_what_is_damaged_elsewhere(tmp_path):
    store = CheckpointStore(tmp_path)
    store.claim("a", overwrite=False)
    for step in (1, 2, 3):
        store.save(step=step, train={"w": 1.0}, run={}, metadata={"run_id": "a", "step": step}, owner="me", keep=[1, 2, 3])
    (store.path(3) / "metadata.json").write_text("{")
    together = CollectiveRead((0, 2), set())
    saved, skipped = store.newest_good(together=together)
    assert saved.metadata["step"] == 2 and together.damaged == {3} and len(skipped) == 1
    together.damaged.add(2)
    saved, skipped = store.newest_good(together=together)
    assert saved.metadata["step"] == 1 and skipped == []


def two_processes(monkeypatch, others):
    """Makes this process the first of two, and returns what it sends; `others` yields what the second one sends."""
    sent = []

    def exchange(value, topic):
        sent.append(value)
        return [value, next(others)]

    monkeypatch.setattr(collective_read, "exchange", exchange)
    monkeypatch.setattr(collective_read, "after_first", lambda make: make())
    return sent


def finds(*steps, damaged=()):
    """Returns a function that finds the newest of some steps."""

    def find(together):
        left = sorted(set(steps) - together.damaged, reverse=True)
        for step in left:
            if step not in damaged:
                return Saved(path=None, metadata={"step": step}, train={}, run={})
            together.damaged.add(step)
        return None

    return find


def says(step, damaged=(), fault=None):
    return {"step": step, "digest": None, "damaged": list(damaged), "fault": fault}


def test_what_another_process_finds_damaged_is_skipped_by_all(monkeypatch):
    sent = two_processes(monkeypatch, iter([says(5, [7]), says(5, [7])]))
    with pytest.warns(FitflaxWarning, match=re.escape("Another process found that the checkpoints of these steps are damaged, so they are skipped: [7].")):
        assert read_collectively(finds(3, 5, 7), num_processes=2).metadata["step"] == 5
    assert sent == [says(7), says(5, [7])]
    sent = two_processes(monkeypatch, iter([says(7), says(5, [7])]))
    assert read_collectively(finds(3, 5, 7, damaged=[7]), num_processes=2).metadata["step"] == 5
    sent = two_processes(monkeypatch, iter([says(7), says(None, [7])]))
    assert read_collectively(finds(7, damaged=[7]), num_processes=2) is None and sent[0] == says(None, [7])


def test_different_directories_or_a_failure_in_one_process_are_an_error_in_all(monkeypatch):
    two_processes(monkeypatch, iter([says(None)]))
    with pytest.raises(CheckpointError, match=r"Use one directory that all processes share\. Steps by process: \{0: 7, 1: None\}\."):
        read_collectively(finds(7), num_processes=2)
    two_processes(monkeypatch, iter([says(None, fault="step_00000007 is damaged")]))
    with pytest.raises(CheckpointError, match="another process could not read the checkpoint: process 1: step_00000007 is damaged"):
        read_collectively(finds(7), num_processes=2)

    def fail(together):
        raise CorruptCheckpointError("here")

    two_processes(monkeypatch, iter([says(7)]))
    with pytest.raises(CorruptCheckpointError, match="here"):
        read_collectively(fail, num_processes=2)
    assert read_collectively(lambda together: together, num_processes=1) is None
