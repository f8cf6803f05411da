"""What holds for every callback that is shipped."""

import inspect

import flax.linen as nn
import jax
import numpy as np
import pytest

import fitflax
from fitflax import callbacks
from fitflax.callbacks import (
    BestCheckpoint,
    Callback,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    Phase,
    ProgressBar,
    ReduceLROnPlateau,
    SummaryLogger,
    TensorBoard,
    TerminateOnNaN,
)
from fitflax.callbacks.base import HOOKS
from fitflax.callbacks.callback_list import CallbackList
from fitflax.callbacks.history import History
from fitflax.errors import NotReadyError
from fitflax.parallel import DataParallel

X, Y = np.ones((8, 4), np.float32), np.zeros((8, 3), np.float32)


def shipped():
    kinds = [getattr(callbacks, name) for name in callbacks.__all__]
    return [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Callback)] + [History]


def made(kind, directory):
    """Returns an instance, with a directory, a file or a schedule where one is needed."""
    arguments = inspect.signature(kind.__init__).parameters
    if "directory" in arguments:
        return kind(directory / kind.__name__)
    if "path" in arguments:
        return kind(directory / f"{kind.__name__}.csv")
    if "schedule" in arguments:
        return kind(lambda epoch: 0.01)
    return kind()


@pytest.fixture(params=shipped(), ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


def fit(*given, trainer=None, **kwargs):
    if trainer is None:
        trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
        trainer.compile("sgd", loss="mse", learning_rate=0.01)
    trainer.fit(X, Y, batch_size=4, validation_data=(X, Y), callbacks=given, verbose=0, **kwargs)
    return trainer


def test_the_hooks_are_those_of_keras_and_on_checkpoint():
    stages = [f"on_{kind}{part}_{end}" for kind in ("train", "test", "predict") for part in ("", "_batch") for end in ("begin", "end")]
    assert set(HOOKS) == {*stages, "on_epoch_begin", "on_epoch_end", "on_checkpoint"}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.mostly_slow
def test_every_hook_takes_what_the_base_class_says(kind, hook):
    assert [*inspect.signature(getattr(kind, hook)).parameters] == [*inspect.signature(getattr(Callback, hook)).parameters]


def test_every_callback_has_a_phase_and_a_docstring_with_an_example(kind):
    assert isinstance(kind.phase, Phase)
    assert ">>>" in inspect.getdoc(kind)


@pytest.mark.mostly_slow
def test_every_callback_works_in_a_fit_alone(kind, tmp_path):
    assert fit(made(kind, tmp_path), epochs=2).step == 4


@pytest.mark.mostly_slow
def test_every_callback_serves_two_fits(kind, tmp_path):
    callback = made(kind, tmp_path)
    trainer = fit(callback)
    assert fit(callback, trainer=trainer).step == 4


@pytest.mark.mostly_slow
def test_the_state_of_every_callback_can_be_saved_and_comes_back(kind, tmp_path):
    callback, other = made(kind, tmp_path), made(kind, tmp_path)
    trainer = fit(callback, epochs=2)
    state = callback.state_dict()
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: leaf is None)
    assert all(isinstance(leaf, int | float | str | np.ndarray | jax.Array | None) for leaf in leaves)
    other.trainer, other.params = trainer, callback.params
    other.on_train_begin({})
    if state:
        other.load_state_dict(state)
    assert str(other.state_dict()) == str(state)
    assert other.state_key == callback.state_key and isinstance(callback.state_key, str)


@pytest.mark.mostly_slow
def test_no_callback_changes_the_training(kind, tmp_path):
    plain, watched = fit(epochs=2), fit(made(kind, tmp_path), epochs=2)
    jax.tree.map(np.testing.assert_array_equal, plain.state.params, watched.state.params)


def test_all_together_work_in_one_fit(tmp_path):
    # History is there by itself.
    assert fit(*(made(kind, tmp_path) for kind in shipped() if kind is not History), epochs=2).step == 4


def test_a_callback_is_a_context_manager_that_closes():
    closed = []

    class Closing(Callback):
        def close(self):
            closed.append(True)

    with Closing() as callback:
        assert isinstance(callback, Closing) and not closed
    assert closed == [True]


def test_a_run_closes_its_callbacks_after_on_train_end():
    calls = []

    class Closing(Callback):
        def on_train_end(self, logs):
            calls.append("end")

        def close(self):
            calls.append("close")

    fit(Closing())
    assert calls[:2] == ["end", "close"]


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda path: [], False),
        (lambda path: [ModelCheckpoint(path), BestCheckpoint(path), EarlyStopping(), ReduceLROnPlateau(), CSVLogger(path / "log.csv"), ProgressBar()], False),
        (lambda path: [TensorBoard(path)], True),
        (lambda path: [SummaryLogger()], True),
        (lambda path: [TerminateOnNaN()], True),
        (lambda path: [LambdaCallback(lambda checkpoint: None)], True),
        (lambda path: [LambdaCallback(on_epoch_end=lambda epoch, logs: None)], False),
    ],
)
def test_the_norm_of_the_gradient_is_computed_where_somebody_may_read_it(make, wanted, tmp_path):
    assert CallbackList(make(tmp_path)).keep.norm is wanted


@pytest.mark.parametrize("wanted", [True, False])
def test_a_step_without_a_reader_computes_no_norm(wanted):
    norms = []
    look = LambdaCallback(lambda checkpoint: norms.append(float(checkpoint.run.step_values.gradients_norm)))
    look.needs_gradients_norm = wanted
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    trainer.fit(np.ones((4, 2)), np.ones((4, 1)), callbacks=[look], verbose=0)
    assert np.isfinite(norms).tolist() == [wanted]


def test_a_norm_that_was_not_computed_is_an_error_that_says_how_to_get_it():
    look = LambdaCallback(lambda checkpoint: checkpoint.gradients_norm)
    look.needs_gradients_norm = False
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    with pytest.raises(NotReadyError, match="fit a callback whose needs_gradients_norm is True"):
        trainer.fit(np.ones((4, 2)), np.ones((4, 1)), callbacks=[look], verbose=0)
