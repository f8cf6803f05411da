"""A source over PyTorch's `DataLoader`, whose order can be repeated if the loader has its own generator.

PyTorch is never imported here: a user who passes one of its objects has imported it.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from fitflax.data.batch import Position, Selection, Triple
from fitflax.data.huggingface import has_exact_state, is_stream
from fitflax.data.resumable import Bookmark, Pass, drop, has_states, set_state
from fitflax.data.sources import Source
from fitflax.data.whole_batches import is_structure
from fitflax.errors import DataError, warn
from fitflax.integers import is_integer

__all__ = ["TorchSource", "is_bare_dataset", "is_loader", "is_loader_iterator", "is_tensor", "torch_batch"]

_MODULE = "torch.utils.data"


def is_loader(data: Any) -> bool:
    """Returns whether `data` is a PyTorch `DataLoader`, or an instance of a subclass."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(data, module.DataLoader)


def is_bare_dataset(data: Any) -> bool:
    """Returns whether `data` is a PyTorch dataset, which yields single examples."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(data, module.Dataset)


def is_tensor(data: Any) -> bool:
    """Returns whether `data` is a PyTorch tensor."""
    module = sys.modules.get("torch")
    return module is not None and hasattr(module, "Tensor") and isinstance(data, module.Tensor)


def is_loader_iterator(data: Any) -> bool:
    """Returns whether `data` is an iterator of a PyTorch loader."""
    module = sys.modules.get(_MODULE)
    return module is not None and any(base.__module__.startswith(_MODULE) or base.__module__.startswith("torchdata.") for base in type(data).__mro__)


def torch_batch(item: Any) -> Any:
    """Returns an item of a `DataLoader` with tensors as NumPy arrays (without a copy where possible) and lists as tuples."""
    torch = sys.modules["torch"]
    if isinstance(item, torch.Tensor):
        return _array(torch, item)
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


class TorchSource(Source):
    """Batches of a `DataLoader`. One with `state_dict` and `load_state_dict`, such as torchdata's `StatefulDataLoader`, can seek.

    A data set or sampler with `set_epoch` receives the number of each pass.
    """

    def __init__(self, loader: Any, selection: Selection, *, inputs_only: bool = False) -> None:
        self._loader = loader
        self._selection = selection
        self._inputs_only = inputs_only
        self.batch_size = loader.batch_size
        # The length of an iterable dataset may be wrong, and asking for it makes PyTorch warn later.
        if not isinstance(loader.dataset, sys.modules[_MODULE].IterableDataset):
            self.num_batches = _length(loader)
            rows = _length(loader.sampler)
            if self.batch_size is not None and rows:
                self.batch_size = min(self.batch_size, rows)
        if self.num_batches == 0:
            raise DataError(f"The {type(loader).__name__} is empty: it has 0 batches.")
        # PyTorch's own collation allocates new tensors for each batch.
        self.owns_batches = loader.batch_size is not None and loader.collate_fn is sys.modules[_MODULE].default_collate
        # The pass whose number the data set and the samplers have, and their epochs after it was set.
        self._announced: int | None = None
        self._epochs: list[int | None] = []
        self.takes_epoch = bool(self._epoch_takers())

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        return drop(self._open_pass(position, None), position.examples)

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        self._warn_if_not_repeatable(bookmark)
        if self._announced != position.passes:
            self.announce(position, bookmark)
        if bookmark is None:
            return self.open(position)
        opened = self._open_pass(position, bookmark.state)
        return drop(opened, position.examples, seen=bookmark.position.examples, warns=not self._has_states)

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
        self._epochs = [_epoch_of(taker) for taker in takers]

    @override
    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        generators = self._generators()
        states, had_workers = [generator.get_state() for generator in generators], _keeps_iterator(self._loader)
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            if _keeps_iterator(self._loader) and not had_workers:
                self._loader._iterator = None  # Persistent workers draw a seed when they start.

    def _open_pass(self, position: Position, state: Any) -> "_TorchPass":
        # With `steps_per_epoch`, a pass may begin inside an epoch, after a callback has set another epoch.
        epochs = [_epoch_of(taker) for taker in self._epoch_takers()]
        if self._announced != position.passes and self._epochs in ([], epochs):
            self.announce(position)
        else:
            self._epochs = epochs
        self._announced = None
        return _TorchPass(self._loader, self._read, self._generators(), self._epoch_takers(), state, has_states=self._has_states)

    @property
    def _has_states(self) -> bool:
        """Whether the loader can seek."""
        return has_states(self._loader) and all(has_exact_state(each) for each in self._data_sets() if is_stream(each))

    def _data_sets(self) -> list[Any]:
        return _distinct(_data_sets_in(self._loader.dataset))

    def _epoch_takers(self) -> list[Any]:
        """Returns the samplers and data sets whose order depends on the number of the pass."""
        return [each for each in _distinct([*self._samplers(), *self._data_sets()]) if callable(getattr(each, "set_epoch", None))]

    def _read(self, item: Any) -> Triple:
        return self._selection.split(torch_batch(item), inputs_only=self._inputs_only)

    def _samplers(self) -> list[Any]:
        batches = self._loader.batch_sampler
        found = [self._loader.sampler, batches, getattr(batches, "sampler", None)]
        return [sampler for sampler in _distinct(found) if sampler is not None]

    def _generators(self) -> list[Any]:
        owners = [self._loader, *self._samplers()]
        return [generator for generator in _distinct(getattr(owner, "generator", None) for owner in owners) if generator is not None]

    def _warn_if_not_repeatable(self, bookmark: Bookmark | None) -> None:
        # Samplers that shuffle have this attribute; if it is None, they draw from the global generator.
        drawing = [sampler for sampler in self._samplers() if hasattr(sampler, "generator")]
        if not drawing or (self._has_states and bookmark is not None):
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

    def __init__(self, loader: Any, read: Any, generators: list[Any], takers: list[Any], state: Any, *, has_states: bool) -> None:
        self._loader = loader
        self._read = read
        self._generators = generators
        self._has_states = has_states
        self._epochs = [_epoch_of(each) for each in takers]
        self._iterator: Any = None
        self._num_left = _length(loader) if state is None or state["loader"] is None else None
        self._states_at_begin: list[Any] | None = None
        self._is_at_beginning = True
        self._states_in_pass: list[Any] = []
        if state is not None:
            self._states_at_begin = list(state["generators"])
            if len(self._states_at_begin) != len(generators):
                raise DataError(
                    f"The {type(loader).__name__} of the saved run had {len(self._states_at_begin)} generators, but this one has {len(generators)}. "
                    "Create it in the same way."
                )
            self._is_at_beginning = state["loader"] is None
            if self._is_at_beginning and state["is_kept"] and not _keeps_iterator(loader):
                iter(loader)  # The saved pass was not the workers' first one, for which a loader draws a seed.
            self._states_in_pass = state["inside"]
            self._set_generators(self._states_at_begin)
            if state["loader"] is not None:
                set_state(loader.load_state_dict, state["loader"], loader)

    def _begin(self) -> Any:
        if self._iterator is None:
            if self._states_at_begin is None:
                self._states_at_begin = [generator.get_state() for generator in self._generators]
            self._iterator = iter(self._loader)
            # Without workers, torchdata draws fewer numbers when it restores a state than when it begins a pass.
            self._set_generators(self._states_in_pass)
        return self._iterator

    def _set_generators(self, states: list[Any]) -> None:
        for generator, saved in zip(self._generators, states, strict=False):
            set_state(generator.set_state, saved, generator)

    def _state(self, generators: list[Any], loader: Any) -> dict[str, Any]:
        inside = [generator.get_state() for generator in self._generators] if loader is not None and self._loader.num_workers == 0 else []
        return {"generators": generators, "loader": loader, "inside": inside, "is_kept": _keeps_iterator(self._loader), "epochs": self._epochs}

    @override
    def __next__(self) -> Triple:
        item = next(self._begin())
        self._num_left = None if self._num_left is None else self._num_left - 1
        return self._read(item)  # type: ignore[no-any-return]

    @property
    @override
    def is_at_end(self) -> bool:
        return self._num_left is not None and self._num_left <= 0

    @override
    def snapshot(self) -> Any:
        if self._iterator is None and self._is_at_beginning and (self._generators or (self._epochs and not self._has_states)):
            return self._state([generator.get_state() for generator in self._generators], None)
        if not self._has_states:
            return None
        self._begin()  # Otherwise the loader reports the state of an earlier, unfinished pass.
        return self._state(self._states_at_begin or [], self._loader.state_dict())

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


def _keeps_iterator(loader: Any) -> bool:
    """Returns whether a loader has started persistent workers; without them it starts a new iterator for each pass."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", None) is not None


def _epoch_of(taker: Any) -> int | None:
    """Returns the epoch of a data set or sampler; `None` if it has none as an attribute."""
    epoch: Any = getattr(taker, "epoch", None)
    return int(epoch) if is_integer(epoch, 0) else None


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def _distinct(things: Any) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())
