"""An HTTP proxy for tests that breaks requests as a test specifies: see `FaultProxy`.

It understands just enough HTTP/1.1 to separate requests and to know its position in a body. It supports neither TLS nor pipelining.
"""

import contextlib
import dataclasses
import http.client
import socket
import struct
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import BinaryIO, Protocol, Self

HOST = "127.0.0.1"
SOCKET_LIMIT = 60.0  # Seconds that a read or a write may take.
PIECE = 1 << 20

Match = Callable[[str, str], bool]


class HasEndpoint(Protocol):
    endpoint: str


def anything(method: str, path: str) -> bool:
    return True


@dataclasses.dataclass
class _Rule:
    match: Match
    times: int | None  # None: forever.
    kind: str
    status: int = 0
    body: bytes = b""
    seconds: float = 0.0
    after_bytes: int = 0
    resets: bool = False


@dataclasses.dataclass(frozen=True)
class _Head:
    """The first line and the headers of a request or a response; `read` returns `None` if the connection ended instead."""

    first: str
    headers: list[tuple[str, str]]

    @classmethod
    def read(cls, stream: BinaryIO) -> "_Head | None":
        lines = []
        while (line := stream.readline(1 << 16)) not in (b"\r\n", b"\n"):
            if not line.endswith(b"\n"):
                return None
            lines.append(line.decode("latin-1").rstrip("\r\n"))
        if not lines:
            return None
        return cls(lines[0], [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines[1:])])

    def get(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "").lower()

    def wire(self, *, without: tuple[str, ...] = ()) -> bytes:
        lines = [self.first, *(f"{name}: {value}" for name, value in self.headers if name.lower() not in without)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def body(self, stream: BinaryIO, *, until_closed: bool) -> Iterator[bytes]:
        """Yields the body as it is on the wire, including the framing of chunks.

        Raises:
            ConnectionError: The connection ends within the body.
        """
        if "chunked" in self.get("transfer-encoding"):
            size = None
            while size != 0:
                line = stream.readline(1 << 16)
                yield line
                size = int(line.split(b";")[0] or b"0", 16)
                yield from _exactly(stream, size)
                if size:
                    yield from _exactly(stream, 2)
            while (line := stream.readline(1 << 16)) not in (b"\r\n", b"\n", b""):  # Trailers.
                yield line
            yield line
        elif self.get("content-length"):
            yield from _exactly(stream, int(self.get("content-length")))
        elif until_closed:
            while piece := stream.read1(PIECE):
                yield piece


def _exactly(stream: BinaryIO, size: int) -> Iterator[bytes]:
    while size:
        piece = stream.read1(min(size, PIECE))
        if not piece:
            raise ConnectionError("The connection ended within a body.")
        size -= len(piece)
        yield piece


def _close(connection: socket.socket, *, reset: bool) -> None:
    """Closes immediately, with RST or FIN. A `makefile` of it keeps the descriptor open, but not the connection."""
    with contextlib.suppress(OSError):
        if reset:  # Closing with a linger of 0 seconds sends RST; shutdown would send FIN first.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class FaultProxy:
    """An HTTP/1.1 proxy on its own port, in threads of this process, in front of one server; it breaks requests as a test specifies.

    Each rule applies to the first `times` requests for which `match(method, path)` is true, or to all of them if `times` is `None`. The path includes the
    query. The oldest matching rule that is not used up applies to a request, and in addition the oldest such `delay`.

    Attributes:
        endpoint: What to give to a client in place of the server's endpoint.
        log: `(method, path, status)` of each request. The status is the one that the server or a rule gave, even if the client never saw it, or `None`
            if there was none.
    """

    def __init__(self, target: str) -> None:
        parts = urllib.parse.urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._connections: set[socket.socket] = set()
        self._closed = threading.Event()
        self._accepting: threading.Thread | None = None
        self._listening = threading.Event()
        self.log: list[tuple[str, str, int | None]] = []
        # Holds the port for the lifetime of the proxy: it is bound but does not listen, so it refuses connections, and no other process gets the port.
        self._holder = self._socket(0)
        self._port = self._holder.getsockname()[1]
        self.endpoint = f"http://{HOST}:{self._port}"

    @staticmethod
    def _socket(port: int) -> socket.socket:
        result = socket.socket()
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        result.bind((HOST, port))
        return result

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closed.set()
        self.down()
        self._holder.close()

    def through(self, options: dict[str, object], server: HasEndpoint) -> dict[str, object]:
        """Returns a server's `environment` or `storage_options`, with this proxy's endpoint in place of the server's."""
        return {key: value.replace(server.endpoint, self.endpoint) if isinstance(value, str) else value for key, value in options.items()}

    # Rules.

    def fail(self, match: Match = anything, *, status: int = 503, body: bytes = b"", times: int | None = 1) -> None:
        """Answers in place of the server, which does not see the request."""
        self._add(_Rule(match, times, "fail", status=status, body=body))

    def delay(self, seconds: float, match: Match = anything, *, times: int | None = 1) -> None:
        """Waits before the request goes to the server. If a client gives up meanwhile, its request may still be carried out later, as in any network."""
        self._add(_Rule(match, times, "delay", seconds=seconds))

    def reset(self, match: Match = anything, *, after_bytes: int = 0, times: int | None = 1) -> None:
        """Resets both connections after `after_bytes` of the request's body, or at its end; a server may carry out a complete request."""
        self._add(_Rule(match, times, "reset", after_bytes=after_bytes))

    def reset_response(self, match: Match = anything, *, after_bytes: int = 0, times: int | None = 1) -> None:
        """Resets both connections after `after_bytes` of the response's body, or at its end; the client may receive fewer."""
        self._add(_Rule(match, times, "reset_response", after_bytes=after_bytes))

    def swallow_response(self, match: Match = anything, *, seconds: float = 0.0, reset: bool = False, times: int | None = 1) -> None:
        """Lets the server carry out the request, and after `seconds` of silence closes or resets the client's connection without an answer."""
        self._add(_Rule(match, times, "swallow", seconds=seconds, resets=reset))

    def clear(self) -> None:
        """Removes all rules and clears the log."""
        with self._lock:
            self._rules.clear()
            self.log.clear()

    def down(self) -> None:
        """Resets all connections and refuses new ones, until `up`."""
        self._listening.clear()
        if self._accepting is not None:
            self._accepting.join(timeout=SOCKET_LIMIT)
            self._accepting = None
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RDWR)  # Wakes the thread that has it, which closes it.

    def up(self) -> None:
        """Accepts connections again, at the same endpoint."""
        if self._accepting is None:
            listener = self._socket(self._port)
            listener.listen(128)
            listener.settimeout(0.02)
            self._listening.set()
            self._accepting = threading.Thread(target=self._accept, args=(listener,), name="fault-proxy", daemon=True)
            self._accepting.start()

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def _take(self, method: str, path: str, *, delays: bool) -> _Rule | None:
        with self._lock:
            for rule in self._rules:
                if (rule.kind == "delay") == delays and rule.times != 0 and rule.match(method, path):
                    if rule.times is not None:
                        rule.times -= 1
                    return rule
        return None

    # Connections.

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while self._listening.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    self._register(connection)
                    threading.Thread(target=self._serve, args=(connection,), name="fault-proxy-connection", daemon=True).start()

    def _register(self, connection: socket.socket) -> None:
        connection.settimeout(SOCKET_LIMIT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._connections.add(connection)

    def _serve(self, client: socket.socket) -> None:
        """Answers the requests of one connection, until it closes."""
        stream = client.makefile("rb", buffering=1 << 16)
        try:
            while (head := _Head.read(stream)) is not None and self._exchange(client, stream, head):
                pass
        except OSError:  # The client or the server disconnected, or `down` closed the connection.
            pass
        finally:
            with self._lock:
                self._connections.discard(client)
            stream.close()
            _close(client, reset=False)

    def _exchange(self, client: socket.socket, stream: BinaryIO, head: _Head) -> bool:
        """Carries out one request, and returns whether another may follow on this connection."""
        method, path, _ = head.first.split(" ")
        if (delay := self._take(method, path, delays=True)) is not None and self._closed.wait(delay.seconds):
            return False
        rule = self._take(method, path, delays=False) or _Rule(anything, None, "")
        if head.get("expect") == "100-continue":  # Answered here, to avoid having to distinguish the server's answer to it from the one to the request.
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = head.body(stream, until_closed=False)
        if rule.kind == "fail":
            for _ in body:  # A client that is still writing would see a broken connection instead of the answer.
                pass
            self.log.append((method, path, rule.status))
            content = b"" if method == "HEAD" else rule.body
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(content)))]
            answer = _Head(f"HTTP/1.1 {rule.status} {http.client.responses.get(rule.status, '')}", headers)
            client.sendall(answer.wire() + content)
            return True
        # A new connection for each request: the server could close a kept one at any moment, a fault that no rule specifies.
        with socket.create_connection(self._target, timeout=SOCKET_LIMIT) as server, server.makefile("rb", buffering=1 << 16) as answers:
            self._register(server)
            try:
                return self._forward(client, server, answers, method, path, head, body, rule)
            finally:
                with self._lock:
                    self._connections.discard(server)

    def _forward(
        self, client: socket.socket, server: socket.socket, answers: BinaryIO, method: str, path: str, head: _Head, body: Iterator[bytes], rule: _Rule
    ) -> bool:
        server.sendall(head.wire(without=("expect", "connection")))
        if _send(server, body, rule.after_bytes if rule.kind == "reset" else None):
            self.log.append((method, path, None))
            _close(server, reset=True)
            _close(client, reset=True)
            return False
        response = _Head.read(answers)
        while response is not None and response.first.split(" ")[1].startswith("1"):
            response = _Head.read(answers)
        if response is None:
            self.log.append((method, path, None))
            return False
        status = int(response.first.split(" ")[1])
        framed = bool(response.get("content-length") or response.get("transfer-encoding"))
        empty = method == "HEAD" or status in (204, 304)
        content = iter(()) if empty else response.body(answers, until_closed=True)
        if rule.kind == "swallow":
            for _ in content:
                pass
            self.log.append((method, path, status))
            self._closed.wait(rule.seconds)
            _close(client, reset=rule.resets)
            return False
        self.log.append((method, path, status))
        version_1_1 = dataclasses.replace(response, first="HTTP/1.1 " + response.first.partition(" ")[2])
        client.sendall(version_1_1.wire(without=("connection", "keep-alive")))
        if _send(client, content, rule.after_bytes if rule.kind == "reset_response" else None):
            _close(server, reset=True)
            _close(client, reset=True)
            return False
        return (framed or empty) and head.get("connection") != "close"


def _send(connection: socket.socket, pieces: Iterator[bytes], limit: int | None) -> bool:
    """Sends the pieces, but at most `limit` bytes, and returns whether there was a limit, after which the connection is to be reset."""
    for piece in pieces:
        if limit is not None and len(piece) > limit:
            connection.sendall(piece[:limit])
            return True
        connection.sendall(piece)
        limit = None if limit is None else limit - len(piece)
    return limit is not None
