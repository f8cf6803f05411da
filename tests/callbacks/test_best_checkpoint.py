"""BestCheckpoint: which checkpoints are the best, what survives a resume, and which parameters are restored."""

import contextlib
import dataclasses
import shutil
import threading
from typing import Any

import jax
import numpy as np
import pytest

import fitflax
from fitflax.callbacks import BestCheckpoint, Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, Phase, best_checkpoint
from fitflax.checkpoints import CheckpointStore
from fitflax.errors import CallbackError, CheckpointError, FitflaxWarning, MonitorError
from fitflax.loops.training_loop import Run
from tests.run_script import checkpoint_of, differences, directory_of, state_of, steps_in

X, Y = np.linspace(0, 1, 80, dtype=np.float32).reshape(20, 4), np.arange(20, dtype=np.int32) % 3  # 5 batches of 4
NAN = float("nan")


def fit(trainer: fitflax.Trainer, *callbacks: Callback, **options: Any) -> fitflax.History:
    return trainer.fit(X, Y, batch_size=4, verbose=0, callbacks=list(callbacks), **options)


def scores(*values: float) -> LambdaCallback:
    """Logs `score`, a value for each epoch."""
    return LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(score=values[epoch]))


def best_of(trainer: fitflax.Trainer, directory: Any, values: list[float], mode: str, **options: Any) -> BestCheckpoint:
    best = BestCheckpoint(directory, monitor="score", mode=mode, **options)
    fit(trainer, scores(*values), best, epochs=len(values))
    return best


# -- which checkpoints are kept --


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("keep", "epochs"), [(1, [4]), (2, [2, 4]), (3, [2, 3, 4]), (None, [0, 1, 2, 3, 4])])
def test_the_best_k_checkpoints_are_kept(keep, epochs, trainer, tmp_path):
    """Case 21."""
    best = best_of(trainer, tmp_path, [10, 9, 2.8, 5, 2.5], "min", keep=keep)
    assert steps_in(tmp_path) == [5 * epoch + 5 for epoch in epochs]
    assert (best.best, best.best_step) == (2.5, 25)


@pytest.mark.parametrize(("values", "mode", "value", "step"), [([NAN, 5, 7, 8], "max", 8, 20), ([NAN, 8, 7, 5], "min", 5, 20), ([3, NAN, NAN], "min", 3, 5)])
def test_nan_is_never_the_best_and_evicts_nothing(values, mode, value, step, trainer, tmp_path):
    """Case 22."""
    best = best_of(trainer, tmp_path, values, mode)
    assert (best.best, best.best_step, steps_in(tmp_path)) == (value, step, [step])


def test_nothing_is_saved_if_all_values_are_nan(trainer, tmp_path):
    best = best_of(trainer, tmp_path, [NAN, NAN], "min", restore_best=True)
    assert best.best is None and best.best_step is None and not steps_in(tmp_path)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("keep", "steps"), [(1, [5]), (2, [5, 10])])
def test_the_earliest_of_equal_values_are_kept(mode, keep, steps, trainer, tmp_path):
    best = best_of(trainer, tmp_path, [1.0, 1.0, 1.0], mode, keep=keep)
    assert steps_in(tmp_path) == steps and best.best_step == 5


@pytest.mark.parametrize(("mode", "values"), [("max", [0.5, 0.7, 0.75, 0.71]), ("min", [0.9, 0.7, 0.65, 0.69])])
def test_only_checkpoints_better_than_the_initial_value_are_saved(mode, values, trainer, tmp_path):
    assert best_of(trainer, tmp_path, values, mode, initial_value=0.7, keep=None).best_step == 15
    assert steps_in(tmp_path) == [15, 20]


def test_an_infinite_value_can_be_the_best(trainer, tmp_path):
    assert best_of(trainer, tmp_path, [1.0, float("-inf"), 0.0], "min").best_step == 10


