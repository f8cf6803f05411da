"""`python -m fitflax checkpoints DIR`."""

import dataclasses
import json
import math
import pathlib
import re
import subprocess
import sys

import pytest

from fitflax.__main__ import main
from fitflax.checkpoints import CheckpointStore
from fitflax.checkpoints.store.listing import list_checkpoints
from fitflax.commands.checkpoints import table


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> pathlib.Path:
    store = CheckpointStore(tmp_path / "run")
    store.claim("run", overwrite=False)
    for step, loss in ((10, 0.5), (20, math.nan)):
        metadata = {"run_id": "run", "step": step, "metrics": {"train": {"loss": 1.0}, "val": {"loss": loss}}}
        store.save(step=step, train={"w": 1.0}, run={}, metadata=metadata, owner="ModelCheckpoint", keep=[10, 20])
    store.retain("BestCheckpoint(val_loss)", [10])
    return tmp_path / "run"


def damage(directory: pathlib.Path) -> None:
    path = directory / "step_00000010" / "state.msgpack"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_each_checkpoint_has_a_line(directory, capsys):
    assert main(["checkpoints", str(directory)]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "age", "size", "metrics", "kept", "by", "state"]
    assert first.startswith("10 ") and "loss 1, val_loss 0.5" in first and "ModelCheckpoint" in first and first.endswith("not verified")
    assert second.startswith("20 (latest)") and "val_loss nan" in second


def test_a_damaged_checkpoint_is_found_and_sets_the_exit_status(directory, capsys):
    assert main(["checkpoints", str(directory), "--verify"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["state", "ok", "ok"]
    damage(directory)
    assert main(["checkpoints", str(directory)]) == 0  # Nothing was verified.
    capsys.readouterr()
    assert main(["checkpoints", str(directory), "--verify"]) == 1
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert "step_00000010" in first and second.endswith("ok")


def test_metadata_that_cannot_be_read_is_damage_even_without_verify(directory, capsys):
    (directory / "step_00000010" / "metadata.json").write_text("{}")
    assert main(["checkpoints", str(directory)]) == 1


def test_json_is_printed_for_programs(directory, capsys):
    assert main(["checkpoints", str(directory), "--verify", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [(row["step"], row["is_latest"], row["state"], row["metrics"]["val_loss"]) for row in rows] == [(10, False, "ok", 0.5), (20, True, "ok", "nan")]
    assert rows[0]["num_bytes"] == sum(file.stat().st_size for file in (directory / "step_00000010").iterdir())
    assert rows[0]["kept_by"] == ["BestCheckpoint(val_loss)", "ModelCheckpoint"]


def test_an_empty_directory_is_not_damage_and_a_missing_directory_is_a_usage_error(tmp_path, capsys):
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert "contains no checkpoints" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["checkpoints", str(tmp_path / "nowhere")])
    assert "nowhere is not a directory" in capsys.readouterr().err


@pytest.mark.slow
def test_it_runs_as_a_module(directory, process_env):
    damage(directory)
    command = [sys.executable, "-m", "fitflax", "checkpoints", str(directory), "--verify"]
    result = subprocess.run(command, env=process_env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and "20 (latest)" in result.stdout


@pytest.mark.parametrize(("seconds", "age"), [(0, "0 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (86400, "1 d"), (40 * 86400, "40 d")])
def test_an_age_is_shown_in_the_largest_unit_that_it_fills(seconds, age, directory):
    row = dataclasses.replace(list_checkpoints(directory)[0], age_seconds=seconds)
    assert re.search(rf"  {age}  ", table([row]))
