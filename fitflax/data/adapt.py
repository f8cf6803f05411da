"""Recognizes the kind of the user's data, and creates the source that reads it and the feeds that pad its batches.

Optional libraries are never imported here. To add a kind of data, write a subclass of `AdaptedSource` and list it in `LIBRARY_SOURCES`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fitflax.data.arrays import ArraySource, is_in_memory
from fitflax.data.batch import FedBatch, Position, Selection, Triple, check_not_sparse, is_instance, is_structure
from fitflax.data.feed import Feed
from fitflax.data.padding import Batcher
from fitflax.data.pipelines import GrainSource, RaySource, StreamSource, TableSource, TensorFlowSource
from fitflax.data.shards import ShardFeed
from fitflax.data.sources import AdaptedSource, DataOptions, FunctionSource, IterableSource, OneShotSource, SequenceSource, Source
from fitflax.data.token_file import TokenSource
from fitflax.data.torch_loader import TorchSource, is_loader_iterator, torch_batch
from fitflax.errors import ConfigError, DataError

# The first one that matches the data is its source.
LIBRARY_SOURCES: tuple[type[AdaptedSource], ...] = (TokenSource, RaySource, StreamSource, TableSource, TorchSource, TensorFlowSource, GrainSource)


def adapt(
    data: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_remainder: bool = False,
    selection: Selection = Selection(),  # noqa: B008 (frozen)
    inputs_only: bool = False,
    name: str = "data",
) -> Source:
    """Returns a source that yields the batches of `data`.

    Args:
        data: In-memory data: an array, or a list, tuple, dict, dataclass or other pytree whose leaves are all arrays with an axis of examples (data frames and
            series count as arrays). Or a Hugging Face or Ray dataset, a PyTorch `DataLoader`, a `tf.data.Dataset`, a Grain dataset or loader, any
            other object with `__getitem__` and `__len__`, such as Keras's `PyDataset`, any other iterable or iterator of batches, a function that returns one
            of these, a `TokenFile`, or a `Source`.
        y: Targets of in-memory data.
        sample_weight: Weights of in-memory data, `[examples]` or `[examples, ...]`.
        batch_size: Rows of a batch of in-memory data, or of a Hugging Face or Ray dataset; 32 by default.
        shuffle: Whether in-memory data or a Hugging Face `Dataset` is shuffled in each pass.
        seed: Seed of the shuffling.
        drop_remainder: Whether a shorter last batch of such data is dropped.
        selection: Which keys of dicts, and which columns, are inputs and targets.
        inputs_only: Whether only inputs are needed, as in `predict`.
        name: The caller's name for `data`, for errors.

    Raises:
        DataError: `data` does not yield batches, or its arrays do not fit together.
        ConfigError: An argument does not apply to this kind of data.

    >>> import numpy as np
    >>> adapt(np.zeros((100, 3)), np.zeros(100), batch_size=32).num_batches
    4
    """
    if shuffle not in (True, False):
        raise ConfigError(f"shuffle must be True or False. Received: {shuffle!r}. Pass True to shuffle the rows; Keras's 'batch' is not supported.")
    options = DataOptions(y, sample_weight, batch_size, bool(shuffle), seed, drop_remainder, selection, inputs_only, name)
    if isinstance(data, Source):
        options.reject(data, "y", "sample_weight", "batch_size", "drop_remainder")
        return data
    for role, value in ((name, data), ("y", y), ("sample_weight", sample_weight)):
        if _is_number_list(value):
            raise DataError(f"`{role}` is a list of Python numbers. Convert it to an array: np.asarray({role}).")
    if (source := _library_source(data, options)) is not None:
        return source
    if is_in_memory(data):
        return ArraySource(data, options)
    check_not_sparse(data, name)
    if is_structure(data) and (isinstance(data, tuple) or not (hasattr(data, "__iter__") or callable(data))):
        raise DataError(f"`{name}` is a pytree (a {type(data).__name__}) with leaves that are not arrays. Convert every leaf to an array.")
    if isinstance(data, str | bytes) or data is None or not (callable(data) or hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise DataError(
            f"`{name}` must be arrays, an iterable of batches, or a function that returns an iterator of batches. Received: a {type(data).__name__}."
        )
    options.reject(data, "y", "sample_weight", "batch_size", "drop_remainder")
    if (source := SequenceSource.adapt(data, options)) is not None:
        return source
    if isinstance(data, Iterator):
        return OneShotSource(data, options, torch_batch if is_loader_iterator(data) else lambda item: item)
    # A class counts as a function that makes an iterator.
    if not isinstance(data, type) and (hasattr(data, "__iter__") or not callable(data)):
        iterable = IterableSource(data, options)
        iterable.set_length(data, len(data) if hasattr(data, "__len__") else None)
        return iterable
    return FunctionSource(data, lambda made: _returned_source(made, options))


def _returned_source(made: Any, options: DataOptions) -> Source:
    """Returns the source of what a function has returned."""
    if (source := _library_source(made, options)) is not None:
        return source
    check_not_sparse(made, f"{options.name}()")
    has_batches = isinstance(made, list) or (type(made) is tuple and all(isinstance(part, tuple | list | dict) or is_structure(part) for part in made))
    if not has_batches and is_in_memory(made):
        raise DataError(f"The function `{options.name}` returned arrays (a {type(made).__name__}). Pass the arrays directly, or return an iterator of batches.")
    return SequenceSource.adapt(made, options) or IterableSource(made, options)


def _library_source(data: Any, options: DataOptions) -> Source | None:
    """Returns the source of an object of a supported library; `None` for anything else."""
    for kind in LIBRARY_SOURCES:
        if (source := kind.adapt(data, options)) is not None:
            return source
    name = options.name
    if is_instance(data, "datasets.DatasetDict", "datasets.IterableDatasetDict"):
        raise DataError(f"`{name}` is a {type(data).__name__} with the splits {list(data)}. Pass one of them: {name}[{next(iter(data), 'train')!r}].")
    if is_instance(data, "torch.utils.data.Dataset"):
        raise DataError(
            f"`{name}` is a PyTorch dataset (a {type(data).__name__}), which yields single examples. Pass a loader: DataLoader({name}, batch_size=32)."
        )
    return None


def _is_number_list(data: Any) -> bool:
    """Returns whether `data` is a list of Python numbers, nested or not."""
    while isinstance(data, list) and data and isinstance(data[0], list):
        data = data[0]
    return isinstance(data, list) and bool(data) and isinstance(data[0], bool | int | float)


def takes_batch_size(data: Any) -> bool:
    """Returns whether `adapt` assembles the batches of `data` itself, so that it accepts a batch size.

    >>> import numpy as np
    >>> takes_batch_size(np.zeros(3)), takes_batch_size(iter([np.zeros(3)]))
    (True, False)
    """
    return is_in_memory(data) or any(kind.assembles_batches and kind.matches(data) for kind in LIBRARY_SOURCES)


class Feeder:
    """Creates feeds whose batches have the shape that a strategy needs.

    `make_batcher` takes the options of `Batcher`, and so does `make_part`, for a process that reads only its own shard of the data; `exchange` gathers a value
    from all such processes.
    """

    def __init__(
        self,
        make_batcher: Callable[..., Batcher],
        *,
        pad: bool,
        accumulate_steps: int = 1,
        make_part: Callable[..., Batcher] = Batcher,
        exchange: Callable[[Any], list[Any]] = lambda value: [value],
    ) -> None:
        self._make_batcher, self._make_part, self._exchange = make_batcher, make_part, exchange
        self._pad, self._accumulate_steps = pad, accumulate_steps
        self._batchers: dict[str, Batcher] = {}

    def train(self, source: Source, class_weight: Mapping[int, float] | None, position: Position, *, used: Sequence[int] = (), size: int | None = None) -> Feed:
        """Returns the batches to train on.

        `used` are the examples of this pass that each process has used, if each has its own shard. `size` are the rows of a full batch over all processes, if a
        resumed run knows them; by default the source's batch size, or that of the first batch.
        """
        if size is not None and source.shares is not None:
            size = -(-size // source.shares.num_parts)
        # With fewer examples than a batch, use a smaller batch instead of mostly padding.
        size = _at_most_all(source.batch_size if size is None else size, source)
        batcher = self._batcher(source, is_training=True, size=size, class_weight=class_weight, accumulate_steps=self._accumulate_steps)
        return self._feed(source, batcher, position, used=used, is_saved=True)

    def used(self, source: Source) -> tuple[int, ...]:
        """Returns how many examples each process has taken from its shard of an iterator; `()` if none has, or for other data. All processes must call it."""
        taken = self._exchange(source.taken) if isinstance(source, OneShotSource) and source.shares is not None else []
        return tuple(taken) if any(taken) else ()

    def _batcher(self, source: Source | None = None, **options: Any) -> Batcher:
        make = self._make_batcher if source is None or source.shares is None else self._make_part
        return make(pad=self._pad, **options)

    def _feed(self, source: Source, batcher: Batcher, position: Position = Position(), *, used: Sequence[int] = (), is_saved: bool = False) -> Feed:  # noqa: B008 (frozen)
        if source.shares is None:
            return Feed(source, batcher, position, is_saved=is_saved)
        return ShardFeed(source, batcher, position, used=used, exchange=self._exchange, is_saved=is_saved, pads=self._pad)

    def evaluations(self, source: Source, name: str, steps: int | None, *, exact: Callable[[], bool] = lambda: False) -> Callable[[], Feed]:
        """Returns a function that creates the feed of each evaluation.

        A one-shot iterator serves a single evaluation or, with `steps`, several, each from where the last one ended. `exact` returns whether padding must be
        avoided, so that fewer examples than a batch become a smaller batch, which is compiled separately.
        """
        if source.is_endless and steps is None:
            raise ConfigError(f"The data of {name!r} never ends. Pass the number of batches to evaluate: validation_steps= in fit, steps= elsewhere.")
        batcher = self._batcher(source, size=source.batch_size)

        def make_feed() -> Feed:
            if exact() and (size := _at_most_all(source.batch_size, source)) != source.batch_size:
                return self._feed(source, self._batcher(source, size=size))
            taken = source.taken if isinstance(source, OneShotSource) else 0
            if taken and steps is None:
                raise DataError(
                    f"The data of {name!r} is an iterator that has been used up or read in part. Pass a function that returns a new iterator, "
                    "`lambda: ...`, or the number of batches to evaluate: validation_steps= in fit, steps= elsewhere."
                )
            return self._feed(source, batcher, Position(examples=taken), used=self.used(source))

        return make_feed

    def single(self, triple: Triple, kind: str) -> FedBatch:
        """Returns one padded batch; a batch smaller than earlier ones of its kind is padded to their shape, to avoid recompilation."""
        if kind not in self._batchers:
            self._batchers[kind] = self._batcher(accumulate_steps=self._accumulate_steps) if kind == "train" else self._batcher(must_count=kind != "predict")
        return self._batchers[kind](triple)

    def prediction(self, source: Source) -> Feed:
        """Returns the batches to predict."""
        # Other sources leave out the targets of dicts themselves.
        inputs_only = isinstance(source, OneShotSource) and source.options.selection.inputs is not None
        batcher = self._batcher(source, size=source.batch_size, must_count=False, inputs_only=inputs_only)
        return self._feed(source, batcher, used=self.used(source))


def _at_most_all(size: int | None, source: Source) -> int | None:
    """Returns a batch size, or the number of examples in a pass (of the largest shard) if that is known and smaller."""
    most = source.num_examples if source.shares is None else source.shares.largest
    return size if size is None or most is None else min(size, most)
