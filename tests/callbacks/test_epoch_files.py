"""Files of `CSVLogger` and `JSONLogger` that another program changes: no row is lost, and there is one warning."""

import os
import shutil
import warnings

import flax.linen as nn
import jax
import numpy as np
import pytest

import fitflax
from fitflax.callbacks import CSVLogger, JSONLogger, LambdaCallback, ModelCheckpoint
from fitflax.errors import FitflaxWarning
from fitflax.parallel import DataParallel

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
LOGGERS = {"csv": CSVLogger, "jsonl": JSONLogger}


def run(root, kind, *more, epochs=5, append=False, resume=None):
    """Trains with a validation every second epoch, so that columns are added, and returns the text of the log."""
    trainer = fitflax.Trainer(nn.Dense(1), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("adam", "mse")
    path = root / "logs" / f"log.{kind}"
    callbacks = [LOGGERS[kind](path, append=append), ModelCheckpoint(root / "checkpoints"), *more]
    trainer.fit(X, X[:, :1], epochs=epochs, validation_data=(X, X[:, :1]), validation_freq=2, callbacks=callbacks, verbose=0, resume=resume)
    return path.read_text()


def replace(path, text):
    """Replaces a file as `sed -i` and rsync do."""
    other = path.with_name("other")
    other.write_text(text)
    os.replace(other, path)


def first_lines(path, count):
    return "".join(path.read_text().splitlines(keepends=True)[:count])


CHANGES = {
    "replaced": lambda path: replace(path, path.read_text()),
    "deleted": lambda path: path.unlink(),
    "replaced by an older file": lambda path: replace(path, first_lines(path, 2)),
    "truncated": lambda path: path.write_text(""),
    "appended to": lambda path: path.write_text(f"{path.read_text()}more\n"),
    "deleted with its directory": lambda path: shutil.rmtree(path.parent),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return {kind: run(tmp_path_factory.mktemp(kind), kind) for kind in LOGGERS}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", LOGGERS)
def test_a_file_that_is_changed_during_a_run_is_complete_at_its_end(kind, change, uninterrupted, tmp_path):
    path = tmp_path / "logs" / f"log.{kind}"

    def act(epoch, logs):
        if epoch in (3, 4):  # The second change is repaired without a warning.
            CHANGES[change](path)

    with pytest.warns(FitflaxWarning, match=r"log\.\w+ was replaced, changed or deleted by another program. All rows of this run were written again") as caught:
        text = run(tmp_path, kind, LambdaCallback(on_epoch_begin=act))
    assert text == uninterrupted[kind] and len(caught) == 1


def without_line(path, number):
    lines = path.read_text().splitlines(keepends=True)
    return "".join(lines[:number] + lines[number + 1 :])


LOSSES = {
    "deleted": lambda path: path.unlink(),
    "lacks its last rows": lambda path: replace(path, first_lines(path, 2)),
    "has a gap": lambda path: replace(path, without_line(path, -3)),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", LOGGERS)
def test_a_resume_writes_the_missing_rows(kind, loss, append, uninterrupted, tmp_path):
    path = tmp_path / "logs" / f"log.{kind}"
    earlier = ""
    if append and loss == "has a gap":  # Otherwise rows of the earlier run are lost, too, which nothing can restore.
        run(tmp_path, kind, epochs=2)
        shutil.rmtree(tmp_path / "checkpoints")
        earlier = path.read_text()
    run(tmp_path, kind, epochs=4, append=append)
    LOSSES[loss](path)
    with pytest.warns(FitflaxWarning, match=r"lacks the rows of epochs \[.*\]. All rows of this run were written again") as caught:
        text = run(tmp_path, kind, append=append, resume="auto")
    own = uninterrupted[kind] if kind == "jsonl" or not earlier else "".join(uninterrupted[kind].splitlines(keepends=True)[1:])
    assert text == earlier + own and len(caught) == 1


@pytest.mark.parametrize("kind", LOGGERS)
def test_a_resume_after_an_unchanged_file_or_edited_values_does_not_warn(kind, uninterrupted, tmp_path):
    path = tmp_path / "logs" / f"log.{kind}"
    run(tmp_path, kind, epochs=4)
    edited = path.read_text().replace("0.", "7.", 1)
    replace(path, edited)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = run(tmp_path, kind, resume="auto")
    assert text.startswith(edited) and text.splitlines()[-1] == uninterrupted[kind].splitlines()[-1]


def test_the_state_of_version_0_1_is_loaded(tmp_path):
    logger = CSVLogger(tmp_path / "log.csv")
    logger.on_train_begin({})
    logger.load_state_dict({"rows": 2, "columns": ["epoch", "loss"]})
    with pytest.warns(FitflaxWarning, match=r"lacks the rows of epochs \[0, 1\]"):
        logger.load_history([{"epoch": 0, "step": 1, "logs": {"loss": 0.5}}, {"epoch": 1, "step": 2, "logs": {"loss": 0.25}}])
    logger.close()
    assert (tmp_path / "log.csv").read_text() == "epoch,loss\n0,0.5\n1,0.25\n"
