"""`TensorBoard`: writes a run's logs to event files for TensorBoard."""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from typing_extensions import override

from fitflax.callbacks.base import check_number, check_trigger
from fitflax.callbacks.event_files import EventFiles, Write, directory_of, files_of, trim
from fitflax.callbacks.step_logger import Clock, StepLogger, learning_rates
from fitflax.callbacks.summaries import TRAIN, describe_environment, hyperparameter_summaries, write_histogram, write_logged, write_sown
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.errors import CallbackError, ConfigError, warn
from fitflax.leaves import named_leaves
from fitflax.logs import flat_name
from fitflax.steps.shapes import peak_flops as peak_flops_of
from fitflax.storage import ObjectPath, locate
from fitflax.storage.parts import Mirror
from fitflax.storage.paths import path_component
from fitflax.triggers import Schedule, Trigger
from fitflax.triggers import every as make_every

# The mark of files that a run that ended inside an epoch wrote after its last checkpoint. A resume that continues the epoch deletes them.
CLOSING = ".closing-"


class TensorBoard(StepLogger):
    """Writes event files for TensorBoard. To view the files of `TensorBoard("runs/a/tensorboard")` and compare runs, run `tensorboard --logdir runs`.

    The subdirectory `train` contains values of training. Each validation set has a subdirectory with the same tags, so that a metric's curves are in one
    chart. The subdirectory has the name of the set, with slashes escaped as `%2F`. The x axis is the step. Validation is written whenever it runs; training is
    written when `every` fires and at the end of each epoch:

    * `loss` and the metrics over the epoch so far; `step/loss` and `step/gradients_norm` of the step; `epoch` at the end of each epoch;
    * `learning_rate` if it can be read, for an optimizer by name or wrapped in `optax.inject_hyperparams`; `learning_rate/<label>` of parameter groups with
      different rates, as in `optax.multi_transform`;
    * `time/steps_per_second` and `time/examples_per_second` (without evaluations), `time/validation_seconds`; `time/model_flops_per_second` of one device, and
      `time/model_flops_utilization`, its fraction of the device's peak, if they are known;
    * sown values: `self.sow("summaries", "mean", h.mean())` in a module `layer` is `summaries/layer/mean`. A number is a scalar, an array a histogram, an
      `ImageSummary` or `FigureSummary` images; see `checkpoint.sown`;
    * histograms `params/...` and `grads/...` when `histograms` fires;
    * a metric that is a list, such as one number per class, is `key/0`, `key/1`, ...; a matrix is a table in the text tab;
    * at the start, `environment` (parameters, devices, versions, command line) as text, and hyperparameters.

    A thread waits for the device and writes, so training does not wait. Everything up to a checkpoint is on disk before the checkpoint is complete. A resume
    drops events beyond the restored step. If another program replaces or deletes files during the run, later events go to new files, with one warning; events
    in the lost files are lost. Files of other runs in the directory are kept, but TensorBoard shows only the newest run.

    Args:
        directory: A path or URL, one for each run, created if it is missing. Files in a bucket are uploaded whole, every 30 s and before each checkpoint.
        every: When to write values of training, in addition to the end of each epoch and of a loop without `fit`; by default every 50 steps.
        histograms: When to write histograms of parameters and gradients; by default never. The run then keeps the gradient of each step, which takes as much
            memory as the parameters. Arrays that are split between processes are left out.
        sown: The collection whose sown values are written; `None` for none.
        peak_flops: The peak floating-point operations per second of a device; by default the data sheet's value in bfloat16, for known GPUs and TPUs.
        storage_options: Options for a URL; see `ModelCheckpoint`.

    Raises:
        CallbackError: An argument has a wrong type or value. During the run: event files cannot be written.

    >>> TensorBoard("runs/a/tensorboard", histograms=make_every(epochs=1)).needs_grads
    True
    """

    _key_arguments = (("directory", "directory.name"),)

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: Trigger | None = None,
        histograms: Trigger | None = None,
        sown: str | None = "summaries",
        peak_flops: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(every=every, sown=sown)
        check_trigger("TensorBoard", histograms, "histograms", "every(epochs=1)")
        if peak_flops is not None:
            check_number("TensorBoard", "peak_flops", peak_flops, "a number of floating-point operations per second, such as 312e12", finite=True)
        self.directory = locate(directory, owner="TensorBoard(directory)", error=ConfigError, options=storage_options)
        # The local directory from which files are uploaded, if `directory` is a URL.
        self._mirror: Mirror | None = None
        values = every or make_every(steps=50)
        self._triggers = {"values": values, "histograms": histograms}
        self.every = values if histograms is None else values | histograms
        self.needs_grads = histograms is not None
        self._peak_flops = peak_flops
        self._files: EventFiles | None = None
        self._run_id: str | None = None
        self._schedules: dict[str, Schedule] = {}
        self._reset(0)

    def _reset(self, step: int) -> None:
        self._first_step = step
        self._is_described = False
        self._is_new = True
        # The last step for which values of training were written, and their tags.
        self._written = Written(-1)
        self._clock = Clock()

    @property
    @override
    def _is_open(self) -> bool:
        return self._files is not None

    # -- files --

    @override
    def open_run(self, run_id: str, step: int) -> None:
        self.close()
        try:
            if isinstance(self.directory, ObjectPath):
                self._mirror = Mirror(self.directory)
                self._mirror.pull(lambda name: f".{run_id}" in name and ".tfevents." in name)
            self._local.mkdir(parents=True, exist_ok=True)
            for group in self._groups:
                path = directory_of(self._local, group)
                if path.exists() and not path.is_dir():  # Otherwise, the error would occur at the first validation.
                    raise CallbackError(
                        f"TensorBoard needs a subdirectory for {group!r}, but {path} is a file. Rename the validation set, or pass another directory."
                    )
            trim(self._local, run_id, step or -1)  # A run that starts over drops all its events, including those at step 0.
            is_new = not files_of(self._local, run_id, "")
        except OSError as error:
            raise CallbackError(f"TensorBoard cannot use {self.directory}: {error}. Pass a writable directory.") from error
        self._run_id = run_id
        self._files = EventFiles(self._local, run_id, step, mirror=self._mirror)
        # The training loop uses the same clock.
        self._schedules = {name: Schedule(trigger, time.monotonic()) for name, trigger in self._triggers.items()}
        self._plain_run = None
        self._reset(step)
        self._is_new = is_new

    @property
    def _groups(self) -> tuple[str, ...]:
        return (TRAIN, *self.params.get("validation_sets", ()))

    @property
    def _local(self) -> Path:
        if self._mirror is not None:
            return self._mirror.directory
        assert isinstance(self.directory, Path)
        return self.directory

    @override
    def drop_closing(self) -> None:
        self._drop_closing(self._first_step)

    def _drop_closing(self, step: int) -> None:
        for path in files_of(self._local, str(self._run_id), f"{CLOSING}{step}"):
            path.unlink()

    @override
    def sync(self) -> Callable[[], None] | None:
        return None if self._files is None else self._files.sync()

    @override
    def close(self) -> None:
        files, self._files = self._files, None
        mirror, self._mirror = self._mirror, None
        try:
            if files is not None:
                files.close()
        finally:
            if mirror is not None:
                mirror.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        now = time.monotonic()
        # Without tags of measured times, so that a resumed run's state equals that of an uninterrupted one.
        written = {"written": [self._written.step, *sorted(tag for tag in self._written.tags if not tag.startswith("time/"))]}
        return {name: schedule.state_dict(now)["since"] for name, schedule in self._schedules.items() if schedule.measures_time} | written

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, schedule in self._schedules.items():
            schedule.load_state_dict({"since": state.get(name, ())}, time.monotonic())
        step, *tags = state.get("written", [-1])
        self._written = Written(int(step), frozenset(tags))
        if self._files is not None and self._written.step > 0 and self._is_new:
            warn(f"{self.directory} no longer has the event files of this run. They were moved or deleted, so the curves begin at this step.")

    # -- events --

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        continues = self._open_plain_run(checkpoint)
        if continues is not None:
            self._is_described = continues
        assert self._files is not None
        self._describe(self._files, checkpoint)
        moment = checkpoint.run.position.moment
        fired = {name for name, schedule in self._schedules.items() if schedule.due(moment)}
        self._write_evaluations(self._files, checkpoint)
        # The loop's schedule and those here read the clock at slightly different times. If only the loop's fired, write values.
        is_end = self._plain_run is not None and checkpoint.is_last
        if "values" in fired or checkpoint.epoch_ends or is_end or not (fired or checkpoint.evaluations):
            self._write_training(self._files, checkpoint)
            self._write_sown(self._files, checkpoint)
        if "histograms" in fired:
            self._write_histograms(self._files, checkpoint)
        if is_end:
            wait = self._files.sync()  # A loop without a trainer may never call `close`.
            if wait is not None:
                wait()
                self._files.raise_failure()

    @override
    def on_closing(self, checkpoint: Checkpoint, epoch: int, logs: Mapping[str, Any]) -> None:
        if self._files is not None:
            self._describe(self._files, checkpoint)
        self._drop_closing(checkpoint.step)  # From a process that was killed after it wrote these files, before the epoch's row was saved.
        files = EventFiles(self._local, str(self._run_id), self._first_step, mark=f"{CLOSING}{checkpoint.step}", mirror=self._mirror)
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
        # The thread reads values that are still on the device.
        logs, step_values = checkpoint.logs.deferred(late=ends), checkpoint.run.step_values
        rates, kinds, has_norm = learning_rates(checkpoint), checkpoint.logs.kinds, checkpoint.has_gradients_norm
        clock, stamp = self._clock, self._clock.read(checkpoint, self.params)
        flops, peak = self.params.get("model_flops"), self._peak_flops or _peak_of(checkpoint)
        step, now = checkpoint.step, time.time()

        def write_all(write: Write) -> None:
            values = {key: value for key, value in logs().items() if key not in evaluated}
            if step_values is not None:
                values |= {"step/loss": step_values.loss} | ({"step/gradients_norm": step_values.gradients_norm} if has_norm else {})
            values |= {name: float(jax.device_get(rate)) for name, rate in rates.items()}
            if ends:
                values["epoch"] = checkpoint.epoch + 1
            values |= clock.rates(stamp)
            values |= _utilization(values.get("time/steps_per_second"), flops, peak)
            # If a partial epoch ends at this step, the step is written again, and only new tags are added.
            values = {tag: value for tag, value in values.items() if tag not in written.tags}
            written.tags |= values.keys()
            write_logged(functools.partial(write, TRAIN, step, now), values, kinds)

        files.submit(write_all)

    def _write_evaluations(self, files: EventFiles, checkpoint: Checkpoint) -> None:
        groups, kinds, step, now = checkpoint.evaluations, checkpoint.logs.kinds, checkpoint.step, time.time()

        def write_all(write: Write) -> None:
            for group, values in groups.items():
                own_kinds = {key: kinds[flat_name(group, key)] for key in values if flat_name(group, key) in kinds}
                write_logged(functools.partial(write, group, step, now), values, own_kinds)

        if groups:
            files.submit(write_all)

    def _write_sown(self, files: EventFiles, checkpoint: Checkpoint) -> None:
        values, step, now = self._sown(checkpoint), checkpoint.step, time.time()
        if values:
            files.submit(lambda write: write_sown(functools.partial(write, TRAIN, step, now), values))

    def _write_histograms(self, files: EventFiles, checkpoint: Checkpoint) -> None:
        trees, step, now = {"params": checkpoint.model_params, "grads": self._kept(lambda: checkpoint.grads)}, checkpoint.step, time.time()
        leaves = {f"{name}/{path}": leaf for name, tree in trees.items() for path, leaf in named_leaves(tree)}
        readable = {tag: leaf for tag, leaf in leaves.items() if leaf.is_fully_addressable or leaf.is_fully_replicated}
        if len(readable) < len(leaves):
            warn(f"TensorBoard writes no histograms of {len(leaves) - len(readable)} arrays, because they are split between processes.")

        def write_all(write: Write) -> None:
            for tag, leaf in readable.items():
                write_histogram(functools.partial(write, TRAIN, step, now), tag, leaf)

        files.submit(write_all)

    def _describe(self, files: EventFiles, checkpoint: Checkpoint) -> None:
        """Writes the environment once per process, and the hyperparameters once per run."""
        if self._is_described:
            return
        self._is_described = True
        # After a resume, at the step after the restored one: if the process is killed before it saves, the next resume drops this with its other events.
        step, now = self._first_step and self._first_step + 1, time.time()
        environment = describe_environment(checkpoint.run.borrow().params)
        hyperparameters = dict(self.params.get("hyperparameters", {})) if self._is_new else {}
        tags = [(path_component(group), key) for group in self._groups for key in checkpoint.logs if key not in checkpoint.evaluated]

        def write_all(write: Write) -> None:
            from tensorboardX import summary

            if hyperparameters:  # Empty if the run already has event files.
                for part in hyperparameter_summaries(hyperparameters, tags, now):
                    write("", 0, now, part)
            write("", step, now, summary.text("environment", environment))

        files.submit(write_all)


def _peak_of(checkpoint: Checkpoint) -> float | None:
    leaf = next(iter(jax.tree.leaves(checkpoint.run.borrow().params)), None)
    return peak_flops_of(next(iter(leaf.devices())).device_kind) if isinstance(leaf, jax.Array) else None


def _utilization(steps_per_second: float | None, flops: float | None, peak: float | None) -> dict[str, float]:
    """Returns model FLOPS, and their utilization (Chowdhery et al., "PaLM", 2022, appendix B)."""
    if not steps_per_second or not flops:
        return {}
    values = {"time/model_flops_per_second": steps_per_second * flops}
    return values | ({"time/model_flops_utilization": steps_per_second * flops / peak} if peak else {})


@dataclasses.dataclass
class Written:
    """The tags of training that were written at a step. The thread replaces `tags` and never mutates them, so the training thread can read them."""

    step: int
    tags: frozenset[str] = frozenset()
