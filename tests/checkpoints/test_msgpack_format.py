"""The contents of `state.msgpack`: the same bytes that flax would write, and every kind of leaf round-trips."""

import collections
import enum
import math
import shutil

import flax
import flax.core
import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from fitflax.checkpoints import msgpack_format
from fitflax.checkpoints.checkpoint_files import write_checkpoint
from fitflax.checkpoints.plain_tree import to_plain
from fitflax.checkpoints.restore import from_saved, restore_tree
from fitflax.errors import CheckpointError, CorruptCheckpointError
from tests.checkpoints.samples import METADATA, RUN, assert_same, read, train_state


class Color(enum.StrEnum):
    RED = "red"


@flax.struct.dataclass
class Ema:
    """A dataclass that flax knows, with a field that is not part of the tree."""

    params: object
    decay: float = flax.struct.field(pytree_node=False)


def test_the_file_holds_the_bytes_that_flax_would_write(directory):
    train = train_state()
    train_dict = flax.serialization.to_state_dict(train) | {"key": jax.random.key_data(train.key)}
    run_dict = RUN | {"key": jax.random.key_data(RUN["key"]), "sums": [*RUN["sums"][:2], [1, 2]]}
    assert (directory / "state.msgpack").read_bytes() == flax.serialization.msgpack_serialize({"train": train_dict, "run": run_dict}, in_place=True)


def test_flax_restores_the_train_state_from_the_file(directory):
    restored = flax.serialization.msgpack_restore((directory / "state.msgpack").read_bytes())
    train = flax.serialization.from_state_dict(train_state(), restored["train"])
    assert_same(train.opt_state, train_state().opt_state)
    assert_same(train.params, train_state().params)


@pytest.mark.parametrize("shape", [(), (5,), (3, 7)])
def test_large_arrays_are_written_in_chunks_as_flax_does(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(msgpack_format, "CHUNK_BYTES", 16)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 16)
    train = {"w": np.arange(math.prod(shape), dtype=np.int64).reshape(shape), "v": np.ones(40, jnp.bfloat16)}
    write_checkpoint(tmp_path, train=train, run=[train["w"]], metadata={})
    data = (tmp_path / "state.msgpack").read_bytes()
    assert_same(flax.serialization.msgpack_restore(data)["train"], train)
    assert_same(read(tmp_path)[0], {"train": train, "run": [train["w"]]})
    write_checkpoint(tmp_path, train=train, run=None, metadata={})
    assert (tmp_path / "state.msgpack").read_bytes() == flax.serialization.msgpack_serialize({"train": train, "run": None}, in_place=True)


