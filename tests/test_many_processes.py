"""Training in several real processes on loopback: the same numbers as in one, saves, resumes with another number of processes, lost and terminated ones."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from fitflax.checkpoints import CheckpointStore
from tests.many_processes_script import examples

SCRIPT = pathlib.Path(__file__).with_name("many_processes_script.py")
SECONDS = 180.0
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

pytestmark = pytest.mark.slow  # Each test starts processes that import JAX.


def free_port(wanted: int = 0) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", wanted))
        return int(free.getsockname()[1])


def start(env: dict[str, str], count: int, **arguments: Any) -> list[subprocess.Popen[str]]:
    port = free_port()
    environment = env | {"PJRT_NPROC": "16"}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    # No cache: several processes would write it at the same time.
    environment = {name: value for name, value in environment.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    commands = [[sys.executable, str(SCRIPT), json.dumps({"count": count, "index": index, "port": port, **arguments})] for index in range(count)]
    return [subprocess.Popen(command, env=environment, **PIPES) for command in commands]


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Status and output of each."""
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
        return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()


def results(env: dict[str, str], count: int, **arguments: Any) -> list[dict[str, Any]]:
    processes = start(env, count, **arguments)
    outputs = [output for _, output in ended(processes)]
    assert [process.returncode for process in processes] == [0] * count, outputs
    return [json.loads(next(line for line in output.splitlines() if line.startswith("RESULT "))[7:]) for output in outputs]


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["step"] == expected["step"] and found["outputs"][0] == expected["outputs"][0]
    for key in ("evaluation", "norm"):
        assert found[key] == pytest.approx(expected[key], abs=1e-5), key
    for key, values in expected["history"].items():
        assert found["history"][key] == pytest.approx(values, abs=1e-5), key
    assert found["outputs"][2] == pytest.approx(expected["outputs"][2], abs=1e-4)


@pytest.fixture(scope="module")
def alone(compilation_cache: dict[str, str]) -> dict[str, Any]:
    root = str(SCRIPT.parent.parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    return results(env, 1, kind="data parallel")[0]


@pytest.mark.parametrize(("kind", "count"), [("data parallel", 2), ("data parallel", 4), ("fsdp", 2), ("fsdp", 4), ("mesh", 2), ("tensor", 2)])
def test_several_processes_train_evaluate_and_predict_as_one_does(kind, count, alone, process_env):
    for found in results(process_env, count, kind=kind):
        assert found["processes"] == count
        close(found, alone)


@pytest.mark.parametrize(("kind", "count"), [("data parallel", 2), ("fsdp", 2), ("data parallel", 4)])
def test_shares_of_unequal_length_train_evaluate_and_predict_as_one_process_with_the_same_batches(kind, count, process_env):
    expected = results(process_env, 1, kind="data parallel", shards=count)[0]
    found = results(process_env, count, kind=kind, shards=count)
    outputs = [row for each in found for row in each["outputs"][2]]
    for each in found:
        close({**each, "outputs": [[len(outputs), 4], 0, outputs]}, expected)
    # By hand, of what each process predicted for its own examples.
    logits = np.concatenate([each["logits"] for each in found])
    labels = examples(90)[1]
    loss = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(90), labels]
    by_hand = {"loss": loss.mean(), "accuracy": (logits.argmax(axis=1) == labels).mean()}
    assert found[0]["evaluation"] == pytest.approx(by_hand, abs=1e-5)


def test_a_run_in_shares_goes_on_as_if_nothing_had_happened_and_in_no_other_number(process_env, tmp_path):
    expected = results(process_env, 2, kind="data parallel", shards=2, steps=11)
    for steps in (2, 7, 11):
        found = results(process_env, 2, kind="data parallel", shards=2, steps=steps, directory=str(tmp_path))
    others = {"history": {}, "best": None}  # Of the last start alone, and only where there is a directory.
    assert [each | others for each in found] == [each | others for each in expected]
    processes = start(process_env, 4, kind="data parallel", shards=4, steps=15, directory=str(tmp_path))
    for _, output in ended(processes):
        assert "ERROR RestoreError: The run's data came in 2 shards" in output


