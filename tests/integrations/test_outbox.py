"""`Outbox` and the readings that it sends: points that a tracker rejects, points in checkpoints, and abandoned threads."""

import collections
import dataclasses
import os
import signal
import threading
import time

import jax
import pytest

from fitflax.background import Background
from fitflax.errors import FitflaxWarning
from fitflax.integrations import outbox as outbox_module
from fitflax.integrations.outbox import Ending, Outbox, RunStart
from fitflax.integrations.tracker_base import Point, Reading, readings_of_state, state_of
from fitflax.logs import Place
from tests.integrations.memory import Memory, logger_of, trained, values_of, wait_for


def outbox_of(tracker, **kwargs):
    outbox = Outbox(tracker, **({"resumed": False, "interval": 0.0} | kwargs))
    outbox.begin(RunStart("a"))
    return outbox


def points_of(steps, **kwargs):
    return [Reading.of_point(Point(step, float(step), {"loss": 0.5}, **kwargs)) for step in steps]


def test_if_there_are_too_many_points_the_oldest_are_dropped():
    tracker = Memory()
    tracker.fails = lambda: len(tracker.calls) == 1
    outbox = outbox_of(tracker, capacity=3)
    wait_for(lambda: outbox._num_failures == 1)
    for reading in points_of(range(5)):
        outbox.put(reading)
    assert outbox.end(Ending("finished", {}), seconds=30)
    (run,) = tracker.runs.values()
    assert [step for _, step, _ in run] == [2, 3, 4] and outbox.num_lost == 2 and outbox.unsent == []


def test_points_that_the_old_run_has_are_not_sent_even_after_the_new_run_has_started():
    tracker = Memory()
    changed = RunStart("a", config={"rate": 0.5}, settings_before='{"rate": 0.1}', changed_step=7)
    tracker.runs["old"] = [("loss", 12, 0.5)]
    outbox = Outbox(tracker, resumed=True, interval=0.0)
    outbox.begin(dataclasses.replace(changed, run_id="old"))
    wait_for(lambda: outbox.run_id is not None)
    for reading in points_of(range(5, 10)):
        outbox.put(reading)
    assert outbox.end(Ending("finished", {}), seconds=30)
    assert [step for _, step, _ in tracker.runs[outbox.run_id]] == [8, 9] and outbox.run_id != "old" and outbox.unsent == []


def test_the_end_tries_once_and_then_gives_up():
    tracker = Memory(fails=lambda: True)
    outbox = outbox_of(tracker)
    wait_for(lambda: outbox._num_failures == 1)
    assert not outbox.end(Ending("finished", {}), seconds=30)
    wait_for(lambda: outbox._thread.is_idle)
    assert len(tracker.calls) == 2


def test_a_tracker_is_abandoned_if_the_end_cannot_be_sent():
    tracker, abandoned = Memory(), []
    tracker.abandon = lambda: abandoned.append(threading.current_thread() is not threading.main_thread())
    tracker.fails = lambda: len(tracker.calls) > 1
    outbox = outbox_of(tracker)
    wait_for(lambda: outbox.run_id is not None)
    assert not outbox.end(Ending("finished", {}), seconds=30)
    wait_for(lambda: abandoned)
    assert abandoned == [True]


class Choosy(Memory):
    """Rejects some points, regardless of the other points in the request."""

    def __init__(self, refuses):
        super().__init__()
        self.refuses = refuses

    def log(self, points):
        if any(self.refuses(point) for point in points):
            raise ValueError("not that one")
        super().log(points)


def test_rejected_points_are_dropped_with_one_warning():
    tracker = Choosy(lambda point: point.step in (4, 10))
    with pytest.warns(FitflaxWarning) as caught:
        trained(logger_of(tracker, interval=30.0))
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith("Memory rejected the values of step 4: ValueError: not that one. They are left out")
    (run,) = tracker.runs.values()
    assert {step for key, step in values_of(run) if key == "loss"} == {2, 5, 6, 8, 12, 14, 15, 16, 18, 20}


def test_rejected_images_are_dropped_and_the_numbers_are_kept():
    tracker = Choosy(lambda point: point.images)
    outbox = outbox_of(tracker)
    for reading in points_of(range(3), images={"a": b"png"}):
        outbox.put(reading)
    assert outbox.end(Ending("finished", {}), seconds=30)
    (message,) = outbox.take_warnings()
    assert message.startswith("Memory rejected the images of step 0")
    assert [step for _, step, _ in tracker.runs[outbox.run_id]] == [0, 1, 2] and not tracker.images


