"""The benchmarks at a small size. They measure times; these tests check that all peers do the same work, and that tables and verdicts report what was found."""

import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from benchmarks import checkpoint, compare, eager, pause, plots, processes, report, run, scaling, tuning, weights, workloads
from benchmarks import input as pipelines
from benchmarks.peers import PEERS, Setup, Unavailable, fit, hand, peers_of
from benchmarks.real import __main__ as real
from benchmarks.real import contenders as real_contenders
from benchmarks.real.contenders import CONTENDERS
from benchmarks.real.worker import carry_out
from benchmarks.real.workloads import RealWorkload, Size
from benchmarks.real.workloads import make_data as make_real_data
from benchmarks.real.workloads import workload_of as real_workload
from benchmarks.worker import open_screen
from benchmarks.workloads import initial, make_data, make_workload
from fitflax.checkpoints import saver
from fitflax.checkpoints.memory import DeviceRoom
from fitflax.checkpoints.saver import Snapshots
from fitflax.parallel import DataParallel

pytestmark = pytest.mark.optimized
ROOT = pathlib.Path(__file__).resolve().parent.parent
EXACT = ("jit", "pmap", "scan", "fit")
WITH_NNX = ("fit_nnx", "nnx", "nnx_split")
REAL_MODE = {"resnet50": {"train": False}}
MEASURED_IN_FIT = (("step during a save", ", s"), ("other steps", ", s"), ("save", " during training, s"), ("throughput", " during training, MB/s"))
TRAINED = tuple(name for name in workloads.NAMES if name != "digits")


@pytest.fixture
def setup(tmp_path):
    with open_screen(tmp_path / "screen") as screen:
        yield Setup(screen, tmp_path, own_parameters=False)


def make(peer, workload, setup):
    return {"hand": hand, "fit": fit}[PEERS[peer].module].make(workload, setup, **PEERS[peer].options)


def check_agreement(workload, setup, peers):
    """Checks that all peers train to the same values over several calls, of one pass and of more, and then evaluate and predict the same."""
    contenders = {peer: make(peer, workload, setup) for peer in peers}
    for passes in (1, 2):
        found = {peer: contender.train(passes) for peer, contender in contenders.items()}
        for peer in peers:
            assert found[peer].values == pytest.approx(found[peers[0]].values, rel=1e-5, abs=1e-5), peer
            assert found[peer].seconds > 0 <= found[peer].start_seconds
    for do in ("evaluate", "predict"):
        read = {peer: getattr(contender, do)().values for peer, contender in contenders.items() if PEERS[peer].evaluates}
        assert all(values == pytest.approx(read["jit"], rel=1e-5, abs=1e-5) for values in read.values())


# -- the peers that run in this process --


@pytest.mark.slow
def test_the_hand_written_loops_and_fit_agree_and_draw_their_progress_bars(setup):
    check_agreement(make_workload("tiny", small=True), setup, (*EXACT, "fit16", "fit_iterator", *WITH_NNX))
    drawn = (setup.directory / "screen").read_text(encoding="utf-8")
    assert "Epoch 2: 64/64 |" in drawn and " 64/64 [" in drawn and "Evaluation: 64/64 |" in drawn


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lm", "many_leaves"])  # The others are dense layers, too.
def test_the_hand_written_loops_and_fit_agree_on_the_other_workloads(name, setup):
    check_agreement(make_workload(name, small=True), setup, ("jit", "fit", *(["fit_nnx"] if "fit_nnx" in peers_of(name) else [])))


def test_nnx_peers_are_unavailable_for_a_workload_without_an_nnx_module(setup):
    for peer in WITH_NNX:
        with pytest.raises(Unavailable, match="no NNX module for cnn"):
            make(peer, make_workload("cnn", small=True), setup)


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "name"), [("fit+callbacks", "tiny"), ("fit+tensorboard", "digits"), ("fit+saving", "digits")])
def test_callbacks_do_not_affect_training_and_leave_no_files(peer, name, setup):
    workload = make_workload(name, small=True)
    without, with_callbacks = make("fit", workload, setup), make(peer, workload, setup)
    for _ in range(2):
        assert with_callbacks.train(1).values == without.train(1).values
    assert [path.name for path in setup.directory.iterdir()] == ["screen"]


def test_an_option_that_compile_does_not_take_makes_a_peer_unavailable(setup):
    with pytest.raises(Unavailable, match="not built: compile\\(\\) takes no steps_in_a_row"):
        fit.make(make_workload("tiny", small=True), setup, steps_in_a_row=16)


@pytest.mark.slow
def test_the_first_step_is_reported_once(setup):
    reported = []
    workload = make_workload("tiny", small=True)
    for contender in (make("jit", workload, setup), make("fit", workload, setup._replace(own_parameters=True))):
        contender.train(1, lambda: reported.append(True))
        assert reported == [True]
        reported.clear()


@pytest.mark.slow
def test_the_hand_written_sums_match_numpy():
    workload = make_workload("tiny", small=True)
    x, y = (array[:8] for array in make_data(workload))
    module, optimizer = hand.make_module(workload), optax.sgd(0.1)
    params = module.init(jax.random.key(0), x)["params"]
    logits = np.asarray(module.apply({"params": params}, x), np.float64)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(8), y]
    _, sums = hand.compile_step(module, optimizer, "jit")((params, optimizer.init(params)), jnp.ones(3), x, y)
    assert sums.tolist() == pytest.approx([losses.sum() + 1, (logits.argmax(axis=1) == y).sum() + 1, 9.0], rel=1e-5)


