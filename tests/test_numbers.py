"""Losses, gradients and metrics of `fit` and `evaluate`, compared with hand-written loops, NumPy and scikit-learn."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sklearn.metrics
from flax import linen as nn

import fitflax
from fitflax.errors import LossError
from fitflax.metrics import TopKAccuracy
from fitflax.parallel import DataParallel

Devices = Callable[[int], list[jax.Device]]
RNG = np.random.default_rng(7)
ROWS, FEATURES, CLASSES, TIME = 23, 4, 3, 5
X = RNG.normal(size=(ROWS, FEATURES)).astype(np.float32)
Y = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32)
LABELS = RNG.integers(CLASSES, size=ROWS)
WEIGHTS = RNG.uniform(0.1, 3.0, size=ROWS).astype(np.float32)
WEIGHTS[[2, 5, 11]] = 0
TOKENS_X = RNG.normal(size=(ROWS, TIME, FEATURES)).astype(np.float32)
TOKENS_Y = RNG.normal(size=(ROWS, TIME, CLASSES)).astype(np.float32)
TOKEN_WEIGHTS = RNG.uniform(size=(ROWS, TIME)).astype(np.float32) * (RNG.random((ROWS, TIME)) < 0.7)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(CLASSES)(jnp.tanh(nn.Dense(6)(x)))


class Identity(nn.Module):
    """Returns its inputs, so that all losses and metrics are known in advance."""

    @nn.compact
    def __call__(self, *x: Any) -> Any:
        self.param("unused", nn.initializers.zeros, ())
        return x[0] if len(x) == 1 else x


def squared(outputs: Any, targets: Any) -> Any:
    return ((outputs - targets) ** 2).mean(-1)


def trainer_of(model: nn.Module, devices: list[jax.Device], optimizer: Any = None, loss: Any = "mse", metrics: Any = None, **options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(model, parallel=DataParallel(devices))
    trainer.compile(optax.sgd(1.0) if optimizer is None else optimizer, loss, metrics, **options)
    return trainer


def weighted_mean(values: Any, weights: Any) -> Any:
    """`sum(w * l) / sum(w)`, weights broadcast from the left; 0 where they sum to 0."""
    weights = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim)) * jnp.ones_like(values)
    total = weights.sum()
    return jnp.where(total > 0, (values * weights).sum() / jnp.where(total > 0, total, 1), 0)


@jax.jit
def hand_written_loss(params: Any, x: Any, y: Any, weights: Any) -> Any:
    return weighted_mean(squared(Net().apply({"params": params}, x), y), weights)


hand_written_gradient = jax.jit(jax.grad(hand_written_loss))


def batches_of(size: int, *arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    for begin in range(0, len(arrays[0]), size):
        yield tuple(array[begin : begin + size] for array in arrays)


def hand_written_loop(params: Any, optimizer: optax.GradientTransformation, size: int, epochs: int, x: Any, y: Any, weights: Any) -> tuple[Any, list[float]]:
    """Returns the parameters after the given number of epochs, and the loss of each epoch."""
    opt_state = optimizer.init(params)
    history = []
    for _ in range(epochs):
        total = weight = 0.0
        for batch in batches_of(size, x, y, weights):
            mass = float(np.sum(batch[2]) * (batch[1][..., 0].size / batch[2].size))
            total += float(hand_written_loss(params, *batch)) * mass
            weight += mass
            updates, opt_state = optimizer.update(hand_written_gradient(params, *batch), opt_state, params)
            params = optax.apply_updates(params, updates)
        history.append(total / weight)
    return params, history


def params_of(trainer: fitflax.Trainer) -> Any:
    return jax.tree.map(np.array, trainer.state.params)


def assert_close(actual: Any, expected: Any, atol: float) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=atol, atol=atol), jax.tree.map(np.asarray, actual), jax.tree.map(np.asarray, expected))


# -- training --

OPTIMIZERS = {"sgd": optax.sgd(0.1), "momentum": optax.sgd(0.1, momentum=0.9), "adam": optax.adam(0.01)}


@pytest.mark.parametrize(
    ("num_devices", "optimizer"),
    [(1, "sgd"), (1, "momentum"), (1, "adam"), (2, "adam"), (4, "sgd"), (4, "momentum"), (4, "adam"), (8, "adam")],
)
@pytest.mark.mostly_slow
@pytest.mark.slow
def test_training_equals_a_hand_written_loop(num_devices: int, optimizer: str, devices: Devices):
    trainer = trainer_of(Net(), devices(num_devices), OPTIMIZERS[optimizer])
    trainer.build(X)
    params, history = hand_written_loop(params_of(trainer), OPTIMIZERS[optimizer], 10, 3, X, Y, np.ones(ROWS, np.float32))
    logs = trainer.fit(X, Y, epochs=3, batch_size=10, shuffle=False, verbose=0).history
    assert trainer.step == 9
    assert_close(params_of(trainer), params, 1e-5)
    np.testing.assert_allclose(logs["loss"], history, rtol=1e-5)


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
@pytest.mark.slow
def test_training_with_weights_equals_a_hand_written_loop(num_devices: int, devices: Devices):
    trainer = trainer_of(Net(), devices(num_devices), optax.adam(0.01))
    trainer.build(X)
    params, history = hand_written_loop(params_of(trainer), optax.adam(0.01), 10, 2, X, Y, WEIGHTS)
    logs = trainer.fit(X, Y, WEIGHTS, epochs=2, batch_size=10, shuffle=False, verbose=0).history
    assert_close(params_of(trainer), params, 1e-5)
    np.testing.assert_allclose(logs["loss"], history, rtol=1e-5)


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("weights", [WEIGHTS, TOKEN_WEIGHTS, TOKEN_WEIGHTS[:, :1]], ids=["example", "token", "example, with an axis"])
@pytest.mark.mostly_slow
def test_weights_per_token_and_per_example_average_over_tokens(num_devices: int, weights: np.ndarray, devices: Devices):
    trainer = trainer_of(Net(), devices(num_devices), optax.sgd(0.1))
    trainer.build(TOKENS_X)
    params, history = hand_written_loop(params_of(trainer), optax.sgd(0.1), 10, 2, TOKENS_X, TOKENS_Y, weights)
    logs = trainer.fit(TOKENS_X, TOKENS_Y, weights, epochs=2, batch_size=10, shuffle=False, verbose=0).history
    assert_close(params_of(trainer), params, 1e-5)
    np.testing.assert_allclose(logs["loss"], history, rtol=1e-5)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "weights",
    [np.arange(ROWS), WEIGHTS.astype(np.float64), WEIGHTS > 1, WEIGHTS.astype(np.float16)],
    ids=["integers", "float64", "booleans", "float16"],
)
def test_weights_may_have_any_dtype(weights: np.ndarray, devices: Devices):
    trainer = trainer_of(Identity(), devices(2))
    logs = trainer.fit(Y, 0 * Y, weights, batch_size=6, verbose=0).history
    np.testing.assert_allclose(logs["loss"], [np.average((Y**2).mean(-1), weights=weights.astype(np.float64))], rtol=1e-6)


def test_weights_that_do_not_fit_the_losses_are_an_error(devices: Devices):
    trainer = trainer_of(Identity(), devices(1))
    for weights in (np.ones((ROWS, 2)), np.ones((ROWS, 1, 1))):
        with pytest.raises(LossError, match="does not fit the loss values"):
            trainer.fit(Y, Y, weights, verbose=0)


# -- gradients --


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
@pytest.mark.slow
def test_the_gradient_equals_that_of_the_whole_batch_regardless_of_padding(num_devices: int, devices: Devices):
    # From one row to more rows than devices: with few rows, some devices hold only padding.
    trainer = trainer_of(Net(), devices(num_devices))
    trainer.build(X)
    start = trainer.state
    for rows in (8, 1, 2, 3, 5, 7):
        trainer.replace_state(start)
        before = params_of(trainer)
        logs = trainer.train_on_batch((X[:rows], Y[:rows], WEIGHTS[:rows]))
        gradient = jax.tree.map(np.subtract, before, params_of(trainer))
        assert_close(gradient, hand_written_gradient(before, X[:rows], Y[:rows], WEIGHTS[:rows]), 1e-6)
        assert logs["loss"] == pytest.approx(float(hand_written_loss(before, X[:rows], Y[:rows], WEIGHTS[:rows])), rel=1e-6)


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.mostly_slow
def test_a_batch_with_only_zero_weights_has_no_loss_and_changes_nothing(num_devices: int, devices: Devices):
    trainer = trainer_of(Net(), devices(num_devices), metrics=["mae"], weighted_metrics=["mae"])
    trainer.build(X)
    before = params_of(trainer)
    with pytest.warns(fitflax.errors.FitflaxWarning, match="'train' are 0"):
        logs = trainer.train_on_batch((X[:5], Y[:5], np.zeros(5)))
    assert np.isnan([logs["loss"], logs["weighted_mae"]]).all() and logs["mae"] > 0
    assert_close(params_of(trainer), before, 0)
    history = trainer.fit(X, Y, np.zeros(ROWS), batch_size=5, verbose=0).history
    assert np.isnan(history["loss"]).tolist() == [True]
    assert_close(params_of(trainer), before, 0)


def test_examples_with_weight_zero_do_not_affect_training(devices: Devices):
    trainer = trainer_of(Net(), devices(4))
    trainer.build(X)
    start = trainer.state
    results = []
    for chosen in (np.arange(ROWS), np.flatnonzero(WEIGHTS)):
        trainer.replace_state(start)
        trainer.train_on_batch((X[chosen], Y[chosen], WEIGHTS[chosen]))
        results.append(params_of(trainer))
    assert_close(results[0], results[1], 1e-6)


# -- the same for every batch size and number of devices --


@pytest.mark.slow
def test_a_frozen_model_has_the_same_loss_for_every_batch_size_in_fit_and_evaluate(devices: Devices):
    x, y = RNG.normal(size=(100, 4)).astype(np.float32), RNG.normal(size=(100, 3)).astype(np.float32)
    trainer = trainer_of(Net(), devices(2), optax.sgd(0.0))
    found = []
    for size in (80, 100):
        found += trainer.fit(x, y, batch_size=size, verbose=0).history["loss"]
        found.append(trainer.evaluate(x, y, batch_size=size, verbose=0)["loss"])
    np.testing.assert_allclose(found, float(hand_written_loss(params_of(trainer), x, y, np.ones(100))), rtol=1e-6)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.mostly_slow
@pytest.mark.slow
def test_ten_rows_in_batches_of_four_give_numpys_metrics_and_ten_predictions_in_order(num_devices: int, devices: Devices):
    x, y = X[:10], Y[:10]
    trainer = trainer_of(Net(), devices(num_devices), metrics=["mae", "r2"])
    trainer.build(x)
    outputs = np.asarray(Net().apply({"params": params_of(trainer)}, x))
    logs = trainer.evaluate(x, y, batch_size=4, verbose=0)
    expected = {"loss": np.mean((outputs - y) ** 2), "mae": np.mean(np.abs(outputs - y)), "r2": sklearn.metrics.r2_score(y, outputs)}
    assert logs == pytest.approx(expected, rel=1e-6, abs=1e-6)
    predicted = trainer.predict(x, batch_size=4)
    assert isinstance(predicted, np.ndarray)
    np.testing.assert_allclose(predicted, outputs, atol=1e-6)


@pytest.mark.parametrize("size", [1, 3, 8, 23, 64])
@pytest.mark.mostly_slow
def test_evaluate_equals_numpys_average_for_every_batch_size(size: int, devices: Devices):
    trainer = trainer_of(Identity(), devices(4), metrics=["mae"], weighted_metrics=["mae"])
    trainer.build(Y)
    logs = trainer.evaluate(Y, Y[::-1], WEIGHTS, batch_size=size, verbose=0)
    squares, absolutes = ((Y - Y[::-1]).astype(np.float64) ** 2).mean(-1), np.abs((Y - Y[::-1]).astype(np.float64)).mean(-1)
    expected = {"loss": np.average(squares, weights=WEIGHTS), "mae": absolutes.mean(), "weighted_mae": np.average(absolutes, weights=WEIGHTS)}
    assert logs == pytest.approx(expected, rel=1e-6)


def test_batches_of_any_size_are_weighted_by_their_examples(devices: Devices):
    cuts = [0, 6, 7, 13, 15, 21, 23]
    batches = [(Y[a:b], 0 * Y[a:b], WEIGHTS[a:b]) for a, b in itertools.pairwise(cuts)]
    trainer = trainer_of(Identity(), devices(4), metrics=["mae"])
    logs = trainer.fit(lambda: iter(batches), verbose=0).history
    assert logs["loss"] == [pytest.approx(np.average((Y**2).mean(-1), weights=WEIGHTS), rel=1e-6)]
    assert logs["mae"] == [pytest.approx(np.abs(Y).mean(), rel=1e-6)]


# -- losses and metrics against scikit-learn, end to end --


def softmax(x: np.ndarray) -> np.ndarray:
    exp = np.exp(x.astype(np.float64))
    return exp / exp.sum(-1, keepdims=True)


ONE_HOT = np.eye(CLASSES)[LABELS]
BITS = (RNG.random((ROWS, CLASSES)) < 0.5).astype(np.float32)
PROBABILITIES = 1 / (1 + np.exp(-X[:, :CLASSES].astype(np.float64)))
LOGITS = X[:, :CLASSES]
# For each task: loss, targets, metrics, and the expected values as functions of the weights.
TASKS: dict[str, tuple[str, np.ndarray, list[Any], dict[str, Callable[[Any], float]]]] = {
    "labels": (
        "sparse_categorical_crossentropy",
        LABELS,
        ["accuracy", TopKAccuracy(k=2), "perplexity"],
        {
            "loss": lambda w: sklearn.metrics.log_loss(LABELS, softmax(LOGITS), sample_weight=w),
            "accuracy": lambda w: sklearn.metrics.accuracy_score(LABELS, LOGITS.argmax(-1), sample_weight=w),
            "top_k_accuracy": lambda w: sklearn.metrics.top_k_accuracy_score(LABELS, LOGITS, k=2, sample_weight=w),
            "perplexity": lambda w: np.exp(sklearn.metrics.log_loss(LABELS, softmax(LOGITS), sample_weight=w)),
        },
    ),
    "one-hot": (
        "categorical_crossentropy",
        ONE_HOT,
        ["accuracy", "categorical_accuracy"],
        {
            "loss": lambda w: sklearn.metrics.log_loss(LABELS, softmax(LOGITS), sample_weight=w),
            "accuracy": lambda w: sklearn.metrics.accuracy_score(LABELS, LOGITS.argmax(-1), sample_weight=w),
            "categorical_accuracy": lambda w: sklearn.metrics.accuracy_score(LABELS, LOGITS.argmax(-1), sample_weight=w),
        },
    ),
    "bits": (
        "binary_crossentropy",
        BITS,
        ["binary_accuracy"],
        {
            "loss": lambda w: np.average(-(BITS * np.log(PROBABILITIES) + (1 - BITS) * np.log(1 - PROBABILITIES)).mean(-1), weights=w),
            "binary_accuracy": lambda w: np.average(((LOGITS > 0) == BITS).mean(-1), weights=w),
        },
    ),
    "regression": (
        "huber",
        Y,
        ["mse", "mae", "rmse", "r2"],
        {
            "loss": lambda w: np.average(np.asarray(optax.losses.huber_loss(LOGITS, Y)).mean(-1), weights=w),
            "mse": lambda w: sklearn.metrics.mean_squared_error(Y, LOGITS, sample_weight=w),
            "mae": lambda w: sklearn.metrics.mean_absolute_error(Y, LOGITS, sample_weight=w),
            "rmse": lambda w: np.sqrt(sklearn.metrics.mean_squared_error(Y, LOGITS, sample_weight=w)),
            "r2": lambda w: sklearn.metrics.r2_score(Y, LOGITS, sample_weight=w),
        },
    ),
}


@pytest.mark.parametrize(
    ("task", "num_devices"),
    [*(("labels", number) for number in (1, 2, 4, 8)), ("one-hot", 2), ("bits", 4), *(("regression", number) for number in (1, 2, 4, 8))],
)
@pytest.mark.slow
def test_fit_and_evaluate_agree_with_scikit_learn_over_ragged_batches_and_weights(task: str, num_devices: int, devices: Devices):
    loss, targets, metrics, formulas = TASKS[task]
    trainer = trainer_of(Identity(), devices(num_devices), optax.sgd(0.0), loss, metrics, weighted_metrics=metrics)
    trained = trainer.fit(LOGITS, targets, WEIGHTS, batch_size=6, verbose=0).history
    evaluated = trainer.evaluate(LOGITS, targets, WEIGHTS, batch_size=6, verbose=0)
    expected = {"loss": formulas["loss"](WEIGHTS)}
    for key, formula in formulas.items():
        if key != "loss":
            expected[key] = formula(None)
            expected[f"weighted_{key}"] = formula(WEIGHTS)
    assert {key: row[0] for key, row in trained.items()} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert evaluated == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert all(type(value) is float for value in (*evaluated.values(), *(row[0] for row in trained.values())))


# -- class weights --


@pytest.mark.parametrize("form", ["integer", "column", "one-hot"])
@pytest.mark.mostly_slow
@pytest.mark.slow
def test_class_weights_equal_sample_weights_by_label(form: str, devices: Devices):
    labels = np.array([0, 1, 0, 2])
    y = {"integer": labels, "column": labels[:, None], "one-hot": np.eye(3, dtype=np.float32)[labels]}[form]
    loss = "categorical_crossentropy" if form == "one-hot" else "sparse_categorical_crossentropy"
    results = []
    for options in ({"class_weight": {0: 1, 1: 2, 2: 3}}, {"sample_weight": np.array([1.0, 2.0, 1.0, 3.0])}):
        trainer = trainer_of(Net(), devices(2), optax.sgd(0.5), loss)
        history = trainer.fit(X[:4], y, epochs=2, batch_size=3, verbose=0, **options).history
        results.append((history["loss"], params_of(trainer)))
    assert_close(results[0], results[1], 1e-7)


def test_class_weights_multiply_sample_weights(devices: Devices):
    class_weight = {0: 0.5, 2: 4.0}
    trainer = trainer_of(Identity(), devices(4), loss="sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    history = trainer.fit(LOGITS, LABELS, WEIGHTS, batch_size=6, class_weight=class_weight, verbose=0).history
    weights = WEIGHTS * np.array([0.5, 1.0, 4.0])[LABELS]
    assert history["loss"] == [pytest.approx(sklearn.metrics.log_loss(LABELS, softmax(LOGITS), sample_weight=weights), rel=1e-5)]
    assert history["accuracy"] == [pytest.approx(sklearn.metrics.accuracy_score(LABELS, LOGITS.argmax(-1), sample_weight=weights))]


def test_validation_does_not_use_class_weights(devices: Devices):
    trainer = trainer_of(Identity(), devices(2), loss="sparse_categorical_crossentropy")
    history = trainer.fit(LOGITS, LABELS, class_weight={0: 9.0}, validation_data=(LOGITS, LABELS), verbose=0).history
    assert history["val_loss"] == [pytest.approx(sklearn.metrics.log_loss(LABELS, softmax(LOGITS)), rel=1e-5)]
    assert history["loss"] != history["val_loss"]


# -- several outputs --


class Heads(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        hidden = jnp.tanh(nn.Dense(5)(x))
        return {"value": nn.Dense(CLASSES)(hidden), "label": nn.Dense(CLASSES)(hidden)}


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.slow
def test_loss_and_gradient_are_weighted_sums_over_several_outputs(num_devices: int, devices: Devices):
    trainer = trainer_of(
        Heads(), devices(num_devices), loss={"value": "mse", "label": "sparse_categorical_crossentropy"}, loss_weights={"value": 0.25, "label": 2.0}
    )
    targets = {"value": Y, "label": LABELS}
    trainer.build(X)
    before = params_of(trainer)

    @jax.value_and_grad
    def expected_loss_and_gradient(params: Any) -> Any:
        outputs = Heads().apply({"params": params}, X)
        label = optax.losses.softmax_cross_entropy_with_integer_labels(outputs["label"], LABELS)
        return 0.25 * weighted_mean(squared(outputs["value"], Y), WEIGHTS) + 2.0 * weighted_mean(label, WEIGHTS)

    loss, gradient = expected_loss_and_gradient(before)
    logs = trainer.train_on_batch((X, targets, WEIGHTS))
    assert_close(jax.tree.map(np.subtract, before, params_of(trainer)), gradient, 1e-6)
    assert logs["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert logs["loss"] == pytest.approx(0.25 * logs["value_loss"] + 2.0 * logs["label_loss"], rel=1e-6)


# -- sown losses --


class Sowing(nn.Module):
    """Sows a value that is not a mean over examples, so that it shows which rows a replica used."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        scale = self.param("scale", nn.initializers.ones, ())
        self.sow("losses", "largest", scale * jnp.max(x))
        self.sow("losses", "pair", jnp.stack([scale, scale]))
        return x * 0


