"""What all losses check: one array each of outputs and targets, in shapes that fit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fitflax.errors import LossError

__all__ = ["broadcast_fault", "check_share", "class_labels", "class_rows", "mean_of_last_axis", "mismatch", "one_array", "same_shape", "vectors"]


def one_array(name: str, role: str, value: Any) -> jax.Array:
    """Returns `value` as an array, or says that the loss takes one array."""
    if isinstance(value, (dict, list, tuple)):
        raise LossError(
            f"{name} takes one array of {role}. Received: a {type(value).__name__} of {len(value)}. Give a loss for each output, or join them to one array."
        )
    array = jnp.asarray(value)
    if array.ndim == 0:
        raise LossError(f"{name} takes {role} with a leading batch axis. Received: a scalar.")
    return array


def same_shape(name: str, outputs: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Returns both in float32 and in one shape; a missing last axis of length 1 is put back, so that [N, 1] and [N] never broadcast to [N, N]."""
    outputs, targets = one_array(name, "outputs", outputs), one_array(name, "targets", targets)
    # The axis is added rather than taken away: of [batch, time, 1] and [batch, time] the values stay one per token, which token weights need.
    if outputs.shape == (*targets.shape, 1):
        targets = targets[..., None]
    elif targets.shape == (*outputs.shape, 1):
        outputs = outputs[..., None]
    if outputs.shape != targets.shape:
        advice = "Check the model's last layer."
        if _labels_for(outputs, targets):
            advice = "For integer class labels use 'sparse_categorical_crossentropy'; else the model's last layer should have as many features as the targets."
        raise mismatch(name, outputs, targets, "outputs and targets of one shape (a last axis of length 1 may be missing)", advice)
    return outputs.astype(jnp.float32), targets.astype(jnp.float32)


def mean_of_last_axis(values: jax.Array) -> jax.Array:
    """Returns the mean over the last axis; of one number per example, `[batch]`, the numbers themselves."""
    return values.mean(axis=-1) if values.ndim > 1 else values


