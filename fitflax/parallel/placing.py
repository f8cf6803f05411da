"""Arrays of the host on devices, also where some of these are other processes'; and what part of a batch a process feeds."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from fitflax.errors import ConfigError
from fitflax.leaves import is_key
from fitflax.state import PyTree

__all__ = ["check_devices", "copy_here", "count_processes", "own_copy", "part_of", "put"]


def check_devices(owner: str, devices: Any) -> list[Any]:
    """Returns devices as a list.

    Raises:
        ConfigError: They are none, or none at all, or some come twice.
    """
    used = list(devices) if isinstance(devices, Iterable) and not isinstance(devices, str | Mapping) else []
    if not used or len(set(used)) != len(used) or not all(isinstance(device, jax.Device) for device in used):
        raise ConfigError(f"{owner} takes a list of at least one device, each only once, such as jax.devices()[:4]. Received: devices={devices!r}.")
    return used


def count_processes(devices: Iterable[Any]) -> int:
    """Returns how many processes some devices belong to.

    Raises:
        ConfigError: Neither to one nor to all.

    >>> count_processes(jax.devices())
    1
    """
    owners = {device.process_index for device in devices}
    if 1 < len(owners) < jax.process_count():
        raise ConfigError(f"The devices are those of the processes {sorted(owners)} of {jax.process_count()}. Give those of one process, or some of each.")
    return len(owners)


def own_copy(leaf: Any) -> Any:
    """Returns a copy of a leaf on the host, without weak types; typed keys stay such."""
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.array(np.array(jax.random.key_data(leaf))), impl=jax.random.key_impl(leaf))
    return np.array(leaf)


def put(leaf: Any, place: NamedSharding) -> Any:
    """Returns an array of the host, or a key, in its place, in memory of its own; each device gets no more than the part that it keeps."""
    if is_key(leaf):
        data = put(np.asarray(jax.random.key_data(leaf)), NamedSharding(place.mesh, place.spec))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host: np.ndarray[Any, Any] = np.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(host.dtype)
    # The copies are private: the memory of an array of the host would be shared where it can be.
    return jax.make_array_from_callback(host.shape, place, lambda index: np.array(host[index], dtype))


def copy_here(tree: PyTree) -> PyTree:
    """Returns a copy of arrays in the same places, for which each process copies its own parts.

    A compiled copy would be a call of all devices, which all processes must make; this one may be made by one alone.

    >>> copy_here({"w": jnp.zeros(2)})
    {'w': Array([0., 0.], dtype=float32)}
    """
    leaves, treedef = jax.tree.flatten(tree)
    plain = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves]
    by_device: dict[Any, list[Any]] = {}
    for leaf in plain:
        for shard in leaf.addressable_shards:
            by_device.setdefault(shard.device, []).append(shard.data)
    copies = {device: iter(_copy(parts)) for device, parts in by_device.items()}
    copied = []
    for leaf, original in zip(plain, leaves, strict=True):
        parts = [next(copies[shard.device]) for shard in leaf.addressable_shards]
        copy = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
        copied.append(jax.random.wrap_key_data(copy, impl=jax.random.key_impl(original)) if is_key(original) else copy)
    return jax.tree.unflatten(treedef, copied)


_copy = jax.jit(lambda parts: [jnp.copy(part) for part in parts])


def part_of(devices: Iterable[Any], split: NamedSharding | None = None, num_shards: int = 0) -> tuple[int, int]:
    """Returns which of how many parts of a batch this process feeds, `(index, count)`.

    Args:
        devices: Those that a batch is split over, all alike, in the order of its rows.
        split: Where rows lie, if not one share on each device.
        num_shards: Into how many pieces they are split then.

    Raises:
        ConfigError: This process has none of the devices, or the processes' rows overlap in part.

    >>> part_of(jax.devices())
    (0, 1)
    """
    used = list(devices)
    owners = {device.process_index for device in used}
    if len(owners) == 1:
        return 0, 1
    if jax.process_index() not in owners:
        raise ConfigError(f"Process {jax.process_index()} has none of the devices. Every process of the program must have some: parallel={used}.")
    rows: dict[int, set[int]] = {}
    if split is None:
        for row, device in enumerate(used):
            rows.setdefault(device.process_index, set()).add(row)
    else:
        places: Any = split.devices_indices_map((num_shards,))
        for device, (where, *_) in places.items():
            rows.setdefault(device.process_index, set()).update(range(*where.indices(num_shards)))
    parts = sorted({tuple(sorted(own)) for own in rows.values()})
    lengths, covered = {len(part) for part in parts}, [row for part in parts for row in part]
    if len(lengths) > 1 or covered != list(range(len(covered))):
        raise ConfigError(
            "The processes' shares of a batch must be equal and lie one behind the other: give each process as many devices, and the batch the first axis of "
            f"the mesh. Received devices whose rows are, by process, { {process: sorted(own) for process, own in sorted(rows.items())} }."
        )
    return parts.index(tuple(sorted(rows[jax.process_index()]))), len(parts)
