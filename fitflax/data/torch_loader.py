"""A source over PyTorch's `DataLoader`, whose order can be repeated if the loader has its own generator.

PyTorch is never imported here: a user who passes one of its objects has imported it.
"""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from fitflax.data.batch import Position, Triple, is_instance, is_structure
from fitflax.data.loader_state import Bookmark, Pass, drop, has_exact_state, has_states, set_state, skips_rows
from fitflax.data.sources import AdaptedSource, DataOptions
from fitflax.errors import DataError, is_integer, warn

_MODULE = "torch.utils.data"


def is_tensor(data: Any) -> bool:
    """Returns whether `data` is a PyTorch tensor."""
    return is_instance(data, "torch.Tensor")


def is_loader_iterator(data: Any) -> bool:
    """Returns whether `data` is an iterator of a PyTorch loader."""
    return _MODULE in sys.modules and any(base.__module__.startswith((_MODULE, "torchdata.")) for base in type(data).__mro__)


def torch_batch(item: Any) -> Any:
    """Returns an item of a `DataLoader` with tensors as NumPy arrays (without a copy where possible) and lists as tuples."""
    if is_tensor(item):
        return _array(sys.modules["torch"], item)
    if type(item) in (list, tuple):
        return tuple(map(torch_batch, item))
    if is_structure(item) and not isinstance(item, dict):
        return jax.tree.map(torch_batch, item, is_leaf=lambda node: type(node) in (list, tuple, dict))
    if isinstance(item, Mapping):
        return {key: torch_batch(value) for key, value in item.items()}
    return item


def _array(torch: Any, tensor: Any) -> np.ndarray[Any, Any]:
    try:
        tensor = tensor.detach().cpu()
        if tensor.dtype == torch.bfloat16:  # NumPy has no bfloat16, so its bits are viewed as int16.
            return np.asarray(tensor.contiguous().view(torch.int16).numpy().view(jnp.bfloat16))
        return np.asarray(tensor.numpy())
    except (TypeError, RuntimeError) as error:
        raise DataError(f"A tensor of dtype {tensor.dtype} and layout {tensor.layout} cannot be converted to an array: {error}") from error


