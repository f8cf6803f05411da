"""`MLflowLogger` with MLflow's real server on loopback; the processes that log to it are really killed."""

import copy
import os
import pathlib
import pickle
import re
import subprocess
import sys
import threading
import types
import warnings

import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import BestCheckpoint, Callback, ImageSummary
from fitflax.errors import FitflaxWarning
from fitflax.integrations.mlflow import MLflowLogger
from fitflax.integrations.tracker_base import Point
from tests.integrations.servers import Server, script_env

# MLflow and its dependencies raise these warnings themselves.
# A server of MLflow takes a minute or more to start on a busy machine, and some tests start it twice.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "tracker_script.py"
STEPS = 200
KILLS = 6


def client_of(server):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mlflow
    return mlflow.MlflowClient(server.uri)


def history_of(server, run_id):
    """Returns `{key: [(step, value)]}` from the server, without clocks and system metrics."""
    client = client_of(server)
    keys = [key for key in client.get_run(run_id).data.metrics if not key.startswith(("time/", "system/"))]
    return {key: [(metric.step, metric.value) for metric in client.get_metric_history(run_id, key)] for key in sorted(keys)}


def start(directory, server, **env):
    command = [sys.executable, str(SCRIPT), str(directory), server.uri, str(STEPS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=script_env() | env, text=True)


def finish(process):
    """Returns the id of the run."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return re.findall(r"^run (\w+)$", output, re.MULTILINE)[-1]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A cache of compiled programs: the uninterrupted run writes it, and the runs that are killed only read it."""
    directory = str(tmp_path_factory.mktemp("programs"))
    return {"JAX_COMPILATION_CACHE_DIR": directory, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}


@pytest.fixture(scope="module")
def uninterrupted(mlflow_server, programs, tmp_path_factory):
    run_id = finish(start(tmp_path_factory.mktemp("never"), mlflow_server, **programs))
    found = history_of(mlflow_server, run_id)
    assert len(found["loss"]) > 70 and len(found["val_loss"]) == 20
    return found


def test_a_repeatedly_killed_run_has_the_same_history_as_an_uninterrupted_run(mlflow_server, programs, uninterrupted, tmp_path):
    rng, env = np.random.default_rng(0), programs | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1000"}
    notes, first_step = [], 1
    for kill in range(KILLS):
        process = start(tmp_path, mlflow_server, **env)
        # Anywhere after the checkpoint that the run resumes from; the first time, before its first checkpoint.
        end = rng.integers(5, 25) if kill == 0 else rng.integers(first_step, STEPS - 10 * (KILLS - kill))
        for line in process.stdout:
            what, _, step = line.partition(" ")
            if what == "step" and int(step) >= end:
                break
        process.kill()
        process.wait()
        process.stdout.close()
        first_step = int(end) // 25 * 25
        notes.append(int(end))
    run_id = finish(start(tmp_path, mlflow_server, **env))
    assert history_of(mlflow_server, run_id) == uninterrupted, f"killed at {notes}"
    assert client_of(mlflow_server).get_run(run_id).info.status == "FINISHED"


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("summaries", "map", ImageSummary(nn.sigmoid(x)[:, :, None, None]))
        return nn.Dense(2)(x)


X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def trained(*callbacks, steps=20, **kwargs):
    trainer = fitflax.Trainer(Net())
    trainer.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    trainer.fit(X, Y, batch_size=8, steps=steps, callbacks=callbacks, verbose=0, **kwargs)
    return trainer


def test_values_params_images_and_the_best_checkpoint_are_logged(mlflow_server, tmp_path):
    best, config = BestCheckpoint(tmp_path / "best", monitor="loss"), {"note": "x" * 7000}
    logger = MLflowLogger("one", tracking_uri=mlflow_server.uri, every=fitflax.every(steps=10), checkpoint=best, tags={"who": "me"}, end_seconds=600)
    trainer = trained(best, logger, config=config)
    client = client_of(mlflow_server)
    run = client.get_run(logger.run_id)
    assert run.info.status == "FINISHED" and run.data.tags["who"] == "me" and len(run.data.tags["mlflow.source.git.commit"]) == 40
    assert run.data.params["batch_size"] == "8" and run.data.params["model"] == "Net" and len(run.data.params["note"]) == 6000
    assert run.data.metrics["loss"] == trainer.history.history["loss"][-1]
    images = [file.path for file in client.list_artifacts(logger.run_id, "images")]
    assert sorted(int(path.split("+step+")[1].split("+")[0]) for path in images if path.endswith(".png")) == [5] * 3 + [10] * 3 + [15] * 3 + [20] * 3
    (directory,) = client.list_artifacts(logger.run_id, "best-checkpoint")
    assert directory.path == f"best-checkpoint/{best.store.path(best.best_step).name}"
    assert {pathlib.Path(file.path).name for file in client.list_artifacts(logger.run_id, directory.path)} >= {"state.msgpack", "metadata.json"}


def test_metrics_with_any_name_are_logged_and_stay_different(mlflow_server):
    names = ["/data/night", "../other", "a//b", "a#b", "a@b", "a_b"]
    logger = MLflowLogger("names", tracking_uri=mlflow_server.uri)
    trainer = trained(logger, validation_data=dict.fromkeys(names, (X[:8], Y[:8])))
    found = client_of(mlflow_server).get_run(logger.run_id).data.metrics
    losses = [value for key, value in found.items() if key.endswith("_loss") or "_loss_" in key]
    assert losses == [trainer.history.history["a_b_loss"][-1]] * len(names) and "a_b_loss" in found


def test_an_active_run_is_used_and_not_ended(mlflow_server):
    client_of(mlflow_server)
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(mlflow_server.uri)
    try:
        mlflow.set_experiment("given")
        with mlflow.start_run() as run:
            mlflow.log_metric("mine", 1.0)
            logger = MLflowLogger(every=fitflax.every(steps=10))
            trained(logger)
            assert logger.run_id == run.info.run_id
            assert mlflow.active_run().info.run_id == run.info.run_id
            assert mlflow.get_run(run.info.run_id).info.status == "RUNNING"
        found = history_of(mlflow_server, run.info.run_id)
        assert [step for step, _ in found["loss"]] == [5, 10, 15, 20] and found["mine"] == [(0, 1.0)]
    finally:
        mlflow.set_tracking_uri(before)


def test_system_metrics_are_logged_by_mlflow(mlflow_server, monkeypatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")

    class Slow(Callback):
        def on_epoch_end(self, epoch, logs):
            if epoch == 3:
                client, steps = client_of(mlflow_server), 0
                while steps < 300 and not any(key.startswith("system/") for key in client.get_run(logger.run_id or "").data.metrics if logger.run_id):
                    steps += 1

    logger = MLflowLogger("system", tracking_uri=mlflow_server.uri, log_system_metrics=True, interval=0.0)
    trained(logger, WaitForStart(logger), Slow())
    assert any(key.startswith("system/cpu") for key in client_of(mlflow_server).get_run(logger.run_id).data.metrics)


class WaitForStart(Callback):
    """Waits, at the first step, until the run has started in the tracker."""

    def __init__(self, logger):
        self.logger = logger

    def on_train_batch_end(self, batch, logs):
        self.logger._outbox._thread.wait_until(lambda: self.logger.run_id is not None)


def test_a_server_that_stops_and_comes_back_gets_everything(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # A request that the stop interrupts would be retried for minutes.
    server = Server(tmp_path)
    server.start()

    class RestartServer(Callback):
        def on_train_batch_end(self, batch, logs):
            if self.trainer.step == 30:
                server.stop()
            elif self.trainer.step == 40:
                # Wait until the thread has failed to reach the server.
                logger._outbox._wake_up.put(None)
                logger._outbox._thread.wait_until(lambda: "failure" in logger._outbox._warned)
            elif self.trainer.step == 60:
                server.start()

    try:
        logger = MLflowLogger("stopped", tracking_uri=server.uri, every=fitflax.every(steps=2), interval=0.05, end_seconds=600)
        with pytest.warns(FitflaxWarning) as caught:
            trained(logger, WaitForStart(logger), RestartServer(), steps=100)
        assert ["cannot be reached" in str(warning.message) for warning in caught] == [True]
        found = history_of(server, logger.run_id)
        assert [step for step, _ in found["loss"]] == sorted({*range(2, 101, 2), *range(5, 101, 5)})
    finally:
        server.stop()


def test_a_server_that_is_never_up_causes_warnings_that_name_the_steps_it_missed(tmp_path):
    server = Server(tmp_path)  # Not started.
    logger = MLflowLogger("never", tracking_uri=server.uri, every=fitflax.every(steps=2))
    with pytest.warns(FitflaxWarning) as caught:
        trainer = trained(logger)
    assert trainer.step == 20
    down, unsent = [str(warning.message) for warning in caught]
    assert down.startswith(f"MLflow at {server.uri} cannot be reached")
    assert unsent.startswith(f"MLflow at {server.uri} did not receive 12 points, of steps 2 to 20.")
    assert isinstance(pickle.loads(pickle.dumps(logger)), MLflowLogger)


@pytest.fixture
def tracker(tmp_path):
    """The tracker of a logger, with a database and no server."""
    pytest.importorskip("mlflow")
    logger = MLflowLogger("deleted", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    logger.tracker.prepare()
    return logger.tracker


def test_a_new_run_replaces_a_deleted_run(tracker):
    run_id = tracker.start("a", None, {})
    assert tracker.start("a", run_id, {}) == run_id
    tracker._client.delete_run(run_id)
    again = tracker.start("a", run_id, {})
    assert again != run_id and tracker._client.get_run(again).info.lifecycle_stage == "active"


def test_a_restarted_process_recognizes_a_given_run(tracker):
    run_id = tracker.start("a", None, {})
    tracker._given, tracker.is_given = run_id, True
    found = []
    for name in ("b", "b", "c"):
        next_tracker = copy.copy(tracker)
        assert next_tracker.start(name, None, {}) == run_id
        found.append(next_tracker.is_continued)
    assert found == [False, True, False]


def test_each_point_is_logged_once_if_a_request_fails_midway(tracker, monkeypatch):
    run_id = tracker.start("a", None, {})
    points = [Point(step, float(step), {f"v{number}": 0.5 for number in range(400)}) for step in range(3)]
    real, calls = tracker._client.log_batch, []

    def log_batch(*arguments, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("in the middle")
        real(*arguments, **kwargs)

    monkeypatch.setattr(tracker._client, "log_batch", log_batch)
    with pytest.raises(ValueError, match="in the middle"):
        tracker.log(points)
    for point in points:
        tracker.log([point])
    histories = [tracker._client.get_metric_history(run_id, f"v{number}") for number in (0, 99, 100, 399)]
    assert [[metric.step for metric in history] for history in histories] == [[0, 1, 2]] * 4


def test_the_monitor_is_stopped_before_the_server_is_contacted(tracker, monkeypatch):
    tracker.start("a", None, {})
    tracker._monitor = types.SimpleNamespace(_shutdown_event=threading.Event(), finish=lambda: None)

    def fail():
        raise ConnectionRefusedError("nobody there")

    monkeypatch.setattr(tracker, "_probe", fail)
    with pytest.raises(ConnectionRefusedError):
        tracker.finish("finished", {}, None)
    assert tracker._monitor._shutdown_event.is_set()


def test_warnings_do_not_show_the_password():
    pytest.importorskip("mlflow")
    tracker = MLflowLogger(tracking_uri="https://me:secret@example.org/mlflow").tracker
    tracker.prepare()
    assert tracker.title == "MLflow at https://example.org/mlflow"


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r"pip install 'fitflax\[mlflow\]'"):
        MLflowLogger()


def test_fitflax_does_not_import_mlflow_or_wandb():
    code = "import fitflax, fitflax.integrations.mlflow, fitflax.integrations.wandb, sys; print('mlflow' in sys.modules, 'wandb' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(SCRIPT.parent.parent)})
    assert found.stdout.split() == ["False", "False"]
