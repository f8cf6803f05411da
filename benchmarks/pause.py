"""Measures how long an asynchronous save stops training, what steps during the write cost, and how much memory a save takes.

Each part is a separate process, started by `checkpoint.py --pause`, that prints its numbers as JSON. All train GPT-2 small's arrays (1.5 GB of float32,
including Adam's moments) on a few tokens, and wait for each step, so that a pause does not include part of a step.

* `fit`: `Trainer.fit` with a `ModelCheckpoint`. Steps during a write overlap with one; the others are between saves. Extra memory is how far the saves raise
  the process's high-water mark above that of the steps before the first save.
* `pauses`: in each round, fitflax saves, and later every array is copied into memory that was touched before, with a step before each. Then Orbax saves
  asynchronously, and flax's msgpack is written synchronously, as flax does it.
"""

import argparse
import functools
import json
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import linen as nn
from typing_extensions import override

import fitflax
from fitflax.callbacks import Callback, ModelCheckpoint
from fitflax.parallel import DataParallel


class Size(NamedTuple):
    """A model, its batches, and the number of steps from one save to the next."""

    vocabulary: int
    positions: int
    width: int
    blocks: int
    tokens: int
    batch: int
    steps: int


GPT2 = Size(vocabulary=50257, positions=1024, width=768, blocks=12, tokens=64, batch=2, steps=12)
QUICK = Size(vocabulary=97, positions=16, width=24, blocks=2, tokens=8, batch=2, steps=3)


class Model(nn.Module):
    """GPT-2 with the arrays of the original: one matrix for queries, keys and values, and the output layer tied to the embedding."""

    size: Size

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        size = self.size
        embed = nn.Embed(size.vocabulary, size.width, name="wte")
        x = embed(tokens) + nn.Embed(size.positions, size.width, name="wpe")(np.arange(tokens.shape[1]))
        for index in range(size.blocks):
            qkv = nn.Dense(3 * size.width, name=f"qkv_{index}")(nn.LayerNorm(name=f"ln_1_{index}")(x))
            query, key, value = (part.reshape(*tokens.shape, 12, -1) for part in jnp.split(qkv, 3, axis=-1))
            attended = nn.dot_product_attention(query, key, value, mask=nn.make_causal_mask(tokens))
            x += nn.Dense(size.width, name=f"out_{index}")(attended.reshape(x.shape))
            up = nn.gelu(nn.Dense(4 * size.width, name=f"up_{index}")(nn.LayerNorm(name=f"ln_2_{index}")(x)))
            x += nn.Dense(size.width, name=f"down_{index}")(up)
        return embed.attend(nn.LayerNorm(name="ln_f")(x))


def make_trainer(size: Size) -> fitflax.Trainer:
    trainer = fitflax.Trainer(Model(size), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("adam", "sparse_categorical_crossentropy", learning_rate=1e-4)
    return trainer


def make_data(size: Size) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, size.vocabulary, (size.batch, size.tokens + 1), dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def high_water() -> float | None:
    """Returns the peak memory of this process in MB, or `None` if the system is not Linux."""
    path = pathlib.Path("/proc/self/status")
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), None)


def forget_high_water() -> None:
    path = pathlib.Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5", encoding="ascii")


class Saves(ModelCheckpoint):
    """Measures its own pauses when the device is idle, and records when its writes begin and end."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.pauses: list[float] = []
        self.cpu: list[float] = []
        self.writes: list[tuple[float, float]] = []
        save = self.store.save

        def timed(**options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return save(**options)
            finally:
                self.writes.append((begin, time.perf_counter()))

        self.store.save = timed  # type: ignore[method-assign]

    @override
    def on_checkpoint(self, checkpoint: fitflax.Checkpoint) -> None:
        jax.block_until_ready(checkpoint.run.borrow())
        seconds, cpu = timed(functools.partial(super().on_checkpoint, checkpoint))
        self.pauses.append(seconds)
        self.cpu.append(cpu)


class Steps(Callback):
    """Waits for each step, and records when it began and ended."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.high_water: list[float | None] = []
        self._begin = 0.0

    @override
    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        self._begin = time.perf_counter()

    @override
    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        float(logs["loss"])
        self.steps.append((self._begin, time.perf_counter()))
        if len(self.steps) == 2:
            forget_high_water()  # Leaves out initialization and compilation.
        self.high_water.append(high_water())


