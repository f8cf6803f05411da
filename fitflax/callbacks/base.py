"""The base class of callbacks, and the list that calls them in order.

Hooks have Keras's names and are called positionally. The order of an event is: callbacks that change metrics or weights, then the others as listed, then
those that decide from a monitored value, then those that record, and only when everything up to this step is on disk those that save the run.
"""

import contextlib
import dataclasses
import enum
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import jax

from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.saving import Saver
from fitflax.errors import CallbackError, FitflaxWarning, did_you_mean
from fitflax.logs import Logs
from fitflax.state import TrainState
from fitflax.step import Keep
from fitflax.time_spent import TimeSpent
from fitflax.triggers import Moment, Schedule, Trigger

__all__ = ["Callback", "Phase", "PlainRun", "TrainerView"]

HOOKS = (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_end",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_predict_begin",
    "on_predict_end",
    "on_predict_batch_begin",
    "on_predict_batch_end",
    "on_checkpoint",
)


class TrainerView(Protocol):
    """What callbacks may use of a trainer.

    >>> TrainerView.__name__
    'TrainerView'
    """

    learning_rate: Any
    learning_rates: Any
    stop_training: bool

    @property
    def state(self) -> TrainState:
        """The newest state, which stays valid after later steps."""

    @property
    def step(self) -> int:
        """Finished updates."""

    @property
    def model(self) -> Any:
        """The module, as the user gave it."""

    @property
    def stop_reason(self) -> str | None:
        """Why training stopped or is to stop."""

    def stop(self, reason: str) -> None:
        """Asks training to stop after the present step."""

    def replace_state(self, state: TrainState) -> None:
        """Puts another state in place of the newest one."""

    @property
    def evaluate(self) -> Callable[..., dict[str, Any]]:
        """`Trainer.evaluate`; training goes on as it would have."""

    @property
    def predict(self) -> Callable[..., Any]:
        """`Trainer.predict`; training goes on as it would have."""


class Phase(enum.IntEnum):
    """When a callback is called within an event, by the kind of its work.

    >>> Phase.CHANGE < Phase.USER < Phase.DECIDE < Phase.RECORD < Phase.SAVE_BEST < Phase.SAVE
    True
    """

    CHANGE = 0
    USER = 1
    DECIDE = 2
    RECORD = 3
    SAVE_BEST = 4
    SAVE = 5


