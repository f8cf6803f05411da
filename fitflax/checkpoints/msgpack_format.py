"""The backend `msgpack`: a state as one stream of bytes, `state.msgpack`, written and read directly from arrays' buffers at the speed of the disk.

The file is one map with the roots `train` (the TrainState as returned by `flax.serialization.to_state_dict`) and `run` (epoch sums, states of callbacks
and loaders; its lists and tuples are msgpack arrays, because they are read without a target). Its bytes are those of
`flax.serialization.msgpack_serialize`, including chunks for arrays above 2^30 bytes, so `msgpack_restore` can read it. Reading executes no code.

`metadata.json` gets `arrays` (`{path: {shape, dtype, crc32}}`), `structure_crc32` (of all bytes of `state.msgpack` that are not array data: keys, types,
shapes, dtypes and the values of all other leaves) and `state_bytes`. In an object store, the stream is in parts, `state-RANDOM.00000` and so on, and
`metadata.json` gets `state_parts` (`{stem, bytes}`).
"""

import contextlib
import functools
import io
import json
import math
import os
import re
import secrets
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import jax
import msgpack
import numpy as np

from fitflax.background import Background
from fitflax.checkpoints.json_documents import Rendered, read_errors
from fitflax.checkpoints.memory import Arena, bytes_of, fetch
from fitflax.checkpoints.plain_tree import CHUNKED, MAX_DEPTH, Plain, is_storable, join, leaves_of
from fitflax.errors import CheckpointError, CorruptCheckpointError
from fitflax.storage import Location, ObjectPath
from fitflax.storage.parts import PartsReader, PartsWriter, Send, part_name, size_fault

STATE_FILE = "state.msgpack"
FILES = (STATE_FILE,)
PART = re.compile(r"(?P<stem>(?:state|shards)-[0-9a-f]{8})(?:\.p\d{5})?\.(?:\d{5,}|json)")
"""The names of parts and indexes in an object store. Each save has its own stem, so saves cannot overwrite each other."""
METADATA_KEYS: dict[str, type] = {"arrays": dict, "structure_crc32": int, "state_bytes": int}

# Flax's extension types for arrays, and the size in bytes above which it splits an array into a map of chunks.
_NDARRAY, _NUMPY_SCALAR = 1, 3
CHUNK_BYTES = 2**30
# Blocks are large enough that Python's overhead is negligible, and small enough that they stay in the cache between I/O and checksum.
_BLOCK_BYTES = 2**22
_MAX_WAITING_JOBS = 8
# Smaller arrays are joined up to this size, because the thread may have to wait for the GIL after each system call.
_BUFFER_BYTES = 2**16
# The number of bytes after which the kernel is told to start writing them to the disk, so that the disk works in parallel, and the number of bytes before them
# that it is told to free once they are written. Then the next bytes reuse their memory: with 1.5 GB on two cores, a save takes 4.0 s instead of 5.1 s, and
# steps during it take 1.09 times as long as others instead of 1.15. The kernel visits each page of the second range, so the range is limited.
_WRITE_BACK_BYTES = 2**24
_FREED_BYTES = 2**27
# The number of bytes of the next jax.Arrays that are copied from the device while one is written.
_FETCH_AHEAD_BYTES = 2**24
# States of callbacks rarely contain arrays.
_CALLBACKS_PREFIX = "run/callbacks/"


def write_state(directory: Location, train: Plain, run: Plain) -> dict[str, Any]:
    """Writes `state.msgpack` to the disk or an object store, and returns the entries that `read_state` needs in `metadata.json`."""
    tree = {"train": train.tree, "run": run.tree}
    if isinstance(directory, ObjectPath):
        stem = f"state-{secrets.token_hex(4)}"
        with PartsWriter(directory, stem) as parts:
            entries = _write_tree(tree, parts.send)
            parts.close()
        return {**entries, "state_parts": {"stem": stem, "bytes": parts.part_bytes}}
    with open(directory / STATE_FILE, "wb", buffering=_BUFFER_BYTES) as file:
        entries = _write_tree(tree, _FileSink(file).send)
        file.flush()
        os.fsync(file.fileno())
    return entries


