import contextlib
import functools
import json
import pickle
import subprocess
import sys
from typing import Any

import flax
import flax.serialization
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState

from fitflax.checkpoints.checkpoint_files import write_checkpoint
from fitflax.checkpoints.foreign import read_foreign
from fitflax.checkpoints.plain_tree import walk
from fitflax.checkpoints.restore import restore_tree
from fitflax.errors import CheckpointError, CorruptCheckpointError


class State(TrainState):
    batch_stats: Any = None
    dropout_key: Any = None
    metrics: Any = None


OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 9)),
    optax.masked(optax.trace(0.9), {"Dense_0": True, "Dense_1": False}),
)
VARIABLES = {
    "params": {"Dense_0": {"kernel": np.ones((2, 3), jnp.bfloat16)}, "Dense_1": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}},
    "batch_stats": {"BatchNorm_0": {"mean": np.zeros(3, np.float32), "var": np.ones(3, np.float32)}},
}


@functools.cache
def train_state():
    """A state after one update, on all devices."""
    variables = jax.tree.map(jnp.asarray, VARIABLES)
    create = functools.partial(State.create, apply_fn=None, tx=OPTIMIZER, dropout_key=jax.random.PRNGKey(1), metrics={"loss": jnp.ones(())})
    state = create(params=variables["params"], batch_stats=variables["batch_stats"])
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    replicated = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices(), ("d",)), jax.sharding.PartitionSpec())
    return jax.device_put(state, replicated)


@pytest.fixture(autouse=True)
def restore_flax_config():
    before = flax.config.flax_use_orbax_checkpointing
    yield
    flax.config.update("flax_use_orbax_checkpointing", before)


def save_with_flax(*args, **kwargs):
    from flax.training import checkpoints  # It imports TensorFlow if it is installed, which takes seconds in each process that collects tests.

    return checkpoints.save_checkpoint(*args, keep=9, **kwargs)


def save_flax_file(directory, tree, step=100, **kwargs):
    flax.config.update("flax_use_orbax_checkpointing", False)
    with pytest.warns(DeprecationWarning, match="Flax Checkpointing will soon be deprecated"):
        return save_with_flax(directory, tree, step, **kwargs)


def save_flax_directory(directory, tree, step=100, **kwargs):
    flax.config.update("flax_use_orbax_checkpointing", True)
    return save_with_flax(directory, tree, step, **kwargs)


def save_bytes(path, tree):
    path.write_bytes(flax.serialization.to_bytes(tree))


def save_pytree(path, tree):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def save_pytree_without_ocdbt(path, tree):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def save_standard(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def save_managed(path, tree, steps=(100,), items=None, **options):
    with ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(**options)) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.StandardSave(tree) if items is None else ocp.args.Composite(**items))


def items_of(tree):
    return {"state": ocp.args.StandardSave(tree), "config": ocp.args.JsonSave({"lr": 0.1})}


WRITERS = {
    "flax file": save_flax_file,
    "flax file, other prefix": functools.partial(save_flax_file, prefix="mine-"),
    "flax directory": save_flax_directory,
    "flax directory, other prefix": functools.partial(save_flax_directory, prefix="mine"),
    "bytes": save_bytes,
    "one level down, in a file": lambda path, tree: save_bytes(path, {"state": tree, "epoch": 3}),
    "pytree": save_pytree,
    "pytree without ocdbt": save_pytree_without_ocdbt,
    "standard": save_standard,
    "one level down": lambda path, tree: save_pytree(path, {"model": tree, "config": {"lr": 0.1, "name": "x"}}),
    "manager": save_managed,
    "manager, prefix": functools.partial(save_managed, step_prefix="ckpt", step_format_fixed_length=8),
    "manager, items": lambda path, tree: save_managed(path, tree, items=items_of(tree)),
    "orbax v1": ocp.v1.save,
}


