"""Trains a digit classifier with Ray Train.

python examples/ray_train.py [--directory runs/ray_train] [--workers 2] [--epochs 20] [--gpus 0]

On one machine, this starts Ray, with two workers on the CPU. On a cluster:

* Submit it with `ray job submit -- python ray_train.py --directory s3://bucket/runs --workers 8 --gpus 8`. Install fitflax and scikit-learn on all nodes.
* `--directory` must be storage that all nodes share: a network file system or a bucket.
* `--gpus 8` gives each worker eight GPUs. Start one worker per node, with all of its GPUs: with Ray 2.60, several workers on a node use the same GPUs. For
  TPUs, set `use_tpu`, `topology` and `accelerator_type` in `ScalingConfig`.

If a worker or a node is lost, all workers restart from the latest checkpoint. If the driver is lost, run the script again to resume the run.
"""

import argparse
import pathlib
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

from fitflax.integrations.ray import checkpoint_path


def train(config: dict[str, Any]) -> None:
    """Trains in each worker. JAX is imported here, so that the driver does not take a device."""
    import numpy as np
    import optax
    from flax import linen as nn
    from sklearn.datasets import load_digits

    import fitflax
    from fitflax.callbacks import ModelCheckpoint
    from fitflax.integrations.ray import RayReport

    fitflax.parallel.initialize()
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    trainer = fitflax.Trainer(nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(10)]))
    trainer.compile(optax.adamw(config["learning_rate"]), loss="softmax_cross_entropy_with_integer_labels", metrics=["accuracy"])
    checkpoint = ModelCheckpoint(f"{config['storage']}/checkpoints", every=fitflax.every(epochs=2))
    # A report takes one or two seconds, because Ray collects reports about once a second.
    report = RayReport(every=fitflax.every(epochs=5), checkpoint=checkpoint)
    options = {"batch_size": 64, "epochs": config["epochs"], "validation_data": (x[:300], y[:300])}
    trainer.fit(x[300:], y[300:], callbacks=[checkpoint, report], resume="auto", verbose=0, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="runs/ray_train", help="a directory that all nodes share, or the URL of a bucket")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs per worker")
    options = parser.parse_args()
    storage = options.directory if "://" in options.directory else str(pathlib.Path(options.directory).absolute())
    ray.init(log_to_driver=False)
    environment = {} if options.gpus else {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": "8"}
    resources = {"GPU": options.gpus} if options.gpus else {"CPU": 1}
    trainer = JaxTrainer(
        train,
        train_loop_config={"learning_rate": 1e-3, "epochs": options.epochs, "storage": storage},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=bool(options.gpus), resources_per_worker=resources),
        run_config=RunConfig(name="digits", storage_path=storage, failure_config=FailureConfig(max_failures=10), worker_runtime_env={"env_vars": environment}),
    )
    result = trainer.fit()
    print(f"accuracy on 300 images: {result.metrics['val_accuracy']:.3f}")
    print(f"checkpoint: {checkpoint_path(result.checkpoint)}")


if __name__ == "__main__":
    main()
