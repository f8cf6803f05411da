"""Losses by name."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax

from fitflax.errors import LossError, did_you_mean
from fitflax.losses.classification import binary_crossentropy, categorical_crossentropy, sparse_categorical_crossentropy
from fitflax.losses.regression import huber, mean_absolute_error, mean_squared_error

__all__ = ["direction", "get", "names"]

_LOSSES: dict[str, Callable[..., jax.Array]] = {
    "mse": mean_squared_error,
    "mean_squared_error": mean_squared_error,
    "mae": mean_absolute_error,
    "mean_absolute_error": mean_absolute_error,
    "huber": huber,
    "binary_crossentropy": binary_crossentropy,
    "categorical_crossentropy": categorical_crossentropy,
    "sparse_categorical_crossentropy": sparse_categorical_crossentropy,
}

# What others call them (optax's l2_loss is half the squared error, so it is no alias). Named in the error only: a second name for everything helps nobody.
_ELSEWHERE = {
    "bce": "binary_crossentropy",
    "sigmoid_binary_cross_entropy": "binary_crossentropy",
    "softmax_cross_entropy": "categorical_crossentropy",
    "softmax_cross_entropy_with_integer_labels": "sparse_categorical_crossentropy",
    "crossentropy": "sparse_categorical_crossentropy",
    "cross_entropy": "sparse_categorical_crossentropy",
    "squared_error": "mean_squared_error",
    "l2_loss": "mean_squared_error",
    "l1_loss": "mean_absolute_error",
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


def direction(loss: Any) -> Literal["min"] | None:
    """Returns `"min"` for a loss of this module, by name or function, its arguments bound with `functools.partial` or not; else `None`.

    Args:
        loss: A name, or anything callable.

    >>> direction("mse"), direction(functools.partial(huber, delta=2.0)), direction(len)
    ('min', 'min', None)
    """
    while isinstance(loss, functools.partial):
        loss = loss.func
    return "min" if any(loss is known or loss == name for name, known in _LOSSES.items()) else None
