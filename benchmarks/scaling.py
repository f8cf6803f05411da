"""Compares fitflax with hand-written loops on 1, 2, 4 and 8 devices, and measures how time and memory grow with devices and with the model.

    python -m benchmarks.scaling                  # about 20 minutes on two cores, which simulate eight devices
    python -m benchmarks.scaling --quick          # only to check that it runs
    python -m benchmarks.scaling --write          # also writes to benchmarks/RESULTS-scaling.md

Three pairs of contenders train the same dense network on the same batches with Adam, and keep the sums of the loss and of correct answers:

* `pmap`: a hand-written loop with `jax.pmap`, parameters replicated and not stacked; fitflax with `DataParallel`.
* `mesh`: a hand-written loop with `jax.jit` over a mesh that splits the batch, parameters replicated; fitflax with `Sharded({"data": -1})`.
* `fsdp`: the same with parameters and moments sharded along their largest axis; fitflax with `Sharded({"data": -1}, fsdp=True)`.

Each round runs hand, fitflax, control, control, fitflax, hand. The control is the hand-written loop again. A ratio is that of the two sums, and the median of
all rounds is reported. The losses of both must agree to 1e-4 after the warm-up. Nothing is compiled between stretches.

Memory is XLA's analysis of a compiled step on one device: arguments (state and batch), and temporaries. The devices of a CPU share its cores, so time does not
fall with their number here, and the cost of the collectives grows. On accelerators, the global batch is spread over real devices.
"""

import argparse
import dataclasses
import functools
import gc
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

os.environ.setdefault("PJRT_NPROC", "16")  # On few cores, XLA's threads would wait for each other.

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import fitflax
from fitflax.callbacks import LambdaCallback
from fitflax.parallel import DataParallel, Sharded

RESULTS = pathlib.Path(__file__).resolve().parent / "RESULTS-scaling.md"
PAIRS = ("pmap", "mesh", "fsdp")
INPUTS, CLASSES, ROWS = 256, 16, 64


class Network(nn.Module):
    """Dense layers of a single width."""

    width: int
    depth: int = 3

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(self.depth):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(CLASSES)(x)


class Memory(NamedTuple):
    """The memory of a step on one device, in bytes."""

    arguments: int
    temporaries: int


class Contender(NamedTuple):
    """A contender: `train` runs the given number of steps and returns seconds and mean loss; `memory` is that of one device."""

    train: Callable[[int], tuple[float, float]]
    memory: Callable[[], Memory]


