"""Where arrays are: packed copies, copies of split arrays in host memory, and which shard of a batch a process feeds."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fitflax.checkpoints.plain_tree import to_plain
from fitflax.checkpoints.saver import unpack
from fitflax.errors import CheckpointError, ConfigError
from fitflax.parallel.placement import Form, Packed, _one_for_each_process, copy_to_host_memory, count_processes, part_of


@struct.dataclass
class Pair:
    first: jax.Array
    second: jax.Array


def tree() -> dict:
    rng = np.random.default_rng(0)
    arrays = {str(dtype): jnp.asarray(rng.integers(0, 2, (2, 3)), dtype) for dtype in ("bool", "int4", "uint8", "int32", "float16", "bfloat16", "float8_e5m2")}
    keys = {"key": jax.random.key(1), "keys": jax.random.split(jax.random.key(2, impl="rbg"), 3)}
    others = {"scalar": jnp.float32(2.5), "empty": jnp.zeros((0, 4)), "complex": jnp.array([1 + 2j]), "none": None, "nothing": {}}
    return {"z": Pair(jnp.arange(5.0), jnp.full((2, 1, 2), 7.0)), "list": [jnp.ones(1), (jnp.zeros(2),)], **arrays, **keys, **others}


def test_a_packed_tree_unpacks_to_what_was_packed():
    unpacked = unpack(Packed({"train": tree(), "run": tree()}), lists_in=["run"])
    for root, plain in (("train", unpacked["train"]), ("run", unpacked["run"])):
        expected = to_plain(jax.tree.map(lambda leaf: leaf, tree()), root=root, keep_lists=root == "run")
        assert plain.key_impls == expected.key_impls == {f"{root}/key": "threefry2x32", f"{root}/keys": "rbg"}
        assert jax.tree.structure(plain.tree) == jax.tree.structure(expected.tree)
        for ours, theirs in zip(jax.tree.leaves(plain.tree), jax.tree.leaves(expected.tree), strict=True):
            np.testing.assert_array_equal(ours, np.asarray(theirs), strict=True)


def test_a_packed_copy_does_not_change_with_the_original():
    original = {"alone": jnp.arange(4), "w": jnp.ones(3)}  # A vector of one array must be a copy, too.
    packed = Packed(original)
    originals = {leaf.unsafe_buffer_pointer() for leaf in original.values()}
    assert originals.isdisjoint(vector.unsafe_buffer_pointer() for vector in packed._vectors.values())
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    for _ in range(3):
        original = step(original)
    alone, w = packed.leaves()
    assert alone.tolist() == [0, 1, 2, 3] and w.tolist() == [1, 1, 1]


def test_trees_with_the_same_form_share_the_form_object():
    assert Packed({"w": jnp.ones(2)}).form is Packed({"w": jnp.zeros(2)}).form
    assert Packed({"w": jnp.ones(2)}).form is not Packed({"w": jnp.ones(3)}).form
    assert Packed({"k": jax.random.key(0)}).form is not Packed({"k": jax.random.key(0, impl="rbg")}).form


def test_packing_uses_one_array_per_dtype():
    assert len(jax.tree.leaves(Packed({"a": jnp.ones(2), "b": jnp.ones(()), "c": jnp.arange(3), "d": [jnp.ones((2, 2))]})._vectors)) == 2


def test_larger_leaves_get_a_separate_vector_and_all_leaves_are_unpacked():
    original = {"a": jnp.ones(2), "large": jnp.arange(6.0).reshape(2, 3), "b": jnp.zeros(()), "n": np.arange(3), "key": jax.random.key(3)}
    form = Form.of(original, 3)
    packed = form.pack(original)
    assert sorted(vector.shape for vector in packed.values()) == [(2,), (3,), (3,), (6,)]
    for unpacked in (form.unpack(packed), form.unpack_arrays(packed)):
        assert jax.tree.structure(unpacked) == jax.tree.structure(original)
        for name, leaf in original.items():
            data = (jax.random.key_data(leaf), jax.random.key_data(unpacked[name])) if name == "key" else (leaf, unpacked[name])
            np.testing.assert_array_equal(*data)


def test_a_key_of_an_unregistered_implementation_cannot_be_saved():
    packed = Packed({"train": {"key": jax.random.key(0), "only here": jnp.ones(())}})
    packed.form.leaves[0] = packed.form.leaves[0]._replace(impl=object())
    with pytest.raises(CheckpointError, match="train/key is a random key of an unregistered implementation"):
        unpack(packed)


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


def devices_of(*owners: int) -> list[types.SimpleNamespace]:
    return [types.SimpleNamespace(process_index=owner) for owner in owners]


def test_a_process_feeds_the_rows_of_its_devices():
    assert part_of(devices_of(0, 0)) == (0, 1)
    assert part_of(devices_of(0, 0, 1, 1)) == (0, 2)
    assert part_of(devices_of(1, 2, 0)) == (2, 3)
    for owners in ((0, 1, 0, 1), (0, 0, 1)):
        with pytest.raises(ConfigError, match="must have equal, contiguous parts of a batch"):
            part_of(devices_of(*owners))
    with pytest.raises(ConfigError, match="Process 0 has none of the devices"):
        part_of(devices_of(1, 2))
