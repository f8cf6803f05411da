"""`JSONLogger`: writes the logs of each epoch to a file of JSON lines."""

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from fitflax.callbacks.epoch_file import EPOCH, EpochFile
from fitflax.errors import CallbackError

__all__ = ["JSONLogger"]


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

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "log.jsonl")
    >>> with JSONLogger(path) as logger:
    ...     logger.on_epoch_end(0, {"loss": 0.5, "per_class": np.array([1.0, float("nan")])})
    >>> path.read_text()
    '{"epoch": 0, "step": 0, "loss": 0.5, "per_class": [1.0, "nan"]}\n'
    """

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(path, append=append, storage_options=storage_options)
        self._lines: list[str] = []

    @override
    def _read_existing(self) -> None:
        self._lines = self._lines_in_file()

    @override
    def _clear(self) -> None:
        self._lines = []

    @override
    def _is_log(self, line: bytes) -> bool:
        return line.startswith(b"{") and f'"{EPOCH}":'.encode() in line

    @override
    def _contents(self) -> str:
        return "".join(self._lines)

    @override
    def _epochs(self) -> list[int | None]:
        epochs = (json.loads(line)[EPOCH] for line in self._lines)
        return [epoch if isinstance(epoch, int) else None for epoch in epochs]

    @override
    def _replace_rows(self, rows: Sequence[int | Mapping[str, Any]]) -> None:
        self._lines = [self._lines[row] if isinstance(row, int) else _line_of(int(row["epoch"]), int(row["step"]), row["logs"]) for row in rows]

    @override
    def _add(self, epoch: int, step: int, values: dict[str, Any]) -> None:
        self._lines.append(_line_of(epoch, step, values))
        self._write(self._lines[-1])

    def _lines_in_file(self) -> list[str]:
        """Returns the complete lines of the file. The last one may be truncated, as after a power failure."""
        try:
            text = self.path.read_bytes().decode("utf-8")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._cannot_read(error) from error
        except UnicodeDecodeError as error:
            raise self._invalid_file("it is not a text file") from error
        lines: list[str] = []
        for number, line in enumerate(io.StringIO(text), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                if not line.endswith("\n"):
                    return lines  # Only the last line can be incomplete.
                raise self._invalid_file(f"its line {number} is not JSON") from error
            if not isinstance(row, dict) or EPOCH not in row:
                raise self._invalid_file(f"its line {number} has no {EPOCH!r}")
            lines.append(line if line.endswith("\n") else f"{line}\n")
        return lines

    def _invalid_file(self, fault: str) -> CallbackError:
        return CallbackError(f"JSONLogger cannot continue the file {self.path}: {fault}. Move the file, or pass another path.")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"lines": len(self._lines), "first_row": self._first_row}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        count = int(state["lines"])
        if not count and not self.append:
            return  # The run had written nothing yet, so the file belongs to another run.
        self._load_counts(state, count)
        lines = self._lines_in_file()
        self._lines = lines[:count]
        if len(lines) > count:
            self._write(None)


def _line_of(epoch: int, step: int, values: Mapping[str, Any]) -> str:
    row = {EPOCH: epoch, "step": step} | {key: value for key, value in values.items() if key not in (EPOCH, "step")}
    return json.dumps(_to_json(row), ensure_ascii=False) + "\n"


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _to_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(one) for one in value]
    if hasattr(value, "dtype"):
        return _to_json(np.asarray(jax.device_get(value)).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
