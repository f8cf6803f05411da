"""Weights as safetensors: one file, or several with an index, on a disk or in a bucket.

A file is eight bytes with the length of a header, the header in JSON, and the arrays' bytes. The `safetensors` package is not used: it lacks float8 for
NumPy and object stores, and its errors do not name the array. Files are not trusted: the header is fully checked before an array is created, and no code
in a file is executed.

Small weights are one file, `model.safetensors`. Larger ones are split into files such as `model-1f0c9a3e-00001-of-00003.safetensors`, with an index of the
file of each array, `model.safetensors.index.json`, as in Hugging Face's libraries. The identifier in the middle differs in each save, so replacing the
index replaces all files in one step.
"""

import contextlib
import json
import math
import mmap
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np

from fitflax.checkpoints.json_documents import fsync_directory, read_errors, write_file
from fitflax.checkpoints.memory import bytes_of
from fitflax.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from fitflax.leaves import listed
from fitflax.storage import Location, ObjectPath

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_USUAL = f"model{SUFFIX}"
# The end of a shard's name; other libraries' names have no identifier.
_SHARD = r"(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors"
# The limit of the reference implementation for a header.
MAX_JSON_BYTES = 100_000_000
_MAX_DIMENSIONS = 32
_METADATA = "__metadata__"
# Arrays are aligned in the file, so that mapped memory has the alignment that devices need.
_ALIGNMENT = 64
_MAX_SHOWN = 200  # Characters of a file's text, in an error.
_FLOAT8 = {"F8_E4M3": "e4m3fn", "F8_E5M2": "e5m2", "F8_E8M0": "e8m0fnu", "F8_E4M3FNUZ": "e4m3fnuz", "F8_E5M2FNUZ": "e5m2fnuz"}
_DTYPES: dict[str, np.dtype[Any]] = {f"{kind[0].upper()}{bits}": np.dtype(f"{kind}{bits}") for bits in (8, 16, 32, 64) for kind in ("uint", "int")}
_DTYPES |= {"BOOL": np.dtype(np.bool_), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32), "F64": np.dtype(np.float64), "C64": np.dtype(np.complex64)}
_DTYPES |= {"BF16": np.dtype(jnp.bfloat16), **{name: np.dtype(f"float8_{kind}") for name, kind in _FLOAT8.items()}}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Arrays = dict[str, np.ndarray[Any, Any]]


class Entry(NamedTuple):
    """The header's entry of one array. Offsets count from the end of the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


# --- Reading ---


def find_weights(path: Location) -> Location | None:
    """Returns the file or index of weights at a path, or `None` if there are none.

    The path is a `.safetensors` file, which need not exist if it is in shards; an index of shards; or a directory with `model.safetensors`, its index, or
    exactly one other file or index. Raises `CheckpointNotFoundError` if the name is one of weights, but there is no such file.
    """
    with read_errors(path):
        if path.name.endswith((SUFFIX, INDEX_SUFFIX)):
            return _find_named(path)
        if not path.is_dir():
            return None
        names = sorted(entry.name for entry in path.iterdir())
        usual = [name for name in (_USUAL, f"{_USUAL}.index.json") if name in names][:1]
        candidates = usual or [name for name in names if name.endswith(INDEX_SUFFIX)] or [name for name in names if name.endswith(SUFFIX)]
        if len(candidates) > 1:
            raise CheckpointError(f"{path} has several files of weights: {listed(candidates, most=5)}. Pass the path of one of them.")
        return path / candidates[0] if candidates else None


def _find_named(path: Location) -> Location:
    for each in (path, path.parent / f"{path.name}.index.json"):
        if each.is_file():
            return each
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory, but has the name of a weights file. Rename it.")
    raise CheckpointNotFoundError(f"There are no weights at {path}: no such file{'' if path.name.endswith(INDEX_SUFFIX) else ', and no index of shards'}.")


def read_weights(path: Location) -> tuple[Arrays, dict[str, str]]:
    """Returns the arrays by name, and the file's metadata (for an index, that of its first file)."""
    with read_errors(path):
        return _read_shards(path, _read_index(path)) if path.name.endswith(INDEX_SUFFIX) else read_arrays(path)


