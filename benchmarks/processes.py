"""Compares fitflax with a hand-written loop in several processes on this machine, over loopback, and measures each kind of message between processes.

    python -m benchmarks.processes                # about 10 minutes on two cores
    python -m benchmarks.processes --quick        # only to check that it runs
    python -m benchmarks.processes --write        # also writes to benchmarks/RESULTS-processes.md

Each process has one CPU device, and all train on the same global batch. The pairs and rounds are those of `benchmarks.scaling`: `mesh` is a jitted loop over a
mesh of all processes' devices, against `Sharded({"data": -1})`. `fsdp` is the same with sharded parameters. `pmap` is the hand-written loop of `mesh` again,
against `DataParallel`, which uses `jit(shard_map)` between processes. Processes share two cores here, so more of them add cost, not speed.

Costs are the median microseconds of a sum of an array over the processes' devices, with the result in each process (all-reduce), and of an agreement outside
the devices, in which every process learns a value from each of the others (`parallel.processes.exchange`).
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("PJRT_NPROC", "16")  # On few cores, XLA's threads would wait for each other.

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import scaling
from fitflax import parallel

RESULTS = pathlib.Path(__file__).resolve().parent / "RESULTS-processes.md"
SIZES = (2**10, 2**14, 2**18, 2**22, 2**24)


def all_reduces(sizes: list[int], repeats: int) -> dict[int, float]:
    """Returns the microseconds of a sum over all devices, by number of bytes."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    total = jax.jit(lambda rows: rows.sum(axis=0), in_shardings=split, out_shardings=whole)
    found = {}
    for size in sizes:
        rows = jax.make_array_from_process_local_data(split, np.ones((1, size // 4), np.float32))
        times = []
        for _ in range(repeats + 2):
            began = time.perf_counter()
            jax.block_until_ready(total(rows))
            times.append(time.perf_counter() - began)
        found[size] = statistics.median(times[2:]) * 1e6
    return found


def exchanges(repeats: int) -> float:
    """Returns the microseconds of an agreement."""
    parallel.processes.exchange(0)
    began = time.perf_counter()
    for number in range(repeats):
        parallel.processes.exchange(number)
    return (time.perf_counter() - began) / repeats * 1e6


def work(options: argparse.Namespace) -> None:
    """Runs in each process. The first process prints the numbers."""
    jax.config.update("jax_num_cpu_devices", 1)
    if options.count > 1:
        parallel.initialize(f"127.0.0.1:{options.port}", options.count, options.index)
    kinds = {"pmap": "pmap" if options.count == 1 else "mesh"}  # Between processes, the hand-written loop of `pmap` is that of `mesh`.
    rows = []
    for kind in options.pairs:
        hand_written = scaling.hand_written
        scaling.hand_written = lambda given, *rest: hand_written(kinds.get(given, given), *rest)  # noqa: B023
        rows.append(scaling.measure(kind, options.count, options.width, steps=options.steps, rounds=options.rounds))
        scaling.hand_written = hand_written
    costs = {}
    if options.count > 1:
        costs = {"all_reduce": all_reduces(options.sizes, options.repeats), "exchange": exchanges(10 * options.repeats)}
    if options.index == 0:
        print("NUMBERS " + json.dumps({"processes": options.count, "rows": rows, "costs": costs}), flush=True)


def started(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the numbers for a number of processes.

    Raises:
        RuntimeError: A process failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.processes", "--count", str(count), "--port", str(port), *options.passed]
    processes = [
        subprocess.Popen([*command, "--index", str(index)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=RESULTS.parent.parent)
        for index in range(count)
    ]
    outputs = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(error[-2000:] for _, error in outputs))
    return dict(json.loads(next(line for line in outputs[0][0].splitlines() if line.startswith("NUMBERS "))[8:]))


def tables(found: list[dict[str, Any]]) -> str:
    """Returns the numbers as text."""
    lines = [["pair", "processes", "us/step hand-written", "us/step fitflax", "ratio", "control"]]
    for each in found:
        for row in each["rows"]:
            spread = [f"{row[name]['median']:.3f} ({row[name]['min']:.3f}..{row[name]['max']:.3f})" for name in ("ratio", "control")]
            lines.append([row["kind"], str(each["processes"]), *(f"{row['us'][who]:.0f}" for who in ("hand", "fitflax")), *spread])
    several = [each for each in found if each["costs"]]
    sizes = list(several[0]["costs"]["all_reduce"])
    costs = [["processes", "exchange us", *(f"all-reduce of {int(size) / 1024:.0f} KB us" for size in sizes)]]
    for each in several:
        costs.append([str(each["processes"]), *(f"{value:.0f}" for value in (each["costs"]["exchange"], *each["costs"]["all_reduce"].values()))])
    texts = []
    for rows in (lines, costs):
        texts.append("\n".join(f"| {' | '.join(line)} |" for line in [rows[0], ["---"] * len(rows[0]), *rows[1:]]))
    return f"## Training\n\n{texts[0]}\n\n## Messages\n\n{texts[1]}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--pairs", choices=scaling.PAIRS, nargs="+", default=list(scaling.PAIRS))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=32, help="steps per measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="sizes in bytes of the arrays to sum")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, to check that the benchmark runs")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this JSON file")
    parser.add_argument("--write", action="store_true", help=f"write the tables to {RESULTS.name}")
    for name in ("--count", "--index", "--port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.quick:
        options.processes, options.width, options.steps, options.rounds, options.sizes, options.repeats = [2], 64, 4, 1, [2**10], 3
    if options.count is not None:
        work(options)
        return
    options.passed = ["--width", str(options.width), "--steps", str(options.steps), "--rounds", str(options.rounds), "--repeats", str(options.repeats)]
    options.passed += ["--pairs", *options.pairs, "--sizes", *map(str, options.sizes)]
    found = [started(count, options) for count in options.processes]
    here = scaling.machine()
    text = tables(found)
    text += f"\n\n{options.rounds} rounds of {options.steps} steps, width {options.width}, batches of {scaling.ROWS} rows. "
    text += f"{', '.join(f'{name} {value}' for name, value in here.items())}.\n"
    print(text)
    if options.json:
        options.json.write_text(json.dumps({"machine": here, "found": found}, indent=2) + "\n", encoding="utf-8")
    if options.write:
        head = "# Several processes\n\nWritten by `python -m benchmarks.processes --write`; the docstring of `processes.py` describes the method.\n\n"
        RESULTS.write_text(head + text, encoding="utf-8")


if __name__ == "__main__":
    main()
