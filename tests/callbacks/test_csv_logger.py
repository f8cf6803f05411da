import csv
import io
import math
import os
import sys

import flax.linen as nn
import jax
import numpy as np
import pandas as pd
import pytest

import fitflax
from fitflax.callbacks import CSVLogger, LambdaCallback, ModelCheckpoint
from fitflax.callbacks.callback_list import CallbackList
from fitflax.errors import CallbackError, FitflaxWarning, MonitorError
from fitflax.parallel import DataParallel
from tests.run_script import at, differences, directory_of, rows_of, state_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(18, 4)).astype(np.float32)  # In batches of 4: five steps an epoch.
Y = RNG.normal(size=(18, 3)).astype(np.float32)


def make():
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("adam", loss="mse")
    return trainer


@pytest.fixture(scope="module")
def trainer():
    """One trainer for all tests that do not depend on the step at which it starts."""
    return make()


def fit(*callbacks, trainer, **kwargs):
    return trainer.fit(X, Y, **{"batch_size": 4, "callbacks": callbacks, "verbose": 0, **kwargs})


def write(logger, *rows, begin=True):
    """Logs rows as a run would."""
    if begin:
        logger.on_train_begin({})
    for epoch, logs in enumerate(rows):
        logger.on_epoch_end(epoch, logs)
    logger.on_train_end({})
    return logger


def lines(path):
    return path.read_text().splitlines()


def expected(history):
    """Returns the lines of the file that matches a history."""
    keys = list(dict.fromkeys(key for row in history.rows for key in row["logs"]))
    rows = [[str(row["epoch"]), *(repr(row["logs"][key]) if key in row["logs"] else "NA" for key in keys)] for row in history.rows]
    return [",".join(row) for row in [["epoch", *keys], *rows]]


# --- What it writes ---


def test_case_17_appending_runs_of_one_and_two_epochs_gives_five_lines_with_one_header(tmp_path):
    path, trainer = tmp_path / "log.csv", make()
    histories = [fit(CSVLogger(path), trainer=trainer)]
    logger = CSVLogger(path, append=True)
    histories += [fit(logger, trainer=trainer), fit(logger, trainer=trainer, epochs=2)]
    assert lines(path) == ["epoch,loss", *(line for history in histories for line in expected(history)[1:])]
    assert [line.split(",")[0] for line in lines(path)] == ["epoch", "0", "0", "0", "1"]


def test_case_17_validation_every_third_epoch_is_na_in_all_rows_but_the_third(tmp_path, trainer):
    history = fit(CSVLogger(tmp_path / "log.csv"), trainer=trainer, epochs=5, validation_data=(X, Y), validation_freq=3)
    assert lines(tmp_path / "log.csv") == expected(history)
    table = [line.split(",") for line in lines(tmp_path / "log.csv")]
    assert table[0] == ["epoch", "loss", "val_loss"]
    assert [row[2] == "NA" for row in table[1:]] == [True, True, False, True, True]


def test_pandas_can_read_the_file(tmp_path, trainer):
    history = fit(CSVLogger(tmp_path / "log.csv"), trainer=trainer, epochs=3, validation_data=(X, Y), validation_freq=2)
    table = pd.read_csv(tmp_path / "log.csv")
    np.testing.assert_allclose(table["loss"], history.history["loss"], rtol=1e-12)
    np.testing.assert_allclose(table["val_loss"].dropna(), history.history["val_loss"], rtol=1e-12)


def test_a_column_added_later_is_na_in_earlier_rows(tmp_path):
    write(CSVLogger(tmp_path / "log.csv"), {"loss": 3.0}, {"loss": 2.0, "b": 1.0, "a": 0.5}, {"a": 0.25})
    assert lines(tmp_path / "log.csv") == ["epoch,loss,b,a", "0,3.0,NA,NA", "1,2.0,1.0,0.5", "2,NA,NA,0.25"]


def test_values_added_by_other_callbacks_are_written(tmp_path, trainer):
    add = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(added=epoch))
    fit(CSVLogger(tmp_path / "log.csv"), add, trainer=trainer, epochs=2)
    assert [row[-1] for row in csv.reader(io.StringIO((tmp_path / "log.csv").read_text()))] == ["added", "0", "1"]


