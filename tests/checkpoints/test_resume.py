"""Which checkpoint a run resumes from, with which settings, and what is restored from it, all without a trainer."""

import dataclasses
import os
import pathlib
import re
import warnings

import jax
import numpy as np
import pytest

from fitflax.checkpoints import json_documents
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.checkpoints.resume import check_settings, find_resume, load_checkpoint, read_pointer, restored_state, write_pointer
from fitflax.checkpoints.save import save_checkpoint
from fitflax.errors import CheckpointError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError, FitflaxWarning, RestoreError
from tests.checkpoints.samples import assert_same, train_state


def save(store: CheckpointStore, *steps: int, **metadata: object) -> None:
    for step in steps:
        keep = [*store.steps(), *steps]
        store.save(step=step, train={"w": np.float32(step)}, run={"n": step}, metadata={"run_id": "a", **metadata}, owner="model", keep=keep)


def flip_last_byte(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    store.claim("a", overwrite=False)
    return store


@pytest.mark.parametrize("resume", [None, False])
def test_without_resume_a_new_run_starts(resume, store):
    save(store, 1)
    assert find_resume(resume, [store]) is None


@pytest.mark.parametrize("resume", ["auto", True])
def test_a_run_resumes_from_the_newest_checkpoint(resume, store):
    save(store, 1, 2)
    found = find_resume(resume, [store])
    assert found is not None and (found.path, found.run) == (store.path(2), {"n": 2})


def test_a_directory_without_checkpoints_starts_a_new_run_unless_one_is_required(store):
    assert find_resume("auto", [store]) is None
    with pytest.raises(CheckpointNotFoundError, match=r"resume=True, but .*checkpoints has no intact checkpoint\. To start a new run, pass resume='auto'"):
        find_resume(True, [store])


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_a_run_resumes_from_a_path_regardless_of_the_callbacks(kind, store):
    save(store, 1, 2)
    for stores in ([], [store], [store, store]):
        found = find_resume(kind(store.path(1)), stores)
        assert found is not None and found.run == {"n": 1}
    with pytest.raises(CheckpointNotFoundError):
        find_resume(kind(store.path(3)), [store])


@pytest.mark.parametrize("kind", ["path", "url"])
def test_a_pointer_is_followed_to_its_checkpoint_and_an_error_names_one_that_is_gone(kind, tmp_path):
    if kind == "url":
        pytest.importorskip("obstore")
    store = CheckpointStore(tmp_path / "checkpoints" if kind == "path" else f"memory://pointer-{tmp_path.name}/run")
    store.claim("a", overwrite=False)
    save(store, 1, 2)
    given = tmp_path / "given"
    given.mkdir()
    write_pointer(given, store.path(1))
    found = find_resume(str(given), [store])
    assert found is not None and (found.path, found.run) == (store.path(1), {"n": 1}) and load_checkpoint(given).path == found.path
    store.retain("model", [2])
    gone = rf"^There is no checkpoint at {re.escape(str(store.path(1)))}, the target of .*given/checkpoint_path\.json\. .* pass ModelCheckpoint\(keep="
    for read in (load_checkpoint, lambda path: find_resume(path, [store])):
        with pytest.raises(CheckpointNotFoundError, match=gone):
            read(given)
    assert read_pointer(given) == str(store.path(1)) and read_pointer(tmp_path) is None
    flip_last_byte(given / "checkpoint_path.json")
    with pytest.raises(CorruptCheckpointError, match=r"checkpoint_path\.json is damaged"):
        load_checkpoint(given)


@pytest.mark.parametrize("resume", [1, 0, 2.5, b"auto", ["auto"]])
def test_a_value_that_is_not_a_path_is_an_error(resume, store):
    with pytest.raises(ConfigError, match="resume must be None, 'auto', True, or the path of a checkpoint"):
        find_resume(resume, [store])


@pytest.mark.parametrize("resume", ["auto", True])
def test_without_exactly_one_directory_to_search_the_error_asks_for_a_path(resume, store):
    with pytest.raises(ConfigError, match=r"but there are 0\. Add one to callbacks, or pass resume=path\.$"):
        find_resume(resume, [])
    with pytest.raises(ConfigError, match=r"but there are 2\. Pass resume=path\.$"):
        find_resume(resume, [store, store])


def test_checkpoints_that_a_dead_process_set_aside_are_put_back_first(store):
    save(store, 1, 2)
    undo = store.directory / ".undo-0a"
    undo.mkdir()
    os.rename(store.path(2), undo / store.path(2).name)
    found = find_resume("auto", [store])
    assert found is not None and found.path == store.path(2)


def test_a_damaged_checkpoint_is_skipped_with_a_warning(store):
    save(store, 1, 2)
    flip_last_byte(store.path(2) / "state.msgpack")
    with pytest.warns(FitflaxWarning, match="^Resuming: skipped a damaged checkpoint: step_00000002: state.msgpack is damaged: "):
        found = find_resume("auto", [store])
    assert found is not None and found.path == store.path(1)
    with pytest.raises(CorruptCheckpointError):
        find_resume(store.path(2), [store])
    flip_last_byte(store.path(1) / "state.msgpack")
    with pytest.warns(FitflaxWarning) as caught:
        assert find_resume("auto", [store]) is None
    texts = [str(warning.message) for warning in caught]
    assert [name in text for name, text in zip(("step_00000002", "step_00000001", "so a new run begins"), texts, strict=True)] == [True, True, True]
    assert "Saves in the old run's directories replace its checkpoints. To keep them, copy the directories before the first save." in texts[-1]
    with pytest.warns(FitflaxWarning), pytest.raises(CheckpointNotFoundError, match="has no intact checkpoint"):
        find_resume(True, [store])


def test_checkpoints_of_another_version_are_skipped_only_if_another_one_can_be_read(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(json_documents, "FORMAT_VERSION", 99)
        save(store, 2)
    for resume in ("auto", True):
        with pytest.raises(CheckpointError, match=r"The checkpoints in .* cannot be read here\. They may be intact, so nothing was changed\. step_00000002: "):
            find_resume(resume, [store])
    (store.directory / "retention.json").unlink()
    save(store, 1)
    with pytest.warns(FitflaxWarning, match="^Resuming: skipped a checkpoint that cannot be read here: step_00000002: metadata.json has format version 99"):
        found = find_resume("auto", [store])
    assert found is not None and found.path == store.path(1)


def test_settings_must_match_those_of_the_saved_run(store):
    save(store, 1, progress={}, settings={"seed": 0, "batch_size": 4})
    saved = store.restore(1)
    check_settings(saved, {"seed": 0, "batch_size": 4})
    with pytest.raises(RestoreError, match=r"would change: seed was 0 and is now 1; shuffle was None and is now True\. Pass the same settings"):
        check_settings(saved, {"seed": 1, "batch_size": 4, "shuffle": True})
    save(store, 2)
    with pytest.raises(RestoreError, match="holds a state, but no run to resume"):
        check_settings(store.restore(2), {})


@pytest.mark.parametrize("of", ["the file", "a model"])
def test_weights_only_starts_at_step_0_with_the_given_key_and_without_averages(of, tmp_path):
    state = dataclasses.replace(train_state(), ema_params=train_state().params)
    saved = load_checkpoint(save_checkpoint(tmp_path / "one", train=state, run={}, metadata={}))
    key = jax.random.key(9)
    target = None if of == "the file" else dataclasses.replace(state, ema_params=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = restored_state(saved, target=target, optimizer=None, key=key, weights_only=True)
    assert (int(found.step), found.opt_state, found.ema_params) == (0, (), None)
    assert_same((found.params, found.model_state, found.key), (*jax.tree.map(np.asarray, (state.params, state.model_state)), key))
