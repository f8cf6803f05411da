"""The stages of `fit` around the steps of a run: the data, the checkpoint to resume from, and the callbacks from beginning to end."""

import contextlib
import copy
import functools
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fitflax.callbacks import ModelCheckpoint, TrainerView
from fitflax.callbacks.callback_list import CallbackList
from fitflax.callbacks.model_checkpoint import StoreCallback
from fitflax.checkpoints.checkpoint_files import Saved, load_partial_epoch
from fitflax.checkpoints.restore import from_saved
from fitflax.data import Source
from fitflax.data.adapt import takes_batch_size
from fitflax.data.arrays import FirstBatches, IndexedSource
from fitflax.data.batch import Selection
from fitflax.data.shards import Shard, part_of_batch_size
from fitflax.data.sources import SequenceSource
from fitflax.errors import ConfigError, DirectoryInUseError, chain_of, is_integer, warn
from fitflax.leaves import flat
from fitflax.loops.evaluation_loop import Evaluation, Validation
from fitflax.loops.session import Session
from fitflax.loops.setup import find_saved
from fitflax.loops.signals import Interruption
from fitflax.loops.training_loop import Run
from fitflax.parallel.processes import after_first
from fitflax.storage import absolute
from fitflax.triggers import Trigger

# -- data --


def num_batches_of(**counts: Any) -> list[int]:
    """Returns arguments that are numbers of batches (0 for all, `True` for 1); raises `ConfigError` if one is negative or not an integer."""
    for name, value in counts.items():
        if not isinstance(value, int | np.integer) or value < 0:
            raise ConfigError(f"{name} must be a number of batches, or 0 for all data. Received: {value!r}.")
    return [int(value) for value in counts.values()]


def adapt_validation_data(
    session: Session, selection: Selection, source: Source, data: Any, *, split: float, batch_size: int | None, overfit_batches: int
) -> tuple[Source, dict[str, Source]]:
    """Returns the source to train on, and the validation sets by name. If `split` is not 0, a part of `source` becomes the set `val`.

    `batch_size` is the batch size of the validation data, over all processes; by default that of `source`.
    """
    sets: dict[str, Source] = {}
    if split:
        if data is not None:
            raise ConfigError("validation_split and validation_data are both given. Pass only one of them.")
        source, sets["val"] = _hold_out(session, source, split, batch_size)
    if overfit_batches:
        source = session.data_adapter.exchange_shard_info(FirstBatches(source, overfit_batches))
    for name, each in _sets_by_name(data, selection).items():
        size = (batch_size or source.all_batch_size) if takes_batch_size(each.data if isinstance(each, Shard) else each) else None
        options: dict[str, Any] = {"selection": selection, "shuffle": False, "name": f"validation_data {name!r}"}
        sets[name] = session.data_adapter.adapt(each, call=f"validation on {name!r}", batch_size=size, **options)
    # Only training calls the data's epoch hooks, because a resume could not repeat the calls of validations. The user may train on the same source.
    sets = {name: copy.copy(each) if isinstance(each, SequenceSource) else each for name, each in sets.items()}
    for each in sets.values():
        each.calls_hooks = False
    return source, sets


def _hold_out(session: Session, source: Source, split: float, batch_size: int | None) -> tuple[Source, Source]:
    if not 0 < split < 1:
        raise ConfigError(f"validation_split must be between 0 and 1. Received: {split!r}.")
    if not isinstance(source, IndexedSource):
        raise ConfigError("validation_split requires in-memory arrays, a Hugging Face dataset or a TokenFile. For other data, pass validation_data=.")
    if source.is_shard and batch_size is not None:
        batch_size = part_of_batch_size(batch_size, session.strategy.part[1])
    parts = source.divide(split, batch_size)
    for part in parts:
        part.is_shard = source.is_shard
        session.data_adapter.exchange_shard_info(part)
    return parts


def _sets_by_name(data: Any, selection: Selection) -> dict[str, Any]:
    """Returns validation sets by name; raises `ConfigError` if a name is not a string, is empty, or is `train`.

    A dict is a single set only if the trainer has input keys for dicts and the dict contains all of them.
    """
    if data is None:
        return {}
    if not isinstance(data, dict):
        return {"val": data}
    wanted = selection.inputs
    keys = set(wanted.values() if isinstance(wanted, dict) else wanted if isinstance(wanted, tuple) else [wanted])
    if wanted is not None and keys <= set(data):
        return {"val": data}
    if not data or not all(isinstance(name, str) and name and name != "train" for name in data):
        raise ConfigError(f"validation_data as a dict of sets must have nonempty names other than 'train'. Received: {list(data)}.")
    return data


