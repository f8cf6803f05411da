"""The contents of one checkpoint directory: `metadata.json`, the state in the files of one of several backends, and `closing.json`.

`metadata.json` is for people and listings. It holds `format_version`, what the caller passes, `versions`, `backend` (the writer of the state), `key_impls`
(typed keys are stored as key data), `integer_keys` if dicts have integer keys, what the backend needs to verify its files, and last the `crc32` of the
compact JSON of everything before it. See `fitflax.checkpoints.json_documents` for numbers and strings, and `docs/checkpoint-format.md` for the bytes.
`fitflax.checkpoints.checkpoint_store` decides which checkpoints exist and when they are deleted.

`closing.json` is the history row of an epoch that was closed in its middle. A run that ends inside an epoch first saves its last step, and then closes the
epoch (validation, `on_epoch_end`). A resume with no steps left returns this row; one that continues ignores it and has one row for the whole epoch.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, TypeVar

import jax
import numpy as np

import fitflax.checkpoints.msgpack_format as msgpack_format
import fitflax.checkpoints.orbax_format as orbax_format
import fitflax.checkpoints.shard_format as shard_format
from fitflax.checkpoints.json_documents import document_bytes, fsync_directory, json_values, library_versions, read_document, replace_document, write_file
from fitflax.checkpoints.plain_tree import Plain, leaves_of, to_plain
from fitflax.checkpoints.shard_format import CollectiveSave, Files, Share
from fitflax.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, warn
from fitflax.parallel.placement import is_spread
from fitflax.parallel.processes import after_first, exchange
from fitflax.state import PyTree
from fitflax.storage import Location, ObjectPath

METADATA_FILE = "metadata.json"
PARTIAL_EPOCH_FILE = "closing.json"
_METADATA_KEYS = {"backend": str, "key_impls": dict}

# Each has `write_state`, which creates `FILES` and returns entries for `metadata.json`, whose names and types are `METADATA_KEYS`; and `read_state`.
BACKENDS: dict[str, ModuleType] = {"msgpack": msgpack_format, "shards": shard_format, "orbax": orbax_format}
_CHOICES = ("msgpack", "orbax")  # What users choose; "shards" is chosen automatically.

WHOLE = ("train", "run")
# What evaluation and prediction need: no optimizer state, and nothing about the run.
FOR_INFERENCE = ("train/step", "train/params", "train/model_state", "train/ema_params")


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint as read from its directory, verified.

    Attributes:
        path: The directory.
        metadata: The result of `read_metadata`.
        train: The TrainState as nested dicts of NumPy arrays, for `restore.restore_tree`. If several processes read it together, split arrays are
            instances of `SplitArray`.
        run: Everything else, for `restore.from_saved`; `None` if it was not read.

    >>> from pathlib import Path
    >>> Saved(path=Path("runs/a/step_00000040"), metadata={"step": 40}, train={}, run={}).metadata["step"]
    40
    """

    path: Location
    metadata: dict[str, Any]
    train: Any
    run: Any


# --- Writing ---


def write_checkpoint(
    directory: Location,
    *,
    train: PyTree | Plain,
    run: PyTree | Plain,
    metadata: Mapping[str, Any],
    backend: str = "msgpack",
    collective: CollectiveSave | None = None,
    commit: Callable[[bytes], None] | None = None,
) -> None:
    """Writes a checkpoint, and returns when all files and the directory are on the disk or in the object store.

    Args:
        directory: An existing directory, which the caller then renames into place, or a location in a bucket.
        train: The TrainState.
        run: Everything else that a resume needs.
        metadata: JSON values and NumPy scalars for people and listings. `versions` is extended; names that the format uses are refused.
        backend: The writer of the state, one of `BACKENDS`. If arrays of `train` are split over devices, Orbax is always used. In a bucket, it is never used.
        collective: The collective save that this process leads, if any; arrays of `train` may then be split between processes.
        commit: Writes `metadata.json` in a bucket, which makes the objects a checkpoint.
    """
    if backend not in BACKENDS:
        check_backend(backend)
    plain_train, plain_run = to_plain(train, root="train", may_span=collective is not None), to_plain(run, root="run", keep_lists=True)
    if commit is not None:
        backend = "msgpack" if collective is None else "shards"
    elif any(map(is_spread, leaves_of(plain_train.tree))):
        backend = "orbax"
    # Checked before anything is written.
    caller_metadata = json_values(
        metadata, {"format_version", "crc32", "integer_keys"}.union(_METADATA_KEYS, *(each.METADATA_KEYS for each in BACKENDS.values()))
    )
    backend_metadata = BACKENDS[backend].write_state(directory, plain_train, plain_run, **({} if collective is None else {"collective": collective}))
    integers = {"integer_keys": plain_train.integer_keys} if plain_train.integer_keys else {}
    format_metadata = json_values({"backend": backend, "key_impls": {**plain_train.key_impls, **plain_run.key_impls}, **integers, **backend_metadata}, ())
    data = document_bytes({**caller_metadata, "versions": {**library_versions(), **caller_metadata.get("versions", {})}, **format_metadata})
    if isinstance(directory, ObjectPath):
        assert commit is not None
        commit(data)
    else:
        write_file(directory / METADATA_FILE, [data])
        fsync_directory(directory)