def test_validation_inside_an_epoch_is_in_the_row_of_that_epoch_as_in_the_history(tmp_path, trainer):
    history = fit(CSVLogger(tmp_path / "log.csv"), trainer=trainer, epochs=2, validation_data=(X, Y), validation_freq=fitflax.every(steps=3))
    assert len(history.history["val_loss"]) == 2
    assert lines(tmp_path / "log.csv") == expected(history)


def test_floats_are_read_back_exactly(tmp_path):
    values = [0.1, 1 / 3, 5e-324, sys.float_info.max, -0.0, float(np.float32(0.1)), math.nan, math.inf, -math.inf, 1e22, 123456789.123456789]
    write(CSVLogger(tmp_path / "log.csv"), *({"value": value} for value in values))
    read = [row["value"] for row in csv.DictReader(io.StringIO((tmp_path / "log.csv").read_text()))]
    assert [float(text).hex() for text in read] == [value.hex() for value in values]
    assert read[6:9] == ["nan", "inf", "-inf"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(np.float64(0.1), "0.1"), (np.float32(0.5), "0.5"), (np.array(0.25), "0.25"), (np.int64(3), "3"), (4, "4"), (True, "True"), (None, "NA")],
)
def test_all_kinds_of_scalars_are_written(value, text, tmp_path):
    write(CSVLogger(tmp_path / "log.csv"), {"value": value})
    assert lines(tmp_path / "log.csv") == ["epoch,value", f"0,{text}"]


def test_a_jax_scalar_is_written(tmp_path):
    write(CSVLogger(tmp_path / "log.csv"), {"value": jax.numpy.float32(0.5)})
    assert lines(tmp_path / "log.csv") == ["epoch,value", "0,0.5"]


def test_arrays_are_omitted(tmp_path):
    write(CSVLogger(tmp_path / "log.csv"), {"matrix": np.eye(2), "loss": 1.0, "list": [1, 2]}, {"loss": 2.0, "matrix": 0.5})
    assert lines(tmp_path / "log.csv") == ["epoch,loss,matrix", "0,1.0,NA", "1,2.0,0.5"]


def test_text_is_quoted_as_csv_requires(tmp_path):
    text = 'a, "b"\nc'
    write(CSVLogger(tmp_path / "log.csv"), {text: text, "ü": 1})
    assert list(csv.reader(io.StringIO((tmp_path / "log.csv").read_bytes().decode(), newline=""))) == [["epoch", text, "ü"], ["0", text, "1"]]
    write(CSVLogger(tmp_path / "log.csv", append=True), {text: "x", "ü": 2})
    rows = csv.reader(io.StringIO((tmp_path / "log.csv").read_bytes().decode(), newline=""))
    assert list(rows) == [["epoch", text, "ü"], ["0", text, "1"], ["0", "x", "2"]]


def test_a_value_named_epoch_does_not_replace_the_epoch_index(tmp_path):
    write(CSVLogger(tmp_path / "log.csv"), {"epoch": 9.5, "loss": 1.0})
    assert lines(tmp_path / "log.csv") == ["epoch,loss", "0,1.0"]


# --- The file ---


def test_a_row_can_be_read_as_soon_as_its_epoch_ends(tmp_path, trainer):
    seen = []
    peek = LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(len(lines(tmp_path / "log.csv")) if epoch else 0))
    fit(CSVLogger(tmp_path / "log.csv"), peek, trainer=trainer, epochs=4)
    assert seen == [0, 2, 3, 4]


def test_missing_directories_are_created_and_no_other_files_are_left(tmp_path):
    write(CSVLogger(tmp_path / "a/b/log.csv"), {"loss": 1.0}, {"loss": 1.0, "later": 2.0})
    assert os.listdir(tmp_path / "a/b") == ["log.csv"]


def test_a_new_run_overwrites_the_file(tmp_path):
    write(CSVLogger(tmp_path / "log.csv"), {"old": 1.0}, {"old": 2.0})
    write(CSVLogger(tmp_path / "log.csv"), {"new": 3.0})
    assert lines(tmp_path / "log.csv") == ["epoch,new", "0,3.0"]


