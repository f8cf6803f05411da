"""`EpochFile`: base class of callbacks that write the logs of each epoch to one file, and continue the file after a resume.

Other programs may replace, truncate or delete the file during the run, such as `sed -i`, rsync and sync clients. All rows are also in memory, and those of a
resumed run in its history, so the file is written again.
"""

import abc
import contextlib
import functools
import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from typing_extensions import override

from fitflax.background import Background
from fitflax.callbacks.base import Callback, Phase
from fitflax.checkpoints.formats.json_documents import PROCESS, fsync_directory
from fitflax.errors import CallbackError, ConfigError, warn
from fitflax.logs import Logs, row_of
from fitflax.storage import ObjectPath, locate

__all__ = ["EPOCH", "EpochFile"]

EPOCH = "epoch"


class EpochFile(Callback):
    """Base class of callbacks that write a line per epoch to a file.

    Unless it appends, a new run replaces the file, atomically, when it writes its first line. A file in a bucket is uploaded whole at each epoch, in a thread.
    If another program changes the file during the run, the next line, or a resume, restores it with one warning.
    """

    phase = Phase.RECORD
    main_process_only = True
    writes_files = True

    def __init__(self, path: str | os.PathLike[str], *, append: bool, storage_options: Mapping[str, Any] | None) -> None:
        self.path = locate(path, owner=f"{type(self).__name__}(path)", error=ConfigError, options=storage_options)
        self.append = append
        self._file: TextIO | None = None  # Open from the first line of a run on.
        self._written: tuple[int, int, int] | None = None  # Device, inode and size after the last line.
        self._has_warned = False
        self._first_row = 0  # The index of this run's first row; earlier ones are of other runs.
        self._num_loaded = 0  # The rows that the resumed run had written before its checkpoint.
        # For a file in a bucket, from its first line on.
        self._thread: Background | None = None
        self._failure: BaseException | None = None

    # -- the file format --

    @abc.abstractmethod
    def _read_existing(self) -> None:
        """Reads the existing file into memory, and raises a `CallbackError` if it has another format."""

    @abc.abstractmethod
    def _clear(self) -> None:
        """Begins with an empty file in memory."""

    @abc.abstractmethod
    def _is_log(self, line: bytes) -> bool:
        """Returns whether `line` can be the first line of such a file."""

    @abc.abstractmethod
    def _contents(self) -> str:
        """Returns the full text of the file."""

    @abc.abstractmethod
    def _epochs(self) -> list[int | None]:
        """Returns the epoch of each row in memory; `None` if it is not a number."""

    @abc.abstractmethod
    def _replace_rows(self, rows: Sequence[int | Mapping[str, Any]]) -> None:
        """Replaces the rows in memory. Each is the index of a present row, or a row of `History`."""

    @abc.abstractmethod
    def _add(self, epoch: int, step: int, values: dict[str, Any]) -> None:
        """Adds the values of an epoch, and writes them with `_write`."""

    # -- a run --

    @override
    def open_run(self, run_id: str, step: int) -> None:
        self._prepare()  # Here already, so that its errors are raised before any directory of checkpoints is changed.

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._prepare()

    def _prepare(self) -> None:
        self.close()
        try:
            if isinstance(self.path, ObjectPath):
                self.path.stat()  # Fails if the store is not available.
            else:
                self._prepare_path(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._cannot_write(error) from error
        # Without `append` the file is ignored, unless `load_state_dict` finds that this run wrote it.
        if self.append:
            self._read_existing()
        else:
            self._check_replaceable()
            self._clear()
        self._first_row, self._has_warned, self._num_loaded = len(self._epochs()), False, 0

    @staticmethod
    def _prepare_path(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.resolve()
        for litter in target.parent.glob(f".{glob.escape(target.name.lstrip('.'))}.tmp-*"):
            litter.unlink()  # Left by a process that was killed while writing.
        if path.exists():
            path.open("ab").close()  # Fails if the file cannot be written; changes nothing.

    def _check_replaceable(self) -> None:
        """Checks that the file is an earlier log, empty, or missing, so that no other file is overwritten."""
        try:
            with self.path.open("rb") as file:
                head = file.readline()
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._cannot_read(error) from error
        if head.strip() and not self._is_log(head.strip()):
            owner = type(self).__name__
            raise CallbackError(f"{owner} would replace {self.path}, which is not a log of epochs: its first line has no {EPOCH!r}. Pass another path.")

    @override
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._add(epoch, getattr(getattr(self, "trainer", None), "step", 0), row_of(logs, only_recorded=False))

    @override
    def load_closing(self, step: int, epoch: int, logs: Logs) -> None:
        self.on_epoch_end(epoch, logs)

    def _load_counts(self, state: Mapping[str, Any], count: int) -> None:
        """Restores how many of the `count` rows of a state belong to the run. States of version 0.1 do not tell for files to which runs append."""
        self._first_row = int(state.get("first_row", count if self.append else 0))
        self._num_loaded = count - self._first_row

    @override
    def load_history(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if not 0 < self._num_loaded <= len(rows):
            return
        begin, expected = self._first_row, list(rows)[-self._num_loaded :]
        found = self._epochs()[begin:]
        if found == [int(row["epoch"]) for row in expected]:
            return
        places = {epoch: begin + place for place, epoch in enumerate(found)}
        self._replace_rows([*range(min(begin, len(self._epochs()))), *(places.get(int(row["epoch"]), row) for row in expected)])
        self._write(None)
        missing = [row["epoch"] for row in expected if int(row["epoch"]) not in places]
        self._warn(f"lacks the rows of epochs {missing}" if missing else "has other rows than this run")

    @property
    @override
    def state_key(self) -> str:
        # Only the name, because a run's directory may be moved before a resume.
        return f"{type(self).__name__}(path={self.path.name!r})"

    # -- the file --

    def _write(self, line: str | None) -> None:
        """Appends `line`, or writes the whole file if `line` is `None` or the file is not open yet."""
        if isinstance(self.path, ObjectPath):
            self._raise_failure()
            self._thread = self._thread or Background("fitflax-epoch-file", on_error=self._fail)
            self._thread.clear()  # Writes that wait are a part of this one.
            self._thread.submit(functools.partial(self.path.write_bytes, self._contents().encode()))
            return
        if line is None or self._file is None:
            self._rewrite()
            return
        if self._is_changed():
            self._rewrite()
            self._warn("was replaced, changed or deleted by another program")
            return
        try:
            self._file.write(line)
            self._file.flush()
            self._written = _identity(os.fstat(self._file.fileno()))
        except OSError as error:
            raise self._cannot_write(error) from error

    def _is_changed(self) -> bool:
        """Returns whether the path no longer leads to the open file, or another program has changed its size."""
        assert isinstance(self.path, Path)
        try:
            return _identity(self.path.stat()) != self._written
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            raise self._cannot_write(error) from error

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"{self.path} {what}. All rows of this run were written again. Do not change the file during a run; change a copy.")

    def _rewrite(self) -> None:
        """Replaces the file atomically, so that readers see the old file or the new one."""
        self.close()
        assert isinstance(self.path, Path)
        target = self.path.resolve()  # Write to the target of a symbolic link.
        temporary = target.with_name(f".{target.name.lstrip('.')}.tmp-{PROCESS}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)  # It may be gone, too.
            with temporary.open("w", newline="", encoding="utf-8") as file:
                file.write(self._contents())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            fsync_directory(target.parent)
            self._file = target.open("a", newline="", encoding="utf-8")
            self._written = _identity(os.fstat(self._file.fileno()))
        except OSError as error:
            raise self._cannot_write(error) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _fail(self, error: BaseException) -> None:
        self._failure = error

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if isinstance(failure, OSError):
            raise self._cannot_write(failure) from failure
        if failure is not None:
            raise failure

    def _cannot_write(self, error: OSError) -> CallbackError:
        with contextlib.suppress(OSError):
            self.close()  # Flushing the buffer may fail again.
        return CallbackError(f"{type(self).__name__} cannot write {self.path}: {error.strerror or error}.")

    def _cannot_read(self, error: OSError) -> CallbackError:
        return CallbackError(f"{type(self).__name__} cannot read {self.path}: {error.strerror or error}.")

    @override
    def sync(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.wait_until(lambda: thread.is_idle)
            self._raise_failure()
        if self._file is not None:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise self._cannot_write(error) from error

    @override
    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        self.close()

    @override
    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.end()
            self._raise_failure()


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_size
