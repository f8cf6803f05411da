"""Losses that only Optax has, under its names and with its formulas: checked, in float32, one value per example or token.

Excluded are losses of pairs or triplets (`ntxent`, `triplet_margin_loss`), those that need paddings (`ctc_loss`) and those that reduce over the batch
(`multiclass_generalized_dice_loss`). Where Keras has the same name, the formula of Keras applies. Options have Optax's defaults; for other values, pass
the Optax function itself as the loss.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fitflax.losses.shapes import class_labels, class_rows, mean_of_last_axis, nan_unless, same_shape, vectors

__all__ = ["LABEL_LOSSES", "OPTAX_LOSSES"]

Loss = Callable[[Any, Any], jax.Array]

# Replaces logits and log probabilities of -inf: the probability is still 0, but 0 times it is 0, not NaN.
_MIN_LOGIT = -1e30

_USE_LABELS = "For integer labels use 'softmax_cross_entropy_with_integer_labels'."
_TO_ONE_HOT = "Make integer labels one-hot: jax.nn.one_hot(labels, classes)."


def _elementwise_loss(name: str) -> Loss:
    """Returns an element-wise loss, averaged over the last axis."""
    formula = getattr(optax.losses, name)

    def loss(outputs: Any, targets: Any) -> jax.Array:
        return mean_of_last_axis(formula(*same_shape(name, outputs, targets)))

    return _with_name(loss, name)


def _checked_loss(name: str, check: Callable[[str, Any, Any], tuple[jax.Array, jax.Array]], **options: Any) -> Loss:
    """Returns the Optax loss, applied to the inputs that `check` returns."""
    formula = getattr(optax.losses, name)

    def loss(outputs: Any, targets: Any) -> jax.Array:
        values: jax.Array = formula(*check(name, outputs, targets), **options)
        return values

    return _with_name(loss, name)


def _class_row_loss(name: str, *, binary: str, labels: str, role: str = "one-hot targets", **options: Any) -> Loss:
    """Returns a loss of two rows with one number per class; see `class_rows` for the arguments."""
    formula = getattr(optax.losses, name)

    def loss(outputs: Any, targets: Any) -> jax.Array:
        outputs, targets = class_rows(name, outputs, targets, binary=binary, labels=labels, role=role)
        values: jax.Array = formula(jnp.maximum(outputs, _MIN_LOGIT), jnp.maximum(targets, _MIN_LOGIT), **options)
        return values

    return _with_name(loss, name)


def _label_loss(name: str, *, binary: str) -> Loss:
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


LABEL_LOSSES: dict[str, Loss] = {
    "multiclass_hinge_loss": _label_loss("multiclass_hinge_loss", binary="hinge_loss"),
    "multiclass_perceptron_loss": _label_loss("multiclass_perceptron_loss", binary="perceptron_loss"),
    "multiclass_sparsemax_loss": _label_loss("multiclass_sparsemax_loss", binary="sparsemax_loss"),
    "softmax_cross_entropy_with_integer_labels": _label_loss("softmax_cross_entropy_with_integer_labels", binary="sigmoid_binary_cross_entropy"),
}

OPTAX_LOSSES: dict[str, Loss] = {
    **LABEL_LOSSES,
    "hinge_loss": _elementwise_loss("hinge_loss"),
    "huber_loss": _elementwise_loss("huber_loss"),
    "l2_loss": _elementwise_loss("l2_loss"),
    "perceptron_loss": _elementwise_loss("perceptron_loss"),
    "sigmoid_binary_cross_entropy": _elementwise_loss("sigmoid_binary_cross_entropy"),
    "sigmoid_focal_loss": _elementwise_loss("sigmoid_focal_loss"),
    "sparsemax_loss": _elementwise_loss("sparsemax_loss"),
    "squared_error": _elementwise_loss("squared_error"),
    # A lower bound for squared norms; without it the gradient of a row of zeros is NaN.
    "cosine_distance": _checked_loss("cosine_distance", vectors, epsilon=1e-12),
    "safe_softmax_cross_entropy": _class_row_loss("safe_softmax_cross_entropy", binary="sigmoid_binary_cross_entropy", labels=_USE_LABELS),
    "softmax_cross_entropy": _class_row_loss("softmax_cross_entropy", binary="sigmoid_binary_cross_entropy", labels=_USE_LABELS),
    "poly_loss_cross_entropy": _class_row_loss("poly_loss_cross_entropy", binary="sigmoid_binary_cross_entropy", labels=_TO_ONE_HOT),
    "dice_loss": _class_row_loss("dice_loss", binary="binary_dice_loss", labels=_TO_ONE_HOT),
    "binary_dice_loss": _checked_loss("binary_dice_loss", same_shape),
    "generalized_kl_divergence": _class_row_loss("generalized_kl_divergence", binary="poisson", labels=_TO_ONE_HOT, role="amounts"),
    "kl_divergence_with_log_targets": _class_row_loss(
        "kl_divergence_with_log_targets", binary="sigmoid_binary_cross_entropy", labels=_USE_LABELS, role="log probabilities"
    ),
    # Optax averages over the lists, which are the examples here.
    "ranking_softmax_loss": _class_row_loss(
        "ranking_softmax_loss", binary="mean_squared_error", labels="Pass one relevance for each item.", role="relevances", reduce_fn=None
    ),
}
