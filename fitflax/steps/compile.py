"""Compiles the steps of a task: the kinds of compiled functions, compilation in a thread, and JAX's cache on disk."""

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax import lax
from jax.experimental.compilation_cache import compilation_cache

from fitflax.errors import ConfigError, warn
from fitflax.parallel.placement import Form
from fitflax.parallel.strategy import Compiled, Layout, Places, Strategy
from fitflax.state import Batch, PyTree, TrainState, shapes_key
from fitflax.steps.live_state import Carry, Sums
from fitflax.steps.outputs import NOTHING, Keep, Returned, as_vector
from fitflax.steps.train_step import Task
from fitflax.storage import is_url

_DIRECTORY = "jax_compilation_cache_dir"
# JAX's option, its default, and the value that caches everything. By default, JAX does not cache what compiles in less than a second, as most steps of small
# models do.
_LIMITS: tuple[tuple[str, float, float], ...] = (
    ("jax_persistent_cache_min_compile_time_secs", 1.0, 0.0),
    ("jax_persistent_cache_min_entry_size_bytes", 0, -1),
)
_shared: list[tempfile.TemporaryDirectory[str]] = []  # The directory of `share_programs`.

# A threshold that is never reached, and the one that applies outside of `without_full_collections`.
_NEVER = 2**31 - 1
_usual_threshold = gc.get_threshold()[2]


def trim_heap() -> None:
    """Returns freed memory to the operating system. With glibc, compiling a large model leaves hundreds of megabytes of it. Elsewhere this does nothing."""
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

    This helps notebooks: a cell that is run again creates new functions, for which JAX compiles again, but the programs are equal, so the cache has them.
    """
    is_off = not jax.config.values["jax_enable_compilation_cache"]
    if _shared or is_off or jax.config.values[_DIRECTORY] or os.environ.get(_DIRECTORY.upper()):
        return
    with contextlib.suppress(OSError, ConfigError):  # Without a cache, JAX compiles again.
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
    """Compiles a lowered function in a thread. The first call then finds the compiled function."""

    def __init__(self, lowered: jax.stages.Lowered) -> None:
        self._memory: Any = None
        self._thread = threading.Thread(target=self._compile, args=(lowered,), name="fitflax-compile")
        self._thread.start()

    def _compile(self, lowered: jax.stages.Lowered) -> None:
        with contextlib.suppress(Exception):  # The call itself compiles again and raises the error.
            self._memory = lowered.compile().memory_analysis()

    def wait(self) -> None:
        """Waits until it is compiled. Call it before the function, which would otherwise be compiled twice."""
        self._thread.join()

    def memory(self) -> Any:
        """Waits until it is compiled, and returns JAX's memory analysis, or `None` if there is none."""
        self.wait()
        return self._memory


class _FunctionSpec(NamedTuple):
    """Identifies a compiled function; `treedef` and `places` are the structure and the placement of the state."""

    kind: str
    treedef: Any
    places: Layout
    keep: Keep

    @property
    def is_group(self) -> bool:
        return self.kind.endswith("group")

    @property
    def rows(self) -> Layout:
        """Layout of batches and of rows."""
        return "group" if self.is_group else "split"


