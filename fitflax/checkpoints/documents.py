"""JSON files that verify themselves: `metadata.json` and the notes of a store.

A number that is not finite is written as the string `NaN`, `Infinity` or `-Infinity`. A *string* that reads so, after any number of leading `~`, gets one
more `~` in front: both come back as what they were. NumPy scalars become Python numbers, tuples become lists, keys become strings.
"""

import functools
import importlib.metadata
import json
import math
import os
import re
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fitflax.errors import CheckpointError, CorruptCheckpointError
from fitflax.leaves import is_key

__all__ = ["FORMAT_VERSION", "PROCESS", "fsync_directory", "read_document", "replace_document", "write_document"]

FORMAT_VERSION = 1
# Marks what this process writes: temporary files of others are litter, checkpoints of others may be stale.
PROCESS = secrets.token_hex(4)

_ENCODE = json.JSONEncoder(allow_nan=False).encode
_QUOTE = json.encoder.encode_basestring_ascii
_LAST_MEMBER = re.compile(rb'  "crc32": (\d+)\n}\n\Z')

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Rendered(dict[str, Any]):
    """A dict of JSON values whose members come with their text, because rendering them again and again takes longer than all else about them.

    >>> entries = Rendered()
    >>> entries.add("w", {"shape": [2]}, '"w": {"shape": [2]}')
    >>> entries, entries.lines
    ({'w': {'shape': [2]}}, ['"w": {"shape": [2]}'])
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def add(self, key: str, value: Any, line: str) -> None:
        """Adds a member whose `line` is its key and its value as JSON, in ASCII."""
        self[key] = value
        self.lines.append(line)


class _NotJsonError(Exception):
    """A value that JSON cannot hold; the argument is that value."""


def _to_json(value: Any) -> Any:
    # Exact types first: a save makes hundreds of values, and asking whether something is an array takes longer than all the rest.
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if kind is int or kind is bool or value is None:
        return value
    if isinstance(value, str):
        return f"~{value}" if value.lstrip("~") in _NON_FINITE else value
    if kind is Rendered:
        return value
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray, jax.Array)) and not is_key(value):
        return _to_json(value.tolist())
    if isinstance(value, float):
        return _to_json(float(value))
    if isinstance(value, int):
        return value
    raise _NotJsonError(value)


def _where(value: Any, wanted: Any, path: str) -> str | None:
    """Returns the path at which `wanted` is found, which is only asked for an error."""
    if value is wanted:
        return path
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return next((found for key, item in pairs if (found := _where(item, wanted, f"{path}[{key!r}]"))), None)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if isinstance(value, str) and value.lstrip("~") in _NON_FINITE:
        return value[1:] if value.startswith("~") else _NON_FINITE[value]
    return value


def _render(value: Any, level: int = 0) -> str:
    """Returns JSON with two levels indented and the rest in one line: a metric group, a history row or an array a line."""
    if level < 2 and value and (isinstance(value, dict) or (isinstance(value, list) and isinstance(value[0], dict))):
        if isinstance(value, Rendered):
            lines = value.lines
        else:
            pairs = value.items() if isinstance(value, dict) else [(None, item) for item in value]
            lines = [("" if key is None else f"{_QUOTE(key)}: ") + _render(item, level + 1) for key, item in pairs]
        pad, (left, right) = "  " * level, "{}" if isinstance(value, dict) else "[]"
        return f"{left}\n" + ",\n".join(f"{pad}  {line}" for line in lines) + f"\n{pad}{right}"
    # What JSON's own encoder makes of them, which takes much longer for a single value.
    return _QUOTE(value) if type(value) is str else int.__repr__(value) if type(value) is int else _ENCODE(value)


def _with_crc32(document: dict[str, Any]) -> bytes:
    """Returns the file of a document: its text, whose last member is the checksum of the bytes before that member's line."""
    text = _render(document).removesuffix("\n}") + ",\n"
    data = text.encode("ascii")
    return data + b'  "crc32": %d\n}\n' % zlib.crc32(data)


