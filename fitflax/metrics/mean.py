"""`Mean`, the weighted mean of a function of outputs and targets, and the metrics that are such means: accuracies, perplexity, RMSE and cosines."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from flax import struct
from typing_extensions import override

import fitflax.losses as losses
from fitflax.errors import MetricError, integer_of
from fitflax.losses.shapes import IT, arrays, broadcast_fault, nan_unless, same_shape, vectors
from fitflax.metrics.base import (
    Direction,
    ResetMetric,
    Targets,
    add_pairs,
    bound,
    class_labels,
    metric_direction,
    naming,
    pair,
    pair_field,
    snake_case,
    static_field,
    weighted_sums,
)

_TRANSFORMS: dict[str | None, Callable[[jax.Array], jax.Array]] = {None: lambda mean: mean, "sqrt": jnp.sqrt, "exp": jnp.exp}


@struct.dataclass
class Mean(ResetMetric):
    """Computes the weighted mean of per-example values: `sum(w * v) / sum(w)` over all examples; NaN if no example has weight.

    Attributes:
        fn: `(outputs, targets) -> values`, `[batch]` or `[batch, ...]`; `None` for a mean that only `add` updates.
        name: Log key; by default the `__name__` of the function, also inside of a `functools.partial` (`"lambda"` for a lambda).
        direction: By default `"min"` for the losses of `fitflax.losses`, else `None`.
        transform: `"sqrt"` or `"exp"` of the mean, or `None` for the mean itself.
        total: `sum(w * v)`, a pair, float32 `[2]`.
        weight: `sum(w)`, a pair, float32 `[2]`.

    Raises:
        MetricError: `fn`, `direction` or `transform` is invalid.

    >>> from fitflax import losses
    >>> mae = Mean(losses.mean_absolute_error)
    >>> mae = mae.update(jnp.array([1.0, 2.0, 9.0]), jnp.array([0.0, 0.0, 0.0]), jnp.array([1.0, 1.0, 0.0]))
    >>> mae.name, mae.direction, float(mae.compute())
    ('mean_absolute_error', 'min', 1.5)
    """

    additive: ClassVar[bool] = True

    fn: Callable[[Any, Any], Any] | None = static_field(None)
    _: dataclasses.KW_ONLY
    name: str = static_field("")
    direction: Direction | None = static_field(None)
    transform: Literal["sqrt", "exp"] | None = static_field(None)
    total: jax.Array = pair_field()
    weight: jax.Array = pair_field()

    def __post_init__(self) -> None:
        # JAX calls this again whenever it rebuilds the metric from its leaves, so it must be idempotent.
        if self.fn is not None and not callable(self.fn):
            raise MetricError(f"Mean takes a function (outputs, targets) -> values. Received: {self.fn!r}. To get a metric by name, use metrics.get(name).")
        if self.transform not in _TRANSFORMS:
            raise MetricError(f"Mean(transform=...) must be one of {list(_TRANSFORMS)}. Received: {self.transform!r}.")
        if not self.name:
            object.__setattr__(self, "name", "mean" if self.fn is None else _function_name(self.fn))
        if self.direction is None:
            object.__setattr__(self, "direction", losses.loss_direction(self.fn))
        metric_direction(self)

    @override
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        if self.fn is None:
            raise MetricError(f"Metric {self.name!r} has no function that computes values. Use add(values, weights), or Mean(fn).")
        with naming(self.name):
            values = jnp.asarray(self.fn(outputs, targets))
        if values.shape[:1] != jnp.shape(weights)[:1]:
            raise MetricError(
                f"Metric {self.name!r} must return one value per example, [batch] or [batch, ...]. Received: {list(values.shape)} "
                f"for weights {list(jnp.shape(weights))}. Do not average over the batch; the metric averages over all batches."
            )
        if (fault := broadcast_fault(self.fn, values, outputs, targets)) is not None:
            raise MetricError(f"Metric {self.name!r}: its function {fault}.")
        return self.add(values, weights)

    def add(self, values: Any, weights: Any) -> Self:
        """Returns this metric with precomputed values added, such as the losses of a step.

        Args:
            values: `[batch]`, `[batch, ...]` or `[]`.
            weights: float32, the leading axes of `values`.

        Raises:
            MetricError: `weights` does not fit `values`.

        >>> float(Mean(name="grad_norm").add(3.0, 1.0).add(5.0, 3.0).compute())
        4.5
        """
        with naming(self.name):
            total, weight = weighted_sums(values, weights)
        return self.merge(dataclasses.replace(self, total=pair(total), weight=pair(weight)))

    @override
    def merge(self, other: Self) -> Self:
        return dataclasses.replace(self, total=add_pairs(self.total, other.total), weight=add_pairs(self.weight, other.weight))

    @override
    def compute(self) -> jax.Array:
        total, weight = jnp.sum(self.total, axis=-1), jnp.sum(self.weight, axis=-1)
        mean = total / jnp.where(weight == 0, 1.0, weight)
        return nan_unless(weight != 0, _TRANSFORMS[self.transform](mean))


def _function_name(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", None)
    return name.strip("<>") if isinstance(name, str) else snake_case(type(fn).__name__)


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
    k = integer_of("TopKAccuracy(k=...)", k, at_least=1, error=MetricError)
    return Mean(bound(top_k_accuracy, k=k, kind="integer or one-hot"), name=name, direction="max")


def Perplexity(*, name: str = "perplexity") -> Mean:
    """Returns `exp` of the mean sparse categorical cross-entropy over all tokens; not the mean of the perplexities of batches.

    Args:
        name: Log key.

    >>> float(Perplexity().update(jnp.zeros((2, 5, 8)), jnp.zeros((2, 5), int), jnp.ones(2)).compute().round(4))
    8.0
    """
    return Mean(losses.sparse_categorical_crossentropy, name=name, direction="min", transform="exp")


def RootMeanSquaredError(*, name: str = "rmse") -> Mean:
    """Returns the square root of the mean squared error over all examples; not the mean of the roots of batches.

    Args:
        name: Log key.

    >>> float(RootMeanSquaredError().update(jnp.array([3.0, 5.0]), jnp.array([0.0, 0.0]), jnp.array([1.0, 0.0])).compute())
    3.0
    """
    return Mean(losses.mean_squared_error, name=name, direction="min", transform="sqrt")


def CosineSimilarity(*, name: str = "cosine_similarity") -> Mean:
    """Returns the mean cosine similarity over the last axis: 1 for the same direction, -1 for opposite directions.

    `sum(outputs * targets) / (|outputs| * |targets|)`; 0 if either one is all zeros. The loss of the same name is its negative. Outputs and targets are
    `[batch, ..., features]` with at least two features.

    Args:
        name: Log key.

    >>> metric = CosineSimilarity().update(jnp.array([[3.0, 0.0], [1.0, 1.0]]), jnp.array([[1.0, 0.0], [0.0, 0.0]]), jnp.ones(2))
    >>> float(metric.compute()), metric.direction
    (0.5, 'max')
    """
    return Mean(_cosine, name=name, direction="max")


def accuracy(outputs: Any, targets: Any) -> jax.Array:
    """Returns 1 if an example's class is right, else 0: the highest output, or for a single output, its sign."""
    outputs, targets = arrays(IT, outputs, targets)
    if outputs.ndim < 2 or outputs.shape[-1] == 1:
        return binary_accuracy(outputs, targets, threshold=0.0)
    return class_accuracy(outputs, targets, kind="integer or one-hot")


def binary_accuracy(outputs: Any, targets: Any, *, threshold: float) -> jax.Array:
    """Returns 1 where `outputs > threshold` equals the target, else 0; NaN where the output is NaN."""
    outputs, targets = same_shape(IT, outputs, targets)
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
    highest = jnp.max(outputs, axis=-1)  # NaN if an output is. Most losses also need it, and XLA computes it once.
    return nan_unless(~jnp.isnan(highest), is_correct.astype(jnp.float32))


def _cosine(outputs: Any, targets: Any) -> jax.Array:
    outputs, targets = vectors(IT, outputs, targets)
    return jnp.sum(_direction(outputs) * _direction(targets), axis=-1)


def _direction(rows: jax.Array) -> jax.Array:
    """Returns rows scaled to norm 1; rows of zeros stay zero."""
    rows = rows.astype(jnp.float32)
    # Scale before squaring: squares of values below 1e-19 or above 1e19 are out of the range of float32.
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    rows = rows / jnp.where(largest == 0, 1.0, largest)
    return rows / jnp.where(largest == 0, 1.0, jnp.linalg.norm(rows, axis=-1, keepdims=True))
