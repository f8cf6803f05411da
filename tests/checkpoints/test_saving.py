"""The thread that saves: order, room, errors, and what happens when it is not waited for."""

import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref

import pytest

from fitflax import background
from fitflax.checkpoints.lock import holder_of, lock_directory
from fitflax.checkpoints.saving import Saver, _Job
from fitflax.errors import DirectoryInUseError, FitflaxWarning


class Gate:
    """A job that waits in the saver's thread until it is opened."""

    def __init__(self):
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.entered.set()
        assert self.opened.wait(60)


def failing():
    raise OSError(28, "No space left on device")


def blocked(call):
    """Calls in a thread and returns it once the call is known to wait."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    return thread


def test_jobs_are_done_in_order_in_another_thread():
    done = []
    with Saver() as saver:
        for number in range(20):
            saver.submit(lambda number=number: done.append((number, threading.current_thread() is threading.main_thread())), is_save=number % 2 == 0)
    assert done == [(number, False) for number in range(20)]


def test_one_save_is_done_one_waits_and_the_next_one_blocks():
    done, gate = [], Gate()
    with Saver() as saver:
        saver.submit(gate)
        assert gate.entered.wait(60)
        saver.submit(lambda: done.append("waits"))
        saver.submit(lambda: done.append("small"), is_save=False)  # Takes no room.
        thread = blocked(lambda: saver.submit(lambda: done.append("third")))
        assert done == []
        gate.opened.set()
        thread.join(60)
    assert done == ["waits", "small", "third"]


def test_a_failed_job_leaves_out_those_behind_it_and_is_raised_once():
    done, gate = [], Gate()
    saver = Saver()
    saver.submit(gate)
    assert gate.entered.wait(60)
    saver.submit(failing)
    saver.submit(lambda: done.append("names what has failed"), is_save=False)
    gate.opened.set()
    with pytest.raises(OSError, match="No space left"):
        saver.wait()
    assert saver.submit(lambda: done.append("the user goes on"))
    saver.close()
    assert done == ["the user goes on"]


def test_nothing_is_taken_after_a_failure_until_somebody_has_heard_of_it():
    saver = Saver()
    gate = Gate()
    saver.submit(gate)
    assert gate.entered.wait(60)
    saver.submit(failing)
    gate.opened.set()
    saver.wait_for_room()
    while not saver.is_idle:
        pass
    assert not saver.submit(lambda: None)
    assert isinstance(saver.failure, OSError)
    assert isinstance(saver.settle(), OSError) and saver.settle() is None
    assert saver.failure is None
    assert saver.submit(lambda: None)
    saver.close()


def test_a_job_that_was_taken_while_the_one_before_failed_is_left_out():
    saver, done = Saver(), []
    saver.submit(failing)
    saver._thread.wait_until(lambda: saver.has_failed and saver.is_idle)
    saver._thread.submit(_Job(saver, lambda: done.append("names what has failed"), True))  # Past the question of `submit`.
    with pytest.raises(OSError, match="No space left"):
        saver.close()
    assert done == []


def test_the_end_raises_what_failed():
    saver = Saver()
    saver.submit(failing)
    with pytest.raises(OSError, match="No space left"):
        saver.close()


def test_a_finished_job_is_let_go_of():
    class Snapshot:
        pass

    snapshot = Snapshot()
    gone = weakref.ref(snapshot)
    with Saver() as saver:
        saver.submit(lambda snapshot=snapshot: None)
        del snapshot
        saver.wait()
        gc.collect()
        assert gone() is None


def test_no_thread_is_left_at_the_end():
    with Saver() as saver:
        saver.submit(lambda: None)
    assert not [thread for thread in threading.enumerate() if thread.name == "fitflax-saver"]


def ended(saver):
    """Returns when the saver's thread has ended."""
    saver._thread.wait_until(lambda: not saver._thread.has_thread)
    with saver._thread._turn:
        pass


def test_a_thread_that_is_never_closed_ends_by_itself_and_the_run_keeps_its_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.0)
    saver = Saver()
    saver.lock(tmp_path)
    for _ in range(3):
        saver.submit(lambda: None)
        saver.wait()
        ended(saver)
        assert holder_of(tmp_path) is saver
    saver.close()


