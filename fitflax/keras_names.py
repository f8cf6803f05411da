"""What Keras and others call arguments: people bring them along, and Python's own error only says that they are not there."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from fitflax.errors import FitflaxError

__all__ = ["CALLBACKS", "COMPILE", "EVALUATE", "FIT", "PREDICT", "with_hints"]

P = ParamSpec("P")
R = TypeVar("R")

CALLBACKS = {
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
COMPILE = {
    "steps_per_execution": "it is steps_per_call= here",
    "jit_compile": "leave it out; steps are always compiled",
    "run_eagerly": "call fit within jax.disable_jit()",
    "auto_scale_loss": "precision='float16' scales it",
    "lr": "it is learning_rate= here",
}
PREDICT = {
    "x": "give it as the first argument, data",
    "workers": "leave it out; a loader of yours, as of PyTorch or Grain, has its own",
    "use_multiprocessing": "leave it out; a loader of yours, as of PyTorch or Grain, has its own processes",
    "max_queue_size": "leave it out; batches are read ahead of the device as far as it takes",
}
EVALUATE = PREDICT | {"return_dict": "leave it out; the values come in a dict"}
FIT = PREDICT | {"max_steps": "it is steps= here", "num_steps": "it is steps= here", "max_epochs": "it is epochs= here", "num_epochs": "it is epochs= here"}


def with_hints(name: str, hints: Mapping[str, str], error: type[FitflaxError]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator of functions that say what is here in place of an argument that they do not take.

    Args:
        name: The function's, for errors.
        hints: What to do, by what others call the argument. Any other that it does not take is Python's own `TypeError`.
        error: What is raised.

    >>> @with_hints("go", {"quickly": "it is speed= here"}, FitflaxError)
    ... def go(*, speed=1): ...
    >>> go(quickly=True)
    Traceback (most recent call last):
    fitflax.errors.FitflaxError: go does not take quickly=: it is speed= here.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return function

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for argument in kwargs:
                if argument not in parameters and argument in hints:
                    raise error(f"{name} does not take {argument}=: {hints[argument]}.")
            return function(*args, **kwargs)

        return checked

    return decorate
