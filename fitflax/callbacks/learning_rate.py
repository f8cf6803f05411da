"""Callbacks that set the learning rate: `LearningRateScheduler` for each epoch, `ReduceLROnPlateau` when a value has stopped improving."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase, TrainerView
from fitflax.callbacks.early_stopping import MonitorCallback
from fitflax.errors import CallbackError, OptimizerError, integer_of
from fitflax.logs import Logs


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
        _check_rate(type(self).__name__, self.trainer)

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


class ReduceLROnPlateau(MonitorCallback):
    """Multiplies the learning rate by `factor` when a monitored value has not improved for `patience` observations, one per epoch or validation.

    The learning rate that was used in the epoch is logged as `learning_rate`. If several of these callbacks monitor the same value, pass them in the same
    order on a resume.

    Args:
        monitor: The flat name of the value.
        mode: `"min"`, `"max"`, or `None` for the direction that the loss or metric declares.
        factor: A number between 0 and 1: `new_rate = max(rate * factor, min_lr)`.
        patience: The number of observations without improvement after which the rate is reduced; 0 and 1 both reduce it at the first.
        min_delta: The change that an improvement must exceed.
        cooldown: The number of observations to wait after a reduction. As in Keras, the last of them counts toward `patience` again.
        min_lr: The minimum learning rate.

    Raises:
        CallbackError: A number is out of range.
        OptimizerError: Before the first step: the optimizer's rate cannot be set.

    >>> ReduceLROnPlateau("val_loss", factor=0.5, patience=3).factor
    0.5
    """

    may_repeat = True

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        mode: str | None = None,
        factor: float = 0.1,
        patience: int = 10,
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        if not 0 < factor < 1:
            raise CallbackError(f"ReduceLROnPlateau(factor=...) must be between 0 and 1. Received: {factor!r}.")
        if not 0 <= min_lr < float("inf"):
            raise CallbackError(f"ReduceLROnPlateau(min_lr=...) must be a finite number of at least 0. Received: {min_lr!r}.")
        self.factor = factor
        self.patience = integer_of("ReduceLROnPlateau(patience=...)", patience, error=CallbackError)
        self.cooldown = integer_of("ReduceLROnPlateau(cooldown=...)", cooldown, error=CallbackError)
        self.min_lr = min_lr
        self._reset()

    def _reset(self) -> None:
        self.wait = 0
        self.best: float | None = None
        self._cooldown_left = 0
        self._epoch_rate: float | None = None  # The learning rate at the end of an epoch, kept because reading it waits for the device.

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._reset()
        super().on_train_begin(logs)
        _check_rate(type(self).__name__, self.trainer)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        # This waits for the epoch's last step, as logging the epoch does anyway.
        self._epoch_rate = self.trainer.learning_rate
        logs.setdefault("learning_rate", self._epoch_rate)
        super().on_epoch_end(epoch, logs)
        self._epoch_rate = None

    @override
    def _observe(self, epoch: int, value: float) -> None:
        # As in Keras, the observation that ends a cooldown counts.
        if self._cooldown_left:
            self._cooldown_left -= 1
            self.wait = 0
        if self._monitor.is_better(value, self.best):
            self.best, self.wait = value, 0
        elif not self._cooldown_left:
            self.wait += 1
            if self.wait >= self.patience:
                self._reduce(self.trainer.learning_rate if self._epoch_rate is None else self._epoch_rate)

    def _reduce(self, rate: float) -> None:
        # The rate is float32. Without the conversion, a rate that equals `min_lr` may compare as greater.
        if rate > np.float32(self.min_lr):
            self.trainer.learning_rate = max(rate * self.factor, self.min_lr)
            self.wait, self._cooldown_left = 0, self.cooldown

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"wait": self.wait, "best": self.best, "cooldown_left": self._cooldown_left, "direction": self._monitor.direction}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait, self.best, self._cooldown_left = int(state["wait"]), state["best"], int(state["cooldown_left"])
        self._monitor.direction = state["direction"]


def _takes_rate(schedule: Any) -> bool:
    """Returns whether `schedule` takes the current rate as its second argument."""
    wanted = "LearningRateScheduler needs a function schedule(epoch) or schedule(epoch, learning_rate)."
    if not callable(schedule):
        raise CallbackError(f"{wanted} Received: {schedule!r}.")
    try:
        signature = inspect.signature(schedule)
    except (TypeError, ValueError) as error:
        raise CallbackError(f"{wanted} The arguments of {schedule!r} cannot be inspected. Wrap it: lambda epoch: ...") from error
    accepted = []
    for arguments in ((0,), (0, 0.0)):
        with contextlib.suppress(TypeError):
            signature.bind(*arguments)
            accepted.append(arguments)
    if len(accepted) != 1:
        # With `lambda epoch, base=0.1: ...` the rate would silently replace the base.
        which = "which could be either. Wrap it: lambda epoch: ..." if accepted else "which is neither."
        raise CallbackError(f"{wanted} Received: {schedule!r} with the arguments {signature}, {which}")
    return len(accepted[0]) == 2


def _check_rate(owner: str, trainer: TrainerView) -> None:
    """Checks that the learning rate can be read and set, and raises an `OptimizerError` otherwise."""
    try:
        trainer.learning_rate = trainer.learning_rate
    except OptimizerError as error:
        raise OptimizerError(f"{owner} needs to set the learning rate. {error}") from error
