"""`initialize`: connects the processes of a program, and ends each of them if another one fails."""

import atexit
import contextlib
import importlib
import json
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, NamedTuple

import jax

from fitflax.errors import ConfigError, NotReadyError, ReplicaError, chain_of, warn
from fitflax.parallel.processes import Board, Failure, failures

# All processes end within a minute after one is lost.
_HEARTBEAT_SECONDS = 30
# Words in JAX errors that are caused by the connection to another process.
_CONNECTION = re.compile(r"UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|gloo|nccl|coordination|peer", re.IGNORECASE)
# How long a failed process waits for the failures of the others.
_FAILURE_WAIT_SECONDS = 5.0
# How long process 0, which hosts the messages, continues after the others have left.
_COORDINATOR_WAIT_SECONDS = 2.0
# How often a process checks whether others have failed, and how long it may then continue, for example to save its state.
_WATCH_SECONDS = 2.0
_GRACE_SECONDS = 20.0
# Exit codes: a retry can help only if all processes that failed lost the connection to others (`EX_TEMPFAIL` of sysexits.h).
_EXIT_FAILED = 1
_EXIT_LOST_OTHERS = 75


class _Exit:
    """The state of this process's exit."""

    failure: str | None = None  # Message of the error that ended this process.
    is_own = True  # Whether the error is its own, rather than a lost connection to other processes.
    has_begun = False
    watch: threading.Thread | None = None  # The thread that watches the other processes.
    wake_up: ClassVar[queue.SimpleQueue[None]] = queue.SimpleQueue()  # Wakes that thread.
    code: int | None = None  # Exit code for leaving without waiting for the others; `None` to wait.


def note_failure(error: BaseException) -> None:
    """Records that this process cannot continue with the others, because of an error in it or in one of them."""
    if _Exit.failure is None:
        _Exit.failure, _Exit.is_own = f"{type(error).__name__}: {error}"[:500], not _is_communication_error(error)


def forget_failure() -> None:
    """Forgets an error that the program has caught. Called when all processes continue together."""
    _Exit.failure, _Exit.is_own = None, True


def _is_communication_error(error: BaseException) -> bool:
    """Returns whether an error is about the communication between processes, which makes the other processes fail as well."""
    return any(isinstance(each, ReplicaError) or (isinstance(each, jax.errors.JaxRuntimeError) and _CONNECTION.search(str(each))) for each in chain_of(error))


def _before_shutdown() -> None:
    """Posts and reads failures, before JAX waits at exit for all processes, which may be waiting for steps of this one."""
    if not jax.distributed.is_initialized():
        return
    _stop_watching()
    index, count = jax.process_index(), jax.process_count()
    if _Exit.failure is None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            Board("ended").post(str(index), b"")
        return
    try:
        failed = _collect_failures(index, count)
    except jax.errors.JaxRuntimeError:
        failed = {index: Failure(_Exit.failure, _Exit.is_own)}
    if len(failed) == count and len({failure.is_own for failure in failed.values()}) == 1 and (_Exit.is_own or _all_are_mismatches(failed)):
        return  # All processes failed in the same way.
    print(_exit_message(index, count, failed), file=sys.stderr, flush=True)
    _Exit.code = _exit_code(failed)
    if index == 0:
        _wait_for_others(count)
    else:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            Board("left").post(str(index), b"")
    # `clean_up` would wait for the others, and for steps that they never run.
    atexit.unregister(jax._src.api.clean_up)


def _all_are_mismatches(failed: Mapping[int, Failure]) -> bool:
    """Returns whether all processes failed because they differ, and not because one of them was lost."""
    return all(failure.error.startswith(ReplicaError.__name__) for failure in failed.values())


def _wait_for_others(count: int) -> None:
    """Waits for the other processes to leave, because this one hosts the messages that tell them why."""
    end = time.monotonic() + (_GRACE_SECONDS + 2 * _WATCH_SECONDS if _Exit.is_own else 0)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        while time.monotonic() < end and len(Board("left").read_all("")) < count - 1:
            time.sleep(0.1)
    time.sleep(_COORDINATOR_WAIT_SECONDS)


def _exit_code(failed: Mapping[int, Failure]) -> int:
    return _EXIT_FAILED if any(failure.is_own for failure in failed.values()) else _EXIT_LOST_OTHERS


