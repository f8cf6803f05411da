"""Renames and deletions in a directory of checkpoints. If the process dies between any two of them, no complete checkpoint is lost.

`fitflax.checkpoints.store.checkpoint_store` explains the names.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fitflax.checkpoints.collective_save import CollectiveSave
from fitflax.checkpoints.formats.checkpoint_files import write_checkpoint
from fitflax.checkpoints.formats.json_documents import PROCESS, fsync_directory
from fitflax.errors import CheckpointError
from fitflax.state import PyTree
from fitflax.storage import Location

__all__ = ["delete", "disk_errors", "put_back", "replaced_by", "write_in_place"]

REPLACED = re.compile(r"\.replaced-(?P<name>.+)\.[0-9a-f]+")


@contextlib.contextmanager
def disk_errors(doing: str, path: Location) -> Iterator[None]:
    """Converts an `OSError` of the body to a `CheckpointError` that says what could not be done."""
    try:
        yield
    except CheckpointError:
        raise  # Some are OSErrors, too.
    except OSError as error:
        raise CheckpointError(f"Could not {doing} {path}: {str(error).rstrip('.')}. Earlier checkpoints are intact.") from error


def write_in_place(
    path: Path, *, train: PyTree, run: PyTree, metadata: Mapping[str, Any], backend: str = "msgpack", collective: CollectiveSave | None = None
) -> None:
    """Writes a checkpoint next to `path`, and renames it once it is on the disk. Then the older one is deleted. If it raises, `path` is unchanged."""
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file, not a checkpoint. Remove it, or choose another directory.")
    temporary = path.parent / f".{path.name}.tmp-{PROCESS}-{secrets.token_hex(4)}"
    try:
        temporary.mkdir()
        write_checkpoint(temporary, train=train, run=run, metadata=metadata, backend=backend, collective=collective)
        aside = _swap_in(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.rmdir()  # If it is empty: unlike rmtree, this needs no file descriptor.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if aside is not None:
        # The new checkpoint is complete, so this is not a failure: recover() removes the rest.
        with contextlib.suppress(OSError):
            delete(aside)


def _swap_in(temporary: Path, path: Path) -> Path | None:
    """Renames `temporary` to `path` durably, or leaves both unchanged; returns the new path of the previous contents."""
    aside = path.parent / f".replaced-{path.name}.{secrets.token_hex(4)}" if path.exists() else None
    if aside is not None:
        os.rename(path, aside)
    try:
        os.rename(temporary, path)
        fsync_directory(path.parent)
    except BaseException:
        # If this fails too, recover() restores `aside`.
        with contextlib.suppress(OSError):
            if path.exists():
                os.rename(path, temporary)
            if aside is not None:
                os.rename(aside, path)
        raise
    return aside


def replaced_by(path: Path) -> list[Path]:
    """Returns what was renamed for a new checkpoint at `path` and still exists, because a process died in between."""
    entries = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    return [entry for entry in entries if (match := REPLACED.fullmatch(entry.name)) and match["name"] == path.name]


def put_back(entry: Path, path: Path) -> None:
    """Renames `entry` to `path`, or deletes it if its replacement exists."""
    if path.exists():
        delete(entry)
    else:
        os.rename(entry, path)
        fsync_directory(path.parent)


def delete(entry: Path) -> None:
    """Deletes a file or directory. It is hidden first, so that a partly deleted checkpoint is not taken for a complete one."""
    trash = entry.parent / f".trash-{secrets.token_hex(4)}"
    os.rename(entry, trash)
    if trash.is_dir() and not trash.is_symlink():
        shutil.rmtree(trash)
    else:
        trash.unlink()
