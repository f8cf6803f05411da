"""`python -m fitflax plot RUN...`."""

import json

import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.__main__ import main
from fitflax.callbacks import CSVLogger, JSONLogger, ModelCheckpoint, TensorBoard
from fitflax.commands.plot import Point, read_curves
from fitflax.errors import ConfigError

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("adam", "mse")
    callbacks = [
        CSVLogger(directory / "csv/log.csv"),
        JSONLogger(directory / "json/log.jsonl"),
        ModelCheckpoint(directory / "checkpoints"),
        TensorBoard(directory / "board"),
    ]
    trainer.fit(X, Y, epochs=3, batch_size=8, validation_data=(X, Y), callbacks=callbacks, verbose=0)
    return directory, trainer.history.history


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("place", "has_steps", "has_epochs"), [("csv", 0, 1), ("json/log.jsonl", 1, 1), ("checkpoints", 1, 1), ("board", 1, 0)])
def test_the_curves_read_from_the_files_of_each_callback_equal_the_history(run, place, has_steps, has_epochs):
    directory, history = run
    curves = read_curves(directory / place)
    for key in ("loss", "val_loss"):
        expected = [Point(2 * epoch if has_steps else None, epoch if has_epochs else None, value) for epoch, value in enumerate(history[key], start=1)]
        assert [point[:2] for point in curves[key]] == [point[:2] for point in expected]
        assert [point.value for point in curves[key]] == pytest.approx([point.value for point in expected], rel=1e-6)


def test_a_directory_with_all_kinds_of_files_is_read_from_its_event_files(run):
    assert "step/loss" in read_curves(run[0])
    assert read_curves(next((run[0] / "board" / "val").iterdir()))["loss"][0].step == 2


def test_steps_that_a_resumed_run_wrote_again_appear_once(tmp_path):
    from tensorboardX import FileWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.summary import scalar

    for begin, purge in ((0, 0), (5, 3)):
        writer = FileWriter(str(tmp_path / "train"), filename_suffix=f".{begin}")
        if purge:
            writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step=purge)
        for step in range(purge, begin + 4):
            writer.add_summary(scalar("loss", begin + step), step)
        writer.close()
    assert [(point.step, point.value) for point in read_curves(tmp_path)["loss"]] == [(0, 0), (1, 1), (2, 2), *((step, 5 + step) for step in range(3, 9))]


def test_the_newer_of_two_runs_in_a_directory_is_shown(tmp_path):
    for epochs in (3, 2):
        trainer = fitflax.Trainer(nn.Dense(1))
        trainer.compile("adam", "mse")
        trainer.fit(X, Y, epochs=epochs, batch_size=8, callbacks=[TensorBoard(tmp_path)], verbose=0)
    assert [point.step for point in read_curves(tmp_path)["loss"]] == [2, 4]


def test_tensors_with_one_number_are_read_as_scalars(tmp_path):
    from tensorboardX import FileWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.proto.tensor_pb2 import TensorProto

    writer = FileWriter(str(tmp_path))
    tensors = [TensorProto(dtype=1, float_val=[0.5]), TensorProto(dtype=2, tensor_content=np.float64(0.25).tobytes()), TensorProto(dtype=7, string_val=[b"x"])]
    values = [Summary.Value(tag=f"tag{number}", tensor=tensor) for number, tensor in enumerate(tensors)]
    writer.add_event(Event(summary=Summary(value=values)), step=4)
    writer.close()
    assert read_curves(tmp_path) == {"tag0": [Point(4, None, 0.5)], "tag1": [Point(4, None, 0.25)]}


