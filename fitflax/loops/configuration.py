"""The task that the arguments of `Trainer` and `compile` configure, and checks of these arguments."""

import copy
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
import optax

import fitflax.losses as losses
import fitflax.optimizers as optimizers
from fitflax.data.adapt import Feeder
from fitflax.errors import ConfigError, NotReadyError, OptimizerError, integer_of
from fitflax.parallel import DataParallel, Strategy
from fitflax.parallel.processes import exchange
from fitflax.steps.gradients import Streams
from fitflax.steps.live_state import find_eval_params
from fitflax.steps.loss import Objective
from fitflax.steps.optimizer import Numerics, with_extra_arguments, with_loss_scale
from fitflax.steps.program import Program
from fitflax.steps.train_step import Task
from fitflax.triggers import Trigger

MakeTask = Callable[..., Task]  # Takes `objective`, `optimizer` and `numerics`.


class CurrentTask:
    """The task of a trainer, which each call of `compile` replaces."""

    def __init__(self, make_task: MakeTask, strategy: Strategy) -> None:
        self.make_task, self.strategy = make_task, strategy
        self.optimizer: optax.GradientTransformationExtraArgs | None = None  # `None` before `compile`.
        self._user_optimizer: Any = None
        self.program: Program | None = None  # `None` until it is needed.
        self.pad = True  # Whether short batches are padded.
        self.feeder = make_feeder(strategy, pad=True)
        self.steps_per_call: int | None = 1  # `None` for one or several, whichever is faster.
        self.choice: str | None = None  # A message about the number of steps of a call.
        self.described: dict[str, Any] = {}  # Arguments of `compile` as numbers and strings.

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self.optimizer is not None

    @property
    def numerics(self) -> Numerics:
        """The numerical settings."""
        return self.any_program().task.numerics

    def need_compiled(self, what: str) -> Program:
        """Returns the program; raises `NotReadyError` before `compile`."""
        if self.optimizer is None or self.program is None:
            raise NotReadyError(f"{what} requires a compiled trainer. Call compile(optimizer, loss, metrics) first.")
        return self.program

    def any_program(self) -> Program:
        """Returns the program; before `compile`, one that can only initialize and predict."""
        if self.program is None:
            self.program = Program(self.make_task(objective=Objective(), optimizer=None, numerics=Numerics()))
        return self.program

    def compile(
        self,
        optimizer: Any,
        loss: Any,
        metrics: Any = None,
        weighted_metrics: Any = None,
        loss_weights: Any = None,
        *,
        learning_rate: Any = None,
        pad: bool = True,
        steps_per_call: int | str = 1,
        numerics: Numerics = Numerics(),  # noqa: B008 (frozen)
        run_eagerly: bool = False,
        eval_params: Any = None,
    ) -> bool:
        """Replaces the task; arguments as in `Trainer.compile`. Returns whether the optimizer is a new one, whose state must be initialized."""
        transformation = optimizer_of(optimizer, learning_rate)
        number = None if steps_per_call == "auto" else integer_of("steps_per_call", steps_per_call, at_least=1, otherwise=" or 'auto'")
        eval_params = _eval_params_of(eval_params, numerics.ema_decay, transformation)
        if run_eagerly:
            _check_single_device(self.strategy)
        objective = Objective(loss, metrics, weighted_metrics, loss_weights)
        is_same = self.is_compiled and optimizer is self._user_optimizer and not isinstance(optimizer, str)
        transformation = with_extra_arguments(transformation)
        self.optimizer = with_loss_scale(transformation) if numerics.is_scaled else transformation
        self._user_optimizer = optimizer
        task = self.make_task(objective=objective, optimizer=self.optimizer, numerics=numerics)
        self.program = Program(task, run_eagerly=bool(run_eagerly), eval_params=eval_params)
        self.pad, self.steps_per_call = pad, number
        self.described = _described(optimizer=optimizer, loss=loss, learning_rate=learning_rate, eval_params=eval_params)
        self.feeder = make_feeder(self.strategy, pad=pad, accumulate_steps=numerics.accumulate_steps)
        return not is_same

    def discard(self) -> None:
        """Removes the optimizer and the program, so that `compile` must be called again."""
        self.optimizer = self.program = None

    def copy(self, make_task: MakeTask | None) -> "CurrentTask":
        """Returns a copy that shares the compiled steps. With `make_task`, the copy has a new task, whose steps are compiled again."""
        other, accumulate_steps = copy.copy(self), 1
        other.make_task, other.choice = make_task or self.make_task, None
        if self.program is not None:
            task = self.program.task
            accumulate_steps = task.numerics.accumulate_steps
            if make_task is not None:
                new_task = make_task(objective=task.objective, optimizer=task.optimizer, numerics=task.numerics)
                other.program = Program(new_task, run_eagerly=self.program.runs_eagerly, eval_params=self.program.eval_params.custom)
        other.feeder = make_feeder(self.strategy, pad=self.pad, accumulate_steps=accumulate_steps)
        return other


@dataclasses.dataclass(frozen=True)
class RestoreOptions:
    """Arguments of `Trainer.restore`: which part of a checkpoint is restored, and how.

    `is_resume` requires a checkpoint of the same kind of model, linen or NNX.
    """

    weights_only: bool = False
    partial: bool = False
    mapping: Mapping[str, str | None] | None = None
    cast: bool = False
    is_resume: bool = False

    @property
    def starts_over(self) -> bool:
        """Whether the optimizer and the step start over."""
        return self.weights_only or self.partial


