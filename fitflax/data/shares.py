"""`Shares`: what processes know of each other's parts of some data."""

import dataclasses
from collections.abc import Sequence

__all__ = ["Shares"]


@dataclasses.dataclass(frozen=True)
class Shares:
    """What processes know of each other's parts of some data.

    Attributes:
        index: Which of the processes this is.
        parts: By process, which part of a batch it feeds; where two feed the same part they must feed the same rows.
        examples: Of a pass, over all parts; `None` if unknown.
        batches: Of a pass: of the longest part; `None` if unknown.
        largest: The most examples that a part has; `None` if unknown.
        batch_size: Rows of a whole batch, if they are known.
    """

    index: int
    parts: tuple[int, ...]
    examples: int | None
    batches: int | None
    largest: int | None
    batch_size: int | None

    def total(self, rows: Sequence[int]) -> int:
        """Returns the sum over the parts of what is given by process; processes of one part give the same."""
        return sum(dict(zip(self.parts, rows, strict=True)).values())

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return max(self.parts) + 1
