"""Sources that yield batches, and `Feed`, which walks over any source pass after pass and knows its position.

A position is counted in examples that finished steps have used, never read off the loader, which may be ahead. Loaders that can save their state go on from
the newest bookmark; sources that cannot seek are read and dropped up to the position, with a warning that names the cost.
"""

import abc
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from fitflax.data.batch import Batcher, FedBatch, Position, Selection, Triple, num_examples, to_numpy
from fitflax.data.passes import KEPT, Bookmark, Bookmarks, LoaderPass, Pass, RowsPass, drop, iterator_methods, resumed, set_state
from fitflax.data.shares import Shares
from fitflax.errors import warn
from fitflax.state import Batch

__all__ = ["Feed", "IterableSource", "OneShotSource", "Source"]


class Source(abc.ABC):
    """Data that can be passed over, in batches.

    Attributes:
        num_batches: Batches in a pass; `None` if unknown.
        num_examples: Examples in a pass; `None` if unknown.
        batch_size: The size that batches have by request; `None` if the first one decides.
        can_restart: Whether a second pass is possible.
        is_endless: Whether a pass is known never to end.
        shuffles: Whether it orders examples by seed and pass; `None` where the order is the data's own.
        owns_batches: Whether the arrays that it yields stay as they are.
        is_checked: Whether its batches are arrays of numbers, all of one length, for certain.
        knows_length: Whether `num_batches` is certain, so that the end of a pass is known without asking for one more batch.
        is_shard: Whether it is the part of the data that this process alone has, as a user said.
        shares: What the processes know of each other's parts, where there are several.

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
    is_endless: bool = False
    shuffles: bool | None = None
    owns_batches: bool = False
    is_checked: bool = False
    knows_length: bool = False
    is_shard: bool = False
    shares: Shares | None = None

    @property
    def all_examples(self) -> int | None:
        """Examples in a pass over the parts of all processes; `None` if unknown."""
        return self.num_examples if self.shares is None else self.shares.examples

    @property
    def all_batches(self) -> int | None:
        """Batches in a pass over the parts of all processes; `None` if unknown."""
        return self.num_batches if self.shares is None else self.shares.batches

    @property
    def all_batch_size(self) -> int | None:
        """Rows of a batch over the parts of all processes; `None` if the first one decides."""
        return self.batch_size if self.shares is None else self.shares.batch_size

    @abc.abstractmethod
    def open(self, position: Position) -> Iterator[Triple]:
        """Returns the batches of pass number `position.passes` that follow its first `position.examples` examples."""

    @property
    def batches_at_once(self) -> int:
        """How many batches are best read in one piece, where a pass can do that."""
        return 1

    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        """Returns the same batches as `open`, in a process that goes on with the run of an earlier one.

        Override it where `open` returns a pass that takes snapshots, or where the order of a pass follows from those before it.

        Args:
            position: Where the run is.
            bookmark: A state of the same pass, at this position or before it; `None` if there is none.
        """
        return self.open(position)


class Feed:
    """Batches of fixed shape, pass after pass, each with the position that the data has after it.

    Args:
        source: Where batches come from.
        batcher: Gives them their shape.
        position: Where to begin.
        is_saved: Whether the position is to be saved, so that states of the source are worth taking.
        kept: How many of the states that are taken are kept.
        clock: Returns seconds; how often states are taken depends on it.

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
        # What was given out since the last batch that was asked for alone, each with the position before it, and as it came from its source.
        self._given: list[tuple[FedBatch, Position, Triple | None]] = []
        # What was read and not yet given out, or taken back, the next one last.
        self._ready: list[FedBatch] = []
        # What `next_like` came upon: the end of the pass, or an error.
        self._found: list[Exception | None] = []
        self._bookmarks = Bookmarks(clock, kept) if is_saved else None
        # The open pass, if its states are taken; what a resume begins from; whether the last pass had a state.
        self._pass: Pass | None = None
        self._resume: tuple[Bookmark | None] | None = None
        self._has_states = False

    def next(self, ahead: int | None = None) -> FedBatch | None:
        """Returns the next batch, or `None` at the end of a pass; the call after that begins the next pass.

        Args:
            ahead: How many batches make a group with this one, itself included: where the source can do that, they are read in one piece, which is nobody
                else's. `None` where they are used one by one.
        """
        self._given.clear()
        if self._ready and not self._found:  # The usual case, of which there is one for each step.
            fed = self._ready.pop()
            self._given.append((fed, self._position, None))
            self._position = fed.position
            return fed
        if self._found:
            error = self._found.pop()
            if error is not None:
                raise error
            return None
        return self._next(ahead)

    def more(self) -> FedBatch | None:
        """Returns what `next` returns; what was given before can be taken back, too."""
        return self._next(None)

    def forget_given(self, *, but: int) -> None:
        """Leaves out what was given and can be taken back, but the last so many batches."""
        del self._given[: len(self._given) - but]

    def next_like(self, batch: Batch, count: int) -> list[FedBatch]:
        """Returns up to `count` more batches, of the shapes of `batch` and of the same pass: all that can be trained on together with it.

        An error on the way, and the end of the pass, are kept for `next`.
        """
        batches: list[FedBatch] = []
        while len(batches) < count and not self._found and not self.pass_has_ended:
            try:
                fed = self._next(count - len(batches))
            except Exception as error:  # noqa: BLE001 (raised by next(), once those before it are used)
                self._found.append(error)
                break
            if fed is None:
                self._found.append(None)
            elif self._are_alike(fed.batch, batch):
                batches.append(fed)
            else:
                self.push_back()
                break
        return batches

    def _are_alike(self, one: Batch, other: Batch) -> bool:
        # Batches of one source of arrays can differ in their number of rows alone, and asking for all shapes takes longer than cutting a batch out.
        return len(one.mask) == len(other.mask) if self.source.is_checked else _shapes(one) == _shapes(other)

    def _next(self, ahead: int | None) -> FedBatch | None:
        raw = None
        if not self._ready:
            if self._iterator is None:
                self._iterator = self._open()
            raw = self._read(self._iterator, ahead)
            if not self._ready:
                self._iterator = self._pass = None
                self._position = Position(self._position.passes + 1)
                return None
        fed = self._ready.pop()
        self._given.append((fed, self._position, raw))
        self._position = fed.position
        return fed

    def _read(self, iterator: Iterator[Triple], ahead: int | None) -> Triple | None:
        """Has what comes next in `_ready`, which stays empty at the end of the pass; returns a batch that came alone as it came."""
        source = self.source
        if source.is_checked and isinstance(iterator, RowsPass):
            rows = iterator.take(ahead or source.batches_at_once)
            if rows is not None:
                assert source.batch_size is not None
                self._ready = self.batcher.cut(rows, source.batch_size, self._position)[::-1]
            return None
        if self._pass is not None and self._bookmarks is not None:
            self._bookmarks.take(self._position, self._pass)
        try:
            triple = next(iterator, None)
        except BaseException:
            self._pass = None  # Its state now may count a batch that nobody got: the bookmarks taken before stay the newest.
            raise
        if triple is None:
            return None
        if not source.owns_batches:
            # A loader may fill one buffer again and again, and a step may still be reading it when the next batch is asked for.
            triple = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, triple)
        fed = self.batcher(triple, is_checked=source.is_checked)
        self._ready.append(fed._replace(position=Position(self._position.passes, self._position.examples + fed.num_real)))
        return triple

    def _open(self) -> Iterator[Triple]:
        resume, self._resume = self._resume, None
        self._has_states = False  # If opening fails, saving must not try it once more.
        iterator = self.source.open(self._position) if resume is None else self.source.reopen(self._position, *resume)
        if self._bookmarks is not None and isinstance(iterator, Pass):
            self._pass = iterator
            self._has_states = self._bookmarks.take(self._position, iterator, insist=True)
        return iterator

    @property
    def full_size(self) -> int | None:
        """The rows of a full batch over all processes; `None` before the first one."""
        return self.batcher.size

    @property
    def position(self) -> Position:
        """The position of the data after the batches given out so far."""
        return self._position

    def state_dict(self, position: Position) -> dict[str, Any]:
        """Returns what `load_state_dict` needs to go on at `position`, fit for a checkpoint; `{}` where the position itself is enough, or all there is.

        Args:
            position: What training has used, which this feed may be ahead of by a batch.
        """
        if self._bookmarks is None:
            return {}
        if position == self._position and self._pass is not None and not self._ready:
            self._bookmarks.take(position, self._pass)
        elif position == self._position and self._iterator is None and self._has_states:
            try:
                self._iterator = self._open()  # Between two passes: the state that matters is that of the one to come.
            except Exception as error:  # noqa: BLE001 (it must not cost the checkpoint, and `next` raises it again)
                warn(f"The next pass over the data could not be opened: {error!r}.")
        return self._bookmarks.state_dict(position)

    def joined_state(self, position: Position, *, is_alone: bool) -> dict[str, Any] | None:
        """Returns what `state_dict` returns in each process, where they have parts of their own and all must call this; `None` elsewhere.

        Args:
            position: As in `state_dict`.
            is_alone: Whether this process calls it alone.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Says that this feed goes on with the run of an earlier process. Called before the first `next`.

        Args:
            state: What `state_dict` returned there.
        """
        self._resume = (None if self._bookmarks is None else self._bookmarks.load_state_dict(state, self._position),)

    def reopen(self) -> None:
        """Has a feed that was closed go on where it was: inside a pass from the newest state that its loader had there."""
        if self._iterator is None and self._position.examples and self._bookmarks is not None:
            self.load_state_dict(self._bookmarks.state_dict(self._position))

    def close(self) -> None:
        """Lets go of the pass that is open and of what it holds, such as worker processes. A batch can still be taken back."""
        iterator, self._iterator, self._pass = self._iterator, None, None
        if isinstance(iterator, Pass):
            iterator.close()

    def push_back(self, count: int = 1) -> None:
        """Takes back the batches given last, which nobody used: `next` gives them again, and so does another feed over an iterator that serves once."""
        for _ in range(min(count, len(self._given))):
            fed, self._position, raw = self._given.pop()
            if raw is not None and isinstance(self.source, OneShotSource):
                self.source.take_back(raw)
            else:
                self._ready.append(fed)

    @property
    def has_more(self) -> bool:
        """Whether the pass has another batch for certain; `False` where only asking for it can tell."""
        source = self.source
        return source.knows_length and source.num_examples is not None and self._position.examples < source.num_examples

    @property
    def pass_has_ended(self) -> bool | None:
        """Whether the batch just given was the last of its pass; `None` if only asking for the next one can tell."""
        if self.source.num_examples is not None and self.source.knows_length:
            return self._position.examples >= self.source.num_examples
        return False if self.source.is_endless else None


