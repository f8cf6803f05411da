"""Compiles less and earlier: JAX's cache on disk, compilation in a thread, and a warning if a batch causes recompilation."""

import atexit
import contextlib
import ctypes
import gc
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from fitflax.data.whole_batches import has_rows, leaf_paths
from fitflax.errors import ConfigError, warn
from fitflax.leaves import listed
from fitflax.state import Batch
from fitflax.storage import is_url

__all__ = ["AheadOfTime", "Compilation", "CompiledShapes", "enable_compilation_cache", "share_programs", "trim_heap", "without_full_collections"]

_DIRECTORY = "jax_compilation_cache_dir"
# JAX's option, its default, and the value that caches everything. The defaults leave out what compiles in less than a second: most steps of small
# models.
_LIMITS: tuple[tuple[str, float, float], ...] = (
    ("jax_persistent_cache_min_compile_time_secs", 1.0, 0.0),
    ("jax_persistent_cache_min_entry_size_bytes", 0, -1),
)

# A threshold that is never reached, and the one that applies outside of `without_full_collections`.
_NEVER = 2**31 - 1
_usual_threshold = gc.get_threshold()[2]

# The directory of `share_programs`.
_shared: list[tempfile.TemporaryDirectory[str]] = []


def trim_heap() -> None:
    """Returns freed memory to the operating system. With glibc, compiling a large model leaves hundreds of megabytes of it; elsewhere this does nothing."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # TypeError: CDLL(None) on Windows.
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def without_full_collections() -> Iterator[None]:
    """Postpones garbage collections of the oldest generation until its block ends.

    A trace creates hundreds of thousands of objects that stay, which triggers such collections repeatedly; for ResNet-50, they take half a second in
    total. Python 3.14 collects in increments, and ignores this.
    """
    global _usual_threshold
    youngest, younger, oldest = gc.get_threshold()
    if oldest != _NEVER:  # Otherwise another thread is in such a block, or one was interrupted before it could end.
        _usual_threshold = oldest
    try:
        gc.set_threshold(youngest, younger, _NEVER)
        yield
    finally:
        gc.set_threshold(youngest, younger, _usual_threshold)


def enable_compilation_cache(directory: str | os.PathLike[str] | None = None) -> Path:
    """Lets JAX keep compiled programs on disk, so that later processes do not compile them again; returns the directory.

    Programs compiled before the call are not stored, so call it first. Results are bit-for-bit identical. JAX's option
    `jax_compilation_cache_max_size` limits the size of the directory; by default nothing is deleted. Anyone who can write to the directory can run
    code in your processes.

    Args:
        directory: Directory, created if needed. By default the environment variable `JAX_COMPILATION_CACHE_DIR`, or the directory that JAX already
            uses, or `fitflax/xla` in the user's cache directory (`XDG_CACHE_HOME`, else `~/.cache`).

    Raises:
        ConfigError: `directory` is not local, or is not writable.

    Warns:
        FitflaxWarning: JAX's option `jax_enable_compilation_cache` is off, so nothing is stored.

    >>> enable_compilation_cache().is_dir()
    True
    """
    path = _resolve_directory(directory)
    try:
        # Compiled programs are executed, so only the user can access the default directory. Permissions of other directories are up to their owner.
        path.mkdir(parents=True, exist_ok=True, mode=0o700 if path == _default_directory() else 0o777)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"enable_compilation_cache cannot write to {path}: {error.strerror or error}. Pass another directory, or set JAX_COMPILATION_CACHE_DIR to one."
        ) from error
    if not jax.config.values["jax_enable_compilation_cache"]:
        warn("Nothing will be cached, because JAX's option jax_enable_compilation_cache is off. Turn it on, or unset JAX_ENABLE_COMPILATION_CACHE.")
    jax.config.update(_DIRECTORY, str(path))
    for option, default, everything in _LIMITS:
        # Keep values that the user has set.
        if jax.config.values[option] == default and option.upper() not in os.environ:
            jax.config.update(option, everything)
    compilation_cache.reset_cache()  # An initialized cache would keep its old directory.
    return path


def share_programs() -> None:
    """Lets JAX compile equal programs once in this process, with a temporary cache on disk. It does nothing if there is a cache already.

    This helps notebooks: a cell that is run again creates new functions, which JAX compiles again, but equal programs, which the cache has.
    """
    is_off = not jax.config.values["jax_enable_compilation_cache"]
    if _shared or is_off or jax.config.values[_DIRECTORY] or os.environ.get(_DIRECTORY.upper()):
        return
    with contextlib.suppress(OSError, ConfigError):  # Without a cache everything works, but compiles again.
        directory = tempfile.TemporaryDirectory(prefix="fitflax-programs-", ignore_cleanup_errors=True)
        _shared.append(directory)
        atexit.register(directory.cleanup)
        enable_compilation_cache(directory.name)


def _resolve_directory(directory: Any) -> Path:
    if directory is None:
        in_use = jax.config.values[_DIRECTORY]
        is_temporary = any(in_use == shared.name for shared in _shared)
        directory = os.environ.get(_DIRECTORY.upper()) or (not is_temporary and in_use) or _default_directory()
    if not isinstance(directory, str | os.PathLike) or not isinstance(os.fspath(directory), str) or not os.fspath(directory):
        raise ConfigError(f"enable_compilation_cache(directory=...) takes the path of a directory. Received: {directory!r}.")
    if is_url(directory):
        raise ConfigError(
            f"enable_compilation_cache takes a local directory. Received: {os.fspath(directory)!r}. "
            f"For remote directories, use JAX's own option: jax.config.update({_DIRECTORY!r}, ...)."
        )
    return Path(directory).expanduser().absolute()


def _default_directory() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else Path("~/.cache").expanduser()) / "fitflax" / "xla"


class Compilation:
    """Compiles a lowered function in a thread."""

    def __init__(self, lowered: jax.stages.Lowered) -> None:
        self._memory: Any = None
        self._thread = threading.Thread(target=self._compile, args=(lowered,), name="fitflax-compile")
        self._thread.start()

    def _compile(self, lowered: jax.stages.Lowered) -> None:
        # The call itself compiles again and raises the error.
        with contextlib.suppress(Exception):
            self._memory = lowered.compile().memory_analysis()

    def wait(self) -> None:
        """Waits until it is compiled."""
        self._thread.join()

    def memory(self) -> Any:
        """Waits until it is compiled, and returns JAX's memory analysis, or `None` if there is none."""
        self.wait()
        return self._memory