def _stop_watching() -> None:
    """Ends the watching thread, because JAX's C++ code raises SIGABRT if the interpreter exits during one of the thread's calls."""
    _Exit.has_begun = True
    _Exit.wake_up.put(None)
    if _Exit.watch is not None:
        _Exit.watch.join(_FAILURE_WAIT_SECONDS)


def _exit_message(index: int, count: int, failed: Mapping[int, Failure]) -> str:
    culprits = {process: failure.error for process, failure in failed.items() if failure.is_own and process != index}
    missing = sorted(set(range(count)) - set(failed))
    if _Exit.is_own:
        return f"Process {index} of {count} has failed. The others exit when they notice."
    message = f"Process {index} of {count} cannot continue without the others."
    message += "".join(f" Process {process} failed: {error}." for process, error in culprits.items())
    return message + (f" Processes that are lost or do not respond: {missing}." if missing and not culprits else "")


def _collect_failures(index: int, count: int) -> dict[int, Failure]:
    """Posts the failure of this process, and returns the failures of all processes; waits for them for a short time."""
    Board("failed").post(str(index), json.dumps({"error": _Exit.failure, "is_own": _Exit.is_own}).encode())
    end = time.monotonic() + _FAILURE_WAIT_SECONDS
    while len(failed := failures()) < count and time.monotonic() < end:
        time.sleep(0.05)
    return failed


def _watch(index: int, count: int) -> None:
    """Runs in a thread: ends this process if another one has failed, because a collective that waits for that one cannot be interrupted."""
    pause = max(_WATCH_SECONDS, count / 500)
    since: float | None = None
    while True:
        with contextlib.suppress(queue.Empty):
            _Exit.wake_up.get(timeout=pause)
        if _Exit.has_begun:
            return
        try:
            failed = {process: failure for process, failure in failures().items() if process != index}
        except (jax.errors.JaxRuntimeError, RuntimeError):
            return  # The connection is lost, and JAX reports it.
        since = (since or time.monotonic()) if failed else None
        if since is not None and time.monotonic() > since + _GRACE_SECONDS and not _Exit.has_begun:
            message = "".join(f" Process {process} failed: {failure.error}." for process, failure in failed.items())
            print(f"Process {index} of {count} cannot continue without the others and exits.{message}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                Board("left").post(str(index), b"")
            os._exit(_exit_code(failed))


@atexit.register
def _exit_immediately() -> None:
    """Exits immediately, after the other exit handlers, because the C++ code that runs next would also wait."""
    if _Exit.code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_Exit.code)


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    heartbeat_timeout_seconds: int = _HEARTBEAT_SECONDS,
    **options: Any,
) -> None:
    """Connects this process to the others of the same program; does nothing in a single process. Call it before any other use of JAX.

    It calls `jax.distributed.initialize`, which detects the arguments under Slurm, Open MPI and Kubernetes and on Cloud TPUs. Kubernetes needs `jax[k8s]`
    and permission to read pods. Afterwards the default strategy of a trainer uses the devices of all processes, and a SIGTERM to any process makes all of
    them save the same step and stop. Unlike with JAX alone, a failed process does not wait for the others at exit, so they notice the failure.

    In a worker of Ray Train the arguments come from Ray, unless Ray has initialized JAX itself. Ray also handles failures: it ends all workers if one is
    lost, and restarts them.

    Args:
        coordinator_address: `"host:port"` of process 0, with a free port that all processes can reach.
        num_processes: Number of processes.
        process_id: Index of this process, from 0.
        local_device_ids: Devices of the machine that belong to this process; by default all, or one under Slurm and Open MPI on GPUs.
        heartbeat_timeout_seconds: Time in seconds without a heartbeat after which a process counts as lost, which ends all others. JAX's default is 100.
        **options: Other arguments of `jax.distributed.initialize`, such as `cluster_detection_method` or `initialization_timeout`.

    Raises:
        ConfigError: The arguments are inconsistent.
        NotReadyError: JAX's devices have been used before.

    >>> initialize()  # Alone.
    >>> jax.process_count()
    1
    """
    if jax.distributed.is_initialized():
        return
    arguments: dict[str, Any] = {"coordinator_address": coordinator_address, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in arguments.items() if value is None]
    group = find_group() if len(missing) == len(arguments) else None
    if group is not None and group.size == 1:
        return
    if group is not None:
        arguments = {"coordinator_address": group.coordinator_address(), "num_processes": group.size, "process_id": group.rank}
    try:
        jax.distributed.initialize(**arguments, local_device_ids=local_device_ids, heartbeat_timeout_seconds=heartbeat_timeout_seconds, **options)
    except (ValueError, TypeError) as error:
        if len(missing) == len(arguments) and "coordinator_address should be defined" in str(error):
            _warn_without_srun()
            return  # A single process that no launcher started.
        hint = f" Pass {', '.join(missing)}, which the environment does not define." if missing else ""
        raise ConfigError(f"parallel.initialize: {str(error).rstrip('.')}.{hint}") from error
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        if len(missing) == len(arguments) and group is None and not _is_one_of_several(options.get("cluster_detection_method")):
            _warn_without_srun()
            return
        raise NotReadyError(
            "parallel.initialize() must run before JAX's devices are used. Call it before jax.devices(), and before you create arrays and trainers."
        ) from None
    if group is None:
        _start_watching()  # In Ray Train, Ray ends and restarts the workers.


