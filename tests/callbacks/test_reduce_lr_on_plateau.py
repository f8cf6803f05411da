import math

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import fitflax
from fitflax.callbacks import LambdaCallback, ModelCheckpoint, ReduceLROnPlateau
from fitflax.errors import CallbackError, MonitorError, OptimizerError
from fitflax.parallel import DataParallel
from tests.run_script import at, differences, directory_of, rows_of, state_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(18, 4)).astype(np.float32)  # In batches of 4: five steps an epoch.
Y = RNG.normal(size=(18, 3)).astype(np.float32)


class View:
    """The part of a trainer that the callback uses; its rate is float32, as on the device."""

    def __init__(self, rate):
        self.reads = self.writes = 0
        self._rate = np.float32(rate)

    @property
    def learning_rate(self):
        self.reads += 1
        return float(self._rate)

    @learning_rate.setter
    def learning_rate(self, value):
        self.writes += 1
        self._rate = np.float32(value)


def observed(values, rate=1.0, **kwargs):
    """Feeds one value per epoch to the callback; returns it and the rate after each value."""
    callback = ReduceLROnPlateau("score", **{"mode": "min", "factor": 0.5, "patience": 2, "min_delta": 0.0, **kwargs})
    callback.trainer = View(rate)
    callback.on_train_begin({})
    rates = []
    for epoch, value in enumerate(values):
        callback.on_epoch_end(epoch, {"score": value})
        rates.append(float(callback.trainer._rate))
    return callback, rates


def make(optimizer="sgd", metrics=None, **kwargs):
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optimizer, loss="mse", metrics=metrics, **kwargs)
    return trainer


def fit(*callbacks, trainer=None, **kwargs):
    return (trainer or make()).fit(X, Y, **{"batch_size": 4, "callbacks": callbacks, "verbose": 0, **kwargs})


# --- When it reduces ---


@pytest.mark.parametrize(("cooldown", "epochs", "rates"), [(0, 2, [0.1, 0.01]), (2, 4, [0.1, 0.01, 0.01, 0.001])])
def test_case_15_a_loss_that_does_not_improve_by_a_hundred_reduces_the_rate(cooldown, epochs, rates):
    trainer, seen = make(learning_rate=0.1), []
    note = LambdaCallback(on_checkpoint=lambda checkpoint: seen.append(trainer.learning_rate))
    plateau = ReduceLROnPlateau(min_delta=100, patience=1, cooldown=cooldown)
    history = fit(note, plateau, trainer=trainer, epochs=epochs, validation_data=(X, Y))
    np.testing.assert_allclose(seen, rates, rtol=1e-6)
    np.testing.assert_allclose(trainer.learning_rate, rates[-1], rtol=1e-6)
    # The logged rate is the one that the epoch was trained with.
    np.testing.assert_allclose(history.history["learning_rate"], [0.1, *rates[:-1]], rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "kwargs", "rates"),
    [
        # Patience counts observations without improvement; a reduction or an improvement restarts the count.
        ([3, 2, 2, 2, 2, 2], {}, [1, 1, 1, 0.5, 0.5, 0.25]),
        ([3, 3, 2, 3, 1, 1], {}, [1, 1, 1, 1, 1, 1]),
        ([3, 3, 3, 1, 1, 1], {}, [1, 1, 0.5, 0.5, 0.5, 0.25]),
        ([3, 3, 3, 3], {"patience": 1}, [1, 0.5, 0.25, 0.125]),
        ([3, 3, 3, 3], {"patience": 0}, [1, 0.5, 0.25, 0.125]),
        ([3, 3, 3, 3], {"patience": 3}, [1, 1, 1, 0.5]),
        # During a cooldown, only its last observation is counted, but any improvement becomes the best value.
        ([3] * 8, {"patience": 1, "cooldown": 1}, [1, 0.5, 0.25, 0.125, 2**-4, 2**-5, 2**-6, 2**-7]),
        ([3] * 8, {"patience": 1, "cooldown": 3}, [1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]),
        ([3] * 8, {"patience": 2, "cooldown": 2}, [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]),
        ([3, 3, 1, 2, 2, 2], {"patience": 1, "cooldown": 3}, [1, 0.5, 0.5, 0.5, 0.25, 0.25]),
        # An improvement must be greater than min_delta.
        ([3, 2.5, 2.5, 2], {"min_delta": 0.5, "patience": 1}, [1, 0.5, 0.25, 0.25]),
        ([1, 2, 2, 3, 3], {"mode": "max"}, [1, 1, 1, 1, 1]),
        ([3, 2, 1], {"mode": "max"}, [1, 1, 0.5]),
        # NaN is never an improvement and never the best value.
        ([math.nan, math.nan, 3, math.nan, 4], {}, [1, 0.5, 0.5, 0.5, 0.25]),
        # The rate does not fall below min_lr. It does not change if it already is lower.
        ([3] * 5, {"patience": 1, "factor": 0.1, "min_lr": 0.05}, [1, float(np.float32(0.1)), *[float(np.float32(0.05))] * 3]),
        ([3] * 3, {"patience": 1, "min_lr": 2.0}, [1, 1, 1]),
    ],
)
def test_the_rate_follows_the_observed_values(values, kwargs, rates):
    assert observed(values, **kwargs)[1] == rates


