"""TensorBoard event files, written in a thread with tensorboardX's synchronous writer.

tensorboardX's `SummaryWriter` is not used, because its `flush` leaves events in its queue, and two writers opened within a second overwrite each other's
file. File names contain a number and the run's id, so that a resume can drop events beyond the restored step.
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
from fitflax.errors import CallbackError, warn
from fitflax.storage.parts import Mirror
from fitflax.storage.paths import path_component

# Small, because jobs may hold copies of all parameters.
_MAX_WAITING = 8


class EventFiles:
    """The event files that one process writes, in one subdirectory for training and one for each validation set.

    `first_step` is the step from which this process resumes, which tells TensorBoard to discard events of later steps; 0 for a new run makes it discard
    everything. `mark` is a suffix of file names, by which `files_of` finds the files.

    If another program replaces, truncates or deletes a file, later events go to a new one, with one warning. The earlier ones are only in the lost file.
    """

    def __init__(self, directory: Path, run_id: str, first_step: int, *, mark: str = "", mirror: Mirror | None = None) -> None:
        # Imported here and not in the thread: this imports PyTorch if it is installed, which takes seconds, and other threads must not see it half imported.
        importlib.import_module("tensorboardX.event_file_writer")
        self.directory = directory
        self._run_id = run_id
        self._purge_step = first_step + 1 if first_step else 0
        self._mark = mark
        self._mirror = mirror
        self._writers: dict[str, Any] = {}
        self._files: dict[str, tuple[Path, os.stat_result]] = {}  # The open file of each writer, and its last status.
        self._lost: list[Path] = []  # Files that were replaced, truncated or deleted.
        self._has_warned = False
        self._thread = Background("fitflax-tensorboard", on_error=self._fail)
        self._failure: BaseException | None = None

    def submit(self, job: "Callable[[Write], None]") -> None:
        """Calls `job` in the thread, with a function that writes one summary. Raises a `CallbackError` if an earlier job failed."""
        self.raise_failure()
        self._thread.wait_until(lambda: len(self._thread.waiting) < _MAX_WAITING)
        self._thread.submit(lambda: self._run_job(lambda: job(self._write)))

    def sync(self) -> Callable[[], None] | None:
        """Waits until everything is on disk. Raises a `CallbackError` if a job failed. Returns a function that waits until everything is uploaded."""
        if self._writers or not self._thread.is_idle:
            self._thread.submit(lambda: self._run_job(self._flush))
            self._thread.wait_until(lambda: self._thread.is_idle)
        self.raise_failure()
        return None if self._mirror is None else self._mirror.push_later()

    def close(self) -> None:
        """Waits until everything is on disk and uploaded, and closes all files. Raises a `CallbackError` if a job failed."""
        if self._writers or not self._thread.is_idle:
            self._thread.submit(self._close)
        self._thread.end()
        self.raise_failure()
        if self._mirror is not None:
            self._mirror.push_later()()
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raises a `CallbackError` if a job failed, and warns of lost files, once."""
        if self._lost and not self._has_warned:
            self._has_warned = True
            warn(
                f"{self._lost[0]} was replaced, truncated or deleted by another program during the run. Its events may be lost; later ones are written to a "
                "new file. Do not change the directory during a run; change a copy."
            )
        failure, self._failure = self._failure, None
        if failure is None and self._mirror is not None:
            failure, self._mirror.failure = self._mirror.failure, None
        if isinstance(failure, CallbackError):
            raise failure
        if failure is not None:
            where = self.directory if self._mirror is None else self._mirror.place
            raise CallbackError(f"TensorBoard cannot write event files in {where}: {type(failure).__name__}: {failure}.") from failure

    # -- in the thread --

    def _run_job(self, job: Callable[[], None]) -> None:
        if self._failure is None:
            self._drop_lost_files()
            job()
            if self._mirror is not None and self._mirror.should_push:
                self._flush()
                self._mirror.push_later()

    def _fail(self, error: BaseException) -> None:
        self._failure = error

    def _drop_lost_files(self) -> None:
        """Closes the writers whose files were replaced, truncated or deleted. The next event of their group opens a new file."""
        for group in list(self._files):
            if not self._is_intact(group):
                path, _ = self._files.pop(group)
                self._lost.append(path)
                self._writers.pop(group).close()

    def _is_intact(self, group: str) -> bool:
        """Returns whether the file of a group is still at its path, and not smaller than before; if so, records its size."""
        path, before = self._files[group]
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        if not os.path.samestat(status, before) or status.st_size < before.st_size:
            return False
        self._files[group] = path, status
        return True

    def _close(self) -> None:
        self._drop_lost_files()
        self._files = {}
        writers, self._writers = self._writers, {}
        with contextlib.ExitStack() as stack:  # Close all, even if one fails.
            for writer in writers.values():
                stack.callback(writer.close)  # Flushes and fsyncs first.

    def _flush(self) -> None:
        for group, writer in self._writers.items():
            writer.flush()
            self._is_intact(group)

    def _write(self, group: str, step: int, seconds: float, summary: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        if group not in self._writers:
            self._writers[group] = self._open(group)
        self._writers[group].write_event(Event(wall_time=seconds, step=step, summary=summary))

    def _open(self, group: str) -> Any:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        directory = directory_of(self.directory, group)
        directory.mkdir(parents=True, exist_ok=True)
        # Readers sort files by name, which begins with the time in seconds. The number keeps the order within a second.
        number = sum(1 for _ in directory.glob("*.tfevents.*"))
        writer = EventsWriter(os.path.join(directory, "events"), filename_suffix=f".{number:05d}.{self._run_id}{self._mark}")
        path = Path(writer._file_name)  # There is no public attribute.
        self._files[group] = path, path.stat()
        if not self._mark and not self._lost:  # The start of a session would make readers discard the rest of the lost file.
            writer.write_event(Event(wall_time=time.time(), step=self._purge_step, session_log=SessionLog(status=SessionLog.START)))
        return writer


Write = Callable[[str, int, float, Any], None]
"""A function that writes a summary. Its arguments are the subdirectory, the step, the time in seconds since 1970, and the summary."""


class Record(NamedTuple):
    """An event, and the offsets of its first byte and after its last byte in the file."""

    begin: int
    end: int
    event: Any


def events_of(path: Path) -> Iterator[Record]:
    """Yields the events of a file, up to the first one that is truncated or damaged, as after a kill.

    The format is TensorFlow's TFRecord: length (uint64), its masked crc32c, data, its masked crc32c. The data's checksum is not verified, because that takes
    a second for a few megabytes in Python, and the length shows a truncated record. The exception is a record that may begin a tail of zeros.
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


def directory_of(directory: Path, group: str) -> Path:
    """Returns the subdirectory of a group, such as a validation set. `""` is `directory` itself."""
    return directory / path_component(group) if group else directory


def files_of(directory: Path, run_id: str, ending: str = "*") -> list[Path]:
    """Returns the event files of a run in `directory` and its subdirectories. `ending` is a pattern for the mark that ends a name, by default any or none."""
    return sorted(directory.rglob(f"*.tfevents.*.{run_id}{ending}"))


def trim(directory: Path, run_id: str, step: int) -> None:
    """Removes events after `step`, and truncated records, from the event files of a run in `directory` and its subdirectories.

    Events are sorted by step, so each file is truncated at the first event of a later step. Files without summaries are deleted.
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
