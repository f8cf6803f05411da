"""Streams and files in buckets: a stream in objects of equal size, written and read in parallel, and a mirrored directory.

Parts are separate objects instead of pieces of a multipart upload, which a killed process leaves behind unlisted. So they can be listed, checked, read and
deleted separately. Local copies are read in the same way.
"""

import collections
import contextlib
import io
import itertools
import queue
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from fitflax.background import Background
from fitflax.storage.object_store import ObjectPath
from fitflax.storage.paths import Location

Send = Callable[[Sequence[bytes | memoryview]], None]
"""Receives the next bytes of a stream."""

PART_BYTES = 2**25
"""The size of a part; the last one may be smaller."""

# The number of parts in flight, each a copy in memory.
_UPLOADS = 4
# The size of a read, and the number of blocks of read-ahead if reads are sequential.
_BLOCK_BYTES = 2**25
_MAX_AHEAD = 4


def part_name(stem: str, index: int) -> str:
    """Returns the name of a part, such as `state-0123abcd.00007`."""
    return f"{stem}.{index:05d}"


def read_range(path: Location, begin: int, length: int) -> Any:
    """Returns a range of a file's bytes, truncated at its end."""
    if isinstance(path, ObjectPath):
        return path.bucket.read_range(path.key, begin, length)
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(length)


class PartsWriter:
    """Writes a stream in parts below a location in a bucket. A context manager; the stream is complete only after `close`.

    Methods raise `StorageError` if a part could not be written.
    """

    def __init__(self, place: ObjectPath, stem: str, *, part_bytes: int | None = None) -> None:
        self._place, self._stem = place, stem
        self.part_bytes = part_bytes or PART_BYTES
        self._pool = Workers(_UPLOADS, "fitflax-upload")
        self._waiting: collections.deque[Future[Any]] = collections.deque()
        self._buffers: list[bytes | memoryview] = []
        self._size = 0
        self.num_parts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.end()

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Adds the next bytes, which must not change until `close` has returned."""
        for buffer in buffers:
            rest = memoryview(buffer)
            while self._size + len(rest) >= self.part_bytes:
                room = self.part_bytes - self._size
                self._buffers.append(rest[:room])
                self._upload()
                rest = rest[room:]
            if len(rest):
                self._buffers.append(rest)
                self._size += len(rest)

    def close(self) -> None:
        """Writes the last part, and waits for all parts."""
        if self._size or not self.num_parts:
            self._upload()
        while self._waiting:
            self._waiting.popleft().result()

    def _upload(self) -> None:
        # Joined here, not in the thread, so that the buffers are not used after this returns.
        data, self._buffers, self._size = b"".join(self._buffers), [], 0
        path = self._place / part_name(self._stem, self.num_parts)
        self.num_parts += 1
        while len(self._waiting) >= _UPLOADS:
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(path.write_bytes, data))


class PartsReader(io.RawIOBase):
    """Reads parts as one file. Sequential reads fetch several blocks ahead; skipped blocks are not fetched.

    `name_of` returns the name of a part by its index; `num_bytes` is the size of all parts.
    """

    def __init__(self, place: Location, name_of: Callable[[int], str], *, part_bytes: int, num_bytes: int) -> None:
        self._place, self._name_of, self._part_bytes, self._num_bytes = place, name_of, part_bytes, num_bytes
        self._pool = Workers(_MAX_AHEAD, "fitflax-download")
        self._position = 0
        self._blocks: dict[int, Future[Any]] = {}
        # The number of blocks to fetch ahead; doubles with each sequential read.
        self._ahead = 1
        self._per_part = -(-part_bytes // _BLOCK_BYTES)

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        return self._position

    @override
    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        if self._position >= self._num_bytes or not len(target):
            return 0
        part, offset = divmod(self._position, self._part_bytes)
        block = part * self._per_part + offset // _BLOCK_BYTES
        data = self._get_block(block)[offset % _BLOCK_BYTES :]
        count = min(len(target), len(data))
        target[:count] = data[:count]
        self._position += count
        return count

    def _get_block(self, block: int) -> memoryview:
        """Returns a block, and starts fetching those after it."""
        if block not in self._blocks:
            self._ahead = 1
        for passed in [index for index in self._blocks if index < block]:
            self._blocks.pop(passed)
            self._ahead = min(2 * self._ahead, _MAX_AHEAD)
        end = -(-self._num_bytes // self._part_bytes) * self._per_part
        following = (index for index in range(block, end) if self._extent(index)[2] > 0)
        for index in itertools.islice(following, self._ahead):
            if index not in self._blocks:
                self._blocks[index] = self._pool.submit(self._fetch, index)
        return memoryview(self._blocks[block].result())

    def _extent(self, block: int) -> tuple[int, int, int]:
        """Returns the part that contains a block, and the block's offset and length in it."""
        part, index = divmod(block, self._per_part)
        begin = index * _BLOCK_BYTES
        end = min(self._part_bytes, self._num_bytes - part * self._part_bytes, begin + _BLOCK_BYTES)
        return part, begin, end - begin

    def _fetch(self, block: int) -> Any:
        part, begin, length = self._extent(block)
        return read_range(self._place / self._name_of(part), begin, length)

    def faults(self) -> list[str]:
        """Returns a message for each part that is missing or has the wrong size."""
        count = max(1, -(-self._num_bytes // self._part_bytes))
        paths = [self._place / self._name_of(index) for index in range(count)]
        wanted = [min(self._part_bytes, self._num_bytes - index * self._part_bytes) for index in range(count)]
        parent = paths[0].parent
        if isinstance(parent, ObjectPath):
            sizes = {info.key.rpartition("/")[2]: info.st_size for info in parent.objects()}
        else:
            sizes = {path.name: path.stat().st_size for path in paths if path.exists()}
        return [fault for path, want in zip(paths, wanted, strict=True) for fault in size_fault(path, sizes.get(path.name), want)]

    @override
    def close(self) -> None:
        self._pool.end(wait=False)
        self._blocks.clear()
        super().close()


def size_fault(path: Location, size: int | None, want: int) -> list[str]:
    """Returns a message if a file is missing (`size` is `None`) or has the wrong size, else an empty list."""
    if size is None:
        return [f"{path} is missing."]
    kind = "empty" if size == 0 else "truncated" if size < want else "too long"
    return [] if size == want else [f"{path} is {kind}: {size} bytes instead of {want}."]


_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Workers:
    """Daemon threads, started on demand. No process waits for them at exit, unlike those of `concurrent.futures`, which are joined before exit handlers."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Returns a future of the function's result."""
        future: Future[Any] = Future()
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # The interpreter is exiting.
                if not self._threads:
                    _do((future, function, arguments))
                    return future
            else:
                self._threads.append(thread)
        self._jobs.put((future, function, arguments))
        return future

    def end(self, *, wait: bool = True) -> None:
        """Cancels waiting jobs and ends the threads; with `wait`, after their current jobs."""
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job[0].cancel()
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads if wait else ():
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _do(job)
            del job


def _do(job: _Job) -> None:
    future, function, arguments = job
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*arguments))
    except BaseException as error:  # noqa: BLE001 (the future raises it)
        future.set_exception(error)


