"""`Shard`: data of which each process of a program has a part of its own, and feeds whose batches are put together from all parts.

What a shard gives need not be as much as the others give. Batches are read some at a time, as many as the processes then agree on: all make the same steps,
of batches of one shape, and a process whose shard has ended feeds rows that count nowhere.
"""

import base64
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.serialization
import jax
import numpy as np
from typing_extensions import override

from fitflax.data.batch import DEFAULT_BATCH_SIZE, Batcher, FedBatch, Position, Triple, fingerprint, leaf_paths, refit
from fitflax.data.indexed import IndexedSource, check_batch_size
from fitflax.data.passes import KEPT
from fitflax.data.shares import Shares
from fitflax.data.streams import Feed, OneShotSource, Source
from fitflax.errors import ConfigError, DataError, RestoreError
from fitflax.state import Batch

__all__ = ["Shard", "ShardFeed", "agree_on_shares", "own_position", "part_of_batch_size"]

# What is read before the processes speak to each other again, which takes milliseconds.
_MOST_BATCHES = 16
_MOST_BYTES = 2**26

Exchange = Callable[[Any], list[Any]]


@dataclasses.dataclass(frozen=True)
class Shard:
    """Data that only this process has, a part of the whole; what `fit`, `evaluate`, `predict` and the others take in place of data.

    In a single process it is the data itself. Otherwise a step's batch is what all processes feed, one behind the other; `batch_size` is that of the whole,
    of which each process feeds an equal part, and batches that come as such are parts as they are. Parts need not be equally long: a pass ends when all have
    ended. Metrics are those of all examples; `predict` returns the outputs of this process's own. Without it all processes are to give the same data.

    Attributes:
        data: As `fit` takes it: arrays, `(x, y)`, loaders.

    >>> import fitflax, numpy as np
    >>> from flax import linen as nn
    >>> trainer = fitflax.Trainer(nn.Dense(1))
    >>> trainer.compile("sgd", "mse")
    >>> trainer.fit(Shard((np.ones((8, 2)), np.ones((8, 1)))), batch_size=4, verbose=0).epoch  # In each process, with the part that it has.
    [0]
    """

    data: Any


def agree_on_shares(
    source: Source | None, part: tuple[int, int], index: int, exchange: Exchange, *, is_shard: bool = True, failure: Exception | None = None
) -> Shares | None:
    """Returns what the processes know of each other's parts of some data; all of them must call it. `None` if they are to have the same data.

    Args:
        source: What this process has; `None` if it could not be made.
        part: Which of how many parts of a batch it feeds.
        index: Which of the processes this is.
        exchange: Gives what each process calls it with.
        is_shard: Whether it is a part.
        failure: Why there is no source.

    Raises:
        DataError: The processes have data that do not go together, or one of them has none.
        Exception: The failure.
    """
    numbers = [None] * 3 if source is None else [source.num_examples, source.num_batches, source.batch_size]
    nature = [] if source is None else [type(source).__name__, source.can_restart, source.is_endless]
    found = exchange([part[0], is_shard, nature, numbers, None if failure is None else f"{type(failure).__name__}: {failure}"])
    if failure is not None:
        raise failure
    parts, shards, natures, sizes, errors = zip(*found, strict=True)
    failed = "; ".join(f"process {process}: {error}" for process, error in enumerate(errors) if error is not None)
    if failed:
        raise DataError(f"The data cannot be used, by {failed}")
    if len(set(shards)) > 1:
        raise DataError(
            f"The data is a Shard in the processes {[process for process, it_is in enumerate(shards) if it_is]} alone. Give a Shard in all, or in none."
        )
    for process, each in enumerate(natures):
        if each != natures[0]:
            raise DataError(f"The processes have data of different kinds: process 0 {natures[0]}, process {process} {each}.")
    examples, batches, batch_sizes = zip(*sizes, strict=True)
    if not is_shard:
        different = [process for process, each in enumerate(sizes) if each != sizes[0]]
        if different:
            told = "; ".join(f"process {process} {sizes[process][0]} examples in batches of {sizes[process][2]}" for process in (0, different[0]))
            raise DataError(f"The processes have different data: {told}. If each has a part of its own, say so: fitflax.data.Shard(data).")
        return None
    shares = Shares(index, tuple(parts), None, _largest(batches), _largest(examples), None if None in batch_sizes else max(batch_sizes) * part[1])
    return shares if None in examples else dataclasses.replace(shares, examples=shares.total(examples))


