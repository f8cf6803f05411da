import math

import numpy as np
import pytest

import fitflax
from fitflax.callbacks import ModelCheckpoint
from fitflax.errors import ConfigError
from fitflax.triggers import Moment, Schedule, Trigger, at, every, first


def fired(trigger, steps, *, start=0):
    schedule = Schedule(trigger)
    return [step for step in steps if schedule.due(Moment(step, start_step=start))]


def fired_at_seconds(trigger, seconds, *, begin=0.0):
    schedule = Schedule(trigger, begin)
    return [second for second in seconds if schedule.due(Moment(1, seconds=second))]


# --- Steps ---


@pytest.mark.parametrize(
    ("trigger", "expected"),
    [
        (every(steps=1), [1, 2, 3, 4, 5, 6, 7, 8]),
        (every(steps=3), [3, 6]),
        (every(steps=3, offset=1), [1, 4, 7]),
        (every(steps=3, offset=5), [5, 8]),
        (every(steps=3, offset=0), [3, 6]),
        (at(2), [2]),
        (at(8, 1), [1, 8]),
        (first(2), [1, 2]),
        (first(1) | every(steps=5), [1, 5]),
        (at(4) | at(6) | every(steps=7), [4, 6, 7]),
    ],
    ids=str,
)
def test_a_step_trigger_fires_at_exactly_the_expected_steps_of_the_first_eight(trigger, expected):
    assert fired(trigger, range(1, 9)) == expected


# flax_extra: a checkpoint after step s if (s - 1) % n == 0.
@pytest.mark.parametrize(("steps", "n"), [(8, 3), (7, 3), (10, 5), (5, 1), (3, 9)])
def test_an_offset_of_one_equals_the_rule_of_flax_extra(steps, n):
    expected = [step for step in range(1, steps + 1) if (step - 1) % n == 0]
    assert fired(every(steps=n, offset=1), range(1, steps + 1)) == expected
    assert fired(first(1) | every(steps=n, offset=1), range(1, steps + 1)) == expected


def test_the_rule_of_flax_extra_continues_after_a_resume():
    assert fired(every(steps=3, offset=1), range(2, 6), start=1) == [4]


# bobbin: interval 123 and the first 10 steps.
@pytest.mark.parametrize(("step", "is_due"), [(123, True), (124, False), (3, True), (10, True), (11, False), (246, True)])
def test_an_interval_and_the_first_steps_are_combined_as_in_bobbin(step, is_due):
    assert Schedule(every(steps=123) | first(10)).due(Moment(step)) is is_due


def test_the_first_steps_of_a_process_are_counted_from_the_step_where_it_started():
    steps = range(1, 20)
    assert fired(first(3, of_process=True), steps, start=10) == [11, 12, 13]
    assert fired(at(1, 3, of_process=True), steps, start=10) == [11, 13]
    assert fired(first(3), range(11, 20), start=10) == []
    assert fired(first(3, of_process=True), steps) == [1, 2, 3]


# --- Epochs ---


