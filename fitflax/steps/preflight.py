"""What can be told of a module, its loss and its data before the first step."""

from typing import Any

import numpy as np

from fitflax.data import Source
from fitflax.data.arrays import ArraySource
from fitflax.data.batch import leaf_paths
from fitflax.errors import warn
from fitflax.state import Batch, TrainState
from fitflax.steps.program import Program, scalar_loss_error

__all__ = ["check_activations", "check_in_memory", "check_measures", "check_places"]

# So much of an array is looked at for numbers that are none, in less than half a second.
_LOOKED_AT_BYTES = 2**30


def check_activations(program: Program, state: TrainState, batch: Batch) -> None:
    """Warns of a module that ends with what a loss does itself; once for a program.

    Args:
        program: Knows module and loss.
        state: The state.
        batch: A batch to train on.
    """
    task = program.task
    if task.objective.takes_logits and task.compute_loss is None and task.custom_step is None and program.is_new("activations"):
        for fault in task.objective.unfit_activations(program.dry_run.usual_outputs(state, batch).activations):
            warn(f"{fault}.")


def check_places(program: Program, state: TrainState) -> None:
    """Warns of large parameters, and of batches, that each device holds whole; once for a program."""
    if program.is_new("places"):
        whole = program.strategy.describe_whole(state)
        if whole is not None:
            warn(whole)


def check_measures(program: Program, name: str) -> None:
    """Warns of an evaluation that has nothing to compute; once for a program.

    Args:
        program: Knows losses and metrics.
        name: What the evaluation is called.
    """
    if not program.dry_run.traced_step(train=False).kinds and program.is_new("measures"):
        warn(f"There is nothing to compute for {name!r}: no loss and no metrics were given, as in compile(optimizer, loss, metrics).")


def check_in_memory(program: Program, source: Source, state: TrainState, batch: Batch, *, pad: bool, train: bool) -> None:
    """Checks what can be known of in-memory data before the first step.

    Args:
        program: Knows the loss.
        source: The data.
        state: The state.
        batch: Its first batch.
        pad: Whether short batches are padded.
        train: Whether it is trained on.

    Raises:
        LossError: The loss is one number, and a batch would have to be padded.
        DataError: Labels lie outside of the module's classes.
    """
    if not isinstance(source, ArraySource) or source.batch_size is None or source.num_examples is None:
        return
    size = min(source.batch_size, source.num_examples)
    shards = program.strategy.num_batch_shards // (1 if source.shares is None else source.shares.num_parts)
    multiple = shards * (program.task.numerics.accumulate_steps if train else 1)
    short = source.num_examples % size
    if program.dry_run.traced_step(train=train).scalar_loss and pad and (short or size % multiple):
        raise scalar_loss_error(short or size, -(-size // multiple) * multiple)
    task = program.task
    for name, tree in (("x", source.x), ("y", source.y), ("sample_weight", source.weights)):
        for path, leaf in leaf_paths(tree, name):
            if program.looked_at.get(id(leaf)) is not leaf:
                program.looked_at[id(leaf)] = leaf
                _warn_of_bad_numbers(path, leaf)
    if task.objective.has_label_loss and task.compute_loss is None and task.custom_step is None:
        outputs = program.dry_run.usual_outputs(state, batch)
        task.objective.check_labels(outputs.shapes, source.y, source.weights)


def _warn_of_bad_numbers(path: str, leaf: Any) -> None:
    """Warns of examples with NaN or infinity among those at the beginning of an array; an array without takes two passes over its memory."""
    if isinstance(leaf.base, np.memmap):
        return  # Its pages are read when they are needed.
    rows = max(1, int(_LOOKED_AT_BYTES // max(leaf.nbytes / max(len(leaf), 1), 1)))
    part = leaf[:rows]
    if not np.issubdtype(part.dtype, np.floating) or not part.size or np.isfinite([part.min(), part.max()]).all():
        return
    bad = int((~np.isfinite(part.reshape(len(part), -1)).all(axis=1)).sum())
    warn(
        f"{path} holds NaN or infinity in {bad} of {len(part)} examples. If the module does not see to them, one is enough to spoil all parameters: "
        "clean them, or leave these examples out."
    )
