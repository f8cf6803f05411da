"""Ctrl-C and SIGTERM: obeyed between two steps, after the step is saved; in real processes where it matters."""

import hashlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

import fitflax
from fitflax.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, Phase
from fitflax.checkpoints import CheckpointStore
from fitflax.errors import CheckpointError, FitflaxWarning
from fitflax.loops.signals import Interruption
from fitflax.parallel import DataParallel
from tests import run_script
from tests.ports import reserve_port
from tests.run_script import TRAIN, Network, at, differences, directory_of, make_trainer, state_of, steps_in


def send(root: pathlib.Path, env: dict[str, str], stops: list[list[Any]], signals: list[int], *, status: int) -> tuple[str, str]:
    """Starts the script, which waits at its stops, sends one signal at each wait, and returns what it printed."""
    process = run_script.start(root, env, fit={"steps": 12}, every=100, stops=stops)
    for number in signals:
        line = process.stdout.readline()
        assert line.startswith("at step"), line + process.communicate()[1]
        process.send_signal(number)
        process.stdin.write("\n")
        process.stdin.flush()
    return run_script.finish(process, status=status)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, compilation_cache: dict[str, str]) -> tuple[pathlib.Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("never-stopped")
    top = pathlib.Path(__file__).resolve().parents[2]
    env = os.environ | compilation_cache | {"PYTHONPATH": str(top), "JAX_NUM_CPU_DEVICES": "8"}
    result = run_script.run(root, env, fit={"steps": 12}, every=100)
    assert (result["began_at"], result["step"]) == (0, 12)
    return root, result


def assert_resumes(root: pathlib.Path, env: dict[str, str], uninterrupted: tuple[pathlib.Path, dict[str, Any]], *, began_at: int) -> None:
    resumed = run_script.run(root, env, fit={"steps": 12}, every=100)
    expected_root, expected = uninterrupted
    assert resumed.pop("began_at") == began_at
    unequal = differences(resumed, {key: value for key, value in expected.items() if key != "began_at"}, "result: ")
    unequal += differences(directory_of(root / "best"), directory_of(expected_root / "best"), "best/")
    assert not unequal, "\n".join(unequal)
    newest = "step_00000012"
    assert not differences(directory_of(root / "checkpoints")[newest], directory_of(expected_root / "checkpoints")[newest])


@pytest.mark.slow
def test_ctrl_c_inside_an_epoch_saves_that_step_and_the_run_resumes_bit_for_bit(tmp_path, process_env, uninterrupted):
    out, err = send(tmp_path, process_env, [["on_train_batch_end", 7, "wait"]], [signal.SIGINT], status=-signal.SIGINT)
    assert err.rstrip().endswith("KeyboardInterrupt") and "on_train_end ran" in out
    assert steps_in(tmp_path / "checkpoints") == [7]
    assert_resumes(tmp_path, process_env, uninterrupted, began_at=7)


def test_sigterm_saves_and_exits_with_143(tmp_path, process_env, uninterrupted):
    out, err = send(tmp_path, process_env, [["on_train_batch_begin", 4, "wait"]], [signal.SIGTERM], status=143)
    assert "on_train_end ran" in out and not err
    # The signal arrived during step 5: the step is finished, with the end of its epoch.
    assert steps_in(tmp_path / "checkpoints") == [5]
    assert_resumes(tmp_path, process_env, uninterrupted, began_at=5)


@pytest.mark.slow
def test_ctrl_c_during_validation_leaves_the_epoch_to_be_closed_by_the_resume(tmp_path, process_env, uninterrupted):
    out, _ = send(tmp_path, process_env, [["on_test_batch_end", 10, "wait"]], [signal.SIGINT], status=-signal.SIGINT)
    assert "on_train_end ran" in out
    saved = CheckpointStore(tmp_path / "checkpoints").restore()
    assert saved.metadata["step"] == 10 and [row["epoch"] for row in saved.metadata["history"]] == [0]
    assert_resumes(tmp_path, process_env, uninterrupted, began_at=10)


@pytest.mark.slow
def test_a_second_ctrl_c_exits_immediately(tmp_path, process_env):
    out, err = send(tmp_path, process_env, [["on_train_batch_end", 7, "wait twice"]], [signal.SIGINT, signal.SIGINT], status=-signal.SIGINT)
    assert err.rstrip().endswith("KeyboardInterrupt") and "on_train_end ran" in out
    assert not steps_in(tmp_path / "checkpoints")


# -- to a whole process group --

# A run that reads from two forked workers of a PyTorch loader, in a separate process group. It prints "under way" where the test sends the signal.
WITH_WORKERS = """
import os, signal, sys, threading, warnings

warnings.simplefilter("error")
warnings.filterwarnings("ignore", r"os\\.fork\\(\\) was called", RuntimeWarning)

import fitflax
from torch.utils.data import DataLoader, Dataset
from fitflax.callbacks import LambdaCallback, ModelCheckpoint
from tests.run_script import TRAIN, at, make_trainer, steps_in

directory, where, has_handler = sys.argv[1:]


class Examples(Dataset):
    def __init__(self, *, waits):
        self.waits = waits

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if self.waits and index == 0:
            print("under way", flush=True)
            threading.Event().wait()
        return TRAIN[0][index % 18], TRAIN[1][index % 18]


def handle(number, frame):
    print("custom handler after step", steps_in(directory), os.getpid() == process, flush=True)


process = os.getpid()
if has_handler == "True":
    signal.signal(signal.SIGTERM, handle)
trainer = make_trainer()
loader = lambda where_it_waits: DataLoader(Examples(waits=where == where_it_waits), batch_size=4, num_workers=2, multiprocessing_context="fork")
trainer.fit(
    loader("first batch"),
    steps=10**9,
    validation_data=loader("validation"),
    validation_freq=fitflax.every(steps=3),
    verbose=0,
    callbacks=[
        ModelCheckpoint(directory),
        at(trainer, "on_train_batch_end", 5, lambda step: where == "step" and print("under way", flush=True)),
        LambdaCallback(on_train_end=lambda logs: print("on_train_end ran:", trainer.stop_reason, flush=True)),
    ],
)
print("fit returned", flush=True)
"""


IGNORED_BY_PYTHON = r"Exception ignored in: <function (?:_at_fork|_\w+Lock).*?\nRuntimeError: (?:DataLoader worker|cannot release un-acquired lock)[^\n]*\n"


def signal_group(directory: pathlib.Path, env: dict[str, str], number: int, where: str, *, has_handler: bool, status: int) -> tuple[str, str]:
    """Starts the script, sends a signal to it and its workers, and returns what it printed.

    If a worker dies while the process forks another one, PyTorch's error is raised in a hook of `os.fork`, where Python prints and ignores it.
    """
    command = [sys.executable, "-c", WITH_WORKERS, str(directory), where, str(has_handler)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        line = process.stdout.readline()
        assert line == "under way\n", line + process.communicate()[1]
        os.killpg(process.pid, number)
        out, err = run_script.finish(process, status=status)
        return out, re.sub(IGNORED_BY_PYTHON, "", err, flags=re.DOTALL)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "validation", "first batch"])