def fit(size: Size, rounds: int, directory: pathlib.Path) -> dict[str, Any]:
    """Returns the seconds of steps, pauses and writes, and the extra memory of all saves in MB."""
    saves = Saves(directory / "fit", every=fitflax.every(steps=size.steps), keep=1, save_last=False)
    steps, trainer = Steps(), make_trainer(size)
    trainer.fit(*make_data(size), batch_size=size.batch, steps=size.steps * (rounds + 2) - 1, callbacks=[saves, steps], verbose=0, shuffle=False)
    # The first step compiles. The first save, and the steps after it, allocate the memory.
    after_first = steps.steps[2 * size.steps - 1 :]
    writes = saves.writes[1:]
    beside = [end - begin for begin, end in after_first if any(begin < stop and start < end for start, stop in writes)]
    others = [end - begin for begin, end in after_first if not any(begin < stop and start < end for start, stop in writes)]
    state = trainer.state
    megabytes = sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.opt_state))) / 2**20
    peaks = steps.high_water
    extra = None if peaks[0] is None or peaks[-1] is None else peaks[-1] - peaks[size.steps - 1]  # type: ignore[operator]
    return {
        "megabytes": megabytes,
        "first_pause": saves.pauses[0],
        "pauses": saves.pauses[1:],
        "writes": [stop - start for start, stop in writes],
        "beside": beside,
        "others": others,
        "extra_mb": extra,
        "peak_mb": peaks[-1],
    }


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Returns the seconds of a call, and the CPU seconds of its thread. The difference is waiting, or other load on the machine."""
    begin, cpu = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - begin, time.thread_time() - cpu


def pauses(size: Size, rounds: int, directory: pathlib.Path) -> dict[str, Any]:
    """Returns the pauses of each contender, in seconds."""
    trainer = make_trainer(size)
    saves = Saves(directory / "loop", keep=1)
    found: dict[str, list[tuple[float, float]]] = {"warm copy": [], "orbax": [], "flax": []}
    with trainer.train_loop(*make_data(size), batch_size=size.batch, steps=2 * rounds + 12, shuffle=False) as loop:

        def state_of(checkpoint: fitflax.Checkpoint) -> Any:
            state = checkpoint.run.borrow()
            return jax.block_until_ready((state.params, state.opt_state))

        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(state_of(next(loop)))]
        kept = [np.ones_like(array) for array in arrays]
        del arrays
        for _ in range(rounds + 1):  # The first save allocates the memory.
            checkpoint = next(loop)
            state_of(checkpoint)
            saves(checkpoint)
            checkpoint.run.saver.wait()
            arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(state_of(next(loop)))]
            found["warm copy"].append(timed(functools.partial(copy_all, kept, arrays)))
            del arrays
        del kept
        for number in range(4):
            state = state_of(next(loop))
            with ocp.StandardCheckpointer() as checkpointer:
                found["orbax"].append(timed(functools.partial(checkpointer.save, directory / f"orbax-{number}", state)))
                checkpointer.wait_until_finished()
            shutil.rmtree(directory / f"orbax-{number}")
        for _ in range(2):
            state = state_of(next(loop))
            found["flax"].append(timed(lambda state=state: (directory / "flax").write_bytes(flax.serialization.to_bytes(state))))
    found = {"fitflax": list(zip(saves.pauses, saves.cpu, strict=True))[1 : rounds + 1], **found, "warm copy": found["warm copy"][1:]}
    seconds, cpu = ({who: [pair[index] for pair in pairs] for who, pairs in found.items()} for index in (0, 1))
    return {"pauses": seconds, "cpu": cpu, "writes": [stop - start for start, stop in saves.writes[1 : rounds + 1]]}


def copy_all(targets: list[np.ndarray], arrays: list[np.ndarray]) -> None:
    for target, array in zip(targets, arrays, strict=True):
        np.copyto(target, array)


PARTS = {"fit": fit, "pauses": pauses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path.cwd())
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        print(json.dumps(PARTS[options.part](QUICK if options.quick else GPT2, options.rounds, pathlib.Path(name))))


if __name__ == "__main__":
    main()
