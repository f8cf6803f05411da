"""Saving while training continues: a checkpoint has the state of its step, failures are raised, the end waits, and a directory has one run at a time."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import fitflax
from fitflax.callbacks import BestCheckpoint, Callback, LambdaCallback, ModelCheckpoint
from fitflax.checkpoints import CheckpointStore, checkpoint_store, json_documents, saver
from fitflax.checkpoints.memory import DeviceRoom, Loan, ReusedMemory
from fitflax.checkpoints.plain_tree import Plain
from fitflax.checkpoints.plain_tree import leaves_of as leaves_of_plain
from fitflax.errors import CheckpointError, DirectoryInUseError, FitflaxWarning
from fitflax.parallel import DataParallel
from fitflax.steps import live_state as live
from tests import run_script
from tests.run_script import TRAIN, VALID, at, differences, directory_of, leaves_of, make_trainer, steps_in

EVERY = fitflax.every(steps=1)


def fit(trainer: fitflax.Trainer, *callbacks: Callback, **options: Any) -> fitflax.History:
    return trainer.fit(TRAIN, batch_size=4, verbose=0, callbacks=callbacks, **options)


class Writes:
    """Stands in for the disk: delays writes until it is opened, or makes them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, failing: tuple[int, ...] = ()) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()
        self.written: list[str] = []
        self.addresses: list[list[int]] = []
        self.niceness: set[int] = set()
        self._failing, self._write = failing, checkpoint_store.write_checkpoint
        monkeypatch.setattr(checkpoint_store, "write_checkpoint", self)

    def __call__(self, directory: pathlib.Path, **options: Any) -> None:
        leaves = [leaf for leaf in leaves_of_plain(options["train"].tree) if isinstance(leaf, np.ndarray)] if isinstance(options["train"], Plain) else []
        self.addresses.append([leaf.ctypes.data for leaf in leaves])
        before = [leaf.tobytes() for leaf in leaves]
        self.niceness |= {os.getpriority(os.PRIO_PROCESS, threading.get_native_id())} if sys.platform == "linux" else {19}
        self.begun.set()
        assert self.opened.wait(120)
        assert [leaf.tobytes() for leaf in leaves] == before, "the copy was overwritten while it was written"
        step = options["metadata"]["step"]
        self.written.append(f"{directory.parent.name} {step}")
        if step in self._failing:
            raise OSError(28, "No space left on device")
        self._write(directory, **options)


@pytest.mark.parametrize("way", ["a device's copy", "kept memory", "pinned memory", "the devices, then pinned memory"])
@pytest.mark.mostly_slow
@pytest.mark.slow
def test_a_checkpoint_has_the_state_of_its_step_although_later_steps_reuse_its_buffers(way, tmp_path, monkeypatch):
    monkeypatch.setattr(DataParallel, "is_on_host", way == "a device's copy")  # An accelerator's state is copied to the host.
    if "pinned memory" in way:
        monkeypatch.setattr(saver, "may_share", lambda array: False)
    if way.startswith("the devices"):
        monkeypatch.setattr(DeviceRoom, "has", lambda room, num_bytes, devices: True)
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
def test_saving_in_a_thread_and_saving_synchronously_write_the_same_files(tmp_path):
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
def test_callbacks_that_save_the_same_step_share_one_copy_of_the_state(tmp_path, monkeypatch):
    copies: list[str] = []
    copy = DataParallel.copy_once

    def counting(self: DataParallel, tree: Any) -> Any:
        copies.append("state" if "train" in tree else "rest")
        return copy(self, tree)

    monkeypatch.setattr(DataParallel, "copy_once", counting)
    writes = Writes(monkeypatch)
    thread = threading.Timer(0.5, writes.opened.set)  # The first save is still in progress when the second one starts.
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


@pytest.fixture
def loans(monkeypatch):
    """Makes every state count as large. Returns how many copies existed each time one was made, and references to the memory of all copies."""
    monkeypatch.setattr(live, "_LARGE_BYTES", 0)
    return counted(monkeypatch)


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"counts": [], "blocks": []}
    lend = ReusedMemory.lend

    def counting(self: ReusedMemory, num_bytes: int, **options: Any) -> Loan:
        loan = lend(self, num_bytes, **options)
        found["counts"].append(self.num_lent)
        found["blocks"] += [weakref.ref(loan.block)] if all(block() is not loan.block for block in found["blocks"]) else []
        return loan

    monkeypatch.setattr(ReusedMemory, "lend", counting)
    return found


