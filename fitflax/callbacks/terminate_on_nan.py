"""`TerminateOnNaN`: ends a run whose loss or gradient is no longer finite."""

import math
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase
from fitflax.logs import Logs, StepValues

__all__ = ["TerminateOnNaN"]


class TerminateOnNaN(Callback):
    """Stops a run when the loss or the gradient is not finite, and says at which step that began.

    The step itself notes where it began, so looking every `log_every` steps is enough to name it. What was ended stays ended on a resume.

    >>> callback = TerminateOnNaN()
    >>> callback.bad_step is None
    True
    """

    phase = Phase.DECIDE
    needs_gradients_norm = True

    def __init__(self) -> None:
        self.bad_step: int | None = None
        self._last_step = 0

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self.bad_step = None
        self._last_step = self.trainer.step

    @override
    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        every, step = int(self.params.get("log_every") or 1), self.trainer.step
        if step // every > self._last_step // every:  # A call may have made several steps.
            self._look(logs)
        self._last_step = step

    @override
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._look(logs)

    def _look(self, logs: Mapping[str, Any]) -> None:
        if self.bad_step is not None:
            return
        source = getattr(logs, "source", None)
        if isinstance(source, StepValues):
            since = source.steps_since_bad
        else:
            since = None if math.isfinite(logs.get("loss", 0.0)) else 0
        if since is not None:
            self.bad_step = self.trainer.step - since
            self._stop()

    def _stop(self) -> None:
        self.trainer.stop(f"TerminateOnNaN: the loss or its gradient is not finite since step {self.bad_step}")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.bad_step is None else {"bad_step": self.bad_step}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bad_step = int(state["bad_step"])
        self._stop()
