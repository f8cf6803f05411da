"""Adapters for the metrics of the package `clu` and collections of them. `clu` itself is never imported here."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from typing_extensions import override

from fitflax.errors import MetricError
from fitflax.metrics.base import Direction, snake_case, static_field
from fitflax.metrics.foreign import ForeignMetric, keywords_of, nan_if_counted

__all__ = ["CluCollectingMetric", "CluMetric", "adapt_clu", "is_clu"]


def is_clu(spec: Any) -> bool:
    """Returns whether `spec` is a class of `clu.metrics`: a metric or a collection."""
    clu = sys.modules.get("clu.metrics")
    return clu is not None and isinstance(spec, type) and issubclass(spec, (clu.Metric, clu.Collection))


def adapt_clu(spec: Any) -> "dict[str, CluMetric] | CluMetric":
    """Returns the adapted metric for a class of `clu.metrics`; for a collection, its metrics by name."""
    clu = sys.modules["clu.metrics"]
    if issubclass(spec, clu.Collection):
        members = {key: kind for key, kind in spec.__annotations__.items() if isinstance(kind, type) and issubclass(kind, clu.Metric)}
        return {key: _adapt(kind, key) for key, kind in members.items()}
    return _adapt(spec, snake_case(spec.__name__))


def _adapt(kind: Any, name: str) -> "CluMetric":
    collects = issubclass(kind, sys.modules["clu.metrics"].CollectingMetric)
    return CluCollectingMetric(kind, name=name) if collects else CluMetric(kind, inner=kind.empty(), name=name)


@struct.dataclass
class CluMetric(ForeignMetric):
    """A metric of `clu.metrics`, computed from `logits` (the outputs), `labels` (the targets), `loss` (its values), `mask`, and other logged values.

    Sums are plain float32, as in `clu`. A mask can exclude examples but not weight them, so use such metrics in `metrics`, not in `weighted_metrics`.
    They declare no direction. `inner` is an instance of the class `kind` over the examples so far.
    """

    library: ClassVar[str] = "clu"

    kind: Any = static_field(None)
    _: dataclasses.KW_ONLY
    inner: Any = None
    name: str = static_field("")
    direction: Direction | None = static_field(None)

    @override
    def empty(self) -> Self:
        return dataclasses.replace(self, inner=self.kind.empty())

    @override
    def update_from(self, logged: Mapping[str, Any], outputs: Any, targets: Any, weights: Any) -> Self:
        mask = jnp.asarray(weights) != 0
        made = self.kind.from_model_output(**keywords_of(logged, outputs, targets, mask))
        if issubclass(self.kind, sys.modules["clu.metrics"].Accuracy):
            made = made.replace(total=made.total + nan_if_counted(outputs, mask))
        return dataclasses.replace(self, inner=self.inner.merge(made))

    @override
    def merge(self, other: Self) -> Self:
        return dataclasses.replace(self, inner=self.inner.merge(other.inner))

    @override
    def compute(self) -> Any:
        return jnp.asarray(self.inner.compute())


@struct.dataclass
class CluCollectingMetric(CluMetric):
    """A `clu.metrics.CollectingMetric`, whose rows are collected on the host; `mask`, bool `[rows]`, marks rows that are not padding."""

    collect: ClassVar[bool] = True

    mask: Any = dataclasses.field(default_factory=lambda: np.zeros(0, bool), kw_only=True)

    @override
    def empty(self) -> Self:
        return dataclasses.replace(self, inner=None, mask=np.zeros(0, bool))

    @override
    def update_from(self, logged: Mapping[str, Any], outputs: Any, targets: Any, weights: Any) -> Self:
        mask = jnp.asarray(weights) != 0
        made = self.kind.from_model_output(**keywords_of(logged, outputs, targets, mask))
        values = {key: jnp.concatenate(value) if isinstance(value, tuple) else value for key, value in made.values.items()}
        scalars = [key for key, value in values.items() if jnp.shape(value)[:1] != mask.shape[:1]]
        if scalars:
            raise MetricError(f"{self.kind.__name__} collects {scalars}, which must have one row per example, [{mask.shape[0]}, ...].")
        return self.merge(dataclasses.replace(self, inner=values, mask=jnp.any(mask.reshape(mask.shape[0], -1), axis=1)))

    @override
    def merge(self, other: Self) -> Self:
        if self.inner is None or other.inner is None:
            return self if other.inner is None else other
        return cast(Self, jax.tree.map(lambda *rows: np.concatenate(rows) if isinstance(rows[0], np.ndarray) else jnp.concatenate(rows), self, other))

    @override
    def compute(self) -> Any:
        if self.inner is None or not len(self.mask):
            return np.nan
        real = np.asarray(self.mask)
        return self.kind({key: (np.asarray(value)[real],) for key, value in self.inner.items()}).compute()