@functools.cache
def library_versions() -> dict[str, str]:
    versions = {}
    for name in ("fitflax", "jax", "flax", "optax", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"  # Run from a source tree.
    return versions


def write_document(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON file by the rules of `metadata.json`: `format_version` first, `crc32` last, fsynced.

    Args:
        path: The file.
        values: JSON values and NumPy scalars; numbers need not be finite.

    Raises:
        CheckpointError: A value that JSON cannot hold, or a name that is taken. Nothing is written then.
        OSError: The disk is full or fails.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_document(Path(directory, "x.json"), {"loss": math.nan})
    ...     read_document(Path(directory, "x.json"))["loss"]
    nan
    """
    write_given(path, given_values(values, {"format_version", "crc32"}))


def write_given(path: Path, given: Mapping[str, Any]) -> None:
    """The same for what `given_values` returned."""
    data = _with_crc32({"format_version": FORMAT_VERSION, **given})
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_document(path: Path, values: Mapping[str, Any], *, is_durable: bool = True) -> None:
    """Writes a document in place of the one at `path`, at once: whoever reads it finds the old one or the new one.

    Args:
        path: The file.
        values: As in `write_document`.
        is_durable: Whether it is sure, when this returns, that a power failure will not bring the old one back.

    Raises:
        CheckpointError: As in `write_document`.
        OSError: The disk is full or fails; the old file is as it was.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     replace_document(Path(directory, "x.json"), {"step": 1})
    ...     read_document(Path(directory, "x.json"))["step"]
    1
    """
    temporary = path.parent / f".{path.name.lstrip('.')}.tmp-{PROCESS}-{secrets.token_hex(4)}"
    try:
        write_document(temporary, values)
        os.replace(temporary, path)
        if is_durable:
            fsync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_document(path: Path) -> dict[str, Any]:
    """Returns what `write_document` wrote, verified.

    Args:
        path: The file.

    Raises:
        CorruptCheckpointError: The file is missing, empty, not JSON, or differs from what was written by as much as one byte.
        CheckpointError: It was written by a newer fitflax, in a format that this one does not read, or the disk fails.

    >>> read_document(Path("nowhere.json"))
    Traceback (most recent call last):
    fitflax.errors.CorruptCheckpointError: nowhere.json is missing.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptCheckpointError(f"{path} is missing.") from error
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error.strerror}.") from error
    if not data:
        raise CorruptCheckpointError(f"{path} is empty.")
    try:
        document = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is damaged: it is not JSON ({error}).") from error
    _verify_document(document, data, path)
    return {key: _from_json(value) for key, value in document.items()}


def _verify_document(document: Any, data: bytes, path: Path) -> None:
    version = document.get("format_version") if isinstance(document, dict) else None
    if not isinstance(version, int):
        raise CorruptCheckpointError(f"{path} is damaged: it has no format_version.")
    if version != FORMAT_VERSION:
        # Before the checksum: another version may sum up differently.
        raise CheckpointError(f"{path} has format version {version}, but this fitflax reads version {FORMAT_VERSION}. Use the fitflax that wrote it.")
    last = _LAST_MEMBER.search(data)
    if last is None or int(last[1]) != zlib.crc32(data[: last.start()]):
        raise CorruptCheckpointError(f"{path} is damaged: its checksum differs.")


def given_values(values: Mapping[str, Any], own_names: set[str]) -> dict[str, Any]:
    """Returns values as JSON holds them.

    Raises:
        CheckpointError: JSON cannot hold one of them, or a name is one of `own_names`.
    """
    taken = sorted(own_names & set(values))
    if taken:
        raise CheckpointError(f"metadata must leave {', '.join(taken)} to the checkpoint format; give the values other names.")
    try:
        given: dict[str, Any] = _to_json(values)
    except _NotJsonError as error:
        fault = error.args[0]
        where = _where(values, fault, "metadata")
        kinds = "only None, booleans, numbers, strings, dicts and lists can"
        raise CheckpointError(f"{where} is a {type(fault).__name__}, which JSON cannot hold; {kinds}.") from None
    return given


def fsync_directory(directory: Path) -> None:
    """Makes creations, renames and removals in `directory` last over a power failure.

    >>> fsync_directory(Path("."))
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
