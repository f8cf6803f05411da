"""Loss functions, `(outputs, targets) -> values`, and their names.

A loss returns one float32 value per example or per token, never a mean over the batch; the step applies weights and sums. Lower is better for all of them.
The formulas are those of Keras, reduced over the last axis. Outputs are logits where Keras takes probabilities, and log rates where it takes rates.
Optax's other losses are available by name. Each loss takes a single array of outputs and a single array of targets.
"""

from typing import TYPE_CHECKING

from fitflax.losses import registry
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

if not TYPE_CHECKING:  # Otherwise type checkers would accept any attribute name.

    def __getattr__(name):
        """For the name of a Keras class, the error names the function."""
        close = registry.closest(name) if name[:1].isupper() else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{f'. Losses are functions, which compile takes by name.{close}' if close else ''}")


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
