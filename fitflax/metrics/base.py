"""The base class of metrics, names and directions, weighted sums, and running sums without rounding errors."""

import abc
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fitflax.errors import MetricError
from fitflax.losses.shapes import nan_unless

__all__ = ["Direction", "Metric", "add_pairs", "bound", "broadcast_weights", "metric_direction", "metric_name"]
__all__ += ["no_rows", "pair", "pair_field", "snake_case", "static_field", "undefined", "weighted_sums", "zero_pair"]

Direction = Literal["max", "min"]


class Metric(abc.ABC):
    """The base class of metrics: a frozen `flax.struct.dataclass` whose fields, except `name` and `direction`, are arrays.

    `empty`, `update` and `merge` return metrics of the same structure, shapes and dtypes. Only the result of `empty` may hold scalars or arrays that
    broadcast, where the shape follows from the first batch. The result must be the same up to rounding, however the examples are split into batches.

    Attributes:
        additive: Whether adding the leaves of two metrics merges them, so that one sum over devices merges the replicas.
        collect: Whether the leaves, weights included, are rows `[examples, ...]` that `merge` concatenates. They are copied to the host, then merged and
            computed there, in NumPy, once at the end of an epoch or evaluation. Such a metric is not logged for batches.
        is_recorded: Whether the value is kept in `History` and in the metadata of checkpoints; `False` for large values such as images. Loggers get it
            either way.
        name: Log key.
        direction: `"max"` if higher is better, `"min"` if lower is better, else `None`.

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
        """Returns this metric over no examples."""

    @abc.abstractmethod
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        """Returns this metric with a batch added.

        Args:
            outputs: Outputs of the module, `[batch, ...]`.
            targets: Targets from the data, `[batch, ...]`.
            weights: float32 `[batch]` or `[batch, ...]`; 0 excludes an example, whatever its values.
        """

    @abc.abstractmethod
    def merge(self, other: Any) -> Self:  # Subclasses use `other: Self`; pyright reports that if the base class uses it, too.
        """Returns the metric over the examples of both; `other` is a metric of the same kind."""

    @abc.abstractmethod
    def compute(self) -> Any:
        """Returns the value, float32 of shape `[]`, or an array of values, such as one per class; NaN without examples."""

    def summary(self, value: Any) -> Any:
        """Returns what TensorBoard shows for a computed value.

        A number, an array (a list of numbers, or a table), an `ImageSummary`, `HistogramSummary` or `FigureSummary` of `fitflax.callbacks`, or a dict of
        these by name. It is called on the thread that writes event files, on a metric with the same settings but no arrays.

        Args:
            value: Result of `compute`, a Python float or a NumPy array.
        """
        return value


def weighted_sums(values: Any, weights: Any) -> tuple[jax.Array, jax.Array]:
    """Returns `(sum(w * v), sum(w))`, two float32 scalars, where `w` is `weights` broadcast over `values` from the left.

    For values `[batch, time]` with weights `[batch]` every token counts. Values with weight 0 add nothing, even if they are NaN or infinite.

    Args:
        values: `[...]`, real numbers or booleans.
        weights: Leading axes of `values`; axes after the first may have length 1.

    Raises:
        MetricError: `weights` does not broadcast to `values` from the left, or `values` are complex.

    >>> weighted_sums(jnp.array([[1.0, 3.0], [jnp.nan, 5.0]]), jnp.array([0.5, 0.0]))
    (Array(2., dtype=float32), Array(1., dtype=float32))
    """
    if jnp.iscomplexobj(values):
        raise MetricError(f"Values must be real numbers. Received: {jnp.result_type(values)}. Take their magnitude, abs(values), or their real part.")
    values = jnp.asarray(values, jnp.float32)
    weights = broadcast_weights(weights, values.shape)
    # Not `> 0`: with negative weights both sums must agree.
    return jnp.sum(jnp.where(weights != 0, weights * values, 0.0)), jnp.sum(weights)


def broadcast_weights(weights: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns weights broadcast to `shape` from the left."""
    weights = jnp.asarray(weights, jnp.float32)
    fits = weights.ndim <= len(shape) and weights.shape[:1] == shape[: min(1, weights.ndim)]
    if not fits or any(width not in (1, length) for width, length in zip(weights.shape, shape, strict=False)):
        raise MetricError(f"Weights must have the leading axes of the values. Received: weights {list(weights.shape)} for values {list(shape)}.")
    return jnp.broadcast_to(weights.reshape(weights.shape + (1,) * (len(shape) - weights.ndim)), shape)


