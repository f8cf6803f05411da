"""Argument names of Keras and other trainers, with hints that say what to use instead.

A hint completes the sentence `NAME does not take ARGUMENT=; ...` and does not end with a period. A hint that begins with `use OTHER=` or `pass OTHER=` applies
only to functions that take OTHER. A hint that begins with `use NAME(` does not apply to NAME itself. The key `POSITIONAL` has the hint for calls with too many
positional arguments.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from fitflax.errors import FitflaxError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

POSITIONAL = "*"

_OTHER = re.compile(r"(?:use|pass) (\w+)=")

_USE_EVERY_STEPS = "use every= instead, such as every=every(steps=100)"
_USE_EVERY_EPOCHS = "use every= instead, such as every=every(epochs=2)"
_USE_BEST_CHECKPOINT = "use BestCheckpoint(directory, monitor=...), which keeps the best checkpoints instead of the newest"

CALLBACKS = {
    "filepath": "pass a directory as the first argument, which will have a subdirectory for each checkpoint",
    **dict.fromkeys(("log_dir", "dirpath", "dir", "save_dir"), "use directory= instead"),
    "filename": "use path= instead",
    **dict.fromkeys(("monitor", "save_best_only"), _USE_BEST_CHECKPOINT),
    "save_weights_only": "leave it out: checkpoints have everything that a resume needs, and restore(path, weights_only=True) restores only the weights",
    **dict.fromkeys(("save_freq", "update_freq", "every_n_steps", "every_n_train_steps", "log_freq"), _USE_EVERY_STEPS),
    **dict.fromkeys(("every_n_epochs", "period"), _USE_EVERY_EPOCHS),
    "histogram_freq": "use histograms= instead, such as histograms=every(epochs=1)",
    "restore_best_weights": "use restore_best= instead",
    "verbose": "use fit(verbose=...) instead, which controls everything that is printed",
    "mode": "use BestCheckpoint(directory, monitor=..., mode=...) to keep the best checkpoints instead of the newest",
    "initial_value_threshold": "use BestCheckpoint(directory, monitor=..., initial_value=...) instead",
    **dict.fromkeys(("save_top_k", "max_to_keep"), "use keep= instead"),
    "profile_batch": "pass Profiler(directory, steps=(10, 20)) as another callback",
    "project_name": "use project= instead",
    "experiment_name": "use experiment= instead",
    "run_name": "use name= instead",
    "run_id": "start that run before fit, with mlflow.start_run(run_id=...) or wandb.init(id=...); the logger uses the active run",
    "offline": "use mode='offline' instead",
    "resume": "pass fit(resume=...) instead, which also continues the run of a logger",
    "tags": "pass options={'tags': [...]} instead",
    **{name: f"pass options={{{name!r}: ...}} instead" for name in ("group", "id", "job_type", "notes")},
    "config": "pass fit(config=...) instead",
    "log_model": "pass checkpoint= with a BestCheckpoint or ModelCheckpoint of the run",
}
TRAINER = {
    "rng": "use rngs= for the names of random streams, and seed= for the seed",
    **dict.fromkeys(("optimizer", "loss", "metrics"), "pass it to compile(optimizer, loss, metrics)"),
    "callbacks": "pass it to fit(callbacks=[...])",
    "max_epochs": "pass fit(epochs=...) instead",
    "devices": "use parallel= instead, such as parallel=DataParallel(jax.devices()[:1])",
    "strategy": "use parallel= instead, such as parallel=Sharded({'data': -1}, fsdp=True)",
    "precision": "pass compile(precision=...) instead",
}
COMPILE = {
    "steps_per_execution": "use steps_per_call= instead",
    "jit_compile": "leave it out: steps are always compiled unless you pass run_eagerly=True",
    "auto_scale_loss": "use precision='float16' instead, which scales the loss",
    "lr": "use learning_rate= instead",
    "from_logits": "leave it out: crossentropies given by name always take logits",
}
PREDICT = {
    "x": "pass it as the first argument, data",
    "workers": "use the workers of your data loader instead, such as PyTorch's or Grain's",
    "use_multiprocessing": "use the worker processes of your data loader instead, such as PyTorch's or Grain's",
    "max_queue_size": "leave it out: batches are read ahead as far as the device needs",
    POSITIONAL: "pass batch_size= by keyword",
}
EVALUATE = PREDICT | {"return_dict": "leave it out: the values are always returned in a dict"}
FIT = PREDICT | {
    "callback": "use callbacks= instead, a list",
    "checkpoint": "pass callbacks=[ModelCheckpoint(directory)] instead",
    **dict.fromkeys(("max_steps", "num_steps"), "use steps= instead"),
    **dict.fromkeys(("max_epochs", "num_epochs"), "use epochs= instead"),
    POSITIONAL: "pass batch_size= and epochs= by keyword",
}
METHODS = {
    "training_step": "To change the loss, override compute_loss; to change the update, override train_step(state, batch)",
    "validation_step": "Pass metrics to compile(optimizer, loss, metrics), or override compute_loss, which validation calls with train=False",
    "test_step": "Pass metrics to compile(optimizer, loss, metrics), or override compute_loss, which evaluation calls with train=False",
    "predict_step": "Change what the module returns with train=False, or process the result of predict()",
    "configure_optimizers": "Pass the optimizer to compile(optimizer, loss, metrics), or override train_step(state, batch) for a custom update",
    "call": "Define __call__ of the Flax module that you pass to the trainer, or override compute_loss, which calls the module",
}
"""Sentences for methods of other trainers that a subclass of `Trainer` may define by mistake; fitflax never calls them."""
MODULE = {
    "load_model": "Create the trainer, then call trainer.restore(path) for a checkpoint or trainer.load_weights(path) for safetensors",
}
"""Sentences for names of the package; the other hints are for arguments."""
ON_BATCH = dict.fromkeys(("x", "y", "sample_weight", POSITIONAL), "pass the batch as one tuple, such as (x, y)")


def with_hints(name: str, hints: Mapping[str, str], error: type[FitflaxError]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that raises an error with a hint for arguments in `hints` that the function `name` does not take.

    Other unknown arguments raise `TypeError`, which names the closest argument.

    >>> @with_hints("go", {"quickly": "use speed= instead", POSITIONAL: "pass speed= by keyword"}, FitflaxError)
    ... def go(place, *, speed=1): ...
    >>> go("there", quickly=True)
    Traceback (most recent call last):
    fitflax.errors.FitflaxError: go does not take quickly=; use speed= instead.
    >>> go("there", speed_=2)
    Traceback (most recent call last):
    TypeError: go does not take speed_=. Did you mean 'speed'?
    >>> go("there", 2)
    Traceback (most recent call last):
    fitflax.errors.FitflaxError: go(place, ...) takes no other positional arguments; pass speed= by keyword.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return function

        def applies(hint: str) -> bool:
            other = _OTHER.match(hint)
            return (other is None or other[1] in parameters) and not hint.startswith(f"use {name}(")

        known = {argument: hint for argument, hint in hints.items() if applies(hint)}
        positional = [parameter.name for parameter in parameters.values() if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for argument in kwargs:
                if argument in parameters:
                    continue
                if argument in known:
                    raise error(f"{name} does not take {argument}=; {known[argument]}.")
                raise TypeError(f"{name} does not take {argument}=.{did_you_mean(argument, parameters)}")
            if len(args) > len(positional) and POSITIONAL in known:
                taken = [each for each in positional if each != "self"] + ["..."] * (len(parameters) > len(positional))
                raise error(f"{name}({', '.join(taken)}) takes no other positional arguments; {known[POSITIONAL]}.")
            return function(*args, **kwargs)

        return checked

    return decorate
