"""Trials that differ only in numbers: other hyperparameters, the same compiled steps."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import fitflax
from fitflax.callbacks import ModelCheckpoint
from fitflax.errors import ConfigError, NotReadyError, OptimizerError
from fitflax.parallel import DataParallel, Sharded

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
