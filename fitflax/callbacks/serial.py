"""`serial`: composes functions `checkpoint -> checkpoint`."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self, overload

from fitflax.callbacks.base import Callback, Phase
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.errors import ConfigError

__all__ = ["serial"]


class Serial:
    """A composition of functions `checkpoint -> checkpoint`, as `serial` returns it."""

    def __init__(self, steps: Sequence[Callable[[Any], Any]]) -> None:
        self.parts = tuple(steps)

    @overload
    def __call__(self, checkpoint: Checkpoint) -> Checkpoint: ...

    @overload
    def __call__(self, checkpoint: Any) -> Any: ...

    def __call__(self, checkpoint: Any) -> Any:
        """Passes `checkpoint` through all functions and returns the result of the last one.

        As in `fit`, earlier callbacks are synced to disk before a later one saves the run.
        """
        if not isinstance(checkpoint, Checkpoint):
            for step in self.parts:
                checkpoint = step(checkpoint)
            return checkpoint
        run = checkpoint.run
        earlier = list(run.before_saving)
        for step in self.parts:
            run.before_saving, saves = list(earlier), run.num_saves
            checkpoint = step(checkpoint)
            if isinstance(step, Callback):
                earlier.append(step.sync)
                if step.phase == Phase.SAVE and run.num_saves > saves:
                    self._run_was_saved()
        return checkpoint

    def _run_was_saved(self) -> None:
        for step in self.parts:
            if isinstance(step, Callback):
                step.run_was_saved()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for saves and closes writers."""
        with contextlib.ExitStack() as stack:  # Close all, even if one fails.
            for step in reversed(self.parts):
                if isinstance(step, Callback | Serial):
                    stack.callback(step.close)


def serial(*steps: Callable[[Any], Any]) -> Serial:
    """Composes functions `checkpoint -> checkpoint`, such as evaluation loops and callbacks. The result is a context manager that closes writers.

    Args:
        *steps: The functions, in calling order. Each takes the result of the previous one.

    Raises:
        ConfigError: One of them is not callable.
        CallbackError: One of them is a callback that needs a trainer.

    >>> serial(lambda c: c + 1, lambda c: c * 2)(3)
    8
    """
    for step in steps:
        if not callable(step):
            raise ConfigError(f"serial() takes functions from a checkpoint to a checkpoint. Received: {step!r}.")
        if isinstance(step, Callback):
            step.check_alone()
    # Flattened, so that a callback that saves is preceded by all earlier ones in one list.
    return Serial([part for step in steps for part in (step.parts if isinstance(step, Serial) else (step,))])