def test_an_image_has_a_plot_for_each_key(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["plot", str(run[0] / "csv"), "-o", str(tmp_path / "plots/run.svg")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'plots/run.svg'}\n"
    text = (tmp_path / "plots/run.svg").read_text()
    assert "<!-- loss -->" in text and "<!-- val_loss -->" in text and "<!-- epoch -->" in text


def test_the_terminal_shows_plots_as_text(run, capsys):
    pytest.importorskip("plotext")
    board, log = str(run[0] / "board"), str(run[0] / "json")
    assert main(["plot", board, log, "--keys", "loss", "val_loss", "--log-y"]) == 0
    printed = capsys.readouterr().out
    assert f"{board}: val_loss" in printed and "step" in printed and "\x1b" not in printed
    assert main(["plot", log, "--keys", "loss", "--x", "epoch"]) == 0
    assert "epoch" in capsys.readouterr().out


def test_values_that_cannot_be_plotted_are_omitted(tmp_path, capsys):
    pytest.importorskip("plotext")
    rows = [{"epoch": 0, "step": 1, "loss": "nan", "zero": 0.0}, {"epoch": 1, "step": 2, "loss": 0.5, "zero": 0.0}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["plot", str(tmp_path), "--log-y"]) == 0
    assert "zero: no positive values" in capsys.readouterr().out
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "a.png"), "--log-y"]) == 0
    (tmp_path / "log.jsonl").write_text(json.dumps({"epoch": 0, "step": 1, "time/steps_per_second": 3.0}) + "\n")
    assert main(["plot", str(tmp_path)]) == 0 and "time/steps_per_second" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "step"), [("10", 10), ("10.0", 10), ("1e3", 1000), ("10.5", None), ("nan", None), ("inf", None), ("best", None)])
def test_steps_of_other_programs_are_read_if_they_are_integers(text, step, tmp_path):
    (tmp_path / "log.csv").write_text(f"step,loss\n{text},0.5\n")
    assert read_curves(tmp_path / "log.csv") == {"loss": [Point(step, None, 0.5)]}


def test_epochs_of_json_lines_that_are_not_numbers_are_unknown(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"epoch": "best", "step": 2, "loss": 0.5}\n{"epoch": NaN, "step": 3.0, "loss": 0.25}\n')
    assert read_curves(tmp_path / "log.jsonl") == {"loss": [Point(2, None, 0.5), Point(3, None, 0.25)]}


def test_an_incomplete_last_line_and_blank_lines_of_a_json_log_are_ignored(tmp_path):
    lines = [json.dumps({"epoch": epoch, "step": 5 * epoch, "loss": 0.5, "note": "a\u2028b"}, ensure_ascii=False) for epoch in range(3)]
    (tmp_path / "log.jsonl").write_bytes("\n\n".join(lines).encode()[:-3])
    assert read_curves(tmp_path / "log.jsonl") == {"loss": [Point(0, 1, 0.5), Point(5, 2, 0.5)]}


def test_inputs_that_cannot_be_plotted_are_one_clear_error(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "log.txt").write_text("nothing\n")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "log.csv").write_bytes(b"epoch,loss\n0,\xff\n")
    (tmp_path / "iter.csv").write_text("iter,loss\n1,0.5\n")
    for arguments, words in (
        ([str(tmp_path / "nowhere")], "no such file or directory"),
        ([str(tmp_path / "empty")], "no event files, JSON lines, CSV"),
        ([str(tmp_path / "log.txt")], "no JSON lines"),
        ([str(tmp_path / "list.jsonl")], "not an object"),
        ([str(tmp_path / "log.csv")], "not a CSV file"),
        ([str(run[0] / "csv"), "--keys", "los"], "Did you mean 'loss'"),
        ([str(run[0] / "csv"), "--x", "step"], "has values without step"),
        *([[str(tmp_path / "iter.csv"), *options], "needs a column step or epoch"] for options in ([], ["--x", "step"], ["--x", "epoch"])),
        ([str(run[0] / "csv"), "-o", str(tmp_path / "run.doc")], "ends with .png"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["plot", *arguments])
        assert ended.value.code == 2 and words in capsys.readouterr().err, arguments


@pytest.mark.parametrize(("module", "options"), [("plotext", []), ("matplotlib.figure", ["-o", "a.png"])])
def test_if_a_package_is_missing_the_error_says_what_to_install(run, monkeypatch, capsys, module, options):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(SystemExit):
        main(["plot", str(run[0] / "csv"), *options])
    assert "pip install 'fitflax[plot]'" in capsys.readouterr().err


def test_rows_without_numbers_are_not_a_run(tmp_path):
    (tmp_path / "log.jsonl").write_text(json.dumps({"epoch": 0, "step": 1, "name": "x", "list": [1]}) + "\n")
    with pytest.raises(ConfigError, match="no run"):
        read_curves(tmp_path)