def test_a_run_goes_on_with_another_number_of_processes(alone, process_env, tmp_path):
    for steps, count in ((3, 2), (5, 4), (8, 1), (12, 2)):
        last = results(process_env, count, kind="data parallel", steps=steps, directory=str(tmp_path))
    for found in last:
        close(found, alone)
    best = min(range(4), key=lambda epoch: alone["history"]["val_loss"][epoch])
    assert [found["best"] for found in last] == [[pytest.approx(alone["history"]["val_loss"][best], abs=1e-5), 3 * (best + 1)]] * 2
    assert CheckpointStore(tmp_path / "checkpoints").latest() == 12
    assert (tmp_path / "log.csv").read_text().count("\n") == 5  # One writes, whoever it is.


def test_a_run_that_all_processes_are_asked_to_stop_at_one_step_stops_there(process_env):
    found = results(process_env, 2, kind="data parallel", steps=1000, stop={"step": 7, "processes": [0, 1]})
    assert [each["step"] for each in found] == [7, 7]


@pytest.mark.parametrize("who", [0, 1])
def test_if_one_process_alone_is_asked_to_stop_all_stop_at_the_same_step(who, process_env, tmp_path):
    arguments: dict[str, Any] = {"kind": "data parallel", "steps": 10**6, "directory": str(tmp_path)}
    found = results(process_env, 2, **arguments, stop={"step": 7, "processes": [who]})
    assert found[0]["step"] == found[1]["step"] > 7
    assert {each["reason"] for each in found} == {"enough"}
    assert CheckpointStore(tmp_path / "checkpoints").latest() == found[0]["step"]


def test_what_is_due_by_the_clock_is_due_at_the_same_steps_in_all_processes(process_env):
    found = results(process_env, 2, kind="data parallel", steps=300, seconds=1.0)
    assert found[0]["due"] == found[1]["due"] and len(found[0]["due"]) > 2


@pytest.mark.parametrize("kind", ["data parallel", "fsdp"])
def test_all_callbacks_work_and_what_is_read_in_one_process_alone_holds_up_nobody(kind, process_env, tmp_path):
    one = results(process_env, 1, kind="data parallel", watch=True, directory=str(tmp_path / "one"))[0]
    for found in results(process_env, 2, kind=kind, watch=True, directory=str(tmp_path / "two")):
        close(found, one)
    assert list((tmp_path / "two/tensorboard").rglob("*tfevents*"))


def test_what_slurm_says_is_enough(alone, process_env):
    first = 65536 - 2**12
    job = free_port(first + os.getpid() % 2**12) - first  # JAX makes the port of the job's number.
    processes = []
    for index in range(2):
        env = {"SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}
        arguments = {"kind": "data parallel", "count": 2, "index": index, "port": 0}
        processes.append(subprocess.Popen([sys.executable, str(SCRIPT), json.dumps(arguments)], env=process_env | env | {"PJRT_NPROC": "16"}, **PIPES))
    for _, output in ended(processes):
        close(json.loads(output.split("RESULT ")[1]), alone)


def test_a_run_on_the_devices_of_one_process_alone_is_warned_of_where_it_writes_nothing(process_env, tmp_path):
    first, second = (output for _, output in ended(start(process_env, 2, kind="own", steps=3, directory=str(tmp_path))))
    assert "RESULT" in first and "RESULT" in second
    assert "writes no files in process 1" in second and "writes no files" not in first


@pytest.mark.parametrize("steps_per_call", ["auto", 4])
def test_groups_of_steps_are_the_same_in_all_processes(steps_per_call, alone, process_env):
    for found in results(process_env, 2, kind="data parallel", steps_per_call=steps_per_call):
        close(found, alone)


def test_one_process_alone_prints(process_env):
    first, second = (output for _, output in ended(start(process_env, 2, kind="data parallel", steps=3)))
    assert "loss:" in first and "loss:" not in second


def test_processes_that_read_other_data_are_an_error(process_env):
    processes = start(process_env, 2, kind="data parallel", differ=True)
    outputs = [output for _, output in ended(processes)]
    assert [process.returncode for process in processes] == [3, 3]
    for output in outputs:
        assert "ERROR DataError: The processes read different data" in output


def kill_one(number: signal.Signals, victim: int, env: dict[str, str], directory: pathlib.Path) -> tuple[list[subprocess.Popen[str]], list[str], float]:
    """Sends a signal to one of two processes in the middle of a run; returns them when both have ended, what they said, and after how many seconds."""
    processes = start(env, 2, kind="data parallel", steps=10**6, directory=str(directory))
    end = time.monotonic() + SECONDS
    while not CheckpointStore(directory / "checkpoints").steps() and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(processes[victim].pid, number)
    begin = time.monotonic()
    outputs = [output for _, output in ended(processes)]
    return processes, outputs, time.monotonic() - begin


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("leave", r"ERROR ReplicaError: Process 0 waits \(fit\) for processes \[1\], which have ended. All must make the same calls"),
        ("evaluate", "ERROR ReplicaError: The processes do not do the same: process 0 is at fit, process 1 is at evaluate"),
        (
            "optimizer",
            "ERROR ReplicaError: The processes must do the same, but what each is set differs: .*optimizer is 'adam' in process 0 and 'sgd' in process 1",
        ),
        ("rate", "ERROR ReplicaError: .* learning_rate is 0.01 in process 0 and 0.02 in process 1"),
        ("epochs", "ERROR ReplicaError: .* epochs is None in process 0 and 3 in process 1"),
        ("data", "ERROR DataError: The processes have different data: process 0 90 examples in batches of 32; process 1 80 examples"),
        ("lengths", "ERROR DataError: The data cannot be used, by process 1: DataError: .*90.*80"),
    ],
)
def test_what_one_process_does_otherwise_is_an_error_that_says_so_at_once(mistake, message, process_env):
    begin = time.monotonic()
    outputs = [output for _, output in ended(start(process_env, 2, kind="data parallel", mistake=mistake))]
    assert time.monotonic() - begin < 60
    assert re.search(message, outputs[0]), outputs


