import asyncio
import collections
import errno
import functools
import json
import logging
import math
import os
import pathlib
import resource
import subprocess
import sys
import threading
import zlib

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from fitflax.checkpoints import msgpack_format, orbax_format
from fitflax.checkpoints.orbax_format import read_state, restore_numpy, write_state
from fitflax.checkpoints.plain_tree import Plain, to_plain
from fitflax.checkpoints.restore import restore_tree
from fitflax.errors import CheckpointError, CorruptCheckpointError
from fitflax.state import TrainState


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=False)(nn.Dense(4, param_dtype=jnp.bfloat16)(x)))


OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.masked(optax.adam(optax.linear_schedule(1e-3, 0.0, 10)), lambda tree: jax.tree.map(jnp.ndim, tree))
)


@functools.cache
def train_state():
    variables = Model().init(jax.random.key(0), jnp.ones((2, 3)))
    params = flax.core.freeze(variables["params"])
    state = {"batch_stats": variables["batch_stats"], "cache": {"on": jnp.array([True, False]), "empty": jnp.zeros((0, 3)), "none": None, "nothing": {}}}
    return TrainState(step=jnp.int32(7), params=params, model_state=state, opt_state=OPTIMIZER.init(params), key=jax.random.key(3))


RUN = {
    "sums": [np.float32(1.5), np.arange(3), (1, 2)],
    "callbacks": {"best": -math.inf, "note": "NaN", "none": None, "big": 2**63, "empty": [], "map": {}},
    "position": b"\x00\xff",
    "key": jax.random.key(5, impl="rbg"),
}


def plain(train, run=None):
    return to_plain(train, root="train"), to_plain(run, root="run", keep_lists=True)


def write(directory, train, run=None):
    directory.mkdir()
    return json.loads(json.dumps(write_state(directory, *plain(train, run))))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("orbax") / "c"
    return directory, write(directory, train_state(), RUN)


def flat(node, path=()):
    """Lists what must be equal in two trees: keys in their order, types, dtypes, shapes and bits."""
    if isinstance(node, dict | list):
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        return [(path, type(node)), *(entry for key, child in pairs for entry in flat(child, (*path, key)))]
    if hasattr(node, "dtype"):
        return [(path, type(node), node.dtype.name, node.shape, np.asarray(node).tobytes())]
    return [(path, type(node), repr(node))]


def entries(path):
    return sorted(entry.relative_to(path).as_posix() for entry in path.rglob("*"))


# --- Round trips ---

DTYPES = [bool, np.int8, np.int16, np.int64, np.uint8, np.uint16, np.uint64, np.float16, np.float32, np.float64, np.complex64, np.complex128]
DTYPES += [
    getattr(ml_dtypes, name)
    for name in dir(ml_dtypes)
    if name.startswith(("bfloat", "float8", "float4", "int", "uint")) and isinstance(getattr(ml_dtypes, name), type)
]
DTYPES = [dtype for dtype in DTYPES if np.dtype(dtype).name.isidentifier()]


def arrays_of(dtype):
    arrays = {str(shape): (np.arange(math.prod(shape)) % 2).reshape(shape).astype(dtype) for shape in [(), (0,), (2, 0, 3), (1,), (2, 3)]}
    return {"scalar": np.dtype(dtype).type(1), **{f"a{index}": array for index, array in enumerate(arrays.values())}}


