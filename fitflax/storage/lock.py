"""The lock of a directory: two runs never save in one directory at the same time, and a dead process never blocks another for long.

A local directory is locked by a POSIX record lock on the file `.lock`. The kernel releases it when the process ends, and forked children (such as a loader's
workers, which may outlive a killed parent for seconds) do not inherit it. However, it is lost if anything else in the process opens and closes that file, and
it does not protect within one process, so a table records which holder has which directory. The contents of the file are only for error messages.

A location in a bucket has a lease: the object `.lease.json`. Each write names the version that it replaces, so only one of two concurrent writers succeeds.
The holder renews the lease every third of `LEASE_SECONDS`. A process that sees no renewal for `LEASE_SECONDS`, by its own clock, takes it over, so clocks
are never compared. A dead holder on the same machine is detected immediately. To release a lease, it is overwritten, not deleted: deletions are not
conditional, and a retried one might hit the next run's lease.
"""

import atexit
import contextlib
import dataclasses
import datetime as dt
import errno
import fcntl
import json
import os
import queue
import secrets
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from fitflax.errors import DirectoryInUseError, warn
from fitflax.storage.object_store import ChangedError, ObjectPath, StorageError
from fitflax.storage.paths import Location

LOCK_FILE = ".lock"
# Errors if another process has the lock, and if the file system does not support locks.
_HELD_ELSEWHERE = {errno.EACCES, errno.EAGAIN}
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

LEASE_FILE = ".lease.json"
LEASE_SECONDS = 60.0
_POLL_SECONDS = 2.0
# How long a release waits for a renewal in progress.
_RELEASE_SECONDS = 5.0


@dataclasses.dataclass
class _Held:
    """A directory that is locked or being locked: its holder, and the open lock file or the lease."""

    holder: "weakref.ref[Any]"
    lock: "int | Lease | None" = None

    def release(self) -> None:
        if isinstance(self.lock, Lease):
            self.lock.release()
        elif self.lock is not None:
            os.close(self.lock)


_Identity = tuple[int, int] | str
_TABLE: dict[_Identity, _Held] = {}  # By device and inode, because a directory can have many names, or by URL.
_GUARD = threading.RLock()  # Reentrant: a finalizer may run in the thread that holds it.


def lock_directory(directory: Location, holder: Any) -> None:
    """Locks a directory until `release_all(holder)`, or until the holder or the process ends. Locking again has no effect.

    The holder is any object that represents a run. Raises `DirectoryInUseError` if a live process, or another holder in this one, has locked it. Warns if
    the file system does not support locks.
    """
    with _GUARD:
        name = _identity(directory)
        held = _TABLE.get(name)
        if held is not None and held.holder() is holder:
            return
        if held is not None and held.holder() is not None:
            raise _in_use(directory, "another run in this process")
        mine = _TABLE[name] = _Held(weakref.ref(holder))
    # Without the guard, because acquiring a lease and releasing can take long.
    try:
        if held is not None:
            held.release()  # Its holder is gone, but its finalizer has not run yet.
        mine.lock = _acquire(directory)
    except BaseException:
        with _GUARD:
            if _TABLE.get(name) is mine:
                del _TABLE[name]
        raise
    weakref.finalize(holder, _release_dead, name)


def holder_of(directory: Location) -> Any:
    """Returns the holder of a directory in this process, or `None`."""
    with _GUARD, contextlib.suppress(OSError):
        held = _TABLE.get(_identity(directory))
        return None if held is None else held.holder()
    return None


def check_held(directory: Location) -> None:
    """Raises `DirectoryInUseError` if a location in a bucket was locked and another process has taken it over."""
    held = _TABLE.get(str(directory)) if isinstance(directory, ObjectPath) else None  # The kernel's lock lasts as long as the process.
    if held is not None and isinstance(held.lock, Lease):
        held.lock.check()


def release_all(holder: Any) -> None:
    """Releases all directories of a holder, if any."""
    with _GUARD:
        released = [_TABLE.pop(name) for name, held in list(_TABLE.items()) if held.holder() is holder]
    for held in released:
        held.release()