def _read_index(path: Location) -> dict[str, str]:
    """Returns the file of each array, by name."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has more than {MAX_JSON_BYTES} bytes")
        document = json.loads(path.read_bytes().decode(), object_pairs_hook=_unique_dict)
        places = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ValueError("it has no weight_map, a dict from names of arrays to names of files")
        if not places:
            raise ValueError("its weight_map is empty")
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is not an index of weights: {str(error)[:_MAX_SHOWN]}.") from error
    # An index may only name files in its own directory.
    outside = sorted({file for file in places.values() if not file.endswith(SUFFIX) or file != os.path.basename(file) or "\\" in file or "\0" in file})
    if outside:
        raise CorruptCheckpointError(
            f"{path} names files that are not {SUFFIX} files next to it: {listed([repr(file)[:_MAX_SHOWN] for file in outside], most=3)}."
        )
    return places


def _read_shards(path: Location, places: Mapping[str, str]) -> tuple[Arrays, dict[str, str]]:
    arrays: Arrays = {}
    metadata: dict[str, str] = {}
    files = sorted(set(places.values()))
    missing = [file[:_MAX_SHOWN] for file in files if not (path.parent / file).is_file()]
    if missing:
        advice = "If another process is replacing the weights, read them again."
        raise CorruptCheckpointError(f"{path} is incomplete. {advice} Missing: {listed(missing, most=3)}.")
    for file in files:
        shard_arrays, about = read_arrays(path.parent / file)
        differing = sorted(shard_arrays.keys() ^ {name for name, place in places.items() if place == file})
        if differing:
            name, shown = differing[0], file[:_MAX_SHOWN]
            if name in shard_arrays:
                other = f"has in {places[name][:_MAX_SHOWN]}" if name in places else "does not list"
                where = f"{shown} contains {_quoted(name)}, which the index {other}"
            else:
                where = f"the index has {_quoted(name)} in {shown}, which does not contain it"
            raise CorruptCheckpointError(f"{path} does not agree with its files: {where}.")
        arrays |= shard_arrays
        metadata = metadata or about
    return arrays, metadata


def read_arrays(path: Location) -> tuple[Arrays, dict[str, str]]:
    """Returns the arrays of a file by name, and its metadata.

    A local file is mapped into memory: arrays are read-only views, read on first access. An object in a bucket is read whole.
    """
    if isinstance(path, Path):
        with open(path, "rb") as file:
            # An empty file cannot be mapped.
            data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.seek(0, os.SEEK_END) else b""
    else:
        data = path.read_bytes()
    try:
        entries, metadata, begin = _read_header(data, path)
    except ValueError as error:
        raise CorruptCheckpointError(f"{path} is not a complete safetensors file: {error}.") from error
    return {name: _array(data, begin, entry, name, path) for name, entry in entries.items()}, metadata


def _array(data: Any, begin: int, entry: Entry, name: str, path: Location) -> np.ndarray[Any, Any]:
    if math.prod(entry.shape) == 0:
        return np.empty(entry.shape, entry.dtype)
    raw = np.frombuffer(data, np.uint8, entry.end - entry.begin, begin + entry.begin)
    if entry.dtype == np.bool_ and raw.max() > 1:
        raise CorruptCheckpointError(f"{path} is damaged: {_quoted(name)} holds booleans that are neither 0 nor 1.")
    return raw.view(entry.dtype).reshape(entry.shape)


def _read_header(data: Any, path: Location) -> tuple[dict[str, Entry], dict[str, str], int]:
    """Returns the contents of the header, and where the arrays begin. Raises `ValueError` if it does not describe the file."""
    if len(data) < 8:
        raise ValueError(f"it has {len(data)} bytes, fewer than the 8 bytes of the header's length")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_JSON_BYTES:
        raise ValueError(f"its header has {length} bytes, more than the maximum of {MAX_JSON_BYTES}")
    if length > len(data) - 8:
        raise ValueError(f"its header has {length} bytes, but only {len(data) - 8} follow")
    text = bytes(data[8 : 8 + length])
    if not text.startswith(b"{"):
        raise ValueError("its header does not begin with '{'")
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique_dict, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # Includes invalid UTF-8, and integers with thousands of digits.
        raise ValueError(f"its header cannot be read ({str(error)[:_MAX_SHOWN]})") from error
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{_METADATA} must be a dict of strings")
    entries = {name: _entry(_quoted(name), value, path) for name, value in header.items()}
    _check_cover(entries, len(data) - 8 - length)
    return entries, metadata, 8 + length


def _unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the dict of a JSON object's members. Raises `ValueError` if two members have the same name."""
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"{_quoted(name)} appears twice")
        members[name] = value
    return members


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def _entry(shown: str, value: Any, path: Location) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{shown} must have data_offsets, dtype, shape and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"the dtype of {shown} is {_quoted(dtype)}, not a string")
    if dtype not in _DTYPES:
        raise CheckpointError(f"{path}: {shown} has the dtype {_quoted(dtype)}. Supported dtypes: {', '.join(_DTYPES)}.")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"the shape of {shown} is {str(shape)[:80]}, not a list of at most {_MAX_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"the data_offsets of {shown} are {str(offsets)[:80]}, not a begin and an end")
    if math.prod(max(size, 1) for size in shape) >= 2**60:
        raise ValueError(f"the shape of {shown} is {str(shape)[:_MAX_SHOWN]}, which is too large")
    needs, has = math.prod(shape) * _DTYPES[dtype].itemsize, offsets[1] - offsets[0]  # Python's integers do not overflow.
    if has != needs:
        raise ValueError(f"{shown} of shape {str(shape)[:_MAX_SHOWN]} and dtype {dtype} needs {needs} bytes, but its data_offsets give it {has}")
    return Entry(_DTYPES[dtype], tuple(shape), *offsets)


