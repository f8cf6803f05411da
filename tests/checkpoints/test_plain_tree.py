"""From pytrees to what a checkpoint holds, to host memory, and back into a target."""

import collections
import dataclasses
import re
import threading
import typing

import flax
import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fitflax.checkpoints import memory, plain_tree, saver
from fitflax.checkpoints.checkpoint_files import write_checkpoint
from fitflax.checkpoints.memory import ReusedMemory, fetch
from fitflax.checkpoints.plain_tree import Plain, only_split, to_plain
from fitflax.checkpoints.restore import from_saved, restore_tree
from fitflax.checkpoints.saver import Saver, Snapshots, host_copy
from fitflax.errors import CheckpointError, RestoreError
from fitflax.parallel import DataParallel, Sharded
from fitflax.state import TrainState
from fitflax.steps.live_state import LiveState
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


# --- What can be saved, and how ---


def test_a_plain_tree_holds_the_arrays_themselves_and_the_implementations_of_keys():
    w, b = jnp.ones(2), np.zeros(3)
    plain = to_plain({"layers": [w, b], "pair": Pair(1, None), "key": jax.random.key(3, impl="rbg"), "keys": jax.random.split(jax.random.key(0))}, root="train")
    assert list(plain.tree["layers"]) == ["0", "1"] and plain.tree["layers"]["0"] is w and np.shares_memory(plain.tree["layers"]["1"], b)
    assert plain.tree["pair"] == {"left": 1, "right": None}
    assert plain.key_impls == {"train/key": "rbg", "train/keys": "threefry2x32"}
    assert (plain.tree["key"].shape, plain.tree["keys"].shape) == ((4,), (2, 2))


def test_lists_are_kept_if_there_will_be_no_target():
    assert to_plain([1, (2, [])], keep_lists=True) == Plain([1, [2, []]], {})


def test_converting_a_plain_tree_returns_it_unchanged():
    plain = to_plain({"key": jax.random.key(0)}, root="run")
    assert to_plain(plain, root="elsewhere") is plain


def test_subclasses_of_numpy_arrays_become_arrays(tmp_path):
    (tmp_path / "x").write_bytes(np.arange(3.0).tobytes())
    tree = {"map": np.memmap(tmp_path / "x", dtype=float, mode="r"), "record": np.arange(2.0).view(np.recarray)}
    assert [type(leaf) for leaf in to_plain(tree).tree.values()] == [np.ndarray, np.ndarray]


def test_text_in_any_language_can_be_saved():
    assert to_plain({"name": "Zürich 東京"}).tree == {"name": "Zürich 東京"}


@pytest.mark.parametrize("leaf", ["\udfff", np.zeros(2, "V0"), np.zeros(2, "V3"), np.zeros(2, "M8[s]")], ids=repr)
def test_invalid_unicode_and_arrays_of_zero_size_items_records_or_dates_cannot_be_saved(leaf):
    with pytest.raises(CheckpointError, match=r"Cannot be saved in a checkpoint: leaf (is|has dtype)"):
        to_plain({"leaf": leaf})


def test_leaves_that_cannot_be_saved_are_named():
    tree = {"big": 2**64, "small": -(2**63) - 1, "text": np.array(["x"]), "object": object(), "bad": "\ud800", "complex": 1j, "ok": 2**64 - 1}
    message = (
        "Cannot be saved in a checkpoint: run/big is the integer 18446744073709551616, which needs more than 64 bits (save it as a string); "
        "run/small is the integer -9223372036854775809, which needs more than 64 bits (save it as a string); "
        "run/text has dtype <U1 (only numbers and booleans can be saved); "
        "run/object is of type object (only arrays, numbers, strings, bytes and None can be saved); run/bad is '\\ud800', which is not valid Unicode; "
        "and 1 more."
    )
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        to_plain(tree, root="run")
    with pytest.raises(CheckpointError, match="run/complex is of type complex"):
        to_plain({"complex": 1j}, root="run")