@pytest.mark.slow
def test_the_direction_comes_from_the_metric_unless_mode_is_given(trainer, tmp_path):
    best, worst = BestCheckpoint(tmp_path / "a", monitor="val_accuracy"), BestCheckpoint(tmp_path / "b", monitor="val_accuracy", mode="min")
    history = fit(trainer, best, worst, epochs=4, validation_data=(X, Y)).history["val_accuracy"]
    assert (best.best, worst.best) == (max(history), min(history))
    assert best.best_step == 5 * history.index(max(history)) + 5


def test_it_checks_only_epochs_with_validation(trainer, tmp_path):
    best = BestCheckpoint(tmp_path, keep=None)
    fit(trainer, best, epochs=5, validation_data=(X, Y), validation_freq=2)
    assert steps_in(tmp_path) == [10, 20]


def test_it_checks_validations_inside_an_epoch(trainer, tmp_path):
    best = BestCheckpoint(tmp_path, keep=None)
    fit(trainer, best, steps=7, steps_per_epoch=100, validation_data=(X, Y), validation_freq=fitflax.every(steps=3))
    assert steps_in(tmp_path) == [3, 6]


def test_a_training_value_is_checked_at_the_end_of_each_epoch(trainer, tmp_path):
    fit(trainer, BestCheckpoint(tmp_path, monitor="loss", keep=None), epochs=3)
    assert steps_in(tmp_path) == [5, 10, 15]


def test_a_best_checkpoint_contains_everything_that_a_regular_one_does(trainer, tmp_path):
    fit(trainer, BestCheckpoint(tmp_path / "best", keep=None), ModelCheckpoint(tmp_path / "all", keep=None), epochs=2, validation_data=(X, Y))
    assert directory_of(tmp_path / "best") == directory_of(tmp_path / "all")


# -- errors --


def test_a_misspelled_monitor_is_an_error_that_lists_the_logged_keys(trainer, tmp_path):
    with pytest.raises(MonitorError, match=r"BestCheckpoint monitors 'val_acuracy', which is not logged\. Did you mean 'val_accuracy'\? Logged keys: "):
        fit(trainer, BestCheckpoint(tmp_path, monitor="val_acuracy"), epochs=3, validation_data=(X, Y))
    assert trainer.step == 5


def test_monitoring_validation_without_validation_data_is_an_error_before_the_first_step(trainer, tmp_path):
    with pytest.raises(MonitorError, match="there is no validation data"):
        fit(trainer, BestCheckpoint(tmp_path), epochs=3)
    assert trainer.step == 0


def test_a_key_without_a_direction_needs_a_mode(trainer, tmp_path):
    with pytest.raises(MonitorError, match="mode='min' or mode='max'"):
        fit(trainer, scores(1, 2), BestCheckpoint(tmp_path, monitor="score"), epochs=2)


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": True}, {"keep": 1.5}, {"mode": "auto"}])
def test_arguments_out_of_range_are_errors(options, tmp_path):
    with pytest.raises(CallbackError, match="Received"):
        BestCheckpoint(tmp_path, **options)


# -- resuming --


@pytest.mark.parametrize(
    ("mode", "stored", "values", "best"),
    [("max", 0.9, [0.7], (0.9, 5)), ("min", 0.0, [0.5, 0.1], (0.0, 5)), ("max", 0.0, [-1.0, 0.5], (0.5, 15))],
)
def test_a_resume_keeps_the_best(mode, stored, values, best, trainer, tmp_path):
    """Case 24, including a saved best of 0.0."""

    def start(epochs: int) -> BestCheckpoint:
        callback = BestCheckpoint(tmp_path / "best", monitor="score", mode=mode)
        fit(trainer, scores(stored, *values), callback, ModelCheckpoint(tmp_path / "all"), epochs=epochs, resume="auto")
        return callback

    start(1)
    resumed = start(1 + len(values))
    assert (resumed.best, resumed.best_step, steps_in(tmp_path / "best")) == (*best, [best[1]])


def test_two_callbacks_in_one_directory_each_know_their_best_after_a_resume(trainer, tmp_path):
    def start(epochs: int) -> list[int | None]:
        log = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(a=[1, 2][epoch], b=[2, 1][epoch]))
        best = [BestCheckpoint(tmp_path, monitor=name, mode="max") for name in "ab"]
        fit(trainer, log, *best, ModelCheckpoint(tmp_path, keep=1), epochs=epochs, resume="auto")
        return [callback.best_step for callback in best]

    assert start(1) == [5, 5]
    assert (start(2), steps_in(tmp_path)) == ([10, 5], [5, 10])


