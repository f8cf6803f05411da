"""The callbacks of a call: those that the user gave, and those that are there by default, a history and a progress bar."""

from collections.abc import Iterable, Sequence
from typing import Any

from fitflax.callbacks.base import Callback
from fitflax.callbacks.callback_list import CallbackList
from fitflax.callbacks.history import History
from fitflax.callbacks.progress_bar import ProgressBar
from fitflax.errors import CallbackError, ConfigError

__all__ = ["callbacks_of_call", "callbacks_of_fit"]


def callbacks_of_fit(callbacks: Any, verbose: Any, *, trial: int) -> tuple[CallbackList, History, str | None]:
    """Returns a run's callbacks, the history among them, and a sentence for whoever watches.

    Args:
        callbacks: As given to `fit`.
        verbose: As given to `fit`.
        trial: How many batches are tried without any files; 0 for a run in earnest.

    Raises:
        CallbackError: Something that is no callback, the same one twice, or two whose state would be saved under one key.
        ConfigError: An unknown `verbose`.
    """
    given, note = _listed(callbacks), None
    if trial:
        given, note = _without_files(given, trial)
    given, history = _with_history(given)
    return CallbackList([*given, *_default_bar(given, verbose)]), history, note


def callbacks_of_call(callbacks: Any, verbose: Any) -> CallbackList:
    """Returns the callbacks of an evaluation or a prediction.

    Args:
        callbacks: As given to it.
        verbose: As given to it.

    Raises:
        CallbackError, ConfigError: As in `callbacks_of_fit`.
    """
    given = _listed(callbacks)
    return CallbackList([*given, *_default_bar(given, verbose)])


def _listed(callbacks: Any) -> list[Callback]:
    """Returns the callbacks that a user gave, as a list; `None` for none.

    Raises:
        CallbackError: It is no list.
    """
    if isinstance(callbacks, Callback) or not (callbacks is None or isinstance(callbacks, Iterable)):
        raise CallbackError(f"callbacks takes a list. Received: a {type(callbacks).__name__}; write callbacks=[...].")
    return list(callbacks or ())


def _without_files(callbacks: Sequence[Callback], batches: int) -> tuple[list[Callback], str]:
    """Returns the callbacks that write no files, for a trial of some batches, and a sentence for whoever watches it."""
    names = [type(callback).__name__ for callback in callbacks if callback.writes_files]
    without = f", without {', '.join(names)}" if names else ""
    return [callback for callback in callbacks if not callback.writes_files], f"fast_dev_run: {batches} batches of everything and no files{without}."


def _with_history(callbacks: Sequence[Callback]) -> tuple[list[Callback], History]:
    """Returns callbacks with a history among them, after the others, and the history: the user's, or one of their own."""
    histories = [callback for callback in callbacks if isinstance(callback, History)] or [History()]
    return [*(callback for callback in callbacks if callback not in histories), *histories], histories[0]


def _default_bar(callbacks: Sequence[Callback], verbose: int | str) -> list[Callback]:
    """Returns the progress bar that `verbose` asks for, unless the user gave one.

    Raises:
        ConfigError: `verbose` is not 0, 1, 2 or `"auto"`.
    """
    if verbose not in ("auto", 0, 1, 2):
        raise ConfigError(f"verbose must be 0, 1, 2 or 'auto'. Received: {verbose!r}.")
    if not verbose or any(isinstance(callback, ProgressBar) for callback in callbacks):
        return []
    bar = ProgressBar()
    if verbose == 2:
        bar.is_plain = True
    return [bar]
