"""The base classes of metrics, weighted sums, running sums without rounding errors, and batches as rows."""

import abc
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from typing_extensions import override

from fitflax.errors import LossError, MetricError
from fitflax.losses.shapes import IT, arrays, mismatch, nan_unless, same_shape
from fitflax.state import arrays_of

Targets = Literal["integer", "one-hot", "integer or one-hot"]
Direction = Literal["max", "min"]
_Array = TypeVar("_Array")


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
        """Returns the value, float32 of shape `[]`, or an array of values, such as one per class; NaN without examples, except for counts."""

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
def pair_field() -> Any:
    """Returns a dataclass field that holds a running sum, by default an empty one, `[2]`."""
    # NumPy, because creating a metric must not initialize JAX's backend.
    return dataclasses.field(default_factory=lambda: np.zeros(2, np.float32))


def undefined() -> jax.Array:
    """Returns the value of a metric without examples, a NaN."""
    return nan_unless(jnp.bool_(False), jnp.float32(0))


def rows_field() -> Any:
    """Returns a dataclass field that holds rows, by default none, `[0, 0]`; the number of columns follows from the first batch."""
    return dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.float32))


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


@contextlib.contextmanager
def naming(metric: str) -> Iterator[None]:
    """Prepends the name of a metric to the errors of a block."""
    try:
        yield
    except (LossError, MetricError) as error:
        raise MetricError(f"Metric {metric!r}: {error}") from error


def ratio(part: _Array, whole: Any, xp: Any = jnp) -> _Array:
    """Returns `part / whole`, or 0 where the whole is 0; `xp` is NumPy or jax.numpy."""
    result: _Array = xp.where(whole == 0, 0.0, part / xp.where(whole == 0, 1.0, whole))
    return result


@struct.dataclass
class ResetMetric(Metric):
    """A metric whose `empty` resets the fields that have a `default_factory`."""

    @override
    def empty(self) -> Self:
        defaults = {field.name: field.default_factory() for field in dataclasses.fields(self) if field.default_factory is not dataclasses.MISSING}
        return dataclasses.replace(self, **defaults)


@struct.dataclass
class Rows(ResetMetric):
    """A metric that collects rows `[examples, ...]` on the host, among them `weights`; `compute` drops rows of weight 0."""

    collect: ClassVar[bool] = True

    @override
    def merge(self, other: Self) -> Self:
        mine, theirs = arrays_of(self), arrays_of(other)
        if np.shape(theirs["weights"])[0] == 0:
            return self
        merged = theirs if np.shape(mine["weights"])[0] == 0 else {name: _append(mine[name], theirs[name]) for name in mine}
        return dataclasses.replace(self, **merged)


def _append(mine: Any, theirs: Any) -> Any:
    # Keep NumPy arrays on the host.
    return (np if isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray) else jnp).concatenate([mine, theirs])


@struct.dataclass
class Counts(ResetMetric):
    """Weighted counts that add up; a subclass defines what is counted in a batch and computes the metric from the counts.

    `counts` are sums of weights, float32 pairs `[..., 2]`; `[2]` while empty, because the shape follows from the first batch.
    """

    additive: ClassVar[bool] = True

    _: dataclasses.KW_ONLY
    name: str = static_field("counts")
    direction: Direction | None = static_field(None)
    counts: jax.Array = pair_field()

    @abc.abstractmethod
    def count(self, outputs: Any, targets: Any, weights: Any) -> jax.Array:
        """Returns the counts of a batch, float32 `[...]`, with at least one axis."""

    @override
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        return self.merge(dataclasses.replace(self, counts=pair(self.count(outputs, targets, weights))))

    @override
    def merge(self, other: Self) -> Self:
        mine, theirs = np.shape(self.counts), np.shape(other.counts)
        if mine != theirs and (2,) not in (mine, theirs):
            # Broadcasting would hide the mismatch.
            raise MetricError(
                f"Metric {self.name!r} cannot merge counts of different shapes: {list(mine[:-1])} and {list(theirs[:-1])}. "
                "All batches must have the same number of classes."
            )
        return dataclasses.replace(self, counts=add_pairs(self.counts, other.counts))


class Examples(NamedTuple):
    """Outputs, targets and weights as rows, one for each example, token or pixel.

    Attributes:
        kind: Kind of problem, from the shapes: one logit for a binary target, classes that exclude each other, or independent binary labels.
        scores: Outputs, float32 `[rows, columns]`; one logit is one column.
        labels: float32; the class `[rows, 1]` for classes, else 0 or 1, `[rows, columns]`.
        weights: float32 `[rows]`.
    """

    kind: Literal["one logit", "classes", "labels"]
    scores: jax.Array
    labels: jax.Array
    weights: jax.Array


def as_examples(outputs: Any, targets: Any, weights: Any, *, multi_label: bool, name: str) -> Examples:
    """Returns a batch as rows; shapes and the kind of problem are as in the table of `Precision`, and errors begin with the `name` of the metric."""
    kind: Literal["one logit", "classes", "labels"]
    with naming(name):
        outputs, targets = arrays(IT, outputs, targets)
        if multi_label:
            kind, (outputs, targets) = "labels", same_shape(IT, outputs, targets)
            if outputs.ndim < 2:
                raise mismatch(IT, outputs, targets, "outputs and targets [batch, ..., labels] with multi_label=True")
            shape = outputs.shape[:-1]
        elif outputs.ndim < 2 or outputs.shape[-1] == 1:
            kind, (outputs, targets) = "one logit", same_shape(IT, outputs, targets)
            shape = outputs.shape
        else:
            kind, (outputs, targets) = "classes", class_labels(outputs, targets, "integer or one-hot")
            shape = targets.shape
        rows = broadcast_weights(weights, shape)
    columns = 1 if kind == "one logit" else outputs.shape[-1]
    # float32 is exact for classes below 2^24, and keeps non-integers invalid.
    labels = targets.astype(jnp.float32).reshape(-1, columns if kind == "labels" else 1)
    return Examples(kind, outputs.astype(jnp.float32).reshape(-1, columns), labels, rows.reshape(-1))


def weights_of(examples: Examples) -> jax.Array:
    """Returns the weights `[rows, columns]` or `[rows, 1]`, NaN where the output is NaN, so that sums of them are NaN. A weight of 0 stays 0.

    A NaN affects its whole row; for independent labels, only its own column.
    """
    is_nan = jnp.isnan(examples.scores)
    if examples.kind != "labels":
        is_nan = is_nan.any(axis=-1, keepdims=True)
    weights = examples.weights[:, None]
    return nan_unless(~is_nan | (weights == 0), weights)


def class_labels(outputs: Any, targets: Any, kind: Targets) -> tuple[jax.Array, jax.Array]:
    """Returns outputs `[..., classes]` and labels `[...]`, from labels `[...]` or `[..., 1]` or from one-hot rows."""
    outputs, targets = arrays(IT, outputs, targets)
    if outputs.ndim > 1 and kind != "one-hot" and targets.shape in (outputs.shape[:-1], (*outputs.shape[:-1], 1)):
        return outputs, targets.reshape(outputs.shape[:-1])
    if outputs.ndim > 1 and kind != "integer" and targets.shape == outputs.shape:
        return outputs, jnp.argmax(targets, axis=-1)
    raise mismatch(IT, outputs, targets, f"outputs [..., classes] with {kind} targets")
