"""What Keras calls the arguments of its callbacks: people bring them along, and Python's own error only says that they are not there."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from fitflax.errors import CallbackError

__all__ = ["with_hints"]

_HINTS = {
    "filepath": "give a directory, the first argument; each checkpoint is a directory in it",
    "log_dir": "give the directory as the first argument",
    "filename": "give the path as the first argument",
    "monitor": "BestCheckpoint(directory, monitor=...) keeps the best, ModelCheckpoint the newest",
    "save_best_only": "BestCheckpoint(directory, monitor=...) keeps the best, ModelCheckpoint the newest",
    "save_weights_only": "a checkpoint holds all that a resume needs; restore(path, weights_only=True) takes its weights alone",
    "save_freq": "say when with every=, such as every(steps=100)",
    "update_freq": "say when with every=, such as every(steps=100)",
    "histogram_freq": "say when with histograms=, such as every(epochs=1)",
    "restore_best_weights": "it is restore_best= here",
    "verbose": "leave it out; fit(verbose=...) is for all that is printed",
}


def with_hints(name: str, init: Callable[..., None]) -> Callable[..., None]:
    """Returns an `__init__` that says what is here in place of an argument that Keras's callbacks have and it does not take.

    >>> def init(self, *, every=None): ...
    >>> with_hints("Quiet", init)(None, verbose=0)
    Traceback (most recent call last):
    fitflax.errors.CallbackError: Quiet does not take verbose=: leave it out; fit(verbose=...) is for all that is printed.
    """
    parameters = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(*args: Any, **kwargs: Any) -> None:
        known = [argument for argument in kwargs if argument in _HINTS and argument not in parameters]
        if known and not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            raise CallbackError(f"{name} does not take {known[0]}=: {_HINTS[known[0]]}.")
        init(*args, **kwargs)

    return checked
