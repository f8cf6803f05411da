"""`JSONLogger`: one object per epoch, each epoch exactly once, and other files are left alone."""

import errno
import json
import pathlib

import flax.linen as nn
import numpy as np
import pytest

import fitflax
from fitflax.callbacks import CSVLogger, JSONLogger, LambdaCallback, ModelCheckpoint
from fitflax.errors import CallbackError
from fitflax.metrics import SampleCollector

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 4)).astype(np.float32), RNG.normal(size=(8, 3)).astype(np.float32)


def run(path, *, more=(), trainer=None, append=False, **options):
    trainer = trainer or fitflax.Trainer(nn.Dense(3))
    trainer.compile("sgd", "mse", ["mae"], learning_rate=0.1)
    return trainer.fit(X, Y, batch_size=4, callbacks=[JSONLogger(path, append=append), *more], verbose=0, **options)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_epoch_is_a_line_with_the_values_of_the_history(tmp_path):
    history = run(tmp_path / "deep" / "log.jsonl", epochs=3, validation_data=(X, Y), validation_freq=2)
    rows = rows_of(tmp_path / "deep" / "log.jsonl")
    assert [list(row) for row in rows][:2] == [["epoch", "step", "loss", "mae"], ["epoch", "step", "loss", "mae", "val_loss", "val_mae"]]
    assert [(row["epoch"], row["step"]) for row in rows] == list(zip(history.epoch, history.steps, strict=True))
    assert [row["loss"] for row in rows] == history.history["loss"]


def test_values_that_json_cannot_represent_are_converted(tmp_path):
    strange = {
        "nan": float("nan"),
        "inf": -np.inf,
        "matrix": np.array([[1, 2], [3, np.nan]]),
        "scalar": np.float32(0.5),
        "text": "ä",
        "none": None,
        "pair": (1, True),
    }
    add = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(strange))
    run(tmp_path / "log.jsonl", more=[add])
    (row,) = rows_of(tmp_path / "log.jsonl")
    expected = {"nan": "nan", "inf": "-inf", "matrix": [[1, 2], [3, "nan"]], "scalar": 0.5, "text": "ä", "none": None, "pair": [1, True]}
    assert {key: row[key] for key in strange} == expected


def test_a_resumed_run_has_each_epoch_once(tmp_path):
    def start(name, steps):
        return run(tmp_path / name / "log.jsonl", more=[ModelCheckpoint(tmp_path / name / "checkpoints")], steps=steps, resume="auto")

    start("stopped", 3)  # Inside its second epoch, which is closed.
    assert [row["epoch"] for row in rows_of(tmp_path / "stopped" / "log.jsonl")] == [0, 1]
    start("stopped", 8)
    start("never", 8)
    assert (tmp_path / "stopped" / "log.jsonl").read_text() == (tmp_path / "never" / "log.jsonl").read_text()


@pytest.mark.parametrize("steps", [1, 3])
def test_starting_a_finished_run_that_ended_inside_an_epoch_again_keeps_all_values_of_its_last_line(steps, tmp_path):
    def start():
        trainer = fitflax.Trainer(nn.Dense(3))
        trainer.compile("sgd", "mse", [SampleCollector(2)])
        add = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(worst=["cat", "dog"], ids=[1, 2], scores=[0.1, 0.2]))
        callbacks = [add, JSONLogger(tmp_path / "log.jsonl"), ModelCheckpoint(tmp_path / "checkpoints")]
        trainer.fit(X, Y, batch_size=4, steps=steps, callbacks=callbacks, resume="auto", verbose=0)
        return (tmp_path / "log.jsonl").read_text()

    first = start()
    assert '"samples": [[' in first.splitlines()[-1] and start() == first
    if steps == 1:  # The checkpoint of a run that is shorter than an epoch does not show that the file belongs to it.
        (tmp_path / "log.jsonl").write_text(f"{first}damaged\n{first}")
        assert [json.loads(line)["step"] for line in start().splitlines()] == [1]


