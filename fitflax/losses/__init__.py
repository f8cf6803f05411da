"""Losses by name and as functions: `(outputs, targets) -> values`, one value per example or per token, never a mean over the batch.

The step weights and sums the values, so what is here knows nothing of padding, weights or devices. All are computed in float32 whatever comes in. The
formulas are Keras's, reduced by a mean over the last axis; the crossentropies take logits. All are to be minimized. What to do with several outputs is
decided elsewhere: here outputs and targets are one array each.
"""

from fitflax.losses.classification import binary_crossentropy, categorical_crossentropy, sparse_categorical_crossentropy
from fitflax.losses.registry import direction, get, names
from fitflax.losses.regression import huber, mean_absolute_error, mean_squared_error

__all__ = [
    "binary_crossentropy",
    "categorical_crossentropy",
    "direction",
    "get",
    "huber",
    "mean_absolute_error",
    "mean_squared_error",
    "names",
    "sparse_categorical_crossentropy",
]
