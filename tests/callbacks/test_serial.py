import pytest

import fitflax
from fitflax.callbacks import Callback, EarlyStopping
from fitflax.errors import CallbackError


def test_a_callback_that_cannot_be_closed_does_not_keep_serial_from_closing_the_others():
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


def test_a_callback_that_needs_a_trainer_is_refused_at_once():
    with pytest.raises(CallbackError, match="EarlyStopping works in fit"):
        fitflax.serial(EarlyStopping())
