"""The checkpoints of a run in one directory: which there are, which is best, and when one may be deleted.

What is in a checkpoint is `fitflax.checkpoints.msgpack_format`'s concern; who asks for one, and when, is the callbacks'. The rule over all here: a
directory that does not begin with `.` is a complete checkpoint, and nothing is deleted before what replaces it is complete. So a process can be killed
between any two calls to the system and the next one finds every checkpoint that it may need. Names in the directory:

    step_00002000/                             a complete checkpoint
    retention.json                             which steps each owner (a callback) wants, and steps that nobody is known to want
    .run.json                                  which run the directory belongs to, and which process claimed it
    .step_00002000.tmp-PROCESS-RANDOM/         being written; litter when its process is dead
    .replaced-step_00002000.RANDOM/            gives way to a new checkpoint of the same name; put back if that one never came
    .old-FROM.RANDOM/step_00002000/ ...        set aside by `claim(overwrite=True)` (FROM is 0) or `drop_after(step)` (FROM is step + 1), when no checkpoint
                                               of step FROM or later was left; superseded as soon as there is one, put back if there is none at all
    .undo-RANDOM/step_00002000/ ...            half set aside, or half put back; to be put back
    .trash-RANDOM/                             being deleted

Retention: a step is deleted when it is proven unwanted, that is, when a readable `retention.json` holds it in no list. If the file is missing or damaged,
the steps found then (but those the caller wants) are noted as `unknown` and stay until an owner takes them over, `claim(overwrite=True)` or a person.
A failure in this tidying up is a warning: too much is kept and the save has succeeded. Any other failure of `save` means that its step is not listed.

A store is used by one thread at a time. Several stores of one process may share a directory; that two processes do not is up to the caller.
"""

import contextlib
import dataclasses
import math
import operator
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fitflax.checkpoints.documents import PROCESS, fsync_directory, read_document, replace_document
from fitflax.checkpoints.msgpack_format import METADATA_FILE, STATE_FILE, read_metadata, read_state, write_checkpoint
from fitflax.errors import CheckpointError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError, DirectoryInUseError, FitflaxWarning
from fitflax.state import PyTree

__all__ = ["CheckpointStore", "Saved", "find_checkpoint", "load_checkpoint", "save_checkpoint"]

# Tells this process's files from those of dead ones; a process id would not do, in containers it is the same each time.

