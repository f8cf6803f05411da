"""What Keras calls the arguments of its callbacks: people bring them along, and Python's own error only says that they are not there."""

import inspect
from collections.abc import Iterable

from fitflax.errors import CallbackError

__all__ = ["check_arguments"]

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


def check_arguments(kind: type, given: Iterable[str]) -> None:
    """Checks the keyword arguments of a callback for names that Keras's have and `kind` does not take.

    Raises:
        CallbackError: There is one; it says what is here in its place.

    >>> class Quiet:
    ...     def __init__(self, *, every=None): ...
    >>> check_arguments(Quiet, ["every"])
    >>> check_arguments(Quiet, ["verbose"])
    Traceback (most recent call last):
    fitflax.errors.CallbackError: Quiet does not take verbose=: leave it out; fit(verbose=...) is for all that is printed.
    """
    known = [name for name in given if name in _HINTS]
    if known:
        parameters = inspect.signature(kind).parameters
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            for name in known:
                if name not in parameters:
                    raise CallbackError(f"{kind.__name__} does not take {name}=: {_HINTS[name]}.")
