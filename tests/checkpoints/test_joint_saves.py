"""States that are split between processes, saved by all of them together: real processes on loopback, and the protocol's parts by themselves."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import optax
import pytest

import fitflax
from fitflax.callbacks import BestCheckpoint, ModelCheckpoint
from fitflax.checkpoints import CheckpointStore, load_inference_state
from fitflax.parallel import DataParallel
from tests import test_many_processes
from tests.many_processes_script import Network, examples
from tests.test_many_processes import SECONDS, close, ended, results

SCRIPT = pathlib.Path(__file__).with_name("joint_saves_script.py")

pytestmark = pytest.mark.slow  # Each test starts processes that import JAX.


@pytest.fixture
def own_script(monkeypatch):
    monkeypatch.setattr(test_many_processes, "SCRIPT", SCRIPT)


def start(env: dict[str, str], **arguments: Any) -> list[subprocess.Popen[str]]:
    return test_many_processes.start(env, 2, **arguments)


def errors(outputs: list[str]) -> list[tuple[str, str]]:
    """Type and text of the error that ended each process."""
    lines = [next(line for line in output.splitlines() if line.startswith("ERROR ")) for output in outputs]
    return [tuple(json.loads(line[6:])[:2]) for line in lines]


def data_parallel() -> fitflax.Trainer:
    trainer = fitflax.Trainer(Network(), parallel=DataParallel(jax.devices()[:2]))
    trainer.compile(optax.adam(0.01), "sparse_categorical_crossentropy", ["accuracy"])
    return trainer


def hidden(directory: pathlib.Path) -> set[str]:
    return {entry.name for entry in directory.iterdir() if entry.name.startswith(".")} - {".lock", ".run.json"}


@pytest.mark.parametrize(("kind", "asynchronous"), [("fsdp", True), ("tensor", True), ("mesh", False), ("copies", True)])
@pytest.mark.usefixtures("own_script")
def test_a_split_run_that_stops_and_goes_on_is_bit_for_bit_one_that_does_not_stop(kind, asynchronous, process_env, tmp_path):
    found = results(process_env, 2, scenario="resume", kind=kind, asynchronous=asynchronous, directory=str(tmp_path))
    for process in found:
        assert process["split"] and process["resumed"] and process["restored"]
        assert process["saves_on_the_board"] == 1
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() == 6 and not hidden(store.directory)
    assert set(store.owners()) == {"BestCheckpoint(val_loss)", "ModelCheckpoint"}
    command = [sys.executable, "-m", "fitflax", "checkpoints", str(store.directory), "--verify"]
    assert subprocess.run(command, env=process_env, check=False).returncode == 0
    # Whoever reads it needs neither the mesh nor the processes.
    x, y = examples(90)
    alone, inference = data_parallel(), data_parallel()
    alone.restore(tmp_path / "saved")
    inference.replace_state(load_inference_state(store.directory))
    for trainer in (alone, inference):
        np.testing.assert_allclose(trainer.predict(x[:10], batch_size=10), found[0]["outputs"], atol=1e-5)
    callbacks = [ModelCheckpoint(store.directory), BestCheckpoint(store.directory)]
    alone.fit(x, y, batch_size=32, steps=7, validation_data=(x, y), callbacks=callbacks, resume=True, verbose=0)
    assert alone.step == 7


def test_a_split_run_goes_on_with_another_number_of_processes(process_env, tmp_path):
    alone = results(process_env, 1, kind="data parallel")[0]
    for steps, count, kind in ((4, 2, "fsdp"), (8, 4, "mesh"), (10, 1, "fsdp"), (12, 2, "tensor")):
        last = results(process_env, count, kind=kind, steps=steps, directory=str(tmp_path))
    for found in last:
        close(found, alone)
    assert CheckpointStore(tmp_path / "checkpoints").latest() == 12


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.usefixtures("own_script")
def test_a_disk_that_fails_in_one_process_is_an_error_in_all_and_older_checkpoints_are_whole(victim, asynchronous, process_env, tmp_path):
    processes = start(process_env, scenario="fail", kind="fsdp", victim=victim, asynchronous=asynchronous, directory=str(tmp_path))
    outputs = [output for _, output in ended(processes)]
    assert [process.returncode for process in processes] == [3, 3], outputs
    for kind, text in errors(outputs):
        assert kind == "CheckpointError" and "No space left on device" in text and text.count("before are intact") == 1
    assert f"process {victim}: " in errors(outputs)[1 - victim][1]
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.steps() == [2, 4] and not hidden(store.directory)
    store.verify()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.usefixtures("own_script")
def test_after_a_save_that_failed_in_the_background_the_next_is_made_at_once_before_all_raise(victim, process_env, tmp_path):
    processes = start(process_env, scenario="fail", kind="fsdp", victim=victim, times=1, directory=str(tmp_path))
    outputs = [output for _, output in ended(processes)]
    assert [process.returncode for process in processes] == [3, 3], outputs
    for kind, text in errors(outputs):
        assert kind == "CheckpointError" and "No space left on device" in text
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.steps() in ([2, 4, 8], [2, 4, 10]) and not hidden(store.directory)  # The older ones: what failed makes no room.
    store.verify()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.usefixtures("own_script")
def test_one_process_that_fails_alone_waits_for_the_others_not_long_and_raises_its_own_error(victim, process_env, tmp_path):
    processes = start(process_env, scenario="desert", kind="fsdp", victim=victim, directory=str(tmp_path))
    try:
        lines = []
        while not lines or not lines[-1].startswith("ERROR "):
            lines.append(processes[victim].stdout.readline())
            assert lines[-1], lines
    finally:
        for process in processes:  # The other one waits for this one's part of a step.
            process.kill()
            process.communicate()
    assert errors(lines[-1:]) == [("KeyError", "'a bug in one process'")]
    (warning,) = json.loads(next(line for line in lines if line.startswith("WARNED "))[7:])
    assert warning.startswith("Step 5 is not saved. Nothing was saved, because all processes must save a state that is split between them: ")
    assert f"process {victim} waited for 3 s to save step 5" in warning and f"process {1 - victim} did not come" in warning
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [2, 4]
    CheckpointStore(tmp_path / "checkpoints").verify()


def killed(number: signal.Signals, victim: int, env: dict[str, str], directory: pathlib.Path) -> tuple[list[int], list[str]]:
    """Sends a signal to one process of a run that saves often; returns the statuses and outputs of both."""
    processes = test_many_processes.start(env, 2, kind="fsdp", steps=10**6, directory=str(directory))
    end = time.monotonic() + SECONDS
    while len(CheckpointStore(directory / "checkpoints").steps()) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(processes[victim].pid, number)
    outputs = [output for _, output in ended(processes)]
    return [process.returncode for process in processes], outputs


def test_a_sigterm_to_one_process_has_all_save_the_same_step_of_a_split_state(process_env, tmp_path):
    statuses, outputs = killed(signal.SIGTERM, 1, process_env, tmp_path)
    assert statuses == [128 + signal.SIGTERM] * 2, outputs
    last = [max(int(line.split()[1]) for line in output.splitlines() if line.startswith("step ")) for output in outputs]
    store = CheckpointStore(tmp_path / "checkpoints")
    assert last[0] == last[1] == store.latest()
    store.verify()


@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_process_was_killed_among_saves_the_run_goes_on_from_a_whole_checkpoint(victim, process_env, tmp_path):
    statuses, outputs = killed(signal.SIGKILL, victim, process_env, tmp_path)
    assert statuses[victim] == -signal.SIGKILL and statuses[1 - victim] != 0, outputs
    store = CheckpointStore(tmp_path / "checkpoints")
    store.verify()
    latest = store.latest()
    again = results(process_env, 2, kind="fsdp", steps=latest + 2, directory=str(tmp_path))
    assert [found["step"] for found in again] == [latest + 2] * 2
    assert not hidden(store.directory)
