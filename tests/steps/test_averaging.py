"""`compile(ema_decay=...)`: averaged parameters, which evaluation uses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import BestCheckpoint, LambdaCallback, ModelCheckpoint
from fitflax.checkpoints import CheckpointStore
from fitflax.errors import ConfigError, RestoreError
from fitflax.parallel import DataParallel
from fitflax.state import start_average
from fitflax.steps.optimizer import Numerics
from tests.run_script import differences, rows_of, state_of

Devices = Callable[[int], list[jax.Device]]
RNG = np.random.default_rng(23)
X = RNG.normal(size=(13, 4)).astype(np.float32)
Y = RNG.normal(size=(13, 2)).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.Dense(3, name="body")(x))
        return nn.Dense(2, name="head")(x)


def trainer_of(devices: list[jax.Device], decay: float | None = 0.9, *, model: nn.Module | None = None, optimizer: Any = None, **options: Any) -> Any:
    kind = options.pop("kind", fitflax.Trainer)
    trainer = kind(nn.Dense(2) if model is None else model, parallel=DataParallel(devices))
    trainer.compile(optimizer or optax.sgd(0.3), "mse", ema_decay=decay, **options)
    return trainer


def host(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)


def assert_same(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, host(actual), host(expected))


def trained(devices: list[jax.Device], decay: float | None = 0.9, steps: int = 3, **options: Any) -> Any:
    trainer = trainer_of(devices, decay, **options)
    trainer.fit(X, Y, batch_size=4, steps=steps, verbose=0)
    return trainer


# -- the average --


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.mostly_slow
def test_the_average_equals_the_one_that_numpy_computes(num_devices: int, devices: Devices):
    trainer = trainer_of(devices(num_devices), 0.75)
    trainer.build((X, Y))
    expected = host(trainer.state.params)
    assert_same(trainer.state.ema_params, expected)

    def follow(checkpoint: Any) -> None:
        nonlocal expected
        expected = jax.tree.map(lambda mean, value: np.float32(0.75) * mean + np.float32(0.25) * np.asarray(value), expected, checkpoint.state.params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), host(checkpoint.state.ema_params), expected)

    trainer.fit(X, Y, batch_size=4, steps=6, callbacks=[LambdaCallback(follow, every=fitflax.every(steps=1))], verbose=0)
    assert trainer.step == 6 and not np.allclose(expected["kernel"], trainer.state.params["kernel"])


@pytest.mark.slow
def test_an_average_does_not_change_how_the_parameters_are_trained(devices: Devices):
    with_average, without = (trained(devices(2), decay, model=Net()) for decay in (0.9, None))
    assert without.state.ema_params is None
    for name in ("params", "model_state", "opt_state"):
        assert_same(getattr(with_average.state, name), getattr(without.state, name))


def test_averages_of_half_precision_are_float32_and_those_of_integers_the_newest_value():
    params = {"w": jnp.ones(2, jnp.bfloat16), "n": jnp.arange(2)}
    averages = start_average(params)
    assert {name: str(leaf.dtype) for name, leaf in averages.items()} == {"w": "float32", "n": "int32"}
    averages = Numerics(ema_decay=0.999).average(averages, {"w": jnp.zeros(2, jnp.bfloat16), "n": jnp.arange(2) + 5})
    np.testing.assert_allclose(averages["w"], 0.999, rtol=1e-6)
    assert averages["n"].tolist() == [5, 6]


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.mostly_slow
def test_parameters_in_half_precision_are_trained_and_averaged(num_devices: int, devices: Devices):
    trainer = trained(devices(num_devices), 0.5, model=nn.Dense(2, param_dtype=jnp.bfloat16))
    assert trainer.state.ema_params["kernel"].dtype == jnp.float32 and trainer.state.params["kernel"].dtype == jnp.bfloat16
    assert np.isfinite(trainer.evaluate(X, Y, verbose=0)["loss"])


@pytest.mark.mostly_slow
@pytest.mark.parametrize("inherits", [True, False])
def test_a_custom_update_is_averaged_once(inherits: bool, devices: Devices):
    class Custom(fitflax.Trainer):
        def train_step(self, state: Any, batch: Any) -> Any:
            if inherits:
                return super().train_step(state, batch)
            params = jax.tree.map(lambda leaf: leaf - 1, state.params)
            return fitflax.TrainState(state.step, params, state.model_state, state.opt_state, state.key), {"loss": (jnp.float32(0), jnp.float32(1))}

    trainer = trainer_of(devices(2), 0.75, kind=Custom)
    trainer.build((X, Y))
    before = host(trainer.state.params)
    trainer.train_on_batch((X, Y))
    after = host(trainer.state.params)
    jax.tree.map(lambda mean, a, b: np.testing.assert_allclose(mean, 0.75 * a + 0.25 * b, rtol=1e-6), host(trainer.state.ema_params), before, after)
    assert not np.array_equal(before["kernel"], after["kernel"])


# -- what is evaluated --


@pytest.mark.slow
def test_evaluation_validation_and_prediction_use_the_average(devices: Devices):
    trainer = trainer_of(devices(2), 0.9)
    history = trainer.fit(X, Y, batch_size=4, epochs=2, validation_data=(X, Y), verbose=0).history
    params, averages = host(trainer.state.params), host(trainer.state.ema_params)
    outputs = X @ averages["kernel"] + averages["bias"]
    assert not np.allclose(outputs, X @ params["kernel"] + params["bias"], rtol=1e-2)
    loss = pytest.approx(((outputs - Y) ** 2).mean(), rel=1e-5)
    assert history["val_loss"][-1] == loss
    assert trainer.evaluate(X, Y, verbose=0)["loss"] == loss
    assert trainer.test_on_batch((X, Y))["loss"] == loss
    np.testing.assert_allclose(trainer.predict(X), outputs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trainer.predict_on_batch(X), outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_best_averages_are_restored_at_the_end(tmp_path: Any, devices: Devices):
    trainer = trainer_of(devices(2), 0.5, model=Net(), optimizer="sgd", learning_rate=0.3)
    best: list[Any] = []

    def spoil(checkpoint: Any) -> None:
        best.append(host((checkpoint.state.params, checkpoint.state.model_state, checkpoint.state.ema_params)))
        trainer.learning_rate = 30.0

    callbacks = [BestCheckpoint(tmp_path, restore_best=True), LambdaCallback(spoil, every=fitflax.every(epochs=1))]
    history = trainer.fit(X, Y, batch_size=4, epochs=3, validation_data=(X, Y), callbacks=callbacks, verbose=0).history
    assert callbacks[0].best_step == 4
    assert_same((trainer.state.params, trainer.state.model_state, trainer.state.ema_params), best[0])
    assert trainer.evaluate(X, Y, verbose=0)["loss"] == pytest.approx(history["val_loss"][0], rel=1e-6)


# -- compiling again --


@pytest.mark.slow
def test_compiling_again_starts_keeps_or_drops_the_average(devices: Devices):
    trainer = trained(devices(2))
    optimizer = optax.sgd(0.3)
    averages = host(trainer.state.ema_params)
    trainer.compile(optimizer, "mse", ema_decay=0.5)
    assert_same(trainer.state.ema_params, averages)
    for again in (optimizer, optax.sgd(0.3)):
        trainer.compile(again, "mse")
        assert trainer.state.ema_params is None
        trainer.compile(again, "mse", ema_decay=0.5)
        assert_same(trainer.state.ema_params, trainer.state.params)
    held = trainer.state
    kept = host((held.params, held.ema_params))
    trainer.fit(X, Y, steps=2, verbose=0)
    assert_same((held.params, held.ema_params), kept)


@pytest.mark.parametrize("decay", [0, 1, 1.0, -0.5, 2, "0.9", True, float("nan")])
def test_the_decay_must_be_between_0_and_1(decay: Any, devices: Devices):
    with pytest.raises(ConfigError, match=r"compile\(ema_decay=...\) must be a number between 0 and 1, such as 0.999, or None. Received: "):
        trainer_of(devices(1), decay)


# -- saving and restoring --


@pytest.fixture
def saved(tmp_path: Any, devices: Devices) -> dict[str, Any]:
    """Checkpoints and states of a trainer with averages and of one without."""
    trainers = {"with": trained(devices(1), model=Net()), "without": trained(devices(1), None, model=Net())}
    return {name: (trainer.save(tmp_path / name), trainer.state) for name, trainer in trainers.items()}


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.slow
def test_parameters_and_averages_are_both_saved_and_restored(num_devices: int, saved: Any, devices: Devices):
    path, state = saved["with"]
    built, fresh, bare = trainer_of(devices(num_devices), model=Net()), trainer_of(devices(num_devices), model=Net()), fitflax.Trainer(Net())
    built.build((X, Y))
    for trainer in (built, fresh, bare):
        trainer.restore(path)
        assert_same((trainer.state.params, trainer.state.ema_params), (state.params, state.ema_params))
    expected = built.predict(X)
    np.testing.assert_array_equal(fresh.predict(X), expected)
    np.testing.assert_allclose(bare.predict(X), expected, rtol=1e-5, atol=1e-6)
    for trainer in (built, fresh):
        trainer.fit(X, Y, steps=1, verbose=0)


@pytest.mark.slow
def test_averages_start_at_the_parameters_of_a_checkpoint_without_averages(saved: Any, devices: Devices):
    path, state = saved["without"]
    for weights_only in (False, True):
        trainer = trainer_of(devices(2), model=Net())
        trainer.restore(path, weights_only=weights_only)
        assert_same(trainer.state.ema_params, state.params)
        trainer.fit(X, Y, steps=1, verbose=0)
        assert trainer.step == (1 if weights_only else 4)


@pytest.mark.slow
def test_averages_are_ignored_if_the_trainer_has_none(saved: Any, devices: Devices):
    path, state = saved["with"]
    for weights_only in (False, True):
        for is_built in (False, True):
            trainer = trainer_of(devices(2), None, model=Net())
            if is_built:
                trainer.build((X, Y))
            trainer.restore(path, weights_only=weights_only)
            assert trainer.state.ema_params is None
            assert_same(trainer.state.params, state.params)
            trainer.fit(X, Y, steps=1, verbose=0)
    trainer = fitflax.Trainer(Net(), parallel=DataParallel(devices(1)))
    trainer.restore(path)
    trainer.compile(optax.sgd(0.3), "mse")
    assert trainer.state.ema_params is None


@pytest.mark.slow
def test_weights_only_restores_the_averages_too(saved: Any, devices: Devices):
    path, state = saved["with"]
    for is_built in (False, True):
        trainer = trainer_of(devices(2), model=Net())
        if is_built:
            trainer.build((X, Y))
        trainer.restore(path, weights_only=True)
        assert trainer.step == 0
        assert_same((trainer.state.params, trainer.state.ema_params), (state.params, state.ema_params))
        trainer.fit(X, Y, steps=1, verbose=0)


@pytest.mark.slow
def test_a_partial_restore_starts_the_averages_at_the_resulting_parameters(saved: Any, devices: Devices):
    path, state = saved["with"]
    trainer = trainer_of(devices(2), model=Net())
    trainer.build((X, Y))
    trainer.fit(X, Y, steps=2, verbose=0)
    trainer.restore(path, partial=True, mapping={"params/head": None})
    assert_same(trainer.state.params["body"], state.params["body"])
    assert_same(trainer.state.ema_params, trainer.state.params)
    trainer.restore(path, partial=True, mapping={"params": "ema_params"})
    assert_same((trainer.state.params, trainer.state.ema_params), (state.ema_params, state.ema_params))


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"accumulate_steps": 2}, marks=pytest.mark.slow), pytest.param({"accumulate_steps": 2, "precision": "float16"}, marks=pytest.mark.slow)],
    ids=["average", "accumulated", "all"],
)
@pytest.mark.slow
def test_a_resumed_run_is_bit_for_bit_identical_to_an_uninterrupted_run(options: Any, tmp_path: Any, devices: Devices):
    def run(directory: str, stops: list[int], decay: float | None = 0.9) -> Any:
        for steps in stops:
            trainer = trainer_of(devices(2), decay, model=Net(), optimizer="adam", **options)
            callbacks = [
                ModelCheckpoint(tmp_path / directory, every=fitflax.every(steps=5)),
                BestCheckpoint(tmp_path / f"{directory}-best", monitor="val_loss"),
            ]
            trainer.fit(X, Y, batch_size=4, steps=steps, validation_data=(X, Y), callbacks=callbacks, resume="auto", verbose=0)
        return trainer

    whole, resumed = run("whole", [10]), run("parts", [5, 10])
    assert resumed.step == 10 and not differences(state_of(resumed), state_of(whole))
    assert rows_of(resumed.history) == rows_of(whole.history)
    assert "ema_params" in CheckpointStore(tmp_path / "parts").restore(10).train
    with pytest.raises(RestoreError, match=r"ema_decay was 0\.9 and is now 0\.5"):
        run("parts", [12], 0.5)
    with pytest.raises(RestoreError, match=r"ema_decay was 0\.9 and is now None"):
        run("parts", [12], None)
