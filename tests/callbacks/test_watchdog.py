"""`Watchdog`: what it prints when a run hangs, and that it prints nothing else."""

import io
import re
import threading
import time

import flax.linen as nn
import jax
import numpy as np
import pytest

import fitflax
from fitflax.callbacks import Callback, LambdaCallback, Watchdog
from fitflax.errors import CallbackError
from fitflax.parallel import DataParallel

X, Y = np.ones((16, 4), np.float32), np.ones((16, 1), np.float32)


def make_trainer():
    trainer = fitflax.Trainer(nn.Dense(1), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse")
    trainer.build((X[:8], Y[:8]))
    return trainer


def hang_until(condition):
    """Waits until the watchdog has acted; the test fails if it never does."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def reports(file):
    """Returns the number of reports. Lines of code in them are indented."""
    return len(re.findall("^Watchdog:", file.getvalue(), re.MULTILINE))


def watching():
    """Returns the threads that are still watching."""
    return {thread for thread in threading.enumerate() if thread.name == "fitflax-watchdog"}


def test_it_prints_the_stacks_of_all_threads_repeatedly_while_there_is_no_progress():
    file = io.StringIO()

    def batches():
        yield X[:8], Y[:8]
        num_reports = reports(file)
        hang_until(lambda: reports(file) >= num_reports + 2 and "in hang_until" in file.getvalue())  # The run waits there.
        yield X[8:], Y[8:]

    ended, other = threading.Event(), threading.Thread(target=lambda: ended.wait(), name="another-thread")
    other.start()
    try:
        make_trainer().fit(batches, callbacks=[Watchdog(seconds=0.2, file=file)], verbose=0)
    finally:
        ended.set()
        other.join()
    text = file.getvalue()
    assert text.startswith("Watchdog: no progress for ") and "Stacks of all threads" in text
    assert "Thread MainThread:" in text and "Thread another-thread:" in text


def test_it_names_the_step():
    file = io.StringIO()
    hang = LambdaCallback(on_train_batch_end=lambda batch, logs: hang_until(lambda: "since step 2." in file.getvalue()) if batch == 1 else None)
    make_trainer().fit(X, Y, batch_size=4, callbacks=[hang, Watchdog(seconds=0.2, file=file)], verbose=0)
    assert " s, since step 2." in file.getvalue() and "since step 4." not in file.getvalue()


def test_it_watches_before_the_first_batch_of_each_fit():
    file, trainer = io.StringIO(), make_trainer()
    watchdog = Watchdog(seconds=0.2, file=file)

    def batches():
        before = reports(file)
        hang_until(lambda: reports(file) > before)
        yield X[:8], Y[:8]

    for _ in range(2):
        file.seek(0)
        file.truncate()
        trainer.fit(batches, callbacks=[watchdog], verbose=0)
        assert " s, since the beginning of fit. Stacks" in file.getvalue() and "in hang_until" in file.getvalue()


@pytest.mark.slow
def test_it_ends_when_a_run_fails_before_it_begins():
    def batches():
        raise OSError("the disk is gone")

    before = watching()
    for data, error in ((batches, "the disk is gone"), ((X[:0], Y[:0]), "no examples|yields no batches|empty")):
        with pytest.raises((OSError, ValueError), match=error):
            make_trainer().fit(data, callbacks=[Watchdog(seconds=60)], verbose=0)
    hang_until(lambda: not watching() - before)


def test_callbacks_are_closed_once_however_a_run_ends():
    closed = []

    class Closing(Callback):
        def close(self):
            closed.append("closed")

    def batches():
        raise OSError("the disk is gone")

    def fail(batch, logs):
        raise OSError("the disk is gone")

    for data, callbacks in ((batches, []), ((X, Y), [LambdaCallback(on_train_batch_end=fail)])):
        closed.clear()
        with pytest.raises(OSError, match="the disk is gone"):
            make_trainer().fit(*(data if isinstance(data, tuple) else (data,)), callbacks=[Closing(), *callbacks], verbose=0)
        assert closed == ["closed"]


def test_by_default_it_prints_to_standard_error(capsys):
    written = []

    def hang(batch, logs):
        hang_until(lambda: written.append(capsys.readouterr().err) or "Watchdog:" in "".join(written))

    make_trainer().fit(X, Y, batch_size=16, callbacks=[LambdaCallback(on_train_batch_end=hang), Watchdog(seconds=0.1)], verbose=0)


def test_a_run_that_makes_progress_prints_nothing_and_the_thread_ends_with_it():
    file, before = io.StringIO(), watching()
    watchdog = Watchdog(seconds=60, file=file)
    trainer = make_trainer()
    for _ in range(2):
        trainer.fit(X, Y, epochs=2, validation_data=(X, Y), callbacks=[watchdog], verbose=0)
    hang_until(lambda: not watching() - before)
    assert file.getvalue() == ""


def test_validations_and_ends_of_epochs_count_as_progress():
    watchdog = Watchdog(seconds=60)
    before = watchdog._num_events
    watchdog.on_test_end({})
    watchdog.on_epoch_end(0, {})
    assert watchdog._num_events == before + 2


@pytest.mark.slow
def test_it_ends_when_a_run_fails():
    def batches():
        yield X[:8], Y[:8]
        raise OSError("the disk is gone")

    before = watching()
    with pytest.raises(OSError, match="the disk is gone"):
        make_trainer().fit(batches, callbacks=[Watchdog(seconds=60)], verbose=0)
    hang_until(lambda: not watching() - before)


@pytest.mark.parametrize("seconds", [0, -1, "10", True, float("nan")])
def test_invalid_seconds_are_an_error(seconds):
    with pytest.raises(CallbackError, match=r"Watchdog\(seconds=...\) must be a positive number"):
        Watchdog(seconds=seconds)
