"""`Profiler`: a trace of some steps, by JAX's own profiler."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.errors import CallbackError, warn
from fitflax.integers import is_integer
from fitflax.triggers import at

__all__ = ["Profiler"]

# Whoever names others expects a trace of them.
_USUAL = (10, 14)


class Profiler(Callback):
    """Records what host and devices do during some steps, all that `fit` does between them included.

    A trace is a directory below `directory/plugins/profile/`: TensorBoard shows it where its profile plugin is installed (`pip install xprof`), and
    `perfetto_trace.json.gz` in it opens in https://ui.perfetto.dev. The steps before the first and the last of them are waited for, so that a trace holds whole
    steps and no others; all others run as ever.

    Args:
        directory: Where to.
        steps: The first and the last step to record, counted from 1 where this call of `fit` begins, so that a resumed run is recorded as well. The first
            steps of a process compile.

    Raises:
        CallbackError: Steps that are none, or, when they come, another profile is being recorded.

    >>> Profiler("runs/profile", steps=(20, 24)).steps
    (20, 24)
    """

    phase = Phase.RECORD
    main_process_only = True
    writes_files = True
    needs_gradients_norm = False
    needs_trainer = True

    def __init__(self, directory: str | os.PathLike[str], *, steps: tuple[int, int] = _USUAL) -> None:
        first, last = steps
        if not is_integer(first, 1) or not is_integer(last, first):
            raise CallbackError(f"Profiler(steps=...) takes the first and the last step to record, counted from 1. Received: {steps!r}.")
        self.directory = Path(directory)
        self.steps = (int(first), int(last))
        self._begin = 0
        self._is_recording = self._has_recorded = False

    @override
    def open_run(self, run_id: str, step: int) -> None:
        self._begin, self._has_recorded = step, False
        first, last = self.steps
        # The trigger of a run, which counts from the begin of the training.
        self.every = at(*{self._begin + first - 1, self._begin + last} - {0})

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        if self.steps[0] == 1:
            self._start()

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        step = checkpoint.step - self._begin
        first, last = self.steps
        if self._is_recording and step >= last:
            self._wait_for(checkpoint)
            self._stop()
        elif not self._is_recording and step == first - 1:
            self._wait_for(checkpoint)
            self._start()

    @staticmethod
    def _wait_for(checkpoint: Checkpoint) -> None:
        if checkpoint.run.step_values is not None:
            checkpoint.run.step_values.wait()

    def _start(self) -> None:
        try:
            jax.profiler.start_trace(str(self.directory), create_perfetto_trace=True)
        except RuntimeError as error:
            raise CallbackError(f"Profiler cannot record: {error}") from error
        self._is_recording = self._has_recorded = True

    def _stop(self) -> None:
        self._is_recording = False
        jax.profiler.stop_trace()

    @override
    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        if self._is_recording:
            self._stop()
        elif self.steps != _USUAL and not self._has_recorded and 0 < (made := self.trainer.step - self._begin) < self.steps[0]:
            warn(f"Profiler recorded nothing: the run made {made} steps, and it was to begin with step {self.steps[0]}.")
