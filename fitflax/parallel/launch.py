"""`initialize`: JAX's distributed runtime, begun in one call on whatever the processes were started by."""

from collections.abc import Sequence
from typing import Any

import jax

from fitflax.errors import ConfigError, NotReadyError

__all__ = ["initialize"]

# A lost process is noticed after this, and all others end well within a minute of it.
_HEARTBEAT_SECONDS = 30


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
    trainer's default strategy takes the devices of all processes, and a SIGTERM to any of them has all of them save the same step and stop.

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
