import functools
import operator

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import fitflax
from fitflax.callbacks import Callback, CSVLogger, LambdaCallback, LearningRateScheduler, ModelCheckpoint, ReduceLROnPlateau
from fitflax.errors import CallbackError, OptimizerError
from fitflax.parallel import DataParallel
from tests.run_script import at, differences, directory_of, rows_of, state_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(18, 4)).astype(np.float32)  # In batches of 4: five steps an epoch.
Y = RNG.normal(size=(18, 3)).astype(np.float32)


def make(optimizer="adam"):
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optimizer, loss="mse")
    return trainer


def fit(*callbacks, trainer=None, **kwargs):
    return (trainer or make()).fit(X, Y, **{"batch_size": 4, "callbacks": callbacks, "verbose": 0, **kwargs})


def halved(epoch, learning_rate):
    return learning_rate / 2


def float32s(values):
    return [float(np.float32(value)) for value in values]


# --- What it sets ---


def test_case_15_the_rate_is_what_the_schedule_returns():
    history = fit(LearningRateScheduler(lambda epoch: 1 / (2 + epoch)), epochs=3)
    assert history.history["learning_rate"] == float32s([1 / 2, 1 / 3, 1 / 4])
    assert history.history["learning_rate"][0] == 0.5


def test_steps_use_the_rate_of_their_epoch():
    """Case F: x = 1, y = 0, four inputs, three outputs, mean squared error; all elements of the kernel stay equal, w <- w - rate * 2/3 * 4 w."""
    trainer = fitflax.Trainer(nn.Dense(3, use_bias=False, kernel_init=nn.initializers.ones), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", loss="mse")
    rates, w = [0.1, 0.0, 0.03], 1.0
    trainer.fit(np.ones((40, 4)), np.zeros((40, 3)), batch_size=20, epochs=3, callbacks=[LearningRateScheduler(lambda epoch: rates[epoch])], verbose=0)
    for rate in rates:
        for _ in range(2):
            w -= rate * 2 / 3 * 4 * w
    np.testing.assert_allclose(trainer.state.params["kernel"], np.full((4, 3), w), rtol=1e-5)


def test_a_schedule_may_take_the_current_rate():
    assert fit(LearningRateScheduler(halved), epochs=3).history["learning_rate"] == float32s([0.0005, 0.00025, 0.000125])


def test_a_second_fit_with_the_same_instance_continues_from_the_last_rate_of_the_first():
    trainer, scheduler = make(), LearningRateScheduler(halved)
    rates = [fit(scheduler, trainer=trainer).history["learning_rate"] for _ in range(2)]
    assert rates == [float32s([0.0005]), float32s([0.00025])]


def test_the_schedule_is_called_once_per_epoch_with_the_epoch_index_and_the_rate():
    calls = []
    scheduler = LearningRateScheduler(lambda epoch, rate: calls.append((epoch, rate)) or 0.25)
    trainer = make()
    fit(scheduler, trainer=trainer, epochs=5, initial_epoch=3)
    fit(scheduler, trainer=trainer, epochs=4, initial_epoch=3)
    assert calls == [(3, float32s([0.001])[0]), (4, 0.25), (3, 0.25)]


def test_other_callbacks_see_the_rate_of_an_epoch_at_its_start_and_in_its_final_logs(tmp_path):
    seen, trainer = [], make()
    note = LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(trainer.learning_rate), on_epoch_end=lambda epoch, logs: seen.append(logs["learning_rate"])
    )
    fit(note, CSVLogger(tmp_path / "log.csv"), LearningRateScheduler(lambda epoch: 0.5 ** (epoch + 1)), trainer=trainer, epochs=2)
    assert seen == [0.5, 0.5, 0.25, 0.25]
    assert [line.split(",")[2] for line in (tmp_path / "log.csv").read_text().splitlines()] == ["learning_rate", "0.5", "0.25"]


