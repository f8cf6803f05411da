"""The live state of a run, and the form in which compiled calls take and return it."""

import dataclasses
import functools
import gc
import weakref
from typing import Any, NamedTuple, cast

import jax

from fitflax.errors import NotReadyError
from fitflax.parallel import Strategy
from fitflax.parallel.packed import Packed
from fitflax.state import PyTree, TrainState

__all__ = ["Carry", "LiveState", "Sums", "collect_dropped"]

# Above this size, fresh memory costs more than waiting for a step: XLA allocates it for each copy, while `host_copy` reuses memory.
_LARGE_BYTES = 2**26

# Includes states of trainers that are no longer referenced: trainers are in reference cycles, which only the garbage collector frees.
_live_states: "weakref.WeakSet[LiveState]" = weakref.WeakSet()

Sums = dict[str, jax.Array]
"""Packed sums of an epoch or an evaluation; see `Form`."""


class Carry(NamedTuple):
    """A state as compiled calls take and return it: flattened, and without the key, which never changes.

    Otherwise each call would create typed keys and the objects of a tree again.
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


class _CopyTraits(NamedTuple):
    """Properties that decide how a state is copied, the same for all states of a run."""

    is_large: bool
    is_split: bool


def collect_dropped(kept: "LiveState | None") -> None:
    """Runs the garbage collector if there may be large states of dropped trainers, because Python does not know how much device memory they use.

    So a notebook cell that creates the same trainer again and again has only one state at a time. States that were in use at the last collection, and
    `kept`, do not cause another one.
    """
    if any(live is not kept and live.is_large and not live.was_held for live in tuple(_live_states)):
        gc.collect()
        for live in tuple(_live_states):
            live.was_held = True


class LiveState:
    """The newest state of a run, owned by this object. Each step replaces it and reuses its buffers.

    What users get must not change: `lend` returns the state, and the next step works on a copy. `borrow` returns it for use before the next step
    only.
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

    def copy(self, tree: PyTree) -> PyTree:
        """Returns a copy of a part of the state."""
        return self.strategy.copy(tree)

    def snapshot(self, tree: PyTree) -> Packed:
        """Returns a copy of arrays, made without waiting, that later steps cannot change."""
        return self.strategy.copy_once(tree)

    @property
    def is_large(self) -> bool:
        """Whether there should be only one copy of the state at a time."""
        return self._copy_traits.is_large

    @property
    def is_copied_by_device(self) -> bool:
        """Whether to copy the state with `snapshot`: not on accelerators, which may have too little memory, nor if it is sharded or large."""
        return self.strategy.is_on_host and not self._copy_traits.is_large and not self._copy_traits.is_split

    @property
    def snapshots_wait(self) -> bool:
        """Whether a copy of the state waits for steps in flight: if the host makes it, or shards are copied."""
        return self._copy_traits.is_split or (self.strategy.is_on_host and self._copy_traits.is_large)

    @functools.cached_property
    def _copy_traits(self) -> _CopyTraits:
        leaves = self._carry.leaves
        return _CopyTraits(sum(leaf.nbytes for leaf in leaves) > _LARGE_BYTES, not all(leaf.is_fully_replicated for leaf in leaves))

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
        """Sets the state after `steps` more updates."""
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
        self.step = step
        self.version += 1
