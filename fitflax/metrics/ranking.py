"""Areas under curves, exact over all rows or binned in fixed memory, and `SampleCollector`, which also collects rows.

`ExactAUC` keeps every row until the end of an epoch or evaluation and ranks them in NumPy, in float64. `BinnedAUC` keeps histograms of the scores, which
add up like other counts. `AUC` creates either one. Both share the formulas, in NumPy or JAX.
"""

import dataclasses
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from typing_extensions import override

from fitflax.errors import MetricError, integer_of
from fitflax.metrics.base import Counts, Direction, Metric, Rows, as_examples, ratio, rows_field, static_field, undefined, weights_of

Curve = Literal["ROC", "PR"]
ColumnAverage = Literal["macro", "micro", "weighted"]
_CURVES = ("ROC", "PR")
_AVERAGES = ("macro", "micro", "weighted", None)


def AUC(
    *,
    curve: Curve = "ROC",
    num_thresholds: int | None = None,
    average: ColumnAverage | None = "macro",
    multi_label: bool = False,
    name: str | None = None,
) -> Metric:
    """Returns the area under the ROC curve, or under the precision-recall curve.

    ROC is scikit-learn's `roc_auc_score`: the probability that a positive ranks above a negative, where ties count half. PR is
    `average_precision_score`: the sum over thresholds of precision times the increase in recall, without interpolation. Both are weighted. What is
    ranked follows from the shapes, as for `Precision`: one logit per example; logits of classes, whose softmax ranks each class against all others; or,
    with `multi_label`, each column by its logit.

    An undefined area is NaN: ROC with a single class, PR without positives. Averages cover the defined columns only; without any of these, or without
    examples, they are NaN. scikit-learn warns, and returns NaN or 0. An invalid class label excludes its example; among binary labels, a target that is
    neither 0 nor 1 excludes only itself. A NaN score makes the value NaN.

    Args:
        curve: `"ROC"` or `"PR"`.
        num_thresholds: `None` keeps the scores, labels and weights of all examples and is exact, but the value is only available at the end of an epoch or
            evaluation. An integer sorts the sigmoid or softmax into that many equal bins from 0 to 1: memory is fixed, the value is also logged for batches,
            and it is exact for scores rounded to their bins. The default of Keras is 200.
        average: Average over classes or columns: `"macro"`, the mean; `"weighted"`, the mean weighted by positives; `"micro"`, all columns as one
            ranking; `None`, an array of one area per column. No effect for one logit.
        multi_label: Whether the last axis holds independent binary labels.
        name: Log key; by default `"auc"`, or `"pr_auc"` for PR.

    Raises:
        MetricError: An argument is invalid.

    >>> outputs, targets = jnp.array([0.1, 0.4, 0.35, 0.8]), jnp.array([0, 0, 1, 1])
    >>> float(AUC().empty().update(outputs, targets, jnp.ones(4)).compute())
    0.75
    >>> AUC(curve="PR", num_thresholds=200).name
    'pr_auc'
    """
    if curve not in _CURVES:
        raise MetricError(f"AUC(curve=...) must be one of {list(_CURVES)}. Received: {curve!r}.")
    if average not in _AVERAGES:
        raise MetricError(f"AUC(average=...) must be one of {list(_AVERAGES)}. Received: {average!r}.")
    name = name or ("auc" if curve == "ROC" else "pr_auc")
    if num_thresholds is None:
        return ExactAUC(curve=curve, average=average, multi_label=multi_label, name=name)
    number = integer_of("AUC(num_thresholds=...)", num_thresholds, at_least=2, otherwise=", or None for the exact area", error=MetricError)
    return BinnedAUC(curve=curve, num_thresholds=number, average=average, multi_label=multi_label, name=name)


