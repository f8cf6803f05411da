"""A task's steps as compiled functions of few arrays, one for each structure of the state, compiled ahead of the first call where that can be known."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from fitflax.parallel.base import Compiled, Layout, Places
from fitflax.parallel.packed import Form
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps.compilation import AheadOfTime, Compilation
from fitflax.steps.live import Carry, Sums
from fitflax.steps.task import NOTHING, Keep, Task

__all__ = ["CompiledSteps"]


class CompiledSteps:
    """The compiled functions of a task, by kind.

    `"init"`, for the shapes of a state with their places, takes a key and a batch, and returns a state without key. All others take a carry's leaves and key
    first, then packed sums where there are any; a state comes out where it went in. What follows, by kind:

    * `"train"`: a batch; `"train group"`: a count, and batches with a leading axis of steps, of which so many are made.
    * `"evaluate"` and `"evaluate group"`: the same. The leaves are those of `(params, model_state)`.
    * `"predict"` and `"predict group"`: the index of the (first) batch, and its inputs; for a group a count between the two.
    * `"train whole group"`: the same function as `"train group"` for a count that is all of the leading axis, which is then known to the compiler.

    Of a group any number of steps is the same compiled loop, so that no rounding depends on where groups end; but for whole groups where they are a loop of
    their own.

    Args:
        task: What is computed.
        form_of: Returns how the sums of training (`True`) or of evaluation are packed, once that is known.
    """

    def __init__(self, task: Task, form_of: Callable[[bool], Form]) -> None:
        self._task = task
        self._form_of = form_of
        # By kind, structure of the state, where it lies, and what is kept.
        self._functions: dict[_Name, Compiled] = {}
        self._last: dict[str, tuple[Any, Keep, Compiled]] = {}
        self._ahead = AheadOfTime()
        # How long callers have waited for what was being compiled.
        self.seconds_waited = 0.0

    def get(self, kind: str, carry: Carry, *, keep: Keep = NOTHING) -> Compiled:
        """Returns a function for states like this one, to be called."""
        last = self._last.get(kind)
        if last is not None and last[0] is carry.treedef and last[1] is keep:  # Comparing large structures takes longer than many a step.
            return last[2]
        name = self._name(kind, carry, keep)
        begin = time.perf_counter()
        self._ahead.wait(name)
        self.seconds_waited += time.perf_counter() - begin
        function = self._make(name)
        self._last[kind] = (carry.treedef, keep, function)
        return function

    def traceable(self, kind: str, carry: Carry, *, keep: Keep = NOTHING) -> Compiled:
        """Returns a function for states like this one, for evaluating shapes; waits for nothing."""
        return self._make(self._name(kind, carry, keep))

    def lower(self, kind: str, carry: Carry, *arguments: Any, keep: Keep = NOTHING) -> jax.stages.Lowered:
        """Traces a function for shapes with their places, which finds faults; returns what `begin` takes."""
        return self._make(self._name(kind, carry, keep)).lower(*arguments)

    def begin(self, kind: str, carry: Carry, lowered: jax.stages.Lowered, *, keep: Keep = NOTHING) -> Compilation:
        """Has what was lowered compiled in a thread, which is returned; `get` waits for it."""
        self._last.pop(kind, None)
        return self._ahead.start(self._name(kind, carry, keep), lowered)

    def _name(self, kind: str, carry: Carry, keep: Keep) -> "_Name":
        return _Name(kind, carry.treedef, self._task.strategy.places(carry.leaves), keep)

    def _make(self, name: "_Name") -> Compiled:
        if name not in self._functions:
            makers: dict[str, Callable[[_Name], Compiled]] = {
                "init": self._init,
                "train": self._train,
                "train group": self._train_group,
                "train whole group": functools.partial(self._train_group, is_whole=True),
                "evaluate": self._evaluate,
                "evaluate group": self._evaluate_group,
                "predict": self._predict,
                "predict group": self._predict_group,
            }
            self._functions[name] = makers[name.kind](name)
        return self._functions[name]

    def _init(self, name: "_Name") -> Compiled:
        def init_state(key: jax.Array, batch: Batch) -> TrainState:
            return dataclasses.replace(self._task.init_state(key, batch), key=())  # type: ignore[arg-type]

        places = Places(jax.tree.unflatten(name.treedef, name.places.tree)) if isinstance(name.places, Places) else name.places
        return self._task.strategy.compile(init_state, inputs=("replicated", "split"), outputs=places)

    def _train(self, name: "_Name") -> Compiled:
        treedef, keep = name.treedef, name.keep

        def train_step(leaves: list[Any], key: jax.Array, sums: Sums, batch: Batch) -> Any:
            form = self._form_of(True)
            state, new_sums, vector, rows, kept = self._task.train_step(Carry(leaves, treedef, key).state(), form.unpack(sums), batch, keep=keep)
            return Carry.of(state).leaves, form.pack(new_sums), vector, rows, *kept

        inputs: tuple[Layout, ...] = (name.places, "replicated", "replicated", "split")
        return self._task.strategy.compile(train_step, inputs=inputs, outputs=self._train_outputs(name, "split"), donate=(0, 2))

    def _train_group(self, name: "_Name", *, is_whole: bool = False) -> Compiled:
        treedef, keep, strategy = name.treedef, name.keep, self._task.strategy

        def train_group(leaves: list[Any], key: jax.Array, sums: Sums, count: jax.Array, batches: Batch) -> Any:
            form, size = self._form_of(True), batches.mask.shape[0]

            def one(index: Any, leaves: list[Any], sums: Any) -> Any:
                result = self._task.train_step(Carry(leaves, treedef, key).state(), sums, _at(batches, index), keep=keep)
                return Carry.of(strategy.pin(result[0])).leaves, *result[1:]

            def body(index: jax.Array, carry: Any) -> Any:
                leaves, sums, _, rows = carry
                leaves, sums, vector, new_rows, kept = one(index, leaves, sums)
                return leaves, sums, (vector, kept), _put(rows, new_rows, index)

            unpacked = form.unpack(sums)
            _, _, vector, rows, kept = jax.eval_shape(one, _INDEX, leaves, unpacked)
            begin = (leaves, unpacked, _zeros((vector, kept)), _zeros(rows, size))
            leaves, unpacked, (vector, kept), rows = lax.fori_loop(0, size if is_whole else count, body, begin)
            return leaves, form.pack(unpacked), vector, rows, *kept

        inputs: tuple[Layout, ...] = (name.places, "replicated", "replicated", "replicated", "group")
        return strategy.compile(train_group, inputs=inputs, outputs=self._train_outputs(name, "group"), donate=(0, 2))

    def _train_outputs(self, name: "_Name", rows: Layout) -> tuple[Layout, ...]:
        """Returns the layouts of what training steps return: state, sums, values, rows, and the parts of `Kept`; a gradient lies where the parameters do."""
        grads: Layout = "replicated"
        if name.keep.grads and self._task.custom_step is None and isinstance(name.places, Places):
            grads = Places(jax.tree.unflatten(name.treedef, name.places.tree).params)
        return (name.places, "replicated", "replicated", rows, grads, "replicated", "replicated")

    def _evaluate(self, name: "_Name") -> Compiled:
        def eval_step(leaves: list[Any], key: jax.Array, sums: Sums, batch: Batch) -> Any:
            form = self._form_of(False)
            params, model_state = jax.tree.unflatten(name.treedef, leaves)
            new_sums, *rest = self._task.eval_step(params, model_state, key, form.unpack(sums), batch)
            return form.pack(new_sums), *rest

        inputs: tuple[Layout, ...] = (name.places, "replicated", "replicated", "split")
        return self._task.strategy.compile(eval_step, inputs=inputs, outputs=("replicated", "replicated", "split"), donate=(2,))

    def _evaluate_group(self, name: "_Name") -> Compiled:
        def eval_group(leaves: list[Any], key: jax.Array, sums: Sums, count: jax.Array, batches: Batch) -> Any:
            form, size = self._form_of(False), batches.mask.shape[0]
            params, model_state = jax.tree.unflatten(name.treedef, leaves)

            def one(index: Any, sums: Any) -> Any:
                return self._task.eval_step(params, model_state, key, sums, _at(batches, index))

            def body(index: jax.Array, carry: Any) -> Any:
                sums, _, rows = carry
                sums, vector, new_rows = one(index, sums)
                return sums, vector, _put(rows, new_rows, index)

            unpacked = form.unpack(sums)
            _, vector, rows = jax.eval_shape(one, _INDEX, unpacked)
            unpacked, vector, rows = lax.fori_loop(0, count, body, (unpacked, _zeros(vector), _zeros(rows, size)))
            return form.pack(unpacked), vector, rows

        inputs: tuple[Layout, ...] = (name.places, "replicated", "replicated", "replicated", "group")
        return self._task.strategy.compile(eval_group, inputs=inputs, outputs=("replicated", "replicated", "group"), donate=(2,))

    def _predict(self, name: "_Name") -> Compiled:
        def predict_step(leaves: list[Any], key: jax.Array, index: jax.Array, x: PyTree) -> Any:
            params, model_state = jax.tree.unflatten(name.treedef, leaves)
            return self._task.predict_step(params, model_state, key, index, x)

        return self._task.strategy.compile(predict_step, inputs=(name.places, "replicated", "replicated", "split"), outputs="split")

    def _predict_group(self, name: "_Name") -> Compiled:
        def predict_group(leaves: list[Any], key: jax.Array, first: jax.Array, count: jax.Array, xs: PyTree) -> Any:
            params, model_state = jax.tree.unflatten(name.treedef, leaves)

            def one(index: Any) -> Any:
                return self._task.predict_step(params, model_state, key, first + index, _at(xs, index))

            size = jax.tree.leaves(xs)[0].shape[0]
            return lax.fori_loop(0, count, lambda index, outputs: _put(outputs, one(index), index), _zeros(jax.eval_shape(one, _INDEX), size))

        inputs: tuple[Layout, ...] = (name.places, "replicated", "replicated", "replicated", "group")
        return self._task.strategy.compile(predict_group, inputs=inputs, outputs="group")


class _Name(NamedTuple):
    """What a compiled function is for.

    Attributes:
        kind: What it does.
        treedef: The structure of the state.
        places: Where its arrays lie.
        keep: What of a training step is kept.
    """

    kind: str
    treedef: Any
    places: Layout
    keep: Keep


_INDEX = jax.ShapeDtypeStruct((), np.int32)


def _at(batches: PyTree, index: Any) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), batches)


def _put(group: PyTree, one: PyTree, index: Any) -> PyTree:
    return jax.tree.map(functools.partial(lax.dynamic_update_index_in_dim, index=index, axis=0), group, one)


def _zeros(shapes: PyTree, steps: int | None = None) -> PyTree:
    lead = () if steps is None else (steps,)
    return jax.tree.map(lambda leaf: jax.numpy.zeros((*lead, *leaf.shape), leaf.dtype), shapes)