MAYBE_REMOVED = "does not contain the best checkpoints of steps .*: they were removed, or the process died before it saved them"


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("keep", [1, 2])
def test_if_a_kill_prevents_the_save_of_the_second_of_two_callbacks_it_keeps_its_previous_best(keep, is_recorded, trainer, tmp_path):
    """Without a `ModelCheckpoint`, the run resumes from the first directory. The process is killed before or after it records that the save begins."""

    def start(epochs: int, resume: Any = None) -> BestCheckpoint:
        first, second = (BestCheckpoint(tmp_path / name, monitor="score", mode="max", keep=keep) for name in "ab")
        fit(trainer, scores(1, 2, 0), first, second, epochs=epochs, resume=resume)
        return second

    start(1)
    shutil.copytree(tmp_path / "b", tmp_path / "b before the save of step 10")
    assert start(2, tmp_path / "a").best_step == 10
    if is_recorded:
        shutil.copy(tmp_path / "b/retention.json", tmp_path / "b before the save of step 10")
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "b before the save of step 10").rename(tmp_path / "b")
    with pytest.warns(FitflaxWarning, match=MAYBE_REMOVED) if keep == 2 and is_recorded else contextlib.nullcontext():
        resumed = start(3, tmp_path / "a")
    assert (resumed.best_step, steps_in(tmp_path / "a"), steps_in(tmp_path / "b")) == (5, [5, 10][-keep:], [5, 15][:keep])


@pytest.mark.parametrize("is_recorded", [False, True])
def test_if_a_kill_prevents_the_first_save_of_the_second_of_two_callbacks_its_best_is_a_later_one(is_recorded, trainer, tmp_path):
    def start(epochs: int, resume: Any = None) -> BestCheckpoint:
        first, second = (BestCheckpoint(tmp_path / name, monitor="score", mode="max") for name in "ab")
        fit(trainer, scores(2, 1), first, second, epochs=epochs, resume=resume)
        return second

    start(1)
    shutil.rmtree(tmp_path / "b/step_00000005")
    if not is_recorded:
        (tmp_path / "b/retention.json").unlink()
    with pytest.warns(FitflaxWarning, match=MAYBE_REMOVED):
        resumed = start(2, tmp_path / "a")
    assert (resumed.best_step, steps_in(tmp_path / "b")) == (10, [10])


def test_a_best_checkpoint_that_a_subclass_does_not_save_does_not_count(trainer, tmp_path):
    class FromStep10(BestCheckpoint):
        def on_checkpoint(self, checkpoint: Any) -> None:
            if checkpoint.step >= 10:
                super().on_checkpoint(checkpoint)

    best = FromStep10(tmp_path, monitor="score", mode="max")
    fit(trainer, scores(3, 2, 1), best, epochs=3)
    assert (best.best_step, steps_in(tmp_path)) == (10, [10])


def test_a_best_checkpoint_that_a_subclass_does_not_save_is_in_no_saved_state(trainer, tmp_path):
    class NotStep10(BestCheckpoint):
        def on_checkpoint(self, checkpoint: Any) -> None:
            if checkpoint.step != 10:
                super().on_checkpoint(checkpoint)

    best = NotStep10(tmp_path / "best", monitor="score", mode="max")
    fit(trainer, scores(1, 2), best, ModelCheckpoint(tmp_path / "all"), epochs=2)
    assert CheckpointStore(tmp_path / "all").restore(10).run["callbacks"][best.state_key]["kept"] == [[1.0, 5]]


def test_a_last_checkpoint_that_a_subclass_does_not_save_is_not_the_best_after_fit(trainer, tmp_path):
    class NotStep10(BestCheckpoint):
        def on_checkpoint(self, checkpoint: Any) -> None:
            if checkpoint.step != 10:
                super().on_checkpoint(checkpoint)

    best = NotStep10(tmp_path, monitor="score", mode="max", restore_best=True)
    fit(trainer, scores(1, 2), best, epochs=2)
    assert (best.best_step, steps_in(tmp_path)) == (5, [5])


