"""`ModelCheckpoint`: saves checkpoints from which a run can be resumed. `StoreCallback` is the base class of callbacks that save the run."""

import contextlib
import copy
import functools
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase, PlainRun, check_trigger
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.checkpoint_files import save_partial_epoch
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.checkpoints.save import save_run
from fitflax.checkpoints.saver import Saver
from fitflax.errors import CallbackError, CheckpointError, DirectoryInUseError, integer_of, warn
from fitflax.logs import recorded
from fitflax.parallel.placement import spans_processes
from fitflax.parallel.processes import after_first
from fitflax.storage import Location
from fitflax.triggers import Trigger
from fitflax.triggers import every as make_every


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
        if on_save_error not in ("raise", "warn"):
            raise CallbackError(f"{type(self).__name__}(on_save_error=...) must be 'raise' or 'warn'. Received: {on_save_error!r}.")
        self.on_save_error = on_save_error
        name = f"{type(self).__name__}(keep=...)"
        self.keep = None if keep is None else integer_of(name, keep, at_least=1, otherwise=", or None for all", error=CallbackError)
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
        # It is unknown whose save failed. If this callback raises errors, it must receive the error before one that only warns.
        saver.waits.insert(0 if self.on_save_error == "raise" else len(saver.waits), functools.partial(self._wait_for_saves, saver))
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
        """Opens the run of a checkpoint if this callback is used as a plain function. A run that ended may have been continued with another saver."""
        earlier = copy.copy(self._plain_run)
        continues = self._plain_run.continues(checkpoint)
        if checkpoint.run.saver is self._saver:
            return
        try:
            self.enter_run(checkpoint.run.saver)
            if not continues:
                open_run = functools.partial(self.open_run, checkpoint.run_id, checkpoint.run.position.moment.start_step)
                if spans_processes(checkpoint.run.borrow()):  # Otherwise, the function may be called only in process 0.
                    after_first(open_run)
                else:
                    open_run()
        except BaseException:
            # The next call tries again. Otherwise, it would save in a directory that another run may be using.
            self._saver, self._plain_run = None, earlier
            raise

    def _save(self, checkpoint: Checkpoint, keep: Collection[int]) -> None:
        with self._warn_on_failure():
            save_run(checkpoint, self.store, owner=self.owner, keep=keep, asynchronous=self.asynchronous)

    @contextlib.contextmanager
    def _warn_on_failure(self) -> Iterator[None]:
        """Turns errors of saves into warnings if `on_save_error` is `"warn"`, except the error that another run is using the directory."""
        try:
            yield
        except CheckpointError as error:
            if self.on_save_error == "raise" or isinstance(error, DirectoryInUseError):
                raise
            if self._saver is not None:
                self._saver.has_lost = True  # Some of the checkpoints to keep may be missing, so nothing is deleted from now on.
            warn(f"A checkpoint could not be saved. Training continues without it. {error}")

    def _wait_for_saves(self, saver: Saver | None) -> None:
        """Waits for all saves of a run. If one failed, raises the error or, if `on_save_error` is `"warn"`, warns of it."""
        if saver is not None:
            with self._warn_on_failure():
                saver.wait()

    @override
    def close(self) -> None:
        self._wait_for_saves(self._saver)


