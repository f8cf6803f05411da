"""`TimeSpent`: measures where the time of a call goes."""

import contextlib
import time
from collections.abc import Callable, Iterator

__all__ = ["TimeSpent"]


class TimeSpent:
    """Seconds of wall-clock time by activity. Time that is not claimed is the time for running steps and waiting for them.

    Args:
        clock: A function that returns seconds; `time.perf_counter` by default.

    Attributes:
        seconds: Seconds by activity: `"compiling"` (including tracing and initialization), `"data"` (waiting for it), `"evaluating"`, `"callbacks"` (all
            hooks except batch hooks) and `"saving"`.
        examples: The number of training examples, without padding.

    >>> now = iter(range(100))
    >>> spent = TimeSpent(lambda: next(now))
    >>> with spent.on("evaluating"):
    ...     with spent.on("compiling"):
    ...         pass
    >>> spent.seconds["evaluating"], spent.seconds["compiling"], spent.total, spent.stepping
    (2.0, 1.0, 5, 3.0)
    >>> round(sum(spent.shares.values()), 12)
    1.0
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.clock = clock or time.perf_counter
        self.seconds = {"compiling": 0.0, "data": 0.0, "evaluating": 0.0, "callbacks": 0.0, "saving": 0.0}
        self.examples = 0
        self._begin = self.clock()
        self._nested = 0.0  # Seconds claimed inside the current block.

    @contextlib.contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Claims the time of a block, except what is claimed inside it."""
        begin, before = self.clock(), self._nested
        self._nested = 0.0
        try:
            yield
        finally:
            whole = self.clock() - begin
            self.seconds[what] += whole - self._nested
            self._nested = before + whole

    def add(self, what: str, seconds: float) -> None:
        """Claims seconds that have just passed; cheaper than `on`."""
        self.seconds[what] += seconds
        self._nested += seconds

    def move(self, source: str, target: str, seconds: float) -> None:
        """Moves claimed seconds from one activity to another."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    @property
    def total(self) -> float:
        """Seconds since this object was created."""
        return self.clock() - self._begin

    @property
    def stepping(self) -> float:
        """Seconds that are not claimed."""
        return max(self.total - sum(self.seconds.values()), 0.0)

    @property
    def shares(self) -> dict[str, float]:
        """The fraction of time by activity, including `"stepping"`; the sum is 1."""
        seconds = {"stepping": self.stepping, **self.seconds}
        total = sum(seconds.values())
        return {what: one / total if total else float(what == "stepping") for what, one in seconds.items()}
