"""`ReduceLROnPlateau`: reduces the learning rate when a monitored value has stopped improving."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase
from fitflax.callbacks.learning_rate_scheduler import check_rate
from fitflax.callbacks.monitor import Monitor
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.errors import CallbackError
from fitflax.integers import is_integer
from fitflax.logs import Logs

__all__ = ["ReduceLROnPlateau"]


class ReduceLROnPlateau(Callback):
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

    phase = Phase.DECIDE
    needs_gradients_norm = False
    needs_trainer = True
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
        if not 0 < factor < 1:
            raise CallbackError(f"ReduceLROnPlateau(factor=...) must be between 0 and 1. Received: {factor!r}.")
        for name, count in (("patience", patience), ("cooldown", cooldown)):
            if not is_integer(count, 0):
                raise CallbackError(f"ReduceLROnPlateau({name}=...) must be an integer of at least 0. Received: {count!r}.")
        if not 0 <= min_lr < float("inf"):
            raise CallbackError(f"ReduceLROnPlateau(min_lr=...) must be a finite number of at least 0. Received: {min_lr!r}.")
        self.factor = factor
        self.patience = int(patience)
        self.cooldown = int(cooldown)
        self.min_lr = min_lr
        self._monitor = Monitor("ReduceLROnPlateau", monitor, mode, min_delta)
        self._reset()

    def _reset(self) -> None:
        self.wait = 0
        self.best: float | None = None
        self._cooldown_left = 0

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._reset()
        self._monitor.check_sets(self.params.get("validation_sets"))
        check_rate(type(self).__name__, self.trainer)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        # This waits for the epoch's last step, as logging the epoch does anyway.
        rate = self.trainer.learning_rate
        logs.setdefault("learning_rate", rate)
        self._observe(logs, rate)

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        # A validation in the middle of an epoch; those at its end come with on_epoch_end.
        if not checkpoint.epoch_ends and self._monitor.key in checkpoint.evaluated:
            self._observe(checkpoint.logs)

    @override
    def load_closing(self, step: int, epoch: int, logs: Logs) -> None:
        self._observe(logs)

    def _observe(self, logs: Logs, rate: float | None = None) -> None:
        value = self._monitor.value(logs, self.params.get("validation_sets", ()))
        if value is None:
            return
        # As in Keras, the observation that ends a cooldown counts.
        if self._cooldown_left:
            self._cooldown_left -= 1
            self.wait = 0
        if self._monitor.is_better(value, self.best):
            self.best, self.wait = value, 0
        elif not self._cooldown_left:
            self.wait += 1
            if self.wait >= self.patience:
                self._reduce(self.trainer.learning_rate if rate is None else rate)

    def _reduce(self, rate: float) -> None:
        # The rate is float32. Without the conversion, a rate that equals `min_lr` may compare as greater.
        if rate > np.float32(self.min_lr):
            self.trainer.learning_rate = max(rate * self.factor, self.min_lr)
            self.wait, self._cooldown_left = 0, self.cooldown

    @property
    @override
    def state_key(self) -> str:
        return f"{type(self).__name__}(monitor={self._monitor.key!r})"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"wait": self.wait, "best": self.best, "cooldown_left": self._cooldown_left, "direction": self._monitor.direction}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait, self.best, self._cooldown_left = int(state["wait"]), state["best"], int(state["cooldown_left"])
        self._monitor.restore_direction(state["direction"])
