"""A run's saves, one after another in a thread, while training goes on.

Whoever saves puts host values that nobody changes any more into a job; jobs are done in the order in which they came. When one fails, those behind it are
left out, as they would have been without a thread: a checkpoint that names another one must not outlive it. The error waits for whoever comes next, or for
the end of the run.
"""

import atexit
import collections
import contextlib
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from fitflax.checkpoints.lock import holder_of, lock_directory, release_all
from fitflax.errors import FitflaxWarning

__all__ = ["NICENESS_ON_HOST", "Saver"]

Job = Callable[[], Any]
# Starting a thread takes longer than a small save has; one that is never closed must not live for ever.
IDLE_SECONDS = 10.0
# Of the saver of a run whose steps are computed by the host's own cores: measured on two of them, it takes a third off the time that small saves cost.
NICENESS_ON_HOST = 10


class Saver:
    """What a run needs for saving: its thread, and the directories that are locked for it.

    The thread ends with `close`, or when there has been nothing to do for a while. It does not keep a process alive that leaves at once, but a process that
    ends in order waits for it.
    Leaving the context, or `close`, waits too.

    Args:
        niceness: By how much the thread gives way to others, on Linux: what trains on the host's cores shall not wait for it.

    >>> done = []
    >>> with Saver() as saver:
    ...     taken = saver.submit(lambda: done.append("best")), saver.submit(lambda: done.append("regular"))
    >>> done
    ['best', 'regular']
    """

    def __init__(self, *, niceness: int = 0) -> None:
        self._niceness = niceness
        self._changed = threading.Condition()
        self._jobs: collections.deque[tuple[Job, bool]] = collections.deque()
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._is_closing = False
        self._is_abandoned = False
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, job: Job, *, is_save: bool = True) -> bool:
        """Has a job done after all before it; returns whether it will be, which it will not after an earlier one failed or when all was abandoned.

        Args:
            job: Called without arguments in another thread.
            is_save: Whether it holds a copy of the state. At most one such job waits while another is done: the next one blocks until there is room.
        """
        if is_save:
            self.wait_for_room()
        with self._changed:
            if self._is_abandoned or self._error is not None:
                return False
            self._jobs.append((job, is_save))
            self._changed.notify_all()
            self._is_closing = False
            _WORKING.add(self)
            if self._thread is None:
                # A daemon, since the interpreter would wait for any other even where the user wants to leave at once; atexit waits for this one.
                self._thread = threading.Thread(target=self._work, name="fitflax-saver", daemon=True)
                self._thread.start()
            return True

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being done, and nothing waits."""
        return not self._is_busy and not self._jobs

    def wait_for_room(self) -> None:
        """Waits until a save would not block: called before the state is copied, it keeps the copies to one that is being written and one that waits."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._is_busy and any(is_save for _, is_save in self._jobs)))

    def settle(self) -> BaseException | None:
        """Waits until everything is done, and returns what a job raised, once."""
        try:
            with self._changed:
                self._changed.wait_for(lambda: self.is_idle or self._is_abandoned)
                error, self._error = self._error, None
                return error
        except KeyboardInterrupt:
            self.abandon()
            raise

    def wait(self) -> None:
        """Waits until everything is done.

        Raises:
            Exception: What a job raised.
        """
        error = self.settle()
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Leaves out what has not begun, and waits for nothing any more: the user wants to leave at once."""
        with self._changed:
            self._is_abandoned = True
            self._jobs.clear()
            self._changed.notify_all()
        _WORKING.discard(self)

    def close(self) -> None:
        """Waits, and gives the directories back.

        Raises:
            Exception: What a job raised.
        """
        try:
            self.wait()
        finally:
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
                thread = None if self._is_abandoned else self._thread
            if thread is not None:
                thread.join()
            if self._thread is None:  # Otherwise the thread gives them back when it is done.
                release_all(self)

    def lock(self, directory: Path) -> None:
        """Locks a directory for this run until `close`.

        Raises:
            DirectoryInUseError: Another run has it.
            OSError: The lock file cannot be made.
        """
        other = holder_of(directory)
        if isinstance(other, Saver):
            other.finish_abandoned()
        elif other is not None:
            release_all(other)  # A store that is used by itself: the run takes over.
        lock_directory(directory, self)

    def finish_abandoned(self) -> None:
        """Waits for the one job that may still run after `abandon`, in a process that went on."""
        thread = self._thread
        if self._is_abandoned and thread is not None:
            thread.join()

    def _work(self) -> None:
        if self._niceness and sys.platform == "linux":  # Elsewhere it would be the whole process's.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (job := self._next_job()) is not None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 (raised in the thread that trains)
                with self._changed:
                    self._error = error
                    self._jobs.clear()
            del job  # With it the copy of the state.

    def _next_job(self) -> Job | None:
        """Returns what to do next, or `None` for the thread's end."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            if not self._jobs:
                _WORKING.discard(self)
                self._changed.wait_for(lambda: self._jobs or self._is_closing or self._is_abandoned, timeout=IDLE_SECONDS)
            if not self._jobs:
                self._thread = None
                if self._is_abandoned:
                    release_all(self)
                return None
            self._is_busy = True
            return self._jobs.popleft()[0]


_WORKING: "weakref.WeakSet[Saver]" = weakref.WeakSet()


def _finish_all() -> None:
    for saver in list(_WORKING):
        try:
            saver.wait()
        except Exception as error:  # noqa: BLE001 (nobody is left who could catch it)
            warnings.warn(f"A save failed while the process ended: {error}", FitflaxWarning, stacklevel=1)


atexit.register(_finish_all)
# A forked child has the table, but not the threads that would empty it.
os.register_at_fork(after_in_child=lambda: _WORKING.clear())
