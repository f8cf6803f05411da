"""Dry runs of steps, which compute and compile nothing, and shapes of batches that cause recompilation.

A dry run finds what steps need besides state and batch (empty sums, the order of log keys, costs), and reports mistakes. If jit is disabled, the module
may need values, so the dry run computes the first batch. Costs and last activations are read from a jaxpr.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.extend import core

from fitflax.data.batch import has_rows, leaf_paths
from fitflax.errors import MetricError, ModelError, NotReadyError, is_of_debugger, warn
from fitflax.leaves import describe_shapes, listed
from fitflax.logs import NUM_STEP_VALUES, Kind, Place, default_direction
from fitflax.metrics import Metric
from fitflax.metrics.base import metric_direction
from fitflax.parallel.placement import Form
from fitflax.parallel.strategy import Layout
from fitflax.state import Batch, PyTree, TrainState, shapes_in, shapes_key
from fitflax.steps.compile import without_full_collections
from fitflax.steps.gradients import SCALAR, Notes
from fitflax.steps.outputs import EvalSums, Returned, TrainSums, collects, computed, summed
from fitflax.steps.train_step import Task


class Cost(NamedTuple):
    """Cost of one call of a function; infinite if it contains a loop of unknown length or a kernel that is not written in JAX."""

    flops: float  # Floating-point operations: two for each multiply-add of matrix products and convolutions, one for each element of other results.
    bytes_accessed: float  # Bytes that all operations read and write without fusion.
    has_convolution: bool
    matrix_flops: float  # Floating-point operations of matrix products and convolutions only.

    def __add__(self, other: Any) -> "Cost":
        flops, accessed = self.flops + other.flops, self.bytes_accessed + other.bytes_accessed
        return Cost(flops, accessed, self.has_convolution or other.has_convolution, self.matrix_flops + other.matrix_flops)

    def times(self, count: float) -> "Cost":
        """Returns the cost of `count` calls, which may be a fraction."""
        return Cost(self.flops * count, self.bytes_accessed * count, self.has_convolution, self.matrix_flops * count)


_NOTHING = Cost(0.0, 0.0, False, 0.0)
_UNKNOWN = Cost(math.inf, math.inf, False, math.inf)

# Larger sums are not packed, because packing copies them at every step.
_MAX_PACKED_SIZE = 4096

_STEP_INPUTS: tuple[Layout, ...] = ("replicated", "split")


class TracedStep(NamedTuple):
    """Results of the dry run of a step."""

    # Place of each log key in the vector of values, in the order in which keys are shown; `None` for metrics that are computed on the host.
    places: dict[str, Place | None]
    num_values: int  # Length of that vector.
    empty: Any  # Empty `TrainSums` or `EvalSums`, as NumPy arrays of their final shapes.
    form: Form  # How these sums are packed between calls.
    collected: dict[str, Metric]  # Empty metrics whose rows are collected on the host.
    kinds: Mapping[str, Kind]  # Kinds of the metrics by log key.
    scalar_loss: bool  # Whether the loss is a scalar, which padding would falsify.


class TracedOutputs(NamedTuple):
    """Results of tracing the module alone."""

    shapes: PyTree  # Shapes of its outputs by name.
    cost: Cost  # Cost of computing them on a device.
    activations: PyTree  # Last activation of each output, by name; `None` if not known.


class DryRun:
    """Evaluates a task's steps on shapes, and keeps the results. `is_eager` returns whether jit is disabled, so that nothing may be traced."""

    def __init__(self, task: Task, is_eager: Callable[[], bool]) -> None:
        self._task, self._strategy, self.is_eager = task, task.strategy, is_eager
        self._steps: dict[bool, TracedStep] = {}
        self._outputs: dict[tuple[Any, bool], TracedOutputs] = {}
        self._seen_outputs: dict[bool, TracedOutputs] = {}  # Those that the dry runs of steps found, by mode.

    def traced_step(self, *, train: bool) -> TracedStep:
        """Returns the results of the dry run; raises `NotReadyError` if there was none."""
        if train not in self._steps:
            raise NotReadyError("No batch has been seen yet.")
        return self._steps[train]

    @property
    def loss_is_scalar(self) -> bool:
        """Whether the loss is known to be a scalar, which padding would falsify."""
        return any(traced.scalar_loss for traced in self._steps.values())

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """Kinds of the training metrics by log key."""
        return self._steps[True].kinds if True in self._steps else {}

    @property
    def has_evaluated(self) -> bool:
        """Whether an evaluation has had a dry run."""
        return False in self._steps

    @property
    def eval_kinds(self) -> Mapping[str, Kind]:
        """Kinds of the metrics of evaluations by key; those of training before the first dry run of an evaluation."""
        return self._steps[False].kinds if self.has_evaluated else self.kinds

    def step_outputs(self, state: TrainState, batch: Batch, *, train: bool) -> TracedOutputs:
        """Returns the outputs that the dry run of a step found, for one replica's rows of its batch; without costs."""
        return self._seen_outputs.get(train) or self.usual_outputs(state, batch)

    def activations(self, state: TrainState, batch: Batch) -> list[PyTree]:
        """Returns the last activation of each output, by name, in each mode whose step had a dry run.

        If no dry run shows them, it traces the module in one mode.
        """
        seen = [outputs.activations for outputs in self._seen_outputs.values() if outputs.activations is not None]
        return seen or [self.usual_outputs(state, batch).activations]

    def usual_outputs(self, state: TrainState, batch: Batch) -> TracedOutputs:
        """Returns `outputs` for evaluation, which later calls need as well; for training if the module cannot be evaluated.

        If jit is disabled, nothing is traced: it returns the outputs that a dry run found, for the shapes of its batch.
        """
        if self.is_eager() and self._seen_outputs:
            return self._seen_outputs.get(False) or self._seen_outputs[True]
        try:
            return self.outputs(state, batch, train=False)
        except ModelError:
            return self.outputs(state, batch, train=True)

    def eval_params(self, state: TrainState, batch: Batch) -> PyTree:
        """Returns the initial parameters of the model to evaluate, or their shapes; arrays only if jit is disabled. Raises a `ModelError` if it fails."""
        init = self._strategy.trace(self._task.init_eval_params, inputs=_STEP_INPUTS)
        if self.is_eager():
            batch = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, batch)
            with jax.disable_jit():
                return init(state.key, self._strategy.feed(batch))
        return jax.eval_shape(init, shapes_in(state.key), self._strategy.abstract_feed(batch))

    @without_full_collections()
    def step(self, state: TrainState, feed: Batch, *, train: bool) -> Cost:
        """Dry-runs a training or evaluation step on shapes, keeps the results of the first one, and returns the cost of its forward pass on a device."""
        notes = Notes(keeps_returned=True)
        jaxpr, (*results, returned) = jax.make_jaxpr(self._metrics_of(train, notes), return_shape=True)(shapes_in(state), feed)
        self._record(train, notes, *results, activations=None if returned is None else _activations_of(jaxpr, returned))
        return self._cost_of(jaxpr)

    def step_eagerly(self, state: TrainState, feed: Batch, *, train: bool) -> None:
        """Does the same as `step` by computing a batch without tracing it; only once, because later shapes do not matter. Arguments and errors as in `step`."""
        if train not in self._steps:
            notes = Notes()
            with jax.disable_jit():
                *results, _ = self._metrics_of(train, notes)(state, feed)
            self._record(train, notes, *results, activations=None)

    def _metrics_of(self, train: bool, notes: Notes) -> Callable[[TrainState, Batch], Any]:
        """Returns a function that returns a batch's metrics, their sums, their values, and the module's outputs if they are known, and fills `notes`."""

        def metrics_of(state: TrainState, batch: Batch) -> Any:
            metrics = self._task.batch_metrics(state, batch, train=train, notes=notes)
            notes.order[:] = metrics
            # Merging once gives the final shapes of sums; empty ones may be scalars.
            merged = {key: metric.empty().merge(metric) for key, metric in summed(metrics).items()}
            returned, notes.returned = notes.returned, None
            return metrics, merged, {key: _compute(key, metric) for key, metric in merged.items()}, returned

        return self._strategy.trace(metrics_of, inputs=_STEP_INPUTS)

    def _record(self, train: bool, notes: Notes, abstract: dict[str, Any], merged: dict[str, Any], computed: dict[str, Any], *, activations: PyTree) -> None:
        def whole(want: Any, have: Any) -> Any:
            return np.array(np.broadcast_to(np.asarray(have, want.dtype), want.shape))

        empty = {key: jax.tree.map(whole, metric, notes.compiled_metrics.get(key, abstract[key]).empty()) for key, metric in merged.items()}
        sums: Any = TrainSums(empty, np.int32(-1), np.int32(-1)) if train else EvalSums(metrics=empty, index=np.int32(0))  # type: ignore[arg-type]
        places: dict[str, Place] = {}
        end = NUM_STEP_VALUES if train else 0
        for key in sorted(computed):
            places[key] = Place(end, computed[key].shape)
            end = places[key].end
        shown = {key: places.get(key) for key in notes.order}
        collected = {key: _empty_rows(key, abstract[key]) for key in notes.order if collects(abstract[key])}
        kinds = {key: _kind(key, abstract[key]) for key in notes.order}
        scalar = any(getattr(part, "name", None) == SCALAR for part in getattr(abstract.get("loss"), "parts", {}).values())
        self._steps.setdefault(train, TracedStep(shown, end, sums, Form.of(sums, _MAX_PACKED_SIZE), collected, kinds, scalar))
        self._seen_outputs.setdefault(train, TracedOutputs(notes.outputs, _UNKNOWN, activations))

    def _cost_of(self, jaxpr: Any) -> Cost:
        return cost_of(jaxpr).times(1 / self._strategy.num_partitions)

    def outputs(self, state: TrainState, batch: Batch, *, train: bool) -> TracedOutputs:
        """Returns the results of tracing the module on one replica's rows of a batch, cached by the shapes of its inputs."""
        feed = self._strategy.abstract_feed(batch)
        if (seen := (shapes_key(feed.x), train)) not in self._outputs:
            self._outputs[seen] = self._trace_outputs(state, feed, train)
        return self._outputs[seen]

    @without_full_collections()
    def _trace_outputs(self, state: TrainState, feed: Batch, train: bool) -> TracedOutputs:
        def forward(state: TrainState, batch: Batch) -> Returned:
            return Returned.of(self._task.outputs(state.params, state.model_state, state.key, batch.x, train=train))

        traced = self._strategy.trace(forward, inputs=_STEP_INPUTS)
        jaxpr, outputs = jax.make_jaxpr(traced, return_shape=True)(shapes_in(state), feed)
        return TracedOutputs(outputs.by_name(), self._cost_of(jaxpr), _activations_of(jaxpr, outputs))


