"""The contents of one checkpoint directory: `metadata.json`, and the state in the files of one of several backends.

`metadata.json` is for people and listings. It holds `format_version`, what the caller passes, `versions`, `backend` (the writer of the state), `key_impls`
(typed keys are stored as key data), `integer_keys` if dicts have integer keys, what the backend needs to verify its files, and last the `crc32` of the
compact JSON of everything before it. See `fitflax.checkpoints.formats.json_documents` for numbers and strings, and `docs/checkpoint-format.md` for the
bytes. `fitflax.checkpoints.store.checkpoint_store` decides which checkpoints exist and when they are deleted.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

import fitflax.checkpoints.formats.msgpack_format as msgpack_format
import fitflax.checkpoints.formats.orbax_format as orbax_format
import fitflax.checkpoints.formats.shard_format as shard_format
from fitflax.checkpoints.collective_save import CollectiveSave, Files
from fitflax.checkpoints.formats.json_documents import document_bytes, fsync_directory, given_values, library_versions, read_document, write_given
from fitflax.checkpoints.formats.msgpack_format import STATE_FILE
from fitflax.checkpoints.formats.plain_tree import Plain, leaves_of, to_plain
from fitflax.checkpoints.formats.split_array import Share
from fitflax.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from fitflax.parallel.host_memory import is_spread
from fitflax.state import PyTree
from fitflax.storage import Location, ObjectPath

__all__ = [
    "BACKENDS",
    "FOR_INFERENCE",
    "METADATA_FILE",
    "WHOLE",
    "Saved",
    "check_backend",
    "is_checkpoint",
    "read_checkpoint",
    "read_metadata",
    "read_state",
    "write_checkpoint",
    "write_own_shards",
]

METADATA_FILE = "metadata.json"
_OWN_KEYS = {"backend": str, "key_impls": dict}


# Each has `write_state`, which creates `FILES` and returns entries for `metadata.json`, whose names and types are `OWN_KEYS`; and `read_state`.
BACKENDS: dict[str, ModuleType] = {"msgpack": msgpack_format, "shards": shard_format, "orbax": orbax_format}


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint as read from its directory, verified.

    Attributes:
        path: The directory.
        metadata: The result of `read_metadata`.
        train: The TrainState as nested dicts of NumPy arrays, for `restore.fit.restore_tree`. If several processes read it together, split arrays are
            instances of `SplitArray`.
        run: Everything else, for `restore.fit.from_saved`; `None` if it was not read.

    >>> from pathlib import Path
    >>> Saved(path=Path("runs/a/step_00000040"), metadata={"step": 40}, train={}, run={}).metadata["step"]
    40
    """

    path: Location
    metadata: dict[str, Any]
    train: Any
    run: Any


WHOLE = ("train", "run")
# What evaluation and prediction need: neither optimizer nor run.
FOR_INFERENCE = ("train/step", "train/params", "train/model_state", "train/ema_params")


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
        backend: The writer of the state, one of `BACKENDS`. If arrays of `train` are split over devices, Orbax is used in any case.
        collective: The collective save that this process leads, if any; arrays of `train` may then be split between processes.
        commit: Writes `metadata.json` in a bucket, which makes the objects a checkpoint.
    """
    if backend not in BACKENDS:
        check_backend(backend)
    plain_train, plain_run = to_plain(train, root="train", may_span=collective is not None), to_plain(run, root="run", keep_lists=True)
    if commit is None and any(map(is_spread, leaves_of(plain_train.tree))):
        backend = "orbax"
    # Checked before anything is written.
    given = given_values(metadata, {"format_version", "crc32", "integer_keys"}.union(_OWN_KEYS, *(each.OWN_KEYS for each in BACKENDS.values())))
    own = BACKENDS[backend].write_state(directory, plain_train, plain_run, **({} if collective is None else {"collective": collective}))
    versions = {**library_versions(), **given.get("versions", {})}
    key_impls = {**plain_train.key_impls, **plain_run.key_impls}
    integers = {"integer_keys": list(plain_train.integer_keys)} if plain_train.integer_keys else {}
    ours = given_values({"backend": backend, "key_impls": key_impls, **integers, **own}, set())
    document = {**given, "versions": versions, **ours}
    if isinstance(directory, ObjectPath):
        assert commit is not None
        commit(document_bytes(document))
        return
    write_given(directory / METADATA_FILE, document)
    fsync_directory(directory)


def write_own_shards(place: Location, train: Plain) -> Files:
    """Writes this process's shards of split arrays where the leader of a collective save says, and returns the files."""
    return shard_format.write_own_shards(place, train) if isinstance(place, ObjectPath) else orbax_format.write_own_shards(place, train)


