"""Compares a `fit` step without jit with a hand-written step without jit: `python -m benchmarks.eager`.

Both run alternately inside `jax.disable_jit()`, on the same batches. A step ends when its loss is available. The first round, which compiles every operation,
is excluded.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import fitflax
from benchmarks.peers.hand import make_step
from benchmarks.peers.models import make_module, make_optimizer
from benchmarks.workloads import NAMES, SEED, Workload, make_data, make_workload
from fitflax.callbacks import LambdaCallback
from fitflax.parallel import DataParallel


def time_hand(workload: Workload, steps: int) -> list[float]:
    """Returns the seconds of each step of a hand-written loop: forward, backward, update, loss and accuracy."""
    module, optimizer, size = make_module(workload), make_optimizer(workload), workload.batch_size
    x, y = make_data(workload)
    step = jax.jit(make_step(module, optimizer))
    params = module.init(jax.random.key(SEED), x[:size])["params"]
    state, sums, seconds = (params, optimizer.init(params)), jnp.zeros(3), []
    for index in range(steps):
        begin = time.perf_counter()
        state, sums = step(state, sums, x[index * size : (index + 1) * size], y[index * size : (index + 1) * size])
        jax.block_until_ready(sums)
        seconds.append(time.perf_counter() - begin)
    return seconds


def time_fit(workload: Workload, steps: int) -> list[float]:
    """Returns the seconds of each step of `fit`, with the same loss and metric."""
    x, y = make_data(workload)
    trainer = fitflax.Trainer(make_module(workload), seed=SEED, parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(make_optimizer(workload), "sparse_categorical_crossentropy", metrics=["accuracy"])
    begins: list[float] = []
    ends: list[float] = []

    def note_end(batch: int, logs: dict[str, float]) -> None:
        _ = logs["loss"]
        ends.append(time.perf_counter())

    timer = LambdaCallback(on_train_batch_begin=lambda batch, logs: begins.append(time.perf_counter()), on_train_batch_end=note_end)
    trainer.fit(x, y, batch_size=workload.batch_size, steps=steps, shuffle=False, callbacks=[timer], verbose=0)
    return [end - begin for begin, end in zip(begins, ends, strict=True)]


def main(arguments: Sequence[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", nargs="+", default=["tiny", "mlp", "cnn", "lm"], choices=[name for name in NAMES if name != "digits"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="small sizes, to check that the benchmark runs")
    options = parser.parse_args(arguments)
    lines = ["| workload | hand-written, ms per step | `fit`, ms per step | ratio |", "|---|---|---|---|"]
    for name in options.workload:
        workload = make_workload(name, small=options.small)
        ratios, hand_written, fitted = [], [], []
        with jax.disable_jit():
            for number in range(options.rounds + 1):
                # Takes both medians from the same round, so that other load on the machine affects both.
                one, other = (statistics.median(run(workload, min(options.steps, workload.steps))) for run in (time_hand, time_fit))
                if number:
                    ratios.append(other / one)
                    hand_written.append(one)
                    fitted.append(other)
        lines.append(f"| {name} | {1e3 * statistics.median(hand_written):.1f} | {1e3 * statistics.median(fitted):.1f} | {statistics.median(ratios):.2f} |")
    print("\n".join(lines))
    return lines


if __name__ == "__main__":
    main()