def test_a_callback_may_forward_hooks_to_a_best_checkpoint(trainer, tmp_path):
    class Wrapper(Callback):
        def __init__(self, inner: BestCheckpoint) -> None:
            self.inner = inner

        def on_train_begin(self, logs: Any) -> None:
            self.inner.trainer = self.trainer
            self.inner.on_train_begin(logs)

        def on_checkpoint(self, checkpoint: Any) -> None:
            self.inner.on_checkpoint(checkpoint)

    best = BestCheckpoint(tmp_path, monitor="score", mode="max")
    fit(trainer, scores(1, 2, 0), Wrapper(best), epochs=3)
    assert (best.best_step, steps_in(tmp_path)) == (10, [10])


def test_a_best_checkpoint_may_be_called_in_an_earlier_phase(trainer, tmp_path):
    class Early(BestCheckpoint):
        phase = Phase.RECORD

    best = Early(tmp_path / "best", monitor="score", mode="max")
    fit(trainer, scores(1, 2, 0), best, ModelCheckpoint(tmp_path / "all"), epochs=3)
    assert (best.best_step, steps_in(tmp_path / "best")) == (10, [10])
    assert CheckpointStore(tmp_path / "all").restore(15).run["callbacks"][best.state_key]["kept"] == [[2.0, 10]]


def test_checkpoints_after_the_step_resumed_from_are_dropped(trainer, tmp_path):
    def start(epochs: int, **options: Any) -> BestCheckpoint:
        best = BestCheckpoint(tmp_path / "best", monitor="score", mode="max", keep=None)
        fit(trainer, scores(1, 2, 3, 4), best, ModelCheckpoint(tmp_path / "all", keep=None), epochs=epochs, **options)
        return best

    start(4)
    assert steps_in(tmp_path / "best") == [5, 10, 15, 20]
    resumed = start(3, resume=tmp_path / "all/step_00000010")
    assert (resumed.best, steps_in(tmp_path / "best")) == (3, [5, 10, 15])


def test_the_best_of_the_newest_regular_checkpoint_is_kept_until_a_newer_one_is_complete(trainer, tmp_path, monkeypatch):
    """The run is killed after step 10 replaces step 5 as the best, before the regular checkpoint of step 14. It resumes from step 7, whose best is step 5."""

    def start(steps: int, *more: Callback) -> BestCheckpoint:
        best = BestCheckpoint(tmp_path / "best", monitor="score", mode="max", restore_best=True)
        fit(trainer, scores(1, 2, 0), best, ModelCheckpoint(tmp_path / "all", every=fitflax.every(steps=7)), *more, steps=steps, resume="auto")
        return best

    def die(batch: int, logs: Any) -> None:
        if trainer.step == 11:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "_last_checkpoint", lambda self, **options: iter(()))  # Like a kill, which leaves no time to save.
        start(15, LambdaCallback(on_train_batch_end=die))
    assert steps_in(tmp_path / "all") == [7]
    resumed = start(8)
    assert (resumed.best, resumed.best_step) == (2, 8)
    assert 5 in steps_in(tmp_path / "best")


def test_a_second_fit_keeps_the_best_of_the_newest_regular_checkpoint_until_a_newer_one_is_complete(trainer, tmp_path):
    """A kill after step 15 would resume from step 10, which lists step 5 as the best."""
    best, steps = BestCheckpoint(tmp_path / "best", monitor="score", mode="max", asynchronous=False), []
    saving = ModelCheckpoint(tmp_path / "all", every=fitflax.every(epochs=2))
    fit(trainer, scores(1, 0), best, saving, epochs=2)
    fit(trainer, scores(2, 0), best, saving, LambdaCallback(on_epoch_begin=lambda epoch, logs: steps.append(steps_in(tmp_path / "best"))), epochs=2)
    assert steps == [[5], [5, 15]] and steps_in(tmp_path / "best") == [15]


