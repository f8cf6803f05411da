"""`Clock`: measures the speed of a run between two log points."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from fitflax.checkpoints.checkpoint import Checkpoint

__all__ = ["Clock", "Stamp"]


class Stamp(NamedTuple):
    """The training thread's time at a log point."""

    step: int
    examples: int | None  # Used so far, if known.
    dispatched: float  # The time at which the training thread reached the step, in seconds.
    evaluating: float = 0.0  # Seconds spent in evaluations since the last stamp.


class Clock:
    """Measures the speed between two log points.

    The training thread runs a few steps ahead of the device, and the writing thread may lag behind it. Neither can make an interval longer than it was, so
    the longer of the two times is used. At the start of an evaluation the device still finishes steps, so the interval that ends there is measured from
    the previous evaluation.

    Args:
        min_seconds: The shortest interval that is measured. Shorter ones are misleading after an evaluation, when the training thread refills its queue and
            dispatches dozens of steps without waiting.
    """

    def __init__(self, *, min_seconds: float = 0.0) -> None:
        self._min_seconds = min_seconds
        # Seconds of evaluations in an interval that was too short and is merged into the next one.
        self._skipped = 0.0
        self._last: tuple[Stamp, float] | None = None
        self._evaluated: Stamp | None = None
        self._test_begin = self._test_seconds = 0.0

    def begin_test(self) -> None:
        """Records the beginning of an evaluation."""
        self._test_begin = time.monotonic()

    def end_test(self) -> None:
        """Records the end of the evaluation."""
        self._test_seconds += time.monotonic() - self._test_begin

    def read(self, checkpoint: Checkpoint, params: Mapping[str, Any]) -> Stamp:
        """Returns a stamp of `checkpoint`. Called in the training thread, with the callback's `params`."""
        evaluating, self._test_seconds = self._test_seconds, 0.0
        position, size = checkpoint.data_position, params.get("num_examples")
        examples = (sum(checkpoint.run.position.used) or position.examples) + position.passes * size if size else None
        return Stamp(checkpoint.step, examples, time.monotonic(), evaluating)

    def rates(self, stamp: Stamp) -> dict[str, float]:
        """Returns the `time/...` values of the interval that ends at `stamp`. May be called later and in another thread, when the step is finished."""
        finished, last, evaluated = time.monotonic(), self._last, self._evaluated
        values = {"time/validation_seconds": stamp.evaluating} if stamp.evaluating else {}
        stamp = stamp._replace(evaluating=self._skipped + stamp.evaluating)
        if last is not None and stamp.dispatched - last[0].dispatched - stamp.evaluating < self._min_seconds:
            self._skipped = stamp.evaluating
            return values
        self._last, self._skipped = (stamp, finished), 0.0
        if stamp.evaluating or evaluated is None:
            self._evaluated = stamp
        before = evaluated if stamp.evaluating else last and last[0]
        if before is None or stamp.step <= before.step:
            return values
        seconds = stamp.dispatched - before.dispatched - stamp.evaluating
        if last is not None and not stamp.evaluating:
            seconds = max(seconds, finished - last[1])
        seconds = max(seconds, 1e-9)
        values["time/steps_per_second"] = (stamp.step - before.step) / seconds
        if stamp.examples is not None and before.examples is not None:
            values["time/examples_per_second"] = (stamp.examples - before.examples) / seconds
        return values