def test_deleted_arrays_are_named():
    array = jnp.ones(2)
    array.delete()
    with pytest.raises(CheckpointError, match="params/w has been deleted"):
        to_plain({"params": {"w": array}})


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"a": {1: 0, "1": 0}}, "two keys of a become the same string, '1'"),
        ({"a": {"__msgpack_chunked_array__": {}}}, "a has the key '__msgpack_chunked_array__'"),
    ],
)
def test_dicts_that_cannot_be_saved_are_refused(tree, match):
    with pytest.raises(CheckpointError, match=match):
        to_plain(tree)


def test_a_tree_that_contains_itself_is_an_error():
    tree: list = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="more than 100 levels deep"):
        to_plain(tree)


# --- Copying to the host ---


def everywhere(tree):
    """Puts arrays on all eight devices: `w` in shards, `half` in two shards with four copies each, the rest replicated."""
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
def test_a_host_copy_has_the_values_of_jax_arrays_in_separate_memory(place):
    arrays = place(TREE) | {"int4": jnp.arange(5, dtype=jnp.int4), "bfloat16": jnp.ones((), jnp.bfloat16)}
    copy = host_copy(to_plain(arrays)).tree
    for name, array in arrays.items():
        if not array.is_fully_replicated:  # Stays split, in host memory.
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


def test_arrays_are_fetched_one_at_a_time_with_a_limited_number_of_bytes_ahead():
    asked = []

    def arrays():
        for index in range(6):
            asked.append(index)
            yield jnp.full(2, index, jnp.float32)

    seen = [(value.tolist(), asked[-1]) for value in fetch(arrays(), ahead_bytes=16)]
    assert seen == [([index, index], min(index + 2, 5)) for index in range(6)]
    asked.clear()
    assert [asked[-1] for _ in fetch(arrays(), ahead_bytes=0)] == [0, 1, 2, 3, 4, 5]


def test_all_copies_from_a_device_start_before_the_first_one_is_waited_for(monkeypatch):
    events = []

    def start(array):
        index = [array is other for other in arrays].index(True)
        events.append(f"start {index}")
        return lambda: events.append(f"wait {index}") or np.full(1, index)

    arrays = [jnp.zeros(1) for _ in range(3)]
    monkeypatch.setattr(saver, "may_share", lambda array: False)  # As on a GPU.
    monkeypatch.setattr(memory, "may_share", lambda array: False)
    monkeypatch.setattr(memory, "_start_copy", start)
    copy = host_copy(to_plain(arrays, keep_lists=True))
    assert [leaf.tolist() for leaf in copy.tree] == [[0], [1], [2]]
    assert events == ["start 0", "start 1", "start 2", "wait 0", "wait 1", "wait 2"]


def test_a_host_copy_is_made_in_lent_memory():
    memory, tree = ReusedMemory(), {"w": jnp.arange(5000.0), "key": jax.random.key(3), "none": None, "step": np.int32(3)}
    tree |= {"bfloat16": jnp.ones((), jnp.bfloat16), "empty": jnp.zeros((0, 3)), "numpy": np.arange(20)[::2]}
    addresses = []
    for number in range(3):
        tree["w"] = tree["w"] + number
        copy = host_copy(to_plain(tree), lend=memory.lend).tree
        assert_same(copy, jax.tree.map(np.asarray, to_plain(tree).tree) | {"step": np.int32(3)})
        addresses.append([copy[name].ctypes.data for name in ("w", "key", "bfloat16", "numpy")])
        assert memory.num_lent == 1 and {address % 64 for address in addresses[-1]} == {16}
        del copy
    assert memory.num_lent == 0 and addresses[0] == addresses[1] == addresses[2]


