"""A worker thread next to the training thread that is safe from Ctrl-C.

A signal handler may raise in the main thread between any two Python instructions. Inside a `threading.Condition`, an `Event` or a `queue.Queue`, this can
leave a lock held and make the process hang. So the submitting thread only uses deques and `queue.SimpleQueue`, which are implemented in C.
"""

import collections
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

Job = Callable[[], Any]
# Starting a thread takes longer than many jobs, but a thread that is never ended must not live forever.
IDLE_SECONDS = 10.0
# A job that takes longer than this and computes for less than this fraction of the time is starved, or waits for a disk, which needs no CPU time.
_STARVED_SECONDS = 60.0
_STARVED_FRACTION = 0.1
# The timeout for waits in case a notification is missed; correctness does not depend on it.
_POLL_SECONDS = 1.0


class Background:
    """Runs functions one after another in a thread that starts with the first job and ends with `end` or after some idle time.

    The thread is a daemon, so that it does not delay an immediate exit.

    Args:
        on_error: Called in the thread with the exception that a job raised.
        on_end: Called in the thread when it ends.
        niceness: The niceness of the thread and of threads that its jobs start, on Linux only.

    Attributes:
        niceness: As passed; may be raised at any time, and applies from the next job.
        only_idle_cpu: Whether the thread only gets CPU time that no other thread uses (Linux: SCHED_IDLE), from the next job. Unlike a low priority, this
            never delays a thread that wakes up. It is reset if a job gets almost no CPU time because other processes use all of it.

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
        self.niceness = niceness
        self.only_idle_cpu = False
        self._applied_priority = 0, False  # The priority of the current thread.
        self._jobs: collections.deque[Job] = collections.deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._notifications: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Taken only by worker threads: if a race starts two, only one works.
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self.is_busy = False

    def submit(self, job: Job) -> None:
        """Queues a job without waiting."""
        self._is_ending = False
        self._jobs.append(job)
        self._wake.put(None)
        self._start()

    def barrier(self) -> Callable[[], None]:
        """Returns a function that waits until all jobs submitted so far have run or failed. Any thread may call it, any number of times.

        Do not combine it with `clear`, which could remove the job that ends the wait.
        """
        done: list[None] = []
        wake: queue.SimpleQueue[None] = queue.SimpleQueue()

        def end() -> None:
            done.append(None)
            wake.put(None)

        self.submit(end)

        def wait() -> None:
            while not done:
                if self._jobs:
                    with contextlib.suppress(RuntimeError):  # If no thread can be started, try again.
                        self._start()
                with contextlib.suppress(queue.Empty):
                    wake.get(timeout=_POLL_SECONDS)
            wake.put(None)  # Wakes the next waiting thread.

        return wait

    @property
    def waiting(self) -> list[Job]:
        """The jobs that have not started."""
        return list(self._jobs)

    @property
    def is_idle(self) -> bool:
        """Whether no job is running or queued."""
        return not self._jobs and not self.is_busy  # In this order: `is_busy` is set before a job leaves the queue.

    @property
    def has_thread(self) -> bool:
        """Whether a thread exists."""
        return self._thread is not None

    def clear(self) -> None:
        """Removes all jobs that have not started."""
        self._jobs.clear()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition()` is true; checks it when a job begins or ends, and at least once a second."""
        while True:
            while not self._notifications.empty():
                with contextlib.suppress(queue.Empty):
                    self._notifications.get_nowait()
            if condition():
                return
            if self._jobs:
                self._start()  # `submit` was interrupted before it started the thread.
            with contextlib.suppress(queue.Empty):
                self._notifications.get(timeout=_POLL_SECONDS)

    def end(self, *, wait: bool = True) -> None:
        """Ends the thread after all jobs are done, and by default waits for it; a later `submit` starts another one."""
        thread = self._thread
        self._is_ending = True
        self._wake.put(None)
        if wait:
            self.wait_until(lambda: self._thread is None)
            if thread is not None:
                thread.join()

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run_jobs, name=self.name, daemon=True)
            try:
                self._thread = thread
                thread.start()
            except BaseException:
                # Otherwise, waits would never end. If Ctrl-C came after this thread had started, the next thread waits for it.
                self._thread = None
                raise

    # -- in the thread --

    def _run_jobs(self) -> None:
        try:
            with self._turn:
                self._applied_priority = 0, False
                while True:
                    # On Linux, a thread cannot leave the idle class, and threads that it starts inherit the class. So it ends when there is no job left,
                    # and the caller's next job starts another thread.
                    while (self._run_next_job() or self._sleep()) and (self._jobs or self.only_idle_cpu or not self._applied_priority[1]):
                        pass
                    self._thread = None
                    if not self._jobs:
                        self._on_end()
                        break
                    if self.has_thread:
                        break
                    # A job was submitted while this thread was ending, and no other thread was started.
                    self._thread = threading.current_thread()
        finally:
            self._notifications.put(None)

    def _run_next_job(self) -> bool:
        self.is_busy = True
        begin = time.monotonic(), time.thread_time()
        try:
            job = self._jobs.popleft()
        except IndexError:
            return False
        else:
            self._notifications.put(None)  # The queue is shorter.
            self._apply_priority()
            try:
                job()
            except BaseException as error:  # noqa: BLE001 (`on_error` handles it)
                self._on_error(error)
            return True
        finally:
            job = None  # type: ignore[assignment]  # Release its objects before waiters learn that it is done.
            self._check_starvation(*begin)
            self.is_busy = False
            self._notifications.put(None)

    def _apply_priority(self) -> None:
        wanted = self.niceness, self.only_idle_cpu
        if self._applied_priority != wanted and sys.platform == "linux":  # On other systems, it would change the whole process.
            self._applied_priority = wanted
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self.niceness)
                if self.only_idle_cpu:
                    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))

    def _check_starvation(self, begin: float, cpu_begin: float) -> None:
        """Leaves the idle class if a job took long and used little CPU time."""
        seconds = time.monotonic() - begin
        if seconds > _STARVED_SECONDS and time.thread_time() - cpu_begin < _STARVED_FRACTION * seconds:
            self.only_idle_cpu = False

    def _sleep(self) -> bool:
        """Waits for a job; returns whether the thread should continue."""
        if self._is_ending:
            return bool(self._jobs)
        try:
            self._wake.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            return bool(self._jobs)
        return True
