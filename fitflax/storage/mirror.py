"""A local directory of growing files, mirrored to a bucket. Objects cannot grow, so each changed file is uploaded whole."""

import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from fitflax.storage.object_path import ObjectPath

__all__ = ["PUSH_SECONDS", "Mirror"]

PUSH_SECONDS = 30.0
"""How often changed files are uploaded during a run."""


class Mirror:
    """A temporary directory whose files are uploaded to a location in a bucket. Methods raise `OSError` if the store or the disk fails."""

    def __init__(self, place: ObjectPath) -> None:
        self.place = place
        self.directory = Path(tempfile.mkdtemp(prefix="fitflax-"))
        # Sizes and modification times of uploaded files, by name.
        self._pushed: dict[str, tuple[int, int]] = {}
        self._last_push = time.monotonic()
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)

    def pull(self, wanted: Callable[[str], bool]) -> None:
        """Downloads the files for whose names `wanted` returns true."""
        for name, info in self.place.named_objects():
            if wanted(name):
                path = self.directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.place.bucket.read(info.key)[0])
                self._pushed[name] = _state_of(path)

    def push(self) -> None:
        """Uploads changed files, and deletes removed ones from the bucket."""
        self._last_push = time.monotonic()
        present = {path.relative_to(self.directory).as_posix(): path for path in sorted(self.directory.rglob("*")) if path.is_file()}
        for name, path in present.items():
            state = _state_of(path)
            if self._pushed.get(name) != state:
                (self.place / name).write_bytes(path.read_bytes())
                self._pushed[name] = state
        gone = [name for name in self._pushed if name not in present]
        self.place.bucket.delete([(self.place / name).key for name in gone])
        for name in gone:
            del self._pushed[name]

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next upload."""
        return time.monotonic() - self._last_push > PUSH_SECONDS

    def close(self) -> None:
        """Deletes the temporary directory."""
        self._finalizer()


def _state_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
