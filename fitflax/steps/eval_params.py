"""The parameters for evaluation: averaged ones, or those that a function gets from the optimizer state.

The function is a custom one, or that of optax's schedule-free optimizers, which are found in the optimizer state.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fitflax.errors import FitflaxError, OptimizerError, is_of_debugger
from fitflax.parallel.base import Compiled
from fitflax.state import PyTree, TrainState
from fitflax.steps.state_structure import state_faults
from fitflax.steps.step_functions import Task

__all__ = ["EvalParams", "EvalParamsFn", "find_eval_params", "schedule_free_eval_params"]

EvalParamsFn = Callable[[PyTree, PyTree], PyTree]
"""`(opt_state, params) -> params`."""


class EvalParams:
    """Returns the parameters of a state for evaluation. `custom` gets the optimizer state and the parameters; `None` if there is no such function."""

    def __init__(self, task: Task, custom: EvalParamsFn | None) -> None:
        self.custom, self._task, self._strategy, self._is_scaled = custom, task, task.strategy, task.numerics.is_scaled
        self._found: bool | None = None  # Whether the optimizer state has schedule-free parts.
        self._compiled: dict[Any, Compiled] = {}  # By placement of the state.

    def __call__(self, state: TrainState) -> PyTree:
        """Returns the parameters for evaluation: those that `custom` returns, or the averaged ones if there are any."""
        function = self.function_of(state)
        if function is None:
            return state.params if state.ema_params is None else state.ema_params
        opt_state = self._opt_state_of(state)
        inputs = self._strategy.places(opt_state), self._strategy.places(state.params)
        if inputs not in self._compiled:
            self._compiled[inputs] = self._strategy.compile(_with_named_errors(function, self._task), inputs=inputs, outputs=inputs[1])
        return self._compiled[inputs](opt_state, state.params)

    def function_of(self, state: TrainState) -> EvalParamsFn | None:
        """Returns the function that gets the parameters for evaluation from the optimizer state; `None` if they do not depend on it."""
        if not jax.tree.leaves(state.opt_state):  # An InferenceState already has them.
            return None
        if self._found is None:  # The structure of the optimizer state is the same for all states of a program.
            self._found = bool(_schedule_free_states(self._opt_state_of(state)))
        return schedule_free_eval_params if self.custom is None and state.ema_params is None and self._found else self.custom

    def _opt_state_of(self, state: TrainState) -> PyTree:
        return state.opt_state.inner_state if self._is_scaled else state.opt_state


def find_eval_params(optimizer: optax.GradientTransformation) -> EvalParamsFn | None:
    """Returns the function for an optimizer that contains `optax.contrib.schedule_free`; `None` for others.

    >>> find_eval_params(optax.chain(optax.clip(1.0), optax.contrib.schedule_free_sgd(0.1))).__name__
    'schedule_free_eval_params'
    >>> find_eval_params(optax.adam(0.1)) is None
    True
    """
    try:
        opt_state = jax.eval_shape(optimizer.init, {"w": jax.ShapeDtypeStruct((1,), jnp.float32)})
    except Exception:  # noqa: BLE001 (labels of other parameters, for example; found when the state is known)
        return None
    return schedule_free_eval_params if _schedule_free_states(opt_state) else None


def schedule_free_eval_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the parameters for evaluation of all schedule-free optimizers in a state, each of which may train only some of the parameters."""
    for state in _schedule_free_states(opt_state):

        def one(z: Any, part: Any, state: Any = state) -> Any:
            if _is_masked(z):
                return part
            return optax.contrib.schedule_free_eval_params(state._replace(z=z), part).astype(part.dtype)

        params = jax.tree.map(one, state.z, params, is_leaf=_is_masked)
    return params


def _schedule_free_states(opt_state: PyTree) -> list[Any]:
    return [node for node in jax.tree.leaves(opt_state, is_leaf=_is_schedule_free) if _is_schedule_free(node)]


def _is_schedule_free(node: Any) -> bool:
    return isinstance(node, optax.contrib.ScheduleFreeState)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _with_named_errors(eval_params: EvalParamsFn, task: Task) -> EvalParamsFn:
    """Wraps an `eval_params` so that its errors are named, and so that it gets one member of an ensemble."""

    def evaluated(opt_state: PyTree, params: PyTree) -> PyTree:
        name = getattr(eval_params, "__name__", repr(eval_params))
        try:
            found = task.map_members(eval_params)(opt_state, params)
        except Exception as error:
            if is_of_debugger(error) or isinstance(error, FitflaxError):
                raise
            is_found = eval_params is not schedule_free_eval_params and _schedule_free_states(opt_state)
            hint = " Leave eval_params out: schedule-free optimizers are found in the state." if is_found else ""
            raise OptimizerError(
                f"compile(eval_params={name}) failed on the state of this optimizer, a {type(opt_state).__name__}, when called as {name}(opt_state, params): "
                f"{type(error).__name__}: {error}.{hint}"
            ) from error
        faults = state_faults(params, found)
        if faults:
            raise OptimizerError(f"compile(eval_params={name}) must return parameters like the trained ones. Differences: {faults}.")
        # Copied, because steps donate the state's own buffers.
        return jax.tree.map(jnp.copy, found)

    return evaluated