def test_every_epochs_fires_only_at_the_end_of_an_epoch():
    schedule = Schedule(every(epochs=2))
    moments = [Moment(step, epochs_done=step // 3, epoch_ends=step % 3 == 0) for step in range(1, 13)]
    assert [moment.step for moment in moments if schedule.due(moment)] == [6, 12]


def test_a_moment_is_not_the_end_of_an_epoch_by_default():
    assert not every(epochs=1).is_due(Moment(3, epochs_done=1), 0.0)


# --- Time ---


# bobbin: an interval of 7 seconds that starts at 0.
def test_seconds_are_counted_from_the_last_time_the_trigger_fired():
    assert fired_at_seconds(every(seconds=7), [10, 15, 19, 25, 27]) == [10, 19, 27]


def test_seconds_are_counted_from_the_start_of_the_schedule():
    assert fired_at_seconds(every(seconds=7), [100, 106, 107, 113.9, 114], begin=100.0) == [107, 114]


def test_a_time_trigger_that_fires_along_with_a_step_does_not_fire_at_the_next_step():
    schedule = Schedule(every(steps=2) | every(seconds=10))
    moments = [Moment(1, seconds=1), Moment(2, seconds=10), Moment(3, seconds=11), Moment(4, seconds=12), Moment(5, seconds=20)]
    assert [schedule.due(moment) for moment in moments] == [False, True, False, True, True]


def test_a_step_trigger_that_fires_does_not_delay_a_time_trigger():
    schedule = Schedule(every(seconds=10) | every(steps=2))
    assert schedule.due(Moment(2, seconds=6))
    assert schedule.due(Moment(3, seconds=10))


def test_one_trigger_serves_two_schedules():
    trigger = every(seconds=5)
    early, late = Schedule(trigger), Schedule(trigger)
    assert early.due(Moment(1, seconds=5)) and late.due(Moment(1, seconds=6))
    assert early.due(Moment(2, seconds=10)) and not late.due(Moment(2, seconds=10))


def test_a_restored_schedule_continues_where_the_saved_one_was_on_another_clock():
    trigger = every(seconds=10) | every(steps=100)
    before = Schedule(trigger, 0.0)
    assert before.due(Moment(1, seconds=12))
    saved = before.state_dict(16.0)
    after = Schedule(trigger, 1000.0)
    after.load_state_dict(saved, 1000.0)
    assert not after.due(Moment(2, seconds=1005.9))
    assert after.due(Moment(3, seconds=1006.0))


def test_the_next_time_of_a_schedule_is_that_of_the_part_that_fires_first():
    schedule = Schedule(every(seconds=10) | every(seconds=4) | every(steps=3), 100.0)
    assert schedule.next_seconds == 104.0
    assert schedule.due(Moment(1, seconds=105.0)) and schedule.next_seconds == 109.0
    assert Schedule(every(steps=1) | every(epochs=1)).next_seconds == Schedule(None).next_seconds == math.inf


def test_the_state_of_another_trigger_is_ignored():
    schedule = Schedule(every(seconds=10))
    schedule.load_state_dict({"since": [1.0, 2.0]}, 5.0)
    assert schedule.due(Moment(1, seconds=10))


# --- Values ---


def test_a_schedule_without_a_trigger_never_fires():
    assert not Schedule(None).due(Moment(1, epoch_ends=True, seconds=1e9))


def test_triggers_are_compared_by_value():
    assert every(steps=3) == every(steps=3) != every(steps=4)
    assert hash(at(1, 2)) == hash(at(1, 2))
    assert every(steps=3) | at(1) == every(steps=3) | at(1)
    assert isinstance(first(2) | at(5), Trigger)
    assert (fitflax.every, fitflax.at, fitflax.first) == (every, at, first)


def test_combining_triggers_is_flat_so_that_every_part_keeps_its_own_time():
    assert len(((every(seconds=1) | every(seconds=2)) | (at(1) | first(2))).parts()) == 4


# --- Errors ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: every(), r"every\(\) takes exactly one of steps, epochs and seconds. Received: none of them"),
        (lambda: every(steps=1, epochs=2), r"exactly one of steps, epochs and seconds. Received: \{'steps': 1, 'epochs': 2\}. Combine triggers with \|"),
        (lambda: every(steps=0), r"every\(steps=...\) must be a positive integer. Received: 0"),
        (lambda: every(steps=-3), r"must be a positive integer. Received: -3"),
        (lambda: every(steps=2.0), r"must be a positive integer. Received: 2.0"),
        (lambda: every(steps=True), r"must be a positive integer. Received: True"),
        (lambda: every(epochs=0), r"every\(epochs=...\) must be a positive integer"),
        (lambda: every(seconds=0), r"every\(seconds=...\) must be a positive number. Received: 0"),
        (lambda: every(seconds=float("nan")), r"must be a positive number"),
        (lambda: every(seconds="7"), r"must be a positive number. Received: '7'"),
        (lambda: every(epochs=1, offset=1), r"every\(offset=...\) must be an integer of at least 0, and needs steps="),
        (lambda: every(steps=2, offset=-1), r"every\(offset=...\) must be an integer of at least 0"),
        (lambda: every(steps=2, offset=1.0), r"every\(offset=...\) must be an integer of at least 0"),
        (lambda: every(steps=2, offset=True), r"every\(offset=...\) must be an integer of at least 0"),
        (lambda: at(), r"at\(\) takes at least one step"),
        (lambda: at(0), r"at\(...\) must be a positive integer. Received: 0"),
        (lambda: at([1, 2]), r"at\(...\) must be a positive integer. Received: \[1, 2\]"),
        (lambda: first(0), r"first\(...\) must be a positive integer. Received: 0"),
    ],
)
def test_invalid_arguments_are_errors(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_trigger_combines_only_with_triggers():
    with pytest.raises(TypeError):
        every(steps=1) | 3


def test_an_unknown_interval_is_a_type_error():
    with pytest.raises(TypeError):
        every(minutes=1)


STEP_TRIGGERS = [every(steps=1), every(steps=7), every(steps=5, offset=0), every(steps=4, offset=9), at(1, 17), first(3)]
STEP_TRIGGERS += [at(1, 17, of_process=True), first(3, of_process=True)]


@pytest.mark.parametrize("trigger", [*STEP_TRIGGERS, every(steps=6) | at(2)])
@pytest.mark.parametrize("start", [0, 10])
def test_the_next_step_of_a_trigger_is_the_first_one_at_which_it_fires(trigger, start):
    due = [step for step in range(1, 80) if trigger.is_due(Moment(step, start_step=start), 0.0)]
    for step in range(40):
        assert trigger.next_step(step, start) == next((one for one in due if one > step), None)
        assert Schedule(trigger).next_step(step, start) == trigger.next_step(step, start)


def test_time_and_epoch_triggers_have_no_next_step_and_custom_ones_may_fire_at_the_next():
    class Odd(Trigger):
        def parts(self):
            return (self,)

        def is_due(self, moment, last_seconds):
            return moment.step % 2 == 1

    assert every(seconds=1).next_step(3, 0) is None and every(epochs=1).next_step(3, 0) is None
    assert (every(seconds=1) | every(epochs=2)).next_step(3, 0) is None and Schedule(None).next_step(3, 0) is None
    assert Odd().next_step(3, 0) == 4


def test_numpy_integers_are_accepted_as_integers():
    two = np.int64(2)
    assert (every(steps=two, offset=two), every(epochs=two), at(two), first(two)) == (every(steps=2, offset=2), every(epochs=2), at(2), first(2))
    assert type(ModelCheckpoint("nowhere", keep=two, keep_every=two).keep_every) is int
    with pytest.raises(ConfigError, match="must be a positive integer"):
        every(steps=np.bool_(True))


def test_the_repr_of_a_trigger_is_the_code_that_creates_it():
    words = ["every(steps=3)", "every(steps=3, offset=1)", "every(epochs=2)", "every(seconds=0.5)", "at(1, 17)", "first(10)"]
    words += ["at(2, of_process=True)", "first(2, of_process=True)"]
    for text in [*words, "every(epochs=1) | every(seconds=600) | at(4)"]:
        trigger = eval(text, {"every": every, "at": at, "first": first})
        assert repr(trigger) == text
