"""PyTorch's `DataLoader`: batches as NumPy arrays, and an order that can be repeated where the loader has a generator of its own.

PyTorch is never imported here; whoever has one of its objects has imported it.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from fitflax.data.batch import Position, Selection, Triple
from fitflax.data.passes import Bookmark, Pass, drop, has_states, set_state
from fitflax.data.streams import Source
from fitflax.errors import DataError, warn

__all__ = ["TorchSource", "is_bare_dataset", "is_loader", "is_loader_iterator", "is_tensor", "torch_batch"]

# What `torch.utils.data.DataLoader` and its iterators are is asked of the module that the user has imported.
_MODULE = "torch.utils.data"


def is_loader(data: Any) -> bool:
    """Returns whether `data` is a PyTorch `DataLoader`, or of a class that derives from it."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(data, module.DataLoader)


def is_bare_dataset(data: Any) -> bool:
    """Returns whether `data` is a PyTorch data set, which yields single examples."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(data, module.Dataset)


def is_tensor(data: Any) -> bool:
    """Returns whether `data` is a PyTorch tensor."""
    module = sys.modules.get("torch")
    return module is not None and hasattr(module, "Tensor") and isinstance(data, module.Tensor)


def is_loader_iterator(data: Any) -> bool:
    """Returns whether `data` is what `iter(loader)` returns."""
    module = sys.modules.get(_MODULE)
    return module is not None and any(base.__module__.startswith(_MODULE) or base.__module__.startswith("torchdata.") for base in type(data).__mro__)


def torch_batch(item: Any) -> Any:
    """Returns what a `DataLoader` yields with its tensors as NumPy arrays, where possible without a copy, and lists as the tuples that they stand for.

    Raises:
        DataError: A tensor has no NumPy form, such as a sparse one.
    """
    torch = sys.modules["torch"]
    if isinstance(item, torch.Tensor):
        return _array(torch, item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*map(torch_batch, item))
    if isinstance(item, list | tuple):
        return tuple(map(torch_batch, item))
    if isinstance(item, Mapping):
        return {key: torch_batch(value) for key, value in item.items()}
    return item


def _array(torch: Any, tensor: Any) -> np.ndarray[Any, Any]:
    try:
        tensor = tensor.detach().cpu()
        if tensor.dtype == torch.bfloat16:  # NumPy has no such type of its own; the bits are the same.
            return np.asarray(tensor.contiguous().view(torch.int16).numpy().view(jnp.bfloat16))
        return np.asarray(tensor.numpy())
    except (TypeError, RuntimeError) as error:
        raise DataError(f"A tensor of dtype {tensor.dtype} and layout {tensor.layout} cannot become an array: {error}") from error


class TorchSource(Source):
    """The batches of a `DataLoader`.

    Args:
        loader: The loader; if it has `state_dict` and `load_state_dict`, as torchdata's `StatefulDataLoader`, it seeks.
        selection: Which parts are inputs and targets.
        inputs_only: Whether only inputs are needed.

    Raises:
        DataError: The loader has no batch.
    """

    def __init__(self, loader: Any, selection: Selection, *, inputs_only: bool = False) -> None:
        self._loader = loader
        self._selection = selection
        self._inputs_only = inputs_only
        self.batch_size = loader.batch_size
        # What an iterable data set says of its length may be wrong, and PyTorch warns later only if it was asked.
        if not isinstance(loader.dataset, sys.modules[_MODULE].IterableDataset):
            self.num_batches = _length(loader)
            rows = _length(loader.sampler)
            if self.batch_size is not None and rows:
                self.batch_size = min(self.batch_size, rows)
        if self.num_batches == 0:
            raise DataError(f"The {type(loader).__name__} is empty: it has 0 batches.")
        # Batches that PyTorch itself puts together are new ones each time.
        self.owns_batches = loader.batch_size is not None and loader.collate_fn is sys.modules[_MODULE].default_collate

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        return drop(self._pass(position, None), position.examples)

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        self._warn_of_order(bookmark)
        if bookmark is None:
            return self.open(position)
        opened = self._pass(position, bookmark.state)
        return drop(opened, position.examples, seen=bookmark.position.examples, warns=not has_states(self._loader))

    def _pass(self, position: Position, state: Any) -> "_TorchPass":
        for sampler in self._samplers():
            if hasattr(sampler, "set_epoch"):  # As DistributedSampler, whose order follows from its seed and this number.
                sampler.set_epoch(position.passes)
        return _TorchPass(self._loader, self._read, self._generators(), state)

    def _read(self, item: Any) -> Triple:
        return self._selection.split(torch_batch(item), inputs_only=self._inputs_only)

    def _samplers(self) -> list[Any]:
        batches = self._loader.batch_sampler
        found = [self._loader.sampler, batches, getattr(batches, "sampler", None)]
        return [sampler for sampler in _distinct(found) if sampler is not None]

    def _generators(self) -> list[Any]:
        owners = [self._loader, *self._samplers()]
        return [generator for generator in _distinct(getattr(owner, "generator", None) for owner in owners) if generator is not None]

    def _warn_of_order(self, bookmark: Bookmark | None) -> None:
        # Samplers that shuffle have this attribute; without a generator they draw from the global one.
        drawing = [sampler for sampler in self._samplers() if hasattr(sampler, "generator")]
        if not drawing or (has_states(self._loader) and bookmark is not None):
            return
        if any(sampler.generator is None for sampler in drawing):
            reason = "shuffles without a generator of its own. Pass it generator=torch.Generator().manual_seed(0)"
        elif bookmark is None:
            reason = "shuffles, and the checkpoint does not hold the state of its generator"
        else:
            return
        warn(f"The order of examples cannot be repeated, so this run will differ from one that was never stopped: the {type(self._loader).__name__} {reason}.")


class _TorchPass(Pass):
    """A pass over a `DataLoader`, which is iterated, and so draws from its generators, only when the first batch is asked for.

    Its state is that of the generators before that, and, of a loader that has one, the loader's own.
    """

    def __init__(self, loader: Any, read: Any, generators: list[Any], state: Any) -> None:
        self._loader = loader
        self._read = read
        self._generators = generators
        self._iterator: Any = None
        self._first: list[Any] | None = None
        self._is_at_beginning = True
        self._inside: list[Any] = []
        if state is not None:
            self._first = list(state["generators"])
            if len(self._first) != len(generators):
                raise DataError(f"The run's {type(loader).__name__} had {len(self._first)} generators of its own, this one has {len(generators)}.")
            self._is_at_beginning = state["loader"] is None
            if self._is_at_beginning and state["is_kept"] and not _keeps_iterator(loader):
                iter(loader)  # In that run this pass was not the first one of the workers, for which a loader draws a seed from its generator.
            self._inside = state["inside"]
            self._set_generators(self._first)
            if state["loader"] is not None:
                set_state(loader.load_state_dict, state["loader"], loader)

    def _begin(self) -> Any:
        if self._iterator is None:
            if self._first is None:
                self._first = [generator.get_state() for generator in self._generators]
            self._iterator = iter(self._loader)
            # Without workers torchdata draws fewer numbers when it takes up a state than it did when it began the pass.
            self._set_generators(self._inside)
        return self._iterator

    def _set_generators(self, states: list[Any]) -> None:
        for generator, saved in zip(self._generators, states, strict=False):
            set_state(generator.set_state, saved, generator)

    def _state(self, generators: list[Any], loader: Any) -> dict[str, Any]:
        inside = [generator.get_state() for generator in self._generators] if loader is not None and self._loader.num_workers == 0 else []
        return {"generators": generators, "loader": loader, "inside": inside, "is_kept": _keeps_iterator(self._loader)}

    @override
    def __next__(self) -> Triple:
        return self._read(next(self._begin()))  # type: ignore[no-any-return]

    @override
    def snapshot(self) -> Any:
        if self._iterator is None and self._is_at_beginning and self._generators:
            return self._state([generator.get_state() for generator in self._generators], None)
        if not has_states(self._loader):
            return None
        self._begin()  # An iterator of an earlier pass that was left early must not be asked.
        return self._state(self._first or [], self._loader.state_dict())

    @override
    def close(self) -> None:
        # Worker processes end with the iterator; those that are to persist, the loader keeps.
        self._iterator = None


def _keeps_iterator(loader: Any) -> bool:
    """Returns whether a loader with persistent workers has begun them; without them it begins anew each time."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", None) is not None


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def _distinct(things: Any) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())
