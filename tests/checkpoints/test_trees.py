"""From pytrees to what a checkpoint holds, to host memory, and back into a target."""

import collections
import dataclasses
import re
import typing

import flax
import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fitflax.checkpoints import trees
from fitflax.checkpoints.contents import write_checkpoint
from fitflax.checkpoints.trees import Plain, fetch, from_saved, host_copy, only_split, restore_tree, to_plain
from fitflax.errors import CheckpointError, RestoreError
from tests.checkpoints.samples import RUN, assert_same, read, train_state


class Pair(typing.NamedTuple):
    left: object
    right: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    x: object


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "c").mkdir()
    write_checkpoint(tmp_path / "c", train=train_state(), run=RUN, metadata={})
    return tmp_path / "c"


# --- What can be saved, and as what ---


def test_a_plain_tree_holds_the_arrays_themselves_and_the_implementations_of_keys():
    w, b = jnp.ones(2), np.zeros(3)
    plain = to_plain({"layers": [w, b], "pair": Pair(1, None), "key": jax.random.key(3, impl="rbg"), "keys": jax.random.split(jax.random.key(0))}, root="train")
    assert list(plain.tree["layers"]) == ["0", "1"] and plain.tree["layers"]["0"] is w and np.shares_memory(plain.tree["layers"]["1"], b)
    assert plain.tree["pair"] == {"left": 1, "right": None}
    assert plain.key_impls == {"train/key": "rbg", "train/keys": "threefry2x32"}
    assert (plain.tree["key"].shape, plain.tree["keys"].shape) == ((4,), (2, 2))


def test_lists_are_kept_where_there_will_be_no_target():
    assert to_plain([1, (2, [])], keep_lists=True) == Plain([1, [2, []]], {})


def test_a_plain_tree_comes_back_as_it_is():
    plain = to_plain({"key": jax.random.key(0)}, root="run")
    assert to_plain(plain, root="elsewhere") is plain


def test_subclasses_of_numpy_arrays_become_arrays(tmp_path):
    (tmp_path / "x").write_bytes(np.arange(3.0).tobytes())
    tree = {"map": np.memmap(tmp_path / "x", dtype=float, mode="r"), "record": np.arange(2.0).view(np.recarray)}
    assert [type(leaf) for leaf in to_plain(tree).tree.values()] == [np.ndarray, np.ndarray]


def test_text_of_any_language_can_be_saved():
    assert to_plain({"name": "Zürich 東京"}).tree == {"name": "Zürich 東京"}


@pytest.mark.parametrize("leaf", ["\udfff", np.zeros(2, "V0"), np.zeros(2, "V3"), np.zeros(2, "M8[s]")], ids=repr)
def test_text_without_an_encoding_and_arrays_of_nothing_records_and_dates_cannot_be_saved(leaf):
    with pytest.raises(CheckpointError, match=r"Cannot be saved in a checkpoint: leaf (is|has dtype)"):
        to_plain({"leaf": leaf})


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
        to_plain(tree, root="run")


def test_deleted_arrays_are_named():
    array = jnp.ones(2)
    array.delete()
    with pytest.raises(CheckpointError, match="params/w has been deleted"):
        to_plain({"params": {"w": array}})


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"a": {1: 0, "1": 0}}, r"two keys of a are the same string: \['1', '1'\]"),
        ({"a": {"__msgpack_chunked_array__": {}}}, "a has the key '__msgpack_chunked_array__'"),
    ],
)
def test_dicts_that_cannot_be_saved_are_refused(tree, match):
    with pytest.raises(CheckpointError, match=match):
        to_plain(tree)


def test_a_tree_that_holds_itself_is_an_error():
    tree: list = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="more than 100 levels deep"):
        to_plain(tree)


# --- To the host ---


def everywhere(tree):
    """Puts arrays on all eight devices: `w` in parts, `half` in two parts with four copies each, the rest whole on each."""
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    specs = {"w": jax.P("a", "b"), "half": jax.P("a")}
    return {name: jax.device_put(leaf, jax.NamedSharding(mesh, specs.get(name, jax.P()))) for name, leaf in tree.items()}


TREE = {
    "w": np.arange(24.0).reshape(4, 6)[:, :4].astype(np.float32),
    "half": np.arange(6, dtype=np.int32).reshape(2, 3),
    "step": np.int32(3),
    "e": np.zeros((0, 2)),
}


@pytest.mark.parametrize("place", [everywhere, lambda tree: jax.tree.map(jnp.asarray, tree)], ids=["eight devices", "one device"])
def test_a_host_copy_has_the_values_of_jax_arrays_in_memory_of_its_own(place):
    arrays = place(TREE) | {"int4": jnp.arange(5, dtype=jnp.int4), "bfloat16": jnp.ones((), jnp.bfloat16)}
    copy = host_copy(to_plain(arrays)).tree
    for name, array in arrays.items():
        if not array.is_fully_replicated:  # Stays split, in the memory of the host.
            assert copy[name].sharding.memory_kind == "pinned_host" and copy[name].addressable_shards[0].data.shape == array.addressable_shards[0].data.shape
            np.testing.assert_array_equal(copy[name], array)
            continue
        is_own = copy[name].flags.writeable or not array.size
        assert type(copy[name]) is np.ndarray and is_own and copy[name].dtype == array.dtype
        assert np.array_equal(copy[name], np.asarray(array)) and not np.shares_memory(copy[name], np.asarray(array))


