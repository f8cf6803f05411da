"""Arrays that are split between processes: the protocol of a save by all of them together, and pieces in a bucket.

Each test of the protocol runs one process; the others are only messages on a fake board.
"""

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

from fitflax.checkpoints import shard_format
from fitflax.checkpoints.plain_tree import to_plain
from fitflax.checkpoints.shard_format import CollectiveSave, SplitArray
from fitflax.errors import CheckpointError, ConfigError, CorruptCheckpointError
from fitflax.parallel import Sharded
from fitflax.storage import locate, parts

# -- a collective save --


class FakeBoard:
    """A board for one process: a message that is not there never arrives."""

    def __init__(self, name=""):
        assert name in ("", "save")
        self.messages = {}

    def __call__(self, name):
        return self

    def post(self, key, message):
        self.messages[key] = message

    def settle(self, key, message):
        return self.messages.setdefault(key, message)

    def read_within(self, key, seconds):
        if key not in self.messages:
            raise TimeoutError(key)
        return self.messages[key]

    def remove(self, key):
        self.messages = {name: message for name, message in self.messages.items() if not name.startswith(f"{key}/")}

    def say(self, **messages):
        self.messages.update({key.replace("_", "/"): json.dumps(message).encode() for key, message in messages.items()})

    def __getitem__(self, key):
        return json.loads(self.messages[key])


@pytest.fixture
def board(monkeypatch):
    made = FakeBoard()
    for name, value in {"Board": made, "_save_numbers": itertools.count(), "_active": set(), "_removed": 0, "APPEARING_SECONDS": 0.0}.items():
        monkeypatch.setattr(shard_format, name, value)
    monkeypatch.setattr(shard_format.jax, "process_count", lambda: 2)
    return made


def be_process(index, monkeypatch):
    monkeypatch.setattr(shard_format.jax, "process_index", lambda: index)


def here(what="step 8", earlier=None, oldest=0):
    return {"what": what, "earlier": earlier, "oldest": oldest}


@pytest.fixture
def leader(board, monkeypatch):
    be_process(0, monkeypatch)
    board.say(**{"0_here_1": here()})
    return CollectiveSave.meet("step 8")


@pytest.fixture
def follower(board, monkeypatch):
    be_process(1, monkeypatch)
    board.say(**{"0_outcome": {"earlier": None}})
    return CollectiveSave.meet("step 8")


def test_all_processes_learn_what_failed_before_in_one_of_them(board, monkeypatch):
    be_process(0, monkeypatch)
    board.say(**{"0_here_1": here(earlier="disk full")})
    assert CollectiveSave.meet("step 8").earlier == "process 1: disk full" == board["0/outcome"]["earlier"]


def test_processes_that_try_to_save_different_steps_save_neither(board, monkeypatch):
    be_process(0, monkeypatch)
    board.say(**{"0_here_1": here("step 9")})
    with pytest.raises(CheckpointError, match="process 0 is saving step 8, but process 1 is saving step 9"):
        CollectiveSave.meet("step 8")
    assert "fault" in board["0/outcome"]


def test_a_leader_that_timed_out_tells_processes_that_arrive_later(board, monkeypatch):
    be_process(0, monkeypatch)
    with pytest.raises(CheckpointError, match="process 0 waited 60 s to save step 8, but process 1 did not arrive"):
        CollectiveSave.meet("step 8", is_rescue=True)
    be_process(1, monkeypatch)
    monkeypatch.setattr(shard_format, "_save_numbers", itertools.count())
    with pytest.raises(CheckpointError, match="process 0 waited 60 s to save step 8"):
        CollectiveSave.meet("step 10")


def test_a_follower_that_timed_out_decides_the_outcome_unless_the_leader_did(board, monkeypatch):
    be_process(1, monkeypatch)
    with pytest.raises(CheckpointError, match="process 1 waited 600 s to save step 8, but process 0 did not arrive"):
        CollectiveSave.meet("step 8")
    board.say(**{"1_outcome": {"earlier": None}})
    monkeypatch.setattr(board, "read_within", lambda key, seconds: (_ for _ in ()).throw(TimeoutError()))
    assert CollectiveSave.meet("step 8").earlier is None


@pytest.mark.parametrize(("index", "told"), [(0, "0/verdict"), (1, "0/part/1")])
def test_a_process_that_leaves_a_meeting_by_ctrl_c_tells_the_others_wherever_they_are(index, told, board, monkeypatch):
    be_process(index, monkeypatch)

    def interrupt(key, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(board, "read_within", interrupt)
    with pytest.raises(KeyboardInterrupt):
        CollectiveSave.meet("step 8")
    assert board["0/outcome"] == board[told] == {"fault": f"process {index}: KeyboardInterrupt"}


def test_messages_of_saves_that_have_ended_everywhere_are_removed(leader, board):
    leader.lead(lambda: None)
    second = (board.say(**{"1_here_1": here(oldest=0)}), CollectiveSave.meet("step 8"))[1]
    assert {key[0] for key in board.messages} == {"0", "1"}  # The follower does not know yet how the first one ended.
    second.lead(lambda: None)
    board.say(**{"2_here_1": here(oldest=2)})
    CollectiveSave.meet("step 8")
    assert {key[0] for key in board.messages} == {"2"}


def test_a_leader_with_nothing_to_write_tells_the_others(leader, board):
    assert leader.lead(lambda: "path") == "path"
    assert (board["0/plan"], board["0/verdict"]) == ({"path": None}, {})


def test_a_leader_that_fails_before_writing_tells_the_others(leader, board):
    with pytest.raises(OSError, match="full"):
        leader.lead(lambda: (_ for _ in ()).throw(OSError("full")))
    assert (board["0/plan"], board["0/verdict"]) == ({"path": None}, {"fault": "process 0: full"})


def test_a_leader_waits_for_the_parts_of_others_even_if_its_own_part_failed(leader, board, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(board, "read_within", lambda key, seconds: asked.append(key) or b'{"files": {}}')
    with pytest.raises(OSError, match="full"):
        leader.lead(lambda: leader.write(tmp_path, lambda path: (_ for _ in ()).throw(OSError("full"))))
    assert asked == ["0/part/1"] and board["0/verdict"] == {"fault": "process 0: full"}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"fault": "process 1: full"},
            "Nothing was saved, because not all processes could write their shards: process 1: full. Earlier checkpoints are intact.",
        ),
        (None, "process 1: it did not finish within 3600 s"),
        ({"files": {"train/x": {"bytes": 1, "crc32": 0}}}, "train/x was created by another process, but is not visible here. .* all processes share"),
    ],
)
def test_a_failed_missing_or_invisible_part_is_an_error(part, message, leader, board, tmp_path):
    board.say(**{} if part is None else {"0_part_1": part})
    with pytest.raises(CheckpointError, match=message):
        leader.lead(lambda: leader.write(tmp_path / "train", lambda path: None))
    assert "fault" in board["0/verdict"]


