"""Requests to save a run and exit that do not come from a signal."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import jax

__all__ = ["listening", "preempt"]

_listeners: list[Callable[[], None]] = []


@contextlib.contextmanager
def listening(listener: Callable[[], None]) -> Iterator[None]:
    """Calls `listener` at each request inside the block, from any thread."""
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
