"""The row of an epoch that was closed in its middle, kept beside the checkpoint that knows nothing of it.

A run that ends inside an epoch saves its last step first, and closes the epoch (validation, `on_epoch_end`) only after. A resume that has nothing left to
do returns this row; one that goes on ignores it and has one row for the whole epoch.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fitflax.checkpoints.msgpack_format import fsync_directory
from fitflax.errors import CheckpointError

__all__ = ["load_closing_row", "save_closing_row"]

_NAME = "closing.json"


def save_closing_row(directory: Path, row: Mapping[str, Any]) -> None:
    """Writes the row beside a checkpoint.

    Args:
        directory: The checkpoint's directory.
        row: `{"epoch": index, "logs": {key: number}}`.

    Raises:
        CheckpointError: The disk fails.
    """
    # Floats as hexadecimal text: exact, and NaN is no JSON.
    logs = {key: float(value).hex() for key, value in row["logs"].items() if isinstance(value, int | float)}
    body = json.dumps({"epoch": row["epoch"], "logs": logs})
    temporary = directory / f".{_NAME}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(json.dumps({"row": body, "crc32": zlib.crc32(body.encode())}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, directory / _NAME)
        fsync_directory(directory)
    except OSError as error:
        raise CheckpointError(f"{directory / _NAME} cannot be written: {error}") from error


def load_closing_row(directory: Path) -> dict[str, Any] | None:
    """Returns the row beside a checkpoint, or `None` where there is none or it is damaged: the epoch is closed once more then."""
    try:
        document = json.loads((directory / _NAME).read_text(encoding="utf-8"))
        if zlib.crc32(document["row"].encode()) != document["crc32"]:
            return None
        row = json.loads(document["row"])
        return {"epoch": int(row["epoch"]), "logs": {key: float.fromhex(value) for key, value in row["logs"].items()}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
