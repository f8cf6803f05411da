"""Losses by name and as functions: `(outputs, targets) -> values`, one value per example or per token, never a mean over the batch.

The step weights and sums the values, so what is here knows nothing of padding, weights or devices. All are computed in float32 whatever comes in. The
formulas are Keras's, reduced by a mean over the last axis; the crossentropies take logits. All are to be minimized. What to do with several outputs is
decided elsewhere: here outputs and targets are one array each.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fitflax.errors import LossError, did_you_mean

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


def mean_squared_error(outputs: Any, targets: Any) -> jax.Array:
    """Returns the squared error of each example, averaged over the last axis.

    `mean((outputs - targets)^2, axis=-1)`; with one number per example (`[batch]`) there is no axis to average.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: The same shape; a last axis of length 1 may be missing on either side.

    Returns:
        float32 values, `[batch]` or `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit.

    >>> mean_squared_error(jnp.array([[1.0, 2.0], [0.0, 0.0]]), jnp.array([[1.0, 4.0], [0.0, 1.0]]))
    Array([2. , 0.5], dtype=float32)
    """
    outputs, targets = _same_shape("mean_squared_error", outputs, targets)
    return _mean_of_last_axis(optax.losses.squared_error(outputs, targets))


def mean_absolute_error(outputs: Any, targets: Any) -> jax.Array:
    """Returns the absolute error of each example, averaged over the last axis.

    `mean(|outputs - targets|, axis=-1)`; with one number per example (`[batch]`) there is no axis to average.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: The same shape; a last axis of length 1 may be missing on either side.

    Returns:
        float32 values, `[batch]` or `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit.

    >>> mean_absolute_error(jnp.array([[1.0, 2.0], [0.0, 0.0]]), jnp.array([[1.0, 4.0], [0.0, 1.0]]))
    Array([1. , 0.5], dtype=float32)
    """
    outputs, targets = _same_shape("mean_absolute_error", outputs, targets)
    return _mean_of_last_axis(jnp.abs(outputs - targets))


def huber(outputs: Any, targets: Any, *, delta: float = 1.0) -> jax.Array:
    """Returns the Huber loss of each example: squared near zero, linear beyond `delta`, averaged over the last axis.

    With `e = |outputs - targets|`: `e^2 / 2` where `e <= delta`, else `delta * e - delta^2 / 2`.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: The same shape; a last axis of length 1 may be missing on either side.
        delta: Where the loss turns linear; larger than 0, in the unit of the targets.

    Returns:
        float32 values, `[batch]` or `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit, or `delta` is not positive.

    >>> huber(jnp.array([0.0, 0.0]), jnp.array([0.5, 3.0]))
    Array([0.125, 2.5  ], dtype=float32)
    """
    if not delta > 0:
        raise LossError(f"huber(delta=...) must be larger than 0. Received: {delta!r}.")
    outputs, targets = _same_shape("huber", outputs, targets)
    return _mean_of_last_axis(optax.losses.huber_loss(outputs, targets, delta=delta))


def binary_crossentropy(outputs: Any, targets: Any, *, label_smoothing: float = 0.0) -> jax.Array:
    """Returns the crossentropy of yes-or-no targets, averaged over the last axis.

    `-y * log(p) - (1 - y) * log(1 - p)` with `p = sigmoid(outputs)`, computed from the logits without overflow.

    Args:
        outputs: Logits (no sigmoid applied), `[batch]` or `[batch, ..., labels]`.
        targets: 0, 1 or probabilities between; the same shape; a last axis of length 1 may be missing on either side.
        label_smoothing: `s` in 0..1; targets become `y * (1 - s) + s / 2`.

    Returns:
        float32 values, `[batch]` or `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit, or `label_smoothing` is outside of 0..1.

    >>> binary_crossentropy(jnp.array([0.0, 2.0]), jnp.array([1, 1])).round(4)
    Array([0.6931, 0.1269], dtype=float32)
    """
    _check_smoothing("binary_crossentropy", label_smoothing)
    outputs, targets = _same_shape("binary_crossentropy", outputs, targets)
    targets = targets * (1.0 - label_smoothing) + label_smoothing / 2.0
    return _mean_of_last_axis(optax.losses.sigmoid_binary_cross_entropy(outputs, targets))


def categorical_crossentropy(outputs: Any, targets: Any, *, label_smoothing: float = 0.0) -> jax.Array:
    """Returns the crossentropy of one-hot targets, or of any distribution over the classes.

    `-sum(y * log_softmax(outputs), axis=-1)`. A class of logit `-inf` that the target gives no weight counts 0, not NaN.

    Args:
        outputs: Logits (no softmax applied), `[batch, ..., classes]`, at least two classes.
        targets: One-hot rows or probabilities, the same shape.
        label_smoothing: `s` in 0..1; targets become `y * (1 - s) + s / classes`.

    Returns:
        float32 values, `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit, or `label_smoothing` is outside of 0..1.

    >>> categorical_crossentropy(jnp.array([[0.0, 0.0], [0.0, 2.0]]), jnp.array([[1, 0], [0, 1]])).round(4)
    Array([0.6931, 0.1269], dtype=float32)
    """
    name = "categorical_crossentropy"
    _check_smoothing(name, label_smoothing)
    outputs, targets = _array(name, "outputs", outputs), _array(name, "targets", targets)
    _check_classes(name, outputs, targets)
    if outputs.shape != targets.shape:
        if targets.shape in (outputs.shape[:-1], (*outputs.shape[:-1], 1)):
            raise _mismatch(name, outputs, targets, "one-hot targets [..., classes]", "For integer labels use 'sparse_categorical_crossentropy'.")
        raise _mismatch(name, outputs, targets, "logits and one-hot targets of one shape [..., classes]", "Check the model's last layer.")
    targets = targets.astype(jnp.float32) * (1.0 - label_smoothing) + label_smoothing / outputs.shape[-1]
    values: jax.Array = optax.losses.safe_softmax_cross_entropy(outputs.astype(jnp.float32), targets)
    return values


def sparse_categorical_crossentropy(outputs: Any, targets: Any, *, label_smoothing: float = 0.0) -> jax.Array:
    """Returns the crossentropy of integer class labels.

    `-log_softmax(outputs)[target]`: what `categorical_crossentropy` gives for the one-hot targets, without building them.

    A label below 0 or not below `classes` cannot raise inside a compiled step; its value is NaN (and its gradient 0), so that it shows in the loss instead
    of indexing from the end. Give such rows weight 0 if they are meant to be ignored.

    Args:
        outputs: Logits (no softmax applied), `[batch, ..., classes]`, at least two classes.
        targets: Integers, `[batch, ...]` or `[batch, ..., 1]`.
        label_smoothing: `s` in 0..1; as for `categorical_crossentropy` on the one-hot targets.

    Returns:
        float32 values, `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit, the targets are not integers, or `label_smoothing` is outside of 0..1.

    >>> sparse_categorical_crossentropy(jnp.array([[0.0, 0.0], [0.0, 2.0], [0.0, 0.0]]), jnp.array([0, 1, -1])).round(4)
    Array([0.6931, 0.1269,    nan], dtype=float32)
    """
    name = "sparse_categorical_crossentropy"
    _check_smoothing(name, label_smoothing)
    outputs, targets = _array(name, "outputs", outputs), _array(name, "targets", targets)
    _check_classes(name, outputs, targets)
    if targets.shape == (*outputs.shape[:-1], 1):
        targets = targets[..., 0]
    elif targets.shape == outputs.shape:
        raise _mismatch(name, outputs, targets, "integer targets [...] for logits [..., classes]", "For one-hot targets use 'categorical_crossentropy'.")
    elif targets.shape != outputs.shape[:-1]:
        raise _mismatch(name, outputs, targets, "integer targets [...] or [..., 1] for logits [..., classes]", "Check the model's last layer.")
    if jnp.issubdtype(targets.dtype, jnp.inexact):
        raise LossError(f"{name} takes integer class labels. Received: targets of dtype {targets.dtype}. Cast them: targets.astype('int32').")
    # Narrow integers first: 200 classes do not fit into the int8 that the labels may come in.
    labels = targets.astype(jnp.int32) if targets.dtype.itemsize < 4 else targets
    # optax counts negative labels from the end.
    known = (labels >= 0) & (labels < outputs.shape[-1])
    outputs = outputs.astype(jnp.float32)
    values = optax.losses.softmax_cross_entropy_with_integer_labels(outputs, labels)
    if label_smoothing:
        uniform = jax.nn.logsumexp(outputs, axis=-1) - outputs.mean(axis=-1)
        values = (1.0 - label_smoothing) * values + label_smoothing * uniform
    return jnp.where(known, values, jnp.nan)


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

    >>> direction("mse"), direction(functools.partial(huber, delta=2.0)), direction(jnp.mean)
    ('min', 'min', None)
    """
    while isinstance(loss, functools.partial):
        loss = loss.func
    return "min" if any(loss is known or loss == name for name, known in _LOSSES.items()) else None


