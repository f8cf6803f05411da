"""The interface of a directory of checkpoints on a disk or in a bucket, as used by `CheckpointStore`.

Every operation is atomic: if a process dies, the old or the new contents are there, and `recover` removes leftovers.
"""

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from fitflax.checkpoints.collective_save import CollectiveSave
from fitflax.checkpoints.store.lock import DirectoryUser, holder_of, lock_directory
from fitflax.state import PyTree
from fitflax.storage import Location, ObjectPath

__all__ = ["CheckpointDirectory", "Contents", "SetAside"]

P = TypeVar("P", Path, ObjectPath)


class SetAside(NamedTuple):
    """Checkpoints that were set aside: their directory, or the note that lists them, and the step from which a new checkpoint supersedes them."""

    place: Location
    since: int


class Contents(NamedTuple):
    """The contents of a directory: the steps of complete checkpoints in ascending order, and what is set aside."""

    steps: list[int]
    set_aside: list[SetAside]


class CheckpointDirectory(abc.ABC, Generic[P]):
    """A directory of checkpoints. Failures of the disk or the store raise `OSError`."""

    def __init__(self, path: P) -> None:
        self.path: P = path

    def checkpoint(self, step: int) -> P:
        """Returns the path of the checkpoint of `step`, which need not exist."""
        return self.path / f"step_{step:08d}"

    @abc.abstractmethod
    def is_there(self) -> bool:
        """Returns whether the directory exists; always true in a bucket."""

    @abc.abstractmethod
    def make(self) -> None:
        """Creates the directory if it does not exist."""

    def lock(self, saver: DirectoryUser | None, holder: object) -> None:
        """Locks the directory for a run's saver, or for `holder`, a store that is used without a run, unless it is already locked."""
        if saver is not None:
            saver.lock(self.path)
        elif holder_of(self.path) is None:
            lock_directory(self.path, holder)

    @abc.abstractmethod
    def check_held(self) -> None:
        """Raises `DirectoryInUseError` if the directory was locked and another run has taken it over."""

    @abc.abstractmethod
    def contents(self) -> Contents:
        """Lists the existing checkpoints."""

    def recent_contents(self) -> Contents:
        """Returns the existing checkpoints, possibly from the last listing, if it is less than a second old and nothing else has changed the directory."""
        return self.contents()

    @abc.abstractmethod
    def size_and_time(self, step: int) -> tuple[int, float]:
        """Returns the size of a checkpoint in bytes, and when it was written, in seconds since 1970."""

    @abc.abstractmethod
    def write(self, step: int, *, train: PyTree, run: PyTree, metadata: Mapping[str, Any], backend: str, collective: CollectiveSave | None) -> None:
        """Writes a checkpoint; an older one of the same step is replaced once it is complete."""

    @abc.abstractmethod
    def delete(self, step: int) -> None:
        """Deletes a checkpoint; the first deletion makes it incomplete."""

    @abc.abstractmethod
    def set_aside(self, steps: list[int], *, since: int) -> None:
        """Hides all of the checkpoints or none."""

    @abc.abstractmethod
    def put_back(self, aside: SetAside) -> None:
        """Restores all checkpoints that were set aside together, or none."""

    @abc.abstractmethod
    def delete_set_aside(self, aside: SetAside) -> None:
        """Deletes checkpoints that were set aside."""

    @abc.abstractmethod
    def recover(self, *, is_alone: bool) -> None:
        """Finishes or undoes what a process left incomplete when it died. With `is_alone`, this process is not writing here either."""

    @abc.abstractmethod
    def version(self, name: str) -> object:
        """Returns an identifier of the current version of a note. Raises `FileNotFoundError` if there is none."""

    @abc.abstractmethod
    def write_note(self, name: str, values: Mapping[str, Any], *, is_durable: bool = True) -> None:
        """Replaces one of the directory's own documents."""
