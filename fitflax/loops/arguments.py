"""Checks of what users pass to `Trainer` and `fit`, each with one clear error before any work."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
import optax

import fitflax.losses as losses
import fitflax.optimizers as optimizers
from fitflax.data import Source
from fitflax.data.batch import Selection
from fitflax.errors import ConfigError, OptimizerError, warn
from fitflax.integers import is_integer
from fitflax.parallel import DataParallel, Strategy
from fitflax.steps.task import Streams
from fitflax.triggers import Trigger

__all__ = [
    "check_called_with",
    "check_counts",
    "check_end",
    "check_initial_epoch",
    "check_log_keys",
    "check_seed",
    "described",
    "group_name",
    "numbers_of_batches",
    "optimizer_of",
    "strategy_of",
    "streams_of",
    "trigger_of",
    "validation_frequency",
    "validation_sets",
    "zeros",
]


def streams_of(owner: str, rngs: Any) -> Streams:
    """Returns the names of random streams by occasion.

    Args:
        owner: Whose argument it is, for errors.
        rngs: Names for initialization and training, or a dict of names by occasion.

    Raises:
        ConfigError: Unknown occasions, or names that are none.

    >>> streams_of("Trainer", ("dropout",))
    Streams(init=('dropout',), train=('dropout',), eval=())
    """
    if isinstance(rngs, Mapping):
        if set(rngs) - {"init", "train", "eval"}:
            raise ConfigError(f"{owner}(rngs=...) by occasion has the keys 'init', 'train' and 'eval'. Received: {list(rngs)}.")
        return Streams(*(_names(owner, rngs.get(occasion, ())) for occasion in ("init", "train", "eval")))
    return Streams(_names(owner, rngs), _names(owner, rngs), ())


def _names(owner: str, names: str | Iterable[str]) -> tuple[str, ...]:
    listed = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) for name in listed):
        raise ConfigError(f"{owner}(rngs=...) takes names of random streams. Received: {names!r}.")
    return tuple(name for name in listed if name != "params")


def check_seed(owner: str, seed: Any) -> None:
    """Checks a seed.

    Raises:
        ConfigError: It is no integer of at least 0.
    """
    if not is_integer(seed, 0):
        raise ConfigError(f"{owner}(seed=...) must be an integer of at least 0. Received: {seed!r}.")


def strategy_of(owner: str, parallel: Any) -> Strategy:
    """Returns where steps run, by default on all local devices.

    Raises:
        ConfigError: It is no strategy.
    """
    if parallel is not None and not isinstance(parallel, Strategy):
        raise ConfigError(
            f"{owner}(parallel=...) takes a strategy such as fitflax.parallel.DataParallel(). Received: {parallel!r}. A mesh is Sharded({{'data': -1}}, ...)."
        )
    return DataParallel() if parallel is None else parallel


def trigger_of(owner: str, every: Any) -> Trigger:
    """Returns a trigger.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(every, Trigger):
        raise ConfigError(f"{owner}(every=...) takes a trigger, such as fitflax.every(steps=10). Received: {every!r}.")
    return every


