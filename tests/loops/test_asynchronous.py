"""Saving while training goes on: what is saved is the step's own state, failures come out, the end waits, and one directory has one run at a time."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import fitflax
from fitflax.callbacks import BestCheckpoint, Callback, LambdaCallback, ModelCheckpoint
from fitflax.checkpoints import CheckpointStore, directories, documents
from fitflax.errors import CheckpointError, DirectoryInUseError, FitflaxWarning
from fitflax.parallel import DataParallel
from tests import run_script
from tests.run_script import TRAIN, VALID, at, differences, directory_of, leaves_of, make_trainer, steps_in

EVERY = fitflax.every(steps=1)


def fit(trainer: fitflax.Trainer, *callbacks: Callback, **options: Any) -> fitflax.History:
    return trainer.fit(TRAIN, batch_size=4, verbose=0, callbacks=callbacks, **options)


class Writes:
    """Stands for the disk: holds writes back until it is opened, or fails them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, failing: tuple[int, ...] = ()) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()
        self.written: list[str] = []
        self._failing, self._write = failing, directories.write_checkpoint
        monkeypatch.setattr(directories, "write_checkpoint", self)

    def __call__(self, directory: pathlib.Path, **options: Any) -> None:
        self.begun.set()
        assert self.opened.wait(120)
        step = options["metadata"]["step"]
        self.written.append(f"{directory.parent.name} {step}")
        if step in self._failing:
            raise OSError(28, "No space left on device")
        self._write(directory, **options)


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.mostly_slow
@pytest.mark.slow
def test_what_is_saved_is_the_state_of_its_step_though_later_steps_took_its_buffers(is_on_host, tmp_path, monkeypatch):
    monkeypatch.setattr(DataParallel, "is_on_host", is_on_host)  # An accelerator's state is copied to the host at once.
    writes, trainer, states = Writes(monkeypatch), make_trainer(), {}
    look = LambdaCallback(lambda checkpoint: states.update({checkpoint.step: leaves_of(dict(checkpoint.state.params))}), every=EVERY)
    look.needs_gradients_norm = False  # As in the run that this one is compared with.
    # Step 1 is being written and step 2 waits, until step 8 is done.
    when = fitflax.at(1, 2)
    fit(
        trainer,
        look,
        at(trainer, "on_train_batch_end", 8, lambda step: writes.opened.set()),
        ModelCheckpoint(tmp_path, every=when, keep=None),
        steps=9,
    )
    assert steps_in(tmp_path) == [1, 2, 9]
    again = make_trainer()
    again.fit(TRAIN, batch_size=4, steps=9, verbose=0, callbacks=[ModelCheckpoint(tmp_path / "again", asynchronous=False, every=when, keep=None)])
    assert not differences(directory_of(tmp_path / "again"), directory_of(tmp_path))
    for step in (1, 2, 9):
        assert leaves_of(CheckpointStore(tmp_path).restore(step).train["params"]) == states[step]


@pytest.mark.slow
def test_saving_in_a_thread_and_at_once_leave_the_same_files(tmp_path):
    for asynchronous in (True, False):
        root = tmp_path / str(asynchronous)
        fit(
            make_trainer(),
            ModelCheckpoint(root / "checkpoints", every=EVERY, keep=None, asynchronous=asynchronous),
            BestCheckpoint(root / "best", keep=2, asynchronous=asynchronous),
            steps=12,
            validation_data=VALID,
        )
    for name in ("checkpoints", "best"):
        assert not differences(directory_of(tmp_path / "True" / name), directory_of(tmp_path / "False" / name))


@pytest.mark.slow
def test_all_who_save_a_step_share_one_copy_of_the_state(tmp_path, monkeypatch):
    copies: list[str] = []
    copy = DataParallel.copy_once

    def counting(self: DataParallel, tree: Any) -> Any:
        copies.append("state" if "train" in tree else "rest")
        return copy(self, tree)

    monkeypatch.setattr(DataParallel, "copy_once", counting)
    writes = Writes(monkeypatch)
    thread = threading.Timer(0.5, writes.opened.set)  # The first save is still going on when the second one comes.
    thread.start()
    fit(make_trainer(), ModelCheckpoint(tmp_path / "a"), BestCheckpoint(tmp_path / "b", monitor="loss"), epochs=1)
    thread.join()
    assert copies.count("state") == 1 and writes.written == ["b 5", "a 5"]


def test_the_end_of_fit_waits_for_all_saves(tmp_path, monkeypatch):
    writes = Writes(monkeypatch)
    thread = threading.Timer(0.5, writes.opened.set)
    thread.start()
    fit(make_trainer(), ModelCheckpoint(tmp_path, keep=None), steps=7)
    thread.join()
    assert steps_in(tmp_path) == [5, 7]
    assert not [one for one in threading.enumerate() if one.name == "fitflax-saver"]