def read_state(directory: Location, metadata: Mapping[str, Any], *, roots: Collection[str] = ("train", "run")) -> dict[str, Any]:
    """Returns the roots of `state.msgpack`, as `checkpoint_files.read_state` does.

    The structure of the whole file is verified, and the data of all returned arrays; other arrays are skipped.
    """
    path = directory / STATE_FILE
    with read_errors(path), _opened(directory, metadata) as file, contextlib.closing(_Checksums()) as checksums:
        tree = _Reader(file, path, metadata, roots, checksums).read()
    names = dict.fromkeys(root.split("/", 1)[0] for root in roots)
    unknown = sorted(names.keys() - tree.keys())
    if unknown:
        raise CheckpointError(f"{path} has no root {', '.join(map(repr, unknown))}, only {sorted(tree)}.")
    return {name: tree[name] for name in names}


# --- Checksums ---


class _Checksums:
    """The crc32 of each array, computed block by block in a thread, which starts once there is enough work (zlib releases the GIL) and ends with `close`."""

    def __init__(self) -> None:
        self._thread = Background("fitflax-crc32", on_error=self._fail)
        self._fault: BaseException | None = None
        # Small blocks are batched: waking the thread takes longer than their checksum.
        self._next: list[tuple[str, memoryview]] = []
        self._next_bytes = 0
        self._sums: dict[str, int] = {}

    def add(self, path: str, block: memoryview) -> None:
        """Adds a block to the checksum of an array. The block must not change until `result` returns."""
        self._next.append((path, block))
        self._next_bytes += len(block)
        if self._next_bytes < _BLOCK_BYTES:
            return
        self._thread.wait_until(lambda: len(self._thread.waiting) < _MAX_WAITING_JOBS)
        self._thread.submit(functools.partial(self._add_all, self._next))
        self._next, self._next_bytes = [], 0

    def result(self) -> dict[str, int]:
        """Returns the checksums by path, after all blocks are added. An array without elements may have none."""
        rest = self._next
        self.close()
        if self._fault is not None:
            raise self._fault
        self._add_all(rest)
        return self._sums

    def _add_all(self, job: list[tuple[str, memoryview]]) -> None:
        for path, block in job:
            self._sums[path] = zlib.crc32(block, self._sums.get(path, 0))

    def close(self) -> None:
        """Ends the thread."""
        self._next = []
        if self._thread.has_thread:
            self._thread.end()

    def _fail(self, error: BaseException) -> None:
        self._fault = error


# --- How flax stores an array ---


class _Part(NamedTuple):
    """A range of an array's data, and the bytes before it in the file."""

    header: bytes
    begin: int
    end: int


