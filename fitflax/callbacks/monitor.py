"""`Monitor`: follows one logged value, for callbacks that decide by it."""

from collections.abc import Mapping, Sequence
from typing import Any

from fitflax.errors import CallbackError, MonitorError, did_you_mean
from fitflax.logs import Logs, default_direction

__all__ = ["Monitor"]


class Monitor:
    """Follows one logged value and knows when it is better. Used by callbacks that decide.

    Args:
        owner: Who monitors, for errors.
        key: The flat name of the value.
        mode: `"min"`, `"max"`, or `None` for the direction that the loss or metric declares.
        min_delta: What an improvement must exceed.

    Raises:
        CallbackError: An unknown mode, or a negative `min_delta`.
    """

    def __init__(self, owner: str, key: str, mode: str | None, min_delta: float = 0.0) -> None:
        if mode not in (None, "min", "max"):
            raise CallbackError(f"{owner}(mode=...) must be 'min', 'max' or None. Received: {mode!r}.")
        if not min_delta >= 0:
            raise CallbackError(f"{owner}(min_delta=...) must be at least 0. Received: {min_delta!r}.")
        self.owner = owner
        self.key = key
        self.mode = mode
        self.min_delta = float(min_delta)
        self._direction = mode

    def check_sets(self, sets: Sequence[str] | None) -> None:
        """Checks, before a run, that a value of a validation can come.

        Raises:
            MonitorError: It is one of a validation, and there is no validation data.
        """
        if sets is not None and self.key.startswith("val_") and "val" not in sets:
            if sets:
                others = [f"{name}_{self.key.removeprefix('val_')}" for name in sets]
                raise MonitorError(f"{self.owner} monitors {self.key!r}, but the validation sets are {list(sets)}. Did you mean one of {others}?")
            advice = "Pass validation_data=, or monitor a value of training such as 'loss'."
            raise MonitorError(f"{self.owner} monitors {self.key!r}, but there is no validation data. {advice}")

    def value(self, logs: Mapping[str, Any], sets: Sequence[str] = ()) -> float | None:
        """Returns the monitored value, or `None` where it belongs to a validation that did not happen now.

        Args:
            logs: What is logged.
            sets: Names of the validation sets.

        Raises:
            MonitorError: It is not there, or which direction is better is not known.
        """
        if self.key not in logs:
            for name in sets:
                if self.key.startswith(f"{name}_") and not any(key.startswith(f"{name}_") for key in logs):
                    return None
            raise MonitorError(f"{self.owner} monitors {self.key!r}, but only {sorted(logs)} are logged.{did_you_mean(self.key, logs)}")
        value = logs[self.key]
        if getattr(value, "ndim", 0):
            raise MonitorError(f"{self.owner} monitors {self.key!r}, which is an array of shape {list(value.shape)}. Monitor a number.")
        if self.mode is None:
            kind = logs.kinds.get(self.key) if isinstance(logs, Logs) else None
            self._direction = (kind and kind.direction) or default_direction(self.key)
        if self._direction is None:
            raise MonitorError(f"{self.owner} monitors {self.key!r}, which declares no direction. Pass mode='min' or mode='max'.")
        return float(value)

    @property
    def direction(self) -> str | None:
        """`"min"` or `"max"`; `None` until the first value if it is the metric that declares it."""
        return self._direction

    def take_direction(self, direction: str | None) -> None:
        """Takes the direction that an earlier process found, before the first value of this one."""
        self._direction = self.mode or direction

    def is_better(self, value: float, best: float | None) -> bool:
        """Returns whether `value` improves on `best` by more than `min_delta`. NaN never does; anything else improves on `None`."""
        if value != value:
            return False
        if best is None or best != best:
            return True
        return value < best - self.min_delta if self._direction == "min" else value > best + self.min_delta
