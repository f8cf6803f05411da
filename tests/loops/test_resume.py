"""A run that is stopped and resumed equals an uninterrupted run bit for bit: the whole state, the history and every callback's state."""

import contextlib
import dataclasses
import gc
import json
import pathlib
import re
import shutil
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import BestCheckpoint, Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, TerminateOnNaN
from fitflax.callbacks.callback_list import CallbackList
from fitflax.checkpoints import CheckpointStore, checkpoint_store, directories, json_documents
from fitflax.data import Batcher, Position, adapt
from fitflax.data.adapt import Feeder
from fitflax.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    DataError,
    DirectoryInUseError,
    FitflaxWarning,
    RestoreError,
)
from fitflax.loops import setup
from fitflax.loops.fit import find_checkpoint
from fitflax.loops.session_state import Progress
from fitflax.loops.training_loop import Run
from tests import run_script
from tests.run_script import TRAIN, VALID, at, checkpoint_of, differences, directory_of, make_trainer, rows_of, state_of, steps_in


@dataclasses.dataclass
class RunResult:
    """A run that ended, normally or with an error."""

    root: pathlib.Path
    trainer: fitflax.Trainer
    history: fitflax.History
    best: BestCheckpoint
    early: EarlyStopping
    error: BaseException | None = None

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.root / "checkpoints"

    @property
    def steps(self) -> list[int]:
        return steps_in(self.checkpoints)


def run(
    root: pathlib.Path,
    *,
    more: Callable[[fitflax.Trainer], list[Callback]] = lambda trainer: [],
    data: Any = TRAIN,
    every: Any = None,
    patience: int = 100,
    restore_best: bool = False,
    resume: Any = "auto",
    raises: type[BaseException] | None = None,
    model: nn.Module | None = None,
    seed: int = 0,
    optimizer: Any = "adam",
    backend: str = "msgpack",
    **options: Any,
) -> RunResult:
    """Trains with everything created from scratch."""
    trainer = make_trainer(model=model, seed=seed, optimizer=optimizer)
    best = BestCheckpoint(root / "best", keep=2, restore_best=restore_best, backend=backend)
    early = EarlyStopping(patience=patience)
    model_checkpoint = ModelCheckpoint(root / "checkpoints", keep=None, backend=backend, **({} if every is None else {"every": every}))
    arguments: dict[str, Any] = {"validation_data": VALID, "verbose": 0, "resume": resume}
    if data is TRAIN:
        arguments["batch_size"] = 4
    with pytest.raises(raises) if raises else contextlib.nullcontext() as caught:
        trainer.fit(data, callbacks=[model_checkpoint, best, early, *more(trainer)], **(arguments | options))
    return RunResult(root, trainer, trainer.history, best, early, caught.value if raises else None)


def assert_equal(one: RunResult, other: RunResult) -> None:
    """Checks that everything that users see of two runs is equal, including their newest checkpoints and best checkpoints."""
    found = {"history": (rows_of(one.history), rows_of(other.history))}
    found["end"] = (one.trainer.step, one.trainer.stop_reason), (other.trainer.step, other.trainer.stop_reason)
    found["best"] = (one.best.best, one.best.best_step), (other.best.best, other.best.best_step)
    found["newest"] = one.steps[-1], other.steps[-1]
    unequal = [f"{name}: {here} != {there}" for name, (here, there) in found.items() if here != there]
    unequal += differences(state_of(one.trainer), state_of(other.trainer), "state")
    unequal += differences(newest_of(one), newest_of(other), "newest checkpoint")
    unequal += differences(directory_of(one.root / "best"), directory_of(other.root / "best"), "best/")
    assert not unequal, "\n".join(unequal)


