"""`Trainer`: the facade. It checks arguments, turns them into the parts below it, and delegates; no step and no loop is written here."""

import dataclasses
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.core.scope import DenyList

from fitflax import arguments, evaluation, optimizers
from fitflax.callbacks import Callback, ModelCheckpoint
from fitflax.callbacks.base import CallbackList
from fitflax.callbacks.history import History
from fitflax.checkpoints.closing import load_closing_row
from fitflax.checkpoints.msgpack_format import from_saved
from fitflax.checkpoints.resume import check_settings, find_resume, fit_to, restored_state
from fitflax.checkpoints.store import Saved, load_checkpoint, save_checkpoint
from fitflax.data import Batcher, Feed, Position, Source, adapt
from fitflax.data.adapt import is_in_memory
from fitflax.data.arrays import ArraySource
from fitflax.data.batch import Selection, Triple
from fitflax.data.feeds import Feeder
from fitflax.errors import ConfigError, DataError, FitflaxWarning, NotReadyError, OptimizerError, RestoreError
from fitflax.evaluation import EvalLoop
from fitflax.logs import StepValues
from fitflax.loop import Progress, RunPlan, TrainLoop, Validation
from fitflax.model import adapt_module, mutable_filter
from fitflax.objective import Objective
from fitflax.parallel import DataParallel, Strategy
from fitflax.program import LiveState, Program, scalar_loss_error
from fitflax.signals import Interruption
from fitflax.state import Batch, PyTree, TrainState
from fitflax.step import Task, TrainSums
from fitflax.triggers import Trigger
from fitflax.triggers import every as make_every

__all__ = ["Trainer"]

_EVERY_STEP = make_every(steps=1)