class TorchSource(AdaptedSource):
    """Batches of a `DataLoader`. One with `state_dict` and `load_state_dict`, such as torchdata's `StatefulDataLoader`, can seek.

    A data set or sampler with `set_epoch` receives the number of each pass.
    """

    kinds = (f"{_MODULE}.DataLoader",)

    def __init__(self, data: Any, options: DataOptions) -> None:
        super().__init__(data, options)
        self._loader = data
        self.batch_size = data.batch_size
        # The length of an iterable dataset may be wrong, and getting it makes PyTorch warn later.
        if not is_instance(data.dataset, f"{_MODULE}.IterableDataset"):
            self.num_batches = _length(data)
            rows = _length(data.sampler)
            if self.batch_size is not None and rows:
                self.batch_size = min(self.batch_size, rows)
        if self.num_batches == 0:
            raise DataError(f"The {type(data).__name__} is empty: it has 0 batches.")
        # PyTorch's own collation allocates new tensors for each batch.
        self.owns_batches = data.batch_size is not None and data.collate_fn is sys.modules[_MODULE].default_collate
        # The pass whose number was set in the data set and the samplers, and their epochs after that.
        self._announced: int | None = None
        self._epochs: list[int | None] = []
        self.takes_epoch = bool(self._epoch_takers())

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        return drop(self._open_pass(position, None), position.examples)

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        loader = None if bookmark is None else bookmark.state["loader"]
        if bookmark is not None and loader is not None and (not self._has_states or _skips_batches(loader)):
            # The checkpoint is from an earlier version. After a resume, that version saved states that skip too many batches.
            bookmark = dataclasses.replace(bookmark, position=Position(position.passes), state={**bookmark.state, "loader": None, "inside": []})
        self._warn_if_not_repeatable(bookmark)
        if self._announced != position.passes:
            self.announce(position, bookmark)
        if bookmark is None:
            return self.open(position)
        opened = self._open_pass(position, bookmark)
        seen = bookmark.position.examples
        return drop(opened, position.examples, seen=seen, warns=seen < position.examples and opened.loader_state() is None)

    @override
    def announce(self, position: Position, bookmark: Bookmark | None = None) -> None:
        self._announced = position.passes
        data_sets, takers = self._data_sets(), self._epoch_takers()
        saved = None if bookmark is None else bookmark.state.get("epochs")
        for place, taker in enumerate(takers):
            if saved is not None and place < len(saved) and saved[place] is not None:
                taker.set_epoch(saved[place])  # A callback may have set another epoch than the number of the pass.
            elif bookmark is None or saved is not None or not any(taker is each for each in data_sets):
                taker.set_epoch(position.passes)
            # Otherwise the state is from fitflax 0.1, which did not set the epoch of data sets.
        self._epochs = _epochs_of(takers)

    @override
    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        generators = self._generators()
        states, had_workers = _states_of(generators), _keeps_iterator(self._loader)
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            if _keeps_iterator(self._loader) and not had_workers:
                self._loader._iterator = None  # Persistent workers draw a seed when they start.

    def _open_pass(self, position: Position, bookmark: Bookmark | None) -> "_TorchPass":
        # With `steps_per_epoch`, a pass may begin inside an epoch, after a callback has set another epoch.
        epochs = _epochs_of(self._epoch_takers())
        if self._announced != position.passes and self._epochs in ([], epochs):
            self.announce(position)
        else:
            self._epochs = epochs
        self._announced = None
        epochs = _epochs_of(self._epoch_takers())
        return _TorchPass(self._loader, lambda item: self.options.split(torch_batch(item)), self._generators(), epochs, bookmark, has_states=self._has_states)

    @property
    def _has_states(self) -> bool:
        """Whether the loader can seek, unless its states only count batches."""
        return has_states(self._loader) and all(has_exact_state(each) for each in self._data_sets() if is_instance(each, "datasets.IterableDataset"))

    def _data_sets(self) -> list[Any]:
        return _distinct(_data_sets_in(self._loader.dataset))

    def _samplers(self) -> list[Any]:
        batches = self._loader.batch_sampler
        return _distinct([self._loader.sampler, batches, getattr(batches, "sampler", None)])

    def _epoch_takers(self) -> list[Any]:
        """Returns the samplers and data sets whose order depends on the number of the pass."""
        return [each for each in _distinct([*self._samplers(), *self._data_sets()]) if callable(getattr(each, "set_epoch", None))]

    def _generators(self) -> list[Any]:
        return _distinct(getattr(owner, "generator", None) for owner in [self._loader, *self._samplers()])

    def _warn_if_not_repeatable(self, bookmark: Bookmark | None) -> None:
        # Samplers that shuffle have this attribute; if it is None, they draw from the global generator.
        drawing = [sampler for sampler in self._samplers() if hasattr(sampler, "generator")]
        if not drawing or (bookmark is not None and (bookmark.is_own or self._has_states)):
            return
        if any(sampler.generator is None for sampler in drawing):
            reason, advice = "shuffles without its own generator", " Pass it generator=torch.Generator().manual_seed(0)."
        elif bookmark is None:
            reason, advice = "shuffles, and the checkpoint does not contain the state of its generator", ""
        else:
            return
        warn(
            f"The {type(self._loader).__name__} {reason}, so its order of examples cannot be repeated. This run will differ from an uninterrupted one.{advice}"
        )


