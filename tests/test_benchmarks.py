"""The benchmarks, run small. They show times; the tests check only that both sides do the same work and that the table says what was run."""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fitflax

DIRECTORY = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"
SMALL = ["--tiny", "--rounds", "2", "--steps", "6"]
KEYS = {"workload", "rounds", "steps", "base_us", "fit_us", "control_us", "ratio", "control", "limit", "verdict", "start_ms", "losses"}


def load(name):
    spec = importlib.util.spec_from_file_location(name, DIRECTORY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def loop():
    return load("loop")


@pytest.fixture(scope="module")
def checkpoint():
    return load("checkpoint")


def run(loop, path, *arguments):
    loop.main([*SMALL, "--json", str(path), *arguments])
    return json.loads(path.read_text(encoding="utf-8"))


def check(row, workload, limit):
    assert set(row) == KEYS
    assert (row["workload"], row["rounds"], row["steps"], row["limit"]) == (workload, 2, 6, limit)
    assert row["verdict"] in {"ok", "over"}
    assert all(row[key] > 0 for key in ("base_us", "fit_us", "control_us", "start_ms"))
    for ratio in (row["ratio"], row["control"]):
        assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
    assert row["losses"]["fit"] == pytest.approx(row["losses"]["base"], rel=1e-5)
    assert row["losses"]["control"] == row["losses"]["base"]


def test_a_small_run_prints_its_table_and_writes_the_same_numbers(loop, tmp_path, capsys):
    found = run(loop, tmp_path / "numbers.json", "--workload", "mlp")
    (row,) = found["results"]
    check(row, "mlp", 1.15)
    assert found["machine"]["jax"] == jax.__version__ and found["machine"]["fitflax"] == fitflax.__version__
    heading, _, line, *_ = capsys.readouterr().out.splitlines()
    assert heading == "| workload | hand us/step | fit us/step | ratio | control | limit | verdict | start ms |"
    cells = line.strip("| ").split(" | ")
    assert cells[:3] == ["mlp", f"{row['base_us']:.1f}", f"{row['fit_us']:.1f}"] and cells[6] == row["verdict"]


def test_fit_and_the_hand_written_loop_agree_over_several_passes_and_draw_their_bars(loop):
    workload, screen = loop.make_workload("mlp", tiny=True), loop.Screen()
    contenders = loop.against_hand(workload, screen)
    # A pass has 4 batches: runs that end inside one, at its end, and after several.
    for steps in (3, 4, 9):
        fit, hand = contenders["fit"](steps), contenders["base"](steps)
        assert (fit.loss, fit.accuracy) == pytest.approx((hand.loss, hand.accuracy), rel=1e-5)
    assert "Epoch 3: 1/4 |" in screen.getvalue() and "| 0/9 [" in screen.getvalue()


def test_different_work_is_an_error(loop):
    runs = {"base": loop.Run(1.0, 0.0, 0.5, 0.9), "fit": loop.Run(1.0, 0.0, 0.5001, 0.9)}
    with pytest.raises(AssertionError, match="loss and accuracy of fit differ"):
        loop.check_agreement(runs)


def test_the_hand_written_sums_are_those_of_numpy(loop):
    workload = loop.make_workload("mlp", tiny=True)
    optimizer = optax.sgd(0.1)
    x, y = workload.x[:64], workload.y[:64]
    params = workload.module.init(jax.random.key(0), x)["params"]
    logits = np.asarray(workload.module.apply({"params": params}, x), np.float64)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(64), y]
    _, sums = loop.make_hand_step(workload.module, optimizer)((params, optimizer.init(params)), jnp.ones(3), x, y)
    assert sums.tolist() == pytest.approx([losses.sum() + 1, (logits.argmax(axis=1) == y).sum() + 1, 65.0], rel=1e-5)


def test_batches_are_a_permutation_of_whole_batches_in_each_pass(loop):
    workload = loop.make_workload("mlp", tiny=True)
    feed = loop.endless(workload, 0)
    first, second = ([next(feed) for _ in range(4)] for _ in range(2))
    assert [begins for begins, _, _ in first + second] == [True, False, False, False] * 2
    labels = [np.concatenate([y for _, _, y in batches]) for batches in (first, second)]
    assert not np.array_equal(*labels)
    assert np.array_equal(*map(np.sort, labels))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit"), [("cnn", 1.03), ("transformer", 1.03)])
def test_the_other_workloads_run(loop, tmp_path, name, limit):
    (row,) = run(loop, tmp_path / "numbers.json", "--workload", name)["results"]
    check(row, name, limit)


@pytest.mark.slow
@pytest.mark.parametrize(("callback", "limit"), [("tensorboard", 1.03), ("saving", 1.05)])
def test_a_callback_is_compared_with_fit_without_it(callback, limit, loop, tmp_path, capsys):
    (row,) = run(loop, tmp_path / "numbers.json", "--callback", callback)["results"]
    check(row, "digits", limit)
    assert capsys.readouterr().out.startswith("| workload | without us/step | with us/step |")


def test_checkpoints_are_compared_with_the_disk(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "keep_no_memory", lambda: None)  # It would last for all tests after this one.
    monkeypatch.setattr(checkpoint, "peak", lambda *arguments: 1.0)  # A process of its own.
    checkpoint.main(["--quick", "--rounds", "1", "--no-peers", "--directory", str(tmp_path), "--json", str(tmp_path / "numbers.json")])
    rows = json.loads((tmp_path / "numbers.json").read_text(encoding="utf-8"))["results"]
    assert [row["operation"] for row in rows] == ["save", "restore", "snapshot"]
    assert all(0 < row[ratio]["min"] <= row[ratio]["median"] for row in rows for ratio in ("speed", "control"))
    assert capsys.readouterr().out.startswith("| operation | MB x arrays | base MB/s | fitflax MB/s |")
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.json"]


def test_restoring_other_values_is_an_error(checkpoint):
    tree = checkpoint.make_tree(0.01, 3)
    checkpoint.check_same(tree, tree, "itself")
    with pytest.raises(AssertionError, match="somebody restored other values"):
        checkpoint.check_same(tree, checkpoint.make_tree(0.01, 3) | {"layer_1": {"kernel": tree["layer_0"]["kernel"]}}, "somebody")
