"""`load_checkpoint`: which checkpoint of a directory is read, and the errors if there is none."""

import pytest

from fitflax.checkpoints.resume import load_checkpoint
from fitflax.errors import CheckpointNotFoundError, CorruptCheckpointError, FitflaxWarning
from tests.checkpoints.stores import flip, save


def test_loading_a_directory_of_checkpoints_uses_its_newest_intact_one(store):
    for step in (1, 2):
        save(store, step, keep=[1])
    assert load_checkpoint(store.directory).path == store.path(2) == load_checkpoint(str(store.path(2))).path
    flip(store.path(2) / "state.msgpack")
    with pytest.warns(FitflaxWarning, match="Using .*step_00000001, because newer checkpoints cannot be read. step_00000002: state.msgpack is damaged"):
        assert load_checkpoint(store.directory).run == {"n": 1}
    with pytest.raises(CorruptCheckpointError):
        load_checkpoint(store.path(2))


def test_loading_a_parent_directory_names_the_subdirectories_with_checkpoints(store):
    save(store, 1)
    (store.directory.parent / "other").mkdir(exist_ok=True)
    with pytest.raises(
        CheckpointNotFoundError, match=rf"There is no checkpoint in .* Pass one of its subdirectories that contain checkpoints: {store.directory.name}\."
    ):
        load_checkpoint(store.directory.parent)


def test_the_error_says_what_was_looked_for_when_nothing_is_found(store, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"There is no checkpoint at .*nowhere: no such directory"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFoundError, match=r"There is no checkpoint in .*: looked for metadata\.json or an intact step_"):
        load_checkpoint(store.directory)
    save(store, 1)
    (store.path(1) / "state.msgpack").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match=r"step_00000001: state\.msgpack is empty"):
        load_checkpoint(store.directory)
