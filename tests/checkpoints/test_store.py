import builtins
import contextlib
import errno
import math
import os
import pathlib
import re
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fitflax.checkpoints import checkpoint_store as store_module
from fitflax.checkpoints import directories
from fitflax.checkpoints.checkpoint_files import Saved
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.checkpoints.json_documents import read_document, replace_document
from fitflax.checkpoints.resume import load_checkpoint
from fitflax.checkpoints.save import save_checkpoint
from fitflax.checkpoints.saver import Saver
from fitflax.errors import CheckpointError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError, DirectoryInUseError, FitflaxWarning
from fitflax.storage.lock import holder_of


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


@pytest.fixture(params=["msgpack", "orbax"])
def store(tmp_path, request):
    store = CheckpointStore(tmp_path / "runs" / "checkpoints", backend=request.param)
    store.claim("a", overwrite=False)
    return store


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


# --- Retention ---


def test_an_owner_keeps_exactly_the_steps_it_wants_and_the_new_one(store):
    for step in range(1, 6):
        save(store, step, keep=[step - 1])
    assert store.steps() == [4, 5]


def test_retention_is_the_union_of_what_owners_want(store):
    accuracy = [0.9, 0.5, 0.4, 0.3]
    for step, value in enumerate(accuracy, start=1):
        if value == 0.9:
            save(store, step, owner="best", metrics={"train": {"accuracy": value}})
        save(store, step, owner="latest", metrics={"train": {"accuracy": value}})
    assert (store.steps(), store.best("accuracy", "max"), store.latest()) == ([1, 4], 1, 4)


def test_a_step_is_written_once_for_two_owners(store, monkeypatch):
    save(store, 1, owner="latest")
    before = (store.path(1) / "state.msgpack").stat().st_ino
    save(store, 1, owner="best")
    assert (store.path(1) / "state.msgpack").stat().st_ino == before
    save(store, 2, owner="latest")
    assert store.steps() == [1, 2]
    store.retain("best", [])
    assert store.steps() == [2]


def test_saving_a_step_again_for_the_same_owner_replaces_it_and_others_still_want_it(store):
    save(store, 1, owner="latest")
    save(store, 1, owner="best")
    save(store, 1, owner="latest", value=9)
    assert store.restore(1).train["w"] == 9
    save(store, 2, owner="latest")
    assert store.steps() == [1, 2] and hidden(store) == []


@pytest.mark.parametrize("stale", ["of another process", "of another run", "damaged"])
def test_a_stale_checkpoint_of_the_same_step_is_replaced_and_its_owners_are_forgotten(store, monkeypatch, stale):
    save(store, 1, owner="best", run="b" if stale == "of another run" else "a")
    if stale == "of another process":
        new_process(monkeypatch, "bbbb")
    if stale == "damaged":
        flip(store.path(1) / "metadata.json")
    save(store, 1, owner="latest", value=9)
    assert store.restore(1).train["w"] == 9 and hidden(store) == []
    save(store, 2, owner="latest")
    assert store.steps() == [2]


def test_the_steps_an_owner_wants_and_the_metrics_of_a_checkpoint_can_be_queried(store):
    for step in (1, 2):
        save(store, step, keep=[1, 9], metrics={"val": {"loss": step / 2}})
    assert (store.wanted("model"), store.wanted("best")) == ([1, 2], [])
    assert (store.metric(1, "val_loss"), store.metric(1, "loss"), store.metric(9, "val_loss")) == (0.5, None, None)


def test_a_checkpoint_removed_from_outside_is_lost_but_one_no_longer_wanted_is_not(store):
    for step in (1, 2, 3):
        save(store, step, keep=[step - 1])
    shutil.rmtree(store.path(2))
    assert (store.lost("model", [1, 2, 3]), store.lost("best", [1, 2, 3])) == ([2], [])
    (store.directory / "retention.json").unlink()
    assert store.lost("model", [3, 2, 1]) == [1, 2]


def test_a_checkpoint_belongs_to_owners_that_save_it_next_even_if_the_process_dies(store):
    store.save(step=1, train={}, run={}, metadata={"run_id": "a"}, owner="latest", keep=[], also=["best"])
    following = CheckpointStore(store.directory, backend=store.backend)
    assert (following.wanted("latest"), following.wanted("best")) == ([1], [1])
    before = (store.path(1) / "metadata.json").stat().st_ino
    save(store, 1, owner="best")
    assert (store.path(1) / "metadata.json").stat().st_ino == before


def test_what_a_save_gives_up_stays_wanted_until_the_new_checkpoint_exists(store, monkeypatch):
    def die(*arguments, **options):
        raise Killed

    save(store, 1)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(directories, "write_in_place", die)
        save(store, 2)
    assert store.wanted("model") == [1]
    store.retain("best", [])
    assert store.steps() == [1]


