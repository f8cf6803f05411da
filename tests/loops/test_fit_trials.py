"""`fit(fast_dev_run=..., overfit_batches=...)`: a quick trial of a script, and a model that should memorize a few batches."""

import io
import os

import flax.linen as nn
import jax
import numpy as np
import pytest

import fitflax
from fitflax.callbacks import BestCheckpoint, Callback, CSVLogger, EarlyStopping, JSONLogger, ModelCheckpoint, Profiler, ProgressBar, TensorBoard
from fitflax.data import Position, adapt
from fitflax.data.arrays import FirstBatches
from fitflax.errors import ConfigError, DataError
from fitflax.parallel import DataParallel

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 40).astype(np.int32)


def make():
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("adam", "sparse_categorical_crossentropy", ["accuracy"], learning_rate=0.1)
    return trainer


class Hooks(Callback):
    """Records the hooks that are called."""

    def __init__(self):
        self.calls = []

    def on_train_begin(self, logs):
        self.calls.append("train")

    def on_train_batch_end(self, batch, logs):
        self.calls.append("step")

    def on_test_batch_end(self, batch, logs):
        self.calls.append("test")

    def on_epoch_end(self, epoch, logs):
        self.calls.append(("epoch", epoch, sorted(logs)))

    def on_train_end(self, logs):
        self.calls.append("end")


# -- fast_dev_run --


def files_of(tmp_path):
    writers = [ModelCheckpoint(tmp_path / "a"), BestCheckpoint(tmp_path / "b"), TensorBoard(tmp_path / "c"), CSVLogger(tmp_path / "d")]
    return [*writers, JSONLogger(tmp_path / "e"), Profiler(tmp_path / "f")]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("batches", [1, 3, True])
def test_fast_dev_run_limits_the_batches_of_everything_and_writes_no_files(batches, tmp_path):
    hooks, file, trainer = Hooks(), io.StringIO(), make()
    callbacks = [*files_of(tmp_path), EarlyStopping(patience=3), hooks, ProgressBar(file=file)]
    options = {"epochs": 50, "validation_freq": 10, "validation_steps": 4, "resume": "auto"}
    history = trainer.fit(X, Y, batch_size=4, validation_data=(X, Y), callbacks=callbacks, fast_dev_run=batches, **options)
    logs = ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert hooks.calls == ["train", *["step"] * batches, *["test"] * batches, ("epoch", 0, logs), "end"]
    assert trainer.step == batches and history.epoch == [0] and os.listdir(tmp_path) == []
    note = f"fast_dev_run: runs at most {int(batches)} batches of training and of each validation, and writes no files. Left out: "
    assert file.getvalue().startswith(note + "ModelCheckpoint, BestCheckpoint, TensorBoard, CSVLogger, JSONLogger, Profiler.\n")


def test_fast_dev_run_runs_data_with_fewer_batches_once(tmp_path):
    hooks = Hooks()
    sets = {"few": (X[:8], Y[:8]), "stream": lambda: iter([(X[:4], Y[:4])] * 9)}
    make().fit(X[:12], Y[:12], batch_size=4, validation_data=sets, callbacks=[hooks], fast_dev_run=5, verbose=0)
    assert hooks.calls[1:-2] == ["step"] * 3 + ["test"] * (2 + 5)


def test_fast_dev_run_also_limits_endless_data_with_steps_per_epoch():
    trainer, hooks = make(), Hooks()

    def endless():
        while True:
            yield X[:4], Y[:4]

    trainer.fit(endless, steps_per_epoch=100, epochs=7, callbacks=[hooks], fast_dev_run=2, verbose=0)
    assert trainer.step == 2 and hooks.calls.count("step") == 2


def test_fast_dev_run_is_off_with_0_and_takes_only_numbers(tmp_path):
    trainer = make()
    trainer.fit(X, Y, batch_size=4, callbacks=[ModelCheckpoint(tmp_path)], fast_dev_run=0, verbose=0)
    assert trainer.step == 10 and os.listdir(tmp_path)
    for wrong in (-1, 1.5, "yes"):
        with pytest.raises(ConfigError, match=r"fast_dev_run must be a number of batches, or 0 for all data\. Received"):
            trainer.fit(X, Y, fast_dev_run=wrong)


# -- overfit_batches --


@pytest.mark.slow
def test_every_epoch_trains_on_the_first_batches_and_the_model_memorizes_them():
    trainer, seen = make(), []
    look = fitflax.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(trainer.step))
    history = trainer.fit(X, Y, batch_size=4, epochs=60, validation_data=(X, Y), overfit_batches=2, callbacks=[look], verbose=0)
    assert seen[:3] == [2, 4, 6] and len(history.history["val_loss"]) == 60
    assert history.history["accuracy"][-1] == 1.0 > trainer.evaluate(X, Y, verbose=0)["accuracy"]
    alone = make()
    alone.fit(X[:8], Y[:8], batch_size=4, epochs=60, shuffle=False, validation_data=(X, Y), verbose=0)
    jax.tree.map(np.testing.assert_array_equal, trainer.state.params, alone.state.params)


def test_batches_of_a_stream_are_read_once_and_may_be_fewer_than_requested():
    made = []

    def batches():
        made.append(1)
        for index in range(5):
            yield X[4 * index : 4 * index + 4] if index < 4 else X[:2], Y[:4] if index < 4 else Y[:2]

    trainer = make()
    trainer.fit(batches, epochs=3, overfit_batches=9, verbose=0)
    assert trainer.step == 15 and len(made) == 1
    one_shot = iter([(X[:4], Y[:4])] * 5)
    make().fit(one_shot, epochs=3, overfit_batches=2, verbose=0)
    assert len(list(one_shot)) == 3


@pytest.mark.slow
def test_a_resumed_run_continues_with_the_same_batches(tmp_path):
    def run(name, steps):
        trainer = make()
        callbacks = [ModelCheckpoint(tmp_path / name)]
        trainer.fit(X, Y, batch_size=4, steps=steps, overfit_batches=3, callbacks=callbacks, resume="auto", verbose=0)
        return jax.tree.map(np.asarray, trainer.state.params)

    run("stopped", 4)
    jax.tree.map(np.testing.assert_array_equal, run("stopped", 8), run("never", 8))


def test_batches_of_a_loader_that_reuses_its_buffer_are_copied():
    buffer = np.zeros((2, 1), np.float32)

    def batches():
        for value in (1.0, 2.0):
            buffer[:] = value
            yield buffer

    few = FirstBatches(adapt(batches), 2)
    assert [float(triple.x[0, 0]) for triple in few.open(Position())] == [1.0, 2.0]
    assert [float(triple.x[0, 0]) for triple in few.open(Position(examples=2))] == [2.0]


def test_data_without_batches_is_an_error():
    with pytest.raises(DataError, match="The data yields no batch"):
        make().fit(lambda: iter([]), overfit_batches=2, verbose=0)
