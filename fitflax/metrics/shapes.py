"""What metrics check and read off the shapes of outputs and targets."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fitflax.errors import MetricError
from fitflax.metrics.base import broadcast_weights

__all__ = ["Examples", "Targets", "arrays", "as_examples", "class_labels", "mismatch", "same_shape"]

Targets = Literal["integer", "one-hot", "integer or one-hot"]


class Examples(NamedTuple):
    """Outputs, targets and weights as rows, one for each example, token or pixel.

    Attributes:
        kind: What was read off the shapes: one logit for a yes-or-no target, classes of which one is right, or labels that are yes or no each for itself.
        scores: The outputs, float32 `[rows, columns]`; one logit is one column.
        labels: float32; the class, `[rows, 1]`, where there are classes, else 0 or 1, `[rows, columns]`.
        weights: float32 `[rows]`.
    """

    kind: Literal["one logit", "classes", "labels"]
    scores: jax.Array
    labels: jax.Array
    weights: jax.Array


def as_examples(outputs: Any, targets: Any, weights: Any, *, multi_label: bool, name: str) -> Examples:
    """Returns a batch as rows, by the rule of `Accuracy`.

    Args:
        outputs: `[batch]` or `[..., 1]` for one logit, else `[..., classes]`, or `[..., labels]` with `multi_label`.
        targets: 0 or 1 for one logit and for labels, in the shape of the outputs; labels of classes, `[...]` or `[..., 1]`, or their one-hot rows.
        weights: The leading axes of the outputs, without classes and labels.
        multi_label: Whether the last axis holds labels that are yes or no each for itself.
        name: The metric's; it stands in errors.

    Raises:
        MetricError: The shapes do not fit.
    """
    kind: Literal["one logit", "classes", "labels"]
    try:
        outputs, targets = arrays(outputs, targets)
        if multi_label:
            kind, (outputs, targets) = "labels", same_shape(outputs, targets)
            if outputs.ndim < 2:
                raise mismatch("outputs and targets [batch, ..., labels] where multi_label=True", outputs, targets)
            shape = outputs.shape[:-1]
        elif outputs.ndim < 2 or outputs.shape[-1] == 1:
            kind, (outputs, targets) = "one logit", same_shape(outputs, targets)
            shape = outputs.shape
        else:
            kind, (outputs, targets) = "classes", class_labels(outputs, targets, "integer or one-hot")
            shape = targets.shape
        rows = broadcast_weights(weights, shape)
    except MetricError as error:
        raise MetricError(f"Metric {name!r}: {error}") from error
    columns = 1 if kind == "one logit" else outputs.shape[-1]
    # float32 holds every class below 2^24, and what is no integer remains none.
    labels = targets.astype(jnp.float32).reshape(-1, columns if kind == "labels" else 1)
    return Examples(kind, outputs.astype(jnp.float32).reshape(-1, columns), labels, rows.reshape(-1))


def arrays(outputs: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Returns both as arrays, or says that a metric takes one of each."""
    for role, value in (("outputs", outputs), ("targets", targets)):
        if isinstance(value, (dict, list, tuple)):
            raise MetricError(
                f"It takes one array of {role}. Received: a {type(value).__name__} of {len(value)}. Give metrics for each output, or join them to one array."
            )
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
    # `update` puts the metric's name in front.
    return MetricError(f"It takes {takes}. Received: outputs {list(outputs.shape)}, targets {list(targets.shape)}.")
