import contextlib
import math
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import fitflax
from fitflax.callbacks import BestCheckpoint, EarlyStopping, LambdaCallback, ModelCheckpoint, ReduceLROnPlateau
from fitflax.checkpoints.resume import load_checkpoint
from fitflax.errors import CallbackError, FitflaxWarning, MonitorError
from fitflax.loops import setup
from fitflax.metrics import Mean
from fitflax.parallel import DataParallel

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype(np.float32)
Y = RNG.normal(size=(8, 3)).astype(np.float32)
LOSSES = [10, 9, 8, 9, 8.9, 8.8, 8.7, 8.6, 8.5]


class View:
    """The part of a trainer that the callback uses."""

    reason = None

    def stop(self, reason):
        self.reason = reason


def observed(values, **kwargs):
    """Feeds one value per epoch to the callback; returns it and the epoch in which it asked to stop."""
    callback = EarlyStopping("score", **{"mode": "min", **kwargs})
    callback.trainer = View()
    callback.on_train_begin({})
    for epoch, value in enumerate(values):
        callback.on_epoch_end(epoch, {"score": value})
        if callback.trainer.reason is not None:
            assert callback.stopped_epoch == epoch
            return callback, epoch
    assert callback.stopped_epoch is None
    return callback, None


def make(metrics=None, rate=0.1):
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(rate), loss="mse", metrics=metrics)
    return trainer


def adding(values, key="score"):
    values = iter(values)
    return LambdaCallback(on_epoch_end=lambda epoch, logs: logs.__setitem__(key, next(values)))


# --- When it stops ---


@pytest.mark.parametrize(("patience", "stopped"), [(0, 3), (1, 3), (2, 4), (3, 5), (7, None)])
def test_case_13_patience_counts_epochs_without_improvement(patience, stopped):
    callback, epoch = observed(LOSSES, patience=patience)
    assert (epoch, callback.best, callback.best_epoch) == (stopped, 8, 2)


@pytest.mark.parametrize(("patience", "stopped"), [(0, 3), (1, 3), (2, 4), (3, 5)])
def test_case_13_holds_for_a_measured_loss(patience, stopped):
    losses = iter(LOSSES)

    def batches():
        # The module multiplies by one, so the loss is the square of its input.
        yield np.full((2, 1), math.sqrt(next(losses)), np.float32), np.zeros((2, 1), np.float32)

    trainer = fitflax.Trainer(nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(0.0), loss="mse")
    callback = EarlyStopping("loss", patience=patience)
    history = trainer.fit(batches, epochs=9, callbacks=[callback], verbose=0)
    assert (history.epoch[-1], callback.stopped_epoch) == (stopped, stopped)
    np.testing.assert_allclose(history.history["loss"], LOSSES[: stopped + 1], rtol=1e-6)
    assert trainer.stop_reason.startswith("EarlyStopping: loss has not improved for ")


def test_improvement_is_strict():
    assert observed([1.0, 1.0])[1] == 1
    assert observed([0.5, 0.5], mode="max")[1] == 1


def test_mode_max_mirrors_mode_min():
    assert observed([-value for value in LOSSES], mode="max", patience=2)[1] == 4


@pytest.mark.parametrize(("values", "stopped"), [([1.0, 0.9, 0.79], 1), ([1.0, 0.8, 0.5, 0.3], None), ([1.0, 0.85, 0.8, 0.75], 1)])
def test_an_improvement_must_exceed_min_delta(values, stopped):
    assert observed(values, min_delta=0.15, patience=1)[1] == stopped


def test_a_change_of_exactly_min_delta_is_not_an_improvement():
    assert observed([1.0, 0.5], min_delta=0.5)[1] == 1


@pytest.mark.parametrize(
    ("values", "patience", "stopped"),
    [
        # As in Keras: until a value beats the baseline, every epoch counts toward the patience, but only an epoch without an improvement stops the run.
        ([0.9, 0.8, 0.7], 0, None),
        ([0.9, 0.8, 0.7, 0.75], 2, 3),
        ([0.9, 0.4, 0.45, 0.46], 2, 3),
        ([0.4, 0.3, 0.2], 0, None),
    ],
)
def test_only_values_better_than_the_baseline_reset_the_patience(values, patience, stopped):
    assert observed(values, baseline=0.5, patience=patience)[1] == stopped


