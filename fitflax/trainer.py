"""`Trainer`: the facade. It checks arguments, turns them into the parts below it, and delegates; no step and no loop is written here."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TextIO

import jax
import optax
from flax import linen as nn
from flax.core.scope import DenyList

import fitflax.keras_names as keras_names
import fitflax.loops.arguments as arguments
import fitflax.loops.single as single
import fitflax.optimizers as optimizers
from fitflax.callbacks import Callback, ModelCheckpoint
from fitflax.callbacks.callback_list import CallbackList
from fitflax.callbacks.defaults import callbacks_of_call, callbacks_of_fit
from fitflax.callbacks.history import History
from fitflax.checkpoints.by_path import load_checkpoint, save_checkpoint
from fitflax.checkpoints.partial import RestoreReport
from fitflax.checkpoints.resume import warn_of_changes
from fitflax.checkpoints.saved import FOR_INFERENCE, WHOLE
from fitflax.data import Source
from fitflax.data.adapt import takes_batch_size
from fitflax.data.batch import Selection
from fitflax.data.first import FirstBatches
from fitflax.data.shards import Shard
from fitflax.diagnostics import LearningRateCurve, NanReport
from fitflax.diagnostics.nan_hunt import WATCHED, hunt_nan, last_finite
from fitflax.diagnostics.rate_finder import find_learning_rate
from fitflax.errors import ConfigError, NotReadyError, OptimizerError, no_attribute
from fitflax.exporting import export_inference
from fitflax.loops.evaluation import Evaluation, predict, predict_iter
from fitflax.loops.fitting import hold_out, params_of, run_with_callbacks
from fitflax.loops.intake import as_given
from fitflax.loops.modular import EvalLoop, TrainLoop
from fitflax.loops.plan import RunPlan, Validation
from fitflax.loops.preparation import find_saved, make_evaluation, prepare_run, trained_aside
from fitflax.loops.session import Session
from fitflax.loops.signals import Interruption
from fitflax.loops.tabulation import describe
from fitflax.parallel import Strategy
from fitflax.state import Batch, InferenceState, PyTree, TrainState
from fitflax.steps.model import TRANSIENT, adapt_module, mutable_filter
from fitflax.steps.numerics import Numerics
from fitflax.steps.objective import Objective
from fitflax.steps.task import Task
from fitflax.time_spent import TimeSpent
from fitflax.triggers import Trigger
from fitflax.triggers import every as make_every

__all__ = ["Trainer"]

_EVERY_STEP = make_every(steps=1)

# What other trainers have, and what is here in its place.
_ELSEWHERE = {
    "params": "trainer.state.params",
    "opt_state": "trainer.state.opt_state",
    "batch_stats": "trainer.state.model_state['batch_stats']",
    "weights": "trainer.state.params",
    "get_weights": "trainer.state.params",
    "set_weights": "trainer.replace_state(trainer.state.replace_params(params))",
    "save_weights": "trainer.save(path)",
    "load_weights": "trainer.restore(path, weights_only=True)",
    "callbacks": "fit(callbacks=[...])",
}


class Trainer:
    """Trains, evaluates and runs a linen module.

    Args:
        model: Any `flax.linen` module, unchanged. A mode keyword of its `__call__` (`train`, `training`, `deterministic`), or such a field, is found and set.
        seed: What all randomness follows from: initialization, dropout, the order of examples.
        rngs: Names of the random streams that the module uses at initialization and in training, or `{"init": names, "train": names, "eval": names}`.
        inputs: What of a batch that is a dict the module is called with: a key (one positional argument), a tuple of keys (several), or
            `{argument: key}` (keywords).
        targets: What of such a batch are the targets: a key, a tuple of keys, or `{name: key}`.
        parallel: Where steps run: by default `DataParallel()`, replicas on all devices of all processes; or `Sharded(mesh, ...)`, which splits the state, too.
        mutable: linen's filter for collections that training may change.
        transient: Collections that are never part of the state: taken out after each call. Values sown into `losses` are added to the loss.
        train_kwargs: Keyword arguments of `__call__` in training.
        eval_kwargs: Keyword arguments of `__call__` in evaluation and prediction.

    Raises:
        ConfigError: An argument that makes no sense.

    >>> import numpy as np
    >>> trainer = Trainer(nn.Dense(1))
    >>> trainer.compile("sgd", loss="mse", learning_rate=0.1)
    >>> x = np.linspace(0, 1, 64, dtype=np.float32)[:, None]
    >>> history = trainer.fit(x, 2 * x, epochs=20, verbose=0)
    >>> history.history["loss"][-1] < 0.1
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        seed: int = 0,
        rngs: Sequence[str] | Mapping[str, Sequence[str]] = ("dropout",),
        inputs: str | tuple[str, ...] | dict[str, str] | None = None,
        targets: str | tuple[str, ...] | dict[str, str] | None = None,
        parallel: Strategy | None = None,
        mutable: Any = DenyList("params"),  # noqa: B008 (frozen)
        transient: Sequence[str] = TRANSIENT,
        train_kwargs: Mapping[str, Any] | None = None,
        eval_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        arguments.check_seed("Trainer", seed)
        self._model = model
        self._selection = Selection(inputs, targets)
        self._history = History()
        module = adapt_module(model, train_kwargs=train_kwargs, eval_kwargs=eval_kwargs, keyword_inputs=isinstance(inputs, dict))
        strategy = arguments.strategy_of("Trainer", parallel)
        taken_out = tuple(transient)
        self._parts: dict[str, Any] = {
            "model": module,
            "strategy": strategy,
            "streams": arguments.streams_of("Trainer", rngs),
            "mutable": mutable_filter(mutable, taken_out),
            "transient": taken_out,
        }
        self._session = Session(self._make_task, strategy, int(seed))

    def _make_task(self, objective: Objective, optimizer: optax.GradientTransformationExtraArgs | None, numerics: Numerics) -> Task:
        kind = type(self)
        arguments.check_called_with(kind.__name__, "compute_loss", self.compute_loss, "params", "model_state", "batch", keywords=("rngs", "train"))
        arguments.check_called_with(kind.__name__, "train_step", self.train_step, "state", "batch")
        return Task(
            **self._parts,
            objective=objective,
            optimizer=optimizer,
            compute_loss=self.compute_loss if kind.compute_loss is not Trainer.compute_loss else None,
            custom_step=self.train_step if kind.train_step is not Trainer.train_step else None,
            numerics=numerics,
        )

    if not TYPE_CHECKING:  # Or every name would be an attribute.

        def __getattr__(self, name):
            """Says where to find what other trainers have under this name."""
            if hasattr(type(self), name):  # A property that failed: its own error says more.
                return object.__getattribute__(self, name)
            raise no_attribute(self, name, {known: f"Here it is {here}" for known, here in _ELSEWHERE.items()})

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses to be copied or pickled: devices and compiled programs cannot be, and two trainers must not train one state."""
        raise TypeError(
            f"A {type(self).__name__} can be neither copied nor pickled: it holds devices and compiled programs. Make another one; with_seed(seed) makes one "
            "that is compiled the same way, and save(path) and restore(path) carry the state over."
        )

    def __repr__(self) -> str:
        """Returns the module's class, what it is compiled with, and how far it is.

        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer
        Trainer(Dense, not compiled)
        >>> trainer.compile("adam", "mse")
        >>> trainer
        Trainer(Dense, optimizer='adam', loss='mse', step=0)
        """
        session = self._session
        how = [f"{name}={value!r}" for name, value in session.described.items()] if session.is_compiled else ["not compiled"]
        step = [f"step={self.step}"] if session.is_compiled or session.live is not None else []
        return f"{type(self).__name__}({', '.join([type(self._model).__name__, *how, *step])})"

    # -- what users may look at --

    @property
    def model(self) -> nn.Module:
        """The module, as it was given."""
        return self._model

    @property
    def state(self) -> TrainState:
        """The newest state. It stays valid whatever is trained afterwards.

        Raises:
            NotReadyError: Before `build`, `fit` or `restore`.
        """
        return self._session.need_state("state").lend()

    @property
    def step(self) -> int:
        """Finished updates."""
        return 0 if self._session.live is None else self._session.live.step

    @property
    def history(self) -> History:
        """The history of the last `fit`."""
        return self._history

    @property
    def learning_rate(self) -> float:
        """The learning rate, where the optimizer was given by name or wrapped in `optax.inject_hyperparams`; setting it never recompiles.

        Raises:
            OptimizerError: The optimizer's rate cannot be read; or set, as with a schedule.
            NotReadyError: Before `build`, `fit` or `restore`.
        """
        rate = optimizers.get_learning_rate(self._session.need_state("learning_rate").borrow().opt_state)
        if rate is None:
            raise OptimizerError(
                "This optimizer's learning rate cannot be read. Give the optimizer by name, compile('adam', learning_rate=...), or wrap it: "
                "optax.inject_hyperparams(optax.adam)(learning_rate=...)."
            )
        return float(rate)

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        live = self._session.need_state("learning_rate")
        state = live.borrow()
        live.replace(dataclasses.replace(state, opt_state=optimizers.set_learning_rate(state.opt_state, value)), live.step)

    @property
    def learning_rates(self) -> dict[str, float]:
        """All learning rates that can be read, by the label of their parameters' group, as in `optax.multi_transform`; those assigned are set.

        Raises:
            OptimizerError: A rate is set that is not there, or that a schedule computes.
            NotReadyError: Before `build`, `fit` or `restore`.
        """
        rates = optimizers.get_learning_rates(self._session.need_state("learning_rates").borrow().opt_state)
        return {label: float(rate) for label, rate in rates.items()}

    @learning_rates.setter
    def learning_rates(self, values: Mapping[str, float]) -> None:
        live = self._session.need_state("learning_rates")
        state = live.borrow()
        opt_state = state.opt_state
        for label, value in values.items():
            opt_state = optimizers.set_learning_rate(opt_state, value, label)
        live.replace(dataclasses.replace(state, opt_state=opt_state), live.step)

    @property
    def stop_training(self) -> bool:
        """Whether somebody asked to stop; setting it to `True` is `stop()`."""
        return self._session.is_stopping

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        if value:
            self.stop("stop_training was set")
        else:
            self._session.clear_stop()

    @property
    def stop_reason(self) -> str | None:
        """Why the last `fit` stopped before its end, or is about to; `None` if it did not."""
        return self._session.stop_reason

    def stop(self, reason: str = "stop() was called") -> None:
        """Asks a running `fit` to stop after the present step. Its validation and end hooks still run.

        Args:
            reason: Kept as `stop_reason`; the first one counts.
        """
        self._session.stop(reason)

    # -- preparing --

    @keras_names.with_hints("Trainer.compile", keras_names.COMPILE, ConfigError)
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
    ) -> None:
        """Says what training minimizes, how, and what is measured. Calling it again keeps parameters and collections.

        Args:
            optimizer: Any optax transformation, called with `params`; or a name, such as `"adam"`. Another object than before starts its state afresh.
            loss: A name; a function `(outputs, targets) -> values`, one value per example, `[batch]` or `[batch, ...]`; a dict or list of them for several
                outputs, `None` skipping one; `None` where the module sows its losses. Outputs are logits for all crossentropies.
            metrics: Names, metrics, functions of per-example values, or a dict of them by log key. They ignore sample weights.
            learning_rate: With a name: the rate, a number or an optax schedule; Keras's default if it is not given.
            loss_weights: A number, or numbers by output, that losses are multiplied with.
            weighted_metrics: Metrics that use sample weights.
            steps_per_call: How many updates one call of the device makes at most; `"auto"` tries 1 and 16 on the first batch, on copies, and takes what is
                faster. Results differ from single steps by rounding only. A call ends where a trigger of steps fires and at the end of an epoch; hooks of
                batches, signals, triggers of time and `stop` take effect between calls. What was chosen belongs to the run, and a resume uses it again.
            pad: Whether short batches are padded to the full shape. Without it each size is compiled by itself and must divide over the devices.
            accumulate_steps: Into how many micro-batches a batch is split, one after another in each update, so that only one's activations are in memory.
                The gradient is that of the whole batch; batches are padded to a multiple. Evaluation and prediction do not split.
            precision: What the module computes in: `"float32"`, `"bfloat16"`, or `"float16"`, whose loss is scaled. Parameters and inputs are cast for it;
                what is stored, outputs, losses and metrics are float32, also those of `predict`. Modules with a `dtype` of their own keep it.
            ema_decay: With it the state has averaged parameters, `decay * average + (1 - decay) * parameters` after each update, which are what is evaluated,
                validated and predicted with; `state.params` are those of the last update.

        Raises:
            OptimizerError: Neither a known name nor an optax transformation.
            LossError: An unknown loss.
            MetricError: An unknown metric.
            ConfigError: An argument that makes no sense.

        >>> trainer = Trainer(nn.Dense(10))
        >>> trainer.compile("adam", "sparse_categorical_crossentropy", ["accuracy"], learning_rate=1e-3)
        >>> trainer.compile(optax.adamw(1e-3), lambda outputs, targets: (outputs[:, 0] - targets) ** 2, {"mae": "mean_absolute_error"})
        """
        numerics = Numerics(accumulate_steps, precision, ema_decay)
        if type(self).train_step is not Trainer.train_step:
            numerics.check_custom_step()
        transformation = arguments.optimizer_of(optimizer, learning_rate)
        if isinstance(steps_per_call, str) and steps_per_call != "auto":
            raise ConfigError(f"steps_per_call must be a positive integer or 'auto'. Received: {steps_per_call!r}.")
        arguments.check_counts(steps_per_call=None if isinstance(steps_per_call, str) else steps_per_call)
        self._session.compile(
            optimizer,
            transformation,
            Objective(loss, metrics, weighted_metrics, loss_weights),
            pad=pad,
            numerics=numerics,
            steps_per_call=None if isinstance(steps_per_call, str) else int(steps_per_call),
            described=arguments.described(optimizer=optimizer, loss=loss, learning_rate=learning_rate),
        )

    def with_seed(self, seed: int) -> Self:
        """Returns a trainer like this one, compiled the same way, with another seed and without a state.

        The two share their compiled steps, so that the next one of an ensemble, or of a search, begins at once; nothing else. Where a subclass has a
        `compute_loss` or `train_step` of its own, which may depend on the instance, each compiles its own.

        Args:
            seed: What all randomness follows from.

        Raises:
            ConfigError: `seed` is none.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("sgd", "mse")
        >>> members = [trainer.with_seed(seed) for seed in range(3)]
        >>> for member in members:
        ...     member.build((np.ones((8, 2), np.float32),))
        >>> len({float(member.state.params["kernel"][0, 0]) for member in members})
        3
        """
        arguments.check_seed("with_seed", seed)
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        own = type(self).compute_loss is not Trainer.compute_loss or type(self).train_step is not Trainer.train_step
        other._session, other._history = self._session.fresh(int(seed), other._make_task if own else None), History()
        return other

    def build(self, batch: Any) -> None:
        """Initializes the state from a batch's shapes and dtypes; its values do not matter. `fit` does it by itself.

        Args:
            batch: A batch as training gets it: `x`, `(x,)`, `(x, y)`, `(x, y, sample_weight)` or a dict; arrays or `jax.ShapeDtypeStruct`.

        Raises:
            NotReadyError: Before `compile`.
            DataError: `batch` is no batch.
            ModelError: The module does not run on it.
        """
        session = self._session
        session.need_compiled("build")
        session.build(session.intake.sample(self._selection.split(arguments.zeros(batch))))
        session.begin_run()

    def summary(self, sample: Any = None, *, memory: bool = False, sharding: bool = False, file: TextIO | None = None) -> None:
        """Prints the model's layers with shapes and parameters, the sizes of parameters, collections and optimizer state, and what the model costs.

        Each is counted once, however many devices hold it. Nothing is computed but shapes. Model FLOPs are the floating-point operations of matrix products
        and convolutions, in training three times those of the pass forward; the compiled step's memory is JAX's analysis: its arguments (state, sums and
        batch), its temporaries, and the most that it needs at a time.

        Args:
            sample: A batch as in `build`, or inputs alone (several are `((x1, x2),)`); by default the shapes of the last batch that a call began with.
            memory: Whether to compile the training step for a batch like `sample`, which needs targets then, and say what memory it takes. `fit` uses what was
                compiled, unless a callback has more of each step kept.
            sharding: Whether to say where each array of the state lies, and how many bytes of it a device holds.
            file: Where to; standard output by default.

        Raises:
            NotReadyError: There has been no batch yet, and no `sample`; `memory` before `compile`.
            DataError: `sample` is no batch.
            ModelError: The module does not run on it.
            ShardingError: The state does not fit the mesh.
        """
        triple = None if sample is None else self._selection.split(arguments.zeros(sample), inputs_only=not memory)
        print(describe(self._session, triple, memory=memory, sharding=sharding), file=file)

    def replace_state(self, state: TrainState | InferenceState) -> None:
        """Puts another state in place of the newest one; its arrays are copied.

        Args:
            state: Of the same structure, shapes and dtypes; or, even before there is a state, an `InferenceState`, with which the trainer evaluates and
                predicts and holds nothing of an optimizer.

        Raises:
            RestoreError: It differs in structure, shapes or dtypes.
            NotReadyError: Before `build`, `fit` or `restore`.
        """
        if isinstance(state, InferenceState):
            self._session.serve(state)
        else:
            self._session.replace_state(state)

    def inference_state(self) -> InferenceState:
        """Returns what of the newest state evaluation and prediction need; it stays valid whatever is trained afterwards.

        Raises:
            NotReadyError: Before `build`, `fit` or `restore`.
        """
        return self._session.need_state("inference_state").lend().for_inference()

    # -- custom training --

    def compute_loss(
        self, params: PyTree, model_state: dict[str, PyTree], batch: Batch, *, rngs: dict[str, jax.Array], train: bool
    ) -> tuple[Any, dict[str, PyTree], dict[str, Any]]:
        """Returns the losses of a batch; override it for a loss that needs more than outputs and targets. Pure and traced, on one replica's share.

        Args:
            params: The parameters.
            model_state: The other collections.
            batch: `x`, `y`, `mask` and `weights`; weights and mask are applied to the values afterwards.
            rngs: A key for each of the module's random streams.
            train: Whether this is training.

        Returns:
            `(values, new_model_state, aux)`: values per example, `[batch]` or `[batch, ...]`, or a dict of them whose means are added up; collections that
            changed; and a flat dict of values per example or scalars that reach the logs. Its entry `"outputs"` feeds the compiled metrics.
        """
        return self._session.need_compiled("compute_loss").task.default_loss(params, model_state, batch, rngs=rngs, train=train)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, tuple[jax.Array, jax.Array]]]:
        """Returns the state after one update, and logs `{key: (sum, weight)}`; override it for another rule of updating. Pure and traced.

        Under `DataParallel` it runs on one replica's share: parameters, optimizer state and collections of all replicas are made equal afterwards,
        floating-point values by their mean; `sum_replicas` makes of each share's part of a gradient that of the global batch. Under `Sharded` it runs on the
        whole batch, and there is nothing to sum. `optimizer` and `step_rngs` are the compiled optimizer and the step's random keys. `step` is counted and
        `ema_params` are averaged for you.
        Logs are means over the epoch, so metrics that are no means (r2, rmse, perplexity) come from this method's own logs as means of their batches' values.
        They are all that is logged of training: an override logs what it wants of the compiled loss and metrics, which serve evaluation alone.

        Args:
            state: The state before.
            batch: The replica's share of the batch, or the whole batch; its `mask`, and its `weights` unless they are `None`, are yours to apply.

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
        task = self._session.need_compiled("train_step").task
        done = task.update(state, batch, unify=False)
        return done.state, task.weighted_logs(done.metrics, batch)

    @property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The optax transformation that `compile` was given, or made, for a `train_step` of one's own.

        Raises:
            NotReadyError: Before `compile`.
        """
        optimizer = self._session.need_compiled("optimizer").task.optimizer
        assert optimizer is not None
        return optimizer

    def sum_replicas(self, tree: PyTree) -> PyTree:
        """Returns the sum over all replicas, inside `train_step` and `compute_loss`; under `Sharded`, where there is one, what it was given.

        Args:
            tree: Arrays of this replica.

        Raises:
            NotReadyError: Before `compile`.
        """
        return self._session.need_compiled("sum_replicas").task.strategy.sum(tree)

    def step_rngs(self, state: TrainState) -> dict[str, jax.Array]:
        """Returns a key for each of the module's random streams in training, of this step and replica, inside `train_step`.

        Args:
            state: The state before the step.

        Raises:
            NotReadyError: Before `compile`.
        """
        return self._session.need_compiled("step_rngs").task.step_rngs(state)

    # -- data --

    def _adapt(self, call: str, data: Any, *arguments: Any, **options: Any) -> Source:
        return self._session.intake.adapt(data, *arguments, call=call, selection=self._selection, **options)

    # -- training --

    @keras_names.with_hints("Trainer.fit", keras_names.FIT, ConfigError)
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
    ) -> History:
        """Trains, and returns the history of the run's epochs.

        Args:
            data: Arrays `[examples, ...]`, alone or nested in lists, tuples and dicts; data frames; a Hugging Face data set; or anything that yields
                batches: a PyTorch `DataLoader`, `tf.data`, Grain, an iterable, a generator, a function that makes an iterator.
            y: Targets, for arrays.
            sample_weight: Weights `[examples]` or `[examples, ...]`, for arrays.
            steps: Updates to make.
            epochs: The epoch index before which to end. With `steps`, whichever comes first; with neither, one epoch.
            initial_epoch: The index of the first epoch.
            batch_size: Rows of a batch, for arrays; 32 by default.
            steps_per_epoch: Batches of an epoch; a pass over the data by default.
            shuffle: Whether arrays are taken in another order in each pass; it follows from the seed and the pass.
            drop_remainder: Whether the short last batch of arrays is left out. Otherwise it is padded by repeating its rows, which count nowhere, but are
                seen by what couples rows, such as batch statistics.
            validation_data: What to validate on, as `data`, or `(x, y[, sample_weight])` of arrays; a dict of such sets by name.
            validation_split: The last part of the arrays to validate on, between 0 and 1, taken before shuffling.
            validation_batch_size: Rows of a batch of validation; `batch_size` by default.
            validation_steps: Batches of a validation; all by default.
            validation_freq: Validate every so many epochs, at the epochs in a list (counted from 1), or when a trigger fires.
            class_weight: `{label: weight}`, multiplied with sample weights; labels without a weight count 1.
            callbacks: What happens beside the steps.
            log_every: How often, in steps, values are read for those who look at the whole run, such as `TerminateOnNaN`.
            resume: `"auto"` goes on from the newest good checkpoint of the one `ModelCheckpoint`, or begins afresh without one; `True` insists that there is
                one; a path names it. `steps` and `epochs` count from the beginning of the run that is resumed.
            verbose: 0 for silence, 2 for plain lines, 1 or `"auto"` for a bar in a terminal or a notebook and lines elsewhere.
            fast_dev_run: So many batches of training and of each validation, all hooks, and no files: callbacks that write any are left out, and nothing is
                resumed. To see in seconds whether a script runs to its end.
            overfit_batches: Trains on the first so many batches of the data alone, in their order, in every epoch: a model that cannot learn these by heart
                has a fault. Validation is as ever.

        Raises:
            NotReadyError: Before `compile`.
            ConfigError: Arguments that make no sense, alone or together.
            DataError: Data that cannot be turned into batches.
            ModelError: The module does not run on the first batch.
            LossError: The loss does not fit.
            MetricError: A metric does not fit.
            CallbackError: Callbacks that cannot work.
            CheckpointError: A checkpoint, or the directory of one, cannot be used.

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
        arguments.check_counts(steps=steps, epochs=epochs, steps_per_epoch=steps_per_epoch, log_every=log_every)
        arguments.check_counts(validation_steps=validation_steps, validation_batch_size=validation_batch_size)
        arguments.check_initial_epoch(initial_epoch)
        trial, few = arguments.numbers_of_batches(fast_dev_run=fast_dev_run, overfit_batches=overfit_batches)
        if trial:
            steps, epochs, validation_steps, validation_freq, resume = trial, initial_epoch + 1, None, 1, None
        source = self._adapt("fit", data, y, sample_weight, batch_size=batch_size, shuffle=shuffle and not few, drop_remainder=drop_remainder)
        source, validation_data = hold_out(session, source, validation_data, validation_split, validation_batch_size)
        source = session.intake.agreed(FirstBatches(source, few)) if few else source
        sets = arguments.validation_sets(validation_data, self._selection)
        arguments.check_end(source, steps=steps, epochs=epochs, steps_per_epoch=steps_per_epoch, validates=bool(sets))
        hooks, self._history, note = callbacks_of_fit(callbacks, verbose, trial=trial)
        session.clear_stop()
        with session.make_saver() as saver, Interruption(saves=hooks.saves) as interruption:
            hooks.enter_run(saver)
            saved = find_saved(session, resume, [callback.store for callback in hooks if isinstance(callback, ModelCheckpoint)])
            options: dict[str, Any] = {"batch_size": validation_batch_size or batch_size or source.all_batch_size, "steps": validation_steps}
            options |= {"at_most": trial or None, "is_held_out": bool(validation_split)}
            loops = [self._validation_loop(name, one, hooks, interruption, **options) for name, one in sets.items()]
            validation = Validation(loops, arguments.validation_frequency(validation_freq))
            end_epoch = initial_epoch + 1 if steps is None and epochs is None else epochs
            plan = RunPlan(end_epoch=end_epoch, steps_per_epoch=steps_per_epoch, is_fit=True, keep=hooks.keep)
            parts: dict[str, Any] = {"saved": saved, "saver": saver, "callbacks": hooks, "validation": validation, "interruption": interruption}
            with spent.on("compiling"):
                run = prepare_run(session, source, plan, steps=steps, initial_epoch=initial_epoch, class_weight=class_weight, spent=spent, **parts)
            known = {"log_every": log_every, "note": note or session.choice, **params_of(session, self._model, source, sets, run.plan, trial=trial)}
            run_with_callbacks(session, self, run, known, saved=saved)
        interruption.leave()
        return self._history

    def _validation_loop(
        self,
        name: str,
        data: Any,
        hooks: CallbackList,
        interruption: Interruption,
        *,
        batch_size: int | None,
        steps: int | None,
        at_most: int | None,
        is_held_out: bool,
    ) -> Evaluation:
        size = {"batch_size": batch_size} if takes_batch_size(data.data if isinstance(data, Shard) else data) else {}
        source = data if is_held_out else self._adapt(f"validation on {name!r}", data, shuffle=False, name=f"validation_data {name!r}", **size)
        if at_most is not None:
            steps = min(at_most, source.all_batches or at_most)
        return make_evaluation(self._session, source, steps=steps, name=name, callbacks=hooks, interruption=interruption)

    # -- evaluating and predicting --

    @keras_names.with_hints("Trainer.evaluate", keras_names.EVALUATE, ConfigError)
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
        """Returns loss and metrics over data, the same for every batch size and number of devices.

        Args:
            data: As in `fit`.
            y: Targets, for arrays.
            sample_weight: Weights, for arrays.
            steps: Batches to evaluate; all by default.
            batch_size: Rows of a batch, for arrays; 32 by default.
            callbacks: Whose `on_test_*` hooks are called.
            verbose: 0 for silence, 2 for a line, 1 or `"auto"` for a bar in a terminal or a notebook and a line elsewhere.

        Raises:
            NotReadyError: Before `compile`, or before there is a state.
            DataError: Data that cannot be turned into batches.
            ModelError, LossError, MetricError: What does not fit the data.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1, kernel_init=nn.initializers.zeros))
        >>> trainer.compile("sgd", "mse", ["mae"])
        >>> trainer.build((np.ones((1, 2)), np.ones((1, 1))))
        >>> trainer.evaluate(np.ones((6, 2)), np.arange(6.0)[:, None], verbose=0)
        {'loss': 9.1666..., 'mae': 2.5}
        """
        self._session.need_compiled("evaluate")
        live = self._session.need_state("evaluate")
        arguments.check_counts(steps=steps)
        hooks = callbacks_of_call(callbacks, verbose)
        evaluation = self._evaluation(data, y, sample_weight, steps=steps, batch_size=batch_size, name="eval", hooks=hooks)
        hooks.bind(self, {})
        with contextlib.closing(hooks):
            return evaluation.evaluate(live.borrow)

    def _evaluation(
        self, data: Any, y: Any, sample_weight: Any, *, steps: int | None, batch_size: int | None, name: str, hooks: CallbackList | None = None
    ) -> Evaluation:
        source = self._adapt("evaluate", data, y, sample_weight, batch_size=batch_size, shuffle=False)
        return make_evaluation(self._session, source, steps=steps, name=name, callbacks=hooks)

    @keras_names.with_hints("Trainer.predict", keras_names.PREDICT, ConfigError)
    def predict(
        self, data: Any, *, steps: int | None = None, batch_size: int | None = None, callbacks: Iterable[Callback] | None = (), verbose: int | str = 0
    ) -> PyTree:
        """Returns the module's outputs for all examples, in order, as NumPy arrays `[examples, ...]`.

        Args:
            data: Arrays (a tuple is several inputs), or anything that yields batches, whose targets are ignored.
            steps: Batches to predict; all by default.
            batch_size: Rows of a batch, for arrays; 32 by default.
            callbacks: Whose `on_predict_*` hooks are called.
            verbose: 0 for silence, 1 for a bar.

        Raises:
            NotReadyError: Before there is a state.
            DataError: Data that cannot be turned into batches.
            ModelError: The module does not run on it, or an output has no axis of examples.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(3))
        >>> trainer.compile("sgd", "mse")
        >>> trainer.build(np.ones((1, 2)))
        >>> trainer.predict(np.ones((10, 2))).shape
        (10, 3)
        """
        live = self._session.need_state("predict")
        arguments.check_counts(steps=steps)
        source = self._adapt("predict", data, batch_size=batch_size, shuffle=False, inputs_only=True)
        if source.is_endless and steps is None:
            raise ConfigError("This data never ends. Pass steps=.")
        hooks = callbacks_of_call(callbacks, verbose)
        hooks.bind(self, {"test_steps": steps or source.all_batches})
        with contextlib.closing(hooks), contextlib.closing(self._session.feeder.prediction(source)) as feed:
            check = self._session.see_batch
            return predict(self._session.any_program(), live.borrow, feed, steps=steps, callbacks=hooks, check=check)

    def predict_iter(self, data: Any, *, steps: int | None = None, batch_size: int | None = None) -> Generator[PyTree, None, None]:
        """Returns an iterator over the module's outputs, batch by batch, for data or outputs that are too large for memory.

        Each is what `predict` joins: NumPy arrays `[rows, ...]` for the real rows of one batch. Data is read one batch ahead, so that the device computes while
        the caller works, and nothing is kept of what was yielded. The state is that of the call, whatever is trained meanwhile. Breaking off closes the data;
        a batch that was read from an iterator and not yielded goes back to the trainer, whose next call with that iterator begins with it.

        Args:
            data: As in `predict`; it may be endless.
            steps: Batches to predict; all by default.
            batch_size: Rows of a batch, for arrays; 32 by default.

        Raises:
            NotReadyError: Before there is a state.
            DataError: Data that cannot be turned into batches.
            ModelError: The module does not run on it, or an output has no axis of examples.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(3))
        >>> trainer.compile("sgd", "mse")
        >>> trainer.build(np.ones((4, 2)))
        >>> [outputs.shape for outputs in trainer.predict_iter(np.ones((10, 2)), batch_size=4)]
        [(4, 3), (4, 3), (2, 3)]
        """
        session = self._session
        live = session.need_state("predict_iter")
        arguments.check_counts(steps=steps)
        source = self._adapt("predict", data, batch_size=batch_size, shuffle=False, inputs_only=True)
        make_feed = functools.partial(session.feeder.prediction, source)
        state, step = live.lend(), live.step
        # Unless it was trained meanwhile, the state of the call is the newest one, which may lie elsewhere since a batch was seen.
        return predict_iter(session.any_program(), lambda: live.lend() if live.step == step else state, make_feed, steps=steps, check=session.see_batch)

    def train_on_batch(self, batch: Any) -> dict[str, float]:
        """Makes one update and returns loss and metrics of this batch alone, from before the update.

        Args:
            batch: `x`, `(x,)`, `(x, y)`, `(x, y, sample_weight)` or a dict.

        Raises:
            NotReadyError: Before `compile`.
            DataError, ModelError, LossError, MetricError: What does not fit.
        """
        return single.train_on_batch(self._session, self._selection.split(batch))

    def test_on_batch(self, batch: Any) -> dict[str, float]:
        """Returns loss and metrics of one batch.

        Args:
            batch: As in `train_on_batch`.

        Raises:
            NotReadyError: Before `compile`, or before there is a state.
            DataError, ModelError, LossError, MetricError: What does not fit.
        """
        return single.test_on_batch(self._session, self._selection.split(batch))

    def predict_on_batch(self, x: Any) -> PyTree:
        """Returns the module's outputs for one batch of inputs, as NumPy arrays `[batch, ...]`.

        Args:
            x: Inputs; a tuple is several of them, a dict goes by the trainer's `inputs`.

        Raises:
            NotReadyError: Before there is a state.
            DataError, ModelError: What does not fit.
        """
        return single.predict_on_batch(self._session, self._selection.split(x, inputs_only=True).x if isinstance(x, dict) else x)

    # -- loops --

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
    ) -> TrainLoop:
        """Returns an iterator of checkpoints that trains as it goes; `fit` is a `for` over one.

        Args:
            data: As in `fit`.
            y: Targets, for arrays.
            sample_weight: Weights, for arrays.
            steps: Updates to make.
            every: When a checkpoint is yielded, besides the last step.
            batch_size: Rows of a batch, for arrays; 32 by default.
            steps_per_epoch: Batches over which the running metrics are taken; a pass over the data by default.
            shuffle: Whether arrays are taken in another order in each pass.
            drop_remainder: Whether the short last batch of arrays is left out.
            class_weight: `{label: weight}`.
            grads: Whether checkpoints have the gradient of their step, which takes as much memory as the parameters.
            sown: Collections of sown values, such as `"summaries"`, that checkpoints have of their step.

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
        arguments.check_counts(steps=steps)
        source = self._adapt("train_loop", data, y, sample_weight, batch_size=batch_size, shuffle=shuffle, drop_remainder=drop_remainder)
        return TrainLoop.of(
            self._session,
            source,
            class_weight,
            steps=steps,
            every=arguments.trigger_of("train_loop", every),
            steps_per_epoch=steps_per_epoch,
            grads=grads,
            sown=sown,
        )

    def eval_loop(
        self, data: Any, y: Any = None, sample_weight: Any = None, *, steps: int | None = None, name: str = "eval", batch_size: int | None = None
    ) -> EvalLoop:
        """Returns a function `checkpoint -> summary` that evaluates a checkpoint's state over data.

        Args:
            data: As in `fit`; a one-shot iterator serves only once.
            y: Targets, for arrays.
            sample_weight: Weights, for arrays.
            steps: Batches of each evaluation; all by default.
            name: The group of its metrics.
            batch_size: Rows of a batch, for arrays; 32 by default.

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
        self._session.need_compiled("eval_loop")
        arguments.check_counts(steps=steps)
        return EvalLoop.of(self._evaluation(data, y, sample_weight, steps=steps, batch_size=batch_size, name=arguments.group_name(name)))

    # -- looking into it --

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
        """Returns how the loss goes while the learning rate grows from step to step, on a copy of the state, and the rate that follows from it.

        The range test of Smith, "Cyclical Learning Rates for Training Neural Networks" (2017). It ends early when the loss diverges. Nothing of the trainer
        changes, and the same call gives the same curve. Steps are made one by one, whatever `steps_per_call` says.

        Args:
            data: As in `fit`, but for iterators, which would be used up.
            y: Targets, for arrays.
            sample_weight: Weights, for arrays.
            lowest: The first rate.
            highest: The last one.
            steps: How many rates are tried; each is the one before times the same factor. The data begins anew when it ends.
            batch_size: Rows of a batch, for arrays; 32 by default. The rate that is found is for batches of this size.
            shuffle: Whether arrays are taken in another order in each pass.
            drop_remainder: Whether the short last batch of arrays is left out.
            class_weight: `{label: weight}`.

        Raises:
            NotReadyError: Before `compile`.
            OptimizerError: The optimizer's rate cannot be set.
            ConfigError, DataError, ModelError, LossError, MetricError: As in `fit`.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("sgd", "mse")
        >>> x = np.linspace(0, 1, 64, dtype=np.float32)[:, None]
        >>> 0.001 < trainer.find_learning_rate(x, 2 * x).suggestion < 1
        True
        """
        self._session.need_trainable("find_learning_rate")
        arguments.check_counts(steps=steps)
        if not 0 < lowest < highest < float("inf"):
            raise ConfigError(f"find_learning_rate goes from lowest to highest, both positive. Received: lowest={lowest!r}, highest={highest!r}.")
        options: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "drop_remainder": drop_remainder}
        source = self._adapt("a trial", data, y, sample_weight, is_kept=False, **options)
        with trained_aside(self._session, source, class_weight, "find_learning_rate") as (session, feed):
            return find_learning_rate(session, feed, lowest=lowest, highest=highest, steps=steps)

    def hunt_nan(
        self,
        data: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        steps: int | None = None,
        restore_from: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        drop_remainder: bool = False,
        class_weight: Mapping[int, float] | None = None,
    ) -> NanReport | None:
        """Makes the steps of a run again, on a copy of the state, until one is not finite; then that one operation by operation, to say what spoilt it.

        The report names the step, the first loss, gradient or parameter that is not finite, and the operations from which that comes: the layer, the line of
        your code, and what they were given. Nothing of the trainer changes.

        Args:
            data: What `fit` was given; an iterator would be used up.
            y: Targets, for arrays.
            sample_weight: Weights, for arrays.
            steps: How many steps to make at most; to the end of the present pass over the data by default.
            restore_from: A checkpoint from before that step, or a directory of checkpoints, whose newest good one with finite parameters is taken; its
                position in the data is taken, too. By default the trainer's state, or the initial one where it has none, and the beginning of the data.
            batch_size: As in that `fit`, like all that follows.
            shuffle: Whether arrays are taken in another order in each pass.
            drop_remainder: Whether the short last batch of arrays is left out.
            class_weight: `{label: weight}`.

        Returns:
            What was found; `None` if every step was finite.

        Raises:
            NotReadyError: Before `compile`.
            ConfigError: The parameters are not finite to begin with; data that can be passed over only once.
            CheckpointError: There is no checkpoint that could be taken, or it does not fit.
            DataError, ModelError, LossError, MetricError: As in `fit`.

        >>> import numpy as np
        >>> trainer = Trainer(nn.Dense(1))
        >>> trainer.compile("sgd", lambda outputs, targets: jax.numpy.log(outputs[:, 0] - targets))
        >>> report = trainer.hunt_nan(np.ones((4, 2), np.float32), 9 * np.ones(4, np.float32))
        >>> report.step, report.culprit, report.origins[0].operation
        (1, 'the loss', 'log')
        """
        self._session.need_trainable("hunt_nan")
        arguments.check_counts(steps=steps)
        options: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "drop_remainder": drop_remainder}
        source = self._adapt("a trial", data, y, sample_weight, is_kept=False, **options)
        if source.is_endless and steps is None:
            raise ConfigError("This data never ends. Pass steps=.")
        saved = None if restore_from is None else last_finite(restore_from)
        with trained_aside(self._session, source, class_weight, "hunt_nan", saved, keep=WATCHED) as (session, feed):
            return hunt_nan(session, feed, steps=steps)

    # -- saving --

    def export(self, path: str | os.PathLike[str], sample: Any = None, *, batch_size: int | None = None, platforms: Sequence[str] | None = None) -> Path:
        """Writes what `predict_on_batch` computes, with its weights, as one file that needs neither fitflax nor the module's code.

        Where it is used, jax and flatbuffers are enough: `run = jax.export.deserialize(open(path, "rb").read()).call`, then `run(x)`; inputs that are a tuple
        are several arguments. JAX reads such files for six months at least, and computes with them as with any function of its own: they can be jitted, and
        mapped. Averaged parameters are taken where there are any. Needs the extra `export`.

        Args:
            path: The file; one that is there is replaced.
            sample: A batch as in `build`, or inputs alone (several are `((x1, x2),)`), whose shapes and dtypes are taken; by default those of the last batch
                that a call began with.
            batch_size: The number of rows that it takes; any number by default, for which the module is traced with an unknown one: where its code asks whether
                that equals another number, JAX says no.
            platforms: What it is to run on, of `"cpu"`, `"cuda"`, `"rocm"` and `"tpu"`; by default where it is now.

        Raises:
            NotReadyError: Before there is a state, or without any batch's shapes.
            ImportError: The package flatbuffers is not installed.
            ConfigError: Unknown platforms; weights of 2 GB and more.
            ModelError: The module cannot be exported; the message says why.
        """
        session = self._session
        live = session.need_state("export")
        arguments.check_counts(batch_size=batch_size)
        batch = session.sample if sample is None else as_given(self._selection.split(arguments.zeros(sample), inputs_only=True))
        if batch is None:
            raise NotReadyError("export needs the shapes of inputs, and there has been no batch yet. Pass export(path, sample=x).")
        return export_inference(path, session.any_program(), live.borrow(), batch, batch_size=batch_size, platforms=platforms)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the state as a checkpoint directory at `path`, replacing a checkpoint that is there, and returns the path.

        Of several processes all must call it where the state is split between them; otherwise the first one's call is what counts.

        Args:
            path: The directory to write.

        Raises:
            NotReadyError: Before there is a state.
            CheckpointError: Something else is there, or the disk fails, in whichever process.

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
        live = self._session.need_state("save")
        metadata = {"run_id": self._session.run_id, "step": live.step, "epoch": 0, "metrics": {}, "settings": {"seed": self._session.seed}}
        return save_checkpoint(path, train=live.borrow(), run={}, metadata=metadata)

    def restore(
        self, path: str | os.PathLike[str], *, weights_only: bool = False, partial: bool = False, mapping: Mapping[str, str | None] | None = None
    ) -> RestoreReport:
        """Takes the state from a checkpoint; all of it, or for fine-tuning what another model has in common with this one.

        Paths are those that errors list: `params/Dense_0/kernel`, and for other collections `batch_stats/BatchNorm_0/mean`. After an error the state is what
        it was. The old state is let go of before the new one comes, so the devices need not hold both.

        Args:
            path: A checkpoint directory, or a directory of them, whose newest good one is taken.
            weights_only: Whether only parameters and collections are taken, and the optimizer and the step begin afresh.
            partial: Whether the checkpoint may be of another model. Taken are the parameters and collections whose path, shape and dtype agree; the others are
                initialized as `build` does it, and the optimizer and the step begin afresh, as with `weights_only`. The model's shapes must be known: call
                `build` first. An array of another shape or dtype is an error unless `mapping` says what to do with it.
            mapping: Other names: `{path in this model: path in the checkpoint}`, of single arrays or of all below a path; the longest path decides. `None` in
                place of a path, with `partial`, initializes what the checkpoint has, too. Two paths may take from the same one. Without `partial` everything
                must fit in the end, and the optimizer's state follows the parameters.

        Returns:
            What was restored, what was initialized, and what of the checkpoint was left unused.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            CorruptCheckpointError: It is damaged.
            RestoreError: It does not fit the model or the optimizer, the message lists all differences; or an entry of `mapping` has no effect.
            ConfigError: `mapping` makes no sense.
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
        saved = load_checkpoint(path, roots)
        report = self._session.place(saved, None, weights_only=weights_only, partial=partial, mapping=mapping)
        if not (weights_only or partial) and self._session.described:
            warn_of_changes(saved, self._session.described, to_resume=False)
        return report
