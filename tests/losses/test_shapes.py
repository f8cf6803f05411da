"""Mistakes in the shapes of custom losses: a broadcast of outputs against targets is found, and explicit shapes are not taken for one."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from fitflax import losses
from fitflax.losses.shapes import broadcast_fault

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