TREES = {
    "train state": train_state,
    "dtypes and shapes": lambda: {np.dtype(dtype).name: arrays_of(dtype) for dtype in DTYPES},
    "nan payloads and negative zero": lambda: {
        "w": np.array([0x7FC00001, 0xFF800001, 0x80000000, 0], np.uint32).view(np.float32),
        "zero": -0.0,
        "nan": math.nan,
    },
    "byte orders and layouts": lambda: {"big": np.arange(4, dtype=">f4"), "f": np.asfortranarray(np.arange(6).reshape(2, 3)), "s": np.arange(9)[::-2]},
    "python values": lambda: {"f": 0.5, "i": 3, "big": 2**64 - 1, "true": True, "s": "x", "b": b"\0", "none": None, "w": np.ones(1)},
    "numpy scalars": lambda: {"a": np.float32(1), "b": np.int64(2), "c": np.bool_(True), "d": ml_dtypes.bfloat16(3), "w": np.ones(1)},
    "keys that are joined to the same name": lambda: {"a.b": np.ones(2), "a": {"b": np.zeros(2)}, "a/b": np.ones(3), "a~1b": np.ones(4)},
    "odd keys": lambda: {"": {"": np.ones(1)}, "..": np.ones(2), "ü x": {"y": np.ones(3)}, "a\0b": np.ones(4), "\n": np.ones(5), "-": np.ones(6)},
    "names of orbax's own": lambda: {
        "value_type": np.ones(1),
        "key": {"skip_deserialize": np.ones(2)},
        "d": np.ones(3),
        "_METADATA": np.ones(4),
        "0": np.ones(5),
    },
    "keys out of order": lambda: {"b": np.ones(1), "a": {"z": np.ones(2), "y": 1, "x": np.ones(3)}, "0": None},
    "typed keys": lambda: {"k": jax.random.split(jax.random.key(0), 3), "one": jax.random.key(1, impl="rbg")},
    "optax's empty states": lambda: optax.chain(optax.identity(), optax.masked(optax.sgd(1.0, momentum=0.9), {"a": True, "b": False})).init(
        {"a": np.ones(1), "b": np.ones(2)}
    ),
    "ordered dicts, tuples and lists": lambda: {"o": collections.OrderedDict(b=jnp.ones(1), a=jnp.zeros(1)), "t": (jnp.ones(1), [jnp.int32(1)], ())},
    "no arrays": lambda: {"a": {"b": 1}, "c": {}},
    "nothing": dict,
    "none": lambda: None,
    "one array": lambda: np.ones(2),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.slow
def test_the_orbax_backend_reads_the_same_as_the_msgpack_backend(tmp_path, name):
    train, run = plain(TREES[name](), RUN)
    (tmp_path / "msgpack").mkdir()
    expected = msgpack_format.read_state(tmp_path / "msgpack", msgpack_format.write_state(tmp_path / "msgpack", train, run))
    metadata = write(tmp_path / "orbax", train, run)
    assert flat(read_state(tmp_path / "orbax", metadata)) == flat(expected)
    assert (tmp_path / "orbax" / "train").exists() == bool(metadata["orbax_arrays"])


def test_a_train_state_is_restored_into_its_target(written):
    directory, metadata = written
    key_impls = plain(train_state())[0].key_impls
    restored = restore_tree(jax.eval_shape(train_state), read_state(directory, metadata)["train"], where="c", root="train", key_impls=key_impls)
    assert jax.tree.structure(restored) == jax.tree.structure(train_state())
    assert isinstance(restored.params, flax.core.FrozenDict) and jax.random.key_impl(restored.key) == "threefry2x32"
    arrays = [jax.tree.map(lambda leaf: flat(np.asarray(leaf)), to_plain(tree).tree) for tree in (restored, train_state())]
    assert arrays[0] == arrays[1]


def test_arrays_are_writable(written):
    read_state(*written)["train"]["params"]["Dense_1"]["kernel"][:] = 0


def test_plain_orbax_reads_the_arrays_with_their_names(written):
    directory, metadata = written
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(directory / "train")
    assert flat(restored["params"]["Dense_1"]["bias"]) == flat(np.zeros(4, ml_dtypes.bfloat16))
    assert restored["model_state"]["batch_stats"]["BatchNorm_0"].keys() == {"mean", "var"}
    assert "train/opt_state/1/inner_state/0/mu/Dense_0/kernel" in metadata["orbax_arrays"]
    assert "train/model_state/cache/empty" not in metadata["orbax_arrays"]


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("spec", [(), ("d",)], ids=["replicated", "sharded"])
def test_arrays_on_devices_are_written_as_their_values(tmp_path, devices, num_devices, spec):
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(devices(num_devices), ("d",)), jax.sharding.PartitionSpec(*spec))
    array = np.arange(16, dtype=np.float32).reshape(8, 2)
    metadata = write(tmp_path / "c", {"w": jax.device_put(array, sharding), "n": array[0]})
    assert flat(read_state(tmp_path / "c", metadata)["train"]) == flat({"w": array, "n": array[0]})
    # As NumPy arrays: on a machine with other devices the checkpoint is the same.
    assert "sharding" not in (tmp_path / "c" / "train" / "_METADATA").read_text()


