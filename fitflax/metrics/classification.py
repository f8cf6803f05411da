"""Classification scores that are not means over examples: precision and recall, scores derived from them, overlap, and confusion matrices.

All are functions of weighted counts: they do not depend on how the examples are cut into batches, and equal those of scikit-learn over all examples. The
kind of problem follows from the shapes, as for `Accuracy`.
"""

import abc
import dataclasses
import html
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from typing_extensions import override

from fitflax.errors import MetricError
from fitflax.losses.shapes import nan_unless
from fitflax.metrics.base import Counts, Direction, Examples, as_examples, ratio, static_field, undefined, weights_of

Average = Literal["auto", "binary", "micro", "macro", "weighted"]
_AVERAGES = ("auto", "binary", "micro", "macro", "weighted", None)
_NORMALIZATIONS = (None, "true", "pred", "all")
_CELL = "padding: 2px 8px; text-align: right"


class _Decisions(NamedTuple):
    """Boolean `[rows, classes]`: whether the class is the target, whether it is predicted, and (`[rows, 1]` for classes) whether the target is valid."""

    targets: jax.Array
    predicted: jax.Array
    known: jax.Array


class _Hits(NamedTuple):
    """True and false positives and negatives, float32 `[classes]` or `[]`."""

    tp: jax.Array
    fp: jax.Array
    fn: jax.Array
    tn: jax.Array


@struct.dataclass
class _ClassScore(Counts):
    """The base class of scores of counts, averaged over classes; see `Precision`."""

    _: dataclasses.KW_ONLY
    direction: Direction | None = static_field("max")
    average: Average | None = static_field("auto")
    threshold: float = static_field(0.0)
    multi_label: bool = static_field(False)

    def __post_init__(self) -> None:
        if self.average not in _AVERAGES:
            raise MetricError(f"Metric {self.name!r}: average must be one of {list(_AVERAGES)}. Received: {self.average!r}.")
        if self.average == "binary" and self.multi_label:
            raise MetricError(f"Metric {self.name!r}: average='binary' is for one logit per example, not for multi_label=True. Leave it out, or use 'macro'.")

    @abc.abstractmethod
    def _score(self, hits: _Hits) -> jax.Array:
        """Returns the score of each class, in the shape of the counts."""

    @override
    def count(self, outputs: Any, targets: Any, weights: Any) -> jax.Array:
        examples = as_examples(outputs, targets, weights, multi_label=self.multi_label, name=self.name)
        if self.average == "binary" and examples.kind != "one logit":
            raise MetricError(
                f"Metric {self.name!r}: average='binary' takes one logit per example, outputs [batch] or [..., 1]. "
                f"Received: outputs {list(jnp.shape(outputs))}. For several classes use 'macro', 'micro', 'weighted' or None."
            )
        is_target, is_predicted, known = _decisions(examples, self.threshold)
        weights = weights_of(examples)

        # Not a scatter, whose rounding is nondeterministic on GPUs. XLA fuses this into one pass over the rows.
        def weight_of(rows: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(rows | jnp.isnan(weights), weights, 0.0), axis=0)

        hits = (is_predicted & is_target, is_predicted & ~is_target, ~is_predicted & is_target, ~is_predicted & ~is_target & known)
        counts = jnp.stack([weight_of(rows) for rows in hits], axis=-1)
        # A leading axis tells `compute` that these two classes come from one logit.
        return counts[None] if examples.kind == "one logit" else counts

    @override
    def compute(self) -> jax.Array:
        counts = jnp.sum(self.counts, axis=-1)
        if counts.ndim == 0:
            return undefined()
        one_logit = counts.ndim == 3
        average = ("binary" if one_logit else "macro") if self.average == "auto" else self.average
        return nan_unless(counts.sum() != 0, self._average(average, counts[0] if one_logit else counts))

    def _average(self, average: Average | None, counts: jax.Array) -> jax.Array:
        """Returns the score, or the scores of all classes, from counts `[classes, 4]`."""
        if average == "binary":
            return self._score(_Hits(*counts[1]))
        if average == "micro":
            return self._score(_Hits(*counts.sum(axis=0)))
        hits = _Hits(*jnp.moveaxis(counts, -1, 0))
        scores = self._score(hits)
        if average is None:
            return scores
        if average == "weighted":
            shares = hits.tp + hits.fn
        elif self.multi_label:
            shares = jnp.ones_like(scores)
        else:
            shares = (hits.tp + hits.fp + hits.fn != 0).astype(jnp.float32)  # Not `> 0`, because NaN counts must propagate.
        return ratio(jnp.sum(shares * scores), jnp.sum(shares))