def test_a_ctrl_c_while_somebody_waits_leaves_at_once(monkeypatch):
    def interrupted(condition):
        raise KeyboardInterrupt

    saver = Saver()
    with monkeypatch.context() as patch:
        patch.setattr(saver._thread, "wait_until", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saver.wait()
    assert not saver.submit(lambda: None)


def test_leaving_at_once_waits_for_nothing_and_begins_nothing(tmp_path):
    done, gate = [], Gate()
    saver = Saver()
    saver.lock(tmp_path)
    saver.submit(gate)
    assert gate.entered.wait(60)
    saver.submit(lambda: done.append("never"))
    saver.abandon()
    saver.close()
    assert not saver.submit(lambda: done.append("never"))
    # The directory is still being written in: the next run of this process waits for that.
    assert holder_of(tmp_path) is saver
    following = Saver()
    thread = blocked(lambda: following.lock(tmp_path))
    gate.opened.set()
    thread.join(60)
    assert holder_of(tmp_path) is following and done == []
    following.close()
    assert holder_of(tmp_path) is None


def test_what_goes_on_in_the_thread_after_leaving_at_once_gives_the_directory_back_when_it_is_done(tmp_path):
    saver, gate = Saver(), Gate()
    saver.lock(tmp_path)
    saver.submit(gate)
    assert gate.entered.wait(60)
    saver.abandon()
    gate.opened.set()
    ended(saver)
    assert holder_of(tmp_path) is None


def test_a_run_that_nobody_has_any_more_is_finished_in_its_thread_and_whoever_wants_its_directory_waits(tmp_path):
    done, gate, saver = [], Gate(), Saver()
    saver.lock(tmp_path)
    saver.submit(gate)
    assert gate.entered.wait(60)
    saver.submit(lambda: done.append("last"))
    saver.let_go()  # Waits for nothing.
    assert holder_of(tmp_path) is saver
    following = Saver()
    thread = blocked(lambda: following.lock(tmp_path))
    gate.opened.set()
    thread.join(60)
    assert holder_of(tmp_path) is following and done == ["last"]
    following.close()


def test_a_saver_without_a_thread_gives_its_directories_back_at_once(tmp_path):
    saver = Saver()
    saver.lock(tmp_path)
    saver.let_go()
    assert holder_of(tmp_path) is None


def test_a_thread_may_let_its_own_saver_go(tmp_path):
    saver = Saver()
    saver.lock(tmp_path)
    saver.submit(saver.let_go)
    ended(saver)
    assert holder_of(tmp_path) is None


def test_what_failed_after_nobody_had_the_run_any_more_is_warned_of(recwarn):
    warnings.simplefilter("always")
    saver, gate = Saver(), Gate()
    saver.submit(gate)
    assert gate.entered.wait(60)
    saver.submit(failing)
    saver.let_go()
    gate.opened.set()
    ended(saver)
    assert "A save failed after its run was given up without being closed: [Errno 28] No space left" in str(recwarn.pop(FitflaxWarning).message)
    assert saver.failure is None  # Nobody is told twice.


def test_what_failed_before_nobody_had_the_run_any_more_is_warned_of(monkeypatch):
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.0)
    saver = Saver()
    saver.submit(failing)
    ended(saver)
    with pytest.warns(FitflaxWarning, match="A save failed after its run was given up"):
        saver.let_go()


def test_a_run_takes_over_from_one_that_left_at_once_and_from_a_store_that_is_used_by_itself(tmp_path):
    class Store:
        pass

    left, store = Saver(), Store()
    left.lock(tmp_path)
    left.abandon()
    (tmp_path / "other").mkdir()
    lock_directory(tmp_path / "other", store)
    with Saver() as saver:
        for directory in (tmp_path, tmp_path / "other"):
            saver.lock(directory)
            assert holder_of(directory) is saver


def test_a_run_that_is_alive_keeps_its_directory_from_other_runs_of_the_process(tmp_path):
    with Saver() as first, Saver() as second:
        first.lock(tmp_path)
        first.lock(tmp_path)
        with pytest.raises(DirectoryInUseError, match="in use by another run of this very process"):
            second.lock(tmp_path)
    with Saver() as third:
        third.lock(tmp_path)


SCRIPT = """
import pathlib, sys, time
from fitflax.checkpoints.saving import Saver, _Job

def slow():
    time.sleep(0.5)
    pathlib.Path(sys.argv[1]).write_text("complete")

saver = Saver()
saver.submit(slow)
if sys.argv[2] == "abandon":
    saver.abandon()
if sys.argv[2] == "fail":
    saver.submit(lambda: 1 / 0)
if sys.argv[2] == "fork":
    import os
    if os.fork() == 0:
        sys.exit(0)  # Runs the child's atexit.
    os.wait()
"""


@pytest.mark.parametrize(("how", "complete"), [("end", True), ("abandon", False), ("fail", True), ("fork", True)])
@pytest.mark.slow
def test_a_process_that_ends_in_order_waits_for_its_saves(how, complete, tmp_path):
    path = tmp_path / "file"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "default"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path), how], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and path.exists() == complete
    assert ("A save failed while the process ended: division by zero" in done.stderr) == (how == "fail")


def test_a_job_that_was_taken_and_is_left_out_says_so_once():
    left_out, gate = [], Gate()
    saver = Saver()
    saver.submit(lambda: (gate(), failing()))
    saver.submit(lambda: None, left_out=lambda: left_out.append("waited behind it"))
    gate.opened.set()
    assert isinstance(saver.settle(), OSError)
    saver.submit(lambda: None, left_out=lambda: left_out.append("was done"))
    saver.close()
    assert left_out == ["waited behind it"]


def test_leaving_at_once_says_what_is_left_out():
    left_out, gate = [], Gate()
    saver = Saver()
    saver.submit(gate)
    assert gate.entered.wait(60)
    saver.submit(lambda: None, left_out=lambda: left_out.append("waited"))
    saver.abandon()
    gate.opened.set()
    assert left_out == ["waited"]
