"""The two files of one checkpoint directory: how a state becomes `state.msgpack` and `metadata.json`, and how it is read and verified.

`state.msgpack` is one map with the roots `train` (the TrainState, as `flax.serialization.to_state_dict` makes it) and `run` (epoch sums, callbacks' and
loaders' states; its lists and tuples are msgpack arrays, since they are read without a target). It holds the very bytes that
`flax.serialization.msgpack_serialize` would write, arrays above 2^30 bytes in chunks included, so `msgpack_restore` reads it. Nothing in it is executed.

`metadata.json` is for people and listings: `format_version`, what the caller gave, `versions`, `arrays` (`{path: {shape, dtype, crc32}}`), `key_impls`
(typed keys are stored as key data), `structure_crc32` (all bytes of `state.msgpack` that are not array data: keys, types, shapes, dtypes and the values of all
other leaves), `state_bytes`, and last `crc32` of the compact JSON of all before it. Its rules:

* A number that is not finite is written as the string `NaN`, `Infinity` or `-Infinity`. A *string* that reads so, after any number of leading `~`, gets one
  more `~` in front. So both come back as what they were, wherever they stand.
* NumPy scalars become Python numbers, tuples become lists, keys become strings.

A path is the keys from the root joined with `/`; in a key, `~` is written `~0` and `/` is written `~1` (RFC 6901), so no two leaves share a path.

Which directories there are, and when one may go, is `fitflax.checkpoints.store`'s concern.
"""

import functools
import importlib.metadata
import io
import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import msgpack
import numpy as np

from fitflax.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, RestoreError
from fitflax.state import PyTree

__all__ = [
    "FORMAT_VERSION",
    "METADATA_FILE",
    "STATE_FILE",
    "from_saved",
    "fsync_directory",
    "read_document",
    "read_metadata",
    "read_state",
    "restore_tree",
    "to_state_dict",
    "write_checkpoint",
    "write_document",
]

FORMAT_VERSION = 1
METADATA_FILE = "metadata.json"
STATE_FILE = "state.msgpack"

# flax's way of writing arrays: the extension types, and the size in bytes above which an array is a map of chunks.
_NDARRAY, _NUMPY_SCALAR = 1, 3
_CHUNK_BYTES = 2**30
_CHUNKED = "__msgpack_chunked_array__"
# Well inside Python's recursion limit and msgpack's own (1024); no model comes near this.
_MAX_DEPTH = 100

# --- From a pytree to nested dicts ---------------------------------------------------------------------------------------------------------------


def to_state_dict(tree: PyTree, *, root: str = "", keep_lists: bool = False) -> tuple[Any, dict[str, str]]:
    """Returns `tree` as nested dicts of host values, which flax's msgpack functions take, and the implementations of its typed keys.

    The same as `flax.serialization.to_state_dict`, but: all arrays come to the host in one pass, typed keys become key data, and pytrees that JAX knows and
    flax does not (an `OrderedDict`, registered dataclasses) are taken apart as well.

    Args:
        tree: Dicts, lists, tuples, named tuples, flax.struct dataclasses and other pytrees; leaves are arrays, NumPy scalars, `str`, `bytes`, `bool`, `int`,
            `float` and `None`.
        root: What paths begin with.
        keep_lists: Lists and tuples become lists instead of dicts with the keys `"0"`, `"1"`, ...: for trees that are read without a target.

    Returns:
        The nested dict, and `{path: implementation}` of the typed keys in it.

    Raises:
        CheckpointError: Leaves that cannot be saved (all of them are named), or two keys of a dict that are the same string.

    >>> to_state_dict({"dense": {"bias": jnp.zeros(2)}, "key": jax.random.key(7)}, root="train")
    ({'dense': {'bias': array([0., 0.], dtype=float32)}, 'key': array([0, 7], dtype=uint32)}, {'train/key': 'threefry2x32'})
    """
    plain = _plain(tree, root, keep_lists)
    leaves = dict(_walk(plain, root))
    faults = [f"{path} {fault}" for path, leaf in leaves.items() if (fault := _fault(leaf))]
    if faults:
        raise CheckpointError(f"Cannot be saved in a checkpoint: {'; '.join(faults)}.")
    impls = {path: str(jax.random.key_impl(leaf)) for path, leaf in leaves.items() if _is_key(leaf)}
    # One device_get over all arrays starts all copies before it waits for the first.
    host = jax.device_get({path: jax.random.key_data(leaf) if path in impls else leaf for path, leaf in leaves.items() if isinstance(leaf, jax.Array)})
    return _map_leaves(plain, root, lambda path, leaf: _native(host.get(path, leaf))), impls


