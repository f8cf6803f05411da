"""Ray Train and Ray Tune on a real cluster of a head and two nodes: runs and trials resume after their processes are killed."""

import contextlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import ModelCheckpoint
from fitflax.checkpoints import checkpoint_store
from fitflax.checkpoints.resume import write_pointer
from fitflax.data.batch import Position
from fitflax.data.shards import spread
from fitflax.data.sources import Shares
from fitflax.errors import CallbackError, ConfigError, DataError, FitflaxWarning
from fitflax.integrations.ray import RayReport, checkpoint_path
from fitflax.parallel import launch

ray = pytest.importorskip("ray")

from tests.ray_script import make_data, make_trainer  # noqa: E402

SCRIPT = pathlib.Path(__file__).parent.parent / "ray_script.py"
TUNE_SCRIPT = SCRIPT.with_name("ray_tune_script.py")
SECONDS = 480  # On an otherwise idle machine, everything here takes less than a quarter of this.
# Ray forks the processes of a node from this one.
pytestmark = [pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"), pytest.mark.timeout(3 * SECONDS)]


class RayCluster:
    """A head and two nodes with room for one worker each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.fill()

    def fill(self, count: int = 2) -> None:
        """Adds nodes until there are `count`."""
        while len(self.cluster.worker_nodes) < count:
            self.cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)

    def kill_node(self, node_id: str) -> None:
        (node,) = [each for each in self.cluster.worker_nodes if each.node_id == node_id]
        self.cluster.remove_node(node, allow_graceful=False)

    def drain(self, node_id: str, seconds: int) -> None:
        """Gives notice that a node will be preempted, as a cloud's autoscaler does."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.cluster.address, "--node-id", node_id]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds", str(seconds)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TRAIN_V2_ENABLED", "1")
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "8")  # A shorter wait for a node that does not come back.
        patch.setenv("RAY_worker_niceness", "0")  # Otherwise, workers get little time while other tests run.
        handler = signal.getsignal(signal.SIGTERM)  # Ray sets another one, which would stay for later tests.
        made = RayCluster()
        try:
            yield made
        finally:
            made.cluster.shutdown()
            signal.signal(signal.SIGTERM, handler)


def workers(directory: pathlib.Path) -> list[int]:
    """Returns the ids of those worker processes of a run that still exist."""
    found = []
    for number in (directory / "pids").read_text().split():
        with contextlib.suppress(OSError):
            if b"RayTrainWorker" in pathlib.Path(f"/proc/{number}/cmdline").read_bytes():
                found.append(int(number))
    return found


def starts_of(directory: pathlib.Path) -> list[tuple[str, int]]:
    """Returns the step from which each group of workers trained, or "None", and the number of its workers."""
    return [(step, int(count)) for step, count in map(str.split, (directory / "starts").read_text().splitlines())]


