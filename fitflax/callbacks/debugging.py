"""Callbacks for observing and debugging a run: `LambdaCallback`, `Profiler`, `SummaryLogger`, `TerminateOnNaN` and `Watchdog`."""

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

import jax
from typing_extensions import override

from fitflax.callbacks.base import HOOKS, Callback, Phase, check_number, check_trigger
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.saver import Saver
from fitflax.errors import CallbackError, ConfigError, did_you_mean, is_integer, warn
from fitflax.logs import Logs, StepValues
from fitflax.storage import ObjectPath, locate
from fitflax.storage.parts import Mirror
from fitflax.triggers import Trigger, at

# With other steps, a run that ends before them warns that nothing was recorded.
_DEFAULT_STEPS = (10, 14)


class LambdaCallback(Callback):
    """Calls functions in hooks, or a function with checkpoints.

    Args:
        fn: A function of a `Checkpoint`, called when `every` fires.
        every: A trigger for `fn`; by default each checkpoint that the loop makes.
        **hooks: Functions by the name of the hook. They take the hook's arguments.

    Raises:
        CallbackError: A hook is unknown, a value is not callable, or `every` is passed without `fn`.

    >>> seen = []
    >>> LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"])).on_epoch_end(0, {"loss": 0.5})
    >>> seen
    [0.5]
    """

    def __init__(self, fn: Callable[[Checkpoint], Any] | None = None, *, every: Trigger | None = None, **hooks: Callable[..., Any]) -> None:
        unknown = [name for name in hooks if name not in HOOKS]
        if unknown:
            raise CallbackError(f"There is no hook {unknown[0]!r}.{did_you_mean(unknown[0], HOOKS)} The hooks are {', '.join(HOOKS)}.")
        if fn is not None and "on_checkpoint" in hooks:
            raise CallbackError("LambdaCallback received fn and on_checkpoint=, which are the same hook. Pass only one of them.")
        if fn is not None:
            hooks["on_checkpoint"] = fn
        check_trigger("LambdaCallback", every)
        if every is not None and "on_checkpoint" not in hooks:
            raise CallbackError("LambdaCallback(every=...) sets when fn is called, but fn is missing. Pass fn, or leave out every.")
        for name, function in hooks.items():
            if not callable(function):
                raise CallbackError(f"LambdaCallback({name}=...) must be a function. Received: {function!r}.")
            # Set on the instance, where `overrides` finds it.
            setattr(self, name, function)
        self._functions = tuple(hooks.values())
        self.every = every

    @property
    @override
    def state_key(self) -> str:
        return f"{type(self).__name__}({', '.join(getattr(function, '__name__', '?') for function in self._functions)})"


class SummaryLogger(Callback):
    """Writes the time of the steps since the last checkpoint, and all values by group, one value per line.

    It works in `fit` and, as a plain function, in `serial(...)`. It waits for the device at each checkpoint that it writes. Steps and seconds are counted
    from the loop's previous checkpoint, even if that was made for another callback. Arrays are left out.

    Args:
        every: When to write; by default, in `fit` at the end of each epoch, at each validation and at the end of the run, elsewhere at each checkpoint.
        file: The output; standard output by default.

    Raises:
        CallbackError: `every` is not a trigger, or `file` has no method `write`.

    >>> import fitflax, io, numpy as np
    >>> from flax import linen as nn
    >>> trainer = fitflax.Trainer(nn.Dense(1))
    >>> trainer.compile("sgd", "mse")
    >>> logger = SummaryLogger(file=io.StringIO())
    >>> for checkpoint in trainer.train_loop(np.zeros((8, 2)), np.ones((8, 1)), steps=1):
    ...     _ = logger(checkpoint)
    >>> print(logger.file.getvalue())
    Step      1: Ran 1 train steps in ... seconds
    Step      1: train seconds_per_step | ...
    Step      1: train gradients_l2norm | 2.00000000
    Step      1: train   weights_l2norm | ...
    Step      1: train             loss | 1.00000000
    """

    phase = Phase.RECORD  # Called in all processes, because the norm of sharded parameters needs all of them.

    def __init__(self, *, every: Trigger | None = None, file: TextIO | None = None) -> None:
        check_trigger("SummaryLogger", every)
        if file is not None and not hasattr(file, "write"):
            raise CallbackError(f"SummaryLogger(file=...) must be a file that is open for writing text. Received: {file!r}.")
        self.every = every
        self.file = file
        self._written_step: int | None = None
        self._in_fit = False

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._written_step, self._in_fit = None, True

    @override
    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        self._in_fit = False

    @override
    def wants(self, checkpoint: Checkpoint) -> bool:
        # In `fit`, another callback may already have caused a checkpoint of the last step.
        return self.every is None and _ends_in_all_processes(checkpoint)

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        is_of_other = self._in_fit and self.every is None and not (checkpoint.epoch_ends or checkpoint.evaluations or _ends_in_all_processes(checkpoint))
        is_repeat = checkpoint.run.position.is_repeat
        if is_of_other or (is_repeat and checkpoint.step == self._written_step):
            return
        self._written_step = checkpoint.step
        steps, seconds = checkpoint.n_completed_steps, checkpoint.elapsed_time
        # The time of a repeated step was in the checkpoint of another callback.
        first = [] if is_repeat else [f"Ran {steps} train steps in {seconds:.2f} seconds"]
        self._write(checkpoint, [*first, *_summary_lines(checkpoint, steps, seconds)])

    @override
    def on_closing(self, checkpoint: Checkpoint, epoch: int, logs: Mapping[str, Any]) -> None:
        # The validation of a partial epoch runs after its last step's checkpoint.
        if checkpoint.step == self._written_step:
            self._write(checkpoint, _metric_lines(checkpoint.evaluations))

    def _write(self, checkpoint: Checkpoint, lines: Iterable[str]) -> None:
        if jax.process_index():
            return
        # Read at each call, because pytest and notebooks replace standard output.
        stream = self.file or sys.stdout
        # One write, so that the lines of a checkpoint stay together.
        stream.write("".join(f"Step {checkpoint.step:6d}: {line}\n" for line in lines))
        stream.flush()


