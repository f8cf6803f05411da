"""`Trainer.hunt_nan`, which repeats the first step with a value that is not finite and names the cause; `find_origins`, which finds it in a traced function."""

import gc
import itertools
import pathlib
import weakref

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import ModelCheckpoint, TerminateOnNaN
from fitflax.diagnostics.nan_hunt import Origin, _describe, find_origins, last_finite
from fitflax.errors import CheckpointNotFoundError, ConfigError, NotReadyError, RestoreError
from fitflax.parallel import DataParallel
from tests.run_script import differences, leaves_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 48).astype(np.int32)
LOSS = "sparse_categorical_crossentropy"


class Net(nn.Module):
    """Has dropout and batch statistics; an example in which x[0] is below -100 makes it take the square root of a negative number."""

    @nn.compact
    def __call__(self, x, train=False):
        h = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        h = nn.Dropout(0.2, deterministic=not train)(nn.relu(h))
        return nn.Dense(3)(h) + jnp.sqrt(jnp.maximum(x[:, :1], -200) + 100) / 10


def make_trainer(model=None, devices=1, optimizer="adam", **options):
    trainer = fitflax.Trainer(model or Net(), parallel=DataParallel(jax.devices()[:devices]))
    trainer.compile(optimizer, LOSS, ["accuracy"], **options)
    return trainer


def with_bad_example(row):
    x = X.copy()
    x[row, 0] = -150
    return x


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}, {"precision": "bfloat16"}, {"ema_decay": 0.9}])
@pytest.mark.slow
def test_the_step_the_leaf_and_the_layer_are_named(devices, options):
    trainer = make_trainer(devices=devices, **options)
    report = trainer.hunt_nan(with_bad_example(21), Y, batch_size=8, shuffle=False)
    assert (report.step, report.culprit) == (3, "the loss")
    assert [(origin.kind, origin.operation, origin.layer) for origin in report.origins] == [("NaN", "sqrt", "Net")]
    assert "test_nan_hunt.py" in report.origins[0].source
    assert report.batch.x[5, 0] == -150 and int(report.state.step) == 2
    assert str(report).splitlines()[0] == "Step 3: the loss is not finite."


def test_the_operation_is_named_for_an_ensemble():
    trainer = fitflax.Trainer(nn.Dense(1), parallel=DataParallel(jax.devices()[:1]), ensemble=2)
    trainer.compile("sgd", lambda outputs, targets: jnp.log(targets - 1 + 0 * outputs[:, 0]))
    report = trainer.hunt_nan(X[:8], np.float32([2] * 6 + [0] * 2), batch_size=4, shuffle=False)
    assert (report.step, report.culprit) == (2, "the loss")
    assert [(origin.operation, origin.kind) for origin in report.origins] == [("log", "NaN")]


def test_a_run_without_faults_has_no_report():
    assert make_trainer().hunt_nan(X, Y, batch_size=8) is None


@pytest.mark.slow
def test_the_trainer_does_not_change():
    x = with_bad_example(40)
    trainer, control = make_trainer(), make_trainer()
    for each in (trainer, control):
        each.fit(X, Y, batch_size=8, steps=3, verbose=0)
    before = jax.random.key_data(trainer.state.key)
    report = trainer.hunt_nan(x, Y, batch_size=8)
    assert report is not None and report.step > 3
    assert trainer.step == 3 and (jax.random.key_data(trainer.state.key) == before).all()
    for each in (trainer, control):
        each.fit(X, Y, batch_size=8, steps=3, verbose=0)
    assert differences(leaves_of(trainer.state), leaves_of(control.state)) == []


@pytest.mark.slow
def test_without_a_state_it_starts_from_the_initial_state_and_leaves_none():
    trainer = make_trainer()
    assert trainer.hunt_nan(with_bad_example(0), Y, batch_size=8, shuffle=False).step == 1
    with pytest.raises(NotReadyError):
        trainer.state  # noqa: B018 (reading it is what fails)


