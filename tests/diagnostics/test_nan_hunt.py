"""`Trainer.hunt_nan`: it repeats the first step with a value that is not finite, and names the cause."""

import itertools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import ModelCheckpoint, TerminateOnNaN
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
def test_the_errors_and_warnings_of_fit_about_data_are_given_here_too():
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
