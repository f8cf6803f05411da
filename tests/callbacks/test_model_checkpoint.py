"""ModelCheckpoint: when it saves, what it keeps, which directories it uses, and what happens when the disk fails."""

import errno
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import BestCheckpoint, Callback, LambdaCallback, ModelCheckpoint, model_checkpoint
from fitflax.checkpoints import CheckpointStore, checkpoint_store
from fitflax.errors import CallbackError, CheckpointError, DirectoryInUseError
from fitflax.loops.training_loop import Run
from tests.run_script import make_trainer, steps_in

X, Y = np.linspace(0, 1, 80, dtype=np.float32).reshape(20, 4), np.zeros(20, np.int32)  # 5 batches of 4


def fit(trainer: fitflax.Trainer, *callbacks: Callback, **options: Any) -> fitflax.History:
    return trainer.fit(X, Y, batch_size=4, verbose=0, callbacks=list(callbacks), **options)


class Recorder(CheckpointStore):
    """Records every checkpoint that is written."""

    written: list[int]

    def save(self, *, step: int, **options: Any) -> pathlib.Path:
        self.written = [*getattr(self, "written", []), step]
        return super().save(step=step, **options)


def recorded(callback: Any) -> Any:
    callback.store = Recorder(callback.directory)
    return callback


# -- when it saves --


@pytest.mark.parametrize(("save_last", "steps"), [(False, [15, 30, 45]), (True, [15, 30, 45, 50])])
def test_every_15_steps_with_5_steps_per_epoch_saves_at_the_end_of_every_third_epoch(save_last, steps, trainer, tmp_path):
    """Case 16."""
    fit(trainer, ModelCheckpoint(tmp_path, every=fitflax.every(steps=15), keep=None, save_last=save_last), epochs=10)
    assert steps_in(tmp_path) == steps


@pytest.mark.parametrize("steps_per_epoch", [5, 100])
@pytest.mark.parametrize(("save_last", "steps"), [(False, [2, 4]), (True, [4, 5])])
def test_saving_every_2_of_5_steps_with_keep_2_leaves_the_newest_two(save_last, steps, steps_per_epoch, trainer, tmp_path):
    """Case 25, at the end of an epoch and inside one."""
    callback = ModelCheckpoint(tmp_path, every=fitflax.every(steps=2), keep=2, save_last=save_last)
    fit(trainer, callback, steps=5, steps_per_epoch=steps_per_epoch)
    assert steps_in(tmp_path) == steps


def test_the_last_step_is_saved_if_the_trigger_fires_even_without_save_last(trainer, tmp_path):
    fit(trainer, ModelCheckpoint(tmp_path, every=fitflax.every(steps=2), save_last=False), steps=4, steps_per_epoch=100)
    assert steps_in(tmp_path) == [2, 4]


def test_by_default_it_saves_at_the_end_of_each_epoch_and_of_the_run(trainer, tmp_path):
    fit(trainer, ModelCheckpoint(tmp_path), steps=12)
    assert steps_in(tmp_path) == [5, 10, 12]


@pytest.mark.parametrize("steps", [10, 12])
@pytest.mark.mostly_slow
def test_no_step_is_saved_twice(steps, trainer, tmp_path):
    """Case 35: the last step is a multiple of all periods, or of only one."""
    callback = recorded(ModelCheckpoint(tmp_path, every=fitflax.every(steps=5) | fitflax.every(epochs=1) | fitflax.every(steps=2)))
    fit(trainer, callback, steps=steps)
    assert callback.store.written == [2, 4, 5, 6, 8, 10, 12][: 6 if steps == 10 else 7]


def test_a_run_that_is_stopped_at_a_saved_checkpoint_does_not_save_it_again(trainer, tmp_path):
    callback = recorded(ModelCheckpoint(tmp_path, every=fitflax.every(steps=3)))
    stop = LambdaCallback(lambda checkpoint: trainer.stop("enough"), every=fitflax.at(6))
    fit(trainer, callback, stop, steps=100, steps_per_epoch=50)
    assert (callback.store.written, trainer.step) == ([3, 6], 6)


@pytest.mark.parametrize("steps", [6, 7])
def test_a_run_that_is_stopped_between_checkpoints_saves_its_last_step(steps, trainer, tmp_path):
    callback = recorded(ModelCheckpoint(tmp_path, every=fitflax.every(steps=4)))
    fit(trainer, callback, LambdaCallback(on_train_batch_end=lambda batch, logs: trainer.step == steps and trainer.stop("enough")), steps=100)
    assert callback.store.written == [4, steps]


class Clock:
    """A clock that advances by one second per step."""

    def __init__(self, trainer: fitflax.Trainer) -> None:
        self.trainer = trainer

    def __call__(self) -> float:
        return 100.0 + self.trainer.step


