"""`Source`, the interface of all data, and the sources of iterables, functions, iterators, and sequences of batches.

To add a data source, write a subclass of `AdaptedSource` in its own file, and list it in `fitflax.data.adapt`. Optional libraries are never imported: a user
who passes one of their objects has imported them.
"""

import abc
import contextlib
import dataclasses
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from typing_extensions import override

from fitflax.data.batch import DEFAULT_BATCH_SIZE, Position, Selection, Triple, count_examples, is_instance
from fitflax.data.loader_state import Bookmark, LoaderPass, Pass, drop, has_states, open_loader, set_state, start_workers, state_methods
from fitflax.errors import ConfigError, DataError, integer_of, warn


@dataclasses.dataclass(frozen=True)
class Shares:
    """What the processes know about each other's shards of a dataset; `None` where something is unknown."""

    index: int  # Of this process.
    parts: tuple[int, ...]  # For each process, which part of a batch it feeds. Processes that feed the same part must feed equal rows.
    examples: int | None  # In a pass over all shards.
    batches: int | None  # In a pass over the longest shard.
    largest: int | None  # Examples in the largest shard.
    batch_size: int | None  # Rows of a batch over all processes.

    def total(self, rows: Sequence[int]) -> int:
        """Returns the sum over all parts of a batch; `rows` has one number for each process, and processes with the same part count once."""
        return sum(dict(zip(self.parts, rows, strict=True)).values())

    @property
    def num_parts(self) -> int:
        """The number of parts of a batch."""
        return max(self.parts) + 1


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """The arguments of `adapt` other than the data, and what sources do with them."""

    y: Any = None
    sample_weight: Any = None
    batch_size: int | None = None
    shuffle: bool = True
    seed: int = 0
    drop_remainder: bool = False
    selection: Selection = dataclasses.field(default_factory=Selection)
    inputs_only: bool = False
    name: str = "data"

    @property
    def size(self) -> int:
        """The rows of a batch."""
        return DEFAULT_BATCH_SIZE if self.batch_size is None else integer_of("batch_size", self.batch_size, at_least=1)

    def split(self, raw: Any) -> Triple:
        """Returns the inputs, targets and weights of a raw batch."""
        return self.selection.split(raw, inputs_only=self.inputs_only)

    def columns(self, known: list[Any] | None) -> list[str]:
        """Returns the columns to read from a dataset with named columns; `known` are all of them, `None` if unknown."""
        return self.selection.columns(known, inputs_only=self.inputs_only, name=self.name)

    def reject(self, data: Any, *names: str) -> None:
        """Checks that none of the named arguments was given, because the data comes in batches already."""
        values = {"y": self.y, "sample_weight": self.sample_weight, "batch_size": self.batch_size, "drop_remainder": self.drop_remainder or None}
        passed = ", ".join(name for name in names if values[name] is not None)
        if passed:
            raise ConfigError(
                f"{passed} can only be passed with in-memory arrays. `{self.name}` is a {type(data).__name__}, which defines its own batches; "
                f"leave {passed} out."
            )


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

    @property
    def num_started(self) -> list[int] | None:
        """How many iterators over each part of the user's data were started, if the order of the next one depends on it; else `None`."""
        return None

    def can_reread_before(self, bookmark: Bookmark) -> bool:
        """Returns whether the data can be read before the pass of `bookmark` is opened with `reopen`."""
        return self.can_reread

    def catch_up(self, bookmark: Bookmark) -> bool:
        """Starts as many iterators as the saved run had, unless its pass had begun. Returns whether it did, so that `reopen` does not have to."""
        return False


