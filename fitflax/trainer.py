"""`Trainer`, the facade: it checks arguments and calls the steps and loops, which are in other modules."""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, Self, TextIO, TypeVar, overload

import jax
import optax
from flax import linen as nn
from flax.core.scope import DenyList

import fitflax.keras_names as keras_names
import fitflax.optimizers as optimizers
from fitflax.callbacks import Callback
from fitflax.callbacks.callback_list import callbacks_of_call, callbacks_of_fit
from fitflax.callbacks.history import History
from fitflax.callbacks.notebook import is_notebook, print_table
from fitflax.checkpoints.checkpoint_files import FOR_INFERENCE, WHOLE, read_collectively
from fitflax.checkpoints.restore import RestoreReport
from fitflax.checkpoints.resume import load_checkpoint, warn_of_changes, warn_of_eval_params
from fitflax.checkpoints.save import save_checkpoint
from fitflax.checkpoints.weight_rules import WeightMapping
from fitflax.data import Source
from fitflax.data.batch import Selection
from fitflax.diagnostics import LearningRateCurve, NanReport
from fitflax.diagnostics.nan_hunt import WATCHED, hunt_nan, last_finite
from fitflax.diagnostics.rate_finder import find_learning_rate
from fitflax.errors import ConfigError, NotReadyError, integer_of, is_integer, no_attribute, warn
from fitflax.exporting import export_inference
from fitflax.leaves import as_config
from fitflax.logs import TimeSpent
from fitflax.loops import configuration, user_loops
from fitflax.loops.configuration import CurrentTask, RestoreOptions
from fitflax.loops.evaluation_loop import Evaluation, predict, predict_iter
from fitflax.loops.fit import adapt_validation_data, check_end, find_checkpoint, make_validation, num_batches_of, params_of, run_with_callbacks
from fitflax.loops.session import Session, unpadded_batch
from fitflax.loops.setup import RunComponents, RunPlan, check_restores_best, prepare_run, training_copy
from fitflax.loops.signals import Interruption
from fitflax.loops.summary import describe
from fitflax.loops.training_loop import Run
from fitflax.loops.user_loops import EvalLoop, TrainLoop, plan_of
from fitflax.loops.weights import load_weights, save_weights, split_frozen
from fitflax.models import TRANSIENT, adapt_model, mutable_filter
from fitflax.optimizers import with_hyperparams
from fitflax.parallel import Strategy
from fitflax.state import Batch, InferenceState, PyTree, TrainState
from fitflax.steps.compile import share_programs
from fitflax.steps.optimizer import Numerics
from fitflax.steps.train_step import EnsembleTask, Task, best_member, member_of
from fitflax.storage import Location
from fitflax.triggers import Trigger
from fitflax.triggers import every as make_every

if TYPE_CHECKING:
    from flax import nnx

_EVERY_STEP = make_every(steps=1)
_P = ParamSpec("_P")
_R = TypeVar("_R")

# Attributes of other trainers, and what to use instead.
_ATTRIBUTE_HINTS = {
    "params": "trainer.state.params",
    "opt_state": "trainer.state.opt_state",
    "batch_stats": "trainer.state.model_state['batch_stats']",
    "weights": "trainer.state.params",
    "get_weights": "trainer.state.params",
    "set_weights": "trainer.replace_params(params)",
    "callbacks": "fit(callbacks=[...])",
    "load": "trainer.restore(path)",
    "load_model": "trainer.restore(path)",
    "lr": "trainer.learning_rate",
    "layers": "trainer.summary()",
    "count_params": "trainer.summary()",
    "metrics_names": "list(history.history)",
    "predict_proba": "jax.nn.softmax(trainer.predict(x))",
}
_OPTIMIZER_HINTS = dict.fromkeys(("learning_rate", "lr"), "Use trainer.learning_rate instead")


