"""`Clock`, which measures the speed of a run for `TensorBoard` and `TrackerLogger`."""

import time

from fitflax.callbacks.step_logger import Clock, Stamp


def test_rates_exclude_evaluations_and_never_underestimate_an_interval(monkeypatch):
    clock, now = Clock(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def rates(step, dispatched, finished, evaluating=0.0):
        now[0] = finished
        return clock.rates(Stamp(step, 4 * step, dispatched, evaluating))

    assert rates(10, dispatched=1.0, finished=2.0) == {}
    # The training thread ran ahead, then the writing thread lagged behind: the longer interval counts.
    assert rates(20, dispatched=2.0, finished=12.0) == {"time/steps_per_second": 1.0, "time/examples_per_second": 4.0}
    assert rates(30, dispatched=22.0, finished=12.1)["time/steps_per_second"] == 0.5
    # With an evaluation, counted from the first reading: 30 steps in 30 of 80 seconds.
    assert rates(40, dispatched=81.0, finished=81.0, evaluating=50.0) == {
        "time/validation_seconds": 50.0, "time/steps_per_second": 1.0, "time/examples_per_second": 4.0
    }  # fmt: skip
    assert rates(50, dispatched=82.0, finished=86.0)["time/steps_per_second"] == 2.0
    assert rates(50, dispatched=90.0, finished=91.0) == {}
    assert clock.rates(Stamp(60, None, 100.0)) == {"time/steps_per_second": 1.0}


def test_an_interval_that_is_too_short_becomes_part_of_the_next(monkeypatch):
    clock = Clock(min_seconds=1.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    assert clock.rates(Stamp(0, None, 0.0)) == {}
    assert clock.rates(Stamp(32, None, 0.1)) == {}
    assert clock.rates(Stamp(40, None, 5.5, 5.0)) == {"time/validation_seconds": 5.0}
    assert clock.rates(Stamp(50, None, 10.0)) == {"time/steps_per_second": 10.0}
    assert clock.rates(Stamp(60, None, 12.0)) == {"time/steps_per_second": 5.0}