@pytest.mark.parametrize(("start", "stopped"), [(0, 1), (2, 3), (3, 4), (9, None)])
def test_epochs_before_start_from_epoch_are_not_observed(start, stopped):
    assert observed([1.0, 2.0, 3.0, 4.0, 5.0], start_from_epoch=start)[1] == stopped


def test_start_from_epoch_ignores_better_values_before_it():
    callback, epoch = observed([0.1, 5.0, 4.0, 3.0], start_from_epoch=1)
    assert (epoch, callback.best) == (None, 3.0)


@pytest.mark.parametrize(
    ("values", "kwargs", "stopped"),
    [
        ([3.0, 2.0, 1.0, 0.5], {"stopping_threshold": 1.5}, 2),
        ([3.0, 2.0, 1.5], {"stopping_threshold": 1.5}, None),
        ([0.1, 0.5, 0.9], {"stopping_threshold": 0.8, "mode": "max"}, 2),
        ([3.0, 2.0, 9.0], {"divergence_threshold": 5.0, "patience": 5}, 2),
        ([0.9, 0.5, 0.1], {"divergence_threshold": 0.2, "patience": 5, "mode": "max"}, 2),
        ([3.0, 2.0, math.inf], {"patience": 5, "divergence_threshold": 5.0}, 2),
    ],
)
def test_thresholds_stop_immediately(values, kwargs, stopped):
    assert observed(values, **kwargs)[1] == stopped


def test_nan_is_never_an_improvement():
    callback, epoch = observed([math.nan, math.nan, math.nan], patience=2)
    assert (epoch, callback.best) == (1, None)
    callback, epoch = observed([math.nan, 5.0, math.nan, 4.0, math.nan, math.nan], patience=2)
    assert (epoch, callback.best, callback.best_epoch) == (5, 4.0, 3)
    callback, epoch = observed([math.nan, math.nan])
    assert epoch == 1 and "was never a number" in callback.trainer.reason  # As in Keras, the first epoch never stops the run.


def test_the_stop_reason_names_the_best_value_and_its_epoch():
    callback, _ = observed([2.0, 1.0, 3.0, 4.0], patience=2)
    assert callback.trainer.reason == "EarlyStopping: score has not improved for 2 observations; best: 1 (epoch 2)"


# --- What it restores ---


def test_case_14_the_parameters_of_the_best_epoch_are_restored():
    trainer, params = make(), []
    note = LambdaCallback(on_epoch_end=lambda epoch, logs: params.append(jax.tree.map(np.array, trainer.state.params)))
    stop = EarlyStopping("score", mode="min", patience=2, restore_best=True)
    history = trainer.fit(X, Y, epochs=9, callbacks=[note, adding([0.2, 0.15, 0.1, 0.11, 0.12]), stop], verbose=0)
    assert (history.epoch[-1], stop.best_epoch, stop.best) == (4, 2, 0.1)
    jax.tree.map(np.testing.assert_array_equal, trainer.state.params, params[2])
    # Only parameters and collections are restored: the step is still that of the end of the run.
    assert trainer.step == 5 and int(trainer.state.step) == 5


def test_best_parameters_that_are_split_between_processes_are_an_error_before_the_first_step_if_the_run_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "spans_processes", lambda tree: True)
    trainer, stop = make(), EarlyStopping("loss", patience=9, restore_best=True)
    for save in (ModelCheckpoint(tmp_path / "all"), BestCheckpoint(tmp_path / "best", monitor="loss")):
        with pytest.raises(CallbackError, match=r"cannot be combined .* pass BestCheckpoint\(directory, restore_best=True\)\."):
            trainer.fit(X, Y, callbacks=[stop, save], verbose=0)
        assert trainer.step == 0
        trainer.fit(X, Y, callbacks=[EarlyStopping("loss", patience=9), save], verbose=0)
        trainer.build((X, Y))
    trainer.fit(X, Y, callbacks=[stop], verbose=0)