@pytest.mark.slow
def test_a_failed_save_is_raised_by_the_next_one_which_is_made_at_once_before(tmp_path, monkeypatch):
    writes = Writes(monkeypatch, failing=(5,))
    writes.opened.set()
    trainer = make_trainer()
    with pytest.raises(CheckpointError, match=r"step_00000005: .*No space left on device.*Checkpoints saved before are intact") as caught:
        fit(trainer, ModelCheckpoint(tmp_path, every=fitflax.every(steps=5)), steps=100)
    assert caught.value.__traceback__ is not None
    # The step that was reached is not lost if the disk has room again.
    assert trainer.step < 100 and steps_in(tmp_path) == [trainer.step]
    resumed = make_trainer()
    fit(resumed, ModelCheckpoint(tmp_path, every=fitflax.every(steps=5)), steps=40, resume="auto")
    whole = make_trainer()
    fit(whole, steps=40)
    assert run_script.state_of(resumed) == run_script.state_of(whole)


def test_what_the_next_save_met_with_after_a_failed_one_is_raised_with_a_note_of_the_first(tmp_path, monkeypatch):
    Writes(monkeypatch, failing=tuple(range(5, 100))).opened.set()
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        fit(make_trainer(), ModelCheckpoint(tmp_path, every=fitflax.every(steps=5)), steps=1000)
    assert any("An earlier save had failed, too: Could not save" in note for note in caught.value.__notes__)
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_error_in_saving_what_an_exception_broke_off_shows_that_exception_too(asynchronous, tmp_path, monkeypatch):
    Writes(monkeypatch, failing=(2,)).opened.set()
    trainer = make_trainer()

    def batches() -> Iterator[Any]:
        yield from [(TRAIN[0][:4], TRAIN[1][:4])] * 2
        raise ValueError("a bad file")

    with pytest.raises(CheckpointError, match=r"step_00000002: .*No space left on device") as caught:
        trainer.fit(batches, verbose=0, callbacks=[ModelCheckpoint(tmp_path, asynchronous=asynchronous)])
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.index("ValueError: a bad file") < shown.index("OSError: [Errno 28]") < shown.index("CheckpointError: Could not save")


def test_litter_of_this_very_process_is_removed_by_its_next_run(tmp_path):
    fit(make_trainer(), ModelCheckpoint(tmp_path), steps=2)
    (tmp_path / f".step_00000003.tmp-{documents.PROCESS}-4567").mkdir()
    fit(make_trainer(), ModelCheckpoint(tmp_path), steps=3, resume="auto")
    assert not list(tmp_path.glob(".step*")) and steps_in(tmp_path) == [2, 3]


def test_a_failed_last_save_is_raised_by_the_end_and_on_train_end_is_called(tmp_path, monkeypatch):
    Writes(monkeypatch, failing=(5,)).opened.set()
    ended: list[Any] = []
    with pytest.raises(CheckpointError, match="step_00000005"):
        fit(make_trainer(), ModelCheckpoint(tmp_path), LambdaCallback(on_train_end=ended.append), epochs=1)
    assert len(ended) == 1 and steps_in(tmp_path) == []


@pytest.mark.parametrize("is_known", [False, True])
def test_no_checkpoint_names_a_best_one_whose_save_failed(is_known, tmp_path, monkeypatch):
    """Where the failure is not yet known the regular one is left out; where it is, it is made at once and knows better."""
    write, failed, submitted = directories.write_checkpoint, threading.Event(), threading.Event()

    def failing(directory: pathlib.Path, **options: Any) -> None:
        if directory.parent.name == "best":
            assert is_known or submitted.wait(60)
            failed.set()
            raise OSError(28, "No space left on device")
        write(directory, **options)

    class Regular(ModelCheckpoint):
        def on_checkpoint(self, checkpoint: fitflax.Checkpoint) -> None:
            if is_known:
                assert failed.wait(60)
                checkpoint.run.saver._thread.wait_until(lambda: checkpoint.run.saver.has_failed)
            super().on_checkpoint(checkpoint)
            submitted.set()

    monkeypatch.setattr(directories, "write_checkpoint", failing)
    best = BestCheckpoint(tmp_path / "best", monitor="loss")
    with pytest.raises(CheckpointError, match="best"):
        fit(make_trainer(), Regular(tmp_path / "checkpoints"), best, epochs=1)
    assert steps_in(tmp_path / "best") == [] and best.best_step is None
    assert steps_in(tmp_path / "checkpoints") == ([5] if is_known else [])
    if is_known:
        assert CheckpointStore(tmp_path / "checkpoints").restore().run["callbacks"][best.state_key]["kept"] == []


