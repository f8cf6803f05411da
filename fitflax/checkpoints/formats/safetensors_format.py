"""Reads and writes one safetensors file: eight bytes with the length of a header, the header in JSON, and the arrays' bytes.

The `safetensors` package is not used: it lacks float8 for NumPy and object stores, and its errors do not name the array. Files are not trusted: the header
is fully checked before an array is created, and no code in a file is executed.
"""

import json
import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np

from fitflax.checkpoints.memory import bytes_of
from fitflax.errors import CheckpointError, CorruptCheckpointError
from fitflax.storage import Location

__all__ = ["Layout", "can_store", "layout_of", "name_fault", "read_arrays", "unique_dict", "write_arrays"]

# The limit of the reference implementation.
MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 32
_METADATA = "__metadata__"
# Arrays are aligned in the file, so that mapped memory has the alignment that devices need.
_ALIGNMENT = 64
_MAX_SHOWN = 200  # Characters of a file's text, in an error.
_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "F32": np.float32,
        "F64": np.float64,
        "C64": np.complex64,
        "BF16": jnp.bfloat16,
        "F8_E4M3": jnp.float8_e4m3fn,
        "F8_E5M2": jnp.float8_e5m2,
        "F8_E8M0": jnp.float8_e8m0fnu,
        "F8_E4M3FNUZ": jnp.float8_e4m3fnuz,
        "F8_E5M2FNUZ": jnp.float8_e5m2fnuz,
    }.items()
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ENTRY = {"dtype", "shape", "data_offsets"}