def test_sigterm_to_a_run_and_the_workers_of_its_loader_saves_and_exits_with_143(where, tmp_path, process_env):
    out, err = signal_group(tmp_path, process_env, signal.SIGTERM, where, has_handler=False, status=143)
    begins = where != "first batch"
    assert out == ("on_train_end ran: interrupted by SIGTERM\n" if begins else "") and not err
    assert bool(steps_in(tmp_path)) == begins


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "validation", "first batch"])
def test_ctrl_c_in_a_run_and_the_workers_of_its_loader_saves_and_raises_keyboard_interrupt(where, tmp_path, process_env):
    _, err = signal_group(tmp_path, process_env, signal.SIGINT, where, has_handler=False, status=-signal.SIGINT)
    assert err.rstrip().endswith("KeyboardInterrupt") and "DataLoader worker" not in err
    assert err.count("Finishing the step and saving") == 1  # The workers print nothing.
    assert bool(steps_in(tmp_path)) == (where != "first batch")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "first batch"])
def test_a_custom_handler_is_called_after_the_save_if_workers_get_the_signal_too(where, tmp_path, process_env):
    out, err = signal_group(tmp_path, process_env, signal.SIGTERM, where, has_handler=True, status=0)
    lines = [f"custom handler after step {steps_in(tmp_path)} True", "fit returned"]
    assert out.splitlines()[-2:] == lines and not err
    assert bool(steps_in(tmp_path)) == (where != "first batch")


