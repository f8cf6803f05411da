"""Metrics: immutable pytrees of sums that join exactly, however the examples were cut into batches.

`empty` begins, `update` takes a batch in, `merge` joins two parts (batches, replicas, processes), `compute` gives the number. All are pure and can be
compiled, scanned and mapped. `Mean` of a function of per-example values is the workhorse, and what most names stand for; `R2` has moments of its own.
Outputs are logits wherever a threshold or a softmax is involved. Log keys of several outputs and clashes between names are settled elsewhere.
"""

import abc
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from typing_extensions import override

import fitflax.losses as losses
from fitflax.errors import LossError, MetricError, did_you_mean

__all__ = ["R2", "Accuracy", "BinaryAccuracy", "Mean", "Metric", "Perplexity", "RootMeanSquaredError", "TopKAccuracy"]
__all__ += ["get", "metric_direction", "metric_name", "names", "resolve", "weighted_sums"]

Direction = Literal["max", "min"]


class Metric(abc.ABC):
    """The base class of metrics: a frozen `flax.struct.dataclass` whose fields are arrays, but for `name` and `direction`.

    `empty`, `update` and `merge` return new metrics of one and the same structure, shapes and dtypes, except that `empty` may hold scalars (or shapes that
    broadcast) where the others learn a shape from the batch. Any cut of the examples into parts must give the same result up to rounding.

    Attributes:
        additive: Whether adding the leaves of two metrics joins them too, so that replicas can be joined by one sum over devices.
        name: The log key.
        direction: `"max"` where more is better, `"min"` where less is, `None` where neither is.

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
    def merge(self, other: Self) -> Self:
        """Returns the metric over the examples of both."""

    @abc.abstractmethod
    def compute(self) -> jax.Array:
        """Returns the number, float32 of shape `[]`; of no examples 0."""


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
    weights = _broadcast_weights(weights, values.shape)
    # `!= 0` and not `> 0`: should somebody weigh examples negatively, both sums must agree.
    return jnp.sum(jnp.where(weights != 0, weights * values, 0.0)), jnp.sum(weights)


def _broadcast_weights(weights: Any, shape: tuple[int, ...]) -> jax.Array:
    weights = jnp.asarray(weights, jnp.float32)
    fits = weights.ndim <= len(shape) and weights.shape[:1] == shape[: min(1, weights.ndim)]
    if not fits or any(width not in (1, length) for width, length in zip(weights.shape, shape, strict=False)):
        raise MetricError(f"Weights must have the leading axes of what they weigh, or fewer. Received: weights {list(weights.shape)} for values {list(shape)}.")
    return jnp.broadcast_to(weights.reshape(weights.shape + (1,) * (len(shape) - weights.ndim)), shape)


# Running sums are pairs (hi, lo) in the last axis, float32 `[..., 2]`: hi + lo is the sum, lo holds what hi is too coarse for. In plain float32 a million
# additions are off by 1e-5, and adding 1 to 2^24 does nothing. Pairs whose hi and lo were added each for itself, as psum does, are pairs still.
def _zero_pair() -> jax.Array:
    # NumPy: making a metric must not start JAX's backend. The cast is for type checkers; inside a step the two are the same.
    return cast(jax.Array, np.zeros(2, np.float32))


def _pair_field() -> Any:
    return dataclasses.field(default_factory=_zero_pair)


def _static(default: Any) -> Any:
    # `flax.struct.field` has no types.
    return dataclasses.field(default=default, metadata={"pytree_node": False})


def _pair(value: jax.Array) -> jax.Array:
    return jnp.stack([value, jnp.zeros_like(value)], axis=-1)


def _add_pairs(a: jax.Array, b: jax.Array) -> jax.Array:
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


_TRANSFORMS: dict[str | None, Callable[[jax.Array], jax.Array]] = {None: lambda mean: mean, "sqrt": jnp.sqrt, "exp": jnp.exp}


@struct.dataclass
class Mean(Metric):
    """The weighted mean of a function's per-example values: `sum(w * v) / sum(w)` over all examples; 0 where no example has weight.

    Attributes:
        fn: `(outputs, targets) -> values`, `[batch]` or `[batch, ...]`; `None` for a mean that is fed by `add` alone.
        name: The log key; by default the function's `__name__` (`functools.partial` is looked through; `"lambda"` for a lambda).
        direction: By default `"min"` for the losses of `fitflax.losses` and `None` for all else.
        transform: `"sqrt"` or `"exp"` of the mean, or `None` for the mean itself.
        total: `sum(w * v)`, a pair, float32 `[2]`.
        weight: `sum(w)`, a pair, float32 `[2]`.

    Raises:
        MetricError: `fn`, `direction` or `transform` is none of these.

    >>> mae = Mean(losses.mean_absolute_error)
    >>> mae = mae.update(jnp.array([1.0, 2.0, 9.0]), jnp.array([0.0, 0.0, 0.0]), jnp.array([1.0, 1.0, 0.0]))
    >>> mae.name, mae.direction, float(mae.compute())
    ('mean_absolute_error', 'min', 1.5)
    """

    additive: ClassVar[bool] = True

    fn: Callable[[Any, Any], Any] | None = _static(None)
    _: dataclasses.KW_ONLY
    name: str = _static("")
    direction: Direction | None = _static(None)
    transform: Literal["sqrt", "exp"] | None = _static(None)
    total: jax.Array = _pair_field()
    weight: jax.Array = _pair_field()

    def __post_init__(self) -> None:
        # Runs again whenever JAX rebuilds the metric from its leaves, and then changes nothing.
        if self.fn is not None and not callable(self.fn):
            raise MetricError(f"Mean takes a function (outputs, targets) -> values. Received: {self.fn!r}. For a metric by name: metrics.get(name).")
        if self.transform not in _TRANSFORMS:
            raise MetricError(f"Mean(transform=...) must be one of {list(_TRANSFORMS)}. Received: {self.transform!r}.")
        if not self.name:
            object.__setattr__(self, "name", "mean" if self.fn is None else _function_name(self.fn))
        if self.direction is None:
            object.__setattr__(self, "direction", losses.direction(self.fn))
        metric_direction(self)

    @override
    def empty(self) -> Self:
        return dataclasses.replace(self, total=_zero_pair(), weight=_zero_pair())

    @override
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        if self.fn is None:
            raise MetricError(f"Metric {self.name!r} has no function to take values from. Use add(values, weights), or Mean(fn).")
        try:
            values = jnp.asarray(self.fn(outputs, targets))
        except (LossError, MetricError) as error:
            raise MetricError(f"Metric {self.name!r}: {error}") from error
        if values.shape[:1] != jnp.shape(weights)[:1]:
            raise MetricError(
                f"Metric {self.name!r} must return one value per example, [batch] or [batch, ...]: its function returned {list(values.shape)} "
                f"for weights {list(jnp.shape(weights))}. Leave out the mean over the batch; it is taken here, over all batches."
            )
        return self.add(values, weights)

    def add(self, values: Any, weights: Any) -> Self:
        """Returns this metric with values that are already there, such as a step's losses.

        Args:
            values: `[batch]`, `[batch, ...]` or `[]`.
            weights: float32, the leading axes of `values`, or fewer of them.

        Raises:
            MetricError: `weights` does not fit `values`.

        >>> float(Mean(name="grad_norm").add(3.0, 1.0).add(5.0, 3.0).compute())
        4.5
        """
        try:
            total, weight = weighted_sums(values, weights)
        except MetricError as error:
            raise MetricError(f"Metric {self.name!r}: {error}") from error
        return dataclasses.replace(self, total=_add_pairs(self.total, _pair(total)), weight=_add_pairs(self.weight, _pair(weight)))

    @override
    def merge(self, other: Self) -> Self:
        return dataclasses.replace(self, total=_add_pairs(self.total, other.total), weight=_add_pairs(self.weight, other.weight))

    @override
    def compute(self) -> jax.Array:
        total, weight = jnp.sum(self.total, axis=-1), jnp.sum(self.weight, axis=-1)
        mean = total / jnp.where(weight == 0, 1.0, weight)
        return jnp.where(weight == 0, 0.0, _TRANSFORMS[self.transform](mean))


@struct.dataclass
class R2(Metric):
    """The coefficient of determination, `1 - sum(w * (targets - outputs)^2) / sum(w * (targets - mean)^2)`, per column and then averaged over columns.

    As scikit-learn's `r2_score`: 1 is perfect, 0 as good as the mean of the targets. Constant targets give 1 if they are met exactly, else 0. The mean and
    the squares around it are joined by the formula of Chan, Golub and LeVeque (1979): sums of raw squares in float32 are off by 3e-3 for targets around 1000.
    Outputs and targets are `[batch]` or `[batch, ..., columns]` (a last axis of length 1 may be missing on either side), weights their leading axes without
    the columns.

    Attributes:
        name: The log key.
        direction: `"max"`.
        weight: `sum(w)`, a pair, float32 `[2]`.
        mean: The targets' mean, float32 pairs `[columns, 2]`; `[2]` while empty, as those below.
        spread: `sum(w * (targets - mean)^2)`, float32 pairs `[columns, 2]`.
        residual: `sum(w * (targets - outputs)^2)`, float32 pairs `[columns, 2]`.

    >>> r2 = R2().update(jnp.array([1.0, 2.0, 4.0]), jnp.array([1.0, 2.0, 3.0]), jnp.ones(3))
    >>> float(r2.compute())
    0.5
    """

    _: dataclasses.KW_ONLY
    name: str = _static("r2")
    direction: Direction | None = _static("max")
    weight: jax.Array = _pair_field()
    mean: jax.Array = _pair_field()
    spread: jax.Array = _pair_field()
    residual: jax.Array = _pair_field()

    @override
    def empty(self) -> Self:
        return dataclasses.replace(self, weight=_zero_pair(), mean=_zero_pair(), spread=_zero_pair(), residual=_zero_pair())

    @override
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        try:
            outputs, targets = _same_shape(outputs, targets)
            if outputs.ndim == 1:
                outputs, targets = outputs[:, None], targets[:, None]
            rows = _broadcast_weights(weights, outputs.shape[:-1]).reshape(-1, 1)
        except MetricError as error:
            raise MetricError(f"Metric {self.name!r}: {error}") from error
        columns = outputs.shape[-1]
        counted = rows != 0
        outputs = jnp.where(counted, outputs.astype(jnp.float32).reshape(-1, columns), 0.0)
        targets = jnp.where(counted, targets.astype(jnp.float32).reshape(-1, columns), 0.0)
        weight = rows.sum()
        divisor = jnp.where(weight == 0, 1.0, weight)
        # The mean once more, of what the first one leaves: float32 alone is too coarse for the squares around it to be joined later.
        mean = jnp.sum(rows * targets, axis=0, keepdims=True) / divisor
        finer = jnp.sum(rows * (targets - mean), axis=0, keepdims=True) / divisor
        batch = dataclasses.replace(
            self,
            weight=_pair(weight),
            mean=jnp.stack([mean[0], finer[0]], axis=-1),
            spread=_pair(jnp.sum(rows * ((targets - mean) - finer) ** 2, axis=0)),
            residual=_pair(jnp.sum(rows * (targets - outputs) ** 2, axis=0)),
        )
        return self.merge(batch)

    @override
    def merge(self, other: Self) -> Self:
        weight = _add_pairs(self.weight, other.weight)
        both = weight.sum(-1)
        share = jnp.where(both == 0, 0.0, other.weight.sum(-1) / jnp.where(both == 0, 1.0, both))
        shift = _add_pairs(other.mean, -self.mean)
        between = shift.sum(-1) ** 2 * self.weight.sum(-1) * share
        return dataclasses.replace(
            self,
            weight=weight,
            mean=_add_pairs(self.mean, shift * share),
            spread=_add_pairs(_add_pairs(self.spread, other.spread), _pair(between)),
            residual=_add_pairs(self.residual, other.residual),
        )

    @override
    def compute(self) -> jax.Array:
        weight, mean, spread, residual = (pair.sum(-1) for pair in (self.weight, self.mean, self.spread, self.residual))
        # Of constant targets rounding leaves a spread of some 1e-14 of their size, which must not divide anything.
        constant = jnp.sqrt(spread) <= 1e-9 * jnp.abs(mean) * jnp.sqrt(weight)
        score = jnp.where(constant, jnp.where(residual == 0, 1.0, 0.0), 1.0 - residual / jnp.where(constant, 1.0, spread))
        return jnp.where(weight == 0, 0.0, score.mean())


def Accuracy(*, name: str = "accuracy") -> Mean:
    """Returns the share of examples that are classified right; what that means is taken from the shapes.

    | outputs | targets | right when |
    |---|---|---|
    | `[..., classes]` | `[...]` or `[..., 1]` | `argmax(outputs) == targets` |
    | `[..., classes]` | `[..., classes]` | `argmax(outputs) == argmax(targets)` |
    | `[batch]` or `[..., 1]` | `[batch]`, `[...]` or `[..., 1]` | `(outputs > 0) == targets`: logits |

    For several yes-or-no labels per example (`[batch, labels]` both), use `BinaryAccuracy`.

    Args:
        name: The log key.

    >>> accuracy = Accuracy().update(jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([1, 1]), jnp.ones(2))
    >>> accuracy.name, accuracy.direction, float(accuracy.compute())
    ('accuracy', 'max', 0.5)
    """
    return Mean(_accuracy, name=name, direction="max")


def BinaryAccuracy(*, threshold: float = 0.0, name: str = "binary_accuracy") -> Mean:
    """Returns the share of yes-or-no targets that are met: `(outputs > threshold) == targets`, each label by itself.

    Args:
        threshold: On the outputs: 0 for logits, 0.5 for probabilities.
        name: The log key.

    >>> metric = BinaryAccuracy().update(jnp.array([[-1.0, 2.0], [3.0, 0.5]]), jnp.array([[0, 1], [1, 0]]), jnp.ones(2))
    >>> float(metric.compute())
    0.75
    """
    return Mean(_bound(_binary_accuracy, threshold=float(threshold)), name=name, direction="max")


def TopKAccuracy(*, k: int = 5, name: str = "top_k_accuracy") -> Mean:
    """Returns the share of examples whose class is among the `k` highest outputs; targets are labels or one-hot rows, by their shape.

    As in Keras's `in_top_k`, a class is among the `k` if fewer than `k` others are strictly higher, so ties at the border all count. A NaN output and a
    label that is no class never count.

    Args:
        k: At least 1.
        name: The log key.

    Raises:
        MetricError: `k` is not a positive integer.

    >>> metric = TopKAccuracy(k=2).update(jnp.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), jnp.array([1, 2]), jnp.ones(2))
    >>> float(metric.compute())
    0.5
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise MetricError(f"TopKAccuracy(k=...) must be a positive integer. Received: {k!r}.")
    return Mean(_bound(_top_k_accuracy, k=k, kind="integer or one-hot"), name=name, direction="max")


