"""The backend `orbax`: the arrays of a TrainState in `train/`, an ordinary Orbax checkpoint, and all else in `state.msgpack`.

For those whose other tools read Orbax: `orbax.checkpoint.PyTreeCheckpointer().restore(directory / "train")` gives the arrays as nested dicts. It is slower than
the backend `msgpack`, and what is read is the same, leaf by leaf and bit by bit.

An array of `train` goes to Orbax if Orbax brings it back as it was: it has elements, a dtype that TensorStore knows, and every key of its path consists of
ASCII letters, digits, `_` and `-` (Orbax joins keys with dots, so that `{"a": {"b": x}, "a.b": y}` would lose `x`). Whatever else there is (all of `run`,
Python values, NumPy scalars, `None`, empty dicts, empty arrays, rare dtypes) is in `state.msgpack`, written by `fitflax.checkpoints.msgpack_format`. That file
also holds all keys, in their order, with `None` where Orbax has an array.

Orbax's files hold few checksums of their own. So `metadata.json` gets, beside what the backend `msgpack` puts there, `orbax_files` (`{path from the checkpoint
directory: {bytes, crc32}}`), which is verified before Orbax reads anything, and `orbax_arrays` (`{path: {shape, dtype}}`).

Process 0 writes, alone; but of arrays that are split between processes each one writes its own parts, side by side in files of its own, which process 0 then
merges. Of Orbax these saves use what writes and what merges, and not what has processes wait for each other: its barriers know of no failure.
Orbax runs on a thread that ends with the call, because it leaves the thread it is called on without an event loop.
"""

import contextlib
import functools
import gc
import importlib
import logging
import math
import os
import re
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

import fitflax.checkpoints.msgpack_format as msgpack_format
from fitflax.checkpoints.documents import fsync_directory
from fitflax.checkpoints.joint import Files, JointSave
from fitflax.checkpoints.trees import Plain, fetch, join, only_split, walk
from fitflax.errors import CheckpointError, CorruptCheckpointError
from fitflax.parallel.host_memory import copy_to_host_memory, is_spread, spans_processes

__all__ = ["FILES", "OWN_KEYS", "read_state", "restore_numpy", "write_part", "write_state"]

