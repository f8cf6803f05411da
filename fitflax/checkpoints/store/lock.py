"""The lock of a directory: two runs never save in one directory at the same time, and a dead process never blocks another.

The lock is a POSIX record lock on the file `.lock`. The kernel releases it when the process ends, and forked children (such as a loader's workers, which
may outlive a killed parent for seconds) do not inherit it. However, it is lost if anything else in the process opens and closes that file, and it does not
protect within one process, so a table records which holder has which directory. The contents of the file are only for error messages. A location in a
bucket has a `Lease` instead.
"""

import atexit
import contextlib
import dataclasses
import datetime as dt
import errno
import fcntl
import json
import os
import socket
import threading
import weakref
from pathlib import Path
from typing import Any, Protocol

from fitflax.errors import DirectoryInUseError, warn
from fitflax.storage import Location, ObjectPath
from fitflax.storage.lease import Lease

__all__ = ["LOCK_FILE", "DirectoryUser", "check_held", "holder_of", "lock_directory", "release_all"]

LOCK_FILE = ".lock"
# Errors if another process has the lock, and if the file system does not support locks.
_HELD_ELSEWHERE = {errno.EACCES, errno.EAGAIN}
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class DirectoryUser(Protocol):
    """The user of a directory on behalf of a run: the run's saver."""

    @property
    def is_idle(self) -> bool:
        """Whether it writes nothing."""

    def lock(self, directory: Location) -> None:
        """Locks a directory until the run ends."""


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
            raise DirectoryInUseError(_message(directory, "another run in this process"))
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
    with _GUARD:
        try:
            held = _TABLE.get(_identity(directory))
        except OSError:
            return None
        return None if held is None else held.holder()


def check_held(directory: ObjectPath) -> None:
    """Raises `DirectoryInUseError` if a location in a bucket was locked and another process has taken it over."""
    held = _TABLE.get(_identity(directory))
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


def _acquire(directory: Location) -> int | Lease:
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


def _identity(directory: Location) -> _Identity:
    if isinstance(directory, ObjectPath):
        return str(directory)
    status = directory.stat()
    return status.st_dev, status.st_ino


def _lock_file(descriptor: int, directory: Path) -> None:
    """Takes the lock without waiting, and records the holder in the file."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_ELSEWHERE:
            raise DirectoryInUseError(_message(directory, _describe_holder(descriptor))) from error
        if error.errno not in _UNSUPPORTED:
            raise
        warn(f"{directory} cannot be locked ({error.strerror}), so another run in it is not detected. Make sure that no other run saves there.")
        return
    now = dt.datetime.now().astimezone().isoformat(timespec="seconds")
    note = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}).encode() + b"\n"
    with contextlib.suppress(OSError):  # A full disk: the note is only for messages.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, note, 0)


def _describe_holder(descriptor: int) -> str:
    try:
        note = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {note['pid']} on {note['host']}, which has been using it since {note['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _message(directory: Location, who: str) -> str:
    return f"{directory} is in use by {who}. Two runs cannot save to the same directory. Wait for the other run, stop it, or choose another directory."


@atexit.register
def _release_everything() -> None:
    """Releases leases when the process ends normally; the kernel releases local locks."""
    with _GUARD:
        held = [_TABLE.pop(name) for name in list(_TABLE)]
    for each in held:
        each.release()
