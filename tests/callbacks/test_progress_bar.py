import io
import re
import sys
import time
import types

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import fitflax
from fitflax.callbacks import LambdaCallback, ModelCheckpoint, ProgressBar, progress_bar
from fitflax.errors import CallbackError, ConfigError
from fitflax.logs import Logs
from fitflax.parallel import DataParallel

X, Y = np.ones((8, 4), np.float32), np.zeros((8, 3), np.float32)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def make():
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(0.01), loss="mse")
    return trainer


def fit(*callbacks, trainer=None, **kwargs):
    return (trainer or make()).fit(X, Y, **{"batch_size": 2, "epochs": 2, "validation_data": (X, Y), "callbacks": callbacks, "verbose": 1, **kwargs})


def screen(text):
    """Returns the final lines of a terminal: what follows the last carriage return in each, with tqdm's moves up and down applied."""
    lines, row = [""], 0
    for part in re.split(r"(\n|\r|\x1b\[A)", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[A":
            row -= 1
        elif part not in ("", "\r"):
            lines[row] = part + lines[row][len(part) :]
    return [line.rstrip() for line in lines if line.strip()]


# --- Plain lines ---


def plain(text):
    """Returns plain lines with 0 for each time."""
    return [re.sub(r"\d+s - \d+(s|ms|us)/step", "0s - 0s/step", line) for line in text.splitlines()]


def test_without_a_terminal_an_epoch_is_two_lines_as_in_keras():
    file = io.StringIO()
    history = fit(ProgressBar(file=file)).history
    *lines, summary = plain(file.getvalue())
    expected = []
    for n in range(2):
        expected += [f"Epoch {n + 1}/2", f"4/4 - 0s - 0s/step - loss: {history['loss'][n]:.4f} - val_loss: {history['val_loss'][n]:.4f}"]
    assert lines == expected
    assert re.fullmatch(r"8 steps in \d+\.\d s( \(.*\))?, [\d,]+ examples/s while training\.", summary)


def test_small_numbers_are_printed_as_in_keras_and_arrays_are_omitted():
    file = io.StringIO()
    values = {"rate": 0.001, "zero": 0.0, "count": 12, "low": -0.25, "nan": float("nan"), "matrix": np.eye(2)}
    fit(LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(values)), ProgressBar(file=file), epochs=1, validation_data=None)
    assert plain(file.getvalue())[1].endswith(" - rate: 1.0000e-03 - zero: 0.0000e+00 - count: 12.0000 - low: -0.2500 - nan: nan")


def test_a_resume_in_the_middle_of_an_epoch_is_announced_and_only_its_steps_are_counted(tmp_path):
    file = io.StringIO()
    options = {"validation_data": None, "resume": "auto", "steps": 5, "epochs": None}
    fit(ModelCheckpoint(tmp_path), **options)
    fit(ModelCheckpoint(tmp_path), ProgressBar(file=file), **{**options, "steps": 8})
    first, *lines, summary = plain(file.getvalue())
    assert first == "Resumed at step 5, epoch 2." and lines[0] == "Epoch 2" and lines[1].startswith("4/4 - 0s - 0s/step - loss: ")
    assert len(lines) == 2 and summary.startswith("3 steps in ")


def test_an_epoch_resumed_in_the_middle_has_a_bar_in_a_terminal(tmp_path):
    file = Terminal()
    options = {"validation_data": None, "resume": "auto", "steps": 5, "epochs": None}
    fit(ModelCheckpoint(tmp_path), **options)
    fit(ModelCheckpoint(tmp_path), ProgressBar(file=file), **{**options, "steps": 8})
    first, bar, summary = screen(file.getvalue())
    assert first == "Resumed at step 5, epoch 2." and re.match(r"Epoch 2: 4/4 .* loss ", bar) and summary.startswith("3 steps in ")


def test_the_time_per_step_of_a_resumed_epoch_counts_every_step_of_a_call(monkeypatch):
    file, now, logs = io.StringIO(), iter([0.0, 3.0]), Logs()
    bar = ProgressBar(file=file)
    monkeypatch.setattr(progress_bar, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    bar.trainer, bar.params = types.SimpleNamespace(step=5, stop_reason=None), {"first_epoch": 1, "first_step_in_epoch": 1, "steps": 4}
    logs["loss"] = 0.5
    bar.on_train_begin({})
    bar.on_train_batch_end(3, logs)  # One call ran steps 2, 3 and 4 of the epoch.
    bar.on_epoch_end(1, logs)
    assert file.getvalue().splitlines() == ["Epoch 2", "4/4 - 3s - 1s/step - loss: 0.5000"]


@pytest.fixture
def narrow(monkeypatch):
    """Limits bars to 80 columns."""
    make_bar = ProgressBar._make_bar

    def narrow(self, *arguments, **options):
        bar = make_bar(self, *arguments, **options)
        bar.dynamic_ncols, bar.ncols = None, 80
        return bar

    monkeypatch.setattr(ProgressBar, "_make_bar", narrow)


@pytest.mark.slow
@pytest.mark.usefixtures("narrow")
def test_values_of_an_evaluation_that_do_not_fit_the_terminal_are_below_its_bar():
    file, trainer = Terminal(), make()
    trainer.compile(optax.sgd(0.01), loss="mse", metrics=["mae", "rmse", "mape"])
    trainer.build((X, Y))
    trainer.evaluate(X, Y, callbacks=[ProgressBar(file=file)], verbose=1)
    assert re.fullmatch(r"  loss [\d.]+, mae [\d.]+, rmse [\d.]+, mape [\d.e+]+", screen(file.getvalue())[1]), file.getvalue()


def test_the_summary_says_where_the_time_went():
    file, trainer = io.StringIO(), make()

    def slow():
        for _ in range(3):
            time.sleep(0.1)
            yield X, Y

    trainer.fit(slow, validation_data=slow, callbacks=[ProgressBar(file=file)])
    summary = file.getvalue().splitlines()[-1]
    seconds = {what: float(number) for number, what in re.findall(r"([\d.]+) s (stepping|compiling|waiting for data|evaluating)", summary)}
    assert {"compiling", "waiting for data", "evaluating"} <= set(seconds)
    assert seconds["waiting for data"] >= 0.2 and seconds["evaluating"] >= 0.2
    total = float(re.match(r"3 steps in ([\d.]+) s", summary).group(1))
    assert sum(seconds.values()) == pytest.approx(total, abs=0.3)


def test_if_the_number_of_epochs_is_unknown_only_the_current_epoch_is_shown():
    file = io.StringIO()
    fit(ProgressBar(file=file), epochs=None, steps=5)
    assert file.getvalue().splitlines()[:-1:2] == ["Epoch 1", "Epoch 2"]


def test_values_added_by_other_callbacks_are_shown():
    file = io.StringIO()
    add = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(added=0.5, note="fine"))
    fit(add, ProgressBar(file=file), epochs=1)
    assert file.getvalue().splitlines()[1].endswith("added: 0.5000 - note: fine")


def test_evaluation_prints_one_line_and_prediction_none():
    file, trainer = io.StringIO(), make()
    trainer.build((X, Y))
    loss = trainer.evaluate(X, Y, callbacks=[ProgressBar(file=file)])["loss"]
    trainer.predict(X, callbacks=[ProgressBar(file=file)], verbose=1)
    assert plain(file.getvalue()) == [f"1/1 - 0s - 0s/step - loss: {loss:.4f}"]


def test_the_reason_for_a_stop_is_shown():
    file, trainer = io.StringIO(), make()
    fit(ProgressBar(file=file), LambdaCallback(on_train_batch_end=lambda batch, logs: trainer.stop("seen enough")), trainer=trainer)
    assert file.getvalue().splitlines()[-2] == "Stopped at step 1: seen enough."


@pytest.mark.slow
def test_the_default_bar_writes_to_standard_output_and_verbose_0_prints_nothing(capsys):
    fit(epochs=1)
    assert capsys.readouterr().out.startswith("Epoch 1/1\n4/4 - ")
    fit(epochs=1, verbose="auto")
    assert capsys.readouterr().out.startswith("Epoch 1/1\n4/4 - ")
    trainer = make()
    fit(trainer=trainer, verbose=0)
    trainer.evaluate(X, Y, verbose=0)
    trainer.predict(X)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_bar_passed_by_the_user_replaces_the_default_one(capsys):
    file = io.StringIO()
    fit(ProgressBar(file=file), epochs=1)
    assert file.getvalue().count("\n") == 3 and capsys.readouterr().out == ""


# --- A terminal ---


def test_in_a_terminal_each_epoch_leaves_its_bar_and_validation_leaves_nothing():
    file = Terminal()
    history = fit(ProgressBar(file=file, refresh_seconds=0))
    *lines, summary = screen(file.getvalue())
    assert len(lines) == 2 and summary.startswith("8 steps in ")
    for number, line in enumerate(lines, start=1):
        loss, validation = history.history["loss"][number - 1], history.history["val_loss"][number - 1]
        assert line.startswith(f"Epoch {number}/2: 4/4 |") and line.endswith(f"loss {loss:.4g}, val_loss {validation:.4g}")
    assert "validation" in file.getvalue()


def test_a_bar_shows_computed_values_and_counts_its_steps():
    file = Terminal()
    fit(ProgressBar(file=file, refresh_seconds=0), epochs=1)
    counts = [int(count) for count in re.findall(r"Epoch 1/1: (\d)/4", file.getvalue())]
    assert counts == sorted(counts) and counts[-1] == 4 and 1 in counts
    assert "loss" in file.getvalue()


def test_a_bar_is_not_drawn_more_often_than_requested():
    often, seldom = Terminal(), Terminal()
    fit(ProgressBar(file=often, refresh_seconds=0), batch_size=1, epochs=1)
    fit(ProgressBar(file=seldom, refresh_seconds=1000), batch_size=1, epochs=1)
    assert len(seldom.getvalue()) < len(often.getvalue())
    assert screen(seldom.getvalue())[-2].startswith("Epoch 1/1: 8/8 |")


def test_the_length_of_a_stream_is_learned_in_its_first_epoch():
    file = Terminal()
    make().fit(lambda: iter([(X, Y)] * 3), epochs=2, callbacks=[ProgressBar(file=file, refresh_seconds=0)])
    *lines, _ = screen(file.getvalue())
    assert len(lines) == 2 and all("3" in line and "loss" in line for line in lines)


def test_evaluation_and_prediction_each_leave_a_bar():
    file, trainer = Terminal(), make()
    trainer.build((X, Y))
    loss = trainer.evaluate(X, Y, batch_size=2, callbacks=[ProgressBar(file=file)])["loss"]
    trainer.predict(X, batch_size=2, callbacks=[ProgressBar(file=file)], verbose=1)
    evaluation, prediction = screen(file.getvalue())
    assert evaluation.startswith("Evaluation: 4/4 |") and evaluation.endswith(f"loss {loss:.4g}")
    assert prediction.startswith("Prediction: 4/4 |")


def test_verbose_2_prints_lines_in_a_terminal_too(monkeypatch):
    file = Terminal()
    monkeypatch.setattr(sys, "stdout", file)
    fit(verbose=2)
    assert len(file.getvalue().splitlines()) == 5 and "\r" not in file.getvalue()


def test_verbose_1_shows_a_bar_in_a_terminal(monkeypatch):
    file = Terminal()
    monkeypatch.setattr(sys, "stdout", file)
    fit()
    assert "\r" in file.getvalue() and len(screen(file.getvalue())) == 3


def test_an_error_closes_the_bar():
    file = Terminal()

    def fail(batch, logs):
        raise ArithmeticError

    bar = ProgressBar(file=file)
    with pytest.raises(ArithmeticError):
        fit(bar, LambdaCallback(on_train_batch_end=fail))
    assert bar._bar is None and file.getvalue().endswith("\n")


def test_a_run_that_fails_before_its_first_step_has_no_summary():
    def fail(logs):
        raise ArithmeticError

    trainer, file = make(), io.StringIO()
    fit(trainer=trainer, verbose=0)
    with pytest.raises(ArithmeticError):
        fit(ProgressBar(file=file), LambdaCallback(on_train_begin=fail), trainer=trainer)
    assert "steps in" not in file.getvalue()


def test_an_instance_can_be_used_twice():
    file, bar = io.StringIO(), None
    bar = ProgressBar(file=file)
    trainer = make()
    fit(bar, trainer=trainer, epochs=1)
    fit(bar, trainer=trainer, epochs=1)
    assert file.getvalue().splitlines()[::3] == ["Epoch 1/1"] * 2


# --- A notebook ---


@pytest.mark.slow
def test_an_executed_notebook_keeps_the_final_bars_and_a_figure(process_env, monkeypatch, tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for name, value in process_env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JUPYTER_ALLOW_INSECURE_WRITES", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    code = """
import warnings; warnings.simplefilter("ignore")
import numpy as np, flax.linen as nn, fitflax
trainer = fitflax.Trainer(nn.Dense(3))
trainer.compile("sgd", loss="mse")
x, y = np.ones((8, 4), np.float32), np.zeros((8, 3), np.float32)
history = trainer.fit(x, y, batch_size=2, epochs=3, validation_data=(x, y))
history.plot()
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "python3", "language": "python"}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    bars, figure = notebook.cells[0].outputs
    assert (bars["output_type"], figure["output_type"]) == ("display_data", "execute_result")
    *lines, summary = bars["data"]["text/plain"].splitlines()
    assert len(lines) == 3 and summary.startswith("12 steps in ")
    for number, line in enumerate(lines, start=1):
        assert re.fullmatch(rf"Epoch {number}/3: 4/4 \|█{{20}}\| .* batch/s, loss [\d.]+, val_loss [\d.]+", line)
    assert figure["data"]["image/png"]


# --- Errors ---


def test_invalid_arguments_are_errors():
    with pytest.raises(CallbackError, match=r"ProgressBar\(refresh_seconds=...\) must be at least 0. Received: -1"):
        ProgressBar(refresh_seconds=-1)
    with pytest.raises(ConfigError, match=r"verbose must be 0, 1, 2 or 'auto'. Received: 3"):
        fit(verbose=3)


NINE = ", ".join(["loss 0.5"] * 9)
EIGHT_AND_ONE = "  " + ", ".join(["loss 0.5"] * 7) + ",\n  loss 0.5, loss 0.5"


@pytest.mark.parametrize(("text", "overflow"), [("loss 0.5", ""), (NINE, EIGHT_AND_ONE)])
def test_values_that_do_not_fit_the_terminal_are_for_separate_lines(text, overflow):
    file = Terminal()
    bar = ProgressBar(file=file)._make_bar("Epoch 1/1", 4, leave=True)
    bar.dynamic_ncols, bar.ncols = None, 80
    assert ProgressBar._finish(bar, text) == overflow
    bar.close()
    assert len(screen(file.getvalue())[0]) < 80 and ("loss" in screen(file.getvalue())[0]) is not bool(overflow)


def test_a_moving_bar_shows_only_whole_values():
    file = Terminal()
    bar = ProgressBar(file=file)._make_bar("Epoch 1/1", 4, leave=True)
    bar.dynamic_ncols = None
    before = len(bar.format_meter(**{**bar.format_dict, "ncols": None}))
    for room, shown in ((len(", loss 0.5, acc 0.25") + 1, "loss 0.5, acc 0.25"), (len(", loss 0.5, acc 0.25"), "loss 0.5"), (3, "")):
        bar.ncols = before + room
        assert progress_bar._fitting("loss 0.5, acc 0.25", progress_bar._available_width(bar)) == shown
    bar.close()


@pytest.mark.usefixtures("narrow")
def test_a_narrow_terminal_does_not_truncate_the_values_of_a_moving_bar():
    file = Terminal()
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(0.01), loss="mse", metrics=["mae", "rmse", "mape", "msle"])
    wait = LambdaCallback(on_train_batch_end=lambda batch, logs: dict(logs))  # The bar shows only values of steps that have finished.
    trainer.fit(X, Y, batch_size=1, callbacks=[wait, ProgressBar(file=file, refresh_seconds=0)], verbose=1)
    drawn = [part for part in re.split(r"[\r\n]", file.getvalue()) if "batch" in part and "loss" in part]
    assert drawn and all(re.search(r"batch(/s)?(, \w+ [\d.e+-]+)+\s*$", part) and len(part.rstrip()) < 80 for part in drawn), drawn
