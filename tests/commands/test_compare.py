"""`python -m fitflax compare A B`."""

import json

import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.__main__ import main
from fitflax.callbacks import ModelCheckpoint
from fitflax.commands.compare import compare

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
    ):
        with pytest.raises(SystemExit) as ended:
            main(["compare", *arguments])
        assert ended.value.code == 2 and words in capsys.readouterr().err