class AdaptedSource(Source):
    """The base class of sources of one kind of user data: instances of the classes `kinds`, each written as `module.name`.

    `assembles_batches` tells whether the source assembles the batches, so that it uses `batch_size` and `drop_remainder`.
    """

    kinds: tuple[str, ...] = ()
    assembles_batches = False

    def __init__(self, data: Any, options: DataOptions) -> None:
        self.options = options

    @classmethod
    def matches(cls, data: Any) -> bool:
        """Returns whether `data` is of this kind."""
        return is_instance(data, *cls.kinds)

    @classmethod
    def adapt(cls, data: Any, options: DataOptions) -> Self | None:
        """Returns the source of `data` if it is of this kind; else `None`."""
        if not cls.matches(data):
            return None
        options.reject(data, "y", "sample_weight", *(() if cls.assembles_batches else ("batch_size", "drop_remainder")))
        return cls(data, options)

    def set_length(self, data: Any, num_batches: int | None, *, is_endless: bool = False) -> None:
        """Sets the number of batches in a pass, `None` if it is unknown. Raises a `DataError` if there are none."""
        if num_batches == 0:
            raise DataError(f"`{self.options.name}` is an empty {type(data).__name__}.")
        self.num_batches, self.is_endless = num_batches, is_endless


class IterableSource(AdaptedSource):
    """Batches from an iterable, which is iterated over again for each pass."""

    def __init__(self, data: Any, options: DataOptions) -> None:
        super().__init__(data, options)
        self.data = data

    def loader(self, position: Position) -> Any:
        """Returns the object to iterate over in a pass."""
        return self.data

    def read(self, item: Any) -> Triple:
        """Returns the batch in an item of the iterable."""
        return self.options.split(item)

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        return open_loader(self.loader(position), self.read, position, None)

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        return open_loader(self.loader(position), self.read, position, bookmark)


class FunctionSource(Source):
    """The batches of the object that a function returns. It is called for each pass, and `adapt` returns the source of its result."""

    def __init__(self, make: Callable[[], Any], adapt: Callable[[Any], Source]) -> None:
        self._make = make
        self._adapt = adapt
        self._last: Source | None = None
        self._undisturbed: contextlib.ExitStack | None = None

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        return self._next().open(position)

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        source = self._next()
        if source.num_started is not None and (bookmark is None or bookmark.started is None):
            # Assume that the function creates a new object for each pass, which had no earlier iterators.
            if position.passes or any(source.num_started):
                warn(
                    "The checkpoint does not contain the state of the data. If the function returns the same object in each pass, "
                    "this run will differ from an uninterrupted one. Pass that object instead of the function."
                )
            bookmark = Bookmark(Position(position.passes), {"started": source.num_started})
        return source.reopen(position, bookmark)

    def _next(self) -> Source:
        source = self._adapt(self._make())
        if self._undisturbed is not None:
            self._undisturbed.enter_context(source.undisturbed())
            if isinstance(source, SequenceSource):
                source.may_be_new = source.epochs == _Epochs()
        self._last = None if source.num_started is None else source  # Others may hold worker processes.
        source.calls_hooks = self.calls_hooks
        return source

    @override
    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        try:
            with contextlib.ExitStack() as self._undisturbed:
                yield
        finally:
            self._undisturbed = None

    @property
    @override
    def num_started(self) -> list[int] | None:
        return None if self._last is None else self._last.num_started

    @override
    def can_reread_before(self, bookmark: Bookmark) -> bool:
        # The function may always return the same object. Then its first iterator must be that of the resumed pass, and no hook may be called more often.
        has_ended = isinstance(bookmark.state, dict) and bool(bookmark.state.get("ended"))
        return not has_ended and not (bookmark.has_begun and bookmark.position.passes == 0)

    @override
    def catch_up(self, bookmark: Bookmark) -> bool:
        # If a part had no iterators, the function created it for the pass.
        return self._last is not None and 0 not in (bookmark.started or ()) and self._last.catch_up(bookmark)


