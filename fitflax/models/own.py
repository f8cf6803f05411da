"""The variables of a model that holds them itself, read before each call of the trainer and written back after it."""

import abc
from typing import Any, Self

from fitflax.state import AxisNames, PyTree

__all__ = ["OwnVariables"]


class OwnVariables(abc.ABC):
    """The variables of a model that holds them itself; between calls of the trainer, the model's values are the current ones."""

    @property
    @abc.abstractmethod
    def model(self) -> Any:
        """The model that holds them."""

    @property
    @abc.abstractmethod
    def axes(self) -> AxisNames:
        """The axis names in the model's metadata."""

    @abc.abstractmethod
    def copy(self) -> Self:
        """Returns the variables of a copy of the model, with its current values."""

    @abc.abstractmethod
    def read(self) -> dict[str, PyTree]:
        """Returns the variables, `{collection: tree}`. The arrays belong to the model and must not be donated.

        Raises a `ModelError` if the model has other variables than at first, or cannot return them.
        """

    @abc.abstractmethod
    def read_changed(self) -> dict[str, PyTree] | None:
        """Returns the variables if any has changed since the last `write`, or none was written; else `None`. Errors as in `read`."""

    @abc.abstractmethod
    def write(self, variables: dict[str, PyTree]) -> None:
        """Writes arrays into the model, which keeps them."""
