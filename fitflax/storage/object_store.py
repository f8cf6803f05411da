"""Object stores through obstore: `Bucket`, with errors that name the object, the operation and the reason; and `ObjectPath`, a location in a bucket.

Failed requests are retried with growing pauses for up to `RETRY_SECONDS`, by obstore, and here if it does not. If the response to a conditional write is
lost, reading the object tells whether it succeeded, because the contents of such writes are unique. obstore is imported when a bucket is first used.
"""

import contextlib
import datetime as dt
import errno
import importlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from fitflax.errors import ConfigError

T = TypeVar("T")

RETRY_SECONDS = 120.0
"""How long a request is retried before it fails."""

_RETRY = {
    "max_retries": 30,
    "retry_timeout": dt.timedelta(seconds=RETRY_SECONDS),
    "backoff": {"init_backoff": dt.timedelta(milliseconds=100), "max_backoff": dt.timedelta(seconds=10), "base": 2},
}
_CLIENT = {"connect_timeout": "10s", "timeout": "60s"}
# Larger objects, such as weights, are multipart uploads, because the timeout applies to each request. Since version 0.12, obstore always aborts an upload
# that failed, so that no hidden parts remain.
_MAX_PUT_BYTES = 2**26
_PART_BYTES = 2**25
_PARTS_IN_FLIGHT = 4
# Stores report a missing bucket like a missing object.
_NO_BUCKET = re.compile(r"404 Not Found|NoSuchBucket|BucketNotFound|ContainerNotFound|The specified (bucket|container) does not exist", re.IGNORECASE)
_REFUSED = re.compile(
    "40[13] (?:Unauthorized|Forbidden)|AccessDenied|ExpiredToken|InvalidToken|TokenRefreshRequired|InvalidAccessKeyId|SignatureDoesNotMatch|"
    "AuthenticationFailed|invalid_grant"
)