def write_local_shards(place: Location, train: Plain) -> Files:
    """Writes this process's shards of split arrays where the leader of a collective save says, and returns the files."""
    return shard_format.write_local_shards(place, train) if isinstance(place, ObjectPath) else orbax_format.write_local_shards(place, train)


def check_backend(backend: str) -> None:
    """Raises `CheckpointError` if there is no such backend."""
    if backend not in _CHOICES:
        raise CheckpointError(f"backend must be {' or '.join(map(repr, _CHOICES))}. Received: {backend!r}.")


def save_partial_epoch(directory: Location, row: Mapping[str, Any]) -> None:
    """Writes `closing.json` into a checkpoint, in process 0 only.

    The row is `{"epoch": index, "logs": {key: number}, "earlier": {key: number}}`; `earlier` holds the epoch's previous validation results.
    """
    if jax.process_index():
        return
    try:
        for litter in [] if isinstance(directory, ObjectPath) else directory.glob(f".{PARTIAL_EPOCH_FILE}.tmp-*"):
            litter.unlink()  # Left by a process that died while writing.
        replace_document(directory / PARTIAL_EPOCH_FILE, row)
    except OSError as error:
        raise CheckpointError(f"Could not write {directory / PARTIAL_EPOCH_FILE}: {str(error).rstrip('.')}.") from error


# --- Reading ---


def is_checkpoint(path: Location) -> bool:
    """Returns whether a path looks like a checkpoint of fitflax, intact or damaged."""
    # One of the files is enough, so that a damaged checkpoint is reported as such.
    return any((path / name).is_file() for name in (METADATA_FILE, msgpack_format.STATE_FILE))


def read_metadata(directory: Location) -> dict[str, Any]:
    """Returns the verified `metadata.json` of a checkpoint directory, with non-finite numbers as floats.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        CorruptCheckpointError: The file is missing, empty, not JSON, or differs from what was written.
        CheckpointError: It was written by a newer fitflax or an unknown backend, or the disk fails.
    """
    path = directory / METADATA_FILE
    try:
        document = read_document(path)
    except CorruptCheckpointError as error:
        if isinstance(error.__cause__, OSError) and not directory.is_dir():
            raise CheckpointNotFoundError(f"There is no checkpoint directory {directory}{' (it is a file)' if directory.exists() else ''}.") from error
        raise
    _check_keys(document, _METADATA_KEYS, path)
    backend = document["backend"]
    if backend not in BACKENDS:
        raise CheckpointError(
            f"{path} has the backend {backend!r}, but this version of fitflax reads {', '.join(map(repr, BACKENDS))}. Use the version that wrote it."
        )
    _check_keys(document, BACKENDS[backend].METADATA_KEYS, path)
    return document


def _check_keys(document: Mapping[str, Any], keys: Mapping[str, type], path: Location) -> None:
    lacking = sorted(key for key, kind in keys.items() if not isinstance(document.get(key), kind))
    if lacking:
        raise CorruptCheckpointError(f"{path} is damaged: it lacks {', '.join(lacking)}.")


def read_state(directory: Location, metadata: Mapping[str, Any], *, roots: Collection[str] = WHOLE, share: Share | None = None) -> dict[str, Any]:
    """Returns the roots of a state as nested dicts and lists of NumPy arrays and Python values, verified. Typed keys are key data.

    `roots` are the roots to read, or paths below them such as `train/params`. Other arrays are skipped and `None`. `share` is as in
    `shard_format.read_state`; in other formats, each process reads everything. If a check fails, the message of `CorruptCheckpointError` names the array.
    """
    backend = metadata["backend"]
    options = {"share": share} if backend == "shards" else {}
    state: dict[str, Any] = BACKENDS[backend].read_state(directory, metadata, roots=roots, **options)
    return state


