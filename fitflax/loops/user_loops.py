"""`TrainLoop` and `EvalLoop`: loops for custom training loops, from a trainer or from functions.

A `TrainLoop` wraps a `Run`, which `fit` iterates over as well, and an `EvalLoop` wraps an `Evaluation`.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import optax
from flax import linen as nn
from flax.core.scope import DenyList

from fitflax.checkpoints.checkpoint import Checkpoint, Summary
from fitflax.checkpoints.formats.checkpoint_files import Saved, is_checkpoint
from fitflax.checkpoints.restore.load import load_checkpoint
from fitflax.checkpoints.store.checkpoint_store import CheckpointStore
from fitflax.checkpoints.store.lock import holder_of
from fitflax.checkpoints.writer.saver import Saver
from fitflax.data import Source, adapt
from fitflax.data.batch import Selection, Triple
from fitflax.data.shards import Shard
from fitflax.errors import CheckpointError, ConfigError
from fitflax.integers import is_integer
from fitflax.loops import argument_checks
from fitflax.loops.evaluation import Evaluation
from fitflax.loops.input_sources import Intake, make_feeder
from fitflax.loops.run_plan import RunPlan
from fitflax.loops.run_setup import find_saved, prepare_run
from fitflax.loops.session import Session
from fitflax.models import TRANSIENT, FunctionModel, mutable_filter
from fitflax.parallel import Strategy
from fitflax.run_config import as_config
from fitflax.steps.kept_values import Keep
from fitflax.steps.loss_and_metrics import Objective
from fitflax.steps.numerics import Numerics
from fitflax.steps.random_streams import Streams
from fitflax.steps.step_dispatch import Program
from fitflax.steps.step_functions import Task
from fitflax.storage import Location, locate
from fitflax.triggers import Trigger
from fitflax.triggers import every as make_every

__all__ = ["EvalLoop", "TrainLoop"]

_EVERY_STEP = make_every(steps=1)
_ALL_BUT_PARAMS = DenyList("params")


class TrainLoop:
    """Trains a model and yields checkpoints, for custom training loops.

    Create it from functions, or from a trainer with `Trainer.train_loop`. It yields a checkpoint when `every` fires and after the last step.
    `next_step`, `next_checkpoint` and `run` advance it manually and do not change the total. To run functions at a checkpoint, see `serial`.

    As a context manager, it ends the run at the current step and waits for saves on exit. Without `with`, the end of the run waits for them.

    Args:
        init: `init(rngs, *inputs) -> variables`, such as `module.init`; `rngs` is a dict of keys for `params` and the streams that `rngs` names.
        apply: `apply(variables, *inputs, rngs=..., mutable=...) -> (outputs, changed collections)`, such as `module.apply`. Set a mode argument
            yourself: `functools.partial(module.apply, train=True)`.
        optimizer: Optax transformation, called with `params`, or a name such as `"adam"`.
        loss: As in `Trainer.compile`: a name, or a function `(outputs, targets) -> values` with one value for each example.
        data: As in `Trainer.fit`: `(x, y)` of arrays, or anything that yields batches `(x, y)`. A tuple `x` is several inputs; `y` may be `()`.
        steps: Total number of steps, counted from the beginning of the run. With 0 there is no limit, and the loop can only be advanced manually: an
            iteration yields nothing.
        every: Trigger for checkpoints, besides the last step. `first(1) | every(steps=n, offset=1)` is the schedule of flax_extra: 1, 1 + n, 1 + 2n, ...
        seed: Seed of all randomness.
        rngs: Names of random streams at initialization and in training, or `{"init": names, "train": names}`.
        mutable: linen's filter for collections that training may change.
        sample: Inputs (a tuple for several) whose shapes initialize the state; by default those of the first batch, which is then trained on.
        restore_from: A checkpoint, or a directory of checkpoints. The run resumes from the newest intact one, bit for bit, even inside an epoch. If
            there is none yet, a new run begins.
        storage_options: Options for a URL in `restore_from`, as in `ModelCheckpoint`.
        parallel: Strategy; by default `DataParallel()`, over all devices of all processes.
        batch_size: Batch size for arrays; 32 by default.
        steps_per_epoch: Batches of an epoch, over which metrics are averaged; by default a pass over the data.
        shuffle: Whether arrays are shuffled each time they are iterated over.
        grads: Whether checkpoints contain the gradient of their step, which takes as much memory as the parameters.
        sown: Collections of sown values, such as `"summaries"`, that checkpoints contain.
        config: As in `Trainer.fit`.

    Raises:
        ConfigError: An argument is invalid.
        OptimizerError, LossError: The optimizer or the loss is unknown.
        DataError: The data cannot be turned into batches.
        ModelError: The functions fail on the first batch, or do not take these arguments.
        CheckpointError: A checkpoint cannot be used.

    >>> import numpy as np
    >>> from flax import linen as nn
    >>> from fitflax import every, first
    >>> model, x = nn.Dense(1), np.ones((8, 2), np.float32)
    >>> loop = TrainLoop(model.init, model.apply, optimizer="sgd", loss="mse", data=(x, x[:, :1]), steps=8, every=first(1) | every(steps=3, offset=1))
    >>> [(checkpoint.step, checkpoint.n_completed_steps) for checkpoint in loop]
    [(1, 1), (4, 3), (7, 3), (8, 1)]
    >>> loop.steps = 10
    >>> loop.next_step().step, loop.next_checkpoint().step, loop.next_checkpoint()
    (9, 10, None)
    """

    def __init__(
        self,
        init: Callable[..., Any],
        apply: Callable[..., Any],
        *,
        optimizer: str | optax.GradientTransformation,
        loss: Any,
        data: Any,
        steps: int = 0,
        every: Trigger = _EVERY_STEP,
        seed: int = 0,
        rngs: Sequence[str] | Mapping[str, Sequence[str]] = (),
        mutable: Any = _ALL_BUT_PARAMS,
        sample: Any = None,
        restore_from: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        parallel: Strategy | None = None,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        shuffle: bool = True,
        grads: bool = False,
        sown: str | Sequence[str] = (),
        config: Any = None,
    ) -> None:
        _check_function("TrainLoop", "init", init)
        _check_function("TrainLoop", "apply", apply)
        argument_checks.check_seed("TrainLoop", seed)
        argument_checks.check_counts(steps_per_epoch=steps_per_epoch)
        steps, every = _checked_total(steps), argument_checks.trigger_of("TrainLoop", every)
        strategy = argument_checks.strategy_of("TrainLoop", parallel)
        make_task = functools.partial(_make_task, FunctionModel(init, apply), strategy, argument_checks.streams_of("TrainLoop", rngs), mutable)
        session = Session(make_task, strategy, int(seed))
        session.compile(
            optimizer,
            argument_checks.optimizer_of(optimizer),
            Objective(loss),
            pad=True,
            numerics=Numerics(),
            described=argument_checks.described(optimizer=optimizer, loss=loss),
        )
        source = session.intake.adapt(data, call="TrainLoop", selection=Selection(None, None), batch_size=batch_size, shuffle=shuffle)
        saver = session.make_saver()
        try:
            saved = None
            if restore_from is not None:
                place = locate(restore_from, owner="TrainLoop(restore_from)", error=CheckpointError, options=storage_options)
                saved = _find_checkpoint(place, session, saver)
            if sample is not None and saved is None:
                session.state.build(session.intake.sample(Triple(argument_checks.zeros(sample), (), None)))
            options: dict[str, Any] = {"saved": saved, "saver": saver, "steps_per_epoch": steps_per_epoch, "grads": grads, "sown": sown, "config": config}
            self._set_up(session, source, None, steps=steps, every=every, **options)
        except BaseException:
            saver.close()
            raise

    @classmethod
    def of(cls, session: Session, source: Source, class_weight: Mapping[int, float] | None, **options: Any) -> Self:
        """Returns a loop that trains a session's state, for `Trainer.train_loop`; `options` are arguments of the class."""
        loop = cls.__new__(cls)
        loop._set_up(session, source, class_weight, saved=None, saver=session.make_saver(), **options)
        return loop

    def _set_up(
        self,
        session: Session,
        source: Source,
        class_weight: Mapping[int, float] | None,
        *,
        saved: Saved | None,
        saver: Saver,
        steps: int,
        every: Trigger,
        steps_per_epoch: int | None,
        grads: bool,
        sown: str | Sequence[str],
        config: Any,
    ) -> None:
        info = {} if config is None else {"config": as_config(config)}
        self._session = session
        self._steps, self._is_closed, self._has_printed = _checked_total(steps), False, False
        argument_checks.check_counts(steps_per_epoch=steps_per_epoch)
        session.clear_stop()
        keep = Keep(norm=True, grads=grads, sown=(sown,) if isinstance(sown, str) else tuple(sown))
        plan = RunPlan(steps_per_epoch=steps_per_epoch, every=every, keep=keep, info=info)
        self._run = prepare_run(session, source, plan, steps=steps or None, class_weight=class_weight, saved=saved, saver=saver)

    def __repr__(self) -> str:
        return f"TrainLoop(step={self.step}, steps={self.steps})"

    # -- stepping --

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Checkpoint:
        begin = self.step
        checkpoint = self.next_checkpoint() if self._steps else None
        if checkpoint is None:
            if self.step == begin == self._run.plan.process_start and not self._has_printed:
                self._has_printed = True
                done = self.step - self._run.progress.first_step
                print(f"There is nothing to train: the run has finished {done} steps, and steps={self._steps} is its total. To train longer, pass more steps.")
            raise StopIteration
        return checkpoint

    def next_checkpoint(self) -> Checkpoint | None:
        """Returns the next checkpoint, or `None` if the run has ended."""
        return self._advance(lambda: next(self._run, None))

    def next_step(self) -> Checkpoint | None:
        """Runs one step and returns its checkpoint, whether `every` fires or not; `None` if the run has ended."""
        return self.run(1)

    def run(self, steps: int) -> Checkpoint | None:
        """Runs `steps` steps, fewer if the run ends before, and returns the checkpoint of the last one; `None` if no step was left.

        Raises:
            ConfigError: `steps` is not positive.
        """
        return self._advance(lambda: self._run.run(steps))

    def _advance(self, step: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        checkpoint = step()
        if checkpoint is None and not self._is_closed:
            self._change(self.every)  # A total that was raised at the last checkpoint came too late for that iteration.
            checkpoint = step()
        if checkpoint is None:
            self._session.state.write_model()
        return checkpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the run at the current step, without a last checkpoint, and waits for saves.

        Raises:
            CheckpointError: A save failed.
        """
        self._is_closed = True
        try:
            self._run.close()
        finally:
            self._session.state.write_model()

    # -- what may be read and changed --

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self._run.step

    @property
    def steps(self) -> int:
        """The run's total, counted from its beginning; 0 for no limit. Set it to move the end; a run that has ended then continues."""
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = _checked_total(value)
        self._change(self.every)

    @property
    def every(self) -> Trigger:
        """The trigger for checkpoints, besides the last step; can be set."""
        assert self._run.plan.every is not None
        return self._run.plan.every

    @every.setter
    def every(self, value: Trigger) -> None:
        self._change(argument_checks.trigger_of("TrainLoop", value))

    def _change(self, every: Trigger) -> None:
        if self._is_closed:
            return
        end_step = self._run.progress.first_step + self._steps if self._steps else None
        self._run.change(end_step=end_step, every=every, saver=self._session.make_saver)


class EvalLoop:
    """Evaluates checkpoints: a function `checkpoint -> summary` that adds metrics of the checkpoint's state. Chain several with `serial`.

    Create it from a function, or from a trainer with `Trainer.eval_loop`. It evaluates on the devices that hold the checkpoint's state, without
    changing or copying it.

    Args:
        apply: `apply(variables, *inputs, rngs=..., mutable=...) -> (outputs, changed collections)`, such as `module.apply`; changed collections are
            discarded.
        metrics: As in `Trainer.compile`: names, metrics, functions of per-example values, or a dict of them by key.
        data: As in `Trainer.evaluate`: `(x, y)` of arrays, or anything that yields batches. Each checkpoint is evaluated on all of it, or on the next `steps`
            batches of an iterator, which cannot restart.
        steps: Number of batches of each evaluation; all by default.
        rngs: Names of random streams in evaluation. Their keys depend only on the state's key and the index of the batch.
        name: Name of the group of metrics.
        batch_size: Batch size for arrays; 32 by default.

    Raises:
        ConfigError: An argument is invalid.
        MetricError: A metric is unknown.
        DataError: The data cannot be turned into batches.

    >>> import numpy as np
    >>> from flax import linen as nn
    >>> model, x = nn.Dense(1), np.ones((8, 2), np.float32)
    >>> loop = TrainLoop(model.init, model.apply, optimizer="sgd", loss="mse", data=(x, x[:, :1]), steps=1)
    >>> evaluate = EvalLoop(model.apply, metrics=["mae"], data=(x, x[:, :1]), name="valid")
    >>> [sorted(evaluate(checkpoint).metrics["valid"]) for checkpoint in loop]
    [['mae']]
    """

    def __init__(
        self,
        apply: Callable[..., Any],
        *,
        metrics: Any,
        data: Any,
        steps: int | None = None,
        rngs: str | Sequence[str] = (),
        name: str = "eval",
        batch_size: int | None = None,
    ) -> None:
        _check_function("EvalLoop", "apply", apply)
        argument_checks.check_counts(steps=steps)
        self.name = argument_checks.group_name(name)
        if isinstance(rngs, Mapping):
            raise ConfigError(f"EvalLoop(rngs=...) must be names of random streams, such as 'dropout', not a dict. Received: {dict(rngs)}.")
        streams = Streams((), (), argument_checks.streams_of("EvalLoop", rngs).train)
        make_task = functools.partial(_make_task, FunctionModel(None, apply), streams=streams, mutable=_ALL_BUT_PARAMS, objective=Objective(None, metrics))
        options: dict[str, Any] = {"selection": Selection(None, None), "batch_size": batch_size, "shuffle": False}
        # Errors are raised now, but the number of processes, which splits a shard, is known only with a checkpoint.
        given = data if isinstance(data, Shard) else adapt(data, seed=0, **options)

        def evaluation_on(strategy: Strategy) -> Evaluation:
            intake = Intake(strategy, 0)
            source = intake.agreed(given, "EvalLoop") if isinstance(given, Source) else intake.adapt(given, call="EvalLoop", is_kept=False, **options)
            feeds = make_feeder(strategy, pad=True).evaluations(source, name, steps)
            return Evaluation(Program(make_task(strategy=strategy)), source, feeds, steps=steps, name=name)

        self._evaluation_on = functools.lru_cache(maxsize=1)(evaluation_on)

    @classmethod
    def of(cls, evaluation: Evaluation) -> Self:
        """Returns a loop for an evaluation, for `Trainer.eval_loop`."""
        loop = cls.__new__(cls)
        loop.name, loop._evaluation_on = evaluation.name, lambda strategy: evaluation  # type: ignore[assignment]
        return loop

    def __call__(self, checkpoint: Checkpoint) -> Summary:
        """Returns `checkpoint` with the metrics of its state.

        Raises:
            DataError: The data has no batch, or is an iterator that is exhausted.
            ModelError, MetricError: The model or a metric does not fit the state or the data.
        """
        return self._evaluation_on(checkpoint.run.strategy)(checkpoint)


def _make_task(
    model: FunctionModel,
    strategy: Strategy,
    streams: Streams,
    mutable: Any,
    objective: Objective,
    optimizer: optax.GradientTransformationExtraArgs | None = None,
    numerics: Numerics | None = None,
) -> Task:
    return Task(
        model=model,
        strategy=strategy,
        objective=objective,
        optimizer=optimizer,
        streams=streams,
        mutable=mutable_filter(mutable, TRANSIENT),
        transient=TRANSIENT,
        numerics=numerics or Numerics(),
    )


def _find_checkpoint(path: Location, session: Session, saver: Saver) -> Saved | None:
    """Returns a checkpoint, or the newest intact one of a directory, which is locked for the run; `None` to begin a new run."""
    if is_checkpoint(path) or (isinstance(path, Path) and path.exists() and not os.access(path, os.W_OK)):  # Read-only: no lock.
        return load_checkpoint(path)
    store = CheckpointStore(path)
    if isinstance(holder := holder_of(path), Saver) and not holder.is_given_up:  # An earlier loop of this process with a callback that was not closed.
        holder.wait()
    else:
        store.lock(saver)  # Lock it before searching it, so that files that another run is writing are not taken for leftovers.
    return find_saved(session, "auto", [store])


def _check_function(owner: str, name: str, fn: Any) -> None:
    if isinstance(fn, nn.Module):
        raise ConfigError(f"{owner}({name}=...) takes a function. Received: a module. Pass its method: model.{name}.")
    if not callable(fn):
        raise ConfigError(f"{owner}({name}=...) takes a function, such as model.{name}. Received: {fn!r}.")


def _checked_total(steps: Any) -> int:
    if not is_integer(steps, 0):
        raise ConfigError(f"steps, the total of the run, must be an integer of at least 0. Received: {steps!r}.")
    return int(steps)
