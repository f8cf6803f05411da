"""Passes over loaders whose position can be saved, and bookmarks, from which a run resumes.

A loader may read ahead of training, so its state does not say what has been used. A bookmark is a loader's state before a batch, together with the position
of the data there. A run resumes from the newest bookmark at or before its position and drops only the batches in between.
"""

import abc
import collections
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from fitflax.data.batch import Position, Triple, count_examples
from fitflax.data.grain import start_workers
from fitflax.data.loader_state import UnstorableError, decode, encode
from fitflax.errors import DataError, warn

__all__ = ["KEPT", "Bookmark", "Bookmarks", "LoaderPass", "Pass", "RowsPass", "drop", "has_states", "resumed", "set_state", "state_methods"]

# Saving states of loaders may take at most a hundredth of the time.
_COST_RATIO = 100.0
# Training is at most one batch behind the data; the rest are for passes of a single batch.
KEPT = 4


@dataclasses.dataclass(frozen=True)
class Bookmark:
    """A loader's state and the position of the data, before the next batch, that belongs to it."""

    position: Position
    state: Any


class Pass(Iterator[Triple]):
    """A pass over a loader that may be able to save its position."""

    @property
    def is_at_end(self) -> bool:
        """Whether it is known, without requesting anything, that there are no more batches."""
        return False

    @abc.abstractmethod
    def snapshot(self) -> Any:
        """Returns the loader's state before the next batch of this pass; `None` if it has none, or none newer than the last one."""

    def close(self) -> None:
        """Releases what the pass holds, such as worker processes."""


class Order(Protocol):
    """The row numbers of a pass, in order, computed for one slice at a time."""

    def __getitem__(self, rows: slice, /) -> "np.ndarray[Any, Any]":
        """Returns the row numbers of a slice."""