def make_data(steps: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((steps * ROWS, INPUTS), np.float32), rng.integers(0, CLASSES, steps * ROWS).astype(np.int32)


def as_memory(analysis: Any) -> Memory:
    return Memory(analysis.argument_size_in_bytes, analysis.temp_size_in_bytes)


def hand_written(kind: str, devices: list[jax.Device], width: int, data: tuple[np.ndarray, np.ndarray]) -> Contender:
    """Returns a careful hand-written loop: state and sums are donated, NumPy batches go into the call, and values are read at the end.

    With several processes, each puts its rows of a batch on its devices.
    """
    module, optimizer = Network(width), optax.adam(1e-3)
    mesh = Mesh(np.array(devices), ("replica" if kind == "pmap" else "data",), axis_types=(AxisType.Auto,))  # pmap's names, or its first call compiles twice.
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))

    def init(key: jax.Array) -> Any:
        params = module.init(key, jnp.zeros((1, INPUTS)))["params"]
        return params, optimizer.init(params), jnp.zeros(2)

    def step(state: Any, x: Any, y: Any, mean: Callable[[Any], Any]) -> Any:
        params, opt_state, sums = state

        def loss_fn(params: Any) -> Any:
            logits = module.apply({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        loss, right, grads = mean((loss, (logits.argmax(-1) == y).mean(), grads))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, sums + jnp.array([loss, right])), loss

    if kind == "pmap" and len(devices) > 1:
        mean = functools.partial(jax.lax.pmean, axis_name="replica")
        compiled = jax.pmap(functools.partial(step, mean=mean), "replica", in_axes=(None, 0, 0), out_axes=None, devices=devices, donate_argnums=0)
        state = jax.device_put(init(jax.random.key(0)), whole)
        shape: Callable[[Any], Any] = lambda leaf: leaf.reshape(len(devices), -1, *leaf.shape[1:])  # noqa: E731
    else:
        places = jax.tree.map(
            lambda leaf: NamedSharding(mesh, along_largest(leaf.shape, len(devices)) if kind == "fsdp" else PartitionSpec()),
            jax.eval_shape(init, jax.random.key(0)),
        )
        compiled = jax.jit(
            functools.partial(step, mean=lambda tree: tree), in_shardings=(places, split, split), out_shardings=(places, whole), donate_argnums=0
        )
        state = jax.jit(init, out_shardings=places)(jax.random.key(0))
        shape = lambda leaf: leaf  # noqa: E731
    batches = [tuple(shape(leaf[begin : begin + ROWS]) for leaf in data) for begin in range(0, len(data[0]), ROWS)]
    feed: Callable[[Any], Any] = lambda batch: batch  # noqa: E731
    if jax.process_count() > 1:
        own = slice(ROWS // jax.process_count() * jax.process_index(), ROWS // jax.process_count() * (jax.process_index() + 1))
        feed = lambda batch: [jax.make_array_from_process_local_data(split, leaf[own]) for leaf in batch]  # noqa: E731
    held = {"state": state}
    lowered = compiled.lower(held["state"], *feed(batches[0]))
    in_flight = 2 if devices[0].platform == "cpu" else 32

    def train(steps: int) -> tuple[float, float]:
        began, pending = time.perf_counter(), []
        params, opt_state, _ = held["state"]
        state = params, opt_state, zeros(whole)
        for index in range(steps):
            if len(pending) == in_flight:
                pending.pop(0).block_until_ready()
            state, loss = compiled(state, *feed(batches[index % len(batches)]))
            pending.append(loss)
        sums = np.asarray(state[2])
        held["state"] = jax.block_until_ready(state)
        return time.perf_counter() - began, float(sums[0]) / steps

    return Contender(train, lambda: as_memory(lowered.compile().memory_analysis()))


def zeros(place: NamedSharding) -> jax.Array:
    """Returns two zeros, even if some of the devices belong to other processes."""
    return jax.make_array_from_callback((2,), place, lambda index: np.zeros(2, np.float32))


def along_largest(shape: tuple[int, ...], count: int) -> PartitionSpec:
    """Returns fitflax's rule: the largest axis that the number of devices divides, for arrays of at least 4096 elements."""
    fitting = [axis for axis, size in enumerate(shape) if size % count == 0]
    if count == 1 or int(np.prod(shape)) < 4096 or not fitting:
        return PartitionSpec()
    return PartitionSpec(*[None] * max(fitting, key=lambda axis: (shape[axis], -axis)), "data")


def by_fitflax(kind: str, devices: list[jax.Device], width: int, data: tuple[np.ndarray, np.ndarray]) -> Contender:
    strategies = {
        "pmap": lambda: DataParallel(devices),
        "mesh": lambda: Sharded({"data": -1}, fsdp=False, devices=devices),
        "fsdp": lambda: Sharded({"data": -1}, fsdp=True, devices=devices),
    }
    trainer = fitflax.Trainer(Network(width), parallel=strategies[kind]())
    trainer.compile(optax.adam(1e-3), "sparse_categorical_crossentropy", ["accuracy"])
    trainer.build((data[0][:ROWS], data[1][:ROWS]))
    optimizer = optax.adam(1e-3)
    params = Network(width).init(jax.random.key(0), jnp.zeros((1, INPUTS)))["params"]
    trainer.replace_state(dataclasses.replace(trainer.state, params=params, opt_state=optimizer.init(params)))

    def train(steps: int) -> tuple[float, float]:
        began = [0.0]
        watch = LambdaCallback(on_epoch_begin=lambda epoch, logs: began.__setitem__(0, time.perf_counter()))
        history = trainer.fit(*data, batch_size=ROWS, shuffle=False, steps=steps, steps_per_epoch=steps, callbacks=[watch], verbose=0, log_every=10**6)
        return time.perf_counter() - began[0], history.history["loss"][-1]

    def memory() -> Memory:
        return as_memory(trainer._session.task.need_compiled("memory").preparation.memory())

    return Contender(train, memory)


def measure(kind: str, count: int, width: int, *, steps: int, rounds: int) -> dict[str, Any]:
    """Returns the times and memory of a pair on the given number of devices.

    Raises:
        AssertionError: The two did different work.
    """
    jax.clear_caches()  # pmap keeps compiled programs, and arrays with them.
    gc.collect()
    data = make_data(steps)
    devices = jax.devices()[:count]
    contenders = {
        "hand": hand_written(kind, devices, width, data),
        "fitflax": by_fitflax(kind, devices, width, data),
        "control": hand_written(kind, devices, width, data),
    }
    first = {who: contender.train(steps)[1] for who, contender in contenders.items()}
    assert max(first.values()) - min(first.values()) < 1e-4 * first["hand"], first
    seconds: dict[str, list[float]] = {who: [] for who in contenders}
    for who in ["hand", "fitflax", "control", "control", "fitflax", "hand"] * rounds:
        seconds[who].append(contenders[who].train(steps)[0])

    def ratio(who: str) -> dict[str, float]:
        mine, base = (np.reshape(seconds[name], (rounds, 2)).sum(axis=1) for name in (who, "hand"))
        ratios = mine / base
        return {"median": float(np.median(ratios)), "min": float(ratios.min()), "max": float(ratios.max())}

    memories = {who: contenders[who].memory()._asdict() for who in ("hand", "fitflax")}
    print(f"{kind}, {count} devices, width {width}: {ratio('fitflax')['median']:.3f}", file=sys.stderr)
    us = {who: statistics.median(times) / steps * 1e6 for who, times in seconds.items()}
    return {"kind": kind, "devices": count, "width": width, "us": us, "ratio": ratio("fitflax"), "control": ratio("control"), "memory": memories}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a table with a row per measurement. Growth is relative to the first row of the same pair."""
    header = [
        "pair",
        "devices",
        "width",
        "us/step hand-written",
        "us/step fitflax",
        "ratio",
        "control",
        "growth of time",
        "MB per device: state and batch",
        "temporaries",
        "hand-written",
    ]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        first = next(other for other in rows if other["kind"] == row["kind"])
        spread = [f"{row[name]['median']:.3f} ({row[name]['min']:.3f}..{row[name]['max']:.3f})" for name in ("ratio", "control")]
        mine, hand = (row["memory"][who] for who in ("fitflax", "hand"))
        sizes = [
            f"{mine['arguments'] / 2**20:.2f}",
            f"{mine['temporaries'] / 2**20:.2f}",
            f"{hand['arguments'] / 2**20:.2f} + {hand['temporaries'] / 2**20:.2f}",
        ]
        times = [f"{row['us'][who]:.0f}" for who in ("hand", "fitflax")]
        lines.append([row["kind"], str(row["devices"]), str(row["width"]), *times, *spread, f"{row['us']['fitflax'] / first['us']['fitflax']:.2f}", *sizes])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> dict[str, Any]:
    versions = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
    return {"device": jax.devices()[0].device_kind, "cores": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version(), **versions}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--width", type=int, nargs="+", default=[256], help="width of the network, for all numbers of devices")
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512, 1024], help="widths of the network, for the largest number of devices")
    parser.add_argument("--pairs", choices=PAIRS, nargs="+", default=list(PAIRS))
    parser.add_argument("--steps", type=int, default=16, help="steps per measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, to check that the benchmark runs")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this JSON file")
    parser.add_argument("--write", action="store_true", help=f"write the tables to {RESULTS.name}")
    options = parser.parse_args(argv)
    if options.quick:
        options.devices, options.width, options.widths, options.steps, options.rounds = [1, 2], [64], [64, 128], 4, 1
    by_devices = [
        measure(kind, count, width, steps=options.steps, rounds=options.rounds)
        for kind in options.pairs
        for width in options.width
        for count in options.devices
    ]
    most = max(options.devices)
    by_width = [measure(kind, most, width, steps=options.steps, rounds=options.rounds) for kind in options.pairs for width in options.widths]
    here = machine()
    titles = ["By number of devices", f"By width, on {most} devices"]
    text = "\n\n".join(f"## {title}\n\n{table(rows)}" for title, rows in zip(titles, (by_devices, by_width), strict=True))
    text += f"\n\n{options.rounds} rounds of {options.steps} steps, batches of {ROWS} rows. {', '.join(f'{name} {value}' for name, value in here.items())}.\n"
    print(text)
    if options.json:
        options.json.write_text(json.dumps({"machine": here, "devices": by_devices, "widths": by_width}, indent=2) + "\n", encoding="utf-8")
    if options.write:
        head = "# Scaling\n\nWritten by `python -m benchmarks.scaling --write`; the docstring of `scaling.py` describes the method.\n\n"
        RESULTS.write_text(head + text, encoding="utf-8")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
