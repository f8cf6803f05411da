"""Unobserved steps, at which no callback is called: they run together, but signals, stops, errors and triggers take effect after each of them."""

import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from typing_extensions import override

import fitflax
from fitflax.callbacks import Callback, LambdaCallback, ModelCheckpoint, ProgressBar
from fitflax.data import Feed
from fitflax.loops.training_loop import Run
from fitflax.parallel import DataParallel
from fitflax.steps.program import Program
from fitflax.triggers import Trigger
from tests.run_script import TRAIN, VALID, differences, leaves_of, make_trainer

STEPS = 23  # Epochs of five steps; the last one is incomplete.


def train(callbacks: Any = (), directory: pathlib.Path | None = None, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    trainer = make_trainer()
    saving = [] if directory is None else [ModelCheckpoint(directory, every=fitflax.every(steps=4))]
    options = {"batch_size": 4, "steps": steps, "validation_data": VALID, "verbose": 0, **options}
    history = trainer.fit(*TRAIN, callbacks=[*saving, *callbacks], resume=None if directory is None else "auto", **options)
    return {"state": leaves_of(trainer.state), "history": history.history, "step": trainer.step}


def in_the_data(monkeypatch: pytest.MonkeyPatch, batch: int, act: Callable[[], Any]) -> None:
    """Calls `act` as soon as the run requests the batch with this number, where no callback is called."""
    asked, real = [0], Feed.next

    def next_batch(self: Feed, *arguments: Any) -> Any:
        asked[0] += self._bookmarks is not None  # The feed of training.
        if asked[0] == batch + 1:  # The first batch is requested again after the dry run.
            act()
        return real(self, *arguments)

    monkeypatch.setattr(Feed, "next", next_batch)


def test_all_steps_up_to_the_next_observed_one_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    stretches: list[int] = []
    real = Run._train_without_hooks
    monkeypatch.setattr(Run, "_train_without_hooks", lambda self, steps: (stretches.append(steps), real(self, steps))[1])
    train([LambdaCallback(lambda checkpoint: None, every=fitflax.every(steps=4))], steps=13, validation_data=None)
    # Requested after steps 1, 5, 6, 9 and 11, up to steps 4, 8 and 12. The end of a pass, at steps 5 and 10, ends a stretch, too.
    assert stretches == [3, 3, 2, 3, 1]


def test_calls_of_several_steps_are_not_cut_in_long_epochs_also_after_a_resume(monkeypatch, tmp_path) -> None:
    sizes: list[int] = []
    real = Program.train_group

    def train_group(self: Program, carry: Any, sums: Any, group: Any, *rest: Any, **options: Any) -> Any:
        sizes.append(len(group))
        return real(self, carry, sums, group, *rest, **options)

    monkeypatch.setattr(Program, "train_group", train_group)

    def train_to(steps: int, directory: pathlib.Path) -> list[int]:
        sizes.clear()
        trainer = fitflax.Trainer(nn.Dense(1), parallel=DataParallel(jax.devices()[:1]))
        trainer.compile("sgd", "mse", steps_per_call=16)
        x = np.ones((2100, 1), np.float32)
        trainer.fit(x, x, batch_size=1, steps=steps, verbose=0, callbacks=[ModelCheckpoint(directory)], resume="auto")
        return list(sizes)

    assert train_to(2100, tmp_path / "whole") == [16] * 131 + [4]
    assert train_to(496, tmp_path / "parts") + train_to(2100, tmp_path / "parts") == [16] * 131 + [4]


@pytest.mark.slow
def test_unobserved_steps_are_bit_for_bit_identical_to_steps_that_a_callback_observes() -> None:
    seen: list[int] = []
    observed = train([LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))])
    assert seen == [*range(5)] * 4 + [*range(3)]
    assert not differences(train(), observed)


@pytest.mark.slow
def test_a_callback_that_may_skip_batches_sees_some_and_the_last_of_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fitflax.loops.training_loop._SECONDS_WITHOUT_HOOKS", 1000.0)

    class Seen(Callback):
        may_skip_batches = True

        def __init__(self) -> None:
            self.calls: list[tuple[str, int]] = []

        @override
        def on_train_batch_begin(self, batch: int, logs: Any) -> None:
            self.calls.append(("begin", batch))

        @override
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            assert logs["loss"] > 0
            self.calls.append(("end", batch))

    seen = Seen()
    train([seen])
    assert seen.calls == [("begin", 0), ("end", 4)] * 4 + [("begin", 0), ("end", 2)]
    monkeypatch.setattr("fitflax.loops.training_loop._SECONDS_WITHOUT_HOOKS", 0.0)
    seen.calls.clear()
    train([seen], steps=3)
    assert [batch for call, batch in seen.calls if call == "end"] == [0, 1, 2]


