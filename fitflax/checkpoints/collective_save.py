"""One save by all processes of a program together. It is coordinated over the board, without using devices.

If a state is split between processes, each process can write only its own shards. Process 0, the leader, does everything else: it creates the
directory, announces its name, merges the shards once all are written, renames and deletes. The others, the followers, write their shards and wait for
the outcome. A save ends the same way everywhere: if it fails in one process, it fails in all. The messages:

    meet            in the main thread: all processes save the same thing, and know whether an earlier save failed anywhere
    plan            from the leader: where the followers write, or that there is nothing to write
    part/INDEX      from a follower: what it wrote, or why it could not
    verdict         from the leader: whether the checkpoint is complete

Every wait is bounded, and a process that fails tells the others. If a process dies, JAX's heartbeats end all others.
"""

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import jax

from fitflax.errors import CheckpointError
from fitflax.parallel.board import Board
from fitflax.storage import Location, ObjectPath

__all__ = ["CollectiveSave", "Files"]

# Size and crc32 of files, by path relative to the checkpoint's directory.
Files = dict[str, dict[str, int]]
T = TypeVar("T")
P = TypeVar("P", Path, ObjectPath)

# How long a process waits for the others to reach the same save. In a rescue, this may be the only process that saves.
MEETING_SECONDS = 600.0
RESCUE_SECONDS = 60.0
# How long writing shards may take; a dead process is noticed long before.
WRITING_SECONDS = 3600.0
# How long another process's files may stay invisible on a network file system.
APPEARING_SECONDS = 30.0

_INTACT = "Earlier checkpoints are intact."
# Numbers of saves, equal in all processes because all reach the same saves in the same order.
_save_numbers = itertools.count()
# Saves of this process that have not ended, and the number below which the leader has removed messages.
_active: set[int] = set()
_removed = 0


