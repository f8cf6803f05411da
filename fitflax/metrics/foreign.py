"""The base class of metrics of other libraries, which take a batch as keyword arguments."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from typing_extensions import override

from fitflax.metrics.base import Metric

__all__ = ["ForeignMetric", "keywords_of"]


class ForeignMetric(Metric):
    """A metric of another library, named `library` in errors."""

    library: ClassVar[str]

    @override
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        return self.update_from({}, outputs, targets, weights)

    @abc.abstractmethod
    def update_from(self, logged: Mapping[str, Any], outputs: Any, targets: Any, weights: Any) -> Self:
        """Returns this metric with a batch added; `logged` holds values per example by name, including `loss`, `[batch, ...]`."""


def keywords_of(logged: Mapping[str, Any], outputs: Any, targets: Any, mask: Any) -> dict[str, Any]:
    """Returns a batch as the keyword arguments that such metrics take."""
    return {**logged, "logits": outputs, "labels": targets, "mask": mask}
