"""Optimizers by name, learning rates, and hyperparameters that share a compiled step."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import fitflax
from fitflax import optimizers
from fitflax.callbacks import ModelCheckpoint
from fitflax.errors import ConfigError, NotReadyError, OptimizerError
from fitflax.parallel import DataParallel, Sharded

PARAMS = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2), "b": np.ones(2, np.float32)}
GRADS = {"w": np.full((3, 2), 0.3, np.float32), "b": np.float32([0.1, -0.2])}
KERAS_DEFAULTS = {"adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "lamb", "lion", "nadam", "rmsprop"}


def three_steps(optimizer: optax.GradientTransformation) -> Any:
    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(GRADS, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(3):
        params, state = step(params, state)
    return params


@pytest.mark.parametrize("name", optimizers.names())
@pytest.mark.mostly_slow
def test_an_optimizer_by_name_is_the_one_in_optax(name: str):
    expected = three_steps(getattr(optax, name)(learning_rate=0.05))
    result = three_steps(optimizers.get(name, 0.05))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), result, expected)
    jax.tree.map(lambda a, b: np.testing.assert_raises(AssertionError, np.testing.assert_allclose, a, b), result, PARAMS)


@pytest.mark.parametrize("name", optimizers.names())
def test_only_the_learning_rate_is_injected(name: str):
    state = optimizers.get(name, 0.05).init(PARAMS)
    assert list(state.hyperparams) == ["learning_rate"]
    rate = optimizers.get_learning_rate(state)
    assert (rate.dtype, rate.shape, rate.weak_type) == (jnp.float32, (), False)
    assert float(rate) == np.float32(0.05)


def test_default_rates_are_those_of_keras_and_other_optimizers_require_a_rate():
    assert float(optimizers.get_learning_rate(optimizers.get("sgd").init(PARAMS))) == np.float32(0.01)
    for name in set(optimizers.names()) - {"sgd"}:
        if name in KERAS_DEFAULTS:
            assert float(optimizers.get_learning_rate(optimizers.get(name).init(PARAMS))) == np.float32(0.001)
        else:
            with pytest.raises(OptimizerError, match=f"'{name}' has no default learning rate, because Keras does not have this optimizer. Pass learning_rate="):
                optimizers.get(name)


@pytest.mark.parametrize("rate", [1, np.float32(1), np.int64(1), np.ones(()), jnp.float32(1), jnp.asarray(1.0), jnp.bfloat16(1)])
def test_a_rate_may_be_any_scalar_and_becomes_a_float(rate: Any):
    found = optimizers.get_learning_rate(optimizers.get("sgd", rate).init(PARAMS))
    assert (float(found), found.dtype) == (1.0, jnp.float32)
    assert float(optimizers.get_learning_rate(optimizers.set_learning_rate(optimizers.get("sgd").init(PARAMS), rate))) == 1.0


@pytest.mark.parametrize("rate", [-0.1, np.nan, np.inf, True, np.True_, "0.1", np.ones(2), [0.1], 1j])
def test_an_invalid_rate_is_an_error(rate: Any):
    with pytest.raises(OptimizerError, match=r"A learning rate must be a finite number of at least 0. Received: "):
        optimizers.get("adam", rate)
    with pytest.raises(OptimizerError, match=r"A learning rate must be a finite number of at least 0. Received: "):
        optimizers.set_learning_rate(optimizers.get("adam").init(PARAMS), rate)


@pytest.mark.parametrize(("name", "meant"), [("Adam", "adam"), ("AdamW", "adamw"), ("RMSprop", "rmsprop"), ("adagard", "adagrad")])
def test_an_unknown_name_is_an_error_that_suggests_the_intended_one(name: str, meant: str):
    with pytest.raises(
        OptimizerError, match=rf"There is no optimizer '{name}'. Did you mean '{meant}'\? Pass an optax transformation, or one of these names: \['adabelief', "
    ):
        optimizers.get(name)
    with pytest.raises(OptimizerError, match=r"takes a name. Received: 3"):
        optimizers.get(3)  # type: ignore[arg-type]


def test_a_schedule_sets_the_rate_and_the_rate_can_be_read():
    optimizer = optimizers.get("sgd", optax.linear_schedule(1.0, 0.0, 10))
    state = optimizer.init(PARAMS)
    rates = []
    for _ in range(3):
        _, state = optimizer.update(GRADS, state, PARAMS)
        rates.append(float(optimizers.get_learning_rate(state)))
    np.testing.assert_allclose(rates, [1.0, 0.9, 0.8])


def test_setting_a_rate_that_a_schedule_sets_is_an_error():
    state = optax.chain(optax.clip(1.0), optimizers.get("sgd", optax.constant_schedule(0.1))).init(PARAMS)
    with pytest.raises(OptimizerError, match=r"a schedule computes it before every update \(opt_state\[1\]\)"):
        optimizers.set_learning_rate(state, 0.5)


def test_a_rate_that_is_not_injected_reads_as_none_and_cannot_be_set():
    for optimizer in (optax.adam(0.1), optax.identity(), optax.inject_hyperparams(optax.clip)(max_delta=1.0)):
        state = optimizer.init(PARAMS)
        assert optimizers.get_learning_rate(state) is None
        with pytest.raises(OptimizerError, match=r"is a constant in this optimizer.*optax.inject_hyperparams\(optax.adam\)\(learning_rate=0.001\)"):
            optimizers.set_learning_rate(state, 0.5)


NESTED = {
    "chain": lambda sgd: optax.chain(optax.clip(1.0), optax.chain(sgd, optax.identity())),
    "multi_transform": lambda sgd: optax.multi_transform({"w": sgd, "b": optax.set_to_zero()}, {"w": "w", "b": "b"}),
    "MultiSteps": lambda sgd: optax.MultiSteps(sgd, 2),
    "apply_if_finite": lambda sgd: optax.apply_if_finite(sgd, 3),
    "inside another": lambda sgd: optax.inject_hyperparams(lambda bound: optax.chain(optax.clip(bound), sgd))(bound=1.0),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("nest", NESTED)
def test_the_rate_is_found_and_set_wherever_it_is_nested(nest: str):
    optimizer = NESTED[nest](optimizers.get("sgd", 0.1))
    state = optimizer.init(PARAMS)
    before = jax.tree.map(np.asarray, state)
    new = optimizers.set_learning_rate(state, 0.5)
    assert float(optimizers.get_learning_rate(new)) == 0.5
    assert jax.tree.structure(new) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, state, before)
    same = [a is b for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True)]
    assert same.count(False) == 1, "only the rate is another array"
    for _ in range(2):  # MultiSteps applies the update in the second step
        updates, new = optimizer.update(GRADS, new, PARAMS)
    np.testing.assert_allclose(updates["w"], -0.5 * GRADS["w"], rtol=1e-6)


def test_several_rates_are_an_error_that_lists_their_names():
    optimizer = optax.multi_transform({"w": optimizers.get("sgd"), "b": optimizers.get("adam")}, {"w": "w", "b": "b"})
    state = optimizer.init(PARAMS)
    for call in (lambda: optimizers.get_learning_rate(state), lambda: optimizers.set_learning_rate(state, 0.5)):
        with pytest.raises(OptimizerError, match=r"several learning rates: \['b', 'w'\]. Use trainer.learning_rates to read and set them by name"):
            call()
    assert optimizers.get_learning_rate(optimizers.set_learning_rate(state, 0.5, "w").inner_states["w"]) == 0.5
    chained = optax.chain(optimizers.get("sgd"), optimizers.get("adam")).init(PARAMS)
    assert {label: round(float(rate), 6) for label, rate in optimizers.get_learning_rates(chained).items()} == {"opt_state[0]": 0.01, "opt_state[1]": 0.001}


@pytest.mark.parametrize("name", optimizers.names())
@pytest.mark.mostly_slow
def test_hyperparameters_are_float32_and_the_rest_of_the_state_keeps_the_dtype_of_the_parameters(name: str):
    params, grads = (jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), tree) for tree in (PARAMS, GRADS))
    optimizer = optimizers.get(name, 3e-4)
    state = optimizer.init(params)
    assert optimizers.get_learning_rate(state) == np.float32(3e-4)
    inner = jax.tree.map(lambda leaf: leaf.dtype, state.inner_state)
    assert inner == jax.tree.map(lambda leaf: leaf.dtype, getattr(optax, name)(3e-4).init(params))
    updates, state = optimizer.update(grads, optimizers.set_learning_rate(state, 0.1 * 0.999), params)
    assert jax.tree.map(lambda leaf: leaf.dtype, state.inner_state) == inner
    assert optimizers.get_learning_rate(state) == np.float32(0.1 * 0.999)
    expected, _ = getattr(optax, name)(0.1 * 0.999).update(grads, getattr(optax, name)(0.1).init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2e-2, atol=1e-6), updates, expected)


def test_the_step_of_bfloat16_parameters_uses_the_exact_rate():
    params, grads = jnp.ones(4, jnp.bfloat16), jnp.bfloat16([1, 3, 10, 100])
    optimizer = optimizers.get("sgd", 0.01003)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    new = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(new, (np.float32(1) - np.float32(0.01003) * np.float32(grads)).astype(jnp.bfloat16))


def test_setting_keeps_dtype_and_weak_type():
    for old in (jnp.bfloat16(0.1), jnp.float32(0.1), jnp.asarray(0.1), np.float32(0.1), 0.1):
        state = optax.InjectStatefulHyperparamsState(jnp.int32(0), {"learning_rate": old}, {}, optax.EmptyState())
        new = optimizers.set_learning_rate(state, 0.25).hyperparams["learning_rate"]
        assert float(new) == 0.25
        assert jnp.result_type(new) == jnp.result_type(old)
        if isinstance(old, jax.Array):
            assert (new.aval, new.sharding, new.committed) == (old.aval, old.sharding, old.committed)


@pytest.mark.parametrize("kind", ["pmap", "jit", "jit of committed arrays", "jit of sharded arrays"])
def test_setting_the_rate_compiles_nothing_and_takes_effect(kind: str, devices: Callable[[int], list[jax.Device]], compilations: Any):
    optimizer = optax.chain(optax.clip(10.0), optimizers.get("sgd", 0.5))
    mesh = jax.sharding.Mesh(devices(4), ("replica",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def step(params: Any, state: Any, grads: Any) -> Any:
        if kind == "pmap":
            grads = jax.lax.pmean(grads, "replica")
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, grads = {"w": jnp.ones(4)}, {"w": jnp.ones(4)}
    if kind == "pmap":
        compiled = jax.pmap(step, axis_name="replica", in_axes=(None, None, 0), out_axes=None, donate_argnums=(0, 1), devices=devices(4))
        grads = {"w": np.ones((4, 4), np.float32)}
    else:
        compiled = jax.jit(step, donate_argnums=(0, 1))
    state = optimizer.init(params)
    if kind == "jit of committed arrays":
        params, state, grads = jax.device_put((params, state, grads), devices(1)[0])
    elif kind != "jit":
        params, state = jax.device_put((params, state), replicated)
    params, state = compiled(params, state, grads)
    params, state = compiled(params, state, grads)
    np.testing.assert_array_equal(params["w"], np.zeros(4))
    with compilations.counted() as count:
        for rate in (0.25, np.float32(2.0)):
            old = optimizers.get_learning_rate(state)
            state = optimizers.set_learning_rate(state, rate)
            assert optimizers.get_learning_rate(state).sharding == old.sharding
            params, state = compiled(params, state, grads)
    assert count.names == []
    np.testing.assert_array_equal(params["w"], np.full(4, -2.25))


def test_the_rate_of_a_member_of_an_ensemble_is_set_by_its_label():
    groups = {"body": optimizers.get("sgd", 0.5), "head": optimizers.get("sgd", 0.25)}
    state = jax.vmap(optax.multi_transform(groups, {"w": "body", "b": "head"}).init)(jax.tree.map(lambda leaf: np.stack([leaf, leaf]), PARAMS))
    state = optimizers.set_learning_rate(state, 1.0, "head/member 1")
    rates = {label: float(rate) for label, rate in optimizers.get_learning_rates(state).items()}
    assert rates == {"body/member 0": 0.5, "body/member 1": 0.5, "head/member 0": 0.25, "head/member 1": 1.0}


def test_a_rate_that_was_set_does_not_change_with_the_callers_array():
    value = np.ones((), np.float32)
    state = optimizers.set_learning_rate(optimizers.get("sgd").init(PARAMS), value)
    value[...] = 7.0
    assert float(optimizers.get_learning_rate(state)) == 1.0


# --- Trials that differ only in numbers: other hyperparameters, the same compiled steps ---


RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
INJECTED = optax.inject_hyperparams(optax.adamw)


class Net(nn.Module):
    """Scales its outputs by its own hyperparameter, and counts how often it is traced."""

    traces: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        self.traces.append(None)
        scale = self.variable("hyperparams", "scale", lambda: jnp.float32(1.0)).value
        return scale * nn.Dense(1)(x)


def make(*, optimizer: Any = None, traces: list[None] | None = None, **options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(Net(Traces(traces)), **options)
    trainer.compile(optimizer or INJECTED(learning_rate=0.01, weight_decay=0.1), "mse")
    return trainer


class Traces:
    """A list that modules share, and that is compared by identity, so that modules with it can be compared."""

    def __init__(self, listed: list[None] | None) -> None:
        self.listed = [] if listed is None else listed

    def append(self, value: None) -> None:
        self.listed.append(value)


def losses(trainer: fitflax.Trainer, **options: Any) -> list[float]:
    return trainer.fit(X, Y, batch_size=8, epochs=3, verbose=0, **options).history["loss"]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("parallel", [DataParallel, lambda: Sharded(jax.make_mesh((2,), ("data",)))], ids=["data_parallel", "sharded"])
def test_a_trial_trains_like_a_trainer_that_was_compiled_with_its_values(parallel):
    trial = make(parallel=parallel()).with_hyperparams(learning_rate=0.1, weight_decay=0.5, seed=3)
    alone = make(optimizer=INJECTED(learning_rate=0.1, weight_decay=0.5), parallel=parallel(), seed=3)
    assert losses(trial) == losses(alone)


def test_trials_compile_and_trace_once():
    traces: list[None] = []
    trainer = make(traces=traces)
    losses(trainer)
    count, seen = len(traces), []
    for number in range(4):
        trial = trainer.with_hyperparams(learning_rate=0.01 * (number + 1), weight_decay=0.1 * number, scale=1.0 + number, seed=number)
        seen.append(losses(trial)[-1])
    assert len(traces) == count > 0 and len(set(seen)) == 4


def test_hyperparameters_of_the_module_are_in_the_state_and_reach_the_module():
    trial = make().with_hyperparams(scale=0.0)
    trial.build((X, Y))
    assert float(trial.state.model_state["hyperparams"]["scale"]) == 0.0
    assert not trial.predict(X).any()


def test_values_stay_when_others_are_set_and_a_new_seed_keeps_them():
    trial = make().with_hyperparams(learning_rate=0.5).with_hyperparams(weight_decay=0.25).with_seed(7)
    trial.build((X, Y))
    hyperparams = fitflax.optimizers.get_hyperparams(trial.state.opt_state)
    assert float(hyperparams["learning_rate"]) == 0.5 and float(hyperparams["weight_decay"]) == 0.25


def test_a_trial_that_resumes_has_its_own_values_and_the_original_is_unchanged(tmp_path: pathlib.Path):
    trainer = make()
    trainer.build((X, Y))
    trial = trainer.with_hyperparams(learning_rate=0.1)
    trial.fit(X, Y, batch_size=8, epochs=1, verbose=0, callbacks=[ModelCheckpoint(tmp_path)])
    resumed = make()
    whole = losses(resumed, callbacks=[ModelCheckpoint(tmp_path)], resume="auto")
    assert resumed.learning_rate == pytest.approx(0.1) and trainer.learning_rate == pytest.approx(0.01)
    assert whole == losses(trainer.with_hyperparams(learning_rate=0.1))


def test_another_optimizer_starts_with_the_values():
    trial = make().with_hyperparams(learning_rate=0.5)
    trial.build((X, Y))
    trial.compile("sgd", "mse", learning_rate=0.1)
    assert trial.learning_rate == 0.5


def test_a_compile_without_a_hyperparameter_of_the_trial_is_an_error_that_changes_nothing():
    trial, same = (make().with_hyperparams(weight_decay=0.25) for _ in range(2))
    for each in (trial, same):
        each.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    with pytest.raises(OptimizerError, match=r"no hyperparameter 'weight_decay'"):
        trial.compile("sgd", "mse")
    assert losses(trial) == losses(same)


def test_trials_of_an_nnx_module_reject_an_invalid_value_at_every_call():
    trainer = fitflax.Trainer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    trainer.compile("sgd", "mse", learning_rate=0.1)
    trial = trainer.with_hyperparams(momentum=0.9)
    for _ in range(2):
        with pytest.raises(OptimizerError, match="no injected hyperparameter 'momentum'"):
            losses(trial)


def test_the_abbreviation_of_learning_rate_is_recognized():
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    trainer.build((X, Y))
    with pytest.raises(OptimizerError, match=r"no injected hyperparameter 'lr'\. It has: learning_rate\. Did you mean 'learning_rate'\?$"):
        trainer.with_hyperparams(lr=0.1)


def test_trials_work_with_an_nnx_module():
    trainer = fitflax.Trainer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    trainer.compile("sgd", "mse", learning_rate=0.1)
    first, second = (losses(trainer.with_hyperparams(learning_rate=rate))[-1] for rate in (0.1, 0.001))
    assert first < second


@pytest.mark.mostly_slow
@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rat": 0.1}, r"no hyperparameter 'learning_rat'.*scale.*learning_rate.*Did you mean 'learning_rate'\?"),
        ({"learning_rate": -1.0}, "A learning rate must be a finite number of at least 0. Received: -1.0"),
        ({"weight_decay": float("nan")}, "weight_decay must be a finite number. Received: nan"),
        ({"scale": "large"}, "scale must be a finite number. Received: 'large'"),
    ],
)
def test_an_invalid_value_is_an_error_before_any_training(values, message, is_built):
    trainer = make()
    if is_built:
        trainer.build((X, Y))
    with pytest.raises(OptimizerError, match=message):
        trainer.with_hyperparams(**values).fit(X, Y, verbose=0)


@pytest.mark.slow
def test_a_hyperparameter_that_is_not_injected_cannot_be_set():
    plain = fitflax.Trainer(nn.Dense(1))
    plain.compile("adam", "mse")
    plain.build((X, Y))
    with pytest.raises(OptimizerError, match=r"no injected hyperparameter 'weight_decay'. It has: learning_rate.*optax.inject_hyperparams"):
        plain.with_hyperparams(weight_decay=0.1)
    scheduled = make(optimizer=INJECTED(learning_rate=optax.constant_schedule(0.1)))
    scheduled.build((X, Y))
    with pytest.raises(OptimizerError, match="a schedule computes it before every update"):
        scheduled.with_hyperparams(learning_rate=0.1)
    twice = make(optimizer=optax.chain(INJECTED(learning_rate=0.1), INJECTED(learning_rate=0.1)))
    twice.build((X, Y))
    with pytest.raises(OptimizerError, match=r"This optimizer has 2 hyperparameters named 'weight_decay'\. Inject it only once"):
        twice.with_hyperparams(weight_decay=0.1)


def test_with_hyperparams_requires_a_compiled_trainer_and_a_valid_seed():
    trainer = fitflax.Trainer(nn.Dense(1))
    with pytest.raises(NotReadyError, match="with_hyperparams"):
        trainer.with_hyperparams(learning_rate=0.1)
    trainer.compile("adam", "mse")
    with pytest.raises(ConfigError, match="seed"):
        trainer.with_hyperparams(seed=-1)
