"""`TensorBoard`: what a run logs, as event files that TensorBoard shows."""

import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase, check_trigger, moment_of
from fitflax.callbacks.event_files import EventFiles, Write, trim
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.documents import library_versions
from fitflax.errors import CallbackError
from fitflax.logs import Logs
from fitflax.state import PyTree
from fitflax.triggers import Schedule, Trigger
from fitflax.triggers import every as make_every

__all__ = ["TensorBoard"]

TRAIN = "train"
# What a run that ended inside an epoch wrote after its last checkpoint, which a resume drops.
CLOSING = ".closing"
_HISTOGRAM_BINS = 64


class TensorBoard(Callback):
    """Writes event files for TensorBoard: `tensorboard --logdir directory`.

    Sub-directory `train` has the values of training, one for each validation set has that set's, under the same tags, so that curves of a metric lie in one
    chart; the x axis is the step. Training is written when `every` is due, and at the end of each epoch; validation always:

    * `loss` and the metrics, over the epoch so far; `step/loss` and `step/gradients_norm`, of that step alone; `epoch`, at the end of each;
    * `learning_rate`, where it can be read: an optimizer by name, or wrapped in `optax.inject_hyperparams`;
    * `time/steps_per_second`, `time/examples_per_second` (evaluations left out), `time/validation_seconds`;
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

    Raises:
        CallbackError: Something that is no trigger. Later, as soon as it is known: event files cannot be written.

    >>> TensorBoard("runs/a/tensorboard", histograms=make_every(epochs=1)).needs_grads
    True
    """

    phase = Phase.RECORD

    def __init__(self, directory: str | os.PathLike[str], *, every: Trigger | None = None, histograms: Trigger | None = None) -> None:
        check_trigger("TensorBoard", every)
        if histograms is not None and not isinstance(histograms, Trigger):
            raise CallbackError(f"TensorBoard(histograms=...) takes a trigger, such as fitflax.every(epochs=1). Received: {histograms!r}.")
        self.directory = Path(directory)
        values = every or make_every(steps=50)
        self._triggers = {"values": values, "histograms": histograms}
        self.every = values if histograms is None else values | histograms
        self.needs_grads = histograms is not None
        self._files: EventFiles | None = None
        self._run_id: str | None = None
        self._schedules: dict[str, Schedule] = {}
        self._reset(0)

    def _reset(self, step: int) -> None:
        self._first_step = step
        self._is_described = False
        self._written_step = -1
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
            trim(self.directory, run_id, step)
        except OSError as error:
            raise CallbackError(f"TensorBoard cannot use {self.directory}: {error}. Give it a directory that can be written.") from error
        self._run_id = run_id
        self._files = EventFiles(self.directory, run_id, step)
        # The loop's clock as well.
        self._schedules = {name: Schedule(trigger, time.monotonic()) for name, trigger in self._triggers.items()}
        self._reset(step)

    @override
    def drop_closing(self) -> None:
        for path in self.directory.rglob(f"*.tfevents.*.{self._run_id}{CLOSING}"):
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
        return {name: schedule.state_dict(now)["since"] for name, schedule in self._schedules.items()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, schedule in self._schedules.items():
            schedule.load_state_dict({"since": state.get(name, ())}, time.monotonic())

    # -- events --

    @override
    def on_test_begin(self, logs: Mapping[str, Any]) -> None:
        self._test_begin = time.monotonic()

    @override
    def on_test_end(self, logs: Logs) -> None:
        self._test_seconds += time.monotonic() - self._test_begin

    @override
    def wants(self, checkpoint: Checkpoint) -> bool:
        return not checkpoint.point.is_repeat and (checkpoint.point.epoch_ends or bool(checkpoint.evaluations))

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self._files is None:
            # Used as a plain function, without a trainer that opens the run.
            self.open_run(checkpoint.run_id, checkpoint.point.process_start)
        assert self._files is not None
        self._describe(checkpoint)
        moment = moment_of(checkpoint)
        due = {name for name, schedule in self._schedules.items() if schedule.due(moment)}
        self._write_evaluations(self._files, checkpoint)
        if "values" in due or checkpoint.point.epoch_ends:
            self._write_training(self._files, checkpoint)
        if "histograms" in due:
            self._write_histograms(self._files, checkpoint)

    @override
    def on_closing(self, checkpoint: Checkpoint, epoch: int, logs: Mapping[str, Any]) -> None:
        files = EventFiles(self.directory, str(self._run_id), self._first_step, mark=CLOSING)
        self._write_evaluations(files, checkpoint)
        if checkpoint.step != self._written_step:
            self._write_training(files, checkpoint)
        files.close()

    # -- what is written --

    def _write_training(self, files: EventFiles, checkpoint: Checkpoint) -> None:
        self._written_step = checkpoint.step
        evaluated, ends = checkpoint.evaluated, checkpoint.point.epoch_ends
        # Everything that is still on the device is read by the thread.
        logs, step_values = checkpoint.logs.deferred(late=ends), checkpoint.step_values
        rate = checkpoint.learning_rate
        clock, evaluating, self._test_seconds = self._clock, self._test_seconds, 0.0
        step, examples, now = checkpoint.step, self._examples(checkpoint), time.time()

        def write_all(write: Write) -> None:
            values = {key: value for key, value in logs().items() if key not in evaluated}
            if step_values is not None:
                values |= {"step/loss": step_values.loss, "step/gradients_norm": step_values.gradients_norm}
            if rate is not None:
                values["learning_rate"] = float(rate)
            if ends:
                values["epoch"] = checkpoint.epoch + 1
            values |= clock.rates(step, examples, evaluating)
            write_values(write, TRAIN, step, values, now)

        files.submit(write_all)

    def _write_evaluations(self, files: EventFiles, checkpoint: Checkpoint) -> None:
        groups, step, now = checkpoint.evaluations, checkpoint.step, time.time()

        def write_all(write: Write) -> None:
            for group, values in groups.items():
                write_values(write, group, step, values, now)

        if groups:
            files.submit(write_all)

    def _write_histograms(self, files: EventFiles, checkpoint: Checkpoint) -> None:
        trees, step, now = {"params": checkpoint.model_params, "grads": checkpoint.grads}, checkpoint.step, time.time()

        def write_all(write: Write) -> None:
            for name, tree in trees.items():
                for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                    write_histogram(write, f"{name}/{jax.tree_util.keystr(path, simple=True, separator='/')}", step, np.asarray(leaf), now)

        files.submit(write_all)

    def _examples(self, checkpoint: Checkpoint) -> int | None:
        """Returns how many examples the run has used, where a pass is known to have so many."""
        position, size = checkpoint.data_position, self.params.get("num_examples")
        return position.examples + position.passes * size if size else None

    def _describe(self, checkpoint: Checkpoint) -> None:
        """Writes what is known at the start, once in a process."""
        if self._is_described:
            return
        assert self._files is not None
        self._is_described = True
        step, now = self._first_step, time.time()
        environment = describe_environment(checkpoint.borrow().params)
        hyperparameters = dict(self.params.get("hyperparameters", {})) if step == 0 else {}
        groups = (TRAIN, *self.params.get("validation_sets", ()))
        tags = [(group, key) for group in groups for key in checkpoint.logs if key not in checkpoint.evaluated]

        def write_all(write: Write) -> None:
            from tensorboardX import summary

            write("", step, summary.text("environment", environment), now)
            if hyperparameters:
                for part in hyperparameter_summaries(hyperparameters, tags):
                    write("", step, part, now)

        self._files.submit(write_all)


class Clock:
    """Speed between two points at which values were written, as the thread sees the device finish them."""

    def __init__(self) -> None:
        self._last: tuple[float, int, int | None] | None = None

    def rates(self, step: int, examples: int | None, evaluating: float) -> dict[str, float]:
        """Returns values about time since the last call.

        Args:
            step: The step that has just finished.
            examples: Examples used so far, if known.
            evaluating: Seconds of evaluations since then.
        """
        now = time.monotonic()
        last, self._last = self._last, (now, step, examples)
        values = {"time/validation_seconds": evaluating} if evaluating else {}
        if last is None or step <= last[1]:
            return values
        seconds = max(now - last[0] - evaluating, 1e-9)
        values["time/steps_per_second"] = (step - last[1]) / seconds
        if examples is not None and last[2] is not None:
            values["time/examples_per_second"] = (examples - last[2]) / seconds
        return values


def write_values(write: Write, group: str, step: int, values: Mapping[str, Any], now: float) -> None:
    """Writes numbers as scalars, lists as a scalar for each entry, and matrices as tables."""
    from tensorboardX import summary

    for key, value in values.items():
        array = np.asarray(value)
        if array.dtype.kind not in "fiub":
            continue  # Something of a user's callback that is no number.
        if array.ndim == 0:
            write(group, step, summary.scalar(key, float(array)), now)
        elif array.ndim == 1:
            for index, entry in enumerate(array):
                write(group, step, summary.scalar(f"{key}/{index}", float(entry)), now)
        else:
            rows = array.reshape(-1, array.shape[-1])
            lines = ["|" + "|".join(f"{entry:g}" for entry in row) + "|" for row in rows]
            write(group, step, summary.text(key, "\n".join([lines[0], "|" + "---|" * rows.shape[1], *lines[1:]])), now)


def write_histogram(write: Write, tag: str, step: int, values: Any, now: float) -> None:
    """Writes a histogram of the finite values; of none there is none."""
    from tensorboardX import summary

    finite = values.astype(np.float64).ravel()
    finite = finite[np.isfinite(finite)]
    if finite.size:
        write(TRAIN, step, summary.histogram(tag, finite, _HISTOGRAM_BINS), now)


def hyperparameter_summaries(values: Mapping[str, Any], tags: list[tuple[str, str]]) -> list[Any]:
    """Returns the summaries that TensorBoard's table of hyperparameters is made from.

    Args:
        values: Numbers, booleans and strings by name.
        tags: The metrics of the table: sub-directory and tag.
    """
    from tensorboardX import summary
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    experiment, start, _ = summary.hparams(dict(values), {f"{group}/{tag}": None for group, tag in tags})
    plugin = experiment.value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(plugin.content)
    for info, (group, tag) in zip(content.experiment.metric_infos, tags, strict=True):
        info.name.group, info.name.tag = group, tag
    plugin.content = content.SerializeToString()
    return [experiment, start]


def describe_environment(params: PyTree) -> str:
    """Returns what a run ran on, in Markdown: command line, versions, devices, parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    devices = jax.devices()
    facts: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "python": f"{platform.python_version()} on {platform.platform()}",
        **library_versions(),
        "devices": f"{len(devices)} {devices[0].device_kind} ({devices[0].platform}), {jax.process_count()} processes",
        "parameters": f"{sum(leaf.size for _, leaf in leaves):,} in {len(leaves)} arrays, {sum(leaf.nbytes for _, leaf in leaves):,} bytes",
    }
    lines = ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items()), "", "| parameter | shape | dtype | size |", "|---|---|---|---|"]
    lines += [f"| {jax.tree_util.keystr(path, simple=True, separator='/')} | {list(leaf.shape)} | {leaf.dtype} | {leaf.size:,} |" for path, leaf in leaves]
    return "\n".join(lines)
