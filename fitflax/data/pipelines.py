"""Sources over Hugging Face `datasets` and the input pipelines of `tf.data`, Grain, and Ray Data. The libraries are never imported here."""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import numpy as np
from typing_extensions import override

from fitflax.data.arrays import IndexedSource
from fitflax.data.batch import Position, Triple, is_instance, is_structure, leaf_paths, to_numpy
from fitflax.data.loader_state import Bookmark, Pass, drop, has_exact_state, skips_rows
from fitflax.data.sources import AdaptedSource, DataOptions, IterableSource
from fitflax.errors import DataError, warn
from fitflax.leaves import listed

_INFINITE = -1
_SHUFFLE, _RANDOM = "_ShuffleDataset", "_RandomDataset"
# Grain's `repeat()` without a count reports a length near the largest integer, which batching divides.
_ENDLESS = 2**48


class TableSource(IndexedSource):
    """Batches of a Hugging Face `Dataset`, which is read by row numbers, like arrays, in the same order as arrays with as many rows."""

    kinds = ("datasets.Dataset",)

    def __init__(self, data: Any, options: DataOptions) -> None:
        super().__init__(len(data), options)
        self._data = data
        is_transformed = data.format["type"] == "custom"  # A custom transform gets whole rows and may return other columns.
        self._columns = options.columns(None if is_transformed else data.column_names)
        self._table = data if is_transformed else data.select_columns(self._columns).with_format("numpy")
        self._features = {} if is_transformed else data.features
        self.read(slice(0, 1))  # Rejects columns that are not numeric now, rather than in the first step.

    @override
    def read(self, rows: Any) -> Triple:
        return self.options.split(_column_arrays(self._table[rows], self._columns, self._features, self.options.name))

    @override
    def part(self, begin: int, end: int, options: DataOptions) -> Self:
        return type(self)(self._data.select(range(begin, end)), options)


class StreamSource(IterableSource):
    """Batches of a Hugging Face `IterableDataset`, assembled by its `iter`; its epoch, which seeds shuffling, is the number of the pass."""

    kinds = ("datasets.IterableDataset",)
    assembles_batches = owns_batches = True

    def __init__(self, data: Any, options: DataOptions) -> None:
        super().__init__(data, options)
        self._columns = options.columns(data.column_names)
        self.batch_size = options.size

    @override
    def loader(self, position: Position) -> Any:
        # Each pass has its own view, so that the user's object keeps its epoch and its state.
        view = self.data.with_format("numpy")
        view.set_epoch(position.passes)
        return _StreamBatches(view, self.options)

    @override
    def read(self, item: Any) -> Triple:
        return self.options.split(_column_arrays(item, self._columns, self.data.features or {}, self.options.name))


class _StreamBatches:
    """An iterable of a stream's batches, with the state of the stream if that is exact."""

    def __init__(self, stream: Any, options: DataOptions) -> None:
        self._make = functools.partial(stream.iter, options.size, drop_last_batch=options.drop_remainder)
        self._stream, self._loaded = stream, None
        if has_exact_state(stream):
            self.state_dict, self.load_state_dict = self._state_dict, self._load_state_dict

    def _state_dict(self) -> Any:
        state = self._stream.state_dict()
        return None if skips_rows(state, self._loaded) else state

    def _load_state_dict(self, state: Any) -> None:
        self._loaded = state
        self._stream.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def _column_arrays(batch: Any, columns: list[str], features: Any, name: str) -> dict[str, Any]:
    """Returns a batch with the given columns as arrays of the dataset's dtypes; its NumPy format alone turns all integers into int64."""
    arrays = dict(batch)
    for column in [column for column in columns if column in arrays]:
        where, values = f"{name}[{column!r}]", arrays[column]
        array = np.asarray(values) if hasattr(values, "__array__") else _stacked(values, where)
        if array.dtype == object and array.size and all(hasattr(value, "__len__") and not isinstance(value, str | bytes) for value in array.flat):
            raise DataError(f"{where} holds lists of different lengths. Pad them first, for example with map().")
        dtype = _dtype_of(features.get(column))
        if dtype is not None and dtype.kind in "iu" and array.dtype.kind in "iu":
            array = array.astype(dtype, copy=False)
        to_numpy({column: array}, name=name)
        if dtype is not None and dtype.kind in "biu" and array.dtype.kind == "f":
            raise DataError(f"{where} is a column of dtype {dtype} with missing values. Fill them in, or remove their rows with filter().")
        arrays[column] = array if dtype is None else array.astype(jax.dtypes.canonicalize_dtype(dtype), copy=False)
    return arrays


