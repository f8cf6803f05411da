"""Losses that only Optax has, under its names and with its formulas: checked, in float32, one value per example or token.

Excluded are losses of pairs or triplets (`ntxent`, `triplet_margin_loss`), those that need paddings (`ctc_loss`) and those that reduce over the batch
(`multiclass_generalized_dice_loss`). Where Keras has the same name, the formula of Keras applies. Options have Optax's defaults; for other values, pass
the Optax function itself as the loss.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fitflax.losses.shapes import class_labels, class_rows, mean_of_last_axis, nan_unless, same_shape, vectors

Loss = Callable[[Any, Any], jax.Array]
Check = Callable[[str, Any, Any], tuple[jax.Array, jax.Array]]

# Replaces logits and log probabilities of -inf: the probability is still 0, but 0 times it is 0, not NaN.
_MIN_LOGIT = -1e30

_USE_LABELS = "For integer labels use 'softmax_cross_entropy_with_integer_labels'."
_TO_ONE_HOT = "Make integer labels one-hot: jax.nn.one_hot(labels, classes)."


def _loss(name: str, check: Check, *, is_elementwise: bool = False, **options: Any) -> Loss:
    """Returns the Optax loss of what `check` returns; an element-wise loss is averaged over the last axis."""
    formula = getattr(optax.losses, name)

    def loss(outputs: Any, targets: Any) -> jax.Array:
        values: jax.Array = formula(*check(name, outputs, targets), **options)
        return mean_of_last_axis(values) if is_elementwise else values

    return _with_name(loss, name)


def _class_rows(name: str, outputs: Any, targets: Any, **roles: str) -> tuple[jax.Array, jax.Array]:
    """Returns two rows with one finite number per class; see `class_rows` for `roles`."""
    outputs, targets = class_rows(name, outputs, targets, **roles)
    return jnp.maximum(outputs, _MIN_LOGIT), jnp.maximum(targets, _MIN_LOGIT)


def _rows(*, binary: str = "sigmoid_binary_cross_entropy", labels: str, role: str = "one-hot targets") -> Check:
    return functools.partial(_class_rows, binary=binary, labels=labels, role=role)


def _label_loss(name: str, binary: str) -> Loss:
    """Returns a loss of integer labels; a label out of range gives NaN without a gradient."""
    formula = getattr(optax.losses, name)

    def loss(outputs: Any, targets: Any) -> jax.Array:
        advice = "Turn one-hot targets into labels: targets.argmax(axis=-1)."
        outputs, labels, known = class_labels(name, outputs, targets, binary=binary, one_hot=advice)
        # Optax's sparsemax takes only one axis of examples.
        rows = jnp.maximum(outputs, _MIN_LOGIT).reshape(-1, outputs.shape[-1])
        values = formula(rows, jnp.where(known, labels, 0).reshape(-1))
        return nan_unless(known, values.reshape(labels.shape))

    return _with_name(loss, name)


def _with_name(loss: Loss, name: str) -> Loss:
    # As a metric, a function is logged under its name.
    loss.__name__ = loss.__qualname__ = name
    loss.__doc__ = f"Returns `optax.losses.{name}` of each example; the table of docs/losses-and-metrics.md has the formula and the shapes."
    return loss


# By name, with the loss for one number per example, which errors suggest.
_LABEL_LOSSES = {
    "multiclass_hinge_loss": "hinge_loss",
    "multiclass_perceptron_loss": "perceptron_loss",
    "multiclass_sparsemax_loss": "sparsemax_loss",
    "softmax_cross_entropy_with_integer_labels": "sigmoid_binary_cross_entropy",
}
LABEL_LOSSES = {name: _label_loss(name, binary) for name, binary in _LABEL_LOSSES.items()}

_ELEMENTWISE = ("hinge_loss", "huber_loss", "l2_loss", "perceptron_loss", "sigmoid_binary_cross_entropy", "sigmoid_focal_loss", "sparsemax_loss")
_CLASS_ROWS = {
    "safe_softmax_cross_entropy": _rows(labels=_USE_LABELS),
    "softmax_cross_entropy": _rows(labels=_USE_LABELS),
    "poly_loss_cross_entropy": _rows(labels=_TO_ONE_HOT),
    "dice_loss": _rows(binary="binary_dice_loss", labels=_TO_ONE_HOT),
    "generalized_kl_divergence": _rows(binary="poisson", labels=_TO_ONE_HOT, role="amounts"),
    "kl_divergence_with_log_targets": _rows(labels=_USE_LABELS, role="log probabilities"),
}
_RELEVANCES = _rows(binary="mean_squared_error", labels="Pass one relevance for each item.", role="relevances")

OPTAX_LOSSES: dict[str, Loss] = {
    **LABEL_LOSSES,
    **{name: _loss(name, same_shape, is_elementwise=True) for name in (*_ELEMENTWISE, "squared_error")},
    **{name: _loss(name, check) for name, check in _CLASS_ROWS.items()},
    "binary_dice_loss": _loss("binary_dice_loss", same_shape),
    # A lower bound for squared norms; without it the gradient of a row of zeros is NaN.
    "cosine_distance": _loss("cosine_distance", vectors, epsilon=1e-12),
    # Optax averages over the lists, which are the examples here.
    "ranking_softmax_loss": _loss("ranking_softmax_loss", _RELEVANCES, reduce_fn=None),
}
