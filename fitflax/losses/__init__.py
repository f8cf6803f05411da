"""Loss functions, `(outputs, targets) -> values`, and their names.

A loss returns one float32 value per example or per token, never a mean over the batch; the step applies weights and sums. Lower is better for all of them.
The formulas are those of Keras, reduced over the last axis. Outputs are logits where Keras takes probabilities, and log rates where it takes rates.
Optax's other losses are available by name. Each loss takes a single array of outputs and a single array of targets.
"""

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import optax

from fitflax.errors import LossError, did_you_mean
from fitflax.losses import keras_losses, shapes
from fitflax.losses.keras_losses import (
    binary_crossentropy,
    binary_focal_crossentropy,
    categorical_crossentropy,
    categorical_focal_crossentropy,
    categorical_hinge,
    cosine_similarity,
    hinge,
    huber,
    kl_divergence,
    log_cosh,
    mean_absolute_error,
    mean_absolute_percentage_error,
    mean_squared_error,
    mean_squared_logarithmic_error,
    poisson,
    sparse_categorical_crossentropy,
    squared_hinge,
)

__all__ = ["binary_crossentropy", "binary_focal_crossentropy", "categorical_crossentropy", "categorical_focal_crossentropy", "categorical_hinge"]
__all__ += ["cosine_similarity", "get", "hinge", "huber", "kl_divergence", "log_cosh", "mean_absolute_error", "mean_absolute_percentage_error"]
__all__ += ["mean_squared_error", "mean_squared_logarithmic_error", "names", "poisson", "sparse_categorical_crossentropy", "squared_hinge"]

# The modules of version 0.1, whose names are in pickles of scikit-learn estimators.
sys.modules.update({f"{__name__}.{name}": keras_losses for name in ("classification", "regression")})

# -- losses that only Optax has --

# Under its names and with its formulas: checked, in float32, one value per example or token. Excluded are losses of pairs or triplets (`ntxent`,
# `triplet_margin_loss`), those that need paddings (`ctc_loss`) and those that reduce over the batch (`multiclass_generalized_dice_loss`). Where Keras has
# the same name, the formula of Keras applies. Options have Optax's defaults; for other values, pass the Optax function itself as the loss.
_Loss = Callable[[Any, Any], jax.Array]
_Check = Callable[[str, Any, Any], tuple[jax.Array, jax.Array]]

# Replaces logits and log probabilities of -inf: the probability is still 0, but 0 times it is 0, not NaN.
_MIN_LOGIT = -1e30

_USE_LABELS = "For integer labels use 'softmax_cross_entropy_with_integer_labels'."


def _loss(name: str, check: _Check, *, is_elementwise: bool = False, **options: Any) -> _Loss:
    """Returns the Optax loss called `name`, applied to the result of `check`; an element-wise loss is averaged over the last axis."""
    formula = getattr(optax.losses, name)

    def loss(outputs: Any, targets: Any) -> jax.Array:
        values: jax.Array = formula(*check(name, outputs, targets), **options)
        return shapes.mean_of_last_axis(values) if is_elementwise else values

    return _with_name(loss, name)


def _class_rows(name: str, outputs: Any, targets: Any, **roles: str) -> tuple[jax.Array, jax.Array]:
    """Returns outputs and targets as `class_rows` does, with -inf replaced by a finite number. `roles` are its other arguments."""
    outputs, targets = shapes.class_rows(name, outputs, targets, **roles)
    return jnp.maximum(outputs, _MIN_LOGIT), jnp.maximum(targets, _MIN_LOGIT)


def _rows(*, binary: str = "sigmoid_binary_cross_entropy", labels: str, role: str = "one-hot targets") -> _Check:
    return functools.partial(_class_rows, binary=binary, labels=labels, role=role)


