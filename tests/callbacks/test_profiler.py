"""`Profiler`: it traces the requested steps and no others."""

import gzip
import json
import os

import flax.linen as nn
import jax
import numpy as np
import pytest

import fitflax
from fitflax.callbacks import LambdaCallback, ModelCheckpoint, Profiler
from fitflax.callbacks.callback_list import CallbackList
from fitflax.errors import CallbackError, FitflaxWarning
from fitflax.parallel import DataParallel

X, Y = np.ones((40, 4), np.float32), np.ones((40, 2), np.float32)


def make(**options):
    trainer = fitflax.Trainer(nn.Dense(2), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse", **options)
    return trainer


@pytest.fixture
def recorded(monkeypatch):
    """Returns a function that trains and returns the steps after which recording started and stopped."""
    found, trainers = [], []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory, **options: found.append(("start", trainers[-1].step)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append(("stop", trainers[-1].step)))

    def run(profiler, trainer=None, **options):
        found.clear()
        trainers.append(trainer or make())
        trainers[-1].fit(X, Y, batch_size=4, callbacks=[profiler, *options.pop("callbacks", ())], verbose=0, **options)
        return list(found)

    return run


@pytest.mark.parametrize(
    ("steps", "total", "expected"),
    [
        ((3, 5), 20, [("start", 2), ("stop", 5)]),
        ((1, 2), 20, [("start", 0), ("stop", 2)]),
        ((12, 12), 20, [("start", 11), ("stop", 12)]),
        ((10, 40), 20, [("start", 9), ("stop", 20)]),  # The run ends earlier.
    ],
)
def test_the_requested_steps_are_recorded(steps, total, expected, recorded, tmp_path):
    assert recorded(Profiler(tmp_path, steps=steps), steps=total) == expected


def test_a_run_that_ends_earlier_warns_that_nothing_was_recorded(recorded, tmp_path):
    with pytest.warns(FitflaxWarning, match="Profiler recorded nothing: the run ended after 20 steps, before step 30"):
        assert recorded(Profiler(tmp_path, steps=(30, 40)), steps=20) == []


def test_steps_are_counted_from_the_start_of_each_call(recorded, tmp_path):
    trainer, profiler = make(), Profiler(tmp_path / "profile", steps=(3, 5))
    recorded(profiler, trainer, steps=7)
    assert recorded(profiler, trainer, steps=7) == [("start", 9), ("stop", 12)]
    save = [ModelCheckpoint(tmp_path / "checkpoints")]
    recorded(profiler, steps=10, callbacks=save, resume="auto")
    assert recorded(profiler, steps=18, callbacks=[ModelCheckpoint(tmp_path / "checkpoints")], resume="auto") == [("start", 12), ("stop", 15)]


def test_calls_of_several_steps_end_where_recording_starts_or_stops(recorded, tmp_path):
    assert recorded(Profiler(tmp_path, steps=(4, 6)), make(steps_per_call=4), steps=12) == [("start", 3), ("stop", 6)]


@pytest.mark.parametrize("index", [0, 1])
def test_all_processes_have_the_same_triggers_in_each_run(index, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda *arguments: index)
    hooks = CallbackList([Profiler(tmp_path, steps=(4, 6))])
    for start in (0, 20):
        assert hooks.settings_to_compare["callback triggers"] == ["Profiler at(3, 6, of_process=True)"]
        hooks.open_run("run", start)
        hooks.start_schedules(0.0)
        assert [hooks.next_step(start + step, start) for step in (0, 3, 6)] == [start + 3, start + 6, None]


def test_recording_ends_when_a_run_fails(recorded, tmp_path):
    def fail(batch, logs):
        raise ArithmeticError("broken")

    profiler = Profiler(tmp_path, steps=(1, 30))
    with pytest.raises(ArithmeticError):
        recorded(profiler, steps=5, callbacks=[LambdaCallback(on_train_batch_end=fail)])
    assert recorded(Profiler(tmp_path, steps=(1, 2)), steps=5) == [("start", 0), ("stop", 2)]


def test_a_trace_contains_the_calls_of_the_step_and_has_a_file_for_perfetto(tmp_path):
    trainer = make()
    trainer.fit(X, Y, batch_size=4, steps=6, callbacks=[Profiler(tmp_path, steps=(3, 5))], verbose=0)
    (trace,) = tmp_path.glob("plugins/profile/*/perfetto_trace.json.gz")
    assert list(trace.parent.glob("*.xplane.pb"))
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    calls = [event["name"] for event in events if event.get("name", "").startswith("PjitFunction(train_step)")]
    assert len(calls) >= 3


@pytest.mark.slow
def test_recording_while_another_profile_is_being_recorded_is_an_error(tmp_path):
    with jax.profiler.trace(str(tmp_path / "other")), pytest.raises(CallbackError, match=r"Profiler cannot record: .*[Oo]nly one"):
        make().fit(X, Y, batch_size=4, steps=3, callbacks=[Profiler(tmp_path / "own", steps=(1, 2))], verbose=0)
    assert not os.path.exists(tmp_path / "own" / "plugins")


@pytest.mark.parametrize("steps", [(0, 3), (4, 3), (1.0, 2), (True, 2)])
def test_invalid_steps_are_an_error(steps, tmp_path):
    with pytest.raises(CallbackError, match=r"takes the first and the last step to record, counted from 1\. Received"):
        Profiler(tmp_path, steps=steps)
