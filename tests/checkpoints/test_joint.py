"""The protocol of a save that all processes make together, seen from one of them; the others are messages on a board that is made up."""

import itertools
import json

import pytest

from fitflax.checkpoints import joint
from fitflax.checkpoints.joint import JointSave
from fitflax.errors import CheckpointError


class Paper:
    """A board for one process: what is not there will never come."""

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
    made = Paper()
    for name, value in {"Board": made, "_numbers": itertools.count(), "_open": set(), "_removed": 0, "APPEARING_SECONDS": 0.0}.items():
        monkeypatch.setattr(joint, name, value)
    monkeypatch.setattr(joint.jax, "process_count", lambda: 2)
    return made


def be(index, monkeypatch):
    monkeypatch.setattr(joint.jax, "process_index", lambda: index)


def here(what="step 8", earlier=None, oldest=0):
    return {"what": what, "earlier": earlier, "oldest": oldest}


@pytest.fixture
def leader(board, monkeypatch):
    be(0, monkeypatch)
    board.say(**{"0_here_1": here()})
    return JointSave.meet("step 8")


@pytest.fixture
def follower(board, monkeypatch):
    be(1, monkeypatch)
    board.say(**{"0_outcome": {"earlier": None}})
    return JointSave.meet("step 8")


def test_all_hear_of_what_failed_before_in_one(board, monkeypatch):
    be(0, monkeypatch)
    board.say(**{"0_here_1": here(earlier="disk full")})
    assert JointSave.meet("step 8").earlier == "process 1: disk full" == board["0/outcome"]["earlier"]


def test_processes_that_come_to_save_different_steps_save_neither(board, monkeypatch):
    be(0, monkeypatch)
    board.say(**{"0_here_1": here("step 9")})
    with pytest.raises(CheckpointError, match="process 0 saves step 8, and process 1 step 9"):
        JointSave.meet("step 8")
    assert "fault" in board["0/outcome"]


def test_a_leader_that_waited_in_vain_says_so_to_those_who_come_later(board, monkeypatch):
    be(0, monkeypatch)
    with pytest.raises(CheckpointError, match="process 0 waited for 60 s to save step 8, and process 1 did not come"):
        JointSave.meet("step 8", is_rescue=True)
    be(1, monkeypatch)
    monkeypatch.setattr(joint, "_numbers", itertools.count())
    with pytest.raises(CheckpointError, match="process 0 waited for 60 s to save step 8"):
        JointSave.meet("step 10")


def test_a_follower_that_waited_in_vain_decides_unless_the_leader_did(board, monkeypatch):
    be(1, monkeypatch)
    with pytest.raises(CheckpointError, match="process 1 waited for 600 s to save step 8, and process 0 did not come"):
        JointSave.meet("step 8")
    board.say(**{"1_outcome": {"earlier": None}})
    monkeypatch.setattr(board, "read_within", lambda key, seconds: (_ for _ in ()).throw(TimeoutError()))
    assert JointSave.meet("step 8").earlier is None