@struct.dataclass
class ExactAUC(Rows):
    """The exact area under a curve over all rows, in NumPy; see `AUC` for the settings.

    Attributes:
        scores: Logits, float32 `[rows, columns]`.
        labels: float32, the class `[rows, 1]` for classes, else 0 or 1, `[rows, columns]`.
        weights: float32 `[rows, 1]`; `compute` drops rows of weight 0.
    """

    _: dataclasses.KW_ONLY
    name: str = static_field("auc")
    direction: Direction | None = static_field("max")
    curve: Curve = static_field("ROC")
    average: ColumnAverage | None = static_field("macro")
    multi_label: bool = static_field(False)
    scores: jax.Array = rows_field()
    labels: jax.Array = rows_field()
    weights: jax.Array = rows_field()

    @override
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        examples = as_examples(outputs, targets, weights, multi_label=self.multi_label, name=self.name)
        # Logits, because softmax saturates at 1 in float32, which loses the order.
        return self.merge(dataclasses.replace(self, scores=examples.scores, labels=examples.labels, weights=examples.weights[:, None]))

    @override
    def merge(self, other: Self) -> Self:
        mine, theirs = ((np.shape(metric.scores)[1], np.shape(metric.labels)[1]) for metric in (self, other))
        if mine != theirs and len(self.weights) and len(other.weights):
            raise MetricError(
                f"Metric {self.name!r} cannot merge rows of {mine[0]} scores and {mine[1]} labels with rows of {theirs[0]} and {theirs[1]}. "
                "All batches must have the same number of classes."
            )
        return super().merge(other)

    @override
    def compute(self) -> Any:
        weights = np.asarray(self.weights, np.float64).reshape(-1)
        real = weights != 0
        scores, labels, weights = np.asarray(self.scores, np.float64)[real], np.asarray(self.labels)[real], weights[real]
        columns = scores.shape[1]
        if columns == 0:  # no batch yet
            return np.float32(np.nan)
        yes, no = _yes_and_no(labels, columns, np)
        if labels.shape[1] != columns:
            with np.errstate(invalid="ignore"):  # Infinite logits; the result is NaN.
                exp = np.exp(scores - scores.max(axis=-1, keepdims=True))
                scores = exp / exp.sum(axis=-1, keepdims=True)
        if self.average == "micro":
            weights = np.repeat(weights, columns)
            scores, yes, no = (rows.reshape(-1, 1) for rows in (scores, yes, no))
        areas, mass_yes, mass_no = np.zeros((3, scores.shape[1]))
        for column in range(scores.shape[1]):
            steps = _steps(scores[:, column], weights * yes[:, column], weights * no[:, column])
            areas[column] = np.nan if np.isnan(scores[:, column]).any() else _area(*steps, self.curve, np)
            mass_yes[column], mass_no[column] = (step.sum() for step in steps)
        average = "macro" if columns == 1 and not self.multi_label else self.average
        return np.asarray(_averaged(areas, mass_yes, mass_no, curve=self.curve, average=average, xp=np), np.float32)[()]


@struct.dataclass
class BinnedAUC(Counts):
    """The area under a curve over binned scores, in fixed memory; see `AUC` for the settings.

    Attributes:
        counts: Histograms of the weights of positives and negatives, float32 pairs `[columns, 2, bins, 2]`.
    """

    _: dataclasses.KW_ONLY
    name: str = static_field("auc")
    direction: Direction | None = static_field("max")
    curve: Curve = static_field("ROC")
    num_thresholds: int = static_field(200)
    average: ColumnAverage | None = static_field("macro")
    multi_label: bool = static_field(False)

    @override
    def count(self, outputs: Any, targets: Any, weights: Any) -> jax.Array:
        examples = as_examples(outputs, targets, weights, multi_label=self.multi_label, name=self.name)
        scores = jax.nn.softmax(examples.scores, axis=-1) if examples.kind == "classes" else jax.nn.sigmoid(examples.scores)
        # A NaN score makes the counts NaN, unless its weight is 0. That includes infinite logits, whose softmax is NaN.
        weights = weights_of(examples._replace(scores=scores))
        bins = jnp.clip(jnp.nan_to_num(scores) * self.num_thresholds, 0, self.num_thresholds - 1).astype(jnp.int32)
        sides = _yes_and_no(examples.labels, scores.shape[-1], jnp)
        return _histograms(bins, jnp.stack([jnp.where(side | jnp.isnan(weights), weights, 0.0) for side in sides], axis=-1), self.num_thresholds)

    @override
    def compute(self) -> jax.Array:
        counts = jnp.sum(self.counts, axis=-1)
        if counts.ndim == 0:
            return undefined()
        one_logit = counts.shape[0] == 1 and not self.multi_label
        if self.average == "micro":
            counts = counts.sum(axis=0, keepdims=True)
        yes, no = jnp.flip(counts[:, 0], axis=-1), jnp.flip(counts[:, 1], axis=-1)
        average = "macro" if one_logit else self.average
        areas = _area(yes, no, self.curve, jnp)
        return jnp.asarray(_averaged(areas, yes.sum(axis=-1), no.sum(axis=-1), curve=self.curve, average=average, xp=jnp))


