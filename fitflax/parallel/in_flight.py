"""`InFlight`: how many steps may be dispatched and not yet finished."""

from typing import Protocol

__all__ = ["InFlight"]


class Waitable(Protocol):
    """What a dispatched step leaves."""

    def wait(self) -> None:
        """Waits until the step has finished."""


class InFlight:
    """Bounds how many dispatched steps may be unfinished: memory, and on CPU a deadlock of collectives, depend on it.

    Args:
        limit: How many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending: list[Waitable] = []

    def make_room(self) -> None:
        """Waits until one more step may be dispatched; not every time, but then until half of them are finished, which one wait can tell."""
        if len(self._pending) >= self._limit:
            half = (self._limit + 1) // 2
            self._pending[half - 1].wait()
            del self._pending[:half]

    def add(self, values: Waitable) -> None:
        """Notes the values of a step just dispatched."""
        self._pending.append(values)