@pytest.mark.slow
def test_the_bad_step_of_a_run_that_terminate_on_nan_ended_is_found_from_its_checkpoints(tmp_path):
    x, watch = with_bad_example(7), TerminateOnNaN()
    trainer = make_trainer()
    save = ModelCheckpoint(tmp_path, every=fitflax.every(steps=2), keep=9)
    trainer.fit(x, Y, batch_size=8, epochs=3, callbacks=[save, watch], log_every=1, verbose=0)
    assert watch.bad_step is not None
    with pytest.raises(ConfigError, match=r"not finite before the first step: BatchNorm_0/bias.*Pass restore_from="):
        trainer.hunt_nan(x, Y, batch_size=8)
    report = make_trainer().hunt_nan(x, Y, batch_size=8, restore_from=tmp_path)
    assert (report.step, report.culprit) == (watch.bad_step, watch.culprit)
    assert report.origins[0].operation == "sqrt"
    last_good = int(report.state.step)
    assert last_good == watch.bad_step - 1
    with pytest.raises(RestoreError, match="batch_size was 8 and is now 16"):
        make_trainer().hunt_nan(x, Y, batch_size=16, restore_from=tmp_path)


def test_a_directory_without_a_finite_checkpoint_is_an_error(tmp_path):
    trainer = make_trainer()
    trainer.fit(with_bad_example(0), Y, batch_size=8, epochs=1, shuffle=False, callbacks=[ModelCheckpoint(tmp_path)], verbose=0)
    with pytest.raises(CheckpointNotFoundError, match=r"has finite parameters\. Start from the beginning instead"):
        make_trainer().hunt_nan(X, Y, batch_size=8, restore_from=tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="no such directory"):
        make_trainer().hunt_nan(X, Y, batch_size=8, restore_from=tmp_path / "nowhere")


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_traced_to_its_origin():
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(3, kernel_init=nn.initializers.zeros)(x)
            return h / (1 + jnp.sqrt((h**2).sum(axis=-1, keepdims=True)))

    report = make_trainer(Norm()).hunt_nan(X, Y, batch_size=8)
    assert report.culprit == "the gradient of Dense_0/bias"
    assert [(origin.kind, origin.operation, origin.is_backward) for origin in report.origins] == [("infinity", "div", False), ("NaN", "mul", True)]


def test_a_parameter_that_the_optimizer_makes_infinite_is_named():
    huge = optax.chain(optax.scale(1e30), optax.sgd(1e30))
    report = make_trainer(nn.Dense(3), optimizer=huge).hunt_nan(X, Y, batch_size=8)
    assert report.culprit.startswith("the parameter ") and report.origins


@pytest.mark.slow
def test_a_custom_step_is_repeated_too():
    class CustomStep(fitflax.Trainer):
        def train_step(self, state, batch):
            state, logs = super().train_step(state, batch)
            return state.replace_params(jax.tree.map(lambda leaf: jnp.log(leaf - 100), state.params)), logs

    trainer = CustomStep(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", LOSS)
    report = trainer.hunt_nan(X, Y, batch_size=8)
    assert report.step == 1 and report.origins[0].operation == "log"


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (lambda: iter([(X, Y)]), {}, "hunt_nan cannot take an iterator, because it would consume your data"),
        (lambda: lambda: iter(lambda: (X, Y), None), {"steps": 0}, "steps"),
    ],
)
def test_invalid_arguments_are_errors(data, options, message):
    with pytest.raises(ConfigError, match=message):
        make_trainer().hunt_nan(data(), **options)


@pytest.mark.slow
def test_it_iterates_over_the_data_again_if_steps_requires_it():
    assert make_trainer().hunt_nan(lambda: [(X[:8], Y[:8])], steps=5) is None
    # The rate becomes infinite in the fourth step, which is the fourth iteration over one batch.
    trainer = make_trainer(nn.Dense(3), optimizer=optax.sgd(lambda count: jnp.where(count < 3, 0.1, jnp.inf)))
    assert trainer.hunt_nan(lambda: [(X[:8], Y[:8])], steps=9).step == 4
    assert trainer.hunt_nan(lambda: [(X[:8], Y[:8])]) is None