def vectors(name: str, outputs: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Returns both in float32, of one shape `[batch, ..., features]`, at least two features: of one number the direction is its sign, without gradient."""
    outputs, targets = same_shape(name, outputs, targets)
    if outputs.ndim < 2 or outputs.shape[-1] == 1:
        advice = "For one number per example use 'mean_squared_error'."
        raise mismatch(name, outputs, targets, "vectors [batch, ..., features] of at least two features", advice)
    return outputs, targets


def class_rows(name: str, outputs: Any, targets: Any, *, binary: str, labels: str, role: str = "one-hot targets") -> tuple[jax.Array, jax.Array]:
    """Returns both in float32, of one shape `[batch, ..., classes]`, at least two classes.

    Args:
        name: The loss, for errors.
        outputs: One number per class.
        targets: One number per class.
        binary: The loss to name where there is one number per example.
        labels: What to do with integer labels, a sentence.
        role: What the targets are.

    Raises:
        LossError: The shapes do not fit.
    """
    outputs, targets = one_array(name, "outputs", outputs), one_array(name, "targets", targets)
    _check_classes(name, outputs, targets, binary)
    if outputs.shape != targets.shape:
        if _labels_for(outputs, targets):
            raise mismatch(name, outputs, targets, f"{role} [..., classes]", labels)
        raise mismatch(name, outputs, targets, f"outputs and {role} of one shape [..., classes]", "Check the model's last layer.")
    return outputs.astype(jnp.float32), targets.astype(jnp.float32)


def class_labels(name: str, outputs: Any, targets: Any, *, binary: str, one_hot: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns outputs `[batch, ..., classes]` in float32, labels `[batch, ...]`, and which of the labels are a class at all.

    Args:
        name: The loss, for errors.
        outputs: One number per class, at least two classes.
        targets: Integers, `[batch, ...]` or `[batch, ..., 1]`.
        binary: The loss to name where there is one number per example.
        one_hot: What to do with one-hot targets, a sentence.

    Raises:
        LossError: The shapes do not fit, or the targets are not integers.
    """
    outputs, targets = one_array(name, "outputs", outputs), one_array(name, "targets", targets)
    _check_classes(name, outputs, targets, binary)
    if targets.shape == (*outputs.shape[:-1], 1):
        targets = targets[..., 0]
    elif targets.shape == outputs.shape:
        raise mismatch(name, outputs, targets, "integer targets [...] for logits [..., classes]", one_hot)
    elif targets.shape != outputs.shape[:-1]:
        raise mismatch(name, outputs, targets, "integer targets [...] or [..., 1] for logits [..., classes]", "Check the model's last layer.")
    if jnp.issubdtype(targets.dtype, jnp.inexact):
        raise LossError(f"{name} takes integer class labels. Received: targets of dtype {targets.dtype}. Cast them: targets.astype('int32').")
    # Narrow integers first: 200 classes do not fit into the int8 that the labels may come in.
    labels = targets.astype(jnp.int32) if targets.dtype.itemsize < 4 else targets
    # optax counts negative labels from the end.
    known = (labels >= 0) & (labels < outputs.shape[-1])
    return outputs.astype(jnp.float32), labels, known


def check_share(name: str, argument: str, value: float) -> None:
    """Checks that an argument lies in 0..1."""
    if not 0.0 <= value <= 1.0:
        raise LossError(f"{name}({argument}=...) must be within 0..1. Received: {value!r}.")


def broadcast_fault(fn: Callable[[Any, Any], Any], values: Any, outputs: Any, targets: Any) -> str | None:
    """Returns, in words, that a function of the user's put each output together with each target, because only one of them has a last axis of length 1.

    That is so if it returns one value per example where both have one shape; a loss of all pairs still returns a table then.

    >>> outputs, targets = jnp.ones((3, 1)), jnp.ones(3)
    >>> square = lambda outputs, targets: (outputs - targets) ** 2
    >>> broadcast_fault(square, square(outputs, targets), outputs, targets)
    'returned [3, 3] for outputs [3, 1] and targets [3]: each output was put together with each target. Give both one shape: use outputs[:, 0]'
    >>> broadcast_fault(square, square(outputs, outputs), outputs, outputs)
    """
    shapes: list[Any] = [getattr(value, "shape", None) for value in (values, outputs, targets)]
    if None in shapes or not shapes[0] or shapes[0][0] < 2 or shapes[0][:2] != shapes[0][:1] * 2:
        return None
    rows = shapes[0][0]
    if sorted(shapes[1:]) != [(rows,), (rows, 1)]:
        return None
    alike = [jax.ShapeDtypeStruct((rows,), value.dtype) for value in (outputs, targets)]
    try:
        is_meant = getattr(jax.eval_shape(fn, *alike), "shape", None) != (rows,)
    except Exception:  # noqa: BLE001 (a function of the user's that needs these very shapes)
        return None
    if is_meant:
        return None
    return (
        f"returned {list(shapes[0])} for outputs {list(shapes[1])} and targets {list(shapes[2])}: each output was put together with each target. "
        f"Give both one shape: use {'outputs' if len(shapes[1]) == 2 else 'targets'}[:, 0]"
    )


def mismatch(name: str, outputs: jax.Array, targets: jax.Array, takes: str, advice: str) -> LossError:
    """Returns the error for shapes that do not fit."""
    return LossError(f"{name} takes {takes}. Received: outputs {list(outputs.shape)}, targets {list(targets.shape)}. {advice}")


def _labels_for(outputs: jax.Array, targets: jax.Array) -> bool:
    """Whether the targets have the shape of integer labels for these outputs."""
    return targets.shape in (outputs.shape[:-1], (*outputs.shape[:-1], 1))


def _check_classes(name: str, outputs: jax.Array, targets: jax.Array, binary: str) -> None:
    advice = f"For one logit per example use {binary!r}."
    if outputs.ndim < 2:
        raise mismatch(name, outputs, targets, "logits [batch, ..., classes]", advice)
    if outputs.shape[-1] == 1:
        raise mismatch(name, outputs, targets, "at least two classes", advice)
