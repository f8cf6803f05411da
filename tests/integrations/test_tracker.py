"""`TrackerLogger` with an in-memory tracker that can be down, slow or killed. The tests of W&B and MLflow next to this file use the real ones."""

import pickle
import threading
import time
import types
import warnings

import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import BestCheckpoint, Callback, FigureSummary, ImageSummary, ModelCheckpoint, TensorBoard
from fitflax.errors import CallbackError, FitflaxWarning
from fitflax.integrations import outbox as outbox_module
from fitflax.integrations.tracker import TrackerLogger
from fitflax.integrations.tracker_base import Reading
from tests.integrations.memory import Memory, Net, X, Y, logger_of, trained, values_of, wait_for

# -- what is logged --


def test_values_equal_those_of_history_and_of_the_steps(monkeypatch):
    monkeypatch.setattr("fitflax.integrations.tracker._SPEED_SECONDS", 0.0)
    tracker, seen = Memory(), {}

    class Look(Callback):
        every = fitflax.every(steps=2)

        def on_checkpoint(self, checkpoint):
            seen[checkpoint.step] = checkpoint.loss, checkpoint.logs["loss"]

    trainer = trained(logger_of(tracker), Look(), validation_data=(X[:16], Y[:16]))
    (run,) = tracker.runs.values()
    values = values_of(run)
    assert {step: (values["step/loss", step], values["loss", step]) for step in seen} == seen
    history = trainer.history.history
    assert [values["val_accuracy", step] for step in (5, 10, 15, 20)] == history["val_accuracy"]
    assert [values["loss", step] for step in (5, 10, 15, 20)] == history["loss"]
    assert [values["epoch", step] for step in (5, 10, 15, 20)] == [1, 2, 3, 4]
    assert values["learning_rate", 2] == pytest.approx(0.01)
    assert {step for _, step in values} == {2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20}
    assert any(key == "time/steps_per_second" for key, _, _ in run)
    ((_, status, summary, artifact),) = tracker.ended
    assert status == "finished" and artifact is None and summary["val_loss"] == history["val_loss"][-1]


def test_hyperparameters_come_from_compile_fit_config_and_the_fields_of_the_module():
    tracker = Memory()
    trained(logger_of(tracker), net=Net(width=7), config={"data": {"name": "made up", "sizes": [1, 2]}})
    ((_, _, config),) = tracker.starts
    expected = {"batch_size": 8, "model/width": 7, "model": "Net", "optimizer": "adam", "data/name": "made up", "data/sizes": "[1, 2]"}
    assert config.items() >= expected.items()
    assert len(config["git_commit"]) == 40


def test_a_run_that_ends_inside_an_epoch_logs_its_validation_once():
    tracker = Memory()
    trained(logger_of(tracker), steps=8, validation_data=(X[:16], Y[:16]))
    values = values_of(next(iter(tracker.runs.values())))
    assert ("val_loss", 8) in values and ("loss", 8) in values and ("epoch", 8) not in values