def _plain(node: Any, path: str, keep_lists: bool, depth: int = 0) -> Any:
    if node is None or isinstance(node, (str, bytes, bool, int, float, np.generic, np.ndarray, jax.Array)):
        return node
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"Cannot be saved in a checkpoint: {path[:100]}... is nested more than {_MAX_DEPTH} levels deep.")
    if isinstance(node, (list, tuple)) and not hasattr(node, "_fields"):
        items = [_plain(item, _join(path, str(index)), keep_lists, depth + 1) for index, item in enumerate(node)]
        return items if keep_lists else {str(index): item for index, item in enumerate(items)}
    children = _children(node, path)
    if children is None:
        return node
    return {key: _plain(child, _join(path, key), keep_lists, depth + 1) for key, child in children.items()}


def _children(node: Any, path: str) -> dict[str, Any] | None:
    """Returns what `node` holds by the names flax gives it, or those JAX gives it where flax does not know its type; `None` for a leaf."""
    if isinstance(node, Mapping):
        pairs = [(str(key), child) for key, child in node.items()]
    elif hasattr(node, "_fields"):
        # Not flax's function: it would turn the lists deeper inside into dicts.
        pairs = [(name, getattr(node, name)) for name in node._fields]
    elif flax.serialization.is_serializable(node):  # type: ignore[no-untyped-call]
        pairs = list(flax.serialization.to_state_dict(node).items())
    else:
        entries = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
        if len(entries) == 1 and entries[0][0] == ():
            return None
        pairs = [(jax.tree_util.keystr(entry, simple=True), child) for entry, child in entries]
    children = dict(pairs)
    if len(children) < len(pairs):
        raise CheckpointError(f"Cannot be saved in a checkpoint: two keys of {path or 'the tree'} are the same string: {[key for key, _ in pairs]}.")
    if _CHUNKED in children:
        raise CheckpointError(f"Cannot be saved in a checkpoint: {path or 'the tree'} has the key {_CHUNKED!r}, which marks large arrays in the file.")
    return children


def _fault(leaf: Any) -> str | None:
    """Returns why a leaf cannot be saved, as the end of a sentence that begins with its path."""
    if isinstance(leaf, jax.Array):
        return _array_fault(leaf)
    if isinstance(leaf, np.str_) or leaf is None or isinstance(leaf, (bool, bytes)):
        return None
    if isinstance(leaf, (np.ndarray, np.generic)):
        return None if _is_storable(leaf.dtype.newbyteorder("=")) else f"has dtype {leaf.dtype}, only numbers and booleans can be saved"
    if isinstance(leaf, str):
        return None if leaf.isascii() or _is_unicode(leaf) else f"is {leaf!r}, which is not valid Unicode"
    if isinstance(leaf, int):
        return None if -(2**63) <= leaf < 2**64 else f"is the integer {leaf}, which needs more than 64 bits; save it as a string"
    return None if isinstance(leaf, float) else f"is a {type(leaf).__name__}; only arrays, numbers, strings, bytes and None can be saved"


def _array_fault(leaf: jax.Array) -> str | None:
    if leaf.is_deleted():
        return "has been deleted (it was donated to a compiled function)"
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return "is spread over several processes, which this format cannot write"
    if _is_key(leaf) and not isinstance(jax.random.key_impl(leaf), str):
        return f"is a key of the unregistered implementation {jax.random.key_impl(leaf)}"
    return None


