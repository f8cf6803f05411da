"""Copies of a run's state, which a save writes while the next steps replace the original."""

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from fitflax.checkpoints.memory import Arena, Loan, fetch, may_share
from fitflax.checkpoints.plain_tree import Plain, leaves_of, nested, only_split, to_plain
from fitflax.checkpoints.saver import Saver
from fitflax.errors import CheckpointError
from fitflax.parallel.placement import Form, Packed, copy_to_host_memory, has_host_memory, is_spread
from fitflax.state import PyTree, TrainState
from fitflax.steps.live_state import LiveState

_PIECE_BYTES = 2**24


class Snapshots:
    """The snapshots of a run's state at one step. All saves of the step at the same time share one.

    A large state has one snapshot at a time, in memory that is reused: while an earlier step is being written, the next one waits.
    """

    def __init__(self, live: LiveState, saver: Saver) -> None:
        self._live = live
        self._saver = saver
        self._version = live.version
        self._latest: weakref.ref[Callable[[], tuple[Plain, Plain]]] | None = None

    @property
    def _max_copies(self) -> int:
        """The maximum number of snapshots, each of a save that is being written or waits."""
        return 1 if self._live.is_large else 2

    def reserve(self) -> None:
        """Makes the saver's thread touch the memory for snapshots while training begins, because the kernel needs seconds to supply that of a large state."""
        if self._live.is_copied_by_device or not self._live.strategy.is_on_host:
            return
        arrays = (leaf for leaf in leaves_of(self._plain(self._live.borrow()).tree) if isinstance(leaf, (jax.Array, np.ndarray)))
        num_bytes = sum(_lent_bytes(array) for array in arrays if not is_spread(array) and _is_copied(array))
        if num_bytes:  # Before `lower_priority`, or it might not be done by the first save on a busy machine.
            self._saver.submit(functools.partial(_touch, self._saver.memory.lend(num_bytes, max_blocks=self._max_copies)), is_save=False)

    def wait_for_room(self) -> None:
        """Waits until a save of this step would neither block nor exceed the memory for snapshots."""
        if self._live.is_copied_by_device:
            self._saver.wait_for_room()
        else:
            self._saver.wait_for_room(lambda memory: memory.num_lent < self._max_copies or self._shared() is not None)

    def take(self, state: TrainState, extra: dict[str, PyTree]) -> Callable[[], tuple[Plain, Plain]]:
        """Returns a function that gives the state, and `extra` (other values that the next step changes) as part of `run`, as they are now."""
        snapshot = self._shared()
        if snapshot is None:
            snapshot = self._device_copy(state, extra) if self._live.is_copied_by_device else self._host_copy(state, extra)
            self._latest = weakref.ref(snapshot)  # Weak: it lives as long as the saves, not as long as the checkpoint, which users may keep.
        return snapshot

    def _shared(self) -> Callable[[], tuple[Plain, Plain]] | None:
        """Returns the snapshot that is still in use, unless a callback has replaced the state since."""
        if self._version != self._live.version:
            self._version, self._latest = self._live.version, None
        return None if self._latest is None else self._latest()

    def _plain(self, state: TrainState) -> Plain:
        """Returns what this process copies of a state: only process 0 copies what is not split."""
        train = to_plain(state, root="train", may_span=True)
        return only_split(train) if jax.process_index() else train

    def _device_copy(self, state: TrainState, extra: dict[str, PyTree]) -> Callable[[], tuple[Plain, Plain]]:
        packed = self._live.snapshot({"train": state, "run": extra})

        def copies() -> tuple[Plain, Plain]:
            plains = unpack(packed, lists_in=["run"])
            return plains["train"], plains["run"]

        return copies

    def _host_copy(self, state: TrainState, extra: dict[str, PyTree]) -> Callable[[], tuple[Plain, Plain]]:
        train = self._plain(state)
        loans: list[Loan] = []

        def lend(num_bytes: int) -> Loan:
            loans.append(self._saver.memory.lend(num_bytes, max_blocks=self._max_copies))
            return loans[-1]

        if self._live.strategy.is_on_host and self._live.is_large:
            self._saver.lower_priority()
        wait = self._live.snapshots_wait
        copies = host_copy(train, lend=lend, wait=wait), host_copy(to_plain(extra, root="run", keep_lists=True), wait=wait)
        # Keeps the loan, so that a snapshot in JAX's memory also counts.
        return functools.partial(_return_copies, copies, loans)


