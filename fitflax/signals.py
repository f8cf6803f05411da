"""Ctrl-C and SIGTERM during a run: asked for at any moment, obeyed between two steps.

A signal must not break off a step, whose buffers are half consumed. The first one is noted, the loop leaves at its next safe point and saves; the second
Ctrl-C leaves at once.
"""

import signal
import threading
import types
from typing import Any, Self

__all__ = ["Interruption"]


class Interruption:
    """Notes SIGINT and SIGTERM while it is entered; puts the earlier handlers back after.

    Attributes:
        requested: The first signal that came.
        leaves_at_once: Whether a second Ctrl-C came.

    Off the main thread, where Python takes no handlers, and for signals that C code handles, it changes nothing.

    >>> with Interruption() as interruption:
    ...     interruption.requested is None
    True
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.leaves_at_once = False
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                earlier = signal.getsignal(number)
                # None: a handler of C code, which Python cannot put back. Ignored: the user's wish.
                if earlier is not None and earlier is not signal.SIG_IGN:
                    self._earlier[number] = earlier
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)
        self._earlier = {}

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            self.leaves_at_once = True
            raise KeyboardInterrupt
        self.requested = signal.Signals(number)

    def leave(self) -> None:
        """Does what the noted signal asks, once everything is saved and the earlier handlers are back; returns if there was none.

        A handler that the program had installed is called, and decides what happens.

        Raises:
            KeyboardInterrupt: After SIGINT.
            SystemExit: With status 143 after SIGTERM.
        """
        if self.requested is None:
            return
        number, self.requested = self.requested, None
        earlier = signal.getsignal(number)
        if callable(earlier):
            earlier(number, None)  # Python's own handler of SIGINT raises KeyboardInterrupt.
        else:
            raise SystemExit(128 + number)