def test_each_pass_uses_all_examples_in_a_different_order():
    first, second = workloads.order(0, 512), workloads.order(1, 512)
    assert not np.array_equal(first, second)
    assert np.array_equal(np.sort(first), np.arange(512)) and np.array_equal(np.sort(second), np.arange(512))


# -- workloads --


@pytest.mark.slow
def test_passes_divide_into_calls_of_sixteen_steps_and_sizes_match_their_names():
    for name in workloads.NAMES:
        assert all(make_workload(name, small=small).steps % 16 == 0 for small in (False, True))
    sizes = {
        name: jax.eval_shape(hand.make_module(make_workload(name)).init, jax.random.key(0), make_data(make_workload(name))[0][:1])
        for name in ("wide", "many_leaves")
    }
    assert sum(leaf.size for leaf in jax.tree.leaves(sizes["wide"])) * 4 == pytest.approx(100e6, rel=0.02)
    assert len(jax.tree.leaves(sizes["many_leaves"])) == 2000


def test_shared_parameters_depend_only_on_their_path():
    assert np.array_equal(initial("head/kernel", (64, 10)), initial("head/kernel", (64, 10)))
    assert not np.array_equal(initial("head/kernel", (64, 10)), initial("body/kernel", (64, 10)))
    assert not initial("head/bias", (10,)).any() and (initial("norm/scale", (10,)) == 1).all()
    assert initial("head/kernel", (64, 10)).std() == pytest.approx(1 / 8, rel=0.1)


# -- ratios and verdicts --

TIMES = {
    "train": {
        "control": [(1.0, 1.0, 1.0, 1.0), (1.0, 1.1, 1.1, 1.0), (2.0, 2.0, 2.0, 2.0)],
        "scan": [(1.0, 0.2, 0.2, 1.0)] * 3,
        "fit": [(1.0, 1.2, 1.2, 1.0), (1.0, 1.0, 1.2, 1.0), (1.0, 1.3, 1.3, 1.0)],
        "fit16": [(1.0, 0.3, 0.3, 1.0)] * 3,
        "keras": [(1.0, 0.6, 0.6, 1.0)] * 3,
    }
}


def test_a_ratio_is_computed_from_the_sums_of_a_round():
    assert compare.ratio(TIMES, "train", "fit") == (1.2, 1.1, 1.3)
    assert compare.ratio(TIMES, "train", "fit16", "scan").median == pytest.approx(1.5)
    assert compare.ratio(TIMES, "train", "pmap") is None and compare.ratio(TIMES, "evaluate", "fit") is None
    assert compare.microseconds(TIMES, "train", "fit", 100) == pytest.approx(12000)
    assert compare.microseconds(TIMES, "train", "control", 100, base=True) == pytest.approx(10000)
    assert compare.extra_us(TIMES, "fit", 1000).median == pytest.approx(200)


def test_verdicts_use_the_larger_of_the_limit_and_the_control():
    found = {claim.what: claim for claim in compare.claims("mlp", TIMES, 1000)}
    assert {what: claim.verdict for what, claim in found.items()} == {
        "fit / jit": "over",
        "evaluate: fit / jit": "not measured",
        "predict: fit / jit": "not measured",
        "fit16 / scan": "over",
        "fit16 / keras, 1.10 times as fast": "ok",
    }
    noisy = TIMES["train"] | {"control": [(1.0, 1.25, 1.25, 1.0)] * 3}
    assert next(iter(compare.claims("mlp", {"train": noisy}, 1000))).verdict == "ok"
    with_nnx = {"train": TIMES["train"] | {"fit_nnx": [(1.0, 1.2, 1.2, 1.0)] * 3, "nnx": [(1.0, 3.0, 3.0, 1.0)] * 3}}
    found = {claim.what: claim for claim in compare.claims("mlp", with_nnx, 1000)}
    assert found["fit_nnx / fit"].found.median == pytest.approx(1.2 / 1.2) and found["fit_nnx / fit"].verdict == "ok"
    assert found["fit_nnx / nnx"].found.median == pytest.approx(0.4) and found["evaluate: fit_nnx / nnx"].verdict == "not measured"
    with_iterator = {"train": TIMES["train"] | {"fit_iterator": [(1.0, 1.4, 1.4, 1.0)] * 3}}
    found = {claim.what: claim for claim in compare.claims("mlp", with_iterator, 1000)}
    assert found["fit_iterator / jit"].found.median == pytest.approx(1.4) and found["fit_iterator / jit"].verdict == "over"
    tiny = {claim.what: claim for claim in compare.claims("tiny", TIMES, 10_000)}
    assert tiny["fit - jit"].found.median == pytest.approx(20) and tiny["fit - jit"].verdict == "ok"
    assert tiny["fit16 / jit, 2.5 times as fast"].verdict == "ok"
    assert tiny["fit16 / scan"].limit == 1.2 and tiny["fit16 / scan"].verdict == "over"
    assert [claim.what for claim in compare.claims("digits", TIMES, 1)] == ["fit+tensorboard / fit", "fit+saving / fit"]