def test_after_a_failed_save_the_run_is_saved_with_a_best_checkpoint_that_is_still_being_written(trainer, tmp_path, monkeypatch):
    save, is_queued = CheckpointStore.save, threading.Event()
    best = BestCheckpoint(tmp_path / "best", monitor="score", mode="min")

    class Report(Callback):
        phase = Phase.SAVE

        def on_checkpoint(self, checkpoint: Any) -> None:
            if checkpoint.step == 10:
                is_queued.set()

    def fail(epoch: int, logs: Any) -> None:
        if epoch == 1:
            best._saver.has_lost = True  # As after a save that failed with `on_save_error="warn"`.

    def wait_and_save(self: CheckpointStore, *, step: int, **options: Any) -> Any:
        assert self is not best.store or step != 10 or is_queued.wait(60)
        return save(self, step=step, **options)

    monkeypatch.setattr(CheckpointStore, "save", wait_and_save)
    fit(trainer, scores(0.5, 0.3, 0.4), best, ModelCheckpoint(tmp_path / "all"), Report(), LambdaCallback(on_epoch_begin=fail), epochs=3)
    states = CheckpointStore(tmp_path / "all").restore(10).run["callbacks"]
    assert [state["kept"] for key, state in states.items() if key.startswith("BestCheckpoint")] == [[[0.3, 10]]]


def test_a_callback_that_acts_after_saves_does_not_count_as_a_save(trainer, tmp_path):
    """The newest regular checkpoint, of step 10, lists step 10 as the best, so it is kept although step 15 is better."""

    class Report(Callback):
        phase = Phase.SAVE

        def on_checkpoint(self, checkpoint: Any) -> None:
            pass

    saving = ModelCheckpoint(tmp_path / "all", every=fitflax.every(epochs=2), save_last=False)
    fit(trainer, scores(1, 2, 3), BestCheckpoint(tmp_path / "best", monitor="score", mode="max"), saving, Report(), epochs=3)
    assert (steps_in(tmp_path / "all"), steps_in(tmp_path / "best")) == ([10], [10, 15])


# -- a run that ends inside an epoch --


def run(trainer: fitflax.Trainer, root: Any, steps: int, **options: Any) -> BestCheckpoint:
    best = BestCheckpoint(root / "best", **options)
    data = X, np.zeros(20, np.int32)  # The loss decreases with every step.
    options: dict[str, Any] = {"batch_size": 4, "steps": steps, "validation_data": data, "verbose": 0, "resume": "auto"}
    trainer.fit(data, callbacks=[best, ModelCheckpoint(root / "all"), EarlyStopping(patience=99)], **options)
    return best


def test_the_closing_validation_can_be_the_best(trainer, tmp_path):
    best = run(trainer, tmp_path, 7)
    values = trainer.history.history["val_loss"]
    assert values[1] < values[0]
    assert (best.best, best.best_step, CheckpointStore(tmp_path / "best").best("val_loss", "min")) == (values[1], 7, 7)


def test_the_closing_best_has_its_value_in_a_shared_directory(trainer, tmp_path):
    data, best = (X, np.zeros(20, np.int32)), BestCheckpoint(tmp_path)  # The loss decreases with every step.
    trainer.fit(data, batch_size=4, steps=7, validation_data=data, verbose=0, callbacks=[best, ModelCheckpoint(tmp_path)])
    assert best.best_step == CheckpointStore(tmp_path).best("val_loss", "min") == 7
    assert best.best == CheckpointStore(tmp_path).metric(7, "val_loss")


def test_a_closing_validation_does_not_delete_the_previous_best(trainer, tmp_path):
    """A longer run resumes from a checkpoint that knows only the previous best."""
    run(trainer, tmp_path, 7)
    assert steps_in(tmp_path / "best") == [5, 7]


def test_a_resume_with_nothing_left_to_do_still_knows_the_closing_best(trainer, tmp_path):
    first = run(trainer, tmp_path, 7)
    again = run(trainer, tmp_path, 7)
    assert (again.best, again.best_step) == (first.best, first.best_step)
    assert steps_in(tmp_path / "best") == [5, 7]