def test_a_rate_may_be_any_kind_of_number():
    rates = [1, np.float32(0.5), np.array(0.25), 0, jax.numpy.float32(0.125)]
    assert fit(LearningRateScheduler(lambda epoch: rates[epoch]), epochs=5).history["learning_rate"] == [float(rate) for rate in rates]


def test_an_optax_schedule_counts_epochs():
    history = fit(LearningRateScheduler(optax.linear_schedule(1.0, 0.0, 4)), epochs=3)
    assert history.history["learning_rate"] == [1.0, 0.75, 0.5]


def test_setting_the_rate_compiles_nothing(compilations):
    trainer = make()
    fit(LearningRateScheduler(halved), trainer=trainer)
    with compilations.counted() as counted:
        fit(LearningRateScheduler(halved), trainer=trainer, epochs=3)
    assert counted.names == []


def test_the_rate_is_read_once_per_epoch_and_once_more_if_the_schedule_takes_it():
    class View:
        reads = 0

        @property
        def learning_rate(self):
            self.reads += 1
            return 0.5

        @learning_rate.setter
        def learning_rate(self, value):
            pass

    for schedule, reads in ((lambda epoch: 0.5, [0, 1]), (halved, [1, 2])):
        scheduler = LearningRateScheduler(schedule)
        scheduler.trainer = View()
        scheduler.on_epoch_begin(0, {})
        counts = [scheduler.trainer.reads]
        scheduler.on_epoch_end(0, {})
        assert [*counts, scheduler.trainer.reads] == reads


# --- Errors ---


@pytest.fixture(scope="module")
def built():
    """A trainer that runs no steps in any of the tests that share it."""
    return make()


@pytest.mark.parametrize("optimizer", [optax.adam(1e-3), "schedule"])
def test_a_rate_that_cannot_be_set_is_an_error_before_the_first_step(optimizer):
    trainer = make()
    trainer.compile(
        **({"optimizer": "adam", "learning_rate": optax.constant_schedule(0.1)} if optimizer == "schedule" else {"optimizer": optimizer}), loss="mse"
    )
    with pytest.raises(OptimizerError, match=r"optax\.inject_hyperparams"):
        fit(LearningRateScheduler(lambda epoch: 0.1), trainer=trainer)
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("rate", "text"),
    [(None, "None"), ("fast", "'fast'"), (-0.5, "-0.5"), (np.nan, "nan"), (np.inf, "inf"), (True, "True"), (np.ones(2), r"array\(\[1\., 1\.\]\)")],
)
def test_an_invalid_rate_is_an_error_that_names_the_epoch_and_the_value(rate, text, built):
    with pytest.raises(OptimizerError, match=rf"the schedule returned {text} for epoch 2\. A learning rate must be a finite number of at least 0"):
        fit(LearningRateScheduler(lambda epoch: rate), trainer=built, epochs=3, initial_epoch=2)
    assert built.step == 0


@pytest.mark.parametrize(
    "schedule",
    [
        lambda: 0.1,
        lambda epoch, rate, more: 0.1,
        lambda *, epoch: 0.1,
        0.1,
        # Ambiguous: if `base` received the rate, the result would be wrong without an error.
        lambda epoch, base=0.1: base * 0.5**epoch,
        lambda *arguments: 0.1,
    ],
)
def test_a_schedule_with_other_arguments_is_an_error_that_names_both_forms(schedule):
    with pytest.raises(CallbackError, match=r"needs a function schedule\(epoch\) or schedule\(epoch, learning_rate\)\. Received: "):
        LearningRateScheduler(schedule)


def test_a_function_whose_arguments_cannot_be_inspected_is_an_error():
    with pytest.raises(CallbackError, match=r"schedule\(epoch\) or schedule\(epoch, learning_rate\)\. The arguments of <.*cannot be inspected\. Wrap it"):
        LearningRateScheduler(dict)


def test_callable_objects_partial_functions_and_methods_can_be_schedules():
    class Schedule:
        def __call__(self, epoch):
            return 0.5

        def method(self, epoch, rate):
            return rate

    partial = functools.partial(lambda epoch, *, base: base, base=0.5)
    assert [LearningRateScheduler(each)._takes_rate for each in (Schedule(), partial, Schedule().method, operator.mul)] == [False, False, True, True]


