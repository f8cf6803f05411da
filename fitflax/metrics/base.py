"""What all metrics share: the base class, names and directions, weighted sums, and running sums that lose nothing."""

import abc
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self, cast

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.errors import MetricError

__all__ = ["Direction", "Metric", "add_pairs", "bound", "broadcast_weights", "metric_direction", "metric_name"]
__all__ += ["pair", "pair_field", "snake_case", "static_field", "weighted_sums", "zero_pair"]

Direction = Literal["max", "min"]


class Metric(abc.ABC):
    """The base class of metrics: a frozen `flax.struct.dataclass` whose fields are arrays, but for `name` and `direction`.

    `empty`, `update` and `merge` return new metrics of one and the same structure, shapes and dtypes, except that `empty` may hold scalars (or shapes that
    broadcast) where the others learn a shape from the batch. Any cut of the examples into parts must give the same result up to rounding.

    Attributes:
        additive: Whether adding the leaves of two metrics joins them too, so that replicas can be joined by one sum over devices.
        collect: Whether its leaves are rows, `[examples, ...]`, weights among them, that `merge` appends: the step hands them out, and they are joined and
            computed on the host, once at the end of an epoch or evaluation. Such a metric is not in the logs of batches. `merge` and `compute` get NumPy.
        is_recorded: Whether its value is kept in `History` and in checkpoints' metadata. A sample of images is not; whoever reads logs gets it.
        name: The log key.
        direction: `"max"` where more is better, `"min"` where less is, `None` where neither is.

    >>> from flax import struct
    >>> @struct.dataclass
    ... class Largest(Metric):
    ...     value: Any = np.float32(-np.inf)
    ...     name: str = struct.field(pytree_node=False, default="largest")
    ...     direction: Direction | None = struct.field(pytree_node=False, default=None)
    ...     def empty(self):
    ...         return Largest()
    ...     def update(self, outputs, targets, weights):
    ...         return self.merge(Largest(jnp.where(weights > 0, outputs, -jnp.inf).max()))
    ...     def merge(self, other):
    ...         return Largest(jnp.maximum(self.value, other.value))
    ...     def compute(self):
    ...         return self.value
    >>> float(Largest().empty().update(jnp.array([1.0, 7.0]), None, jnp.array([1.0, 0.0])).compute())
    1.0
    """

    additive: ClassVar[bool] = False
    collect: ClassVar[bool] = False
    is_recorded: ClassVar[bool] = True
    name: str
    direction: Direction | None

    @abc.abstractmethod
    def empty(self) -> Self:
        """Returns this metric over no example at all."""

    @abc.abstractmethod
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        """Returns this metric with one batch more.

        Args:
            outputs: What the module returned, `[batch, ...]`.
            targets: What the data says, `[batch, ...]`.
            weights: float32 `[batch]` or `[batch, ...]`; 0 leaves an example out, whatever it holds.
        """

    @abc.abstractmethod
    def merge(self, other: Any) -> Self:  # Subclasses say `other: Self`, which pyright reports where the base class says it, too.
        """Returns the metric over the examples of both; `other` is a metric of the same kind."""

    @abc.abstractmethod
    def compute(self) -> Any:
        """Returns the number, float32 of shape `[]`, of no examples 0; or an array of numbers, such as one per class."""

    def summary(self, value: Any) -> Any:
        """Returns what TensorBoard shows in place of a computed value.

        That is a number, an array (a list of numbers, or a table), an `ImageSummary`, `HistogramSummary` or `FigureSummary` of `fitflax.callbacks`, or a
        dict of these by name. The thread that writes event files calls it, on a metric of the same settings that has no arrays.

        Args:
            value: What `compute` returned, a Python float or a NumPy array.
        """
        return value


def weighted_sums(values: Any, weights: Any) -> tuple[jax.Array, jax.Array]:
    """Returns `(sum(w * v), sum(w))`, where `w` is `weights` broadcast over `values` from the left.

    Both sums run over the broadcast weights: of values `[batch, time]` with weights `[batch]` every token counts. What has weight 0 adds nothing, not even
    where its value is NaN or infinite.

    Args:
        values: `[...]`, any numeric or boolean dtype.
        weights: The leading axes of `values`, or fewer of them; an axis after the first may have length 1.

    Returns:
        Two float32 scalars.

    Raises:
        MetricError: `weights` has more axes than `values`, or others.

    >>> weighted_sums(jnp.array([[1.0, 3.0], [jnp.nan, 5.0]]), jnp.array([0.5, 0.0]))
    (Array(2., dtype=float32), Array(1., dtype=float32))
    """
    values = jnp.asarray(values, jnp.float32)
    weights = broadcast_weights(weights, values.shape)
    # `!= 0` and not `> 0`: should somebody weigh examples negatively, both sums must agree.
    return jnp.sum(jnp.where(weights != 0, weights * values, 0.0)), jnp.sum(weights)


