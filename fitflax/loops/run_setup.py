"""Prepares a run: settings, where it begins, its batches, the state, and a dry run."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from fitflax.callbacks.callback_list import CallbackList
from fitflax.checkpoints.collective_read import read_collectively
from fitflax.checkpoints.formats.checkpoint_files import Saved
from fitflax.checkpoints.restore.fit import from_saved
from fitflax.checkpoints.restore.resume import check_settings, find_resume, fit_to, warn_of_changes
from fitflax.checkpoints.store.checkpoint_store import CheckpointStore
from fitflax.checkpoints.writer.saver import Saver
from fitflax.checkpoints.writer.snapshot import Snapshots
from fitflax.data import FedBatch, Feed, Position, Source
from fitflax.data.randomness import undisturbed
from fitflax.data.shards import own_position, spread
from fitflax.errors import ConfigError, DataError, RestoreError, warn
from fitflax.logs import StepValues
from fitflax.loops.agreement import Agreement, DistributedAgreement, check_same_in_all_processes, fingerprint_of
from fitflax.loops.argument_checks import check_log_keys, check_restores_best
from fitflax.loops.evaluation import Evaluation
from fitflax.loops.run_plan import Progress, RunPlan, Validation
from fitflax.loops.session import Session
from fitflax.loops.signals import Interruption
from fitflax.loops.training_loop import Run
from fitflax.parallel.board import Board
from fitflax.parallel.processes import exchange
from fitflax.state import Batch, shapes_in
from fitflax.steps.early_checks import check_activations, check_in_memory, check_places
from fitflax.steps.kept_values import NOTHING, Keep
from fitflax.steps.step_dispatch import Program
from fitflax.time_spent import TimeSpent

__all__ = ["find_saved", "make_evaluation", "prepare_run", "training_copy"]

# Calls of several steps must take less than this fraction of the time of single steps, to be worth their memory and the less frequent callbacks.
_MAX_TIME_RATIO = 0.95


def find_saved(session: Session, resume: Any, stores: Sequence[CheckpointStore]) -> Saved | None:
    """Returns the checkpoint to resume from, the same in all processes; `None` to begin a new run."""
    saved = read_collectively(lambda together: find_resume(resume, stores, together), num_processes=session.strategy.num_processes)
    if saved is None and resume == "auto":
        # A run that was killed before its first checkpoint begins again under the same ID, so that it keeps its other directories.
        session.run_id = stores[0].run_id() or session.run_id
    return saved


def make_evaluation(session: Session, source: Source, *, steps: int | None, name: str, **options: Any) -> Evaluation:
    """Returns an evaluation of a session's task; `options` are `callbacks` and `interruption` of `Evaluation`."""
    program = session.task.need_compiled("evaluate")
    feeds = session.task.feeder.evaluations(source, name, steps, exact=lambda: program.dry_run.loss_is_scalar)
    return Evaluation(program, source, feeds, steps=steps, name=name, pad=session.task.pad, check=session.state.check_batch, **options)