@pytest.mark.slow
def test_images_that_modules_sow_are_logged_as_png_and_numbers_as_curves():
    class Sower(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("summaries", "map", ImageSummary(nn.sigmoid(x)[:, :, None, None]))
            self.sow("summaries", "figure", FigureSummary(draw, x[0]))
            self.sow("summaries", "mean", x.mean())
            self.sow("summaries", "all", x)
            return nn.Dense(2)(x)

    tracker = Memory()
    trained(logger_of(tracker, every=fitflax.every(steps=4)), net=Sower(), steps=4)
    assert {name for name, _ in tracker.images} == {"summaries/map/0", "summaries/map/1", "summaries/map/2", "summaries/figure"}
    assert all(png.startswith(b"\x89PNG") for png in tracker.images.values())
    assert ("summaries/mean", 4) in values_of(next(iter(tracker.runs.values())))


@pytest.mark.slow
def test_a_figure_that_cannot_be_drawn_is_omitted_with_one_warning():
    class Sower(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("summaries", "figure", FigureSummary(fail, x[0]))
            return nn.Dense(2)(x)

    def fail(values):
        raise ValueError("no such axis")

    tracker = Memory()
    with pytest.warns(FitflaxWarning) as caught:
        trained(logger_of(tracker), net=Sower(), steps=8)
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith("Memory does not receive the images of step 2") and "summaries/figure cannot be drawn: ValueError: no such axis" in message
    assert {step for key, step in values_of(next(iter(tracker.runs.values()))) if key == "loss"} == {2, 4, 5, 6, 8}


def draw(values):
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot(values)
    return figure


def test_the_best_checkpoint_is_passed_to_the_tracker_at_the_end(tmp_path):
    tracker, best = Memory(), BestCheckpoint(tmp_path / "best", monitor="loss")
    trained(best, logger_of(tracker, checkpoint=best))
    ((_, _, _, artifact),) = tracker.ended
    assert artifact == ("best-checkpoint", best.store.path(best.best_step)) and (artifact[1] / "state.msgpack").is_file()


@pytest.mark.slow
def test_a_loop_over_train_loop_is_logged_too_and_ends_the_run_although_the_trigger_does_not_fire():
    tracker = Memory()
    trainer = fitflax.Trainer(Net())
    trainer.compile("adam", "sparse_categorical_crossentropy")
    logger = logger_of(tracker)
    for checkpoint in trainer.train_loop((X, Y), steps=7, steps_per_epoch=100):
        logger(checkpoint)
    assert {step for key, step in values_of(next(iter(tracker.runs.values()))) if key == "loss"} == {2, 4, 6, 7}
    assert [status for _, status, _, _ in tracker.ended] == ["finished"]


def test_a_second_fit_continues_the_run():
    tracker = Memory()
    logger = logger_of(tracker)
    trainer = trained(logger, steps=5)
    trainer.fit(X, Y, batch_size=8, steps=5, callbacks=[logger], verbose=0)
    (run,) = tracker.runs.values()
    assert {step for key, step in values_of(run) if key == "loss"} == {2, 4, 5, 6, 8, 10}
    assert [status for _, status, _, _ in tracker.ended] == ["finished"] * 2


@pytest.mark.parametrize(("error", "status"), [(ValueError, "failed"), (KeyboardInterrupt, "interrupted")])
def test_the_status_of_the_run_says_how_training_ended(error, status):
    class Fail(Callback):
        def on_train_batch_end(self, batch, logs):
            if self.trainer.step == 3:
                raise error("here")

    tracker = Memory()
    with pytest.raises(error):
        trained(logger_of(tracker), Fail())
    assert [entry[1] for entry in tracker.ended] == [status]


def test_only_the_first_process_reports_and_a_dev_run_reports_nothing():
    assert TrackerLogger.main_process_only
    tracker = Memory()
    trained(logger_of(tracker), fast_dev_run=2)
    assert not tracker.runs


@pytest.mark.parametrize(
    "arguments",
    [{"every": 5}, {"sown": 3}, {"checkpoint": "runs/a"}, {"interval": "1"}, {"end_seconds": -1.0}],
)
def test_wrong_arguments_are_errors(arguments):
    with pytest.raises(CallbackError, match=f"TrackerLogger.{next(iter(arguments))}=...."):
        TrackerLogger(Memory(), **arguments)
    with pytest.raises(CallbackError, match="must be a Tracker"):
        TrackerLogger("wandb")


# -- resuming --


class Stop(Exception):
    pass


class StopAt(Callback):
    """Ends a run as SIGKILL would, as far as the tracker and checkpoints can tell: nothing more is sent or saved."""

    def __init__(self, step, logger):
        self.step, self.logger = step, logger

    def on_train_batch_end(self, batch, logs):
        if self.trainer.step == self.step:
            outbox = self.logger._outbox
            deadline = time.monotonic() + 1
            outbox._thread.wait_until(lambda: outbox._thread.is_idle or time.monotonic() > deadline)
            outbox.abandon()
            self.logger._log = self.logger._end = lambda *arguments, **more: None
            raise Stop


def killed_at(step, runs, directory, *, fails=lambda: False, **kwargs):
    """Trains up to a step, and leaves what a process that is killed there leaves: checkpoints at multiples of 7."""
    tracker = Memory(runs, fails=fails)
    logger = logger_of(tracker)
    checkpoints = ModelCheckpoint(directory, every=fitflax.every(steps=7))
    checkpoints.wants = lambda checkpoint: False
    with pytest.raises(Stop), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Memory cannot be reached|.* was saved with other settings", FitflaxWarning)
        trained(logger, checkpoints, StopAt(step, logger), resume="auto", **kwargs)
    return tracker


def finished(runs, directory, **kwargs):
    tracker = Memory(runs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* was saved with other settings", FitflaxWarning)
        trained(logger_of(tracker), ModelCheckpoint(directory, every=fitflax.every(steps=7)), resume="auto", **kwargs)
    return tracker


@pytest.fixture(scope="module")
def uninterrupted():
    tracker = Memory()
    trained(logger_of(tracker), validation_data=(X[:16], Y[:16]))
    return values_of(next(iter(tracker.runs.values())))


@pytest.mark.mostly_slow
@pytest.mark.parametrize("step", [5, 8, 13, 15])
def test_a_run_that_is_killed_and_resumed_has_each_value_once(step, uninterrupted, tmp_path):
    runs = {}
    killed_at(step, runs, tmp_path, validation_data=(X[:16], Y[:16]))
    finished(runs, tmp_path, validation_data=(X[:16], Y[:16]))
    (run,) = runs.values()
    assert values_of(run) == uninterrupted


@pytest.mark.slow
def test_values_that_the_tracker_did_not_receive_are_in_the_checkpoint(uninterrupted, tmp_path):
    runs = {}
    killed_at(13, runs, tmp_path, fails=lambda: True, validation_data=(X[:16], Y[:16]))
    assert not runs
    finished(runs, tmp_path, validation_data=(X[:16], Y[:16]))
    (run,) = runs.values()
    assert values_of(run) == uninterrupted


@pytest.mark.slow
def test_a_finished_run_that_is_restarted_sends_the_remaining_values(uninterrupted, tmp_path):
    down = Memory(fails=lambda: True)
    with pytest.warns(FitflaxWarning, match="Memory"):
        trained(logger_of(down), ModelCheckpoint(tmp_path), validation_data=(X[:16], Y[:16]))
    assert not down.runs
    up = finished({}, tmp_path, validation_data=(X[:16], Y[:16]))
    (run,) = up.runs.values()
    assert values_of(run) == uninterrupted


@pytest.mark.slow
def test_changed_settings_start_a_run_that_names_the_first_if_its_values_would_differ(tmp_path):
    runs = {}
    killed_at(13, runs, tmp_path)
    (first,) = runs
    tracker = finished(runs, tmp_path, rate=0.5)
    first_name, second = runs
    assert first_name == first and second.startswith(f"{first.partition('-')[0]}-") and second.endswith("-7")
    assert {step for key, step in values_of(runs[second]) if key == "loss"} == {8, 10, 12, 14, 15, 16, 18, 20}
    assert max(step for _, step in values_of(runs[first])) == 12
    assert tracker.starts[-1][2].items() >= {"resumed_from": first, "resumed_step": 7}.items()


@pytest.mark.slow
def test_changed_settings_start_a_new_run_if_the_first_died_before_its_first_checkpoint(tmp_path):
    runs = {}
    killed_at(5, runs, tmp_path)
    finished(runs, tmp_path, rate=0.5)
    first, second = runs.values()
    assert {step for key, step in values_of(first) if key == "loss"} == {2, 4}
    assert {step for key, step in values_of(second) if key == "loss"} == {2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20}


def test_changed_settings_continue_the_run_if_it_has_no_values_beyond_the_checkpoint(tmp_path):
    runs = {}
    trained(logger_of(Memory(runs)), ModelCheckpoint(tmp_path), steps=10)
    finished(runs, tmp_path, rate=0.5)
    (run,) = runs.values()
    assert {step for key, step in values_of(run) if key == "loss"} == {2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20}


@pytest.mark.slow
def test_settings_that_change_while_the_tracker_is_down_start_a_new_run_later(tmp_path):
    runs = {}
    killed_at(13, runs, tmp_path)
    (first,) = runs
    killed_at(15, runs, tmp_path, fails=lambda: True, rate=0.5)
    assert list(runs) == [first]
    tracker = finished(runs, tmp_path, rate=0.5)
    second = list(runs)[1]
    assert second.endswith("-7") and tracker.starts[-1][2].items() >= {"resumed_from": first, "resumed_step": 7}.items()
    assert {step for key, step in values_of(runs[second]) if key == "loss"} == {8, 10, 12, 14, 15, 16, 18, 20}
    assert max(step for _, step in values_of(runs[first])) == 12


@pytest.mark.slow
def test_the_end_of_a_run_inside_an_epoch_is_sent_later_too(tmp_path):
    whole = Memory()
    trained(logger_of(whole), steps=8, validation_data=(X[:16], Y[:16]))
    with pytest.warns(FitflaxWarning, match="Memory"):
        trained(logger_of(Memory(fails=lambda: True)), ModelCheckpoint(tmp_path), steps=8, validation_data=(X[:16], Y[:16]))
    up = finished({}, tmp_path, steps=8, validation_data=(X[:16], Y[:16]))
    (expected,), (run,) = whole.runs.values(), up.runs.values()
    assert values_of(run) == values_of(expected)
    again = finished(up.runs, tmp_path, steps=8, validation_data=(X[:16], Y[:16]))
    assert values_of(next(iter(again.runs.values()))) == values_of(expected)


@pytest.mark.slow
def test_a_checkpoint_directory_that_cannot_be_listed_causes_a_warning(tmp_path, monkeypatch):
    tracker, best = Memory(), BestCheckpoint(tmp_path / "best", monitor="loss")

    def fail():
        raise PermissionError("no")

    logger = logger_of(tracker, checkpoint=best)
    monkeypatch.setattr(logger, "checkpoint", types.SimpleNamespace(chosen_path=fail))
    with pytest.warns(FitflaxWarning, match="does not upload a checkpoint, because the directory of checkpoints cannot be listed: no"):
        trained(logger)
    assert [(status, artifact) for _, status, _, artifact in tracker.ended] == [("finished", None)]


# -- a tracker that is down or slow --


def without_epochs(values):
    """Returns the values without the epoch numbers, which a second `fit` counts from 1 again."""
    return {key: value for key, value in values.items() if key[0] != "epoch"}


@pytest.mark.slow
def test_a_second_fit_sends_what_the_first_could_not(uninterrupted):
    tracker = Memory()
    down = [True]
    tracker.fails = lambda: bool(down)
    logger = logger_of(tracker)
    with pytest.warns(FitflaxWarning, match="Memory"):
        trainer = trained(logger, steps=10, validation_data=(X[:16], Y[:16]))
    down.clear()
    trainer.fit(X, Y, batch_size=8, steps=10, callbacks=[logger], validation_data=(X[:16], Y[:16]), verbose=0)
    (run,) = tracker.runs.values()
    assert without_epochs(values_of(run)) == without_epochs(uninterrupted)


@pytest.mark.slow
def test_an_abandoned_thread_does_not_disturb_the_next_fit(uninterrupted):
    released, tracker = threading.Event(), Memory()
    tracker.fails = lambda: len(tracker.calls) == 1 and released.wait() and False
    logger = logger_of(tracker, end_seconds=0.3)
    with pytest.warns(FitflaxWarning, match="did not receive"):
        trainer = trained(logger, steps=10, validation_data=(X[:16], Y[:16]))
    logger.end_seconds = 60.0

    class Release(Callback):
        def on_train_batch_end(self, batch, logs):
            if self.trainer.step == 13:
                wait_for(lambda: logger.run_id is not None)
                released.set()
                wait_for(lambda: len(tracker.starts) == 2)

    trainer.fit(X, Y, batch_size=8, steps=10, callbacks=[logger, Release()], validation_data=(X[:16], Y[:16]), verbose=0)
    (run,) = tracker.runs.values()
    assert without_epochs(values_of(run)) == without_epochs(uninterrupted)
    assert [status for _, status, _, _ in tracker.ended] == ["finished"]


def test_a_tracker_that_is_down_for_a_while_gets_everything_with_one_warning(uninterrupted, monkeypatch):
    monkeypatch.setattr(outbox_module, "_SHORTEST_PAUSE", 0.01)
    tracker = Memory()
    tracker.fails = lambda: 1 < len(tracker.calls) < 4

    class Wait(Callback):
        def on_train_batch_end(self, batch, logs):
            if self.trainer.step == 15:
                wait_for(lambda: len(tracker.calls) >= 4)

    with pytest.warns(FitflaxWarning) as caught:
        trained(logger_of(tracker), Wait(), validation_data=(X[:16], Y[:16]))
    (message,) = [str(warning.message) for warning in caught]
    assert "cannot be reached" in message
    (run,) = tracker.runs.values()
    assert values_of(run) == uninterrupted


def test_a_tracker_that_is_never_up_causes_two_warnings_and_no_delay():
    tracker = Memory(fails=lambda: True)
    begin = time.monotonic()
    with pytest.warns(FitflaxWarning) as caught:
        trainer = trained(logger_of(tracker, end_seconds=60))
    assert trainer.step == 20 and time.monotonic() - begin < 30
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2, messages
    assert messages[0].startswith("Memory cannot be reached: nobody there. Training continues. Up to ")
    assert messages[1].startswith("Memory did not receive 12 points, of steps 2 to 20.")


@pytest.mark.slow
def test_a_run_waits_no_longer_than_end_seconds_for_a_tracker_that_hangs():
    released = threading.Event()
    tracker = Memory(fails=lambda: released.wait() and False)
    begin = time.monotonic()
    try:
        with pytest.warns(FitflaxWarning, match="did not receive 12 points"):
            trained(logger_of(tracker, end_seconds=0.5))
        assert time.monotonic() - begin < 30
    finally:
        released.set()


def test_training_does_not_wait_for_values(monkeypatch):
    """Only the thread reads what is logged, except at the ends of epochs, where History has already read it."""
    monkeypatch.setattr(Reading, "read", lambda self, real=Reading.read: _in_thread(self, real))
    tracker = Memory()
    trained(logger_of(tracker), steps=4)
    assert {step for key, step in values_of(next(iter(tracker.runs.values()))) if key == "loss"} == {2, 4}


def _in_thread(reading, real):
    assert threading.current_thread() is not threading.main_thread() or reading.step == 0, "read in the thread that trains"
    return real(reading)


def test_a_logger_can_be_pickled_between_runs():
    logger = TrackerLogger(Memory.__new__(Memory))
    assert isinstance(pickle.loads(pickle.dumps(logger)), TrackerLogger)


def test_it_logs_alongside_tensorboard_without_warnings(tmp_path):
    tracker = Memory()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(logger_of(tracker), TensorBoard(tmp_path, every=fitflax.every(steps=2)))
    assert ("step/gradients_norm", 2) in values_of(next(iter(tracker.runs.values())))
