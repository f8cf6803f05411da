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
    """The little of a trainer that the callback asks for; its rate is float32, as on the device."""

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
    """Returns the callback, and the rate after each of the values, one an epoch."""
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
    # Logged is the rate that the epoch was trained with.
    np.testing.assert_allclose(history.history["learning_rate"], [0.1, *rates[:-1]], rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "kwargs", "rates"),
    [
        # Patience counts observations without improvement; a reduction and an improvement begin the count anew.
        ([3, 2, 2, 2, 2, 2], {}, [1, 1, 1, 0.5, 0.5, 0.25]),
        ([3, 3, 2, 3, 1, 1], {}, [1, 1, 1, 1, 1, 1]),
        ([3, 3, 3, 1, 1, 1], {}, [1, 1, 0.5, 0.5, 0.5, 0.25]),
        ([3, 3, 3, 3], {"patience": 1}, [1, 0.5, 0.25, 0.125]),
        ([3, 3, 3, 3], {"patience": 0}, [1, 0.5, 0.25, 0.125]),
        ([3, 3, 3, 3], {"patience": 3}, [1, 1, 1, 0.5]),
        # In a cooldown nothing is counted, but for its last observation; what improves in it is the best.
        ([3] * 8, {"patience": 1, "cooldown": 1}, [1, 0.5, 0.25, 0.125, 2**-4, 2**-5, 2**-6, 2**-7]),
        ([3] * 8, {"patience": 1, "cooldown": 3}, [1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]),
        ([3] * 8, {"patience": 2, "cooldown": 2}, [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]),
        ([3, 3, 1, 2, 2, 2], {"patience": 1, "cooldown": 3}, [1, 0.5, 0.5, 0.5, 0.25, 0.25]),
        # Improvement is strict, and by more than min_delta.
        ([3, 2.5, 2.5, 2], {"min_delta": 0.5, "patience": 1}, [1, 0.5, 0.25, 0.25]),
        ([1, 2, 2, 3, 3], {"mode": "max"}, [1, 1, 1, 1, 1]),
        ([3, 2, 1], {"mode": "max"}, [1, 1, 0.5]),
        # A NaN never improves and is never the best.
        ([math.nan, math.nan, 3, math.nan, 4], {}, [1, 0.5, 0.5, 0.5, 0.25]),
        # Not below min_lr, and from there no further.
        ([3] * 5, {"patience": 1, "factor": 0.1, "min_lr": 0.05}, [1, float(np.float32(0.1)), *[float(np.float32(0.05))] * 3]),
        ([3] * 3, {"patience": 1, "min_lr": 2.0}, [1, 1, 1]),
    ],
)
def test_the_rate_after_each_observation(values, kwargs, rates):
    assert observed(values, **kwargs)[1] == rates


def test_it_follows_keras_on_random_values():
    """Keras's rules written out once more, over runs long enough to meet every turn of them."""
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


def test_at_the_smallest_rate_nothing_is_set_again():
    """0.05 as float32 lies above 0.05."""
    callback, _ = observed([3] * 3, rate=0.05, patience=1, min_lr=0.05, cooldown=5)
    assert callback.trainer.writes == 1 and callback.wait == 2  # The one is the look at the beginning, whether it can be set.


def test_the_rate_is_read_once_an_epoch():
    callback, _ = observed([3] * 6, patience=1)
    assert callback.trainer.reads == 1 + 6  # The one is the look at the beginning.


def test_what_another_callback_has_logged_as_the_rate_stays():
    callback, _ = observed([])
    logs = {"score": 1.0, "learning_rate": 0.25}
    callback.on_epoch_end(0, logs)
    assert logs["learning_rate"] == 0.25


def test_reducing_compiles_nothing(compilations):
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


def test_each_validation_by_a_trigger_is_an_observation():
    trainer, rates = make(), []
    plateau = ReduceLROnPlateau(patience=1, min_delta=100.0, factor=0.5)
    note = LambdaCallback(on_train_batch_begin=lambda batch, logs: rates.append(trainer.learning_rate))
    history = fit(note, plateau, trainer=trainer, steps=9, validation_data=(X, Y), validation_freq=fitflax.every(steps=2))
    # Validations after steps 2 (the best), 4, 6 and 8.
    np.testing.assert_allclose(rates, np.array([4, 4, 4, 4, 2, 2, 1, 1, 0.5]) * 0.0025, rtol=1e-6)
    np.testing.assert_allclose(history.history["learning_rate"], [0.005, 0.00125], rtol=1e-6)


