"""Requests to stop a run: Ctrl-C and SIGTERM, and how several processes agree on the step at which all of them stop.

A signal must not interrupt a step, whose buffers are partly donated. The first signal is recorded, and the loop stops at its next safe point and
saves; a second Ctrl-C exits immediately. With `jax.distributed`, JAX handles SIGTERM: all processes agree on a step, after which each of them saves
and exits.

All processes run the same steps, so a decision must not depend on anything that differs between them, such as a clock or a callback of one process.
They communicate as rarely as possible:

* At the end of an epoch, each process reports whether a stop was requested in it, and process 0 reports the time.
* About once a second there is a listening step. Long before any process can reach it, process 0 posts the time, whether a stop was requested in any
  process, and the next listening step.
* A process reports a requested stop immediately. If a stop was requested in all processes at the same step, for example because of a metric, they stop
  there, as a single process would; otherwise they stop at the next listening step.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
import threading
import time
import types
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
from jax.experimental import multihost_utils
from typing_extensions import override

from fitflax.data.batch import fingerprint
from fitflax.data.feed import is_dead_worker, is_from_data
from fitflax.errors import ReplicaError, warn
from fitflax.leaves import listed
from fitflax.loops.session import Session
from fitflax.parallel.launch import forget_failure, is_actor, listening, note_failure
from fitflax.parallel.processes import Board, exchange
from fitflax.state import TrainState

# Interval of the listening steps: at least this, and a second for each 500 processes, because all of them read from one coordinator.
_INTERVAL_SECONDS = 1.0
_PROCESSES_A_SECOND = 500
# How long a process in which a stop was requested waits for other processes, where it may be requested at the same step but later.
_VOTE_SECONDS = 1.5
_POLL_SECONDS = 0.02
_YES, _NO = b"yes", b"no"
# Arrays up to this size are compared when a run begins.
_SMALL_SIZE = 2**12

# Numbers of runs, the same in all processes. A run leaves a few messages of 100 bytes on its board.
_run_numbers = itertools.count()


class Interruption:
    """Context manager that records SIGINT and SIGTERM, and restores the earlier handlers afterward.

    It sets no handlers in these cases:

    * Outside the main thread, and for signals that C code handles; it warns if the run is saved.
    * For ignored signals, such as SIGINT in a script's background jobs.
    * With `jax.distributed`, because a handler would disable JAX's own. `check` queries JAX about SIGTERM; Ctrl-C raises KeyboardInterrupt, and the loop
      saves as after any exception.
    * In a Ray actor, where Ray handles signals.

    `fitflax.parallel.launch.preempt` counts as a SIGTERM everywhere. `saves` tells whether the run is saved, so that it warns about signals that will
    not save it.

    Forked processes, such as workers of a loader, inherit the handlers, which call the earlier handlers there. If a signal reaches a whole process group,
    the workers die, and reading from them fails. So `__exit__` suppresses errors of the data that `explains` attributes to the signal, and `reraise_signal`
    passes the signal on.
    """

    def __init__(self, *, saves: bool = True) -> None:
        self._saves = saves
        self.requested: signal.Signals | None = None  # SIGTERM if both were received, because only it must end the process.
        self.exits_immediately = False  # Whether a second Ctrl-C was received.
        self._earlier: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        self._has_reported = False
        self._jax_handles_sigterm = False
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
            self._jax_handles_sigterm = bool(jax.config.values["jax_enable_preemption_service"])
            advice = "Turn it on before jax.distributed.initialize()"
            return [] if self._jax_handles_sigterm else [_will_not_save("SIGTERM", "jax_enable_preemption_service is off", advice)]
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
        if error is not None and not is_explained and not getattr(error, "is_in_all_processes", False):
            note_failure(error)  # The other processes wait for steps that this one will not run.
        for number, earlier in list(self._earlier.items()):  # A copy, because the handler of a signal that arrives now may add one.
            signal.signal(number, earlier)
        self._earlier = {}
        return is_explained

    def explains(self, error: BaseException) -> bool:
        """Returns whether the signal explains an error: it came from the data, whose workers the signal may have ended. Prints it unless a worker was lost."""
        if self.requested is None or self.exits_immediately or not is_from_data(error):
            return False
        is_worker_lost = is_dead_worker(error) or isinstance(error, ConnectionError | EOFError)  # Of a pipe or socket to a worker that has ended.
        if not is_worker_lost and not self._has_reported:
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
        is_recorded = False
        while not is_recorded:
            try:
                self._request(signal.Signals(number))
                is_recorded = True
            except RuntimeError as error:
                if not is_dead_worker(error):  # Otherwise, a worker died before PyTorch's handler of SIGCHLD was replaced.
                    raise

    def _request(self, number: signal.Signals) -> None:
        if self.requested is not None and number == signal.SIGINT:
            self.exits_immediately = True
            raise KeyboardInterrupt
        if self.requested is None:
            self._silence_dead_workers()
        self.requested = number
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
        """Keeps PyTorch's handler of SIGCHLD from raising an error inside the current step when a worker dies. Reading from the worker raises it as well."""
        earlier = signal.getsignal(signal.SIGCHLD)
        if not callable(earlier):
            return

        def call_earlier(number: int, frame: types.FrameType | None) -> None:
            with contextlib.suppress(RuntimeError):
                earlier(number, frame)

        self._earlier[signal.SIGCHLD] = earlier
        signal.signal(signal.SIGCHLD, call_earlier)

    def check(self, step: int) -> None:
        """Finds out from JAX whether all processes stop after this step. It does nothing unless `jax.distributed` handles SIGTERM.

        Every process must call it once after each step: JAX chooses a step that no process has reached yet, and answers yes once, at that step.
        """
        if self._jax_handles_sigterm and self.requested is None and multihost_utils.reached_preemption_sync_point(step):
            self.requested = signal.SIGTERM

    def reraise_signal(self) -> None:
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


