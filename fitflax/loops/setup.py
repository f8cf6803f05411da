"""Sets up a run: its settings, where it begins, its first batch, the state, and a dry run of the step on shapes."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from fitflax.callbacks import EarlyStopping
from fitflax.callbacks.callback_list import CallbackList
from fitflax.callbacks.model_checkpoint import StoreCallback
from fitflax.checkpoints.checkpoint_files import Saved, read_collectively
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.checkpoints.restore import from_saved
from fitflax.checkpoints.resume import check_settings, find_resume, fit_to, warn_of_changes
from fitflax.checkpoints.saver import Saver, Snapshots
from fitflax.data import FedBatch, Feed, Position, Source
from fitflax.data.feed import undisturbed
from fitflax.data.shards import position_in_shard, spread
from fitflax.errors import CallbackError, ConfigError, DataError, RestoreError, warn
from fitflax.logs import StepValues, TimeSpent, flat_name
from fitflax.loops.configuration import RestoreOptions
from fitflax.loops.evaluation_loop import Validation
from fitflax.loops.session import Session
from fitflax.loops.session_state import Progress
from fitflax.loops.signals import Interruption, check_same_in_all_processes, fingerprint_of
from fitflax.parallel.placement import spans_processes
from fitflax.parallel.processes import exchange
from fitflax.state import Batch, TrainState, shapes_in
from fitflax.steps.live_state import LiveState, Sums, schedule_free_eval_params
from fitflax.steps.outputs import NOTHING, Collected, Keep
from fitflax.steps.program import Program, check_activations, check_in_memory, check_places
from fitflax.triggers import Trigger

# Calls of several steps must take less than this fraction of the time of single steps, to be worth their memory and the less frequent callbacks.
_MAX_TIME_RATIO = 0.95


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """When a run ends and yields checkpoints, and what is saved with them."""

    end_step: int | None = None  # Step after which the run ends; `None` for no limit.
    end_epoch: int | None = None  # Index of the epoch before which the run ends; `None` for no limit.
    steps_per_epoch: int | None = None  # Batches of an epoch; `None` for a pass over the data.
    every: Trigger | None = None  # Trigger for checkpoints, besides the last step.
    # Whether callbacks consume the checkpoints. The end of each epoch then yields one, and a yielded step is yielded again if it turns out to be the last
    # one, for callbacks that save only then.
    is_fit: bool = False
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # JSON values that are saved with every checkpoint.
    process_start: int = 0  # Step at which this process began.
    keep: Keep = NOTHING  # What checkpoints contain of their step besides its values.
    steps_per_call: int = 1  # Maximum number of steps of a call.


@dataclasses.dataclass(frozen=True)
class RunComponents:
    """The parts of a run besides its steps. `saver` is closed at the end of the run."""

    saver: Saver
    callbacks: CallbackList = dataclasses.field(default_factory=CallbackList)
    validation: Validation = dataclasses.field(default_factory=Validation)
    interruption: Interruption = dataclasses.field(default_factory=Interruption)
    spent: TimeSpent = dataclasses.field(default_factory=TimeSpent)


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The values of the last step of a resumed run and, if its epoch is open, the epoch's sums, collected rows, and results of validation."""

    values: StepValues | None = None
    sums: Sums | None = None
    collected: Collected | None = None
    validated: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RunSetup:
    """A run that is ready for its first step."""

    session: Session
    program: Program
    live: LiveState
    feed: Feed
    plan: RunPlan
    progress: Progress  # Where the run begins; the loop updates it.
    components: RunComponents
    resumed: Resumed
    during_first_step: Callable[[], None] | None  # Called while the device computes the first step.


