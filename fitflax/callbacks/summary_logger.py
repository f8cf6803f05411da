"""`SummaryLogger`: prints the values of checkpoints as lines of text."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import jax
from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase, check_trigger
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.errors import CallbackError
from fitflax.triggers import Trigger

__all__ = ["SummaryLogger"]


class SummaryLogger(Callback):
    """Writes the time of the steps since the last checkpoint, and all values by group, one value per line.

    It works in `fit` and, as a plain function, in `serial(...)`. It waits for the device at each checkpoint that it writes. Steps and seconds are counted from
    the loop's previous checkpoint, even if that was made for another callback. Arrays are left out.

    Args:
        every: When to write; by default at each checkpoint that the loop makes, which in `fit` are those at the end of each epoch and of the run.
        file: The output; standard output by default.

    Raises:
        CallbackError: `every` is not a trigger, or `file` has no method `write`.

    >>> import fitflax, io, numpy as np
    >>> from flax import linen as nn
    >>> trainer = fitflax.Trainer(nn.Dense(1))
    >>> trainer.compile("sgd", "mse")
    >>> logger = SummaryLogger(file=io.StringIO())
    >>> for checkpoint in trainer.train_loop(np.zeros((8, 2)), np.ones((8, 1)), steps=1):
    ...     _ = logger(checkpoint)
    >>> print(logger.file.getvalue())
    Step      1: Ran 1 train steps in ... seconds
    Step      1: train seconds_per_step | ...
    Step      1: train gradients_l2norm | 2.00000000
    Step      1: train   weights_l2norm | ...
    Step      1: train             loss | 1.00000000
    """

    phase = Phase.RECORD  # Called in all processes, because the norm of sharded parameters needs all of them.

    def __init__(self, *, every: Trigger | None = None, file: TextIO | None = None) -> None:
        check_trigger("SummaryLogger", every)
        if file is not None and not hasattr(file, "write"):
            raise CallbackError(f"SummaryLogger(file=...) must be a file that is open for writing text. Received: {file!r}.")
        self.every = every
        self.file = file
        self._written_step: int | None = None

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._written_step = None

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        if checkpoint.run.position.is_repeat:
            return
        self._written_step = checkpoint.step
        steps, seconds = checkpoint.n_completed_steps, checkpoint.elapsed_time
        self._write(checkpoint, [f"Ran {steps} train steps in {seconds:.2f} seconds", *_own_lines(checkpoint, steps, seconds), *_lines(checkpoint.metrics)])

    @override
    def on_closing(self, checkpoint: Checkpoint, epoch: int, logs: Mapping[str, Any]) -> None:
        # The validation of a partial epoch runs after its last step's checkpoint.
        if checkpoint.step == self._written_step:
            self._write(checkpoint, list(_lines({group: values for group, values in checkpoint.metrics.items() if group != "train"})))

    def _write(self, checkpoint: Checkpoint, lines: list[str]) -> None:
        if jax.process_index():
            return
        # Looked up late, because pytest and notebooks replace standard output.
        stream = self.file or sys.stdout
        # One write, so that the lines of a checkpoint stay together.
        stream.write("".join(f"Step {checkpoint.step:6d}: {line}\n" for line in lines))
        stream.flush()


def _own_lines(checkpoint: Checkpoint, steps: int, seconds: float) -> Iterator[str]:
    """Yields the lines of values that are not metrics. Norms are known only if this process ran the step."""
    if steps:
        yield _line("train", "seconds_per_step", seconds / steps)
    if checkpoint.run.step_values is not None:
        if checkpoint.has_gradients_norm:
            yield _line("train", "gradients_l2norm", checkpoint.gradients_norm)
        yield _line("train", "weights_l2norm", checkpoint.params_norm)


def _lines(metrics: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for group, values in metrics.items():
        for label, value in values.items():
            number = value.item() if getattr(value, "ndim", None) == 0 else value
            if isinstance(number, int | float):
                yield _line(group, label, number)


def _line(group: str, label: str, value: float) -> str:
    return f"{group:<5} {label:>16} | {value:.8f}"
