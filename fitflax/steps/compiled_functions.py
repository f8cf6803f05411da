"""The compiled functions of a task's steps, one for each structure of the state, which can be compiled ahead of the first call."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from fitflax.parallel.base import Compiled, Layout, Places, Strategy
from fitflax.parallel.packed import Form
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps.compile_ahead import AheadOfTime, Compilation, without_full_collections
from fitflax.steps.kept_values import NOTHING, Keep
from fitflax.steps.live_state import Carry, Sums
from fitflax.steps.metric_state import as_vector
from fitflax.steps.model_outputs import Returned
from fitflax.steps.step_functions import Task

__all__ = ["CompiledSteps", "train_kind"]


class CompiledSteps:
    """The compiled functions of a task, by kind.

    `"init"` takes a key and a batch, and returns a state without its key. All others take the leaves and the key of a carry, then packed sums if
    there are any; a returned state has the placement of the given one. Their other arguments:

    * `"train"`, `"evaluate"`: a batch. For evaluation, the leaves are those of `(params, model_state)`.
    * `"train group"`, `"evaluate group"`: a count, and batches with a leading axis of steps, of which `count` are used.
    * `"train whole group"`: as `"train group"`, but the count is the size of the leading axis, which the compiler then knows.
    * `"predict"`: the index of the batch, and its inputs; `"predict group"`: the index of the first batch, a count, and inputs.

    A group of any number of steps runs the same compiled loop, so rounding does not depend on where groups end. Whole groups may be a separate loop.
    `form_of` returns how the sums of training (`True`) or of evaluation are packed.
    """

    def __init__(self, task: Task, form_of: Callable[[bool], Form]) -> None:
        self._task, self._form_of = task, form_of
        self._functions: dict[_FunctionSpec, Compiled] = {}
        self._last: dict[str, tuple[Any, Keep, Compiled]] = {}
        self._ahead = AheadOfTime()
        self.seconds_waited = 0.0

    def get(self, kind: str, carry: Carry, *, keep: Keep = NOTHING) -> Compiled:
        """Returns the function for states like this one, after waiting for its compilation in a thread."""
        last = self._last.get(kind)
        if last is not None and last[0] is carry.treedef and last[1] is keep:  # Comparing large structures can take longer than a step.
            return last[2]
        spec = self._spec(kind, carry, keep)
        begin = time.perf_counter()
        self._ahead.wait(spec)
        self.seconds_waited += time.perf_counter() - begin
        function = self._make(spec)
        self._last[kind] = (carry.treedef, keep, function)
        return function

    def traceable(self, kind: str, carry: Carry, *, keep: Keep = NOTHING) -> Compiled:
        """Returns the function for states like this one without waiting, for evaluating shapes."""
        return self._make(self._spec(kind, carry, keep))

    @without_full_collections()
    def lower(self, kind: str, carry: Carry, *arguments: Any, keep: Keep = NOTHING) -> jax.stages.Lowered:
        """Traces the function for shapes with placements."""
        return self._make(self._spec(kind, carry, keep)).lower(*arguments)

    def begin(self, kind: str, carry: Carry, *arguments: Any, keep: Keep = NOTHING) -> Compilation:
        """Traces the function for shapes with placements, which finds errors, and compiles it in a thread; `get` waits for it."""
        lowered = self.lower(kind, carry, *arguments, keep=keep)
        self._last.pop(kind, None)
        return self._ahead.start(self._spec(kind, carry, keep), lowered)

    def _spec(self, kind: str, carry: Carry, keep: Keep) -> "_FunctionSpec":
        return _FunctionSpec(kind, carry.treedef, self._task.strategy.places(carry.leaves), keep)

    def _make(self, spec: "_FunctionSpec") -> Compiled:
        if spec not in self._functions:
            makers: dict[str, Callable[[_FunctionSpec], Compiled]] = {
                "init": self._init,
                "train": self._train,
                "train group": self._train_group,
                "train whole group": functools.partial(self._train_group, is_whole=True),
                "evaluate": self._evaluate,
                "evaluate group": self._evaluate_group,
                "predict": self._predict,
                "predict group": self._predict_group,
            }
            self._functions[spec] = makers[spec.kind](spec)
        return self._functions[spec]

    def _init(self, spec: "_FunctionSpec") -> Compiled:
        def init_state(key: jax.Array, batch: Batch) -> TrainState:
            return dataclasses.replace(self._task.init_state(key, batch), key=())  # type: ignore[arg-type]

        places = Places(jax.tree.unflatten(spec.treedef, spec.places.tree)) if isinstance(spec.places, Places) else spec.places
        return self._task.strategy.compile(init_state, inputs=("replicated", "split"), outputs=places)

    def _train(self, spec: "_FunctionSpec") -> Compiled:
        treedef, keep = spec.treedef, spec.keep

        def train_step(leaves: list[Any], key: jax.Array, sums: Sums, batch: Batch) -> Any:
            form = self._form_of(True)
            state, new_sums, values, rows, kept = self._task.train_step(Carry(leaves, treedef, key).state(), form.unpack(sums), batch, keep=keep)
            return Carry.of(state).leaves, form.pack(new_sums), as_vector(values, new_sums.metrics), rows, *kept

        inputs: tuple[Layout, ...] = (spec.places, "replicated", "replicated", "split")
        return self._task.strategy.compile(train_step, inputs=inputs, outputs=self._train_outputs(spec, "split"), donate=(0, 2))

    def _train_group(self, spec: "_FunctionSpec", *, is_whole: bool = False) -> Compiled:
        treedef, keep, strategy = spec.treedef, spec.keep, self._task.strategy

        def train_group(leaves: list[Any], key: jax.Array, sums: Sums, count: jax.Array, batches: Batch) -> Any:
            form, size = self._form_of(True), batches.mask.shape[0]

            # Sums stay packed between steps, because XLA copies every array that a loop carries.
            def one(index: Any, leaves: list[Any], sums: Sums) -> Any:
                state, new_sums, *rest = self._task.train_step(Carry(leaves, treedef, key).state(), form.unpack(sums), _batch_at(batches, index), keep=keep)
                return Carry.of(strategy.pin(state)).leaves, form.pack(new_sums), *rest

            def body(index: jax.Array, carry: Any) -> Any:
                leaves, sums, _, rows = carry
                leaves, sums, values, new_rows, kept = one(index, leaves, sums)
                return leaves, sums, (values, kept), _set_at(rows, new_rows, index)

            _, _, values, rows, kept = jax.eval_shape(one, _INDEX, leaves, sums)
            begin = (leaves, sums, _zeros((values, kept)), _zeros(rows, size))
            leaves, sums, (values, kept), rows = lax.fori_loop(0, size if is_whole else count, body, begin)
            return leaves, sums, as_vector(values, form.unpack(sums).metrics), rows, *kept

        inputs: tuple[Layout, ...] = (spec.places, "replicated", "replicated", "replicated", "group")
        return strategy.compile(train_group, inputs=inputs, outputs=self._train_outputs(spec, "group"), donate=(0, 2))

    def _train_outputs(self, spec: "_FunctionSpec", rows: Layout) -> tuple[Layout, ...]:
        """Returns the layouts of the outputs of training steps: state, sums, values, rows, and the fields of `Kept`; a gradient has that of the parameters."""
        grads: Layout = "replicated"
        if spec.keep.grads and self._task.custom_step is None and isinstance(spec.places, Places):
            grads = Places(jax.tree.unflatten(spec.treedef, spec.places.tree).params)
        return (spec.places, "replicated", "replicated", rows, grads, "replicated", "replicated")

    def _evaluate(self, spec: "_FunctionSpec") -> Compiled:
        def eval_step(leaves: list[Any], key: jax.Array, sums: Sums, batch: Batch) -> Any:
            form = self._form_of(False)
            params, model_state = jax.tree.unflatten(spec.treedef, leaves)
            new_sums, rows = self._task.eval_step(params, model_state, key, form.unpack(sums), batch)
            return form.pack(new_sums), as_vector([], new_sums.metrics), rows

        inputs: tuple[Layout, ...] = (spec.places, "replicated", "replicated", "split")
        return self._task.strategy.compile(eval_step, inputs=inputs, outputs=("replicated", "replicated", "split"), donate=(2,))

    def _evaluate_group(self, spec: "_FunctionSpec") -> Compiled:
        def eval_group(leaves: list[Any], key: jax.Array, sums: Sums, count: jax.Array, batches: Batch) -> Any:
            form, size = self._form_of(False), batches.mask.shape[0]
            params, model_state = jax.tree.unflatten(spec.treedef, leaves)

            def one(index: Any, sums: Sums) -> Any:
                new_sums, rows = self._task.eval_step(params, model_state, key, form.unpack(sums), _batch_at(batches, index))
                return form.pack(new_sums), rows

            def body(index: jax.Array, carry: Any) -> Any:
                sums, rows = carry
                sums, new_rows = one(index, sums)
                return sums, _set_at(rows, new_rows, index)

            _, rows = jax.eval_shape(one, _INDEX, sums)
            sums, rows = lax.fori_loop(0, count, body, (sums, _zeros(rows, size)))
            return sums, as_vector([], form.unpack(sums).metrics), rows

        inputs: tuple[Layout, ...] = (spec.places, "replicated", "replicated", "replicated", "group")
        return self._task.strategy.compile(eval_group, inputs=inputs, outputs=("replicated", "replicated", "group"), donate=(2,))

    def _predict(self, spec: "_FunctionSpec") -> Compiled:
        def predict_step(leaves: list[Any], key: jax.Array, index: jax.Array, x: PyTree) -> Any:
            params, model_state = jax.tree.unflatten(spec.treedef, leaves)
            return Returned.of(self._task.predict_step(params, model_state, key, index, x))

        return self._task.strategy.compile(predict_step, inputs=(spec.places, "replicated", "replicated", "split"), outputs="split")

    def _predict_group(self, spec: "_FunctionSpec") -> Compiled:
        def predict_group(leaves: list[Any], key: jax.Array, first: jax.Array, count: jax.Array, xs: PyTree) -> Any:
            params, model_state = jax.tree.unflatten(spec.treedef, leaves)

            def one(index: Any) -> Any:
                return Returned.of(self._task.predict_step(params, model_state, key, first + index, _batch_at(xs, index)))

            size = jax.tree.leaves(xs)[0].shape[0]
            return lax.fori_loop(0, count, lambda index, outputs: _set_at(outputs, one(index), index), _zeros(jax.eval_shape(one, _INDEX), size))

        inputs: tuple[Layout, ...] = (spec.places, "replicated", "replicated", "replicated", "group")
        return self._task.strategy.compile(predict_group, inputs=inputs, outputs="group")


def train_kind(strategy: Strategy, count: int, size: int) -> str:
    """Returns the kind of compiled function for `count` updates in a call of at most `size`."""
    if size == 1:
        return "train"
    return "train whole group" if count == size and strategy.prefers_counted_loops else "train group"


class _FunctionSpec(NamedTuple):
    """What a compiled function is for; `treedef` and `places` are the structure and the placement of the state."""

    kind: str
    treedef: Any
    places: Layout
    keep: Keep


_INDEX = jax.ShapeDtypeStruct((), np.int32)


def _batch_at(batches: PyTree, index: Any) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), batches)


def _set_at(group: PyTree, one: PyTree, index: Any) -> PyTree:
    return jax.tree.map(functools.partial(lax.dynamic_update_index_in_dim, index=index, axis=0), group, one)


def _zeros(shapes: PyTree, steps: int | None = None) -> PyTree:
    lead = () if steps is None else (steps,)
    return jax.tree.map(lambda leaf: jax.numpy.zeros((*lead, *leaf.shape), leaf.dtype), shapes)
