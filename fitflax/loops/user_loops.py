"""What custom training loops call: `TrainLoop`, `EvalLoop`, and functions of single batches.

A `TrainLoop` wraps a `Run`, which `fit` iterates over as well, and an `EvalLoop` wraps an `Evaluation`.
"""

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import optax
from flax import linen as nn
from flax.core.scope import DenyList

from fitflax.checkpoints.checkpoint import Checkpoint, Summary
from fitflax.checkpoints.checkpoint_files import Saved, is_checkpoint
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.checkpoints.resume import load_checkpoint
from fitflax.checkpoints.saver import Saver
from fitflax.data import Source, adapt
from fitflax.data.batch import Selection, Triple
from fitflax.data.padding import without_padding
from fitflax.data.shards import Shard
from fitflax.errors import CheckpointError, ConfigError, integer_of
from fitflax.leaves import as_config
from fitflax.loops.configuration import CurrentTask, check_counts, group_name, strategy_of, streams_of, trigger_of, zeros
from fitflax.loops.evaluation_loop import Evaluation
from fitflax.loops.session import Session
from fitflax.loops.setup import RunComponents, RunPlan, find_saved, prepare_run
from fitflax.loops.training_loop import Run
from fitflax.models import TRANSIENT, FunctionModel, mutable_filter
from fitflax.parallel import Strategy
from fitflax.state import PyTree
from fitflax.steps.gradients import Streams
from fitflax.steps.loss import Objective
from fitflax.steps.optimizer import Numerics
from fitflax.steps.outputs import Keep
from fitflax.steps.program import check_total_weight
from fitflax.steps.train_step import Task
from fitflax.storage import Location, locate
from fitflax.storage.lock import holder_of
from fitflax.triggers import Trigger
from fitflax.triggers import every as make_every

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
        optimizer: As in `Trainer.compile`: an optax transformation, or a name such as `"adam"`.
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
            there is none, a new run begins.
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
        seed = integer_of("TrainLoop(seed=...)", seed)
        check_counts(steps_per_epoch=steps_per_epoch)
        steps, every = _total_of(steps), trigger_of("TrainLoop", every)
        strategy = strategy_of("TrainLoop", parallel)
        make_task = functools.partial(Task, model=FunctionModel(init, apply), strategy=strategy, streams=streams_of("TrainLoop", rngs), **_collections(mutable))
        session = Session(CurrentTask(make_task, strategy), seed)
        session.compile(optimizer, loss)
        source = session.data_adapter.adapt(data, call="TrainLoop", selection=Selection(None, None), batch_size=batch_size, shuffle=shuffle)
        saver = session.make_saver()
        try:
            saved = None
            if restore_from is not None:
                place = locate(restore_from, owner="TrainLoop(restore_from)", error=CheckpointError, options=storage_options)
                saved = _find_checkpoint(place, session, saver)
            if sample is not None and saved is None:
                session.state.build(session.data_adapter.sample(Triple(zeros(sample), (), None)))
            self._begin(session, source, plan_of(every, steps_per_epoch, grads=grads, sown=sown, config=config), steps, saver, saved=saved)
        except BaseException:
            saver.close()
            raise

    @classmethod
    def of(cls, session: Session, source: Source, plan: RunPlan, steps: int, class_weight: Mapping[int, float] | None) -> Self:
        """Returns a loop that trains a session's state, for `Trainer.train_loop`."""
        loop = cls.__new__(cls)
        loop._begin(session, source, plan, _total_of(steps), session.make_saver(), class_weight=class_weight)
        return loop

    def _begin(
        self,
        session: Session,
        source: Source,
        plan: RunPlan,
        steps: int,
        saver: Saver,
        *,
        class_weight: Mapping[int, float] | None = None,
        saved: Saved | None = None,
    ) -> None:
        self._session, self._steps, self._is_closed, self._has_printed = session, steps, False, False
        session.clear_stop()
        self._run = Run(prepare_run(session, source, plan, RunComponents(saver), steps=steps or None, class_weight=class_weight, saved=saved))

    def __repr__(self) -> str:
        return f"TrainLoop(step={self.step}, steps={self.steps})"

    # -- stepping --

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Checkpoint:
        begin = self.step
        checkpoint = self.next_checkpoint() if self._steps else None
        if checkpoint is None:
            if self.step == begin == self._run.plan.process_start and not self._has_printed and jax.process_index() == 0:
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
            ConfigError: `steps` is not a positive integer.
        """
        return self._advance(lambda: self._run.run(steps))

    def _advance(self, step: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        checkpoint = step()
        if checkpoint is None and not self._is_closed:
            self._change(self.every)  # The total may have been raised at the last checkpoint, after the run had ended.
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

    # -- properties --

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self._run.progress.step

    @property
    def steps(self) -> int:
        """The run's total, counted from its beginning; 0 for no limit. Set it to move the end; a run that has ended then continues."""
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = _total_of(value)
        self._change(self.every)

    @property
    def every(self) -> Trigger:
        """The trigger for checkpoints, besides the last step; can be set."""
        assert self._run.plan.every is not None
        return self._run.plan.every

    @every.setter
    def every(self, value: Trigger) -> None:
        self._change(trigger_of("TrainLoop", value))

    def _change(self, every: Trigger) -> None:
        if self._is_closed:
            return
        end_step = self._run.progress.first_step + self._steps if self._steps else None
        self._run.change(end_step=end_step, every=every)


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
        check_counts(steps=steps)
        self.name = group_name(name)
        if isinstance(rngs, Mapping):
            raise ConfigError(f"EvalLoop(rngs=...) must be names of random streams, such as 'dropout', not a dict. Received: {dict(rngs)}.")
        model, objective = FunctionModel(None, apply), Objective(None, metrics)
        streams = Streams((), (), streams_of("EvalLoop", rngs).train)
        rest: dict[str, Any] = {"optimizer": None, "numerics": Numerics(), **_collections(_ALL_BUT_PARAMS)}
        options: dict[str, Any] = {"selection": Selection(None, None), "batch_size": batch_size, "shuffle": False}
        # Adapt the data now, so that its errors are raised now. A shard also needs the number of processes, which is known only with a checkpoint.
        data_or_source = data if isinstance(data, Shard) else adapt(data, seed=0, **options)

        def evaluation_on(strategy: Strategy) -> Evaluation:
            task = Task(model=model, strategy=strategy, objective=objective, streams=streams, **rest)
            session = Session(CurrentTask(lambda **_: task, strategy), seed=0)
            adapter = session.data_adapter
            if isinstance(data_or_source, Source):
                source = adapter.exchange_shard_info(data_or_source, "EvalLoop")
            else:
                source = adapter.adapt(data_or_source, call="EvalLoop", is_kept=False, **options)
            return Evaluation(session, session.task.any_program(), source, steps=steps, name=name)

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
        run = checkpoint.run
        run.timer.stop()  # The evaluation waits for the step. After it, the time at which the step finished would be unknown.
        begin = time.monotonic()
        summary = self._evaluation_on(run.live.strategy)(checkpoint)
        run.timer.seconds_evaluating += time.monotonic() - begin
        return summary


