"""Assembles the callbacks of a call: those that the user passed, and a history and a progress bar by default."""

from collections.abc import Iterable, Sequence
from typing import Any

from fitflax.callbacks.base import Callback
from fitflax.callbacks.callback_list import CallbackList
from fitflax.callbacks.history import History
from fitflax.callbacks.progress_bar import ProgressBar
from fitflax.errors import CallbackError, ConfigError

__all__ = ["callbacks_of_call", "callbacks_of_fit"]


def callbacks_of_fit(callbacks: Any, verbose: Any, *, trial: int) -> tuple[CallbackList, History, str | None]:
    """Returns a run's callbacks, its history, and a note to show to the user. `trial` is the number of batches of a `fast_dev_run`, or 0."""
    given, note = _as_list(callbacks), None
    if trial:
        given, note = _without_files(given, trial)
    given, history = _with_history(given)
    return CallbackList([*given, *_default_bar(given, verbose)]), history, note


def callbacks_of_call(callbacks: Any, verbose: Any) -> CallbackList:
    """Returns the callbacks of an evaluation or prediction."""
    given = _as_list(callbacks)
    return CallbackList([*given, *_default_bar(given, verbose)])


def _as_list(callbacks: Any) -> list[Callback]:
    if isinstance(callbacks, Callback) or not (callbacks is None or isinstance(callbacks, Iterable)):
        raise CallbackError(f"callbacks must be a list. Received: a {type(callbacks).__name__}. Pass callbacks=[...].")
    return list(callbacks or ())


def _without_files(callbacks: Sequence[Callback], batches: int) -> tuple[list[Callback], str]:
    """Returns the callbacks that do not write files, and a note to show to the user."""
    names = [type(callback).__name__ for callback in callbacks if callback.writes_files]
    without = f" Left out: {', '.join(names)}." if names else ""
    note = f"fast_dev_run: runs at most {batches} batches of training and of each validation, and writes no files.{without}"
    return [callback for callback in callbacks if not callback.writes_files], note


def _with_history(callbacks: Sequence[Callback]) -> tuple[list[Callback], History]:
    """Returns the callbacks with a history at the end, and the history: the user's if there is one, otherwise a new one."""
    histories = [callback for callback in callbacks if isinstance(callback, History)] or [History()]
    return [*(callback for callback in callbacks if callback not in histories), *histories], histories[0]


def _default_bar(callbacks: Sequence[Callback], verbose: int | str) -> list[Callback]:
    """Returns the progress bar for `verbose`, unless the user passed one."""
    if verbose not in ("auto", 0, 1, 2):
        raise ConfigError(f"verbose must be 0, 1, 2 or 'auto'. Received: {verbose!r}.")
    if not verbose or any(isinstance(callback, ProgressBar) for callback in callbacks):
        return []
    bar = ProgressBar()
    if verbose == 2:
        bar.is_plain = True
    return [bar]
