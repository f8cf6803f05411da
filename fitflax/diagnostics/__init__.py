"""What is found out about a model beside training it: a learning rate, and where NaN comes from."""

from fitflax.diagnostics.nan_hunt import NanReport
from fitflax.diagnostics.origins import Origin
from fitflax.diagnostics.rate_finder import LearningRateCurve

__all__ = ["LearningRateCurve", "NanReport", "Origin"]
