"""The checkpoints of a run in one directory: which exist, which is best, and when they are deleted.

`directories` changes the files, `retention` decides which are kept, `checkpoint_files` has their contents, and callbacks decide when to save. Nothing is
deleted before its replacement is complete. So a process can be killed at any point, and the next one finds every checkpoint that it may need. If `save` has
written the checkpoint and cannot delete older ones, it warns. After any other failure of `save`, its step is not listed.

A store must be used by one thread at a time. Several stores of one run may share a directory; `fitflax.storage.lock` prevents two runs from doing so.
"""

import dataclasses
import functools
import math
import operator
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from fitflax.checkpoints.checkpoint_files import WHOLE, CollectiveRead, Saved, check_backend, read_checkpoint, read_metadata, write_checkpoint
from fitflax.checkpoints.directories import LocalDirectory, ObjectDirectory, checkpoint_name, disk_errors
from fitflax.checkpoints.json_documents import PROCESS, read_document
from fitflax.checkpoints.retention import RETENTION_FILE, Retention, parse_retention
from fitflax.checkpoints.saver import Saver
from fitflax.checkpoints.shard_format import CollectiveSave
from fitflax.errors import CheckpointError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError, DirectoryInUseError, warn
from fitflax.logs import flat_name
from fitflax.state import PyTree
from fitflax.storage import Location, ObjectPath, locate
from fitflax.storage.lock import check_held, holder_of, lock_directory

_RUN = ".run.json"