def broadcast_weights(weights: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns weights in the shape of what they weigh, aligned from the left."""
    weights = jnp.asarray(weights, jnp.float32)
    fits = weights.ndim <= len(shape) and weights.shape[:1] == shape[: min(1, weights.ndim)]
    if not fits or any(width not in (1, length) for width, length in zip(weights.shape, shape, strict=False)):
        raise MetricError(f"Weights must have the leading axes of what they weigh, or fewer. Received: weights {list(weights.shape)} for values {list(shape)}.")
    return jnp.broadcast_to(weights.reshape(weights.shape + (1,) * (len(shape) - weights.ndim)), shape)


# Running sums are pairs (hi, lo) in the last axis, float32 `[..., 2]`: hi + lo is the sum, lo holds what hi is too coarse for. In plain float32 a million
# additions are off by 1e-5, and adding 1 to 2^24 does nothing. Pairs whose hi and lo were added each for itself, as psum does, are pairs still.
def zero_pair() -> jax.Array:
    """Returns the empty running sum, float32 `[2]`."""
    # NumPy: making a metric must not start JAX's backend. The cast is for type checkers; inside a step the two are the same.
    return cast(jax.Array, np.zeros(2, np.float32))


def pair_field() -> Any:
    """Returns a dataclass field that holds a running sum, empty by default."""
    return dataclasses.field(default_factory=zero_pair)


def static_field(default: Any) -> Any:
    """Returns a dataclass field that is no part of the pytree."""
    # `flax.struct.field` has no types.
    return dataclasses.field(default=default, metadata={"pytree_node": False})


def pair(value: jax.Array) -> jax.Array:
    """Returns sums `[...]` as pairs `[..., 2]`."""
    return jnp.stack([value, jnp.zeros_like(value)], axis=-1)


def add_pairs(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the sum of two pairs by Knuth's two-sum, normalized so that hi is the whole sum rounded to float32."""
    total = a[..., 0] + b[..., 0]
    b_seen = total - a[..., 0]
    lost = (a[..., 0] - (total - b_seen)) + (b[..., 0] - b_seen)
    rest = a[..., 1] + b[..., 1] + lost
    hi = total + rest
    lo = rest - (hi - total)
    # inf - inf is NaN: a sum that is infinite stays so.
    finite = jnp.isfinite(total)
    return jnp.stack([jnp.where(finite, hi, total), jnp.where(finite, lo, 0.0)], axis=-1)


@functools.cache
def bound(fn: Callable[..., jax.Array], **arguments: Any) -> Callable[[Any, Any], jax.Array]:
    """Returns `fn` with arguments bound; the same object for the same arguments."""
    # Cached, because two equal metrics should have one tree structure and so one compiled step; two partials are never equal.
    return functools.partial(fn, **arguments)


def metric_name(metric: Any) -> str:
    """Returns a metric's log key: its `name`, or its class's name in snake case where it has none.

    Args:
        metric: Any object; it need not be a `Metric`.

    >>> from fitflax.metrics import R2
    >>> metric_name(R2()), metric_name(object())
    ('r2', 'object')
    """
    name = getattr(metric, "name", None)
    return name if isinstance(name, str) and name else snake_case(type(metric).__name__)


def metric_direction(metric: Any) -> Direction | None:
    """Returns what a metric declares to be better: `"max"`, `"min"`, or `None` where it declares nothing.

    Args:
        metric: Any object; it need not be a `Metric`.

    Raises:
        MetricError: Its `direction` is something else.

    >>> from fitflax.metrics import R2
    >>> metric_direction(R2()), metric_direction(object())
    ('max', None)
    """
    direction = getattr(metric, "direction", None)
    if direction not in ("max", "min", None):
        raise MetricError(f"The direction of metric {metric_name(metric)!r} must be 'max', 'min' or None. Received: {direction!r}.")
    return cast("Direction | None", direction)


def snake_case(name: str) -> str:
    """Returns a class's name as a log key."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
