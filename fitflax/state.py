"""What is trained and what is fed: `TrainState` and `Batch`, both plain pytrees of arrays."""

from typing import Any, NamedTuple

import jax
from flax import struct

__all__ = ["Batch", "PyTree", "TrainState"]

PyTree = Any


@struct.dataclass
class TrainState:
    """Everything that training changes, as a frozen pytree of arrays; no module, no optimizer, no loader.

    Attributes:
        step: Finished updates; int32, shape `[]`.
        params: The module's `"params"` collection.
        model_state: The module's other collections that last from step to step, `{collection: tree}`, such as `"batch_stats"`.
        opt_state: The optax state.
        key: The typed key that all randomness of training is derived from; it never changes, the step is folded into it.
        ema_params: Averaged parameters, which are what is evaluated; `None` unless `compile(ema_decay=...)` asked for them.

    >>> import jax.numpy as jnp
    >>> state = TrainState(step=jnp.int32(0), params={"w": jnp.ones(3)}, model_state={}, opt_state=(), key=jax.random.key(0))
    >>> state.params["w"].shape
    (3,)
    """

    step: jax.Array
    params: PyTree
    model_state: dict[str, PyTree]
    opt_state: PyTree
    key: jax.Array
    ema_params: PyTree | None = None


class Batch(NamedTuple):
    """One batch of fixed shape.

    Attributes:
        x: What the module is called with: a tuple is spread over positional arguments, anything else is one argument.
        y: The targets; `()` where there are none.
        mask: bool `[batch]`; False marks padding, which repeats real rows and counts nowhere.
        weights: Sample weight times class weight, `[batch]` or `[batch, ...]`; `None` where none were given. A real example of weight 0 is not padding.

    >>> import numpy as np
    >>> Batch(x=np.ones((2, 3)), y=np.zeros(2), mask=np.array([True, False])).mask.sum()
    np.int64(1)
    """

    x: PyTree
    y: PyTree
    mask: Any
    weights: Any = None
