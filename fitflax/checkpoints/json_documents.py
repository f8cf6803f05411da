"""JSON files with a checksum: `metadata.json` and the notes of a store.

Non-finite numbers are written as the strings `NaN`, `Infinity` and `-Infinity`. A *string* that is one of these, after any number of leading `~`, gets
another leading `~`, so both round-trip. NumPy scalars become Python numbers, tuples become lists, and keys become strings.
"""

import contextlib
import errno
import functools
import importlib.metadata
import json
import math
import os
import re
import secrets
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fitflax.errors import CheckpointError, CorruptCheckpointError
from fitflax.leaves import is_key
from fitflax.storage import Location, ObjectPath

FORMAT_VERSION = 1
# Marks what this process writes: other processes' temporary files are leftovers, and their checkpoints may be stale.
PROCESS = secrets.token_hex(4)

_ENCODE = json.JSONEncoder(allow_nan=False).encode
_LAST_MEMBER = re.compile(rb'  "crc32": (\d+)\n}\n\Z')
# Errors of file systems that cannot sync a directory, such as some network file systems.
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Rendered(dict[str, Any]):
    """A dict of JSON values with its text, one line of ASCII JSON for each member, because rendering hundreds of arrays takes most of a small save's time."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []


class _NotJsonError(Exception):
    """A value that JSON cannot represent; the argument is the value."""


def _to_json(value: Any) -> Any:
    # Exact types first: a save converts hundreds of values, and testing for arrays is slow.
    kind = type(value)
    if kind is int or kind is bool or value is None or kind is Rendered:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        return f"~{value}" if value.lstrip("~") in _NON_FINITE else value
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(value) if set(map(type, value)) == {int} else [_to_json(item) for item in value]  # Steps may be thousands.
    if isinstance(value, (np.generic, np.ndarray, jax.Array)) and not is_key(value):
        return _to_json(value.tolist())
    if isinstance(value, int):
        return value
    raise _NotJsonError(value)


def _path_of(value: Any, wanted: Any, path: str) -> str | None:
    """Returns the path of `wanted` in `value`, for an error message."""
    if value is wanted:
        return path
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return next((found for key, item in pairs if (found := _path_of(item, wanted, f"{path}[{key!r}]"))), None)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if isinstance(value, str) and value.lstrip("~") in _NON_FINITE:
        return value[1:] if value.startswith("~") else _NON_FINITE[value]
    return value


def _render(value: Any, level: int = 0) -> str:
    """Returns JSON with two indented levels and the rest on one line: one line per metric group, history row or array."""
    if level == 2 or not value or not (isinstance(value, dict) or (isinstance(value, list) and isinstance(value[0], dict))):
        return _ENCODE(value)
    if isinstance(value, Rendered):
        lines = value.lines
    elif isinstance(value, dict):
        lines = [f"{_ENCODE(key)}: {_render(item, level + 1)}" for key, item in value.items()]
    else:
        lines = [_render(item, level + 1) for item in value]
    pad, (left, right) = "  " * level, "{}" if isinstance(value, dict) else "[]"
    return f"{left}\n" + ",\n".join(f"{pad}  {line}" for line in lines) + f"\n{pad}{right}"


@functools.cache
def library_versions() -> dict[str, str]:
    """Returns the versions of the libraries that a checkpoint depends on."""
    versions = {}
    for name in ("fitflax", "jax", "flax", "optax", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"  # In a source tree.
    return versions


def json_values(values: Mapping[str, Any], reserved: Collection[str] = ("format_version", "crc32")) -> dict[str, Any]:
    """Returns values converted to JSON types. Raises `CheckpointError` if JSON cannot represent one, or a name is reserved."""
    taken = sorted(values.keys() & set(reserved))
    if taken:
        raise CheckpointError(f"metadata must not contain {', '.join(taken)}, which the checkpoint format uses. Rename these keys.")
    try:
        converted: dict[str, Any] = _to_json(values)
    except _NotJsonError as error:
        fault = error.args[0]
        raise CheckpointError(
            f"{_path_of(values, fault, 'metadata')} is of type {type(fault).__name__}, which JSON does not support. "
            "Use only None, booleans, numbers, strings, dicts and lists."
        ) from None
    return converted


def document_bytes(converted: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a document of `json_values`: `format_version` first, and last the checksum of all bytes before that member's line."""
    text = _render({"format_version": FORMAT_VERSION, **converted}).removesuffix("\n}") + ",\n"
    data = text.encode("ascii")
    return data + b'  "crc32": %d\n}\n' % zlib.crc32(data)


def write_file(path: Path, contents: Iterable[bytes | memoryview]) -> None:
    """Writes the contents to a file, one after another, and returns when they are on the disk."""
    with open(path, "wb") as file:
        file.writelines(contents)
        file.flush()
        os.fsync(file.fileno())


def replace_document(path: Location, values: Mapping[str, Any], *, is_durable: bool = True) -> None:
    """Writes or replaces the document at `path` atomically: readers find the old one or the new one. Numbers may be non-finite.

    With `is_durable`, the replacement survives a power failure once this returns.
    """
    data = document_bytes(json_values(values))
    if isinstance(path, ObjectPath):
        path.write_bytes(data)
        return
    temporary = path.parent / f".{path.name.lstrip('.')}.tmp-{PROCESS}-{secrets.token_hex(4)}"
    try:
        write_file(temporary, [data])
        os.replace(temporary, path)
        if is_durable:
            fsync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_document(path: Location) -> dict[str, Any]:
    """Returns what `replace_document` wrote, verified. Raises `CorruptCheckpointError` if it is missing or damaged."""
    try:
        with read_errors(path):
            data = path.read_bytes()
        if not data:
            raise CorruptCheckpointError(f"{path} is empty.")
        document = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is damaged: it is not JSON ({error}).") from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if not isinstance(version, int):
        raise CorruptCheckpointError(f"{path} is damaged: it has no format_version.")
    if version != FORMAT_VERSION:
        # Before the checksum, which another version may compute differently.
        raise CheckpointError(f"{path} has format version {version}, but this version of fitflax reads {FORMAT_VERSION}. Use the version that wrote it.")
    last = _LAST_MEMBER.search(data)
    if last is None or int(last[1]) != zlib.crc32(data[: last.start()]):
        raise CorruptCheckpointError(f"{path} is damaged: its checksum does not match its contents.")
    return {key: _from_json(value) for key, value in document.items()}


@contextlib.contextmanager
def read_errors(path: Location) -> Iterator[None]:
    """Converts an `OSError` of the body to a `CheckpointError`, and that of a missing file to a `CorruptCheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise  # Some are OSErrors, too.
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptCheckpointError(f"{error.filename or path} is missing.") from error
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} could not be read: {str(error.strerror or error).rstrip('.')}.") from error


def fsync_directory(directory: Path) -> None:
    """Makes creations, renames and removals in `directory` survive a power failure, if its file system supports this."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
