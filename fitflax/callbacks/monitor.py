"""`Monitor`: compares values of one log key, for callbacks that act on it."""

from collections.abc import Mapping, Sequence
from typing import Any

from fitflax.errors import CallbackError, MonitorError, did_you_mean
from fitflax.logs import Logs, default_direction

__all__ = ["Monitor"]


class Monitor:
    """Reads the value of one log key, and knows which of two values is better. `owner` is the callback's name for errors."""

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
            for name in sets:
                if self.key.startswith(f"{name}_") and not any(key.startswith(f"{name}_") for key in logs):
                    return None
            raise MonitorError(f"{self.owner} monitors {self.key!r}, which is not logged.{did_you_mean(self.key, logs)} Logged keys: {sorted(logs)}.")
        value = logs[self.key]
        if getattr(value, "ndim", 0):
            raise MonitorError(f"{self.owner} monitors {self.key!r}, which is an array of shape {list(value.shape)}. Monitor a number.")
        if self.mode is None:
            kind = logs.kinds.get(self.key) if isinstance(logs, Logs) else None
            self._direction = (kind and kind.direction) or default_direction(self.key)
        if self._direction is None:
            raise MonitorError(f"{self.owner} monitors {self.key!r}, but it is unknown whether higher or lower is better. Pass mode='min' or mode='max'.")
        return float(value)

    @property
    def direction(self) -> str | None:
        """`"min"` or `"max"`. It is `None` before the first value if the metric declares the direction."""
        return self._direction

    def restore_direction(self, direction: str | None) -> None:
        """Restores the direction from a checkpoint."""
        self._direction = self.mode or direction

    def is_better(self, value: float, best: float | None) -> bool:
        """Returns whether `value` improves on `best` by more than `min_delta`. NaN never does; other values improve on NaN and `None`."""
        if value != value:
            return False
        if best is None or best != best:
            return True
        return value < best - self.min_delta if self._direction == "min" else value > best + self.min_delta