# Running sums are pairs (hi, lo) in the last axis, float32 `[..., 2]`: hi + lo is the sum, and lo holds the rounding error of hi. In plain float32 a million
# additions are off by 1e-5, and adding 1 to 2^24 does nothing. Pairs may also be added element by element, as psum does.
def zero_pair() -> jax.Array:
    """Returns an empty running sum, float32 `[2]`."""
    # NumPy, because creating a metric must not initialize JAX's backend. The cast is for type checkers.
    return cast(jax.Array, np.zeros(2, np.float32))


def pair_field() -> Any:
    """Returns a dataclass field that holds a running sum, empty by default."""
    return dataclasses.field(default_factory=zero_pair)


def undefined() -> jax.Array:
    """Returns the value of a metric without examples, a NaN."""
    return nan_unless(jnp.bool_(False), jnp.float32(0))


def no_rows() -> jax.Array:
    """Returns no rows, `[0, 0]`; the number of columns follows from the first batch."""
    return cast(jax.Array, np.zeros((0, 0), np.float32))  # NumPy, as in `zero_pair`.


def static_field(default: Any) -> Any:
    """Returns a dataclass field that is not part of the pytree."""
    # `flax.struct.field` has no types.
    return dataclasses.field(default=default, metadata={"pytree_node": False})


def pair(value: jax.Array) -> jax.Array:
    """Returns sums `[...]` as pairs `[..., 2]`."""
    return _joined(jnp.asarray(value), jnp.zeros_like(value))


def add_pairs(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the sum of two arrays of pairs of one shape by Knuth's two-sum, normalized so that hi is the total rounded to float32."""
    # With `lax`, because steps contain many of these sums, and indexing and `jnp.stack` take three times as long to trace.
    (a_hi, a_lo), (b_hi, b_lo) = _split(a), _split(b)
    total = a_hi + b_hi
    b_seen = total - a_hi
    lost = (a_hi - (total - b_seen)) + (b_hi - b_seen)
    rest = a_lo + b_lo + lost
    hi = total + rest
    lo = rest - (hi - total)
    # Keep infinite sums: inf - inf is NaN.
    finite = lax.is_finite(total)
    return _joined(lax.select(finite, hi, total), lax.select(finite, lo, jnp.zeros_like(lo)))


def _split(pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
    hi, lo = (lax.index_in_dim(pairs, index, axis=-1, keepdims=False) for index in (0, 1))
    return hi, lo


def _joined(hi: jax.Array, lo: jax.Array) -> jax.Array:
    return lax.concatenate([lax.expand_dims(hi, [hi.ndim]), lax.expand_dims(lo, [hi.ndim])], hi.ndim)


@functools.cache
def bound(fn: Callable[..., jax.Array], **arguments: Any) -> Callable[[Any, Any], jax.Array]:
    """Returns `fn` with bound arguments; the same object for the same arguments."""
    # Partials never compare equal. The cache gives equal metrics the same tree structure, and so one compiled step.
    return functools.partial(fn, **arguments)


def metric_name(metric: Any) -> str:
    """Returns the log key of a metric, which may be any object: its `name`, or else the name of its class in snake case."""
    name = getattr(metric, "name", None)
    return name if isinstance(name, str) and name else snake_case(type(metric).__name__)


def metric_direction(metric: Any) -> Direction | None:
    """Returns the `direction` of a metric, which may be any object: `"max"`, `"min"`, or `None` if it has none."""
    direction = getattr(metric, "direction", None)
    if direction not in ("max", "min", None):
        raise MetricError(f"The direction of metric {metric_name(metric)!r} must be 'max', 'min' or None. Received: {direction!r}.")
    return cast("Direction | None", direction)


def snake_case(name: str) -> str:
    """Returns the name of a class as a log key."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
