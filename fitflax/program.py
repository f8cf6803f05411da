"""The compiled steps of one task, and the live state that they pass on from step to step.

Each of training, evaluation and prediction is one compiled function. What they need besides (empty sums, the order of log keys) is found once, by
evaluating shapes alone, which is also the dry run that reports mistakes before anything is compiled.
"""

import collections
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax import lax

from fitflax.collected import Collected
from fitflax.compilation import CompiledShapes
from fitflax.data import FedBatch, Source
from fitflax.data.arrays import ArraySource
from fitflax.errors import LossError, MetricError, ModelError, NotReadyError
from fitflax.logs import NUM_STEP_VALUES, Place, StepValues, Values
from fitflax.metrics import Metric, metric_direction
from fitflax.model import describe_shapes
from fitflax.parallel import Strategy
from fitflax.parallel.base import Layout
from fitflax.parallel.packed import Packed
from fitflax.state import Batch, PyTree, TrainState
from fitflax.step import SCALAR, EvalSums, Task, TrainSums, collects, summed

__all__ = ["LiveState", "Program", "Trained"]


# What `time_steps` tries, at most: steps and memory of a call, and time for each of the two.
_GROUP_STEPS = 16
_GROUP_BYTES = 2**26
_TRIAL_SECONDS = 0.25
_MAX_LAPS = 10

# From here on fresh memory costs more than waiting for a step: XLA takes it page by page, `host_copy` in huge pages.
_LARGE_BYTES = 2**26


class LiveState:
    """The newest state of a run: the one object that is replaced at every step, its buffers reused by the next one.

    Whatever is handed to users must not change under them. `lend` gives the state itself, and has it copied before the next step takes its buffers;
    `borrow` gives it for use before that step only.

    Args:
        strategy: Copies.
        state: A state on the devices, owned by this object from now on.
        step: `state.step`, known on the host.
    """

    def __init__(self, strategy: Strategy, state: TrainState, step: int) -> None:
        self._strategy = strategy
        self._state = state
        self._is_lent = False
        self._is_large: bool | None = None  # Not yet known.
        self.step = step
        self.version = 0

    def borrow(self) -> TrainState:
        """Returns the state; it must not be kept beyond the next step."""
        if not self.is_intact:
            raise NotReadyError("The state was lost: a step failed after it had taken the state's buffers. Restore a checkpoint.")
        return self._state

    def lend(self) -> TrainState:
        """Returns the state; it stays valid whatever happens to this object."""
        self._is_lent = True
        return self.borrow()

    def copy(self, tree: PyTree) -> PyTree:
        """Returns a copy of a part of the state."""
        return self._strategy.copy(tree)

    def snapshot(self, tree: PyTree) -> Packed:
        """Returns a copy of arrays beside the state, or of the state, that is made without waiting and that later steps cannot touch."""
        return self._strategy.copy_once(tree)

    @property
    def snapshots_wait(self) -> bool:
        """Whether the state is to be copied to the host at once: the memory of an accelerator may be too small for two, and a large copy is faster that way."""
        if self._is_large is None:
            self._is_large = sum(leaf.nbytes for leaf in jax.tree.leaves(self._state)) > _LARGE_BYTES
        return self._is_large or not self._strategy.is_on_host

    @property
    def is_intact(self) -> bool:
        """Whether no failed step has taken the state's buffers."""
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state))

    def take(self) -> TrainState:
        """Returns the state for a call that consumes its buffers; a lent one is copied first."""
        if self._is_lent:
            self._state = self._strategy.copy(self._state)
            self._is_lent = False
        return self._state

    def advance(self, state: TrainState, steps: int = 1) -> None:
        """Takes the state after more updates."""
        self._state = state
        self._is_lent = False
        self.step += steps
        self.version += 1

    def release(self) -> None:
        """Lets go of the state, until `replace` gives another one; those to whom it was lent keep it."""
        self._state = TrainState(step=(), params=(), model_state={}, opt_state=(), key=())  # type: ignore[arg-type]
        self._is_lent = False
        self.version += 1

    def replace(self, state: TrainState, step: int) -> None:
        """Takes another state, such as one with another learning rate; what is new in it must lie on the devices and be nobody else's."""
        self._state = state
        self.step = step
        self.version += 1