_CHOICES = ("msgpack", "orbax")  # What users choose; "shards" is chosen automatically.


def check_backend(backend: str) -> None:
    """Raises `CheckpointError` if there is no such backend."""
    if backend not in _CHOICES:
        raise CheckpointError(f"backend must be {' or '.join(map(repr, _CHOICES))}. Received: {backend!r}.")


def read_metadata(directory: Location) -> dict[str, Any]:
    """Returns the verified `metadata.json` of a checkpoint directory, with non-finite numbers as floats.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        CorruptCheckpointError: The file is missing, empty, not JSON, or differs from what was written.
        CheckpointError: It was written by a newer fitflax or an unknown backend, or the disk fails.
    """
    path = directory / METADATA_FILE
    try:
        if not isinstance(directory, ObjectPath) and not directory.is_dir():
            raise _no_directory(directory)
        document = read_document(path)
    except CorruptCheckpointError as error:
        if isinstance(directory, ObjectPath) and isinstance(error.__cause__, FileNotFoundError) and not directory.is_dir():
            raise _no_directory(directory) from error
        raise
    _check_keys(document, _OWN_KEYS, path)
    backend = document["backend"]
    if backend not in BACKENDS:
        raise CheckpointError(
            f"{path} has the backend {backend!r}, but this version of fitflax reads {', '.join(map(repr, BACKENDS))}. Use the version that wrote it."
        )
    _check_keys(document, BACKENDS[backend].OWN_KEYS, path)
    return document


def _no_directory(directory: Location) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"There is no checkpoint directory {directory}{' (it is a file)' if directory.exists() else ''}.")


def read_state(directory: Location, metadata: Mapping[str, Any], *, roots: Collection[str] = ("train", "run"), share: Share | None = None) -> dict[str, Any]:
    """Returns the roots of a state as nested dicts and lists of NumPy arrays and Python values, verified. Typed keys are key data.

    `roots` are the roots to read, or paths below them such as `train/params`. Other arrays are skipped and `None`. `share` is as in
    `shard_format.read_state`; in other formats, each process reads everything. If a check fails, the message of `CorruptCheckpointError` names the array.
    """
    backend = metadata["backend"]
    options = {"share": share} if backend == "shards" else {}
    state: dict[str, Any] = BACKENDS[backend].read_state(directory, metadata, roots=roots, **options)
    return state


def _check_keys(document: Mapping[str, Any], keys: Mapping[str, type], path: Location) -> None:
    lacking = sorted(key for key, kind in keys.items() if not isinstance(document.get(key), kind))
    if lacking:
        raise CorruptCheckpointError(f"{path} is damaged: it lacks {', '.join(lacking)}.")


def read_checkpoint(path: Location, roots: Collection[str] = WHOLE, *, share: Share | None = None) -> Saved:
    """Returns the checkpoint in a directory, verified. `roots` are `WHOLE` or `FOR_INFERENCE`; all other arrays are neither read nor verified."""
    metadata = read_metadata(path)
    state = read_state(path, metadata, roots=roots, share=share)
    train = state["train"]
    if "train" not in roots:
        names = {root.partition("/")[2] for root in roots}
        train = {name: tree for name, tree in train.items() if name in names}
    return Saved(path=path, metadata=metadata, train=train, run=state.get("run"))


def is_checkpoint(path: Location) -> bool:
    """Returns whether a path looks like a checkpoint of fitflax, intact or damaged."""
    # One of the files is enough, so that a damaged checkpoint is reported as such.
    return any((path / name).is_file() for name in (METADATA_FILE, STATE_FILE))
