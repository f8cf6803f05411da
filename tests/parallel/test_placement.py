"""Packed copies: equal to the originals for all dtypes and shapes, but without shared memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from fitflax.checkpoints.plain_tree import to_plain
from fitflax.checkpoints.saver import unpack
from fitflax.errors import CheckpointError
from fitflax.parallel.placement import Form, Packed


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
