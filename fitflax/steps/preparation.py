"""What happens before the first step on batches of new shapes: a dry run, which finds mistakes and costs, and compilation in a thread.

If jit is disabled, nothing is compiled ahead, and every call takes one batch.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from fitflax.data import FedBatch
from fitflax.errors import ModelError, warn
from fitflax.leaves import describe_shapes
from fitflax.models import LinenModel
from fitflax.state import Batch, PyTree, TrainState, shapes_in
from fitflax.steps.compile_ahead import Compilation, CompiledShapes
from fitflax.steps.compiled_functions import CompiledSteps, train_kind
from fitflax.steps.cost import Cost
from fitflax.steps.kept_values import NOTHING, Keep
from fitflax.steps.live_state import Carry
from fitflax.steps.shape_inference import DryRun
from fitflax.steps.step_functions import Task

__all__ = ["PASSES", "Preparation", "check_rows", "max_group_size"]

# Limits of a call of several batches.
_GROUP_STEPS = 16
_GROUP_BYTES = 2**26

PASSES = 3
"""Passes of a training step: forward, and backward to the activations and to the parameters."""

# Floating-point operations, or bytes of memory, of evaluating a batch: about two milliseconds on a CPU core, 20 times the overhead of a call; and
# less than one millisecond on a GPU.
_CHEAP = 2e7
_CHEAP_ON_ACCELERATORS = 5e9


class Preparation:
    """Dry-runs and compiles the steps of a task. Remembers what was prepared, checked and reported, and what it costs."""

    def __init__(self, task: Task, steps: CompiledSteps, dry_run: DryRun, is_eager: Callable[[], bool]) -> None:
        self._task, self._strategy = task, task.strategy
        self._steps, self._dry_run, self._is_eager = steps, dry_run, is_eager
        # Batches per call of dry-run evaluations and predictions, by kind, shapes, and whether the batch is a single one.
        self._group_sizes: dict[tuple[str, str, bool], int] = {}
        self._costs: dict[str, Cost] = {}  # Of the forward pass, by shapes of a training batch.
        # Training compilations by shapes, steps per call and what is kept; and the key of the last one prepared.
        self._compilations: dict[tuple[str, int, Keep], Compilation] = {}
        self._prepared: tuple[str, int, Keep] | None = None
        self._compiled = {verb: CompiledShapes(verb) for verb in ("train on", "evaluate", "predict")}
        self._is_eval_model_checked = not task.model.has_eval_model
        # Checks that have reported, and arrays that were checked, by identity.
        self._reported: set[str] = set()
        self.checked_arrays: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def train(self, state: TrainState, batch: Batch, *, is_single: bool = False, steps_per_call: int = 1, keep: Keep = NOTHING) -> None:
        """Dry-runs a training step, once for batches of the same shapes, and begins to compile it.

        With `is_single`, the batch is the only one of its call, so its shapes are compared with those of earlier calls.
        """
        if self._is_eager():
            self._dry_run.step_eagerly(state, self._strategy.feed(batch), train=True)
            return
        self.check_eval_model(state, batch)
        feed = self._begin_call("train on", batch, is_single)
        shapes = str(feed)
        self._prepared = prepared = shapes, steps_per_call, keep
        if prepared in self._compilations:
            return
        self._costs[shapes] = self._dry_run.step(state, feed, train=True)
        kind = train_kind(self._strategy, steps_per_call, steps_per_call)
        self._compilations[prepared] = self._compile(kind, Carry.of(state), batch, steps_per_call, train=True, keep=keep)

    def evaluate(self, state: TrainState, batch: Batch, *, is_single: bool = False) -> None:
        """Dry-runs an evaluation and begins to compile it; arguments and errors as in `train`."""
        if self._is_eager():
            self._dry_run.step_eagerly(state, self._strategy.feed(batch), train=False)
            self._warn_of_mode()
            return
        self.check_eval_model(state, batch)
        feed = self._begin_call("evaluate", batch, is_single)
        seen = "evaluate", str(feed), is_single
        if seen in self._group_sizes:
            return
        cost = self._dry_run.step(state, feed, train=False)
        size = 1 if is_single else self._choose_group_size(cost, batch)
        self._warn_of_mode()
        used = Carry(*jax.tree.flatten((state.params, state.model_state)), state.key)  # All choices of parameters to evaluate have these shapes.
        self._compile("evaluate" if size == 1 else "evaluate group", used, batch, size, train=False)
        self._group_sizes[seen] = size

    def predict(self, state: TrainState, batch: Batch, *, is_single: bool = False, is_counted: bool = True) -> None:
        """Dry-runs prediction; arguments as in `train`, and `is_counted` for whether the number of examples is known."""
        if self._is_eager():
            self._warn_of_mode()
            return
        self.check_eval_model(state, batch)
        feed = self._begin_call("predict", Batch(batch.x, (), batch.mask), is_single)
        seen = "predict", str(feed.x), is_single
        if seen in self._group_sizes:
            return
        rows = self._strategy.rows_of(batch) // self._strategy.num_replicas
        outputs, cost, _ = self._dry_run.outputs(state, batch, train=False)
        check_rows(outputs, (rows,), is_counted=is_counted)
        self._warn_of_mode()
        every = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((len(batch.mask), *leaf.shape[1:]), leaf.dtype), outputs)
        self._group_sizes[seen] = 1 if is_single else self._choose_group_size(cost, batch, every)

    def check_eval_model(self, state: TrainState, batch: Batch) -> None:
        """Checks once, on shapes, that a module for evaluation has the parameters of the one that is trained; raises `ModelError` otherwise.

        Not called without jit, because it traces the module; linen raises an error when the module is applied.
        """
        if self._is_eval_model_checked:
            return
        own = self._dry_run.eval_params(state, batch)
        if own is not None:
            cast(LinenModel, self._task.model).check_eval_params(state.params, own)
        self._is_eval_model_checked = True

    def _warn_of_mode(self) -> None:
        """Warns once about a module that seems to be evaluated in training mode."""
        if self.is_new("mode") and (fault := self._task.model.mode_fault) is not None:
            warn(fault)

    def _begin_call(self, verb: str, batch: Batch, is_single: bool) -> Batch:
        """Records the shapes of the first batch of a call, and returns its shapes on the devices."""
        if not is_single:
            self._compiled[verb].check(batch, warns=False)
        return cast(Batch, shapes_in(self._strategy.abstract_feed(batch)))

    def _compile(self, kind: str, carry: Carry, batch: Batch, size: int, *, train: bool, keep: Keep = NOTHING) -> Compilation:
        """Traces a step that takes `size` batches, which finds errors, and begins to compile it in a thread."""
        traced, put = self._dry_run.traced_step(train=train), self._strategy.abstract_put
        arguments = put(carry.leaves), put(carry.key), put(traced.form.pack(traced.empty))
        batches = (self._strategy.abstract_feed(batch),) if size == 1 else (np.int32(size), self._strategy.abstract_feed(batch, size))
        return self._steps.begin(kind, carry, *arguments, *batches, keep=keep)

    def _choose_group_size(self, cost: Cost, batch: Batch, outputs: PyTree = ()) -> int:
        """Returns how many batches to evaluate or predict in one call: several if the overhead of a call exceeds its computation."""
        on_host = self._strategy.is_on_host
        if max(cost.flops, cost.bytes_accessed) > (_CHEAP if on_host else _CHEAP_ON_ACCELERATORS):
            return 1
        if on_host and cost.has_convolution:
            return 1  # Inside a loop, XLA computes convolutions on one core.
        return max_group_size(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((batch, outputs))))

    def group_for(self, kind: str, batch: Batch) -> int:
        """Returns the number of batches like this one in a call of `"evaluate"` or `"predict"`."""
        if self._is_eager():
            return 1
        feed = shapes_in(self._strategy.abstract_feed(batch))
        return self._group_sizes[kind, str(feed if kind == "evaluate" else feed.x), False]

    def is_new(self, question: str) -> bool:
        """Returns whether this is called with `question` for the first time, so that each warning is given once per program."""
        is_new = question not in self._reported
        self._reported.add(question)
        return is_new

    def check_shapes(self, verb: str, fed: FedBatch) -> None:
        """Warns if the step is compiled again because the batch has new shapes."""
        if fed.number == 0 and not self._is_eager():  # Others are of the same chunk as one that was checked.
            self._compiled[verb].check(fed.batch if verb != "predict" else Batch(fed.batch.x, (), fed.batch.mask))

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


def check_rows(outputs: PyTree, rows: tuple[int, ...], *, is_counted: bool) -> None:
    """Raises `ModelError` if outputs do not begin with the axes `rows`; the number of examples matters only if it `is_counted`."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(outputs)]
    if any(shape[: len(rows)] != rows if is_counted else len(shape) < len(rows) for shape in shapes):
        raise ModelError(
            f"predict concatenates outputs along their first axis, which must be the examples, {rows[-1]} here. Received: {describe_shapes(outputs)}."
        )


def max_group_size(num_bytes: int) -> int:
    """Returns the number of steps in a call, given the bytes of one: 16, or fewer if they would take more than 64 MB."""
    return int(max(1, min(_GROUP_STEPS, _GROUP_BYTES // max(num_bytes, 1))))
