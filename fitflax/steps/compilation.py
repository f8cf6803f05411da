"""Compiling less and earlier: JAX's cache on disk, a thread that compiles what will be called, and a warning when data has a step compiled once more."""

import contextlib
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from fitflax.data.batch import leaf_paths
from fitflax.errors import ConfigError, warn
from fitflax.state import Batch

__all__ = ["AheadOfTime", "Compilation", "CompiledShapes", "enable_compilation_cache"]

_DIRECTORY = "jax_compilation_cache_dir"
# JAX's option, its default, and what has everything cached. By default it leaves out what compiles in less than a second: most steps of small models.
_LIMITS: tuple[tuple[str, float, float], ...] = (
    ("jax_persistent_cache_min_compile_time_secs", 1.0, 0.0),
    ("jax_persistent_cache_min_entry_size_bytes", 0, -1),
)


def enable_compilation_cache(directory: str | os.PathLike[str] | None = None) -> Path:
    """Has JAX keep compiled programs on disk, so that the next process that needs the same ones does not compile them again; returns the directory.

    What was compiled before the call is not stored, so call it first. Results are the same to the bit. Nothing is ever deleted: JAX's option
    `jax_compilation_cache_max_size` bounds the directory. Whoever can write to it can run code in your processes.

    Args:
        directory: Where to, made if it is not there. By default what the environment variable `JAX_COMPILATION_CACHE_DIR` says, or the directory that JAX uses
            already, or `fitflax/xla` in the user's cache directory (`XDG_CACHE_HOME`, else `~/.cache`).

    Raises:
        ConfigError: It is no local directory, or cannot be written.

    Warns:
        FitflaxWarning: JAX's switch `jax_enable_compilation_cache` is off, so that nothing will be stored.

    >>> enable_compilation_cache().is_dir()
    True
    """
    path = _choose(directory)
    try:
        # Compiled programs are run unseen, so the default directory is for its owner alone; the access to another one is its owner's choice.
        path.mkdir(parents=True, exist_ok=True, mode=0o700 if path == _own_directory() else 0o777)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"enable_compilation_cache cannot write to {path}: {error.strerror or error}. Pass another directory, or set JAX_COMPILATION_CACHE_DIR to one."
        ) from error
    if not jax.config.values["jax_enable_compilation_cache"]:
        message = "Nothing will be cached: JAX's switch jax_enable_compilation_cache is off. Turn it on, or unset JAX_ENABLE_COMPILATION_CACHE."
        warn(message)
    jax.config.update(_DIRECTORY, str(path))
    for option, default, everything in _LIMITS:
        # What somebody set stays as it is.
        if jax.config.values[option] == default and option.upper() not in os.environ:
            jax.config.update(option, everything)
    compilation_cache.reset_cache()  # A cache that is in use keeps to its directory otherwise.
    return path


def _choose(directory: Any) -> Path:
    if directory is None:
        directory = os.environ.get(_DIRECTORY.upper()) or jax.config.values[_DIRECTORY] or _own_directory()
    if not isinstance(directory, str | os.PathLike) or not isinstance(os.fspath(directory), str) or not os.fspath(directory):
        raise ConfigError(f"enable_compilation_cache(directory=...) takes the path of a directory. Received: {directory!r}.")
    if "://" in os.fspath(directory):
        raise ConfigError(
            f"enable_compilation_cache takes directories of this machine. Received: {os.fspath(directory)!r}. "
            f"For others use JAX's own option: jax.config.update({_DIRECTORY!r}, ...)."
        )
    return Path(directory).expanduser().absolute()


def _own_directory() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else Path("~/.cache").expanduser()) / "fitflax" / "xla"


class Compilation:
    """A function that is being compiled in a thread, or has been.

    Args:
        lowered: What is compiled.
    """

    def __init__(self, lowered: jax.stages.Lowered) -> None:
        self._memory: Any = None
        self._thread = threading.Thread(target=self._compile, args=(lowered,), name="fitflax-compile")
        self._thread.start()

    def _compile(self, lowered: jax.stages.Lowered) -> None:
        # The call compiles once more what could not be compiled, and has somebody to raise to.
        with contextlib.suppress(Exception):
            self._memory = lowered.compile().memory_analysis()

    def wait(self) -> None:
        """Waits for its end."""
        self._thread.join()

    def memory(self) -> Any:
        """Returns JAX's analysis of the memory that it takes, once it is compiled; `None` where there is none."""
        self.wait()
        return self._memory


