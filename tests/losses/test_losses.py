"""Every loss by name, against its formula in NumPy, optax and scikit-learn; shapes, dtypes, extremes and errors. Options: `test_keras_losses.py`."""

import functools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sklearn.metrics

from fitflax import losses
from fitflax.errors import LossError
from fitflax.losses import loss_direction, takes_labels

RNG = np.random.default_rng(0)
ROWS, CLASSES = 7, 5
LOGITS = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32)
LABELS = RNG.integers(CLASSES, size=ROWS)
ONE_HOT = np.eye(CLASSES, dtype=np.float32)[LABELS]
VALUES = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32)
BINARY = (RNG.random((ROWS, CLASSES)) < 0.5).astype(np.float32)
SIGNS = 2 * BINARY - 1
COUNTS = RNG.poisson(2.0, size=(ROWS, CLASSES)).astype(np.float32)
PROBABILITIES = RNG.dirichlet(np.ones(CLASSES), size=ROWS).astype(np.float32)

# Targets for losses that need a particular kind; all others use VALUES.
TARGETS = {
    **dict.fromkeys(("binary_crossentropy", "binary_focal_crossentropy", "hinge", "squared_hinge", "binary_dice_loss"), BINARY),
    **dict.fromkeys(("sigmoid_binary_cross_entropy", "sigmoid_focal_loss", "sparsemax_loss"), BINARY),
    **dict.fromkeys(("hinge_loss", "perceptron_loss"), SIGNS),
    **dict.fromkeys(("categorical_crossentropy", "categorical_focal_crossentropy", "categorical_hinge", "dice_loss"), ONE_HOT),
    **dict.fromkeys(("softmax_cross_entropy", "safe_softmax_cross_entropy", "poly_loss_cross_entropy"), ONE_HOT),
    **dict.fromkeys(("sparse_categorical_crossentropy", "softmax_cross_entropy_with_integer_labels"), LABELS),
    **dict.fromkeys(("multiclass_hinge_loss", "multiclass_perceptron_loss", "multiclass_sparsemax_loss"), LABELS),
    **dict.fromkeys(("msle", "mean_squared_logarithmic_error", "poisson", "ranking_softmax_loss", "generalized_kl_divergence"), COUNTS),
    "kl_divergence": PROBABILITIES,
    "kl_divergence_with_log_targets": np.log(PROBABILITIES),
}
NAMES = losses.names()
# These give one value per example, regardless of its number of axes.
WHOLE_EXAMPLES = ["binary_dice_loss", "dice_loss"]
ELEMENTWISE = [
    *("binary_crossentropy", "binary_dice_loss", "binary_focal_crossentropy", "hinge", "hinge_loss", "huber", "huber_loss", "l2_loss", "log_cosh"),
    *("mae", "mape", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_error", "mean_squared_logarithmic_error", "mse", "msle"),
    *("perceptron_loss", "poisson", "sigmoid_binary_cross_entropy", "sigmoid_focal_loss", "sparsemax_loss", "squared_error", "squared_hinge"),
]
OF_LABELS = [name for name in NAMES if takes_labels(losses.get(name))]
MASKABLE = [
    *("categorical_crossentropy", "categorical_focal_crossentropy", "softmax_cross_entropy", "safe_softmax_cross_entropy", "poly_loss_cross_entropy"),
    *("kl_divergence", "generalized_kl_divergence", "ranking_softmax_loss", *OF_LABELS),
]


def targets_of(name: str) -> np.ndarray:
    return TARGETS.get(name, VALUES)


@functools.cache
def program(loss: Callable[..., jax.Array], *, backward: bool) -> Callable[..., Any]:
    def forward_and_backward(outputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, pull = jax.vjp(lambda outputs: loss(outputs, targets), outputs)
        return values, pull(jnp.ones_like(values))[0]

    return jax.jit(forward_and_backward if backward else loss)


def values_of(name: str, outputs: Any, targets: Any) -> jax.Array:
    result: jax.Array = program(losses.get(name), backward=False)(outputs, targets)
    return result


def values_and_gradient(name: str, outputs: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the values and the gradient of their sum. Nearly all tests use the shape of LOGITS, so they share one compiled program."""
    values, gradient = program(losses.get(name), backward=True)(outputs, targets)
    return values, gradient


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z.astype(np.float64)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z.astype(np.float64)))


def binary_crossentropy(z: np.ndarray, t: np.ndarray) -> np.ndarray:
    return -(t * np.log(sigmoid(z)) + (1 - t) * np.log(1 - sigmoid(z)))


def focal(z: np.ndarray, t: np.ndarray) -> np.ndarray:
    return np.abs(t - sigmoid(z)) ** 2 * binary_crossentropy(z, t)


def score(z: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Returns the output of each row's class."""
    return np.take_along_axis(z.astype(np.float64), t[..., None], -1)[..., 0]


def best_other(z: np.ndarray, t: np.ndarray) -> np.ndarray:
    return np.where(np.eye(CLASSES, dtype=bool)[t], -np.inf, z).max(-1)


def cosine(z: np.ndarray, t: np.ndarray) -> np.ndarray:
    z, t = z.astype(np.float64), t.astype(np.float64)
    return (z * t).sum(-1) / np.sqrt((z**2).sum(-1) * (t**2).sum(-1))


def sparsemax(z: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Martins and Astudillo (2016), equations 5 to 7 and 17: the threshold by sorting, then the loss over the support."""
    ordered = -np.sort(-z.astype(np.float64), -1)
    sums, sizes = ordered.cumsum(-1), np.arange(1, CLASSES + 1)
    size = (1 + sizes * ordered > sums).sum(-1, keepdims=True)
    threshold = (np.take_along_axis(sums, size - 1, -1) - 1) / size
    return 0.5 * np.where(z > threshold, z.astype(np.float64) ** 2 - threshold**2, 0).sum(-1) + 0.5 - score(z, t)


def squared(z: np.ndarray, t: np.ndarray) -> np.ndarray:
    return ((z.astype(np.float64) - t) ** 2).mean(-1)


def absolute(z: np.ndarray, t: np.ndarray) -> np.ndarray:
    return np.abs(z.astype(np.float64) - t).mean(-1)


def percentage(z: np.ndarray, t: np.ndarray) -> np.ndarray:
    return 100 * np.mean(np.abs(z.astype(np.float64) - t) / np.maximum(np.abs(t), 1e-7), -1)


def logarithmic(z: np.ndarray, t: np.ndarray) -> np.ndarray:
    return ((np.log(np.maximum(z, 1e-7).astype(np.float64) + 1) - np.log(np.maximum(t, 1e-7).astype(np.float64) + 1)) ** 2).mean(-1)


def huber(z: np.ndarray, t: np.ndarray) -> np.ndarray:
    return np.where(np.abs(z - t) <= 1, (z - t) ** 2 / 2, np.abs(z - t) - 0.5).mean(-1)


def cross(z: np.ndarray, t: np.ndarray) -> np.ndarray:
    return -(t * log_softmax(z)).sum(-1)


def dice(p: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Takes one number per class and example; 1 is added to the numerator and to the denominator."""
    return 1 - (p * t + 1) / ((p + t) / 2 + 1)


FORMULAS: dict[str, Callable[..., np.ndarray]] = {
    "mse": squared,
    "mean_squared_error": squared,
    "squared_error": squared,
    "l2_loss": lambda z, t: squared(z, t) / 2,
    "mae": absolute,
    "mean_absolute_error": absolute,
    "mape": percentage,
    "mean_absolute_percentage_error": percentage,
    "msle": logarithmic,
    "mean_squared_logarithmic_error": logarithmic,
    "huber": huber,
    "huber_loss": huber,
    "log_cosh": lambda z, t: np.log(np.cosh(z.astype(np.float64) - t)).mean(-1),
    "cosine_similarity": lambda z, t: -cosine(z, t),
    "cosine_distance": lambda z, t: 1 - cosine(z, t),
    "hinge": lambda z, t: np.maximum(1 - (2 * t - 1) * z, 0).mean(-1),
    "hinge_loss": lambda z, t: np.maximum(1 - t * z, 0).mean(-1),
    "squared_hinge": lambda z, t: (np.maximum(1 - (2 * t - 1) * z, 0) ** 2).mean(-1),
    "perceptron_loss": lambda z, t: np.maximum(-t * z, 0).mean(-1),
    "sparsemax_loss": lambda z, t: np.where((s := z * (1 - 2 * t)) >= 1, s, np.where(s <= -1, 0, (s + 1) ** 2 / 4)).mean(-1),
    "categorical_hinge": lambda z, t: np.maximum(((1 - t) * z).max(-1) - (t * z).sum(-1) + 1, 0),
    "multiclass_hinge_loss": lambda z, t: np.maximum(best_other(z, t) + 1 - score(z, t), 0),
    "multiclass_perceptron_loss": lambda z, t: z.max(-1) - score(z, t),
    "multiclass_sparsemax_loss": sparsemax,
    "binary_crossentropy": lambda z, t: binary_crossentropy(z, t).mean(-1),
    "sigmoid_binary_cross_entropy": lambda z, t: binary_crossentropy(z, t).mean(-1),
    "binary_focal_crossentropy": lambda z, t: focal(z, t).mean(-1),
    "sigmoid_focal_loss": lambda z, t: focal(z, t).mean(-1),
    "categorical_crossentropy": cross,
    "softmax_cross_entropy": cross,
    "safe_softmax_cross_entropy": cross,
    "ranking_softmax_loss": cross,
    "poly_loss_cross_entropy": lambda z, t: cross(z, t) + 2 * (t * (1 - np.exp(log_softmax(z)))).sum(-1),
    "categorical_focal_crossentropy": lambda z, t: -(0.25 * (1 - np.exp(log_softmax(z))) ** 2 * t * log_softmax(z)).sum(-1),
    "sparse_categorical_crossentropy": lambda z, t: -score(log_softmax(z), t),
    "softmax_cross_entropy_with_integer_labels": lambda z, t: -score(log_softmax(z), t),
    "kl_divergence": lambda z, t: (t * (np.log(t) - log_softmax(z))).sum(-1),
    "kl_divergence_with_log_targets": lambda z, t: (np.exp(t) * (t - z)).sum(-1),
    "generalized_kl_divergence": lambda z, t: (t * np.log(np.where(t == 0, 1, t)) - t * z + np.exp(z) - t).sum(-1),
    "poisson": lambda z, t: (np.exp(z) - t * z).mean(-1),
    "dice_loss": lambda z, t: dice(np.exp(log_softmax(z)), t).mean(-1),
    "binary_dice_loss": lambda z, t: 1 - ((sigmoid(z) * t).sum(-1) + 1) / ((sigmoid(z) + t).sum(-1) / 2 + 1),
}


def test_every_name_has_a_formula_here():
    assert sorted(FORMULAS) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.mostly_slow
def test_every_loss_equals_its_formula_for_each_example_and_compiles(name: str):
    targets = targets_of(name)
    with jax.numpy_rank_promotion("raise"):
        values, _ = values_and_gradient(name, LOGITS, targets)
    assert (values.shape, values.dtype) == ((ROWS,), jnp.float32)
    np.testing.assert_allclose(values, FORMULAS[name](LOGITS, targets), rtol=1e-5, atol=1e-6)


def tokens_of(name: str) -> tuple[jax.Array, np.ndarray]:
    """Returns bfloat16 outputs and targets with an axis of three tokens."""
    return jnp.asarray(np.stack([LOGITS, LOGITS + 1, LOGITS * 2], axis=1), jnp.bfloat16), np.stack([targets_of(name)] * 3, axis=1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.mostly_slow
def test_every_loss_computes_in_float32(name: str):
    # The values of bfloat16 outputs equal those of the same numbers in float32, to float32 precision.
    outputs, targets = (LOGITS.astype(jnp.bfloat16), targets_of(name)) if name in WHOLE_EXAMPLES else tokens_of(name)
    values, rows = values_of(name, outputs, targets), np.asarray(outputs, np.float32).reshape(ROWS, -1, CLASSES)[:, 0]
    expected, _ = values_and_gradient(name, rows, targets_of(name))
    np.testing.assert_allclose(values.reshape(ROWS, -1)[:, 0], expected, rtol=1e-5, atol=1e-6)
    integers = targets_of(name).astype(np.int32)
    assert jax.eval_shape(losses.get(name), LOGITS.astype(np.int32), integers).dtype == values.dtype == jnp.float32


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", sorted(set(NAMES) - set(WHOLE_EXAMPLES)))
def test_every_loss_gives_one_value_per_token(name: str):
    outputs, targets = tokens_of(name)
    values = values_of(name, outputs, targets)
    assert values.shape == (ROWS, 3)
    for token in range(3):
        expected, _ = values_and_gradient(name, np.asarray(outputs[:, token], np.float32), targets[:, token])
        np.testing.assert_allclose(values[:, token], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dice_losses_give_one_value_per_example_over_all_its_pixels():
    pixels, truth = RNG.normal(size=(ROWS, 4, 3)).astype(np.float32), np.eye(3)[RNG.integers(3, size=(ROWS, 4))]
    p = np.exp(log_softmax(pixels))
    expected = (1 - ((p * truth).sum(1) + 1) / ((p + truth).sum(1) / 2 + 1)).mean(-1)
    np.testing.assert_allclose(losses.get("dice_loss")(pixels, truth), expected, rtol=1e-5)
    expected = FORMULAS["binary_dice_loss"](pixels[..., 0], truth[..., 0])
    np.testing.assert_allclose(losses.get("binary_dice_loss")(pixels[..., :1], truth[..., 0]), expected, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.mostly_slow
def test_the_value_of_an_example_does_not_depend_on_the_rest_of_its_batch(name: str):
    outputs, targets = LOGITS.copy(), targets_of(name).copy()
    outputs[1:], targets[1:] = np.nan, targets[1:][::-1]
    values, _ = values_and_gradient(name, outputs, targets)
    assert values[0] == values_and_gradient(name, LOGITS, targets_of(name))[0][0]
    assert jnp.all(jnp.isnan(values[1:]))


OPTAX = [name for name in NAMES if name not in losses.__all__ and name not in ("mse", "mae", "mape", "msle")]


@pytest.mark.parametrize("name", OPTAX)
@pytest.mark.mostly_slow
def test_names_that_only_optax_knows_are_losses_of_optax(name: str):
    options = {"ranking_softmax_loss": {"reduce_fn": None}}.get(name, {})
    expected = jax.jit(functools.partial(getattr(optax.losses, name), **options))(LOGITS, targets_of(name))
    expected = expected.mean(-1) if expected.ndim > 1 else expected
    np.testing.assert_allclose(values_and_gradient(name, LOGITS, targets_of(name))[0], expected, rtol=1e-5, atol=1e-6)
    assert losses.get(name).__name__ == name


@pytest.mark.slow
def test_losses_agree_with_scikit_learn():
    def check(name: str, targets: np.ndarray, expected: float, outputs: np.ndarray = LOGITS) -> None:
        np.testing.assert_allclose(losses.get(name)(outputs, targets).mean(), expected, rtol=1e-5, err_msg=name)

    probabilities, one = np.exp(log_softmax(LOGITS)), LOGITS[:, 0]
    check("mse", VALUES, sklearn.metrics.mean_squared_error(VALUES, LOGITS))
    check("mae", VALUES, sklearn.metrics.mean_absolute_error(VALUES, LOGITS))
    check("mape", VALUES, 100 * sklearn.metrics.mean_absolute_percentage_error(VALUES, LOGITS))
    check("msle", COUNTS, sklearn.metrics.mean_squared_log_error(COUNTS, np.exp(LOGITS)), np.exp(LOGITS))
    check("sparse_categorical_crossentropy", LABELS, sklearn.metrics.log_loss(LABELS, probabilities, labels=range(CLASSES)))
    check("softmax_cross_entropy", ONE_HOT, sklearn.metrics.log_loss(LABELS, probabilities, labels=range(CLASSES)))
    check("binary_crossentropy", BINARY[:, 0], sklearn.metrics.log_loss(BINARY[:, 0], sigmoid(one)), one)
    check("hinge", BINARY[:, 0], sklearn.metrics.hinge_loss(BINARY[:, 0], one), one)
    check("hinge_loss", SIGNS[:, 0], sklearn.metrics.hinge_loss(SIGNS[:, 0], one), one)
    check("multiclass_hinge_loss", LABELS, sklearn.metrics.hinge_loss(LABELS, LOGITS, labels=range(CLASSES)))
    check("cosine_distance", VALUES, sklearn.metrics.pairwise.paired_cosine_distances(LOGITS, VALUES).mean())
    # Half the deviance is the loss minus the loss at the best rate, which is the count itself.
    best = np.mean(COUNTS - COUNTS * np.log(np.where(COUNTS == 0, 1, COUNTS)))
    check("poisson", COUNTS, sklearn.metrics.mean_poisson_deviance(COUNTS.ravel(), np.exp(LOGITS.astype(np.float64)).ravel()) / 2 + best)


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.mostly_slow
def test_one_number_per_example_is_never_broadcast_to_a_square(name: str):
    outputs, targets = LOGITS[:, 0], targets_of(name)[:, 0]
    expected = FORMULAS[name](outputs[:, None], targets[:, None])
    for o, t in ((outputs[:, None], targets), (outputs, targets[:, None])):
        np.testing.assert_allclose(values_of(name, o, t), expected, rtol=1e-5, atol=1e-6)
    for column in (slice(None), (slice(None), None)):
        assert jax.eval_shape(losses.get(name), outputs[column], targets[column]).shape == (ROWS,)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(ELEMENTWISE)))
@pytest.mark.parametrize("outputs", [(ROWS,), (ROWS, 1)])
def test_losses_of_vectors_or_classes_reject_one_number_per_example_and_suggest_another(name: str, outputs: tuple[int, ...]):
    kind = "mean_squared_error" if name.startswith(("cosine", "ranking")) else "[a-z_]+"
    for targets in ((ROWS,), (ROWS, 1)):
        with pytest.raises(LossError, match=rf"^{name} takes .* Received: outputs \[7.*For one (number|logit) per example use '{kind}'") as error:
            losses.get(name)(np.zeros(outputs, np.float32), np.zeros(targets, targets_of(name).dtype))
        assert str(error.value).split("'")[1] in NAMES


def test_a_missing_feature_axis_keeps_the_values_per_token():
    assert losses.mean_squared_error(LOGITS[..., None], VALUES).shape == (ROWS, CLASSES)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_those_of_the_formula(name: str):
    targets = targets_of(name)
    direction = np.where(RNG.random(LOGITS.shape) < 0.5, -1.0, 1.0)
    formula, outputs = FORMULAS[name], LOGITS.astype(np.float64)
    slope = (formula(outputs + 1e-6 * direction, targets).sum() - formula(outputs - 1e-6 * direction, targets).sum()) / 2e-6
    _, gradient = values_and_gradient(name, LOGITS, targets)
    np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_have_finite_values_and_gradients(name: str):
    nothing = np.zeros_like(targets_of(name))
    for outputs, targets in ((np.zeros_like(LOGITS), targets_of(name)), (LOGITS, nothing), (np.zeros_like(LOGITS), nothing)):
        assert all(np.all(np.isfinite(found)) for found in values_and_gradient(name, outputs, targets))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"poisson", "generalized_kl_divergence"}))
def test_huge_outputs_have_finite_values_and_gradients(name: str):
    for size in (100.0, 1e4, 1e8):
        outputs = np.where(LOGITS > 0, size, -size).astype(np.float32)
        assert all(np.all(np.isfinite(found)) for found in values_and_gradient(name, outputs, targets_of(name)))


@pytest.mark.parametrize("name", MASKABLE)
def test_classes_masked_with_minus_infinity_have_no_effect(name: str):
    labels = LABELS % (CLASSES - 1)
    targets = labels if name in OF_LABELS else np.eye(CLASSES, dtype=np.float32)[labels]
    for last in (np.full(ROWS, -np.inf), np.where(LOGITS[:, 0] > 0, -np.inf, 0.5)):
        masked = np.concatenate([LOGITS[:, :-1], last[:, None]], axis=1, dtype=np.float32)
        expected = values_and_gradient(name, np.where(masked == -np.inf, np.float32(-1e6), masked), targets)
        for found, reference in zip(values_and_gradient(name, masked, targets), expected, strict=True):
            np.testing.assert_allclose(found, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OF_LABELS)
@pytest.mark.parametrize("bad", [-1, CLASSES, 200])
def test_invalid_labels_give_nan_and_no_gradient(name: str, bad: int):
    values, gradient = values_and_gradient(name, LOGITS, np.where(np.arange(ROWS) == 1, bad, LABELS))
    np.testing.assert_array_equal(np.isnan(values), np.arange(ROWS) == 1)
    assert np.all(gradient[1] == 0)
    assert np.any(gradient[0] != 0)
    assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize("name", ["sparse_categorical_crossentropy", "multiclass_hinge_loss"])
@pytest.mark.mostly_slow
def test_labels_of_any_integer_dtype_and_with_a_trailing_axis_give_the_same_values(name: str):
    wide = RNG.normal(size=(ROWS, 200)).astype(np.float32)
    expected = values_of(name, wide, LABELS)
    for dtype in (np.int8, np.uint8, np.uint32):
        np.testing.assert_array_equal(values_of(name, wide, LABELS.astype(dtype)[:, None]), expected)


def test_takes_labels_recognizes_losses_of_integer_labels():
    assert {name for name in NAMES if np.issubdtype(targets_of(name).dtype, np.integer)} == set(OF_LABELS)
    assert takes_labels(functools.partial(losses.sparse_categorical_crossentropy, label_smoothing=0.1))
    assert not takes_labels(jnp.mean)


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "message"),
    [
        ("mse", (7, 5), (7, 4), r"mean_squared_error takes outputs and targets of the same shape.* Received: outputs \[7, 5\], targets \[7, 4\]"),
        ("mse", (7, 5), (5,), r"outputs \[7, 5\], targets \[5\]"),
        ("mae", (7, 1, 1), (7,), r"outputs \[7, 1, 1\], targets \[7\]"),
        ("mse", (7, 5), (7,), "For integer class labels use 'sparse_categorical_crossentropy'"),
        ("binary_crossentropy", (7, 5), (7, 1), r"binary_crossentropy takes .* targets \[7, 1\]"),
        ("hinge", (7, 5), (7, 4), r"hinge takes .* targets \[7, 4\]"),
        ("l2_loss", (7, 5), (7, 4), r"l2_loss takes .* targets \[7, 4\]"),
        ("cosine_similarity", (7, 5), (7, 4), r"cosine_similarity takes .* targets \[7, 4\]"),
        ("cosine_distance", (7, 5), (5,), r"cosine_distance takes .* targets \[5\]"),
        ("categorical_crossentropy", (7, 5), (7,), "For integer labels use 'sparse_categorical_crossentropy'"),
        ("categorical_crossentropy", (7, 5), (7, 1), "For integer labels use 'sparse_categorical_crossentropy'"),
        ("categorical_crossentropy", (7, 5), (7, 4), "Check the model's last layer"),
        ("categorical_crossentropy", (7, 1), (7, 1), "at least two classes.*'binary_crossentropy'"),
        ("categorical_focal_crossentropy", (7, 5), (7,), r"Make integer labels one-hot: jax.nn.one_hot\(labels, classes\)"),
        ("categorical_hinge", (7, 5), (7,), "For integer labels use 'multiclass_hinge_loss'"),
        ("kl_divergence", (7, 5), (7,), r"takes probabilities \[..., classes\].*'sparse_categorical_crossentropy'"),
        ("kl_divergence", (7, 5), (7, 4), "takes outputs and probabilities of the same shape"),
        ("softmax_cross_entropy", (7, 5), (7,), "For integer labels use 'softmax_cross_entropy_with_integer_labels'"),
        ("sparse_categorical_crossentropy", (7, 5), (7, 5), "For one-hot targets use 'categorical_crossentropy'"),
        ("sparse_categorical_crossentropy", (7, 5), (6,), r"outputs \[7, 5\], targets \[6\]"),
        ("sparse_categorical_crossentropy", (7,), (7,), "'binary_crossentropy'"),
        ("sparse_categorical_crossentropy", (7, 5), (7,), r"integer class labels. Received: targets of dtype float32. Cast them: targets.astype\('int32'\)"),
        ("multiclass_hinge_loss", (7, 5), (7, 5), r"Turn one-hot targets into labels: targets.argmax\(axis=-1\)"),
        ("multiclass_sparsemax_loss", (7, 5), (7,), "multiclass_sparsemax_loss takes integer class labels. Received: targets of dtype float32"),
        ("mse", (), (), "mean_squared_error takes outputs with a leading batch axis. Received: a scalar"),
    ],
)
def test_errors_name_incompatible_shapes_and_suggest_a_fix(name: str, outputs: tuple[int, ...], targets: tuple[int, ...], message: str):
    with pytest.raises(LossError, match=message):
        losses.get(name)(np.zeros(outputs, np.float32), np.zeros(targets, np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_several_outputs_are_an_error_that_asks_for_several_losses(name: str):
    with pytest.raises(LossError, match=r"takes one array of outputs. Received: a tuple of length 2. Pass a loss and metrics for each"):
        losses.get(name)((LOGITS, LOGITS), targets_of(name))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MeanSquaredError", "mean_squared_error"),
        ("MSE", "mse"),
        ("KLDivergence", "kl_divergence"),
        ("KLD", "kl_divergence"),
        ("CosineSimilarity", "cosine_similarity"),
        ("bce", "binary_crossentropy"),
        ("logcosh", "log_cosh"),
        ("convex_kl_divergence", "generalized_kl_divergence"),
        ("dice", "dice_loss"),
        ("categorical_crossentropi", "categorical_crossentropy"),
    ],
)
def test_unknown_names_are_errors_that_suggest_a_known_name(name: str, meant: str):
    with pytest.raises(LossError, match=rf"There is no loss '{name}'. Did you mean '{meant}'\? Pass .*\. Known: \['binary_crossentropy', "):
        losses.get(name)


