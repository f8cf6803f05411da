"""A writer and a reader of `state.msgpack` that work directly on arrays' buffers, at the speed of the disk.

The bytes are those of `flax.serialization.msgpack_serialize`, including chunks for arrays above 2^30 bytes. A thread computes the checksums of arrays
block by block during disk I/O, and lives as long as the writer or the reader.
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import struct
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import msgpack
import numpy as np

from fitflax.background import Background
from fitflax.checkpoints.formats.device_fetch import fetch
from fitflax.checkpoints.formats.json_documents import Rendered
from fitflax.checkpoints.formats.plain_tree import CHUNKED, MAX_DEPTH, is_storable, join
from fitflax.checkpoints.memory import Arena, bytes_of
from fitflax.errors import CorruptCheckpointError
from fitflax.storage.parts import Send

__all__ = ["FileSink", "Reader", "Writer"]

# Flax's extension types for arrays, and the size in bytes above which it splits an array into a map of chunks.
_NDARRAY, _NUMPY_SCALAR = 1, 3
CHUNK_BYTES = 2**30
# Blocks are large enough that Python's overhead is negligible, and small enough that they stay in the cache between I/O and checksum.
_BLOCK_BYTES = 2**22
_MAX_WAITING_JOBS = 8
# Linux's IOV_MAX.
_MAX_BUFFERS = 1024
# How often the kernel is told to start writing back, so that the disk works in parallel.
_WRITE_BACK_BYTES = 2**24
# How much of the next jax.Arrays is copied from the device while one is written.
_FETCH_AHEAD_BYTES = 2**24


# States of callbacks rarely contain arrays.
_CALLBACKS_PREFIX = "run/callbacks/"
_ARRAYS = (jax.Array, np.ndarray, np.generic)


class _Part(NamedTuple):
    """A range of an array's data, and the bytes before it in the file."""

    header: bytes
    begin: int
    end: int


@functools.lru_cache
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
    inner = b"\x93" + _pack([*shape]) + _pack(_name(dtype)) + _length_header(num_bytes, (0xC4, 0xC5, 0xC6))
    length = len(inner) + num_bytes
    outer = bytes([0xD4 + length.bit_length() - 1]) if length in (1, 2, 4, 8, 16) else _length_header(length, (0xC7, 0xC8, 0xC9))
    return outer + bytes([kind]) + inner


def _length_header(length: int, codes: tuple[int, int, int]) -> bytes:
    if length < 2**8:
        return struct.pack(">BB", codes[0], length)
    return struct.pack(">BH", codes[1], length) if length < 2**16 else struct.pack(">BI", codes[2], length)


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, strict_types=True)
    return packed


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # Cached: NumPy takes a microsecond.


@functools.lru_cache
def _dtype_of(name: Any, shape: tuple[int, ...]) -> np.dtype[Any]:
    """Returns the dtype called `name`. Raises ValueError or TypeError if it is unknown, or NumPy cannot make an array of that shape."""
    dtype: np.dtype[Any] = np.dtype(name)
    if name != _name(dtype) or not is_storable(dtype):
        raise ValueError
    np.broadcast_to(np.empty((), dtype), shape)  # Allocates nothing; raises if the shape is impossible.
    return dtype


@dataclasses.dataclass
class _Checksum:
    """A running crc32."""

    value: int = 0


class _ChecksumThread:
    """Updates checksums in a thread, which is started once there is enough work (zlib releases the GIL)."""

    def __init__(self) -> None:
        self._thread = Background("fitflax-crc32", on_error=self._fail)
        self._fault: BaseException | None = None
        # Small blocks are batched: waking the thread takes longer than their checksum.
        self._next: list[tuple[_Checksum, memoryview]] = []
        self._next_bytes = 0

    def add(self, total: _Checksum, block: memoryview) -> None:
        """Adds a block to a checksum. The block must not change until `wait` returns."""
        self._next.append((total, block))
        self._next_bytes += len(block)
        if self._next_bytes < _BLOCK_BYTES:
            return
        self._thread.wait_until(lambda: len(self._thread.waiting) < _MAX_WAITING_JOBS)
        self._thread.submit(functools.partial(_add_all, self._next))
        self._next, self._next_bytes = [], 0

    def wait(self) -> None:
        """Waits until all blocks are added, and ends the thread."""
        rest = self._next
        self.stop()
        if self._fault is not None:
            raise self._fault
        _add_all(rest)

    def stop(self) -> None:
        """Ends the thread without finishing the checksums."""
        self._next = []
        if self._thread.has_thread:
            self._thread.end()

    def _fail(self, error: BaseException) -> None:
        self._fault = error


