"""The process of one contender: `python -m benchmarks.real.worker CONTENDER WORKLOAD SIZE`. It sleeps while others work.

The first answer describes the start: seconds from the start of the process until the first step was computed, and what was compiled. A command on standard
input is `{"do": "train" | "evaluate" | "predict" | "flops" | "matmul", "steps": n}`, plus other arguments of `train`. Each answer is one line of JSON. The
process ends at the end of its input, and its last answer is its peak memory.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.real.contenders import CONTENDERS, Compilations, Contender
from benchmarks.real.workloads import NAMES, workload_of
from benchmarks.worker import device_kind, open_screen, peak_mb


def matmul_peak(side: int) -> float:
    """Returns the floating-point operations per second of the fastest of ten products of bfloat16 and of float32 matrices."""
    best = 0.0
    for dtype in (jnp.bfloat16, jnp.float32):
        a = jnp.ones((side, side), dtype)
        product = jax.jit(lambda a: a @ a)
        product(a).block_until_ready()
        for _ in range(10):
            begin = time.perf_counter()
            product(a).block_until_ready()
            best = max(best, 2 * side**3 / (time.perf_counter() - begin))
    return best


def device_peak_mb() -> float | None:
    """Returns the peak of the device's memory; `None` if the device does not report it."""
    found = jax.devices()[0].memory_stats()
    return None if found is None else found["peak_bytes_in_use"] / 1e6


@contextlib.contextmanager
def answering() -> Iterator[Any]:
    """Redirects the output of libraries to standard error, and yields the stream for answers."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    yield lambda answer: answers.write(json.dumps(answer) + "\n")


def carry_out(contender: Contender, command: dict[str, Any]) -> dict[str, Any]:
    gc.collect()
    if command["do"] == "train":
        return dataclasses.asdict(contender.train(**{name: value for name, value in command.items() if name != "do"}))
    if command["do"] == "flops":
        return {"flops": contender.flops()}
    if command["do"] == "matmul":
        return {"matmul": matmul_peak(command["steps"])}
    return {"seconds": {"evaluate": contender.evaluate, "predict": contender.predict}[command["do"]]()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("workload", choices=NAMES)
    parser.add_argument("size")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--started", type=float, default=time.time(), help="when the process was started")
    options = parser.parse_args()
    with answering() as say, tempfile.TemporaryDirectory() as directory, open_screen(pathlib.Path(directory) / "screen") as screen:
        compilations = Compilations()
        contender = CONTENDERS[options.contender](
            workload_of(options.workload), options.size, every=options.every, screen=screen, directory=pathlib.Path(directory)
        )
        first = contender.train(1)
        start = {"start_seconds": first.end - options.started, "compilations": compilations.count, "compile_seconds": compilations.seconds}
        say({**start, "device": device_kind()})
        for line in sys.stdin:
            say(carry_out(contender, json.loads(line)))
        say({"peak_mb": peak_mb(), "device_peak_mb": device_peak_mb(), "compilations": compilations.count, "compile_seconds": compilations.seconds})


if __name__ == "__main__":
    main()
