"""Adapters for `flax.nnx.metrics` and collections of them.

`flax.nnx` is imported only when there is such a metric, which means that the user has imported it.
"""

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from typing_extensions import override

from fitflax.errors import MetricError
from fitflax.losses.shapes import nan_unless
from fitflax.metrics.base import Direction, broadcast_weights, snake_case, static_field
from fitflax.metrics.foreign import ForeignMetric, keywords_of, nan_if_counted

__all__ = ["NNXAverage", "NNXWelford", "adapt_nnx", "is_nnx"]


def is_nnx(spec: Any) -> bool:
    """Returns whether `spec` is a metric of `flax.nnx.metrics`, a collection of them, or one of their classes."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and issubclass(spec if isinstance(spec, type) else type(spec), nnx.metrics.Metric)


def adapt_nnx(spec: Any) -> dict[str, ForeignMetric]:
    """Returns the metrics that an object of `flax.nnx.metrics` stands for, by log key.

    Those of a collection keep its names; the mean of `loss` named `loss` is left out, because it is logged anyway. `Welford` makes three metrics.

    >>> from flax import nnx
    >>> sorted(adapt_nnx(nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), entropy=nnx.metrics.Average("entropy"))))
    ['accuracy', 'entropy']
    """
    from flax import nnx

    metric = spec() if isinstance(spec, type) else spec
    if isinstance(metric, nnx.metrics.MultiMetric):
        members = {name: value for name, value in vars(metric).items() if isinstance(value, nnx.metrics.Metric)}
        is_loss = {name: name == "loss" and type(value) is nnx.metrics.Average and value.argname == "loss" for name, value in members.items()}
        return {key: adapted for name, value in members.items() if not is_loss[name] for key, adapted in _adapt(value, name).items()}
    is_plain = type(metric) is nnx.metrics.Average
    return _adapt(metric, f"mean_{metric.argname}" if is_plain else snake_case(type(metric).__name__))


def _adapt(metric: Any, name: str) -> dict[str, ForeignMetric]:
    from flax import nnx

    if type(metric) is nnx.metrics.Welford:
        parts = {part: f"{name}_{part}" for part in ("mean", "standard_error_of_mean", "standard_deviation")}
        return {key: NNXWelford(metric.argname, part, name=key) for part, key in parts.items()}
    if not isinstance(metric, nnx.metrics.Average):
        raise MetricError(
            f"{type(metric).__name__} is not an nnx.metrics.Average, so it cannot be merged over batches and devices. Derive it from "
            "nnx.metrics.Average, or from fitflax.metrics.Metric and define merge()."
        )
    parameters = inspect.signature(metric.update).parameters
    if "mask" not in parameters and not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise MetricError(f"{type(metric).__name__}.update must accept mask=, which excludes padding.")
    copy = nnx.clone(metric)
    copy.reset()
    graph, state = nnx.split(copy)
    return {name: NNXAverage(graph, inner=nnx.to_pure_dict(state), name=name)}


@struct.dataclass
class NNXAverage(ForeignMetric):
    """An `nnx.metrics.Average`, or a subclass, whose sums are added.

    It is computed from `logits` (the outputs), `labels` (the targets), `loss` (its values), `mask`, and other logged values. A mask can exclude examples
    but not weight them, so use such metrics in `metrics`, not in `weighted_metrics`. They declare no direction.
    `graph` is the metric without its sums, and `inner` has the sums.
    """

    additive: ClassVar[bool] = True
    library: ClassVar[str] = "flax.nnx"

    graph: Any = static_field(None)
    _: dataclasses.KW_ONLY
    inner: Any = None
    name: str = static_field("")
    direction: Direction | None = static_field(None)

    @override
    def empty(self) -> Self:
        return dataclasses.replace(self, inner=jax.tree.map(jnp.zeros_like, self.inner))

    @override
    def update_from(self, logged: Mapping[str, Any], outputs: Any, targets: Any, weights: Any) -> Self:
        from flax import nnx

        metric = nnx.merge(self.graph, self.empty().inner)
        known = keywords_of(logged, outputs, targets, jnp.asarray(weights) != 0)
        is_average = type(metric).update is nnx.metrics.Average.update
        if is_average and metric.argname not in known:
            raise MetricError(f"It is the mean of {metric.argname!r}, which is not available. Return it in aux of compute_loss, or use one of {sorted(known)}.")
        like = known[metric.argname] if is_average else targets
        if hasattr(targets, "dtype") and jnp.issubdtype(targets.dtype, jnp.integer):
            known["labels"] = targets.astype(jnp.int32)
        known["mask"] = mask = broadcast_weights(known["mask"], jnp.shape(like)) if hasattr(like, "shape") else known["mask"]
        if is_average:  # `Average` multiplies by the mask, which keeps NaN.
            known[metric.argname] = jnp.where(mask, like, 0)
        metric.update(**known)
        added = nnx.to_pure_dict(nnx.split(metric)[1])
        if isinstance(metric, nnx.metrics.Accuracy):
            added["total"] = added["total"] + nan_if_counted(outputs, known["mask"])
        return dataclasses.replace(self, inner=jax.tree.map(jnp.add, self.inner, added))

    @override
    def merge(self, other: Self) -> Self:
        return dataclasses.replace(self, inner=jax.tree.map(jnp.add, self.inner, other.inner))

    @override
    def compute(self) -> Any:
        from flax import nnx

        is_empty = jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda total: jnp.all(total == 0), self.inner))
        ones = jax.tree.map(jnp.ones_like, self.inner)  # 0 / 0 would be NaN.
        inner = jax.tree.map(lambda one, total: jnp.where(is_empty, one, total), ones, self.inner)
        return nan_unless(~is_empty, jnp.asarray(nnx.merge(self.graph, inner).compute(), jnp.float32))


@struct.dataclass
class NNXWelford(ForeignMetric):
    """One of the three values of an `nnx.metrics.Welford`.

    Means and sums of squares are merged as in Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).
    `m2` is the sum of squared distances from the mean.
    """

    library: ClassVar[str] = "flax.nnx"

    argname: str = static_field("values")
    part: str = static_field("mean")
    _: dataclasses.KW_ONLY
    count: Any = 0.0
    mean: Any = 0.0
    m2: Any = 0.0
    name: str = static_field("")
    direction: Direction | None = static_field(None)

    @override
    def empty(self) -> Self:
        zero = jnp.float32(0)
        return dataclasses.replace(self, count=zero, mean=zero, m2=zero)

    @override
    def update_from(self, logged: Mapping[str, Any], outputs: Any, targets: Any, weights: Any) -> Self:
        known = keywords_of(logged, outputs, targets, None)
        if self.argname not in known:
            raise MetricError(f"It is computed from {self.argname!r}, which is not available. Return it in aux of compute_loss, or use one of {sorted(known)}.")
        values = jnp.asarray(known[self.argname], jnp.float32)
        mask = broadcast_weights(jnp.asarray(weights) != 0, values.shape)
        count = jnp.sum(mask.astype(jnp.float32))
        mean = jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(count, 1)
        m2 = jnp.sum(jnp.where(mask, (values - mean) ** 2, 0))
        return self.merge(dataclasses.replace(self, count=count, mean=mean, m2=m2))

    @override
    def merge(self, other: Self) -> Self:
        count = self.count + other.count
        share, distance = other.count / jnp.maximum(count, 1), other.mean - self.mean
        m2 = self.m2 + other.m2 + distance**2 * self.count * share
        return dataclasses.replace(self, count=count, mean=self.mean + distance * share, m2=m2)

    @override
    def compute(self) -> Any:
        if self.part == "mean":
            value = self.mean
        else:
            count = jnp.maximum(self.count, 1)
            value = jnp.sqrt(self.m2 / count) / (1 if self.part == "standard_deviation" else jnp.sqrt(count))
        return nan_unless(jnp.asarray(self.count) > 0, jnp.asarray(value, jnp.float32))