class CompiledSteps:
    """The compiled functions of a task, by kind and structure of the state.

    `"init"` takes a key and a batch, and returns a state without its key. All others take the leaves and the key of a carry, then packed sums if
    there are any; a returned state has the placement of the given one. Their other arguments:

    * `"train"`, `"evaluate"`: a batch. For evaluation, the leaves are those of `(params, model_state)`.
    * `"train group"`, `"evaluate group"`: a count, and batches with a leading axis of steps, of which `count` are used.
    * `"train whole group"`: as `"train group"`, but the count is the size of the leading axis, so the compiler knows it.
    * `"predict"`: the index of the batch, and its inputs; `"predict group"`: the index of the first batch, a count, and inputs.

    A group of any number of steps runs the same compiled loop, so rounding does not depend on where groups end. Whole groups may be a separate loop.
    `form_of` returns how the sums of training (`True`) or of evaluation are packed.
    """

    def __init__(self, task: Task, form_of: Callable[[bool], Form]) -> None:
        self._task, self._form_of = task, form_of
        self._functions: dict[_FunctionSpec, Compiled] = {}
        self._compilations: dict[_FunctionSpec, Compilation] = {}
        self._last: dict[str, tuple[Any, Keep, Compiled]] = {}
        self.seconds_waited = 0.0

    def get(self, kind: str, carry: Carry, *, keep: Keep = NOTHING) -> Compiled:
        """Returns the function for states like this one, after waiting for its compilation in a thread."""
        last = self._last.get(kind)
        if last is not None and last[0] is carry.treedef and last[1] is keep:  # Comparing large structures can take longer than a step.
            return last[2]
        spec = self._spec(kind, carry, keep)
        begin = time.perf_counter()
        self._wait(spec)
        self.seconds_waited += time.perf_counter() - begin
        function = self._make(spec)
        self._last[kind] = (carry.treedef, keep, function)
        return function

    def traceable(self, kind: str, carry: Carry, *, keep: Keep = NOTHING) -> Compiled:
        """Returns the function for states like this one without waiting, for evaluating shapes."""
        return self._make(self._spec(kind, carry, keep))

    @without_full_collections()
    def lower(self, kind: str, carry: Carry, *arguments: Any, keep: Keep = NOTHING) -> jax.stages.Lowered:
        """Traces the function for shapes with placements."""
        return self.traceable(kind, carry, keep=keep).lower(*arguments)

    def begin(self, kind: str, carry: Carry, *arguments: Any, keep: Keep = NOTHING) -> Compilation:
        """Traces the function for shapes with placements, which finds errors, and compiles it in a thread; `get` waits for it."""
        lowered, spec = self.lower(kind, carry, *arguments, keep=keep), self._spec(kind, carry, keep)
        self._last.pop(kind, None)
        self._wait(spec)
        self._compilations[spec] = compilation = Compilation(lowered)
        return compilation

    def _wait(self, spec: _FunctionSpec) -> None:
        compilation = self._compilations.pop(spec, None)
        if compilation is not None:
            compilation.wait()

    def _spec(self, kind: str, carry: Carry, keep: Keep) -> _FunctionSpec:
        return _FunctionSpec(kind, carry.treedef, self._task.strategy.places(carry.leaves), keep)

    def _make(self, spec: _FunctionSpec) -> Compiled:
        if spec not in self._functions:
            makers = {"init": self._init, "train": self._train, "evaluate": self._evaluate, "predict": self._predict}
            self._functions[spec] = makers[spec.kind.partition(" ")[0]](spec)
        return self._functions[spec]

    def _compile(self, spec: _FunctionSpec, fn: Callable[..., Any], outputs: Layout | Sequence[Layout], *, donate: Sequence[int] = ()) -> Compiled:
        count: list[Layout] = ["replicated"] if spec.is_group else []
        inputs: list[Layout] = [spec.places, "replicated", "replicated", *count, spec.rows]
        return self._task.strategy.compile(fn, inputs=inputs, outputs=outputs, donate=donate)

    def _init(self, spec: _FunctionSpec) -> Compiled:
        def init_state(key: jax.Array, batch: Batch) -> TrainState:
            return dataclasses.replace(self._task.init_state(key, batch), key=())  # type: ignore[arg-type]

        places = Places(jax.tree.unflatten(spec.treedef, spec.places.tree)) if isinstance(spec.places, Places) else spec.places
        return self._task.strategy.compile(init_state, inputs=("replicated", "split"), outputs=places)

    def _train(self, spec: _FunctionSpec) -> Compiled:
        treedef, keep, strategy = spec.treedef, spec.keep, self._task.strategy

        def train_step(leaves: list[Any], key: jax.Array, sums: Sums, batch: Batch) -> Any:
            form = self._form_of(True)
            state, new_sums, values, rows, kept = self._task.train_step(Carry(leaves, treedef, key).state(), form.unpack(sums), batch, keep=keep)
            return Carry.of(state).leaves, form.pack(new_sums), as_vector(values, new_sums.metrics), rows, *kept

        def train_group(leaves: list[Any], key: jax.Array, sums: Sums, count: jax.Array, batches: Batch) -> Any:
            form, size = self._form_of(True), batches.mask.shape[0]

            # Sums and values stay packed between steps, because XLA copies every array that a loop carries.
            def one(index: Any, carry: tuple[list[Any], Sums]) -> Any:
                state, sums = Carry(carry[0], treedef, key).state(), form.unpack(carry[1])
                state, new_sums, values, rows, kept = self._task.train_step(state, sums, _batch_at(batches, index), keep=keep)
                return (Carry.of(strategy.pin(state)).leaves, form.pack(new_sums)), (as_vector(values, {}), kept), rows

            (leaves, sums), (values, kept), rows = _loop(one, (leaves, sums), size if spec.kind == "train whole group" else count, size)
            return leaves, sums, as_vector([values], form.unpack(sums).metrics), rows, *kept

        grads: Layout = "replicated"
        if keep.grads and self._task.custom_step is None and isinstance(spec.places, Places):
            grads = Places(jax.tree.unflatten(treedef, spec.places.tree).params)
        outputs: list[Layout] = [spec.places, "replicated", "replicated", spec.rows, grads, "replicated", "replicated"]
        return self._compile(spec, train_group if spec.is_group else train_step, outputs, donate=(0, 2))

    def _evaluate(self, spec: _FunctionSpec) -> Compiled:
        def eval_step(leaves: list[Any], key: jax.Array, sums: Sums, batch: Batch) -> Any:
            form = self._form_of(False)
            params, model_state = jax.tree.unflatten(spec.treedef, leaves)
            new_sums, rows = self._task.eval_step(params, model_state, key, form.unpack(sums), batch)
            return form.pack(new_sums), as_vector([], new_sums.metrics), rows

        def eval_group(leaves: list[Any], key: jax.Array, sums: Sums, count: jax.Array, batches: Batch) -> Any:
            form = self._form_of(False)
            params, model_state = jax.tree.unflatten(spec.treedef, leaves)

            def one(index: Any, sums: Sums) -> Any:
                new_sums, rows = self._task.eval_step(params, model_state, key, form.unpack(sums), _batch_at(batches, index))
                return form.pack(new_sums), (), rows

            sums, _, rows = _loop(one, sums, count, batches.mask.shape[0])
            return sums, as_vector([], form.unpack(sums).metrics), rows

        return self._compile(spec, eval_group if spec.is_group else eval_step, ("replicated", "replicated", spec.rows), donate=(2,))

    def _predict(self, spec: _FunctionSpec) -> Compiled:
        def predict_step(leaves: list[Any], key: jax.Array, index: jax.Array, x: PyTree) -> Any:
            params, model_state = jax.tree.unflatten(spec.treedef, leaves)
            return Returned.of(self._task.predict_step(params, model_state, key, index, x))

        def predict_group(leaves: list[Any], key: jax.Array, first: jax.Array, count: jax.Array, xs: PyTree) -> Any:
            def one(index: Any, carry: tuple[()]) -> Any:
                return carry, (), predict_step(leaves, key, first + index, _batch_at(xs, index))

            return _loop(one, (), count, jax.tree.leaves(xs)[0].shape[0])[2]

        return self._compile(spec, predict_group if spec.is_group else predict_step, spec.rows)


