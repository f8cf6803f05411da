import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fitflax
from fitflax.callbacks import LambdaCallback, TerminateOnNaN
from fitflax.parallel import DataParallel


def make(loss="mse", metrics=None, rate=0.0):
    trainer = fitflax.Trainer(nn.Dense(1), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(rate), loss=loss, metrics=metrics)
    return trainer


def batches(bad, total, value=np.nan):
    """Returns a function that yields `total` batches. Batch `bad`, counted from 1, holds `value`."""
    return lambda: ((np.full((2, 4), value if number == bad else 1.0, np.float32), np.zeros((2, 1), np.float32)) for number in range(1, total + 1))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_case_34_a_nan_at_step_30_is_reported_as_step_30_though_logs_are_read_every_50(value):
    trainer, callback = make(), TerminateOnNaN()
    trainer.fit(batches(30, 200, value), callbacks=[callback], log_every=50, verbose=0)
    assert callback.bad_step == 30
    assert trainer.stop_reason == "TerminateOnNaN: the loss is not finite at step 30"
    assert trainer.step == 50


@pytest.mark.parametrize(("bad", "log_every", "stopped"), [(1, 1, 1), (4, 1, 4), (4, 3, 6), (3, 3, 3), (5, 100, 8)])
@pytest.mark.mostly_slow
def test_it_stops_at_the_next_log_point_or_the_end_of_the_epoch(bad, log_every, stopped):
    trainer, callback = make(), TerminateOnNaN()
    trainer.fit(batches(bad, 8), epochs=3, callbacks=[callback], log_every=log_every, verbose=0)
    assert (callback.bad_step, trainer.step) == (bad, stopped)


def test_a_bad_step_in_a_later_epoch_and_fit_is_reported_by_its_own_number():
    trainer, callback = make(), TerminateOnNaN()
    trainer.fit(batches(0, 6), epochs=2, callbacks=[callback], verbose=0)
    assert (callback.bad_step, trainer.stop_reason) == (None, None)
    trainer.fit(batches(3, 6), callbacks=[callback], verbose=0)
    assert callback.bad_step == 15


class Two(nn.Module):
    @nn.compact
    def __call__(self, x):
        return {"left": nn.Dense(1, name="l")(x), "right": nn.Dense(1, name="r")(x)}


@pytest.mark.slow
def test_the_bad_one_of_several_losses_is_named():
    def bad_at_3(outputs, targets):
        return jnp.where(targets[:, 0] == 3, jnp.nan, outputs[:, 0])

    trainer, callback = fitflax.Trainer(Two(), parallel=DataParallel(jax.devices()[:1])), TerminateOnNaN()
    trainer.compile(optax.sgd(0.0), loss={"left": "mse", "right": bad_at_3})
    data = [(np.ones((2, 4), np.float32), {name: np.full((2, 1), number, np.float32) for name in ("left", "right")}) for number in range(1, 6)]
    trainer.fit(lambda: data, callbacks=[callback], verbose=0)
    assert (callback.bad_step, callback.culprit) == (3, "the loss of 'right'")


def test_a_parameter_that_the_optimizer_makes_infinite_is_named():
    def update(updates, state, params=None):
        count = state + 1
        spoiled = jax.tree.map_with_path(lambda path, leaf: jnp.where((count == 3) & (path[-1].key == "bias"), jnp.inf, 0.0) * jnp.ones_like(leaf), updates)
        return spoiled, count

    trainer, callback = fitflax.Trainer(nn.Dense(1), parallel=DataParallel(jax.devices()[:1])), TerminateOnNaN()
    trainer.compile(optax.GradientTransformation(lambda params: jnp.int32(0), update), "mse")
    trainer.fit(batches(0, 6), callbacks=[callback], log_every=1, verbose=0)
    assert (callback.bad_step, callback.culprit, trainer.step) == (3, "the parameter bias", 3)
    assert trainer.stop_reason == "TerminateOnNaN: the parameter bias is not finite at step 3"


@pytest.mark.parametrize("options", [{"steps_per_call": 4}, {"accumulate_steps": 2}])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.mostly_slow
def test_the_culprit_is_named_with_steps_per_call_micro_batches_and_several_devices(options, number):
    trainer, callback = fitflax.Trainer(nn.Dense(1), parallel=DataParallel(jax.devices()[:number])), TerminateOnNaN()
    trainer.compile(optax.sgd(0.0), "mse", **options)
    rows = [np.full((4, 4), np.nan if index == 6 else 1.0, np.float32) for index in range(12)]
    trainer.fit(lambda: ((x, np.zeros((4, 1), np.float32)) for x in rows), callbacks=[callback], verbose=0)
    assert (callback.bad_step, callback.culprit) == (7, "the loss")