@struct.dataclass
class Precision(_ClassScore):
    """Computes the fraction of predicted positives that are correct: `tp / (tp + fp)`, in weighted counts; 0 if there are none.

    Same as scikit-learn's `precision_score(zero_division=0)`. The shapes determine the classes, for this metric and for `Recall`, `FBeta`, `F1`,
    `Specificity` and `MeanIoU`:

    | outputs | targets | `multi_label` | classes | prediction |
    |---|---|---|---|---|
    | `[batch]`, `[..., 1]` | 0 or 1, the same shape, or without the 1 | `False` | two | 1 where `outputs > threshold` |
    | `[..., classes]` | `[...]`, `[..., 1]` or one-hot `[..., classes]` | `False` | `classes` | `argmax(outputs)` |
    | `[..., labels]` | 0 or 1, `[..., labels]` | `True` | `labels` | each label where `outputs > threshold` |

    Weights have the leading axes of the outputs, without classes and labels, so each token of `[batch, time, classes]` can have its own. An invalid
    target (not a class, or neither 0 nor 1) only counts as a false positive of the predicted class. To exclude an example entirely, also from the
    classes that occur, give it weight 0.

    Attributes:
        name: Log key.
        direction: `"max"`.
        average: One of the averages below. The default `"auto"` is `"binary"` for one logit, else `"macro"`.

            - `"binary"`: the score of class 1, for one logit.
            - `"micro"`: the score of the counts summed over classes.
            - `"macro"`: the mean over the classes that occur among targets or predictions; with `multi_label`, over all columns.
            - `"weighted"`: the mean weighted by how often each class is the target.
            - `None`: an array with one score per class; for one logit `[2]`, class 0 first.
        threshold: Threshold of the outputs, for one logit or for labels: 0 for logits, 0.5 for probabilities.
        multi_label: Whether the last axis of outputs and targets holds independent binary labels.
        counts: tp, fp, fn and tn of each class, float32 pairs `[classes, 4, 2]`; `[1, 2, 4, 2]` for one logit.

    Raises:
        MetricError: `average` is unknown, or does not fit the shapes.

    >>> outputs, targets = jnp.array([2.0, 1.0, 3.0, -1.0]), jnp.array([1, 0, 1, 1])
    >>> round(float(Precision().update(outputs, targets, jnp.ones(4)).compute()), 4)
    0.6667
    """

    _: dataclasses.KW_ONLY
    name: str = static_field("precision")

    @override
    def _score(self, hits: _Hits) -> jax.Array:
        return ratio(hits.tp, hits.tp + hits.fp)


@struct.dataclass
class Recall(_ClassScore):
    """Computes the fraction of positives that are found: `tp / (tp + fn)`, in weighted counts; 0 if there are none. Also called sensitivity.

    Same as scikit-learn's `recall_score(zero_division=0)`. See `Precision` for shapes, invalid targets and attributes.

    >>> outputs, targets = jnp.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]), jnp.array([0, 1, 1])
    >>> Recall(average=None).update(outputs, targets, jnp.ones(3)).compute()
    Array([1. , 0.5], dtype=float32)
    """

    _: dataclasses.KW_ONLY
    name: str = static_field("recall")

    @override
    def _score(self, hits: _Hits) -> jax.Array:
        return ratio(hits.tp, hits.tp + hits.fn)


@struct.dataclass
class FBeta(_ClassScore):
    """Computes the weighted harmonic mean of precision and recall: `(1 + b^2) tp / ((1 + b^2) tp + b^2 fn + fp)`; 0 if all counts are 0.

    Same as scikit-learn's `fbeta_score(zero_division=0)` (van Rijsbergen, 1979): recall counts `beta` times as much as precision. See `Precision` for
    shapes, invalid targets and the other attributes.

    Attributes:
        beta: Importance of recall relative to precision, larger than 0.

    Raises:
        MetricError: `beta` is not positive, or `average` is unknown.

    >>> outputs, targets = jnp.array([2.0, 1.0, 3.0, -1.0]), jnp.array([1, 0, 1, 0])
    >>> round(float(FBeta(beta=2.0).update(outputs, targets, jnp.ones(4)).compute()), 4)
    0.9091
    """

    _: dataclasses.KW_ONLY
    name: str = static_field("fbeta")
    beta: float = static_field(1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.beta, bool) or not isinstance(self.beta, int | float) or not 0 < self.beta < float("inf"):
            raise MetricError(f"FBeta(beta=...) must be a number larger than 0. Received: {self.beta!r}.")

    @override
    def _score(self, hits: _Hits) -> jax.Array:
        square = float(self.beta) ** 2
        both = (1.0 + square) * hits.tp
        return ratio(both, both + square * hits.fn + hits.fp)