class RowsPass(Iterator[Triple]):
    """The batches of a pass over rows that are read by number; reading several batches together costs little more than one.

    Args:
        read: Returns rows, given as a slice or as an array of row numbers.
        rows: The part of the pass that is left.
        size: Rows of a batch; the last one may be shorter.
        order: The row numbers of the whole pass, in order; `None` if they are not shuffled.

    >>> data = np.arange(9.0)
    >>> rows = RowsPass(lambda rows: Triple(data[rows], (), None), range(2, 9), 2)
    >>> next(rows).x.tolist(), [triple.x.tolist() for triple in (rows.take(5), rows.take(5))], rows.take(5)
    ([2.0, 3.0], [[4.0, 5.0, 6.0, 7.0], [8.0]], None)
    """

    def __init__(self, read: Callable[[Any], Triple], rows: range, size: int, order: "np.ndarray[Any, Any] | Order | None" = None) -> None:
        self._read = read
        self._rows = rows
        self._size = size
        self._order = order

    @override
    def __next__(self) -> Triple:
        triple = self.take(1)
        if triple is None:
            raise StopIteration
        return triple

    def take(self, batches: int) -> Triple | None:
        """Returns the rows of up to `batches` full batches, or of the shorter last one; `None` at the end of the pass."""
        if not self._rows:
            return None
        count = min(len(self._rows) // self._size, batches) * self._size or len(self._rows)
        taken, self._rows = self._rows[:count], self._rows[count:]
        return self._read(slice(taken.start, taken.stop) if self._order is None else self._order[taken.start : taken.stop])


def has_states(loader: Any) -> bool:
    """Returns whether an object has `state_dict` and `load_state_dict`."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def state_methods(iterator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Returns the two methods that get and set an iterator's state; `None` if it has no such methods."""
    for take, setter in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(iterator, take) and hasattr(iterator, setter):
            return getattr(iterator, take), getattr(iterator, setter)
    return None


class LoaderPass(Pass):
    """A pass over an iterable that saves the state of the iterable or, if it has none, of its iterator.

    `took_state` tells whether the pass starts from the given state. An iterator may reject a state; if an iterable does, that is an error.
    """

    def __init__(self, loader: Any, read: Callable[[Any], Triple], state: Any = None) -> None:
        self._loader = loader
        self._read = read
        self._iterator: Any = None
        self._has_started = False
        self.took_state = state is None
        if has_states(loader):
            if state is not None:
                set_state(loader.load_state_dict, state, loader)
                self.took_state = True
        else:
            self._begin()
            if state is not None:
                self._set_iterator(state)

    def _begin(self) -> Any:
        if self._iterator is None:
            try:
                self._iterator = iter(self._loader)
            except TypeError as error:
                raise DataError(f"A function that is passed as data must return an iterable of batches. Received: a {type(self._loader).__name__}.") from error
        return self._iterator

    def _set_iterator(self, state: Any) -> None:
        methods = state_methods(self._iterator)
        if methods is None:
            return
        try:
            set_state(methods[1], state, self._iterator)
            self.took_state = True
        except DataError as error:
            # The state may be half set, so start a new iterator and read it from the beginning of the pass.
            warn(f"{str(error).rstrip('.')}. The data is read from the beginning of the pass up to the saved position instead.")
            self._iterator = None
            self._begin()

    @override
    def __next__(self) -> Triple:
        iterator = self._begin()
        if not self._has_started:
            self._has_started = True
            start_workers(iterator)
        return self._read(next(iterator))

    @override
    def snapshot(self) -> Any:
        # Start this pass first: otherwise the loader may report the state of an earlier, unfinished one.
        iterator = self._begin()
        if has_states(self._loader):
            return self._loader.state_dict()
        methods = state_methods(iterator)
        return None if methods is None else methods[0]()

    @override
    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        # Do not close an iterator that the user passed.
        if iterator is not self._loader and callable(getattr(iterator, "close", None)):
            iterator.close()


def set_state(setter: Callable[[Any], Any], state: Any, loader: Any) -> None:
    """Calls `setter(state)`. Raises a `DataError` if the loader rejects the state."""
    try:
        setter(state)
    except Exception as error:
        raise DataError(f"The {type(loader).__name__} cannot load the state in the checkpoint: {error}") from error


class Bookmarks:
    """The newest bookmarks, taken so rarely that they cost at most a hundredth of the time.

    The clock affects only from where a resumed run reads, never the batches that it uses.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, kept: int = KEPT) -> None:
        self._clock = clock
        self._kept: collections.deque[Bookmark] = collections.deque(maxlen=kept)
        self._next_time = -float("inf")
        self._is_possible = True

    def take(self, position: Position, opened: Pass, *, force: bool = False) -> bool:
        """Takes a bookmark of a pass before its next batch, if one is due or `force` is set; returns whether it did."""
        begin = self._clock()
        if not self._is_possible or not (force or begin >= self._next_time):
            return False
        try:
            state = opened.snapshot()
            encoded = None if state is None else encode(state)
        except UnstorableError as error:
            self._disable(f"The state of this data source cannot be saved in checkpoints: {error}.")
            return False
        except Exception as error:  # noqa: BLE001 (an error of a loader must not prevent the checkpoint)
            self._disable(f"The state of this data source could not be read: {error!r}.")
            return False
        end = self._clock()
        self._next_time = end + _COST_RATIO * (end - begin)
        if encoded is not None:
            self._kept.append(Bookmark(position, encoded))
        return encoded is not None

    def _disable(self, reason: str) -> None:
        self._is_possible = False
        self._kept.clear()
        warn(f"{reason} A resumed run will read the data from the beginning of the pass up to the saved position.")

    def state_dict(self, position: Position) -> dict[str, Any]:
        """Returns the newest bookmark at or before `position` in the same pass, in a form for checkpoints; `{}` if there is none."""
        for bookmark in reversed(self._kept):
            if bookmark.position.passes == position.passes and bookmark.position.examples <= position.examples:
                return {"passes": bookmark.position.passes, "examples": bookmark.position.examples, "loader": bookmark.state}
        return {}

    def load_state_dict(self, saved: Any, position: Position) -> Bookmark | None:
        """Returns the saved bookmark, decoded, if it is at or before `position` in the same pass, and adds it to the bookmarks."""
        if not saved:
            return None
        bookmark = Bookmark(Position(int(saved["passes"]), int(saved["examples"])), saved["loader"])
        if bookmark.position.passes != position.passes or bookmark.position.examples > position.examples:
            return None
        self._kept.append(bookmark)
        return Bookmark(bookmark.position, decode(bookmark.state))


def drop(batches: Iterator[Triple], examples: int, *, seen: int = 0, warns: bool = True) -> Iterator[Triple]:
    """Returns `batches` without those before a position.

    Args:
        batches: The batches of a pass.
        examples: The examples of the pass that a run has used.
        seen: How many of them come before the first of `batches`.
        warns: Whether to warn about the cost.
    """
    if examples <= seen:
        return batches
    if warns:
        warn(f"This data source cannot seek, so {examples} examples are read and dropped to reach the saved position. In-memory arrays seek immediately.")
    while seen < examples:
        triple = next(batches, None)
        if triple is None:
            raise DataError(f"The run had used {examples} examples of this pass, but the data ends after {seen}. Pass the data of the saved run.")
        seen += count_examples(triple)
    if seen > examples:
        raise DataError(
            f"The saved position, after {examples} examples of this pass, is inside a batch that ends after {seen}. Use the batch size of the saved run."
        )
    return batches


def resumed(opened: LoaderPass, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
    """Returns a pass without the batches before `position`; `opened` starts at the bookmark if it took its state."""
    if bookmark is None or not opened.took_state:
        return drop(opened, position.examples)
    return drop(opened, position.examples, seen=bookmark.position.examples, warns=False)
