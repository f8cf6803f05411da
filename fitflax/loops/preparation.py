"""From what a session has to a run that is ready to go: settings, where to begin, its batches, the state built or restored, a dry run."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from fitflax.callbacks.callback_list import CallbackList
from fitflax.checkpoints.resume import check_settings, find_resume, fit_to, warn_of_changes
from fitflax.checkpoints.saved import Saved
from fitflax.checkpoints.saving import Saver
from fitflax.checkpoints.store import CheckpointStore
from fitflax.checkpoints.trees import from_saved
from fitflax.data import FedBatch, Feed, Source
from fitflax.data.randomness import undisturbed
from fitflax.data.shards import own_position
from fitflax.errors import CheckpointError, ConfigError, DataError, RestoreError, warn
from fitflax.logs import StepValues
from fitflax.loops.agreement import Agreement, Together, check_alike, summary_of
from fitflax.loops.arguments import check_log_keys
from fitflax.loops.evaluation import Evaluation
from fitflax.loops.plan import Progress, RunPlan, Validation
from fitflax.loops.run import Run
from fitflax.loops.session import Session
from fitflax.loops.signals import Interruption
from fitflax.parallel.board import Board
from fitflax.parallel.processes import after_first, exchange
from fitflax.state import Batch
from fitflax.steps.preflight import check_activations, check_in_memory, check_places
from fitflax.steps.program import Program
from fitflax.steps.task import NOTHING, Keep
from fitflax.time_spent import TimeSpent

__all__ = ["find_saved", "make_evaluation", "prepare_run", "trained_aside"]

# Of the time of single steps: less is gained by groups than they cost in memory and in how often anybody can look.
_WORTH_GROUPING = 0.95


def find_saved(session: Session, resume: Any, stores: Sequence[CheckpointStore]) -> Saved | None:
    """Returns the checkpoint to go on from, the same in all processes; `None` where a run is to begin.

    Args:
        session: Whose run it is.
        resume: As given to `fit`.
        stores: Where the run is saved.

    Raises:
        ConfigError: `resume` makes no sense, or it is not clear where to look.
        CheckpointError: There is no checkpoint that could be taken, or the processes find different ones.
    """
    if session.strategy.num_processes > 1:
        saved = after_first(lambda: find_resume(resume, stores))
        steps = exchange(None if saved is None else saved.metadata.get("step"), "what to resume")
        if len(set(steps)) > 1:
            found = dict(enumerate(steps))
            raise CheckpointError(f"The processes do not find the same checkpoint to go on from, steps by process: {found}. They must share the directory.")
    else:
        saved = find_resume(resume, stores)
    if saved is None and resume == "auto":
        # A run that died before its first checkpoint is begun again under its own name, so that its other directories are still its own.
        session.run_id = stores[0].run_id() or session.run_id
    return saved


def make_evaluation(session: Session, source: Source, *, steps: int | None, name: str, **options: Any) -> Evaluation:
    """Returns an evaluation of a session's task over data.

    Args:
        session: What is evaluated.
        source: The data.
        steps: Batches of an evaluation; `None` for all.
        name: The group of its metrics.
        **options: `callbacks` and `interruption`, as of `Evaluation`.

    Raises:
        ConfigError: The data never ends, and there are no `steps`.
        NotReadyError: Before `compile`.
    """
    program = session.need_compiled("evaluate")
    feeds = session.feeder.evaluations(source, name, steps, exact=lambda: program.dry_run.loss_is_scalar)
    return Evaluation(program, source, feeds, steps=steps, name=name, pad=session.pad, check=session.see_batch, **options)


@contextlib.contextmanager
def trained_aside(
    session: Session, source: Source, class_weight: Mapping[int, float] | None, what: str, saved: Saved | None = None, *, keep: Keep = NOTHING
) -> Iterator[tuple[Session, Feed]]:
    """Yields a twin of a session, its state built or restored, and its batches: nothing of the session changes, nor of the global random generators.

    Args:
        session: The session.
        source: The data, which must be such that it can be passed over again.
        class_weight: `{label: weight}`.
        what: What is done, for errors.
        saved: The checkpoint to begin from; by default the session's state, and the beginning of the data.
        keep: What of a step is kept.

    Raises:
        ConfigError: The data can be passed over only once.
        DataError: There is no batch, or labels are out of range.
        ModelError, LossError, MetricError: What does not fit the first batch.
        RestoreError: The checkpoint does not fit, or its order of examples is another.
    """
    if not source.can_restart:
        raise ConfigError(f"{what} must not use up your data, and an iterator can be passed over only once. Pass a function that makes one, `lambda: ...`.")
    twin = session.twin() if saved is None else session.fresh(session.seed)
    settings = {name: value for name, value in _settings_of(twin, source, None).items() if name != "steps_per_epoch"}
    progress = _start_progress(twin, source, saved, settings)
    with undisturbed(), contextlib.closing(_make_feed(twin, source, class_weight, progress, saved)) as feed:
        fed = feed.next() or feed.next()
        if fed is None:
            raise DataError(f"{what}: the data yields no batch.")
        feed.push_back()
        if saved is not None:
            twin.place(saved, fed.batch)
        elif twin.live is None:
            twin.build(fed.batch)
        _look_at(twin, source, fed.batch, keep)
        yield twin, feed


def prepare_run(
    session: Session,
    source: Source,
    plan: RunPlan,
    *,
    steps: int | None,
    saver: Saver,
    initial_epoch: int = 0,
    class_weight: Mapping[int, float] | None = None,
    callbacks: CallbackList | None = None,
    validation: Validation | None = None,
    interruption: Interruption | None = None,
    saved: Saved | None = None,
    spent: TimeSpent | None = None,
) -> Run:
    """Returns a run that is ready to go: state built or restored, the first batch looked at and dry-run.

    Args:
        session: What it is made of, and what it leaves its state in.
        source: The data.
        plan: What to do; what follows from where the run begins is filled in.
        steps: How many steps it makes in all; `None` for no bound.
        saver: Who saves for the run.
        initial_epoch: The index of the first epoch of a new run.
        class_weight: `{label: weight}`.
        callbacks: Whose hooks are called.
        validation: What is evaluated during training.
        interruption: Which signals end it.
        saved: The checkpoint to go on from.
        spent: Where its time is noted.

    Raises:
        ConfigError: A metric has the name under which a validation is logged.
        DataError: There is no batch, or labels are out of range.
        ModelError, LossError, MetricError: What does not fit the first batch.
        RestoreError: The checkpoint does not fit, or is of a run with other settings.
    """
    settings = _settings_of(session, source, plan.steps_per_epoch)
    progress = _start_progress(session, source, saved, settings, initial_epoch)
    end_step = None if steps is None else progress.first_step + steps
    plan = dataclasses.replace(plan, end_step=end_step, info={**plan.info, "settings": settings}, process_start=progress.step)
    if session.need_compiled("fit").task.custom_step is not None:
        plan = dataclasses.replace(plan, keep=plan.keep._replace(norm=None))  # A gradient there may be, but nobody knows of it.
    _warn_of_own_run(session)
    if session.strategy.num_processes > 1:
        check_alike("is set", _settings_in_words(session, settings, plan, callbacks, validation))
    feed = _make_feed(session, source, class_weight, progress, saved)
    with contextlib.ExitStack() as failed:
        failed.callback(feed.close)  # Workers of a loader end with it.
        weights = {str(label): float(weight) for label, weight in (class_weight or {}).items()}
        compiled = {**session.described, **({"class_weight": weights} if weights else {})}
        plan = dataclasses.replace(plan, info={**plan.info, "compiled": compiled})
        given: dict[str, Any] = {"callbacks": callbacks, "validation": validation, "interruption": interruption, "spent": spent or TimeSpent()}
        run = _prepared(session, source, feed, plan, progress, saved, given, saver)
        if saved is not None:
            warn_of_changes(saved, compiled, to_resume=True)
        failed.pop_all()
    return run


def _prepared(
    session: Session, source: Source, feed: Feed, plan: RunPlan, progress: Progress, saved: Saved | None, given: Mapping[str, Any], saver: Saver
) -> Run:
    """Returns the run whose batches are there."""
    program, steps_per_call = session.need_compiled("fit"), session.steps_per_call
    with given["spent"].on("data"):
        fed = _first_batch(feed, source, plan, progress, saved, ahead=steps_per_call if (steps_per_call or 1) > 1 else None)
    if saved is not None:
        session.place(saved, None if fed is None else fed.batch)
    steps = steps_per_call or _steps_before(saved) or 1
    if session.live is None and fed is not None:
        # The step is compiled while the state is initialized.
        shapes = program.begin_init(jax.random.key(session.seed), fed.batch)
        program.prepare_train(shapes, fed.batch, steps_per_call=steps, keep=plan.keep)
        session.build(fed.batch)
    live = session.need_state("fit")
    before: dict[str, Any] = {}
    if fed is not None:
        _look_at(session, source, fed.batch, plan.keep, steps_per_call=steps)
        before = {} if saved is None else _before(session, program, saved)
    if session.strategy.num_processes > 1:
        check_alike("begins with", {"the state": summary_of(live.borrow())})
    chosen = _choose_steps_per_call(session, program, fed, saved, plan.keep)
    loops = () if given["validation"] is None else given["validation"].loops
    for evaluate in loops:
        evaluate.prepare(live.borrow())
    check_log_keys(program.dry_run.kinds, [loop.name for loop in loops])
    session.last_progress = progress
    return Run(
        program,
        live,
        feed,
        dataclasses.replace(plan, info={**plan.info, "run_id": session.run_id, "steps_per_call": chosen}, steps_per_call=chosen),
        progress=progress,
        agreement=functools.partial(_agreement, session, chosen),
        exhausted=session.note_exhausted,
        saver=saver,
        **given,
        **before,
    )


def _settings_of(session: Session, source: Source, steps_per_epoch: int | None) -> dict[str, Any]:
    """Returns what the order of examples and the numbers follow from; a run can only be resumed with the same."""
    return {
        "seed": session.seed,
        "batch_size": source.all_batch_size,
        "steps_per_epoch": steps_per_epoch,
        "num_examples": source.all_examples,
        "shuffle": source.shuffles,
        **session.need_compiled("fit").task.numerics.settings,
    }


def _start_progress(session: Session, source: Source, saved: Saved | None, settings: Mapping[str, Any], initial_epoch: int = 0) -> Progress:
    """Returns where a run begins: where the one that was saved was, or at the session's step, with new epochs.

    Raises:
        RestoreError: The saved run had other settings.
    """
    if saved is not None:
        check_settings(saved, settings)
        progress = Progress.from_json(saved.metadata["progress"])
        progress.position = own_position(progress.position, progress.used, source.shares)
        return progress
    step = 0 if session.live is None else session.live.step
    return Progress(step=step, first_step=step, epoch=initial_epoch, position=session.next_position(source))


def _make_feed(session: Session, source: Source, class_weight: Mapping[int, float] | None, progress: Progress, saved: Saved | None) -> Feed:
    """Returns the batches of a run from where it begins."""
    feed = session.feeder.train(source, class_weight, progress.position, used=progress.used, size=saved.metadata.get("full_batch_size") if saved else None)
    if saved is not None:
        feed.load_state_dict(from_saved(saved.run.get("data", {}), root="run/data", key_impls=saved.metadata["key_impls"]))
    return feed


def _first_batch(feed: Feed, source: Source, plan: RunPlan, progress: Progress, saved: Saved | None, ahead: int | None) -> FedBatch | None:
    """Returns the batch that the run begins with, which is then trained on; `None` where the run that was saved has had all.

    Raises:
        DataError: There is none.
    """
    fed = feed.next(ahead)
    if fed is None and progress.epoch_is_open and not progress.epoch_is_over and plan.steps_per_epoch is None:
        # The run was broken off after the last batch of an epoch, before anything could tell that it was the last.
        progress.epoch_is_over, progress.position = True, feed.position
    if fed is None and source.can_restart:
        fed = feed.next(ahead)
    if fed is None and saved is None:
        used_up = " It is an iterator that has been used up; pass a function that makes one, `lambda: ...`." if not source.can_restart else ""
        raise DataError(f"The data yields no batch.{used_up}")
    if fed is not None:
        feed.push_back()
    return fed


def _look_at(session: Session, source: Source, batch: Batch, keep: Keep, *, steps_per_call: int = 1) -> None:
    """Dry-runs a training step on a batch, and tells what can be told before the first one."""
    session.see_batch(batch)
    program, state = session.need_compiled("fit"), session.need_state("fit").borrow()
    program.prepare_train(state, batch, steps_per_call=steps_per_call, keep=keep)
    check_activations(program, state, batch)
    check_places(program, state)
    check_in_memory(program, source, state, batch, pad=session.pad, train=True)


def _settings_in_words(
    session: Session, settings: Mapping[str, Any], plan: RunPlan, callbacks: CallbackList | None, validation: Validation | None
) -> dict[str, Any]:
    """Returns what all processes must have set alike."""
    settings = {**settings, **session.described, "steps_per_call": session.steps_per_call}
    settings |= {"steps": plan.end_step, "epochs": plan.end_epoch, "every": plan.every}
    settings["validation"] = None if validation is None else [[loop.name for loop in validation.loops], validation.frequency]
    settings |= {} if callbacks is None else callbacks.alike
    return {name: repr(value) for name, value in settings.items()}


def _warn_of_own_run(session: Session) -> None:
    process, taken, count = jax.process_index(), session.strategy.num_processes, jax.process_count()
    if process and taken < count and Board.is_there():
        warn(
            f"This run takes devices of {taken} of {count} processes, and writes no files in process {process}: process 0 alone does. Start processes that are "
            "to work by themselves without parallel.initialize()."
        )


def _agreement(session: Session, steps_per_call: int, clock: Callable[[], float]) -> Agreement:
    """Returns what decides for a run whether it is to stop, and what time it is."""
    strategy = session.strategy
    if strategy.num_processes == 1:
        return Agreement(clock, lambda: session.is_stopping)
    ahead = (strategy.max_in_flight + 1) * steps_per_call
    reason = lambda: session.stop_reason or ""  # noqa: E731
    return Together(clock, lambda: session.is_stopping, reason=reason, stop=session.stop, ahead=ahead, multiple=steps_per_call)


def _before(session: Session, program: Program, saved: Saved) -> dict[str, Any]:
    """Returns what the run that was saved had of its last step, and of the epoch that was open, as arguments of `Run`.

    Raises:
        RestoreError: It does not fit the compiled metrics.
    """
    traced = program.dry_run.traced_step(train=True)
    before: dict[str, Any] = {}
    if "sums" in saved.run:
        before["sums"] = program.pack_sums(fit_to(traced.empty, saved.run["sums"], saved, "run/sums"), train=True)
        before["validated"] = saved.run.get("validated", {})
        before["collected"] = collected = program.collector(train=True)
        rows = saved.run.get("rows", {})
        if collected is not None:
            collected.load_state_dict(rows)
        elif rows:
            raise RestoreError(f"The checkpoint has collected rows of {sorted(rows)}, but the compiled metrics collect none.")
    if "values" in saved.run and saved.run["values"].size == traced.num_values:
        before["values"] = StepValues(traced.places, session.strategy.put(saved.run["values"]))
    return before


def _choose_steps_per_call(session: Session, program: Program, fed: FedBatch | None, saved: Saved | None, keep: Keep) -> int:
    """Returns how many steps a call is to make: what was asked for, what the run to be resumed made, or what is faster."""
    before = _steps_before(saved)
    session.choice = None
    if session.steps_per_call is not None:
        if before not in (None, session.steps_per_call):
            message = f"The run made {before} steps a call and goes on with {session.steps_per_call}: from then on its results may differ by rounding."
            warn(message)
        return session.steps_per_call
    if before is not None or fed is None:
        return before or 1
    size = program.group_size(fed)
    single, grouped = program.time_steps(session.need_state("fit").borrow(), fed, size, keep) if size > 1 else (0.0, 0.0)
    if session.strategy.num_processes > 1:
        single, grouped = exchange([single, grouped], "how many steps a call makes")[0]
    chosen = size if grouped < single * _WORTH_GROUPING else 1
    session.choice = f"{size} steps a call took {grouped * 1e6:.0f} us a step, single steps {single * 1e6:.0f} us" if size > 1 else "batches are large"
    session.choice = f"steps_per_call='auto' chose {chosen}: {session.choice}."
    return chosen


def _steps_before(saved: Saved | None) -> int | None:
    """Returns how many steps a call made in the run that was saved."""
    return None if saved is None else int(saved.metadata.get("steps_per_call", 1))
