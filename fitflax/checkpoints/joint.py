"""One save by all processes of a program together: who does what when, over the board; no device takes part.

Of a state that is split between processes each process can write only its own parts. Process 0, the leader, does everything else, as it does for other
states: it makes the directory, tells the others its name, puts the parts together once all are written, renames and deletes. The others, the followers,
write, and learn how it ended. So a save ends alike in all processes: if anything fails in one of them, it fails in all.

    meet            in the main thread: all want to save the same, and know whether an earlier save has failed in any of them
    plan            the leader's: where the followers write, or that there is nothing to write
    part/INDEX      a follower's: what it wrote, or why it could not
    verdict         the leader's: whether the checkpoint is there

Every wait is bounded, and whoever cannot go on says so to the others. A process that is lost is found by JAX's heartbeats, which end all others.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import jax

from fitflax.errors import CheckpointError
from fitflax.parallel.board import Board

__all__ = ["Files", "JointSave"]

# Files by their names from the checkpoint's directory, with size and crc32.
Files = dict[str, dict[str, int]]
T = TypeVar("T")

# How long a process waits for the others to come to the same save. In a rescue, which may be this process's alone, nobody may come.
MEETING_SECONDS = 600.0
RESCUE_SECONDS = 60.0
# How long the parts may take; a lost process is noticed long before.
WRITING_SECONDS = 3600.0
# How long what another process wrote may stay unseen on a network's file system.
APPEARING_SECONDS = 30.0

_INTACT = "Checkpoints saved before are intact."
# Of meetings, the same in all processes: all of them come to the same saves in the same order.
_numbers = itertools.count()
# Those of this process that have not ended, and up to which the leader has removed the messages.
_open: set[int] = set()
_removed = 0


class JointSave:
    """A save that all processes make together. Made by `meet`.

    Attributes:
        earlier: Why an earlier save has failed in one of the processes, if nobody has heard of it.
    """

    def __init__(self, number: int) -> None:
        self.earlier: str | None = None
        self._number = number
        self._board = Board("save")
        self._is_planned = self._has_ended = False
        # Why it failed, in words that name the process.
        self._fault: str | None = None

    @classmethod
    def meet(cls, what: str, *, earlier: str | None = None, is_rescue: bool = False) -> Self:
        """Waits until all processes have come to the same save; all of them must call it, in the thread in which they train.

        Args:
            what: What is saved where; the same in all processes.
            earlier: Why an earlier save has failed here, if nobody has heard of it.
            is_rescue: Whether the others may not come, and are not waited for long.

        Raises:
            CheckpointError: They did not come, or to save something else. It will not be saved by any of them.
        """
        joint = cls(next(_numbers))
        here = {"what": what, "earlier": earlier, "oldest": min(tuple(_open), default=joint._number)}
        with joint.or_give_up(), _in_touch():
            try:
                outcome = joint._come(here, RESCUE_SECONDS if is_rescue else MEETING_SECONDS)
            except BaseException as error:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    joint._settle({"fault": f"process {jax.process_index()}: {_reason(error)}"})
                raise
            if "fault" in outcome:
                raise CheckpointError(f"Nothing was saved, because all processes must save a state that is split between them: {outcome['fault']}.")
        _open.add(joint._number)
        joint.earlier = outcome["earlier"]
        return joint

    def _come(self, here: Mapping[str, Any], seconds: float) -> Any:
        """Says that this process has come, and returns what all processes are told: of two who decide, the first one counts."""
        index = jax.process_index()
        if index == 0:
            return self._settle(self._met(here, seconds))
        self._post(f"here/{index}", here)
        try:
            return self._read("outcome", seconds)
        except TimeoutError:
            return self._settle({"fault": f"process {index} waited for {seconds:g} s to save {here['what']}, and process 0 did not come"})

    def _settle(self, outcome: Mapping[str, Any]) -> Any:
        return json.loads(self._board.settle(f"{self._number}/outcome", json.dumps(outcome).encode()))

    def _met(self, here: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Waits for all followers, and returns what all are to be told; removes messages that nobody will read any more."""
        global _removed
        found = {0: here}
        end = time.monotonic() + seconds
        for index in range(1, jax.process_count()):
            try:
                found[index] = self._read(f"here/{index}", max(end - time.monotonic(), 0.0))
            except TimeoutError:
                return {"fault": f"process 0 waited for {seconds:g} s to save {here['what']}, and process {index} did not come"}
        for index, other in found.items():
            if other["what"] != here["what"]:
                return {"fault": f"process 0 saves {here['what']}, and process {index} {other['what']}"}
        oldest = min(other["oldest"] for other in found.values())
        for old in range(_removed, oldest):
            self._board.remove(str(old))
        _removed = max(_removed, oldest)
        earlier = [f"process {index}: {other['earlier']}" for index, other in found.items() if other["earlier"] is not None]
        return {"earlier": "; ".join(earlier) or None}

    # -- what all processes call --

    @contextlib.contextmanager
    def or_give_up(self) -> Iterator[None]:
        """Tells the others if what is done within fails."""
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            raise

    def give_up(self, error: BaseException | None = None) -> None:
        """Tells the others that this process leaves the save out, unless it has ended; an earlier save has failed if no error is given."""
        if self._has_ended:
            return
        self._close()
        fault = self._fault or f"process {jax.process_index()}: {'an earlier save had failed' if error is None else _reason(error)}"
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # Nobody is there any more who could be told.
            if jax.process_index():
                self._post(f"part/{jax.process_index()}", {"fault": fault})
            else:
                self._plan({"path": None})
                self._post("verdict", {"fault": fault})

    def _close(self) -> None:
        self._has_ended = True
        _open.discard(self._number)

    # -- what the leader calls --

    def lead(self, save: Callable[[], T]) -> T:
        """Returns what `save` returns, which calls `write`, unless there is nothing to write, and raises what is to fail in all processes."""
        with self.or_give_up(), _in_touch():
            result = save()
            self._plan({"path": None})
            self._post("verdict", {})
        self._close()
        return result

    def write(self, path: Path, write: Callable[[Path], Any]) -> Files:
        """Has all processes write into a directory, this one by calling `write`; returns the files of the others.

        Raises:
            CheckpointError: Another process failed, or none of them can see what it wrote. None of them is writing any more.
        """
        self._plan({"path": str(path.absolute())})
        failure: Exception | None = None
        try:
            write(path)
        except Exception as error:  # noqa: BLE001 (raised below, when nobody writes any more what the caller may delete)
            failure = error
        files, faults = self._parts()
        if failure is not None:
            raise failure
        if faults:
            self._fault = "; ".join(faults)
            raise CheckpointError(f"Not all processes could write their parts: {self._fault}. {_INTACT}")
        for name, entry in files.items():
            _wait_for(path.parent / name, lambda found, size=entry["bytes"]: found.stat().st_size == size)  # type: ignore[misc]
        return files

    def _parts(self) -> tuple[Files, list[str]]:
        files: Files = {}
        faults = []
        end = time.monotonic() + WRITING_SECONDS
        for index in range(1, jax.process_count()):
            try:
                part = self._read(f"part/{index}", max(end - time.monotonic(), 0.0))
            except TimeoutError:
                part = {"fault": f"process {index}: it was not ready after {WRITING_SECONDS:g} s"}
            files.update(part.get("files", {}))
            faults += [part["fault"]] if "fault" in part else []
        return files, faults

    def _plan(self, plan: Mapping[str, Any]) -> None:
        if not self._is_planned:
            self._is_planned = True
            self._post("plan", plan)

    # -- what the followers call --

    def follow(self, write: Callable[[Path], Files]) -> None:
        """Writes where the leader says, if it says so, and waits until the checkpoint is there.

        Args:
            write: Puts this process's parts on the disk, in the directory that it is given, and returns the files.

        Raises:
            CheckpointError: It failed, here or in another process.
        """
        with self.or_give_up(), _in_touch():
            path = self._read("plan", WRITING_SECONDS)["path"]
            try:
                if path is not None:
                    _wait_for(Path(path), Path.is_dir)
                    self._post(f"part/{jax.process_index()}", {"files": write(Path(path))})
            except Exception as error:
                self._fault = f"process {jax.process_index()}: {_reason(error)}"
                self._post(f"part/{jax.process_index()}", {"fault": self._fault})
                with contextlib.suppress(TimeoutError):
                    self._read("verdict", 2 * WRITING_SECONDS)  # So that no process goes on before the others know.
                if isinstance(error, CheckpointError) or not isinstance(error, OSError):
                    raise
                raise CheckpointError(f"Could not save the parts of {self._fault}. {_INTACT}") from error
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
def _in_touch() -> Iterator[None]:
    """Turns what goes wrong between processes into an error of a save."""
    try:
        yield
    except TimeoutError as error:
        raise CheckpointError(f"Nothing was saved, because another process did not answer: {error}") from error
    except jax.errors.JaxRuntimeError as error:
        raise CheckpointError(f"Nothing was saved, because the processes have lost touch: {str(error).splitlines()[0]}") from error


def _reason(error: BaseException) -> str:
    """Returns what an error says, to be put into the middle of a sentence."""
    return (str(error) or type(error).__name__).removesuffix(_INTACT).rstrip(" .")


def _wait_for(path: Path, is_there: Callable[[Path], bool]) -> None:
    end = time.monotonic() + APPEARING_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if is_there(path):
                return
        if time.monotonic() >= end:
            raise CheckpointError(f"{path}, which another process has made, is not there. All processes must save in one directory of a shared file system.")
        time.sleep(0.1)