def _release_dead(name: _Identity) -> None:
    """Releases the directory of a deleted holder. It runs during garbage collection, so requests to a store are made in another thread."""
    with _GUARD:
        held = _TABLE.get(name)
        if held is None or held.holder() is not None:
            return
        del _TABLE[name]
    if isinstance(held.lock, Lease):
        with contextlib.suppress(RuntimeError):  # No thread can be started while the interpreter exits; then the lease expires.
            threading.Thread(target=held.release, name="fitflax-lease-release", daemon=True).start()
    else:
        held.release()


@atexit.register
def _release_everything() -> None:
    """Releases leases when the process ends normally; the kernel releases local locks."""
    with _GUARD:
        held = [_TABLE.pop(name) for name in list(_TABLE)]
    for each in held:
        each.release()


def _identity(directory: Location) -> _Identity:
    if isinstance(directory, ObjectPath):
        return str(directory)
    status = directory.stat()
    return status.st_dev, status.st_ino


def _in_use(directory: Location, who: str) -> DirectoryInUseError:
    return DirectoryInUseError(
        f"{directory} is in use by {who}. Two runs cannot save to the same directory. Wait for the other run, stop it, or choose another directory."
    )


def _acquire(directory: Location) -> "int | Lease":
    """Takes the lock, and returns the open lock file of a directory, or the lease of a location."""
    if isinstance(directory, ObjectPath):
        lease = Lease(directory)
        lease.acquire()
        return lease
    descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _lock_file(descriptor, directory)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock_file(descriptor: int, directory: Path) -> None:
    """Takes the lock without waiting, and records the holder in the file."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_ELSEWHERE:
            raise _in_use(directory, _describe_holder(descriptor)) from error
        if error.errno not in _UNSUPPORTED:
            raise
        warn(
            f"{directory} cannot be locked ({error.strerror}), so a second run there is detected only after it has begun. Make sure that no other run saves "
            "there."
        )
        return
    note = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}).encode() + b"\n"
    with contextlib.suppress(OSError):  # A full disk: the note is only for messages.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, note, 0)


def _describe_holder(descriptor: int) -> str:
    try:
        note = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {note['pid']} on {note['host']}, which has been using it since {note['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _now() -> str:
    return dt.datetime.now().astimezone().isoformat(timespec="seconds")


# Identifiers of the live leases of this process.
_LIVE: set[str] = set()


class Lease:
    """The lease of a location, from `acquire` to `release`. Raises `DirectoryInUseError` if another run holds it, and `StorageError` if the store fails."""

    def __init__(self, place: ObjectPath) -> None:
        self._place, self._path = place, place / LEASE_FILE
        self._id = secrets.token_hex(8)
        self._process = {"pid": os.getpid(), "start": _start_of(os.getpid()), "host": socket.gethostname(), "machine": _machine()}
        self._beat = 0
        self._tag: str | None = None
        self._renewed = 0.0
        self._new_holder: str | None = None
        self._guard = threading.Lock()
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Takes the lease. Waits, with a warning, as long as a holder that may be dead could still renew it."""
        seen: tuple[str, float] | None = None
        while True:
            note, tag = self._read()
            if tag is not None and not self._is_dead(note, tag, seen):
                if seen is None:
                    seen = tag, _clock()
                    if note.get("id") in _LIVE:
                        raise _in_use(self._place, _describe(note))
                    warn(f"{self._place} was in use by {_describe(note)}. Waiting up to {LEASE_SECONDS:.0f} s to see whether that process is still running.")
                elif tag != seen[0]:
                    raise _in_use(self._place, _describe(note))
                time.sleep(min(_POLL_SECONDS, LEASE_SECONDS / 4))
                continue
            _LIVE.add(self._id)
            try:
                self._write(tag)
                self._thread = threading.Thread(target=self._renew_loop, name="fitflax-lease", daemon=True)
                self._thread.start()
                return
            except ChangedError:
                _LIVE.discard(self._id)  # Another process was faster: read who it is.
            except BaseException:
                _LIVE.discard(self._id)  # If it was written, its holder counts as dead.
                self._end.put(None)  # For a thread that had started when Ctrl-C came.
                raise

    def _read(self) -> tuple[dict[str, Any], str | None]:
        """Returns the holder's note, `{}` if it cannot be parsed, and its version, `None` if there is none."""
        try:
            content, tag = self._path.bucket.read(self._path.key)
        except FileNotFoundError:
            return {}, None
        with contextlib.suppress(ValueError):
            note = json.loads(content)
            return note if isinstance(note, dict) else {}, tag
        return {}, tag

    def _is_dead(self, note: dict[str, Any], tag: str, seen: tuple[str, float] | None) -> bool:
        """Returns whether the holder of a lease will not renew it anymore."""
        if note.get("released"):
            return True
        if note.get("machine") == _machine():
            is_this_process = note.get("pid") == os.getpid() and note.get("start") == _start_of(os.getpid())
            if is_this_process or not _is_running(note):
                return note.get("id") not in _LIVE
        return seen is not None and tag == seen[0] and _clock() - seen[1] > LEASE_SECONDS

    def _write(self, tag: str | None, **more: Any) -> None:
        self._beat += 1
        begin = _clock()
        note = {"id": self._id, "beat": self._beat, "at": _now(), **self._process, **more}
        self._tag = self._path.bucket.write(self._path.key, json.dumps(note).encode() + b"\n", create=tag is None, tag=tag)
        self._renewed = begin

    def _renew_loop(self) -> None:
        while self._new_holder is None:
            with contextlib.suppress(queue.Empty):
                self._end.get(timeout=LEASE_SECONDS / 3)
                return
            with contextlib.suppress(StorageError):  # Retried at the next beat; `check` reports a lost lease.
                self._renew()

    def _renew(self) -> None:
        with self._guard:
            if self._new_holder is not None:
                return
            try:
                self._write(self._tag)
            except ChangedError:
                note, tag = self._read()
                if note.get("id") == self._id:
                    self._tag = tag  # An earlier attempt had succeeded after all.
                else:
                    self._new_holder = _describe(note) if note else "a process that deleted the lease"

    def check(self) -> None:
        """Raises `DirectoryInUseError` if another process has taken the lease over. Renews it if the last renewal is too old."""
        if os.getpid() != self._process["pid"]:
            return  # A forked child does not save.
        if _clock() - self._renewed > LEASE_SECONDS / 2:
            self._renew()
        if self._new_holder is not None:
            raise DirectoryInUseError(
                f"{self._place} was taken over by {self._new_holder}, because this process could not renew its lease for {LEASE_SECONDS:.0f} s. "
                "This run saves nothing more there. Make sure that only one run uses it, and resume."
            )

    def release(self) -> None:
        """Releases the lease; if the store fails, it expires."""
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._process["pid"]:
            return
        self._end.put(None)
        if thread is not threading.current_thread():
            thread.join(_RELEASE_SECONDS)
        _LIVE.discard(self._id)
        is_held = self._new_holder is None and _clock() - self._renewed < LEASE_SECONDS
        if is_held and not thread.is_alive():  # Otherwise the store does not answer.
            with contextlib.suppress(OSError):
                self._write(self._tag, released=True)


def _clock() -> float:
    """Returns monotonic seconds that include the time in which the machine sleeps, if there is such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _describe(note: dict[str, Any]) -> str:
    if note.get("id") in _LIVE:
        return f"another run in this process, which renewed its lease at {note.get('at')}"
    return f"process {note.get('pid', '?')} on {note.get('host', 'another machine')}, which renewed its lease at {note.get('at', 'an unknown time')}"


def _machine() -> str:
    """Returns an identifier of this machine and its current boot; a container counts as a machine."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _start_of(pid: int) -> str | None:
    """Returns the system's start time of a process; `None` if it is not known, or the process has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in ("Z", "X") else rest[18]
    except (OSError, IndexError):
        return None


def _is_running(note: dict[str, Any]) -> bool:
    pid = note.get("pid")
    if not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return note.get("start") is None or _start_of(pid) == note["start"]  # Process ids are reused.
