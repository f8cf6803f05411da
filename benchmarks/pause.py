"""Measures how long a save stops training, how long steps take during the save, and how much memory the save takes.

Each part is a separate process, started by `checkpoint.py --pause`, that prints its numbers as JSON. All parts train GPT-2 small's arrays (1.5 GB of
float32, including Adam's moments) on a few tokens, or on larger batches on a GPU. They wait for each step, so that a pause does not include part of a step.

* `fitflax`, `orbax`, `flax`: `Trainer.fit` with a `ModelCheckpoint`, with Orbax's asynchronous checkpointer, or with flax's msgpack, which is written
  synchronously, as flax does it.
* `alone`: the same without saves. The extra memory of another part is its peak minus the peak of this part.
* `pauses`: in each round, fitflax saves, and later every array is copied into memory that was touched before, with a step before each.

A save begins with the wait for the previous one, and ends when the checkpoint is complete and the old one is deleted. The transfer is the first part of a
save, until all arrays are on the host; on a CPU, it is part of the pause. Steps that do not overlap with a save are reported as other steps.
"""

import argparse
import functools
import json
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
from fitflax.checkpoints.plain_tree import leaves_of
from fitflax.parallel import DataParallel
from fitflax.triggers import Trigger


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
# A save takes 2 s, so it is complete before the next one begins.
ON_GPU = GPT2._replace(tokens=1024, batch=8, steps=60)
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


def state_of(checkpoint: fitflax.Checkpoint) -> Any:
    """Returns the arrays that are saved, once they are computed."""
    state = checkpoint.run.borrow()
    return jax.block_until_ready((state.params, state.opt_state))


def device_peak() -> float | None:
    """Returns the peak of the device's memory in MB, or `None` if the device does not report it."""
    found = jax.devices()[0].memory_stats() or {}
    return found["peak_bytes_in_use"] / 2**20 if "peak_bytes_in_use" in found else None


def high_water() -> float | None:
    """Returns the peak memory of this process in MB, or `None` if the system is not Linux."""
    path = pathlib.Path("/proc/self/status")
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), None)


def forget_high_water() -> None:
    path = pathlib.Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5", encoding="ascii")


class Save(NamedTuple):
    """The times when a save began, when all arrays were on the host, and when the checkpoint was complete and the old one deleted."""

    begin: float
    moved: float
    end: float


class Saves(ModelCheckpoint):
    """Measures its own pauses when the device is idle, and records its saves."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.pauses: list[float] = []
        self.cpu: list[float] = []
        self.saves: list[Save] = []
        self._begins: list[float] = []
        save = self.store.save

        def timed(train: Any, **options: Any) -> Any:
            begin = moved = self._begins[len(self.saves)]  # On a CPU, the arrays were copied during the pause.
            arrays = [leaf for leaf in leaves_of(train.tree) if isinstance(leaf, jax.Array)]
            if arrays:
                jax.block_until_ready(arrays)
                moved = time.perf_counter()
            try:
                return save(train=train, **options)
            finally:
                self.saves.append(Save(begin, moved, time.perf_counter()))

        self.store.save = timed  # type: ignore[method-assign]

    @override
    def on_checkpoint(self, checkpoint: fitflax.Checkpoint) -> None:
        state_of(checkpoint)
        self._begins.append(time.perf_counter())
        seconds, cpu = timed(functools.partial(super().on_checkpoint, checkpoint))
        self.pauses.append(seconds)
        self.cpu.append(cpu)


class PeerSaves(Callback):
    """Saves with another library, once its previous save is complete, and takes the same measurements.

    Args:
        path: Where to save. Each checkpoint is deleted when it is complete.
        every: When to save.
        save: Saves the given state, and returns a function that waits for the rest of the save, or `None` if it is complete.
    """

    needs_gradients_norm = False

    def __init__(self, path: pathlib.Path, every: Trigger, save: Callable[[pathlib.Path, Any], Callable[[], Any] | None]) -> None:
        self.every = every
        self.pauses: list[float] = []
        self.saves: list[Save] = []
        self._path, self._save = path, save
        self._executor = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    @override
    def on_checkpoint(self, checkpoint: fitflax.Checkpoint) -> None:
        state, begin = state_of(checkpoint), time.perf_counter()
        self._finish()
        pause_begin = time.perf_counter()
        wait = self._save(self._path, state)
        self.pauses.append(time.perf_counter() - pause_begin)
        if wait is None:
            self._complete(begin)
        else:
            self._pending = self._executor.submit(self._complete, begin, wait)

    def _complete(self, begin: float, wait: Callable[[], Any] = lambda: None) -> None:
        wait()
        shutil.rmtree(self._path) if self._path.is_dir() else self._path.unlink()
        self.saves.append(Save(begin, begin, time.perf_counter()))

    def _finish(self) -> None:
        """Waits for the previous save, and raises its error if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    @override
    def on_train_end(self, logs: Any) -> None:
        with self._executor:
            self._finish()