class AheadOfTime:
    """Compiles functions in threads while the program does something else, such as waiting for data. The first call then finds the compiled function."""

    def __init__(self) -> None:
        self._compilations: dict[Any, Compilation] = {}

    def start(self, name: Any, lowered: jax.stages.Lowered) -> Compilation:
        """Begins to compile a lowered function; `name` is the argument of `wait`."""
        self.wait(name)
        self._compilations[name] = compilation = Compilation(lowered)
        return compilation

    def wait(self, name: Any) -> None:
        """Waits for what was started under a name. Call it before the function, which would otherwise be compiled twice."""
        compilation = self._compilations.pop(name, None)
        if compilation is not None:
            compilation.wait()


class CompiledShapes:
    """Warns about a batch whose shapes or dtypes cause recompilation; once for each of them.

    Differences in the number of rows are ignored, because padding makes rows equal or warns itself. They count for inputs that are passed whole,
    which are never padded.
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._last: list[Any] | None = None
        self._descriptions: dict[str, str] = {}
        # Shapes seen, with their descriptions, and the same without the number of rows.
        self._known: dict[Any, dict[str, str]] = {}
        self._forms: set[Any] = set()

    def check(self, batch: Batch, *, warns: bool = True) -> None:
        """Checks a batch before it is dispatched; takes a microsecond if its shapes equal those of the last one.

        With `warns=False` it only records shapes: the first batch of a call may have other shapes than earlier calls.
        """
        x, y, _, weights = batch
        are_arrays = type(x) is np.ndarray and type(y) is np.ndarray and weights is None
        leaves = (x, y) if are_arrays else jax.tree.leaves((x, y, weights))
        shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
        if shapes != self._last:
            self._compare(batch, shapes, warns=warns)
            self._last = shapes

    def _compare(self, batch: Batch, shapes: list[tuple[tuple[int, ...], Any]], *, warns: bool) -> None:
        structure = jax.tree.structure((batch.x, batch.y, batch.weights))
        before, words = self._descriptions, self._known.get((structure, *shapes))
        if words is not None:
            self._descriptions = words
            return
        self._descriptions = self._known[structure, *shapes] = now = _describe(batch)
        is_whole = not has_rows(batch.x, len(batch.mask))
        form = structure, *((shape if is_whole else shape[1:], _canonical(dtype)) for shape, dtype in shapes)
        is_new = form not in self._forms
        self._forms.add(form)
        # Arrays that only some batches have, such as sample weights, are ignored: there are few combinations of them.
        pairs = {path: (before[path], words) for path, words in now.items() if path in before}
        changes = {path: pair for path, pair in pairs.items() if pair[0] != pair[1] and (is_whole or _without_rows(pair[0]) != _without_rows(pair[1]))}
        if is_new and warns and changes:
            pairs_listed = listed([f"{path}: {old} -> {new}" for path, (old, new) in changes.items()])
            advice = _ADVICE_FOR_WHOLE if is_whole else _advice(changes)
            warn(f"The shapes or dtypes of batches to {self._verb} have changed, so the step is compiled again: {pairs_listed}. {advice}")


_ADVICE_FOR_WHOLE = "Pad inputs to one or a few sizes, each of which is compiled once, for example with jraph.dynamically_batch."


def _without_rows(words: str) -> tuple[str, str]:
    return words.partition("[")[0], words.partition(", ")[2]


def _advice(changes: Mapping[str, tuple[str, str]]) -> str:
    pairs = [(_without_rows(old), _without_rows(new)) for old, new in changes.values()]
    advice = []
    if any(old[1] != new[1] for old, new in pairs):
        advice.append("Pad or truncate examples to one or a few lengths, each of which is compiled once; drop a last batch that differs (drop_remainder).")
    if any(old[0] != new[0] for old, new in pairs):
        advice.append("Use one dtype for all batches.")
    return " ".join(advice)


def _canonical(dtype: Any) -> Any:
    """Returns the dtype on the device: float32 for float64."""
    return jax.dtypes.canonicalize_dtype(dtype) if isinstance(dtype, np.dtype) else dtype


def _describe(batch: Batch) -> dict[str, str]:
    """Returns descriptions by path, such as `{"x": "float32[32, 28]", "y['label']": "int32[32]"}`."""
    named = [*leaf_paths(batch.x, "x"), *leaf_paths(batch.y, "y"), *leaf_paths(batch.weights, "sample_weight")]
    return {path: f"{_canonical(leaf.dtype)}{list(leaf.shape)}" for path, leaf in named}
