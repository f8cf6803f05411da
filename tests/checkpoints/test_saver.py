"""The thread that saves: order, room, errors, and what happens when it is not waited for."""

import functools
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref

import pytest

from fitflax import background
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.checkpoints.saver import Saver, _Job
from fitflax.errors import DirectoryInUseError, FitflaxWarning
from fitflax.storage.lock import holder_of, lock_directory
from tests.checkpoints.samples import kept_bytes


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
    """Calls in a thread, and returns the thread once the call is known to wait."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    return thread


def test_jobs_run_in_order_in_another_thread():
    done = []
    with Saver() as saver:
        for number in range(20):
            saver.submit(lambda number=number: done.append((number, threading.current_thread() is threading.main_thread())), is_save=number % 2 == 0)
    assert done == [(number, False) for number in range(20)]


def test_one_save_runs_one_waits_and_the_next_one_blocks():
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


def holding(loan, job):
    job()


def has_memory(memory):
    """As for a large state: one copy at a time."""
    return memory.num_lent < 1


def test_a_save_that_needs_memory_waits_until_the_save_that_holds_it_is_done():
    gate = Gate()
    with Saver() as saver:
        saver.submit(functools.partial(holding, saver.memory.lend(1000), gate))
        assert gate.entered.wait(60)
        saver.wait_for_room()  # There is room, but no memory.
        thread = blocked(lambda: saver.wait_for_room(has_memory))
        gate.opened.set()
        thread.join(60)
        assert saver.memory.num_lent == 0 and kept_bytes(saver.memory) == 1000
    assert kept_bytes(saver.memory) == 0


def test_memory_that_no_save_holds_is_not_waited_for():
    saver = Saver()
    saver.submit(functools.partial(holding, saver.memory.lend(1000), failing))
    saver._thread.wait_until(lambda: saver.is_idle)
    loan = saver.memory.lend(1000)
    saver.wait_for_room(has_memory)
    del loan
    assert isinstance(saver.settle(), OSError)
    saver.close()


@pytest.mark.parametrize("leave", [Saver.abandon, Saver.detach])
def test_leaving_without_waiting_releases_memory_except_what_is_still_being_written(leave):
    saver, gate = Saver(), Gate()
    loan = saver.memory.lend(1000)
    block = weakref.ref(loan.block)
    saver.submit(functools.partial(holding, loan, gate))
    del loan
    assert gate.entered.wait(60)
    leave(saver)
    assert kept_bytes(saver.memory) == 0 and block() is not None
    if leave is Saver.abandon:
        saver.wait_for_room(has_memory)  # No more jobs are accepted, so there is nothing to wait for.
    gate.opened.set()
    wait_for_end(saver)
    assert block() is None


def test_a_failed_job_skips_those_behind_it_and_is_raised_once():
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


def test_no_job_is_accepted_after_a_failure_until_the_failure_is_reported():
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


def test_a_job_that_was_accepted_while_the_previous_one_failed_is_skipped():
    saver, done = Saver(), []
    saver.submit(failing)
    saver._thread.wait_until(lambda: saver.failure is not None and saver.is_idle)
    saver._thread.submit(_Job(saver, lambda: done.append("names what has failed"), True))  # Bypasses the check in `submit`.
    with pytest.raises(OSError, match="No space left"):
        saver.close()
    assert done == []


def test_close_raises_what_failed():
    saver = Saver()
    saver.submit(failing)
    with pytest.raises(OSError, match="No space left"):
        saver.close()


def test_a_finished_job_is_released():
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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is the whole process's")
def test_lower_priority_moves_the_thread_and_those_it_starts_to_the_idle_class():
    def found_here():
        thread = threading.get_native_id()
        return os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread) == os.SCHED_IDLE

    def look():
        found.append(found_here())
        thread = threading.Thread(target=lambda: found.append(found_here()))  # Like the one that computes checksums.
        thread.start()
        thread.join()

    own, found = found_here(), []
    with Saver(niceness=own[0] + 1) as saver:
        saver.submit(look)
        saver.wait()
        for _ in range(2):
            saver.lower_priority()
            saver.submit(look)
            saver.wait()
        saver._thread.end()  # The next thread starts with the lowered priority.
        saver.submit(look)
    assert found == [(min(own[0] + 1, 19), False)] * 2 + [(19, True)] * 6 and found_here() == own


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no such class")
def test_a_thread_that_gets_no_cpu_time_leaves_the_idle_class(monkeypatch):
    monkeypatch.setattr(background, "_STARVED_SECONDS", 0.05)
    found = []

    def look():
        found.append((threading.get_native_id(), os.sched_getscheduler(threading.get_native_id()) == os.SCHED_IDLE))

    with Saver() as saver:
        saver.lower_priority()
        for jobs in ([look], [lambda: look() or time.sleep(0.2), look], [look]):
            for job in jobs:
                saver.submit(job)
            saver.wait()
            saver._thread.wait_until(lambda: saver._thread.only_idle_cpu or not saver._thread.has_thread)
        saver.lower_priority()
        saver.submit(look)
    # A job that was queued behind the slow one is still done by the same thread.
    assert [is_idle for _, is_idle in found] == [True, True, True, False, False]
    assert found[0][0] == found[1][0] == found[2][0] != found[3][0]


def test_a_job_submitted_while_the_thread_ends_is_done(monkeypatch):
    done = []
    made = background.Background("test", on_error=done.append)
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.0)  # It ends after each job.
    for i in range(300):
        made.submit(lambda i=i: done.append(i))
        if i % 3 == 0:
            time.sleep(0.0005)
    made.wait_until(lambda: made.is_idle and not made.has_thread)
    assert done == list(range(300))


def test_no_thread_is_left_at_the_end():
    with Saver() as saver:
        saver.submit(lambda: None)
    assert not [thread for thread in threading.enumerate() if thread.name == "fitflax-saver"]


def wait_for_end(saver):
    """Waits until the thread of the saver has ended."""
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
        wait_for_end(saver)
        assert holder_of(tmp_path) is saver
    saver.close()


def test_ctrl_c_during_a_wait_abandons_the_saver(monkeypatch):
    def interrupted(condition):
        raise KeyboardInterrupt

    saver = Saver()
    with monkeypatch.context() as patch:
        patch.setattr(saver._thread, "wait_until", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saver.wait()
    assert not saver.submit(lambda: None)


def test_abandoning_waits_for_nothing_and_starts_nothing(tmp_path):
    done, gate = [], Gate()
    saver = Saver()
    saver.lock(tmp_path)
    saver.submit(gate)
    assert gate.entered.wait(60)
    saver.submit(lambda: done.append("never"))
    saver.abandon()
    saver.close()
    assert not saver.submit(lambda: done.append("never"))
    # The directory is still being written to: the next run of this process waits for that.
    assert holder_of(tmp_path) is saver
    following = Saver()
    thread = blocked(lambda: following.lock(tmp_path))
    gate.opened.set()
    thread.join(60)
    assert holder_of(tmp_path) is following and done == []
    following.close()
    assert holder_of(tmp_path) is None


def test_a_job_that_continues_after_abandoning_releases_the_directory_when_it_is_done(tmp_path):
    saver, gate = Saver(), Gate()
    saver.lock(tmp_path)
    saver.submit(gate)
    assert gate.entered.wait(60)
    saver.abandon()
    gate.opened.set()
    wait_for_end(saver)
    assert holder_of(tmp_path) is None


def test_a_detached_saver_finishes_in_its_thread_and_the_next_run_waits_for_it(tmp_path):
    done, gate, saver = [], Gate(), Saver()
    saver.lock(tmp_path)
    saver.submit(gate)
    assert gate.entered.wait(60)
    saver.submit(lambda: done.append("last"))
    saver.detach()  # Waits for nothing.
    assert holder_of(tmp_path) is saver
    following = Saver()
    thread = blocked(lambda: following.lock(tmp_path))
    gate.opened.set()
    thread.join(60)
    assert holder_of(tmp_path) is following and done == ["last"]
    following.close()


def test_a_saver_without_a_thread_releases_its_directories_immediately(tmp_path):
    saver = Saver()
    saver.lock(tmp_path)
    saver.detach()
    assert holder_of(tmp_path) is None


def test_detach_can_be_called_in_the_thread_of_the_saver(tmp_path):
    saver = Saver()
    saver.lock(tmp_path)
    saver.submit(saver.detach)
    wait_for_end(saver)
    assert holder_of(tmp_path) is None


def test_a_failure_after_detach_is_a_warning(recwarn):
    warnings.simplefilter("always")
    saver, gate = Saver(), Gate()
    saver.submit(gate)
    assert gate.entered.wait(60)
    saver.submit(failing)
    saver.detach()
    gate.opened.set()
    wait_for_end(saver)
    assert "A save failed after its run was abandoned without being closed: [Errno 28] No space left" in str(recwarn.pop(FitflaxWarning).message)
    assert saver.failure is None  # It is not reported twice.


def test_a_failure_before_detach_is_a_warning(monkeypatch):
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.0)
    saver = Saver()
    saver.submit(failing)
    wait_for_end(saver)
    with pytest.warns(FitflaxWarning, match="A save failed after its run was abandoned"):
        saver.detach()


def test_a_run_takes_over_from_an_abandoned_run_and_from_a_store_without_a_run(tmp_path):
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
        with pytest.raises(DirectoryInUseError, match="in use by another run in this process"):
            second.lock(tmp_path)
    with Saver() as third:
        third.lock(tmp_path)


SCRIPT = """
import pathlib, sys, time
from fitflax.checkpoints.saver import Saver, _Job

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
def test_a_process_that_ends_normally_waits_for_its_saves(how, complete, tmp_path):
    path = tmp_path / "file"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "default"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path), how], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and path.exists() == complete
    assert ("A save failed while the process was exiting: division by zero" in done.stderr) == (how == "fail")


