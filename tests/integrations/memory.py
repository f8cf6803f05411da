"""An in-memory tracker, and runs that log to it."""

import threading
import time

import numpy as np
from flax import linen as nn

import fitflax
from fitflax.integrations.tracker import Tracker, TrackerLogger


class Memory(Tracker):
    """A tracker whose runs are lists of `(key, step, value)`; it raises if `fails()` is true."""

    title = "Memory"

    def __init__(self, runs=None, *, fails=lambda: False):
        self.runs = {} if runs is None else runs
        self.fails = fails
        self.starts = []
        self.current = None
        self.ended = []
        self.calls = []  # Each run has a copy of this object, so what a test inspects is in lists and dicts, which the copies share.
        self.images = {}

    def _call(self):
        self.calls.append(1)
        if self.fails():
            raise ConnectionRefusedError("nobody there")

    def start(self, name, run_id, config):
        self._call()
        self.starts.append((name, run_id, dict(config)))
        self.current = run_id if run_id in self.runs else name
        self.runs.setdefault(self.current, [])
        return self.current

    def log(self, points):
        self._call()
        for point in points:
            self.runs[self.current] += [(key, point.step, value) for key, value in point.values.items()]
            self.images |= {(key, point.step): png for key, png in point.images.items()}

    def finish(self, status, summary, artifact):
        self._call()
        self.ended.append((self.current, status, dict(summary), artifact))

    def last_step(self, key):
        return max((step for name, step, _ in self.runs[self.current] if name == key), default=None)


class Net(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.Dense(self.width)(x)))


X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def trained(*callbacks, net=None, rate=0.01, steps=20, resume=None, **kwargs):
    trainer = fitflax.Trainer(net or Net())
    trainer.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], learning_rate=rate)
    trainer.fit(X, Y, batch_size=8, steps=steps, callbacks=callbacks, resume=resume, verbose=0, **kwargs)
    return trainer


def logger_of(tracker, **kwargs):
    return TrackerLogger(tracker, **({"every": fitflax.every(steps=2), "interval": 0.0} | kwargs))


def values_of(run):
    """Returns `{(key, step): value}` without clocks, and checks that each is there once."""
    found = [entry for entry in run if not entry[0].startswith("time/")]
    assert len({entry[:2] for entry in found}) == len(found), "something is there twice"
    return {(key, step): value for key, step, value in found}


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)
