"""The checkpoints of a run in one directory: which exist, which is best, who may save in it, and going back to an earlier step."""

import math
import os
import re
import shutil

import jax
import numpy as np
import pytest

from fitflax.checkpoints import checkpoint_store as store_module
from fitflax.checkpoints import directories
from fitflax.checkpoints.checkpoint_files import Saved
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.checkpoints.json_documents import read_document
from fitflax.checkpoints.saver import Saver
from fitflax.errors import CheckpointError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError, DirectoryInUseError, FitflaxWarning
from fitflax.storage.lock import holder_of
from tests.checkpoints.stores import Killed, after_each_kill, failing, flip, hidden, new_process, save, three_steps

# --- Which checkpoints there are ---


def test_a_checkpoint_is_restored_as_it_was_saved(store):
    path = save(store, 40)
    saved = store.restore()
    assert isinstance(saved, Saved) and saved.path == path == store.path(40) == store.directory / "step_00000040"
    assert (saved.train, saved.run) == ({"w": np.float32(40)}, {"n": 40})
    assert (saved.metadata["step"], saved.metadata["run_id"]) == (40, "a")
    store.verify(40)


def test_a_checkpoint_of_step_0_is_like_any_other(store):
    save(store, 0)
    assert (store.steps(), store.latest(), store.restore(0).run) == ([0], 0, {"n": 0})


def test_steps_ignores_hidden_names_and_foreign_files(store):
    save(store, 100_000_000)
    save(store, 3, keep=[100_000_000])
    for name in (".step_00000004.tmp-1-1", ".old-0.step_00000005.1-1", "step_6", "step_00000007.bak", "step_000000003", "step_000000008", "notes"):
        (store.directory / name).mkdir()
    (store.directory / "step_00000009").write_text("a file")
    assert store.steps() == [3, 100_000_000]
    assert store.path(100_000_000).name == "step_100000000"


def test_an_empty_or_missing_directory_has_no_checkpoints(tmp_path):
    tmp_path.joinpath("empty").mkdir()
    for name in ("nowhere", "empty"):
        store = CheckpointStore(tmp_path / name)
        assert (store.steps(), store.latest(), store.best("loss", "min"), store.newest_good(), store.run_id()) == ([], None, None, (None, []), None)
        with pytest.raises(CheckpointNotFoundError, match=rf"There is no checkpoint in .*{name}; it holds none"):
            store.restore()


def test_reading_a_missing_step_lists_the_existing_ones(store):
    for step in range(8):
        save(store, step, keep=range(8))
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint of step 9 in .*; it holds steps 0, 1, ..., 6, 7 \(8 in all\)\.$"):
        store.restore(9)


@pytest.mark.parametrize("step", [-1, 1.5, None, "1", np.array([1, 2])], ids=str)
def test_an_invalid_step_is_an_error(store, step):
    with pytest.raises(ConfigError, match="step must be an integer of at least 0"):
        save(store, step, value=0)


def test_numpy_integers_are_valid_steps(store):
    save(store, np.int64(1), keep=[np.int32(7)])
    save(store, np.int64(2), keep=np.array([1]))
    assert store.steps() == [1, 2]


# --- The best ---


@pytest.mark.parametrize(
    ("values", "mode", "best"),
    [
        ([10, 9, 2.8, 5, 2.5], "min", 4),
        ([math.nan, 5, 7, 8], "max", 3),
        ([math.nan, 8, 7, 5], "min", 3),
        ([1, 0, 0, 1], "min", 1),
        ([1, 0, 1], "max", 0),
        ([math.nan], "min", None),
    ],
)
def test_best_is_the_earliest_best_number(store, values, mode, best):
    for step, value in enumerate(values):
        save(store, step, keep=range(9), metrics={"val": {"loss": value}})
    assert store.best("val_loss", mode) == best


def test_metrics_of_the_group_train_have_no_prefix(store):
    save(store, 1, metrics={"train": {"loss": 0.5}, "dev": {"acc": 1}})
    save(store, 2, keep=[1], metrics={"train": {"loss": 0.25}})
    assert (store.best("loss", "min"), store.best("dev_acc", "max")) == (2, 1)
    assert store.best("train_loss", "min") is store.best("acc", "max") is None


