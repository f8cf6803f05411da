"""The backend `orbax`: the arrays of a TrainState in `train/`, an ordinary Orbax checkpoint, and everything else in `state.msgpack`.

It is for users whose other tools read Orbax: `orbax.checkpoint.PyTreeCheckpointer().restore(directory / "train")` returns the arrays as nested dicts. It
is slower than the backend `msgpack`, and restores bit-for-bit identical leaves.

Orbax gets the arrays of `train` that it can round-trip: with elements, of a dtype that TensorStore supports, and with keys of ASCII letters, digits, `_`
and `-` (Orbax joins keys with dots, so `{"a": {"b": x}, "a.b": y}` would lose `x`). `msgpack_format` writes everything else, and all keys in order, with
`None` for Orbax's arrays. Orbax's files have few checksums. So `metadata.json` also gets `orbax_files` (`{path: {bytes, crc32}}`), which is verified before
Orbax reads anything, and `orbax_arrays` (`{path: {shape, dtype}}`).

Only process 0 writes, except for arrays that are split between processes: each process writes its own shards to separate files, which process 0 merges.
Orbax's barriers are not used, because they do not handle failures. Orbax runs in a temporary thread, because it leaves the calling thread without an event
loop.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

import fitflax.checkpoints.msgpack_format as msgpack_format
from fitflax.checkpoints.json_documents import fsync_directory, read_errors
from fitflax.checkpoints.memory import fetch
from fitflax.checkpoints.plain_tree import Plain, map_leaves, only_split, put, walk
from fitflax.checkpoints.shard_format import CollectiveSave, Files
from fitflax.errors import CheckpointError, CorruptCheckpointError
from fitflax.leaves import listed
from fitflax.parallel.placement import copy_to_host_memory, is_spread, spans_processes
from fitflax.storage.parts import size_fault

TRAIN_DIRECTORY = "train"
FILES = (*msgpack_format.FILES, TRAIN_DIRECTORY)
METADATA_KEYS: dict[str, type] = {**msgpack_format.METADATA_KEYS, "orbax_files": dict, "orbax_arrays": dict}

_PLAIN_PATH = re.compile(rf"{TRAIN_DIRECTORY}(/[A-Za-z0-9_-]+)+")
_DTYPES = {"bool", "int4", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz", "bfloat16", "complex64", "complex128"}
_DTYPES |= {f"{kind}{bits}" for kind, sizes in {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}.items() for bits in sizes}
_READ_BYTES = 2**20
# Orbax's name for the files of one process.
_PART_DIRECTORY = "ocdbt.process_"

T = TypeVar("T")


# --- The backend ---


def write_state(directory: Path, train: Plain, run: Plain, *, collective: CollectiveSave | None = None) -> dict[str, Any]:
    """Writes `train/` and `state.msgpack`, and returns the entries that `read_state` needs in `metadata.json`.

    If arrays are split between processes, `collective` is the save in which the other processes call `write_local_shards`. If it fails, files that were written
    remain.
    """
    if jax.process_index():
        # Orbax would silently write a checkpoint without data.
        raise CheckpointError(f"Orbax writes NumPy arrays from process 0 only, and this is process {jax.process_index()}.")
    arrays = _arrays_for_orbax(train)
    rest = map_leaves(train.tree, TRAIN_DIRECTORY, lambda path, leaf: None if path in arrays else leaf)
    msgpack_entries = msgpack_format.write_state(directory, Plain(rest, train.key_impls), run)
    path = directory / TRAIN_DIRECTORY
    others: Files = {}
    if collective is not None:
        others = _save_with_others(path, _to_host(arrays), collective)
    elif arrays:
        _save(path, _to_host(arrays))
    written = _synced_files(path, directory, except_for=others) if arrays else {}
    fsync_directory(directory)
    forms = {name: {"shape": list(array.shape), "dtype": array.dtype.name} for name, array in arrays.items()}
    return {**msgpack_entries, "orbax_files": dict(sorted({**others, **written}.items())), "orbax_arrays": forms}


def write_local_shards(path: Path, train: Plain) -> Files:
    """Writes this process's shards of arrays that are split between processes to `path`, the directory `train/`, and returns the files."""
    _save_part(path, _to_host(_arrays_for_orbax(only_split(train))))
    fsync_directory(path)
    # Synced here, because on a network file system other processes cannot sync them.
    return _synced_files(path / f"{_PART_DIRECTORY}{jax.process_index()}", path.parent)


