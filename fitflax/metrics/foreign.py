"""Adapters for the metrics of other libraries, which take a batch as keyword arguments: `clu.metrics`, `flax.nnx.metrics`, and collections of them.

Neither library is imported before the user has imported it.
"""

import abc
import dataclasses
import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from typing_extensions import override

from fitflax.errors import MetricError
from fitflax.losses.shapes import nan_unless
from fitflax.metrics.base import Direction, Metric, broadcast_weights, snake_case, static_field


@struct.dataclass
class ForeignMetric(Metric):
    """A metric of another library, named `library` in errors.

    It is computed from `logits` (the outputs), `labels` (the targets), `loss` (its values), `mask`, and other logged values. A mask can exclude examples but
    not weight them, so such metrics belong in `metrics`, not in `weighted_metrics`. They declare no direction.
    """

    library: ClassVar[str]

    _: dataclasses.KW_ONLY
    name: str = static_field("")
    direction: Direction | None = static_field(None)

    @override
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        return self.update_from({}, outputs, targets, weights)

    @abc.abstractmethod
    def update_from(self, logged: Mapping[str, Any], outputs: Any, targets: Any, weights: Any) -> Self:
        """Returns this metric with a batch added; `logged` holds values per example by name, including `loss`, `[batch, ...]`."""


def is_clu(spec: Any) -> bool:
    """Returns whether `spec` is a class of `clu.metrics`: a metric or a collection."""
    clu = sys.modules.get("clu.metrics")
    return clu is not None and isinstance(spec, type) and issubclass(spec, (clu.Metric, clu.Collection))


def adapt_clu(spec: Any) -> "dict[str, CluMetric] | CluMetric":
    """Returns the adapted metric for a class of `clu.metrics`; for a collection, its metrics by name."""
    clu = sys.modules["clu.metrics"]

    def adapt(kind: Any, name: str) -> CluMetric:
        return CluCollectingMetric(kind, name=name) if issubclass(kind, clu.CollectingMetric) else CluMetric(kind, inner=kind.empty(), name=name)

    if not issubclass(spec, clu.Collection):
        return adapt(spec, snake_case(spec.__name__))
    try:
        kinds = get_type_hints(spec)
    except (NameError, AttributeError) as error:
        advice = "Check the names, or define it without `from __future__ import annotations`."
        raise MetricError(f"The annotations of {spec.__name__} cannot be evaluated: {error}. {advice}") from error
    members = {key: kinds[key] for key in spec.__annotations__}  # Without those of `clu.Collection`.
    return {key: adapt(kind, key) for key, kind in members.items() if isinstance(kind, type) and issubclass(kind, clu.Metric)}


@struct.dataclass
class CluMetric(ForeignMetric):
    """A metric of `clu.metrics`; `inner` is an instance of the class `kind` over the examples so far. Sums are plain float32, as in `clu`."""

    library: ClassVar[str] = "clu"

    kind: Any = static_field(None)
    inner: Any = dataclasses.field(default=None, kw_only=True)

    @override
    def empty(self) -> Self:
        return dataclasses.replace(self, inner=self.kind.empty())

    @override
    def update_from(self, logged: Mapping[str, Any], outputs: Any, targets: Any, weights: Any) -> Self:
        mask = jnp.asarray(weights) != 0
        batch_metric = self.kind.from_model_output(**_keywords(logged, outputs, targets), mask=mask)
        if issubclass(self.kind, sys.modules["clu.metrics"].Accuracy):
            batch_metric = batch_metric.replace(total=batch_metric.total + _nan_if_counted(outputs, mask))
        return dataclasses.replace(self, inner=self.inner.merge(batch_metric))

    @override
    def merge(self, other: Self) -> Self:
        return dataclasses.replace(self, inner=self.inner.merge(other.inner))

    def merge_part(self, other: Self) -> Self:
        """Returns the metric over two parts of one batch; `merge` of `LastValue` would return the second one."""
        return dataclasses.replace(self, inner=self.inner._reduce_merge(other.inner))

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
        batch_metric = self.kind.from_model_output(**_keywords(logged, outputs, targets), mask=mask)
        values = {key: jnp.concatenate(value) if isinstance(value, tuple) else value for key, value in batch_metric.values.items()}
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
        if type(loss := members.get("loss")) is nnx.metrics.Average and loss.argname == "loss":
            del members["loss"]
        return {key: adapted for name, value in members.items() for key, adapted in _adapt_nnx(value, name).items()}
    is_plain = type(metric) is nnx.metrics.Average
    return _adapt_nnx(metric, f"mean_{metric.argname}" if is_plain else snake_case(type(metric).__name__))


