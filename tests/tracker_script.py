"""Trains a small network and logs it; tests start, kill and restart it.

`python tracker_script.py DIRECTORY TRACKER STEPS`, where TRACKER is the address of an MLflow server, or "wandb". It prints `step N` after each step, and
`run ID` at the end.
"""

import pathlib
import sys
import time
import warnings

import numpy as np
from flax import linen as nn

import fitflax
from fitflax.callbacks import Callback, ModelCheckpoint


class Net(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(self.width)(x)))


class PrintStep(Callback):
    def on_train_batch_end(self, batch, logs):
        print(f"step {self.trainer.step}", flush=True)
        time.sleep(0.004)  # So that there is time to kill it.


def main(directory, tracker, steps):
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", category=fitflax.errors.FitflaxWarning)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 8)).astype(np.float32)
    y = (np.abs(x).sum(1) * 1.5 % 3).astype(np.int32)
    every = fitflax.every(steps=3)
    if tracker == "wandb":
        from fitflax.integrations.wandb import WandbLogger

        logger = WandbLogger("tests", mode="offline", directory=directory, every=every, interval=0.05, options={"settings": {"silent": True}})
    else:
        from fitflax.integrations.mlflow import MLflowLogger

        logger = MLflowLogger("tests", tracking_uri=tracker, every=every, interval=0.05, end_seconds=600)
    trainer = fitflax.Trainer(Net())
    trainer.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], learning_rate=0.01)
    callbacks = [logger, ModelCheckpoint(pathlib.Path(directory, "checkpoints"), every=fitflax.every(steps=25)), PrintStep()]
    trainer.fit(x, y, batch_size=20, steps=steps, validation_data=(x[:50], y[:50]), callbacks=callbacks, resume="auto", verbose=0)
    print(f"run {logger.run_id}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