# --- Other callbacks, and resuming ---


def test_it_can_be_used_together_with_reduce_lr_on_plateau():
    """As in Keras: a reduced rate holds until the schedule sets the rate of the next epoch."""
    seen, trainer = [], make()
    note = LambdaCallback(on_checkpoint=lambda checkpoint: seen.append(trainer.learning_rate))
    plateau = ReduceLROnPlateau("loss", min_delta=100.0, patience=1, factor=0.5)
    history = fit(note, plateau, LearningRateScheduler(lambda epoch: 0.5), trainer=trainer, epochs=3)
    assert history.history["learning_rate"] == [0.5, 0.5, 0.5]
    assert seen == [0.5, 0.25, 0.25]


def run(root, *more, schedule=halved, every=None, trainer=None, **kwargs):
    """Trains with new objects, as a new process would; returns the trainer."""
    trainer = trainer or make()
    saving = ModelCheckpoint(root / "checkpoints", keep=None, **({} if every is None else {"every": every}))
    fit(saving, LearningRateScheduler(schedule), *more, trainer=trainer, resume="auto", **kwargs)
    return trainer


def assert_equal(root, trainer, other_root, other):
    wanted, found = directory_of(other_root / "checkpoints"), directory_of(root / "checkpoints")
    # A run that was stopped inside an epoch also has a checkpoint there.
    unequal = differences(state_of(trainer), state_of(other)) + differences({name: found.get(name, {}) for name in wanted}, wanted)
    unequal = [line for line in unequal if ": closing: " not in line]
    assert not unequal, "\n".join(unequal)
    assert rows_of(trainer.history) == rows_of(other.history)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    root = tmp_path_factory.mktemp("never")
    return root, run(root, epochs=3)


@pytest.mark.parametrize("k", [3, 5, 7])
@pytest.mark.mostly_slow
def test_a_resumed_run_equals_an_uninterrupted_run(k, uninterrupted, tmp_path):
    trainer = make()
    run(tmp_path, at(trainer, "on_train_batch_end", k, lambda step: trainer.stop("enough")), trainer=trainer, epochs=3)
    assert trainer.step == k
    assert_equal(tmp_path, run(tmp_path, epochs=3), *uninterrupted)


def test_a_resume_inside_an_epoch_keeps_the_restored_rate(tmp_path):
    run(tmp_path, steps=7)
    calls, rates = [], []
    trainer = make()
    note = LambdaCallback(on_train_batch_begin=lambda batch, logs: rates.append(trainer.learning_rate))
    run(tmp_path, note, trainer=trainer, schedule=lambda epoch, rate: calls.append(epoch) or 0.125, epochs=3)
    assert calls == [2] and rates == [*float32s([0.00025] * 3), *[0.125] * 5]


def test_an_epoch_interrupted_before_its_first_step_starts_with_the_same_rate_again(tmp_path):
    """The exception causes the checkpoint of step 5, after the rate of the second epoch was set."""
    options = {"epochs": 3, "every": fitflax.every(steps=7)}
    uninterrupted = run(tmp_path / "never", **options)

    class Failing(Callback):
        def on_epoch_begin(self, epoch, logs):
            if epoch == 1:
                raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run(tmp_path / "failed", Failing(), **options)
    resumed = run(tmp_path / "failed", **options)
    assert [row["logs"]["learning_rate"] for row in resumed.history.rows] == float32s([0.0005, 0.00025, 0.000125])
    assert not differences(state_of(resumed), state_of(uninterrupted))
    assert rows_of(resumed.history) == rows_of(uninterrupted.history)


def test_running_the_same_script_again_changes_nothing(tmp_path):
    first = run(tmp_path, steps=7)
    again = run(tmp_path, steps=7)
    assert not differences(state_of(again), state_of(first))
    assert rows_of(again.history) == rows_of(first.history) and len(first.history.rows) == 2
