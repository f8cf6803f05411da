"""The servers and the proxy that tests of object stores use, as obstore sees them, and how obstore handles the faults."""

import http.client
import http.server
import pathlib
import socket
import tempfile
import threading
import time
from datetime import timedelta

import pytest

from tests.storage.servers import AzuriteServer, FaultProxy, GCSServer, S3Server, Unavailable

obstore = pytest.importorskip("obstore")
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, PreconditionError, UnauthenticatedError  # noqa: E402
from obstore.store import AzureStore, GCSStore, S3Store, from_url  # noqa: E402

AZURITE = pathlib.Path(tempfile.gettempdir()) / "fitflax-azurite"
CLASSES = {S3Server: S3Store, GCSServer: GCSStore, AzuriteServer: AzureStore}
RETRIES = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(milliseconds=20)},
}


@pytest.fixture(scope="module", params=["s3", "gs", pytest.param("az", marks=pytest.mark.slow)])
def server(request):
    if request.param == "s3":
        pytest.importorskip("moto")
    try:
        chosen = {"s3": S3Server, "gs": GCSServer, "az": lambda: AzuriteServer(AZURITE)}[request.param]()
    except Unavailable as error:
        pytest.skip(str(error))
    with chosen:
        chosen.create_bucket("bucket")
        yield chosen


@pytest.fixture(scope="module")
def gcs():
    with GCSServer() as chosen:
        chosen.create_bucket("bucket")
        yield chosen


@pytest.fixture
def proxy(gcs):
    with FaultProxy(gcs.endpoint) as chosen:
        yield chosen


@pytest.fixture
def store(gcs, proxy, request):
    return store_through(proxy, gcs, request.node.name)


@pytest.fixture
def direct(gcs, store):
    return GCSStore("bucket", prefix=store.prefix, **gcs.storage_options)


def store_through(proxy, server, prefix, *, timeout="30s"):
    """A store behind the proxy, with short waits between its retries."""
    options = proxy.through(server.storage_options, server) | {"client_options": {"allow_http": True, "timeout": timeout}}
    return CLASSES[type(server)]("bucket", prefix=prefix, retry_config=RETRIES, **options)


def store_of(server, prefix):
    return CLASSES[type(server)]("bucket", prefix=prefix, **server.storage_options)


def version_of(result):
    """Returns what `mode=` takes: obstore returns `None` for what a store lacks, but does not accept it as an argument."""
    return {key: result[key] for key in ("e_tag", "version") if result[key] is not None}


def is_put(method, path):
    return method == "PUT"


def is_get(method, path):
    return method == "GET"


# The servers.


def test_a_second_creation_and_an_update_of_an_old_version_are_refused(server):
    store = store_of(server, "conditions")
    first = version_of(obstore.put(store, "a", b"1", mode="create"))
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "a", b"2", mode="create")
    obstore.put(store, "a", b"3", mode=first)
    with pytest.raises(PreconditionError):
        obstore.put(store, "a", b"4", mode=first)
    with pytest.raises(PreconditionError):
        obstore.put(store, "missing", b"4", mode=first)
    assert bytes(obstore.get(store, "a").bytes()) == b"3"


def test_exactly_one_of_many_concurrent_creations_succeeds(server):
    store, won = store_of(server, "race"), []

    def create(number):
        try:
            obstore.put(store, "a", str(number).encode(), mode="create")
        except AlreadyExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(won) == 1 and bytes(obstore.get(store, "a").bytes()) == str(won[0]).encode()


def test_ranges_are_read(server):
    store = store_of(server, "ranges")
    obstore.put(store, "a", bytes(range(256)))
    assert bytes(obstore.get_range(store, "a", start=10, end=20)) == bytes(range(10, 20))
    assert [bytes(part) for part in obstore.get_ranges(store, "a", starts=[0, 250], ends=[3, 256])] == [bytes(range(3)), bytes(range(250, 256))]
    assert bytes(obstore.get(store, "a", options={"range": {"offset": 255}}).bytes()) == b"\xff"
    assert obstore.head(store, "a")["size"] == 256
    for read in (obstore.get, obstore.head):
        with pytest.raises(FileNotFoundError):
            read(store, "missing")


def test_an_object_is_listed_until_it_is_deleted(server):
    store = store_of(server, "listings")
    for name in ("a", "d/b c+é%.bin", "d/e/f"):
        obstore.put(store, name, b"1")
    assert sorted(meta["path"] for page in obstore.list(store) for meta in page) == ["a", "d/b c+é%.bin", "d/e/f"]
    assert obstore.list_with_delimiter(store, "d")["common_prefixes"] == ["d/e"]
    obstore.delete(store, ["a", "d/b c+é%.bin"])
    assert [meta["path"] for page in obstore.list(store) for meta in page] == ["d/e/f"]


def test_large_objects_are_uploaded_in_parts(server):
    store, data = store_of(server, "parts"), bytes(range(256)) * 4096 * 6
    obstore.put(store, "a", data, chunk_size=5 << 20)
    assert bytes(obstore.get(store, "a").bytes()) == data


def test_the_environment_is_enough_to_find_the_server(server, monkeypatch):
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    store = from_url(server.create_bucket("bucket-of-environment") + "/prefix")
    obstore.put(store, "a", b"1")
    assert obstore.head(store, "a")["size"] == 1


def test_listings_of_several_pages_are_complete(gcs):
    store, names = GCSStore("bucket", prefix="pages", **gcs.storage_options), [f"{number:02}/a" for number in range(7)]
    for name in names:
        obstore.put(store, name, b"1")
    gcs.limit_pages(2)
    try:
        assert [meta["path"] for page in obstore.list(store) for meta in page] == names
        assert obstore.list_with_delimiter(store)["common_prefixes"] == [name[:2] for name in names]
    finally:
        gcs.limit_pages(1000)


