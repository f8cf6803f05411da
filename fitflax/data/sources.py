"""Sources that yield batches, and `Feed`, which iterates over a source pass after pass and tracks the position.

The position counts examples that finished steps have used; it is never read from the loader, which may be ahead. A resume continues from the newest bookmark
of the loader. Sources that cannot seek are read up to the position, and a warning names the cost.
"""

import abc
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from fitflax.data.batch import Batcher, FedBatch, Position, Selection, Triple, count_examples
from fitflax.data.failures import mark_as_from_data
from fitflax.data.grain import start_workers
from fitflax.data.randomness import undisturbed
from fitflax.data.resumable import KEPT, Bookmark, Bookmarks, LoaderPass, Pass, RowsPass, drop, resumed, set_state, state_methods
from fitflax.data.shard_info import Shares
from fitflax.errors import warn
from fitflax.state import Batch

__all__ = ["Feed", "IterableSource", "OneShotSource", "Source"]


class Source(abc.ABC):
    """Data that can be iterated over in batches.

    Attributes:
        num_batches: Batches in a pass; `None` if unknown.
        num_examples: Examples in a pass; `None` if unknown.
        batch_size: The requested batch size; `None` if the first batch decides.
        can_restart: Whether a second pass is possible.
        can_reread: Whether the beginning of a pass can be read one more time without changing later passes.
        takes_epoch: Whether the order depends on a number that a callback can set in `on_epoch_begin`.
        is_endless: Whether a pass is known never to end.
        calls_hooks: Whether the epoch hooks of the user's data are called.
        shuffles: Whether the order depends on the seed and the pass; `None` if the data has its own order.
        owns_batches: Whether the arrays that it yields are never overwritten.
        is_repeatable: Whether a pass of the same number yields the same examples in the same order, in another process as well.
        is_checked: Whether its batches are guaranteed to hold numeric arrays of one length.
        knows_length: Whether `num_batches` is exact, so that the end of a pass is known without reading another batch.
        is_shard: Whether it is this process's shard of the data, as declared with `Shard`.
        shares: What the processes know about each other's shards, if each has one.
        together: How many batches form the batch of a step: more than one if they are passed whole, one for each device. Known once a batch was read.

    >>> from fitflax.data import adapt
    >>> import numpy as np
    >>> source = adapt(np.arange(5.0), batch_size=2, shuffle=False)
    >>> isinstance(source, Source), [triple.x.tolist() for triple in source.open(Position(examples=2))]
    (True, [[2.0, 3.0], [4.0]])
    """

    num_batches: int | None = None
    num_examples: int | None = None
    batch_size: int | None = None
    can_restart: bool = True
    can_reread: bool = True
    takes_epoch: bool = False
    is_endless: bool = False
    calls_hooks: bool = True
    shuffles: bool | None = None
    owns_batches: bool = False
    is_repeatable: bool = True
    is_checked: bool = False
    knows_length: bool = False
    is_shard: bool = False
    shares: Shares | None = None
    together: int = 1

    @property
    def all_examples(self) -> int | None:
        """Examples in a pass over the shards of all processes; `None` if unknown."""
        return self.num_examples if self.shares is None else self.shares.examples

    @property
    def all_batches(self) -> int | None:
        """Steps in a pass over the shards of all processes; `None` if unknown."""
        batches = self.num_batches if self.shares is None else self.shares.batches
        return None if batches is None else -(-batches // self.together)

    @property
    def all_batch_size(self) -> int | None:
        """Rows of a batch over all processes; `None` if the first batch decides."""
        return self.batch_size if self.shares is None else self.shares.batch_size

    @abc.abstractmethod
    def open(self, position: Position) -> Iterator[Triple]:
        """Returns the batches of pass number `position.passes` after its first `position.examples` examples."""

    @property
    def batches_at_once(self) -> int:
        """How many batches are best read together, if a pass supports it."""
        return 1

    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        """Returns the same batches as `open`, in a process that resumes a run.

        Override it if `open` returns a pass that takes snapshots, or if the order of a pass depends on earlier passes.

        Args:
            position: The position of the run.
            bookmark: A state of the same pass, at this position or before it; `None` if there is none.
        """
        return self.open(position)

    def announce(self, position: Position, bookmark: Bookmark | None = None) -> None:  # noqa: B027 (most data takes no number)
        """Sets the number of the next pass in the user's data, if it takes one; `open` and `reopen` do it otherwise.

        Args:
            position: The beginning of the pass.
            bookmark: As in `reopen`.
        """

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restores the random generators of the user's data when its block ends."""
        yield


class Feed:
    """Batches of fixed shape, pass after pass, each with the position of the data after it.

    Args:
        source: The source of the batches.
        batcher: Pads the batches to a fixed shape.
        position: The position to start from.
        is_saved: Whether the position will be saved, so that states of the source are needed.
        kept: How many states of the source are kept.
        clock: Returns seconds; limits how often states are taken.

    >>> from fitflax.data import adapt
    >>> import numpy as np
    >>> feed = Feed(adapt(np.arange(5.0), batch_size=2, shuffle=False), Batcher(size=2))
    >>> [feed.next().num_real for _ in range(3)], feed.next()
    ([2, 2, 1], None)
    >>> feed.next().position
    Position(passes=1, examples=2)
    """

    def __init__(
        self,
        source: Source,
        batcher: Batcher,
        position: Position = Position(),  # noqa: B008 (frozen)
        *,
        is_saved: bool = False,
        kept: int = KEPT,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.source = source
        self.batcher = batcher
        self._position = position
        self._iterator: Iterator[Triple] | None = None
        # The batches that can be pushed back, each with the position before it and its raw batches.
        self._returned: list[tuple[FedBatch, Position, list[Triple]]] = []
        # Batches that were read ahead or pushed back; the next one is last.
        self._buffer: list[FedBatch] = []
        # Batches left over when reading others to join them with failed; and whether the pass has ended.
        self._leftover: list[Triple] = []
        self._has_ended_early = False
        # What `next_like` leaves to `next`: an error, or None for the end of the pass.
        self._pending: list[Exception | None] = []
        self._bookmarks = Bookmarks(clock, kept) if is_saved else None
        # The open pass, if its states are taken; the bookmark to resume from; whether the last pass had a state.
        self._pass: Pass | None = None
        self._resume: tuple[Bookmark | None] | None = None
        self._has_states = False
        self._holds_passes = False

    def hold_passes(self) -> None:
        """Makes this feed open a pass only when its first batch is requested, not earlier to take its state."""
        self._holds_passes = True

    def announce_pass(self) -> None:
        """Sets the number of the pass in the user's data if the next batch begins a pass, before the batch is requested."""
        if self._buffer:
            return
        if self._iterator is None:
            self.source.announce(self._position, None if self._resume is None else self._resume[0])
        elif self._pass is not None and self._pass.is_at_end:
            self.source.announce(Position(self._position.passes + 1))

    def next(self, ahead: int | None = None) -> FedBatch | None:
        """Returns the next batch, or `None` at the end of a pass; the call after that starts the next pass.

        Args:
            ahead: How many batches, including this one, are used together and so read into one block if possible; `None` if they are used one by one.
        """
        self._returned.clear()
        if self._buffer and not self._pending:
            fed = self._buffer.pop()
            self._returned.append((fed, self._position, []))
            self._position = fed.position
            return fed
        if self._pending:
            error = self._pending.pop()
            if error is not None:
                raise error
            return None
        return self._next(ahead)

    def more(self) -> FedBatch | None:
        """Returns the next batch like `next`, but earlier batches can still be pushed back."""
        return self._next(None)

    def forget_given(self, *, but: int) -> None:
        """Limits what can be pushed back to the last `but` batches."""
        del self._returned[: len(self._returned) - but]

    def next_like(self, batch: Batch, count: int) -> list[FedBatch]:
        """Returns up to `count` more batches of the same pass with the shapes of `batch`.

        The end of the pass, or an error, is kept for the following call of `next`.
        """
        batches: list[FedBatch] = []
        while len(batches) < count and not self._pending and not self.pass_has_ended:
            if self._buffer and self.source.is_checked:
                found = self._take_buffered(batch, count - len(batches))
                batches += found
                if found:
                    continue
                break
            try:
                fed = self._next(count - len(batches))
            except Exception as error:  # noqa: BLE001 (next() raises it, once the batches before it are used)
                self._pending.append(error)
                break
            if fed is None:
                self._pending.append(None)
            elif self._have_same_shapes(fed.batch, batch):
                batches.append(fed)
            else:
                self.push_back()
                break
        return batches

    def _take_buffered(self, batch: Batch, count: int) -> list[FedBatch]:
        """Returns up to `count` of the buffered batches, up to the first one that has another number of rows than `batch`."""
        rows = len(batch.mask)
        taken: list[FedBatch] = []
        for fed in self._buffer[: -count - 1 : -1]:
            if len(fed.batch.mask) != rows:
                break
            self._returned.append((fed, self._position, []))
            self._position = fed.position
            taken.append(fed)
        del self._buffer[len(self._buffer) - len(taken) :]
        return taken

    def _have_same_shapes(self, one: Batch, other: Batch) -> bool:
        # Batches of checked sources differ only in their number of rows, and comparing all shapes takes longer than slicing a batch.
        return len(one.mask) == len(other.mask) if self.source.is_checked else _structure_and_shapes(one) == _structure_and_shapes(other)

    def _next(self, ahead: int | None) -> FedBatch | None:
        raw: list[Triple] = []
        if not self._buffer:
            try:
                if self._iterator is None:
                    self._iterator = self._open()
                raw = self._read(self._iterator, ahead)
            except Exception as error:
                mark_as_from_data(error)
                raise
            if not self._buffer:
                self._iterator = self._pass = None
                self._position = Position(self._position.passes + 1)
                return None
        fed = self._buffer.pop()
        self._returned.append((fed, self._position, raw))
        self._position = fed.position
        return fed

    def _read(self, iterator: Iterator[Triple], ahead: int | None) -> list[Triple]:
        """Reads the next batches into the buffer, which stays empty at the end of the pass. Returns the raw batches of a batch that was read alone."""
        source = self.source
        if source.is_checked and isinstance(iterator, RowsPass):
            rows = iterator.take(ahead or source.batches_at_once)
            if rows is not None:
                assert source.batch_size is not None
                self._buffer = self.batcher.cut(rows, source.batch_size, self._position)[::-1]
            return []
        if self._pass is not None and self._bookmarks is not None:
            self._bookmarks.take(self._position, self._pass)
        read: list[Triple] = []
        triple = self._read_raw(iterator, read)
        if triple is None:
            return []
        fed = self.batcher(triple, is_checked=source.is_checked, more=lambda: self._read_raw(iterator, read))
        if fed.real is not None:
            source.together = self.batcher.num_shards
        self._buffer.append(fed._replace(position=Position(self._position.passes, self._position.examples + fed.num_real)))
        return read

    def _read_raw(self, iterator: Iterator[Triple], read: list[Triple]) -> Triple | None:
        """Returns the next raw batch, `None` at the end of the pass, and appends it to `read`; after an exception the batches in `read` are read again."""
        if self._leftover:
            triple: Triple | None = self._leftover.pop(0)
        elif self._has_ended_early:
            return None
        else:
            try:
                triple = next(iterator, None)
            except BaseException:
                self._pass = None  # Its state may count a batch that was never returned, so take no more bookmarks.
                self._return_unused(read)
                raise
        if triple is None:
            self._has_ended_early = True
            return None
        if not self.source.owns_batches:
            # A loader may reuse one buffer, which a step may still be reading.
            triple = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, triple)
        read.append(triple)
        return triple

    def _return_unused(self, read: list[Triple]) -> None:
        """Returns unused batches to where the next read finds them: a one-shot iterator's source, or else this feed."""
        if isinstance(self.source, OneShotSource):
            for triple in reversed(read):
                self.source.push_back(triple)
        else:
            self._leftover = read

    def _open(self) -> Iterator[Triple]:
        resume, self._resume = self._resume, None
        self._leftover, self._has_ended_early = [], False
        self._has_states = False  # If opening fails, saving must not try again.
        iterator = self.source.open(self._position) if resume is None else self.source.reopen(self._position, *resume)
        if self._bookmarks is not None and isinstance(iterator, Pass):
            self._pass = iterator
            self._has_states = self._bookmarks.take(self._position, iterator, force=True)
        return iterator

    @property
    def full_size(self) -> int | None:
        """The rows of a full batch over all processes; `None` before the first one."""
        return self.batcher.size

    @property
    def position(self) -> Position:
        """The position of the data after the batches returned so far."""
        return self._position

    def state_dict(self, position: Position) -> dict[str, Any]:
        """Returns what `load_state_dict` needs to resume at `position`, for checkpoints; `{}` if the position alone is enough or nothing else is known.

        Args:
            position: What training has used; this feed may be ahead of it by a batch.
        """
        if self._bookmarks is None:
            return {}
        if position == self._position and self._pass is not None and not self._buffer:
            self._bookmarks.take(position, self._pass)
        elif position == self._position and self._iterator is None and self._has_states:
            if self._holds_passes:
                self._take_next_state()
            else:
                self._open_next()
        return self._bookmarks.state_dict(position)

    def _open_next(self) -> None:
        try:
            self._iterator = self._open()  # Between two passes, the state of the next one is needed.
        except Exception as error:  # noqa: BLE001 (it must not prevent the checkpoint, and `next` raises it again)
            warn(f"The next pass over the data could not be opened, so the checkpoint does not contain its state: {error!r}.")

    def _take_next_state(self) -> None:
        """Takes the state of the next pass, which is opened again from this state when its first batch is requested."""
        if self._resume is not None:
            return
        with undisturbed(), self.source.undisturbed():
            self._open_next()
            self.close()
        self._resume_from_bookmark()

    def joined_state(self, position: Position, *, is_alone: bool) -> dict[str, Any] | None:
        """Returns the state of all processes if each has its own shard, else `None`. All processes must call it.

        Args:
            position: As in `state_dict`.
            is_alone: Whether only this process calls it.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Makes this feed resume the run of an earlier process. Call it before the first `next`.

        Args:
            state: The result of `state_dict` in that run.
        """
        self._resume = (None if self._bookmarks is None else self._bookmarks.load_state_dict(state, self._position),)

    def reopen(self) -> None:
        """Makes a closed feed continue at its position, inside a pass from the newest state of its loader."""
        if self._iterator is None and self._position.examples:
            self._resume_from_bookmark()

    def _resume_from_bookmark(self) -> None:
        if self._bookmarks is not None:
            self.load_state_dict(self._bookmarks.state_dict(self._position))

    def close(self) -> None:
        """Closes the open pass and releases what it holds, such as worker processes. A batch can still be pushed back."""
        iterator, self._iterator, self._pass = self._iterator, None, None
        if isinstance(iterator, Pass):
            iterator.close()

    def push_back(self, count: int = 1) -> None:
        """Pushes back the last `count` batches: `next` returns them again, and so does another feed of a one-shot iterator."""
        for _ in range(min(count, len(self._returned))):
            fed, self._position, raw = self._returned.pop()
            if raw and isinstance(self.source, OneShotSource):
                self._return_unused(raw)
                self._has_ended_early = False
            else:
                self._buffer.append(fed)

    @property
    def has_more(self) -> bool:
        """Whether the pass certainly has another batch; `False` if that is unknown."""
        source = self.source
        return source.knows_length and source.num_examples is not None and self._position.examples < source.num_examples

    @property
    def pass_has_ended(self) -> bool | None:
        """Whether the last returned batch was the last of its pass; `None` if that is unknown before the next call."""
        if self.source.num_examples is not None and self.source.knows_length:
            return self._position.examples >= self.source.num_examples
        return False if self.source.is_endless else None


def _structure_and_shapes(batch: Batch) -> tuple[Any, list[tuple[Any, Any]]]:
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, [(leaf.shape, leaf.dtype) for leaf in leaves]


class IterableSource(Source):
    """Batches from a re-iterable object, or from a function that returns an iterator; `make` returns one for each pass.

    `adapt` returns the source of an object that `make` returned, if its kind has its own source; `None` otherwise.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        selection: Selection,
        *,
        inputs_only: bool = False,
        num_batches: int | None = None,
        is_endless: bool = False,
        adapt: Callable[[Any], Source | None] = lambda made: None,
    ) -> None:
        self._make = make
        self._selection = selection
        self._inputs_only = inputs_only
        self.num_batches = num_batches
        self.is_endless = is_endless
        self._adapt = adapt

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        made = self._make()
        source = self._adapt(made)
        return drop(LoaderPass(made, self._read), position.examples) if source is None else source.open(position)

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        made = self._make()
        source = self._adapt(made)
        if source is not None:
            return source.reopen(position, bookmark)
        return resumed(LoaderPass(made, self._read, None if bookmark is None else bookmark.state), position, bookmark)

    def _read(self, item: Any) -> Triple:
        return self._selection.split(item, inputs_only=self._inputs_only)


class _OneShotPass(Pass):
    """The batches of an iterator from where it is; closing this pass does not close the iterator."""

    def __init__(self, source: "OneShotSource") -> None:
        self._source = source

    @override
    def __next__(self) -> Triple:
        return self._source.take()

    @override
    def snapshot(self) -> Any:
        return self._source.snapshot()


class OneShotSource(Source):
    """Batches from an iterator that can be consumed only once; `convert` is applied to each."""

    can_restart = can_reread = False

    def __init__(self, iterator: Iterator[Any], selection: Selection, *, inputs_only: bool = False, convert: Callable[[Any], Any] = lambda item: item) -> None:
        self.iterator = iterator
        self._read: Callable[[Any], Triple] = lambda item: selection.split(convert(item), inputs_only=inputs_only)
        self._pushed_back: list[Triple] = []
        self._has_started = False
        self.taken = 0
        self.is_endless = isinstance(iterator, itertools.cycle | itertools.count) or (isinstance(iterator, itertools.repeat) and _repeats_forever(iterator))

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        missing = position.examples - self.taken
        return drop(_OneShotPass(self), missing) if missing > 0 else _OneShotPass(self)

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        methods = state_methods(self.iterator)
        if bookmark is None or methods is None:
            return self.open(position)
        set_state(methods[1], bookmark.state, self.iterator)
        self._pushed_back.clear()
        self.taken = bookmark.position.examples
        return drop(_OneShotPass(self), position.examples, seen=self.taken, warns=False)

    def snapshot(self) -> Any:
        """Returns the iterator's state before the next batch; `None` if it has none, or if that batch was pushed back."""
        methods = state_methods(self.iterator)
        return None if methods is None or self._pushed_back else methods[0]()

    def take(self) -> Triple:
        """Returns the next batch, or raises `StopIteration`."""
        if not self._has_started:
            self._has_started = True
            start_workers(self.iterator)
        triple = self._pushed_back.pop() if self._pushed_back else self._read(next(self.iterator))
        self.taken += count_examples(triple)
        return triple

    def push_back(self, triple: Triple) -> None:
        """Pushes back an unused batch, which becomes the next one."""
        self._pushed_back.append(triple)
        self.taken -= count_examples(triple)


def _repeats_forever(iterator: "itertools.repeat[Any]") -> bool:
    try:
        iterator.__length_hint__()
    except TypeError:
        return True
    return False