def read_state(directory: Path, metadata: Mapping[str, Any], *, roots: Collection[str] = ("train", "run")) -> dict[str, Any]:
    """Returns the roots, as `checkpoint_files.read_state` does.

    All files of Orbax are verified before one of them is read, but only if `roots` include arrays in them. Also raises `CheckpointError` if this version of
    Orbax does not read what another one wrote.
    """
    wanted = {name: form for name, form in metadata["orbax_arrays"].items() if f"{name}/".startswith(tuple(f"{root}/" for root in roots))}
    if wanted:
        _verify(directory, metadata["orbax_files"])
    state = msgpack_format.read_state(directory, metadata, roots=roots)
    if wanted:
        path = directory / TRAIN_DIRECTORY
        arrays = dict(walk(restore_numpy(path, is_verified=True, only=None if len(wanted) == len(metadata["orbax_arrays"]) else wanted), TRAIN_DIRECTORY))
        read_forms = {name: {"shape": list(array.shape), "dtype": array.dtype.name} for name, array in arrays.items()}
        differing = sorted(name for name in read_forms.keys() | wanted if read_forms.get(name) != wanted.get(name))
        if differing:
            # The files are verified, so they are not damaged.
            raise CheckpointError(
                f"The installed version of Orbax reads {path} differently than it was written. Install the version that wrote it. "
                f"Arrays that are missing, or differ in shape or dtype: {listed(differing, most=3)}."
            )
        state[TRAIN_DIRECTORY] = map_leaves(state[TRAIN_DIRECTORY], TRAIN_DIRECTORY, lambda name, leaf: arrays.get(name, leaf))
    return state


def _arrays_for_orbax(train: Plain) -> dict[str, Any]:
    """Returns the arrays that Orbax writes, by path. Raises `CheckpointError` if others are split between processes."""
    leaves = dict(walk(train.tree, TRAIN_DIRECTORY))
    arrays = {
        path: leaf
        for path, leaf in leaves.items()
        if isinstance(leaf, (np.ndarray, jax.Array)) and leaf.size and leaf.dtype.name in _DTYPES and _PLAIN_PATH.fullmatch(path)
    }
    spanning = [path for path, leaf in leaves.items() if path not in arrays and spans_processes(leaf)]
    if spanning:
        raise CheckpointError(
            "Cannot be saved in a checkpoint: Orbax does not support the keys or dtypes of some arrays that are split between processes. Use only ASCII "
            f"letters, digits, _ and - in keys, and standard dtypes, or add a rule that does not split these arrays: {listed(spanning, most=3)}."
        )
    return arrays


def _nested(leaves: Iterable[tuple[str, Any]]) -> Any:
    tree: dict[str, Any] = {TRAIN_DIRECTORY: {}}
    for path, leaf in leaves:
        put(tree, path, leaf)
    return tree[TRAIN_DIRECTORY]


def _to_host(arrays: Mapping[str, Any]) -> Any:
    """Returns nested dicts of NumPy arrays, except for arrays that are split over devices, which Orbax writes shard by shard."""
    host = dict(arrays)
    # Orbax caches the host values in the arrays that it writes. With copies, they are freed afterwards.
    spread = [path for path, leaf in arrays.items() if is_spread(leaf) and leaf.sharding.memory_kind != "pinned_host"]
    host.update(zip(spread, copy_to_host_memory([arrays[path] for path in spread]), strict=True))
    whole = [path for path, leaf in arrays.items() if isinstance(leaf, jax.Array) and not is_spread(leaf)]
    host.update(zip(whole, fetch((arrays[path] for path in whole), ahead_bytes=math.inf), strict=True))
    return _nested(host.items())