def test_a_second_fit_with_the_same_instance_overwrites_the_file(tmp_path):
    trainer, logger = make(), CSVLogger(tmp_path / "log.csv")
    fit(logger, trainer=trainer, epochs=3, validation_data=(X, Y))
    history = fit(logger, trainer=trainer, epochs=2)
    assert lines(tmp_path / "log.csv") == expected(history)


def test_a_run_that_fails_before_its_first_row_keeps_the_old_file(tmp_path, trainer):
    (tmp_path / "log.csv").write_text("epoch,loss\n0,1.0\n")
    with pytest.raises(MonitorError):
        fit(CSVLogger(tmp_path / "log.csv"), fitflax.callbacks.EarlyStopping("val_loss"), trainer=trainer)
    fail = LambdaCallback(on_train_batch_begin=lambda batch, logs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(CSVLogger(tmp_path / "log.csv"), fail, trainer=trainer)
    assert (tmp_path / "log.csv").read_text() == "epoch,loss\n0,1.0\n"


def test_the_file_is_closed_when_the_run_fails(tmp_path, trainer):
    logger = CSVLogger(tmp_path / "log.csv")
    fail = LambdaCallback(on_epoch_begin=lambda epoch, logs: 1 / (1 - epoch))
    with pytest.raises(ZeroDivisionError):
        fit(logger, fail, trainer=trainer, epochs=3)
    assert logger._file is None and len(lines(tmp_path / "log.csv")) == 2


def test_everything_is_on_disk_before_a_checkpoint_is_complete(tmp_path, monkeypatch, trainer):
    events, fsync, save = [], os.fsync, fitflax.checkpoints.CheckpointStore.save

    def record_fsync(descriptor):
        path = tmp_path / "log.csv"
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            events.append(len(lines(tmp_path / "log.csv")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(fitflax.checkpoints.CheckpointStore, "save", lambda *args, **kwargs: (events.append("save"), save(*args, **kwargs)))
    fit(CSVLogger(tmp_path / "log.csv"), ModelCheckpoint(tmp_path / "checkpoints", asynchronous=False), trainer=trainer, epochs=3)
    assert events == [2, "save", 3, "save", 4, "save"]


def test_a_file_that_cannot_be_rewritten_is_unchanged(tmp_path, monkeypatch):
    logger = CSVLogger(tmp_path / "log.csv")
    logger.on_train_begin({})
    logger.on_epoch_end(0, {"loss": 1.0})

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CallbackError, match=r"CSVLogger cannot write .*log\.csv: No space left on device"):
        logger.on_epoch_end(1, {"loss": 1.0, "later": 2.0})
    logger.on_train_end({})
    assert os.listdir(tmp_path) == ["log.csv"] and lines(tmp_path / "log.csv") == ["epoch,loss", "0,1.0"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
def test_a_full_disk_raises_only_one_error(tmp_path):
    logger = CSVLogger(tmp_path / "log.csv")
    logger.on_train_begin({})
    logger.on_epoch_end(0, {"loss": 1.0})
    logger._file.close()
    logger._file = open("/dev/full", "w")  # noqa: SIM115 (the logger closes it)
    with pytest.raises(CallbackError, match="No space left on device"):
        logger.on_epoch_end(1, {"loss": 1.0})
    logger.on_train_end({})


def test_a_symbolic_link_stays_a_symbolic_link(tmp_path):
    (tmp_path / "real.csv").write_text("")
    (tmp_path / "log.csv").symlink_to(tmp_path / "real.csv")
    write(CSVLogger(tmp_path / "log.csv"), {"loss": 1.0})
    assert (tmp_path / "log.csv").is_symlink() and lines(tmp_path / "real.csv") == ["epoch,loss", "0,1.0"]


@pytest.mark.parametrize("append", [False, True])
def test_a_path_that_cannot_be_a_file_is_an_error_before_the_first_step(append, tmp_path):
    trainer = make()
    (tmp_path / "log.csv").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "log.csv", tmp_path / "file" / "log.csv"):
        with pytest.raises(CallbackError, match=r"CSVLogger cannot write .*log\.csv: "):
            fit(CSVLogger(path, append=append), trainer=trainer)
    assert trainer.step == 0


# --- Appending ---


def test_appending_keeps_existing_columns_and_rows(tmp_path):
    (tmp_path / "log.csv").write_text("mine,epoch,loss\r\nx,7,1e-3\r\n")
    write(CSVLogger(tmp_path / "log.csv", append=True), {"loss": 2.0, "new": 3.0})
    assert lines(tmp_path / "log.csv") == ["mine,epoch,loss,new", "x,7,1e-3,NA", "NA,0,2.0,3.0"]


@pytest.mark.parametrize(("text", "row"), [("epoch,a,b\n0,1.0,2.0", "0,1.0,2.0"), ("epoch,a,b\n0,1.", "0,1.,NA"), ("epoch,a,b\n0,1.0,2.0\n\n", "0,1.0,2.0")])
def test_appending_repairs_a_file_whose_last_line_is_incomplete_or_empty(text, row, tmp_path):
    (tmp_path / "log.csv").write_text(text)
    write(CSVLogger(tmp_path / "log.csv", append=True), {"a": 3.0, "b": 4.0})
    assert lines(tmp_path / "log.csv") == ["epoch,a,b", row, "0,3.0,4.0"]


def test_appending_repairs_a_file_that_ends_in_the_middle_of_a_character(tmp_path):
    (tmp_path / "log.csv").write_bytes("epoch,a,b\n0,na\u00ef".encode()[:-1])
    write(CSVLogger(tmp_path / "log.csv", append=True), {"a": 3.0, "b": 4.0})
    assert lines(tmp_path / "log.csv") == ["epoch,a,b", "0,na,NA", "0,3.0,4.0"]


@pytest.mark.parametrize("text", [None, "", "\n", "epoch,loss", "epoch,loss\n"])
def test_appending_to_a_missing_file_or_one_without_rows_starts_it(text, tmp_path):
    if text is not None:
        (tmp_path / "log.csv").write_text(text)
    write(CSVLogger(tmp_path / "log.csv", append=True), {"loss": 1.0})
    assert lines(tmp_path / "log.csv") == ["epoch,loss", "0,1.0"]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"step,loss\n0,1.0\n", r"it has no column 'epoch', only \['step', 'loss'\]"),
        (b"hello\n", "it has no column 'epoch'"),
        (b"\xff\xfe\x00\x01", "it is not a CSV file"),
        (b"epoch,loss,loss\n0,1.0,2.0\n", "have the same name"),
        (b"epoch,loss\n0,1.0,2.0\n1,2.0\n", "its row 1 has 3 fields instead of 2"),
        (b"epoch,loss\n0,1.0\n1\n2,1.0\n", "its row 2 has 1 fields instead of 2"),
    ],
)
@pytest.mark.mostly_slow
def test_appending_to_an_invalid_file_fails_before_the_first_step_and_does_not_change_it(data, fault, tmp_path):
    trainer = make()
    (tmp_path / "log.csv").write_bytes(data)
    with pytest.raises(CallbackError, match=rf"CSVLogger cannot continue the file .*log\.csv: .*{fault}.* Move the file, or pass another path\."):
        fit(ModelCheckpoint(tmp_path / "checkpoints"), CSVLogger(tmp_path / "log.csv", append=True), trainer=trainer)
    assert trainer.step == 0 and (tmp_path / "log.csv").read_bytes() == data
    assert not (tmp_path / "checkpoints").exists()


