"""Compares checkpoints in an object store with bare transfers of the same bytes by the same library, on a local S3 server.

    python -m benchmarks.object_store                  # 256 MB, about two minutes; needs moto
    python -m benchmarks.object_store --quick          # only to check that it runs
    python -m benchmarks.object_store --url s3://bucket/prefix   # a real store, with credentials from the environment

`save` writes a checkpoint, including checksums and commit; the base is one multipart upload. `restore` reads it into arrays and verifies it; the base is one
download and its crc32. Ratios are times divided by the base's time: at 1, fitflax is as fast as the bare library.

`--pause` measures instead how long a save stops the steps of `fit`, with checkpoints and logs on the local disk and in the bucket. Requests to a local server
are delayed by 30 ms.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import obstore
from flax import linen as nn
from typing_extensions import override

import fitflax
from fitflax.callbacks import Callback, CSVLogger, ModelCheckpoint, TensorBoard
from fitflax.checkpoints.resume import load_checkpoint
from fitflax.checkpoints.save import save_checkpoint
from fitflax.errors import ConfigError
from fitflax.storage import ObjectPath, locate

LIMIT = 1 / 0.8


@contextlib.contextmanager
def server(url: str | None, *, delay: float = 0.0) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yields a URL and options: the given URL, or that of a server that is started here, with delayed responses."""
    if url is not None:
        yield url, None
        return
    from tests.storage.servers import FaultProxy, S3Server  # moto, in a separate process

    with S3Server() as started, contextlib.ExitStack() as stack:
        options = started.storage_options
        if delay:
            proxy = stack.enter_context(FaultProxy(started.endpoint))
            proxy.delay(delay, times=None)
            options = proxy.through(options, started)
        yield f"{started.create_bucket('benchmark')}/run", options


def timed(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measure(place: ObjectPath, options: dict[str, Any] | None, megabytes: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Returns, for each round, fitflax's time over the mean of the base's times before and after it, and fitflax's time in seconds."""
    count = max(1, megabytes // 4)
    rng = np.random.default_rng(0)
    state = {f"layer_{index}": rng.random(2**20 if megabytes >= 4 else 2**10, np.float32) for index in range(count)}
    data = b"".join(array.tobytes() for array in state.values())
    store = place.bucket._store  # The connection that fitflax uses.
    bare = f"{place.key}/bare"

    def put() -> None:
        obstore.put(store, bare, data, chunk_size=2**25 if megabytes > 64 else 2**23, max_concurrency=4)

    def get() -> None:
        zlib.crc32(obstore.get(store, bare).bytes())

    def save() -> None:
        save_checkpoint(place / "checkpoint", train=state, run={}, metadata={"step": 1}, storage_options=options)

    def restore() -> None:
        load_checkpoint(place / "checkpoint", storage_options=options)

    found: dict[str, list[tuple[float, float]]] = {"save": [], "restore": []}
    for _ in range(rounds + 1):
        for name, base, ours in (("save", put, save), ("restore", get, restore)):
            before, mine, after = timed(base), timed(ours), timed(base)
            found[name].append((2 * mine / (before + after), mine))
    return {name: measured[1:] for name, measured in found.items()}  # The first round warms up.


class Pauses(Callback):
    """Measures the time from the end of a step to the beginning of the next one, if a checkpoint is saved between them."""

    def __init__(self, steps: int) -> None:
        self._steps, self._begin = steps, 0.0
        self.seconds: list[float] = []

    @override
    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        if self._begin and self.trainer.step % self._steps == 0 and self.trainer.step > self._steps:  # The first save creates the directory.
            self.seconds.append(time.perf_counter() - self._begin)

    @override
    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        jax.block_until_ready(self.trainer.state)
        self._begin = time.perf_counter()


def measure_pauses(root: str, options: dict[str, Any] | None, *, width: int, saves: int) -> list[float]:
    """Returns the pause of each save in seconds, for a run whose checkpoints and logs are below a directory or URL."""
    rng, steps, epochs = np.random.default_rng(0), 100, 5  # Many steps between saves, so that the previous save is complete.
    x, y = rng.random((32 * steps, width), np.float32), rng.integers(0, 10, 32 * steps)
    model = nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(10)])
    trainer = fitflax.Trainer(model, seed=0)
    trainer.compile("adam", "sparse_categorical_crossentropy", ["accuracy"])
    pauses = Pauses(steps * epochs)
    logs = [TensorBoard(f"{root}/board", storage_options=options), CSVLogger(f"{root}/log.csv", storage_options=options)]
    save = ModelCheckpoint(f"{root}/checkpoints", every=fitflax.every(epochs=epochs), keep=1, storage_options=options)
    trainer.fit(x, y, batch_size=32, epochs=(saves + 1) * epochs, callbacks=[pauses, *logs, save], verbose=0)
    return pauses.seconds


def print_pauses(url: str, options: dict[str, Any] | None, *, rounds: int, width: int, saves: int) -> None:
    """Prints the pause of a save on the disk and in the bucket, measured alternately."""
    found: dict[str, list[float]] = {"local disk": [], "bucket": []}
    for index in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            found["local disk"] += measure_pauses(directory, None, width=width, saves=saves)
        found["bucket"] += measure_pauses(f"{url}/{index}", options, width=width, saves=saves)
    print("| checkpoints and logs | pause of a save: median (lowest..highest), ms |\n|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {1000 * statistics.median(seconds):.1f} ({1000 * min(seconds):.1f}..{1000 * max(seconds):.1f}) |")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python -m benchmarks.object_store")
    parser.add_argument("--url", help="a prefix in a bucket; by default, a local server is started")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[256], help="sizes of the checkpoint in MB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 MB and one round")
    parser.add_argument("--pause", action="store_true", help="measure how long a save stops training, on the disk and in the bucket")
    options = parser.parse_args(argv)
    if options.pause:
        with server(options.url, delay=0.03) as (url, storage_options):
            print_pauses(url, storage_options, rounds=options.rounds, width=64 if options.quick else 1024, saves=2 if options.quick else 10)
        return 0
    sizes, rounds = ([2], 1) if options.quick else (options.megabytes, options.rounds)
    print("| size | operation | fitflax / bare transfer | MB/s | limit | verdict |\n|---|---|---|---|---|---|")
    with server(options.url) as (url, storage_options):
        place = locate(url, owner="benchmark", error=ConfigError, options=storage_options)
        assert isinstance(place, ObjectPath)
        for megabytes in sizes:
            found = measure(place, storage_options, megabytes, rounds)
            place.bucket.delete([info.key for info in place.objects()])
            for name, measured in found.items():
                ratios = [ratio for ratio, _ in measured]
                median, speed = statistics.median(ratios), megabytes / statistics.median(seconds for _, seconds in measured)
                verdict = "ok" if median <= LIMIT else "over"
                print(f"| {megabytes} MB | {name} | {median:.2f} ({min(ratios):.2f}..{max(ratios):.2f}) | {speed:.0f} | {LIMIT:.2f} | {verdict} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
