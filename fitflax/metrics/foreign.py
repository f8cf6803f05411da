"""The base class of metrics of other libraries, which take a batch as keyword arguments."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from typing_extensions import override

from fitflax.losses.shapes import nan_unless
from fitflax.metrics.base import Metric

__all__ = ["ForeignMetric", "keywords_of", "nan_if_counted"]


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


def nan_if_counted(outputs: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns NaN if an example whose `mask` is not 0 has a NaN output, else 0: what an accuracy adds to its sum, because its argmax takes NaN for a class.

    >>> nan_if_counted(jnp.array([[1.0, 2.0], [jnp.nan, 0.0]]), jnp.array([True, False])).tolist()
    0.0
    """
    is_nan = jnp.isnan(outputs).reshape(*mask.shape, -1).any(axis=-1)
    return nan_unless(~(is_nan & (mask != 0)).any(), jnp.float32(0))
