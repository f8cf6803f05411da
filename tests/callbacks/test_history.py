import flax.linen as nn
import jax
import numpy as np
import optax

import fitflax
from fitflax.callbacks import LambdaCallback
from fitflax.parallel import DataParallel

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype(np.float32)
Y = RNG.normal(size=(8, 3)).astype(np.float32)


def make(metrics=None):
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(0.1), loss="mse", metrics=metrics)
    return trainer


def test_fit_returns_one_value_of_each_key_an_epoch():
    trainer = make(["mae"])
    history = trainer.fit(X, Y, epochs=3, validation_data=(X, Y), verbose=0)
    assert isinstance(history, fitflax.History) and trainer.history is history
    assert history.epoch == [0, 1, 2]
    assert {key: len(values) for key, values in history.history.items()} == {"loss": 3, "mae": 3, "val_loss": 3, "val_mae": 3}
    assert history.history["loss"] == sorted(history.history["loss"], reverse=True)
    assert [row["logs"]["loss"] for row in history.rows] == history.history["loss"]


def test_an_epoch_without_validation_has_no_value_of_it():
    history = make().fit(X, Y, epochs=3, validation_data=(X, Y), validation_freq=2, verbose=0)
    assert (len(history.history["loss"]), len(history.history["val_loss"])) == (3, 1)
    assert [list(row["logs"]) for row in history.rows] == [["loss"], ["loss", "val_loss"], ["loss"]]


def test_each_fit_has_a_history_of_its_own():
    trainer = make()
    first = trainer.fit(X, Y, epochs=2, verbose=0)
    second = trainer.fit(X, Y, epochs=1, verbose=0)
    assert (first.epoch, second.epoch) == ([0, 1], [0]) and trainer.history is second


def test_rows_are_copies_of_the_logs():
    kept = []
    history = make().fit(X, Y, callbacks=[LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append(logs))], verbose=0)
    kept[0]["loss"] = 0.0
    assert history.history["loss"][0] > 0


def test_what_a_callback_adds_comes_back_as_it_was_added():
    add = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(added=epoch))
    assert make().fit(X, Y, epochs=2, callbacks=[add], verbose=0).history["added"] == [0, 1]


def test_its_state_goes_into_another_instance():
    history = make().fit(X, Y, epochs=2, verbose=0)
    other = fitflax.History()
    other.load_state_dict(history.state_dict())
    assert other.rows == history.rows and other.rows[0]["logs"] is not history.rows[0]["logs"]


def test_before_any_fit_it_is_empty():
    history = make().history
    assert (history.history, history.epoch, repr(history)) == ({}, [], "History({})")
