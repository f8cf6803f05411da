"""The training loop that Flax's documentation shows for NNX modules, and the contents of a module, for comparisons."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

__all__ = ["assert_same", "hand_written_loop", "values"]


def hand_written_loop(model: Any, optimizer: Any, batches: Iterable[Any], loss: Callable[[Any, Any], Any], *, wrt: Any = nnx.Param) -> list[float]:
    """Trains `model` in place, and returns the losses; `loss` is a function of the model and a batch."""
    state = nnx.Optimizer(model, optimizer, wrt=wrt)

    @nnx.jit
    def step(model: Any, state: Any, batch: Any) -> Any:
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model, batch)
        state.update(model, grads)
        return value

    return [float(step(model, state, batch)) for batch in batches]


def values(model: Any) -> dict[str, Any]:
    """Returns everything that a module holds, by path, as NumPy arrays; random keys as their data."""
    flat = nnx.to_flat_state(nnx.split(model)[1])
    found = {"/".join(map(str, path)): leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf for path, leaf in flat}
    return {path: np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf) for path, leaf in found.items()}


def assert_same(one: dict[str, Any], other: dict[str, Any], **tolerance: Any) -> None:
    assert one.keys() == other.keys()
    for path, value in one.items():
        np.testing.assert_allclose(value, other[path], **{"rtol": 0, "atol": 0, **tolerance}, err_msg=path)
