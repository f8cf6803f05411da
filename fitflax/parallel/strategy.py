"""The interface of strategies. Only strategies determine how steps are compiled.

A step is written once, as a pure function of one replica's shard of the batch. A strategy compiles it, places its inputs, and reduces over replicas.
"""

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.data.padding import Batcher
from fitflax.errors import ConfigError
from fitflax.parallel.placement import Packed, copy_here, guards_transfers
from fitflax.parallel.processes import check_same
from fitflax.parallel.transfer import InFlight, Transfer
from fitflax.state import Batch, PyTree, TrainState, global_norm

_norm = jax.jit(global_norm)
_copy = jax.jit(lambda tree: jax.tree.map(jax.numpy.copy, tree))


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """Where each array of a tree is placed: `tree` holds shardings, in the structure of the arrays."""

    tree: PyTree

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places) and jax.tree.flatten(self.tree) == jax.tree.flatten(other.tree)

    def __hash__(self) -> int:
        return hash(tuple(jax.tree.leaves(self.tree)))


Layout = Literal["replicated", "split", "group"] | Places
"""The layout of an argument or a result on the devices: `"replicated"`; `"split"` along the leading axis, the rows of a batch; `"group"`, the same for a group
of steps, whose leading axis is that of the steps; or the place of each array."""


class Compiled(Protocol):
    """A compiled function."""

    def __call__(self, *arguments: Any) -> Any:
        """Runs the function, and compiles it first for new kinds of arguments."""

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """Traces the function for arrays, or for shapes with shardings. Later calls reuse what `compile()` of the result creates."""