def test_it_follows_keras_on_random_values():
    """Compares with Keras's rules, written out again here, on runs that are long enough to reach every branch."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        values = rng.integers(0, 6, 30).astype(float).tolist()
        patience, cooldown = int(rng.integers(0, 4)), int(rng.integers(0, 5))
        rate, best, wait, left, expected = 1.0, math.inf, 0, 0, []
        for value in values:
            if left > 0:
                left, wait = left - 1, 0
            if value < best - 0.5:
                best, wait = value, 0
            elif left == 0:
                wait += 1
                if wait >= patience and rate > 0.01:
                    rate, wait, left = max(rate * 0.5, 0.01), 0, cooldown
            expected.append(float(np.float32(rate)))
        assert observed(values, patience=patience, cooldown=cooldown, min_delta=0.5, min_lr=0.01)[1] == expected


def test_at_min_lr_the_rate_is_not_set_again():
    """0.05 as float32 is greater than 0.05."""
    callback, _ = observed([3] * 3, rate=0.05, patience=1, min_lr=0.05, cooldown=5)
    assert callback.trainer.writes == 1 and callback.wait == 2  # The one write checks at the start that the rate can be set.


def test_the_rate_is_read_once_per_epoch():
    callback, _ = observed([3] * 6, patience=1)
    assert callback.trainer.reads == 1 + 6  # The one additional read is the check at the start.


def test_a_rate_logged_by_another_callback_is_kept():
    callback, _ = observed([])
    logs = {"score": 1.0, "learning_rate": 0.25}
    callback.on_epoch_end(0, logs)
    assert logs["learning_rate"] == 0.25


def test_reducing_the_rate_compiles_nothing(compilations):
    trainer = make()
    fit(trainer=trainer)
    with compilations.counted() as counted:
        fit(ReduceLROnPlateau("loss", min_delta=100.0, patience=1), trainer=trainer, epochs=3)
    assert counted.names == [] and trainer.learning_rate < 0.001


# --- What it monitors ---


@pytest.mark.slow
def test_without_a_mode_the_direction_is_what_the_metric_declares():
    given = [ReduceLROnPlateau(monitor) for monitor in ("val_loss", "r2")]
    fit(*given, trainer=make(metrics=["r2"]), validation_data=(X, Y))
    assert [plateau.state_dict()["direction"] for plateau in given] == ["min", "max"]
    assert all(plateau.best is not None for plateau in given)


def test_epochs_without_validation_are_not_observed_but_log_the_rate():
    plateau = ReduceLROnPlateau(patience=1, min_delta=100.0)
    history = fit(plateau, epochs=5, validation_data=(X, Y), validation_freq=2)
    np.testing.assert_allclose(history.history["learning_rate"], [0.01, 0.01, 0.01, 0.01, 0.001], rtol=1e-6)


def test_each_triggered_validation_is_an_observation():
    trainer, rates = make(), []
    plateau = ReduceLROnPlateau(patience=1, min_delta=100.0, factor=0.5)
    note = LambdaCallback(on_train_batch_begin=lambda batch, logs: rates.append(trainer.learning_rate))
    history = fit(note, plateau, trainer=trainer, steps=9, validation_data=(X, Y), validation_freq=fitflax.every(steps=2))
    # Validations after steps 2 (the best), 4, 6 and 8.
    np.testing.assert_allclose(rates, np.array([4, 4, 4, 4, 2, 2, 1, 1, 0.5]) * 0.0025, rtol=1e-6)
    np.testing.assert_allclose(history.history["learning_rate"], [0.005, 0.00125], rtol=1e-6)


def test_monitoring_a_missing_validation_set_is_an_error_before_the_first_step():
    trainer = make()
    with pytest.raises(MonitorError, match="ReduceLROnPlateau monitors 'val_loss', but there is no validation data"):
        fit(ReduceLROnPlateau(), trainer=trainer)
    with pytest.raises(MonitorError, match=r"ReduceLROnPlateau monitors 'lss'.*Did you mean 'loss'\?"):
        fit(ReduceLROnPlateau("lss"))
    assert trainer.step == 0


@pytest.mark.parametrize("options", [{"optimizer": optax.sgd(0.1)}, {"learning_rate": optax.constant_schedule(0.1)}])
def test_a_rate_that_cannot_be_set_is_an_error_before_the_first_step(options):
    trainer = make(**options)
    with pytest.raises(OptimizerError, match=r"optax\.inject_hyperparams"):
        fit(ReduceLROnPlateau("loss"), trainer=trainer)
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"factor": 1.0}, r"ReduceLROnPlateau\(factor=...\) must be between 0 and 1. Received: 1.0"),
        ({"factor": 0.0}, "Received: 0.0"),
        ({"factor": math.nan}, "Received: nan"),
        ({"patience": -1}, r"patience=...\) must be an integer of at least 0. Received: -1"),
        ({"patience": 1.5}, "Received: 1.5"),
        ({"cooldown": -2}, r"cooldown=...\) must be an integer of at least 0. Received: -2"),
        ({"cooldown": True}, "Received: True"),
        ({"min_lr": -0.1}, r"min_lr=...\) must be a finite number of at least 0. Received: -0.1"),
        ({"min_lr": math.inf}, "Received: inf"),
        ({"min_delta": -0.1}, r"ReduceLROnPlateau\(min_delta=...\) must be at least 0"),
        ({"mode": "auto"}, r"ReduceLROnPlateau\(mode=...\) must be 'min', 'max' or None"),
    ],
)
def test_arguments_out_of_range_are_errors(kwargs, message):
    with pytest.raises(CallbackError, match=message):
        ReduceLROnPlateau(**kwargs)


# --- Its state, and resuming ---


def test_an_instance_can_be_used_twice():
    callback, first = observed([3] * 4, cooldown=3)
    callback.trainer = View(1.0)
    callback.on_train_begin({})
    assert (callback.best, callback.wait) == (None, 0)
    second = []
    for epoch in range(4):
        callback.on_epoch_end(epoch, {"score": 9})
        second.append(callback.trainer.learning_rate)
    assert second == first == [1, 1, 0.5, 0.5]


@pytest.mark.parametrize("cut", range(1, 8))
def test_its_state_can_be_loaded_into_another_instance(cut):
    values, kwargs = [3, 3, 3, 4, 2, 2, 2, 2, 2], {"cooldown": 2}
    _, rates = observed(values, **kwargs)
    first, _ = observed(values[:cut], **kwargs)
    second, _ = observed([], rate=first.trainer.learning_rate, **kwargs)
    second.load_state_dict(first.state_dict())
    rest = []
    for epoch, value in enumerate(values[cut:], start=cut):
        second.on_epoch_end(epoch, {"score": value})
        rest.append(second.trainer.learning_rate)
    assert rest == rates[cut:]


def run(root, *more, trainer=None, **kwargs):
    """Trains with new objects, as a new process would; returns the trainer and the callback."""
    trainer = trainer or make("adam")
    saving = ModelCheckpoint(root / "checkpoints", keep=None)
    plateau = ReduceLROnPlateau(patience=1, min_delta=100.0, cooldown=2, factor=0.5)
    fit(saving, plateau, *more, trainer=trainer, **{"resume": "auto", "validation_data": (X, Y), **kwargs})
    return trainer, plateau


def assert_equal(root, one, other_root, other):
    wanted, found = directory_of(other_root / "checkpoints"), directory_of(root / "checkpoints")
    # A run that was stopped inside an epoch also has a checkpoint there.
    unequal = differences(state_of(one[0]), state_of(other[0])) + differences({name: found.get(name, {}) for name in wanted}, wanted)
    unequal = [line for line in unequal if ": closing: " not in line]
    assert not unequal, "\n".join(unequal)
    assert rows_of(one[0].history) == rows_of(other[0].history)
    assert one[1].state_dict() == other[1].state_dict()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    root = tmp_path_factory.mktemp("never")
    return root, run(root, epochs=4)


@pytest.mark.parametrize("k", [8, 10, 17])
@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_run(k, uninterrupted, tmp_path):
    """The rate is reduced after the second and fourth epochs. The closing rows of steps 8 and 17 reduce it in the middle of an epoch."""
    uninterrupted_root, expected = uninterrupted
    np.testing.assert_allclose(expected[0].history.history["learning_rate"], [0.001] * 2 + [0.0005] * 2, rtol=1e-6)
    np.testing.assert_allclose(expected[0].learning_rate, 0.00025, rtol=1e-6)
    trainer = make("adam")
    run(tmp_path, at(trainer, "on_train_batch_end", k, lambda step: trainer.stop("enough")), trainer=trainer, epochs=4)
    assert trainer.step == k
    np.testing.assert_allclose(trainer.learning_rate, 0.00025 if k == 17 else 0.0005, rtol=1e-6)
    assert_equal(tmp_path, run(tmp_path, epochs=4), uninterrupted_root, expected)


@pytest.mark.slow
def test_a_resumed_run_with_triggered_validation_equals_an_uninterrupted_run(tmp_path):
    options = {"validation_freq": fitflax.every(steps=2)}
    uninterrupted = run(tmp_path / "never", steps=9, **options)
    np.testing.assert_allclose(uninterrupted[0].learning_rate, 0.00025, rtol=1e-6)
    run(tmp_path / "stopped", steps=7, **options)
    assert_equal(tmp_path / "stopped", run(tmp_path / "stopped", steps=9, **options), tmp_path / "never", uninterrupted)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("steps", [8, 10])
def test_running_the_same_script_again_ends_with_the_same_rate(steps, tmp_path):
    """A reduction by an epoch that ended in the middle is not in a checkpoint. The second run repeats it."""
    first = run(tmp_path, steps=steps)
    np.testing.assert_allclose(first[0].learning_rate, 0.0005, rtol=1e-6)
    assert_equal(tmp_path, run(tmp_path, steps=steps), tmp_path, first)


def test_the_error_for_a_rate_that_cannot_be_set_names_the_callback():
    trainer = fitflax.Trainer(nn.Dense(3))
    trainer.compile(optax.adam(0.1), "mse")
    with pytest.raises(OptimizerError, match=r"ReduceLROnPlateau needs to set the learning rate. .*cannot be read"):
        trainer.fit(X, Y, callbacks=[ReduceLROnPlateau("loss")], verbose=0)
    assert trainer.step == 0
