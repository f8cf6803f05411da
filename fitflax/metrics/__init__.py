"""Metrics: immutable pytrees of sums that join exactly, however the examples were cut into batches.

`empty` begins, `update` takes a batch in, `merge` joins two parts (batches, replicas, processes), `compute` gives the number. All are pure and can be
compiled, scanned and mapped. `Mean` of a function of per-example values is the workhorse, and what most names stand for; precision and its kin are
functions of counts, `R2` and `ExplainedVariance` have moments of their own, and the exact `AUC` keeps rows, which are ranked on the host at the end.
Outputs are logits wherever a threshold or a softmax is involved. Log keys of several outputs and clashes between names are settled elsewhere.
"""

from fitflax.metrics.accuracy import Accuracy, BinaryAccuracy, Perplexity, TopKAccuracy
from fitflax.metrics.base import Metric, weighted_sums
from fitflax.metrics.classification import F1, ConfusionMatrix, FBeta, MeanIoU, Precision, Recall, Specificity
from fitflax.metrics.mean import Mean
from fitflax.metrics.ranking import AUC
from fitflax.metrics.registry import get, names
from fitflax.metrics.regression import R2, CosineSimilarity, ExplainedVariance, RootMeanSquaredError
from fitflax.metrics.samples import SampleCollector

__all__ = ["AUC", "F1", "R2", "Accuracy", "BinaryAccuracy", "ConfusionMatrix", "CosineSimilarity", "ExplainedVariance", "FBeta", "Mean", "MeanIoU", "Metric"]
__all__ += ["Perplexity", "Precision", "Recall", "RootMeanSquaredError", "SampleCollector", "Specificity", "TopKAccuracy"]
__all__ += ["get", "names", "weighted_sums"]
