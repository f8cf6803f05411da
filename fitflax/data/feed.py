"""`Feed`, which iterates over a source pass after pass and tracks the position.

The position counts examples that finished steps have used; it is never read from the loader, which may be ahead. A resume continues from the newest bookmark
of the loader. Sources that cannot seek are read up to the position, and a warning names the cost.

Errors of the user's data are marked, because they must reach the user unchanged, and the code that ends a run does not know where they were raised.
"""

import contextlib
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from fitflax.data.arrays import RowsPass
from fitflax.data.batch import FedBatch, Position, Triple
from fitflax.data.loader_state import KEPT, Bookmark, Bookmarks, Pass
from fitflax.data.padding import Batcher
from fitflax.data.sources import OneShotSource, Source
from fitflax.data.torch_loader import is_tensor, torch_batch
from fitflax.errors import warn
from fitflax.leaves import aligned_copy
from fitflax.state import Batch

_MARK = "_fitflax_is_from_data"

# From this size on, aligning a copy takes less time than the second copy that JAX makes of memory that is not aligned.
_ALIGNED_BYTES = 2**20


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
        # Batches that were to be joined with others, which could not be read; and whether the pass has ended.
        self._leftover: list[Triple] = []
        self._has_ended_early = False
        # What `next_like` and `next_of_pass` leave to `next`: an error, or None for the end of the pass.
        self._pending: list[Exception | None] = []
        self._must_raise = False  # Whether the error comes from `next_of_pass`.
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

    def open_begun_pass(self) -> None:
        """Opens the pass of a resumed run if it had begun, before a hook can change the data. Errors are raised when its next batch is requested."""
        if self._iterator is None and self._position.examples and not self._buffer:
            try:
                self._iterator = self._open()
            except Exception as error:  # noqa: BLE001 (all processes of a `Shard` must be notified)
                self._iterator = _failing(error)

    @property
    def can_reread(self) -> bool:
        """Whether another feed can read the data before this one, only for its shapes. All processes must query it."""
        bookmark = None if self._resume is None else self._resume[0]
        return self.source.can_reread if bookmark is None else self.source.can_reread_before(bookmark)

    def catch_up(self) -> None:
        """Prepares the data for other uses before a resumed pass is opened."""
        bookmark = None if self._resume is None else self._resume[0]
        if bookmark is not None and self.source.catch_up(bookmark):
            self._resume, self._has_states = (dataclasses.replace(bookmark, is_own=True),), True

    def next(self, ahead: int | None = None) -> FedBatch | None:
        """Returns the next batch, or `None` at the end of a pass; the call after that starts the next pass.

        Args:
            ahead: How many batches, including this one, are used together and so read into one block if possible; `None` if they are used one by one.
        """
        self._returned.clear()
        if not self._pending:
            return self.more(ahead)
        self._must_raise = False
        error = self._pending.pop()
        if error is not None:
            raise error
        return None

    def next_of_pass(self, ahead: int | None = None) -> FedBatch | None:
        """Returns the next batch of the same pass, like `next`. At its end or after an error, returns `None`, and `next` then reports the end or the error."""
        try:
            fed = self.next(ahead)
        except Exception as error:  # noqa: BLE001 (next() raises it)
            self._pending.append(error)
            self._must_raise = True
            return None
        if fed is None:
            self._pending.append(None)
        return fed

    def raise_kept_error(self) -> None:
        """Raises the error that `next_of_pass` has kept, if any. An error from `next_like` is raised only when another batch is requested."""
        if self._must_raise:
            self.next()

    @property
    def has_kept_end(self) -> bool:
        """Whether the following call of `next` returns the end of the pass without reading."""
        return self._pending == [None]

    def more(self, ahead: int | None = None) -> FedBatch | None:
        """Returns the next batch like `next`, but earlier batches can still be pushed back."""
        raw = [] if self._buffer else self._fill(ahead)
        if not self._buffer:
            self._iterator = self._pass = None
            self._position = Position(self._position.passes + 1)
            return None
        fed = self._buffer.pop()
        self._returned.append((fed, self._position, raw))
        self._position = fed.position
        return fed

    def forget_given(self, *, but: int) -> None:
        """Limits what can be pushed back to the last `but` batches."""
        del self._returned[: len(self._returned) - but]

    def next_like(self, batch: Batch, count: int) -> list[FedBatch]:
        """Returns up to `count` more batches of the same pass with the shapes of `batch`.

        The end of the pass, or an error, is kept for the following call of `next`.
        """
        batches: list[FedBatch] = []
        is_checked, rows = self.source.is_checked, len(batch.mask)
        shapes = None if is_checked else _structure_and_shapes(batch)
        while len(batches) < count and not self._pending and (self._buffer or not self.pass_has_ended):
            try:
                fed = self.more(count - len(batches))
            except Exception as error:  # noqa: BLE001 (next() raises it, once the batches before it are used)
                self._pending.append(error)
                break
            if fed is None:
                self._pending.append(None)
            # Batches of checked sources differ only in their number of rows, and comparing all shapes takes longer than slicing a batch.
            elif len(fed.batch.mask) == rows if is_checked else _structure_and_shapes(fed.batch) == shapes:
                batches.append(fed)
            else:
                self.push_back()
                break
        return batches

    def _fill(self, ahead: int | None) -> list[Triple]:
        """Reads the next batches into the buffer, which stays empty at the end of the pass. Returns the raw batches of a batch that was read alone."""
        try:
            if self._iterator is None:
                self._iterator = self._open()
            return self._read(self._iterator, ahead)
        except Exception as error:
            mark_as_from_data(error)
            raise

    def _read(self, iterator: Iterator[Triple], ahead: int | None) -> list[Triple]:
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
        try:
            triple = self._read_raw(iterator, read)
            if triple is None:
                return []
            fed = self.batcher(triple, self._position, is_checked=source.is_checked, more=lambda: self._read_raw(iterator, read))
        except BaseException:
            self._pass = None  # Its state may count a batch that was never returned, so take no more bookmarks.
            raise
        if fed.real is not None:
            source.together = self.batcher.num_combined
        self._buffer.append(fed)
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
                self._return_unused(read)
                raise
        if triple is None:
            self._has_ended_early = True
            return None
        if not self.source.owns_batches:
            triple = jax.tree.map(_copied, triple)
        read.append(triple)
        return triple

    def _return_unused(self, read: list[Triple]) -> None:
        """Puts unused batches where the next read finds them: in the source of a one-shot iterator, or else in this feed."""
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
            took = self._bookmarks.take(self._position, iterator, force=True)
            # Some passes have a state only at their beginning.
            self._has_states = took or (resume is not None and resume[0] is not None)
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
        elif position == self._position == Position(position.passes) and self._iterator is None and self._has_states:
            if not self._holds_passes:
                self._open_next()
            elif self._resume is None or (self._resume[0] is not None and self._resume[0].is_own):
                # The pass is opened again from this state when its first batch is requested.
                with undisturbed(), self.source.undisturbed(), contextlib.closing(self):
                    self._open_next()
                self._resume_from_bookmark(is_own=True)
        return self._bookmarks.state_dict(position)

    def _open_next(self) -> None:
        """Opens the next pass, whose state is needed between two passes."""
        try:
            self._iterator = self._open()
        except Exception as error:  # noqa: BLE001 (it must not prevent the checkpoint, and `next` raises it again)
            warn(f"The next pass over the data could not be opened, so the checkpoint does not contain its state: {error!r}.")

    def joined_state(self, position: Position, *, is_alone: bool) -> dict[str, Any] | None:
        """Returns the state of all processes if each has its own shard, else `None`. All processes must call it.

        Args:
            position: As in `state_dict`.
            is_alone: Whether only this process calls it.
        """
        return None

    def load_state_dict(self, state: Any, num_started: Sequence[int] | None = None) -> None:
        """Makes this feed resume the run of an earlier process. Call it before the first `next`.

        Args:
            state: The result of `state_dict` in that run.
            num_started: The `num_started` of the source at that time.
        """
        bookmark = None if self._bookmarks is None else self._bookmarks.load_state_dict(state, self._position)
        self._resume = (bookmark and dataclasses.replace(bookmark, num_started=num_started),)

    def reopen(self) -> None:
        """Makes a closed feed continue at its position, inside a pass from the newest state of its loader."""
        if self._iterator is None and self._position.examples:
            self._resume_from_bookmark()

    def _resume_from_bookmark(self, *, is_own: bool = False) -> None:
        if self._bookmarks is not None:
            bookmark = self._bookmarks.load_state_dict(self._bookmarks.state_dict(self._position), self._position)
            self._resume = (bookmark and dataclasses.replace(bookmark, is_own=is_own),)

    def close(self) -> None:
        """Closes the open pass and releases what it holds, such as worker processes. A batch can still be pushed back."""
        iterator, self._iterator, self._pass = self._iterator, None, None
        if isinstance(iterator, Pass):
            iterator.close()

    def push_back(self, count: int | None = 1) -> None:
        """Pushes back the last `count` batches, or all since the last `next` for `None`. `next` or another feed of a one-shot iterator returns them again."""
        for _ in range(len(self._returned) if count is None else min(count, len(self._returned))):
            fed, self._position, raw = self._returned.pop()
            if raw and isinstance(self.source, OneShotSource):
                self._return_unused(raw)
                self._has_ended_early = False
            else:
                self._buffer.append(fed)

    @property
    def has_more(self) -> bool | None:
        """Whether the pass has another batch; `None` if only `next_of_pass` can tell."""
        source = self.source
        return self._position.examples < source.num_examples if source.knows_length and source.num_examples is not None else None

    @property
    def pass_has_ended(self) -> bool | None:
        """Whether the last returned batch was the last of its pass; `None` if that is unknown before the next call."""
        if self.source.num_examples is not None and self.source.knows_length:
            return self._position.examples >= self.source.num_examples
        return False if self.source.is_endless else None


