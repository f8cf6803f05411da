"""`TerminateOnNaN`: stops a run when the loss, a gradient or a parameter is not finite."""

import math
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase
from fitflax.logs import Logs, StepValues

__all__ = ["TerminateOnNaN"]


class TerminateOnNaN(Callback):
    """Stops a run when the loss, a gradient or a parameter is not finite, and reports the first such step and value.

    It checks every `log_every` steps. The step and the value are still exact, because the compiled step records them. A run that was stopped stays stopped
    after a resume.

    Attributes:
        bad_step: The first step with values that are not finite, counted from 1; `None` if there was none.
        culprit: The first value that was not finite, such as "the loss", "the loss of 'left'", "the gradient of Dense_0/kernel" or "the parameter
            Dense_0/kernel".

    >>> callback = TerminateOnNaN()
    >>> callback.bad_step is None
    True
    """

    phase = Phase.DECIDE
    needs_gradients_norm = True
    needs_culprit = True

    def __init__(self) -> None:
        self.bad_step: int | None = None
        self.culprit: str | None = None
        self._last_step = 0

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self.bad_step = self.culprit = None
        self._last_step = self.trainer.step

    @override
    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        every, step = int(self.params.get("log_every") or 1), self.trainer.step
        if step // every > self._last_step // every:  # A call may run several steps.
            self._check_finite(logs)
        self._last_step = step

    @override
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._check_finite(logs)

    def _check_finite(self, logs: Mapping[str, Any]) -> None:
        if self.bad_step is not None:
            return
        source = getattr(logs, "source", None)
        if isinstance(source, StepValues):
            since, self.culprit = source.steps_since_bad, source.culprit
        else:
            since = None if math.isfinite(logs.get("loss", 0.0)) else 0
        if since is not None:
            self.bad_step = self.trainer.step - since
            self._stop()

    def _stop(self) -> None:
        self.trainer.stop(f"TerminateOnNaN: {self.culprit or 'the loss or its gradient'} is not finite at step {self.bad_step}")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.bad_step is None else {"bad_step": self.bad_step, "culprit": self.culprit}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bad_step, self.culprit = int(state["bad_step"]), state["culprit"]
        self._stop()