def test_no_point_is_lost_if_the_tracker_rejects_everything():
    tracker = Choosy(lambda point: True)
    outbox = outbox_of(tracker)
    for reading in points_of(range(5)):
        outbox.put(reading)
    assert not outbox.end(Ending("finished", {}), seconds=30)
    assert [reading.step for reading in outbox.unsent] == list(range(5))


def test_points_that_were_accepted_one_by_one_are_not_sent_again():
    broken = [True]

    def refuse(point):
        if point.step == 3 and broken:
            raise ConnectionResetError("gone")
        return False

    tracker = Choosy(lambda point: point.step == 1 or refuse(point))
    outbox = outbox_of(tracker)
    wait_for(lambda: outbox.run_id is not None and outbox._thread.is_idle)
    outbox._waiting.extend(points_of(range(5)))
    outbox._submit()
    wait_for(lambda: outbox._num_failures == 1)
    broken.clear()
    assert outbox.end(Ending("finished", {}), seconds=30)
    assert [step for _, step, _ in tracker.runs[outbox.run_id]] == [0, 2, 3, 4]


def test_only_a_few_points_keep_their_images_while_the_tracker_is_down(monkeypatch):
    monkeypatch.setattr(outbox_module, "_CAPACITY_OF_MEDIA", 3)
    outbox = outbox_of(Memory(fails=lambda: True))
    for reading in points_of(range(10), images={"a": b"png"}):
        outbox.put(reading)
    try:
        assert [reading.has_media for reading in outbox.unsent] == [True] * 3 + [False] * 7
    finally:
        outbox.abandon()


def test_only_a_few_points_stay_unread_while_a_request_hangs(monkeypatch):
    monkeypatch.setattr(outbox_module, "_CAPACITY_OF_UNREAD", 5)
    released = threading.Event()
    outbox = outbox_of(Memory(fails=lambda: released.wait() and False))
    try:
        for step in range(20):
            outbox.put(Reading(step, 0.0, {}, vector=jax.numpy.array([0.5]), places={"loss": Place(0)}))
        state = state_of(outbox.unsent, numbers_only=False)
        assert len(state["unread"]) <= 5
        assert [reading.read().values for reading in readings_of_state(state)] == [{"loss": 0.5}] * 20
    finally:
        outbox.abandon()
        released.set()


def test_a_point_that_is_sent_during_a_save_is_in_the_checkpoint():
    outbox = Outbox(Memory(), resumed=False, interval=0.0)
    outbox.tracker.settle_seconds = 60.0

    class Moving(collections.deque):
        def __iter__(self):
            found = list(super().__iter__())
            while outbox._waiting:  # As the sending thread does.
                self.append((time.monotonic(), outbox._waiting.popleft()))
            return iter(found)

    outbox._unsettled = Moving()
    outbox._waiting.extend(points_of([1]))
    assert [reading.step for reading in readings_of_state(state_of(outbox.unsent, numbers_only=False))] == [1]


def test_metrics_are_sent_even_if_a_figure_of_their_point_fails():
    def fail():
        raise ValueError("cannot be drawn")

    tracker = Memory()
    outbox = outbox_of(tracker)
    outbox.put(Reading(1, 0.0, {}, late=lambda: {"auc": 0.75}, media=fail))
    assert outbox.end(Ending("finished", {}), seconds=30)
    assert tracker.runs[outbox.run_id] == [("auc", 1, 0.75)] and len(outbox.take_warnings()) == 1


def test_ctrl_c_at_the_end_raises_immediately(monkeypatch):
    released = threading.Event()
    tracker = Memory(fails=lambda: released.wait() and False)
    real = Background.wait_until

    def interrupted(self, condition):
        if self.name == "fitflax-tracker":
            os.kill(os.getpid(), signal.SIGINT)
        real(self, condition)

    monkeypatch.setattr(Background, "wait_until", interrupted)
    outbox = Outbox(tracker, resumed=False, interval=0.0)
    outbox.begin(RunStart("a"))
    try:
        with pytest.raises(KeyboardInterrupt):
            outbox.end(Ending("finished", {}), seconds=60)
    finally:
        released.set()