def arrays_of(tree):
    return {name: (leaf.dtype.name, leaf.shape, leaf.tobytes()) for name, leaf in walk(tree, "") if isinstance(leaf, np.ndarray)}


def state_dict(tree):
    return jax.tree.map(np.asarray, flax.serialization.to_state_dict(tree))


def fit(target, train, name):
    return restore_tree(jax.eval_shape(lambda: target), train[name], where="c", root=f"train/{name}", key_impls={})


# --- What is read ---


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.slow
def test_a_flax_train_state_is_read_bit_for_bit(tmp_path, writer):
    WRITERS[writer](tmp_path / "c", train_state())
    train, metadata = read_foreign(tmp_path / "c")
    assert train.keys() == {"step", "params", "model_state", "opt_state"}
    assert train["step"].dtype == np.int32 and train["step"] == 1 == metadata["step"]
    assert arrays_of(train["params"]) == arrays_of(state_dict(train_state().params))
    assert arrays_of(train["model_state"]) == arrays_of({"batch_stats": state_dict(train_state().batch_stats)})
    assert arrays_of(train["opt_state"]) == arrays_of(state_dict(train_state().opt_state))
    assert {"dropout_key", "metrics"} <= set(metadata["left_out"])
    assert metadata["key_impls"] == metadata["metrics"] == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "writer",
    [
        "flax file",
        "flax directory",
        "standard",
        "pytree",
    ],
)
def test_training_continues_bit_for_bit_after_restoring(tmp_path, writer):
    WRITERS[writer](tmp_path / "c", train_state())
    train, _ = read_foreign(tmp_path / "c")
    params, opt_state = (fit(getattr(train_state(), name), train, name) for name in ("params", "opt_state"))
    assert jax.tree.structure(opt_state) == jax.tree.structure(train_state().opt_state)
    gradients = jax.tree.map(jnp.ones_like, params)
    updates, _ = OPTIMIZER.update(gradients, opt_state, params)
    expected = train_state().apply_gradients(grads=gradients).params
    assert arrays_of(state_dict(optax.apply_updates(params, updates))) == arrays_of(state_dict(expected))


SMALL = {"params": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, "batch_stats": {"mean": np.ones(1)}}


@pytest.mark.parametrize("save", [save_bytes, save_pytree])
def test_linen_variables_become_parameters_and_collections(tmp_path, save):
    save(tmp_path / "c", VARIABLES)
    train, metadata = read_foreign(tmp_path / "c")
    assert arrays_of(train["params"]) == arrays_of(state_dict(VARIABLES["params"]))
    assert arrays_of(train["model_state"]) == arrays_of({"batch_stats": state_dict(VARIABLES["batch_stats"])})
    assert (train["step"], train.keys(), metadata["left_out"]) == (0, {"step", "params", "model_state"}, [])


@pytest.mark.parametrize("save", [save_bytes, save_pytree])
def test_a_bare_tree_is_read_as_parameters(tmp_path, save):
    save(tmp_path / "c", {"Dense_0": {"kernel": np.ones((2, 3)), "bias": np.zeros(3)}, "scales": [np.ones(1), (np.zeros(2),)]})
    train, metadata = read_foreign(tmp_path / "c")
    expected = {"Dense_0": {"kernel": np.ones((2, 3)), "bias": np.zeros(3)}, "scales": {"0": np.ones(1), "1": {"0": np.zeros(2)}}}
    assert arrays_of(train["params"]) == arrays_of(expected)
    assert (train.keys(), train["model_state"], metadata["left_out"]) == ({"step", "params", "model_state"}, {}, [])


def test_several_states_in_one_tree_are_read_as_one_tree_of_parameters(tmp_path):
    tree = {"encoder": {"params": {"w": np.ones(1)}}, "decoder": {"params": {"w": np.ones(2)}}}
    save_bytes(tmp_path / "c", tree)
    assert arrays_of(read_foreign(tmp_path / "c")[0]["params"]) == arrays_of(tree)


