"""A source over sequences of batches, such as Keras's `PyDataset`: objects with `__getitem__` and `__len__`.

Keras is never imported here.
"""

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from typing_extensions import override

from fitflax.data.batch import Position, Selection, Triple
from fitflax.data.resumable import Bookmark, Pass, drop, has_states, set_state
from fitflax.data.sources import Source
from fitflax.errors import DataError, warn

__all__ = ["SequenceSource", "is_sequence"]


def is_sequence(data: Any) -> bool:
    """Returns whether `data` is an object that yields its batches by number.

    A list or tuple is not, because it may be in-memory data, and a mapping has keys instead of numbers.

    >>> is_sequence([1, 2]), is_sequence({0: 1}), is_sequence(range(2))
    (False, False, True)
    """
    if isinstance(data, type | str | bytes | list | tuple | Mapping):
        return False
    return hasattr(data, "__getitem__") and (hasattr(data, "__len__") or _is_py_dataset(data))


def _is_py_dataset(data: Any) -> bool:
    return any(base.__name__ == "PyDataset" and base.__module__.startswith("keras.") for base in type(data).__mro__)


@dataclasses.dataclass
class _Epochs:
    """What an object's hooks were told: how many epochs have ended, and whether another one has begun."""

    ended: int = 0
    is_open: bool = False


# By object, because a trainer may get the same object in several calls.
_EPOCHS: "weakref.WeakKeyDictionary[Any, _Epochs]" = weakref.WeakKeyDictionary()


class SequenceSource(Source):
    """The batches `data[0]`, ..., `data[len(data) - 1]` in each pass.

    A pass begins with `data.on_epoch_begin()` and ends with `data.on_epoch_end()`, if `data` has these methods, as in Keras. A resume calls the hooks of the
    passes before, or loads the state of `data` if it has `state_dict` and `load_state_dict`, so that data which reshuffles there repeats its order.
    """

    def __init__(self, data: Any, selection: Selection, *, inputs_only: bool = False, name: str = "data") -> None:
        self._data = data
        self._selection = selection
        self._inputs_only = inputs_only
        self._name = name
        self.num_batches = self._length()
        self.is_endless = self.num_batches is None
        if self.num_batches == 0:
            raise DataError(f"`{name}` is an empty {type(data).__name__}.")
        self._is_undisturbed = False
        self.can_reread = self._hook("on_epoch_begin") is None and not self._draws_for_batches
        try:
            self._epochs = _EPOCHS.setdefault(data, _Epochs())
        except TypeError:  # It has no hash, or there are no weak references to it.
            self._epochs = _Epochs()

    def _length(self) -> int | None:
        return len(self._data) if hasattr(self._data, "__len__") else self._data.num_batches

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        return drop(_SequencePass(self), position.examples)

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        state: dict[str, Any] = {"next": 0, "ended": position.passes, "is_open": False, "data": None} if bookmark is None else bookmark.state
        if state["data"] is not None and has_states(self._data):
            set_state(self._data.load_state_dict, state["data"], self._data)
            self._epochs.ended, self._epochs.is_open = state["ended"], state["is_open"]
        else:
            self._replay(state["ended"])
        opened = _SequencePass(self, state["next"], is_open=self._epochs.is_open)
        return drop(opened, position.examples, seen=0 if bookmark is None else bookmark.position.examples, warns=bookmark is None)

    def _replay(self, ended: int) -> None:
        """Calls the hooks of earlier passes, unless this process has run these passes."""
        epochs = self._epochs
        if epochs.ended == ended > 0 or all(self._hook(name) is None for name in ("on_epoch_begin", "on_epoch_end")):
            return
        if epochs.ended > ended or self._draws_for_batches:
            reason = "has been iterated over before" if epochs.ended > ended else "draws its order from NumPy's global generator"
            warn(
                f"The {type(self._data).__name__} {reason}, so its order of examples cannot be repeated. This run will differ from an uninterrupted one. "
                "Pass a new object whose order depends only on how often on_epoch_begin and on_epoch_end were called."
            )
        while epochs.ended < ended:
            self.begin()
            self.end()

    @property
    def _draws_for_batches(self) -> bool:
        """Whether the data is an iterator of Keras's `ImageDataGenerator`, which draws random numbers for each batch."""
        return hasattr(self._data, "total_batches_seen")

    def _hook(self, name: str) -> Callable[[], Any] | None:
        hook = getattr(self._data, name, None) if self.calls_hooks else None
        is_default = getattr(hook, "__qualname__", "").startswith("PyDataset.")
        return hook if callable(hook) and not is_default else None

    def begin(self) -> None:
        """Calls `on_epoch_begin` of the data, and first `on_epoch_end` if a pass was not read to its end."""
        if self._is_undisturbed or not self.calls_hooks:
            return
        if self._epochs.is_open:
            self.end()
        self._epochs.is_open = True
        hook = self._hook("on_epoch_begin")
        if hook is not None:
            hook()

    def end(self) -> None:
        """Calls `on_epoch_end` of the data."""
        if self._is_undisturbed or not self.calls_hooks or not self._epochs.is_open:
            return
        self._epochs.ended, self._epochs.is_open = self._epochs.ended + 1, False
        hook = self._hook("on_epoch_end")
        if hook is not None:
            hook()

    def numbers(self, first: int) -> Iterator[int]:
        """Returns the numbers of the batches of a pass from `first` on."""
        length = self._length()
        return itertools.count(first) if length is None else iter(range(first, length))

    def read(self, number: int) -> Triple:
        """Returns the batch with a number."""
        try:
            item = self._data[number]
        except IndexError as error:
            raise DataError(
                f"`{self._name}` is a {type(self._data).__name__} of {self._length()} batches, but its batch {number} raised an IndexError: {error}. "
                "Return the number of batches from __len__, and batch i from __getitem__(i)."
            ) from error
        return self._selection.split(item, inputs_only=self._inputs_only)

    def snapshot(self, number: int, *, has_begun: bool) -> dict[str, Any]:
        """Returns the state before the batch with a number."""
        data = self._data.state_dict() if has_states(self._data) else None
        return {"next": number, "ended": self._epochs.ended, "is_open": has_begun, "data": data}

    @override
    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        self._is_undisturbed = True
        try:
            yield
        finally:
            self._is_undisturbed = False


class _SequencePass(Pass):
    """A pass from batch number `first` on; `is_open` tells whether the data knows that it has begun."""

    def __init__(self, source: SequenceSource, first: int = 0, *, is_open: bool = False) -> None:
        self._source = source
        self._next = first
        self._numbers: Iterator[int] | None = None
        self._is_open = is_open

    @override
    def __next__(self) -> Triple:
        if self._numbers is None:
            if not self._is_open:
                self._source.begin()
                self._is_open = True
            self._numbers = self._source.numbers(self._next)
        number = next(self._numbers, None)
        if number is None:
            self._source.end()
            raise StopIteration
        triple = self._source.read(number)
        self._next = number + 1
        return triple

    @override
    def snapshot(self) -> Any:
        return self._source.snapshot(self._next, has_begun=self._is_open)