def test_a_progress_bar_that_is_drawn_at_each_batch_skips_none() -> None:
    assert not ProgressBar(refresh_seconds=0).may_skip_batches and ProgressBar().may_skip_batches


@pytest.mark.slow
def test_a_signal_between_unobserved_steps_is_obeyed_and_the_run_resumes_bit_for_bit(monkeypatch, tmp_path) -> None:
    uninterrupted = train(directory=tmp_path / "never")
    in_the_data(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        train(directory=tmp_path / "killed")
    assert caught.value.code == 143
    assert max(fitflax.checkpoints.CheckpointStore(tmp_path / "killed").steps()) == 3  # The step whose batch was being requested still runs.
    assert not differences(train(directory=tmp_path / "killed"), uninterrupted)


@pytest.mark.slow
def test_an_error_between_unobserved_steps_saves_earlier_steps_and_resumes_bit_for_bit(monkeypatch, tmp_path) -> None:
    def fail() -> None:
        raise OSError("gone")

    uninterrupted = train(directory=tmp_path / "never")
    in_the_data(monkeypatch, 3, fail)
    with pytest.raises(OSError, match="gone"):
        train(directory=tmp_path / "broken")
    assert max(fitflax.checkpoints.CheckpointStore(tmp_path / "broken").steps()) == 2
    assert not differences(train(directory=tmp_path / "broken"), uninterrupted)


def test_whether_all_processes_must_stop_is_checked_once_after_each_unobserved_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("fitflax.loops.signals.Interruption.check", lambda self, step: asked.append(step))
    train()
    assert asked == [*range(1, STEPS + 1)]


def test_a_stop_between_unobserved_steps_ends_the_run_after_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    in_the_data(monkeypatch, 3, lambda: trainer.stop("enough"))
    trainer.fit(*TRAIN, batch_size=4, steps=STEPS, verbose=0)
    assert (trainer.step, trainer.stop_reason) == (3, "enough")


class EveryThird(Trigger):
    @override
    def parts(self) -> tuple[Trigger, ...]:
        return (self,)

    @override
    def is_due(self, moment: Any, last_seconds: float) -> bool:
        return moment.step % 3 == 0


class CustomClock(EveryThird):
    """Reports no next step, and does not say at what time it may fire."""

    @override
    def next_step(self, step: int, start_step: int) -> int | None:
        return None


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("trigger", "steps"),
    [
        (fitflax.every(seconds=1e-9), [*range(1, STEPS + 1)]),
        (fitflax.every(seconds=1e9) | fitflax.at(7, 12), [7, 12]),
        (fitflax.every(steps=6), [6, 12, 18]),
        (EveryThird(), [*range(3, STEPS, 3)]),
        (CustomClock(), [*range(3, STEPS, 3)]),
    ],
    ids=["time", "steps or time", "steps", "of one's own", "of one's own clock"],
)
def test_triggers_fire_at_the_same_steps_as_if_each_step_were_observed(trigger: Trigger, steps: list[int]) -> None:
    fired: list[int] = []
    train([LambdaCallback(lambda checkpoint: fired.append(checkpoint.step), every=trigger)])
    assert fired == steps


def test_a_manually_stepped_loop_stops_at_the_requested_steps() -> None:
    trainer = make_trainer()
    loop = trainer.train_loop(*TRAIN, steps=STEPS, batch_size=4, every=fitflax.every(steps=9))
    assert [loop.next_step().step, loop.run(3).step, loop.next_checkpoint().step, loop.run(5).step] == [1, 4, 9, 14]
    assert [checkpoint.step for checkpoint in loop] == [18, STEPS]
    np.testing.assert_array_equal(trainer.step, STEPS)


def test_batch_hooks_of_an_evaluation_skip_batches_if_the_callbacks_allow_it(monkeypatch):
    class Seen(Callback):
        may_skip_batches = True

        def __init__(self) -> None:
            super().__init__()
            self.begun: list[int] = []
            self.ended: list[int] = []

        def on_test_batch_begin(self, batch: int, logs: Any) -> None:
            self.begun.append(batch)

        def on_test_batch_end(self, batch: int, logs: Any) -> None:
            self.ended.append(batch)

    x = np.ones((2, 3), np.float32)
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    trainer.build((x, x[:, :1]))
    for seconds, expected in ((1e9, [0, 39]), (0.0, list(range(40)))):
        monkeypatch.setattr("fitflax.loops.evaluation_loop._BATCH_HOOK_SECONDS", seconds)
        seen = Seen()
        trainer.evaluate(lambda: ((x, x[:, :1]) for _ in range(40)), callbacks=[seen], verbose=0)
        assert seen.begun == seen.ended == expected
