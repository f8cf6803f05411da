"""Measures what trials and ensembles cost: trials that share compiled steps against new trainers, and an ensemble against single runs.

    python -m benchmarks.tuning                       # 30 trials, 8 members
    python -m benchmarks.tuning --quick --rounds 1    # only to check that it runs

The contenders take turns in each round. Times are those of `fit`, including compilation, without JAX's compilation cache.
"""

import argparse
import json
import pathlib
import statistics
import time
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn

import fitflax
from benchmarks.run import machine, say
from fitflax.parallel import DataParallel

# Name -> inputs, width of the hidden layer, examples per batch, batches per epoch.
SIZES = {"tiny": (8, 8, 8, 256), "mlp": (784, 64, 64, 128)}


class Net(nn.Module):
    """A network with one hidden layer.

    Attributes:
        width: Width of the hidden layer.
    """

    width: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(10)(nn.relu(nn.Dense(self.width)(x)))


def make(width: int, rate: float, **options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(Net(width), parallel=DataParallel(jax.devices()[:1]), **options)
    trainer.compile(optax.inject_hyperparams(optax.adam)(learning_rate=rate), "sparse_categorical_crossentropy", ["accuracy"])
    return trainer


class Workload:
    """A network and its data.

    Args:
        name: One of `SIZES`.
        quick: Whether to use few batches.
    """

    def __init__(self, name: str, *, quick: bool) -> None:
        inputs, self.width, self.batch_size, steps = SIZES[name]
        rng = np.random.default_rng(0)
        self.x = rng.random((self.batch_size * (8 if quick else steps), inputs), np.float32)
        self.y = rng.integers(0, 10, len(self.x)).astype(np.int32)

    def seconds(self, trainer: fitflax.Trainer) -> float:
        """Returns the seconds of an epoch, including everything before it."""
        begin = time.perf_counter()
        trainer.fit(self.x, self.y, batch_size=self.batch_size, epochs=1, verbose=0, shuffle=False)
        return time.perf_counter() - begin

    def trials(self, count: int) -> dict[str, float]:
        """Returns the seconds of trials with different learning rates: with shared steps, and with new trainers."""
        rates = np.geomspace(1e-4, 1e-1, count)
        found = {"shared": 0.0, "fresh": 0.0}
        jax.clear_caches()
        first = make(self.width, 1e-3)
        for rate in rates:
            found["shared"] += self.seconds(first.with_hyperparams(learning_rate=float(rate)))
        for rate in rates:
            jax.clear_caches()
            found["fresh"] += self.seconds(make(self.width, float(rate)))
        return found

    def ensemble(self, members: int) -> dict[str, float]:
        """Returns the seconds of an epoch of all members together, and of single runs one after another; all are compiled before."""
        whole, single = make(self.width, 1e-3, ensemble=members), make(self.width, 1e-3)
        self.seconds(whole), self.seconds(single)
        return {"ensemble": self.seconds(whole), "single runs": sum(self.seconds(single) for _ in range(members))}


def table(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    """Returns the results as Markdown."""
    lines = [
        f"| | {options.trials} trials, shared steps, s | fresh trainers, s | ratio | {options.members} members at once, s | one after another, s | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        pairs = [("shared", "fresh"), ("ensemble", "single runs")]
        cells = []
        for one, other in pairs:
            ratios = [each[one] / each[other] for each in found["rounds"]]
            seconds = [statistics.median(each[who] for each in found["rounds"]) for who in (one, other)]
            cells += [f"{seconds[0]:.3g}", f"{seconds[1]:.3g}", f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few batches, trials and members")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(argv)
    if options.quick:
        options.trials, options.members = min(options.trials, 2), min(options.members, 2)
    results: dict[str, dict[str, Any]] = {}
    for name in options.workload:
        workload = Workload(name, quick=options.quick)
        rounds = [workload.trials(options.trials) | workload.ensemble(options.members) for _ in range(options.rounds)]
        results[name] = {"rounds": rounds}
        say(f"{name}: {rounds[-1]}")
    here = machine()
    print(f"{here['date']}, {here['cores']} CPU cores, jax {here['jax']}, flax {here['flax']}\n\n{table(results, options)}")
    if options.json:
        options.json.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