def test_donating_the_arrays_does_not_change_their_host_copy():
    state = jnp.arange(100_000.0)
    copy = host_copy(to_plain({"w": state})).tree["w"]
    jax.jit(lambda x: x + 1, donate_argnums=0)(state).block_until_ready()
    assert state.is_deleted() and np.array_equal(copy, np.arange(100_000, dtype=np.float32))


def test_changing_numpy_arrays_does_not_change_their_host_copy_and_other_leaves_stay():
    strided = np.arange(20000.0)[::2]
    run = {"rows": [strided, {"text": "x", "none": None}], "scalar": np.float32(2), "small": np.ones(2)}
    plain = to_plain(run, keep_lists=True)
    copy = host_copy(plain)
    before = strided.copy()
    strided[:], run["small"][:] = 0, 0
    assert np.array_equal(copy.tree["rows"][0], before) and copy.tree["small"].tolist() == [1, 1]
    assert copy.tree["rows"][0].flags.c_contiguous
    assert copy.tree["rows"][1] == {"text": "x", "none": None} and type(copy.tree["scalar"]) is np.float32


def test_a_host_copy_of_numpy_arrays_only_leaves_jax_arrays_where_they_are():
    tree = {"numpy": np.arange(3), "jax": jnp.arange(3), "list": [np.ones(2)]}
    copy = host_copy(to_plain(tree, keep_lists=True), only_numpy=True).tree
    assert copy["jax"] is tree["jax"]
    tree["numpy"] += 1
    tree["list"][0] += 1
    assert copy["numpy"].tolist() == [0, 1, 2] and copy["list"][0].tolist() == [1, 1]


def test_a_host_copy_is_saved_as_the_original_would_be(tmp_path):
    for name, change in (("a", lambda plain: plain), ("b", host_copy)):
        (tmp_path / name).mkdir()
        train, run = change(to_plain(train_state(), root="train")), change(to_plain(RUN, root="run", keep_lists=True))
        write_checkpoint(tmp_path / name, train=train, run=run, metadata={})
    for file in ("state.msgpack", "metadata.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_arrays_are_fetched_one_at_a_time_with_so_many_bytes_ahead():
    asked = []

    def arrays():
        for index in range(6):
            asked.append(index)
            yield jnp.full(2, index, jnp.float32)

    seen = [(value.tolist(), asked[-1]) for value in fetch(arrays(), ahead_bytes=16)]
    assert seen == [([index, index], min(index + 2, 5)) for index in range(6)]
    asked.clear()
    assert [asked[-1] for _ in fetch(arrays(), ahead_bytes=0)] == [0, 1, 2, 3, 4, 5]


def test_copies_from_a_device_are_all_started_before_the_first_is_waited_for(monkeypatch):
    events = []

    def start(array):
        index = [array is other for other in arrays].index(True)
        events.append(f"start {index}")
        return lambda: events.append(f"wait {index}") or np.full(1, index)

    arrays = [jnp.zeros(1) for _ in range(3)]
    monkeypatch.setattr(trees, "_may_share", lambda array: False)  # As on a GPU.
    monkeypatch.setattr(trees, "_start", start)
    copy = host_copy(to_plain(arrays, keep_lists=True))
    assert [leaf.tolist() for leaf in copy.tree] == [[0], [1], [2]]
    assert events == ["start 0", "start 1", "start 2", "wait 0", "wait 1", "wait 2"]


def test_an_array_does_not_keep_its_value_on_the_host_after_it_was_saved(tmp_path):
    # int4 is unpacked on the way to the host, and parts are put together; np.asarray would keep both with the array.
    values = {"int4": np.arange(5).astype(jnp.int4), "w": TREE["w"].astype(jnp.int4), "half": TREE["half"]}
    train = everywhere(values)
    write_checkpoint(tmp_path, train=train, run=None, metadata={})
    host_copy(to_plain(train))
    pieces = [shard.data for array in train.values() for shard in array.addressable_shards]
    assert all(array._npy_value is None for array in (*train.values(), *pieces))
    assert_same(read(tmp_path)[0]["train"], values)


def test_no_part_is_copied_from_more_than_one_device(monkeypatch):
    arrays, copied = everywhere(TREE), []
    monkeypatch.setattr(type(arrays["w"]), "copy_to_host_async", lambda piece: copied.append(piece.size))
    for name, sizes in (("w", [2] * 8), ("half", [3, 3])):
        (whole,) = fetch([arrays[name]], ahead_bytes=0)
        assert copied == sizes
        np.testing.assert_array_equal(whole, TREE[name])
        copied.clear()


def test_parts_of_the_state_on_several_devices_are_saved_whole_and_once(tmp_path):
    write_checkpoint(tmp_path, train=everywhere(TREE), run=None, metadata={})
    found, metadata = read(tmp_path)
    assert metadata["state_bytes"] < 400
    assert_same(found["train"], jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf)), TREE))


# --- Restoring ---


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


def test_arrays_that_are_split_between_processes_are_taken_only_where_all_save_together(monkeypatch):
    state = {"params": {"w": jnp.ones(2), "b": jnp.ones(3)}, "step": 4, "more": {}}
    monkeypatch.setattr(trees, "spans_processes", lambda leaf: getattr(leaf, "shape", None) == (2,))
    with pytest.raises(CheckpointError, match="run/params/w is spread over several processes, which this format cannot write"):
        to_plain(state, root="run")
    plain = to_plain(state, root="train", may_span=True)
    assert plain.tree == state
    assert only_split(plain) == Plain({"params": {"w": plain.tree["params"]["w"]}}, {})
