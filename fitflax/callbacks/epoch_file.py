"""`EpochFile`: what callbacks share that write the logs of every epoch into one file and go on with it when a run is resumed."""

import abc
import contextlib
import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase
from fitflax.checkpoints.documents import PROCESS, fsync_directory
from fitflax.errors import CallbackError
from fitflax.logs import Logs, row_of

__all__ = ["EPOCH", "EpochFile"]

EPOCH = "epoch"


class EpochFile(Callback):
    """A file with a line for each epoch.

    A run that begins afresh replaces the file with its first line, not before; what is put in its place is put there at once.

    Args:
        path: The file; its directories are made.
        append: Whether a run that begins afresh keeps the lines that are there.
    """

    phase = Phase.RECORD
    main_process_only = True
    writes_files = True

    def __init__(self, path: str | os.PathLike[str], *, append: bool) -> None:
        self.path = Path(path)
        self.append = append
        self._file: TextIO | None = None  # Open from the first line of a run on.

    # -- what a kind of file says --

    @abc.abstractmethod
    def _read_in(self) -> None:
        """Takes what the file has.

        Raises:
            CallbackError: It is another kind of file, or cannot be read.
        """

    @abc.abstractmethod
    def _forget(self) -> None:
        """Takes what a file has that is not there."""

    @abc.abstractmethod
    def _is_log(self, line: bytes) -> bool:
        """Returns whether this may be the first line of such a file."""

    @abc.abstractmethod
    def _whole(self) -> str:
        """Returns all that the file should have."""

    @abc.abstractmethod
    def _add(self, epoch: int, step: int, values: dict[str, Any]) -> None:
        """Takes the values of an epoch, and writes them with `_write`."""

    # -- a run --

    @override
    def open_run(self, run_id: str, step: int) -> None:
        self._begin()  # As early as this for its errors: nobody has touched a directory of checkpoints yet.

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._begin()

    def _begin(self) -> None:
        self.close()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            target = self.path.resolve()
            for litter in target.parent.glob(f".{glob.escape(target.name.lstrip('.'))}.tmp-*"):
                litter.unlink()  # Of a process that died while it wrote.
            if self.path.exists():
                self.path.open("ab").close()  # Whether it can be written; this changes nothing.
        except OSError as error:
            raise self._cannot_write(error) from error
        # Otherwise the file is nothing to this run, unless load_state_dict says that it resumes the one that wrote it.
        if self.append:
            self._read_in()
        else:
            self._check_may_be_replaced()
            self._forget()

    def _check_may_be_replaced(self) -> None:
        """Checks that the file is an earlier log, empty, or not there; another one nobody meant to lose."""
        try:
            with self.path.open("rb") as file:
                head = file.readline()
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._cannot_read(error) from error
        if head.strip() and not self._is_log(head.strip()):
            owner = type(self).__name__
            raise CallbackError(f"{owner} would replace {self.path}, which is no log of epochs: its first line has no {EPOCH!r}. Give another path.")

    @override
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._add(epoch, getattr(getattr(self, "trainer", None), "step", 0), row_of(logs, only_recorded=False))

    @override
    def load_closing(self, step: int, epoch: int, logs: Logs) -> None:
        self.on_epoch_end(epoch, logs)

    @property
    @override
    def state_key(self) -> str:
        # The name alone: a run's directory may have moved by the time it is resumed.
        return f"{type(self).__name__}(path={self.path.name!r})"

    # -- the file --

    def _write(self, line: str | None) -> None:
        """Writes one more line; or all of them, where that does not do, or the file is not open yet."""
        if line is None or self._file is None:
            self._rewrite()
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise self._cannot_write(error) from error

    def _rewrite(self) -> None:
        """Puts the whole in place of the file at once: whoever reads it finds the old one or the new one."""
        self.close()
        target = self.path.resolve()  # Of a link, what it leads to.
        temporary = target.with_name(f".{target.name.lstrip('.')}.tmp-{PROCESS}")
        try:
            with temporary.open("w", newline="", encoding="utf-8") as file:
                file.write(self._whole())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            fsync_directory(target.parent)
            self._file = target.open("a", newline="", encoding="utf-8")
        except OSError as error:
            raise self._cannot_write(error) from error
        finally:
            temporary.unlink(missing_ok=True)

    def _cannot_write(self, error: OSError) -> CallbackError:
        with contextlib.suppress(OSError):
            self.close()  # What is still in its buffer would fail once more.
        return CallbackError(f"{type(self).__name__} cannot write {self.path}: {error.strerror or error}.")

    def _cannot_read(self, error: OSError) -> CallbackError:
        return CallbackError(f"{type(self).__name__} cannot read {self.path}: {error.strerror or error}.")

    @override
    def sync(self) -> None:
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