def newest_of(result: RunResult) -> dict[str, Any]:
    return checkpoint_of(result.checkpoints / f"step_{result.steps[-1]:08d}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunResult]:
    """`uninterrupted(**options)`: the uninterrupted run, made once for the same options."""
    made: dict[str, RunResult] = {}

    def get(**options: Any) -> RunResult:
        key = repr(sorted(options.items(), key=lambda item: item[0]))
        if key not in made:
            made[key] = run(tmp_path_factory.mktemp("never"), **options)
        return made[key]

    return get


def raising(message: str) -> Callable[[int], Any]:
    def act(step: int) -> None:
        raise ArithmeticError(message)

    return act


# -- processes --


@pytest.fixture(scope="module")
def uninterrupted_process(tmp_path_factory: pytest.TempPathFactory, compilation_cache: dict[str, str]) -> tuple[pathlib.Path, dict[str, Any], Any]:
    root = tmp_path_factory.mktemp("never-stopped")
    env = process_environment(compilation_cache)
    return root, run_script.run(root, env, fit={"steps": 12}), env


def process_environment(compilation_cache: dict[str, str], devices: int = 2) -> dict[str, str]:
    import os

    top = pathlib.Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(top), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | compilation_cache | {"PYTHONPATH": path, "JAX_NUM_CPU_DEVICES": str(devices)}


def assert_same_process(root: pathlib.Path, result: dict[str, Any], other_root: pathlib.Path, other: dict[str, Any]) -> None:
    results = [{key: value for key, value in one.items() if key != "began_at"} for one in (result, other)]
    unequal = differences(*results, "result: ")
    for name in ("checkpoints", "best"):
        unequal += differences(directory_of(root / name), directory_of(other_root / name), f"{name}/")
    # A closing row stays next to the checkpoint that it was made for.
    unequal = [line for line in unequal if ": closing: " not in line]
    assert not unequal, "\n".join(unequal)


@pytest.mark.parametrize("k", [4, 5, 6])
@pytest.mark.slow
def test_a_killed_run_resumes_in_a_new_process_bit_for_bit(k, uninterrupted_process, tmp_path):
    """Case 29 and invariant 3: before, at and after the end of an epoch."""
    uninterrupted_root, uninterrupted, env = uninterrupted_process
    run_script.run(tmp_path, env, fit={"steps": 12}, stops=[["on_train_batch_end", k + 1, "kill"]], status=-signal.SIGKILL)
    assert steps_in(tmp_path / "checkpoints")[-1] == k
    resumed = run_script.run(tmp_path, env, fit={"steps": 12}, resume=True)
    assert resumed["began_at"] == k
    assert_same_process(tmp_path, resumed, uninterrupted_root, uninterrupted)


@pytest.mark.slow
def test_a_run_that_ended_inside_an_epoch_resumes_in_a_new_process_bit_for_bit(uninterrupted_process, tmp_path):
    uninterrupted_root, uninterrupted, env = uninterrupted_process
    first = run_script.run(tmp_path, env, fit={"steps": 4})
    assert (first["step"], len(first["history"])) == (4, 1)
    resumed = run_script.run(tmp_path, env, fit={"steps": 12})
    assert resumed["began_at"] == 4
    assert_same_process(tmp_path, resumed, uninterrupted_root, uninterrupted)


@pytest.mark.slow
def test_a_killed_run_on_two_devices_resumes_bit_for_bit(tmp_path, compilation_cache):
    env = process_environment(compilation_cache)
    uninterrupted = run_script.run(tmp_path / "never", env, fit={"steps": 12}, devices=2)
    run_script.run(tmp_path / "killed", env, fit={"steps": 12}, devices=2, stops=[["on_train_batch_end", 8, "kill"]], status=-signal.SIGKILL)
    resumed = run_script.run(tmp_path / "killed", env, fit={"steps": 12}, devices=2)
    assert resumed["began_at"] == 7
    assert_same_process(tmp_path / "killed", resumed, tmp_path / "never", uninterrupted)


@pytest.mark.slow
def test_a_run_killed_at_the_end_of_an_epoch_resumes_bit_for_bit(tmp_path, compilation_cache):
    """The only regular checkpoint is at step 7: everything after it, including the best checkpoint of the killed epoch, is done again."""
    env = process_environment(compilation_cache)
    uninterrupted = run_script.run(tmp_path / "never", env, fit={"steps": 12}, every=7)
    for hook in ("on_test_batch_end", "on_epoch_begin"):
        root = tmp_path / hook
        run_script.run(root, env, fit={"steps": 12}, every=7, stops=[[hook, 10, "kill"]], status=-signal.SIGKILL)
        assert steps_in(root / "checkpoints") == [7]
        resumed = run_script.run(root, env, fit={"steps": 12}, every=7)
        assert resumed["began_at"] == 7
        assert_same_process(root, resumed, tmp_path / "never", uninterrupted)


@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param("orbax", "orbax", marks=pytest.mark.slow), ("orbax", "msgpack"), pytest.param("msgpack", "orbax", marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_a_run_saved_with_one_backend_resumes_bit_for_bit_with_the_same_or_another(first, second, uninterrupted, tmp_path):
    expected = uninterrupted(steps=12)
    run(tmp_path / "stopped", steps=7, backend=first)
    resumed = run(tmp_path / "stopped", steps=12, backend=second)
    assert_equal(resumed, expected)
    assert [(resumed.checkpoints / f"step_{step:08d}" / "train").is_dir() for step in (7, 12)] == [first == "orbax", second == "orbax"]


class Died(BaseException):
    """Simulates the death of a process: after it, the run only cleans up. A real death would skip even that, so nothing may depend on it."""


def dying(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, is_now: Callable[..., bool]) -> None:
    """Makes a function raise instead of running, from a certain call on."""
    function, is_dead = getattr(owner, name), []

    def call(*arguments: Any, **options: Any) -> Any:
        if is_dead or is_now(*arguments, **options):
            is_dead.append(True)
            raise Died
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


def keep_two(root: pathlib.Path, *, best: str = "best") -> list[Callback]:
    when = {"every": fitflax.every(steps=2), "keep": 1, "keep_every": 4, "asynchronous": False}
    return [ModelCheckpoint(root / "checkpoints", **when), BestCheckpoint(root / best, asynchronous=False)]


def run_nine(root: pathlib.Path, **options: Any) -> None:
    make_trainer().fit(TRAIN, batch_size=4, steps=9, validation_data=VALID, verbose=0, resume="auto", callbacks=keep_two(root, **options))


@pytest.mark.parametrize(
    ("number", "best"),
    # With one store for both, more can go wrong.
    [pytest.param(1, "checkpoints", marks=pytest.mark.slow), (3, "best"), *(pytest.param(k, "checkpoints", marks=pytest.mark.slow) for k in (3, 5, 6))],
)
@pytest.mark.parametrize(
    ("owner", "name"),
    [(CheckpointStore, "_record"), (directories, "write_in_place"), (CheckpointStore, "_delete_unwanted"), (ModelCheckpoint, "on_checkpoint")],
)
@pytest.mark.mostly_slow
def test_a_process_that_dies_during_a_save_does_not_change_which_checkpoints_are_kept(owner, name, number, best, uninterrupted_nine, tmp_path, monkeypatch):
    calls = iter(range(1, 1000))
    with monkeypatch.context() as patch, contextlib.suppress(Died):
        dying(patch, owner, name, lambda *arguments, **options: next(calls) == number)
        run_nine(tmp_path, best=best)
    for module in (checkpoint_store, directories):
        monkeypatch.setattr(module, "PROCESS", "0123")  # The next run is in another process.
    run_nine(tmp_path, best=best)
    for directory in ("checkpoints", "best"):
        assert steps_in(tmp_path / directory) == steps_in(uninterrupted_nine(best) / directory)


@pytest.fixture(scope="module")
def uninterrupted_nine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    roots: dict[str, pathlib.Path] = {}

    def get(best: str) -> pathlib.Path:
        if best not in roots:
            roots[best] = tmp_path_factory.mktemp("nine")
            run_nine(roots[best], best=best)
        return roots[best]

    return get


@pytest.mark.slow
def test_a_best_checkpoint_that_was_deleted_before_the_run_fell_back_is_still_remembered(tmp_path):
    """Damage takes the run back to a checkpoint that names a deleted best one. Only the same better checkpoint may replace that one again."""
    run(tmp_path, steps=5)
    best = CheckpointStore(tmp_path / "best")
    assert best.steps() == [5]
    best.retain("BestCheckpoint(val_loss)", [])  # As if a later checkpoint, damaged now, had seen a better one.
    resumed = run(tmp_path, steps=6)
    assert 5 in [step for _, step in resumed.best._kept]


# -- the end of a run and the beginning of the next --


@pytest.mark.parametrize("k", [1, 4, 5, 6, 10])
@pytest.mark.mostly_slow
def test_resuming_after_k_steps_is_bit_for_bit_identical_to_an_uninterrupted_run(k, uninterrupted, tmp_path):
    expected = uninterrupted(steps=12)
    run(tmp_path / "stopped", steps=k)
    resumed = run(tmp_path / "stopped", steps=12)
    assert_equal(resumed, expected)


@pytest.mark.parametrize("k", [3, 5, 7])
@pytest.mark.slow
def test_resuming_a_stopped_run_is_bit_for_bit_identical_to_an_uninterrupted_run(k, uninterrupted, tmp_path):
    """Case 40: there is one row for the epoch in which the run stopped."""
    expected = uninterrupted(epochs=2)
    stopped = run(tmp_path / "stopped", epochs=2, more=lambda trainer: [at(trainer, "on_train_batch_end", k, lambda step: trainer.stop("enough"))])
    assert (stopped.trainer.step, stopped.trainer.stop_reason) == (k, "enough")
    assert stopped.history.epoch == list(range(-(-k // 5)))
    resumed = run(tmp_path / "stopped", epochs=2)
    assert resumed.history.epoch == [0, 1]
    assert_equal(resumed, expected)


@pytest.mark.slow
def test_the_last_checkpoint_of_a_run_that_ended_inside_an_epoch_excludes_its_closing(uninterrupted):
    ended = uninterrupted(steps=7)
    metadata = fitflax.checkpoints.CheckpointStore(ended.checkpoints).restore(7).metadata
    assert [row["epoch"] for row in metadata["history"]] == [0]
    assert list(metadata["metrics"]) == ["train"]
    assert ended.history.epoch == [0, 1]
    assert set(ended.history.rows[1]["logs"]) == {"loss", "accuracy", "val_loss", "val_accuracy"}


@pytest.mark.parametrize(("steps", "restore_best"), [(7, False), (7, True), (10, True)])
@pytest.mark.slow
def test_the_same_script_started_three_times_trains_once(steps, restore_best, tmp_path):
    first = run(tmp_path / "run", steps=steps, restore_best=restore_best)
    files = directory_of(first.checkpoints)
    for _ in range(2):
        hooks: list[str] = []
        again = run(
            tmp_path / "run",
            steps=steps,
            restore_best=restore_best,
            more=lambda trainer, hooks=hooks: [
                LambdaCallback(on_train_batch_begin=lambda *a: hooks.append("batch"), on_epoch_end=lambda *a: hooks.append("epoch"))
            ],
        )
        assert hooks == []
        assert_equal(again, first)
        assert directory_of(first.checkpoints) == files


@pytest.mark.slow
def test_a_run_with_an_interrupted_closing_is_closed_by_the_resume(uninterrupted, tmp_path):
    whole = uninterrupted(steps=7)
    run(tmp_path / "broken", steps=7, more=lambda trainer: [at(trainer, "on_test_begin", 7, raising("no"))], raises=ArithmeticError)
    resumed = run(tmp_path / "broken", steps=7)
    assert_equal(resumed, whole)
    assert_equal(run(tmp_path / "broken", steps=7), whole)


def test_a_resumed_run_does_not_keep_the_state_that_it_has_read(tmp_path, monkeypatch):
    arrays: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []

    def find(*arguments: Any) -> Any:
        saved = find_checkpoint(*arguments)
        arrays.extend(weakref.ref(leaf) for leaf in ([] if saved is None else jax.tree.leaves(saved.train)) if isinstance(leaf, np.ndarray))
        return saved

    def count(batch: int, logs: Any) -> None:
        gc.collect()
        alive.append(sum(array() is not None for array in arrays))

    monkeypatch.setattr("fitflax.trainer.find_checkpoint", find)
    for steps in (1, 3):
        callbacks = [ModelCheckpoint(tmp_path), LambdaCallback(on_train_batch_end=count)]
        make_trainer(model=nn.Dense(3)).fit(TRAIN, batch_size=4, steps=steps, verbose=0, callbacks=callbacks, resume="auto")
    assert arrays and alive == [0, 0, 0]


@pytest.mark.slow
def test_steps_are_counted_from_the_start_of_the_resumed_run(tmp_path):
    trainer = make_trainer()
    trainer.fit(TRAIN, batch_size=4, steps=3, verbose=0)
    trainer.fit(TRAIN, batch_size=4, steps=4, verbose=0, callbacks=[ModelCheckpoint(tmp_path)])
    assert trainer.step == 7
    again = make_trainer()
    again.fit(TRAIN, batch_size=4, steps=6, verbose=0, callbacks=[ModelCheckpoint(tmp_path)], resume=True)
    assert again.step == 9


@pytest.mark.slow
def test_epochs_are_counted_from_the_start_of_the_resumed_run(uninterrupted, tmp_path):
    run(tmp_path / "run", epochs=1)
    resumed = run(tmp_path / "run", epochs=3)
    assert (resumed.trainer.step, resumed.history.epoch) == (15, [0, 1, 2])
    assert_equal(resumed, uninterrupted(epochs=3))


@pytest.mark.slow
def test_a_run_that_starts_at_another_epoch_resumes_with_its_epoch_numbers(uninterrupted, tmp_path):
    expected = uninterrupted(epochs=5, initial_epoch=3)
    assert expected.history.epoch == [3, 4]
    run(tmp_path / "run", epochs=5, initial_epoch=3, steps=7)
    assert_equal(run(tmp_path / "run", epochs=5, initial_epoch=3), expected)


@pytest.mark.slow
def test_a_run_that_early_stopping_ended_stays_ended(tmp_path):
    first = run(tmp_path / "run", epochs=20, patience=1)
    assert first.trainer.step < 100 and first.trainer.stop_reason.startswith("EarlyStopping")
    again = run(tmp_path / "run", epochs=20, patience=1)
    assert_equal(again, first)


@pytest.mark.slow
def test_a_run_that_early_stopping_ended_inside_an_epoch_stays_ended(tmp_path):
    options = {"epochs": 20, "patience": 1, "validation_freq": fitflax.every(steps=3), "optimizer": optax.sgd(-0.1)}  # Uphill.
    first = run(tmp_path / "run", **options)
    assert first.trainer.step == 6 and first.trainer.stop_reason.startswith("EarlyStopping")
    assert_equal(run(tmp_path / "run", **options), first)


@pytest.mark.slow
def test_a_run_that_terminate_on_nan_ended_stays_ended(tmp_path):
    data = TRAIN[0].copy(), TRAIN[1]
    data[0][:] = np.nan
    options = {"steps": 20, "data": data, "batch_size": 4, "log_every": 3, "more": lambda trainer: [TerminateOnNaN()]}
    with pytest.warns(FitflaxWarning, match="x has NaN or infinity in 18 of 18 examples"):
        first = run(tmp_path / "run", **options)
    assert (first.trainer.step, first.trainer.stop_reason) == (3, "TerminateOnNaN: the loss is not finite at step 1")
    with pytest.warns(FitflaxWarning, match="x has NaN or infinity"):
        again = run(tmp_path / "run", **options)
    assert_equal(again, first)


@pytest.mark.slow
def test_resumed_early_stopping_continues_its_count_and_restores_the_earlier_best_state(tmp_path):
    def observe(trainer: fitflax.Trainer) -> list[Callback]:
        return [EarlyStopping("accuracy", mode="max", patience=3, restore_best=True)]

    uninterrupted = run(tmp_path / "never", epochs=6, more=observe)
    run(tmp_path / "run", epochs=2, more=observe)
    assert_equal(run(tmp_path / "run", epochs=6, more=observe), uninterrupted)


# -- exceptions --


# At steps with a regular checkpoint, and where an older checkpoint must be skipped.
AT_AN_END = [
    ("on_train_batch_begin", 5),
    ("on_train_batch_end", 5),
    ("on_train_batch_end", 6),
    ("on_epoch_end", 5),
    ("on_epoch_end", 10),
    ("on_test_batch_end", 10),
]
ANYWHERE = [
    *AT_AN_END,
    ("on_train_batch_begin", 3),
    ("on_train_batch_begin", 6),
    ("on_train_batch_end", 3),
    ("on_epoch_begin", 0),
    ("on_epoch_begin", 5),
    ("on_test_begin", 5),
    ("on_test_end", 5),
]


@pytest.mark.parametrize(("hook", "step", "every_epochs"), [*((*place, 1) for place in AT_AN_END), *((*place, 4) for place in ANYWHERE)])
@pytest.mark.slow
def test_a_run_that_a_callback_interrupted_resumes_like_an_uninterrupted_one(hook, step, every_epochs, uninterrupted, tmp_path):
    trigger = fitflax.every(epochs=every_epochs)
    expected = uninterrupted(steps=12, every=trigger)
    interrupted = run(tmp_path / "broken", steps=12, every=trigger, more=lambda trainer: [at(trainer, hook, step, raising("broken"))], raises=ArithmeticError)
    assert interrupted.steps == ([step] if step and every_epochs == 4 else sorted({5, 10, step} & set(range(1, step + 1))))
    resumed = run(tmp_path / "broken", steps=12, every=trigger)
    assert_equal(resumed, expected)


@pytest.mark.slow
def test_an_interrupted_run_with_steps_per_epoch_resumes_like_an_uninterrupted_one(uninterrupted, tmp_path):
    expected = uninterrupted(steps=12, steps_per_epoch=4)
    run(tmp_path / "broken", steps=12, steps_per_epoch=4, more=lambda t: [at(t, "on_train_batch_end", 4, raising("broken"))], raises=ArithmeticError)
    assert_equal(run(tmp_path / "broken", steps=12, steps_per_epoch=4), expected)


@pytest.mark.slow
def test_callbacks_change_the_state_only_once_if_another_interrupts_the_end_of_an_epoch(tmp_path):
    def halve(trainer: fitflax.Trainer) -> Callback:
        return LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(trainer, "learning_rate", trainer.learning_rate / 2))

    uninterrupted = run(tmp_path / "never", epochs=3, more=lambda trainer: [halve(trainer)])
    run(tmp_path / "broken", epochs=3, more=lambda t: [halve(t), at(t, "on_epoch_end", 10, raising("broken"))], raises=ArithmeticError)
    assert_equal(run(tmp_path / "broken", epochs=3, more=lambda trainer: [halve(trainer)]), uninterrupted)


@pytest.mark.slow
def test_an_exception_in_a_custom_function_at_a_checkpoint_loses_no_saved_step(tmp_path):
    """The uninterrupted run has the hook, too: a callback that reads checkpoints makes the run compute the norm of the gradient, which is saved."""

    def train(name: str, action: Callable[[int], Any], **options: Any) -> RunResult:
        return run(tmp_path / name, epochs=3, more=lambda trainer: [at(trainer, "on_checkpoint", 10, action)], **options)

    train("broken", raising("broken"), raises=ArithmeticError)
    assert_equal(train("broken", lambda step: None), train("never", lambda step: None))


def batches_that_fail_after(count: int) -> Callable[[], Iterator[Any]]:
    """A source that fails once. A pass has 5 batches: 4 of 4 rows, and a last one of 2."""
    left = [count]

    def batches() -> Iterator[Any]:
        for begin in range(0, 18, 4):
            if left[0] == 0:
                raise ArithmeticError("the disk is gone")
            left[0] -= 1
            yield tuple(part[begin : begin + 4] for part in TRAIN)

    return batches


UNBROKEN = batches_that_fail_after(1000)


@pytest.mark.parametrize("k", [4, 5, 8, 9])
@pytest.mark.slow
def test_a_run_that_its_data_interrupted_resumes_like_an_uninterrupted_one(k, uninterrupted, tmp_path):
    expected = uninterrupted(data=UNBROKEN, epochs=3)
    interrupted = run(tmp_path / "broken", data=batches_that_fail_after(k), epochs=3, raises=ArithmeticError)
    assert interrupted.steps[-1] == k
    with pytest.warns(FitflaxWarning, match="cannot seek") if k % 5 else contextlib.nullcontext():
        resumed = run(tmp_path / "broken", data=batches_that_fail_after(1000), epochs=3)
    assert_equal(resumed, expected)


@pytest.mark.slow
def test_a_run_that_its_validation_data_interrupted_resumes_like_an_uninterrupted_one(tmp_path):
    def validation(fails: bool) -> Callable[[], Iterator[Any]]:
        passes = iter(range(100))

        def batches() -> Iterator[Any]:
            number = next(passes)
            yield tuple(part[:4] for part in VALID)
            if fails and number == 1:
                raise ArithmeticError("the disk is gone")
            yield tuple(part[4:] for part in VALID)

        return batches

    uninterrupted = run(tmp_path / "never", epochs=3, validation_data=validation(False))
    interrupted = run(tmp_path / "broken", epochs=3, validation_data=validation(True), raises=ArithmeticError)
    assert interrupted.steps == [5, 10] and interrupted.history.epoch == [0]
    assert_equal(run(tmp_path / "broken", epochs=3, validation_data=validation(False)), uninterrupted)


# -- triggers in the middle of an epoch --


class Counter(Callback):
    """Has state: the steps of the checkpoints that it has seen."""

    def __init__(self) -> None:
        self.every = fitflax.every(steps=2)
        self.seen: list[int] = []

    def on_train_begin(self, logs):
        self.seen = []

    def on_checkpoint(self, checkpoint):
        self.seen.append(checkpoint.step)

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


STOPS: dict[str, dict[str, Any]] = {
    "end of steps": {},
    "stop": {"does": ("on_train_batch_end", lambda trainer: trainer.stop("enough"))},
    "an exception": {"does": ("on_train_batch_end", lambda trainer: raising("broken")(4)), "raises": ArithmeticError},
    "an exception before the next": {"does": ("on_train_batch_begin", lambda trainer: raising("broken")(4)), "raises": ArithmeticError},
    "a signal": {"does": ("on_train_batch_end", lambda trainer: signal.raise_signal(signal.SIGINT)), "raises": KeyboardInterrupt},
}


def counted(trainer: fitflax.Trainer) -> list[Callback]:
    return [Counter()]


@pytest.mark.parametrize("how", STOPS)
@pytest.mark.parametrize("k", [4, 3])
@pytest.mark.slow
def test_triggers_that_fire_at_the_step_where_a_run_stops_take_effect(how, k, uninterrupted, tmp_path):
    """`k` is the period of validation, whose trigger fires at the stop at step 4 only if `k` is 4. The trigger of the callback always fires there."""
    options = {"validation_freq": fitflax.every(steps=k), "steps_per_epoch": 100}
    expected = uninterrupted(steps=8, more=counted, **options)
    counters: list[Counter] = []

    def more(trainer: fitflax.Trainer) -> list[Callback]:
        counters.append(Counter())
        if "does" not in STOPS[how] or len(counters) == 2:
            return counters[-1:]
        hook, action = STOPS[how]["does"]
        return [counters[-1], at(trainer, hook, 4, lambda step: action(trainer))]

    run(tmp_path / "stopped", steps=8 if STOPS[how] else 4, more=more, raises=STOPS[how].get("raises"), **options)
    assert_equal(run(tmp_path / "stopped", steps=8, more=more, **options), expected)
    assert counters[1].seen == [2, 4, 6, 8]


@pytest.mark.parametrize("how", ["an exception", "a signal"])
@pytest.mark.slow
def test_triggers_that_fire_at_the_last_step_take_effect_if_the_run_is_interrupted_there(how, uninterrupted, tmp_path):
    options = {"validation_freq": fitflax.every(steps=4), "steps_per_epoch": 100, "steps": 4}
    expected = uninterrupted(more=counted, **options)
    hook, action = STOPS[how]["does"]
    run(tmp_path / "stopped", more=lambda trainer: [Counter(), at(trainer, hook, 4, lambda step: action(trainer))], raises=STOPS[how]["raises"], **options)
    for _ in range(2):
        counter = Counter()
        assert_equal(run(tmp_path / "stopped", more=lambda trainer, counter=counter: [counter], **options), expected)
        assert counter.seen == [2, 4]


@pytest.mark.parametrize("steps_per_epoch", [5, 100])
@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.mostly_slow
def test_a_trigger_is_evaluated_at_the_last_step_as_at_any_other(steps, steps_per_epoch, tmp_path):
    counter = Counter()
    run(tmp_path / "run", steps=steps, steps_per_epoch=steps_per_epoch, more=lambda trainer: [counter])
    assert counter.seen == [2, 4]


def test_a_time_trigger_of_validation_keeps_its_elapsed_time_after_a_resume(tmp_path, monkeypatch):
    validated: list[int] = []
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setitem(Run.__init__.__kwdefaults__, "clock", lambda: clock.now)

    def fit(steps: int, *, fails: bool = False) -> None:
        def tick(batch: int, logs: Any) -> None:
            clock.now += 1.0

        def validate(logs: Any) -> None:
            validated.append(trainer.step)
            if fails:
                raise ArithmeticError

        trainer = make_trainer()
        options = {"validation_data": VALID, "validation_freq": fitflax.every(seconds=4), "resume": "auto", "verbose": 0}
        callbacks = [LambdaCallback(on_train_batch_end=tick, on_test_begin=validate), ModelCheckpoint(tmp_path)]
        trainer.fit(TRAIN, batch_size=4, steps=steps, steps_per_epoch=100, callbacks=callbacks, **options)

    fit(3)
    with pytest.raises(ArithmeticError):
        fit(6, fails=True)
    fit(6)
    fit(11)
    assert validated == [4, 4, 8]


# -- what a resume looks for --


@pytest.mark.slow
def test_resume_auto_without_checkpoints_starts_a_new_run(uninterrupted, tmp_path):
    assert_equal(uninterrupted(steps=7), run(tmp_path / "none", steps=7, resume=None))  # The default of `run` is "auto".


@pytest.mark.slow
def test_resume_auto_with_only_the_best_checkpoints_left_names_both_directories(tmp_path):
    """Training from the beginning would replace them, and the advice must be one that can be followed."""

    def fit(resume: Any, steps: int, trainer: fitflax.Trainer) -> fitflax.Trainer:
        saving = [ModelCheckpoint(tmp_path / "checkpoints"), BestCheckpoint(tmp_path / "best", monitor="loss", mode="max")]
        trainer.fit(TRAIN, batch_size=4, steps=steps, verbose=0, callbacks=saving, resume=resume)
        return trainer

    fit("auto", 10, make_trainer())
    newest = steps_in(tmp_path / "best")[-1]
    shutil.rmtree(tmp_path / "checkpoints")
    before, trainer = directory_of(tmp_path / "best"), make_trainer()
    empty, best = (re.escape(str(tmp_path / name)) for name in ("checkpoints", "best"))
    advice = rf"^{best} holds checkpoints of run '\w+': step {newest}\. resume=\"auto\" has found no checkpoint in {empty}\. .* pass resume=\"{best}\""
    with pytest.raises(DirectoryInUseError, match=advice):
        fit("auto", 20, trainer)
    assert trainer.step == 0 and directory_of(tmp_path / "best") == before
    resumed, uninterrupted = fit(tmp_path / "best", 20, make_trainer()), make_trainer()
    uninterrupted.fit(TRAIN, batch_size=4, steps=20, verbose=0)
    assert not differences(state_of(resumed), state_of(uninterrupted))


def test_best_checkpoints_are_not_replaced_if_those_of_the_run_were_deleted(tmp_path):
    def fit(steps: int, *, overwrite: bool = False) -> None:
        saving = [ModelCheckpoint(tmp_path / "checkpoints", keep=1), BestCheckpoint(tmp_path / "best", monitor="loss", overwrite=overwrite)]
        make_trainer().fit(TRAIN, batch_size=4, steps=steps, verbose=0, callbacks=saving, resume="auto")

    fit(10)
    for path in (tmp_path / "checkpoints").glob("[!.]*"):  # As `rm -rf checkpoints/*` does.
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = directory_of(tmp_path / "best")
    with pytest.raises(DirectoryInUseError, match="best holds checkpoints of run"):
        fit(20)
    assert directory_of(tmp_path / "best") == before
    fit(5, overwrite=True)
    assert steps_in(tmp_path / "checkpoints") == [5]


def test_a_run_whose_checkpoints_were_deleted_starts_over_under_its_id(tmp_path):
    store = CheckpointStore(tmp_path)

    def fit(steps: int) -> str | None:
        make_trainer().fit(TRAIN, batch_size=4, steps=steps, verbose=0, callbacks=[ModelCheckpoint(tmp_path)], resume="auto")
        return store.run_id()

    run = fit(2)
    for step in store.steps():
        shutil.rmtree(store.path(step))
    assert fit(1) == run and store.steps() == [1]


def test_a_damaged_run_starts_over_although_its_callbacks_spell_their_directory_differently(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fit(steps: int) -> None:
        saving = [ModelCheckpoint(tmp_path / "run"), BestCheckpoint("run", monitor="loss", initial_value=0.0)]
        make_trainer().fit(TRAIN, batch_size=4, steps=steps, verbose=0, callbacks=saving, resume="auto")

    fit(2)
    damage(tmp_path / "run/step_00000002", "state flipped")
    with pytest.warns(FitflaxWarning, match="skipped a damaged checkpoint|so a new run begins"):
        fit(1)
    assert steps_in(tmp_path / "run") == [1]


def test_a_run_that_died_before_its_first_regular_checkpoint_replaces_its_best_ones(tmp_path):
    def fit(trainer: fitflax.Trainer, *more: Callback) -> None:
        saving = [ModelCheckpoint(tmp_path / "checkpoints", every=fitflax.every(steps=100)), BestCheckpoint(tmp_path / "best", monitor="loss"), *more]
        trainer.fit(TRAIN, batch_size=4, steps=7, verbose=0, callbacks=saving, resume="auto")

    killed = make_trainer()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ArithmeticError):
        patch.setattr(ModelCheckpoint, "wants", lambda callback, checkpoint: False)  # Like a kill, which leaves no time to save.
        fit(killed, at(killed, "on_train_batch_end", 6, raising("killed")))
    assert (steps_in(tmp_path / "checkpoints"), steps_in(tmp_path / "best")) == ([], [5])
    fit(make_trainer())
    assert steps_in(tmp_path / "checkpoints") == [7]


def test_resume_true_without_checkpoints_is_an_error_before_the_first_step(tmp_path):
    result = run(tmp_path / "run", steps=7, resume=True, raises=CheckpointNotFoundError)
    assert result.trainer.step == 0 and "To start a new run, pass resume='auto'" in str(result.error)


def test_resume_without_exactly_one_model_checkpoint_asks_for_a_path(tmp_path):
    trainer = make_trainer()
    for callbacks in ([], [ModelCheckpoint(tmp_path / "a"), ModelCheckpoint(tmp_path / "b")]):
        with pytest.raises(ConfigError, match=rf"there are {len(callbacks)}\. .*ass resume=path"):
            trainer.fit(TRAIN, verbose=0, callbacks=callbacks, resume="auto")


@pytest.mark.slow
def test_a_run_resumes_from_the_step_directory_that_resume_names(uninterrupted, tmp_path):
    expected = uninterrupted(steps=12)
    run(tmp_path / "run", steps=10)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    began: list[int] = []
    resumed = run(
        tmp_path / "run",
        steps=12,
        resume=tmp_path / "copy/checkpoints/step_00000005",
        more=lambda trainer: [LambdaCallback(on_train_begin=lambda logs: began.append(trainer.step))],
    )
    assert began == [5]
    assert_equal(resumed, expected)


@pytest.mark.slow
def test_resuming_from_a_step_directory_of_the_same_run_goes_back_to_that_step(uninterrupted, tmp_path):
    expected = uninterrupted(steps=12)
    run(tmp_path / "run", steps=12)
    resumed = run(tmp_path / "run", steps=12, resume=str(tmp_path / "run/checkpoints/step_00000005"))
    assert resumed.steps == [5, 10, 12]
    assert_equal(resumed, expected)


def test_a_path_without_a_checkpoint_is_an_error(tmp_path):
    run(tmp_path / "run", steps=2, resume=tmp_path / "nowhere", raises=CheckpointNotFoundError)


def test_a_state_without_a_run_cannot_be_resumed(tmp_path):
    trainer = make_trainer()
    trainer.fit(TRAIN, batch_size=4, steps=2, verbose=0)
    trainer.save(tmp_path / "state")
    result = run(tmp_path / "run", steps=4, resume=tmp_path / "state", raises=RestoreError)
    assert "no run to resume" in str(result.error)


# -- damage --


def damage(path: pathlib.Path, how: str) -> None:
    file = path / ("metadata.json" if how.startswith("metadata") else "state.msgpack")
    content = bytearray(file.read_bytes())
    if how.endswith("truncated"):
        content = content[: len(content) // 2]
    elif how.endswith("flipped"):
        content[len(content) // 2] ^= 1
    elif how.endswith("empty"):
        content = bytearray()
    if how.endswith("missing"):
        file.unlink()
    elif how == "foreign files":
        for one in path.iterdir():
            one.unlink()
        (path / "notes.txt").write_text("mine")
    elif how == "metadata of another version":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_documents, "FORMAT_VERSION", 99)
            document = json.loads(content)
            for name in ("format_version", "crc32"):
                del document[name]
            json_documents.replace_document(file, document)
    else:
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("state truncated", "state.msgpack is truncated: "),
        pytest.param("state flipped", "state.msgpack is damaged: ", marks=pytest.mark.slow),
        pytest.param("state empty", "state.msgpack is empty", marks=pytest.mark.slow),
        ("state missing", "state.msgpack is missing"),
        pytest.param("metadata truncated", "metadata.json is damaged: it is not JSON", marks=pytest.mark.slow),
        ("metadata flipped", "metadata.json is damaged: "),
        pytest.param("metadata empty", "metadata.json is empty", marks=pytest.mark.slow),
        pytest.param("metadata missing", "metadata.json is missing", marks=pytest.mark.slow),
        ("metadata of another version", "metadata.json has format version 99, but this version of fitflax reads 1. Use the version that wrote it"),
        pytest.param("foreign files", "metadata.json is missing", marks=pytest.mark.slow),
    ],
)
@pytest.mark.mostly_slow
def test_a_damaged_checkpoint_is_skipped_and_the_run_equals_an_uninterrupted_run(how, why, uninterrupted, tmp_path):
    expected = uninterrupted(epochs=3)
    shutil.copytree(uninterrupted(epochs=2).root, tmp_path / "run")
    damage(tmp_path / "run/checkpoints/step_00000010", how)
    what = "a checkpoint that cannot be read here" if "version" in how else "a damaged checkpoint"
    with pytest.warns(FitflaxWarning, match=f"Resuming: skipped {what}: step_00000010: {why}"):
        resumed = run(tmp_path / "run", epochs=3)
    assert_equal(resumed, expected)


@pytest.mark.slow
def test_a_run_whose_only_checkpoint_is_damaged_starts_over(uninterrupted, tmp_path):
    run(tmp_path / "run", epochs=1)
    damage(tmp_path / "run/checkpoints/step_00000005", "state truncated")
    with pytest.warns(FitflaxWarning, match="skipped a damaged checkpoint"), pytest.warns(FitflaxWarning, match="is intact, so a new run begins"):
        resumed = run(tmp_path / "run", epochs=2)
    assert_equal(resumed, uninterrupted(epochs=2))


def test_a_run_with_only_checkpoints_of_another_version_does_not_start_over(tmp_path):
    run(tmp_path / "run", epochs=1)
    damage(tmp_path / "run/checkpoints/step_00000005", "metadata of another version")
    before = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    result = run(tmp_path / "run", epochs=2, raises=CheckpointError)
    assert "cannot be read here. They may be intact, so nothing was changed. step_00000005: metadata.json has format" in str(result.error)
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == before


def test_a_damaged_checkpoint_that_resume_names_is_an_error(tmp_path):
    run(tmp_path / "run", epochs=2)
    damage(tmp_path / "run/checkpoints/step_00000010", "state flipped")
    run(tmp_path / "run", epochs=3, resume=tmp_path / "run/checkpoints/step_00000010", raises=CorruptCheckpointError)


@pytest.mark.slow
def test_a_damaged_closing_row_is_made_again(tmp_path):
    first = run(tmp_path / "run", steps=7)
    (first.checkpoints / "step_00000007/closing.json").write_text("{")
    assert_equal(run(tmp_path / "run", steps=7), first)


# -- what must be the same --


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"seed": 0}, {"seed": 1}, "seed was 0 and is now 1"),
        ({"batch_size": 4}, {"batch_size": 6}, "batch_size was 4 and is now 6"),
        ({"steps_per_epoch": 4}, {"steps_per_epoch": None}, "steps_per_epoch was 4 and is now None"),
        ({}, {"data": tuple(part[:17] for part in TRAIN), "batch_size": 4}, "num_examples was 18 and is now 17"),
    ],
)
@pytest.mark.mostly_slow
def test_a_resume_with_a_different_order_of_examples_is_an_error_with_both_values(before, after, message, tmp_path):
    run(tmp_path / "run", steps=3, **before)
    result = run(tmp_path / "run", steps=6, **after, raises=RestoreError)
    assert message in str(result.error)
    assert result.trainer.step == 0 and steps_in(tmp_path / "run/checkpoints") == [3]