def _is_one_of_several(method: str | None) -> bool:
    """Returns whether a launcher has started several processes, by the same detection as in `jax.distributed.initialize`."""
    if os.environ.get("JAX_COORDINATOR_ADDRESS"):
        return True
    try:
        from jax._src.clusters import ClusterEnv  # Detection has no public name.

        kinds: list[Any] = ClusterEnv._cluster_types
        found = next((kind for kind in kinds if (kind.name == method if method else not kind.opt_in_only_method) and kind.is_env_present()), None)
        return found is not None and bool(found.get_process_count() > 1)
    except Exception:  # noqa: BLE001 (it may query servers; if it fails, there may be other processes, and a call before JAX is used reports the failure)
        return True


def _warn_without_srun() -> None:
    tasks = os.environ.get("SLURM_NTASKS", "")
    if tasks.isdigit() and int(tasks) > 1:
        warn(
            f"This Slurm job has {tasks} tasks, but this process was not started by srun, so it trains alone. In the batch script, start all tasks with srun: "
            "srun python train.py."
        )


def _start_watching() -> None:
    """Starts to watch for failures of other processes, and to report failures of this one."""
    atexit.register(_before_shutdown)
    _Exit.watch = threading.Thread(target=_watch, args=(jax.process_index(), jax.process_count()), name="fitflax-processes", daemon=True)
    _Exit.watch.start()
    earlier = sys.excepthook

    def note_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        note_failure(error)
        earlier(kind, error, traceback)

    sys.excepthook = note_uncaught


_listeners: list[Callable[[], None]] = []


@contextlib.contextmanager
def listening(listener: Callable[[], None]) -> Iterator[None]:
    """Calls `listener` at each call of `preempt` inside the block, which may be in any thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def preempt() -> None:
    """Makes the running `fit` save after the current step and exit, in all processes. Can be called from any thread."""
    if jax.distributed.is_initialized():
        os.kill(os.getpid(), signal.SIGTERM)  # JAX notifies the other processes, and all agree on a step.
        return
    for listener in tuple(_listeners):
        listener()


class RayGroup(NamedTuple):
    """The workers of a Ray Train run: the rank of this worker, from 0, and their number."""

    rank: int
    size: int

    def coordinator_address(self) -> str:
        """Returns `"host:port"` on the node of worker 0, the same in all workers; all of them must call it."""
        address = None
        if self.rank == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                address = f"{sys.modules['ray'].util.get_node_ip_address()}:{free.getsockname()[1]}"
        return str(importlib.import_module("ray.train.collective").broadcast_from_rank_zero(address))


def find_group() -> RayGroup | None:
    """Returns the group of workers that this process belongs to; `None` outside of Ray Train."""
    train: Any = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        context = train.get_context()
    except (RuntimeError, DeprecationWarning):  # The driver, or a trial of Ray Tune.
        return None
    return RayGroup(context.get_world_rank(), context.get_world_size())


def is_actor() -> bool:
    """Returns whether this process is an actor of Ray, which starts, monitors and ends it."""
    ray: Any = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
