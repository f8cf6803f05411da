"""Passes over loaders, bookmarks from which a run resumes, and the form of loaders' states in checkpoints.

A loader may read ahead of training, so its state does not say what has been used. A bookmark is a loader's state before a batch, together with the position
of the data there. A run resumes from the newest bookmark at or before its position and drops only the batches in between.

States are never pickled. For a value that cannot be saved, such as an instance of a custom class, the error names its path and type.
"""

import abc
import collections
import contextlib
import dataclasses
import operator
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from fitflax.data.batch import Position, Triple, count_examples
from fitflax.errors import DataError, warn
from fitflax.leaves import is_key

# Saving states of loaders may take at most a hundredth of the time.
_COST_RATIO = 100.0
# Training is at most one batch behind the data; the rest are for passes of a single batch.
KEPT = 4

# A dict with this key encodes what msgpack would change: a tuple, a tensor, an integer of more than 64 bits.
_TAG = "__fitflax__"
# The second one is reserved by flax's msgpack format.
_RESERVED = {_TAG, "__msgpack_chunked_array__"}
# Checkpoints hold at most 100 levels; a tagged node takes two.
_MAX_DEPTH = 40


@dataclasses.dataclass(frozen=True)
class Bookmark:
    """A loader's state before a batch, and the position of the data there."""

    position: Position
    state: Any
    is_own: bool = False  # Whether this process took it from a pass that had not begun, so that the pass is not resumed.
    num_started: Sequence[int] | None = None  # The source's `num_started` when the run was saved.

    @property
    def started(self) -> Sequence[int] | None:
        """How many iterators over each part of the data were started before the pass; `None` if the state does not contain this."""
        started = self.state.get("started") if isinstance(self.state, dict) else None
        return started if isinstance(started, list) else None

    @property
    def has_begun(self) -> bool:
        """Whether an iterator was started between the beginning of the pass and the save."""
        return any(map(operator.gt, self.num_started or (), self.started or ()))

    def is_before(self, position: Position) -> bool:
        """Returns whether the bookmark is at a position or before it, in the same pass."""
        return self.position.passes == position.passes and self.position.examples <= position.examples


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


def has_states(loader: Any) -> bool:
    """Returns whether an object has `state_dict` and `load_state_dict`."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def has_exact_state(stream: Any) -> bool:
    """Returns whether the state of a Hugging Face `IterableDataset` holds all that a resume needs."""
    return has_states(stream) and not _loses_rows(getattr(stream, "_ex_iterable", None))


def _loses_rows(node: Any) -> bool:
    """Returns whether the state of a stream omits rows in a shuffle buffer; `True` if unknown."""
    if node is None or type(node).__name__.startswith("BufferShuffled"):
        return True
    parts = [part for value in vars(node).values() for part in (value if isinstance(value, list | tuple) else [value])]
    return any(_loses_rows(part) for part in parts if type(part).__name__.endswith("ExamplesIterable"))


def skips_rows(state: Any, loaded: Any) -> bool:
    """Returns whether a resume from a state that contains the state of a Hugging Face stream would skip rows. `loaded` is the state loaded before.

    After a load inside a chunk of rows, the part of the stream that forms batches counts this chunk twice in the first batch. From the second batch on, the
    count is correct.
    """
    if isinstance(state, dict) and isinstance(loaded, dict):
        is_inside_chunk = "num_chunks_since_previous_state" in state and bool(loaded.get("cropped_chunk_length"))
        return (is_inside_chunk and state["batch_idx"] == loaded["batch_idx"] + 1) or any(skips_rows(value, loaded.get(key)) for key, value in state.items())
    return isinstance(state, list) and isinstance(loaded, list) and any(map(skips_rows, state, loaded))


def state_methods(iterator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Returns the two methods that get and set an iterator's state; `None` if it has no such methods."""
    for getter, setter in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(iterator, getter) and hasattr(iterator, setter):
            return getattr(iterator, getter), getattr(iterator, setter)
    return None