def test_a_signal_is_recorded_although_a_worker_dies_while_it_is_handled(monkeypatch):
    def fail(number: int, frame: Any) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. ")

    def getsignal(number: int) -> Any:
        if number == signal.SIGCHLD and len(deaths) < 1:
            deaths.append(number)
            signal.raise_signal(number)
        return find(number)

    deaths: list[int] = []
    find, earlier = signal.getsignal, signal.signal(signal.SIGCHLD, fail)
    try:
        with Interruption() as interruption:
            monkeypatch.setattr(signal, "getsignal", getsignal)
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGCHLD)
            assert deaths and interruption.requested == signal.SIGTERM
        assert find(signal.SIGCHLD) is fail
    finally:
        signal.signal(signal.SIGCHLD, earlier)


@pytest.mark.parametrize("error", [RuntimeError("a file is gone"), ConnectionResetError("Connection reset by peer"), EOFError()], ids=repr)
def test_an_error_of_the_data_after_a_signal_is_a_consequence_of_it(error, fresh, tmp_path, capsys):
    """A lost connection to a worker is expected after a signal; other causes are printed."""

    def batches() -> Iterator[Any]:
        yield from [(TRAIN[0][:4], TRAIN[1][:4])] * 3
        signal.raise_signal(signal.SIGTERM)
        raise error

    with pytest.raises(SystemExit) as caught:
        fresh.fit(batches, steps=8, verbose=0, callbacks=[ModelCheckpoint(tmp_path)])
    assert (caught.value.code, steps_in(tmp_path), fresh.stop_reason) == (143, [3], "interrupted by SIGTERM")
    assert ("reading the data failed" in capsys.readouterr().err) == isinstance(error, RuntimeError)


@pytest.mark.parametrize("from_data", [True, False])
def test_an_error_without_a_signal_or_not_of_the_data_is_raised(from_data, fresh, tmp_path):
    def batches() -> Iterator[Any]:
        yield from [(TRAIN[0][:4], TRAIN[1][:4])] * 3
        raise RuntimeError("a file is gone")

    def fail(step: int) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("a file is gone")

    callbacks = [] if from_data else [at(fresh, "on_train_batch_end", 3, fail)]
    with pytest.raises(RuntimeError, match="a file is gone"):
        fresh.fit(batches, steps=8, verbose=0, callbacks=[ModelCheckpoint(tmp_path), *callbacks])
    assert steps_in(tmp_path) == [3]


def test_an_error_of_a_save_after_a_signal_is_raised_although_the_data_failed_before(fresh, tmp_path, monkeypatch):
    def batches() -> Iterator[Any]:
        yield from [(TRAIN[0][:4], TRAIN[1][:4])] * 3
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr(os, "fsync", fail)
        raise RuntimeError("a worker is gone")

    def fail(descriptor: int) -> None:
        raise OSError("No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device"):
        fresh.fit(batches, steps=8, verbose=0, callbacks=[ModelCheckpoint(tmp_path)])


def test_a_forked_process_handles_signals_as_without_a_run(tmp_path):
    """It inherits the handler, and knows from its process ID that the run is not its own."""
    seen: list[int] = []
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with Interruption() as interruption:
            interruption._process += 1  # As in a fork.
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGTERM] and interruption.requested is None
    finally:
        signal.signal(signal.SIGTERM, earlier)


# -- with jax.distributed --

FOREVER = 10**9

# One of several processes, each with its own run and directory: they share only JAX's notice, and fitflax warns about that. It prints its step at the end.
DISTRIBUTED = """
import json, os, sys, warnings

warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This run uses devices of 1 of")
import jax

port, index, count, directory, steps = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", num_processes=int(count), process_id=int(index))

import fitflax
from tests.loops.test_signals import train_long

trainer = train_long(os.path.join(directory, index), int(steps), jax.local_devices()[0])
print(json.dumps(trainer.step))
"""


