"""Metrics: immutable pytrees of sums whose result does not depend on how the examples are cut into batches.

`empty` starts a metric, `update` adds a batch, `merge` combines two metrics (of batches, replicas or processes), and `compute` returns the value. All of
them are pure and can be compiled, scanned and mapped. Most names stand for a `Mean` of per-example values. Precision and similar scores are functions of
counts, `R2` and `ExplainedVariance` keep moments, and the exact `AUC` keeps all rows and ranks them on the host at the end. Wherever a threshold or a
softmax is involved, outputs are logits.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import fitflax.losses as losses
from fitflax.errors import MetricError, did_you_mean
from fitflax.metrics import base, mean
from fitflax.metrics.base import Metric, weighted_sums
from fitflax.metrics.classification import F1, ConfusionMatrix, ConfusionTable, FBeta, MeanIoU, Precision, Recall, Specificity
from fitflax.metrics.mean import Accuracy, BinaryAccuracy, CosineSimilarity, Mean, Perplexity, RootMeanSquaredError, TopKAccuracy
from fitflax.metrics.ranking import AUC, SampleCollector
from fitflax.metrics.regression import R2, ExplainedVariance

__all__ = ["AUC", "F1", "R2", "Accuracy", "BinaryAccuracy", "ConfusionMatrix", "ConfusionTable", "CosineSimilarity", "ExplainedVariance", "FBeta", "Mean"]
__all__ += ["MeanIoU", "Metric", "Perplexity", "Precision", "Recall", "RootMeanSquaredError", "SampleCollector", "Specificity", "TopKAccuracy"]
__all__ += ["get", "names", "weighted_sums"]

# Each takes `name`, because the log key is the name that the user wrote.
_METRICS: dict[str, Callable[..., Any]] = {
    **{name: functools.partial(Mean, losses.get(name)) for name in losses.names()},
    **dict.fromkeys(("accuracy", "acc"), Accuracy),
    "binary_accuracy": BinaryAccuracy,
    "categorical_accuracy": functools.partial(Mean, base.bound(mean.class_accuracy, kind="one-hot"), direction="max"),
    "sparse_categorical_accuracy": functools.partial(Mean, base.bound(mean.class_accuracy, kind="integer"), direction="max"),
    "top_k_accuracy": TopKAccuracy,
    "top_k_categorical_accuracy": functools.partial(Mean, base.bound(mean.top_k_accuracy, k=5, kind="one-hot"), direction="max"),
    "sparse_top_k_categorical_accuracy": functools.partial(Mean, base.bound(mean.top_k_accuracy, k=5, kind="integer"), direction="max"),
    **dict.fromkeys(("rmse", "root_mean_squared_error"), RootMeanSquaredError),
    **dict.fromkeys(("r2", "r2_score"), R2),
    "perplexity": Perplexity,
    "precision": Precision,
    "recall": Recall,
    **dict.fromkeys(("f1", "f1_score"), F1),
    "specificity": Specificity,
    "mean_iou": MeanIoU,
    "confusion_matrix": ConfusionMatrix,
    **dict.fromkeys(("auc", "roc_auc"), AUC),
    **dict.fromkeys(("pr_auc", "average_precision"), functools.partial(AUC, curve="PR")),
    "explained_variance": ExplainedVariance,
    "cosine_similarity": CosineSimilarity,  # Replaces the loss, which is its negative.
}


def get(name: str) -> Metric:
    """Returns the metric called `name`, which is also its log key.

    Args:
        name: One of `names()`, which include the names of all losses.

    Raises:
        MetricError: There is no such metric.

    >>> get("acc").name, get("mse").direction
    ('acc', 'min')
    """
    if not isinstance(name, str):
        raise MetricError(f"metrics.get() takes a name. Received: {name!r}.")
    if name not in _METRICS:
        close = did_you_mean(base.snake_case(name), _METRICS)
        raise MetricError(
            f"There is no metric {name!r}.{close} Pass a known name, or a function (outputs, targets) -> one value per example. Known: {names()}."
        )
    return cast(Metric, _METRICS[name](name=name))


def names() -> list[str]:
    """Returns the names that `get` accepts, sorted.

    >>> "accuracy" in names() and "mse" in names()
    True
    """
    return sorted(_METRICS)


def resolve(spec: Any) -> Any:
    """Returns the metric that `spec` stands for.

    - A name.
    - A metric, or any object with `empty`, `update`, `merge` and `compute`.
    - A class of such objects, or a function of this package that creates one, which is called without arguments.
    - A function `(outputs, targets) -> values`, one per example, whose `Mean` is returned.
    """
    if isinstance(spec, str):
        return get(spec)
    has_methods = all(callable(getattr(spec, method, None)) for method in ("empty", "update", "merge", "compute"))
    if any(spec is maker for maker in _METRICS.values()) or (isinstance(spec, type) and has_methods):
        try:
            return spec()
        except TypeError as error:
            raise MetricError(f"{spec!r} cannot be created without arguments ({error}). Received: the class. Pass an instance.") from error
    if has_methods:
        return spec
    if callable(spec) and not isinstance(spec, type):
        return Mean(spec)
    takes = "a name, an object with empty, update, merge and compute, or a function (outputs, targets) -> one value per example"
    raise MetricError(f"A metric must be {takes}. Received: {spec!r}.")
