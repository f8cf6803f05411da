"""Copies of split arrays in host memory: one of each shard, independent of the original. Several processes: tests/checkpoints/test_save_in_processes.py."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fitflax.errors import ConfigError
from fitflax.parallel.placement import _one_for_each_process, copy_to_host_memory, count_processes


@pytest.mark.parametrize(("spec", "num_parts"), [(("a", "b"), 8), (("b",), 4), ((None, "a"), 2), ((("a", "b"),), 8)])
def test_each_distinct_shard_is_copied_once_into_separate_memory(spec, num_parts, devices):
    mesh = Mesh(np.array(devices(8)).reshape(2, 4), ("a", "b"))
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    array = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))
    (copy,) = copy_to_host_memory([array])
    assert len(copy.addressable_shards) == num_parts and copy.sharding.memory_kind == "pinned_host"
    memory = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
    assert memory.isdisjoint(shard.data.unsafe_buffer_pointer() for shard in copy.addressable_shards)
    array.delete()
    np.testing.assert_array_equal(copy, values)


@pytest.mark.parametrize(
    ("owners", "axis", "kept"),
    [
        ([[0, 0], [0, 0]], 0, [0]),
        ([[0, 0], [1, 1]], 0, [0, 1]),
        ([[0, 0], [1, 1]], 1, [0]),
        ([[0, 1], [0, 1]], 0, [0]),
        ([[0], [0], [1], [1], [2]], 0, [0, 2, 4]),
    ],
)
def test_duplicate_shards_are_omitted_if_each_process_keeps_one(owners, axis, kept):
    devices = np.array([[types.SimpleNamespace(process_index=owner) for owner in row] for row in owners])
    assert _one_for_each_process(devices, axis) == kept


def test_devices_of_only_some_of_the_processes_are_an_error(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(ConfigError, match=r"The devices belong to 2 of 3 processes: \[0, 2\]\. Pass devices of one process, or some of every process\."):
        count_processes([types.SimpleNamespace(process_index=index) for index in (0, 2, 0)])