_STEP = re.compile(r"step_(\d{8}|[1-9]\d{8,})")
_OLD = re.compile(r"\.old-(?P<since>\d+)\.[0-9a-f]+")
_UNDO = re.compile(r"\.undo-[0-9a-f]+")
_REPLACED = re.compile(r"\.replaced-(?P<name>.+)\.[0-9a-f]+")
_LITTER = re.compile(r"\.(?:trash-[0-9a-f]+|(?:step_\d{8,}|run\.json|retention\.json)\.tmp-(?P<process>[0-9a-f]+)-[0-9a-f]+)")
_RETENTION = "retention.json"
_RUN = ".run.json"


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint as read from its directory, verified.

    Attributes:
        path: Its directory.
        metadata: What `msgpack_format.read_metadata` returns.
        train: The TrainState as nested dicts of NumPy arrays, for `trees.restore_tree`.
        run: Everything else, for `trees.from_saved`.

    >>> Saved(path=Path("runs/a/step_00000040"), metadata={"step": 40}, train={}, run={}).metadata["step"]
    40
    """

    path: Path
    metadata: dict[str, Any]
    train: Any
    run: Any


class CheckpointStore:
    """The checkpoints of one run in one directory, each in `step_00002000/`.

    Making a store touches nothing; `claim` comes before the first `save`.

    Args:
        directory: Where they are, or will be.

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

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def path(self, step: int) -> Path:
        """Returns where the checkpoint of `step` is, or would be."""
        return self.directory / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, ascending; hidden names and foreign files do not count. Nothing is verified."""
        return sorted(int(match[1]) for entry in self._entries() if (match := _STEP.fullmatch(entry.name)) and entry.is_dir())

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
            value = _metric(self._metadata(step, warn=True), monitor)
            if value is not None and (best is None or (value < best[0] if mode == "min" else value > best[0])):
                best = value, step
        return None if best is None else best[1]

    def metric(self, step: int, monitor: str) -> float | None:
        """Returns a metric of a checkpoint by its flat name; `None` if it has no such number, or its metadata cannot be read."""
        return _metric(self._metadata(step), monitor)

    def wanted(self, owner: str) -> list[int]:
        """Returns the steps that `owner` wants and that are there, ascending."""
        wishes = self.owners().get(owner, ())
        return [step for step in self.steps() if step in wishes]

    def owners(self) -> dict[str, list[int]]:
        """Returns who wants which steps; nothing where that cannot be read."""
        return dict((self._retention() or {"owners": {}})["owners"])

    def restore(self, step: int | None = None) -> Saved:
        """Returns the checkpoint of `step`, by default the latest, verified.

        Raises:
            CheckpointNotFoundError: There is none; the message lists those there are.
            CorruptCheckpointError: It fails a check.
        """
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise CheckpointNotFoundError(f"There is no {wanted} in {self.directory}; it holds {_list_steps(steps)}.")
        return _read(self.path(steps[-1] if step is None else step))

    def verify(self, step: int | None = None) -> None:
        """Raises what is wrong with the checkpoint of `step`, or with the first damaged one of all, as `restore` does; or returns."""
        for each in self.steps() if step is None else (step,):
            self.restore(each)

    def newest_good(self) -> tuple[Saved | None, list[str]]:
        """Returns the newest checkpoint that verifies, or `None`, and what is wrong with each newer one."""
        skipped: list[str] = []
        for step in reversed(self.steps()):
            try:
                return self.restore(step), skipped
            except CheckpointError as error:
                path = self.path(step)
                skipped.append(f"{path.name}: {str(error).replace(f'{path}{os.sep}', '')}")
        return None, skipped

    def run_id(self) -> str | None:
        """Returns the run that the checkpoints belong to, or, without checkpoints, the one that last claimed the directory; `None` if unknown."""
        found = (self._metadata(step).get("run_id") for step in reversed(self.steps()))
        return next((run_id for run_id in found if run_id is not None), self._read(_RUN).get("run_id"))

    def claim(self, run_id: str, *, overwrite: bool) -> None:
        """Makes the directory this run's, and tidies up after processes that died in it. To be called before the first step.

        Args:
            run_id: The run; that of the checkpoint when one is resumed.
            overwrite: Set another run's checkpoints aside. They are deleted once the first new one is complete; if none ever is, the next claim puts them back.

        Raises:
            DirectoryInUseError: It holds complete checkpoints of another run, or a file is in the way. They are as they were.
            CheckpointError: The disk fails.
        """
        with _disk_errors("claim", self.directory):
            _make_directory(self.directory)
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

    def drop_after(self, step: int) -> None:
        """Sets the checkpoints beyond `step` aside, as a run that goes on from `step` must: it will come there by itself.

        They are no longer listed, and are deleted when a checkpoint beyond `step` has been saved. If none ever is and no other is left either, the next
        `claim` puts them back.

        Raises:
            CheckpointError: The disk fails.
        """
        with _disk_errors("set checkpoints aside in", self.directory):
            self._set_aside([later for later in self.steps() if later > step], since=step + 1)

    def recover(self) -> None:
        """Finishes or undoes what a process left half done when it died in this directory. `claim` calls it; with `resume` it comes before `newest_good`.

        Must not run while another process uses the directory.

        Raises:
            CheckpointError: The disk fails.
        """
        with _disk_errors("tidy up", self.directory):
            for entry in self._entries():
                litter = _LITTER.fullmatch(entry.name)
                if litter and litter["process"] != PROCESS:
                    _delete(entry)
                elif replaced := _REPLACED.fullmatch(entry.name):
                    _put_back(entry, self.directory / replaced["name"])
                elif _UNDO.fullmatch(entry.name):
                    self._undo(entry)
            complete = self.steps()
            for entry, since in self._set_aside_entries():
                if complete and complete[-1] >= since:
                    _delete(entry)
                elif not complete:  # Otherwise it stays: what a resume dropped, beside what it resumed from.
                    undo = self.directory / f".undo-{_random()}"
                    os.rename(entry, undo)  # First, or a death half way would make what is back supersede the rest.
                    self._undo(undo)

    def save(self, *, step: int, train: PyTree, run: PyTree, metadata: Mapping[str, Any], owner: str, keep: Collection[int]) -> Path:
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

        Returns:
            The checkpoint's directory.

        Raises:
            ConfigError: `step` is not an integer of at least 0.
            CheckpointError: The disk fails, or something cannot be saved. The step is not listed then, or as it was before, and all others are intact.

        Warns:
            FitflaxWarning: The checkpoint is saved, but older ones could not be deleted, or `retention.json` is damaged.
        """
        step = _checked_step(step)
        path = self.path(step)
        with _disk_errors("save", path):
            # A read that fails for the sake of other owners must not hinder a save: only a step that may be shared asks for them.
            same = self._is_of(step, metadata.get("run_id"))
            retention = self._retention() if same else None
            if retention is None or step in retention["owners"].get(owner, ()):
                _write_in_place(path, train=train, run=run, metadata={**metadata, "step": step, "process": PROCESS})
        try:
            for entry, since in self._set_aside_entries():
                if step >= since:
                    _delete(entry)
            self._apply_retention(owner, {*map(int, keep), step}, fresh=None if same else step)
        except (OSError, CheckpointError) as error:
            message = f"{path} is saved, but {self.directory} could not be tidied up: {error}. More is kept than was asked for."
            warnings.warn(message, FitflaxWarning, stacklevel=2)
        return path

    def retain(self, owner: str, keep: Collection[int]) -> None:
        """Changes which steps an owner wants, and deletes those that nobody wants any more.

        Args:
            owner: Whose wishes change.
            keep: The steps it wants from now on.

        Raises:
            CheckpointError: The disk fails.
        """
        with _disk_errors("delete checkpoints in", self.directory):
            self._apply_retention(owner, set(map(int, keep)), fresh=None)

    def _entries(self) -> list[Path]:
        with _disk_errors("list", self.directory):
            return sorted(self.directory.iterdir()) if self.directory.is_dir() else []

    def _set_aside_entries(self) -> list[tuple[Path, int]]:
        return [(entry, int(match["since"])) for entry in self._entries() if (match := _OLD.fullmatch(entry.name))]

    def _set_aside(self, steps: list[int], *, since: int) -> None:
        """Hides checkpoints, all or none of them; none of step `since` or later is left but what already replaces them."""
        if not steps:
            return
        undo = self.directory / f".undo-{_random()}"
        try:
            undo.mkdir()
            for step in steps:
                os.rename(self.path(step), undo / self.path(step).name)
            fsync_directory(undo)
            os.rename(undo, self.directory / f".old-{since}.{_random()}")
            fsync_directory(self.directory)
        except BaseException:
            with contextlib.suppress(OSError):  # What this leaves undone, recover() does.
                self._undo(undo)
            raise

    def _undo(self, undo: Path) -> None:
        for entry in sorted(undo.iterdir()):
            _put_back(entry, self.directory / entry.name)
        undo.rmdir()

    def _is_of(self, step: int, run_id: Any) -> bool:
        """Returns whether the checkpoint of `step`, if there is one, was written by this process for this run."""
        found = self._metadata(step)
        return (found.get("process"), found.get("run_id")) == (PROCESS, run_id)

    def _apply_retention(self, owner: str, wanted: set[int], *, fresh: int | None) -> None:
        """Notes that `owner` wants the steps `wanted`, and deletes what nobody wants.

        `fresh` is a step that is new to this run: what others wanted was an older checkpoint of the same step, which is gone.
        """
        present = set(self.steps())
        retention = self._retention()
        if retention is None:
            retention = {"owners": {}, "unknown": sorted(present)}
            if (self.directory / _RETENTION).exists():
                kept = _list_steps(sorted(present - wanted))
                warnings.warn(
                    f"{self.directory / _RETENTION} is damaged: {kept} will be kept until an owner wants and drops them.", FitflaxWarning, stacklevel=3
                )
        owners = {name: [step for step in steps if step in present and step != fresh] for name, steps in retention["owners"].items()}
        owners[owner] = sorted(wanted & present)
        unknown = sorted((set(retention["unknown"]) & present) - wanted)
        replace_document(self.directory / _RETENTION, {"owners": {name: steps for name, steps in owners.items() if steps}, "unknown": unknown})
        for step in sorted(present.difference(unknown, *owners.values())):
            _delete(self.path(step))

    def _retention(self) -> dict[str, Any] | None:
        """Returns what `retention.json` holds, or `None` when it is missing or damaged."""
        table = self._read(_RETENTION)
        owners, unknown = table.get("owners"), table.get("unknown")
        lists = [unknown, *(owners.values() if isinstance(owners, dict) else [None])]
        readable = all(isinstance(steps, list) and all(isinstance(step, int) for step in steps) for steps in lists)
        return table if readable else None

    def _read(self, name: str) -> dict[str, Any]:
        """Returns what a file of the directory's own holds, or `{}` when it is missing or damaged."""
        try:
            return read_document(self.directory / name)
        except CorruptCheckpointError:
            return {}  # Both files can be done without; the damage shows in what is kept.

    def _metadata(self, step: int, *, warn: bool = False) -> dict[str, Any]:
        """Returns a checkpoint's metadata, or `{}`: those who call this can do without, and reading the checkpoint says what is wrong."""
        try:
            return read_metadata(self.path(step))
        except CheckpointError as error:
            if warn:
                warnings.warn(f"Passed over a checkpoint in the search for the best: {error}", FitflaxWarning, stacklevel=3)
            return {}

    def _run_ids(self) -> dict[int, str | None]:
        """Returns the run of each complete checkpoint; where its metadata is damaged, the run that claimed the directory."""
        noted = self._read(_RUN).get("run_id")
        return {step: self._metadata(step).get("run_id", noted) for step in self.steps()}


