"""A directory of checkpoints on a file system. `fitflax.checkpoints.store.checkpoint_store` explains the names."""

import bisect
import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from fitflax.checkpoints.collective_save import CollectiveSave
from fitflax.checkpoints.formats.json_documents import PROCESS, fsync_directory, replace_document
from fitflax.checkpoints.store.directory import CheckpointDirectory, Contents, SetAside
from fitflax.checkpoints.store.local_files import REPLACED, delete, put_back, write_in_place
from fitflax.errors import DirectoryInUseError
from fitflax.state import PyTree

__all__ = ["STEP", "LocalDirectory"]

STEP = re.compile(r"step_(\d{8}|[1-9]\d{8,})")
_OLD = re.compile(r"\.old-(?P<since>\d+)\.[0-9a-f]+")
_UNDO = re.compile(r"\.undo-[0-9a-f]+")
_LITTER = re.compile(r"\.(?:trash-[0-9a-f]+|(?:step_\d{8,}|run\.json|retention\.json)\.tmp-(?P<process>[0-9a-f]+)-[0-9a-f]+)")


# How long a listing is used. Changes by other programs are noticed by the directory's modification time, except in the middle of a change made here.
_MAX_AGE_SECONDS = 1.0


class LocalDirectory(CheckpointDirectory[Path]):
    """A directory on a file system, where renames are atomic.

    With thousands of checkpoints, listing takes as long as writing a small one. So a run that saves several times per second lists the directory once per
    second, or when another program has changed it: the last listing is updated by the changes made here, and used if the directory's modification time is still
    the one that was set after the last of them.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._listed: Contents | None = None
        self._listed_at = 0.0
        self._version: tuple[int, int] | None = None  # Inode and modification time.

    @override
    def is_there(self) -> bool:
        return self.path.is_dir()

    @override
    def make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise DirectoryInUseError(f"{self.path} cannot be created, because it or one of its parents is a file. Choose another directory.") from error

    @override
    def check_held(self) -> None:
        pass  # The kernel's lock lasts as long as the process.

    @override
    def recent_contents(self) -> Contents:
        if self._listed is not None and time.monotonic() - self._listed_at <= _MAX_AGE_SECONDS and self._current_version() == self._version:
            return self._listed
        self._listed, self._listed_at = None, time.monotonic()
        version = self._stamp()  # Before the listing, so that it contains every change up to this version.
        contents = self.contents()
        if version is not None and not contents.set_aside:
            self._listed, self._version = contents, version
        return contents

    def _current_version(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _stamp(self) -> tuple[int, int] | None:
        """Sets a modification time that no other change has, although the clock of file systems is coarse. Returns the version, `None` if that fails.

        It is earlier than the change by less than a microsecond, chosen at random, because two processes may stamp a directory in the same tick.
        """
        try:
            status = self.path.stat()
            os.utime(self.path, ns=(status.st_atime_ns, status.st_mtime_ns - 1 - secrets.randbelow(1000)))
        except OSError:  # The directory may belong to another user.
            return None
        return self._current_version()

    @contextlib.contextmanager
    def _changing(self, *, added: int | None = None, removed: int | None = None) -> Iterator[None]:
        """Updates the listing by a change that the block makes."""
        listed, is_known = self._listed, self._current_version() == self._version
        self._listed = None
        yield
        if listed is None or not is_known:
            return
        steps = [step for step in listed.steps if step not in (added, removed)]
        if added is not None:
            bisect.insort(steps, added)
        if (version := self._stamp()) is not None:
            self._listed, self._version = Contents(steps, []), version

    @override
    def contents(self) -> Contents:
        steps, set_aside = [], []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path) as entries:
            for entry in entries:
                if match := STEP.fullmatch(entry.name):
                    steps += [int(match[1])] if entry.is_dir() else []
                elif match := _OLD.fullmatch(entry.name):
                    set_aside.append(SetAside(self.path / entry.name, int(match["since"])))
        return Contents(sorted(steps), sorted(set_aside))

    @override
    def size_and_time(self, step: int) -> tuple[int, float]:
        path = self.checkpoint(step)
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()), path.stat().st_mtime

    @override
    def write(self, step: int, *, train: PyTree, run: PyTree, metadata: Mapping[str, Any], backend: str, collective: CollectiveSave | None) -> None:
        with self._changing(added=step):
            write_in_place(self.checkpoint(step), train=train, run=run, metadata=metadata, backend=backend, collective=collective)

    @override
    def delete(self, step: int) -> None:
        with self._changing(removed=step), contextlib.suppress(FileNotFoundError):  # Another program may have deleted it.
            delete(self.checkpoint(step))

    @override
    def set_aside(self, steps: list[int], *, since: int) -> None:
        undo = self.path / f".undo-{secrets.token_hex(4)}"
        try:
            undo.mkdir()
            for step in steps:
                os.rename(self.checkpoint(step), undo / self.checkpoint(step).name)
            fsync_directory(undo)
            os.rename(undo, self.path / f".old-{since}.{secrets.token_hex(4)}")
            fsync_directory(self.path)
        except BaseException:
            with contextlib.suppress(OSError):  # Otherwise, recover() does it.
                self._undo(undo)
            raise

    @override
    def put_back(self, aside: SetAside) -> None:
        undo = self.path / f".undo-{secrets.token_hex(4)}"
        os.rename(aside.place, undo)  # First: if the process died later, restored checkpoints would supersede the rest.
        self._undo(undo)

    def _undo(self, undo: Path) -> None:
        for entry in sorted(undo.iterdir()):
            put_back(entry, self.path / entry.name)
        undo.rmdir()

    @override
    def delete_set_aside(self, aside: SetAside) -> None:
        assert isinstance(aside.place, Path)
        delete(aside.place)

    @override
    def recover(self, *, is_alone: bool) -> None:
        for entry in sorted(self.path.iterdir()) if self.path.is_dir() else []:
            litter = _LITTER.fullmatch(entry.name)
            if litter and (is_alone or litter["process"] != PROCESS):
                delete(entry)
            elif replaced := REPLACED.fullmatch(entry.name):
                put_back(entry, self.path / replaced["name"])
            elif _UNDO.fullmatch(entry.name):
                self._undo(entry)

    @override
    def version(self, name: str) -> object:
        status = (self.path / name).stat()
        return status.st_ino, status.st_mtime_ns, status.st_size

    @override
    def write_note(self, name: str, values: Mapping[str, Any], *, is_durable: bool = True) -> None:
        with self._changing():
            replace_document(self.path / name, values, is_durable=is_durable)
