"""Trains for very many steps or epochs with everything that a run usually has, and prints memory and time at intervals as JSON.

`python tests/soak_script.py STEPS STEPS_PER_CALL EPOCHS DIRECTORY`; run by test_soak.py.
"""

import itertools
import json
import math
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np
from flax import linen as nn
from typing_extensions import override

import fitflax
from fitflax import callbacks


class Resident(callbacks.Callback):
    """Records the time, and the lowest resident memory of the process in MB, for each twentieth of a run of `epochs` epochs.

    The lowest, because a save that is in progress at the end of an epoch holds a few MB for a moment.
    """

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self._every = epochs // 20
        self._lowest = math.inf
        self.megabytes: list[float] = []
        self.times = [time.perf_counter()]

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        self._lowest = min(self._lowest, pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
        if (epoch + 1) % self._every == 0:
            self.megabytes.append(self._lowest)
            self.times.append(time.perf_counter())
            self._lowest = math.inf


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        return nn.Dense(1)(nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(8)(x))))


def main(steps: int, steps_per_call: int, epochs: int, directory: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4096, 4)).astype(np.float32)
    y = (x @ rng.normal(size=(4, 1))).astype(np.float32)
    trainer = fitflax.Trainer(Net())
    trainer.compile("adam", "mse", metrics=["mae"], steps_per_call=steps_per_call)
    resident = Resident(epochs)
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
    trainer.fit(x, y, batch_size=8, steps=steps, steps_per_epoch=steps // epochs, validation_data=(x[:64], y[:64]), callbacks=listed)
    seconds = [end - begin for begin, end in itertools.pairwise(resident.times)]
    files = [path.relative_to(directory).as_posix() for path in pathlib.Path(directory).rglob("*") if path.is_file()]
    print(json.dumps({"megabytes": resident.megabytes, "seconds": seconds, "files": sorted(files)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