def _stacked(values: Any, where: str) -> np.ndarray[Any, Any]:
    try:
        return np.stack([np.asarray(value) for value in values])
    except ValueError as error:
        raise DataError(f"{where} holds rows of different shapes. Pad them first, for example with map().") from error


def _dtype_of(feature: Any) -> np.dtype[Any] | None:
    """Returns the dtype of a feature's numbers, also inside nested lists; `None` if it has none, such as for an image."""
    while getattr(feature, "feature", None) is not None:
        feature = feature.feature
    try:
        dtype = np.dtype(getattr(feature, "dtype", None) or object)
    except TypeError:
        return None
    return dtype if dtype.kind in "biuf" else None


# For each part of a data set that draws new random numbers in each iteration, the number of iterators that were started. It determines the next numbers.
# Data sets may share parts.
_STARTED: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


class TensorFlowSource(IterableSource):
    """Batches of a batched `tf.data.Dataset`, without ragged or sparse parts."""

    owns_batches = True  # TensorFlow's tensors are immutable.
    can_reread = False  # The random numbers of a pass depend on how many iterators were started before.

    def __init__(self, data: Any, options: DataOptions) -> None:
        super().__init__(data, options)
        self._random_nodes = _random_nodes(data)
        drawing = [node for node in _nodes(data) if type(node).__name__ in (_SHUFFLE, _RANDOM)]
        self._unseeded = [node for node in drawing if int(getattr(node, "_seed", 1)) == int(getattr(node, "_seed2", 1)) == 0]
        self._repeats = any(_random_nodes(node) for node in _nodes(data) if type(node).__name__ == "_RepeatDataset")
        _check_spec(options.split(data.element_spec))
        count = int(data.cardinality())
        if count == 0:
            raise DataError("The tf.data.Dataset is empty: it has 0 batches.")
        self.set_length(data, count if count > 0 else None, is_endless=count == _INFINITE)

    @classmethod
    @override
    def matches(cls, data: Any) -> bool:
        module = getattr(sys.modules.get("tensorflow"), "data", None)
        return module is not None and isinstance(data, module.Dataset)

    @override
    def loader(self, position: Position) -> Any:
        return self.data.as_numpy_iterator()

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        return drop(_RandomPass(self.data, self.read), position.examples) if self._random_nodes else super().open(position)

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        if not self._random_nodes:
            self._warn_if_not_repeatable(())
            return super().reopen(position, bookmark)
        if bookmark is not None and bookmark.is_own:
            return self.open(position)
        if bookmark is not None and bookmark.started is None:
            bookmark = None  # It is the state of another library.
        # Checkpoints of fitflax 0.1 have no state. Each of its passes over one object started one iterator. Iterators of evaluations before `fit`, which came
        # before these, cannot be distinguished from those of an earlier resume in this process.
        before = [count + position.passes for count in self.num_started or ()] if bookmark is None else _started_before(bookmark)
        has_begun = bookmark is not None and bookmark.has_begun
        until_save = (bookmark.num_started if bookmark is not None and has_begun else None) or ()
        self._warn_if_not_repeatable(before, is_unread=any(after > count + 1 for count, after in zip(before, until_save, strict=False)))
        self._advance(before)
        opened = _RandomPass(self.data, self.read)
        if has_begun:
            opened.begin()
            self._advance(until_save)  # Evaluations on the same data may follow the beginning of the pass.
        return drop(opened, position.examples)

    @override
    def can_reread_before(self, bookmark: Bookmark) -> bool:
        if not self._random_nodes or self._repeats or bookmark.started is None:
            return False
        return all(_STARTED.get(node, 0) < count for node, count in zip(self._random_nodes, _started_before(bookmark), strict=False))

    @override
    def catch_up(self, bookmark: Bookmark) -> bool:
        if not self._random_nodes or bookmark.started is None or bookmark.has_begun:
            return False
        before = _started_before(bookmark)
        self._warn_if_not_repeatable(before, is_unread=max(before, default=0) > 0)  # One batch was read from one iterator, for its shapes.
        self._advance(before)
        return True

    def _warn_if_not_repeatable(self, started: Sequence[int], *, is_unread: bool = False) -> None:
        """Warns if the order of a pass after `started` iterators cannot be repeated. `is_unread`: whether one is not read as far as in the saved run."""
        missing = [wanted - _STARTED.get(node, 0) for node, wanted in zip(self._random_nodes, started, strict=False)]
        if self._unseeded and type(self._unseeded[0]).__name__ == _SHUFFLE:
            reason, advice = "shuffles without a seed", "Use shuffle(..., seed=0)."
        elif self._unseeded:
            reason, advice = "draws random numbers without a seed", "Use Dataset.random(seed=0)."
        elif min(missing, default=0) < 0:
            reason, advice = "has been iterated over before", "Pass a new data set."
        elif self._repeats and (max(missing, default=0) > 0 or is_unread):  # Each repetition draws new numbers, so an iterator would have to be read.
            reason, advice = "repeats a part that draws random numbers", "Remove .repeat(), and pass epochs= to fit."
        else:
            return
        warn(f"The tf.data.Dataset {reason}, so its order of examples cannot be repeated. This run will differ from an uninterrupted one. {advice}")

    def _advance(self, started: Sequence[int]) -> None:
        """Starts iterators until each random part has had the number in `started`. A part precedes those that it contains."""
        for node, wanted in zip(self._random_nodes, started, strict=False):
            while _STARTED.get(node, 0) < wanted:
                _count_start(node)
                iter(node)

    @property
    @override
    def num_started(self) -> list[int] | None:
        return [_STARTED.get(node, 0) for node in self._random_nodes] or None


