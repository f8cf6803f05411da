"""Creates the feeds of runs, evaluations and predictions, with the rules for one-shot iterators."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fitflax.data.batch import Batcher, FedBatch, Position, Triple
from fitflax.data.shards import ShardFeed
from fitflax.data.sources import Feed, OneShotSource, Source
from fitflax.errors import ConfigError, DataError

__all__ = ["Feeder"]


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
        self._make_batcher = make_batcher
        self._make_part = make_part
        self._exchange = exchange
        self._pad = pad
        self._accumulate_steps = accumulate_steps
        self._batchers: dict[str, Batcher] = {}

    def train(self, source: Source, class_weight: Mapping[int, float] | None, position: Position, *, used: Sequence[int] = (), size: int | None = None) -> Feed:
        """Returns the batches to train on.

        `used` are the examples of this pass that each process has used, if each has its own shard. `size` are the rows of a full batch over all processes, if a
        resumed run knows them; by default the source's batch size, or that of the first batch.
        """
        if size is not None and source.shares is not None:
            size = -(-size // source.shares.num_parts)
        size = source.batch_size if size is None else size
        if size is not None and (most := _most_examples(source)) is not None:
            size = min(size, most)  # With fewer examples than a batch, use a smaller batch instead of mostly padding.
        return self._feed(source, self._train_batcher(source, size=size, class_weight=class_weight), position, used=used, is_saved=True)

    def _train_batcher(self, source: Source | None = None, **options: Any) -> Batcher:
        return self._batcher(source, accumulate_steps=self._accumulate_steps, **options)

    def _batcher(self, source: Source | None = None, **options: Any) -> Batcher:
        make = self._make_batcher if source is None or source.shares is None else self._make_part
        return make(pad=self._pad, **options)

    def _feed(self, source: Source, batcher: Batcher, position: Position = Position(), *, used: Sequence[int] = (), is_saved: bool = False) -> Feed:  # noqa: B008 (frozen)
        if source.shares is None:
            return Feed(source, batcher, position, is_saved=is_saved)
        return ShardFeed(source, batcher, position, used=used, exchange=self._exchange, is_saved=is_saved, pads=self._pad)

    def evaluations(self, source: Source, name: str, steps: int | None, *, exact: Callable[[], bool] = lambda: False) -> Callable[[], Feed]:
        """Returns a function that creates the feed of each evaluation.

        A one-shot iterator serves a single evaluation or, with `steps`, one evaluation after another from where it is. `exact` returns whether padding must be
        avoided, so that fewer examples than a batch become a smaller batch, which is compiled separately.
        """
        if source.is_endless and steps is None:
            raise ConfigError(f"The data of {name!r} never ends. Pass the number of batches to evaluate: validation_steps= in fit, steps= elsewhere.")
        batcher = self._batcher(source, size=source.batch_size)

        def make_feed() -> Feed:
            if exact() and source.batch_size is not None and (most := _most_examples(source)) is not None:
                return self._feed(source, self._batcher(source, size=min(source.batch_size, most)))
            if not isinstance(source, OneShotSource):
                return self._feed(source, batcher)
            if source.taken and steps is None:
                raise DataError(
                    f"The data of {name!r} is an iterator that has been used up. Pass a function that returns a new iterator, `lambda: ...`, "
                    "or set validation_steps to the number of batches for each validation."
                )
            return self._feed(source, batcher, Position(examples=source.taken))

        return make_feed

    def single(self, triple: Triple, kind: str) -> FedBatch:
        """Returns one padded batch; a batch smaller than earlier ones of its kind is padded to their shape, to avoid recompilation."""
        if kind not in self._batchers:
            self._batchers[kind] = self._train_batcher() if kind == "train" else self._batcher(must_count=kind != "predict")
        return self._batchers[kind](triple)

    def prediction(self, source: Source) -> Feed:
        """Returns the batches to predict."""
        return self._feed(source, self._batcher(source, size=source.batch_size, must_count=False))


def _most_examples(source: Source) -> int | None:
    """Returns the number of examples in a pass; with shards, that of the largest one."""
    return source.num_examples if source.shares is None else source.shares.largest