def RootMeanSquaredError(*, name: str = "rmse") -> Mean:
    """Returns the square root of the mean squared error over all examples; not the mean of the batches' roots.

    Args:
        name: The log key.

    >>> float(RootMeanSquaredError().update(jnp.array([3.0, 5.0]), jnp.array([0.0, 0.0]), jnp.array([1.0, 0.0])).compute())
    3.0
    """
    return Mean(losses.mean_squared_error, name=name, direction="min", transform="sqrt")


def Perplexity(*, name: str = "perplexity") -> Mean:
    """Returns `exp` of the mean sparse categorical crossentropy over all tokens; not the mean of the batches' perplexities.

    Args:
        name: The log key.

    >>> float(Perplexity().update(jnp.zeros((2, 5, 8)), jnp.zeros((2, 5), int), jnp.ones(2)).compute().round(4))
    8.0
    """
    return Mean(losses.sparse_categorical_crossentropy, name=name, direction="min", transform="exp")


_Targets = Literal["integer", "one-hot", "integer or one-hot"]


@functools.cache
def _bound(fn: Callable[..., jax.Array], **arguments: Any) -> Callable[[Any, Any], jax.Array]:
    # Cached, because two equal metrics should have one tree structure and so one compiled step; two partials are never equal.
    return functools.partial(fn, **arguments)