def expected_sown_loss(x: np.ndarray, size: int, num_devices: int) -> float:
    """Averages the values of the replicas, weighted by their numbers of real examples."""
    rows = np.arange(size) % len(x)
    shares = np.split(rows, num_devices)
    real = [int((np.arange(size) < len(x))[np.arange(size).reshape(num_devices, -1)[index]].sum()) for index in range(num_devices)]
    return float(np.average([x[share].max() + 2 for share in shares], weights=real))


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("rows", [8, 5, 2])
@pytest.mark.slow
def test_sown_losses_are_averaged_over_replicas_weighted_by_their_real_examples(rows: int, num_devices: int, devices: Devices):
    x = np.arange(rows, dtype=np.float32)[:, None] * 2
    trainer = trainer_of(Sowing(), devices(num_devices), optax.sgd(1.0), "mse")
    trainer.build(np.zeros((8, 1)))
    trainer.test_on_batch((np.zeros((8, 1)), np.zeros((8, 1))))  # batches of 8 from now on
    expected = expected_sown_loss(x, 8, num_devices)
    assert trainer.test_on_batch((x, x * 0, np.arange(rows)))["loss"] == pytest.approx(expected, rel=1e-6)
    trainer.train_on_batch((np.zeros((8, 1)), np.zeros((8, 1))))
    before = float(trainer.state.params["scale"])
    logs = trainer.train_on_batch((x, x * 0))
    assert logs["loss"] == pytest.approx(before * expected, rel=1e-6)
    assert before - float(trainer.state.params["scale"]) == pytest.approx(expected, rel=1e-5)


