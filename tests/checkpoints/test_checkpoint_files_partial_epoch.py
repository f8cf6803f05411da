"""The closing row next to a checkpoint: exact, safe against partly written files, and never a reason to fail."""

import json
import math
from typing import Any

import numpy as np
import pytest

from fitflax.checkpoints import json_documents
from fitflax.checkpoints.checkpoint_files import load_partial_epoch, save_partial_epoch
from fitflax.errors import CheckpointError

LOGS = {"loss": 0.1, "val_loss": math.inf, "tiny": 5e-324, "third": 1 / 3, "whole": 3}


def row_of(epoch: int, logs: dict[str, float] = LOGS) -> dict[str, Any]:
    return {"epoch": epoch, "logs": logs, "earlier": {"val_loss": 1 / 7}}


def test_a_row_round_trips_exactly(tmp_path):
    save_partial_epoch(tmp_path, row_of(7))
    row = load_partial_epoch(tmp_path)
    assert (row["epoch"], row["earlier"]) == (7, {"val_loss": 1 / 7})
    assert {key: float(value).hex() for key, value in row["logs"].items()} == {key: float(value).hex() for key, value in LOGS.items()}
    assert list(row["logs"]) == list(LOGS)


def test_a_nan_round_trips(tmp_path):
    save_partial_epoch(tmp_path, row_of(0, {"loss": math.nan}))
    assert math.isnan(load_partial_epoch(tmp_path)["logs"]["loss"])


def test_arrays_and_the_lists_of_callbacks_round_trip(tmp_path):
    lists = {"worst": ["cat"], "ragged": [[1], [1, 2]], "ids": [1, 2], "scores": [0.1, 1e300], "dicts": [{"a": 1}]}
    save_partial_epoch(tmp_path, row_of(0, {**lists, "array": np.float32([1, math.nan])}))
    logs = load_partial_epoch(tmp_path)["logs"]
    array = logs.pop("array")
    assert logs == lists and array.dtype == np.float32
    np.testing.assert_array_equal(array, [1, math.nan])


def test_nothing_is_loaded_without_a_file(tmp_path):
    assert load_partial_epoch(tmp_path) is None
    assert load_partial_epoch(tmp_path / "nowhere") is None


def test_the_newer_row_replaces_the_older_and_leaves_nothing_else(tmp_path):
    for epoch in (1, 2):
        save_partial_epoch(tmp_path, row_of(epoch))
    assert load_partial_epoch(tmp_path)["epoch"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["closing.json"]


def test_the_file_is_plain_json(tmp_path):
    save_partial_epoch(tmp_path, row_of(1, LOGS | {"nan": math.nan}))

    def reject(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads((tmp_path / "closing.json").read_text(), parse_constant=reject)


def test_any_damage_means_no_row(tmp_path):
    save_partial_epoch(tmp_path, row_of(7))
    file = tmp_path / "closing.json"
    good = file.read_bytes()
    for position in range(len(good)):
        file.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        row = load_partial_epoch(tmp_path)
        assert row is None or row == row_of(7)
        file.write_bytes(good[:position])
        assert load_partial_epoch(tmp_path) is None or not good[position:].strip()


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"7", b'{"epoch": 1}', b"\xff\xfe", b'{"row": 3, "crc32": 0}'])
def test_another_file_of_that_name_means_no_row(content, tmp_path):
    (tmp_path / "closing.json").write_bytes(content)
    assert load_partial_epoch(tmp_path) is None


def test_saving_to_a_checkpoint_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"closing\.json"):
        save_partial_epoch(tmp_path / "gone", row_of(0))


def test_an_intact_document_with_other_contents_means_no_row(tmp_path):
    json_documents.replace_document(tmp_path / "closing.json", {"epoch": 1})
    assert load_partial_epoch(tmp_path) is None


def test_a_half_written_file_of_a_dead_process_is_removed(tmp_path):
    (tmp_path / ".closing.json.tmp-123").write_text("{")
    save_partial_epoch(tmp_path, row_of(1))
    assert [path.name for path in tmp_path.iterdir()] == ["closing.json"]