def train_long(directory: str | pathlib.Path, steps: int, device: jax.Device) -> fitflax.Trainer:
    """Starts or resumes a run that prints when it is under way."""
    trainer = fitflax.Trainer(Network(), parallel=DataParallel([device]))
    trainer.compile("adam", "sparse_categorical_crossentropy", ["accuracy"], learning_rate=0.05)
    checkpoints = ModelCheckpoint(directory)
    # JAX checks for its signal once a second: slow steps keep the run from reaching thousands of steps.
    take_time = LambdaCallback(on_train_batch_end=lambda batch, logs: hashlib.sha256(bytes(2**21)))
    under_way = at(trainer, "on_train_batch_end", 7, lambda step: print("under way", flush=True))
    says = LambdaCallback(on_train_end=lambda logs: print("on_train_end ran after step", trainer.step, flush=True))
    more = [take_time, under_way, says] if steps == FOREVER else [says]
    trainer.fit(TRAIN, batch_size=4, steps=steps, steps_per_epoch=FOREVER, verbose=0, resume="auto", callbacks=[checkpoints, *more])
    return trainer


def start_distributed(directory: pathlib.Path, env: dict[str, str], *, count: int, steps: int) -> list[subprocess.Popen[str]]:
    port = reserve_port()
    commands = [[sys.executable, "-c", DISTRIBUTED, *map(str, (port, index, count, directory, steps))] for index in range(count)]
    return [subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands]


def preempt(directory: pathlib.Path, env: dict[str, str], *, count: int) -> int:
    """Sends SIGTERM to the last of `count` processes once all are under way; returns the step after which all stopped, which only the first saved."""
    processes = start_distributed(directory, env, count=count, steps=FOREVER)
    try:
        for process in processes:
            assert process.stdout.readline() == "under way\n", process.communicate()[1]
        processes[-1].send_signal(signal.SIGTERM)
        (says,) = {run_script.finish(process, status=143)[0] for process in processes}
    finally:
        for process in processes:
            process.kill()
            process.wait()
    stopped_at = int(says.removeprefix("on_train_end ran after step "))
    assert [steps_in(directory / str(index)) for index in range(count)] == [[stopped_at]] + [[]] * (count - 1)
    return stopped_at


@pytest.mark.slow
def test_jaxs_notice_saves_and_exits_with_143_and_the_run_resumes_bit_for_bit(tmp_path, process_env):
    stopped_at = preempt(tmp_path, process_env, count=1)
    (process,) = start_distributed(tmp_path, process_env, count=1, steps=stopped_at + 5)
    out, err = run_script.finish(process)
    assert out.splitlines() == [f"on_train_end ran after step {stopped_at + 5}", str(stopped_at + 5)] and not err
    train_long(tmp_path / "never", stopped_at + 5, jax.devices()[0])
    expected, resumed = (directory_of(tmp_path / name)[f"step_{stopped_at + 5:08d}"] for name in ("never", "0"))
    assert not differences(resumed, expected)