@functools.lru_cache(maxsize=1024)
def _layout(shape: tuple[int, ...], dtype: np.dtype[Any], kind: int, chunk_bytes: int) -> tuple[_Part, ...]:
    """Returns how flax stores an array: one extension object, or a map of several above `chunk_bytes`."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes <= chunk_bytes:
        return (_Part(_extension_header(shape, dtype, kind), 0, num_bytes),)
    step = max(1, chunk_bytes // dtype.itemsize) * dtype.itemsize
    begins = range(0, num_bytes, step)
    dims = {str(axis): size for axis, size in enumerate(shape)}
    before = b"\x83" + b"".join(map(_pack, (CHUNKED, True, "shape", dims, "chunks"))) + msgpack.Packer().pack_map_header(len(begins))
    parts = []
    for index, begin in enumerate(begins):
        end = min(begin + step, num_bytes)
        header = _extension_header(((end - begin) // dtype.itemsize,), dtype, kind)
        parts.append(_Part(before + _pack(str(index)) + header, begin, end))
        before = b""
    return tuple(parts)


def _extension_header(shape: tuple[int, ...], dtype: np.dtype[Any], kind: int) -> bytes:
    num_bytes = math.prod(shape) * dtype.itemsize
    inner = b"\x93" + _pack([*shape]) + _pack(dtype.name) + _length_header(num_bytes, 0xC4)
    length = len(inner) + num_bytes
    outer = bytes([0xD4 + length.bit_length() - 1]) if length in (1, 2, 4, 8, 16) else _length_header(length, 0xC7)
    return outer + bytes([kind]) + inner


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # Cached: NumPy takes a microsecond.


def _length_header(length: int, code: int) -> bytes:
    """Returns the first of three consecutive type bytes whose length field is long enough, and the length."""
    index = 0 if length < 2**8 else 1 if length < 2**16 else 2
    return bytes([code + index]) + struct.pack((">B", ">H", ">I")[index], length)


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, strict_types=True)
    return packed


# --- Writing ---


class _FileSink:
    """Writes to a file, and tells the kernel early to write it to the disk and to free its page cache, which training data may need."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_bytes = self._sent_back = 0

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Writes the next bytes. Raises `OSError` if the disk is full or fails."""
        for buffer in buffers:
            self._file.write(buffer)
            self._num_bytes += len(buffer)
        if hasattr(os, "posix_fadvise") and self._num_bytes - self._sent_back >= _WRITE_BACK_BYTES:
            self._file.flush()
            # POSIX_FADV_DONTNEED makes Linux start writing new pages back without blocking, and free those that are written. It is only advice, and fsync()
            # reports errors of the disk.
            begin = max(0, self._sent_back - _FREED_BYTES)
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._file.fileno(), begin, self._num_bytes - begin, os.POSIX_FADV_DONTNEED)
            self._sent_back = self._num_bytes


def _write_tree(tree: dict[str, Any], send: Send) -> dict[str, Any]:
    """Sends nested dicts, lists and leaves as msgpack, and returns the entries for `metadata.json`. The caller calls `fsync`."""
    fetched = fetch((leaf for leaf in leaves_of(tree) if isinstance(leaf, jax.Array)), ahead_bytes=_FETCH_AHEAD_BYTES)
    structure = bytearray()  # Bytes before the next array's data that are not sent yet.
    structure_crc32 = num_bytes = 0
    written = []
    with contextlib.closing(_Checksums()) as checksums:
        for path, array in _encode(tree, "", structure, msgpack.Packer(strict_types=True)):
            kind = _NUMPY_SCALAR if isinstance(array, np.generic) else _NDARRAY
            data = bytes_of(next(fetched) if isinstance(array, jax.Array) else np.asarray(array, order="C"))
            for part in _layout(array.shape, array.dtype, kind, CHUNK_BYTES):
                structure += part.header
                structure_crc32 = zlib.crc32(structure, structure_crc32)
                before = bytes(structure)
                for begin in range(part.begin, part.end, _BLOCK_BYTES) or [part.begin]:  # Once for an array without elements.
                    block = data[begin : min(begin + _BLOCK_BYTES, part.end)]
                    checksums.add(path, block)
                    send([before, block])
                    before = b""
                num_bytes += len(structure) + part.end - part.begin
                structure.clear()
            written.append((path, array))
        send([bytes(structure)])
        sums = checksums.result()
    arrays = Rendered()
    for path, array in written:
        shape, name, crc32 = [*array.shape], _name(array.dtype), sums.get(path, 0)
        arrays[path] = {"shape": shape, "dtype": name, "crc32": crc32}
        # The same as json.dumps, in a third of the time.
        arrays.lines.append(f'{json.encoder.encode_basestring_ascii(path)}: {{"shape": {shape}, "dtype": "{name}", "crc32": {crc32}}}')
    return {"arrays": arrays, "structure_crc32": zlib.crc32(structure, structure_crc32), "state_bytes": num_bytes + len(structure)}


def _encode(node: Any, path: str, structure: bytearray, packer: msgpack.Packer) -> Iterator[tuple[str, Any]]:
    """Yields each array and its path when its header and data come next; appends all other bytes of the tree to `structure`, which the caller clears."""
    if isinstance(node, (jax.Array, np.ndarray, np.generic)):
        yield path, node
        return
    if not isinstance(node, (dict, list)) or path.startswith(_CALLBACKS_PREFIX):
        # msgpack packs histories and counters in one call, which is much faster.
        with contextlib.suppress(TypeError):  # It contains arrays.
            structure += packer.pack(node)
            return
    if isinstance(node, dict):
        structure += packer.pack_map_header(len(node))
        for key, child in node.items():
            structure += packer.pack(key)
            yield from _encode(child, join(path, key), structure, packer)
    else:
        structure += packer.pack_array_header(len(node))
        for index, child in enumerate(node):
            yield from _encode(child, join(path, str(index)), structure, packer)


# --- Reading ---

_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# What each type byte begins, and the format of the number or length after it. Types that the writer does not write are damage.
_KINDS = {0xCB + index: ("number", form) for index, form in enumerate((">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"))}
_KINDS |= {first + index: (kind, form) for first, kind in ((0xC4, "bytes"), (0xC7, "array"), (0xD9, "str")) for index, form in enumerate((">B", ">H", ">I"))}
_KINDS |= {first + index: (kind, form) for first, kind in ((0xDC, "list"), (0xDE, "dict")) for index, form in enumerate((">H", ">I"))}
_KINDS |= dict.fromkeys(range(0xD4, 0xD9), ("array", ">0s"))  # Of a fixed length.


def _opened(directory: Location, metadata: Mapping[str, Any]) -> io.BufferedReader:
    """Returns the state as a file open for reading, after a check of its size."""
    expected, parts = metadata["state_bytes"], metadata.get("state_parts")
    if parts is None and not isinstance(directory, ObjectPath):
        file = open(directory / STATE_FILE, "rb")  # noqa: SIM115 (the caller closes it)
        faults = size_fault(directory / STATE_FILE, os.fstat(file.fileno()).st_size, expected)
    else:
        if parts is None:  # A local checkpoint that was copied into a bucket.
            stream = PartsReader(directory, lambda index: STATE_FILE, part_bytes=max(expected, 1), num_bytes=expected)
        elif not isinstance(parts, dict) or not isinstance(parts.get("bytes"), int) or parts["bytes"] < 1 or not isinstance(parts.get("stem"), str):
            raise CorruptCheckpointError(f"{directory} is damaged: state_parts in its metadata is invalid: {parts}.")
        else:
            stream = PartsReader(directory, lambda index: part_name(parts["stem"], index), part_bytes=parts["bytes"], num_bytes=expected)
        file = io.BufferedReader(stream, buffer_size=2**20)
        faults = stream.faults()
    if faults:
        file.close()
        raise CorruptCheckpointError(" ".join(faults[:3]))
    return file


class _Reader:
    """Reads what `_write_tree` wrote. Trusts nothing: every fault in the file raises `CorruptCheckpointError`.

    Arrays are read directly into their final memory; those outside `roots` are skipped. An array's header must match its entry in the metadata byte for
    byte. Lengths are checked against the size of the file before memory is allocated.
    """

    def __init__(self, file: io.BufferedReader, path: object, metadata: Mapping[str, Any], roots: Collection[str], checksums: _Checksums) -> None:
        self._file, self._path, self._checksums = file, path, checksums
        self._metadata = metadata
        self._remaining: int = metadata["state_bytes"]
        self._roots = tuple(f"{root}/" for root in roots)
        self._arrays_read: list[str] = []
        self._arena = Arena(self._remaining)
        self._structure_crc32 = 0

    def read(self) -> Any:
        """Returns the tree in the whole file, verified."""
        tree = self._node("")
        if self._remaining:
            raise self._damaged("the map", f"ends {self._remaining} bytes before the file")
        sums = self._checksums.result()
        for path in self._arrays_read:
            if sums.get(path, 0) != self._metadata["arrays"][path]["crc32"]:
                raise self._damaged(path, "does not match its checksum in metadata.json")
        if self._structure_crc32 != self._metadata["structure_crc32"]:
            raise self._damaged("its structure", "does not match its checksum in metadata.json")
        return tree

    def _damaged(self, path: str, fault: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._path} is damaged: {path or 'the file'} {fault}.")

    def _take(self, length: int, path: str) -> bytes:
        """Reads bytes of the structure."""
        data = self._file.read(length) if 0 <= length <= self._remaining else b""
        if len(data) != length:
            raise self._damaged(path, "ends too early")
        self._remaining -= length
        self._structure_crc32 = zlib.crc32(data, self._structure_crc32)
        return data

    def _node(self, path: str, depth: int = 0) -> Any:
        if depth > MAX_DEPTH + 3:
            raise self._damaged(path, "is nested too deeply")
        head = self._take(1, path)
        code = head[0]
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 0x100
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code < 0xC0:
            kind, value = ("dict", code & 0x0F) if code < 0x90 else ("list", code & 0x0F) if code < 0xA0 else ("str", code & 0x1F)
        elif code in _KINDS:
            kind, form = _KINDS[code]
            head += self._take(struct.calcsize(form), path)
            value = struct.unpack(form, head[1:])[0]
        else:
            raise self._damaged(path, f"has the unknown type {code:#04x}")
        match kind:
            case "dict":
                return self._dict(value, path, depth)
            case "list":
                return [self._node(join(path, str(index)), depth + 1) for index in range(value)]
            case "array":
                head += self._take(1, path)
                return self._array(head, head[-1], path)
            case "bytes":
                return self._take(value, path)
            case "str":
                try:
                    return self._take(value, path).decode()
                except UnicodeDecodeError as error:
                    raise self._damaged(path, "is not valid Unicode") from error
        return value

    def _dict(self, length: int, path: str, depth: int) -> Any:
        result: dict[str, Any] = {}
        for _ in range(length):
            key = self._node(path, depth + 1)
            if not isinstance(key, str):
                raise self._damaged(path, f"has a key that is not a string: {key!r}")
            if key == CHUNKED:
                return self._array(b"\x83" + _pack(CHUNKED), _NDARRAY, path)
            result[key] = self._node(join(path, key), depth + 1)
        return result

    def _array(self, taken: bytes, kind: int, path: str) -> Any:
        """Reads an array whose first bytes, `taken`, have already been read."""
        if kind not in (_NDARRAY, _NUMPY_SCALAR) or path not in self._metadata["arrays"]:
            raise self._damaged(path, "is not listed as an array in metadata.json")
        shape, dtype = self._listed_form(path)
        if (num_bytes := math.prod(shape) * dtype.itemsize) > self._remaining:
            raise self._damaged(path, f"needs {num_bytes} bytes, but only {self._remaining} are left")
        is_wanted = f"{path}/".startswith(self._roots)
        array, data = None, memoryview(b"")
        for part in _layout(shape, dtype, kind, CHUNK_BYTES):
            if taken + self._take(len(part.header) - len(taken), path) != part.header:
                raise self._damaged(path, f"does not have the shape {shape} and dtype {dtype} given in metadata.json")
            taken = b""
            if is_wanted:
                if array is None:  # Now that its header is verified.
                    array = self._arena.empty(shape, dtype)
                    data = bytes_of(array)
                    self._arrays_read.append(path)
                self._data(data[part.begin : part.end], path)
            else:
                self._file.seek(part.end - part.begin, os.SEEK_CUR)
            self._remaining -= part.end - part.begin
        return array[()] if array is not None and kind == _NUMPY_SCALAR else array

    def _listed_form(self, path: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Returns the shape and dtype of an array from its unverified entry in the metadata."""
        entry = self._metadata["arrays"][path]
        try:
            shape, crc32 = tuple(entry["shape"]), entry["crc32"]
            if not isinstance(crc32, int) or any(type(size) is not int for size in shape):
                raise ValueError
            return shape, _dtype_of(entry["dtype"], shape)
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(path, f"has an invalid entry in metadata.json: {entry}") from error

    def _data(self, data: memoryview, path: str) -> None:
        while data:
            count = self._file.readinto(data[:_BLOCK_BYTES])
            if not count:
                raise self._damaged(path, "ends too early")
            self._checksums.add(path, data[:count])
            data = data[count:]


@functools.lru_cache
def _dtype_of(name: Any, shape: tuple[int, ...]) -> np.dtype[Any]:
    """Returns the dtype called `name`. Raises ValueError or TypeError if it is unknown, or NumPy cannot make an array of that shape."""
    dtype: np.dtype[Any] = np.dtype(name)
    if name != dtype.name or not is_storable(dtype):
        raise ValueError
    np.broadcast_to(np.empty((), dtype), shape)  # Allocates nothing; raises if the shape is impossible.
    return dtype
