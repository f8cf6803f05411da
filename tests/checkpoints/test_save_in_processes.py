"""States that are split between processes and saved by all of them together, in real processes on loopback."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import time
from typing import Any

import jax
import numpy as np
import optax
import pytest

import fitflax
import fitflax.__main__ as commands
from fitflax.callbacks import BestCheckpoint, ModelCheckpoint
from fitflax.checkpoints import CheckpointStore, load_inference_state
from fitflax.parallel import DataParallel
from tests import test_many_processes
from tests.many_processes_script import Network, examples
from tests.test_many_processes import SECONDS, Group, ended, environment

SCRIPT = pathlib.Path(__file__).with_name("save_in_processes_script.py")

pytestmark = pytest.mark.slow  # Each test starts processes that import JAX.


@pytest.fixture(scope="module")
def env() -> dict[str, str]:
    return environment()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("runs")


def start(env: dict[str, str], **arguments: Any) -> list[subprocess.Popen[str]]:
    return test_many_processes.start(env, 2, script=SCRIPT, **arguments)


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


RESUMES = {"fsdp": True, "tensor": True, "mesh": False, "copies": True}


@pytest.fixture(scope="module")
def resumes(env: dict[str, str], root: pathlib.Path) -> Group:
    runs: dict[str, Any] = {kind: {"scenario": "resume", "kind": kind, "asynchronous": asynchronous} for kind, asynchronous in RESUMES.items()}
    runs |= {"replaced": {"scenario": "replace", "kind": "fsdp", "overwrite": True}, "best": {"scenario": "restore best", "kind": "data parallel"}}
    return Group.of(start(env, runs={name: {**given, "directory": f"{root}/{name}"} for name, given in runs.items()}))


@pytest.mark.parametrize("kind", RESUMES)
def test_a_resumed_split_run_is_bit_for_bit_identical_to_an_uninterrupted_run(kind, resumes, root):
    found = resumes.results(kind)
    for process in found:
        assert process["split"] and process["resumed"] and process["restored"]
        assert process["saves_on_the_board"] == 1
    store = CheckpointStore(root / kind / "checkpoints")
    assert store.latest() == 6 and not hidden(store.directory)
    assert set(store.owners()) == {"BestCheckpoint(val_loss)", "ModelCheckpoint"}
    assert commands.main(["checkpoints", str(store.directory), "--verify"]) == 0
    # Reading it requires neither the mesh nor the processes.
    x, y = examples(90)
    alone, inference = data_parallel(), data_parallel()
    alone.restore(root / kind / "saved")
    inference.replace_state(load_inference_state(store.directory))
    for trainer in (alone, inference):
        np.testing.assert_allclose(trainer.predict(x[:10], batch_size=10), found[0]["outputs"], atol=1e-5)
    callbacks = [ModelCheckpoint(store.directory), BestCheckpoint(store.directory)]
    alone.fit(x, y, batch_size=32, steps=7, validation_data=(x, y), callbacks=callbacks, resume=True, verbose=0)
    assert alone.step == 7


def test_all_processes_ignore_the_checkpoints_of_a_run_that_a_new_one_replaces(resumes, root):
    assert [found["best_step"] for found in resumes.results("replaced")] == [5, 5]
    store = CheckpointStore(root / "replaced")
    assert store.steps() == [2, 3, 4, 5] and not hidden(store.directory)  # Step 3 was the best one at step 4.


def test_all_processes_restore_the_best_checkpoint_once_process_0_has_written_it(resumes, root):
    params = CheckpointStore(root / "best").restore(3).train["params"]
    assert [found["norm"] for found in resumes.results("best")] == [pytest.approx(float(optax.tree.norm(params)), rel=1e-6)] * 2


def test_a_directory_of_another_run_is_an_error_in_all_processes(fails):
    (kind, _), other = errors(fails.outputs_of("in use"))
    assert kind == "DirectoryInUseError"
    assert other == ("ReplicaError", "Process 0 failed, so all other processes stop. See the error in the output of process 0.")


def test_processes_exit_with_the_status_of_their_last_run(resumes, fails):
    assert resumes.statuses == [0, 0] and fails.statuses == [3, 3]


@pytest.fixture(scope="module")
def fails(env: dict[str, str], root: pathlib.Path) -> Group:
    runs: dict[str, Any] = {"in use": {"scenario": "replace", "overwrite": False}}
    runs |= {f"once, {victim}": {"victim": victim, "times": 1} for victim in (0, 1)}
    runs |= {f"{victim}, {asynchronous}": {"victim": victim, "asynchronous": asynchronous} for asynchronous in (False, True) for victim in (0, 1)}
    common = {"scenario": "fail", "kind": "fsdp"}
    return Group.of(start(env, runs={name: {**common, **given, "directory": f"{root}/{name}"} for name, given in runs.items()}))


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_failure_in_one_process_is_an_error_in_all_and_keeps_checkpoints_intact(victim, asynchronous, fails, root):
    said = errors(fails.outputs_of(f"{victim}, {asynchronous}"))
    for kind, text in said:
        assert kind == "CheckpointError" and "No space left on device" in text and text.count("Earlier checkpoints are intact") == 1
    assert f"process {victim}: " in said[1 - victim][1]
    store = CheckpointStore(root / f"{victim}, {asynchronous}" / "checkpoints")
    assert store.steps() == [2, 4] and not hidden(store.directory)
    store.verify()


@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_failed_background_save_the_next_one_runs_immediately_before_all_raise(victim, fails, root):
    for kind, text in errors(fails.outputs_of(f"once, {victim}")):
        assert kind == "CheckpointError" and "No space left on device" in text
    store = CheckpointStore(root / f"once, {victim}" / "checkpoints")
    assert store.steps() in ([2, 4, 8], [2, 4, 10]) and not hidden(store.directory)  # The older ones stay: a failed save makes no room.
    store.verify()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_fails_alone_waits_briefly_for_others_and_raises_its_own_error(victim, env, tmp_path):
    processes = start(env, scenario="desert", kind="fsdp", victim=victim, directory=str(tmp_path))
    try:
        lines = []
        while not lines or not lines[-1].startswith("ERROR "):
            lines.append(processes[victim].stdout.readline())
            assert lines[-1], lines
    finally:
        for process in processes:  # The other one is waiting for this one in a step.
            process.kill()
            process.communicate()
    assert errors(lines[-1:]) == [("KeyError", "'a bug in one process'")]
    (warning,) = json.loads(next(line for line in lines if line.startswith("WARNED "))[7:])
    assert warning.startswith("Step 5 was not saved. Nothing was saved, because all processes must save a state that is split between them: ")
    assert f"process {victim} waited 3 s to save step 5" in warning and f"process {1 - victim} did not arrive" in warning
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [2, 4]
    CheckpointStore(tmp_path / "checkpoints").verify()


@dataclasses.dataclass
class End:
    """How two processes of a run with frequent saves ended after one of them got a signal, and what they left."""

    directory: pathlib.Path
    statuses: list[int]
    outputs: list[str]
    latest: int | None


def killed(number: signal.Signals, victim: int, env: dict[str, str], directory: pathlib.Path) -> End:
    processes = test_many_processes.start(env, 2, kind="fsdp", brief=True, steps=10**6, directory=str(directory), heartbeat=10)
    store, end = CheckpointStore(directory / "checkpoints"), time.monotonic() + SECONDS
    while len(store.steps()) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(processes[victim].pid, number)
    statuses, outputs = zip(*ended(processes), strict=True)
    store.verify()
    return End(directory, list(statuses), list(outputs), store.latest())


@pytest.fixture(scope="module")
def ends(env: dict[str, str], root: pathlib.Path) -> dict[tuple[signal.Signals, int], End]:
    """Two runs at a time, because a run that has lost a process is idle for some seconds."""
    kinds = [(signal.SIGKILL, 1), (signal.SIGKILL, 0), (signal.SIGTERM, 1)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        made = {(number, victim): pool.submit(killed, number, victim, env, root / f"{number.name}-{victim}") for number, victim in kinds}
        return {key: future.result() for key, future in made.items()}


@pytest.fixture(scope="module")
def restarted(env: dict[str, str], ends: dict[tuple[signal.Signals, int], End]) -> Group:
    """One start of two processes that resumes all runs that lost one."""
    lost = {victim: end for (number, victim), end in ends.items() if number == signal.SIGKILL}
    runs = {str(victim): {"kind": "fsdp", "brief": True, "steps": (end.latest or 0) + 2, "directory": str(end.directory)} for victim, end in lost.items()}
    return Group.of(test_many_processes.start(env, 2, runs=runs))


def test_a_sigterm_to_one_process_makes_all_save_the_same_step_of_a_split_state(ends):
    end = ends[signal.SIGTERM, 1]
    assert end.statuses == [128 + signal.SIGTERM] * 2, end.outputs
    last = [max(int(line.split()[1]) for line in output.splitlines() if line.startswith("step ")) for output in end.outputs]
    assert last[0] == last[1] == end.latest


@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_process_is_killed_during_saves_a_run_resumes_from_an_intact_checkpoint(victim, ends, restarted):
    end = ends[signal.SIGKILL, victim]
    assert end.statuses[victim] == -signal.SIGKILL and end.statuses[1 - victim] != 0, end.outputs
    assert end.latest is not None
    assert [found["step"] for found in restarted.results(str(victim))] == [end.latest + 2] * 2
    assert not hidden(end.directory / "checkpoints")
