"""`TensorBoard`: what a run logs, as event files that TensorBoard shows."""

import dataclasses
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase, PlainRun, check_trigger, moment_of
from fitflax.callbacks.event_files import EventFiles, Write, files_of, trim
from fitflax.callbacks.media import check_images, flatten_sown, write_logged, write_sown
from fitflax.callbacks.summaries import TRAIN, describe_environment, hyperparameter_summaries, write_histogram
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.errors import CallbackError, NotReadyError, warn
from fitflax.leaves import named_leaves
from fitflax.logs import Logs, flat_name
from fitflax.optimizers import ONLY_RATE
from fitflax.state import PyTree
from fitflax.steps.cost import peak_flops as peak_flops_of
from fitflax.triggers import Schedule, Trigger
from fitflax.triggers import every as make_every

__all__ = ["TensorBoard"]

# What a run that ended inside an epoch wrote after its last checkpoint, which a resume drops.
CLOSING = ".closing-"


class TensorBoard(Callback):
    """Writes event files for TensorBoard. For `TensorBoard("runs/a/tensorboard")`: `tensorboard --logdir runs`, which also compares runs.

    Sub-directory `train` has the values of training, one for each validation set has that set's, under the same tags, so that curves of a metric lie in one
    chart; the x axis is the step. Training is written when `every` is due, and at the end of each epoch; validation always:

    * `loss` and the metrics, over the epoch so far; `step/loss` and `step/gradients_norm`, of that step alone; `epoch`, at the end of each;
    * `learning_rate`, where it can be read: an optimizer by name, or wrapped in `optax.inject_hyperparams`; `learning_rate/<label>` of each group that has
      one of its own, as in `optax.multi_transform`;
    * `time/steps_per_second`, `time/examples_per_second` (evaluations left out), `time/validation_seconds`; `time/model_flops_per_second` of a device, and
      `time/model_flops_utilization`, what part that is of the device's peak, where both are known;
    * what modules sow, `self.sow("summaries", "mean", h.mean())` in a module `layer` as `summaries/layer/mean`: a number as a scalar, an array as a histogram,
      an `ImageSummary` or `FigureSummary` as images; see `checkpoint.sown`;
    * `params/...` and `grads/...`, histograms, when `histograms` is due;
    * a metric that is a list, such as one number per class, is `key/0`, `key/1`, ...; a matrix is a table among the texts;
    * at the start `environment` (parameters, devices, versions, command line) as text, and hyperparameters.

    A thread writes, and waits for the device in place of the training thread. Whatever was written up to a checkpoint is on disk before the checkpoint is. On a
    resume, events beyond the restored step are dropped. Another run's files in the directory stay, but TensorBoard shows the newest run only.

    Args:
        directory: Where; made if it is not there. One for each run.
        every: When the values of training are written, besides the ends of epochs; each 50 steps by default.
        histograms: When histograms of parameters and gradients are written; never by default. Gradients are kept for it at every step, which takes as much
            memory as the parameters.
        sown: A collection whose sown values are written with those of training; `None` for none.
        peak_flops: The floating-point operations a second that a device can make at best; by default that of the makers' data sheets in bfloat16, where it is
            a GPU or TPU whose name is known.

    Raises:
        CallbackError: Something that is no trigger, or no positive number. Later, as soon as it is known: event files cannot be written.

    >>> TensorBoard("runs/a/tensorboard", histograms=make_every(epochs=1)).needs_grads
    True
    """

    phase = Phase.RECORD
    writes_files = True
    main_process_only = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: Trigger | None = None,
        histograms: Trigger | None = None,
        sown: str | None = "summaries",
        peak_flops: float | None = None,
    ) -> None:
        check_trigger("TensorBoard", every)
        if histograms is not None and not isinstance(histograms, Trigger):
            raise CallbackError(f"TensorBoard(histograms=...) takes a trigger, such as fitflax.every(epochs=1). Received: {histograms!r}.")
        self.directory = Path(directory)
        values = every or make_every(steps=50)
        self._triggers = {"values": values, "histograms": histograms}
        self.every = values if histograms is None else values | histograms
        self.needs_grads = histograms is not None
        if sown is not None and not isinstance(sown, str):
            raise CallbackError(f"TensorBoard(sown=...) takes the name of a collection, or None. Received: {sown!r}.")
        if peak_flops is not None and (isinstance(peak_flops, bool) or not isinstance(peak_flops, int | float) or not 0 < peak_flops < math.inf):
            raise CallbackError(f"TensorBoard(peak_flops=...) takes floating-point operations a second, such as 312e12. Received: {peak_flops!r}.")
        self.needs_sown = () if sown is None else (sown,)
        self._peak_flops = peak_flops
        self._files: EventFiles | None = None
        self._run_id: str | None = None
        self._plain: PlainRun | None = None  # While it is a plain function.
        self._schedules: dict[str, Schedule] = {}
        self._reset(0)

    def _reset(self, step: int) -> None:
        self._first_step = step
        self._is_described = False
        self._is_new = True
        # The last step whose values of training were written, and their tags.
        self._written = Written(-1)
        self._clock = Clock()
        self._test_begin = 0.0
        self._test_seconds = 0.0

    @property
    @override
    def state_key(self) -> str:
        return f"{type(self).__name__}(directory={self.directory.name!r})"

    # -- files --

    @override
    def open_run(self, run_id: str, step: int) -> None:
        self.close()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            trim(self.directory, run_id, step or -1)  # Of a run that begins again nothing stays, not even what it wrote before its first step.
            is_new = not files_of(self.directory, run_id, "")
        except OSError as error:
            raise CallbackError(f"TensorBoard cannot use {self.directory}: {error}. Give it a directory that can be written.") from error
        self._run_id = run_id
        self._files = EventFiles(self.directory, run_id, step)
        # The loop's clock as well.
        self._schedules = {name: Schedule(trigger, time.monotonic()) for name, trigger in self._triggers.items()}
        self._plain = None
        self._reset(step)
        self._is_new = is_new

    def _open_plain(self, checkpoint: Checkpoint) -> None:
        """Opens the run of a checkpoint, where no trainer does; one that was closed in the middle of its loop, or at its end, goes on."""
        plain = self._plain or PlainRun()
        last = plain.step
        goes_on = plain.goes_on(checkpoint)
        if self._files is None or not goes_on:
            self.open_run(checkpoint.run_id, last if goes_on else checkpoint.run.point.process_start)
            self._is_described = goes_on
        self._plain = plain

    @override
    def drop_closing(self) -> None:
        self._drop_closing(self._first_step)

    def _drop_closing(self, step: int) -> None:
        for path in files_of(self.directory, str(self._run_id), f"{CLOSING}{step}"):
            path.unlink()

    @override
    def sync(self) -> None:
        if self._files is not None:
            self._files.sync()

    @override
    def close(self) -> None:
        files, self._files = self._files, None
        if files is not None:
            files.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        now = time.monotonic()
        # What a clock measures is not part of it, so that a resumed run's is that of a run never stopped.
        written = {"written": [self._written.step, *sorted(tag for tag in self._written.tags if not tag.startswith("time/"))]}
        return {name: schedule.state_dict(now)["since"] for name, schedule in self._schedules.items() if schedule.measures_time} | written

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, schedule in self._schedules.items():
            schedule.load_state_dict({"since": state.get(name, ())}, time.monotonic())
        step, *tags = state.get("written", [-1])
        self._written = Written(int(step), frozenset(tags))

    # -- events --

    @override
    def on_test_begin(self, logs: Mapping[str, Any]) -> None:
        self._test_begin = time.monotonic()

    @override
    def on_test_end(self, logs: Logs) -> None:
        self._test_seconds += time.monotonic() - self._test_begin

    @override
    def wants(self, checkpoint: Checkpoint) -> bool:
        return not checkpoint.run.point.is_repeat and (checkpoint.epoch_ends or bool(checkpoint.evaluations))

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self._files is None or self._plain is not None:
            self._open_plain(checkpoint)
        assert self._files is not None
        self._describe(checkpoint)
        moment = moment_of(checkpoint)
        due = {name for name, schedule in self._schedules.items() if schedule.due(moment)}
        self._write_evaluations(self._files, checkpoint)
        # The loop and this callback read the clock one after the other: where it was the loop's alone that said so, values are due.
        if "values" in due or checkpoint.epoch_ends or not (due or checkpoint.evaluations):
            self._write_training(self._files, checkpoint)
            self._write_sown(self._files, checkpoint)
        if "histograms" in due:
            self._write_histograms(self._files, checkpoint)
        if self._plain is not None and checkpoint.is_last:
            self._files.sync()  # Nobody may close it.

    @override
    def on_closing(self, checkpoint: Checkpoint, epoch: int, logs: Mapping[str, Any]) -> None:
        self._describe(checkpoint)
        self._drop_closing(checkpoint.step)  # A process that was killed right after this left one, and no row that says so.
        files = EventFiles(self.directory, str(self._run_id), self._first_step, mark=f"{CLOSING}{checkpoint.step}")
        try:
            self._write_evaluations(files, checkpoint)
            self._write_training(files, checkpoint)
        finally:
            files.close()

    # -- what is written --

    def _write_training(self, files: EventFiles, checkpoint: Checkpoint) -> None:
        if self._written.step != checkpoint.step:
            self._written = Written(checkpoint.step)
        written = self._written
        evaluated, ends = checkpoint.evaluated, checkpoint.epoch_ends
        # Everything that is still on the device is read by the thread.
        logs, step_values = checkpoint.logs.deferred(late=ends), checkpoint.run.step_values
        rates, kinds, has_norm = checkpoint.learning_rates, checkpoint.logs.kinds, checkpoint.has_gradients_norm
        clock, evaluating, self._test_seconds = self._clock, self._test_seconds, 0.0
        flops, peak = self.params.get("model_flops"), self._peak_flops or _peak_of(checkpoint)
        step, examples, dispatched, now = checkpoint.step, self._examples(checkpoint), time.monotonic(), time.time()

        def write_all(write: Write) -> None:
            values = {key: value for key, value in logs().items() if key not in evaluated}
            if step_values is not None:
                values |= {"step/loss": step_values.loss} | ({"step/gradients_norm": step_values.gradients_norm} if has_norm else {})
            values |= {label if label == ONLY_RATE else f"{ONLY_RATE}/{label}": float(rate) for label, rate in rates.items()}
            if ends:
                values["epoch"] = checkpoint.epoch + 1
            values |= clock.rates(step, examples, dispatched, evaluating)
            values |= _utilization(values.get("time/steps_per_second"), flops, peak)
            # A step that is written again, at the close of an epoch in its middle, adds only what is new by then.
            values = {tag: value for tag, value in values.items() if tag not in written.tags}
            written.tags |= values.keys()
            write_logged(write, TRAIN, step, values, kinds, now)

        files.submit(write_all)

    def _write_evaluations(self, files: EventFiles, checkpoint: Checkpoint) -> None:
        groups, kinds, step, now = checkpoint.evaluations, checkpoint.logs.kinds, checkpoint.step, time.time()

        def write_all(write: Write) -> None:
            for group, values in groups.items():
                write_logged(write, group, step, values, {key: kinds[flat_name(group, key)] for key in values if flat_name(group, key) in kinds}, now)

        if groups:
            files.submit(write_all)

    def _write_sown(self, files: EventFiles, checkpoint: Checkpoint) -> None:
        if not self.needs_sown or checkpoint.run.step_values is None:
            return
        try:
            sown = checkpoint.sown
        except NotReadyError:
            if self._plain is None:
                raise
            return  # Only `fit` is told by a callback what is wanted.
        values = {tag: value for name in self.needs_sown for tag, value in flatten_sown(name, sown.get(name, {})).items()}
        for tag, value in values.items():
            check_images(tag, value)
        step, now = checkpoint.step, time.time()
        if values:
            files.submit(lambda write: write_sown(write, TRAIN, step, values, now))

    def _write_histograms(self, files: EventFiles, checkpoint: Checkpoint) -> None:
        trees, step, now = {"params": checkpoint.model_params, "grads": self._gradients(checkpoint)}, checkpoint.step, time.time()
        elsewhere = [leaf for leaf in jax.tree.leaves(trees) if not (leaf.is_fully_addressable or leaf.is_fully_replicated)]
        if elsewhere:
            warn(f"TensorBoard leaves out histograms of {len(elsewhere)} arrays that are split between processes.")

        def write_all(write: Write) -> None:
            for name, tree in trees.items():
                for path, leaf in named_leaves(tree):
                    if any(leaf is one for one in elsewhere):
                        continue
                    write_histogram(write, TRAIN, f"{name}/{path}", step, np.asarray(leaf), now)

        files.submit(write_all)

    def _gradients(self, checkpoint: Checkpoint) -> PyTree:
        try:
            return checkpoint.grads
        except NotReadyError:
            if self._plain is None:
                raise
            return ()  # Only `fit` is told by a callback that gradients are wanted.

    def _examples(self, checkpoint: Checkpoint) -> int | None:
        """Returns how many examples the run has used, where a pass is known to have so many."""
        position, size = checkpoint.data_position, self.params.get("num_examples")
        return (sum(checkpoint.run.point.used) or position.examples) + position.passes * size if size else None

    def _describe(self, checkpoint: Checkpoint) -> None:
        """Writes what is known at the start, once in a process."""
        if self._is_described:
            return
        assert self._files is not None
        self._is_described = True
        # A process that a resume begins describes itself beyond the step that it goes on from: if it dies before it has saved anything, that goes as well.
        step, now = self._first_step and self._first_step + 1, time.time()
        environment = describe_environment(checkpoint.run.borrow().params)
        hyperparameters = dict(self.params.get("hyperparameters", {})) if self._is_new else {}
        groups = (TRAIN, *self.params.get("validation_sets", ()))
        tags = [(group, key) for group in groups for key in checkpoint.logs if key not in checkpoint.evaluated]

        def write_all(write: Write) -> None:
            from tensorboardX import summary

            if hyperparameters:  # Of the run, not of the process.
                for part in hyperparameter_summaries(hyperparameters, tags, now):
                    write("", 0, part, now)
            write("", step, summary.text("environment", environment), now)

        self._files.submit(write_all)


