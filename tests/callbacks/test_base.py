"""Properties of every built-in callback."""

import inspect
import pickle

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


def create(kind, directory):
    """Returns an instance, with a directory, a file or a schedule if it needs one."""
    arguments = inspect.signature(kind.__init__).parameters
    if "directory" in arguments:
        return kind(directory / kind.__name__)
    if "path" in arguments:
        return kind(directory / f"{kind.__name__}.csv")
    if "schedule" in arguments:
        return kind(lambda epoch: 0.01)
    if "notice" in arguments:
        return kind(directory / "stop")
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


def test_the_hooks_are_the_keras_hooks_plus_on_checkpoint():
    stages = [f"on_{kind}{part}_{end}" for kind in ("train", "test", "predict") for part in ("", "_batch") for end in ("begin", "end")]
    assert set(HOOKS) == {*stages, "on_epoch_begin", "on_epoch_end", "on_checkpoint"}


@pytest.mark.mostly_slow
def test_no_callback_changes_the_result_of_training(kind, tmp_path):
    plain, watched = fit(epochs=2), fit(create(kind, tmp_path), epochs=2)
    jax.tree.map(np.testing.assert_array_equal, plain.state.params, watched.state.params)


def test_all_callbacks_work_together_in_one_fit(tmp_path):
    # fit always adds a History.
    assert fit(*(create(kind, tmp_path) for kind in shipped() if kind is not History), epochs=2).step == 4


def test_a_callback_is_a_context_manager_that_closes_itself():
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
def test_the_gradient_norm_is_computed_if_a_callback_may_read_it(make, wanted, tmp_path):
    assert CallbackList(make(tmp_path)).keep.norm is wanted


@pytest.mark.parametrize("wanted", [True, False])
def test_a_step_computes_the_gradient_norm_only_if_a_callback_needs_it(wanted):
    norms = []
    reader = LambdaCallback(lambda checkpoint: norms.append(float(checkpoint.run.step_values.gradients_norm)))
    reader.needs_gradients_norm = wanted
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    trainer.fit(np.ones((4, 2)), np.ones((4, 1)), callbacks=[reader], verbose=0)
    assert np.isfinite(norms).tolist() == [wanted]


def test_reading_a_norm_that_was_not_computed_is_an_error_that_says_how_to_get_it():
    reader = LambdaCallback(lambda checkpoint: checkpoint.gradients_norm)
    reader.needs_gradients_norm = False
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    with pytest.raises(NotReadyError, match="Use a callback with needs_gradients_norm = True"):
        trainer.fit(np.ones((4, 2)), np.ones((4, 1)), callbacks=[reader], verbose=0)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("csv_logger", "CSVLogger"),
        ("json_logger", "JSONLogger"),
        ("lambda_callback", "LambdaCallback"),
        ("learning_rate_scheduler", "LearningRateScheduler"),
        ("media", "ImageSummary"),
        ("profiler", "Profiler"),
        ("reduce_lr_on_plateau", "ReduceLROnPlateau"),
        ("summary_logger", "SummaryLogger"),
        ("terminate_on_nan", "TerminateOnNaN"),
        ("watchdog", "Watchdog"),
    ],
)
def test_pickles_of_version_0_1_are_loaded(module, name):
    """They name the modules in which that version defined the callbacks."""
    package = fitflax.callbacks.__name__
    assert pickle.loads(f"c{package}.{module}\n{name}\n.".encode()) is getattr(fitflax.callbacks, name)