def test_different_work_is_detected_by_its_values():
    base = {"loss": 0.5, "accuracy": 0.9}
    assert compare.disagreement({"loss": 0.500004, "accuracy": 0.901}, base, exact=True) is None
    assert compare.disagreement({"loss": 0.5, "accuracy": 0.91}, base, exact=True) == "accuracy is 0.91 instead of 0.9"
    assert compare.disagreement({"outputs": 1.0001}, {"outputs": 1.0}, exact=True) == "outputs is 1.0001 instead of 1"
    assert compare.disagreement({"loss": 0.5001, "accuracy": 0.9}, base, exact=True) == "loss is 0.5001 instead of 0.5"
    assert compare.disagreement({"loss": 0.5001, "accuracy": 0.9}, base, exact=True, device="NVIDIA H100") is None
    assert compare.disagreement({"loss": 0.51, "accuracy": 0.9}, base, exact=True, device="NVIDIA H100") == "loss is 0.51 instead of 0.5"
    assert compare.disagreement({"loss": 0.55, "accuracy": 0.1}, base, exact=False) is None
    assert compare.disagreement({"loss": float("nan"), "accuracy": 0.9}, base, exact=False) == "loss is nan instead of 0.5"


def test_the_peers_of_each_workload_start_with_its_base_and_control():
    assert peers_of("mlp")[:2] == ("jit", "control") and "fit+saving" not in peers_of("mlp")
    assert set(peers_of("mlp")) - set(peers_of("many_leaves")) == {"pmap", "fit+callbacks", "fit_iterator", *WITH_NNX}
    assert peers_of("digits") == ("fit", "fit_again", "fit+tensorboard", "fit+saving")


# -- the harness --