def _add_all(job: list[tuple[_Checksum, memoryview]]) -> None:
    for total, block in job:
        total.value = zlib.crc32(block, total.value)


class _Array(NamedTuple):
    """An array of a layout: its path, its entry in `metadata.json` as text up to the checksum and as values, and its parts."""

    path: str
    text: str
    entry: dict[str, Any]
    parts: tuple[_Part, ...]


class _Layout:
    """The bytes of a tree's file between the data of its arrays. Appends the tree's arrays to `leaves`, in the order of the file."""

    def __init__(self, tree: Any, path: str, leaves: list[Any]) -> None:
        self._packer = msgpack.Packer()
        self._structure = bytearray()
        self._leaves = leaves
        # The header of each array's first part begins with the structure before it.
        self.arrays: list[_Array] = []
        self._node(tree, path)
        self.end = bytes(self._structure)
        del self._leaves  # Layouts are cached, arrays must not be.

    def _node(self, node: Any, path: str) -> None:
        if path.startswith(_CALLBACKS_PREFIX) and isinstance(node, (dict, list)):
            # Let msgpack pack histories and counters in one call, which is much faster.
            with contextlib.suppress(TypeError):  # It contains arrays.
                self._structure += _pack(node)
                return
        if isinstance(node, dict):
            self._structure += self._packer.pack_map_header(len(node))
            for key, child in node.items():
                self._structure += _pack(key)
                self._node(child, join(path, key))
        elif isinstance(node, list):
            self._structure += self._packer.pack_array_header(len(node))
            for index, child in enumerate(node):
                self._node(child, join(path, str(index)))
        elif isinstance(node, _ARRAYS):
            first, *others = _layout(node.shape, node.dtype, _NUMPY_SCALAR if isinstance(node, np.generic) else _NDARRAY, CHUNK_BYTES)
            entry = {"shape": list(node.shape), "dtype": _name(node.dtype)}
            parts = (first._replace(header=bytes(self._structure) + first.header), *others)
            self.arrays.append(_Array(path, f'{json.dumps(path)}: {json.dumps(entry)[:-1]}, "crc32": ', entry, parts))
            self._structure.clear()
            self._leaves.append(node)
        else:
            self._structure += _pack(node)


# Cached layouts of trees that contain only arrays: they are equal in all saves of a run.
_LAYOUTS: dict[Any, _Layout] = {}
_MAX_LAYOUTS = 8


def _layout_of(tree: Any, path: str) -> tuple[_Layout, list[Any]]:
    """Returns the layout of a tree, and its arrays in the order of the file."""
    leaves: list[Any] = []
    signature: list[Any] = []
    if not _add_signature(tree, signature, leaves):
        leaves.clear()
        return _Layout(tree, path, leaves), leaves
    whole = path, CHUNK_BYTES, tuple(signature)
    found = _LAYOUTS.get(whole)
    if found is None:
        for key in [*_LAYOUTS][: len(_LAYOUTS) + 1 - _MAX_LAYOUTS]:
            _LAYOUTS.pop(key, None)
        found = _LAYOUTS[whole] = _Layout(tree, path, [])
    return found, leaves


def _add_signature(node: Any, signature: list[Any], leaves: list[Any]) -> bool:
    """Appends what a layout depends on, and the arrays. Returns whether all leaves are arrays; otherwise, it also depends on values."""
    if isinstance(node, dict):
        signature.append(tuple(node))
        return all(_add_signature(child, signature, leaves) for child in node.values())
    signature.append(None if node is None else (node.shape, node.dtype) if isinstance(node, _ARRAYS[:2]) else False)
    if isinstance(node, _ARRAYS[:2]):
        leaves.append(node)
    return signature[-1] is not False


class FileSink:
    """Writes a stream of bytes to an open file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._num_bytes = self._sent_back = 0

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Passes bytes to the operating system. Raises `OSError` if the disk is full or fails."""
        waiting = list(buffers)
        while waiting:
            count = os.writev(self._descriptor, waiting)
            self._num_bytes += count
            while waiting and count >= len(waiting[0]):
                count -= len(waiting.pop(0))
            if waiting:
                waiting[0] = memoryview(waiting[0])[count:]
        if hasattr(os, "posix_fadvise") and self._num_bytes - self._sent_back >= _WRITE_BACK_BYTES:
            # POSIX_FADV_DONTNEED makes Linux start writing the pages back without blocking. It is only advice, and fsync() reports errors of the disk.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, self._sent_back, self._num_bytes - self._sent_back, os.POSIX_FADV_DONTNEED)
            self._sent_back = self._num_bytes