def train_kind(strategy: Strategy, count: int, size: int) -> str:
    """Returns the kind of compiled function for `count` steps in a call of at most `size` steps."""
    if size == 1:
        return "train"
    return "train whole group" if count == size and strategy.prefers_counted_loops else "train group"


def _loop(one: Callable[[Any, Any], Any], carry: Any, count: Any, size: int) -> Any:
    """Runs `one(index, carry) -> (carry, last, rows)` for `count` steps; returns the carry and `last` of the last step, and the rows of all, `[size, ...]`."""

    def body(index: jax.Array, looped: Any) -> Any:
        carry, _, rows = looped
        carry, last, new_rows = one(index, carry)
        return carry, last, jax.tree.map(functools.partial(lax.dynamic_update_index_in_dim, index=index, axis=0), rows, new_rows)

    def zeros(shapes: PyTree, *lead: int) -> PyTree:
        return jax.tree.map(lambda leaf: jax.numpy.zeros((*lead, *leaf.shape), leaf.dtype), shapes)

    _, last, rows = jax.eval_shape(one, jax.ShapeDtypeStruct((), np.int32), carry)
    return lax.fori_loop(0, count, body, (carry, zeros(last), zeros(rows, size)))


def _batch_at(batches: PyTree, index: Any) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), batches)


