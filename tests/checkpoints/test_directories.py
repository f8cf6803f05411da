"""Changes of a directory of checkpoints when the disk fails or the process is killed, and when the directory is listed."""

import errno
import os
import pathlib
import shutil
import stat
import warnings

import pytest

from fitflax.checkpoints import directories
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.errors import CheckpointError, FitflaxWarning
from tests.checkpoints.stores import after_each_kill, count_calls, error_of, fail_at, failing, hidden, save


def listings(monkeypatch, directory):
    """Returns a list that gets an entry whenever `directory` is listed."""
    scandir, calls = os.scandir, []
    monkeypatch.setattr(os, "scandir", lambda path=".": (calls.append(path) if path == directory else None) or scandir(path))
    return calls


def test_a_save_does_not_list_the_directory_unless_another_program_changed_it(tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "_MAX_AGE_SECONDS", 1e9)
    store = CheckpointStore(tmp_path)
    store.claim("a", overwrite=False)
    calls = listings(monkeypatch, tmp_path)
    for step in range(20):
        save(store, step, keep=[step - 2, step - 1])
    assert len(calls) == 1 and store.steps() == [17, 18, 19]
    shutil.rmtree(store.path(18))
    shutil.copytree(store.path(17), store.path(30))
    calls.clear()
    save(store, 20, keep=[18, 19])
    assert len(calls) == 1 and store.steps() == [19, 20, 30]  # The newer one is unknown, so it is kept.
    monkeypatch.setattr(directories, "_MAX_AGE_SECONDS", 0.0)
    save(store, 21, keep=[20])
    assert len(calls) > 2 and store.steps() == [20, 21, 30]


def test_a_failed_cleanup_is_a_warning_and_the_step_is_saved(store, monkeypatch):
    save(store, 1)
    monkeypatch.setattr(shutil, "rmtree", failing(lambda *args, **kwargs: True, shutil.rmtree))
    with pytest.warns(FitflaxWarning, match="step_00000002 was saved, but .* could not be cleaned up: .*No space left"):
        save(store, 2)
    assert store.steps() == [2]
    monkeypatch.undo()
    store.recover()
    assert hidden(store) == []


@pytest.mark.parametrize(
    ("code", "kind", "is_saved"),
    [(errno.EINVAL, "directory", True), (errno.ENOTSUP, "directory", True), (errno.EIO, "directory", False), (errno.EINVAL, "file", False)],
    ids=["EINVAL", "ENOTSUP", "EIO", "EINVAL of a file"],
)
def test_a_file_system_that_cannot_sync_directories_is_supported(store, monkeypatch, code, kind, is_saved):
    fsync = os.fsync

    def fail(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == (kind == "directory"):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    error = error_of(save, store, 1)
    assert (error is None, store.steps()) == (is_saved, [1] if is_saved else [])


def prepared(directory):
    store = CheckpointStore(directory)
    store.claim("a", overwrite=False)
    save(store, 1)
    save(store, 2, run="stale")
    return store


def test_a_checkpoint_is_synced_before_it_is_renamed_and_the_rename_before_save_returns(store, monkeypatch):
    events, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: events.append(os.fstat(file).st_ino) or fsync(file))
    monkeypatch.setattr(os, "rename", lambda old, new: events.append(pathlib.Path(new)) or rename(old, new))
    path = save(store, 1)
    inodes = {file.stat().st_ino for file in (path, *path.rglob("*"))}
    assert set(events[: events.index(path)]) >= inodes
    assert events[events.index(path) + 1] == store.directory.stat().st_ino


@pytest.mark.parametrize("step", [2, 3])
def test_wherever_the_disk_fails_older_checkpoints_stay_and_a_failed_step_is_not_listed(tmp_path, step):
    def act(store):
        save(store, step, keep=[2])

    num_calls = count_calls(tmp_path, prepared, act)
    assert num_calls > 10
    outcomes = set()
    for number in range(1, num_calls + 1):
        store = prepared(tmp_path / str(number))
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fail_at(patch, store.directory, number, OSError(errno.ENOSPC, "No space left on device"))
            error = error_of(act, store)
        failed = error is not None
        assert not failed or (str(error).startswith(f"Could not save {store.path(step)}: ") and isinstance(error.__cause__, OSError))
        outcomes.add((failed, bool(caught)))
        saved = store.restore(step) if step in store.steps() else None
        assert set(store.steps()) - {3} == {2}
        assert (saved is not None and saved.metadata["run_id"] == "a") == (not failed)
        assert saved is not None or step == 3
        assert [name for name in hidden(store) if not name.startswith((".trash", ".replaced"))] == []
        store.recover()
        assert hidden(store) == []
        save(store, 4, keep=[2, 3])
        assert store.newest_good()[0].path == store.path(4)
    assert outcomes == {(True, False), (False, True)} | ({(False, False)} if step == 2 else set())


@pytest.mark.parametrize("step", [2, 3])
def test_wherever_a_process_is_killed_the_next_one_finds_a_complete_checkpoint(tmp_path, monkeypatch, step):
    def act(store):
        save(store, step, keep=[2])

    for store in after_each_kill(tmp_path, monkeypatch, prepared, act):
        saved, skipped = store.newest_good()
        assert skipped == [] and hidden(store) == []
        assert saved.path in (store.path(2), store.path(step))


def test_a_leaf_that_cannot_be_saved_leaves_nothing_behind(store):
    with pytest.raises(CheckpointError, match="run/x is of type object"):
        store.save(step=1, train={}, run={"x": object()}, metadata={"run_id": "a"}, owner="me", keep=[])
    assert (store.steps(), hidden(store)) == ([], [])


def test_a_file_in_place_of_a_checkpoint_is_not_touched(store):
    store.path(1).write_text("mine")
    with pytest.raises(CheckpointError, match="step_00000001 is a file, not a checkpoint"):
        save(store, 1)
    assert store.path(1).read_text() == "mine" and hidden(store) == []


def test_a_directory_that_cannot_be_listed_is_a_checkpoint_error(store, monkeypatch):
    monkeypatch.setattr(os, "scandir", failing(lambda directory: True, os.scandir))
    with pytest.raises(CheckpointError, match="Could not list"):
        store.steps()