def _ends_in_all_processes(checkpoint: Checkpoint) -> bool:
    """Returns whether the run ends here in all processes. After an error, it may end in only one, which cannot compute the norm of sharded parameters."""
    position = checkpoint.run.position
    return position.is_last and not (position.is_rescue and jax.process_count() > 1)


def _summary_lines(checkpoint: Checkpoint, steps: int, seconds: float) -> Iterator[str]:
    """Yields the lines of all values. Norms are known only if this process ran the step."""
    if steps:
        yield _line("train", "seconds_per_step", seconds / steps)
    if checkpoint.run.step_values is not None:
        if checkpoint.has_gradients_norm:
            yield _line("train", "gradients_l2norm", checkpoint.gradients_norm)
        yield _line("train", "weights_l2norm", checkpoint.params_norm)
    yield from _metric_lines(checkpoint.metrics)


def _metric_lines(metrics: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for group, values in metrics.items():
        for label, value in values.items():
            number = value.item() if getattr(value, "ndim", None) == 0 else value
            if isinstance(number, int | float):
                yield _line(group, label, number)


def _line(group: str, label: str, value: float) -> str:
    return f"{group:<5} {label:>16} | {value:.8f}"


class TerminateOnNaN(Callback):
    """Stops a run when the loss, a gradient or a parameter is not finite, and reports the first such step and value.

    It checks every `log_every` steps. The step and the value are still exact, because the compiled step records them. A run that was stopped stays stopped
    after a resume. Steps that the loss scaling of float16 skips are ignored, unless the scale is 1 or the loss is not finite.

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


class Watchdog(Callback):
    """Prints the stacks of all threads when a run has not finished a step for some time, and repeats that while it hangs.

    A thread checks the time from the beginning of `fit`, so that it also shows where the wait for the first batch hangs. It does not slow down or stop the
    run. The end of a validation or epoch counts as a step. Compilation does not, so allow more time than the longest compilation, validation, save or wait
    for data that you expect.

    Args:
        seconds: The time without a step after which stacks are printed.
        file: The output; standard error by default.

    Raises:
        CallbackError: `seconds` is not positive.

    >>> Watchdog(seconds=1800).seconds
    1800.0
    """

    def __init__(self, seconds: float = 600.0, *, file: TextIO | None = None) -> None:
        check_number("Watchdog", "seconds", seconds, "a positive number")
        self.seconds = float(seconds)
        self._file = file
        self._num_events = 0
        self._has_begun = False  # Whether `trainer` is the trainer of this run.
        self._token: object = None  # The token of the current thread; threads with another one end.

    @override
    def enter_run(self, saver: Saver) -> None:
        self._has_begun = False
        self._token = token = object()
        threading.Thread(target=self._watch_steps, args=(token,), name="fitflax-watchdog", daemon=True).start()

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._has_begun = True

    @override
    def on_test_end(self, logs: Mapping[str, Any]) -> None:
        self._num_events += 1

    @override
    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any]) -> None:
        self._num_events += 1

    @override
    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        self.close()  # Does not wait for the thread, which may sleep for another second.

    @override
    def close(self) -> None:
        self._token = None

    def _watch_steps(self, token: object) -> None:
        seen, since, reported = self._progress(), time.monotonic(), 0
        while True:
            time.sleep(min(self.seconds / 10, 1.0))
            if self._token is not token:
                return
            now = self._progress()
            if now != seen:
                seen, since, reported = now, time.monotonic(), 0
            elif time.monotonic() - since >= self.seconds * (reported + 1):
                reported += 1
                self._report(seen[0], time.monotonic() - since)

    def _progress(self) -> tuple[int | None, int]:
        """Returns the step, `None` before the first one, and the number of other events."""
        return self.trainer.step if self._has_begun else None, self._num_events

    def _report(self, step: int | None, seconds: float) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        place = "the beginning of fit" if step is None else f"step {step}"
        lines = [f"Watchdog: no progress for {seconds:.0f} s, since {place}. Stacks of all threads, most recent call last:\n"]
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                lines += [f"\nThread {names.get(ident, ident)}:\n", *traceback.format_stack(frame)]
        file = self._file or sys.stderr
        file.write("".join(lines))
        file.flush()


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
        # The same in all processes, which have to run the same steps, although only process 0 records.
        self.every = at(*sorted({self.steps[0] - 1, self.steps[1]} - {0}), of_process=True)
        self._start_step = 0
        self._is_recording = self._has_recorded = False

    @override
    def open_run(self, run_id: str, step: int) -> None:
        self._start_step, self._has_recorded = step, False

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        if self.steps[0] == 1:
            self._start()

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        step, (first, last) = checkpoint.step - self._start_step, self.steps
        is_first, is_last = not self._is_recording and step == first - 1, self._is_recording and step >= last
        if is_first or is_last:
            checkpoint.run.timer.stop()  # Waits for the step.
        if is_last:
            self._stop()
        elif is_first:
            self._start()

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
        elif self.steps != _DEFAULT_STEPS and not self._has_recorded and 0 < (num_steps := self.trainer.step - self._start_step) < self.steps[0]:
            warn(f"Profiler recorded nothing: the run ended after {num_steps} steps, before step {self.steps[0]}. Pass an earlier steps=(first, last).")