class Entry(NamedTuple):
    """The header's entry of one array. Offsets count from the end of the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


# --- Reading ---


def read_arrays(path: Location) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """Returns the arrays of a file by name, and its metadata.

    A local file is mapped into memory: arrays are read-only views, read on first access. An object in a bucket is read whole.
    """
    if isinstance(path, Path):
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            # An empty file cannot be mapped.
            data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    else:
        data = path.read_bytes()
    entries, metadata, begin = _read_header(data, path)
    return {name: _array(data, begin, entry, name, path) for name, entry in entries.items()}, metadata


def _array(data: Any, begin: int, entry: Entry, name: str, path: Location) -> np.ndarray[Any, Any]:
    count = math.prod(entry.shape)
    if count == 0:
        return np.empty(entry.shape, entry.dtype)
    raw = np.frombuffer(data, np.uint8, entry.end - entry.begin, begin + entry.begin)
    if entry.dtype == np.bool_ and raw.max() > 1:
        raise CorruptCheckpointError(f"{path} is damaged: {_quoted(name)} holds booleans that are neither 0 nor 1.")
    return raw.view(entry.dtype).reshape(entry.shape)


def _read_header(data: Any, path: Location) -> tuple[dict[str, Entry], dict[str, str], int]:
    """Returns the checked contents of the header, and where the arrays begin."""

    def fail(fault: str) -> NoReturn:
        raise CorruptCheckpointError(f"{path} is not a complete safetensors file: {fault}.")

    if len(data) < 8:
        fail(f"it has {len(data)} bytes, fewer than the 8 bytes of the header's length")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        fail(f"its header has {length} bytes, more than the maximum of {MAX_HEADER_BYTES}")
    if length > len(data) - 8:
        fail(f"its header has {length} bytes, but only {len(data) - 8} follow")
    header = _parse(bytes(data[8 : 8 + length]), fail)
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        fail(f"{_METADATA} must be a dict of strings")
    entries = {name: _entry(name, value, path, fail) for name, value in header.items()}
    _check_cover(entries, len(data) - 8 - length, fail)
    return entries, metadata, 8 + length


def unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the dict of a JSON object's members, for `object_pairs_hook`. Raises `ValueError` if two members have the same name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{_quoted(twice)} appears twice")
    return found


def _parse(text: bytes, fail: Callable[[str], NoReturn]) -> dict[str, Any]:
    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not valid JSON")

    if not text.startswith(b"{"):
        fail("its header does not begin with '{'")
    try:
        header = json.loads(text.decode(), object_pairs_hook=unique_dict, parse_constant=constant)
    except (ValueError, RecursionError) as error:  # Includes invalid UTF-8, and integers with thousands of digits.
        fail(f"its header cannot be read ({str(error)[:_MAX_SHOWN]})")
    return dict(header)


def _entry(name: str, value: Any, path: Location, fail: Callable[[str], NoReturn]) -> Entry:
    shown = _quoted(name)
    if not isinstance(value, dict) or value.keys() != _ENTRY:
        fail(f"{shown} must have {', '.join(sorted(_ENTRY))} and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        fail(f"the dtype of {shown} is {_quoted(dtype)}, not a string")
    if dtype not in _DTYPES:
        raise CheckpointError(f"{path}: {shown} has the dtype {_quoted(dtype)}. Supported dtypes: {', '.join(_DTYPES)}.")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        fail(f"the shape of {shown} is {str(shape)[:80]}, not a list of at most {_MAX_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        fail(f"the data_offsets of {shown} are {str(offsets)[:80]}, not a begin and an end")
    if math.prod(max(size, 1) for size in shape) >= 2**60:
        fail(f"the shape of {shown} is {str(shape)[:_MAX_SHOWN]}, which is too large")
    needs = math.prod(shape) * _DTYPES[dtype].itemsize  # Python's integers do not overflow.
    if offsets[1] - offsets[0] != needs:
        fail(f"{shown} of shape {str(shape)[:_MAX_SHOWN]} and dtype {dtype} needs {needs} bytes, but its data_offsets give it {offsets[1] - offsets[0]}")
    return Entry(_DTYPES[dtype], tuple(shape), *offsets)


def _quoted(text: Any) -> str:
    shown = repr(text)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_cover(entries: Mapping[str, Entry], size: int, fail: Callable[[str], NoReturn]) -> None:
    """Checks that the arrays are contiguous and cover all of the data."""
    end, last = 0, None
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > size:
            fail(f"it is truncated: {_quoted(name)} ends at byte {entry.end}, but the data has only {size} bytes")
        if entry.begin < end:
            fail(f"{_quoted(name)} overlaps {_quoted(last)}")
        if entry.begin > end:
            fail(f"there are {entry.begin - end} bytes before {_quoted(name)} that belong to no array")
        end, last = entry.end, name
    if end < size:
        fail(f"{size - end} bytes at its end belong to no array")


# --- Writing ---


class Layout(NamedTuple):
    """A file to be written: the bytes before the arrays, the arrays in the order of the file, and the size of the file in bytes."""

    header: bytes
    arrays: list[np.ndarray[Any, Any]]
    num_bytes: int


def can_store(dtype: Any) -> bool:
    """Returns whether the format supports a dtype."""
    return dtype in _NAMES


def name_fault(name: str) -> str | None:
    """Returns why an array in a file cannot have this name, as the end of a sentence, or `None`."""
    if name == _METADATA:
        return "has a name that is reserved by the format"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "has a name that is not valid Unicode"
    return None


def layout_of(arrays: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str]) -> Layout:
    """Returns the layout of a file of these arrays: larger dtypes first, as in the reference implementation, then by name."""
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    document: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        array, begin = arrays[name], end
        end += array.nbytes
        document[name] = {"dtype": _NAMES[array.dtype.newbyteorder("=")], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return Layout(len(text).to_bytes(8, "little") + text, [arrays[name] for name in names], 8 + len(text) + end)


def write_arrays(write: Callable[[Any], Any], layout: Layout) -> None:
    """Writes a file by calling `write` with the next bytes."""
    write(layout.header)
    for array in layout.arrays:
        little = array.astype(array.dtype.newbyteorder("<"), copy=False) if array.dtype.byteorder == ">" else array
        if little.size:
            write(bytes_of(np.ascontiguousarray(little)))