@pytest.mark.parametrize("steps", [3, 7])
def test_a_resume_with_nothing_left_to_do_knows_the_direction_that_the_metric_declares(steps, trainer, tmp_path):
    first, again = (run(trainer, tmp_path, steps, monitor="val_accuracy") for _ in range(2))
    assert first.best is not None and (again.best, again.best_step) == (first.best, first.best_step)


@pytest.mark.parametrize("shared_directory", [False, True])
@pytest.mark.parametrize("total", [8, 13])
def test_a_longer_run_forgets_the_closing_best(total, shared_directory, trainer, tmp_path):
    """It equals an uninterrupted run, whose directory has no checkpoint of step 7."""

    def start(root: Any, steps: int) -> BestCheckpoint:
        best = BestCheckpoint(root / "best", monitor="score", mode="max", keep=1)
        directory = root / ("best" if shared_directory else "all")
        fit(trainer, scores(1, 9 if steps == 7 else 0, 0), best, ModelCheckpoint(directory, keep=1), steps=steps, resume="auto")
        return best

    uninterrupted = start(tmp_path / "never", total)
    trainer.build((X[:4], Y[:4]))
    assert start(tmp_path / "run", 7).best == 9
    resumed = start(tmp_path / "run", total)
    assert (resumed.best, resumed.best_step) == (uninterrupted.best, uninterrupted.best_step) == (1, 5)
    assert not differences(directory_of(tmp_path / "run/best"), directory_of(tmp_path / "never/best"), "best/")


def test_the_closing_best_does_not_contain_changes_by_callbacks_at_the_end_of_the_partial_epoch(trainer, tmp_path):
    """A resume from it continues the epoch, and the callbacks change the state again at its end."""
    rate = trainer.learning_rate

    def halve(epoch: int, logs: Any) -> None:
        trainer.learning_rate /= 2

    best = BestCheckpoint(tmp_path, monitor="score", mode="max")
    fit(trainer, LambdaCallback(on_epoch_end=halve), scores(1, 2, 3), best, steps=12)
    assert best.best_step == 12 and trainer.learning_rate == pytest.approx(rate / 8)
    trainer.restore(tmp_path)
    assert trainer.step == 12 and trainer.learning_rate == pytest.approx(rate / 4)


def test_in_a_shared_directory_a_longer_run_is_not_affected_by_changes_at_the_end_of_the_partial_epoch(trainer, tmp_path):
    """The closing best rewrites the checkpoint from which the run resumes."""

    def decay(epoch: int, logs: Any) -> None:
        trainer.learning_rate *= 0.9

    def start(root: Any, steps: int) -> tuple[dict[str, Any], float]:
        data, saving = (X, np.zeros(20, np.int32)), [BestCheckpoint(root / "all"), ModelCheckpoint(root / "all")]  # The loss decreases with every step.
        callbacks = [LambdaCallback(on_epoch_end=decay), *saving]
        trainer.build((X[:4], Y[:4]))
        trainer.fit(data, batch_size=4, steps=steps, validation_data=data, verbose=0, callbacks=callbacks, resume="auto")
        assert saving[0].best_step == steps
        return state_of(trainer), trainer.learning_rate

    uninterrupted = start(tmp_path / "never", 13)
    start(tmp_path / "run", 7)
    assert start(tmp_path / "run", 13) == uninterrupted
    assert not differences(*(checkpoint_of(tmp_path / name / "all/step_00000013") for name in ("run", "never")))


# -- restore_best --


def test_the_best_parameters_are_restored_after_the_last_checkpoint(trainer, tmp_path):
    states: dict[int, Any] = {}
    keep = LambdaCallback(on_epoch_end=lambda epoch, logs: states.update({trainer.step: trainer.state}))
    best = BestCheckpoint(tmp_path / "best", monitor="score", mode="max", restore_best=True)
    fit(trainer, keep, scores(1, 3, 2), best, ModelCheckpoint(tmp_path / "all", keep=None), epochs=3)
    expected = dataclasses.replace(states[15], params=states[10].params, model_state=states[10].model_state)
    assert jax.tree.map(lambda leaf: str(leaf), trainer.state) == jax.tree.map(lambda leaf: str(leaf), expected)
    last = CheckpointStore(tmp_path / "all").restore(15).train["params"]
    assert np.array_equal(last["kernel"], states[15].params["kernel"])