# The proxy.


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers with the body that it received, in chunks if it came in chunks."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        body = b""
        if chunked:
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size + 2)[:-2]
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("X-Host", self.headers["Host"])
        self.send_header("Transfer-Encoding" if chunked else "Content-Length", "chunked" if chunked else str(len(body)))
        self.end_headers()
        self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body)


@pytest.fixture
def echo():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        with FaultProxy(f"http://127.0.0.1:{listener.server_port}") as proxy:
            yield proxy
        listener.shutdown()
        thread.join(timeout=60)


def test_plain_and_chunked_bodies_pass_through_one_connection(echo):
    body, port = bytes(range(256)) * 10000, int(echo.endpoint.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    name = connection.sock.getsockname()
    for pieces in (body, iter([body[:1000], body[1000:]]), b"", body):
        connection.request("POST", "/a?b=c", body=pieces, headers={"Host": "elsewhere:1"}, encode_chunked=not isinstance(pieces, bytes))
        response = connection.getresponse()
        assert response.getheader("X-Host") == "elsewhere:1"
        assert response.read() == (body if pieces else b"")
        assert connection.sock.getsockname() == name
    connection.close()
    assert echo.log == [("POST", "/a?b=c", 200)] * 4


def test_a_client_that_expects_100_continue_receives_it(echo):
    with socket.create_connection(("127.0.0.1", int(echo.endpoint.rpartition(":")[2])), timeout=60) as client, client.makefile("rb") as stream:
        client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert [stream.readline(), stream.readline()] == [b"HTTP/1.1 100 Continue\r\n", b"\r\n"]
        client.sendall(b"abc")
        assert stream.readline() == b"HTTP/1.1 200 OK\r\n"


def test_a_request_is_retried_if_the_server_is_busy_once(proxy, store):
    proxy.fail(is_put, status=503)
    obstore.put(store, "a", b"1", mode="create")
    assert [status for _, _, status in proxy.log] == [503, 200]


@pytest.mark.parametrize(("status", "error"), [(401, UnauthenticatedError), (403, PermissionDeniedError)])
def test_a_refused_request_is_not_retried(proxy, store, status, error):
    proxy.fail(is_put, status=status, body=b"<Error><Code>AccessDenied</Code></Error>", times=None)
    with pytest.raises(error, match="AccessDenied"):
        obstore.put(store, "a", b"1")
    assert [logged for _, _, logged in proxy.log] == [status]


def test_only_the_text_of_the_error_identifies_an_expired_token(proxy, store):
    proxy.fail(status=400, body=b"<Error><Code>ExpiredToken</Code></Error>")
    with pytest.raises(GenericError, match="ExpiredToken"):
        obstore.put(store, "a", b"1")


def test_a_reset_within_a_body_stores_nothing_and_only_overwriting_is_retried(proxy, store, direct):
    proxy.reset(is_put, after_bytes=100_000)
    with pytest.raises(GenericError):
        obstore.put(store, "a", bytes(300_000), mode="create")
    with pytest.raises(FileNotFoundError):
        obstore.head(direct, "a")
    proxy.reset(is_put, after_bytes=100_000)
    obstore.put(store, "a", bytes(300_000))
    assert obstore.head(direct, "a")["size"] == 300_000
    assert [status for _, _, status in proxy.log] == [None, None, 200]


def test_a_creation_whose_answer_is_lost_fails_although_it_took_place(proxy, store, direct):
    proxy.swallow_response(is_put)  # It is retried, and finds its own object.
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "a", b"1", mode="create")
    proxy.swallow_response(is_put, reset=True)  # It is not retried.
    with pytest.raises(GenericError):
        obstore.put(store, "b", b"1", mode="create")
    assert [status for _, _, status in proxy.log] == [200, 412, 200]
    assert sorted(meta["path"] for page in obstore.list(direct) for meta in page) == ["a", "b"]


def test_a_creation_that_gets_no_answer_in_time_fails_although_it_took_place(proxy, gcs, direct):
    proxy.swallow_response(is_put, seconds=60)
    with pytest.raises(GenericError):
        obstore.put(store_through(proxy, gcs, direct.prefix, timeout="1s"), "a", b"1", mode="create")
    assert obstore.head(direct, "a")["size"] == 1


def test_a_request_waits_for_the_delay(proxy, store):
    proxy.delay(0.2, is_put)
    begin = time.monotonic()
    obstore.put(store, "a", b"1")
    assert time.monotonic() - begin >= 0.2


def test_reading_continues_where_the_connection_broke(proxy, store, direct):
    data = bytes(range(256)) * 4096
    obstore.put(direct, "a", data)
    proxy.reset_response(is_get, after_bytes=500_000)
    assert bytes(obstore.get(store, "a").bytes()) == data
    assert [status for _, _, status in proxy.log] == [200, 206]


def test_nothing_answers_while_the_proxy_is_down(proxy, store):
    obstore.put(store, "a", b"1")
    proxy.down()
    with pytest.raises(GenericError):
        obstore.get(store, "a")
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", int(proxy.endpoint.rpartition(":")[2])), timeout=60):
        pass
    proxy.up()
    assert bytes(obstore.get(store, "a").bytes()) == b"1"


def test_rules_apply_only_to_matching_requests_and_run_out(proxy, store):
    proxy.fail(lambda method, path: "never" in path, times=None)
    proxy.fail(is_put, status=403, times=2)
    for _ in range(2):
        with pytest.raises(PermissionDeniedError):
            obstore.put(store, "a", b"1")
    obstore.put(store, "a", b"1")
    proxy.fail(is_put, status=403)
    proxy.clear()
    obstore.put(store, "a", b"1")
    assert [status for _, _, status in proxy.log] == [200]
