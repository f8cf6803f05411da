"""`StepLogger`, base of `TensorBoard` and `TrackerLogger`, which log values of training and evaluations by step. `Clock` measures the speed of the run."""

import abc
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase, PlainRun, check_trigger
from fitflax.callbacks.summaries import check_images, flatten_sown
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.errors import CallbackError, NotReadyError
from fitflax.logs import Logs
from fitflax.optimizers import ONLY_RATE
from fitflax.state import PyTree
from fitflax.triggers import Trigger
from fitflax.triggers import every as make_every


class Stamp(NamedTuple):
    """The training thread's time at a log point."""

    step: int
    examples: int | None  # The number of examples used so far; `None` if unknown.
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
        self.add_test(time.monotonic() - self._test_begin)

    def add_test(self, seconds: float) -> None:
        """Records the time of an evaluation."""
        self._test_seconds += seconds

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


class StepLogger(Callback):
    """Base class of callbacks that log training when `every` fires and at the end of each epoch, and evaluations whenever they run."""

    phase = Phase.RECORD
    writes_files = True
    main_process_only = True

    def __init__(self, *, every: Trigger | None, sown: str | None) -> None:
        check_trigger(type(self).__name__, every)
        if sown is not None and not isinstance(sown, str):
            raise CallbackError(f"{type(self).__name__}(sown=...) takes the name of a collection, or None. Received: {sown!r}.")
        self.every = every or make_every(steps=50)
        self.needs_sown = () if sown is None else (sown,)
        self._clock = Clock()
        self._plain_run: PlainRun | None = None  # Set while it is used as a plain function.
        self._seconds_evaluating = 0.0  # From the beginning of that run to its last checkpoint.

    @property
    @abc.abstractmethod
    def _is_open(self) -> bool:
        """Whether a run is open."""

    def _open_plain_run(self, checkpoint: Checkpoint) -> bool | None:
        """Opens the run of a checkpoint if this callback is used as a plain function, or continues the last one if it was closed.

        Returns whether the opened run continues the last one; `None` if none was opened.
        """
        if self._is_open and self._plain_run is None:
            return None
        plain = self._plain_run or PlainRun()
        last, continues = plain.step, plain.continues(checkpoint)
        is_opened = not self._is_open or not continues
        if is_opened:
            self.open_run(checkpoint.run_id, last if continues else checkpoint.run.position.moment.start_step)
        self._plain_run = plain
        before, self._seconds_evaluating = self._seconds_evaluating if continues else 0.0, checkpoint.run.timer.seconds_evaluating
        self._clock.add_test(max(self._seconds_evaluating - before, 0.0))
        return continues if is_opened else None

    @override
    def on_test_begin(self, logs: Mapping[str, Any]) -> None:
        self._clock.begin_test()

    @override
    def on_test_end(self, logs: Logs) -> None:
        self._clock.end_test()

    @override
    def wants(self, checkpoint: Checkpoint) -> bool:
        is_plain = self._plain_run is not None or not self._is_open
        ends = checkpoint.epoch_ends or (is_plain and checkpoint.is_last)  # `fit` calls `on_closing` if it ends inside an epoch.
        return not checkpoint.run.position.is_repeat and (ends or bool(checkpoint.evaluations))

    def _kept(self, read: Callable[[], PyTree]) -> PyTree:
        """Returns what a step has kept for this callback. Loops without `fit` may not have kept it."""
        try:
            return read()
        except NotReadyError:
            if self._plain_run is None:
                raise
            return {}

    def _sown(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Returns the sown values of a checkpoint's step by tag."""
        if not self.needs_sown or checkpoint.run.step_values is None:
            return {}
        sown = self._kept(lambda: checkpoint.sown)
        values = {tag: value for name in self.needs_sown for tag, value in flatten_sown(name, sown.get(name, {})).items()}
        for tag, value in values.items():
            check_images(tag, value)
        return values


def learning_rates(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the learning rates of a checkpoint by log key, still on the device."""
    return {label if label == ONLY_RATE else f"{ONLY_RATE}/{label}": rate for label, rate in checkpoint.learning_rates.items()}
