"""Turns data into batches of fixed shape: adapts sources, shuffles, tracks the position, and pads.

`fit`, `evaluate` and `predict` use this package for you. Use `adapt` and `Source` to get the same batches without a trainer.
"""

from fitflax.data.adapt import adapt
from fitflax.data.batch import FedBatch, Position
from fitflax.data.feed import Feed
from fitflax.data.padding import Batcher
from fitflax.data.shards import Shard
from fitflax.data.sources import Source
from fitflax.data.token_file import TokenFile

__all__ = ["Batcher", "FedBatch", "Feed", "Position", "Shard", "Source", "TokenFile", "adapt"]
