"""An in-memory Cloud Storage server for tests, in a thread of the test process.

It exists because obstore cannot use any packaged emulator: obstore uses the XML API, and `gcp-storage-emulator` answers 501 to its HEAD, DELETE, listings
and multipart uploads, omits `ETag` from every answer, and ignores preconditions.
"""

import dataclasses
import email.utils
import hashlib
import http.server
import itertools
import re
import sys
import threading
import time
import urllib.parse
import xml.sax.saxutils
from collections.abc import Callable
from typing import Self

HOST = "127.0.0.1"
SOCKET_LIMIT = 60.0  # Seconds that a read or a write may take.


@dataclasses.dataclass(frozen=True)
class _Object:
    data: bytes
    generation: int
    modified: float

    @property
    def headers(self) -> dict[str, str]:
        return {
            "ETag": f'"{hashlib.md5(self.data).hexdigest()}"',
            "Last-Modified": email.utils.formatdate(self.modified, usegmt=True),
            "x-goog-generation": str(self.generation),
        }


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(status, code)
        self.status, self.code = status, code


class _GCSHandler(http.server.BaseHTTPRequestHandler):
    """One connection to a `GCSServer`: a method `_put`, `_get`, `_head`, `_delete` or `_post` for each HTTP method."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    timeout = SOCKET_LIMIT
    server: "_GCSListener"

    def log_message(self, *args: object) -> None:
        pass

    def do_PUT(self) -> None:
        self._handle(self._put)

    def do_GET(self) -> None:
        self._handle(self._get)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._handle(self._post)

    def do_DELETE(self) -> None:
        self._handle(self._delete)

    def _handle(self, answer: Callable[[], tuple[int, dict[str, str], bytes]]) -> None:
        parts = urllib.parse.urlsplit(self.path)
        self.bucket, _, self.key = urllib.parse.unquote(parts.path)[1:].partition("/")
        self.query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            with self.server.lock:  # A precondition and the operation that it guards are atomic.
                if self.bucket not in self.server.buckets:
                    raise _Refused(404, "NoSuchBucket")
                self.objects = self.server.buckets[self.bucket]
                status, headers, body = answer()
        except _Refused as refused:
            status, headers = refused.status, {"Content-Type": "application/xml"}
            body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{refused.code}</Code><Message>{refused.code}</Message></Error>".encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _check(self) -> None:
        """Compares the object's generation with `x-goog-if-generation-match`; 0 means that there is no object."""
        expected = self.headers.get("x-goog-if-generation-match")
        found = self.objects.get(self.key)
        if expected is not None and int(expected) != (found.generation if found else 0):
            raise _Refused(412, "PreconditionFailed")

    def _found(self, bucket: str, key: str) -> _Object:
        try:
            return self.server.buckets[bucket][key]
        except KeyError:
            raise _Refused(404, "NoSuchKey") from None

    def _store(self, data: bytes) -> _Object:
        self._check()
        self.objects[self.key] = stored = _Object(data, next(self.server.generations), time.time())
        return stored

    def _put(self) -> tuple[int, dict[str, str], bytes]:
        if "uploadId" in self.query:
            self._parts()[int(self.query["partNumber"])] = self.body
            return 200, {"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'}, b""
        source = self.headers.get("x-goog-copy-source")
        if source is None:
            return 200, self._store(self.body).headers, b""
        bucket, _, key = urllib.parse.unquote(source).lstrip("/").partition("/")
        stored = self._store(self._found(bucket, key).data)
        return 200, stored.headers, f"<CopyObjectResult><ETag>{stored.headers['ETag']}</ETag></CopyObjectResult>".encode()

    def _get(self) -> tuple[int, dict[str, str], bytes]:
        if not self.key:
            return 200, {"Content-Type": "application/xml"}, self._listing().encode()
        found = self._found(self.bucket, self.key)
        self._check()
        size = len(found.data)
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return 200, found.headers, found.data
        first, last = wanted.groups()
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        if start >= size:
            raise _Refused(416, "InvalidRange")
        return 206, found.headers | {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}, found.data[start:stop]

    def _delete(self) -> tuple[int, dict[str, str], bytes]:
        if "uploadId" in self.query:
            self._parts()
            del self.server.uploads[self.query["uploadId"]]
        else:
            self._found(self.bucket, self.key)
            self._check()
            del self.objects[self.key]
        return 204, {}, b""

    def _parts(self) -> dict[int, bytes]:
        try:
            return self.server.uploads[self.query["uploadId"]]
        except KeyError:
            raise _Refused(404, "NoSuchUpload") from None

    def _post(self) -> tuple[int, dict[str, str], bytes]:
        """Starts a multipart upload, or completes it."""
        if "uploads" in self.query:
            name = f"upload-{next(self.server.generations)}"
            self.server.uploads[name] = {}
            result = f"<Bucket>{self.bucket}</Bucket><Key>{xml.sax.saxutils.escape(self.key)}</Key><UploadId>{name}</UploadId>"
            return 200, {}, f"<InitiateMultipartUploadResult>{result}</InitiateMultipartUploadResult>".encode()
        if "uploadId" not in self.query:
            raise _Refused(400, "InvalidArgument")
        parts = self._parts()
        numbers = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", self.body)]
        if not numbers or not set(numbers) <= set(parts):
            raise _Refused(400, "InvalidPart")
        stored = self._store(b"".join(parts[number] for number in numbers))
        del self.server.uploads[self.query["uploadId"]]
        result = f"<Bucket>{self.bucket}</Bucket><Key>{xml.sax.saxutils.escape(self.key)}</Key><ETag>{stored.headers['ETag']}</ETag>"
        return 200, stored.headers, f"<CompleteMultipartUploadResult>{result}</CompleteMultipartUploadResult>".encode()

    def _listing(self) -> str:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        after = self.query.get("continuation-token") or self.query.get("start-after", "")
        limit = min(int(self.query.get("max-keys", 1000)), self.server.page)
        entries: dict[str, str] = {}  # By name; the next page starts after the last name of this one.
        for key in sorted(self.objects):
            if not key.startswith(prefix):
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            name = prefix + head + delimiter if found else key
            if name > after and name not in entries:
                if len(entries) == limit:
                    entries[""] = f"<NextContinuationToken>{xml.sax.saxutils.escape(list(entries)[-1])}</NextContinuationToken><IsTruncated>true</IsTruncated>"
                    break
                escaped = xml.sax.saxutils.escape(name)
                if found:
                    entries[name] = f"<CommonPrefixes><Prefix>{escaped}</Prefix></CommonPrefixes>"
                else:
                    stored = self.objects[key]
                    modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.modified))
                    fields = f"<Key>{escaped}</Key><Size>{len(stored.data)}</Size><ETag>{stored.headers['ETag']}</ETag><LastModified>{modified}</LastModified>"
                    entries[name] = f"<Contents>{fields}<Generation>{stored.generation}</Generation></Contents>"
        return f"<?xml version='1.0' encoding='UTF-8'?><ListBucketResult>{''.join(entries.values())}</ListBucketResult>"


