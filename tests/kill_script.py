"""A training script that test_kills.py starts, kills and restarts, with everything that a run can lose; it uses only the public API.

`python tests/kill_script.py '{"directory": ..., "fit": {"epochs": 20}}'` prints a line at every stage, so that a test knows when to kill it, and
writes its results to `result.json` in `directory`. It does not know whether it was killed: each start runs the same script.
"""

import json
import os
import pathlib
import signal
import sys
import warnings
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import nnx

import fitflax
from fitflax.callbacks import (
    BestCheckpoint,
    Callback,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TensorBoard,
)
from fitflax.errors import FitflaxWarning
from fitflax.parallel import DataParallel, Sharded
from fitflax.storage import parts
from tests.run_script import rows_of, state_of

CLASSES = 3
BATCH_SIZE = 16
STEPS_PER_EPOCH = 40
VALIDATION_BATCH_SIZE = 48
# Some steps are saved for one reason only, and some for several.
SAVE_STEPS, VALIDATE_STEPS, TALLY_STEPS, HISTOGRAM_STEPS = 7, 15, 9, 50


class Network(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        for _ in range(2):
            x = nn.Dense(self.hidden)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
        return nn.Dense(CLASSES)(x)


class NNXNetwork(nnx.Module):
    """The same as an NNX module, whose random streams are a part of the state."""

    def __init__(self, hidden: int, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(width, hidden, rngs=rngs) for width in (16, hidden)])
        self.norms = nnx.List([nnx.BatchNorm(hidden, momentum=0.9, rngs=rngs) for _ in range(2)])
        self.dropout, self.out = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(hidden, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.dropout(nnx.relu(norm(layer(x))))
        return self.out(x)


def examples(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Half of the labels are noise, so that validation stops improving while training continues."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 16)).astype(np.float32)
    y = np.argmax(x[:, :CLASSES], axis=1)
    return x, np.where(rng.random(rows) < 0.5, rng.integers(0, CLASSES, rows), y).astype(np.int32)


class Tally(Callback):
    """A custom callback: a number that results only if every step runs exactly once and in order, and what it saw at its own checkpoints."""

    def __init__(self) -> None:
        self.every = fitflax.every(steps=TALLY_STEPS)
        self._reset()

    def _reset(self) -> None:
        self.chain = 1
        self.norms = np.zeros(0)
        self.best: float | None = None

    def on_train_begin(self, logs: Any) -> None:
        self._reset()

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.chain = (self.chain * 48271 + self.trainer.step) % (2**31 - 1)

    def on_checkpoint(self, checkpoint: fitflax.Checkpoint) -> None:
        self.norms = np.append(self.norms, checkpoint.gradients_norm)

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.best = max(logs["accuracy"], -1.0 if self.best is None else self.best)
        logs["tally"], logs["mean_norm"] = self.chain, float(self.norms.mean())

    def state_dict(self) -> dict[str, Any]:
        return {"chain": self.chain, "norms": self.norms.copy(), "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.chain, self.norms, self.best = int(state["chain"]), np.array(state["norms"]), state["best"]

    def load_closing(self, step: int, epoch: int, logs: Any) -> None:
        self.best = max(logs["accuracy"], -1.0 if self.best is None else self.best)


def say(what: str, step: int) -> None:
    os.write(1, f"{what} {step}\n".encode())  # Completely or not at all, whenever this process is killed.


def count_file_events(root: pathlib.Path, die_at: int | None) -> list[int]:
    """Counts what this process does to names under `root`: files opened for writing, renames, removals, new directories. It dies before number `die_at`."""
    count = [0]
    inside = os.path.join(root, "")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        # A tree is removed with names relative to an open directory.
        is_relative = event in ("os.remove", "os.rmdir") and arguments[-1] not in (None, -1)
        if is_relative or os.fspath(arguments[0] if not isinstance(arguments[0], int) else "").startswith(inside):
            count[0] += 1
            if count[0] == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return count


def main(
    directory: str,
    *,
    fit: dict[str, Any],
    hidden: int = 128,
    best: str = "best",
    checkpoint: dict[str, Any] = {},  # noqa: B006 (only read)
    die_at_file_event: int | None = None,
    devices: int = 1,
    kind: str = "linen",
    place: str | None = None,
    part_bytes: int | None = None,
) -> None:
    jax.config.update("jax_num_cpu_devices", devices)
    warnings.simplefilter("error")
    warnings.filterwarnings("default", "Resuming: skipped a damaged checkpoint|No checkpoint in .* is intact", FitflaxWarning)
    # TensorBoard's writer imports PyTorch if it is installed, which would take longer than everything else.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    root = pathlib.Path(directory)
    where = place or directory  # A URL replaces the directory.
    if part_bytes is not None:
        parts.PART_BYTES = part_bytes
    file_events = count_file_events(root, die_at_file_event)
    parallel = DataParallel(jax.devices()[:1]) if devices == 1 else Sharded({"data": devices}, fsdp=True, fsdp_min_size=64)
    network = Network(hidden) if kind == "linen" else NNXNetwork(hidden, nnx.Rngs(3))
    trainer = fitflax.Trainer(network, seed=3, parallel=parallel)
    trainer.compile("adam", "sparse_categorical_crossentropy", ["accuracy"], learning_rate=0.02)
    best_checkpoint = BestCheckpoint(f"{where}/{best}", keep=2, **checkpoint)
    early = EarlyStopping("val_loss", patience=10)
    tally = Tally()
    steps = fitflax.every(steps=SAVE_STEPS)
    history = trainer.fit(
        examples(STEPS_PER_EPOCH * BATCH_SIZE - 5, seed=1),
        batch_size=BATCH_SIZE,
        validation_data=examples(4 * VALIDATION_BATCH_SIZE + 7, seed=2),
        validation_batch_size=VALIDATION_BATCH_SIZE,
        validation_freq=fitflax.every(steps=VALIDATE_STEPS) | fitflax.every(epochs=1),
        verbose=0,
        resume="auto",
        callbacks=[
            LambdaCallback(
                on_train_begin=lambda logs: say("began", trainer.step),
                on_train_batch_end=lambda batch, logs: say("step", trainer.step),
                on_test_begin=lambda logs: say("validating", trainer.step),
                on_epoch_end=lambda epoch, logs: say("epoch", trainer.step),
                on_train_end=lambda logs: say("ending", trainer.step),
            ),
            tally,
            early,
            ReduceLROnPlateau("val_loss", patience=3, factor=0.5),
            CSVLogger(f"{where}/log.csv"),
            TensorBoard(f"{where}/tensorboard", every=fitflax.every(steps=10), histograms=fitflax.every(steps=HISTOGRAM_STEPS)),
            ModelCheckpoint(f"{where}/checkpoints", every=steps | fitflax.every(epochs=1), keep=3, keep_every=5 * SAVE_STEPS, **checkpoint),
            best_checkpoint,
        ],
        **fit,
    )
    result = {
        "step": trainer.step,
        "state": {path: list(map(str, leaf)) for path, leaf in state_of(trainer).items()},
        "history": rows_of(history),
        "stop_reason": trainer.stop_reason,
        "learning_rate": float(trainer.learning_rate).hex(),
        "best": [best_checkpoint.best.hex(), best_checkpoint.best_step],
        "tally": [tally.chain, tally.norms.tobytes().hex(), tally.best],
    }
    (root / "result.json").write_text(json.dumps({**result, "file_events": file_events[0]}))


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    main(arguments.pop("directory"), **arguments)
