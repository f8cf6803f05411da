"""`CSVLogger`: the logs of every epoch as a CSV file, a row an epoch.

It keeps what `History` keeps, in a file that anything can read while the run goes on. Arrays have no place in a table and are left out.
"""

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from fitflax.callbacks.epoch_file import EPOCH, EpochFile
from fitflax.errors import CallbackError

__all__ = ["CSVLogger"]

MISSING = "NA"


class CSVLogger(EpochFile):
    r"""Writes a row an epoch: `epoch`, then all that is logged, under a header.

    What a row lacks is `NA`; a key that comes later, such as a validation's, becomes one more column. Floats read back to the same floats. A resumed run goes
    on from the rows that its checkpoint knew, so that each epoch is there once. A run that begins afresh replaces the file with its first row, not before.

    Args:
        path: The file; its directories are made.
        append: Whether a run that begins afresh keeps the rows that are there. A column that the file has and the run does not log is kept, too.

    Raises:
        CallbackError: Before the first step: the file cannot be written, or is to be appended to and is no such table. It is left as it is.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "log.csv")
    >>> with CSVLogger(path) as logger:
    ...     logger.on_epoch_end(0, {"loss": 0.5})
    ...     logger.on_epoch_end(1, {"loss": 0.25, "val_loss": 1.0})
    >>> path.read_text()
    'epoch,loss,val_loss\n0,0.5,NA\n1,0.25,1.0\n'
    """

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False) -> None:
        super().__init__(path, append=append)
        # The table as it stands in the file, or will once there is a row to write.
        self._columns: list[str] = []
        self._rows: list[list[str]] = []

    @override
    def _read_in(self) -> None:
        self._columns, self._rows = read_table(self.path)

    @override
    def _forget(self) -> None:
        self._columns, self._rows = [], []

    @override
    def _is_log(self, line: bytes) -> bool:
        return EPOCH.encode() in line.split(b",")

    @override
    def _whole(self) -> str:
        return table_text([self._columns, *self._rows] if self._columns else [])

    @override
    def _add(self, epoch: int, step: int, values: dict[str, Any]) -> None:
        fields = {EPOCH: str(epoch)}
        for key, value in values.items():
            text = field_text(value)
            if text is not None:
                fields.setdefault(key, text)
        new = [key for key in fields if key not in self._columns]
        self._columns += new
        for row in self._rows:
            row += [MISSING] * len(new)
        self._rows.append([fields.get(key, MISSING) for key in self._columns])
        self._write(None if new else table_text(self._rows[-1:]))

    # -- resuming --

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"rows": len(self._rows), "columns": list(self._columns)}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        count, known = int(state["rows"]), set(state["columns"])
        if not count and not self.append:
            return  # The run had written nothing yet; what is there is not its own.
        columns, rows = read_table(self.path)
        kept = rows[:count]
        # A column of dropped rows alone goes with them.
        places = [place for place, key in enumerate(columns) if key in known or any(row[place] != MISSING for row in kept)]
        self._columns = [columns[place] for place in places]
        self._rows = [[row[place] for place in places] for row in kept]
        if len(kept) < len(rows) or len(places) < len(columns):
            self._write(None)


def field_text(value: Any) -> str | None:
    """Returns a logged value as the text of a field, or `None` where it has none, as an array.

    >>> field_text(0.1), field_text(float("nan")), field_text(None), field_text([1, 2])
    ('0.1', 'nan', 'NA', None)
    """
    if getattr(value, "ndim", None) == 0:
        value = value.item()  # A scalar of NumPy's or JAX's.
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


def read_table(path: Path) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows of a CSV file with a column `epoch`; nothing where there is no file, or an empty one.

    The last row may have been cut off, as by a power failure: what it lacks is `NA`.

    Raises:
        CallbackError: It is no such file, or cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8")
        lines = [line for line in csv.reader(io.StringIO(text, newline="")) if line]
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise CallbackError(f"CSVLogger cannot read {path}: {error.strerror or error}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise _no_table(path, f"it is no CSV file ({error})") from error
    if not lines:
        return [], []
    columns, *rows = lines
    if EPOCH not in columns:
        raise _no_table(path, f"it has no column {EPOCH!r}, only {columns}")
    if len(set(columns)) < len(columns):
        raise _no_table(path, f"its columns {columns} are not distinct")
    if rows and not text.endswith(("\n", "\r")):
        rows[-1] += [MISSING] * (len(columns) - len(rows[-1]))
    for number, row in enumerate(rows, start=1):
        if len(row) != len(columns):
            raise _no_table(path, f"its row {number} has {len(row)} fields instead of {len(columns)}")
    return columns, rows


def _no_table(path: Path, fault: str) -> CallbackError:
    return CallbackError(f"CSVLogger cannot go on with {path}: {fault}. Move the file away, or give another path.")
