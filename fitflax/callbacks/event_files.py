"""TensorBoard event files, written by a thread of their own over tensorboardX's synchronous writer.

tensorboardX's `SummaryWriter` is not used: its `flush` leaves events in its queue, and two of them opened within a second overwrite each other. Files carry
a number and the run's id in their names, so that a resume can drop what lies beyond the step that it goes on from.
"""

import contextlib
import importlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fitflax.background import Background
from fitflax.errors import CallbackError

__all__ = ["EventFiles", "events_of", "files_of", "trim"]

# Jobs may hold copies of all parameters, so that few of them wait.
_MAX_WAITING = 8


class EventFiles:
    """Event files of one run of a program, a sub-directory each for training, validation sets and so on.

    Args:
        directory: Where.
        run_id: The run that they belong to.
        first_step: The step after which this process goes on; TensorBoard is told to forget what it read of later steps. 0 for a fresh run, of whose
            directory it is to forget all.
        mark: Ends the names of the files, by which they are found again.
    """

    def __init__(self, directory: Path, run_id: str, first_step: int, *, mark: str = "") -> None:
        # Before training and not in the thread: where PyTorch is installed this imports it, which takes seconds, and others should not find it half imported.
        importlib.import_module("tensorboardX.event_file_writer")
        self.directory = directory
        self._run_id = run_id
        self._purge_step = first_step + 1 if first_step else 0
        self._mark = mark
        self._writers: dict[str, Any] = {}
        self._thread = Background("fitflax-tensorboard", on_error=self._fail)
        self._failure: BaseException | None = None

    def submit(self, job: "Callable[[Write], None]") -> None:
        """Has the thread call `job` with a function that writes one summary.

        Raises:
            CallbackError: Something failed in the thread before.
        """
        self._check()
        self._thread.wait_until(lambda: len(self._thread.waiting) < _MAX_WAITING)
        self._thread.submit(lambda: self._do(lambda: job(self._write)))

    def sync(self) -> None:
        """Waits until everything submitted is on disk.

        Raises:
            CallbackError: Something failed in the thread.
        """
        if self._writers or not self._thread.is_idle:
            self._thread.submit(lambda: self._do(self._flush))
            self._thread.wait_until(lambda: self._thread.is_idle)
        self._check()

    def close(self) -> None:
        """Waits until everything is on disk and closes all files.

        Raises:
            CallbackError: Something failed in the thread.
        """
        if self._writers or not self._thread.is_idle:
            self._thread.submit(self._close)
        self._thread.end()
        self._check()

    def _check(self) -> None:
        failure, self._failure = self._failure, None
        if isinstance(failure, CallbackError):
            raise failure  # It says itself what failed.
        if failure is not None:
            raise CallbackError(f"TensorBoard's event files in {self.directory} cannot be written: {type(failure).__name__}: {failure}.") from failure

    # -- what the thread does --

    def _do(self, job: Callable[[], None]) -> None:
        if self._failure is None:
            job()

    def _fail(self, error: BaseException) -> None:
        self._failure = error

    def _close(self) -> None:
        writers, self._writers = self._writers, {}
        with contextlib.ExitStack() as stack:  # One that fails does not keep the others open.
            for writer in writers.values():
                stack.callback(writer.close)  # Flushes and fsyncs first.

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def _write(self, group: str, step: int, summary: Any, seconds: float) -> None:
        from tensorboardX.proto.event_pb2 import Event

        if group not in self._writers:
            self._writers[group] = self._open(group)
        self._writers[group].write_event(Event(wall_time=seconds, step=step, summary=summary))

    def _open(self, group: str) -> Any:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        directory = self.directory / group
        directory.mkdir(parents=True, exist_ok=True)
        # Readers take files in the order of their names, which begin with the second: the number keeps the order within one.
        number = sum(1 for _ in directory.glob("*.tfevents.*"))
        writer = EventsWriter(os.path.join(directory, "events"), filename_suffix=f".{number:05d}.{self._run_id}{self._mark}")
        if not self._mark:
            writer.write_event(Event(wall_time=time.time(), step=self._purge_step, session_log=SessionLog(status=SessionLog.START)))
        return writer


Write = Callable[[str, int, Any, float], None]
"""Writes a summary: the sub-directory, the step, the summary, and the time in seconds since 1970."""


class Record(NamedTuple):
    """An event in a file.

    Attributes:
        begin: The offset of its first byte.
        end: The offset behind its last byte.
        event: The event.
    """

    begin: int
    end: int
    event: Any


def events_of(path: Path) -> Iterator[Record]:
    """Yields the events of a file, up to the first that is cut off or damaged, as a killed process leaves it.

    Source of the format: TensorFlow's TFRecord, length (uint64), its masked crc32c, data, its masked crc32c. The checksum of the data is left to readers: in
    Python it takes a second for a few megabytes, and what a kill leaves behind shows in the lengths. Only where a tail of zeros may begin it is looked at.
    """
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    begin = 0
    with path.open("rb") as file:
        while True:
            head = file.read(12)
            if len(head) < 12 or struct.pack("<I", masked_crc32c(head[:8])) != head[8:]:
                return
            length = struct.unpack("<Q", head[:8])[0]
            body = file.read(length + 4)
            if len(body) < length + 4 or (body[length:] == bytes(4) and masked_crc32c(body[:length]) != 0):
                return
            try:
                event = Event.FromString(body[:length])
            except DecodeError:
                return
            end = begin + 12 + length + 4
            yield Record(begin, end, event)
            begin = end


def files_of(directory: Path, run_id: str, ending: str = "*") -> list[Path]:
    """Returns the event files of a run, in sub-directories too.

    Args:
        directory: Where they are.
        run_id: Whose they are.
        ending: The mark that their names end with; by default any or none.
    """
    return sorted(directory.rglob(f"*.tfevents.*.{run_id}{ending}"))


def trim(directory: Path, run_id: str, step: int) -> None:
    """Drops from a run's event files what lies beyond `step`, and records that were cut off; files of other runs are left alone.

    Events of a file are in the order of their steps, so that each file is cut at the first event of a later step; what remains empty is removed.

    Args:
        directory: Where they are, in sub-directories too.
        run_id: Whose files.
        step: The last step that is kept.
    """
    for path in files_of(directory, run_id):
        keep = 0
        holds_any = False
        for record in events_of(path):
            if record.event.step > step:
                break
            keep = record.end
            holds_any |= record.event.HasField("summary")
        if not holds_any:
            path.unlink()
        elif keep < path.stat().st_size:
            os.truncate(path, keep)
