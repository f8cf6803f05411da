"""The backend `msgpack`: a state as one file, `state.msgpack`, how it is written, and how it is read and verified.

The file is one map with the roots `train` (the TrainState, as `flax.serialization.to_state_dict` makes it) and `run` (epoch sums, callbacks' and loaders'
states; its lists and tuples are msgpack arrays, since they are read without a target). It holds the very bytes that `flax.serialization.msgpack_serialize`
would write, arrays above 2^30 bytes in chunks included, so `msgpack_restore` reads it. Nothing in it is executed.

`metadata.json` gets `arrays` (`{path: {shape, dtype, crc32}}`), `structure_crc32` (all bytes of `state.msgpack` that are not array data: keys, types, shapes,
dtypes and the values of all other leaves) and `state_bytes`.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fitflax.checkpoints.codec import Reader, Writer
from fitflax.checkpoints.trees import Plain
from fitflax.errors import CheckpointError, CorruptCheckpointError

__all__ = ["FILES", "OWN_KEYS", "STATE_FILE", "read_state", "write_state"]

STATE_FILE = "state.msgpack"
FILES = (STATE_FILE,)
OWN_KEYS: dict[str, type] = {"arrays": dict, "structure_crc32": int, "state_bytes": int}


def write_state(directory: Path, train: Plain, run: Plain) -> dict[str, Any]:
    """Writes `state.msgpack`, to the disk, and returns what `read_state` wants to find in `metadata.json`.

    Args:
        directory: An existing directory.
        train: The TrainState.
        run: Everything else that a resume needs.

    Raises:
        OSError: The disk is full or fails.

    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_state(Path(directory), Plain({"w": np.ones(2)}, {}), Plain(None, {}))
    {'arrays': {'train/w': {'shape': [2], 'dtype': 'float64', 'crc32': 2946827343}}, 'structure_crc32': 2479178528, 'state_bytes': 47}
    """
    with open(directory / STATE_FILE, "wb", buffering=0) as file, Writer(file.fileno()) as writer:
        writer.write({"train": train.tree, "run": run.tree})
        os.fsync(file.fileno())
    return {"arrays": writer.arrays, "structure_crc32": writer.structure_crc32, "state_bytes": writer.num_bytes}


def read_state(directory: Path, metadata: Mapping[str, Any], *, roots: Collection[str] = ("train", "run")) -> dict[str, Any]:
    """Returns the roots of `state.msgpack` as nested dicts and lists of NumPy arrays and Python values, verified.

    The structure of the whole file is verified, and the data of every array that is returned; other arrays are skipped. Typed keys come as key data.

    Args:
        directory: A checkpoint directory.
        metadata: Its verified `metadata.json`.
        roots: Which roots to read, or parts of them by their paths.

    Raises:
        CorruptCheckpointError: The file is missing, empty, cut, too long, or fails a check; the message names the array.
        CheckpointError: The disk fails, or there is no such root.

    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     metadata = write_state(Path(directory), Plain({"w": np.ones(2)}, {}), Plain({"n": 3}, {}))
    ...     read_state(Path(directory), metadata, roots=["run"])
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
            with Reader(file, path, num_bytes, metadata["arrays"], roots) as reader:
                tree = reader.read(metadata["structure_crc32"])
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{path} is missing.") from error
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error.strerror}.") from error
    names = dict.fromkeys(root.split("/", 1)[0] for root in roots)
    unknown = sorted(set(names) - set(tree))
    if unknown:
        raise CheckpointError(f"{path} has no root {', '.join(map(repr, unknown))}, only {sorted(tree)}.")
    return {name: tree[name] for name in names}