def _array(name: str, role: str, value: Any) -> jax.Array:
    """Returns `value` as an array, or says that the loss takes one array."""
    if isinstance(value, (dict, list, tuple)):
        raise LossError(f"{name} takes one array of {role}. Received: a {type(value).__name__} of {len(value)}. Give a loss for each output.")
    array = jnp.asarray(value)
    if array.ndim == 0:
        raise LossError(f"{name} takes {role} with a leading batch axis. Received: a scalar.")
    return array


def _same_shape(name: str, outputs: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Returns both in float32 and in one shape; a missing last axis of length 1 is put back, so that [N, 1] and [N] never broadcast to [N, N]."""
    outputs, targets = _array(name, "outputs", outputs), _array(name, "targets", targets)
    # The axis is added rather than taken away: of [batch, time, 1] and [batch, time] the values stay one per token, which token weights need.
    if outputs.shape == (*targets.shape, 1):
        targets = targets[..., None]
    elif targets.shape == (*outputs.shape, 1):
        outputs = outputs[..., None]
    if outputs.shape != targets.shape:
        advice = "Check the model's last layer."
        if targets.shape in (outputs.shape[:-1], (*outputs.shape[:-1], 1)):
            advice = "For integer class labels use 'sparse_categorical_crossentropy'; else the model's last layer should have as many features as the targets."
        raise _mismatch(name, outputs, targets, "outputs and targets of one shape (a last axis of length 1 may be missing)", advice)
    return outputs.astype(jnp.float32), targets.astype(jnp.float32)


def _mean_of_last_axis(values: jax.Array) -> jax.Array:
    return values.mean(axis=-1) if values.ndim > 1 else values


def _check_classes(name: str, outputs: jax.Array, targets: jax.Array) -> None:
    if outputs.ndim < 2:
        raise _mismatch(name, outputs, targets, "logits [batch, ..., classes]", "For one logit per example use 'binary_crossentropy'.")
    if outputs.shape[-1] == 1:
        raise _mismatch(name, outputs, targets, "at least two classes (of one it is always 0)", "For one logit per example use 'binary_crossentropy'.")


def _check_smoothing(name: str, label_smoothing: float) -> None:
    if not 0.0 <= label_smoothing <= 1.0:
        raise LossError(f"{name}(label_smoothing=...) must be within 0..1. Received: {label_smoothing!r}.")


def _mismatch(name: str, outputs: jax.Array, targets: jax.Array, takes: str, advice: str) -> LossError:
    return LossError(f"{name} takes {takes}. Received: outputs {list(outputs.shape)}, targets {list(targets.shape)}. {advice}")
