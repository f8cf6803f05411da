"""Eager execution of compiled functions, for debugging.

JAX runs Python code eagerly inside `jax.disable_jit()`, and with `jax_debug_nans` or `jax_debug_infs` to find the operation behind a non-finite result.
A `shard_map` or `pmap` would then compile every operation separately, which takes minutes, so both are replaced by plain operations on one device.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fitflax.errors import ConfigError
from fitflax.state import PyTree

__all__ = ["Debuggable", "copy_aliased", "eager_step_error", "explicitly", "guards_transfers", "jit_is_disabled", "names_unbound_axis", "traced_or_eager"]

# Attribute of an error in a backward pass: the line of the forward pass that caused it, which `jax.jit` removes from the error.
_ORIGIN = "_fitflax_origin"
_CONFIG: Any = jax.config  # Type checkers do not know its attributes.


def jit_is_disabled() -> bool:
    """Returns whether jit is disabled, as inside `jax.disable_jit()`."""
    return bool(_CONFIG.jax_disable_jit)


def traced_or_eager(traced: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `traced` while JAX traces it, and `eager` if JAX calls it with arrays.

    >>> step = traced_or_eager(lambda x: x + 1, lambda x: x + 2)
    >>> float(jax.jit(step)(1.0)), float(step(1.0))
    (2.0, 3.0)
    """

    @functools.wraps(traced)
    def either(*arguments: Any) -> Any:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
            return traced(*arguments)
        try:
            return eager(*arguments)
        except FloatingPointError as error:
            vars(error)[_ORIGIN] = error.__cause__
            raise

    return either


class Debuggable:
    """A compiled function that is replaced by another one while JAX is set to debug.

    The replacement, a jitted `traced_or_eager` function, must not donate its arguments: JAX calls it a second time, eagerly, if a result is not finite.
    """

    def __init__(self, compiled: Any, debugged: Any) -> None:
        self._compiled = compiled
        self._debugged = debugged

    def __call__(self, *arguments: Any) -> Any:
        """Runs the function."""
        if not _is_debugging():
            return self._compiled(*arguments)
        try:
            with _checking_results():
                return self._debugged(*arguments)
        except FloatingPointError as error:
            origin = vars(error).get(_ORIGIN)
            if origin is None:
                raise
            raise error from origin

    def lower(self, *arguments: Any) -> Any:
        """Traces the function for arrays or shapes; see `Compiled.lower`."""
        return (self._debugged if _is_debugging() else self._compiled).lower(*arguments)


def _is_debugging() -> bool:
    return bool(_CONFIG.jax_disable_jit or _CONFIG.jax_debug_nans or _CONFIG.jax_debug_infs)


@contextlib.contextmanager
def _checking_results() -> Iterator[None]:
    """Makes JAX check for NaN and infinities inside the block, if it is set to.

    In JAX 0.10, operations such as `jnp.var` disable these checks for the rest of the thread.
    """
    with contextlib.ExitStack() as stack:
        if _CONFIG.jax_debug_nans:
            stack.enter_context(jax.debug_nans(True))
        if _CONFIG.jax_debug_infs:
            stack.enter_context(jax.debug_infs(True))
        yield


def copy_aliased(results: PyTree, arguments: PyTree) -> PyTree:
    """Returns results with copies of those that are arguments, because a compiled step may donate them later."""
    given = {id(leaf) for leaf in jax.tree.leaves(arguments)}
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in given else leaf, results)


def names_unbound_axis(error: BaseException, name: str) -> bool:
    """Returns whether an error, or one of its causes, says that the axis `name` is not bound."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if "unbound axis name" in text and name in text:
            return True
        cause = cause.__cause__
    return False


def guards_transfers() -> bool:
    """Returns whether `jax_transfer_guard` checks transfers to the devices, so that transfers of ours must be explicit."""
    return _CONFIG.jax_transfer_guard_host_to_device not in (None, "allow")


@contextlib.contextmanager
def explicitly() -> Iterator[None]:
    """Allows implicit transfers inside the block, such as the small constants of JAX's own functions, whatever `jax_transfer_guard` says."""
    with jax.transfer_guard_host_to_device("allow"):
        yield


def eager_step_error() -> Exception:
    """Returns the error for a step of several processes that cannot run without jit."""
    if jit_is_disabled():
        return ConfigError(
            "Steps of several processes must be compiled, but jit is disabled by jax.disable_jit() or JAX_DISABLE_JIT. Debug the program in one process."
        )
    return FloatingPointError(
        "A step of several processes returned a NaN or an infinity (jax_debug_nans, jax_debug_infs). Run the program in one process to find the operation."
    )