@pytest.mark.parametrize("metrics", [None, 3, {"loss": 0.5}], ids=str)
def test_metrics_that_a_user_saved_in_another_form_are_ignored(store, metrics):
    save(store, 1, metrics=metrics)
    assert store.best("loss", "min") is store.metric(1, "loss") is None


def test_the_first_number_counts_if_metrics_have_equal_flat_names(store):
    save(store, 1, metrics={"train": {"val_loss": 1.0}, "val": {"loss": 2.0}})
    save(store, 2, keep=[1], metrics={"train": {"val_loss": math.nan}, "val": {"loss": 2.0}})
    assert (store.metric(1, "val_loss"), store.metric(2, "val_loss")) == (1.0, 2.0)


def test_best_skips_unreadable_metadata_with_a_warning(store):
    save(store, 1, metrics={"train": {"loss": 0.5}})
    save(store, 2, keep=[1], metrics={"train": {"loss": 0.25}})
    flip(store.path(2) / "metadata.json")
    with pytest.warns(FitflaxWarning, match="Skipped a checkpoint.*step_00000002/metadata.json") as caught:
        assert store.best("loss", "min") == 1
    assert [warning.filename for warning in caught] == [__file__]


def test_a_mode_that_is_neither_min_nor_max_is_an_error(store):
    with pytest.raises(ConfigError, match=r"mode must be 'min' or 'max'\. Received: 'auto'"):
        store.best("loss", "auto")


# --- Verifying ---


def test_newest_good_says_what_is_wrong_with_newer_ones(store):
    for step in (10, 20, 30, 40):
        save(store, step, keep=[10, 20, 30])
    data = (store.path(40) / "state.msgpack").read_bytes()
    (store.path(40) / "state.msgpack").write_bytes(data[:-1])
    (store.path(30) / "metadata.json").unlink()
    flip(store.path(20) / "state.msgpack")
    saved, skipped = store.newest_good()
    assert saved.path == store.path(10)
    assert list(map(str, skipped)) == [
        f"step_00000040: state.msgpack is truncated: {len(data) - 1} bytes instead of {len(data)}.",
        "step_00000030: metadata.json is missing.",
        "step_00000020: state.msgpack is damaged: its structure does not match its checksum in metadata.json.",
    ]
    with pytest.raises(CorruptCheckpointError, match="is truncated"):
        store.verify(40)
    with pytest.raises(CorruptCheckpointError, match="is truncated"):
        store.restore()


def test_newest_good_reads_a_newer_checkpoint_if_a_run_deletes_the_one_that_is_being_read(store, monkeypatch):
    read = store_module.read_checkpoint

    def slow(path, *arguments, **options):
        if path == store.path(1):
            save(store, 2)
        return read(path, *arguments, **options)

    save(store, 1)
    monkeypatch.setattr(store_module, "read_checkpoint", slow)
    saved, skipped = store.newest_good()
    assert saved.path == store.path(2) and skipped == []


# --- Claiming a directory ---


def test_a_run_locks_the_directory_as_soon_as_it_exists(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    with Saver() as saver:
        store.lock(saver)
        assert not store.directory.exists()
        store.claim("a", overwrite=False)
        assert holder_of(store.directory) is saver
    with Saver() as saver:
        store.lock(saver)
        assert holder_of(store.directory) is saver


def test_claim_creates_the_directory_and_records_the_run(tmp_path):
    store = CheckpointStore(str(tmp_path / "new" / "dir"))
    store.claim("a", overwrite=False)
    assert store.run_id() == "a" and store.steps() == []


def test_a_directory_with_checkpoints_of_another_run_is_in_use(store):
    save(store, 100)
    message = (
        f"{store.directory} holds checkpoints of run 'a': step 100. To resume that run, pass resume=\"auto\" if it has a ModelCheckpoint, otherwise "
        f'resume="{store.directory}". To start a new run, choose another directory, or pass overwrite=True to the callback, which replaces these checkpoints.'
    )
    with pytest.raises(DirectoryInUseError, match=f"^{re.escape(message)}$"):
        store.claim("b", overwrite=False)
    assert (store.run_id(), store.steps()) == ("a", [100])
    store.claim("a", overwrite=False)


@pytest.mark.parametrize("where", [".", "below"])
def test_a_file_in_the_way_is_an_error_before_any_work(tmp_path, where):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DirectoryInUseError, match="it or one of its parents is a file"):
        CheckpointStore(tmp_path / "file" / where).claim("a", overwrite=True)