@pytest.mark.parametrize("kind", [EarlyStopping, BestCheckpoint])
def test_restore_best_does_not_hide_the_error_of_a_step_that_lost_the_state(kind, tmp_path):
    trainer = make()

    def fail(batch, logs):
        if trainer.step == 2:
            for leaf in trainer._session.state.live.carry.leaves:
                leaf.delete()
            raise ArithmeticError("a step failed")

    best = kind(*([tmp_path] if kind is BestCheckpoint else []), monitor="loss", restore_best=True)
    with pytest.raises(ArithmeticError, match="a step failed"):
        trainer.fit(X, Y, epochs=3, verbose=0, callbacks=[best, LambdaCallback(on_train_batch_end=fail)])
    assert best.best is not None


def test_without_restore_best_the_last_parameters_are_kept():
    trainer, params = make(), []
    note = LambdaCallback(on_epoch_end=lambda epoch, logs: params.append(jax.tree.map(np.array, trainer.state.params)))
    trainer.fit(X, Y, epochs=3, callbacks=[note, adding([1, 2, 3]), EarlyStopping("score", mode="min", patience=5)], verbose=0)
    jax.tree.map(np.testing.assert_array_equal, trainer.state.params, params[-1])


def test_the_best_parameters_are_restored_even_if_the_run_was_not_stopped():
    trainer, params = make(), []
    note = LambdaCallback(on_epoch_end=lambda epoch, logs: params.append(jax.tree.map(np.array, trainer.state.params)))
    stop = EarlyStopping("score", mode="max", patience=50, restore_best=True)
    trainer.fit(X, Y, epochs=3, callbacks=[note, adding([1, 3, 2]), stop], verbose=0)
    jax.tree.map(np.testing.assert_array_equal, trainer.state.params, params[1])


def test_the_best_collections_are_restored_with_the_parameters():
    class Normalized(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x))

    trainer, states = fitflax.Trainer(Normalized(), parallel=DataParallel(jax.devices()[:1])), []
    trainer.compile(optax.adam(0.1), loss="mse")
    note = LambdaCallback(on_epoch_end=lambda epoch, logs: states.append(jax.tree.map(np.array, trainer.state.model_state)))
    stop = EarlyStopping("score", mode="min", patience=50, restore_best=True)
    trainer.fit(X, Y, epochs=3, callbacks=[note, adding([1, 2, 3]), stop], verbose=0)
    jax.tree.map(np.testing.assert_array_equal, trainer.state.model_state, states[0])
    assert int(trainer.state.opt_state[0].count) == 3


# --- What it monitors ---


def rising(outputs, targets):
    return (outputs - targets)[:, 0] * 0


@pytest.mark.parametrize(
    ("monitor", "metric", "direction"),
    [
        ("val_loss", None, "min"),
        ("loss", None, "min"),
        ("mae", "mae", "min"),
        ("val_mae", "mae", "min"),
        ("val_r2", "r2", "max"),
        ("val_mine", Mean(rising, name="mine", direction="max"), "max"),
    ],
)
@pytest.mark.mostly_slow
def test_without_a_mode_the_direction_is_what_the_metric_declares(monitor, metric, direction):
    stop = EarlyStopping(monitor)
    make([metric] if metric else None).fit(X, Y, validation_data=(X, Y), callbacks=[stop], verbose=0)
    assert stop.best is not None and stop._monitor.direction == direction


def test_mode_overrides_the_direction_that_the_metric_declares():
    stop = EarlyStopping("loss", mode="max", patience=0)
    history = make().fit(X, Y, epochs=9, callbacks=[stop], verbose=0)
    assert history.epoch == [0, 1]