def test_all_settings_that_differ_are_named_in_one_error(tmp_path):
    run(tmp_path / "run", steps=3)
    result = run(tmp_path / "run", steps=6, seed=5, batch_size=3, raises=RestoreError)
    assert "seed was 0 and is now 5" in str(result.error) and "batch_size was 4 and is now 3" in str(result.error)


@pytest.mark.slow
def test_a_different_seed_gives_a_different_run(tmp_path):
    """The first control of case 29."""
    one, other = run(tmp_path / "one", steps=6), run(tmp_path / "other", steps=6, seed=1)
    assert differences(state_of(one.trainer), state_of(other.trainer))


def test_a_run_whose_order_of_examples_is_not_restored_differs(uninterrupted, tmp_path):
    """The second control of case 29: the same state, but the order of the data starts over."""
    expected = uninterrupted(steps=12)
    run(tmp_path / "run", steps=6)
    trainer = make_trainer()
    trainer.restore(tmp_path / "run/checkpoints")
    trainer.fit(TRAIN, batch_size=4, steps=6, verbose=0)
    assert trainer.step == 12
    assert any("params" in line for line in differences(state_of(trainer), state_of(expected.trainer)))


def test_a_resume_into_another_model_is_an_error_and_leaves_the_checkpoints(tmp_path):
    run(tmp_path / "run", steps=3)
    result = run(tmp_path / "run", steps=6, model=nn.Dense(3), raises=RestoreError)
    assert "params/BatchNorm_0" in str(result.error) and "params/kernel" in str(result.error)
    assert steps_in(tmp_path / "run/checkpoints") == [3]