def _failing(error: Exception) -> Iterator[Triple]:
    """Returns an iterator that raises an error when it is first read."""
    raise error
    yield


def _copied(leaf: Any) -> Any:
    """Returns a copy of an array or a tensor as a plain array, because a loader may reuse one buffer, which a step may still be reading."""
    if not isinstance(leaf, np.ndarray):
        if not is_tensor(leaf):
            return leaf
        leaf = torch_batch(leaf)
    if isinstance(leaf, np.ma.MaskedArray):
        return leaf.copy()  # Some of its values may be missing.
    if leaf.nbytes < _ALIGNED_BYTES or leaf.dtype.kind not in "biufc":
        return np.array(leaf, order="C")
    return aligned_copy(leaf)


def _structure_and_shapes(batch: Batch) -> tuple[Any, list[tuple[Any, Any]]]:
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, [(leaf.shape, leaf.dtype) for leaf in leaves]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restores the global random generators of `random`, `numpy.random` and PyTorch (CPU, if imported) when its block ends.

    A PyTorch `DataLoader` draws a seed from the global generator whenever it is iterated, so without this, validation would change the order of training data.

    >>> np.random.seed(0)
    >>> with undisturbed():
    ...     inside = np.random.rand()
    >>> bool(np.random.rand() == inside)
    True
    """
    torch: Any = sys.modules.get("torch")
    getters_and_setters: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [(random.getstate, random.setstate), (np.random.get_state, np.random.set_state)]
    if hasattr(torch, "get_rng_state"):  # Otherwise another thread is still importing it.
        getters_and_setters.append((torch.get_rng_state, torch.set_rng_state))
    states = [getter() for getter, _ in getters_and_setters]
    try:
        yield
    finally:
        for (_, setter), state in zip(getters_and_setters, states, strict=True):
            setter(state)


def mark_as_from_data(error: Exception) -> None:
    """Marks an error that was raised while a batch was being read."""
    error.__dict__[_MARK] = True  # Not `setattr`, which a frozen dataclass rejects.


def is_from_data(error: BaseException) -> bool:
    """Returns whether an error, or the cause that it was raised from, was raised by the user's data.

    An error that was raised while this one was handled, such as one of a save, is a different failure.

    >>> error = ValueError("no such file")
    >>> mark_as_from_data(error)
    >>> is_from_data(error), is_from_data(ValueError("no such file")), is_from_data(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."))
    (True, False, True)
    """
    return is_dead_worker(error) or hasattr(error, _MARK) or (error.__cause__ is not None and is_from_data(error.__cause__))


def is_dead_worker(error: BaseException) -> bool:
    """Returns whether an error is PyTorch's for a worker process that ended, which it raises in a handler of SIGCHLD, so at any line of the program."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")
