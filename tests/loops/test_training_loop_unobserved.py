"""Unobserved steps, at which no callback is called: they run together, but signals, stops, errors and triggers take effect after each of them."""

import os
import pathlib
import signal
from collections.abc import Callable, Iterator
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


def stream() -> Iterator[Any]:
    """Yields the batches of a pass whose length is unknown."""
    return ((TRAIN[0][begin : begin + 4], TRAIN[1][begin : begin + 4]) for begin in range(0, 18, 4))


def train(callbacks: Any = (), directory: pathlib.Path | None = None, steps: int = STEPS, *, is_stream: bool = False, **options: Any) -> dict[str, Any]:
    trainer = make_trainer()
    data, size = ((stream,), {}) if is_stream else (TRAIN, {"batch_size": 4})
    saving = [] if directory is None else [ModelCheckpoint(directory, every=fitflax.every(steps=4))]
    options = {**size, "steps": steps, "validation_data": VALID, "validation_batch_size": 4, "verbose": 0, **options}
    history = trainer.fit(*data, callbacks=[*saving, *callbacks], resume=None if directory is None else "auto", **options)
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


@pytest.mark.parametrize("is_stream", [False, True])
def test_all_steps_up_to_the_next_observed_one_run_together(is_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stretches: list[int] = []
    real = Run._train_without_hooks
    monkeypatch.setattr(Run, "_train_without_hooks", lambda self, steps: (stretches.append(steps), real(self, steps))[1])
    train([LambdaCallback(lambda checkpoint: None, every=fitflax.every(steps=4))], steps=13, validation_data=None, is_stream=is_stream)
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
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_callback_that_may_skip_batches_sees_some_and_the_last_of_each_epoch(is_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
    train([seen], is_stream=is_stream)
    assert seen.calls == [("begin", 0), ("end", 4)] * 4 + [("begin", 0), ("end", 2)]
    monkeypatch.setattr("fitflax.loops.training_loop._SECONDS_WITHOUT_HOOKS", 0.0)
    seen.calls.clear()
    train([seen], steps=3, is_stream=is_stream)
    assert [batch for call, batch in seen.calls if call == "end"] == [0, 1, 2]


def test_a_progress_bar_that_is_drawn_at_each_batch_skips_none() -> None:
    assert not ProgressBar(refresh_seconds=0).may_skip_batches and ProgressBar().may_skip_batches


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This data source cannot seek")
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_signal_between_unobserved_steps_ends_the_run_which_resumes_bit_for_bit(is_stream: bool, monkeypatch, tmp_path) -> None:
    uninterrupted = train(directory=tmp_path / "never", is_stream=is_stream)
    in_the_data(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        train(directory=tmp_path / "killed", is_stream=is_stream)
    assert caught.value.code == 143
    # With arrays, the step whose batch was being requested still runs.
    assert max(fitflax.checkpoints.CheckpointStore(tmp_path / "killed").steps()) == (2 if is_stream else 3)
    assert not differences(train(directory=tmp_path / "killed", is_stream=is_stream), uninterrupted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This data source cannot seek")
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_error_between_unobserved_steps_saves_earlier_steps_and_resumes_bit_for_bit(is_stream: bool, monkeypatch, tmp_path) -> None:
    def fail() -> None:
        raise OSError("gone")

    uninterrupted = train(directory=tmp_path / "never", is_stream=is_stream)
    in_the_data(monkeypatch, 3, fail)
    with pytest.raises(OSError, match="gone"):
        train(directory=tmp_path / "broken", is_stream=is_stream)
    assert max(fitflax.checkpoints.CheckpointStore(tmp_path / "broken").steps()) == 2
    assert not differences(train(directory=tmp_path / "broken", is_stream=is_stream), uninterrupted)


@pytest.mark.parametrize("is_stream", [False, True])
def test_whether_all_processes_must_stop_is_checked_once_after_each_unobserved_step(is_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("fitflax.loops.signals.Interruption.check", lambda self, step: asked.append(step))
    train(is_stream=is_stream)
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
    for is_stream in (False, True):
        fired: list[int] = []
        train([LambdaCallback(lambda checkpoint, fired=fired: fired.append(checkpoint.step), every=trigger)], is_stream=is_stream)
        assert fired == steps


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_manually_stepped_loop_stops_at_the_requested_steps(is_stream: bool) -> None:
    trainer = make_trainer()
    every = fitflax.every(steps=9)
    loop = trainer.train_loop(stream, steps=STEPS, every=every) if is_stream else trainer.train_loop(*TRAIN, steps=STEPS, batch_size=4, every=every)
    assert [loop.next_step().step, loop.run(3).step, loop.next_checkpoint().step, loop.run(5).step] == [1, 4, 9, 14]
    assert [checkpoint.step for checkpoint in loop] == [18, STEPS]
    np.testing.assert_array_equal(trainer.step, STEPS)


# -- data of unknown length --


class Value(nn.Module):
    """Returns its input; its parameter stays zero."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x[:, 0] + self.param("zero", nn.initializers.zeros, ())


class Recorded:
    """Passes of five batches, which contain only their number. Records each request, also at the end of a pass, and calls `act` at request `number`."""

    def __init__(self, number: int, act: Callable[[], Any]) -> None:
        self.events: list[Any] = []
        self._number, self._act, self._requests = number, act, 0

    def __len__(self) -> int:
        return 5

    def _request(self, what: Any) -> None:
        self._requests += 1
        self.events.append(what)
        if self._requests == self._number:
            self._act()

    def __getitem__(self, index: int) -> Any:
        self._request(index)
        return np.full((2, 1), index, np.float32)

    def on_epoch_begin(self) -> None:
        self.events.append("begin")

    def on_epoch_end(self) -> None:
        self._request("end")

    def batches(self, count: int = 5) -> Iterator[Any]:
        self.on_epoch_begin()
        for index in range(count):
            yield self[index]
        self.on_epoch_end()


def raise_error() -> None:
    raise OSError("gone")


@pytest.mark.mostly_slow
@pytest.mark.filterwarnings("ignore:The data ended before", "ignore:SIGTERM ended the run")
@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("kind", ["function", "iterator", "sequence"])
@pytest.mark.parametrize("event", ["nothing", "error", "stop", "stop and error", "signal", "training"])
def test_streams_are_read_and_used_as_if_each_step_were_observed(event: str, kind: str, steps_per_call: int) -> None:
    template = fitflax.Trainer(Value(), parallel=DataParallel(jax.devices()[:1]))
    template.compile("sgd", lambda outputs: outputs, learning_rate=0.0, steps_per_call=steps_per_call)

    def run(steps_per_epoch: int | None, number: int, *, has_trigger: bool, is_observed: bool) -> list[Any]:
        trainer = template.with_seed(0)
        actions: dict[str, list[Callable[[], Any]]] = {
            "nothing": [],
            "error": [raise_error],
            "stop": [lambda: trainer.stop("enough")],
            "stop and error": [lambda: trainer.stop("enough"), raise_error],
            "signal": [lambda: os.kill(os.getpid(), signal.SIGTERM)],
            "training": [lambda: trainer.train_on_batch(np.ones((2, 1), np.float32))],
        }
        recorded = Recorded(number, lambda: [act() for act in actions[event]])
        data = {"function": recorded.batches, "iterator": recorded.batches(11), "sequence": recorded}[kind]
        callbacks = [LambdaCallback(lambda checkpoint: recorded.events.append("epoch"), every=fitflax.every(epochs=1))] if has_trigger else []
        if is_observed:
            callbacks.append(LambdaCallback(on_train_batch_end=lambda batch, logs: None))
        for steps in (12, 3):
            try:
                history = trainer.fit(data, steps=steps, steps_per_epoch=steps_per_epoch, callbacks=callbacks, verbose=0)
                recorded.events.append(history.history["loss"])
            except (OSError, ValueError, SystemExit) as error:
                recorded.events.append(repr(error))
            recorded.events.append((trainer.step, trainer.stop_reason))
        return recorded.events

    for steps_per_epoch in (None, 3, 5, 7):
        for number in (5, 6, 7, 10, 12):
            # Requests 6 and 12 are at the end of a pass. Only the observed loop then requests the next batch of the epoch, which is not used after a stop.
            if number in (6, 12) and steps_per_epoch is not None and event in ("stop", "signal"):
                continue
            for has_trigger in (False, True):
                options = {"steps_per_epoch": steps_per_epoch, "number": number, "has_trigger": has_trigger}
                assert run(**options, is_observed=False) == run(**options, is_observed=True), options


def test_an_error_that_a_call_has_read_ahead_is_not_raised_if_a_callback_ends_the_run_before() -> None:
    trainer = fitflax.Trainer(Value(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", lambda outputs: outputs, learning_rate=0.0, steps_per_call=4)
    stop = LambdaCallback(on_train_batch_end=lambda batch, logs: trainer.stop("enough"))
    trainer.fit(Recorded(3, raise_error).batches(), steps=12, callbacks=[stop], verbose=0)
    assert (trainer.step, trainer.stop_reason) == (2, "enough")


def test_an_interrupt_while_the_batches_of_a_call_are_read_loses_none_of_them() -> None:
    class Interrupted:
        def __init__(self) -> None:
            self.numbers, self.is_interrupted = iter(range(8)), False

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            number = next(self.numbers)
            if number == 2 and not self.is_interrupted:
                self.numbers, self.is_interrupted = iter(range(2, 8)), True
                raise KeyboardInterrupt
            return np.full((2, 1), number, np.float32)

    trainer = fitflax.Trainer(Value(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", lambda outputs: outputs, learning_rate=0.0, steps_per_call=4)
    data = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(data, steps=4, verbose=0)
    assert trainer.fit(data, steps=4, verbose=0).history["loss"] == [1.5]  # The mean of 0 to 3.


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
