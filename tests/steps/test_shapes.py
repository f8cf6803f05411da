"""The cost of a traced function: known counts, and the cost of loops, of branches and on several devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fitflax.parallel import DataParallel
from fitflax.steps.shapes import Cost, cost_of, peak_flops


def flops(fn, *arguments):
    return cost_of(jax.make_jaxpr(fn)(*arguments)).flops


ONES = np.ones((4, 8), np.float32)
KERNEL = np.ones((8, 16), np.float32)


def test_a_matrix_product_has_two_operations_for_each_multiplication():
    assert flops(jnp.dot, ONES, KERNEL) == 2 * 4 * 8 * 16
    assert flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), np.ones((3, 4, 8)), np.ones((3, 8, 2))) == 2 * 3 * 4 * 8 * 2


@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (1, 2), (2, 1)])
def test_a_convolution_has_the_operations_of_its_kernel_at_each_position(groups, stride):
    conv = nn.Conv(6, (3, 3), strides=stride, feature_group_count=groups, use_bias=False, padding="SAME")
    x = np.ones((2, 8, 8, 4), np.float32)
    places, products = 2 * (8 // stride) ** 2 * 6, 3 * 3 * 4 // groups
    params = conv.init(jax.random.key(0), x)
    cost = cost_of(jax.make_jaxpr(conv.apply)(params, x))
    assert cost.has_convolution and cost.flops == 2 * places * products


def test_a_scan_costs_all_its_iterations_and_a_branch_its_most_expensive_case():
    assert flops(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=5)[0], np.ones((4, 4))) == 5 * 2 * 4**3
    branches = flops(lambda n, x: jax.lax.cond(n > 0, lambda x: x @ x, lambda x: x, x), 1, np.ones((4, 4)))
    assert 2 * 4**3 <= branches <= 2 * 4**3 + 4


def test_operations_inside_jit_remat_and_custom_gradients_are_counted():
    product = 2 * 4 * 8 * 16
    assert flops(jax.jit(jnp.dot), ONES, KERNEL) == flops(jax.checkpoint(jnp.dot), ONES, KERNEL) == product
    assert flops(lambda x: jax.nn.relu(x) @ KERNEL, ONES) == product + ONES.size
    # Forward, and backward to both operands.
    assert flops(jax.grad(lambda a, b: (a @ b).sum(), argnums=(0, 1)), ONES, KERNEL) >= 2 * product


def test_the_cost_of_a_loop_without_a_bound_is_infinite():
    cost = cost_of(jax.make_jaxpr(lambda x: jax.lax.while_loop(lambda x: x.sum() < 10, lambda x: x + 1, x))(ONES))
    assert cost.flops == cost.bytes_accessed == math.inf


def test_each_operation_counts_what_it_reads_and_writes():
    assert cost_of(jax.make_jaxpr(lambda x: x + 1)(ONES)) == Cost(32.0, 2 * 4 * 32 + 4, False, 0.0)


@pytest.mark.parametrize("number", [1, 4])
def test_on_several_devices_the_cost_is_that_of_one_device(number, devices):
    compiled = DataParallel(devices(number)).compile(lambda w, x: x @ w, inputs=("replicated", "split"), outputs="split")
    x = np.ones((16, 8), np.float32) if number == 1 else np.ones((number, 16 // number, 8), np.float32)
    product = 2 * 16 / number * 8 * 2
    assert product <= flops(compiled, np.ones((8, 2), np.float32), x) < 1.5 * product  # pmap removes its axis and adds it again.


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A10G", 70e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("NVIDIA A1000", None),
    ],
)
def test_the_peak_of_a_device_is_found_by_the_longest_matching_name(kind, peak):
    assert peak_flops(kind) == peak
