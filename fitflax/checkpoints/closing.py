"""The row of an epoch that was closed in its middle, kept beside the checkpoint that knows nothing of it.

A run that ends inside an epoch saves its last step first, and closes the epoch (validation, `on_epoch_end`) only after. A resume that has nothing left to
do returns this row; one that goes on ignores it and has one row for the whole epoch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fitflax.checkpoints.documents import read_document, replace_document
from fitflax.errors import CheckpointError

__all__ = ["load_closing_row", "save_closing_row"]

CLOSING_FILE = "closing.json"


def save_closing_row(directory: Path, row: Mapping[str, Any]) -> None:
    """Writes the row beside a checkpoint; of several processes the first one does.

    Args:
        directory: The checkpoint's directory.
        row: `{"epoch": index, "logs": {key: number}, "earlier": {key: number}}`, the last the results of the epoch's last validation before.

    Raises:
        CheckpointError: The disk fails, or a value cannot be saved.
    """
    if jax.process_index():
        return
    try:
        for litter in directory.glob(f".{CLOSING_FILE}.tmp-*"):
            litter.unlink()  # Of a process that died while it wrote.
        replace_document(directory / CLOSING_FILE, row)
    except OSError as error:
        raise CheckpointError(f"{directory / CLOSING_FILE} cannot be written: {error}.") from error


def load_closing_row(directory: Path) -> dict[str, Any] | None:
    """Returns the row beside a checkpoint, or `None` where there is none or it is damaged: the epoch is closed once more then."""
    try:
        document = read_document(directory / CLOSING_FILE)
        row = {name: document[name] for name in ("epoch", "logs", "earlier")}
    except (CheckpointError, KeyError):
        return None
    for name in ("logs", "earlier"):
        row[name] = {key: np.asarray(value, np.float32) if isinstance(value, list) else value for key, value in row[name].items()}
    return row
