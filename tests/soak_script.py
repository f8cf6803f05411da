"""Trains for very many steps or epochs with everything that a run usually has, and prints memory and time at intervals as JSON.

`python tests/soak_script.py STEPS STEPS_PER_CALL EPOCHS DIRECTORY`; run by test_soak.py.
"""

import itertools
import json
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
    """Records the process's resident memory, in MB, and the time twenty times in a run of `epochs` epochs."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self._every = epochs // 20
        self.megabytes: list[float] = []
        self.times = [time.perf_counter()]

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if (epoch + 1) % self._every == 0:
            pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
            self.megabytes.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
            self.times.append(time.perf_counter())


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
