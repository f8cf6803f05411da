import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sklearn.metrics

from fitflax import losses
from fitflax.errors import LossError

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(7, 5)).astype(np.float32)
LABELS = RNG.integers(5, size=7)
ONE_HOT = np.eye(5, dtype=np.float32)[LABELS]
VALUES = RNG.normal(size=(7, 5)).astype(np.float32)
BINARY = (RNG.random((7, 5)) < 0.5).astype(np.float32)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


BY_HAND = {
    "mse": lambda o, t: ((o - t) ** 2).mean(-1),
    "mean_squared_error": lambda o, t: ((o - t) ** 2).mean(-1),
    "mae": lambda o, t: np.abs(o - t).mean(-1),
    "mean_absolute_error": lambda o, t: np.abs(o - t).mean(-1),
    "huber": lambda o, t: np.where(np.abs(o - t) <= 1, (o - t) ** 2 / 2, np.abs(o - t) - 0.5).mean(-1),
    "binary_crossentropy": lambda o, t: -(t * np.log(sigmoid(o)) + (1 - t) * np.log(1 - sigmoid(o))).mean(-1),
    "categorical_crossentropy": lambda o, t: -(t * log_softmax(o)).sum(-1),
    "sparse_categorical_crossentropy": lambda o, t: -np.take_along_axis(log_softmax(o), t[..., None], -1)[..., 0],
}
TARGETS = {"binary_crossentropy": BINARY, "categorical_crossentropy": ONE_HOT, "sparse_categorical_crossentropy": LABELS}


@pytest.mark.parametrize("name", losses.names())
def test_every_loss_is_its_formula_for_each_example(name: str):
    targets = TARGETS.get(name, VALUES)
    values = losses.get(name)(LOGITS, targets)
    assert values.shape == (7,)
    np.testing.assert_allclose(values, BY_HAND[name](LOGITS, targets), rtol=1e-5)


@pytest.mark.parametrize("name", losses.names())
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float64])
def test_every_loss_computes_in_float32(name: str, dtype: type):
    outputs = jnp.asarray(LOGITS.astype(dtype))
    values = losses.get(name)(outputs, TARGETS.get(name, VALUES))
    assert values.dtype == jnp.float32
    np.testing.assert_array_equal(values, losses.get(name)(outputs.astype(jnp.float32), TARGETS.get(name, VALUES)))


@pytest.mark.parametrize("name", losses.names())
def test_every_loss_gives_one_value_per_token(name: str):
    targets = TARGETS.get(name, VALUES)
    outputs = np.stack([LOGITS, LOGITS + 1, LOGITS * 2], axis=1)
    values = losses.get(name)(outputs, np.stack([targets] * 3, axis=1))
    assert values.shape == (7, 3)
    np.testing.assert_allclose(values[:, 2], losses.get(name)(LOGITS * 2, targets), rtol=1e-6)


@pytest.mark.parametrize("name", losses.names())
def test_every_loss_compiles_and_keeps_strict_rank_promotion(name: str):
    with jax.numpy_rank_promotion("raise"):
        compiled = jax.jit(losses.get(name))(LOGITS, TARGETS.get(name, VALUES))
    np.testing.assert_allclose(compiled, losses.get(name)(LOGITS, TARGETS.get(name, VALUES)), rtol=1e-5)


def test_losses_agree_with_scikit_learn():
    np.testing.assert_allclose(losses.mean_squared_error(LOGITS, VALUES).mean(), sklearn.metrics.mean_squared_error(VALUES, LOGITS), rtol=1e-5)
    np.testing.assert_allclose(losses.mean_absolute_error(LOGITS, VALUES).mean(), sklearn.metrics.mean_absolute_error(VALUES, LOGITS), rtol=1e-5)
    probabilities = np.exp(log_softmax(LOGITS))
    expected = sklearn.metrics.log_loss(LABELS, probabilities, labels=range(5))
    np.testing.assert_allclose(losses.sparse_categorical_crossentropy(LOGITS, LABELS).mean(), expected, rtol=1e-5)
    np.testing.assert_allclose(
        losses.binary_crossentropy(LOGITS[:, 0], BINARY[:, 0]).mean(), sklearn.metrics.log_loss(BINARY[:, 0], sigmoid(LOGITS[:, 0])), rtol=1e-5
    )


