"""Trains a digit classifier in as many processes as a scheduler starts: with `slurm.sbatch`, the Kubernetes manifests, or without a scheduler.

An interrupted run resumes when the script is run again, and ends with bit-for-bit identical parameters.
"""

import argparse
import os
import pathlib
import signal

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import fitflax
from fitflax.callbacks import LambdaCallback, ModelCheckpoint, PreemptionNotice


class Classifier(nn.Module):
    """Two hidden layers with dropout."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        for width in (128, 64):
            x = nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(width)(x)))
        return nn.Dense(10)(x)


def join_others() -> None:
    """Joins the other processes of the job. Slurm is detected; for Kubernetes, the manifests set environment variables."""
    if "COORDINATOR_ADDRESS" in os.environ:
        fitflax.parallel.initialize(
            os.environ["COORDINATOR_ADDRESS"],
            num_processes=int(os.environ["NUM_PROCESSES"]),
            process_id=int(os.environ["JOB_COMPLETION_INDEX"]),
            initialization_timeout=3600,  # A pod may have to wait for a node.
            cluster_detection_method="deactivate",  # JAX's detection would need the package kubernetes.
        )
    else:
        fitflax.parallel.initialize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="runs/cluster", help="on storage that all processes share, or the URL of a bucket")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    join_others()
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    trainer = fitflax.Trainer(Classifier(), seed=options.seed)
    trainer.compile(optax.adamw(1e-3), loss="softmax_cross_entropy_with_integer_labels", metrics=["accuracy"])
    checkpoint = ModelCheckpoint(f"{options.directory}/checkpoints", every=fitflax.every(steps=200) | fitflax.every(seconds=300))
    # SIGTERM needs no callback. This one is for another signal from Slurm, `--signal=USR1@300`. For a cloud's notice, use PreemptionNotice("aws") or ("gce").
    callbacks = [checkpoint, PreemptionNotice(signal.SIGUSR1)]
    if alive := os.environ.get("ALIVE"):  # For the liveness probe of Kubernetes.
        callbacks.append(LambdaCallback(on_epoch_end=lambda epoch, logs: pathlib.Path(alive).touch()))
    trainer.fit(x[300:], y[300:], batch_size=64, steps=options.steps, callbacks=callbacks, resume="auto", verbose=2)
    accuracy = trainer.evaluate(x[:300], y[:300], verbose=0)["accuracy"]
    if jax.process_index() == 0:
        print(f"seed {options.seed}: accuracy {accuracy:.3f} on 300 images", flush=True)


if __name__ == "__main__":
    main()
