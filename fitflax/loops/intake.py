"""What becomes of the data that a call is given: a source whose batches fit the devices, of which the processes know each other's parts."""

import functools
from typing import Any

import jax
import numpy as np

from fitflax.data import Batcher, Source
from fitflax.data.adapt import adapt, takes_batch_size
from fitflax.data.batch import Triple
from fitflax.data.feeds import Feeder
from fitflax.data.shards import Shard, agree_on_shares, part_of_batch_size
from fitflax.data.streams import OneShotSource
from fitflax.errors import FitflaxError
from fitflax.parallel import Strategy
from fitflax.parallel.processes import exchange
from fitflax.state import Batch

__all__ = ["Intake", "as_given", "make_feeder"]

# Iterators that are known again: a trainer that is given many must not keep them all.
_MOST_KNOWN = 8


class Intake:
    """Turns what users give into sources, and knows an iterator again when it comes once more: it may hold a batch that was looked at and not used.

    Args:
        strategy: Where batches go.
        seed: What the order of examples follows from.
    """

    def __init__(self, strategy: Strategy, seed: int) -> None:
        self._strategy = strategy
        self._seed = seed
        self._one_shots: list[OneShotSource] = []

    def adapt(self, data: Any, *targets: Any, call: str, batch_size: int | None = None, is_kept: bool = True, **options: Any) -> Source:
        """Returns the source of data that a user gave; all processes must call it.

        Args:
            data: As in `data.adapt`, or a `Shard` of it.
            *targets: As in `data.adapt`.
            call: What it is for, in words; the same in all processes.
            batch_size: As in `data.adapt`; of a shard, over all processes.
            is_kept: Whether an iterator is to be known again.
            **options: As in `data.adapt`.

        Raises:
            ConfigError, DataError: As in `data.adapt`.
        """
        strategy, seed = self._strategy, self._seed
        is_shard, (index, parts) = isinstance(data, Shard), strategy.part
        data = data.data if is_shard else data
        if is_shard and parts > 1:
            seed = int(np.random.SeedSequence([seed, index]).generate_state(1)[0])  # Or all shards would be shuffled alike.
            if takes_batch_size(data):
                batch_size = part_of_batch_size(batch_size, parts)
        try:
            source = adapt(data, *targets, batch_size=batch_size, seed=seed, **options)
        except FitflaxError as error:
            if strategy.num_processes > 1:
                agree_on_shares(None, strategy.part, 0, functools.partial(exchange, topic=call), is_shard=is_shard, failure=error)
            raise
        source = self._known(source) if is_kept else source
        source.is_shard = is_shard
        return self.agreed(source, call)

    def agreed(self, source: Source, call: str = "fit: a part of the data") -> Source:
        """Returns a source of which the processes know each other's parts; all of them must call it."""
        strategy = self._strategy
        source.shares = None
        if strategy.num_processes > 1:
            tell = functools.partial(exchange, topic=call)
            source.shares = agree_on_shares(source, strategy.part, jax.process_index(), tell, is_shard=source.is_shard)
        return source

    def sample(self, triple: Triple, *, accumulate_steps: int = 1) -> Batch:
        """Returns a batch of the shape that the devices need, of which only shapes matter, so that processes need not compare it.

        Args:
            triple: What the user gave.
            accumulate_steps: Into how many micro-batches it is split.

        Raises:
            DataError: It is no batch.
        """
        return self._strategy.batcher(compare=None, accumulate_steps=accumulate_steps)(triple).batch

    def _known(self, source: Source) -> Source:
        if not isinstance(source, OneShotSource):
            return source
        for earlier in self._one_shots:
            if earlier.iterator is source.iterator:
                return earlier
        self._one_shots = [*self._one_shots[1 - _MOST_KNOWN :], source]
        return source


def make_feeder(strategy: Strategy, *, pad: bool, accumulate_steps: int = 1) -> Feeder:
    """Returns what makes feeds for some devices; `pad` and `accumulate_steps` are those of `Feeder`."""
    return Feeder(strategy.batcher, pad=pad, accumulate_steps=accumulate_steps, make_part=strategy.part_batcher, exchange=exchange)


def as_given(triple: Triple) -> Batch:
    """Returns a batch of as many rows as the user gave, whatever the devices need.

    Raises:
        DataError: It is no batch.
    """
    return Batcher(num_shards=1)(triple).batch
