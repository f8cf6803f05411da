"""The backend `msgpack`: a state as one stream of bytes, `state.msgpack`.

The file is one map with the roots `train` (the TrainState as returned by `flax.serialization.to_state_dict`) and `run` (epoch sums, states of callbacks
and loaders; its lists and tuples are msgpack arrays, because they are read without a target). Its bytes are those of
`flax.serialization.msgpack_serialize`, including chunks for arrays above 2^30 bytes, so `msgpack_restore` can read it. Reading executes no code.

`metadata.json` gets `arrays` (`{path: {shape, dtype, crc32}}`), `structure_crc32` (of all bytes of `state.msgpack` that are not array data: keys, types,
shapes, dtypes and the values of all other leaves) and `state_bytes`. In an object store, the stream is in parts, `state-RANDOM.00000` and so on, and
`metadata.json` gets `state_parts` (`{stem, bytes}`).
"""

import io
import os
import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from fitflax.checkpoints.formats.msgpack_codec import FileSink, Reader, Writer
from fitflax.checkpoints.formats.plain_tree import Plain
from fitflax.errors import CheckpointError, CorruptCheckpointError
from fitflax.storage import Location, ObjectPath
from fitflax.storage.parts import PartsReader, PartsWriter, part_name, size_fault

__all__ = ["FILES", "OWN_KEYS", "PART", "STATE_FILE", "read_state", "write_state"]

STATE_FILE = "state.msgpack"
FILES = (STATE_FILE,)
PART = re.compile(r"(?P<stem>(?:state|shards)-[0-9a-f]{8})(?:\.p\d{5})?\.(?:\d{5,}|json)")
"""The names of parts and indexes in an object store. Each save has its own stem, so saves cannot overwrite each other."""
OWN_KEYS: dict[str, type] = {"arrays": dict, "structure_crc32": int, "state_bytes": int}


def write_state(directory: Location, train: Plain, run: Plain) -> dict[str, Any]:
    """Writes `state.msgpack` to the disk or an object store, and returns the entries that `read_state` needs in `metadata.json`."""
    tree, more = {"train": train.tree, "run": run.tree}, {}
    if isinstance(directory, ObjectPath):
        stem = f"state-{secrets.token_hex(4)}"
        with PartsWriter(directory, stem) as parts, Writer(parts.send) as writer:
            writer.write(tree)
            parts.close()
        more = {"state_parts": {"stem": stem, "bytes": parts.part_bytes}}
    else:
        with open(directory / STATE_FILE, "wb", buffering=0) as file, Writer(FileSink(file.fileno()).send) as writer:
            writer.write(tree)
            os.fsync(file.fileno())
    return {"arrays": writer.arrays, "structure_crc32": writer.structure_crc32, "state_bytes": writer.num_bytes, **more}


def read_state(directory: Location, metadata: Mapping[str, Any], *, roots: Collection[str] = ("train", "run")) -> dict[str, Any]:
    """Returns the roots of `state.msgpack`, as `checkpoint_files.read_state` does.

    The structure of the whole file is verified, and the data of all returned arrays; other arrays are skipped.
    """
    path = directory / STATE_FILE
    try:
        with _opened(directory, metadata) as file, Reader(file, path, metadata["state_bytes"], metadata["arrays"], roots) as reader:
            tree = reader.read(metadata["structure_crc32"])
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{error.filename or path} is missing.") from error
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error.strerror}.") from error
    names = dict.fromkeys(root.split("/", 1)[0] for root in roots)
    unknown = sorted(set(names) - set(tree))
    if unknown:
        raise CheckpointError(f"{path} has no root {', '.join(map(repr, unknown))}, only {sorted(tree)}.")
    return {name: tree[name] for name in names}


def _opened(directory: Location, metadata: Mapping[str, Any]) -> io.BufferedReader:
    """Returns the state as a file open for reading, after a check of its size."""
    expected, parts = metadata["state_bytes"], metadata.get("state_parts")
    if parts is None and not isinstance(directory, ObjectPath):
        file = open(directory / STATE_FILE, "rb")  # noqa: SIM115 (the caller closes it)
        try:
            _check_sizes(size_fault(directory / STATE_FILE, os.fstat(file.fileno()).st_size, expected))
        except BaseException:
            file.close()
            raise
        return file
    if parts is None:  # A local checkpoint that was copied into a bucket.
        stream = PartsReader(directory, lambda index: STATE_FILE, part_bytes=max(expected, 1), num_bytes=expected)
    elif not isinstance(parts, dict) or not isinstance(parts.get("bytes"), int) or parts["bytes"] < 1 or not isinstance(parts.get("stem"), str):
        raise CorruptCheckpointError(f"{directory} is damaged: state_parts in its metadata is invalid: {parts}.")
    else:
        stream = PartsReader(directory, lambda index: part_name(parts["stem"], index), part_bytes=parts["bytes"], num_bytes=expected)
    try:
        _check_sizes(stream.faults())
    except BaseException:
        stream.close()
        raise
    return io.BufferedReader(stream, buffer_size=2**20)


def _check_sizes(faults: list[str]) -> None:
    if faults:
        raise CorruptCheckpointError(" ".join(faults[:3]))
