"""Makes all processes of a program restore the same checkpoint, with reading and verification divided among them.

Arrays that are split between processes are stored in pieces. Each process first reads its share of the pieces, so that all are verified and none is
read twice. If one finds damage, all fall back to an older checkpoint. When the state is placed on devices, each process reads whatever else it needs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from fitflax.checkpoints.formats.checkpoint_files import Saved
from fitflax.checkpoints.formats.split_array import Share
from fitflax.errors import CheckpointError, warn
from fitflax.parallel.processes import after_first, exchange

__all__ = ["CollectiveRead", "read_collectively"]


Found = TypeVar("Found", Saved, Saved | None)


@dataclasses.dataclass(frozen=True)
class CollectiveRead:
    """What a process knows about the others while it looks for a checkpoint: its share, and the steps that one of them found to be damaged."""

    share: Share
    damaged: set[int]


def read_collectively(find: Callable[[CollectiveRead | None], Found], *, num_processes: int) -> Found:
    """Returns what `find` finds, the same checkpoint in all processes. All of them must call it; process 0 searches before the others.

    `find` is called again, with a warning, if another process has found damage. With one process, it gets `None` and reads everything. Raises
    `CheckpointError` if it fails in one of them, or they find different checkpoints.
    """
    if num_processes == 1:
        return find(None)
    together = CollectiveRead((jax.process_index(), num_processes), set())
    while True:
        saved: Found
        saved, fault = after_first(lambda: _attempt(find, together))
        metadata: dict[str, Any] = {} if saved is None else saved.metadata
        known = {"step": metadata.get("step"), "digest": metadata.get("digest")}  # Only weights have a digest, because they have no step.
        found = exchange({**known, "damaged": sorted(together.damaged), "fault": None if fault is None else str(fault)}, "what to resume")
        if fault is not None:
            raise fault
        faults = [f"process {process}: {each['fault']}" for process, each in enumerate(found) if each["fault"] is not None]
        if faults:
            raise CheckpointError(f"Nothing was restored, because another process could not read the checkpoint: {'; '.join(faults)}")
        steps = {process: each["step"] for process, each in enumerate(found)}
        if len(set(steps.values())) == 1:
            if len({each["digest"] for each in found}) > 1:
                differing = ", ".join(str(process) for process, each in enumerate(found) if each["digest"] != found[0]["digest"])
                raise CheckpointError(
                    f"The processes found different weights: those of process {differing} differ from those of process 0. Give all processes the same files."
                )
            return saved
        newest = max(each for each in steps.values() if each is not None)
        if any(each["step"] != newest and newest not in each["damaged"] for each in found):
            raise CheckpointError(f"The processes found different checkpoints. Use one directory that all processes share. Steps by process: {steps}.")
        damaged = {each for one in found for each in one["damaged"]} - together.damaged
        if damaged:
            warn(f"Another process found that the checkpoints of these steps are damaged, so they are skipped: {sorted(damaged)}.")
        together.damaged.update(damaged)


def _attempt(find: Callable[[CollectiveRead | None], Any], together: CollectiveRead) -> tuple[Any, CheckpointError | None]:
    try:
        return find(together), None
    except CheckpointError as error:
        return None, error
