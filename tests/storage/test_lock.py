"""The live lock of a directory, between processes and within one."""

import errno
import fcntl
import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import weakref

import pytest

from fitflax.errors import DirectoryInUseError, FitflaxWarning
from fitflax.storage.lock import LOCK_FILE, holder_of, lock_directory, release_all

HOLD = """
import os, pathlib, sys, time
from fitflax.storage.lock import lock_directory

class Run:
    pass

run = Run()
lock_directory(pathlib.Path(sys.argv[1]), run)
child = os.fork() if sys.argv[2] == "fork" else None
if child != 0:
    print(child, flush=True)
time.sleep(600)
"""


class Run:
    pass


@pytest.fixture
def run():
    run = Run()
    yield run
    release_all(run)


class OtherProcess:
    """Another process that holds the lock of a directory."""

    def __init__(self, directory: pathlib.Path, how: str = "plain") -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen([sys.executable, "-c", HOLD, str(directory), how], env=env, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        assert line, "it could not lock"
        self.child = int(line) if how == "fork" else None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self.process.stdout.close()


def test_a_directory_locked_by_a_live_process_is_refused_and_a_killed_one_never_blocks(tmp_path, run):
    other = OtherProcess(tmp_path)
    with pytest.raises(DirectoryInUseError, match=rf"in use by process {other.process.pid} on .*, which has been using it since 20.*choose another directory"):
        lock_directory(tmp_path, run)
    assert holder_of(tmp_path) is None
    other.kill()
    lock_directory(tmp_path, run)
    assert holder_of(tmp_path) is run
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


@pytest.mark.slow
def test_a_forked_child_that_outlives_its_killed_parent_does_not_block(tmp_path, run):
    other = OtherProcess(tmp_path, "fork")
    try:
        with pytest.raises(DirectoryInUseError):
            lock_directory(tmp_path, run)
        other.kill()
        lock_directory(tmp_path, run)
    finally:
        os.kill(other.child, signal.SIGKILL)


def test_the_contents_of_the_lock_file_do_not_matter(tmp_path, run):
    (tmp_path / LOCK_FILE).write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "yesterday"}))
    lock_directory(tmp_path, run)
    assert holder_of(tmp_path) is run


@pytest.mark.slow
def test_a_locked_directory_is_refused_even_if_its_lock_file_cannot_be_parsed(tmp_path, run):
    other = OtherProcess(tmp_path)
    (tmp_path / LOCK_FILE).write_text("?")
    with pytest.raises(DirectoryInUseError, match="in use by another process"):
        lock_directory(tmp_path, run)
    other.kill()


def test_the_same_holder_can_lock_again_and_another_one_cannot(tmp_path, run):
    lock_directory(tmp_path, run)
    lock_directory(tmp_path, run)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(DirectoryInUseError, match="another run in this process"):
        lock_directory(tmp_path / "link", Run())
    release_all(run)
    other = Run()
    lock_directory(tmp_path, other)
    release_all(other)


@pytest.mark.slow
def test_a_holder_that_is_gone_has_released_everything(tmp_path, run):
    lock_directory(tmp_path, Run())
    gc.collect()
    assert holder_of(tmp_path) is None
    other = OtherProcess(tmp_path)  # The kernel's lock is free, too.
    other.kill()
    lock_directory(tmp_path, run)


def test_a_file_system_without_locks_gives_a_warning(tmp_path, run, monkeypatch):
    def unsupported(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with pytest.warns(FitflaxWarning, match=r"cannot be locked \(No locks available\), so .* Make sure that no other run"):
        lock_directory(tmp_path, run)
    assert holder_of(tmp_path) is run


def test_a_directory_that_cannot_be_written_is_an_error_and_leaves_nothing_locked(tmp_path, run):
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(IsADirectoryError):
        lock_directory(tmp_path, run)
    assert holder_of(tmp_path) is None


def test_an_error_of_the_disk_while_locking_is_raised_unchanged(run, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "lockf", fail)
    with pytest.raises(OSError, match="Input/output error"):
        lock_directory(tmp_path, run)
    monkeypatch.undo()
    lock_directory(tmp_path, run)
    assert holder_of(tmp_path) is run


def test_on_a_full_disk_the_lock_holds_although_its_holder_cannot_be_recorded(run, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    lock_directory(tmp_path, run)
    assert holder_of(tmp_path) is run
    with pytest.raises(DirectoryInUseError):
        lock_directory(tmp_path, Run())


def test_a_holder_that_is_gone_does_not_keep_the_directory_before_its_finalizer_runs(run, tmp_path, monkeypatch):
    monkeypatch.setattr(weakref, "finalize", lambda *arguments: None)
    lock_directory(tmp_path, Run())
    gc.collect()
    lock_directory(tmp_path, run)
    assert holder_of(tmp_path) is run
