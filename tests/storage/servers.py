"""Object stores for tests, all on 127.0.0.1, and a proxy that breaks the connection to them.

`S3Server` is moto's, in a separate process; `AzuriteServer` is Microsoft's emulator of Azure's blob storage, which npm installs; `GCSServer` is written
for these tests, in a thread of this process. `FaultProxy` sits between a client and any of them.

Each is a context manager with an `endpoint`, `create_bucket`, `environment` (for `obstore.store.from_url` in a process that has only its
environment) and `storage_options` (the same as keyword arguments of obstore's stores). moto and `GCSServer` accept any credentials; Azurite checks
signatures.
"""

import atexit
import base64
import contextlib
import email.utils
import hmac
import http.client
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from typing import BinaryIO, Self

from tests.storage.fault_proxy import FaultProxy
from tests.storage.gcs_server import GCSServer

__all__ = ["AzuriteServer", "FaultProxy", "GCSServer", "S3Server", "Unavailable", "install_azurite"]

HOST = "127.0.0.1"
START_LIMIT = 60.0  # Seconds; importing moto takes ten on a busy machine.


class Unavailable(Exception):
    """A server cannot run on this machine: a package is missing, or its installation fails."""


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return listener.getsockname()[1]


def request(method: str, url: str, headers: dict[str, str] | None = None, *, limit: float = 10.0) -> int:
    """Returns the status of one request without a body."""
    parts = urllib.parse.urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.hostname, parts.port, timeout=limit)) as connection:
        connection.request(method, f"{parts.path or '/'}?{parts.query}".rstrip("?"), headers={"Content-Length": "0"} | (headers or {}))
        return connection.getresponse().status


class _Process:
    """A server that is a program: started on a free port, and killed at the end of the `with` block or of this process, unless this process is killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._output: BinaryIO | None = None
        self._owner = os.getpid()
        self.endpoint = ""

    def _command(self, port: int) -> list[str]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        port = free_port()
        self.endpoint = f"http://{HOST}:{port}"
        self._output = tempfile.TemporaryFile()
        # A separate process group, so that neither Ctrl-C nor a test that signals its group ends it, and so that its children end with it.
        self._process = subprocess.Popen(self._command(port), stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True)
        atexit.register(self.close)
        try:
            self._wait(time.monotonic() + START_LIMIT)
        except BaseException:
            self.close()
            raise
        return self

    def _wait(self, deadline: float) -> None:
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                request("GET", self.endpoint, limit=max(0.1, deadline - time.monotonic()))
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._output.seek(0)
                output = self._output.read().decode(errors="replace")
                state = "does not answer" if self._process.poll() is None else f"ended with {self._process.returncode}"
                raise RuntimeError(f"{type(self).__name__} at {self.endpoint} {state}; its output:\n{output}")
            time.sleep(0.02)

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._process is not None and self._owner == os.getpid():  # A fork of this process must not stop the server when it ends.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=START_LIMIT)
            self._output.close()
            self._process = None

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class S3Server(_Process):
    """moto's S3: in memory, in one process, with any credentials. It supports `If-None-Match: *`, `If-Match`, ranges and multipart uploads."""

    def _command(self, port: int) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]

    def create_bucket(self, name: str) -> str:
        """Creates a bucket, and returns its URL."""
        status = request("PUT", f"{self.endpoint}/{name}")
        if status != 200:
            raise RuntimeError(f"Creating bucket {name!r} answered {status}.")
        return f"s3://{name}"

    @property
    def storage_options(self) -> dict[str, object]:
        return {
            "endpoint": self.endpoint,
            "access_key_id": "testing",
            "secret_access_key": "testing",
            "region": "us-east-1",
            "client_options": {"allow_http": True},
        }

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }


# The account that every emulator of Azure's storage has; its key is in Microsoft's documentation.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURITE_VERSION = "3.35.0"


def install_azurite(cache: pathlib.Path, *, limit: float = 300.0) -> pathlib.Path:
    """Returns the directory in `cache` with Azurite's program, which npm installs there on the first call; 190 MB.

    Raises:
        Unavailable: Node or npm is missing, or npm cannot install Azurite.
    """
    if not shutil.which("node") or not shutil.which("npm"):
        raise Unavailable("Azurite needs node and npm.")
    directory = cache / f"azurite-{AZURITE_VERSION}"
    if directory.exists():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(dir=cache))
    try:
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(temporary), f"azurite@{AZURITE_VERSION}"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL)
        with contextlib.suppress(OSError):  # If another process was first, its directory is just as good.
            temporary.rename(directory)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"npm cannot install Azurite: {error}\n{error.stderr}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


class AzuriteServer(_Process):
    """Azurite's blob service, in memory. It checks signatures, and supports `If-None-Match: *`, `If-Match`, ranges and blocks.

    Args:
        cache: Where `install_azurite` installs it, outside of the checkout.
    """

    def __init__(self, cache: pathlib.Path) -> None:
        super().__init__()
        self._directory = install_azurite(cache)

    def _command(self, port: int) -> list[str]:
        program = self._directory / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
        options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        return ["node", str(program), "--blobHost", HOST, "--blobPort", str(port), *options]

    def create_bucket(self, name: str) -> str:
        """Creates a container, and returns its URL."""
        date = email.utils.formatdate(usegmt=True)
        headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
        # The method, eleven empty standard headers, x-ms-* headers, and the path with the account twice, because the emulator has it in its own path.
        text = "PUT" + "\n" * 12 + "".join(f"{key}:{value}\n" for key, value in headers.items())
        text += f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}\nrestype:container"
        signature = base64.b64encode(hmac.digest(base64.b64decode(AZURE_KEY), text.encode(), "sha256")).decode()
        headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{signature}"
        status = request("PUT", f"{self.endpoint}/{AZURE_ACCOUNT}/{name}?restype=container", headers)
        if status != 201:
            raise RuntimeError(f"Creating container {name!r} answered {status}.")
        return f"az://{name}"

    @property
    def storage_options(self) -> dict[str, object]:
        return {
            "account_name": AZURE_ACCOUNT,
            "account_key": AZURE_KEY,
            "endpoint": f"{self.endpoint}/{AZURE_ACCOUNT}",
            "client_options": {"allow_http": True},
        }

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
            "AZURE_STORAGE_ENDPOINT": f"{self.endpoint}/{AZURE_ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }
