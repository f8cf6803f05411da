"""`CSVLogger` and `JSONLogger` write the logs of each epoch to one file, and continue the file after a resume.

Other programs, such as `sed -i`, rsync and sync clients, may replace, truncate or delete the file during the run. It can then be written again, because all
rows are also in memory, and the history of a resumed run has its earlier rows.
"""

import abc
import codecs
import collections
import contextlib
import csv
import functools
import glob
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TextIO

from typing_extensions import override

from fitflax.background import Background
from fitflax.callbacks.base import Callback, Phase
from fitflax.checkpoints.json_documents import PROCESS, fsync_directory
from fitflax.errors import CallbackError, ConfigError, warn
from fitflax.leaves import as_json
from fitflax.logs import Logs, row_of
from fitflax.storage import ObjectPath, locate

EPOCH = "epoch"
MISSING = "NA"


class EpochFile(Callback):
    """Base class of callbacks that write a row per epoch to a file. Subclasses define its format.

    Unless the callback appends, a new run atomically replaces the file when it writes its first row. A file in a bucket is uploaded whole at each epoch, in a
    thread. If another program changes the file during the run, the next row, or a resume, restores it with one warning.
    """

    phase = Phase.RECORD
    main_process_only = True
    writes_files = True
    _key_arguments = (("path", "path.name"),)
    _kind: ClassVar[str]  # The kind of file, for errors.
    _count_name: ClassVar[str]  # The name of the number of rows in the callback's state.

    def __init__(self, path: str | os.PathLike[str], *, append: bool, storage_options: Mapping[str, Any] | None) -> None:
        self.path = locate(path, owner=f"{type(self).__name__}(path)", error=ConfigError, options=storage_options)
        self.append = append
        self._rows: list[Any] = []  # The rows that are in the file, or will be when the next one is written.
        self._file: TextIO | None = None  # Open after the first row of a run.
        self._written: tuple[int, int, int] | None = None  # Device, inode and size after the last row.
        self._has_warned = False
        self._first_row = 0  # The index of this run's first row; earlier ones are of other runs.
        self._num_loaded = 0  # The rows that the resumed run had written before its checkpoint.
        # Only for a file in a bucket; the thread starts with its first row.
        self._thread: Background | None = None
        self._unwritten: collections.deque[bytes] = collections.deque(maxlen=1)  # The newest text to upload.
        self._failure: BaseException | None = None

    # -- the file format --

    @abc.abstractmethod
    def _parse(self, text: str) -> list[Any]:
        """Returns the rows of a file, or raises a `CallbackError` if it has another format."""

    @abc.abstractmethod
    def _is_log(self, line: bytes) -> bool:
        """Returns whether `line` can be the first line of such a file."""

    @abc.abstractmethod
    def _contents(self) -> str:
        """Returns the text of the whole file."""

    @abc.abstractmethod
    def _row(self, epoch: int, step: int, values: Mapping[str, Any]) -> Any:
        """Returns the row of an epoch."""

    @abc.abstractmethod
    def _epoch(self, row: Any) -> int | None:
        """Returns the epoch of a row; `None` if it is not a number."""

    @abc.abstractmethod
    def _line(self, row: Any) -> str | None:
        """Returns the line to append for a new row; `None` if the whole file must be written again."""

    # -- a run --

    @override
    def open_run(self, run_id: str, step: int) -> None:
        self._prepare()  # Called here as well, so that its errors are raised before any directory of checkpoints is changed.

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._prepare()

    def _prepare(self) -> None:
        self.close()
        with self._disk_errors("write"):
            if isinstance(self.path, Path):
                _prepare_path(self.path)
            else:
                with contextlib.suppress(FileNotFoundError):
                    self.path.stat()  # Fails if the store is not available.
        # Without `append` the file is ignored, unless `load_state_dict` finds that this run wrote it.
        if not self.append:
            self._check_replaceable()
        self._rows = self._read() if self.append else []
        self._first_row, self._has_warned, self._num_loaded = len(self._rows), False, 0

    def _check_replaceable(self) -> None:
        """Checks that the file is an earlier log, empty, or missing, so that no other file is overwritten."""
        head = b""
        with contextlib.suppress(FileNotFoundError), self._disk_errors("read"), self.path.open("rb") as file:
            head = file.readline().strip()
        if head and not self._is_log(head):
            owner = type(self).__name__
            raise CallbackError(f"{owner} would replace {self.path}, which is not a log of epochs: its first line has no {EPOCH!r}. Pass another path.")

    @override
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._append(self._row(epoch, getattr(getattr(self, "trainer", None), "step", 0), row_of(logs, only_recorded=False)))

    def _append(self, row: Any) -> None:
        self._rows.append(row)
        self._write(self._line(row))

    @override
    def load_closing(self, step: int, epoch: int, logs: Logs) -> None:
        self.on_epoch_end(epoch, logs)

    # -- resuming --

    @override
    def state_dict(self) -> dict[str, Any]:
        return {self._count_name: len(self._rows), "first_row": self._first_row}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        count = int(state[self._count_name])
        if not count and not self.append:
            return  # The run had written nothing yet, so the file belongs to another run.
        # States of version 0.1 do not have the first row, which is only known for files to which runs do not append.
        self._first_row = int(state.get("first_row", count if self.append else 0))
        self._num_loaded = count - self._first_row
        self._rows = self._read()
        if len(self._rows) > count:
            self._drop_after(count)
            self._write(None)

    def _drop_after(self, count: int) -> None:
        del self._rows[count:]

    @override
    def load_history(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if not 0 < self._num_loaded <= len(rows):
            return
        earlier, run_rows = self._rows[: self._first_row], self._rows[self._first_row :]
        expected = {int(row["epoch"]): row for row in rows[-self._num_loaded :]}
        by_epoch = {self._epoch(row): row for row in run_rows}
        if [self._epoch(row) for row in run_rows] == list(expected):
            return
        self._rows = [*earlier, *(by_epoch[epoch] if epoch in by_epoch else self._row(epoch, int(row["step"]), row["logs"]) for epoch, row in expected.items())]
        self._write(None)
        missing = [epoch for epoch in expected if epoch not in by_epoch]
        self._warn(f"lacks the rows of epochs {missing}" if missing else "has other rows than this run")

    # -- the file --

    def _read(self) -> list[Any]:
        """Returns the rows of the file. Raises a `CallbackError` if it cannot be read or has another format."""
        data = b""
        with contextlib.suppress(FileNotFoundError), self._disk_errors("read"):
            data = self.path.read_bytes()
        try:
            # Like an incomplete last row, an incomplete last character is dropped.
            return self._parse(codecs.getincrementaldecoder("utf-8")().decode(data))
        except UnicodeDecodeError as error:
            raise self._invalid(f"it is not a {self._kind} file") from error

    def _write(self, line: str | None) -> None:
        """Appends `line`, or writes the whole file if `line` is `None` or the file is not open yet."""
        if isinstance(self.path, ObjectPath):
            self._raise_failure()
            self._thread = self._thread or Background("fitflax-epoch-file", on_error=self._fail)
            self._unwritten.append(self._contents().encode())
            self._thread.submit(functools.partial(self._upload, self.path))
            return
        with self._disk_errors("write"):
            if line is None or self._file is None:
                self._replace_file(self.path)
            elif _identity(self.path) != self._written:
                self._replace_file(self.path)
                self._warn("was replaced, changed or deleted by another program")
            else:
                self._file.write(line)
                self._file.flush()
                self._written = _identity(self._file.fileno())

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"{self.path} {what}. All rows of this run were written again. Do not change the file during a run; change a copy.")

    def _replace_file(self, path: Path) -> None:
        """Replaces the file atomically, so that readers see the old file or the new one."""
        self.close()
        target = path.resolve()  # Write to the target of a symbolic link.
        temporary = target.with_name(f".{target.name.lstrip('.')}.tmp-{PROCESS}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)  # The directory may have been deleted as well.
            with temporary.open("w", newline="", encoding="utf-8") as file:
                file.write(self._contents())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            fsync_directory(target.parent)
            self._file = target.open("a", newline="", encoding="utf-8")
            self._written = _identity(self._file.fileno())
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _upload(self, path: ObjectPath) -> None:
        if self._unwritten:  # Otherwise, an earlier job has uploaded the newest text.
            path.write_bytes(self._unwritten.pop())

    def _fail(self, error: BaseException) -> None:
        self._failure = error

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            with self._disk_errors("write"):
                raise failure

    @contextlib.contextmanager
    def _disk_errors(self, do: str) -> Iterator[None]:
        """Turns errors of the disk or store into a `CallbackError`, unless there is no file to read."""
        try:
            yield
        except OSError as error:
            if do == "read" and isinstance(error, FileNotFoundError):
                raise
            with contextlib.suppress(OSError):
                self.close()  # Flushing the buffer may fail again.
            raise CallbackError(f"{type(self).__name__} cannot {do} {self.path}: {error.strerror or error}.") from error

    def _invalid(self, fault: str) -> CallbackError:
        return CallbackError(f"{type(self).__name__} cannot continue the file {self.path}: {fault}. Move the file, or pass another path.")

    @override
    def sync(self) -> Callable[[], None] | None:
        if self._file is not None:
            with self._disk_errors("write"):
                self._file.flush()
                os.fsync(self._file.fileno())
        wait = None if self._thread is None or self._thread.is_idle else self._thread.barrier()
        self._raise_failure()
        return wait

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


def _prepare_path(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    target = path.resolve()
    for leftover in target.parent.glob(f".{glob.escape(target.name.lstrip('.'))}.tmp-*"):
        leftover.unlink(missing_ok=True)  # From a process that was killed while writing.
    if path.exists():
        path.open("ab").close()  # Fails if the file cannot be written. It does not change the file.


def _identity(file: Path | int) -> tuple[int, int, int] | None:
    """Returns device, inode and size of a file; `None` if it does not exist."""
    try:
        status = os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino, status.st_size


class CSVLogger(EpochFile):
    r"""Writes a row per epoch to a CSV file: `epoch`, then all logged values, under a header.

    Missing values are `NA`. A key that is first logged later, such as a validation metric, adds a column. Floats are written without loss of precision; arrays
    are left out. A resumed run drops rows that are newer than its checkpoint, so each epoch is in the file once. A new run replaces the file when it writes
    its first row. If another program replaces or deletes the file during a run, all rows are written again, with one warning.

    Args:
        path: The file, or a URL. Missing directories are created.
        append: Whether a new run keeps the existing rows, with all their columns.
        storage_options: Options for a URL; see `ModelCheckpoint`.

    Raises:
        CallbackError: Before the first step: the file cannot be written, or has another format. The file is not changed.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "log.csv")
    >>> with CSVLogger(path) as logger:
    ...     logger.on_epoch_end(0, {"loss": 0.5})
    ...     logger.on_epoch_end(1, {"loss": 0.25, "val_loss": 1.0})
    >>> path.read_text()
    'epoch,loss,val_loss\n0,0.5,NA\n1,0.25,1.0\n'
    """

    _kind = "CSV"
    _count_name = "rows"
    _columns: Sequence[str] = ()  # Columns of the file, or of the file that will be written.
    _known_columns: Sequence[str] = ()  # Columns in the checkpoint that the run resumes from.

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(path, append=append, storage_options=storage_options)

    @override
    def _prepare(self) -> None:
        self._columns = self._known_columns = ()
        super()._prepare()

    @override
    def _parse(self, text: str) -> list[Any]:
        """Returns rows as dicts. Missing fields of an incomplete last row, as after a power failure, are `NA`."""
        try:
            lines = [line for line in csv.reader(io.StringIO(text, newline="")) if line]
        except csv.Error as error:
            raise self._invalid(f"it is not a CSV file ({error})") from error
        columns, *rows = lines or [[]]
        if lines and EPOCH not in columns:
            raise self._invalid(f"it has no column {EPOCH!r}, only {columns}")
        if len(set(columns)) < len(columns):
            raise self._invalid(f"some of its columns {columns} have the same name")
        if rows and not text.endswith(("\n", "\r")):
            rows[-1] += [MISSING] * (len(columns) - len(rows[-1]))
        for number, row in enumerate(rows, start=1):
            if len(row) != len(columns):
                raise self._invalid(f"its row {number} has {len(row)} fields instead of {len(columns)}")
        self._columns = columns
        return [dict(zip(columns, row, strict=True)) for row in rows]

    @override
    def _is_log(self, line: bytes) -> bool:
        return EPOCH.encode() in line.split(b",")

    @override
    def _contents(self) -> str:
        self._columns = list(dict.fromkeys([*self._columns, *self._known_columns]))
        return _csv_text([self._columns, *map(self._fields, self._rows)] if self._columns else [])

    def _fields(self, row: Mapping[str, str]) -> list[str]:
        return [row.get(column, MISSING) for column in self._columns]

    @override
    def _row(self, epoch: int, step: int, values: Mapping[str, Any]) -> dict[str, str]:
        texts = {key: _field_text(value) for key, value in values.items() if key != EPOCH}
        return {EPOCH: str(epoch)} | {key: text for key, text in texts.items() if text is not None}

    @override
    def _epoch(self, row: Mapping[str, str]) -> int | None:
        return int(row[EPOCH]) if row[EPOCH].isdecimal() else None

    @override
    def _line(self, row: Mapping[str, str]) -> str | None:
        new = [key for key in row if key not in self._columns]
        self._columns = [*self._columns, *new]
        return None if new else _csv_text([self._fields(row)])

    @override
    def _drop_after(self, count: int) -> None:
        """Drops later rows, and columns that only they have."""
        super()._drop_after(count)
        known = self._known_columns
        self._columns = [column for column in self._columns if column in known or any(row[column] != MISSING for row in self._rows)]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "columns": list(self._columns)}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known_columns = list(state["columns"])
        super().load_state_dict(state)


def _field_text(value: Any) -> str | None:
    """Returns a logged value as the text of a field; `None` for arrays and other values that are left out.

    >>> _field_text(0.1), _field_text(float("nan")), _field_text(None), _field_text([1, 2])
    ('0.1', 'nan', 'NA', None)
    """
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None:
        return MISSING
    if isinstance(value, float):
        return float.__repr__(value)
    return str(value) if isinstance(value, int | str) else None


def _csv_text(rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


class JSONLogger(EpochFile):
    r"""Writes a line of JSON per epoch: `epoch`, `step`, then all logged values, with arrays as lists.

    Each line is an object, so the file can be read during the run, for example with `pandas.read_json(path, lines=True)`. Floats are written without loss
    of precision. JSON has no NaN or infinity; they are the strings `"nan"`, `"inf"` and `"-inf"`. A resumed run drops lines that are newer than its
    checkpoint, so each epoch is in the file once. A new run replaces the file when it writes its first line. If another program replaces or deletes the file
    during a run, all lines are written again, with one warning.

    Args:
        path: The file, or a URL. Missing directories are created.
        append: Whether a new run keeps the existing lines.
        storage_options: Options for a URL; see `ModelCheckpoint`.

    Raises:
        CallbackError: Before the first step: the file cannot be written, or has another format. The file is not changed.

    >>> import pathlib, tempfile, numpy as np
    >>> path = pathlib.Path(tempfile.mkdtemp(), "log.jsonl")
    >>> with JSONLogger(path) as logger:
    ...     logger.on_epoch_end(0, {"loss": 0.5, "per_class": np.array([1.0, float("nan")])})
    >>> path.read_text()
    '{"epoch": 0, "step": 0, "loss": 0.5, "per_class": [1.0, "nan"]}\n'
    """

    _kind = "text"
    _count_name = "lines"
    _dropped: Sequence[str] = ()  # Lines after the checkpoint that the run resumes from, until it continues.

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(path, append=append, storage_options=storage_options)

    @override
    def _prepare(self) -> None:
        self._dropped = ()
        super()._prepare()

    @override
    def _drop_after(self, count: int) -> None:
        self._dropped = self._rows[count:]
        super()._drop_after(count)

    @override
    def _parse(self, text: str) -> list[Any]:
        """Returns the lines. The last one may be truncated, as after a power failure."""
        lines: list[str] = []
        for number, line in enumerate(io.StringIO(text), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                if not line.endswith("\n"):
                    return lines  # Only the last line can be incomplete.
                raise self._invalid(f"its line {number} is not JSON") from error
            if not isinstance(row, dict) or EPOCH not in row:
                raise self._invalid(f"its line {number} has no {EPOCH!r}")
            lines.append(line if line.endswith("\n") else f"{line}\n")
        return lines

    @override
    def _is_log(self, line: bytes) -> bool:
        return line.startswith(b"{") and f'"{EPOCH}":'.encode() in line

    @override
    def _contents(self) -> str:
        return "".join(self._rows)

    @override
    def _row(self, epoch: int, step: int, values: Mapping[str, Any]) -> str:
        row = {EPOCH: epoch, "step": step} | {key: value for key, value in values.items() if key not in (EPOCH, "step")}
        return json.dumps(as_json(row), ensure_ascii=False) + "\n"

    @override
    def _epoch(self, row: str) -> int | None:
        epoch = json.loads(row)[EPOCH]
        return epoch if isinstance(epoch, int) else None

    @override
    def _line(self, row: str) -> str:
        return row

    @override
    def load_closing(self, step: int, epoch: int, logs: Logs) -> None:
        row = self._row(epoch, step, row_of(logs, only_recorded=False))
        # The earlier process also wrote values that checkpoints do not keep, such as samples.
        saved = json.loads(row).items()
        lines, self._dropped = self._dropped, ()
        if not lines:  # If the run is shorter than an epoch, `load_state_dict` has not read the file, which may belong to another run.
            with contextlib.suppress(CallbackError):
                lines = self._read()
        self._append(next((line for line in lines if saved <= json.loads(line).items()), row))

    @override
    def drop_closing(self) -> None:
        self._dropped = ()
