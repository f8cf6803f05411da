"""What is in one checkpoint directory: `metadata.json`, and the state in the files of one of several backends.

`metadata.json` is for people and listings: `format_version`, what the caller gave, `versions`, `backend` (who wrote the state), `key_impls` (typed keys are
stored as key data), what the backend needs to verify its files, and last `crc32` of the compact JSON of all before it. `fitflax.checkpoints.documents` has its
rules for numbers and strings; `docs/checkpoint-format.md` describes it all byte by byte.

Which directories there are, and when one may go, is `fitflax.checkpoints.store`'s concern.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import fitflax.checkpoints.msgpack_format as msgpack_format
import fitflax.checkpoints.orbax_format as orbax_format
from fitflax.checkpoints.documents import fsync_directory, given_values, library_versions, read_document, write_given
from fitflax.checkpoints.joint import JointSave
from fitflax.checkpoints.trees import Plain, leaves_of, to_plain
from fitflax.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from fitflax.parallel.host_memory import is_spread
from fitflax.state import PyTree

__all__ = ["BACKENDS", "METADATA_FILE", "check_backend", "read_metadata", "read_state", "write_checkpoint"]

METADATA_FILE = "metadata.json"
_OWN_KEYS = {"backend": str, "key_impls": dict}


class Backend(NamedTuple):
    """How a state is written and read; `own_keys` are the names and types of what `write_state` wants in `metadata.json`, `files` what it makes."""

    write_state: Callable[..., dict[str, Any]]
    read_state: Callable[..., dict[str, Any]]
    own_keys: dict[str, type]
    files: Collection[str]


BACKENDS = {
    "msgpack": Backend(msgpack_format.write_state, msgpack_format.read_state, msgpack_format.OWN_KEYS, msgpack_format.FILES),
    "orbax": Backend(orbax_format.write_state, orbax_format.read_state, orbax_format.OWN_KEYS, orbax_format.FILES),
}


def write_checkpoint(
    directory: Path,
    *,
    train: PyTree | Plain,
    run: PyTree | Plain,
    metadata: Mapping[str, Any],
    backend: str = "msgpack",
    joint: JointSave | None = None,
) -> None:
    """Writes a checkpoint and returns when all its files, and the directory, are on the disk.

    Args:
        directory: An existing directory; whoever calls this renames it into place afterwards.
        train: The TrainState.
        run: Everything else that a resume needs.
        metadata: What people and listings want to know; JSON values and NumPy scalars. `versions` is added to, the names the format uses itself are refused.
        backend: Who writes the state, one of `BACKENDS`; if arrays of `train` are split over devices it is Orbax all the same, which writes them in parts.
        joint: The save that all processes make, with arrays of `train` that are split between them, if it is one. This process leads it.

    Raises:
        CheckpointError: A leaf or a value in `metadata` cannot be saved, or there is no such backend. Nothing is written then.
        OSError: The disk is full or fails.

    >>> import math, tempfile
    >>> import jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_checkpoint(Path(directory), train={"w": jnp.ones(2)}, run={"rows": [1, 2]}, metadata={"step": 5, "metrics": {"train": {"loss": math.inf}}})
    ...     metadata = read_metadata(Path(directory))
    ...     read_state(Path(directory), metadata), metadata["metrics"]
    ({'train': {'w': array([1., 1.], dtype=float32)}, 'run': {'rows': [1, 2]}}, {'train': {'loss': inf}})
    """
    check_backend(backend)
    plain_train, plain_run = to_plain(train, root="train", may_span=joint is not None), to_plain(run, root="run", keep_lists=True)
    if any(map(is_spread, leaves_of(plain_train.tree))):
        backend = "orbax"
    # A fault in the metadata comes before any work.
    given = given_values(metadata, {"format_version", "crc32"}.union(_OWN_KEYS, *(each.own_keys for each in BACKENDS.values())))
    # What is split between processes is split.
    own = BACKENDS[backend].write_state(directory, plain_train, plain_run, **({} if joint is None else {"joint": joint}))
    versions = {**library_versions(), **given.get("versions", {})}
    key_impls = {**plain_train.key_impls, **plain_run.key_impls}
    ours = given_values({"backend": backend, "key_impls": key_impls, **own}, set())
    write_given(directory / METADATA_FILE, {**given, "versions": versions, **ours})
    fsync_directory(directory)


def check_backend(backend: str) -> None:
    """Checks the name of a backend.

    Raises:
        CheckpointError: There is none of this name.
    """
    if backend not in BACKENDS:
        raise CheckpointError(f"There is no backend {backend!r} for checkpoints, only {', '.join(map(repr, BACKENDS))}.")


def read_metadata(directory: Path) -> dict[str, Any]:
    """Returns the verified `metadata.json` of a checkpoint directory, with non-finite numbers as floats.

    Args:
        directory: A checkpoint directory.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        CorruptCheckpointError: The file is missing, empty, not JSON, or differs from what was written by as much as one byte.
        CheckpointError: It was written by a newer fitflax, in a format or by a backend that this one does not know, or the disk fails.

    >>> read_metadata(Path("nowhere"))
    Traceback (most recent call last):
    fitflax.errors.CheckpointNotFoundError: There is no checkpoint directory nowhere.
    """
    path = directory / METADATA_FILE
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"There is no checkpoint directory {directory}{' (it is a file)' if directory.exists() else ''}.")
    document = read_document(path)
    _check_keys(document, _OWN_KEYS, path)
    backend = document["backend"]
    if backend not in BACKENDS:
        raise CheckpointError(f"{path} has the backend {backend!r}, but this fitflax reads {', '.join(map(repr, BACKENDS))}. Use the fitflax that wrote it.")
    _check_keys(document, BACKENDS[backend].own_keys, path)
    return document


def read_state(directory: Path, metadata: Mapping[str, Any], *, roots: Collection[str] = ("train", "run")) -> dict[str, Any]:
    """Returns the roots of a state as nested dicts and lists of NumPy arrays and Python values, verified. Typed keys come as key data.

    Args:
        directory: A checkpoint directory.
        metadata: What `read_metadata` returned for it.
        roots: Which roots to read, or parts of them by their paths, such as `train/params`; other arrays are skipped, and are `None`.

    Raises:
        CorruptCheckpointError: A file is missing, empty, cut, too long, or fails a check; the message names the array.
        CheckpointError: The disk fails, or there is no such root.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_checkpoint(Path(directory), train={"w": jnp.ones(2)}, run={"n": 3}, metadata={})
    ...     read_state(Path(directory), read_metadata(Path(directory)), roots=["run"])
    {'run': {'n': 3}}
    """
    return BACKENDS[metadata["backend"]].read_state(directory, metadata, roots=roots)


def _check_keys(document: Mapping[str, Any], keys: Mapping[str, type], path: Path) -> None:
    lacking = sorted(key for key, kind in keys.items() if not isinstance(document.get(key), kind))
    if lacking:
        raise CorruptCheckpointError(f"{path} is damaged: it lacks {', '.join(lacking)}.")