PUSH_SECONDS = 30.0
"""How often changed files are uploaded during a run."""


class Mirror:
    """A temporary directory whose changed files are uploaded whole to a location in a bucket, because objects cannot grow.

    `pull` and `push` raise `OSError` if the store or the disk fails; `failure` is the last such error of `push_later`.
    """

    def __init__(self, place: ObjectPath) -> None:
        self.place = place
        self.directory = Path(tempfile.mkdtemp(prefix="fitflax-"))
        # Sizes and modification times of uploaded files, by name.
        self._pushed: dict[str, tuple[int, int]] = {}
        self._last_push = time.monotonic()
        self._thread = Background("fitflax-mirror", on_error=self._fail)
        self.failure: BaseException | None = None
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)

    def pull(self, wanted: Callable[[str], bool]) -> None:
        """Downloads the files for whose names `wanted` returns true."""
        for name, info in self.place.named_objects():
            if wanted(name):
                path = self.directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.place.bucket.read(info.key)[0])
                self._pushed[name] = _state_of(path)

    def push(self) -> None:
        """Uploads changed files, and deletes removed ones from the bucket."""
        present = {path.relative_to(self.directory).as_posix(): path for path in sorted(self.directory.rglob("*")) if path.is_file()}
        for name, path in present.items():
            state = _state_of(path)
            if self._pushed.get(name) != state:
                (self.place / name).write_bytes(path.read_bytes())
                self._pushed[name] = state
        gone = [name for name in self._pushed if name not in present]
        self.place.bucket.delete([(self.place / name).key for name in gone])
        for name in gone:
            del self._pushed[name]

    def push_later(self) -> Callable[[], None]:
        """Calls `push` in a thread. Returns a function that waits for it."""
        self._last_push = time.monotonic()
        self._thread.submit(self.push)
        return self._thread.barrier()

    def _fail(self, error: BaseException) -> None:
        self.failure = error

    @property
    def should_push(self) -> bool:
        """Whether it is time for the next upload."""
        return time.monotonic() - self._last_push > PUSH_SECONDS

    def close(self) -> None:
        """Waits for uploads, and deletes the temporary directory."""
        self._thread.end()
        self._finalizer()


def _state_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