def prepare_run(
    session: Session,
    source: Source,
    plan: RunPlan,
    components: RunComponents,
    *,
    steps: int | None,
    initial_epoch: int = 0,
    class_weight: Mapping[int, float] | None = None,
    saved: Saved | None = None,
) -> RunSetup:
    """Returns a run that is ready: the state is initialized or restored, and a step has been dry-run on the first batch.

    The plan is completed with what depends on where the run begins. `steps` is the total number of steps, `initial_epoch` the index of the first epoch of
    a new run, and `saved` the checkpoint to resume from.
    """
    task = session.task
    settings = _settings_of(session, source, plan.steps_per_epoch)
    progress = _start_progress(session, source, saved, settings, initial_epoch)
    plan = dataclasses.replace(
        plan,
        end_step=None if steps is None else progress.first_step + steps,
        info={**plan.info, "settings": settings},
        process_start=progress.step,
        # A custom step may compute a gradient, but does not return it.
        keep=plan.keep if task.need_compiled("fit").task.custom_step is None else plan.keep._replace(norm=None),
    )
    _warn_of_unused_processes(session)
    if session.strategy.num_processes > 1:
        check_same_in_all_processes("settings", _settings_to_compare(session, settings, plan, components))
    feed = _make_feed(session, source, class_weight, progress, saved)
    with contextlib.ExitStack() as failed:
        failed.callback(feed.close)  # This ends worker processes of a loader.
        weights = {str(label): float(weight) for label, weight in (class_weight or {}).items()}
        with components.spent.on("data"):
            fed = _first_batch(session, feed, class_weight, plan, progress, components.callbacks, saved)
        compiled = {**task.described, **({"class_weight": weights} if weights else {})}
        if fed is not None and fed.real is not None:  # Batches are passed whole.
            compiled["whole_batches_per_update"] = source.together
        plan = dataclasses.replace(plan, info={**plan.info, "compiled": compiled})
        run = _prepare_state(session, feed, fed, plan, progress, components, saved)
        if saved is not None and fed is not None:  # Without a first batch, no step follows.
            warn_of_changes(saved, run.plan.info["compiled"], to_resume=True)
        failed.pop_all()
    return run


def _prepare_state(
    session: Session, feed: Feed, fed: FedBatch | None, plan: RunPlan, progress: Progress, components: RunComponents, saved: Saved | None
) -> RunSetup:
    """Builds or restores the state, begins to compile, and dry-runs a step on the first batch, `fed`; `None` if the resumed run has had all batches."""
    program, callbacks = session.task.need_compiled("fit"), components.callbacks
    if saved is not None:
        with components.spent.on("loading"):
            session.restore(saved, None if fed is None else fed.batch, RestoreOptions(is_resume=True))
    steps = _steps_per_call(session, program, fed, saved)
    if session.state.live is None and fed is not None:
        if not program.is_eager:
            # The step is compiled while the state is initialized.
            program.preparation.train(session.state.begin_build(fed.batch), fed.batch, steps_per_call=steps or 1, keep=plan.keep)
        session.state.build(fed.batch)
    live = session.state.need("fit")
    # If an optimizer labels parameters, only the state shows whether it contains a schedule-free one.
    check_restores_best(callbacks, program.eval_params.function_of(live.borrow()))
    eval_params = program.eval_params.name_of(live.borrow())
    compiled = {**plan.info["compiled"], **({} if eval_params is None else {"eval_params": eval_params})}
    _check_saves_best(callbacks, live.borrow())
    resumed, during_first_step = Resumed(), None
    if fed is not None:
        if callbacks.copies_state:
            Snapshots(live, components.saver).reserve()
        _dry_run(session, feed, fed.batch, plan.keep, steps_per_call=steps or 1)
        # The check traces the module, so it runs while the device computes the first step.
        during_first_step = functools.partial(check_activations, program, shapes_in(live.borrow()), fed.batch)
        resumed = Resumed() if saved is None else _resumed_values(session, program, saved)
    if session.strategy.num_processes > 1:
        check_same_in_all_processes("initial states", {"the state": fingerprint_of(live.borrow())})
    if steps is None:
        assert fed is not None
        steps = _measure_steps_per_call(session, program, fed, plan.keep)
    for evaluate in components.validation.loops:
        evaluate.prepare(live.borrow())
    # A custom step may log other keys than an evaluation, whose keys are unknown before its first batch.
    knows_evaluated = program.dry_run.has_evaluated or program.task.custom_step is None
    evaluated = list(program.dry_run.eval_kinds) if knows_evaluated else []
    _check_log_keys(list(program.dry_run.kinds), evaluated, [loop.name for loop in components.validation.loops])
    session.state.last_progress = progress
    # Without jit each call has one step. The choice is saved for a resume that is compiled.
    info = {**plan.info, "compiled": compiled, "run_id": session.run_id, "steps_per_call": steps}
    if session.task.steps_per_call not in (None, steps):
        info["max_steps_per_call"] = session.task.steps_per_call
    plan = dataclasses.replace(plan, info=info, steps_per_call=1 if program.is_eager else steps)
    return RunSetup(session, program, live, feed, plan, progress, components, resumed, during_first_step)