def _is_unicode(text: str) -> bool:
    # A lone surrogate, as in a file name that is not UTF-8, has no encoding.
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_storable(dtype: np.dtype[Any]) -> bool:
    """Returns whether flax's reader finds `dtype` again by its name; not so objects, strings, records and dates."""
    try:
        return not dtype.hasobject and dtype.itemsize > 0 and dtype.name.isidentifier() and np.dtype(dtype.name) == dtype
    except TypeError:
        return False


def _native(leaf: Any) -> Any:
    """Returns a leaf as the file holds it: arrays in the machine's byte order (the file does not name one), no subclasses of Python's types."""
    if isinstance(leaf, np.ndarray):
        return np.asarray(leaf, dtype=leaf.dtype.newbyteorder("="), order="C")
    if isinstance(leaf, str):
        return str.__str__(leaf)  # str(leaf) of an enum would be its name.
    if isinstance(leaf, bytes):
        return bytes(leaf)
    if leaf is None or isinstance(leaf, (bool, np.generic)):
        return leaf
    return int(leaf) if isinstance(leaf, int) else float(leaf)


def _join(path: str, key: str) -> str:
    key = key.replace("~", "~0").replace("/", "~1")
    return f"{path}/{key}" if path else key


def _walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields `(path, leaf)` of nested dicts and lists; `None` is a leaf, empty containers hold none."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _walk(child, _join(path, key))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _walk(child, _join(path, str(index)))
    else:
        yield path, node


def _map_leaves(node: Any, path: str, function: Callable[[str, Any], Any]) -> Any:
    if isinstance(node, dict):
        return {key: _map_leaves(child, _join(path, key), function) for key, child in node.items()}
    if isinstance(node, list):
        return [_map_leaves(child, _join(path, str(index)), function) for index, child in enumerate(node)]
    return function(path, node)


# --- state.msgpack -------------------------------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A stretch of an array's data and the bytes that stand before it in the file."""

    header: bytes
    begin: int
    end: int


def _array_parts(shape: tuple[int, ...], dtype: np.dtype[Any], kind: int) -> list[_Part]:
    """Returns how flax lays an array out: one extension object, or a map of several above `_CHUNK_BYTES`. Writer and reader share it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes <= _CHUNK_BYTES:
        return [_Part(_extension_header(shape, dtype, kind), 0, num_bytes)]
    step = max(1, _CHUNK_BYTES // dtype.itemsize) * dtype.itemsize
    begins = range(0, num_bytes, step)
    dims = {str(axis): size for axis, size in enumerate(shape)}
    before = b"\x83" + b"".join(map(_pack, (_CHUNKED, True, "shape", dims, "chunks"))) + msgpack.Packer().pack_map_header(len(begins))
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


class _Writer:
    """Writes nested dicts as msgpack; counts the bytes, sums the structure and lists the arrays on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._packer = msgpack.Packer()
        self.arrays: dict[str, dict[str, Any]] = {}
        self.structure_crc32 = 0
        self.num_bytes = 0

    def node(self, node: Any, path: str) -> None:
        if isinstance(node, dict):
            self._structure(self._packer.pack_map_header(len(node)))
            for key, child in node.items():
                self._structure(_pack(key))
                self.node(child, _join(path, key))
        elif isinstance(node, list):
            self._structure(self._packer.pack_array_header(len(node)))
            for index, child in enumerate(node):
                self.node(child, _join(path, str(index)))
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


# What may follow a type byte: the format of the number, or of the length of what follows. Only what _Writer writes is here; all else is damage.
_NUMBERS = {0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_LENGTHS = {0xC4: ("bytes", ">B"), 0xC5: ("bytes", ">H"), 0xC6: ("bytes", ">I"), 0xD9: ("str", ">B"), 0xDA: ("str", ">H"), 0xDB: ("str", ">I")}
_LENGTHS |= {0xDC: ("list", ">H"), 0xDD: ("list", ">I"), 0xDE: ("dict", ">H"), 0xDF: ("dict", ">I")}
# The bytes of an extension object's length; the type follows it.
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD4: 0, 0xD5: 0, 0xD6: 0, 0xD7: 0, 0xD8: 0}


