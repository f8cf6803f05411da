"""`state.msgpack` byte by byte: a writer and a reader that go straight to and from arrays' buffers, with checksums on the way.

The bytes are those of `flax.serialization.msgpack_serialize`, arrays above 2^30 bytes in chunks included.
"""

import io
import math
import os
import struct
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack
import numpy as np

from fitflax.checkpoints.trees import CHUNKED, MAX_DEPTH, join
from fitflax.errors import CorruptCheckpointError

__all__ = ["Reader", "Writer"]

# flax's extension types for arrays, and the size in bytes above which it writes an array as a map of chunks.
_NDARRAY, _NUMPY_SCALAR = 1, 3
CHUNK_BYTES = 2**30


class _Part(NamedTuple):
    """A stretch of an array's data and the bytes that stand before it in the file."""

    header: bytes
    begin: int
    end: int


def _array_parts(shape: tuple[int, ...], dtype: np.dtype[Any], kind: int) -> list[_Part]:
    """Returns how flax lays an array out: one extension object, or a map of several above `CHUNK_BYTES`. Writer and reader share it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes <= CHUNK_BYTES:
        return [_Part(_extension_header(shape, dtype, kind), 0, num_bytes)]
    step = max(1, CHUNK_BYTES // dtype.itemsize) * dtype.itemsize
    begins = range(0, num_bytes, step)
    dims = {str(axis): size for axis, size in enumerate(shape)}
    before = b"\x83" + b"".join(map(_pack, (CHUNKED, True, "shape", dims, "chunks"))) + msgpack.Packer().pack_map_header(len(begins))
    parts = []
    for index, begin in enumerate(begins):
        end = min(begin + step, num_bytes)
        header = _extension_header(((end - begin) // dtype.itemsize,), dtype, kind)
        parts.append(_Part(before + _pack(str(index)) + header, begin, end))
        before = b""
    return parts


def _extension_header(shape: tuple[int, ...], dtype: np.dtype[Any], kind: int) -> bytes:
    num_bytes = math.prod(shape) * dtype.itemsize
    inner = b"\x93" + _pack([*shape]) + _pack(dtype.name) + _sized(num_bytes, (0xC4, 0xC5, 0xC6))
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


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    # memoryview() knows no bfloat16, so through bytes.
    data: memoryview = array.reshape(-1).view(np.uint8).data
    return data


class Writer:
    """Writes nested dicts as msgpack; counts the bytes, sums the structure and lists the arrays on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._packer = msgpack.Packer()
        self.arrays: dict[str, dict[str, Any]] = {}
        self.structure_crc32 = 0
        self.num_bytes = 0

    def node(self, node: Any, path: str) -> None:
        """Writes a tree of dicts, lists and leaves; `path` names it in errors and checksums."""
        if isinstance(node, dict):
            self._structure(self._packer.pack_map_header(len(node)))
            for key, child in node.items():
                self._structure(_pack(key))
                self.node(child, join(path, key))
        elif isinstance(node, list):
            self._structure(self._packer.pack_array_header(len(node)))
            for index, child in enumerate(node):
                self.node(child, join(path, str(index)))
        elif isinstance(node, (np.ndarray, np.generic)):
            self._array(np.asarray(node), _NDARRAY if isinstance(node, np.ndarray) else _NUMPY_SCALAR, path)
        else:
            self._structure(_pack(node))

    def _array(self, array: np.ndarray[Any, Any], kind: int, path: str) -> None:
        data, crc32 = _bytes_of(array), 0
        for part in _array_parts(array.shape, array.dtype, kind):
            self._structure(part.header)
            piece = data[part.begin : part.end]
            crc32 = zlib.crc32(piece, crc32)
            self._file.write(piece)
            self.num_bytes += len(piece)
        self.arrays[path] = {"shape": list(array.shape), "dtype": array.dtype.name, "crc32": crc32}

    def _structure(self, data: bytes) -> None:
        self.structure_crc32 = zlib.crc32(data, self.structure_crc32)
        self._file.write(data)
        self.num_bytes += len(data)


# What may follow a type byte: the format of the number, or of the length of what follows. Only what Writer writes is here; all else is damage.
_NUMBERS = {0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_LENGTHS = {0xC4: ("bytes", ">B"), 0xC5: ("bytes", ">H"), 0xC6: ("bytes", ">I"), 0xD9: ("str", ">B"), 0xDA: ("str", ">H"), 0xDB: ("str", ">I")}
_LENGTHS |= {0xDC: ("list", ">H"), 0xDD: ("list", ">I"), 0xDE: ("dict", ">H"), 0xDF: ("dict", ">I")}
# The bytes of an extension object's length; the type follows it.
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD4: 0, 0xD5: 0, 0xD6: 0, 0xD7: 0, 0xD8: 0}


