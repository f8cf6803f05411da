"""What a trainer keeps between calls: its task, its state, its data sources, the ID of the run, and requests to stop."""

import dataclasses
import functools
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import fitflax.optimizers as optimizers
from fitflax.checkpoints.checkpoint_files import Saved
from fitflax.checkpoints.restore import RestoreReport
from fitflax.checkpoints.saver import NICENESS_ON_HOST, Saver
from fitflax.data import Batcher, Position, Source
from fitflax.data.adapt import adapt, takes_batch_size
from fitflax.data.batch import Triple
from fitflax.data.pipelines import is_worker_part
from fitflax.data.shards import Shard, agree_on_shards, part_of_batch_size
from fitflax.data.sources import OneShotSource
from fitflax.errors import ConfigError, DataError, FitflaxError, OptimizerError, warn
from fitflax.loops.configuration import CurrentTask, MakeTask, RestoreOptions
from fitflax.loops.session_state import SessionState
from fitflax.parallel import Strategy
from fitflax.parallel.processes import exchange
from fitflax.state import Batch
from fitflax.steps.program import Program

if TYPE_CHECKING:  # It imports flax.nnx.
    from fitflax.models.nnx_graph import ModuleVariables

# Number of iterators to recognize; a trainer that is given many must not keep them all.
_MAX_ITERATORS = 8


class Session:
    """What the calls of a trainer share. `module_variables` are those of an NNX module, and `members` is the number of members of an ensemble."""

    def __init__(self, task: CurrentTask, seed: int, module_variables: "ModuleVariables | None" = None, members: int | None = None) -> None:
        self.task, self.strategy, self.seed, self.members = task, task.strategy, seed, members
        self.state = SessionState(task, seed, module_variables, members)
        self.data_adapter = DataAdapter(task.strategy, seed)
        self.run_id = secrets.token_hex(8)  # Identifies the run in directories of checkpoints and logs.
        self.stop_reason: str | None = None
        self.is_stopping = False
        self.is_fitting = False

    # -- requirements --

    def need_trainable(self, what: str) -> Program:
        """Returns the program; raises `OptimizerError` if the state is an `InferenceState`, and errors of `need_compiled`."""
        if self.state.is_serving:
            raise OptimizerError(
                f"{what} needs the optimizer state, but the trainer has only an InferenceState. To continue a run, call restore(path). To start a new run "
                "from its parameters, call restore(path, weights_only=True)."
            )
        return self.task.need_compiled(what)

    def check_idle(self, what: str) -> None:
        """Raises `ConfigError` if `fit` is running."""
        if self.is_fitting:
            advice = f"Use another trainer there, or call {what}() after fit() has returned."
            raise ConfigError(f"{what}() was called while fit() is running, from a callback or another thread. {advice}")

    def need_idle(self, what: str) -> Program:
        """Returns the program for another run; raises errors of `check_idle` and `need_trainable`."""
        self.check_idle(what)
        return self.need_trainable(what)

    # -- stopping --

    def stop(self, reason: str) -> None:
        """Requests that training stops; the first reason is kept."""
        if not self.is_stopping:
            self.is_stopping, self.stop_reason = True, reason

    def clear_stop(self) -> None:
        """Clears a request to stop."""
        self.is_stopping, self.stop_reason = False, None

    def note_exhausted(self) -> None:
        """Requests a stop and warns because the data ended before training did."""
        self.stop("data_exhausted")
        advice = "Pass data that can be iterated over again: arrays, or a function that returns a new iterator, `lambda: ...`."
        warn(f"The data ended before the run did, so training stops early. {advice}")

    # -- task and state --

    def compile(self, *objective: Any, **settings: Any) -> None:
        """Replaces the task; arguments as in `CurrentTask.compile`.

        Parameters and collections are kept, and so is the optimizer state if the optimizer is the same object. After an error, the session is unchanged
        or, if the old optimizer state had already been released, no longer compiled.
        """
        self.check_idle("compile")
        before = dict(vars(self.task))
        try:
            is_new_optimizer = self.task.compile(*objective, **settings)
        except BaseException:
            vars(self.task).update(before)
            raise
        try:
            self.state.match_task(is_new_optimizer=is_new_optimizer)
        except BaseException:
            if self.task.is_compiled:
                vars(self.task).update(before)
            raise

    def restore(self, saved: Saved, batch: Batch | None, options: RestoreOptions) -> RestoreReport:
        """Replaces the live state with a saved one; arguments as in `SessionState.restore`. The run ID is the saved one, or new if only a part is restored."""
        report = self.state.restore(saved, batch, options)
        if options.starts_over:
            self.begin_run()
            self.state.last_progress = None  # The passes over the data start over, too.
        else:
            self.run_id = str(saved.metadata.get("run_id", self.run_id))
        return report

    @property
    def learning_rate(self) -> float:
        """The learning rate; raises `OptimizerError` if it cannot be read."""
        rate = optimizers.get_learning_rate(self.state.need("learning_rate").borrow().opt_state)
        if rate is None:
            raise OptimizerError(
                "This optimizer's learning rate cannot be read. Pass the optimizer by name, compile('adam', learning_rate=...), or wrap it: "
                "optax.inject_hyperparams(optax.adam)(learning_rate=...)."
            )
        first, *others = jax.device_get(rate).ravel().tolist()  # One for each member of an ensemble.
        if any(other != first for other in others):
            raise OptimizerError("The members of this ensemble have different learning rates. Use trainer.learning_rates to read them.")
        return float(first)

    def set_learning_rates(self, what: str, values: Mapping[str, float] | Mapping[None, float]) -> None:
        """Sets learning rates by the label of their parameter group; `None` is for the only one."""
        live = self.state.need(what)
        state = live.borrow()
        opt_state = state.opt_state
        for label, value in values.items():
            opt_state = optimizers.set_learning_rate(opt_state, value, label)
        live.replace(dataclasses.replace(state, opt_state=opt_state), live.step)

    def copy(self) -> "Session":
        """Returns a session with a copy of the state and the same compiled steps, independent of this one."""
        other = self.copy_without_state(self.seed)
        other.state.copy_from(self.state)
        return other

    def copy_without_state(self, seed: int, make_task: MakeTask | None = None, *, member: int | None = None) -> "Session":
        """Returns a session with the same task and compiled steps but no state. With `make_task`, it has a new task, whose steps are compiled again.

        `member` is the number of the member if the session is one for a member of this ensemble.
        """
        module_variables = None if self.state.module_variables is None else self.state.module_variables.copy()
        other = Session(self.task.copy(make_task), seed, module_variables, self.members if member is None else None)
        other.state.hyperparams = self.state.hyperparams
        if member is not None:
            other.state.hyperparams = {name: value[member] if np.ndim(value) else value for name, value in self.state.hyperparams.items()}
        return other

    # -- runs --

    def begin_run(self) -> None:
        """Creates a new run ID."""
        self.run_id = secrets.token_hex(8)

    def make_saver(self) -> Saver:
        """Returns a saver for one run."""
        return Saver(niceness=NICENESS_ON_HOST if self.strategy.is_on_host else 0)

    def next_position(self, source: Source) -> Position:
        """Returns where a new run begins in the data: a new pass, or the current position of an iterator."""
        if isinstance(source, OneShotSource):
            return Position(examples=source.taken)
        last = Position() if self.state.last_progress is None else self.state.last_progress.position
        return Position(last.passes + (last.examples > 0))


