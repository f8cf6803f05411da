"""What the peers train: sizes, data and initial parameters in NumPy, the same for every framework. `peers/` has the models, one module per framework."""

import dataclasses
import math
import pathlib
import runpy
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

SEED = 0
LEARNING_RATES = {"adam": 1e-3, "sgd": 1e-2}
DIGITS = pathlib.Path(__file__).resolve().parent.parent / "examples" / "digits.py"  # Needs scikit-learn.


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model by its kind and sizes, and how it is trained.

    Args:
        name: The name on the command line.
        kind: The model: `dense`, `cnn`, `lm`, `leaves` or `digits`.
        sizes: The sizes of the model and its data.
        batch_size: Examples per batch.
        steps: Batches per pass over the data; a multiple of 16, for calls of 16 steps.
        passes: Passes per timed stretch.
        rounds: Number of rounds, unless the command line sets it.
        optimizer: `adam` or `sgd`.
        about: The description in the table.
    """

    name: str
    kind: str
    sizes: dict[str, Any]
    batch_size: int
    steps: int
    passes: int
    rounds: int
    about: str
    optimizer: str = "adam"

    @property
    def rows(self) -> int:
        return self.batch_size * self.steps

    @property
    def learning_rate(self) -> float:
        return LEARNING_RATES[self.optimizer]


ALL = (
    Workload("tiny", "dense", {"inputs": 8, "hidden": (8,)}, 8, 1024, 2, 15, "8-8-10, batch 8: only overhead"),
    Workload("mlp", "dense", {"inputs": 784, "hidden": (64,)}, 64, 512, 2, 15, "784-64-10, batch 64"),
    Workload("cnn", "cnn", {"side": 28, "features": 32}, 32, 32, 1, 7, "28 x 28, convolutions of 32 and 64, one hidden layer, batch 32"),
    Workload(
        "lm",
        "lm",
        {"vocabulary": 256, "length": 64, "width": 128, "heads": 4, "blocks": 2},
        *(16, 32, 1, 7),
        "transformer: two blocks, width 128, 4 heads, 64 tokens, batch 16",
    ),
    Workload("wide", "dense", {"inputs": 1024, "hidden": (4096, 4096, 1024)}, 8, 16, 1, 7, "100 MB of float32 in 8 parameters, batch 8"),
    Workload("many_leaves", "leaves", {"inputs": 4, "pairs": 999}, 8, 64, 1, 7, "2000 small parameters, SGD, batch 8", "sgd"),
    Workload("digits", "digits", {"features": 32}, 64, 16, 20, 9, "the CNN of examples/digits.py, batch 64: the cost of callbacks"),
)
NAMES = tuple(workload.name for workload in ALL)
SMALL_SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"inputs": 16, "hidden": (8,)},
    "cnn": {"side": 8, "features": 2},
    "lm": {"vocabulary": 16, "length": 8, "width": 8, "heads": 2, "blocks": 1},
    "wide": {"inputs": 16, "hidden": (32, 32, 16)},
    "many_leaves": {"inputs": 4, "pairs": 9},
    "digits": {"features": 2},
}


def make_workload(name: str, *, small: bool = False) -> Workload:
    """Returns a workload. A small one runs within seconds, to try the benchmark itself."""
    (workload,) = (each for each in ALL if each.name == name)
    if not small:
        return workload
    return dataclasses.replace(workload, sizes=SMALL_SIZES.get(name, workload.sizes), steps=min(workload.steps, 64), passes=1)


def make_data(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and labels that can be learned: those of a random linear map, or the next tokens of a random walk."""
    rng, sizes = np.random.default_rng(SEED), workload.sizes
    if workload.kind == "digits":
        x, y = runpy.run_path(str(DIGITS))["load"]()[0]
        return x[: workload.rows], y[: workload.rows]
    if workload.kind == "lm":
        walk = rng.integers(0, sizes["vocabulary"], (workload.rows, 1)) + rng.integers(-2, 3, (workload.rows, sizes["length"] + 1)).cumsum(axis=1)
        tokens = (walk % sizes["vocabulary"]).astype(np.int32)
        return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
    shape = (sizes["side"], sizes["side"], 1) if workload.kind == "cnn" else (sizes["inputs"],)
    x = rng.random((workload.rows, *shape), np.float32) - 0.5
    return x, (x.reshape(workload.rows, -1) @ rng.standard_normal((math.prod(shape), 10), np.float32)).argmax(-1).astype(np.int32)


def order(number: int, rows: int) -> np.ndarray:
    """Returns the order of examples in pass `number`, the same as in `fit`."""
    return np.random.default_rng([SEED, number]).permutation(rows)


def batches(x: np.ndarray, y: np.ndarray, rows: int, order: np.ndarray | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the inputs and labels of `rows` examples at a time, in `order`, or unshuffled if it is `None`."""
    for begin in range(0, len(x), rows):
        if order is None:
            yield x[begin : begin + rows], y[begin : begin + rows]
        else:
            chosen = order[begin : begin + rows]
            yield x.take(chosen, 0), y.take(chosen, 0)  # Faster than x[chosen] for few rows.


def initial(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the initial value of a parameter. `path` is its name in linen, such as `head/kernel`, and `shape` is its shape in linen."""
    kind = path.rpartition("/")[2]
    if kind in {"bias", "scale"}:
        return np.full(shape, float(kind == "scale"), np.float32)
    bound = {"kernel": math.sqrt(3 / math.prod(shape[:-1])), "embedding": 0.1, "table": 0.1}.get(kind, 1.0)
    return (np.random.default_rng(zlib.crc32(path.encode())).random(shape, np.float32) * 2 - 1) * np.float32(bound)