class _TorchPass(Pass):
    """A pass over a `DataLoader` that draws from its generators only when the first batch is requested.

    Its state holds the generators' states from before that, the epochs of the samplers and data sets that have one and, if the loader can seek, its state.
    """

    def __init__(
        self, loader: Any, read: Callable[[Any], Triple], generators: list[Any], epochs: list[int | None], bookmark: Bookmark | None, *, has_states: bool
    ) -> None:
        state: Any = None if bookmark is None else bookmark.state
        self._loader, self._read, self._generators, self._epochs, self._has_states = loader, read, generators, epochs, has_states
        self._iterator: Any = None
        self._is_at_beginning = state is None or state["loader"] is None
        self._num_left = _length(loader) if self._is_at_beginning else None
        self._states_at_begin: list[Any] | None = None if state is None else list(state["generators"])
        self._states_in_pass: list[Any] = [] if state is None else state["inside"]
        self._loaded = None if state is None else state["loader"]
        # After a load, the data set of each worker may report the state of its beginning until a batch is read from it.
        is_late = bookmark is not None and bookmark.position.examples > 0 and is_instance(loader.dataset, f"{_MODULE}.IterableDataset")
        # Without workers, one batch is enough, and `Bookmarks` takes no state before it.
        self._batches_until_state = loader.num_workers + (getattr(loader, "snapshot_every_n_steps", 1) or math.inf) if is_late and loader.num_workers else 0
        if self._states_at_begin is None:
            return
        if len(self._states_at_begin) != len(generators):
            raise DataError(
                f"The {type(loader).__name__} of the saved run had {len(self._states_at_begin)} generators, but this one has {len(generators)}. "
                "Create it in the same way."
            )
        if self._is_at_beginning and state["is_kept"] and not _keeps_iterator(loader):
            iter(loader)  # The saved pass was not the workers' first one, for which a loader draws a seed.
        self._set_generators(self._states_at_begin)
        if not self._is_at_beginning:
            set_state(loader.load_state_dict, state["loader"], loader)

    def _begin(self) -> Any:
        if self._iterator is None:
            if self._states_at_begin is None:
                self._states_at_begin = _states_of(self._generators)
            self._iterator = iter(self._loader)
            # Without workers, torchdata draws fewer numbers when it restores a state than when it begins a pass.
            self._set_generators(self._states_in_pass)
        return self._iterator

    def _set_generators(self, states: list[Any]) -> None:
        for generator, saved in zip(self._generators, states, strict=False):
            set_state(generator.set_state, saved, generator)

    @override
    def __next__(self) -> Triple:
        item = next(self._begin())
        self._batches_until_state -= 1
        self._num_left = None if self._num_left is None else self._num_left - 1
        return self._read(item)

    @property
    @override
    def is_at_end(self) -> bool:
        return self._num_left is not None and self._num_left <= 0

    @override
    def snapshot(self) -> Any:
        is_new = self._iterator is None and self._is_at_beginning
        state = {"loader": None, "inside": [], "is_kept": _keeps_iterator(self._loader), "epochs": self._epochs}
        if is_new and self._generators:
            return {**state, "generators": _states_of(self._generators)}
        loader = self.loader_state() if self._batches_until_state <= 0 else None
        if loader is None:
            return {**state, "generators": []} if is_new and self._epochs else None
        if skips_rows(loader, self._loaded):
            return None
        inside = _states_of(self._generators) if self._loader.num_workers == 0 else []
        return {**state, "generators": self._states_at_begin or [], "loader": loader, "inside": inside}

    def loader_state(self) -> Any:
        """Returns the loader's state before the next batch; `None` if it cannot seek."""
        if not self._has_states:
            return None
        self._begin()  # Otherwise the loader reports the state of an earlier, unfinished pass.
        state = self._loader.state_dict()
        return None if _skips_batches(state) else state

    @override
    def close(self) -> None:
        # Worker processes end with the iterator, unless the loader keeps them as persistent.
        self._iterator = None


def _data_sets_in(data_set: Any) -> Iterator[Any]:
    """Yields a data set and those that PyTorch's `Subset`, `ConcatDataset`, `ChainDataset` and `StackDataset` in it are made of."""
    yield data_set
    if type(data_set).__module__.startswith(_MODULE):
        parts = getattr(data_set, "datasets", [])
        for part in [*(parts.values() if isinstance(parts, Mapping) else parts), *([data_set.dataset] if hasattr(data_set, "dataset") else [])]:
            yield from _data_sets_in(part)


def _skips_batches(state: Any) -> bool:
    """Returns whether torchdata would skip batches instead of loading a state, because neither the iterable data set nor its iterator has one.

    torchdata counts skipped batches twice, so only the first resume would be exact.
    """
    if not isinstance(state, dict):
        return False
    parts = state.get("_snapshot", {}).get("_worker_snapshots", {"": state}).values()
    return any(part.get("fetcher_state") and part["dataset_state"] is None and part["fetcher_state"]["dataset_iter_state"] is None for part in parts)


def _keeps_iterator(loader: Any) -> bool:
    """Returns whether a loader has started persistent workers; without them it starts a new iterator for each pass."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", None) is not None


def _epochs_of(takers: list[Any]) -> list[int | None]:
    """Returns the epochs of data sets and samplers; `None` for one without such an attribute."""
    epochs: list[Any] = [getattr(taker, "epoch", None) for taker in takers]
    return [int(epoch) if is_integer(epoch, 0) else None for epoch in epochs]


def _states_of(generators: list[Any]) -> list[Any]:
    return [generator.get_state() for generator in generators]


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def _distinct(things: Iterable[Any]) -> list[Any]:
    """Returns objects without duplicates and `None`."""
    return [thing for thing in {id(thing): thing for thing in things}.values() if thing is not None]
