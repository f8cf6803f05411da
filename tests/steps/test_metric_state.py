"""Which metrics are summed from step to step, and how a step returns their values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fitflax import metrics
from fitflax.metrics import Mean
from fitflax.steps.metric_state import TotalLoss, as_vector, rows_of, summed


def mean(value: float, weight: float = 1.0) -> Mean:
    return Mean().add(jnp.float32(value), jnp.float32(weight))


def test_logs_of_a_step_are_one_vector_in_the_order_of_keys_with_arrays_row_by_row():
    array = metrics.Precision(average=None).update(jnp.array([[2.0, 1.0], [0.0, 3.0]]), jnp.array([0, 1]), jnp.ones(2))
    first = [jnp.float32(7), jnp.float32(8)]
    assert as_vector(first, {"b": mean(2), "a": mean(3)}).tolist() == [7, 8, 3, 2]
    assert as_vector(first, {"b": mean(2), "a": array, "c": mean(4)}).tolist() == [7, 8, 1, 1, 2, 4]
    assert as_vector([], {"a": array}).tolist() == [1, 1]
    assert as_vector([], {}).shape == (0,)


def test_metrics_are_summed_unless_they_collect_rows():
    class Foreign:
        """A third-party metric, which does not say whether it collects rows."""

    given: dict[str, Any] = {"mse": metrics.get("mse"), "auc": metrics.AUC(), "foreign": Foreign()}
    assert (list(summed(given)), list(rows_of(given))) == (["mse", "foreign"], ["auc"])


def test_losses_of_two_replicas_are_combined_by_adding_their_leaves():
    one, other = (TotalLoss({"a": mean(a, 1.0), "b": mean(b, 3.0)}) for a, b in ((1.0, 2.0), (3.0, 6.0)))
    assert one.additive
    added = jax.tree.map(jnp.add, one, other)
    np.testing.assert_array_equal([added.compute(), one.merge(other).compute()], 6.0)
    assert np.isnan(one.empty().compute())
    with pytest.raises(NotImplementedError):
        one.update(None, None, jnp.ones(1))