def check_end(source: Source, sets: Mapping[str, Source], *, steps: int | None, epochs: int | None, steps_per_epoch: int | None) -> None:
    """Raises `ConfigError` if the data never ends and no argument says where to stop."""
    if not source.is_endless or steps_per_epoch is not None:
        return
    if steps is None:
        alone = "" if epochs is None else " epochs= alone is not enough, because an epoch of this data never ends."
        raise ConfigError(f"This data never ends. Pass steps=, or both steps_per_epoch= and epochs=.{alone}")
    if sets:
        warn(
            "This data never ends, so the whole fit is one epoch and validation runs only once, at its end. To validate more often, pass steps_per_epoch= or "
            "validation_freq=every(steps=...)."
        )


def make_validation(
    session: Session,
    sets: Mapping[str, Source],
    frequency: int | Sequence[int] | Trigger,
    *,
    steps: int | None,
    trial: int,
    hooks: CallbackList,
    interruption: Interruption,
) -> Validation:
    """Returns what is evaluated during a run, and when. `trial` is the maximum number of batches in a trial run, or 0."""
    program = session.task.need_compiled("fit")
    loops = []
    for name, source in sets.items():
        count = min(trial, source.all_batches or trial) if trial else steps
        loops.append(Evaluation(session, program, source, steps=count, name=name, callbacks=hooks, interruption=interruption))
    return Validation(loops, _validation_frequency(frequency))


def _validation_frequency(value: Any) -> int | frozenset[int] | Trigger:
    if isinstance(value, Trigger):
        return value
    if is_integer(value, 1):
        return int(value)
    if isinstance(value, list | tuple | set | range) and all(is_integer(epoch, 1) for epoch in value):
        return frozenset(int(epoch) for epoch in value)
    raise ConfigError(f"validation_freq must be a positive integer, a list of epochs counted from 1, or a trigger. Received: {value!r}.")


# -- the checkpoint to resume from --


def find_checkpoint(session: Session, resume: Any, hooks: CallbackList) -> Saved | None:
    """Returns the checkpoint to resume from, the same in all processes; `None` to begin a new run.

    Raises `DirectoryInUseError` if `resume="auto"` begins a new run because a `ModelCheckpoint` has no checkpoint, but other directories have some.
    """
    stores = [callback.store for callback in hooks if isinstance(callback, ModelCheckpoint)]
    saved = find_saved(session, resume, stores)
    if resume != "auto" or saved is not None:
        return saved
    (store,) = stores
    if store.steps():  # All of them are damaged. The same run starts over and replaces its checkpoints in all directories; `find_resume` has warned of it.
        session.run_id = store.run_id() or session.run_id
    for callback in hooks:
        if not isinstance(callback, StoreCallback) or callback.overwrite or absolute(callback.directory) == absolute(store.directory):
            continue
        if conflict := callback.store.describe_others(session.run_id):
            raise DirectoryInUseError(
                f'{conflict}. resume="auto" has found no checkpoint in {store.directory}. To resume from the other directory, pass '
                f'resume="{callback.directory}"; to start a new run, choose another directory, or pass overwrite=True to the callback, which replaces these '
                "checkpoints."
            )
    session.run_id = store.run_id() or session.run_id  # The checkpoints may have been deleted. The logs still belong to the run.
    return None


# -- callbacks --


def params_of(session: Session, source: Source, sets: Mapping[str, Source], run: Run, *, trial: int, log_every: int, note: str | None) -> dict[str, Any]:
    """Returns the `params` of callbacks, which describe the data and the run. `trial` is the number of batches of a trial run, or 0."""
    model = session.task.any_program().task.model
    settings = {key: value for key, value in run.plan.info["settings"].items() if value is not None}
    model_settings = {f"model/{name}": value for name, value in model.hyperparameters.items()}
    return {
        "log_every": log_every,
        "note": note or session.task.choice,
        "steps": min(filter(None, (trial, run.plan.steps_per_epoch or source.all_batches)), default=None),
        "num_examples": source.all_examples,
        "model_flops": session.task.need_compiled("fit").preparation.model_flops,
        "validation_sets": tuple(sets),
        "hyperparameters": {**settings, **session.task.described, "model": model.name, **model_settings, **flat(run.plan.info.get("config", {}))},
    }