def _adapt_nnx(metric: Any, name: str) -> dict[str, ForeignMetric]:
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
    """An `nnx.metrics.Average`, or a subclass: `graph` is the metric without its sums, and `inner` has the sums, which are added."""

    additive: ClassVar[bool] = True
    library: ClassVar[str] = "flax.nnx"

    graph: Any = static_field(None)
    inner: Any = dataclasses.field(default=None, kw_only=True)

    @override
    def empty(self) -> Self:
        return dataclasses.replace(self, inner=jax.tree.map(jnp.zeros_like, self.inner))

    @override
    def update_from(self, logged: Mapping[str, Any], outputs: Any, targets: Any, weights: Any) -> Self:
        from flax import nnx

        metric = nnx.merge(self.graph, self.empty().inner)
        mask, kind = jnp.asarray(weights) != 0, cast(Any, type(metric))
        known = _keywords(logged, outputs, targets)
        if kind.update is nnx.metrics.Average.update:
            _logged_value(known, metric.argname, "the mean of")
        # NNX requires a mask that broadcasts to the labels: [batch, 1] for labels [batch, length], of which [batch] would mask columns.
        known["mask"] = mask.reshape(mask.shape + (1,) * (getattr(targets, "ndim", 0) - mask.ndim))
        if hasattr(targets, "dtype") and jnp.issubdtype(targets.dtype, jnp.integer):
            known["labels"] = targets.astype(jnp.int32)
        object.__setattr__(metric, "__class__", _masked(kind))  # NNX would treat a plain assignment as an attribute.
        setattr(metric, _MASK, mask)
        metric.update(**known)
        delattr(metric, _MASK)
        if not hasattr(metric, _IS_MASKED):
            raise MetricError(f"{kind.__name__}.update must call super().update, which excludes padding. Call it, or derive from fitflax.metrics.Metric.")
        added = nnx.to_pure_dict(nnx.split(metric)[1])
        if isinstance(metric, nnx.metrics.Accuracy):
            added["total"] = added["total"] + _nan_if_counted(outputs, mask)
        return dataclasses.replace(self, inner=jax.tree.map(jnp.add, self.inner, added))

    @override
    def merge(self, other: Self) -> Self:
        return dataclasses.replace(self, inner=jax.tree.map(jnp.add, self.inner, other.inner))

    @override
    def compute(self) -> Any:
        from flax import nnx

        is_empty = jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda total: jnp.all(total == 0), self.inner))
        inner = jax.tree.map(lambda total: jnp.where(is_empty, jnp.ones_like(total), total), self.inner)  # 0 / 0 would be NaN.
        return nan_unless(~is_empty, jnp.asarray(nnx.merge(self.graph, inner).compute(), jnp.float32))


_MASK = "_mask_of_examples"
_IS_MASKED = "_is_masked"  # Set by `update` of a masked class.


@functools.cache
def _masked(kind: Any) -> Any:
    """Returns a subclass of `kind`, an `nnx.metrics.Average`, whose `super().update` excludes padding for values of any shape `[batch, ...]`."""
    from flax import nnx

    class Masked(nnx.metrics.Average):
        @override
        def update(self, mask: Any = None, **known: Any) -> None:
            if self.argname in known:  # If not, `Average` raises an error.
                values, is_real = _with_mask(self.argname, known[self.argname], getattr(self, _MASK))
                mask = is_real if mask is None else is_real * _fitted(mask, self.argname, values.shape)
                # `Average` multiplies by the mask, which keeps NaN.
                known = {self.argname: jnp.where(mask != 0, values, 0)}
            super().update(mask=mask, **known)
            setattr(self, _IS_MASKED, True)

    return Masked if kind is nnx.metrics.Average else type(kind.__name__, (kind, Masked), {})