def _activations_of(jaxpr: Any, outputs: Returned) -> PyTree:
    """Returns the last activation of each output, by name; a traced function returns the outputs last."""
    leaves, treedef = jax.tree.flatten(outputs)
    return jax.tree.unflatten(treedef, last_activations(jaxpr, len(leaves))).by_name()


def _kind(key: str, metric: Metric) -> Kind:
    direction = default_direction(key) or metric_direction(metric)
    shows = getattr(type(metric), "summary", Metric.summary) is not Metric.summary
    # The metric without arrays, because `summary` needs only its attributes.
    return Kind(direction, jax.tree.map(lambda leaf: None, metric).summary if shows else None, getattr(metric, "is_recorded", True))


def _compute(key: str, metric: Metric) -> jax.Array:
    try:
        return computed(metric)[0]
    except Exception as error:
        if is_of_debugger(error):
            raise
        raise MetricError(f"The metric {key!r} cannot be computed: {type(error).__name__}: {error}") from error


def _empty_rows(key: str, metric: Metric) -> Metric:
    faults = [describe_shapes(leaf) for leaf in jax.tree.leaves(metric) if not leaf.shape]
    if faults:
        raise MetricError(f"The metric {key!r} has collect = True, so its leaves must be rows [examples, ...]. Received: {', '.join(faults)}.")
    return cast(Metric, jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape[1:]), leaf.dtype), metric))