def test_a_replaced_state_is_copied_again_for_the_next_save():
    strategy = DataParallel(jax.devices()[:1])

    def state_of(value):
        key = strategy.put(jax.random.key(0))
        return TrainState(step=strategy.put(np.int32(0)), params=strategy.put({"w": np.full(3, value)}), model_state={}, opt_state=(), key=key)

    live = LiveState(strategy, state_of(1.0), 0)
    with Saver() as saver:
        snapshots = Snapshots(live, saver)
        first, same = (snapshots.take(live.borrow(), {}) for _ in range(2))
        live.replace(state_of(2.0), 0)
        second = snapshots.take(live.borrow(), {})
        assert same is first and [taken()[0].tree["params"]["w"][0] for taken in (first, second)] == [1.0, 2.0]


@pytest.mark.parametrize("is_split", [False, True])
def test_a_copy_on_the_devices_is_moved_to_the_host_by_the_saving_thread_and_donation_does_not_change_it(is_split, monkeypatch):
    strategy = Sharded({"data": 8}, fsdp=True, fsdp_min_size=64) if is_split else DataParallel(jax.devices()[:8])
    monkeypatch.setattr(type(strategy), "is_on_host", False)  # As on GPUs that have room.
    monkeypatch.setattr(saver, "may_share", lambda array: False)
    monkeypatch.setattr(memory, "may_share", lambda array: False)
    monkeypatch.setattr(memory.DeviceRoom, "has", lambda room, num_bytes, devices: sizes.append((num_bytes, len(devices))) or True)
    sizes, threads, moved = [], [], saver.copy_to_host_memory
    monkeypatch.setattr(saver, "copy_to_host_memory", lambda *args, **options: threads.append(threading.current_thread().name) or moved(*args, **options))
    params = {"w": np.arange(40_000, dtype=np.float32).reshape(8, -1), "b": np.full(3, 1.5, jnp.bfloat16), "n": np.int32(7)}
    state = TrainState(step=np.int32(3), params=params, model_state={}, opt_state=(), key=jax.random.key(5))
    live = LiveState(strategy, strategy.put_state(state), 3)
    expected = jax.tree.map(np.array, to_plain(live.borrow()).tree)
    sums = strategy.put({"sums": {"float32": np.arange(5.0, dtype=np.float32)}})
    found, gate = [], threading.Event()
    with Saver() as saving:
        snapshots = Snapshots(live, saving)
        saving.submit(lambda: gate.wait(60), is_save=False)
        taken = snapshots.take(live.borrow(), sums)
        assert snapshots.take(live.borrow(), sums) is taken and saving.memory.num_lent == 1
        for _ in range(2):
            saving.submit(lambda: found.append(jax.tree.map(np.array, [plain.tree for plain in taken()])), is_save=False)
            step = jax.jit(lambda leaves: [leaf * 0 - 1 for leaf in leaves], donate_argnums=0)
            donated = live.take()
            live.advance(donated._replace(leaves=jax.block_until_ready(step(donated.leaves))))
            assert any(leaf.is_deleted() for leaf in donated.leaves)
        for leaf in jax.tree.leaves(sums):
            leaf.delete()
        assert threads == []
        gate.set()
        saving.wait()
        assert set(threads) == {"fitflax-saver"} and len(threads) == 2  # Once for the state, and once for the sums.
    for train, run in found:
        assert_same(train, expected)
        assert_same(run, {"sums": {"float32": np.arange(5.0, dtype=np.float32)}})
    ((num_bytes, num_devices),) = sizes
    assert num_devices == 8 and num_bytes == 160_000 // (8 if is_split else 1) + 6 + 4 + 4
    assert not snapshots.waits