@contextlib.contextmanager
def training_copy(
    session: Session, source: Source, class_weight: Mapping[int, float] | None, what: str, saved: Saved | None = None, *, keep: Keep = NOTHING
) -> Iterator[tuple[Session, Feed]]:
    """Yields a copy of a session, with its state initialized or restored, and its batches. The session and the global random generators do not change.

    By default it begins with the session's state and at the beginning of the data, which must be repeatable. `what` names the operation in errors.
    """
    if not source.can_restart:
        raise ConfigError(f"{what} cannot take an iterator, because it would consume your data. Pass a function that returns a new iterator: `lambda: ...`.")
    twin = session.twin() if saved is None else session.fresh(session.seed)
    settings = {name: value for name, value in _settings_of(twin, source, None).items() if name != "steps_per_epoch"}
    progress = _start_progress(twin, source, saved, settings)
    with undisturbed(), contextlib.closing(_make_feed(twin, source, class_weight, progress, saved)) as feed:
        fed = feed.next() or feed.next()
        if fed is None:
            raise DataError(f"{what}: the data yields no batches. Check that it is not empty.")
        feed.push_back()
        if saved is not None:
            twin.restore(saved, fed.batch)
        elif twin.state.live is None:
            twin.state.build(fed.batch)
        _dry_run(twin, source, fed.batch, keep)
        check_activations(twin.task.need_compiled(what), twin.state.need(what).borrow(), fed.batch)
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
    """Returns a run that is ready: the state is initialized or restored, and a step has been dry-run on the first batch.

    The plan is completed with what depends on where the run begins. `steps` is the total number of steps, `initial_epoch` the index of the first epoch of
    a new run, and `saved` the checkpoint to resume from.
    """
    settings = _settings_of(session, source, plan.steps_per_epoch)
    progress = _start_progress(session, source, saved, settings, initial_epoch)
    end_step = None if steps is None else progress.first_step + steps
    plan = dataclasses.replace(plan, end_step=end_step, info={**plan.info, "settings": settings}, process_start=progress.step)
    if session.task.need_compiled("fit").task.custom_step is not None:
        plan = dataclasses.replace(plan, keep=plan.keep._replace(norm=None))  # A custom step may compute a gradient, but does not return it.
    _warn_of_unused_processes(session)
    if session.strategy.num_processes > 1:
        check_same_in_all_processes("settings", _settings_to_compare(session, settings, plan, callbacks, validation))
    feed = _make_feed(session, source, class_weight, progress, saved)
    with contextlib.ExitStack() as failed:
        failed.callback(feed.close)  # This ends worker processes of a loader.
        weights = {str(label): float(weight) for label, weight in (class_weight or {}).items()}
        compiled = {**session.task.described, **({"class_weight": weights} if weights else {})}
        plan = dataclasses.replace(plan, info={**plan.info, "compiled": compiled})
        given: dict[str, Any] = {"callbacks": callbacks, "validation": validation, "interruption": interruption, "spent": spent or TimeSpent()}
        run = _make_run(session, source, feed, plan, progress, class_weight, saved, given, saver)
        if saved is not None:
            warn_of_changes(saved, compiled, to_resume=True)
        failed.pop_all()
    return run


def _make_run(
    session: Session,
    source: Source,
    feed: Feed,
    plan: RunPlan,
    progress: Progress,
    class_weight: Mapping[int, float] | None,
    saved: Saved | None,
    given: Mapping[str, Any],
    saver: Saver,
) -> Run:
    program, steps_per_call = session.task.need_compiled("fit"), session.task.steps_per_call
    with given["spent"].on("data"):
        ahead = steps_per_call if (steps_per_call or 1) > 1 else None
        if _is_first_batch_requested_again(source, progress, given["callbacks"], saved):
            fed = _first_batch_of_pass(session, source, class_weight, progress.position.passes)
        else:
            fed = _first_batch(feed, source, plan, progress, ahead=ahead)
    if fed is None and saved is None:
        exhausted = "It is an exhausted iterator. Pass a function that returns a new one: `lambda: ...`."
        raise DataError(f"The data yields no batches. {'Check that it is not empty.' if source.can_restart else exhausted}")
    if saved is not None:
        session.restore(saved, None if fed is None else fed.batch)
    steps = steps_per_call or _saved_steps_per_call(saved) or 1
    if session.state.live is None and fed is not None:
        if not program.is_eager:
            # The step is compiled while the state is initialized.
            program.preparation.train(session.state.begin_build(fed.batch), fed.batch, steps_per_call=steps, keep=plan.keep)
        session.state.build(fed.batch)
    live = session.state.need("fit")
    # Labels of parameters can hide a schedule-free optimizer until the state is known.
    check_restores_best(given["callbacks"] or (), program.eval_params.function_of(live.borrow()))
    before: dict[str, Any] = {}
    if fed is not None:
        if given["callbacks"] is not None and given["callbacks"].copies_state:
            Snapshots(live, saver).reserve()
        _dry_run(session, source, fed.batch, plan.keep, steps_per_call=steps)
        # This traces the module, and the device need not wait for it.
        given = {**given, "beside_first_step": functools.partial(check_activations, program, shapes_in(live.borrow()), fed.batch)}
        before = {} if saved is None else _resumed_values(session, program, saved)
    if session.strategy.num_processes > 1:
        check_same_in_all_processes("initial states", {"the state": fingerprint_of(live.borrow())})
    chosen = _choose_steps_per_call(session, program, fed, saved, plan.keep)
    loops = () if given["validation"] is None else given["validation"].loops
    for evaluate in loops:
        evaluate.prepare(live.borrow())
    check_log_keys(program.dry_run.kinds, [loop.name for loop in loops])
    session.state.last_progress = progress
    return Run(
        program,
        live,
        feed,
        # Without jit each call has one step. The choice is saved for a resume that is compiled.
        dataclasses.replace(plan, info={**plan.info, "run_id": session.run_id, "steps_per_call": chosen}, steps_per_call=1 if program.is_eager else chosen),
        progress=progress,
        agreement=functools.partial(_make_agreement, session, chosen),
        exhausted=session.note_exhausted,
        saver=saver,
        **given,
        **before,
    )


