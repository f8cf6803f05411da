"""The live lock of a directory: two runs never save in one directory at the same time, and a dead process never stands in the way.

The lock is a POSIX record lock on the file `.lock`. The kernel gives it up when the process that took it ends, however it ends, and forked children (a
loader's workers, which may outlive a killed parent for seconds) do not have it. The price: it is lost when anything else in the process opens and closes that
very file. Within one process such a lock says nothing, so a table says which holder has which directory. What is written in the file is only for the message
of those who come second.
"""

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
from typing import Any

from fitflax.errors import DirectoryInUseError, warn

__all__ = ["LOCK_FILE", "holder_of", "lock_directory", "release_all"]

LOCK_FILE = ".lock"
# What the kernel says when another process has the lock, and when the file system cannot lock.
_TAKEN = {errno.EACCES, errno.EAGAIN}
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@dataclasses.dataclass
class _Held:
    """A locked directory: the open lock file, and who has it."""

    descriptor: int
    holder: "weakref.ref[Any]"


_TABLE: dict[tuple[int, int], _Held] = {}  # By device and inode of the directory, which has many names.
_GUARD = threading.RLock()  # A finalizer may run in the thread that has it already.


def lock_directory(directory: Path, holder: Any) -> None:
    """Locks a directory for a holder until `release_all(holder)`, the end of the holder's life, or that of the process. Locking again changes nothing.

    Args:
        directory: An existing directory.
        holder: The object that stands for a run.

    Raises:
        DirectoryInUseError: A live process, or another holder of this one, has it.
        OSError: The lock file cannot be made.

    Warns:
        FitflaxWarning: The file system has no locks.

    >>> import tempfile
    >>> class Run: pass
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     run = Run()
    ...     lock_directory(Path(directory), run)
    ...     holder_of(Path(directory)) is run, release_all(run), holder_of(Path(directory))
    (True, None, None)
    """
    with _GUARD:
        name = _identity(directory)
        held = _TABLE.get(name)
        if held is not None and held.holder() is holder:
            return
        if held is not None and held.holder() is not None:
            raise DirectoryInUseError(_message(directory, "another run of this very process"))
        if held is not None:
            os.close(_TABLE.pop(name).descriptor)  # Its holder is gone, and its finalizer is waiting for the guard.
        descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _take(descriptor, directory)
        except BaseException:
            os.close(descriptor)
            raise
        _TABLE[name] = _Held(descriptor, weakref.ref(holder))
    weakref.finalize(holder, _release_dead, name)


def holder_of(directory: Path) -> Any:
    """Returns which holder of this process has a directory, or `None`.

    >>> holder_of(Path("nowhere")) is None
    True
    """
    with _GUARD:
        try:
            held = _TABLE.get(_identity(directory))
        except OSError:
            return None
        return None if held is None else held.holder()


def release_all(holder: Any) -> None:
    """Gives back every directory that a holder has; none is fine.

    >>> release_all(Path("anything"))
    """
    with _GUARD:
        for name, held in list(_TABLE.items()):
            if held.holder() is holder:
                os.close(_TABLE.pop(name).descriptor)


def _release_dead(name: tuple[int, int]) -> None:
    with _GUARD:
        held = _TABLE.get(name)
        if held is not None and held.holder() is None:
            os.close(_TABLE.pop(name).descriptor)


def _identity(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino


def _take(descriptor: int, directory: Path) -> None:
    """Takes the lock without waiting, and notes who has it now."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            raise DirectoryInUseError(_message(directory, _described(descriptor))) from error
        if error.errno not in _UNSUPPORTED:
            raise
        message = f"{directory} cannot be locked ({error.strerror}): make sure that no other run saves there while this one does."
        warn(message)
        return
    now = dt.datetime.now().astimezone().isoformat(timespec="seconds")
    note = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}).encode() + b"\n"
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, note, 0)
    except OSError:
        pass  # A full disk: the lock counts, not the note.


def _described(descriptor: int) -> str:
    """Returns who has the lock, as far as the file tells."""
    try:
        note = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {note['pid']} on {note['host']}, which has been using it since {note['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _message(directory: Path, who: str) -> str:
    return f"{directory} is in use by {who}. Two runs cannot save in one directory: wait for that one, stop it, or choose another directory."
