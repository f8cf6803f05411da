"""Lists a directory of checkpoints for people: steps, age, size, metrics, owners, and whether each is intact."""

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

from fitflax.checkpoints.formats.checkpoint_files import read_metadata
from fitflax.checkpoints.store.checkpoint_store import CheckpointStore
from fitflax.errors import CheckpointError
from fitflax.logs import flat_name

__all__ = ["Listed", "list_checkpoints"]


@dataclasses.dataclass(frozen=True)
class Listed:
    """One checkpoint of a directory."""

    step: int
    path: str
    age_seconds: float
    num_bytes: int
    metrics: dict[str, Any]  # By flat name.
    kept_by: tuple[str, ...]  # The callbacks that keep it, such as `BestCheckpoint(val_loss)`.
    is_latest: bool
    state: str  # "ok" if everything was verified, "not verified" if only its metadata was, else the error.
    is_damaged: bool


def list_checkpoints(directory: str | os.PathLike[str], *, verify: bool = False, storage_options: Mapping[str, Any] | None = None) -> list[Listed]:
    """Returns the checkpoints of a run's directory, by step; with `verify`, every byte is checked. `storage_options` are those of `CheckpointStore`."""
    store = CheckpointStore(directory, storage_options=storage_options)
    steps, owners = store.steps(), store.owners()
    return [_listed(store, step, owners, step == steps[-1], verify) for step in steps]


def _listed(store: CheckpointStore, step: int, owners: dict[str, list[int]], is_latest: bool, verify: bool) -> Listed:
    path, (num_bytes, written) = store.path(step), store.size_and_time(step)
    metrics: dict[str, Any] = {}
    fault = None
    try:
        groups = read_metadata(path).get("metrics", {})
        metrics = {flat_name(group, key): value for group, values in groups.items() for key, value in values.items()}
        if verify:
            store.verify(step)
    except CheckpointError as error:
        fault = str(error)
    return Listed(
        step=step,
        path=str(path),
        age_seconds=max(time.time() - written, 0.0),
        num_bytes=num_bytes,
        metrics=metrics,
        kept_by=tuple(sorted(owner for owner, kept in owners.items() if step in kept)),
        is_latest=is_latest,
        state=fault or ("ok" if verify else "not verified"),
        is_damaged=fault is not None,
    )
