"""`find_origins`: where in a traced function NaN and infinities arise."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fitflax.diagnostics.nan_origin import Origin, _describe, find_origins

ONES = np.ones((2, 3), np.float32)


def origins(fn, *arguments):
    """Returns the origins of the only result."""
    jaxpr = jax.make_jaxpr(fn)(*arguments)
    leaves = jax.tree.leaves(arguments)
    [chain] = find_origins(jaxpr, leaves, [f"argument {index}" for index in range(len(leaves))])
    return chain


def pairs(fn, *arguments):
    return [(origin.kind, origin.operation) for origin in origins(fn, *arguments)]


def zeros_that_jax_cannot_see(x):
    return x - x


@pytest.mark.parametrize(
    ("fn", "found"),
    [
        (lambda x: x + 1, []),
        (lambda x: jnp.log(x - 2), [("NaN", "log")]),
        (lambda x: jnp.exp(x * 1000), [("infinity", "exp")]),
        (lambda x: jnp.exp(x * 1000) * zeros_that_jax_cannot_see(x), [("infinity", "exp"), ("NaN", "mul")]),
        (lambda x: 1 / zeros_that_jax_cannot_see(x), [("infinity", "div")]),
        # Values that are not selected do not count.
        (lambda x: jnp.where(x > 0, x, jnp.nan), []),
        (lambda x: jnp.where(x > 0, jnp.log(-x), jnp.nan), [("NaN", "log")]),
        (lambda x: jnp.where(x < 0, jnp.log(-x), x / 0), [("infinity", "div")]),
        # A mask of infinities is not a fault in itself; a row that holds nothing else is one.
        (lambda x: jax.nn.softmax(jnp.where(jnp.arange(3) < 2, x, -jnp.inf)), []),
        (lambda x: jax.nn.softmax(jnp.where(x > 5, x, -jnp.inf)), [("infinity", "a constant"), ("NaN", "sub")]),
        # A function that is applied to pairs of numbers is not a call.
        (lambda x: x / jax.lax.reduce(x - 1, 0.0, lambda a, b: a + 2 * b, (1,))[:, None], [("infinity", "div")]),
    ],
)
def test_the_operation_that_produces_it_is_found(fn, found):
    assert pairs(fn, ONES) == found


@pytest.mark.parametrize(
    "wrap", [jax.jit, jax.remat, jax.vmap, lambda fn: lambda x: jax.lax.cond(x.sum() > 0, fn, lambda x: x, x), lambda fn: lambda x: jax.jit(jax.jit(fn))(x)]
)
def test_it_is_found_inside_other_functions(wrap):
    assert pairs(wrap(lambda x: jnp.sqrt(x - 2)), ONES) == [("NaN", "sqrt")]


@pytest.mark.parametrize("reverse", [False, True])
def test_it_is_found_in_the_iteration_of_a_scan_that_produces_it(reverse):
    def body(carry, x):
        carry = carry * x
        return carry, jnp.log(2.5 - carry)

    def fn(x):
        return jax.lax.scan(body, x, jnp.arange(1.0, 4.0), reverse=reverse)[1]

    [origin] = origins(fn, np.float32(1))
    # 1 * 1 * 2 is still less than 2.5, and 1 * 3 is not.
    assert origin.operation == "log" and origin.operands == (f"float32[] equal to {-0.5 if reverse else -3.5:g}",)


def test_an_infinity_from_an_earlier_iteration_is_found():
    def fn(x):
        return jax.lax.scan(lambda c, _: (c * 1e20 - c * 1e19, c), x, None, length=4)[0]

    assert pairs(fn, np.float32(1)) == [("infinity", "mul"), ("NaN", "sub")]


def test_it_is_found_in_a_while_loop():
    def fn(x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 1e20), (0, x))[1]

    assert pairs(fn, np.float32(1)) == [("infinity", "mul")]


def test_an_argument_that_is_not_finite_is_named():
    bad = ONES.copy()
    bad[1, 2] = np.nan
    assert pairs(lambda x, y: x @ y.T, ONES, bad) == [("NaN", "argument 1")]
    assert [str(origin) for origin in origins(lambda x: x.sum(), np.full(3, np.inf, np.float32))] == ["infinity from argument 0"]


def test_each_result_has_its_own_origins():
    def fn(x):
        return jnp.log(-x), x, jnp.sqrt(-x)

    chains = find_origins(jax.make_jaxpr(fn)(ONES), [ONES], ["x"])
    assert [[origin.operation for origin in chain] for chain in chains] == [["log"], [], ["sqrt"]]


def test_keys_and_integers_are_not_suspects():
    def fn(key, counts):
        return jax.random.normal(key, (3,)) + counts

    assert origins(fn, jax.random.key(0), np.arange(3)) == []


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sqrt(jnp.abs(nn.Dense(2, use_bias=False)(x)))  # The line that is found.


class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Inner(name="inner")(x).sum()


def test_the_layer_the_line_and_the_direction_are_found():
    model = Outer()
    params = model.init(jax.random.key(0), ONES)
    zeros = np.zeros_like(ONES)
    [infinity, nan] = find_origins(jax.make_jaxpr(jax.grad(model.apply))(params, zeros), [*jax.tree.leaves(params), zeros], ["kernel", "x"])[0]
    assert (infinity.kind, infinity.layer) == ("infinity", "Outer/inner") and (nan.kind, nan.layer) == ("NaN", "Outer/inner/Dense_0")
    assert nan.is_backward
    lines = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, start=1) if "The line that is found" in text)
    assert infinity.source == nan.source == f"test_nan_origin.py:{line} in Inner.__call__"


def test_a_function_that_jax_has_traced_before_is_reported_with_the_line_of_this_call():
    def other(x):
        return jax.nn.softmax(x)

    jax.make_jaxpr(other)(ONES)
    [origin] = origins(lambda x: jax.nn.softmax(x * jnp.inf), ONES)[-1:]
    assert "test_a_function_that_jax_has_traced_before" in origin.source


def test_an_origin_reads_as_a_sentence():
    origin = Origin("NaN", "div", "Net/Dense_0", True, "net.py:3 in __call__", ("float32[2] equal to 0", "float32[2] equal to 0"))
    assert str(origin) == "NaN from div in Net/Dense_0, in the backward pass (net.py:3 in __call__); operands: float32[2] equal to 0, float32[2] equal to 0"


class Masked(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.where(nn.Dense(2)(x) < 1e9, -jnp.inf, 0.0).sum()


def test_a_constant_is_reported_where_it_is_used():
    params = Masked().init(jax.random.key(0), ONES)
    [origin] = find_origins(jax.make_jaxpr(Masked().apply)(params, ONES), [*jax.tree.leaves(params), ONES], ["bias", "kernel", "x"])[0]
    assert (origin.operation, origin.layer) == ("a constant", "Masked") and "test_nan_origin.py" in origin.source


@pytest.mark.parametrize("wrap", [nn.remat, nn.jit, lambda module: module], ids=["remat", "jit", "as it is"])
def test_a_layer_has_its_path_with_every_wrapper_in_the_backward_pass_too(wrap):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return wrap(Inner)(name="inner")(x).sum()

    params = Net().init(jax.random.key(0), ONES)
    zeros = np.zeros_like(ONES)
    chain = find_origins(jax.make_jaxpr(jax.grad(Net().apply))(params, zeros), [*jax.tree.leaves(params), zeros], ["kernel", "x"])[0]
    assert [origin.layer for origin in chain] == ["Net/inner", "Net/inner/Dense_0"] and chain[-1].is_backward


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray])
def test_an_array_that_a_function_closes_over_is_checked_too(make):
    table = make(np.float32([1.0, 0.0, 2.0]))
    [origin] = origins(lambda x: x / table, ONES)
    assert (origin.kind, origin.operation) == ("infinity", "div") and any("0 to 2" in operand for operand in origin.operands)
    assert pairs(lambda x: x * make(np.float32([1.0, np.nan, 2.0])), ONES) == [("NaN", "a constant")]


def test_an_array_without_elements_is_described_by_its_shape():
    assert _describe(np.zeros((0, 3), np.float32)) == "float32[0,3]"