def save_checkpoint(path: str | os.PathLike[str], *, train: PyTree, run: PyTree, metadata: Mapping[str, Any]) -> Path:
    """Writes one checkpoint to a directory of any name and returns it; an older checkpoint there is replaced when the new one is complete.

    Args:
        path: The directory to make; so are its parents.
        train: The TrainState.
        run: What else belongs to it.
        metadata: For people and listings.

    Raises:
        CheckpointError: Something else than a checkpoint is there, the disk fails, or something cannot be saved.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = save_checkpoint(f"{directory}/final", train={"w": 1.0}, run={}, metadata={"step": 3})
    ...     path.name, sorted(entry.name for entry in path.iterdir())
    ('final', ['metadata.json', 'state.msgpack'])
    """
    # abspath because `.` and `..` cannot be renamed.
    path, given = Path(os.path.abspath(path)), Path(path)
    with _disk_errors("save", given):
        path.parent.mkdir(parents=True, exist_ok=True)
        for aside in _replaced_by(path):
            _put_back(aside, path)
        if os.path.lexists(path) and not _is_only_checkpoint(path):
            raise CheckpointError(f"{given} is in the way: it is not a checkpoint, so it is not replaced. Choose another path or remove it.")
        _write_in_place(path, train=train, run=run, metadata=metadata)
    return given


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Returns the directory of one checkpoint: `path` itself, or the newest good one in it.

    Args:
        path: A checkpoint directory, or a directory of them.

    Raises:
        CheckpointNotFoundError: Neither; the message says what was looked for, and what is wrong with those found.

    Warns:
        FitflaxWarning: Newer checkpoints were passed over because they fail their checks.

    >>> find_checkpoint("nowhere")
    Traceback (most recent call last):
    fitflax.errors.CheckpointNotFoundError: There is no checkpoint at nowhere: no such directory.
    """
    path = Path(path)
    return path if _looks_like_checkpoint(path) else _newest_good_in(path).path


def load_checkpoint(path: str | os.PathLike[str]) -> Saved:
    """Returns the checkpoint that `find_checkpoint` finds, verified.

    Args:
        path: A checkpoint directory, or a directory of them.

    Raises:
        CheckpointNotFoundError: There is none.
        CorruptCheckpointError: `path` is a checkpoint that fails a check.

    Warns:
        FitflaxWarning: Newer checkpoints were passed over because they fail their checks.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     load_checkpoint(save_checkpoint(f"{directory}/final", train={"w": 1.0}, run={}, metadata={"step": 3})).train
    {'w': 1.0}
    """
    path = Path(path)
    return _read(path) if _looks_like_checkpoint(path) else _newest_good_in(path)


def _looks_like_checkpoint(path: Path) -> bool:
    # One of the files is enough: a damaged checkpoint shall be reported as such.
    return any((path / name).exists() for name in (METADATA_FILE, STATE_FILE))


def _is_only_checkpoint(path: Path) -> bool:
    """Returns whether replacing `path` loses a checkpoint and nothing else."""
    known = {METADATA_FILE, STATE_FILE, "closing.json"}
    return path.is_dir() and not path.is_symlink() and _looks_like_checkpoint(path) and {entry.name for entry in path.iterdir()} <= known


def _newest_good_in(path: Path) -> Saved:
    if not path.is_dir():
        aside = "".join(f" An earlier one was set aside as {entry} by a save that did not finish; rename it." for entry in _replaced_by(path))
        raise CheckpointNotFoundError(f"There is no checkpoint at {path}: {'it is a file' if path.exists() else 'no such directory'}.{aside}")
    saved, skipped = CheckpointStore(path).newest_good()
    if saved is None:
        faults = "".join(f" {message}" for message in skipped)
        names = f"{METADATA_FILE} or a good step_* directory"
        raise CheckpointNotFoundError(f"There is no checkpoint in {path}: looked for {names}.{faults}")
    if skipped:
        warnings.warn(f"Took {saved.path}, because newer checkpoints are damaged. {' '.join(skipped)}", FitflaxWarning, stacklevel=3)
    return saved


def _read(path: Path) -> Saved:
    metadata = read_metadata(path)
    state = read_state(path, metadata)
    return Saved(path=path, metadata=metadata, train=state["train"], run=state["run"])


@contextlib.contextmanager
def _disk_errors(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise  # Some are OSErrors, too.
    except OSError as error:
        raise CheckpointError(f"Could not {doing} {path}: {error}. Checkpoints saved before are intact.") from error


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise DirectoryInUseError(f"{path} cannot be a directory of checkpoints: a file is in the way. Choose another directory.") from error


def _write_in_place(path: Path, *, train: PyTree, run: PyTree, metadata: Mapping[str, Any]) -> None:
    """Writes a checkpoint beside `path` and renames it there when it is on the disk; an older one is deleted after that."""
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is in the way: it is a file. Remove it or choose another directory.")
    temporary = path.parent / f".{path.name}.tmp-{PROCESS}-{_random()}"
    try:
        temporary.mkdir()
        write_checkpoint(temporary, train=train, run=run, metadata=metadata)
        aside = _exchange(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if aside is not None:
        # The new checkpoint is complete: what is left of the old one is no reason to fail, recover() removes it.
        with contextlib.suppress(OSError):
            _delete(aside)


def _exchange(temporary: Path, path: Path) -> Path | None:
    """Renames `temporary` to `path` for good, or leaves both as they were; returns where what was at `path` is now."""
    aside = path.parent / f".replaced-{path.name}.{_random()}" if path.exists() else None
    if aside is not None:
        os.rename(path, aside)
    try:
        os.rename(temporary, path)
        fsync_directory(path.parent)
    except BaseException:
        # Best effort: if the disk refuses this too, recover() puts `aside` back.
        with contextlib.suppress(OSError):
            if path.exists():
                os.rename(path, temporary)
            if aside is not None:
                os.rename(aside, path)
        raise
    return aside


def _replaced_by(path: Path) -> list[Path]:
    """Returns what gave way to a checkpoint at `path` and is still there, which means that a process died at that moment."""
    entries = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    return [entry for entry in entries if (match := _REPLACED.fullmatch(entry.name)) and match["name"] == path.name]


def _put_back(entry: Path, path: Path) -> None:
    """Renames `entry` to `path`, or deletes it if what replaced it is there."""
    if path.exists():
        _delete(entry)
    else:
        os.rename(entry, path)
        fsync_directory(path.parent)


def _delete(entry: Path) -> None:
    """Deletes a file or directory; the first step hides it, so that no half deleted checkpoint can be taken for a whole one."""
    trash = entry.parent / f".trash-{_random()}"
    os.rename(entry, trash)
    if trash.is_dir() and not trash.is_symlink():
        shutil.rmtree(trash)
    else:
        trash.unlink()


def _checked_step(step: int) -> int:
    try:
        index = operator.index(step)
    except TypeError:
        index = -1
    if index < 0:
        raise ConfigError(f"step must be an integer of at least 0. Received: {step!r}.")
    return index


def _random() -> str:
    return secrets.token_hex(4)


def _metric(metadata: Mapping[str, Any], monitor: str) -> float | None:
    groups = metadata.get("metrics")
    for group, values in groups.items() if isinstance(groups, dict) else ():
        for key, value in values.items() if isinstance(values, dict) else ():
            name = key if group == "train" else f"{group}_{key}"
            if name == monitor and isinstance(value, (int, float)) and not math.isnan(value):
                return float(value)
    return None


def _list_steps(steps: list[int]) -> str:
    if not steps:
        return "none"
    shown = [str(step) for step in steps] if len(steps) <= 6 else [*map(str, steps[:2]), "...", *map(str, steps[-2:])]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown)}" + (f" ({len(steps)} in all)" if len(steps) > 6 else "")