def flax_save(path: pathlib.Path, state: Any) -> None:
    path.write_bytes(flax.serialization.to_bytes(state))


def orbax_save(checkpointer: ocp.StandardCheckpointer, path: pathlib.Path, state: Any) -> Callable[[], Any]:
    checkpointer.save(path, state)
    return checkpointer.wait_until_finished


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


def fit(who: str, size: Size, rounds: int, directory: pathlib.Path) -> dict[str, Any]:
    """Returns the seconds of steps, pauses and saves, and the peaks of memory in MB."""
    every, steps, trainer = fitflax.every(steps=size.steps), Steps(), make_trainer(size)
    saves: Saves | PeerSaves | None = None
    with ocp.StandardCheckpointer() as checkpointer:
        if who == "fitflax":
            saves = Saves(directory / who, every=every, keep=1, save_last=False)
        elif who != "alone":
            saves = PeerSaves(directory / who, every, flax_save if who == "flax" else functools.partial(orbax_save, checkpointer))
        count = size.steps * (rounds + 2) - 1 if saves else size.steps
        trainer.fit(*make_data(size), batch_size=size.batch, steps=count, callbacks=[*filter(None, [saves]), steps], verbose=0, shuffle=False)
    state = trainer.state
    megabytes = sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.opt_state))) / 2**20
    found = {"megabytes": megabytes, "peak_mb": steps.high_water[-1], "device_peak_mb": device_peak()}
    if saves is None:
        return found
    # The first step compiles. The first save, and the steps after it, allocate the memory.
    after_first, later = steps.steps[2 * size.steps - 1 :], saves.saves[1:]
    during = [step for step in after_first if any(step[0] < save.end and save.begin < step[1] for save in later)]
    moving = [step for step in during if any(step[0] < save.moved and save.begin < step[1] for save in later)]
    return found | {
        "first_pause": saves.pauses[0],
        "pauses": saves.pauses[1:],
        "saves": [save.end - save.begin for save in later],
        "transfers": [save.moved - save.begin for save in later if save.moved > save.begin],
        "during": [end - begin for begin, end in during],
        "moving": [end - begin for begin, end in moving],
        "others": [end - begin for begin, end in after_first if (begin, end) not in during],
    }


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Returns the seconds of a call, and the CPU seconds of its thread. The difference is waiting, or other load on the machine."""
    begin, cpu = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - begin, time.thread_time() - cpu


def pauses(size: Size, rounds: int, directory: pathlib.Path) -> dict[str, Any]:
    """Returns the pauses of fitflax, in seconds, the copies that they are compared with, and the device's platform."""
    trainer = make_trainer(size)
    saves = Saves(directory / "loop", keep=1)
    copies: list[tuple[float, float]] = []
    with trainer.train_loop(*make_data(size), batch_size=size.batch, steps=2 * rounds + 4, shuffle=False) as loop:
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(state_of(next(loop)))]
        kept = [np.ones_like(array) for array in arrays]
        del arrays
        for _ in range(rounds + 1):  # The first save allocates the memory.
            checkpoint = next(loop)
            saves(checkpoint)
            checkpoint.run.saver.wait()
            arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(state_of(next(loop)))]
            copies.append(timed(functools.partial(copy_all, kept, arrays)))
            del arrays
    seconds, cpu = ([pair[index] for pair in copies[1:]] for index in (0, 1))
    return {
        "pauses": {"fitflax": saves.pauses[1 : rounds + 1], "warm copy": seconds},
        "cpu": {"fitflax": saves.cpu[1 : rounds + 1], "warm copy": cpu},
        "saves": [save.end - save.begin for save in saves.saves[1 : rounds + 1]],
        "platform": jax.default_backend(),
    }


def copy_all(targets: list[np.ndarray], arrays: list[np.ndarray]) -> None:
    for target, array in zip(targets, arrays, strict=True):
        np.copyto(target, array)


PARTS = {**{who: functools.partial(fit, who) for who in ("alone", "fitflax", "orbax", "flax")}, "pauses": pauses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path.cwd())
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        size = QUICK if options.quick else GPT2 if jax.default_backend() == "cpu" else ON_GPU
        print(json.dumps(PARTS[options.part](size, options.rounds, pathlib.Path(name))))


if __name__ == "__main__":
    main()
