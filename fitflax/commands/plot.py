"""`python -m fitflax plot` plots the curves of runs, read from event files, JSON lines, CSV, or the history in checkpoints."""

import argparse
import csv
import importlib
import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fitflax.callbacks.event_files import events_of
from fitflax.callbacks.summaries import TRAIN
from fitflax.checkpoints.checkpoint_files import read_metadata
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.errors import CheckpointError, ConfigError, did_you_mean
from fitflax.logs import flat_name
from fitflax.storage.paths import name_of_component

_EPOCH, _STEP = "epoch", "step"
# DT_FLOAT and DT_DOUBLE of TensorFlow's types.proto, as NumPy dtypes.
_FLOATS = {1: "<f4", 2: "<f8"}
_COLORS = ("blue", "orange", "green", "red", "magenta", "cyan")
# Without colors, markers distinguish the lines.
_MARKERS = ("*", "+", "x", "o", "#", "@")
_TERMINAL_HEIGHT = 16


class Point(NamedTuple):
    """A point of a curve; the step and the epoch, counted from 1, are `None` if unknown."""

    step: int | None
    epoch: int | None
    value: float


Curves = Mapping[str, Sequence[Point]]


class Line(NamedTuple):
    """A line of a diagram: the values `y` of a log key of a run at steps or epochs `x`."""

    run: str
    key: str
    x: list[int]
    y: list[float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to its parser."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a directory or a file of a run")
    parser.add_argument("--keys", nargs="+", metavar="KEY", help="the values to plot, such as loss val_loss; by default all except times")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="a .png, .svg or .pdf file to write; by default, plot in the terminal")
    parser.add_argument("--x", choices=("step", "epoch"), help="the x axis; by default step, or epoch if a run has no steps")
    parser.add_argument("--log-y", action="store_true", help="a logarithmic y axis")


def run(options: argparse.Namespace) -> int:
    """Plots the curves of runs, one diagram for each key, in the terminal or in a file.

    RUN is a directory with event files, logs or checkpoints of a run, or such a file. Plotting in the terminal needs plotext, in a file matplotlib:
    pip install 'fitflax[plot]'.
    """
    runs = {name: read_curves(Path(name)) for name in options.runs}
    keys = _keys(runs, options.keys)
    x = options.x or ("step" if all(point.step is not None for curves in runs.values() for points in curves.values() for point in points) else "epoch")
    diagrams = {owner: _lines(runs, members, x) for owner, members in _diagrams(keys).items()}
    if options.output is None:
        _print(diagrams, x, log_y=options.log_y)
    else:
        _write(diagrams, x, options.output, log_y=options.log_y)
    return 0


def _keys(runs: Mapping[str, Curves], wanted: Sequence[str] | None) -> list[str]:
    known = list(dict.fromkeys(key for curves in runs.values() for key in curves))
    if wanted is None:
        return [key for key in known if not key.startswith("time/") and key != "epoch"] or known
    for key in wanted:
        if key not in known:
            raise ConfigError(f"No run has {key!r}.{did_you_mean(key, known)} Available: {', '.join(known)}.")
    return list(wanted)


def _diagrams(keys: Sequence[str]) -> dict[str, list[str]]:
    """Returns the keys of each diagram: a key of training, and the same key of validations.

    >>> _diagrams(["loss", "val_loss", "lr"])
    {'loss': ['loss', 'val_loss'], 'lr': ['lr']}
    """
    diagrams: dict[str, list[str]] = {}
    for key in keys:
        owner = next((other for other in keys if key.endswith(f"_{other}") and "/" not in key), key)
        diagrams.setdefault(owner, []).append(key)
    return diagrams


def _lines(runs: Mapping[str, Curves], keys: Sequence[str], x: str) -> dict[str, Line]:
    """Returns the lines of a diagram by label."""
    lines: dict[str, Line] = {}
    for name, curves in runs.items():
        for key in keys:
            points = [(getattr(point, x), point.value) for point in curves.get(key, ())]
            if any(place is None for place, _ in points):
                other = _EPOCH if x == _STEP else _STEP
                if any(getattr(point, other) is None for point in curves[key]):
                    raise ConfigError(f"{name} has values without step and without epoch. The file needs a column step or epoch, with integers.")
                raise ConfigError(f"{name} has values without {x}. Pass --x {other}, or another file of the run.")
            if points:
                label = key if len(runs) == 1 else name if len(keys) == 1 else f"{name}: {key}"
                lines[label] = Line(name, key, [place for place, _ in points], [value for _, value in points])
    return lines


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"The command plot needs the package {name.partition('.')[0]}: pip install 'fitflax[plot]'.") from error


