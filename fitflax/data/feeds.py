"""Which batches a run or an evaluation gets: feeds over sources, and the rules for sources that serve only once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fitflax.data.batch import Batcher, FedBatch, Position, Triple
from fitflax.data.shards import ShardFeed
from fitflax.data.streams import Feed, OneShotSource, Source
from fitflax.errors import ConfigError, DataError

__all__ = ["Feeder"]


class Feeder:
    """Makes feeds whose batches have the shape that a strategy needs.

    Args:
        make_batcher: Makes what gives batches the shape that the devices need; takes the options of `Batcher`.
        pad: Whether to pad at all.
        accumulate_steps: Into how many micro-batches training splits each replica's share; sizes of training are multiples of that as well.
        make_part: Does what `make_batcher` does for a process that is given nothing but its own part of each batch.
        exchange: Gives, in all such processes, what each calls it with.
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

        Args:
            source: Where they come from.
            class_weight: `{label: weight}`.
            position: Where to begin.
            used: By process, how many examples of the pass are used, where each has a part of its own.
            size: The rows of a full batch, over all processes, that a resumed run found out; by default the source's, or that of the first batch.
        """
        if size is not None and source.shares is not None:
            size = -(-size // source.shares.num_parts)
        size = source.batch_size if size is None else size
        if size is not None and (most := _most_examples(source)) is not None:
            size = min(size, most)  # Fewer examples than one batch are a smaller batch, not one that is mostly padding.
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
        """Returns what makes the batches of each evaluation.

        A source that serves once serves one evaluation of all of it, or goes on from one evaluation to the next where `steps` says how far.

        Args:
            source: Where they come from.
            name: The caller's name for it, for errors.
            steps: Batches of an evaluation; `None` for all.
            exact: Returns whether fewer examples than one batch are a smaller batch, compiled by itself, because they must not be padded.

        Raises:
            ConfigError: The data never ends, and there are no `steps`.
        """
        if source.is_endless and steps is None:
            raise ConfigError(f"The data of {name!r} never ends. Say how many batches to evaluate: validation_steps= in fit, steps= elsewhere.")
        batcher = self._batcher(source, size=source.batch_size)

        def serve() -> Feed:
            if exact() and source.batch_size is not None and (most := _most_examples(source)) is not None:
                return self._feed(source, self._batcher(source, size=min(source.batch_size, most)))
            if not isinstance(source, OneShotSource):
                return self._feed(source, batcher)
            if source.taken and steps is None:
                raise DataError(
                    f"The data of {name!r} is an iterator that has been used up. Pass a function that makes one, `lambda: ...`; "
                    "or say with validation_steps how many of its batches each validation takes."
                )
            return self._feed(source, batcher, Position(examples=source.taken))

        return serve

    def single(self, triple: Triple, kind: str) -> FedBatch:
        """Returns one batch; smaller batches of a kind are padded to the shape that is compiled already."""
        if kind not in self._batchers:
            self._batchers[kind] = self._train_batcher() if kind == "train" else self._batcher()
        return self._batchers[kind](triple)

    def prediction(self, source: Source) -> Feed:
        """Returns the batches to predict."""
        return self._feed(source, self._batcher(source, size=source.batch_size))


def _most_examples(source: Source) -> int | None:
    """Returns how many examples a pass has; where there are parts, the largest of them."""
    return source.num_examples if source.shares is None else source.shares.largest
