"""Single steps between which nobody looks: made in one go, and yet everything that has a say is heard after each of them."""

import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

import fitflax
from fitflax.callbacks import Callback, LambdaCallback, ModelCheckpoint, ProgressBar
from fitflax.data import Feed
from fitflax.loops.run import Run
from fitflax.triggers import Trigger
from tests.run_script import TRAIN, VALID, differences, leaves_of, make_trainer

STEPS = 23  # Epochs of five steps; the last is not whole.


def train(callbacks: Any = (), directory: pathlib.Path | None = None, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    trainer = make_trainer()
    saving = [] if directory is None else [ModelCheckpoint(directory, every=fitflax.every(steps=4))]
    options = {"batch_size": 4, "steps": steps, "validation_data": VALID, "verbose": 0, **options}
    history = trainer.fit(*TRAIN, callbacks=[*saving, *callbacks], resume=None if directory is None else "auto", **options)
    return {"state": leaves_of(trainer.state), "history": history.history, "step": trainer.step}


def in_the_data(monkeypatch: pytest.MonkeyPatch, batch: int, act: Callable[[], Any]) -> None:
    """Has `act` called as soon as the run asks for the batch of this number, where no callback is."""
    asked, real = [0], Feed.next

    def next_batch(self: Feed, *arguments: Any) -> Any:
        asked[0] += self._bookmarks is not None  # That of training.
        if asked[0] == batch + 1:  # The first one is asked for once more, after the dry run.
            act()
        return real(self, *arguments)

    monkeypatch.setattr(Feed, "next", next_batch)


def test_all_steps_up_to_where_somebody_looks_are_made_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    stretches: list[int] = []
    real = Run._train_unseen
    monkeypatch.setattr(Run, "_train_unseen", lambda self, steps: (stretches.append(steps), real(self, steps))[1])
    train([LambdaCallback(lambda checkpoint: None, every=fitflax.every(steps=4))], steps=13, validation_data=None)
    # After steps 1, 5, 6, 9 and 11, up to 4, 8 and 12; a pass that ends, at 5 and 10, ends them too.
    assert stretches == [3, 3, 2, 3, 1]


@pytest.mark.slow
def test_they_come_to_the_same_bits_as_those_that_a_callback_looks_at() -> None:
    seen: list[int] = []
    looked_at = train([LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))])
    assert seen == [*range(5)] * 4 + [*range(3)]
    assert not differences(train(), looked_at)


@pytest.mark.slow
def test_a_callback_that_may_skip_batches_sees_some_and_the_last_of_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fitflax.loops.run._UNSEEN_SECONDS", 1000.0)

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
    monkeypatch.setattr("fitflax.loops.run._UNSEEN_SECONDS", 0.0)
    seen.calls.clear()
    train([seen], steps=3)
    assert [batch for call, batch in seen.calls if call == "end"] == [0, 1, 2]


def test_a_bar_that_is_to_be_drawn_at_each_batch_skips_none() -> None:
    assert not ProgressBar(refresh_seconds=0).may_skip_batches and ProgressBar().may_skip_batches


@pytest.mark.slow
def test_a_signal_between_two_of_them_is_obeyed_after_that_step_and_the_run_goes_on_bit_for_bit(monkeypatch, tmp_path) -> None:
    never = train(directory=tmp_path / "never")
    in_the_data(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as left:
        train(directory=tmp_path / "killed")
    assert left.value.code == 143
    assert max(fitflax.checkpoints.CheckpointStore(tmp_path / "killed").steps()) == 3  # The one that was being asked for is still made.
    assert not differences(train(directory=tmp_path / "killed"), never)


@pytest.mark.slow
def test_an_error_between_two_of_them_saves_the_steps_before_and_the_run_goes_on_bit_for_bit(monkeypatch, tmp_path) -> None:
    def fail() -> None:
        raise OSError("gone")

    never = train(directory=tmp_path / "never")
    in_the_data(monkeypatch, 3, fail)
    with pytest.raises(OSError, match="gone"):
        train(directory=tmp_path / "broken")
    assert max(fitflax.checkpoints.CheckpointStore(tmp_path / "broken").steps()) == 2
    assert not differences(train(directory=tmp_path / "broken"), never)


def test_it_is_asked_after_each_of_them_once_whether_all_processes_are_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("fitflax.loops.signals.Interruption.check", lambda self, step: asked.append(step))
    train()
    assert asked == [*range(1, STEPS + 1)]


def test_a_stop_between_two_of_them_ends_the_run_after_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
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


class OwnClock(EveryThird):
    """Says that it depends on no step, and nothing of when on the clock it may fire."""

    @override
    def next_step(self, step: int, start_step: int) -> int | None:
        return None


@pytest.mark.parametrize(
    ("trigger", "steps"),
    [
        (fitflax.every(seconds=1e-9), [*range(1, STEPS + 1)]),
        (fitflax.every(seconds=1e9) | fitflax.at(7, 12), [7, 12]),
        (fitflax.every(steps=6), [6, 12, 18]),
        (EveryThird(), [*range(3, STEPS, 3)]),
        (OwnClock(), [*range(3, STEPS, 3)]),
    ],
    ids=["time", "steps or time", "steps", "of one's own", "of one's own clock"],
)
def test_triggers_fire_where_they_would_if_each_step_were_looked_at(trigger: Trigger, steps: list[int]) -> None:
    fired: list[int] = []
    train([LambdaCallback(lambda checkpoint: fired.append(checkpoint.step), every=trigger)])
    assert fired == steps


def test_steps_by_hand_end_where_they_are_told_to() -> None:
    trainer = make_trainer()
    loop = trainer.train_loop(*TRAIN, steps=STEPS, batch_size=4, every=fitflax.every(steps=9))
    assert [loop.next_step().step, loop.run(3).step, loop.next_checkpoint().step, loop.run(5).step] == [1, 4, 9, 14]
    assert [checkpoint.step for checkpoint in loop] == [18, STEPS]
    np.testing.assert_array_equal(trainer.step, STEPS)
