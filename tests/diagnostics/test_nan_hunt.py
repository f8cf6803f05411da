"""`Trainer.hunt_nan`: the step that spoils a run is made again, and what spoilt it is named."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import checkpoints as flax_checkpoints

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
    """With dropout and batch statistics; one example in which x[0] is below -100 has it take the root of a negative number."""

    @nn.compact
    def __call__(self, x, train=False):
        h = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        h = nn.Dropout(0.2, deterministic=not train)(nn.relu(h))
        return nn.Dense(3)(h) + jnp.sqrt(jnp.maximum(x[:, :1], -200) + 100) / 10


def trainer_of(model=None, devices=1, optimizer="adam", **options):
    trainer = fitflax.Trainer(model or Net(), parallel=DataParallel(jax.devices()[:devices]))
    trainer.compile(optimizer, LOSS, ["accuracy"], **options)
    return trainer


def spoilt(row):
    x = X.copy()
    x[row, 0] = -150
    return x


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}, {"precision": "bfloat16"}, {"ema_decay": 0.9}])
@pytest.mark.mostly_slow
def test_step_leaf_and_layer_are_named(devices, options):
    trainer = trainer_of(devices=devices, **options)
    report = trainer.hunt_nan(spoilt(21), Y, batch_size=8, shuffle=False)
    assert (report.step, report.culprit) == (3, "the loss")
    assert [(origin.kind, origin.operation, origin.layer) for origin in report.origins] == [("NaN", "sqrt", "Net")]
    assert "test_nan_hunt.py" in report.origins[0].source
    assert report.batch.x[5, 0] == -150 and int(report.state.step) == 2
    assert str(report).splitlines()[0] == "Step 3: the loss is not finite."


def test_a_run_without_a_fault_has_no_report():
    assert trainer_of().hunt_nan(X, Y, batch_size=8) is None


def test_nothing_of_the_trainer_changes():
    x = spoilt(40)
    trainer, control = trainer_of(), trainer_of()
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
def test_before_there_is_a_state_it_begins_with_the_initial_one_and_leaves_none():
    trainer = trainer_of()
    assert trainer.hunt_nan(spoilt(0), Y, batch_size=8, shuffle=False).step == 1
    with pytest.raises(NotReadyError):
        trainer.state  # noqa: B018 (reading it is what fails)


def test_the_run_that_terminate_on_nan_ended_is_found_again_from_its_checkpoints(tmp_path):
    x, watch = spoilt(7), TerminateOnNaN()
    trainer = trainer_of()
    save = ModelCheckpoint(tmp_path, every=fitflax.every(steps=2), keep=9)
    trainer.fit(x, Y, batch_size=8, epochs=3, callbacks=[save, watch], log_every=1, verbose=0)
    assert watch.bad_step is not None
    with pytest.raises(ConfigError, match=r"not finite to begin with: BatchNorm_0/bias.*Pass restore_from="):
        trainer.hunt_nan(x, Y, batch_size=8)
    report = trainer_of().hunt_nan(x, Y, batch_size=8, restore_from=tmp_path)
    assert (report.step, report.culprit) == (watch.bad_step, watch.culprit)
    assert report.origins[0].operation == "sqrt"
    last_good = int(report.state.step)
    assert last_good == watch.bad_step - 1
    with pytest.raises(RestoreError, match="batch_size was 8 and is 16"):
        trainer_of().hunt_nan(x, Y, batch_size=16, restore_from=tmp_path)


def test_a_directory_without_a_finite_checkpoint_is_an_error(tmp_path):
    trainer = trainer_of()
    trainer.fit(spoilt(0), Y, batch_size=8, epochs=1, shuffle=False, callbacks=[ModelCheckpoint(tmp_path)], verbose=0)
    with pytest.raises(CheckpointNotFoundError, match="has finite parameters: the run was spoilt before the first of them"):
        trainer_of().hunt_nan(X, Y, batch_size=8, restore_from=tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="no such directory"):
        trainer_of().hunt_nan(X, Y, batch_size=8, restore_from=tmp_path / "nowhere")


def test_a_gradient_that_is_not_finite_is_followed_to_its_line():
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(3, kernel_init=nn.initializers.zeros)(x)
            return h / (1 + jnp.sqrt((h**2).sum(axis=-1, keepdims=True)))

    report = trainer_of(Norm()).hunt_nan(X, Y, batch_size=8)
    assert report.culprit == "the gradient of Dense_0/bias"
    assert [(origin.kind, origin.operation, origin.is_backward) for origin in report.origins] == [("infinity", "div", False), ("NaN", "mul", True)]


def test_a_parameter_that_the_optimizer_spoils_is_named():
    huge = optax.chain(optax.scale(1e30), optax.sgd(1e30))
    report = trainer_of(nn.Dense(3), optimizer=huge).hunt_nan(X, Y, batch_size=8)
    assert report.culprit.startswith("the parameter ") and report.origins


@pytest.mark.slow
def test_a_step_of_the_users_own_is_made_again_as_well():
    class Own(fitflax.Trainer):
        def train_step(self, state, batch):
            state, logs = super().train_step(state, batch)
            return state.replace_params(jax.tree.map(lambda leaf: jnp.log(leaf - 100), state.params)), logs

    trainer = Own(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", LOSS)
    report = trainer.hunt_nan(X, Y, batch_size=8)
    assert report.step == 1 and report.origins[0].operation == "log"


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (lambda: iter([(X, Y)]), {}, "must not use up your data"),
        (lambda: lambda: iter(lambda: (X, Y), None), {"steps": 0}, "steps"),
    ],
)
def test_what_makes_no_sense_is_an_error(data, options, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of().hunt_nan(data(), **options)


@pytest.mark.slow
def test_it_passes_over_the_data_again_where_steps_say_so():
    assert trainer_of().hunt_nan(lambda: [(X[:8], Y[:8])], steps=5) is None
    # The rate grows until the step spoils itself, in the fourth pass over one batch.
    trainer = trainer_of(nn.Dense(3), optimizer=optax.sgd(lambda count: jnp.where(count < 3, 0.1, jnp.inf)))
    assert trainer.hunt_nan(lambda: [(X[:8], Y[:8])], steps=9).step == 4
    assert trainer.hunt_nan(lambda: [(X[:8], Y[:8])]) is None


@pytest.mark.slow
def test_a_norm_too_large_for_a_float_is_no_fault():
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


def test_a_lost_state_does_not_matter_where_a_checkpoint_is_given(tmp_path):
    trainer = trainer_of()
    trainer.fit(X, Y, batch_size=8, callbacks=[ModelCheckpoint(tmp_path)], verbose=0)
    for leaf in jax.tree.leaves(trainer._session.live.borrow().params):
        leaf.delete()
    assert trainer.hunt_nan(X, Y, batch_size=8, steps=2, restore_from=tmp_path) is None


@pytest.mark.slow
def test_what_fit_says_of_data_is_said_here_as_well():
    with pytest.raises(fitflax.errors.DataError, match="y holds labels from 1 to 3"):
        trainer_of().hunt_nan(X, Y + 1)
    with pytest.raises(fitflax.errors.DataError, match="y holds labels from 1 to 3"):
        trainer_of(optimizer="sgd").find_learning_rate(X, Y + 1)
    bad = X.copy()
    bad[3, 1] = np.nan
    with pytest.warns(fitflax.errors.FitflaxWarning, match="x holds NaN or infinity in 1 of 48 examples"):
        report = trainer_of().hunt_nan(bad, Y, batch_size=8, shuffle=False)
    assert str(report).endswith("NaN from the batch's x")


def test_a_checkpoint_of_another_library_is_no_run_that_was_spoilt(tmp_path):
    trainer = trainer_of()
    trainer.build((X[:4], Y[:4]))
    flax_checkpoints.save_checkpoint(tmp_path, {"params": jax.tree.map(np.asarray, trainer.state.params)}, step=3)
    with pytest.raises(RestoreError, match="holds a state, but no run that could go on"):
        trainer.hunt_nan(X, Y, restore_from=tmp_path)


def test_data_that_never_ends_needs_steps():
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    with pytest.raises(ConfigError, match=r"This data never ends\. Pass steps=\."):
        trainer.hunt_nan(itertools.repeat((np.ones((2, 2)), np.ones((2, 1)))))


def test_a_checkpoint_to_hunt_from_may_be_named_itself(tmp_path):
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    data = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
    trainer.fit(*data, batch_size=2, steps=1, callbacks=[ModelCheckpoint(tmp_path)], verbose=0)
    data[0][:] = np.nan
    report = trainer.hunt_nan(*data, restore_from=tmp_path / "step_00000001", batch_size=2)
    assert (report.step, trainer.step) == (2, 1)
