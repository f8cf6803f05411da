"""Saves and loads weights in one process or in several, for test_weights_in_processes.py."""

import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np
from flax import linen as nn

import fitflax
from fitflax import parallel
from fitflax.errors import FitflaxError


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(4)(nn.relu(nn.Dense(64)(x)))


def main(*, kind: str, directory: str, count: int, index: int, port: int) -> None:
    jax.config.update("jax_num_cpu_devices", 4 // count)
    if count > 1:
        parallel.initialize(f"127.0.0.1:{port}", count, index)
    strategy = parallel.Sharded({"data": -1}, fsdp=True, fsdp_min_size=64) if kind == "fsdp" else parallel.DataParallel()
    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    trainer = fitflax.Trainer(Network(), parallel=strategy)
    trainer.compile("adam", "mse")
    trainer.build((x, x[:, :4]))
    path = trainer.save_weights(f"{directory}/{kind}-{count}/model.safetensors", max_shard_bytes=3000)
    assert path.is_file()  # In each process, when the call returns.
    before = trainer.predict(x)
    trainer.fit(x, x[:, :4], steps=2, verbose=0)
    report = trainer.load_weights(path if kind == "fsdp" else f"{directory}/{kind}-{count}")
    same = bool(np.array_equal(before, trainer.predict(x)))
    fault = ""
    if kind == "fsdp":
        pathlib.Path(directory, "taken.safetensors").mkdir(exist_ok=True)
        try:
            trainer.save_weights(f"{directory}/taken.safetensors")
        except FitflaxError as error:
            fault = str(error)
    print("RESULT " + json.dumps({"path": str(path), "restored": len(report.restored), "same": same, "fault": fault}), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