def set_state(setter: Callable[[Any], Any], state: Any, loader: Any) -> None:
    """Calls `setter(state)`. Raises a `DataError` if the loader rejects the state."""
    try:
        setter(state)
    except Exception as error:
        raise DataError(f"The {type(loader).__name__} cannot load the state in the checkpoint: {error}") from error


def start_workers(iterator: Any) -> None:
    """Starts all worker processes of a Grain iterator; does nothing for other iterators.

    Otherwise, an iterator whose state was read or set would start its workers one by one, each when its first batch is requested.
    """
    is_grains = any(base.__module__.partition(".")[0] == "grain" for base in type(iterator).__mro__)  # A loader's iterator class is not public.
    if is_grains and hasattr(iterator, "start_prefetch"):
        iterator.start_prefetch()


class LoaderPass(Pass):
    """A pass over an iterable that saves the state of the iterable or, if it has none, of its iterator.

    `took_state` tells whether the pass starts from the given state. An iterator may reject a state; if an iterable does, that is an error.
    """

    def __init__(self, loader: Any, read: Callable[[Any], Triple], state: Any = None) -> None:
        self._loader, self._read = loader, read
        self._iterator: Any = None
        self._has_started = False
        self.took_state = True
        if not has_states(loader):
            methods = state_methods(self._begin())
            self.took_state = state is None or (methods is not None and self._set_iterator(methods[1], state))
        elif state is not None:
            set_state(loader.load_state_dict, state, loader)

    def _begin(self) -> Any:
        if self._iterator is None:
            try:
                self._iterator = iter(self._loader)
            except TypeError as error:
                raise DataError(f"A function that is passed as data must return an iterable of batches. Received: a {type(self._loader).__name__}.") from error
        return self._iterator

    def _set_iterator(self, setter: Callable[[Any], Any], state: Any) -> bool:
        try:
            set_state(setter, state, self._iterator)
        except DataError as error:
            # The state may be half set, so start a new iterator and read it from the beginning of the pass.
            warn(f"{str(error).rstrip('.')}. The data is read from the beginning of the pass up to the saved position instead.")
            self._iterator = None
            self._begin()
            return False
        return True

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