def _histograms(bins: jax.Array, weights: jax.Array, num_bins: int) -> jax.Array:
    """Returns the sum of the weights in each bin, `[columns, sides, num_bins]`, for bins `[rows, columns]` and weights `[rows, columns, sides]`.

    Splits the bin number into two digits and multiplies their one-hot matrices, which takes about `2 * sqrt(num_bins)` numbers per row instead of
    `num_bins`. A scatter would round nondeterministically on GPUs.
    """
    base = math.isqrt(num_bins - 1) + 1
    digits = jnp.arange(base, dtype=jnp.int32)[None, None]
    high, low = (bins // base)[..., None] == digits, (bins % base)[..., None] == digits
    high_weights = jnp.where(high[:, :, None], weights[..., None], 0.0)
    # Highest precision, because matrix units would round the weights.
    counts = jnp.einsum("rcsh,rcl->cshl", high_weights, low.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return counts.reshape(*counts.shape[:2], -1)[..., :num_bins]


# Below, `Any` is an array of `xp`, which is NumPy or jax.numpy.


def _yes_and_no(labels: Any, columns: int, xp: ModuleType) -> tuple[Any, Any]:
    """Returns whether each column is positive, and whether it is negative, boolean `[rows, columns]`; neither for invalid labels."""
    if labels.shape[-1] == columns:
        return labels == 1, labels == 0
    yes = labels == xp.arange(columns)[None]
    return yes, ~yes & yes.any(axis=-1, keepdims=True)


def _steps(scores: np.ndarray, yes: np.ndarray, no: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the weights of positives and negatives at each distinct score, highest first; `[rows]` becomes `[scores]`."""
    if not len(scores):
        return np.zeros(1), np.zeros(1)
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    return np.add.reduceat(yes[order], begins), np.add.reduceat(no[order], begins)


def _area(yes: Any, no: Any, curve: Curve, xp: ModuleType) -> Any:
    """Returns the area of a column from the weights of positives and negatives at each score, highest first; `[..., scores]` becomes `[...]`."""
    true, false = xp.cumsum(yes, axis=-1), xp.cumsum(no, axis=-1)
    if curve == "ROC":  # Trapezoidal rule.
        return (ratio(no, false[..., -1:], xp) * ratio(true - yes / 2, true[..., -1:], xp)).sum(axis=-1)
    return (ratio(yes, true[..., -1:], xp) * ratio(true, true + false, xp)).sum(axis=-1)


def _averaged(areas: Any, yes: Any, no: Any, *, curve: Curve, average: ColumnAverage | None, xp: ModuleType) -> Any:
    """Returns the average of the columns `[columns]`, or all of them, NaN where undefined; `yes` and `no` are the weights of positives and negatives."""
    # Not `> 0`, because NaN counts, from NaN scores, must propagate.
    defined = (yes != 0) & (no != 0) if curve == "ROC" else yes != 0
    if average is None:
        return xp.where(defined, areas, xp.nan)
    shares = xp.where(defined, yes if average == "weighted" else 1.0, 0.0)
    total = shares.sum()
    mean = xp.where(defined, shares * areas, 0.0).sum() / xp.where(total == 0, 1.0, total)
    return xp.where(defined.any(), mean, xp.nan)


@struct.dataclass
class SampleCollector(Rows):
    """Draws a uniform random sample of the examples, `[max_size, ...]`, in the order of the data.

    Each example gets a random priority that depends on `seed` and on its position in the pass; the `max_size` lowest are kept (bottom-k sampling). So the
    sample does not depend on the batch size or the number of devices, and merging two metrics samples from both. Until the end of the pass, the host keeps the
    rows of all examples, as for an exact AUC, and so does a checkpoint inside an epoch. If they are too large, let `fn` return less. The sample is in the
    logs, in the result of `evaluate` and in TensorBoard, but not in `History`.

    Attributes:
        max_size: Maximum number of examples in the sample.
        fn: `fn(outputs, targets) -> [batch, ...]`, what is kept of each example; by default the outputs, which must then be one array.
        show: Function from the sample, an array `[<= max_size, ...]`, to what TensorBoard shows; see `Metric.summary`. By default the array itself.
        seed: Seed of the random priorities.
        name: Log key.
        direction: `None`.
        rows: Results of `fn`, `[examples, ...]`.
        weights: float32 `[examples, 1]`; examples of weight 0 are never drawn.

    >>> collector = SampleCollector(max_size=2, fn=lambda outputs, targets: outputs - targets)
    >>> collector.update(jnp.arange(10.0), jnp.zeros(10), jnp.ones(10)).compute().shape
    (2,)
    """

    is_recorded: ClassVar[bool] = False

    max_size: int = static_field(16)
    _: dataclasses.KW_ONLY
    fn: Callable[[Any, Any], Any] | None = static_field(None)
    show: Callable[[Any], Any] | None = static_field(None)
    seed: int = static_field(0)
    name: str = static_field("samples")
    direction: Direction | None = static_field(None)
    rows: jax.Array = rows_field()
    weights: jax.Array = rows_field()

    def __post_init__(self) -> None:
        integer_of("SampleCollector(max_size=...)", self.max_size, at_least=1, error=MetricError)

    @override
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        rows = outputs if self.fn is None else self.fn(outputs, targets)
        weights = jnp.asarray(weights, jnp.float32)
        if not hasattr(rows, "shape") or rows.shape[:1] != weights.shape[:1]:
            what = "outputs" if self.fn is None else "fn(outputs, targets)"
            received = f"shape {list(rows.shape)}" if hasattr(rows, "shape") else f"a {type(rows).__name__}"
            raise MetricError(f"Metric {self.name!r} samples {what}, which must be one array [{weights.shape[0]}, ...]. Received: {received}.")
        return self.merge(dataclasses.replace(self, rows=rows, weights=weights.reshape(weights.shape[0], -1).max(axis=1, keepdims=True)))

    @override
    def compute(self) -> Any:
        real = np.asarray(self.rows)[np.asarray(self.weights).reshape(-1) != 0]
        priorities = np.random.default_rng(self.seed).random(len(real))
        return real[np.sort(np.argsort(priorities, kind="stable")[: self.max_size])]

    @override
    def summary(self, value: Any) -> Any:
        return value if self.show is None else self.show(value)
