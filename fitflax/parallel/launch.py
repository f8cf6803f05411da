"""`initialize`: JAX's distributed runtime, begun in one call on whatever the processes were started by; and the end of a process that fails alone."""

import atexit
import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar

import jax

from fitflax.errors import ConfigError, NotReadyError, ReplicaError
from fitflax.parallel.board import Board
from fitflax.parallel.processes import failures

__all__ = ["initialize", "note_failure"]

# A lost process is noticed after this, and all others end well within a minute of it.
_HEARTBEAT_SECONDS = 30
# How long a process that has failed waits for the others to fail, too.
_PATIENCE_SECONDS = 5.0
# How long process 0, without which the others cannot speak, stays after them.
_LAST_SECONDS = 2.0
# How often it is looked whether others have failed, and how long after that a process may go on, such as to save what it has.
_WATCH_SECONDS = 2.0
_GRACE_SECONDS = 20.0


class _Ending:
    """What becomes of this process at its end.

    Attributes:
        failure: What failed in it, in words.
        is_own: Whether that was its own failure, and not that others could not be reached.
        has_begun: Whether it has come to its end.
        watch: The thread that looks after the others.
        told: Wakes that thread.
        leaves: Whether it leaves without waiting for the others.
    """

    failure: str | None = None
    is_own = True
    has_begun = False
    watch: threading.Thread | None = None
    told: ClassVar[queue.SimpleQueue[None]] = queue.SimpleQueue()
    leaves = False


def note_failure(error: BaseException) -> None:
    """Notes that this process cannot go on with the others: something failed in it, perhaps because one of them is gone."""
    if _Ending.failure is None:
        _Ending.failure, _Ending.is_own = f"{type(error).__name__}: {error}"[:500], not _is_of_others(error)


def _is_of_others(error: BaseException | None) -> bool:
    """Returns whether something went wrong between processes; what they then do fails as well."""
    if isinstance(error, ReplicaError) or (isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error)):
        return True
    return error is not None and _is_of_others(error.__cause__ or error.__context__)


def _part() -> None:
    """Before JAX has this process wait for all others, which may be waiting for its steps: sees whether they have failed, too."""
    if not jax.distributed.is_initialized():
        return
    _end_watch()
    index, count = jax.process_index(), jax.process_count()
    if _Ending.failure is None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            Board("ended").post(str(index), b"")
        return
    try:
        every = _told(index, count)
    except jax.errors.JaxRuntimeError:
        every = {index: {"error": _Ending.failure, "is_own": _Ending.is_own}}
    if len(every) == count and len({told["is_own"] for told in every.values()}) == 1:
        return  # The same happened to all.
    print(_last_words(index, count, every), file=sys.stderr, flush=True)
    _Ending.leaves = True
    if index == 0:
        time.sleep(_LAST_SECONDS)
    # It would wait for steps that nobody makes, and for the others themselves.
    atexit.unregister(jax._src.api.clean_up)


def _end_watch() -> None:
    """Ends the thread that looks after the others: the end of the interpreter in the middle of its question would be a SIGABRT, from JAX's C++."""
    _Ending.has_begun = True
    _Ending.told.put(None)
    if _Ending.watch is not None:
        _Ending.watch.join(_PATIENCE_SECONDS)


def _last_words(index: int, count: int, every: Mapping[int, Mapping[str, Any]]) -> str:
    culprits = {process: told["error"] for process, told in sorted(every.items()) if told["is_own"] and process != index}
    missing = sorted(set(range(count)) - set(every))
    if _Ending.is_own:
        return f"Process {index} of {count} has failed alone. The others end when they notice that it is gone."
    told = f"Process {index} of {count} cannot go on without the others."
    told += "".join(f" Process {process} failed: {error}." for process, error in culprits.items())
    return told + (f" Processes that are lost, or do not answer: {missing}." if missing and not culprits else "")


