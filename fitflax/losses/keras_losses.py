"""Losses with the formulas of Keras: of logits or scores of classes, and of numbers, counts or vectors, which are reduced over the last axis."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fitflax.errors import LossError
from fitflax.losses.shapes import TO_ONE_HOT, class_labels, class_rows, mean_of_last_axis, nan_unless, same_shape, vectors

__all__ = ["binary_crossentropy", "binary_focal_crossentropy", "categorical_crossentropy", "categorical_focal_crossentropy", "categorical_hinge"]
__all__ += ["cosine_similarity", "hinge", "huber", "kl_divergence", "log_cosh", "mean_absolute_error", "mean_absolute_percentage_error"]
__all__ += ["mean_squared_error", "mean_squared_logarithmic_error", "poisson", "sparse_categorical_crossentropy", "squared_hinge"]

_USE_SPARSE = "For integer labels use 'sparse_categorical_crossentropy'."

# The epsilon of Keras: a lower bound for divisors and arguments of logarithms.
_EPSILON = 1e-7
# The lower bound of Keras for squared norms; without it the gradient of a row of zeros is NaN.
_MIN_SQUARED_NORM = 1e-12


def binary_crossentropy(outputs: Any, targets: Any, *, label_smoothing: float = 0.0) -> jax.Array:
    """Returns the binary cross-entropy, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `-y * log(p) - (1 - y) * log(1 - p)` with `p = sigmoid(outputs)`, computed from the logits without overflow.

    Args:
        outputs: Logits (no sigmoid applied), `[batch]` or `[batch, ..., labels]`.
        targets: 0, 1 or probabilities in between, of the same shape. Either side may omit a trailing axis of length 1.
        label_smoothing: `s` in 0..1; targets become `y * (1 - s) + s / 2`.

    Raises:
        LossError: The shapes do not match, or `label_smoothing` is not in 0..1.

    >>> binary_crossentropy(jnp.array([0.0, 2.0]), jnp.array([1, 1])).round(4)
    Array([0.6931, 0.1269], dtype=float32)
    """
    _check_fractions("binary_crossentropy", label_smoothing=label_smoothing)
    outputs, targets = same_shape("binary_crossentropy", outputs, targets)
    return mean_of_last_axis(optax.losses.sigmoid_binary_cross_entropy(outputs, _smooth(targets, label_smoothing, classes=2)))


def categorical_crossentropy(outputs: Any, targets: Any, *, label_smoothing: float = 0.0) -> jax.Array:
    """Returns the cross-entropy of one-hot targets, or of any distribution over the classes: float32, `[batch, ...]`.

    `-sum(y * log_softmax(outputs), axis=-1)`. A class with logit `-inf` and target 0 adds 0, not NaN.

    Args:
        outputs: Logits (no softmax applied), `[batch, ..., classes]`, at least two classes.
        targets: One-hot rows or probabilities of the same shape.
        label_smoothing: `s` in 0..1; targets become `y * (1 - s) + s / classes`.

    Raises:
        LossError: The shapes do not match, or `label_smoothing` is not in 0..1.

    >>> categorical_crossentropy(jnp.array([[0.0, 0.0], [0.0, 2.0]]), jnp.array([[1, 0], [0, 1]])).round(4)
    Array([0.6931, 0.1269], dtype=float32)
    """
    name = "categorical_crossentropy"
    _check_fractions(name, label_smoothing=label_smoothing)
    outputs, targets = class_rows(name, outputs, targets, binary="binary_crossentropy", labels=_USE_SPARSE)
    values: jax.Array = optax.losses.safe_softmax_cross_entropy(outputs, _smooth(targets, label_smoothing, classes=outputs.shape[-1]))
    return values


def sparse_categorical_crossentropy(outputs: Any, targets: Any, *, label_smoothing: float = 0.0) -> jax.Array:
    """Returns the cross-entropy of integer class labels: float32, `[batch, ...]`.

    `-log_softmax(outputs)[target]`, equal to `categorical_crossentropy` of one-hot targets.

    A label outside of `0..classes - 1` gives NaN with gradient 0, because a compiled step cannot raise. To ignore such rows, give them weight 0.

    Args:
        outputs: Logits (no softmax applied), `[batch, ..., classes]`, at least two classes.
        targets: Integers, `[batch, ...]` or `[batch, ..., 1]`.
        label_smoothing: `s` in 0..1; same as for `categorical_crossentropy` of one-hot targets.

    Raises:
        LossError: The shapes do not match, the targets are not integers, or `label_smoothing` is not in 0..1.

    >>> sparse_categorical_crossentropy(jnp.array([[0.0, 0.0], [0.0, 2.0], [0.0, 0.0]]), jnp.array([0, 1, -1])).round(4)
    Array([0.6931, 0.1269,    nan], dtype=float32)
    """
    name = "sparse_categorical_crossentropy"
    _check_fractions(name, label_smoothing=label_smoothing)
    advice = "For one-hot targets use 'categorical_crossentropy'."
    outputs, labels, known = class_labels(name, outputs, targets, binary="binary_crossentropy", one_hot=advice)
    values = optax.losses.softmax_cross_entropy_with_integer_labels(outputs, labels)
    if label_smoothing:
        uniform = jax.nn.logsumexp(outputs, axis=-1) - outputs.mean(axis=-1)
        values = (1.0 - label_smoothing) * values + label_smoothing * uniform
    return nan_unless(known, values)


def binary_focal_crossentropy(
    outputs: Any, targets: Any, *, apply_class_balancing: bool = False, alpha: float = 0.25, gamma: float = 2.0, label_smoothing: float = 0.0
) -> jax.Array:
    """Returns the binary focal cross-entropy, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    The cross-entropy times `(1 - q)^gamma`, where `q = y * p + (1 - y) * (1 - p)` is the predicted probability of the target and `p = sigmoid(outputs)`
    (Lin et al., 2017). It suits tasks such as detection, where most targets are easy negatives. With class balancing it is also multiplied by `alpha * y
    + (1 - alpha) * (1 - y)`. Computed from the logits without overflow.

    Args:
        outputs: Logits (no sigmoid applied), `[batch]` or `[batch, ..., labels]`.
        targets: 0, 1 or probabilities in between, of the same shape. Either side may omit a trailing axis of length 1.
        apply_class_balancing: Whether to use `alpha`.
        alpha: Factor of targets of 1, in 0..1; targets of 0 get `1 - alpha`.
        gamma: Focusing exponent, at least 0; 0 is the plain cross-entropy.
        label_smoothing: `s` in 0..1; targets become `y * (1 - s) + s / 2`.

    Raises:
        LossError: The shapes do not match, `label_smoothing` or `alpha` is not in 0..1, or `gamma` is negative.

    >>> binary_focal_crossentropy(jnp.array([0.0, 2.0]), jnp.array([1, 1])).round(4)
    Array([0.1733, 0.0018], dtype=float32)
    """
    name = "binary_focal_crossentropy"
    _check_fractions(name, label_smoothing=label_smoothing, alpha=alpha)
    _check_gamma(name, gamma)
    outputs, targets = same_shape(name, outputs, targets)
    targets = _smooth(targets, label_smoothing, classes=2)
    return mean_of_last_axis(optax.losses.sigmoid_focal_loss(outputs, targets, alpha=alpha if apply_class_balancing else None, gamma=gamma))


def categorical_focal_crossentropy(
    outputs: Any, targets: Any, *, alpha: float | Sequence[float] = 0.25, gamma: float = 2.0, label_smoothing: float = 0.0
) -> jax.Array:
    """Returns the focal cross-entropy of one-hot targets: float32, `[batch, ...]`.

    `-sum(alpha * (1 - p)^gamma * y * log(p), axis=-1)` with `p = softmax(outputs)`, computed from the logits. A class with logit `-inf` and target 0
    adds 0, not NaN.

    Args:
        outputs: Logits (no softmax applied), `[batch, ..., classes]`, at least two classes.
        targets: One-hot rows or probabilities of the same shape.
        alpha: Factor, or one factor per class; not negative.
        gamma: Focusing exponent, at least 0; with 0 and `alpha=1` it is the plain cross-entropy.
        label_smoothing: `s` in 0..1; targets become `y * (1 - s) + s / classes`.

    Raises:
        LossError: The shapes do not match, `alpha` has the wrong length, `alpha` or `gamma` is negative, or `label_smoothing` is not in 0..1.

    >>> categorical_focal_crossentropy(jnp.array([[0.0, 0.0], [0.0, 2.0]]), jnp.array([[1, 0], [0, 1]])).round(4)
    Array([0.0433, 0.0005], dtype=float32)
    """
    name = "categorical_focal_crossentropy"
    _check_fractions(name, label_smoothing=label_smoothing)
    _check_gamma(name, gamma)
    outputs, targets = class_rows(name, outputs, targets, binary="binary_focal_crossentropy", labels=TO_ONE_HOT)
    factors = np.asarray(alpha, np.float32)
    if factors.shape not in ((), outputs.shape[-1:]) or not np.all(factors >= 0):
        raise LossError(f"{name}(alpha=...) must be at least 0: one number, or one for each of the {outputs.shape[-1]} classes. Received: {alpha!r}.")
    targets = _smooth(targets, label_smoothing, classes=outputs.shape[-1])
    log_p = jax.nn.log_softmax(outputs)
    # More accurate than 1 - p. The lower bound keeps the gradient finite for gamma < 1.
    focus = jnp.maximum(-jnp.expm1(log_p), 1e-30) ** gamma
    return -jnp.sum(np.broadcast_to(factors, outputs.shape) * focus * targets * jnp.where(targets == 0, 0.0, log_p), axis=-1)


def kl_divergence(outputs: Any, targets: Any) -> jax.Array:
    """Returns the Kullback-Leibler divergence from the predicted distribution to the target distribution: float32, `[batch, ...]`.

    `sum(y * (log(y) - log_softmax(outputs)), axis=-1)`: `categorical_crossentropy` minus the entropy of the targets, so 0 is perfect and the gradients
    are equal. Targets of 0 add 0 to the value and the gradients, whatever the output.

    Args:
        outputs: Logits (no softmax applied), `[batch, ..., classes]`, at least two classes.
        targets: Probabilities of the same shape.

    Raises:
        LossError: The shapes do not match.

    >>> kl_divergence(jnp.array([[0.0, 0.0], [0.0, 0.0]]), jnp.array([[0.5, 0.5], [1.0, 0.0]])).round(4)
    Array([0.    , 0.6931], dtype=float32)
    """
    outputs, targets = class_rows("kl_divergence", outputs, targets, binary="binary_crossentropy", labels=_USE_SPARSE, role="probabilities")
    # optax guards the value of log(0), but not its gradient, nor 0 * -inf. So replace targets of 0 first, and exclude them from the sum.
    counted = targets != 0
    values: jax.Array = optax.losses.kl_divergence(jax.nn.log_softmax(outputs), jnp.where(counted, targets, 1.0), where=counted)
    return values


def hinge(outputs: Any, targets: Any) -> jax.Array:
    """Returns the hinge loss, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `mean(max(1 - y * outputs, 0), axis=-1)`, where `y` is the target with 0 replaced by -1. Unlike in Keras, each target is converted independently, so
    the value of an example does not depend on the rest of the batch.

    Args:
        outputs: Scores (no sigmoid or tanh applied), `[batch]` or `[batch, ..., labels]`.
        targets: 0 or 1, or -1 or 1, of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> hinge(jnp.array([2.0, 0.5, 0.5, 0.5]), jnp.array([1, 1, 0, -1]))
    Array([0. , 0.5, 1.5, 1.5], dtype=float32)
    """
    outputs, targets = same_shape("hinge", outputs, targets)
    return mean_of_last_axis(optax.losses.hinge_loss(outputs, _signs(targets)))


def squared_hinge(outputs: Any, targets: Any) -> jax.Array:
    """Returns the squared hinge loss, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `mean(max(1 - y * outputs, 0)^2, axis=-1)`, where `y` is the target with 0 replaced by -1, independently for each target.

    Args:
        outputs: Scores (no sigmoid or tanh applied), `[batch]` or `[batch, ..., labels]`.
        targets: 0 or 1, or -1 or 1, of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> squared_hinge(jnp.array([2.0, 0.5, 0.5, 0.5]), jnp.array([1, 1, 0, -1]))
    Array([0.  , 0.25, 2.25, 2.25], dtype=float32)
    """
    outputs, targets = same_shape("squared_hinge", outputs, targets)
    return mean_of_last_axis(optax.losses.hinge_loss(outputs, _signs(targets)) ** 2)


def categorical_hinge(outputs: Any, targets: Any) -> jax.Array:
    """Returns the categorical hinge loss of one-hot targets: float32, `[batch, ...]`.

    `max(max((1 - y) * outputs) - sum(y * outputs) + 1, 0)` over the last axis. As in Keras, the score of the true class also competes with 0: it must
    reach 1 even if all other scores are negative. To compare scores only with each other, use `"multiclass_hinge_loss"` with integer labels.

    Args:
        outputs: Scores (no softmax applied), `[batch, ..., classes]`, at least two classes.
        targets: One-hot rows of the same shape.

    Raises:
        LossError: The shapes do not match.

    >>> categorical_hinge(jnp.array([[3.0, 1.0], [3.0, 1.0], [-2.0, -9.0]]), jnp.array([[1, 0], [0, 1], [1, 0]]))
    Array([0., 3., 3.], dtype=float32)
    """
    advice = "For integer labels use 'multiclass_hinge_loss', or make them one-hot: jax.nn.one_hot(labels, classes)."
    outputs, targets = class_rows("categorical_hinge", outputs, targets, binary="hinge", labels=advice)
    right = jnp.sum(targets * outputs, axis=-1)
    wrong = jnp.max((1.0 - targets) * outputs, axis=-1)
    return jnp.maximum(wrong - right + 1.0, 0.0)


def mean_squared_error(outputs: Any, targets: Any) -> jax.Array:
    """Returns the squared error, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `mean(|outputs - targets|^2, axis=-1)`; for inputs `[batch]` there is no axis to average. Values may be complex.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: Values of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> mean_squared_error(jnp.array([[1.0, 2.0], [0.0, 0.0]]), jnp.array([[1.0, 4.0], [0.0, 1.0]]))
    Array([2. , 0.5], dtype=float32)
    """
    outputs, targets = same_shape("mean_squared_error", outputs, targets, takes_complex=True)
    if jnp.iscomplexobj(outputs):
        return mean_of_last_axis((outputs - targets).real ** 2 + (outputs - targets).imag ** 2)
    return mean_of_last_axis(optax.losses.squared_error(outputs, targets))


def mean_absolute_error(outputs: Any, targets: Any) -> jax.Array:
    """Returns the absolute error, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `mean(|outputs - targets|, axis=-1)`; for inputs `[batch]` there is no axis to average. Values may be complex.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: Values of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> mean_absolute_error(jnp.array([[1.0, 2.0], [0.0, 0.0]]), jnp.array([[1.0, 4.0], [0.0, 1.0]]))
    Array([1. , 0.5], dtype=float32)
    """
    outputs, targets = same_shape("mean_absolute_error", outputs, targets, takes_complex=True)
    return mean_of_last_axis(jnp.abs(outputs - targets))


def mean_absolute_percentage_error(outputs: Any, targets: Any) -> jax.Array:
    """Returns the absolute error in percent of the targets, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `100 * mean(|outputs - targets| / max(|targets|, 1e-7), axis=-1)`. Use it only for targets far from 0: with a target of 0, an error of 1 is 1e9
    percent.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: Values of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> mean_absolute_percentage_error(jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([[1.0, 4.0], [4.0, 5.0]]))
    Array([25. , 62.5], dtype=float32)
    """
    outputs, targets = same_shape("mean_absolute_percentage_error", outputs, targets)
    return 100.0 * mean_of_last_axis(jnp.abs(outputs - targets) / jnp.maximum(jnp.abs(targets), _EPSILON))


def mean_squared_logarithmic_error(outputs: Any, targets: Any) -> jax.Array:
    """Returns the squared difference of the logarithms, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `mean((log(1 + outputs) - log(1 + targets))^2, axis=-1)`, for quantities that span orders of magnitude. Values below 1e-7 are replaced by 1e-7, so
    outputs below that have no gradient.

    Args:
        outputs: Non-negative values (no logarithm taken), `[batch]` or `[batch, ..., features]`.
        targets: Non-negative values of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> mean_squared_logarithmic_error(jnp.array([9.0, 0.0]), jnp.array([99.0, 0.0])).round(4)
    Array([5.3019, 0.    ], dtype=float32)
    """
    outputs, targets = same_shape("mean_squared_logarithmic_error", outputs, targets)
    difference = jnp.log1p(jnp.maximum(outputs, _EPSILON)) - jnp.log1p(jnp.maximum(targets, _EPSILON))
    return mean_of_last_axis(difference**2)


def huber(outputs: Any, targets: Any, *, delta: float = 1.0) -> jax.Array:
    """Returns the Huber loss, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    Quadratic near zero and linear beyond `delta`. With `e = |outputs - targets|`: `e^2 / 2` where `e <= delta`, else `delta * e - delta^2 / 2`.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: Values of the same shape. Either side may omit a trailing axis of length 1.
        delta: Error where the loss becomes linear; larger than 0, in the unit of the targets.

    Raises:
        LossError: The shapes do not match, or `delta` is not positive.

    >>> huber(jnp.array([0.0, 0.0]), jnp.array([0.5, 3.0]))
    Array([0.125, 2.5  ], dtype=float32)
    """
    if not delta > 0:
        raise LossError(f"huber(delta=...) must be larger than 0. Received: {delta!r}.")
    outputs, targets = same_shape("huber", outputs, targets)
    return mean_of_last_axis(optax.losses.huber_loss(outputs, targets, delta=delta))


def log_cosh(outputs: Any, targets: Any) -> jax.Array:
    """Returns the logarithm of the hyperbolic cosine of the error, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `mean(log(cosh(outputs - targets)), axis=-1)`. With `e = |outputs - targets|` it is about `e^2 / 2` near zero and `e - log(2)` far from it, a smooth
    version of the Huber loss.

    Args:
        outputs: Values, `[batch]` or `[batch, ..., features]`.
        targets: Values of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> [round(value, 4) for value in log_cosh(jnp.array([0.0, 1.0, 9.0]), jnp.array([0.0, 0.0, 0.0])).tolist()]
    [0.0, 0.4338, 8.3069]
    """
    outputs, targets = same_shape("log_cosh", outputs, targets)
    error = jnp.abs(outputs - targets)
    # Optax and Keras subtract log(2) from a number just above it, which rounds small errors such as 1e-4 to 0, or below.
    near = jnp.log1p(2.0 * jnp.sinh(jnp.minimum(error, 1.0) / 2.0) ** 2)
    far = error + jnp.log1p(jnp.exp(-2.0 * error)) - np.float32(np.log(2.0))
    return mean_of_last_axis(jnp.where(error < 1.0, near, far))


def cosine_similarity(outputs: Any, targets: Any) -> jax.Array:
    """Returns the negative cosine similarity: float32, `[batch, ...]`, -1 for the same direction, 0 for a right angle, 1 for opposite directions.

    `-sum(outputs * targets, axis=-1) / (|outputs| * |targets|)`, negated as in Keras because a loss is minimized. A row of zeros gives 0. Norms are at
    least 1e-6 in the formula, which keeps gradients finite.

    Args:
        outputs: Vectors of any norm, `[batch, ..., features]`, at least two features.
        targets: Vectors of the same shape.

    Raises:
        LossError: The shapes do not match, or there is only one feature.

    >>> cosine_similarity(jnp.array([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]]), jnp.array([[6.0, 8.0], [1.0, 0.0], [1.0, 1.0]])) + 0.0
    Array([-1.,  0.,  0.], dtype=float32)
    """
    outputs, targets = vectors("cosine_similarity", outputs, targets)
    cosines: jax.Array = optax.losses.cosine_similarity(outputs, targets, epsilon=_MIN_SQUARED_NORM)
    return -cosines


def poisson(outputs: Any, targets: Any) -> jax.Array:
    """Returns the Poisson negative log-likelihood without its constant term, averaged over the last axis: float32, `[batch]` or `[batch, ...]`.

    `mean(exp(outputs) - targets * outputs, axis=-1)`: the formula of Keras for log rates. The omitted term is `log(targets!)`. The rate overflows
    float32 for log rates above 88.

    Args:
        outputs: Log rates (no exp or softplus applied), `[batch]` or `[batch, ..., features]`.
        targets: Counts or other non-negative values of the same shape. Either side may omit a trailing axis of length 1.

    Raises:
        LossError: The shapes do not match.

    >>> poisson(jnp.array([0.0, 1.0]), jnp.array([3, 3])).round(4)
    Array([ 1.    , -0.2817], dtype=float32)
    """
    outputs, targets = same_shape("poisson", outputs, targets)
    return mean_of_last_axis(jnp.exp(outputs) - targets * outputs)


def _signs(targets: jax.Array) -> jax.Array:
    return jnp.where(targets == 0, -1.0, targets)


def _smooth(targets: jax.Array, label_smoothing: float, *, classes: int) -> jax.Array:
    return targets * (1.0 - label_smoothing) + label_smoothing / classes


def _check_fractions(name: str, **options: float) -> None:
    for option, value in options.items():
        if not 0.0 <= value <= 1.0:
            raise LossError(f"{name}({option}=...) must be between 0 and 1. Received: {value!r}.")


def _check_gamma(name: str, gamma: float) -> None:
    if not gamma >= 0:
        raise LossError(f"{name}(gamma=...) must not be negative. Received: {gamma!r}.")
