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
from fitflax.callbacks.notebook import Curves, Screen, is_notebook, shown
from fitflax.parallel import DataParallel

X, Y = np.ones((8, 4), np.float32), np.zeros((8, 3), np.float32)


class OutStream(io.StringIO):
    """Stands in for the stream with which ipykernel replaces standard output."""


@pytest.fixture
def outputs(monkeypatch):
    """Returns the outputs below the cell, each a list of the texts that it has shown."""
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


def test_a_run_is_one_output_with_moving_bars_and_nothing_else_is_printed(outputs, trainer):
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
def test_each_call_of_evaluate_or_predict_has_its_own_output(call, line, outputs, trainer):
    trainer.build((X, Y))
    for _ in range(2):
        getattr(trainer, call)(*((X, Y) if call == "evaluate" else (X,)), batch_size=2, callbacks=[ProgressBar(file=OutStream())], verbose=1)
    assert [texts[-1].startswith(line) for texts in outputs] == [True, True]


def test_a_run_shows_the_curves_of_its_losses_next_to_the_text(outputs, trainer, monkeypatch):
    seen = []
    display = sys.modules["IPython.display"].display

    def record(data, **options):
        display(data, **options)
        seen.append(data)
        return types.SimpleNamespace(update=lambda data, *, raw: seen.append(data))

    monkeypatch.setattr(sys.modules["IPython.display"], "display", record)
    trainer.fit(X, Y, batch_size=2, epochs=2, validation_data={"a": (X, Y)}, callbacks=[ProgressBar(refresh_seconds=0, file=OutStream())], verbose=1)
    assert "text/html" not in seen[0]
    page = seen[-1]["text/html"]
    assert page.startswith("<pre") and page.endswith("</svg>") and "Epoch 2/2: 4/4" in page
    assert ">loss</text>" in page and ">a_loss</text>" in page and ">step 8</text>" in page
    trainer.evaluate(X, Y, callbacks=[ProgressBar(file=OutStream())], verbose=1)
    assert "text/html" not in seen[-1]


def test_curves_stay_small_and_omit_values_that_cannot_be_plotted():
    curves = Curves()
    for step in range(1000):
        curves.add("loss", step, float("nan") if step % 3 == 0 else 1 / (step + 1))
    curves.add("loss", 998, 0.25)  # Another value for the last step.
    curves.add("<b>", 1, 0.0)
    points = curves.svg().split('points="')[1].split('"')[0].split()
    assert 100 < len(points) <= 301 and "nan" not in curves.svg() and "&lt;b&gt;" in curves.svg()
    assert not Curves() and bool(curves)


def test_another_value_for_a_step_replaces_the_first():
    curves = Curves()
    for step, value in ((1, 2.0), (2, 1.0), (2, 0.5)):
        curves.add("loss", step, value)
    assert len(curves.svg().split('points="')[1].split('"')[0].split()) == 2


def test_a_summary_is_a_scrollable_box(outputs, trainer, monkeypatch):
    seen = []
    monkeypatch.setattr(sys.modules["IPython.display"], "display", lambda data, *, raw: seen.append(data))
    monkeypatch.setattr(sys, "stdout", OutStream())
    trainer.summary((X, Y))
    (data,) = seen
    assert "Dense" in data["text/plain"] and data["text/html"].startswith('<div style="overflow-x: auto"><pre') and not sys.stdout.getvalue()
    file = io.StringIO()
    trainer.summary((X, Y), file=file)
    assert file.getvalue() == data["text/plain"] + "\n"


def test_after_an_error_the_output_shows_the_final_state(outputs, trainer):
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


def test_only_the_output_stream_of_a_cell_counts_as_a_notebook(outputs):
    assert is_notebook(OutStream()) and not is_notebook(io.StringIO()) and not is_notebook(sys.__stdout__)


def test_a_screen_is_updated_at_most_once_per_interval_and_at_the_end(outputs):
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


def test_a_shown_figure_has_an_image_and_can_still_be_pickled():
    figure = shown(Figure(figsize=(1, 1)))
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert isinstance(pickle.loads(pickle.dumps(figure)), Figure)
    history = fitflax.History()
    history.on_epoch_end(0, {"loss": 0.5})
    assert history.plot()._repr_png_().startswith(b"\x89PNG")