@pytest.mark.slow
def test_a_resume_with_different_callbacks_warns_and_names_them(tmp_path):
    run(tmp_path / "run", steps=3, more=lambda trainer: [Counter()])
    with pytest.warns(FitflaxWarning, match="Callback Counter"):
        run(tmp_path / "run", steps=6)
    with pytest.warns(FitflaxWarning, match="Callback Counter"):
        run(tmp_path / "run", steps=9, more=lambda trainer: [Counter()])


# -- data --


@pytest.mark.slow
def test_with_steps_per_epoch_one_iterator_continues_across_epochs_and_resumes(tmp_path):
    options = {"steps_per_epoch": 4, "epochs": 4}
    uninterrupted = run(tmp_path / "never", **options)
    assert uninterrupted.trainer.step == 16
    for k in (3, 4, 5, 10):
        run(tmp_path / f"run-{k}", steps=k, **options)
        assert_equal(run(tmp_path / f"run-{k}", **options), uninterrupted)


def streamed() -> Iterator[Any]:
    for begin in range(0, 18, 4):
        yield tuple(part[begin : begin + 4] for part in TRAIN)


@pytest.mark.parametrize(("k", "steps_per_epoch"), [(4, None), (5, None), (9, None), (3, 4), (4, 4), (5, 4), (9, 4)])
@pytest.mark.slow
def test_a_stream_is_read_again_up_to_the_position_with_a_warning(k, steps_per_epoch, uninterrupted, tmp_path):
    """Step 5 is the ragged batch: a resume right before it must give it the same shape as before."""
    options = {"data": streamed, "steps": 12, "steps_per_epoch": steps_per_epoch}
    expected = uninterrupted(**options)
    run(tmp_path / "run", **options | {"steps": k})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = run(tmp_path / "run", **options)
    dropped = 18 if steps_per_epoch and k == 5 else k % 5 * 4
    assert [re.findall(r"(\d+) examples are read and dropped", str(warning.message)) for warning in caught] == ([[str(dropped)]] if dropped else [])
    assert_equal(resumed, expected)