def make_feeder(strategy: Strategy, *, pad: bool, accumulate_steps: int = 1) -> Feeder:
    """Returns a `Feeder` for the devices of a strategy."""
    return Feeder(strategy.batcher, pad=pad, accumulate_steps=accumulate_steps, make_part=strategy.part_batcher, exchange=exchange)


# -- arguments of `compile` --


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


def _eval_params_of(eval_params: Any, ema_decay: Any, optimizer: Any) -> Any:
    """Returns `eval_params`. If it and `ema_decay` are `None`, returns the function for a schedule-free optimizer, if the optimizer is one."""
    if eval_params is not None and not callable(eval_params):
        raise ConfigError(f"compile(eval_params=...) takes a function (opt_state, params) -> params. Received: {eval_params!r}.")
    if eval_params is not None and ema_decay is not None:
        raise ConfigError("compile(eval_params=...) and compile(ema_decay=...) both define the parameters for evaluation. Pass only one of them.")
    return find_eval_params(optimizer) if eval_params is None and ema_decay is None else eval_params


def _check_single_device(strategy: Strategy) -> None:
    # On several devices, dropout and batch statistics would not equal those of a compiled run.
    num_devices = strategy.num_replicas * strategy.num_partitions
    if num_devices > 1:
        raise ConfigError(
            f"compile(run_eagerly=True) requires a trainer on a single device. Received: a trainer on {num_devices} devices. "
            "Pass Trainer(model, parallel=DataParallel(jax.devices()[:1]))."
        )


def _described(**arguments: Any) -> dict[str, Any]:
    """Returns arguments as numbers and strings, and functions by name. Leaves out `None` and objects without a name."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in arguments.items()}
    simple = {name: value if isinstance(value, bool | int | float | str) else getattr(value, "__name__", None) for name, value in plain.items()}
    return {name: value for name, value in simple.items() if value is not None}


# -- arguments of `Trainer` --


def streams_of(owner: str, rngs: Any) -> Streams:
    """Returns the names of random streams. `rngs` names those of initialization and training, or is a dict with the keys `init`, `train` and `eval`."""
    if isinstance(rngs, Mapping):
        if set(rngs) - {"init", "train", "eval"}:
            raise ConfigError(f"{owner}(rngs=...) as a dict must have only the keys 'init', 'train' and 'eval'. Received: {list(rngs)}.")
        return Streams(*(_stream_names(owner, rngs.get(occasion, ())) for occasion in ("init", "train", "eval")))
    return Streams(_stream_names(owner, rngs), _stream_names(owner, rngs), ())


def _stream_names(owner: str, names: str | Iterable[str]) -> tuple[str, ...]:
    listed = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) for name in listed):
        raise ConfigError(f"{owner}(rngs=...) must be names of random streams, such as 'dropout'. Received: {names!r}.")
    return tuple(name for name in listed if name != "params")


def strategy_of(owner: str, parallel: Any) -> Strategy:
    """Returns the given strategy, by default `DataParallel()` over all devices."""
    if parallel is not None and not isinstance(parallel, Strategy):
        raise ConfigError(
            f"{owner}(parallel=...) must be a strategy, such as fitflax.parallel.DataParallel(). Received: {parallel!r}. "
            "To use a mesh, pass Sharded({'data': -1}, ...)."
        )
    return DataParallel() if parallel is None else parallel


def check_ensemble(owner: str, members: Any, strategy: Strategy, *, is_nnx: bool) -> None:
    """Raises `ConfigError` if `members` is not a positive integer, or the module or the strategy does not support ensembles."""
    if members is None:
        return
    integer_of(f"{owner}(ensemble=...)", members, at_least=1)
    if is_nnx:
        raise ConfigError(
            f"{owner}(ensemble=...) requires a linen module, because an NNX module holds the variables of one member. Create a trainer for each member."
        )
    if not isinstance(strategy, DataParallel):
        raise ConfigError(f"{owner}(ensemble=...) requires parallel=DataParallel(). Received: {type(strategy).__name__}.")


def check_called_with(owner: str, name: str, function: Any, *arguments: str, keywords: Sequence[str] = ()) -> None:
    """Raises `ConfigError` unless an overridden method accepts positional arguments and keywords with these names."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # The signature of a decorator may differ from that of the function it wraps.
    except (TypeError, ValueError):
        return  # Some callables have no signature.
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        called = ", ".join([*arguments, *(f"{keyword}={keyword}" for keyword in keywords)])
        raise ConfigError(f"{owner}.{name} is called as {name}({called}), but is defined as {name}{signature}: {error}.") from error


# -- arguments of several calls --


def check_counts(**counts: int | None) -> None:
    """Raises `ConfigError` unless each argument is a positive integer or `None`."""
    for name, value in counts.items():
        if value is not None:
            integer_of(name, value, at_least=1)


def trigger_of(owner: str, every: Any) -> Trigger:
    """Returns the given trigger; raises `ConfigError` if it is not one."""
    if not isinstance(every, Trigger):
        raise ConfigError(f"{owner}(every=...) takes a trigger, such as fitflax.every(steps=10). Received: {every!r}.")
    return every


def zeros(batch: Any) -> Any:
    """Returns `batch` with zeros in place of each `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, batch)


def group_name(name: Any) -> str:
    """Returns the group name of an evaluation's metrics; raises `ConfigError` if it is not a string, is empty, or is `train`."""
    if not isinstance(name, str) or name == "train" or not name:
        raise ConfigError(f"eval_loop(name=...) must be a nonempty string other than 'train', the group of the training metrics. Received: {name!r}.")
    return name