class StorageError(OSError):
    """An object store failed or refused a request. It is an `OSError`, like failures of disks."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.EIO, text)
        self.text = text

    def __str__(self) -> str:
        return self.text


class ChangedError(StorageError):
    """The condition of a write does not hold: another process has written the object."""


class ObjectInfo(NamedTuple):
    """What a listing says about an object."""

    key: str
    st_size: int  # In bytes.
    st_mtime: float  # When it was written, in seconds since 1970 by the store's clock.
    tag: str  # Of the version.


class Bucket:
    """A bucket of an object store, or a container of Azure; arguments are those of `open_bucket` and obstore's store.

    All methods raise `StorageError` if the store fails.
    """

    def __init__(self, scheme: str, name: str, options: Mapping[str, Any], store: Any) -> None:
        self.url = f"{scheme}://{name}"
        self._opened_by = scheme, name, dict(options)
        self._store = store
        self._obstore: Any = importlib.import_module("obstore")

    def __reduce__(self) -> Any:
        """Pickles the arguments of `open_bucket`, so that the unpickling process uses its own credentials."""
        return open_bucket, self._opened_by

    def read(self, key: str) -> tuple[bytes, str]:
        """Returns an object, and the tag of its version. Raises `FileNotFoundError` if there is none."""
        with self._errors("read", key):
            result = self._obstore.get(self._store, key)
            return bytes(result.bytes()), _tag(result.meta)

    def read_range(self, key: str, begin: int, length: int) -> Any:
        """Returns a range of an object's bytes as a buffer, truncated at the object's end. Raises `FileNotFoundError` if there is no object."""
        with self._errors("read", key):
            return self._obstore.get_range(self._store, key, start=begin, length=length)

    def write(self, key: str, data: Any, *, create: bool = False, tag: str | None = None) -> str:
        """Writes a buffer atomically, and returns the tag of its version.

        With `create`, the object must not exist; with `tag`, it must have that version. Raises `ChangedError` otherwise.
        """
        mode: Any = "create" if create else None if tag is None else _version(tag)
        if mode is None:
            options = {"use_multipart": memoryview(data).nbytes > _MAX_PUT_BYTES, "chunk_size": _PART_BYTES, "max_concurrency": _PARTS_IN_FLIGHT}
            return self._with_retries("write", key, lambda: _tag(self._obstore.put(self._store, key, data, **options)))
        exceptions = self._obstore.exceptions

        def put() -> str:
            try:
                return _tag(self._obstore.put(self._store, key, data, mode=mode, use_multipart=False))
            except (exceptions.BaseError, OSError) as error:
                # The response to this or an earlier attempt may have been lost.
                found, now = self._read_if_there(key, error)
                if found == bytes(data) and now is not None:
                    return now
                if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
                    raise ChangedError(f"{self.url}/{key} was written by another process or run.") from error
                raise

        return self._with_retries("write", key, put)

    def _read_if_there(self, key: str, error: Exception) -> tuple[bytes | None, str | None]:
        """Returns the contents of an object after a failed write. If it cannot be read, the error says that the outcome is unknown."""
        try:
            return self.read(key)
        except FileNotFoundError:
            return None, None
        except StorageError as unread:
            raise StorageError(f"Could not write {self.url}/{key}: {_cause(error)}. It is not known whether it was written: {unread}") from unread.__cause__

    def info(self, key: str) -> ObjectInfo | None:
        """Returns the metadata of an object; `None` if it does not exist."""
        try:
            with self._errors("inspect", key):
                return _info(self._obstore.head(self._store, key))
        except FileNotFoundError:
            return None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yields all objects below a prefix that ends with a slash, in the order of their names."""
        yield from self._with_retries("list", prefix, lambda: list(self._list_once(prefix)))

    def _list_once(self, prefix: str) -> Iterator[ObjectInfo]:
        for chunk in self._obstore.list(self._store, prefix.strip("/") or None):
            yield from map(_info, chunk)

    def is_empty(self, prefix: str) -> bool:
        """Returns whether there are no objects below a prefix."""
        return self._with_retries("list", prefix, lambda: next(self._list_once(prefix), None)) is None

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects; missing ones are ignored. After a failure, some may be deleted."""
        if not keys:
            return
        name = keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"
        try:
            self._with_retries("delete", name, lambda: self._obstore.delete(self._store, list(keys)))
        except FileNotFoundError:  # Some stores stop at a missing object.
            for key in keys if len(keys) > 1 else ():
                self.delete([key])

    def _with_retries(self, doing: str, key: str, request: Callable[[], T]) -> T:
        """Returns the result of a request, which is retried if obstore has not done so and the failure is transient."""
        end, pause, was_forgotten = time.monotonic() + RETRY_SECONDS, 0.1, False
        while True:
            try:
                with self._errors(doing, key):
                    return request()
            except StorageError as error:
                is_forgotten = _is_forgotten_upload(error)
                # A large upload may take longer than the limit, and is repeated once in any case.
                if not _is_transient(error) or (time.monotonic() + pause > end and (was_forgotten or not is_forgotten)):
                    raise
                was_forgotten |= is_forgotten
            time.sleep(pause)
            pause = min(2 * pause, 10.0)

    @contextlib.contextmanager
    def _errors(self, doing: str, key: str) -> Iterator[None]:
        """Converts obstore's errors to ours."""
        exceptions = self._obstore.exceptions
        try:
            yield
        except StorageError:
            raise
        except (exceptions.BaseError, OSError, ValueError) as error:
            is_missing = isinstance(error, (FileNotFoundError, exceptions.NotFoundError))
            is_refused = isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError))
            if is_missing and doing != "write" and re.search("NoSuchBucket|BucketNotFound|ContainerNotFound", str(error)) is None:
                raise FileNotFoundError(errno.ENOENT, "no such object", f"{self.url}/{key}") from error
            fault = f"{_cause(error)}.{f' {_CREDENTIALS}' if is_refused or _REFUSED.search(str(error)) else ''}"
            if _NO_UPLOAD not in str(error) and (is_missing or (not is_refused and _NO_BUCKET.search(str(error)))):
                fault = _MISSING
            raise StorageError(f"Could not {doing} {self.url}/{key}: {fault}") from error


def _is_forgotten_upload(error: StorageError) -> bool:
    """Returns whether the store no longer knows a multipart upload. It may be complete, with the response to its last request lost."""
    return _NO_UPLOAD in str(error.__cause__)


def _is_transient(error: StorageError) -> bool:
    """Returns whether a failure is transient, such as a lost connection or a busy server."""
    cause = error.__cause__
    if isinstance(error, ChangedError) or cause is None:
        return False
    text = str(cause)
    if _is_forgotten_upload(error):
        return True
    if type(cause).__name__ not in ("GenericError", "OSError", "ConnectionError", "TimeoutError"):
        return False
    status = re.search(r"status code: (\d+)", text)
    if status is not None:
        return int(status[1]) >= 500 or int(status[1]) in (408, 429)
    return "builder error" not in text and _REFUSED.search(text) is None