def _touch(loan: Loan) -> None:
    """Writes to all pages of a block, so that the kernel supplies them; piecewise, so that other threads can run Python code."""
    for begin in range(0, len(loan.block), _PIECE_BYTES):
        loan.block[begin : begin + _PIECE_BYTES].fill(0)


def _return_copies(copies: tuple[Plain, Plain], loans: list[Loan]) -> tuple[Plain, Plain]:
    return copies


def unpack(packed: Packed, *, lists_in: Collection[str] = ()) -> dict[str, Plain]:
    """Returns the subtrees of a snapshot that the device made, as `to_plain` does, with `keep_lists` for those in `lists_in`. Waits for the snapshot."""
    leaves = packed.leaves()
    trees = _with_leaf_indices(packed.form, tuple(lists_in))
    return {root: dataclasses.replace(plain, tree=_map(plain.tree, lambda index: None if index is None else leaves[index])) for root, plain in trees.items()}


@functools.lru_cache(maxsize=16)
def _with_leaf_indices(form: Form, lists_in: tuple[str, ...]) -> dict[str, Plain]:
    """Returns the subtrees with the indices of leaves in place of leaves."""
    trees = form.treedef.unflatten(range(len(form.leaves)))
    plains = {}
    for root, tree in trees.items():
        impls: dict[str, str] = {}

        def numbered(path: str, number: int | None, impls: dict[str, str] = impls) -> int | None:
            impl = None if number is None else form.leaves[number].impl
            if impl is not None and not isinstance(impl, str):
                raise CheckpointError(f"Cannot be saved in a checkpoint: {path} is a random key of an unregistered implementation, {impl}.")
            impls |= {path: impl} if impl else {}
            return number

        plain, integers = nested(tree, root, keep_lists=root in lists_in, leaf=numbered)
        plains[root] = Plain(plain, impls, integers)
    return plains


def host_copy(plain: Plain, *, only_numpy: bool = False, lend: Callable[[int], Loan] | None = None, wait: bool = True) -> Plain:
    """Returns `plain` with copies of all arrays in host memory, so that later donation or in-place changes do not affect them.

    All copies from devices start before the first is waited for. Replicated arrays and arrays on the host are copied once. Arrays that are split over
    devices stay split, in host memory. With `only_numpy`, JAX arrays are not copied, because they are not donated. `lend` returns memory of the given size for
    the copies of arrays on the host.

    Without `wait`, copies from an accelerator are JAX arrays in pinned host memory, if the device supports it. They are queued after the dispatched steps and
    overlap with later steps.
    """
    # Without paths, which take longer than copying a small model.
    kinds: Any = np.ndarray if only_numpy else (jax.Array, np.ndarray)
    placed: list[Any] = []
    whole: list[Any] = []
    for leaf in leaves_of(plain.tree):
        if isinstance(leaf, kinds):
            (placed if _goes_to_host_memory(leaf, wait) else whole).append(leaf)
    copies: dict[int, Any] = dict(zip(map(id, placed), copy_to_host_memory(placed, wait=wait or any(map(is_spread, placed))), strict=True))
    fetched = fetch((array for array in whole if isinstance(array, jax.Array)), ahead_bytes=math.inf)
    copied = list(filter(_is_copied, whole))
    if lend is None:
        empty = Arena(sum(math.prod(array.shape) * array.dtype.itemsize for array in copied)).empty
    else:
        empty = lend(sum(map(_lent_bytes, copied))).empty
    for array in whole:
        value = copies[id(array)] = next(fetched) if isinstance(array, jax.Array) else array
        if _is_copied(array):
            copies[id(array)] = empty(value.shape, value.dtype)
            np.copyto(copies[id(array)], value)
    return dataclasses.replace(plain, tree=_map(plain.tree, lambda leaf: copies.get(id(leaf), leaf)))


def _is_copied(array: Any) -> bool:
    """Returns whether the host copies an array itself."""
    return not isinstance(array, jax.Array) or may_share(array)


def _lent_bytes(array: Any) -> int:
    return Loan.size_of(math.prod(array.shape) * array.dtype.itemsize)


def _map(node: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(node, dict):
        return {key: _map(child, function) for key, child in node.items()}
    if isinstance(node, list):
        return [_map(child, function) for child in node]
    return function(node)


def _goes_to_host_memory(array: Any, wait: bool) -> bool:
    """Returns whether the copy of an array is a JAX array in host memory."""
    return is_spread(array) or (not wait and isinstance(array, jax.Array) and not may_share(array) and has_host_memory(array))