def _started_before(bookmark: Bookmark) -> Sequence[int]:
    """Returns how many iterators must be started before the pass of a bookmark, or before an evaluation that precedes it."""
    return (bookmark.started if bookmark.num_started is None or bookmark.has_begun else bookmark.num_started) or ()


def _count_start(dataset: Any) -> None:
    for opened in list(_OPENED):  # They come first, because their state may have been saved.
        opened.begin()
    for node in _random_nodes(dataset):
        _STARTED[node] = _STARTED.get(node, 0) + 1


class _RandomPass(Pass):
    """A pass over a data set that draws random numbers. Before it begins, its state is the number of iterators that were started for each random part."""

    def __init__(self, data: Any, read: Callable[[Any], Triple]) -> None:
        self._data, self._read = data, read
        self._iterator: Iterator[Any] | None = None
        _OPENED.add(self)

    def begin(self) -> Iterator[Any]:
        """Starts the iterator of this pass. Opening it does not, because a pass may be opened only for its state."""
        if self._iterator is None:
            _OPENED.discard(self)
            _count_start(self._data)
            self._iterator = self._data.as_numpy_iterator()
        return self._iterator

    @override
    def __next__(self) -> Triple:
        return self._read(next(self.begin()))

    @override
    def snapshot(self) -> Any:
        return {"started": [_STARTED.get(node, 0) for node in _random_nodes(self._data)]} if self._iterator is None else None

    @override
    def close(self) -> None:
        _OPENED.discard(self)


_OPENED: "weakref.WeakSet[_RandomPass]" = weakref.WeakSet()  # Passes that have not begun.


def _check_spec(spec: Triple) -> None:
    """Checks from its element spec that a dataset has dense arrays with a common leading axis of examples."""
    leaves = [leaf for name, part in zip(("x", "y", "sample_weight"), spec, strict=True) for leaf in leaf_paths(part, name)]
    kinds = {path: type(leaf).__name__.removesuffix("Spec") for path, leaf in leaves}
    ragged = [f"{path} is a {kind}" for path, kind in kinds.items() if kind in ("RaggedTensor", "SparseTensor")]
    if ragged:
        raise DataError(f"Batches must be dense arrays, but {listed(ragged)}. Use .padded_batch(n), .to_tensor(), or tf.sparse.to_dense().")
    shapes = {path: leaf.shape for path, leaf in leaves if hasattr(leaf, "shape")}
    inputs = {path: shape for path, shape in shapes.items() if path.startswith("x")}
    known = {tuple(shape[:1].as_list()) for shape in inputs.values() if shape.rank is not None and (not shape.rank or shape[0] is not None)}
    if len(inputs) < len(shapes) and (len(known) > 1 or is_structure(spec.x)):
        # Whether inputs are rows or are passed whole is only known from a batch.
        shapes = {path: shape for path, shape in shapes.items() if path not in inputs}
    scalars = [f"{path} is a single number" for path, shape in shapes.items() if shape.rank == 0]
    lengths = {path: shape[0] for path, shape in shapes.items() if shape.rank and shape[0] is not None}
    if scalars or len(set(lengths.values())) > 1:
        received = listed(scalars or [f"{path} has {length}" for path, length in lengths.items()])
        raise DataError(f"Every array must have a leading axis of examples, of the same length: {received}. Batch the tf.data.Dataset first: .batch(n).")


