"""`LearningRateScheduler`: sets a learning rate for each epoch."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase, TrainerView
from fitflax.errors import CallbackError, OptimizerError
from fitflax.logs import Logs

__all__ = ["LearningRateScheduler", "check_rate"]


class LearningRateScheduler(Callback):
    """Sets the learning rate at the beginning of each epoch, and logs it as `learning_rate` at the end.

    For a rate that changes with the step, pass an optax schedule to the optimizer instead. A resume inside an epoch continues with that epoch's rate.

    Args:
        schedule: A function `schedule(epoch)` or `schedule(epoch, learning_rate)` that returns the new rate. Epochs count from 0; `learning_rate` is the
            current rate.

    Raises:
        CallbackError: `schedule` takes other arguments, or an optional second argument, whose meaning is unclear.
        OptimizerError: Before the first step: the optimizer's rate cannot be set. Later: `schedule` did not return a valid rate.

    >>> LearningRateScheduler(lambda epoch: 0.1 * 0.5**epoch).schedule(1)
    0.05
    """

    phase = Phase.CHANGE
    needs_trainer = True
    may_prefetch = True

    def __init__(self, schedule: Callable[[int], Any] | Callable[[int, float], Any]) -> None:
        self._takes_rate = _takes_rate(schedule)
        self.schedule: Callable[..., Any] = schedule
        # The last epoch that began, and the rate before it. If a run is interrupted before the epoch's first step, a resume begins the epoch again.
        self._epoch: int | None = None
        self._rate_before: float | None = None

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._epoch = self._rate_before = None
        check_rate(type(self).__name__, self.trainer)

    @override
    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any]) -> None:
        if not self._takes_rate:
            self._set(epoch, self.schedule(epoch))
            return
        if epoch != self._epoch:
            self._epoch, self._rate_before = epoch, self.trainer.learning_rate
        self._set(epoch, self.schedule(epoch, self._rate_before))

    def _set(self, epoch: int, rate: Any) -> None:
        try:
            self.trainer.learning_rate = rate
        except OptimizerError as error:
            raise OptimizerError(f"LearningRateScheduler: the schedule returned {rate!r} for epoch {epoch}. {error}") from error

    @override
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        # This waits for the epoch's last step, as logging the epoch does anyway.
        logs["learning_rate"] = self.trainer.learning_rate

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._epoch is None else {"epoch": self._epoch, "rate_before": self._rate_before}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._rate_before = int(state["epoch"]), float(state["rate_before"])


def _takes_rate(schedule: Any) -> bool:
    """Returns whether `schedule` takes the current rate as its second argument."""
    wanted = "LearningRateScheduler needs a function schedule(epoch) or schedule(epoch, learning_rate)."
    if not callable(schedule):
        raise CallbackError(f"{wanted} Received: {schedule!r}.")
    try:
        signature = inspect.signature(schedule)
    except (TypeError, ValueError) as error:
        raise CallbackError(f"{wanted} The arguments of {schedule!r} cannot be inspected. Wrap it: lambda epoch: ...") from error
    takes_one, takes_two = _accepts(signature, 0), _accepts(signature, 0, 0.0)
    if takes_one == takes_two:
        # With `lambda epoch, base=0.1: ...` the rate would silently replace the base.
        which = "which could be either. Wrap it: lambda epoch: ..." if takes_one else "which is neither."
        raise CallbackError(f"{wanted} Received: {schedule!r} with the arguments {signature}, {which}")
    return takes_two


def _accepts(signature: inspect.Signature, *arguments: Any) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def check_rate(owner: str, trainer: TrainerView) -> None:
    """Checks that the learning rate can be read and set, and raises an `OptimizerError` otherwise."""
    try:
        trainer.learning_rate = trainer.learning_rate
    except OptimizerError as error:
        raise OptimizerError(f"{owner} needs to set the learning rate. {error}") from error