def test_variables_in_place_of_parameters_are_split_into_parameters_and_collections(tmp_path):
    moments = optax.adam(0.1).init({"params": SMALL["params"]})
    save_bytes(tmp_path / "c", {"step": 3, "params": SMALL, "opt_state": moments})
    train, _ = read_foreign(tmp_path / "c")
    assert arrays_of(train["params"]) == arrays_of(SMALL["params"])
    assert arrays_of(train["model_state"]) == arrays_of({"batch_stats": SMALL["batch_stats"]})
    restored = fit(optax.adam(0.1).init(SMALL["params"]), train, "opt_state")
    assert arrays_of({"mu": restored[0].mu}) == arrays_of({"mu": {"w": np.zeros((2, 3), np.float32)}})


def test_python_numbers_in_an_optimizer_state_keep_their_types(tmp_path):
    opt_state = {"rate": 0.5, "count": 3, "on": True, "momentum": np.ones(2)}
    for save, path in ((save_bytes, tmp_path / "flax"), (save_pytree, tmp_path / "orbax")):
        save(path, {**SMALL, "opt_state": opt_state})
        restored = restore_tree(opt_state, read_foreign(path)[0]["opt_state"], where="c", root="train/opt_state", key_impls={})
        assert {key: type(value) for key, value in restored.items()} == {key: type(value) for key, value in opt_state.items()}


@pytest.mark.parametrize("num_keys", [1, 20, 70_000])
@pytest.mark.parametrize("key", ["k", "k" * 40, "k" * 300, "k" * 70_000])
def test_flax_files_are_recognized_by_their_first_bytes(tmp_path, num_keys, key):
    if num_keys == 1 or key == "k":
        save_bytes(tmp_path / "c", {key: np.ones(1), **{str(index): 0 for index in range(num_keys - 1)}})
        assert arrays_of(read_foreign(tmp_path / "c")[0]["params"]) == arrays_of({key: np.ones(1)})


def test_averaged_parameters_are_kept(tmp_path):
    save_bytes(tmp_path / "c", {**SMALL, "ema_params": {"w": np.ones(2)}})
    train, _ = read_foreign(tmp_path / "c")
    assert arrays_of(train["ema_params"]) == arrays_of({"w": np.ones(2)}) and "ema_params" not in train["model_state"]


def test_parameters_and_collections_in_separate_items_are_read_as_one_state(tmp_path):
    items = {"params": ocp.args.StandardSave(SMALL["params"]), "batch_stats": ocp.args.PyTreeSave(SMALL["batch_stats"])}
    save_managed(tmp_path / "c", None, steps=[5], items=items)
    train, metadata = read_foreign(tmp_path / "c")
    assert arrays_of(train["params"]) == arrays_of(SMALL["params"]) and metadata["step"] == 5
    assert arrays_of(train["model_state"]) == arrays_of({"batch_stats": SMALL["batch_stats"]})


def test_large_arrays_that_flax_wrote_in_chunks_are_reassembled(tmp_path, monkeypatch):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 16)
    save_bytes(tmp_path / "c", SMALL)
    assert arrays_of(read_foreign(tmp_path / "c")[0]["params"]) == arrays_of(SMALL["params"])


@pytest.mark.slow
def test_a_checkpoint_from_eight_devices_is_read_on_one(tmp_path, process_env):
    save_standard(tmp_path / "c", train_state())
    code = (
        "import sys, pathlib, jax\nfrom fitflax.checkpoints.foreign import read_foreign\n"
        "train, _ = read_foreign(pathlib.Path(sys.argv[1]))\nprint(jax.device_count(), train['params']['Dense_1']['kernel'].tobytes().hex())"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "c")]
    result = subprocess.run(command, env=process_env | {"JAX_NUM_CPU_DEVICES": "1"}, capture_output=True, text=True, check=True)
    assert result.stdout == f"1 {np.asarray(train_state().params['Dense_1']['kernel']).tobytes().hex()}\n"
    assert result.stderr == ""


