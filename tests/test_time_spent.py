"""Where the time of a run goes: every moment is counted once, for what it was spent on."""

import time

import flax.linen as nn
import jax
import numpy as np
import pytest

import fitflax
from fitflax.callbacks import Callback, LambdaCallback, ModelCheckpoint
from fitflax.logs import Values
from fitflax.parallel import DataParallel
from fitflax.steps.compiled import CompiledSteps
from fitflax.time_spent import TimeSpent

X, Y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)


class Look(Callback):
    """Keeps what a run tells of its time."""

    def on_train_end(self, logs):
        self.spent = self.params["time_spent"]


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still but for who moves it."""
    seconds = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    return seconds


def fit(data, *callbacks, **options):
    look = Look()
    trainer = fitflax.Trainer(nn.Dense(2), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse", **options.pop("compiled", {}))
    trainer.fit(data, callbacks=[*callbacks, look], verbose=0, **options)
    return look.spent


@pytest.mark.parametrize("compiled", [{}, {"steps_per_call": 2}])
@pytest.mark.parametrize("options", [{}, {"callbacks": [LambdaCallback(on_train_batch_end=lambda batch, logs: None)]}], ids=["unseen", "looked at"])
def test_case_36_a_wait_for_data_is_seen_and_shares_sum_to_1(now, compiled, options):
    def batches():
        for _ in range(4):
            now[0] += 0.5
            yield X, Y

    spent = fit(batches, *options.get("callbacks", ()), compiled=compiled)
    assert spent.seconds == {"compiling": 0.0, "data": 2.0, "evaluating": 0.0, "callbacks": 0.0, "saving": 0.0} and spent.stepping == 0
    assert spent.shares["data"] == 1 and sum(spent.shares.values()) == 1 and spent.examples == 16


def test_evaluations_and_saves_are_counted_for_themselves_with_the_data_they_wait_for(now, tmp_path, monkeypatch):
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
    own = LambdaCallback(lambda checkpoint: epoch(0, {}), on_epoch_end=epoch, on_train_end=lambda logs: epoch(0, {}))
    spent = fit((X, Y), ModelCheckpoint(tmp_path), own, epochs=2, validation_data=validation)
    assert (spent.seconds["evaluating"], spent.seconds["callbacks"], spent.stepping) == (6, 5, 0) and spent.seconds["saving"] >= 14
    assert sum(spent.shares.values()) == pytest.approx(1)


def test_what_is_claimed_inside_is_not_counted_twice():
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
    assert spent.seconds == {"evaluating": 0.5, "data": 2, "compiling": 4, "callbacks": 0, "saving": 0.5} and (spent.stepping, spent.total) == (8, 15)
    spent.move("evaluating", "compiling", 0.25)
    assert (spent.seconds["evaluating"], spent.seconds["compiling"]) == (0.25, 4.25)


def test_a_run_that_took_no_time_was_all_steps():
    assert TimeSpent(lambda: 0.0).shares == {"stepping": 1.0, "compiling": 0.0, "data": 0.0, "evaluating": 0.0, "callbacks": 0.0, "saving": 0.0}


def test_what_callbacks_wait_for_at_the_end_of_an_epoch_are_steps(now, monkeypatch):
    wait = Values.wait

    def slow(self):
        now[0] += 5
        wait(self)

    monkeypatch.setattr(Values, "wait", slow)
    spent = fit((X, Y), LambdaCallback(on_epoch_end=lambda epoch, logs: now.__setitem__(0, now[0] + 1)))
    assert (spent.seconds["callbacks"], spent.stepping) == (1, 5)


def test_a_wait_for_an_evaluation_to_be_compiled_is_no_time_of_the_evaluation(now, monkeypatch):
    get = CompiledSteps.get

    def slow_get(self, kind, *rest, **options):
        if kind.startswith("evaluate") and not self.seconds_waited:
            now[0] += 5
            self.seconds_waited += 5
        return get(self, kind, *rest, **options)

    monkeypatch.setattr(CompiledSteps, "get", slow_get)
    spent = fit((X, Y), epochs=2, validation_data=(X, Y))
    assert (spent.seconds["compiling"], spent.seconds["evaluating"]) == (5.0, 0.0)


def test_the_time_that_callbacks_take_to_open_their_files_is_theirs(now):
    class Opens(Callback):
        def open_run(self, run_id, step):
            now[0] += 7

    assert fit((X, Y), Opens()).seconds["callbacks"] == 7.0