def test_a_state_that_spans_processes_is_not_copied_on_the_devices(monkeypatch):
    monkeypatch.setattr(DataParallel, "is_on_host", False)
    monkeypatch.setattr(saver, "may_share", lambda array: False)
    monkeypatch.setattr(memory.DeviceRoom, "has", lambda room, num_bytes, devices: True)
    monkeypatch.setattr(saver, "spans_processes", lambda array: array.ndim == 1)
    strategy = DataParallel(jax.devices()[:2])
    state = TrainState(step=np.int32(0), params={"w": np.ones(3, np.float32)}, model_state={}, opt_state=(), key=jax.random.key(0))
    with Saver() as saving:
        monkeypatch.setattr(DataParallel, "copy_apart", lambda strategy, arrays: pytest.fail("copied on the devices"))
        train, _ = Snapshots(LiveState(strategy, strategy.put_state(state), 0), saving).take(strategy.put_state(state), {})()
    assert np.asarray(train.tree["params"]["w"]).tolist() == [1, 1, 1]


@pytest.mark.parametrize("backend", ["msgpack", "orbax"])
def test_a_copy_not_waited_for_is_in_pinned_memory_and_donation_does_not_change_it(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(saver, "may_share", lambda array: False)  # As on a GPU.
    monkeypatch.setattr(memory, "may_share", lambda array: False)
    state = {"w": jnp.arange(300_000.0), "numpy": np.arange(3), "key": jax.random.key(1)}
    expected = jax.tree.map(np.array, to_plain(state).tree)
    plain = host_copy(to_plain(state, root="train"), wait=False)
    jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(state["w"])
    state["numpy"] += 1
    assert state["w"].is_deleted() and {plain.tree[name].sharding.memory_kind for name in ("w", "key")} == {"pinned_host"}
    write_checkpoint(tmp_path, train=plain, run=None, metadata={}, backend=backend)
    assert_same(read(tmp_path)[0]["train"], expected)


def test_a_copy_from_a_device_without_pinned_memory_is_waited_for(monkeypatch):
    monkeypatch.setattr(saver, "may_share", lambda array: False)
    monkeypatch.setattr(memory, "may_share", lambda array: False)
    monkeypatch.setattr(saver, "has_host_memory", lambda array: False)
    copy = host_copy(to_plain({"w": jnp.arange(3)}), wait=False).tree["w"]
    assert type(copy) is np.ndarray and copy.tolist() == [0, 1, 2]


def test_an_array_does_not_keep_its_value_on_the_host_after_it_is_saved(tmp_path):
    # int4 is unpacked on the way to the host, and shards are assembled; np.asarray would cache both in the array.
    values = {"int4": np.arange(5).astype(jnp.int4), "w": TREE["w"].astype(jnp.int4), "half": TREE["half"]}
    train = everywhere(values)
    write_checkpoint(tmp_path, train=train, run=None, metadata={})
    host_copy(to_plain(train))
    pieces = [shard.data for array in train.values() for shard in array.addressable_shards]
    assert all(array._npy_value is None for array in (*train.values(), *pieces))
    assert_same(read(tmp_path)[0]["train"], values)


def test_no_shard_is_copied_from_more_than_one_device(monkeypatch):
    arrays, copied = everywhere(TREE), []
    monkeypatch.setattr(type(arrays["w"]), "copy_to_host_async", lambda piece: copied.append(piece.size))
    for name, sizes in (("w", [2] * 8), ("half", [3, 3])):
        (whole,) = fetch([arrays[name]], ahead_bytes=0)
        assert copied == sizes
        np.testing.assert_array_equal(whole, TREE[name])
        copied.clear()


def test_shards_on_several_devices_are_saved_as_whole_arrays_and_only_once(tmp_path):
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


def test_a_train_state_is_restored_bit_for_bit(directory):
    state, metadata = read(directory)
    target = jax.eval_shape(train_state)
    restored = restore_tree(target, state["train"], where="c", root="train", key_impls=metadata["key_impls"])
    assert_same(restored, train_state())
    assert isinstance(restored.params["Dense_0"]["kernel"], np.ndarray)


def test_run_state_is_restored_as_plain_python_with_lists_for_tuples(directory):
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
        "runs/a/step_00002000 does not fit this model. Missing: params/Dense_1/a, params/Dense_1/bias. Unexpected: params/head/bias, params/head/kernel. "
        "Different: params/Dense_0/bias is float32, expected bfloat16; params/Dense_0/kernel has shape (784, 64), expected (784, 128)."
    )