def _settings_of(session: Session, source: Source, steps_per_epoch: int | None) -> dict[str, Any]:
    """Returns the settings that determine the order of examples and the numbers; a run can only be resumed with equal ones."""
    return {
        "seed": session.seed,
        "batch_size": source.all_batch_size,
        "steps_per_epoch": steps_per_epoch,
        "num_examples": source.all_examples,
        "shuffle": source.shuffles,
        **session.task.need_compiled("fit").task.numerics.settings,
    }


def _start_progress(session: Session, source: Source, saved: Saved | None, settings: Mapping[str, Any], initial_epoch: int = 0) -> Progress:
    """Returns where a run begins: at the position of the saved run, or at the session's step with new epochs."""
    if saved is not None:
        check_settings(saved, settings)
        progress = Progress.from_json(saved.metadata["progress"])
        if not source.is_repeatable:
            progress.position, progress.used = spread(progress.position, progress.used, source)
        progress.position = own_position(progress.position, progress.used, source.shares)
        return progress
    step = 0 if session.state.live is None else session.state.live.step
    return Progress(step=step, first_step=step, epoch=initial_epoch, position=session.next_position(source))


def _make_feed(session: Session, source: Source, class_weight: Mapping[int, float] | None, progress: Progress, saved: Saved | None) -> Feed:
    feed = session.task.feeder.train(source, class_weight, progress.position, used=progress.used, size=saved.metadata.get("full_batch_size") if saved else None)
    if saved is not None:
        feed.load_state_dict(from_saved(saved.run.get("data", {}), root="run/data", key_impls=saved.metadata["key_impls"]))
    return feed


def _first_batch(feed: Feed, source: Source, plan: RunPlan, progress: Progress, *, ahead: int | None) -> FedBatch | None:
    """Returns the first batch of a run, which remains in the feed; `None` if the resumed run has had all batches."""
    fed = feed.next(ahead)
    if fed is None and progress.epoch_is_open and not progress.epoch_is_over and plan.steps_per_epoch is None:
        # The run was interrupted after the last batch of an epoch, before it was known to be the last.
        progress.epoch_is_over, progress.position = True, feed.position
    if fed is None and source.can_restart:
        fed = feed.next(ahead)
    if fed is not None:
        feed.push_back()
    return fed


def _is_first_batch_requested_again(source: Source, progress: Progress, callbacks: CallbackList | None, saved: Saved | None) -> bool:
    """Returns whether a callback may change the data in `on_epoch_begin` before the first batch.

    Unless the run is resumed, data is requested only once, because data that draws random numbers would otherwise change, unless its order depends on an epoch.
    """
    may_change = callbacks is not None and not callbacks.may_prefetch and not progress.epoch_is_open
    return may_change and source.can_reread and (source.takes_epoch or saved is not None)


def _first_batch_of_pass(session: Session, source: Source, class_weight: Mapping[int, float] | None, number: int) -> FedBatch | None:
    """Returns a batch with the shapes of a run, or `None` if there is none. The run does not use its values.

    A callback may change the data in `on_epoch_begin`, so the run requests its first batch after it.
    """
    with undisturbed(), source.undisturbed(), contextlib.closing(session.task.feeder.train(source, class_weight, Position(number))) as feed:
        return feed.next()


