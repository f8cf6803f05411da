"""Draws the tables of RESULTS*.md as SVG in the colors of the page, when the documentation site is built."""

import html
import io
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

HERE = pathlib.Path(__file__).resolve().parent

Row = dict[str, str]
Tables = dict[str, list[list[Row]]]  # heading of a section -> its tables

# Everything drawn in this color gets the color of the page's text. The other colors are readable on white and on black.
TEXT = "#010203"
COLORS = {
    "fit": "#2f7ed8",
    "fit16": "#57a9f2",
    "keras": "#d9534f",
    "keras16": "#f0908d",
    "lightning": "#9a6fd0",
    "scan": "#3f9e5f",
    "jit": "#8a8a8a",
    "control": "#8a8a8a",
    "pmap": "#2f7ed8",
    "mesh": "#3f9e5f",
    "fsdp": "#d98a1f",
}
# The names that readers see.
LABELS = {
    "fit": "fitflax",
    "fit16": "fitflax, 16 steps per call",
    "keras": "Keras",
    "keras16": "Keras, 16 steps per call",
    "lightning": "Lightning (PyTorch)",
    "scan": "hand-written, lax.scan of 16 steps",
    "jit": "hand-written, jax.jit",
    "pmap": "DataParallel / pmap",
    "mesh": "Sharded / mesh",
    "fsdp": "Sharded / FSDP",
}
STYLE = {
    "font.size": 8,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # Text stays text, in the page's font.
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), TEXT),
}
WIDTH = 5.6  # inches


class Spread(NamedTuple):
    """The median of some rounds, with the lowest and the highest."""

    median: float
    low: float
    high: float


def tables(text: str) -> Tables:
    """Returns the tables of a Markdown text by their heading."""
    found: Tables = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        blocks = re.findall(r"(?:^\|.*\|$\n?)+", body, re.MULTILINE)
        found[heading.strip()] = [rows(block.splitlines()) for block in blocks]
    return found


def rows(lines: Sequence[str]) -> list[Row]:
    """Returns the rows of a table as dicts with the columns' headings as keys."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def spread(cell: str) -> Spread | None:
    """Parses what `benchmarks.report.spread` writes, `1.184 (1.012..1.392)`; returns `None` for an empty cell."""
    match = re.fullmatch(r"([\d.]+) \(([\d.]+)\.\.([\d.]+)\)", cell)
    return Spread(*map(float, match.groups())) if match else None


def results(name: str) -> Tables:
    """Returns the tables of a results file."""
    return tables((HERE / name).read_text(encoding="utf-8"))


def peers(name: str) -> dict[str, list[Row]]:
    """Returns the table of all peers for each workload that has a hand-written `jit` to compare with."""
    return {workload: found[1] for workload, found in results(name).items() if any(row.get("peer") == "jit" for row in found[1])}


def grid(height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Returns a figure as wide as a page, with its axes next to each other."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def ratio_axis(axes: Axes, ticks: Sequence[float], title: str) -> None:
    """Turns the horizontal axis into a logarithmic one of ratios, with a line at 1."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.axvline(1, color=TEXT, linewidth=0.8)
    axes.set_xlabel(title)
    axes.grid(visible=False, axis="y")


def draw_ratios(axes: Axes, table: dict[str, dict[str, Spread]], shown: Sequence[str]) -> None:
    """Draws a row per workload, with a dot per peer and a line from its lowest to its highest round."""
    for place, (_, found) in enumerate(table.items()):
        present = [peer for peer in shown if peer in found]
        for number, peer in enumerate(present):
            height = place + 0.62 * ((number + 0.5) / len(present) - 0.5)
            axes.plot(found[peer][1:], [height] * 2, color=COLORS[peer], linewidth=1.6, solid_capstyle="round")
            axes.plot(found[peer].median, height, "o", color=COLORS[peer], markersize=4)
    for place in range(1, len(table)):
        axes.axhline(place - 0.5, color=TEXT, linewidth=0.4, alpha=0.25)
    axes.set_yticks(range(len(table)), list(table))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(table) - 0.5, -0.5)


def legend(figure: Figure, shown: Sequence[str], columns: int = 3) -> None:
    """Puts the names of the peers above the axes."""
    handles = [Line2D([], [], color=COLORS[peer], marker="o", markersize=4, linewidth=1.6) for peer in shown]
    figure.legend(handles, [LABELS[peer] for peer in shown], loc="outside upper left", ncols=columns)


def training(name: str = "RESULTS.md") -> Figure:
    """Draws each peer's time per training step relative to the hand-written loop."""
    shown = ["fit", "fit16", "scan", "keras", "keras16", "lightning"]
    table = {
        workload: {row["peer"]: ratio for row in found if (ratio := spread(row["ratio to jit"])) is not None and row["peer"] in shown}
        for workload, found in peers(name).items()
    }
    present = [peer for peer in shown if any(peer in found for found in table.values())]
    figure, (axes,) = grid(0.9 + 0.62 * len(table))
    draw_ratios(axes, table, present)
    ratio_axis(
        axes,
        [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40] if len(table) > 2 else [0.2, 0.5, 1, 2, 4],
        "time of a training step, relative to the hand-written jax.jit loop",
    )
    legend(figure, present)
    return figure


def training_on_a_gpu() -> Figure:
    """Draws the same for a GPU."""
    return training("RESULTS-gpu.md")