@pytest.mark.slow
def test_a_norm_too_large_for_a_float_is_not_a_fault():
    class Steep(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x)

    trainer = fitflax.Trainer(Steep(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(0.0), lambda outputs, targets: outputs[:, 0] * 1e25)
    assert trainer.hunt_nan(X, Y, batch_size=8) is None
    watch = TerminateOnNaN()
    trainer.fit(X, Y, batch_size=8, callbacks=[watch], log_every=1, verbose=0)
    assert watch.bad_step is None


@pytest.mark.slow
def test_a_lost_state_does_not_matter_if_a_checkpoint_is_given(tmp_path):
    trainer = make_trainer()
    trainer.fit(X, Y, batch_size=8, callbacks=[ModelCheckpoint(tmp_path)], verbose=0)
    for leaf in jax.tree.leaves(trainer._session.state.live.borrow().params):
        leaf.delete()
    assert trainer.hunt_nan(X, Y, batch_size=8, steps=2, restore_from=tmp_path) is None


@pytest.mark.slow
def test_the_search_does_not_keep_the_checkpoint_that_it_has_read(tmp_path, monkeypatch):
    trainer, arrays, alive = make_trainer(nn.Dense(3)), [], []
    trainer.fit(X, Y, batch_size=8, steps=1, callbacks=[ModelCheckpoint(tmp_path)], verbose=0)

    def find(*arguments, **options):
        saved = last_finite(*arguments, **options)
        arrays.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(saved.train) if isinstance(leaf, np.ndarray))
        return saved

    def count(*arguments, **options):
        gc.collect()
        alive.append(sum(array() is not None for array in arrays))

    monkeypatch.setattr("fitflax.trainer.last_finite", find)
    monkeypatch.setattr("fitflax.trainer.hunt_nan", count)
    trainer.hunt_nan(X, Y, batch_size=8, restore_from=tmp_path)
    assert arrays and alive == [0]


@pytest.mark.slow
def test_hunt_nan_and_find_learning_rate_check_their_data_like_fit():
    with pytest.raises(fitflax.errors.DataError, match="y holds labels from 1 to 3"):
        make_trainer().hunt_nan(X, Y + 1)
    with pytest.raises(fitflax.errors.DataError, match="y holds labels from 1 to 3"):
        make_trainer(optimizer="sgd").find_learning_rate(X, Y + 1)
    bad = X.copy()
    bad[3, 1] = np.nan
    with pytest.warns(fitflax.errors.FitflaxWarning, match="x has NaN or infinity in 1 of 48 examples"):
        report = make_trainer().hunt_nan(bad, Y, batch_size=8, shuffle=False)
    assert str(report).endswith("NaN from the batch's x")


def test_a_checkpoint_of_another_library_is_an_error(tmp_path):
    trainer = make_trainer()
    trainer.build((X[:4], Y[:4]))
    (tmp_path / "checkpoint_3").write_bytes(flax.serialization.to_bytes({"params": trainer.state.params}))
    with pytest.raises(RestoreError, match="holds a state, but no run to resume"):
        trainer.hunt_nan(X, Y, restore_from=tmp_path)


def test_data_that_never_ends_needs_steps():
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    with pytest.raises(ConfigError, match=r"This data never ends\. Pass steps=\."):
        trainer.hunt_nan(itertools.repeat((np.ones((2, 2)), np.ones((2, 1)))))


@pytest.mark.slow
def test_restore_from_can_be_the_path_of_one_checkpoint(tmp_path):
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    data = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
    trainer.fit(*data, batch_size=2, steps=1, callbacks=[ModelCheckpoint(tmp_path)], verbose=0)
    data[0][:] = np.nan
    report = trainer.hunt_nan(*data, restore_from=tmp_path / "step_00000001", batch_size=2)
    assert (report.step, trainer.step) == (2, 1)


# -- where in a traced function NaN and infinities arise --


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
    assert infinity.source == nan.source == f"test_nan_hunt.py:{line} in Inner.__call__"


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
    assert (origin.operation, origin.layer) == ("a constant", "Masked") and "test_nan_hunt.py" in origin.source


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
