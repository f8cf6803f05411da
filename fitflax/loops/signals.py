"""Ctrl-C and SIGTERM during a run: asked for at any moment, obeyed between two steps.

A signal must not break off a step, whose buffers are half consumed. The first one is noted, the loop leaves at its next safe point and saves; the second
Ctrl-C leaves at once. Where `jax.distributed` runs, SIGTERM is JAX's: it has all processes agree on one step, after which each of them saves and leaves.
"""

import contextlib
import signal
import sys
import threading
import types
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

from fitflax.errors import warn
from fitflax.parallel.launch import note_failure

__all__ = ["Interruption"]

_WILL_NOT_SAVE = "will not save this run, only its regular checkpoints will be there"


class Interruption:
    """Notes SIGINT and SIGTERM while it is entered; puts the earlier handlers back after.

    Handlers are a thing of the main thread and of one process alone. It changes nothing, and says so, off the main thread and for a signal that C code
    handles; and nothing for one that is ignored, as SIGINT is in a script's background jobs: that is somebody's wish. Where `jax.distributed` has been
    initialized it takes none either, since a handler of ours would switch JAX's own notice off. `check` asks for that one; Ctrl-C is Python's own
    KeyboardInterrupt there, and the loop saves as after any exception.

    Args:
        saves: Whether the run is saved, so that a signal that will not save it is worth a warning.

    Attributes:
        requested: The signal that came, SIGTERM if both did: it asks for the end of the process, not only of what runs in it.
        leaves_at_once: Whether a second Ctrl-C came.

    Warns:
        FitflaxWarning: A signal will not save this run.

    >>> with Interruption() as interruption:
    ...     interruption.requested is None
    True
    """

    def __init__(self, *, saves: bool = True) -> None:
        self._saves = saves
        self.requested: signal.Signals | None = None
        self.leaves_at_once = False
        self._earlier: dict[signal.Signals, Any] = {}
        self._asks_jax = False

    def __enter__(self) -> Self:
        # All warnings before all handlers: a warning that is an error must leave no handler behind.
        for message in self._look_around():
            if self._saves:
                warn(message)
        for number in self._earlier:
            signal.signal(number, self._note)
        return self

    def _look_around(self) -> list[str]:
        """Finds out which signals can be noted, and how; returns what to say of the others."""
        if jax.distributed.is_initialized():
            self._asks_jax = bool(jax.config.values["jax_enable_preemption_service"])
            why = "jax_enable_preemption_service is off. Turn it on before jax.distributed.initialize()"
            return [] if self._asks_jax else [f"SIGTERM {_WILL_NOT_SAVE}: {why}."]
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            why = f"it is in thread {thread.name!r}, and Python gives signals to the main thread alone"
            advice = "Call fit there, or have the main thread call trainer.stop(reason), which saves"
            return [f"Ctrl-C and SIGTERM {_WILL_NOT_SAVE}: {why}. {advice}."]
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        # Ignored: somebody's wish. None: a handler of C code, which Python could not put back.
        self._earlier = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
        why = "code that is not Python's handles it. Have that code save, or save often"
        return [f"{number.name} {_WILL_NOT_SAVE}: {why}." for number, handler in handlers.items() if handler is None]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None) -> None:
        if error is not None:
            note_failure(error)  # The others wait for steps that this process will not make.
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)
        self._earlier = {}

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            self.leaves_at_once = True
            raise KeyboardInterrupt
        self.requested = signal.Signals(number)
        if number == signal.SIGINT:
            # A step may take long, and whoever sees nothing presses again. A handler may come in the middle of another write, which is an error.
            with contextlib.suppress(Exception):
                print("\nFinishing the step and saving; Ctrl-C again leaves at once.", file=sys.stderr, flush=True)

    def check(self, step: int) -> None:
        """Asks JAX, where it runs in many processes, whether all of them are to stop after this step. Costs nothing elsewhere.

        To be called once after each step, by every process: they agree on a step that none of them has reached yet, and only there is the answer yes, once.

        Args:
            step: Finished updates, the same in all processes.
        """
        if self._asks_jax and self.requested is None and multihost_utils.reached_preemption_sync_point(step):
            self.requested = signal.SIGTERM

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
