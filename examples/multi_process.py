"""Trains on handwritten digits in several processes on one machine, which works the same on several machines: one process is killed, and all resume.

python examples/multi_process.py [--directory runs/multi_process] [--processes 2] [--epochs 12] [--no-kill]

On a cluster, the scheduler starts the processes, each process runs the code of `train`, and `fitflax.parallel.initialize()` needs no arguments.
"""

import argparse
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import fitflax
from fitflax.callbacks import CSVLogger, ModelCheckpoint
from fitflax.data import Shard


class Network(nn.Module):
    """Returns logits `[batch, 10]` for images `[batch, 64]`."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x)))


def train(directory: pathlib.Path, port: int, processes: int, index: int, epochs: int, verbose: int) -> None:
    """Runs in each process: reads this process's shard of the digits, and trains together with the other processes."""
    # By default, a lost process is noticed only after half a minute. On one machine, a shorter time is enough.
    fitflax.parallel.initialize(f"127.0.0.1:{port}", processes, index, heartbeat_timeout_seconds=10)
    images, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(images.astype("float32") / 16, labels.astype("int32"), test_size=0.2, random_state=0)
    # Each process has its own shard. All processes could instead read the same arrays: fit(x_train, y_train) would then split each batch.
    own = slice(index, None, processes)
    trainer = fitflax.Trainer(Network())
    trainer.compile("adam", "sparse_categorical_crossentropy", ["accuracy"])
    trainer.fit(
        Shard((x_train[own], y_train[own])),
        epochs=epochs,
        batch_size=32 * processes,  # The global batch size, over all processes.
        validation_data=Shard((x_test[own], y_test[own])),
        callbacks=[ModelCheckpoint(directory / "checkpoints"), CSVLogger(directory / "log.csv")],
        resume="auto",
        verbose=verbose,
    )
    accuracy = trainer.evaluate(Shard((x_test[own], y_test[own])), verbose=0)["accuracy"]  # The accuracy on all test images, the same in every process.
    if index == 0:
        (directory / "result.json").write_text(json.dumps({"accuracy": accuracy}))


def start(directory: pathlib.Path, processes: int, epochs: int, verbose: int) -> list[subprocess.Popen]:
    """Starts the processes, as the scheduler does on a cluster."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Gives XLA more threads than a machine with few cores would get; with too few, devices may wait for each other.
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": "16"}
    options = ["--directory", str(directory), "--processes", str(processes), "--epochs", str(epochs), "--verbose", str(verbose), "--port", str(port)]
    return [subprocess.Popen([sys.executable, __file__, *options, "--index", str(index)], env=env) for index in range(processes)]


def main(directory: pathlib.Path, *, processes: int = 2, epochs: int = 12, kill: bool = True, verbose: int = 2) -> float:
    """Starts the processes, kills one after the first checkpoint, starts all of them again, and returns the test accuracy."""
    directory.mkdir(parents=True, exist_ok=True)
    running = start(directory, processes, epochs, verbose)
    try:
        while kill and not list((directory / "checkpoints").glob("step_*")) and all(process.poll() is None for process in running):
            time.sleep(0.02)
        if kill:
            print(f"Killing process {processes - 1}. The others cannot continue without it, and exit with an error.", flush=True)
            running[-1].send_signal(signal.SIGKILL)
            begin = time.monotonic()
            codes = [process.wait() for process in running]
            print(f"All processes exited after {time.monotonic() - begin:.0f} s with the codes {codes}. Restarting them.", flush=True)
            running = start(directory, processes, epochs, verbose)
        codes = [process.wait() for process in running]
    finally:
        for process in running:
            process.kill()
    if any(codes):
        raise SystemExit(f"The processes exited with the codes {codes}.")
    result = json.loads((directory / "result.json").read_text())
    print(f"log: {directory / 'log.csv'}")
    print(f"checkpoints: {directory / 'checkpoints'}")
    print(f"test accuracy: {result['accuracy']:.3f}")
    return result["accuracy"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("runs/multi_process"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--no-kill", dest="kill", action="store_false", help="do not kill a process")
    parser.add_argument("--verbose", type=int, default=2)
    parser.add_argument("--index", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.index is None:
        main(options.directory, processes=options.processes, epochs=options.epochs, kill=options.kill, verbose=options.verbose)
    else:
        train(options.directory, options.port, options.processes, options.index, options.epochs, options.verbose)