@pytest.mark.parametrize("name", ["mse", "mae", "huber", "binary_crossentropy"])
def test_one_number_per_example_is_never_broadcast_to_a_square(name: str):
    loss = losses.get(name)
    outputs, targets = LOGITS[:, 0], BINARY[:, 0]
    for o in (outputs, outputs[:, None]):
        for t in (targets, targets[:, None]):
            values = loss(o, t)
            assert values.shape == (7,)
            np.testing.assert_allclose(values, loss(outputs, targets), rtol=1e-6)


def test_a_missing_feature_axis_keeps_the_values_per_token():
    assert losses.mean_squared_error(LOGITS[..., None], VALUES).shape == (7, 5)


def test_huber_turns_linear_at_delta():
    np.testing.assert_allclose(losses.huber(np.float32([1.0, 4.0]), np.zeros(2), delta=2.0), [0.5, 6.0])
    with pytest.raises(LossError, match=r"huber\(delta=...\) must be larger than 0. Received: 0"):
        losses.huber(LOGITS, VALUES, delta=0)


def test_label_smoothing_is_keras_formula():
    smooth = ONE_HOT * 0.9 + 0.1 / 5
    expected = optax.softmax_cross_entropy(LOGITS, smooth)
    np.testing.assert_allclose(losses.categorical_crossentropy(LOGITS, ONE_HOT, label_smoothing=0.1), expected, rtol=1e-5)
    np.testing.assert_allclose(losses.sparse_categorical_crossentropy(LOGITS, LABELS, label_smoothing=0.1), expected, rtol=1e-5)
    expected = BY_HAND["binary_crossentropy"](LOGITS, BINARY * 0.8 + 0.1)
    np.testing.assert_allclose(losses.binary_crossentropy(LOGITS, BINARY, label_smoothing=0.2), expected, rtol=1e-5)
    with pytest.raises(LossError, match=r"label_smoothing=...\) must be within 0..1. Received: 1.5"):
        losses.categorical_crossentropy(LOGITS, ONE_HOT, label_smoothing=1.5)


@pytest.mark.parametrize("bad", [-1, 5, 200])
def test_labels_that_are_no_class_give_nan_and_no_gradient(bad: int):
    labels = jnp.array([1, bad, 2])
    loss = jax.jit(lambda outputs: losses.sparse_categorical_crossentropy(outputs, labels))
    np.testing.assert_array_equal(jnp.isnan(loss(LOGITS[:3])), [False, True, False])
    gradient = jax.grad(lambda outputs: loss(outputs).sum())(LOGITS[:3])
    assert jnp.all(gradient[1] == 0)
    assert jnp.all(gradient[0] != 0)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint32])
def test_labels_of_any_integer_dtype_and_with_a_last_axis_are_the_same(dtype: type):
    wide = RNG.normal(size=(7, 200)).astype(np.float32)
    expected = losses.sparse_categorical_crossentropy(wide, LABELS)
    np.testing.assert_array_equal(losses.sparse_categorical_crossentropy(wide, LABELS.astype(dtype)[:, None]), expected)


def test_classes_masked_with_minus_infinity_count_nothing():
    masked = np.array([[0.0, 0.0, -np.inf]], np.float32)
    for loss, targets in ((losses.categorical_crossentropy, np.float32([[1, 0, 0]])), (losses.sparse_categorical_crossentropy, np.array([0]))):
        np.testing.assert_allclose(loss(masked, targets), [np.log(2)], rtol=1e-6)
        assert jnp.all(jnp.isfinite(jax.grad(lambda o, loss=loss, targets=targets: loss(o, targets).sum())(masked)))


