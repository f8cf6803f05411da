"""What a notebook shows, with a stand-in for IPython's display; tests/test_examples.py runs a notebook in a real kernel."""

import io
import pickle
import sys
import types

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure

import fitflax
from fitflax.callbacks import LambdaCallback, ProgressBar
from fitflax.callbacks.notebook import Screen, is_notebook, shown
from fitflax.parallel import DataParallel

X, Y = np.ones((8, 4), np.float32), np.zeros((8, 3), np.float32)


class OutStream(io.StringIO):
    """What ipykernel puts in place of standard output."""


@pytest.fixture
def outputs(monkeypatch):
    """Returns the outputs below the cell, each a list of the texts that it has had."""
    found = []

    def display(data, *, raw, display_id):
        assert raw and display_id
        found.append([data["text/plain"]])
        return types.SimpleNamespace(update=lambda data, *, raw, texts=found[-1]: texts.append(data["text/plain"]))

    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "ipykernel.iostream", types.SimpleNamespace(OutStream=OutStream))
    return found


@pytest.fixture
def trainer():
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(0.01), loss="mse")
    return trainer


def test_a_training_is_one_output_whose_bars_move_and_nothing_is_printed_beside_it(outputs, trainer):
    file = OutStream()
    trainer.fit(X, Y, batch_size=2, epochs=2, validation_data=(X, Y), callbacks=[ProgressBar(refresh_seconds=0, file=file)], verbose=1)
    (texts,) = outputs
    assert file.getvalue() == ""
    assert len(texts) > 8 and texts[0].startswith("Epoch 1/2: 0/4 |")
    assert any("\n  validation: " in text for text in texts)
    first, second, summary = texts[-1].splitlines()
    assert first.startswith("Epoch 1/2: 4/4 |█") and "val_loss" in first
    assert second.startswith("Epoch 2/2: 4/4 |█") and "val_loss" in second
    assert summary.startswith("8 steps in ")


@pytest.mark.parametrize(("call", "line"), [("evaluate", "Evaluation: 4/4 |"), ("predict", "Prediction: 4/4 |")])
def test_an_evaluation_or_prediction_by_itself_has_an_output_of_its_own(call, line, outputs, trainer):
    trainer.build((X, Y))
    for _ in range(2):
        getattr(trainer, call)(*((X, Y) if call == "evaluate" else (X,)), batch_size=2, callbacks=[ProgressBar(file=OutStream())], verbose=1)
    assert [texts[-1].startswith(line) for texts in outputs] == [True, True]


def test_what_an_error_ends_is_shown_as_it_was_at_the_end(outputs, trainer):
    def fail(batch, logs):
        raise RuntimeError("no more")

    bar = ProgressBar(refresh_seconds=100, file=OutStream())
    with pytest.raises(RuntimeError, match="no more"):
        trainer.fit(X, Y, batch_size=2, callbacks=[LambdaCallback(on_train_batch_end=fail), bar], verbose=1)
    assert len(outputs[0]) == 2 and outputs[0][-1].splitlines()[-1].startswith("1 steps in ")
    assert bar._stream is bar.file


def test_plain_lines_stay_plain_lines_in_a_notebook(outputs, trainer, monkeypatch):
    monkeypatch.setattr(sys, "stdout", OutStream())
    trainer.fit(X, Y, batch_size=2, verbose=2)
    assert sys.stdout.getvalue().startswith("Epoch 1/1\n4/4 - ") and not outputs


def test_what_goes_elsewhere_than_below_a_cell_is_no_notebooks(outputs):
    assert is_notebook(OutStream()) and not is_notebook(io.StringIO()) and not is_notebook(sys.__stdout__)


def test_a_screen_is_replaced_no_more_often_than_it_should_and_at_the_end(outputs):
    screen = Screen(seconds=100)
    for number in range(5):
        screen.write(f"\r{number}")
        screen.flush()
    assert outputs == [["0"]]
    screen.close()
    screen.close()
    assert outputs == [["0", "4"]]


def test_an_empty_screen_shows_nothing(outputs):
    screen = Screen(seconds=0)
    screen.write("\n \r")
    screen.flush()
    screen.close()
    assert outputs == []


def test_a_figure_is_a_picture_and_still_a_figure_that_can_be_pickled():
    figure = shown(Figure(figsize=(1, 1)))
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert isinstance(pickle.loads(pickle.dumps(figure)), Figure)
    history = fitflax.History()
    history.on_epoch_end(0, {"loss": 0.5})
    assert history.plot()._repr_png_().startswith(b"\x89PNG")
