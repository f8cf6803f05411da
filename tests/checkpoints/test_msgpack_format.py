import collections
import dataclasses
import enum
import json
import math
import re
import shutil
import typing

import flax
import flax.core
import flax.serialization
import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

from fitflax.checkpoints import codec
from fitflax.checkpoints.msgpack_format import read_metadata, read_state, write_checkpoint
from fitflax.checkpoints.trees import from_saved, restore_tree, to_state_dict
from fitflax.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, RestoreError
from fitflax.state import TrainState


class Pair(typing.NamedTuple):
    left: object
    right: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    x: object


class Color(enum.StrEnum):
    RED = "red"


def train_state():
    params = {"Dense_0": {"kernel": jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4), "bias": jnp.ones(4)}}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    model_state = {"cache": {"on": jnp.array([True, False]), "empty": jnp.zeros((0, 3)), "none": None, "nothing": {}}}
    return TrainState(step=jnp.int32(7), params=params, model_state=model_state, opt_state=optimizer.init(params), key=jax.random.key(3))


RUN = {
    "sums": [np.float32(1.5), np.arange(3), (1, 2)],
    "callbacks": {"EarlyStopping": {"best": -math.inf, "wait": 2, "on": True, "note": "NaN", "none": None, "big": 2**63, "empty": [], "map": {}}},
    "position": b"\x00\xff",
    "key": jax.random.key(5, impl="rbg"),
}
METADATA = {"run_id": "a", "step": 7, "metrics": {"train": {"loss": 0.5}}, "history": [{"epoch": 0, "loss": 0.75}]}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "c").mkdir()
    write_checkpoint(tmp_path / "c", train=train_state(), run=RUN, metadata=METADATA)
    return tmp_path / "c"


def read(directory, **kwargs):
    metadata = read_metadata(directory)
    return read_state(directory, metadata, **kwargs), metadata


