"""`History`: one row per epoch, as lists, as a table and as plots."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import fitflax
from fitflax.callbacks import JSONLogger, LambdaCallback, ModelCheckpoint
from fitflax.checkpoints import CheckpointStore
from fitflax.errors import ConfigError
from fitflax.metrics import SampleCollector
from fitflax.parallel import DataParallel

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype(np.float32)
Y = RNG.normal(size=(8, 3)).astype(np.float32)


def make(metrics=None):
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(0.1), loss="mse", metrics=metrics)
    return trainer


def test_fit_returns_one_value_of_each_key_per_epoch():
    trainer = make(["mae"])
    history = trainer.fit(X, Y, epochs=3, validation_data=(X, Y), verbose=0)
    assert isinstance(history, fitflax.History) and trainer.history is history
    assert history.epoch == [0, 1, 2]
    assert {key: len(values) for key, values in history.history.items()} == {"loss": 3, "mae": 3, "val_loss": 3, "val_mae": 3}
    assert history.history["loss"] == sorted(history.history["loss"], reverse=True)
    assert [row["logs"]["loss"] for row in history.rows] == history.history["loss"]


def test_an_epoch_without_validation_has_no_validation_values():
    history = make().fit(X, Y, epochs=3, validation_data=(X, Y), validation_freq=2, verbose=0)
    assert (len(history.history["loss"]), len(history.history["val_loss"])) == (3, 1)
    assert [list(row["logs"]) for row in history.rows] == [["loss"], ["loss", "val_loss"], ["loss"]]


def test_each_fit_has_its_own_history():
    trainer = make()
    first = trainer.fit(X, Y, epochs=2, verbose=0)
    second = trainer.fit(X, Y, epochs=1, verbose=0)
    assert (first.epoch, second.epoch) == ([0, 1], [0]) and trainer.history is second


def test_a_history_does_not_keep_its_trainer_in_memory():
    history = make().fit(X, Y, verbose=0)
    assert "trainer" not in vars(history)
    assert history.plot() and history.steps == [1]


def test_rows_are_copies_of_the_logs():
    kept = []
    history = make().fit(X, Y, callbacks=[LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append(logs))], verbose=0)
    kept[0]["loss"] = 0.0
    assert history.history["loss"][0] > 0


def test_values_added_by_a_callback_are_returned_unchanged():
    add = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(added=epoch))
    assert make().fit(X, Y, epochs=2, callbacks=[add], verbose=0).history["added"] == [0, 1]


def test_its_state_can_be_loaded_into_another_instance():
    history = make().fit(X, Y, epochs=2, verbose=0)
    other = fitflax.History()
    other.load_state_dict(history.state_dict())
    assert other.rows == history.rows and other.rows[0]["logs"] is not history.rows[0]["logs"]


def test_it_is_empty_before_the_first_fit():
    history = make().history
    assert (history.history, history.epoch, repr(history)) == ({}, [], "History({})")


# -- steps, tables and plots --


def test_steps_lists_the_step_at_the_end_of_each_epoch():
    trainer = make()
    assert trainer.fit(X, Y, batch_size=4, epochs=3, verbose=0).steps == [2, 4, 6]
    assert trainer.fit(X, Y, batch_size=4, steps=3, verbose=0).steps == [8, 9]


def test_a_resumed_run_has_the_steps_of_all_its_epochs(tmp_path):
    options = {"batch_size": 4, "callbacks": [ModelCheckpoint(tmp_path)], "resume": "auto", "verbose": 0}
    make().fit(X, Y, steps=3, **options)
    assert make().fit(X, Y, steps=3, **options).steps == [2, 3]  # The second epoch was closed in the middle.
    assert make().fit(X, Y, steps=6, **options).steps == [2, 4, 6]


def test_a_table_has_one_row_per_epoch_and_nan_where_nothing_was_logged():
    pandas = pytest.importorskip("pandas")
    table = make(["mae"]).fit(X, Y, batch_size=4, epochs=2, validation_data=(X, Y), validation_freq=2, verbose=0).to_pandas()
    assert isinstance(table, pandas.DataFrame) and list(table.columns) == ["step", "loss", "mae", "val_loss", "val_mae"]
    assert table.index.name == "epoch" and table.index.tolist() == [0, 1] and table["step"].tolist() == [2, 4]
    assert table["val_loss"].isna().tolist() == [True, False]
    assert fitflax.History().to_pandas().empty


def lines_of(figure):
    return {axes.get_title(): {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()} for axes in figure.axes}


def test_a_plot_has_axes_for_each_training_key_with_the_curves_of_all_sets():
    pytest.importorskip("matplotlib")
    sets = {"dev": (X, Y), "test": (X, Y)}
    history = make(["mae"]).fit(X, Y, epochs=3, validation_data=sets, validation_freq=[1, 3], verbose=0)
    found = lines_of(history.plot())
    assert {title: list(lines) for title, lines in found.items()} == {"loss": ["loss", "dev_loss", "test_loss"], "mae": ["mae", "dev_mae", "test_mae"]}
    assert found["loss"]["loss"] == [[epoch + 1, value] for epoch, value in enumerate(history.history["loss"])]
    assert [epoch for epoch, _ in found["mae"]["dev_mae"]] == [1, 3]
    assert list(lines_of(history.plot("mae"))) == list(lines_of(history.plot(["mae"]))) == ["mae"]
    with pytest.raises(ConfigError, match=r"no numbers named 'lost'. Did you mean 'loss'\? Logged keys: \['loss', 'mae'\]"):
        history.plot("lost")


def test_a_key_that_only_looks_like_a_set_has_its_own_axes_and_arrays_are_not_plotted():
    pytest.importorskip("matplotlib")
    history = fitflax.History()
    history.on_epoch_end(0, {"loss": 0.5, "left_loss": 0.25, "matrix": np.eye(2)})
    assert {title: list(lines) for title, lines in lines_of(history.plot()).items()} == {"loss": ["loss"], "left_loss": ["left_loss"]}
    assert not fitflax.History().plot().axes


def test_a_plot_can_be_saved_to_a_file_without_a_display(tmp_path):
    pytest.importorskip("matplotlib")
    make().fit(X, Y, epochs=2, validation_data=(X, Y), verbose=0).plot().savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_checkpoints_contain_the_rows_of_a_subclass_too(tmp_path):
    class Mine(fitflax.History):
        pass

    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    trainer.fit(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32), epochs=2, callbacks=[Mine(), ModelCheckpoint(tmp_path)], verbose=0)
    assert [row["epoch"] for row in CheckpointStore(tmp_path).restore().metadata["history"]] == [0, 1]


def test_large_values_of_a_validation_inside_an_epoch_are_logged_but_not_recorded(tmp_path):
    for steps in (7, 8):  # Step 7 is between the validation and the end of the second epoch.
        callbacks = [JSONLogger(tmp_path / "log.jsonl"), ModelCheckpoint(tmp_path / "all")]
        options = {"batch_size": 2, "steps": steps, "validation_data": (X, Y), "validation_freq": fitflax.every(steps=3), "resume": "auto", "verbose": 0}
        history = make([SampleCollector(4)]).fit(X, Y, callbacks=callbacks, **options)
        saved = CheckpointStore(tmp_path / "all").restore(steps)
        rows = [*history.rows, *saved.metadata["history"]]
        assert len(history.rows) == 2 and all(list(row["logs"]) == ["loss", "val_loss"] for row in rows)
        assert all("val_samples" in line for line in (tmp_path / "log.jsonl").read_text().splitlines())
        if steps == 7:
            assert "samples" not in (saved.path / "closing.json").read_text()
