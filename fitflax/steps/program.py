"""One task as loops see it: looking at batches, having steps compiled, and dispatching them.

What can be known of a step before it is compiled is `DryRun`'s; the compiled functions themselves are `CompiledSteps`.
"""

import dataclasses
import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from fitflax.data import FedBatch
from fitflax.data.batch import in_one_piece
from fitflax.errors import LossError, ModelError
from fitflax.logs import StepValues, Values
from fitflax.metrics import Metric
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps.collected import Collected
from fitflax.steps.compilation import Compilation, CompiledShapes
from fitflax.steps.compiled import CompiledSteps
from fitflax.steps.cost import Cost
from fitflax.steps.dry_run import DryRun, TracedStep, shapes_in
from fitflax.steps.live import Carry, Sums
from fitflax.steps.model import describe_shapes
from fitflax.steps.sums import EvalSums, TrainSums
from fitflax.steps.task import NOTHING, Keep, Kept, Task

__all__ = ["PASSES", "Program", "Trained", "scalar_loss_error"]


# What `time_steps` tries, at most: steps and memory of a call, and time for each of the two.
_GROUP_STEPS = 16
_GROUP_BYTES = 2**26
_TRIAL_SECONDS = 0.25
_MAX_LAPS = 10


PASSES = 3
"""Of a training step: forward, and back to the activations and to the parameters."""

# Of states whose shapes need not be known.
_ANY_FORM = Carry([], None, None)

# Floating-point operations, or bytes of memory, of an evaluation of a batch that takes a core about two milliseconds, twenty times a call's own time; and
# one that takes a GPU less than one.
_CHEAP = 2e7
_CHEAP_ON_ACCELERATORS = 5e9


class Trained(NamedTuple):
    """What dispatching one update returns, all of it still on the devices.

    Attributes:
        state: The state after it.
        sums: The epoch's sums, packed.
        values: The step's values.
        rows: What metrics collect of its examples, by log key.
        kept: What else of it is kept.
    """

    state: Carry
    sums: Sums
    values: StepValues
    rows: dict[str, Metric]
    kept: Kept


