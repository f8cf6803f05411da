"""Areas under curves: how well outputs rank examples, at every threshold instead of one; exact over all rows, or binned in fixed memory.

`ExactAUC` keeps every row until the end of an epoch or evaluation and ranks them in NumPy, in float64. `BinnedAUC` keeps histograms of the scores, which
add up like any other counts. `AUC` makes either. The formulas are written once, for the NumPy of the one and the JAX of the other.
"""

import dataclasses
import math
from types import ModuleType
from typing import Any, ClassVar, Literal, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from typing_extensions import override

from fitflax.errors import MetricError
from fitflax.integers import is_integer
from fitflax.metrics.base import Direction, Metric, static_field
from fitflax.metrics.counts import Counts
from fitflax.metrics.shapes import as_examples

__all__ = ["AUC", "BinnedAUC", "ColumnAverage", "Curve", "ExactAUC"]

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
    """Returns the area under the receiver operating characteristic, or under the curve of precision over recall.

    ROC is scikit-learn's `roc_auc_score`: the probability that a positive ranks above a negative, ties counting half. PR is `average_precision_score`: the
    sum over thresholds of precision times the step in recall, without interpolation. Both with weights. What is ranked is taken from the shapes, by the
    rule of `Precision`: one logit per example; logits of classes, whose softmax ranks each class against all others; with `multi_label` the columns, each
    by its own logit.

    Where the area is undefined it is NaN: ROC of one class alone, PR without positives. An average is over the columns where it is defined, and NaN if there
    is none. (scikit-learn warns, and gives NaN or 0.) Of no examples at all it is 0. A target that is no class leaves its example out, and where labels
    are yes or no, one that is neither 0 nor 1 its label alone. A NaN among the scores makes a NaN.

    Args:
        curve: `"ROC"` or `"PR"`.
        num_thresholds: `None` keeps every row, `[examples]` of scores, labels and weights, and is exact: such a metric has no value before the end of an
            epoch or evaluation. An integer sorts sigmoid or softmax into that many equal bins from 0 to 1 instead: fixed memory, values in the logs of
            batches, and exactly what scores rounded to their bins give; 200 is Keras's.
        average: Over classes or columns: `"macro"`, their mean; `"weighted"`, by their weight of positives; `"micro"`, all of them as one ranking; `None`,
            an array, one area each. Of no concern for one logit.
        multi_label: Whether the last axis holds labels that are yes or no each for itself.
        name: The log key; by default `"auc"`, and `"pr_auc"` for that curve.

    Raises:
        MetricError: An argument is none of these.

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
    if not is_integer(num_thresholds, 2):
        raise MetricError(f"AUC(num_thresholds=...) must be an integer of at least 2, or None for the exact area. Received: {num_thresholds!r}.")
    return BinnedAUC(curve=curve, num_thresholds=int(num_thresholds), average=average, multi_label=multi_label, name=name)


def _no_rows() -> jax.Array:
    """Returns no rows, `[0, 0]`: how many columns there are follows from the first batch."""
    return cast(jax.Array, np.zeros((0, 0), np.float32))  # NumPy: making a metric must not start JAX's backend.


def _rows_field() -> Any:
    """Returns a dataclass field that holds rows, none by default."""
    return dataclasses.field(default_factory=_no_rows)


@struct.dataclass
class ExactAUC(Metric):
    """The area under a curve over all rows, in NumPy; made and documented by `AUC`.

    Attributes:
        name: The log key.
        direction: `"max"`.
        curve: `"ROC"` or `"PR"`.
        average: Over classes or columns.
        multi_label: Whether the last axis holds labels that are yes or no each for itself.
        scores: Logits, float32 `[rows, columns]`.
        labels: float32, the class, `[rows, 1]`, where there are classes, else 0 or 1, `[rows, columns]`.
        weights: float32 `[rows, 1]`; rows of weight 0 are dropped by `compute`.
    """

    collect: ClassVar[bool] = True

    _: dataclasses.KW_ONLY
    name: str = static_field("auc")
    direction: Direction | None = static_field("max")
    curve: Curve = static_field("ROC")
    average: ColumnAverage | None = static_field("macro")
    multi_label: bool = static_field(False)
    scores: jax.Array = _rows_field()
    labels: jax.Array = _rows_field()
    weights: jax.Array = _rows_field()

    @override
    def empty(self) -> Self:
        return dataclasses.replace(self, scores=_no_rows(), labels=_no_rows(), weights=_no_rows())

    @override
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        examples = as_examples(outputs, targets, weights, multi_label=self.multi_label, name=self.name)
        # Logits, not softmax, which in float32 is 1 for all that are sure: their order would be lost.
        return self.merge(dataclasses.replace(self, scores=examples.scores, labels=examples.labels, weights=examples.weights[:, None]))

    @override
    def merge(self, other: Self) -> Self:
        if np.shape(self.weights)[0] == 0:
            return dataclasses.replace(self, scores=other.scores, labels=other.labels, weights=other.weights)
        if np.shape(other.weights)[0] == 0:
            return self
        if np.shape(self.scores)[1] != np.shape(other.scores)[1] or np.shape(self.labels)[1] != np.shape(other.labels)[1]:
            raise MetricError(f"Metric {self.name!r} cannot join rows of {np.shape(self.scores)[1]} columns and of {np.shape(other.scores)[1]}.")

        def append(mine: Any, theirs: Any) -> Any:
            # On the host rows stay on the host.
            return (np if isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray) else jnp).concatenate([mine, theirs])

        return dataclasses.replace(
            self, scores=append(self.scores, other.scores), labels=append(self.labels, other.labels), weights=append(self.weights, other.weights)
        )

    @override
    def compute(self) -> Any:
        weights = np.asarray(self.weights, np.float64).reshape(-1)
        real = weights != 0
        scores, labels, weights = np.asarray(self.scores, np.float64)[real], np.asarray(self.labels)[real], weights[real]
        columns = scores.shape[1]
        if columns == 0:  # no batch yet
            return np.float32(0.0)
        yes, no = _yes_and_no(labels, columns, np)
        if labels.shape[1] != columns:
            with np.errstate(invalid="ignore"):  # infinite logits; their NaN shows
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
    """The area under a curve over scores in equal bins, in fixed memory; made and documented by `AUC`.

    Attributes:
        name: The log key.
        direction: `"max"`.
        curve: `"ROC"` or `"PR"`.
        num_thresholds: How many bins there are.
        average: Over classes or columns.
        multi_label: Whether the last axis holds labels that are yes or no each for itself.
        counts: Histograms of the positives' and of the negatives' weights, float32 pairs `[columns, 2, bins, 2]`.
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
        # What is no number has no bin: it makes the counts NaN, unless its weight is 0.
        weights = jnp.where(jnp.isnan(scores) & (examples.weights != 0)[:, None], jnp.nan, examples.weights[:, None])
        bins = jnp.clip(jnp.nan_to_num(scores) * self.num_thresholds, 0, self.num_thresholds - 1).astype(jnp.int32)
        sides = _yes_and_no(examples.labels, scores.shape[-1], jnp)
        return _histograms(bins, jnp.stack([jnp.where(side, weights, 0.0) for side in sides], axis=-1), self.num_thresholds)

    @override
    def compute(self) -> jax.Array:
        counts = jnp.sum(self.counts, axis=-1)
        if counts.ndim == 0:
            return jnp.zeros((), jnp.float32)
        one_logit = counts.shape[0] == 1 and not self.multi_label
        if self.average == "micro":
            counts = counts.sum(axis=0, keepdims=True)
        yes, no = jnp.flip(counts[:, 0], axis=-1), jnp.flip(counts[:, 1], axis=-1)
        average = "macro" if one_logit else self.average
        areas = _area(yes, no, self.curve, jnp)
        return jnp.asarray(_averaged(areas, yes.sum(axis=-1), no.sum(axis=-1), curve=self.curve, average=average, xp=jnp))


