"""`Mean`, the weighted mean of a function of outputs and targets."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from flax import struct
from typing_extensions import override

from fitflax.errors import LossError, MetricError
from fitflax.losses.registry import loss_direction
from fitflax.losses.shapes import broadcast_fault, nan_unless
from fitflax.metrics.base import Direction, Metric, add_pairs, metric_direction, pair, pair_field, snake_case, static_field, weighted_sums, zero_pair

__all__ = ["Mean"]

_TRANSFORMS: dict[str | None, Callable[[jax.Array], jax.Array]] = {None: lambda mean: mean, "sqrt": jnp.sqrt, "exp": jnp.exp}


@struct.dataclass
class Mean(Metric):
    """Computes the weighted mean of per-example values: `sum(w * v) / sum(w)` over all examples; NaN if no example has weight.

    Attributes:
        fn: `(outputs, targets) -> values`, `[batch]` or `[batch, ...]`; `None` for a mean that only `add` updates.
        name: Log key; by default the `__name__` of the function, also inside of a `functools.partial` (`"lambda"` for a lambda).
        direction: By default `"min"` for the losses of `fitflax.losses`, else `None`.
        transform: `"sqrt"` or `"exp"` of the mean, or `None` for the mean itself.
        total: `sum(w * v)`, a pair, float32 `[2]`.
        weight: `sum(w)`, a pair, float32 `[2]`.

    Raises:
        MetricError: `fn`, `direction` or `transform` is invalid.

    >>> from fitflax import losses
    >>> mae = Mean(losses.mean_absolute_error)
    >>> mae = mae.update(jnp.array([1.0, 2.0, 9.0]), jnp.array([0.0, 0.0, 0.0]), jnp.array([1.0, 1.0, 0.0]))
    >>> mae.name, mae.direction, float(mae.compute())
    ('mean_absolute_error', 'min', 1.5)
    """

    additive: ClassVar[bool] = True

    fn: Callable[[Any, Any], Any] | None = static_field(None)
    _: dataclasses.KW_ONLY
    name: str = static_field("")
    direction: Direction | None = static_field(None)
    transform: Literal["sqrt", "exp"] | None = static_field(None)
    total: jax.Array = pair_field()
    weight: jax.Array = pair_field()

    def __post_init__(self) -> None:
        # JAX calls this again whenever it rebuilds the metric from its leaves, so it must be idempotent.
        if self.fn is not None and not callable(self.fn):
            raise MetricError(f"Mean takes a function (outputs, targets) -> values. Received: {self.fn!r}. To get a metric by name, use metrics.get(name).")
        if self.transform not in _TRANSFORMS:
            raise MetricError(f"Mean(transform=...) must be one of {list(_TRANSFORMS)}. Received: {self.transform!r}.")
        if not self.name:
            object.__setattr__(self, "name", "mean" if self.fn is None else _function_name(self.fn))
        if self.direction is None:
            object.__setattr__(self, "direction", loss_direction(self.fn))
        metric_direction(self)

    @override
    def empty(self) -> Self:
        return dataclasses.replace(self, total=zero_pair(), weight=zero_pair())

    @override
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        if self.fn is None:
            raise MetricError(f"Metric {self.name!r} has no function that computes values. Use add(values, weights), or Mean(fn).")
        try:
            values = jnp.asarray(self.fn(outputs, targets))
        except (LossError, MetricError) as error:
            raise MetricError(f"Metric {self.name!r}: {error}") from error
        if values.shape[:1] != jnp.shape(weights)[:1]:
            raise MetricError(
                f"Metric {self.name!r} must return one value per example, [batch] or [batch, ...]. Received: {list(values.shape)} "
                f"for weights {list(jnp.shape(weights))}. Do not average over the batch; the metric averages over all batches."
            )
        if (fault := broadcast_fault(self.fn, values, outputs, targets)) is not None:
            raise MetricError(f"Metric {self.name!r}: its function {fault}.")
        return self.add(values, weights)

    def add(self, values: Any, weights: Any) -> Self:
        """Returns this metric with precomputed values added, such as the losses of a step.

        Args:
            values: `[batch]`, `[batch, ...]` or `[]`.
            weights: float32, the leading axes of `values`.

        Raises:
            MetricError: `weights` does not fit `values`.

        >>> float(Mean(name="grad_norm").add(3.0, 1.0).add(5.0, 3.0).compute())
        4.5
        """
        try:
            total, weight = weighted_sums(values, weights)
        except MetricError as error:
            raise MetricError(f"Metric {self.name!r}: {error}") from error
        return dataclasses.replace(self, total=add_pairs(self.total, pair(total)), weight=add_pairs(self.weight, pair(weight)))

    @override
    def merge(self, other: Self) -> Self:
        return dataclasses.replace(self, total=add_pairs(self.total, other.total), weight=add_pairs(self.weight, other.weight))

    @override
    def compute(self) -> jax.Array:
        total, weight = jnp.sum(self.total, axis=-1), jnp.sum(self.weight, axis=-1)
        mean = total / jnp.where(weight == 0, 1.0, weight)
        return nan_unless(weight != 0, _TRANSFORMS[self.transform](mean))


def _function_name(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", None)
    return name.strip("<>") if isinstance(name, str) else snake_case(type(fn).__name__)