class CompiledShapes:
    """Warns about a batch whose shapes or dtypes cause recompilation; once for each of them.

    Differences in the number of rows are ignored, because padding makes the numbers equal or warns itself. This does not apply to inputs that are passed
    whole, which are never padded.
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._last: list[Any] | None = None
        self._before: dict[str, _Leaf] = {}  # The leaves of the last batch.
        self._known: dict[Any, dict[str, _Leaf]] = {}  # Leaves of all batches, by structure and shapes.
        self._forms: set[Any] = set()  # The keys of `_known` without the number of rows.

    def check(self, batch: Batch, *, warns: bool = True) -> None:
        """Checks a batch before it is dispatched; takes a microsecond if its shapes equal those of the last one.

        With `warns=False` it only records shapes: the first batch of a call may have other shapes than earlier calls.
        """
        x, y, _, weights = batch
        are_arrays = type(x) is np.ndarray and type(y) is np.ndarray and weights is None
        leaves = (x, y) if are_arrays else jax.tree.leaves((x, y, weights))
        shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
        if shapes != self._last:
            self._compare(batch, shapes, warns=warns)
            self._last = shapes

    def _compare(self, batch: Batch, shapes: list[tuple[tuple[int, ...], Any]], *, warns: bool) -> None:
        key = (jax.tree.structure((batch.x, batch.y, batch.weights)), *shapes)
        is_known, before = key in self._known, self._before
        self._before = now = self._known.setdefault(key, {} if is_known else _leaves_of(batch))
        if is_known:
            return
        is_whole = not has_rows(batch.x, len(batch.mask))
        forms = {path: (leaf.dtype, leaf.shape[0 if is_whole else 1 :]) for path, leaf in now.items()}
        if (form := tuple(forms.items())) in self._forms:
            return
        self._forms.add(form)
        # Arrays that only some batches have, such as sample weights, are ignored: there are few combinations of them.
        pairs = {path: (before[path], leaf) for path, leaf in now.items() if path in before}
        changes = {path: (old, new) for path, (old, new) in pairs.items() if (old.dtype, old.shape[0 if is_whole else 1 :]) != forms[path]}
        if warns and changes:
            advice = []
            if is_whole:
                advice = ["Pad inputs to one or a few sizes, each of which is compiled once, for example with jraph.dynamically_batch."]
            elif any(old.shape[1:] != new.shape[1:] for old, new in changes.values()):
                advice = ["Pad or truncate examples to one or a few lengths, each of which is compiled once; drop a last batch that differs (drop_remainder)."]
            if not is_whole and any(old.dtype != new.dtype for old, new in changes.values()):
                advice.append("Use one dtype for all batches.")
            words = listed([f"{path}: {old} -> {new}" for path, (old, new) in changes.items()])
            warn(f"The shapes or dtypes of batches to {self._verb} have changed, so the step is compiled again: {words}. {' '.join(advice)}")


class _Leaf(NamedTuple):
    dtype: Any  # On the device: float32 for float64.
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _leaves_of(batch: Batch) -> dict[str, _Leaf]:
    named = [*leaf_paths(batch.x, "x"), *leaf_paths(batch.y, "y"), *leaf_paths(batch.weights, "sample_weight")]
    return {path: _Leaf(jax.dtypes.canonicalize_dtype(leaf.dtype) if isinstance(leaf.dtype, np.dtype) else leaf.dtype, leaf.shape) for path, leaf in named}


# Primitives that change the shape or dtype of an array but not its values.
_TRANSPARENT = {"convert_element_type", "reshape", "squeeze", "expand_dims", "copy", "copy_p", "transpose"}


def last_activations(jaxpr: core.ClosedJaxpr | core.Jaxpr, num: int | None = None) -> list[str]:
    """Returns `"softmax"`, `"sigmoid"` or `""` for each output of a traced function, or for its last `num` outputs.

    >>> import jax
    >>> import numpy as np
    >>> last_activations(jax.make_jaxpr(lambda x: (jax.nn.softmax(2 * x), jax.nn.sigmoid(x), x + 1))(np.ones((2, 3))))
    ['softmax', 'sigmoid', '']
    """
    count = len(getattr(jaxpr, "jaxpr", jaxpr).outvars)
    return [_activation(jaxpr, index) for index in range(0 if num is None else count - num, count)]


def _activation(jaxpr: Any, output: int) -> str:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    producers = {variable: (equation, index) for equation in jaxpr.eqns for index, variable in enumerate(equation.outvars)}
    variable = jaxpr.outvars[output]
    while (producer := _producer(variable, producers)) is not None:
        equation, index = producer
        name = equation.primitive.name
        if name in _TRANSPARENT:
            variable = equation.invars[0]
            continue
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if inner is not None and name not in ("scan", "while", "pallas_call"):
            return _activation(inner, index)
        if name == "logistic":
            return "sigmoid"
        return "softmax" if name == "div" and _is_softmax(equation, producers) else ""
    return ""


def _is_softmax(division: Any, producers: dict[Any, Any]) -> bool:
    """Returns whether a division divides exponentials by their sum."""
    above, below = (_producer(variable, producers) for variable in division.invars)
    while below is not None and below[0].primitive.name in ("broadcast_in_dim", *_TRANSPARENT):
        below = _producer(below[0].invars[0], producers)
    return above is not None and above[0].primitive.name == "exp" and below is not None and below[0].primitive.name == "reduce_sum"


def _producer(variable: Any, producers: dict[Any, Any]) -> Any:
    return None if isinstance(variable, core.Literal) else producers.get(variable)


# Dense bfloat16 operations per second of a device (float16 if it has no bfloat16), from the vendors' data sheets, by the beginning of JAX's name of
# the device. TPUs before v4 have two devices per chip.
_PEAKS = {
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A100": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v6 lite": 918e12,
    "Tesla T4": 65e12,
    "Tesla V100": 125e12,
}


def cost_of(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> Cost:
    """Returns the cost of one call of a function, given its jaxpr; for a function that is mapped over devices, on one of them.

    >>> import jax
    >>> import numpy as np
    >>> a, b = np.ones((2, 3), np.float32), np.ones((3, 5), np.float32)
    >>> cost_of(jax.make_jaxpr(lambda a, b: a @ b)(a, b))
    Cost(flops=60.0, bytes_accessed=124.0, has_convolution=False, matrix_flops=60.0)
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(map(_cost_of_equation, jaxpr.eqns), start=_NOTHING)