class Program:
    """Looks at batches, has steps compiled, and dispatches them; keeps nothing of the state.

    Args:
        task: What they compute.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.strategy = task.strategy
        self.dry_run = DryRun(task)
        self._steps = CompiledSteps(task, lambda train: self.dry_run.traced_step(train=train).form)
        # Of evaluations and predictions that were dry-run: how many batches a call takes, by kind, shapes, and whether the batch comes alone.
        self._group_sizes: dict[tuple[str, str, bool], int] = {}
        # By the shapes of a batch to train on: what its passes cost.
        self._costs: dict[str, Cost] = {}
        # Of training: by shapes, how many steps a call makes, and what is kept; and which of them was prepared last.
        self._compilations: dict[tuple[str, int, Keep], Compilation] = {}
        self._prepared: tuple[str, int, Keep] | None = None
        self._states: dict[Any, TrainState] = {}
        self._compiled = {verb: CompiledShapes(verb) for verb in ("train on", "evaluate", "predict")}
        # What `preflight` has looked at, and arrays, by identity.
        self._asked: set[str] = set()
        self.looked_at: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # The devices' own, because a collective of an evaluation can wait for one of a step, whoever dispatched them.
        self._in_flight = self.strategy.in_flight

    # -- preparation --

    def init(self, key: jax.Array, batch: Batch) -> TrainState:
        """Returns the state at step 0, on the devices."""
        key = self.strategy.put(key)
        state = self._steps.get("init", self._init_form(key, batch))(key, self.strategy.feed(batch))
        return dataclasses.replace(cast(TrainState, state), key=key)

    def begin_init(self, key: jax.Array, batch: Batch) -> TrainState:
        """Returns the shapes of the state at step 0, and has what `init` will call compiled in a thread."""
        form = self._init_form(key, batch)
        self._steps.begin("init", form, self._steps.lower("init", form, self.strategy.abstract_put(key), self.strategy.abstract_feed(batch)))
        return self.abstract_state(key, batch)

    def abstract_state(self, key: jax.Array, batch: Batch) -> TrainState:
        """Returns the shapes of the state at step 0, and where its arrays lie, computing nothing.

        Raises:
            ModelError: The module fails.
            ShardingError: The state does not fit the devices.
        """
        seen = str(self.strategy.abstract_feed(batch)), key.dtype
        if seen not in self._states:
            # Where places follow from shapes, these must be known before anything can be compiled; elsewhere one trace serves for both.
            whole, feed = self._holds_whole, self.strategy.abstract_feed(batch)
            init: Any = self._steps.traceable("init", _ANY_FORM) if whole else self.strategy.trace(self.task.init_state, inputs=("replicated", "split"))
            state = jax.eval_shape(init, self.strategy.abstract_put(key), feed)
            self._states[seen] = self.strategy.abstract_state(dataclasses.replace(state, key=key))
        return self._states[seen]

    @property
    def _holds_whole(self) -> bool:
        """Whether each device holds the whole state, whatever it is."""
        return self.strategy.places(()) == "replicated"

    def _init_form(self, key: jax.Array, batch: Batch) -> Carry:
        """Returns what `"init"` is compiled for."""
        return _ANY_FORM if self._holds_whole else Carry.of(self.abstract_state(key, batch))

    def prepare_train(self, state: TrainState, batch: Batch, *, is_single: bool = False, steps_per_call: int = 1, keep: Keep = NOTHING) -> None:
        """Dry-runs a training step on shapes alone, once for batches of the same shapes, and begins to compile it.

        Args:
            state: The state, or its shapes with their places.
            batch: The first batch of a call.
            is_single: Whether it is the only one, so that what calls before had compiled is to be compared with.
            steps_per_call: How many steps a call will make.
            keep: What of a step is kept.

        Raises:
            ModelError: The module fails, or the step would change the structure of the state.
            LossError: The loss does not fit.
            MetricError: A metric does not fit.
        """
        feed = self._begin_call("train on", batch, is_single)
        shapes = str(feed)
        self._prepared = prepared = shapes, steps_per_call, keep
        if prepared in self._compilations:
            return
        self._costs[shapes] = self.dry_run.step(state, feed, train=True)
        kind = self._kind_of_train(steps_per_call, steps_per_call)
        self._compilations[prepared] = self._compile(kind, Carry.of(state), batch, steps_per_call, train=True, keep=keep)

    def prepare_evaluate(self, state: TrainState, batch: Batch, *, is_single: bool = False) -> None:
        """Dry-runs an evaluation, and begins to compile it; arguments and errors as of `prepare_train`."""
        feed = self._begin_call("evaluate", batch, is_single)
        seen = "evaluate", str(feed), is_single
        if seen in self._group_sizes:
            return
        cost = self.dry_run.step(state, feed, train=False)
        size = 1 if is_single else self._worth_grouping(cost, batch)
        self._compile("evaluate" if size == 1 else "evaluate group", self.in_use(state), batch, size, train=False)
        self._group_sizes[seen] = size

    def prepare_predict(self, state: TrainState, batch: Batch, *, is_single: bool = False) -> None:
        """Dry-runs prediction; arguments as of `prepare_train`.

        Raises:
            ModelError: The module fails, or an output has no leading axis of examples.
        """
        feed = self._begin_call("predict", Batch(batch.x, (), batch.mask), is_single)
        seen = "predict", str(feed.x), is_single
        if seen in self._group_sizes:
            return
        rows = self.strategy.rows_of(batch) // self.strategy.num_replicas
        outputs, cost, _ = self.dry_run.outputs(state, batch, train=False)
        if any(not leaf.shape or leaf.shape[0] != rows for leaf in jax.tree.leaves(outputs)):
            raise ModelError(f"predict joins outputs along their first axis, the examples ({rows} here). The module returned {describe_shapes(outputs)}.")
        every = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((len(batch.mask), *leaf.shape[1:]), leaf.dtype), outputs)
        self._group_sizes[seen] = 1 if is_single else self._worth_grouping(cost, batch, every)

    def _begin_call(self, verb: str, batch: Batch, is_single: bool) -> Batch:
        """Looks at the first batch of a call; returns its shapes as the devices get it."""
        if not is_single:
            self._compiled[verb].see(batch, warns=False)
        return cast(Batch, shapes_in(self.strategy.abstract_feed(batch)))

    def _compile(self, kind: str, carry: Carry, batch: Batch, size: int, *, train: bool, keep: Keep = NOTHING) -> Compilation:
        """Traces a step that takes `size` batches, which finds faults, and has it compiled in a thread."""
        traced, put = self.dry_run.traced_step(train=train), self.strategy.abstract_put
        arguments = put(carry.leaves), put(carry.key), put(traced.form.pack(traced.empty))
        batches = (self.strategy.abstract_feed(batch),) if size == 1 else (np.int32(size), self.strategy.abstract_feed(batch, size))
        return self._steps.begin(kind, carry, self._steps.lower(kind, carry, *arguments, *batches, keep=keep), keep=keep)

    def _worth_grouping(self, cost: Cost, batch: Batch, outputs: PyTree = ()) -> int:
        """Returns how many batches are to be evaluated, or predicted, in one call: several where a call takes longer than what it computes."""
        on_host = self.strategy.is_on_host
        if max(cost.flops, cost.bytes_accessed) > (_CHEAP if on_host else _CHEAP_ON_ACCELERATORS):
            return 1
        if on_host and cost.has_convolution:
            return 1  # XLA computes them on one core inside of a loop.
        return _group_of(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((batch, outputs))))

    def _kind_of_train(self, count: int, size: int) -> str:
        """Returns the name of the compiled function that makes so many updates, where at most `size` go together."""
        if size == 1:
            return "train"
        return "train whole group" if count == size and self.strategy.prefers_counted_loops else "train group"

    def group_for(self, kind: str, batch: Batch) -> int:
        """Returns how many batches like this one a call of `"evaluate"` or `"predict"` takes."""
        feed = shapes_in(self.strategy.abstract_feed(batch))
        return self._group_sizes[kind, str(feed if kind == "evaluate" else feed.x), False]

    def is_new(self, question: str) -> bool:
        """Returns whether this is asked for the first time: what is to be told of a program is told once."""
        is_new = question not in self._asked
        self._asked.add(question)
        return is_new

    def empty_sums(self, *, train: bool) -> Sums:
        """Returns the sums of an epoch or evaluation without batches, on the devices."""
        return self.pack_sums(self.dry_run.traced_step(train=train).empty, train=train)

    def pack_sums(self, sums: TrainSums | EvalSums, *, train: bool) -> Sums:
        """Returns sums as they go from call to call, on the devices."""
        return cast(Sums, self.strategy.put(self.dry_run.traced_step(train=train).form.pack(sums)))

    def unpack_sums(self, sums: Sums, *, train: bool) -> TrainSums | EvalSums:
        """Returns what was packed, on the devices."""
        return cast(TrainSums | EvalSums, self.dry_run.traced_step(train=train).form.unpack_arrays(sums))

    def collector(self, *, train: bool) -> Collected | None:
        """Returns a place for the rows of an epoch or evaluation; `None` where no metric collects any."""
        collected = self.dry_run.traced_step(train=train).collected
        return Collected(collected, self.strategy.join, most_pending=max(16, self.strategy.max_in_flight + 1)) if collected else None

    # -- running --

    def _see(self, verb: str, fed: FedBatch) -> None:
        if fed.number == 0:  # Others were cut off the same piece as one that was seen.
            self._compiled[verb].see(fed.batch)

    def train_group(self, carry: Carry, sums: Sums, group: Sequence[FedBatch], size: int, *, keep: Keep = NOTHING) -> Trained:
        """Dispatches several updates in one call, at most `size`, for which it is compiled; `carry` and `sums` are consumed."""
        traced = self.dry_run.traced_step(train=True)
        for fed in group:
            _check_scalar(traced, fed)
        self._see("train on", group[0])
        self._in_flight.make_room()
        batches = self.strategy.feed_group([fed.batch for fed in group], size, in_one_piece(group))
        function = self._steps.get(self._kind_of_train(len(group), size), carry, keep=keep)
        leaves, sums, vector, rows, *parts = function(carry.leaves, carry.key, sums, np.int32(len(group)), batches)
        kept = Kept(*parts)
        values = StepValues(traced.places, vector, suspects=kept.suspects.names)
        self._in_flight.add(values, len(group) * group[0].batch.nbytes)
        return Trained(Carry(leaves, carry.treedef, carry.key), sums, values, rows, kept)

    @staticmethod
    def group_size(fed: FedBatch) -> int:
        """Returns how many steps are worth trying in one call: 16, fewer where their batches would take more than 64 MB."""
        return _group_of(fed.batch.nbytes)

    def time_steps(self, state: TrainState, fed: FedBatch, size: int, keep: Keep) -> tuple[float, float]:
        """Returns the seconds that a step takes alone, and in a call of `size` steps, measured on copies of the state; the data's own time is in neither."""

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
                return min(*laps, lap(), lap())  # As many in all of them, whatever their clocks say.
            while len(laps) < _MAX_LAPS and time.perf_counter() < end:
                laps.append(lap())
            return min(laps)

        group = [fed] * size
        single = seconds(lambda now, sums: self.train(now, sums, fed, keep=keep), 1)
        return single, seconds(lambda now, sums: self.train_group(now, sums, group, size, keep=keep), size)

    def await_step(self, carry: Carry, *, steps_per_call: int, keep: Keep = NOTHING) -> None:
        """Waits for a training step that is being compiled ahead."""
        self._steps.get(self._kind_of_train(steps_per_call, steps_per_call), carry, keep=keep)

    def train(self, carry: Carry, sums: Sums, fed: FedBatch, *, keep: Keep = NOTHING) -> Trained:
        """Dispatches one update; `carry` and `sums` are consumed."""
        traced = self.dry_run.traced_step(train=True)
        _check_scalar(traced, fed)
        self._see("train on", fed)
        self._in_flight.make_room()
        function = self._steps.get("train", carry, keep=keep)
        leaves, sums, vector, rows, *parts = function(carry.leaves, carry.key, sums, self.strategy.feed(fed.batch))
        kept = Kept(*parts)
        values = StepValues(traced.places, vector, suspects=kept.suspects.names)
        self._in_flight.add(values, fed.batch.nbytes)
        return Trained(Carry(leaves, carry.treedef, carry.key), sums, values, rows, kept)

    @staticmethod
    def in_use(state: TrainState) -> Carry:
        """Returns what of a state is evaluated: parameters, the averaged ones where there are any, and collections, `(params, model_state)`."""
        params = state.params if state.ema_params is None else state.ema_params
        return Carry(*jax.tree.flatten((params, state.model_state)), state.key)

    def evaluate(self, used: Carry, sums: Sums, group: Sequence[FedBatch], size: int = 1) -> tuple[Sums, Values, dict[str, Metric]]:
        """Dispatches the evaluation of some batches, and returns sums, their values and the batches' rows; `sums` is consumed.

        Args:
            used: What `in_use` returned.
            sums: The sums so far.
            group: The batches.
            size: How many of them there may be: 1, or what `group_for` returned, for which a call is compiled; rows then have a leading axis of so many.
        """
        traced = self.dry_run.traced_step(train=False)
        for fed in group:
            _check_scalar(traced, fed)
        self._see("evaluate", group[0])
        self._in_flight.make_room()
        if size == 1:
            sums, vector, rows = self._steps.get("evaluate", used)(used.leaves, used.key, sums, self.strategy.feed(group[0].batch))
        else:
            batches = self.strategy.feed_group([fed.batch for fed in group], size, in_one_piece(group))
            function = self._steps.get("evaluate group", used)
            sums, vector, rows = function(used.leaves, used.key, sums, np.int32(len(group)), batches)
        values = Values(traced.places, vector)
        self._in_flight.add(values, len(group) * group[0].batch.nbytes)
        return sums, values, rows

    def alone(self, values: Values, rows: dict[str, Metric], *, train: bool) -> dict[str, Any]:
        """Returns the metrics of a batch that is not part of an epoch or evaluation."""
        collector = self.collector(train=train)
        if collector is None:
            return values.metrics()
        collector.add(rows)
        return values.with_late(collector.keys, collector.now()).metrics()

    def predict(self, used: Carry, group: Sequence[FedBatch], index: int, size: int = 1) -> PyTree:
        """Dispatches the module on some batches and returns its outputs, on the devices.

        Args:
            used: What `in_use` returned.
            group: The batches.
            index: The number of the first one.
            size: How many of them there may be: 1, or what `group_for` returned, for which a call is compiled; outputs then have a leading axis of so many.
        """
        first = group[0].batch
        self._compiled["predict"].see(Batch(first.x, (), first.mask))
        if size == 1:
            return self._steps.get("predict", used)(used.leaves, used.key, np.int32(index), self.strategy.feed(first).x)
        xs = self.strategy.feed_group([fed.batch for fed in group], size, in_one_piece(group)).x
        function = self._steps.get("predict group", used)
        return function(used.leaves, used.key, np.int32(index), np.int32(len(group)), xs)

    @property
    def model_flops(self) -> float | None:
        """The floating-point operations that the model needs for a training step on one device, as prepared last; `None` where that is not known.

        Matrix products and convolutions of the pass forward, and twice as many for the way back (Chowdhery et al., "PaLM", 2022, appendix B): what is computed
        once more to save memory does not count. Of an update of the user's own they are those that it makes.
        """
        if self._prepared is None:
            return None
        flops = self._costs[self._prepared[0]].matrix_flops
        passes = 1 if self.task.custom_step is not None else PASSES * self.task.numerics.accumulate_steps
        return flops * passes if math.isfinite(flops) else None

    def forward_flops(self, state: TrainState, batch: Batch) -> float | None:
        """Returns the same of a pass forward alone over one example, from the shapes of a batch; `None` where that is not known."""
        flops = self.dry_run.usual_outputs(state, batch).cost.matrix_flops
        return flops * self.strategy.num_replicas * self.strategy.num_partitions / self.strategy.rows_of(batch) if math.isfinite(flops) else None

    def memory(self) -> Any:
        """Returns JAX's analysis of the memory that the training step prepared last takes on a device; `None` where none has been compiled ahead."""
        compilation = None if self._prepared is None else self._compilations.get(self._prepared)
        return None if compilation is None else compilation.memory()

    @property
    def seconds_waited(self) -> float:
        """How long callers have waited for steps that were being compiled."""
        return self._steps.seconds_waited


def _group_of(num_bytes: int) -> int:
    """Returns how many batches of so many bytes a call may take."""
    return int(max(1, min(_GROUP_STEPS, _GROUP_BYTES // max(num_bytes, 1))))


def _check_scalar(traced: TracedStep, fed: FedBatch) -> None:
    if traced.scalar_loss and fed.num_real < fed.num_rows:
        raise scalar_loss_error(fed.num_real, fed.num_rows)


def scalar_loss_error(rows: int, size: int) -> LossError:
    """Returns the error for a loss that is one number, where a batch must be padded."""
    return LossError(
        f"The loss returns one number for a batch, but a batch of {rows} examples has to be padded to {size}, which would falsify it. Return one value per "
        "example, [batch] or [batch, ...]; or use drop_remainder=True, equal batches that the devices divide, or compile(pad=False)."
    )
