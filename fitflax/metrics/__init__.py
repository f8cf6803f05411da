"""Metrics: immutable pytrees of sums whose result does not depend on how the examples are cut into batches.

`empty` starts a metric, `update` adds a batch, `merge` combines two metrics (of batches, replicas or processes), and `compute` returns the value. All of
them are pure and can be compiled, scanned and mapped. Most names stand for a `Mean` of per-example values. Precision and similar scores are functions of
counts, `R2` and `ExplainedVariance` keep moments, and the exact `AUC` keeps all rows and ranks them on the host at the end. Wherever a threshold or a
softmax is involved, outputs are logits.
"""

from fitflax.metrics.accuracy import Accuracy, BinaryAccuracy, Perplexity, TopKAccuracy
from fitflax.metrics.base import Metric, weighted_sums
from fitflax.metrics.classification import F1, ConfusionMatrix, FBeta, MeanIoU, Precision, Recall, Specificity
from fitflax.metrics.confusion_table import ConfusionTable
from fitflax.metrics.mean import Mean
from fitflax.metrics.ranking import AUC
from fitflax.metrics.registry import get, names
from fitflax.metrics.regression import R2, CosineSimilarity, ExplainedVariance, RootMeanSquaredError
from fitflax.metrics.samples import SampleCollector

__all__ = ["AUC", "F1", "R2", "Accuracy", "BinaryAccuracy", "ConfusionMatrix", "ConfusionTable", "CosineSimilarity", "ExplainedVariance", "FBeta", "Mean"]
__all__ += ["MeanIoU", "Metric", "Perplexity", "Precision", "Recall", "RootMeanSquaredError", "SampleCollector", "Specificity", "TopKAccuracy"]
__all__ += ["get", "names", "weighted_sums"]