def test_all_copies_of_a_large_state_reuse_the_same_memory_which_is_released_at_the_end(loans, tmp_path, monkeypatch):
    writes = Writes(monkeypatch)
    thread = threading.Timer(0.5, writes.opened.set)  # The second save starts while the first one is being written, and waits.
    thread.start()
    fit(make_trainer(), ModelCheckpoint(tmp_path / "a", every=EVERY, keep=None), steps=7)
    thread.join()
    assert loans["counts"] == [1] * 8 and len(writes.addresses[0]) > 10  # The first one is made before the first step.
    assert writes.niceness == {19}
    assert writes.addresses == [writes.addresses[0]] * 7
    assert [block() for block in loans["blocks"]] == [None]
    fit(make_trainer(), ModelCheckpoint(tmp_path / "b", every=EVERY, keep=None, asynchronous=False), steps=7)
    assert not differences(directory_of(tmp_path / "a"), directory_of(tmp_path / "b"))


@pytest.mark.slow
def test_memory_for_the_first_copy_is_prepared_in_advance_only_if_there_will_be_a_copy(loans, tmp_path, monkeypatch):
    touched, touch = [], ReusedMemory.touch
    monkeypatch.setattr(ReusedMemory, "touch", lambda memory: touched.append(threading.current_thread().name) or touch(memory))
    trainer = make_trainer()
    fit(trainer, ModelCheckpoint(tmp_path / "a", save_last=False, every=fitflax.every(steps=100)), steps=3)
    assert touched == ["fitflax-saver"] and len(loans["blocks"]) == 1 and loans["blocks"][0]() is None
    fit(trainer, ModelCheckpoint(tmp_path / "b", asynchronous=False), steps=1)
    fit(trainer, steps=1)
    assert len(touched) == 1


def test_a_save_helps_to_prepare_its_memory(loans, tmp_path, monkeypatch):
    touched, ready, touch = [], threading.Event(), ReusedMemory.touch

    def slow_in_the_thread(memory: ReusedMemory) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert ready.wait(60)  # As if training took all CPU time.
        touched.extend([threading.current_thread().name] * len(memory._untouched))
        touch(memory)
        ready.set()

    monkeypatch.setattr(ReusedMemory, "touch", slow_in_the_thread)
    fit(make_trainer(), ModelCheckpoint(tmp_path, every=EVERY), steps=7)
    assert touched == ["MainThread"] and loans["counts"][:2] == [1, 1] and len(loans["blocks"]) == 1


def test_callbacks_that_save_the_same_step_share_a_copy_of_a_large_state_without_waiting(loans, tmp_path, monkeypatch):
    writes = Writes(monkeypatch)
    thread = threading.Timer(60, writes.opened.set)  # Runs only if something waits.
    thread.start()
    trainer, found = make_trainer(), []
    opens = at(trainer, "on_train_batch_end", 6, lambda step: (found.append((writes.opened.is_set(), list(loans["counts"]))), writes.opened.set()))
    fit(trainer, ModelCheckpoint(tmp_path / "a"), BestCheckpoint(tmp_path / "b", monitor="loss"), opens, steps=6)
    thread.cancel()
    assert found == [(False, [1, 1])] and writes.written[:2] == ["b 5", "a 5"]


@pytest.mark.slow
def test_small_states_of_accelerators_have_two_copies(tmp_path, monkeypatch):
    monkeypatch.setattr(DataParallel, "is_on_host", False)
    found, writes = counted(monkeypatch), Writes(monkeypatch)
    thread = threading.Timer(0.5, writes.opened.set)
    thread.start()
    fit(make_trainer(), ModelCheckpoint(tmp_path, every=EVERY, keep=None), steps=7)
    thread.join()
    assert max(found["counts"]) == 2 and len({tuple(addresses) for addresses in writes.addresses}) == 2
    assert [block() for block in found["blocks"]] == [None, None]


