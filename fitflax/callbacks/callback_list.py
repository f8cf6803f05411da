"""The callbacks of a call, in the order in which they are called.

The order of an event is: callbacks that change metrics or weights, then the others as listed, then those that decide from a monitored value, then those
that record, and only when everything up to this step is on disk those that save the run.
"""

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from fitflax.callbacks.base import HOOKS, Callback, Phase, TrainerView, check_trigger, overrides
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.saving import Saver
from fitflax.errors import CallbackError, did_you_mean, warn
from fitflax.logs import Logs
from fitflax.steps.task import Keep
from fitflax.time_spent import TimeSpent
from fitflax.triggers import Moment, Schedule

__all__ = ["CallbackList"]

# Keras's other names of hooks.
_ALIASES = {"on_batch_begin": "on_train_batch_begin", "on_batch_end": "on_train_batch_end"}
# Hooks whose time is the callbacks' own; in those of batches they mostly wait for steps.
_TIMED = {"on_train_begin", "on_epoch_begin", "on_epoch_end"}


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
        self._spent = TimeSpent()
        self._leaves_at_once: Callable[[], bool] = lambda: False

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

    @property
    def saves(self) -> bool:
        """Whether any callback saves the run."""
        return any(callback.phase == Phase.SAVE for callback in self._all)

    def bind(
        self,
        trainer: TrainerView,
        params: Mapping[str, Any],
        *,
        spent: TimeSpent | None = None,
        leaves_at_once: Callable[[], bool] = lambda: False,
    ) -> None:
        """Tells all callbacks who runs, and what of the call is known.

        Args:
            trainer: Who runs.
            params: What is known.
            spent: Where the time of the call goes.
            leaves_at_once: Returns whether a second Ctrl-C came, after which nothing more is saved.
        """
        self.params, self._spent, self._leaves_at_once = dict(params), spent or TimeSpent(), leaves_at_once
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
            self.close()
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
            is_due = not checkpoint.run.point.is_repeat and (callback.every is None or id(callback) in due)
            return overrides(callback, "on_checkpoint") and (is_due or callback.wants(checkpoint))

        is_synced = is_saved = False
        failure: BaseException | None = None
        checkpoint.run.savers = [callback.saves_as for callback in self._here if callback.saves_as is not None and wants(callback)]
        for callback in self._here:
            if not wants(callback):
                continue
            try:
                if callback.phase >= Phase.SAVE_BEST and not is_synced:
                    is_synced = True
                    with self._spent.on("saving"):
                        self.sync()
            except Exception as error:  # noqa: BLE001 (raised below, when the run has been saved)
                failure = failure or error
                checkpoint.run.point = dataclasses.replace(checkpoint.run.point, is_last=True, is_rescue=True)
            try:
                with self._spent.on("saving" if callback.phase >= Phase.SAVE_BEST else "callbacks"):
                    callback.on_checkpoint(checkpoint)
            except BaseException as error:  # noqa: BLE001 (raised below, when everybody has had the checkpoint)
                failure = failure or error
                checkpoint.run.point = dataclasses.replace(checkpoint.run.point, is_last=True, is_rescue=True)
                if self._leaves_at_once():
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

    def close(self) -> None:
        """Closes all callbacks; an error in one does not keep the others from it."""
        with contextlib.ExitStack() as stack:
            for callback in reversed(self._here):
                stack.callback(callback.close)

    def finish(self, logs: Mapping[str, Any]) -> None:
        """Calls `on_train_end` of all callbacks and closes them; an error in one does not keep the others from it."""
        with contextlib.ExitStack() as stack:
            # A stack runs backwards.
            stack.callback(self.close)
            for callback in reversed(self._here):
                stack.callback(self._timed, callback.on_train_end, logs)

    def _timed(self, method: Callable[..., None], *arguments: Any) -> None:
        with self._spent.on("callbacks"):
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
            warn(f"{name}.{hook} is no hook and is never called by fitflax.{meant}")