def test_the_closing_best_is_restored_at_the_end_and_after_a_resume(trainer, tmp_path):
    run(trainer, tmp_path, 7, restore_best=True)
    first = state_of(trainer)
    assert first[".params['kernel']"] == directory_of(tmp_path / "best")["step_00000007"]["/train/params/kernel"]
    run(trainer, tmp_path, 7, restore_best=True)
    assert not differences(state_of(trainer), first)


@pytest.mark.parametrize("fails", [False, True])
def test_with_several_processes_all_restore_the_best_step_of_process_0_unless_the_run_failed(fails, trainer, tmp_path, monkeypatch):
    asked: list[tuple[int, str]] = []

    def exchange(value: int, topic: str) -> list[int]:
        asked.append((value, topic))
        return [5, value]

    def fail(epoch: int, logs: Any) -> None:
        if epoch == 1 and fails:
            raise ArithmeticError("broken")

    def begin_end(logs: Any) -> None:  # As if there were two processes, but only while `BestCheckpoint` restores.
        monkeypatch.setattr(jax, "process_count", lambda: 2)

    monkeypatch.setattr(best_checkpoint, "exchange", exchange)
    monkeypatch.setattr(best_checkpoint, "count_processes", lambda devices: 2)
    best = BestCheckpoint(tmp_path, monitor="score", mode="max", keep=2, restore_best=True)
    watch = LambdaCallback(on_epoch_begin=fail, on_train_end=begin_end)
    with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
        fit(trainer, scores(1, 2), best, watch, epochs=2)
    assert asked == ([] if fails else [(10, "the best checkpoint")])
    assert np.array_equal(trainer.state.params["kernel"], CheckpointStore(tmp_path).restore(5).train["params"]["kernel"])


@pytest.mark.parametrize("when", ["before", "after", "in an epoch"])
def test_a_run_that_fails_before_its_first_step_does_not_restore_the_best_parameters_of_an_earlier_one(when, trainer, tmp_path):
    """Before or after its `on_train_begin`, or at the beginning of an epoch."""

    def fail(epoch: int, logs: Any) -> None:
        raise MonitorError("there is no validation data")

    best = BestCheckpoint(tmp_path / "best", monitor="score", mode="max", restore_best=True)
    fit(trainer, scores(1, 0), best, epochs=2)
    fit(trainer)
    last = state_of(trainer)
    failing = {"before": EarlyStopping(), "after": BestCheckpoint(tmp_path / "other"), "in an epoch": LambdaCallback(on_epoch_begin=fail)}[when]
    with pytest.raises(MonitorError, match="there is no validation data"):
        fit(trainer, best, failing)
    assert not differences(state_of(trainer), last)


def test_restored_parameters_do_not_affect_a_longer_run(trainer, tmp_path):
    run(trainer, tmp_path / "never", 13)
    uninterrupted = state_of(trainer)
    trainer.build((X[:4], Y[:4]))
    run(trainer, tmp_path / "run", 7, restore_best=True)
    run(trainer, tmp_path / "run", 13)
    assert not differences(state_of(trainer), uninterrupted)


def test_with_a_smaller_keep_a_resumed_run_saves_only_values_that_are_better_than_the_kept_ones(trainer, tmp_path):
    best_of(trainer, tmp_path, [1, 2, 3], "max", keep=3)
    best = BestCheckpoint(tmp_path, monitor="score", mode="max", keep=1)
    fit(trainer, scores(1, 2, 3, 2.5), best, epochs=4, resume=tmp_path)
    assert steps_in(tmp_path)[-1] == 15 and best.best_step == 15


def test_a_resumed_run_without_a_model_checkpoint_keeps_only_the_best(trainer, tmp_path):
    for values in ([1], [1, 2], [1, 2, 3]):
        best = BestCheckpoint(tmp_path, monitor="score", mode="max")
        fit(trainer, scores(*values), best, epochs=len(values), resume=tmp_path if len(values) > 1 else None)
        assert steps_in(tmp_path) == [best.best_step] == [5 * len(values)]