class _Reader:
    """Reads what `_Writer` wrote and trusts nothing: every fault in the file is a `CorruptCheckpointError`.

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
        if depth > _MAX_DEPTH + 3:
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
            return [self.node(_join(path, str(index)), depth + 1) for index in range(length)]
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
            if key == _CHUNKED:
                return self._array(b"\x83" + _pack(_CHUNKED), _NDARRAY, path)
            result[key] = self.node(_join(path, key), depth + 1)
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


# --- metadata.json -------------------------------------------------------------------------------------------------------------------------------

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_OWN_KEYS = {"arrays": dict, "key_impls": dict, "structure_crc32": int, "state_bytes": int}


def _to_json(value: Any, where: str) -> Any:
    if isinstance(value, (np.generic, np.ndarray, jax.Array)) and value.ndim == 0 and not _is_key(value):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        return f"~{value}" if value.lstrip("~") in _NON_FINITE else value
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which {METADATA_FILE} cannot hold; only None, booleans, numbers, strings, dicts and lists can."
    )


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
        pairs = value.items() if isinstance(value, dict) else [(None, item) for item in value]
        lines = [("" if key is None else f"{json.dumps(key)}: ") + _render(item, level + 1) for key, item in pairs]
        pad, (left, right) = "  " * level, "{}" if isinstance(value, dict) else "[]"
        return f"{left}\n" + ",\n".join(f"{pad}  {line}" for line in lines) + f"\n{pad}{right}"
    return json.dumps(value, allow_nan=False)


def _json_crc32(document: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, allow_nan=False, separators=(",", ":")).encode())


@functools.cache
def _library_versions() -> dict[str, str]:
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
    document = {"format_version": FORMAT_VERSION, **_given_values(values, {"format_version", "crc32"})}
    text = _render({**document, "crc32": _json_crc32(document)}) + "\n"
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


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
    try:
        # The text must be the very one that was written: a changed space is damage, too.
        same_text = (_render(document) + "\n").encode("ascii") == data
        same_sum = _json_crc32({key: value for key, value in document.items() if key != "crc32"}) == document.get("crc32")
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is damaged: {error}.") from error
    if not (same_text and same_sum):
        raise CorruptCheckpointError(f"{path} is damaged: its checksum differs.")


def _given_values(values: Mapping[str, Any], own_names: set[str]) -> dict[str, Any]:
    taken = sorted(own_names & set(values))
    if taken:
        raise CheckpointError(f"metadata must leave {', '.join(taken)} to the checkpoint format; give the values other names.")
    given: dict[str, Any] = _to_json(values, "metadata")
    return given


# --- A checkpoint directory ----------------------------------------------------------------------------------------------------------------------


def write_checkpoint(directory: Path, *, train: PyTree, run: PyTree, metadata: Mapping[str, Any]) -> None:
    """Writes `state.msgpack` and `metadata.json` and returns when both, and the directory, are on the disk.

    Args:
        directory: An existing directory; whoever calls this renames it into place afterwards.
        train: The TrainState.
        run: Everything else that a resume needs.
        metadata: What people and listings want to know; JSON values and NumPy scalars. `versions` is added to, the names the format uses itself are refused.

    Raises:
        CheckpointError: A leaf or a value in `metadata` cannot be saved. Nothing is written then.
        OSError: The disk is full or fails.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_checkpoint(Path(directory), train={"w": jnp.ones(2)}, run={"rows": [1, 2]}, metadata={"step": 5, "metrics": {"train": {"loss": math.inf}}})
    ...     metadata = read_metadata(Path(directory))
    ...     read_state(Path(directory), metadata), metadata["metrics"]
    ({'train': {'w': array([1., 1.], dtype=float32)}, 'run': {'rows': [1, 2]}}, {'train': {'loss': inf}})
    """
    train_dict, train_impls = to_state_dict(train, root="train")
    run_dict, run_impls = to_state_dict(run, root="run", keep_lists=True)
    _given_values(metadata, {"format_version", "crc32", *_OWN_KEYS})  # A fault in the metadata comes before any work.
    with open(directory / STATE_FILE, "wb") as state_file:
        writer = _Writer(state_file)
        writer.node({"train": train_dict, "run": run_dict}, "")
        state_file.flush()
        os.fsync(state_file.fileno())
    own = {"arrays": writer.arrays, "key_impls": {**train_impls, **run_impls}, "structure_crc32": writer.structure_crc32, "state_bytes": writer.num_bytes}
    versions = {**_library_versions(), **metadata.get("versions", {})}
    write_document(directory / METADATA_FILE, {**metadata, "versions": versions, **own})
    fsync_directory(directory)


def fsync_directory(directory: Path) -> None:
    """Makes creations, renames and removals in `directory` last over a power failure.

    >>> fsync_directory(Path("."))
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_metadata(directory: Path) -> dict[str, Any]:
    """Returns the verified `metadata.json` of a checkpoint directory, with non-finite numbers as floats.

    Args:
        directory: A checkpoint directory.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        CorruptCheckpointError: The file is missing, empty, not JSON, or differs from what was written by as much as one byte.
        CheckpointError: It was written by a newer fitflax, in a format that this one does not read, or the disk fails.

    >>> read_metadata(Path("nowhere"))
    Traceback (most recent call last):
    fitflax.errors.CheckpointNotFoundError: There is no checkpoint directory nowhere.
    """
    path = directory / METADATA_FILE
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"There is no checkpoint directory {directory}{' (it is a file)' if directory.exists() else ''}.")
    document = read_document(path)
    lacking = sorted(key for key, kind in _OWN_KEYS.items() if not isinstance(document.get(key), kind))
    if lacking:
        raise CorruptCheckpointError(f"{path} is damaged: it lacks {', '.join(lacking)}.")
    return document