def _told(index: int, count: int) -> dict[int, dict[str, Any]]:
    """Returns, by process, what those say that have failed; waits a little for all."""
    board = Board("failed")
    board.post(str(index), json.dumps({"error": _Ending.failure, "is_own": _Ending.is_own}).encode())
    end = time.monotonic() + _PATIENCE_SECONDS
    while len(found := board.read_all("")) < count and time.monotonic() < end:
        time.sleep(0.05)
    return {int(process): json.loads(told) for process, told in found.items()}


def _watch(index: int, count: int) -> None:
    """In a thread: ends this process where another has failed and this one stands in a call of all devices, which nobody can break off."""
    pause = max(_WATCH_SECONDS, count / 500)
    since: float | None = None
    while True:
        with contextlib.suppress(queue.Empty):
            _Ending.told.get(timeout=pause)
        if _Ending.has_begun:
            return
        try:
            failed = {process: error for process, error in failures().items() if process != index}
        except (jax.errors.JaxRuntimeError, RuntimeError):
            return  # The connection is gone, which JAX sees as well.
        since = (since or time.monotonic()) if failed else None
        if since is not None and time.monotonic() > since + _GRACE_SECONDS and not _Ending.has_begun:
            told = "".join(f" Process {process} failed: {error}." for process, error in failed.items())
            print(f"Process {index} of {count} cannot go on without the others, and ends.{told}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)


@atexit.register
def _leave() -> None:
    """After the other functions that are called at exit; what C++ would do from here on is to wait as well."""
    if _Ending.leaves:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    heartbeat_timeout_seconds: int = _HEARTBEAT_SECONDS,
    **options: Any,
) -> None:
    """Joins this process to the others of the same program, before anything else is done with JAX; in a process that was started alone it does nothing.

    Around `jax.distributed.initialize`, which finds the arguments by itself under Slurm, Open MPI and Kubernetes and on Cloud TPUs. From then on a
    trainer's default strategy takes the devices of all processes, and a SIGTERM to any of them has all of them save the same step and stop. A process in which
    something fails does not wait for the others at its end, as JAX has it do, so that they notice.

    Args:
        coordinator_address: `"host:port"` of process 0, with a free port that all can reach.
        num_processes: How many there are.
        process_id: Which one this is, from 0.
        local_device_ids: Which of the machine's devices are this process's; all by default, under Slurm and Open MPI on GPUs one.
        heartbeat_timeout_seconds: After how many seconds without a sign of life a process counts as lost, which ends all others; less than JAX's own 100.
        **options: What `jax.distributed.initialize` takes besides, such as `cluster_detection_method` or `initialization_timeout`.

    Raises:
        ConfigError: Arguments that do not go together.
        NotReadyError: JAX's devices were used before.

    >>> initialize()  # Alone.
    >>> jax.process_count()
    1
    """
    if jax.distributed.is_initialized():
        return
    given: dict[str, Any] = {"coordinator_address": coordinator_address, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    try:
        jax.distributed.initialize(**given, local_device_ids=local_device_ids, heartbeat_timeout_seconds=heartbeat_timeout_seconds, **options)
    except (ValueError, TypeError) as error:
        if len(missing) == len(given) and "coordinator_address should be defined" in str(error):
            return  # Nothing that starts several processes has started this one.
        hint = f" Not given, and not found in the environment: {', '.join(missing)}." if missing else ""
        raise ConfigError(f"parallel.initialize: {str(error).rstrip('.')}.{hint}") from error
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        if len(missing) == len(given):
            return
        raise NotReadyError("parallel.initialize must come before JAX's devices are used: call it first, before jax.devices(), arrays and trainers.") from None
    atexit.register(_part)
    _Ending.watch = threading.Thread(target=_watch, args=(jax.process_index(), jax.process_count()), name="fitflax-processes", daemon=True)
    _Ending.watch.start()
    earlier = sys.excepthook

    def note_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        note_failure(error)
        earlier(kind, error, traceback)

    sys.excepthook = note_uncaught
