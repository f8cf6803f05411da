"""`state.msgpack` byte by byte: a writer and a reader that go straight to and from arrays' buffers, at the speed of the disk.

The bytes are those of `flax.serialization.msgpack_serialize`, arrays above 2^30 bytes in chunks included. Checksums of arrays are computed beside the work of
the disk, block by block, by a thread that lives as long as the writer or the reader.
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
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import msgpack
import numpy as np

from fitflax.background import Background
from fitflax.checkpoints.documents import Rendered
from fitflax.checkpoints.memory import Arena
from fitflax.checkpoints.trees import CHUNKED, MAX_DEPTH, fetch, is_storable, join
from fitflax.errors import CorruptCheckpointError

__all__ = ["Reader", "Writer"]

# flax's extension types for arrays, and the size in bytes above which it writes an array as a map of chunks.
_NDARRAY, _NUMPY_SCALAR = 1, 3
CHUNK_BYTES = 2**30
# Data is moved and summed in blocks: large enough that Python's own work between two is nothing, small enough that the second to touch one finds it in a cache.
_BLOCK_BYTES = 2**22
_MAX_WAITING_JOBS = 8
# Linux takes no more at once (IOV_MAX).
_MAX_BUFFERS = 1024
# The kernel is asked to write back what it was given so often, so that the disk works while the rest is still on its way.
_WRITE_BACK_BYTES = 2**24
# Copies of the next jax.Arrays from their device run while one is written.
_FETCH_AHEAD_BYTES = 2**24


# Where trees without arrays are: the states of callbacks.
_MOSTLY_VALUES = "run/callbacks/"
_ARRAYS = (jax.Array, np.ndarray, np.generic)


class _Part(NamedTuple):
    """A stretch of an array's data and the bytes that stand before it in the file."""

    header: bytes
    begin: int
    end: int


@functools.lru_cache
def _layout(shape: tuple[int, ...], dtype: np.dtype[Any], kind: int, chunk_bytes: int) -> tuple[_Part, ...]:
    """Returns how flax lays an array out: one extension object, or a map of several above `chunk_bytes`. Writer and reader share it."""
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
    inner = b"\x93" + _pack([*shape]) + _pack(_name(dtype)) + _sized(num_bytes, (0xC4, 0xC5, 0xC6))
    length = len(inner) + num_bytes
    outer = bytes([0xD4 + length.bit_length() - 1]) if length in (1, 2, 4, 8, 16) else _sized(length, (0xC7, 0xC8, 0xC9))
    return outer + bytes([kind]) + inner


def _sized(length: int, codes: tuple[int, int, int]) -> bytes:
    if length < 2**8:
        return struct.pack(">BB", codes[0], length)
    return struct.pack(">BH", codes[1], length) if length < 2**16 else struct.pack(">BI", codes[2], length)


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, strict_types=True)
    return packed


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # NumPy takes a microsecond to find it.


@functools.lru_cache
def _dtype_of(name: Any, shape: tuple[int, ...]) -> np.dtype[Any]:
    """Returns the dtype that a file calls `name`, and raises ValueError or TypeError unless there are arrays of it in that shape."""
    dtype: np.dtype[Any] = np.dtype(name)
    if name != _name(dtype) or not is_storable(dtype):
        raise ValueError
    np.broadcast_to(np.empty((), dtype), shape)  # Takes no memory, and raises where NumPy cannot have that shape.
    return dtype


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    # memoryview() knows no bfloat16, so through bytes.
    data: memoryview = array.reshape(-1).view(np.uint8).data
    return data


@dataclasses.dataclass
class _Sum:
    """The crc32 of what has been added."""

    value: int = 0


