"""Finds and reads a checkpoint by its path, whichever library wrote it."""

import contextlib
import itertools
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fitflax.checkpoints.collective_read import CollectiveRead
from fitflax.checkpoints.formats.checkpoint_files import METADATA_FILE, WHOLE, Saved, is_checkpoint, read_checkpoint
from fitflax.checkpoints.formats.foreign import read_foreign
from fitflax.checkpoints.formats.weight_files import INDEX_SUFFIX, SUFFIX, find_weights
from fitflax.checkpoints.restore.weights import saved_weights
from fitflax.checkpoints.store.checkpoint_store import CheckpointStore
from fitflax.checkpoints.store.local_files import disk_errors, replaced_by
from fitflax.errors import CheckpointError, CheckpointNotFoundError, warn
from fitflax.storage import Location, ObjectPath, locate

__all__ = ["load_checkpoint"]

_MOST_NAMED = 5  # Directories, in an error.


def load_checkpoint(
    path: str | os.PathLike[str], roots: Collection[str] = WHOLE, *, storage_options: Mapping[str, Any] | None = None, together: CollectiveRead | None = None
) -> Saved:
    """Returns a verified checkpoint of fitflax, or as far as possible one of Orbax or `flax.training.checkpoints`, or safetensors weights.

    `path` is a checkpoint, or a directory of checkpoints, of which the newest intact one is used, with a warning if newer ones fail their checks; or the URL of
    either. `roots` are the parts to read, as in `checkpoint_files.read_checkpoint`.
    """
    path = locate(path, owner="The path of a checkpoint", error=CheckpointError, options=storage_options)
    with disk_errors("read", path):
        if path.name.endswith((SUFFIX, INDEX_SUFFIX)) and not path.is_dir():
            weights = find_weights(path)
            assert weights is not None
            return saved_weights(weights)[0]
        if is_checkpoint(path):
            return read_checkpoint(path, roots, share=None if together is None else together.share)
    try:
        return _newest_good_in(path, roots, together)
    except CheckpointNotFoundError:
        foreign = None if isinstance(path, ObjectPath) else read_foreign(path)
        # Weights next to damaged checkpoints are not a substitute for them.
        weights = find_weights(path) if foreign is None and not (path.is_dir() and CheckpointStore(path).steps()) else None
        if weights is not None:
            return saved_weights(weights)[0]
        if foreign is None:
            raise
    train, metadata = foreign
    return Saved(path=Path(metadata["path"]), metadata=metadata, train=train, run={})


def _newest_good_in(path: Location, roots: Collection[str], together: CollectiveRead | None) -> Saved:
    if isinstance(path, Path) and not path.is_dir():
        aside = "".join(f" An unfinished save set an earlier one aside as {entry}. To use it, rename it." for entry in replaced_by(path))
        raise CheckpointNotFoundError(f"There is no checkpoint at {path}: {'it is a file' if path.exists() else 'no such directory'}.{aside}")
    saved, skipped = CheckpointStore(path).newest_good(roots, together=together)
    if saved is None:
        faults = "".join(f" {error}" for error in skipped)
        names = f"{METADATA_FILE} or an intact step_* directory"
        below = list(itertools.islice(_stores_in(path), _MOST_NAMED)) if isinstance(path, Path) else []
        hint = f" Pass one of its subdirectories that contain checkpoints: {', '.join(below)}." if below else ""
        raise CheckpointNotFoundError(f"There is no checkpoint in {path}: looked for {names}.{hint}{faults}")
    if skipped:
        warn(f"Using {saved.path}, because newer checkpoints cannot be read. {' '.join(map(str, skipped))}")
    return saved


def _stores_in(path: Path) -> Iterator[str]:
    """Yields the names of subdirectories that contain checkpoints; unreadable ones are skipped."""
    for child in sorted(path.iterdir()):
        with contextlib.suppress(OSError, CheckpointError):
            if child.is_dir() and CheckpointStore(child).steps():
                yield child.name