def test_with_many_differences_the_advice_comes_first_and_only_some_are_listed():
    target = {"params": {**{f"a{number}": np.ones(2) for number in range(5)}, **{f"b{number}": np.ones(2) for number in range(6)}}}
    saved = {"params": {**{f"b{number}": np.ones(3) for number in range(6)}, **{f"c{number}": np.ones(2) for number in range(7)}}}
    assert fault(target, saved, advice=lambda pairs, different: "Do this.") == (
        "runs/a/step_00002000 does not fit this model. Do this. Missing: params/a0, params/a1, params/a2, and 2 more. "
        "Unexpected: params/c0, params/c1, params/c2, and 4 more. Different: params/b0 has shape (3,), expected (2,); "
        "params/b1 has shape (3,), expected (2,); params/b2 has shape (3,), expected (2,); and 3 more."
    )


@pytest.mark.parametrize(
    ("target", "saved", "message"),
    [
        ({"ema": None}, {"ema": {"w": np.ones(1)}}, "Unexpected: ema/w"),
        ({"ema": {"w": np.ones(1)}}, {"ema": None}, "Missing: ema/w"),
        ({"w": np.ones(1, np.float32)}, {"w": np.ones(2)}, "Different: w is float64 (2,), expected float32 (1,)"),
        ({"w": np.int32(1)}, {"w": 1}, "Different: w is int, expected int32 ()"),
        ({"w": 1.0}, {"w": 1}, "Different: w is int, expected float"),
        (np.ones(1), np.ones(2), "Different: train has shape (2,), expected (1,)"),
        ((1, 2), {"0": 1}, "Missing: 1"),
        ({"key": jax.random.key(0)}, {"key": np.zeros(2, np.uint32)}, "Different: key is uint32 (2,), expected key<fry> ()"),
    ],
)
def test_differences_say_what_was_found_and_what_was_expected(target, saved, message):
    assert fault(target, saved) == f"runs/a/step_00002000 does not fit this model. {message}."


def test_keys_of_another_implementation_do_not_fit():
    saved = {"key": np.zeros(4, np.uint32)}
    message = fault({"key": jax.random.key(0)}, saved, key_impls={"train/key": "rbg"})
    assert message.endswith("model. Different: key is key<rbg>, expected key<fry>.")
    assert "key is a random key that this version of JAX cannot create" in fault({"key": jax.random.key(0)}, saved, key_impls={"train/key": "unknown"})
    with pytest.raises(RestoreError, match="run/key is a random key that this version of JAX cannot create"):
        from_saved(saved, key_impls={"run/key": "unknown"})


@pytest.mark.parametrize(("target", "saved"), [({"a": None}, {"a": {}}), ({"a": {}}, {"a": None}), ({"a": optax.EmptyState()}, {}), ({}, {"a": None})])
def test_none_and_empty_containers_fit_each_other(target, saved):
    restored = restore_tree(target, saved, where="c", root="train", key_impls={})
    assert jax.tree.structure(restored) == jax.tree.structure(target)


def test_arrays_split_between_processes_are_accepted_only_if_all_save_together(monkeypatch):
    state = {"params": {"w": jnp.ones(2), "b": jnp.ones(3)}, "step": 4, "more": {}}
    monkeypatch.setattr(plain_tree, "spans_processes", lambda leaf: getattr(leaf, "shape", None) == (2,))
    with pytest.raises(CheckpointError, match="run/params/w is split between processes, which this format does not support"):
        to_plain(state, root="run")
    plain = to_plain(state, root="train", may_span=True)
    assert plain.tree == state
    assert only_split(plain) == Plain({"params": {"w": plain.tree["params"]["w"]}}, {})