def reading(name: str = "RESULTS.md") -> Figure:
    """Draws the time per batch of `evaluate` and `predict` relative to hand-written loops."""
    shown = ["fit", "keras"]
    figure, both = grid(3.2, 2)
    for axes, operation in zip(both, ("evaluate", "predict"), strict=True):
        table: dict[str, dict[str, Spread]] = {workload: {} for workload in peers(name)}
        for workload, found in table.items():
            for row in results(name)[workload][2]:
                ratio = spread(row["ratio to jit"])
                if row["operation"] == operation and row["peer"] in shown and ratio is not None:
                    found[row["peer"]] = ratio
        draw_ratios(axes, table, shown)
        ratio_axis(axes, [0.3, 0.5, 1, 2, 4, 8], f"{operation}: time relative to hand-written")
    both[1].set_yticklabels([])
    legend(figure, shown)
    return figure


def processes_whole() -> Figure:
    """Draws the seconds from the start of a process to the end of its first step, and its memory."""
    shown = ["jit", "fit", "keras", "lightning"]
    table = {workload: {row["peer"]: row for row in found} for workload, found in peers("RESULTS.md").items() if workload != "many_leaves"}
    figure, both = grid(3.4, 2)
    for axes, (column, title) in zip(both, (("first step s", "seconds to the end of the first step"), ("peak MB", "peak memory, MB")), strict=True):
        for place, found in enumerate(table.values()):
            present = [peer for peer in shown if found.get(peer, {}).get(column)]
            for number, peer in enumerate(present):
                height = place + 0.72 * ((number + 0.5) / len(present) - 0.5)
                axes.barh(height, float(found[peer][column]), height=0.72 / len(present) * 0.85, color=COLORS[peer])
        axes.set_yticks(range(len(table)), list(table) if axes is both[0] else [""] * len(table))
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(table) - 0.5, -0.5)
        axes.set_xlabel(title)
        axes.grid(visible=False, axis="y")
    legend(figure, shown, columns=4)
    return figure


def devices() -> Figure:
    """Draws both strategies on 1 to 8 devices: the step relative to hand-written loops, and the memory of the state on each device."""
    found = results("RESULTS-scaling.md")["By number of devices"][0]
    figure, (left, right) = grid(2.7, 2)
    for number, kind in enumerate(("pmap", "mesh", "fsdp")):
        mine = [row for row in found if row["pair"] == kind]
        counts = [int(row["devices"]) for row in mine]
        ratios = [spread(row["ratio"]) for row in mine]
        for count, ratio in zip(counts, ratios, strict=True):
            if ratio is not None:
                left.plot([count * 1.08 ** (number - 1)] * 2, ratio[1:], color=COLORS[kind], linewidth=1.6)
        medians = [ratio.median for ratio in ratios if ratio is not None]
        left.plot([count * 1.08 ** (number - 1) for count in counts], medians, "o", color=COLORS[kind], markersize=4)
        right.plot(counts, [float(row["MB per device: state and batch"]) for row in mine], "o-", color=COLORS[kind], markersize=4, linewidth=1.6)
    left.axhline(1, color=TEXT, linewidth=0.8)
    left.set_ylabel("step, relative to hand-written")
    right.set_ylabel("MB of state and batch per device")
    right.set_ylim(0)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator([1, 2, 4, 8]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("devices")
        axes.grid(visible=False, axis="x")
    legend(figure, ["pmap", "mesh", "fsdp"])
    return figure


def several_processes() -> Figure:
    """Draws the same pairs on 1, 2 and 4 processes."""
    found = results("RESULTS-processes.md")["Training"][0]
    table: dict[str, dict[str, Spread]] = {}
    for row in found:
        if (ratio := spread(row["ratio"])) is not None:
            count = int(row["processes"])
            table.setdefault(f"{count} process{'es' * (count > 1)}", {})[row["pair"]] = ratio
    figure, (axes,) = grid(2.2)
    draw_ratios(axes, table, ["pmap", "mesh", "fsdp"])
    ratio_axis(axes, [0.8, 0.9, 1, 1.1, 1.2], "time of a training step, relative to hand-written")
    legend(figure, ["pmap", "mesh", "fsdp"])
    return figure


# Name -> the function that draws it, and a text alternative.
PLOTS: dict[str, tuple[Callable[[], Figure], str]] = {
    "training": (training, "Time of a training step of each library on each workload, relative to the hand-written loop"),
    "reading": (reading, "Time of a batch of evaluate and predict, relative to hand-written loops"),
    "processes-whole": (processes_whole, "Seconds to the end of the first step, and peak memory, of whole processes"),
    "gpu": (training_on_a_gpu, "Time of a training step on a GPU, relative to the hand-written loop"),
    "devices": (devices, "Time of a step on 1 to 8 devices relative to hand-written loops, and memory of the state on each device"),
    "processes": (several_processes, "Time of a training step on 1, 2 and 4 processes, relative to hand-written loops"),
}


def figure(name: str) -> str:
    """Returns a plot as HTML: an SVG that is as wide as its container and has the colors of its text.

    Raises:
        KeyError: There is no such plot.
    """
    draw, caption = PLOTS[name]
    with mpl.rc_context(STYLE | {"svg.hashsalt": name}), io.StringIO() as file:
        draw().savefig(file, format="svg", transparent=True, metadata={"Date": None})
        text = file.getvalue()
    text = text[text.index("<svg") :].replace(TEXT, "currentColor").strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"|<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r"<svg \1\2\3", text, count=1)
    return f'<figure class="plot" role="img" aria-label="{html.escape(caption)}">\n{text}\n</figure>'
