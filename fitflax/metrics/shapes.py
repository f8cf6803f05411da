"""What metrics check and read off the shapes of outputs and targets."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from fitflax.errors import MetricError

__all__ = ["Targets", "arrays", "class_labels", "mismatch", "same_shape"]

Targets = Literal["integer", "one-hot", "integer or one-hot"]


def arrays(outputs: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Returns both as arrays, or says that a metric takes one of each."""
    for role, value in (("outputs", outputs), ("targets", targets)):
        if isinstance(value, (dict, list, tuple)):
            raise MetricError(f"It takes one array of {role}. Received: a {type(value).__name__} of {len(value)}. Give metrics for each output.")
    return jnp.asarray(outputs), jnp.asarray(targets)


def same_shape(outputs: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Returns both in one shape; a missing last axis of length 1 is put back."""
    outputs, targets = arrays(outputs, targets)
    if outputs.shape == (*targets.shape, 1):
        targets = targets[..., None]
    elif targets.shape == (*outputs.shape, 1):
        outputs = outputs[..., None]
    if outputs.shape != targets.shape or outputs.ndim == 0:
        raise mismatch("outputs and targets of one shape [batch, ...] (a last axis of length 1 may be missing)", outputs, targets)
    return outputs, targets


def class_labels(outputs: Any, targets: Any, kind: Targets) -> tuple[jax.Array, jax.Array]:
    """Returns outputs `[..., classes]` and labels `[...]`, from labels `[...]` or `[..., 1]` or from one-hot rows."""
    outputs, targets = arrays(outputs, targets)
    if outputs.ndim > 1 and kind != "one-hot" and targets.shape in (outputs.shape[:-1], (*outputs.shape[:-1], 1)):
        return outputs, targets.reshape(outputs.shape[:-1])
    if outputs.ndim > 1 and kind != "integer" and targets.shape == outputs.shape:
        return outputs, jnp.argmax(targets, axis=-1)
    raise mismatch(f"outputs [..., classes] with {kind} targets", outputs, targets)


def mismatch(takes: str, outputs: jax.Array, targets: jax.Array) -> MetricError:
    """Returns the error for shapes that do not fit."""
    # `Mean.update` and `R2.update` put the metric's name in front.
    return MetricError(f"It takes {takes}. Received: outputs {list(outputs.shape)}, targets {list(targets.shape)}.")


# The key of a metric is the name that the user wrote, so each of these takes `name`.