def test_a_directory_that_another_run_claimed_but_never_saved_in_is_free(store, monkeypatch):
    new_process(monkeypatch, "bbbb")
    store.claim("b", overwrite=False)
    assert store.run_id() == "b"


def test_a_directory_records_that_its_run_has_saved_even_if_no_checkpoint_is_left(store, monkeypatch):
    assert not store.has_saved()
    save(store, 1)
    new_process(monkeypatch, "bbbb")
    again = CheckpointStore(store.directory)
    for run, has_saved in (("a", True), ("b", False)):
        shutil.rmtree(store.path(1), ignore_errors=True)
        again.claim(run, overwrite=False)
        assert (again.run_id(), again.has_saved()) == (run, has_saved)


def test_a_directory_whose_record_is_of_an_earlier_version_has_saved_if_it_has_a_checkpoint(store, monkeypatch):
    save(store, 1)
    (store.directory / ".run.json").write_text('{"run_id": "a", "process": "aaaa"}', encoding="utf-8")
    new_process(monkeypatch, "bbbb")
    again = CheckpointStore(store.directory)
    assert again.has_saved()
    again.claim("a", overwrite=False)
    shutil.rmtree(store.path(1))
    assert again.has_saved()


@pytest.mark.parametrize("noted", [True, False])
def test_damaged_metadata_does_not_make_a_directory_free(store, monkeypatch, noted):
    save(store, 1)
    flip(store.path(1) / "metadata.json")
    if not noted:
        (store.directory / ".run.json").unlink()
    with pytest.raises(DirectoryInUseError, match="holds checkpoints of run 'a'" if noted else "holds checkpoints of an unknown run"):
        store.claim("b", overwrite=False)


def test_claim_removes_leftovers_of_dead_processes_and_nothing_else(store, monkeypatch):
    save(store, 1)
    for name in (".step_00000002.tmp-0123-4567", ".trash-0123"):
        (store.directory / name).mkdir()
        (store.directory / name / "state.msgpack").write_text("x")
    (store.directory / ".run.json.tmp-0123-4567").write_text("x")
    mine = f".step_00000003.tmp-{store_module.PROCESS}-4567"
    foreign = [mine, ".DS_Store", ".notes.tmp-0123-4567", "data"]
    for name in foreign:
        (store.directory / name).mkdir()
    (store.directory / ".run.json").unlink()
    store.claim("a", overwrite=False)
    assert sorted(os.listdir(store.directory)) == sorted([*foreign, ".lock", ".run.json", "retention.json", "step_00000001"])


def test_an_overwritten_run_is_deleted_after_the_first_new_checkpoint(store):
    for step in (10, 20):
        save(store, step, keep=[10])
    store.claim("b", overwrite=True)
    assert store.steps() == [] and len(hidden(store)) == 1
    save(store, 10, run="b", owner="other")
    assert (store.steps(), hidden(store), store.run_id()) == ([10], [], "b")
    retention = read_document(store.directory / "retention.json")
    assert (retention["owners"], retention["unknown"]) == ({"other": [10]}, [])


def test_a_run_whose_directory_was_replaced_changes_nothing_in_that_of_another_run(tmp_path, monkeypatch):
    store = three_steps(tmp_path / "a")
    store.directory.rename(tmp_path / "old")
    other = CheckpointStore(store.directory)
    with monkeypatch.context() as patch:
        new_process(patch, "bbbb")
        other.claim("b", overwrite=False)
        save(other, 10, run="b")
    with pytest.raises(DirectoryInUseError, match=r"^Another process uses .* for run 'b', because the directory was removed, moved or replaced"):
        save(store, 40, keep=[20, 30])
    with pytest.raises(DirectoryInUseError, match="saves nothing more there"):
        store.retain("model", [30])
    with pytest.raises(DirectoryInUseError, match="saves nothing more there"):
        store.drop_after(5)
    assert (other.steps(), other.owners()) == ([10], {"model": [10]})


