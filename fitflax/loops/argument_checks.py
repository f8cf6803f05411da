"""Checks of the arguments of `Trainer` and `fit`. Each raises one clear error before any work is done."""

import inspect
import sys
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
from fitflax.steps.eval_params import find_eval_params, schedule_free_eval_params
from fitflax.steps.random_streams import Streams
from fitflax.triggers import Trigger


def streams_of(owner: str, rngs: Any) -> Streams:
    """Returns the names of random streams, given for initialization and training, or as a dict with the keys `init`, `train` and `eval`."""
    if isinstance(rngs, Mapping):
        if set(rngs) - {"init", "train", "eval"}:
            raise ConfigError(f"{owner}(rngs=...) as a dict must have only the keys 'init', 'train' and 'eval'. Received: {list(rngs)}.")
        return Streams(*(_names(owner, rngs.get(occasion, ())) for occasion in ("init", "train", "eval")))
    return Streams(_names(owner, rngs), _names(owner, rngs), ())


def _names(owner: str, names: str | Iterable[str]) -> tuple[str, ...]:
    listed = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) for name in listed):
        raise ConfigError(f"{owner}(rngs=...) must be names of random streams, such as 'dropout'. Received: {names!r}.")
    return tuple(name for name in listed if name != "params")


def check_seed(owner: str, seed: Any) -> None:
    """Checks that a seed is a nonnegative integer; raises `ConfigError` otherwise."""
    if not is_integer(seed, 0):
        raise ConfigError(f"{owner}(seed=...) must be an integer of at least 0. Received: {seed!r}.")


def strategy_of(owner: str, parallel: Any) -> Strategy:
    """Returns the given strategy, by default `DataParallel()` over all devices; raises `ConfigError` if it is not a strategy."""
    if parallel is not None and not isinstance(parallel, Strategy):
        raise ConfigError(
            f"{owner}(parallel=...) must be a strategy, such as fitflax.parallel.DataParallel(). Received: {parallel!r}. "
            "To use a mesh, pass Sharded({'data': -1}, ...)."
        )
    return DataParallel() if parallel is None else parallel


def check_single_device(strategy: Strategy) -> None:
    """Raises `ConfigError` if `run_eagerly` is used with several devices, because dropout and batch statistics would not equal those of a compiled run."""
    num_devices = strategy.num_replicas * strategy.num_partitions
    if num_devices > 1:
        raise ConfigError(
            f"compile(run_eagerly=True) requires a trainer on a single device. Received: a trainer on {num_devices} devices. "
            "Pass Trainer(model, parallel=DataParallel(jax.devices()[:1]))."
        )


def trigger_of(owner: str, every: Any) -> Trigger:
    """Returns the given trigger; raises `ConfigError` if it is not one."""
    if not isinstance(every, Trigger):
        raise ConfigError(f"{owner}(every=...) takes a trigger, such as fitflax.every(steps=10). Received: {every!r}.")
    return every


def zeros(batch: Any) -> Any:
    """Returns `batch` with zeros in place of `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, batch)


def optimizer_of(optimizer: Any, learning_rate: Any = None) -> optax.GradientTransformation:
    """Returns an optimizer that was given as an optax transformation or by name."""
    if isinstance(optimizer, str):
        if optimizer in losses.names() and optimizer not in optimizers.names():
            raise OptimizerError(f"compile(optimizer, loss, metrics) takes the optimizer first. Received: {optimizer!r}, which is a loss.")
        return optimizers.get(optimizer, learning_rate)
    if learning_rate is not None:
        raise ConfigError(
            "compile(learning_rate=...) requires an optimizer given by name. "
            "Set the learning rate of an optax transformation when you create it: optax.adam(learning_rate)."
        )
    nnx = sys.modules.get("flax.nnx")
    if nnx and isinstance(optimizer, nnx.Optimizer):
        raise OptimizerError(
            "compile takes an optax transformation, because the trainer keeps the optimizer state. Received: an nnx.Optimizer. "
            "Pass its transformation: compile(optimizer.tx, ...)."
        )
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        advice = " Call it: optax.adam(learning_rate)." if callable(optimizer) else ""
        raise OptimizerError(f"optimizer must be a name or an optax transformation. Received: {optimizer!r}.{advice}")
    return cast(optax.GradientTransformation, optimizer)


def eval_params_of(eval_params: Any, ema_decay: Any, optimizer: Any) -> Any:
    """Returns `eval_params`, or by default that of a schedule-free optimizer, an optax transformation, unless averages are evaluated.

    Raises `ConfigError` if it is not a function or `ema_decay` is given as well.
    """
    if eval_params is not None and not callable(eval_params):
        raise ConfigError(f"compile(eval_params=...) takes a function (opt_state, params) -> params. Received: {eval_params!r}.")
    if eval_params is not None and ema_decay is not None:
        raise ConfigError("compile(eval_params=...) and compile(ema_decay=...) both define the parameters for evaluation. Pass only one of them.")
    return find_eval_params(optimizer) if eval_params is None and ema_decay is None else eval_params


def check_restores_best(callbacks: Iterable[Any], eval_params: Any) -> None:
    """Raises `ConfigError` if `eval_params` is given and a callback has `restore_best=True`.

    Such callbacks restore only parameters, but `eval_params` also needs the optimizer state.
    """
    names = [type(callback).__name__ for callback in callbacks if getattr(callback, "restore_best", False)]
    if names and eval_params is not None:
        what = "a schedule-free optimizer" if eval_params is schedule_free_eval_params else "compile(eval_params=...)"
        raise ConfigError(
            f"{names[0]}(restore_best=True) cannot be combined with {what}, because it does not restore the optimizer state, which "
            "eval_params needs. Save the best checkpoint instead: pass BestCheckpoint(directory), and call trainer.restore(directory) after fit."
        )


def group_name(name: Any) -> str:
    """Returns the group name of an evaluation's metrics; raises `ConfigError` if it is not a string, is empty, or is `train`."""
    if not isinstance(name, str) or name == "train" or not name:
        raise ConfigError(f"eval_loop(name=...) must be a nonempty string other than 'train', the group of the training metrics. Received: {name!r}.")
    return name


