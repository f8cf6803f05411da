"""`CSVLogger`: writes the logs of each epoch to a CSV file."""

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from fitflax.callbacks.epoch_file import EPOCH, EpochFile
from fitflax.errors import CallbackError
from fitflax.storage import Location

__all__ = ["CSVLogger"]

MISSING = "NA"


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

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(path, append=append, storage_options=storage_options)
        # The table that is in the file, or will be when the next row is written.
        self._columns: list[str] = []
        self._rows: list[list[str]] = []
        self._known_columns: list[str] = []  # Those of the resumed checkpoint.

    @override
    def _read_existing(self) -> None:
        self._columns, self._rows = read_table(self.path)

    @override
    def _clear(self) -> None:
        self._columns, self._rows = [], []

    @override
    def _is_log(self, line: bytes) -> bool:
        return EPOCH.encode() in line.split(b",")

    @override
    def _contents(self) -> str:
        return table_text([self._columns, *self._rows] if self._columns else [])

    @override
    def _epochs(self) -> list[int | None]:
        place = self._columns.index(EPOCH) if self._columns else 0
        return [int(row[place]) if row[place].isdecimal() else None for row in self._rows]

    @override
    def _replace_rows(self, rows: Sequence[int | Mapping[str, Any]]) -> None:
        before = self._rows
        self._columns += [key for key in self._known_columns if key not in self._columns]
        self._rows = []
        for row in rows:
            fields = dict(zip(self._columns, before[row], strict=False)) if isinstance(row, int) else _fields_of(row["epoch"], row["logs"])
            self._rows.append([fields.get(key, MISSING) for key in self._columns])

    @override
    def _add(self, epoch: int, step: int, values: dict[str, Any]) -> None:
        fields = _fields_of(epoch, values)
        new = [key for key in fields if key not in self._columns]
        self._columns += new
        for row in self._rows:
            row += [MISSING] * len(new)
        self._rows.append([fields.get(key, MISSING) for key in self._columns])
        self._write(None if new else table_text(self._rows[-1:]))

    # -- resuming --

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"rows": len(self._rows), "columns": list(self._columns), "first_row": self._first_row}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        count, known = int(state["rows"]), set(state["columns"])
        if not count and not self.append:
            return  # The run had written nothing yet, so the file belongs to another run.
        self._load_counts(state, count)
        self._known_columns = list(state["columns"])
        columns, rows = read_table(self.path)
        kept = rows[:count]
        # Drop columns that only dropped rows have.
        places = [place for place, key in enumerate(columns) if key in known or any(row[place] != MISSING for row in kept)]
        self._columns = [columns[place] for place in places]
        self._rows = [[row[place] for place in places] for row in kept]
        if len(kept) < len(rows) or len(places) < len(columns):
            self._write(None)


def _fields_of(epoch: int, values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the fields of an epoch's row by column."""
    fields = {EPOCH: str(epoch)}
    for key, value in values.items():
        text = field_text(value)
        if text is not None:
            fields.setdefault(key, text)
    return fields


def field_text(value: Any) -> str | None:
    """Returns a logged value as the text of a field; `None` for arrays and other values that are left out.

    >>> field_text(0.1), field_text(float("nan")), field_text(None), field_text([1, 2])
    ('0.1', 'nan', 'NA', None)
    """
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None:
        return MISSING
    if isinstance(value, float):
        return float.__repr__(value)
    return str(value) if isinstance(value, int | str) else None


def table_text(rows: Iterable[Sequence[str]]) -> str:
    r"""Returns rows as CSV.

    >>> table_text([["epoch", "a,b"]])
    'epoch,"a,b"\n'
    """
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def read_table(path: Location) -> tuple[list[str], list[list[str]]]:
    """Returns the columns and rows of a CSV file with a column `epoch`; empty lists if the file is missing or empty.

    Missing fields of an incomplete last row, as after a power failure, are `NA`. Raises a `CallbackError` for other files.
    """
    try:
        text = path.read_bytes().decode("utf-8")
        lines = [line for line in csv.reader(io.StringIO(text, newline="")) if line]
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise CallbackError(f"CSVLogger cannot read {path}: {error.strerror or error}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise _invalid_file(path, f"it is not a CSV file ({error})") from error
    if not lines:
        return [], []
    columns, *rows = lines
    if EPOCH not in columns:
        raise _invalid_file(path, f"it has no column {EPOCH!r}, only {columns}")
    if len(set(columns)) < len(columns):
        raise _invalid_file(path, f"some of its columns {columns} have the same name")
    if rows and not text.endswith(("\n", "\r")):
        rows[-1] += [MISSING] * (len(columns) - len(rows[-1]))
    for number, row in enumerate(rows, start=1):
        if len(row) != len(columns):
            raise _invalid_file(path, f"its row {number} has {len(row)} fields instead of {len(columns)}")
    return columns, rows


def _invalid_file(path: Location, fault: str) -> CallbackError:
    return CallbackError(f"CSVLogger cannot continue the file {path}: {fault}. Move the file, or pass another path.")
