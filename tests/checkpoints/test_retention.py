"""Which checkpoints are kept: the steps that each owner wants, and what happens if `retention.json` is missing or damaged."""

import shutil
import warnings

import numpy as np
import pytest

from fitflax.checkpoints import directories
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.checkpoints.json_documents import replace_document
from fitflax.errors import FitflaxWarning
from tests.checkpoints.stores import Killed, flip, hidden, new_process, save


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