# The carry of a state whose shapes need not be known.
_ANY_CARRY = Carry([], None, None)


class InitialState:
    """Computes the state at step 0 of a task from a key and the shapes of a batch, compiled unless `is_eager()`."""

    def __init__(self, task: Task, steps: CompiledSteps, is_eager: Callable[[], bool]) -> None:
        self._task, self._steps, self._is_eager, self._strategy = task, steps, is_eager, task.strategy
        self._states: dict[Any, TrainState] = {}  # Shapes, by shapes of a batch and type of the key.

    @functools.cached_property
    def _traced(self) -> Any:
        return self._strategy.trace(self._task.init_state, inputs=("replicated", "split"))

    def init(self, key: jax.Array, batch: Batch) -> TrainState:
        """Returns the state at step 0, on the devices."""
        key = self._strategy.put(key)
        if self._is_eager():
            return self._init_eagerly(key, batch)
        state = self._steps.get("init", self._carry(key, batch))(key, self._strategy.feed(batch))
        return dataclasses.replace(cast(TrainState, state), key=key)

    def _init_eagerly(self, key: jax.Array, batch: Batch) -> TrainState:
        """Returns the state at step 0, and caches its shapes."""
        with jax.disable_jit():
            state = cast(TrainState, self._traced(key, self._strategy.feed(batch)))
        self._states[self._key_of(key, batch)] = self._strategy.abstract_state(state)
        return self._strategy.put_state(state)

    def _key_of(self, key: jax.Array, batch: Batch) -> Any:
        return shapes_key(self._strategy.abstract_feed(batch)), key.dtype

    def begin(self, key: jax.Array, batch: Batch) -> TrainState:
        """Returns the shapes of the state at step 0, and begins to compile `init` in a thread."""
        self._steps.begin("init", self._carry(key, batch), self._strategy.abstract_put(key), self._strategy.abstract_feed(batch))
        return self.shapes(key, batch)

    def shapes(self, key: jax.Array, batch: Batch) -> TrainState:
        """Returns the shapes and placements of the state at step 0, without computing anything."""
        seen = self._key_of(key, batch)
        if seen not in self._states and self._is_eager():
            self._init_eagerly(self._strategy.put(key), jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), batch))
        elif seen not in self._states:
            # If placements depend on shapes, these must be known before compilation; otherwise one trace is enough for both.
            init: Any = self._steps.traceable("init", _ANY_CARRY) if self._is_replicated else self._traced
            state = jax.eval_shape(init, self._strategy.abstract_put(key), self._strategy.abstract_feed(batch))
            self._states[seen] = self._strategy.abstract_state(dataclasses.replace(state, key=key))
        return self._states[seen]

    @property
    def _is_replicated(self) -> bool:
        return self._strategy.places(()) == "replicated"

    def _carry(self, key: jax.Array, batch: Batch) -> Carry:
        return _ANY_CARRY if self._is_replicated else Carry.of(self.shapes(key, batch))