def read_state(directory: Path, metadata: Mapping[str, Any], *, roots: Collection[str] = ("train", "run")) -> dict[str, Any]:
    """Returns the roots of `state.msgpack` as nested dicts and lists of NumPy arrays and Python values, verified.

    The structure of the whole file is verified, and the data of every array that is returned; other arrays are skipped. Typed keys come as key data.

    Args:
        directory: A checkpoint directory.
        metadata: What `read_metadata` returned for it.
        roots: Which roots to read.

    Raises:
        CorruptCheckpointError: The file is missing, empty, cut, too long, or fails a check; the message names the array.
        CheckpointError: The disk fails, or there is no such root.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_checkpoint(Path(directory), train={"w": jnp.ones(2)}, run={"n": 3}, metadata={})
    ...     read_state(Path(directory), read_metadata(Path(directory)), roots=["run"])
    {'run': {'n': 3}}
    """
    path = directory / STATE_FILE
    try:
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            expected = metadata["state_bytes"]
            if num_bytes != expected:
                fault = "empty" if num_bytes == 0 else "truncated" if num_bytes < expected else "too long"
                raise CorruptCheckpointError(f"{path} is {fault}: {num_bytes} bytes instead of {expected}.")
            reader = _Reader(file, path, num_bytes, metadata["arrays"], roots)
            tree = reader.node("")
            reader.finish(metadata["structure_crc32"])
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{path} is missing.") from error
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error.strerror}.") from error
    unknown = sorted(set(roots) - set(tree))
    if unknown:
        raise CheckpointError(f"{path} has no root {', '.join(map(repr, unknown))}, only {sorted(tree)}.")
    return {root: tree[root] for root in roots}


# --- Back into a pytree --------------------------------------------------------------------------------------------------------------------------


class _Leaf:
    """A leaf of the target by its place in `jax.tree.leaves`; a class that neither JAX nor flax knows, so both take it for a leaf."""

    def __init__(self, index: int) -> None:
        self.index = index