@pytest.mark.slow
def test_after_one_sigterm_all_processes_stop_after_the_same_step_and_the_first_saves_it(tmp_path, process_env):
    assert preempt(tmp_path, process_env, count=2) >= 7


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulates `jax.distributed` for a run in this process, with a notice for step 3; returns the steps that were asked about."""
    asked: list[int] = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: asked.append(step) or step == 3)
    return asked


@pytest.mark.parametrize("options", [{"validation_data": TRAIN, "validation_freq": fitflax.every(steps=1)}, {}], ids=["looked at", "unseen"])
def test_jax_is_asked_once_per_step_and_its_answer_is_final(options, distributed, fresh, tmp_path):
    ended: list[int] = []
    callbacks = [ModelCheckpoint(tmp_path), LambdaCallback(on_train_end=lambda logs: ended.append(fresh.step))]
    with pytest.raises(SystemExit) as caught:
        fit(fresh, *callbacks, **options)
    assert caught.value.code == 143
    assert distributed == [1, 2, 3]
    assert (ended, steps_in(tmp_path), fresh.stop_reason) == ([3], [3], "interrupted by SIGTERM")


def test_with_jax_distributed_no_handler_is_installed_and_ctrl_c_still_saves(distributed, fresh, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    seen: list[Any] = []
    look = at(fresh, "on_train_batch_end", 1, lambda step: seen.extend(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)))
    with pytest.raises(KeyboardInterrupt):
        fit(fresh, look, ModelCheckpoint(tmp_path), raising_signal(fresh, "on_train_batch_end", 2, signal.SIGINT))
    assert seen == before
    assert steps_in(tmp_path) == [2]


def test_with_jaxs_notice_turned_off_a_run_warns_that_sigterm_will_not_save_it(distributed, fresh, tmp_path):
    jax.config.update("jax_enable_preemption_service", False)
    try:
        with pytest.warns(FitflaxWarning, match="SIGTERM will not save this run.*jax_enable_preemption_service is off"):
            fit(fresh, ModelCheckpoint(tmp_path), steps=4)
    finally:
        jax.config.update("jax_enable_preemption_service", True)
    assert fresh.step == 4 and not distributed


# -- in this process --


@pytest.fixture(scope="module")
def trainer() -> fitflax.Trainer:
    return make_trainer()


def fit(trainer: fitflax.Trainer, *callbacks: Any, **options: Any) -> fitflax.History:
    return trainer.fit(TRAIN, batch_size=4, verbose=0, callbacks=list(callbacks), **{"steps": 10, **options})


def raising_signal(trainer: fitflax.Trainer, hook: str, step: int, number: int, times: int = 1) -> Any:
    return at(trainer, hook, step, lambda _: [signal.raise_signal(number) for _ in range(times)])


@pytest.fixture
def fresh(trainer: fitflax.Trainer) -> fitflax.Trainer:
    trainer.build((TRAIN[0][:4], TRAIN[1][:4]))
    return trainer


@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_train_batch_end", "on_epoch_begin", "on_epoch_end", "on_checkpoint", "on_train_begin"])
def test_a_signal_in_any_hook_is_obeyed_after_the_step_is_saved(hook, fresh, tmp_path):
    step = 0 if hook == "on_train_begin" else 5
    with pytest.raises(KeyboardInterrupt):
        fit(fresh, ModelCheckpoint(tmp_path), raising_signal(fresh, hook, step, signal.SIGINT))
    saved = {"on_train_begin": [], "on_train_batch_begin": [5, 6]}.get(hook, [5])
    assert steps_in(tmp_path) == saved
    assert fresh.step == (saved[-1] if saved else 0)


def test_a_run_with_a_signal_in_the_first_hook_of_an_epoch_can_be_resumed(fresh, tmp_path):
    """Nothing was saved at the end of the previous epoch, so the checkpoint is made between the epochs."""
    with pytest.raises(KeyboardInterrupt):
        fit(fresh, ModelCheckpoint(tmp_path, every=fitflax.every(steps=100)), raising_signal(fresh, "on_epoch_begin", 5, signal.SIGINT))
    assert steps_in(tmp_path) == [5]
    epochs: list[int] = []
    again = make_trainer()
    recorder = LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    history = fit(again, ModelCheckpoint(tmp_path, every=fitflax.every(steps=100)), recorder, resume="auto")
    assert (again.step, history.epoch, epochs) == (10, [0, 1], [1])


def test_handlers_are_restored(fresh):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    fit(fresh, steps=1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.warns(FitflaxWarning, match="SIGTERM ended the run, and nothing was saved"), pytest.raises(SystemExit):
        fit(fresh, raising_signal(fresh, "on_train_batch_end", 2, signal.SIGTERM))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_sigterm_warns_that_nothing_was_saved_if_a_callback_only_acts_after_saves(fresh):
    class Report(Callback):
        phase = Phase.SAVE

    with pytest.warns(FitflaxWarning, match="SIGTERM ended the run, and nothing was saved"), pytest.raises(SystemExit):
        fit(fresh, Report(), raising_signal(fresh, "on_train_batch_end", 2, signal.SIGTERM))


def test_a_custom_sigterm_handler_is_called_once_after_the_save(fresh, tmp_path):
    seen: list[list[int]] = []
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(steps_in(tmp_path)))
    try:
        fit(fresh, ModelCheckpoint(tmp_path), raising_signal(fresh, "on_train_batch_end", 3, signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert seen == [[3]]
    assert fresh.step == 3


def test_an_ignored_signal_stays_ignored(fresh):
    earlier = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        fit(fresh, raising_signal(fresh, "on_train_batch_end", 3, signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert fresh.step == 10


def in_a_thread(function: Callable[..., Any], *arguments: Any) -> None:
    thread = threading.Thread(target=function, args=arguments, name="search-3")
    thread.start()
    thread.join()


def test_a_run_off_the_main_thread_that_is_not_saved_does_not_warn(fresh):
    in_a_thread(fit, fresh)
    assert fresh.step == 10


def test_a_run_off_the_main_thread_installs_no_handlers_and_warns(fresh, tmp_path):
    seen: list[Any] = []
    hook = LambdaCallback(on_train_begin=lambda logs: seen.append(signal.getsignal(signal.SIGINT)))
    with pytest.warns(FitflaxWarning, match="Ctrl-C and SIGTERM will not save this run, because fit runs in thread 'search-3'") as warned:
        in_a_thread(fit, fresh, ModelCheckpoint(tmp_path), hook)
    assert seen == [signal.getsignal(signal.SIGINT)] and fresh.step == 10
    assert [warning.filename for warning in warned] == [__file__]  # The line that calls fit, so that Python shows it once for each such line.


def test_a_run_off_the_main_thread_is_saved_by_stop_as_the_warning_advises(fresh, tmp_path):
    stopping = at(fresh, "on_train_batch_end", 3, lambda step: fresh.stop("asked by the main thread"))
    with pytest.warns(FitflaxWarning, match=r"call trainer\.stop\(reason\) from there, which saves"):
        in_a_thread(fit, fresh, ModelCheckpoint(tmp_path), stopping)
    assert (steps_in(tmp_path), fresh.stop_reason) == ([3], "asked by the main thread")


@pytest.fixture
def c_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM as Python reports it if code that is not Python handled it before Python started."""
    known = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else known(number))