def test_a_new_run_replaces_the_file_or_appends_to_it(tmp_path):
    path = tmp_path / "log.jsonl"
    run(path, epochs=2)
    run(path)
    assert [row["epoch"] for row in rows_of(path)] == [0]
    run(path, epochs=2, append=True)
    assert [row["epoch"] for row in rows_of(path)] == [0, 0, 1]


@pytest.mark.parametrize("end", ["lo", "pr\u00e9"])
def test_an_incomplete_last_line_is_dropped(end, tmp_path):
    path = tmp_path / "log.jsonl"
    data = f'{{"epoch": 0, "loss": 1}}\n{{"epoch": 1, "{end}'.encode()
    path.write_bytes(data if end.isascii() else data[:-1])  # May end in the middle of a character.
    run(path, append=True)
    assert [row["epoch"] for row in rows_of(path)] == [0, 0]


def test_blank_lines_are_ignored_and_only_a_newline_ends_a_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('\n{"epoch": 0, "note": "a\u2028b\x85c"}\n\n  \n{"epoch": 1}')
    run(path, append=True)
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    assert [row["epoch"] for row in rows] == [0, 1, 0] and rows[0]["note"] == "a\u2028b\x85c"


@pytest.mark.parametrize(
    ("text", "append", "fault"),
    [
        ("epoch,loss\n0,1\n", False, "would replace .*its first line has no 'epoch'"),
        ("[1, 2]\n", True, "cannot continue the file .*its line 1 has no 'epoch'"),
        ('{"epoch": 0}\nnonsense\n{"epoch": 1}\n', True, "cannot continue the file .*its line 2 is not JSON"),
    ],
)
def test_a_file_of_another_kind_is_left_alone(text, append, fault, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(CallbackError, match=f"JSONLogger {fault}"):
        run(path, append=append)
    assert path.read_text() == text


def test_a_file_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path):
    trainer = fitflax.Trainer(nn.Dense(3))
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(CallbackError, match=r"JSONLogger cannot write .*log\.jsonl"):
        run(tmp_path / "log.jsonl", trainer=trainer)
    assert trainer.step == 0


def test_loading_the_state_of_a_run_without_rows_leaves_the_log_of_another_run_unchanged(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"epoch": 0, "step": 9, "loss": 5.0}\n')
    logger = JSONLogger(path)
    logger.load_state_dict({"lines": 0})
    assert len(rows_of(path)) == 1 and logger._rows == []


def test_appending_to_a_file_that_is_not_text_is_one_clear_error_and_does_not_change_it(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"epoch": 0}\n\xff\n')
    with pytest.raises(CallbackError, match=r"JSONLogger cannot continue the file .*log\.jsonl: it is not a text file\. Move the file, or"):
        run(path, append=True)
    assert path.read_bytes() == b'{"epoch": 0}\n\xff\n'


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("logger", [JSONLogger, CSVLogger])
def test_a_log_that_cannot_be_read_is_one_clear_error_and_stays_unchanged(logger, append, tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    path, write = tmp_path / "log", pathlib.Path.open
    path.write_text("epoch,loss\n0,0.5\n")
    monkeypatch.setattr(pathlib.Path, "read_text", refuse)
    monkeypatch.setattr(pathlib.Path, "read_bytes", refuse)
    monkeypatch.setattr(pathlib.Path, "open", lambda self, mode="r", *rest, **options: refuse() if "r" in mode else write(self, mode, *rest, **options))
    trainer = fitflax.Trainer(nn.Dense(3))
    trainer.compile("sgd", "mse")
    with pytest.raises(CallbackError, match=rf"{logger.__name__} cannot read .*log: Permission denied\."):
        trainer.fit(X, Y, callbacks=[logger(path, append=append)], verbose=0)
    monkeypatch.undo()
    assert path.read_text() == "epoch,loss\n0,0.5\n" and trainer.step == 0
