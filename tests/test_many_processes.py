"""Training in several real processes on loopback: the same numbers as in one, saves, resumes with another number of processes, lost and terminated ones."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from fitflax.checkpoints import CheckpointStore
from tests import compiled_programs
from tests.many_processes_script import examples
from tests.ports import reserve_port, reserve_slurm_job

SCRIPT = pathlib.Path(__file__).with_name("many_processes_script.py")
SECONDS = 180.0
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

# Each test starts processes that import JAX. A group of processes may take `3 * SECONDS`, and up to four groups are made for the first test that needs them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(12 * SECONDS)]


def start(env: dict[str, str], count: int, *, script: pathlib.Path = SCRIPT, **arguments: Any) -> list[subprocess.Popen[str]]:
    port = reserve_port()
    environment = env | {"PJRT_NPROC": "16"}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    commands = [[sys.executable, str(script), json.dumps({"count": count, "index": index, "port": port, **arguments})] for index in range(count)]
    environments = compiled_programs.of_processes(environment, count)
    return [subprocess.Popen(command, env=own, **PIPES) for command, own in zip(commands, environments, strict=True)]


def ended(processes: list[subprocess.Popen[str]], seconds: float = SECONDS) -> list[tuple[int, str]]:
    """Returns the status and output of each process."""
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
        return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()


def result_in(output: str) -> dict[str, Any]:
    return dict(json.loads(next(line for line in output.splitlines() if line.startswith("RESULT "))[7:]))


def results(env: dict[str, str], count: int, *, script: pathlib.Path = SCRIPT, **arguments: Any) -> list[dict[str, Any]]:
    processes = start(env, count, script=script, **arguments)
    outputs = [output for _, output in ended(processes)]
    assert [process.returncode for process in processes] == [0] * count, outputs
    return [result_in(output) for output in outputs]


@dataclasses.dataclass
class Group:
    """Processes that have ended after several runs, one after another."""

    statuses: list[int]
    outputs: list[str]

    @classmethod
    def of(cls, processes: list[subprocess.Popen[str]]) -> "Group":
        return cls(*(list(each) for each in zip(*ended(processes, 3 * SECONDS), strict=True)))

    def outputs_of(self, name: str) -> list[str]:
        """Returns what each process printed in one of the runs."""
        found = [re.search(rf"^RUN {re.escape(name)}$(.*?)(?=^RUN |\Z)", output, re.MULTILINE | re.DOTALL) for output in self.outputs]
        assert all(found), (self.statuses, self.outputs)
        return [match[1] for match in found if match is not None]

    def results(self, name: str) -> list[dict[str, Any]]:
        outputs = self.outputs_of(name)
        assert all("\nRESULT " in each for each in outputs), (self.statuses, outputs)
        return [result_in(each) for each in outputs]


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["step"] == expected["step"] and found["outputs"][0] == expected["outputs"][0]
    for key in ("evaluation", "norm"):
        assert found[key] == pytest.approx(expected[key], abs=1e-5), key
    for key, values in expected["history"].items():
        assert found["history"][key] == pytest.approx(values, abs=1e-5), key
    assert found["outputs"][2] == pytest.approx(expected["outputs"][2], abs=1e-4)


def environment() -> dict[str, str]:
    """Returns the environment of the test process, with this checkout importable."""
    paths = [str(SCRIPT.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="module")
def env() -> dict[str, str]:
    return environment()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("runs")
    np.random.default_rng(0).integers(0, 50, 1003, dtype=np.uint16).tofile(path / "tokens.bin")
    return path


# The runs, by name, of four groups of processes that are started one after another; `{root}` is a directory that they share. Starting processes takes longer
# than a run. "relay" and "split relay" resume in the next group, which has another number of processes.
# A brief run neither evaluates nor predicts.
PARALLEL = {"kind": "data parallel"}
TOKENS = {"tokens": "{root}/tokens.bin"}
STOPPING = {**PARALLEL, "steps": 10**6, "brief": True}
FIRST: dict[str, Any] = {
    **{kind: {"kind": kind} for kind in ("data parallel", "fsdp", "mesh", "tensor")},
    **{f"shares, {kind}": {"kind": kind, "shards": 2} for kind in ("data parallel", "fsdp")},
    "shares, not stopped": {**PARALLEL, "shards": 2, "steps": 11},
    "shares": {**PARALLEL, "shards": 2, "brief": True, "steps": 2, "directory": "{root}/shares"},
    "relay": {**PARALLEL, "brief": True, "steps": 3, "directory": "{root}/relay"},
    "split relay": {"kind": "fsdp", "brief": True, "steps": 4, "directory": "{root}/split"},
    "groups, auto": {**PARALLEL, "steps_per_call": "auto"},
    "groups, 4": {**PARALLEL, "steps_per_call": 4},
    "all stop": {**PARALLEL, "brief": True, "steps": 1000, "stop": {"step": 7, "processes": [0, 1]}},
    **{f"{who} stops": {**STOPPING, "directory": f"{{root}}/stop-{who}", "stop": {"step": 7, "processes": [who]}} for who in (0, 1)},
    "clock": {**PARALLEL, "brief": True, "steps": 100, "seconds": 0.3},
    **{f"watch, {kind}": {"kind": kind, "watch": True, "directory": f"{{root}}/watch-{kind}"} for kind in ("data parallel", "fsdp")},
    "stages": {**PARALLEL, "brief": True, "steps": 3, "directory": "{root}/stages", "next_stage": True},
    "tokens": TOKENS,
    "own": {"kind": "own", "brief": True, "steps": 3, "directory": "{root}/own"},
    "other data": {**PARALLEL, "differ": True},
}
FOUR: dict[str, Any] = {
    **{kind: {"kind": kind} for kind in ("data parallel", "fsdp")},
    "shares, data parallel": {**PARALLEL, "shards": 4},
    "tokens": TOKENS,
    "relay": {**PARALLEL, "brief": True, "steps": 5, "directory": "{root}/relay"},
    "split relay": {"kind": "mesh", "brief": True, "steps": 8, "directory": "{root}/split"},
    "shares": {**PARALLEL, "shards": 4, "steps": 15, "directory": "{root}/shares"},
}
ONE: dict[str, Any] = {
    "alone": PARALLEL,
    "tokens": TOKENS,
    **{f"shares, {count}": {**PARALLEL, "shards": count} for count in (2, 4)},
    "watch": {**PARALLEL, "watch": True, "directory": "{root}/watch-one"},
    "relay": {**PARALLEL, "brief": True, "steps": 8, "directory": "{root}/relay"},
    "split relay": {"kind": "fsdp", "brief": True, "steps": 10, "directory": "{root}/split"},
    "different": {**PARALLEL, "brief": True, "steps": 4, "directory": "{root}/different/0"},
}
LAST: dict[str, Any] = {
    "different": {**PARALLEL, "directory": "{root}/different/{{index}}"},
    "relay": {**PARALLEL, "steps": 12, "directory": "{root}/relay"},
    "split relay": {"kind": "tensor", "steps": 12, "directory": "{root}/split"},
    "shares, 7": {**PARALLEL, "shards": 2, "brief": True, "steps": 7, "directory": "{root}/shares"},
    "shares, 11": {**PARALLEL, "shards": 2, "steps": 11, "directory": "{root}/shares"},
}


def runs_in(root: pathlib.Path, runs: dict[str, Any]) -> dict[str, Any]:
    paths = ("directory", "tokens")
    return {name: {key: value.format(root=root) if key in paths else value for key, value in arguments.items()} for name, arguments in runs.items()}


@pytest.fixture(scope="module")
def first(env: dict[str, str], root: pathlib.Path) -> Group:
    return Group.of(start(env, 2, runs=runs_in(root, FIRST)))


@pytest.fixture(scope="module")
def four(env: dict[str, str], root: pathlib.Path, first: Group) -> Group:
    return Group.of(start(env, 4, runs=runs_in(root, FOUR)))


@pytest.fixture(scope="module")
def one(env: dict[str, str], root: pathlib.Path, four: Group) -> Group:
    return Group.of(start(env, 1, runs=runs_in(root, ONE)))


@pytest.fixture(scope="module")
def last(env: dict[str, str], root: pathlib.Path, one: Group) -> Group:
    """Two processes that find each other by Slurm's variables alone."""
    job, processes = reserve_slurm_job(), []
    for index, own in enumerate(compiled_programs.of_processes(env, 2)):
        slurm = {"SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}
        arguments = {"count": 2, "index": index, "port": 0, "runs": runs_in(root, LAST)}
        processes.append(subprocess.Popen([sys.executable, str(SCRIPT), json.dumps(arguments)], env=own | slurm | {"PJRT_NPROC": "16"}, **PIPES))
    return Group.of(processes)


@pytest.fixture(scope="module")
def alone(one: Group) -> dict[str, Any]:
    return one.results("alone")[0]


def test_processes_end_with_the_status_of_their_last_run(first, four, one, last):
    assert [group.statuses for group in (first, four, one, last)] == [[3] * 2, [3] * 4, [0], [0] * 2]


@pytest.mark.parametrize(("kind", "count"), [("data parallel", 2), ("data parallel", 4), ("fsdp", 2), ("fsdp", 4), ("mesh", 2), ("tensor", 2)])
def test_several_processes_train_evaluate_and_predict_like_one(kind, count, alone, first, four):
    for found in (first if count == 2 else four).results(kind):
        assert found["processes"] == count
        close(found, alone)


@pytest.mark.parametrize(("kind", "count"), [("data parallel", 2), ("fsdp", 2), ("data parallel", 4)])
def test_shards_of_unequal_length_give_the_results_of_one_process_with_the_same_batches(kind, count, first, four, one):
    expected = one.results(f"shares, {count}")[0]
    found = (first if count == 2 else four).results(f"shares, {kind}")
    outputs = [row for each in found for row in each["outputs"][2]]
    for each in found:
        close({**each, "outputs": [[len(outputs), 4], 0, outputs]}, expected)
    # Computed from what each process predicted for its own examples.
    logits = np.concatenate([each["logits"] for each in found])
    labels = examples(90)[1]
    loss = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(90), labels]
    computed = {"loss": loss.mean(), "accuracy": (logits.argmax(axis=1) == labels).mean()}
    assert found[0]["evaluation"] == pytest.approx(computed, abs=1e-5)