def test_only_the_requested_roots_are_returned_and_verified(tmp_path):
    metadata = write(tmp_path / "c", {"w": np.ones(2)}, {"n": 3})
    (tmp_path / "c" / "train" / "_METADATA").unlink()
    assert read_state(tmp_path / "c", metadata, roots=["run"]) == {"run": {"n": 3}}
    with pytest.raises(CorruptCheckpointError, match="train/_METADATA is missing"):
        read_state(tmp_path / "c", metadata, roots=["train"])
    with pytest.raises(CheckpointError, match=r"has no root 'other'"):
        read_state(tmp_path / "c", metadata, roots=["other"])


def test_the_directory_can_be_renamed(tmp_path):
    metadata = write(tmp_path / "before", {"w": np.ones(2)})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "before").rename(tmp_path / "elsewhere" / "after")
    assert flat(read_state(tmp_path / "elsewhere" / "after", metadata)["train"]) == flat({"w": np.ones(2)})


def test_a_relative_path_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    metadata = write(pathlib.Path("c"), {"w": np.ones(2)})
    assert flat(read_state(pathlib.Path("c"), metadata)["train"]) == flat({"w": np.ones(2)})


# --- What is left behind ---


def test_all_files_are_listed_and_nothing_temporary_is_left(written):
    directory, metadata = written
    assert sorted(entry.name for entry in directory.iterdir()) == sorted(orbax_format.FILES)
    assert [name for name in entries(directory) if (directory / name).is_file()] == sorted([*metadata["orbax_files"], "state.msgpack"])
    assert not [name for name in entries(directory) if "tmp" in name or "lock" in name]
    assert {key: type(metadata[key]) for key in orbax_format.METADATA_KEYS} == orbax_format.METADATA_KEYS
    assert metadata.keys() == orbax_format.METADATA_KEYS.keys()


def test_files_and_directories_are_synced_to_disk(tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino) or fsync(descriptor))
    write(tmp_path / "c", {"w": np.ones(2)})
    missing = [name for name in ["", *entries(tmp_path / "c")] if (tmp_path / "c" / name).stat().st_ino not in synced]
    assert not missing


def in_this_thread(function):
    function()


def in_another_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def in_a_running_event_loop(function):
    async def main():
        function()

    with asyncio.Runner() as runner:
        runner.run(main())


@pytest.mark.parametrize("call", [in_this_thread, in_another_thread, in_a_running_event_loop])
def test_no_thread_event_loop_or_output_is_left_behind(tmp_path, capfd, call):
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    before, results = set(threading.enumerate()), []

    def round_trip():
        metadata = write(tmp_path / "c", {"w": np.ones(2)})
        results.append(read_state(tmp_path / "c", metadata)["train"]["w"])

    try:
        call(round_trip)
        if call is not in_a_running_event_loop:  # asyncio's own runner forgets the loop.
            assert asyncio.get_event_loop_policy().get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    assert flat(results) == flat([np.ones(2)])
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread
    assert capfd.readouterr() == ("", "")