def _peak_of(checkpoint: Checkpoint) -> float | None:
    """Returns the peak of the devices that a checkpoint lies on."""
    leaf = next(iter(jax.tree.leaves(checkpoint.run.borrow().params)), None)
    return peak_flops_of(next(iter(leaf.devices())).device_kind) if isinstance(leaf, jax.Array) else None


def _utilization(steps_per_second: float | None, flops: float | None, peak: float | None) -> dict[str, float]:
    """Returns what a device computes for the model (Chowdhery et al., "PaLM", 2022, appendix B)."""
    if not steps_per_second or not flops:
        return {}
    values = {"time/model_flops_per_second": steps_per_second * flops}
    return values | ({"time/model_flops_utilization": steps_per_second * flops / peak} if peak else {})


@dataclasses.dataclass
class Written:
    """The tags of training that were written at a step; the thread replaces them by more, so that they can be read meanwhile.

    Attributes:
        step: The step.
        tags: The tags.
    """

    step: int
    tags: frozenset[str] = frozenset()


class Reading(NamedTuple):
    """The clock at a step whose values are written.

    Attributes:
        step: The step.
        examples: Examples used so far, if known.
        dispatched: When the training thread was there, in seconds.
        finished: When the writing thread had seen the device finish it.
    """

    step: int
    examples: int | None
    dispatched: float
    finished: float


