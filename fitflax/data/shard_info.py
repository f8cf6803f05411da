"""`Shares`, which describes the shards of a dataset over the processes."""

import dataclasses
from collections.abc import Sequence

__all__ = ["Shares"]


@dataclasses.dataclass(frozen=True)
class Shares:
    """What the processes know about each other's shards of a dataset; `None` where something is unknown."""

    index: int  # Of this process.
    parts: tuple[int, ...]  # For each process, which part of a batch it feeds. Processes that feed the same part must feed equal rows.
    examples: int | None  # In a pass over all shards.
    batches: int | None  # In a pass over the longest shard.
    largest: int | None  # Examples in the largest shard.
    batch_size: int | None  # Rows of a batch over all processes.

    def total(self, rows: Sequence[int]) -> int:
        """Returns the sum over all parts of a batch; `rows` has one number for each process, and processes with the same part count once."""
        return sum(dict(zip(self.parts, rows, strict=True)).values())

    @property
    def num_parts(self) -> int:
        """The number of parts of a batch."""
        return max(self.parts) + 1
