"""Sources over Hugging Face `datasets`.

A `Dataset` is read by row numbers, like arrays. An `IterableDataset` is batched as a stream, and its state is saved if that state is exact. The library is
never imported here.
"""

import functools
from collections.abc import Iterator
from typing import Any, Self

import jax
import numpy as np
from typing_extensions import override

from fitflax.data.arrays import IndexedSource
from fitflax.data.batch import Position, Triple, to_numpy
from fitflax.data.loader_state import has_exact_state
from fitflax.data.sources import DataOptions, IterableSource
from fitflax.errors import DataError


class TableSource(IndexedSource):
    """Batches of a `datasets.Dataset`, in the same order as arrays with as many rows."""

    kinds = ("datasets.Dataset",)

    def __init__(self, data: Any, options: DataOptions) -> None:
        super().__init__(len(data), options)
        self._data = data
        is_transformed = data.format["type"] == "custom"  # A custom transform gets whole rows and may return other columns.
        self._columns = options.columns(None if is_transformed else data.column_names)
        self._table = data if is_transformed else data.select_columns(self._columns).with_format("numpy")
        self._features = {} if is_transformed else data.features
        self.read(slice(0, 1))  # Raises for columns that are not numeric now, rather than in the first step.

    @override
    def read(self, rows: Any) -> Triple:
        return self.options.split(_arrays(self._table[rows], self._columns, self._features, self.options.name))

    @override
    def part(self, begin: int, end: int, options: DataOptions) -> Self:
        return type(self)(self._data.select(range(begin, end)), options)


class StreamSource(IterableSource):
    """Batches of a `datasets.IterableDataset`, assembled by its `iter`; its epoch, which seeds shuffling, is the number of the pass."""

    kinds = ("datasets.IterableDataset",)
    assembles_batches = owns_batches = True

    def __init__(self, data: Any, options: DataOptions) -> None:
        super().__init__(data, options)
        self._columns = options.columns(data.column_names)
        self.batch_size = options.size

    @override
    def loader(self, position: Position) -> Any:
        # Each pass has its own view, so that the user's object keeps its epoch and its state.
        view = self.data.with_format("numpy")
        view.set_epoch(position.passes)
        return _StreamBatches(view, self.options)

    @override
    def read(self, item: Any) -> Triple:
        return self.options.split(_arrays(item, self._columns, self.data.features or {}, self.options.name))


class _StreamBatches:
    """An iterable of a stream's batches, with the state of the stream if that is exact."""

    def __init__(self, stream: Any, options: DataOptions) -> None:
        self._make = functools.partial(stream.iter, options.size, drop_last_batch=options.drop_remainder)
        if has_exact_state(stream):
            self.state_dict, self.load_state_dict = stream.state_dict, stream.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def _arrays(batch: Any, columns: list[str], features: Any, name: str) -> dict[str, Any]:
    """Returns a batch with the given columns as arrays of the dataset's dtypes; its NumPy format alone turns all integers into int64."""
    arrays = dict(batch)
    for column in [column for column in columns if column in arrays]:
        where, values = f"{name}[{column!r}]", arrays[column]
        array = np.asarray(values) if hasattr(values, "__array__") else _stacked(values, where)
        if array.dtype == object and array.size and all(hasattr(value, "__len__") and not isinstance(value, str | bytes) for value in array.flat):
            raise DataError(f"{where} holds lists of different lengths. Pad them first, for example with map().")
        dtype = _dtype_of(features.get(column))
        if dtype is not None and dtype.kind in "iu" and array.dtype.kind in "iu":
            array = array.astype(dtype, copy=False)
        to_numpy({column: array}, name=name)
        if dtype is not None and dtype.kind in "biu" and array.dtype.kind == "f":
            raise DataError(f"{where} is a column of dtype {dtype} with missing values. Fill them in, or remove their rows with filter().")
        arrays[column] = array if dtype is None else array.astype(jax.dtypes.canonicalize_dtype(dtype), copy=False)
    return arrays


def _stacked(values: Any, where: str) -> np.ndarray[Any, Any]:
    try:
        return np.stack([np.asarray(value) for value in values])
    except ValueError as error:
        raise DataError(f"{where} holds rows of different shapes. Pad them first, for example with map().") from error


def _dtype_of(feature: Any) -> np.dtype[Any] | None:
    """Returns the dtype of a feature's numbers, also inside nested lists; `None` if it has none, such as for an image."""
    while getattr(feature, "feature", None) is not None:
        feature = feature.feature
    try:
        dtype = np.dtype(getattr(feature, "dtype", None) or object)
    except TypeError:
        return None
    return dtype if dtype.kind in "biuf" else None
