"""What is in a directory of checkpoints, for people: steps, age, size, metrics, who keeps each, and whether it is whole."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from fitflax.checkpoints.contents import read_metadata
from fitflax.checkpoints.store import CheckpointStore
from fitflax.errors import CheckpointError
from fitflax.logs import flat_name

__all__ = ["Listed", "list_checkpoints", "table"]


@dataclasses.dataclass(frozen=True)
class Listed:
    """One checkpoint of a directory.

    Attributes:
        step: Finished updates.
        path: Its directory.
        age_seconds: Since it was written.
        num_bytes: Of its files.
        metrics: By flat name.
        kept_by: Which callbacks keep it, such as `BestCheckpoint(val_loss)`.
        is_latest: Whether no step is larger.
        state: `"ok"` if all of it was verified, `"not verified"` if only what describes it was, else what is wrong.
        is_damaged: Whether something is wrong.
    """

    step: int
    path: str
    age_seconds: float
    num_bytes: int
    metrics: dict[str, Any]
    kept_by: tuple[str, ...]
    is_latest: bool
    state: str
    is_damaged: bool


def list_checkpoints(directory: Path, *, verify: bool = False) -> list[Listed]:
    """Returns the checkpoints of a directory, by step.

    Args:
        directory: Of one run.
        verify: Whether every byte of each is checked.
    """
    store = CheckpointStore(directory)
    steps, owners = store.steps(), store.owners()
    return [_listed(store, step, owners, step == steps[-1], verify) for step in steps]


def _listed(store: CheckpointStore, step: int, owners: dict[str, list[int]], is_latest: bool, verify: bool) -> Listed:
    path = store.path(step)
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
        age_seconds=max(time.time() - path.stat().st_mtime, 0.0),
        num_bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        metrics=metrics,
        kept_by=tuple(sorted(owner for owner, kept in owners.items() if step in kept)),
        is_latest=is_latest,
        state=fault or ("ok" if verify else "not verified"),
        is_damaged=fault is not None,
    )


def table(rows: list[Listed]) -> str:
    """Returns checkpoints as lines of text, their columns aligned."""
    lines = [("step", "age", "size", "metrics", "kept by", "state")]
    for row in rows:
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in row.metrics.items() if isinstance(value, int | float))
        step = f"{row.step}{' (latest)' if row.is_latest else ''}"
        lines.append((step, _age(row.age_seconds), _size(row.num_bytes), numbers, ", ".join(row.kept_by), row.state))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size(num_bytes: int) -> str:
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    return f"{num_bytes} B" if power == 0 else f"{num_bytes / 1024**power:.1f} {'KMGT'[power - 1]}B"
