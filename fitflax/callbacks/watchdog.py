"""`Watchdog`: shows where a run hangs."""

import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any, TextIO

from typing_extensions import override

from fitflax.callbacks.base import Callback
from fitflax.checkpoints.writer.saver import Saver
from fitflax.errors import CallbackError

__all__ = ["Watchdog"]


class Watchdog(Callback):
    """Prints the stacks of all threads when a run has not finished a step for some time, and repeats that while it hangs.

    A thread checks the time from the beginning of `fit`, so that it also shows where the wait for the first batch hangs. It does not slow down or stop the
    run. The end of a validation or epoch counts as a step. Compilation does not, so allow more time than the longest compilation, validation, save or wait
    for data that you expect.

    Args:
        seconds: The time without a step after which stacks are printed.
        file: The output; standard error by default.

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
        self._num_events = 0
        self._has_begun = False  # Whether `trainer` is that of this run.
        self._token: object = None  # The token of the current thread; threads with another one end.

    @override
    def enter_run(self, saver: Saver) -> None:
        self._has_begun = False
        self._token = token = object()
        threading.Thread(target=self._watch_steps, args=(token,), name="fitflax-watchdog", daemon=True).start()

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._has_begun = True

    @override
    def on_test_end(self, logs: Mapping[str, Any]) -> None:
        self._num_events += 1

    @override
    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any]) -> None:
        self._num_events += 1

    @override
    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        self.close()  # Does not wait for the thread, which may sleep for another second.

    @override
    def close(self) -> None:
        self._token = None

    def _watch_steps(self, token: object) -> None:
        seen, since, reported = self._progress(), time.monotonic(), 0
        while True:
            time.sleep(min(self.seconds / 10, 1.0))
            if self._token is not token:
                return
            now = self._progress()
            if now != seen:
                seen, since, reported = now, time.monotonic(), 0
            elif time.monotonic() - since >= self.seconds * (reported + 1):
                reported += 1
                self._report(seen[0], time.monotonic() - since)

    def _progress(self) -> tuple[int | None, int]:
        """Returns the step, `None` before the first one, and the number of other events."""
        return self.trainer.step if self._has_begun else None, self._num_events

    def _report(self, step: int | None, seconds: float) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        place = "the beginning of fit" if step is None else f"step {step}"
        lines = [f"Watchdog: no progress for {seconds:.0f} s, since {place}. Stacks of all threads, most recent call last:\n"]
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                lines += [f"\nThread {names.get(ident, ident)}:\n", *traceback.format_stack(frame)]
        file = self._file or sys.stderr
        file.write("".join(lines))
        file.flush()
