"""`LambdaCallback`: functions as a callback."""

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from fitflax.callbacks.base import HOOKS, Callback, check_trigger
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.errors import CallbackError, did_you_mean
from fitflax.triggers import Trigger

__all__ = ["LambdaCallback"]


class LambdaCallback(Callback):
    """Calls functions at hooks, or one function with checkpoints.

    Args:
        fn: Called with a `Checkpoint` when `every` is due.
        every: When `fn` is called; by default with each checkpoint that the loop makes.
        **hooks: Functions by the name of the hook, with its arguments.

    Raises:
        CallbackError: An unknown hook, something that cannot be called, or `every` without `fn`.

    >>> seen = []
    >>> LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"])).on_epoch_end(0, {"loss": 0.5})
    >>> seen
    [0.5]
    """

    def __init__(self, fn: Callable[[Checkpoint], Any] | None = None, *, every: Trigger | None = None, **hooks: Callable[..., Any]) -> None:
        unknown = [name for name in hooks if name not in HOOKS]
        if unknown:
            raise CallbackError(f"There is no hook {unknown[0]!r}. The hooks are {', '.join(HOOKS)}.{did_you_mean(unknown[0], HOOKS)}")
        if fn is not None and "on_checkpoint" in hooks:
            raise CallbackError("LambdaCallback takes either fn or on_checkpoint=, which are the same.")
        if fn is not None:
            hooks["on_checkpoint"] = fn
        check_trigger("LambdaCallback", every)
        if every is not None and "on_checkpoint" not in hooks:
            raise CallbackError("LambdaCallback(every=...) says when fn is called, but there is no fn.")
        for name, function in hooks.items():
            if not callable(function):
                raise CallbackError(f"LambdaCallback({name}=...) must be a function. Received: {function!r}.")
            # Set on the instance: that is how the list of callbacks sees which hooks there are.
            setattr(self, name, function)
        self._functions = tuple(hooks.values())
        self.every = every

    @property
    @override
    def state_key(self) -> str:
        return f"{type(self).__name__}({', '.join(getattr(function, '__name__', '?') for function in self._functions)})"