def find_saved(session: Session, resume: Any, stores: Sequence[CheckpointStore]) -> Saved | None:
    """Returns the checkpoint to resume from, the same in all processes; `None` to begin a new run."""
    saved = read_collectively(lambda together: find_resume(resume, stores, together), num_processes=session.strategy.num_processes)
    if saved is None and resume == "auto" and not stores[0].has_saved():
        # A run that was killed before its first checkpoint begins again under the same ID, so that it keeps its other directories.
        session.run_id = stores[0].run_id() or session.run_id
    if session.strategy.num_processes > 1:
        session.run_id = exchange(session.run_id, "the run ID")[0]
    return saved


@contextlib.contextmanager
def training_copy(
    session: Session, source: Source, class_weight: Mapping[int, float] | None, what: str, saved: Saved | None = None, *, keep: Keep = NOTHING
) -> Iterator[tuple[Session, Feed]]:
    """Yields a copy of a session, with its state initialized or restored, and its batches. The session and the global random generators do not change.

    Without `saved`, the copy begins with the session's state and the first pass over the data, which must be able to restart. `what` names the operation in
    errors.
    """
    if not source.can_restart:
        raise ConfigError(f"{what} cannot take an iterator, because it would consume your data. Pass a function that returns a new iterator: `lambda: ...`.")
    copy = session.copy() if saved is None else session.copy_without_state(session.seed)
    settings = {name: value for name, value in _settings_of(copy, source, None).items() if name != "steps_per_epoch"}
    progress = _start_progress(copy, source, saved, settings)
    with undisturbed(), contextlib.closing(_make_feed(copy, source, class_weight, progress, saved)) as feed:
        fed = feed.next() or feed.next()
        if fed is None:
            raise DataError(f"{what}: the data yields no batches. Check that it is not empty.")
        feed.push_back()
        if saved is not None:
            copy.restore(saved, fed.batch, RestoreOptions(is_resume=True))
            del saved  # Frees its memory.
        elif copy.state.live is None:
            copy.state.build(fed.batch)
        _dry_run(copy, feed, fed.batch, keep)
        check_activations(copy.task.need_compiled(what), copy.state.need(what).borrow(), fed.batch)
        yield copy, feed


# -- settings and position --


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
        progress.position = position_in_shard(progress.position, progress.used, source.shares)
        return progress
    step = 0 if session.state.live is None else session.state.live.step
    position, used = session.next_position(source), session.task.feeder.used(source)
    return Progress(step=step, first_step=step, epoch=initial_epoch, position=position, used=used)


def _settings_to_compare(session: Session, settings: Mapping[str, Any], plan: RunPlan, components: RunComponents) -> dict[str, Any]:
    validation = components.validation
    settings = {
        **settings,
        **session.task.described,
        "steps_per_call": session.task.steps_per_call,
        "steps": plan.end_step,
        "epochs": plan.end_epoch,
        "every": plan.every,
        "validation": [[loop.name for loop in validation.loops], validation.frequency],
        **components.callbacks.settings_to_compare,
    }
    return {name: repr(value) for name, value in settings.items()}


def _warn_of_unused_processes(session: Session) -> None:
    process, taken, count = jax.process_index(), session.strategy.num_processes, jax.process_count()
    if process and taken < count and jax.distributed.is_initialized():
        warn(
            f"This run uses devices of {taken} of {count} processes, and process {process} writes no files, because only process 0 does. To run processes "
            "independently, start them without parallel.initialize()."
        )


