"""A training script that test_many_processes.py starts in one process or in several: `python tests/many_processes_script.py '{"port": ..., "index": 0, ...}'`.

It always has four devices in all, so that results are comparable, and prints what it has at the end as one line of JSON.
"""

import json
import sys
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn

import fitflax
from fitflax import parallel
from fitflax.callbacks import BestCheckpoint, CSVLogger, LambdaCallback, ModelCheckpoint
from fitflax.errors import FitflaxError

DEVICES = 4


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.relu(nn.Dense(32)(x))
        return nn.Dense(4)(x)


def examples(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 16)).astype(np.float32), rng.integers(0, 4, rows).astype(np.int32)


def main(*, kind: str, count: int = 1, index: int = 0, port: int = 0, directory: str | None = None, steps: int = 12, differ: bool = False) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    if count > 1:
        parallel.initialize(f"127.0.0.1:{port}", count, index)
    strategies: dict[str, Any] = {
        "data parallel": parallel.DataParallel,
        "tensor": lambda: parallel.Sharded({"data": 1, "model": 4}, fsdp="model", fsdp_min_size=64),
        "fsdp": lambda: parallel.Sharded({"data": -1}, fsdp=True, fsdp_min_size=64),
        "mesh": lambda: parallel.Sharded({"data": 2, "model": 2}, rules=[("batch", "data")], fsdp="model", fsdp_min_size=64),
    }
    trainer = fitflax.Trainer(Network(), parallel=strategies[kind]())
    trainer.compile(optax.adam(0.01), "sparse_categorical_crossentropy", ["accuracy"])
    x, y = examples(90)
    callbacks: list[Any] = [LambdaCallback(on_train_batch_end=lambda batch, logs: print("step", trainer.step, flush=True))]
    if directory is not None:
        callbacks += [
            ModelCheckpoint(f"{directory}/checkpoints", every=fitflax.every(steps=4)),
            BestCheckpoint(f"{directory}/best"),
            CSVLogger(f"{directory}/log.csv"),
        ]
    shifted = np.roll(x, index if differ else 0, axis=0)
    history = trainer.fit(
        shifted, y, batch_size=32, steps=steps, validation_data=(x[:50], y[:50]), callbacks=callbacks, resume=None if directory is None else "auto", verbose=2
    )
    outputs = trainer.predict(x[:41], batch_size=16)
    result = {
        "step": trainer.step,
        "history": {key: list(map(float, values)) for key, values in history.history.items()},
        "evaluation": trainer.evaluate(x, y, batch_size=24, verbose=0),
        "outputs": [list(outputs.shape), float(np.abs(outputs).sum()), outputs[:, 0].tolist()],
        "norm": float(optax.tree.norm(trainer.state.params)),
        "processes": jax.process_count(),
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    try:
        main(**json.loads(sys.argv[1]))
    except FitflaxError as error:
        print(f"ERROR {type(error).__name__}: {error}", flush=True)
        sys.exit(3)
