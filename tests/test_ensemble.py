"""Ensembles: members that are trained together equal members that are trained alone."""

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
from fitflax.callbacks import BestCheckpoint, CSVLogger, ModelCheckpoint, TensorBoard, TerminateOnNaN
from fitflax.errors import ConfigError, MetricError, OptimizerError
from fitflax.metrics import AUC
from fitflax.parallel import DataParallel, Sharded

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int32)
VALID = (X[:20] + 0.1, Y[:20])
MEMBERS = 3


class Net(nn.Module):
    """Has batch statistics and dropout."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.BatchNorm(use_running_average=not train)(nn.relu(nn.Dense(8)(x)))
        return nn.Dense(2)(nn.Dropout(0.3, deterministic=not train)(x))


class Weighted(fitflax.Trainer):
    """Has a custom loss."""

    def compute_loss(self, params: Any, model_state: Any, batch: Any, *, rngs: Any, train: bool) -> Any:
        values, state, aux = super().compute_loss(params, model_state, batch, rngs=rngs, train=train)
        return 0.5 * values, state, {**aux, "twice": 2 * values}


class CustomStep(fitflax.Trainer):
    """Has a custom update."""

    def train_step(self, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            outputs, changed = self.model.apply(
                {"params": params, **state.model_state}, batch.x, train=True, rngs=self.step_rngs(state), mutable=["batch_stats"]
            )
            values = optax.softmax_cross_entropy_with_integer_labels(outputs, batch.y)
            return jnp.sum(values * batch.mask) / 16, changed

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradient(grads, self.optimizer, changed), {"loss": (value * 16, jnp.sum(batch.mask))}


def make(kind: Any = fitflax.Trainer, *, rate: Any = 0.3, devices: int = 1, metrics: Any = ("accuracy",), compile_options: Any = None, **options: Any) -> Any:
    trainer = kind(Net(), parallel=DataParallel(jax.devices()[:devices]), **options)
    # The norm of the gradient is computed for each member.
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.inject_hyperparams(optax.sgd)(learning_rate=rate))
    trainer.compile(optimizer, "sparse_categorical_crossentropy", list(metrics), **(compile_options or {}))
    return trainer


def fit(trainer: Any, epochs: int = 3, **options: Any) -> Any:
    return trainer.fit(X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0, validation_data=VALID, **options)


def member(tree: Any, number: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[number], tree)


def assert_close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5), found, expected)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(fitflax.Trainer, {}, id="plain"),
        pytest.param(fitflax.Trainer, {"devices": 2}, id="two devices", marks=pytest.mark.slow),
        pytest.param(fitflax.Trainer, {"compile_options": {"accumulate_steps": 2}}, id="accumulated", marks=pytest.mark.slow),
        pytest.param(fitflax.Trainer, {"compile_options": {"steps_per_call": 2}}, id="grouped", marks=pytest.mark.slow),
        pytest.param(fitflax.Trainer, {"compile_options": {"ema_decay": 0.9}}, id="averaged", marks=pytest.mark.slow),
        pytest.param(Weighted, {}, id="own loss", marks=pytest.mark.slow),
        pytest.param(CustomStep, {}, id="own step", marks=pytest.mark.slow),
    ],
)
def test_a_member_trains_as_it_would_alone(kind, options):
    ensemble = make(kind, seed=5, ensemble=MEMBERS, **options)
    history = fit(ensemble).history
    outputs = ensemble.predict(X)
    assert outputs.shape == (40, MEMBERS, 2) and ensemble.step == 9
    single = make(kind, **options)
    for number in range(MEMBERS):
        alone = single.with_seed(5 + number)  # All use one compiled step.
        expected = fit(alone).history
        assert_close(member(ensemble.state.params, number), alone.state.params)
        assert_close(member(ensemble.state.model_state, number), alone.state.model_state)
        assert_close(outputs[:, number], alone.predict(X))
        for key in ("loss", "val_loss", "val_accuracy"):
            assert_close([float(values[number]) for values in history[f"{key}_by_member"]], expected[key])
    for key in ("loss", "val_loss"):
        assert_close(history[key], [float(np.mean(values)) for values in history[f"{key}_by_member"]])


@pytest.mark.slow
def test_members_have_their_own_hyperparameters():
    rates = [0.3, 0.1, 0.03]
    ensemble = make(seed=5, ensemble=MEMBERS).with_hyperparams(learning_rate=rates)
    fit(ensemble)
    assert ensemble.learning_rates == pytest.approx({f"member {number}": rate for number, rate in enumerate(rates)})
    with pytest.raises(OptimizerError, match=r"members of this ensemble have different learning rates. Use trainer.learning_rates"):
        ensemble.learning_rate  # noqa: B018 (reading it is what fails)
    ensemble.learning_rate = 0.25
    assert ensemble.learning_rate == 0.25 and set(ensemble.learning_rates.values()) == {0.25}
    alone = make(rate=rates[2], seed=7)
    fit(alone)
    assert_close(member(ensemble.state.params, 2), alone.state.params)
    with pytest.raises(OptimizerError, match="Received: 2 values, but the ensemble has 3 members"):
        ensemble.with_hyperparams(learning_rate=[0.1, 0.2])
    with pytest.raises(OptimizerError, match="this trainer is not an ensemble"):
        fit(make().with_hyperparams(learning_rate=[0.1, 0.2]))


def test_the_learning_rate_of_a_member_can_be_set():
    ensemble = make(ensemble=MEMBERS)
    ensemble.build((X, Y))
    ensemble.learning_rates = {"member 1": 0.5}
    assert ensemble.learning_rates == pytest.approx({"member 0": 0.3, "member 1": 0.5, "member 2": 0.3})
    ensemble.learning_rates = {label: rate / 2 for label, rate in ensemble.learning_rates.items()}
    assert ensemble.learning_rates == pytest.approx({"member 0": 0.15, "member 1": 0.25, "member 2": 0.15})
    with pytest.raises(OptimizerError, match=r"no learning rate 'member 3' that can be set. Available: .*'member 2'"):
        ensemble.learning_rates = {"member 3": 0.5}


def test_a_loss_scale_is_added_for_each_member():
    optimizer, ensemble = optax.sgd(0.1), fitflax.Trainer(nn.Dense(2), parallel=DataParallel(jax.devices()[:1]), ensemble=MEMBERS)
    for precision in ("float32", "float16"):
        ensemble.compile(optimizer, "sparse_categorical_crossentropy", precision=precision)
        ensemble.train_on_batch((X, Y))
    assert ensemble.step == 2 and ensemble.state.opt_state.scale.shape == (MEMBERS,)


@pytest.mark.slow
def test_a_resumed_run_is_bit_for_bit_identical(tmp_path: pathlib.Path):
    def train(directory: pathlib.Path, epochs: int) -> Any:
        trainer = make(ensemble=MEMBERS, seed=2)
        callbacks = [ModelCheckpoint(directory), BestCheckpoint(directory / "best"), CSVLogger(directory / "log.csv"), TensorBoard(directory), TerminateOnNaN()]
        return trainer, fit(trainer, epochs, callbacks=callbacks, resume="auto").history

    uninterrupted, expected = train(tmp_path / "whole", 4)
    train(tmp_path / "parts", 2)
    resumed, history = train(tmp_path / "parts", 4)
    leaves, again = (jax.tree.leaves((trainer.state.params, trainer.state.opt_state)) for trainer in (uninterrupted, resumed))
    assert all(np.array_equal(one, other) for one, other in zip(leaves, again, strict=True))
    assert jax.tree.map(np.asarray, history).keys() == expected.keys() and np.array_equal(history["val_loss"], expected["val_loss"])
    assert np.array_equal(history["loss_by_member"], expected["loss_by_member"])


@pytest.mark.slow
def test_select_returns_a_trainer_of_one_member():
    ensemble = make(ensemble=MEMBERS, seed=5)
    history = fit(ensemble).history
    for key, choose in (("val_loss", np.argmin), ("val_accuracy", np.argmax)):
        number = int(choose(history[f"{key}_by_member"][-1]))
        best = ensemble.select(key)
        assert_close(best.predict(X), ensemble.predict(X)[:, number])
    alone = make(seed=6)
    fit(alone)
    one = ensemble.select(1)
    fit(one, epochs=1)
    fit(alone, epochs=1)
    assert one.step == alone.step == 12 and ensemble.step == 9
    assert_close(one.state.params, alone.state.params)


def test_a_selected_member_keeps_its_hyperparameters_when_it_is_compiled_again():
    ensemble = make(ensemble=2).with_hyperparams(learning_rate=[0.25, 0.5])
    fit(ensemble, epochs=1)
    one = ensemble.select(1)
    one.compile("sgd", "sparse_categorical_crossentropy", learning_rate=0.1)
    assert one.learning_rate == 0.5
    fit(one, epochs=1)


def test_a_member_selected_from_an_inference_state_cannot_be_trained():
    ensemble = make(ensemble=2)
    fit(ensemble, epochs=1)
    ensemble.replace_state(ensemble.state.for_inference())
    with pytest.raises(OptimizerError, match="the trainer has only an InferenceState"):
        fit(ensemble.select(0))


@pytest.mark.slow
def test_a_member_that_diverges_is_never_selected_and_does_not_affect_others():
    ensemble = make(ensemble=2, seed=5).with_hyperparams(learning_rate=[1e30, 0.1])
    history = fit(ensemble).history
    assert not np.isfinite(history["loss_by_member"][-1][0]) and np.isfinite(history["loss_by_member"][-1][1])
    assert np.isfinite(ensemble.select("loss").evaluate(*VALID, verbose=0)["loss"])


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("select", "message"),
    [
        (3, "from 0 to 2.*Received: 3"),
        (True, "Received: True"),
        ("val_los", r"no values of 'val_los' by member. Did you mean 'val_loss'\?"),
    ],
)
def test_selecting_a_member_that_does_not_exist_is_an_error(select, message):
    ensemble = make(ensemble=MEMBERS)
    fit(ensemble, epochs=1)
    with pytest.raises(ConfigError, match=message):
        ensemble.select(select)


def test_an_ensemble_that_is_not_supported_is_an_error():
    for members in (0, 1.5, True, "3"):
        with pytest.raises(ConfigError, match=r"ensemble=.*must be a positive integer"):
            fitflax.Trainer(Net(), ensemble=members)
    with pytest.raises(ConfigError, match="requires a linen module"):
        fitflax.Trainer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), ensemble=2)
    with pytest.raises(ConfigError, match=r"parallel=DataParallel\(\). Received: Sharded"):
        fitflax.Trainer(Net(), ensemble=2, parallel=Sharded(jax.make_mesh((1,), ("data",))))
    with pytest.raises(ConfigError, match=r"select\(\) requires an ensemble, but this trainer is not one"):
        make().select(0)
    with pytest.raises(MetricError, match="does not support metrics that collect rows"):
        fit(make(ensemble=2, metrics=[AUC()]))