@pytest.fixture
def clock(trainer: fitflax.Trainer, monkeypatch: pytest.MonkeyPatch) -> Clock:
    result = Clock(trainer)
    monkeypatch.setitem(Run.__init__.__kwdefaults__, "clock", result)
    return result


def test_a_time_trigger_saves_by_the_clock(trainer, clock, tmp_path):
    fit(trainer, ModelCheckpoint(tmp_path, every=fitflax.every(seconds=4), save_last=False, keep=None), steps=19)
    assert steps_in(tmp_path) == [4, 8, 12, 16]


def test_a_time_trigger_continues_where_it_was_after_a_resume(trainer, clock, tmp_path):
    def callback() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, every=fitflax.every(seconds=4), keep=None)

    fit(trainer, callback(), steps=6)
    assert steps_in(tmp_path) == [4, 6]
    fit(trainer, callback(), steps=11, resume="auto")
    assert steps_in(tmp_path) == [4, 6, 8, 11]


# -- what is kept --


@pytest.mark.parametrize(("keep", "steps"), [(1, [20]), (2, [15, 20]), (3, [10, 15, 20]), (None, [5, 10, 15, 20])])
def test_keep_is_the_number_of_newest_checkpoints_that_are_kept(keep, steps, trainer, tmp_path):
    fit(trainer, ModelCheckpoint(tmp_path, keep=keep), epochs=4)
    assert steps_in(tmp_path) == steps


def test_keep_every_keeps_checkpoints_forever(trainer, tmp_path):
    fit(trainer, ModelCheckpoint(tmp_path, keep=1, keep_every=10), epochs=7)
    assert steps_in(tmp_path) == [10, 20, 30, 35]


def test_keep_continues_counting_after_a_resume(trainer, tmp_path):
    for epochs in (3, 5):
        fit(trainer, ModelCheckpoint(tmp_path, keep=2, keep_every=10), epochs=epochs, resume="auto")
    assert steps_in(tmp_path) == [10, 20, 25]


def test_the_checkpoint_resumed_from_is_deleted_only_after_a_newer_one_is_complete(trainer, tmp_path, monkeypatch):
    """Case 25."""
    fit(trainer, ModelCheckpoint(tmp_path, keep=1), steps=5)
    present: list[list[int]] = []
    write = checkpoint_store.write_checkpoint

    def write_and_record(directory: pathlib.Path, **options: Any) -> None:
        write(directory, **options)
        present.append(steps_in(tmp_path))

    monkeypatch.setattr(checkpoint_store, "write_checkpoint", write_and_record)
    fit(trainer, ModelCheckpoint(tmp_path, keep=1), steps=10, resume="auto")
    assert present == [[5]] and steps_in(tmp_path) == [10]


@pytest.mark.parametrize("best_first", [False, True])
def test_sharing_a_directory_with_best_checkpoint_keeps_both_and_writes_each_step_once(best_first, trainer, tmp_path, monkeypatch):
    """Case 23: with accuracies .9 .5 .4 .3, the best and the latest checkpoints are those of epochs 1 and 4."""
    written: list[str] = []
    write = checkpoint_store.write_checkpoint
    monkeypatch.setattr(checkpoint_store, "write_checkpoint", lambda directory, **options: (written.append(directory.name), write(directory, **options)))
    scores = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(score=[0.9, 0.5, 0.4, 0.3][epoch]))
    callbacks = [ModelCheckpoint(tmp_path, keep=1), BestCheckpoint(tmp_path, monitor="score", mode="max")]
    fit(trainer, scores, *(callbacks[::-1] if best_first else callbacks), epochs=4)
    found = CheckpointStore(tmp_path)
    assert (found.steps(), found.latest(), found.best("score", "max")) == ([5, 20], 20, 5)
    assert [name.split(".")[1] for name in written] == ["step_00000005", "step_00000010", "step_00000015", "step_00000020"]


# -- directories --


def test_a_directory_in_use_is_an_error_before_the_first_step(trainer, tmp_path):
    """Case 26."""
    fit(trainer, ModelCheckpoint(tmp_path), steps=5)
    trainer.build((X[:4], Y[:4]))
    with pytest.raises(DirectoryInUseError, match=r"holds checkpoints of run .*: step 5.*overwrite=True"):
        fit(trainer, ModelCheckpoint(tmp_path), steps=5)
    assert trainer.step == 0 and steps_in(tmp_path) == [5]