def _synced_files(path: Path, directory: Path, except_for: Collection[str] = ()) -> Files:
    """Makes the files and directories under `path` durable, and returns the files with paths relative to `directory`."""
    # Parents first: a directory must be durable before its contents.
    for entry in (path, *sorted(path.rglob("*"))):
        if entry.is_dir():
            fsync_directory(entry)
    files: Files = {}
    for file in _files_under(path):
        name = file.relative_to(directory).as_posix()
        if name not in except_for:
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
                files[name] = {"bytes": os.fstat(opened.fileno()).st_size, "crc32": _crc32(opened)}
    return files


def _files_under(path: Path) -> list[Path]:
    return sorted(entry for entry in path.rglob("*") if not entry.is_dir())


def _crc32(file: Any) -> int:
    crc32 = 0
    while block := file.read(_READ_BYTES):
        crc32 = zlib.crc32(block, crc32)
    return crc32


def _verify(directory: Path, files: Mapping[str, Any]) -> None:
    """Raises `CorruptCheckpointError` if the files of Orbax are not exactly those that were written."""
    with read_errors(directory):
        for file in _files_under(directory / TRAIN_DIRECTORY):
            if file.relative_to(directory).as_posix() not in files:
                raise CorruptCheckpointError(f"{file} does not belong to the checkpoint: metadata.json does not list it.")
        for path, entry in ((directory / name, entry) for name, entry in files.items()):
            if not path.is_file():
                raise CorruptCheckpointError(f"{path} is missing.")
            with open(path, "rb") as opened:
                if faults := size_fault(path, path.stat().st_size, entry["bytes"]):
                    raise CorruptCheckpointError(faults[0])
                if _crc32(opened) != entry["crc32"]:
                    raise CorruptCheckpointError(f"{path} is damaged: its checksum does not match metadata.json.")


# --- Calls of Orbax ---


def restore_numpy(path: Path, *, is_verified: bool = False, only: Collection[str] | None = None) -> Any:
    """Returns any checkpoint of Orbax's PyTree or Standard handlers with NumPy arrays, independent of devices and shardings.

    `only` are the paths of the arrays to read, including `train`. Files that are not known to be intact are first read once: if several arrays
    are unreadable, Orbax closes its event loop after the first, and TensorStore prints an error that cannot be caught.
    """

    def restore(orbax: Any) -> Any:
        if not is_verified and (path / "manifest.ocdbt").exists():
            base = {"driver": "file", "path": f"{path.absolute()}/"}
            store = importlib.import_module("tensorstore").KvStore.open({"driver": "ocdbt", "base": base}).result()
            for key in store.list().result():
                store.read(key).result()

        def arguments_of(entry: Any) -> Any:
            # Otherwise Orbax places arrays on the devices that they were saved from, which may not exist here.
            is_array = isinstance(entry, orbax.metadata.ArrayMetadata) and not isinstance(entry, orbax.metadata.ScalarMetadata)
            return orbax.RestoreArgs(restore_type=np.ndarray) if is_array else orbax.RestoreArgs()

        with _checkpointer(orbax) as checkpointer:
            # The checkpointer's own `metadata` logs errors and returns None.
            tree = checkpointer.handler.metadata(_epath(path)).tree
            if only is not None:
                tree = _nested((name, entry) for name, entry in walk(tree, TRAIN_DIRECTORY) if name in only)
            arguments = jax.tree.map(arguments_of, tree)
            item = None if only is None else tree
            return checkpointer.restore(path.absolute(), args=orbax.args.PyTreeRestore(item, arguments, partial_restore=only is not None))

    return _with_orbax(restore, "read", path)


def _save(path: Path, tree: Any) -> None:
    def save(orbax: Any) -> None:
        with _checkpointer(orbax) as checkpointer:
            checkpointer.save(path.absolute(), args=orbax.args.PyTreeSave(tree))

    _with_orbax(save, "write", path)


