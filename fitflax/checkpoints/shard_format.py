"""A state that is split between processes: all of them save it together, and each reads only the pieces of arrays that it needs.

Each process can write only its own shards. A save is coordinated over the board, without using devices. Process 0, the leader, does everything else: it
creates the directory, announces its name, merges the shards once all are written, renames and deletes. The others, the followers, write their shards and
wait for the outcome. A save ends the same way everywhere: if it fails in one process, it fails in all. The messages:

    meet            in the main thread: all processes save the same thing, and know whether an earlier save failed anywhere
    plan            from the leader: where the followers write, or that there is nothing to write
    part/INDEX      from a follower: what it wrote, or why it could not
    verdict         from the leader: whether the checkpoint is complete

Every wait is bounded, and a process that fails tells the others. If a process dies, JAX's heartbeats end all others.

On a disk, Orbax writes the shards. In a bucket, this module is the backend `shards`: each process uploads its own pieces of arrays, one after another, in
parts, `shards-RANDOM.p00001.00000` and so on; the rest is as in `msgpack`. `shards-RANDOM.p00001.json` is the index: which piece of which array begins
where, with its crc32. `metadata.json` gets `shards`: the stem of the names, the shape and dtype of each array, and size and crc32 of the indexes.
"""

import contextlib
import io
import itertools
import json
import math
import secrets
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import jax
import numpy as np
from typing_extensions import override

import fitflax.checkpoints.msgpack_format as msgpack_format
from fitflax.checkpoints.json_documents import read_errors
from fitflax.checkpoints.memory import bytes_of
from fitflax.checkpoints.plain_tree import Plain, map_leaves, walk
from fitflax.errors import CheckpointError, CorruptCheckpointError
from fitflax.leaves import listed
from fitflax.parallel.placement import RemoteArray, is_spread
from fitflax.parallel.processes import Board
from fitflax.storage import Location, ObjectPath
from fitflax.storage.parts import PartsReader, PartsWriter, Workers, part_name, read_range

Files = dict[str, dict[str, int]]
"""Size and crc32 of files, by path relative to the checkpoint's directory."""
Share = tuple[int, int]
"""The index of a process and the number of processes that divide the verification of a checkpoint's pieces."""
Region = tuple[tuple[int, int], ...]
"""The location of a piece in an array: begin and end along each axis."""

FILES = ()  # Their names are random.
METADATA_KEYS: dict[str, type] = {**msgpack_format.METADATA_KEYS, "shards": dict}

# How long a process waits for the others to reach the same save. In a rescue, this may be the only process that saves.
MEETING_SECONDS = 600.0
RESCUE_SECONDS = 60.0
# How long writing shards may take; a dead process is noticed long before.
WRITING_SECONDS = 3600.0
# How long another process's files may stay invisible on a network file system.
APPEARING_SECONDS = 30.0
# The number of ranges of a file that are fetched in parallel, and their size.
_DOWNLOADS = 4
_RANGE_BYTES = 2**25

_INTACT = "Earlier checkpoints are intact."
# Numbers of saves, equal in all processes because all reach the same saves in the same order.
_save_numbers = itertools.count()
# Saves of this process that have not ended, and the number below which the leader has removed messages.
_active: set[int] = set()
_removed = 0

T = TypeVar("T")
P = TypeVar("P", Path, ObjectPath)


# --- Saving ---