class Trainer:
    """Trains, evaluates and runs a linen module.

    Args:
        model: Any `flax.linen` module, unchanged. A mode keyword of its `__call__` (`train`, `training`, `deterministic`), or such a field, is found and set.
        seed: What all randomness follows from: initialization, dropout, the order of examples.
        rngs: Names of the random streams that the module uses at initialization and in training, or `{"init": names, "train": names, "eval": names}`.
        inputs: What of a batch that is a dict the module is called with: a key (one positional argument), a tuple of keys (several), or
            `{argument: key}` (keywords).
        targets: What of such a batch are the targets: a key, a tuple of keys, or `{name: key}`.
        parallel: Where steps run; `DataParallel()` over all local devices by default.
        mutable: linen's filter for collections that training may change.
        transient: Collections that are never part of the state: taken out after each call. Values sown into `losses` are added to the loss.
        train_kwargs: Keyword arguments of `__call__` in training.
        eval_kwargs: Keyword arguments of `__call__` in evaluation and prediction.

    Raises:
        ConfigError: An argument that makes no sense.

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
        transient: Sequence[str] = ("losses", "summaries", "intermediates"),
        train_kwargs: Mapping[str, Any] | None = None,
        eval_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"Trainer(seed=...) must be an integer of at least 0. Received: {seed!r}.")
        if parallel is not None and not isinstance(parallel, Strategy):
            raise ConfigError(f"Trainer(parallel=...) takes a strategy such as fitflax.parallel.DataParallel(). Received: {parallel!r}.")
        self._selection = Selection(inputs, targets)
        self._module = adapt_module(model, train_kwargs=train_kwargs, eval_kwargs=eval_kwargs, keyword_inputs=isinstance(inputs, dict))
        self._model = model
        self._seed = seed
        self._streams = arguments.streams_of(rngs)
        self._transient = tuple(transient)
        self._mutable = mutable_filter(mutable, self._transient)
        self._strategy = DataParallel() if parallel is None else parallel
        self._optimizer: optax.GradientTransformationExtraArgs | None = None
        self._given_optimizer: Any = None
        self._program: Program | None = None
        self._is_compiled = False
        self._pad = True
        self._feeder = Feeder(self._strategy.num_replicas, pad=True)
        self._live: LiveState | None = None
        # A restored optimizer state, until compile() says what it is of.
        self._unplaced: tuple[Any, Saved] | None = None
        self._run_id = secrets.token_hex(8)
        self._history = History()
        self._stop_reason: str | None = None
        self._is_stopping = False
        self._last_loop: TrainLoop | None = None

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
        return self._need_state("state").lend()

    @property
    def step(self) -> int:
        """Finished updates."""
        return 0 if self._live is None else self._live.step

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
        rate = optimizers.get_learning_rate(self._need_state("learning_rate").borrow().opt_state)
        if rate is None:
            raise OptimizerError(
                "This optimizer's learning rate cannot be read. Give the optimizer by name, compile('adam', learning_rate=...), or wrap it: "
                "optax.inject_hyperparams(optax.adam)(learning_rate=...)."
            )
        return float(rate)

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        live = self._need_state("learning_rate")
        state = live.borrow()
        live.replace(dataclasses.replace(state, opt_state=optimizers.set_learning_rate(state.opt_state, value)), live.step)

    @property
    def stop_training(self) -> bool:
        """Whether somebody asked to stop; setting it to `True` is `stop()`."""
        return self._is_stopping

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        if value:
            self.stop("stop_training was set")
        else:
            self._is_stopping, self._stop_reason = False, None

    @property
    def stop_reason(self) -> str | None:
        """Why the last `fit` stopped before its end, or is about to; `None` if it did not."""
        return self._stop_reason

    def stop(self, reason: str = "stop() was called") -> None:
        """Asks a running `fit` to stop after the present step. Its validation and end hooks still run.

        Args:
            reason: Kept as `stop_reason`; the first one counts.
        """
        if not self._is_stopping:
            self._is_stopping, self._stop_reason = True, reason

    # -- preparing --

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
            pad: Whether short batches are padded to the full shape. Without it each size is compiled by itself and must divide over the devices.

        Raises:
            OptimizerError: Neither a known name nor an optax transformation.
            LossError: An unknown loss.
            MetricError: An unknown metric.
            ConfigError: An argument that makes no sense.
        """
        if isinstance(optimizer, str):
            transformation = optimizers.get(optimizer, learning_rate)
        elif learning_rate is not None:
            raise ConfigError("compile(learning_rate=...) goes with an optimizer given by name; an optax transformation has its own.")
        elif not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise OptimizerError(f"optimizer must be a name or an optax transformation. Received: {optimizer!r}.")
        else:
            transformation = optimizer
        objective = Objective(loss, metrics, weighted_metrics, loss_weights)
        is_same = self._is_compiled and optimizer is self._given_optimizer and not isinstance(optimizer, str)
        if not is_same:
            self._optimizer = optax.with_extra_args_support(transformation)
        self._given_optimizer = optimizer
        self._pad = pad
        self._is_compiled = True
        self._program = self._make_program(objective)
        self._feeder = Feeder(self._strategy.num_replicas, pad)
        if self._live is not None and not is_same:
            self._start_optimizer()

    def _make_program(self, objective: Objective) -> Program:
        kind = type(self)
        return Program(
            Task(
                model=self._module,
                strategy=self._strategy,
                objective=objective,
                optimizer=self._optimizer,
                streams=self._streams,
                mutable=self._mutable,
                transient=self._transient,
                compute_loss=self.compute_loss if kind.compute_loss is not Trainer.compute_loss else None,
                custom_step=self.train_step if kind.train_step is not Trainer.train_step else None,
            )
        )

    def _start_optimizer(self) -> None:
        """Gives the state an optimizer state: the restored one that waits for it, or a fresh one."""
        assert self._live is not None and self._optimizer is not None
        state = self._live.borrow()
        if self._unplaced is not None:
            saved_state, saved = self._unplaced
            target = jax.eval_shape(self._optimizer.init, state.params)
            opt_state = self._strategy.put(fit_to(target, saved_state, saved, "train/opt_state"))
            self._unplaced = None
        else:
            # Copied, because an optimizer may keep the parameters themselves, whose buffers the step takes only once.
            opt_state = self._strategy.copy(self._strategy.compile(self._optimizer.init, inputs=("replicated",), outputs="replicated")(state.params))
        self._live.replace(dataclasses.replace(state, opt_state=opt_state), self._live.step)

    def build(self, batch: Any) -> None:
        """Initializes the state from a batch's shapes and dtypes; its values do not matter. `fit` does it by itself.

        Args:
            batch: A batch as training gets it: `x`, `(x,)`, `(x, y)`, `(x, y, sample_weight)` or a dict; arrays or `jax.ShapeDtypeStruct`.

        Raises:
            NotReadyError: Before `compile`.
            DataError: `batch` is no batch.
            ModelError: The module does not run on it.
        """
        self._need_compiled("build")
        raw = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, batch)
        padded, _ = Batcher(num_replicas=self._strategy.num_replicas)(self._selection.split(raw))
        self._build(padded)

    def _build(self, batch: Batch) -> None:
        state = self._need_program("build").init(jax.random.key(self._seed), batch)
        self._live = LiveState(self._strategy, state, 0)
        self._run_id = secrets.token_hex(8)
        self._last_loop = self._unplaced = None

    def replace_state(self, state: TrainState) -> None:
        """Puts another state in place of the newest one; its arrays are copied.

        Args:
            state: Of the same structure, shapes and dtypes.

        Raises:
            RestoreError: It differs in structure, shapes or dtypes.
            NotReadyError: Before `build`, `fit` or `restore`.
        """
        live = self._need_state("replace_state")
        now = live.borrow()
        if jax.tree.structure(state) != jax.tree.structure(now):
            raise RestoreError(f"The new state has another structure: {jax.tree.structure(state)} instead of {jax.tree.structure(now)}.")
        for (path, new), old in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(now), strict=True):
            if np.shape(new) != old.shape or jax.numpy.result_type(new) != old.dtype:
                raise RestoreError(f"The new state's {jax.tree_util.keystr(path)} is {np.shape(new)} {new.dtype}, but {old.shape} {old.dtype} is needed.")
        live.replace(self._strategy.put(state), int(state.step))

    def _need_compiled(self, what: str) -> None:
        if not self._is_compiled:
            raise NotReadyError(f"{what} needs to know what to minimize. Call compile(optimizer, loss, metrics) first.")

    def _need_program(self, what: str) -> Program:
        if self._program is None:
            raise NotReadyError(f"{what} comes after compile(optimizer, loss, metrics).")
        return self._program

    def _need_state(self, what: str) -> LiveState:
        if self._live is None:
            raise NotReadyError(f"{what}: there is no state yet. Call build(batch), fit(...) or restore(path) first.")
        return self._live

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
        return self._need_program("compute_loss").task.default_loss(params, model_state, batch, rngs=rngs, train=train)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, tuple[jax.Array, jax.Array]]]:
        """Returns the state after one update, and logs `{key: (sum, weight)}`; override it for another rule of updating. Pure and traced.

        It runs on one replica's share. `step` is counted for you; parameters, optimizer state and collections of all replicas are made equal afterwards,
        floating-point values by their mean. Sum gradients over the axis `"replica"` where you want the global batch's.

        Args:
            state: The state before.
            batch: The replica's share of the batch.
        """
        new_state, metrics, _, _ = self._need_program("train_step").task.update(state, batch)
        return new_state, {key: (metric.compute(), jax.numpy.float32(1)) for key, metric in metrics.items()}

    # -- data --

    def _adapt(self, data: Any, *arguments: Any, **options: Any) -> Source:
        return adapt(data, *arguments, seed=self._seed, selection=self._selection, **options)

    def _next_position(self, source: Source) -> Position:
        """Returns where the passes over the data go on: a new run begins a new pass."""
        last = Position() if self._last_loop is None else self._last_loop.progress.position
        return Position(last.passes + (last.examples > 0)) if source.can_restart else Position()

    def _check_whole(self, program: Program, source: Source, *, train: bool) -> None:
        """Checks what can be known of in-memory data before the first step."""
        if not isinstance(source, ArraySource) or source.batch_size is None or source.num_examples is None:
            return
        size = min(source.batch_size, source.num_examples)
        short = source.num_examples % size
        if program.structure(train=train).scalar_loss and self._pad and (short or size % self._strategy.num_replicas):
            raise scalar_loss_error(short or size, -(-size // self._strategy.num_replicas) * self._strategy.num_replicas)

    def _check_labels(self, program: Program, source: Source, state: TrainState, batch: Batch) -> None:
        if isinstance(source, ArraySource) and type(self).compute_loss is Trainer.compute_loss and program.task.objective.has_label_loss:
            program.task.objective.check_labels(program.output_shapes(state, batch), source.y)

    # -- training --

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
        callbacks: Iterable[Callback] = (),
        log_every: int = 50,
        resume: str | os.PathLike[str] | bool | None = None,
        verbose: int | str = "auto",
    ) -> History:
        """Trains, and returns the history of the run's epochs.

        Args:
            data: Arrays `[examples, ...]`, alone or nested in lists, tuples and dicts; or anything that yields batches: an iterable, a generator, a function
                that makes an iterator.
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
            verbose: 0 for silence, 1 for a bar, 2 for a line an epoch, `"auto"` for a bar in a terminal and lines elsewhere.

        Raises:
            NotReadyError: Before `compile`.
            ConfigError: Arguments that make no sense, alone or together.
            DataError: Data that cannot be turned into batches.
            ModelError: The module does not run on the first batch.
            LossError: The loss does not fit.
            MetricError: A metric does not fit.
            CallbackError: Callbacks that cannot work.
            CheckpointError: A checkpoint, or the directory of one, cannot be used.
        """
        self._need_compiled("fit")
        arguments.check_counts(steps=steps, epochs=epochs, steps_per_epoch=steps_per_epoch, validation_steps=validation_steps, log_every=log_every)
        source, held_out = self._fit_source(data, y, sample_weight, batch_size, shuffle, drop_remainder, validation_split)
        if held_out is not None and validation_data is not None:
            raise ConfigError("validation_split and validation_data are both given; one of them says what to validate on.")
        validates = validation_data is not None or held_out is not None
        arguments.check_end(source, steps=steps, epochs=epochs, steps_per_epoch=steps_per_epoch, validates=validates)
        frequency = arguments.validation_frequency(validation_freq)
        self._history, self._is_stopping, self._stop_reason = History(), False, None
        callbacks = list(callbacks)
        hooks = CallbackList([*callbacks, self._history, *arguments.default_bar(callbacks, verbose)])
        settings = {"seed": self._seed, "batch_size": source.batch_size, "steps_per_epoch": steps_per_epoch, "num_examples": source.num_examples}
        stores = [callback.store for callback in hooks if isinstance(callback, ModelCheckpoint)]
        saved = find_resume(resume, stores)
        if saved is None and resume == "auto":
            # A run that died before its first checkpoint is begun again under its own name, so that its other directories are still its own.
            self._run_id = stores[0].run_id() or self._run_id
        progress = self._start_progress(saved, settings, initial_epoch)
        with Interruption() as interruption:
            validation = Validation(
                self._validation_loops(
                    held_out if held_out is not None else validation_data,
                    hooks,
                    interruption,
                    batch_size=validation_batch_size or batch_size or source.batch_size,
                    steps=validation_steps,
                ),
                frequency,
            )
            if saved is None:
                progress.position = self._next_position(source)
            feed = self._feeder.train(source, class_weight, progress.position)
            progress.position = feed.position
            loop = self._prepare_loop(
                source,
                feed,
                RunPlan(
                    end_step=None if steps is None else progress.first_step + steps,
                    end_epoch=initial_epoch + 1 if steps is None and epochs is None else epochs,
                    steps_per_epoch=steps_per_epoch,
                    at_epoch_ends=True,
                    info={"settings": settings},
                    process_start=progress.step,
                    repeats_last=True,
                ),
                progress=progress,
                callbacks=hooks,
                validation=validation,
                interruption=interruption,
                saved=saved,
            )
            params = {
                "epochs": loop.plan.end_epoch,
                "steps": steps_per_epoch or source.num_batches,
                "test_steps": validation_steps,
                "log_every": log_every,
                "validation_sets": tuple(evaluate.name for evaluate in validation.loops),
                "first_epoch": progress.epoch,
            }
            self._run(loop, hooks, params, saved)
            interruption.leave()
        return self._history

    def _fit_source(
        self, data: Any, y: Any, sample_weight: Any, batch_size: int | None, shuffle: bool, drop_remainder: bool, split: float
    ) -> tuple[Source, Any]:
        """Returns what to train on, and the part held out for validation."""
        source = self._adapt(data, y, sample_weight, batch_size=batch_size, shuffle=shuffle, drop_remainder=drop_remainder)
        if not split:
            return source, None
        if not 0 < split < 1:
            raise ConfigError(f"validation_split must lie between 0 and 1. Received: {split!r}.")
        if not isinstance(source, ArraySource):
            raise ConfigError("validation_split can only be taken from in-memory arrays. Pass validation_data.")
        (x, targets, weights), held_out = source.split(split)
        train = ArraySource(x, targets, weights, batch_size=source.batch_size or 32, shuffle=shuffle, seed=self._seed, drop_remainder=drop_remainder)
        return train, ArraySource(*held_out, batch_size=source.batch_size or 32)

    def _validation_loops(self, data: Any, hooks: CallbackList, interruption: Interruption, *, batch_size: int | None, steps: int | None) -> list[EvalLoop]:
        loops = []
        for name, one in arguments.validation_sets(data, self._selection).items():
            size = {"batch_size": batch_size} if is_in_memory(one) else {}
            source = self._adapt(one, shuffle=False, name=f"validation_data {name!r}", **size)
            loops.append(
                EvalLoop(
                    self._need_program("fit"), self._feeder.evaluations(source, name, steps), steps=steps, name=name, callbacks=hooks, interruption=interruption
                )
            )
        return loops

    def _start_progress(self, saved: Saved | None, settings: Mapping[str, Any], initial_epoch: int) -> Progress:
        if saved is None:
            return Progress(step=self.step, first_step=self.step, epoch=initial_epoch)
        check_settings(saved, settings)
        return Progress.from_json(saved.metadata["progress"])

    def _prepare_loop(
        self,
        source: Source,
        feed: Feed,
        plan: RunPlan,
        *,
        progress: Progress,
        callbacks: CallbackList | None = None,
        validation: Validation | None = None,
        interruption: Interruption | None = None,
        saved: Saved | None = None,
    ) -> TrainLoop:
        """Returns a loop that is ready to run: state built or restored, first batch dry-run."""
        program = self._need_program("fit")
        # The first batch is looked at, then trained on.
        fed = feed.next() or (feed.next() if feed.source.can_restart else None)
        if fed is None and saved is None:
            raise DataError("The data yields no batch.")
        if fed is not None:
            feed.push_back(fed)
        if saved is not None:
            self._place(saved, None if fed is None else fed.batch)
        elif self._live is None:
            assert fed is not None
            self._build(fed.batch)
        live = self._need_state("fit")
        sums = values = None
        if fed is not None:
            state = live.borrow()
            structure = program.prepare(state, fed.batch, train=True)
            self._check_whole(program, source, train=True)
            self._check_labels(program, source, state, fed.batch)
            if saved is not None and "sums" in saved.run:
                target = TrainSums(metrics=structure.empty, steps_since_bad=np.int32(0))  # type: ignore[arg-type]
                sums = self._strategy.put(fit_to(target, saved.run["sums"], saved, "run/sums"))
                values = StepValues(structure.places, self._strategy.put(np.asarray(saved.run["values"])))
        info = {**plan.info, "run_id": self._run_id}
        loop = TrainLoop(
            program,
            live,
            feed,
            dataclasses.replace(plan, info=info),
            progress=progress,
            callbacks=callbacks,
            validation=validation,
            sums=sums,
            values=values,
            should_stop=lambda: self._is_stopping,
            exhausted=self._data_exhausted,
            interruption=interruption,
        )
        self._last_loop = loop
        return loop

    def _data_exhausted(self) -> None:
        self.stop("data_exhausted")
        warnings.warn("The data ended before the training did.", FitflaxWarning, stacklevel=2)

    def _run(self, loop: TrainLoop, hooks: CallbackList, params: Mapping[str, Any], saved: Saved | None) -> None:
        """Runs a loop with its callbacks, from `on_train_begin` to `on_train_end`, which always comes."""
        hooks.bind(self, params)
        try:
            for callback in hooks:
                callback.open_run(self._run_id, loop.progress.step)
            hooks.start_schedules(loop.seconds)
            hooks.call("on_train_begin", {})
            if saved is not None:
                self._load_callbacks(hooks, saved, loop)
            for checkpoint in loop:
                hooks.on_checkpoint(checkpoint, loop.due)
        finally:
            loop.close()
            hooks.finish(loop.epoch_logs)

    def _load_callbacks(self, hooks: CallbackList, saved: Saved, loop: TrainLoop) -> None:
        run = from_saved(saved.run, key_impls=saved.metadata["key_impls"])
        for key in hooks.load_state_dict(run, loop.seconds):
            warnings.warn(f"Callback {key} is either new or missing: the run in {saved.path} had other callbacks.", FitflaxWarning, stacklevel=2)
        row = load_closing_row(saved.path)
        if row is not None and loop.has_nothing_to_do:
            self._history.rows.append(row)
            loop.skip_closing()

    # -- evaluating and predicting --

    def evaluate(
        self,
        data: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        steps: int | None = None,
        batch_size: int | None = None,
        callbacks: Iterable[Callback] = (),
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
            verbose: 0 for silence, 1 for a bar, 2 for a line, `"auto"` for a bar in a terminal and a line elsewhere.

        Raises:
            NotReadyError: Before `compile`, or before there is a state.
            DataError: Data that cannot be turned into batches.
            ModelError, LossError, MetricError: What does not fit the data.
        """
        self._need_compiled("evaluate")
        live = self._need_state("evaluate")
        arguments.check_counts(steps=steps)
        callbacks = list(callbacks)
        hooks = CallbackList([*callbacks, *arguments.default_bar(callbacks, verbose)])
        loop, source = self._eval_loop(data, y, sample_weight, steps=steps, batch_size=batch_size, name="eval", hooks=hooks)
        hooks.bind(self, {"test_steps": steps or source.num_batches})
        try:
            return loop.evaluate(live.borrow())
        finally:
            for callback in hooks:
                callback.close()

    def _eval_loop(
        self, data: Any, y: Any, sample_weight: Any, *, steps: int | None, batch_size: int | None, name: str, hooks: CallbackList | None = None
    ) -> tuple[EvalLoop, Source]:
        source = self._adapt(data, y, sample_weight, batch_size=batch_size, shuffle=False)
        program = self._need_program("evaluate")
        return EvalLoop(program, self._feeder.evaluations(source, name, steps), steps=steps, name=name, callbacks=hooks), source

    def predict(
        self, data: Any, *, steps: int | None = None, batch_size: int | None = None, callbacks: Iterable[Callback] = (), verbose: int | str = 0
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
        """
        live = self._need_state("predict")
        arguments.check_counts(steps=steps)
        source = self._adapt(data, batch_size=batch_size, shuffle=False, inputs_only=True)
        if source.is_endless and steps is None:
            raise ConfigError("This data never ends. Pass steps=.")
        callbacks = list(callbacks)
        hooks = CallbackList([*callbacks, *arguments.default_bar(callbacks, verbose)])
        hooks.bind(self, {"test_steps": steps or source.num_batches})
        try:
            return evaluation.predict(self._predict_program(), live.borrow(), self._feeder.prediction(source), steps=steps, callbacks=hooks)
        finally:
            for callback in hooks:
                callback.close()

    def _predict_program(self) -> Program:
        if self._program is None:
            self._program = self._make_program(Objective())
        return self._program

    def train_on_batch(self, batch: Any) -> dict[str, float]:
        """Makes one update and returns loss and metrics of this batch alone, from before the update.

        Args:
            batch: `x`, `(x,)`, `(x, y)`, `(x, y, sample_weight)` or a dict.

        Raises:
            NotReadyError: Before `compile`.
            DataError, ModelError, LossError, MetricError: What does not fit.
        """
        self._need_compiled("train_on_batch")
        fed = self._feeder.single(self._selection.split(batch), "train")
        if self._live is None:
            self._build(fed.batch)
        live, program = self._need_state("train_on_batch"), self._need_program("train_on_batch")
        program.prepare(live.borrow(), fed.batch, train=True)
        state, _, values = program.train(live.take(), program.empty_train_sums(), fed)
        live.advance(state)
        return values.metrics()

    def test_on_batch(self, batch: Any) -> dict[str, float]:
        """Returns loss and metrics of one batch.

        Args:
            batch: As in `train_on_batch`.

        Raises:
            NotReadyError: Before `compile`, or before there is a state.
            DataError, ModelError, LossError, MetricError: What does not fit.
        """
        self._need_compiled("test_on_batch")
        live, program = self._need_state("test_on_batch"), self._need_program("test_on_batch")
        fed = self._feeder.single(self._selection.split(batch), "test")
        program.prepare(live.borrow(), fed.batch, train=False)
        return program.evaluate(live.borrow(), program.empty_eval_sums(), fed)[1].metrics()

    def predict_on_batch(self, x: Any) -> PyTree:
        """Returns the module's outputs for one batch of inputs, as NumPy arrays `[batch, ...]`.

        Args:
            x: Inputs; a tuple is several of them, a dict goes by the trainer's `inputs`.

        Raises:
            NotReadyError: Before there is a state.
            DataError, ModelError: What does not fit.
        """
        live, program = self._need_state("predict_on_batch"), self._predict_program()
        inputs = self._selection.split(x, inputs_only=True).x if isinstance(x, dict) else x
        fed = self._feeder.single(Triple(inputs, (), None), "predict")
        program.check_predict(live.borrow(), fed.batch)
        outputs = self._strategy.join(program.predict(live.borrow(), fed.batch, 0))
        return jax.tree.map(lambda leaf: leaf[: fed.num_real], outputs)

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

        Raises:
            NotReadyError: Before `compile`.
            ConfigError, DataError, ModelError, LossError, MetricError: As in `fit`.
        """
        self._need_compiled("train_loop")
        arguments.check_counts(steps=steps, steps_per_epoch=steps_per_epoch)
        if not isinstance(every, Trigger):
            raise ConfigError(f"train_loop(every=...) takes a trigger, such as fitflax.every(steps=10). Received: {every!r}.")
        self._is_stopping, self._stop_reason = False, None
        source = self._adapt(data, y, sample_weight, batch_size=batch_size, shuffle=shuffle, drop_remainder=drop_remainder)
        feed = self._feeder.train(source, class_weight, self._next_position(source))
        settings = {"seed": self._seed, "batch_size": source.batch_size, "steps_per_epoch": steps_per_epoch, "num_examples": source.num_examples}
        progress = Progress(step=self.step, first_step=self.step, position=feed.position)
        plan = RunPlan(end_step=self.step + steps, steps_per_epoch=steps_per_epoch, every=every, info={"settings": settings}, process_start=self.step)
        return self._prepare_loop(source, feed, plan, progress=progress)

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
        """
        self._need_compiled("eval_loop")
        arguments.check_counts(steps=steps)
        return self._eval_loop(data, y, sample_weight, steps=steps, batch_size=batch_size, name=name)[0]

    # -- saving --

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the state as a checkpoint directory at `path`, replacing a checkpoint that is there, and returns the path.

        Args:
            path: The directory to write.

        Raises:
            NotReadyError: Before there is a state.
            CheckpointError: Something else is there, or the disk fails.
        """
        live = self._need_state("save")
        metadata = {"run_id": self._run_id, "step": live.step, "epoch": 0, "metrics": {}, "settings": {"seed": self._seed}}
        return save_checkpoint(path, train=live.borrow(), run={}, metadata=metadata)

    def restore(self, path: str | os.PathLike[str], *, weights_only: bool = False) -> None:
        """Takes the state from a checkpoint.

        Args:
            path: A checkpoint directory, or a directory of them, whose newest good one is taken.
            weights_only: Whether only parameters and collections are taken, and the optimizer and the step begin afresh.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            CorruptCheckpointError: It is damaged.
            RestoreError: It does not fit the model or the optimizer; the message lists all differences.
        """
        self._place(load_checkpoint(path), None, weights_only=weights_only)

    def _place(self, saved: Saved, batch: Batch | None, *, weights_only: bool = False) -> None:
        """Puts a saved state in place of the live one.

        What it must look like follows from the live state, or from a batch; without either the file's own structure is taken, and the first batch shows
        whether it fits.
        """
        key = jax.random.key(self._seed)
        target: Any = None
        if self._live is not None:
            target = self._live.borrow()
        elif batch is not None:
            target = self._predict_program().abstract_state(key, batch)
        restored = restored_state(saved, target=target, optimizer=self._optimizer, key=key, weights_only=weights_only)
        state, step = self._strategy.put(restored), int(restored.step)
        if self._live is None:
            self._live = LiveState(self._strategy, state, step)
        else:
            self._live.replace(state, step)
        self._unplaced = None if weights_only or self._optimizer is not None else (saved.train["opt_state"], saved)
        if weights_only and self._optimizer is not None:
            self._start_optimizer()
        if not weights_only:
            self._run_id = str(saved.metadata.get("run_id", self._run_id))