def described(**given: Any) -> dict[str, Any]:
    """Returns arguments as numbers and strings for messages; functions by name. `None` and objects without a name are left out."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}
    simple = {name: value if isinstance(value, bool | int | float | str) else getattr(value, "__name__", None) for name, value in plain.items()}
    return {name: value for name, value in simple.items() if value is not None}


def check_called_with(owner: str, name: str, function: Any, *arguments: str, keywords: Sequence[str] = ()) -> None:
    """Raises `ConfigError` unless an overridden method accepts these positional arguments and keywords, given by name."""
    fault = ""
    for follows in (False, True):  # The signature of a decorator may differ from that of the function it wraps.
        try:
            signature = inspect.signature(function, follow_wrapped=follows)
        except (TypeError, ValueError):
            return  # Some callables have no signature.
        try:
            signature.bind(*arguments, **dict.fromkeys(keywords))
        except TypeError as error:
            fault = f"{name}{signature}: {error}"
        else:
            return
    called = ", ".join([*arguments, *(f"{keyword}={keyword}" for keyword in keywords)])
    raise ConfigError(f"{owner}.{name} is called as {name}({called}), but is defined as {fault}.")


def check_counts(**counts: int | None) -> None:
    """Raises `ConfigError` unless each argument is a positive integer or `None`."""
    for name, value in counts.items():
        if value is not None and not is_integer(value, 1):
            raise ConfigError(f"{name} must be a positive integer. Received: {value!r}.")


def check_initial_epoch(value: Any) -> None:
    """Raises `ConfigError` unless `initial_epoch` is a nonnegative integer."""
    if not is_integer(value, 0):
        raise ConfigError(f"initial_epoch must be an integer of at least 0. Received: {value!r}.")


def check_log_keys(keys: Iterable[str], sets: Sequence[str]) -> None:
    """Raises `ConfigError` if a training metric is named `epoch` or has the log key of a validation metric, which would overwrite its value."""
    known = list(keys)
    if "epoch" in known:
        raise ConfigError("A metric cannot have the name 'epoch', which is the log key of the epoch number. Rename the metric.")
    clashes = [key for key in known for name in sets if key.startswith(f"{name}_") and key.removeprefix(f"{name}_") in known]
    if clashes:
        raise ConfigError(f"The training metrics {clashes} have log keys of validation metrics. Rename them, or rename the validation set.")


def numbers_of_batches(**counts: Any) -> list[int]:
    """Returns arguments that are numbers of batches (0 for all, `True` for 1); raises `ConfigError` if one is negative or not an integer."""
    for name, value in counts.items():
        if not isinstance(value, int | np.integer) or value < 0:
            raise ConfigError(f"{name} must be a number of batches, or 0 for all data. Received: {value!r}.")
    return [int(value) for value in counts.values()]


def validation_frequency(value: Any) -> int | frozenset[int] | Trigger:
    """Returns `validation_freq` as an integer, a set of epochs, or a trigger; raises `ConfigError` if it is none of them."""
    if isinstance(value, Trigger):
        return value
    if is_integer(value, 1):
        return int(value)
    if isinstance(value, list | tuple | set | range) and all(is_integer(epoch, 1) for epoch in value):
        return frozenset(int(epoch) for epoch in value)
    raise ConfigError(f"validation_freq must be a positive integer, a list of epochs counted from 1, or a trigger. Received: {value!r}.")


def validation_sets(data: Any, selection: Selection) -> dict[str, Any]:
    """Returns validation sets by name; raises `ConfigError` if a name is not a string, is empty, or is `train`.

    A dict is a single set only if the trainer has input keys for dicts and the dict contains all of them.
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
        raise ConfigError(f"validation_data as a dict of sets must have nonempty names other than 'train'. Received: {list(data)}.")
    return data


def check_end(source: Source, *, steps: int | None, epochs: int | None, steps_per_epoch: int | None, validates: bool) -> None:
    """Raises `ConfigError` if the data never ends and no argument says where to stop."""
    if not source.is_endless or steps_per_epoch is not None:
        return
    if steps is None:
        alone = "" if epochs is None else " epochs= alone is not enough, because an epoch of this data never ends."
        raise ConfigError(f"This data never ends. Pass steps=, or both steps_per_epoch= and epochs=.{alone}")
    if validates:
        warn(
            "This data never ends, so the whole fit is one epoch and validation runs only once, at its end. To validate more often, pass steps_per_epoch= or "
            "validation_freq=every(steps=...)."
        )


def check_ensemble(owner: str, members: Any, strategy: Strategy, *, has_own: bool) -> None:
    """Raises `ConfigError` if `members` is not a positive integer, or the module or the strategy does not support ensembles."""
    if members is None:
        return
    if not is_integer(members, 1):
        raise ConfigError(f"{owner}(ensemble=...) must be an integer of at least 1. Received: {members!r}.")
    if has_own:
        raise ConfigError(
            f"{owner}(ensemble=...) requires a linen module, because an NNX module holds the variables of one member. Create a trainer for each member."
        )
    if not isinstance(strategy, DataParallel):
        raise ConfigError(f"{owner}(ensemble=...) requires parallel=DataParallel(). Received: {type(strategy).__name__}.")