def test_a_model_can_be_trained_on_sown_losses_alone(devices: Devices):
    trainer = trainer_of(Sowing(), devices(2), optax.sgd(0.1), None)
    history = trainer.fit(np.ones((4, 1)), epochs=2, verbose=0).history
    assert history["loss"] == pytest.approx([3.0, 3 * 0.7])


def test_nothing_to_minimize_is_an_error(devices: Devices):
    with pytest.raises(LossError, match=r"There is nothing to minimize: compile\(\) has no loss, and the module sows no 'losses'"):
        trainer_of(Net(), devices(1), loss=None).fit(X, verbose=0)


# -- scalar losses --


def scalar(outputs: Any, targets: Any) -> Any:
    return jnp.mean((outputs - targets) ** 2)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.mostly_slow
def test_a_scalar_loss_is_the_mean_of_its_batch_if_nothing_is_padded(num_devices: int, devices: Devices):
    results = []
    for loss in ("mse", scalar):
        trainer = trainer_of(Net(), devices(num_devices), optax.sgd(0.1), loss)
        history = trainer.fit(X[:16], Y[:16], epochs=2, batch_size=8, verbose=0).history
        results.append((history["loss"], params_of(trainer)))
    assert_close(results[0], results[1], 1e-6)


@pytest.mark.slow
def test_a_scalar_loss_works_with_all_ways_to_avoid_padding(devices: Devices):
    trainer = trainer_of(Identity(), devices(2), loss=scalar)
    assert trainer.fit(Y, 0 * Y, batch_size=8, shuffle=False, drop_remainder=True, verbose=0).history["loss"] == [pytest.approx((Y[:16] ** 2).mean(), rel=1e-6)]
    trainer.compile(optax.sgd(1.0), scalar, pad=False)
    assert trainer.fit(Y[:22], 0 * Y[:22], batch_size=8, verbose=0).history["loss"] == [pytest.approx((Y[:22] ** 2).mean(), rel=1e-6)]