# --- Steps ---


@pytest.mark.parametrize("save", [save_flax_file, save_flax_directory])
def test_the_newest_flax_step_is_read(tmp_path, save):
    for step in (9, 10, 100):
        save(tmp_path, {"params": {"w": np.full(2, step)}}, step)
    save(tmp_path, {"params": {"w": np.zeros(2)}}, 200, prefix="other_")
    (tmp_path / "checkpoint_tmp").write_bytes(b"x")
    (tmp_path / "notes_300").write_text("not a checkpoint")
    train, metadata = read_foreign(tmp_path)
    assert (metadata["step"], metadata["path"]) == (100, str(tmp_path / "checkpoint_100"))
    assert train["step"] == 100 and train["params"]["w"][0] == 100
    assert read_foreign(tmp_path / "checkpoint_9")[0]["params"]["w"][0] == 9


@pytest.mark.parametrize(
    ("names", "newest"), [(["m_-1.5", "m_-0.5"], "m_-0.5"), (["m_1e2", "m_20"], "m_1e2"), (["m-5", "m-40"], "m-40"), (["0.25", "0.3"], "0.3")]
)
def test_names_may_end_in_any_number(tmp_path, names, newest):
    for name in names:
        save_bytes(tmp_path / name, SMALL)
    assert read_foreign(tmp_path)[1]["path"] == str(tmp_path / newest)


def test_several_kinds_of_checkpoints_in_one_directory_are_an_error(tmp_path):
    for name in ("a_1", "a_2", "b_1"):
        save_bytes(tmp_path / name, SMALL)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of several kinds: a_2, b_1. Pass the path of one of them"):
        read_foreign(tmp_path)


def test_the_newest_finished_step_of_a_manager_is_read(tmp_path):
    save_managed(tmp_path, SMALL, steps=[3, 20])
    (tmp_path / "20").rename(tmp_path / "30.orbax-checkpoint-tmp-1700000000")
    save_managed(tmp_path, SMALL, steps=[20])
    document = json.loads((tmp_path / "20" / "_CHECKPOINT_METADATA").read_text())
    assert read_foreign(tmp_path)[1]["step"] == 20
    (tmp_path / "20" / "_CHECKPOINT_METADATA").write_text(json.dumps({**document, "commit_timestamp_nsecs": None}))
    assert read_foreign(tmp_path)[1]["step"] == 3
    (tmp_path / "20" / "_CHECKPOINT_METADATA").write_text("damaged")
    assert read_foreign(tmp_path)[1]["step"] == 20


@pytest.mark.parametrize(("step", "expected"), [(5, 5), (np.int64(5), 5), (np.full(8, 5), 7), (5.0, 7), (None, 7)])
def test_the_step_in_the_state_takes_precedence_over_the_step_in_the_name(tmp_path, step, expected):
    save_bytes(tmp_path / "checkpoint_7", {**SMALL, "step": step})
    train, metadata = read_foreign(tmp_path)
    assert (train["step"], train["step"].dtype, train["step"].shape, metadata["step"]) == (expected, np.int32, (), expected)


# --- Damaged checkpoints, and files that are not checkpoints ---


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{'params': 1}",
        json.dumps({"params": {}}).encode(),
        b"\x89PNG\r\n\x1a\n",
        pickle.dumps(Trap(), protocol=0),
        pickle.dumps(Trap(), protocol=4),
        msgpack.packb({"a": [1, 2]}),
        msgpack.packb({1: 2}),
        msgpack.packb([1]),
        b"\x81",
        b"\xdf\0\0",
    ],
)
def test_other_files_are_not_checkpoints(tmp_path, data):
    (tmp_path / "file_1").write_bytes(data)
    assert read_foreign(tmp_path / "file_1") is None
    assert read_foreign(tmp_path) is None
    # Its name says that it is one.
    (tmp_path / "file_1").rename(tmp_path / "checkpoint_1")
    if not data.startswith((b"\x81\xa1", b"\x81\x01", b"\x91")):
        with pytest.raises(CorruptCheckpointError, match="checkpoint_1 cannot be read as a msgpack file of Flax: it is "):
            read_foreign(tmp_path)