def F1(*, average: Average | None = "auto", threshold: float = 0.0, multi_label: bool = False, name: str = "f1") -> FBeta:
    """Returns the harmonic mean of precision and recall: `2 tp / (2 tp + fn + fp)`; 0 if all counts are 0.

    Same as scikit-learn's `f1_score(zero_division=0)`, and as `FBeta` with `beta=1`. See `Precision` for shapes, invalid targets and arguments.

    Args:
        average: `"auto"` (binary for one logit, else macro), `"binary"`, `"micro"`, `"macro"`, `"weighted"`, or `None` for one score per class.
        threshold: Threshold of the outputs, for one logit or for labels.
        multi_label: Whether the last axis holds independent binary labels.
        name: Log key.

    Raises:
        MetricError: `average` is unknown.

    >>> outputs, targets = jnp.array([2.0, 1.0, 3.0, -1.0]), jnp.array([1, 0, 1, 0])
    >>> round(float(F1().update(outputs, targets, jnp.ones(4)).compute()), 4)
    0.8
    """
    return FBeta(average=average, threshold=threshold, multi_label=multi_label, name=name)


@struct.dataclass
class Specificity(_ClassScore):
    """Computes the fraction of negatives that are predicted as negative: `tn / (tn + fp)`, in weighted counts; 0 if there are none.

    For one logit it is the recall of class 0; for classes, each one against all others. See `Precision` for shapes, invalid targets and attributes.

    >>> outputs, targets = jnp.array([2.0, 1.0, -3.0, -1.0]), jnp.array([1, 0, 0, 0])
    >>> round(float(Specificity().update(outputs, targets, jnp.ones(4)).compute()), 4)
    0.6667
    """

    _: dataclasses.KW_ONLY
    name: str = static_field("specificity")

    @override
    def _score(self, hits: _Hits) -> jax.Array:
        return ratio(hits.tn, hits.tn + hits.fp)


@struct.dataclass
class MeanIoU(_ClassScore):
    """Computes intersection over union, `tp / (tp + fp + fn)`, averaged over the classes that occur; the usual score for segmentation.

    Same as scikit-learn's `jaccard_score(average="macro")` and `MeanIoU` of Keras. One logit stands for two classes, and both count. For images, outputs are
    `[batch, height, width, classes]`, targets `[batch, height, width]`, and weights `[batch]` or one per pixel. To exclude pixels, give them weight 0. See
    `Precision` for other shapes, invalid targets and the other attributes.

    Attributes:
        average: As for `Precision`, but `"macro"` by default.

    >>> outputs, targets = jnp.array([[[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]]), jnp.array([[0, 1, 1]])
    >>> float(MeanIoU().update(outputs, targets, jnp.ones(1)).compute())
    0.5
    """

    _: dataclasses.KW_ONLY
    name: str = static_field("mean_iou")
    average: Average | None = static_field("macro")

    @override
    def _score(self, hits: _Hits) -> jax.Array:
        return ratio(hits.tp, hits.tp + hits.fp + hits.fn)