def run_with_callbacks(session: Session, trainer: TrainerView, run: Run, params: Mapping[str, Any], saved: Saved | None) -> None:
    """Runs the steps with callbacks, from `on_train_begin` to `on_train_end`, which is always called."""
    progress, hooks, interruption = run.progress, run.callbacks, run.interruption
    with contextlib.ExitStack() as failed:
        failed.callback(run.close)
        run_params = {
            "epochs": run.plan.end_epoch,
            "first_epoch": progress.epoch,
            "first_step_in_epoch": progress.step_in_epoch if progress.epoch_is_open else 0,
            "resumed_step": None if saved is None else progress.step,
            "time_spent": run.spent,
            "is_done": run.has_nothing_to_do,
        }
        hooks.bind(trainer, {**params, **run_params}, spent=run.spent, exits_immediately=lambda: interruption.exits_immediately)
        with run.spent.on("callbacks"):
            open_run = functools.partial(hooks.open_run, session.run_id, progress.step)
            if session.strategy.num_processes > 1:
                after_first(open_run)  # Process 0 sets aside the checkpoints of another run before the others look for those of this one.
            else:
                open_run()
        hooks.start_schedules(run.seconds)
        failed.pop_all()
    session.is_fitting = True
    try:
        with _chaining_failure(run):
            _call_callbacks(session, run, saved)
    finally:
        session.is_fitting = False


def _call_callbacks(session: Session, run: Run, saved: Saved | None) -> None:
    hooks, interruption = run.callbacks, run.interruption
    with contextlib.ExitStack() as stack:  # Called in reverse order: `on_train_end` is always the last.
        stack.callback(lambda: hooks.finish(run.epoch_logs))
        stack.callback(run.close)
        hooks.call("on_train_begin", {})
        if saved is not None:
            _load_callbacks(hooks, saved, run)
        hooks.state_dict(run.seconds)  # Called now, so that callbacks with conflicting state keys fail before the first save.
        for checkpoint in run:
            hooks.on_checkpoint(checkpoint, run.fired_ids)
        if interruption.requested is not None:
            session.stop(f"interrupted by {interruption.requested.name}")
            if interruption.requested == signal.SIGTERM and not hooks.saves:  # A scheduler would restart the run from its beginning.
                warn(
                    "SIGTERM ended the run, and nothing was saved, so it cannot be resumed. To make runs resumable, pass "
                    "callbacks=[ModelCheckpoint(directory)] and resume='auto'."
                )


@contextlib.contextmanager
def _chaining_failure(run: Run) -> Iterator[None]:
    """Chains the exception that interrupted the run to an error while saving, which would hide it."""
    try:
        yield
    except BaseException as error:
        if run.failure is None:
            raise
        chain = list(chain_of(error))
        if run.failure not in chain:
            chain[-1].__context__ = run.failure
        raise


def _load_callbacks(hooks: CallbackList, saved: Saved, run: Run) -> None:
    states = from_saved(saved.run, key_impls=saved.metadata["key_impls"])
    new, missing = hooks.load_state_dict(states, run.seconds)
    run.load_validation_schedule(states)
    for key in new:
        warn(f"Callback {key} is new: the run in {saved.path} did not have it. It starts without a saved state.")
    for key in missing:
        warn(f"Callback {key} is missing: the run in {saved.path} had it. Its saved state is ignored; to use it, pass the callback.")
    for callback in hooks:
        callback.load_history(states.get("callbacks", {}).get("History", {}).get("rows", ()))
    row = load_partial_epoch(saved.path)
    if not run.has_nothing_to_do:
        for callback in hooks:
            callback.drop_closing()
    elif row is not None:
        logs = run.logs_of(row["logs"])
        logs.earlier = run.logs_of(row["earlier"])
        run.skip_epoch_end(logs)
        for callback in hooks:
            callback.load_closing(run.progress.step, row["epoch"], logs)
