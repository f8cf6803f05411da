"""What a step would do, found by evaluating shapes alone: no number is computed, nothing is compiled.

It finds what steps need besides state and batch (empty sums, the order of log keys, what passes cost), and reports mistakes on the way.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from fitflax.errors import MetricError, ModelError, NotReadyError
from fitflax.logs import NUM_STEP_VALUES, Kind, Place, default_direction
from fitflax.metrics import Metric
from fitflax.metrics.base import metric_direction
from fitflax.parallel.packed import Form
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps.activations import last_activations
from fitflax.steps.cost import Cost, cost_of
from fitflax.steps.model import describe_shapes
from fitflax.steps.sums import EvalSums, TrainSums, collects, summed
from fitflax.steps.task import SCALAR, Task

__all__ = ["DryRun", "TracedOutputs", "TracedStep", "shapes_in"]

# Larger sums are not packed: it would copy them at every step.
_LARGEST_PACKED = 4096


class TracedStep(NamedTuple):
    """What the dry run of a step finds out.

    Attributes:
        places: Each log key's place in the vector of values, in the order in which keys are shown; `None` for metrics that are computed on the host.
        num_values: The length of that vector.
        empty: What nothing has been added to, as NumPy arrays of their final shapes: `TrainSums` or `EvalSums`.
        form: How these sums are packed on their way from call to call.
        collected: Empty metrics whose rows are collected on the host.
        kinds: By log key, what is known of the metrics.
        scalar_loss: Whether the loss is one number, which padding would falsify.
    """

    places: dict[str, Place | None]
    num_values: int
    empty: Any
    form: Form
    collected: dict[str, Metric]
    kinds: Mapping[str, Kind]
    scalar_loss: bool


class TracedOutputs(NamedTuple):
    """What tracing the module alone finds out.

    Attributes:
        shapes: Of its outputs.
        cost: What it costs a device to compute them.
        activations: What they come from, in the same structure.
    """

    shapes: PyTree
    cost: Cost
    activations: PyTree


class DryRun:
    """Evaluates a task's steps on shapes, and keeps what that tells.

    Args:
        task: What they compute.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._strategy = task.strategy
        self._steps: dict[bool, TracedStep] = {}
        self._outputs: dict[tuple[str, bool], TracedOutputs] = {}

    def traced_step(self, *, train: bool) -> TracedStep:
        """Returns what the dry run found.

        Raises:
            NotReadyError: There was none yet.
        """
        if train not in self._steps:
            raise NotReadyError("No batch has been seen yet.")
        return self._steps[train]

    @property
    def loss_is_scalar(self) -> bool:
        """Whether the loss is known to be one number, which padding would falsify."""
        return any(traced.scalar_loss for traced in self._steps.values())

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """By log key of training, what is known of the metrics."""
        return self._steps[True].kinds if True in self._steps else {}

    def usual_outputs(self, state: TrainState, batch: Batch) -> TracedOutputs:
        """Returns what `outputs` does of evaluation, which later calls need as well; of training for a module that cannot be evaluated."""
        try:
            return self.outputs(state, batch, train=False)
        except ModelError:
            return self.outputs(state, batch, train=True)

    def step(self, state: TrainState, feed: Batch, *, train: bool) -> Cost:
        """Evaluates a training step or an evaluation, and keeps what the first one tells.

        Args:
            state: The state, or its shapes.
            feed: The shapes of a batch as the devices get it.
            train: Which of the two.

        Returns:
            What the passes over such a batch and its metrics cost a device, without a gradient.

        Raises:
            ModelError: The module fails.
            LossError: The loss does not fit.
            MetricError: A metric does not fit, or cannot be computed.
        """
        order: list[str] = []
        given: dict[str, Any] = {}

        def metrics_of(state: TrainState, batch: Batch) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
            metrics = self._task.batch_metrics(state, batch, train=train, given=given)
            order[:] = metrics
            # Merging once gives the shapes that sums keep from then on; empty ones may begin as scalars.
            merged = {key: metric.empty().merge(metric) for key, metric in summed(metrics).items()}
            return metrics, merged, {key: _result(key, metric) for key, metric in merged.items()}

        traced = self._strategy.trace(metrics_of, inputs=("replicated", "split"))
        jaxpr, (abstract, merged, computed) = jax.make_jaxpr(traced, return_shape=True)(shapes_in(state), feed)
        begin = {key: given.get(key, metric).empty() for key, metric in abstract.items()}
        empty = {
            key: jax.tree.map(lambda want, have: np.array(np.broadcast_to(np.asarray(have, want.dtype), want.shape)), metric, begin[key])
            for key, metric in merged.items()
        }
        parts = getattr(abstract.get("loss"), "parts", {})
        scalar = any(getattr(part, "name", None) == SCALAR for part in parts.values())
        kinds = {key: _kind(key, abstract[key]) for key in order}
        places: dict[str, Place] = {}
        end = NUM_STEP_VALUES if train else 0
        for key in sorted(computed):
            places[key] = Place(end, computed[key].shape)
            end = places[key].end
        shown = {key: places.get(key) for key in order}
        collected = {key: _without_rows(key, abstract[key]) for key in order if collects(abstract[key])}
        sums: Any = TrainSums(empty, np.int32(-1), np.int32(-1)) if train else EvalSums(metrics=empty, index=np.int32(0))  # type: ignore[arg-type]
        self._steps.setdefault(train, TracedStep(shown, end, sums, Form.of(sums, _LARGEST_PACKED), collected, kinds, scalar))
        return self._cost_of(jaxpr)

    def _cost_of(self, jaxpr: Any) -> Cost:
        """Returns what a traced function costs each device."""
        return cost_of(jaxpr).times(1 / self._strategy.num_partitions)

    def outputs(self, state: TrainState, batch: Batch, *, train: bool) -> TracedOutputs:
        """Returns what tracing the module on a replica's share of a batch tells; found out once for inputs of the same shapes.

        Args:
            state: The state.
            batch: A batch.
            train: In which of its modes.

        Raises:
            ModelError: The module fails.
        """
        feed = self._strategy.abstract_feed(batch)
        if (seen := (str(shapes_in(feed.x)), train)) not in self._outputs:
            self._outputs[seen] = self._trace_outputs(state, feed, train)
        return self._outputs[seen]

    def _trace_outputs(self, state: TrainState, feed: Batch, train: bool) -> TracedOutputs:
        order: list[str] = []

        def forward(state: TrainState, batch: Batch) -> PyTree:
            outputs = self._task.outputs(state.params, state.model_state, state.key, batch.x, train=train)
            order[:] = outputs if isinstance(outputs, dict) else []
            return outputs

        traced = self._strategy.trace(forward, inputs=("replicated", "split"))
        jaxpr, outputs = jax.make_jaxpr(traced, return_shape=True)(shapes_in(state), feed)
        activations = jax.tree.unflatten(jax.tree.structure(outputs), last_activations(jaxpr))
        if isinstance(outputs, dict):
            # JAX sorts; this is the module's order.
            outputs, activations = ({name: tree[name] for name in order} for tree in (outputs, activations))
        return TracedOutputs(outputs, self._cost_of(jaxpr), activations)


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


def shapes_in(tree: PyTree) -> PyTree:
    """Returns the shapes of arrays, without their places."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
