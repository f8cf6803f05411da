"""Weights as safetensors: one file, or several with an index, on a disk or in a bucket.

Small weights are one file, `model.safetensors`. Larger ones are split into files such as `model-1f0c9a3e-00001-of-00003.safetensors`, with an index of the
file of each array, `model.safetensors.index.json`, as in Hugging Face's libraries. The identifier in the middle differs in each save, so replacing the
index replaces all files in one step.
"""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fitflax.checkpoints.formats.json_documents import fsync_directory, read_errors
from fitflax.checkpoints.formats.safetensors_format import Layout, can_store, layout_of, name_fault, read_arrays, unique_dict, write_arrays
from fitflax.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from fitflax.leaves import listed
from fitflax.storage import Location, ObjectPath

__all__ = ["INDEX_SUFFIX", "SUFFIX", "find_weights", "read_weights", "write_weights"]

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_USUAL = f"model{SUFFIX}"
# The end of a shard's name; other libraries' names have no identifier.
_SHARD = r"(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors"
_MAX_INDEX_BYTES = 100_000_000
_MAX_SHOWN = 200  # Characters of a file's text, in an error.

Arrays = dict[str, np.ndarray[Any, Any]]


# --- Reading ---


def find_weights(path: Location) -> Location | None:
    """Returns the file or index of weights at a path, or `None` if there are none.

    The path is a `.safetensors` file, which need not exist if it is in shards; an index of shards; or a directory with `model.safetensors`, its index, or
    exactly one other file or index. Raises `CheckpointNotFoundError` if the name is one of weights, but there is no such file.
    """
    with read_errors(path):
        return _find(path)


def _find(path: Location) -> Location | None:
    if path.name.endswith((SUFFIX, INDEX_SUFFIX)):
        for each in (path, path.parent / f"{path.name}.index.json"):
            if each.is_file():
                return each
        if path.is_dir():
            raise CheckpointError(f"{path} is a directory, but has the name of a weights file. Rename it.")
        raise CheckpointNotFoundError(f"There are no weights at {path}: no such file{'' if path.name.endswith(INDEX_SUFFIX) else ', and no index of shards'}.")
    if not path.is_dir():
        return None
    names = sorted(entry.name for entry in path.iterdir())
    for name in (_USUAL, f"{_USUAL}.index.json"):
        if name in names:
            return path / name
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    found = indices or [name for name in names if name.endswith(SUFFIX)]
    if len(found) > 1:
        raise CheckpointError(f"{path} has several files of weights: {listed(found, most=5)}. Pass the path of one of them.")
    return path / found[0] if found else None


def read_weights(path: Location) -> tuple[Arrays, dict[str, str]]:
    """Returns the arrays by name, and the file's metadata (for an index, that of its first file)."""
    with read_errors(path):
        return _read_shards(path, _read_index(path)) if path.name.endswith(INDEX_SUFFIX) else read_arrays(path)


def _read_index(path: Location) -> dict[str, str]:
    """Returns the file of each array, by name."""
    if path.stat().st_size > _MAX_INDEX_BYTES:
        raise CorruptCheckpointError(f"{path} is not an index of weights: it has more than {_MAX_INDEX_BYTES} bytes.")
    try:
        document = json.loads(path.read_bytes().decode(), object_pairs_hook=unique_dict)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is not an index of weights: {str(error)[:_MAX_SHOWN]}.") from error
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CorruptCheckpointError(f"{path} is not an index of weights: it has no weight_map, a dict from names of arrays to names of files.")
    if not places:
        raise CorruptCheckpointError(f"{path} is not an index of weights: its weight_map is empty.")
    # An index may only name files in its own directory.
    outside = sorted({file for file in places.values() if not file.endswith(SUFFIX) or file != os.path.basename(file) or "\\" in file or "\0" in file})
    if outside:
        shown = listed([repr(file)[:_MAX_SHOWN] for file in outside], most=3)
        raise CorruptCheckpointError(f"{path} names files that are not {SUFFIX} files next to it: {shown}.")
    return places


def _read_shards(path: Location, places: Mapping[str, str]) -> tuple[Arrays, dict[str, str]]:
    arrays: Arrays = {}
    metadata: dict[str, str] = {}
    files = sorted(set(places.values()))
    missing = [file for file in files if not (path.parent / file).is_file()]
    if missing:
        shown = listed([file[:_MAX_SHOWN] for file in missing], most=3)
        raise CorruptCheckpointError(f"{path} is incomplete. If another process is replacing the weights, read them again. Missing: {shown}.")
    for file in files:
        found, about = read_arrays(path.parent / file)
        wanted = {name for name, place in places.items() if place == file}
        if found.keys() != wanted:
            one = sorted(found.keys() ^ wanted)[0]
            name, file = repr(one)[:_MAX_SHOWN], file[:_MAX_SHOWN]
            if one in found:
                where = f"{file} contains {name}, which the index {f'has in {places[one][:_MAX_SHOWN]}' if one in places else 'does not list'}"
            else:
                where = f"the index has {name} in {file}, which does not contain it"
            raise CorruptCheckpointError(f"{path} does not agree with its files: {where}.")
        arrays |= found
        metadata = metadata or about
    return arrays, metadata


# --- Writing ---