@pytest.mark.slow
def test_a_small_run_in_processes_prints_its_tables_and_writes_the_same_numbers(tmp_path, capsys):
    path = tmp_path / "numbers.json"
    assert run.main(["--small", "--quick", "--workload", "tiny", "--peers", "fit", "--rounds", "2", "--json", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["machine"]["jax"] == importlib.metadata.version("jax")
    (result,) = found["results"]
    assert (result["workload"], result["base"], result["rounds"], result["steps"]) == ("tiny", "jit", 2, 64)
    peers = result["peers"]
    assert list(peers) == ["jit", "fit"]
    assert all(peers["fit"]["values"][do] == pytest.approx(peers["jit"]["values"][do], rel=1e-5) for do in ("train", "evaluate", "predict"))
    for do in ("train", "evaluate", "predict"):
        ratio = peers["fit"][do]["ratio"]
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert all(peers[name][do]["us"] > 0 for name in peers)
    assert [claim["verdict"] in {"ok", "over"} for claim in result["claims"]] == [True, True, True, False, False, False]
    printed = capsys.readouterr().out
    assert printed.startswith("## tiny") and f"| jit | {peers['jit']['train']['us']:.1f} |" in printed


@pytest.mark.slow
def test_a_peer_that_dies_raises_an_error_with_its_last_message():
    with run.Worker("jit", "tiny", "--small") as worker:
        worker.get_ready()
        with pytest.raises(run.WorkerError, match="ended with: KeyError: 'sing'"):
            worker.ask("sing", passes=1)


def test_a_peer_that_does_not_answer_is_not_waited_for_forever():
    with run.Worker("jit", "tiny", "--small") as worker, pytest.raises(run.WorkerError, match="no answer within 0 s"):
        worker.read(0.0)
    assert worker._process.returncode is not None


def test_results_are_written_by_workload_and_the_others_are_kept():
    text = report.merged("", {"lm": "## lm\n\nold\n"})
    text = report.merged(text, {"tiny": "## tiny\n\nnew\n"})
    assert text == f"{report.PREAMBLE}\n## tiny\n\nnew\n\n## lm\n\nold\n"
    assert report.merged(text, {"lm": "## lm\n\nnew\n"}) == text.replace("old", "new")
    assert report.merged((ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8"), {}).startswith(report.PREAMBLE)


def test_only_complete_measurements_are_written(capsys):
    for flag in (["--small"], ["--peers", "fit"]):
        with pytest.raises(SystemExit):
            run.main(["--write", *flag])
        assert "--write cannot be combined with" in capsys.readouterr().err


@pytest.mark.slow
def test_whole_processes_are_timed(tmp_path):
    for peer in ("jit", "fit"):
        found = run.run_process(peer, make_workload("tiny"), small=True)
        assert 0 < found["first_step_s"] < found["process_s"]
        assert 50 < found["peak_mb"] < 5000


@pytest.mark.slow
@pytest.mark.parametrize(("name", "peers"), [("tiny", ("keras", "keras16", "lightning")), ("lm", ("keras", "lightning"))])
def test_other_frameworks_train_the_same_models_about_as_well(name, peers):
    here = tuple(peer for peer in peers if importlib.util.find_spec(peer.removesuffix("16")))
    if not here:
        pytest.skip("neither Keras nor Lightning is installed")
    field = run.Field(make_workload(name, small=True), ("jit", *here), small=True)
    with run.ExitStack() as stack:
        field.start(stack)
    assert field.missing == {} and list(field.values) == ["jit", *here]


@pytest.mark.slow
def test_a_peer_reports_that_its_package_is_missing():
    if importlib.util.find_spec("lightning") or importlib.util.find_spec("pytorch_lightning"):
        pytest.skip("Lightning is installed")
    with run.Worker("lightning", "tiny", "--small") as worker:
        worker.get_ready()
    assert worker.missing in {"torch is not installed", "neither lightning nor pytorch_lightning is installed"}


def test_the_harness_imports_no_framework():
    code = "import sys, benchmarks.run; sys.exit(any(name in sys.modules for name in ('jax', 'keras', 'torch', 'fitflax')))"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False).returncode == 0


# -- checkpoints --


@pytest.mark.slow
def test_checkpoints_are_compared_with_the_disk(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "keep_no_memory", lambda: None)  # It would affect all later tests.
    monkeypatch.setattr(checkpoint, "peak", lambda *arguments: 1.0)  # It starts a process.
    checkpoint.main(["--quick", "--rounds", "1", "--no-peers", "--directory", str(tmp_path), "--json", str(tmp_path / "numbers.json")])
    rows = json.loads((tmp_path / "numbers.json").read_text(encoding="utf-8"))["results"]
    assert [row["operation"] for row in rows] == ["save", "restore", "snapshot"]
    assert all(0 < row[ratio]["min"] <= row[ratio]["median"] for row in rows for ratio in ("speed", "control"))
    assert capsys.readouterr().out.startswith("| operation | MB x arrays | base MB/s | fitflax MB/s |")
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.json"]


@pytest.mark.slow
def test_pauses_of_training_are_compared_with_a_copy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "pause_part", lambda part, rounds, parent, quick: pause.PARTS[part](pause.QUICK, rounds, parent))  # It starts processes.
    checkpoint.main(["--pause", "--quick", "--rounds", "3", "--directory", str(tmp_path), "--json", str(tmp_path / "numbers.json")])
    rows = {row["what"]: row for row in json.loads((tmp_path / "numbers.json").read_text(encoding="utf-8"))["results"]}
    rounds = {"fitflax": 3, "orbax": 3, "flax": 2}
    assert [len(rows[f"pause of {who}, s"]["values"]) for who in ("warm copy", *rounds)] == [3, *rounds.values()]
    assert rows["pause of warm copy, s"]["ratio"] == 1 and rows["pause of fitflax, s"]["ratio"] > 0
    assert len(rows["pause in fit, s, with waits for the previous save"]["values"]) == len(rows["save without training, s"]["values"]) == 3
    for who, number in rounds.items():
        during, others, saves, rates = (rows[f"{what} of {who}{rest}"]["values"] for what, rest in MEASURED_IN_FIT)
        assert len(during) + len(others) == 3 * number and len(saves) == len(rates) == number and min(rates) > 0, who
        assert sys.platform != "linux" or rows[f"peak memory of {who}, MB"]["values"][0] > 0
    assert not rows["step during a save of flax, s"]["values"]  # It is synchronous.
    assert not [what for what in rows if "transfer" in what or "the device" in what]  # A CPU has no other memory.
    assert capsys.readouterr().out.startswith("| what | median (lowest..highest) |")


def test_a_save_of_another_library_lasts_from_the_wait_for_the_previous_one_until_a_checkpoint_is_deleted(tmp_path, monkeypatch):
    now, finishing, finish = [0.0], threading.Event(), pause.PeerSaves._finish

    def pass_time(seconds):
        now[0] += seconds

    def save(path, state):
        finishing.clear()
        path.mkdir()
        pass_time(1)
        return lambda: finishing.wait(60) and pass_time(5)

    monkeypatch.setattr(pause, "state_of", lambda checkpoint: None)
    monkeypatch.setattr(pause, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(pause, "shutil", types.SimpleNamespace(rmtree=lambda path: (path.rmdir(), pass_time(3))))
    monkeypatch.setattr(pause.PeerSaves, "_finish", lambda self: (finishing.set(), finish(self)))
    saves = pause.PeerSaves(tmp_path / "saved", fitflax.every(steps=1), save)
    for _ in range(2):
        saves.on_checkpoint(None)
    saves.on_train_end({})
    assert saves.pauses == [1, 1] and saves.saves == [(0, 0, 9), (1, 1, 18)]


def test_a_save_of_another_library_that_fails_is_an_error(tmp_path, monkeypatch):
    def fail():
        raise OSError("full")

    monkeypatch.setattr(pause, "state_of", lambda checkpoint: None)
    saves = pause.PeerSaves(tmp_path, fitflax.every(steps=1), lambda path, state: fail)
    saves.on_checkpoint(None)
    with pytest.raises(OSError, match="full"):
        saves.on_train_end({})


@pytest.mark.slow
def test_steps_while_the_copy_of_a_save_is_moved_from_an_accelerator_are_measured_separately(tmp_path, monkeypatch):
    monkeypatch.setattr(DataParallel, "is_on_host", False)  # As on a GPU that has room for a copy.
    monkeypatch.setattr(saver, "may_share", lambda array: False)
    monkeypatch.setattr(DeviceRoom, "has", lambda room, num_bytes, devices: True)
    begun, save, begin, move = threading.Event(), pause.Saves.on_checkpoint, pause.Steps.on_train_batch_begin, saver.copy_to_host_memory
    monkeypatch.setattr(pause.Saves, "on_checkpoint", lambda *arguments: (begun.clear(), save(*arguments)))
    monkeypatch.setattr(pause.Steps, "on_train_batch_begin", lambda *arguments: (begin(*arguments), begun.set()))
    monkeypatch.setattr(saver, "copy_to_host_memory", lambda arrays, **options: (not arrays or begun.wait(60)) and move(arrays, **options))
    found = pause.fit("fitflax", pause.QUICK, 1, tmp_path)
    assert len(found["transfers"]) == len(found["saves"]) == 1 and found["transfers"] < found["saves"]
    assert found["moving"] and found["during"][: len(found["moving"])] == found["moving"] and len(found["during"]) + len(found["others"]) == 3


def test_on_a_gpu_a_pause_is_compared_with_20_ms_and_the_memory_of_the_device_is_a_row(monkeypatch):
    steps = {"during": [1.04, 1.0], "moving": [1.04], "others": [1.0], "transfers": [0.06], "saves": [2.0], "first_pause": 1.0, "pauses": [0.01]}
    peaks = {"peak_mb": 3000.0, "device_peak_mb": 5000.0, "megabytes": 1000.0}
    loop = {"pauses": {"fitflax": [0.01, 0.03, 0.01], "warm copy": [0.2]}, "cpu": {"fitflax": [0.01], "warm copy": [0.2]}, "saves": [1.0], "platform": "gpu"}
    parts = {"alone": {"peak_mb": 2000.0, "device_peak_mb": 4000.0}, "fitflax": {**steps, **peaks}, "pauses": loop}
    monkeypatch.setattr(checkpoint, "pause_part", lambda part, *arguments: parts[part])
    rows = {row["what"]: row for row in checkpoint.pause_rows(3, pathlib.Path(), quick=True, peers=False)}
    assert {what: row["verdict"] for what, row in rows.items() if row["verdict"]} == {
        "pause of fitflax, s": "ok",
        "worst pause of fitflax, s, relative to 20 ms": "over",
        "step during a save of fitflax, s": "ok",
        "step during a transfer to the host of fitflax, s": "over",
        "extra memory of fitflax, MB, relative to the state": "ok",
    }
    assert rows["pause of fitflax, s"]["ratio"] == 0.5 and rows["throughput of fitflax during training, MB/s"]["values"] == [500]
    assert rows["extra memory of the device of fitflax, MB, relative to the state"]["ratio"] == 1


@pytest.mark.slow
def test_loading_weights_is_compared_with_reading_them(tmp_path):
    found = weights.measure(1, 2, 1, True, tmp_path)
    assert found["ratios"].keys() == {"base", "fitflax", "control", "peer"} and all(ratio > 0 for ratio in found["ratios"].values())


def test_a_snapshot_that_is_timed_has_the_values_of_the_tree():
    tree = checkpoint.make_tree(0.01, 3)
    for _ in range(2):
        checkpoint.check_same(tree, checkpoint.copiers(tree)["fitflax"]()["params"], "a snapshot")


def test_restoring_different_values_is_an_error():
    tree = checkpoint.make_tree(0.01, 3)
    checkpoint.check_same(tree, tree, "itself")
    with pytest.raises(AssertionError, match="somebody restored different values"):
        checkpoint.check_same(tree, checkpoint.make_tree(0.01, 3) | {"layer_1": {"kernel": tree["layer_0"]["kernel"]}}, "somebody")


# -- many devices --


@pytest.mark.slow
def test_loops_on_many_devices_do_the_same_work_and_take_the_same_memory(tmp_path, capsys):
    options = ["--devices", "1", "2", "--width", "64", "--widths", "128", "--steps", "4", "--rounds", "1"]
    scaling.main([*options, "--json", str(tmp_path / "numbers.json")])
    numbers = json.loads((tmp_path / "numbers.json").read_text(encoding="utf-8"))
    assert [(row["kind"], row["devices"], row["width"]) for row in numbers["devices"]] == [(kind, count, 64) for kind in scaling.PAIRS for count in (1, 2)]
    assert [(row["devices"], row["width"]) for row in numbers["widths"]] == [(2, 128)] * 3
    for row in numbers["devices"] + numbers["widths"]:
        mine, hand = (row["memory"][who]["arguments"] for who in ("fitflax", "hand"))
        assert mine == pytest.approx(hand, rel=0.02), row
        assert row["us"]["fitflax"] > 0 < row["ratio"]["median"]
    printed = capsys.readouterr().out
    assert printed.count("| pmap |") == 3 and "## By width, on 2 devices" in printed


@pytest.mark.slow
def test_loops_in_two_processes_do_the_same_work_and_messages_are_timed(tmp_path):
    processes.main(["--quick", "--pairs", "fsdp", "--json", str(tmp_path / "numbers.json")])
    (found,) = json.loads((tmp_path / "numbers.json").read_text(encoding="utf-8"))["found"]
    assert found["processes"] == 2 and [row["kind"] for row in found["rows"]] == ["fsdp"]
    assert found["costs"]["exchange"] > 0 and list(found["costs"]["all_reduce"]) == ["1024"]


# -- input pipelines --


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
@pytest.mark.parametrize("name", [name for name in pipelines.PIPELINES if name != "torchdata"])  # It is a DataLoader, too.
def test_a_pipeline_is_measured_alone_and_in_both_loops_and_resumes_where_it_stopped(name, tmp_path):
    if name != "tokens":
        pytest.importorskip(pipelines.PACKAGES[name])
    found = pipelines.part(name, ["light"], pipelines.QUICK, tmp_path)
    (result,), (resume,) = found["results"], found["resumes"]
    assert {who: len(stretches) for who, stretches in result["stretches"].items()} == dict.fromkeys(("pipeline", "step", "hand", "fit"), 2)
    for who in ("hand", "fit"):
        assert all(0 < stretch["waited"] < stretch["seconds"] for stretch in result["stretches"][who])
    assert resume["batches_compared"] >= 2 and resume["examples"] > 0 < resume["resume"]
    assert list(tmp_path.iterdir()) == []
    assert f"| {name} | light |" in pipelines.table([result]) and f"| {name} |" in pipelines.resume_table([resume])


def test_results_of_pipelines_that_were_measured_before_are_kept():
    rows = {name: {"results": [{"pipeline": name, "model": "light"}], "resumes": [{"pipeline": name}]} for name in ("tokens", "grain")}
    again = {"results": [{"pipeline": "tokens", "model": "light", "is_new": True}], "resumes": [{"pipeline": "tokens", "is_new": True}]}
    both = pipelines.joined(pipelines.joined(rows["tokens"], rows["grain"]), again)
    assert [[row["pipeline"] for row in both[name]] for name in ("results", "resumes")] == [["grain", "tokens"]] * 2
    assert both["results"][1]["is_new"] and both["resumes"][1]["is_new"]


@pytest.mark.parametrize(("over_hand", "over_least", "expected"), [(0.9, 0.98, "ok"), (0.98, 0.8, "ok, hand-written"), (0.9, 0.9, "under")])
def test_a_pipeline_is_judged_by_its_slower_part_or_by_the_hand_written_loop(over_hand, over_least, expected):
    assert pipelines.verdict(over_hand, over_least) == expected


# -- plots --


def test_plots_are_read_from_the_tables():
    text = "# R\n\n## a\n\nText | with.\n\n| x | ratio |\n| --- | --- |\n| 1 | 1.184 (1.012..1.392) |\n| 2 |  |\n\nMore.\n\n## b\n\n| y |\n|---|\n| 3 |\n"
    assert plots.tables(text) == {"a": [[{"x": "1", "ratio": "1.184 (1.012..1.392)"}, {"x": "2", "ratio": ""}]], "b": [[{"y": "3"}]]}
    assert plots.spread("1.184 (1.012..1.392)") == (1.184, 1.012, 1.392) and plots.spread("") is None
    assert plots.peers("RESULTS.md").keys() == set(TRAINED) and plots.peers("RESULTS-gpu.md").keys() == {"mlp", "lm", "wide"}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_uses_the_colors_and_the_width_of_its_page(name):
    drawn = plots.figure(name)
    assert drawn.startswith('<figure class="plot" role="img" aria-label="') and drawn.endswith("</svg>\n</figure>")
    assert "currentColor" in drawn and plots.TEXT not in drawn and not re.search(r"<svg [^>]*\b(width|height)=", drawn) and "viewBox" in drawn
    assert not re.search(r"#(000000|ffffff)", drawn) and "http://www.w3.org/2000/svg" in drawn
    assert drawn == plots.figure(name)


def test_ratios_in_the_readme_match_those_in_the_tables():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = plots.tables((ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8"))
    quoted = re.findall(r"^\| `(\w+)`: .* \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", readme, re.MULTILINE)
    assert [workload for workload, *_ in quoted] == ["tiny", "mlp", "cnn", "lm"]
    for workload, *ratios in quoted:
        rows = {row["peer"]: row for row in found[workload][1]}
        assert ratios == [f"{float(rows[peer]['ratio to jit'].split()[0]):.2f}" for peer in ("fit", "keras", "lightning")], workload


@pytest.mark.slow
def test_steps_without_jit_are_timed_side_by_side():
    *_, row = eager.main(["--small", "--workload", "mlp", "--steps", "2", "--rounds", "1"])
    name, hand_written, fitted, ratio = (cell.strip() for cell in row.strip("|").split("|"))
    assert name == "mlp" and float(ratio) == pytest.approx(float(fitted) / float(hand_written), rel=0.2)


@pytest.mark.slow
def test_the_benchmark_of_object_stores_runs_and_prints_its_ratios(capsys):
    pytest.importorskip("obstore")
    from benchmarks import object_store

    assert object_store.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\| save \| \d+\.\d\d ", printed) and "| restore |" in printed
    assert object_store.main(["--quick", "--pause", "--rounds", "1"]) == 0
    assert re.search(r"\| bucket \| \d+\.\d ", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_benchmark_of_trackers_runs_and_prints_its_ratios():
    pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    from benchmarks import trackers

    lines = trackers.main(["--quick"])
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["control", "alone", "wandb", "mlflow"]


# -- real models --


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("name", "millions"), [("gpt2", 124.440), ("resnet50", 25.557), ("vit_b16", 86.568), ("encoder_decoder", 124.296), ("unet", 35.746)])
def test_real_models_have_as_many_parameters_as_the_published_ones(name, millions):
    workload = real_workload(name)
    x = make_real_data(workload, "cpu", 1)[0]
    variables = jax.eval_shape(lambda: workload.model("full").init(jax.random.key(0), *(x if isinstance(x, tuple) else (x,)), **REAL_MODE.get(name, {})))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"])) / 1e6 == pytest.approx(millions, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2_nnx", "resnet50"])
def test_a_hand_written_loop_and_fit_train_a_real_model_about_equally_well(name, tmp_path):
    with open_screen(tmp_path / "screen") as screen:
        loop, trainer = (CONTENDERS[who](real_workload(name), "small", every=4, screen=screen, directory=tmp_path) for who in ("hand", "fit+everything"))
        hand_losses, losses = ([contender.train(8, validates=True) for _ in range(2)] for contender in (loop, trainer))
    assert [stretch.loss for stretch in losses] == pytest.approx([stretch.loss for stretch in hand_losses], rel=0.5)  # Each has its own initial parameters.
    assert all(stretch.seconds > 0 and len(stretch.pauses) == 2 for stretch in losses)


def check_others(found):
    """Checks that the installed frameworks took part and trained an equal model, and returns them."""
    here = found["starts"].keys() & {"keras", "lightning"}
    assert here >= {who for who in ("keras", "lightning") if importlib.util.find_spec(who)}
    for who in here:
        first = [stretch["loss"] for stretch in (*found["rounds"][0][who], *found["rounds"][0]["fit"])]
        assert max(first) - min(first) < 1.0, who  # Each has its own initial parameters.
    return here


@pytest.mark.slow
def test_other_frameworks_train_an_equal_model(tmp_path):
    if not any(importlib.util.find_spec(who) for who in ("keras", "lightning")):
        pytest.skip("neither Keras nor Lightning is installed")
    options = ["--workload", "vit_b16", "--size", "small", "--rounds", "1", "--steps", "2", "--without", "everything", "evaluation", "warm"]
    real.main([*options, "--json", str(tmp_path / "results.json")])
    (found,) = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    check_others(found)


def test_other_frameworks_have_the_same_number_of_parameters(tmp_path):
    pytest.importorskip("lightning")
    from benchmarks.real.lightning_torch import GPT2, ViT

    assert sum(parameter.numel() for parameter in GPT2().parameters()) == 124_439_808
    assert sum(parameter.numel() for parameter in ViT(224).parameters()) == 86_567_656


class Dense(nn.Module):
    """A model that compiles quickly."""

    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes)(x.reshape(len(x), -1))


DENSE = RealWorkload("dense", "a dense layer", Dense, "images", {"small": Size({"classes": 5}, 4, 8)}, "images")


def real_or_dense(name):
    return DENSE if name == DENSE.name else real_workload(name)


class WorkerHere:
    """Trains in this process instead of a separate one."""

    def __init__(self, who, name, size, _, every, **options):
        directory = pathlib.Path(self.directory) / who
        directory.mkdir()
        screen = open_screen(directory / "screen")
        self.contender = CONTENDERS[who](real_or_dense(name), size, every=int(every), screen=screen, directory=directory)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.contender.screen.close()

    def read(self, seconds):
        self.contender.train(1)
        return {"start_seconds": 1.0, "compilations": 2, "compile_seconds": 0.5, "device": "cpu"}

    def ask(self, do, *, seconds, **options):
        return json.loads(json.dumps(carry_out(self.contender, {"do": do, **options})))

    def finish(self):
        return {"peak_mb": 100.0, "device_peak_mb": None, "compilations": 3, "compile_seconds": 0.5}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", [DENSE.name, *real.MODELS])
def test_the_command_for_real_models_writes_a_section_for_the_device_and_ends_in_time(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(real, "Worker", WorkerHere)
    monkeypatch.setattr(real, "NAMES", (DENSE.name, *real.NAMES))
    monkeypatch.setattr(real, "LOGGED", (DENSE.name, *real.LOGGED))
    monkeypatch.setattr(real, "CALLED", (DENSE.name, *real.CALLED))
    monkeypatch.setattr(real, "workload_of", real_or_dense)
    monkeypatch.setattr(WorkerHere, "directory", tmp_path, raising=False)
    hours, take = [0], Snapshots.take

    def take_an_hour(snapshots, *arguments):
        hours[0] += snapshots.shared() is None
        return take(snapshots, *arguments)

    monkeypatch.setattr(Snapshots, "take", take_an_hour)
    clock = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + 3600 * hours[0], thread_time=time.thread_time, time=time.time)
    monkeypatch.setattr(real_contenders, "time", clock)
    path = tmp_path / "results.md"
    path.write_text("# Old\n\n## cpu\n\nold\n\n## NVIDIA H100\n\nkept\n", encoding="utf-8")
    options = ["--gpu", "--size", "small", "--rounds", "5", "--steps", "1", "--every", "2", "--epoch", "1", "--minutes", "0", "--write", str(path)]
    assert real.main([*options, "--workload", name, "gpt2_scan", "--json", str(tmp_path / "results.json")]) == 1
    (found,) = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    (one,) = found["rounds"]  # At least one, although there is no time.
    is_logged, is_called = name in real.LOGGED, name in real.CALLED
    names = ("hand", "fit", "hand validating", "everything", *["loggers"] * is_logged, *["single steps", "calls"] * is_called)
    assert {who: len(stretches) for who, stretches in one.items()} == dict.fromkeys(names, 2)
    assert all(stretch["seconds"] > 0 < stretch["host_seconds"] for stretches in one.values() for stretch in stretches)
    for stretch in one["everything"]:
        (pause,) = stretch["pauses"]
        assert pause > 3600  # Whichever callback makes the copy, its time is part of the pause.
    if is_logged:
        assert [stretch["steps"] for stretch in one["loggers"]] == [3, 3]
        assert len((tmp_path / "fit+everything" / "log.csv").read_text(encoding="utf-8").splitlines()) == 1 + 3  # The header, and a row per epoch.
    if is_called:
        assert all(stretch["steps"] == real.CALLED_STEPS and stretch["loss"] > 0 for what in ("single steps", "calls") for stretch in one[what])
    text = path.read_text(encoding="utf-8")
    assert (f"| {real_or_dense(name).about}, size small |" in text) == is_called
    assert text.startswith(real.PREAMBLE) and re.findall("^## .*", text, re.MULTILINE) == ["## cpu", "## NVIDIA H100"] and "old" not in text
    assert text.count(f"| {real_or_dense(name).about} |") == 2 + is_logged and "Left out: gpt2_scan: there was no time." in text and text.endswith("kept\n")
    assert capsys.readouterr().out.strip() in text


def test_several_steps_per_call_are_measured_on_a_cpu_at_size_small():
    race = {size: real.Race(real_workload("resnet50"), real.parse(["--size", size, "--without", "everything", "loggers"])) for size in ("full", "cpu")}
    found = {size: {name: each for name, each in one._contenders().items() if each != (name, size)} for size, one in race.items()}
    assert found == {"full": {}, "cpu": {"fit8": ("fit8", "small"), "fit1": ("fit", "small")}} and "fit8" in race["full"]._contenders()


@pytest.mark.parametrize("lost", ["fit8", "fit1"])
def test_contenders_start_one_after_another_and_only_several_steps_per_call_are_left_out_if_they_fail(lost, monkeypatch):
    events = []

    class Answers:
        def __init__(self, who, name, size, *arguments, **options):
            self.name = "fit1" if (who, size) == ("fit", "small") else who
            events.append(f"{self.name} starts")

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def read(self, seconds):
            events.append(f"{self.name} answers")
            if self.name == lost:
                raise run.WorkerError("out of memory")
            return {}

        def ask(self, do, **options):
            return {"seconds": 1.0, "host_seconds": 1.0, "flops": 1.0, "matmul": 1.0}

        def finish(self):
            return {}

    monkeypatch.setattr(real, "Worker", Answers)
    found = real.Race(real_workload("resnet50"), real.parse(["--rounds", "1", "--without", "evaluation", "warm"])).run()
    names = ["hand", "fit", "fit+everything", "fit8", "fit1"]
    assert events == [f"{name} {what}" for name in names for what in ("starts", "answers")]
    assert list(found["ends"]) == [name for name in names if name != lost]
    assert found["rounds"][0].keys() == {"hand", "fit", "loggers", "hand validating", "everything"}


def test_the_command_for_real_models_has_two_sets_of_defaults_and_writes_only_whole_tables():
    here, gpu = real.parse([]), real.parse(["--gpu"])
    assert (here.size, gpu.size, here.minutes, gpu.minutes < 8) == ("cpu", "full", math.inf, True)
    assert here.workload == gpu.workload == real.MODELS and here.write == gpu.write == real.RESULTS
    assert real.parse(["--gpu", "--steps", "7"]).steps == 7
    for flags in (["--workload", "gpt2"], ["--gpu", "--size", "small"]):
        assert real.parse(flags).write is None and real.parse([*flags, "--write"]).write == real.RESULTS


@pytest.mark.slow
def test_real_models_are_measured_side_by_side(tmp_path, capsys):
    options = ["--workload", "gpt2", "--size", "small", "--rounds", "1", "--steps", "4", "--every", "2", "--epoch", "2"]
    real.main([*options, "--write", str(tmp_path / "results.md"), "--json", str(tmp_path / "results.json")])
    (found,) = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert found["starts"]["hand"]["compilations"] > 0 and found["flops"] > 1e6 and len(found["rounds"][0]["everything"]) == 2
    here = check_others(found)
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "size small, up to 1 rounds of 4 steps" in text and capsys.readouterr().out.strip() in text
    assert text.count("| GPT-2, 124M |") == 3 + len(here) and all(f"| GPT-2, 124M | {who} |" in text for who in here)


# -- trials and ensembles --


@pytest.mark.slow
def test_trials_and_ensembles_are_measured(tmp_path, capsys):
    tuning.main(["--quick", "--rounds", "1", "--workload", "tiny", "--json", str(tmp_path / "results.json")])
    (found,) = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["tiny"]["rounds"]
    assert found.keys() == {"shared", "fresh", "ensemble", "single runs"} and all(seconds > 0 for seconds in found.values())
    assert "| `tiny` |" in capsys.readouterr().out