class OneShotSource(Source, Pass):
    """Batches from an iterator that can be consumed only once; `convert` is applied to each. It is its own pass, and closing it keeps the iterator open."""

    can_restart = can_reread = False

    def __init__(self, iterator: Iterator[Any], options: DataOptions, convert: Callable[[Any], Any] = lambda item: item) -> None:
        self.iterator = iterator
        self.options = options
        self._convert = convert
        self._pushed_back: list[Triple] = []
        self._has_started = False
        self.taken = 0
        self.is_endless = isinstance(iterator, itertools.cycle | itertools.count | itertools.repeat) and operator.length_hint(iterator, -1) < 0

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        return drop(self, max(0, position.examples - self.taken))

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        methods = state_methods(self.iterator)
        if bookmark is None or methods is None:
            if self.taken > position.examples:
                warn(
                    f"The {type(self.iterator).__name__} is {self.taken - position.examples} examples past the saved position. This run will differ from an "
                    "uninterrupted one. Pass a new iterator, or a function that returns one: `lambda: ...`."
                )
            return self.open(position)
        set_state(methods[1], bookmark.state, self.iterator)
        self._pushed_back.clear()
        self.taken = bookmark.position.examples
        return drop(self, position.examples, seen=self.taken, warns=False)

    @override
    def snapshot(self) -> Any:
        methods = state_methods(self.iterator)
        return None if methods is None or self._pushed_back else methods[0]()

    @override
    def __next__(self) -> Triple:
        if not self._has_started:
            self._has_started = True
            start_workers(self.iterator)
        triple = self._pushed_back.pop() if self._pushed_back else self._split(self._convert(next(self.iterator)))
        self.taken += count_examples(triple)
        return triple

    def _split(self, raw: Any) -> Triple:
        # Targets are kept in `predict`, too, because another call may get the batch if it is pushed back.
        options, selection = self.options, self.options.selection
        triple = selection.split_with_targets(raw) if options.inputs_only else None
        return selection.split(raw, inputs_only=options.inputs_only) if triple is None else triple

    def push_back(self, triple: Triple) -> None:
        """Pushes back an unused batch, which becomes the next one."""
        self._pushed_back.append(triple)
        self.taken -= count_examples(triple)


@dataclasses.dataclass
class _Epochs:
    """The calls of an object's hooks so far: how many epochs have ended, and whether another one has begun."""

    ended: int = 0
    is_open: bool = False


# By object, because a trainer may get the same object in several calls.
_EPOCHS: "weakref.WeakKeyDictionary[Any, _Epochs]" = weakref.WeakKeyDictionary()