def _accuracy(outputs: Any, targets: Any) -> jax.Array:
    outputs, targets = _arrays(outputs, targets)
    if outputs.ndim < 2 or outputs.shape[-1] == 1:
        return _binary_accuracy(outputs, targets, threshold=0.0)
    return _class_accuracy(outputs, targets, kind="integer or one-hot")


def _binary_accuracy(outputs: Any, targets: Any, *, threshold: float) -> jax.Array:
    outputs, targets = _same_shape(outputs, targets)
    return jnp.equal(outputs > threshold, targets)


def _class_accuracy(outputs: Any, targets: Any, *, kind: _Targets) -> jax.Array:
    outputs, labels = _class_labels(outputs, targets, kind)
    return jnp.equal(jnp.argmax(outputs, axis=-1), labels)


def _top_k_accuracy(outputs: Any, targets: Any, *, k: int, kind: _Targets) -> jax.Array:
    outputs, labels = _class_labels(outputs, targets, kind)
    labels = labels.astype(jnp.int32)  # they may come as int8 or as floats, which neither count the classes nor index them
    known = (labels >= 0) & (labels < outputs.shape[-1])
    at_label = jnp.take_along_axis(outputs, labels[..., None], axis=-1)
    return jnp.logical_and(known & ~jnp.isnan(at_label[..., 0]), jnp.sum(outputs > at_label, axis=-1) < k)


