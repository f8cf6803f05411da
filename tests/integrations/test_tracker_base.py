"""Readings of trackers in checkpoints: values that are still on the device, and points that are read during a save."""

import json

import jax
import numpy as np

from fitflax.integrations.tracker_base import Point, Reading, readings_of_state, state_of
from fitflax.logs import Place


def points_of(steps):
    return [Reading.of_point(Point(step, float(step), {"loss": 0.5})) for step in steps]


def test_a_point_that_is_read_during_a_save_is_complete_in_the_checkpoint(monkeypatch):
    reading = Reading(3, 0.0, {"val_loss": 1.5}, vector=jax.numpy.array([0.5]), places={"loss": Place(0)})
    real = json.dumps

    def dumps(*arguments, **kwargs):
        monkeypatch.setattr(json, "dumps", real)
        reading.read()  # As the sending thread does, in the middle.
        return real(*arguments, **kwargs)

    monkeypatch.setattr(json, "dumps", dumps)
    state = state_of([reading], numbers_only=False)
    assert reading.is_read
    assert [restored.read() for restored in readings_of_state(state)] == [reading.read()]


def test_saves_of_several_processes_do_not_call_user_functions():
    def fail():
        raise ValueError("cannot be drawn")

    class Lost:
        def __array__(self, *arguments, **kwargs):
            raise RuntimeError("the device is gone")

    readings = [
        Reading(1, 0.0, {"val_loss": 1.5}, vector=jax.numpy.array([0.5]), places={"loss": Place(0)}, late=fail, media=fail),
        Reading(2, 0.0, {"val_loss": 2.5}, vector=Lost(), places={"loss": Place(0)}),
    ]
    state = state_of(readings, numbers_only=True)
    assert [reading.read().values for reading in readings_of_state(state)] == [{"val_loss": 1.5, "loss": 0.5}, {"val_loss": 2.5}] and not state["unread"]
    assert readings[0].has_media, "the thread draws it later"


def test_a_point_is_serialized_once(monkeypatch):
    readings = [*points_of(range(5)), Reading(5, 0.0, {"loss": 1.0})]
    readings[-1].read()
    first = state_of(readings, numbers_only=False)
    monkeypatch.setattr(json, "dumps", None)
    assert state_of(readings, numbers_only=False) == first


def test_values_that_are_still_on_the_device_are_saved_and_restored():
    vector = jax.numpy.array([0.5, 1.5, -1.0, -1.0, 0.25, 1.0, 2.0])
    places = {"step/loss": Place(0), "step/gradients_norm": Place(1), "loss": Place(4), "per_class": Place(5, (2,))}
    reading = Reading(3, 1.25, {"val_loss": np.float32(0.1)}, vector=vector, places=places, scalars={"learning_rate": jax.numpy.array(0.5)})
    restored = Reading.of_saved(reading.saved())
    assert restored.read() == reading.read()
    numbers = {"step/loss": 0.5, "step/gradients_norm": 1.5, "loss": 0.25, "per_class/0": 1.0, "per_class/1": 2.0, "learning_rate": 0.5}
    assert reading.read().values == {"val_loss": float(np.float32(0.1)), **numbers}
    (back,) = readings_of_state(state_of([Reading.of_point(Point(1, 0.1, {"nan": float("nan"), "inf": -float("inf"), "x": 0.1}))], numbers_only=False))
    values = back.read().values
    assert np.isnan(values["nan"]) and values["inf"] == -float("inf") and values["x"] == 0.1


def test_values_that_are_not_numbers_are_left_out():
    assert Reading(1, 0.0, {"loss": 0.5, "text": "a", "ragged": [[1], [1, 2]]}).read().values == {"loss": 0.5}
