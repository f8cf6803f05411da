"""What `fit` does around a run: splitting off validation data, the parameters of callbacks, and callbacks from beginning to end."""

import contextlib
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fitflax.callbacks import ModelCheckpoint, TrainerView
from fitflax.callbacks.callback_list import CallbackList
from fitflax.callbacks.store_callback import StoreCallback
from fitflax.checkpoints.formats.checkpoint_files import Saved
from fitflax.checkpoints.formats.partial_epoch import load_partial_epoch
from fitflax.checkpoints.restore.fit import from_saved
from fitflax.data import Source
from fitflax.data.indexed import IndexedSource
from fitflax.data.shards import part_of_batch_size
from fitflax.errors import ConfigError, DirectoryInUseError, chain_of, warn
from fitflax.logs import Logs
from fitflax.loops.run_plan import RunPlan
from fitflax.loops.session import Session
from fitflax.loops.training_loop import Run
from fitflax.run_config import flat

__all__ = ["check_other_directories", "hold_out", "params_of", "run_with_callbacks"]


def hold_out(session: Session, source: Source, validation_data: Any, split: float, batch_size: int | None) -> tuple[Source, Any]:
    """Returns the data to train on and the data to validate on, which is split off if `split` is not 0.

    `batch_size` is that of the validation data, over all processes.
    """
    if not split:
        return source, validation_data
    if validation_data is not None:
        raise ConfigError("validation_split and validation_data are both given. Pass only one of them.")
    if not 0 < split < 1:
        raise ConfigError(f"validation_split must be between 0 and 1. Received: {split!r}.")
    if not isinstance(source, IndexedSource):
        raise ConfigError("validation_split requires in-memory arrays, a Hugging Face dataset or a TokenFile. For other data, pass validation_data=.")
    if source.is_shard and batch_size is not None:
        batch_size = part_of_batch_size(batch_size, session.strategy.part[1])
    parts = source.divide(split, batch_size)
    for part in parts:
        part.is_shard = source.is_shard
        session.intake.agreed(part)
    return parts


def check_other_directories(session: Session, hooks: CallbackList, resume: Any, saved: Saved | None) -> None:
    """Raises `DirectoryInUseError` if `resume="auto"` begins a new run because a `ModelCheckpoint` has none, but other directories have checkpoints."""
    if resume != "auto" or saved is not None:
        return
    (searched,) = (callback.directory for callback in hooks if isinstance(callback, ModelCheckpoint))
    for callback in hooks:
        if isinstance(callback, StoreCallback) and not callback.overwrite and (found := callback.store.describe_others(session.run_id)):
            raise DirectoryInUseError(
                f'{found}. resume="auto" has found no checkpoint in {searched}. To resume from the other directory, pass resume="{callback.directory}"; to '
                "start a new run, choose another directory, or pass overwrite=True to the callback, which replaces these checkpoints."
            )


def params_of(session: Session, source: Source, sets: Iterable[str], plan: RunPlan, *, trial: int) -> dict[str, Any]:
    """Returns the `params` of callbacks, which describe the data and the run. `trial` is the number of batches of a trial run, or 0."""
    return {
        "steps": min(filter(None, (trial, plan.steps_per_epoch or source.all_batches)), default=None),
        "num_examples": source.all_examples,
        "model_flops": session.task.need_compiled("fit").preparation.model_flops,
        "validation_sets": tuple(sets),
        "hyperparameters": _hyperparameters(session, plan),
    }


def _hyperparameters(session: Session, plan: RunPlan) -> dict[str, Any]:
    model = session.task.any_program().task.model
    own = {f"model/{name}": value for name, value in model.hyperparameters.items()}
    known = {key: value for key, value in plan.info["settings"].items() if value is not None}
    return {**known, **session.task.described, "model": model.name, **own, **flat(plan.info.get("config", {}))}


def run_with_callbacks(session: Session, trainer: TrainerView, run: Run, params: Mapping[str, Any], *, saved: Saved | None) -> None:
    """Runs the steps with callbacks, from `on_train_begin` to `on_train_end`, which is always called."""
    known = {
        "epochs": run.plan.end_epoch,
        "first_epoch": run.progress.epoch,
        "first_step_in_epoch": run.progress.step_in_epoch if run.progress.epoch_is_open else 0,
        "resumed_step": None if saved is None else run.step,
        "time_spent": run.spent,
        "is_done": run.has_nothing_to_do,
    }
    hooks, interruption = run.callbacks, run.interruption
    with contextlib.ExitStack() as failed:
        failed.callback(run.close)
        hooks.bind(trainer, {**params, **known}, spent=run.spent, leaves_at_once=lambda: interruption is not None and interruption.leaves_at_once)
        with run.spent.on("callbacks"):
            hooks.open_run(session.run_id, run.step)
        hooks.start_schedules(run.seconds)
        failed.pop_all()
    try:
        session.is_fitting = True
        with _chaining_failure(run):
            _run_callbacks(session, run, saved)
    finally:
        session.is_fitting = False


def _run_callbacks(session: Session, run: Run, saved: Saved | None) -> None:
    hooks, interruption = run.callbacks, run.interruption
    try:
        hooks.call("on_train_begin", {})
        if saved is not None:
            _load_callbacks(hooks, saved, run)
        hooks.state_dict(run.seconds)  # Now, so that callbacks with conflicting state keys fail before the first save.
        for checkpoint in run:
            hooks.on_checkpoint(checkpoint, run.due)
        if interruption is not None and interruption.requested is not None:
            session.stop(f"interrupted by {interruption.requested.name}")
            if interruption.requested == signal.SIGTERM and not hooks.saves:  # A scheduler would start it again from the beginning.
                warn(
                    "SIGTERM ended the run, and nothing was saved, so it cannot be resumed. To make runs resumable, pass "
                    "callbacks=[ModelCheckpoint(directory)] and resume='auto'."
                )
    finally:
        with contextlib.ExitStack() as stack:  # Called in reverse order: `on_train_end` is always the last.
            stack.callback(hooks.finish, run.epoch_logs)
            stack.callback(run.close)


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
        logs = Logs(extra=row["logs"])
        logs.earlier = row["earlier"]
        run.skip_epoch_end(logs)
        for callback in hooks:
            callback.load_closing(run.step, row["epoch"], logs)