def check_restores_best(callbacks: CallbackList, eval_params: Any) -> None:
    """Raises `ConfigError` if `eval_params` is given and a callback has `restore_best=True`.

    Such callbacks restore only parameters, but `eval_params` also needs the optimizer state.
    """
    names = [type(callback).__name__ for callback in callbacks if getattr(callback, "restore_best", False)]
    if names and eval_params is not None:
        what = "a schedule-free optimizer" if eval_params is schedule_free_eval_params else "compile(eval_params=...)"
        raise ConfigError(
            f"{names[0]}(restore_best=True) cannot be combined with {what}, because it does not restore the optimizer state, which "
            "eval_params needs. Save the best checkpoint instead: pass BestCheckpoint(directory), and call trainer.restore(directory) after fit."
        )


def _check_saves_best(callbacks: CallbackList, state: TrainState) -> None:
    """Raises `CallbackError` if checkpoints would contain the best parameters of an `EarlyStopping`, but cannot, because they are split between processes."""
    restores = any(isinstance(callback, EarlyStopping) and callback.restore_best for callback in callbacks)
    saves = any(isinstance(callback, StoreCallback) for callback in callbacks)
    if restores and saves and spans_processes((state.params, state.model_state, state.ema_params)):
        raise CallbackError(
            "EarlyStopping(restore_best=True) cannot be combined with callbacks that save the run if the parameters are split between processes, because "
            "checkpoints cannot contain a second copy of them. Instead of restore_best, pass BestCheckpoint(directory, restore_best=True)."
        )


def _check_log_keys(keys: list[str], evaluated: list[str], sets: list[str]) -> None:
    """Raises `ConfigError` if a training metric is named `epoch`, or if two metrics of training or of validation `sets` have the same log key.

    `keys` are those of training, and `evaluated` those of an evaluation.
    """
    if "epoch" in keys:
        raise ConfigError("A metric cannot have the name 'epoch', which is the log key of the epoch number. Rename the metric.")
    clashes = [key for key in keys for name in sets if key.startswith(f"{name}_") and key.removeprefix(f"{name}_") in keys]
    if clashes:
        raise ConfigError(f"The training metrics {clashes} have log keys of validation metrics. Rename them, or rename the validation set.")
    counts = collections.Counter(flat_name(name, key) for name in sets for key in evaluated)
    if shared := [key for key, count in counts.items() if count > 1]:
        raise ConfigError(f"Several validation sets share the log keys {shared}. Rename one of the sets.")


# -- the first batch --


def _make_feed(session: Session, source: Source, class_weight: Mapping[int, float] | None, progress: Progress, saved: Saved | None) -> Feed:
    size = None if saved is None else saved.metadata.get("full_batch_size")
    feed = session.task.feeder.train(source, class_weight, progress.position, used=progress.used, size=size)
    if saved is not None:
        state = from_saved(saved.run.get("data", {}), root="run/data", key_impls=saved.metadata["key_impls"])
        feed.load_state_dict(state, saved.run.get("num_started"))
    return feed


def _first_batch(
    session: Session, feed: Feed, class_weight: Mapping[int, float] | None, plan: RunPlan, progress: Progress, callbacks: CallbackList, saved: Saved | None
) -> FedBatch | None:
    """Returns the first batch, which remains in the feed; `None` if the resumed run has had all batches."""
    source, fed = feed.source, None
    # The batches of the first call are read into one block, unless it would be larger than the blocks of single steps.
    setting = session.task.steps_per_call or 1
    ahead = setting if 1 < setting <= source.batches_at_once else None
    is_inside = progress.epoch_is_open and not progress.epoch_is_over
    if is_inside:
        fed = feed.next(ahead)
        if fed is None and plan.steps_per_epoch is None:
            # The run was interrupted after the last batch of an epoch, before it was known to be the last.
            progress.epoch_is_over = True
            progress.begin_pass(feed.position.passes)
    may_change = progress.epoch_is_over or not (progress.epoch_is_open or callbacks.may_prefetch)
    # Reading the data twice would change data that draws random numbers. So it is read twice only in a resumed run, or if its order depends on the epoch.
    if may_change and (source.takes_epoch or saved is not None) and feed.can_reread:
        # Callbacks may change the data in `on_epoch_end` or `on_epoch_begin`, so the run reads its first batch after that. This one is only for the shapes.
        other = session.task.feeder.train(source, class_weight, Position(progress.position.passes))
        with undisturbed(), source.undisturbed(), contextlib.closing(other):
            fed = other.next()
        feed.catch_up()
    else:
        fed = fed if is_inside else feed.next(ahead)
        if fed is None and source.can_restart:
            fed = feed.next(ahead)
        if fed is not None:
            feed.push_back()
    if fed is None and saved is None:
        exhausted = "It is an exhausted iterator. Pass a function that returns a new one: `lambda: ...`."
        raise DataError(f"The data yields no batches. {'Check that it is not empty.' if source.can_restart else exhausted}")
    return fed


