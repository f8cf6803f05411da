"""MLflow's real server on loopback; `benchmarks.trackers` uses it, too."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from typing import Self

SECONDS = 300
ROOT = pathlib.Path(__file__).resolve().parents[2]


def script_env() -> dict[str, str]:
    """Returns the environment of a process that is killed: no cache of compiled programs, which JAX does not write atomically, and its own W&B service."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMPILATION_CACHE", "WANDB_SERVICE"))}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return env | {"PYTHONPATH": os.pathsep.join(paths), "JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}


class Server:
    """`mlflow server` with a database in a directory; it can be stopped and restarted at the same address."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.directory}/mlflow.db", "--artifacts-destination", str(self.directory / "artifacts")]
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory, start_new_session=True)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.1)
        self.stop()
        raise TimeoutError((self.directory / "server.log").read_text()[-3000:])

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=SECONDS)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
