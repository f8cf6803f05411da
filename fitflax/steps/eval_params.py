"""The parameters for evaluation: averaged ones, or those that a custom function gets from the optimizer state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fitflax.errors import OptimizerError, is_of_debugger
from fitflax.parallel.base import Compiled
from fitflax.state import PyTree, TrainState
from fitflax.steps.state_structure import state_faults
from fitflax.steps.step_functions import Task

__all__ = ["EvalParams"]


class EvalParams:
    """Returns the parameters of a state for evaluation. `custom` gets the optimizer state and the parameters; `None` if there is no such function."""

    def __init__(self, task: Task, custom: Callable[[PyTree, PyTree], PyTree] | None) -> None:
        self.custom, self._strategy, self._is_scaled = custom, task.strategy, task.numerics.is_scaled
        self._compiled: dict[Any, Compiled] = {}  # By placement of the state.

    def __call__(self, state: TrainState) -> PyTree:
        """Returns the parameters for evaluation: those that `custom` returns, or the averaged ones if there are any."""
        if self.custom is None or not jax.tree.leaves(state.opt_state):  # An InferenceState already has them.
            return state.params if state.ema_params is None else state.ema_params
        opt_state = state.opt_state.inner_state if self._is_scaled else state.opt_state
        inputs = self._strategy.places(opt_state), self._strategy.places(state.params)
        if inputs not in self._compiled:
            self._compiled[inputs] = self._strategy.compile(_with_named_errors(self.custom), inputs=inputs, outputs=inputs[1])
        return self._compiled[inputs](opt_state, state.params)


def _with_named_errors(eval_params: Callable[[PyTree, PyTree], PyTree]) -> Callable[[PyTree, PyTree], PyTree]:
    """Wraps a custom `eval_params` so that its errors are named."""

    def evaluated(opt_state: PyTree, params: PyTree) -> PyTree:
        name = getattr(eval_params, "__name__", repr(eval_params))
        try:
            found = eval_params(opt_state, params)
        except Exception as error:
            if is_of_debugger(error):
                raise
            raise OptimizerError(
                f"compile(eval_params={name}) failed on the state of this optimizer, a {type(opt_state).__name__}, when called as {name}(opt_state, params): "
                f"{type(error).__name__}: {error}"
            ) from error
        faults = state_faults(params, found)
        if faults:
            raise OptimizerError(f"compile(eval_params={name}) must return parameters like the trained ones. Differences: {faults}.")
        # Copied, because steps donate the state's own buffers.
        return jax.tree.map(jnp.copy, found)

    return evaluated
