"""The program of a task, as loops use it: prepares, checks and dispatches steps on the devices. It does not hold the state.

Before the first step on batches of new shapes, a dry run finds mistakes and costs, and the step is compiled in a thread. If jit is disabled, nothing is
compiled ahead, and every call takes one batch.
"""

import itertools
import math
import mmap
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from fitflax.data import FedBatch, Source
from fitflax.data.arrays import ArraySource
from fitflax.data.batch import Triple, in_one_piece, leaf_paths
from fitflax.data.padding import Batcher
from fitflax.errors import LossError, ModelError, warn
from fitflax.leaves import describe_shapes, listed
from fitflax.logs import StepValues, Values
from fitflax.metrics import Metric
from fitflax.parallel.strategy import jit_is_disabled
from fitflax.state import Batch, PyTree, TrainState, shapes_in, shapes_key
from fitflax.steps.compile import Compilation, CompiledSteps, InitialState, train_kind, trim_heap
from fitflax.steps.live_state import Carry, EvalParams, Sums
from fitflax.steps.outputs import NOTHING, Collected, EvalSums, Keep, Kept, Returned, TrainSums
from fitflax.steps.shapes import CompiledShapes, Cost, DryRun, TracedStep
from fitflax.steps.train_step import Task

PASSES = 3
"""Passes of a training step: forward, and backward to the activations and to the parameters."""

# Limits of a call of several batches.
_GROUP_STEPS = 16
_GROUP_BYTES = 2**26

# An evaluation of a batch with at most this many floating-point operations, and bytes that it reads and writes, takes about two milliseconds on a CPU core,
# 20 times the overhead of a call, or less than one millisecond on a GPU.
_CHEAP = 2e7
_CHEAP_ON_ACCELERATORS = 5e9

# Limits of the measurement of each variant in `time_steps`.
_TRIAL_SECONDS = 0.25
_MAX_LAPS = 10

# Above this size of the state, memory left over from compilation matters.
_LARGE_BYTES = 2**26

# Checking the values of this much of an array takes less than half a second.
_CHECKED_BYTES = 2**30


class Trained(NamedTuple):
    """Results of a dispatched call, all still on the devices."""

    state: Carry  # The state after the call.
    sums: Sums  # Packed sums of the epoch.
    values: StepValues
    rows: dict[str, Metric]  # Rows that metrics collect, by log key.
    kept: Kept


