"""A user's code with Flax and JAX: a network, a metric, data. They lack some types, so pyright's rules about unknown types are off in this file only."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import dataclasses
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import linen as nn
from flax import struct
from typing_extensions import override

from fitflax.metrics import Metric

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int32]


class Network(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = nn.relu(nn.Dense(self.width)(x))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(3)(x)


def make_data(examples: int = 64) -> tuple[Floats, Labels]:
    x = np.linspace(-1, 1, 4 * examples, dtype=np.float32).reshape(examples, 4)
    return x, np.arange(examples, dtype=np.int32) % 3


def init(rngs: Any, x: jax.Array) -> Any:
    return Network().init(rngs, x, train=True)


def apply(variables: Any, x: jax.Array, **options: Any) -> Any:
    return Network().apply(variables, x, train="dropout" in (options["rngs"] or {}), **options)


def smooth_crossentropy(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    wanted = 0.9 * jax.nn.one_hot(targets, 3) + 0.1 / 3
    return -(wanted * jax.nn.log_softmax(outputs)).sum(-1)


@struct.dataclass
class Largest(Metric):
    """The largest logit of a real example."""

    value: jax.Array | np.float32 = np.float32(-np.inf)
    name: str = dataclasses.field(default="largest", metadata={"pytree_node": False})
    direction: Literal["max", "min"] | None = dataclasses.field(default=None, metadata={"pytree_node": False})

    @override
    def empty(self) -> Self:
        return dataclasses.replace(self, value=np.float32(-np.inf))

    @override
    def update(self, outputs: jax.Array, targets: jax.Array, weights: jax.Array) -> Self:
        largest = jnp.where(weights > 0, outputs.max(-1), -jnp.inf).max()
        return dataclasses.replace(self, value=jnp.maximum(self.value, largest))

    @override
    def merge(self, other: Self) -> Self:
        return dataclasses.replace(self, value=jnp.maximum(self.value, other.value))

    @override
    def compute(self) -> jax.Array | np.float32:
        return self.value
