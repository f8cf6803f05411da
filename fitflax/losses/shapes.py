"""What all losses check: one array each of outputs and targets, in shapes that fit."""

from typing import Any

import jax
import jax.numpy as jnp

from fitflax.errors import LossError

__all__ = ["check_classes", "check_smoothing", "mean_of_last_axis", "mismatch", "one_array", "same_shape"]


def one_array(name: str, role: str, value: Any) -> jax.Array:
    """Returns `value` as an array, or says that the loss takes one array."""
    if isinstance(value, (dict, list, tuple)):
        raise LossError(f"{name} takes one array of {role}. Received: a {type(value).__name__} of {len(value)}. Give a loss for each output.")
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
        if targets.shape in (outputs.shape[:-1], (*outputs.shape[:-1], 1)):
            advice = "For integer class labels use 'sparse_categorical_crossentropy'; else the model's last layer should have as many features as the targets."
        raise mismatch(name, outputs, targets, "outputs and targets of one shape (a last axis of length 1 may be missing)", advice)
    return outputs.astype(jnp.float32), targets.astype(jnp.float32)


def mean_of_last_axis(values: jax.Array) -> jax.Array:
    """Returns the mean over the last axis; of one number per example, `[batch]`, the numbers themselves."""
    return values.mean(axis=-1) if values.ndim > 1 else values


def check_classes(name: str, outputs: jax.Array, targets: jax.Array) -> None:
    """Checks that outputs are logits `[batch, ..., classes]` of at least two classes."""
    if outputs.ndim < 2:
        raise mismatch(name, outputs, targets, "logits [batch, ..., classes]", "For one logit per example use 'binary_crossentropy'.")
    if outputs.shape[-1] == 1:
        raise mismatch(name, outputs, targets, "at least two classes (of one it is always 0)", "For one logit per example use 'binary_crossentropy'.")


def check_smoothing(name: str, label_smoothing: float) -> None:
    """Checks that `label_smoothing` lies in 0..1."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise LossError(f"{name}(label_smoothing=...) must be within 0..1. Received: {label_smoothing!r}.")


def mismatch(name: str, outputs: jax.Array, targets: jax.Array, takes: str, advice: str) -> LossError:
    """Returns the error for shapes that do not fit."""
    return LossError(f"{name} takes {takes}. Received: outputs {list(outputs.shape)}, targets {list(targets.shape)}. {advice}")
