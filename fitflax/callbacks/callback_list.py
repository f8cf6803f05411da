"""The order in which callbacks are called: `CallbackList` in `fit`, `evaluate` and `predict`, and `serial` in loops without a trainer.

Each event first calls callbacks that change metrics or parameters, then most others as listed, those that act on a monitored value, and those that record.
Callbacks that save come last, after everything up to this step is on disk.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, overload

import jax

from fitflax.callbacks.base import HOOKS, Callback, Phase, TrainerView, check_trigger, overrides
from fitflax.callbacks.history import History
from fitflax.callbacks.progress_bar import ProgressBar
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.saver import Saver
from fitflax.errors import CallbackError, ConfigError, did_you_mean, warn
from fitflax.logs import TimeSpent
from fitflax.steps.outputs import Keep
from fitflax.storage import absolute
from fitflax.triggers import Moment, Schedule

_ALIASES = {"on_batch_begin": "on_train_batch_begin", "on_batch_end": "on_train_batch_end"}
# Hooks whose time counts as time of callbacks. In batch hooks, callbacks mostly wait for steps.
_TIMED = {"on_train_begin", "on_epoch_begin", "on_epoch_end"}


class CallbackList:
    """Callbacks, sorted by phase."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        in_user_order = list(callbacks)
        for callback in in_user_order:
            _check_callback(callback)
        for index, callback in enumerate(in_user_order):
            if any(callback is other for other in in_user_order[:index]):
                raise CallbackError(f"callbacks contains the same {type(callback).__name__} object twice. Pass each object once.")
        _check_places(in_user_order)
        self._keys = _state_keys(in_user_order)
        self._all = sorted(in_user_order, key=lambda callback: callback.phase)
        # All processes check all triggers, because they have to run the same number of steps until one fires.
        self._active = [callback for callback in self._all if not (callback.main_process_only and jax.process_index())]
        self._hooks = {name: [getattr(callback, name) for callback in self._active if overrides(callback, name)] for name in HOOKS}
        self._schedules: list[tuple[Callback, Schedule]] = []
        # One dict, which all callbacks share. An evaluation adds its number of steps.
        self.params: dict[str, Any] = {}
        self._spent = TimeSpent()
        self._is_closed = False
        self._exits_immediately: Callable[[], bool] = lambda: False

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._active)

    def has_hook(self, hook: str) -> bool:
        """Returns whether any callback overrides `hook`."""
        return bool(self._hooks[hook])

    def needs_every_batch(self, *hooks: str) -> bool:
        """Returns whether any of these hooks must be called for every batch."""
        return any(not callback.may_skip_batches and overrides(callback, hook) for callback in self._all for hook in hooks)

    @property
    def may_prefetch(self) -> bool:
        """Whether the first batch of an epoch may be requested before `on_epoch_begin`; the same in all processes."""
        return all(callback.may_prefetch or not overrides(callback, "on_epoch_begin") for callback in self._all)

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls `hook` of all callbacks that override it."""
        for method in self._hooks[hook]:
            if hook in _TIMED:
                self._timed(method, *arguments)
            else:
                method(*arguments)

    @property
    def keep(self) -> Keep:
        """What steps have to keep for callbacks besides their values."""
        sown = {name: None for callback in self._all for name in ((callback.needs_sown,) if isinstance(callback.needs_sown, str) else callback.needs_sown)}
        norms = (overrides(callback, "on_checkpoint") if callback.needs_gradients_norm is None else callback.needs_gradients_norm for callback in self._all)
        grads, culprit = (any(getattr(callback, name) for callback in self._all) for name in ("needs_grads", "needs_culprit"))
        return Keep(norm=any(norms), grads=grads, sown=tuple(sown), culprit=culprit)

    @property
    def settings_to_compare(self) -> dict[str, Any]:
        """Settings that must be the same in all processes: what steps keep, the triggers of callbacks, and the directories of checkpoints."""
        triggers = [f"{type(each).__name__} {each.every}" for each in self._all if each.every is not None]
        places = [str(each.saves_as[0]) for each in self._all if each.saves_as is not None]
        return {"step values that callbacks read": self.keep, "callback triggers": triggers, "checkpoint directories": places}

    @property
    def saves(self) -> bool:
        """Whether any callback saves the run."""
        return any(callback.phase == Phase.SAVE and callback.writes_files for callback in self._all)  # Not `RayReport`.

    def bind(
        self, trainer: TrainerView, params: Mapping[str, Any], *, spent: TimeSpent | None = None, exits_immediately: Callable[[], bool] = lambda: False
    ) -> None:
        """Sets `trainer` and `params` of all callbacks. `exits_immediately` returns whether a second Ctrl-C was pressed, after which nothing is saved."""
        self.params, self._spent, self._exits_immediately = dict(params), spent or TimeSpent(), exits_immediately
        for callback in self._all:
            callback.trainer = trainer
            callback.params = self.params
            callback._is_run_saved = self.saves

    @property
    def copies_state(self) -> bool:
        """Whether any callback saves copies of the state while training continues."""
        return any(callback.copies_state for callback in self._active)

    @contextlib.contextmanager
    def entered(self, saver: Saver) -> Iterator[None]:
        """Enters the run with all callbacks, which locks their directories, and closes them if the block fails before `finish` does."""
        self._is_closed = False
        try:
            for callback in self._active:
                callback.enter_run(saver)
            yield
        except BaseException:
            if not self._is_closed:
                self.close()
            raise

    def open_run(self, run_id: str, step: int) -> None:
        """Prepares the files of all callbacks."""
        for callback in self._active:
            callback.open_run(run_id, step)

    def start_schedules(self, seconds: float) -> None:
        """Starts the triggers of all callbacks."""
        self._schedules = [(callback, Schedule(callback.every, seconds)) for callback in self._all if callback.every is not None]

    @property
    def has_schedules(self) -> bool:
        """Whether any callback has a trigger."""
        return bool(self._schedules)

    def next_step(self, step: int, start_step: int) -> int | None:
        """Returns the first step after `step` at which a trigger may fire; `None` if only the clock or the end of an epoch can make one fire."""
        steps = (schedule.next_step(step, start_step) for _, schedule in self._schedules)
        return min((one for one in steps if one is not None), default=None)

    @property
    def next_seconds(self) -> float:
        """The time at which the next trigger fires by the clock; infinite if there is none."""
        return min((schedule.next_seconds for _, schedule in self._schedules), default=math.inf)

    def evaluate_triggers(self, moment: Moment) -> set[int]:
        """Returns the `id()` of each callback whose trigger fires at `moment`."""
        return {id(callback) for callback, schedule in self._schedules if schedule.due(moment)}

    def on_checkpoint(self, checkpoint: Checkpoint, fired_ids: set[int]) -> None:
        """Calls `on_checkpoint` of the callbacks in `fired_ids` and of those that request it. All are synced and prepared before the first of them saves.

        If one fails, the others are still called, and the run is saved, before the error is raised.
        """
        failure: BaseException | None = None
        is_prepared = is_saved = False

        def is_called(callback: Callback) -> bool:
            has_fired = not checkpoint.run.position.is_repeat and (callback.every is None or id(callback) in fired_ids)
            return overrides(callback, "on_checkpoint") and (has_fired or callback.wants(checkpoint))

        def prepare_save(callback: Callback) -> None:
            nonlocal is_prepared
            # Without this wait, the time of running steps would count as time of saving. A callback that saves nothing must not wait.
            if callback.copies_state or callback.saves_as is not None or checkpoint.epoch_ends or checkpoint.evaluated:
                checkpoint.run.finish_steps(asynchronous=callback.copies_state)
            if not is_prepared:
                is_prepared = True
                with self._spent.on("saving"):
                    callbacks = [callback for callback in self._active if overrides(callback, "before_saves") and is_called(callback)]
                    before = [functools.partial(callback.before_saves, checkpoint) for callback in callbacks]
                    _call_all([functools.partial(self.sync, checkpoint.run.uploads), *before])

        def call(callback: Callback) -> None:
            with self._spent.on("saving" if callback.phase >= Phase.SAVE_BEST else "callbacks"):
                if callback.phase >= Phase.SAVE:
                    for other in self._active:
                        if other.phase < Phase.SAVE:
                            other.drop_unsaved()
                callback.on_checkpoint(checkpoint)

        def succeeds(function: Callable[..., None], *arguments: Any) -> bool:
            nonlocal failure
            try:
                function(*arguments)
            except BaseException as error:  # noqa: BLE001 (raised below, after the run is saved)
                failure = failure or error
                checkpoint.run.position = dataclasses.replace(checkpoint.run.position, is_last=True, is_rescue=True)
                return False
            return True

        with self._spent.on("saving"):  # `wants` may wait for a save.
            checkpoint.run.savers = [callback.saves_as for callback in self._active if callback.saves_as is not None and is_called(callback)]
        for callback in filter(is_called, self._active):
            if callback.phase >= Phase.SAVE_BEST and not succeeds(prepare_save, callback) and self._exits_immediately():
                break
            saves = checkpoint.run.num_saves
            if succeeds(call, callback):
                is_saved |= callback.phase == Phase.SAVE and checkpoint.run.num_saves > saves
            elif self._exits_immediately():
                break
        if is_saved:
            for callback in self._active:
                callback.run_was_saved()
        if failure is not None:
            raise failure

    def on_closing(self, checkpoint: Checkpoint, epoch: int, logs: Mapping[str, Any]) -> None:
        """Calls `on_closing` of all callbacks, after earlier output is on disk and uploaded."""
        uploads: list[Callable[[], None]] = []
        self.sync(uploads)
        _call_all(uploads)
        for callback in self._active:
            callback.on_closing(checkpoint, epoch, logs)

    def sync(self, uploads: list[Callable[[], None]]) -> None:
        """Syncs all callbacks, even if one of them fails. Adds functions that wait for uploads to `uploads`."""

        def sync(callback: Callback) -> None:
            uploads.extend(filter(None, [callback.sync()]))

        _call_all([functools.partial(sync, callback) for callback in self._active])

    def close(self) -> None:
        """Closes all callbacks, even if one of them fails."""
        self._is_closed = True
        _call_all([callback.close for callback in self._active])

    def finish(self, logs: Mapping[str, Any]) -> None:
        """Calls `on_train_end` of all callbacks and closes them, even if one of them fails."""
        _call_all([*(functools.partial(self._timed, callback.on_train_end, logs) for callback in self._active), self.close])

    def _timed(self, method: Callable[..., None], *arguments: Any) -> None:
        with self._spent.on("callbacks"):
            method(*arguments)

    def state_dict(self, seconds: float) -> dict[str, Any]:
        """Returns the states of all callbacks, by key, and of their triggers."""
        states = {self._keys[id(callback)]: callback.state_dict() for callback in self._active if id(callback) in self._keys}
        schedules = [schedule.state_dict(seconds)["since"] for _, schedule in self._schedules]
        return {"callbacks": {key: state for key, state in states.items() if state}, "schedules": schedules}

    def load_state_dict(self, saved: Mapping[str, Any], seconds: float) -> tuple[list[str], list[str]]:
        """Restores the states of all callbacks. Returns the keys of callbacks without a saved state, and of saved states without a callback."""
        states = dict(saved.get("callbacks", {}))
        new = []
        for callback in self._all:
            key = self._keys.get(id(callback))
            if key is None:
                continue
            if callback.main_process_only and jax.process_index():
                states.pop(key, None)
            elif key in states:
                callback.load_state_dict(states.pop(key))
            elif callback.state_dict():
                new.append(key)
        schedules = saved.get("schedules", [])
        if len(schedules) == len(self._schedules):
            for (_, schedule), since in zip(self._schedules, schedules, strict=True):
                schedule.load_state_dict({"since": since}, seconds)
        return new, sorted(states)


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    """Calls all functions in this order, even if one of them fails."""
    with contextlib.ExitStack() as stack:
        for function in reversed(functions):
            stack.callback(function)


def _state_keys(callbacks: Iterable[Callback]) -> dict[int, str]:
    """Returns the keys of states in checkpoints, by the callback's `id()`. If a callback may repeat, the second with its key has the suffix "#2"."""
    counts: Counter[str] = Counter()
    keys: dict[int, str] = {}
    for callback in callbacks:
        if type(callback).state_dict is Callback.state_dict:
            continue
        key = callback.state_key
        counts[key] += 1
        if counts[key] > 1 and not callback.may_repeat:
            raise CallbackError(
                f"Two callbacks have the same key in checkpoints: {key!r}. Pass different arguments to them (only the last part of a path is in the key), or "
                "override state_key in one of them."
            )
        keys[id(callback)] = key if counts[key] == 1 else f"{key}#{counts[key]}"
    return keys


