"""A source over Ray Data: a dataset, or the shard that Ray Train gives to a worker. Ray is never imported here."""

import sys
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from fitflax.data.batch import Position, Selection, Triple, to_numpy
from fitflax.data.columns import ColumnSource
from fitflax.data.resumable import Bookmark, drop
from fitflax.data.tables import needed_columns
from fitflax.errors import warn

__all__ = ["RaySource", "is_ray_data", "is_worker_part"]


def is_ray_data(data: Any) -> bool:
    """Returns whether `data` is a `ray.data.Dataset` or a `ray.data.DataIterator`."""
    module = sys.modules.get("ray.data")
    return module is not None and isinstance(data, (module.Dataset, module.DataIterator))


def is_worker_part(data: Any) -> bool:
    """Returns whether `data` is one worker's shard of a dataset, such as from `ray.train.get_dataset_shard`."""
    return is_ray_data(data) and type(data).__name__ == "StreamSplitDataIterator"


class RaySource(ColumnSource):
    """Batches of a Ray dataset or a worker's shard of it, assembled by `iter_batches`.

    Missing columns, and columns that are not numeric, raise while reading.
    """

    is_repeatable = can_reread = False

    def __init__(self, data: Any, selection: Selection, **options: Any) -> None:
        super().__init__(None, selection, **options)
        self._data = data

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
        for batch in self._data.iter_batches(batch_size=self.batch_size, batch_format="numpy", drop_last=self._drop_remainder):
            columns = needed_columns(list(batch), self._selection, self._inputs_only, self._name)
            arrays = to_numpy({column: batch[column] for column in columns}, name=self._name)
            yield self._selection.split(arrays, inputs_only=self._inputs_only)
