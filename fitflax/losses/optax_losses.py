"""The losses that only optax has, under optax's names and in its formulas, with this package's checks, in float32, one value per example or token.

Left out is what does not map outputs and targets to values per example: losses of pairs or triplets (`ntxent`, `triplet_margin_loss`), those that need
paddings (`ctc_loss`) or join the batch (`multiclass_generalized_dice_loss`). Names that Keras has too mean Keras's formulas and are elsewhere. Options are
optax's defaults; for others give optax's function itself as the loss.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fitflax.losses.shapes import class_labels, class_rows, mean_of_last_axis, same_shape, vectors

__all__ = ["LABEL_LOSSES", "OPTAX_LOSSES"]

Loss = Callable[[Any, Any], jax.Array]

# In place of -inf, the logit or log probability of a class that is ruled out: its probability is 0 as well, and 0 times it is 0, not NaN.
_LEAST = -1e30

_USE_LABELS = "For integer labels use 'softmax_cross_entropy_with_integer_labels'."
_TO_ONE_HOT = "Make integer labels one-hot: jax.nn.one_hot(labels, classes)."


def _elementwise(name: str) -> Loss:
    """Returns the loss of numbers or yes-or-no targets, averaged over the last axis."""
    formula = getattr(optax.losses, name)

    def loss(outputs: Any, targets: Any) -> jax.Array:
        return mean_of_last_axis(formula(*same_shape(name, outputs, targets)))

    return _named(loss, name)


def _checked(name: str, check: Callable[[str, Any, Any], tuple[jax.Array, jax.Array]], **options: Any) -> Loss:
    """Returns the loss as it is, after `check`."""
    formula = getattr(optax.losses, name)

    def loss(outputs: Any, targets: Any) -> jax.Array:
        values: jax.Array = formula(*check(name, outputs, targets), **options)
        return values

    return _named(loss, name)


def _of_rows(name: str, *, binary: str, labels: str, role: str = "one-hot targets", **options: Any) -> Loss:
    """Returns the loss between two rows of one number per class; see `class_rows` for the arguments."""
    formula = getattr(optax.losses, name)

    def loss(outputs: Any, targets: Any) -> jax.Array:
        outputs, targets = class_rows(name, outputs, targets, binary=binary, labels=labels, role=role)
        values: jax.Array = formula(jnp.maximum(outputs, _LEAST), jnp.maximum(targets, _LEAST), **options)
        return values

    return _named(loss, name)


def _of_labels(name: str, *, binary: str) -> Loss:
    """Returns the loss of integer labels; one that is no class gives NaN, and no gradient."""
    formula = getattr(optax.losses, name)

    def loss(outputs: Any, targets: Any) -> jax.Array:
        advice = "Turn one-hot targets into labels: targets.argmax(axis=-1)."
        outputs, labels, known = class_labels(name, outputs, targets, binary=binary, one_hot=advice)
        # One axis of examples: optax's sparsemax takes no more.
        rows = jnp.maximum(outputs, _LEAST).reshape(-1, outputs.shape[-1])
        values = formula(rows, jnp.where(known, labels, 0).reshape(-1))
        return jnp.where(known, values.reshape(labels.shape), jnp.nan)

    return _named(loss, name)


def _named(loss: Loss, name: str) -> Loss:
    # A function that is given as a metric is logged under its name.
    loss.__name__ = loss.__qualname__ = name
    loss.__doc__ = f"Returns `optax.losses.{name}` of each example; the table of docs/losses-and-metrics.md has the formula and the shapes."
    return loss


LABEL_LOSSES: dict[str, Loss] = {
    "multiclass_hinge_loss": _of_labels("multiclass_hinge_loss", binary="hinge_loss"),
    "multiclass_perceptron_loss": _of_labels("multiclass_perceptron_loss", binary="perceptron_loss"),
    "multiclass_sparsemax_loss": _of_labels("multiclass_sparsemax_loss", binary="sparsemax_loss"),
    "softmax_cross_entropy_with_integer_labels": _of_labels("softmax_cross_entropy_with_integer_labels", binary="sigmoid_binary_cross_entropy"),
}

OPTAX_LOSSES: dict[str, Loss] = {
    **LABEL_LOSSES,
    "hinge_loss": _elementwise("hinge_loss"),
    "huber_loss": _elementwise("huber_loss"),
    "l2_loss": _elementwise("l2_loss"),
    "perceptron_loss": _elementwise("perceptron_loss"),
    "sigmoid_binary_cross_entropy": _elementwise("sigmoid_binary_cross_entropy"),
    "sigmoid_focal_loss": _elementwise("sigmoid_focal_loss"),
    "sparsemax_loss": _elementwise("sparsemax_loss"),
    "squared_error": _elementwise("squared_error"),
    # A bound of squared lengths, without which a row of zeros has NaN for its gradient.
    "cosine_distance": _checked("cosine_distance", vectors, epsilon=1e-12),
    "safe_softmax_cross_entropy": _of_rows("safe_softmax_cross_entropy", binary="sigmoid_binary_cross_entropy", labels=_USE_LABELS),
    "softmax_cross_entropy": _of_rows("softmax_cross_entropy", binary="sigmoid_binary_cross_entropy", labels=_USE_LABELS),
    "poly_loss_cross_entropy": _of_rows("poly_loss_cross_entropy", binary="sigmoid_binary_cross_entropy", labels=_TO_ONE_HOT),
    "dice_loss": _of_rows("dice_loss", binary="binary_dice_loss", labels=_TO_ONE_HOT),
    "binary_dice_loss": _checked("binary_dice_loss", same_shape),
    "generalized_kl_divergence": _of_rows("generalized_kl_divergence", binary="poisson", labels=_TO_ONE_HOT, role="amounts"),
    "kl_divergence_with_log_targets": _of_rows(
        "kl_divergence_with_log_targets", binary="sigmoid_binary_cross_entropy", labels=_USE_LABELS, role="log probabilities"
    ),
    # optax averages over the lists, which here are the examples.
    "ranking_softmax_loss": _of_rows(
        "ranking_softmax_loss", binary="mean_squared_error", labels="Give one relevance for each item.", role="relevances", reduce_fn=None
    ),
}
