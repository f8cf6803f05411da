"""`Shard`: data of which each process of a program has a part of its own, and feeds whose batches are put together from all parts.

What a shard gives need not be as much as the others give. Batches are read some at a time, as many as the processes then agree on: all make the same steps,
of batches of one shape, and a process whose shard has ended feeds rows that count nowhere.
"""

import base64
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.serialization
import jax
from typing_extensions import override

from fitflax.data.batch import DEFAULT_BATCH_SIZE, Batcher, FedBatch, Position, Triple, fingerprint, refit
from fitflax.data.indexed import IndexedSource, check_batch_size
from fitflax.data.passes import KEPT
from fitflax.data.randomness import undisturbed
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


def agree_on_shares(source: Source, part: tuple[int, int], index: int, exchange: Exchange) -> Shares:
    """Returns what the processes know of each other's parts; all of them must call it.

    Args:
        source: This process's part.
        part: Which of how many parts of a batch it feeds.
        index: Which of the processes this is.
        exchange: Gives what each process calls it with.
    """
    found = exchange([part[0], source.num_examples, source.num_batches, source.batch_size])
    parts, examples, batches, sizes = zip(*found, strict=True)
    shares = Shares(index, tuple(parts), None, _largest(batches), _largest(examples), None if None in sizes else max(sizes) * part[1])
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
        form: What the batches look like besides, in words.
        content: The first batch, as a number; for those who must feed the same.
        error: What went wrong.
    """

    rows: list[int]
    ended: bool
    size: int = 0
    num_bytes: int = 0
    form: str = ""
    content: int = 0
    error: str | None = None


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
        self._last: Batch | None = None

    @override
    def _open(self) -> Iterator[Triple]:
        return iter(())

    @override
    def _read(self, iterator: Iterator[Triple], ahead: int | None) -> Triple | None:
        every: list[_Read] = []
        if not self._all_ended:
            batches, every = self._read_together()
            # Who has not ended has read as many as were asked for.
            count, size = max(len(read.rows) for read in every), max(read.size for read in every)
            if count:
                self.batcher.size = size
            rounds = zip(*([*read.rows, *[0] * (count - len(read.rows))] for read in every), strict=True)
            fed = [*batches, *[None] * (count - len(batches))]
            self._ready = [self._round(one, rows, size) for one, rows in zip(fed, rounds, strict=True)][::-1]
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
            own = dataclasses.replace(own, size=max(len(fed.batch.mask) for fed in batches), num_bytes=num_bytes, form=_form(first), content=shared)
        every = [_Read(**read) for read in self._exchange(dataclasses.asdict(own))]
        if failure is not None:
            raise failure
        self._check(every)
        return batches, every

    def _read_own(self) -> list[FedBatch]:
        batches: list[FedBatch] = []
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
        forms = {read.form: process for process, read in given.items()}
        if len(forms) > 1:
            listed = "; ".join(f"process {process} has {form}" for form, process in forms.items())
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

    def _round(self, fed: FedBatch | None, rows: Sequence[int], size: int) -> FedBatch:
        """Returns this process's part of a batch, whose rows, by process, are given; without a batch of its own it counts nowhere."""
        if fed is None:
            last = self._last or self._any_batch()
            batch = refit(last, size, 0)
        else:
            batch = fed.batch if len(fed.batch.mask) == size else refit(fed.batch, size, fed.num_real)
            self._last = batch
        self._used = [used + count for used, count in zip(self._used, rows, strict=True)]
        shares, passes = self._shares, self._position.passes
        position = Position(passes, self._used[shares.index])
        return FedBatch(batch, shares.total(rows), position, size=size * shares.num_parts, own=rows[shares.index], used=tuple(self._used))

    def _any_batch(self) -> Batch:
        """Returns a batch of a part that had ended when the run was resumed, for its shapes."""
        if isinstance(self.source, OneShotSource):
            raise DataError("The iterator of this process has ended, and those of others have not. Pass a function that makes one.")
        with undisturbed():
            triple = next(self.source.open(Position(self._position.passes)), None)
        if triple is None:
            raise DataError(f"The shard of process {self._shares.index} yields no batch.")
        return self.batcher(triple).batch

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

    @override
    def reopen(self) -> None:
        self._local.reopen()

    @override
    def close(self) -> None:
        if isinstance(self.source, OneShotSource):
            # What was read and not used is for whoever goes on with the iterator.
            self._local.push_back(sum(fed.own != 0 for fed in self._ready))
            self._ready.clear()
        self._local.close()


def _form(batch: Batch) -> str:
    """Returns what batches of one program must have in common, in words."""
    leaves = jax.tree_util.tree_leaves_with_path((batch.x, batch.y, batch.weights))
    names = ("x", "y", "sample_weight")
    return ", ".join(f"{names[path[0].idx]}{jax.tree_util.keystr(path[1:])}: {leaf.dtype}{list(leaf.shape[1:])}" for path, leaf in leaves)


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
        raise RestoreError(f"The run's data came in {len(used)} shards, one for each process, and now there are {now}. Give the same shards.")
    return position._replace(examples=used[shares.index]) if used and shares is not None else position
