"""Dry runs of steps on shapes: nothing is computed or compiled.

They find what steps need besides state and batch (empty sums, the order of log keys, costs), and report mistakes. If jit is disabled, the module may
need values, so a dry run is a real pass over the first batch.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from fitflax.errors import MetricError, ModelError, NotReadyError, is_of_debugger
from fitflax.leaves import describe_shapes
from fitflax.logs import NUM_STEP_VALUES, Kind, Place, default_direction
from fitflax.metrics import Metric
from fitflax.metrics.base import metric_direction
from fitflax.parallel.eager import jit_is_disabled
from fitflax.parallel.packed import Form
from fitflax.state import Batch, PyTree, TrainState, shapes_in
from fitflax.steps.compile_ahead import without_full_collections
from fitflax.steps.cost import UNKNOWN as UNKNOWN_COST
from fitflax.steps.cost import Cost, cost_of
from fitflax.steps.forward_pass import SCALAR, Notes
from fitflax.steps.metric_state import EvalSums, TrainSums, collects, computed, summed
from fitflax.steps.model_outputs import Returned
from fitflax.steps.output_activation import last_activations
from fitflax.steps.step_functions import Task

__all__ = ["DryRun", "TracedOutputs", "TracedStep"]

# Larger sums are not packed, because packing copies them at every step.
_MAX_PACKED_SIZE = 4096


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

    def __init__(self, task: Task, is_eager: Callable[[], bool] = jit_is_disabled) -> None:
        self._task, self._strategy, self.is_eager = task, task.strategy, is_eager
        self._steps: dict[bool, TracedStep] = {}
        self._outputs: dict[tuple[str, bool], TracedOutputs] = {}
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

    def step_outputs(self, state: TrainState, batch: Batch, *, train: bool) -> TracedOutputs:
        """Returns the outputs that the dry run of a step found, for one replica's rows of its batch; without costs."""
        return self._seen_outputs.get(train) or self.usual_outputs(state, batch)

    def activations(self, state: TrainState, batch: Batch) -> list[PyTree]:
        """Returns the last activation of each output, by name, in each mode whose step had a dry run; in one mode if that does not show them."""
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
        """Returns the shapes of the parameters of a module for evaluation.

        `None` if it cannot be initialized; errors are reported when it is applied.
        """
        init = self._strategy.trace(self._task.init_eval_params, inputs=("replicated", "split"))
        try:
            return jax.eval_shape(init, shapes_in(state.key), self._strategy.abstract_feed(batch))
        except Exception as error:
            if is_of_debugger(error):
                raise
            return None

    @without_full_collections()
    def step(self, state: TrainState, feed: Batch, *, train: bool) -> Cost:
        """Dry-runs a training or evaluation step on shapes, keeps the results of the first one, and returns the cost of its forward pass on a device."""
        traced = self._strategy.trace(self._metrics_of(train, notes := Notes(keeps_returned=True)), inputs=("replicated", "split"))
        jaxpr, (*found, returned) = jax.make_jaxpr(traced, return_shape=True)(shapes_in(state), feed)
        self._record(train, notes, *found, activations=None if returned is None else _activations_of(jaxpr, returned))
        return self._cost_of(jaxpr)

    def step_eagerly(self, state: TrainState, feed: Batch, *, train: bool) -> None:
        """Does the same with a pass over a batch, without tracing; only once, because shapes do not matter then. Arguments and errors are those of `step`."""
        if train not in self._steps:
            run = self._strategy.trace(self._metrics_of(train, notes := Notes()), inputs=("replicated", "split"))
            with jax.disable_jit():
                *found, _ = run(state, feed)
            self._record(train, notes, *found, activations=None)

    def _metrics_of(self, train: bool, notes: Notes) -> Callable[[TrainState, Batch], tuple[dict[str, Any], dict[str, Any], dict[str, Any], Returned | None]]:
        """Returns a function that returns a batch's metrics, their sums, their values, and the module's outputs if they are known, and fills `notes`."""

        def metrics_of(state: TrainState, batch: Batch) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], Returned | None]:
            metrics = self._task.batch_metrics(state, batch, train=train, notes=notes)
            notes.order[:] = metrics
            # Merging once gives the final shapes of sums; empty ones may be scalars.
            merged = {key: metric.empty().merge(metric) for key, metric in summed(metrics).items()}
            returned, notes.returned = notes.returned, None
            return metrics, merged, {key: _compute(key, metric) for key, metric in merged.items()}, returned

        return metrics_of

    def _record(self, train: bool, notes: Notes, abstract: dict[str, Any], merged: dict[str, Any], computed: dict[str, Any], *, activations: PyTree) -> None:
        order = notes.order
        begin = {key: notes.given.get(key, metric).empty() for key, metric in abstract.items()}
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
        collected = {key: _empty_rows(key, abstract[key]) for key in order if collects(abstract[key])}
        sums: Any = TrainSums(empty, np.int32(-1), np.int32(-1)) if train else EvalSums(metrics=empty, index=np.int32(0))  # type: ignore[arg-type]
        self._steps.setdefault(train, TracedStep(shown, end, sums, Form.of(sums, _MAX_PACKED_SIZE), collected, kinds, scalar))
        self._seen_outputs.setdefault(train, TracedOutputs(notes.outputs, UNKNOWN_COST, activations))

    def _cost_of(self, jaxpr: Any) -> Cost:
        return cost_of(jaxpr).times(1 / self._strategy.num_partitions)

    def outputs(self, state: TrainState, batch: Batch, *, train: bool) -> TracedOutputs:
        """Returns the results of tracing the module on one replica's rows of a batch, cached by the shapes of its inputs."""
        feed = self._strategy.abstract_feed(batch)
        if (seen := (str(shapes_in(feed.x)), train)) not in self._outputs:
            self._outputs[seen] = self._trace_outputs(state, feed, train)
        return self._outputs[seen]

    @without_full_collections()
    def _trace_outputs(self, state: TrainState, feed: Batch, train: bool) -> TracedOutputs:
        def forward(state: TrainState, batch: Batch) -> Returned:
            return Returned.of(self._task.outputs(state.params, state.model_state, state.key, batch.x, train=train))

        traced = self._strategy.trace(forward, inputs=("replicated", "split"))
        jaxpr, outputs = jax.make_jaxpr(traced, return_shape=True)(shapes_in(state), feed)
        return TracedOutputs(outputs.by_name(), self._cost_of(jaxpr), _activations_of(jaxpr, outputs))


def _activations_of(jaxpr: Any, outputs: Returned) -> PyTree:
    """Returns the last activation of each output, by name; a traced function returns the outputs last."""
    leaves, treedef = jax.tree.flatten(outputs)
    return jax.tree.unflatten(treedef, last_activations(jaxpr, len(leaves))).by_name()


def _kind(key: str, metric: Metric) -> Kind:
    direction = default_direction(key) or metric_direction(metric)
    shows = getattr(type(metric), "summary", Metric.summary) is not Metric.summary
    # Without rows or sums: `summary` needs only the attributes.
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