def _quoted(text: Any) -> str:
    shown = repr(text)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_cover(entries: Mapping[str, Entry], size: int) -> None:
    """Checks that the arrays are contiguous and cover all of the data."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > size:
            raise ValueError(f"it is truncated: {_quoted(name)} ends at byte {entry.end}, but the data has only {size} bytes")
        if entry.begin != end:
            raise ValueError(f"{_quoted(name)} begins at byte {entry.begin}, expected {end}, because arrays must be contiguous")
        end = entry.end
    if end < size:
        raise ValueError(f"{size - end} bytes at its end belong to no array")


# --- Writing ---


def write_weights(path: Location, arrays: Mapping[str, np.ndarray[Any, Any]], *, metadata: Mapping[str, str], max_shard_bytes: int) -> Location:
    """Writes weights, and returns the file, or the index of several files.

    The last step replaces one file, the weights or the index of new shards; then old shards are removed. Until then readers find the old weights,
    afterwards the new ones. A reader that has read the old index may find its shards missing, which is an error. A killed process can leave temporary
    files, whose names begin with a dot, or shards that are in no index.

    `path` is a name that ends with `.safetensors`. `max_shard_bytes` is the maximum size of a file's arrays; a larger array gets its own file.
    """
    _check_arrays(path, arrays)
    shards = _split(arrays, max_shard_bytes)
    index_path = path.parent / f"{path.name}.index.json"
    # `last` makes the other files valid. After it is written, `removed`, which readers may prefer to it, is removed before old shards.
    last, removed = (path, index_path) if len(shards) == 1 else (index_path, path)
    if len(shards) == 1:
        files = {path.name: contents_of(arrays, metadata)}
    else:
        # Each save has its own shards, so replacing the index is atomic.
        stem = f"{path.name.removesuffix(SUFFIX)}-{secrets.token_hex(4)}"
        names = [f"{stem}-{index:05d}-of-{len(shards):05d}{SUFFIX}" for index in range(1, len(shards) + 1)]
        files = {name: contents_of(shard, metadata) for name, shard in zip(names, shards, strict=True)}
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        document = {"metadata": {"total_size": sum(array.nbytes for array in arrays.values())}, "weight_map": dict(sorted(places.items()))}
        files[last.name] = [json.dumps(document, indent=2).encode()]
    try:
        old = _shards_of(index_path)
        if isinstance(path, ObjectPath):
            _replace_objects(path, files)
        else:
            _replace_files(path, files)
        for each in (removed, *old):
            each.unlink(missing_ok=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"Could not write {path}: {str(error).rstrip('.')}.") from error
    return last


def _check_arrays(path: Location, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    faults = [f"{name!r} is {array.dtype}" for name, array in arrays.items() if array.dtype.newbyteorder("=") not in _NAMES]
    if faults:
        raise CheckpointError(
            f"{path} cannot be written: safetensors does not support some dtypes. Convert the arrays with dtype=, or leave them out: {listed(faults, most=3)}."
        )
    for name in arrays:
        try:
            name.encode()
            fault = "that is reserved by the format" if name == _METADATA else None
        except UnicodeEncodeError:
            fault = "that is not valid Unicode"
        if fault is not None:
            raise CheckpointError(f"{path} cannot be written: the array {name!r} has a name {fault}. Rename it with mapping=.")


def _split(arrays: Mapping[str, np.ndarray[Any, Any]], max_bytes: int) -> list[Arrays]:
    shards: list[Arrays] = [{}]
    size = 0
    for name, array in arrays.items():
        if shards[-1] and size + array.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    return shards


def contents_of(arrays: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str]) -> Iterable[bytes | memoryview]:
    """Yields the bytes of a file of these arrays: larger dtypes first, as in the reference implementation, then by name."""
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    document: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        array, begin = arrays[name], end
        end += array.nbytes
        document[name] = {"dtype": _NAMES[array.dtype.newbyteorder("=")], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        array = arrays[name]
        little = array.astype(array.dtype.newbyteorder("<"), copy=False) if array.dtype.byteorder == ">" else array
        if little.size:
            yield bytes_of(np.ascontiguousarray(little))


def _replace_files(path: Path, files: Mapping[str, Iterable[bytes | memoryview]]) -> None:
    """Writes files next to `path`; the last one is replaced when the others are on the disk."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory. Pass the path of a file, such as {path / _USUAL}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = {name: path.with_name(f".{name}.tmp-{secrets.token_hex(4)}") for name in files}
    *shards, last = files
    with contextlib.ExitStack() as litter:  # Files to remove on failure.
        for name, contents in files.items():
            litter.callback(_remove, temporary[name])
            write_file(temporary[name], contents)
        for name in shards:
            litter.callback(_remove, path.with_name(name))
            os.replace(temporary[name], path.with_name(name))
        if shards:
            fsync_directory(path.parent)  # The shards before the index that names them.
        written = litter.pop_all()
        try:
            os.replace(temporary[last], path.with_name(last))
        except BaseException:
            if temporary[last].exists():  # Otherwise, Ctrl-C came after the rename, and the index names the shards.
                written.close()
            raise
    fsync_directory(path.parent)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _replace_objects(path: ObjectPath, files: Mapping[str, Iterable[bytes | memoryview]]) -> None:
    """Writes objects next to `path`, the last one when all others are complete."""
    if not path.key:
        raise CheckpointError(f"{path} is a bucket. Add a file name, such as {path / _USUAL}.")
    *shards, last = files
    try:
        for name in shards:
            (path.parent / name).write_bytes(b"".join(files[name]))
    except BaseException:
        with contextlib.suppress(CheckpointError, OSError):
            path.bucket.delete([(path.parent / name).key for name in shards])
        raise
    # The store may have written it even if it reports a failure, so the shards stay.
    (path.parent / last).write_bytes(b"".join(files[last]))


def _shards_of(index: Location) -> Sequence[Location]:
    """Returns the files in an index, if it exists, whose names are those of its shards. Only these may be deleted."""
    shard_name = re.compile(re.escape(index.name.removesuffix(INDEX_SUFFIX)) + _SHARD)
    try:
        files = set(_read_index(index).values()) if index.is_file() else set()
    except CheckpointError:
        return []
    return [index.parent / file for file in sorted(files) if shard_name.fullmatch(file)]
