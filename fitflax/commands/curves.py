"""Reads the curves of a run from what its callbacks wrote: event files, JSON lines, CSV, or the history in its checkpoints."""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fitflax.callbacks.event_files import events_of
from fitflax.callbacks.summaries import TRAIN
from fitflax.checkpoints.formats.checkpoint_files import read_metadata
from fitflax.checkpoints.store.checkpoint_store import CheckpointStore
from fitflax.errors import CheckpointError, ConfigError
from fitflax.logs import flat_name
from fitflax.storage.file_names import name_of_component

__all__ = ["Point", "read_curves"]

_EPOCH, _STEP = "epoch", "step"
# DT_FLOAT and DT_DOUBLE of TensorFlow's types.proto, as NumPy dtypes.
_FLOATS = {1: "<f4", 2: "<f8"}


class Point(NamedTuple):
    """A point of a curve; the step and the epoch, counted from 1, are `None` if unknown."""

    step: int | None
    epoch: int | None
    value: float


def read_curves(path: Path) -> dict[str, list[Point]]:
    """Returns the curves of a run, each in order, by flat name, such as `val_loss`.

    The path is a file of `CSVLogger` or `JSONLogger`, or an event file; or a directory, which is searched for event files, then JSON lines, then CSV, then
    checkpoints.
    """
    if path.is_dir():
        curves = _read_directory(path)
    elif not path.exists():
        raise ConfigError(f"There is no run at {path}: no such file or directory.")
    elif ".tfevents." in path.name:
        curves = _read_event_files([path], path.parent)
    elif path.suffix == ".csv":
        curves = _curves_of_rows(_csv_rows(path))
    else:
        curves = _curves_of_rows(_json_rows(path))
    if not curves:
        raise ConfigError(f"There is no run at {path}: no event files, JSON lines, CSV, or checkpoints with a history of logged values.")
    return curves


def _read_directory(path: Path) -> dict[str, list[Point]]:
    if files := sorted(path.rglob("*.tfevents.*")):
        return _read_event_files(files, path)
    for pattern, rows in (("*.jsonl", _json_rows), ("*.csv", _csv_rows)):
        if found := sorted(path.rglob(pattern)):
            return _curves_of_rows(row for file in found for row in rows(file))
    for directory in (path, *sorted(child for child in path.iterdir() if child.is_dir())):
        try:
            store = CheckpointStore(directory)
            for step in reversed(store.steps()):
                if history := read_metadata(store.path(step)).get("history"):
                    return _curves_of_rows({_EPOCH: row["epoch"], _STEP: row["step"], **row["logs"]} for row in history)
        except CheckpointError:
            continue
    return {}


def _curves_of_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Point]]:
    curves: dict[str, list[Point]] = {}
    for row in rows:
        step, epoch = row.get(_STEP), row.get(_EPOCH)
        place = None if step is None else int(step), None if epoch is None else int(epoch) + 1
        for key, value in row.items():
            number = _number(value)
            if key not in (_EPOCH, _STEP) and number is not None:
                curves.setdefault(key, []).append(Point(*place, number))
    return curves


def _number(value: Any) -> float | None:
    """Returns a value of a row as a number, `None` if it is missing or not a number."""
    try:
        return None if isinstance(value, bool | list | dict | None) else float(value)
    except ValueError:
        return None


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"not an object: {line[:60]!r}")
            yield row
    except ValueError as error:
        raise ConfigError(
            f"{path} is not a log of a run: it has no JSON lines, as JSONLogger writes them, and its name does not end with .csv ({error})."
        ) from error


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                yield {key: value for key, value in row.items() if key is not None and isinstance(value, str) and _number(value) is not None}
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not a log of a run: it is not a CSV file ({error}).") from error


def _read_event_files(files: list[Path], root: Path) -> dict[str, list[Point]]:
    """Returns the scalars of event files: of several runs in a directory the newest, of a resumed run without what was logged after its checkpoint."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for file in files:
        group = name_of_component(file.parent.name) if file.parent != root else TRAIN
        for record in events_of(file):
            event = record.event
            if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                for place, points in found.items():
                    if place[0] == group:
                        found[place] = {step: value for step, value in points.items() if step < event.step}
            for value in event.summary.value if event.HasField("summary") else ():
                number = _scalar(value)
                if number is not None:
                    key = value.tag if group == TRAIN else flat_name(group, value.tag)
                    found.setdefault((group, key), {})[event.step] = number
    return {key: [Point(step, None, points[step]) for step in sorted(points)] for (_, key), points in found.items() if points}


def _scalar(value: Any) -> float | None:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or value.tensor.dtype not in _FLOATS or value.tensor.tensor_shape.dim:
        return None
    tensor = value.tensor
    if tensor.tensor_content:
        return float(np.frombuffer(tensor.tensor_content, _FLOATS[tensor.dtype])[0])
    numbers = tensor.float_val or tensor.double_val
    return float(numbers[0]) if numbers else math.nan
