"""The newest state of a run, its form for compiled calls, its parameters for evaluation, and checks that a step keeps its structure."""

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from fitflax.errors import FitflaxError, ModelError, NotReadyError, OptimizerError, is_of_debugger
from fitflax.leaves import is_key
from fitflax.models import TRANSIENT
from fitflax.parallel import Strategy
from fitflax.parallel.strategy import Compiled
from fitflax.state import PyTree, TrainState, state_faults

# Above this size, fresh memory costs more than waiting for a step: XLA allocates it for each copy, while `host_copy` reuses memory.
_LARGE_BYTES = 2**26

# Includes states of trainers that are no longer referenced: trainers are in reference cycles, which only the garbage collector frees.
_live_states: "weakref.WeakSet[LiveState]" = weakref.WeakSet()

Sums = dict[str, jax.Array]
"""Packed sums of an epoch or an evaluation; see `Form`."""


class Carry(NamedTuple):
    """A state as compiled calls take and return it: flattened, and without the key, which never changes.

    This saves creating typed keys and the objects of the tree at each call.
    """

    leaves: list[Any]  # Arrays of the state without the key.
    treedef: Any  # Structure of a `TrainState` with `()` for its key.
    key: Any

    @classmethod
    def of(cls, state: TrainState) -> "Carry":
        """Returns the carry of a state of arrays or shapes."""
        leaves, treedef = jax.tree.flatten(dataclasses.replace(state, key=()))  # type: ignore[arg-type]
        return cls(leaves, treedef, state.key)

    def state(self) -> TrainState:
        """Returns the state."""
        return dataclasses.replace(cast(TrainState, jax.tree.unflatten(self.treedef, self.leaves)), key=self.key)


def collect_dropped(kept: "LiveState | None") -> None:
    """Runs the garbage collector if there may be large states of dropped trainers, because Python does not count their device memory.

    So a notebook cell that is run repeatedly and creates a trainer each time has only one state in memory. States that were in use at the last collection, and
    `kept`, do not cause another one.
    """
    if any(live is not kept and live.is_large and not live.was_held for live in tuple(_live_states)):
        gc.collect()
        for live in tuple(_live_states):
            live.was_held = True


class LiveState:
    """The newest state of a run, owned by this object. Each step replaces it and reuses its buffers.

    States that users get must not change: after `lend`, the next step works on a copy. `borrow` returns the state only for use before the next step.
    """

    def __init__(self, strategy: Strategy, state: TrainState, step: int) -> None:
        self.strategy = strategy
        self._carry = Carry.of(state)
        self._state: TrainState | None = state  # Created from the carry when it is needed.
        self._is_lent = False
        self.step = step
        self.version = 0
        self.was_held = False  # Whether it was in use at the last collection of `collect_dropped`.
        _live_states.add(self)

    def borrow(self) -> TrainState:
        """Returns the state, which must not be used after the next step; raises `NotReadyError` if a failed step has taken its buffers."""
        if not self.is_intact:
            raise NotReadyError("The state was lost, because a step failed while it was updating the state in place. Restore a checkpoint.")
        if self._state is None:
            self._state = self._carry.state()
        return self._state

    def lend(self) -> TrainState:
        """Returns the state, which stays valid."""
        self._is_lent = True
        return self.borrow()

    @property
    def carry(self) -> Carry:
        """The state as compiled calls take it, only for inspection; `take` returns it for a call that consumes it."""
        return self._carry

    @functools.cached_property
    def is_large(self) -> bool:
        """Whether there should be only one copy of the state at a time."""
        return bool(sum(leaf.nbytes for leaf in self._carry.leaves) > _LARGE_BYTES)

    @functools.cached_property
    def _is_split(self) -> bool:
        return not all(leaf.is_fully_replicated for leaf in self._carry.leaves)

    @property
    def is_copied_packed(self) -> bool:
        """Whether to copy the state by `Strategy.copy_once`: if it is small, whole, and on the host."""
        return self.strategy.is_on_host and not self.is_large and not self._is_split

    @property
    def snapshots_wait(self) -> bool:
        """Whether a copy of the state to the host waits for steps in flight: if the host makes it, or shards are copied."""
        return self._is_split or (self.strategy.is_on_host and self.is_large)

    @property
    def is_intact(self) -> bool:
        """Whether no failed step has taken the state's buffers."""
        return not any(leaf.is_deleted() for leaf in self._carry.leaves)

    def take(self) -> Carry:
        """Returns the state for a call that consumes its buffers; a lent state is copied first."""
        if self._is_lent:
            self._carry = self._carry._replace(leaves=self.strategy.copy(self._carry.leaves))
            self._state, self._is_lent = None, False
        return self._carry

    def advance(self, carry: Carry, steps: int = 1) -> None:
        """Sets the state after `steps` more steps."""
        self._carry, self._state, self._is_lent = carry, None, False
        self.step += steps
        self.version += 1

    def release(self) -> None:
        """Releases the state until `replace` sets another one; lent states stay valid."""
        self._state = TrainState(step=(), params=(), model_state={}, opt_state=(), key=())  # type: ignore[arg-type]
        self._carry = Carry.of(self._state)
        self._is_lent = False
        self.version += 1

    def replace(self, state: TrainState, step: int) -> None:
        """Sets another state, such as one with another learning rate; new arrays in it must be on the devices and not be used elsewhere."""
        self._carry, self._state = Carry.of(state), state
        for name in ("is_large", "_is_split"):  # The new state may have other arrays or placements.
            vars(self).pop(name, None)
        self.step = step
        self.version += 1


EvalParamsFn = Callable[[PyTree, PyTree], PyTree]
"""`(opt_state, params) -> params`."""