def test_anything_but_a_name_is_an_error():
    with pytest.raises(LossError, match=r"takes a name. Received: 3"):
        losses.get(3)  # type: ignore[arg-type]


def test_losses_are_minimized_and_other_functions_have_no_direction():
    assert {loss_direction(name) for name in NAMES} == {"min"}
    assert {loss_direction(losses.get(name)) for name in NAMES} == {"min"}
    assert loss_direction(functools.partial(losses.binary_crossentropy, label_smoothing=0.1)) == "min"
    assert loss_direction(jnp.mean) is None
    assert loss_direction("accuracy") is None


def test_short_names_are_the_same_functions():
    for short, long in (("mse", "squared_error"), ("mae", "absolute_error"), ("mape", "absolute_percentage_error"), ("msle", "squared_logarithmic_error")):
        assert losses.get(short) is losses.get(f"mean_{long}")


def test_every_public_loss_is_known_by_its_name():
    functions = sorted(set(losses.__all__) - {"direction", "get", "names"})
    assert [losses.get(name) for name in functions] == [getattr(losses, name) for name in functions]


@pytest.mark.parametrize(("module", "name"), [("classification", "squared_hinge"), ("regression", "huber")])
def test_pickles_of_version_0_1_are_loaded(module, name):
    """They name the modules of that version, as in scikit-learn estimators with a loss."""
    assert pickle.loads(f"cfitflax.losses.{module}\n{name}\n.".encode()) is getattr(losses, name)