def test_a_value_without_a_direction_needs_a_mode():
    with pytest.raises(
        MonitorError, match=r"EarlyStopping monitors 'rising', but it is unknown whether higher or lower is better. Pass mode='min' or mode='max'"
    ):
        make([rising]).fit(X, Y, callbacks=[EarlyStopping("rising")], verbose=0)
    with pytest.raises(MonitorError, match="it is unknown whether higher or lower is better"):
        make().fit(X, Y, callbacks=[adding([1.0]), EarlyStopping("score")], verbose=0)


def test_a_misspelled_monitor_is_an_error_with_the_logged_keys_and_the_closest_one():
    with pytest.raises(
        MonitorError, match=r"EarlyStopping monitors 'val_los', which is not logged\. Did you mean 'val_loss'\? Logged keys: \['loss', 'val_loss'\]"
    ):
        make().fit(X, Y, validation_data=(X, Y), callbacks=[EarlyStopping("val_los")], verbose=0)
    with pytest.raises(MonitorError, match=r"'lss'.*Did you mean 'loss'\?"):
        make().fit(X, Y, callbacks=[EarlyStopping("lss")], verbose=0)


@pytest.mark.parametrize(("sets", "advice"), [(None, r"Pass validation_data="), ({"dev": (X, Y)}, r"Use one of \['dev_loss'\]\.")])
def test_monitoring_a_missing_validation_set_is_an_error_before_the_first_step(sets, advice):
    trainer = make()
    with pytest.raises(MonitorError, match=rf"EarlyStopping monitors 'val_loss', but .*valid.*{advice}"):
        trainer.fit(X, Y, validation_data=sets, callbacks=[EarlyStopping()], verbose=0)
    assert trainer.step == 0


def test_a_named_validation_set_can_be_monitored():
    stop = EarlyStopping("dev_loss", patience=3)
    history = make().fit(X, Y, epochs=2, validation_data={"dev": (X, Y)}, callbacks=[stop], verbose=0)
    assert stop.best == min(history.history["dev_loss"])


def test_epochs_without_validation_are_not_observed():
    stop = EarlyStopping("val_loss", mode="max", patience=1)
    history = make().fit(X, Y, epochs=9, validation_data=(X, Y), validation_freq=3, callbacks=[stop], verbose=0)
    # Improves at epoch 2, because the first value is always the best, and not at epoch 5.
    assert history.epoch == [*range(6)] and (stop.best_epoch, stop.stopped_epoch) == (2, 5)


def test_a_value_that_a_callback_adds_under_the_name_of_a_validation_set_is_not_a_validation():
    stop, added = EarlyStopping("val_loss", patience=9), adding([0.5, 0.6], "val_f1")
    history = make().fit(X, Y, epochs=2, validation_data=(X, Y), validation_freq=2, callbacks=[added, stop], verbose=0)
    assert (history.history["val_f1"], stop.best_epoch) == ([0.5, 0.6], 1)


def test_each_triggered_validation_is_an_observation():
    trainer = make()
    stop = EarlyStopping("val_loss", mode="max", patience=2)
    trainer.fit(X, Y, batch_size=2, epochs=5, validation_data=(X, Y), validation_freq=fitflax.every(steps=3), callbacks=[stop], verbose=0)
    # Steps 3 (the first is best), 6 and 9, in the third epoch of four steps.
    assert (trainer.step, stop.wait, stop.stopped_epoch) == (9, 2, 2)


def test_an_instance_can_be_used_twice():
    stop = EarlyStopping("loss", mode="max")
    trainer = make()
    for _ in range(2):
        assert trainer.fit(X, Y, epochs=9, callbacks=[stop], verbose=0).epoch == [0, 1]
    assert stop.stopped_epoch == 1


def test_its_state_can_be_loaded_into_another_instance():
    first, _ = observed([3.0, 2.0, 2.5], patience=3)
    second = EarlyStopping("score", mode="min", patience=3)
    second.trainer = View()
    second.on_train_begin({})
    second.load_state_dict(first.state_dict())
    second.on_epoch_end(3, {"score": 2.4})
    assert second.stopped_epoch is None
    second.on_epoch_end(4, {"score": 2.3})
    assert (second.stopped_epoch, second.best, second.best_epoch) == (4, 2.0, 1)