def test_a_scalar_loss_of_a_batch_that_must_be_padded_is_an_error_before_any_step(devices: Devices):
    trainer = trainer_of(Identity(), devices(2), loss=scalar)
    with pytest.raises(LossError, match="one number for a batch, but a batch of 7 examples must be padded to 8"):
        trainer.fit(Y, Y, batch_size=8, verbose=0)
    with pytest.raises(LossError, match="a batch of 3 examples must be padded to 4"):
        trainer.fit(Y[:6], Y[:6], batch_size=3, verbose=0)
    assert trainer.step == 0
    with pytest.raises(LossError, match="a batch of 1 examples must be padded to 4"):
        trainer.fit(lambda: iter([(Y[:4], Y[:4]), (Y[:1], Y[:1])]), verbose=0)


def test_a_scalar_loss_with_weights_is_an_error(devices: Devices):
    trainer = trainer_of(Identity(), devices(2), loss=lambda outputs, targets: jnp.mean(outputs))
    for options in ({"sample_weight": np.ones(8)}, {"class_weight": {0: 1.0}}):
        with pytest.raises(LossError, match="scalar, but the data is weighted"):
            trainer.fit(Y[:8], LABELS[:8], batch_size=8, verbose=0, **options)


def test_a_scalar_loss_can_be_evaluated_on_the_data_it_was_trained_on(devices: Devices):
    # Eight examples are one batch of eight, not a batch of 32 that is mostly padding.
    trainer = trainer_of(Identity(), devices(2), loss=scalar)
    history = trainer.fit(Y[:8], 0 * Y[:8], validation_data=(Y[:8], 0 * Y[:8]), verbose=0).history
    assert history == {"loss": [pytest.approx((Y[:8] ** 2).mean(), rel=1e-6)], "val_loss": [pytest.approx((Y[:8] ** 2).mean(), rel=1e-6)]}


