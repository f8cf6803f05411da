"""Outputs, targets and weights of some rows. Cuts rows into padded batches and merges their metrics, as the loop does, for the tests of all metrics."""

import functools
from typing import Any

import jax
import numpy as np

RNG = np.random.default_rng(0)
ROWS, CLASSES = 23, 7
LOGITS = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32)
LABELS = RNG.integers(CLASSES, size=ROWS)
ONE_HOT = np.eye(CLASSES, dtype=np.float32)[LABELS]
BINARY = (RNG.random((ROWS, CLASSES)) < 0.5).astype(np.float32)
VALUES = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32)
WEIGHTS = RNG.uniform(0.1, 3.0, size=ROWS).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    exp = np.exp(x.astype(np.float64))
    return exp / exp.sum(-1, keepdims=True)


@jax.jit
def one_batch(metric: Any, outputs: Any, targets: Any, weights: Any) -> Any:
    return metric.empty().update(outputs, targets, weights)


@jax.jit
def merged(metric: Any, other: Any) -> Any:
    return metric.merge(other)


def over_batches(metric: Any, outputs: Any, targets: Any, weights: Any, *, size: int, order: str = "left", compiled: bool = True) -> Any:
    """Returns a metric merged over padded batches. Padding has weight 0, and its outputs are NaN to show that they are not used."""
    update = one_batch if compiled else one_batch.__wrapped__
    # A metric that collects rows changes its shapes with every merge, so it is merged on the host with NumPy.
    merge = merged if compiled and not metric.collect else merged.__wrapped__
    parts = []
    for begin in range(0, len(outputs), size):
        take = np.minimum(np.arange(begin, begin + size), len(outputs) - 1)
        padding = np.arange(begin, begin + size) >= len(outputs)
        batch = np.array(outputs[take], np.float32)
        batch[padding] = np.nan
        weight = np.array(weights[take], np.float32)
        weight[padding] = 0
        part = update(metric, batch, targets[take], weight)
        parts.append(jax.tree.map(np.asarray, part) if metric.collect else part)
    if order == "right":
        return functools.reduce(lambda done, part: merge(part, done), reversed(parts), metric.empty())
    if order == "tree":
        while len(parts) > 1:
            parts = [functools.reduce(merge, parts[i : i + 2]) for i in range(0, len(parts), 2)]
        return parts[0]
    return functools.reduce(merge, parts, metric.empty())
