"""Plots the curves of runs, one diagram for each key, in the terminal or in a file.

RUN is a directory with event files, logs or checkpoints of a run, or such a file. Plotting in the terminal needs plotext, in a file matplotlib:
pip install 'fitflax[plot]'.
"""

import argparse
import importlib
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fitflax.commands.curves import Point, read_curves
from fitflax.errors import ConfigError, did_you_mean

__all__ = ["add_arguments", "run"]

Curves = Mapping[str, Sequence[Point]]
_COLORS = ("blue", "orange", "green", "red", "magenta", "cyan")
# Without colors, markers distinguish the lines.
_MARKERS = ("*", "+", "x", "o", "#", "@")
_TERMINAL_HEIGHT = 16


class Line(NamedTuple):
    """A line of a diagram: the values `y` of a log key of a run at steps or epochs `x`."""

    run: str
    key: str
    x: list[int]
    y: list[float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a directory or a file of a run")
    parser.add_argument("--keys", nargs="+", metavar="KEY", help="the values to plot, such as loss val_loss; by default all except times")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="a .png, .svg or .pdf file to write; by default, plot in the terminal")
    parser.add_argument("--x", choices=("step", "epoch"), help="the x axis; by default step, or epoch if a run has no steps")
    parser.add_argument("--log-y", action="store_true", help="a logarithmic y axis")


def run(options: argparse.Namespace) -> int:
    """Plots the runs. Returns 0."""
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
                raise ConfigError(f"{name} has values without {x}. Pass --x {'epoch' if x == 'step' else 'step'}, or another file of the run.")
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