class EvalParams:
    """Returns the parameters of a state for evaluation: averaged ones, or those that a function gets from the optimizer state.

    `custom` is such a function, or `None`; schedule-free optimizers of optax are found in the state. `map_members` applies a function to each member
    of an ensemble, and `is_scaled` is whether the optimizer state has a loss scale.
    """

    def __init__(self, strategy: Strategy, custom: EvalParamsFn | None, map_members: Callable[[EvalParamsFn], EvalParamsFn], *, is_scaled: bool) -> None:
        self.custom, self._strategy, self._map_members, self._is_scaled = custom, strategy, map_members, is_scaled
        self._is_schedule_free: bool | None = None  # Whether the optimizer state has schedule-free parts.
        self._compiled: dict[Any, Compiled] = {}  # By placement of the state.

    def __call__(self, state: TrainState) -> PyTree:
        """Returns the parameters for evaluation: those that `custom` returns, or the averaged ones if there are any."""
        function = self.function_of(state)
        if function is None:
            return state.params if state.ema_params is None else state.ema_params
        opt_state = self._opt_state_of(state)
        inputs = self._strategy.places(opt_state), self._strategy.places(state.params)
        if inputs not in self._compiled:
            self._compiled[inputs] = self._strategy.compile(functools.partial(self._evaluated, function), inputs=inputs, outputs=inputs[1])
        return self._compiled[inputs](opt_state, state.params)

    def function_of(self, state: TrainState) -> EvalParamsFn | None:
        """Returns the function that gets the parameters for evaluation from the optimizer state; `None` if they do not depend on it."""
        if type(state.opt_state) is tuple and not state.opt_state:  # An InferenceState already has them, and an optimizer without a state has no averages.
            return None
        if self._is_schedule_free is None:  # The structure of the optimizer state is the same for all states of a program.
            self._is_schedule_free = bool(_schedule_free_states(self._opt_state_of(state)))
        return schedule_free_eval_params if self.custom is None and state.ema_params is None and self._is_schedule_free else self.custom

    def name_of(self, state: TrainState) -> str | None:
        """Returns the name of that function, or of its class."""
        function = self.function_of(state)
        return None if function is None else getattr(function, "__name__", type(function).__name__)

    def _opt_state_of(self, state: TrainState) -> PyTree:
        return state.opt_state.inner_state if self._is_scaled else state.opt_state

    def _evaluated(self, eval_params: EvalParamsFn, opt_state: PyTree, params: PyTree) -> PyTree:
        name = getattr(eval_params, "__name__", repr(eval_params))
        try:
            evaluated = self._map_members(eval_params)(opt_state, params)
        except Exception as error:
            if is_of_debugger(error) or isinstance(error, FitflaxError):
                raise
            is_found = eval_params is not schedule_free_eval_params and _schedule_free_states(opt_state)
            hint = " Leave eval_params out: schedule-free optimizers are found in the state." if is_found else ""
            raise OptimizerError(
                f"compile(eval_params={name}) failed on the state of this optimizer, a {type(opt_state).__name__}, when called as {name}(opt_state, params): "
                f"{type(error).__name__}: {error}.{hint}"
            ) from error
        if faults := state_faults(params, evaluated):
            raise OptimizerError(f"compile(eval_params={name}) must return parameters like the trained ones. Differences: {faults}.")
        return jax.tree.map(jnp.copy, evaluated)  # Copied, because steps donate the state's own buffers.


def find_eval_params(optimizer: optax.GradientTransformation) -> EvalParamsFn | None:
    """Returns the function for an optimizer that contains `optax.contrib.schedule_free`; `None` for others.

    >>> find_eval_params(optax.chain(optax.clip(1.0), optax.contrib.schedule_free_sgd(0.1))).__name__
    'schedule_free_eval_params'
    >>> find_eval_params(optax.adam(0.1)) is None
    True
    """
    try:
        opt_state = jax.eval_shape(optimizer.init, {"w": jax.ShapeDtypeStruct((1,), jnp.float32)})
    except Exception:  # noqa: BLE001 (for example, labels of other parameters; the optimizer is then found in the state)
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
    def is_found(node: Any) -> bool:
        return isinstance(node, optax.contrib.ScheduleFreeState)

    return list(filter(is_found, jax.tree.leaves(opt_state, is_leaf=is_found)))


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def strong_types(tree: PyTree) -> PyTree:
    """Returns `tree` without weak types. Otherwise, the first update would remove them, and the step would be compiled twice."""
    return jax.tree.map(lambda leaf: leaf if is_key(leaf) else jax.lax.convert_element_type(leaf, leaf.dtype), tree)


def _sow_hint(old: TrainState, new: TrainState) -> str:
    """Returns a hint for collections that have other arrays or shapes after each call, as those of sown values do."""
    before, after = ({path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(state.model_state)} for state in (old, new))
    names = sorted({str(path[0].key) for path, shape in after.items() if before.get(path) != shape})
    if not names:
        return ""
    return f" If the module sows into {', '.join(map(repr, names))}, keep it out of the state: Trainer(transient={(*TRANSIENT, *names)})."


def same_types(new: TrainState, old: TrainState) -> TrainState:
    """Returns `new` after checking that it has the structure, shapes and dtypes of `old`."""
    new = strong_types(new)
    faults = state_faults(old, new)
    if faults:
        raise ModelError(f"A step must return a state with the same structure, shapes and dtypes. Differences: {faults}.{_sow_hint(old, new)}")
    # Containers may still differ (a FrozenDict for a dict), which would also compile the step again.
    return cast(TrainState, jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new)))
