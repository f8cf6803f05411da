"""`ObjectPath`: a location in a bucket, with the method names of `pathlib.Path`."""

import errno
import io
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from fitflax.storage.objects import Bucket, ObjectInfo

__all__ = ["ObjectPath"]


class _Status(NamedTuple):
    st_size: int
    st_mtime: float


class ObjectPath(os.PathLike[str]):
    """A location in a bucket: an object, or everything below a prefix. The key has no slashes at its ends, and is `""` for the bucket itself."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self.bucket = bucket
        self.key = key

    def __fspath__(self) -> str:
        return f"{self.bucket.url}/{self.key}" if self.key else self.bucket.url

    __str__ = __fspath__

    def __repr__(self) -> str:
        return f"<ObjectPath {self}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(self.bucket, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last part of the name."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        """The location directly above."""
        return ObjectPath(self.bucket, self.key.rpartition("/")[0])

    def exists(self) -> bool:
        """Returns whether the object exists, or anything below it."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Returns whether the object exists."""
        return self.bucket.info(self.key) is not None

    def is_dir(self) -> bool:
        """Returns whether there are objects below it."""
        return not self.bucket.is_empty(f"{self.key}/")

    def objects(self) -> Iterator[ObjectInfo]:
        """Yields all objects below it."""
        return self.bucket.list(f"{self.key}/")

    def named_objects(self) -> Iterator[tuple[str, ObjectInfo]]:
        """Yields all objects below it, with their names relative to it."""
        begin = len(self.key) + 1 if self.key else 0
        return ((found.key[begin:], found) for found in self.objects())

    def iterdir(self) -> Iterator["ObjectPath"]:
        """Yields the locations directly below it."""
        for name in dict.fromkeys(name.partition("/")[0] for name, _ in self.named_objects()):
            yield self / name

    def stat(self) -> _Status:
        """Returns the size of an object in bytes, and when it was written. Raises `FileNotFoundError` if there is none."""
        found = self.bucket.info(self.key)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return _Status(found.size, found.modified)

    def read_bytes(self) -> bytes:
        """Returns the contents of an object."""
        return self.bucket.read(self.key)[0]

    def open(self, mode: str = "rb") -> io.BytesIO:
        """Returns an object as a file open for reading."""
        assert mode == "rb", mode
        return io.BytesIO(self.read_bytes())

    def write_bytes(self, data: Any) -> None:
        """Writes an object atomically."""
        self.bucket.write(self.key, data)

    def unlink(self, missing_ok: bool = True) -> None:
        """Deletes an object."""
        self.bucket.delete([self.key])
