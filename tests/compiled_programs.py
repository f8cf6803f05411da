"""Keeps the programs that the tests compiled for the next run of the tests."""

import contextlib
import hashlib
import os
import pathlib
import shutil
import tempfile

from jax._src import compilation_cache

MOST_BYTES = 2 * 2**30

_of_processes: list["tempfile.TemporaryDirectory[str]"] = []


def directory() -> pathlib.Path:
    """Returns where the programs of this kind of processor are kept; `pytest --cache-clear` and `make clean` remove them."""
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if os.path.exists("/proc/cpuinfo") else []
    features = "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return pathlib.Path(__file__).parent.parent / ".pytest_cache" / "d" / f"compiled-{hashlib.sha256(features.encode()).hexdigest()[:16]}"


def take(target: str) -> None:
    """Links the kept programs into `target`. JAX never writes a file that exists."""
    for path in directory().glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # Another run has just removed it.
            link(path, pathlib.Path(target, path.name))


def keep(source: str) -> None:
    """Adds the programs in `source` that are new, each atomically, because other processes do the same."""
    kept = directory()
    kept.mkdir(parents=True, exist_ok=True)
    if sum(path.stat().st_size for path in kept.glob("*-cache")) > MOST_BYTES:
        shutil.rmtree(kept)
        kept.mkdir()
    known = {path.name for path in kept.iterdir()}
    with tempfile.TemporaryDirectory(dir=kept) as staging:
        for path in pathlib.Path(source).glob("*-cache"):
            if path.name not in known and complete(path):
                link(path, pathlib.Path(staging, path.name))
                os.replace(pathlib.Path(staging, path.name), kept / path.name)


def of_processes(environment: dict[str, str], count: int) -> list[dict[str, str]]:
    """Returns the environments of processes that run simultaneously: each has a separate directory, which `keep_all` keeps."""
    found = []
    for _ in range(count):
        directory = tempfile.TemporaryDirectory(prefix="fitflax-tests-")
        _of_processes.append(directory)
        take(directory.name)
        found.append(environment | variables(directory.name))
    return found


def variables(directory: str) -> dict[str, str]:
    """Returns environment variables with which JAX keeps all programs in a directory."""
    return {
        "JAX_COMPILATION_CACHE_DIR": directory,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }


def keep_all(own: str) -> None:
    """Keeps the programs of this process, in `own`, and of those that it started, and removes their directories."""
    keep(own)
    while _of_processes:
        with _of_processes.pop() as directory:
            keep(directory)


def complete(path: pathlib.Path) -> bool:
    """Returns False if the process that wrote the file was killed before it had written all of it."""
    try:
        compilation_cache.decompress_executable(path.read_bytes())
    except Exception:  # noqa: BLE001 - zlib's or zstandard's own, depending on what is installed.
        return False
    return True


def link(source: pathlib.Path, target: pathlib.Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # Another file system.
        shutil.copyfile(source, target)