def test_two_model_checkpoints_in_one_directory_are_an_error(trainer, tmp_path, monkeypatch):
    """Each would delete the checkpoints of the other."""
    monkeypatch.chdir(tmp_path)
    two = [ModelCheckpoint(tmp_path / "a", every=fitflax.every(steps=2), keep=1), ModelCheckpoint("a", keep=None)]
    for use in (lambda: fit(trainer, *two, epochs=3), lambda: fitflax.serial(*two)):
        with pytest.raises(CallbackError, match="2 ModelCheckpoints save in the same directory"):
            use()
    assert trainer.step == 0


def test_errors_of_other_callbacks_do_not_hide_that_a_directory_is_in_use(trainer, tmp_path):
    """If on_train_begin of a callback was not called, its on_train_end may fail."""

    class Timed(Callback):
        def on_train_begin(self, logs):
            self.began = 0.0

        def on_train_end(self, logs):
            self.took = 1.0 - self.began

    fit(trainer, ModelCheckpoint(tmp_path), steps=5)
    trainer.build((X[:4], Y[:4]))
    with pytest.raises(DirectoryInUseError):
        fit(trainer, Timed(), ModelCheckpoint(tmp_path), steps=5)


def test_overwrite_deletes_the_old_run_once_the_first_new_checkpoint_is_complete(trainer, tmp_path, monkeypatch):
    fit(trainer, ModelCheckpoint(tmp_path), steps=5)
    trainer.build((X[:4], Y[:4]))
    old_run_exists: list[bool] = []
    write = checkpoint_store.write_checkpoint

    def write_and_record(directory: pathlib.Path, **options: Any) -> None:
        write(directory, **options)
        old_run_exists.append(any(tmp_path.glob(".old-*/step_00000005")))

    monkeypatch.setattr(checkpoint_store, "write_checkpoint", write_and_record)
    fit(trainer, ModelCheckpoint(tmp_path, overwrite=True), steps=2)
    assert old_run_exists == [True] and steps_in(tmp_path) == [2] and not any(tmp_path.glob(".old-*"))


def test_a_run_that_overwrites_and_dies_before_its_first_checkpoint_loses_nothing(trainer, tmp_path):
    fit(trainer, ModelCheckpoint(tmp_path), steps=5)
    trainer.build((X[:4], Y[:4]))

    def die(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(trainer, ModelCheckpoint(tmp_path, overwrite=True), LambdaCallback(on_train_batch_begin=die), steps=2)
    fit(trainer, ModelCheckpoint(tmp_path), steps=7, resume="auto")
    assert trainer.step == 7 and steps_in(tmp_path) == [5, 7]


@pytest.mark.parametrize("how", ["weights_only", "partial", "load_weights"])
def test_a_run_from_restored_parameters_is_a_new_one_and_does_not_delete_the_old_one(how, trainer, tmp_path):
    fit(trainer, ModelCheckpoint(tmp_path / "a", keep=None), epochs=2)
    if how == "load_weights":
        trainer.load_weights(trainer.save_weights(tmp_path / "weights.safetensors"))
    else:
        trainer.restore(tmp_path / "a", **{how: True})
    with pytest.raises(DirectoryInUseError):
        fit(trainer, ModelCheckpoint(tmp_path / "a"), epochs=1)
    assert steps_in(tmp_path / "a") == [5, 10]


def test_fitting_twice_with_the_same_trainer_and_callbacks_works(trainer, tmp_path):
    callbacks = [ModelCheckpoint(tmp_path / "a", keep=None), BestCheckpoint(tmp_path / "b", monitor="loss", keep=None)]
    for steps in (7, 13):
        fit(trainer, *callbacks, steps=steps)
    assert trainer.step == 20
    # The second fit begins a new pass, so its epochs end at 12 and 17.
    assert steps_in(tmp_path / "a") == [5, 7, 12, 17, 20]


# -- errors --


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_raises_and_leaves_older_checkpoints_intact(asynchronous, trainer, tmp_path, monkeypatch):
    """Case 27."""
    write = checkpoint_store.write_checkpoint

    def full(directory: pathlib.Path, **options: Any) -> None:
        write(directory, **options)
        if "step_00000005" not in directory.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_store, "write_checkpoint", full)
    with pytest.raises(CheckpointError, match=r"step_000000\d\d.*No space left on device"):
        fit(trainer, ModelCheckpoint(tmp_path, asynchronous=asynchronous), epochs=4)
    # The next save or the end of the run raises the error.
    assert trainer.step in ((10, 15, 20) if asynchronous else (10,)) and steps_in(tmp_path) == [5]
    CheckpointStore(tmp_path).verify(5)
    assert not [entry.name for entry in tmp_path.iterdir() if "step_0000001" in entry.name]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_numbers_out_of_range_are_errors(value, tmp_path):
    with pytest.raises(CallbackError, match=r"ModelCheckpoint\(keep=...\)"):
        ModelCheckpoint(tmp_path, keep=value)
    with pytest.raises(CallbackError, match=r"ModelCheckpoint\(keep_every=...\)"):
        ModelCheckpoint(tmp_path, keep_every=value)


