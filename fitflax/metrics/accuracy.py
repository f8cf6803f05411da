"""Accuracies and perplexity: means of functions of logits and labels."""

from typing import Any

import jax
import jax.numpy as jnp

import fitflax.losses as losses
from fitflax.errors import MetricError
from fitflax.integers import is_integer
from fitflax.losses.shapes import nan_unless
from fitflax.metrics.base import bound
from fitflax.metrics.mean import Mean
from fitflax.metrics.shapes import Targets, arrays, class_labels, same_shape

__all__ = ["Accuracy", "BinaryAccuracy", "Perplexity", "TopKAccuracy", "class_accuracy", "top_k_accuracy"]


def Accuracy(*, name: str = "accuracy") -> Mean:
    """Returns the fraction of examples that are classified correctly, as the shapes imply.

    | outputs | targets | correct if |
    |---|---|---|
    | `[..., classes]` | `[...]` or `[..., 1]` | `argmax(outputs) == targets` |
    | `[..., classes]` | `[..., classes]` | `argmax(outputs) == argmax(targets)` |
    | `[batch]` or `[..., 1]` | `[batch]`, `[...]` or `[..., 1]` | `(outputs > 0) == targets`: logits |

    For several binary labels per example (both `[batch, labels]`), use `BinaryAccuracy`.

    Args:
        name: Log key.

    >>> accuracy = Accuracy().update(jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([1, 1]), jnp.ones(2))
    >>> accuracy.name, accuracy.direction, float(accuracy.compute())
    ('accuracy', 'max', 0.5)
    """
    return Mean(accuracy, name=name, direction="max")


def BinaryAccuracy(*, threshold: float = 0.0, name: str = "binary_accuracy") -> Mean:
    """Returns the fraction of binary targets that are predicted correctly: `(outputs > threshold) == targets`, for each label separately.

    Args:
        threshold: Threshold of the outputs: 0 for logits, 0.5 for probabilities.
        name: Log key.

    >>> metric = BinaryAccuracy().update(jnp.array([[-1.0, 2.0], [3.0, 0.5]]), jnp.array([[0, 1], [1, 0]]), jnp.ones(2))
    >>> float(metric.compute())
    0.75
    """
    return Mean(bound(binary_accuracy, threshold=float(threshold)), name=name, direction="max")


def TopKAccuracy(*, k: int = 5, name: str = "top_k_accuracy") -> Mean:
    """Returns the fraction of examples whose class is among the `k` highest outputs; targets are labels or one-hot rows.

    As in `in_top_k` of Keras, a class is in the top `k` if fewer than `k` others are strictly higher, so ties count as correct. Labels out of range
    never count as correct.

    Args:
        k: Number of outputs, at least 1.
        name: Log key.

    Raises:
        MetricError: `k` is not a positive integer.

    >>> metric = TopKAccuracy(k=2).update(jnp.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), jnp.array([1, 2]), jnp.ones(2))
    >>> float(metric.compute())
    0.5
    """
    if not is_integer(k, 1):
        raise MetricError(f"TopKAccuracy(k=...) must be a positive integer. Received: {k!r}.")
    return Mean(bound(top_k_accuracy, k=int(k), kind="integer or one-hot"), name=name, direction="max")


def Perplexity(*, name: str = "perplexity") -> Mean:
    """Returns `exp` of the mean sparse categorical cross-entropy over all tokens; not the mean of the perplexities of batches.

    Args:
        name: Log key.

    >>> float(Perplexity().update(jnp.zeros((2, 5, 8)), jnp.zeros((2, 5), int), jnp.ones(2)).compute().round(4))
    8.0
    """
    return Mean(losses.sparse_categorical_crossentropy, name=name, direction="min", transform="exp")


def accuracy(outputs: Any, targets: Any) -> jax.Array:
    outputs, targets = arrays(outputs, targets)
    if outputs.ndim < 2 or outputs.shape[-1] == 1:
        return binary_accuracy(outputs, targets, threshold=0.0)
    return class_accuracy(outputs, targets, kind="integer or one-hot")


def binary_accuracy(outputs: Any, targets: Any, *, threshold: float) -> jax.Array:
    outputs, targets = same_shape(outputs, targets)
    return nan_unless(~jnp.isnan(outputs), jnp.equal(outputs > threshold, targets).astype(jnp.float32))


def class_accuracy(outputs: Any, targets: Any, *, kind: Targets) -> jax.Array:
    """Returns 1 if the highest output of each example is its class, else 0."""
    outputs, labels = class_labels(outputs, targets, kind)
    return _nan_for_nan_rows(outputs, jnp.equal(jnp.argmax(outputs, axis=-1), labels))


def top_k_accuracy(outputs: Any, targets: Any, *, k: int, kind: Targets) -> jax.Array:
    """Returns 1 if the class of each example is among its `k` highest outputs, else 0."""
    outputs, labels = class_labels(outputs, targets, kind)
    labels = labels.astype(jnp.int32)  # Labels may be int8 or floats, which can neither hold nor index all classes.
    known = (labels >= 0) & (labels < outputs.shape[-1])
    at_label = jnp.take_along_axis(outputs, labels[..., None], axis=-1)
    return _nan_for_nan_rows(outputs, jnp.logical_and(known, jnp.sum(outputs > at_label, axis=-1) < k))


def _nan_for_nan_rows(outputs: jax.Array, is_correct: jax.Array) -> jax.Array:
    """Returns 1 or 0 for each example, NaN if one of its outputs `[..., classes]` is: comparisons with NaN are false, which says nothing about the class."""
    return nan_unless(~jnp.isnan(outputs).any(axis=-1), is_correct.astype(jnp.float32))