class Strategy(abc.ABC):
    """Defines how the state and batches are laid out on devices and how steps run; passed as `Trainer(parallel=...)`.

    Unless a subclass overrides them, methods that place the state replicate it, and those that are called inside of a step have a single replica.

    Attributes:
        devices: The devices, including those of other processes.
        num_replicas: Number of replicas: calls of the step function that share a batch, each on its own device, joined by the collectives below.
        num_partitions: Number of devices over which the compiler partitions each such call.
        num_batch_shards: Number of devices over which the rows of a batch are split; full batches are a multiple of it.
        part: Which shard of each batch this process feeds, `(index, count)`.
        num_processes: Number of processes that own the devices; `part` has fewer shards if several processes feed the same one.
        combine_whole_batches: Whether batches that are passed whole are combined, one for each replica.
        max_in_flight: Maximum number of steps that are dispatched but not finished. It bounds memory, and prevents a deadlock of XLA's collectives on CPU.
        in_flight: Enforces that limit for everything that dispatches steps to these devices.
        transfer: Converts batches to the form that compiled functions take.

    >>> from fitflax.parallel import DataParallel
    >>> isinstance(DataParallel(), Strategy)
    True
    """

    devices: tuple[jax.Device, ...]
    num_replicas: int
    num_partitions: int
    num_batch_shards: int
    part: tuple[int, int]
    num_processes: int
    combine_whole_batches: bool = False
    max_in_flight: int
    in_flight: InFlight
    transfer: Transfer

    @abc.abstractmethod
    def compile(self, fn: Callable[..., Any], *, inputs: Sequence[Layout], outputs: Layout | Sequence[Layout], donate: Sequence[int] = ()) -> Compiled:
        """Returns `fn`, a pure function of one replica's shard, compiled for all replicas.

        Args:
            fn: Function of positional pytrees.
            inputs: Layout of each argument.
            outputs: Layout of the result, or of each member of a tuple of results. A replicated result must be equal on all replicas.
            donate: Positions of arguments whose buffers the results may reuse.
        """

    @abc.abstractmethod
    def trace(self, fn: Callable[..., Any], *, inputs: Sequence[Layout]) -> Callable[..., Any]:
        """Returns `fn` as `compile` does, but only for evaluating shapes; its results are those of one replica.

        A batch may have any number of rows that is a multiple of the number of replicas.
        """

    @abc.abstractmethod
    def emulate(self, fn: Callable[..., Any], *, inputs: Sequence[Layout]) -> Callable[..., Any]:
        """Returns `fn` for all replicas as plain operations on one device, without collectives.

        Split arguments are in the form that `feed` returns; results have a leading axis of replicas.
        """

    @abc.abstractmethod
    def alone(self, fn: Callable[..., Any]) -> Any:
        """Returns `fn`, a function of batches, jitted for a single device without the others."""

    @abc.abstractmethod
    def put(self, tree: PyTree) -> PyTree:
        """Returns `tree` replicated on the devices, in new buffers, so that donating them never affects the arrays of the caller."""

    @abc.abstractmethod
    def abstract_put(self, tree: PyTree) -> PyTree:
        """Returns the shapes, dtypes and shardings of `put(tree)` without moving data; parts of a placed state keep their shardings."""

    # The state: the place of each array follows from its path, shape and axis names.

    def put_state(self, state: TrainState) -> TrainState:
        """Returns a state on the devices, in new buffers; no device ever holds more of an array than its shard."""
        return cast(TrainState, self.put_at(state, self.abstract_state(state)))

    def put_at(self, tree: PyTree, shapes: PyTree) -> PyTree:
        """Returns a part of a state on the devices, as `put_state` does, placed as in `shapes`, the same part of `abstract_state`."""
        return self.put(tree)

    def move(self, leaves: list[Any], shapes: Sequence[Any]) -> list[Any]:
        """Returns arrays of a state, moved one at a time to the shardings of `shapes`; empties the list, so that nothing is on the devices twice.

        Arrays that are already in place keep their buffers, so there must be no other references to them.
        """
        return [leaves.pop(0) for _ in shapes]

    def abstract_state(self, state: TrainState) -> TrainState:
        """Returns the shapes, dtypes and shardings of `put_state(state)` without moving data.

        Raises:
            ShardingError: The axis names of arrays do not fit the devices; the message lists all of them.
        """
        return cast(TrainState, self.abstract_put(state))

    def places(self, tree: PyTree) -> Layout:
        """Returns the layout of parts of a state that are on the devices, or of their shapes with shardings."""
        return "replicated"

    def pin(self, state: TrainState) -> TrainState:
        """Returns, while a step is traced, the state with sharding constraints that keep its arrays in place."""
        return state

    def idle_axes(self, state: TrainState) -> list[str]:
        """Returns the mesh axes over which neither batches nor any array of a state is split."""
        return []

    def missing_axes(self, state: TrainState) -> dict[str, list[str]]:
        """Returns the axes that `nn.with_partitioning` names and the mesh lacks, with the paths of the arrays."""
        return state.axes.missing((), ())

    def describe_whole(self, state: TrainState) -> str | None:
        """Returns a message about what may be too large for a device: large replicated parameters, or whole batches; `None` if there is nothing."""
        return None

    def part_batcher(self, **options: Any) -> Batcher:
        """Returns a `Batcher` of this process's shard of batches, for data that is already sharded; `options` are those of `Batcher`."""
        return self.batcher(num_shards=self.num_batch_shards // self.part[1], part=(0, 1), compare=None, **options)

    def batcher(self, **options: Any) -> Batcher:
        """Returns a `Batcher` for these devices, which cuts out this process's shard if there are several processes; `options` are those of `Batcher`."""
        compare = check_same if self.num_processes > 1 else None
        whole_batch_options = {"combines": self.combine_whole_batches, "why_not_whole": self.why_not_whole}
        return Batcher(**{"num_shards": self.num_batch_shards, "part": self.part, "compare": compare, **whole_batch_options, **options})

    @abc.abstractmethod
    def why_not_whole(self, is_training: bool) -> str | None:
        """Returns why these devices cannot train on batches that are passed whole, or evaluate them, and what to do; `None` if they can."""

    def rows_of(self, batch: Batch) -> int:
        """Returns the number of rows of a host batch over all processes."""
        return len(batch.mask) * self.part[1]

    def feed(self, batch: Batch) -> Batch:
        """Returns a host batch in the form that compiled functions take, in the cheapest way for these devices."""
        return self.transfer.feed(batch)

    def number(self, value: int) -> Any:
        """Returns an integer in the form that compiled functions take, int32."""
        return self.put(np.int32(value)) if guards_transfers() else np.int32(value)

    def feed_group(self, batches: Sequence[Batch], size: int, whole: PyTree = None) -> Batch:
        """Returns batches of equal shapes as one batch with an axis of `size` steps, in the form that `feed` returns; unused steps are arbitrary.

        Args:
            batches: At most `size` batches.
            size: Maximum number of steps of a call.
            whole: `(x, y, weights)` of all batches, NumPy arrays `[len(batches) * batch, ...]`, if they are contiguous already.
        """
        return self.transfer.feed_group(batches, size, whole)

    def abstract_feed(self, batch: Batch, steps: int | None = None) -> Batch:
        """Returns the shapes, dtypes and shardings of `feed(batch)`, or of `feed_group` with `steps` steps, without moving data."""
        return self.transfer.abstract_feed(batch, steps)

    def join(self, outputs: PyTree, steps: int | None = None) -> PyTree:
        """Returns split outputs as NumPy arrays `[batch, ...]`, with rows in the order of the batch.

        With `steps` the outputs are those of a group, of which `steps` steps were run: `[steps * batch, ...]`.
        """
        return self.transfer.join(outputs, steps)

    def copy(self, tree: PyTree) -> PyTree:
        """Returns a copy of a tree of device arrays, on the same devices, that later donations do not affect."""
        return copy_here(tree) if self.num_processes > 1 else _copy(tree)

    def copy_apart(self, tree: PyTree) -> PyTree:
        """Returns a copy of a tree of device arrays for use without the other devices: on one of them, if each holds the whole tree."""
        if all(leaf.is_fully_replicated for leaf in jax.tree.leaves(tree)):
            return _copy(jax.tree.map(lambda leaf: leaf.addressable_data(0), tree))
        return self.copy(tree)

    def norm(self, tree: PyTree) -> Any:
        """Returns the global L2 norm of a tree of device arrays, on the devices; if arrays are split between processes, all processes must call it."""
        if self.num_processes > 1 and all(leaf.is_fully_replicated for leaf in jax.tree.leaves(tree)):
            tree = jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)
        return _norm(tree)

    @property
    def is_on_host(self) -> bool:
        """Whether the devices use the memory of the host, so that copies on them only cost host memory."""
        return bool(self.devices[0].platform == "cpu")

    @property
    def prefers_counted_loops(self) -> bool:
        """Whether loops with a constant number of iterations are faster; otherwise accelerators wait for the host before each iteration."""
        return not self.is_on_host

    def copy_once(self, tree: PyTree) -> Packed:
        """Returns a copy of a tree of replicated device arrays, on one device, that later donations do not affect; does not block."""
        return Packed(jax.tree.map(lambda leaf: leaf.addressable_data(0), tree))

    # Called inside of a step, while it is traced.

    def replica_index(self) -> Any:
        """Returns the index of this replica, int32."""
        return jnp.int32(0)

    def sum(self, tree: PyTree) -> PyTree:
        """Returns the sum of `tree` over the replicas."""
        return tree

    def gather(self, tree: PyTree) -> PyTree:
        """Returns the `tree` of every replica, with leaves stacked along a new first axis in the order of the replicas."""
        return jax.tree.map(lambda leaf: leaf[None], tree)

    def first(self, tree: PyTree) -> PyTree:
        """Returns the `tree` of replica 0 on all replicas."""
        return tree

    def agree(self, tree: PyTree) -> PyTree:
        """Returns `tree` made equal on all replicas.

        Floats that are equal on all replicas stay bit-for-bit identical, different floats are averaged, and all other values are those of replica 0.
        """
        return tree

    @abc.abstractmethod
    def split(self, tree: PyTree, steps: int) -> PyTree:
        """Returns a replica's rows `[rows, ...]` as micro-batches `[steps, rows / steps, ...]`, such that no row moves to another device."""

    @abc.abstractmethod
    def unsplit(self, tree: PyTree) -> PyTree:
        """Returns the rows of micro-batches, `[steps, rows / steps, ...]`, in their order before `split`."""

    def unify(self, collections: dict[str, PyTree], before: dict[str, PyTree]) -> dict[str, PyTree]:
        """Returns mutable collections made equal on all replicas; arrays that are those of `before` already are."""
        return collections


