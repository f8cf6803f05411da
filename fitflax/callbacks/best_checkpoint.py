"""`BestCheckpoint`: saves the checkpoints with the best values of a metric."""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from typing_extensions import override

from fitflax.callbacks.base import Phase, failure_since, has_state
from fitflax.callbacks.early_stopping import Monitor
from fitflax.callbacks.model_checkpoint import StoreCallback
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.checkpoint_files import FOR_INFERENCE
from fitflax.checkpoints.restore import restore_tree
from fitflax.checkpoints.shard_format import wait_until_visible
from fitflax.errors import CheckpointError, warn
from fitflax.logs import Logs
from fitflax.parallel.placement import count_processes
from fitflax.parallel.processes import exchange


class BestCheckpoint(StoreCallback):
    """Saves a checkpoint when a monitored value is strictly better than the worst kept one, or fewer than `keep` are kept. NaN is never saved.

    In `fit` it checks the value at validations and at the end of each epoch. As a plain function it checks every checkpoint that it gets.

    Args:
        directory: A path or a URL. It may be the directory of a `ModelCheckpoint`.
        monitor: The flat name of the value, such as `"val_loss"`.
        mode: `"min"`, `"max"`, or `None` for the direction that the loss or metric declares.
        keep: The number of best checkpoints to keep; `None` keeps a checkpoint of every observed value.
        restore_best: Whether to restore the best parameters, their averages and collections at the end of `fit`, after the last checkpoint.
        initial_value: A threshold; only better values are saved.
        overwrite: Whether a new run may replace another run in the directory.
        asynchronous: Whether training continues during a save; see `ModelCheckpoint`.
        backend: The backend that writes the state; see `ModelCheckpoint`.
        on_save_error: Whether a failed save ends the run; see `ModelCheckpoint`.
        storage_options: Options for a URL; see `ModelCheckpoint`.

    Attributes:
        best: The best value so far; `None` if there is none.
        best_step: The step of the best value.

    Raises:
        CallbackError: An argument is out of range.
        CheckpointError: The backend is unknown.

    >>> BestCheckpoint("runs/a/best", monitor="val_accuracy").best is None
    True
    """

    phase = Phase.SAVE_BEST
    _key_arguments = (("monitor", "_monitor.key"), ("directory", "directory.name"))

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        monitor: str = "val_loss",
        mode: str | None = None,
        keep: int | None = 1,
        restore_best: bool = False,
        initial_value: float | None = None,
        overwrite: bool = False,
        asynchronous: bool = True,
        backend: str = "msgpack",
        on_save_error: str = "raise",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            directory, keep=keep, overwrite=overwrite, asynchronous=asynchronous, backend=backend, on_save_error=on_save_error, storage_options=storage_options
        )
        self.restore_best = restore_best
        self.initial_value = initial_value
        self._monitor = Monitor("BestCheckpoint", monitor, mode)
        self._in_fit = False
        self._failure_before: BaseException | None = None
        self._begin_step = 0
        # Pairs (value, step), the best first. `_closing` was saved by a run that ended inside an epoch, after its last checkpoint.
        self._kept: list[tuple[float, int]] = []
        self._closing: tuple[float, int] | None = None
        # The checkpoint that is about to be saved, and `_kept` before it.
        self._saving: tuple[float, int] | None = None
        self._kept_before: list[tuple[float, int]] = []
        self._decided_step: int | None = None
        # Steps that the newest checkpoint of the whole run lists as the best. A resume needs them, so they are deleted only after a newer one is complete.
        self._referenced: set[int] = set()
        self._resumed_step = 0

    @property
    def _kept_steps(self) -> set[int]:
        return {step for _, step in self._kept}

    @property
    def _ranking(self) -> list[tuple[float, int]]:
        self._drop_failed_saves()
        return self._rank([*self._kept, *filter(None, [self._closing])])

    @property
    def best(self) -> float | None:
        """The best value so far; `None` if there is none."""
        return self._ranking[0][0] if self._ranking else None

    @property
    def best_step(self) -> int | None:
        """The step of the best value; `None` if there is none."""
        return self._ranking[0][1] if self._ranking else None

    @property
    @override
    def owner(self) -> str:
        return f"{type(self).__name__}({self._monitor.key})"

    @override
    def open_run(self, run_id: str, step: int) -> None:
        super().open_run(run_id, step)
        self._closing = None
        self._referenced = set()
        self._resumed_step = step
        self._kept = self._on_disk()

    def _on_disk(self) -> list[tuple[float, int]]:
        values = [(self.store.metric(saved, self._monitor.key), saved) for saved in self.store.wanted(self.owner)]
        return [(value, saved) for value, saved in values if value is not None and value == value]

    def _drop_failed_saves(self) -> None:
        """After a failed save, reads from disk which checkpoints are kept. An earlier one may be the best again."""
        if self._saver is not None and self._saver.has_lost:
            # If the saver is busy and did not fail again, the save of a newer checkpoint may be queued.
            self._reload([] if self._saver.failure is not None or self._saver.is_idle else self._kept)

    def _reload(self, queued: Sequence[tuple[float, int]] = ()) -> None:
        """Reads from disk which checkpoints are kept, and adds those of `queued` that are newer."""
        with contextlib.suppress(CheckpointError):  # The failed save has already reported that the disk is unavailable.
            on_disk = self._on_disk()
            newest = max((step for _, step in on_disk), default=-1)
            self._keep_best_of([*on_disk, *(entry for entry in queued if entry[1] > newest)])

    def _keep_best_of(self, entries: list[tuple[float, int]]) -> None:
        """Keeps the best of `entries` and of the one that is being saved."""
        others = [entry for entry in entries if self._saving is None or entry[1] != self._saving[1]]
        self._kept = self._rank([*others, *filter(None, [self._saving])])[: self.keep]

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._monitor.check_sets(self.params.get("validation_sets"))
        self._in_fit, self._failure_before, self._begin_step = True, sys.exception(), self.trainer.step
        self._referenced = self._kept_steps if self._is_run_saved else set()  # The newest checkpoint of the run may be from an earlier `fit`.

    @override
    def before_saves(self, checkpoint: Checkpoint) -> None:
        self.drop_unsaved()
        self._decided_step = checkpoint.step
        if self._in_fit and not checkpoint.epoch_ends and self._monitor.key not in checkpoint.evaluated:
            return
        self._open_plain_run(checkpoint)
        value = self._candidate(checkpoint.logs, checkpoint.step)
        if value is not None:
            self._saving, self._kept_before = (value, checkpoint.step), self._kept
            self._keep_best_of(self._kept)

    @override
    def drop_unsaved(self) -> None:
        # A subclass did not save the checkpoint, or a second Ctrl-C came before `on_checkpoint`.
        if self._saving is not None:
            self._saving, self._kept = None, self._kept_before
        self._decided_step = None

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        try:
            if self._decided_step != checkpoint.step:  # Called as a plain function, or by a callback that forwards hooks.
                self.before_saves(checkpoint)
        finally:
            self._decided_step = None
        if self._saving is None:
            return
        try:
            self._save(checkpoint, self._kept_steps | self._referenced)
        except CheckpointError:
            self._saving = None
            self._reload()
            raise
        finally:
            self._saving = None

    @override
    def on_closing(self, checkpoint: Checkpoint, epoch: int, logs: Mapping[str, Any]) -> None:
        # Delete nothing: the last checkpoint of the whole run does not have this value, and a resume from it needs the checkpoints that it lists.
        value = self._candidate(checkpoint.logs, checkpoint.step)
        if value is not None and checkpoint.step not in self._kept_steps:
            self._closing = (value, checkpoint.step)
            self._save(checkpoint, self._kept_steps | {checkpoint.step} | self._referenced)

    @override
    def load_closing(self, step: int, epoch: int, logs: Logs) -> None:
        value = self._candidate(logs, step) if self._monitor.key in logs else None
        if value is not None and step in self.store.wanted(self.owner):
            self._closing = (value, step)

    def _candidate(self, logs: Logs, step: int) -> float | None:
        """Returns the monitored value if its checkpoint should be saved."""
        value = self._monitor.value(logs, self.params.get("validation_sets", ()) if self._in_fit else ())
        if value is None or not self._monitor.is_better(value, self.initial_value):
            return None
        # After a resume, more than `keep` checkpoints may exist, for example if `keep` is smaller than before.
        others = self._rank([entry for entry in self._kept if entry[1] != step])[: self.keep]
        is_full = self.keep is not None and len(others) >= self.keep
        return value if not is_full or self._monitor.is_better(value, others[-1][0]) else None

    def _rank(self, entries: list[tuple[float, int]]) -> list[tuple[float, int]]:
        sign = -1.0 if self._monitor.direction == "max" else 1.0
        return sorted(entries, key=lambda entry: (sign * entry[0], entry[1]))

    @override
    def run_was_saved(self) -> None:
        if self._referenced - self._kept_steps and self._saver is not None and not self._saver.has_lost:
            # Queued after the current save, whose checkpoint lists the steps that a resume from it needs.
            self._saver.submit(functools.partial(self.store.retain, self.owner, self._kept_steps), is_save=False)
        self._referenced = self._kept_steps

    @override
    def drop_closing(self) -> None:
        self.store.retain(self.owner, self._kept_steps)

    @override
    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        if not self._in_fit:  # The run failed before `on_train_begin`.
            return
        self._in_fit, failure_before, self._failure_before = False, self._failure_before, None
        self.drop_unsaved()
        has_failed = failure_since(failure_before) is not None
        if not self.restore_best or (has_failed and self.trainer.step == self._begin_step):  # Before the first step, the best is that of an earlier `fit`.
            return
        self._wait_for_saves(self._saver)
        step = best_step = self.best_step
        if best_step is not None and not jax.process_index():
            # If the run resumed from an older checkpoint, a better one that it has not reached again may have replaced this one.
            present = set(self.store.steps())
            step = next((one for _, one in self._ranking if one in present), None)
            if step != best_step:
                what = "the last parameters are kept" if step is None else f"the parameters of step {step} are restored"
                warn(f"{self.directory} no longer contains the best checkpoint (step {best_step}), so {what}.")
        # A state that is not split is saved by process 0 alone, so the others wait for it here. After a failure, not all processes may get here.
        if jax.process_count() > 1 and not has_failed and count_processes(self.trainer.state.step.devices()) > 1:
            step = exchange(step, "the best checkpoint")[0]
        if step is not None and has_state(self.trainer):  # Otherwise, do not hide the error that ended the run.
            path = self.store.path(step)
            if jax.process_index() and isinstance(path, Path):
                wait_until_visible(path)
            saved, state = self.store.restore(step, FOR_INFERENCE), self.trainer.state
            names = ("params", "model_state") if state.ema_params is None else ("params", "model_state", "ema_params")
            where, impls = str(saved.path), saved.metadata["key_impls"]
            parts = {name: restore_tree(getattr(state, name), saved.train[name], where=where, root=f"train/{name}", key_impls=impls) for name in names}
            self.trainer.replace_state(dataclasses.replace(state, **parts))

    @override
    def state_dict(self) -> dict[str, Any]:
        self._drop_failed_saves()
        return {"kept": [[value, step] for value, step in self._kept], "direction": self._monitor.direction}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._monitor.direction = self._monitor.mode or state["direction"]
        kept = [(float(value), int(step)) for value, step in state["kept"]]
        kept_steps = {step for _, step in kept}
        if self._resumed_step in kept_steps and self._resumed_step not in self.store.steps():
            # If the process died after another callback had saved the step, but before this one had, the step has not replaced the previous best.
            previous = [entry for entry in self._on_disk() if entry[1] not in kept_steps]
            if previous or not self.store.was_begun(self._resumed_step):
                kept = self._rank([*(entry for entry in kept if entry[1] != self._resumed_step), *previous])[: self.keep]
        # A checkpoint that a better one has replaced is not lost: a run that resumes from an older checkpoint will reach the better one again.
        gone = self.store.lost(self.owner, [step for _, step in kept])
        self._kept = [entry for entry in kept if entry[1] not in gone]
        if gone:
            warn(
                f"{self.directory} does not contain the best checkpoints of steps {gone}: they were removed, or the process died before it saved them. Later "
                "checkpoints are compared only with the remaining ones."
            )
        # If no callback saves the whole run, a resume starts at the newest best checkpoint and needs no older ones.
        self._referenced = self._kept_steps if self._is_run_saved else set()
        if self.store.steps():  # Delete checkpoints that a killed process did not delete. `load_closing` may need the resumed step.
            self.store.retain(self.owner, self._kept_steps | ({self._resumed_step} & set(self.store.wanted(self.owner))))