def write_weights(path: Location, arrays: Mapping[str, np.ndarray[Any, Any]], *, metadata: Mapping[str, str], max_shard_bytes: int) -> Location:
    """Writes weights, and returns the file, or the index of several files.

    The last step replaces one file, the weights or the index of new shards; then old shards are removed. Until then readers find the old weights,
    afterwards the new ones. A reader that has read the old index may find its shards missing, which is an error. A killed process can leave temporary
    files, whose names begin with a dot, or shards that are in no index.

    `path` is a name that ends with `.safetensors`. `max_shard_bytes` is the maximum size of a file's arrays; a larger array gets its own file.
    """
    faults = [f"{name!r} is {array.dtype}" for name, array in arrays.items() if not can_store(array.dtype.newbyteorder("="))]
    if faults:
        raise CheckpointError(
            f"{path} cannot be written: safetensors does not support some dtypes. Convert the arrays with dtype=, or leave them out: {listed(faults, most=3)}."
        )
    for name in arrays:
        if (fault := name_fault(name)) is not None:
            raise CheckpointError(f"{path} cannot be written: the array {name!r} {fault}. Rename it with mapping=.")
    shards = _split(arrays, max_shard_bytes)
    # Each save has its own shards, so replacing the index is atomic.
    stem = f"{path.name.removesuffix(SUFFIX)}-{secrets.token_hex(4)}"
    names = [f"{stem}-{index:05d}-of-{len(shards):05d}{SUFFIX}" for index in range(1, len(shards) + 1)] if len(shards) > 1 else [path.name]
    files = {name: layout_of(shard, metadata) for name, shard in zip(names, shards, strict=True)}
    index = None
    if len(shards) > 1:
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        document = {"metadata": {"total_size": sum(array.nbytes for array in arrays.values())}, "weight_map": dict(sorted(places.items()))}
        index = json.dumps(document, indent=2).encode()
    try:
        return _write_objects(path, files, index) if isinstance(path, ObjectPath) else _write_files(path, files, index)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"Could not write {path}: {str(error).rstrip('.')}.") from error


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


def _write_files(path: Path, files: Mapping[str, Layout], index: bytes | None) -> Path:
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory. Pass the path of a file, such as {path / _USUAL}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    index_path = path.with_name(f"{path.name}.index.json")
    old = _shards_of(index_path)
    suffix = f".tmp-{secrets.token_hex(4)}"
    litter: list[Path] = []  # Files to remove on failure.
    try:
        temporary = [path.with_name(f".{name}{suffix}") for name in files]
        for written, layout in zip(temporary, files.values(), strict=True):
            litter.append(written)
            _write_file(written, layout)
        if index is not None:
            written = path.with_name(f".{index_path.name}{suffix}")
            litter.append(written)
            _write_file(written, Layout(index, [], len(index)))
            for shard, name in zip(temporary, files, strict=True):
                litter.append(path.with_name(name))
                os.replace(shard, litter[-1])
            fsync_directory(path.parent)  # The shards before the index that names them.
            os.replace(written, index_path)
        else:
            os.replace(temporary[0], path)
        litter.clear()
        fsync_directory(path.parent)
    except BaseException:
        for each in litter:
            with contextlib.suppress(OSError):
                each.unlink(missing_ok=True)
        raise
    # First the file that readers would prefer to the new ones, then the unused shards.
    for each in [index_path if index is None else path, *old]:
        each.unlink(missing_ok=True)
    return path if index is None else index_path


def _write_file(path: Path, layout: Layout) -> None:
    with open(path, "xb", buffering=0) as file:

        def write(data: Any) -> None:
            view = memoryview(data)
            while len(view):
                view = view[file.write(view) :]  # A write is limited to 2 GiB.

        write_arrays(write, layout)
        os.fsync(file.fileno())


def _write_objects(path: ObjectPath, files: Mapping[str, Layout], index: bytes | None) -> ObjectPath:
    if not path.key:
        raise CheckpointError(f"{path} is a bucket. Add a file name, such as {path / _USUAL}.")
    index_path = path.parent / f"{path.name}.index.json"
    old = _shards_of(index_path)
    written: list[str] = []  # Shards that are in no index yet.
    try:
        for name, layout in files.items():
            parts: list[Any] = []
            write_arrays(parts.append, layout)
            place = path.parent / name
            if index is not None:
                written.append(place.key)
            place.write_bytes(b"".join(parts))
        written.clear()  # The store may have written an index even if it reports a failure.
        if index is not None:
            index_path.write_bytes(index)
    except BaseException:
        with contextlib.suppress(CheckpointError, OSError):
            path.bucket.delete(written)
        raise
    # First the file that readers would prefer to the new ones, then the unused shards.
    path.bucket.delete([(index_path if index is None else path).key])
    path.bucket.delete([each.key for each in old])
    return path if index is None else index_path


def _shards_of(index: Location) -> Sequence[Any]:
    """Returns the files in an index, if it exists, whose names are those of its shards. Only these may be deleted."""
    own = re.compile(re.escape(index.name.removesuffix(INDEX_SUFFIX)) + _SHARD)
    try:
        files = set(_read_index(index).values()) if index.is_file() else set()
    except CheckpointError:
        return []
    return [index.parent / file for file in sorted(files) if own.fullmatch(file)]
