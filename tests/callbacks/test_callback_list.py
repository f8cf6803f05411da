"""The order in which callbacks are called, and how failures of several are handled."""

import pytest

import fitflax
from fitflax.callbacks import Callback, EarlyStopping
from fitflax.callbacks.callback_list import CallbackList
from fitflax.errors import CallbackError


def test_serial_closes_the_other_callbacks_if_one_cannot_be_closed():
    closed = []

    class Closes(Callback):
        def __init__(self, name):
            self.name = name

        def on_checkpoint(self, checkpoint):
            pass

        def close(self):
            closed.append(self.name)
            if self.name == "first":
                raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fitflax.serial(Closes("first"), Closes("second")).close()
    assert closed == ["first", "second"]


def test_a_callback_that_needs_a_trainer_is_rejected_immediately():
    with pytest.raises(CallbackError, match=r"EarlyStopping cannot be called with a checkpoint\. Pass it to fit"):
        fitflax.serial(EarlyStopping())


def test_logs_are_uploaded_before_the_end_of_a_partial_epoch_is_written():
    order = []

    class Uploads(Callback):
        def sync(self):
            return lambda: order.append("uploaded")

        def on_closing(self, checkpoint, epoch, logs):
            order.append("closing")

    CallbackList([Uploads()]).on_closing(None, 0, {})
    assert order == ["uploaded", "closing"]