class _GCSListener(http.server.ThreadingHTTPServer):
    daemon_threads = True
    disable_nagle_algorithm = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__((HOST, 0), _GCSHandler)
        self.lock = threading.Lock()
        self.buckets: dict[str, dict[str, _Object]] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.generations = itertools.count(time.time_ns() // 1000)  # Generations look like microseconds, as real ones do.
        self.page = 1000

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), OSError):  # A client that disconnected, as in many tests.
            super().handle_error(request, client_address)


class GCSServer:
    """Cloud Storage's XML API, in memory, in a thread of this process: the part of it that obstore's `GCSStore` uses.

    That is, by path (`/bucket/key`): PUT, GET with one range, HEAD, DELETE; copies (`x-goog-copy-source`); multipart uploads (`?uploads`, `?uploadId`);
    listings (`?list-type=2` with `prefix`, `delimiter`, `start-after`, `max-keys` and `continuation-token`); and `x-goog-if-generation-match` for
    requests that read or write one object. Not supported: credentials, attributes of objects, other conditions, generations that are not current, and
    requests with `Transfer-Encoding: chunked`.
    """

    def __init__(self) -> None:
        self._listener = _GCSListener()
        self._thread = threading.Thread(target=self._listener.serve_forever, kwargs={"poll_interval": 0.02}, name="gcs-server", daemon=True)
        self.endpoint = f"http://{HOST}:{self._listener.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join(timeout=SOCKET_LIMIT)

    def create_bucket(self, name: str) -> str:
        """Creates a bucket, and returns its URL."""
        with self._listener.lock:
            self._listener.buckets.setdefault(name, {})
        return f"gs://{name}"

    def limit_pages(self, entries: int) -> None:
        """Sets the maximum number of entries on a page of a listing, initially 1000, so that a test of several pages can be small."""
        self._listener.page = entries

    # A token, because with `skip_signature` reads need no credentials, but writes ask the metadata server of the machine for them.
    @property
    def storage_options(self) -> dict[str, object]:
        return {"base_url": self.endpoint, "bearer_token": "testing", "client_options": {"allow_http": True}}

    @property
    def environment(self) -> dict[str, str]:
        return {"GOOGLE_BASE_URL": self.endpoint, "GOOGLE_BEARER_TOKEN": "testing", "GOOGLE_ALLOW_HTTP": "true"}
