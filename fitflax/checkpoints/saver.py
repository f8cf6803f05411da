"""Runs a run's saves one after another in a thread, while training continues, and copies the state for them.

A job holds host values that no longer change. Jobs run in the order in which they were submitted. If one fails, the jobs behind it are skipped, as they
would be without a thread: a checkpoint must not outlive another one that it refers to. The error is raised at the next save or at the end of the run.
`Snapshots` are the copies of the state that jobs write while the next steps replace the original.
"""

import atexit
import concurrent.futures.thread  # noqa: F401 (imported before `_wait_for_all` is registered)
import contextlib
import dataclasses
import functools
import math
import os
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any, Self

import jax
import numpy as np

from fitflax.background import Background
from fitflax.checkpoints.memory import Arena, DeviceRoom, Loan, ReusedMemory, fetch, may_share
from fitflax.checkpoints.plain_tree import Plain, leaves_of, nested, only_split, to_plain
from fitflax.errors import CheckpointError, warn
from fitflax.parallel.placement import Form, Packed, copy_to_host_memory, has_host_memory, is_spread, spans_processes
from fitflax.state import PyTree, TrainState
from fitflax.steps.live_state import LiveState
from fitflax.storage import Location
from fitflax.storage.lock import holder_of, lock_directory, release_all

# For training on the host's cores: measured on two cores, it reduces the cost of small saves by a third.
NICENESS_ON_HOST = 10
# For large saves, together with idle CPU scheduling: with 1.5 GB on two cores, steps during a write take 1.3 times as long with a niceness of 10, 1.2
# times with 19, and 1.07 times with both. Not for small saves, whose Python code, which holds the GIL, must not wait for the steps.
NICENESS_OF_LARGE = 19


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    """A function to call in the thread, one to call if it is skipped, and whether it holds a snapshot."""

    saver: "Saver"
    do: Callable[[], Any]
    is_save: bool
    on_skip: Callable[[], Any] | None = None

    def __call__(self) -> None:
        if self.saver.failure is None:  # It may have failed after `submit`.
            self.do()
        elif self.on_skip is not None:
            self.on_skip()


