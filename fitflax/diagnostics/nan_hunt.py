"""Finds the first step that is not finite: runs steps one by one, and the first bad one operation by operation."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.checkpoints.checkpoint_files import Saved, is_checkpoint
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.checkpoints.resume import load_checkpoint
from fitflax.data import Feed
from fitflax.diagnostics.nan_origin import Origin, find_origins
from fitflax.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from fitflax.leaves import named_leaves, path_name, through_key_data
from fitflax.loops.session import Session
from fitflax.parallel.host_memory import whole
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps.outputs import Keep
from fitflax.steps.program import Program
from fitflax.storage import locate

__all__ = ["WATCHED", "NanReport", "hunt_nan", "last_finite"]

_MAX_NAMED = 5

WATCHED = Keep(norm=True, culprit=True)
"""The values of a step that show whether it is finite."""


@dataclasses.dataclass(frozen=True)
class NanReport:
    """The first step of a run whose loss, gradient or new parameters are not finite, with the cause.

    Attributes:
        step: The step, counted from 1.
        culprit: The first value that was not finite: "the loss", "the gradient of Dense_0/kernel", "the parameter Dense_0/kernel".
        origins: The operations that caused it, in order: where an infinity first appeared, if it became NaN, then where NaN first appeared. Empty if only the
            compiled step, which computes in another order, is not finite.
        batch: The batch, as NumPy arrays `[batch, ...]`.
        state: The state before the step, on the host.

    >>> print(NanReport(7, "the loss", (Origin("NaN", "log", "Net/Dense_0", False, "net.py:12 in __call__", ("float32[8] from -1 to 3",)),), None, None))
    Step 7: the loss is not finite.
      NaN from log in Net/Dense_0 (net.py:12 in __call__); operands: float32[8] from -1 to 3
    """

    step: int
    culprit: str
    origins: tuple[Origin, ...]
    batch: Batch
    state: TrainState

    def __str__(self) -> str:
        unknown = ["The step is finite when it runs operation by operation. Only the compiled step, which computes in another order, is not finite."]
        return "\n  ".join([f"Step {self.step}: {self.culprit} is not finite.", *([str(origin) for origin in self.origins] or unknown)])


def hunt_nan(session: Session, feed: Feed, *, steps: int | None) -> NanReport | None:
    """Trains a session's state, which is used only here, until a step is not finite, and returns a report; `None` if all steps are finite.

    `steps` is the maximum number of steps; by default one pass over the data.
    """
    program, live = session.task.need_compiled("hunt_nan"), session.state.need("hunt_nan")
    bad = _nonfinite_paths(live.borrow().params)
    if bad:
        more = f" and {len(bad) - _MAX_NAMED} more" if len(bad) > _MAX_NAMED else ""
        raise ConfigError(
            f"The parameters are not finite before the first step: {', '.join(bad[:_MAX_NAMED])}{more}. Pass restore_from=, an earlier checkpoint or a "
            "directory of checkpoints, or use a new trainer."
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

    on_host = jax.tree.map(through_key_data(whole), (state, program.strategy.feed(batch)))
    jaxpr = jax.make_jaxpr(program.strategy.emulate(examine, inputs=("replicated", "split")))(*on_host)
    inputs = jax.tree_util.tree_leaves_with_path(on_host)
    chains = find_origins(jaxpr, [leaf for _, leaf in inputs], [_array_name(path) for path, _ in inputs])
    name, chain = next(((name, chain) for name, chain in zip(names, chains, strict=True) if chain), ("the loss or its gradient", []))
    return NanReport(step, culprit or name, tuple(chain), jax.device_get(batch), on_host[0])


def _array_name(path: tuple[Any, ...]) -> str:
    """Returns the name of an array of the state or the batch."""
    name = path_name(path[1:])
    return name if path[0].idx == 0 else f"the batch's {name}"


def _nonfinite_paths(params: PyTree) -> list[str]:
    """Returns the paths of arrays that hold NaN or infinities."""
    return [name for name, leaf in named_leaves(params) if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.isfinite(whole(leaf)).all()]


def last_finite(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Saved:
    """Returns a checkpoint; for a directory of checkpoints, the newest intact one with finite parameters."""
    directory = locate(path, owner="restore_from", error=CheckpointError, options=storage_options)
    if is_checkpoint(directory):
        return load_checkpoint(directory)
    store = CheckpointStore(directory)
    if not store.steps():
        return load_checkpoint(directory)  # A checkpoint of another library, or an error that says what is there instead.
    saved, skipped = store.newest_good(accepts=lambda saved: not _nonfinite_paths(saved.train["params"]))
    if saved is None:
        damaged = f" Others cannot be read: {' '.join(map(str, skipped))}" if skipped else ""
        raise CheckpointNotFoundError(
            f"No checkpoint in {directory} has finite parameters. Start from the beginning instead: use a new trainer, without restore_from.{damaged}"
        )
    return saved
