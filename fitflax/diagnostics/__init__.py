"""The results of diagnosing a model: a learning-rate curve, and reports of where NaN comes from."""

from fitflax.diagnostics.nan_hunt import NanReport, Origin
from fitflax.diagnostics.rate_finder import LearningRateCurve

__all__ = ["LearningRateCurve", "NanReport", "Origin"]