_NO_UPLOAD = "NoSuchUpload"
_MISSING = "the bucket does not exist, or is not accessible. Create it, or check the credentials."
# Causes that obstore reports only in the debug part of its messages.
_HTTP_FAULTS = {"Timeout": "no answer in time", "Connect": "no connection", "Interrupted": "the connection was interrupted"}
_CREDENTIALS = "Check the credentials: they come from the environment, the profile or the machine's role, or from storage_options=."


def _cause(error: Exception) -> str:
    """Returns a store's error message on one line."""
    text, _, debug = str(error).partition("\n\nDebug source")
    kind = re.search(r"HttpError \{\s*kind: (\w+)", debug)
    if kind is not None and kind[1] in _HTTP_FAULTS:
        text = f"{text.rstrip()}: {_HTTP_FAULTS[kind[1]]}"
    match = re.search(r"<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?", text, re.DOTALL)
    if match is not None:
        return " ".join(filter(None, [f"{match[1]}:" if match[2] else match[1], match[2]])).rstrip(".")
    return " ".join(text.split()).rstrip(".")


def _tag(meta: Mapping[str, Any]) -> str:
    return json.dumps([meta.get("e_tag"), meta.get("version")])


def _version(tag: str) -> dict[str, Any]:
    e_tag, version = json.loads(tag)
    return {name: value for name, value in (("e_tag", e_tag), ("version", version)) if value is not None}


def _info(meta: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp(), _tag(meta))


# In-memory stores by name, because they hold the data.
_MEMORY: dict[str, Any] = {}
# Cached connections with their credentials.
_OPEN: dict[tuple[str, str, str], Bucket] = {}
_PROVIDERS = {"s3": ("S3Store", "AWS"), "gs": ("GCSStore", "GOOGLE"), "az": ("AzureStore", "AZURE")}


def open_bucket(scheme: str, name: str, options: Mapping[str, Any] | None = None) -> Bucket:
    """Returns a bucket of `s3`, `gs`, `az` or `memory`, without sending a request.

    `options` are those of obstore's store, such as `endpoint`, and `retry_config` and `client_options`. Raises `ConfigError` if obstore does not know one.
    """
    try:
        stores: Any = importlib.import_module("obstore.store")
    except ImportError as error:
        raise ImportError(f"{scheme}://{name} needs the package obstore: pip install 'fitflax[cloud]'.") from error
    if scheme == "memory":
        return Bucket(scheme, name, {}, _MEMORY.setdefault(name, stores.MemoryStore()))
    key = scheme, name, json.dumps(dict(options or {}), sort_keys=True, default=repr)
    if key not in _OPEN:
        _OPEN[key] = _connect(scheme, name, options or {}, stores)
    return _OPEN[key]


def _connect(scheme: str, name: str, options: Mapping[str, Any], stores: Any) -> Bucket:
    kind, variables = _PROVIDERS[scheme]
    config = dict(options)
    client = {**_CLIENT, **config.pop("client_options", {})}
    retry = {**_RETRY, **config.pop("retry_config", {})}
    if "allow_http" not in client and _uses_http(config, variables):
        client["allow_http"] = True
    try:
        store = getattr(stores, kind)(name, config=config or None, client_options=client, retry_config=retry)
    except Exception as error:
        raise ConfigError(f"{scheme}://{name} cannot be used with storage_options={list(options)}: {_cause(error)}.") from error
    return Bucket(scheme, name, options, store)


def _uses_http(config: Mapping[str, Any], variables: str) -> bool:
    """Returns whether the endpoint, from the options or the environment, is one without TLS, such as a private server."""
    if os.environ.get(f"{variables}_ALLOW_HTTP", "").lower() == "true":
        return True
    endpoints = [value for name, value in os.environ.items() if name.startswith(f"{variables}_") and ("ENDPOINT" in name or "BASE_URL" in name)]
    return any(str(value).startswith("http://") for value in [*endpoints, *config.values()])


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
        return ((info.key[begin:], info) for info in self.objects())

    def iterdir(self) -> Iterator["ObjectPath"]:
        """Yields the locations directly below it."""
        for name in dict.fromkeys(name.partition("/")[0] for name, _ in self.named_objects()):
            yield self / name

    def stat(self) -> ObjectInfo:
        """Returns the size of an object, and when it was written. Raises `FileNotFoundError` if there is none."""
        info = self.bucket.info(self.key)
        if info is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return info

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
