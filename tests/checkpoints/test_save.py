"""`save_checkpoint`: one checkpoint under any name, which is replaced as a whole."""

import contextlib
import os
import pathlib
import re
import shutil

import pytest

from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.checkpoints.resume import load_checkpoint
from fitflax.checkpoints.save import save_checkpoint
from fitflax.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from tests.checkpoints.stores import Killed, count_calls, fail_at


def test_a_checkpoint_can_have_any_name_and_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "new" / "final"
    assert save_checkpoint(path, train={"w": 1}, run={}, metadata={"step": 1}) == path
    monkeypatch.chdir(path.parent)
    assert str(save_checkpoint("final", train={"w": 2}, run=[1], metadata={"step": 2})) == "final"
    saved = load_checkpoint("final")
    assert (saved.train, saved.run, saved.metadata["step"], saved.path) == ({"w": 2}, [1], 2, pathlib.Path("final"))
    assert os.listdir(path.parent) == ["final"]


@pytest.mark.parametrize("kind", ["file", "empty directory", "directory", "data", "checkpoint and data", "checkpoint and more", "broken link"])
def test_what_is_not_a_checkpoint_is_never_replaced(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "file":
        path.write_text("x")
    elif kind == "broken link":
        path.symlink_to("nowhere")
    else:
        path.mkdir()
    if kind.startswith("checkpoint and"):
        save_checkpoint(tmp_path / "y", train={}, run={}, metadata={})
        shutil.copytree(tmp_path / "y", path, dirs_exist_ok=True)
    if kind in ("directory", "checkpoint and more"):
        (path / "thesis.tex").write_text("x")
    if kind in ("data", "checkpoint and data"):
        (path / "train").mkdir()  # The name of Orbax's directory, and of many datasets.
        (path / "train" / "cat.jpg").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="x already exists and is not a checkpoint"):
        save_checkpoint(path, train={}, run={}, metadata={})
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_checkpoint_may_be_replaced(tmp_path):
    save_checkpoint(tmp_path / "x", train={"w": 1}, run={}, metadata={})
    (tmp_path / "x" / "metadata.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"metadata\.json is missing"):
        load_checkpoint(tmp_path / "x")
    save_checkpoint(tmp_path / "x", train={"w": 2}, run={}, metadata={})
    assert load_checkpoint(tmp_path / "x").train == {"w": 2}


def test_wherever_saving_is_killed_the_old_or_new_checkpoint_exists_or_an_error_names_it(tmp_path):
    def prepare(directory):
        directory.mkdir()
        save_checkpoint(directory / "x", train={"w": 1}, run={}, metadata={})
        return CheckpointStore(directory)

    def act(store):
        save_checkpoint(store.directory / "x", train={"w": 2}, run={}, metadata={})

    moved = 0
    for number in range(1, count_calls(tmp_path, prepare, act) + 1):
        directory = prepare(tmp_path / str(number)).directory
        with pytest.MonkeyPatch.context() as patch:
            fail_at(patch, directory, number, Killed())
            with contextlib.suppress(Killed):
                act(CheckpointStore(directory))
        if (directory / "x").exists():
            assert load_checkpoint(directory / "x").train["w"] in (1, 2)
        else:
            moved += 1
            (aside,) = directory.glob(".replaced-x.*")
            assert load_checkpoint(aside).train == {"w": 1}
            with pytest.raises(CheckpointNotFoundError, match=f"set an earlier one aside as {re.escape(str(aside))}"):
                load_checkpoint(directory / "x")
        save_checkpoint(directory / "x", train={"w": 3}, run={}, metadata={})
        assert load_checkpoint(directory / "x").train == {"w": 3}
    assert moved == 1


def test_ctrl_c_after_the_old_checkpoint_was_renamed_leaves_it(tmp_path, monkeypatch):
    """A signal handler raises when the call returns."""
    save_checkpoint(tmp_path / "x", train={"w": 1}, run={}, metadata={})
    rename = os.rename

    def interrupted(source, target):
        monkeypatch.undo()
        rename(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "x", train={"w": 2}, run={}, metadata={})
    assert load_checkpoint(tmp_path / "x").train == {"w": 1} and os.listdir(tmp_path) == ["x"]
