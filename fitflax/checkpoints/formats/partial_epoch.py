"""The history row of an epoch that was closed in its middle, stored next to the checkpoint.

A run that ends inside an epoch first saves its last step, and then closes the epoch (validation, `on_epoch_end`). A resume with no steps left returns this
row; one that continues ignores it and has one row for the whole epoch.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fitflax.checkpoints.formats.json_documents import read_document, replace_document
from fitflax.errors import CheckpointError
from fitflax.storage import Location, ObjectPath

__all__ = ["load_partial_epoch", "save_partial_epoch"]

PARTIAL_EPOCH_FILE = "closing.json"


def save_partial_epoch(directory: Location, row: Mapping[str, Any]) -> None:
    """Writes the row next to a checkpoint, in process 0 only.

    The row is `{"epoch": index, "logs": {key: number}, "earlier": {key: number}}`; `earlier` holds the epoch's previous validation results.
    """
    if jax.process_index():
        return
    try:
        for litter in [] if isinstance(directory, ObjectPath) else directory.glob(f".{PARTIAL_EPOCH_FILE}.tmp-*"):
            litter.unlink()  # Left by a process that died while writing.
        replace_document(directory / PARTIAL_EPOCH_FILE, row)
    except OSError as error:
        raise CheckpointError(f"Could not write {directory / PARTIAL_EPOCH_FILE}: {str(error).rstrip('.')}.") from error


def load_partial_epoch(directory: Location) -> dict[str, Any] | None:
    """Returns the row next to a checkpoint, or `None` if it is missing or damaged; then the epoch is closed again."""
    try:
        document = read_document(directory / PARTIAL_EPOCH_FILE)
        row = {name: document[name] for name in ("epoch", "logs", "earlier")}
    except (CheckpointError, KeyError):
        return None
    for name in ("logs", "earlier"):
        row[name] = {key: np.asarray(value, np.float32) if isinstance(value, list) else value for key, value in row[name].items()}
    return row
