"""The search for the step that spoils a run: steps are made again, one by one, and the first bad one operation by operation."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.checkpoints.by_path import is_checkpoint, load_checkpoint
from fitflax.checkpoints.saved import Saved
from fitflax.checkpoints.store import CheckpointStore
from fitflax.data import Feed
from fitflax.diagnostics.origins import Origin, find_origins
from fitflax.errors import CheckpointNotFoundError, ConfigError
from fitflax.leaves import named_leaves, path_name, through_key_data
from fitflax.loops.session import Session
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps.program import Program
from fitflax.steps.task import Keep

__all__ = ["WATCHED", "NanReport", "hunt_nan", "last_finite"]

WATCHED = Keep(norm=True, culprit=True)
"""What of a step is kept to see whether it is finite."""


@dataclasses.dataclass(frozen=True)
class NanReport:
    """The first step of a run whose loss, gradient or new parameters are not finite, and how that came.

    Attributes:
        step: The step, counted from 1.
        culprit: What was not finite first: "the loss", "the gradient of Dense_0/kernel", "the parameter Dense_0/kernel".
        origins: The operations at which it came up, in the order of cause and effect: where an infinity did, if one became NaN, then where NaN did. Empty if
            the step is finite when it is made operation by operation, because only the compiled step, which computes in another order, loses it.
        batch: The batch, as NumPy arrays `[batch, ...]`.
        state: The state before the step, on the host.

    >>> print(NanReport(7, "the loss", (Origin("NaN", "log", "Net/Dense_0", False, "net.py:12 in __call__", ("float32[8] of -1 to 3",)),), None, None))
    Step 7: the loss is not finite.
      NaN from log in Net/Dense_0 (net.py:12 in __call__), of float32[8] of -1 to 3
    """

    step: int
    culprit: str
    origins: tuple[Origin, ...]
    batch: Batch
    state: TrainState

    def __str__(self) -> str:
        unknown = ["made operation by operation it is finite, so the compiled step loses it in the order in which it computes"]
        return "\n  ".join([f"Step {self.step}: {self.culprit} is not finite.", *([str(origin) for origin in self.origins] or unknown)])


def hunt_nan(session: Session, feed: Feed, *, steps: int | None) -> NanReport | None:
    """Trains a session's state until a step is not finite, and says why; `None` if none is.

    Args:
        session: What is trained; nobody else's.
        feed: The batches.
        steps: How many steps to make at most; a pass over the data by default.

    Raises:
        ConfigError: The state is not finite before the first step.
    """
    program, live = session.need_compiled("hunt_nan"), session.need_state("hunt_nan")
    bad = _not_finite(live.borrow().params)
    if bad:
        raise ConfigError(
            f"The parameters are not finite to begin with: {', '.join(bad)}. Pass restore_from=, a checkpoint from before that or a directory of some, or "
            "train a new trainer."
        )
    made, sums = 0, program.empty_sums(train=True)
    while steps is None or made < steps:
        fed = feed.next()
        if fed is None and steps is not None and feed.source.can_restart:
            fed = feed.next()
        if fed is None:
            return None
        before = session.strategy.copy(live.borrow())
        trained = program.train(live.take(), sums, fed, keep=WATCHED)
        live.advance(trained.state)
        sums, made = trained.sums, made + 1
        if trained.values.steps_since_bad is not None:
            return _report(program, before, fed.batch, live.step, trained.values.culprit)
    return None


def _report(program: Program, state: TrainState, batch: Batch, step: int, culprit: str | None) -> NanReport:
    names: list[str] = []

    def examine(state: TrainState, batch: Batch) -> list[jax.Array]:
        suspects = program.task.suspects(state, batch)
        names[:] = [name for name, _ in suspects]
        return [array for _, array in suspects]

    on_host = jax.tree.map(through_key_data(np.asarray), (state, program.strategy.feed(batch)))
    jaxpr = jax.make_jaxpr(program.strategy.emulate(examine, inputs=("replicated", "split")))(*on_host)
    inputs = jax.tree_util.tree_leaves_with_path(on_host)
    called = [_called(path) for path, _ in inputs]
    chains = find_origins(jaxpr, [leaf for _, leaf in inputs], called)
    found = next(((name, chain) for name, chain in zip(names, chains, strict=True) if chain), None)
    host_batch = jax.tree.map(np.asarray, batch)
    if found is None:
        return NanReport(step, culprit or "the loss or its gradient", (), host_batch, on_host[0])
    return NanReport(step, culprit or found[0], tuple(found[1]), host_batch, on_host[0])


def _called(path: tuple[Any, ...]) -> str:
    """Returns what an array of the state or of the batch is called."""
    name = path_name(path[1:])
    return name if path[0].idx == 0 else f"the batch's {name}"


def _not_finite(params: PyTree) -> list[str]:
    """Returns the paths of the arrays that hold NaN or infinities."""
    return [name for name, leaf in named_leaves(params) if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.isfinite(np.asarray(leaf)).all()]


def last_finite(path: str | os.PathLike[str]) -> Saved:
    """Returns a checkpoint, or of a directory of checkpoints the newest good one whose parameters are finite.

    Raises:
        CheckpointNotFoundError: There is none.
        CorruptCheckpointError: The checkpoint is damaged.
    """
    directory = Path(path)
    if is_checkpoint(directory):
        return load_checkpoint(directory)
    store = CheckpointStore(directory)
    if not store.steps():
        return load_checkpoint(directory)  # One of another library, or an error that says what is there instead.
    saved, skipped = store.newest_good(accepts=lambda saved: not _not_finite(saved.train["params"]))
    if saved is None:
        damaged = f" Others cannot be read: {' '.join(map(str, skipped))}" if skipped else ""
        raise CheckpointNotFoundError(f"No checkpoint in {directory} has finite parameters: the run was spoilt before the first of them.{damaged}")
    return saved