@struct.dataclass
class ConfusionMatrix(Counts):
    """Computes the confusion matrix: rows are targets, columns are predictions, float32 `[classes, classes]`; `[2, 2]` for one logit.

    Same as scikit-learn's `confusion_matrix(labels=range(classes))`. Shapes are those of `Precision` without `multi_label`. Invalid targets are in no
    row. The memory is quadratic in the number of classes, so it is not suited to vocabularies.

    Attributes:
        name: Log key.
        direction: `None`.
        normalize: `None` for sums of weights; `"true"`, `"pred"` or `"all"` to divide by the sums of rows, of columns or of all; 0 where the sum is 0.
        threshold: Threshold of the outputs, for one logit.
        counts: float32 pairs `[classes, classes, 2]`.

    Raises:
        MetricError: `normalize` is unknown.

    >>> outputs, targets = jnp.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]), jnp.array([0, 1, 1])
    >>> ConfusionMatrix().update(outputs, targets, jnp.ones(3)).compute()
    Array([[1., 0.],
           [1., 1.]], dtype=float32)
    """

    _: dataclasses.KW_ONLY
    name: str = static_field("confusion_matrix")
    normalize: Literal["true", "pred", "all"] | None = static_field(None)
    threshold: float = static_field(0.0)

    def __post_init__(self) -> None:
        if self.normalize not in _NORMALIZATIONS:
            raise MetricError(f"ConfusionMatrix(normalize=...) must be one of {list(_NORMALIZATIONS)}. Received: {self.normalize!r}.")

    @override
    def count(self, outputs: Any, targets: Any, weights: Any) -> jax.Array:
        examples = as_examples(outputs, targets, weights, multi_label=False, name=self.name)
        is_target, is_predicted, _ = _decisions(examples, self.threshold)
        weights = weights_of(examples)
        # Highest precision, because matrix units would round the weights.
        rows = jnp.where(is_target | jnp.isnan(weights), weights, 0.0)
        return jnp.matmul(rows.T, is_predicted.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)

    @override
    def compute(self) -> jax.Array:
        counts = jnp.sum(self.counts, axis=-1)
        if counts.ndim == 0 or self.normalize is None:
            return counts
        axis = {"true": 1, "pred": 0, "all": None}[self.normalize]
        return nan_unless(counts.sum() != 0, ratio(counts, jnp.sum(counts, axis=axis, keepdims=True)))


class ConfusionTable:
    """Shows a confusion matrix as a table, with a row per target and a column per prediction; notebooks shade cells by their fraction of the row.

    Args:
        matrix: `[classes, classes]`, as `ConfusionMatrix` computes it: `trainer.evaluate(...)["confusion_matrix"]`.
        labels: Names of the classes; by default their numbers.

    Raises:
        MetricError: `matrix` is not square, or `labels` has the wrong length.

    >>> ConfusionTable([[3, 1], [0, 4]], labels=["cat", "dog"])
    target / prediction  cat  dog
    cat                    3    1
    dog                    0    4
    """

    def __init__(self, matrix: Any, labels: Sequence[Any] | None = None) -> None:
        self.matrix = np.asarray(matrix)
        if self.matrix.ndim != 2 or self.matrix.shape[0] != self.matrix.shape[1]:
            raise MetricError(f"ConfusionTable takes a matrix [classes, classes]. Received: an array of shape {list(self.matrix.shape)}.")
        self.labels = [str(label) for label in (range(len(self.matrix)) if labels is None else labels)]
        if len(self.labels) != len(self.matrix):
            raise MetricError(f"ConfusionTable(labels=...) takes a name for each of the {len(self.matrix)} classes. Received: {len(self.labels)} names.")

    def __repr__(self) -> str:
        rows = [["target / prediction", *self.labels], *([label, *map(_format, row)] for label, row in zip(self.labels, self.matrix, strict=True))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]) for row in rows)

    def _repr_html_(self) -> str:
        labels = [html.escape(label) for label in self.labels]
        head = "".join(f'<th style="{_CELL}">{label}</th>' for label in ["target / prediction", *labels])
        rows = []
        for label, row in zip(labels, self.matrix, strict=True):
            total = float(np.nansum(np.abs(row))) or 1.0
            cells = "".join(f'<td style="{_CELL}; background: rgba(59, 130, 246, {abs(value) / total:.2f})">{_format(value)}</td>' for value in row)
            rows.append(f'<tr><th style="{_CELL}">{label}</th>{cells}</tr>')
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _format(value: Any) -> str:
    return f"{float(value):.4g}"


def _decisions(examples: Examples, threshold: float) -> _Decisions:
    """Returns targets and predictions for each class."""
    scores, labels = examples.scores, examples.labels
    if examples.kind == "labels":
        return _Decisions(labels == 1, scores > threshold, (labels == 0) | (labels == 1))
    if examples.kind == "one logit":
        classes, predicted = 2, (scores > threshold).astype(jnp.int32)
    else:
        classes, predicted = scores.shape[-1], jnp.argmax(scores, axis=-1, keepdims=True).astype(jnp.int32)
    numbers = jnp.arange(classes, dtype=jnp.int32)[None]
    targets = labels == numbers
    return _Decisions(targets, predicted == numbers, jnp.any(targets, axis=-1, keepdims=True))