class ModelCheckpoint(StoreCallback):
    """Saves the whole run in `directory` when `every` fires, when the run ends, and when it is interrupted.

    Args:
        directory: A path or the URL of an object store, such as `s3://bucket/runs/a`. It is created if it is missing. Each checkpoint is a subdirectory, such
            as `step_00002000`.
        every: When to save; by default at the end of each epoch and every ten minutes.
        keep: The number of newest checkpoints to keep; `None` keeps all.
        keep_every: A number of steps. Checkpoints at its multiples are kept forever.
        save_last: Whether to save the last step of a run that ends normally although `every` does not fire. Interrupted runs always save.
        overwrite: Whether a new run may replace another run in the directory, which is deleted when the first new checkpoint is complete.
        asynchronous: Whether training continues while a copy of the state in host memory is written. The error of a failed save is raised at the next save
            or at the end of the run, which waits for all saves.
        backend: The backend that writes the state: `"msgpack"` or, on file systems, `"orbax"`. A resume reads both.
        on_save_error: `"raise"` ends the run at the next save, or at its end, if a save failed. `"warn"` continues with a warning for each failed save.
            Either way, earlier checkpoints stay intact, and nothing is deleted after a failure.
        storage_options: For a URL, the arguments of obstore's store that the environment does not provide, such as `endpoint` or `access_key_id`.

    Raises:
        CallbackError: A number is out of range.
        CheckpointError: The backend is unknown, or `directory` is a URL that is not supported.
        ImportError: `directory` is a URL, and the package for object stores is not installed.

    >>> ModelCheckpoint("runs/a/checkpoints", keep=2).directory.name
    'checkpoints'
    """

    phase = Phase.SAVE

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: Trigger | None = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        save_last: bool = True,
        overwrite: bool = False,
        asynchronous: bool = True,
        backend: str = "msgpack",
        on_save_error: str = "raise",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            directory, keep=keep, overwrite=overwrite, asynchronous=asynchronous, backend=backend, on_save_error=on_save_error, storage_options=storage_options
        )
        check_trigger("ModelCheckpoint", every)
        self.every = every or make_every(epochs=1) | make_every(seconds=600)
        name = "ModelCheckpoint(keep_every=...)"
        self.keep_every = None if keep_every is None else integer_of(name, keep_every, at_least=1, otherwise=" or None", error=CallbackError)
        self.save_last = save_last
        self._steps: list[int] = []

    @override
    def open_run(self, run_id: str, step: int) -> None:
        super().open_run(run_id, step)
        self._steps = self._steps_to_keep(self.store.wanted(self.owner))
        if self.store.steps():
            self.store.retain(self.owner, self._steps)  # Delete checkpoints that a process that was killed during a save did not delete.

    @property
    @override
    def saves_as(self) -> tuple[Location, str]:
        return self.directory, self.owner

    @override
    def wants(self, checkpoint: Checkpoint) -> bool:
        position = checkpoint.run.position
        if not (position.is_rescue or (position.is_last and self.save_last)):
            return False
        if checkpoint.step not in self._steps:
            return True
        if checkpoint.step == position.moment.start_step:  # The resumed checkpoint was saved before the triggers of its step, or before the end of its epoch.
            return not position.is_rescue
        # The save was queued before the step was known to be the last one, so nothing has waited for it. With several processes, only process 0 knows the
        # result.
        if not position.is_repeat or self._saver is None or jax.process_count() > 1:
            return False
        self._saver.wait_until_idle()
        try:
            return self._saver.has_lost and checkpoint.step not in self.store.steps()
        except CheckpointError:
            return True  # The save reports what is wrong with the directory.

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._open_plain_run(checkpoint)
        steps = [*(step for step in self._steps if step != checkpoint.step), checkpoint.step]
        self._steps = self._steps_to_keep(steps)
        self._save(checkpoint, self._steps)

    def save_now(self, checkpoint: Checkpoint) -> None:
        """Saves a checkpoint whether `every` fires or not, unless its step is already saved, and waits until it is complete."""
        if checkpoint.step not in self._steps:
            self.on_checkpoint(checkpoint)
        self._wait_for_saves(self._saver)

    def _steps_to_keep(self, steps: list[int]) -> list[int]:
        newest = set(steps if self.keep is None else steps[-self.keep :])
        permanent = {step for step in steps if self.keep_every is not None and step % self.keep_every == 0}
        return sorted(newest | permanent)

    @override
    def on_closing(self, checkpoint: Checkpoint, epoch: int, logs: Mapping[str, Any]) -> None:
        if checkpoint.step not in self._steps:
            return
        with self._warn_on_failure():
            checkpoint.run.saver.wait()
            if checkpoint.step not in self.store.steps():
                return  # The save failed.
            row = {"epoch": epoch, "logs": recorded(logs), "earlier": recorded(getattr(logs, "earlier", {}))}
            save_partial_epoch(self.store.path(checkpoint.step), row)
