"""`python -m fitflax checkpoints DIR`: what is in a directory of checkpoints, and whether it is whole."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fitflax.checkpoints.listing import list_checkpoints, table

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, or 1 if a checkpoint is damaged; wrong arguments exit with 2.

    Args:
        argv: The arguments; by default those of the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m fitflax")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("checkpoints", help="list the checkpoints of a directory")
    listing.add_argument("directory", type=Path, metavar="DIR")
    listing.add_argument("--verify", action="store_true", help="check every byte of each")
    listing.add_argument("--json", action="store_true", help="print JSON, for programs")
    options = parser.parse_args(argv)
    if not options.directory.is_dir():
        parser.error(f"{options.directory} is no directory.")
    rows = list_checkpoints(options.directory, verify=options.verify)
    if options.json:
        print(json.dumps([_plain(dataclasses.asdict(row)) for row in rows], indent=2, allow_nan=False))
    else:
        print(table(rows) if rows else f"{options.directory} holds no checkpoints.")
    return int(any(row.is_damaged for row in rows))


def _plain(value: Any) -> Any:
    """Returns `value` with what JSON has no number for as text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
