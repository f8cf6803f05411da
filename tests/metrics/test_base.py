"""What all metrics share: sums with weights, and sums of two float32 numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from fitflax import metrics
from fitflax.errors import MetricError
from fitflax.metrics.base import add_pairs


def test_by_default_a_metric_is_recorded_and_its_summary_is_its_value():
    class Custom(metrics.Metric):
        name, direction = "own", None
        empty = update = merge = compute = None  # type: ignore[assignment]

    assert Custom.is_recorded and Custom().summary(0.5) == 0.5


def test_adding_two_pairs_keeps_the_rounding_errors_of_both():
    rounded = jnp.array([2.0**24, 1.0])  # 2^24 + 1 is not a float32 number.
    assert np.asarray(add_pairs(rounded, rounded), np.float64).sum() == 2**25 + 2


def test_weights_are_broadcast_from_the_left_before_both_sums():
    values = np.random.default_rng(0).normal(size=(2, 3, 7)).astype(np.float32)
    total, weight = metrics.weighted_sums(values, np.float32([2.0, 0.5]))
    np.testing.assert_allclose(total, 2 * values[0].sum() + 0.5 * values[1].sum(), rtol=1e-5)
    assert float(weight) == 2.5 * 21
    tokens = np.float32([[1, 0, 1], [0, 0, 2]])
    total, weight = metrics.weighted_sums(values, tokens)
    np.testing.assert_allclose(total, (values * tokens[..., None]).sum(), rtol=1e-5)
    assert float(weight) == 4 * 7
    np.testing.assert_allclose(metrics.weighted_sums(jnp.array([True, False]), np.float32([1, 3])), (1, 4))
    np.testing.assert_allclose(metrics.weighted_sums(jnp.array([1, 5], jnp.bfloat16), np.float32([1, -1])), (-4, 0))


@pytest.mark.parametrize(("weights", "values"), [((4, 2), (4,)), ((3,), (4,)), ((1,), (4,)), ((4, 2), (4, 3)), ((4,), ())])
def test_weights_that_do_not_match_the_values_are_an_error_that_names_both_shapes(weights: tuple[int, ...], values: tuple[int, ...]):
    with pytest.raises(MetricError, match=r"Weights must have the leading axes of the values. Received: weights") as error:
        metrics.weighted_sums(np.zeros(values), np.ones(weights))
    assert f"weights {list(weights)} for values {list(values)}" in str(error.value)
