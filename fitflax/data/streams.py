"""Sources that yield batches, and `Feed`, which walks over any source pass after pass and knows its position.

A position is counted in examples that finished steps have used, never read off the loader, which may be ahead. Sources that cannot seek are read and
dropped up to the position, with a warning that names the cost.
"""

import abc
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from fitflax.data.batch import Batcher, FedBatch, Position, Selection, Triple, num_examples, to_numpy
from fitflax.errors import DataError, FitflaxWarning

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
        knows_length: Whether `num_batches` is certain, so that the end of a pass is known without asking for one more batch.

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
    knows_length: bool = False

    @abc.abstractmethod
    def open(self, position: Position) -> Iterator[Triple]:
        """Returns the batches of pass number `position.passes` that follow its first `position.examples` examples."""


class Feed:
    """Batches of fixed shape, pass after pass, each with the position that the data has after it.

    Args:
        source: Where batches come from.
        batcher: Gives them their shape.
        position: Where to begin.

    >>> from fitflax.data import adapt
    >>> import numpy as np
    >>> feed = Feed(adapt(np.arange(5.0), batch_size=2, shuffle=False), Batcher(size=2))
    >>> [feed.next().num_real for _ in range(3)], feed.next()
    ([2, 2, 1], None)
    >>> feed.next().position
    Position(passes=1, examples=2)
    """

    def __init__(self, source: Source, batcher: Batcher, position: Position = Position()) -> None:  # noqa: B008 (frozen)
        self.source = source
        self.batcher = batcher
        self._position = position
        self._iterator: Iterator[Triple] | None = None
        self._last: tuple[Triple, Position] | None = None
        self._pushed_back: Triple | None = None

    def next(self) -> FedBatch | None:
        """Returns the next batch, or `None` at the end of a pass; the call after that begins the next pass."""
        if self._iterator is None:
            self._iterator = self.source.open(self._position)
        triple, self._pushed_back = self._pushed_back or next(self._iterator, None), None
        if triple is None:
            self._iterator = None
            self._position = Position(self._position.passes + 1)
            return None
        if not self.source.owns_batches:
            # A loader may fill one buffer again and again, and a step may still be reading it when the next batch is asked for.
            triple = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, triple)
        self._last = (triple, self._position)
        batch, num_real = self.batcher(triple)
        self._position = Position(self._position.passes, self._position.examples + num_real)
        return FedBatch(batch, num_real, self._position)

    @property
    def position(self) -> Position:
        """The position of the data after the batches given out so far."""
        return self._position

    def push_back(self) -> None:
        """Takes back the batch just given, which nobody used: `next` gives it again, and so does another feed over an iterator that serves once."""
        if self._last is None:
            return
        (triple, self._position), self._last = self._last, None
        if isinstance(self.source, OneShotSource):
            self.source.take_back(triple)
        else:
            self._pushed_back = triple

    @property
    def pass_has_ended(self) -> bool | None:
        """Whether the batch just given was the last of its pass; `None` if only asking for the next one can tell."""
        if self.source.num_examples is not None and self.source.knows_length:
            return self._position.examples >= self.source.num_examples
        return False if self.source.is_endless else None


def _skip(batches: Iterator[Triple], examples: int) -> Iterator[Triple]:
    """Returns `batches` without those that hold the first `examples` examples."""
    if not examples:
        return batches
    warnings.warn(
        f"This data source cannot seek: {examples} examples are read and dropped to come to where the run was. In-memory arrays seek at once.",
        FitflaxWarning,
        stacklevel=5,
    )
    seen = 0
    while seen < examples:
        triple = next(batches, None)
        if triple is None:
            raise DataError(f"The run had used {examples} examples of this pass, but the data ends after {seen}. It is not the data of that run.")
        seen += num_examples(to_numpy(triple.x, name="x"), name="x")
    if seen > examples:
        raise DataError(f"The run had used {examples} examples of this pass, which is no boundary of the batches now: {seen}. Were other batch sizes used?")
    return batches


class IterableSource(Source):
    """Batches from a re-iterable object, or from a function that makes an iterator; asked anew for every pass.

    Args:
        make: Makes an iterator of raw batches.
        selection: Which parts are inputs and targets.
        inputs_only: Whether only inputs are needed.
        num_batches: The length if the object tells one.
    """

    def __init__(self, make: Callable[[], Any], selection: Selection, *, inputs_only: bool = False, num_batches: int | None = None) -> None:
        self._make = make
        self._selection = selection
        self._inputs_only = inputs_only
        self.num_batches = num_batches

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        raw = self._make()
        try:
            iterator = iter(raw)
        except TypeError as error:
            raise DataError(f"A function given as data must return an iterable of batches. Received: a {type(raw).__name__}.") from error
        return _skip((self._selection.split(item, inputs_only=self._inputs_only) for item in iterator), position.examples)


class OneShotSource(Source):
    """Batches from an iterator, which can be passed over only once.

    Args:
        iterator: Yields raw batches.
        selection: Which parts are inputs and targets.
        inputs_only: Whether only inputs are needed.
    """

    can_restart = False

    def __init__(self, iterator: Iterator[Any], selection: Selection, *, inputs_only: bool = False) -> None:
        self.iterator = iterator
        self._batches = (selection.split(item, inputs_only=inputs_only) for item in iterator)
        self._taken_back: list[Triple] = []
        self.taken = 0
        self.is_endless = isinstance(iterator, itertools.cycle | itertools.count) or (isinstance(iterator, itertools.repeat) and _repeats_for_ever(iterator))

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        missing = position.examples - self.taken
        return _skip(self._take(), missing) if missing > 0 else self._take()

    def _take(self) -> Iterator[Triple]:
        while True:
            triple = self._taken_back.pop() if self._taken_back else next(self._batches, None)
            if triple is None:
                return
            self.taken += num_examples(to_numpy(triple.x, name="x"), name="x")
            yield triple

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