def _shapes(batch: Batch) -> tuple[Any, list[tuple[Any, Any]]]:
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, [(leaf.shape, leaf.dtype) for leaf in leaves]


class IterableSource(Source):
    """Batches from a re-iterable object, or from a function that makes an iterator; asked anew for every pass.

    Args:
        make: Makes an iterable of raw batches.
        selection: Which parts are inputs and targets.
        inputs_only: Whether only inputs are needed.
        num_batches: The length if the object tells one.
        is_endless: Whether a pass is known never to end.
        adapt: Returns the source of what `make` made, if it is of a kind that has its own; `None` otherwise.
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
    """The batches of an iterator from where it is; it stays open when this is closed."""

    def __init__(self, source: "OneShotSource") -> None:
        self._source = source

    @override
    def __next__(self) -> Triple:
        return self._source.take()

    @override
    def snapshot(self) -> Any:
        return self._source.snapshot()


class OneShotSource(Source):
    """Batches from an iterator, which can be passed over only once.

    Args:
        iterator: Yields raw batches.
        selection: Which parts are inputs and targets.
        inputs_only: Whether only inputs are needed.
        convert: Applied to each raw batch.
    """

    can_restart = False

    def __init__(self, iterator: Iterator[Any], selection: Selection, *, inputs_only: bool = False, convert: Callable[[Any], Any] = lambda item: item) -> None:
        self.iterator = iterator
        self._read: Callable[[Any], Triple] = lambda item: selection.split(convert(item), inputs_only=inputs_only)
        self._taken_back: list[Triple] = []
        self.taken = 0
        self.is_endless = isinstance(iterator, itertools.cycle | itertools.count) or (isinstance(iterator, itertools.repeat) and _repeats_for_ever(iterator))

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        missing = position.examples - self.taken
        return drop(_OneShotPass(self), missing) if missing > 0 else _OneShotPass(self)

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        methods = iterator_methods(self.iterator)
        if bookmark is None or methods is None:
            return self.open(position)
        set_state(methods[1], bookmark.state, self.iterator)
        self._taken_back.clear()
        self.taken = bookmark.position.examples
        return drop(_OneShotPass(self), position.examples, seen=self.taken, warns=False)

    def snapshot(self) -> Any:
        """Returns the iterator's state before the next batch; `None` if it has none, or if that batch was taken back."""
        methods = iterator_methods(self.iterator)
        return None if methods is None or self._taken_back else methods[0]()

    def take(self) -> Triple:
        """Returns the next batch.

        Raises:
            StopIteration: There is none.
        """
        triple = self._taken_back.pop() if self._taken_back else self._read(next(self.iterator))
        self.taken += num_examples(to_numpy(triple.x, name="x"), name="x")
        return triple

    def take_back(self, triple: Triple) -> None:
        """Takes back a batch that nobody used; it is the next one."""
        self._taken_back.append(triple)
        self.taken -= num_examples(to_numpy(triple.x, name="x"), name="x")


def _repeats_for_ever(iterator: "itertools.repeat[Any]") -> bool:
    try:
        iterator.__length_hint__()
    except TypeError:
        return True
    return False