class Clock:
    """Speed between two points at which values were written.

    The training thread runs ahead of the device, by a few steps; the writing thread may lag behind it. Neither can make a stretch longer than it was, so the
    longer of the two counts. Before an evaluation the device still finishes steps while its time is running already, which is no matter over a whole stretch
    from one evaluation to the next.
    """

    def __init__(self) -> None:
        self._last: Reading | None = None
        self._evaluated: Reading | None = None

    def rates(self, step: int, examples: int | None, dispatched: float, evaluating: float) -> dict[str, float]:
        """Returns values about time since the last call, or since the last one after an evaluation.

        Args:
            step: The step that has just finished.
            examples: Examples used so far, if known.
            dispatched: When the training thread was there, in seconds.
            evaluating: Seconds of evaluations since the last call.
        """
        now = Reading(step, examples, dispatched, time.monotonic())
        before = self._evaluated if evaluating else self._last
        self._last = now
        if evaluating or self._evaluated is None:
            self._evaluated = now
        values = {"time/validation_seconds": evaluating} if evaluating else {}
        if before is None or step <= before.step:
            return values
        seconds = dispatched - before.dispatched - evaluating
        if not evaluating:
            seconds = max(seconds, now.finished - before.finished)
        seconds = max(seconds, 1e-9)
        values["time/steps_per_second"] = (step - before.step) / seconds
        if examples is not None and before.examples is not None:
            values["time/examples_per_second"] = (examples - before.examples) / seconds
        return values