def part_of_batch_size(batch_size: int | None, parts: int) -> int:
    """Returns how many rows of a batch each of so many equal parts has; by default of one of 32.

    Raises:
        ConfigError: They cannot be equal.

    >>> part_of_batch_size(64, 4)
    16
    """
    size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
    check_batch_size(size)
    if size % parts:
        raise ConfigError(f"batch_size={size} is that of all processes together, which cannot feed {parts} equal parts. Choose a multiple of {parts}.")
    return size // parts


def _largest(values: Sequence[int | None]) -> int | None:
    return None if None in values else max(value for value in values if value is not None)


@dataclasses.dataclass(frozen=True)
class _Read:
    """What a process says of the batches that it has read.

    Attributes:
        rows: Of each.
        ended: Whether its part has no more.
        size: The most rows of a batch, padding included.
        num_bytes: Of a batch.
        forms: What each looks like besides, as JSON; one for all where they are alike.
        content: The first batch, as a number; for those who must feed the same.
        error: What went wrong.
    """

    rows: list[int]
    ended: bool
    size: int = 0
    num_bytes: int = 0
    forms: Sequence[str] = ()
    content: int = 0
    error: str | None = None

    def form(self, number: int) -> str:
        """Returns what batch `number` looks like."""
        return self.forms[0 if len(self.forms) == 1 else number]