class SequenceSource(IterableSource):
    """The batches `data[0]`, ..., `data[len(data) - 1]` in each pass, such as of Keras's `PyDataset`.

    A pass begins with `data.on_epoch_begin()` and ends with `data.on_epoch_end()`, if `data` has these methods, as in Keras. A resume calls the hooks of
    earlier passes, or loads the state of `data` if it has `state_dict` and `load_state_dict`, so that data that reshuffles in a hook repeats its order.
    """

    def __init__(self, data: Any, options: DataOptions) -> None:
        super().__init__(data, options)
        self.set_length(data, self.length(), is_endless=self.length() is None)
        self._is_undisturbed = False
        self.may_be_new = False  # If True, `on_epoch_begin` may have to prepare the data, even for a read of its shapes.
        # Keras's `ImageDataGenerator` draws random numbers for each batch.
        self._draws_for_batches = hasattr(data, "total_batches_seen")
        self.can_reread = self._hook("on_epoch_begin") is None and not self._draws_for_batches
        try:
            self.epochs = _EPOCHS.setdefault(data, _Epochs())
        except TypeError:  # It has no hash, or there are no weak references to it.
            self.epochs = _Epochs()

    @classmethod
    @override
    def matches(cls, data: Any) -> bool:
        # A list or tuple may be in-memory data, and a mapping has keys instead of numbers.
        if isinstance(data, type | str | bytes | list | tuple | Mapping) or not hasattr(data, "__getitem__"):
            return False
        return hasattr(data, "__len__") or any(base.__name__ == "PyDataset" and base.__module__.startswith("keras.") for base in type(data).__mro__)

    def length(self) -> int | None:
        """Returns the number of batches, which may change from pass to pass; `None` if there is no end."""
        return len(self.data) if hasattr(self.data, "__len__") else self.data.num_batches

    @override
    def loader(self, position: Position) -> Any:
        return _Epoch(self)

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        epoch = _Epoch(self)
        if bookmark is None:
            self.replay(position.passes)
        else:
            epoch.load_state_dict(bookmark.state)
        epoch.is_open = self.epochs.is_open
        seen = 0 if bookmark is None else bookmark.position.examples
        return drop(LoaderPass(epoch, self.read), position.examples, seen=seen, warns=bookmark is None)

    def replay(self, ended: int) -> None:
        """Calls the hooks of earlier passes, unless this process has run these passes."""
        epochs = self.epochs
        if epochs.ended == ended > 0 or all(self._hook(name) is None for name in ("on_epoch_begin", "on_epoch_end")):
            return
        if epochs.ended > ended or self._draws_for_batches:
            reason = "has been iterated over before" if epochs.ended > ended else "draws its order from NumPy's global generator"
            warn(
                f"The {type(self.data).__name__} {reason}, so its order of examples cannot be repeated. This run will differ from an uninterrupted one. "
                "Pass a new object whose order depends only on how often on_epoch_begin and on_epoch_end were called."
            )
        while epochs.ended < ended:
            self.begin()
            self.end()

    def _hook(self, name: str) -> Callable[[], Any] | None:
        hook = getattr(self.data, name, None) if self.calls_hooks else None
        is_default = getattr(hook, "__qualname__", "").startswith("PyDataset.")
        return hook if callable(hook) and not is_default else None

    def begin(self) -> None:
        """Calls `on_epoch_begin` of the data, and first `on_epoch_end` if a pass was not read to its end."""
        self.end()
        if self.calls_hooks and (self.may_be_new or not self._is_undisturbed):
            self.epochs.is_open = not self._is_undisturbed or self.epochs.is_open
            if (hook := self._hook("on_epoch_begin")) is not None:
                hook()

    def end(self) -> None:
        """Calls `on_epoch_end` of the data."""
        if self.calls_hooks and not self._is_undisturbed and self.epochs.is_open:
            self.epochs.ended, self.epochs.is_open = self.epochs.ended + 1, False
            if (hook := self._hook("on_epoch_end")) is not None:
                hook()

    @override
    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        self._is_undisturbed = True
        try:
            yield
        finally:
            self._is_undisturbed = False


class _Epoch:
    """The batches of a pass. Its state says which one is next, and which hooks were called."""

    def __init__(self, source: SequenceSource) -> None:
        self._source = source
        self._next = 0
        self.is_open = False

    def __iter__(self) -> Iterator[Any]:
        source = self._source
        if not self.is_open:
            source.begin()
            self.is_open = True
        length = source.length()
        while length is None or self._next < length:
            yield self._take(length)  # Not assigned to a variable, which would keep the batch alive while the next one is made.
        source.end()

    def _take(self, length: int | None) -> Any:
        source = self._source
        try:
            item = source.data[self._next]
        except IndexError as error:
            raise DataError(
                f"`{source.options.name}` is a {type(source.data).__name__} of {length} batches, but its batch {self._next} raised an IndexError: {error}. "
                "Return the number of batches from __len__, and batch i from __getitem__(i)."
            ) from error
        self._next += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        source = self._source
        data = source.data.state_dict() if has_states(source.data) else None
        return {"next": self._next, "ended": source.epochs.ended, "is_open": self.is_open, "data": data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        source = self._source
        if state["data"] is not None and has_states(source.data):
            set_state(source.data.load_state_dict, state["data"], source.data)
            source.epochs.ended, source.epochs.is_open = state["ended"], state["is_open"]
        else:
            source.replay(state["ended"])
        self._next = state["next"]
