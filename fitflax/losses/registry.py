"""Losses by name."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax

from fitflax.errors import LossError, did_you_mean
from fitflax.losses.classification import (
    binary_crossentropy,
    binary_focal_crossentropy,
    categorical_crossentropy,
    categorical_focal_crossentropy,
    sparse_categorical_crossentropy,
)
from fitflax.losses.distributions import kl_divergence, poisson
from fitflax.losses.hinges import categorical_hinge, hinge, squared_hinge
from fitflax.losses.optax_losses import LABEL_LOSSES, OPTAX_LOSSES
from fitflax.losses.regression import (
    cosine_similarity,
    huber,
    log_cosh,
    mean_absolute_error,
    mean_absolute_percentage_error,
    mean_squared_error,
    mean_squared_logarithmic_error,
)

__all__ = ["get", "loss_direction", "names", "takes_labels", "takes_logits"]

_LOSSES: dict[str, Callable[..., jax.Array]] = {
    "mse": mean_squared_error,
    "mean_squared_error": mean_squared_error,
    "mae": mean_absolute_error,
    "mean_absolute_error": mean_absolute_error,
    "mape": mean_absolute_percentage_error,
    "mean_absolute_percentage_error": mean_absolute_percentage_error,
    "msle": mean_squared_logarithmic_error,
    "mean_squared_logarithmic_error": mean_squared_logarithmic_error,
    "huber": huber,
    "log_cosh": log_cosh,
    "cosine_similarity": cosine_similarity,
    "hinge": hinge,
    "squared_hinge": squared_hinge,
    "categorical_hinge": categorical_hinge,
    "kl_divergence": kl_divergence,
    "poisson": poisson,
    "binary_crossentropy": binary_crossentropy,
    "binary_focal_crossentropy": binary_focal_crossentropy,
    "categorical_crossentropy": categorical_crossentropy,
    "categorical_focal_crossentropy": categorical_focal_crossentropy,
    "sparse_categorical_crossentropy": sparse_categorical_crossentropy,
    **OPTAX_LOSSES,
}

# Names of other libraries and former names of Keras and Optax. They appear only in the suggestion of an error.
_ALIASES = {
    "bce": "binary_crossentropy",
    "binary_logistic_loss": "binary_crossentropy",
    "binary_sparsemax_loss": "sparsemax_loss",
    "convex_kl_divergence": "generalized_kl_divergence",
    "cross_entropy": "sparse_categorical_crossentropy",
    "crossentropy": "sparse_categorical_crossentropy",
    "dice": "dice_loss",
    "focal_loss": "binary_focal_crossentropy",
    "kld": "kl_divergence",
    "kullback_leibler_divergence": "kl_divergence",
    "l1_loss": "mean_absolute_error",
    "logcosh": "log_cosh",
    "multiclass_logistic_loss": "sparse_categorical_crossentropy",
    "poisson_nll_loss": "poisson",
}


def get(name: str) -> Callable[..., jax.Array]:
    """Returns the loss function called `name`.

    Args:
        name: One of `names()`. For other aliases, such as the class names of Keras (`"MeanSquaredError"`), the error suggests the name.

    Raises:
        LossError: There is no such loss.

    >>> get("mse") is mean_squared_error
    True
    """
    if not isinstance(name, str):
        raise LossError(f"losses.get() takes a name. Received: {name!r}.")
    if name not in _LOSSES:
        raise LossError(
            f"There is no loss {name!r}.{closest(name)} Pass a known name, or a function (outputs, targets) -> one value per example. Known: {names()}."
        )
    return _LOSSES[name]


def closest(name: str) -> str:
    """Returns the hint for an unknown name.

    >>> closest("KLDivergence")
    " Did you mean 'kl_divergence'?"
    """
    return did_you_mean(_ALIASES.get(name.lower(), name.lower()), _LOSSES)


def names() -> list[str]:
    """Returns the names that `get` accepts, sorted.

    >>> "mse" in names()
    True
    """
    return sorted(_LOSSES)


def loss_direction(loss: Any) -> Literal["min"] | None:
    """Returns `"min"` for a loss of this package, given by name, function or `functools.partial`; else `None`.

    >>> loss_direction("mse"), loss_direction(functools.partial(huber, delta=2.0)), loss_direction(len)
    ('min', 'min', None)
    """
    while isinstance(loss, functools.partial):
        loss = loss.func
    return "min" if any(loss is known or loss == name for name, known in _LOSSES.items()) else None


def takes_labels(loss: Any) -> bool:
    """Returns whether a function, or a `functools.partial` of one, is a loss of this package that takes integer class labels.

    >>> takes_labels(sparse_categorical_crossentropy), takes_labels(categorical_crossentropy)
    (True, False)
    """
    while isinstance(loss, functools.partial):
        loss = loss.func
    return loss is sparse_categorical_crossentropy or any(loss is known for known in LABEL_LOSSES.values())


# The losses above that apply a softmax or sigmoid to the outputs.
_LOGIT_LOSSES = (
    *("kl_divergence", "binary_crossentropy", "binary_focal_crossentropy", "categorical_crossentropy", "categorical_focal_crossentropy"),
    *("sparse_categorical_crossentropy", "sigmoid_binary_cross_entropy", "sigmoid_focal_loss", "softmax_cross_entropy", "safe_softmax_cross_entropy"),
    *("softmax_cross_entropy_with_integer_labels", "poly_loss_cross_entropy", "dice_loss", "binary_dice_loss"),
)


def takes_logits(name: str) -> bool:
    """Returns whether the loss with a name takes logits.

    >>> takes_logits("binary_crossentropy"), takes_logits("mse")
    (True, False)
    """
    return name in _LOGIT_LOSSES