# -- several processes --


class Agreement:
    """Decides when a run stops, and defines its time. This base class is for a single process.

    `clock` returns seconds, and `is_stop_requested` whether a stop was requested in this process.
    """

    def __init__(self, clock: Callable[[], float], is_stop_requested: Callable[[], bool] = lambda: False) -> None:
        self._clock = clock
        self.is_stop_requested = is_stop_requested

    @property
    def seconds(self) -> float:
        """The time that triggers use, the same in all processes."""
        return self._clock()

    def stops(self, step: int) -> bool:
        """Returns whether the run stops after a step."""
        return self.is_stop_requested()

    def begin(self, step: int, first_step: int) -> None:
        """Begins after `step`. Calls of several steps end at multiples of their size, counted from `first_step`."""

    def next_step(self) -> int | None:
        """Returns the next step at which `listen` must be called; `None` if there is none."""
        return None

    def listen(self, step: int) -> None:
        """Applies the decisions that were posted for a step."""

    def synchronize(self) -> None:
        """Exchanges stop requests and the time; all processes call it at the same point."""


class DistributedAgreement(Agreement):
    """The agreement of one of several processes that run the same steps, none of which is more than `ahead` steps ahead of another.

    Only the clock of process 0 is used. `reason` returns why a stop was requested in this process; `stop` is called with the reason that all processes use.
    Decisions apply between two calls of `multiple` steps.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        is_stop_requested: Callable[[], bool],
        *,
        reason: Callable[[], str],
        stop: Callable[[str], None],
        ahead: int,
        multiple: int,
    ) -> None:
        super().__init__(clock, is_stop_requested)
        self._reason, self._stop = reason, stop
        self._lead, self._multiple = (ahead // multiple + 1) * multiple, multiple
        self._index, self._count = jax.process_index(), jax.process_count()
        self._interval = max(_INTERVAL_SECONDS, self._count / _PROCESSES_A_SECOND)
        self._board = Board(f"runs/{next(_run_numbers)}")
        self._has_begun = False
        self._is_stopping = self._was_refused = False
        self._seconds = 0.0
        # The next listening step. In process 0 also: what was posted, for which steps, and the step and time of the last listening step.
        self._next = 0
        self._record: dict[str, Any] = {}
        self._posted: list[int] = []
        self._last = (0, 0.0)
        self.synchronize()
        forget_failure()

    @property
    @override
    def seconds(self) -> float:
        return self._seconds

    @override
    def begin(self, step: int, first_step: int) -> None:
        if self._has_begun:
            self._board = Board(f"runs/{next(_run_numbers)}")
        self._has_begun, self._posted, self._was_refused, self._is_stopping = True, [], False, False
        self.synchronize()
        self._next, self._last = step + self._lead + self._multiple - (step - first_step) % self._multiple, (step, self._clock())
        if self._index == 0:
            self._post(self._next, self._next + self._lead)

    @override
    def next_step(self) -> int | None:
        return self._next

    @override
    def listen(self, step: int) -> None:
        if step < self._next:
            return
        record = json.loads(self._board.read(f"steps/{self._next}")) if self._index else self._record
        self._apply(record["seconds"], record["stop"])
        self._next = record["next"]
        if self._index == 0:
            (begin, since), now = self._last, self._clock()
            steps = int(min(self._interval * (step - begin) / max(now - since, 1e-9), 1e9)) // self._multiple * self._multiple
            self._last = step, now
            self._post(self._next, self._next + max(steps, self._lead))

    def _post(self, step: int, following: int) -> None:
        """Posts the decisions for a listening step, and which step is the next one."""
        requests = self._board.read_all("asked")
        reason = requests[min(requests)].decode() if requests else None
        self._record = {"seconds": self._clock(), "stop": reason, "next": following}
        self._board.post(f"steps/{step}", json.dumps(self._record).encode())
        self._posted.append(step)
        if len(self._posted) > 3:  # All processes are past that step.
            self._board.remove(f"steps/{self._posted.pop(0)}")

    @override
    def synchronize(self) -> None:
        gathered = exchange([self._clock(), self._reason() if self.is_stop_requested() else None], "the beginning of a run or the end of an epoch")
        self._apply(gathered[0][0], next((reason for _, reason in gathered if reason is not None), None))

    def _apply(self, seconds: float, reason: str | None) -> None:
        self._seconds = max(self._seconds, seconds)
        if reason is not None:
            self._is_stopping = True
            self._stop(reason)

    @override
    def stops(self, step: int) -> bool:
        if not self._is_stopping and not self._was_refused and self.is_stop_requested():
            if self._all_requested_stop(step):
                self._is_stopping = True
            else:
                self._was_refused = True
                self._board.post(f"asked/{self._index}", self._reason().encode())
        return self._is_stopping

    def _all_requested_stop(self, step: int) -> bool:
        """Returns whether a stop was requested in all processes after this step; the result is the same in every process that calls it."""
        self._board.post(f"votes/{step}/{self._index}", self._reason().encode())
        end, verdict = time.monotonic() + _VOTE_SECONDS, _YES
        while len(self._board.read_all(f"votes/{step}")) < self._count:
            if time.monotonic() > end:
                verdict = _NO
                break
            time.sleep(_POLL_SECONDS)
        if self._board.settle(f"verdicts/{step}", verdict) == _NO:
            return False
        reasons = self._board.read_all(f"votes/{step}")  # Of all processes, even if the last one voted after this one had stopped waiting.
        self._stop(reasons[min(reasons)].decode())
        return True


def make_agreement(session: Session, steps_per_call: int, clock: Callable[[], float]) -> Agreement:
    """Returns the agreement of a run of a session. Calls of the device have up to `steps_per_call` steps."""
    if session.strategy.num_processes == 1:
        return Agreement(clock, lambda: session.is_stopping)

    def stop(reason: str) -> None:
        session.is_stopping, session.stop_reason = True, reason  # Unlike `Session.stop`, replaces the reason of this process.

    return DistributedAgreement(
        clock,
        lambda: session.is_stopping,
        reason=lambda: session.stop_reason or "",
        stop=stop,
        ahead=(session.strategy.max_in_flight + 1) * steps_per_call,
        multiple=steps_per_call,
    )


def fingerprint_of(state: TrainState) -> str:
    """Returns a fingerprint of a state's structure, shapes and small arrays."""
    leaves = jax.tree.leaves(dataclasses.replace(state, key=()))  # type: ignore[arg-type]
    whole = [leaf.addressable_data(0) for leaf in leaves if leaf.is_fully_replicated and leaf.size <= _SMALL_SIZE]
    shapes = [(leaf.shape, leaf.dtype.name) for leaf in leaves]
    return f"{zlib.crc32(f'{len(leaves)} {shapes}'.encode()):08x} {fingerprint(whole):08x}"


def check_same_in_all_processes(what: str, here: Mapping[str, Any]) -> None:
    """Raises `ReplicaError` unless all processes, which must all call it, have equal values; `what` names them in the message."""
    every = exchange(dict(here), "the beginning of a run")
    faults = [
        f"{name} is {every[0].get(name)} in process 0 and {other.get(name)} in process {process}"
        for process, other in enumerate(every)
        for name in sorted(every[0].keys() | other.keys())
        if other.get(name) != every[0].get(name)
    ]
    if faults:
        raise ReplicaError(f"The processes have different {what}: {listed(faults, '; ')}. Use the same model, arguments and callbacks in every process.")
