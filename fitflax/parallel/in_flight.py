"""`InFlight`: limits how many steps are dispatched but not finished."""

import time
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["MAX_SHORT_STEPS", "InFlight", "limit_for"]

# Memory on the devices for the batches of unfinished steps.
_MAX_BATCH_BYTES = 2**28
# Steps below this duration are short: the host is then at most a fraction of a second ahead.
_SHORT_SECONDS = 0.005
# For one CPU device.
MAX_SHORT_STEPS = 32


def limit_for(platform: str, num_devices: int) -> int:
    """Returns how many steps may be in flight on such devices.

    Two on several CPU devices: with more, collectives that wait for each other can fill the thread pool of XLA. Otherwise there need to be enough to
    hide the dispatch; a GPU finishes a small step while the host wakes up from waiting for another one.

    >>> limit_for("cpu", 8), limit_for("cpu", 1), limit_for("gpu", 1)
    (2, 8, 32)
    """
    if platform != "cpu":
        return 32
    return 2 if num_devices > 1 else 8


class Waitable(Protocol):
    """The result of a dispatched step."""

    def wait(self) -> None:
        """Waits until the step has finished."""


class InFlight:
    """Limits how many dispatched steps may be unfinished, to bound memory and to prevent a deadlock of collectives on CPU.

    `limit` is the maximum number of steps, reduced for large batches, but not below two; `most` is that of short steps, for which waking up the host
    takes a noticeable part of the time.
    """

    def __init__(self, limit: int, most: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._base_limit, self._limit, self._max_limit = limit, limit, max(limit, most)
        self._clock = clock
        self._kind: Any = None
        self._num_other_kind = 0  # Number of pending steps of another kind.
        self._pending: list[Waitable] = []
        self._num_bytes = 0  # Of the newest batch; only the last batch of a pass may differ.

    def make_room(self, kind: Any = None) -> None:
        """Waits until one more step may be dispatched; to wait less often, until half are finished. Steps of a `kind` take about the same time."""
        if kind is not self._kind:
            self._kind, self._limit, self._num_other_kind = kind, self._base_limit, len(self._pending)
        limit = self._limit if self._num_bytes * self._limit <= _MAX_BATCH_BYTES else min(self._limit, max(2, _MAX_BATCH_BYTES // self._num_bytes))
        count = len(self._pending)
        if count >= limit:
            done, begin = max((limit + 1) // 2, count - limit + 1), self._clock()
            self._pending[done - 1].wait()
            if done > self._num_other_kind:
                is_short = self._clock() - begin < _SHORT_SECONDS * done
                self._limit = min(2 * self._limit, self._max_limit) if is_short else self._base_limit
            self._num_other_kind = max(0, self._num_other_kind - done)
            del self._pending[:done]

    def add(self, values: Waitable, num_bytes: int) -> None:
        """Adds the results of a dispatched step, and the size of its batch in bytes."""
        self._pending.append(values)
        self._num_bytes = num_bytes