def test_a_number_instead_of_a_trigger_is_an_error(tmp_path):
    with pytest.raises(CallbackError, match=r"every\(steps=100\)"):
        ModelCheckpoint(tmp_path, every=100)


# -- as a plain function --


def test_it_can_be_called_as_a_plain_function_of_checkpoints(trainer, tmp_path):
    save = ModelCheckpoint(tmp_path, every=fitflax.every(steps=3), keep=None)
    passed = []
    for checkpoint in trainer.train_loop(X, Y, batch_size=4, steps=8):
        passed.append(save(checkpoint) is checkpoint)
    assert steps_in(tmp_path) == [3, 6, 8] and passed == [True] * 8


def test_it_saves_each_step_once_in_serial_with_an_evaluation_and_best_checkpoint(trainer, tmp_path):
    save, best = recorded(ModelCheckpoint(tmp_path / "a", every=fitflax.every(steps=4))), BestCheckpoint(tmp_path / "b", monitor="valid_loss")
    with trainer.train_loop(X, Y, batch_size=4, steps=8, every=fitflax.every(steps=4)) as loop:
        process = fitflax.serial(trainer.eval_loop((X, Y), name="valid"), best, save)
        for checkpoint in loop:
            process(checkpoint)
    assert save.store.written == [4, 8]
    metrics = json.loads((tmp_path / "a/step_00000008/metadata.json").read_text())["metrics"]
    assert set(metrics) == {"train", "valid"}
    assert best.best_step == 8 and steps_in(tmp_path / "b") == [8]


def test_a_loop_yields_only_its_own_steps_across_the_ends_of_epochs(trainer, tmp_path):
    """Case 30 across the ends of epochs."""
    loop = trainer.train_loop(X, Y, batch_size=4, steps=13, every=fitflax.every(steps=3, offset=1))
    seen = [(c.step, c.n_completed_steps, int(c.state.step), c.step_in_epoch) for c in loop]
    assert seen == [(1, 1, 1, 1), (4, 3, 4, 4), (7, 3, 7, 2), (10, 3, 10, 5), (13, 3, 13, 3)]


def test_a_loop_can_step_across_the_end_of_an_epoch(trainer):
    loop = trainer.train_loop(X, Y, batch_size=4, steps=12, every=fitflax.every(steps=100))
    assert [loop.run(steps).step for steps in (4, 3, 4)] == [4, 7, 11]
    assert loop.next_step().step == 12 and loop.next_step() is None


def test_a_callback_may_change_the_state_before_it_is_saved(trainer, tmp_path):
    """At the end of an epoch and at a checkpoint. Training continues with the state that is saved."""

    def double(*arguments: Any) -> None:
        trainer.learning_rate = 2 * trainer.learning_rate

    before = trainer.learning_rate
    fit(trainer, LambdaCallback(on_epoch_end=double, on_checkpoint=double), ModelCheckpoint(tmp_path), epochs=2)
    assert trainer.learning_rate == pytest.approx(16 * before)
    again = make_trainer(model=nn.Dense(3), optimizer="sgd")
    again.restore(tmp_path)
    assert again.learning_rate == trainer.learning_rate


def test_a_loop_that_continues_after_an_error_does_not_save_in_the_directory_of_another_run(trainer, tmp_path):
    fit(trainer, ModelCheckpoint(tmp_path), epochs=2)
    trainer.build((X[:4], Y[:4]))
    saving = [ModelCheckpoint(tmp_path, every=fitflax.every(steps=1)), BestCheckpoint(tmp_path, monitor="loss")]
    with trainer.train_loop(X, Y, batch_size=4, steps=3) as loop:
        for checkpoint in loop:
            for save in saving:
                with pytest.raises(DirectoryInUseError):
                    save(checkpoint)
    assert steps_in(tmp_path) == [5, 10]


def test_in_a_loop_over_a_state_that_is_split_between_processes_process_0_opens_the_run_first(tmp_path, monkeypatch):
    calls = []

    def after_first(make):
        calls.append("after_first")
        make()

    class Opening(ModelCheckpoint):
        def open_run(self, run_id, step):
            calls.append("open_run")
            super().open_run(run_id, step)

    monkeypatch.setattr(model_checkpoint, "after_first", after_first)
    for is_split in (False, True):
        monkeypatch.setattr(model_checkpoint, "spans_processes", lambda tree, found=is_split: found)
        save = Opening(tmp_path / f"{is_split}")
        for checkpoint in make_trainer().train_loop(X, Y, batch_size=4, steps=2):
            save(checkpoint)
    assert calls == ["open_run", "after_first", "open_run"]