class Reader:
    """Reads what `Writer` wrote and trusts nothing: every fault in the file is a `CorruptCheckpointError`.

    Arrays are read straight into their own memory, those of roots that nobody asked for are skipped. An array's header must be, byte by byte, the one that
    its entry in the metadata asks for; no length is believed before the file is known to be long enough.
    """

    def __init__(self, file: io.BufferedReader, path: Path, num_bytes: int, arrays: Mapping[str, Any], roots: Collection[str]) -> None:
        self._file = file
        self._path = path
        self._left = num_bytes
        self._arrays = arrays
        self._roots = roots
        self.structure_crc32 = 0

    def node(self, path: str, depth: int = 0) -> Any:
        """Returns the next tree of the file, verified.

        Raises:
            CorruptCheckpointError: It fails a check.
        """
        if depth > MAX_DEPTH + 3:
            raise self.damaged(path, "is nested too deep")
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
        raise self.damaged(path, f"has the unknown type {code:#04x}")

    def damaged(self, path: str, fault: str) -> CorruptCheckpointError:
        """Returns the error for a fault at `path`."""
        return CorruptCheckpointError(f"{self._path} is damaged: {path or 'the file'} {fault}.")

    def finish(self, structure_crc32: int) -> None:
        """Raises unless the file ends here and its structure is the one that was written."""
        if self._left:
            raise self.damaged("the map", f"ends {self._left} bytes before the file")
        if self.structure_crc32 != structure_crc32:
            raise self.damaged("its structure", "has another checksum than metadata.json says")

    def _sequence(self, kind: str, length: int, path: str, depth: int) -> Any:
        if kind == "dict":
            return self._dict(length, path, depth)
        if kind == "list":
            return [self.node(join(path, str(index)), depth + 1) for index in range(length)]
        data = self._take(length, path)
        if kind == "bytes":
            return data
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.damaged(path, "is not valid Unicode") from error

    def _dict(self, length: int, path: str, depth: int) -> Any:
        result: dict[str, Any] = {}
        for _ in range(length):
            key = self.node(path, depth + 1)
            if not isinstance(key, str):
                raise self.damaged(path, f"has a key that is no string: {key!r}")
            if key == CHUNKED:
                return self._array(b"\x83" + _pack(CHUNKED), _NDARRAY, path)
            result[key] = self.node(join(path, key), depth + 1)
        return result

    def _array(self, taken: bytes, kind: int, path: str) -> Any:
        """Reads an array whose first bytes, `taken`, have been read already."""
        entry = self._arrays.get(path)
        if not isinstance(entry, dict) or kind not in (_NDARRAY, _NUMPY_SCALAR):
            raise self.damaged(path, "is not among the arrays that metadata.json lists")
        dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
        parts = _array_parts(shape, dtype, kind)
        wanted = path.split("/", 1)[0] in self._roots
        if parts[-1].end > self._left:
            raise self.damaged(path, f"has {parts[-1].end} bytes, but {self._left} are left")
        array = np.empty(shape if wanted else (0,), dtype)
        crc32 = 0
        for part in parts:
            if taken + self._take(len(part.header) - len(taken), path) != part.header:
                raise self.damaged(path, f"does not have the shape {shape} and dtype {dtype} that metadata.json says")
            taken = b""
            crc32 = self._data(_bytes_of(array)[part.begin : part.end], part.end - part.begin, crc32, path)
        if wanted and crc32 != entry["crc32"]:
            raise self.damaged(path, "has another checksum than metadata.json says")
        return array if kind == _NDARRAY else array[()] if wanted else None

    def _data(self, buffer: memoryview, length: int, crc32: int, path: str) -> int:
        """Fills `buffer`, or skips `length` bytes where it is empty, and returns the checksum continued."""
        self._left -= length
        if len(buffer) < length:
            self._file.seek(length, os.SEEK_CUR)
            return crc32
        filled = 0
        while filled < length:
            count = self._file.readinto(buffer[filled:])
            if not count:
                raise self.damaged(path, "ends too early")
            filled += count
        return zlib.crc32(buffer, crc32)

    def _number(self, number_format: str, path: str) -> Any:
        return struct.unpack(number_format, self._take(struct.calcsize(number_format), path))[0]

    def _take(self, length: int, path: str) -> bytes:
        data = self._file.read(length) if 0 <= length <= self._left else b""
        if len(data) != length:
            raise self.damaged(path, "ends too early")
        self._left -= length
        self.structure_crc32 = zlib.crc32(data, self.structure_crc32)
        return data
