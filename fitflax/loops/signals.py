"""Ctrl-C and SIGTERM during a run: recorded at any time, handled between two steps.

A signal must not interrupt a step, whose buffers are partly donated. The first signal is recorded, and the loop stops at its next safe point and
saves; a second Ctrl-C exits immediately. With `jax.distributed`, JAX handles SIGTERM: all processes agree on a step, after which each of them saves
and exits.
"""

import contextlib
import os
import signal
import sys
import threading
import types
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

from fitflax.data.failures import is_dead_worker, is_from_data
from fitflax.errors import warn
from fitflax.parallel.launch import note_failure
from fitflax.parallel.preemption import listening
from fitflax.parallel.ray_worker import is_actor

__all__ = ["Interruption"]


class Interruption:
    """Context manager that records SIGINT and SIGTERM, and restores the earlier handlers afterward.

    It sets no handlers in these cases:

    * Outside the main thread, and for signals that C code handles; it warns.
    * For ignored signals, such as SIGINT in a script's background jobs.
    * With `jax.distributed`, because a handler would disable JAX's own. `check` asks JAX about SIGTERM; Ctrl-C raises KeyboardInterrupt, and the loop
      saves as after any exception.
    * In a Ray actor, where Ray handles signals.

    `fitflax.parallel.preemption.preempt` counts as a SIGTERM everywhere. `saves` tells whether the run is saved, so that it warns about signals that will
    not save it.

    Forked processes, such as workers of a loader, inherit the handlers. There the earlier handlers act. If a signal reaches a whole process group, the workers
    die, and reading from them fails. So `__exit__` suppresses errors of the data that `explains` attributes to the signal, and `leave` passes the signal on.
    """

    def __init__(self, *, saves: bool = True) -> None:
        self._saves = saves
        self.requested: signal.Signals | None = None  # SIGTERM if both were received, because it ends the process and not only what runs in it.
        self.leaves_at_once = False  # Whether a second Ctrl-C was received.
        self._earlier: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        self._has_reported = False
        self._asks_jax = False
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        # Warn before setting handlers: a warning that is raised as an error must not leave a handler behind.
        for message in self._find_handlers():
            if self._saves:
                warn(message)
        for number in self._earlier:
            signal.signal(number, self._handle)
        self._exit.enter_context(listening(self._preempt))
        return self

    def _find_handlers(self) -> list[str]:
        """Finds out which signals can be recorded, and how; returns warnings about the others."""
        if jax.distributed.is_initialized():
            self._asks_jax = bool(jax.config.values["jax_enable_preemption_service"])
            advice = "Turn it on before jax.distributed.initialize()"
            return [] if self._asks_jax else [_will_not_save("SIGTERM", "jax_enable_preemption_service is off", advice)]
        if is_actor():
            return []
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            why = f"fit runs in thread {thread.name!r}, but Python delivers signals only to the main thread"
            advice = "Call fit in the main thread, or call trainer.stop(reason) from there, which saves"
            return [_will_not_save("Ctrl-C and SIGTERM", why, advice)]
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        # SIG_IGN was set on purpose. None is a handler of C code, which Python cannot restore.
        self._earlier = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
        why, advice = "code that is not Python handles it", "Save from that code, or save checkpoints more often"
        return [_will_not_save(number.name, why, advice) for number, handler in handlers.items() if handler is None]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None) -> bool:
        self._exit.close()
        is_explained = error is not None and self.explains(error)
        if error is not None and not is_explained:
            note_failure(error)  # The other processes wait for steps that this one will not run.
        for number, earlier in list(self._earlier.items()):  # A signal may come in between, whose handler adds one.
            signal.signal(number, earlier)
        self._earlier = {}
        return is_explained

    def explains(self, error: BaseException) -> bool:
        """Returns whether an error is a consequence of the signal: it came from the data, whose workers the signal may have ended. Prints other causes."""
        if self.requested is None or self.leaves_at_once or not is_from_data(error):
            return False
        if not is_dead_worker(error) and not self._has_reported:
            self._has_reported = True
            with contextlib.suppress(Exception):
                print(f"After {self.requested.name}, reading the data failed: {error!r}", file=sys.stderr, flush=True)
        return True

    def _preempt(self) -> None:
        if self.requested is None:
            self.requested = signal.SIGTERM

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if os.getpid() != self._process:
            self._handle_in_fork(signal.Signals(number), frame)
            return
        if self.requested is not None and number == signal.SIGINT:
            self.leaves_at_once = True
            raise KeyboardInterrupt
        if self.requested is None:
            self._silence_dead_workers()
        self.requested = signal.Signals(number)
        if number == signal.SIGINT:
            # A step may take long, and a user who sees nothing presses Ctrl-C again. Printing raises if the signal came during another write.
            with contextlib.suppress(Exception):
                print("\nFinishing the step and saving. Press Ctrl-C again to exit immediately.", file=sys.stderr, flush=True)

    def _handle_in_fork(self, number: signal.Signals, frame: types.FrameType | None) -> None:
        earlier = self._earlier[number]
        if callable(earlier):
            earlier(number, frame)
        else:  # The default action ends the process.
            signal.signal(number, earlier)
            signal.raise_signal(number)

    def _silence_dead_workers(self) -> None:
        """Keeps PyTorch's handler of SIGCHLD from raising the death of a worker inside the current step. Reading from the worker raises it as well."""
        earlier = signal.getsignal(signal.SIGCHLD)
        if not callable(earlier):
            return

        def call_earlier(number: int, frame: types.FrameType | None) -> None:
            with contextlib.suppress(RuntimeError):
                earlier(number, frame)

        self._earlier[signal.SIGCHLD] = earlier
        signal.signal(signal.SIGCHLD, call_earlier)

    def check(self, step: int) -> None:
        """Asks JAX whether all processes stop after this step. It does nothing unless `jax.distributed` handles SIGTERM.

        Every process must call it once after each step: JAX chooses a step that no process has reached yet, and answers yes once, at that step.
        """
        if self._asks_jax and self.requested is None and multihost_utils.reached_preemption_sync_point(step):
            self.requested = signal.SIGTERM

    def leave(self) -> None:
        """Passes on the recorded signal, once everything is saved and the earlier handlers are restored.

        If the program had installed a handler, it is called.
        """
        if self.requested is None:
            return
        number, self.requested = self.requested, None
        earlier = None if is_actor() else signal.getsignal(number)
        if callable(earlier):
            earlier(number, None)  # Python's own handler of SIGINT raises KeyboardInterrupt.
        else:
            raise SystemExit(128 + number)


def _will_not_save(signals: str, why: str, advice: str) -> str:
    return f"{signals} will not save this run, because {why}; only its regular checkpoints will be available. {advice}."
