"""Loops that users step themselves: `TrainLoop` and `EvalLoop`, of a trainer or of functions of their own.

Both are thin: a `TrainLoop` holds a `Run`, which `fit` iterates over as well, and an `EvalLoop` an `Evaluation`.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import optax
from flax import linen as nn
from flax.core.scope import DenyList

import fitflax.loops.arguments as arguments
from fitflax.checkpoints.by_path import is_checkpoint, load_checkpoint
from fitflax.checkpoints.checkpoint import Checkpoint, Summary
from fitflax.checkpoints.lock import holder_of
from fitflax.checkpoints.saved import Saved
from fitflax.checkpoints.saving import Saver
from fitflax.checkpoints.store import CheckpointStore
from fitflax.data import Source, adapt
from fitflax.data.batch import Selection, Triple
from fitflax.data.shards import Shard
from fitflax.errors import ConfigError
from fitflax.integers import is_integer
from fitflax.loops.evaluation import Evaluation
from fitflax.loops.intake import Intake, make_feeder
from fitflax.loops.plan import RunPlan
from fitflax.loops.preparation import find_saved, prepare_run
from fitflax.loops.session import Session
from fitflax.parallel import Strategy
from fitflax.steps.model import TRANSIENT, FunctionModel, mutable_filter
from fitflax.steps.numerics import Numerics
from fitflax.steps.objective import Objective
from fitflax.steps.program import Program
from fitflax.steps.task import Keep, Streams, Task
from fitflax.triggers import Trigger
from fitflax.triggers import every as make_every

__all__ = ["EvalLoop", "TrainLoop"]

_EVERY_STEP = make_every(steps=1)
_ALL_BUT_PARAMS = DenyList("params")


class TrainLoop:
    """An iterator of checkpoints that trains as it goes: the whole run in the caller's own `for`.

    Made of functions, or of a trainer by `Trainer.train_loop`. A checkpoint is yielded when `every` fires and after the last step; `next_step`,
    `next_checkpoint` and `run` step by hand, and none of them changes the total. What happens at a checkpoint is up to the caller: see `serial`.

    It is a context manager: leaving it ends the run where it is and waits for saves; without `with`, the end of the run waits for them.

    Args:
        init: `init(rngs, *inputs) -> variables`, as `module.init` does it; `rngs` is a dict of keys, `params` and those that `rngs` names.
        apply: `apply(variables, *inputs, rngs=..., mutable=...) -> (outputs, changed collections)`, as `module.apply` does it. A mode keyword is the caller's:
            `functools.partial(module.apply, train=True)`.
        optimizer: Any optax transformation, called with `params`; or a name, such as `"adam"`.
        loss: As in `Trainer.compile`: a name, or a function `(outputs, targets) -> values`, one for each example.
        data: As in `Trainer.fit`: `(x, y)` of arrays, or anything that yields batches `(x, y)`; a tuple `x` is several inputs, and `y` may be `()`.
        steps: The run's total, counted from its beginning. 0 is for loops that are stepped by hand, without end: an iteration has nothing to do then.
        every: When a checkpoint is yielded, besides the last step. `first(1) | every(steps=n, offset=1)` is flax_extra's rule: 1, 1 + n, 1 + 2n, ...
        seed: What all randomness follows from.
        rngs: Names of random streams at initialization and in training, or `{"init": names, "train": names}`.
        mutable: linen's filter for collections that training may change.
        sample: Inputs (a tuple is several), from whose shapes alone the state is initialized; by default those of the first batch, which is then trained on.
        restore_from: A checkpoint, or a directory of them: the run goes on from its newest good one, inside an epoch as well, bit for bit; where there is
            none yet, it begins.
        parallel: Where steps run; `DataParallel()` over all local devices by default.
        batch_size: Rows of a batch, for arrays; 32 by default.
        steps_per_epoch: Batches over which running metrics are taken; a pass over the data by default.
        shuffle: Whether arrays are taken in another order in each pass.
        grads: Whether checkpoints have the gradient of their step, which takes as much memory as the parameters.
        sown: Collections of sown values, such as `"summaries"`, that checkpoints have of their step.

    Raises:
        ConfigError: An argument that makes no sense.
        OptimizerError, LossError: An unknown optimizer or loss.
        DataError: Data that cannot be turned into batches.
        ModelError: The functions do not run on the first batch, or are called in another way.
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
        parallel: Strategy | None = None,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        shuffle: bool = True,
        grads: bool = False,
        sown: str | Sequence[str] = (),
    ) -> None:
        _check_function("TrainLoop", "init", init)
        _check_function("TrainLoop", "apply", apply)
        arguments.check_seed("TrainLoop", seed)
        arguments.check_counts(steps_per_epoch=steps_per_epoch)
        steps, every = _checked_total(steps), arguments.trigger_of("TrainLoop", every)
        strategy = arguments.strategy_of("TrainLoop", parallel)
        make_task = functools.partial(_make_task, FunctionModel(init, apply), strategy, arguments.streams_of("TrainLoop", rngs), mutable)
        session = Session(make_task, strategy, int(seed))
        session.compile(
            optimizer,
            arguments.optimizer_of(optimizer),
            Objective(loss),
            pad=True,
            numerics=Numerics(),
            described=arguments.described(optimizer=optimizer, loss=loss),
        )
        source = session.intake.adapt(data, call="TrainLoop", selection=Selection(None, None), batch_size=batch_size, shuffle=shuffle)
        saver = session.make_saver()
        try:
            saved = None if restore_from is None else _newest_in(Path(restore_from), session, saver)
            if sample is not None and saved is None:
                session.build(session.intake.sample(Triple(arguments.zeros(sample), (), None)))
            options: dict[str, Any] = {"saved": saved, "saver": saver, "steps_per_epoch": steps_per_epoch, "grads": grads, "sown": sown}
            self._begin(session, source, None, steps=steps, every=every, **options)
        except BaseException:
            saver.close()
            raise

    @classmethod
    def of(cls, session: Session, source: Source, class_weight: Mapping[int, float] | None, **options: Any) -> Self:
        """Returns a loop that trains a session's state; `Trainer.train_loop` calls it.

        Args:
            session: What is trained.
            source: The data.
            class_weight: `{label: weight}`.
            **options: `steps`, `every`, `steps_per_epoch`, `grads` and `sown`, as above.
        """
        loop = cls.__new__(cls)
        loop._begin(session, source, class_weight, saved=None, saver=session.make_saver(), **options)
        return loop

    def _begin(
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
    ) -> None:
        self._session = session
        self._steps, self._is_closed, self._has_said = _checked_total(steps), False, False
        arguments.check_counts(steps_per_epoch=steps_per_epoch)
        session.clear_stop()
        keep = Keep(norm=True, grads=grads, sown=(sown,) if isinstance(sown, str) else tuple(sown))
        plan = RunPlan(steps_per_epoch=steps_per_epoch, every=every, keep=keep)
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
            if self.step == begin == self._run.plan.process_start and not self._has_said:
                self._has_said = True
                print(f"There is nothing to train: the run has made {self.step - self._run.progress.first_step} steps, and its total is {self._steps}.")
            raise StopIteration
        return checkpoint

    def next_checkpoint(self) -> Checkpoint | None:
        """Returns the next checkpoint, or `None` when the run has ended."""
        return self._stepped(lambda: next(self._run, None))

    def next_step(self) -> Checkpoint | None:
        """Makes one step and returns its checkpoint, due or not; `None` when the run has ended."""
        return self.run(1)

    def run(self, steps: int) -> Checkpoint | None:
        """Makes so many steps, fewer if the run ends before, and returns the checkpoint of the last one; `None` if there was no step left.

        Raises:
            ConfigError: `steps` is not positive.
        """
        return self._stepped(lambda: self._run.run(steps))

    def _stepped(self, step: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        checkpoint = step()
        if checkpoint is None and not self._is_closed:
            self._change(self.every)  # A total that was raised at the last checkpoint has come too late for that iteration.
            checkpoint = step()
        return checkpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the run where it is, without a last checkpoint, and waits for saves.

        Raises:
            CheckpointError: A save failed.
        """
        self._is_closed = True
        self._run.close()

    # -- what may be read and changed --

    @property
    def step(self) -> int:
        """Finished updates."""
        return self._run.step

    @property
    def steps(self) -> int:
        """The run's total, counted from its beginning; 0 for none. Setting it moves the end; a run that had ended goes on."""
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = _checked_total(value)
        self._change(self.every)

    @property
    def every(self) -> Trigger:
        """When a checkpoint is yielded, besides the last step; it may be set."""
        assert self._run.plan.every is not None
        return self._run.plan.every

    @every.setter
    def every(self, value: Trigger) -> None:
        self._change(arguments.trigger_of("TrainLoop", value))

    def _change(self, every: Trigger) -> None:
        if self._is_closed:
            return
        end_step = self._run.progress.first_step + self._steps if self._steps else None
        self._run.change(end_step=end_step, every=every, saver=self._session.make_saver)


class EvalLoop:
    """Evaluates checkpoints: a function `checkpoint -> summary` that adds metrics of its state over data. Several can follow one another in `serial`.

    Made of a function, or of a trainer by `Trainer.eval_loop`. It evaluates where the checkpoint's state lies, and does not change or copy it.

    Args:
        apply: `apply(variables, *inputs, rngs=..., mutable=...) -> (outputs, changed collections)`, as `module.apply` does it; what changed is dropped.
        metrics: As in `Trainer.compile`: names, metrics, functions of per-example values, or a dict of them by key.
        data: As in `Trainer.evaluate`: `(x, y)` of arrays, or anything that yields batches. It is passed over anew for each checkpoint; an iterator, which
            cannot, goes on where it was, `steps` batches at a time.
        steps: Batches of each evaluation; all by default.
        rngs: Names of random streams in evaluation; their keys follow from the state's key and the batch's number alone.
        name: The group of the metrics.
        batch_size: Rows of a batch, for arrays; 32 by default.

    Raises:
        ConfigError: An argument that makes no sense.
        MetricError: An unknown metric.
        DataError: Data that cannot be turned into batches.

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
        arguments.check_counts(steps=steps)
        self.name = arguments.group_name(name)
        if isinstance(rngs, Mapping):
            raise ConfigError(f"EvalLoop(rngs=...) takes the names of the streams of evaluation. Received: {dict(rngs)}.")
        streams = Streams((), (), arguments.streams_of("EvalLoop", rngs).train)
        make_task = functools.partial(_make_task, FunctionModel(None, apply), streams=streams, mutable=_ALL_BUT_PARAMS, objective=Objective(None, metrics))
        options: dict[str, Any] = {"selection": Selection(None, None), "batch_size": batch_size, "shuffle": False}
        # Its errors come now; how a shard is cut up, only where it is known how many processes there are.
        given = data if isinstance(data, Shard) else adapt(data, seed=0, **options)

        def evaluation_on(strategy: Strategy) -> Evaluation:
            intake = Intake(strategy, 0)
            source = intake.agreed(given, "EvalLoop") if isinstance(given, Source) else intake.adapt(given, call="EvalLoop", is_kept=False, **options)
            feeds = make_feeder(strategy, pad=True).evaluations(source, name, steps)
            return Evaluation(Program(make_task(strategy=strategy)), source, feeds, steps=steps, name=name)

        self._evaluation_on = functools.lru_cache(maxsize=1)(evaluation_on)

    @classmethod
    def of(cls, evaluation: Evaluation) -> Self:
        """Returns a loop that is such an evaluation; `Trainer.eval_loop` calls it."""
        loop = cls.__new__(cls)
        loop.name, loop._evaluation_on = evaluation.name, lambda strategy: evaluation  # type: ignore[assignment]
        return loop

    def __call__(self, checkpoint: Checkpoint) -> Summary:
        """Returns `checkpoint` with the metrics of its state.

        Raises:
            DataError: The data has no batch, or is an iterator that was used up.
            ModelError, MetricError: What does not fit it.
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


def _newest_in(path: Path, session: Session, saver: Saver) -> Saved | None:
    """Returns a checkpoint, or the newest good one in a directory of them, which is locked for the run; `None` where a run is to begin."""
    if is_checkpoint(path) or (path.exists() and not os.access(path, os.W_OK)):  # One that nobody writes to.
        return load_checkpoint(path)
    store = CheckpointStore(path)
    if isinstance(holder := holder_of(path), Saver) and not holder.is_given_up:  # An earlier loop of this process, whose callback was not closed.
        holder.wait()
    else:
        store.lock(saver)  # Before it is looked at: what another run is writing there is no litter.
    return find_saved(session, "auto", [store])


def _check_function(owner: str, name: str, fn: Any) -> None:
    if isinstance(fn, nn.Module):
        raise ConfigError(f"{owner}({name}=...) takes a function. Received: a module; pass its method, model.{name}.")
    if not callable(fn):
        raise ConfigError(f"{owner}({name}=...) takes a function, such as model.{name}. Received: {fn!r}.")


def _checked_total(steps: Any) -> int:
    if not is_integer(steps, 0):
        raise ConfigError(f"steps must be an integer of at least 0, the run's total. Received: {steps!r}.")
    return int(steps)
