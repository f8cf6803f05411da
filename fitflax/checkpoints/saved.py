"""A checkpoint that was read from its directory."""

import dataclasses
from pathlib import Path
from typing import Any

from fitflax.checkpoints.contents import read_metadata, read_state

__all__ = ["Saved", "read_checkpoint"]


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint as read from its directory, verified.

    Attributes:
        path: Its directory.
        metadata: What `contents.read_metadata` returns.
        train: The TrainState as nested dicts of NumPy arrays, for `trees.restore_tree`.
        run: Everything else, for `trees.from_saved`.

    >>> Saved(path=Path("runs/a/step_00000040"), metadata={"step": 40}, train={}, run={}).metadata["step"]
    40
    """

    path: Path
    metadata: dict[str, Any]
    train: Any
    run: Any


def read_checkpoint(path: Path) -> Saved:
    """Returns the checkpoint in a directory, verified.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        CorruptCheckpointError: It fails a check.
        CheckpointError: It was written by another version, or the disk fails.
    """
    metadata = read_metadata(path)
    state = read_state(path, metadata)
    return Saved(path=path, metadata=metadata, train=state["train"], run=state["run"])