def zeros(batch: Any) -> Any:
    """Returns `batch` with zeros where it has shapes alone."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, batch)


def optimizer_of(optimizer: Any, learning_rate: Any = None) -> optax.GradientTransformation:
    """Returns an optimizer that was given as an optax transformation, or by name.

    Raises:
        ConfigError: A rate for something that has its own.
        OptimizerError: Neither a known name nor a transformation.
    """
    if isinstance(optimizer, str):
        if optimizer in losses.names() and optimizer not in optimizers.names():
            raise OptimizerError(f"compile(optimizer, loss, metrics) takes the optimizer first. Received: {optimizer!r}, which is a loss.")
        return optimizers.get(optimizer, learning_rate)
    if learning_rate is not None:
        raise ConfigError("compile(learning_rate=...) goes with an optimizer given by name; an optax transformation has its own.")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        advice = " Call it: optax.adam(learning_rate)." if callable(optimizer) else ""
        raise OptimizerError(f"optimizer must be a name or an optax transformation. Received: {optimizer!r}.{advice}")
    return cast(optax.GradientTransformation, optimizer)


def group_name(name: Any) -> str:
    """Returns the name of the group of an evaluation's metrics.

    Raises:
        ConfigError: It is no text, empty, or `train`.
    """
    if not isinstance(name, str) or name == "train" or not name:
        raise ConfigError(f"eval_loop(name=...) is the group of its metrics, and not 'train', which is that of training. Received: {name!r}.")
    return name


def described(**given: Any) -> dict[str, Any]:
    """Returns arguments as numbers and strings, for people: functions by their names; what was not given, or has none, is left out.

    >>> described(loss="mse", learning_rate=None, optimizer=check_counts)
    {'loss': 'mse', 'optimizer': 'check_counts'}
    """
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}
    simple = {name: value if isinstance(value, bool | int | float | str) else getattr(value, "__name__", None) for name, value in plain.items()}
    return {name: value for name, value in simple.items() if value is not None}


def check_called_with(owner: str, name: str, function: Any, *arguments: str, keywords: Sequence[str] = ()) -> None:
    """Checks that a method that a user has overridden takes what it is called with.

    Args:
        owner: Whose it is, for errors.
        name: What it is called.
        function: The bound method.
        *arguments: The names of what it is given by position.
        keywords: The names of what it is given by name.

    Raises:
        ConfigError: It does not.
    """
    fault = ""
    for follows in (False, True):  # A decorator may take other arguments than what it decorates.
        try:
            signature = inspect.signature(function, follow_wrapped=follows)
        except (TypeError, ValueError):
            return  # Whatever it is, it says nothing of its arguments.
        try:
            signature.bind(*arguments, **dict.fromkeys(keywords))
        except TypeError as error:
            fault = f"{name}{signature}: {error}"
        else:
            return
    called = ", ".join([*arguments, *(f"{keyword}={keyword}" for keyword in keywords)])
    raise ConfigError(f"{owner}.{name} is called as {name}({called}), but is defined as {fault}.")


def check_counts(**counts: int | None) -> None:
    """Checks that the given arguments are positive integers or `None`.

    Raises:
        ConfigError: One is not.
    """
    for name, value in counts.items():
        if value is not None and not is_integer(value, 1):
            raise ConfigError(f"{name} must be a positive integer. Received: {value!r}.")


def check_initial_epoch(value: Any) -> None:
    """Checks `initial_epoch`.

    Raises:
        ConfigError: It is no integer of at least 0.
    """
    if not is_integer(value, 0):
        raise ConfigError(f"initial_epoch must be an integer of at least 0. Received: {value!r}.")


def check_log_keys(keys: Iterable[str], sets: Sequence[str]) -> None:
    """Checks that no metric of training has the name under which a validation is logged.

    Raises:
        ConfigError: One has, and its value would be overwritten; or one is named `epoch`.
    """
    known = list(keys)
    if "epoch" in known:
        raise ConfigError("A metric is named 'epoch', which is the number of the epoch wherever values are logged. Give it another name.")
    clashes = [key for key in known for name in sets if key.startswith(f"{name}_") and key.removeprefix(f"{name}_") in known]
    if clashes:
        raise ConfigError(f"The metrics {clashes} have the names under which validation is logged. Give them other names, or the validation set.")


def numbers_of_batches(**counts: Any) -> list[int]:
    """Returns arguments that say how many batches there are to be; 0 for as many as there are, and `True` for one.

    Raises:
        ConfigError: One is no integer, or negative.
    """
    for name, value in counts.items():
        if not isinstance(value, int | np.integer) or value < 0:
            raise ConfigError(f"{name} must be a number of batches, 0 for all. Received: {value!r}.")
    return [int(value) for value in counts.values()]


def validation_frequency(value: Any) -> int | frozenset[int] | Trigger:
    """Returns `validation_freq` in the form that loops take.

    Raises:
        ConfigError: It is no positive integer, list of epochs, or trigger.
    """
    if isinstance(value, Trigger):
        return value
    if is_integer(value, 1):
        return int(value)
    if isinstance(value, list | tuple | set | range) and all(is_integer(epoch, 1) for epoch in value):
        return frozenset(int(epoch) for epoch in value)
    raise ConfigError(f"validation_freq must be a positive integer, a list of epochs counted from 1, or a trigger. Received: {value!r}.")


def validation_sets(data: Any, selection: Selection) -> dict[str, Any]:
    """Returns validation sets by name. A dict is one set only where the trainer was told which of its keys are inputs, and it has them.

    Args:
        data: One set, a dict of sets, or `None`.
        selection: What the trainer picks from dicts.

    Raises:
        ConfigError: Names that are no text, empty, or `train`.
    """
    if data is None:
        return {}
    if not isinstance(data, dict):
        return {"val": data}
    wanted = selection.inputs
    keys = set(wanted.values() if isinstance(wanted, dict) else wanted if isinstance(wanted, tuple) else [wanted])
    if wanted is not None and keys <= set(data):
        return {"val": data}
    if not data or not all(isinstance(name, str) and name and name != "train" for name in data):
        raise ConfigError(f"validation_data by name needs names other than 'train'. Received: {list(data)}.")
    return data


def check_end(source: Source, *, steps: int | None, epochs: int | None, steps_per_epoch: int | None, validates: bool) -> None:
    """Checks that a run over this data has an end.

    Raises:
        ConfigError: The data never ends, and nothing says where to stop.
    """
    if not source.is_endless or steps_per_epoch is not None:
        return
    if steps is None:
        alone = "" if epochs is None else " epochs= alone does not help, because an epoch of it has no end."
        raise ConfigError(f"This data never ends, and nothing says where to stop: pass steps=, or steps_per_epoch= with epochs=.{alone}")
    if validates:
        warn("This data never ends, so the whole fit is one epoch, validated once at its end. Pass steps_per_epoch=, or validation_freq=every(steps=...).")
