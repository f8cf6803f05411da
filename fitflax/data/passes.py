"""Passes over loaders whose position can be saved, and the bookmarks that a resume begins from.

A loader may be ahead of training, so its state says nothing about what has been used. A bookmark is a state taken before a batch is drawn, together with the
position that the data has there; a resume takes the newest bookmark at or before the position of training and drops only the batches between.
"""

import abc
import collections
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from typing_extensions import override

from fitflax.data.batch import Position, Triple, num_examples, to_numpy
from fitflax.data.states import UnstorableError, decode, encode
from fitflax.errors import DataError, warn

__all__ = ["KEPT", "Bookmark", "Bookmarks", "LoaderPass", "Pass", "RowsPass", "drop", "has_states", "iterator_methods", "resumed", "set_state"]

# Taking a state may cost at most a hundredth of the time.
_COST_RATIO = 100.0
# Training is at most one batch behind its data; the others are for passes of a single batch.
KEPT = 4


@dataclasses.dataclass(frozen=True)
class Bookmark:
    """A loader's state, and where in the data it belongs.

    Attributes:
        position: The position before the next batch.
        state: What the loader goes on from.
    """

    position: Position
    state: Any


class Pass(Iterator[Triple]):
    """One pass over a loader that may be able to save its position."""

    @abc.abstractmethod
    def snapshot(self) -> Any:
        """Returns the loader's state before the next batch of this pass; `None` if it has none, or none that is newer than the last one."""

    def close(self) -> None:
        """Lets go of what the pass holds, such as worker processes."""


