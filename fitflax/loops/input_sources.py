"""Turns the data of a call into a source whose batches fit the devices, and lets processes agree on their shards."""

import functools
from typing import Any

import jax
import numpy as np

from fitflax.data import Batcher, Source
from fitflax.data.adapt import adapt, takes_batch_size
from fitflax.data.batch import Triple
from fitflax.data.feeds import Feeder
from fitflax.data.ray_data import is_worker_part
from fitflax.data.shards import Shard, agree_on_shares, part_of_batch_size
from fitflax.data.sources import OneShotSource
from fitflax.errors import DataError, FitflaxError
from fitflax.parallel import Strategy
from fitflax.parallel.processes import exchange
from fitflax.state import Batch

__all__ = ["Intake", "as_given", "make_feeder"]

# Number of iterators to recognize; a trainer that is given many must not keep them all.
_MAX_ITERATORS = 8


class Intake:
    """Turns user data into sources. It recognizes an iterator that is passed again, because its source may hold a batch that was not used."""

    def __init__(self, strategy: Strategy, seed: int) -> None:
        self._strategy = strategy
        self._seed = seed
        self._one_shots: list[OneShotSource] = []

    def adapt(self, data: Any, *targets: Any, call: str, batch_size: int | None = None, is_kept: bool = True, **options: Any) -> Source:
        """Returns the source of user data; all processes must call it, with the same `call`, the name of the call for errors.

        Arguments are those of `data.adapt`, but data may also be a `Shard`, like data that Ray Train gives to one of several workers. Its `batch_size` is
        over all processes. `is_kept` tells whether to recognize an iterator later.
        """
        strategy, seed = self._strategy, self._seed
        is_shard, (index, parts) = isinstance(data, Shard) or is_worker_part(data), strategy.part
        data = data.data if isinstance(data, Shard) else data
        if is_shard and parts > 1:
            seed = int(np.random.SeedSequence([seed, index]).generate_state(1)[0])  # Otherwise all shards would be shuffled alike.
            if takes_batch_size(data):
                batch_size = part_of_batch_size(batch_size, parts)
        try:
            source = adapt(data, *targets, batch_size=batch_size, seed=seed, **options)
            if strategy.num_processes > 1 and not is_shard and not source.is_repeatable:
                raise DataError(
                    "Each process would read the rows of this Ray dataset in a different order. Pass each worker its shard, from "
                    "ray.train.get_dataset_shard(), and do not exclude the dataset in DataConfig(datasets_to_split=...)."
                )
        except FitflaxError as error:
            if strategy.num_processes > 1:
                agree_on_shares(None, strategy.part, 0, functools.partial(exchange, topic=call), is_shard=is_shard, failure=error)
            raise
        source = self._recognized(source) if is_kept else source
        source.is_shard = is_shard
        return self.agreed(source, call)

    def agreed(self, source: Source, call: str = "fit: a shard of the data") -> Source:
        """Returns the source after processes have told each other about their shards; all of them must call it."""
        strategy = self._strategy
        source.shares = None
        if strategy.num_processes > 1:
            tell = functools.partial(exchange, topic=call)
            source.shares = agree_on_shares(source, strategy.part, jax.process_index(), tell, is_shard=source.is_shard)
        return source

    def sample(self, triple: Triple, *, accumulate_steps: int = 1) -> Batch:
        """Returns a batch with the shapes that the devices need; raises `DataError` if it is not a batch.

        Its values are not used, so processes do not compare them.
        """
        return self._strategy.batcher(compare=None, accumulate_steps=accumulate_steps, must_count=False)(triple).batch

    def _recognized(self, source: Source) -> Source:
        if not isinstance(source, OneShotSource):
            return source
        for earlier in self._one_shots:
            if earlier.iterator is source.iterator:
                return earlier
        self._one_shots = [*self._one_shots[1 - _MAX_ITERATORS :], source]
        return source


def make_feeder(strategy: Strategy, *, pad: bool, accumulate_steps: int = 1) -> Feeder:
    """Returns a `Feeder` for the devices of a strategy."""
    return Feeder(strategy.batcher, pad=pad, accumulate_steps=accumulate_steps, make_part=strategy.part_batcher, exchange=exchange)


def as_given(triple: Triple) -> Batch:
    """Returns a batch with the number of rows that the user gave; raises `DataError` if it is not a batch."""
    return Batcher(num_shards=1, must_count=False)(triple).batch
