"""States of trainers that are no longer referenced: if they are large, they are freed before another one is created."""

import gc

import jax
import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.steps import live_state as live

X = np.ones((8, 16), np.float32)


def train():
    trainer = fitflax.Trainer(nn.Dense(512), parallel=fitflax.parallel.DataParallel(jax.devices()[:1]))
    trainer.compile("adam", "mse")
    trainer.fit(X, np.ones((8, 512), np.float32), verbose=0)
    return trainer


@pytest.mark.mostly_slow
@pytest.mark.parametrize("is_large", [True, False])
def test_only_large_unreferenced_states_are_collected(is_large, monkeypatch):
    monkeypatch.setattr(live, "_LARGE_BYTES", 2**16 if is_large else 2**40)
    gc.collect()
    gc.disable()
    try:
        kept = train()
        for _ in range(3):
            train()
        large = [array for array in jax.live_arrays() if array.shape == (16, 512)]
        # Parameters and two moments of the trainer that is kept, and of the last one or of all others.
        assert len(large) == (6 if is_large else 12)
        assert kept.predict(X).shape == (8, 512)
    finally:
        gc.enable()


def test_a_state_that_is_still_referenced_causes_no_other_collection(monkeypatch):
    monkeypatch.setattr(live, "_LARGE_BYTES", 2**16)
    kept, collections = train(), []
    live.collect_dropped(None)
    monkeypatch.setattr(live.gc, "collect", lambda: collections.append(1))
    live.collect_dropped(None)
    assert not collections
    other = train()
    live.collect_dropped(None)
    assert len(collections) == 1 and kept.step == other.step == 1