@pytest.mark.parametrize("shape", [(3,), (5, 2), (1,)])
def test_a_loss_with_a_different_number_of_values_than_examples_is_an_error(shape: tuple[int, ...], devices: Devices):
    trainer = trainer_of(Identity(), devices(2), loss=lambda outputs, targets: jnp.zeros(shape))
    with pytest.raises(LossError, match=r"one value per example, \[4\] or \[4, ...\]\."):
        trainer.fit(Y[:8], Y[:8], batch_size=8, verbose=0)


# -- no targets --


@pytest.mark.parametrize("data", [X, (X,), (X, ()), lambda: iter([X[:20], X[20:]]), lambda: iter([(X[:20],), (X[20:],)])])
@pytest.mark.mostly_slow
def test_without_targets_the_loss_receives_only_outputs(data: Any, devices: Devices):
    trainer = trainer_of(Identity(), devices(2), loss=lambda outputs: outputs.sum(-1))
    assert trainer.fit(data, verbose=0).history["loss"] == [pytest.approx(X.sum(-1).mean(), rel=1e-5)]
    assert trainer.evaluate(data, verbose=0)["loss"] == pytest.approx(X.sum(-1).mean(), rel=1e-5)


def test_without_targets_weights_still_count(devices: Devices):
    trainer = trainer_of(Identity(), devices(2), loss=lambda outputs: outputs.sum(-1))
    history = trainer.fit(X, None, WEIGHTS, batch_size=6, verbose=0).history
    assert history["loss"] == [pytest.approx(np.average(X.sum(-1), weights=WEIGHTS), rel=1e-5)]