def test_a_best_checkpoint_that_is_gone_is_named_and_no_longer_counts(tmp_path):
    def callbacks() -> list[Callback]:
        return [ModelCheckpoint(tmp_path / "checkpoints"), BestCheckpoint(tmp_path / "best", monitor="loss", keep=None)]

    fit(make_trainer(), *callbacks(), epochs=2)
    best = CheckpointStore(tmp_path / "best")
    gone = best.steps()[-1]
    for path in best.path(gone).iterdir():
        path.unlink()
    best.path(gone).rmdir()
    trainer = make_trainer()
    with pytest.warns(FitflaxWarning, match=rf"best no longer holds the best checkpoints of steps \[{gone}\]"):
        fit(trainer, *callbacks(), epochs=3, resume="auto")
    assert trainer.step == 15


def test_a_second_ctrl_c_does_not_wait_for_a_save(tmp_path, monkeypatch):
    writes, trainer = Writes(monkeypatch), make_trainer()

    def interrupt(step: int) -> None:
        assert writes.begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(trainer, ModelCheckpoint(tmp_path, every=fitflax.at(1)), at(trainer, "on_train_batch_end", 2, interrupt), steps=100)
    assert trainer.step == 2 and steps_in(tmp_path) == []
    # The process lives on, and its next run waits for what is still being written.
    writes.opened.set()
    fit(make_trainer(), ModelCheckpoint(tmp_path, overwrite=True), steps=3, resume="auto")
    assert steps_in(tmp_path)[-1] == 3


def test_a_ctrl_c_while_the_end_waits_leaves_at_once(tmp_path, monkeypatch, capsys):
    writes, trainer = Writes(monkeypatch), make_trainer()
    main = threading.get_ident()
    timer = threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGINT))

    def begin(step: int) -> None:
        timer.start()
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(trainer, ModelCheckpoint(tmp_path), at(trainer, "on_train_batch_end", 2, begin), steps=100)
    timer.join()
    assert steps_in(tmp_path) == []
    assert capsys.readouterr().err == "\nFinishing the step and saving; Ctrl-C again leaves at once.\n"
    writes.opened.set()


@pytest.mark.slow
def test_in_an_own_loop_the_end_of_the_loop_waits_and_gives_the_directory_back(tmp_path):
    trainer = make_trainer()
    save = ModelCheckpoint(tmp_path, every=fitflax.every(steps=2), keep=None)
    for reached in trainer.train_loop(TRAIN, batch_size=4, steps=5):
        save(reached)
    assert steps_in(tmp_path) == [2, 4, 5]
    with trainer.train_loop(TRAIN, batch_size=4, steps=3) as loop:
        save(loop.next_checkpoint())
        with pytest.raises(DirectoryInUseError, match="another run of this very process"):
            fit(make_trainer(), ModelCheckpoint(tmp_path, overwrite=True), steps=1)
        save(loop.run(2))
    assert steps_in(tmp_path) == [2, 4, 5, 6, 8]
    fit(make_trainer(), ModelCheckpoint(tmp_path, overwrite=True), steps=1)


# -- one run at a time --


@pytest.mark.slow
def test_a_second_run_in_a_directory_of_a_live_one_is_an_error_before_its_first_step(tmp_path, process_env):
    alive = run_script.start(tmp_path, process_env, fit={"steps": 12}, stops=[["on_train_batch_end", 3, "wait"]])
    assert alive.stdout.readline().startswith("at step 3")
    steps: list[int] = []
    trainer = make_trainer()
    for resume in ("auto", None):
        callbacks = [ModelCheckpoint(tmp_path / "checkpoints", overwrite=True), at(trainer, "on_train_batch_begin", 0, steps.append)]
        with pytest.raises(DirectoryInUseError, match=rf"checkpoints is in use by process {alive.pid} on .* Two runs cannot save in one directory"):
            fit(trainer, *callbacks, steps=3, resume=resume)
    assert steps == []
    alive.stdin.write("\n")
    run_script.finish(alive)
    assert steps_in(tmp_path / "checkpoints")[-1] == 12


def test_two_runs_of_one_process_in_one_directory_are_refused(tmp_path):
    inner: list[str] = []

    def begin_another(step: int) -> None:
        with pytest.raises(DirectoryInUseError, match="another run of this very process") as caught:
            fit(make_trainer(), ModelCheckpoint(tmp_path, overwrite=True), steps=1)
        inner.append(str(caught.value))

    trainer = make_trainer()
    fit(trainer, ModelCheckpoint(tmp_path), at(trainer, "on_train_batch_end", 2, begin_another), steps=3)
    assert len(inner) == 1 and steps_in(tmp_path) == [3]


@pytest.mark.slow
def test_a_fit_that_fails_before_its_first_step_gives_the_directory_back(tmp_path):
    fit(make_trainer(), ModelCheckpoint(tmp_path), steps=2)
    with pytest.raises(fitflax.errors.DataError):
        make_trainer().fit(np.zeros((4, 4), np.float32), np.zeros(3, np.int32), callbacks=[ModelCheckpoint(tmp_path)], resume="auto", verbose=0)
    code = "import sys, fitflax; s = fitflax.checkpoints.CheckpointStore(sys.argv[1]); s.claim(s.run_id(), overwrite=False)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, check=True, timeout=120)
