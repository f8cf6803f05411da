"""`Watchdog`: says where a run hangs."""

import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any, TextIO

from typing_extensions import override

from fitflax.callbacks.base import Callback
from fitflax.errors import CallbackError

__all__ = ["Watchdog"]


class Watchdog(Callback):
    """Prints the stacks of all threads when a run has made no step for some time, and again after as long, so that one can see what it waits for.

    A thread looks at the clock; the run itself is not slowed down, and nothing is stopped. The ends of validations and of epochs count as steps, too. Compiling
    does not, so give more time than the longest compilation, validation, save or wait for data that you expect.

    Args:
        seconds: How long nothing may happen.
        file: Where to; standard error by default.

    Raises:
        CallbackError: `seconds` is not positive.

    >>> Watchdog(seconds=1800).seconds
    1800.0
    """

    def __init__(self, seconds: float = 600.0, *, file: TextIO | None = None) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise CallbackError(f"Watchdog(seconds=...) must be a positive number. Received: {seconds!r}.")
        self.seconds = float(seconds)
        self._file = file
        self._signs = 0
        self._watch: object = None  # The present one; a thread whose own it is not ends.

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._watch = watch = object()
        threading.Thread(target=self._look, args=(watch,), name="fitflax-watchdog", daemon=True).start()

    @override
    def on_test_end(self, logs: Mapping[str, Any]) -> None:
        self._signs += 1

    @override
    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any]) -> None:
        self._signs += 1

    @override
    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        self.close()  # Without waiting for the thread, whose turn may be a second away.

    @override
    def close(self) -> None:
        self._watch = None

    def _look(self, watch: object) -> None:
        seen, since, reported = (self.trainer.step, self._signs), time.monotonic(), 0
        while True:
            time.sleep(min(self.seconds / 10, 1.0))
            if self._watch is not watch:
                return
            now = self.trainer.step, self._signs
            if now != seen:
                seen, since, reported = now, time.monotonic(), 0
            elif time.monotonic() - since >= self.seconds * (reported + 1):
                reported += 1
                self._report(seen[0], time.monotonic() - since)

    def _report(self, step: int, seconds: float) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"Watchdog: nothing has happened for {seconds:.0f} s, since step {step}. What all threads are at, the innermost call last:\n"]
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                lines += [f"\nThread {names.get(ident, ident)}:\n", *traceback.format_stack(frame)]
        file = self._file or sys.stderr
        file.write("".join(lines))
        file.flush()