class Program:
    """Dispatches the steps of a task.

    `run_eagerly` disables jit in its steps, regardless of JAX's setting. `eval_params` returns the parameters for evaluation, given the optimizer state and
    the parameters; `None` if they are the same.
    """

    def __init__(self, task: Task, *, run_eagerly: bool = False, eval_params: Callable[[PyTree, PyTree], PyTree] | None = None) -> None:
        self.task, self.strategy = task, task.strategy
        self.runs_eagerly = run_eagerly
        self.dry_run = DryRun(task, lambda: self.is_eager)
        self._steps = CompiledSteps(task, lambda train: self.dry_run.traced_step(train=train).form)
        self.initial_state = InitialState(task, self._steps, lambda: self.is_eager)
        self.preparation = Preparation(task, self._steps, self.dry_run, lambda: self.is_eager)
        self.eval_params = EvalParams(task.strategy, eval_params, task.map_members, is_scaled=task.numerics.is_scaled)
        # Shared by all programs on the devices, because a collective of an evaluation can wait for one of a step.
        self._in_flight = self.strategy.in_flight

    @property
    def is_eager(self) -> bool:
        """Whether the next call runs without jit."""
        return self.runs_eagerly or jit_is_disabled()

    @property
    def seconds_waited(self) -> float:
        """Seconds that callers have waited for compilation."""
        return self._steps.seconds_waited

    def _function(self, kind: str, carry: Carry, *, keep: Keep = NOTHING) -> Callable[..., Any]:
        function = self._steps.get(kind, carry, keep=keep)
        return jax.disable_jit()(function) if self.runs_eagerly else function

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

    def single_batch_metrics(self, values: Values, rows: dict[str, Metric], *, train: bool) -> dict[str, Any]:
        """Returns the metrics of a batch outside an epoch or evaluation."""
        collector = self.collector(train=train)
        if collector is None:
            return values.metrics()
        collector.add(rows)
        return values.with_late(collector.keys, collector.now()).metrics()

    # -- steps --

    def train(self, carry: Carry, sums: Sums, fed: FedBatch, *, keep: Keep = NOTHING) -> Trained:
        """Dispatches one step; consumes `carry` and `sums`."""
        return self.train_group(carry, sums, [fed], 1, keep=keep)

    def train_group(self, carry: Carry, sums: Sums, group: Sequence[FedBatch], size: int, *, keep: Keep = NOTHING) -> Trained:
        """Dispatches several steps in a call that is compiled for at most `size` steps; consumes `carry` and `sums`."""
        traced = self._admit("train on", group, (carry.leaves, sums), train=True)
        function = self._function(train_kind(self.strategy, len(group), size), carry, keep=keep)
        leaves, sums, vector, rows, *parts = function(carry.leaves, carry.key, sums, *self._fed(group, size))
        kept = Kept(*parts)
        values = StepValues(traced.places, vector, suspects=kept.suspects.names)
        self._in_flight.add(values, len(group) * group[0].batch.nbytes)
        return Trained(Carry(leaves, carry.treedef, carry.key), sums, values, rows, kept)

    def _admit(self, verb: str, group: Sequence[FedBatch], before: PyTree, *, train: bool) -> TracedStep:
        """Checks batches, and waits until a step may be dispatched. If a step has failed, and the results of earlier ones, `before`, depend on it, raises."""
        traced = self.dry_run.traced_step(train=train)
        if traced.scalar_loss:
            for fed in group:
                if fed.num_real < fed.num_rows:
                    raise _scalar_loss_error(fed.num_real, fed.num_rows)
        self.preparation.check_shapes(verb, group[0])
        if not self._in_flight.make_room(traced):
            jax.block_until_ready(before)
        return traced

    def _fed(self, group: Sequence[FedBatch], size: int) -> tuple[Any, ...]:
        """Returns the last arguments of a call that is compiled for `size` batches: a batch, or the number of batches and all of them."""
        if size == 1:
            return (self.strategy.feed(group[0].batch),)
        return self.strategy.number(len(group)), self.strategy.feed_group([fed.batch for fed in group], size, in_one_piece(group))

    def eval_carry(self, state: TrainState) -> Carry:
        """Returns the carry of `(params, model_state)` for evaluation."""
        return Carry(*jax.tree.flatten((self.eval_params(state), state.model_state)), state.key)

    def evaluate(self, carry: Carry, sums: Sums, group: Sequence[FedBatch], size: int = 1) -> tuple[Sums, Values, dict[str, Metric]]:
        """Dispatches the evaluation of batches, and returns sums, their values and the batches' rows; consumes `sums`.

        `carry` is from `eval_carry`. The call is compiled for `size` batches: 1, or the result of `preparation.group_for`, which adds a leading axis to rows.
        """
        traced = self._admit("evaluate", group, (carry.leaves, sums), train=False)
        function = self._function("evaluate" if size == 1 else "evaluate group", carry)
        sums, vector, rows = function(carry.leaves, carry.key, sums, *self._fed(group, size))
        values = Values(traced.places, vector)
        self._in_flight.add(values, len(group) * group[0].batch.nbytes)
        return sums, values, rows

    def predict(self, carry: Carry, group: Sequence[FedBatch], index: int, size: int = 1) -> Returned:
        """Dispatches the module on batches, the first of which is number `index`, and returns its outputs on the devices.

        `carry` is from `eval_carry`. The call is compiled for `size` batches: 1, or the result of `preparation.group_for`, which adds a leading axis to the
        outputs.
        """
        self.preparation.check_shapes("predict", group[0])
        *count, batch = self._fed(group, size)
        function = self._function("predict" if size == 1 else "predict group", carry)
        outputs = cast(Returned, function(carry.leaves, carry.key, self.strategy.number(index), *count, batch.x))
        if self.is_eager:
            replicas, rows = self.strategy.num_replicas, len(group[0].batch.mask)
            _check_rows(outputs, (rows,) if replicas == 1 else (replicas, rows // replicas), is_counted=group[0].is_counted)
        return outputs

    # -- several steps per call --

    @staticmethod
    def limit_steps_per_call(steps: int | None, batch: Batch) -> int:
        """Returns the number of steps in a call: `steps`, by default 16, or fewer if their batches, of this process, would take more than 64 MB."""
        return _max_group_size(batch.nbytes, steps or _GROUP_STEPS)

    def time_steps(self, state: TrainState, fed: FedBatch, size: int, keep: Keep) -> tuple[float, float]:
        """Returns the seconds per step alone and in a call of `size` steps, measured on copies of the state, without reading data."""

        def seconds(group: Sequence[FedBatch]) -> float:
            now, sums, calls = Carry.of(self.strategy.copy(state)), self.empty_sums(train=True), size // len(group)

            def lap() -> float:
                nonlocal now, sums
                begin = time.perf_counter()
                for _ in range(calls):
                    now, sums, values, *_ = self.train_group(now, sums, group, len(group), keep=keep)
                values.wait()
                return (time.perf_counter() - begin) / size

            lap()  # Compiles.
            end, laps = time.perf_counter() + _TRIAL_SECONDS, [lap()]
            if self.strategy.num_processes > 1:
                return min(*laps, lap(), lap())  # All processes must run the same number of steps, so the clock must not decide.
            while len(laps) < _MAX_LAPS and time.perf_counter() < end:
                laps.append(lap())
            return min(laps)

        return seconds([fed]), seconds([fed] * size)

    def await_step(self, carry: Carry, *, steps_per_call: int, keep: Keep = NOTHING) -> None:
        """Waits for a training step that is compiled ahead."""
        self._steps.get(train_kind(self.strategy, steps_per_call, steps_per_call), carry, keep=keep)
        if sum(leaf.nbytes for leaf in carry.leaves) > _LARGE_BYTES:
            trim_heap()  # The first step's activations need the memory.


class Preparation:
    """Dry-runs and compiles the steps of a task. Remembers what was prepared, checked and reported, and what it costs."""

    def __init__(self, task: Task, steps: CompiledSteps, dry_run: DryRun, is_eager: Callable[[], bool]) -> None:
        self._task, self._strategy = task, task.strategy
        self._steps, self._dry_run, self._is_eager = steps, dry_run, is_eager
        # Batches per call of dry-run evaluations and predictions, by kind, `shapes_key`, and whether the batch is a single one.
        self._group_sizes: dict[tuple[str, Any, bool], int] = {}
        self._costs: dict[Any, Cost] = {}  # Of the forward pass, by shapes of a training batch.
        # Training compilations by shapes, steps per call and what is kept; and the key of the last one prepared.
        self._compilations: dict[tuple[Any, int, Keep], Compilation] = {}
        self._prepared: tuple[Any, int, Keep] | None = None
        self._compiled = {verb: CompiledShapes(verb) for verb in ("train on", "evaluate", "predict")}
        self._is_eval_model_checked = not task.model.has_eval_model
        self._is_eval_model_for_other_inputs = False  # Whether it could not be initialized on a batch, so that `predict` has to check it.
        self._reported: set[str] = set()  # See `is_new`.
        self.checked_arrays: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()  # By identity.

    def train(self, state: TrainState, batch: Batch, *, is_single: bool = False, steps_per_call: int = 1, keep: Keep = NOTHING) -> None:
        """Dry-runs a training step, once for batches of the same shapes, and begins to compile it.

        With `is_single`, the batch is the only one of its call, so its shapes are compared with those of earlier calls.
        """
        self.check_eval_model(state, batch, is_called=False)
        if self._is_eager():
            self._dry_run.step_eagerly(state, self._strategy.feed(batch), train=True)
            return
        feed = self._begin_call("train on", batch, is_single)
        shapes = shapes_key(feed)
        prepared = shapes, steps_per_call, keep
        if prepared not in self._compilations:
            self._costs[shapes] = self._dry_run.step(state, feed, train=True)
            kind = train_kind(self._strategy, steps_per_call, steps_per_call)
            self._compilations[prepared] = self._compile(kind, Carry.of(state), batch, steps_per_call, train=True, keep=keep)
        self._prepared = prepared

    def evaluate(self, state: TrainState, batch: Batch, *, is_single: bool = False) -> None:
        """Dry-runs an evaluation and begins to compile it; arguments and errors as in `train`."""
        self.check_eval_model(state, batch, is_called=self._task.compute_loss is None)
        if self._is_eager():
            self._dry_run.step_eagerly(state, self._strategy.feed(batch), train=False)
            self._warn_of_mode()
            return
        feed = self._begin_call("evaluate", batch, is_single)
        seen = "evaluate", shapes_key(feed), is_single
        if seen not in self._group_sizes:
            cost = self._dry_run.step(state, feed, train=False)
            size = 1 if is_single else self._choose_group_size(cost, batch)
            self._warn_of_mode()
            # A function that returns the parameters to evaluate keeps shapes and dtypes; averages may have other dtypes.
            params = state.params if state.ema_params is None else state.ema_params
            carry = Carry(*jax.tree.flatten((params, state.model_state)), state.key)
            self._compile("evaluate" if size == 1 else "evaluate group", carry, batch, size, train=False)
            self._group_sizes[seen] = size

    def predict(self, state: TrainState, batch: Batch, *, is_single: bool = False, is_counted: bool = True) -> None:
        """Dry-runs prediction; arguments as in `train`, and `is_counted` for whether the number of examples is known."""
        self.check_eval_model(state, batch)
        if self._is_eager():
            self._warn_of_mode()
            return
        feed = self._begin_call("predict", batch, is_single)
        seen = "predict", shapes_key(feed.x), is_single
        if seen not in self._group_sizes:
            outputs, cost, _ = self._dry_run.outputs(state, batch, train=False)
            _check_rows(outputs, (self._strategy.rows_of(batch) // self._strategy.num_replicas,), is_counted=is_counted)
            self._warn_of_mode()
            every = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((len(batch.mask), *leaf.shape[1:]), leaf.dtype), outputs)
            self._group_sizes[seen] = 1 if is_single else self._choose_group_size(cost, batch, every)

    def _begin_call(self, verb: str, batch: Batch, is_single: bool) -> Batch:
        """Records the shapes of the first batch of a call, and returns its shapes on the devices."""
        used = _used(verb, batch)
        if not is_single:
            self._compiled[verb].check(used, warns=False)
        return self._shapes_of(used)

    def _shapes_of(self, batch: Batch) -> Batch:
        return cast(Batch, shapes_in(self._strategy.abstract_feed(batch)))

    def check_eval_model(self, state: TrainState, batch: Batch, *, is_called: bool = True) -> None:
        """Checks once that a model for evaluation has the parameters of the one that is trained; raises `ModelError` otherwise.

        Without `is_called`, the model may be called on other inputs than those of the batch. If it cannot be initialized on them, it is checked later.
        """
        if self._is_eval_model_checked or (not is_called and self._is_eval_model_for_other_inputs):
            return
        try:
            eval_params = self._dry_run.eval_params(state, batch)
        except ModelError:
            if is_called:
                raise
            self._is_eval_model_for_other_inputs = True
            return
        self._task.model.check_eval_params(state.params, eval_params)
        self._is_eval_model_checked = True

    def _warn_of_mode(self) -> None:
        """Warns once about a module that seems to be evaluated in training mode."""
        if self.is_new("mode") and (fault := self._task.model.mode_fault) is not None:
            warn(fault)

    def _compile(self, kind: str, carry: Carry, batch: Batch, size: int, *, train: bool, keep: Keep = NOTHING) -> Compilation:
        """Traces a step that takes `size` batches, which finds errors, and begins to compile it in a thread."""
        traced, put = self._dry_run.traced_step(train=train), self._strategy.abstract_put
        arguments = put(carry.leaves), put(carry.key), put(traced.form.pack(traced.empty))
        batches = (self._strategy.abstract_feed(batch),) if size == 1 else (np.int32(size), self._strategy.abstract_feed(batch, size))
        return self._steps.begin(kind, carry, *arguments, *batches, keep=keep)

    def _choose_group_size(self, cost: Cost, batch: Batch, outputs: PyTree = ()) -> int:
        """Returns how many batches to evaluate or predict in one call: several if the overhead of a call exceeds its computation."""
        on_host = self._strategy.is_on_host
        # Inside a loop, XLA computes convolutions on one core.
        if max(cost.flops, cost.bytes_accessed) > (_CHEAP if on_host else _CHEAP_ON_ACCELERATORS) or (on_host and cost.has_convolution):
            return 1
        return _max_group_size(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((batch, outputs))))

    def group_for(self, kind: str, batch: Batch) -> int:
        """Returns the number of batches like this one in a call of `"evaluate"` or `"predict"`."""
        if self._is_eager():
            return 1
        feed = self._shapes_of(batch)
        return self._group_sizes[kind, shapes_key(feed if kind == "evaluate" else feed.x), False]

    def is_new(self, question: str) -> bool:
        """Returns whether this is called with `question` for the first time, so that each warning is given once per program."""
        is_new = question not in self._reported
        self._reported.add(question)
        return is_new

    def check_shapes(self, verb: str, fed: FedBatch) -> None:
        """Warns if the step is compiled again because the batch has new shapes."""
        if fed.number == 0 and not self._is_eager():  # Other batches are in the same block as one that was checked.
            self._compiled[verb].check(_used(verb, fed.batch))

    @property
    def model_flops(self) -> float | None:
        """Floating-point operations of the model for the last prepared training step on one device; `None` if not known.

        These are matrix products and convolutions of the forward pass, and twice as many for the backward pass (Chowdhery et al., "PaLM", 2022,
        appendix B); recomputation does not count. For a custom step, they are those of the step.
        """
        if self._prepared is None:
            return None
        flops = self._costs[self._prepared[0]].matrix_flops
        passes = 1 if self._task.custom_step is not None else PASSES * self._task.numerics.accumulate_steps
        return flops * passes if math.isfinite(flops) else None

    def forward_flops(self, state: TrainState, batch: Batch) -> float | None:
        """Returns the same for a forward pass over one example, from the shapes of a batch; `None` if not known."""
        flops = self._dry_run.usual_outputs(state, batch).cost.matrix_flops
        return flops * self._strategy.num_replicas * self._strategy.num_partitions / self._strategy.rows_of(batch) if math.isfinite(flops) else None

    def memory(self) -> Any:
        """Returns JAX's memory analysis of the last prepared training step on a device; `None` if none was compiled ahead."""
        compilation = None if self._prepared is None else self._compilations.get(self._prepared)
        return None if compilation is None else compilation.memory()


def _used(verb: str, batch: Batch) -> Batch:
    """Returns the part of a batch that a step uses."""
    return batch if verb != "predict" else Batch(batch.x, (), batch.mask)


def _check_rows(outputs: PyTree, rows: tuple[int, ...], *, is_counted: bool) -> None:
    """Raises `ModelError` if outputs do not begin with the axes `rows`; the number of examples matters only if it `is_counted`."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(outputs)]
    if any(shape[: len(rows)] != rows if is_counted else len(shape) < len(rows) for shape in shapes):
        raise ModelError(
            f"predict concatenates outputs along their first axis, which must be the examples, {rows[-1]} here. Received: {describe_shapes(outputs)}."
        )


def _max_group_size(num_bytes: int, most: int = _GROUP_STEPS) -> int:
    """Returns the number of steps in a call, given the bytes of one: `most`, or fewer if they would take more than 64 MB."""
    return int(max(1, min(most, _GROUP_BYTES // max(num_bytes, 1))))


def _scalar_loss_error(rows: int, size: int) -> LossError:
    """Returns the error for a scalar loss if a batch must be padded."""
    return LossError(
        f"The loss returns one number for a batch, but a batch of {rows} examples must be padded to {size}, which would make it wrong. Return one value per "
        "example, [batch] or [batch, ...]. Or use drop_remainder=True, a batch size that is divisible by the number of devices, or compile(pad=False)."
    )


# -- checks of a module, its loss and its data; each warning is given once per program --


def check_activations(program: Program, state: TrainState, batch: Batch) -> None:
    """Warns if the module ends with an activation that the loss applies itself."""
    objective = program.task.objective
    if objective.takes_logits and program.task.uses_compiled_loss and not program.is_eager and program.preparation.is_new("activations"):
        for fault in dict.fromkeys(itertools.chain.from_iterable(map(objective.activation_faults, program.dry_run.activations(state, batch)))):
            warn(f"{fault}.")


def check_places(program: Program, state: TrainState) -> None:
    """Warns about axes that the mesh lacks, and about large parameters and batches that each device holds whole."""
    if not program.preparation.is_new("places"):
        return
    if missing := program.strategy.missing_axes(state):
        described = "; ".join(f"{axis!r} ({listed(paths)})" for axis, paths in missing.items())
        warn(
            f"nn.with_partitioning names axes that the mesh does not have, so they are not split: {described}. "
            "To split them, pass a mesh with these axes, such as Trainer(parallel=Sharded({'data': -1, 'model': 2}))."
        )
    if (whole := program.strategy.describe_whole(state)) is not None:
        warn(whole)


def check_measures(program: Program, name: str) -> None:
    """Warns if an evaluation, called `name`, has nothing to compute."""
    if not program.dry_run.traced_step(train=False).kinds and program.preparation.is_new("measures"):
        warn(f"There is nothing to compute for {name!r}, because no loss and no metrics are compiled. Pass them: compile(optimizer, loss, metrics).")


def check_total_weight(program: Program, name: str, values: Values) -> None:
    """Warns if the examples of `name` have a total weight of 0. Reads the values."""
    keys = values.undefined
    if keys and program.preparation.is_new(f"weight of {name}"):
        warn(f"The weights of all examples of {name!r} are 0, so weighted values such as {keys[0]!r} are NaN. Check sample_weight and class_weight.")


def check_in_memory(program: Program, source: Source, state: TrainState, batch: Batch, *, pad: bool, train: bool, batcher: Batcher | None = None) -> None:
    """Checks in-memory data, given its first batch, before the first step, and warns about NaN and infinity. `batcher` applies class weights."""
    if not isinstance(source, ArraySource) or source.batch_size is None or source.num_examples is None:
        return
    task, size = program.task, min(source.batch_size, source.num_examples)
    shards = program.strategy.num_batch_shards // (1 if source.shares is None else source.shares.num_parts)
    multiple = shards * (task.numerics.accumulate_steps if train else 1)
    short = source.num_examples % size
    if program.dry_run.traced_step(train=train).scalar_loss and pad and (short or size % multiple):
        raise _scalar_loss_error(short or size, -(-size // multiple) * multiple)
    checked = program.preparation.checked_arrays
    for name, tree in (("x", source.x), ("y", source.y), ("sample_weight", source.weights)):
        for path, leaf in leaf_paths(tree, name):
            if checked.get(id(leaf)) is not leaf:
                checked[id(leaf)] = leaf
                _warn_of_bad_numbers(path, leaf)
    leaves = jax.tree.leaves((source.y, source.weights))
    together = tuple(map(id, leaves))  # Arrays are checked together, because labels of weight 0 are not checked.
    is_checked = not train and all(checked.get((id(leaf), together)) is leaf for leaf in leaves)
    if task.uses_compiled_loss and task.objective.has_labels_to_check and not is_checked:
        outputs = program.dry_run.step_outputs(state, batch, train=train)
        targets = jax.tree.map(lambda leaf: leaf[: _rows_to_check(leaf)], source.y)
        rows = max(map(len, jax.tree.leaves(targets)), default=0)
        weights = jax.tree.map(lambda leaf: leaf[:rows], source.weights)
        if batcher is not None:
            weights = batcher.apply_class_weight(Triple(source.x, targets, weights)).weights
        task.objective.check_labels(outputs.shapes, targets, weights)
        if not train:  # In training, weights also depend on the class weights of `fit`.
            checked.update({(id(leaf), together): leaf for leaf in leaves})


def _rows_to_check(leaf: Any) -> int:
    """Returns the number of first rows of an array whose values are checked; 0 for a file mapped into memory, which is read only when it is needed."""
    base = leaf
    while isinstance(base, np.ndarray):  # A view of a view has the first view as its base. Copies of an `np.memmap` have its type, but are in memory.
        base = base.base
    if isinstance(base, mmap.mmap):
        return 0
    return max(1, int(_CHECKED_BYTES // max(leaf.nbytes / max(len(leaf), 1), 1)))


def _warn_of_bad_numbers(path: str, leaf: Any) -> None:
    """Warns about NaN and infinity in the first rows of an array; reads it twice if there are none."""
    part = leaf[: _rows_to_check(leaf)]
    if not np.issubdtype(part.dtype, np.floating) or not part.size or np.isfinite([part.min(), part.max()]).all():
        return
    bad = int((~np.isfinite(part.reshape(len(part), -1)).all(axis=1)).sum())
    warn(
        f"{path} has NaN or infinity in {bad} of {len(part)} examples. Unless the module handles them, a single one makes all parameters NaN. "
        "Clean or remove these examples."
    )
