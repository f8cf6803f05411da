"""One task as loops see it: dry run, dispatch, and what a step costs.

What steps need besides state and batch (empty sums, the order of log keys) is found once, by evaluating shapes alone, which is also the dry run that reports
mistakes before anything is compiled. The compiled functions themselves are `CompiledSteps`.
"""

import dataclasses
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from fitflax.data import FedBatch
from fitflax.data.batch import in_one_piece
from fitflax.errors import LossError, MetricError, ModelError, NotReadyError
from fitflax.logs import NUM_STEP_VALUES, Kind, Place, StepValues, Values, default_direction
from fitflax.metrics import Metric
from fitflax.metrics.base import metric_direction
from fitflax.parallel.packed import Form
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps.activations import last_activations
from fitflax.steps.collected import Collected
from fitflax.steps.compilation import Compilation, CompiledShapes
from fitflax.steps.compiled import CompiledSteps
from fitflax.steps.cost import Cost, cost_of
from fitflax.steps.live import Carry, Sums
from fitflax.steps.model import describe_shapes
from fitflax.steps.sums import EvalSums, TrainSums, collects, summed
from fitflax.steps.task import NOTHING, SCALAR, Keep, Kept, Task

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

# Larger sums are not packed: it would copy them at every step.
_LARGEST_PACKED = 4096

# Floating-point operations, or bytes of memory, of an evaluation of a batch that takes a core about two milliseconds, twenty times a call's own time; and
# one that takes a GPU less than one.
_CHEAP = 2e7
_CHEAP_ON_ACCELERATORS = 5e9


class _Structure(NamedTuple):
    """What a dry run finds out.

    Attributes:
        places: Each log key's place in the vector of values, in the order in which keys are shown.
        num_values: The length of that vector.
        empty: What nothing has been added to, as NumPy arrays of their final shapes: `TrainSums` or `EvalSums`.
        form: How these sums are packed on their way from call to call.
        collected: Empty metrics whose rows are collected on the host.
        kinds: By log key, what is known of the metrics.
        scalar_loss: Whether the loss is one number, which padding would falsify.
    """

    places: dict[str, Place]
    num_values: int
    empty: Any
    form: Form
    collected: dict[str, Metric]
    kinds: Mapping[str, Kind]
    scalar_loss: bool


