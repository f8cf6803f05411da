"""Exports a model and hunts a NaN in one process or in several, for test_split_state.py."""

import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import export as jax_export

import fitflax
from fitflax import parallel


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(4)(nn.relu(nn.Dense(64)(x)))


def loss(outputs: Any, targets: Any) -> Any:
    return jnp.mean(jnp.log(targets) * outputs**2, axis=-1)  # NaN for a negative target.


def main(*, kind: str, directory: str, count: int, index: int, port: int) -> None:
    jax.config.update("jax_num_cpu_devices", 4 // count)
    if count > 1:
        parallel.initialize(f"127.0.0.1:{port}", count, index)
    strategy = parallel.Sharded({"data": -1}, fsdp=True, fsdp_min_size=64) if kind == "fsdp" else parallel.DataParallel()
    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    y = np.ones((16, 4), np.float32)
    y[13] = -1.0  # In the last batch.
    trainer = fitflax.Trainer(Network(), parallel=strategy)
    trainer.compile("sgd", loss, learning_rate=0.0)
    trainer.build((x, y))
    path = pathlib.Path(directory, f"{kind}-{count}.jaxexport")
    assert trainer.export(path, sample=x) == path and path.is_file()  # In each process, when the call returns.
    outputs = jax_export.deserialize(bytearray(path.read_bytes())).call(x)
    error = float(np.abs(np.asarray(outputs) - trainer.predict(x)).max())
    fault = ""
    try:
        trainer.export(directory, sample=x)
    except fitflax.errors.FitflaxError as failure:
        fault = f"{type(failure).__name__}: {failure}"
    report = trainer.hunt_nan(x, y, batch_size=4, shuffle=False)
    assert report is not None and all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(report.state.params))
    norm = float(sum(np.abs(leaf).sum() for leaf in jax.tree.leaves(report.state.params)))
    print("RESULT " + json.dumps({"error": error, "fault": fault, "report": str(report), "step": report.step, "norm": norm}), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