class AheadOfTime:
    """Compiles functions while something else is done, such as waiting for data; the first call then finds what it needs.

    >>> double = jax.jit(lambda x: 2 * x)
    >>> ahead = AheadOfTime()
    >>> compilation = ahead.start("double", double.lower(jax.ShapeDtypeStruct((2,), np.float32)))
    >>> ahead.wait("double")
    >>> double(np.ones(2, np.float32)).tolist()
    [2.0, 2.0]
    """

    def __init__(self) -> None:
        self._going_on: dict[Any, Compilation] = {}

    def start(self, name: Any, lowered: jax.stages.Lowered) -> Compilation:
        """Begins to compile a lowered function; `name` is what `wait` is asked for."""
        self.wait(name)
        self._going_on[name] = compilation = Compilation(lowered)
        return compilation

    def wait(self, name: Any) -> None:
        """Waits until what was started under this name is there. Called before the function is, which would compile it a second time meanwhile."""
        compilation = self._going_on.pop(name, None)
        if compilation is not None:
            compilation.wait()


class CompiledShapes:
    """Warns of a batch whose shapes or dtypes have a step compiled once more; once for each.

    Batches that differ in nothing but their number of rows are no matter of this class: padding makes them equal, warns where it cannot, or was turned off.

    Args:
        verb: What is done with the batches, for the warning.

    >>> import warnings
    >>> shapes = CompiledShapes("predict")
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     for length in (28, 28, 30, 28, 30):
    ...         shapes.see(Batch(x=np.ones((32, length), np.float32), y=(), mask=np.ones(32, bool)))
    >>> [str(warning.message).split(". ")[0] for warning in caught]
    ['A batch to predict has other shapes than the one before, so its step is compiled again: x: float32[32, 28] -> float32[32, 30]']
    """

    __slots__ = ("_forms", "_known", "_last", "_verb", "_words")

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._last: list[Any] | None = None
        self._words: dict[str, str] = {}
        # What was seen, exactly, and in words; and the same without the number of rows.
        self._known: dict[Any, dict[str, str]] = {}
        self._forms: set[Any] = set()

    def see(self, batch: Batch, *, warns: bool = True) -> None:
        """Looks at a batch that is about to be dispatched; costs a microsecond where it is like the one before.

        Args:
            batch: The batch.
            warns: Not for the first batch of a call, which may have other shapes than those of earlier calls: they were asked for.
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
        before, words = self._words, self._known.get((structure, *shapes))
        if words is not None:
            self._words = words
            return
        self._words = self._known[structure, *shapes] = now = _in_words(batch)
        form = structure, *((shape[1:], _canonical(dtype)) for shape, dtype in shapes)
        is_new = form not in self._forms
        self._forms.add(form)
        # Arrays that not all batches have, such as sample weights, are of the caller's own choice; there are but few ways to leave them out.
        pairs = {path: (before[path], words) for path, words in now.items() if path in before}
        changes = {path: pair for path, pair in pairs.items() if _without_rows(pair[0]) != _without_rows(pair[1])}
        if is_new and warns and changes:
            listed = ", ".join(f"{path}: {old} -> {new}" for path, (old, new) in changes.items())
            warn(f"A batch to {self._verb} has other shapes than the one before, so its step is compiled again: {listed}. {_advice(changes)}")


def _without_rows(words: str) -> tuple[str, str]:
    return words.partition("[")[0], words.partition(", ")[2]


def _advice(changes: Mapping[str, tuple[str, str]]) -> str:
    pairs = [(_without_rows(old), _without_rows(new)) for old, new in changes.values()]
    advice = []
    if any(old[1] != new[1] for old, new in pairs):
        advice.append("Pad or cut examples to a fixed length, or to a few, each of which is compiled once; drop a last batch that differs (drop_remainder).")
    if any(old[0] != new[0] for old, new in pairs):
        advice.append("Use one dtype for all batches.")
    return " ".join(advice)


def _canonical(dtype: Any) -> Any:
    """Returns the dtype that values have on the device: float32 for float64."""
    return jax.dtypes.canonicalize_dtype(dtype) if isinstance(dtype, np.dtype) else dtype


def _in_words(batch: Batch) -> dict[str, str]:
    """Returns `{"x": "float32[32, 28]", "y['label']": "int32[32]"}`."""
    named = [*leaf_paths(batch.x, "x"), *leaf_paths(batch.y, "y"), *leaf_paths(batch.weights, "sample_weight")]
    return {path: f"{_canonical(leaf.dtype)}{list(leaf.shape)}" for path, leaf in named}