# --- Resuming ---


def run(root, *more, append=False, trainer=None, **kwargs):
    """Trains with new objects, as a new process would; returns the trainer."""
    trainer = trainer or make()
    saving = ModelCheckpoint(root / "checkpoints", keep=None)
    options = {"resume": "auto", "validation_data": (X, Y), "validation_freq": 2, **kwargs}
    fit(saving, CSVLogger(root / "log.csv", append=append), *more, trainer=trainer, **options)
    return trainer


def assert_equal(root, trainer, other_root, other):
    wanted, found = directory_of(other_root / "checkpoints"), directory_of(root / "checkpoints")
    # A run that was stopped inside an epoch also has a checkpoint there.
    unequal = differences(state_of(trainer), state_of(other)) + differences({name: found.get(name, {}) for name in wanted}, wanted)
    unequal = [line for line in unequal if ": closing: " not in line]  # It stays next to the checkpoint that it was made for.
    assert not unequal, "\n".join(unequal)
    assert rows_of(trainer.history) == rows_of(other.history)
    assert (root / "log.csv").read_bytes() == (other_root / "log.csv").read_bytes()
    assert lines(root / "log.csv") == expected(trainer.history)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The root and the trainer of an uninterrupted run, with validation in the second and fourth epochs."""
    root = tmp_path_factory.mktemp("never")
    return root, run(root, epochs=4)


@pytest.mark.parametrize("k", [3, 5, 7, 10])
@pytest.mark.mostly_slow
def test_a_resumed_run_writes_the_same_file_as_an_uninterrupted_run(k, uninterrupted, tmp_path):
    trainer = make()
    run(tmp_path, at(trainer, "on_train_batch_end", k, lambda step: trainer.stop("enough")), trainer=trainer, epochs=4)
    # The row of an epoch that was stopped in the middle is there, with its validation, and is not duplicated later.
    assert lines(tmp_path / "log.csv") == expected(trainer.history) and len(lines(tmp_path / "log.csv")) == 1 + -(-k // 5)
    resumed = run(tmp_path, epochs=4)
    assert_equal(tmp_path, resumed, *uninterrupted)


@pytest.mark.slow
def test_a_row_written_before_a_run_was_interrupted_is_not_duplicated(uninterrupted, tmp_path):
    trainer = make()

    class Failing(fitflax.callbacks.Callback):
        phase = fitflax.callbacks.Phase.SAVE_BEST  # After the row was written.

        def on_epoch_end(self, epoch, logs):
            assert len(lines(tmp_path / "log.csv")) == epoch + 2
            if epoch == 1:
                raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run(tmp_path, Failing(), trainer=trainer, epochs=4)
    assert len(lines(tmp_path / "log.csv")) == 3
    assert_equal(tmp_path, run(tmp_path, epochs=4), *uninterrupted)


@pytest.mark.parametrize(("steps", "append"), [(7, False), (7, True), (10, False)])
@pytest.mark.mostly_slow
def test_a_resume_with_nothing_left_to_do_leaves_the_file_unchanged(steps, append, tmp_path):
    first = run(tmp_path, steps=steps, append=append)
    text = (tmp_path / "log.csv").read_text()
    assert text.splitlines() == expected(first.history) and len(text.splitlines()) == 3
    again = run(tmp_path, steps=steps, append=append)
    assert again.step == steps and (tmp_path / "log.csv").read_text() == text


def test_loading_state_immediately_drops_rows_after_the_checkpoint_and_their_columns(tmp_path):
    logger = write(CSVLogger(tmp_path / "log.csv"), {"loss": 1.0}, {"loss": 2.0})
    state = logger.state_dict()
    write(logger, {"loss": 3.0}, {"loss": 4.0, "val_loss": 5.0}, begin=False)
    with (tmp_path / "log.csv").open("a") as file:
        file.write("4,0.")  # An incomplete row.
    other = CSVLogger(tmp_path / "log.csv")
    other.on_train_begin({})
    assert len(lines(tmp_path / "log.csv")) == 6
    other.load_state_dict(state)
    assert lines(tmp_path / "log.csv") == ["epoch,loss", "0,1.0", "1,2.0"] and other.state_dict() == state
    other.on_epoch_end(2, {"loss": 3.0})
    assert lines(tmp_path / "log.csv") == ["epoch,loss", "0,1.0", "1,2.0", "2,3.0"]
    other.close()


def test_columns_known_to_the_checkpoint_stay_even_if_all_their_values_are_na(tmp_path):
    (tmp_path / "log.csv").write_text("epoch,mine,loss\n0,NA,1.0\n")
    logger = write(CSVLogger(tmp_path / "log.csv", append=True), {"loss": 2.0})
    state = logger.state_dict()
    write(logger, {"loss": 3.0}, begin=False)
    logger.load_state_dict(state)
    logger.close()
    assert lines(tmp_path / "log.csv") == ["epoch,mine,loss", "0,NA,1.0", "0,NA,2.0"]


@pytest.mark.parametrize(("text", "kept"), [(None, []), ("", []), ("epoch,loss\n0,1.0\n", ["0,1.0"]), ("epoch,loss\n0,1.0\n1,2.0\n", ["0,1.0", "1,2.0"])])
def test_a_resume_continues_with_what_is_left_of_the_file(text, kept, tmp_path):
    state = write(CSVLogger(tmp_path / "log.csv"), {"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0}).state_dict()
    (tmp_path / "log.csv").unlink() if text is None else (tmp_path / "log.csv").write_text(text)
    logger = CSVLogger(tmp_path / "log.csv")
    logger.on_train_begin({})
    logger.load_state_dict(state)
    logger.on_epoch_end(3, {"loss": 4.0})
    logger.close()
    assert lines(tmp_path / "log.csv") == ["epoch,loss", *kept, "3,4.0"]


def test_a_run_interrupted_in_its_first_epoch_does_not_own_the_file_yet(tmp_path):
    (tmp_path / "log.csv").write_text("epoch,mine\n")
    logger = CSVLogger(tmp_path / "log.csv")
    logger.on_train_begin({})
    state = logger.state_dict()
    logger.on_train_begin({})
    logger.load_state_dict(state)
    assert (tmp_path / "log.csv").read_text() == "epoch,mine\n"
    write(logger, {"loss": 3.0}, begin=False)
    assert lines(tmp_path / "log.csv") == ["epoch,loss", "0,3.0"]


def test_a_run_interrupted_in_its_first_epoch_still_appends(tmp_path):
    (tmp_path / "log.csv").write_text("epoch,old\n0,1.0\n1,2.0\n")
    logger = CSVLogger(tmp_path / "log.csv", append=True)
    logger.on_train_begin({})
    state = logger.state_dict()
    logger.on_train_begin({})
    logger.load_state_dict(state)
    write(logger, {"loss": 3.0}, begin=False)
    assert lines(tmp_path / "log.csv") == ["epoch,old,loss", "0,1.0,NA", "1,2.0,NA", "0,NA,3.0"]


def test_a_logger_added_to_a_resumed_run_starts_a_file(tmp_path):
    trainer = make()
    fit(ModelCheckpoint(tmp_path / "checkpoints"), trainer=trainer, epochs=2)
    (tmp_path / "log.csv").write_text("epoch,old\n0,1.0\n")
    (tmp_path / "kept.csv").write_text("epoch,loss\n0,1.0\n")
    loggers = CSVLogger(tmp_path / "log.csv"), CSVLogger(tmp_path / "kept.csv", append=True)
    resumed = make()
    with pytest.warns(FitflaxWarning) as warned:
        fit(ModelCheckpoint(tmp_path / "checkpoints"), *loggers, trainer=resumed, epochs=3, resume=True)
    assert [str(warning.message).split(":")[0] for warning in warned] == [f"Callback CSVLogger(path='{name}.csv') is new" for name in ("log", "kept")]
    row = expected(resumed.history)[3]
    assert lines(tmp_path / "log.csv") == ["epoch,loss", row]
    assert lines(tmp_path / "kept.csv") == ["epoch,loss", "0,1.0", row]


def test_a_run_can_be_resumed_after_its_directory_was_moved(uninterrupted, tmp_path):
    run(tmp_path / "here", epochs=2)
    (tmp_path / "here").rename(tmp_path / "there")
    assert_equal(tmp_path / "there", run(tmp_path / "there", epochs=4), *uninterrupted)


def test_two_loggers_with_the_same_file_are_an_error(tmp_path):
    with pytest.raises(CallbackError, match=r"Two callbacks have the same key in checkpoints: \"CSVLogger\(path='log.csv'\)\""):
        CallbackList([CSVLogger(tmp_path / "log.csv"), CSVLogger(tmp_path / "log.csv", append=True)])
    CallbackList([CSVLogger(tmp_path / "a.csv"), CSVLogger(tmp_path / "b.csv")])


def test_a_file_that_is_not_a_log_is_not_replaced(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import fitflax\n")
    with pytest.raises(CallbackError, match=r"CSVLogger would replace .*script.py, which is not a log of epochs"):
        CSVLogger(path).open_run("run", 0)
    assert path.read_text() == "import fitflax\n"


def test_temporary_files_left_by_a_process_that_died_while_writing_are_removed(tmp_path, trainer):
    (tmp_path / ".log.csv.tmp-0123abcd").write_text("epoch,lo")
    fit(CSVLogger(tmp_path / "log.csv"), trainer=trainer, epochs=1)
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]
