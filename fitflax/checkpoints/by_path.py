"""One checkpoint by its path: saved under any name, or found and read wherever it is and whoever wrote it."""

import contextlib
import functools
import itertools
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from fitflax.checkpoints.closing import CLOSING_FILE
from fitflax.checkpoints.contents import BACKENDS, METADATA_FILE
from fitflax.checkpoints.directories import disk_errors, put_back, replaced_by, write_in_place
from fitflax.checkpoints.foreign import read_foreign
from fitflax.checkpoints.joint import JointSave
from fitflax.checkpoints.msgpack_format import STATE_FILE
from fitflax.checkpoints.orbax_format import TRAIN_DIRECTORY, write_part
from fitflax.checkpoints.saved import WHOLE, Saved, read_checkpoint
from fitflax.checkpoints.store import CheckpointStore
from fitflax.checkpoints.trees import only_split, to_plain
from fitflax.errors import CheckpointError, CheckpointNotFoundError, warn
from fitflax.parallel.host_memory import spans_processes
from fitflax.state import PyTree

__all__ = ["is_checkpoint", "load_checkpoint", "save_checkpoint"]

_MOST_NAMED = 5  # Directories, in an error.


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

    def save(joint: JointSave | None = None) -> None:
        with disk_errors("save", given):
            path.parent.mkdir(parents=True, exist_ok=True)
            for aside in replaced_by(path):
                put_back(aside, path)
            if os.path.lexists(path) and not _is_only_checkpoint(path):
                raise CheckpointError(f"{given} is in the way: it is not a checkpoint, so it is not replaced. Choose another path or remove it.")
            write_in_place(path, train=train, run=run, metadata=metadata, joint=joint)

    if spans_processes(train):
        joint = JointSave.meet(f"{given}")
        if jax.process_index():
            joint.follow(lambda part: write_part(part, only_split(to_plain(train, root="train", may_span=True))))
        else:
            joint.lead(functools.partial(save, joint))
    elif jax.process_index() == 0:
        save()
    return given


def load_checkpoint(path: str | os.PathLike[str], roots: Collection[str] = WHOLE) -> Saved:
    """Returns a checkpoint, verified: fitflax's own, or as far as possible one of plain Orbax or `flax.training.checkpoints`.

    Args:
        path: A checkpoint, or a directory of them, which stands for the newest good one in it.
        roots: What is read of fitflax's own, as of `saved.read_checkpoint`.

    Raises:
        CheckpointNotFoundError: There is none; the message says what was looked for, and what is wrong with those found.
        CorruptCheckpointError: `path` is a checkpoint that fails a check.

    Warns:
        FitflaxWarning: Newer checkpoints were passed over because they fail their checks.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     load_checkpoint(save_checkpoint(f"{directory}/final", train={"w": 1.0}, run={}, metadata={"step": 3})).train
    {'w': 1.0}
    >>> load_checkpoint("nowhere")
    Traceback (most recent call last):
    fitflax.errors.CheckpointNotFoundError: There is no checkpoint at nowhere: no such directory.
    """
    path = Path(path)
    if is_checkpoint(path):
        return read_checkpoint(path, roots)
    try:
        return _newest_good_in(path, roots)
    except CheckpointNotFoundError:
        foreign = read_foreign(path)
        if foreign is None:
            raise
    train, metadata = foreign
    return Saved(path=Path(metadata["path"]), metadata=metadata, train=train, run={})


def is_checkpoint(path: Path) -> bool:
    """Returns whether a path is meant to be one checkpoint, good or not; not one of another library."""
    # One of the files is enough: a damaged checkpoint shall be reported as such.
    return any((path / name).exists() for name in (METADATA_FILE, STATE_FILE))


def _is_only_checkpoint(path: Path) -> bool:
    """Returns whether replacing `path` loses a checkpoint and nothing else."""
    if path.is_symlink() or not path.is_dir() or not is_checkpoint(path):
        return False
    if (path / TRAIN_DIRECTORY).exists() and not (path / TRAIN_DIRECTORY / "_METADATA").exists():
        return False  # Orbax did not write this one: the name is a common one for data.
    known = {METADATA_FILE, CLOSING_FILE}.union(*(backend.files for backend in BACKENDS.values()))
    return {entry.name for entry in path.iterdir()} <= known


def _newest_good_in(path: Path, roots: Collection[str]) -> Saved:
    if not path.is_dir():
        aside = "".join(f" An earlier one was set aside as {entry} by a save that did not finish; rename it." for entry in replaced_by(path))
        raise CheckpointNotFoundError(f"There is no checkpoint at {path}: {'it is a file' if path.exists() else 'no such directory'}.{aside}")
    saved, skipped = CheckpointStore(path).newest_good(roots)
    if saved is None:
        faults = "".join(f" {error}" for error in skipped)
        names = f"{METADATA_FILE} or a good step_* directory"
        below = list(itertools.islice(_stores_in(path), _MOST_NAMED))
        hint = f" There are some in {', '.join(below)}, below it." if below else ""
        raise CheckpointNotFoundError(f"There is no checkpoint in {path}: looked for {names}.{faults}{hint}")
    if skipped:
        warn(f"Took {saved.path}, because newer checkpoints cannot be read. {' '.join(map(str, skipped))}")
    return saved


def _stores_in(path: Path) -> Iterator[str]:
    """Yields the names of directories that hold checkpoints; those that cannot be looked into are passed over."""
    for child in sorted(path.iterdir()):
        with contextlib.suppress(OSError, CheckpointError):
            if child.is_dir() and CheckpointStore(child).steps():
                yield child.name
