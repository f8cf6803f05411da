"""Checks of a module, its loss and its data before the first step, and of the weights after the last one."""

import itertools
from typing import Any

import numpy as np

from fitflax.data import Source
from fitflax.data.arrays import ArraySource
from fitflax.data.whole_batches import leaf_paths
from fitflax.errors import warn
from fitflax.leaves import listed
from fitflax.logs import Values
from fitflax.state import Batch, TrainState
from fitflax.steps.step_dispatch import Program, scalar_loss_error

__all__ = ["check_activations", "check_in_memory", "check_measures", "check_places", "check_total_weight"]

# Checking this much of an array for NaN and infinity takes less than half a second.
_CHECKED_BYTES = 2**30


def check_activations(program: Program, state: TrainState, batch: Batch) -> None:
    """Warns once per program if the module ends with an activation that the loss applies itself."""
    task = program.task
    if (
        task.objective.takes_logits
        and task.compute_loss is None
        and task.custom_step is None
        and not program.is_eager
        and program.preparation.is_new("activations")
    ):
        for fault in dict.fromkeys(itertools.chain.from_iterable(map(task.objective.activation_faults, program.dry_run.activations(state, batch)))):
            warn(f"{fault}.")


def check_places(program: Program, state: TrainState) -> None:
    """Warns once per program about axes that the mesh lacks, and about large parameters and batches that each device holds whole."""
    if program.preparation.is_new("places"):
        missing = program.strategy.missing_axes(state)
        if missing:
            found = "; ".join(f"{axis!r} ({listed(paths)})" for axis, paths in missing.items())
            warn(
                f"nn.with_partitioning names axes that the mesh does not have, so they are not split: {found}. "
                "To split them, pass a mesh with these axes, such as Trainer(parallel=Sharded({'data': -1, 'model': 2}))."
            )
        whole = program.strategy.describe_whole(state)
        if whole is not None:
            warn(whole)


def check_measures(program: Program, name: str) -> None:
    """Warns once per program if an evaluation, called `name`, has nothing to compute."""
    if not program.dry_run.traced_step(train=False).kinds and program.preparation.is_new("measures"):
        warn(f"There is nothing to compute for {name!r}, because no loss and no metrics are compiled. Pass them: compile(optimizer, loss, metrics).")


def check_total_weight(program: Program, name: str, values: Values) -> None:
    """Warns once per program if the examples of `name` have a total weight of 0. Reads the values."""
    keys = values.undefined
    if keys and program.preparation.is_new(f"weight of {name}"):
        warn(f"The weights of all examples of {name!r} are 0, so weighted values such as {keys[0]!r} are NaN. Check sample_weight and class_weight.")


def check_in_memory(program: Program, source: Source, state: TrainState, batch: Batch, *, pad: bool, train: bool) -> None:
    """Checks in-memory data, given its first batch, before the first step, and warns about NaN and infinity."""
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
            if program.preparation.checked_arrays.get(id(leaf)) is not leaf:
                program.preparation.checked_arrays[id(leaf)] = leaf
                _warn_of_bad_numbers(path, leaf)
    if task.objective.has_label_loss and task.compute_loss is None and task.custom_step is None:
        outputs = program.dry_run.step_outputs(state, batch, train=train)
        task.objective.check_labels(outputs.shapes, source.y, source.weights)


def _warn_of_bad_numbers(path: str, leaf: Any) -> None:
    """Warns about NaN and infinity in the first rows of an array; reads it twice if there are none."""
    if isinstance(leaf.base, np.memmap):
        return  # Its pages are read only when they are needed.
    rows = max(1, int(_CHECKED_BYTES // max(leaf.nbytes / max(len(leaf), 1), 1)))
    part = leaf[:rows]
    if not np.issubdtype(part.dtype, np.floating) or not part.size or np.isfinite([part.min(), part.max()]).all():
        return
    bad = int((~np.isfinite(part.reshape(len(part), -1)).all(axis=1)).sum())
    warn(
        f"{path} has NaN or infinity in {bad} of {len(part)} examples. Unless the module handles them, a single one makes all parameters NaN. "
        "Clean or remove these examples."
    )
