"""`LambdaCallback`: turns functions into a callback."""

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from fitflax.callbacks.base import HOOKS, Callback, check_trigger
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.errors import CallbackError, did_you_mean
from fitflax.triggers import Trigger

__all__ = ["LambdaCallback"]


class LambdaCallback(Callback):
    """Calls functions in hooks, or a function with checkpoints.

    Args:
        fn: A function of a `Checkpoint`, called when `every` fires.
        every: A trigger for `fn`; by default each checkpoint that the loop makes.
        **hooks: Functions by the name of the hook. They take the hook's arguments.

    Raises:
        CallbackError: A hook is unknown, a value is not callable, or `every` is passed without `fn`.

    >>> seen = []
    >>> LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"])).on_epoch_end(0, {"loss": 0.5})
    >>> seen
    [0.5]
    """

    def __init__(self, fn: Callable[[Checkpoint], Any] | None = None, *, every: Trigger | None = None, **hooks: Callable[..., Any]) -> None:
        unknown = [name for name in hooks if name not in HOOKS]
        if unknown:
            raise CallbackError(f"There is no hook {unknown[0]!r}.{did_you_mean(unknown[0], HOOKS)} The hooks are {', '.join(HOOKS)}.")
        if fn is not None and "on_checkpoint" in hooks:
            raise CallbackError("LambdaCallback received fn and on_checkpoint=, which are the same hook. Pass only one of them.")
        if fn is not None:
            hooks["on_checkpoint"] = fn
        check_trigger("LambdaCallback", every)
        if every is not None and "on_checkpoint" not in hooks:
            raise CallbackError("LambdaCallback(every=...) sets when fn is called, but fn is missing. Pass fn, or leave out every.")
        for name, function in hooks.items():
            if not callable(function):
                raise CallbackError(f"LambdaCallback({name}=...) must be a function. Received: {function!r}.")
            # Set on the instance, where `overrides` finds it.
            setattr(self, name, function)
        self._functions = tuple(hooks.values())
        self.every = every

    @property
    @override
    def state_key(self) -> str:
        return f"{type(self).__name__}({', '.join(getattr(function, '__name__', '?') for function in self._functions)})"