def _save_with_others(path: Path, tree: Any, collective: CollectiveSave) -> Files:
    """Writes this process's shards while the others write theirs, and merges them; returns the others' files."""
    # Created here, so that this process sees them even if its network file system lags.
    parts = [path / f"{_PART_DIRECTORY}{index}" for index in range(jax.process_count())]
    for directory in (path, *parts):
        directory.mkdir()
    others = collective.write(path, functools.partial(_save_part, tree=tree))
    for part in parts:
        with contextlib.suppress(OSError):
            part.rmdir()  # That process had nothing to write.
    _with_orbax(lambda orbax: _part_handler(orbax).finalize(_epath(path)), "write", path)
    return others


def _save_part(path: Path, tree: Any) -> None:
    _with_orbax(lambda orbax: _part_handler(orbax).save(_epath(path), args=orbax.args.PyTreeSave(tree)), "write", path)


def _part_handler(orbax: Any) -> Any:
    """Returns a handler that writes one process's shards or merges those of all, without waiting for other processes."""
    kinds = orbax.type_handlers
    registry = kinds.create_type_handler_registry(
        (np.ndarray, kinds.NumpyHandler()),
        # Each shard once: splitting replicas among processes would run a computation on the devices during training.
        (jax.Array, kinds.ArrayHandler(use_replica_parallel=False)),
    )
    together = orbax.options.MultiprocessingOptions(primary_host=0, active_processes=set(range(jax.process_count())))
    return orbax.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=together, type_handler_registry=registry)


def _checkpointer(orbax: Any) -> Any:
    process = jax.process_index()
    # By default, Orbax waits until all processes save the same checkpoint.
    alone = orbax.options.MultiprocessingOptions(primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"fitflax-{process}")
    # Parameters hardly compress: 8 % less on the disk for four times the time.
    handler = orbax.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=alone)
    return orbax.Checkpointer(handler, multiprocessing_options=alone)


def _epath(path: Path) -> Any:
    return importlib.import_module("etils.epath").Path(path.absolute())


def _with_orbax(function: Callable[[Any], T], doing: str, path: Path) -> T:
    """Returns `function(orbax.checkpoint)`, called in its own thread, and converts Orbax's errors."""

    def call() -> T:
        # Imported late, because it would make `import fitflax` take 1.5 times as long.
        orbax = importlib.import_module("orbax.checkpoint")
        with _without_logging():
            try:
                return function(orbax)
            except Exception as error:  # noqa: BLE001 (converted, and raised below)
                fault = _converted_error(error, doing, path)
            # Collects the asyncio tasks that the traceback refers to, while their warnings are suppressed.
            gc.collect()
        raise fault

    # Leaving the block waits for the thread, even after Ctrl-C, so nothing is written while the caller cleans up.
    with ThreadPoolExecutor(1, thread_name_prefix="fitflax-orbax") as executor:
        return executor.submit(call).result()


def _converted_error(error: Exception, doing: str, path: Path) -> Exception:
    if isinstance(error, OSError) and error.errno:
        return OSError(error.errno, error.strerror, error.filename or str(path))
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        # TensorStore raises ValueError if the disk is full.
        return OSError(int(code[1]), os.strerror(int(code[1])), str(path))
    message = re.split(r"\n| \[tensorstore_spec", str(error).strip())[0].rstrip(".")
    return CheckpointError(f"Orbax could not {doing} {path}: {type(error).__name__}: {message}.")


@contextlib.contextmanager
def _without_logging() -> Iterator[None]:
    """Silences the tracebacks that Orbax and asyncio log for each failed thread, because they are converted to one error."""
    thread = threading.get_ident()
    filters: dict[str, Callable[[logging.LogRecord], bool]] = {
        "absl": lambda record: "orbax" not in record.pathname,
        "asyncio": lambda record: record.thread != thread,
    }
    with contextlib.ExitStack() as stack:
        for name, keeps in filters.items():
            logging.getLogger(name).addFilter(keeps)
            stack.callback(logging.getLogger(name).removeFilter, keeps)
        yield
