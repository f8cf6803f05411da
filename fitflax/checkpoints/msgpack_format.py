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

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fitflax.checkpoints.codec import Reader, Writer
from fitflax.checkpoints.documents import fsync_directory, given_values, library_versions, read_document, write_document
from fitflax.checkpoints.trees import to_state_dict
from fitflax.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from fitflax.state import PyTree

__all__ = ["METADATA_FILE", "STATE_FILE", "read_metadata", "read_state", "write_checkpoint"]

METADATA_FILE = "metadata.json"
STATE_FILE = "state.msgpack"
_OWN_KEYS = {"arrays": dict, "key_impls": dict, "structure_crc32": int, "state_bytes": int}


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

    >>> import math, tempfile
    >>> import jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_checkpoint(Path(directory), train={"w": jnp.ones(2)}, run={"rows": [1, 2]}, metadata={"step": 5, "metrics": {"train": {"loss": math.inf}}})
    ...     metadata = read_metadata(Path(directory))
    ...     read_state(Path(directory), metadata), metadata["metrics"]
    ({'train': {'w': array([1., 1.], dtype=float32)}, 'run': {'rows': [1, 2]}}, {'train': {'loss': inf}})
    """
    train_dict, train_impls = to_state_dict(train, root="train")
    run_dict, run_impls = to_state_dict(run, root="run", keep_lists=True)
    given_values(metadata, {"format_version", "crc32", *_OWN_KEYS})  # A fault in the metadata comes before any work.
    with open(directory / STATE_FILE, "wb") as state_file:
        writer = Writer(state_file)
        writer.node({"train": train_dict, "run": run_dict}, "")
        state_file.flush()
        os.fsync(state_file.fileno())
    own = {"arrays": writer.arrays, "key_impls": {**train_impls, **run_impls}, "structure_crc32": writer.structure_crc32, "state_bytes": writer.num_bytes}
    versions = {**library_versions(), **metadata.get("versions", {})}
    write_document(directory / METADATA_FILE, {**metadata, "versions": versions, **own})
    fsync_directory(directory)


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

    >>> import math, tempfile
    >>> import jax.numpy as jnp
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
            reader = Reader(file, path, num_bytes, metadata["arrays"], roots)
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