# -- single batches --


def train_on_batch(session: Session, triple: Triple) -> dict[str, Any]:
    """Runs one step and returns loss and metrics of this batch, from before the update. The first batch initializes the state."""
    program = session.need_trainable("train_on_batch")
    fed = session.task.feeder.single(triple, "train")
    if session.state.live is None:
        session.state.build(fed.batch)
    session.state.check_batch(fed.batch)
    live = session.state.need("train_on_batch")
    program.preparation.train(live.borrow(), fed.batch, is_single=True)
    trained = program.train(live.take(), program.empty_sums(train=True), fed)
    live.advance(trained.state)
    metrics = program.single_batch_metrics(trained.values, trained.rows, train=True)
    check_total_weight(program, "train", trained.values)
    return metrics


def test_on_batch(session: Session, triple: Triple) -> dict[str, Any]:
    """Returns loss and metrics of one batch."""
    program, live = session.task.need_compiled("test_on_batch"), session.state.need("test_on_batch")
    fed = session.task.feeder.single(triple, "test")
    session.state.check_batch(fed.batch)
    program.preparation.evaluate(live.borrow(), fed.batch, is_single=True)
    _, values, rows = program.evaluate(program.eval_carry(live.borrow()), program.empty_sums(train=False), [fed])
    metrics = program.single_batch_metrics(values, rows, train=False)
    check_total_weight(program, "test", values)
    return metrics


def predict_on_batch(session: Session, x: PyTree) -> PyTree:
    """Returns the module's outputs for one batch of inputs, as NumPy arrays `[batch, ...]`."""
    live, program = session.state.need("predict_on_batch", evaluates=True), session.task.any_program()
    fed = session.task.feeder.single(Triple(x, (), None), "predict")
    session.state.check_batch(fed.batch)
    program.preparation.predict(live.borrow(), fed.batch, is_single=True, is_counted=fed.is_counted)
    outputs = session.strategy.join(program.predict(program.eval_carry(live.borrow()), [fed], 0))
    rows = jax.tree.map(lambda leaf: leaf[: fed.num_real], outputs) if fed.real is None else without_padding(outputs, fed.real)
    return rows.rebuilt()


# -- making loops --


def _collections(mutable: Any) -> dict[str, Any]:
    return {"mutable": mutable_filter(mutable, TRANSIENT), "transient": TRANSIENT}


def plan_of(every: Trigger, steps_per_epoch: int | None, *, grads: bool, sown: str | Sequence[str], config: Any) -> RunPlan:
    """Returns the plan of a `TrainLoop` with these arguments."""
    check_counts(steps_per_epoch=steps_per_epoch)
    keep = Keep(norm=True, grads=grads, sown=(sown,) if isinstance(sown, str) else tuple(sown))
    return RunPlan(steps_per_epoch=steps_per_epoch, every=every, keep=keep, info={} if config is None else {"config": as_config(config)})


def _find_checkpoint(path: Location, session: Session, saver: Saver) -> Saved | None:
    """Returns a checkpoint, or the newest intact one of a directory, which is locked for the run; `None` to begin a new run."""
    if is_checkpoint(path) or (isinstance(path, Path) and path.exists() and not os.access(path, os.W_OK)):  # Read-only: no lock.
        return load_checkpoint(path)
    store = CheckpointStore(path)
    if isinstance(holder := holder_of(path), Saver) and not holder.is_orphaned:  # A callback of an earlier loop in this process was not closed.
        holder.wait()
    else:
        store.lock(saver)  # Lock it before searching it, so that files that another run is writing are not taken for leftovers.
    saved = find_saved(session, "auto", [store])
    if saved is None and store.steps():
        # All checkpoints are damaged. A new run replaces them, but not those in other directories.
        store.claim(session.run_id, overwrite=True)
    return saved


def _check_function(owner: str, name: str, fn: Any) -> None:
    if isinstance(fn, nn.Module):
        raise ConfigError(f"{owner}({name}=...) takes a function. Received: a module. Pass its method: model.{name}.")
    if not callable(fn):
        raise ConfigError(f"{owner}({name}=...) takes a function, such as model.{name}. Received: {fn!r}.")


def _total_of(steps: Any) -> int:
    return integer_of("steps, the total of the run,", steps)