@pytest.mark.parametrize(("index", "told"), [(0, "0/verdict"), (1, "0/part/1")])
def test_who_leaves_a_meeting_by_ctrl_c_tells_the_others_wherever_they_are(index, told, board, monkeypatch):
    be(index, monkeypatch)

    def interrupt(key, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(board, "read_within", interrupt)
    with pytest.raises(KeyboardInterrupt):
        JointSave.meet("step 8")
    assert board["0/outcome"] == board[told] == {"fault": f"process {index}: KeyboardInterrupt"}


def test_messages_of_saves_that_have_ended_everywhere_are_removed(leader, board):
    leader.lead(lambda: None)
    second = (board.say(**{"1_here_1": here(oldest=0)}), JointSave.meet("step 8"))[1]
    assert {key[0] for key in board.messages} == {"0", "1"}  # The follower has not heard yet how the first one ended.
    second.lead(lambda: None)
    board.say(**{"2_here_1": here(oldest=2)})
    JointSave.meet("step 8")
    assert {key[0] for key in board.messages} == {"2"}


def test_a_leader_with_nothing_to_write_tells_the_others(leader, board):
    assert leader.lead(lambda: "path") == "path"
    assert (board["0/plan"], board["0/verdict"]) == ({"path": None}, {})


def test_a_leader_that_fails_before_or_gives_up_tells_the_others(leader, board):
    with pytest.raises(OSError, match="full"):
        leader.lead(lambda: (_ for _ in ()).throw(OSError("full")))
    assert (board["0/plan"], board["0/verdict"]) == ({"path": None}, {"fault": "process 0: full"})


def test_a_leader_waits_for_parts_although_its_own_failed(leader, board, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(board, "read_within", lambda key, seconds: asked.append(key) or b'{"files": {}}')
    with pytest.raises(OSError, match="full"):
        leader.lead(lambda: leader.write(tmp_path, lambda path: (_ for _ in ()).throw(OSError("full"))))
    assert asked == ["0/part/1"] and board["0/verdict"] == {"fault": "process 0: full"}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"fault": "process 1: full"}, "Not all processes could write their parts: process 1: full. Checkpoints saved before are intact."),
        (None, "process 1: it was not ready after 3600 s"),
        ({"files": {"train/x": {"bytes": 1, "crc32": 0}}}, "train/x, which another process has made, is not there. .* a shared file system"),
    ],
)
def test_a_part_that_is_not_there_is_an_error(part, message, leader, board, tmp_path):
    board.say(**{} if part is None else {"0_part_1": part})
    with pytest.raises(CheckpointError, match=message):
        leader.lead(lambda: leader.write(tmp_path / "train", lambda path: None))
    assert "fault" in board["0/verdict"]


def test_the_files_of_the_others_are_returned_when_they_can_be_seen(leader, board, tmp_path):
    files = {"train/x": {"bytes": 1, "crc32": 0}}
    board.say(**{"0_part_1": {"files": files}})
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "x").write_bytes(b"1")
    assert leader.lead(lambda: leader.write(tmp_path / "train", lambda path: None)) == files
    assert board["0/plan"] == {"path": str(tmp_path / "train")}


def test_a_follower_writes_where_it_is_told_and_hears_how_it_ended(follower, board, tmp_path):
    board.say(**{"0_plan": {"path": str(tmp_path)}, "0_verdict": {}})
    follower.follow(lambda path: {"x": {"bytes": len(path.name), "crc32": 0}})
    assert board["0/part/1"] == {"files": {"x": {"bytes": len(tmp_path.name), "crc32": 0}}}


def test_a_follower_raises_what_failed_elsewhere(follower, board):
    board.say(**{"0_plan": {"path": None}, "0_verdict": {"fault": "process 2: full"}})
    with pytest.raises(CheckpointError, match=r"Nothing was saved, because another process failed: process 2: full\. Checkpoints saved before are intact\."):
        follower.follow(lambda path: pytest.fail("there is nothing to write"))


def test_a_follower_that_fails_says_why_and_raises_its_own_error(follower, board, tmp_path):
    board.say(**{"0_plan": {"path": str(tmp_path)}, "0_verdict": {"fault": "process 1: full"}})
    with pytest.raises(CheckpointError, match="Could not save the parts of process 1: full"):
        follower.follow(lambda path: (_ for _ in ()).throw(OSError("full")))
    assert board["0/part/1"] == {"fault": "process 1: full"}


def test_a_follower_that_does_not_see_the_directory_says_so(follower, board):
    board.say(**{"0_plan": {"path": "/nowhere/at/all"}, "0_verdict": {"fault": "process 1: ..."}})
    with pytest.raises(CheckpointError, match="/nowhere/at/all, which another process has made, is not there"):
        follower.follow(lambda path: {})


def test_a_leader_that_never_answers_is_an_error(follower, board):
    with pytest.raises(CheckpointError, match="another process did not answer"):
        follower.follow(lambda path: {})
    assert "fault" in board["0/part/1"]


def test_a_save_that_is_left_out_is_told_once(follower, board):
    follower.give_up()
    follower.give_up(KeyboardInterrupt())
    assert board["0/part/1"] == {"fault": "process 1: an earlier save had failed"}


def test_whatever_breaks_off_a_preparation_is_told(follower, board):
    with pytest.raises(KeyboardInterrupt), follower.or_give_up():
        raise KeyboardInterrupt
    assert board["0/part/1"] == {"fault": "process 1: KeyboardInterrupt"}
