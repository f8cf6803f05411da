"""What `fit` does around a run: the part of the data that is held out, the checkpoint to go on from, and the callbacks from beginning to end."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flax import linen as nn

from fitflax.callbacks import TrainerView
from fitflax.callbacks.callback_list import CallbackList
from fitflax.checkpoints.closing import load_closing_row
from fitflax.checkpoints.saved import Saved
from fitflax.checkpoints.trees import from_saved
from fitflax.data import Source
from fitflax.data.indexed import IndexedSource
from fitflax.data.shards import part_of_batch_size
from fitflax.errors import ConfigError, warn
from fitflax.logs import Logs
from fitflax.loops.plan import RunPlan
from fitflax.loops.run import Run
from fitflax.loops.session import Session

__all__ = ["hold_out", "params_of", "run_with_callbacks"]


def hold_out(session: Session, source: Source, validation_data: Any, split: float, batch_size: int | None) -> tuple[Source, Any]:
    """Returns what to train on, and what to validate on, which may be a part that is held out.

    Args:
        session: Whose data it is.
        source: All the data.
        validation_data: As given to `fit`.
        split: The share to hold out, or 0.
        batch_size: Of the part that is held out, over all processes.

    Raises:
        ConfigError: Both are given; `split` is no share; the data cannot be divided.
    """
    if not split:
        return source, validation_data
    if validation_data is not None:
        raise ConfigError("validation_split and validation_data are both given; one of them says what to validate on.")
    if not 0 < split < 1:
        raise ConfigError(f"validation_split must lie between 0 and 1. Received: {split!r}.")
    if not isinstance(source, IndexedSource):
        raise ConfigError("validation_split can only be taken from in-memory arrays. Pass validation_data.")
    if source.is_shard and batch_size is not None:
        batch_size = part_of_batch_size(batch_size, session.strategy.part[1])
    parts = source.divide(split, batch_size)
    for part in parts:
        part.is_shard = source.is_shard
        session.intake.agreed(part)
    return parts


def params_of(session: Session, model: nn.Module, source: Source, sets: Iterable[str], plan: RunPlan, *, trial: int) -> dict[str, Any]:
    """Returns what callbacks are told of the data and the run.

    Args:
        session: Whose run it is.
        model: The user's module.
        source: What is trained on.
        sets: The names of what is validated on.
        plan: What the run is to do.
        trial: How many batches are tried; 0 for a run in earnest.
    """
    return {
        "steps": min(filter(None, (trial, plan.steps_per_epoch or source.all_batches)), default=None),
        "num_examples": source.all_examples,
        "model_flops": session.need_compiled("fit").model_flops,
        "validation_sets": tuple(sets),
        "hyperparameters": _hyperparameters(session, model, plan.info["settings"]),
    }


def _hyperparameters(session: Session, model: nn.Module, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a run may be told apart by from others, as numbers, booleans and strings."""
    fields = {field.name: getattr(model, field.name, None) for field in dataclasses.fields(model) if field.name not in ("parent", "name")}
    own = {f"model/{name}": value for name, value in fields.items() if isinstance(value, bool | int | float | str)}
    known = {key: value for key, value in settings.items() if value is not None}
    return {**known, **session.described, "model": type(model).__name__, **own}


def run_with_callbacks(session: Session, trainer: TrainerView, run: Run, params: Mapping[str, Any], *, saved: Saved | None) -> None:
    """Makes a run with its callbacks, from `on_train_begin` to `on_train_end`, which always comes.

    Args:
        session: Whose run it is.
        trainer: What callbacks know as their trainer.
        run: The run, ready to go.
        params: What callbacks are told of the data and the run.
        saved: The checkpoint that the run goes on from.
    """
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
        with _naming_failure(run):
            _consume(session, run, saved)
    finally:
        session.is_fitting = False


def _consume(session: Session, run: Run, saved: Saved | None) -> None:
    hooks, interruption = run.callbacks, run.interruption
    try:
        hooks.call("on_train_begin", {})
        if saved is not None:
            _load_callbacks(hooks, saved, run)
        hooks.state_dict(run.seconds)  # Callbacks whose states would overwrite each other are an error now, not at the first save.
        for checkpoint in run:
            hooks.on_checkpoint(checkpoint, run.due)
        if interruption is not None and interruption.requested is not None:
            session.stop(f"interrupted by {interruption.requested.name}")
    finally:
        with contextlib.ExitStack() as stack:  # Backwards: `on_train_end` comes last, and whatever happens.
            stack.callback(hooks.finish, run.epoch_logs)
            stack.callback(run.close)


@contextlib.contextmanager
def _naming_failure(run: Run) -> Iterator[None]:
    """Has an error in saving what an exception broke off say which exception that was; without it that one would never be seen."""
    try:
        yield
    except BaseException as error:
        if run.failure is None:
            raise
        first: BaseException | None = error
        while first is not None and first is not run.failure:
            last, first = first, first.__cause__ or first.__context__
        if first is None:
            last.__context__ = run.failure
        raise


def _load_callbacks(hooks: CallbackList, saved: Saved, run: Run) -> None:
    states = from_saved(saved.run, key_impls=saved.metadata["key_impls"])
    new, missing = hooks.load_state_dict(states, run.seconds)
    for key in new:
        warn(f"Callback {key} is new: the run in {saved.path} did not have it, so it begins afresh.")
    for key in missing:
        warn(f"Callback {key} is missing: the run in {saved.path} had it, and its state is not used.")
    row = load_closing_row(saved.path)
    if not run.has_nothing_to_do:
        for callback in hooks:
            callback.drop_closing()
    elif row is not None:
        logs = Logs(extra=row["logs"])
        logs.earlier = row["earlier"]
        run.skip_closing(logs)
        for callback in hooks:
            callback.load_closing(run.step, row["epoch"], logs)
