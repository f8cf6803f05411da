"""`check_replicas`: checks that replicated arrays are equal on all devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.errors import ReplicaError
from fitflax.leaves import is_key, path_name
from fitflax.state import PyTree

__all__ = ["check_replicas"]

# Keeps the message short.
_MAX_LISTED = 10


def check_replicas(tree: PyTree, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Checks that the copies of arrays on several devices are equal, or within a tolerance; reads all of them.

    Use it to find the arrays that diverge in a custom step; `fit` keeps the state bit-for-bit identical on all replicas. NaN equals NaN. For a split array,
    the shards that several devices hold are compared. Leaves that are not JAX arrays are ignored.

    Args:
        tree: Arrays, such as `trainer.state`.
        atol: Absolute tolerance; `|a - b| <= atol + rtol * |b|`, where `b` is the copy on the first device. Only for floating-point and complex numbers.
        rtol: Relative tolerance.

    Raises:
        ReplicaError: Copies differ; the message names up to ten arrays with path, shape, device and difference.

    >>> check_replicas({"w": jnp.zeros((2, 3))})
    """
    differences = [difference for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if (difference := _difference(path, leaf, atol, rtol))]
    if differences:
        more = f"; and {len(differences) - _MAX_LISTED} more" if len(differences) > _MAX_LISTED else ""
        raise ReplicaError(f"Replicas that should be equal differ: {'; '.join(differences[:_MAX_LISTED])}{more}.")


def _difference(path: Any, leaf: Any, atol: float, rtol: float) -> str | None:
    """Returns a message about the first copy of an array that differs; `None` if all are equal."""
    if not isinstance(leaf, jax.Array):
        return None
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    firsts: dict[str, Any] = {}
    for shard in leaf.addressable_shards:
        data = jax.device_get(shard.data)
        where = str(shard.index)
        if where not in firsts:
            firsts[where] = shard.device, data
            continue
        device, first = firsts[where]
        is_inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        wide = np.complex128 if np.iscomplexobj(data) else np.float64
        one, other = (part.astype(wide) if is_inexact else part for part in (data, first))
        equal = np.isclose(one, other, rtol=rtol, atol=atol, equal_nan=True) if is_inexact else one == other
        if not equal.all():
            name = path_name(path)
            most = f", by up to {np.nanmax(np.abs(one - other)):.3g}" if is_inexact else ""
            return f"{name or 'the array'} {leaf.dtype}{list(leaf.shape)} on {shard.device} and {device} in {int((~equal).sum())} of {equal.size} numbers{most}"
    return None
