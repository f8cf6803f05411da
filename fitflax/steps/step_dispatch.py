"""The program of a task, as loops use it: dispatches steps on the devices.

Its parts are `InitialState`, `Preparation` for what comes before the first step, `EvalParams`, `DryRun`, which evaluates steps on shapes, and
`CompiledSteps`, which holds the compiled functions.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax

from fitflax.data import FedBatch
from fitflax.data.batch import in_one_piece
from fitflax.errors import LossError
from fitflax.logs import StepValues, Values
from fitflax.metrics import Metric
from fitflax.parallel.eager import jit_is_disabled
from fitflax.state import PyTree, TrainState
from fitflax.steps.collected_rows import Collected
from fitflax.steps.compile_ahead import trim_heap
from fitflax.steps.compiled_functions import CompiledSteps, train_kind
from fitflax.steps.eval_params import EvalParams
from fitflax.steps.initial_state import InitialState
from fitflax.steps.kept_values import NOTHING, Keep, Kept
from fitflax.steps.live_state import Carry, Sums
from fitflax.steps.metric_state import EvalSums, TrainSums
from fitflax.steps.model_outputs import Returned
from fitflax.steps.preparation import Preparation, check_rows, max_group_size
from fitflax.steps.shape_inference import DryRun, TracedStep
from fitflax.steps.step_functions import Task

__all__ = ["Program", "Trained", "scalar_loss_error"]

# For each of the two variants that `time_steps` compares.
_TRIAL_SECONDS = 0.25
_MAX_LAPS = 10

# For larger states, memory left over from compilation matters.
_LARGE_BYTES = 2**26


class Trained(NamedTuple):
    """Results of dispatching an update, all still on the devices."""

    state: Carry  # The state after it.
    sums: Sums  # Packed sums of the epoch.
    values: StepValues
    rows: dict[str, Metric]  # Rows that metrics collect, by log key.
    kept: Kept


class Program:
    """Dispatches the steps of a task. It does not hold the state.

    `run_eagerly` disables jit in its steps, whatever JAX's setting. `eval_params` returns the parameters for evaluation, given the optimizer state and
    the parameters; `None` if they are the same.
    """

    def __init__(self, task: Task, *, run_eagerly: bool = False, eval_params: Callable[[PyTree, PyTree], PyTree] | None = None) -> None:
        self.task, self.strategy = task, task.strategy
        self.runs_eagerly = run_eagerly
        self.dry_run = DryRun(task, lambda: self.is_eager)
        self._steps = CompiledSteps(task, lambda train: self.dry_run.traced_step(train=train).form)
        self.initial_state = InitialState(task, self._steps, lambda: self.is_eager)
        self.preparation = Preparation(task, self._steps, self.dry_run, lambda: self.is_eager)
        self.eval_params = EvalParams(task, eval_params)
        # Shared by all programs on the devices, because a collective of an evaluation can wait for one of a step.
        self._in_flight = self.strategy.in_flight

    @property
    def is_eager(self) -> bool:
        """Whether the next call runs without jit."""
        return self.runs_eagerly or jit_is_disabled()

    def _function(self, kind: str, carry: Carry, *, keep: Keep = NOTHING) -> Callable[..., Any]:
        function = self._steps.get(kind, carry, keep=keep)
        if not self.runs_eagerly:
            return function

        def call(*arguments: Any) -> Any:
            with jax.disable_jit():
                return function(*arguments)

        return call

    # -- sums --

    def empty_sums(self, *, train: bool) -> Sums:
        """Returns empty sums of an epoch or evaluation, on the devices."""
        return self.pack_sums(self.dry_run.traced_step(train=train).empty, train=train)

    def pack_sums(self, sums: TrainSums | EvalSums, *, train: bool) -> Sums:
        """Returns packed sums, on the devices."""
        return cast(Sums, self.strategy.put(self.dry_run.traced_step(train=train).form.pack(sums)))

    def unpack_sums(self, sums: Sums, *, train: bool) -> TrainSums | EvalSums:
        """Returns unpacked sums, on the devices."""
        return cast(TrainSums | EvalSums, self.dry_run.traced_step(train=train).form.unpack_arrays(sums))

    def collector(self, *, train: bool) -> Collected | None:
        """Returns a collector of rows of an epoch or evaluation; `None` if no metric collects rows."""
        collected = self.dry_run.traced_step(train=train).collected
        return Collected(collected, self.strategy.join, most_pending=max(16, self.strategy.max_in_flight + 1)) if collected else None

    # -- running --

    def train_group(self, carry: Carry, sums: Sums, group: Sequence[FedBatch], size: int, *, keep: Keep = NOTHING) -> Trained:
        """Dispatches several updates in a call that is compiled for at most `size`; consumes `carry` and `sums`."""
        traced = self.dry_run.traced_step(train=True)
        for fed in group:
            _check_scalar(traced, fed)
        self.preparation.check_shapes("train on", group[0])
        self._in_flight.make_room(traced)
        function = self._function(train_kind(self.strategy, len(group), size), carry, keep=keep)
        leaves, sums, vector, rows, *parts = function(carry.leaves, carry.key, sums, *self._fed(group, size))
        kept = Kept(*parts)
        values = StepValues(traced.places, vector, suspects=kept.suspects.names)
        self._in_flight.add(values, len(group) * group[0].batch.nbytes)
        return Trained(Carry(leaves, carry.treedef, carry.key), sums, values, rows, kept)

    @staticmethod
    def group_size(fed: FedBatch) -> int:
        """Returns how many steps to try in one call: 16, or fewer if their batches would take more than 64 MB."""
        return max_group_size(fed.batch.nbytes)

    def time_steps(self, state: TrainState, fed: FedBatch, size: int, keep: Keep) -> tuple[float, float]:
        """Returns the seconds per step alone and in a call of `size` steps, measured on copies of the state, without reading data."""

        def seconds(call: Callable[[Carry, Sums], Trained], steps: int) -> float:
            now, sums, calls = Carry.of(self.strategy.copy(state)), self.empty_sums(train=True), max(1, size // steps)

            def lap() -> float:
                nonlocal now, sums
                begin = time.perf_counter()
                for _ in range(calls):
                    now, sums, values, *_ = call(now, sums)
                values.wait()
                return (time.perf_counter() - begin) / (calls * steps)

            lap()  # Compiles.
            end, laps = time.perf_counter() + _TRIAL_SECONDS, [lap()]
            if self.strategy.num_processes > 1:
                return min(*laps, lap(), lap())  # All processes must run the same number, whatever their clocks.
            while len(laps) < _MAX_LAPS and time.perf_counter() < end:
                laps.append(lap())
            return min(laps)

        group = [fed] * size
        single = seconds(lambda now, sums: self.train(now, sums, fed, keep=keep), 1)
        return single, seconds(lambda now, sums: self.train_group(now, sums, group, size, keep=keep), size)

    def await_step(self, carry: Carry, *, steps_per_call: int, keep: Keep = NOTHING) -> None:
        """Waits for a training step that is compiled ahead."""
        self._steps.get(train_kind(self.strategy, steps_per_call, steps_per_call), carry, keep=keep)
        if sum(leaf.nbytes for leaf in carry.leaves) > _LARGE_BYTES:
            trim_heap()  # The first step's activations need the memory.

    def train(self, carry: Carry, sums: Sums, fed: FedBatch, *, keep: Keep = NOTHING) -> Trained:
        """Dispatches one update; consumes `carry` and `sums`."""
        return self.train_group(carry, sums, [fed], 1, keep=keep)

    def _fed(self, group: Sequence[FedBatch], size: int) -> tuple[Any, ...]:
        """Returns the last arguments of a call that is compiled for `size` batches: a batch, or the number of batches and all of them."""
        if size == 1:
            return (self.strategy.feed(group[0].batch),)
        return self.strategy.number(len(group)), self.strategy.feed_group([fed.batch for fed in group], size, in_one_piece(group))

    def eval_carry(self, state: TrainState) -> Carry:
        """Returns the carry of `(params, model_state)` for evaluation."""
        return Carry(*jax.tree.flatten((self.eval_params(state), state.model_state)), state.key)

    def evaluate(self, used: Carry, sums: Sums, group: Sequence[FedBatch], size: int = 1) -> tuple[Sums, Values, dict[str, Metric]]:
        """Dispatches the evaluation of batches, and returns sums, their values and the batches' rows; consumes `sums`.

        `used` is from `eval_carry`. The call is compiled for `size` batches: 1, or the result of `preparation.group_for`, which adds a leading axis to rows.
        """
        traced = self.dry_run.traced_step(train=False)
        for fed in group:
            _check_scalar(traced, fed)
        self.preparation.check_shapes("evaluate", group[0])
        self._in_flight.make_room(traced)
        function = self._function("evaluate" if size == 1 else "evaluate group", used)
        sums, vector, rows = function(used.leaves, used.key, sums, *self._fed(group, size))
        values = Values(traced.places, vector)
        self._in_flight.add(values, len(group) * group[0].batch.nbytes)
        return sums, values, rows

    def single_batch_metrics(self, values: Values, rows: dict[str, Metric], *, train: bool) -> dict[str, Any]:
        """Returns the metrics of a batch outside an epoch or evaluation."""
        collector = self.collector(train=train)
        if collector is None:
            return values.metrics()
        collector.add(rows)
        return values.with_late(collector.keys, collector.now()).metrics()

    def predict(self, used: Carry, group: Sequence[FedBatch], index: int, size: int = 1) -> Returned:
        """Dispatches the module on batches, the first of which is number `index`, and returns its outputs on the devices.

        `used` is from `eval_carry`. The call is compiled for `size` batches: 1, or the result of `preparation.group_for`, which adds a leading axis to outputs.
        """
        first = group[0].batch
        self.preparation.check_shapes("predict", group[0])
        if size == 1:
            outputs = self._function("predict", used)(used.leaves, used.key, self.strategy.number(index), self.strategy.feed(first).x)
            if self.is_eager:
                replicas = self.strategy.num_replicas
                rows = (len(first.mask),) if replicas == 1 else (replicas, len(first.mask) // replicas)
                check_rows(outputs, rows, is_counted=group[0].is_counted)
            return cast(Returned, outputs)
        xs = self.strategy.feed_group([fed.batch for fed in group], size, in_one_piece(group)).x
        function = self._function("predict group", used)
        return cast(Returned, function(used.leaves, used.key, self.strategy.number(index), self.strategy.number(len(group)), xs))

    @property
    def seconds_waited(self) -> float:
        """Seconds that callers have waited for compilation."""
        return self._steps.seconds_waited


def _check_scalar(traced: TracedStep, fed: FedBatch) -> None:
    if traced.scalar_loss and fed.num_real < fed.num_rows:
        raise scalar_loss_error(fed.num_real, fed.num_rows)


def scalar_loss_error(rows: int, size: int) -> LossError:
    """Returns the error for a scalar loss if a batch must be padded."""
    return LossError(
        f"The loss returns one number for a batch, but a batch of {rows} examples must be padded to {size}, which would make it wrong. Return one value per "
        "example, [batch] or [batch, ...]. Or use drop_remainder=True, a batch size that is divisible by the number of devices, or compile(pad=False)."
    )
