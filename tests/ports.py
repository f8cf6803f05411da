"""Ports of the loopback interface for processes that tests start."""

import contextlib
import random
import socket

_reserved: list[socket.socket] = []


def reserve_port(wanted: int = 0) -> int:
    """Returns a port of 127.0.0.1 that the system gives to no other process while this one runs.

    The socket stays bound, so that nothing else takes the port before, or between, the processes that use it. It does not listen. A server may bind the same
    port if it sets SO_REUSEPORT, as gRPC does, and with it the coordinator of `jax.distributed`.

    Args:
        wanted: The port; 0 for any.

    Raises:
        OSError: If `wanted` is in use.
    """
    with socket.socket() as probe:  # Without SO_REUSEPORT, with which a reserved port could be bound again.
        probe.bind(("127.0.0.1", wanted))
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("127.0.0.1", wanted))
    _reserved.append(holder)
    return int(holder.getsockname()[1])


def reserve_slurm_job() -> int:
    """Returns a number for a Slurm job, and reserves the port that JAX derives from it."""
    first = 65536 - 2**12
    for port in random.sample(range(first, 65536), 2**12):
        with contextlib.suppress(OSError):
            return reserve_port(port) - first
    raise OSError(f"All ports from {first} to 65535 are in use.")
