"""What tests of checkpoint stores share: saves, damage, and processes that are killed at any call of the disk."""

import builtins
import errno
import os
import pathlib
import shutil

import jax.numpy as jnp
import pytest

from fitflax.checkpoints import checkpoint_store as store_module
from fitflax.checkpoints import directories
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.errors import CheckpointError


class Killed(BaseException):
    """Raised by a test at the point where a process dies. The code must not continue after that, so the disk is then frozen."""


def new_process(monkeypatch, name):
    for module in (store_module, directories):
        monkeypatch.setattr(module, "PROCESS", name)


def save(store, step, *, owner="model", keep=(), run="a", metrics=None, value=None):
    metadata = {"run_id": run, "step": step, "epoch": 0, "metrics": metrics or {}}
    return store.save(step=step, train={"w": jnp.float32(step if value is None else value)}, run={"n": step}, metadata=metadata, owner=owner, keep=keep)


def flip(path, position=-1):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def hidden(store):
    return sorted(entry.name for entry in store.directory.iterdir() if entry.name.startswith(".") and entry.name not in (".run.json", ".lock"))


def failing(when, function):
    def wrapper(*args, **kwargs):
        if when(*args, **kwargs):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return function(*args, **kwargs)

    return wrapper


CALLS = [(os, "fsync"), (os, "rename"), (os, "replace"), (builtins, "open"), (pathlib.Path, "mkdir")]


def fail_at(monkeypatch, directory, number, error):
    """Makes the `number`-th disk call below `directory` raise `error`; returns the list of calls."""
    calls = []

    def watch(name, function):
        def wrapper(first, *args, **kwargs):
            if isinstance(first, (str, os.PathLike)) and not str(first).startswith(str(directory)):
                return function(first, *args, **kwargs)
            calls.append(name)
            if len(calls) == number or (isinstance(error, Killed) and len(calls) > number):
                raise error
            return function(first, *args, **kwargs)

        return wrapper

    for owner, name in CALLS:
        monkeypatch.setattr(owner, name, watch(name, getattr(owner, name)))
    if isinstance(error, Killed):  # A dead process does not clean up.
        for owner, name in ((shutil, "rmtree"), (os, "unlink"), (pathlib.Path, "unlink")):
            monkeypatch.setattr(owner, name, lambda *args, **kwargs: None)
    return calls


def error_of(function, *args):
    try:
        function(*args)
    except CheckpointError as error:
        return error
    return None


def count_calls(tmp_path, prepare, act):
    with pytest.MonkeyPatch.context() as patch:
        store = prepare(tmp_path / "count")
        calls = fail_at(patch, store.directory, 0, OSError())
        act(store)
    return len(calls)


def after_each_kill(tmp_path, monkeypatch, prepare, act):
    """Yields the store as the next process recovers it, for each disk call at which a process that runs `act` can be killed."""
    for number in range(1, count_calls(tmp_path, prepare, act) + 1):
        new_process(monkeypatch, "aaaa")
        store = prepare(tmp_path / str(number))
        with pytest.MonkeyPatch.context() as patch:
            fail_at(patch, store.directory, number, Killed())
            with pytest.raises(Killed):
                act(store)
        new_process(monkeypatch, "cccc")
        store.recover()
        yield store


def three_steps(directory):
    store = CheckpointStore(directory)
    store.claim("a", overwrite=False)
    for step in (10, 20, 30):
        save(store, step, keep=[10, 20, 30])
    return store
