"""`ModelCheckpoint`: regular checkpoints, which a run can be resumed from."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from fitflax.callbacks.base import Phase, check_trigger
from fitflax.callbacks.store_callback import StoreCallback
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.closing import save_closing_row
from fitflax.errors import CallbackError
from fitflax.integers import is_integer
from fitflax.logs import Logs
from fitflax.triggers import Trigger
from fitflax.triggers import every as make_every

__all__ = ["ModelCheckpoint"]


class ModelCheckpoint(StoreCallback):
    """Saves the whole run in `directory` when `every` is due and, whatever the trigger, when the run ends or is broken off.

    Args:
        directory: Where; one directory `step_00002000` a checkpoint. Made if it is not there.
        every: When; at the end of each epoch and every ten minutes by default.
        keep: How many of the newest are kept; `None` for all.
        keep_every: Checkpoints of steps that are multiples of this are kept for ever.
        save_last: Whether the last step of a run that ends in order is saved though `every` is not due. A run that is broken off always saves.
        overwrite: Whether a run from the beginning may replace another run in the directory, which is deleted once the first new checkpoint is complete.
        asynchronous: Whether training goes on while a copy of the state on the host is written. A save that failed raises at the next one, or at the end; the
            end waits for all.
        backend: Who writes the state: `"msgpack"` or `"orbax"`. A resume reads both.

    Raises:
        CallbackError: A number out of its range.
        CheckpointError: There is no such backend.

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
    ) -> None:
        super().__init__(directory, keep=keep, overwrite=overwrite, asynchronous=asynchronous, backend=backend)
        check_trigger("ModelCheckpoint", every)
        if keep_every is not None and not is_integer(keep_every, 1):
            raise CallbackError(f"ModelCheckpoint(keep_every=...) must be a positive integer or None. Received: {keep_every!r}.")
        self.every = every or make_every(epochs=1) | make_every(seconds=600)
        self.keep_every = None if keep_every is None else int(keep_every)
        self.save_last = save_last
        self._steps: list[int] = []

    @override
    def open_run(self, run_id: str, step: int) -> None:
        super().open_run(run_id, step)
        self._steps = self._kept(self.store.wanted(self.owner))
        if self.store.steps():
            self.store.retain(self.owner, self._steps)  # What a process that died in a save had no time for.

    @property
    @override
    def saves_as(self) -> tuple[Path, str]:
        return self.directory, self.owner

    @override
    def wants(self, checkpoint: Checkpoint) -> bool:
        wanted = checkpoint.run.point.is_rescue or (checkpoint.is_last and self.save_last)
        return wanted and checkpoint.step not in self._steps

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._join(checkpoint)
        steps = [*(step for step in self._steps if step != checkpoint.step), checkpoint.step]
        self._steps = self._kept(steps)
        self._save(checkpoint, self._steps)

    def _kept(self, steps: list[int]) -> list[int]:
        newest = set(steps if self.keep is None else steps[-self.keep :])
        for_ever = {step for step in steps if self.keep_every is not None and step % self.keep_every == 0}
        return sorted(newest | for_ever)

    @override
    def on_closing(self, checkpoint: Checkpoint, epoch: int, logs: Mapping[str, Any]) -> None:
        if checkpoint.step in self._steps:
            checkpoint.run.saver.wait()
            recorded = {key: value for key, value in logs.items() if not isinstance(logs, Logs) or logs.is_recorded(key)}
            save_closing_row(self.store.path(checkpoint.step), {"epoch": epoch, "logs": recorded, "earlier": dict(getattr(logs, "earlier", {}))})

    @override
    def close(self) -> None:
        if self._saver is not None:
            self._saver.wait()
