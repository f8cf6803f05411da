"""`TimeSpent`: where the time of a call goes."""

import contextlib
import time
from collections.abc import Callable, Iterator

__all__ = ["TimeSpent"]


class TimeSpent:
    """Seconds of the host's clock, by what they went to. What nobody claims is time in which steps were made and waited for.

    Args:
        clock: Returns seconds; `time.perf_counter` by default.

    Attributes:
        seconds: By `"compiling"` (and tracing, and initializing), `"data"` (waiting for it), `"evaluating"`, `"callbacks"` (their hooks, but those of
            batches) and `"saving"`.
        examples: How many real examples were trained on.

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
        self._inner = 0.0  # What was claimed inside of what is being measured.

    @contextlib.contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Claims the time of a block, but for what is claimed inside of it."""
        begin, before = self.clock(), self._inner
        self._inner = 0.0
        try:
            yield
        finally:
            whole = self.clock() - begin
            self.seconds[what] += whole - self._inner
            self._inner = before + whole

    def add(self, what: str, seconds: float) -> None:
        """Claims some seconds that have just passed; costs less than `on`."""
        self.seconds[what] += seconds
        self._inner += seconds

    def move(self, source: str, target: str, seconds: float) -> None:
        """Gives some of what was claimed for one thing to another."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    @property
    def total(self) -> float:
        """All seconds since this object was made."""
        return self.clock() - self._begin

    @property
    def stepping(self) -> float:
        """The seconds that nobody has claimed."""
        return max(self.total - sum(self.seconds.values()), 0.0)

    @property
    def shares(self) -> dict[str, float]:
        """What part of the time went to what, `"stepping"` included; together 1."""
        seconds = {"stepping": self.stepping, **self.seconds}
        total = sum(seconds.values())
        return {what: one / total if total else float(what == "stepping") for what, one in seconds.items()}