def test_a_run_that_it_stopped_stays_stopped_when_its_state_is_loaded():
    first, epoch = observed([1.0, 2.0])
    assert epoch == 1
    second = EarlyStopping("score", mode="min")
    second.trainer = View()
    second.load_state_dict(first.state_dict())
    assert second.trainer.reason == first.trainer.reason


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"patience": -1}, r"EarlyStopping\(patience=...\) must be an integer of at least 0. Received: -1"),
        ({"patience": 1.5}, r"patience=...\) must be an integer of at least 0. Received: 1.5"),
        ({"mode": "auto"}, r"EarlyStopping\(mode=...\) must be 'min', 'max' or None. Received: 'auto'"),
        ({"min_delta": -0.1}, r"EarlyStopping\(min_delta=...\) must be at least 0. Received: -0.1"),
        ({"min_delta": math.nan}, r"min_delta=...\) must be at least 0"),
    ],
)
def test_arguments_out_of_range_are_errors(kwargs, message):
    with pytest.raises(CallbackError, match=message):
        EarlyStopping(**kwargs)


@pytest.mark.slow
def test_the_best_averaged_parameters_are_restored_with_the_best_parameters():
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse", learning_rate=0.1, ema_decay=0.5)
    x = np.ones((8, 2), np.float32)
    kept: list[Any] = []
    keep = LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append(jax.tree.map(np.asarray, (trainer.state.params, trainer.state.ema_params))))
    worse = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.__setitem__("score", -epoch))
    stopping = EarlyStopping(monitor="score", mode="max", patience=2, restore_best=True)
    trainer.fit(x, np.ones((8, 1), np.float32), epochs=5, callbacks=[keep, worse, stopping], verbose=0)
    jax.tree.map(np.testing.assert_array_equal, (trainer.state.params, trainer.state.ema_params), kept[0])


# --- A run that ends inside an epoch, or before its first step ---


@pytest.mark.parametrize("steps", [1, 3])
def test_a_finished_run_that_ended_inside_an_epoch_can_be_started_again_if_the_metric_declares_the_direction(steps, tmp_path):
    def start():
        stop = EarlyStopping("val_r2", patience=9)
        options = {"batch_size": 4, "steps": steps, "validation_data": (X, Y), "resume": "auto", "verbose": 0}
        make(["r2"]).fit(X, Y, callbacks=[stop, ModelCheckpoint(tmp_path)], **options)
        return stop.state_dict()

    first = start()
    assert first["best"] is not None and start() == first


def test_a_run_whose_iterator_ended_inside_an_epoch_can_be_started_again_if_the_metric_declares_the_direction(tmp_path):
    def start():
        stop, best = EarlyStopping("r2", patience=9), BestCheckpoint(tmp_path / "best", monitor="r2")
        options = {"steps_per_epoch": 2, "epochs": 3, "resume": "auto", "verbose": 0}
        with pytest.warns(FitflaxWarning):
            make(["r2"]).fit(iter([(X, Y)] * 3), callbacks=[stop, best, ModelCheckpoint(tmp_path / "all")], **options)
        return stop.state_dict(), best.best

    first = start()
    assert first[0]["best_epoch"] == 1 and start() == first


def test_a_finished_run_that_ended_inside_an_epoch_can_be_started_again_with_a_monitor_of_a_value_that_was_not_saved(tmp_path):
    options = {"batch_size": 4, "steps": 3, "validation_data": (X, Y), "resume": "auto", "verbose": 0}
    saving = ModelCheckpoint(tmp_path / "all")
    make().fit(X, Y, callbacks=[saving], **options)
    stop, best = EarlyStopping("val_f1", mode="max"), BestCheckpoint(tmp_path / "best", monitor="val_f1", mode="max")
    with pytest.warns(FitflaxWarning, match="is new"):
        make().fit(X, Y, callbacks=[adding([], "val_f1"), stop, best, saving], **options)
    assert stop.best is None and best.best is None


