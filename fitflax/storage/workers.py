"""Threads that no process waits for at exit, unlike those of `concurrent.futures`, which are joined before any exit handler."""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["Workers"]

_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Workers:
    """Daemon threads, started on demand."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Returns a future of the function's result."""
        future: Future[Any] = Future()
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # The interpreter is exiting.
                if not self._threads:
                    _do((future, function, arguments))
                    return future
            else:
                self._threads.append(thread)
        self._jobs.put((future, function, arguments))
        return future

    def end(self, *, wait: bool = True) -> None:
        """Cancels waiting jobs and ends the threads; with `wait`, after their current jobs."""
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job[0].cancel()
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads if wait else ():
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _do(job)
            del job


def _do(job: _Job) -> None:
    future, function, arguments = job
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*arguments))
    except BaseException as error:  # noqa: BLE001 (the future raises it)
        future.set_exception(error)