def restore_tree(target: PyTree, saved: Any, *, where: str, root: str, key_impls: Mapping[str, str]) -> PyTree:
    """Returns `saved` in the structure of `target`.

    `None` and empty containers hold nothing, so they fit each other.

    Args:
        target: What the tree should look like; leaves are arrays, `jax.ShapeDtypeStruct` or Python values. Its values are not read.
        saved: Nested dicts as `read_state` returns them.
        where: What errors call the checkpoint, such as its path.
        root: The path of `saved` in the file, such as `train` or `train/params`.
        key_impls: `metadata["key_impls"]`.

    Returns:
        A tree like `target` with NumPy arrays, typed keys, and Python values where the target has them.

    Raises:
        RestoreError: Paths, shapes, dtypes or key implementations differ; one error names them all.

    >>> target = {"w": jax.ShapeDtypeStruct((2,), jnp.float32), "b": 0}
    >>> restore_tree(target, {"w": np.ones(3, np.float32)}, where="runs/a/step_00000001", root="train", key_impls={})
    Traceback (most recent call last):
    fitflax.errors.RestoreError: runs/a/step_00000001 does not fit this model: missing b; w is (3,) on disk but (2,) here.
    """
    leaves, treedef = jax.tree.flatten(target)
    # flax's names, JAX's order: number the leaves, let the same walk as in saving find the paths, then put the tree together by number. So everything that
    # can be saved can be restored, whoever registered its type.
    numbered = jax.tree.unflatten(treedef, [_Leaf(index) for index in range(len(leaves))])
    paths = {path: leaf.index for path, leaf in _walk(_plain(numbered, "", False), "") if isinstance(leaf, _Leaf)}
    found: dict[str, Any] = {path: leaf for path, leaf in _walk(saved, "") if leaf is not None}
    faults = [f"{title} {', '.join(sorted(names))}" for title, names in (("missing", paths.keys() - found), ("unexpected", found.keys() - paths)) if names]
    for path in sorted(paths.keys() & found):
        try:
            found[path] = _with_key(found[path], key_impls.get(f"{root}/{path}" if path else root))
            difference = _difference(found[path], leaves[paths[path]])
        except (TypeError, ValueError) as error:
            difference = f"is a key that this JAX cannot make ({error})"
        faults += [f"{path or root} {difference}"] if difference else []
    if faults:
        raise RestoreError(f"{where} does not fit this model: {'; '.join(faults)}.")
    restored = dict(enumerate(leaves)) | {index: _like(leaves[index], found[path]) for path, index in paths.items()}
    return jax.tree.unflatten(treedef, [restored[index] for index in range(len(leaves))])


def from_saved(saved: Any, *, root: str = "run", key_impls: Mapping[str, str] | None = None) -> Any:
    """Returns a tree that was saved without a target in mind, as plain dicts and lists, Python values and NumPy arrays.

    Args:
        saved: As `read_state` returns it.
        root: The path of `saved` in the file.
        key_impls: `metadata["key_impls"]`; typed keys become typed keys again. Without it they stay key data.

    Returns:
        New dicts and lists; the arrays are those of `saved`. Tuples have become lists, and all keys strings.

    Raises:
        RestoreError: This JAX does not have the implementation of a key.

    >>> from_saved({"rows": [1, 2.0, None, "x"]})
    {'rows': [1, 2.0, None, 'x']}
    """

    def restore(path: str, leaf: Any) -> Any:
        try:
            return _with_key(leaf, (key_impls or {}).get(path))
        except (TypeError, ValueError) as error:
            raise RestoreError(f"{path} is a key that this JAX cannot make ({error}).") from error

    return _map_leaves(saved, root, restore)


def _with_key(leaf: Any, impl: str | None) -> Any:
    return leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)


def _difference(saved: Any, target: Any) -> str | None:
    (saved_type, saved_shape), (target_type, target_shape) = _describe(saved), _describe(target)
    if saved_type == target_type:
        return None if saved_shape == target_shape else f"is {saved_shape} on disk but {target_shape} here"
    if saved_shape == target_shape:
        return f"is {saved_type} on disk but {target_type} here"
    return f"is {f'{saved_type} {saved_shape}'.strip()} on disk but {f'{target_type} {target_shape}'.strip()} here"


def _describe(leaf: Any) -> tuple[str, str]:
    if hasattr(leaf, "dtype"):
        return str(leaf.dtype.name), str(tuple(leaf.shape))
    return type(leaf).__name__, ""


def _like(target: Any, saved: Any) -> Any:
    if isinstance(target, np.generic):
        return np.asarray(saved)[()]
    return np.asarray(saved) if isinstance(saved, np.generic) else saved