def test_the_files_of_the_others_are_returned_when_they_are_visible(leader, board, tmp_path):
    files = {"train/x": {"bytes": 1, "crc32": 0}}
    board.say(**{"0_part_1": {"files": files}})
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "x").write_bytes(b"1")
    assert leader.lead(lambda: leader.write(tmp_path / "train", lambda path: None)) == files
    assert board["0/plan"] == {"path": str(tmp_path / "train")}


def test_a_follower_writes_to_the_planned_path_and_learns_how_the_save_ended(follower, board, tmp_path):
    board.say(**{"0_plan": {"path": str(tmp_path)}, "0_verdict": {}})
    follower.follow(lambda path: {"x": {"bytes": len(path.name), "crc32": 0}})
    assert board["0/part/1"] == {"files": {"x": {"bytes": len(tmp_path.name), "crc32": 0}}}


def test_a_follower_raises_what_failed_elsewhere(follower, board):
    board.say(**{"0_plan": {"path": None}, "0_verdict": {"fault": "process 2: full"}})
    with pytest.raises(CheckpointError, match=r"Nothing was saved, because another process failed: process 2: full\. Earlier checkpoints are intact\."):
        follower.follow(lambda path: pytest.fail("there is nothing to write"))


def test_a_follower_that_fails_reports_why_and_raises_its_own_error(follower, board, tmp_path):
    board.say(**{"0_plan": {"path": str(tmp_path)}, "0_verdict": {"fault": "process 1: full"}})
    with pytest.raises(CheckpointError, match="Could not save the shards of process 1: full"):
        follower.follow(lambda path: (_ for _ in ()).throw(OSError("full")))
    assert board["0/part/1"] == {"fault": "process 1: full"}


def test_a_follower_that_does_not_see_the_directory_raises_an_error(follower, board):
    board.say(**{"0_plan": {"path": "/nowhere/at/all"}, "0_verdict": {"fault": "process 1: ..."}})
    with pytest.raises(CheckpointError, match="/nowhere/at/all was created by another process, but is not visible here"):
        follower.follow(lambda path: {})


def test_a_leader_that_never_responds_is_an_error(follower, board):
    with pytest.raises(CheckpointError, match="another process did not respond"):
        follower.follow(lambda path: {})
    assert "fault" in board["0/part/1"]


def test_an_aborted_save_is_reported_only_once(follower, board):
    follower.abort()
    follower.abort(KeyboardInterrupt())
    assert board["0/part/1"] == {"fault": "process 1: an earlier save failed"}


def test_any_exception_that_interrupts_the_preparation_is_reported(follower, board):
    with pytest.raises(KeyboardInterrupt), follower.abort_on_error():
        raise KeyboardInterrupt
    assert board["0/part/1"] == {"fault": "process 1: KeyboardInterrupt"}


# -- pieces --


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
    pytest.importorskip("obstore")
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
    read = shard_format.read_range
    monkeypatch.setattr(shard_format, "read_range", lambda path, begin, length: ranges.append(length) or read(path, begin, length))
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
    monkeypatch.setattr(SplitArray, "read", lambda self, index: asked.append(shard_format._region(index, self.shape)) or read(self, index))
    placed = strategy.put_at([w], [jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=half)])[0]
    assert np.array_equal(placed, VALUES["w"]) and [shard.data.shape for shard in placed.addressable_shards] == [(4, 6)] * 2
    assert asked == [((0, 4), (0, 6)), ((4, 8), (0, 6))] and sum(fetched) == VALUES["w"].nbytes
    assert strategy.abstract_put([w])[0].shape == (8, 6)
    assert jax.eval_shape(lambda x: x + jnp.float32(1), w).shape == (8, 6)


def test_a_long_piece_is_fetched_in_ranges_and_damage_anywhere_is_detected(saved, fetched, monkeypatch):
    place, metadata = saved
    monkeypatch.setattr(shard_format, "_RANGE_BYTES", 16)
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

    monkeypatch.setattr(shard_format, "read_range", fail)
    with pytest.raises(CheckpointError, match=re.escape("train/w could not be read from its checkpoint: reset by peer")):
        np.asarray(w)


def test_a_region_is_where_slices_begin_and_end():
    assert shard_format._region((slice(None), slice(2, 3)), (7, 9)) == ((0, 7), (2, 3)) and shard_format._region((), ()) == ()