class _Sums:
    """Adds to checksums beside its caller's work (zlib releases the GIL), by a thread that is started when there is enough to do for one."""

    def __init__(self) -> None:
        self._thread = Background("fitflax-crc32", on_error=self._fail)
        self._fault: BaseException | None = None
        # Small blocks go to the thread together: waking it takes longer than to sum them.
        self._next: list[tuple[_Sum, memoryview]] = []
        self._next_bytes = 0

    def add(self, total: _Sum, block: memoryview) -> None:
        """Adds a block to a sum, before `wait` returns; it must stay as it is until then."""
        self._next.append((total, block))
        self._next_bytes += len(block)
        if self._next_bytes < _BLOCK_BYTES:
            return
        self._thread.wait_until(lambda: len(self._thread.waiting) < _MAX_WAITING_JOBS)
        self._thread.submit(functools.partial(_add_all, self._next))
        self._next, self._next_bytes = [], 0

    def wait(self) -> None:
        """Returns when all is added, and no thread is left."""
        rest = self._next
        self.stop()
        if self._fault is not None:
            raise self._fault
        _add_all(rest)

    def stop(self) -> None:
        """Ends the thread, whatever became of the sums."""
        self._next = []
        if self._thread.has_thread:
            self._thread.end()

    def _fail(self, error: BaseException) -> None:
        self._fault = error


def _add_all(job: list[tuple[_Sum, memoryview]]) -> None:
    for total, block in job:
        total.value = zlib.crc32(block, total.value)


class _Array(NamedTuple):
    """An array of a layout: its path, what `metadata.json` says of it up to its checksum, as text and as values, and its parts in the file."""

    path: str
    text: str
    entry: dict[str, Any]
    parts: tuple[_Part, ...]


class _Layout:
    """What the file of a tree holds between the data of its arrays.

    Args:
        tree: Nested dicts, lists and leaves.
        path: What paths begin with.
        leaves: Where the tree's arrays are put, in the order of the file.
    """

    def __init__(self, tree: Any, path: str, leaves: list[Any]) -> None:
        self._packer = msgpack.Packer()
        self._structure = bytearray()
        self._leaves = leaves
        # Each with the structure before it in the header of its first part.
        self.arrays: list[_Array] = []
        self._node(tree, path)
        self.end = bytes(self._structure)
        del self._leaves  # A layout is kept, the arrays are not.

    def _node(self, node: Any, path: str) -> None:
        if path.startswith(_MOSTLY_VALUES) and isinstance(node, (dict, list)):
            # Histories and counters, which msgpack packs at once where this would go from value to value.
            with contextlib.suppress(TypeError):  # There are arrays in it.
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


# Layouts of trees that hold arrays alone, which are the same at every save of a run.
_LAYOUTS: dict[Any, _Layout] = {}
_MAX_LAYOUTS = 8


def _layout_of(tree: Any, path: str) -> tuple[_Layout, list[Any]]:
    """Returns the layout of a tree, and its arrays in the order of the file."""
    leaves: list[Any] = []
    signature: list[Any] = []
    if not _sign(tree, signature, leaves):
        leaves.clear()
        return _Layout(tree, path, leaves), leaves
    whole = path, CHUNK_BYTES, tuple(signature)
    found = _LAYOUTS.get(whole)
    if found is None:
        for key in [*_LAYOUTS][: len(_LAYOUTS) + 1 - _MAX_LAYOUTS]:
            _LAYOUTS.pop(key, None)
        found = _LAYOUTS[whole] = _Layout(tree, path, [])
    return found, leaves


def _sign(node: Any, signature: list[Any], leaves: list[Any]) -> bool:
    """Adds what a layout depends on, keys in their order, and the arrays; returns whether there is nothing but arrays, otherwise it depends on values."""
    if isinstance(node, dict):
        signature.append(tuple(node))
        return all(_sign(child, signature, leaves) for child in node.values())
    signature.append(None if node is None else (node.shape, node.dtype) if isinstance(node, _ARRAYS[:2]) else False)
    if isinstance(node, _ARRAYS[:2]):
        leaves.append(node)
    return signature[-1] is not False


