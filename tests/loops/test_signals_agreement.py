"""Decisions that several processes make together: when to stop, and what time it is. Here threads with a fake board simulate the processes."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flax import linen as nn

import fitflax
import fitflax.loops.signals as module
from fitflax.callbacks import LambdaCallback
from fitflax.loops.signals import Agreement, DistributedAgreement
from fitflax.parallel import launch

SECONDS = 20


class FakeBoard:
    """Replaces `parallel.board.Board` with a board in memory."""

    messages: dict[str, bytes]
    lock: threading.Lock

    def __init__(self, name: str) -> None:
        self.name = name

    def post(self, key: str, message: bytes) -> None:
        with self.lock:
            self.messages[f"{self.name}/{key}"] = message

    def settle(self, key: str, message: bytes) -> bytes:
        with self.lock:
            return self.messages.setdefault(f"{self.name}/{key}", message)

    def read(self, key: str) -> bytes:
        end = time.monotonic() + SECONDS
        while f"{self.name}/{key}" not in self.messages:
            assert time.monotonic() < end, key
            time.sleep(0.001)
        return self.messages[f"{self.name}/{key}"]

    def read_all(self, folder: str) -> dict[str, bytes]:
        with self.lock:
            return {key.rsplit("/", 1)[-1]: message for key, message in self.messages.items() if key.startswith(f"{self.name}/{folder}/")}

    def remove(self, key: str) -> None:
        with self.lock:
            for each in [one for one in self.messages if one == f"{self.name}/{key}" or one.startswith(f"{self.name}/{key}/")]:
                del self.messages[each]


class Team:
    """Simulated processes that run the same steps, none more than `ahead` steps ahead of another."""

    def __init__(self, monkeypatch: Any, count: int, *, ahead: int = 2, multiple: int = 1, offset: float = 0.0) -> None:
        self.count, self.ahead, self.multiple, self.offset = count, ahead, multiple, offset
        self.steps = [0] * count
        self.asked: list[str | None] = [None] * count
        self.stop_reasons: list[str | None] = [None] * count
        self.barrier = threading.Barrier(count, timeout=SECONDS)
        self.values: list[Any] = [None] * count
        self.local = threading.local()
        FakeBoard.messages, FakeBoard.lock = {}, threading.Lock()
        monkeypatch.setattr(module, "Board", FakeBoard)
        monkeypatch.setattr(module, "exchange", self.exchange)
        monkeypatch.setattr(module, "_run_numbers", self)
        monkeypatch.setattr(module.jax, "process_index", lambda: self.local.index)
        monkeypatch.setattr(module.jax, "process_count", lambda: count)
        monkeypatch.setattr(module, "_INTERVAL_SECONDS", 0.05)
        monkeypatch.setattr(module, "_VOTE_SECONDS", 1.5)

    def __next__(self) -> int:
        return 0

    def exchange(self, value: Any, topic: str) -> list[Any]:
        self.values[self.local.index] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found

    def run(self, at_step: Any, steps: int = 400, start: int = 0) -> list[Any]:
        """Runs steps in each process; `at_step(index, step, team)` may ask to stop. Returns each process's last step and the times it saw."""
        results: list[Any] = [None] * self.count

        def work(index: int) -> None:
            self.local.index = index
            agreement = DistributedAgreement(
                lambda: time.monotonic() + self.offset * index,
                lambda: self.asked[index] is not None,
                reason=lambda: self.asked[index] or "",
                stop=lambda reason: self.stop_reasons.__setitem__(index, reason),
                ahead=self.ahead,
                multiple=self.multiple,
            )
            agreement.begin(start, start)
            seen, step = [], start
            while step < steps and not agreement.stops(step):
                until = agreement.next_step()
                step = min(step + self.multiple, until, steps)
                self.steps[index] = step
                while min(self.steps) < step - self.ahead:  # As if the devices waited for each other.
                    time.sleep(0.0005)
                time.sleep(0.002)
                agreement.listen(step)
                seen.append((step, agreement.seconds))
                at_step(index, step, self)
            self.steps[index] = 10**9
            results[index] = step, seen

        threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert None not in results
        return results


def test_a_single_process_uses_its_own_clock_and_stops_when_it_is_asked():
    asked: list[int] = []
    agreement = Agreement(time.monotonic, lambda: bool(asked))
    assert not agreement.stops(5) and agreement.next_step() is None and abs(agreement.seconds - time.monotonic()) < 1
    asked.append(1)
    assert agreement.stops(5)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("count", [2, 3])
