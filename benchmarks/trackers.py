"""Measures what a tracker costs: compares `fit` with W&B (offline) or MLflow (a local server) with `fit` without a tracker, in alternation.

    python -m benchmarks.trackers                    # mlp and digits; needs mlflow, wandb and scikit-learn
    python -m benchmarks.trackers --workload mlp --rounds 5 --seconds 2
    python -m benchmarks.trackers --quick            # only to check that it runs

`alone` is a tracker that does nothing, so it shows the cost of fitflax itself. The clock runs from the beginning of the first epoch to the end of the last.
`end ms` is the time after that, in which the tracker receives the rest and ends its run. MLflow's server runs on the same cores with the lowest priority; a
server on another machine would not use these cores.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

import fitflax
from benchmarks.peers.models import make_module, make_optimizer
from benchmarks.workloads import SEED, Workload, make_data, make_workload
from fitflax.callbacks import Callback, LambdaCallback
from fitflax.integrations.mlflow import MLflowLogger
from fitflax.integrations.tracker import Point, Tracker, TrackerLogger
from fitflax.integrations.wandb import WandbLogger
from fitflax.parallel import DataParallel
from tests.integrations.servers import Server

LIMIT = 1.02


class Sink(Tracker):
    """Accepts everything and does nothing, so only the cost of fitflax is measured."""

    title = "nothing"

    def start(self, name: str, run_id: str | None, config: Mapping[str, float | str | bool]) -> str:
        return name

    def log(self, points: Sequence[Point]) -> None:
        pass

    def finish(self, status: str, summary: Mapping[str, float | str], artifact: tuple[str, Path | str] | None) -> None:
        pass


def timer(workload: Workload) -> Callable[[Sequence[Callback], int], tuple[float, float]]:
    """Returns a function that trains for a number of epochs with callbacks, and returns the seconds of the epochs and the seconds after them."""
    x, y = make_data(workload)
    trainer = fitflax.Trainer(make_module(workload), seed=SEED, parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(make_optimizer(workload), "sparse_categorical_crossentropy", metrics=["accuracy"])

    def run(callbacks: Sequence[Callback], epochs: int) -> tuple[float, float]:
        moments = {"begin": 0.0, "end": 0.0}

        def note_begin(epoch: int, logs: object) -> None:
            moments["begin"] = moments["begin"] or time.perf_counter()

        def note_end(epoch: int, logs: object) -> None:
            moments["end"] = time.perf_counter()

        clock = LambdaCallback(on_epoch_begin=note_begin, on_epoch_end=note_end)
        # A new run with the same compiled steps.
        trainer.with_seed(SEED).fit(x, y, batch_size=workload.batch_size, epochs=epochs, callbacks=[*callbacks, clock], verbose=0)
        return moments["end"] - moments["begin"], time.perf_counter() - moments["end"]

    return run


def measure(workload: Workload, trackers: dict[str, Callable[[], Callback]], rounds: int, seconds: float) -> list[str]:
    """Returns a table row for each tracker, after one that compares `fit` with itself."""
    run = timer(workload)
    run([], 1)
    epochs = max(1, round(seconds / (run([], 2)[0] / 2)))
    makers: dict[str, Callable[[], list[Callback]]] = {"control": list, **{name: lambda make=make: [make()] for name, make in trackers.items()}}
    ratios: dict[str, list[float]] = {name: [] for name in makers}
    ends: dict[str, list[float]] = {name: [] for name in makers}
    for number in range(rounds + 1):
        for name, make in makers.items():
            before, with_it, (again, end), after = run([], epochs)[0], run(make(), epochs)[0], run(make(), epochs), run([], epochs)[0]
            if number:
                ratios[name].append((with_it + again) / (before + after))
                ends[name].append(end)
    rows = []
    for name, found in ratios.items():
        median = statistics.median(found)
        verdict = "ok" if median <= LIMIT else "over"
        spread = f"{median:.3f} ({min(found):.3f}..{max(found):.3f})"
        rows.append(f"| {workload.name} | {name} | {spread} | {LIMIT:.2f} | {verdict} | {1e3 * statistics.median(ends[name]):.0f} |")
        print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python -m benchmarks.trackers")
    parser.add_argument("--workload", nargs="+", default=["mlp", "digits"], choices=["tiny", "mlp", "cnn", "lm", "digits"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds per measurement")
    parser.add_argument("--quick", action="store_true", help="one short round of a small mlp")
    options = parser.parse_args(arguments)
    names, rounds, seconds = (["mlp"], 1, 0.1) if options.quick else (options.workload, options.rounds, options.seconds)
    lines = ["| workload | tracker | ratio to `fit` without | limit | verdict | end ms |", "|---|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as place, Server(Path(place)) as server:
        if server.pid is not None:
            subprocess.run(["renice", "-n", "19", "-g", str(server.pid)], check=False, capture_output=True)
        directory, settings = os.fspath(place), {"silent": True, "console": "off"}
        trackers: dict[str, Callable[[], Callback]] = {
            "alone": lambda: TrackerLogger(Sink()),
            "wandb": lambda: WandbLogger("benchmark", mode="offline", directory=directory, options={"settings": settings, "reinit": "finish_previous"}),
            "mlflow": lambda: MLflowLogger("benchmark", tracking_uri=server.uri),
        }
        for name in names:
            lines += measure(make_workload(name, small=options.quick), trackers, rounds, seconds)
    return lines


if __name__ == "__main__":
    main()