def test_the_windows_of_tokens_of_all_processes_are_those_of_one_process(first, four, one):
    (alone,) = one.results("tokens")
    assert len(alone["windows"]) == 10 and {len(batch) for batch in alone["windows"]} == {16}
    for group, count in ((first, 2), (four, 4)):
        found = group.results("tokens")
        for step, batch in enumerate(alone["windows"]):
            own = [each["windows"][step] for each in found]
            assert [len(rows) for rows in own] == [16 // count] * count and [row for rows in own for row in rows] == batch
        for each in found:
            for key, value in alone["numbers"].items():
                assert each["numbers"][key] == pytest.approx(value, rel=1e-5), key


def test_a_run_in_shards_resumes_bit_for_bit_but_not_with_another_number_of_shards(first, four, last):
    expected = first.results("shares, not stopped")
    assert [each["step"] for group, name in ((first, "shares"), (last, "shares, 7")) for each in group.results(name)] == [2, 2, 7, 7]
    others = {"history": {}, "best": None}  # They cover only the last start, and only if there is a directory.
    assert [each | others for each in last.results("shares, 11")] == [each | others for each in expected]
    for output in four.outputs_of("shares"):
        assert "ERROR RestoreError: The run was saved in the middle of a pass over 2 shards" in output


def test_a_run_resumes_with_another_number_of_processes(alone, first, four, one, last, root):
    for group, count, step in ((first, 2, 3), (four, 4, 5), (one, 1, 8), (last, 2, 12)):
        assert [(each["step"], each["processes"]) for each in group.results("relay")] == [(step, count)] * count
    best = min(range(4), key=lambda epoch: alone["history"]["val_loss"][epoch])
    for found in last.results("relay"):
        close(found, alone)
        assert found["best"] == [pytest.approx(alone["history"]["val_loss"][best], abs=1e-5), 3 * (best + 1)]
    assert CheckpointStore(root / "relay/checkpoints").latest() == 12
    assert (root / "relay/log.csv").read_text().count("\n") == 5  # Only one process writes, whichever it is.


def test_a_run_continues_with_a_new_directory_of_checkpoints_and_its_best_ones(first, root):
    assert [each["step"] for each in first.results("stages")] == [5, 5]
    assert [CheckpointStore(root / "stages" / name).latest() for name in ("checkpoints", "next")] == [3, 5]


def test_a_run_with_a_split_state_resumes_with_another_number_of_processes(alone, first, four, one, last, root):
    for group, count, step in ((first, 2, 4), (four, 4, 8), (one, 1, 10), (last, 2, 12)):
        assert [(each["step"], each["processes"]) for each in group.results("split relay")] == [(step, count)] * count
    for found in last.results("split relay"):
        close(found, alone)
    assert CheckpointStore(root / "split/checkpoints").latest() == 12


def test_a_run_stops_at_the_step_at_which_all_processes_are_asked_to_stop(first):
    assert [(each["step"], each["reason"]) for each in first.results("all stop")] == [(7, "process 0")] * 2


@pytest.mark.parametrize("who", [0, 1])
def test_if_only_one_process_is_asked_to_stop_all_stop_at_the_same_step(who, first, root):
    found = first.results(f"{who} stops")
    assert found[0]["step"] == found[1]["step"] > 7
    assert {each["reason"] for each in found} == {f"process {who}"}
    assert CheckpointStore(root / f"stop-{who}/checkpoints").latest() == found[0]["step"]


def test_time_triggers_fire_at_the_same_steps_in_all_processes(first):
    found = first.results("clock")
    assert found[0]["due"] == found[1]["due"] and len(found[0]["due"]) > 2


@pytest.mark.parametrize("kind", ["data parallel", "fsdp"])
def test_all_callbacks_work_and_reads_in_only_one_process_do_not_block_the_others(kind, first, one, root):
    for found in first.results(f"watch, {kind}"):
        close(found, one.results("watch")[0])
    directories = [root / "watch-one", root / f"watch-{kind}"]
    assert list((directories[1] / "tensorboard").rglob("*tfevents*"))
    one_alone, by_two = ([line.split() for line in (directory / "tracker.txt").read_text().splitlines()] for directory in directories)
    assert len({process for process, *_ in by_two}) == 1  # Only one process reports.
    assert [rest[0] for _, *rest in by_two] == [rest[0] for _, *rest in one_alone] and by_two[-1][1] == "finished"


def test_the_variables_of_slurm_are_enough_to_connect_processes(alone, last):
    for found in last.results("relay"):
        assert found["processes"] == 2
        close(found, alone)


def test_a_run_on_the_devices_of_one_process_warns_in_the_process_that_writes_nothing(first):
    one, other = first.outputs_of("own")
    assert "RESULT" in one and "RESULT" in other
    assert "process 1 writes no files" in other and "writes no files" not in one


@pytest.mark.parametrize("steps_per_call", ["auto", 4])
def test_groups_of_steps_are_the_same_in_all_processes(steps_per_call, alone, first):
    for found in first.results(f"groups, {steps_per_call}"):
        close(found, alone)


def test_only_one_process_prints(first):
    one, other = first.outputs_of("data parallel")
    assert "loss:" in one and "loss:" not in other


def test_processes_that_read_different_data_are_an_error(first):
    assert first.statuses == [3, 3]
    for output in first.outputs_of("other data"):
        assert "ERROR DataError: The processes read different data" in output


MISTAKES = {
    "leave": r"ERROR ReplicaError: Process 0 is waiting for processes \[1\], which have ended \(fit\). Make the same calls",
    "evaluate": "ERROR ReplicaError: The processes make different calls: process 0 is at fit, process 1 is at evaluate",
    "optimizer": "ERROR ReplicaError: The processes have different settings: .*optimizer is 'adam' in process 0 and 'sgd' in process 1",
    "rate": "ERROR ReplicaError: .* learning_rate is 0.01 in process 0 and 0.02 in process 1",
    "epochs": "ERROR ReplicaError: .* epochs is None in process 0 and 3 in process 1",
    "data": "ERROR DataError: The processes have different data: process 0 has num_examples=90, num_batches=3, batch_size=32; process 1 has num_examples=80",
    "lengths": "ERROR DataError: The data of some processes cannot be used: process 1: DataError: .*90.*80",
}


@pytest.fixture(scope="module")
def mistakes(env: dict[str, str]) -> Group:
    """Two processes, one of which makes all mistakes after which the other one can continue, and ends after the last one."""
    names = [name for name in MISTAKES if name not in ("leave", "evaluate")]
    return Group.of(start(env, 2, runs={name: {**PARALLEL, "mistake": name} for name in [*names, "evaluate"]}))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_difference_between_processes_is_immediately_an_error_that_names_it(mistake, env, request):
    begin = time.monotonic()
    group = Group.of(start(env, 2, **PARALLEL, mistake=mistake)) if mistake == "leave" else request.getfixturevalue("mistakes")
    assert time.monotonic() - begin < SECONDS
    outputs = group.outputs_of("alone" if mistake == "leave" else mistake)
    assert re.search(MISTAKES[mistake], outputs[0]), outputs


def test_processes_that_find_different_checkpoints_are_an_error_before_the_first_step(one, last):
    step = one.results("different")[0]["step"]
    message = re.escape(
        "ERROR CheckpointError: The processes found different checkpoints. Use one directory that all processes share. "
        f"Steps by process: {{0: {step}, 1: None}}."
    )
    for output in last.outputs_of("different"):
        assert re.search(message, output) and "step 5" not in output, output


def names(output: str, lost: int) -> bool:
    """Returns whether the output of a process names the one that was lost; JAX calls process 0 the leader."""
    text = output.replace("\r", "")
    if f"or do not respond: [{lost}]." in text or f" Process {lost} failed: " in text:
        return True
    return f"/task:{lost}" in text or f"Task {lost} heartbeat" in text or f"heartbeats):\n{lost}\n" in text or (lost == 0 and "leader task" in text)


ASKING = """
import atexit, sys, time
from fitflax import parallel
from fitflax.parallel import processes, launch

def ask():
    try:
        return processes.Board("nothing").read_within("comes", 1.5)
    except TimeoutError:
        return {}

launch.failures, launch._WATCH_SECONDS = ask, float(sys.argv[3])
atexit.register(lambda: print("watched" if launch._Exit.watch.is_alive() else "ended"))
parallel.initialize("127.0.0.1:" + sys.argv[1], 2, int(sys.argv[2]))
time.sleep(0.5)
"""


@pytest.mark.parametrize("pause", [0.0, 60.0])  # The process ends in the middle of a question, or between two of them.
def test_a_process_stops_asking_about_the_others_when_it_ends(pause, process_env):
    port = reserve_port()
    processes = [subprocess.Popen([sys.executable, "-c", ASKING, str(port), str(index), str(pause)], env=process_env, **PIPES) for index in range(2)]
    outputs = ended(processes)
    assert [(status, output.splitlines()[-1:]) for status, output in outputs] == [(0, ["ended"])] * 2, outputs


STUCK = """
import sys, time
import jax, numpy as np
from fitflax import parallel
from fitflax.parallel import launch, processes

index = int(sys.argv[2])
launch._WATCH_SECONDS, launch._GRACE_SECONDS, processes._REPORT_SECONDS = 0.1, 2.0, 0.5
parallel.initialize("127.0.0.1:" + sys.argv[1], 2, index)
if index:
    time.sleep(4)
processes.exchange(index, "a trial")
if index:
    raise ValueError("the disk is full")
time.sleep(600)  # As in a call of all devices, which nothing can interrupt.
"""


def test_a_waiting_process_names_the_one_that_it_waits_for_and_a_stuck_one_ends_when_another_has_failed(process_env):
    port, begin = reserve_port(), time.monotonic()
    processes = [subprocess.Popen([sys.executable, "-c", STUCK, str(port), str(index)], env=process_env, **PIPES) for index in range(2)]
    outputs = ended(processes)
    assert time.monotonic() - begin < SECONDS and [status != 0 for status, _ in outputs] == [True, True], outputs
    assert "Process 0 has been waiting for processes [1] for 0.5 s (a trial)." in outputs[0][1]
    assert "Process 0 of 2 cannot continue without the others and exits. Process 1 failed: ValueError: the disk is full." in outputs[0][1]


CONTINUING = """
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


def test_a_loop_that_had_ended_continues_in_all_processes_when_its_total_is_raised(process_env):
    port = reserve_port()
    processes = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", CONTINUING, str(port), str(index)], env=process_env, **PIPES) for index in range(2)]
    outputs = ended(processes)
    assert [(status, output.splitlines()[-1:]) for status, output in outputs] == [(0, ["[1, 2, 3, 4, 5, 6, 8]"])] * 2, outputs


@dataclasses.dataclass
class End:
    """How two processes of a run ended, what they left, and how two others resumed from there."""

    directory: pathlib.Path
    statuses: list[int]
    outputs: list[str]
    seconds: float
    latest: int | None
    again: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def end_of(processes: list[subprocess.Popen[str]], directory: pathlib.Path) -> End:
    begin = time.monotonic()
    group = Group.of(processes)
    saved = CheckpointStore(directory / "checkpoints")
    saved.verify()
    return End(directory, group.statuses, group.outputs, time.monotonic() - begin, saved.latest())


def kill_one(number: signal.Signals, victim: int, env: dict[str, str], directory: pathlib.Path) -> End:
    """Sends a signal to one of two processes in the middle of a run; `seconds` counts from then on."""
    processes = start(env, 2, **STOPPING, directory=str(directory))
    end = time.monotonic() + SECONDS
    while not CheckpointStore(directory / "checkpoints").steps() and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(processes[victim].pid, number)
    return end_of(processes, directory)


def fail_one(who: int, env: dict[str, str], directory: pathlib.Path) -> End:
    """Makes one of two processes fail; `seconds` includes the start."""
    return end_of(start(env, 2, **STOPPING, directory=str(directory), fail={"process": who, "step": 9}), directory)


@pytest.fixture(scope="module")
def ends(env: dict[str, str], root: pathlib.Path) -> dict[tuple[Any, int], End]:
    """Two runs at a time, because one that has lost a process does nothing for half a minute; then one start resumes all of them."""
    kinds = [(kind, who) for kind in (signal.SIGKILL, signal.SIGTERM, "fail") for who in (1, 0)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        made = {
            (kind, who): pool.submit(fail_one, who, env, root / f"fail-{who}")
            if kind == "fail"
            else pool.submit(kill_one, kind, who, env, root / f"{kind.name}-{who}")
            for kind, who in kinds
        }
        found = {key: future.result() for key, future in made.items()}
    runs = {f"{key}": {**PARALLEL, "brief": True, "steps": (end.latest or 0) + 2, "directory": str(end.directory)} for key, end in found.items()}
    again = Group.of(start(env, 2, runs=runs))
    for key, end in found.items():
        end.again = again.results(f"{key}")
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_sigterm_to_any_process_makes_all_save_the_same_step_and_stop(victim, ends):
    end = ends[signal.SIGTERM, victim]
    assert end.statuses == [128 + signal.SIGTERM] * 2, end.outputs
    last = [max(int(line.split()[1]) for line in output.splitlines() if line.startswith("step ")) for output in end.outputs]
    assert last[0] == last[1] == end.latest
    assert [found["step"] for found in end.again] == [last[0] + 2] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_process_ends_the_other_within_a_minute_and_is_named(victim, ends):
    end = ends[signal.SIGKILL, victim]
    assert end.statuses[1 - victim] in (75, -signal.SIGABRT) and end.statuses[victim] == -signal.SIGKILL
    assert end.seconds < 60
    assert names(end.outputs[1 - victim], victim), end.outputs[1 - victim][-2000:]
    assert end.latest is not None
    assert [found["step"] for found in end.again] == [end.latest + 2] * 2


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_fails_ends_the_others_within_a_minute_and_leaves_checkpoints(who, ends):
    end = ends["fail", who]
    assert end.seconds < 80
    # JAX aborts the other process if process 0, which serves all, is gone before the other one has learned of the failure.
    assert end.statuses[who] == 1 and end.statuses[1 - who] in (1, -signal.SIGABRT)
    assert "ZeroDivisionError" in end.outputs[who] and f"Process {who} of 2 has failed. The others exit" in end.outputs[who]
    assert end.latest in (8, 9)  # Process 0 saves what it has, if it has the time.
    assert names(end.outputs[1 - who], who), end.outputs[1 - who][-3000:]
    assert [found["step"] for found in end.again] == [end.latest + 2] * 2
