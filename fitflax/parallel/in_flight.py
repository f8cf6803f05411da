"""`InFlight`: how many steps may be dispatched and not yet finished."""

from typing import Protocol

__all__ = ["InFlight", "limit_for"]

# What batches of unfinished steps may take on the devices.
_MOST_BYTES = 2**28


def limit_for(platform: str, num_devices: int) -> int:
    """Returns how many steps may be in flight on such devices.

    Two on several CPU devices: more can fill XLA's thread pool with collectives that wait for each other. Others only need enough to hide the dispatch; a GPU
    makes a small step while the host wakes up from its wait for another.

    >>> limit_for("cpu", 8), limit_for("cpu", 1), limit_for("gpu", 1)
    (2, 8, 32)
    """
    if platform != "cpu":
        return 32
    return 2 if num_devices > 1 else 8


class Waitable(Protocol):
    """What a dispatched step leaves."""

    def wait(self) -> None:
        """Waits until the step has finished."""


class InFlight:
    """Bounds how many dispatched steps may be unfinished: memory, and on CPU a deadlock of collectives, depend on it.

    Args:
        limit: How many; fewer where their batches are large, but never fewer than two, or one where that is the limit.

    >>> class Step:
    ...     def __init__(self, name): self.name = name
    ...     def wait(self): print("waits for", self.name)
    >>> steps = InFlight(4)
    >>> for name in "abcdef":
    ...     steps.make_room()
    ...     steps.add(Step(name), num_bytes=100)
    waits for b
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending: list[Waitable] = []
        self._num_bytes = 0  # Of the newest batch; they are all alike but for the last one of a pass.

    def make_room(self) -> None:
        """Waits until one more step may be dispatched; not every time, but then until half of them are finished, which one wait can tell."""
        limit = self._limit if self._num_bytes * self._limit <= _MOST_BYTES else min(self._limit, max(2, _MOST_BYTES // self._num_bytes))
        count = len(self._pending)
        if count >= limit:
            done = max((limit + 1) // 2, count - limit + 1)
            self._pending[done - 1].wait()
            del self._pending[:done]

    def add(self, values: Waitable, num_bytes: int) -> None:
        """Notes the values of a step just dispatched, and how many bytes its batch has."""
        self._pending.append(values)
        self._num_bytes = num_bytes
