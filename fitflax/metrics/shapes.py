"""Checks of the shapes of outputs and targets that metrics share."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fitflax.errors import MetricError
from fitflax.losses.shapes import nan_unless
from fitflax.metrics.base import broadcast_weights

__all__ = ["Examples", "Targets", "arrays", "as_examples", "class_labels", "mismatch", "same_shape", "weights_of"]

Targets = Literal["integer", "one-hot", "integer or one-hot"]


class Examples(NamedTuple):
    """Outputs, targets and weights as rows, one for each example, token or pixel.

    Attributes:
        kind: Kind of problem, from the shapes: one logit for a binary target, classes that exclude each other, or independent binary labels.
        scores: Outputs, float32 `[rows, columns]`; one logit is one column.
        labels: float32; the class `[rows, 1]` for classes, else 0 or 1, `[rows, columns]`.
        weights: float32 `[rows]`.
    """

    kind: Literal["one logit", "classes", "labels"]
    scores: jax.Array
    labels: jax.Array
    weights: jax.Array


def as_examples(outputs: Any, targets: Any, weights: Any, *, multi_label: bool, name: str) -> Examples:
    """Returns a batch as rows; shapes and the kind of problem are as in the table of `Precision`, and errors begin with the `name` of the metric."""
    kind: Literal["one logit", "classes", "labels"]
    try:
        outputs, targets = arrays(outputs, targets)
        if multi_label:
            kind, (outputs, targets) = "labels", same_shape(outputs, targets)
            if outputs.ndim < 2:
                raise mismatch("outputs and targets [batch, ..., labels] with multi_label=True", outputs, targets)
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
    # float32 is exact for classes below 2^24, and keeps non-integers invalid.
    labels = targets.astype(jnp.float32).reshape(-1, columns if kind == "labels" else 1)
    return Examples(kind, outputs.astype(jnp.float32).reshape(-1, columns), labels, rows.reshape(-1))


def weights_of(examples: Examples) -> jax.Array:
    """Returns the weights `[rows, columns]` or `[rows, 1]`, NaN where the output is NaN, so that sums of them are NaN; but never where the weight is 0.

    A NaN affects its whole row, except that independent labels have only their own column.
    """
    is_nan = jnp.isnan(examples.scores)
    if examples.kind != "labels":
        is_nan = is_nan.any(axis=-1, keepdims=True)
    weights = examples.weights[:, None]
    return nan_unless(~is_nan | (weights == 0), weights)


def arrays(outputs: Any, targets: Any, *, takes_complex: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns both as arrays, after checking that each is a single array, and real unless the metric `takes_complex`."""
    for role, value in (("outputs", outputs), ("targets", targets)):
        if isinstance(value, (dict, list, tuple)):
            raise MetricError(
                f"It takes one array of {role}. Received: a {type(value).__name__} of length {len(value)}. "
                "Pass metrics for each output, or concatenate them into one array."
            )
        if jnp.iscomplexobj(value) and not takes_complex:
            advice = "Use 'mse', 'mae', 'rmse' or 'r2', which take magnitudes of errors."
            raise MetricError(f"It takes real {role}. Received: {role} of dtype {jnp.result_type(value)}. {advice}")
    return jnp.asarray(outputs), jnp.asarray(targets)


def same_shape(outputs: Any, targets: Any, *, takes_complex: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns both in one shape; restores a missing trailing axis of length 1."""
    outputs, targets = arrays(outputs, targets, takes_complex=takes_complex)
    if outputs.shape == (*targets.shape, 1):
        targets = targets[..., None]
    elif targets.shape == (*outputs.shape, 1):
        outputs = outputs[..., None]
    if outputs.shape != targets.shape or outputs.ndim == 0:
        raise mismatch("outputs and targets of the same shape [batch, ...] (a last axis of length 1 may be missing)", outputs, targets)
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
    """Returns the error for shapes that do not match."""
    # `update` prepends the name of the metric.
    return MetricError(f"It takes {takes}. Received: outputs {list(outputs.shape)}, targets {list(targets.shape)}.")
