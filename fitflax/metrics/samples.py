"""`SampleCollector`: a random sample of the examples."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from typing_extensions import override

from fitflax.errors import MetricError
from fitflax.integers import is_integer
from fitflax.metrics.base import Direction, Metric, no_rows, static_field

__all__ = ["SampleCollector"]


@struct.dataclass
class SampleCollector(Metric):
    """Draws a uniform random sample of the examples, `[max_size, ...]`, in the order of the data.

    Each example gets a random priority that depends on `seed` and on its position in the pass; the `max_size` lowest are kept (bottom-k sampling). So the
    sample does not depend on the batch size or the number of devices, and merging two metrics samples from both. Until the end of the pass, the host keeps the
    rows of all examples, as for an exact AUC, and so does a checkpoint inside an epoch. If they are too large, let `fn` return less. The sample is in the
    logs, in the result of `evaluate` and in TensorBoard, but not in `History`.

    Attributes:
        max_size: Maximum number of examples in the sample.
        fn: `fn(outputs, targets) -> [batch, ...]`, what is kept of each example; by default the outputs, which must then be one array.
        show: Function from the sample, an array `[<= max_size, ...]`, to what TensorBoard shows; see `Metric.summary`. By default the array itself.
        seed: Seed of the random priorities.
        name: Log key.
        direction: `None`.
        rows: Results of `fn`, `[examples, ...]`.
        weights: float32 `[examples, 1]`; examples of weight 0 are never drawn.

    >>> collector = SampleCollector(max_size=2, fn=lambda outputs, targets: outputs - targets)
    >>> collector.update(jnp.arange(10.0), jnp.zeros(10), jnp.ones(10)).compute().shape
    (2,)
    """

    collect: ClassVar[bool] = True
    is_recorded: ClassVar[bool] = False

    max_size: int = static_field(16)
    _: dataclasses.KW_ONLY
    fn: Callable[[Any, Any], Any] | None = static_field(None)
    show: Callable[[Any], Any] | None = static_field(None)
    seed: int = static_field(0)
    name: str = static_field("samples")
    direction: Direction | None = static_field(None)
    rows: jax.Array = dataclasses.field(default_factory=no_rows)
    weights: jax.Array = dataclasses.field(default_factory=no_rows)

    def __post_init__(self) -> None:
        if not is_integer(self.max_size, 1):
            raise MetricError(f"SampleCollector(max_size=...) must be a positive integer. Received: {self.max_size!r}.")

    @override
    def empty(self) -> Self:
        return dataclasses.replace(self, rows=no_rows(), weights=no_rows())

    @override
    def update(self, outputs: Any, targets: Any, weights: Any) -> Self:
        rows = outputs if self.fn is None else self.fn(outputs, targets)
        weights = jnp.asarray(weights, jnp.float32)
        if not hasattr(rows, "shape") or rows.shape[:1] != weights.shape[:1]:
            what = "outputs" if self.fn is None else "fn(outputs, targets)"
            received = f"shape {list(rows.shape)}" if hasattr(rows, "shape") else f"a {type(rows).__name__}"
            raise MetricError(f"Metric {self.name!r} samples {what}, which must be one array [{weights.shape[0]}, ...]. Received: {received}.")
        return self.merge(dataclasses.replace(self, rows=rows, weights=weights.reshape(weights.shape[0], -1).max(axis=1, keepdims=True)))

    @override
    def merge(self, other: Self) -> Self:
        if np.shape(self.weights)[0] == 0:
            return dataclasses.replace(self, rows=other.rows, weights=other.weights)
        if np.shape(other.weights)[0] == 0:
            return self
        xp = np if isinstance(self.rows, np.ndarray) and isinstance(other.rows, np.ndarray) else jnp
        return dataclasses.replace(self, rows=xp.concatenate([self.rows, other.rows]), weights=xp.concatenate([self.weights, other.weights]))

    @override
    def compute(self) -> Any:
        real = np.asarray(self.rows)[np.asarray(self.weights).reshape(-1) != 0]
        priorities = np.random.default_rng(self.seed).random(len(real))
        return real[np.sort(np.argsort(priorities, kind="stable")[: self.max_size])]

    @override
    def summary(self, value: Any) -> Any:
        return value if self.show is None else self.show(value)