class Callback:
    """Something to do at certain points of a run. Subclass it and override hooks; a hook nobody overrides costs nothing.

    `logs` is never `None`: it is one mapping per event, shared by all callbacks, and its values come to the host only when read. In batch hooks they are
    running values of the epoch. Subclasses need not call `super().__init__()`.

    Attributes:
        trainer: The trainer that runs; see `TrainerView`.
        params: What is known of the running call: `epochs`, `steps` (of an epoch), `test_steps`, `log_every`, `validation_sets`, `num_examples` (of a pass),
            `hyperparameters`, `note` (a sentence for whoever watches), `time_spent` (its `seconds` by what they went to); `None` for what is not known.
        every: When `on_checkpoint` is due; `None` for each checkpoint that the loop makes.
        phase: When it is called within an event.
        needs_trainer: Whether it can do nothing with a checkpoint alone.
        may_skip_batches: Whether its hooks of batches may be called for some of them only, some twenty times a second. Batches between which nobody must see
            anything take the loop less time, and several small ones of an evaluation or prediction are computed in one call.
        main_process_only: Whether it does nothing in processes but the first, as whoever writes or shows something.
        writes_files: Whether it writes files, which `fit(fast_dev_run=...)` does without.
        needs_gradients_norm: Whether it reads `checkpoint.gradients_norm`, without which some steps take less time; by default wherever it has `on_checkpoint`.
        needs_grads: Whether it reads `checkpoint.grads`; the run then keeps the gradient of each step, which takes as much memory as the parameters.
        needs_sown: Collections of sown values that it reads from `checkpoint.sown`.
        needs_culprit: Whether it reads what first was not finite, for which each step looks at all gradients and parameters.

    >>> class PrintLoss(Callback):
    ...     def on_epoch_end(self, epoch, logs):
    ...         print(epoch, logs["loss"])
    >>> PrintLoss().on_epoch_end(0, {"loss": 0.5})
    0 0.5
    """

    trainer: TrainerView
    params: Mapping[str, Any] = {}
    every: Trigger | None = None
    phase: ClassVar[Phase] = Phase.USER
    needs_trainer: ClassVar[bool] = False
    main_process_only: ClassVar[bool] = False
    writes_files: ClassVar[bool] = False
    needs_gradients_norm: bool | None = None
    needs_grads: bool = False
    needs_sown: str | tuple[str, ...] = ()
    needs_culprit: bool = False
    may_skip_batches: bool = False
    _own_schedule: Schedule | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is pickled: all but the trainer, and what belongs to its call."""
        own = {name: value for name, value in vars(self).items() if name not in ("trainer", "params", "_own_schedule")}
        return {name: None if isinstance(value, Saver) else value for name, value in own.items()}

    if not TYPE_CHECKING:  # Or every name would be an attribute.

        def __getattr__(self, name):
            """Says where to find what Keras's callbacks have."""
            if hasattr(type(self), name):  # A property that failed: its own error says more.
                return object.__getattribute__(self, name)
            hints = {"model": " What runs it is self.trainer: self.trainer.model, self.trainer.state.", "trainer": " It is there from the first hook on."}
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.{hints.get(name, '')}", name=name, obj=self)

    # -- hooks --

    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        """Called once before the first step; resets what an earlier run left. `logs` is empty."""

    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        """Called once at the end, whatever ended the run. `logs` are those of the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Called before an epoch's first batch, not when a resume enters an epoch in its middle. `logs` is empty."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Called after an epoch's last batch and its validation."""

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Called before a step. `batch` counts from 0 in each epoch; `logs` is empty."""

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after a step was dispatched; reading `logs` waits for it."""

    def on_test_begin(self, logs: Mapping[str, Any]) -> None:
        """Called before an evaluation, also one that validates."""

    def on_test_end(self, logs: Logs) -> None:
        """Called after an evaluation, with its results."""

    def on_test_batch_begin(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Called before a batch of an evaluation."""

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after a batch of an evaluation was dispatched."""

    def on_predict_begin(self, logs: Mapping[str, Any]) -> None:
        """Called before a prediction."""

    def on_predict_end(self, logs: Mapping[str, Any]) -> None:
        """Called after a prediction."""

    def on_predict_batch_begin(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Called before a batch of a prediction."""

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Called after a batch of a prediction; `logs["outputs"]` are its outputs, NumPy."""

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Called with a checkpoint when `every` is due."""

    # -- a callback as a plain function --

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Acts on `checkpoint` if `every` is due, and returns it; for loops without a trainer.

        Raises:
            CallbackError: This callback consumes no checkpoints, or needs a trainer.
        """
        self.check_alone()
        if self.main_process_only and jax.process_index():
            return checkpoint
        if self.every is not None:
            moment = moment_of(checkpoint)
            if self._own_schedule is None:
                self._own_schedule = Schedule(self.every, moment.seconds)
            if not self._own_schedule.due(moment) and not self.wants(checkpoint):
                return checkpoint
        self.on_checkpoint(checkpoint)
        return checkpoint

    def check_alone(self) -> None:
        """Checks that this callback can be called with a checkpoint.

        Raises:
            CallbackError: It consumes no checkpoints, or needs a trainer.
        """
        if not overrides(self, "on_checkpoint") or (self.needs_trainer and not hasattr(self, "trainer")):
            raise CallbackError(f"{type(self).__name__} works in fit(callbacks=[...]) only: it can do nothing with a checkpoint alone.")

    def wants(self, checkpoint: Checkpoint) -> bool:
        """Returns whether this callback wants `checkpoint` although `every` is not due, because no other follows."""
        return False

    # -- state --

    @property
    def state_key(self) -> str:
        """Under which key `state_dict` is saved: the class and the arguments that tell two instances apart."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resume needs: arrays, numbers, strings, `None`, lists and dicts of them. Empty for nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` returned; called after `on_train_begin` on a resume."""

    # -- files --

    def enter_run(self, saver: Saver) -> None:
        """Locks what only one run may use at a time, before anything of it is read; `saver.close()` gives it back."""

    def open_run(self, run_id: str, step: int) -> None:
        """Prepares files before a run's first step.

        Args:
            run_id: Which run.
            step: The step that it goes on from; what files hold beyond it is dropped.
        """

    def on_closing(self, checkpoint: Checkpoint, epoch: int, logs: Mapping[str, Any]) -> None:
        """Called when a run ended inside an epoch, after that epoch was closed over the part seen.

        `checkpoint` is that of the last step again, now with the validation's values; `logs` is the row of the epoch. A resume that goes on knows nothing
        of this event.
        """

    @property
    def saves_as(self) -> tuple[Path, str] | None:
        """Where this callback saves whatever checkpoint it is given, and under which name it wants it there."""
        return None

    def run_was_saved(self) -> None:
        """Called when a checkpoint that the run can be resumed from, with the states of all callbacks, is complete."""

    def drop_closing(self) -> None:
        """Forgets what an earlier process did when it closed an epoch in its middle, on a resume that goes on."""

    def load_closing(self, step: int, epoch: int, logs: Logs) -> None:
        """Takes what an earlier process logged when it closed the epoch, on a resume that has nothing left to do."""

    def sync(self) -> None:
        """Puts everything up to now on disk; called before the checkpoint of this step is completed."""

    def close(self) -> None:
        """Waits for writers and closes files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class PlainRun:
    """Which run a callback serves as a plain function, and how far that is.

    Attributes:
        step: The step of the last checkpoint.
    """

    def __init__(self) -> None:
        self._run: tuple[str, int] | None = None
        self.step = 0

    def goes_on(self, checkpoint: Checkpoint) -> bool:
        """Notes a checkpoint; returns whether it follows the last one in the same run, so that nothing of what was written lies beyond it."""
        run = checkpoint.run_id, checkpoint.point.process_start
        follows = run == self._run and checkpoint.step >= self.step
        self._run, self.step = run, checkpoint.step
        return follows


def moment_of(checkpoint: Checkpoint) -> Moment:
    """Returns the moment of a checkpoint, for triggers."""
    return Moment(
        step=checkpoint.step,
        start_step=checkpoint.point.process_start,
        epochs_done=checkpoint.epoch + checkpoint.point.epoch_ends,
        epoch_ends=checkpoint.point.epoch_ends,
        seconds=checkpoint.point.seconds,
    )


class CallbackList:
    """Callbacks in the order in which they are called.

    Args:
        callbacks: In the user's order.

    Raises:
        CallbackError: Something that is no callback, the same one twice, or two whose state would be saved under one key.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        given = list(callbacks)
        for callback in given:
            _check(callback)
        for place, callback in enumerate(given):
            if any(callback is other for other in given[:place]):
                raise CallbackError(f"A callback is given twice: the same {type(callback).__name__} is in the list more than once.")
        with_state = [callback.state_key for callback in given if type(callback).state_dict is not Callback.state_dict]
        for key in with_state:
            if with_state.count(key) > 1:
                raise _same_key(key)
        self._all = sorted(given, key=lambda callback: callback.phase)
        # Triggers are looked at by all processes alike, because steps are made together up to where one fires.
        self._here = [callback for callback in self._all if not (callback.main_process_only and jax.process_index())]
        self._hooks: dict[str, list[Callable[..., None]]] = {
            name: [getattr(callback, name) for callback in self._here if overrides(callback, name)] for name in HOOKS
        }
        self._schedules: list[tuple[Callback, Schedule]] = []
        # One dict for all of them; an evaluation notes in it how long it will be.
        self.params: dict[str, Any] = {}
        # Where the time of the call goes.
        self.spent = TimeSpent()
        # Whether a second Ctrl-C came, after which nothing more is saved.
        self.leaves_at_once: Callable[[], bool] = lambda: False

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._here)

    def wants(self, hook: str) -> bool:
        """Returns whether any callback overrides `hook`."""
        return bool(self._hooks[hook])

    def wants_every(self, *hooks: str) -> bool:
        """Returns whether one of these hooks must be called for each batch."""
        return any(not callback.may_skip_batches and overrides(callback, hook) for callback in self._all for hook in hooks)

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls `hook` of all callbacks that override it."""
        if hook not in _TIMED:
            for method in self._hooks[hook]:
                method(*arguments)
            return
        logs = arguments[-1] if self._hooks[hook] else None
        if isinstance(logs, Logs) and logs.source is not None:
            logs.source.wait()  # Steps that are still being made are no time of theirs.
        for method in self._hooks[hook]:
            self._timed(method, *arguments)

    @property
    def keep(self) -> Keep:
        """What of a step callbacks read besides its values."""
        sown = {name: None for callback in self._all for name in ((callback.needs_sown,) if isinstance(callback.needs_sown, str) else callback.needs_sown)}
        norms = (overrides(callback, "on_checkpoint") if callback.needs_gradients_norm is None else callback.needs_gradients_norm for callback in self._all)
        grads, culprit = (any(getattr(callback, name) for callback in self._all) for name in ("needs_grads", "needs_culprit"))
        return Keep(norm=any(norms), grads=grads, sown=tuple(sown), culprit=culprit)

    @property
    def alike(self) -> dict[str, Any]:
        """What must be the same in all processes: what steps keep for callbacks, when they are due, and where checkpoints go."""
        due = [f"{type(each).__name__} {each.every}" for each in self._all if each.every is not None]
        places = [str(each.saves_as[0]) for each in self._all if each.saves_as is not None]
        return {"what callbacks read of a step": self.keep, "callbacks that are due": due, "checkpoints' directories": places}

    def bind(self, trainer: TrainerView, params: Mapping[str, Any]) -> None:
        """Tells all callbacks who runs, and what of the call is known."""
        self.params = dict(params)
        for callback in self._all:
            callback.trainer = trainer
            callback.params = self.params

    def enter_run(self, saver: Saver) -> None:
        """Has all callbacks lock their directories."""
        for callback in self._here:
            callback.enter_run(saver)

    def open_run(self, run_id: str, step: int) -> None:
        """Has all callbacks prepare their files; if one cannot, all are closed."""
        try:
            for callback in self._here:
                callback.open_run(run_id, step)
        except BaseException:
            for callback in self._here:
                callback.close()
            raise

    def start_schedules(self, seconds: float) -> None:
        """Starts the triggers of all callbacks that have one."""
        self._schedules = [(callback, Schedule(callback.every, seconds)) for callback in self._all if callback.every is not None]

    @property
    def has_schedules(self) -> bool:
        """Whether any callback has a trigger."""
        return bool(self._schedules)

    def next_step(self, step: int, start_step: int) -> int | None:
        """Returns the first step after `step` at which a callback's trigger may fire; `None` where only time or an epoch's end can make one fire."""
        steps = (schedule.next_step(step, start_step) for _, schedule in self._schedules)
        return min((one for one in steps if one is not None), default=None)

    @property
    def next_seconds(self) -> float:
        """When a callback's trigger fires by the clock; infinite if none does."""
        return min((schedule.next_seconds for _, schedule in self._schedules), default=math.inf)

    def due(self, moment: Moment) -> set[int]:
        """Returns the identities of the callbacks whose trigger fires."""
        return {id(callback) for callback, schedule in self._schedules if schedule.due(moment)}

    def on_checkpoint(self, checkpoint: Checkpoint, due: set[int]) -> None:
        """Hands a checkpoint to those who want it; everything else is on disk before the first of them saves it.

        If one fails, the others still get it, and the run is saved, before the error is raised.
        """

        def wants(callback: Callback) -> bool:
            is_due = not checkpoint.point.is_repeat and (callback.every is None or id(callback) in due)
            return overrides(callback, "on_checkpoint") and (is_due or callback.wants(checkpoint))

        is_synced = is_saved = False
        failure: BaseException | None = None
        checkpoint.savers = [callback.saves_as for callback in self._here if callback.saves_as is not None and wants(callback)]
        for callback in self._here:
            if not wants(callback):
                continue
            try:
                if callback.phase >= Phase.SAVE_BEST and not is_synced:
                    is_synced = True
                    with self.spent.on("saving"):
                        self.sync()
            except Exception as error:  # noqa: BLE001 (raised below, when the run has been saved)
                failure = failure or error
                checkpoint.point = dataclasses.replace(checkpoint.point, is_last=True, is_rescue=True)
            try:
                with self.spent.on("saving" if callback.phase >= Phase.SAVE_BEST else "callbacks"):
                    callback.on_checkpoint(checkpoint)
            except BaseException as error:  # noqa: BLE001 (raised below, when everybody has had the checkpoint)
                failure = failure or error
                checkpoint.point = dataclasses.replace(checkpoint.point, is_last=True, is_rescue=True)
                if self.leaves_at_once():
                    break
            else:
                is_saved |= callback.phase == Phase.SAVE
        if is_saved:
            for callback in self._here:
                callback.run_was_saved()
        if failure is not None:
            raise failure

    def on_closing(self, checkpoint: Checkpoint, epoch: int, logs: Mapping[str, Any]) -> None:
        """Calls `on_closing` of all callbacks."""
        self.sync()
        for callback in self._here:
            callback.on_closing(checkpoint, epoch, logs)

    def sync(self) -> None:
        """Has everything up to now put on disk; an error in one does not keep the others from it."""
        with contextlib.ExitStack() as stack:
            for callback in reversed(self._here):
                stack.callback(callback.sync)

    def finish(self, logs: Mapping[str, Any]) -> None:
        """Calls `on_train_end` of all callbacks and closes them; an error in one does not keep the others from it."""
        with contextlib.ExitStack() as stack:
            # A stack runs backwards.
            for callback in reversed(self._here):
                stack.callback(callback.close)
            for callback in reversed(self._here):
                stack.callback(self._timed, callback.on_train_end, logs)

    def _timed(self, method: Callable[..., None], *arguments: Any) -> None:
        with self.spent.on("callbacks"):
            method(*arguments)

    def state_dict(self, seconds: float) -> dict[str, Any]:
        """Returns the states of all callbacks and of their triggers, by key.

        Raises:
            CallbackError: Two callbacks with state have the same key.
        """
        states: dict[str, Any] = {}
        for callback in self._here:
            state = callback.state_dict()
            if not state:
                continue
            if callback.state_key in states:
                raise _same_key(callback.state_key)
            states[callback.state_key] = state
        schedules = [schedule.state_dict(seconds)["since"] for _, schedule in self._schedules]
        return {"callbacks": states, "schedules": schedules}

    def load_state_dict(self, saved: Mapping[str, Any], seconds: float) -> tuple[list[str], list[str]]:
        """Gives every callback back its state; returns the keys of callbacks that found none, and of states that no callback wants."""
        states = dict(saved.get("callbacks", {}))
        new = []
        for callback in self._all:
            if callback.main_process_only and jax.process_index():
                states.pop(callback.state_key, None)
            elif callback.state_key in states:
                callback.load_state_dict(states.pop(callback.state_key))
            elif callback.state_dict():
                new.append(callback.state_key)
        schedules = saved.get("schedules", [])
        if len(schedules) == len(self._schedules):
            for (_, schedule), since in zip(self._schedules, schedules, strict=True):
                schedule.load_state_dict({"since": since}, seconds)
        return new, sorted(states)


def _same_key(key: str) -> CallbackError:
    return CallbackError(
        f"Two callbacks would save their state under the key {key!r}. What stands there tells them apart, of a path its last part, so "
        "that a run's directory can be moved. Give them other names or arguments, or override state_key in one."
    )


def overrides(callback: Callback, hook: str) -> bool:
    """Returns whether `callback` does anything in `hook`."""
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(Callback, hook)


# Keras's other names of hooks.
_ALIASES = {"on_batch_begin": "on_train_batch_begin", "on_batch_end": "on_train_batch_end"}
# Hooks whose time is the callbacks' own; in those of batches they mostly wait for steps.
_TIMED = {"on_train_begin", "on_epoch_begin", "on_epoch_end"}


def _check(callback: Any) -> None:
    if isinstance(callback, type) and issubclass(callback, Callback):
        raise CallbackError(f"callbacks takes instances. Received: the class {callback.__name__}; call it: {callback.__name__}(...).")
    if not isinstance(callback, Callback):
        hint = " Wrap a function in LambdaCallback." if callable(callback) else ""
        raise CallbackError(f"callbacks takes instances of fitflax.callbacks.Callback. Received: a {type(callback).__name__}.{hint}")
    name = type(callback).__name__
    check_trigger(name, callback.every)
    for hook in HOOKS:
        arguments = list(inspect.signature(getattr(Callback, hook)).parameters)[1:]
        if overrides(callback, hook):
            try:
                inspect.signature(getattr(callback, hook)).bind(*arguments)
            except TypeError as error:
                raise CallbackError(f"{name}.{hook} is called with ({', '.join(arguments)}), but does not take that: {error}.") from error
            except ValueError:
                continue  # A function without a signature, as some of C have.
    for hook in dir(type(callback)):
        if hook.startswith("on_") and not hasattr(Callback, hook):
            meant = f" Did you mean {_ALIASES[hook]!r}?" if hook in _ALIASES else did_you_mean(hook, HOOKS)
            warnings.warn(f"{name}.{hook} is no hook and is never called by fitflax.{meant}", FitflaxWarning, stacklevel=4)


def check_trigger(owner: str, every: Any) -> None:
    """Checks an argument `every`.

    Raises:
        CallbackError: It is neither a trigger nor `None`.
    """
    if every is not None and not isinstance(every, Trigger):
        raise CallbackError(f"{owner}(every=...) takes a trigger, such as fitflax.every(steps=100). Received: {every!r}.")