def test_nothing_waits_for_a_failed_save_of_a_large_state(loans, tmp_path, monkeypatch):
    Writes(monkeypatch, failing=(1,)).opened.set()
    trainer = make_trainer()
    with pytest.raises(CheckpointError, match="No space left on device"):
        fit(trainer, ModelCheckpoint(tmp_path, every=EVERY), steps=100)
    assert steps_in(tmp_path) == [trainer.step] and loans["counts"] == [1, 1]


@pytest.mark.slow
def test_a_failed_save_is_raised_by_the_next_one_after_it_has_saved_synchronously(tmp_path, monkeypatch):
    writes = Writes(monkeypatch, failing=(5,))
    writes.opened.set()
    trainer = make_trainer()
    with pytest.raises(CheckpointError, match=r"step_00000005: .*No space left on device.*Earlier checkpoints are intact") as caught:
        fit(trainer, ModelCheckpoint(tmp_path, every=fitflax.every(steps=5)), steps=100)
    assert caught.value.__traceback__ is not None
    # The step that was reached is not lost if the disk has room again.
    assert trainer.step < 100 and steps_in(tmp_path) == [trainer.step]
    resumed = make_trainer()
    fit(resumed, ModelCheckpoint(tmp_path, every=fitflax.every(steps=5)), steps=40, resume="auto")
    whole = make_trainer()
    fit(whole, steps=40)
    assert run_script.state_of(resumed) == run_script.state_of(whole)


@pytest.mark.slow
def test_if_the_save_after_a_failed_one_fails_too_its_error_has_a_note_about_the_first(tmp_path, monkeypatch):
    Writes(monkeypatch, failing=tuple(range(5, 100))).opened.set()
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        fit(make_trainer(), ModelCheckpoint(tmp_path, every=fitflax.every(steps=5)), steps=1000)
    assert any("An earlier save also failed: Could not save" in note for note in caught.value.__notes__)
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_error_while_saving_a_run_that_an_exception_interrupted_shows_both(asynchronous, tmp_path, monkeypatch):
    Writes(monkeypatch, failing=(2,)).opened.set()
    trainer = make_trainer()

    def batches() -> Iterator[Any]:
        yield from [(TRAIN[0][:4], TRAIN[1][:4])] * 2
        raise ValueError("a bad file")

    with pytest.raises(CheckpointError, match=r"step_00000002: .*No space left on device") as caught:
        trainer.fit(batches, verbose=0, callbacks=[ModelCheckpoint(tmp_path, asynchronous=asynchronous)])
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.index("ValueError: a bad file") < shown.index("OSError: [Errno 28]") < shown.index("CheckpointError: Could not save")


@pytest.mark.slow
def test_leftover_files_of_the_same_process_are_removed_by_its_next_run(tmp_path):
    fit(make_trainer(), ModelCheckpoint(tmp_path), steps=2)
    (tmp_path / f".step_00000003.tmp-{json_documents.PROCESS}-4567").mkdir()
    fit(make_trainer(), ModelCheckpoint(tmp_path), steps=3, resume="auto")
    assert not list(tmp_path.glob(".step*")) and steps_in(tmp_path) == [2, 3]


def test_a_failed_last_save_is_raised_at_the_end_and_on_train_end_is_called(tmp_path, monkeypatch):
    Writes(monkeypatch, failing=(5,)).opened.set()
    ended: list[Any] = []
    with pytest.raises(CheckpointError, match="step_00000005"):
        fit(make_trainer(), ModelCheckpoint(tmp_path), LambdaCallback(on_train_end=ended.append), epochs=1)
    assert len(ended) == 1 and steps_in(tmp_path) == []


@pytest.mark.parametrize("kind", ["regular", "best"])
def test_a_failed_last_save_is_a_warning_if_the_callback_only_warns(kind, tmp_path, monkeypatch):
    Writes(monkeypatch, failing=(10,)).opened.set()
    options: dict[str, Any] = {"keep": None, "on_save_error": "warn"}

    def make(name: str) -> Callback:
        directory = tmp_path / name
        return BestCheckpoint(directory, monitor="loss", **options) if kind == "best" else ModelCheckpoint(directory, every=fitflax.every(steps=5), **options)

    with pytest.warns(FitflaxWarning, match=r"Training continues without it. Could not save .*fit.step_00000010: .*No space left on device"):
        assert fit(make_trainer(), make("fit"), epochs=2).epoch == [0, 1]
    loop, save = make_trainer().train_loop(TRAIN, batch_size=4, steps=10, every=fitflax.every(steps=5)), make("loop")
    with pytest.warns(FitflaxWarning, match=r"Training continues without it. Could not save .*loop.step_00000010: .*No space left on device"):
        assert [save(reached).step for reached in loop] == [5, 10]
    assert steps_in(tmp_path / "fit") == steps_in(tmp_path / "loop") == [5]