def test_all_processes_see_the_time_of_process_0_at_each_step(monkeypatch, count):
    results = Team(monkeypatch, count, offset=1000.0).run(lambda *_: None)
    times = [dict(seen) for _, seen in results]
    assert all(one == times[0] for one in times)
    found = [times[0][step] for step in sorted(times[0])]
    assert found == sorted(found) and len(set(found)) > 5
    assert abs(found[-1] - time.monotonic()) < 10


def test_processes_that_are_all_asked_at_the_same_step_stop_at_that_step(monkeypatch):
    team = Team(monkeypatch, 3)

    def at_step(index: int, step: int, team: Team) -> None:
        if step == 37:
            team.asked[index] = f"reason of {index}"

    assert [step for step, _ in team.run(at_step)] == [37] * 3
    assert team.stop_reasons == ["reason of 0"] * 3


@pytest.mark.mostly_slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("multiple", [1, 4])
def test_if_one_process_is_asked_all_stop_together_soon_after_and_know_the_reason(monkeypatch, victim, multiple):
    team = Team(monkeypatch, 3, multiple=multiple, ahead=2 * multiple)

    def at_step(index: int, step: int, team: Team) -> None:
        if index == victim and step >= 40:
            team.asked[index] = "the room is too warm"

    stopped = {step for step, _ in team.run(at_step, steps=4000, start=3)}
    assert len(stopped) == 1 and 40 < stopped.pop() < 4000
    assert {reason for index, reason in enumerate(team.stop_reasons) if index != victim} == {"the room is too warm"}


@pytest.mark.slow
def test_messages_do_not_pile_up(monkeypatch):
    team = Team(monkeypatch, 2)
    team.run(lambda *_: None, steps=1500)
    assert len(FakeBoard.messages) < 8


def test_processes_listen_only_at_steps_between_calls(monkeypatch):
    team = Team(monkeypatch, 2, multiple=5, ahead=10)
    for _, seen in team.run(lambda *_: None, start=7, steps=407):
        assert all((step - 7) % 5 == 0 for step, _ in seen)


def test_checkpoints_have_the_time_that_the_processes_agreed_on():
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    loop = trainer.train_loop(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32), steps=1)
    loop._run._agreement = module.Agreement(lambda: 123.0)
    assert loop.next_step().run.position.moment.seconds == 123.0


def test_a_run_that_all_processes_begin_together_replaces_other_stop_reasons_and_forgets_earlier_failures(monkeypatch):
    """The reason is that of the first process, such as `OptunaPruning`, which only observes there."""
    monkeypatch.setattr(module, "exchange", lambda value, topic: [[0.0, "reason of 0"], value])
    monkeypatch.setattr(module, "Board", FakeBoard)
    monkeypatch.setattr(launch._Exit, "failure", "ValueError: caught")
    monkeypatch.setattr(launch._Exit, "is_own", False)
    session: Any = SimpleNamespace(is_stopping=True, stop_reason="reason of 1", strategy=SimpleNamespace(num_processes=2, max_in_flight=1))
    module.make_agreement(session, 1, time.monotonic)
    assert (session.is_stopping, session.stop_reason, launch._Exit.failure, launch._Exit.is_own) == (True, "reason of 0", None, True)


def test_processes_exchange_their_stop_reasons_after_a_partial_epoch_before_the_run_ends(monkeypatch):
    """A callback such as `OptunaPruning` stops the run in process 0 in `on_epoch_end`, and raises an error in all of them in `on_train_end`."""
    order = []
    monkeypatch.setattr(Agreement, "synchronize", lambda self: order.append("exchange"))
    hooks = {name: lambda *arguments, name=name: order.append(name) for name in ("on_epoch_end", "on_train_end")}
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    data = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)
    trainer.fit(data, batch_size=2, steps=3, callbacks=[LambdaCallback(**hooks)], verbose=0)
    assert order[-3:] == ["on_epoch_end", "exchange", "on_train_end"]


def test_the_agreed_time_never_goes_backward():
    """The time posted for a step may be older than the time that the processes exchanged at the end of an epoch."""
    agreement = object.__new__(DistributedAgreement)
    agreement._seconds = 0.0
    for seconds in (5.0, 3.0):
        agreement._apply(seconds, None)
    assert agreement.seconds == 5.0