@pytest.mark.slow
def test_an_endless_stream_is_one_epoch_and_resumes_inside_it(uninterrupted, tmp_path):
    def endless() -> Iterator[Any]:
        while True:
            yield from streamed()

    expected = uninterrupted(data=endless, steps=12)
    assert expected.history.epoch == [0]
    run(tmp_path / "run", data=endless, steps=7)
    with pytest.warns(FitflaxWarning, match="26 examples are read and dropped"):
        resumed = run(tmp_path / "run", data=endless, steps=12)
    assert_equal(resumed, expected)


@pytest.mark.slow
def test_a_new_iterator_is_read_up_to_the_position_of_the_resumed_run(uninterrupted, tmp_path):
    expected = uninterrupted(data=streamed(), steps=5)
    run(tmp_path / "run", data=streamed(), steps=3)
    with pytest.warns(FitflaxWarning, match="12 examples are read and dropped"):
        resumed = run(tmp_path / "run", data=streamed(), steps=5)
    assert_equal(resumed, expected)


def test_data_that_is_shorter_than_what_the_run_has_used_is_an_error(tmp_path):
    run(tmp_path / "run", data=streamed, steps=4)
    with pytest.warns(FitflaxWarning, match="read and dropped"):
        run(tmp_path / "run", data=lambda: iter(list(streamed())[:2]), steps=6, raises=DataError)