def test_a_failed_last_save_is_raised_if_any_callback_raises(tmp_path, monkeypatch):
    Writes(monkeypatch, failing=(5,)).opened.set()
    callbacks = [BestCheckpoint(tmp_path / "best", monitor="loss", initial_value=0.0, on_save_error="warn"), ModelCheckpoint(tmp_path / "regular")]
    with pytest.raises(CheckpointError, match=r"regular.step_00000005"):
        fit(make_trainer(), *callbacks, epochs=1)


@pytest.mark.parametrize("last", [7, 10])
@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
def test_the_last_step_is_saved_if_the_save_before_it_fails_while_training_continues(on_save_error, last, tmp_path, monkeypatch):
    """Step 7 is waiting to be saved before it is known to be the last one."""
    writes, wait, trainer = Writes(monkeypatch, failing=(5,)), saver.Saver.wait_until_idle, make_trainer()
    stop = LambdaCallback(lambda checkpoint: trainer.stop("enough"), every=fitflax.at(last))

    def opening(one: saver.Saver) -> None:
        writes.opened.set()
        wait(one)

    monkeypatch.setattr(saver.Saver, "wait_until_idle", opening)
    caught = pytest.warns(FitflaxWarning, match="step_00000005") if on_save_error == "warn" else pytest.raises(CheckpointError, match="step_00000005")
    with caught:
        fit(trainer, stop, ModelCheckpoint(tmp_path, every=fitflax.at(5, 7), on_save_error=on_save_error), epochs=2)
    assert steps_in(tmp_path) == [last]


def test_a_last_step_that_is_saved_is_not_saved_again_because_an_earlier_save_failed(tmp_path, monkeypatch):
    writes, trainer = Writes(monkeypatch, failing=(5,)), make_trainer()
    writes.opened.set()
    stop = LambdaCallback(lambda checkpoint: trainer.stop("enough"), every=fitflax.at(7))
    with pytest.warns(FitflaxWarning, match="step_00000005"):
        fit(trainer, stop, ModelCheckpoint(tmp_path, every=fitflax.at(5, 7), on_save_error="warn", asynchronous=False), epochs=2)
    assert steps_in(tmp_path) == [7] and [name.split()[1] for name in writes.written] == ["5", "7"]


@pytest.mark.parametrize("is_known", [False, True])
def test_no_checkpoint_refers_to_a_best_checkpoint_that_failed_to_save(is_known, tmp_path, monkeypatch):
    """If the failure is not known yet, the regular checkpoint is not saved. If it is, the regular checkpoint is saved immediately and omits the best one."""
    write, failed, submitted = checkpoint_store.write_checkpoint, threading.Event(), threading.Event()

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
                checkpoint.run.saver._thread.wait_until(lambda: checkpoint.run.saver.failure is not None)
            super().on_checkpoint(checkpoint)
            submitted.set()

    monkeypatch.setattr(checkpoint_store, "write_checkpoint", failing)
    best = BestCheckpoint(tmp_path / "best", monitor="loss")
    with pytest.raises(CheckpointError, match="best"):
        fit(make_trainer(), Regular(tmp_path / "checkpoints"), best, epochs=1 if is_known else 2)
    assert steps_in(tmp_path / "best") == [] and best.best_step is None
    assert steps_in(tmp_path / "checkpoints") == ([5] if is_known else [10])
    assert CheckpointStore(tmp_path / "checkpoints").restore().run["callbacks"][best.state_key]["kept"] == []