def test_processes_that_find_different_checkpoints_are_an_error_before_the_first_step(process_env, tmp_path):
    step = results(process_env, 1, kind="data parallel", steps=4, directory=str(tmp_path / "0"))[0]["step"]
    outputs = [output for _, output in ended(start(process_env, 2, kind="data parallel", directory=f"{tmp_path}/{{index}}"))]
    told = re.escape(
        f"ERROR CheckpointError: The processes do not find the same checkpoint to go on from, steps by process: {{0: {step}, 1: None}}. They must share"
    )
    for output in outputs:
        assert re.search(told, output) and "step 5" not in output, output


def names(output: str, lost: int) -> bool:
    """Whether what a process said names the one that was lost; JAX calls process 0 the leader."""
    told = output.replace("\r", "")
    if f"or do not answer: [{lost}]." in told or f" Process {lost} failed: " in told:
        return True
    return f"/task:{lost}" in told or f"Task {lost} heartbeat" in told or f"heartbeats):\n{lost}\n" in told or (lost == 0 and "leader task" in told)


ASKING = """
import atexit, sys, time
from fitflax import parallel
from fitflax.parallel import board, launch

def ask():
    try:
        return board.Board("nothing").read_within("comes", 1.5)
    except TimeoutError:
        return {}

launch.failures, launch._WATCH_SECONDS = ask, float(sys.argv[3])
atexit.register(lambda: print("watched" if launch._Ending.watch.is_alive() else "ended"))
parallel.initialize("127.0.0.1:" + sys.argv[1], 2, int(sys.argv[2]))
time.sleep(0.5)
"""


@pytest.mark.parametrize("pause", [0.0, 60.0])  # In the middle of a question at the end, and between two of them.
def test_a_process_asks_no_more_after_the_others_when_it_ends(pause, process_env):
    port = free_port()
    processes = [subprocess.Popen([sys.executable, "-c", ASKING, str(port), str(index), str(pause)], env=process_env, **PIPES) for index in range(2)]
    outputs = ended(processes)
    assert [(status, output.splitlines()[-1:]) for status, output in outputs] == [(0, ["ended"])] * 2, outputs


STANDING = """
import sys, time
import jax, numpy as np
from fitflax import parallel
from fitflax.parallel import launch, processes

index = int(sys.argv[2])
launch._WATCH_SECONDS, launch._GRACE_SECONDS, processes._TELL_SECONDS = 0.1, 2.0, 0.5
parallel.initialize("127.0.0.1:" + sys.argv[1], 2, index)
if index:
    time.sleep(4)
processes.exchange(index, "a trial")
if index:
    raise ValueError("the disk is full")
time.sleep(100)  # As in a call of all devices, which nobody can break off.
"""