def assert_same(left, right):
    """Compares trees leaf by leaf: types, dtypes, shapes and bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        if not hasattr(a, "dtype"):
            assert type(a) is type(b) and (a == b or (a != a and b != b))
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# --- Round trips ---


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
    monkeypatch.setattr(codec, "CHUNK_BYTES", 16)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 16)
    train = {"w": np.arange(math.prod(shape), dtype=np.int64).reshape(shape), "v": np.ones(40, jnp.bfloat16)}
    write_checkpoint(tmp_path, train=train, run=[train["w"]], metadata={})
    data = (tmp_path / "state.msgpack").read_bytes()
    assert_same(flax.serialization.msgpack_restore(data)["train"], train)
    assert_same(read(tmp_path)[0], {"train": train, "run": [train["w"]]})
    write_checkpoint(tmp_path, train=train, run=None, metadata={})
    assert (tmp_path / "state.msgpack").read_bytes() == flax.serialization.msgpack_serialize({"train": train, "run": None}, in_place=True)


def test_a_train_state_comes_back_bit_by_bit(directory):
    state, metadata = read(directory)
    target = jax.eval_shape(train_state)
    restored = restore_tree(target, state["train"], where="c", root="train", key_impls=metadata["key_impls"])
    assert_same(restored, train_state())
    assert isinstance(restored.params["Dense_0"]["kernel"], np.ndarray)


def test_run_state_comes_back_as_plain_python_with_lists_for_tuples(directory):
    state, metadata = read(directory)
    restored = from_saved(state["run"], key_impls=metadata["key_impls"])
    assert_same(restored, RUN | {"sums": [*RUN["sums"][:2], [1, 2]]})
    assert type(restored["sums"][0]) is np.float32
    restored["sums"][1][0] = 9  # Arrays are writable.


def test_key_data_stays_an_array_until_its_implementation_is_given(directory):
    state, metadata = read(directory)
    assert metadata["key_impls"] == {"train/key": "threefry2x32", "run/key": "rbg"}
    assert from_saved(state["run"])["key"].dtype == np.uint32


DTYPES = [bool, np.int8, np.uint64, np.float16, np.float64, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4, ml_dtypes.uint4]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_by_bit(tmp_path, dtype, shape):
    array = (np.arange(math.prod(shape)) % 2).reshape(shape).astype(dtype)
    write_checkpoint(tmp_path, train={"w": array, "scalar": array.dtype.type(1)}, run=None, metadata={})
    saved = read(tmp_path)[0]["train"]
    assert_same(saved, {"w": array, "scalar": array.dtype.type(1)})
    assert flax.serialization.msgpack_restore((tmp_path / "state.msgpack").read_bytes())["train"]["w"].dtype == dtype


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


def test_only_the_roots_asked_for_are_returned_and_verified(directory):
    data = bytearray((directory / "state.msgpack").read_bytes())
    position = data.index(np.ones(4, np.float32).tobytes())
    data[position] ^= 1
    (directory / "state.msgpack").write_bytes(data)
    assert set(read(directory, roots=["run"])[0]) == {"run"}
    with pytest.raises(CorruptCheckpointError, match="train/params/Dense_0/bias has another checksum"):
        read(directory, roots=["train"])
    with pytest.raises(CheckpointError, match=r"has no root 'other', only \['run', 'train'\]"):
        read(directory, roots=["other", "run"])


def test_restoring_reads_no_values_of_the_target_and_keeps_its_types(tmp_path):
    tree = {
        "ordered": collections.OrderedDict(b=jnp.ones(1), a=jnp.zeros(1)),
        "frozen": flax.core.FrozenDict(a=jnp.ones(2)),
        "tuple": (jnp.ones(1), [jnp.int32(1)], ()),
        "pair": Pair(jnp.ones(1), None),
        "masked": optax.MaskedNode(),
        "box": flax.core.meta.Partitioned(jnp.ones(2), names=("x",)),
        "point": Point(jnp.ones(3)),
        "python": {"float": 0.5, "int": 3, "bool": True, "str": "x"},
        "scalar": np.float32(2),
        "numbers": {1: jnp.ones(1), 10: jnp.zeros(1)},
    }
    write_checkpoint(tmp_path, train=tree, run=None, metadata={})
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else type(x)(), tree)
    restored = restore_tree(target, read(tmp_path)[0]["train"], where="c", root="train", key_impls={})
    assert_same(restored, tree)
    assert type(restored["scalar"]) is np.float32


def test_dataclasses_that_only_jax_knows_are_saved_and_restored(tmp_path):
    write_checkpoint(tmp_path, train={"point": Point([jnp.zeros(1)])}, run=None, metadata={})
    saved = read(tmp_path)[0]["train"]
    assert_same(saved, {"point": {"x": {"0": np.zeros(1, np.float32)}}})
    assert restore_tree({"point": Point([jnp.ones(1)])}, saved, where="c", root="train", key_impls={})["point"].x[0] == 0


def test_a_subtree_is_restored_by_its_own_root(directory):
    state, metadata = read(directory)
    key = restore_tree(jax.random.key(0), state["train"]["key"], where="c", root="train/key", key_impls=metadata["key_impls"])
    assert_same(key, jax.random.key(3))


def test_lists_saved_in_run_fit_a_target_with_tuples(directory):
    state, _ = read(directory)
    restored = restore_tree((np.float32(0), np.zeros(3, int), (0, 0)), state["run"]["sums"], where="c", root="run/sums", key_impls={})
    assert_same(restored, (np.float32(1.5), np.arange(3), (1, 2)))


# --- What cannot be saved ---


def test_keys_with_slashes_do_not_make_paths_collide(tmp_path):
    train = {"a/b": jnp.ones(1), "a": {"b": jnp.zeros(2)}, "a~1b": jnp.zeros(3), "": {"": jnp.zeros(4)}}
    write_checkpoint(tmp_path, train=train, run=None, metadata={})
    state, metadata = read(tmp_path)
    assert list(metadata["arrays"]) == ["train/a~1b", "train/a/b", "train/a~01b", "train//"]
    assert_same(restore_tree(train, state["train"], where="c", root="train", key_impls={}), train)


def test_leaves_that_cannot_be_saved_are_all_named():
    tree = {"big": 2**64, "small": -(2**63) - 1, "text": np.array(["x"]), "object": object(), "bad": "\ud800", "complex": 1j, "ok": 2**64 - 1}
    message = (
        "Cannot be saved in a checkpoint: run/big is the integer 18446744073709551616, which needs more than 64 bits; save it as a string; "
        "run/small is the integer -9223372036854775809, which needs more than 64 bits; save it as a string; "
        "run/text has dtype <U1, only numbers and booleans can be saved; "
        "run/object is a object; only arrays, numbers, strings, bytes and None can be saved; run/bad is '\\ud800', which is not valid Unicode; "
        "run/complex is a complex; only arrays, numbers, strings, bytes and None can be saved."
    )
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        to_state_dict(tree, root="run")


def test_deleted_arrays_are_named():
    array = jnp.ones(2)
    array.delete()
    with pytest.raises(CheckpointError, match="params/w has been deleted"):
        to_state_dict({"params": {"w": array}})


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"a": {1: 0, "1": 0}}, r"two keys of a are the same string: \['1', '1'\]"),
        ({"a": {"__msgpack_chunked_array__": {}}}, "a has the key '__msgpack_chunked_array__'"),
    ],
)
def test_dicts_that_cannot_be_saved_are_refused(tree, match):
    with pytest.raises(CheckpointError, match=match):
        to_state_dict(tree)


def test_a_tree_that_holds_itself_is_an_error():
    tree: list = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="more than 100 levels deep"):
        to_state_dict(tree)


def test_the_deepest_tree_that_can_be_saved_can_be_read(tmp_path):
    tree: object = 1
    for _ in range(100):
        tree = [tree]
    write_checkpoint(tmp_path, train=None, run=tree, metadata={})
    assert read(tmp_path)[0] == {"train": None, "run": tree}
    with pytest.raises(CheckpointError, match="levels deep"):
        to_state_dict([tree, [tree]])


def test_nothing_is_written_when_something_cannot_be_saved(tmp_path):
    with pytest.raises(CheckpointError):
        write_checkpoint(tmp_path, train={}, run={"x": object()}, metadata={})
    with pytest.raises(CheckpointError, match=r"metadata\['a'\]\[1\] is a object, which JSON cannot hold"):
        write_checkpoint(tmp_path, train={}, run={}, metadata={"a": [1, object()]})
    with pytest.raises(CheckpointError, match="metadata must leave arrays, crc32 to the checkpoint format"):
        write_checkpoint(tmp_path, train={}, run={}, metadata={"crc32": 1, "arrays": {}})
    assert list(tmp_path.iterdir()) == []


# --- metadata.json ---


def test_metadata_begins_with_the_version_and_ends_with_its_checksum(directory):
    keys = list(json.loads((directory / "metadata.json").read_text()))
    assert keys == ["format_version", *METADATA, "versions", "arrays", "key_impls", "structure_crc32", "state_bytes", "crc32"]
    metadata = read_metadata(directory)
    assert {key: metadata[key] for key in METADATA} == METADATA
    assert metadata["versions"]["jax"] == jax.__version__ and list(metadata["versions"]) == ["fitflax", "jax", "flax", "optax", "numpy"]
    assert metadata["arrays"]["train/params/Dense_0/kernel"] | {"crc32": 0} == {"shape": [3, 4], "dtype": "bfloat16", "crc32": 0}


def test_metadata_has_a_line_for_each_metric_group_history_row_and_array(directory):
    lines = (directory / "metadata.json").read_text().splitlines()
    assert '    "train": {"loss": 0.5}' in lines
    assert '    {"epoch": 0, "loss": 0.75}' in lines
    assert sum('"dtype"' in line for line in lines) == len(read_metadata(directory)["arrays"])


def test_a_version_given_by_the_caller_is_kept(tmp_path):
    write_checkpoint(tmp_path, train={}, run={}, metadata={"versions": {"fitflax": "1.2", "grain": "0.2"}})
    versions = read_metadata(tmp_path)["versions"]
    assert (versions["fitflax"], versions["grain"], versions["numpy"]) == ("1.2", "0.2", np.__version__)


def test_numbers_that_are_not_finite_are_strings_on_disk_and_strings_that_look_like_them_stay_strings(tmp_path):
    metadata = {
        "metrics": {"train": {"a": math.nan, "b": math.inf, "c": -math.inf}},
        "settings": {"note": "NaN", "notes": ["~NaN", "~~-Infinity", "Infinity", "nan", "~", ""], "clip": math.inf},
    }
    write_checkpoint(tmp_path, train={}, run={}, metadata=metadata)
    on_disk = json.loads((tmp_path / "metadata.json").read_text(), parse_constant=pytest.fail)
    assert on_disk["metrics"] == {"train": {"a": "NaN", "b": "Infinity", "c": "-Infinity"}}
    assert repr({key: read_metadata(tmp_path)[key] for key in metadata}) == repr(metadata)


def test_numpy_scalars_and_tuples_are_accepted_in_metadata(tmp_path):
    metadata = {
        "a": np.float32(0.5),
        "b": np.int64(3),
        "c": np.bool_(True),
        "d": np.array(2.0),
        "e": (1, jnp.float32(math.nan)),
        "f": ml_dtypes.bfloat16(1),
        5: 1,
    }
    write_checkpoint(tmp_path, train={}, run={}, metadata=metadata)
    found = read_metadata(tmp_path)
    assert repr([found[key] for key in "abcdef5"]) == "[0.5, 3, True, 2.0, [1, nan], 1.0, 1]"


# --- Damage ---


@pytest.mark.parametrize("name", ["metadata.json", "state.msgpack"])
def test_missing_and_empty_files_are_named(directory, name):
    (directory / name).write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=f"{name} is empty"):
        read(directory)
    (directory / name).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{name} is missing"):
        read(directory)


def test_a_directory_that_does_not_exist_is_not_found(directory):
    with pytest.raises(CheckpointNotFoundError, match=r"There is no checkpoint directory .*nowhere"):
        read_metadata(directory / "nowhere")
    with pytest.raises(CheckpointNotFoundError, match="it is a file"):
        read_metadata(directory / "metadata.json")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda text: text[:-9], "is not JSON"),
        (lambda text: "[" * 100000, "is not JSON"),
        (lambda text: "[1]", "it has no format_version"),
        (lambda text: text.replace('"step": 7', '"step": 8'), "its checksum differs"),
        (lambda text: text.replace("  ", "\t", 1), "its checksum differs"),
        (lambda text: text.replace("0.5", "NaN"), "Out of range float|its checksum differs"),
        (lambda text: text.replace("0.5", "1e999"), "damaged"),
        (lambda text: text.replace("0.5", "é"), "is not JSON"),
    ],
)
def test_changed_metadata_is_refused(directory, change, match):
    path = directory / "metadata.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(CorruptCheckpointError, match=match):
        read_metadata(directory)


def test_a_newer_format_says_which_version_can_be_read(directory):
    path = directory / "metadata.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(CheckpointError, match="has format version 2, but this fitflax reads version 1") as caught:
        read_metadata(directory)
    assert not isinstance(caught.value, CorruptCheckpointError)


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
    with pytest.raises(CorruptCheckpointError, match="train/key has another checksum"):
        read(directory)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small checkpoint with every kind of leaf, its two files, and a directory to break it in."""
    path = tmp_path_factory.mktemp("small")
    train = {"kernel": np.arange(300, dtype=np.uint8), "shape": np.zeros((2, 300, 0)), "step": np.int32(1), "none": None, "key": jax.random.key(1)}
    run = {"list": [1, -1, 300, -300, 70000, 2**40, 1.5, True, None, "text", "x" * 300, b"b", {}], "scalar": np.float32(1)}
    write_checkpoint(path, train=train, run=run, metadata={"run_id": "a", "metrics": {"train": {"loss": math.nan}}})
    return path, {name: (path / name).read_bytes() for name in ("state.msgpack", "metadata.json")}


