"""Ctrl-C and SIGTERM: obeyed between two steps, after the step is saved; in real processes where it matters."""

import json
import os
import pathlib
import signal
import subprocess
import threading
from typing import Any

import pytest

import fitflax
from fitflax.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from fitflax.checkpoints import CheckpointStore
from fitflax.signals import Interruption
from tests import run_script
from tests.run_script import TRAIN, at, differences, directory_of, make_trainer, steps_in


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
def never_stopped(tmp_path_factory: pytest.TempPathFactory, compilation_cache: dict[str, str]) -> tuple[pathlib.Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("never-stopped")
    top = pathlib.Path(__file__).resolve().parent.parent
    env = os.environ | compilation_cache | {"PYTHONPATH": str(top), "JAX_NUM_CPU_DEVICES": "8"}
    return root, run_script.run(root, env, fit={"steps": 12}, every=100)


def assert_goes_on(root: pathlib.Path, env: dict[str, str], never_stopped: tuple[pathlib.Path, dict[str, Any]], *, began_at: int) -> None:
    resumed = run_script.run(root, env, fit={"steps": 12}, every=100)
    never_root, never = never_stopped
    assert resumed.pop("began_at") == began_at
    unequal = differences(resumed, {key: value for key, value in never.items() if key != "began_at"}, "result: ")
    unequal += differences(directory_of(root / "best"), directory_of(never_root / "best"), "best/")
    assert not unequal, "\n".join(unequal)
    newest = "step_00000012"
    assert not differences(directory_of(root / "checkpoints")[newest], directory_of(never_root / "checkpoints")[newest])


def test_ctrl_c_inside_an_epoch_saves_that_step_and_the_run_goes_on_bit_for_bit(tmp_path, process_env, never_stopped):
    out, err = send(tmp_path, process_env, [["on_train_batch_end", 7, "wait"]], [signal.SIGINT], status=-signal.SIGINT)
    assert err.rstrip().endswith("KeyboardInterrupt") and "on_train_end ran" in out
    assert steps_in(tmp_path / "checkpoints") == [7]
    assert_goes_on(tmp_path, process_env, never_stopped, began_at=7)


def test_sigterm_saves_and_exits_with_143(tmp_path, process_env, never_stopped):
    out, err = send(tmp_path, process_env, [["on_train_batch_begin", 4, "wait"]], [signal.SIGTERM], status=143)
    assert "on_train_end ran" in out and not err
    # The signal came while step 5 was being made: it is finished, with the end of its epoch.
    assert steps_in(tmp_path / "checkpoints") == [5]
    assert_goes_on(tmp_path, process_env, never_stopped, began_at=5)


def test_ctrl_c_during_validation_leaves_the_epoch_to_be_closed_by_the_resume(tmp_path, process_env, never_stopped):
    out, _ = send(tmp_path, process_env, [["on_test_batch_end", 10, "wait"]], [signal.SIGINT], status=-signal.SIGINT)
    assert "on_train_end ran" in out
    saved = CheckpointStore(tmp_path / "checkpoints").restore()
    assert saved.metadata["step"] == 10 and [row["epoch"] for row in saved.metadata["history"]] == [0]
    assert_goes_on(tmp_path, process_env, never_stopped, began_at=10)


def test_a_second_ctrl_c_leaves_at_once(tmp_path, process_env):
    out, err = send(tmp_path, process_env, [["on_train_batch_end", 7, "wait twice"]], [signal.SIGINT, signal.SIGINT], status=-signal.SIGINT)
    assert err.rstrip().endswith("KeyboardInterrupt") and "on_train_end ran" in out
    assert not steps_in(tmp_path / "checkpoints")


def test_ctrl_c_after_sigterm_leaves_at_once(tmp_path, process_env):
    send(tmp_path, process_env, [["on_train_batch_end", 7, "wait twice"]], [signal.SIGTERM, signal.SIGINT], status=-signal.SIGINT)
    assert not steps_in(tmp_path / "checkpoints")


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


def test_a_signal_during_the_first_hook_of_an_epoch_can_be_resumed(fresh, tmp_path):
    """Nothing was saved at the end of the epoch before, so the checkpoint is made between the epochs."""
    with pytest.raises(KeyboardInterrupt):
        fit(fresh, ModelCheckpoint(tmp_path, every=fitflax.every(steps=100)), raising_signal(fresh, "on_epoch_begin", 5, signal.SIGINT))
    assert steps_in(tmp_path) == [5]
    epochs: list[int] = []
    again = make_trainer()
    recorder = LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    history = fit(again, ModelCheckpoint(tmp_path, every=fitflax.every(steps=100)), recorder, resume="auto")
    assert (again.step, history.epoch, epochs) == (10, [0, 1], [1])


def test_handlers_are_put_back(fresh):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    fit(fresh, steps=1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(SystemExit):
        fit(fresh, raising_signal(fresh, "on_train_batch_end", 2, signal.SIGTERM))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_programs_own_sigterm_handler_is_called_once_after_the_save(fresh, tmp_path):
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


def test_a_run_off_the_main_thread_takes_no_handlers(fresh):
    seen: list[Any] = []
    hook = LambdaCallback(on_train_begin=lambda logs: seen.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=fit, args=(fresh, hook))
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)] and fresh.step == 10


def test_on_train_end_always_runs(fresh):
    for hook, number in (("on_train_batch_end", signal.SIGINT), ("on_train_batch_end", signal.SIGTERM)):
        ended: list[int] = []
        step = fresh.step + 2
        with pytest.raises(BaseException) as caught:
            fit(fresh, raising_signal(fresh, hook, step, number), LambdaCallback(on_train_end=lambda logs, ended=ended: ended.append(fresh.step)))
        assert ended == [step]
        assert caught.type is (KeyboardInterrupt if number == signal.SIGINT else SystemExit)
        assert number == signal.SIGINT or caught.value.code == 143


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


def test_a_signal_in_the_closing_validation_leaves_no_row_and_the_next_start_closes(fresh, tmp_path):
    def start(*more: Any, trainer: fitflax.Trainer) -> fitflax.History:
        return fit(trainer, ModelCheckpoint(tmp_path), EarlyStopping(patience=9), *more, steps=3, validation_data=TRAIN, resume="auto")

    with pytest.raises(KeyboardInterrupt):
        start(raising_signal(fresh, "on_test_begin", 3, signal.SIGINT), trainer=fresh)
    assert steps_in(tmp_path) == [3] and not (tmp_path / "step_00000003/closing.json").exists()
    assert [set(row["logs"]) for row in start(trainer=make_trainer()).rows] == [{"loss", "accuracy", "val_loss", "val_accuracy"}]
    assert (tmp_path / "step_00000003/closing.json").exists()


def test_an_interruption_asks_for_nothing_until_a_signal_comes():
    with Interruption() as interruption:
        interruption.leave()
        signal.raise_signal(signal.SIGTERM)
        assert interruption.requested == signal.SIGTERM


def test_the_script_says_how_it_ended(tmp_path, process_env):
    """The process tests above would prove nothing if the script failed in all of them."""
    process = run_script.start(tmp_path, process_env, fit={"steps": 2})
    out, err = run_script.finish(process)
    assert isinstance(process, subprocess.Popen) and out == "on_train_end ran\n" and not err
    assert json.loads((tmp_path / "result.json").read_text())["step"] == 2