def test_retain_changes_the_wanted_steps_without_saving(store):
    for step in (1, 2, 3):
        save(store, step, keep=[1, 2, 3])
    store.retain("best", [1])
    store.retain("model", [3])
    assert store.steps() == [1, 3]


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


@pytest.mark.parametrize("seed", range(4))
def test_retention_is_the_same_with_and_without_reused_listings(seed, tmp_path, monkeypatch):
    """Two owners share the directory, and another program deletes, adds and replaces checkpoints between their saves."""

    def outcome(directory, *, reuses):
        rng, found = np.random.default_rng(seed), []
        stores = {owner: CheckpointStore(directory) for owner in ("model", "best")}
        monkeypatch.setattr(directories, "_MAX_AGE_SECONDS", 1e9 if reuses else -1.0)
        for store in stores.values():
            store.claim("a", overwrite=False)
        kept = {"model": [], "best": []}
        for step in range(0, 60, 2):
            owner = str(rng.choice(["model", "model", "best"]))
            what, other = rng.choice(["nothing", "nothing", "delete", "add older", "add newer", "retain"]), stores["model"].steps()
            if other and what == "delete":
                shutil.rmtree(stores["model"].path(int(rng.choice(other))))
            elif other and what.startswith("add"):
                shutil.copytree(stores["model"].path(other[0]), directory / f"step_{step - 3 if what == 'add older' else step + 5:08d}", dirs_exist_ok=True)
            elif what == "retain":
                kept["best"] = kept["best"][-1:]
                stores["best"].retain("best", kept["best"])
            kept[owner] = [*kept[owner][-2:], step]
            save(stores[owner], step, owner=owner, keep=kept[owner])
            found.append((stores["model"].steps(), stores["model"].owners()))
        return found

    (tmp_path / "a").mkdir()
    assert outcome(tmp_path / "a", reuses=True) == outcome(tmp_path / "b", reuses=False)


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"owners": {"model": 3}, "unknown": []}', "\x00" * 50])
def test_without_readable_retention_nothing_old_is_deleted_until_an_owner_takes_it_over(store, text):
    for step in (1, 2, 3):
        save(store, step, keep=[1, 2, 3])
    file = store.directory / "retention.json"
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    with (
        warnings.catch_warnings()
        if text is None
        else pytest.warns(FitflaxWarning, match="retention.json is damaged, so checkpoints that may still be needed are kept: steps 1, 2\\.")
    ):
        save(store, 4, keep=[3])
    save(store, 5, keep=[4])
    assert store.steps() == [1, 2, 4, 5]
    save(store, 6, keep=[2, 5])
    save(store, 7)
    assert store.steps() == [1, 7]


def test_a_failed_cleanup_is_a_warning_and_the_step_is_saved(store, monkeypatch):
    save(store, 1)
    monkeypatch.setattr(shutil, "rmtree", failing(lambda *args, **kwargs: True, shutil.rmtree))
    with pytest.warns(FitflaxWarning, match="step_00000002 was saved, but .* could not be cleaned up: .*No space left"):
        save(store, 2)
    assert store.steps() == [2]
    monkeypatch.undo()
    store.recover()
    assert hidden(store) == []


def test_a_changed_digit_in_retention_deletes_nothing(store):
    for step in (1, 2, 3):
        save(store, step, keep=[1, 2, 3])
    file = store.directory / "retention.json"
    file.write_text(file.read_text().replace("[1, 2, 3]", "[1, 3, 3]"))
    with pytest.warns(FitflaxWarning, match=r"retention\.json is damaged, so checkpoints that may still be needed are kept: steps 1, 2, 3\."):
        store.retain("best", [])
    assert store.steps() == [1, 2, 3]


@pytest.mark.parametrize(
    "change", [{"owners": {"model": 3}}, {"unknown": ["1"]}, {"saving": {"step": 9, "owner": "model", "instead": None}}, {"newest": None}], ids=str
)
def test_values_of_other_types_in_retention_count_as_damage(store, change):
    save(store, 1)
    note = {"owners": {}, "unknown": [], "newest": 1, **change}
    replace_document(store.directory / "retention.json", note)
    with pytest.warns(FitflaxWarning, match=r"retention\.json is damaged"):
        save(store, 2, keep=[])
    assert store.steps() == [1, 2]


# --- Disk failures ---


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
        assert (runs, store.steps()) in (({"a"}, [10, 20, 30]), ({"b"}, [20]))
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


# --- A single checkpoint at any path ---


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