class DataAdapter:
    """Turns user data into sources. It recognizes an iterator that is passed again, because its source may hold a batch that was not used."""

    def __init__(self, strategy: Strategy, seed: int) -> None:
        self._strategy = strategy
        self._seed = seed
        self._one_shots: list[OneShotSource] = []

    def adapt(self, data: Any, *targets: Any, call: str, batch_size: int | None = None, is_kept: bool = True, **options: Any) -> Source:
        """Returns the source of user data. All processes must call it with the same `call`, the name of the user's call for errors.

        Other arguments are those of `data.adapt`, but `data` may also be a `Shard`, and a shard that Ray Train gives to a worker is treated like one.
        `batch_size` is over all processes, and `is_kept` is whether to recognize an iterator later.
        """
        strategy, seed = self._strategy, self._seed
        is_shard, (index, parts) = isinstance(data, Shard) or is_worker_part(data), strategy.part
        data = data.data if isinstance(data, Shard) else data
        if is_shard and parts > 1:
            seed = int(np.random.SeedSequence([seed, index]).generate_state(1)[0])  # Otherwise all shards would be shuffled in the same way.
            if takes_batch_size(data):
                batch_size = part_of_batch_size(batch_size, parts)
        try:
            source = adapt(data, *targets, batch_size=batch_size, seed=seed, **options)
            if strategy.num_processes > 1 and not is_shard and not source.is_repeatable:
                raise DataError(
                    "Each process would read the rows of this Ray dataset in a different order. Pass each worker its shard, from "
                    "ray.train.get_dataset_shard(), and do not exclude the dataset in DataConfig(datasets_to_split=...)."
                )
        except FitflaxError as error:
            if strategy.num_processes > 1:
                agree_on_shards(None, strategy.part, 0, functools.partial(exchange, topic=call), is_shard=is_shard, failure=error)
            raise
        source = self._recognized(source) if is_kept else source
        source.is_shard = is_shard
        return self.exchange_shard_info(source, call)

    def exchange_shard_info(self, source: Source, call: str = "fit: a shard of the data") -> Source:
        """Returns the source after all processes, which must all call it, have exchanged information about their shards."""
        strategy = self._strategy
        source.shares = None
        if strategy.num_processes > 1:
            tell = functools.partial(exchange, topic=call)
            source.shares = agree_on_shards(source, strategy.part, jax.process_index(), tell, is_shard=source.is_shard)
        return source

    def sample(self, triple: Triple, *, accumulate_steps: int = 1) -> Batch:
        """Returns a batch with the shapes that the devices need, whose values are not used; raises `DataError` if it is not a batch."""
        return self._strategy.batcher(compare=None, accumulate_steps=accumulate_steps, must_count=False)(triple).batch

    def _recognized(self, source: Source) -> Source:
        if not isinstance(source, OneShotSource):
            return source
        for earlier in self._one_shots:
            if earlier.iterator is source.iterator:
                if not source.options.inputs_only:
                    earlier.options = source.options
                return earlier
        self._one_shots = [*self._one_shots[1 - _MAX_ITERATORS :], source]
        return source


def unpadded_batch(triple: Triple) -> Batch:
    """Returns a batch with the number of rows that the user gave; raises `DataError` if it is not a batch."""
    return Batcher(num_shards=1, must_count=False)(triple).batch