@pytest.mark.slow
@pytest.mark.skipif((3, 12) <= sys.version_info < (3, 12, 2), reason="these versions of Python start no threads when the process ends")
def test_a_save_by_orbax_that_is_in_progress_when_the_process_ends_is_completed(tmp_path, process_env):
    script = """
import sys, numpy as np, fitflax
from flax import linen as nn
from fitflax.callbacks import ModelCheckpoint
trainer = fitflax.Trainer(nn.Dense(1))
trainer.compile("sgd", "mse")
saver = ModelCheckpoint(sys.argv[1], backend="orbax")
for checkpoint in trainer.train_loop(np.ones((8, 2)), np.ones((8, 1)), steps=10, every=fitflax.every(steps=5)):
    saver(checkpoint)
    break
"""
    command = [sys.executable, "-W", "default", "-c", script, str(tmp_path / "run")]
    done = subprocess.run(command, env=process_env, capture_output=True, text=True, timeout=120, check=True)
    assert CheckpointStore(tmp_path / "run").steps() == [5] and "A save failed" not in done.stderr, done.stderr


def test_on_skip_is_called_once_for_an_accepted_job_that_is_skipped():
    skipped, gate = [], Gate()
    saver = Saver()
    saver.submit(lambda: (gate(), failing()))
    saver.submit(lambda: None, on_skip=lambda: skipped.append("waited behind it"))
    gate.opened.set()
    assert isinstance(saver.settle(), OSError)
    saver.submit(lambda: None, on_skip=lambda: skipped.append("was done"))
    saver.close()
    assert skipped == ["waited behind it"]


def test_abandoning_calls_on_skip_for_what_is_skipped():
    skipped, gate = [], Gate()
    saver = Saver()
    saver.submit(gate)
    assert gate.entered.wait(60)
    saver.submit(lambda: None, on_skip=lambda: skipped.append("waited"))
    saver.abandon()
    gate.opened.set()
    assert skipped == ["waited"]
