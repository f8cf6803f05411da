"""Hugging Face `datasets`: a table is treated like arrays, rows read by number in batches; a stream is batched and saves its state where that is exact.

The library is never imported here; whoever has one of its objects has imported it.
"""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from fitflax.data.batch import Position, Selection, Triple, to_numpy
from fitflax.data.indexed import IndexedSource, check_batch_size
from fitflax.data.passes import Bookmark, LoaderPass, drop, has_states, resumed
from fitflax.data.streams import Source
from fitflax.errors import DataError

__all__ = ["StreamSource", "TableSource", "is_split_dict", "is_stream", "is_table"]


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
    """Returns whether `data` is a dict of data sets by split."""
    return _is_a(data, "DatasetDict", "IterableDatasetDict")


class TableSource(IndexedSource):
    """Batches of a `datasets.Dataset`, in the very order that arrays of as many rows have.

    Args:
        table: The data set.
        selection: Which columns are inputs and targets.
        inputs_only: Whether only inputs are needed.
        name: The caller's name for it, for errors.
        batch_size: Rows of a batch; the last one of a pass may be shorter.
        shuffle: Whether each pass has its own order.
        seed: What the order of a pass follows from, together with its number.
        drop_remainder: Whether the short last batch is left out.

    Raises:
        DataError: Nothing says which columns are inputs, a column is missing or does not hold numbers, or there are no examples.
        ConfigError: `batch_size` is not a positive integer.
    """

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
        is_transformed = table.format["type"] == "custom"  # By the user's own function, which is given whole rows and may return other columns.
        self._columns = _columns(None if is_transformed else table.column_names, selection, inputs_only, name)
        self._table = table if is_transformed else table.select_columns(self._columns).with_format("numpy")
        self._features = {} if is_transformed else table.features
        self.read(slice(0, 1))  # Columns that hold no numbers are an error now.

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


class StreamSource(Source):
    """Batches of a `datasets.IterableDataset`, put together by its own `iter`; the number of the pass is its epoch, which its shuffling follows from.

    Args:
        stream: The data set.
        selection: Which columns are inputs and targets.
        inputs_only: Whether only inputs are needed.
        name: The caller's name for it, for errors.
        batch_size: Rows of a batch; the last one of a pass may be shorter.
        drop_remainder: Whether the short last batch is left out.

    Raises:
        DataError: Nothing says which columns are inputs, or a column is missing.
        ConfigError: `batch_size` is not a positive integer.
    """

    owns_batches = True

    def __init__(
        self, stream: Any, selection: Selection, *, inputs_only: bool = False, name: str = "data", batch_size: int = 32, drop_remainder: bool = False
    ) -> None:
        check_batch_size(batch_size)
        self._columns = _columns(stream.column_names, selection, inputs_only, name)
        self._stream = stream
        self._selection = selection
        self._inputs_only = inputs_only
        self._name = name
        self._drop_remainder = drop_remainder
        self.batch_size = int(batch_size)

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        return drop(self._pass(position, None), position.examples)

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        return resumed(self._pass(position, None if bookmark is None else bookmark.state), position, bookmark)

    def _pass(self, position: Position, state: Any) -> LoaderPass:
        # A view of its own for each pass, so that the user's object keeps its epoch and its state.
        view = self._stream.with_format("numpy")
        view.set_epoch(position.passes)
        batches = _Batches(view, self.batch_size or 32, self._drop_remainder)
        exact = has_states(view) and not _loses_rows(getattr(view, "_ex_iterable", None))
        return LoaderPass(_SavedBatches(batches) if exact else batches, self._read, state if exact else None)

    def _read(self, batch: Any) -> Triple:
        return self._selection.split(_arrays(batch, self._columns, self._stream.features or {}, self._name), inputs_only=self._inputs_only)


class _Batches:
    """The batches of a stream, as an iterable."""

    def __init__(self, stream: Any, batch_size: int, drop_remainder: bool) -> None:
        self.stream = stream
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream.iter(self._batch_size, drop_last_batch=self._drop_remainder))


class _SavedBatches:
    """Batches of a stream whose state is exact."""

    def __init__(self, batches: _Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def state_dict(self) -> Any:
        return self._batches.stream.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._batches.stream.load_state_dict(state)


def _loses_rows(node: Any) -> bool:
    """Returns whether the state of a stream leaves out what it holds in a buffer for shuffling; also where that cannot be told."""
    if node is None or type(node).__name__.startswith("BufferShuffled"):
        return True
    parts = [part for value in vars(node).values() for part in (value if isinstance(value, list | tuple) else [value])]
    return any(_loses_rows(part) for part in parts if type(part).__name__.endswith("ExamplesIterable"))


def _columns(known: list[str] | None, selection: Selection, inputs_only: bool, name: str) -> list[str]:
    """Returns the columns that are needed.

    Raises:
        DataError: Nothing says which they are, or one is missing.
    """
    if selection.inputs is None:
        listed = "" if known is None else f" {known}"
        raise DataError(f"Which columns{listed} of `{name}` are what? Say Trainer(inputs=..., targets=...) with their names.")
    return selection.columns(known, inputs_only=inputs_only, name=name)


def _arrays(batch: Any, columns: list[str], features: Any, name: str) -> dict[str, Any]:
    """Returns a batch with these columns as arrays of the types that the data set says; its NumPy format makes all integers int64.

    Raises:
        DataError: A column is ragged, has missing values, or does not hold numbers.
    """
    arrays = dict(batch)
    for column in [column for column in columns if column in arrays]:
        where, values = f"{name}[{column!r}]", arrays[column]
        array = np.asarray(values) if hasattr(values, "__array__") else _stacked(values, where)
        if array.dtype == object and array.size and all(hasattr(value, "__len__") and not isinstance(value, str | bytes) for value in array.flat):
            raise DataError(f"{where} holds lists of different lengths. Pad them first, such as with map().")
        to_numpy({column: array}, name=name)
        dtype = _dtype_of(features.get(column))
        if dtype is not None and dtype.kind in "biu" and array.dtype.kind == "f":
            raise DataError(f"{where} is a column of {dtype} with missing values. Fill them in, or filter their rows out, first.")
        arrays[column] = array if dtype is None else array.astype(jax.dtypes.canonicalize_dtype(dtype), copy=False)
    return arrays


def _stacked(values: Any, where: str) -> np.ndarray[Any, Any]:
    try:
        return np.stack([np.asarray(value) for value in values])
    except ValueError as error:
        raise DataError(f"{where} holds rows of different shapes. Pad them first, such as with map().") from error


def _dtype_of(feature: Any) -> np.dtype[Any] | None:
    """Returns the type of a feature's numbers, however deep in lists; `None` where it says none, such as an image's."""
    while getattr(feature, "feature", None) is not None:
        feature = feature.feature
    try:
        dtype = np.dtype(getattr(feature, "dtype", None) or object)
    except TypeError:
        return None
    return dtype if dtype.kind in "biuf" else None
