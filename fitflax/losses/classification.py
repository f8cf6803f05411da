"""Crossentropies, plain and focal, between logits and labels or probabilities: `(outputs, targets) -> values`, in Keras's formulas."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fitflax.errors import LossError
from fitflax.losses.shapes import check_share, class_labels, class_rows, mean_of_last_axis, same_shape

__all__ = ["binary_crossentropy", "binary_focal_crossentropy", "categorical_crossentropy", "categorical_focal_crossentropy", "sparse_categorical_crossentropy"]

_USE_SPARSE = "For integer labels use 'sparse_categorical_crossentropy'."
_TO_ONE_HOT = "Make integer labels one-hot: jax.nn.one_hot(labels, classes)."


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
    check_share("binary_crossentropy", "label_smoothing", label_smoothing)
    outputs, targets = same_shape("binary_crossentropy", outputs, targets)
    targets = targets * (1.0 - label_smoothing) + label_smoothing / 2.0
    return mean_of_last_axis(optax.losses.sigmoid_binary_cross_entropy(outputs, targets))


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
    check_share(name, "label_smoothing", label_smoothing)
    outputs, targets = class_rows(name, outputs, targets, binary="binary_crossentropy", labels=_USE_SPARSE)
    targets = targets * (1.0 - label_smoothing) + label_smoothing / outputs.shape[-1]
    values: jax.Array = optax.losses.safe_softmax_cross_entropy(outputs, targets)
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
    check_share(name, "label_smoothing", label_smoothing)
    advice = "For one-hot targets use 'categorical_crossentropy'."
    outputs, labels, known = class_labels(name, outputs, targets, binary="binary_crossentropy", one_hot=advice)
    values = optax.losses.softmax_cross_entropy_with_integer_labels(outputs, labels)
    if label_smoothing:
        uniform = jax.nn.logsumexp(outputs, axis=-1) - outputs.mean(axis=-1)
        values = (1.0 - label_smoothing) * values + label_smoothing * uniform
    return jnp.where(known, values, jnp.nan)


def binary_focal_crossentropy(
    outputs: Any, targets: Any, *, apply_class_balancing: bool = False, alpha: float = 0.25, gamma: float = 2.0, label_smoothing: float = 0.0
) -> jax.Array:
    """Returns the crossentropy of yes-or-no targets with easy examples weighted down, averaged over the last axis.

    For detection and other tasks where nearly all targets are 0 and soon learned: `(1 - q)^gamma` times the crossentropy, `q = y * p + (1 - y) * (1 - p)`
    being the probability given to the target, `p = sigmoid(outputs)` (Lin et al., 2017). With class balancing also times `alpha * y + (1 - alpha) * (1 - y)`.
    Computed from the logits without overflow.

    Args:
        outputs: Logits (no sigmoid applied), `[batch]` or `[batch, ..., labels]`.
        targets: 0, 1 or probabilities between; the same shape; a last axis of length 1 may be missing on either side.
        apply_class_balancing: Whether `alpha` is used.
        alpha: The weight of targets of 1, in 0..1; those of 0 get `1 - alpha`.
        gamma: How far easy examples are weighted down; 0 is the plain crossentropy.
        label_smoothing: `s` in 0..1; targets become `y * (1 - s) + s / 2`.

    Returns:
        float32 values, `[batch]` or `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit, `label_smoothing` or `alpha` is outside of 0..1, or `gamma` is negative.

    >>> binary_focal_crossentropy(jnp.array([0.0, 2.0]), jnp.array([1, 1])).round(4)
    Array([0.1733, 0.0018], dtype=float32)
    """
    name = "binary_focal_crossentropy"
    check_share(name, "label_smoothing", label_smoothing)
    check_share(name, "alpha", alpha)
    _check_gamma(name, gamma)
    outputs, targets = same_shape(name, outputs, targets)
    targets = targets * (1.0 - label_smoothing) + label_smoothing / 2.0
    return mean_of_last_axis(optax.losses.sigmoid_focal_loss(outputs, targets, alpha=alpha if apply_class_balancing else None, gamma=gamma))


def categorical_focal_crossentropy(
    outputs: Any, targets: Any, *, alpha: float | Sequence[float] = 0.25, gamma: float = 2.0, label_smoothing: float = 0.0
) -> jax.Array:
    """Returns the crossentropy of one-hot targets with easy examples weighted down.

    `-sum(alpha * (1 - p)^gamma * y * log(p), axis=-1)` with `p = softmax(outputs)`, computed from the logits. A class of logit `-inf` that the target gives no
    weight counts 0, not NaN.

    Args:
        outputs: Logits (no softmax applied), `[batch, ..., classes]`, at least two classes.
        targets: One-hot rows or probabilities, the same shape.
        alpha: A factor, or one for each class; not negative.
        gamma: How far easy examples are weighted down; with 0, and `alpha` 1, it is the plain crossentropy.
        label_smoothing: `s` in 0..1; targets become `y * (1 - s) + s / classes`.

    Returns:
        float32 values, `[batch, ...]`.

    Raises:
        LossError: The shapes do not fit, there are not as many `alpha` as classes, one or `gamma` is negative, or `label_smoothing` is outside of 0..1.

    >>> categorical_focal_crossentropy(jnp.array([[0.0, 0.0], [0.0, 2.0]]), jnp.array([[1, 0], [0, 1]])).round(4)
    Array([0.0433, 0.0005], dtype=float32)
    """
    name = "categorical_focal_crossentropy"
    check_share(name, "label_smoothing", label_smoothing)
    _check_gamma(name, gamma)
    outputs, targets = class_rows(name, outputs, targets, binary="binary_focal_crossentropy", labels=_TO_ONE_HOT)
    factors = np.asarray(alpha, np.float32)
    if factors.shape not in ((), outputs.shape[-1:]) or not np.all(factors >= 0):
        raise LossError(f"{name}(alpha=...) must be a number or one for each of the {outputs.shape[-1]} classes, none negative. Received: {alpha!r}.")
    targets = targets * (1.0 - label_smoothing) + label_smoothing / outputs.shape[-1]
    log_p = jax.nn.log_softmax(outputs)
    # Not 1 - p, which is off by a rounding; and never 0, where the power of a gamma below 1 has no gradient.
    focus = jnp.maximum(-jnp.expm1(log_p), 1e-30) ** gamma
    return -jnp.sum(np.broadcast_to(factors, outputs.shape) * focus * targets * jnp.where(targets == 0, 0.0, log_p), axis=-1)


def _check_gamma(name: str, gamma: float) -> None:
    if not gamma >= 0:
        raise LossError(f"{name}(gamma=...) must not be negative. Received: {gamma!r}.")