class Writer:
    """Writes a tree as msgpack; counts the bytes, sums the structure and lists the arrays on the way. A context manager, which ends its thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._sums = _Sums()
        # What comes next, until there is enough for a call of the system: parts of arrays where they are, and before each and at the end what stands there.
        self._buffers: list[bytes | memoryview] = []
        self._structure = b""
        self._next_bytes = 0
        self._sent_back = 0
        self.arrays = Rendered()
        self.structure_crc32 = 0
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._sums.stop()

    def write(self, tree: dict[str, Any]) -> None:
        """Writes nested dicts, lists and leaves, and hands all of it to the operating system; the caller calls `fsync`.

        Raises:
            OSError: The disk is full or fails.
        """
        self._structure = msgpack.Packer().pack_map_header(len(tree))
        written = [array for root, node in tree.items() for array in self._root(root, node)]
        self._data(memoryview(b""), _Sum())
        self._flush()
        self._sums.wait()
        for array, total in written:
            self.arrays.add(array.path, {**array.entry, "crc32": total.value}, f"{array.text}{total.value}}}")

    def _root(self, root: str, node: Any) -> list[tuple[_Array, _Sum]]:
        self._structure += _pack(root)
        layout, leaves = _layout_of(node, root)
        fetched = fetch((leaf for leaf in leaves if isinstance(leaf, jax.Array)), ahead_bytes=_FETCH_AHEAD_BYTES)
        written = []
        for array, leaf in zip(layout.arrays, leaves, strict=True):
            data, total = _bytes_of(next(fetched) if isinstance(leaf, jax.Array) else np.asarray(leaf, order="C")), _Sum()
            for part in array.parts:
                self._structure += part.header
                for begin in range(part.begin, part.end, _BLOCK_BYTES):
                    self._data(data[begin : min(begin + _BLOCK_BYTES, part.end)], total)
            written.append((array, total))
        self._structure += layout.end
        return written

    def _data(self, block: memoryview, total: _Sum) -> None:
        """Takes a part of an array, after the structure that has gathered."""
        self.structure_crc32 = zlib.crc32(self._structure, self.structure_crc32)
        self._buffers += [self._structure, block]
        self._next_bytes += len(self._structure) + len(block)
        self._structure = b""
        self._sums.add(total, block)
        if self._next_bytes >= _BLOCK_BYTES or len(self._buffers) >= _MAX_BUFFERS:
            self._flush()

    def _flush(self) -> None:
        buffers = self._buffers
        while buffers:
            count = os.writev(self._descriptor, buffers)
            self.num_bytes += count
            # Almost always all of it.
            while buffers and count >= len(buffers[0]):
                count -= len(buffers.pop(0))
            if buffers:
                buffers[0] = memoryview(buffers[0])[count:]
        self._next_bytes = 0
        if self.num_bytes - self._sent_back >= _WRITE_BACK_BYTES:
            self._write_back()

    def _write_back(self) -> None:
        if hasattr(os, "posix_fadvise"):
            # "Not needed" makes Linux begin to write the pages back, at once and without waiting. It would drop those that are on the disk already, but these
            # were given to it just now. It is advice only, and fsync() finds any error of the disk; a file system that does not take it may ignore it.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, self._sent_back, self.num_bytes - self._sent_back, os.POSIX_FADV_DONTNEED)
        self._sent_back = self.num_bytes


# What may follow a type byte: the format of the number, or of the length of what follows. Only what Writer writes is here; all else is damage.
_NUMBERS = {0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_LENGTHS = {0xC4: ("bytes", ">B"), 0xC5: ("bytes", ">H"), 0xC6: ("bytes", ">I"), 0xD9: ("str", ">B"), 0xDA: ("str", ">H"), 0xDB: ("str", ">I")}
_LENGTHS |= {0xDC: ("list", ">H"), 0xDD: ("list", ">I"), 0xDE: ("dict", ">H"), 0xDF: ("dict", ">I")}
# The bytes of an extension object's length; the type follows it.
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD4: 0, 0xD5: 0, 0xD6: 0, 0xD7: 0, 0xD8: 0}


class Reader:
    """Reads what `Writer` wrote and trusts nothing: every fault in the file is a `CorruptCheckpointError`. A context manager, which ends its thread.

    Arrays are read straight into their own memory, those that nobody asked for are skipped. An array's header must be, byte by byte, the one that
    its entry in the metadata asks for; no length is believed before the file is known to be long enough, and no memory taken before that.
    """

    def __init__(self, file: io.BufferedReader, path: Path, num_bytes: int, arrays: Mapping[str, Any], roots: Collection[str]) -> None:
        self._file = file
        self._path = path
        self._left = num_bytes
        self._arrays = arrays
        self._wanted = tuple(f"{root}/" for root in roots)
        self._sums = _Sums()
        self._totals: dict[str, _Sum] = {}
        self._arena = Arena(num_bytes)
        self._structure_crc32 = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._sums.stop()

    def read(self, structure_crc32: int) -> Any:
        """Returns the tree that is the whole file, verified.

        Raises:
            CorruptCheckpointError: It fails a check.
        """
        tree = self._node("")
        if self._left:
            raise self._damaged("the map", f"ends {self._left} bytes before the file")
        self._sums.wait()
        for path, total in self._totals.items():
            if total.value != self._arrays[path]["crc32"]:
                raise self._damaged(path, "has another checksum than metadata.json says")
        if self._structure_crc32 != structure_crc32:
            raise self._damaged("its structure", "has another checksum than metadata.json says")
        return tree

    def _node(self, path: str, depth: int = 0) -> Any:
        if depth > MAX_DEPTH + 3:
            raise self._damaged(path, "is nested too deep")
        code = self._take(1, path)[0]
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
            header = bytes([code]) + self._take(_EXTENSIONS[code] + 1, path)
            return self._array(header, header[-1], path)
        raise self._damaged(path, f"has the unknown type {code:#04x}")

    def _damaged(self, path: str, fault: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._path} is damaged: {path or 'the file'} {fault}.")

    def _sequence(self, kind: str, length: int, path: str, depth: int) -> Any:
        if kind == "dict":
            return self._dict(length, path, depth)
        if kind == "list":
            return [self._node(join(path, str(index)), depth + 1) for index in range(length)]
        data = self._take(length, path)
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
                raise self._damaged(path, f"has a key that is no string: {key!r}")
            if key == CHUNKED:
                return self._array(b"\x83" + _pack(CHUNKED), _NDARRAY, path)
            result[key] = self._node(join(path, key), depth + 1)
        return result

    def _array(self, taken: bytes, kind: int, path: str) -> Any:
        """Reads an array whose first bytes, `taken`, have been read already."""
        if kind not in (_NDARRAY, _NUMPY_SCALAR) or path not in self._arrays:
            raise self._damaged(path, "is not among the arrays that metadata.json lists")
        shape, dtype = self._listed(path)
        if (num_bytes := math.prod(shape) * dtype.itemsize) > self._left:
            raise self._damaged(path, f"has {num_bytes} bytes, but {self._left} are left")
        parts = _layout(shape, dtype, kind, CHUNK_BYTES)
        is_wanted = f"{path}/".startswith(self._wanted)
        array, data, total = np.empty(0, dtype), memoryview(b""), _Sum()
        for part in parts:
            if taken + self._take(len(part.header) - len(taken), path) != part.header:
                raise self._damaged(path, f"does not have the shape {shape} and dtype {dtype} that metadata.json says")
            if is_wanted and part is parts[0]:
                array = self._arena.empty(shape, dtype)
                data = _bytes_of(array)
            taken = b""
            if is_wanted:
                self._data(data[part.begin : part.end], total, path)
            else:
                self._skip(part.end - part.begin)
        if not is_wanted:
            return None
        self._totals[path] = total
        return array if kind == _NDARRAY else array[()]

    def _listed(self, path: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Returns the shape and dtype of an array by its entry in the metadata, whose values nobody has looked at yet."""
        entry = self._arrays[path]
        try:
            shape, crc32 = tuple(entry["shape"]), entry["crc32"]
            if not isinstance(crc32, int) or any(type(size) is not int for size in shape):
                raise ValueError
            return shape, _dtype_of(entry["dtype"], shape)
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(path, f"has an entry in metadata.json that describes no array: {entry}") from error

    def _data(self, data: memoryview, total: _Sum, path: str) -> None:
        self._left -= len(data)
        while data:
            count = self._file.readinto(data[:_BLOCK_BYTES])
            if not count:
                raise self._damaged(path, "ends too early")
            self._sums.add(total, data[:count])
            data = data[count:]

    def _skip(self, num_bytes: int) -> None:
        self._left -= num_bytes
        self._file.seek(num_bytes, os.SEEK_CUR)

    def _number(self, number_format: str, path: str) -> Any:
        return struct.unpack(number_format, self._take(struct.calcsize(number_format), path))[0]

    def _take(self, length: int, path: str) -> bytes:
        data = self._file.read(length) if 0 <= length <= self._left else b""
        if len(data) != length:
            raise self._damaged(path, "ends too early")
        self._left -= length
        self._structure_crc32 = zlib.crc32(data, self._structure_crc32)
        return data
