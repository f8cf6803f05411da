"""Renames and deletions in a directory of checkpoints: a process may die between any two of them, and nothing that was complete is lost.

What the names mean is said in `fitflax.checkpoints.store`.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fitflax.checkpoints.contents import write_checkpoint
from fitflax.checkpoints.documents import PROCESS, fsync_directory
from fitflax.checkpoints.joint import JointSave
from fitflax.errors import CheckpointError, DirectoryInUseError
from fitflax.state import PyTree

__all__ = ["delete", "disk_errors", "make_directory", "put_back", "random_suffix", "replaced_by", "write_in_place"]

REPLACED = re.compile(r"\.replaced-(?P<name>.+)\.[0-9a-f]+")


@contextlib.contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Turns errors of the disk into one that says what could not be done.

    Raises:
        CheckpointError: For any `OSError` within.
    """
    try:
        yield
    except CheckpointError:
        raise  # Some are OSErrors, too.
    except OSError as error:
        raise CheckpointError(f"Could not {doing} {path}: {error}. Checkpoints saved before are intact.") from error


def make_directory(path: Path) -> None:
    """Makes a directory of checkpoints and its parents.

    Raises:
        DirectoryInUseError: A file is in the way.
        OSError: The disk fails.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise DirectoryInUseError(f"{path} cannot be a directory of checkpoints: a file is in the way. Choose another directory.") from error


def write_in_place(path: Path, *, train: PyTree, run: PyTree, metadata: Mapping[str, Any], backend: str = "msgpack", joint: JointSave | None = None) -> None:
    """Writes a checkpoint beside `path` and renames it there when it is on the disk; an older one is deleted after that.

    Of a joint save this is the leader's part.

    Raises:
        CheckpointError: A file is in the way, or something cannot be saved.
        OSError: The disk fails. What was at `path` is as it was.
    """
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is in the way: it is a file. Remove it or choose another directory.")
    temporary = path.parent / f".{path.name}.tmp-{PROCESS}-{random_suffix()}"
    try:
        temporary.mkdir()
        write_checkpoint(temporary, train=train, run=run, metadata=metadata, backend=backend, joint=joint)
        aside = _swap_in(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.rmdir()  # If it is empty still: other than rmtree this needs no file descriptor, of which there may be none left.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if aside is not None:
        # The new checkpoint is complete: what is left of the old one is no reason to fail, recover() removes it.
        with contextlib.suppress(OSError):
            delete(aside)


def _swap_in(temporary: Path, path: Path) -> Path | None:
    """Renames `temporary` to `path` for good, or leaves both as they were; returns where what was at `path` is now."""
    aside = path.parent / f".replaced-{path.name}.{random_suffix()}" if path.exists() else None
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


def replaced_by(path: Path) -> list[Path]:
    """Returns what gave way to a checkpoint at `path` and is still there, which means that a process died at that moment."""
    entries = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    return [entry for entry in entries if (match := REPLACED.fullmatch(entry.name)) and match["name"] == path.name]


def put_back(entry: Path, path: Path) -> None:
    """Renames `entry` to `path`, or deletes it if what replaced it is there."""
    if path.exists():
        delete(entry)
    else:
        os.rename(entry, path)
        fsync_directory(path.parent)


def delete(entry: Path) -> None:
    """Deletes a file or directory; the first step hides it, so that no half deleted checkpoint can be taken for a whole one."""
    trash = entry.parent / f".trash-{random_suffix()}"
    os.rename(entry, trash)
    if trash.is_dir() and not trash.is_symlink():
        shutil.rmtree(trash)
    else:
        trash.unlink()


def random_suffix() -> str:
    """Returns eight hexadecimal digits that make a name unique."""
    return secrets.token_hex(4)