def read_checkpoint(path: Location, roots: Collection[str] = WHOLE, *, share: Share | None = None) -> Saved:
    """Returns the checkpoint in a directory, verified. `roots` are `WHOLE` or `FOR_INFERENCE`; all other arrays are neither read nor verified."""
    metadata = read_metadata(path)
    state = read_state(path, metadata, roots=roots, share=share)
    train = state["train"]
    if "train" not in roots:
        names = {root.partition("/")[2] for root in roots}
        train = {name: tree for name, tree in train.items() if name in names}
    return Saved(path=path, metadata=metadata, train=train, run=state.get("run"))


def load_partial_epoch(directory: Location) -> dict[str, Any] | None:
    """Returns the row in a checkpoint's `closing.json`, or `None` if it is missing or damaged; then the epoch is closed again."""
    try:
        document = read_document(directory / PARTIAL_EPOCH_FILE)
        row = {name: document[name] for name in ("epoch", "logs", "earlier")}
    except (CheckpointError, KeyError):
        return None
    for name in ("logs", "earlier"):
        row[name] = {key: _array_of(value) if isinstance(value, list) else value for key, value in row[name].items()}
    return row


def _array_of(value: list[Any]) -> Any:
    """Returns a list of float32 values as an array, and any other list unchanged."""
    try:
        array = np.asarray(value)
    except ValueError:  # The rows have different lengths.
        return value
    if array.dtype.kind != "f":
        return value
    with np.errstate(over="ignore"):
        single = array.astype(np.float32)
    return single if np.array_equal(single, array, equal_nan=True) else value


# --- Reading by several processes ---

Found = TypeVar("Found", Saved, Saved | None)


@dataclasses.dataclass(frozen=True)
class CollectiveRead:
    """A search for a checkpoint by all processes: which pieces this process verifies, and the steps of checkpoints that any process found damaged."""

    share: Share
    damaged: set[int]


def read_collectively(find: Callable[[CollectiveRead | None], Found], *, num_processes: int) -> Found:
    """Returns what `find` finds, the same checkpoint in all processes. All of them must call it; process 0 searches before the others.

    Each process first reads its share of the pieces of split arrays, so that every piece is verified. When the state is placed on devices, it
    reads the other pieces that it needs. If another process has found damage, `find` is called again, with a warning. With one process, it gets `None` and
    reads everything. Raises `CheckpointError` if it fails in one of them, or they find different checkpoints.
    """
    if num_processes == 1:
        return find(None)
    together = CollectiveRead((jax.process_index(), num_processes), set())
    while True:
        saved: Found
        saved, fault = after_first(functools.partial(_attempt, find, together))
        metadata: dict[str, Any] = {} if saved is None else saved.metadata
        local_result = {"step": metadata.get("step"), "digest": metadata.get("digest")}  # Only weights have a digest, because they have no step.
        results = exchange({**local_result, "damaged": sorted(together.damaged), "fault": None if fault is None else str(fault)}, "what to resume")
        if fault is not None:
            raise fault
        faults = [f"process {process}: {each['fault']}" for process, each in enumerate(results) if each["fault"] is not None]
        if faults:
            raise CheckpointError(f"Nothing was restored, because another process could not read the checkpoint: {'; '.join(faults)}")
        steps = {process: each["step"] for process, each in enumerate(results)}
        if len(set(steps.values())) == 1:
            differing = ", ".join(str(process) for process, each in enumerate(results) if each["digest"] != results[0]["digest"])
            if differing:
                raise CheckpointError(
                    f"The processes found different weights: those of process {differing} differ from those of process 0. Give all processes the same files."
                )
            return saved
        newest = max(step for step in steps.values() if step is not None)
        if any(each["step"] != newest and newest not in each["damaged"] for each in results):
            raise CheckpointError(f"The processes found different checkpoints. Use one directory that all processes share. Steps by process: {steps}.")
        damaged = {step for each in results for step in each["damaged"]} - together.damaged
        if damaged:
            warn(f"Another process found that the checkpoints of these steps are damaged, so they are skipped: {sorted(damaged)}.")
        together.damaged.update(damaged)


def _attempt(find: Callable[[CollectiveRead | None], Any], together: CollectiveRead) -> tuple[Any, CheckpointError | None]:
    try:
        return find(together), None
    except CheckpointError as error:
        return None, error