@struct.dataclass
class NNXWelford(ForeignMetric):
    """One of the three values of an `nnx.metrics.Welford`; `m2` is the sum of squared distances from the mean.

    Means and sums of squares are merged as in Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).
    """

    library: ClassVar[str] = "flax.nnx"

    argname: str = static_field("values")
    part: str = static_field("mean")
    _: dataclasses.KW_ONLY
    count: Any = 0.0
    mean: Any = 0.0
    m2: Any = 0.0

    @override
    def empty(self) -> Self:
        zero = jnp.float32(0)
        return dataclasses.replace(self, count=zero, mean=zero, m2=zero)

    @override
    def update_from(self, logged: Mapping[str, Any], outputs: Any, targets: Any, weights: Any) -> Self:
        known = _keywords(logged, outputs, targets)
        values, mask = _with_mask(self.argname, _logged_value(known, self.argname, "computed from"), weights)
        values = values.astype(jnp.float32)
        count = jnp.sum(mask)
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
        count = jnp.maximum(self.count, 1)
        deviation = jnp.sqrt(self.m2 / count)
        values = {"mean": self.mean, "standard_deviation": deviation, "standard_error_of_mean": deviation / jnp.sqrt(count)}
        return nan_unless(jnp.asarray(self.count) > 0, jnp.asarray(values[self.part], jnp.float32))


def _keywords(logged: Mapping[str, Any], outputs: Any, targets: Any) -> dict[str, Any]:
    """Returns a batch as the keyword arguments that such metrics take, without the mask."""
    return {**logged, "logits": outputs, "labels": targets}


def _logged_value(known: Mapping[str, Any], name: str, role: str) -> Any:
    if name not in known:
        raise MetricError(f"It is {role} {name!r}, which is not available. Return it in aux of compute_loss, or use one of {sorted({*known, 'mask'})}.")
    return known[name]


def _with_mask(name: str, values: Any, weights: Any) -> tuple[jax.Array, jax.Array]:
    """Returns values `[batch, ...]` and their mask of the same shape, float32; a scalar becomes the value of each example."""
    values, mask = jnp.asarray(values), jnp.asarray(weights) != 0
    values = values if values.ndim else jnp.broadcast_to(values, mask.shape)
    if values.shape[:1] != mask.shape[:1]:
        raise MetricError(f"{name} must have one value per example, [{len(mask)}, ...]. Received: {list(values.shape)}.")
    return values, broadcast_weights(mask, values.shape)


def _fitted(mask: Any, name: str, shape: tuple[int, ...]) -> jax.Array:
    """Returns a mask broadcast from the left to `shape`, the shape of the values `name`; trailing axes of size 1 that the values lack are removed.

    >>> _fitted(jnp.array([[True], [False]]), "values", (2,)).tolist()
    [1.0, 0.0]
    """
    mask = jnp.asarray(mask)
    if set(mask.shape[len(shape) :]) <= {1}:
        mask = mask.reshape(mask.shape[: len(shape)])
    try:
        return broadcast_weights(mask, shape)
    except MetricError as error:
        advice = "It need not exclude padding, because super().update does."
        raise MetricError(f"mask must have the leading axes of {name}, {list(shape)}. Received: {list(mask.shape)}. {advice}") from error


def _nan_if_counted(outputs: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns NaN if an example whose `mask` is not 0 has a NaN output, else 0: what an accuracy adds to its sum, because its argmax takes NaN for a class.

    >>> _nan_if_counted(jnp.array([[1.0, 2.0], [jnp.nan, 0.0]]), jnp.array([True, False])).tolist()
    0.0
    """
    is_nan = jnp.isnan(outputs).reshape(*mask.shape, -1).any(axis=-1)
    return nan_unless(~(is_nan & (mask != 0)).any(), jnp.float32(0))