TRAIN_DIRECTORY = "train"
FILES = (*msgpack_format.FILES, TRAIN_DIRECTORY)
OWN_KEYS: dict[str, type] = {**msgpack_format.OWN_KEYS, "orbax_files": dict, "orbax_arrays": dict}

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_DTYPES = {"bool", "int4", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz", "bfloat16", "complex64", "complex128"}
_DTYPES |= {f"{kind}{bits}" for kind, sizes in {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}.items() for bits in sizes}
_READ_BYTES = 2**20
# Orbax's name for what one process writes.
_PART_DIRECTORY = "ocdbt.process_"

T = TypeVar("T")


def write_state(directory: Path, train: Plain, run: Plain, *, joint: JointSave | None = None) -> dict[str, Any]:
    """Writes `train/` and `state.msgpack`, to the disk, and returns what `read_state` wants to find in `metadata.json`.

    Args:
        directory: An existing directory; it may be renamed afterwards.
        train: The TrainState; its arrays may be on devices.
        run: Everything else that a resume needs.
        joint: The save in which the other processes call `write_part`, if arrays are split between processes.

    Raises:
        CheckpointError: Orbax failed, here or in another process, or this is not process 0. What has been written so far is left.
        OSError: The disk is full or fails.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     metadata = write_state(Path(directory), Plain({"w": np.ones(2), "n": 3}, {}), Plain(None, {}))
    ...     list(metadata["orbax_arrays"].items()), read_state(Path(directory), metadata, roots=["train"])
    ([('train/w', {'shape': [2], 'dtype': 'float64'})], {'train': {'w': array([1., 1.]), 'n': 3}})
    """
    if jax.process_index():
        # It would write a checkpoint without data and say nothing.
        raise CheckpointError(f"Orbax writes NumPy arrays from process 0 only, and this is process {jax.process_index()}.")
    arrays: dict[str, dict[str, Any]] = {}
    rest, taken = _split(train.tree, TRAIN_DIRECTORY, arrays)
    _check_taken(rest)
    own = msgpack_format.write_state(directory, Plain(rest, train.key_impls), run)
    path = directory / TRAIN_DIRECTORY
    others: Files = {}
    if joint is not None:
        others = _save_with_others(path, _fetched(taken), joint)
    elif arrays:
        _save(path, _fetched(taken))
    if arrays:
        # Tops down, because a directory has to be there before what is in it: `sorted` has parents first.
        for entry in (path, *sorted(path.rglob("*"))):
            if entry.is_dir():
                fsync_directory(entry)
    own_files = {name: file for file in _files_under(path) if (name := file.relative_to(directory).as_posix()) not in others}
    files = {**others, **{name: _synced_entry(file) for name, file in own_files.items()}}
    fsync_directory(directory)
    return {**own, "orbax_files": dict(sorted(files.items())), "orbax_arrays": arrays}


def write_part(path: Path, train: Plain) -> Files:
    """Writes what this process has of arrays that are split between processes, to the disk, and returns the files.

    Args:
        path: The directory `train/`, which the leader of the save has made.
        train: The TrainState, or of it the arrays that are split between processes.

    Raises:
        CheckpointError: Orbax failed, or cannot write an array.
        OSError: The disk is full or fails.
    """
    rest, taken = _split(only_split(train).tree, TRAIN_DIRECTORY, {})
    _check_taken(rest)
    _save_part(path, _fetched(taken))
    own = path / f"{_PART_DIRECTORY}{jax.process_index()}"
    for entry in (path, own, *sorted(own.rglob("*"))):
        if entry.is_dir():
            fsync_directory(entry)
    # Here, because on a network's file system nobody else can have them put on the disk.
    return {file.relative_to(path.parent).as_posix(): _synced_entry(file) for file in _files_under(own)}


def read_state(directory: Path, metadata: Mapping[str, Any], *, roots: Collection[str] = ("train", "run")) -> dict[str, Any]:
    """Returns the roots as nested dicts and lists of NumPy arrays and Python values, verified.

    All files of Orbax are verified before one of them is read, if an array in them is asked for; otherwise they are not looked at. Typed keys come as key data.

    Args:
        directory: A checkpoint directory.
        metadata: Its verified `metadata.json`.
        roots: Which roots to read, or parts of them by their paths.

    Raises:
        CorruptCheckpointError: A file is missing, cut, too long, fails its check, or does not belong there; the message names it.
        CheckpointError: The disk fails, there is no such root, or this Orbax does not read what another one wrote.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     metadata = write_state(Path(directory), Plain({"w": np.ones(2)}, {}), Plain({"n": 3}, {}))
    ...     read_state(Path(directory), metadata, roots=["run"])
    {'run': {'n': 3}}
    """
    wanted = {name: form for name, form in metadata["orbax_arrays"].items() if any(name == root or name.startswith(f"{root}/") for root in roots)}
    if wanted:
        _verify(directory, metadata["orbax_files"])
    state = msgpack_format.read_state(directory, metadata, roots=roots)
    if wanted:
        path = directory / TRAIN_DIRECTORY
        restored = restore_numpy(path, is_verified=True, only=None if len(wanted) == len(metadata["orbax_arrays"]) else wanted)
        found = {name: {"shape": list(array.shape), "dtype": array.dtype.name} for name, array in walk(restored, TRAIN_DIRECTORY)}
        differing = sorted(name for name in found.keys() | wanted if found.get(name) != wanted.get(name))
        if differing:
            # The files are those that were written, so it is not they that are damaged.
            raise CheckpointError(f"This Orbax reads {path} otherwise than it was written: {', '.join(differing)} differ in shape or dtype or are not there.")
        _fill(state[TRAIN_DIRECTORY], restored)
    return state


def restore_numpy(path: Path, *, is_verified: bool = False, only: Collection[str] | None = None) -> Any:
    """Returns any checkpoint of Orbax's PyTree or Standard handlers as it was saved, with all arrays as NumPy arrays; devices and shardings do not matter.

    Args:
        path: The directory that holds `_METADATA`.
        is_verified: Whether its files are known to be whole; otherwise they are read once before. Where several arrays cannot be read Orbax gives up at the
            first and closes its event loop, and TensorStore's report of the next fails with a message that nobody can catch.
        only: The paths of the arrays that are read, those beginning with `train` that `write_state` gave them; by default all.

    Raises:
        CheckpointError: Orbax cannot read it, or it is not there.
        OSError: The disk fails.

    >>> restore_numpy(Path("nowhere"))
    Traceback (most recent call last):
    fitflax.errors.CheckpointError: Orbax could not read nowhere: FileNotFoundError: Metadata file (named _METADATA) does not exist at ...nowhere.
    """

    def restore(orbax: Any) -> Any:
        if not is_verified and (path / "manifest.ocdbt").exists():
            _read_values(path)
        with _checkpointer(orbax) as checkpointer:
            # Not the checkpointer's own `metadata`, which logs what goes wrong and returns None.
            described = checkpointer.handler.metadata(_epath(path))
            part = None if only is None else _part(described.tree, TRAIN_DIRECTORY, only)
            arguments = jax.tree.map(lambda entry: _restore_args(orbax, entry), described.tree if part is None else part)
            return checkpointer.restore(path.absolute(), args=orbax.args.PyTreeRestore(part, arguments, partial_restore=part is not None))

    return _with_orbax(restore, "read", path)


def _part(node: Any, path: str, only: Collection[str]) -> dict[str, Any]:
    """Returns of nested dicts the leaves with these paths."""
    part: dict[str, Any] = {}
    for key, child in node.items():
        where = join(path, key)
        if isinstance(child, dict):
            part |= {key: inner} if (inner := _part(child, where, only)) else {}
        elif where in only:
            part[key] = child
    return part


def _read_values(path: Path) -> None:
    base = {"driver": "file", "path": f"{path.absolute()}/"}
    store = importlib.import_module("tensorstore").KvStore.open({"driver": "ocdbt", "base": base}).result()
    for key in store.list().result():
        store.read(key).result()


def _restore_args(orbax: Any, entry: Any) -> Any:
    # Otherwise Orbax puts arrays on the devices that they were saved from, which may not be there.
    is_array = isinstance(entry, orbax.metadata.ArrayMetadata) and not isinstance(entry, orbax.metadata.ScalarMetadata)
    return orbax.RestoreArgs(restore_type=np.ndarray) if is_array else orbax.RestoreArgs()


def _split(node: Any, path: str, arrays: dict[str, dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """Returns `node` with `None` for what Orbax takes, and what it takes, which is entered in `arrays`."""
    if not isinstance(node, dict):
        return node, {}
    rest: dict[str, Any] = {}
    taken: dict[str, Any] = {}
    for key, child in node.items():
        rest[key] = child
        if not _PLAIN_KEY.fullmatch(key):
            continue
        where = join(path, key)
        if isinstance(child, dict):
            rest[key], inner = _split(child, where, arrays)
            if inner:
                taken[key] = inner
        elif isinstance(child, (np.ndarray, jax.Array)) and child.size and child.dtype.name in _DTYPES:
            rest[key], taken[key] = None, child
            arrays[where] = {"shape": list(child.shape), "dtype": child.dtype.name}
    return rest, taken


def _check_taken(rest: Any) -> None:
    """Checks that what Orbax does not take is whole in this process.

    Raises:
        CheckpointError: Arrays are split between processes.
    """
    spanning = [path for path, leaf in walk(rest, TRAIN_DIRECTORY) if spans_processes(leaf)]
    if spanning:
        raise CheckpointError(
            f"Cannot be saved in a checkpoint: {', '.join(spanning)}: split between processes, which only Orbax can write, and it takes neither such keys nor "
            "such dtypes. Use ASCII letters, digits, _ and - in keys, and usual dtypes, or let a rule keep the array whole."
        )


def _fill(node: dict[str, Any], restored: dict[str, Any]) -> None:
    for key, child in restored.items():
        if isinstance(child, dict):
            _fill(node[key], child)
        else:
            node[key] = child


def _fetched(tree: dict[str, Any]) -> Any:
    """Returns `tree` with NumPy arrays, but for those that are split over devices, which Orbax writes part by part."""
    leaves, treedef = jax.tree.flatten(tree)
    # Orbax leaves the values of what it writes on the host, with the arrays: copies go with them.
    spread = [index for index, leaf in enumerate(leaves) if is_spread(leaf) and leaf.sharding.memory_kind != "pinned_host"]
    for index, copy in zip(spread, copy_to_host_memory([leaves[index] for index in spread]), strict=True):
        leaves[index] = copy
    is_whole = [isinstance(leaf, jax.Array) and not is_spread(leaf) for leaf in leaves]
    values = fetch((leaf for leaf, whole in zip(leaves, is_whole, strict=True) if whole), ahead_bytes=math.inf)
    return jax.tree.unflatten(treedef, [next(values) if whole else leaf for leaf, whole in zip(leaves, is_whole, strict=True)])


def _save(path: Path, tree: Any) -> None:
    def save(orbax: Any) -> None:
        with _checkpointer(orbax) as checkpointer:
            checkpointer.save(path.absolute(), args=orbax.args.PyTreeSave(tree))

    _with_orbax(save, "write", path)


def _save_with_others(path: Path, tree: Any, joint: JointSave) -> Files:
    """Writes this process's parts while the others write theirs, and merges them; returns the others' files."""
    # Made here, so that this process lists them whatever its file system has not noticed yet.
    parts = [path / f"{_PART_DIRECTORY}{index}" for index in range(jax.process_count())]
    path.mkdir()
    for part in parts:
        part.mkdir()
    others = joint.write(path, functools.partial(_save_part, tree=tree))
    for part in parts:
        with contextlib.suppress(OSError):
            part.rmdir()  # Of a process that had nothing to write.
    _with_orbax(lambda orbax: _part_handler(orbax).finalize(_epath(path)), "write", path)
    return others


def _save_part(path: Path, tree: Any) -> None:
    _with_orbax(lambda orbax: _part_handler(orbax).save(_epath(path), args=orbax.args.PyTreeSave(tree)), "write", path)


def _part_handler(orbax: Any) -> Any:
    """Returns what writes one process's parts, and merges those of all; it waits for no other process."""
    kinds = orbax.type_handlers
    registry = kinds.create_type_handler_registry(
        (np.ndarray, kinds.NumpyHandler()),
        # Each part once: to have several processes write pieces of one it would be cut by a computation, beside those of the training steps.
        (jax.Array, kinds.ArrayHandler(use_replica_parallel=False)),
    )
    together = orbax.options.MultiprocessingOptions(primary_host=0, active_processes=set(range(jax.process_count())))
    return orbax.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=together, type_handler_registry=registry)


def _epath(path: Path) -> Any:
    return importlib.import_module("etils.epath").Path(path.absolute())


def _checkpointer(orbax: Any) -> Any:
    process = jax.process_index()
    # This process alone: with its default Orbax waits for all the others to save the same, which they do not.
    alone = orbax.options.MultiprocessingOptions(primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"fitflax-{process}")
    # Parameters hardly compress: 8 % less on the disk for four times the time.
    handler = orbax.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=alone)
    return orbax.Checkpointer(handler, multiprocessing_options=alone)


def _with_orbax(function: Callable[[Any], T], doing: str, path: Path) -> T:
    """Returns `function(orbax.checkpoint)`, called on a thread of its own, with Orbax's many ways to fail made one."""

    def call() -> T:
        # Not at the top: it adds half to the time that `import fitflax` takes, and few need it.
        orbax = importlib.import_module("orbax.checkpoint")
        with _without_logging():
            try:
                return function(orbax)
            except Exception as error:  # noqa: BLE001 - raised below, as one of ours
                fault = _error(error, doing, path)
            # The traceback is gone, and so are asyncio's tasks in it, which complain when they go: here, where nobody hears it.
            gc.collect()
        raise fault

    # Leaving the block waits for the thread, also when Ctrl-C interrupts: nothing is written any more when the caller tidies up.
    with ThreadPoolExecutor(1, thread_name_prefix="fitflax-orbax") as executor:
        return executor.submit(call).result()


def _error(error: Exception, doing: str, path: Path) -> Exception:
    if isinstance(error, OSError) and error.errno:
        return OSError(error.errno, error.strerror, error.filename or str(path))
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        # A full disk reaches us as a ValueError of TensorStore's.
        return OSError(int(code[1]), os.strerror(int(code[1])), str(path))
    message = re.split(r"\n| \[tensorstore_spec", str(error).strip())[0].rstrip(".")
    return CheckpointError(f"Orbax could not {doing} {path}: {type(error).__name__}: {message}.")


@contextlib.contextmanager
def _without_logging() -> Iterator[None]:
    """Keeps quiet what Orbax, and asyncio on its behalf, log meanwhile: tracebacks of all threads that failed, and here they become one error."""
    thread = threading.get_ident()
    filters: list[tuple[str, Callable[[logging.LogRecord], bool]]] = [
        ("absl", lambda record: "orbax" not in record.pathname),
        ("asyncio", lambda record: record.thread != thread),
    ]
    for name, keeps in filters:
        logging.getLogger(name).addFilter(keeps)
    try:
        yield
    finally:
        for name, keeps in filters:
            logging.getLogger(name).removeFilter(keeps)


def _files_under(path: Path) -> list[Path]:
    return sorted(entry for entry in path.rglob("*") if not entry.is_dir()) if path.is_dir() else []


def _synced_entry(path: Path) -> dict[str, int]:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "crc32": _crc32(file)}


