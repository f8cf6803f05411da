"""Sources whose rows are read by number, so that they can seek to any position; arrays and data frames in memory.

Pandas and polars are never imported here.
"""

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import jax
import numpy as np
from typing_extensions import override

from fitflax.data.batch import Position, Selection, Triple, count_examples, is_instance, is_structure, num_examples, to_numpy
from fitflax.data.loader_state import drop
from fitflax.data.padding import check_not_negative, check_weights
from fitflax.data.sources import AdaptedSource, DataOptions, Source
from fitflax.data.torch_loader import is_tensor, torch_batch
from fitflax.errors import ConfigError, DataError
from fitflax.leaves import aligned_empty, listed
from fitflax.state import PyTree

# Several batches are read together if they fit into a core's cache.
_MAX_BATCHES = 16
_BLOCK_BYTES = 2**22


class RowsPass(Iterator[Triple]):
    """The batches of a pass over rows that are read by number; reading several batches together costs little more than one.

    Args:
        read: Returns rows, given as a slice or as an array of row numbers.
        rows: The part of the pass that is left.
        size: Rows of a batch; the last one may be shorter.
        order: Returns the row numbers in a slice of the whole pass; `None` if rows are not shuffled.

    >>> data = np.arange(9.0)
    >>> rows = RowsPass(lambda rows: Triple(data[rows], (), None), range(2, 9), 2)
    >>> next(rows).x.tolist(), [triple.x.tolist() for triple in (rows.take(5), rows.take(5))], rows.take(5)
    ([2.0, 3.0], [[4.0, 5.0, 6.0, 7.0], [8.0]], None)
    """

    def __init__(self, read: Callable[[Any], Triple], rows: range, size: int, order: Callable[[slice], np.ndarray[Any, Any]] | None = None) -> None:
        self._read, self._rows, self._size, self._order = read, rows, size, order

    @override
    def __next__(self) -> Triple:
        triple = self.take(1)
        if triple is None:
            raise StopIteration
        return triple

    def take(self, batches: int) -> Triple | None:
        """Returns the rows of up to `batches` full batches, or of the shorter last one; `None` at the end of the pass."""
        if not self._rows:
            return None
        count = min(len(self._rows) // self._size, batches) * self._size or len(self._rows)
        taken, self._rows = self._rows[:count], self._rows[count:]
        rows = slice(taken.start, taken.stop)
        return self._read(rows if self._order is None else self._order(rows))


class IndexedSource(AdaptedSource):
    """Batches of `rows` rows that are read by number. Their order depends on `(seed, pass)` only."""

    assembles_batches = True
    knows_length = True
    owns_batches = True

    def __init__(self, rows: int, options: DataOptions) -> None:
        super().__init__(None, dataclasses.replace(options, y=None, sample_weight=None))
        self._rows, self.batch_size, self.shuffles = rows, options.size, options.shuffle
        self.num_examples = rows - rows % self.batch_size if options.drop_remainder else rows
        if not self.num_examples:
            raise DataError(
                f"The data yields no batches. Received: {rows} examples, batch_size={self.batch_size}, drop_remainder={options.drop_remainder}. "
                "Pass more examples, or a smaller batch_size."
            )
        self.num_batches = math.ceil(self.num_examples / self.batch_size)

    @abc.abstractmethod
    def read(self, rows: Any) -> Triple:
        """Returns rows, given as a slice or as an array of row numbers."""

    @abc.abstractmethod
    def part(self, begin: int, end: int, options: DataOptions) -> Self:
        """Returns a source of the rows from `begin` to `end`, before any shuffling."""

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        order = np.random.default_rng([self.options.seed, position.passes]).permutation(self._rows).__getitem__ if self.shuffles else None
        return self.make_pass(position, self.read, order)

    def make_pass(self, position: Position, read: Callable[[Any], Triple], order: Callable[[slice], np.ndarray[Any, Any]] | None) -> RowsPass:
        """Returns the rows of a pass after a position, with the arguments of `RowsPass`."""
        assert self.batch_size is not None and self.num_examples is not None
        return RowsPass(read, range(position.examples, self.num_examples), self.batch_size, order)

    def divide(self, fraction: float, batch_size: int | None = None) -> tuple[Self, Self]:
        """Returns two sources: the first rows, to train on, and the last `fraction` of the rows, in order, with its own `batch_size` if given."""
        cut = math.floor(self._rows * (1.0 - fraction))
        if not 0 < cut < self._rows:
            raise DataError(
                f"validation_split={fraction} of {self._rows} examples leaves {cut} for training and {self._rows - cut} for validation. "
                "Choose a fraction that leaves at least one for each."
            )
        held_out = dataclasses.replace(self.options, shuffle=False, drop_remainder=False, batch_size=batch_size or self.batch_size)
        return self.part(0, cut, self.options), self.part(cut, self._rows, held_out)


class ArraySource(IndexedSource):
    """Batches of arrays `[examples, ...]`; `options` may have targets (`()` for none) and sample weights (`None` for none)."""

    is_checked = True

    def __init__(self, data: Any, options: DataOptions) -> None:
        x, y, weights = _split(data, options)
        check_weights(weights)
        named = {"x": _canonical(x, "x"), "y": _canonical(y, "y"), "sample_weight": _canonical(weights, "sample_weight")}
        lengths = {name: _num_rows(tree, name) for name, tree in named.items() if name == "x" or jax.tree.leaves(tree)}
        if len(set(lengths.values())) > 1:
            raise DataError("All arrays must have the same number of examples: " + ", ".join(f"`{k}` has {v}" for k, v in lengths.items()) + ".")
        self.x, self.y, self.weights = named.values()
        check_not_negative(self.weights)
        self._leaves, self._structure = jax.tree.flatten((self.x, self.y, self.weights))
        super().__init__(lengths["x"], options)

    @classmethod
    @override
    def matches(cls, data: Any) -> bool:
        return is_in_memory(data)

    @property
    @override
    def batches_at_once(self) -> int:
        row_bytes = max(1, sum(leaf.nbytes for leaf in self._leaves) / self._rows)
        return max(1, min(_MAX_BATCHES, int(_BLOCK_BYTES / (row_bytes * self.options.size))))

    @override
    def read(self, rows: Any) -> Triple:
        cut = [leaf[rows] if isinstance(rows, slice) else _take_aligned(leaf, rows) for leaf in self._leaves]
        return Triple(*jax.tree.unflatten(self._structure, cut))

    @override
    def part(self, begin: int, end: int, options: DataOptions) -> Self:
        x, y, weights = self.read(slice(begin, end))
        return type(self)(x, dataclasses.replace(options, y=y, sample_weight=weights, selection=Selection(), inputs_only=False))


def is_in_memory(data: Any) -> bool:
    """Returns whether `data` is an array, or a list, tuple, dict or other pytree of nothing but arrays."""
    if isinstance(data, list | tuple):
        return bool(data) and all(is_in_memory(part) or part is None or (isinstance(part, tuple) and not part) for part in data) and bool(jax.tree.leaves(data))
    if isinstance(data, dict):
        return bool(data) and all(map(is_in_memory, data.values()))
    if is_structure(data):
        # An iterable that is not a mapping yields batches.
        is_table = isinstance(data, Mapping) or not (hasattr(data, "__iter__") or callable(data))
        return is_table and bool(jax.tree.leaves(data)) and all(map(is_in_memory, jax.tree.leaves(data)))
    return hasattr(data, "__array__") and hasattr(data, "shape")


def _split(data: Any, options: DataOptions) -> tuple[Any, Any, Any]:
    """Returns inputs, targets and weights of in-memory data, with frames, series and tensors as NumPy arrays."""
    selection, inputs_only = options.selection, options.inputs_only
    if selection.inputs is not None and _is_frame(data):
        names = selection.columns(list(data.columns), inputs_only=inputs_only or options.y is not None, name=options.name)
        columns = _columns(data, options.name, names)
        column_names = [column for column, _ in columns]
        if twice := sorted({column for column in column_names if column_names.count(column) > 1}):
            raise DataError(f"`{options.name}` has duplicate column names: {twice}. Rename or drop these columns.")
        data = dict(columns)
    data, y, weights = _as_numpy(data, options.name), _as_numpy(options.y, "y"), _as_numpy(options.sample_weight, "sample_weight")
    if inputs_only or y is not None:
        # Without targets, as in predict, or with separate ones, a tuple is several inputs.
        return (selection.split(data, inputs_only=True).x if isinstance(data, Mapping) else data), () if inputs_only else y, weights
    if isinstance(data, list) and all(isinstance(part, tuple | dict) or is_structure(part) for part in data):
        raise DataError(
            f"A list that contains only arrays is treated as inputs. Received: a list of length {len(data)}, "
            f"whose first element is a {type(data[0]).__name__}. To pass a list of batches, use a function: `lambda: batches`."
        )
    triple = Triple(data, (), None) if type(data) is list else selection.split(data)
    if weights is not None and triple.weights is not None:
        raise ConfigError("sample_weight is passed twice: as an argument and as the third element of the data. Leave one of them out.")
    return triple.x, triple.y, triple.weights if weights is None else weights


def _as_numpy(tree: Any, name: str) -> Any:
    if _is_frame(tree):
        columns = [array for _, array in _columns(tree, name)]
        if not columns:
            raise DataError(f"`{name}` has no columns.")
        return np.stack(columns, axis=1)  # In their common dtype.
    if is_instance(tree, "pandas.Series", "polars.Series"):
        if fault := _fault(tree):
            raise DataError(f"`{name}` must hold numbers, but it {fault}. Encode it as numbers, and fill in missing values, first.")
        return _values(tree)
    if is_tensor(tree):
        return torch_batch(tree)
    if type(tree) in (list, tuple):
        return type(tree)(_as_numpy(part, f"{name}[{index}]") for index, part in enumerate(tree))
    if isinstance(tree, dict):
        return {key: _as_numpy(part, f"{name}[{key!r}]") for key, part in tree.items()}
    if is_structure(tree):
        return jax.tree_util.tree_map_with_path(lambda path, leaf: _as_numpy(leaf, name + jax.tree_util.keystr(path)), tree)
    return tree


def _take_aligned(leaf: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns `leaf[rows]` in aligned memory, which JAX on CPU uses without another copy."""
    taken = aligned_empty((len(rows), *leaf.shape[1:]), leaf.dtype)
    if leaf.flags.c_contiguous and leaf.flags.aligned:
        leaf.take(rows, axis=0, out=taken, mode="clip")  # Other modes copy twice.
    else:
        taken[...] = leaf[rows]  # `take` would copy the whole array.
    return taken


def _num_rows(tree: PyTree, name: str) -> int:
    try:
        return num_examples(tree, name=name)
    except DataError as error:
        if not is_structure(tree):
            raise
        advice = "To pass graphs, or other inputs that the module takes whole, use a function that yields batches: (x, y) or (x, y, sample_weight)."
        raise DataError(f"In-memory data is split into batches, so its arrays must share an axis of examples. {error} {advice}") from None


def _canonical(tree: PyTree, name: str) -> PyTree:
    """Returns `tree` as NumPy arrays of JAX's canonical dtypes (float64 becomes float32), so that steps need not convert them."""
    arrays = to_numpy(tree, name=name)
    return jax.tree.map(lambda leaf: np.asarray(jax.device_get(leaf)).astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False), arrays)


# -- data frames --


def _is_frame(data: Any) -> bool:
    return is_instance(data, "pandas.DataFrame", "polars.DataFrame")


def _columns(frame: Any, name: str, names: list[str] | None = None) -> list[tuple[Any, np.ndarray[Any, Any]]]:
    """Returns the names and rows of columns, without the index of the data frame."""
    pairs = frame.items() if hasattr(frame, "items") else [(series.name, series) for series in frame]
    columns = [(column, series) for column, series in pairs if names is None or column in names]
    faults = [f"{column!r} {fault}" for column, series in columns if (fault := _fault(series))]
    if faults:
        raise DataError(
            f"All columns of `{name}` must hold numbers, but {listed(faults)}. Encode them as numbers, fill in missing values, or drop the columns first."
        )
    return [(column, _values(series)) for column, series in columns]


def _numeric_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Returns the NumPy dtype of a column; `None` if it is not numeric. Categories are not: their codes have no numeric meaning."""
    base_dtype = dtype
    for attribute in ("numpy_dtype", "subtype"):  # Of nullable and Arrow types, and of sparse types.
        base_dtype = getattr(base_dtype, attribute, base_dtype)
    return base_dtype if isinstance(base_dtype, np.dtype) and base_dtype.kind in "biuf" else None


def _fault(series: Any) -> str | None:
    """Returns why a column cannot be used, as the end of a sentence that begins with its name; `None` if it can."""
    if hasattr(series, "null_count"):  # polars
        is_numeric, has_missing = series.dtype.is_numeric() or str(series.dtype) == "Boolean", bool(series.null_count())
    else:
        is_numeric = _numeric_dtype(series.dtype) is not None
        # A nullable column distinguishes missing values from NaN, which a NumPy array cannot.
        has_missing = not isinstance(series.dtype, np.dtype) and not hasattr(series.dtype, "subtype") and bool(series.isna().any())
    return "has missing values" if is_numeric and has_missing else None if is_numeric else f"is of type {series.dtype}"


def _values(series: Any) -> np.ndarray[Any, Any]:
    return np.asarray(series.to_numpy() if hasattr(series, "null_count") else series.to_numpy(dtype=_numeric_dtype(series.dtype)))


# -- the first batches of other data --


class FirstBatches(Source):
    """The first `count` batches, or fewer, of another source's first pass, kept in memory and the same in every pass.

    >>> from fitflax.data import adapt
    >>> few = FirstBatches(adapt(np.arange(7.0), batch_size=2, shuffle=False), 2)
    >>> [triple.x.tolist() for triple in few.open(Position(passes=3))], few.num_examples
    ([[0.0, 1.0], [2.0, 3.0]], 4)
    """

    owns_batches = True
    knows_length = True
    shuffles = False

    def __init__(self, source: Source, count: int) -> None:
        self._batches: list[Triple] = []
        for triple in itertools.islice(source.open(Position()), count):
            arrays = [to_numpy(tree, name=name) for name, tree in zip(("x", "y", "sample_weight"), triple, strict=True)]
            self._batches.append(Triple(*jax.tree.map(np.array, arrays)))
        if not self._batches:
            raise DataError("The data yields no batches.")
        self.num_batches = len(self._batches)
        self.num_examples = sum(map(count_examples, self._batches))
        self.batch_size = source.batch_size
        self.is_shard = source.is_shard

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        return drop(iter(self._batches), position.examples, warns=False)