def test_a_run_whose_iterator_ended_early_returns_the_same_history_when_it_is_resumed(tmp_path):
    options = {"steps": 8, "steps_per_epoch": 3}
    with pytest.warns(FitflaxWarning, match="ended before"):
        first = run(tmp_path / "run", data=streamed(), **options)
    assert (first.trainer.step, first.trainer.stop_reason, first.history.epoch) == (5, "data_exhausted", [0, 1])
    with pytest.warns(FitflaxWarning):
        again = run(tmp_path / "run", data=streamed(), **options)
    assert_equal(again, first)


# -- hooks --


@pytest.mark.slow
def test_a_resumed_run_calls_exactly_these_hooks(tmp_path):
    hooks: list[str] = []

    class Recorder(Callback):
        def on_train_begin(self, logs):
            hooks.append("train begin")

        def on_epoch_begin(self, epoch, logs):
            hooks.append(f"epoch {epoch} begin")

        def on_train_batch_end(self, batch, logs):
            hooks.append(f"batch {batch}")

        def on_test_begin(self, logs):
            hooks.append("test")

        def on_epoch_end(self, epoch, logs):
            hooks.append(f"epoch {epoch} end")

        def on_checkpoint(self, checkpoint):
            hooks.append(f"checkpoint {checkpoint.step}")

        def on_train_end(self, logs):
            hooks.append("train end")

        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            hooks.append("load")

        def sync(self):
            hooks.append("sync")

        def close(self):
            hooks.append("close")

    trainer = make_trainer()
    options = {"batch_size": 4, "validation_data": VALID, "verbose": 0, "resume": "auto"}
    trainer.fit(TRAIN, steps=3, callbacks=[ModelCheckpoint(tmp_path), Recorder()], **options)
    closing = ["test", "epoch 0 end", "sync", "train end", "close"]
    assert hooks == ["train begin", "epoch 0 begin", "batch 0", "batch 1", "batch 2", "checkpoint 3", "sync", *closing]
    hooks.clear()
    make_trainer().fit(TRAIN, steps=6, callbacks=[ModelCheckpoint(tmp_path), Recorder()], **options)
    first = ["train begin", "load", "batch 3", "batch 4", "test", "epoch 0 end", "checkpoint 5", "sync"]
    assert hooks == [*first, "epoch 1 begin", "batch 0", "checkpoint 6", "sync", "test", "epoch 1 end", "sync", "train end", "close"]