def begin(cluster: RayCluster, directory: pathlib.Path, **options: Any) -> "subprocess.Popen[str]":
    given = {"directory": str(directory), "address": cluster.cluster.address, "faults": [], **options}
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen([sys.executable, str(SCRIPT), json.dumps(given)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def run(cluster: RayCluster, directory: pathlib.Path, meanwhile: Callable[[str], None] | None = None, **options: Any) -> dict[str, Any]:
    """Runs the driver until it ends; `meanwhile` is called with the node of the worker that reaches the first fault of kind "wait", "mark", or "kill"."""
    process = begin(cluster, directory, **options)
    if meanwhile is not None:
        number = next(index for index, (_, _, kind) in enumerate(options["faults"]) if kind in ("wait", "mark", "kill"))
        meanwhile(await_text(directory / f"fault-{number}"))
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, f"{out}\n{err}"
    await_no_workers(directory)
    return dict(json.loads(out.splitlines()[-1]))


def await_text(path: pathlib.Path) -> str:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.1)
    raise TimeoutError(f"{path} did not come")


def await_no_workers(directory: pathlib.Path, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while left := workers(directory):
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.2)


def end_of(directory: pathlib.Path) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    with np.load(directory / "end.npz") as loaded:
        return dict(loaded), json.loads((directory / "history.json").read_text())


def assert_same(one: pathlib.Path, other: pathlib.Path) -> None:
    (params, rows), (expected, expected_rows) = end_of(one), end_of(other)
    assert rows == expected_rows and params.keys() == expected.keys()
    for name, array in params.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def assert_close_to_one_process(directory: pathlib.Path, epochs: int) -> None:
    trainer = make_trainer({"dropout": 0})
    history = trainer.fit(*make_data(), batch_size=32, epochs=epochs, verbose=0)
    params, rows = end_of(directory)
    np.testing.assert_allclose(rows["loss"], history.history["loss"], rtol=1e-5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(trainer.state.params):
        np.testing.assert_allclose(params[jax.tree_util.keystr(path)], leaf, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def uninterrupted(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    result = run(cluster, directory, epochs=8)
    _, rows = end_of(directory)
    assert rows["step"] == result["metrics"]["step"] == 64 and result["metrics"]["epoch"] == 8
    assert result["metrics"]["loss"] == pytest.approx(rows["loss"][-1])
    assert pathlib.Path(result["checkpoint"]) == directory / "checkpoints" / "step_00000064"
    return directory


@pytest.mark.slow
def test_a_run_resumes_with_fewer_workers_after_a_node_is_lost(cluster, tmp_path):
    try:
        run(cluster, tmp_path, cluster.kill_node, epochs=4, faults=[[14, 1, "wait"]], workers=[1, 2], dropout=0)
    finally:
        cluster.fill()
    assert_close_to_one_process(tmp_path, epochs=4)


@pytest.mark.slow
def test_a_run_resumes_with_more_workers_after_a_node_is_added(cluster, tmp_path):
    cluster.kill_node(next(iter(cluster.cluster.worker_nodes)).node_id)
    cluster.cluster.wait_for_nodes(timeout=SECONDS)  # Until Ray notices, it could begin with two workers, or restart a run for them.
    try:
        # A restart with more workers is not a failure.
        options = {"workers": [1, 2], "resize": 1.0, "max_failures": 0}
        run(cluster, tmp_path, lambda node: cluster.fill(), epochs=4, faults=[[14, 0, "wait"]], dropout=0, **options)
    finally:
        cluster.fill()
    assert starts_of(tmp_path) == [("None", 1), ("10", 2)]
    assert_close_to_one_process(tmp_path, epochs=4)


# After the tests above, because Ray reserves the resources of a driver that was killed for three more minutes.
@pytest.mark.slow
def test_kills_of_workers_a_node_and_the_driver_and_a_full_disk_do_not_change_a_run(cluster, uninterrupted, tmp_path):
    faults = [[9, 0, "disk"], [17, 1, "kill"], [24, 0, "fail"], [32, 1, "wait"], [48, 0, "wait"]]
    driver = begin(cluster, tmp_path, epochs=8, faults=faults, max_failures=10)
    try:
        cluster.kill_node(await_text(tmp_path / "fault-3"))
        cluster.fill()
        await_text(tmp_path / "fault-4")
        os.kill(driver.pid, signal.SIGKILL)
        driver.communicate(timeout=60)
        await_no_workers(tmp_path, seconds=60)
    finally:
        driver.kill()
    run(cluster, tmp_path, epochs=8, faults=faults)
    assert sorted(path.name for path in tmp_path.glob("fault-*")) == [f"fault-{number}" for number in range(5)]
    assert_same(tmp_path, uninterrupted)


@pytest.mark.slow
def test_a_preemption_notice_saves_the_current_step_and_the_run_resumes_elsewhere(cluster, uninterrupted, tmp_path):
    cluster.fill(3)
    drained = []

    def drain(node: str) -> None:
        drained.append(node)
        cluster.drain(node, 15)

    try:
        run(cluster, tmp_path, drain, epochs=8, faults=[[9, 1, "mark"]], often=True, every=1000, max_failures=0)
    finally:
        cluster.kill_node(drained[0])
    first, second = (step for step, _ in starts_of(tmp_path))
    assert first == "None" and 9 < int(second) < 64
    assert_same(tmp_path, uninterrupted)


@pytest.mark.slow
def test_workers_train_on_their_shards_of_a_ray_dataset_and_resume_inside_a_pass(cluster, tmp_path):
    cluster.fill(3)  # Reading the data needs a CPU, too.
    waited = []

    def await_end(node: str) -> None:
        start, first = time.monotonic(), [int(number) for number in (tmp_path / "pids").read_text().split()][:2]
        while left := set(workers(tmp_path)).intersection(first):
            assert time.monotonic() < start + 60, f"still there: {left}"
            time.sleep(0.05)
        waited.append(time.monotonic() - start)

    result = run(cluster, tmp_path, await_end, epochs=4, faults=[[12, 1, "kill"]], data="ray", every=3)
    assert len(waited) == 1  # It should take ten seconds; the limit above allows for a busy machine.
    _, rows = end_of(tmp_path)
    # Two shards of 125 examples, each with 16 rows of a batch: 8 steps per epoch.
    assert rows["step"] == result["metrics"]["step"] == 32 and len(rows["loss"]) == 4
    assert rows["loss"][-1] < rows["loss"][0] / 2
    first, *_, last = (step for step, _ in starts_of(tmp_path))
    assert first == "None" and int(last) % 8 != 0


@pytest.mark.slow
def test_workers_with_unequal_shards_run_the_same_steps_and_use_each_example_once(cluster, tmp_path):
    cluster.fill(3)
    run(cluster, tmp_path, epochs=3, data="ray", uneven=True, learning_rate=0, dropout=0)
    _, rows = end_of(tmp_path)
    x, y = make_data()
    trainer = make_trainer({"dropout": 0})
    trainer.build((x, y))
    expected = trainer.evaluate(x[:250], y[:250], verbose=0)
    # The worker that asks next gets 50 examples. With shards of 100 and 150, each with 16 rows of a batch, an epoch has 10 steps.
    assert 3 * 10 <= rows["step"] <= 3 * 16
    for key in ("loss", "mae"):
        np.testing.assert_allclose(rows[key], [expected[key]] * 3, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")  # Ray raises them.
def test_fit_evaluate_and_predict_treat_a_ray_dataset_like_arrays(cluster):
    x, y = make_data()
    ray.init(address=cluster.cluster.address, logging_level="ERROR", log_to_driver=False)
    try:
        data = ray.data.from_items([{"x": each, "y": target, "name": "a"} for each, target in zip(x, y, strict=True)])
        trainer, other = make_trainer({"data": "ray", "dropout": 0}), make_trainer({"dropout": 0})
        history = trainer.fit(data, batch_size=100, epochs=2, verbose=0, validation_data=data)
        expected = other.fit(x, y, batch_size=100, epochs=2, verbose=0, shuffle=False, validation_data=(x, y))
        np.testing.assert_allclose(history.history["val_loss"], expected.history["val_loss"], rtol=1e-5)
        assert trainer.evaluate(data, batch_size=64, verbose=0)["loss"] == pytest.approx(other.evaluate(x, y, verbose=0)["loss"], rel=1e-5)
        np.testing.assert_allclose(trainer.predict(data, batch_size=64, verbose=0), other.predict(x, verbose=0), rtol=1e-4, atol=1e-5)
        for inputs, targets, fault in (("x", "z", r"`data` does not have: \['z'\]\. Its columns: 'x', 'y', 'name'\."), ("name", "y", "name")):
            wrong = fitflax.Trainer(nn.Dense(1), inputs=inputs, targets=targets)
            wrong.compile("sgd", "mse")
            with pytest.raises(DataError, match=fault):
                wrong.fit(data, verbose=0)
        with pytest.raises(DataError, match=r"Pass the names of the inputs and targets: Trainer\(inputs=..., targets=...\)"):
            other.fit(data, verbose=0)
        with pytest.raises(ConfigError, match="y can only be passed with in-memory arrays"):
            trainer.fit(data, y, verbose=0)
    finally:
        ray.shutdown()


def tuned(cluster: RayCluster, directory: pathlib.Path, kind: str) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """Returns the final output of a study, and for each trial the rows that it wrote at its epochs."""
    options = {"directory": str(directory), "address": cluster.cluster.address, "kind": kind}
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, str(TUNE_SCRIPT), json.dumps(options)], capture_output=True, text=True, env=env, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["errors"]
    trials = [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(directory.glob("*/epochs"))]
    for process in {row["pid"] for rows in trials for row in rows}:  # Only the first trial of a process compiles.
        assert max(row["compiled"] for rows in trials for row in rows if row["pid"] == process) <= 5
    return result, trials


@pytest.mark.slow
def test_asha_stops_trials_and_a_killed_trial_resumes_from_its_checkpoint(cluster, tmp_path):
    result, trials = tuned(cluster, tmp_path, "asha")
    lengths = {trial["rate"]: trial["epoch"] for trial in result["trials"]}
    assert len(trials) == len(lengths) == 8 and result["best"] == 0.1 and lengths[0.1] == 8 and min(lengths.values()) == 2
    (killed,) = [rows for rows in trials if len({row["life"] for row in rows}) > 1]
    first = killed[4]["epoch"]  # The checkpoint of epoch 2 may not have been complete when epoch 2 was reported.
    assert [row["epoch"] for row in killed] == [0, 1, 2, 3, *range(first, 8)] and first in (2, 3)
    assert killed[first]["loss"] == killed[4]["loss"] and killed[3]["pid"] != killed[4]["pid"]


@pytest.mark.slow
def test_population_based_training_copies_states_to_trials_with_other_rates(cluster, tmp_path):
    result, trials = tuned(cluster, tmp_path, "pbt")
    for rows in trials:
        lives = [[row["epoch"] for row in rows if row["life"] == life] for life in dict.fromkeys(row["life"] for row in rows)]
        # A trial that Tune pauses may be ahead of the checkpoint that it is resumed from, but it skips no epoch.
        assert all(life == list(range(life[0], life[-1] + 1)) for life in lives) and (lives[0][0], lives[-1][-1]) == (0, 11)
        assert all(after[0] <= before[-1] + 1 for before, after in itertools.pairwise(lives)), lives
    given = {0.1, 0.0001, 0.001, 0.01}
    changed = [rows for rows in trials if rows[-1]["rate"] != rows[0]["rate"]]
    assert changed and all(trial["loss"] < 1 for trial in result["trials"])
    for rows in changed:
        at = next(number for number, row in enumerate(rows) if row["rate"] != rows[0]["rate"])
        assert rows[at]["loss"] < rows[at - 1]["loss"] / 2 and round(rows[at]["rate"], 6) not in given


@pytest.mark.slow
def test_a_trial_resumes_from_the_url_that_ray_tune_was_given(tmp_path, monkeypatch):
    given = []

    def report(values, checkpoint):  # Ray copies the directory, too.
        given.append(tmp_path / f"{len(given)}-{values['step']}")
        checkpoint.to_directory(given[-1])

    monkeypatch.setattr("fitflax.integrations.ray._is_trial", lambda: True)
    monkeypatch.setattr("ray.tune.report", report)

    def trial(name, epochs, **options):
        trainer, checkpoint = make_trainer({}), ModelCheckpoint(f"memory://{tmp_path.name}/{name}")
        callbacks = [checkpoint, RayReport(checkpoint=checkpoint)]
        trainer.fit(*make_data(), batch_size=32, epochs=epochs, callbacks=callbacks, verbose=0, **options)
        return trainer

    uninterrupted = trial("whole", 3)
    trial("first", 2)
    resumed, restored = trial("second", 3, resume=given[4]), make_trainer({})
    restored.restore(given[-1])
    assert [path.name for path in given] == ["0-8", "1-16", "2-24", "3-8", "4-16", "5-24"]
    for trainer in (resumed, restored):
        assert trainer.step == 24
        jax.tree.map(np.testing.assert_array_equal, trainer.state.params, uninterrupted.state.params)


@pytest.mark.slow
def test_a_report_warns_of_a_failed_save_and_includes_an_earlier_checkpoint(tmp_path, monkeypatch):
    write, given = checkpoint_store.write_checkpoint, []

    def full(directory, **options):
        if options["metadata"]["step"] == 16:
            raise OSError(28, "No space left on device")
        write(directory, **options)

    monkeypatch.setattr(checkpoint_store, "write_checkpoint", full)
    monkeypatch.setattr("fitflax.integrations.ray._is_trial", lambda: True)
    monkeypatch.setattr(
        "ray.tune.report", lambda values, checkpoint: given.append((values["step"], (pathlib.Path(checkpoint.path) / "metadata.json").exists()))
    )
    checkpoint = ModelCheckpoint(tmp_path, on_save_error="warn")
    with pytest.warns(FitflaxWarning, match="Training continues without it. Could not save .*step_00000016"):
        make_trainer({}).fit(*make_data(), batch_size=32, epochs=2, callbacks=[checkpoint, RayReport(checkpoint=checkpoint)], verbose=0)
    assert given == [(8, True), (16, True)] and checkpoint.store.steps() == [8]


@pytest.mark.parametrize(
    ("used", "examples", "parts", "batch_size", "expected"),
    [
        ((48, 48), 48, 2, 16, (48, (48, 48))),
        ((48, 48), 48, 3, 16, (32, (32, 32, 32))),
        ((40, 40), 40, 3, 16, (16, (16, 16, 16))),
        ((48, 48), 48, None, 32, (96, ())),
        ((), 96, 2, 16, (48, (48, 48))),
        ((), 96, None, 32, (96, ())),
    ],
)
def test_a_position_inside_a_pass_is_spread_over_a_different_number_of_shards(used, examples, parts, batch_size, expected):
    shares = None if parts is None else Shares(0, tuple(range(parts)), None, None, None, None)
    source = SimpleNamespace(shares=shares, batch_size=batch_size)
    position, spread_used = spread(Position(2, examples), used, source)
    assert (position, spread_used) == (Position(2, expected[0]), expected[1])


@pytest.mark.slow
def test_the_example_starts_ray_itself_and_prints_an_accuracy_and_a_checkpoint(tmp_path):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}  # Not the cluster of the other tests.
    command = [sys.executable, str(SCRIPT.parent.parent / "examples" / "ray_train.py"), "--epochs", "10"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    accuracy, checkpoint = done.stdout.splitlines()[-2:]
    assert 0.8 < float(accuracy.removeprefix("accuracy on 300 images: ")) < 1
    assert pathlib.Path(checkpoint.removeprefix("checkpoint: ")) == tmp_path / "runs/ray_train/checkpoints/step_00000240"


@pytest.mark.slow
def test_reports_are_rejected_outside_of_ray_and_wrong_arguments_immediately(tmp_path):
    with pytest.raises(CallbackError, match=r"must be the run's ModelCheckpoint or BestCheckpoint. Received: 'checkpoints'"):
        RayReport(checkpoint="checkpoints")
    with pytest.raises(CallbackError, match="RayReport"):
        RayReport(every=3)
    with pytest.raises(CallbackError, match="This process is neither"):
        make_trainer({}).fit(*make_data(), epochs=1, callbacks=[RayReport()], verbose=0)
    with pytest.raises(ConfigError, match=r"must be a checkpoint of Ray, such as result.checkpoint"):
        checkpoint_path(tmp_path)
    with pytest.raises(ConfigError, match=r"was not reported by RayReport"):
        checkpoint_path(ray.train.Checkpoint.from_directory(str(tmp_path)))
    write_pointer(tmp_path, tmp_path)
    assert checkpoint_path(ray.train.Checkpoint.from_directory(str(tmp_path))) == str(tmp_path)
    write_pointer(tmp_path, tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"gone no longer exists. To keep more checkpoints, pass ModelCheckpoint\(keep=...\)"):
        checkpoint_path(ray.train.Checkpoint.from_directory(str(tmp_path)))
    assert launch.find_group() is None and not launch.is_actor()