def _label_loss(name: str, binary: str) -> _Loss:
    """Returns a loss of integer labels; a label out of range gives NaN without a gradient."""
    formula = getattr(optax.losses, name)

    def loss(outputs: Any, targets: Any) -> jax.Array:
        advice = "Turn one-hot targets into labels: targets.argmax(axis=-1)."
        outputs, labels, known = shapes.class_labels(name, outputs, targets, binary=binary, one_hot=advice)
        # Optax's sparsemax takes only one axis of examples.
        rows = jnp.maximum(outputs, _MIN_LOGIT).reshape(-1, outputs.shape[-1])
        values = formula(rows, jnp.where(known, labels, 0).reshape(-1))
        return shapes.nan_unless(known, values.reshape(labels.shape))

    return _with_name(loss, name)


def _with_name(loss: _Loss, name: str) -> _Loss:
    # As a metric, a function is logged under its name.
    loss.__name__ = loss.__qualname__ = name
    loss.__doc__ = f"Returns `optax.losses.{name}` of each example; the table of docs/losses-and-metrics.md has the formula and the shapes."
    return loss


# Losses of integer labels by name, each with the loss that errors suggest for one number per example.
_BINARY_LOSSES = {
    "multiclass_hinge_loss": "hinge_loss",
    "multiclass_perceptron_loss": "perceptron_loss",
    "multiclass_sparsemax_loss": "sparsemax_loss",
    "softmax_cross_entropy_with_integer_labels": "sigmoid_binary_cross_entropy",
}
_LABEL_LOSSES = {name: _label_loss(name, binary) for name, binary in _BINARY_LOSSES.items()}

_ELEMENTWISE = ("hinge_loss", "huber_loss", "l2_loss", "perceptron_loss", "sigmoid_binary_cross_entropy", "sigmoid_focal_loss", "sparsemax_loss")
_CLASS_ROWS = {
    "safe_softmax_cross_entropy": _rows(labels=_USE_LABELS),
    "softmax_cross_entropy": _rows(labels=_USE_LABELS),
    "poly_loss_cross_entropy": _rows(labels=shapes.TO_ONE_HOT),
    "dice_loss": _rows(binary="binary_dice_loss", labels=shapes.TO_ONE_HOT),
    "generalized_kl_divergence": _rows(binary="poisson", labels=shapes.TO_ONE_HOT, role="amounts"),
    "kl_divergence_with_log_targets": _rows(labels=_USE_LABELS, role="log probabilities"),
}
_RELEVANCES = _rows(binary="mean_squared_error", labels="Pass one relevance for each item.", role="relevances")

_OPTAX_LOSSES: dict[str, _Loss] = {
    **_LABEL_LOSSES,
    **{name: _loss(name, shapes.same_shape, is_elementwise=True) for name in (*_ELEMENTWISE, "squared_error")},
    **{name: _loss(name, check) for name, check in _CLASS_ROWS.items()},
    "binary_dice_loss": _loss("binary_dice_loss", shapes.same_shape),
    # A lower bound for squared norms; without it the gradient of a row of zeros is NaN.
    "cosine_distance": _loss("cosine_distance", shapes.vectors, epsilon=1e-12),
    # Optax averages over the lists, which are the examples here.
    "ranking_softmax_loss": _loss("ranking_softmax_loss", _RELEVANCES, reduce_fn=None),
}


# -- all losses by name --

# A new loss is a function of `keras_losses`, listed in its `__all__`.
_LOSSES: dict[str, Callable[..., jax.Array]] = {
    **{name: getattr(keras_losses, name) for name in keras_losses.__all__},
    "mse": mean_squared_error,
    "mae": mean_absolute_error,
    "mape": mean_absolute_percentage_error,
    "msle": mean_squared_logarithmic_error,
    **_OPTAX_LOSSES,
}

