"""A metric that shows in which order its parts were merged."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from fitflax.metrics import Metric


@struct.dataclass
class Digits(Metric):
    """Writes the first targets of the merged parts one after another, so that their order is visible; the parts cannot be added."""

    value: Any = np.float32(0)
    name: str = struct.field(pytree_node=False, default="digits")
    direction: Any = struct.field(pytree_node=False, default=None)

    def empty(self) -> Any:
        return Digits()

    def update(self, outputs: Any, targets: Any, weights: Any) -> Any:
        return Digits(jnp.ravel(targets)[0].astype(jnp.float32))

    def merge(self, other: Any) -> Any:
        return Digits(self.value * 10 + other.value)

    def compute(self) -> Any:
        return self.value
