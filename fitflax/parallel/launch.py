"""`initialize`: JAX's distributed runtime, begun in one call on whatever the processes were started by; and the end of a process that fails alone."""

import atexit
import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax

from fitflax.errors import ConfigError, NotReadyError
from fitflax.parallel.board import Board

__all__ = ["initialize", "note_failure"]

# A lost process is noticed after this, and all others end well within a minute of it.
_HEARTBEAT_SECONDS = 30
# How long a process that has failed waits for the others to fail, too.
_PATIENCE_SECONDS = 5.0


class _Ending:
    """What becomes of this process at its end: whether something failed in it, and whether it leaves without waiting for the others."""

    has_failed = False
    is_alone = False


def note_failure() -> None:
    """Notes that this process cannot go on with the others: something failed in it, perhaps in it alone."""
    _Ending.has_failed = True


def _part() -> None:
    """Before JAX has this process wait for all others, which may be waiting for its steps: sees whether they have failed, too."""
    if not _Ending.has_failed or not jax.distributed.is_initialized():
        return
    board, index, count = Board("failed"), jax.process_index(), jax.process_count()
    board.post(str(index), b"")
    end = time.monotonic() + _PATIENCE_SECONDS
    while len(board.read_all("")) < count:
        if time.monotonic() > end:
            _Ending.is_alone = True
            print(f"Process {index} of {count} has failed alone. The others end when they notice that it is gone.", file=sys.stderr, flush=True)
            # It would wait for steps that others cannot make, and for the others themselves.
            atexit.unregister(jax._src.api.clean_up)
            return
        time.sleep(0.05)


@atexit.register
def _leave() -> None:
    """After the other functions that are called at exit; what C++ would do from here on is to wait as well."""
    if _Ending.is_alone:
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
        raise NotReadyError("parallel.initialize must come before JAX's devices are used: call it first, before jax.devices(), arrays and trainers.") from error
    atexit.register(_part)
    earlier = sys.excepthook

    def note_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        note_failure()
        earlier(kind, error, traceback)

    sys.excepthook = note_uncaught