def test_a_process_that_waits_says_for_whom_and_one_that_stands_still_ends_when_another_has_failed(process_env):
    port, begin = free_port(), time.monotonic()
    processes = [subprocess.Popen([sys.executable, "-c", STANDING, str(port), str(index)], env=process_env, **PIPES) for index in range(2)]
    outputs = ended(processes)
    assert time.monotonic() - begin < 60 and [status != 0 for status, _ in outputs] == [True, True], outputs
    assert "Process 0 has been waiting for processes [1] for 0.5 s (a trial)." in outputs[0][1]
    assert "Process 0 of 2 cannot go on without the others, and ends. Process 1 failed: ValueError: the disk is full." in outputs[0][1]


GOING_ON = """
import sys
import jax, numpy as np
from flax import linen as nn
jax.config.update("jax_num_cpu_devices", 1)
import fitflax
fitflax.parallel.initialize("127.0.0.1:" + sys.argv[1], 2, int(sys.argv[2]))
trainer = fitflax.Trainer(nn.Dense(1))
trainer.compile("sgd", "mse")
loop = trainer.train_loop((np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)), batch_size=4, steps=3)
steps = [checkpoint.step for checkpoint in loop]
loop.steps = 6
steps += [checkpoint.step for checkpoint in loop]
loop.steps, loop.every = 8, fitflax.every(steps=2)
print(steps + [checkpoint.step for checkpoint in loop])
"""


def test_a_loop_that_had_ended_goes_on_in_all_processes_when_its_total_is_raised(process_env):
    port = free_port()
    processes = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", GOING_ON, str(port), str(index)], env=process_env, **PIPES) for index in range(2)]
    outputs = ended(processes)
    assert [(status, output.splitlines()[-1:]) for status, output in outputs] == [(0, ["[1, 2, 3, 4, 5, 6, 8]"])] * 2, outputs


@pytest.mark.parametrize("victim", [0, 1])
def test_a_sigterm_to_any_process_has_all_save_the_same_step_and_stop(victim, process_env, tmp_path):
    processes, outputs, _ = kill_one(signal.SIGTERM, victim, process_env, tmp_path)
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2, outputs
    last = [max(int(line.split()[1]) for line in output.splitlines() if line.startswith("step ")) for output in outputs]
    assert last[0] == last[1] == CheckpointStore(tmp_path / "checkpoints").latest()
    step = results(process_env, 2, kind="data parallel", steps=last[0] + 3, directory=str(tmp_path))[0]["step"]
    assert step == last[0] + 3


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_process_ends_the_other_within_a_minute_and_is_named(victim, process_env, tmp_path):
    processes, outputs, seconds = kill_one(signal.SIGKILL, victim, process_env, tmp_path)
    assert processes[1 - victim].returncode != 0 and processes[victim].returncode == -signal.SIGKILL
    assert seconds < 60
    assert names(outputs[1 - victim], victim), outputs[1 - victim][-2000:]
    saved = CheckpointStore(tmp_path / "checkpoints")
    latest = saved.latest()
    assert latest is not None
    saved.verify()
    again = results(process_env, 2, kind="data parallel", steps=latest + 2, directory=str(tmp_path))
    assert [found["step"] for found in again] == [latest + 2] * 2


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_fails_alone_ends_the_others_within_a_minute_and_leaves_checkpoints(who, process_env, tmp_path):
    begin = time.monotonic()
    processes = start(process_env, 2, kind="data parallel", steps=10**6, directory=str(tmp_path), fail={"process": who, "step": 9})
    outputs = [output for _, output in ended(processes)]
    assert time.monotonic() - begin < 80  # The start included.
    assert [process.returncode != 0 for process in processes] == [True, True]
    assert "ZeroDivisionError" in outputs[who] and f"Process {who} of 2 has failed alone" in outputs[who]
    latest = CheckpointStore(tmp_path / "checkpoints").latest()
    assert latest in (8, 9)  # Process 0 saves what it has, if it has the time.
    assert names(outputs[1 - who], who), outputs[1 - who][-3000:]
    again = results(process_env, 2, kind="data parallel", steps=latest + 2, directory=str(tmp_path))
    assert [found["step"] for found in again] == [latest + 2] * 2
