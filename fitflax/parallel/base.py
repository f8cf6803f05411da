"""What every strategy offers to the layers above; the only place besides its subclasses that knows how steps are compiled.

A step is written once, as a pure function of one replica's share of the batch. A strategy compiles it, places what goes in, and joins between replicas
what must be the same on all of them.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, cast

import jax
import optax

from fitflax.data.batch import Batcher
from fitflax.parallel.in_flight import InFlight
from fitflax.parallel.packed import Packed
from fitflax.parallel.processes import check_same
from fitflax.parallel.transfer import Transfer
from fitflax.state import Batch, PyTree, TrainState

__all__ = ["Compiled", "Layout", "Places", "Strategy"]

_norm = jax.jit(optax.tree.norm)


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """Where each array of a tree lies.

    Attributes:
        tree: Shardings, in the structure of the arrays.
    """

    tree: PyTree

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places) and jax.tree.flatten(self.tree) == jax.tree.flatten(other.tree)

    def __hash__(self) -> int:
        return hash(tuple(jax.tree.leaves(self.tree)))


Layout = Literal["replicated", "split", "group"] | Places
"""How an argument or a result lies on the devices: whole on each of them; its leading axis, the rows of a batch, split over them; the same of a group of
steps, whose leading axis is that of the steps; or each array where it is said."""


class Compiled(Protocol):
    """A compiled function."""

    def __call__(self, *arguments: Any) -> Any:
        """Runs it, compiling it first where it has not been for such arguments."""

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """Traces it for arrays, or for shapes with their places. What `compile()` makes of the result, a call with such arguments uses."""


class Strategy(abc.ABC):
    """Where and how steps run. Give one to `Trainer(parallel=...)`.

    Attributes:
        num_replicas: How many calls of a step's function share a batch, each on a device of its own and joined by the functions below.
        num_partitions: Over how many devices the compiler spreads one such call.
        num_batch_shards: Over how many devices the rows of a batch are split; full batches are a multiple of it.
        part: Which of how many parts of each batch this process feeds, `(index, count)`.
        num_processes: How many processes the devices belong to; there may be fewer parts, where some feed the same.
        max_in_flight: How many steps may be dispatched and not finished. It bounds memory, and on CPU it keeps XLA's collectives from a deadlock.
        in_flight: Keeps to it, for all who dispatch steps to these devices.
        transfer: Puts batches into the form in which compiled functions take them.

    >>> from fitflax.parallel import DataParallel
    >>> isinstance(DataParallel(), Strategy)
    True
    """

    num_replicas: int
    num_partitions: int
    num_batch_shards: int
    part: tuple[int, int]
    num_processes: int
    max_in_flight: int
    in_flight: InFlight
    transfer: Transfer

    @abc.abstractmethod
    def compile(self, fn: Callable[..., Any], *, inputs: Sequence[Layout], outputs: Layout | Sequence[Layout], donate: Sequence[int] = ()) -> Compiled:
        """Returns `fn`, a pure function of one replica's share, compiled for all replicas.

        Args:
            fn: Takes positional pytrees only.
            inputs: The layout of each argument.
            outputs: The layout of the result, or of each member of a tuple of results. A replicated result must be equal on all replicas.
            donate: Positions of arguments whose buffers the results may reuse.
        """

    @abc.abstractmethod
    def trace(self, fn: Callable[..., Any], *, inputs: Sequence[Layout]) -> Callable[..., Any]:
        """Returns `fn` as it is compiled, for evaluating shapes alone; its results are those of one replica.

        Args:
            fn: As in `compile`.
            inputs: The layout of each argument. A batch may have any number of rows that the replicas divide.
        """

    @abc.abstractmethod
    def emulate(self, fn: Callable[..., Any], *, inputs: Sequence[Layout]) -> Callable[..., Any]:
        """Returns `fn` for all replicas as plain operations on one device, without collectives; results have a leading axis of replicas.

        Args:
            fn: As in `compile`.
            inputs: The layout of each argument; split ones come as `feed` makes them.
        """

    @abc.abstractmethod
    def alone(self, fn: Callable[..., Any]) -> Any:
        """Returns `fn` of batches as a jitted function for one device that knows of no others."""

    @abc.abstractmethod
    def put(self, tree: PyTree) -> PyTree:
        """Returns `tree` replicated on the devices, in buffers of its own: donating them never touches the caller's arrays."""

    @abc.abstractmethod
    def abstract_put(self, tree: PyTree) -> PyTree:
        """Returns the shapes, dtypes and places of `put(tree)`, moving no data; what is a part of a state with places keeps them."""

    # The state, all of whose arrays lie on the devices, each in a place that follows from its path, shape and axis names.

    def put_state(self, state: TrainState) -> TrainState:
        """Returns a state on the devices, in buffers of its own; no device ever holds more of an array than it keeps."""
        return cast(TrainState, self.put_at(state, self.abstract_state(state)))

    @abc.abstractmethod
    def put_at(self, tree: PyTree, shapes: PyTree) -> PyTree:
        """Returns a part of a state on the devices, as `put_state` does, where `shapes`, the same part of `abstract_state`, say."""

    @abc.abstractmethod
    def move(self, leaves: list[Any], shapes: Sequence[Any]) -> list[Any]:
        """Returns arrays of a state where `shapes` say, one after another; the list is emptied meanwhile, so that nothing is on the devices twice.

        What lies right stays in the same buffers: the arrays must be nobody else's.
        """

    @abc.abstractmethod
    def abstract_state(self, state: TrainState) -> TrainState:
        """Returns the shapes, dtypes and places of `put_state(state)`, moving no data.

        Raises:
            ShardingError: The axis names of arrays do not fit the devices; all faults are listed.
        """

    @abc.abstractmethod
    def places(self, tree: PyTree) -> Layout:
        """Returns the layout of parts of a state that are on the devices, or of their shapes with places."""

    @abc.abstractmethod
    def pin(self, state: TrainState) -> TrainState:
        """Returns, while a step is traced, a state whose arrays the compiler is told to keep in their places."""

    @abc.abstractmethod
    def idle_axes(self, state: TrainState) -> list[str]:
        """Returns the mesh axes over which neither batches nor any array of a state is split."""

    @abc.abstractmethod
    def describe_whole(self, state: TrainState) -> str | None:
        """Returns, in words, what may be too much for a device: large parameters that each holds whole, or whole batches; `None` if all is well."""

    def part_batcher(self, **options: Any) -> Batcher:
        """Returns what makes this process's part of batches of the shape that the devices need, given nothing but that; `options` are those of `Batcher`."""
        return Batcher(num_shards=self.num_batch_shards // self.part[1], **options)

    def batcher(self, **options: Any) -> Batcher:
        """Returns what makes batches of the shape that the devices need, or cuts this process's part out of them; `options` are those of `Batcher`."""
        compare = check_same if self.num_processes > 1 else None
        return Batcher(**{"num_shards": self.num_batch_shards, "part": self.part, "compare": compare, **options})

    def rows_of(self, batch: Batch) -> int:
        """Returns how many rows a host batch has over all processes."""
        return len(batch.mask) * self.part[1]

    def feed(self, batch: Batch) -> Batch:
        """Returns a host batch in the form in which compiled functions take it, in the cheapest way for these devices."""
        return self.transfer.feed(batch)

    def feed_group(self, batches: Sequence[Batch], size: int, whole: PyTree = None) -> Batch:
        """Returns batches of the same shapes as one with a leading axis of `size` steps (inside a step; what is beyond them is arbitrary), as `feed` does.

        Args:
            batches: At most `size`.
            size: How many steps a call may make.
            whole: `(x, y, weights)` of all of them, NumPy arrays `[len(batches) * batch, ...]`, where they lie so already.
        """
        return self.transfer.feed_group(batches, size, whole)

    def abstract_feed(self, batch: Batch, steps: int | None = None) -> Batch:
        """Returns the shapes, dtypes and places of `feed(batch)`, or of `feed_group` of so many steps, moving no data."""
        return self.transfer.abstract_feed(batch, steps)

    def join(self, outputs: PyTree, steps: int | None = None) -> PyTree:
        """Returns split outputs as NumPy arrays `[batch, ...]`, rows in the order of the batch.

        With `steps` the outputs are those of a group, of which so many steps were made: `[steps * batch, ...]`.
        """
        return self.transfer.join(outputs, steps)

    @abc.abstractmethod
    def copy(self, tree: PyTree) -> PyTree:
        """Returns a copy of a tree of device arrays, on the same devices, that later donations cannot touch."""

    def norm(self, tree: PyTree) -> Any:
        """Returns the global L2 norm of a tree of device arrays, on the devices; where arrays are split between processes, all of these must call it."""
        if self.num_processes > 1 and all(leaf.is_fully_replicated for leaf in jax.tree.leaves(tree)):
            tree = jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)
        return _norm(tree)

    @property
    @abc.abstractmethod
    def is_on_host(self) -> bool:
        """Whether the devices' memory is the host's, so that a copy there costs the host's memory only."""

    @property
    def prefers_counted_loops(self) -> bool:
        """Whether a loop is faster where its number of rounds is known when it is compiled: an accelerator has to ask the host before each round otherwise."""
        return not self.is_on_host

    @abc.abstractmethod
    def copy_once(self, tree: PyTree) -> Packed:
        """Returns a copy of a tree of replicated device arrays, on one device, that later donations cannot touch. Waits for nothing."""

    # What a step calls from inside, while it is traced.

    @abc.abstractmethod
    def replica_index(self) -> Any:
        """Returns this replica's number, int32."""

    @abc.abstractmethod
    def sum(self, tree: PyTree) -> PyTree:
        """Returns the sum of `tree` over the replicas."""

    @abc.abstractmethod
    def gather(self, tree: PyTree) -> PyTree:
        """Returns every replica's `tree`, leaves stacked along a new first axis in the order of the replicas."""

    @abc.abstractmethod
    def first(self, tree: PyTree) -> PyTree:
        """Returns replica 0's `tree` on all replicas."""

    @abc.abstractmethod
    def agree(self, tree: PyTree) -> PyTree:
        """Returns `tree` made equal on all replicas: what is equal stays to the bit, other floats are averaged, all else is replica 0's."""

    @abc.abstractmethod
    def split(self, tree: PyTree, steps: int) -> PyTree:
        """Returns the rows of a replica's share, `[rows, ...]`, as those of micro-batches, `[steps, rows / steps, ...]`, such that none changes its device."""

    @abc.abstractmethod
    def unsplit(self, tree: PyTree) -> PyTree:
        """Returns the rows of micro-batches, `[steps, rows / steps, ...]`, in the order in which they were before `split`."""

    @abc.abstractmethod
    def unify(self, collections: dict[str, PyTree]) -> dict[str, PyTree]:
        """Returns mutable collections made equal on all replicas."""
