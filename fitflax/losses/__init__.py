"""Losses by name and as functions: `(outputs, targets) -> values`, one value per example or per token, never a mean over the batch.

The step weights and sums the values, so what is here knows nothing of padding, weights or devices. All are computed in float32 whatever comes in. The
formulas are Keras's, reduced over the last axis, on logits where Keras takes probabilities and log rates where it takes rates; the losses that only optax has
are known by name. All are to be minimized. What to do with several outputs is decided elsewhere: here outputs and targets are one array each.
"""

from fitflax.losses.classification import (
    binary_crossentropy,
    binary_focal_crossentropy,
    categorical_crossentropy,
    categorical_focal_crossentropy,
    sparse_categorical_crossentropy,
)
from fitflax.losses.distributions import kl_divergence, poisson
from fitflax.losses.hinges import categorical_hinge, hinge, squared_hinge
from fitflax.losses.registry import get, names
from fitflax.losses.regression import (
    cosine_similarity,
    huber,
    log_cosh,
    mean_absolute_error,
    mean_absolute_percentage_error,
    mean_squared_error,
    mean_squared_logarithmic_error,
)

__all__ = [
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "categorical_crossentropy",
    "categorical_focal_crossentropy",
    "categorical_hinge",
    "cosine_similarity",
    "get",
    "hinge",
    "huber",
    "kl_divergence",
    "log_cosh",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "names",
    "poisson",
    "sparse_categorical_crossentropy",
    "squared_hinge",
]