# Names of other libraries and former names of Keras and Optax. They appear only in the suggestion of an error.
_ALIASES = {
    "bce": "binary_crossentropy",
    "binary_logistic_loss": "binary_crossentropy",
    "binary_sparsemax_loss": "sparsemax_loss",
    "convex_kl_divergence": "generalized_kl_divergence",
    "cross_entropy": "sparse_categorical_crossentropy",
    "crossentropy": "sparse_categorical_crossentropy",
    "dice": "dice_loss",
    "focal_loss": "binary_focal_crossentropy",
    "kld": "kl_divergence",
    "kullback_leibler_divergence": "kl_divergence",
    "l1_loss": "mean_absolute_error",
    "logcosh": "log_cosh",
    "multiclass_logistic_loss": "sparse_categorical_crossentropy",
    "poisson_nll_loss": "poisson",
}

# The losses that apply a softmax or sigmoid to the outputs.
_LOGIT_LOSSES = (
    *("kl_divergence", "binary_crossentropy", "binary_focal_crossentropy", "categorical_crossentropy", "categorical_focal_crossentropy"),
    *("sparse_categorical_crossentropy", "sigmoid_binary_cross_entropy", "sigmoid_focal_loss", "softmax_cross_entropy", "safe_softmax_cross_entropy"),
    *("softmax_cross_entropy_with_integer_labels", "poly_loss_cross_entropy", "dice_loss", "binary_dice_loss"),
)


def get(name: str) -> Callable[..., jax.Array]:
    """Returns the loss function called `name`.

    Args:
        name: One of `names()`. For other aliases, such as the class names of Keras (`"MeanSquaredError"`), the error suggests the name.

    Raises:
        LossError: There is no such loss.

    >>> get("mse") is mean_squared_error
    True
    """
    if not isinstance(name, str):
        raise LossError(f"losses.get() takes a name. Received: {name!r}.")
    if name not in _LOSSES:
        raise LossError(
            f"There is no loss {name!r}.{_closest(name)} Pass a known name, or a function (outputs, targets) -> one value per example. Known: {names()}."
        )
    return _LOSSES[name]


def names() -> list[str]:
    """Returns the names that `get` accepts, sorted.

    >>> "mse" in names()
    True
    """
    return sorted(_LOSSES)


def loss_direction(loss: Any) -> Literal["min"] | None:
    """Returns `"min"` for a loss of this package, given by name, function or `functools.partial`; else `None`.

    >>> loss_direction("mse"), loss_direction(functools.partial(huber, delta=2.0)), loss_direction(len)
    ('min', 'min', None)
    """
    loss = _without_partial(loss)
    return "min" if any(loss is known or loss == name for name, known in _LOSSES.items()) else None


def takes_labels(loss: Any) -> bool:
    """Returns whether a function, or a `functools.partial` of one, is a loss of this package that takes integer class labels.

    >>> takes_labels(sparse_categorical_crossentropy), takes_labels(categorical_crossentropy)
    (True, False)
    """
    loss = _without_partial(loss)
    return any(loss is known for known in (sparse_categorical_crossentropy, *_LABEL_LOSSES.values()))


def takes_logits(name: str) -> bool:
    """Returns whether the loss with a name takes logits.

    >>> takes_logits("binary_crossentropy"), takes_logits("mse")
    (True, False)
    """
    return name in _LOGIT_LOSSES


def _without_partial(loss: Any) -> Any:
    while isinstance(loss, functools.partial):
        loss = loss.func
    return loss


def _closest(name: str) -> str:
    """Returns the hint for an unknown name.

    >>> _closest("KLDivergence")
    " Did you mean 'kl_divergence'?"
    """
    return did_you_mean(_ALIASES.get(name.lower(), name.lower()), _LOSSES)


if not TYPE_CHECKING:  # Otherwise type checkers would accept any attribute name.

    def __getattr__(name):
        """For the name of a Keras class, the error names the function."""
        close = _closest(name) if name[:1].isupper() else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{f'. Losses are functions, which compile takes by name.{close}' if close else ''}")
