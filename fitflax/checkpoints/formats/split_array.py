"""Arrays that a checkpoint stores in pieces, of which each process reads only those that it needs."""

import dataclasses
import io
import json
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from fitflax.checkpoints.memory import bytes_of
from fitflax.errors import CheckpointError, CorruptCheckpointError
from fitflax.parallel.placement import RemoteArray
from fitflax.storage import Location
from fitflax.storage.parts import PartsReader, part_name, read_range
from fitflax.storage.workers import Workers

__all__ = ["PieceFile", "Region", "Share", "SplitArray"]

# The number of ranges of a file that are fetched in parallel, and their size.
_DOWNLOADS = 4
_RANGE_BYTES = 2**25

Share = tuple[int, int]
"""The index of a process and the number of processes that divide the verification of a checkpoint's pieces."""


@dataclasses.dataclass(frozen=True)
class Region:
    """The location of a piece in an array: begin and end along each axis."""

    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, index: Sequence[slice], shape: Sequence[int]) -> "Region":
        """Returns the region of an array's slices."""
        return cls(tuple((part.start or 0, size if part.stop is None else part.stop) for part, size in zip(index, shape, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the piece."""
        return tuple(end - begin for begin, end in self.bounds)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The piece's slices in the array."""
        return tuple(slice(begin, end) for begin, end in self.bounds)

    def overlap(self, other: "Region") -> "Region | None":
        """Returns the intersection of two regions, or `None` if it is empty."""
        bounds = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.bounds, other.bounds, strict=True))
        return Region(bounds) if all(begin < end for begin, end in bounds) else None

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """Returns the slices of this piece in an array that holds the region `outer`."""
        return tuple(slice(begin - start, end - start) for (begin, end), (start, _) in zip(self.bounds, outer.bounds, strict=True))


class _Piece(NamedTuple):
    """A piece of an array: its region, its offset in the file, and its checksum."""

    region: Region
    at: int
    num_bytes: int
    crc32: int


class PieceFile:
    """The pieces that one process wrote, by the array's path. `entry` is the size and crc32 of the index, `name`.

    All methods raise `CorruptCheckpointError` if a file is missing or damaged, and `OSError` if the disk or the store fails.
    """

    def __init__(self, place: Location, name: str, entry: Mapping[str, int]) -> None:
        self._place, self._name = place, name
        try:
            data = (place / name).read_bytes()
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{place / name} is missing.") from error
        if len(data) != entry["bytes"] or zlib.crc32(data) != entry["crc32"]:
            raise CorruptCheckpointError(f"{place / name} is damaged: its checksum does not match metadata.json.")
        index = json.loads(data)
        self._part_bytes, self._num_bytes = index["part_bytes"], index["bytes"]
        self._workers = Workers(_DOWNLOADS, "fitflax-pieces")
        weakref.finalize(self, self._workers.end, wait=False)
        self.pieces: dict[str, list[_Piece]] = {}
        for each in index["pieces"]:
            bounds = Region(tuple((begin, end) for begin, end in each["index"]))
            self.pieces.setdefault(each["path"], []).append(_Piece(bounds, each["at"], each["bytes"], each["crc32"]))

    def read_in_order(self, arrays: Mapping[str, np.dtype[Any]]) -> Iterator[tuple[str, Region, np.ndarray[Any, Any]]]:
        """Yields path, region and verified data of all pieces of some arrays, with read-ahead. `arrays` are their dtypes by path."""
        reader = PartsReader(self._place, self._part_name, part_bytes=self._part_bytes, num_bytes=self._num_bytes)
        with io.BufferedReader(reader, buffer_size=2**20) as file:
            if faults := reader.faults():
                raise CorruptCheckpointError(" ".join(faults[:3]))
            listed = [(path, piece) for path, pieces in self.pieces.items() for piece in pieces if path in arrays]
            for path, piece in sorted(listed, key=lambda pair: pair[1].at):
                data = np.empty(piece.region.shape, arrays[path])
                file.seek(piece.at)
                count = file.readinto(bytes_of(data))
                self._check(path, piece, data, count)
                yield path, piece.region, data

    def read(self, path: str, piece: _Piece, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Returns a verified piece, fetching only its bytes."""
        data = np.empty(piece.region.shape, dtype)
        view = bytes_of(data)
        begins = range(0, data.nbytes, _RANGE_BYTES)
        futures = [self._workers.submit(self._fetch, piece.at + begin, view[begin : begin + _RANGE_BYTES]) for begin in begins]
        self._check(path, piece, data, sum(future.result() for future in futures))
        return data

    def _fetch(self, at: int, target: memoryview) -> int:
        """Reads bytes from an offset in the file, and returns their number."""
        count = 0
        while count < len(target):
            part, begin = divmod(at + count, self._part_bytes)
            length = min(len(target) - count, self._part_bytes - begin)
            data = memoryview(_read_range(self._place / self._part_name(part), begin, length))
            target[count : count + len(data)] = data
            count += len(data)
            if len(data) < length:
                break
        return count

    def _part_name(self, part: int) -> str:
        return part_name(self._name.removesuffix(".json"), part)

    def _check(self, path: str, piece: _Piece, data: np.ndarray[Any, Any], count: int) -> None:
        if not (count == data.nbytes == piece.num_bytes) or zlib.crc32(bytes_of(data)) != piece.crc32:
            raise CorruptCheckpointError(f"{self._place} is damaged: {path} does not match its checksum in {self._name}.")


def _read_range(path: Location, begin: int, length: int) -> Any:
    try:
        return read_range(path, begin, length)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{path} is missing.") from error


class SplitArray(RemoteArray):
    """An array of a checkpoint, of which regions can be read; `files` contain its pieces."""

    def __init__(self, path: str, shape: Sequence[int], dtype: np.dtype[Any], files: Sequence[PieceFile]) -> None:
        self.path, self.shape, self.dtype = path, tuple(shape), dtype
        self._pieces = [(file, piece) for file in files for piece in file.pieces.get(path, ())]
        self._kept: dict[Region, np.ndarray[Any, Any]] = {}

    @property
    def num_missing_bytes(self) -> int:
        """The number of bytes that are in no piece."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize - sum(piece.num_bytes for _, piece in self._pieces)

    def keep(self, region: Region, data: np.ndarray[Any, Any]) -> None:
        """Keeps a piece that was already read."""
        self._kept[region] = data

    @override
    def read(self, index: Sequence[slice]) -> np.ndarray[Any, Any]:
        wanted = Region.of(index, self.shape)
        whole = np.empty(wanted.shape, self.dtype)
        try:
            for data, bounds, common in self._overlapping(wanted):
                whole[common.within(wanted)] = data[common.within(bounds)]
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{self.path} could not be read from its checkpoint: {str(error).rstrip('.')}.") from error
        return whole

    def _overlapping(self, wanted: Region) -> Iterator[tuple[np.ndarray[Any, Any], Region, Region]]:
        for file, piece in self._pieces:
            if common := piece.region.overlap(wanted):
                data = self._kept.get(piece.region)
                yield (file.read(self.path, piece, self.dtype) if data is None else data), piece.region, common