def _crc32(file: Any) -> int:
    buffer, crc32 = memoryview(bytearray(_READ_BYTES)), 0
    while count := file.readinto(buffer):
        crc32 = zlib.crc32(buffer[:count], crc32)
    return crc32


def _verify(directory: Path, files: Mapping[str, Any]) -> None:
    try:
        extra = [file for file in _files_under(directory / TRAIN_DIRECTORY) if file.relative_to(directory).as_posix() not in files]
        if extra:
            raise CorruptCheckpointError(f"{extra[0]} does not belong to the checkpoint: metadata.json does not list it.")
        for name, entry in files.items():
            _verify_file(directory / name, entry)
    except OSError as error:
        raise CheckpointError(f"{error.filename or directory} could not be read: {error.strerror}.") from error


def _verify_file(path: Path, entry: Mapping[str, int]) -> None:
    try:
        with open(path, "rb") as file:
            num_bytes, expected = os.fstat(file.fileno()).st_size, entry["bytes"]
            if num_bytes != expected:
                fault = "empty" if num_bytes == 0 else "truncated" if num_bytes < expected else "too long"
                raise CorruptCheckpointError(f"{path} is {fault}: {num_bytes} bytes instead of {expected}.")
            if _crc32(file) != entry["crc32"]:
                raise CorruptCheckpointError(f"{path} is damaged: it has another checksum than metadata.json says.")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CorruptCheckpointError(f"{path} is missing.") from error
