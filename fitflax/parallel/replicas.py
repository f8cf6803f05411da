"""`check_replicas`: whether what should be the same on several devices is the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.errors import ReplicaError
from fitflax.leaves import is_key, path_name
from fitflax.state import PyTree

__all__ = ["check_replicas"]

# More of them would bury the rest of a message.
_MOST_FAULTS = 10


def check_replicas(tree: PyTree, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Checks that the copies of arrays on several devices are equal, or as near as said; reads all of them.

    For finding out which array a user's own step lets diverge: the state of a run is equal on all replicas, to the bit. NaN equals NaN. Of an array that is
    split, the parts that several devices hold are compared. Leaves that are no JAX arrays have no replicas.

    Args:
        tree: Arrays, such as `trainer.state`.
        atol: Absolute tolerance; `|a - b| <= atol + rtol * |b|`, where `b` is the copy on the first device. For floating-point and complex numbers only.
        rtol: Relative tolerance.

    Raises:
        ReplicaError: Copies differ; up to ten arrays are named with path, shape, device and by how much.

    >>> check_replicas({"w": jnp.zeros((2, 3))})
    """
    faults = [fault for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if (fault := _fault(path, leaf, atol, rtol))]
    if faults:
        more = f"; and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
        raise ReplicaError(f"Replicas that should be equal differ: {'; '.join(faults[:_MOST_FAULTS])}{more}.")


def _fault(path: Any, leaf: Any, atol: float, rtol: float) -> str | None:
    """Returns, in words, which copy of an array is the first that differs."""
    if not isinstance(leaf, jax.Array):
        return None
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    firsts: dict[str, Any] = {}
    for shard in leaf.addressable_shards:
        data = np.asarray(shard.data)
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
            return (
                f"{name or 'the array'} {leaf.dtype}{list(leaf.shape)} on {shard.device} in {int((~equal).sum())} of {equal.size} numbers{most} (from {device})"
            )
    return None
