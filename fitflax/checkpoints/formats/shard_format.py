"""The backend `shards`: a state that is split between processes, in a bucket. Each process uploads its own pieces of arrays; the rest is as in `msgpack`.

A process's pieces are concatenated in parts, `shards-RANDOM.p00001.00000` and so on. `shards-RANDOM.p00001.json` is the index: which piece of which array
begins where, with its crc32. A piece that several devices hold is uploaded once. `metadata.json` gets `shards`: the stem of the names, the shape and dtype
of each array, and size and crc32 of the indexes. In `state.msgpack`, these arrays are `None`.
"""

import functools
import json
import secrets
import zlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

import fitflax.checkpoints.formats.msgpack_format as msgpack_format
from fitflax.checkpoints.collective_save import CollectiveSave, Files
from fitflax.checkpoints.formats.plain_tree import Plain, keys_of, map_leaves, walk
from fitflax.checkpoints.formats.split_array import PieceFile, Region, Share, SplitArray
from fitflax.checkpoints.memory import bytes_of
from fitflax.errors import CheckpointError, CorruptCheckpointError
from fitflax.leaves import listed
from fitflax.parallel.host_memory import is_spread
from fitflax.storage import Location, ObjectPath
from fitflax.storage.parts import PartsWriter

__all__ = ["FILES", "OWN_KEYS", "read_state", "write_own_shards", "write_state"]

FILES = ()  # Their names are random.
OWN_KEYS: dict[str, type] = {**msgpack_format.OWN_KEYS, "shards": dict}


def write_state(directory: ObjectPath, train: Plain, run: Plain, *, collective: CollectiveSave) -> dict[str, Any]:
    """Uploads the state while the other processes call `write_own_shards`, and returns the entries that `read_state` needs in `metadata.json`."""
    arrays = {path: {"shape": list(leaf.shape), "dtype": leaf.dtype.name} for path, leaf in walk(train.tree, "train") if is_spread(leaf)}
    rest = map_leaves(train.tree, "train", lambda path, leaf: None if path in arrays else leaf)
    own = msgpack_format.write_state(directory, Plain(rest, train.key_impls), run)
    stem = f"shards-{secrets.token_hex(4)}"
    mine: Files = {}
    others = collective.write(directory / stem, lambda path: mine.update(write_own_shards(path, train)))
    return {**own, "shards": {"stem": stem, "arrays": arrays, "indexes": dict(sorted({**others, **mine}.items()))}}


def write_own_shards(path: ObjectPath, train: Plain) -> Files:
    """Uploads this process's pieces of split arrays, and returns its index.

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
                pieces.append({"path": name, "index": Region.of(shard.index, leaf.shape).bounds, "at": offset, "bytes": len(data), "crc32": zlib.crc32(data)})
                parts.send([data])
                offset += len(data)
        parts.close()
    document = json.dumps({"pieces": pieces, "part_bytes": parts.part_bytes, "bytes": offset}).encode()
    (directory / f"{stem}.json").write_bytes(document)
    return {f"{stem}.json": {"bytes": len(document), "crc32": zlib.crc32(document)}}


def read_state(directory: Location, metadata: Mapping[str, Any], *, roots: Collection[str] = ("train", "run"), share: Share | None = None) -> dict[str, Any]:
    """Returns the roots, as `checkpoint_files.read_state` does, with arrays assembled from their pieces.

    If `share` is given, as the index of this process and the number of processes that read together, split arrays are `SplitArray`s, from which each
    process later reads what it needs. All pieces are verified now, each by one process, which keeps them.
    """
    state = msgpack_format.read_state(directory, metadata, roots=roots)
    try:
        arrays = _read_split(directory, metadata["shards"], roots, share)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{directory} could not be read: {str(error).rstrip('.')}.") from error
    for path, leaf in arrays.items():
        *parents, last = keys_of(path)
        functools.reduce(lambda node, key: node[key], parents, state)[last] = leaf
    return state


def _read_split(directory: Location, shards: Mapping[str, Any], roots: Collection[str], share: Share | None) -> dict[str, Any]:
    forms = shards["arrays"]
    wanted = {path: form for path, form in forms.items() if f"{path}/".startswith(tuple(f"{root}/" for root in roots))}
    files = [PieceFile(directory, name, entry) for name, entry in shards["indexes"].items()] if wanted else []
    arrays = {path: SplitArray(path, form["shape"], np.dtype(form["dtype"]), files) for path, form in wanted.items()}
    lacking = sorted(path for path, array in arrays.items() if array.num_missing_bytes)
    if lacking:
        raise CorruptCheckpointError(f"{directory} is damaged: pieces of these arrays are missing: {listed(lacking, most=3)}.")
    process, count = share or (0, 1)
    leaves: dict[str, Any] = dict(arrays) if share else {path: np.empty(array.shape, array.dtype) for path, array in arrays.items()}
    for file in files[process::count]:
        for path, region, data in file.read_in_order({path: array.dtype for path, array in arrays.items()}):
            if share:
                arrays[path].keep(region, data)
            else:
                leaves[path][region.slices] = data
    return leaves
