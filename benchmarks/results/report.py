"""Creates the tables and plots of docs/results.md."""

import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plots import STYLE, WIDTH
from benchmarks.results.settings import TASKS

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results.md"

Run = Mapping[str, Any]

NAMES = {"fit": "`fit`", "hand": "hand-written, same random numbers", "own": "hand-written, its own random numbers"}
COLORS = {"fit": "#2f7ed8", "hand": "#d98a1f", "own": "#8a8a8a"}
# The height and the label of a horizontal line in the plot of a task.
LINES: dict[str, tuple[float, str]] = {"char_lm": (1.88, "nanoGPT's README: 1.88"), "resnet": (0.97, "scikit-learn's example: 0.97")}
AXES = {"val_loss": "validation loss", "val_accuracy": "test accuracy"}


def final(run: Run) -> float:
    """Returns the final value of a task's metric."""
    return float(run["curves"]["evaluations"][TASKS[run["task"]].value][-1])


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Returns mean and standard deviation, as `1.2345 ± 0.0012`."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *rows))


def chosen(runs: Sequence[Run], **wanted: Any) -> list[Run]:
    """Returns the runs with these entries, by seed."""
    return sorted((run for run in runs if wanted.items() <= run.items()), key=lambda run: run["seed"])


def groups(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Returns the tasks and their texts, in the order of `TASKS`."""
    found = dict.fromkeys((run["task"], run["text"]) for run in runs)
    return sorted(found, key=lambda group: list(TASKS).index(group[0]))


def tables(runs: Sequence[Run], baselines: Mapping[str, float]) -> dict[str, str]:
    """Returns the tables by name: one for each kind of task, and one of the differences between `fit` and the hand-written scripts."""
    found = {}
    rows = [
        [
            text,
            str(member[0]["settings"]["dropout"]),
            str(member[0]["settings"]["steps"]),
            NAMES[who],
            ", ".join(f"{final(run):.4f}" for run in member),
            spread([final(run) for run in member]),
        ]
        for task, text in groups(runs)
        if task.startswith("char_lm")
        for who in NAMES
        if (member := chosen(runs, task=task, text=text, who=who))
    ]
    if rows:
        found["char_lm"] = table(["text", "dropout", "steps", "trained by", "validation loss of each seed", "mean ± sd"], rows)
    images = [
        [NAMES[who], ", ".join(f"{final(run):.4f}" for run in member), spread([final(run) for run in member])]
        for who in NAMES
        if (member := chosen(runs, task="resnet", who=who))
    ]
    if images:
        images.append(["`SVC(gamma=0.001)` of scikit-learn's example", "", f"{baselines['svc']:.4f}"])
        found["resnet"] = table(["trained by", "test accuracy of each seed", "mean ± sd"], images)
    codes = []
    for who in NAMES:
        if member := chosen(runs, task="vae", who=who):
            columns = ([run["likelihood"][name] for run in member] for name in ("1", "50", "5000", "exact"))
            codes.append([NAMES[who], spread([-final(run) for run in member], 2), *(spread(values, 2) for values in columns)])
    if codes:
        codes.append(["independent pixels", "", "", "", "", f"{baselines['independent_pixels']:.2f}"])
        heading = ["trained by", "bound, one draw an image", "bound, 200 draws", "50 samples", "5000 samples, half from the prior", "log p(x), integrated"]
        found["vae"] = table(heading, codes)
    if apart := [row for group in groups(runs) if (row := _apart(runs, *group))]:
        heading = ["task", "text", "steps 1 to 10", "steps 1 to 100", "all steps", "end, each seed"]
        found["agreement"] = table(heading, apart)
    return found


def differences(runs: Sequence[Run], task: str, text: str) -> tuple[np.ndarray, list[float]]:
    """Returns the differences between the losses of `fit` and of the script with the same random numbers, `[seeds, steps]`, and between their final values."""
    pairs = [
        (one, other) for one in chosen(runs, task=task, text=text, who="fit") for other in chosen(runs, task=task, text=text, who="hand", seed=one["seed"])
    ]
    losses = [np.abs(np.subtract(one["curves"]["loss"], other["curves"]["loss"])) for one, other in pairs]
    return np.array(losses), [abs(final(one) - final(other)) for one, other in pairs]


def _apart(runs: Sequence[Run], task: str, text: str) -> list[str]:
    losses, ends = differences(runs, task, text)
    if not ends:
        return []
    return [f"`{task}`", text, *(f"{losses[:, :count].max():.1e}" for count in (10, 100, None)), ", ".join(f"{end:.1e}" for end in ends)]


def picture(runs: Sequence[Run], task: str, text: str) -> Figure:
    """Draws a task: the evaluations over the steps, with the range of the seeds, and the training loss, averaged over a fiftieth of the steps."""
    figure = Figure(figsize=(WIDTH * 1.3, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for who in ("own", "hand", "fit"):
        if member := chosen(runs, task=task, text=text, who=who):
            evaluated = np.array([run["curves"]["evaluations"][TASKS[task].value] for run in member])
            losses = np.array([run["curves"]["loss"] for run in member])
            window = max(1, losses.shape[1] // 50)
            averaged = losses[:, : losses.shape[1] // window * window].reshape(len(losses), -1, window).mean(axis=2)
            _draw(left, member[0]["curves"]["steps"], evaluated, who)
            _draw(right, window * np.arange(1, averaged.shape[1] + 1), averaged, who)
    if task in LINES:
        height, label = LINES[task]
        left.axhline(height, color="#3f9e5f", linewidth=0.9, linestyle=":", label=label)
    left.set_ylabel("test: negative bound, nats" if task == "vae" else AXES[TASKS[task].value])
    right.set_ylabel("training: negative bound, nats" if task == "vae" else "training loss")
    left.legend(reverse=True)
    if task == "resnet":
        left.set_ylim(0.9, 1.0)
    losses, ends = differences(runs, task, text)
    if ends:
        right.set_title(f"largest |fit - hand| of a step: {losses.max():.1e}", fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("step")
    return figure


def _draw(axes: Axes, steps: Any, values: np.ndarray, who: str) -> None:
    """Draws the mean of the seeds, `[seeds, times]`, and their range."""
    label = {"fit": "fit", "hand": "hand-written, same random numbers", "own": "hand-written, its own"}[who]
    axes.plot(steps, values.mean(axis=0), color=COLORS[who], linewidth=2.6 if who == "hand" else 1.2, label=label)
    axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=COLORS[who], alpha=0.25, linewidth=0)


def write(page: pathlib.Path, found: Mapping[str, str], runs: Sequence[Run]) -> None:
    """Writes tables between `<!-- results: NAME -->` and `<!-- end -->` of a page, and plots to the folder `images` next to it."""
    text = page.read_text(encoding="utf-8")
    for name, rows in found.items():
        pattern = rf"(<!-- results: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda match, rows=rows: f"{match[1]}\n{rows}\n\n{match[2]}", text, flags=re.DOTALL)
        if not count:
            raise ValueError(f"{page} has no place for the table {name!r}: <!-- results: {name} --> and <!-- end -->.")
    page.write_text(text, encoding="utf-8")
    (page.parent / "images").mkdir(exist_ok=True)
    drawn = set()
    for task, label in groups(runs):
        if task not in drawn:
            drawn.add(task)
            with mpl.rc_context(
                STYLE | dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), "#24292f")
            ):
                picture(runs, task, label).savefig(page.parent / "images" / f"results-{task.replace('_', '-')}.png", dpi=140, facecolor="white")
