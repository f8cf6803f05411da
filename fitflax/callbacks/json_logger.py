"""`JSONLogger`: the logs of every epoch as JSON lines, an object an epoch."""

import json
import math
import os
from typing import Any

import numpy as np
from typing_extensions import override

from fitflax.callbacks.epoch_file import EPOCH, EpochFile
from fitflax.errors import CallbackError

__all__ = ["JSONLogger"]


class JSONLogger(EpochFile):
    r"""Writes a line of JSON an epoch: `epoch`, `step`, then all that is logged, arrays as lists.

    Each line is an object of its own, so that a file can be read while the run goes on, line by line or with `pandas.read_json(path, lines=True)`. Floats read
    back to the same floats; JSON has no NaN and no infinity, which are the strings `"nan"`, `"inf"` and `"-inf"`. A resumed run goes on from the lines that its
    checkpoint knew, so that each epoch is there once. A run that begins afresh replaces the file with its first line, not before.

    Args:
        path: The file; its directories are made.
        append: Whether a run that begins afresh keeps the lines that are there.

    Raises:
        CallbackError: Before the first step: the file cannot be written, or is something else than such lines. It is left as it is.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "log.jsonl")
    >>> with JSONLogger(path) as logger:
    ...     logger.on_epoch_end(0, {"loss": 0.5, "per_class": np.array([1.0, float("nan")])})
    >>> path.read_text()
    '{"epoch": 0, "step": 0, "loss": 0.5, "per_class": [1.0, "nan"]}\n'
    """

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False) -> None:
        super().__init__(path, append=append)
        self._lines: list[str] = []

    @override
    def _read_in(self) -> None:
        self._lines = self._lines_in_file()

    @override
    def _forget(self) -> None:
        self._lines = []

    @override
    def _is_log(self, line: bytes) -> bool:
        return line.startswith(b"{") and f'"{EPOCH}":'.encode() in line

    @override
    def _whole(self) -> str:
        return "".join(self._lines)

    @override
    def _add(self, epoch: int, step: int, values: dict[str, Any]) -> None:
        row = {EPOCH: epoch, "step": step} | {key: value for key, value in values.items() if key not in (EPOCH, "step")}
        self._lines.append(json.dumps(_plain(row), ensure_ascii=False) + "\n")
        self._write(self._lines[-1])

    def _lines_in_file(self) -> list[str]:
        """Returns the lines that are whole; the last one may have been cut off, as by a power failure."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._cannot_read(error) from error
        except UnicodeDecodeError as error:
            raise self._no_log("it is no text") from error
        lines = text.splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                if number == len(lines) and not line.endswith("\n"):
                    return lines[:-1]
                raise self._no_log(f"its line {number} is no JSON") from error
            if not isinstance(row, dict) or EPOCH not in row:
                raise self._no_log(f"its line {number} has no {EPOCH!r}")
        return [line if line.endswith("\n") else f"{line}\n" for line in lines]

    def _no_log(self, fault: str) -> CallbackError:
        return CallbackError(f"JSONLogger cannot go on with {self.path}: {fault}. Move the file away, or give another path.")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"lines": len(self._lines)}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        count = int(state["lines"])
        if not count and not self.append:
            return  # The run had written nothing yet; what is there is not its own.
        lines = self._lines_in_file()
        self._lines = lines[:count]
        if len(lines) > count:
            self._write(None)


def _plain(value: Any) -> Any:
    """Returns what JSON can say of a value."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "dtype"):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
