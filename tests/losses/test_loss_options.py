"""Individual losses beyond their default formulas: options, precision, and terms that have no effect."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax import losses
from fitflax.errors import LossError
from fitflax.losses.shapes import broadcast_fault

RNG = np.random.default_rng(1)
LOGITS = (2 * RNG.normal(size=(6, 4))).astype(np.float32)
LABELS = RNG.integers(4, size=6)
ONE_HOT = np.eye(4, dtype=np.float32)[LABELS]
BINARY = (RNG.random((6, 4)) < 0.5).astype(np.float32)
PROBABILITIES = RNG.dirichlet(np.ones(4), size=6).astype(np.float32)

P = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))
SOFTMAX = np.exp(LOGITS.astype(np.float64)) / np.exp(LOGITS.astype(np.float64)).sum(-1, keepdims=True)


def test_huber_turns_linear_at_delta():
    np.testing.assert_allclose(losses.huber(np.float32([1.0, 4.0]), np.zeros(2), delta=2.0), [0.5, 6.0])
    with pytest.raises(LossError, match=r"huber\(delta=...\) must be larger than 0. Received: 0"):
        losses.huber(LOGITS, ONE_HOT, delta=0)


@pytest.mark.slow
def test_label_smoothing_matches_the_formula_of_keras():
    smooth = ONE_HOT * 0.9 + 0.1 / 4
    expected = -(smooth * np.log(SOFTMAX)).sum(-1)
    np.testing.assert_allclose(losses.categorical_crossentropy(LOGITS, ONE_HOT, label_smoothing=0.1), expected, rtol=1e-5)
    np.testing.assert_allclose(losses.sparse_categorical_crossentropy(LOGITS, LABELS, label_smoothing=0.1), expected, rtol=1e-5)
    expected = -(0.25 * (1 - SOFTMAX) ** 2 * smooth * np.log(SOFTMAX)).sum(-1)
    np.testing.assert_allclose(losses.categorical_focal_crossentropy(LOGITS, ONE_HOT, label_smoothing=0.1), expected, rtol=1e-5)
    t = BINARY * 0.8 + 0.1
    cross = -(t * np.log(P) + (1 - t) * np.log(1 - P))
    np.testing.assert_allclose(losses.binary_crossentropy(LOGITS, BINARY, label_smoothing=0.2), cross.mean(-1), rtol=1e-5)
    easy = t * P + (1 - t) * (1 - P)
    np.testing.assert_allclose(losses.binary_focal_crossentropy(LOGITS, BINARY, label_smoothing=0.2), ((1 - easy) ** 2 * cross).mean(-1), rtol=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        losses.binary_crossentropy,
        losses.categorical_crossentropy,
        losses.sparse_categorical_crossentropy,
        losses.binary_focal_crossentropy,
        losses.categorical_focal_crossentropy,
    ],
)
def test_label_smoothing_outside_the_range_0_to_1_is_an_error(loss):
    for value in (1.5, -0.1, float("nan")):
        with pytest.raises(LossError, match=rf"{loss.__name__}\(label_smoothing=...\) must be between 0 and 1. Received: {value}"):
            loss(LOGITS, ONE_HOT, label_smoothing=value)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 3.0])
def test_binary_focal_crossentropy_matches_the_formula_of_keras(gamma: float):
    cross = -(BINARY * np.log(P) + (1 - BINARY) * np.log(1 - P))
    focal = np.abs(BINARY - P) ** gamma * cross
    np.testing.assert_allclose(losses.binary_focal_crossentropy(LOGITS, BINARY, gamma=gamma), focal.mean(-1), rtol=1e-5)
    # Without class balancing, alpha is not used.
    np.testing.assert_allclose(losses.binary_focal_crossentropy(LOGITS, BINARY, gamma=gamma, alpha=0.9), focal.mean(-1), rtol=1e-5)
    balanced = losses.binary_focal_crossentropy(LOGITS, BINARY, apply_class_balancing=True, alpha=0.9, gamma=gamma)
    np.testing.assert_allclose(balanced, (np.where(BINARY == 1, 0.9, 0.1) * focal).mean(-1), rtol=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 3.0])
def test_categorical_focal_crossentropy_matches_the_formula_of_keras(gamma: float):
    focal = -((1 - SOFTMAX) ** gamma) * PROBABILITIES * np.log(SOFTMAX)
    np.testing.assert_allclose(losses.categorical_focal_crossentropy(LOGITS, PROBABILITIES, gamma=gamma), 0.25 * focal.sum(-1), rtol=1e-5)
    alpha = [0.1, 1.0, 2.0, 0.0]
    with jax.numpy_rank_promotion("raise"):
        values = losses.categorical_focal_crossentropy(LOGITS, PROBABILITIES, alpha=alpha, gamma=gamma)
    np.testing.assert_allclose(values, (alpha * focal).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("loss", [losses.binary_focal_crossentropy, losses.categorical_focal_crossentropy])
@pytest.mark.mostly_slow
def test_focal_losses_of_confident_outputs_have_finite_gradients(loss, gamma: float):
    @jax.jit
    @jax.value_and_grad
    def total(outputs):
        return loss(outputs, ONE_HOT, gamma=gamma).sum()

    for size in (20.0, 100.0, 1e6):
        for sign in (1, -1):
            value, slope = total(sign * size * (2 * ONE_HOT - 1))
            assert jnp.isfinite(value)
            assert jnp.all(jnp.isfinite(slope))
            assert (value < 1e-4) if sign == 1 else (value > 10 * size / 8)
    if loss is losses.categorical_focal_crossentropy:
        value, slope = total(np.where(ONE_HOT == 1, 0.5, -np.inf).astype(np.float32))
        assert value == 0
        assert jnp.all(jnp.isfinite(slope))


def test_invalid_options_of_focal_losses_are_errors():
    with pytest.raises(LossError, match=r"binary_focal_crossentropy\(alpha=...\) must be between 0 and 1. Received: 2.0"):
        losses.binary_focal_crossentropy(LOGITS, BINARY, alpha=2.0)
    for loss in (losses.binary_focal_crossentropy, losses.categorical_focal_crossentropy):
        with pytest.raises(LossError, match=rf"{loss.__name__}\(gamma=...\) must not be negative. Received: -1"):
            loss(LOGITS, ONE_HOT, gamma=-1)
    for alpha in ([0.1, 0.2], -0.5, [[0.1, 0.2, 0.3, 0.4]]):
        with pytest.raises(LossError, match=r"alpha=...\) must be at least 0: one number, or one for each of the 4 classes. Received: "):
            losses.categorical_focal_crossentropy(LOGITS, ONE_HOT, alpha=alpha)


@pytest.mark.slow
def test_log_cosh_is_accurate_for_small_errors_and_finite_for_large_ones():
    errors = np.float32([0, 1e-6, 1e-4, 1e-3, 0.03, 0.5, 0.999, 1.0, 1.001, 3, 20, 89, 1e6, 1e30])
    exact = errors.astype(np.float64)
    exact = np.where(exact < 1, np.log1p(2 * np.sinh(np.minimum(exact, 1) / 2) ** 2), np.logaddexp(exact, -exact) - np.log(2))
    for sign in (1, -1):
        np.testing.assert_allclose(losses.log_cosh(sign * errors, np.zeros_like(errors)), exact, rtol=1e-6)
        slopes = jax.grad(lambda z: losses.log_cosh(z, jnp.zeros_like(z)).sum())(sign * errors)
        np.testing.assert_allclose(slopes, np.tanh(sign * errors.astype(np.float64)), rtol=1e-6)


def test_percentage_errors_of_zero_targets_are_relative_to_a_lower_bound():
    np.testing.assert_allclose(losses.mean_absolute_percentage_error(np.float32([0, 1e-7, -3]), np.zeros(3)), [0, 100, 3e9], rtol=1e-6)


def test_negative_values_count_as_zero_in_logarithmic_errors():
    values = losses.mean_squared_logarithmic_error(np.float32([-5, -0.5, 3]), np.float32([0, 3, -2]))
    np.testing.assert_allclose(values, [0, np.log(4) ** 2, np.log(4) ** 2], rtol=1e-6)
    assert jnp.all(jnp.isfinite(jax.grad(lambda z: losses.mean_squared_logarithmic_error(z, z * 0 + 1).sum())(jnp.array([-1.0, -5.0]))))


@pytest.mark.parametrize("name", ["cosine_similarity", "cosine_distance"])
@pytest.mark.slow
def test_cosines_ignore_length_and_rows_of_zeros_are_orthogonal_to_all_rows(name: str):
    loss = losses.get(name)
    a, b = np.float32([[3, 4], [0, 0], [1, 2], [0, 0]]), np.float32([[-6, -8], [1, 2], [0, 0], [0, 0]])
    right_angle = {"cosine_similarity": 0.0, "cosine_distance": 1.0}[name]
    np.testing.assert_allclose(loss(a, b), [right_angle + 1, right_angle, right_angle, right_angle], atol=1e-6)
    for length in (1e-3, 1e6):
        np.testing.assert_allclose(loss(length * LOGITS, PROBABILITIES), loss(LOGITS, PROBABILITIES), rtol=1e-4, atol=1e-6)
    slopes = jax.grad(lambda pair: loss(*pair).sum())((a, b))
    assert all(jnp.all(jnp.isfinite(slope)) for slope in slopes)


@pytest.mark.parametrize("loss", [losses.hinge, losses.squared_hinge])
def test_hinge_losses_accept_both_0_and_minus_1_as_the_negative_target(loss):
    scores = np.float32([[0.5, 0.5], [-0.2, 3.0], [0.5, 0.5]])
    mixed = loss(scores, np.array([[0, 1], [-1, 1], [-1, 1]]))
    np.testing.assert_array_equal(mixed, loss(scores, np.array([[-1, 1], [-1, 1], [-1, 1]])))
    np.testing.assert_array_equal(mixed, loss(scores, np.array([[0, 1], [0, 1], [0, 1]])))
    np.testing.assert_array_equal(mixed, loss(scores, np.array([[False, True]] * 3)))
    assert mixed[0] == mixed[2]


@pytest.mark.slow
def test_targets_with_probability_zero_add_nothing_to_the_divergence_or_its_gradients():
    targets = np.float32([[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]])
    outputs = np.float32([[0.1, -0.3, -np.inf], [2.0, -np.inf, 1.0]])
    p = np.exp(outputs.astype(np.float64)) / np.exp(outputs.astype(np.float64)).sum(-1, keepdims=True)
    expected = [0.25 * np.log(0.25 / p[0, 0]) + 0.75 * np.log(0.75 / p[0, 1]), -np.log(p[1, 2])]
    np.testing.assert_allclose(losses.kl_divergence(outputs, targets), expected, rtol=1e-6)
    by_outputs, by_targets = jax.grad(lambda z, t: losses.kl_divergence(z, t).sum(), argnums=(0, 1))(outputs, targets)
    np.testing.assert_allclose(by_outputs, p - targets, atol=1e-6)
    assert jnp.all(jnp.isfinite(by_targets))
    # The same under optax's name, with log probabilities as outputs and targets.
    with np.errstate(divide="ignore"):
        loss, log_p, log_t = losses.get("kl_divergence_with_log_targets"), np.log(p), np.log(targets)
    np.testing.assert_allclose(loss(log_p, log_t), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda z: loss(z, log_t).sum())(jnp.asarray(log_p, jnp.float32)), -targets, atol=1e-6)


def test_the_divergence_is_crossentropy_minus_entropy_and_zero_for_equal_distributions():
    entropy = -(PROBABILITIES.astype(np.float64) * np.log(PROBABILITIES)).sum(-1)
    np.testing.assert_allclose(losses.kl_divergence(LOGITS, PROBABILITIES), losses.categorical_crossentropy(LOGITS, PROBABILITIES) - entropy, atol=1e-6)
    np.testing.assert_allclose(losses.kl_divergence(np.log(PROBABILITIES) + 3, PROBABILITIES), 0, atol=1e-6)


def test_poisson_is_minimal_at_the_logarithm_of_the_count():
    slope = jax.grad(lambda z: losses.poisson(z, jnp.array([1.0, 5.0])).sum())
    np.testing.assert_allclose(slope(jnp.log(jnp.array([1.0, 5.0]))), [0, 0], atol=1e-6)
    assert jnp.isfinite(losses.poisson(jnp.array([-1e6]), jnp.array([0.0])))[0]


@pytest.mark.slow
def test_an_optax_function_with_other_options_is_a_loss():
    trainer = fitflax.Trainer(nn.Dense(4))
    trainer.compile("sgd", functools.partial(optax.losses.poly_loss_cross_entropy, epsilon=2.0))
    trainer.build((LOGITS, ONE_HOT))
    p = (np.asarray(jax.nn.softmax(trainer.predict(LOGITS))) * ONE_HOT).sum(-1)
    assert trainer.evaluate(LOGITS, ONE_HOT, verbose=0)["loss"] == pytest.approx((-np.log(p) + 2.0 * (1 - p)).mean(), rel=1e-5)


def test_the_errors_of_complex_numbers_are_magnitudes():
    outputs, targets = np.array([[1 + 2j, 3j], [0, 1]], np.complex64), np.float32([[0, 0], [0, 3]])
    np.testing.assert_allclose(losses.mean_squared_error(outputs, targets), [7.0, 2.0])
    np.testing.assert_allclose(losses.mean_absolute_error(targets, outputs), [(np.sqrt(5) + 3) / 2, 1.0], rtol=1e-6)
    gradient = jax.grad(lambda scale: losses.mean_squared_error(scale * outputs, targets).sum())(2.0)
    np.testing.assert_allclose(gradient, (2 * 14 * 2 + 2 * (2 - 3)) / 2, rtol=1e-6)  # Of (14 s^2 + (s - 3)^2) / 2.
    # A perfect output has a finite gradient, too.
    assert float(jax.grad(lambda scale: losses.mean_absolute_error(scale * outputs, outputs).sum())(1.0)) == 0.0


@pytest.mark.parametrize("name", sorted({*losses.names()} - {"mse", "mean_squared_error", "mae", "mean_absolute_error"}))
def test_a_loss_without_a_magnitude_rejects_complex_numbers(name: str):
    outputs = np.ones((4, 3), np.complex64)
    with pytest.raises(LossError, match=r"takes real outputs. Received: outputs of dtype complex64. Use 'mse' or 'mae'"):
        losses.get(name)(outputs, np.ones((4, 3), np.float32))


COLUMN, ROW = jnp.arange(3.0)[:, None], jnp.ones(3)
QUANTILES = jnp.array([0.1, 0.5, 0.9])  # As many as there are rows.


def pinball(outputs: Any, targets: Any) -> Any:
    error = targets[:, None] - outputs
    return jnp.mean(jnp.maximum(QUANTILES * error, (QUANTILES - 1) * error), axis=-1)


def cox(outputs: Any, targets: Any) -> Any:
    risk, at_risk = outputs[:, 0], targets >= targets[:, None]
    return jax.nn.logsumexp(jnp.where(at_risk, risk[None, :], -jnp.inf), axis=1) - risk


def ranknet(outputs: Any, targets: Any) -> Any:
    differences = outputs - outputs[:, 0]
    return jnp.mean(jax.nn.softplus(-differences * jnp.sign(targets[:, None] - targets)), axis=-1)


def kernels(outputs: Any, targets: Any) -> Any:
    return jnp.mean(jnp.exp(-((outputs - outputs[:, 0]) ** 2)) * jnp.exp(-((targets[:, None] - targets) ** 2)), axis=1)


def cross_kernel(outputs: Any, targets: Any) -> Any:
    return jnp.mean(jnp.exp(-((outputs[:, 0][:, None] - targets) ** 2)), axis=1)


@pytest.mark.parametrize(
    "loss",
    [
        cox,
        ranknet,
        kernels,
        cross_kernel,
        lambda outputs, targets: (outputs[:, 0] - targets) ** 2 * (targets[:, None] == targets).mean(1),
        jax.jit(lambda outputs, targets: jnp.where(targets > 0, outputs[:, 0] - targets, 0.0)),
        lambda outputs, targets: jnp.mean((outputs[:, 0] - targets) ** 2),
        lambda outputs, targets: jnp.mean((outputs.squeeze(-1) - targets) ** 2),
        lambda outputs, targets: jnp.mean((outputs - targets[:, None]) ** 2, axis=-1),
        lambda outputs, targets: jnp.mean((outputs - targets[None]) ** 2, axis=-1),  # Pairs, explicitly.
        lambda outputs, targets: jnp.mean((outputs.reshape(-1, 1) - targets.reshape(-1)) ** 2, axis=-1),
        lambda outputs, targets: jax.vmap(lambda output, target: (output - target) ** 2)(outputs, targets),
        pinball,
        losses.mean_squared_error,
    ],
)
def test_explicit_shapes_are_not_taken_for_a_mistake(loss: Any):
    assert broadcast_fault(loss, loss(COLUMN, ROW), COLUMN, ROW) is None


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: jnp.mean((outputs * jnp.array([2.0]) - targets) ** 2, axis=-1),
        lambda outputs, targets: jnp.mean((outputs - targets) ** 2 + (targets[:, None] - jnp.ones(3)).mean(-1), axis=-1),
        lambda outputs, targets: jnp.where(targets > 0, outputs, 0.0).mean(-1),
        lambda outputs, targets: jnp.subtract(*jnp.broadcast_arrays(outputs, targets)).mean(-1),
        lambda outputs, targets: jax.lax.cond(True, lambda: jnp.where(targets > 0, outputs, 0.0).mean(-1), lambda: outputs[:, 0]),
        jax.jit(lambda outputs, targets: jnp.mean((outputs - targets) ** 2, axis=-1)),
    ],
)
def test_a_broadcast_is_found_after_harmless_ones_in_any_operation_and_each_time(loss: Any):
    for _ in range(2):
        assert broadcast_fault(loss, loss(COLUMN, ROW), COLUMN, ROW) is not None


def test_a_custom_loss_is_traced_once_for_the_check_of_its_shapes():
    traced = []

    def loss(outputs: Any, targets: Any) -> Any:
        traced.append(outputs.shape)
        return (outputs[:, 0] - targets) ** 2

    for rows in (3, 3, 2):
        assert broadcast_fault(loss, ROW, COLUMN[:rows], ROW[:rows]) is None
    assert len(traced) == 2


def test_a_broadcast_of_outputs_against_targets_is_found_in_dicts_and_for_any_return_value():
    def loss(outputs: Any, targets: Any) -> Any:
        return jnp.mean((outputs["a"] - targets["a"]) ** 2, axis=1)

    outputs, targets = {"a": COLUMN, "b": ROW}, {"a": ROW, "b": COLUMN}
    fault = broadcast_fault(loss, loss(outputs, targets), outputs, targets)
    assert fault is not None and fault.startswith("returned [3] for outputs {'a': float32[3,1], 'b': float32[3]} and targets")
    assert broadcast_fault(loss, loss(targets, outputs), targets, outputs) is not None