class _TracedOutputs(NamedTuple):
    """What tracing the module alone finds out.

    Attributes:
        shapes: Of its outputs.
        cost: What it costs a device to compute them.
        activations: What they come from, in the same structure.
    """

    shapes: PyTree
    cost: Cost
    activations: PyTree


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
        self._steps = CompiledSteps(task, lambda train: self._structures[train].form)
        self._structures: dict[bool, _Structure] = {}
        # Of evaluations and predictions that were dry-run: how many batches a call takes, by kind, shapes, and whether the batch comes alone.
        self._group_sizes: dict[tuple[str, str, bool], int] = {}
        # By the shapes of a batch to train on, what its passes cost; and with how many steps a call makes, and what is kept, its compilation. The last one.
        self._costs: dict[str, Cost] = {}
        self._compilations: dict[tuple[str, int, Keep], Compilation] = {}
        self._prepared: tuple[str, int, Keep] | None = None
        self._outputs: dict[tuple[str, bool], _TracedOutputs] = {}
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
        self._costs[shapes] = self._dry_run(_abstract(state), feed, train=True)
        kind = self._kind_of_train(steps_per_call, steps_per_call)
        self._compilations[prepared] = self._compile(kind, Carry.of(state), batch, steps_per_call, train=True, keep=keep)

    def prepare_evaluate(self, state: TrainState, batch: Batch, *, is_single: bool = False) -> None:
        """Dry-runs an evaluation, and begins to compile it; arguments and errors as of `prepare_train`."""
        feed = self._begin_call("evaluate", batch, is_single)
        seen = "evaluate", str(feed), is_single
        if seen in self._group_sizes:
            return
        cost = self._dry_run(_abstract(state), feed, train=False)
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
        outputs, cost, _ = self._traced_outputs(state, batch, train=False)
        if any(not leaf.shape or leaf.shape[0] != rows for leaf in jax.tree.leaves(outputs)):
            raise ModelError(f"predict joins outputs along their first axis, the examples ({rows} here). The module returned {describe_shapes(outputs)}.")
        every = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((len(batch.mask), *leaf.shape[1:]), leaf.dtype), outputs)
        self._group_sizes[seen] = 1 if is_single else self._worth_grouping(cost, batch, every)

    def _begin_call(self, verb: str, batch: Batch, is_single: bool) -> Batch:
        """Looks at the first batch of a call; returns its shapes as the devices get it."""
        if not is_single:
            self._compiled[verb].see(batch, warns=False)
        return cast(Batch, _abstract(self.strategy.abstract_feed(batch)))

    def _compile(self, kind: str, carry: Carry, batch: Batch, size: int, *, train: bool, keep: Keep = NOTHING) -> Compilation:
        """Traces a step that takes `size` batches, which finds faults, and has it compiled in a thread."""
        structure, put = self.structure(train=train), self.strategy.abstract_put
        arguments = put(carry.leaves), put(carry.key), put(structure.form.pack(structure.empty))
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
        feed = _abstract(self.strategy.abstract_feed(batch))
        return self._group_sizes[kind, str(feed if kind == "evaluate" else feed.x), False]

    def _dry_run(self, state: TrainState, feed: Batch, *, train: bool) -> Cost:
        """Evaluates shapes; notes what they tell, the first time, and returns what the passes over such a batch and its metrics cost, without a gradient."""
        order: list[str] = []
        given: dict[str, Any] = {}

        def metrics_of(state: TrainState, batch: Batch) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
            metrics = self.task.batch_metrics(state, batch, train=train, given=given)
            order[:] = metrics
            # Merging once gives the shapes that sums keep from then on; empty ones may begin as scalars.
            merged = {key: metric.empty().merge(metric) for key, metric in summed(metrics).items()}
            return metrics, merged, {key: _result(key, metric) for key, metric in merged.items()}

        traced = self.strategy.trace(metrics_of, inputs=("replicated", "split"))
        jaxpr, (abstract, merged, computed) = jax.make_jaxpr(traced, return_shape=True)(state, feed)
        begin = {key: given.get(key, metric).empty() for key, metric in abstract.items()}
        empty = {
            key: jax.tree.map(lambda want, have: np.array(np.broadcast_to(np.asarray(have, want.dtype), want.shape)), metric, begin[key])
            for key, metric in merged.items()
        }
        parts = getattr(abstract.get("loss"), "parts", {})
        scalar = any(getattr(part, "name", None) == SCALAR for part in parts.values())
        kinds = {key: _kind(key, abstract[key]) for key in order}
        places, end = {}, NUM_STEP_VALUES if train else 0
        for key in sorted(computed):
            places[key] = Place(end, computed[key].shape)
            end = places[key].end
        shown = {key: places[key] for key in order if key in places}
        collected = {key: _without_rows(key, abstract[key]) for key in order if collects(abstract[key])}
        sums: Any = TrainSums(empty, np.int32(-1), np.int32(-1)) if train else EvalSums(metrics=empty, index=np.int32(0))  # type: ignore[arg-type]
        self._structures.setdefault(train, _Structure(shown, end, sums, Form.of(sums, _LARGEST_PACKED), collected, kinds, scalar))
        return self._cost_of(jaxpr)

    def _cost_of(self, jaxpr: Any) -> Cost:
        """Returns what a traced function costs each device."""
        return cost_of(jaxpr).times(1 / self.strategy.num_partitions)

    def is_new(self, question: str) -> bool:
        """Returns whether this is asked for the first time: what is to be told of a program is told once."""
        is_new = question not in self._asked
        self._asked.add(question)
        return is_new

    def structure(self, *, train: bool) -> _Structure:
        """Returns what the dry run found.

        Raises:
            NotReadyError: There was none yet.
        """
        if train not in self._structures:
            raise NotReadyError("No batch has been seen yet.")
        return self._structures[train]

    def empty_sums(self, *, train: bool) -> Sums:
        """Returns the sums of an epoch or evaluation without batches, on the devices."""
        return self.pack_sums(self.structure(train=train).empty, train=train)

    def pack_sums(self, sums: TrainSums | EvalSums, *, train: bool) -> Sums:
        """Returns sums as they go from call to call, on the devices."""
        return cast(Sums, self.strategy.put(self.structure(train=train).form.pack(sums)))

    def unpack_sums(self, sums: Sums, *, train: bool) -> TrainSums | EvalSums:
        """Returns what was packed, on the devices."""
        return cast(TrainSums | EvalSums, self.structure(train=train).form.unpack_arrays(sums))

    def collector(self, *, train: bool) -> Collected | None:
        """Returns a place for the rows of an epoch or evaluation; `None` where no metric collects any."""
        collected = self.structure(train=train).collected
        return Collected(collected, self.strategy.join, most_pending=max(16, self.strategy.max_in_flight + 1)) if collected else None

    def output_shapes(self, state: TrainState, batch: Batch, *, train: bool) -> PyTree:
        """Returns the shapes of the module's outputs for a replica's share of the batch, computing nothing; found out once for inputs of the same shapes.

        Args:
            state: The state.
            batch: A batch.
            train: Whether those of training are asked for; a function of the user's may be able to do nothing else.

        Raises:
            ModelError: The module fails.
        """
        return self._traced_outputs(state, batch, train=train).shapes

    def activations(self, state: TrainState, batch: Batch, *, train: bool) -> PyTree:
        """Returns the names of the activations that the outputs come from, `""` for none, in their structure; arguments and errors as of `output_shapes`."""
        return self._traced_outputs(state, batch, train=train).activations

    def _traced_outputs(self, state: TrainState, batch: Batch, *, train: bool) -> "_TracedOutputs":
        feed = self.strategy.abstract_feed(batch)
        if (seen := (str(_abstract(feed.x)), train)) not in self._outputs:
            self._outputs[seen] = self._trace_outputs(state, feed, train)
        return self._outputs[seen]

    def _trace_outputs(self, state: TrainState, feed: Batch, train: bool) -> "_TracedOutputs":
        order: list[str] = []

        def forward(state: TrainState, batch: Batch) -> PyTree:
            outputs = self.task.outputs(state.params, state.model_state, state.key, batch.x, train=train)
            order[:] = outputs if isinstance(outputs, dict) else []
            return outputs

        traced = self.strategy.trace(forward, inputs=("replicated", "split"))
        jaxpr, outputs = jax.make_jaxpr(traced, return_shape=True)(_abstract(state), feed)
        activations = jax.tree.unflatten(jax.tree.structure(outputs), last_activations(jaxpr))
        if isinstance(outputs, dict):
            # JAX sorts; this is the module's order.
            outputs, activations = ({name: tree[name] for name in order} for tree in (outputs, activations))
        return _TracedOutputs(outputs, self._cost_of(jaxpr), activations)

    # -- running --

    def _see(self, verb: str, fed: FedBatch) -> None:
        if fed.number == 0:  # Others were cut off the same piece as one that was seen.
            self._compiled[verb].see(fed.batch)

    def train_group(self, carry: Carry, sums: Sums, group: Sequence[FedBatch], size: int, *, keep: Keep = NOTHING) -> Trained:
        """Dispatches several updates in one call, at most `size`, for which it is compiled; `carry` and `sums` are consumed."""
        structure = self._structures[True]
        for fed in group:
            _check_scalar(structure, fed)
        self._see("train on", group[0])
        self._in_flight.make_room()
        batches = self.strategy.feed_group([fed.batch for fed in group], size, in_one_piece(group))
        function = self._steps.get(self._kind_of_train(len(group), size), carry, keep=keep)
        leaves, sums, vector, rows, *parts = function(carry.leaves, carry.key, sums, np.int32(len(group)), batches)
        kept = Kept(*parts)
        values = StepValues(structure.places, vector, suspects=kept.suspects.names)
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
        structure = self._structures[True]
        _check_scalar(structure, fed)
        self._see("train on", fed)
        self._in_flight.make_room()
        function = self._steps.get("train", carry, keep=keep)
        leaves, sums, vector, rows, *parts = function(carry.leaves, carry.key, sums, self.strategy.feed(fed.batch))
        kept = Kept(*parts)
        values = StepValues(structure.places, vector, suspects=kept.suspects.names)
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
        structure = self._structures[False]
        for fed in group:
            _check_scalar(structure, fed)
        self._see("evaluate", group[0])
        self._in_flight.make_room()
        if size == 1:
            sums, vector, rows = self._steps.get("evaluate", used)(used.leaves, used.key, sums, self.strategy.feed(group[0].batch))
        else:
            batches = self.strategy.feed_group([fed.batch for fed in group], size, in_one_piece(group))
            function = self._steps.get("evaluate group", used)
            sums, vector, rows = function(used.leaves, used.key, sums, np.int32(len(group)), batches)
        values = Values(structure.places, vector)
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
        flops = self._traced_outputs(state, batch, train=not self.task.model.can_evaluate).cost.matrix_flops
        return flops * self.strategy.num_replicas * self.strategy.num_partitions / self.strategy.rows_of(batch) if math.isfinite(flops) else None

    def memory(self) -> Any:
        """Returns JAX's analysis of the memory that the training step prepared last takes on a device; `None` where none has been compiled ahead."""
        compilation = None if self._prepared is None else self._compilations.get(self._prepared)
        return None if compilation is None else compilation.memory()

    @property
    def seconds_waited(self) -> float:
        """How long callers have waited for steps that were being compiled."""
        return self._steps.seconds_waited

    @property
    def loss_is_scalar(self) -> bool:
        """Whether the loss is known to be one number, which padding would falsify."""
        return any(structure.scalar_loss for structure in self._structures.values())

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """By log key of training, what is known of the metrics."""
        return self._structures[True].kinds if True in self._structures else {}