class ShardFeed(Feed):
    """A feed over this process's part of the data, which gives as many batches as the others'.

    Args:
        source: This process's part, with its `shares`.
        batcher: Makes this process's part of a batch.
        position: Where to begin.
        used: By process, how many examples of the pass are used.
        exchange: Gives what each process calls it with.
        is_saved: As of `Feed`.
        pads: Whether batches may be padded.
    """

    def __init__(
        self,
        source: Source,
        batcher: Batcher,
        position: Position = Position(),  # noqa: B008 (frozen)
        *,
        used: Sequence[int] = (),
        exchange: Exchange,
        is_saved: bool = False,
        pads: bool = True,
    ) -> None:
        assert source.shares is not None
        super().__init__(source, batcher, position)
        self._shares = source.shares
        self._exchange = exchange
        self._pads = pads
        self._local = Feed(source, batcher, position, is_saved=is_saved, kept=KEPT + _MOST_BATCHES)
        self._used = list(used or [0] * len(self._shares.parts))
        self._next_count = 1
        self._has_ended = self._all_ended = False
        # By what is used after a batch, what was used before it.
        self._before: dict[tuple[int, ...], tuple[int, ...]] = {}

    @override
    def _open(self) -> Iterator[Triple]:
        return iter(())

    @override
    def _read(self, iterator: Iterator[Triple], ahead: int | None) -> Triple | None:
        if not self._all_ended:
            batches, every = self._read_together()
            # Who has not ended has read as many as were asked for.
            count, size = max(len(read.rows) for read in every), max(read.size for read in every)
            rounds = []
            for number in range(count):
                fed = batches[number] if number < len(batches) else None
                rows = [read.rows[number] if number < len(read.rows) else 0 for read in every]
                form = next(read.form(number) for read in every if number < len(read.rows))
                rounds.append(self._round(fed, rows, size if self._pads or fed is None else len(fed.batch.mask), form))
            if count and self._pads:
                self.batcher.size = size
            self._ready = rounds[::-1]
            self._next_count = max(1, min(2 * self._next_count, _MOST_BATCHES, _MOST_BYTES // max(*(read.num_bytes for read in every), 1)))
            self._all_ended = all(read.ended for read in every)
        if not self._ready:
            self._has_ended = self._all_ended = False
            self._used = [0] * len(self._used)
        return None

    def _read_together(self) -> tuple[list[FedBatch], list[_Read]]:
        """Returns the next batches of this process, and what each process has read.

        Raises:
            Exception: What reading raised in this process.
            DataError: It raised in another one, or the batches do not fit together.
        """
        batches, failure = [], None
        try:
            batches = self._read_own()
        except Exception as error:  # noqa: BLE001 (raised below, once the others know)
            failure = error
        rows = [fed.num_real for fed in batches]
        own = _Read(rows, self._has_ended, error=None if failure is None else f"{type(failure).__name__}: {failure}")
        if batches:
            first = batches[0].batch
            num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
            shared = fingerprint((first.x, first.y, first.weights)) if len(set(self._shares.parts)) < len(self._shares.parts) else 0
            own = dataclasses.replace(own, size=max(len(fed.batch.mask) for fed in batches), num_bytes=num_bytes, content=shared)
            forms = [_form(fed.batch) for fed in batches]
            own = dataclasses.replace(own, forms=forms[:1] if len(set(forms)) == 1 else forms)
        every = [_Read(**read) for read in self._exchange(dataclasses.asdict(own))]
        if failure is not None:
            raise failure
        self._check(every)
        return batches, every

    def _read_own(self) -> list[FedBatch]:
        batches: list[FedBatch] = []
        self._before = {after: self._before[after] for after in [fed.used for fed, _, _ in self._given]}
        self._local.forget_given(but=sum(fed.own != 0 for fed, _, _ in self._given))
        while not self._has_ended and len(batches) < self._next_count:
            fed = self._local.more()
            if fed is None:
                self._has_ended = True
            else:
                batches.append(fed)
        if not self._has_ended and self._local.pass_has_ended:
            self._local.more()  # The end itself.
            self._has_ended = True
        return batches

    def _check(self, every: Sequence[_Read]) -> None:
        """Checks that what the processes have read can be put together; all of them find the same.

        Raises:
            DataError: It cannot.
        """
        failed = [f"process {process}: {read.error}" for process, read in enumerate(every) if read.error is not None]
        if failed:
            raise DataError(f"A shard of the data could not be read, by {'; '.join(failed)}.")
        given = {process: read for process, read in enumerate(every) if read.rows}
        if given and not any(self._used) and len(given) < len(every):
            empty = sorted(set(range(len(every))) - set(given))
            raise DataError(f"The shards of processes {empty} yield no batch, those of {sorted(given)} do. Every process needs some examples.")
        for number in range(max((len(read.rows) for read in given.values()), default=0)):
            forms = {read.form(number): process for process, read in given.items() if number < len(read.rows)}
            if len(forms) > 1:
                listed = "; ".join(f"process {process} has {_words(form)}" for form, process in forms.items())
                raise DataError(f"The shards' batches differ in structure, in the shapes of an example or in dtypes: {listed}.")
        seen: dict[int, tuple[Any, ...]] = {}
        for process, read in enumerate(every):
            part = self._shares.parts[process]
            if seen.setdefault(part, (read.rows, read.content)) != (read.rows, read.content):
                raise DataError(
                    f"Process {process} shares part {part} of each batch with another one, as the mesh lies, and must read the same shard. Make the "
                    "shards by the strategy's part, (index, count), not by process."
                )
        if not self._pads and any(read.rows != every[0].rows for read in every):
            raise DataError(
                f"With compile(pad=False) the shards must give equal batches. Received rows, by process: {[read.rows for read in every]}. Leave pad=False out, "
                "or make the shards equal."
            )

    def _round(self, fed: FedBatch | None, rows: Sequence[int], size: int, form: str) -> FedBatch:
        """Returns this process's part of a batch, whose rows, by process, are given; without a batch of its own it counts nowhere."""
        if fed is None:
            x, y, weights = _zeros(json.loads(form), size)
            batch = Batch(x, y, np.zeros(size, bool), weights)
        else:
            batch = fed.batch if len(fed.batch.mask) == size else refit(fed.batch, size, fed.num_real)
        before = tuple(self._used)
        self._used = [used + count for used, count in zip(self._used, rows, strict=True)]
        shares, used = self._shares, tuple(self._used)
        self._before[used] = before
        position = Position(self._position.passes, used[shares.index])
        return FedBatch(batch, shares.total(rows), position, size=size * shares.num_parts, own=rows[shares.index], used=used)

    @property
    @override
    def has_more(self) -> bool:
        return bool(self._ready)

    @property
    @override
    def pass_has_ended(self) -> bool | None:
        return False if self._ready else self._all_ended or None

    @override
    def state_dict(self, position: Position) -> dict[str, Any]:
        return self._local.state_dict(position)

    @override
    def joined_state(self, position: Position, *, is_alone: bool) -> dict[str, Any] | None:
        if isinstance(self.source, IndexedSource):
            return None  # The position is all that there is to it.
        own, index = self.state_dict(position), self._shares.index
        if is_alone:
            return {"shards": [own if process == index else {} for process in range(len(self._shares.parts))]}
        states = self._exchange(base64.b64encode(flax.serialization.msgpack_serialize(own)).decode())
        return {"shards": [flax.serialization.msgpack_restore(base64.b64decode(state)) for state in states]}

    @override
    def load_state_dict(self, state: Any) -> None:
        states = state.get("shards", [])
        self._local.load_state_dict(states[self._shares.index] if states else {})

    @property
    @override
    def full_size(self) -> int | None:
        return None if self.batcher.size is None else self.batcher.size * self._shares.num_parts

    @override
    def reopen(self) -> None:
        self._local.reopen()

    @override
    def close(self) -> None:
        if isinstance(self.source, OneShotSource):
            # What was read and not used is for whoever goes on with the iterator.
            self._local.push_back(sum(fed.own != 0 for fed in self._ready))
            if self._ready:
                self._used, self._has_ended, self._all_ended = list(self._before[self._ready[-1].used]), False, False
                self._ready.clear()
        self._local.close()


def _form(batch: Batch) -> str:
    """Returns, as JSON, what batches that are put together have in common: structure, shapes of an example, dtypes.

    Raises:
        DataError: Batches are of a structure that cannot be told to others.
    """
    return json.dumps([_described(tree) for tree in (batch.x, batch.y, batch.weights)])


def _described(node: Any) -> Any:
    if hasattr(node, "shape"):
        return {"shape": list(node.shape[1:]), "dtype": node.dtype.name}
    if node is None:
        return None
    if type(node) is dict and all(isinstance(key, str) for key in node):
        return {"dict": {key: _described(child) for key, child in node.items()}}
    if type(node) in (list, tuple):
        return {type(node).__name__: [_described(child) for child in node]}
    raise DataError(f"The batches of a Shard are arrays, or dicts, lists and tuples of them. Received: a {type(node).__name__}.")


def _zeros(described: Any, size: int) -> Any:
    """Returns zeros, `[size, ...]`, in place of what was described."""
    if described is None or isinstance(described, list):
        return None if described is None else [_zeros(child, size) for child in described]
    if "shape" in described:
        return np.zeros((size, *described["shape"]), jax.numpy.dtype(described["dtype"]))
    kind, children = next(iter(described.items()))
    if kind == "dict":
        return {key: _zeros(child, size) for key, child in children.items()}
    return (tuple if kind == "tuple" else list)(_zeros(child, size) for child in children)


def _words(form: str) -> str:
    """Returns a form as people read it."""
    x, y, weights = (_zeros(each, 0) for each in json.loads(form))
    leaves = [leaf for name, tree in (("x", x), ("y", y), ("sample_weight", weights)) for leaf in leaf_paths(tree, name)]
    return ", ".join(f"{path}: {leaf.dtype}{list(leaf.shape[1:])}" for path, leaf in leaves)


def own_position(position: Position, used: Sequence[int], shares: Shares | None) -> Position:
    """Returns the position of a saved run for this process.

    Args:
        position: That of the process which saved it.
        used: By process, what of the pass was used.
        shares: Of the data that the run goes on with.

    Raises:
        RestoreError: The run had as many shards as there were processes, and now it has others.
    """
    count = 0 if shares is None else len(shares.parts)
    if len(used) not in (0, count):
        now = f"{count} shards" if count else "the same data in all processes"
        raise RestoreError(
            f"The run's data came in {len(used)} shards, one for each process, and now there are {now}. In the middle of a pass only the same shards "
            "can go on: start as many processes, or resume from a checkpoint at the end of a pass."
        )
    if count and not used and position.examples:
        raise RestoreError(
            "The run was saved in the middle of a pass over the same data in all processes, and now each has a shard. Give the same data, or resume from a "
            "checkpoint at the end of a pass."
        )
    return position._replace(examples=used[shares.index]) if used and shares is not None else position