def test_extreme_logits_stay_finite():
    assert jnp.all(jnp.isfinite(losses.binary_crossentropy(np.float32([1e4, -1e4]), np.float32([0, 1]))))
    assert jnp.all(jnp.isfinite(losses.sparse_categorical_crossentropy(np.float32([[1e4, -1e4]]), np.array([1]))))


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "message"),
    [
        ("mse", (7, 5), (7, 4), r"mean_squared_error takes outputs and targets of one shape.* Received: outputs \[7, 5\], targets \[7, 4\]"),
        ("mse", (7, 5), (5,), r"outputs \[7, 5\], targets \[5\]"),
        ("mae", (7, 1, 1), (7,), r"outputs \[7, 1, 1\], targets \[7\]"),
        ("mse", (7, 5), (7,), "For integer class labels use 'sparse_categorical_crossentropy'"),
        ("binary_crossentropy", (7, 5), (7, 1), r"binary_crossentropy takes .* targets \[7, 1\]"),
        ("categorical_crossentropy", (7, 5), (7,), "For integer labels use 'sparse_categorical_crossentropy'"),
        ("categorical_crossentropy", (7, 5), (7, 1), "For integer labels use 'sparse_categorical_crossentropy'"),
        ("categorical_crossentropy", (7, 5), (7, 4), "Check the model's last layer"),
        ("categorical_crossentropy", (7, 1), (7, 1), "at least two classes.*'binary_crossentropy'"),
        ("sparse_categorical_crossentropy", (7, 5), (7, 5), "For one-hot targets use 'categorical_crossentropy'"),
        ("sparse_categorical_crossentropy", (7, 5), (6,), r"outputs \[7, 5\], targets \[6\]"),
        ("sparse_categorical_crossentropy", (7,), (7,), "'binary_crossentropy'"),
        ("sparse_categorical_crossentropy", (7, 5), (7,), r"integer class labels. Received: targets of dtype float32. Cast them: targets.astype\('int32'\)"),
        ("mse", (), (), "mean_squared_error takes outputs with a leading batch axis. Received: a scalar"),
    ],
)
def test_shapes_that_do_not_fit_are_named_with_what_to_do(name: str, outputs: tuple[int, ...], targets: tuple[int, ...], message: str):
    with pytest.raises(LossError, match=message):
        losses.get(name)(np.zeros(outputs, np.float32), np.zeros(targets, np.float32))


def test_several_outputs_ask_for_several_losses():
    with pytest.raises(LossError, match=r"takes one array of outputs. Received: a tuple of 2. Give a loss for each output."):
        losses.mean_squared_error((LOGITS, LOGITS), VALUES)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MeanSquaredError", "mean_squared_error"),
        ("MSE", "mse"),
        ("bce", "binary_crossentropy"),
        ("softmax_cross_entropy_with_integer_labels", "sparse_categorical_crossentropy"),
        ("categorical_crossentropi", "categorical_crossentropy"),
    ],
)
def test_unknown_names_are_errors_that_name_the_one_meant(name: str, meant: str):
    with pytest.raises(LossError, match=rf"There is no loss '{name}'. Did you mean '{meant}'\? Known: \['binary_crossentropy', "):
        losses.get(name)


def test_what_is_no_name_is_an_error():
    with pytest.raises(LossError, match=r"takes a name. Received: 3"):
        losses.get(3)  # type: ignore[arg-type]


def test_losses_are_minimized_and_other_functions_say_nothing():
    assert {losses.direction(name) for name in losses.names()} == {"min"}
    assert losses.direction(functools.partial(losses.binary_crossentropy, label_smoothing=0.1)) == "min"
    assert losses.direction(jnp.mean) is None
    assert losses.direction("accuracy") is None