class _InFlight:
    """Bounds how many dispatched steps may be unfinished: memory, and on CPU a deadlock of collectives, depend on it.

    Args:
        limit: How many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending: collections.deque[Values] = collections.deque()

    def make_room(self) -> None:
        """Waits until one more step may be dispatched."""
        while len(self._pending) >= self._limit:
            self._pending.popleft().wait()

    def add(self, values: Values) -> None:
        """Notes the values of a step just dispatched."""
        self._pending.append(values)


class _Structure(NamedTuple):
    """What a dry run finds out.

    Attributes:
        places: Each log key's place in the vector of values, in the order in which keys are shown.
        num_values: The length of that vector.
        empty: Empty metrics as NumPy arrays of their final shapes.
        collected: Empty metrics whose rows are collected on the host.
        directions: By log key, which direction is better.
        scalar_loss: Whether the loss is one number, which padding would falsify.
    """

    places: dict[str, Place]
    num_values: int
    empty: dict[str, Any]
    collected: dict[str, Metric]
    directions: Mapping[str, str | None]
    scalar_loss: bool


class Trained(NamedTuple):
    """What dispatching one update returns, all of it still on the devices.

    Attributes:
        state: The state after it.
        sums: The epoch's sums.
        values: The step's values.
        rows: What metrics collect of its examples, by log key.
        grads: Its gradient, `()` unless it was asked for.
    """

    state: TrainState
    sums: TrainSums
    values: StepValues
    rows: dict[str, Metric]
    grads: PyTree


class Program:
    """One task's compiled functions.

    Args:
        task: What they compute.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.strategy = strategy = task.strategy
        self._init = strategy.compile(task.init_state, inputs=("replicated", "split"), outputs="replicated")
        self._train = {keep: self._compile_train(keep) for keep in (False, True)}  # Compiled when called.
        self._train_group = {keep: self._compile_group(keep) for keep in (False, True)}
        self._eval = strategy.compile(
            task.eval_step,
            inputs=("replicated", "replicated", "replicated", "replicated", "split"),
            outputs=("replicated", "replicated", "split"),
            donate=(3,),
        )
        self._predict = strategy.compile(task.predict_step, inputs=("replicated", "replicated", "replicated", "replicated", "split"), outputs="split")
        self._structures: dict[bool, _Structure] = {}
        self._seen_shapes: dict[bool, set[str]] = {True: set(), False: set()}
        self._predicted_shapes: set[str] = set()
        self._compiled = {verb: CompiledShapes(verb) for verb in ("train on", "evaluate", "predict")}
        # Shared by all of them, because a collective of an evaluation can wait for one of a step.
        self._in_flight = _InFlight(strategy.max_in_flight)
        self.has_trained = False

    def _compile_train(self, keep_grads: bool) -> Any:
        def train_step(state: TrainState, sums: TrainSums, batch: Batch) -> Any:
            return self.task.train_step(state, sums, batch, keep_grads=keep_grads)

        outputs: tuple[Layout, ...] = ("replicated", "replicated", "replicated", "split", "replicated")
        return self.strategy.compile(train_step, inputs=("replicated", "replicated", "split"), outputs=outputs, donate=(0, 1))

    def _compile_group(self, keep_grads: bool) -> Any:
        def train_group(state: TrainState, sums: TrainSums, count: jax.Array, batches: Batch) -> Any:
            """Makes the first `count` of the steps in `batches`; any number is the same compiled loop, so that no rounding depends on where groups end."""

            def one(state: TrainState, sums: TrainSums, index: Any) -> Any:
                batch = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), batches)
                return self.task.train_step(state, sums, batch, keep_grads=keep_grads)

            def body(index: jax.Array, carry: Any) -> Any:
                (vectors, rows), (state, sums) = carry[3:], carry[:2]
                state, sums, vector, new_rows, grads = one(state, sums, index)
                put = functools.partial(lax.dynamic_update_index_in_dim, index=index, axis=0)
                return state, sums, (vector, grads), put(vectors, vector), jax.tree.map(put, rows, new_rows)

            size = batches.mask.shape[0]
            _, _, *shapes = jax.eval_shape(one, state, sums, jax.ShapeDtypeStruct((), jax.numpy.int32))
            vector, rows, grads = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), shapes)
            every = jax.tree.map(lambda leaf: jax.numpy.zeros((size, *leaf.shape), leaf.dtype), (vector, rows))
            state, sums, (vector, grads), vectors, rows = lax.fori_loop(0, count, body, (state, sums, (vector, grads), *every))
            return state, sums, (vector, vectors), rows, grads

        outputs: tuple[Layout, ...] = ("replicated", "replicated", "replicated", "split", "replicated")
        return self.strategy.compile(train_group, inputs=("replicated", "replicated", "replicated", "split"), outputs=outputs, donate=(0, 1))

    # -- preparation --

    def init(self, key: jax.Array, batch: Batch) -> TrainState:
        """Returns the state at step 0, replicated on the devices."""
        return cast(TrainState, self._init(self.strategy.put(key), self.strategy.feed(batch)))

    def abstract_state(self, key: jax.Array, batch: Batch) -> TrainState:
        """Returns the shapes of the state at step 0, computing nothing."""
        return cast(TrainState, jax.eval_shape(self._init, key, self.strategy.abstract_feed(batch)))

    def prepare(self, state: TrainState, batch: Batch, *, train: bool, is_single: bool = False) -> _Structure:
        """Dry-runs a step on shapes alone, once for batches of the same shapes, and returns what it finds.

        Args:
            state: The state.
            batch: The first batch of a call.
            train: Whether it is trained on.
            is_single: Whether it is the only one, so that what calls before had compiled is to be compared with.

        Raises:
            ModelError: The module fails, or a training step would change the structure of the state.
            LossError: The loss does not fit.
            MetricError: A metric does not fit.
        """
        if not is_single:
            self._compiled["train on" if train else "evaluate"].see(batch, warns=False)
        feed = self.strategy.abstract_feed(batch)
        shapes = str(feed)
        if train in self._structures and shapes in self._seen_shapes[train]:
            return self._structures[train]
        abstract = _abstract(state)
        structure = self._dry_run(abstract, feed, train)
        if train:
            jax.eval_shape(self._train[False], abstract, _abstract(self._train_sums(structure)), feed)
        self._seen_shapes[train].add(shapes)
        return self._structures.setdefault(train, structure)

    def _dry_run(self, state: TrainState, feed: Batch, train: bool) -> _Structure:
        order: list[str] = []
        given: dict[str, Any] = {}

        def metrics_of(state: TrainState, batch: Batch) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
            metrics = self.task.batch_metrics(state, batch, train=train, given=given)
            order[:] = metrics
            # Merging once gives the shapes that sums keep from then on; empty ones may begin as scalars.
            merged = {key: metric.empty().merge(metric) for key, metric in summed(metrics).items()}
            return metrics, merged, {key: _result(key, metric) for key, metric in merged.items()}

        compiled = self.strategy.compile(metrics_of, inputs=("replicated", "split"), outputs=("replicated",) * 3)
        abstract, merged, computed = jax.eval_shape(compiled, state, feed)
        begin = {key: given.get(key, metric).empty() for key, metric in abstract.items()}
        empty = {
            key: jax.tree.map(lambda want, have: np.array(np.broadcast_to(np.asarray(have, want.dtype), want.shape)), metric, begin[key])
            for key, metric in merged.items()
        }
        parts = getattr(abstract.get("loss"), "parts", {})
        scalar = any(getattr(part, "name", None) == SCALAR for part in parts.values())
        directions: dict[str, str | None] = {key: "min" if key == "loss" or key.endswith("_loss") else metric_direction(abstract[key]) for key in order}
        places, end = {}, NUM_STEP_VALUES if train else 0
        for key in sorted(computed):
            places[key] = Place(end, computed[key].shape)
            end = places[key].end
        shown = {key: places[key] for key in order if key in places}
        collected = {key: _without_rows(key, abstract[key]) for key in order if collects(abstract[key])}
        return _Structure(shown, end, empty, collected, directions, scalar)

    def structure(self, *, train: bool) -> _Structure:
        """Returns what the dry run found.

        Raises:
            NotReadyError: There was none yet.
        """
        if train not in self._structures:
            raise NotReadyError("No batch has been seen yet.")
        return self._structures[train]

    @staticmethod
    def _train_sums(structure: _Structure) -> TrainSums:
        return TrainSums(metrics=structure.empty, steps_since_bad=np.int32(-1))  # type: ignore[arg-type]

    def empty_train_sums(self) -> TrainSums:
        """Returns the sums of an epoch without batches, on the devices."""
        return cast(TrainSums, self.strategy.put(self._train_sums(self.structure(train=True))))

    def empty_eval_sums(self) -> EvalSums:
        """Returns the sums of an evaluation without batches, on the devices."""
        return cast(EvalSums, self.strategy.put(EvalSums(metrics=self.structure(train=False).empty, index=np.int32(0))))  # type: ignore[arg-type]

    def collector(self, *, train: bool) -> Collected | None:
        """Returns a place for the rows of an epoch or evaluation; `None` where no metric collects any."""
        collected = self.structure(train=train).collected
        return Collected(collected, self.strategy.join) if collected else None

    def output_shapes(self, state: TrainState, batch: Batch) -> PyTree:
        """Returns the shapes of the module's outputs for a replica's share of the batch, computing nothing.

        Raises:
            ModelError: The module fails.
        """
        order: list[str] = []

        def forward(state: TrainState, batch: Batch) -> PyTree:
            outputs = self.task.predict_step(state.params, state.model_state, state.key, jax.numpy.int32(0), batch.x)
            order[:] = outputs if isinstance(outputs, dict) else []
            return outputs

        compiled = self.strategy.compile(forward, inputs=("replicated", "split"), outputs="replicated")
        outputs = jax.eval_shape(compiled, _abstract(state), self.strategy.abstract_feed(batch))
        return {name: outputs[name] for name in order} if isinstance(outputs, dict) else outputs  # JAX sorts; this is the module's order.

    # -- running --

    def train_group(self, state: TrainState, sums: TrainSums, group: Sequence[FedBatch], size: int, *, keep_grads: bool = False) -> Trained:
        """Dispatches several updates in one call, at most `size`, for which it is compiled; `state` and `sums` are consumed."""
        structure = self._structures[True]
        for fed in group:
            _check_scalar(structure, fed)
        self._compiled["train on"].see(group[0].batch)
        self._in_flight.make_room()
        batches = self.strategy.feed_group([fed.batch for fed in group], size)
        state, sums, (vector, vectors), rows, grads = self._train_group[keep_grads](state, sums, np.int32(len(group)), batches)
        self.has_trained = True
        values = StepValues(structure.places, vector, group=(vectors, len(group)))
        self._in_flight.add(values)
        return Trained(state, sums, values, rows, grads)

    @staticmethod
    def group_size(fed: FedBatch) -> int:
        """Returns how many steps are worth trying in one call: 16, fewer where their batches would take more than 64 MB."""
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(fed.batch))
        return int(max(1, min(_GROUP_STEPS, _GROUP_BYTES // max(num_bytes, 1))))

    def time_steps(self, state: TrainState, fed: FedBatch, size: int) -> tuple[float, float]:
        """Returns the seconds that a step takes alone, and in a call of `size` steps, measured on copies of the state; the data's own time is in neither."""

        def seconds(call: Callable[[TrainState, TrainSums], Trained], steps: int) -> float:
            now, sums, calls = self.strategy.copy(state), self.empty_train_sums(), max(1, size // steps)

            def lap() -> float:
                nonlocal now, sums
                begin = time.perf_counter()
                for _ in range(calls):
                    now, sums, values, *_ = call(now, sums)
                values.wait()
                return (time.perf_counter() - begin) / (calls * steps)

            lap()  # Compiles.
            end, laps = time.perf_counter() + _TRIAL_SECONDS, [lap()]
            while len(laps) < _MAX_LAPS and time.perf_counter() < end:
                laps.append(lap())
            return min(laps)

        group = [fed] * size
        return seconds(lambda now, sums: self.train(now, sums, fed), 1), seconds(lambda now, sums: self.train_group(now, sums, group, size), size)

    def train(self, state: TrainState, sums: TrainSums, fed: FedBatch, *, keep_grads: bool = False) -> Trained:
        """Dispatches one update; `state` and `sums` are consumed."""
        structure = self._structures[True]
        _check_scalar(structure, fed)
        self._compiled["train on"].see(fed.batch)
        self._in_flight.make_room()
        state, sums, vector, rows, grads = self._train[keep_grads](state, sums, self.strategy.feed(fed.batch))
        self.has_trained = True
        values = StepValues(structure.places, vector)
        self._in_flight.add(values)
        return Trained(state, sums, values, rows, grads)

    def evaluate(self, state: TrainState, sums: EvalSums, fed: FedBatch) -> tuple[EvalSums, Values, dict[str, Metric]]:
        """Dispatches the evaluation of one batch, and returns sums, their values and the batch's rows; `sums` is consumed."""
        structure = self._structures[False]
        _check_scalar(structure, fed)
        self._compiled["evaluate"].see(fed.batch)
        self._in_flight.make_room()
        sums, vector, rows = self._eval(_in_use(state), state.model_state, state.key, sums, self.strategy.feed(fed.batch))
        values = Values(structure.places, vector)
        self._in_flight.add(values)
        return sums, values, rows

    def alone(self, values: Values, rows: dict[str, Metric], *, train: bool) -> dict[str, Any]:
        """Returns the metrics of a batch that is not part of an epoch or evaluation."""
        collector = self.collector(train=train)
        if collector is None:
            return values.metrics()
        collector.add(rows)
        return values.with_late(collector.keys, collector.now()).metrics()

    def predict(self, state: TrainState, batch: Batch, index: int) -> PyTree:
        """Dispatches the module on one batch and returns its outputs, on the devices.

        Raises:
            ModelError: The module fails, or an output has no leading axis of examples.
        """
        self._compiled["predict"].see(Batch(batch.x, (), batch.mask))
        feed = self.strategy.feed(batch)
        return self._predict(_in_use(state), state.model_state, state.key, np.int32(index), feed.x)

    def check_predict(self, state: TrainState, batch: Batch, *, is_single: bool = False) -> None:
        """Dry-runs prediction on shapes alone; arguments as of `prepare`.

        Raises:
            ModelError: The module fails, or an output has no leading axis of examples.
        """
        if not is_single:
            self._compiled["predict"].see(Batch(batch.x, (), batch.mask), warns=False)
        shapes = str(self.strategy.abstract_feed(batch).x)
        if shapes in self._predicted_shapes:
            return
        rows = len(batch.mask) // self.strategy.num_replicas
        outputs = self.output_shapes(state, batch)
        if any(not leaf.shape or leaf.shape[0] != rows for leaf in jax.tree.leaves(outputs)):
            raise ModelError(f"predict joins outputs along their first axis, the examples ({rows} here). The module returned {describe_shapes(outputs)}.")
        self._predicted_shapes.add(shapes)

    @property
    def loss_is_scalar(self) -> bool:
        """Whether the loss is known to be one number, which padding would falsify."""
        return any(structure.scalar_loss for structure in self._structures.values())

    @property
    def directions(self) -> Mapping[str, str | None]:
        """By log key of training, which direction is better."""
        return self._structures[True].directions if True in self._structures else {}


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
    if structure.scalar_loss and fed.num_real < len(fed.batch.mask):
        raise scalar_loss_error(fed.num_real, len(fed.batch.mask))


def scalar_loss_error(rows: int, size: int) -> LossError:
    """Returns the error for a loss that is one number, where a batch must be padded."""
    return LossError(
        f"The loss returns one number for a batch, but a batch of {rows} examples has to be padded to {size}, which would falsify it. Return one value per "
        "example, [batch] or [batch, ...]; or use drop_remainder=True, equal batches that the devices divide, or compile(pad=False)."
    )


def check_in_memory(program: Program, source: Source, state: TrainState, batch: Batch, *, pad: bool, train: bool) -> None:
    """Checks what can be known of in-memory data before the first step.

    Args:
        program: Knows the loss.
        source: The data.
        state: The state.
        batch: Its first batch.
        pad: Whether short batches are padded.
        train: Whether it is trained on.

    Raises:
        LossError: The loss is one number, and a batch would have to be padded.
        DataError: Labels lie outside of the module's classes.
    """
    if not isinstance(source, ArraySource) or source.batch_size is None or source.num_examples is None:
        return
    size = min(source.batch_size, source.num_examples)
    multiple = program.strategy.num_replicas * (program.task.numerics.accumulate_steps if train else 1)
    short = source.num_examples % size
    if program.structure(train=train).scalar_loss and pad and (short or size % multiple):
        raise scalar_loss_error(short or size, -(-size // multiple) * multiple)
    task = program.task
    if task.objective.has_label_loss and task.compute_loss is None and task.custom_step is None:
        task.objective.check_labels(program.output_shapes(state, batch), source.y, source.weights)


def _in_use(state: TrainState) -> PyTree:
    """Returns the parameters that are evaluated: the averaged ones where there are any."""
    return state.params if state.ema_params is None else state.ema_params


def _abstract(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