def test_a_second_owner_may_claim_for_the_same_run_with_or_without_overwrite(store):
    save(store, 10)
    store.claim("b", overwrite=True)
    store.claim("b", overwrite=False)
    store.claim("b", overwrite=True)
    assert store.steps() == [] and len(hidden(store)) == 1
    save(store, 1, run="b")
    store.claim("b", overwrite=True)
    assert store.steps() == [1]


def test_overwrite_does_not_touch_the_same_run(store, monkeypatch):
    save(store, 10)
    new_process(monkeypatch, "bbbb")
    store.claim("a", overwrite=True)
    assert store.steps() == [10]


def test_an_overwritten_run_is_put_back_when_the_new_one_saved_nothing(store, monkeypatch):
    for step in (10, 20):
        save(store, step, keep=[10])
    store.claim("b", overwrite=True)
    new_process(monkeypatch, "bbbb")
    with pytest.raises(DirectoryInUseError, match="of run 'a': steps 10, 20"):
        store.claim("c", overwrite=False)
    assert (store.steps(), store.run_id(), hidden(store)) == ([10, 20], "a", [])
    store.claim("c", overwrite=True)
    save(store, 1, run="c")
    assert (store.steps(), hidden(store)) == ([1], [])


@pytest.mark.parametrize("step", [20, 100])
@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_an_overwritten_run_is_put_back_with_its_owners_when_the_new_one_died_in_its_first_save(place, step, tmp_path, monkeypatch):
    store = overwritten_by_a_run_that_died(place, tmp_path, monkeypatch, step)
    store.recover()
    assert (store.steps(), store.wanted("model"), store.wanted("best")) == ([10, 20, 30], [10, 20, 30], [20])
    store.retain("model", [30])
    assert store.steps() == [20, 30]


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_an_overwritten_run_whose_owners_are_not_known_is_kept_when_it_is_put_back(place, tmp_path, monkeypatch):
    store = overwritten_by_a_run_that_died(place, tmp_path, monkeypatch, 100, has_owners=False)
    store.recover()
    store.retain("model", [])
    assert store.steps() == [10, 20, 30]


def overwritten_by_a_run_that_died(place, tmp_path, monkeypatch, step, *, has_owners=True):
    """Returns a store in which the process of a new run died while it wrote the checkpoint of `step`, its first one."""

    def die(*arguments, **options):
        raise Killed

    if place == "bucket":
        pytest.importorskip("obstore")
    store = CheckpointStore(tmp_path if place == "disk" else f"memory://{tmp_path.name}/run")
    store.claim("a", overwrite=False)
    for each in (10, 20, 30):
        save(store, each, keep=[10, 20])
    store.retain("best", [20])
    if not has_owners:
        (store.directory / "retention.json").unlink()
    new_process(monkeypatch, "bbbb")
    store.claim("b", overwrite=True)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(directories, "write_in_place", die)
        patch.setattr(directories, "write_to_bucket", die)
        save(store, step, run="b")
    new_process(monkeypatch, "cccc")
    return store


def test_wherever_an_overwriting_process_is_killed_one_run_is_intact(tmp_path, monkeypatch):
    def prepare(directory):
        store = three_steps(directory)
        new_process(monkeypatch, "bbbb")
        return store

    def act(store):
        store.claim("b", overwrite=True)
        save(store, 20, run="b")

    found = set()
    for store in after_each_kill(tmp_path, monkeypatch, prepare, act):
        assert hidden(store) == []
        runs = {store.restore(step).metadata["run_id"] for step in store.steps()}
        assert (runs, store.steps()) in (({"a"}, [10, 20, 30]), ({"b"}, [20])) and store.wanted("model") == store.steps()
        found |= runs
    assert found == {"a", "b"}


def test_a_claim_that_fails_because_of_the_disk_changes_nothing(store, monkeypatch):
    for step in (10, 20):
        save(store, step, keep=[10])
    monkeypatch.setattr(os, "rename", failing(lambda old, new: "step_00000020" in str(old), os.rename))
    with pytest.raises(CheckpointError, match=r"Could not claim .*No space left"):
        store.claim("b", overwrite=True)
    assert (store.steps(), store.run_id(), hidden(store)) == ([10, 20], "a", [])


# --- Going back to an earlier step ---


