"""Sources over Hugging Face `datasets`.

A `Dataset` is read by row numbers, like arrays. An `IterableDataset` is batched as a stream, and its state is saved if that state is exact. The library is
never imported here.
"""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from fitflax.data.batch import Position, Selection, Triple, to_numpy
from fitflax.data.columns import ColumnSource
from fitflax.data.indexed import IndexedSource
from fitflax.data.resumable import Bookmark, LoaderPass, drop, has_states, resumed
from fitflax.data.tables import needed_columns
from fitflax.errors import DataError

__all__ = ["StreamSource", "TableSource", "has_exact_state", "is_split_dict", "is_stream", "is_table"]


def _is_a(data: Any, *names: str) -> bool:
    module = sys.modules.get("datasets")
    kinds = tuple(getattr(module, name) for name in names if hasattr(module, name))
    return bool(kinds) and isinstance(data, kinds)


def is_table(data: Any) -> bool:
    """Returns whether `data` is a `datasets.Dataset`."""
    return _is_a(data, "Dataset")


def is_stream(data: Any) -> bool:
    """Returns whether `data` is a `datasets.IterableDataset`."""
    return _is_a(data, "IterableDataset")


def is_split_dict(data: Any) -> bool:
    """Returns whether `data` is a dict of splits."""
    return _is_a(data, "DatasetDict", "IterableDatasetDict")


class TableSource(IndexedSource):
    """Batches of a `datasets.Dataset`, in the same order as arrays with as many rows; other arguments as in `adapt`."""

    def __init__(
        self,
        table: Any,
        selection: Selection,
        *,
        inputs_only: bool = False,
        name: str = "data",
        batch_size: int = 32,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        super().__init__(len(table), batch_size=batch_size, shuffle=shuffle, seed=seed, drop_remainder=drop_remainder)
        self._given = table
        self._selection = selection
        self._inputs_only = inputs_only
        self._name = name
        is_transformed = table.format["type"] == "custom"  # A custom transform gets whole rows and may return other columns.
        self._columns = needed_columns(None if is_transformed else table.column_names, selection, inputs_only, name)
        self._table = table if is_transformed else table.select_columns(self._columns).with_format("numpy")
        self._features = {} if is_transformed else table.features
        self.read(slice(0, 1))  # Raises for columns that are not numeric now, rather than in the first step.

    @override
    def read(self, rows: Any) -> Triple:
        return self._selection.split(_arrays(self._table[rows], self._columns, self._features, self._name), inputs_only=self._inputs_only)

    @override
    def divide(self, fraction: float, batch_size: int | None = None) -> "tuple[TableSource, TableSource]":
        cut = self.cut(fraction)
        head, tail = self._given.select(range(cut)), self._given.select(range(cut, self._rows))
        return (
            TableSource(head, self._selection, name=self._name, **self.options),
            TableSource(tail, self._selection, name=self._name, batch_size=batch_size or self.options["batch_size"]),
        )


class StreamSource(ColumnSource):
    """Batches of a `datasets.IterableDataset`, assembled by its `iter`; its epoch, which seeds shuffling, is the number of the pass."""

    def __init__(self, stream: Any, selection: Selection, **options: Any) -> None:
        super().__init__(stream.column_names, selection, **options)
        self._stream = stream

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        return drop(self._open_pass(position, None), position.examples)

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        return resumed(self._open_pass(position, None if bookmark is None else bookmark.state), position, bookmark)

    def _open_pass(self, position: Position, state: Any) -> LoaderPass:
        # Each pass has its own view, so that the user's object keeps its epoch and its state.
        view = self._stream.with_format("numpy")
        view.set_epoch(position.passes)
        exact = has_exact_state(view)
        kind = _ResumableBatches if exact else _Batches
        return LoaderPass(kind(view, self.batch_size or 32, self._drop_remainder), self._read, state if exact else None)

    def _read(self, batch: Any) -> Triple:
        return self._selection.split(_arrays(batch, self._columns, self._stream.features or {}, self._name), inputs_only=self._inputs_only)


class _Batches:
    """An iterable of a stream's batches."""

    def __init__(self, stream: Any, batch_size: int, drop_remainder: bool) -> None:
        self._stream = stream
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream.iter(self._batch_size, drop_last_batch=self._drop_remainder))


class _ResumableBatches(_Batches):
    """Batches of a stream whose state is exact, so that it can be saved."""

    def state_dict(self) -> Any:
        return self._stream.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._stream.load_state_dict(state)


def has_exact_state(stream: Any) -> bool:
    """Returns whether the state of a `datasets.IterableDataset` holds all that a resume needs."""
    return has_states(stream) and not _loses_rows(getattr(stream, "_ex_iterable", None))


def _loses_rows(node: Any) -> bool:
    """Returns whether the state of a stream omits rows in a shuffle buffer; `True` if unknown."""
    if node is None or type(node).__name__.startswith("BufferShuffled"):
        return True
    parts = [part for value in vars(node).values() for part in (value if isinstance(value, list | tuple) else [value])]
    return any(_loses_rows(part) for part in parts if type(part).__name__.endswith("ExamplesIterable"))


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