def test_other_directories_and_missing_paths_are_not_checkpoints(tmp_path):
    (tmp_path / "empty_1").mkdir()
    (tmp_path / "link_2").symlink_to(tmp_path / "nowhere")
    (tmp_path / "full_3" / "data").mkdir(parents=True)
    assert [read_foreign(path) for path in (tmp_path, tmp_path / "empty_1", tmp_path / "link_2", tmp_path / "full_3", tmp_path / "nowhere")] == [None] * 5


def test_fitflax_checkpoints_are_not_read_without_their_checks(tmp_path):
    (tmp_path / "step_00000001").mkdir()
    write_checkpoint(tmp_path / "step_00000001", train=SMALL, run=None, metadata={})
    save_pytree(tmp_path / "step_00000001" / "train", SMALL)  # As the backend `orbax` does.
    paths = (tmp_path, tmp_path / "step_00000001", tmp_path / "step_00000001" / "state.msgpack")
    for name in ("metadata.json", "state.msgpack"):
        (tmp_path / "step_00000001" / name).unlink()
        assert [read_foreign(path) for path in paths] == [None] * 3


def test_an_item_named_train_is_read(tmp_path):
    save_managed(tmp_path / "m", None, steps=[7], items={"train": ocp.args.StandardSave(SMALL)})
    assert arrays_of(read_foreign(tmp_path / "m")[0]["params"]) == arrays_of(SMALL["params"])


def test_an_array_saved_with_the_array_handler_of_orbax_is_an_error(tmp_path):
    with ocp.Checkpointer(ocp.ArrayCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "c", np.ones(3))
    with pytest.raises(CorruptCheckpointError, match="c cannot be read as a checkpoint of Orbax: it is damaged, or from another version of Orbax"):
        read_foreign(tmp_path / "c")


def test_a_flax_file_truncated_anywhere_is_an_error(tmp_path):
    data = flax.serialization.to_bytes(SMALL)
    for length in range(8, len(data)):
        (tmp_path / "c").write_bytes(data[:length])
        with pytest.raises(CorruptCheckpointError, match=r"c cannot be read as a msgpack file of Flax: it is damaged, or has another format"):
            read_foreign(tmp_path / "c")
    (tmp_path / "c").write_bytes(data + b"\0")
    with pytest.raises(CorruptCheckpointError):
        read_foreign(tmp_path / "c")


def test_a_flipped_bit_in_a_flax_file_gives_values_or_an_error_that_names_the_file(tmp_path):
    data = flax.serialization.to_bytes(SMALL)
    for position in range(len(data)):
        (tmp_path / "checkpoint_1").write_bytes(data[:position] + bytes([data[position] ^ 0x11]) + data[position + 1 :])
        with contextlib.suppress(CheckpointError), pytest.raises(CheckpointError, match="checkpoint_1"):
            read_foreign(tmp_path)
            raise CheckpointError("checkpoint_1 was read")


def test_a_file_that_is_nested_too_deeply_is_an_error(tmp_path):
    tree: dict = {"w": np.ones(1)}
    for _ in range(150):
        tree = {"a": tree}
    (tmp_path / "c").write_bytes(flax.serialization.msgpack_serialize(tree))
    with pytest.raises(CorruptCheckpointError, match="nested more than 100 levels deep"):
        read_foreign(tmp_path / "c")
    (tmp_path / "c").write_bytes(b"\x81\xa1a" * 5000 + b"\xc0")
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        read_foreign(tmp_path / "c")


