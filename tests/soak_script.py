"""Trains for very many steps with all that a run usually has, and writes down how much memory the process holds as it goes; run by test_soak.py."""

import json
import os
import pathlib
import sys
from typing import Any

import numpy as np
from flax import linen as nn
from typing_extensions import override

import fitflax
from fitflax import callbacks

EPOCHS = 40  # However many steps: a history grows with the epochs, and may.


class Resident(callbacks.Callback):
    """Notes the process's resident memory, in MB, twenty times in a run."""

    def __init__(self) -> None:
        super().__init__()
        self.megabytes: list[float] = []

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch % 2 == 1:
            pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
            self.megabytes.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        return nn.Dense(1)(nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(8)(x))))


def main(steps: int, steps_per_call: int, directory: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4096, 4)).astype(np.float32)
    y = (x @ rng.normal(size=(4, 1))).astype(np.float32)
    trainer = fitflax.Trainer(Net())
    trainer.compile("adam", "mse", metrics=["mae"], steps_per_call=steps_per_call)
    resident = Resident()
    listed = [
        resident,
        callbacks.ProgressBar(),
        callbacks.ModelCheckpoint(f"{directory}/checkpoints", every=fitflax.every(steps=steps // 100), keep=2),
        callbacks.BestCheckpoint(f"{directory}/best", monitor="val_loss"),
        callbacks.TensorBoard(f"{directory}/tensorboard"),
        callbacks.CSVLogger(f"{directory}/log.csv"),
        callbacks.EarlyStopping(monitor="val_loss", patience=10**6),
        callbacks.TerminateOnNaN(),
    ]
    trainer.fit(x, y, batch_size=8, steps=steps, steps_per_epoch=steps // EPOCHS, validation_data=(x[:64], y[:64]), callbacks=listed)
    print(json.dumps(resident.megabytes))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
