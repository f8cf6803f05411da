"""A training script that process tests start, stop, kill and restart, and functions with which tests compare two runs.

`python tests/run_script.py '{"directory": ..., "fit": {"steps": 12}}'` trains a small network with everything that has state: dropout, batch statistics, Adam,
shuffling, a ragged last batch, validation, EarlyStopping, BestCheckpoint. It writes its results to `result.json` in `directory`.
"""

import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import linen as nn

import fitflax
from fitflax.callbacks import BestCheckpoint, Callback, EarlyStopping, LambdaCallback, ModelCheckpoint
from fitflax.checkpoints.checkpoint_files import read_checkpoint
from fitflax.parallel import DataParallel

STEPS_PER_EPOCH = 5


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
        return nn.Dense(3)(x)


def examples(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)
    return x, (x.sum(axis=1) > 0).astype(np.int32)


TRAIN = examples(18, 1)  # In batches of 4: 4, 4, 4, 4, 2.
VALID = examples(7, 2)


def make_trainer(*, model: nn.Module | None = None, seed: int = 0, devices: int = 1, optimizer: Any = "adam") -> fitflax.Trainer:
    trainer = fitflax.Trainer(Network() if model is None else model, seed=seed, parallel=DataParallel(jax.devices()[:devices]))
    rate = {"learning_rate": 0.05} if isinstance(optimizer, str) else {}
    trainer.compile(optimizer, "sparse_categorical_crossentropy", ["accuracy"], **rate)
    return trainer


# -- comparing --


def leaves_of(tree: Any, path: str = "") -> dict[str, Any]:
    """Every leaf by its path, arrays as (dtype, shape, bytes): equal dicts are equal bit for bit."""
    if isinstance(tree, dict):
        return {name: leaf for key, value in tree.items() for name, leaf in leaves_of(value, f"{path}/{key}").items()} or {path: "{}"}
    if isinstance(tree, list | tuple):
        return {name: leaf for key, value in enumerate(tree) for name, leaf in leaves_of(value, f"{path}/{key}").items()} or {path: "[]"}
    if isinstance(tree, jax.Array) and jax.dtypes.issubdtype(tree.dtype, jax.dtypes.prng_key):
        return {path: (str(jax.random.key_impl(tree)), leaves_of(jax.random.key_data(tree))[""])}
    if isinstance(tree, float):
        return {path: tree.hex()}
    if isinstance(tree, jax.Array | np.ndarray | np.generic):
        array = np.asarray(tree)
        return {path: (str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest())}
    return {path: repr(tree)}


def state_of(trainer: fitflax.Trainer) -> dict[str, Any]:
    """The whole live state, for comparisons."""
    return {jax.tree_util.keystr(path): leaves_of(leaf)[""] for path, leaf in jax.tree_util.tree_leaves_with_path(trainer.state)}


def rows_of(history: fitflax.History) -> list[Any]:
    """The rows of a history, for comparisons; NaN equals NaN here."""
    return [[row["epoch"], {key: float(value).hex() for key, value in row["logs"].items()}] for row in history.rows]


def checkpoint_of(directory: pathlib.Path) -> dict[str, Any]:
    """Everything in a checkpoint that must be equal: all but clocks and the names of runs."""
    saved = read_checkpoint(directory)
    state = {"train": saved.train, "run": {key: value for key, value in saved.run.items() if key != "schedules"}}
    metadata = json.loads((directory / "metadata.json").read_text())
    kept = {key: metadata[key] for key in ("step", "epoch", "step_in_epoch", "metrics", "data_position", "progress", "history", "settings")}
    closing = directory / "closing.json"
    return {**leaves_of(state), "metadata": json.dumps(kept, sort_keys=True), "closing": closing.read_text() if closing.exists() else None}


def steps_in(directory: pathlib.Path) -> list[int]:
    return fitflax.checkpoints.CheckpointStore(directory).steps()


