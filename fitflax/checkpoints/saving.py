"""A run's saves, one after another in a thread, while training goes on.

Whoever saves puts host values that nobody changes any more into a job; jobs are done in the order in which they came. When one fails, those behind it are
left out, as they would have been without a thread: a checkpoint that names another one must not outlive it. The error waits for whoever comes next, or for
the end of the run.
"""

import atexit
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from fitflax.background import Background
from fitflax.checkpoints.lock import holder_of, lock_directory, release_all
from fitflax.errors import warn

__all__ = ["NICENESS_ON_HOST", "Saver"]

# Of the saver of a run whose steps are computed by the host's own cores: measured on two of them, it takes a third off the time that small saves cost.
NICENESS_ON_HOST = 10


class _Job:
    """What is done in the thread, what is done if it is left out, and whether it holds a copy of the state."""

    __slots__ = ("do", "is_save", "left_out", "saver")

    def __init__(self, saver: "Saver", do: Callable[[], Any], is_save: bool, left_out: Callable[[], Any] | None = None) -> None:
        self.saver = saver
        self.do = do
        self.is_save = is_save
        self.left_out = left_out

    def __call__(self) -> None:
        if not self.saver.has_failed:  # Since it was taken.
            self.do()
        elif self.left_out is not None:
            self.left_out()


class Saver:
    """What a run needs for saving: its thread, and the directories that are locked for it.

    The thread ends with `close`, or when there has been nothing to do for a while. It does not keep a process alive that leaves at once, but a process that
    ends in order waits for it.
    Leaving the context, or `close`, waits too; `let_go` does not.

    Attributes:
        has_lost: Whether anything that was to be saved was not, whoever has heard of it.

    Args:
        niceness: By how much the thread gives way to others, on Linux: what trains on the host's cores shall not wait for it.

    >>> done = []
    >>> with Saver() as saver:
    ...     taken = saver.submit(lambda: done.append("best")), saver.submit(lambda: done.append("regular"))
    >>> done
    ['best', 'regular']
    """

    def __init__(self, *, niceness: int = 0) -> None:
        self._thread = Background("fitflax-saver", on_error=self._fail, on_end=self._give_back, niceness=niceness)
        self._is_abandoned = self._is_let_go = False
        self._error: BaseException | None = None
        self.has_lost = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, do: Callable[[], Any], *, is_save: bool = True, left_out: Callable[[], Any] | None = None) -> bool:
        """Has a job done after all before it; returns whether it will be, which it will not after an earlier one failed or when all was abandoned.

        Args:
            do: Called without arguments in another thread.
            is_save: Whether it holds a copy of the state. At most one such job waits while another is done: the next one blocks until there is room.
            left_out: Called, in any thread, if the job was taken and will not be done after all.
        """
        if is_save:
            self.wait_for_room()
        if self._is_abandoned or self.has_failed:
            return False
        _WORKING.add(self)
        self._thread.submit(_Job(self, do, is_save, left_out))
        return True

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being done, and nothing waits."""
        return self._thread.is_idle

    @property
    def failure(self) -> BaseException | None:
        """What a job raised that nobody has heard of."""
        return self._error

    @property
    def has_failed(self) -> bool:
        """Whether a job has failed and nobody has heard of it."""
        return self._error is not None

    def wait_for_room(self) -> None:
        """Waits until a save would not block: called before the state is copied, it keeps the copies to one that is being written and one that waits."""
        self._thread.wait_until(lambda: sum(isinstance(job, _Job) and job.is_save for job in self._thread.waiting) + self._thread.is_busy < 2)

    def settle(self) -> BaseException | None:
        """Waits until everything is done, and returns what a job raised, once."""
        try:
            self._thread.wait_until(lambda: self.is_idle or self._is_abandoned)
        except KeyboardInterrupt:
            self.abandon()
            raise
        error, self._error = self._error, None
        return error

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
        self._is_abandoned = True
        self._leave_out()
        self._thread.end(wait=False)
        _WORKING.discard(self)

    def close(self) -> None:
        """Waits, and gives the directories back.

        Raises:
            Exception: What a job raised.
        """
        try:
            self.wait()
        finally:
            self._thread.end(wait=not self._is_abandoned)
            if not self._thread.has_thread:  # Otherwise the thread gives them back when it is done.
                release_all(self)
            _WORKING.discard(self)

    def let_go(self) -> None:
        """Does what `close` does, but waits for nothing: the thread gives the directories back once everything is done, and warns of what failed.

        For whoever does not know in which thread this is: that which collects garbage may be the saver's own, which would wait for itself.
        """
        self._is_let_go = True
        self._thread.end(wait=False)
        if not self._thread.has_thread:
            self._give_back()

    def lock(self, directory: Path) -> None:
        """Locks a directory for this run until `close`.

        Raises:
            DirectoryInUseError: Another run has it.
            OSError: The lock file cannot be made.
        """
        other = holder_of(directory)
        if isinstance(other, Saver):
            other.finish_given_up()
        elif other is not None:
            release_all(other)  # A store that is used by itself: the run takes over.
        lock_directory(directory, self)

    @property
    def is_given_up(self) -> bool:
        """Whether its run has no more to save: `abandon`, or `let_go`."""
        return self._is_abandoned or self._is_let_go

    def finish_given_up(self) -> None:
        """Waits for what may still be done after `abandon`, which is one job, in a process that went on; and after `let_go`."""
        if self._is_abandoned:
            self._thread.wait_until(lambda: not self._thread.is_busy)
        elif self._is_let_go:
            self._thread.wait_until(lambda: self._thread.is_idle)
        else:
            return
        release_all(self)

    # -- in the thread --

    def _fail(self, error: BaseException) -> None:
        self._error, self.has_lost = error, True
        self._leave_out()

    def _leave_out(self) -> None:
        """Leaves out what has not begun."""
        waiting = self._thread.waiting
        self._thread.clear()
        for job in waiting:
            if isinstance(job, _Job) and job.left_out is not None:
                job.left_out()

    def _give_back(self) -> None:
        if self._is_abandoned or self._is_let_go:
            release_all(self)
        if self._is_let_go and self._error is not None:
            error, self._error = self._error, None
            warn(f"A save failed after its run was given up without being closed: {error}")


_WORKING: "weakref.WeakSet[Saver]" = weakref.WeakSet()


def _finish_all() -> None:
    for saver in list(_WORKING):
        try:
            saver.wait()
        except Exception as error:  # noqa: BLE001 (nobody is left who could catch it)
            warn(f"A save failed while the process ended: {error}")


atexit.register(_finish_all)
# A forked child has the table, but not the threads that would empty it.
os.register_at_fork(after_in_child=lambda: _WORKING.clear())