PARAMS = {"body": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2, jnp.bfloat16)}, "head": flax.core.freeze({"kernel": jnp.ones((2, 1))})}
ADAM = optax.adam(1e-3)
OPTIMIZERS = {
    "adamw with a mask": optax.adamw(1e-3, mask={"body": {"kernel": True, "bias": False}, "head": flax.core.freeze({"kernel": True})}),
    "multi_transform": optax.multi_transform({"a": ADAM, "b": optax.sgd(0.1, momentum=0.9), "frozen": optax.set_to_zero()}, {"body": "a", "head": "frozen"}),
    "MultiSteps": optax.MultiSteps(ADAM, 4),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1.0, 0.0, 10)),
    "chain": optax.chain(optax.clip(1.0), optax.masked(ADAM, {"body": True, "head": False}), optax.add_noise(0.1, 0.5, key=3), optax.ema(0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optax_states_are_written_as_flax_writes_them_and_restored_into_their_types(tmp_path, name):
    state = jax.tree.map(lambda leaf: leaf + 1 if isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 else leaf, OPTIMIZERS[name].init(PARAMS))
    plain = jax.tree.map(lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf, state)
    write_checkpoint(tmp_path, train=state, run=None, metadata={})
    data = (tmp_path / "state.msgpack").read_bytes()
    assert data == flax.serialization.msgpack_serialize({"train": flax.serialization.to_state_dict(plain), "run": None}, in_place=True)
    assert_same(flax.serialization.from_state_dict(plain, flax.serialization.msgpack_restore(data)["train"]), plain)
    found, metadata = read(tmp_path)
    assert_same(restore_tree(jax.eval_shape(lambda: state), found["train"], where="c", root="train", key_impls=metadata["key_impls"]), state)


def test_frozen_dicts_and_dataclasses_are_written_as_flax_writes_them(tmp_path):
    train = {"frozen": flax.core.freeze({"a": {"b": jnp.ones(1)}}), "ema": Ema(params=PARAMS, decay=0.9), "none": None, "empty": {}, "tuple": (1, ())}
    write_checkpoint(tmp_path, train=train, run=None, metadata={})
    data = (tmp_path / "state.msgpack").read_bytes()
    assert data == flax.serialization.msgpack_serialize({"train": flax.serialization.to_state_dict(train), "run": None}, in_place=True)
    assert_same(restore_tree(train, read(tmp_path)[0]["train"], where="c", root="train", key_impls={}), train)


# All numeric dtypes of JAX and NumPy; flax looks them up by name. Not long doubles: they have unused bytes, which differ from copy to copy.
DTYPES = sorted({np.dtype(kind) for kind in (*np.typecodes["AllInteger"], *"efdFD?")}, key=str)
DTYPES += [np.dtype(kind) for kind in vars(ml_dtypes).values() if isinstance(kind, type) and issubclass(kind, np.generic)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_every_dtype_round_trips_bit_for_bit_here_and_in_flax(tmp_path, dtype):
    arrays = {str(shape): (np.arange(math.prod(shape)) % 2).reshape(shape).astype(dtype) for shape in ((), (0,), (2, 0, 3), (2, 3))}
    train = arrays | {"scalar": dtype.type(1)}
    write_checkpoint(tmp_path, train=train, run=None, metadata={})
    assert_same(read(tmp_path)[0]["train"], train)
    assert_same(flax.serialization.msgpack_restore((tmp_path / "state.msgpack").read_bytes())["train"], train)


NARROW = ["bfloat16", "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int2", "int4", "uint2", "uint4"]


def test_jax_arrays_of_narrow_dtypes_round_trip_bit_for_bit_here_and_in_flax(tmp_path):
    train = {name: jnp.asarray(np.array([1, 0, 1, 1, 0]).astype(getattr(ml_dtypes, name))) for name in NARROW}
    write_checkpoint(tmp_path, train=train, run=None, metadata={})
    assert_same(read(tmp_path)[0]["train"], jax.tree.map(np.asarray, train))
    # A byte for each value, as in NumPy, although a device packs them.
    assert_same(flax.serialization.msgpack_restore((tmp_path / "state.msgpack").read_bytes())["train"], jax.tree.map(np.asarray, train))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys_of_every_implementation_round_trip(tmp_path, impl):
    key = jax.random.key(5, impl=impl)
    train = {"key": key, "keys": jax.random.split(key, (2, 3))}
    write_checkpoint(tmp_path, train=train, run={"key": key}, metadata={})
    found, metadata = read(tmp_path)
    assert metadata["key_impls"] == {"train/key": impl, "train/keys": impl, "run/key": impl}
    target = jax.eval_shape(lambda: train)
    assert_same(
        restore_tree(target, found["train"], where="c", root="train", key_impls=metadata["key_impls"]), {"key": key, "keys": jax.random.split(key, (2, 3))}
    )
    assert_same(from_saved(found["run"], key_impls=metadata["key_impls"])["key"], key)


@pytest.mark.slow
def test_python_values_of_every_size_round_trip(tmp_path):
    edges = [0, 1, -1, -32, -33, 127, 128, 255, 256, 65535, 65536, 2**31, 2**32, 2**63, 2**64 - 1, -128, -129, -(2**15) - 1, -(2**31) - 1, -(2**63)]
    texts = [kind(length) for length in (0, 31, 32, 255, 256, 65536) for kind in (lambda n: "é" * n, lambda n: b"\xff" * n)]
    run = [*edges, *texts, True, False, None, 0.1, -0.0, math.inf, 5e-324, list(range(16)), list(range(65536)), {str(index): index for index in range(70000)}]
    write_checkpoint(tmp_path, train=None, run=run, metadata={})
    assert_same(read(tmp_path)[0]["run"], run)
    assert_same(flax.serialization.msgpack_restore((tmp_path / "state.msgpack").read_bytes())["run"], run)


def test_nan_payloads_and_negative_zero_keep_their_bits(tmp_path):
    array = np.array([0x7FC00001, 0xFF800001, 0x80000000], np.uint32).view(np.float32)
    write_checkpoint(tmp_path, train={"w": array}, run={"zero": -0.0, "nan": math.nan}, metadata={})
    state, _ = read(tmp_path)
    assert state["train"]["w"].tobytes() == array.tobytes()
    assert math.copysign(1, state["run"]["zero"]) == -1 and math.isnan(state["run"]["nan"])


def test_arrays_of_another_byte_order_or_layout_keep_their_values(tmp_path):
    big, fortran = np.arange(4, dtype=">f4"), np.asfortranarray(np.arange(6).reshape(2, 3))
    write_checkpoint(tmp_path, train={"big": big, "fortran": fortran, "strided": fortran[:, ::2]}, run=None, metadata={})
    saved = read(tmp_path)[0]["train"]
    assert_same(saved, {"big": big.astype("<f4"), "fortran": np.ascontiguousarray(fortran), "strided": fortran[:, ::2].copy()})


def test_subclasses_of_python_types_are_saved_as_those_types(tmp_path):
    run = {"enum": Color.RED, "numpy": np.str_("x"), "bytes": np.bytes_(b"y"), "int": enum.IntEnum("Level", ["LOW"]).LOW, "dict": collections.OrderedDict(a=1)}
    write_checkpoint(tmp_path, train={}, run=run, metadata={})
    saved = read(tmp_path)[0]["run"]
    assert saved == {"enum": "red", "numpy": "x", "bytes": b"y", "int": 1, "dict": {"a": 1}}
    assert [type(value) for value in saved.values()] == [str, str, bytes, int, dict]


def test_keys_with_slashes_do_not_make_paths_collide(tmp_path):
    train = {"a/b": jnp.ones(1), "a": {"b": jnp.zeros(2)}, "a~1b": jnp.zeros(3), "": {"": jnp.zeros(4)}}
    write_checkpoint(tmp_path, train=train, run=None, metadata={})
    state, metadata = read(tmp_path)
    assert list(metadata["arrays"]) == ["train/a~1b", "train/a/b", "train/a~01b", "train//"]
    assert_same(restore_tree(train, state["train"], where="c", root="train", key_impls={}), train)


def test_the_deepest_tree_that_can_be_saved_can_be_read(tmp_path):
    tree: object = 1
    for _ in range(100):
        tree = [tree]
    write_checkpoint(tmp_path, train=None, run=tree, metadata={})
    assert read(tmp_path)[0] == {"train": None, "run": tree}
    with pytest.raises(CheckpointError, match="levels deep"):
        to_plain([tree, [tree]])


def test_only_the_requested_roots_are_returned_and_verified(directory):
    data = bytearray((directory / "state.msgpack").read_bytes())
    position = data.index(np.ones(4, np.float32).tobytes())
    data[position] ^= 1
    (directory / "state.msgpack").write_bytes(data)
    assert set(read(directory, roots=["run"])[0]) == {"run"}
    with pytest.raises(CorruptCheckpointError, match="train/params/Dense_0/bias does not match its checksum"):
        read(directory, roots=["train"])
    with pytest.raises(CheckpointError, match=r"has no root 'other', only \['run', 'train'\]"):
        read(directory, roots=["other", "run"])


@pytest.mark.parametrize(("change", "match"), [(lambda data: data[:-1], "is truncated: "), (lambda data: data + b"x", "is too long: ")])
def test_a_file_of_another_size_is_refused(directory, change, match):
    path = directory / "state.msgpack"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CorruptCheckpointError, match=match):
        read(directory)


def test_the_state_of_another_checkpoint_is_refused(directory, tmp_path):
    other = train_state().replace(key=jax.random.key(4))
    write_checkpoint(tmp_path, train=other, run=RUN, metadata=METADATA)
    shutil.copy(tmp_path / "state.msgpack", directory)
    with pytest.raises(CorruptCheckpointError, match="train/key does not match its checksum"):
        read(directory)
