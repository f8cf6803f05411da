"""What all tests share: eight CPU devices, a count of compilations, and an environment for the processes that tests start."""

import atexit
import contextlib
import gc
import itertools
import os
import pathlib
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator

# Before JAX starts. On a machine with few cores XLA's thread pool fills with threads that wait for each other's collectives, and the process aborts.
os.environ.setdefault("PJRT_NPROC", "16")
# The tests need eight devices, which any CPU can simulate; set the variable to run them on something else.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if not os.environ["JAX_PLATFORMS"].startswith("cpu"):
    # Otherwise, a GPU multiplies float32 with ten bits of mantissa, and tests expect exact numbers.
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

import hypothesis
import jax
import pytest

from tests import compiled_programs

NUM_DEVICES = 8
ROOT = pathlib.Path(__file__).resolve().parent.parent
collect_ignore = ["typed_project"]  # Its modules import each other as a user's do; tests/test_types.py runs them.
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)

# If a shell started this process in the background, it and the processes that it starts would ignore Ctrl-C, which many tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Otherwise, most of the tests' time would go into compiling the same small programs repeatedly. Each process has a separate directory, because JAX does not
# write it atomically; it starts with the programs that earlier runs of the tests left (`compiled_programs.py`). A program from this cache still counts as
# compiled in JAX's events, and so in `Compilations`.
_compiled_programs = tempfile.TemporaryDirectory(prefix="fitflax-tests-")
atexit.register(_compiled_programs.cleanup)
jax.config.update("jax_compilation_cache_dir", _compiled_programs.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # Otherwise, the directory is part of the key of each program.

# The same examples in every run, and no failure because a machine was slow.
hypothesis.settings.register_profile("fitflax", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fitflax")


# JAX keeps every pmapped function that ran, with its programs, until its caches are cleared: 15 MB per trainer on eight devices, and so many objects that
# the garbage collector takes longer than the tests.
TESTS_BETWEEN_CLEARING = 40
_tests_done = itertools.count(1)


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Skips modules of slow tests if only quick ones are requested, because they import large libraries."""
    only_quick = config.option.markexpr == "not slow" and collection_path.suffix == ".py"
    return True if only_quick and re.search(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", collection_path.read_text(encoding="utf-8"), re.MULTILINE) else None


@pytest.hookimpl(tryfirst=True)  # Before `-m` selects tests.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: set[str] = set()
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: the processes that run the tests have other addresses. Give the parameters ids.")
        if item.get_closest_marker("mostly_slow") is not None:
            test = item.nodeid.split("[")[0]
            if test in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(test)


def pytest_collection_finish() -> None:
    """Excludes all modules from garbage collections, and makes these rarer: with JAX, PyTorch and TensorFlow in one process, each takes a second or two."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    for thread in threading.enumerate():
        if thread.name == "fitflax-compile":  # Of a run that ended before it called the compiled program; the next test may count compilations.
            thread.join()
    if next(_tests_done) % TESTS_BETWEEN_CLEARING == 0:
        jax.clear_caches()
        gc.collect()


def pytest_sessionstart(session: pytest.Session) -> None:
    compiled_programs.take(_compiled_programs.name)


def pytest_sessionfinish(session: pytest.Session) -> None:
    compiled_programs.keep_all(_compiled_programs.name)


class Compilations:
    """The programs that XLA compiled while this was listening, in all threads.

    Attributes:
        names: What was compiled, such as `jit(_fun)`, in order. Every pmapped function is called `jit(_fun)`.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    @property
    def count(self) -> int:
        return len(self.names)

    @contextlib.contextmanager
    def counted(self) -> Iterator["Compilations"]:
        """Yields a separate count of only the block's compilations; it keeps its value after the block."""
        inner = Compilations()
        with listening(inner):
            yield inner


# JAX has no public way to unregister a single listener, so one is registered permanently and forwards events to the current listeners.
_listeners: list[Compilations] = []


@contextlib.contextmanager
def listening(compilations: Compilations) -> Iterator[None]:
    _listeners.append(compilations)
    try:
        yield
    finally:
        # By identity: two that are nested may hold equal names.
        _listeners[:] = [other for other in _listeners if other is not compilations]


@pytest.fixture(scope="session")
def _compile_listener() -> None:
    def on_event(event: str, duration: float, **kwargs: object) -> None:
        if event == COMPILE_EVENT:
            for compilations in tuple(_listeners):
                compilations.names.append(str(kwargs.get("fun_name", "")))

    # Permanently: if JAX's listeners were cleared, later tests would count nothing.
    jax.monitoring.register_event_duration_secs_listener(on_event)


@pytest.fixture
def compilations(_compile_listener: None) -> Iterator[Compilations]:
    """Counts compilations: `compilations.count` in this test so far, `with compilations.counted() as c:` in a block.

    A program taken from the persistent cache counts as well; one that JAX still has in memory does not.
    """
    jax.clear_caches()  # So that the count does not depend on what earlier tests compiled.
    result = Compilations()
    with listening(result):
        yield result


@pytest.fixture
def devices() -> Callable[[int], list[jax.Device]]:
    """`devices(n)`: the first `n` of the eight CPU devices."""

    def first(n: int) -> list[jax.Device]:
        available = jax.devices()
        if len(available) < n:
            pytest.skip(f"needs {n} devices, this backend has {len(available)}")
        return available[:n]

    return first


@pytest.fixture(scope="session")
def compilation_cache() -> dict[str, str]:
    """Environment variables with which processes that tests start share the compiled programs of this one."""
    return compiled_programs.variables(_compiled_programs.name)


@pytest.fixture
def process_env(compilation_cache: dict[str, str]) -> dict[str, str]:
    """The whole environment for `subprocess`: this checkout importable from any directory, as many devices as here, the shared compilation cache."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | compilation_cache | {"PYTHONPATH": os.pathsep.join(paths), "JAX_NUM_CPU_DEVICES": str(NUM_DEVICES)}
