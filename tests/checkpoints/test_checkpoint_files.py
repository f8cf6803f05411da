"""One checkpoint directory: its metadata, its backend, and the errors when something is missing."""

import json
import math
import re
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fitflax.checkpoints import CheckpointStore, checkpoint_files
from fitflax.checkpoints.checkpoint_files import CollectiveRead, Saved, read_collectively, read_metadata, read_state, write_checkpoint
from fitflax.checkpoints.json_documents import replace_document
from fitflax.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, FitflaxWarning
from tests.checkpoints.samples import METADATA, read


def test_metadata_starts_with_the_version_and_ends_with_its_checksum(directory):
    keys = list(json.loads((directory / "metadata.json").read_text()))
    assert keys == ["format_version", *METADATA, "versions", "backend", "key_impls", "arrays", "structure_crc32", "state_bytes", "crc32"]
    metadata = read_metadata(directory)
    assert {key: metadata[key] for key in METADATA} == METADATA
    assert metadata["versions"]["jax"] == jax.__version__ and list(metadata["versions"]) == ["fitflax", "jax", "flax", "optax", "numpy"]
    assert metadata["arrays"]["train/params/Dense_0/kernel"] | {"crc32": 0} == {"shape": [3, 4], "dtype": "bfloat16", "crc32": 0}


def test_metadata_has_a_line_for_each_metric_group_history_row_and_array(directory):
    lines = (directory / "metadata.json").read_text().splitlines()
    assert '    "train": {"loss": 0.5}' in lines
    assert '    {"epoch": 0, "loss": 0.75}' in lines
    assert sum('"dtype"' in line for line in lines) == len(read_metadata(directory)["arrays"])


def test_a_version_given_by_the_caller_is_kept(tmp_path):
    write_checkpoint(tmp_path, train={}, run={}, metadata={"versions": {"fitflax": "1.2", "grain": "0.2"}})
    versions = read_metadata(tmp_path)["versions"]
    assert (versions["fitflax"], versions["grain"], versions["numpy"]) == ("1.2", "0.2", np.__version__)


def test_nonfinite_numbers_are_strings_on_disk_and_strings_like_them_stay_strings(tmp_path):
    metadata = {
        "metrics": {"train": {"a": math.nan, "b": math.inf, "c": -math.inf}},
        "settings": {"note": "NaN", "notes": ["~NaN", "~~-Infinity", "Infinity", "nan", "~", ""], "clip": math.inf},
    }
    write_checkpoint(tmp_path, train={}, run={}, metadata=metadata)
    on_disk = json.loads((tmp_path / "metadata.json").read_text(), parse_constant=pytest.fail)
    assert on_disk["metrics"] == {"train": {"a": "NaN", "b": "Infinity", "c": "-Infinity"}}
    assert repr({key: read_metadata(tmp_path)[key] for key in metadata}) == repr(metadata)


def test_numpy_scalars_and_tuples_are_accepted_in_metadata(tmp_path):
    metadata = {
        "a": np.float32(0.5),
        "b": np.int64(3),
        "c": np.bool_(True),
        "d": np.array(2.0),
        "e": (1, jnp.float32(math.nan)),
        "f": ml_dtypes.bfloat16(1),
        5: 1,
    }
    write_checkpoint(tmp_path, train={}, run={}, metadata=metadata)
    found = read_metadata(tmp_path)
    assert repr([found[key] for key in "abcdef5"]) == "[0.5, 3, True, 2.0, [1, nan], 1.0, 1]"


def test_nothing_is_written_when_something_cannot_be_saved(tmp_path):
    with pytest.raises(CheckpointError):
        write_checkpoint(tmp_path, train={}, run={"x": object()}, metadata={})
    with pytest.raises(CheckpointError, match=r"metadata\['a'\]\[1\] is of type object, which JSON does not support"):
        write_checkpoint(tmp_path, train={}, run={}, metadata={"a": [1, object()]})
    with pytest.raises(CheckpointError, match="metadata must not contain arrays, crc32, which the checkpoint format uses"):
        write_checkpoint(tmp_path, train={}, run={}, metadata={"crc32": 1, "arrays": {}})
    assert list(tmp_path.iterdir()) == []