def test_without_a_model_checkpoint_a_save_replaces_the_previous_best(trainer, tmp_path, monkeypatch):
    save, kept = CheckpointStore.save, []

    def record(self: CheckpointStore, **options: Any) -> Any:
        kept.append((options["step"], set(options["keep"])))
        return save(self, **options)

    def fail(*arguments: Any) -> None:
        raise CheckpointError("The disk is full")

    monkeypatch.setattr(CheckpointStore, "save", record)
    monkeypatch.setattr(CheckpointStore, "retain", fail)
    best_of(trainer, tmp_path, [1, 2, 3], "max")
    assert kept == [(5, {5}), (10, {10}), (15, {15})]


@pytest.mark.parametrize(("keep", "step"), [(1, 25), (2, 20)])
def test_a_best_checkpoint_that_was_replaced_later_is_not_restored(keep, step, trainer, tmp_path):
    """The run resumes from step 15, which lists step 5 as the best, but does not rerun the better steps that replaced step 5."""

    def start(*values: float, **options: Any) -> BestCheckpoint:
        best = BestCheckpoint(tmp_path / "best", monitor="score", mode="min", keep=keep, restore_best=True)
        fit(trainer, scores(*values), best, ModelCheckpoint(tmp_path / "all", keep=None), epochs=len(values), **options)
        return best

    start(5, 6, 7, 4, 3)
    what = "the last parameters are kept" if step == 25 else "the parameters of step 20 are restored"
    with pytest.warns(FitflaxWarning, match=rf"best no longer contains the best checkpoint \(step 5\), so {what}\.$"):
        start(5, 6, 7, 5.5, 9, resume=tmp_path / "all/step_00000015")
    saved = CheckpointStore(tmp_path / "all").restore(step).train["params"]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, jax.device_get(trainer.state.params), saved)))


# -- as a plain function --


@pytest.mark.slow
def test_as_a_plain_function_it_checks_every_checkpoint(trainer, tmp_path):
    best = BestCheckpoint(tmp_path, monitor="valid_loss", keep=2)
    process = fitflax.serial(trainer.eval_loop((X, Y), name="valid"), best)
    values = {}
    for checkpoint in trainer.train_loop(X, Y, batch_size=4, steps=6, every=fitflax.every(steps=2)):
        values[checkpoint.step] = process(checkpoint).metrics["valid"]["loss"]
    assert steps_in(tmp_path) == sorted(sorted(values, key=values.get)[:2])
    assert best.best == min(values.values())


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("restore_best", [False, True])
def test_if_saving_the_best_fails_the_previous_best_stays_the_best(asynchronous, restore_best, trainer, tmp_path, monkeypatch):
    save = CheckpointStore.save

    def fail_once(self: CheckpointStore, *, step: int, owner: str, **options: Any) -> Any:
        if step == 15 and owner.startswith("Best"):
            raise CheckpointError("No space left on device")
        return save(self, step=step, owner=owner, **options)

    def start(*values: float, best: BestCheckpoint) -> None:
        saving = ModelCheckpoint(tmp_path / "all", asynchronous=asynchronous)
        fit(trainer, scores(*values), best, saving, epochs=len(values), resume="auto")

    def make() -> BestCheckpoint:
        return BestCheckpoint(tmp_path / "best", monitor="score", mode="min", asynchronous=asynchronous, restore_best=restore_best)

    best, again = make(), make()
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="No space left on device"):
        patch.setattr(CheckpointStore, "save", fail_once)
        start(3, 2, 1, 5, 5, 5, 5, best=best)
    assert (best.best, best.best_step, steps_in(tmp_path / "best")) == (2, 10, [10])
    assert 15 <= steps_in(tmp_path / "all")[-1] < 35
    start(3, 2, 1, 5, 5, 5, 5, 4, best=again)
    assert (again.best, again.best_step, steps_in(tmp_path / "best")) == (2, 10, [10])
