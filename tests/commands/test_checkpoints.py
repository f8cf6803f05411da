"""`python -m fitflax checkpoints DIR` and `python -m fitflax compare A B`."""

import dataclasses
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.__main__ import main
from fitflax.callbacks import ModelCheckpoint
from fitflax.checkpoints import CheckpointStore
from fitflax.checkpoints.checkpoint_store import list_checkpoints
from fitflax.commands.checkpoints import compare, table
from tests.checkpoints.stores import save


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


@pytest.mark.parametrize("method", ["size_and_time", "verify"])
def test_checkpoints_that_a_run_replaces_meanwhile_are_left_out(method, directory, capsys, monkeypatch):
    whole = getattr(CheckpointStore, method)

    def slow(store, step):
        if step < 30:  # As if the run saved step 30, with keep=1.
            for other in (10, 20):
                shutil.rmtree(store.path(other), ignore_errors=True)
            save(store, 30)
        return whole(store, step)

    monkeypatch.setattr(CheckpointStore, method, slow)
    assert main(["checkpoints", str(directory), "--verify"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step", "30"]


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


# --- `python -m fitflax compare A B` ---


X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def train(directory, *, seed=0, steps=2, **options):
    trainer = fitflax.Trainer(nn.Dense(1), seed=seed)
    trainer.compile("adam", "mse")
    trainer.fit(X, Y, steps=steps, batch_size=8, callbacks=[ModelCheckpoint(directory)], verbose=0, **options)
    return trainer


def test_equal_runs_have_no_differences_and_other_runs_list_theirs(tmp_path, capsys):
    for name, options in (("a", {}), ("same", {}), ("b", {"seed": 1, "config": {"rate": 0.1}})):
        train(tmp_path / name, **options)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "same")]) == 0
    assert "\n0 of " in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--only", "params", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(row["path"], row["what"]) for row in found["differences"]] == [("params/bias", "values"), ("params/kernel", "values")]
    assert found["settings"]["config/rate"] == [None, 0.1]
    kernel = found["differences"][1]
    read = [fitflax.checkpoints.CheckpointStore(tmp_path / name).restore(2).train["params"]["kernel"] for name in "ab"]
    assert kernel["largest"] == pytest.approx(np.abs(read[0] - read[1]).max()) and kernel["num_different"] == kernel["num_elements"] == 3
    assert kernel["relative"] == pytest.approx(np.abs(read[0] - read[1]).max() / np.abs(read[0]).max())
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--only", "params", "--atol", "10"]) == 0


def test_a_checkpoint_can_be_compared_with_a_file_of_its_weights(tmp_path, capsys):
    trainer = train(tmp_path / "run")
    trainer.save_weights(tmp_path / "model.safetensors")
    assert main(["compare", str(tmp_path / "run" / "step_00000002"), str(tmp_path / "model.safetensors"), "--only", "params"]) == 0
    assert main(["compare", str(tmp_path / "run"), str(tmp_path / "model.safetensors")]) == 1
    assert capsys.readouterr().out.count("only in A") == 9


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (np.float32([1, np.nan]), np.float32([1, np.nan]), None),
        (np.float32([1, np.inf]), np.float32([1, 2]), ("values", 1, np.inf)),
        (np.float32([1, 2]), np.float32([[1, 2]]), ("shape", 0, np.nan)),
        (np.float32([1, 2]), np.float16([1, 2]), ("dtype", 0, np.nan)),
        (np.array([1, 2], ml_dtypes.bfloat16), np.array([1, 2.5], ml_dtypes.bfloat16), ("values", 1, 0.5)),
        (np.array([1, 2], ml_dtypes.float8_e4m3fn), np.array([1, 2], ml_dtypes.float8_e4m3fn), None),
        (np.int64([2**62]), np.int64([2**62 + 1]), ("values", 1, 0.0)),  # The difference is too small for a float64, but it is a difference.
        (np.array([True, False]), np.array([True, True]), ("values", 1, 1.0)),
        (np.complex64([1j]), np.complex64([2j]), ("values", 1, 1.0)),
        (np.zeros((0, 2)), np.zeros((0, 2)), None),
        (3, 4, ("values", 1, 1.0)),
        (None, None, None),
        ("a", "b", ("values", 0, np.nan)),
    ],
    ids=["nan", "infinite", "shape", "dtype", "bfloat16", "float8", "int64", "bool", "complex", "empty", "number", "none", "text"],
)
def test_every_kind_of_leaf_is_compared(one, other, expected):
    found = compare({"leaf": one}, {"leaf": other})
    assert [(each.what, each.num_different, each.largest) for each in found] == ([] if expected is None else [pytest.approx(expected, nan_ok=True)])


def test_inputs_that_cannot_be_compared_are_one_clear_error(tmp_path, capsys):
    train(tmp_path / "a")
    for arguments, words in (
        (["nowhere", str(tmp_path / "a")], "There is no checkpoint at nowhere"),
        ([str(tmp_path / "a")] * 2 + ["--only", "parms"], "Did you mean 'params"),
        ([str(tmp_path / "a")] * 2 + ["--only", "params/kernl"], "Did you mean 'params/kernel'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["compare", *arguments])
        assert ended.value.code == 2 and words in capsys.readouterr().err
