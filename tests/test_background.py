"""Work in a background thread: order, errors, the thread's lifetime, and that no exception in the thread that submits work can leave a lock held."""

import ctypes
import sys
import threading
import time

import pytest

import fitflax.background as background_module
from fitflax.background import Background


def make(**options):
    errors = []
    return Background("test", on_error=errors.append, **options), errors


def test_jobs_run_in_order_in_one_other_thread():
    background, errors = make()
    done = []
    for number in range(50):
        background.submit(lambda number=number: done.append((number, threading.get_ident())))
    background.wait_until(lambda: background.is_idle)
    background.end()
    assert [number for number, _ in done] == list(range(50)) and errors == []
    assert len({thread for _, thread in done}) == 1 and done[0][1] != threading.get_ident()


def test_an_error_is_passed_to_the_handler_and_the_next_job_runs():
    background, errors = make()
    done = []
    background.submit(lambda: 1 / 0)
    background.submit(lambda: done.append("next"))
    background.wait_until(lambda: background.is_idle)
    background.end()
    assert [type(error) for error in errors] == [ZeroDivisionError] and done == ["next"]


def test_a_barrier_waits_for_the_jobs_before_it_in_several_threads_and_for_the_handler_of_their_errors():
    background, errors = make()
    may_continue, done, seen = threading.Event(), [], []
    background.submit(lambda: may_continue.wait(60))
    background.submit(lambda: 1 / 0)
    wait = background.barrier()
    background.submit(lambda: done.append("later"))

    def waiter():
        wait()
        seen.append(len(errors))

    threads = [threading.Thread(target=waiter) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not seen
    may_continue.set()
    for thread in threads:
        thread.join(60)
    wait()
    background.end()
    assert seen == [1, 1, 1] and done == ["later"]


def test_if_no_thread_can_be_started_the_caller_gets_the_error_and_a_later_wait_starts_one(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    background, errors = make()
    done = []
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start new thread"):
        patch.setattr(threading.Thread, "start", fail)
        background.submit(lambda: done.append(1))
    waiter = threading.Thread(target=background.wait_until, args=(lambda: background.is_idle,), daemon=True)
    waiter.start()
    waiter.join(10)
    assert not waiter.is_alive() and (done, errors) == ([1], [])
    background.end()


def test_a_barrier_ends_although_the_thread_that_it_relied_on_could_not_be_started(monkeypatch):
    background, _ = make()
    waits = []

    def fail(thread):
        waits.append(background.barrier())  # As if another thread called it at this moment.
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start new thread"):
        patch.setattr(threading.Thread, "start", fail)
        background.submit(lambda: None)
    waiter = threading.Thread(target=waits[0], daemon=True)
    waiter.start()
    waiter.join(10)
    assert not waiter.is_alive()
    background.end()


def test_the_thread_ends_on_request_or_when_idle_and_another_one_takes_over(monkeypatch):
    ended = []
    background, _ = make(on_end=lambda: ended.append(1))
    done = []
    background.submit(lambda: done.append(1))
    background.end()
    assert (done, ended, background.has_thread) == ([1], [1], False)
    monkeypatch.setattr(background_module, "IDLE_SECONDS", 0.0)
    for number in (2, 3):
        background.submit(lambda number=number: done.append(number))
        background.wait_until(lambda: not background.has_thread)
    assert done == [1, 2, 3]
    background.end()


def test_all_jobs_from_several_threads_run_even_while_the_thread_goes_idle(monkeypatch):
    monkeypatch.setattr(background_module, "IDLE_SECONDS", 0.0)
    background, errors = make()
    done = []

    def submit_jobs() -> None:
        for _ in range(300):
            background.submit(lambda: done.append(1))

    threads = [threading.Thread(target=submit_jobs) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    background.wait_until(lambda: len(done) == 900)
    background.end()
    assert errors == []


class _Interrupt(BaseException):
    """What a signal handler raises."""


def test_an_exception_at_any_moment_in_the_caller_leaves_a_thread_that_keeps_working(monkeypatch):
    """The exception is raised from outside, between two instructions of a thread that repeatedly submits work and waits, as Ctrl-C is in the main thread."""
    # No thread is started meanwhile: for a moment, a new thread has the identifier of the one that starts it, and would get the exception instead.
    monkeypatch.setattr(background_module, "IDLE_SECONDS", 1000.0)
    background, errors = make()
    background.submit(lambda: None)
    background.wait_until(lambda: background.is_idle)
    rounds = 1000
    caught = []
    ready = []  # The exception must reach the thread inside its `try`, which it leaves only when an exception arrives.
    # Threads switch after a few instructions, so that the exception arrives anywhere, and not mostly where the caller waits.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def submit_jobs() -> None:
        while len(caught) < rounds:
            try:
                ready.append(1)
                while True:
                    for _ in range(20):
                        background.submit(lambda: None)
                    background.wait_until(lambda: len(background.waiting) < 20)
            except _Interrupt:
                ready.clear()
                caught.append(1)

    thread = threading.Thread(target=submit_jobs)
    thread.start()
    end = time.monotonic() + 100
    while thread.is_alive() and time.monotonic() < end:
        if not ready:
            time.sleep(0.0002)
            continue
        before = len(caught)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Interrupt))
        while len(caught) == before and thread.is_alive() and time.monotonic() < end:
            time.sleep(0.0002)
    sys.setswitchinterval(interval)
    assert not thread.is_alive() and len(caught) == rounds
    done = []
    background.submit(lambda: done.append("still"))
    background.wait_until(lambda: bool(done))
    background.end()
    assert errors == []


def test_a_job_that_arrives_while_the_thread_ends_still_runs(monkeypatch):
    ended, done = [], []
    background, _ = make(on_end=lambda: ended.append(len(done)))
    # As if a caller added a job and still saw the thread, which has just decided to end.
    monkeypatch.setattr(background, "_sleep", lambda: done or background._jobs.append(lambda: done.append(1)))
    background.submit(lambda: None)
    background.wait_until(lambda: bool(done))
    monkeypatch.undo()
    background.end()
    assert done == [1] and ended[0] == 1


@pytest.mark.parametrize("count", [0, 1])
def test_jobs_that_have_not_started_can_be_dropped(count):
    background, _ = make()
    gate, done = threading.Event(), []
    background.submit(lambda: gate.wait(60))
    for _ in range(count):
        background.submit(lambda: done.append("never"))
    background.clear()
    gate.set()
    background.end()
    assert done == []
