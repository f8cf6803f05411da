"""Work for a thread beside the one that trains, safe from Ctrl-C.

A signal handler may raise in the main thread between any two instructions of Python code: inside of a `threading.Condition`, an `Event` or a `queue.Queue`
that leaves a lock taken for good, and the other thread, and with it the end of the process, waits for ever. So whoever hands out work here takes no lock at
all: deques and `queue.SimpleQueue`, which are C code, are told of it.
"""

import collections
import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Background"]

Job = Callable[[], Any]
# Starting a thread takes longer than many a job; one that is never ended must not live for ever.
IDLE_SECONDS = 10.0
# Nobody relies on it: how often it is looked again whether what is waited for has come, without being told.
_LOOK_SECONDS = 1.0


class Background:
    """Calls functions one after another in a thread, which begins with the first one and ends with `end`, or when there was nothing to do for a while.

    The thread is a daemon: the interpreter would wait for any other even where the user wants to leave at once.

    Args:
        name: The thread's.
        on_error: Called in the thread with what a job raised.
        on_end: Called in the thread when it ends.
        niceness: By how much the thread gives way to others, on Linux.

    >>> done = []
    >>> background = Background("doctest", on_error=done.append)
    >>> background.submit(lambda: done.append(1))
    >>> background.submit(lambda: done.append(2))
    >>> background.wait_until(lambda: background.is_idle)
    >>> background.end()
    >>> done
    [1, 2]
    """

    def __init__(self, name: str, *, on_error: Callable[[BaseException], Any], on_end: Callable[[], Any] = lambda: None, niceness: int = 0) -> None:
        self.name = name
        self._on_error = on_error
        self._on_end = on_end
        self._niceness = niceness
        self._jobs: collections.deque[Job] = collections.deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Threads alone take it: of two that were started by misunderstanding, one works.
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self.is_busy = False

    def submit(self, job: Job) -> None:
        """Has a job done after all before it; waits for nothing."""
        self._is_ending = False
        self._jobs.append(job)
        self._wake.put(None)
        self._start()

    @property
    def waiting(self) -> list[Job]:
        """What has not begun."""
        return list(self._jobs)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being done, and nothing waits."""
        return not self._jobs and not self.is_busy  # In this order: a job is busy before it is taken from those that wait.

    @property
    def has_thread(self) -> bool:
        """Whether there is a thread."""
        return self._thread is not None

    def clear(self) -> None:
        """Leaves out what has not begun."""
        self._jobs.clear()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition()`, which is asked again after each job."""
        while True:
            while not self._news.empty():
                with contextlib.suppress(queue.Empty):
                    self._news.get_nowait()
            if condition():
                return
            if self._jobs:
                self._start()  # Whoever submitted was broken off before it could.
            with contextlib.suppress(queue.Empty):
                self._news.get(timeout=_LOOK_SECONDS)

    def end(self, *, wait: bool = True) -> None:
        """Ends the thread once everything is done; a later `submit` begins another one.

        Args:
            wait: Whether to wait for that.
        """
        thread = self._thread
        self._is_ending = True
        self._wake.put(None)
        if wait:
            self.wait_until(lambda: self._thread is None)
            if thread is not None:
                thread.join()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            thread.start()

    # -- what the thread does --

    def _work(self) -> None:
        if self._niceness and sys.platform == "linux":  # Elsewhere it would be the whole process's.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        try:
            with self._turn:
                while self._do_next() or self._sleep():
                    pass
                self._thread = None
                if self._jobs:  # From somebody who took this thread for one that goes on.
                    self._start()
                else:
                    self._on_end()
        finally:
            self._news.put(None)

    def _do_next(self) -> bool:
        self.is_busy = True
        try:
            job = self._jobs.popleft()
        except IndexError:
            return False
        else:
            self._news.put(None)  # There is room for another one.
            try:
                job()
            except BaseException as error:  # noqa: BLE001 (it is its caller's business)
                self._on_error(error)
            return True
        finally:
            job = None  # type: ignore[assignment]  # With what it holds, before anybody learns that it is done.
            self.is_busy = False
            self._news.put(None)

    def _sleep(self) -> bool:
        """Waits for a job; returns whether the thread is to go on."""
        if self._is_ending:
            return bool(self._jobs)
        try:
            self._wake.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            return bool(self._jobs)
        return True