def check_damage_is_detected(small, name, data):
    path, files = small
    (path / name).write_bytes(data)
    try:
        with pytest.raises(CheckpointError, match=re.escape(str(path / name))):
            read(path)
    finally:
        (path / name).write_bytes(files[name])


@hypothesis.settings(max_examples=400)
@hypothesis.given(name=st.sampled_from(["state.msgpack", "metadata.json"]), where=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_any_changed_byte_is_detected(small, name, where, mask):
    data = bytearray(small[1][name])
    data[int(where * len(data))] ^= mask
    check_damage_is_detected(small, name, bytes(data))


@hypothesis.settings(max_examples=60)
@hypothesis.given(name=st.sampled_from(["state.msgpack", "metadata.json"]), where=st.floats(0, 1, exclude_max=True))
def test_any_tail_cut_off_is_detected(small, name, where):
    check_damage_is_detected(small, name, small[1][name][: int(where * len(small[1][name]))])


@hypothesis.settings(max_examples=100)
@hypothesis.given(name=st.sampled_from(["state.msgpack", "metadata.json"]), garbage=st.binary(max_size=40), where=st.floats(0, 1))
def test_garbage_of_the_right_length_is_detected(small, name, garbage, where):
    data = small[1][name]
    start = int(where * (len(data) - len(garbage)))
    changed = data[:start] + garbage + data[start + len(garbage) :]
    hypothesis.assume(changed != data)
    check_damage_is_detected(small, name, changed)


@pytest.mark.parametrize(
    "head", [b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01"]
)
def test_absurd_lengths_are_damage_and_not_memory_errors(small, head):
    data = small[1]["state.msgpack"]
    check_damage_is_detected(small, "state.msgpack", head + data[len(head) :])
    check_damage_is_detected(small, "state.msgpack", b"\x81\xa5train" + head + data[7 + len(head) :])


def test_bottomless_nesting_is_damage_and_not_a_recursion_error(small):
    check_damage_is_detected(small, "state.msgpack", b"\x91" * len(small[1]["state.msgpack"]))


# --- Restoring into another model ---


def fault(target, saved, **kwargs):
    with pytest.raises(RestoreError) as caught:
        restore_tree(target, saved, **({"where": "runs/a/step_00002000", "root": "train", "key_impls": {}} | kwargs))
    return str(caught.value)


def test_one_error_lists_all_that_differs():
    saved = {
        "params": {"Dense_0": {"kernel": np.ones((784, 64), np.float32), "bias": np.ones(2, np.float32)}, "head": {"kernel": np.ones(1), "bias": np.ones(1)}}
    }
    dense = {"kernel": jax.ShapeDtypeStruct((784, 128), jnp.float32), "bias": jax.ShapeDtypeStruct((2,), jnp.bfloat16)}
    target = {"params": {"Dense_0": dense, "Dense_1": {"bias": jnp.ones(2), "a": 1}}}
    assert fault(target, saved) == (
        "runs/a/step_00002000 does not fit this model: missing params/Dense_1/a, params/Dense_1/bias; unexpected params/head/bias, params/head/kernel; "
        "params/Dense_0/bias is float32 on disk but bfloat16 here; params/Dense_0/kernel is (784, 64) on disk but (784, 128) here."
    )


@pytest.mark.parametrize(
    ("target", "saved", "message"),
    [
        ({"ema": None}, {"ema": {"w": np.ones(1)}}, "unexpected ema/w"),
        ({"ema": {"w": np.ones(1)}}, {"ema": None}, "missing ema/w"),
        ({"w": np.ones(1, np.float32)}, {"w": np.ones(2)}, "w is float64 (2,) on disk but float32 (1,) here"),
        ({"w": np.int32(1)}, {"w": 1}, "w is int on disk but int32 () here"),
        ({"w": 1.0}, {"w": 1}, "w is int on disk but float here"),
        (np.ones(1), np.ones(2), "train is (2,) on disk but (1,) here"),
        ((1, 2), {"0": 1}, "missing 1"),
        ({"key": jax.random.key(0)}, {"key": np.zeros(2, np.uint32)}, "key is uint32 (2,) on disk but key<fry> () here"),
    ],
)
def test_differences_are_worded_by_what_is_on_disk_and_here(target, saved, message):
    assert fault(target, saved) == f"runs/a/step_00002000 does not fit this model: {message}."


def test_keys_of_another_implementation_do_not_fit():
    saved = {"key": np.zeros(4, np.uint32)}
    message = fault({"key": jax.random.key(0)}, saved, key_impls={"train/key": "rbg"})
    assert message.endswith("model: key is key<rbg> on disk but key<fry> here.")
    assert "key is a key that this JAX cannot make" in fault({"key": jax.random.key(0)}, saved, key_impls={"train/key": "unknown"})
    with pytest.raises(RestoreError, match="run/key is a key that this JAX cannot make"):
        from_saved(saved, key_impls={"run/key": "unknown"})


@pytest.mark.parametrize(("target", "saved"), [({"a": None}, {"a": {}}), ({"a": {}}, {"a": None}), ({"a": optax.EmptyState()}, {}), ({}, {"a": None})])
def test_none_and_empty_containers_fit_each_other(target, saved):
    restored = restore_tree(target, saved, where="c", root="train", key_impls={})
    assert jax.tree.structure(restored) == jax.tree.structure(target)