class _Optimizer(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """An optax transformation that rejects attributes of Keras's optimizers instead of ignoring them."""

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            raise no_attribute(self, name, _OPTIMIZER_HINTS)

        def __setattr__(self, name, value):
            raise no_attribute(self, name, _OPTIMIZER_HINTS)


def _syncs_model(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Wraps a method of the trainer: reads the variables of an NNX module before it, and writes the newest ones back after it."""

    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        # `fit` builds a missing state itself, while its step is compiled, and `compile` needs none.
        with self._session.state.synced_with_model(builds_state=method.__name__ in ("compile", "fit")):
            return method(self, *args, **kwargs)

    return call


class Trainer:
    """Trains, evaluates and runs a linen or NNX module.

    Args:
        model: A `flax.linen` module; its mode keyword (`train`, `training` or `deterministic`), an argument of `__call__` or a field, is detected and set.
            Or an `flax.nnx` module, whose variables are the initial state and are updated when a call returns. Or two functions `(init, apply)`.
        eval_model: A module that replaces `model` in evaluation, prediction and export, with the same variables, for models whose configuration sets the
            mode: `model.clone(config=dataclasses.replace(config, deterministic=True))`, or `nnx.with_attributes(model, config=...)`. Its mode keyword is
            set, too. If `model` is `(init, apply)`, pass `(init, apply)`; this `init` is used only to compare the parameters.
        trainable: An NNX filter for the variables to train, such as `nnx.LoRAParam`; `nnx.Param` by default.
        seed: The seed of all randomness: initialization, dropout, the order of examples. An NNX module already has its variables and random streams.
        rngs: Names of the module's random streams for initialization and training, or `{"init": names, "train": names, "eval": names}`.
        inputs: The entries of a dict batch to pass to the module: a key or a tuple of keys (positional arguments), or `{argument: key}` (keywords).
        targets: The entries of a dict batch that are targets: a key, a tuple of keys, or `{name: key}`.
        parallel: The strategy: by default `DataParallel()`, replicas on all devices of all processes; or `Sharded(mesh, ...)`, which also splits the state.
        mutable: linen's filter for collections that training may change.
        transient: Collections that are never part of the state, such as those of sown values: they are removed after each call. By default `losses`,
            `summaries`, `intermediates` and `perturbations`. Values sown into `losses` are added to the loss.
        train_kwargs: Keyword arguments of `__call__` in training.
        eval_kwargs: Keyword arguments of `__call__` (of `eval_model` if given) in evaluation and prediction.
        ensemble: The number of members to train together on the same batches; member `i` has the seed `seed + i`. All arrays of the state except the step get
            a leading axis of members, and outputs are `[batch, members, ...]`. Logs have means over members, and the values of all members, such as
            `loss_by_member`. Only for linen modules and `DataParallel`.

    Raises:
        ConfigError: An argument is invalid.

    >>> import numpy as np
    >>> trainer = Trainer(nn.Dense(1))
    >>> trainer.compile("sgd", loss="mse", learning_rate=0.1)
    >>> x = np.linspace(0, 1, 64, dtype=np.float32)[:, None]
    >>> history = trainer.fit(x, 2 * x, epochs=20, verbose=0)
    >>> history.history["loss"][-1] < 0.1
    True
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Warns about methods of other trainers, which are never called."""
        super().__init_subclass__(**kwargs)
        for name in filter(vars(cls).__contains__, keras_names.METHODS):
            warn(f"{cls.__name__} defines {name}, which fitflax never calls. {keras_names.METHODS[name]}. If you call it yourself, rename it.")

    @keras_names.with_hints("Trainer", keras_names.TRAINER, ConfigError)
    def __init__(
        self,
        model: "nn.Module | nnx.Module | tuple[Callable[..., Any], Callable[..., Any]]",
        *,
        eval_model: "nn.Module | nnx.Module | tuple[Callable[..., Any], Callable[..., Any]] | None" = None,
        trainable: Any = None,
        seed: int = 0,
        rngs: Sequence[str] | Mapping[str, Sequence[str]] = ("dropout",),
        inputs: str | tuple[str, ...] | dict[str, str] | None = None,
        targets: str | tuple[str, ...] | dict[str, str] | None = None,
        parallel: Strategy | None = None,
        mutable: Any = DenyList("params"),  # noqa: B008 (frozen)
        transient: Sequence[str] = TRANSIENT,
        train_kwargs: Mapping[str, Any] | None = None,
        eval_kwargs: Mapping[str, Any] | None = None,
        ensemble: int | None = None,
    ) -> None:
        seed = integer_of("Trainer(seed=...)", seed)
        self._model, self._eval_model = model, eval_model
        self._selection = Selection(inputs, targets)
        self._history, self._members = History(), ensemble
        strategy = configuration.strategy_of("Trainer", parallel)
        transient = tuple(transient)
        kwargs: dict[str, Any] = {"train_kwargs": train_kwargs, "eval_kwargs": eval_kwargs, "keyword_inputs": isinstance(inputs, dict)}
        adapted, module_variables = adapt_model(model, eval_model=eval_model, trainable=trainable, transient=transient, **kwargs)
        configuration.check_ensemble("Trainer", ensemble, strategy, is_nnx=module_variables is not None)
        streams, collections = configuration.streams_of("Trainer", rngs), mutable_filter(mutable, transient)
        self._parts: dict[str, Any] = {"model": adapted, "strategy": strategy, "streams": streams, "mutable": collections, "transient": transient}
        self._session = Session(CurrentTask(self._make_task, strategy), seed, module_variables, ensemble)
        if is_notebook(sys.stdout):
            share_programs()  # Running a notebook cell again redefines the module's class.

    def _make_task(self, **configured: Any) -> Task:
        kind, model = type(self), self._parts["model"]
        configuration.check_called_with(kind.__name__, "compute_loss", self.compute_loss, *model.loss_arguments, keywords=model.loss_keywords)
        configuration.check_called_with(kind.__name__, "train_step", self.train_step, "state", "batch")
        compute_loss = self.compute_loss if self._overrides("compute_loss") else None
        custom_step = self.train_step if self._overrides("train_step") else None
        make = Task if self._members is None else functools.partial(EnsembleTask, members=self._members)
        return make(**self._parts, **configured, compute_loss=compute_loss, custom_step=custom_step)

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(Trainer, name)

    if not TYPE_CHECKING:  # Otherwise type checkers would accept any attribute name.

        def __getattr__(self, name):
            """Raises an error that says where to find an attribute of other trainers."""
            if hasattr(type(self), name):  # A property raised an AttributeError; its message is more helpful.
                return object.__getattribute__(self, name)
            raise no_attribute(self, name, {known: f"Use {here} instead" for known, here in _ATTRIBUTE_HINTS.items()})

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses to be copied or pickled: devices and compiled programs cannot be, and two trainers must not train one state."""
        raise TypeError(
            f"A {type(self).__name__} cannot be copied or pickled, because it holds devices and compiled programs. Create another one; with_seed(seed) returns "
            "one that is compiled the same way. To transfer the state, use save(path) and restore(path)."
        )

    def __repr__(self) -> str:
        """Returns the module's class, the arguments of `compile` and the step.

        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer
        Trainer(Dense, not compiled)
        >>> trainer.compile("adam", "mse")
        >>> trainer
        Trainer(Dense, optimizer='adam', loss='mse', step=0)
        """
        session = self._session
        arguments = [f"{name}={value!r}" for name, value in session.task.described.items()] if session.task.is_compiled else ["not compiled"]
        step = [f"step={self.step}"] if session.task.is_compiled or session.state.live is not None else []
        return f"{type(self).__name__}({', '.join([self._parts['model'].name, *arguments, *step])})"

    # -- attributes --

    @property
    def model(self) -> Any:
        """The module as passed. After each call, an NNX module holds the newest variables."""
        return self._model

    @property
    def eval_model(self) -> Any:
        """The module for evaluation as passed; `None` if `model` is evaluated."""
        return self._eval_model

    @property
    @_syncs_model
    def state(self) -> TrainState:
        """The newest state. It stays valid during further training.

        Raises:
            NotReadyError: Before `build`, `fit` or `restore`.
        """
        return self._session.state.need("state").lend()

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return 0 if self._session.state.live is None else self._session.state.live.step

    @property
    def history(self) -> History:
        """The history of the last `fit`."""
        return self._history

    @property
    @_syncs_model
    def learning_rate(self) -> float:
        """The learning rate, for an optimizer given by name or wrapped in `optax.inject_hyperparams`; setting it never recompiles.

        Raises:
            OptimizerError: The learning rate cannot be read, or cannot be set, for example because a schedule computes it.
            NotReadyError: Before `build`, `fit` or `restore`.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("adam", "mse", learning_rate=0.5)
        >>> trainer.build(np.ones((4, 2), np.float32))
        >>> trainer.learning_rate /= 2
        >>> trainer.learning_rate
        0.25
        """
        return self._session.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        with self._session.state.synced_with_model():  # The decorator would hide the setter's types from type checkers.
            self._session.set_learning_rates("learning_rate", {None: value})

    @property
    @_syncs_model
    def learning_rates(self) -> dict[str, float]:
        """All learning rates that can be read, by the label of their parameter group, as in `optax.multi_transform`. Assigning a dict sets the rates in it.

        Raises:
            OptimizerError: A rate that is set does not exist, or a schedule computes it.
            NotReadyError: Before `build`, `fit` or `restore`.

        >>> import numpy as np
        >>> groups = {"slow": optimizers.get("sgd", 0.25), "fast": optimizers.get("sgd", 0.5)}
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile(optax.multi_transform(groups, {"kernel": "slow", "bias": "fast"}), "mse")
        >>> trainer.build(np.ones((4, 2), np.float32))
        >>> trainer.learning_rates = {"slow": 0.125}
        >>> trainer.learning_rates
        {'fast': 0.5, 'slow': 0.125}
        """
        rates = optimizers.get_learning_rates(self._session.state.need("learning_rates").borrow().opt_state)
        return {label: float(rate) for label, rate in jax.device_get(rates).items()}

    @learning_rates.setter
    def learning_rates(self, values: Mapping[str, float]) -> None:
        with self._session.state.synced_with_model():
            self._session.set_learning_rates("learning_rates", values)

    @property
    def stop_training(self) -> bool:
        """Whether a stop was requested; setting it to `True` calls `stop()`."""
        return self._session.is_stopping

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        if value:
            self.stop("stop_training was set")
        else:
            self._session.clear_stop()

    @property
    def stop_reason(self) -> str | None:
        """The reason why the last `fit` stopped early, or is about to; `None` if it did not."""
        return self._session.stop_reason

    def stop(self, reason: str = "stop() was called") -> None:
        """Stops a running `fit` after the current step; validation and end hooks still run.

        Args:
            reason: The text for `stop_reason`. If several calls stop the same run, the first reason is kept; if several processes stop at the same step, all
                use the same reason.

        >>> import numpy as np
        >>> from fitflax.callbacks import LambdaCallback
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("sgd", "mse")
        >>> stop = LambdaCallback(on_epoch_end=lambda epoch, logs: trainer.stop("one epoch is enough"))
        >>> history = trainer.fit(np.ones((8, 2)), np.ones((8, 1)), epochs=9, callbacks=[stop], verbose=0)
        >>> history.epoch, trainer.stop_reason
        ([0], 'one epoch is enough')
        """
        self._session.stop(reason)

    # -- preparation --

    @keras_names.with_hints("Trainer.compile", keras_names.COMPILE, ConfigError)
    @_syncs_model
    def compile(
        self,
        optimizer: str | optax.GradientTransformation,
        loss: Any = None,
        metrics: Any = None,
        *,
        learning_rate: float | Callable[[Any], Any] | None = None,
        loss_weights: Any = None,
        weighted_metrics: Any = None,
        pad: bool = True,
        steps_per_call: int | str = 1,
        accumulate_steps: int = 1,
        precision: str = "float32",
        ema_decay: float | None = None,
        run_eagerly: bool = False,
        eval_params: Callable[[PyTree, PyTree], PyTree] | None = None,
    ) -> None:
        """Configures the optimizer, the loss and the metrics. Calling it again keeps parameters and collections.

        Args:
            optimizer: Any optax transformation, or a name, such as `"adam"`. Its `update` receives `params`, and each of the following arguments that it
                accepts: `value`, the loss of the batch; `grad`, its gradient; `value_fn` or `obj_fn`, the loss as a function of the parameters; and
                `grad_fn`, its gradient as a function. If it is not the same object as before, its state starts over.
            loss: A name, or a function `(outputs, targets) -> values` with one value per example, `[batch]` or `[batch, ...]`. For several outputs, a dict
                or list of losses by key or attribute, nested for nested outputs; `None` skips an output. `None` if the module sows its losses. Targets are
                also given by output; if only one output has a loss, they may be given directly. Outputs are logits for all crossentropies.
            metrics: Names, metrics, functions of per-example values, or a dict of these by log key. They ignore sample weights.
            learning_rate: The rate of an optimizer given by name: a number or an optax schedule; by default Keras's.
            loss_weights: A number, or numbers by output, that multiply the losses.
            weighted_metrics: Metrics that use sample weights.
            steps_per_call: The maximum number of steps in one call of the device. `"auto"` tries 1 and 16 on the first batch, with copies of the state, and
                uses the faster one. A call has fewer steps if their batches would take more than 64 MB. Results differ from those of single steps only by
                rounding. A call ends when a step trigger fires and at the end of an epoch; batch hooks, signals, time triggers and `stop` take effect
                between calls. A resume with the same setting or with `"auto"` uses the number of the resumed run.
            pad: Whether to pad short batches to the full shape. If not, each size is compiled separately and must be divisible by the number of devices.
            accumulate_steps: The number of micro-batches that each batch is split into. A step processes them one after another, so that only the activations
                of one are in memory, and uses the gradient of the whole batch. Batches are padded to a multiple of it. Evaluation and prediction do not split.
                Scalar and sown losses are averaged over micro-batches, weighted by their real examples.
            precision: The compute dtype of the module: `"float32"`, `"bfloat16"`, or `"float16"` with loss scaling. Parameters and inputs are cast. Stored
                values, outputs, losses and metrics are float32. Modules with their own `dtype` keep it.
            ema_decay: The decay of averaged parameters in the state, `decay * average + (1 - decay) * parameters` after each step. Evaluation and prediction
                use them; `state.params` are the parameters of the last step.
            run_eagerly: Whether to run the steps of this trainer without jit, as inside `jax.disable_jit()`: `print` and debuggers see concrete values.
                Results equal those of compiled steps up to rounding, and a run can be resumed either way. The trainer must use a single device.
            eval_params: A function `(opt_state, params) -> params`, for optimizers that evaluate other parameters than they train, such as averages in the
                optimizer state. Evaluation, prediction and export use its result; `state.params` are the trained parameters. For
                `optax.contrib.schedule_free`, even inside other transformations, it is found automatically. To evaluate the trained parameters, pass
                `lambda opt_state, params: params`.

        Raises:
            OptimizerError: `optimizer` is neither a known name nor an optax transformation.
            LossError: A loss is unknown.
            MetricError: A metric is unknown.
            ModelError: The NNX module was changed after the trainer was created.
            ConfigError: An argument is invalid, or `fit` is running.

        >>> trainer = Trainer(nn.Dense(10))
        >>> trainer.compile("adam", "sparse_categorical_crossentropy", ["accuracy"], learning_rate=1e-3)
        >>> trainer.compile(optax.adamw(1e-3), lambda outputs, targets: (outputs[:, 0] - targets) ** 2, {"mae": "mean_absolute_error"})
        """
        numerics = Numerics(accumulate_steps, precision, ema_decay)
        if self._overrides("train_step"):
            numerics.check_custom_step()
        self._session.compile(
            optimizer,
            loss,
            metrics,
            weighted_metrics,
            loss_weights,
            learning_rate=learning_rate,
            pad=pad,
            steps_per_call=steps_per_call,
            numerics=numerics,
            run_eagerly=run_eagerly,
            eval_params=eval_params,
        )

    def with_seed(self, seed: int) -> Self:
        """Returns a new trainer with the same configuration, another seed and no state.

        The two trainers share only their compiled steps, so that the next member of an ensemble starts without compiling. If a subclass overrides
        `compute_loss` or `train_step`, which may depend on the instance, each trainer compiles its own steps.

        An NNX module is copied in its current state, whatever the seed; for other variables, create a new trainer with a new module.

        Args:
            seed: The seed of all randomness, as in `Trainer`.

        Raises:
            ConfigError: `seed` is not a valid seed.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("sgd", "mse")
        >>> members = [trainer.with_seed(seed) for seed in range(3)]
        >>> for member in members:
        ...     member.build((np.ones((8, 2), np.float32),))
        >>> len({float(member.state.params["kernel"][0, 0]) for member in members})
        3
        """
        return self._copy_without_state(integer_of("with_seed(seed=...)", seed), self._session.state.hyperparams)

    def with_hyperparams(self, *, seed: int | None = None, **values: float | Sequence[float]) -> Self:
        """Returns a new trainer with the same configuration, other initial hyperparameters and no state.

        The two trainers share their compiled steps, as with `with_seed`: trials of a search that differ only in numbers compile once. A restored checkpoint
        replaces the values with its own.

        Args:
            seed: The seed of all randomness; by default that of this trainer.
            **values: Finite numbers by name; for an `ensemble` also a sequence with one number per member. Names are `learning_rate` of an optimizer given
                by name, hyperparameters of `optax.inject_hyperparams`, such as `weight_decay`, and variables of the module's collection `"hyperparams"`,
                such as `self.variable("hyperparams", "rate", lambda: jnp.float32(0.1)).value`. If the module and the optimizer use the same name, the value
                of the module is set.

        Raises:
            ConfigError: `seed` is not a valid seed.
            NotReadyError: Before `compile`.
            OptimizerError: There is no such hyperparameter, or it cannot be set. Raised by `build` or `fit` of the new trainer if this one has no state.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("sgd", "mse", learning_rate=0.1)
        >>> trials = [trainer.with_hyperparams(learning_rate=rate) for rate in (0.1, 0.01)]
        >>> for trial in trials:
        ...     trial.build((np.ones((8, 2), np.float32),))
        >>> [round(trial.learning_rate, 6) for trial in trials]
        [0.1, 0.01]
        """
        session = self._session
        seed = integer_of("with_hyperparams(seed=...)", session.seed if seed is None else seed)
        session.task.need_compiled("with_hyperparams")
        if session.state.live is not None and session.state.live.is_intact and not session.state.is_serving:
            with_hyperparams(session.state.live.borrow(), values)
        return self._copy_without_state(seed, {**session.state.hyperparams, **values})

    def select(self, member: int | str) -> Self:
        """Returns a trainer for one member of an ensemble, with a copy of its state, as if the member had been trained alone.

        Args:
            member: The number of the member, or a log key such as `"val_loss"` for the member with the best finite value at the end of the last epoch.

        Raises:
            ConfigError: The trainer has no `ensemble`, there is no such member, or the key or its direction is unknown.
            NotReadyError: Before `fit`.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1), ensemble=3)
        >>> trainer.compile("adam", "mse")
        >>> x = np.ones((8, 2), np.float32)
        >>> history = trainer.fit(x, x[:, :1], epochs=2, verbose=0)
        >>> best = trainer.select("loss")
        >>> best.step, best.predict(x).shape, trainer.predict(x).shape
        (2, (8, 1), (8, 3, 1))
        """
        session = self._session
        if session.members is None:
            raise ConfigError("select() requires an ensemble, but this trainer is not one. Create it with Trainer(model, ensemble=5).")
        session.task.need_compiled("select")
        state = session.state.need("select").borrow()
        kinds = session.task.any_program().dry_run.kinds
        number = best_member(self._history.history, member, kinds) if isinstance(member, str) else member
        if not is_integer(number, 0) or number >= session.members:
            raise ConfigError(f"select(member) takes a number from 0 to {session.members - 1}, or a log key such as 'val_loss'. Received: {member!r}.")
        other = self._copy()
        other._members = None
        other._session = session.copy_without_state(session.seed + int(number), other._make_task, member=int(number))
        other._session.state.take_member(session.state, member_of(state, int(number)))
        return other

    def _copy(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self), _history=History())
        return other

    def _copy_without_state(self, seed: int, hyperparams: Mapping[str, Any]) -> Self:
        other = self._copy()
        is_task_custom = self._overrides("compute_loss") or self._overrides("train_step")
        other._session = self._session.copy_without_state(seed, other._make_task if is_task_custom else None)
        other._session.task.make_task = other._make_task  # The method of this trainer would keep its state on the devices.
        other._session.state.hyperparams = dict(hyperparams)
        if other._session.state.module_variables is not None:
            other._model = other._session.state.module_variables.model
        return other

    @_syncs_model
    def build(self, batch: Any) -> None:
        """Initializes the state from the shapes and dtypes of a batch; its values are not used. `fit` does this automatically.

        Args:
            batch: A training batch: `x`, `(x,)`, `(x, y)`, `(x, y, sample_weight)` or a dict; arrays or `jax.ShapeDtypeStruct`.

        Raises:
            NotReadyError: Before `compile`.
            DataError: `batch` is not a valid batch.
            ModelError: The module does not run on it.
            ConfigError: `fit` is running.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(3))
        >>> trainer.compile("sgd", "mse")
        >>> trainer.build(jax.ShapeDtypeStruct((8, 2), np.float32))
        >>> jax.tree.map(np.shape, trainer.state.params)
        {'bias': (3,), 'kernel': (2, 3)}
        """
        session = self._session
        session.check_idle("build")
        session.task.need_compiled("build")
        session.state.build(session.data_adapter.sample(self._selection.split(configuration.zeros(batch))))
        session.begin_run()

    @_syncs_model
    def summary(self, sample: Any = None, *, memory: bool = False, sharding: bool = False, file: TextIO | None = None) -> None:
        """Prints layers with shapes and parameters, the sizes of the parts of the state, and the compute cost of the model.

        Each array is counted once, even if several devices hold it. Only shapes are computed. Model FLOPs count the floating-point operations of matrix
        products and convolutions, without recomputation by `nn.remat`, loops of unknown length, and kernels written outside JAX; those of training are three
        times those of the forward pass. The memory of the compiled step is JAX's estimate.

        Args:
            sample: A batch as in `build`, or only inputs (pass several as `((x1, x2),)`); by default the first batch of the last call.
            memory: Whether to compile the training step for a batch like `sample`, which then needs targets, and show its memory. `fit` usually reuses the
                compiled step.
            sharding: Whether to show where each array of the state is placed, and how many bytes of it a device holds.
            file: The output file; by default standard output, or in a notebook a scrollable table.

        Raises:
            NotReadyError: There was no batch yet and `sample` is missing, or `memory` is used before `compile`.
            DataError: `sample` is not a valid batch.
            ModelError: The module does not run on it.
            ShardingError: The state does not fit the mesh.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(3))
        >>> trainer.compile("sgd", "mse")
        >>> trainer.summary(np.ones((8, 2), np.float32))
        <BLANKLINE>
                                    Dense Summary
        ...
        Total number of trainable weights: 9 = 36 B
        Optimizer state: 2 = 8 B
        Model FLOPs per example: 12 forward, 36 in training
        """
        triple = None if sample is None else self._selection.split(configuration.zeros(sample), inputs_only=not memory)
        table = describe(self._session, triple, memory=memory, sharding=sharding)
        if file is None and is_notebook(sys.stdout):
            print_table(table)
        else:
            print(table, file=file)

    @_syncs_model
    def replace_state(self, state: TrainState | InferenceState) -> None:
        """Replaces the current state with a copy of another one.

        Args:
            state: A state with the same structure, shapes and dtypes; or an `InferenceState`, at any time, for evaluation and prediction only. For a
                linen module in half precision, its parameters may be float32.

        Raises:
            RestoreError: The structure, shapes or dtypes differ.
            NotReadyError: Before `build`, `fit` or `restore`.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("sgd", "mse")
        >>> x = np.ones((8, 2), np.float32)
        >>> trainer.build((x, x[:, :1]))
        >>> initial = trainer.state
        >>> history = trainer.fit(x, x[:, :1], epochs=3, verbose=0)
        >>> trainer.replace_state(initial)
        >>> trainer.step
        0
        """
        if isinstance(state, InferenceState):
            self._session.state.serve(state)
        else:
            self._session.state.replace(state)

    @_syncs_model
    def replace_params(self, params: PyTree) -> None:
        """Replaces the parameters. The optimizer state and the averaged parameters, which were computed from the old ones, start over.

        The step, the random key and collections such as `batch_stats` are kept, and so are hyperparameters of the optimizer that can be set, such as the
        learning rate. A schedule inside the optimizer starts over. To keep the optimizer state, call `replace_state(state.replace_params(params))`.

        Args:
            params: Parameters with the structure, shapes and dtypes of `state.params`, such as `model.init(key, x)["params"]`.

        Raises:
            ConfigError: The structure, shapes or dtypes differ.
            NotReadyError: Before `build`, `fit` or `restore`.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("adam", "mse", ema_decay=0.99)
        >>> trainer.build((np.ones((4, 2), np.float32),))
        >>> trainer.replace_params({"kernel": np.ones((2, 1), np.float32), "bias": np.zeros(1, np.float32)})
        >>> trainer.predict(np.ones((1, 2), np.float32))
        array([[2.]], dtype=float32)
        """
        self._session.state.replace_params(params)

    @_syncs_model
    def inference_state(self) -> InferenceState:
        """Returns the part of the current state that evaluation and prediction need; it stays valid during further training.

        With `compile(eval_params=...)`, its parameters are the evaluated ones.

        Raises:
            NotReadyError: Before `build`, `fit` or `restore`.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(3))
        >>> trainer.compile("sgd", "mse")
        >>> trainer.build(np.ones((4, 2), np.float32))
        >>> trainer.model.apply(trainer.inference_state().variables, np.ones((4, 2), np.float32)).shape
        (4, 3)
        """
        state = self._session.state.need("inference_state", evaluates=True).lend()
        program = self._session.task.any_program()
        return dataclasses.replace(state.for_inference(), params=program.eval_params(state))

    # -- custom training --

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the losses of a batch; override it for a loss that needs more than outputs and targets.

        It must be pure: it is traced, on one replica's shard of the batch. The signature of an override, and of `super().compute_loss`, which computes the
        compiled loss, depends on the model:

        * linen modules and functions: `compute_loss(self, params, model_state, batch, *, rngs, train)` returns `(values, new_model_state, aux)`;
        * NNX modules: `compute_loss(self, model, batch, *, train)` returns `(values, aux)` or only `values`.

        Args:
            *args: `params` and `model_state`, the parameters and the other collections; or `model`, an NNX module with these variables in the mode of
                `train`, whose changes are kept. Then `batch`, with `x`, `y`, `mask` and `weights`; mask and weights are applied to the returned values.
            **kwargs: `train`, whether this is training; if not, the model is `eval_model` if there is one. `rngs`, a key for each random stream; for NNX
                modules an `nnx.Rngs`, and only if the override has this argument.

        Returns:
            Values per example, `[batch]` or `[batch, ...]`, or a dict of these whose means are added; changed collections, with `losses` if the module sows
            values into it; and `aux`, a flat dict of scalars or values per example for the logs. Its entry `"outputs"` is passed to the compiled metrics.

        >>> import numpy as np
        >>> class Regularized(Trainer):
        ...     def compute_loss(self, params, model_state, batch, *, rngs, train):
        ...         values, changed, aux = super().compute_loss(params, model_state, batch, rngs=rngs, train=train)
        ...         penalty = 1e-3 * optax.tree.norm(params, squared=True)
        ...         return values + penalty, changed, {**aux, "penalty": penalty}
        >>> trainer = Regularized(nn.Dense(1))
        >>> trainer.compile("sgd", "mse")
        >>> list(trainer.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0).history)
        ['loss', 'penalty']
        """
        return self._session.task.need_compiled("compute_loss").task.default_loss(*args, **kwargs)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, tuple[jax.Array, jax.Array]]]:
        """Returns the state after one step, and logs `{key: (sum, weight)}`; override it for custom updates. Must be pure: it is traced.

        Under `DataParallel` it runs on one replica's shard of the batch. Afterwards, parameters, optimizer state and collections of all replicas are made
        equal: floating-point values become their mean. `sum_replicas` sums gradients over the shards. Under `Sharded` it runs on the whole batch.
        `optimizer` and `step_rngs` provide the compiled optimizer and random keys. `step` and `ema_params` are updated for you.

        Logs are means over the epoch, so metrics that are not means (r2, rmse, perplexity) become means of their values per batch. The compiled loss and
        metrics are then used only in evaluation. If the override calls `super().train_step`, metrics whose value is an array are not logged in training.

        An NNX module is created with `merge(params, state.model_state, train=True)`; `split` returns its collections. With layers in fp8, the override must
        replace the collection `_overwrite_with_gradient` with its gradient.

        Args:
            state: The state before the step.
            batch: The replica's shard of the batch, or the whole batch. An override must apply its `mask`, and its `weights` unless they are `None`.

        >>> import numpy as np
        >>> class SignTrainer(Trainer):
        ...     def train_step(self, state, batch):
        ...         num_examples = self.sum_replicas(batch.mask.sum())
        ...         def loss(params):
        ...             outputs = self.model.apply({"params": params}, batch.x, rngs=self.step_rngs(state))
        ...             values = ((outputs - batch.y) ** 2).mean(axis=-1) * batch.mask
        ...             return values.sum() / num_examples, values
        ...         grads, values = jax.grad(loss, has_aux=True)(state.params)
        ...         grads = jax.tree.map(jax.numpy.sign, self.sum_replicas(grads))
        ...         return state.apply_gradient(grads, self.optimizer), {"loss": (values.sum(), batch.mask.sum())}
        >>> trainer = SignTrainer(nn.Dense(1))
        >>> trainer.compile("sgd", learning_rate=0.05)
        >>> x = np.linspace(0, 1, 64, dtype=np.float32)[:, None]
        >>> trainer.fit(x, 2 * x, epochs=20, verbose=0).history["loss"][-1] < 0.1
        True
        """
        task = self._session.task.need_compiled("train_step").task
        done = task.update(state, batch, unify=False)
        return done.state, task.weighted_logs(done.metrics, batch)

    @property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The optax transformation passed to or created by `compile`, for a custom `train_step`.

        See `train_step` for an example.

        Raises:
            NotReadyError: Before `compile`.
        """
        optimizer = self._session.task.need_compiled("optimizer").task.optimizer
        assert optimizer is not None
        return _Optimizer(*optimizer)

    def sum_replicas(self, tree: PyTree) -> PyTree:
        """Returns the sum of arrays over all replicas, inside `train_step` and `compute_loss`; under `Sharded`, returns its argument.

        See `train_step` for an example.

        Args:
            tree: Arrays of one replica, such as a gradient or the number of examples in its shard of the batch.

        Raises:
            NotReadyError: Before `compile`.
        """
        return self._session.task.need_compiled("sum_replicas").task.strategy.sum(tree)

    def step_rngs(self, state: TrainState) -> dict[str, jax.Array]:
        """Returns a key for each of the module's random streams in training, for this step and replica, inside `train_step`.

        See `train_step` for an example.

        Args:
            state: The state before the step.

        Returns:
            `{stream: key}`, for the `rngs` of the module's `apply`.

        Raises:
            NotReadyError: Before `compile`.
        """
        return self._session.task.need_compiled("step_rngs").task.step_rngs(state)

    def merge(self, params: PyTree, model_state: Mapping[str, PyTree], *, train: bool = False) -> Any:
        """Returns an NNX module with parameters and collections, such as those of `state`; changes to the module do not affect them.

        Use it in callbacks, because the module itself is only updated after the run, and in `train_step`, where replicas get different random streams.

        Args:
            params: The parameters.
            model_state: The other collections.
            train: Whether the module is in training mode.

        Raises:
            ConfigError: The trainer's model is not an NNX module.

        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> trainer = Trainer(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> trainer.merge(trainer.state.params, trainer.state.model_state)(jnp.ones((4, 2))).shape
        (4, 3)
        """
        return self._session.task.any_program().task.merge(params, model_state, train=train)

    def split(self, model: Any) -> tuple[PyTree, dict[str, PyTree]]:
        """Returns the parameters and collections of an NNX module that `merge` created.

        Args:
            model: The module, whose variables may have changed.

        Raises:
            ConfigError: The trainer's model is not an NNX module.
            ModelError: The module has new variables.

        >>> from flax import nnx
        >>> trainer = Trainer(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> model = trainer.merge(trainer.state.params, trainer.state.model_state)
        >>> params, model_state = trainer.split(model)
        >>> sorted(params)
        ['bias', 'kernel']
        """
        variables = self._session.task.any_program().task.model.split(model)
        return variables.pop("params"), variables

    # -- data --

    def _to_source(self, call: str, data: Any, *arguments: Any, **options: Any) -> Source:
        return self._session.data_adapter.adapt(data, *arguments, call=call, selection=self._selection, **options)

    # -- training --

    @keras_names.with_hints("Trainer.fit", keras_names.FIT, ConfigError)
    @_syncs_model
    def fit(
        self,
        data: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        initial_epoch: int = 0,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        shuffle: bool = True,
        drop_remainder: bool = False,
        validation_data: Any = None,
        validation_split: float = 0.0,
        validation_batch_size: int | None = None,
        validation_steps: int | None = None,
        validation_freq: int | Sequence[int] | Trigger = 1,
        class_weight: Mapping[int, float] | None = None,
        callbacks: Iterable[Callback] | None = (),
        log_every: int = 50,
        resume: str | os.PathLike[str] | bool | None = None,
        verbose: int | str = "auto",
        fast_dev_run: int = 0,
        overfit_batches: int = 0,
        config: Any = None,
    ) -> History:
        """Trains the model and returns the history of the run.

        Args:
            data: Arrays `[examples, ...]`, alone or nested in lists, tuples, dicts and dataclasses; data frames; a Hugging Face dataset; or anything that
                yields batches: a PyTorch `DataLoader`, `tf.data`, Grain, a Keras `PyDataset`, an iterable, a generator, or a function that returns an
                iterator. Inputs whose arrays share no axis of examples, such as graphs, are passed whole: the number of examples is then that of the targets
                or weights, and an example whose weights are all 0 is padding.
            y: Targets, for arrays.
            sample_weight: Weights `[examples]` or `[examples, ...]`, for arrays.
            steps: The number of steps.
            epochs: The epoch index at which to end. With `steps`, training ends at whichever comes first; with neither, after one epoch.
            initial_epoch: The index of the first epoch.
            batch_size: The number of examples per batch, for arrays, data frames, Hugging Face and Ray datasets, `TokenFile`; 32 by default.
            steps_per_epoch: The number of steps per epoch; by default an epoch is one iteration over the data.
            shuffle: Whether to shuffle arrays before each iteration over them, in an order that depends on the seed.
            drop_remainder: Whether to drop a short last batch of data that takes `batch_size`. If not, it is padded by repeating rows with weight zero,
                which batch normalization sees.
            validation_data: Validation data, as in `data`, or `(x, y[, sample_weight])` of arrays; or a dict of several sets by name.
            validation_split: The fraction, between 0 and 1, of arrays, a Hugging Face dataset or a `TokenFile` to hold out, from the end, for validation.
            validation_batch_size: The number of examples per validation batch; `batch_size` by default.
            validation_steps: The number of batches per validation; all by default.
            validation_freq: When to validate: an interval in epochs, a list of epochs (counted from 1), or a trigger.
            class_weight: `{label: weight}`, multiplied with sample weights; missing labels have weight 1.
            callbacks: Callbacks, such as `ModelCheckpoint`.
            log_every: The interval of log points in steps, for callbacks that watch the whole run, such as `TerminateOnNaN`.
            resume: `"auto"` resumes from the newest intact checkpoint of the run's only `ModelCheckpoint`, or starts a new run if there is none (an error if
                another callback's directory has checkpoints of an earlier run); `True` requires a checkpoint; a path names one. `steps` and `epochs` count from
                the beginning of the resumed run.
            verbose: 0 for silence, 2 for plain lines, 1 or `"auto"` for a progress bar in a terminal or a notebook and plain lines elsewhere.
            fast_dev_run: The number of batches of training and of each validation in a test run, which calls all hooks, but leaves out callbacks that write
                files and does not resume.
            overfit_batches: The number of batches to overfit: every epoch trains on only these first batches of the data, in order.
            config: The configuration of the run, only to be saved in the checkpoints' `metadata.json` and shown by trackers and TensorBoard: a dict, a
                dataclass, an `argparse.Namespace`, or an object of OmegaConf or `ml_collections`.

        Raises:
            NotReadyError: Before `compile`.
            ConfigError: Arguments are invalid, alone or in combination.
            DataError: The data cannot be turned into batches.
            ModelError: The module does not run on the first batch.
            LossError: The loss does not fit the outputs and targets.
            MetricError: A metric does not fit the outputs and targets.
            CallbackError: The callbacks cannot work.
            CheckpointError: A checkpoint, or its directory, cannot be used.

        >>> import numpy as np
        >>> from fitflax.callbacks import EarlyStopping
        >>> x = np.linspace(0, 1, 64, dtype=np.float32)[:, None]
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("adam", "mse", ["mae"], learning_rate=0.1)
        >>> history = trainer.fit(x, 2 * x, epochs=50, validation_split=0.25, callbacks=[EarlyStopping("val_loss", patience=2)], verbose=0)
        >>> list(history.history)
        ['loss', 'mae', 'val_loss', 'val_mae']
        """
        session, spent = self._session, TimeSpent()
        session.need_idle("fit")
        configuration.check_counts(steps=steps, epochs=epochs, steps_per_epoch=steps_per_epoch, log_every=log_every)
        configuration.check_counts(validation_steps=validation_steps, validation_batch_size=validation_batch_size)
        initial_epoch = integer_of("initial_epoch", initial_epoch)
        trial, num_overfit = num_batches_of(fast_dev_run=fast_dev_run, overfit_batches=overfit_batches)
        if trial:
            steps, epochs, validation_steps, validation_freq, resume = trial, initial_epoch + 1, None, 1, None
        info = {} if config is None else {"config": as_config(config)}
        source = self._to_source("fit", data, y, sample_weight, batch_size=batch_size, shuffle=shuffle and not num_overfit, drop_remainder=drop_remainder)
        size = validation_batch_size or batch_size
        source, sets = adapt_validation_data(
            session, self._selection, source, validation_data, split=validation_split, batch_size=size, overfit_batches=num_overfit
        )
        check_end(source, sets, steps=steps, epochs=epochs, steps_per_epoch=steps_per_epoch)
        hooks, self._history, note = callbacks_of_fit(callbacks, verbose, trial=trial)
        check_restores_best(hooks, session.task.any_program().eval_params.custom)
        session.clear_stop()
        with session.make_saver() as saver, Interruption(saves=hooks.saves) as interruption, hooks.entered(saver):
            with spent.on("loading"):
                saved = find_checkpoint(session, resume, hooks)
            validation = make_validation(session, sets, validation_freq, steps=validation_steps, trial=trial, hooks=hooks, interruption=interruption)
            end_epoch = initial_epoch + 1 if steps is None and epochs is None else epochs
            plan = RunPlan(end_epoch=end_epoch, steps_per_epoch=steps_per_epoch, is_fit=True, keep=hooks.keep, info=info)
            components = RunComponents(saver, hooks, validation, interruption, spent)
            with spent.on("compiling"):
                # Not assigned to a variable, which would keep the first batch alive.
                run = Run(prepare_run(session, source, plan, components, steps=steps, initial_epoch=initial_epoch, class_weight=class_weight, saved=saved))
            if saved is not None:
                saved = dataclasses.replace(saved, train={})  # Frees the memory of the restored state.
            run_with_callbacks(session, self, run, params_of(session, source, sets, run, trial=trial, log_every=log_every, note=note), saved)
        interruption.reraise_signal()
        return self._history

    # -- evaluation and prediction --

    @keras_names.with_hints("Trainer.evaluate", keras_names.EVALUATE, ConfigError)
    @_syncs_model
    def evaluate(
        self,
        data: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        steps: int | None = None,
        batch_size: int | None = None,
        callbacks: Iterable[Callback] | None = (),
        verbose: int | str = "auto",
    ) -> dict[str, float]:
        """Returns the loss and metrics over data, independent of the batch size and the number of devices.

        Args:
            data: As in `fit`.
            y: Targets, for arrays.
            sample_weight: Weights, for arrays.
            steps: The number of batches; all by default.
            batch_size: As in `fit`.
            callbacks: Callbacks whose `on_test_*` hooks are called.
            verbose: 0 for silence, 2 for a line, 1 or `"auto"` for a progress bar in a terminal or a notebook and a line elsewhere.

        Raises:
            NotReadyError: Before `compile`, or before there is a state.
            DataError: The data cannot be turned into batches.
            ModelError, LossError, MetricError: The module, the loss or a metric does not fit the data.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1, kernel_init=nn.initializers.zeros))
        >>> trainer.compile("sgd", "mse", ["mae"])
        >>> trainer.build((np.ones((1, 2)), np.ones((1, 1))))
        >>> trainer.evaluate(np.ones((6, 2)), np.arange(6.0)[:, None], verbose=0)
        {'loss': 9.1666..., 'mae': 2.5}
        """
        self._session.task.need_compiled("evaluate")
        live = self._session.state.need("evaluate")
        configuration.check_counts(steps=steps)
        hooks = callbacks_of_call(callbacks, verbose)
        source = self._to_source("evaluate", data, y, sample_weight, batch_size=batch_size, shuffle=False)
        evaluation = Evaluation(self._session, self._session.task.any_program(), source, steps=steps, name="eval", callbacks=hooks)
        hooks.bind(self, {})
        with contextlib.closing(hooks):
            return evaluation.evaluate(live.borrow)

    @keras_names.with_hints("Trainer.predict", keras_names.PREDICT, ConfigError)
    @_syncs_model
    def predict(
        self, data: Any, *, steps: int | None = None, batch_size: int | None = None, callbacks: Iterable[Callback] | None = (), verbose: int | str = 0
    ) -> PyTree:
        """Returns the module's outputs for all examples, in order, as NumPy arrays `[examples, ...]`.

        If the module returns several outputs in a dict, a tuple or a dataclass, the result has the same class, with keys in the same order.

        Args:
            data: Arrays (a tuple is several inputs), or anything that yields batches, whose targets are ignored. For inputs that are passed whole, rows that
                the batch's weights mark as padding are dropped.
            steps: The number of batches; all by default.
            batch_size: As in `fit`.
            callbacks: Callbacks whose `on_predict_*` hooks are called.
            verbose: 0 for silence, 1 for a progress bar.

        Raises:
            NotReadyError: Before there is a state.
            DataError: The data cannot be turned into batches, or the outputs of two batches have different shapes, such as different lengths. For such data,
                use `predict_iter`.
            ModelError: The module does not run on the data, or an output has no axis of examples.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(3))
        >>> trainer.compile("sgd", "mse")
        >>> trainer.build(np.ones((1, 2)))
        >>> trainer.predict(np.ones((10, 2))).shape
        (10, 3)
        """
        self._session.state.need("predict", evaluates=True)
        configuration.check_counts(steps=steps)
        source = self._to_source("predict", data, batch_size=batch_size, shuffle=False, inputs_only=True)
        if source.is_endless and steps is None:
            raise ConfigError("This data never ends. Pass steps=.")
        hooks = callbacks_of_call(callbacks, verbose)
        hooks.bind(self, {"test_steps": steps or source.all_batches})
        with contextlib.closing(hooks):
            return predict(self._session, source, steps=steps, callbacks=hooks)

    @_syncs_model
    def predict_iter(self, data: Any, *, steps: int | None = None, batch_size: int | None = None) -> Generator[PyTree, None, None]:
        """Returns an iterator over the module's outputs by batch, for data or outputs that do not fit into memory.

        Each item has NumPy arrays `[rows, ...]` for the examples of one batch, without padding, as in `predict`. Data is read one batch ahead, so that the
        device computes while the caller works. All items are computed with the state at the time of the call. If you stop early, the data source is closed;
        a batch that was read from an iterator but not yielded is used first by the trainer's next call with that iterator.

        Args:
            data: As in `predict`; may be endless.
            steps: The number of batches; all by default.
            batch_size: As in `fit`.

        Raises:
            NotReadyError: Before there is a state.
            DataError: The data cannot be turned into batches.
            ModelError: The module does not run on the data, or an output has no axis of examples.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(3))
        >>> trainer.compile("sgd", "mse")
        >>> trainer.build(np.ones((4, 2)))
        >>> [outputs.shape for outputs in trainer.predict_iter(np.ones((10, 2)), batch_size=4)]
        [(4, 3), (4, 3), (2, 3)]
        """
        self._session.state.need("predict_iter", evaluates=True)
        configuration.check_counts(steps=steps)
        source = self._to_source("predict", data, batch_size=batch_size, shuffle=False, inputs_only=True)
        return predict_iter(self._session, source, steps=steps)

    @keras_names.with_hints("Trainer.train_on_batch", keras_names.ON_BATCH, ConfigError)
    @_syncs_model
    def train_on_batch(self, batch: Any) -> dict[str, float]:
        """Runs one step and returns the loss and metrics of this batch only, computed before the update.

        Each call copies all variables of an NNX module on the device. For many steps, use `train_loop`, which copies them when it ends.

        Args:
            batch: `x`, `(x,)`, `(x, y)`, `(x, y, sample_weight)` or a dict. Only a plain tuple or list is unpacked; a NamedTuple or a dataclass is `x`.

        Raises:
            NotReadyError: Before `compile`.
            DataError, ModelError, LossError, MetricError: The batch, the module, the loss or a metric does not fit.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1, kernel_init=nn.initializers.zeros))
        >>> trainer.compile("sgd", "mse", ["mae"], learning_rate=0.25)
        >>> batch = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)
        >>> [trainer.train_on_batch(batch) for _ in range(2)]
        [{'loss': 1.0, 'mae': 1.0}, {'loss': 0.25, 'mae': 0.5}]
        """
        return user_loops.train_on_batch(self._session, self._selection.split(batch))

    @keras_names.with_hints("Trainer.test_on_batch", keras_names.ON_BATCH, ConfigError)
    @_syncs_model
    def test_on_batch(self, batch: Any) -> dict[str, float]:
        """Returns the loss and metrics of one batch.

        Args:
            batch: As in `train_on_batch`.

        Raises:
            NotReadyError: Before `compile`, or before there is a state.
            DataError, ModelError, LossError, MetricError: The batch, the module, the loss or a metric does not fit.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1, kernel_init=nn.initializers.zeros))
        >>> trainer.compile("sgd", "mse", ["mae"])
        >>> trainer.build(np.ones((8, 2), np.float32))
        >>> trainer.test_on_batch((np.ones((8, 2), np.float32), 2 * np.ones((8, 1), np.float32)))
        {'loss': 4.0, 'mae': 2.0}
        """
        return user_loops.test_on_batch(self._session, self._selection.split(batch))

    @_syncs_model
    def predict_on_batch(self, x: Any) -> PyTree:
        """Returns the module's outputs for one batch of inputs, as NumPy arrays `[batch, ...]`.

        Args:
            x: Inputs; a tuple is several inputs, and the trainer's `inputs` selects from a dict.

        Raises:
            NotReadyError: Before there is a state.
            DataError, ModelError: The batch or the module does not fit.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(3))
        >>> trainer.compile("sgd", "mse")
        >>> trainer.build(np.ones((8, 2), np.float32))
        >>> trainer.predict_on_batch(np.ones((8, 2), np.float32)).shape
        (8, 3)
        """
        return user_loops.predict_on_batch(self._session, self._selection.split(x, inputs_only=True).x if isinstance(x, dict) else x)

    # -- loops --

    @_syncs_model
    def train_loop(
        self,
        data: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        steps: int,
        every: Trigger = _EVERY_STEP,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        shuffle: bool = True,
        drop_remainder: bool = False,
        class_weight: Mapping[int, float] | None = None,
        grads: bool = False,
        sown: str | Sequence[str] = (),
        config: Any = None,
    ) -> TrainLoop:
        """Returns an iterator that trains and yields checkpoints; `fit` is a loop over such an iterator.

        Args:
            data: As in `fit`.
            y: Targets, for arrays.
            sample_weight: Weights, for arrays.
            steps: The number of steps.
            every: When to yield a checkpoint, in addition to the last step.
            batch_size: As in `fit`.
            steps_per_epoch: The number of batches over which running metrics are computed; by default one iteration over the data.
            shuffle: Whether to shuffle arrays in each epoch.
            drop_remainder: Whether to drop a short last batch of arrays.
            class_weight: `{label: weight}`.
            grads: Whether checkpoints include the gradient of their step, which takes as much memory as the parameters.
            sown: Collections of sown values, such as `"summaries"`, that checkpoints include.
            config: As in `fit`.

        Raises:
            NotReadyError: Before `compile`.
            ConfigError, DataError, ModelError, LossError, MetricError: As in `fit`.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("sgd", "mse")
        >>> x = np.ones((8, 2), np.float32)
        >>> with trainer.train_loop(x, x[:, :1], steps=4, every=make_every(steps=2)) as loop:
        ...     [(checkpoint.step, checkpoint.loss > 0) for checkpoint in loop]
        [(2, True), (4, True)]
        """
        self._session.need_idle("train_loop")
        configuration.check_counts(steps=steps)
        source = self._to_source("train_loop", data, y, sample_weight, batch_size=batch_size, shuffle=shuffle, drop_remainder=drop_remainder)
        plan = plan_of(configuration.trigger_of("train_loop", every), steps_per_epoch, grads=grads, sown=sown, config=config)
        return TrainLoop.of(self._session, source, plan, steps, class_weight)

    @_syncs_model
    def eval_loop(
        self, data: Any, y: Any = None, sample_weight: Any = None, *, steps: int | None = None, name: str = "eval", batch_size: int | None = None
    ) -> EvalLoop:
        """Returns a function `checkpoint -> summary` that evaluates the state of a checkpoint on data.

        Args:
            data: As in `fit`. A one-shot iterator can be evaluated only once or, with `steps`, in consecutive parts.
            y: Targets, for arrays.
            sample_weight: Weights, for arrays.
            steps: The number of batches per evaluation; all by default.
            name: The group name of the metrics.
            batch_size: As in `fit`.

        Raises:
            NotReadyError: Before `compile`.
            ConfigError, DataError: As in `evaluate`.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("sgd", "mse")
        >>> x = np.ones((8, 2), np.float32)
        >>> evaluate = trainer.eval_loop(x, x[:, :1], name="valid")
        >>> [list(evaluate(checkpoint).metrics) for checkpoint in trainer.train_loop(x, x[:, :1], steps=1)]
        [['train', 'valid']]
        """
        self._session.task.need_compiled("eval_loop")
        configuration.check_counts(steps=steps)
        name = configuration.group_name(name)
        source = self._to_source("evaluate", data, y, sample_weight, batch_size=batch_size, shuffle=False)
        return EvalLoop.of(Evaluation(self._session, self._session.task.any_program(), source, steps=steps, name=name))

    # -- diagnostics --

    @_syncs_model
    def find_learning_rate(
        self,
        data: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        lowest: float = 1e-7,
        highest: float = 10.0,
        steps: int = 100,
        batch_size: int | None = None,
        shuffle: bool = True,
        drop_remainder: bool = False,
        class_weight: Mapping[int, float] | None = None,
    ) -> LearningRateCurve:
        """Runs a learning rate range test on a copy of the state and returns the loss curve with a suggested rate.

        The range test is from Smith, "Cyclical Learning Rates for Training Neural Networks" (2017): the rate grows from step to step, and the test ends
        early if the loss diverges. The trainer does not change, and repeated calls return the same curve. `steps_per_call` is ignored.

        Args:
            data: As in `fit`, except iterators, which would be consumed. If a loader has a random generator, the test advances it.
            y: Targets, for arrays.
            sample_weight: Weights, for arrays.
            lowest: The first rate.
            highest: The last rate.
            steps: The number of rates, which grow by a constant factor. The data is repeated if it ends.
            batch_size: The number of examples per batch, for arrays; 32 by default. The suggested rate is for this batch size.
            shuffle: Whether to shuffle arrays in each epoch.
            drop_remainder: Whether to drop a short last batch of arrays.
            class_weight: `{label: weight}`.

        Raises:
            NotReadyError: Before `compile`.
            OptimizerError: The learning rate cannot be set.
            ConfigError, DataError, ModelError, LossError, MetricError: As in `fit`.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("sgd", "mse")
        >>> x = np.linspace(0, 1, 64, dtype=np.float32)[:, None]
        >>> 0.001 < trainer.find_learning_rate(x, 2 * x).suggestion < 1
        True
        """
        self._session.need_trainable("find_learning_rate")
        configuration.check_counts(steps=steps)
        if not 0 < lowest < highest < float("inf"):
            raise ConfigError(f"find_learning_rate requires 0 < lowest < highest, both finite. Received: lowest={lowest!r}, highest={highest!r}.")
        size = {"batch_size": batch_size, "drop_remainder": drop_remainder}
        source = self._to_source("find_learning_rate", data, y, sample_weight, shuffle=shuffle, is_kept=False, **size)
        with training_copy(self._session, source, class_weight, "find_learning_rate") as (session, feed):
            return find_learning_rate(session, feed, lowest=lowest, highest=highest, steps=steps)

    @_syncs_model
    def hunt_nan(
        self,
        data: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        steps: int | None = None,
        restore_from: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        drop_remainder: bool = False,
        class_weight: Mapping[int, float] | None = None,
    ) -> NanReport | None:
        """Repeats the steps of a run on a copy of the state until one is not finite, and finds the operation that caused it.

        The report names the step, the first loss, gradient or parameter that is not finite, and the operations where it originates: the layer, the line of
        your code and the inputs. With several processes, all of them must call it.

        Args:
            data: The data of the `fit` call, except iterators, which would be consumed.
            y: Targets, for arrays.
            sample_weight: Weights, for arrays.
            steps: The maximum number of steps; by default up to the end of the current iteration over the data.
            restore_from: A checkpoint from before that step, or a directory of checkpoints, of which the newest intact one with finite parameters is used; the
                position in the data is restored, too. By default the trainer's state (or the initial state) and the beginning of the data.
            storage_options: Options for a URL in `restore_from`, as in `ModelCheckpoint`.
            batch_size: As in that `fit` call, like the arguments below.
            shuffle: Whether to shuffle arrays in each epoch.
            drop_remainder: Whether to drop a short last batch of arrays.
            class_weight: `{label: weight}`.

        Returns:
            The report; `None` if every step was finite.

        Raises:
            NotReadyError: Before `compile`.
            ConfigError: The parameters are not finite from the beginning, or the data can be iterated over only once.
            CheckpointError: There is no usable checkpoint, or it does not fit.
            DataError, ModelError, LossError, MetricError: As in `fit`.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("sgd", lambda outputs, targets: jax.numpy.log(outputs[:, 0] - targets))
        >>> report = trainer.hunt_nan(np.ones((4, 2), np.float32), 9 * np.ones(4, np.float32))
        >>> report.step, report.culprit, report.origins[0].operation
        (1, 'the loss', 'log')
        """
        self._session.need_trainable("hunt_nan")
        configuration.check_counts(steps=steps)
        options: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "drop_remainder": drop_remainder}
        source = self._to_source("hunt_nan", data, y, sample_weight, is_kept=False, **options)
        if source.is_endless and steps is None:
            raise ConfigError("This data never ends. Pass steps=.")
        # The checkpoint is not assigned to a variable, which would keep it in memory.
        with training_copy(
            self._session,
            source,
            class_weight,
            "hunt_nan",
            None if restore_from is None else last_finite(restore_from, storage_options=storage_options),
            keep=WATCHED,
        ) as (session, feed):
            return hunt_nan(session, feed, steps=steps)

    # -- saving --

    @_syncs_model
    def export(
        self,
        path: str | os.PathLike[str],
        sample: Any = None,
        *,
        batch_size: int | None = None,
        platforms: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Location:
        """Writes the function `predict_on_batch`, with its weights, to one file that needs neither fitflax nor the module's code.

        Loading requires only jax and flatbuffers: `run = jax.export.deserialize(open(path, "rb").read()).call`, then `run(x)`; inputs that are a tuple are
        separate arguments. JAX can read such files for at least six months, and the function can be jitted and mapped. Averaged parameters are used if there
        are any. If the state is split between processes, all of them must call it, and process 0 writes. Requires the extra `export`.

        Args:
            path: The file, or a URL; an existing file is replaced.
            sample: A batch as in `build`, or only inputs (pass several as `((x1, x2),)`), for shapes and dtypes; by default the first batch of the last call.
            batch_size: The number of rows; by default any number. The module is then traced with a symbolic size, which compares unequal to any number.
            platforms: The target platforms, from `"cpu"`, `"cuda"`, `"rocm"` and `"tpu"`; by default the current one.
            storage_options: Options for a URL, as in `ModelCheckpoint`.

        Raises:
            NotReadyError: There is no state, or no batch has been seen and `sample` is missing.
            ImportError: The package flatbuffers is not installed.
            ConfigError: A platform is unknown, or the weights take 2 GB or more.
            ModelError: The module cannot be exported; the message says why.

        >>> import numpy as np
        >>> import tempfile
        >>> trainer = Trainer(nn.Dense(3))
        >>> trainer.compile("sgd", "mse")
        >>> trainer.build(np.ones((1, 2), np.float32))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = trainer.export(f"{directory}/model.jax")
        ...     run = jax.export.deserialize(path.read_bytes()).call
        >>> run(np.ones((5, 2), np.float32)).shape
        (5, 3)
        """
        session = self._session
        live = session.state.need("export", evaluates=True)
        configuration.check_counts(batch_size=batch_size)
        batch = session.state.sample if sample is None else unpadded_batch(self._selection.split(configuration.zeros(sample), inputs_only=True))
        if batch is None:
            raise NotReadyError("export needs the shapes of the inputs, but there has been no batch yet. Pass export(path, sample=x).")
        return export_inference(
            path, session.task.any_program(), live.borrow(), batch, batch_size=batch_size, platforms=platforms, storage_options=storage_options
        )

    @overload
    def save(self, path: Path, *, storage_options: Mapping[str, Any] | None = None) -> Path: ...

    @overload
    def save(self, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Location: ...

    def save(self, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Location:
        """Saves the state as a checkpoint directory at `path`, replacing an existing checkpoint, and returns the path.

        If the state is split between processes, all of them must call it; otherwise only process 0 writes.

        Args:
            path: The directory to write, or a URL such as `s3://bucket/model`.
            storage_options: Options for a URL, as in `ModelCheckpoint`.

        Raises:
            NotReadyError: Before there is a state.
            CheckpointError: The path exists and is not a checkpoint, or the disk fails in any process.

        >>> import numpy as np
        >>> import tempfile
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("sgd", "mse")
        >>> trainer.build(np.ones((1, 2)))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = trainer.save(f"{directory}/mine")
        ...     print(trainer.restore(path))
        Restored 2 of 2 arrays.
        """
        with self._session.state.synced_with_model():
            train = self._session.state.state_to_save()
            eval_params = self._session.state.eval_params_name()
            compiled = {} if eval_params is None else {"compiled": {"eval_params": eval_params}}
            settings = {"seed": self._session.seed}
            metadata = {"run_id": self._session.run_id, "step": self.step, "epoch": 0, "metrics": {}, "settings": settings, **compiled}
            return save_checkpoint(path, train=train, run={}, metadata=metadata, storage_options=storage_options)

    @_syncs_model
    def restore(
        self,
        path: str | os.PathLike[str],
        *,
        weights_only: bool = False,
        partial: bool = False,
        mapping: Mapping[str, str | None] | None = None,
        cast: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> RestoreReport:
        """Restores the state from a checkpoint: all of it, or, for fine-tuning, only the parts that fit this model.

        Paths of arrays are as in errors: `params/Dense_0/kernel`, and for other collections `batch_stats/BatchNorm_0/mean`. After an error the state is
        unchanged. The old state is released before the new one is loaded, so the devices need not hold both.

        The checkpoint of a linen model fits an NNX module with the same arrays, and vice versa. An NNX module keeps its random streams if the checkpoint has
        none; other models leave them out.

        Args:
            path: A checkpoint directory; a directory of checkpoints, to use the newest intact one; safetensors, with `weights_only` or `partial`; or a URL.
            weights_only: Whether to restore only parameters and collections; the optimizer and the step are reset.
            partial: Whether the checkpoint may be of another model. Parameters and collections with the same path, shape and dtype are restored; others are
                initialized as in `build`, and the optimizer and the step are reset. Requires `build`, for the model's shapes. Arrays with another shape
                need an entry in `mapping`, and those with another dtype `cast`.
            mapping: Renamed paths, `{path in this model: path in the checkpoint}`, of arrays or of everything below a path; the longest path wins. `None`
                instead of a path, with `partial`, initializes arrays that the checkpoint also has. Two paths may use the same source. Without `partial`, the
                optimizer state is renamed, too.
            cast: Whether to convert arrays between bfloat16, float16, float32 and float64, to the dtypes of this model and its optimizer. Otherwise
                a different dtype is an error.
            storage_options: Options for a URL, as in `ModelCheckpoint`.

        Returns:
            The paths that were restored, initialized, and unused in the checkpoint.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            CorruptCheckpointError: The checkpoint is damaged.
            RestoreError: The checkpoint does not fit the model or the optimizer (the message lists differences), or an entry of `mapping` has no effect.
            ConfigError: `mapping` is invalid.
            NotReadyError: `partial` before `build`.

        >>> import numpy as np
        >>> import tempfile
        >>> class Classifier(nn.Module):
        ...     classes: int
        ...     @nn.compact
        ...     def __call__(self, x):
        ...         return nn.Dense(self.classes, name="head")(nn.relu(nn.Dense(16, name="body")(x)))
        >>> batch = jax.ShapeDtypeStruct((8, 4), np.float32)
        >>> pretrained, trainer = Trainer(Classifier(10)), Trainer(Classifier(3))
        >>> for each in (pretrained, trainer):
        ...     each.compile("adam", loss="sparse_categorical_crossentropy")
        ...     each.build((batch,))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = pretrained.save(f"{directory}/pretrained")
        ...     print(trainer.restore(path, partial=True, mapping={"params/head": None}))
        Restored 2 of 4 arrays.
        Initialized: params/head/bias, params/head/kernel
        Unused: params/head/bias, params/head/kernel
        """
        roots = FOR_INFERENCE if weights_only and not partial and not mapping else WHOLE
        saved = read_collectively(
            lambda together: load_checkpoint(path, roots, storage_options=storage_options, together=together),
            num_processes=self._session.strategy.num_processes,
        )
        options = RestoreOptions(weights_only, partial, mapping, cast)
        saved = split_frozen(self._session, saved)
        report = self._session.restore(saved, None, options)
        task, live = self._session.task, self._session.state.need("restore")
        if options.starts_over or (task.is_compiled and task.any_program().eval_params.function_of(live.borrow()) is None):
            warn_of_eval_params(saved)
        if not options.starts_over and task.described:
            warn_of_changes(saved, task.described, to_resume=False)
        return report

    @_syncs_model
    def save_weights(
        self,
        path: str | os.PathLike[str],
        *,
        mapping: WeightMapping | None = None,
        dtype: Any = None,
        metadata: Mapping[str, str] | None = None,
        max_shard_bytes: int = 5_000_000_000,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Location:
        """Saves parameters and collections as safetensors, for other programs, and returns the file, or the index if there are several files.

        Names are paths joined by `.`: `params.Dense_0.kernel`, `batch_stats.BatchNorm_0.mean`. The parameters are the evaluated ones: averaged parameters if
        there are any. For an NNX module, random streams are left out, and frozen parameters count as parameters. To resume, use `save`.

        If several processes train together, all of them must call it; process 0 writes, and the call returns when the files are complete.

        Args:
            path: The file, whose name ends with `.safetensors`, or a URL; existing weights are replaced when the new ones are complete.
            mapping: Other names and layouts: the rules or the dict that `load_weights` takes, applied in reverse.
            dtype: The dtype that floating-point arrays are converted to, such as `"bfloat16"`.
            metadata: Strings by name. By default `format`, which other libraries read: with a mapping `"pt"`, for PyTorch's names and layouts, otherwise
                `"flax"`. Without a mapping, `paths: collections` is added, which means that names begin with the collection.
            max_shard_bytes: The maximum size of a file in bytes; larger weights are split into several files with an index, `<path>.index.json`.
            storage_options: Options for a URL, as in `ModelCheckpoint`.

        Raises:
            NotReadyError: Before there is a state.
            CheckpointError: An array cannot be stored or is too large for `dtype`, the path exists and is something else, or the disk fails.
            RestoreError: The mapping does not fit the model.
            ConfigError: An argument is invalid, or the mapping cannot be reversed.

        >>> import numpy as np
        >>> import tempfile
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("sgd", "mse")
        >>> trainer.build(np.ones((1, 2)))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = trainer.save_weights(f"{directory}/model.safetensors")
        ...     print(trainer.load_weights(path))
        Restored 2 of 2 arrays.
        """
        options: dict[str, Any] = {"metadata": metadata, "max_shard_bytes": max_shard_bytes, "storage_options": storage_options}
        return save_weights(self._session, path, mapping=mapping, dtype=dtype, **options)

    @_syncs_model
    def load_weights(
        self,
        path: str | os.PathLike[str],
        *,
        mapping: WeightMapping | None = None,
        partial: bool = False,
        dtype: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> RestoreReport:
        """Loads parameters and collections from safetensors of any origin; the optimizer and the step are reset.

        Without a mapping it is the same as `restore(path, weights_only=True)`, and names in the file are paths joined by `.`. In a file of another program,
        all arrays are parameters if no name begins with `params.`. Only the needed parts of a file are read: it is memory-mapped, and every size and offset
        in it is checked. Nothing is unpickled or executed. After an error the state is unchanged.

        Args:
            path: A `.safetensors` file; an index of several files, or their common name; a directory with one of these, as on the Hugging Face Hub; or a URL.
            mapping: The names and layouts of the file's arrays in this model: a list of `checkpoints.WeightRule`; a dict from names in the file to paths in
                the model, to `(path, transform)` for another layout, or to `None` to skip an array (if all values are `None`, other names are kept); or a
                function from a name to a path or `None`. Paths are as in errors, `params/Dense_0/kernel`. `restore` maps in the opposite direction.
            partial: Whether the file and the model may each have arrays that the other does not have; see `restore`.
            dtype: The dtype that floating-point arrays are converted to, such as `"float32"`; without it, a dtype that differs from the model's is an error.
            storage_options: Options for a URL, as in `ModelCheckpoint`.

        Returns:
            The paths that were restored, initialized, and unused in the file.

        Raises:
            CheckpointNotFoundError: There are no safetensors.
            CorruptCheckpointError: A file is damaged.
            RestoreError: Mapping, file and model do not fit; the message lists differences.
            CheckpointError: Numbers are too large for `dtype`, or the disk fails.
            ConfigError: `mapping` or `dtype` is invalid.
            NotReadyError: `partial` before `build`.

        >>> import numpy as np
        >>> import tempfile
        >>> from fitflax.integrations.torch_layers import dense
        >>> trainer = Trainer(nn.Sequential([nn.Dense(3)]))
        >>> trainer.compile("sgd", "mse")
        >>> trainer.build(np.ones((1, 2), np.float32))
        >>> mapping = dense("fc", "layers_0")  # From fc.weight, [out, in], and fc.bias, as PyTorch names them.
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = trainer.save_weights(f"{directory}/torch.safetensors", mapping=mapping)
        ...     print(trainer.load_weights(path, mapping=mapping))
        Restored 2 of 2 arrays.
        """
        return load_weights(self._session, path, mapping=mapping, partial=partial, dtype=dtype, storage_options=storage_options)
