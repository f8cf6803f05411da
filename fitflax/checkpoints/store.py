"""The checkpoints of a run in one directory: which there are, which is best, and when one may be deleted.

What is in a checkpoint is `fitflax.checkpoints.contents`' concern; who asks for one, and when, is the callbacks'. The rule over all here: a
directory that does not begin with `.` is a complete checkpoint, and nothing is deleted before what replaces it is complete. So a process can be killed
between any two calls to the system and the next one finds every checkpoint that it may need. Names in the directory:

    step_00002000/                             a complete checkpoint
    retention.json                             which steps each owner (a callback) wants, and steps that nobody is known to want
    .run.json                                  which run the directory belongs to, and which process claimed it
    .lock                                      locked while a run uses the directory (`fitflax.checkpoints.lock`)
    .step_00002000.tmp-PROCESS-RANDOM/         being written; litter when its process is dead
    .replaced-step_00002000.RANDOM/            gives way to a new checkpoint of the same name; put back if that one never came
    .old-FROM.RANDOM/step_00002000/ ...        set aside by `claim(overwrite=True)` (FROM is 0) or `drop_after(step)` (FROM is step + 1), when no checkpoint
                                               of step FROM or later was left; superseded as soon as there is one, put back if there is none at all
    .undo-RANDOM/step_00002000/ ...            half set aside, or half put back; to be put back
    .trash-RANDOM/                             being deleted

Retention: a step is deleted when it is proven unwanted, that is, when a readable `retention.json` holds it in no list. If the file is missing or damaged,
the steps found then (but those the caller wants) are noted as `unknown` and stay until an owner takes them over, `claim(overwrite=True)` or a person.
A failure in this tidying up is a warning: too much is kept and the save has succeeded. Any other failure of `save` means that its step is not listed.

A store is used by one thread at a time. Several stores of one run may share a directory; that two runs do not is what `fitflax.checkpoints.lock` sees to.
"""

import contextlib
import functools
import math
import operator
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fitflax.checkpoints.contents import check_backend, read_metadata
from fitflax.checkpoints.directories import REPLACED, delete, disk_errors, make_directory, put_back, random_suffix, write_in_place
from fitflax.checkpoints.documents import PROCESS, fsync_directory, read_document, replace_document
from fitflax.checkpoints.joint import JointSave
from fitflax.checkpoints.lock import holder_of, lock_directory
from fitflax.checkpoints.saved import WHOLE, Saved, read_checkpoint
from fitflax.checkpoints.saving import Saver
from fitflax.errors import CheckpointError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError, DirectoryInUseError, warn
from fitflax.logs import flat_name
from fitflax.state import PyTree

__all__ = ["CheckpointStore"]

_STEP = re.compile(r"step_(\d{8}|[1-9]\d{8,})")
_OLD = re.compile(r"\.old-(?P<since>\d+)\.[0-9a-f]+")
_UNDO = re.compile(r"\.undo-[0-9a-f]+")
_LITTER = re.compile(r"\.(?:trash-[0-9a-f]+|(?:step_\d{8,}|run\.json|retention\.json)\.tmp-(?P<process>[0-9a-f]+)-[0-9a-f]+)")
_RETENTION = "retention.json"
_RUN = ".run.json"


class _Listing(NamedTuple):
    """What a directory holds: the steps of complete checkpoints, and what is set aside, each with the step from which on it is superseded."""

    steps: list[int]
    set_aside: list[tuple[Path, int]]


def _first_process_only(change: Callable[..., None]) -> Callable[..., None]:
    """Has a method do nothing in processes but the first."""

    @functools.wraps(change)
    def checked(store: "CheckpointStore", *arguments: Any, **options: Any) -> None:
        if jax.process_index() == 0:
            change(store, *arguments, **options)

    return checked


