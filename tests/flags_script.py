"""A small run with everything that users turn on; tests/test_flags.py runs it under JAX's and Python's debugging options.

`python tests/flags_script.py '{"directory": ..., "devices": 1}'` trains twice, on arrays and on an iterator: validation, all savers and writers, a resume,
evaluation, prediction. It prints the results as JSON.
"""

import hashlib
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn

import fitflax
import fitflax.callbacks as callbacks
from fitflax.parallel import DataParallel

rng = np.random.default_rng(0)
X = rng.normal(size=(44, 8)).astype(np.float32)
Y = rng.integers(0, 3, 44).astype(np.int32)
VALID = (rng.normal(size=(20, 8)).astype(np.float32), rng.integers(0, 3, 20).astype(np.int32))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Dense(16)(x))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(0.2, deterministic=not train)(x)
        self.sow("losses", "small", 1e-3 * (x**2).mean())
        return nn.Dense(3)(x)


def batches():
    for begin in range(0, 44, 8):
        rows = slice(begin, begin + 8)
        yield X[rows], Y[rows], np.ones(len(Y[rows]), np.float32)


def make_trainer(kind: str, options: dict[str, Any]) -> fitflax.Trainer:
    trainer = fitflax.Trainer(Net(), seed=3, parallel=DataParallel(jax.devices()[: options.get("devices", 1)]))
    optimizer: Any = "adam" if kind == "arrays" else optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    if options.get("sgd"):
        optimizer = "sgd" if kind == "arrays" else optax.sgd(1e-3, momentum=0.9)
    trainer.compile(
        optimizer,
        "sparse_categorical_crossentropy",
        ["accuracy", "auc"],
        weighted_metrics=["sparse_categorical_crossentropy"],
        ema_decay=0.9 if kind == "arrays" else None,
        accumulate_steps=1 if kind == "arrays" else 2,
        run_eagerly=options.get("run_eagerly", False),
    )
    return trainer


def fit(kind: str, options: dict[str, Any], epochs: int) -> fitflax.Trainer:
    trainer, run = make_trainer(kind, options), pathlib.Path(options["directory"]) / kind
    run.mkdir(parents=True, exist_ok=True)
    data, batch_size = ((X, Y), 8) if kind == "arrays" else (batches, None)
    with open(run / "bar", "w") as bar:
        given = [
            callbacks.ModelCheckpoint(run / "checkpoints", every=fitflax.every(steps=4)),
            callbacks.BestCheckpoint(run / "best"),
            callbacks.TensorBoard(run / "tensorboard", every=fitflax.every(steps=2), histograms=fitflax.every(epochs=1)),
            callbacks.CSVLogger(run / "log.csv", append=True),
            callbacks.JSONLogger(run / "log.jsonl"),
            callbacks.EarlyStopping(patience=10),
            callbacks.TerminateOnNaN(),
            callbacks.ProgressBar(file=bar),
        ]
        if kind == "arrays":
            given.append(callbacks.LearningRateScheduler(lambda epoch: 1e-3 / (1 + epoch)))
        trainer.fit(data, epochs=epochs, batch_size=batch_size, validation_data=VALID, callbacks=given, resume="auto", log_every=3)
    return trainer


def main(options: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for kind in ("arrays", "iterator"):
        fit(kind, options, 1)
        trainer = fit(kind, options, 2)
        leaves = jax.device_get(jax.tree.leaves((trainer.state.params, trainer.state.model_state)))
        found[kind] = {
            "step": trainer.step,
            "history": trainer.history.history,
            "evaluated": trainer.evaluate(*VALID, batch_size=8, verbose=0),
            "predicted": trainer.predict(VALID[0], batch_size=8).tolist(),
            "single": trainer.test_on_batch((VALID[0][:8], VALID[1][:8])),
            "hash": hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest(),
        }
    if options.get("again"):
        for _ in range(2):
            print("--- again", file=sys.stderr, flush=True)
            trainer.fit(batches, epochs=1, validation_data=VALID, verbose=0)
            trainer.evaluate(*VALID, batch_size=8, verbose=0)
            trainer.predict(VALID[0], batch_size=8)
    return found


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    print("RESULT " + json.dumps(main(options)))
