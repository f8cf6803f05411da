"""Checkpoints that version 0.1 wrote stay readable: they are restored and resumed. They are in `data/`, as that version wrote them."""

import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import ModelCheckpoint
from fitflax.checkpoints.checkpoint_files import read_metadata
from fitflax.parallel import DataParallel

DATA = pathlib.Path(__file__).with_name("data")
X = np.arange(48, dtype=np.float32).reshape(16, 3) / 48
Y = X.sum(axis=1, keepdims=True)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x)))


def fit(*callbacks, steps, **options):
    trainer = fitflax.Trainer(Net(), seed=5, parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("adam", "mse", ["mae"], learning_rate=0.01)
    history = trainer.fit(X, Y, batch_size=4, steps=steps, verbose=0, validation_data=(X, Y), callbacks=callbacks, **options)
    return trainer, history.history


@pytest.mark.parametrize("version", [path.name for path in sorted(DATA.iterdir())])
def test_a_run_of_an_earlier_version_is_restored_and_resumed(version, tmp_path):
    directory = pathlib.Path(shutil.copytree(DATA / version / "checkpoints", tmp_path / "checkpoints"))
    fitflax.checkpoints.CheckpointStore(directory).verify()
    trainer = fitflax.Trainer(Net())
    trainer.compile("adam", "mse", learning_rate=0.01)
    trainer.build((X, Y))
    trainer.restore(directory)
    assert trainer.step == 6
    np.testing.assert_allclose(trainer.predict(X), np.load(DATA / version / "predictions.npz")["predictions"], rtol=1e-5)
    continued, resumed = fit(ModelCheckpoint(directory), steps=12, resume="auto")
    assert continued.step == 12
    # The first epoch comes from the file. Later epochs continue from it, with the rounding of another processor.
    (first,) = rows_of(directory / "step_00000006")
    assert resumed["loss"][0] == first["loss"] and resumed["val_loss"][0] == first["val_loss"]
    assert resumed["loss"] == sorted(resumed["loss"], reverse=True) and len(resumed["loss"]) == 3


def rows_of(path):
    return [row["logs"] for row in read_metadata(path)["history"]]
