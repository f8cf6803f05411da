"""`Profiler`: records a trace of some steps with JAX's profiler."""

import os
from collections.abc import Mapping
from typing import Any

import jax
from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.errors import CallbackError, ConfigError, warn
from fitflax.integers import is_integer
from fitflax.storage import ObjectPath, locate
from fitflax.storage.mirror import Mirror
from fitflax.triggers import at

__all__ = ["Profiler"]

# For other steps, a run that ends before them warns that nothing was recorded.
_DEFAULT_STEPS = (10, 14)


class Profiler(Callback):
    """Records a trace of the host and the devices during some steps, including the work of `fit` between them.

    A trace is a directory in `directory/plugins/profile/`. TensorBoard shows it with its profile plugin (`pip install xprof`), and you can open its
    `perfetto_trace.json.gz` in https://ui.perfetto.dev. Recording begins and ends by waiting for the device, so a trace contains exactly these steps. Other
    steps run as usual.

    Args:
        directory: A path or a URL.
        steps: The first and the last step to record, counted from 1 at the beginning of this call of `fit`, also in a resumed run. The first steps of a
            process include compilation.
        storage_options: Options for a URL; see `ModelCheckpoint`.

    Raises:
        CallbackError: `steps` is invalid. At the first step to record: another profile is being recorded.

    >>> Profiler("runs/profile", steps=(20, 24)).steps
    (20, 24)
    """

    phase = Phase.RECORD
    main_process_only = True
    writes_files = True
    needs_gradients_norm = False
    needs_trainer = True

    def __init__(self, directory: str | os.PathLike[str], *, steps: tuple[int, int] = _DEFAULT_STEPS, storage_options: Mapping[str, Any] | None = None) -> None:
        first, last = steps
        if not is_integer(first, 1) or not is_integer(last, first):
            raise CallbackError(f"Profiler(steps=...) takes the first and the last step to record, counted from 1. Received: {steps!r}.")
        self.directory = locate(directory, owner="Profiler(directory)", error=ConfigError, options=storage_options)
        self._mirror: Mirror | None = None
        self.steps = (int(first), int(last))
        self._start_step = 0
        self._is_recording = self._has_recorded = False

    @override
    def open_run(self, run_id: str, step: int) -> None:
        self._start_step, self._has_recorded = step, False
        first, last = self.steps
        # The trigger counts from the beginning of the run, not of this call.
        self.every = at(*{self._start_step + first - 1, self._start_step + last} - {0})

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        if self.steps[0] == 1:
            self._start()

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        step = checkpoint.step - self._start_step
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
        if isinstance(self.directory, ObjectPath):
            self._mirror = Mirror(self.directory)
        try:
            jax.profiler.start_trace(str(self.directory if self._mirror is None else self._mirror.directory), create_perfetto_trace=True)
        except RuntimeError as error:
            raise CallbackError(f"Profiler cannot record: {error}") from error
        self._is_recording = self._has_recorded = True

    def _stop(self) -> None:
        self._is_recording = False
        jax.profiler.stop_trace()
        mirror, self._mirror = self._mirror, None
        if mirror is not None:
            try:
                mirror.push()
            except OSError as error:
                raise CallbackError(f"Profiler cannot write to {self.directory}: {error}.") from error
            finally:
                mirror.close()

    @override
    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        if self._is_recording:
            self._stop()
        elif self.steps != _DEFAULT_STEPS and not self._has_recorded and 0 < (made := self.trainer.step - self._start_step) < self.steps[0]:
            warn(f"Profiler recorded nothing: the run ended after {made} steps, before step {self.steps[0]}. Pass an earlier steps=(first, last).")