class CheckpointStore:
    """The checkpoints of one run in one directory, each in `step_00002000/`.

    Making a store touches nothing; `claim` comes before the first `save`. Of several processes the first one alone changes the directory; all of them read it.

    Args:
        directory: Where they are, or will be.
        backend: Who writes states: `"msgpack"`, one file that flax reads, or `"orbax"`. Checkpoints of both can be in one directory, and are read alike.

    Raises:
        CheckpointError: There is no such backend.

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

    def __init__(self, directory: str | os.PathLike[str], *, backend: str = "msgpack") -> None:
        check_backend(backend)
        if re.search(r"\{\w+(:[^{}]*)?\}", str(directory)):
            raise ConfigError(f"A directory of checkpoints has no placeholders: those in it are named by their steps, step_00000010. Received: {directory!s}.")
        self.directory = Path(directory)
        self.backend = backend
        self._saver: Saver | None = None
        # What was read of the directory's own files, with the version of the file.
        self._known: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is pickled: all but who saves for a run of this process."""
        return {**vars(self), "_saver": None}

    @_first_process_only
    def lock(self, saver: Saver) -> None:
        """Locks the directory for a run, now if it is there, otherwise once `claim` has made it; `saver.close()` gives it back.

        Raises:
            DirectoryInUseError: Another run is using it at this moment.
            CheckpointError: The disk fails.
        """
        self._saver = saver
        if self.directory.is_dir():
            with disk_errors("lock", self.directory):
                saver.lock(self.directory)

    def path(self, step: int) -> Path:
        """Returns where the checkpoint of `step` is, or would be."""
        return self.directory / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, ascending; hidden names and foreign files do not count. Nothing is verified."""
        with disk_errors("list", self.directory):
            return self._list().steps

    def _list(self) -> "_Listing":
        steps, set_aside = [], []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.directory) as entries:
            for entry in entries:
                if match := _STEP.fullmatch(entry.name):
                    steps += [int(match[1])] if entry.is_dir() else []
                elif match := _OLD.fullmatch(entry.name):
                    set_aside.append((self.directory / entry.name, int(match["since"])))
        return _Listing(sorted(steps), sorted(set_aside))

    def latest(self) -> int | None:
        """Returns the largest step, or `None`."""
        return max(self.steps(), default=None)

    def best(self, monitor: str, mode: str) -> int | None:
        """Returns the step whose checkpoint has the best value of a metric; the earliest of equals, `None` if none has a number.

        Args:
            monitor: The flat name: the key itself for the group `train`, `<group>_<key>` for others.
            mode: `"min"` or `"max"`.

        Raises:
            ConfigError: Another mode.

        Warns:
            FitflaxWarning: The metadata of a checkpoint cannot be read; it is passed over.
        """
        if mode not in ("min", "max"):
            raise ConfigError(f"mode must be 'min' or 'max'. Received: {mode!r}.")
        best: tuple[float, int] | None = None
        for step in self.steps():
            value = _metric(self._metadata(step, warns=True), monitor)
            if value is not None and (best is None or (value < best[0] if mode == "min" else value > best[0])):
                best = value, step
        return None if best is None else best[1]

    def metric(self, step: int, monitor: str) -> float | None:
        """Returns a metric of a checkpoint by its flat name; `None` if it has no such number, or its metadata cannot be read."""
        return _metric(self._metadata(step), monitor)

    def wanted(self, owner: str) -> list[int]:
        """Returns the steps that `owner` wants and that are there, ascending; with those that are too new for anybody's wishes to be known."""
        table: dict[str, Any] = self._retention() or {"owners": {}, "late": []}
        wishes = {*table["owners"].get(owner, ()), *table["late"]}
        return [step for step in self.steps() if step in wishes]

    def lost(self, owner: str, steps: Collection[int]) -> list[int]:
        """Returns which of `steps`, once saved for `owner`, are gone though it never gave them up: somebody else removed them."""
        table, present = self._retention(), set(self.steps())
        return sorted(step for step in steps if step not in present and (table is None or step in table["owners"].get(owner, ())))

    def owners(self) -> dict[str, list[int]]:
        """Returns who wants which steps; nothing where that cannot be read."""
        return dict((self._retention() or {"owners": {}})["owners"])

    def restore(self, step: int | None = None, roots: Collection[str] = WHOLE) -> Saved:
        """Returns the checkpoint of `step`, by default the latest, verified.

        Args:
            step: Which.
            roots: What is read, as of `newest_good`; what is not read is not verified.

        Raises:
            CheckpointNotFoundError: There is none; the message lists those there are.
            CorruptCheckpointError: It fails a check.
        """
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise CheckpointNotFoundError(f"There is no {wanted} in {self.directory}; it holds {_list_steps(steps)}.")
        return read_checkpoint(self.path(steps[-1] if step is None else step), roots)

    def verify(self, step: int | None = None) -> None:
        """Raises what is wrong with the checkpoint of `step`, or with the first damaged one of all, as `restore` does; or returns."""
        for each in self.steps() if step is None else (step,):
            self.restore(each)

    def newest_good(
        self, roots: Collection[str] = WHOLE, *, accepts: Callable[[Saved], bool] = lambda saved: True
    ) -> tuple[Saved | None, list[CheckpointError]]:
        """Returns the newest checkpoint that verifies, or `None`, and what is wrong with each newer one, in words that begin with its name.

        Args:
            roots: What is read, as of `saved.read_checkpoint`.
            accepts: Returns whether a good one will do; others are passed over without a word.
        """
        skipped: list[CheckpointError] = []
        for step in reversed(self.steps()):
            try:
                if accepts(saved := read_checkpoint(self.path(step), roots)):
                    return saved, skipped
            except CheckpointError as error:
                path = self.path(step)
                skipped.append(type(error)(f"{path.name}: {str(error).replace(f'{path}{os.sep}', '')}"))
        return None, skipped

    def run_id(self) -> str | None:
        """Returns the run that the checkpoints belong to, or, without checkpoints, the one that last claimed the directory; `None` if unknown."""
        found = (self._metadata(step).get("run_id") for step in reversed(self.steps()))
        return next((run_id for run_id in found if run_id is not None), self._read(_RUN).get("run_id"))

    @_first_process_only
    def claim(self, run_id: str, *, overwrite: bool) -> None:
        """Makes the directory this run's, and tidies up after processes that died in it. To be called before the first step.

        Args:
            run_id: The run; that of the checkpoint when one is resumed.
            overwrite: Set another run's checkpoints aside. They are deleted once the first new one is complete; if none ever is, the next claim puts them back.

        Raises:
            DirectoryInUseError: It holds complete checkpoints of another run, another run is using it now, or a file is in the way. All is as it was.
            CheckpointError: The disk fails.
        """
        with disk_errors("claim", self.directory):
            make_directory(self.directory)
            if self._saver is not None:
                self._saver.lock(self.directory)
            elif holder_of(self.directory) is None:
                lock_directory(self.directory, self)
            claim = {"run_id": run_id, "process": PROCESS}
            if not claim.items() <= self._read(_RUN).items():  # Otherwise another owner of this run was here: what it set aside must not come back.
                self.recover()
            others = {step: other for step, other in self._run_ids().items() if other != run_id}
            if others and not overwrite:
                names = ", ".join(sorted({"an unknown run" if other is None else f"run {other!r}" for other in others.values()}))
                raise DirectoryInUseError(
                    f"{self.directory} holds checkpoints of {names}: {_list_steps(sorted(others))}. "
                    'Go on with that run with resume="auto", choose another directory, or replace it with overwrite=True.'
                )
            # The note first: it fails on a full disk, renames seldom do. A checkpoint's own metadata counts for more than the note.
            replace_document(self.directory / _RUN, claim)
            self._set_aside(sorted(others), since=0)

    @_first_process_only
    def drop_after(self, step: int) -> None:
        """Sets the checkpoints beyond `step` aside, as a run that goes on from `step` must: it will come there by itself.

        They are no longer listed, and are deleted when a checkpoint beyond `step` has been saved. If none ever is and no other is left either, the next
        `claim` puts them back.

        Raises:
            CheckpointError: The disk fails.
        """
        with disk_errors("set checkpoints aside in", self.directory):
            self._set_aside([later for later in self.steps() if later > step], since=step + 1)

    @_first_process_only
    def recover(self) -> None:
        """Finishes or undoes what a process left half done when it died in this directory. `claim` calls it; with `resume` it comes before `newest_good`.

        Must not run while another process uses the directory.

        Raises:
            CheckpointError: The disk fails.
        """
        with disk_errors("tidy up", self.directory):
            # Who has the lock and writes nothing knows that nobody does: then even this process's own are litter, of a run whose disk failed.
            is_alone = self._saver is not None and self._saver.is_idle
            for entry in self._entries():
                litter = _LITTER.fullmatch(entry.name)
                if litter and (is_alone or litter["process"] != PROCESS):
                    delete(entry)
                elif replaced := REPLACED.fullmatch(entry.name):
                    put_back(entry, self.directory / replaced["name"])
                elif _UNDO.fullmatch(entry.name):
                    self._undo(entry)
            complete, set_aside = self._list()
            for entry, since in set_aside:
                if complete and complete[-1] >= since:
                    delete(entry)
                elif not complete:  # Otherwise it stays: what a resume dropped, beside what it resumed from.
                    undo = self.directory / f".undo-{random_suffix()}"
                    os.rename(entry, undo)  # First, or a death half way would make what is back supersede the rest.
                    self._undo(undo)

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
        joint: JointSave | None = None,
    ) -> Path:
        """Writes a checkpoint and, when it is complete and on the disk, deletes those that nobody wants any more.

        A step that another owner has saved in this process and run is not written again; the owner is added. Any other checkpoint of the same step gives
        way to the new one.

        Args:
            step: Finished updates.
            train: The TrainState.
            run: What else a resume needs.
            metadata: At least `run_id`; `step`, and `process` (of this process), are added.
            owner: Who wants the checkpoint.
            keep: The steps that this owner wants from now on, besides `step`.
            also: Owners that will save the same step next; if the process dies before they do, it is theirs all the same.
            joint: The save that all processes make together, if it is one; this is what its leader does.

        Returns:
            The checkpoint's directory.

        Raises:
            ConfigError: `step` is not an integer of at least 0.
            CheckpointError: The disk fails, or something cannot be saved. The step is not listed then, or as it was before, and all others are intact.

        Warns:
            FitflaxWarning: The checkpoint is saved, but older ones could not be deleted, or `retention.json` is damaged.
        """
        if jax.process_index():
            return self.path(step)
        step = _checked_step(step)
        path = self.path(step)
        wishes = {*map(int, keep), step}
        with disk_errors("save", path):
            if not self.directory.is_dir():
                raise CheckpointError(
                    f"Could not save {path}: {self.directory} is gone, with the checkpoints in it. It was removed, moved or replaced while the run used it. "
                    "Put it back and start again, or begin anew elsewhere."
                )
            present = self._list().steps
            same = step in present and self._is_of(step, metadata.get("run_id"))
            is_written, unnoted = False, None
            try:
                is_written = same and self._is_of_others(step, owner)
                # Before the checkpoint is there: whoever resumes after a death between the two finds it wanted, and by whom.
                self._note(owner, wishes, present, step=step, also=also, fresh=not same)
            except (OSError, CheckpointError) as error:
                unnoted = error  # No reason not to save.
            if not is_written:
                metadata = {**metadata, "step": step, "process": PROCESS}
                write_in_place(path, train=train, run=run, metadata=metadata, backend=self.backend, joint=joint)
        try:
            if unnoted is not None:
                raise unnoted
            present, set_aside = self._list()
            for entry, since in set_aside:
                if step >= since:
                    delete(entry)
            self._delete_unwanted(present)
        except (OSError, CheckpointError) as error:
            message = f"{path} is saved, but {self.directory} could not be tidied up: {error}. More is kept than was asked for."
            warn(message)
        return path

    @_first_process_only
    def retain(self, owner: str, keep: Collection[int]) -> None:
        """Changes which steps an owner wants, and deletes those that nobody wants any more.

        Args:
            owner: Whose wishes change.
            keep: The steps it wants from now on.

        Raises:
            CheckpointError: The disk fails.
        """
        with disk_errors("delete checkpoints in", self.directory):
            present = self.steps()
            self._note(owner, set(map(int, keep)), present)
            self._delete_unwanted(present)

    def _entries(self) -> list[Path]:
        with disk_errors("list", self.directory):
            return sorted(self.directory.iterdir()) if self.directory.is_dir() else []

    def _set_aside(self, steps: list[int], *, since: int) -> None:
        """Hides checkpoints, all or none of them; none of step `since` or later is left but what already replaces them."""
        if not steps:
            return
        undo = self.directory / f".undo-{random_suffix()}"
        try:
            undo.mkdir()
            for step in steps:
                os.rename(self.path(step), undo / self.path(step).name)
            fsync_directory(undo)
            os.rename(undo, self.directory / f".old-{since}.{random_suffix()}")
            fsync_directory(self.directory)
        except BaseException:
            with contextlib.suppress(OSError):  # What this leaves undone, recover() does.
                self._undo(undo)
            raise

    def _undo(self, undo: Path) -> None:
        for entry in sorted(undo.iterdir()):
            put_back(entry, self.directory / entry.name)
        undo.rmdir()

    def _is_of(self, step: int, run_id: Any) -> bool:
        """Returns whether the checkpoint of `step`, if there is one, was written by this process for this run."""
        found = self._metadata(step)
        return (found.get("process"), found.get("run_id")) == (PROCESS, run_id)

    def _note(self, owner: str, wishes: Collection[int], steps: list[int], *, step: int | None = None, also: Collection[str] = (), fresh: bool = False) -> None:
        """Notes which of `steps`, those that are there, an owner wants from now on, and with `step` that this one is about to be saved.

        `also` will save it next. If it is `fresh`, what others wanted was an older checkpoint of the same step, which is gone.
        """
        present = set(steps)
        table = self._retention(steps)
        if table is None:
            table = {"owners": {}, "unknown": sorted(present)}
            if (self.directory / _RETENTION).exists():
                kept = _list_steps(sorted(present.difference(wishes)))
                message = f"{self.directory / _RETENTION} is damaged: {kept} will be kept until an owner wants and drops them."
                warn(message)
        saving = set() if step is None else {step}
        owners = {name: [one for one in steps if one in present and not (fresh and one == step)] for name, steps in table["owners"].items()}
        before = present.intersection(table["owners"].get(owner, ()))
        owners[owner] = sorted(set(wishes) & (present | saving))
        for other in also:
            owners[other] = sorted({*owners.get(other, ()), *saving})
        unknown = sorted(present.intersection(table["unknown"]).difference(wishes))
        note: dict[str, Any] = {"owners": {name: steps for name, steps in owners.items() if steps}, "unknown": unknown}
        note["newest"] = max(present | saving, default=-1)
        if step is not None:
            # What is given up is given up once the step is there.
            note["saving"] = {"step": step, "owner": owner, "instead": sorted(before.difference(wishes)), "also": list(also)}
        # A save syncs the directory when the checkpoint is in it, with this rename before that one.
        replace_document(self.directory / _RETENTION, note, is_durable=step is None)
        self._known[_RETENTION] = (_version(self.directory / _RETENTION), note)

    def _is_of_others(self, step: int, owner: str) -> bool:
        """Returns whether a checkpoint was saved by other owners alone so far."""
        saving = self._read(_RETENTION).get("saving", {})
        is_next = saving.get("step") == step and owner in saving.get("also", ())
        table = self._retention()
        return table is not None and (is_next or step not in table["owners"].get(owner, ()))

    def _delete_unwanted(self, present: list[int]) -> None:
        table = self._retention(present)
        if table is not None:
            for step in sorted(set(present).difference(table["unknown"], *table["owners"].values())):
                delete(self.path(step))

    def _retention(self, present: list[int] | None = None) -> dict[str, Any] | None:
        """Returns what `retention.json` holds, or `None` when it is missing or damaged; `present` are the steps that are there, if the caller knows.

        `{"owners": {name: steps}, "unknown": steps, "late": steps}`: the last, which are unknown, too, are newer than all that were noted, because a full disk
        had room for them and not for the note.
        """
        table = self._read(_RETENTION)
        saving: Any = table.get("saving")
        owners: Any = table.get("owners")
        unknown: Any = table.get("unknown")
        lists: list[Any] = [unknown, *(owners.values() if isinstance(owners, dict) else [None]), [table.get("newest")]]
        lists += [saving.get("instead")] if isinstance(saving, dict) else []
        if not all(isinstance(steps, list) and all(isinstance(step, int) for step in steps) for steps in lists):
            return None
        if saving is not None and not self.path(saving["step"]).is_dir():
            # The process died before it came to that, so that what was to go is wanted still.
            name = saving["owner"]
            owners = {**owners, name: sorted({*owners.get(name, ()), *saving["instead"]})}
        late = [step for step in (self.steps() if present is None else present) if step > table["newest"]]
        return {"owners": owners, "unknown": [*unknown, *late], "late": late}

    def _read(self, name: str) -> dict[str, Any]:
        """Returns what a file of the directory's own holds, or `{}` when it is missing or damaged."""
        path = self.directory / name
        try:
            version = _version(path)
        except OSError:
            return {}
        # Reading and verifying it three times a save takes as long as writing a small state.
        if self._known.get(name, ((), {}))[0] != version:
            try:
                self._known[name] = (version, read_document(path))
            except CorruptCheckpointError:
                self._known[name] = (version, {})  # Both files can be done without; the damage shows in what is kept.
        return self._known[name][1]

    def _metadata(self, step: int, *, warns: bool = False) -> dict[str, Any]:
        """Returns a checkpoint's metadata, or `{}`: those who call this can do without, and reading the checkpoint says what is wrong."""
        try:
            return read_metadata(self.path(step))
        except CheckpointError as error:
            if warns:
                warn(f"Passed over a checkpoint in the search for the best: {error}")
            return {}

    def _run_ids(self) -> dict[int, str | None]:
        """Returns the run of each complete checkpoint; where its metadata is damaged, the run that claimed the directory."""
        noted = self._read(_RUN).get("run_id")
        return {step: self._metadata(step).get("run_id", noted) for step in self.steps()}


def _version(path: Path) -> tuple[int, ...]:
    """Returns what tells a file from what replaces it."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _checked_step(step: int) -> int:
    try:
        index = operator.index(step)
    except TypeError:
        index = -1
    if index < 0:
        raise ConfigError(f"step must be an integer of at least 0. Received: {step!r}.")
    return index


def _metric(metadata: Mapping[str, Any], monitor: str) -> float | None:
    groups = metadata.get("metrics")
    for group, values in groups.items() if isinstance(groups, dict) else ():
        for key, value in values.items() if isinstance(values, dict) else ():
            if flat_name(group, key) == monitor and isinstance(value, (int, float)) and not math.isnan(value):
                return float(value)
    return None


def _list_steps(steps: list[int]) -> str:
    if not steps:
        return "none"
    shown = [str(step) for step in steps] if len(steps) <= 6 else [*map(str, steps[:2]), "...", *map(str, steps[-2:])]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown)}" + (f" ({len(steps)} in all)" if len(steps) > 6 else "")
