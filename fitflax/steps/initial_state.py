"""The state at step 0: its shapes and placements, and its computation."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from fitflax.state import Batch, TrainState
from fitflax.steps.compiled_functions import CompiledSteps
from fitflax.steps.live_state import Carry
from fitflax.steps.step_functions import Task

__all__ = ["InitialState"]

# For states whose shapes need not be known.
_ANY_CARRY = Carry([], None, None)


class InitialState:
    """Computes the state at step 0 of a task from a key and the shapes of a batch, compiled unless `is_eager()`."""

    def __init__(self, task: Task, steps: CompiledSteps, is_eager: Callable[[], bool]) -> None:
        self._task, self._strategy = task, task.strategy
        self._steps, self._is_eager = steps, is_eager
        self._states: dict[Any, TrainState] = {}  # Shapes, by shapes of a batch and type of the key.

    def init(self, key: jax.Array, batch: Batch) -> TrainState:
        """Returns the state at step 0, on the devices."""
        key = self._strategy.put(key)
        if self._is_eager():
            return self._init_eagerly(key, batch)
        state = self._steps.get("init", self._carry(key, batch))(key, self._strategy.feed(batch))
        return dataclasses.replace(cast(TrainState, state), key=key)

    def _init_eagerly(self, key: jax.Array, batch: Batch) -> TrainState:
        """Returns the state at step 0, and caches its shapes."""
        with jax.disable_jit():
            run = self._strategy.trace(self._task.init_state, inputs=("replicated", "split"))
            state = cast(TrainState, run(key, self._strategy.feed(batch)))
        self._states[self._key_of(key, batch)] = self._strategy.abstract_state(state)
        return self._strategy.put_state(state)

    def _key_of(self, key: jax.Array, batch: Batch) -> Any:
        return str(self._strategy.abstract_feed(batch)), key.dtype

    def begin(self, key: jax.Array, batch: Batch) -> TrainState:
        """Returns the shapes of the state at step 0, and begins to compile `init` in a thread."""
        form = self._carry(key, batch)
        self._steps.begin("init", form, self._strategy.abstract_put(key), self._strategy.abstract_feed(batch))
        return self.shapes(key, batch)

    def shapes(self, key: jax.Array, batch: Batch) -> TrainState:
        """Returns the shapes and placements of the state at step 0, without computing anything."""
        seen = self._key_of(key, batch)
        if seen not in self._states and self._is_eager():
            zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), batch)
            self._init_eagerly(self._strategy.put(key), zeros)
        elif seen not in self._states:
            # If placements depend on shapes, these must be known before compilation; otherwise one trace is enough for both.
            whole, feed = self._is_replicated, self._strategy.abstract_feed(batch)
            init: Any = self._steps.traceable("init", _ANY_CARRY) if whole else self._strategy.trace(self._task.init_state, inputs=("replicated", "split"))
            state = jax.eval_shape(init, self._strategy.abstract_put(key), feed)
            self._states[seen] = self._strategy.abstract_state(dataclasses.replace(state, key=key))
        return self._states[seen]

    @property
    def _is_replicated(self) -> bool:
        return self._strategy.places(()) == "replicated"

    def _carry(self, key: jax.Array, batch: Batch) -> Carry:
        return _ANY_CARRY if self._is_replicated else Carry.of(self.shapes(key, batch))