def open_loader(loader: Any, read: Callable[[Any], Triple], position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
    """Returns the pass over an iterable after a position, if possible from a bookmark."""
    opened = LoaderPass(loader, read, None if bookmark is None else bookmark.state)
    if bookmark is None or not opened.took_state:
        return drop(opened, position.examples)
    return drop(opened, position.examples, seen=bookmark.position.examples, warns=False)


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


class Bookmarks:
    """The newest bookmarks, taken so rarely that they cost at most a hundredth of the time.

    The clock affects only where a resumed run begins to read, never the batches that it uses.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, kept: int = KEPT) -> None:
        self._clock = clock
        self._kept: collections.deque[Bookmark] = collections.deque(maxlen=kept)
        self._next_time = -float("inf")
        self._is_possible = True

    def take(self, position: Position, opened: Pass, *, force: bool = False) -> bool:
        """Takes a bookmark of a pass before its next batch, if it is time for one or `force` is set; returns whether it did."""
        # A bookmark at this position is not replaced: after it is loaded, some libraries report the beginning of the data until the next batch.
        if self._kept and self._kept[-1].position == position and (position.examples or not force):
            return False
        begin = self._clock()
        if not self._is_possible or not (force or begin >= self._next_time):
            return False
        try:
            state = opened.snapshot()
            encoded = None if state is None else encode(state)
        except Exception as error:  # noqa: BLE001 (an error of a loader must not prevent the checkpoint)
            self._is_possible = False
            self._kept.clear()
            reason = f"cannot be saved in checkpoints: {error}" if isinstance(error, UnstorableError) else f"could not be read: {error!r}"
            warn(f"The state of this data source {reason}. A resumed run will read the data from the beginning of the pass up to the saved position.")
            return False
        end = self._clock()
        if not force:  # With `force`, the time may include the start of worker processes.
            self._next_time = end + _COST_RATIO * (end - begin)
        if encoded is not None:
            self._kept.append(Bookmark(position, encoded))
        return encoded is not None

    def state_dict(self, position: Position) -> dict[str, Any]:
        """Returns the newest bookmark at or before `position` in the same pass, in a form for checkpoints; `{}` if there is none."""
        for bookmark in reversed(self._kept):
            if bookmark.is_before(position):
                return {"passes": bookmark.position.passes, "examples": bookmark.position.examples, "loader": bookmark.state}
        return {}

    def load_state_dict(self, saved: Any, position: Position) -> Bookmark | None:
        """Returns the saved bookmark, decoded, if it is at or before `position` in the same pass, and adds it to the bookmarks."""
        if not saved:
            return None
        bookmark = Bookmark(Position(int(saved["passes"]), int(saved["examples"])), saved["loader"])
        if not bookmark.is_before(position):
            return None
        self._kept.append(bookmark)
        return Bookmark(bookmark.position, decode(bookmark.state))


class UnstorableError(TypeError):
    """Raised for a state that a checkpoint cannot hold; the message says which value, and where."""


def encode(state: Any, path: str = "state", depth: int = 0) -> Any:
    """Returns a copy of `state` that a checkpoint can hold; `decode` reverses it. `path` names the state in errors.

    It may hold nested dicts, lists and tuples of NumPy, JAX and PyTorch arrays, numbers of any size, `str`, `bytes`, `bool` and `None`.

    >>> encode({"position": (3, None), "seed": 2**70})
    {'position': {'__fitflax__': 'tuple', 'value': [3, None]}, 'seed': {'__fitflax__': 'int', 'value': '1180591620717411303424'}}
    """
    kind = type(state)  # Exact types only: a subclass, such as an enum, would lose what it adds.
    if depth > _MAX_DEPTH:
        raise UnstorableError(f"{path[:100]} is nested more than {_MAX_DEPTH} levels deep")
    if state is None or kind in (bool, float, bytes):
        return state
    if kind is int:
        return state if -(2**63) <= state < 2**63 else _tagged("int", str(state))
    if kind is str:
        # File names that are not UTF-8 contain lone surrogates, which strict UTF-8 cannot encode.
        return state if _is_unicode(state) else _tagged("str", state.encode("utf-8", "surrogatepass"))
    if kind in (list, tuple):
        items = [encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(state)]
        return items if kind is list else _tagged("tuple", items)
    if kind is dict:
        values = {key: encode(value, f"{path}[{key!r}]", depth + 1) for key, value in state.items()}
        if all(type(key) is str and _is_unicode(key) for key in values) and not _RESERVED & set(values):
            return values
        return _tagged("dict", [[encode(key, f"a key of {path}", depth + 1), value] for key, value in values.items()])
    torch = sys.modules.get("torch")
    tag, array = None, state
    if isinstance(state, jax.Array) and not is_key(state):
        tag, array = "jax", np.array(state)
    elif torch is not None and type(state) is torch.Tensor:
        with contextlib.suppress(TypeError, RuntimeError):  # Raised for sparse tensors, for example.
            tag, array = "torch", state.detach().cpu().numpy()
    if not (type(array) is np.ndarray or isinstance(array, np.generic)) or array.dtype.kind not in "biufc":
        raise UnstorableError(f"{path} is a {kind.__module__}.{kind.__qualname__}")
    array = array.copy()  # A loader may overwrite its own.
    return array if tag is None else _tagged(tag, array)


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {_TAG: kind, "value": value}


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def decode(saved: Any) -> Any:
    """Returns the state that `encode` was called with."""
    if isinstance(saved, list):
        return [decode(item) for item in saved]
    if not isinstance(saved, dict):
        # Copied, because a loader may write into its state.
        return saved.copy() if isinstance(saved, np.ndarray) else saved
    if _TAG not in saved:
        return {key: decode(value) for key, value in saved.items()}
    return _DECODERS[saved[_TAG]](saved["value"])


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    import torch

    return torch.from_numpy(np.array(array))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "str": lambda raw: raw.decode("utf-8", "surrogatepass"),
    "tuple": lambda items: tuple(decode(item) for item in items),
    "dict": lambda pairs: {decode(key): decode(value) for key, value in pairs},
    "jax": jnp.asarray,
    "torch": _tensor,
}