def _check_places(callbacks: Iterable[Any]) -> None:
    """Raises a `CallbackError` if two callbacks save every checkpoint in the same directory. Each would delete the other's."""
    unique = {id(callback): callback for callback in callbacks if isinstance(callback, Callback)}.values()
    counts = Counter((absolute(place[0]), place[1]) for callback in unique if (place := callback.saves_as) is not None)
    for (directory, owner), count in counts.items():
        if count > 1:
            raise CallbackError(f"{count} {owner}s save in the same directory, {directory}. Pass a different directory to each.")


def _check_callback(callback: Any) -> None:
    if isinstance(callback, type) and issubclass(callback, Callback):
        raise CallbackError(f"callbacks must be instances. Received: the class {callback.__name__}. Pass {callback.__name__}(...).")
    if not isinstance(callback, Callback):
        hint = " Wrap a function in LambdaCallback." if callable(callback) else ""
        raise CallbackError(f"callbacks must be instances of fitflax.callbacks.Callback. Received: a {type(callback).__name__}.{hint}")
    name = type(callback).__name__
    check_trigger(name, callback.every)
    for hook in HOOKS:
        arguments = list(inspect.signature(getattr(Callback, hook)).parameters)[1:]
        if overrides(callback, hook):
            try:
                inspect.signature(getattr(callback, hook)).bind(*arguments)
            except TypeError as error:
                raise CallbackError(f"{name}.{hook} must accept the arguments ({', '.join(arguments)}): {error}.") from error
            except ValueError:
                continue  # Some functions written in C have no signature.
    for hook in dir(type(callback)):
        if hook.startswith("on_") and not hasattr(Callback, hook):
            meant = f" Did you mean {_ALIASES[hook]!r}?" if hook in _ALIASES else did_you_mean(hook, HOOKS)
            warn(f"{name}.{hook} is not a hook of fitflax and is never called.{meant}")


