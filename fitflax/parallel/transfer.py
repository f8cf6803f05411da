"""`Transfer`: converts host batches to the form that compiled functions take, and split outputs to host arrays."""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from fitflax.data.batch import full_mask
from fitflax.data.padding import unboxed
from fitflax.leaves import aligned_copy, aligned_empty, is_aligned, on_host
from fitflax.parallel.placement import explicitly, guards_transfers
from fitflax.state import Batch, PyTree

# The size of views from which a copy is worth its overhead.
_COPIED_BYTES = 2**16


def of_feed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` as a function of what `feed` returns, where scalars are boxed into arrays with an axis, because split arrays need one."""
    return functools.wraps(fn)(lambda *arguments: fn(*unboxed(arguments)))


class Transfer:
    """Transfers batches to the devices and outputs to the host.

    With more than one mapped replica, arrays get a leading axis of replicas: `split` is the sharding of `[batch, ...]` or `[replicas, batch / replicas,
    ...]`, and `group` is the sharding of `[steps, batch, ...]` or `[replicas, steps, batch / replicas, ...]`. If some devices belong to other
    processes, `num_mapped` must be 1, and the processes feed `num_parts` shards of a batch.
    """

    def __init__(self, num_mapped: int, split: NamedSharding, group: NamedSharding, num_parts: int = 1, *, spans_processes: bool = False) -> None:
        self._num_mapped, self._num_parts, self._spans_processes = num_mapped, num_parts, spans_processes
        self._split, self._group = split, group
        # Whether the devices use aligned memory without a copy; several devices copy their parts.
        self._may_share = len(split.device_set) == 1 and all(device.platform == "cpu" for device in split.device_set)  # type: ignore[attr-defined]
        self._put_mask = functools.lru_cache(maxsize=8)(self._put_full_mask)

    def feed(self, batch: Batch) -> Batch:
        """See `Strategy.feed`."""
        # The compiled call places arrays, which is cheaper on CPU than placing them first. Only masks are placed here: the mask of a full batch stays
        # on the device, and other masks need the same sharding, or the step would be compiled a second time.
        size = len(batch.mask)
        mask = self._put_mask(size) if batch.mask is full_mask(size) else self._place(self._fold(batch.mask), self._split)
        x, y, _, weights = batch
        if self._spans_processes:
            x, y, weights = jax.tree.map(lambda leaf: self._place(leaf, self._split), (x, y, weights))
            return Batch(x, y, mask, weights)
        is_plain = type(x) is np.ndarray and type(y) is np.ndarray and weights is None  # Tree functions can take longer than a step.
        if self._num_mapped > 1 or not (is_plain or all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((x, y, weights)))):
            x, y, weights = jax.tree.map(self._feed_leaf, (x, y, weights))
        if guards_transfers():
            x, y, weights = jax.device_put((x, y, weights), self._split)
        return Batch(x, y, mask, weights)

    def feed_group(self, batches: Sequence[Batch], size: int, whole: PyTree = None) -> Batch:
        """See `Strategy.feed_group`."""
        rows = len(batches[0].mask)
        full = full_mask(rows)
        if whole is not None or all(batch.mask is full for batch in batches):  # Contiguous batches have no padding.
            mask = self._put_mask(rows, size)
        else:
            mask = self._place(self._stack(size, *(batch.mask for batch in batches)), self._group)
        if whole is None:
            x, y, weights = jax.tree.map(functools.partial(self._stack, size), *((batch.x, batch.y, batch.weights) for batch in batches))
        else:
            x, y, weights = jax.tree.map(functools.partial(self._fold_group, len(batches), size), tuple(whole))
        if self._spans_processes:
            x, y, weights = jax.tree.map(lambda leaf: self._place(leaf, self._group), (x, y, weights))
        elif guards_transfers():
            x, y, weights = jax.device_put((x, y, weights), self._group)
        return Batch(x, y, mask, weights)

    def abstract_feed(self, batch: Batch, steps: int | None = None) -> Batch:
        """See `Strategy.abstract_feed`."""
        group = () if steps is None else (steps,)
        place = self._split if steps is None else self._group

        def abstract(leaf: Any, is_placed: bool) -> jax.ShapeDtypeStruct:
            shape = (*group, leaf.shape[0] * self._num_parts, *leaf.shape[1:])
            if self._num_mapped > 1:
                shape = (self._num_mapped, *group, leaf.shape[0] // self._num_mapped, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=place if is_placed else None)

        x, y, mask, weights = batch
        x, y, weights = jax.tree.map(lambda leaf: abstract(leaf, isinstance(leaf, jax.Array) or self._spans_processes), (x, y, weights))
        return Batch(x, y, abstract(mask, True), weights)

    def join(self, outputs: PyTree, steps: int | None = None) -> PyTree:
        """See `Strategy.join`."""

        def unfold(leaf: Any) -> np.ndarray[Any, Any]:
            array = on_host(leaf)
            if steps is not None:
                array = array[:steps] if self._num_mapped == 1 else np.moveaxis(array, 1, 0)[:steps]
                array = array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
            return array if self._num_mapped == 1 else array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])

        return jax.tree.map(unfold, outputs)

    def _fold_group(self, count: int, size: int, leaf: Any) -> Any:
        """Returns `[count * batch, ...]` in the form of `_stack`, as a view if possible."""
        steps = leaf.reshape(count, -1, *leaf.shape[1:])
        if self._num_mapped != 1 or count != size:
            return self._stack(size, *steps)
        # A CPU device would copy unaligned memory, into memory that the kernel may have to supply for each call.
        return aligned_copy(steps) if self._may_share and leaf.nbytes >= _COPIED_BYTES and not is_aligned(leaf) else steps

    def _stack(self, size: int, *leaves: Any) -> Any:
        """Returns `[batch, ...]` of several steps as `[size, batch, ...]`, or `[replicas, size, batch / replicas, ...]`, in new aligned memory."""
        if any(isinstance(leaf, jax.Array) for leaf in leaves):
            whole = jnp.stack([*leaves, *[leaves[-1]] * (size - len(leaves))])
            if self._num_mapped > 1:
                rows = whole.shape[1] // self._num_mapped
                whole = jnp.moveaxis(whole.reshape(size, self._num_mapped, rows, *whole.shape[2:]), 1, 0)
            return jax.device_put(whole, self._group)
        first = leaves[0] if self._num_mapped == 1 else self._fold(leaves[0])
        shape = (size, *first.shape) if self._num_mapped == 1 else (first.shape[0], size, *first.shape[1:])
        stack = aligned_empty(shape, first.dtype)
        steps = stack if self._num_mapped == 1 else np.moveaxis(stack, 1, 0)
        for step, leaf in zip(steps, leaves, strict=False):  # Views. Unused steps are never read.
            step[...] = leaf if self._num_mapped == 1 else self._fold(leaf)
        return stack

    def _feed_leaf(self, leaf: Any) -> Any:
        # JAX arrays may be on any device; the compiled call places NumPy arrays.
        return jax.device_put(self._fold(leaf), self._split) if isinstance(leaf, jax.Array) else self._fold(leaf)

    def _fold(self, leaf: Any) -> Any:
        """Returns `[batch, ...]` as `[replicas, batch / replicas, ...]`, a view."""
        return leaf if self._num_mapped == 1 else leaf.reshape(self._num_mapped, len(leaf) // self._num_mapped, *leaf.shape[1:])

    def _put_full_mask(self, rows: int, steps: int | None = None) -> Any:
        mask = full_mask(rows)
        if steps is None:
            return self._place(self._fold(mask), self._split)
        return self._place(self._stack(steps, *[mask] * steps), self._group)

    def _place(self, leaf: Any, place: NamedSharding) -> Any:
        """Returns an array on the devices, from the whole array or from this process's shard of its rows."""
        if not self._spans_processes:
            return jax.device_put(leaf, place)
        with explicitly():
            return jax.make_array_from_process_local_data(place, np.asarray(leaf))


# Maximum memory on the devices for the batches of unfinished steps.
_MAX_BATCH_BYTES = 2**28
# Steps below this duration are short: the host is then at most a fraction of a second ahead.
_SHORT_SECONDS = 0.005
# Maximum number of short steps in flight on one CPU device.
MAX_SHORT_STEPS = 32


def limit_for(platform: str, num_devices: int) -> int:
    """Returns how many steps may be in flight on such devices.

    On several CPU devices it is two: with more, collectives that wait for each other can fill the thread pool of XLA. Elsewhere it is large enough to
    hide the time of dispatching; a GPU finishes a small step while the host wakes up from waiting for another one.

    >>> limit_for("cpu", 8), limit_for("cpu", 1), limit_for("gpu", 1)
    (2, 8, 32)
    """
    if platform != "cpu":
        return 32
    return 2 if num_devices > 1 else 8


class Waitable(Protocol):
    """The result of a dispatched step."""

    def wait(self) -> None:
        """Waits until the step has finished."""


class InFlight:
    """Limits how many dispatched steps may be unfinished, to bound memory and to prevent a deadlock of collectives on CPU.

    `limit` is the maximum number of steps, reduced for large batches, but not below two; `most` is the maximum for short steps, where waking up the host
    takes a noticeable part of the time.
    """

    def __init__(self, limit: int, most: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._base_limit, self._limit, self._max_limit = limit, limit, max(limit, most)
        self._clock = clock
        self._kind: Any = None
        self._num_other_kind = 0  # Number of pending steps of another kind.
        self._pending: list[Waitable] = []
        self._num_bytes = 0  # Size of the newest batch; only the last batch of a pass may have another size.

    def make_room(self, kind: Any = None) -> bool:
        """Waits until one more step may be dispatched; to wait less often, until half are finished. Steps of a `kind` take about the same time.

        Returns `False` if a step has failed, and forgets all steps. The failed one may belong to another run on these devices, which reports its error.
        """
        if kind is not self._kind:
            self._kind, self._limit, self._num_other_kind = kind, self._base_limit, len(self._pending)
        limit = self._limit if self._num_bytes * self._limit <= _MAX_BATCH_BYTES else min(self._limit, max(2, _MAX_BATCH_BYTES // self._num_bytes))
        count = len(self._pending)
        if count >= limit:
            done, begin = max((limit + 1) // 2, count - limit + 1), self._clock()
            try:
                self._pending[done - 1].wait()
            except Exception:  # noqa: BLE001 (the run that depends on the step raises it)
                self._forget()
                return False
            if done > self._num_other_kind:
                is_short = self._clock() - begin < _SHORT_SECONDS * done
                self._limit = min(2 * self._limit, self._max_limit) if is_short else self._base_limit
            self._num_other_kind = max(0, self._num_other_kind - done)
            del self._pending[:done]
        return True

    def _forget(self) -> None:
        """Waits for all steps, and removes them."""
        for step in self._pending:
            with contextlib.suppress(Exception):
                step.wait()
        self._pending.clear()
        self._num_other_kind = 0

    def add(self, values: Waitable, num_bytes: int) -> None:
        """Adds the results of a dispatched step, and the size of its batch in bytes."""
        self._pending.append(values)
        self._num_bytes = num_bytes
