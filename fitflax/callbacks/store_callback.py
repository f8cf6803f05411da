"""What callbacks that keep checkpoints of their run in a directory have in common; which ones they keep is their own matter."""

import os
from collections.abc import Collection
from pathlib import Path

from typing_extensions import override

from fitflax.callbacks.base import Callback, PlainRun
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.save_run import save_run
from fitflax.checkpoints.saving import Saver
from fitflax.checkpoints.store import CheckpointStore
from fitflax.errors import CallbackError
from fitflax.integers import is_integer

__all__ = ["StoreCallback"]


class StoreCallback(Callback):
    """A callback with a `CheckpointStore`, whose directory it locks, claims and saves into.

    Args:
        directory: Where.
        keep: How many it keeps; `None` for all.
        overwrite: Whether a run from the beginning may replace another run in the directory.
        asynchronous: Whether training goes on while a copy of the state on the host is written.
        backend: Who writes the state.

    Raises:
        CallbackError: `keep` is neither a positive integer nor `None`.
        CheckpointError: There is no such backend.
    """

    writes_files = True
    needs_gradients_norm = False

    def __init__(self, directory: str | os.PathLike[str], *, keep: int | None, overwrite: bool, asynchronous: bool, backend: str) -> None:
        if keep is not None and not is_integer(keep, 1):
            raise CallbackError(f"{type(self).__name__}(keep=...) must be a positive integer, or None for all. Received: {keep!r}.")
        self.directory = Path(directory)
        self.keep = None if keep is None else int(keep)
        self.overwrite = overwrite
        self.asynchronous = asynchronous
        self.store = CheckpointStore(self.directory, backend=backend)
        self._saver: Saver | None = None
        self._plain_run = PlainRun()

    @property
    def owner(self) -> str:
        """The name under which this callback's wishes are kept in a directory that it may share."""
        return type(self).__name__

    @override
    def enter_run(self, saver: Saver) -> None:
        self._saver = saver
        self.store.lock(saver)

    @override
    def open_run(self, run_id: str, step: int) -> None:
        self.store.claim(run_id, overwrite=self.overwrite)
        self.store.drop_after(step)

    def _join(self, checkpoint: Checkpoint) -> None:
        """Opens the run of a checkpoint where no trainer did: this is used as a plain function. One that had ended may go on, with another saver."""
        goes_on = self._plain_run.goes_on(checkpoint)
        if checkpoint.run.saver is not self._saver:
            self.enter_run(checkpoint.run.saver)
            if not goes_on:
                self.open_run(checkpoint.run_id, checkpoint.run.point.process_start)

    def _save(self, checkpoint: Checkpoint, keep: Collection[int]) -> None:
        """Saves the run, and keeps these steps besides."""
        save_run(checkpoint, self.store, owner=self.owner, keep=keep, asynchronous=self.asynchronous)