def _arrays(outputs: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    for role, value in (("outputs", outputs), ("targets", targets)):
        if isinstance(value, (dict, list, tuple)):
            raise MetricError(f"It takes one array of {role}. Received: a {type(value).__name__} of {len(value)}. Give metrics for each output.")
    return jnp.asarray(outputs), jnp.asarray(targets)


def _same_shape(outputs: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Returns both in one shape; a missing last axis of length 1 is put back."""
    outputs, targets = _arrays(outputs, targets)
    if outputs.shape == (*targets.shape, 1):
        targets = targets[..., None]
    elif targets.shape == (*outputs.shape, 1):
        outputs = outputs[..., None]
    if outputs.shape != targets.shape or outputs.ndim == 0:
        raise _mismatch("outputs and targets of one shape [batch, ...] (a last axis of length 1 may be missing)", outputs, targets)
    return outputs, targets


def _class_labels(outputs: Any, targets: Any, kind: _Targets) -> tuple[jax.Array, jax.Array]:
    """Returns outputs `[..., classes]` and labels `[...]`, from labels `[...]` or `[..., 1]` or from one-hot rows."""
    outputs, targets = _arrays(outputs, targets)
    if outputs.ndim > 1 and kind != "one-hot" and targets.shape in (outputs.shape[:-1], (*outputs.shape[:-1], 1)):
        return outputs, targets.reshape(outputs.shape[:-1])
    if outputs.ndim > 1 and kind != "integer" and targets.shape == outputs.shape:
        return outputs, jnp.argmax(targets, axis=-1)
    raise _mismatch(f"outputs [..., classes] with {kind} targets", outputs, targets)


def _mismatch(takes: str, outputs: jax.Array, targets: jax.Array) -> MetricError:
    # `Mean.update` and `R2.update` put the metric's name in front.
    return MetricError(f"It takes {takes}. Received: outputs {list(outputs.shape)}, targets {list(targets.shape)}.")


# The key of a metric is the name that the user wrote, so each of these takes `name`.
_METRICS: dict[str, Callable[..., Any]] = {
    **{name: functools.partial(Mean, losses.get(name)) for name in losses.names()},
    "accuracy": Accuracy,
    "acc": Accuracy,
    "binary_accuracy": BinaryAccuracy,
    "categorical_accuracy": functools.partial(Mean, _bound(_class_accuracy, kind="one-hot"), direction="max"),
    "sparse_categorical_accuracy": functools.partial(Mean, _bound(_class_accuracy, kind="integer"), direction="max"),
    "top_k_accuracy": TopKAccuracy,
    "top_k_categorical_accuracy": functools.partial(Mean, _bound(_top_k_accuracy, k=5, kind="one-hot"), direction="max"),
    "sparse_top_k_categorical_accuracy": functools.partial(Mean, _bound(_top_k_accuracy, k=5, kind="integer"), direction="max"),
    "rmse": RootMeanSquaredError,
    "root_mean_squared_error": RootMeanSquaredError,
    "r2": R2,
    "r2_score": R2,
    "perplexity": Perplexity,
}


def get(name: str) -> Metric:
    """Returns the metric of that name, with the name as its log key.

    Args:
        name: One of `names()`; the names of all losses are among them.

    Raises:
        MetricError: There is no such metric.

    >>> get("acc").name, get("mse").direction
    ('acc', 'min')
    """
    if not isinstance(name, str):
        raise MetricError(f"metrics.get() takes a name. Received: {name!r}.")
    if name not in _METRICS:
        close = did_you_mean(_snake_case(name), _METRICS)
        raise MetricError(f"There is no metric {name!r}.{close} Known: {names()}. Or give a function (outputs, targets) -> one value per example.")
    return cast(Metric, _METRICS[name](name=name))


def names() -> list[str]:
    """Returns the names that `get` knows, sorted.

    >>> "accuracy" in names() and "mse" in names()
    True
    """
    return sorted(_METRICS)


def resolve(spec: Any) -> Any:
    """Returns the metric that `spec` stands for.

    Args:
        spec: A name; a metric, or anything with `empty`, `update`, `merge` and `compute`; a class of such, or a function of this module that makes one, which
            is called without arguments; a function `(outputs, targets) -> values`, one per example, whose `Mean` is taken.

    Raises:
        MetricError: It is none of these.

    >>> resolve("mse").name, resolve(R2).name, resolve(losses.huber).name
    ('mse', 'r2', 'huber')
    """
    if isinstance(spec, str):
        return get(spec)
    has_methods = all(callable(getattr(spec, method, None)) for method in ("empty", "update", "merge", "compute"))
    if any(spec is maker for maker in _METRICS.values()) or (isinstance(spec, type) and has_methods):
        try:
            return spec()
        except TypeError as error:
            raise MetricError(f"{spec!r} cannot be made without arguments ({error}). Received: the class; give an object.") from error
    if has_methods:
        return spec
    if callable(spec) and not isinstance(spec, type):
        return Mean(spec)
    takes = "a name, an object with empty, update, merge and compute, or a function (outputs, targets) -> one value per example"
    raise MetricError(f"A metric is {takes}. Received: {spec!r}.")


def metric_name(metric: Any) -> str:
    """Returns a metric's log key: its `name`, or its class's name in snake case where it has none.

    Args:
        metric: Any object; it need not be a `Metric`.

    >>> metric_name(R2()), metric_name(object())
    ('r2', 'object')
    """
    name = getattr(metric, "name", None)
    return name if isinstance(name, str) and name else _snake_case(type(metric).__name__)


def metric_direction(metric: Any) -> Direction | None:
    """Returns what a metric declares to be better: `"max"`, `"min"`, or `None` where it declares nothing.

    Args:
        metric: Any object; it need not be a `Metric`.

    Raises:
        MetricError: Its `direction` is something else.

    >>> metric_direction(R2()), metric_direction(object())
    ('max', None)
    """
    direction = getattr(metric, "direction", None)
    if direction not in ("max", "min", None):
        raise MetricError(f"The direction of metric {metric_name(metric)!r} must be 'max', 'min' or None. Received: {direction!r}.")
    return cast("Direction | None", direction)


def _function_name(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", None)
    return name.strip("<>") if isinstance(name, str) else _snake_case(type(fn).__name__)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