def _first_process_only(change: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(change)
    def checked(store: "CheckpointStore", *arguments: Any, **options: Any) -> None:
        if jax.process_index() == 0:
            change(store, *arguments, **options)

    return checked


class CheckpointStore:
    """Stores the checkpoints of one run in one directory, each in a subdirectory such as `step_00002000/`.

    Creating a store does not touch the disk. Call `claim` before the first `save`. Only the first process changes the directory; all processes can read
    it. Methods raise `CheckpointError` if the disk fails.

    Args:
        directory: The directory, which need not exist.
        backend: The format of states: `"msgpack"`, one file that flax can read, or `"orbax"`. A directory can contain both.
        storage_options: For a URL, the arguments of obstore's store that the environment does not provide, such as `endpoint` or `access_key_id`.

    Raises:
        CheckpointError: The backend does not exist or does not support URLs, or the URL is not supported.
        ImportError: The package for object stores is not installed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     store = CheckpointStore(directory)
    ...     store.claim("run-a", overwrite=False)
    ...     for step, loss in ((10, 0.5), (20, 0.7)):
    ...         metadata = {"run_id": "run-a", "step": step, "metrics": {"val": {"loss": loss}}}
    ...         path = store.save(step=step, train={"w": 1.0}, run={}, metadata=metadata, owner="me", keep=[10])
    ...     path.name, store.steps(), store.latest(), store.best("val_loss", "min"), store.restore(10).train
    ('step_00000020', [10, 20], 20, 10, {'w': 1.0})
    """

    def __init__(self, directory: str | os.PathLike[str], *, backend: str = "msgpack", storage_options: Mapping[str, Any] | None = None) -> None:
        check_backend(backend)
        if re.search(r"\{\w+(:[^{}]*)?\}", str(directory)):
            raise ConfigError(
                f"A directory of checkpoints must not have placeholders: each checkpoint is named by its step, as in step_00000010. Received: {directory!s}."
            )
        place = locate(directory, owner="A directory of checkpoints", error=CheckpointError, options=storage_options)
        self.directory = place
        self._files = ObjectDirectory(place) if isinstance(place, ObjectPath) else LocalDirectory(place)
        if backend == "orbax" and isinstance(place, ObjectPath):
            raise CheckpointError(f"backend='orbax' writes only to file systems, not to object stores. Received: {place}. Use backend='msgpack', the default.")
        self.backend = backend
        self.storage_options = storage_options
        self._saver: Saver | None = None
        self._claim: dict[str, Any] = {}  # The contents of `.run.json` that this store has written.
        # Cached contents of the directory's notes, with the version of the file.
        self._cache: dict[str, tuple[object, dict[str, Any]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickling, without the saver of this process."""
        return {**vars(self), "_saver": None}

    @_first_process_only
    def lock(self, saver: Saver) -> None:
        """Locks the directory for a run until `saver.close()`: now if it exists, otherwise once `claim` has created it."""
        self._saver = saver
        with disk_errors("lock", self.directory):
            if self._exists():
                self._acquire_lock()

    def _acquire_lock(self) -> None:
        """Locks the directory for the saver of a run, or for this store if it is used without a run."""
        if self._saver is not None:
            self._saver.lock(self.directory)
        elif holder_of(self.directory) is None:
            lock_directory(self.directory, self)

    def _exists(self) -> bool:
        return isinstance(self.directory, ObjectPath) or self.directory.is_dir()

    def path(self, step: int) -> Location:
        """Returns the path of the checkpoint of `step`, which need not exist."""
        return self.directory / checkpoint_name(step)

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints in ascending order, without verifying them."""
        with disk_errors("list", self.directory):
            return self._files.contents().steps

    def size_and_time(self, step: int) -> tuple[int, float]:
        """Returns the size of a checkpoint in bytes, and when it was written, in seconds since 1970."""
        with disk_errors("inspect", self.path(step)):
            return self._files.size_and_time(step)

    def latest(self) -> int | None:
        """Returns the largest step, or `None` if there are no checkpoints."""
        return max(self.steps(), default=None)

    def best(self, monitor: str, mode: str) -> int | None:
        """Returns the step of the checkpoint with the best value of a metric; the earliest of equal ones, or `None` if none has a number.

        Args:
            monitor: The flat name: `<key>` for the group `train`, `<group>_<key>` for others.
            mode: `"min"` or `"max"`.

        Raises:
            ConfigError: `mode` is neither.

        Warns:
            FitflaxWarning: The metadata of a checkpoint cannot be read; the checkpoint is skipped.
        """
        if mode not in ("min", "max"):
            raise ConfigError(f"mode must be 'min' or 'max'. Received: {mode!r}.")
        metrics = ((step, _metric(self._metadata(step, warns=True), monitor)) for step in self.steps())
        values = {step: value for step, value in metrics if value is not None}
        return (min if mode == "min" else max)(values, key=values.__getitem__, default=None)

    def metric(self, step: int, monitor: str) -> float | None:
        """Returns a metric of a checkpoint by its flat name, or `None` if it is not a number or the metadata cannot be read."""
        return _metric(self._metadata(step), monitor)

    def wanted(self, owner: str) -> list[int]:
        """Returns the existing steps that `owner` wants in ascending order, and those that are newer than `retention.json`."""
        wanted_steps = self._retention().wanted(owner)
        return [step for step in self.steps() if step in wanted_steps]

    def lost(self, owner: str, steps: Collection[int]) -> list[int]:
        """Returns which of `steps`, once saved for `owner`, are gone although it still wants them, because someone else removed them."""
        table, present = self._retention(), set(self.steps())
        return sorted(step for step in steps if step not in present and (not table.is_known or step in table.owners.get(owner, ())))

    def was_begun(self, step: int) -> bool:
        """Returns whether a save of `step` may have begun here. It has not if `step` is newer than all steps in `retention.json`."""
        return step <= self._retention().newest

    def owners(self) -> dict[str, list[int]]:
        """Returns the steps that each owner wants; `{}` if that is not known."""
        return dict(self._retention().owners)

    def restore(self, step: int | None = None, roots: Collection[str] = WHOLE) -> Saved:
        """Returns the checkpoint of `step`, by default the latest, verified. `roots` are the parts to read, as in `newest_good`; others are not verified.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint. The message lists those that exist.
            CorruptCheckpointError: A check fails.
        """
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise CheckpointNotFoundError(f"There is no {wanted} in {self.directory}; it holds {_list_steps(steps)}.")
        return read_checkpoint(self.path(steps[-1] if step is None else step), roots)

    def verify(self, step: int | None = None) -> None:
        """Verifies the checkpoint of `step`, or all checkpoints. Raises the same errors as `restore`."""
        for each in self.steps() if step is None else (step,):
            self.restore(each)

    def newest_good(
        self, roots: Collection[str] = WHOLE, *, accepts: Callable[[Saved], bool] = lambda saved: True, together: CollectiveRead | None = None
    ) -> tuple[Saved | None, list[CheckpointError]]:
        """Returns the newest checkpoint that passes verification, or `None`, and for each newer one an error that begins with its name.

        A run may use the directory: if it deletes a checkpoint while it is being read, its newer ones are tried.

        Args:
            roots: The parts to read, as in `checkpoint_files.read_checkpoint`.
            accepts: A function that returns whether to accept a good checkpoint; others are skipped silently.
            together: Facts about the other processes, if several read together.
        """
        found: Saved | None = None
        faults: dict[int, CheckpointError] = {}
        passed = set() if together is None else set(together.damaged)
        while found is None and (untried := (listed := set(self.steps())) - passed):
            step = max(untried)
            path = self.path(step)
            passed.add(step)
            try:
                if accepts(saved := read_checkpoint(path, roots, share=None if together is None else together.share)):
                    found = saved
            except CheckpointError as error:
                if together is not None:
                    together.damaged.add(step)
                faults[step] = type(error)(f"{path.name}: {str(error).replace(f'{path}/', '')}")
        return found, [fault for other, fault in faults.items() if other in listed and (found is None or other > step)]

    def run_id(self) -> str | None:
        """Returns the run that the checkpoints belong to; without checkpoints, the one that last claimed the directory; `None` if unknown."""
        run_ids = (self._metadata(step).get("run_id") for step in reversed(self.steps()))
        return next((run_id for run_id in run_ids if run_id is not None), self._read(_RUN).get("run_id"))

    def has_saved(self) -> bool:
        """Returns whether the run of `run_id` has completed a checkpoint in this directory, even if none is left."""
        return bool(self.steps()) or self._read(_RUN).get("has_saved") is True

    @_first_process_only
    def claim(self, run_id: str, *, overwrite: bool) -> None:
        """Claims the directory for a run, and cleans up after processes that died in it. Call it before the first step.

        With `overwrite`, another run's checkpoints are set aside. They are deleted once the first new one is complete; if none is ever saved, the next claim
        restores them and their owners. Without `overwrite`, or if another run is using the directory, `DirectoryInUseError` is raised, and nothing is changed.
        """
        with disk_errors("claim", self.directory):
            self._files.make()
            self._acquire_lock()
            claim = {"run_id": run_id, "process": PROCESS}
            if not claim.items() <= self._read(_RUN).items():  # Otherwise another owner of this run has claimed it: what it set aside must not be restored.
                self.recover()
            others = self._steps_of_others(run_id)
            if others and not overwrite:
                raise DirectoryInUseError(
                    f"{self.describe_others(run_id)}. "
                    f'To resume that run, pass resume="auto" if it has a ModelCheckpoint, otherwise resume="{self.directory}". To start a new run, choose '
                    "another directory, or pass overwrite=True to the callback, which replaces these checkpoints."
                )
            note = self._read(_RUN)
            has_saved = len(self.steps()) > len(others) or (note.get("run_id") == run_id and note.get("has_saved") is True)
            # Write the note first, because this is more likely to fail than renames. A checkpoint's metadata takes precedence over it.
            self._write_claim({**claim, "has_saved": has_saved})
            if others:
                self._files.set_aside(sorted(others), since=0)

    def _write_claim(self, claim: dict[str, Any]) -> None:
        self._files.write_note(_RUN, claim)
        self._claim = claim

    def _steps_of_others(self, run_id: str) -> dict[int, Any]:
        """Returns the runs of the checkpoints that belong to other runs, by step; `None` for an unknown run."""
        # If the metadata of a checkpoint is damaged, it belongs to the run that claimed the directory.
        noted = self._read(_RUN).get("run_id")
        return {step: other for step in self.steps() if (other := self._metadata(step).get("run_id", noted)) != run_id}

    def describe_others(self, run_id: str) -> str | None:
        """Returns, for errors, which checkpoints in the directory belong to other runs than `run_id`; `None` if none does."""
        others = self._steps_of_others(run_id)
        if not others:
            return None
        names = ", ".join(sorted({"an unknown run" if other is None else f"run {other!r}" for other in others.values()}))
        return f"{self.directory} holds checkpoints of {names}: {_list_steps(sorted(others))}"

    @_first_process_only
    def drop_after(self, step: int) -> None:
        """Sets aside the checkpoints after `step`, as a run that resumes from `step` must.

        They are no longer listed, and are deleted once a checkpoint after `step` is saved. If there never is one and no other checkpoints are left, the
        next `claim` restores them.
        """
        with disk_errors("set checkpoints aside in", self.directory):
            self._check_held()
            later_steps = [later for later in self.steps() if later > step]
            if later_steps:
                self._files.set_aside(later_steps, since=step + 1)

    @_first_process_only
    def recover(self) -> None:
        """Finishes or undoes what a process left incomplete when it died. `claim` calls it; to resume, call it before `newest_good`.

        It must not run while another process uses the directory.
        """
        with disk_errors("clean up", self.directory):
            # With the lock and an idle saver, nothing is being written. Then even this process's temporary files are leftovers, of a run whose disk failed.
            self._files.recover(is_alone=self._saver is not None and self._saver.is_idle)
            complete, set_aside = self._files.contents()
            for aside in set_aside:
                if complete and complete[-1] >= aside.since:
                    self._files.delete_set_aside(aside)
                elif not complete:  # Otherwise it stays: a resume set it aside, and the checkpoint that it resumed from still exists.
                    self._files.put_back(aside)

    def save(
        self,
        *,
        step: int,
        train: PyTree,
        run: PyTree,
        metadata: Mapping[str, Any],
        owner: str,
        keep: Collection[int],
        also: Collection[str] = (),
        collective: CollectiveSave | None = None,
    ) -> Location:
        """Writes a checkpoint and, once it is complete and on the disk, deletes those that no owner keeps anymore.

        If another owner has saved the step in this process and run, with all these metrics, this owner is added without writing again. Any other checkpoint
        of the step is replaced.

        Args:
            step: The number of completed steps.
            train: The TrainState.
            run: Everything else that a resume needs.
            metadata: At least `run_id`; `step` and the `process` are added.
            owner: The owner of the checkpoint.
            keep: The steps that this owner keeps from now on, besides `step`.
            also: Owners that will save the same step next. If the process dies before they do, they own it too.
            collective: The collective save that this process leads, if any.

        Returns:
            The path of the checkpoint.

        Raises:
            ConfigError: `step` is not a non-negative integer.
            CheckpointError: The disk fails, or something cannot be saved. The step is not listed, or is unchanged, and all others are intact.

        Warns:
            FitflaxWarning: The checkpoint is saved, but older ones could not be deleted, or `retention.json` is damaged.
        """
        if jax.process_index():
            return self.path(step)
        try:
            index = operator.index(step)
        except TypeError:
            index = -1
        if index < 0:
            raise ConfigError(f"step must be an integer of at least 0. Received: {step!r}.")
        step = index
        path = self.path(step)
        wanted_steps = {*map(int, keep), step}
        with disk_errors("save", path):
            if not self._exists():
                raise CheckpointError(
                    f"Could not save {path}: {self.directory} is gone, with the checkpoints in it. It was removed, moved or replaced during the run. "
                    "Put it back and resume, or start a new run in another directory."
                )
            self._check_held()
            present = self._files.recent_contents().steps
            existing = self._metadata(step) if step in present else {}
            same = (existing.get("process"), existing.get("run_id")) == (PROCESS, metadata.get("run_id"))
            is_written, unnoted = False, None
            try:
                lacks_metrics = dict(_metrics(metadata)).keys() - dict(_metrics(existing)).keys()
                is_written = same and not lacks_metrics and self._retention(present).is_saved_by_others_only(step, owner)
                # Recorded before the checkpoint exists: if the process dies in between, a resume finds the owners that want it.
                self._record(owner, wanted_steps, present, step=step, also=also, is_new=not same)
            except (OSError, CheckpointError) as error:
                unnoted = error  # Save anyway.
            if not is_written:
                metadata = {**metadata, "step": step, "process": PROCESS}
                write = functools.partial(write_checkpoint, train=train, run=run, metadata=metadata, backend=self.backend, collective=collective)
                self._files.write(step, write)
        try:
            if unnoted is not None:
                raise unnoted
            self._check_held()
            present, set_aside = self._files.recent_contents()
            for aside in set_aside:
                if step >= aside.since:
                    self._files.delete_set_aside(aside)
            self._delete_unwanted(present)
            if not self._claim.get("has_saved", True):
                self._write_claim({**self._claim, "has_saved": True})
        except (OSError, CheckpointError) as error:
            fault = str(error).rstrip(".")
            warn(f"{path} was saved, but {self.directory} could not be cleaned up: {fault}. More checkpoints are kept than you asked for.")
        return path

    def _check_held(self) -> None:
        """Raises `DirectoryInUseError` if another process has taken over the directory, or uses a new directory at its path."""
        check_held(self.directory)
        if isinstance(self.directory, ObjectPath) or not self._claim:
            return
        try:
            note = self._read(_RUN)
        except CheckpointError:
            return  # The caller also accesses the disk, and reports its error.
        if isinstance(note.get("process"), str) and note["process"] != self._claim["process"]:
            raise DirectoryInUseError(
                f"Another process uses {self.directory} for run {note.get('run_id')!r}, because the directory was removed, moved or replaced during this run, "
                "or cannot be locked. This run saves nothing more there. Resume it in another directory."
            )

    @_first_process_only
    def retain(self, owner: str, keep: Collection[int]) -> None:
        """Changes the steps that an owner keeps, and deletes those that no owner keeps anymore."""
        with disk_errors("delete checkpoints in", self.directory):
            self._check_held()
            present = self.steps()
            self._record(owner, set(map(int, keep)), present)
            self._delete_unwanted(present)

    def _record(
        self, owner: str, wanted_steps: Collection[int], present: list[int], *, step: int | None = None, also: Collection[str] = (), is_new: bool = False
    ) -> None:
        """Records which of the existing steps an owner wants from now on; arguments are those of `Retention.recorded`."""
        retention = self._retention(present)
        if not retention.is_known and (self.directory / RETENTION_FILE).exists():
            kept = _list_steps(sorted(set(present).difference(wanted_steps)))
            warn(f"{self.directory / RETENTION_FILE} is damaged, so checkpoints that may still be needed are kept: {kept}. Delete those that you do not need.")
        note = retention.recorded(owner, wanted_steps, present, step=step, also=also, is_new=is_new)
        # A save syncs the directory later, after renaming the checkpoint.
        self._files.write_note(RETENTION_FILE, note, is_durable=step is None)
        self._cache[RETENTION_FILE] = (self._files.version(RETENTION_FILE), note)

    def _delete_unwanted(self, present: list[int]) -> None:
        for step in self._retention(present).unwanted(present):
            self._files.delete(step)

    def _retention(self, present: list[int] | None = None) -> Retention:
        return parse_retention(self._read(RETENTION_FILE), self.steps() if present is None else present)

    def _read(self, name: str) -> dict[str, Any]:
        """Returns the contents of one of the directory's notes, or `{}` if it is missing or damaged."""
        try:
            version = self._files.version(name)
        except OSError:
            return {}
        # Cached: reading and verifying it three times per save takes as long as writing a small state.
        if self._cache.get(name, ((), {}))[0] != version:
            try:
                self._cache[name] = (version, read_document(self.directory / name))
            except CorruptCheckpointError:
                self._cache[name] = (version, {})  # Neither note is essential: if one is damaged, more checkpoints are kept.
        return self._cache[name][1]

    def _metadata(self, step: int, *, warns: bool = False) -> dict[str, Any]:
        """Returns a checkpoint's metadata, or `{}` if it is damaged. Callers can do without it, and reading the checkpoint reports the error."""
        try:
            return read_metadata(self.path(step))
        except CheckpointError as error:
            if warns:
                warn(f"Skipped a checkpoint in the search for the best one: {error}")
            return {}


def _metrics(metadata: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns the metrics of a checkpoint by flat name. A user of the store may have saved other values there, which are left out."""
    groups = metadata.get("metrics")
    return [
        (flat_name(group, key), value)
        for group, values in (groups.items() if isinstance(groups, dict) else ())
        for key, value in (values.items() if isinstance(values, dict) else ())
    ]


def _metric(metadata: Mapping[str, Any], monitor: str) -> float | None:
    values = (value for name, value in _metrics(metadata) if name == monitor)
    return next((float(value) for value in values if isinstance(value, (int, float)) and not math.isnan(value)), None)


def _list_steps(steps: list[int]) -> str:
    if not steps:
        return "none"
    shown = [str(step) for step in steps] if len(steps) <= 6 else [*map(str, steps[:2]), "...", *map(str, steps[-2:])]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown)}" + (f" ({len(steps)} in all)" if len(steps) > 6 else "")


@dataclasses.dataclass(frozen=True)
class Listed:
    """One checkpoint of a directory."""

    step: int
    path: str
    age_seconds: float
    num_bytes: int
    metrics: dict[str, Any]  # By flat name.
    kept_by: tuple[str, ...]  # The callbacks that keep it, such as `BestCheckpoint(val_loss)`.
    is_latest: bool
    state: str  # "ok" if everything was verified, "not verified" if only its metadata was, else the error.
    is_damaged: bool


def list_checkpoints(directory: str | os.PathLike[str], *, verify: bool = False, storage_options: Mapping[str, Any] | None = None) -> list[Listed]:
    """Returns the checkpoints of a run's directory, by step; with `verify`, every byte is checked. `storage_options` are those of `CheckpointStore`.

    The run may use the directory: checkpoints that it deletes meanwhile are left out.
    """
    store = CheckpointStore(directory, storage_options=storage_options)
    steps, owners, rows = store.steps(), store.owners(), []
    while steps:
        step, *steps = steps
        num_bytes, written, fault = 0, time.time(), None
        metrics: dict[str, Any] = {}
        try:
            num_bytes, written = store.size_and_time(step)
            metrics = dict(_metrics(read_metadata(store.path(step))))
            if verify:
                store.verify(step)
        except CheckpointError as error:
            if step not in (existing := store.steps()):
                steps, owners = [other for other in existing if other > step], store.owners()
                continue
            fault = str(error)
        rows.append(
            Listed(
                step=step,
                path=str(store.path(step)),
                age_seconds=max(time.time() - written, 0.0),
                num_bytes=num_bytes,
                metrics=metrics,
                kept_by=tuple(sorted(owner for owner, kept in owners.items() if step in kept)),
                is_latest=not steps,
                state=fault or ("ok" if verify else "not verified"),
                is_damaged=fault is not None,
            )
        )
    return rows