# Attribute of an error in a backward pass: the line of the forward pass that caused it, which `jax.jit` removes from the error.
_ORIGIN = "_fitflax_origin"
_CONFIG: Any = jax.config  # Type checkers do not know its attributes.


def jit_is_disabled() -> bool:
    """Returns whether jit is disabled, as inside `jax.disable_jit()`."""
    return bool(_CONFIG.jax_disable_jit)


def traced_or_eager(traced: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `traced` while JAX traces it, and `eager` if JAX calls it with arrays.

    >>> step = traced_or_eager(lambda x: x + 1, lambda x: x + 2)
    >>> float(jax.jit(step)(1.0)), float(step(1.0))
    (2.0, 3.0)
    """

    @functools.wraps(traced)
    def either(*arguments: Any) -> Any:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
            return traced(*arguments)
        try:
            return eager(*arguments)
        except FloatingPointError as error:
            vars(error)[_ORIGIN] = error.__cause__
            raise

    return either


class Debuggable:
    """A compiled function that is replaced by another one while JAX's debugging options are on.

    The replacement, a jitted `traced_or_eager` function, must not donate its arguments: JAX calls it a second time, eagerly, if a result is not finite.
    """

    def __init__(self, compiled: Any, debugged: Any) -> None:
        self._compiled = compiled
        self._debugged = debugged

    def __call__(self, *arguments: Any) -> Any:
        """Runs the function."""
        if not _is_debugging():
            return self._compiled(*arguments)
        try:
            with _checking_results():
                return self._debugged(*arguments)
        except FloatingPointError as error:
            origin = vars(error).get(_ORIGIN)
            if origin is None:
                raise
            raise error from origin

    def lower(self, *arguments: Any) -> Any:
        """Traces the function for arrays or shapes; see `Compiled.lower`."""
        return (self._debugged if _is_debugging() else self._compiled).lower(*arguments)


def _is_debugging() -> bool:
    return bool(_CONFIG.jax_disable_jit or _CONFIG.jax_debug_nans or _CONFIG.jax_debug_infs)


@contextlib.contextmanager
def _checking_results() -> Iterator[None]:
    """Makes JAX check for NaN and infinities inside the block, if its options require it.

    In JAX 0.10, operations such as `jnp.var` disable these checks for the rest of the thread.
    """
    with contextlib.ExitStack() as stack:
        if _CONFIG.jax_debug_nans:
            stack.enter_context(jax.debug_nans(True))
        if _CONFIG.jax_debug_infs:
            stack.enter_context(jax.debug_infs(True))
        yield


def copy_aliased(results: PyTree, arguments: PyTree) -> PyTree:
    """Returns results with copies of those that are arguments, because a compiled step may donate them later."""
    argument_ids = {id(leaf) for leaf in jax.tree.leaves(arguments)}
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in argument_ids else leaf, results)


def eager_step_error() -> Exception:
    """Returns the error for a step of several processes that cannot run without jit."""
    if jit_is_disabled():
        return ConfigError(
            "Steps of several processes must be compiled, but jit is disabled by jax.disable_jit() or JAX_DISABLE_JIT. Debug the program in one process."
        )
    return FloatingPointError(
        "A step of several processes returned a NaN or an infinity (jax_debug_nans, jax_debug_infs). Run the program in one process to find the operation."
    )