def test_a_value_of_a_validation_that_does_not_exist_is_an_error_before_the_first_step():
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
        ({"factor": 1.0}, r"ReduceLROnPlateau\(factor=...\) must lie between 0 and 1. Received: 1.0"),
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
def test_arguments_out_of_their_range_are_errors(kwargs, message):
    with pytest.raises(CallbackError, match=message):
        ReduceLROnPlateau(**kwargs)


# --- Its state, and resuming ---


def test_it_serves_twice():
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
def test_its_state_goes_into_another_instance(cut):
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
    """Trains with everything made from scratch; returns the trainer and the callback."""
    trainer = trainer or make("adam")
    saving = ModelCheckpoint(root / "checkpoints", keep=None)
    plateau = ReduceLROnPlateau(patience=1, min_delta=100.0, cooldown=2, factor=0.5)
    fit(saving, plateau, *more, trainer=trainer, **{"resume": "auto", "validation_data": (X, Y), **kwargs})
    return trainer, plateau


def assert_equal(root, one, other_root, other):
    wanted, found = directory_of(other_root / "checkpoints"), directory_of(root / "checkpoints")
    # A run that was stopped inside an epoch has a checkpoint there, too.
    unequal = differences(state_of(one[0]), state_of(other[0])) + differences({name: found.get(name, {}) for name in wanted}, wanted)
    unequal = [line for line in unequal if ": closing: " not in line]
    assert not unequal, "\n".join(unequal)
    assert rows_of(one[0].history) == rows_of(other[0].history)
    assert one[1].state_dict() == other[1].state_dict()


@pytest.fixture(scope="module")
def never(tmp_path_factory):
    root = tmp_path_factory.mktemp("never")
    return root, run(root, epochs=4)


@pytest.mark.parametrize("k", [8, 10, 17])
@pytest.mark.slow
def test_a_run_that_was_stopped_and_goes_on_equals_the_run_never_stopped(k, never, tmp_path):
    """The rate goes down after the second and the fourth epoch; the rows of steps 8 and 17 would take it down in their middle."""
    never_root, expected = never
    np.testing.assert_allclose(expected[0].history.history["learning_rate"], [0.001] * 2 + [0.0005] * 2, rtol=1e-6)
    np.testing.assert_allclose(expected[0].learning_rate, 0.00025, rtol=1e-6)
    trainer = make("adam")
    run(tmp_path, at(trainer, "on_train_batch_end", k, lambda step: trainer.stop("enough")), trainer=trainer, epochs=4)
    assert trainer.step == k
    np.testing.assert_allclose(trainer.learning_rate, 0.00025 if k == 17 else 0.0005, rtol=1e-6)
    assert_equal(tmp_path, run(tmp_path, epochs=4), never_root, expected)


@pytest.mark.slow
def test_a_run_that_validates_by_a_trigger_goes_on_as_if_never_stopped(tmp_path):
    options = {"validation_freq": fitflax.every(steps=2)}
    never = run(tmp_path / "never", steps=9, **options)
    np.testing.assert_allclose(never[0].learning_rate, 0.00025, rtol=1e-6)
    run(tmp_path / "stopped", steps=7, **options)
    assert_equal(tmp_path / "stopped", run(tmp_path / "stopped", steps=9, **options), tmp_path / "never", never)


@pytest.mark.parametrize("steps", [8, 10])
def test_the_same_script_started_again_ends_with_the_same_rate(steps, tmp_path):
    """What it made of an epoch that ended in its middle is in no checkpoint, and is done again."""
    first = run(tmp_path, steps=steps)
    np.testing.assert_allclose(first[0].learning_rate, 0.0005, rtol=1e-6)
    assert_equal(tmp_path, run(tmp_path, steps=steps), tmp_path, first)


def test_a_rate_that_cannot_be_set_names_the_callback():
    trainer = fitflax.Trainer(nn.Dense(3))
    trainer.compile(optax.adam(0.1), "mse")
    with pytest.raises(OptimizerError, match=r"ReduceLROnPlateau sets the learning rate. .*cannot be read"):
        trainer.fit(X, Y, callbacks=[ReduceLROnPlateau("loss")], verbose=0)
    assert trainer.step == 0