def test_threads_can_write_at_the_same_time(tmp_path):
    results = {}

    def round_trip(index):
        metadata = write(tmp_path / str(index), {"w": np.full(100, index)})
        results[index] = int(read_state(tmp_path / str(index), metadata)["train"]["w"].sum())

    threads = [threading.Thread(target=round_trip, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: 100 * index for index in range(4)}


@pytest.mark.slow
def test_importing_fitflax_does_not_import_orbax(process_env):
    code = "import sys, fitflax, fitflax.checkpoints.orbax_format, fitflax.checkpoints.foreign; sys.exit('orbax.checkpoint' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=process_env, check=False).returncode == 0


# --- Damage ---


def damages(data):
    for position in {0, len(data) // 2, len(data) - 1}:
        yield "is damaged: its checksum does not match", data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
    yield "is truncated", data[:-1]
    yield "is empty", b""
    yield "is too long", data + b"\0"


def test_damage_to_any_file_is_an_error_that_names_it(tmp_path):
    directory = tmp_path / "c"
    metadata = write(directory, {"w": np.ones(300), "b": np.arange(3)}, RUN)
    assert len(metadata["orbax_files"]) >= 5
    for name in metadata["orbax_files"]:
        data = (directory / name).read_bytes()
        for fault, damaged in damages(data):
            (directory / name).write_bytes(damaged)
            with pytest.raises(CorruptCheckpointError, match=f"{name} {fault}"):
                read_state(directory, metadata)
        (directory / name).unlink()
        with pytest.raises(CorruptCheckpointError, match=f"{name} is missing"):
            read_state(directory, metadata)
        (directory / name).mkdir()
        with pytest.raises(CorruptCheckpointError, match=f"{name} is missing"):
            read_state(directory, metadata)
        (directory / name).rmdir()
        (directory / name).write_bytes(data)
    read_state(directory, metadata)


def test_damage_to_the_msgpack_file_is_an_error(tmp_path):
    metadata = write(tmp_path / "c", {"w": np.ones(3), "scalar": np.float32(1)}, RUN)
    data = (tmp_path / "c" / "state.msgpack").read_bytes()
    for position in range(len(data)):
        (tmp_path / "c" / "state.msgpack").write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(CorruptCheckpointError, match=r"state\.msgpack is damaged"):
            read_state(tmp_path / "c", metadata)


@pytest.mark.parametrize("name", ["train/extra", "train/d/extra", "train/manifest.ocdbt.lock"])
def test_a_file_that_the_writer_did_not_write_is_an_error(tmp_path, name):
    metadata = write(tmp_path / "c", {"w": np.ones(3)})
    (tmp_path / "c" / name).write_bytes(b"x")
    with pytest.raises(CorruptCheckpointError, match=f"{name} does not belong to the checkpoint"):
        read_state(tmp_path / "c", metadata)


def test_a_missing_orbax_directory_is_an_error(tmp_path):
    metadata = write(tmp_path / "c", {"w": np.ones(3)})
    (tmp_path / "c" / "train").rename(tmp_path / "gone")
    with pytest.raises(CorruptCheckpointError, match=r"c/train/.* is missing"):
        read_state(tmp_path / "c", metadata)


# --- Errors ---


def test_intact_files_that_orbax_cannot_read_are_not_reported_as_damaged(tmp_path, caplog):
    metadata = write(tmp_path / "c", {"w": np.ones(3)})
    path = tmp_path / "c" / "train" / "manifest.ocdbt"
    path.write_bytes(b"another format")
    metadata["orbax_files"]["train/manifest.ocdbt"] = {"bytes": 14, "crc32": zlib.crc32(b"another format")}
    with pytest.raises(CheckpointError, match=r"Orbax could not read .*c/train: ValueError: .*manifest") as caught:
        read_state(tmp_path / "c", metadata)
    assert not isinstance(caught.value, CorruptCheckpointError)
    assert "tensorstore_spec" not in str(caught.value)
    assert caplog.records == []


@pytest.mark.parametrize("change", [{"shape": [4]}, {"dtype": "float32"}])
def test_arrays_must_have_the_shape_and_dtype_that_were_written(tmp_path, change):
    metadata = write(tmp_path / "c", {"w": np.ones(3), "v": np.ones(3)})
    metadata["orbax_arrays"]["train/w"] |= change
    with pytest.raises(CheckpointError, match=r"differently than it was written\..*: train/w\."):
        read_state(tmp_path / "c", metadata)


def test_arrays_must_be_those_that_were_written(tmp_path):
    metadata = write(tmp_path / "c", {"w": np.ones(3), "v": np.ones(3)})
    arrays = metadata["orbax_arrays"]
    for changed in ({"train/v": arrays["train/v"]}, {**arrays, "train/u": arrays["train/v"]}):
        with pytest.raises(CheckpointError, match=r"differ in shape or dtype: train/[uw]\."):
            read_state(tmp_path / "c", {**metadata, "orbax_arrays": changed})


def test_a_full_disk_is_an_os_error_and_nothing_is_logged(tmp_path, caplog):
    (tmp_path / "c").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            write_state(tmp_path / "c", *plain({"w": np.ones(100_000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG and caught.value.filename == str(tmp_path / "c" / "train")
    assert caplog.records == []
    logging.getLogger("absl").warning("as before")
    assert [record.message for record in caplog.records] == ["as before"]


def test_only_logs_of_orbax_and_of_asyncio_on_the_same_thread_are_suppressed(caplog):
    def log(name, path):
        logger = logging.getLogger(name)
        logger.handle(logger.makeRecord(name, logging.ERROR, path, 1, f"{name} {path} {threading.current_thread() is threading.main_thread()}", (), None))

    with orbax_format._without_logging():
        for name, path in (("absl", "/x/orbax/y.py"), ("absl", "/x/mine.py"), ("asyncio", "/x/tasks.py")):
            log(name, path)
            in_another_thread(functools.partial(log, name, path))
    assert [record.message for record in caplog.records] == ["absl /x/mine.py True", "absl /x/mine.py False", "asyncio /x/tasks.py False"]


def test_a_missing_directory_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_state(tmp_path / "c", *plain({"w": np.ones(1)}))


def test_a_file_in_the_way_is_an_error(tmp_path):
    (tmp_path / "train").write_text("x")
    with pytest.raises(CheckpointError, match=r"Orbax could not write .*train: ValueError: .* already exists"):
        write_state(tmp_path, *plain({"w": np.ones(1)}))


def test_processes_other_than_the_first_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(CheckpointError, match="from process 0 only, and this is process 1"):
        write_state(tmp_path, Plain({"w": np.ones(1)}, {}), Plain(None, {}))
    assert list(tmp_path.iterdir()) == []


def test_restoring_a_missing_directory_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"Orbax could not read .*nowhere: FileNotFoundError"):
        restore_numpy(tmp_path / "nowhere")


def test_arrays_that_orbax_does_not_support_must_not_be_split_between_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_format, "spans_processes", lambda leaf: isinstance(leaf, np.ndarray))
    with pytest.raises(CheckpointError, match=r"does not support the keys or dtypes of some arrays that are split between processes\..*: train/a\.b\."):
        write_state(tmp_path, Plain({"a.b": np.ones(2), "c": np.ones(2)}, {}), Plain({}, {}))
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_read_from_disk_is_not_reported_as_damaged(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error", "the file")

    metadata = write(tmp_path / "c", {"w": np.ones(3)})
    monkeypatch.setattr(orbax_format, "_crc32", fail)
    with pytest.raises(CheckpointError, match=r"^the file could not be read: Input/output error\.$") as caught:
        read_state(tmp_path / "c", metadata)
    assert not isinstance(caught.value, CorruptCheckpointError)