def test_a_run_that_fails_before_its_first_step_does_not_restore_the_best_parameters_of_an_earlier_one():
    trainer, stop = make(), EarlyStopping("loss", patience=9, restore_best=True)
    trainer.fit(X, Y, epochs=2, callbacks=[stop], verbose=0)
    trainer.fit(X, Y, epochs=2, verbose=0)
    before = jax.device_get(trainer.state.params)
    with pytest.raises(MonitorError, match="there is no validation data"):
        trainer.fit(X, Y, callbacks=[EarlyStopping("val_loss"), stop], verbose=0)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state.params), before)


# --- Several on one monitor ---


def stopping():
    """The first to stop is the second one, at epoch 5; the first would stop at epoch 7."""
    return [EarlyStopping("score", mode="min", patience=5), EarlyStopping("score", mode="min", min_delta=1.0, patience=3)]


def run(directory, epochs, callbacks, begin=0, **options):
    trainer = make()
    trainer.fit(X, Y, epochs=epochs, verbose=0, callbacks=[adding(LOSSES[begin:]), *callbacks, ModelCheckpoint(directory)], **options)
    return trainer


def test_two_that_differ_in_other_arguments_are_resumed_like_an_uninterrupted_run(tmp_path):
    uninterrupted, resumed = stopping(), stopping()
    trainer = run(tmp_path / "never", 9, uninterrupted)
    run(tmp_path / "stopped", 4, stopping())
    again = run(tmp_path / "stopped", 9, resumed, begin=4, resume="auto")
    assert again.stop_reason == trainer.stop_reason and [one.stopped_epoch for one in uninterrupted] == [None, 5]
    assert [one.state_dict() for one in resumed] == [one.state_dict() for one in uninterrupted]


def test_a_checkpoint_with_one_is_resumed_by_the_first_of_two(tmp_path):
    run(tmp_path, 2, stopping()[:1])
    saved = load_checkpoint(tmp_path / "step_00000002").run["callbacks"]
    assert [key for key in saved if "Early" in key] == ["EarlyStopping(monitor='score')"]  # As in checkpoints of earlier versions.
    callbacks = stopping()
    with pytest.warns(FitflaxWarning, match=r"EarlyStopping\(monitor='score'\)#2 is new"):
        run(tmp_path, 3, callbacks, begin=2, resume="auto")
    assert [one.best for one in callbacks] == [8, 8] and [one.best_epoch for one in callbacks] == [2, 2]
    assert load_checkpoint(tmp_path / "step_00000003").run["callbacks"]["EarlyStopping(monitor='score')#2"]["wait"] == 0


@pytest.mark.slow
def test_two_that_reduce_the_rate_are_numbered_as_well(tmp_path):
    trainer = fitflax.Trainer(nn.Dense(3))
    trainer.compile("sgd", "mse", learning_rate=1.0)
    rates = [ReduceLROnPlateau("score", mode="min", factor=factor, patience=patience) for factor, patience in ((0.5, 1), (0.1, 2))]
    trainer.fit(X, Y, epochs=3, verbose=0, callbacks=[adding([1, 1, 1]), *rates, ModelCheckpoint(tmp_path)])
    assert trainer.learning_rate == pytest.approx(0.5 * 0.5 * 0.1)


@pytest.mark.parametrize("restores", [True, False])
def test_a_resume_that_cannot_restore_the_best_epoch_warns_and_one_that_does_not_restore_drops_its_parameters(restores, tmp_path):
    def stop(restore_best):
        return EarlyStopping("score", mode="min", patience=9, restore_best=restore_best)

    run(tmp_path, 2, [stop(not restores)])
    with pytest.warns(FitflaxWarning, match=r"best epoch so far, 2: the resumed run had restore_best=False") if restores else contextlib.nullcontext():
        run(tmp_path, 3, [resumed := stop(restores)], begin=3, resume="auto")
    assert (resumed.best_epoch, resumed.state_dict()["best_leaves"]) == (1, None)