class CollectiveSave:
    """A save that all processes make together. Created by `meet`."""

    def __init__(self, number: int) -> None:
        self.earlier: str | None = None  # Why an earlier save failed in one of the processes, if that was not reported yet.
        self._number = number
        self._board = Board("save")
        self._is_planned = self._has_ended = False
        self._fault: str | None = None

    @classmethod
    def meet(cls, what: str, *, earlier: str | None = None, is_rescue: bool = False) -> Self:
        """Waits until all processes have reached the same save. All of them must call it, in the thread that trains.

        `what` says what is saved and where, the same in all processes; otherwise, or if one does not arrive, `CheckpointError` is raised in all. `earlier` is
        why an earlier save failed here, if that was not reported yet. In a rescue, the others may never arrive, so the wait is short.
        """
        collective = cls(next(_save_numbers))
        here = {"what": what, "earlier": earlier, "oldest": min(tuple(_active), default=collective._number)}
        with collective.abort_on_error(), _communication_errors():
            try:
                outcome = collective._arrive(here, RESCUE_SECONDS if is_rescue else MEETING_SECONDS)
            except BaseException as error:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    collective._decide({"fault": f"process {jax.process_index()}: {_reason(error)}"})
                raise
            if "fault" in outcome:
                raise CheckpointError(f"Nothing was saved, because all processes must save a state that is split between them: {outcome['fault']}.")
        _active.add(collective._number)
        collective.earlier = outcome["earlier"]
        return collective

    def _arrive(self, here: Mapping[str, Any], seconds: float) -> Any:
        """Announces that this process has arrived, and returns the outcome for all processes: the first decision on the board wins."""
        index = jax.process_index()
        if index == 0:
            return self._decide(self._gather(here, seconds))
        self._post(f"here/{index}", here)
        try:
            return self._read("outcome", seconds)
        except TimeoutError:
            return self._decide({"fault": f"process {index} waited {seconds:g} s to save {here['what']}, but process 0 did not arrive"})

    def _decide(self, outcome: Mapping[str, Any]) -> Any:
        return json.loads(self._board.settle(f"{self._number}/outcome", json.dumps(outcome).encode()))

    def _gather(self, here: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Waits for all followers and returns the outcome; removes messages that no process will read anymore."""
        global _removed
        found = {0: here}
        end = time.monotonic() + seconds
        for index in range(1, jax.process_count()):
            try:
                found[index] = self._read(f"here/{index}", max(end - time.monotonic(), 0.0))
            except TimeoutError:
                return {"fault": f"process 0 waited {seconds:g} s to save {here['what']}, but process {index} did not arrive"}
        for index, other in found.items():
            if other["what"] != here["what"]:
                return {"fault": f"process 0 is saving {here['what']}, but process {index} is saving {other['what']}"}
        oldest = min(other["oldest"] for other in found.values())
        for old in range(_removed, oldest):
            self._board.remove(str(old))
        _removed = max(_removed, oldest)
        earlier = [f"process {index}: {other['earlier']}" for index, other in found.items() if other["earlier"] is not None]
        return {"earlier": "; ".join(earlier) or None}

    # -- what all processes call --

    @contextlib.contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """Gives up the save if the body raises."""
        try:
            yield
        except BaseException as error:
            self.abort(error)
            raise

    def abort(self, error: BaseException | None = None) -> None:
        """Tells the others that this process does not take part, unless the save has ended. Without `error`, the reason is that an earlier save failed."""
        if self._has_ended:
            return
        self._close()
        fault = self._fault or f"process {jax.process_index()}: {'an earlier save failed' if error is None else _reason(error)}"
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # The other processes are gone.
            if jax.process_index():
                self._post(f"part/{jax.process_index()}", {"fault": fault})
            else:
                self._plan({"path": None})
                self._post("verdict", {"fault": fault})

    def _close(self) -> None:
        self._has_ended = True
        _active.discard(self._number)

    # -- what the leader calls --

    def lead(self, save: Callable[[], T]) -> T:
        """Returns the result of `save`, which calls `write` if there is something to write. Its exception fails the save in all processes."""
        with self.abort_on_error(), _communication_errors():
            result = save()
            self._plan({"path": None})
            self._post("verdict", {})
        self._close()
        return result

    def write(self, path: P, write: Callable[[P], Any]) -> Files:
        """Makes all processes write into a directory, this one by calling `write`, and returns the files of the others.

        If it raises, because a process failed or its files are not visible here, no process is writing anymore.
        """
        self._plan({"path": str(path if isinstance(path, ObjectPath) else path.absolute())})
        failure: Exception | None = None
        try:
            write(path)
        except Exception as error:  # noqa: BLE001 (raised below, once no process writes what the caller may delete)
            failure = error
        files, faults = self._parts()
        if failure is not None:
            raise failure
        if faults:
            self._fault = "; ".join(faults)
            raise CheckpointError(f"Nothing was saved, because not all processes could write their shards: {self._fault}. {_INTACT}")
        for name, entry in files.items():
            _wait_for(path.parent / name, functools.partial(_has_size, entry["bytes"]))
        return files

    def _parts(self) -> tuple[Files, list[str]]:
        files: Files = {}
        faults = []
        end = time.monotonic() + WRITING_SECONDS
        for index in range(1, jax.process_count()):
            try:
                part = self._read(f"part/{index}", max(end - time.monotonic(), 0.0))
            except TimeoutError:
                part = {"fault": f"process {index}: it did not finish within {WRITING_SECONDS:g} s"}
            files.update(part.get("files", {}))
            faults += [part["fault"]] if "fault" in part else []
        return files, faults

    def _plan(self, plan: Mapping[str, Any]) -> None:
        if not self._is_planned:
            self._is_planned = True
            self._post("plan", plan)

    # -- what the followers call --

    def follow(self, write: Callable[[Location], Files], place: ObjectPath | None = None) -> None:
        """Writes this process's shards with `write` if and where the leader says, and waits until the checkpoint is complete.

        `place` is the checkpoint, if it is in a bucket. Raises `CheckpointError` if the save failed in one of the processes.
        """
        with self.abort_on_error(), _communication_errors():
            path = self._read("plan", WRITING_SECONDS)["path"]
            try:
                if path is not None and place is not None:
                    self._post(f"part/{jax.process_index()}", {"files": write(place / path.rpartition("/")[2])})
                elif path is not None:
                    _wait_for(Path(path), Path.is_dir)
                    self._post(f"part/{jax.process_index()}", {"files": write(Path(path))})
            except Exception as error:
                self._fault = f"process {jax.process_index()}: {_reason(error)}"
                self._post(f"part/{jax.process_index()}", {"fault": self._fault})
                with contextlib.suppress(TimeoutError):
                    self._read("verdict", 2 * WRITING_SECONDS)  # No process may continue before the others know.
                if isinstance(error, CheckpointError) or not isinstance(error, OSError):
                    raise
                raise CheckpointError(f"Could not save the shards of {self._fault}. {_INTACT}") from error
            verdict = self._read("verdict", 2 * WRITING_SECONDS)
        self._close()
        if "fault" in verdict:
            raise CheckpointError(f"Nothing was saved, because another process failed: {verdict['fault']}. {_INTACT}")

    # -- messages --

    def _post(self, key: str, message: Mapping[str, Any]) -> None:
        self._board.post(f"{self._number}/{key}", json.dumps(message).encode())

    def _read(self, key: str, seconds: float) -> Any:
        return json.loads(self._board.read_within(f"{self._number}/{key}", seconds))


@contextlib.contextmanager
def _communication_errors() -> Iterator[None]:
    """Converts communication errors between processes to a `CheckpointError`."""
    try:
        yield
    except TimeoutError as error:
        raise CheckpointError(f"Nothing was saved, because another process did not respond: {error}") from error
    except jax.errors.JaxRuntimeError as error:
        raise CheckpointError(f"Nothing was saved, because the processes lost their connection: {str(error).splitlines()[0]}") from error


def _reason(error: BaseException) -> str:
    """Returns an error's message in a form that fits in the middle of a sentence."""
    return (str(error) or type(error).__name__).removesuffix(_INTACT).rstrip(" .")


def _has_size(size: int, path: Location) -> bool:
    return path.stat().st_size == size


def _wait_for(path: P, is_there: Callable[[P], bool]) -> None:
    end = time.monotonic() + APPEARING_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if is_there(path):
                return
        if time.monotonic() >= end:
            raise CheckpointError(f"{path} was created by another process, but is not visible here. Save to a directory that all processes share.")
        time.sleep(0.1)