def _histograms(bins: jax.Array, weights: jax.Array, num_bins: int) -> jax.Array:
    """Returns the sum of the weights in each bin, `[columns, sides, num_bins]`, of bins `[rows, columns]` and weights `[rows, columns, sides]`.

    A bin's number has two digits, and a product of two one-hot matrices of digits counts both at once: in memory for some `2 * sqrt(num_bins)` numbers a
    row instead of `num_bins`, and without a scatter, whose order of adding, and so its rounding, changes on a GPU from run to run.
    """
    base = math.isqrt(num_bins - 1) + 1
    digits = jnp.arange(base, dtype=jnp.int32)[None, None]
    high, low = (bins // base)[..., None] == digits, (bins % base)[..., None] == digits
    high_weights = jnp.where(high[:, :, None], weights[..., None], 0.0)
    # Highest precision: else weights would be rounded to what the matrix unit multiplies.
    counts = jnp.einsum("rcsh,rcl->cshl", high_weights, low.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return counts.reshape(*counts.shape[:2], -1)[..., :num_bins]


# `Any` below is an array of `xp`, which is NumPy or jax.numpy.


def _yes_and_no(labels: Any, columns: int, xp: ModuleType) -> tuple[Any, Any]:
    """Returns what is positive and what is negative in each column, boolean `[rows, columns]`; neither where a label is none."""
    if labels.shape[-1] == columns:
        return labels == 1, labels == 0
    yes = labels == xp.arange(columns)[None]
    return yes, ~yes & yes.any(axis=-1, keepdims=True)


def _steps(scores: np.ndarray, yes: np.ndarray, no: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the weights of positives and negatives at each different score, the highest first; `[rows]` becomes `[scores]`."""
    if not len(scores):
        return np.zeros(1), np.zeros(1)
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    return np.add.reduceat(yes[order], begins), np.add.reduceat(no[order], begins)


def _area(yes: Any, no: Any, curve: Curve, xp: ModuleType) -> Any:
    """Returns the area of a column, from the weights of positives and negatives step by step, the highest score first; `[..., steps]` becomes `[...]`."""
    true, false = xp.cumsum(yes, axis=-1), xp.cumsum(no, axis=-1)
    if curve == "ROC":  # trapezoids: what is gained in a step counts half in it
        return (_share(no, false[..., -1:], xp) * _share(true - yes / 2, true[..., -1:], xp)).sum(axis=-1)
    return (_share(yes, true[..., -1:], xp) * _share(true, true + false, xp)).sum(axis=-1)


def _averaged(areas: Any, yes: Any, no: Any, *, curve: Curve, average: ColumnAverage | None, xp: ModuleType) -> Any:
    """Returns the average of columns `[columns]`, or the columns, NaN where undefined; `yes` and `no` are the weights of positives and negatives."""
    # Not `> 0`: NaN counts come of NaN scores, and must show.
    defined = (yes != 0) & (no != 0) if curve == "ROC" else yes != 0
    if average is None:
        result = xp.where(defined, areas, xp.nan)
    else:
        shares = xp.where(defined, yes if average == "weighted" else 1.0, 0.0)
        total = shares.sum()
        mean = xp.where(defined, shares * areas, 0.0).sum() / xp.where(total == 0, 1.0, total)
        result = xp.where(defined.any(), mean, xp.nan)
    return xp.where((yes + no).sum() == 0, 0.0, result)


def _share(part: Any, whole: Any, xp: ModuleType) -> Any:
    """Returns `part / whole`, and 0 where the whole is 0."""
    return xp.where(whole == 0, 0.0, part / xp.where(whole == 0, 1.0, whole))
