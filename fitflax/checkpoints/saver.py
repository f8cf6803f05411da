"""Runs a run's saves one after another in a thread, while training continues.

A job holds host values that no longer change. Jobs run in the order in which they were submitted. If one fails, the jobs behind it are skipped, as they
would be without a thread: a checkpoint must not outlive another one that it refers to. The error is raised at the next save or at the end of the run.
"""

import atexit
import dataclasses
import os
import weakref
from collections.abc import Callable
from typing import Any, Self

from fitflax.background import Background
from fitflax.checkpoints.memory import ReusedMemory
from fitflax.errors import warn
from fitflax.storage import Location
from fitflax.storage.lock import holder_of, lock_directory, release_all

# For training on the host's cores: measured on two cores, it reduces the cost of small saves by a third.
NICENESS_ON_HOST = 10
# For large saves, together with idle CPU scheduling: with 1.5 GB on two cores, steps during a write take 1.3 times as long with a niceness of 10, 1.2
# times with 19, and 1.07 times with both. Not for small saves, whose Python code, which holds the GIL, must not wait for the steps.
NICENESS_OF_LARGE = 19


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    """A function to call in the thread, one to call if it is skipped, and whether it holds a snapshot."""

    saver: "Saver"
    do: Callable[[], Any]
    is_save: bool
    on_skip: Callable[[], Any] | None = None

    def __call__(self) -> None:
        if self.saver.failure is None:  # It may have failed after `submit`.
            self.do()
        elif self.on_skip is not None:
            self.on_skip()


class Saver:
    """The saving thread of a run, and the directories that are locked for the run.

    The thread ends with `close`, or after some idle time. A process that ends normally waits for it. `close` and leaving the context also wait. On Linux, the
    thread has the given niceness, so that training on the host's cores does not wait for it.

    >>> done = []
    >>> with Saver() as saver:
    ...     taken = saver.submit(lambda: done.append("best")), saver.submit(lambda: done.append("regular"))
    >>> done
    ['best', 'regular']
    """

    def __init__(self, *, niceness: int = 0) -> None:
        self._thread = Background("fitflax-saver", on_error=self._fail, on_end=self._on_thread_end, niceness=niceness)
        self._is_abandoned = self._is_let_go = False
        self.failure: BaseException | None = None  # The exception of a job that was not reported yet.
        self.has_lost = False  # Whether any save failed, reported or not.
        self.memory = ReusedMemory()  # For snapshots; released when the saver ends.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, do: Callable[[], Any], *, is_save: bool = True, on_skip: Callable[[], Any] | None = None) -> bool:
        """Adds a job to the queue. Returns `False` without adding it if an earlier job failed or the saver was abandoned.

        Of jobs that hold a snapshot (`is_save`), at most one waits while another runs: the next one blocks until there is room. `on_skip` is called in any
        thread if the job was added but is skipped.
        """
        if is_save:
            self.wait_for_room()
        if self._is_abandoned or self.failure is not None:
            return False
        _WORKING.add(self)
        self._thread.submit(_Job(self, do, is_save, on_skip))
        return True

    @property
    def is_idle(self) -> bool:
        """Whether no job is running or waiting."""
        return self._thread.is_idle

    def wait_for_room(self, has_memory: Callable[[ReusedMemory], bool] = lambda memory: True) -> None:
        """Waits until a save would not block. Call it before making a snapshot, so that at most one is being written and one waits.

        `has_memory` says whether there is memory for another snapshot, and is called again after each job. Memory that is in use while the saver is idle is
        not waited for: something else holds it, such as the error of a failed save, and the snapshot gets new memory.
        """

        def has_room() -> bool:
            waiting = sum(isinstance(job, _Job) and job.is_save for job in self._thread.waiting)
            return waiting + self._thread.is_busy < 2 and (self.is_idle or self._is_abandoned or has_memory(self.memory))

        self._thread.wait_until(has_room)

    def lower_priority(self) -> None:
        """Makes the thread use only idle CPU time, from the next job on, because the next writes are large."""
        if self._thread.niceness != NICENESS_OF_LARGE:
            self._thread.niceness, self._thread.only_idle_cpu = NICENESS_OF_LARGE, True

    def settle(self) -> BaseException | None:
        """Waits for all jobs, and returns the exception of a failed one, once."""
        try:
            self._thread.wait_until(lambda: self.is_idle or self._is_abandoned)
        except KeyboardInterrupt:
            self.abandon()
            raise
        error, self.failure = self.failure, None
        return error

    def wait(self) -> None:
        """Waits for all jobs, and raises the exception of a failed one."""
        error = self.settle()
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Skips all waiting jobs and never waits again, because the user wants to exit immediately."""
        self._is_abandoned = True
        self._skip_waiting()
        self._thread.end(wait=False)
        self.memory.release()
        _WORKING.discard(self)

    def close(self) -> None:
        """Waits for all jobs, unlocks the directories, and raises the exception of a failed job."""
        try:
            self.wait()
        finally:
            self._thread.end(wait=not self._is_abandoned)
            if not self._thread.has_thread:  # Otherwise the thread unlocks them when it ends.
                release_all(self)
            self.memory.release()
            _WORKING.discard(self)

    def let_go(self) -> None:
        """Closes without waiting: the thread unlocks the directories once all jobs are done, and warns of failures.

        For callers that may run in any thread: garbage collection may run in the saver's own thread, which cannot wait for itself.
        """
        self._is_let_go = True
        self.memory.release()
        self._thread.end(wait=False)
        if not self._thread.has_thread:
            self._on_thread_end()

    def lock(self, directory: Location) -> None:
        """Locks a directory for this run until `close`. Raises `DirectoryInUseError` if another run has locked it."""
        other = holder_of(directory)
        if isinstance(other, Saver):
            other.finish_given_up()
        elif other is not None:
            release_all(other)  # A store that is used without a run: the run takes over.
        lock_directory(directory, self)

    @property
    def is_given_up(self) -> bool:
        """Whether the run saves nothing more, after `abandon` or `let_go`."""
        return self._is_abandoned or self._is_let_go

    def finish_given_up(self) -> None:
        """Waits for the jobs that remain after `let_go`, or for the running one after `abandon`, and unlocks the directories."""
        if self._is_abandoned:
            self._thread.wait_until(lambda: not self._thread.is_busy)
        elif self._is_let_go:
            self._thread.wait_until(lambda: self._thread.is_idle)
        else:
            return
        release_all(self)

    # -- in the thread --

    def _fail(self, error: BaseException) -> None:
        self.failure, self.has_lost = error, True
        self._skip_waiting()

    def _skip_waiting(self) -> None:
        waiting = self._thread.waiting
        self._thread.clear()
        for job in waiting:
            if isinstance(job, _Job) and job.on_skip is not None:
                job.on_skip()

    def _on_thread_end(self) -> None:
        if self.is_given_up:
            release_all(self)
        if self._is_let_go and self.failure is not None:
            error, self.failure = self.failure, None
            warn(f"A save failed after its run was abandoned without being closed: {error}")


_WORKING: "weakref.WeakSet[Saver]" = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    for saver in list(_WORKING):
        try:
            saver.wait()
        except Exception as error:  # noqa: BLE001 (no caller is left to catch it)
            warn(f"A save failed while the process was exiting: {error}")


# A forked child inherits the set, but not the threads.
os.register_at_fork(after_in_child=lambda: _WORKING.clear())
