"""`StoreCallback`: base class of callbacks that save checkpoints of the run in a directory."""

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from typing_extensions import override

from fitflax.callbacks.base import Callback, PlainRun
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.save import save_run
from fitflax.checkpoints.store.checkpoint_store import CheckpointStore
from fitflax.checkpoints.writer.saver import Saver
from fitflax.errors import CallbackError, CheckpointError, DirectoryInUseError, warn
from fitflax.integers import is_integer
from fitflax.storage import Location

__all__ = ["StoreCallback"]


class StoreCallback(Callback):
    """Base class of callbacks that save in a `CheckpointStore`. It locks and claims the directory; subclasses decide which checkpoints to keep.

    The arguments and errors are those of `ModelCheckpoint`.
    """

    writes_files = True
    needs_gradients_norm = False

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None,
        overwrite: bool,
        asynchronous: bool,
        backend: str,
        on_save_error: str,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        if keep is not None and not is_integer(keep, 1):
            raise CallbackError(f"{type(self).__name__}(keep=...) must be a positive integer, or None for all. Received: {keep!r}.")
        if on_save_error not in ("raise", "warn"):
            raise CallbackError(f"{type(self).__name__}(on_save_error=...) must be 'raise' or 'warn'. Received: {on_save_error!r}.")
        self.on_save_error = on_save_error
        self.keep = None if keep is None else int(keep)
        self.overwrite = overwrite
        self.asynchronous = asynchronous
        self.store = CheckpointStore(directory, backend=backend, storage_options=storage_options)
        self.directory = self.store.directory
        self._saver: Saver | None = None
        self._plain_run = PlainRun()

    @property
    def owner(self) -> str:
        """The name under which a shared directory records the checkpoints that this callback keeps."""
        return type(self).__name__

    @property
    @override
    def copies_state(self) -> bool:
        return self.asynchronous

    @override
    def enter_run(self, saver: Saver) -> None:
        self._saver = saver
        self.store.lock(saver)

    @override
    def open_run(self, run_id: str, step: int) -> None:
        self.store.claim(run_id, overwrite=self.overwrite)
        self.store.drop_after(step)

    def chosen_path(self) -> Location | None:
        """Returns the path of the best complete checkpoint if known, otherwise of the newest; `None` if there is none."""
        steps, best = self.store.steps(), getattr(self, "best_step", None)
        step = best if best in steps else max(steps, default=None)
        return None if step is None else self.store.path(step)

    def _open_plain_run(self, checkpoint: Checkpoint) -> None:
        """Opens the run of a checkpoint if this callback is used as a plain function. The run may continue one that ended, with another saver."""
        continues = self._plain_run.continues(checkpoint)
        if checkpoint.run.saver is not self._saver:
            self.enter_run(checkpoint.run.saver)
            if not continues:
                self.open_run(checkpoint.run_id, checkpoint.run.position.process_start)

    def _save(self, checkpoint: Checkpoint, keep: Collection[int]) -> None:
        with self._warn_on_failure():
            save_run(checkpoint, self.store, owner=self.owner, keep=keep, asynchronous=self.asynchronous)

    @contextlib.contextmanager
    def _warn_on_failure(self) -> Iterator[None]:
        """Turns errors of saves into warnings if `on_save_error` is `"warn"`, except that another run took the directory."""
        try:
            yield
        except CheckpointError as error:
            if self.on_save_error == "raise" or isinstance(error, DirectoryInUseError):
                raise
            if self._saver is not None:
                self._saver.has_lost = True  # Some of the checkpoints to keep may be missing, so nothing is deleted from now on.
            warn(f"A checkpoint could not be saved. Training continues without it. {error}")