# -- the first step --


def _dry_run(session: Session, feed: Feed, batch: Batch, keep: Keep, *, steps_per_call: int = 1) -> None:
    session.state.check_batch(batch)
    program, state = session.task.need_compiled("fit"), session.state.need("fit").borrow()
    program.preparation.train(state, batch, steps_per_call=steps_per_call, keep=keep)
    check_places(program, state)
    check_in_memory(program, feed.source, state, batch, pad=session.task.pad, train=True, batcher=feed.batcher)


def _resumed_values(session: Session, program: Program, saved: Saved) -> Resumed:
    """Returns the values of the last step and of the open epoch of a saved run."""
    traced, run = program.dry_run.traced_step(train=True), saved.run
    resumed = Resumed()
    if "values" in run and run["values"].size == traced.num_values:
        resumed = Resumed(StepValues(traced.places, session.strategy.put(run["values"])))
    if "sums" not in run:
        return resumed
    sums = program.pack_sums(fit_to(traced.empty, run["sums"], saved, "run/sums"), train=True)
    collected, rows = program.collector(train=True), run.get("rows", {})
    if collected is not None:
        collected.load_state_dict(rows)
    elif rows:
        raise RestoreError(
            f"The checkpoint has collected rows of the metrics {sorted(rows)}, but no compiled metric collects rows. "
            "Compile with the metrics of the checkpoint."
        )
    return dataclasses.replace(resumed, sums=sums, collected=collected, validated=run.get("validated", {}))


def _steps_per_call(session: Session, program: Program, fed: FedBatch | None, saved: Saved | None) -> int | None:
    """Returns the number of steps of a call: as in the run to resume if the setting is the same or `"auto"`, else at most the setting.

    Returns `None` if it must be measured.
    """
    task = session.task
    task.choice, setting, before = None, task.steps_per_call, None
    if saved is not None:
        before = int(saved.metadata.get("steps_per_call", 1))
        if fed is None or setting in (None, int(saved.metadata.get("max_steps_per_call", before))):
            return before
    assert fed is not None
    steps = program.limit_steps_per_call(setting, fed.batch)
    reason = f"a batch has {fed.batch.nbytes / 2**20:.1f} MB, and the batches of a call at most 64 MB."
    if setting is None:
        if steps > 1 and not program.is_eager:
            return None
        task.choice = None if program.is_eager else f"steps_per_call='auto' chose 1: {reason}"
        return 1
    if steps != setting and not program.is_eager:
        task.choice = f"steps_per_call={setting} is limited to {steps}: {reason}"
    if before not in (None, steps):
        warn(
            f"The run used steps_per_call={before} and resumes with steps_per_call={steps}, so its results may differ by rounding. "
            f"To resume bit for bit, pass compile(steps_per_call={before})."
        )
    return steps


def _measure_steps_per_call(session: Session, program: Program, fed: FedBatch, keep: Keep) -> int:
    """Returns the number of steps of a call with which a step takes less time."""
    size = program.limit_steps_per_call(None, fed.batch)
    single, grouped = program.time_steps(session.state.need("fit").borrow(), fed, size, keep)
    if session.strategy.num_processes > 1:
        single, grouped = exchange([single, grouped], "the choice of steps_per_call")[0]
    chosen = size if grouped < single * _MAX_TIME_RATIO else 1
    times = f"{size} steps per call took {grouped * 1e6:.0f} us per step, single steps {single * 1e6:.0f} us"
    session.task.choice = f"steps_per_call='auto' chose {chosen}: {times}."
    return chosen