# -- the callbacks of a call --


def callbacks_of_fit(callbacks: Any, verbose: Any, *, trial: int) -> tuple[CallbackList, History, str | None]:
    """Returns a run's callbacks, its history, and a note to show to the user. `trial` is the number of batches of a `fast_dev_run`, or 0."""
    user_callbacks, note = _as_list(callbacks), None
    if trial:
        names = [type(callback).__name__ for callback in user_callbacks if callback.writes_files]
        without = f" Left out: {', '.join(names)}." if names else ""
        note = f"fast_dev_run: runs at most {trial} batches of training and of each validation, and writes no files.{without}"
        user_callbacks = [callback for callback in user_callbacks if not callback.writes_files]
    histories = [callback for callback in user_callbacks if isinstance(callback, History)] or [History()]
    with_history = [*(callback for callback in user_callbacks if callback not in histories), *histories]
    return CallbackList([*with_history, *_default_bar(with_history, verbose)]), histories[0], note


def callbacks_of_call(callbacks: Any, verbose: Any) -> CallbackList:
    """Returns the callbacks of an evaluation or prediction."""
    user_callbacks = _as_list(callbacks)
    return CallbackList([*user_callbacks, *_default_bar(user_callbacks, verbose)])


def _as_list(callbacks: Any) -> list[Callback]:
    if isinstance(callbacks, Callback) or not (callbacks is None or isinstance(callbacks, Iterable)):
        raise CallbackError(f"callbacks must be a list. Received: a {type(callbacks).__name__}. Pass callbacks=[...].")
    return list(callbacks or ())