class RowsPass(Iterator[Triple]):
    """The batches of a pass over rows that can be had by their numbers; several in one piece cost little more than one.

    Args:
        read: Returns the given rows: a slice, or an array of their numbers.
        rows: Which rows of the pass are left.
        size: Rows of a batch; the last one may be shorter.
        order: The numbers of all rows in the order of the pass; `None` for the order given.

    >>> data = np.arange(9.0)
    >>> rows = RowsPass(lambda rows: Triple(data[rows], (), None), range(2, 9), 2)
    >>> next(rows).x.tolist(), [triple.x.tolist() for triple in (rows.take(5), rows.take(5))], rows.take(5)
    ([2.0, 3.0], [[4.0, 5.0, 6.0, 7.0], [8.0]], None)
    """

    def __init__(self, read: Callable[[Any], Triple], rows: range, size: int, order: "np.ndarray[Any, Any] | None" = None) -> None:
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
        """Returns the rows of up to so many full batches, one behind the other, or of the shorter last one; `None` at the end of the pass."""
        if not self._rows:
            return None
        count = min(len(self._rows) // self._size, batches) * self._size or len(self._rows)
        taken, self._rows = self._rows[:count], self._rows[count:]
        return self._read(slice(taken.start, taken.stop) if self._order is None else self._order[taken.start : taken.stop])


def has_states(loader: Any) -> bool:
    """Returns whether an object has `state_dict` and `load_state_dict`."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def iterator_methods(iterator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Returns what takes and what sets an iterator's own state, `None` where it has none."""
    for take, put in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(iterator, take) and hasattr(iterator, put):
            return getattr(iterator, take), getattr(iterator, put)
    return None


class LoaderPass(Pass):
    """A pass over an iterable, which saves the state of the iterable or, where that has none, of its iterator.

    Args:
        loader: The iterable.
        read: Turns an item into inputs, targets and weights.
        state: What to go on from; `None` for the pass's beginning.

    Attributes:
        took_state: Whether the pass begins where the state was taken; an iterator may refuse a state, an iterable that does is an error.
    """

    def __init__(self, loader: Any, read: Callable[[Any], Triple], state: Any = None) -> None:
        self._loader = loader
        self._read = read
        self._iterator: Any = None
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
                raise DataError(f"A function given as data must return an iterable of batches. Received: a {type(self._loader).__name__}.") from error
        return self._iterator

    def _set_iterator(self, state: Any) -> None:
        methods = iterator_methods(self._iterator)
        if methods is None:
            return
        try:
            set_state(methods[1], state, self._iterator)
            self.took_state = True
        except DataError as error:
            # This iterator may be half set; another one begins where the pass begins, from where it can be read up to the position.
            warn(f"{str(error).rstrip('.')}. The data is read up to where the run was instead.")
            self._iterator = None
            self._begin()

    @override
    def __next__(self) -> Triple:
        return self._read(next(self._begin()))

    @override
    def snapshot(self) -> Any:
        # An iterator that was left early is nobody's concern, so the pass is begun before its loader is asked.
        iterator = self._begin()
        if has_states(self._loader):
            return self._loader.state_dict()
        methods = iterator_methods(iterator)
        return None if methods is None else methods[0]()

    @override
    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        # The pass's own iterator, not one that the user made.
        if iterator is not self._loader and callable(getattr(iterator, "close", None)):
            iterator.close()


def set_state(put: Callable[[Any], Any], state: Any, loader: Any) -> None:
    """Calls `put(state)`.

    Raises:
        DataError: The loader does not take it.
    """
    try:
        put(state)
    except Exception as error:
        raise DataError(f"The {type(loader).__name__} does not take the state that the run saved: {error}") from error


class Bookmarks:
    """The newest bookmarks, taken so rarely that they cost at most a hundredth of the time.

    Args:
        clock: Returns seconds; it decides where a resume begins to read, never what it reads.
        kept: How many are kept.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, kept: int = KEPT) -> None:
        self._clock = clock
        self._kept: collections.deque[Bookmark] = collections.deque(maxlen=kept)
        self._due = -float("inf")
        self._is_possible = True

    def add(self, bookmark: Bookmark) -> None:
        """Takes a bookmark whose state is encoded already."""
        self._kept.append(bookmark)

    def take(self, position: Position, opened: Pass, *, insist: bool = False) -> bool:
        """Takes a bookmark, if it is time; returns whether it did.

        Args:
            position: The position of the data before the next batch.
            opened: The pass.
            insist: Whether it is taken in any case.
        """
        begin = self._clock()
        if not self._is_possible or not (insist or begin >= self._due):
            return False
        try:
            state = opened.snapshot()
            encoded = None if state is None else encode(state)
        except UnstorableError as error:
            self._give_up(f"The state of this data source cannot be saved in checkpoints: {error}.")
            return False
        except Exception as error:  # noqa: BLE001 (whatever a loader raises must not cost the checkpoint that is being saved)
            self._give_up(f"The state of this data source could not be taken: {error!r}.")
            return False
        end = self._clock()
        self._due = end + _COST_RATIO * (end - begin)
        if encoded is not None:
            self._kept.append(Bookmark(position, encoded))
        return encoded is not None

    def _give_up(self, reason: str) -> None:
        self._is_possible = False
        self._kept.clear()
        warn(f"{reason} A resume will read the data up to where the run was.")

    def state_dict(self, position: Position) -> dict[str, Any]:
        """Returns the newest bookmark at or before a position in the same pass, as a checkpoint holds it; `{}` without one."""
        for bookmark in reversed(self._kept):
            if bookmark.position.passes == position.passes and bookmark.position.examples <= position.examples:
                return {"passes": bookmark.position.passes, "examples": bookmark.position.examples, "loader": bookmark.state}
        return {}

    def load_state_dict(self, saved: Any, position: Position) -> Bookmark | None:
        """Returns the saved bookmark, ready for the loader, if it leads to `position`; it stays the newest one until another is taken."""
        if not saved:
            return None
        bookmark = Bookmark(Position(int(saved["passes"]), int(saved["examples"])), saved["loader"])
        if bookmark.position.passes != position.passes or bookmark.position.examples > position.examples:
            return None
        self.add(bookmark)
        return Bookmark(bookmark.position, decode(bookmark.state))


def drop(batches: Iterator[Triple], examples: int, *, seen: int = 0, warns: bool = True) -> Iterator[Triple]:
    """Returns `batches` without those that lie before a position.

    Args:
        batches: The batches of a pass.
        examples: How many examples of the pass a run has used.
        seen: How many of them come before the first of `batches`.
        warns: Whether to warn of what it costs.

    Raises:
        DataError: The data ends before, or that is no boundary of its batches.
    """
    if examples <= seen:
        return batches
    if warns:
        warn(f"This data source cannot seek: {examples} examples are read and dropped to come to where the run was. In-memory arrays seek at once.")
    while seen < examples:
        triple = next(batches, None)
        if triple is None:
            raise DataError(f"The run had used {examples} examples of this pass, but the data ends after {seen}. It is not the data of that run.")
        seen += num_examples(to_numpy(triple.x, name="x"), name="x")
    if seen > examples:
        raise DataError(f"The run had used {examples} examples of this pass, which is no boundary of the batches now: {seen}. Were other batch sizes used?")
    return batches


def resumed(opened: LoaderPass, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
    """Returns a pass, begun from a bookmark if it took its state, without the batches before `position`."""
    if bookmark is None or not opened.took_state:
        return drop(opened, position.examples)
    return drop(opened, position.examples, seen=bookmark.position.examples, warns=False)
