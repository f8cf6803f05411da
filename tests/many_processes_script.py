"""A training script that test_many_processes.py starts in one process or in several: `python tests/many_processes_script.py '{"port": ..., "index": 0, ...}'`.

It always has four devices in total, so that results are comparable, and prints its results as one line of JSON. With `runs`, arguments by name, the same
processes execute several runs one after another; the output of each starts with a line `RUN` and its name.
"""

import atexit
import dataclasses
import itertools
import json
import os
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn

import fitflax
from fitflax import parallel
from fitflax.callbacks import (
    BestCheckpoint,
    Callback,
    CSVLogger,
    EarlyStopping,
    JSONLogger,
    LambdaCallback,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
    SummaryLogger,
    TensorBoard,
    TerminateOnNaN,
    Watchdog,
)
from fitflax.data import Shard, TokenFile
from fitflax.errors import FitflaxError
from fitflax.integrations.tracker import Tracker, TrackerLogger

DEVICES = 4


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.relu(nn.Dense(32)(x))
        return nn.Dense(4)(x)


class TokenNetwork(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        return nn.Dense(50)(nn.Embed(50, 16)(tokens))


def examples(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 16)).astype(np.float32), rng.integers(0, 4, rows).astype(np.int32)


def shares(rows: int, count: int) -> list[slice]:
    """Shards of very different lengths, some of them shorter than others by several batches."""
    bounds = [0, *(int(rows * (1 - 0.4**number)) for number in range(1, count)), rows]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def joined(arrays: tuple[np.ndarray, ...], count: int, size: int) -> Any:
    """The batches of one process that equal those of `count` processes with a shard each."""
    parts = [[array[share] for array in arrays] for share in shares(len(arrays[0]), count)]

    def batches() -> Any:
        for begin in range(0, max(len(part[0]) for part in parts), size // count):
            yield tuple(np.concatenate([array[begin : begin + size // count] for array in each]) for each in zip(*parts, strict=True))

    return batches


class Reader(Callback):
    """Reads what it can in process 0 only, as callbacks that write something do."""

    main_process_only = True
    every = fitflax.every(steps=3)

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_checkpoint(self, checkpoint: Any) -> None:
        whole = jax.tree.leaves(checkpoint.model_params)[0]
        self.norms.append(float(np.abs(whole.addressable_data(0)).sum()))
        state = self.trainer.state  # Borrowed: the next step copies it, in this process only.
        assert int(state.step) == checkpoint.step


class Lines(Tracker):
    """A tracker that writes to a file: the process, the step and the loss of each point."""

    def __init__(self, path: str) -> None:
        self.path = path

    def start(self, name: str, run_id: str | None, config: Any) -> str:
        return name

    def log(self, points: Any) -> None:
        with open(self.path, "a") as file:
            file.writelines(f"{os.getpid()} {point.step} {point.values['loss']}\n" for point in points)

    def finish(self, status: str, summary: Any, artifact: Any) -> None:
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()} {status}\n")


def watchers(directory: str | None) -> list[Callback]:
    """One of each callback that reads values or the state."""
    return [
        TensorBoard(f"{directory}/tensorboard", histograms=fitflax.every(steps=4)),
        SummaryLogger(every=fitflax.every(steps=5)),
        JSONLogger(f"{directory}/log.json"),
        ReduceLROnPlateau(patience=1),
        EarlyStopping(patience=50),
        TerminateOnNaN(),
        LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        Watchdog(seconds=600),
        TrackerLogger(Lines(f"{directory}/tracker.txt"), every=fitflax.every(steps=4)),
        Reader(),
    ]


def make_mistake(mistake: str, trainer: fitflax.Trainer) -> None:
    """Does what makes one process differ from the others."""
    if mistake == "leave":
        sys.exit(0)
    elif mistake == "evaluate":
        trainer.build((np.zeros((8, 16), np.float32), np.zeros(8, np.int32)))
        trainer.evaluate(*examples(90), verbose=0)
    elif mistake == "optimizer":
        trainer.compile("sgd", "sparse_categorical_crossentropy", ["accuracy"])
    elif mistake == "rate":
        trainer.compile("adam", "sparse_categorical_crossentropy", ["accuracy"], learning_rate=0.02)
    elif mistake == "epochs":
        x, y = examples(90)
        trainer.fit(x, y, batch_size=32, epochs=3, validation_data=(x[:50], y[:50]), verbose=0)
    elif mistake == "data":
        trainer.fit(*examples(80), batch_size=32, steps=12, verbose=0)
    elif mistake == "lengths":
        x, y = examples(90)
        trainer.fit(x, y[:80], batch_size=32, steps=12, verbose=0)


def share_programs() -> None:
    """Makes the runs of this process share compiled programs, in a separate directory; JAX lets only the first of several processes write."""
    programs = tempfile.TemporaryDirectory(prefix="fitflax-tests-")
    atexit.register(programs.cleanup)
    jax.config.update("jax_compilation_cache_dir", programs.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def print_result(result: dict[str, Any]) -> None:
    print("RESULT " + json.dumps(result), flush=True)


def run(
    count: int,
    index: int,
    *,
    kind: str,
    directory: str | None = None,
    steps: int = 12,
    differ: bool = False,
    shards: int = 0,
    stop: Any = None,
    seconds: float = 0.0,
    fail: Any = None,
    watch: bool = False,
    steps_per_call: Any = 1,
    mistake: str = "",
    brief: bool = False,
    next_stage: bool = False,
) -> None:
    strategies: dict[str, Any] = {
        "data parallel": parallel.DataParallel,
        "own": lambda: parallel.DataParallel(jax.local_devices()),
        "tensor": lambda: parallel.Sharded({"data": 1, "model": 4}, fsdp="model", fsdp_min_size=64),
        "fsdp": lambda: parallel.Sharded({"data": -1}, fsdp=True, fsdp_min_size=64),
        "mesh": lambda: parallel.Sharded({"data": 2, "model": 2}, rules=[("batch", "data")], fsdp="model", fsdp_min_size=64),
    }
    trainer = fitflax.Trainer(Network(), parallel=strategies[kind]())
    trainer.compile(
        "adam" if watch or mistake else optax.adam(0.01),
        learning_rate=0.01 if watch or mistake else None,
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        steps_per_call=steps_per_call,
    )
    x, y = examples(90)
    if kind != "own" and not mistake and not watch:
        # From arrays that each process has on its own device.
        params = Network().init(jax.random.key(7), x[:1], train=False)["params"]
        trainer.build((x[:4], y[:4]))
        trainer.replace_state(dataclasses.replace(trainer.state, params=params, opt_state=optax.adam(0.01).init(params)))
    directory = None if directory is None else directory.format(index=index)
    callbacks: list[Any] = [LambdaCallback(on_train_batch_end=lambda batch, logs: print("step", trainer.step, flush=True))]
    if stop is not None and index in stop["processes"]:
        callbacks.append(LambdaCallback(on_train_batch_end=lambda batch, logs: trainer.stop(f"process {index}") if trainer.step == stop["step"] else None))
    if fail is not None and index == fail["process"]:
        callbacks.append(LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / 0 if trainer.step == fail["step"] else None))
    if watch:
        callbacks += watchers(directory)
    due: list[int] = []
    if seconds:
        callbacks.append(LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.01 * (1 + index))))
        callbacks.append(LambdaCallback(on_checkpoint=lambda checkpoint: due.append(checkpoint.step), every=fitflax.every(seconds=seconds)))
    if mistake and index:
        make_mistake(mistake, trainer)
    best = None if directory is None else BestCheckpoint(f"{directory}/best")
    if directory is not None:
        callbacks += [
            ModelCheckpoint(f"{directory}/checkpoints", every=fitflax.every(steps=4)),
            best,
            CSVLogger(f"{directory}/log.csv"),
        ]
    options: dict[str, Any] = {"steps": steps, "callbacks": callbacks, "resume": None if directory is None else "auto", "verbose": 2}
    if shards:
        share = shares(90, shards)[index]
        data = Shard((x[share], y[share])) if count > 1 else joined((x, y), shards, 32)
        size = {"batch_size": 32, "shuffle": False} if count > 1 else {}
        valid = Shard((x[:50][shares(50, shards)[index]], y[:50][shares(50, shards)[index]])) if count > 1 else (x[:50], y[:50])
        history = trainer.fit(data, **size, validation_data=valid, **options)
        if brief:
            return print_result({"step": trainer.step, "processes": jax.process_count()})
        own = shares(41, shards)[index]
        outputs = trainer.predict(Shard(filter(len, np.split(x[own], [2, 3]))) if count > 1 else x[:41])
        evaluation = trainer.evaluate(Shard((x[share], y[share])) if count > 1 else (x, y), batch_size=24, verbose=0)
    else:
        history = trainer.fit(np.roll(x, index if differ else 0, axis=0), y, batch_size=32, validation_data=(x[:50], y[:50]), **options)
        if next_stage:
            saving = [ModelCheckpoint(f"{directory}/next"), BestCheckpoint(f"{directory}/best")]
            trainer.fit(x, y, batch_size=32, steps=2, validation_data=(x[:50], y[:50]), callbacks=saving, resume="auto", verbose=0)
        if brief:
            return print_result({"due": due, "reason": trainer.stop_reason, "step": trainer.step, "processes": jax.process_count()})
        outputs = trainer.predict(x[:41], batch_size=16)
        evaluation = trainer.evaluate(x, y, batch_size=24, verbose=0)
    result = {
        "due": due,
        "reason": trainer.stop_reason,
        "best": [best.best, best.best_step] if best else None,
        "logits": trainer.predict(Shard(x[share]) if count > 1 else x).tolist() if shards else None,
        "step": trainer.step,
        "history": {key: list(map(float, values)) for key, values in history.history.items()},
        "evaluation": evaluation,
        "outputs": [list(outputs.shape), float(np.abs(outputs).sum()), outputs[:, 0].tolist()],
        "norm": float(optax.tree.norm(trainer.state.params)),
        "processes": jax.process_count(),
    }
    return print_result(result)


def run_on_tokens(*, tokens: str) -> None:
    """Trains on windows of a file that every process maps, and also prints the windows that this process fed."""
    trainer = fitflax.Trainer(TokenNetwork(), parallel=parallel.DataParallel())
    trainer.compile(optax.adam(0.01), "sparse_categorical_crossentropy")
    fed: list[Any] = []
    feed = parallel.DataParallel.feed

    def noting(strategy: Any, batch: Any) -> Any:
        fed.append(batch.x.tolist())
        return feed(strategy, batch)

    parallel.DataParallel.feed = noting  # type: ignore[method-assign]
    file = TokenFile(tokens, 10, "uint16")
    history = trainer.fit(file, batch_size=16, steps=10, verbose=0)
    parallel.DataParallel.feed = feed  # type: ignore[method-assign]
    numbers = {
        "loss": history.history["loss"],
        "evaluation": trainer.evaluate(file, batch_size=12, verbose=0)["loss"],
        "outputs": float(np.abs(trainer.predict(file, batch_size=12, verbose=0)).sum()),
        "norm": float(optax.tree.norm(trainer.state.params)),
    }
    print_result({"windows": fed[1:], "numbers": numbers})  # The state is initialized with the first batch.


def main(*, count: int = 1, index: int = 0, port: int = 0, heartbeat: int = 30, runs: dict[str, Any] | None = None, **arguments: Any) -> int:
    """Returns the exit status of the last run: an error in one run is an error in all processes, so they can continue together."""
    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    if count > 1:
        # Without a port, the environment has the arguments.
        parallel.initialize(*((f"127.0.0.1:{port}", count, index) if port else ()), heartbeat_timeout_seconds=heartbeat)
    if runs:
        share_programs()
    status = 0
    for name, given in (runs or {"alone": arguments}).items():
        print("RUN " + name, flush=True)
        status = 0
        try:
            if "tokens" in given:
                run_on_tokens(**given)
            else:
                run(count, index, **given)
        except FitflaxError as error:
            print(f"ERROR {type(error).__name__}: {error}", flush=True)
            status = 3
    return status


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