def test_a_handler_of_c_code_is_left_alone_and_the_run_warns(c_handler, fresh, tmp_path, monkeypatch):
    real, set_for = signal.signal, []
    monkeypatch.setattr(signal, "signal", lambda number, handler: set_for.append(number) or real(number, handler))
    with pytest.warns(FitflaxWarning, match="SIGTERM will not save this run, because code that is not Python handles it"), pytest.raises(KeyboardInterrupt):
        fit(fresh, ModelCheckpoint(tmp_path), raising_signal(fresh, "on_train_batch_end", 3, signal.SIGINT))
    assert signal.SIGINT in set_for and signal.SIGTERM not in set_for and steps_in(tmp_path) == [3]


def test_a_warning_that_is_an_error_leaves_no_handler_behind(c_handler, fresh, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(FitflaxWarning):
        fit(fresh, ModelCheckpoint(tmp_path))
    assert signal.getsignal(signal.SIGINT) == before and fresh.step == 0


def test_a_second_ctrl_c_in_a_hook_still_runs_on_train_end(fresh, tmp_path):
    ended: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        fit(
            fresh,
            ModelCheckpoint(tmp_path),
            raising_signal(fresh, "on_train_batch_end", 3, signal.SIGINT, times=2),
            LambdaCallback(on_train_end=lambda logs: ended.append(fresh.step)),
        )
    assert ended == [3] and not steps_in(tmp_path)


@pytest.mark.slow
def test_a_signal_in_the_closing_validation_leaves_no_row_and_resuming_closes_the_epoch(fresh, tmp_path):
    def start(*more: Any, trainer: fitflax.Trainer) -> fitflax.History:
        return fit(trainer, ModelCheckpoint(tmp_path), EarlyStopping(patience=9), *more, steps=3, validation_data=TRAIN, resume="auto")

    with pytest.raises(KeyboardInterrupt):
        start(raising_signal(fresh, "on_test_begin", 3, signal.SIGINT), trainer=fresh)
    assert steps_in(tmp_path) == [3] and not (tmp_path / "step_00000003/closing.json").exists()
    assert [set(row["logs"]) for row in start(trainer=make_trainer()).rows] == [{"loss", "accuracy", "val_loss", "val_accuracy"}]
    assert (tmp_path / "step_00000003/closing.json").exists()


def test_an_interruption_requests_nothing_until_a_signal_arrives():
    with Interruption() as interruption:
        interruption.reraise_signal()
        signal.raise_signal(signal.SIGTERM)
        assert interruption.requested == signal.SIGTERM


def test_sigterm_outranks_ctrl_c_because_it_asks_for_the_end_of_the_process(fresh, tmp_path):
    first = raising_signal(fresh, "on_train_batch_begin", 2, signal.SIGINT)
    second = raising_signal(fresh, "on_train_batch_end", 3, signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        fit(fresh, ModelCheckpoint(tmp_path), first, second)
    assert (caught.value.code, steps_in(tmp_path)) == (143, [3])


def test_sigterm_can_be_repeated_without_harm(fresh, tmp_path):
    """Some schedulers repeat it."""
    callbacks = [raising_signal(fresh, "on_train_batch_end", 3, signal.SIGTERM, times=2), raising_signal(fresh, "on_train_end", 3, signal.SIGTERM)]
    with pytest.raises(SystemExit) as caught:
        fit(fresh, ModelCheckpoint(tmp_path), *callbacks)
    assert (caught.value.code, steps_in(tmp_path)) == (143, [3])


def test_ctrl_c_after_sigterm_exits_immediately(fresh, tmp_path):
    signals = [raising_signal(fresh, "on_train_batch_end", 3, number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(KeyboardInterrupt):
        fit(fresh, ModelCheckpoint(tmp_path), *signals)
    assert not steps_in(tmp_path)


def test_a_second_ctrl_c_exits_a_validation_and_a_third_does_no_further_harm(fresh, tmp_path):
    """The first waits for the end of the validation's batch; the second does not, and saves nothing; the remaining callbacks still end."""
    ended: list[str] = []

    def impatient(batch: int, logs: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        ended.append("never reached")

    def end(logs: Any) -> None:
        ended.append("first")
        signal.raise_signal(signal.SIGINT)

    behind = LambdaCallback(on_train_end=lambda logs: ended.append("second"))
    callbacks = [LambdaCallback(on_test_batch_end=impatient), LambdaCallback(on_train_end=end), behind]
    with pytest.raises(KeyboardInterrupt):
        fit(fresh, ModelCheckpoint(tmp_path), *callbacks, validation_data=TRAIN)
    assert ended == ["first", "second"] and not steps_in(tmp_path)


def test_a_second_ctrl_c_interrupts_a_slow_on_train_end(fresh, tmp_path):
    """What the first one saved stays, and the callbacks after the slow one still end."""
    ended: list[str] = []

    def block(logs: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        ended.append("never reached")

    first = raising_signal(fresh, "on_train_batch_end", 3, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fit(fresh, ModelCheckpoint(tmp_path), first, LambdaCallback(on_train_end=block), LambdaCallback(on_train_end=lambda logs: ended.append("behind")))
    assert (ended, steps_in(tmp_path)) == (["behind"], [3])


@pytest.mark.mostly_slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_second_ctrl_c_does_not_wait_for_a_save(asynchronous, fresh, tmp_path, monkeypatch):
    """The disk hangs until the run has exited; what is half written is not a checkpoint, and the next run removes it."""
    disk, fsync = threading.Event(), os.fsync
    asked_again: list[int] = []

    def hang(descriptor: int) -> None:
        interruption = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
        if not asked_again and interruption is not None and interruption.requested is not None:
            asked_again.append(fresh.step)
            os.kill(os.getpid(), signal.SIGINT)  # To the main thread, whichever this one is.
            disk.wait()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", hang)
    first = raising_signal(fresh, "on_train_batch_end", 3, signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(fresh, ModelCheckpoint(tmp_path, asynchronous=asynchronous), first)
        assert asked_again == [3] and steps_in(tmp_path) == []
    finally:
        disk.set()
    history = fit(make_trainer(), ModelCheckpoint(tmp_path), resume="auto")
    assert len(history.epoch) == 2
    CheckpointStore(tmp_path).verify()
    assert [entry.name for entry in tmp_path.iterdir() if "tmp" in entry.name] == []


def test_a_signal_before_the_first_step_saves_nothing_and_the_hooks_pair_up(trainer, tmp_path):
    """Such as a signal that arrives while the data is opened or the step is compiled."""
    calls: list[str] = []
    hooks = LambdaCallback(**{hook: (lambda *_, hook=hook: calls.append(hook)) for hook in ("on_train_begin", "on_epoch_begin", "on_train_end")})

    def batches() -> Iterator[Any]:
        signal.raise_signal(signal.SIGTERM)
        yield TRAIN[0][:4], TRAIN[1][:4]

    trainer.build((TRAIN[0][:4], TRAIN[1][:4]))
    with pytest.raises(SystemExit):
        trainer.fit(batches, steps=4, verbose=0, callbacks=[ModelCheckpoint(tmp_path), hooks])
    assert calls == ["on_train_begin", "on_train_end"]
    assert (trainer.step, steps_in(tmp_path)) == (0, [])


def test_resuming_repeats_an_interrupted_step_with_its_batch(fresh, tmp_path):
    """Python's own KeyboardInterrupt can come anywhere. Here it comes before the last step of an epoch, when the batch that ends the pass is already taken."""
    fit(fresh, steps=7)
    expected = state_of(fresh)
    fresh.build((TRAIN[0][:4], TRAIN[1][:4]))

    def interrupt(step: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(fresh, ModelCheckpoint(tmp_path), at(fresh, "on_train_batch_begin", 4, interrupt))
    assert steps_in(tmp_path) == [4]
    again = make_trainer()
    fit(again, ModelCheckpoint(tmp_path), steps=7, resume="auto")
    assert not differences(state_of(again), expected)


def test_a_signal_after_the_last_step_is_obeyed_when_the_run_is_complete(fresh, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(fresh, ModelCheckpoint(tmp_path), raising_signal(fresh, "on_train_end", 10, signal.SIGINT))
    assert steps_in(tmp_path)[-1] == 10 and len(fresh.history.rows) == 2
    assert [row["epoch"] for row in CheckpointStore(tmp_path).restore().metadata["history"]] == [0, 1]


@pytest.mark.parametrize("what", ["evaluate", "predict"])
def test_ctrl_c_exits_evaluate_and_predict_immediately_and_they_can_be_repeated(what, fresh):
    """There is nothing to save, so Ctrl-C does what it does everywhere else."""
    fit(fresh, steps=1)
    name = {"evaluate": "test", "predict": "predict"}[what]
    batches: list[int] = []

    def end(batch: int, logs: Any) -> None:
        batches.append(batch)
        signal.raise_signal(signal.SIGINT)

    def call(*callbacks: Any) -> Any:
        data = TRAIN if what == "evaluate" else (TRAIN[0],)
        return getattr(fresh, what)(*data, batch_size=4, verbose=0, callbacks=list(callbacks))

    whole = call()
    with pytest.raises(KeyboardInterrupt):
        call(LambdaCallback(**{f"on_{name}_batch_end": end}))
    assert batches == [0]
    np.testing.assert_equal(call(), whole)


def test_a_fit_inside_a_fit_passes_ctrl_c_to_the_outer_fit(fresh, tmp_path):
    """The handler that it finds belongs to the outer run, which therefore saves and exits, too."""
    inner = make_trainer()

    def train_another(step: int) -> None:
        fit(inner, ModelCheckpoint(tmp_path / "inner"), raising_signal(inner, "on_train_batch_end", 2, signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        fit(fresh, ModelCheckpoint(tmp_path / "outer"), at(fresh, "on_train_batch_end", 3, train_another))
    assert (steps_in(tmp_path / "inner"), steps_in(tmp_path / "outer")) == ([2], [3])
