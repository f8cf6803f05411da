"""From what users have to batches of fixed shape: adapting sources, order and position, padding.

`fit`, `evaluate` and `predict` call this for you. `Source` and `adapt` are for code that wants the same batches without a trainer.
"""

from fitflax.data.adapt import adapt
from fitflax.data.batch import Batcher, FedBatch, Position
from fitflax.data.shards import Shard
from fitflax.data.streams import Feed, Source

__all__ = ["Batcher", "FedBatch", "Feed", "Position", "Shard", "Source", "adapt"]
