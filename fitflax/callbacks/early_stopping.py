"""`EarlyStopping`: stops a run when a monitored value has stopped improving.

`Monitor` compares values of one log key; `MonitorCallback` is the base class of callbacks that observe it at each epoch and validation.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase, has_state
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.errors import CallbackError, MonitorError, did_you_mean, integer_of, warn
from fitflax.logs import Logs, default_direction


class Monitor:
    """Reads the value of one log key, and determines which of two values is better.

    `owner` is the callback's name for errors. `direction` is `None` before the first value if the metric declares it.
    """

    direction: str | None = None

    def __init__(self, owner: str, key: str, mode: str | None, min_delta: float = 0.0) -> None:
        if mode not in (None, "min", "max"):
            raise CallbackError(f"{owner}(mode=...) must be 'min', 'max' or None. Received: {mode!r}.")
        if not min_delta >= 0:
            raise CallbackError(f"{owner}(min_delta=...) must be at least 0. Received: {min_delta!r}.")
        self.owner = owner
        self.key = key
        self.mode = mode
        self.min_delta = float(min_delta)
        self.direction = mode

    def check_sets(self, sets: Sequence[str] | None) -> None:
        """Raises a `MonitorError` before a run if the key is one of validation and there is no validation data."""
        if sets is not None and self.key.startswith("val_") and "val" not in sets:
            if sets:
                others = [f"{name}_{self.key.removeprefix('val_')}" for name in sets]
                raise MonitorError(f"{self.owner} monitors {self.key!r}, but the validation sets are named {list(sets)}. Use one of {others}.")
            advice = "Pass validation_data=, or monitor a training value, such as 'loss'."
            raise MonitorError(f"{self.owner} monitors {self.key!r}, but there is no validation data. {advice}")

    def value(self, logs: Mapping[str, Any], sets: Sequence[str] = ()) -> float | None:
        """Returns the monitored value, or `None` if it is one of a validation that did not run."""
        if self.key not in logs:
            evaluated = logs.kinds if isinstance(logs, Logs) else logs  # Unlike `logs`, without keys that callbacks have added.
            for name in sets:
                if self.key.startswith(f"{name}_") and not any(key.startswith(f"{name}_") for key in evaluated):
                    return None
            raise MonitorError(f"{self.owner} monitors {self.key!r}, which is not logged.{did_you_mean(self.key, logs)} Logged keys: {sorted(logs)}.")
        value = logs[self.key]
        if getattr(value, "ndim", 0):
            raise MonitorError(f"{self.owner} monitors {self.key!r}, which is an array of shape {list(value.shape)}. Monitor a number.")
        kind = logs.kinds.get(self.key) if isinstance(logs, Logs) else None
        # A restarted run that has no batch left has no kinds, but the direction is in its checkpoint.
        self.direction = self.mode or (kind and kind.direction) or default_direction(self.key) or self.direction
        if self.direction is None:
            raise MonitorError(f"{self.owner} monitors {self.key!r}, but it is unknown whether higher or lower is better. Pass mode='min' or mode='max'.")
        return float(value)

    def is_better(self, value: float, best: float | None) -> bool:
        """Returns whether `value` improves on `best` by more than `min_delta`. NaN never does; other values improve on NaN and `None`."""
        if value != value:
            return False
        if best is None or best != best:
            return True
        return value < best - self.min_delta if self.direction == "min" else value > best + self.min_delta


class MonitorCallback(Callback):
    """Base class of callbacks that observe a monitored value at the end of each epoch and at each validation inside an epoch."""

    phase = Phase.DECIDE
    needs_gradients_norm = False
    needs_trainer = True
    _key_arguments = (("monitor", "_monitor.key"),)

    def __init__(self, monitor: str, mode: str | None, min_delta: float = 0.0) -> None:
        self._monitor = Monitor(type(self).__name__, monitor, mode, min_delta)

    @abc.abstractmethod
    def _observe(self, epoch: int, value: float) -> None:
        """Called with each value."""

    def _observe_logs(self, epoch: int, logs: Logs) -> None:
        value = self._monitor.value(logs, self.params.get("validation_sets", ()))
        if value is not None:
            self._observe(epoch, value)

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._monitor.check_sets(self.params.get("validation_sets"))

    @override
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._observe_logs(epoch, logs)

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        # Only validations inside an epoch; `on_epoch_end` observes those at its end.
        if not checkpoint.epoch_ends and self._monitor.key in checkpoint.evaluated:
            self._observe_logs(checkpoint.epoch, checkpoint.logs)

    @override
    def load_closing(self, step: int, epoch: int, logs: Logs) -> None:
        if self._monitor.key in logs:  # Otherwise, the value was not saved.
            self._observe_logs(epoch, logs)


class EarlyStopping(MonitorCallback):
    """Stops a run when a monitored value has not improved for `patience` observations, one per epoch or validation.

    A run that was stopped stays stopped after a resume. If several `EarlyStopping` callbacks monitor the same value, pass them in the same order on a resume.

    Args:
        monitor: The flat name of the value.
        mode: `"min"`, `"max"`, or `None` for the direction that the loss or metric declares.
        min_delta: The change that an improvement must exceed.
        patience: The number of consecutive observations without improvement after which the run stops; 0 and 1 both stop at the first.
        baseline: A value to beat. Until an observation is better than it, improvements do not reset the count of `patience`. Even then, the run stops only at
            an observation without improvement.
        restore_best: Whether to restore the parameters and collections of the best observation at the end, after the last checkpoint. If they are split between
            processes, it cannot be combined with callbacks that save the run; use the `restore_best` of `BestCheckpoint`.
        start_from_epoch: The index of the first epoch that is observed.
        stopping_threshold: A value at which training is good enough: it stops as soon as an observation is better.
        divergence_threshold: A value at which training has failed: it stops as soon as an observation is worse.

    Raises:
        CallbackError: A number is out of range.

    >>> EarlyStopping("val_loss", patience=3).patience
    3
    """

    may_repeat = True

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        mode: str | None = None,
        min_delta: float = 0.0,
        patience: int = 0,
        baseline: float | None = None,
        restore_best: bool = False,
        start_from_epoch: int = 0,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.patience = integer_of("EarlyStopping(patience=...)", patience, error=CallbackError)
        self.baseline = baseline
        self.restore_best = restore_best
        self.start_from_epoch = start_from_epoch
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self._in_fit = False
        self._reset()

    def _reset(self) -> None:
        self.wait = 0
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.stopped_epoch: int | None = None
        self._reason = ""
        self._best_leaves: list[Any] | None = None

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._reset()
        self._in_fit = True
        super().on_train_begin(logs)

    @override
    def _observe(self, epoch: int, value: float) -> None:
        if epoch < self.start_from_epoch:
            return
        monitor = self._monitor
        self.wait += 1
        has_improved = monitor.is_better(value, self.best)
        if has_improved:
            self.best, self.best_epoch = value, epoch
            if self.restore_best:
                # These leaves stay valid, because a state that was read is copied before the next step donates it.
                self._best_leaves = jax.tree.leaves(self._params_and_collections())
            if self.baseline is None or monitor.is_better(value, self.baseline):
                self.wait = 0
        if self.stopping_threshold is not None and monitor.is_better(value, self.stopping_threshold):
            self._stop(epoch, f"{monitor.key} is {value:g}, better than {self.stopping_threshold:g}")
        elif self.divergence_threshold is not None and monitor.is_better(self.divergence_threshold, value):
            self._stop(epoch, f"{monitor.key} is {value:g}, worse than {self.divergence_threshold:g}")
        # As in Keras, neither an improvement that does not reach the baseline nor the first epoch by itself stops the run.
        elif not has_improved and self.wait >= self.patience and (epoch > 0 or self.wait > 1):
            best = "it was never a number" if self.best is None or self.best_epoch is None else f"best: {self.best:g} (epoch {self.best_epoch + 1})"
            self._stop(epoch, f"{monitor.key} has not improved for {self.wait} observation{'s' if self.wait != 1 else ''}; {best}")

    def _stop(self, epoch: int, reason: str) -> None:
        self.stopped_epoch, self._reason = epoch, f"EarlyStopping: {reason}"
        self.trainer.stop(self._reason)

    def _params_and_collections(self) -> tuple[Any, Any, Any]:
        state = self.trainer.state
        return state.params, state.model_state, state.ema_params

    @override
    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        has_begun, self._in_fit = self._in_fit, False
        if not has_begun:  # The run failed before `on_train_begin`, so the leaves are those of an earlier `fit`.
            return
        if self.restore_best and self._best_leaves is not None and has_state(self.trainer):  # Otherwise, do not hide the error that ended the run.
            params, model_state, averages = jax.tree.unflatten(jax.tree.structure(self._params_and_collections()), self._best_leaves)
            self.trainer.replace_state(dataclasses.replace(self.trainer.state, params=params, model_state=model_state, ema_params=averages))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "wait": self.wait,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "stopped_epoch": self.stopped_epoch,
            "reason": self._reason,
            "direction": self._monitor.direction,
            "best_leaves": self._best_leaves,
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait = int(state["wait"])
        self.best, self.best_epoch, self.stopped_epoch = state["best"], state["best_epoch"], state["stopped_epoch"]
        self._reason = state["reason"]
        self._best_leaves = state["best_leaves"] if self.restore_best else None
        if self.restore_best and self.best_epoch is not None and self._best_leaves is None:
            warn(
                f"EarlyStopping cannot restore the parameters of the best epoch so far, {self.best_epoch + 1}: the resumed run had restore_best=False, so its "
                "checkpoint does not contain them. A better later epoch can be restored."
            )
        self._monitor.direction = state["direction"]
        if self.stopped_epoch is not None:
            self.trainer.stop(self._reason)