class CollectiveSave:
    """A save in which all processes take part. Created by `meet`."""

    def __init__(self, number: int) -> None:
        self.earlier: str | None = None  # Why an earlier save failed in one of the processes, if that was not reported yet.
        self._number, self._board = number, Board("save")
        self._is_planned = self._has_ended = False
        self._fault: str | None = None

    @classmethod
    def meet(cls, what: str, *, earlier: str | None = None, is_rescue: bool = False) -> Self:
        """Waits until all processes have reached the same save. All of them must call it, in the thread that trains.

        `what` says what is saved and where, the same in all processes; otherwise, or if one does not arrive, `CheckpointError` is raised in all. `earlier` is
        why an earlier save failed here, if that was not reported yet. In a rescue, the others may never arrive, so the wait is short.
        """
        collective = cls(next(_save_numbers))
        here = {"what": what, "earlier": earlier, "oldest": min(tuple(_active), default=collective._number)}
        with collective.abort_on_error(), _communication_errors():
            try:
                outcome = collective._arrive(here, RESCUE_SECONDS if is_rescue else MEETING_SECONDS)
            except BaseException as error:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    collective._decide({"fault": f"process {jax.process_index()}: {_reason(error)}"})
                raise
            if "fault" in outcome:
                raise CheckpointError(f"Nothing was saved, because all processes must save a state that is split between them: {outcome['fault']}.")
        _active.add(collective._number)
        collective.earlier = outcome["earlier"]
        return collective

    def _arrive(self, here: Mapping[str, Any], seconds: float) -> Any:
        """Announces that this process has arrived, and returns the outcome for all processes: the first decision on the board wins."""
        index = jax.process_index()
        if index == 0:
            return self._decide(self._gather(here, seconds))
        self._post(f"here/{index}", here)
        try:
            return self._read("outcome", seconds)
        except TimeoutError:
            return self._decide({"fault": f"process {index} waited {seconds:g} s to save {here['what']}, but process 0 did not arrive"})

    def _decide(self, outcome: Mapping[str, Any]) -> Any:
        return json.loads(self._board.settle(f"{self._number}/outcome", json.dumps(outcome).encode()))

    def _gather(self, here: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Waits for all followers and returns the outcome; removes messages that no process will read anymore."""
        global _removed
        arrived = {0: here}
        for index, other in self._from_followers("here", seconds):
            if other is None:
                return {"fault": f"process 0 waited {seconds:g} s to save {here['what']}, but process {index} did not arrive"}
            if other["what"] != here["what"]:
                return {"fault": f"process 0 is saving {here['what']}, but process {index} is saving {other['what']}"}
            arrived[index] = other
        oldest = min(other["oldest"] for other in arrived.values())
        for old in range(_removed, oldest):
            self._board.remove(str(old))
        _removed = max(_removed, oldest)
        earlier = [f"process {index}: {other['earlier']}" for index, other in arrived.items() if other["earlier"] is not None]
        return {"earlier": "; ".join(earlier) or None}

    # -- what all processes call --

    @contextlib.contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """Gives up the save if the body raises."""
        try:
            yield
        except BaseException as error:
            self.abort(error)
            raise

    def abort(self, error: BaseException | None = None) -> None:
        """Tells the others that this process does not take part, unless the save has ended. Without `error`, the reason is that an earlier save failed."""
        if self._has_ended:
            return
        self._close()
        fault = self._fault or f"process {jax.process_index()}: {'an earlier save failed' if error is None else _reason(error)}"
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # The other processes are gone.
            if jax.process_index():
                self._post(f"part/{jax.process_index()}", {"fault": fault})
            else:
                self._plan(None)
                self._post("verdict", {"fault": fault})

    def _close(self) -> None:
        self._has_ended = True
        _active.discard(self._number)

    # -- what the leader calls --

    def lead(self, save: Callable[[], T]) -> T:
        """Returns the result of `save`, which calls `write` if there is something to write. Its exception fails the save in all processes."""
        with self.abort_on_error(), _communication_errors():
            result = save()
            self._plan(None)
            self._post("verdict", {})
        self._close()
        return result

    def write(self, path: P, write: Callable[[P], Any]) -> Files:
        """Makes all processes write into a directory, this one by calling `write`, and returns the files of the others.

        If it raises, because a process failed or its files are not visible here, no process is writing anymore.
        """
        self._plan(str(path if isinstance(path, ObjectPath) else path.absolute()))
        failure: Exception | None = None
        try:
            write(path)
        except Exception as error:  # noqa: BLE001 (raised below, once no process writes what the caller may delete)
            failure = error
        files: Files = {}
        faults = []
        for index, part in self._from_followers("part", WRITING_SECONDS):
            if part is None:
                faults.append(f"process {index}: it did not finish within {WRITING_SECONDS:g} s")
            elif "fault" in part:
                faults.append(part["fault"])
            else:
                files |= part["files"]
        if failure is not None:
            raise failure
        if faults:
            self._fault = "; ".join(faults)
            raise CheckpointError(f"Nothing was saved, because not all processes could write their shards: {self._fault}. {_INTACT}")
        for name, entry in files.items():
            wait_until_visible(path.parent / name, entry["bytes"])
        return files

    def _plan(self, path: str | None) -> None:
        if not self._is_planned:
            self._is_planned = True
            self._post("plan", {"path": path})

    # -- what the followers call --

    def follow(self, write: Callable[[Location], Files], place: ObjectPath | None = None) -> None:
        """Writes this process's shards with `write` if and where the leader says, and waits until the checkpoint is complete.

        `place` is the checkpoint, if it is in a bucket. Raises `CheckpointError` if the save failed in one of the processes.
        """
        index = jax.process_index()
        with self.abort_on_error(), _communication_errors():
            path = self._read("plan", WRITING_SECONDS)["path"]
            try:
                if path is not None and place is None:
                    wait_until_visible(Path(path))
                if path is not None:
                    self._post(f"part/{index}", {"files": write(Path(path) if place is None else place / path.rpartition("/")[2])})
            except Exception as error:
                self._fault = f"process {index}: {_reason(error)}"
                self._post(f"part/{index}", {"fault": self._fault})
                with contextlib.suppress(TimeoutError):
                    self._read("verdict", 2 * WRITING_SECONDS)  # No process may continue before the others know.
                if isinstance(error, CheckpointError) or not isinstance(error, OSError):
                    raise
                raise CheckpointError(f"Could not save the shards of {self._fault}. {_INTACT}") from error
            verdict = self._read("verdict", 2 * WRITING_SECONDS)
        self._close()
        if "fault" in verdict:
            raise CheckpointError(f"Nothing was saved, because another process failed: {verdict['fault']}. {_INTACT}")

    # -- messages --

    def _post(self, key: str, message: Mapping[str, Any]) -> None:
        self._board.post(f"{self._number}/{key}", json.dumps(message).encode())

    def _read(self, key: str, seconds: float) -> Any:
        return json.loads(self._board.read_within(f"{self._number}/{key}", seconds))

    def _from_followers(self, key: str, seconds: float) -> Iterator[tuple[int, Any]]:
        """Yields the index and the message of each follower, or `None` if it does not arrive in time."""
        end = time.monotonic() + seconds
        for index in range(1, jax.process_count()):
            try:
                message = self._read(f"{key}/{index}", max(end - time.monotonic(), 0.0))
            except TimeoutError:
                message = None
            yield index, message


@contextlib.contextmanager
def _communication_errors() -> Iterator[None]:
    """Converts communication errors between processes to a `CheckpointError`."""
    try:
        yield
    except TimeoutError as error:
        raise CheckpointError(f"Nothing was saved, because another process did not respond: {error}") from error
    except jax.errors.JaxRuntimeError as error:
        raise CheckpointError(f"Nothing was saved, because the processes lost their connection: {str(error).splitlines()[0]}") from error


def _reason(error: BaseException) -> str:
    """Returns an error's message in a form that fits in the middle of a sentence."""
    return (str(error) or type(error).__name__).removesuffix(_INTACT).rstrip(" .")


def wait_until_visible(path: Location, num_bytes: int | None = None) -> None:
    """Waits until a file of this size, or a directory, is visible here."""
    end = time.monotonic() + APPEARING_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if path.is_dir() if num_bytes is None else path.stat().st_size == num_bytes:
                return
        if time.monotonic() >= end:
            raise CheckpointError(f"{path} was created by another process, but is not visible here. Save to a directory that all processes share.")
        time.sleep(0.1)


def write_state(directory: ObjectPath, train: Plain, run: Plain, *, collective: CollectiveSave) -> dict[str, Any]:
    """Uploads the state while the other processes call `write_local_shards`, and returns the entries that `read_state` needs in `metadata.json`."""
    arrays = {path: {"shape": list(leaf.shape), "dtype": leaf.dtype.name} for path, leaf in walk(train.tree, "train") if is_spread(leaf)}
    rest = map_leaves(train.tree, "train", lambda path, leaf: None if path in arrays else leaf)
    msgpack_entries = msgpack_format.write_state(directory, Plain(rest, train.key_impls), run)
    stem = f"shards-{secrets.token_hex(4)}"
    local_files: Files = {}
    other_files = collective.write(directory / stem, lambda path: local_files.update(write_local_shards(path, train)))
    return {**msgpack_entries, "shards": {"stem": stem, "arrays": arrays, "indexes": dict(sorted({**other_files, **local_files}.items()))}}


def write_local_shards(path: ObjectPath, train: Plain) -> Files:
    """Uploads this process's pieces of split arrays, each once even if several devices hold it, and returns its index.

    The leader of the save announces `path`: the location of the checkpoint joined with the stem of the names.
    """
    directory, stem = path.parent, f"{path.name}.p{jax.process_index():05d}"
    pieces, offset = [], 0
    with PartsWriter(directory, stem) as parts:
        for name, leaf in walk(train.tree, "train"):
            for shard in leaf.addressable_shards if is_spread(leaf) else ():
                if shard.replica_id:
                    continue
                data = bytes_of(np.ascontiguousarray(np.asarray(shard.data)))
                pieces.append({"path": name, "index": _region(shard.index, leaf.shape), "at": offset, "bytes": len(data), "crc32": zlib.crc32(data)})
                parts.send([data])
                offset += len(data)
        parts.close()
    document = json.dumps({"pieces": pieces, "part_bytes": parts.part_bytes, "bytes": offset}).encode()
    (directory / f"{stem}.json").write_bytes(document)
    return {f"{stem}.json": {"bytes": len(document), "crc32": zlib.crc32(document)}}


# --- Reading ---


def read_state(directory: Location, metadata: Mapping[str, Any], *, roots: Collection[str] = ("train", "run"), share: Share | None = None) -> dict[str, Any]:
    """Returns the roots, as `checkpoint_files.read_state` does, with arrays assembled from their pieces.

    If `share` is given, as the index of this process and the number of processes that read together, split arrays are of type `SplitArray`, from which each
    process later reads what it needs. All pieces are verified now, each by one process, which keeps them.
    """
    state = msgpack_format.read_state(directory, metadata, roots=roots)
    with read_errors(directory):
        arrays = _read_split(directory, metadata["shards"], tuple(f"{root}/" for root in roots), share)
    return {root: map_leaves(tree, root, lambda path, leaf: arrays.get(path, leaf)) for root, tree in state.items()}


def _read_split(directory: Location, shards: Mapping[str, Any], roots: tuple[str, ...], share: Share | None) -> dict[str, Any]:
    forms = {path: form for path, form in shards["arrays"].items() if f"{path}/".startswith(roots)}
    files = [_PieceFile(directory, name, entry) for name, entry in shards["indexes"].items()] if forms else []
    arrays = {path: SplitArray(path, form["shape"], np.dtype(form["dtype"]), files) for path, form in forms.items()}
    lacking = sorted(path for path, array in arrays.items() if not array.is_complete)
    if lacking:
        raise CorruptCheckpointError(f"{directory} is damaged: pieces of these arrays are missing: {listed(lacking, most=3)}.")
    process, count = share or (0, 1)
    leaves: dict[str, Any] = dict(arrays) if share else {path: np.empty(array.shape, array.dtype) for path, array in arrays.items()}
    for file in files[process::count]:
        for path, region, data in file.read_in_order({path: array.dtype for path, array in arrays.items()}):
            if share:
                arrays[path].kept[region] = data
            else:
                leaves[path][tuple(itertools.starmap(slice, region))] = data
    return leaves


def _region(index: Sequence[slice], shape: Sequence[int]) -> Region:
    return tuple((part.start or 0, size if part.stop is None else part.stop) for part, size in zip(index, shape, strict=True))


def _slices_in(region: Region, outer: Region) -> tuple[slice, ...]:
    """Returns the slices of a region in an array that holds the region `outer`."""
    return tuple(slice(begin - start, end - start) for (begin, end), (start, _) in zip(region, outer, strict=True))


def _empty(region: Region, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.empty([end - begin for begin, end in region], dtype)


class _Piece(NamedTuple):
    """A piece of an array: its region, its offset in the file, and its checksum."""

    region: Region
    at: int
    num_bytes: int
    crc32: int


class _PieceFile:
    """The pieces that one process wrote, by the array's path. `entry` is the size and crc32 of the index, `name`.

    All methods raise `CorruptCheckpointError` if a file is damaged, and `OSError` if it is missing, or the disk or the store fails.
    """

    def __init__(self, place: Location, name: str, entry: Mapping[str, int]) -> None:
        self._place, self._name = place, name
        data = (place / name).read_bytes()
        if len(data) != entry["bytes"] or zlib.crc32(data) != entry["crc32"]:
            raise CorruptCheckpointError(f"{place / name} is damaged: its checksum does not match metadata.json.")
        index = json.loads(data)
        self._part_bytes, self._num_bytes = index["part_bytes"], index["bytes"]
        self._workers = Workers(_DOWNLOADS, "fitflax-pieces")
        weakref.finalize(self, self._workers.end, wait=False)
        self.pieces: dict[str, list[_Piece]] = {}
        for each in index["pieces"]:
            region = tuple((begin, end) for begin, end in each["index"])
            self.pieces.setdefault(each["path"], []).append(_Piece(region, each["at"], each["bytes"], each["crc32"]))

    def read_in_order(self, dtypes: Mapping[str, np.dtype[Any]]) -> Iterator[tuple[str, Region, np.ndarray[Any, Any]]]:
        """Yields path, region and verified data of all pieces of some arrays, with read-ahead. `dtypes` are those of the arrays by path."""
        reader = PartsReader(self._place, self._part_name, part_bytes=self._part_bytes, num_bytes=self._num_bytes)
        with io.BufferedReader(reader, buffer_size=2**20) as file:
            if faults := reader.faults():
                raise CorruptCheckpointError(" ".join(faults[:3]))
            for path, dtype in dtypes.items():
                for piece in self.pieces.get(path, ()):
                    data = _empty(piece.region, dtype)
                    file.seek(piece.at)
                    self._check(path, piece, data, file.readinto(bytes_of(data)))
                    yield path, piece.region, data

    def read(self, path: str, piece: _Piece, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Returns a verified piece, fetching only its bytes."""
        data = _empty(piece.region, dtype)
        view, futures = bytes_of(data), []
        while len(view):
            part, begin = divmod(piece.at + data.nbytes - len(view), self._part_bytes)
            length = min(self._part_bytes - begin, _RANGE_BYTES)
            futures.append(self._workers.submit(_read_into, view[:length], self._place / self._part_name(part), begin))
            view = view[length:]
        self._check(path, piece, data, sum(future.result() for future in futures))
        return data

    def _part_name(self, part: int) -> str:
        return part_name(self._name.removesuffix(".json"), part)

    def _check(self, path: str, piece: _Piece, data: np.ndarray[Any, Any], count: int) -> None:
        if not (count == data.nbytes == piece.num_bytes) or zlib.crc32(bytes_of(data)) != piece.crc32:
            raise CorruptCheckpointError(f"{self._place} is damaged: {path} does not match its checksum in {self._name}.")


def _read_into(target: memoryview, path: Location, begin: int) -> int:
    """Reads bytes of a file, and returns their number."""
    try:
        data = memoryview(read_range(path, begin, len(target)))
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{path} is missing.") from error
    target[: len(data)] = data
    return len(data)


class SplitArray(RemoteArray):
    """An array of a checkpoint, of which regions can be read; `files` contain its pieces."""

    def __init__(self, path: str, shape: Sequence[int], dtype: np.dtype[Any], files: Sequence[_PieceFile]) -> None:
        self.path, self.shape, self.dtype = path, tuple(shape), dtype
        self._pieces = [(file, piece) for file in files for piece in file.pieces.get(path, ())]
        self.kept: dict[Region, np.ndarray[Any, Any]] = {}  # Pieces that are already read.

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are in a piece."""
        return math.prod(self.shape) * self.dtype.itemsize == sum(piece.num_bytes for _, piece in self._pieces)

    @override
    def read(self, index: Sequence[slice]) -> np.ndarray[Any, Any]:
        wanted = _region(index, self.shape)
        whole = _empty(wanted, self.dtype)
        for file, piece in self._pieces:
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece.region, wanted, strict=True))
            if not all(begin < end for begin, end in common):
                continue
            try:
                data = self.kept[piece.region] if piece.region in self.kept else file.read(self.path, piece, self.dtype)
            except OSError as error:
                raise CheckpointError(f"{self.path} could not be read from its checkpoint: {str(error).rstrip('.')}.") from error
            whole[_slices_in(common, wanted)] = data[_slices_in(common, piece.region)]
        return whole