def test_the_backend_that_wrote_the_state_reads_it(directory, monkeypatch):
    calls = []

    def read_something(path, metadata, *, roots):
        calls.append((path, metadata["extra"], roots))
        return {"run": 1}

    backend = types.ModuleType("other")
    backend.METADATA_KEYS, backend.FILES, backend.read_state = {"extra": list}, (), read_something
    backend.write_state = lambda path, train, run: {"extra": [sorted(train.tree), run.tree]}
    monkeypatch.setitem(checkpoint_files.BACKENDS, "other", backend)
    write_checkpoint(directory, train={"w": jnp.ones(1)}, run=(1,), metadata={}, backend="other")
    metadata = read_metadata(directory)
    assert (metadata["backend"], metadata["extra"]) == ("other", [["w"], [1]]) and "arrays" not in metadata
    assert read_state(directory, metadata, roots=["run"]) == {"run": 1}
    assert calls == [(directory, [["w"], [1]], ["run"])]
    with pytest.raises(CheckpointError, match="metadata must not contain extra, which the checkpoint format uses"):
        write_checkpoint(directory, train={}, run={}, metadata={"extra": 1})
    monkeypatch.delitem(checkpoint_files.BACKENDS, "other")
    with pytest.raises(
        CheckpointError, match=r"metadata.json has the backend 'other', but this version of fitflax reads .*'msgpack'.*Use the version that wrote it"
    ):
        read_metadata(directory)


def test_an_unknown_backend_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"backend must be 'msgpack' or 'orbax'\. Received: 'pickle'"):
        write_checkpoint(tmp_path, train={}, run={}, metadata={}, backend="pickle")
    assert list(tmp_path.iterdir()) == []


def test_the_directory_is_synced_to_disk_after_its_files(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(checkpoint_files, "fsync_directory", lambda path: synced.append((path, sorted(entry.name for entry in path.iterdir()))))
    write_checkpoint(tmp_path, train={}, run={}, metadata={})
    assert synced == [(tmp_path, ["metadata.json", "state.msgpack"])]


@pytest.mark.parametrize("name", ["metadata.json", "state.msgpack"])
def test_missing_and_empty_files_are_named(directory, name):
    (directory / name).write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=f"{name} is empty"):
        read(directory)
    (directory / name).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{name} is missing"):
        read(directory)


def test_metadata_that_lacks_what_its_backend_needs_is_reported_as_damaged(directory):
    path = directory / "metadata.json"
    document = json.loads(path.read_text())
    for key in ("backend", "key_impls", "arrays", "structure_crc32", "state_bytes"):
        replace_document(path, {name: value for name, value in document.items() if name not in {key, "format_version", "crc32"}})
        with pytest.raises(CorruptCheckpointError, match=f"metadata.json is damaged: it lacks {key}"):
            read_metadata(directory)


def test_a_directory_that_does_not_exist_is_not_found(directory):
    with pytest.raises(CheckpointNotFoundError, match=r"There is no checkpoint directory .*nowhere"):
        read_metadata(directory / "nowhere")
    with pytest.raises(CheckpointNotFoundError, match="it is a file"):
        read_metadata(directory / "metadata.json")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda text: text[:-9], "is not JSON"),
        (lambda text: "[" * 100000, "is not JSON"),
        (lambda text: "[1]", "it has no format_version"),
        (lambda text: text.replace('"step": 7', '"step": 8'), "its checksum does not match its contents"),
        (lambda text: text.replace("  ", "\t", 1), "its checksum does not match its contents"),
        (lambda text: text.replace("0.5", "NaN"), "Out of range float|its checksum does not match its contents"),
        (lambda text: text.replace("0.5", "1e999"), "damaged"),
        (lambda text: text.replace("0.5", "é"), "is not JSON"),
    ],
)
def test_changed_metadata_is_refused(directory, change, match):
    path = directory / "metadata.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(CorruptCheckpointError, match=match):
        read_metadata(directory)


