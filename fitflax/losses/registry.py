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

# What others call them, and names that Keras and optax had once. Named in the error only: a second name for everything helps nobody.
_ELSEWHERE = {
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
    """Returns the loss of that name.

    Args:
        name: One of `names()`. What Keras calls by a class (`"MeanSquaredError"`) or another alias is named in the error.

    Raises:
        LossError: There is no such loss.

    >>> get("mse") is mean_squared_error
    True
    """
    if not isinstance(name, str):
        raise LossError(f"losses.get() takes a name. Received: {name!r}.")
    if name not in _LOSSES:
        close = did_you_mean(_ELSEWHERE.get(name.lower(), name.lower()), _LOSSES)
        raise LossError(f"There is no loss {name!r}.{close} Known: {names()}. Or give a function (outputs, targets) -> one value per example.")
    return _LOSSES[name]


def names() -> list[str]:
    """Returns the names that `get` knows, sorted.

    >>> "mse" in names()
    True
    """
    return sorted(_LOSSES)


def loss_direction(loss: Any) -> Literal["min"] | None:
    """Returns `"min"` for a loss of this module, by name or function, its arguments bound with `functools.partial` or not; else `None`.

    Args:
        loss: A name, or anything callable.

    >>> loss_direction("mse"), loss_direction(functools.partial(huber, delta=2.0)), loss_direction(len)
    ('min', 'min', None)
    """
    while isinstance(loss, functools.partial):
        loss = loss.func
    return "min" if any(loss is known or loss == name for name, known in _LOSSES.items()) else None


def takes_labels(loss: Any) -> bool:
    """Returns whether a loss of this package takes integer class labels, whose range can be checked where they are at hand.

    Args:
        loss: A function, its arguments bound with `functools.partial` or not.

    >>> takes_labels(sparse_categorical_crossentropy), takes_labels(categorical_crossentropy)
    (True, False)
    """
    while isinstance(loss, functools.partial):
        loss = loss.func
    return loss is sparse_categorical_crossentropy or any(loss is known for known in LABEL_LOSSES.values())


# Those of the names above whose outputs are logits, which they put through a softmax or sigmoid themselves.
_OF_LOGITS = (
    *("kl_divergence", "binary_crossentropy", "binary_focal_crossentropy", "categorical_crossentropy", "categorical_focal_crossentropy"),
    *("sparse_categorical_crossentropy", "sigmoid_binary_cross_entropy", "sigmoid_focal_loss", "softmax_cross_entropy", "safe_softmax_cross_entropy"),
    *("softmax_cross_entropy_with_integer_labels", "poly_loss_cross_entropy", "dice_loss", "binary_dice_loss"),
)


def takes_logits(name: str) -> bool:
    """Returns whether the loss of that name takes logits.

    >>> takes_logits("binary_crossentropy"), takes_logits("mse")
    (True, False)
    """
    return name in _OF_LOGITS