def _print(diagrams: Mapping[str, Mapping[str, Line]], x: str, *, log_y: bool) -> None:
    plotext = _module("plotext")
    has_colors = sys.stdout.isatty()
    for title, lines in diagrams.items():
        plotext.clear_figure()
        plotext.theme("clear")
        plotext.plotsize(min(shutil.get_terminal_size().columns, 100), _TERMINAL_HEIGHT)
        legend = []
        places: list[int] = []
        for number, (label, line) in enumerate(lines.items()):
            color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)]
            # plotext cannot plot other values.
            points = [(place, value) for place, value in zip(line.x, line.y, strict=True) if math.isfinite(value) and (value > 0 or not log_y)]
            plotext.plot([place for place, _ in points], [value for _, value in points], marker="braille" if has_colors else marker, color=color)
            places += [place for place, _ in points]
            legend.append(plotext.colorize(f"\u2501 {label}", color) if has_colors else f"{marker} {label}")
        if not places:
            print(f"{title}: no {'positive' if log_y else 'finite'} values", "", sep="\n")
            continue
        plotext.xticks(sorted({round(place) for place in np.linspace(min(places), max(places), 6)}))
        plotext.title(title)
        plotext.xlabel(x)
        if log_y:
            plotext.yscale("log")
        text = plotext.build()
        print(text if has_colors else plotext.uncolorize(text), *legend, "", sep="\n")


def _write(diagrams: Mapping[str, Mapping[str, Line]], x: str, path: Path, *, log_y: bool) -> None:
    figure_module, ticker = _module("matplotlib.figure"), _module("matplotlib.ticker")
    columns = min(3, len(diagrams))
    rows = -(-len(diagrams) // columns)
    figure = figure_module.Figure(figsize=(4.5 * columns, 3.2 * rows), layout="constrained")
    if path.suffix.removeprefix(".") not in figure.canvas.get_supported_filetypes():
        raise ConfigError(f"--output must be a file name that ends with .png, .svg or .pdf. Received: {path}.")
    for place, (title, lines) in enumerate(diagrams.items(), start=1):
        axes = figure.add_subplot(rows, columns, place)
        colors = {run: f"C{number}" for number, run in enumerate(dict.fromkeys(line.run for line in lines.values()))}
        for label, line in lines.items():
            style = {"linestyle": "-" if line.key == title else "--", "color": colors[line.run]} if len(colors) > 1 else {}
            axes.plot(line.x, line.y, marker="." if len(line.x) < 20 else "", label=label, **style)
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if log_y and any(value > 0 for line in lines.values() for value in line.y):
            axes.set_yscale("log")
        if len(lines) > 1:
            axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(path)


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
        if log_files := sorted(path.rglob(pattern)):
            return _curves_of_rows(row for file in log_files for row in rows(file))
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
        step, epoch = _integer(row.get(_STEP)), _integer(row.get(_EPOCH))
        place = step, None if epoch is None else epoch + 1
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


def _integer(value: Any) -> int | None:
    """Returns a step or an epoch of a row, which another program may have written as `10.0`; `None` if it is missing or not an integer."""
    number = _number(value)
    return int(number) if number is not None and number.is_integer() else None


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                if 0 < number == len(lines) - 1:
                    return  # The last line may be incomplete, during a write or after a power failure.
                raise
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
    """Returns the scalars of event files: those of the newest run in a directory, without those that a resumed run had logged after its checkpoint."""
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for file in files:
        group = name_of_component(file.parent.name) if file.parent != root else TRAIN
        for record in events_of(file):
            event = record.event
            if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                for place, points in curves.items():
                    if place[0] == group:
                        curves[place] = {step: value for step, value in points.items() if step < event.step}
            for value in event.summary.value if event.HasField("summary") else ():
                number = _scalar(value)
                if number is not None:
                    key = value.tag if group == TRAIN else flat_name(group, value.tag)
                    curves.setdefault((group, key), {})[event.step] = number
    return {key: [Point(step, None, points[step]) for step in sorted(points)] for (_, key), points in curves.items() if points}


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
