"""A checkpoint that was read from its directory."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fitflax.checkpoints.contents import read_metadata, read_state

__all__ = ["FOR_INFERENCE", "WHOLE", "Saved", "read_checkpoint"]


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint as read from its directory, verified.

    Attributes:
        path: Its directory.
        metadata: What `contents.read_metadata` returns.
        train: The TrainState as nested dicts of NumPy arrays, for `trees.restore_tree`.
        run: Everything else, for `trees.from_saved`; `None` where it was not read.

    >>> Saved(path=Path("runs/a/step_00000040"), metadata={"step": 40}, train={}, run={}).metadata["step"]
    40
    """

    path: Path
    metadata: dict[str, Any]
    train: Any
    run: Any


WHOLE = ("train", "run")
# What evaluation and prediction need: no optimizer, and nothing of the run.
FOR_INFERENCE = ("train/step", "train/params", "train/model_state", "train/ema_params")


def read_checkpoint(path: Path, roots: Collection[str] = WHOLE) -> Saved:
    """Returns the checkpoint in a directory, verified.

    Args:
        path: The directory.
        roots: What is read of it: `WHOLE`, or `FOR_INFERENCE`; the arrays of the rest are neither read nor verified.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        CorruptCheckpointError: It fails a check.
        CheckpointError: It was written by another version, or the disk fails.
    """
    metadata = read_metadata(path)
    state = read_state(path, metadata, roots=roots)
    train = state["train"]
    if "train" not in roots:
        names = {root.partition("/")[2] for root in roots}
        train = {name: tree for name, tree in train.items() if name in names}
    return Saved(path=path, metadata=metadata, train=train, run=state.get("run"))
