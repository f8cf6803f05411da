"""`serial`: functions `checkpoint -> checkpoint` as one."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self, overload

from fitflax.callbacks.base import Callback, Phase
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.errors import ConfigError

__all__ = ["serial"]


class Serial:
    """Functions `checkpoint -> checkpoint` as one; made by `serial`."""

    def __init__(self, steps: Sequence[Callable[[Any], Any]]) -> None:
        self.parts = tuple(steps)

    @overload
    def __call__(self, checkpoint: Checkpoint) -> Checkpoint: ...

    @overload
    def __call__(self, checkpoint: Any) -> Any: ...

    def __call__(self, checkpoint: Any) -> Any:
        """Hands `checkpoint` from one function to the next and returns what the last one returns.

        As in `fit`, what callbacks have written up to here is on disk before one that follows them saves the run.
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
        with contextlib.ExitStack() as stack:  # One that fails keeps no other from it.
            for step in reversed(self.parts):
                if isinstance(step, Callback | Serial):
                    stack.callback(step.close)


def serial(*steps: Callable[[Any], Any]) -> Serial:
    """Returns functions `checkpoint -> checkpoint` as one: evaluation loops, callbacks, others; a context manager that closes writers.

    Raises:
        ConfigError: One of them cannot be called.
        CallbackError: One of them is a callback that can do nothing without a trainer.

    >>> serial(lambda c: c + 1, lambda c: c * 2)(3)
    8
    """
    for step in steps:
        if not callable(step):
            raise ConfigError(f"serial() takes functions checkpoint -> checkpoint. Received: {step!r}.")
        if isinstance(step, Callback):
            step.check_alone()
    # Flat, so that each knows all that come before it.
    return Serial([part for step in steps for part in (step.parts if isinstance(step, Serial) else (step,))])
