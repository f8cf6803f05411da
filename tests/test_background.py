"""Work in a thread: order, errors, the thread's life, and that no exception in the thread that hands it out can leave a lock behind."""

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


def test_jobs_are_done_in_order_in_one_other_thread():
    background, errors = make()
    done = []
    for number in range(50):
        background.submit(lambda number=number: done.append((number, threading.get_ident())))
    background.wait_until(lambda: background.is_idle)
    background.end()
    assert [number for number, _ in done] == list(range(50)) and errors == []
    assert len({thread for _, thread in done}) == 1 and done[0][1] != threading.get_ident()


def test_an_error_is_handed_over_and_the_next_job_is_done():
    background, errors = make()
    done = []
    background.submit(lambda: 1 / 0)
    background.submit(lambda: done.append("next"))
    background.wait_until(lambda: background.is_idle)
    background.end()
    assert [type(error) for error in errors] == [ZeroDivisionError] and done == ["next"]


def test_the_thread_ends_when_told_or_idle_and_another_one_takes_over(monkeypatch):
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


def test_jobs_from_several_threads_are_all_done_even_as_the_thread_goes_idle(monkeypatch):
    monkeypatch.setattr(background_module, "IDLE_SECONDS", 0.0)
    background, errors = make()
    done = []

    def hand_out() -> None:
        for _ in range(300):
            background.submit(lambda: done.append(1))

    threads = [threading.Thread(target=hand_out) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    background.wait_until(lambda: len(done) == 900)
    background.end()
    assert errors == []


class _Left(BaseException):
    """What a signal handler raises."""


def test_an_exception_at_any_instant_in_the_caller_leaves_a_thread_that_works_on(monkeypatch):
    """Raised from outside between two instructions of a thread that hands out work and waits, again and again, as Ctrl-C is in the main thread."""
    # No thread is started meanwhile: for an instant it has the number of the one that starts it, and would get the exception in its place.
    monkeypatch.setattr(background_module, "IDLE_SECONDS", 1000.0)
    background, errors = make()
    background.submit(lambda: None)
    background.wait_until(lambda: background.is_idle)
    rounds = 1000
    caught = []
    # Threads change places after a few instructions, so that the exception comes anywhere, and not mostly where the caller waits.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def hand_out() -> None:
        while len(caught) < rounds:
            try:
                while True:
                    for _ in range(20):
                        background.submit(lambda: None)
                    background.wait_until(lambda: len(background.waiting) < 20)
            except _Left:
                caught.append(1)

    thread = threading.Thread(target=hand_out)
    thread.start()
    end = time.monotonic() + 100
    while thread.is_alive() and time.monotonic() < end:
        before = len(caught)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Left))
        while len(caught) == before and thread.is_alive() and time.monotonic() < end:
            time.sleep(0.0002)
    sys.setswitchinterval(interval)
    assert not thread.is_alive() and len(caught) == rounds
    done = []
    background.submit(lambda: done.append("still"))
    background.wait_until(lambda: bool(done))
    background.end()
    assert errors == []


def test_a_job_that_comes_while_the_thread_ends_is_done(monkeypatch):
    ended, done = [], []
    background, _ = make(on_end=lambda: ended.append(len(done)))
    # As from somebody who has added it and sees a thread that has just made up its mind.
    monkeypatch.setattr(background, "_sleep", lambda: done or background._jobs.append(lambda: done.append(1)))
    background.submit(lambda: None)
    background.wait_until(lambda: bool(done))
    monkeypatch.undo()
    background.end()
    assert done == [1] and ended[0] == 1


@pytest.mark.parametrize("count", [0, 1])
def test_what_has_not_begun_can_be_left_out(count):
    background, _ = make()
    gate, done = threading.Event(), []
    background.submit(lambda: gate.wait(60))
    for _ in range(count):
        background.submit(lambda: done.append("never"))
    background.clear()
    gate.set()
    background.end()
    assert done == []