class Saver:
    """The saving thread of a run, and the directories that are locked for the run.

    The thread ends with `close`, or after some idle time. A process that ends normally waits for it. `close` and leaving the context also wait. On Linux, the
    thread has the given niceness, so that training on the host's cores does not wait for it.

    >>> done = []
    >>> with Saver() as saver:
    ...     taken = saver.submit(lambda: done.append("best")), saver.submit(lambda: done.append("regular"))
    >>> done
    ['best', 'regular']
    """

    def __init__(self, *, niceness: int = 0) -> None:
        self._thread = Background("fitflax-saver", on_error=self._fail, on_end=self._on_thread_end, niceness=niceness)
        self._is_abandoned = self._is_detached = False
        self.failure: BaseException | None = None  # The exception of a job that was not reported yet.
        self.has_lost = False  # Whether any save failed, reported or not.
        self.waits: list[Callable[[], None]] = []  # Those of the callbacks that save. They wait for all jobs, and may report a failure as a warning.
        self.memory = ReusedMemory()  # For snapshots; released when the saver ends.
        self.device_room = DeviceRoom()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, do: Callable[[], Any], *, is_save: bool = True, on_skip: Callable[[], Any] | None = None) -> bool:
        """Adds a job to the queue. Returns `False` without adding it if an earlier job failed or the saver was abandoned.

        Of jobs that hold a snapshot (`is_save`), at most one waits while another runs: the next one blocks until there is room. `on_skip` is called in any
        thread if the job was added but is skipped.
        """
        if is_save:
            self.wait_for_room()
        if self._is_abandoned or self.failure is not None:
            return False
        _WORKING.add(self)
        self._thread.submit(_Job(self, do, is_save, on_skip))
        return True

    @property
    def is_idle(self) -> bool:
        """Whether no job is running or waiting."""
        return self._thread.is_idle

    def wait_for_room(self, has_memory: Callable[[ReusedMemory], bool] = lambda memory: True) -> None:
        """Waits until a save would not block. Call it before making a snapshot, so that at most one is being written and one waits.

        `has_memory` says whether there is memory for another snapshot, and is called again after each job. An idle saver does not wait for memory in use:
        something else holds it, such as the error of a failed save, and the snapshot gets new memory.
        """

        def has_room() -> bool:
            waiting = sum(isinstance(job, _Job) and job.is_save for job in self._thread.waiting)
            return waiting + self._thread.is_busy < 2 and (self.is_idle or self._is_abandoned or has_memory(self.memory))

        self._thread.wait_until(has_room)

    def lower_priority(self) -> None:
        """Makes the thread use only idle CPU time, from the next job on, because the next writes are large."""
        if self._thread.niceness != NICENESS_OF_LARGE:
            self._thread.niceness, self._thread.only_idle_cpu = NICENESS_OF_LARGE, True

    def settle(self) -> BaseException | None:
        """Waits for all jobs, and returns the exception of a failed one, once."""
        self.wait_until_idle()
        error, self.failure = self.failure, None
        return error

    def wait_until_idle(self) -> None:
        """Waits for all jobs."""
        try:
            self._thread.wait_until(lambda: self.is_idle or self._is_abandoned)
        except KeyboardInterrupt:
            self.abandon()
            raise

    def wait(self) -> None:
        """Waits for all jobs, and raises the exception of a failed one."""
        error = self.settle()
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Skips all waiting jobs and never waits again, because the user wants to exit immediately."""
        self._is_abandoned = True
        self._skip_waiting()
        self._thread.end(wait=False)
        self.memory.release()
        _WORKING.discard(self)

    def wait_as_callbacks(self) -> None:
        """Waits for all jobs. The exception of a failed job is raised, or reported as a warning, as the callbacks that save demand."""
        for wait in self.waits:
            wait()

    def close(self) -> None:
        """Waits for all jobs, unlocks the directories, and raises the exception of a failed job unless a callback reports it as a warning."""
        try:
            self.wait_as_callbacks()
            self.wait()
        finally:
            self._thread.end(wait=not self._is_abandoned)
            if not self._thread.has_thread:  # Otherwise the thread unlocks them when it ends.
                release_all(self)
            self.memory.release()
            _WORKING.discard(self)

    def detach(self) -> None:
        """Closes without waiting: the thread unlocks the directories once all jobs are done, and warns of failures.

        For callers that may run in any thread: garbage collection may run in the saver's own thread, which cannot wait for itself.
        """
        self._is_detached = True
        self.memory.release()
        self._thread.end(wait=False)
        if not self._thread.has_thread:
            self._on_thread_end()

    def lock(self, directory: Location) -> None:
        """Locks a directory for this run until `close`. Raises `DirectoryInUseError` if another run has locked it."""
        other = holder_of(directory)
        if isinstance(other, Saver):
            other.finish_if_orphaned()
        elif other is not None:
            release_all(other)  # A store that is used without a run: the run takes over.
        lock_directory(directory, self)

    @property
    def is_orphaned(self) -> bool:
        """Whether the run saves nothing more, after `abandon` or `detach`."""
        return self._is_abandoned or self._is_detached

    def finish_if_orphaned(self) -> None:
        """Waits for the jobs that remain after `detach`, or for the running one after `abandon`, and unlocks the directories."""
        if self._is_abandoned:
            self._thread.wait_until(lambda: not self._thread.is_busy)
        elif self._is_detached:
            self._thread.wait_until(lambda: self._thread.is_idle)
        else:
            return
        release_all(self)

    # -- in the thread --

    def _fail(self, error: BaseException) -> None:
        self.failure, self.has_lost = error, True
        self._skip_waiting()

    def _skip_waiting(self) -> None:
        waiting = self._thread.waiting
        self._thread.clear()
        for job in waiting:
            if isinstance(job, _Job) and job.on_skip is not None:
                job.on_skip()

    def _on_thread_end(self) -> None:
        if self.is_orphaned:
            release_all(self)
        if self._is_detached and self.failure is not None:
            error, self.failure = self.failure, None
            warn(f"A save failed after its run was abandoned without being closed: {error}")


_WORKING: "weakref.WeakSet[Saver]" = weakref.WeakSet()


def _wait_for_all() -> None:
    for saver in list(_WORKING):
        with contextlib.suppress(RuntimeError):  # A thread can no longer be started. `_finish_all` warns of the save.
            saver.wait_until_idle()


# Python calls these functions in reverse order, before those of `atexit`. `concurrent.futures` has one, after which Orbax can no longer save. This one only
# waits, because other threads may still be training.
getattr(threading, "_register_atexit", atexit.register)(_wait_for_all)


@atexit.register
def _finish_all() -> None:
    for saver in list(_WORKING):
        try:
            saver.wait()
        except Exception as error:  # noqa: BLE001 (no caller is left to catch it)
            warn(f"A save failed while the process was exiting: {error}")


# A forked child inherits the set, but not the threads.
os.register_at_fork(after_in_child=lambda: _WORKING.clear())


# -- copies of the state --


class Snapshots:
    """The snapshots of a run's state at one step. Concurrent saves of the step share one.

    A large state has one snapshot at a time, in memory that is reused: while an earlier step is being written, the next one waits. On accelerators with room
    for it, a snapshot is a copy on the devices, which the saving thread moves to the host.
    """

    def __init__(self, live: LiveState, saver: Saver) -> None:
        self._live = live
        self._saver = saver
        self._version = live.version
        self._latest: weakref.ref[Callable[[], tuple[Plain, Plain]]] | None = None

    @functools.cached_property
    def _is_on_devices(self) -> bool:
        """Whether the snapshot is a copy on the devices first: if the state is in the memory of accelerators, which have room for it."""
        leaves = self._live.carry.leaves
        # A copy of an array that spans processes is a computation of all of them, but the others need not make a snapshot of all arrays.
        if any(may_share(leaf) or spans_processes(leaf) for leaf in leaves):
            return False
        num_bytes = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
        return self._saver.device_room.has(num_bytes, [device for device in self._live.strategy.devices if device.process_index == jax.process_index()])

    @property
    def waits(self) -> bool:
        """Whether the snapshot waits for steps in flight: if the host makes it, or shards are copied to the host."""
        return self._live.snapshots_wait and not self._is_on_devices

    @property
    def _max_copies(self) -> int:
        """The maximum number of snapshots, each of a save that is being written or waits."""
        return 1 if self._live.is_large else 2

    def reserve(self) -> None:
        """Makes the saver's thread touch the memory for snapshots while training begins, because the kernel needs seconds to supply that of a large state."""
        if self._live.is_copied_packed or not self._live.strategy.is_on_host:
            return
        arrays = (leaf for leaf in leaves_of(self._plain(self._live.borrow()).tree) if isinstance(leaf, (jax.Array, np.ndarray)))
        num_bytes = sum(_lent_bytes(array) for array in arrays if not is_spread(array) and _is_copied(array))
        if num_bytes:
            self._saver.memory.reserve(num_bytes, max_blocks=self._max_copies)
            self._saver.submit(self._saver.memory.touch, is_save=False)  # Before `lower_priority`, which would delay it on a busy machine.

    def wait_for_room(self) -> None:
        """Waits until a save of this step would neither block nor exceed the memory for snapshots."""
        if self._live.is_copied_packed:
            self._saver.wait_for_room()
        else:
            self._saver.wait_for_room(lambda memory: memory.num_lent < self._max_copies or self.shared() is not None)

    def take(self, state: TrainState, extra: dict[str, PyTree]) -> Callable[[], tuple[Plain, Plain]]:
        """Returns a function that gives the state, and `extra` (other values that the next step changes) as part of `run`, as they are now."""
        snapshot = self.shared()
        if snapshot is None:
            snapshot = self._packed_copy(state, extra) if self._live.is_copied_packed else self._copy(state, extra)
            self._latest = weakref.ref(snapshot)  # Weak: it lives as long as the saves, not as long as the checkpoint, which users may keep.
        return snapshot

    def shared(self) -> Callable[[], tuple[Plain, Plain]] | None:
        """Returns the snapshot that is still in use, unless a callback has replaced the state since."""
        if self._version != self._live.version:
            self._version, self._latest = self._live.version, None
        return None if self._latest is None else self._latest()

    def _plain(self, state: TrainState) -> Plain:
        """Returns what this process copies of a state: only process 0 copies what is not split."""
        train = to_plain(state, root="train", may_span=True)
        return only_split(train) if jax.process_index() else train

    def _packed_copy(self, state: TrainState, extra: dict[str, PyTree]) -> Callable[[], tuple[Plain, Plain]]:
        packed = self._live.strategy.copy_once({"train": state, "run": extra})

        def copies() -> tuple[Plain, Plain]:
            plains = unpack(packed, lists_in=["run"])
            return plains["train"], plains["run"]

        return copies

    def _copy(self, state: TrainState, extra: dict[str, PyTree]) -> Callable[[], tuple[Plain, Plain]]:
        train, run = self._plain(state), to_plain(extra, root="run", keep_lists=True)
        if not self._is_on_devices:
            return self._host_copy(train, run)
        arrays = [leaf for leaf in (*leaves_of(train.tree), *leaves_of(run.tree)) if isinstance(leaf, jax.Array)]
        copies = dict(zip(map(id, arrays), self._live.strategy.copy_apart(arrays), strict=True))
        train, run = (dataclasses.replace(plain, tree=_map(plain.tree, lambda leaf: copies.get(id(leaf), leaf))) for plain in (train, run))
        return _DeviceSnapshot((train, run), self._saver.memory.lend(0, max_blocks=self._max_copies))

    def _host_copy(self, train: Plain, run: Plain) -> Callable[[], tuple[Plain, Plain]]:
        loans: list[Loan] = []

        def lend(num_bytes: int) -> Loan:
            loans.append(self._saver.memory.lend(num_bytes, max_blocks=self._max_copies))
            return loans[-1]

        if self._live.strategy.is_on_host and self._live.is_large:
            self._saver.lower_priority()
        wait = self.waits
        copies = host_copy(train, lend=lend, wait=wait), host_copy(run, wait=wait)
        # Keeps the loan, so that a snapshot in JAX's memory also counts.
        return functools.partial(_return_copies, copies, loans)


class _DeviceSnapshot:
    """A snapshot on the devices, which the saving thread moves to the host at the first call, because that takes longer than a step.

    It keeps the loan, so that it counts among the snapshots.
    """

    def __init__(self, copies: tuple[Plain, Plain], loan: Loan) -> None:
        self._copies, self._loan, self._is_on_host = copies, loan, False

    def __call__(self) -> tuple[Plain, Plain]:
        if not self._is_on_host:
            train, run = self._copies
            self._copies, self._is_on_host = (host_copy(train, wait=False), host_copy(run, wait=False)), True
        return self._copies


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

    Starts all copies from devices before it waits for the first. Replicated arrays and arrays on the host are copied once. Arrays that are split over
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
