"""Checks of steps for values that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.parallel import DataParallel
from fitflax.state import Batch
from fitflax.steps.optimizer import are_finite
from fitflax.steps.outputs import NOTHING, Keep

SIZE = 100_000  # XLA computes large sums and maxima differently.


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e5m2])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_found_anywhere(dtype, value):
    check = jax.jit(are_finite)
    for place in (0, 1, 31, SIZE // 2, SIZE - 1):
        values = np.ones(SIZE, np.float32)
        values[place] = value
        assert check([jnp.ones(2), jnp.asarray(values).astype(dtype)]).tolist() == [True, False], place


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_the_largest_finite_values_are_finite(dtype):
    # The sum of them, or of their squares, is not.
    values = jnp.full(SIZE, jnp.finfo(dtype).max, dtype).at[::3].multiply(-1)
    assert jax.jit(are_finite)([values, values[0]]).tolist() == [True, True]


def test_integers_booleans_and_empty_arrays_are_finite():
    assert are_finite([jnp.full(3, 2**31 - 1), jnp.array([True]), jnp.zeros((0, 3))]).tolist() == [True, True, True]
    assert are_finite([jnp.array([1, complex(0, np.inf)]), jnp.int32(1)]).tolist() == [False, True]
    assert are_finite([]).shape == (0,)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_only_cpus_check_differences(platform):
    # Another compiler may replace the difference of equal values by 0.
    exported = jax.export.export(jax.jit(are_finite), platforms=[platform])([jnp.ones((4, 4))])
    assert ("stablehlo.subtract" in exported.mlir_module()) == (platform == "cpu")


def test_checks_and_norms_of_gradients_need_no_memory_of_their_size():
    x = np.ones((8, 1024), np.float32)
    trainer = fitflax.Trainer(nn.Dense(1024), parallel=DataParallel(jax.devices()[:1]))
    # Adam needs the squares of the gradient too. XLA could store them to use them twice.
    trainer.compile(optax.adam(0.1), "mse")
    trainer.build((x, x))
    session = trainer._session
    program, batch = session.task.need_compiled("test"), Batch(x, x, np.ones(len(x), bool))
    program.preparation.train(session.state.live.borrow(), batch)
    carry = session.state.live.take()

    def temporary_bytes(keep):
        step = program._steps.get("train", carry, keep=keep)
        lowered = step.lower(carry.leaves, carry.key, program.empty_sums(train=True), session.strategy.feed(batch))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(Keep(norm=True, culprit=True)) < temporary_bytes(NOTHING) + 2**20  # The gradient has 4 MiB.


def test_a_step_is_skipped_if_only_one_of_the_gradients_overflows():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            small, large = (self.param(name, nn.initializers.zeros, ()) for name in ("small", "large"))
            return small * x[:, 0] + large * x[:, 1]

    trainer = fitflax.Trainer(Two(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(1.0), lambda outputs, targets: outputs, precision="float16")
    trainer.train_on_batch((np.array([[1, 60000]], np.float32), np.zeros(1, np.float32)))
    assert float(trainer.state.params["small"]) == float(trainer.state.params["large"]) == 0
    assert float(trainer.state.opt_state.scale) == 2.0**14