def _dry_run(session: Session, source: Source, batch: Batch, keep: Keep, *, steps_per_call: int = 1) -> None:
    session.state.check_batch(batch)
    program, state = session.task.need_compiled("fit"), session.state.need("fit").borrow()
    program.preparation.train(state, batch, steps_per_call=steps_per_call, keep=keep)
    check_places(program, state)
    check_in_memory(program, source, state, batch, pad=session.task.pad, train=True)


def _settings_to_compare(
    session: Session, settings: Mapping[str, Any], plan: RunPlan, callbacks: CallbackList | None, validation: Validation | None
) -> dict[str, Any]:
    settings = {**settings, **session.task.described, "steps_per_call": session.task.steps_per_call}
    settings |= {"steps": plan.end_step, "epochs": plan.end_epoch, "every": plan.every}
    settings["validation"] = None if validation is None else [[loop.name for loop in validation.loops], validation.frequency]
    settings |= {} if callbacks is None else callbacks.alike
    return {name: repr(value) for name, value in settings.items()}


def _warn_of_unused_processes(session: Session) -> None:
    process, taken, count = jax.process_index(), session.strategy.num_processes, jax.process_count()
    if process and taken < count and Board.is_there():
        warn(
            f"This run uses devices of {taken} of {count} processes, and process {process} writes no files, because only process 0 does. To run processes "
            "independently, start them without parallel.initialize()."
        )


def _make_agreement(session: Session, steps_per_call: int, clock: Callable[[], float]) -> Agreement:
    strategy = session.strategy
    if strategy.num_processes == 1:
        return Agreement(clock, lambda: session.is_stopping)
    return DistributedAgreement(
        clock,
        lambda: session.is_stopping,
        reason=lambda: session.stop_reason or "",
        stop=session.stop,
        ahead=(strategy.max_in_flight + 1) * steps_per_call,
        multiple=steps_per_call,
    )


def _resumed_values(session: Session, program: Program, saved: Saved) -> dict[str, Any]:
    """Returns the values of the last step and of the open epoch of a saved run, as arguments of `Run`."""
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
            raise RestoreError(
                f"The checkpoint has collected rows of the metrics {sorted(rows)}, but no compiled metric collects rows. "
                "Compile with the metrics of the checkpoint."
            )
    if "values" in saved.run and saved.run["values"].size == traced.num_values:
        before["values"] = StepValues(traced.places, session.strategy.put(saved.run["values"]))
    return before


def _choose_steps_per_call(session: Session, program: Program, fed: FedBatch | None, saved: Saved | None, keep: Keep) -> int:
    """Returns the number of steps of a call: as requested, as in the resumed run, or whichever is faster."""
    before = _saved_steps_per_call(saved)
    session.task.choice = None
    if session.task.steps_per_call is not None:
        if before not in (None, session.task.steps_per_call):
            warn(
                f"The run used steps_per_call={before} and resumes with steps_per_call={session.task.steps_per_call}, so its results may differ by rounding. "
                f"To resume bit for bit, pass compile(steps_per_call={before})."
            )
        return session.task.steps_per_call
    if before is not None or fed is None or program.is_eager:
        return before or 1
    size = program.group_size(fed)
    single, grouped = program.time_steps(session.state.need("fit").borrow(), fed, size, keep) if size > 1 else (0.0, 0.0)
    if session.strategy.num_processes > 1:
        single, grouped = exchange([single, grouped], "the choice of steps_per_call")[0]
    chosen = size if grouped < single * _MAX_TIME_RATIO else 1
    session.task.choice = f"{size} steps per call took {grouped * 1e6:.0f} us per step, single steps {single * 1e6:.0f} us" if size > 1 else "batches are large"
    session.task.choice = f"steps_per_call='auto' chose {chosen}: {session.task.choice}."
    return chosen


def _saved_steps_per_call(saved: Saved | None) -> int | None:
    return None if saved is None else int(saved.metadata.get("steps_per_call", 1))