def directory_of(directory: pathlib.Path) -> dict[str, Any]:
    """All checkpoints of a directory, for comparisons."""
    return {path.name: checkpoint_of(path) for path in sorted(directory.glob("step_*"))}


def differences(one: dict[str, Any], other: dict[str, Any], path: str = "") -> list[str]:
    """The differences between two results of the functions above, short enough to read."""
    if len(one) != len(other) and path.endswith("/"):
        return [f"{path}: {list(one)} != {list(other)}"]
    found = []
    for key in [*one, *(key for key in other if key not in one)]:
        here, there = one.get(key, "absent"), other.get(key, "absent")
        if isinstance(here, dict) and isinstance(there, dict):
            found += differences(here, there, f"{path}{key}: ")
        elif here != there:
            found.append(f"{path}{key}: {str(here)[:300]} != {str(there)[:300]}")
    return found


# -- processes --


def start(root: pathlib.Path, env: dict[str, str], **arguments: Any) -> subprocess.Popen[str]:
    root.mkdir(exist_ok=True)
    command = [sys.executable, __file__, json.dumps({"directory": str(root), **arguments})]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], *, status: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == status, f"exit status {process.returncode} instead of {status}\n{out}\n{err}"
    return out, err


def run(root: pathlib.Path, env: dict[str, str], *, status: int = 0, **arguments: Any) -> dict[str, Any]:
    """Runs the script until it ends and returns its result; `{}` if it died before."""
    (root / "result.json").unlink(missing_ok=True)
    finish(start(root, env, **arguments), status=status)
    path = root / "result.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _wait(step: int) -> None:
    print(f"at step {step}", flush=True)
    sys.stdin.readline()


ACTIONS: dict[str, Callable[[int], Any]] = {
    "kill": lambda step: os.kill(os.getpid(), signal.SIGKILL),
    "wait": _wait,
    "wait twice": lambda step: (_wait(step), _wait(step)),
}


def at(trainer: fitflax.Trainer, hook: str, step: int, action: Callable[[int], Any], *, times: int = 1) -> Callback:
    """A callback without state that runs an action in a hook at a step."""
    left = iter(range(times))

    def act(*arguments: Any) -> None:
        if trainer.step == step and next(left, None) is not None:
            action(step)

    return LambdaCallback(**{hook: act})


def _hooks(trainer: fitflax.Trainer, stops: list[list[Any]]) -> Iterator[Callback]:
    for hook, step, action in stops:
        yield at(trainer, hook, step, ACTIONS[action])


def main(
    directory: str,
    *,
    fit: dict[str, Any],
    seed: int = 0,
    devices: int = 1,
    every: int = 1,
    keep: int | None = None,
    asynchronous: bool = False,
    stops: list[list[Any]] = [],  # noqa: B006 (only read)
    resume: Any = "auto",
) -> None:
    warnings.simplefilter("error")
    root = pathlib.Path(directory)
    trainer = make_trainer(seed=seed, devices=devices)
    began: list[int] = []
    history = trainer.fit(
        TRAIN,
        batch_size=4,
        validation_data=VALID,
        verbose=0,
        resume=resume,
        callbacks=[
            # Not asynchronous if a test kills the process at a step and checks which checkpoints exist: it would have to wait for them.
            ModelCheckpoint(root / "checkpoints", every=fitflax.every(steps=every), keep=keep, asynchronous=asynchronous),
            BestCheckpoint(root / "best", keep=2, asynchronous=asynchronous),
            EarlyStopping(patience=100),
            LambdaCallback(on_train_begin=lambda logs: began.append(trainer.step), on_train_end=lambda logs: print("on_train_end ran", flush=True)),
            *_hooks(trainer, stops),
        ],
        **fit,
    )
    result = {
        "began_at": began[0],
        "step": trainer.step,
        "state": {path: list(map(str, leaf)) for path, leaf in state_of(trainer).items()},
        "history": rows_of(history),
        "stop_reason": trainer.stop_reason,
    }
    (root / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    main(arguments.pop("directory"), **arguments)
