"""Lists the checkpoints of a directory: step, age, size, metrics, which callbacks keep each, and whether it is damaged."""

import argparse
import dataclasses
import json
from collections.abc import Sequence

from fitflax.checkpoints.store.listing import Listed, list_checkpoints
from fitflax.commands.plain import aligned, without_nan
from fitflax.errors import CheckpointNotFoundError
from fitflax.storage import locate

__all__ = ["add_arguments", "run", "table"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to its parser."""
    parser.add_argument("directory", metavar="DIR", help="a path, or a URL such as s3://bucket/run")
    parser.add_argument("--verify", action="store_true", help="check every byte of each checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the list. Returns 1 if a checkpoint is damaged, else 0."""
    directory = locate(options.directory, owner="checkpoints", error=CheckpointNotFoundError)
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"{directory} is not a directory.")
    rows = list_checkpoints(directory, verify=options.verify)
    if options.json:
        print(json.dumps([without_nan(dataclasses.asdict(row)) for row in rows], indent=2, allow_nan=False))
    else:
        print(table(rows) if rows else f"{directory} contains no checkpoints.")
    return int(any(row.is_damaged for row in rows))


def table(rows: Sequence[Listed]) -> str:
    """Returns a table of checkpoints as text."""
    lines = [("step", "age", "size", "metrics", "kept by", "state")]
    for row in rows:
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in row.metrics.items() if isinstance(value, int | float))
        step = f"{row.step}{' (latest)' if row.is_latest else ''}"
        lines.append((step, _age(row.age_seconds), _size(row.num_bytes), numbers, ", ".join(row.kept_by), row.state))
    return aligned(lines)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size(num_bytes: int) -> str:
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    return f"{num_bytes} B" if power == 0 else f"{num_bytes / 1024**power:.1f} {'KMGT'[power - 1]}B"