@pytest.mark.slow
def test_stopping_before_the_first_batch_of_an_epoch_adds_no_row(uninterrupted, tmp_path):
    stopped = run(tmp_path / "run", epochs=3, more=lambda trainer: [at(trainer, "on_epoch_begin", 5, lambda step: trainer.stop("enough"))])
    assert (stopped.trainer.step, stopped.history.epoch) == (5, [0])
    assert_equal(run(tmp_path / "run", epochs=3), uninterrupted(epochs=3))


def test_a_source_that_is_empty_in_its_second_pass_ends_the_run_with_its_last_step_saved(tmp_path):
    passes = iter(range(10))

    def once() -> Iterator[Any]:
        return streamed() if next(passes) == 0 else iter([])

    with pytest.warns(FitflaxWarning, match="ended before"):
        ended = run(tmp_path / "run", data=once, steps=12, every=fitflax.every(steps=100))
    assert (ended.trainer.stop_reason, ended.history.epoch, ended.steps) == ("data_exhausted", [0], [5])


@pytest.mark.slow
def test_a_run_interrupted_before_its_pass_is_known_to_be_over_resumes_at_the_next_epoch(tmp_path):
    def batches() -> Iterator[Any]:
        for begin in range(0, 16, 4):
            yield TRAIN[0][begin : begin + 4], TRAIN[1][begin : begin + 4]

    options = {"data": batches, "epochs": 3, "every": fitflax.every(epochs=1)}
    uninterrupted = run(tmp_path / "never", **options)
    interrupted = run(tmp_path / "broken", **options, more=lambda trainer: [at(trainer, "on_train_batch_end", 4, raising("broken"))], raises=ArithmeticError)
    assert interrupted.steps == [4] and len(interrupted.history.epoch) == 0
    with pytest.warns(FitflaxWarning, match="16 examples are read and dropped"):
        resumed = run(tmp_path / "broken", **options)
    assert_equal(resumed, uninterrupted)


def test_if_a_resumed_pass_over_shards_is_complete_all_shards_begin_the_next_one():
    progress = Progress(step=1, step_in_epoch=1, epoch_is_open=True, position=Position(0, 2), used=(2, 2))
    feeder = Feeder(Batcher, pad=True)
    feed = feeder.train(adapt(lambda: iter([np.ones(2)])), None, progress.position)
    session: Any = SimpleNamespace(task=SimpleNamespace(steps_per_call=None, feeder=feeder))
    saved: Any = SimpleNamespace()
    with pytest.warns(FitflaxWarning, match="cannot seek"):
        fed = setup._first_batch(session, feed, None, setup.RunPlan(), progress, CallbackList(), saved)
    assert fed is not None and (progress.epoch_is_over, progress.position, progress.used) == (True, Position(1), ())
