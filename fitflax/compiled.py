"""A task's steps as compiled functions of few arrays, one for each structure of the state, compiled ahead of the first call where that can be known."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from fitflax.compilation import AheadOfTime, Compilation
from fitflax.live import Carry, Sums
from fitflax.parallel.base import Compiled, Layout
from fitflax.parallel.packed import Form
from fitflax.state import Batch, PyTree
from fitflax.step import NOTHING, Keep, Task

__all__ = ["CompiledSteps"]

# State, sums, values, rows, what is kept.
_TRAIN_OUTPUTS: tuple[Layout, ...] = ("replicated", "replicated", "replicated", "split", "replicated")


class CompiledSteps:
    """The compiled functions of a task, by kind.

    `"init"`, of no structure yet, takes a key and a batch. All others take a carry's leaves and key first, then packed sums where there are any. What
    follows, by kind:

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
        # By kind, structure of the state and what is kept.
        self._functions: dict[tuple[str, Any, Keep], Compiled] = {}
        self._last: dict[str, tuple[Any, Keep, Compiled]] = {}
        self._ahead = AheadOfTime()
        # How long callers have waited for what was being compiled.
        self.seconds_waited = 0.0

    def get(self, kind: str, treedef: Any, *, keep: Keep = NOTHING) -> Compiled:
        """Returns a function for states of one structure, to be called."""
        last = self._last.get(kind)
        if last is not None and last[0] is treedef and last[1] is keep:  # Comparing large structures takes longer than many a step.
            return last[2]
        name = kind, treedef, keep
        begin = time.perf_counter()
        self._ahead.wait(name)
        self.seconds_waited += time.perf_counter() - begin
        function = self._make(*name)
        self._last[kind] = (treedef, keep, function)
        return function

    def lower(self, kind: str, treedef: Any, *arguments: Any, keep: Keep = NOTHING) -> jax.stages.Lowered | None:
        """Traces a function for shapes with their places, which finds faults; returns what `begin` takes, `None` where nothing can be compiled ahead."""
        function = self._make(kind, treedef, keep)
        if not self._task.strategy.compiles_ahead:
            jax.eval_shape(function, *jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments))
            return None
        return function.lower(*arguments)

    def begin(self, kind: str, treedef: Any, lowered: jax.stages.Lowered | None, *, keep: Keep = NOTHING) -> Compilation | None:
        """Has what was lowered compiled in a thread, which is returned; `get` waits for it."""
        if lowered is None:
            return None
        self._last.pop(kind, None)
        return self._ahead.start((kind, treedef, keep), lowered)

    def _make(self, kind: str, treedef: Any, keep: Keep) -> Compiled:
        name = kind, treedef, keep
        if name not in self._functions:
            makers: dict[str, Callable[[Any, Keep], Compiled]] = {
                "init": self._init,
                "train": self._train,
                "train group": self._train_group,
                "train whole group": functools.partial(self._train_group, is_whole=True),
                "evaluate": self._evaluate,
                "evaluate group": self._evaluate_group,
                "predict": self._predict,
                "predict group": self._predict_group,
            }
            self._functions[name] = makers[kind](treedef, keep)
        return self._functions[name]

    def _init(self, _: Any, __: Keep) -> Compiled:
        return self._task.strategy.compile(self._task.init_state, inputs=("replicated", "split"), outputs="replicated")

    def _train(self, treedef: Any, keep: Keep) -> Compiled:
        def train_step(leaves: list[Any], key: jax.Array, sums: Sums, batch: Batch) -> Any:
            form = self._form_of(True)
            result = self._task.train_step(Carry(leaves, treedef, key).state(), form.unpack(sums), batch, keep=keep)
            return Carry.of(result[0]).leaves, form.pack(result[1]), *result[2:]

        inputs: tuple[Layout, ...] = ("replicated", "replicated", "replicated", "split")
        return self._task.strategy.compile(train_step, inputs=inputs, outputs=_TRAIN_OUTPUTS, donate=(0, 2))

    def _train_group(self, treedef: Any, keep: Keep, *, is_whole: bool = False) -> Compiled:
        def train_group(leaves: list[Any], key: jax.Array, sums: Sums, count: jax.Array, batches: Batch) -> Any:
            form, size = self._form_of(True), batches.mask.shape[0]

            def one(index: Any, leaves: list[Any], sums: Any) -> Any:
                result = self._task.train_step(Carry(leaves, treedef, key).state(), sums, _at(batches, index), keep=keep)
                return Carry.of(result[0]).leaves, *result[1:]

            def body(index: jax.Array, carry: Any) -> Any:
                leaves, sums, _, vectors, rows = carry
                leaves, sums, vector, new_rows, kept = one(index, leaves, sums)
                return leaves, sums, (vector, kept), _put(vectors, vector, index), _put(rows, new_rows, index)

            unpacked = form.unpack(sums)
            _, _, vector, rows, kept = jax.eval_shape(one, _INDEX, leaves, unpacked)
            begin = (leaves, unpacked, _zeros((vector, kept)), _zeros(vector, size), _zeros(rows, size))
            leaves, unpacked, (vector, kept), vectors, rows = lax.fori_loop(0, size if is_whole else count, body, begin)
            return leaves, form.pack(unpacked), (vector, vectors), rows, kept

        inputs: tuple[Layout, ...] = ("replicated", "replicated", "replicated", "replicated", "split")
        return self._task.strategy.compile(train_group, inputs=inputs, outputs=_TRAIN_OUTPUTS, donate=(0, 2))

    def _evaluate(self, treedef: Any, _: Keep) -> Compiled:
        def eval_step(leaves: list[Any], key: jax.Array, sums: Sums, batch: Batch) -> Any:
            form = self._form_of(False)
            params, model_state = jax.tree.unflatten(treedef, leaves)
            new_sums, *rest = self._task.eval_step(params, model_state, key, form.unpack(sums), batch)
            return form.pack(new_sums), *rest

        inputs: tuple[Layout, ...] = ("replicated", "replicated", "replicated", "split")
        return self._task.strategy.compile(eval_step, inputs=inputs, outputs=_EVAL_OUTPUTS, donate=(2,))

    def _evaluate_group(self, treedef: Any, _: Keep) -> Compiled:
        def eval_group(leaves: list[Any], key: jax.Array, sums: Sums, count: jax.Array, batches: Batch) -> Any:
            form, size = self._form_of(False), batches.mask.shape[0]
            params, model_state = jax.tree.unflatten(treedef, leaves)

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

        inputs: tuple[Layout, ...] = ("replicated", "replicated", "replicated", "replicated", "split")
        return self._task.strategy.compile(eval_group, inputs=inputs, outputs=_EVAL_OUTPUTS, donate=(2,))

    def _predict(self, treedef: Any, _: Keep) -> Compiled:
        def predict_step(leaves: list[Any], key: jax.Array, index: jax.Array, x: PyTree) -> Any:
            params, model_state = jax.tree.unflatten(treedef, leaves)
            return self._task.predict_step(params, model_state, key, index, x)

        return self._task.strategy.compile(predict_step, inputs=("replicated", "replicated", "replicated", "split"), outputs="split")

    def _predict_group(self, treedef: Any, _: Keep) -> Compiled:
        def predict_group(leaves: list[Any], key: jax.Array, first: jax.Array, count: jax.Array, xs: PyTree) -> Any:
            params, model_state = jax.tree.unflatten(treedef, leaves)

            def one(index: Any) -> Any:
                return self._task.predict_step(params, model_state, key, first + index, _at(xs, index))

            size = jax.tree.leaves(xs)[0].shape[0]
            return lax.fori_loop(0, count, lambda index, outputs: _put(outputs, one(index), index), _zeros(jax.eval_shape(one, _INDEX), size))

        inputs: tuple[Layout, ...] = ("replicated", "replicated", "replicated", "replicated", "split")
        return self._task.strategy.compile(predict_group, inputs=inputs, outputs="split")


_EVAL_OUTPUTS: tuple[Layout, ...] = ("replicated", "replicated", "split")
_INDEX = jax.ShapeDtypeStruct((), np.int32)


def _at(batches: PyTree, index: Any) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), batches)


def _put(group: PyTree, one: PyTree, index: Any) -> PyTree:
    return jax.tree.map(functools.partial(lax.dynamic_update_index_in_dim, index=index, axis=0), group, one)


def _zeros(shapes: PyTree, steps: int | None = None) -> PyTree:
    lead = () if steps is None else (steps,)
    return jax.tree.map(lambda leaf: jax.numpy.zeros((*lead, *leaf.shape), leaf.dtype), shapes)