def test_a_gradient_that_is_not_finite_counts_even_if_the_loss_is_finite():
    def loss(outputs, targets):
        # The square root has no finite derivative at zero.
        return jnp.sqrt(jnp.sum((outputs - outputs) ** 2, axis=-1)) + jnp.sum(outputs, axis=-1)

    trainer, callback = make(loss), TerminateOnNaN()
    history = trainer.fit(batches(0, 1), callbacks=[callback], verbose=0)
    assert callback.bad_step == 1 and np.isfinite(history.history["loss"][0])
    assert callback.culprit == "the gradient of bias"


def test_a_run_without_nan_is_left_alone():
    trainer, callback = make(), TerminateOnNaN()
    trainer.fit(batches(0, 5), epochs=2, callbacks=[callback], log_every=1, verbose=0)
    assert (trainer.step, callback.bad_step, trainer.stop_reason) == (10, None, None)


def test_the_first_of_several_bad_steps_is_reported():
    trainer, callback = make(rate=0.1), TerminateOnNaN()
    trainer.fit(batches(2, 10), callbacks=[callback], log_every=7, verbose=0)
    assert (callback.bad_step, trainer.step) == (2, 7)


def test_an_instance_can_be_used_again_after_it_stopped_a_run():
    callback = TerminateOnNaN()
    make().fit(batches(2, 4), callbacks=[callback], log_every=1, verbose=0)
    assert callback.bad_step == 2
    trainer = make()
    trainer.fit(batches(0, 4), callbacks=[callback], log_every=1, verbose=0)
    assert (trainer.step, callback.bad_step) == (4, None)


def test_a_run_that_it_stopped_stays_stopped_when_its_state_is_loaded():
    callback = TerminateOnNaN()
    make().fit(batches(2, 4), callbacks=[callback], log_every=1, verbose=0)
    stopped = []

    class View:
        def stop(self, reason):
            stopped.append(reason)

    other = TerminateOnNaN()
    other.trainer = View()
    other.load_state_dict(callback.state_dict())
    assert other.bad_step == 2 and stopped == ["TerminateOnNaN: the loss is not finite at step 2"]
    assert TerminateOnNaN().state_dict() == {}


def test_it_reads_only_at_log_points(monkeypatch):
    from fitflax import logs

    steps, trainer = [], make()
    original = logs.Values._read

    def read(self):
        if self._host is None:
            steps.append(trainer.step)
        return original(self)

    monkeypatch.setattr(logs.Values, "_read", read)
    trainer.fit(batches(0, 10), callbacks=[LambdaCallback(on_train_batch_end=lambda batch, logs: None), TerminateOnNaN()], log_every=4, verbose=0)
    assert steps == [4, 8, 10]


def test_without_the_callback_the_culprit_is_not_looked_for():
    seen = []
    reader = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append((logs.source.steps_since_bad, logs.source.culprit)))
    make().fit(batches(2, 3), callbacks=[reader], verbose=0)
    assert seen == [(None, None), (0, None), (1, None)]


def test_there_is_no_culprit_before_the_first_bad_step():
    culprits = []

    class Recorder(TerminateOnNaN):
        def on_train_batch_end(self, batch, logs):
            super().on_train_batch_end(batch, logs)
            culprits.append((logs.source.steps_since_bad, logs.source.culprit))

    make().fit(batches(3, 4), callbacks=[Recorder()], log_every=100, verbose=0)
    assert culprits == [(None, None), (None, None), (0, "the loss"), (1, "the loss")]


def test_it_also_checks_logs_that_do_not_come_from_steps():
    trainer, callback = make(), TerminateOnNaN()
    trainer.fit(batches(0, 2), callbacks=[callback], verbose=0)
    callback.on_epoch_end(1, {"loss": 0.5})
    assert callback.bad_step is None
    callback.on_epoch_end(2, {"loss": np.nan})
    assert (callback.bad_step, trainer.stop_reason) == (2, "TerminateOnNaN: the loss or its gradient is not finite at step 2")