def _group_of(num_bytes: int) -> int:
    """Returns how many batches of so many bytes a call may take."""
    return int(max(1, min(_GROUP_STEPS, _GROUP_BYTES // max(num_bytes, 1))))


def _kind(key: str, metric: Metric) -> Kind:
    direction = default_direction(key) or metric_direction(metric)
    shows = getattr(type(metric), "summary", Metric.summary) is not Metric.summary
    # One without rows or sums: its attributes are all that is needed.
    return Kind(direction, jax.tree.map(lambda leaf: None, metric).summary if shows else None, getattr(metric, "is_recorded", True))


def _result(key: str, metric: Metric) -> jax.Array:
    try:
        return jax.numpy.asarray(metric.compute())
    except Exception as error:
        raise MetricError(f"The metric {key!r} cannot be computed: {type(error).__name__}: {error}") from error


def _without_rows(key: str, metric: Metric) -> Metric:
    faults = [describe_shapes(leaf) for leaf in jax.tree.leaves(metric) if not leaf.shape]
    if faults:
        raise MetricError(f"The metric {key!r} has collect = True, so its leaves must be rows [examples, ...]. Received: {', '.join(faults)}.")
    return cast(Metric, jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape[1:]), leaf.dtype), metric))


def _check_scalar(structure: _Structure, fed: FedBatch) -> None:
    if structure.scalar_loss and fed.num_real < fed.num_rows:
        raise scalar_loss_error(fed.num_real, fed.num_rows)


def scalar_loss_error(rows: int, size: int) -> LossError:
    """Returns the error for a loss that is one number, where a batch must be padded."""
    return LossError(
        f"The loss returns one number for a batch, but a batch of {rows} examples has to be padded to {size}, which would falsify it. Return one value per "
        "example, [batch] or [batch, ...]; or use drop_remainder=True, equal batches that the devices divide, or compile(pad=False)."
    )


def _abstract(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