def test_steps_after_a_resume_point_are_dropped_and_deleted_once_a_later_one_is_saved(store):
    for step in (10, 20, 30):
        save(store, step, keep=[10, 20, 30], owner="model")
        save(store, step, keep=[10, 20, 30], owner="best")
    store.drop_after(10)
    assert (store.steps(), store.latest(), len(hidden(store))) == ([10], 10, 1)
    save(store, 20, value=7)
    assert (store.steps(), hidden(store)) == ([10, 20], [])
    store.retain("best", [])
    assert store.steps() == [20]
    assert store.restore(20).train["w"] == 7


def test_dropped_steps_are_synced_in_their_new_place_before_they_count_as_dropped(store, monkeypatch):
    for step in (1, 2):
        save(store, step, keep=[1])
    synced = []
    monkeypatch.setattr(directories, "fsync_directory", lambda directory: synced.append(directory.name))
    store.drop_after(1)
    assert [name[:6] for name in synced] == [".undo-", "checkp"]


def test_dropped_steps_stay_set_aside_if_the_process_dies_before_it_saves(store, monkeypatch):
    for step in (10, 20):
        save(store, step, keep=[10])
    store.drop_after(10)
    for process in ("bbbb", "cccc"):
        new_process(monkeypatch, process)
        store.claim("a", overwrite=False)
        store.drop_after(10)
        assert (store.steps(), len(hidden(store))) == ([10], 1)
    save(store, 15)
    assert (store.steps(), hidden(store)) == ([15], [])


def test_dropped_steps_are_deleted_by_the_next_claim_if_the_process_died_after_it_saved(store, monkeypatch):
    for step in (10, 20):
        save(store, step, keep=[10])
    store.drop_after(10)
    with pytest.MonkeyPatch.context() as patch:
        contents = directories.LocalDirectory.contents
        patch.setattr(directories.LocalDirectory, "contents", lambda self: contents(self)._replace(set_aside=[]))
        save(store, 11, keep=[10])
    assert len(hidden(store)) == 1
    new_process(monkeypatch, "bbbb")
    store.claim("a", overwrite=False)
    assert (store.steps(), hidden(store)) == ([10, 11], [])


def test_dropped_steps_are_put_back_if_nothing_else_is_left(store, monkeypatch):
    for step in (10, 20):
        save(store, step, keep=[10])
    store.drop_after(5)
    assert store.steps() == []
    new_process(monkeypatch, "bbbb")
    store.claim("a", overwrite=False)
    assert (store.steps(), hidden(store)) == ([10, 20], [])
    save(store, 30, keep=[20])
    assert store.steps() == [20, 30]


def test_wherever_dropping_is_killed_all_or_no_steps_are_dropped_and_none_is_lost(tmp_path, monkeypatch):
    def act(store):
        store.drop_after(10)

    stores = after_each_kill(tmp_path, monkeypatch, three_steps, act)
    found = [(store.steps(), len([*store.directory.glob(".*/step_*")])) for store in stores]
    whole, dropped = ([10, 20, 30], 0), ([10], 2)
    assert whole in found and dropped in found and all(state in (whole, dropped) for state in found)


def test_wherever_putting_back_is_killed_no_step_is_lost(tmp_path, monkeypatch):
    def prepare(directory):
        store = three_steps(directory)
        store.drop_after(0)
        return store

    for store in after_each_kill(tmp_path, monkeypatch, prepare, CheckpointStore.recover):
        assert (store.steps(), hidden(store)) == ([10, 20, 30], [])


# --- Several devices and processes ---


def test_arrays_on_several_devices_are_saved_once(store, devices):
    mesh = jax.sharding.Mesh(np.array(devices(2)), ("x",))
    sharded = jax.device_put(np.arange(4), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    replicated = jax.device_put(np.arange(3), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    store.save(step=1, train={"s": sharded, "r": replicated}, run={}, metadata={"run_id": "a"}, owner="me", keep=[])
    train = store.restore(1).train
    assert train["s"].tolist() == [0, 1, 2, 3] and train["r"].tolist() == [0, 1, 2]


def test_a_process_that_is_not_the_first_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda *arguments: 1)
    store = CheckpointStore(tmp_path / "all")
    store.claim("a", overwrite=False)
    save(store, 1)
    assert list(tmp_path.iterdir()) == []