def _cost_of_equation(equation: Any) -> Cost:
    name, params = equation.primitive.name, equation.params
    if name in ("while", "pallas_call"):
        return _UNKNOWN
    inner = [cost_of(jaxpr) for jaxpr in jax.tree.leaves(params) if isinstance(jaxpr, core.ClosedJaxpr | core.Jaxpr)]
    if name == "cond":
        return max(inner, key=lambda cost: cost.flops)
    if inner:
        return sum(inner, start=_NOTHING).times(params["length"] if name == "scan" else 1)
    outputs = [variable.aval for variable in equation.outvars]
    operands = [variable.aval for variable in equation.invars]
    accessed = sum(_num_bytes(aval) for aval in (*operands, *outputs))
    size = float(sum(math.prod(getattr(aval, "shape", ())) for aval in outputs))
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        flops = 2 * size * math.prod(operands[0].shape[axis] for axis in contracted)
        return Cost(flops, accessed, False, flops)
    if name == "conv_general_dilated":
        kernel = operands[1].shape
        flops = 2 * size * math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
        return Cost(flops, accessed, True, flops)
    return Cost(size, accessed, False, 0.0)


def _num_bytes(aval: Any) -> float:
    dtype = getattr(aval, "dtype", None)  # Key dtypes also have an item size.
    return 0.0 if dtype is None else float(math.prod(aval.shape) * dtype.itemsize)


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak bfloat16 operations per second of a device with this `jax.Device.device_kind`, or `None` if it is not known.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
    (989000000000000.0, None)
    """
    known = [name for name in _PEAKS if device_kind == name or device_kind.startswith((f"{name} ", f"{name}-"))]
    return _PEAKS[max(known, key=len)] if known else None