def _nodes(dataset: Any) -> Iterator[Any]:
    # There is no public API; if TensorFlow renames these attributes, nothing is found.
    yield dataset
    for parent in getattr(dataset, "_inputs", tuple)():
        yield from _nodes(parent)


def _random_nodes(dataset: Any) -> list[Any]:
    """Returns the parts that draw new random numbers in each iteration."""

    def draws_again(node: Any) -> bool:
        kind = type(node).__name__
        return (kind == _SHUFFLE and getattr(node, "_reshuffle_each_iteration", None) is not False) or (kind == _RANDOM and getattr(node, "_rerandomize", True))

    return [node for node in _nodes(dataset) if draws_again(node)]


class GrainSource(IterableSource):
    """Batches of a Grain dataset or loader. Their iterators save states like any other iterator."""

    kinds = tuple(f"{module}.{name}" for module in ("grain", "grain.python") for name in ("MapDataset", "IterDataset", "DataLoader"))

    def __init__(self, data: Any, options: DataOptions) -> None:
        super().__init__(data, options)
        length, is_endless = _grain_length(data)
        self.set_length(data, length, is_endless=is_endless)


def _grain_length(data: Any) -> tuple[int | None, bool]:
    """Returns the number of batches (`None` if unknown), and whether the data is known to be endless."""
    if is_instance(data, "grain.MapDataset", "grain.python.MapDataset"):
        return (None, True) if len(data) > _ENDLESS else (len(data), False)
    if is_instance(data, "grain.IterDataset", "grain.python.IterDataset"):
        # A limit makes data finite; a transformation with several parents ends with the first of them.
        parents = () if "Limit" in type(data).__name__ else getattr(data, "parents", ())
        return None, bool(parents) and all(_grain_length(parent)[1] for parent in parents)
    # A loader is endless if its sampler has no number of epochs. The attribute is private, so it may be missing.
    return None, getattr(getattr(data, "_sampler", None), "_num_epochs", 1) is None


class RaySource(AdaptedSource):
    """Batches of a Ray dataset, or of the shard of it that Ray Train gives to a worker, assembled by `iter_batches`.

    Missing columns, and columns that are not numeric, are errors while reading.
    """

    kinds = ("ray.data.Dataset", "ray.data.DataIterator")
    assembles_batches = owns_batches = True
    is_repeatable = can_reread = False

    def __init__(self, data: Any, options: DataOptions) -> None:
        super().__init__(data, options)
        self._data = data
        self.batch_size = options.size
        options.columns(None)  # Checks that some are selected.

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        return drop(self._batches(), position.examples, warns=False)

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        if position.examples:
            warn(
                "Ray Data does not yield the same examples in the same order after a restart. "
                f"The run resumes after {position.examples} examples of the current pass over the data, which keeps the number of steps, "
                "but some examples may be used twice in this pass and others not at all. To avoid this, save at the ends of epochs."
            )
        return self.open(position)

    def _batches(self) -> Iterator[Triple]:
        options = self.options
        for batch in self._data.iter_batches(batch_size=self.batch_size, batch_format="numpy", drop_last=options.drop_remainder):
            arrays = {column: batch[column] for column in options.columns(list(batch))}
            yield options.split(to_numpy(arrays, name=options.name))


def is_worker_part(data: Any) -> bool:
    """Returns whether `data` is one worker's shard of a Ray dataset, such as from `ray.train.get_dataset_shard`."""
    return RaySource.matches(data) and type(data).__name__ == "StreamSplitDataIterator"
