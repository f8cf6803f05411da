"""The base class of sources over streams of rows with named columns."""

from fitflax.data.batch import Selection
from fitflax.data.indexed import check_batch_size
from fitflax.data.sources import Source
from fitflax.data.tables import needed_columns

__all__ = ["ColumnSource"]


class ColumnSource(Source):
    """Batches of rows with named columns, assembled by the library that the data comes from.

    `known` are the names of all columns, `None` if unknown; other arguments as in `adapt`.
    """

    owns_batches = True

    def __init__(
        self,
        known: list[str] | None,
        selection: Selection,
        *,
        inputs_only: bool = False,
        name: str = "data",
        batch_size: int = 32,
        drop_remainder: bool = False,
    ) -> None:
        check_batch_size(batch_size)
        self._columns = needed_columns(known, selection, inputs_only, name)
        self._selection = selection
        self._inputs_only = inputs_only
        self._name = name
        self._drop_remainder = drop_remainder
        self.batch_size = int(batch_size)
