"""Where the time of a run goes: every moment is counted once, under the activity it was spent on."""

import time

import flax.linen as nn
import jax
import numpy as np
import pytest

import fitflax
from fitflax.callbacks import BestCheckpoint, Callback, LambdaCallback, ModelCheckpoint, Phase
from fitflax.checkpoints import saver
from fitflax.checkpoints.checkpoint import RunView
from fitflax.checkpoints.memory import DeviceRoom
from fitflax.logs import TimeSpent, Values
from fitflax.loops.fit import find_checkpoint
from fitflax.loops.session import Session
from fitflax.parallel import DataParallel
from fitflax.steps import live_state as live
from fitflax.steps.compile import CompiledSteps

X, Y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)


class Look(Callback):
    """Keeps the time measurements of a run."""

    def on_train_end(self, logs):
        self.spent = self.params["time_spent"]


@pytest.fixture
def now(monkeypatch):
    """A clock that only the test advances."""
    seconds = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    return seconds


def fit(data, *callbacks, **options):
    look = Look()
    trainer = fitflax.Trainer(nn.Dense(2), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse", **options.pop("compiled", {}))
    trainer.fit(data, callbacks=[*callbacks, look], verbose=0, **options)
    return look.spent


@pytest.mark.mostly_slow
@pytest.mark.parametrize("compiled", [{}, {"steps_per_call": 2}])
@pytest.mark.parametrize("options", [{}, {"callbacks": [LambdaCallback(on_train_batch_end=lambda batch, logs: None)]}], ids=["unseen", "looked at"])
def test_case_36_waiting_for_data_is_measured_and_shares_sum_to_1(now, compiled, options):
    def batches():
        for _ in range(4):
            now[0] += 0.5
            yield X, Y

    spent = fit(batches, *options.get("callbacks", ()), compiled=compiled)
    assert spent.seconds == {"loading": 0.0, "compiling": 0.0, "data": 2.0, "evaluating": 0.0, "callbacks": 0.0, "saving": 0.0} and spent.stepping == 0
    assert spent.shares["data"] == 1 and sum(spent.shares.values()) == 1 and spent.examples == 16


@pytest.mark.slow
def test_evaluations_and_saves_are_counted_separately_including_their_waits_for_data(now, tmp_path, monkeypatch):
    def validation():
        now[0] += 3
        yield X, Y

    save = ModelCheckpoint.on_checkpoint

    def slow(self, checkpoint):
        now[0] += 7
        save(self, checkpoint)

    def epoch(number, logs):
        now[0] += 1

    monkeypatch.setattr(ModelCheckpoint, "on_checkpoint", slow)
    callback = LambdaCallback(lambda checkpoint: epoch(0, {}), on_epoch_end=epoch, on_train_end=lambda logs: epoch(0, {}))
    spent = fit((X, Y), ModelCheckpoint(tmp_path), callback, epochs=2, validation_data=validation)
    assert (spent.seconds["evaluating"], spent.seconds["callbacks"], spent.stepping) == (6, 5, 0) and spent.seconds["saving"] >= 14
    assert sum(spent.shares.values()) == pytest.approx(1)


def test_steps_that_a_save_waits_for_do_not_count_as_saving(now, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "_LARGE_BYTES", 0)
    finish, calls = RunView.finish_steps, []

    def slow(self, **options):
        finish(self, **options)
        assert all(leaf.is_ready() for leaf in jax.tree.leaves(self.borrow().params))
        now[0] += 5
        calls.append(self.position.moment.step)

    monkeypatch.setattr(RunView, "finish_steps", slow)
    spent = fit((X, Y), ModelCheckpoint(tmp_path), epochs=2)
    assert calls[:2] == [1, 2] and spent.stepping == 5 * len(calls) and spent.seconds["saving"] == 0


@pytest.mark.parametrize("state", ["small, on a CPU", "whole, on an accelerator", "split, on an accelerator with room for a copy"])
def test_steps_that_a_synchronous_save_waits_for_do_not_count_as_saving_and_no_memory_is_reserved_for_a_copy(state, now, tmp_path, monkeypatch):
    monkeypatch.setattr(DataParallel, "is_on_host", state.endswith("CPU"))
    monkeypatch.setattr(live.LiveState, "snapshots_wait", state.startswith("split"))
    monkeypatch.setattr(saver, "may_share", lambda array: False)
    monkeypatch.setattr(DeviceRoom, "has", lambda room, num_bytes, devices: reserved.append(num_bytes) or True)
    reserved, finished, wait = [], [], Values.wait

    def slow(self):
        wait(self)
        finished.append(self)
        now[0] += 5

    monkeypatch.setattr(Values, "wait", slow)
    monkeypatch.setattr(Values, "is_ready", property(lambda self: self in finished))
    spent = fit((X, Y), ModelCheckpoint(tmp_path, every=fitflax.every(steps=1), asynchronous=False), epochs=1, batch_size=2)
    assert (spent.seconds["saving"], spent.stepping, reserved) == (0, 10, [])


def test_callbacks_that_save_nothing_at_a_trigger_do_not_wait_for_steps(tmp_path, monkeypatch):
    class Counts(Callback):
        phase, every = Phase.SAVE, fitflax.every(steps=1)

        def on_checkpoint(self, checkpoint):
            counts[checkpoint.step] = len(finished)

    counts, finished, wait = {}, [], Values.wait
    monkeypatch.setattr(Values, "wait", lambda self: (wait(self), finished.append(self)))
    monkeypatch.setattr(Values, "is_ready", property(lambda self: self in finished))
    fit((X, Y), BestCheckpoint(tmp_path, monitor="loss", asynchronous=False), Counts(), epochs=1, batch_size=1)
    assert counts == {1: 0, 2: 0, 3: 0, 4: 1}


def test_time_in_a_nested_block_is_not_counted_twice():
    now = [0.0]
    spent = TimeSpent(lambda: now[0])
    with spent.on("evaluating"):
        now[0] += 1
        with spent.on("data"):
            now[0] += 2
            with spent.on("compiling"):
                now[0] += 4
        spent.add("saving", 0.5)
    now[0] += 8
    assert spent.seconds == {"evaluating": 0.5, "data": 2, "compiling": 4, "callbacks": 0, "saving": 0.5, "loading": 0}
    assert (spent.stepping, spent.total) == (8, 15)
    spent.move("evaluating", "compiling", 0.25)
    assert (spent.seconds["evaluating"], spent.seconds["compiling"]) == (0.25, 4.25)


def test_a_run_that_took_no_time_counts_as_stepping():
    zeros = dict.fromkeys(("loading", "compiling", "data", "evaluating", "callbacks", "saving"), 0.0)
    assert TimeSpent(lambda: 0.0).shares == {"stepping": 1.0, **zeros}


def test_steps_that_callbacks_wait_for_at_the_end_of_an_epoch_count_as_stepping(now, monkeypatch):
    wait = Values.wait

    def slow(self):
        now[0] += 5
        wait(self)

    monkeypatch.setattr(Values, "wait", slow)
    spent = fit((X, Y), LambdaCallback(on_epoch_end=lambda epoch, logs: now.__setitem__(0, now[0] + 1)))
    assert (spent.seconds["callbacks"], spent.stepping) == (1, 5)


@pytest.mark.slow
def test_waiting_for_an_evaluation_to_compile_does_not_count_as_evaluating(now, monkeypatch):
    get = CompiledSteps.get

    def slow_get(self, kind, *rest, **options):
        if kind.startswith("evaluate") and not self.seconds_waited:
            now[0] += 5
            self.seconds_waited += 5
        return get(self, kind, *rest, **options)

    monkeypatch.setattr(CompiledSteps, "get", slow_get)
    spent = fit((X, Y), epochs=2, validation_data=(X, Y))
    assert (spent.seconds["compiling"], spent.seconds["evaluating"]) == (5.0, 0.0)


def test_loading_the_checkpoint_of_a_resume_does_not_count_as_stepping(now, tmp_path, monkeypatch):
    def slow(function):
        def called(*arguments, **options):
            now[0] += 5
            return function(*arguments, **options)

        return called

    fit((X, Y), ModelCheckpoint(tmp_path))
    monkeypatch.setattr("fitflax.trainer.find_checkpoint", slow(find_checkpoint))
    monkeypatch.setattr(Session, "restore", slow(Session.restore))
    spent = fit((X, Y), ModelCheckpoint(tmp_path), epochs=2, resume="auto")
    assert (spent.seconds["loading"], spent.seconds["compiling"], spent.stepping) == (10.0, 0.0, 0.0)


def test_opening_the_files_of_callbacks_counts_as_callback_time(now):
    class Opens(Callback):
        def open_run(self, run_id, step):
            now[0] += 7

    assert fit((X, Y), Opens()).seconds["callbacks"] == 7.0
