"""Converts data frames and series of pandas and polars to NumPy arrays, without importing either library."""

import sys
from typing import Any

import numpy as np

from fitflax.data.batch import Selection
from fitflax.errors import DataError
from fitflax.leaves import listed

__all__ = ["is_frame", "is_series", "matrix", "named_columns", "needed_columns", "vector"]


def _is_a(data: Any, name: str) -> bool:
    modules = (sys.modules.get("pandas"), sys.modules.get("polars"))
    return any(isinstance(data, getattr(module, name)) for module in modules if hasattr(module, name))


def is_frame(data: Any) -> bool:
    """Returns whether `data` is a `DataFrame`."""
    return _is_a(data, "DataFrame")


def is_series(data: Any) -> bool:
    """Returns whether `data` is a `Series`."""
    return _is_a(data, "Series")


def matrix(frame: Any, name: str) -> np.ndarray[Any, Any]:
    """Returns a data frame, without its index, as an array `[rows, columns]` of the common dtype of its columns."""
    arrays = _converted(frame, name)
    if not arrays:
        raise DataError(f"`{name}` has no columns.")
    return np.stack([array for _, array in arrays], axis=1)


def named_columns(frame: Any, names: list[str], name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the columns `names` of a data frame, without its index, as arrays `[rows]`."""
    arrays = _converted(frame, name, names)
    twice = sorted({column for index, (column, _) in enumerate(arrays) if column in [other for other, _ in arrays[:index]]})
    if twice:
        raise DataError(f"`{name}` has duplicate column names: {twice}. Rename or drop these columns.")
    return dict(arrays)


def needed_columns(known: list[str] | None, selection: Selection, inputs_only: bool, name: str) -> list[str]:
    """Returns the columns to read from a dataset whose inputs and targets are named columns; `known` are all its columns, `None` if unknown."""
    if selection.inputs is None:
        columns = f" Its columns: {listed([repr(column) for column in known])}." if known else ""
        raise DataError(f"`{name}` has named columns. Pass the names of the inputs and targets: Trainer(inputs=..., targets=...).{columns}")
    return selection.columns(known, inputs_only=inputs_only, name=name)


def vector(series: Any, name: str) -> np.ndarray[Any, Any]:
    """Returns a series, without its index, as an array `[rows]`. Raises a `DataError` if it does not hold numbers."""
    fault = _fault(series)
    if fault:
        raise DataError(f"`{name}` must hold numbers, but it {fault}. Encode it as numbers, and fill in missing values, first.")
    return _values(series)


def _converted(frame: Any, name: str, names: list[str] | None = None) -> list[tuple[Any, np.ndarray[Any, Any]]]:
    pairs = frame.items() if hasattr(frame, "items") else [(series.name, series) for series in frame]
    columns = [(column, series) for column, series in pairs if names is None or column in names]
    faults = [f"{column!r} {fault}" for column, series in columns if (fault := _fault(series))]
    if faults:
        raise DataError(
            f"All columns of `{name}` must hold numbers, but {listed(faults)}. Encode them as numbers, fill in missing values, or drop the columns first."
        )
    return [(column, _values(series)) for column, series in columns]


def _numeric_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Returns the NumPy dtype of a column; `None` if it is not numeric. Categories are not: their codes have no numeric meaning."""
    found = dtype
    for attribute in ("numpy_dtype", "subtype"):  # Of nullable and Arrow types, and of sparse types.
        found = getattr(found, attribute, found)
    return found if isinstance(found, np.dtype) and found.kind in "biuf" else None


def _fault(series: Any) -> str | None:
    """Returns why a column cannot be used, as the end of a sentence that begins with its name; `None` if it can."""
    if hasattr(series, "null_count"):  # polars
        if not (series.dtype.is_numeric() or str(series.dtype) == "Boolean"):
            return f"is of type {series.dtype}"
        return "has missing values" if series.null_count() else None
    if _numeric_dtype(series.dtype) is None:
        return f"is of type {series.dtype}"
    # A nullable column distinguishes missing values from NaN, which a NumPy array cannot.
    return "has missing values" if not isinstance(series.dtype, np.dtype) and not hasattr(series.dtype, "subtype") and series.isna().any() else None


def _values(series: Any) -> np.ndarray[Any, Any]:
    if hasattr(series, "null_count"):
        return np.asarray(series.to_numpy())
    return np.asarray(series.to_numpy(dtype=_numeric_dtype(series.dtype)))
