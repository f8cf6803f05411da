"""Metrics: immutable pytrees of sums that join exactly, however the examples were cut into batches.

`empty` begins, `update` takes a batch in, `merge` joins two parts (batches, replicas, processes), `compute` gives the number. All are pure and can be
compiled, scanned and mapped. `Mean` of a function of per-example values is the workhorse, and what most names stand for; `R2` has moments of its own.
Outputs are logits wherever a threshold or a softmax is involved. Log keys of several outputs and clashes between names are settled elsewhere.
"""

from fitflax.metrics.accuracy import Accuracy, BinaryAccuracy, Perplexity, TopKAccuracy
from fitflax.metrics.base import Metric, metric_direction, metric_name, weighted_sums
from fitflax.metrics.mean import Mean
from fitflax.metrics.registry import get, names, resolve
from fitflax.metrics.regression import R2, RootMeanSquaredError

__all__ = ["R2", "Accuracy", "BinaryAccuracy", "Mean", "Metric", "Perplexity", "RootMeanSquaredError", "TopKAccuracy"]
__all__ += ["get", "metric_direction", "metric_name", "names", "resolve", "weighted_sums"]