def test_the_error_for_a_newer_format_names_the_version_that_can_be_read(directory):
    path = directory / "metadata.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(CheckpointError, match="has format version 2, but this version of fitflax reads 1") as caught:
        read_metadata(directory)
    assert not isinstance(caught.value, CorruptCheckpointError)


# -- what processes find together --


def test_a_store_reports_damage_to_others_and_skips_what_is_damaged_elsewhere(tmp_path):
    store = CheckpointStore(tmp_path)
    store.claim("a", overwrite=False)
    for step in (1, 2, 3):
        store.save(step=step, train={"w": 1.0}, run={}, metadata={"run_id": "a", "step": step}, owner="me", keep=[1, 2, 3])
    (store.path(3) / "metadata.json").write_text("{")
    together = CollectiveRead((0, 2), set())
    saved, skipped = store.newest_good(together=together)
    assert saved.metadata["step"] == 2 and together.damaged == {3} and len(skipped) == 1
    together.damaged.add(2)
    saved, skipped = store.newest_good(together=together)
    assert saved.metadata["step"] == 1 and skipped == []


def two_processes(monkeypatch, others):
    """Makes this process the first of two, and returns what it sends; `others` yields what the second one sends."""
    sent = []

    def exchange(value, topic):
        sent.append(value)
        return [value, next(others)]

    monkeypatch.setattr(checkpoint_files, "exchange", exchange)
    monkeypatch.setattr(checkpoint_files, "after_first", lambda make: make())
    return sent


def finds(*steps, damaged=()):
    """Returns a function that finds the newest of some steps."""

    def find(together):
        left = sorted(set(steps) - together.damaged, reverse=True)
        for step in left:
            if step not in damaged:
                return Saved(path=None, metadata={"step": step}, train={}, run={})
            together.damaged.add(step)
        return None

    return find


def says(step, damaged=(), fault=None):
    return {"step": step, "digest": None, "damaged": list(damaged), "fault": fault}


def test_what_another_process_finds_damaged_is_skipped_by_all(monkeypatch):
    sent = two_processes(monkeypatch, iter([says(5, [7]), says(5, [7])]))
    with pytest.warns(FitflaxWarning, match=re.escape("Another process found that the checkpoints of these steps are damaged, so they are skipped: [7].")):
        assert read_collectively(finds(3, 5, 7), num_processes=2).metadata["step"] == 5
    assert sent == [says(7), says(5, [7])]
    sent = two_processes(monkeypatch, iter([says(7), says(5, [7])]))
    assert read_collectively(finds(3, 5, 7, damaged=[7]), num_processes=2).metadata["step"] == 5
    sent = two_processes(monkeypatch, iter([says(7), says(None, [7])]))
    assert read_collectively(finds(7, damaged=[7]), num_processes=2) is None and sent[0] == says(None, [7])


def test_different_directories_or_a_failure_in_one_process_are_an_error_in_all(monkeypatch):
    two_processes(monkeypatch, iter([says(None)]))
    with pytest.raises(CheckpointError, match=r"Use one directory that all processes share\. Steps by process: \{0: 7, 1: None\}\."):
        read_collectively(finds(7), num_processes=2)
    two_processes(monkeypatch, iter([says(None, fault="step_00000007 is damaged")]))
    with pytest.raises(CheckpointError, match="another process could not read the checkpoint: process 1: step_00000007 is damaged"):
        read_collectively(finds(7), num_processes=2)

    def fail(together):
        raise CorruptCheckpointError("here")

    two_processes(monkeypatch, iter([says(7)]))
    with pytest.raises(CorruptCheckpointError, match="here"):
        read_collectively(fail, num_processes=2)
    assert read_collectively(lambda together: together, num_processes=1) is None
