"""Losses between logits and labels or probabilities: `(outputs, targets) -> values`, in Keras's formulas."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fitflax.errors import LossError
from fitflax.losses.shapes import check_classes, check_smoothing, mean_of_last_axis, mismatch, one_array, same_shape

__all__ = ["binary_crossentropy", "categorical_crossentropy", "sparse_categorical_crossentropy"]


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
    check_smoothing("binary_crossentropy", label_smoothing)
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
    check_smoothing(name, label_smoothing)
    outputs, targets = one_array(name, "outputs", outputs), one_array(name, "targets", targets)
    check_classes(name, outputs, targets)
    if outputs.shape != targets.shape:
        if targets.shape in (outputs.shape[:-1], (*outputs.shape[:-1], 1)):
            raise mismatch(name, outputs, targets, "one-hot targets [..., classes]", "For integer labels use 'sparse_categorical_crossentropy'.")
        raise mismatch(name, outputs, targets, "logits and one-hot targets of one shape [..., classes]", "Check the model's last layer.")
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
    check_smoothing(name, label_smoothing)
    outputs, targets = one_array(name, "outputs", outputs), one_array(name, "targets", targets)
    check_classes(name, outputs, targets)
    if targets.shape == (*outputs.shape[:-1], 1):
        targets = targets[..., 0]
    elif targets.shape == outputs.shape:
        raise mismatch(name, outputs, targets, "integer targets [...] for logits [..., classes]", "For one-hot targets use 'categorical_crossentropy'.")
    elif targets.shape != outputs.shape[:-1]:
        raise mismatch(name, outputs, targets, "integer targets [...] or [..., 1] for logits [..., classes]", "Check the model's last layer.")
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
