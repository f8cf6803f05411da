"""Data frames and series of pandas and polars as NumPy arrays. Neither is imported here; whoever has one of their objects has imported it."""

import sys
from typing import Any

import numpy as np

from fitflax.errors import DataError

__all__ = ["is_frame", "is_series", "matrix", "named_columns", "vector"]


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
    """Returns a frame as an array `[rows, columns]` of the type that all its columns fit into.

    Args:
        frame: The frame; its index is ignored.
        name: What the caller calls it, for errors.

    Raises:
        DataError: It has no columns, or columns that hold no numbers; all of them are named.
    """
    arrays = _converted(frame, name)
    if not arrays:
        raise DataError(f"`{name}` has no columns.")
    return np.stack([array for _, array in arrays], axis=1)


def named_columns(frame: Any, names: list[str], name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Returns columns of a frame as arrays `[rows]`.

    Args:
        frame: The frame; its index is ignored.
        names: Which columns.
        name: What the caller calls the frame, for errors.

    Raises:
        DataError: Columns that hold no numbers, all of them named, or that have the same name.
    """
    arrays = _converted(frame, name, names)
    twice = sorted({column for index, (column, _) in enumerate(arrays) if column in [other for other, _ in arrays[:index]]})
    if twice:
        raise DataError(f"`{name}` has several columns of the name {twice}.")
    return dict(arrays)


def vector(series: Any, name: str) -> np.ndarray[Any, Any]:
    """Returns a series as an array `[rows]`.

    Args:
        series: The series; its index is ignored.
        name: What the caller calls it, for errors.

    Raises:
        DataError: It does not hold numbers.
    """
    fault = _fault(series)
    if fault:
        raise DataError(f"`{name}` must hold numbers, but it {fault}. Encode it as numbers first.")
    return _values(series)


def _converted(frame: Any, name: str, names: list[str] | None = None) -> list[tuple[Any, np.ndarray[Any, Any]]]:
    pairs = frame.items() if hasattr(frame, "items") else [(series.name, series) for series in frame]
    columns = [(column, series) for column, series in pairs if names is None or column in names]
    faults = [f"{column!r} {fault}" for column, series in columns if (fault := _fault(series))]
    if faults:
        raise DataError(f"All columns of `{name}` must hold numbers, but {', '.join(faults)}. Encode them as numbers, or leave them out, first.")
    return [(column, _values(series)) for column, series in columns]


def _number_type(dtype: Any) -> np.dtype[Any] | None:
    """Returns the NumPy type of a column's values; `None` for those that are no numbers, such as categories, whose codes nobody asked for."""
    found = dtype
    for attribute in ("numpy_dtype", "subtype"):  # Nullable and Arrow types; sparse ones.
        found = getattr(found, attribute, found)
    return found if isinstance(found, np.dtype) and found.kind in "biuf" else None


def _fault(series: Any) -> str | None:
    """Returns why a column cannot be used, as the end of a sentence that begins with its name."""
    if hasattr(series, "null_count"):  # polars
        if not (series.dtype.is_numeric() or str(series.dtype) == "Boolean"):
            return f"is of type {series.dtype}"
        return "has missing values" if series.null_count() else None
    if _number_type(series.dtype) is None:
        return f"is of type {series.dtype}"
    # NumPy has a NaN for floating-point values only; a nullable column tells "missing" from it, which nothing after this could.
    return "has missing values" if not isinstance(series.dtype, np.dtype) and not hasattr(series.dtype, "subtype") and series.isna().any() else None


def _values(series: Any) -> np.ndarray[Any, Any]:
    if hasattr(series, "null_count"):
        return np.asarray(series.to_numpy())
    return np.asarray(series.to_numpy(dtype=_number_type(series.dtype)))