def _default_bar(callbacks: Sequence[Callback], verbose: int | str) -> list[Callback]:
    """Returns the progress bar for `verbose`, unless the user passed one."""
    if verbose not in ("auto", 0, 1, 2):
        raise ConfigError(f"verbose must be 0, 1, 2 or 'auto'. Received: {verbose!r}.")
    if not verbose or any(isinstance(callback, ProgressBar) for callback in callbacks):
        return []
    bar = ProgressBar()
    bar.is_plain = True if verbose == 2 else None
    return [bar]


# -- callbacks as plain functions --


class Serial:
    """A composition of functions `checkpoint -> checkpoint`, as `serial` returns it."""

    def __init__(self, steps: Sequence[Callable[[Any], Any]]) -> None:
        self.parts = tuple(steps)

    @overload
    def __call__(self, checkpoint: Checkpoint) -> Checkpoint: ...

    @overload
    def __call__(self, checkpoint: Any) -> Any: ...

    def __call__(self, checkpoint: Any) -> Any:
        """Passes `checkpoint` through all functions and returns the result of the last one.

        As in `fit`, earlier callbacks are synced to disk before a later one saves the run.
        """
        if not isinstance(checkpoint, Checkpoint):
            for step in self.parts:
                checkpoint = step(checkpoint)
            return checkpoint
        run = checkpoint.run
        earlier = list(run.before_saving)
        for step in self.parts:
            run.before_saving, saves = list(earlier), run.num_saves
            checkpoint = step(checkpoint)
            if isinstance(step, Callback):
                earlier.append(step.sync)
                if step.phase == Phase.SAVE and run.num_saves > saves:
                    for callback in self.parts:
                        if isinstance(callback, Callback):
                            callback.run_was_saved()
        return checkpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for saves and closes writers."""
        _call_all([step.close for step in self.parts if isinstance(step, Callback | Serial)])


def serial(*steps: Callable[[Any], Any]) -> Serial:
    """Composes functions `checkpoint -> checkpoint`, such as evaluation loops and callbacks. The result is a context manager that closes writers.

    Args:
        *steps: The functions, in calling order. Each takes the result of the previous one. What callbacks before a `ModelCheckpoint` wrote is on disk
            before it saves.

    Raises:
        ConfigError: One of them is not callable.
        CallbackError: One of them is a callback that needs a trainer, or two `ModelCheckpoint` callbacks have the same directory.

    >>> serial(lambda c: c + 1, lambda c: c * 2)(3)
    8
    """
    for step in steps:
        if not callable(step):
            raise ConfigError(f"serial() takes functions from a checkpoint to a checkpoint. Received: {step!r}.")
        if isinstance(step, Callback):
            step.check_alone()
    # Flattened, so that a callback that saves finds all earlier ones in the same list.
    parts = [part for step in steps for part in (step.parts if isinstance(step, Serial) else (step,))]
    _check_places(parts)
    return Serial(parts)
