"""A lease of a prefix in a bucket: two runs never save in one location at the same time, and a dead process blocks others only briefly.

The lease is an object, `.lease.json`. Each write names the version that it replaces, so only one of two concurrent writers succeeds. The holder renews the
lease every third of `LEASE_SECONDS`. A process that sees no renewal for `LEASE_SECONDS`, by its own clock, takes it over, so clocks are never compared. A
dead holder on the same machine is detected immediately. To release a lease, it is overwritten, not deleted: deletions are not conditional, and a retried
one might hit the next run's lease.
"""

import contextlib
import datetime as dt
import json
import os
import queue
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from fitflax.errors import DirectoryInUseError, warn
from fitflax.storage.object_path import ObjectPath
from fitflax.storage.objects import ChangedError, StorageError

__all__ = ["LEASE_FILE", "LEASE_SECONDS", "Lease"]

LEASE_FILE = ".lease.json"
LEASE_SECONDS = 60.0
_POLL_SECONDS = 2.0
# How long a release waits for a renewal in progress.
_RELEASE_SECONDS = 5.0
# The leases of this process.
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
                if seen is not None and tag != seen[0]:
                    raise self._in_use(note)
                if seen is None:
                    seen = tag, _clock()
                    if note.get("id") in _LIVE:
                        raise self._in_use(note)
                    warn(f"{self._place} was in use by {_describe(note)}. Waiting up to {LEASE_SECONDS:.0f} s to see whether that process is still running.")
                time.sleep(min(_POLL_SECONDS, LEASE_SECONDS / 4))
                continue
            _LIVE.add(self._id)
            try:
                self._write(tag)
                break
            except ChangedError:
                _LIVE.discard(self._id)  # Another process was faster: read who it is.
            except BaseException:
                _LIVE.discard(self._id)  # If it was written after all, its holder counts as dead.
                raise
        self._thread = threading.Thread(target=self._renew_loop, name="fitflax-lease", daemon=True)
        self._thread.start()

    def _read(self) -> tuple[dict[str, Any], str | None]:
        """Returns the holder's note, `{}` if it cannot be parsed, and its version, `None` if there is none."""
        try:
            found, tag = self._path.bucket.read(self._path.key)
        except FileNotFoundError:
            return {}, None
        try:
            note = json.loads(found)
        except ValueError:
            note = None
        return note if isinstance(note, dict) else {}, tag

    def _is_dead(self, note: dict[str, Any], tag: str, seen: tuple[str, float] | None) -> bool:
        """Returns whether the holder of a lease will not renew it anymore."""
        if note.get("released"):
            return True
        if note.get("machine") == _machine():
            is_own = note.get("pid") == os.getpid() and note.get("start") == _start_of(os.getpid())
            if is_own or not _is_running(note):
                return note.get("id") not in _LIVE
        return seen is not None and tag == seen[0] and _clock() - seen[1] > LEASE_SECONDS

    def _write(self, tag: str | None, **more: Any) -> None:
        self._beat += 1
        begin = _clock()
        now = dt.datetime.now().astimezone().isoformat(timespec="seconds")
        note = {"id": self._id, "beat": self._beat, "at": now, **self._process, **more}
        self._tag = self._path.bucket.write(self._path.key, json.dumps(note).encode() + b"\n", create=tag is None, tag=tag)
        self._renewed = begin

    def _renew_loop(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                self._end.get(timeout=LEASE_SECONDS / 3)
                return
            with contextlib.suppress(StorageError):  # Retried at the next beat; `check` reports a lost lease.
                self._renew()
            if self._new_holder is not None:
                return

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

    def _in_use(self, note: dict[str, Any]) -> DirectoryInUseError:
        return DirectoryInUseError(
            f"{self._place} is in use by {_describe(note)}. Two runs cannot save to the same place. Wait for the other run, stop it, or choose another prefix."
        )


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
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text().strip())
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
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return note.get("start") is None or _start_of(pid) == note["start"]  # Process ids are reused.
