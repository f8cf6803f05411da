"""The live state of a run, and the form in which it goes from one compiled call to the next."""

import dataclasses
from typing import Any, NamedTuple, cast

import jax

from fitflax.errors import NotReadyError
from fitflax.parallel import Strategy
from fitflax.parallel.packed import Packed
from fitflax.state import PyTree, TrainState

__all__ = ["Carry", "LiveState", "Sums"]

# From here on fresh memory costs more than waiting for a step: XLA takes it page by page, `host_copy` in huge pages.
_LARGE_BYTES = 2**26

Sums = dict[str, jax.Array]
"""Packed sums of an epoch or an evaluation; see `Form`."""


class Carry(NamedTuple):
    """A state in the form in which it goes from call to call: without the key, which never changes, and without structure.

    Typed keys, and the objects of a tree, would be made anew from what every single call returns.

    Attributes:
        leaves: The arrays of all but the key.
        treedef: Their structure: a `TrainState` with `()` for its key.
        key: The key.
    """

    leaves: list[Any]
    treedef: Any
    key: Any

    @classmethod
    def of(cls, state: TrainState) -> "Carry":
        """Returns the form of a state of arrays or shapes."""
        leaves, treedef = jax.tree.flatten(dataclasses.replace(state, key=()))  # type: ignore[arg-type]
        return cls(leaves, treedef, state.key)

    def state(self) -> TrainState:
        """Returns the state."""
        return dataclasses.replace(cast(TrainState, jax.tree.unflatten(self.treedef, self.leaves)), key=self.key)


class LiveState:
    """The newest state of a run: the one object that is replaced at every step, its buffers reused by the next one.

    Whatever is handed to users must not change under them. `lend` gives the state itself, and has it copied before the next step takes its buffers;
    `borrow` gives it for use before that step only.

    Args:
        strategy: Copies.
        state: A state on the devices, owned by this object from now on.
        step: `state.step`, known on the host.
    """

    def __init__(self, strategy: Strategy, state: TrainState, step: int) -> None:
        self.strategy = strategy
        self._carry = Carry.of(state)
        self._state: TrainState | None = state  # Made from the carry when somebody asks.
        self._is_lent = False
        self._is_large: bool | None = None  # Not yet known.
        self.step = step
        self.version = 0

    def borrow(self) -> TrainState:
        """Returns the state; it must not be kept beyond the next step."""
        if not self.is_intact:
            raise NotReadyError("The state was lost: a step failed after it had taken the state's buffers. Restore a checkpoint.")
        if self._state is None:
            self._state = self._carry.state()
        return self._state

    def lend(self) -> TrainState:
        """Returns the state; it stays valid whatever happens to this object."""
        self._is_lent = True
        return self.borrow()

    @property
    def carry(self) -> Carry:
        """The state as it goes from call to call; to be looked at only, `take` is for a call that consumes it."""
        return self._carry

    def copy(self, tree: PyTree) -> PyTree:
        """Returns a copy of a part of the state."""
        return self.strategy.copy(tree)

    def snapshot(self, tree: PyTree) -> Packed:
        """Returns a copy of arrays beside the state, or of the state, that is made without waiting and that later steps cannot touch."""
        return self.strategy.copy_once(tree)

    @property
    def snapshots_wait(self) -> bool:
        """Whether the state is to be copied to the host at once: a device may be too small for another, or for what is split; and a large copy is faster."""
        if self._is_large is None:
            leaves = self._carry.leaves
            self._is_large = sum(leaf.nbytes for leaf in leaves) > _LARGE_BYTES or not all(leaf.is_fully_replicated for leaf in leaves)
        return self._is_large or not self.strategy.is_on_host

    @property
    def is_intact(self) -> bool:
        """Whether no failed step has taken the state's buffers."""
        return not any(leaf.is_deleted() for leaf in self._carry.leaves)

    def take(self) -> Carry:
        """Returns the state for a call that consumes its buffers; a lent one is copied first."""
        if self._is_lent:
            self._carry = self._carry._replace(leaves=self.strategy.copy(self._carry.leaves))
            self._state = None
            self._is_lent = False
        return self._carry

    def advance(self, carry: Carry, steps: int = 1) -> None:
        """Takes the state after more updates."""
        self._carry = carry
        self._state = None
        self._is_lent = False
        self.step += steps
        self.version += 1

    def release(self) -> None:
        """Lets go of the state, until `replace` gives another one; those to whom it was lent keep it."""
        self._state = TrainState(step=(), params=(), model_state={}, opt_state=(), key=())  # type: ignore[arg-type]
        self._carry = Carry.of(self._state)
        self._is_lent = False
        self.version += 1

    def replace(self, state: TrainState, step: int) -> None:
        """Takes another state, such as one with another learning rate; what is new in it must lie on the devices and be nobody else's."""
        self._carry, self._state = Carry.of(state), state
        self.step = step
        self.version += 1