@pytest.mark.slow
def test_a_damaged_orbax_checkpoint_is_an_error_or_gives_the_same_arrays(tmp_path, caplog):
    params = {"w": np.arange(3.0)}
    save_managed(tmp_path / "m", {"params": params}, steps=[7])
    path, messages = tmp_path / "m" / "7" / "default", []
    for file in sorted(entry for entry in path.rglob("*") if entry.is_file()):
        data = file.read_bytes()
        for damaged in (None, b"", data[: len(data) // 2]):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            try:
                assert arrays_of(read_foreign(tmp_path / "m")[0]["params"]) == arrays_of(params)
            except CorruptCheckpointError as error:
                messages.append(str(error))
        file.write_bytes(data)
    assert len(messages) >= 9 and all(message.startswith(f"{path.parent}") for message in messages)
    assert caplog.records == []


def test_many_arrays_that_cannot_be_read_raise_only_one_error(tmp_path, caplog):
    save_pytree(tmp_path / "c", {f"w{index}": np.arange(3.0) for index in range(9)})
    for file in (tmp_path / "c" / "d").iterdir():
        file.write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=r"damaged, or from another version of Orbax\. Orbax could not read .*c: ValueError: OUT_OF_RANGE"):
        read_foreign(tmp_path / "c")
    assert caplog.records == []


def test_a_step_of_an_old_manager_is_read_without_its_metadata_file(tmp_path):
    save_managed(tmp_path / "m", SMALL, steps=[7])
    (tmp_path / "m" / "7" / "_CHECKPOINT_METADATA").unlink()
    for path in (tmp_path / "m", tmp_path / "m" / "7"):
        assert arrays_of(read_foreign(path)[0]["params"]) == arrays_of(SMALL["params"])


def test_an_orbax_checkpoint_without_trees_is_an_error(tmp_path):
    save_managed(tmp_path / "m", None, steps=[7], items={"config": ocp.args.JsonSave({"lr": 0.1})})
    with pytest.raises(CorruptCheckpointError, match=r"7 cannot be read as a checkpoint of Orbax: neither it nor a subdirectory contains _METADATA"):
        read_foreign(tmp_path / "m" / "7")


def test_several_items_without_a_state_among_them_are_an_error(tmp_path):
    save_managed(tmp_path / "m", None, steps=[7], items={name: ocp.args.StandardSave(SMALL) for name in ("generator", "critic")})
    with pytest.raises(CheckpointError, match=r"7 holds several items: critic, generator. Pass the path of one of them"):
        read_foreign(tmp_path / "m")
    assert arrays_of(read_foreign(tmp_path / "m" / "7" / "critic")[0]["params"]) == arrays_of(SMALL["params"])


def test_one_of_several_items_is_recognized_as_the_state_by_its_name(tmp_path):
    save_managed(tmp_path / "m", None, steps=[7], items={"averages": ocp.args.StandardSave({"w": np.zeros(1)}), "state": ocp.args.StandardSave(SMALL)})
    assert arrays_of(read_foreign(tmp_path / "m")[0]["params"]) == arrays_of(SMALL["params"])


def test_arrays_that_are_stored_elsewhere_are_an_error(tmp_path):
    save_bytes(tmp_path / "c", {**SMALL, "params": {"v": "//GDAPlaceholder:v", "w": np.ones(1)}})
    with pytest.raises(CheckpointError, match=r"split between processes are in .*c_gda.* Arrays: params/v\."):
        read_foreign(tmp_path / "c")


def test_a_single_array_is_an_error(tmp_path):
    save_bytes(tmp_path / "checkpoint_1", np.ones(3))
    with pytest.raises(CheckpointError, match="checkpoint_1 holds a single array instead of named parameters"):
        read_foreign(tmp_path)


def test_a_file_without_read_permission_is_an_error_that_names_it(tmp_path, monkeypatch):
    save_bytes(tmp_path / "checkpoint_1", SMALL)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(type(tmp_path), "read_bytes", refuse)
    with pytest.raises(CheckpointError, match=r"checkpoint_1 could not be read: Permission denied"):
        read_foreign(tmp_path)
