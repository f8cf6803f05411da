"""Compares loading safetensors with reading the same bytes: `Trainer.load_weights` puts them into a trainer's state, on the device.

Each round runs base, fitflax, control, control, fitflax, base. The peer follows after all rounds. All read the same file, from the page cache:

* base: reads the file into fresh memory.
* fitflax: calls `load_weights` on a trainer without weights, with every check of the file, until the arrays are on the device.
* peer: `safetensors.flax.load_file`, which creates JAX arrays without a model.

The control is the base again. Speed is the base's time divided by the contender's: 1 is the speed of reading. With `--mapping`, every kernel is transposed.

python -m benchmarks.weights [--megabytes 500] [--arrays 32] [--rounds 7]
"""

import argparse
import ctypes
import gc
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import safetensors.flax
from flax import linen as nn

import fitflax
from fitflax.checkpoints import WeightRule
from fitflax.parallel import DataParallel

LIMIT = 0.8
MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's mallopt


class Kernels(nn.Module):
    """A module with only kernels."""

    arrays: int
    size: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernels = [self.param(f"kernel_{index}", nn.initializers.zeros, (self.size, 1024)) for index in range(self.arrays)]
        return x + sum(kernel[0, 0] for kernel in kernels)


def read_file(path: pathlib.Path) -> np.ndarray:
    size = path.stat().st_size
    memory = np.empty(size, np.uint8)
    view, done = memory.data, 0
    with open(path, "rb", buffering=0) as file:
        while done < size:
            done += file.readinto(view[done:])
    return memory


def seconds(call: Callable[..., Any], *, of: Callable[[], Any] | None = None) -> float:
    """Returns the seconds of a call, excluding the creation of its argument and the deletion of its result."""
    arguments = () if of is None else (of(),)
    gc.collect()
    begin = time.perf_counter()
    result = call(*arguments)
    took = time.perf_counter() - begin
    del result
    return took


def measure(megabytes: float, arrays: int, rounds: int, mapping: bool, directory: pathlib.Path) -> dict[str, Any]:
    module = Kernels(arrays, int(megabytes * 2**20 / 4 / 1024 / arrays))
    trainer = fitflax.Trainer(module, parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse")
    trainer.build(np.zeros((1, 1), np.float32))
    rng = np.random.default_rng(0)
    state = trainer.state
    trainer.replace_state(state.replace_params({name: rng.standard_normal(leaf.shape, np.float32) for name, leaf in state.params.items()}))
    del state
    rules = [WeightRule("{name}", "params/{name}", np.transpose, np.transpose)] if mapping else None
    path = trainer.save_weights(directory / "model.safetensors", mapping=rules)

    def load(fresh: fitflax.Trainer) -> Any:
        fresh.load_weights(path, mapping=rules)
        return jax.block_until_ready(fresh.state)

    calls: dict[str, Callable[[], float]] = {
        "base": lambda: seconds(read_file, of=lambda: path),
        "fitflax": lambda: seconds(load, of=lambda: trainer.with_seed(0)),
        "control": lambda: seconds(read_file, of=lambda: path),
        "peer": lambda: seconds(lambda: jax.block_until_ready(safetensors.flax.load_file(path))),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        found: dict[str, list[float]] = {name: [] for name in calls}
        for name in ("base", "fitflax", "control", "control", "fitflax", "base"):
            found[name].append(calls[name]())
        for name in ("base", "fitflax", "control"):
            times[name].append(statistics.mean(found[name]))
    times["peer"] = [calls["peer"]() for _ in range(rounds)]
    ratios = {name: statistics.median(base / other for base, other in zip(times["base"], values, strict=True)) for name, values in times.items()}
    return {"megabytes": megabytes, "arrays": arrays, "mapping": mapping, "ratios": ratios, "seconds": {n: statistics.median(v) for n, v in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=500)
    parser.add_argument("--arrays", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mapping", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    ctypes.CDLL("libc.so.6").mallopt(MMAP_THRESHOLD, 65536)  # Fresh memory for all, as in a new process.
    with tempfile.TemporaryDirectory() as directory:
        found = measure(arguments.megabytes, arguments.arrays, arguments.rounds, arguments.mapping, pathlib.Path(directory))
    for name, ratio in found["ratios"].items():
        print(f"{name:<8} {found['seconds'][name]:.3f} s  {ratio:.2f}")
    is_slow = not arguments.mapping and found["ratios"]["fitflax"] < LIMIT
    print(f"load_weights: {found['ratios']['fitflax']:.2f} of the reading speed, limit {LIMIT}{': TOO SLOW' if is_slow else ''}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))
    raise SystemExit(is_slow)


if __name__ == "__main__":
    main()