def test_a_missing_best_checkpoint_is_named_in_a_warning_and_no_longer_counts(tmp_path):
    def callbacks() -> list[Callback]:
        return [ModelCheckpoint(tmp_path / "checkpoints"), BestCheckpoint(tmp_path / "best", monitor="loss", keep=None)]

    fit(make_trainer(), *callbacks(), epochs=2)
    best = CheckpointStore(tmp_path / "best")
    gone = best.steps()[-1]
    for path in best.path(gone).iterdir():
        path.unlink()
    best.path(gone).rmdir()
    trainer = make_trainer()
    with pytest.warns(FitflaxWarning, match=rf"best does not contain the best checkpoints of steps \[{gone}\]: they were removed"):
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
    # The process continues, and its next run waits for what is still being written.
    writes.opened.set()
    fit(make_trainer(), ModelCheckpoint(tmp_path, overwrite=True), steps=3, resume="auto")
    assert steps_in(tmp_path)[-1] == 3


@pytest.mark.slow
def test_ctrl_c_while_the_end_waits_for_a_save_exits_immediately(tmp_path, monkeypatch, capsys):
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
    assert capsys.readouterr().err == "\nFinishing the step and saving. Press Ctrl-C again to exit immediately.\n"
    writes.opened.set()


@pytest.mark.slow
def test_the_end_of_a_train_loop_waits_for_its_saves_and_releases_the_directory(tmp_path):
    trainer = make_trainer()
    save = ModelCheckpoint(tmp_path, every=fitflax.every(steps=2), keep=None)
    for reached in trainer.train_loop(TRAIN, batch_size=4, steps=5):
        save(reached)
    assert steps_in(tmp_path) == [2, 4, 5]
    with trainer.train_loop(TRAIN, batch_size=4, steps=3) as loop:
        save(loop.next_checkpoint())
        with pytest.raises(DirectoryInUseError, match="another run in this process"):
            fit(make_trainer(), ModelCheckpoint(tmp_path, overwrite=True), steps=1)
        save(loop.run(2))
    assert steps_in(tmp_path) == [2, 4, 5, 6, 8]
    fit(make_trainer(), ModelCheckpoint(tmp_path, overwrite=True), steps=1)


# -- one run at a time --


@pytest.mark.slow
def test_a_second_run_in_the_directory_of_a_live_run_is_an_error_before_its_first_step(tmp_path, process_env):
    alive = run_script.start(tmp_path, process_env, fit={"steps": 12}, stops=[["on_train_batch_end", 3, "wait"]])
    assert alive.stdout.readline().startswith("at step 3")
    steps: list[int] = []
    trainer = make_trainer()
    for resume in ("auto", None):
        callbacks = [ModelCheckpoint(tmp_path / "checkpoints", overwrite=True), at(trainer, "on_train_batch_begin", 0, steps.append)]
        with pytest.raises(DirectoryInUseError, match=rf"checkpoints is in use by process {alive.pid} on .* Two runs cannot save to the same directory"):
            fit(trainer, *callbacks, steps=3, resume=resume)
    assert steps == []
    alive.stdin.write("\n")
    run_script.finish(alive)
    assert steps_in(tmp_path / "checkpoints")[-1] == 12


def test_two_runs_of_one_process_cannot_save_to_the_same_directory(tmp_path):
    inner: list[str] = []

    def begin_another(step: int) -> None:
        with pytest.raises(DirectoryInUseError, match="another run in this process") as caught:
            fit(make_trainer(), ModelCheckpoint(tmp_path, overwrite=True), steps=1)
        inner.append(str(caught.value))

    trainer = make_trainer()
    fit(trainer, ModelCheckpoint(tmp_path), at(trainer, "on_train_batch_end", 2, begin_another), steps=3)
    assert len(inner) == 1 and steps_in(tmp_path) == [3]


@pytest.mark.slow
def test_a_fit_that_fails_before_its_first_step_releases_the_directory(tmp_path):
    fit(make_trainer(), ModelCheckpoint(tmp_path), steps=2)
    with pytest.raises(fitflax.errors.DataError):
        make_trainer().fit(np.zeros((4, 4), np.float32), np.zeros(3, np.int32), callbacks=[ModelCheckpoint(tmp_path)], resume="auto", verbose=0)
    code = "import sys, fitflax; s = fitflax.checkpoints.CheckpointStore(sys.argv[1]); s.claim(s.run_id(), overwrite=False)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, check=True, timeout=120)
