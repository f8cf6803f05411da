"""The one place that looks at what kind of data the user has.

Libraries that a user may have are recognized by their objects: each module for one of them looks in `sys.modules` and imports nothing.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

import fitflax.data.huggingface as huggingface
import fitflax.data.tables as tables
import fitflax.data.torch_loader as torch_loader
from fitflax.data.arrays import ArraySource
from fitflax.data.batch import DEFAULT_BATCH_SIZE, Selection
from fitflax.data.grain import grain_length, is_grain
from fitflax.data.streams import IterableSource, OneShotSource, Source
from fitflax.data.tensorflow import TensorFlowSource, is_tensorflow_dataset
from fitflax.errors import ConfigError, DataError

__all__ = ["adapt", "takes_batch_size"]


@dataclasses.dataclass(frozen=True)
class _Wishes:
    """What the caller of `adapt` said besides the data."""

    y: Any
    sample_weight: Any
    batch_size: int | None
    shuffle: bool
    seed: int
    drop_remainder: bool
    selection: Selection
    inputs_only: bool
    name: str

    @property
    def size(self) -> int:
        return DEFAULT_BATCH_SIZE if self.batch_size is None else self.batch_size

    def refuse(self, data: Any, *names: str) -> None:
        """Checks that nothing was given that data with batches of its own has no use for.

        Raises:
            ConfigError: Something was.
        """
        values = {"y": self.y, "sample_weight": self.sample_weight, "batch_size": self.batch_size, "drop_remainder": self.drop_remainder or None}
        given = [key for key in names if values[key] is not None]
        if given:
            raise ConfigError(f"{', '.join(given)} can only be given with in-memory arrays; batches of `{self.name}` (a {type(data).__name__}) hold their own.")


def adapt(
    data: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_remainder: bool = False,
    selection: Selection = Selection(),  # noqa: B008 (frozen)
    inputs_only: bool = False,
    name: str = "data",
) -> Source:
    """Returns the source that yields the batches of `data`.

    Args:
        data: An array, or a list, tuple or dict whose leaves are all arrays (in-memory data; data frames and series are arrays); a Hugging Face data set; a
            PyTorch `DataLoader`, `tf.data.Dataset`, Grain data set or loader; any other iterable or iterator of batches, a function that makes one of these,
            or a `Source`.
        y: Targets of in-memory data.
        sample_weight: Weights of in-memory data, `[examples]` or `[examples, ...]`.
        batch_size: Rows of a batch of in-memory data or of a Hugging Face data set, 32 by default.
        shuffle: Whether in-memory data or a Hugging Face `Dataset` is taken in another order in each pass.
        seed: What that order follows from.
        drop_remainder: Whether the short last batch of these is left out.
        selection: Which parts of dicts, and which columns, are inputs and targets.
        inputs_only: Whether only inputs are needed, as for `predict`.
        name: The caller's name for `data`, for errors.

    Raises:
        DataError: `data` is nothing that yields batches, or arrays do not fit together.
        ConfigError: An argument that does not go with this kind of data.

    >>> import numpy as np
    >>> adapt(np.zeros((100, 3)), np.zeros(100), batch_size=32).num_batches
    4
    """
    if isinstance(data, Source):
        return data
    wishes = _Wishes(y, sample_weight, batch_size, shuffle, seed, drop_remainder, selection, inputs_only, name)
    for role, given in ((name, data), ("y", y), ("sample_weight", sample_weight)):
        if _is_numbers(given):
            raise DataError(f"`{role}` is a list of Python numbers. Make an array of it: np.asarray({role}).")
    known = _of_a_library(data, wishes)
    if known is not None:
        return known
    if is_in_memory(data):
        if selection.inputs is not None and tables.is_frame(data):
            # As a dict of arrays.
            wanted = selection.columns(list(data.columns), inputs_only=inputs_only or y is not None, name=name)
            data = tables.named_columns(data, wanted, name)
        x, targets, weights = _arrays_of(_plain(data, name), _plain(y, "y"), _plain(sample_weight, "sample_weight"), selection, inputs_only)
        return ArraySource(x, targets, weights, batch_size=wishes.size, shuffle=shuffle, seed=seed, drop_remainder=drop_remainder)
    if isinstance(data, str | bytes) or data is None or not (callable(data) or hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise DataError(f"`{name}` must be arrays, an iterable of batches, or a function that makes an iterator of batches. Received: a {type(data).__name__}.")
    wishes.refuse(data, "y", "sample_weight", "batch_size", "drop_remainder")
    if isinstance(data, Iterator):
        return OneShotSource(data, selection, inputs_only=inputs_only, convert=_converter(data))
    # A class is called like a function.
    if not isinstance(data, type) and (hasattr(data, "__iter__") or not callable(data)):
        length = len(data) if hasattr(data, "__len__") else None
        if length == 0:
            raise DataError(f"`{name}` is an empty {type(data).__name__}.")
        return IterableSource(lambda: data, selection, inputs_only=inputs_only, num_batches=length)
    # What the function makes may be of a kind that has a source of its own.
    return IterableSource(data, selection, inputs_only=inputs_only, adapt=lambda made: _of_a_library(made, wishes))


def _is_numbers(data: Any) -> bool:
    """Returns whether `data` is a list, or lists in a list, of Python numbers."""
    while isinstance(data, list) and data and isinstance(data[0], list):
        data = data[0]
    return isinstance(data, list) and bool(data) and isinstance(data[0], bool | int | float)


def takes_batch_size(data: Any) -> bool:
    """Returns whether `adapt` puts the batches of `data` together itself, so that it can be told their size.

    >>> import numpy as np
    >>> takes_batch_size(np.zeros(3)), takes_batch_size(iter([np.zeros(3)]))
    (True, False)
    """
    return is_in_memory(data) or huggingface.is_table(data) or huggingface.is_stream(data)


def _of_a_library(data: Any, wishes: _Wishes) -> Source | None:
    """Returns the source of an object of a library that has one of its own; `None` for anything else.

    Raises:
        DataError: An object of such a library that does not yield batches, or not the right ones.
        ConfigError: An argument that does not go with it.
    """
    name, selection, inputs_only = wishes.name, wishes.selection, wishes.inputs_only
    if huggingface.is_split_dict(data):
        raise DataError(f"`{name}` is a {type(data).__name__} with the splits {list(data)}. Give one of them: {name}[{next(iter(data), 'train')!r}].")
    if huggingface.is_table(data) or huggingface.is_stream(data):
        wishes.refuse(data, "y", "sample_weight")
        options: dict[str, Any] = {"batch_size": wishes.size, "drop_remainder": wishes.drop_remainder, "inputs_only": inputs_only, "name": name}
        if huggingface.is_stream(data):
            return huggingface.StreamSource(data, selection, **options)
        return huggingface.TableSource(data, selection, shuffle=wishes.shuffle, seed=wishes.seed, **options)
    make: Callable[[], Source]
    if torch_loader.is_loader(data):
        make = lambda: torch_loader.TorchSource(data, selection, inputs_only=inputs_only)  # noqa: E731
    elif torch_loader.is_bare_dataset(data):
        raise DataError(f"`{name}` is a PyTorch data set (a {type(data).__name__}) of single examples. Wrap it: DataLoader({name}, batch_size=32).")
    elif is_tensorflow_dataset(data):
        make = lambda: TensorFlowSource(data, selection, inputs_only=inputs_only)  # noqa: E731
    elif is_grain(data):
        length, is_endless = grain_length(data)
        if length == 0:
            raise DataError(f"`{name}` is an empty {type(data).__name__}.")
        make = lambda: IterableSource(lambda: data, selection, inputs_only=inputs_only, num_batches=length, is_endless=is_endless)  # noqa: E731
    else:
        return None
    wishes.refuse(data, "y", "sample_weight", "batch_size", "drop_remainder")
    return make()


def _converter(iterator: Iterator[Any]) -> Callable[[Any], Any]:
    """Returns what is done with each item of an iterator."""
    return torch_loader.torch_batch if torch_loader.is_loader_iterator(iterator) else lambda item: item


def _plain(tree: Any, name: str) -> Any:
    """Returns in-memory data with the arrays, frames and series of libraries as NumPy arrays."""
    if tables.is_frame(tree):
        return tables.matrix(tree, name)
    if tables.is_series(tree):
        return tables.vector(tree, name)
    if torch_loader.is_tensor(tree):
        return torch_loader.torch_batch(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_plain(part, f"{name}.{field}") for field, part in zip(tree._fields, tree, strict=True)))
    if isinstance(tree, list | tuple):
        return type(tree)(_plain(part, f"{name}[{index}]") for index, part in enumerate(tree))
    if isinstance(tree, dict):
        return {key: _plain(part, f"{name}[{key!r}]") for key, part in tree.items()}
    return tree


def is_in_memory(data: Any) -> bool:
    """Returns whether `data` is an array, or a list, tuple or dict with nothing but arrays in it."""
    if isinstance(data, list | tuple):
        return bool(data) and all(is_in_memory(part) or part is None or (isinstance(part, tuple) and not part) for part in data) and bool(jax.tree.leaves(data))
    if isinstance(data, dict):
        return bool(data) and all(is_in_memory(part) for part in data.values())
    return hasattr(data, "__array__") and hasattr(data, "shape")


def _arrays_of(data: Any, y: Any, weights: Any, selection: Selection, inputs_only: bool) -> tuple[Any, Any, Any]:
    if inputs_only:
        # A tuple is several inputs here: nobody passes targets to predict.
        return (selection.split(data, inputs_only=True).x if isinstance(data, dict) else data), (), weights
    if y is not None:
        x = selection.split(data, inputs_only=True).x if isinstance(data, dict) else data
        return x, y, weights
    if isinstance(data, list) and all(isinstance(part, tuple | dict) for part in data):
        raise DataError(
            f"A list whose elements hold nothing but arrays is in-memory data, so this list of {len(data)} {type(data[0]).__name__}(s) would be the inputs. "
            "For a list of batches give a function, `lambda: batches`."
        )
    triple = selection.split(data)
    if weights is not None and triple.weights is not None:
        raise ConfigError("sample_weight is given twice: as an argument and as the third element of the data.")
    return triple.x, triple.y, triple.weights if weights is None else weights