class Writer:
    """Writes a tree as msgpack, and collects the number of bytes, the checksums and the list of arrays. A context manager that ends its thread.

    `send` receives the next bytes, such as `FileSink.send` or `PartsWriter.send`.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._checksums = _ChecksumThread()
        # Pending buffers, until there are enough for a system call: structure and blocks of arrays in turn, not copied.
        self._buffers: list[bytes | memoryview] = []
        self._structure = b""
        self._next_bytes = 0
        self.arrays = Rendered()
        self.structure_crc32 = 0
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._checksums.stop()

    def write(self, tree: dict[str, Any]) -> None:
        """Writes and sends nested dicts, lists and leaves. The caller calls `fsync`. Raises the errors of `send`."""
        self._structure = msgpack.Packer().pack_map_header(len(tree))
        written = [array for root, node in tree.items() for array in self._root(root, node)]
        self._data(memoryview(b""), _Checksum())
        self._flush()
        self._checksums.wait()
        for array, total in written:
            self.arrays.add(array.path, {**array.entry, "crc32": total.value}, f"{array.text}{total.value}}}")

    def _root(self, root: str, node: Any) -> list[tuple[_Array, _Checksum]]:
        self._structure += _pack(root)
        layout, leaves = _layout_of(node, root)
        fetched = fetch((leaf for leaf in leaves if isinstance(leaf, jax.Array)), ahead_bytes=_FETCH_AHEAD_BYTES)
        written = []
        for array, leaf in zip(layout.arrays, leaves, strict=True):
            data, total = bytes_of(next(fetched) if isinstance(leaf, jax.Array) else np.asarray(leaf, order="C")), _Checksum()
            for part in array.parts:
                self._structure += part.header
                for begin in range(part.begin, part.end, _BLOCK_BYTES):
                    self._data(data[begin : min(begin + _BLOCK_BYTES, part.end)], total)
            written.append((array, total))
        self._structure += layout.end
        return written

    def _data(self, block: memoryview, total: _Checksum) -> None:
        """Appends the pending structure and a block of an array."""
        self.structure_crc32 = zlib.crc32(self._structure, self.structure_crc32)
        self._buffers += [self._structure, block]
        self._next_bytes += len(self._structure) + len(block)
        self._structure = b""
        self._checksums.add(total, block)
        if self._next_bytes >= _BLOCK_BYTES or len(self._buffers) >= _MAX_BUFFERS:
            self._flush()

    def _flush(self) -> None:
        buffers, self._buffers = self._buffers, []
        if self._next_bytes:
            self._send(buffers)
        self.num_bytes += self._next_bytes
        self._next_bytes = 0


# The format of the number or length after each type byte. Types that Writer does not write are damage.
_NUMBERS = {0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_LENGTHS = {0xC4: ("bytes", ">B"), 0xC5: ("bytes", ">H"), 0xC6: ("bytes", ">I"), 0xD9: ("str", ">B"), 0xDA: ("str", ">H"), 0xDB: ("str", ">I")}
_LENGTHS |= {0xDC: ("list", ">H"), 0xDD: ("list", ">I"), 0xDE: ("dict", ">H"), 0xDF: ("dict", ">I")}
# The size of an extension object's length field, which the type follows.
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD4: 0, 0xD5: 0, 0xD6: 0, 0xD7: 0, 0xD8: 0}


class Reader:
    """Reads what `Writer` wrote. Trusts nothing: every fault in the file raises `CorruptCheckpointError`. A context manager that ends its thread.

    Arrays are read directly into their final memory; those outside `roots` are skipped. An array's header must match its entry in the metadata byte for
    byte. Lengths are checked against the size of the file before memory is allocated.
    """

    def __init__(self, file: io.BufferedReader, path: object, num_bytes: int, arrays: Mapping[str, Any], roots: Collection[str]) -> None:
        self._file = file
        self._path = path
        self._remaining = num_bytes
        self._arrays = arrays
        self._wanted = tuple(f"{root}/" for root in roots)
        self._checksums = _ChecksumThread()
        self._totals: dict[str, _Checksum] = {}
        self._arena = Arena(num_bytes)
        self._structure_crc32 = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._checksums.stop()

    def read(self, structure_crc32: int) -> Any:
        """Returns the tree in the whole file, verified."""
        tree = self._node("")
        if self._remaining:
            raise self._damaged("the map", f"ends {self._remaining} bytes before the file")
        self._checksums.wait()
        for path, total in self._totals.items():
            if total.value != self._arrays[path]["crc32"]:
                raise self._damaged(path, "does not match its checksum in metadata.json")
        if self._structure_crc32 != structure_crc32:
            raise self._damaged("its structure", "does not match its checksum in metadata.json")
        return tree

    def _node(self, path: str, depth: int = 0) -> Any:
        if depth > MAX_DEPTH + 3:
            raise self._damaged(path, "is nested too deeply")
        code = self._read_exactly(1, path)[0]
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 0x100
        if code < 0xC0:
            kind, length = ("dict", code & 0x0F) if code < 0x90 else ("list", code & 0x0F) if code < 0xA0 else ("str", code & 0x1F)
            return self._sequence(kind, length, path, depth)
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            return self._number(_NUMBERS[code], path)
        if code in _LENGTHS:
            kind, length_format = _LENGTHS[code]
            return self._sequence(kind, self._number(length_format, path), path, depth)
        if code in _EXTENSIONS:
            header = bytes([code]) + self._read_exactly(_EXTENSIONS[code] + 1, path)
            return self._array(header, header[-1], path)
        raise self._damaged(path, f"has the unknown type {code:#04x}")

    def _damaged(self, path: str, fault: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._path} is damaged: {path or 'the file'} {fault}.")

    def _sequence(self, kind: str, length: int, path: str, depth: int) -> Any:
        if kind == "dict":
            return self._dict(length, path, depth)
        if kind == "list":
            return [self._node(join(path, str(index)), depth + 1) for index in range(length)]
        data = self._read_exactly(length, path)
        if kind == "bytes":
            return data
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(path, "is not valid Unicode") from error

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
        if kind not in (_NDARRAY, _NUMPY_SCALAR) or path not in self._arrays:
            raise self._damaged(path, "is not listed as an array in metadata.json")
        shape, dtype = self._listed_form(path)
        if (num_bytes := math.prod(shape) * dtype.itemsize) > self._remaining:
            raise self._damaged(path, f"needs {num_bytes} bytes, but only {self._remaining} are left")
        parts = _layout(shape, dtype, kind, CHUNK_BYTES)
        is_wanted = f"{path}/".startswith(self._wanted)
        array, data, total = np.empty(0, dtype), memoryview(b""), _Checksum()
        for part in parts:
            if taken + self._read_exactly(len(part.header) - len(taken), path) != part.header:
                raise self._damaged(path, f"does not have the shape {shape} and dtype {dtype} given in metadata.json")
            if is_wanted and part is parts[0]:
                array = self._arena.empty(shape, dtype)
                data = bytes_of(array)
            taken = b""
            if is_wanted:
                self._data(data[part.begin : part.end], total, path)
            else:
                self._remaining -= part.end - part.begin
                self._file.seek(part.end - part.begin, os.SEEK_CUR)
        if not is_wanted:
            return None
        self._totals[path] = total
        return array if kind == _NDARRAY else array[()]

    def _listed_form(self, path: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Returns the shape and dtype of an array from its unverified entry in the metadata."""
        entry = self._arrays[path]
        try:
            shape, crc32 = tuple(entry["shape"]), entry["crc32"]
            if not isinstance(crc32, int) or any(type(size) is not int for size in shape):
                raise ValueError
            return shape, _dtype_of(entry["dtype"], shape)
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(path, f"has an invalid entry in metadata.json: {entry}") from error

    def _data(self, data: memoryview, total: _Checksum, path: str) -> None:
        self._remaining -= len(data)
        while data:
            count = self._file.readinto(data[:_BLOCK_BYTES])
            if not count:
                raise self._damaged(path, "ends too early")
            self._checksums.add(total, data[:count])
            data = data[count:]

    def _number(self, number_format: str, path: str) -> Any:
        return struct.unpack(number_format, self._read_exactly(struct.calcsize(number_format), path))[0]

    def _read_exactly(self, length: int, path: str) -> bytes:
        data = self._file.read(length) if 0 <= length <= self._remaining else b""
        if len(data) != length:
            raise self._damaged(path, "ends too early")
        self._remaining -= length
        self._structure_crc32 = zlib.crc32(data, self._structure_crc32)
        return data
