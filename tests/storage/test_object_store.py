"""Checkpoints in object stores: in memory, and on servers of S3, GCS and Azure behind a proxy that injects faults."""

import collections
import contextlib
import dataclasses
import http.client
import itertools
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

import jax
import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax import __main__ as command
from fitflax.callbacks import BestCheckpoint, CSVLogger, JSONLogger, LambdaCallback, ModelCheckpoint, Profiler, TensorBoard, event_files
from fitflax.callbacks.event_files import events_of
from fitflax.checkpoints import CheckpointStore, load_inference_state
from fitflax.checkpoints.checkpoint_files import read_metadata
from fitflax.checkpoints.resume import load_checkpoint
from fitflax.errors import CallbackError, CheckpointError, CheckpointNotFoundError, ConfigError, DirectoryInUseError, FitflaxWarning
from fitflax.parallel import Sharded
from fitflax.storage import ChangedError, ObjectPath, StorageError, locate, lock, object_store, parts
from fitflax.storage.lock import Lease
from tests.storage.servers import AzuriteServer, FaultProxy, GCSServer, S3Server, Unavailable

pytest.importorskip("obstore")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 6)).astype(np.float32)
Y = RNG.normal(size=(40, 1)).astype(np.float32)
SERVERS = {"s3": S3Server, "gs": GCSServer, "az": lambda: AzuriteServer(pathlib.Path(tempfile.gettempdir()) / "fitflax-azurite")}
KINDS = ["memory", "s3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gs", "az"))]
_names = iter(range(10**6))


@pytest.fixture(scope="module")
def servers():
    """`servers(kind)`: a server and a proxy in front of it, started once."""
    with contextlib.ExitStack() as stack:
        started = {}

        def get(kind):
            if kind not in started:
                try:
                    server = stack.enter_context(SERVERS[kind]())
                except Unavailable as reason:
                    pytest.skip(str(reason))
                started[kind] = server, stack.enter_context(FaultProxy(server.endpoint))
            return started[kind]

        yield get


@dataclasses.dataclass
class Where:
    """A separate prefix in a separate bucket, as users specify it."""

    url: str
    options: dict | None
    proxy: FaultProxy | None = None

    @property
    def place(self) -> ObjectPath:
        return locate(self.url, owner="test", error=ConfigError, options=self.options)

    def names(self):
        return [info.key.removeprefix(f"{self.place.key}/") for info in self.place.objects()]

    def store(self):
        return CheckpointStore(self.url, storage_options=self.options)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Small parts, and no long waits."""
    monkeypatch.setattr(parts, "PART_BYTES", 512)
    monkeypatch.setattr(parts, "_BLOCK_BYTES", 128)
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 1.0)
    monkeypatch.setattr(lock, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(lock, "_POLL_SECONDS", 0.1)


@pytest.fixture
def where(request, servers):
    """Where a test may write in a kind of store, directly or through the proxy."""
    kind, is_faulty = request.param if isinstance(request.param, tuple) else (request.param, False)
    name = f"bucket-{next(_names)}"
    if kind == "memory":
        return Where(f"memory://{name}/runs/a", None)
    server, proxy = servers(kind)
    proxy.clear()
    url = server.create_bucket(name)
    options = proxy.through(server.storage_options, server) if is_faulty else dict(server.storage_options)
    # Short where a server does not answer on purpose, but a server on a busy machine may take seconds to answer.
    limit = "5s" if is_faulty else "60s"
    client = {**options.get("client_options", {}), "timeout": limit, "connect_timeout": limit}
    retry = {"max_retries": 2, "retry_timeout": object_store.dt.timedelta(seconds=20), "backoff": {"init_backoff": object_store.dt.timedelta(milliseconds=20)}}
    return Where(f"{url}/runs/a", {**options, "client_options": client, "retry_config": retry}, proxy)


everywhere = pytest.mark.parametrize("where", KINDS, indirect=True)
in_memory = pytest.mark.parametrize("where", ["memory"], indirect=True)
faulty = pytest.mark.parametrize("where", [("s3", True), pytest.param(("gs", True), marks=pytest.mark.slow)], indirect=True, ids=["s3", "gs"])


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(1)(nn.Dropout(0.2, deterministic=not train)(nn.relu(nn.Dense(16)(x))))


def make(parallel=None):
    trainer = fitflax.Trainer(Net(), parallel=parallel)
    trainer.compile("adam", "mse")
    return trainer


def saver(where, **options):
    return ModelCheckpoint(where.url, **{"every": fitflax.every(steps=3), "storage_options": where.options, **options})


def fit(trainer, *callbacks, stop_at=None, epochs=3, **options):
    if stop_at is not None:
        callbacks += (LambdaCallback(on_train_batch_end=lambda batch, logs: trainer.stop() if trainer.step == stop_at else None),)
    return trainer.fit(X, Y, batch_size=10, epochs=epochs, callbacks=callbacks, verbose=0, **options)


def assert_same_state(one, other):
    leaves = [jax.tree.leaves(dataclasses.replace(trainer.state, key=jax.random.key_data(trainer.state.key))) for trainer in (one, other)]
    assert all(np.array_equal(first, second) for first, second in zip(*leaves, strict=True))


# -- end to end --


@everywhere
def test_a_run_that_resumes_from_a_bucket_is_bit_for_bit_identical(where):
    whole = make()
    history = fit(whole).history
    best = BestCheckpoint(f"{where.url}/best", monitor="loss", storage_options=where.options)
    fit(make(), saver(where), best, stop_at=5)
    assert where.store().steps() == [3, 5]
    again = make()
    assert fit(again, saver(where), best, resume="auto").history == history
    assert_same_state(again, whole)
    assert where.store().steps() == [9, 12] or where.store().steps() == [6, 9, 12]
    assert where.store().best("loss", "min") is not None
    where.store().verify()
    restored = make()
    restored.build((X, Y))
    restored.restore(where.url, storage_options=where.options)
    assert_same_state(restored, whole)
    np.testing.assert_array_equal(
        load_inference_state(where.url, storage_options=where.options).params["Dense_1"]["bias"], whole.state.params["Dense_1"]["bias"]
    )
    # Nothing is left of replaced checkpoints, and the lease is released.
    assert not [key for key in where.names() if "step_00000003/" in key or ".old" in key]
    assert b'"released": true' in (where.place / lock.LEASE_FILE).read_bytes()


@everywhere
def test_a_single_checkpoint_is_saved_replaced_and_read(where):
    trainer = make()
    trainer.build((X, Y))
    place = trainer.save(where.url, storage_options=where.options)
    first = where.names()
    fit(trainer, epochs=1)
    assert trainer.save(place) == place
    second = where.names()
    assert "metadata.json" in first and first != second and len(second) == len(first)
    other = make()
    other.build((X, Y))
    other.restore(place)
    assert other.step == 4
    (place / "mine.txt").write_bytes(b"precious")
    with pytest.raises(CheckpointError, match="already exists and is not a checkpoint"):
        trainer.save(place)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["s3"], indirect=True)
def test_train_loop_and_hunt_nan_start_from_a_bucket_with_options(where):
    trainer = make()
    fit(trainer, saver(where), epochs=1)
    data = (X, Y)
    model = nn.Dense(1)
    options = {"optimizer": "adam", "loss": "mse", "data": data, "batch_size": 10, "restore_from": f"{where.url}-loop", "storage_options": where.options}
    loop = fitflax.TrainLoop(model.init, model.apply, steps=3, **options)
    keep = ModelCheckpoint(f"{where.url}-loop", storage_options=where.options)
    for checkpoint in loop:
        keep(checkpoint)
    keep.close()
    assert [checkpoint.step for checkpoint in fitflax.TrainLoop(model.init, model.apply, steps=5, **options)] == [4, 5]
    assert trainer.hunt_nan(X, Y, batch_size=10, restore_from=where.url, storage_options=where.options) is None


@pytest.mark.mostly_slow
@everywhere
def test_checkpoints_can_be_copied_between_a_bucket_and_a_local_disk(where, tmp_path):
    trainer = make()
    fit(trainer, epochs=1)
    place = trainer.save(where.url, storage_options=where.options)
    copy = tmp_path / "copy"
    copy.mkdir()
    for info in place.objects():
        (copy / info.key.rpartition("/")[2]).write_bytes(place.bucket.read(info.key)[0])
    other = make()
    other.build((X, Y))
    other.restore(copy)
    assert_same_state(other, trainer)
    local = trainer.save(tmp_path / "local")
    for path in local.iterdir():
        (place.parent / "uploaded" / path.name).write_bytes(path.read_bytes())
    other = make()
    other.build((X, Y))
    other.restore(place.parent / "uploaded")
    assert_same_state(other, trainer)


@pytest.mark.slow
@in_memory
def test_a_state_that_is_split_over_devices_is_saved_completely_and_resumed(where, devices):
    def run(*callbacks, **options):
        trainer = make(Sharded({"data": 4}, fsdp=True, fsdp_min_size=8, devices=devices(4)))
        return trainer, fit(trainer, *callbacks, **options).history

    whole, history = run()
    run(saver(where), stop_at=5)
    again, resumed = run(saver(where), resume="auto")
    assert resumed == history
    assert_same_state(again, whole)


@in_memory
def test_the_command_lists_the_checkpoints_in_a_bucket(where, capsys):
    fit(make(), saver(where), epochs=1)
    assert command.main(["checkpoints", where.url, "--verify"]) == 0
    listed = capsys.readouterr().out
    assert "4 (latest)" in listed and "ModelCheckpoint  ok" in listed


def events_in(directory):
    found = []
    for path in sorted(directory.rglob("*.tfevents.*")):
        for record in events_of(path):
            values = record.event.summary.value
            found += [(path.parent.name, value.tag, record.event.step) for value in values if not value.tag.startswith(("time/", "environment"))]
    return sorted(found)


@pytest.mark.slow
@everywhere
def test_logs_are_in_the_bucket_before_each_checkpoint_and_match_an_uninterrupted_run(where, tmp_path):
    def loggers(root, options=None):
        board = TensorBoard(f"{root}/board", every=fitflax.every(steps=2), storage_options=options)
        return CSVLogger(f"{root}/log.csv", storage_options=options), JSONLogger(f"{root}/log.jsonl", storage_options=options), board

    fit(make(), *loggers(tmp_path / "local"))
    seen = []

    def look(checkpoint):
        found = where.store().latest()
        seen.append((found, (where.place / "logs/log.csv").read_bytes().count(b"\n") if found else 0))
        return checkpoint

    def run(*callbacks, **options):
        trainer = make()
        logs = loggers(f"{where.url}/logs", where.options)
        fit(trainer, *logs, saver(where, every=fitflax.every(epochs=1)), *callbacks, **options)

    run(LambdaCallback(look, every=fitflax.every(epochs=1)), stop_at=6)
    run(LambdaCallback(look, every=fitflax.every(epochs=1)), resume="auto")
    steps_per_epoch = -(-len(X) // 10)
    assert seen[-1][0] and all(lines > found // steps_per_epoch for found, lines in seen if found)  # A header, and a row for each epoch.
    copy = tmp_path / "copy"
    for info in (where.place / "logs").objects():
        path = copy / info.key.removeprefix(f"{where.place.key}/logs/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(where.place.bucket.read(info.key)[0])
    for name in ("log.csv", "log.jsonl"):
        assert (copy / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    assert events_in(copy / "board") == events_in(tmp_path / "local/board")
    assert not list(copy.rglob("*closing*"))


def record_writes(monkeypatch):
    """Returns a list to which each write of an object adds its key."""
    written, write = [], object_store.Bucket.write

    def recorded(self, key, data, **options):
        tag = write(self, key, data, **options)
        written.append(key)
        return tag

    monkeypatch.setattr(object_store.Bucket, "write", recorded)
    return written


@in_memory
def test_a_loop_without_a_trainer_uploads_logs_before_each_checkpoint_and_at_its_end(where, monkeypatch, tmp_path):
    model = nn.Dense(1)
    loop = fitflax.TrainLoop(model.init, model.apply, optimizer="adam", loss="mse", data=(X, Y), batch_size=10, steps=7)
    written = record_writes(monkeypatch)
    board, keep = TensorBoard(f"{where.url}/board", every=fitflax.every(steps=1)), saver(where, asynchronous=False)
    with contextlib.closing(fitflax.serial(board, keep)) as process:
        for checkpoint in loop:
            process(checkpoint)
        for info in (where.place / "board").objects():  # Before the callbacks are closed.
            (tmp_path / info.key.rpartition("/")[2]).write_bytes(where.place.bucket.read(info.key)[0])
    kinds = ["board" if "/board/" in key else "commit" for key in written if "/board/" in key or key.endswith("/metadata.json")]
    commits = [index for index, kind in enumerate(kinds) if kind == "commit"]
    assert len(commits) >= 2 and kinds[0] == "board" and all(kinds[index - 1] == "board" for index in commits)
    assert max(step for _, _, step in events_in(tmp_path)) == 7


@in_memory
@pytest.mark.parametrize("name", ["board", "log.csv"])
def test_steps_continue_while_logs_are_uploaded_and_the_checkpoint_is_completed_after_them(name, where, monkeypatch):
    is_released, write = threading.Event(), object_store.Bucket.write

    def write_slowly(self, key, data, **options):
        if "/logs/" in key:
            assert is_released.wait(120)
        return write(self, key, data, **options)

    def release(batch, logs):
        if trainer.step == 6:  # The epoch and the checkpoint at step 4 are over.
            seen.append(where.store().steps())
            is_released.set()

    monkeypatch.setattr(object_store.Bucket, "write", write_slowly)
    written, seen, trainer = record_writes(monkeypatch), [], make()
    url = f"{where.url}/logs/{name}"
    logger = CSVLogger(url) if name == "log.csv" else TensorBoard(url, every=fitflax.every(steps=4))
    best = BestCheckpoint(f"{where.url}/best", monitor="loss")
    fit(trainer, logger, best, saver(where, every=fitflax.every(steps=4)), LambdaCallback(on_train_batch_end=release))
    assert seen == [[]] and where.store().steps()
    first = next(index for index, key in enumerate(written) if key.endswith("/metadata.json"))
    assert {key.split("/logs/")[1].partition("/")[0] for key in written[:first] if "/logs/" in key} == {name}


@in_memory
def test_rows_that_are_added_during_an_upload_are_uploaded_together(where, monkeypatch):
    is_released, write, log = threading.Event(), object_store.Bucket.write, CSVLogger(f"{where.url}/log.csv")

    def write_slowly(self, key, data, **options):
        assert is_released.wait(120)
        return write(self, key, data, **options)

    monkeypatch.setattr(object_store.Bucket, "write", write_slowly)
    written = record_writes(monkeypatch)
    for epoch in range(4):
        log.on_epoch_end(epoch, {"loss": 0.5})
    wait = log.sync()
    is_released.set()
    wait()
    assert (where.place / "log.csv").read_bytes().count(b"\n") == 5 and len(written) <= 2
    log.close()


@in_memory
def test_a_checkpoint_has_the_state_of_loggers_after_all_earlier_events(where, monkeypatch):
    write = event_files.EventFiles._write

    def write_slowly(self, *arguments):
        time.sleep(0.2)
        write(self, *arguments)

    monkeypatch.setattr(event_files.EventFiles, "_write", write_slowly)
    fit(make(), TensorBoard(f"{where.url}/board", every=fitflax.every(steps=4)), saver(where, every=fitflax.every(steps=4)), epochs=1)
    step, *tags = load_checkpoint(where.store().path(4)).run["callbacks"]["TensorBoard(directory='board')"]["written"]
    assert step == 4 and "loss" in tags


@faulty
@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_checkpoint_is_saved_although_its_logs_cannot_be_uploaded(where, asynchronous):
    def break_it(batch, logs):
        if trainer.step == 3:
            where.proxy.fail(lambda method, path: method == "PUT" and "board" in path, status=403, times=None)

    trainer = make()
    board = TensorBoard(f"{where.url}/board", every=fitflax.every(steps=2), storage_options=where.options)
    with pytest.raises(CallbackError, match=r"(?s)TensorBoard.*Check the credentials"):
        fit(trainer, board, saver(where, asynchronous=asynchronous), LambdaCallback(on_train_batch_end=break_it))
    where.proxy.clear()
    assert where.store().latest() == trainer.step


@in_memory
def test_a_loop_without_a_trainer_raises_if_its_last_logs_cannot_be_uploaded(where, monkeypatch):
    def fail(self, key, data, **options):
        raise StorageError("unwritable")

    monkeypatch.setattr(object_store.Bucket, "write", fail)
    loop = fitflax.TrainLoop(nn.Dense(1).init, nn.Dense(1).apply, optimizer="adam", loss="mse", data=(X, Y), batch_size=10, steps=2)
    board = TensorBoard(f"{where.url}/board", every=fitflax.every(steps=1))
    with pytest.raises(CallbackError, match=r"TensorBoard cannot write event files in memory://.*unwritable"):
        for checkpoint in loop:
            board(checkpoint)
    monkeypatch.undo()
    board.close()


@pytest.mark.slow
@in_memory
def test_a_profile_and_an_exported_model_are_written_to_a_bucket(where):
    pytest.importorskip("flatbuffers")
    trainer = make()
    fit(trainer, Profiler(f"{where.url}/profile", steps=(2, 3)))
    assert any(name.startswith("profile/plugins/profile/") for name in where.names())
    path = trainer.export(f"{where.url}/model.jaxexport")
    run = jax.export.deserialize(bytearray(path.read_bytes())).call
    np.testing.assert_allclose(run(X), trainer.predict(X), rtol=1e-5, atol=1e-6)


@faulty
@pytest.mark.mostly_slow
def test_a_logger_raises_if_its_bucket_fails(where):
    for logger, name in ((CSVLogger, "log.csv"), (TensorBoard, "board")):
        trainer = make()

        def break_it(batch, logs, trainer=trainer):
            if trainer.step == 4:
                where.proxy.fail(lambda method, path: method == "PUT", status=403, times=None)

        with pytest.raises(CallbackError, match=f"(?s){logger.__name__}.*Check the credentials"):
            fit(trainer, logger(f"{where.url}/{name}", storage_options=where.options), LambdaCallback(on_train_batch_end=break_it))
        where.proxy.clear()


def requests_of(log):
    """Returns the number of requests by kind, without those of leases."""
    kinds = {"GET": "LIST", "POST": "DELETE"}
    return collections.Counter(
        kinds.get(method, method) if "list-type" in path or method == "POST" else method for method, path, _ in log if lock.LEASE_FILE not in path
    )


@pytest.mark.parametrize("where", [("s3", True)], indirect=True, ids=["s3"])
def test_the_guide_gives_the_number_of_requests(where):
    guide = pathlib.Path(__file__).parents[2].joinpath("docs/how-to/save-to-object-storage.md").read_text(encoding="utf-8")
    store = where.store()
    store.claim("a", overwrite=False)
    for step in (1, 2, 3):
        where.proxy.clear()
        store.save(step=step, train={"w": np.ones(1000, np.float32)}, run={}, metadata={"run_id": "a"}, owner="me", keep=[step - 1])
    sent, num_parts = requests_of(where.proxy.log), sum("step_00000003/state-" in name for name in where.names())
    assert store.steps() == [2, 3]
    assert f"| *n* + {sent['PUT'] - num_parts} PUT, {sent['LIST']} LIST, {sent['HEAD']} HEAD, {sent['DELETE']} DELETE |" in guide
    where.proxy.clear()
    load_checkpoint(store.path(3), storage_options=where.options)
    sent, num_blocks = requests_of(where.proxy.log), -(-read_metadata(store.path(3))["state_bytes"] // parts._BLOCK_BYTES)
    assert f"| {sent['HEAD']} HEAD, {sent['LIST']} LIST, {sent['GET'] - num_blocks} GET, and 1 GET for each 32 MiB |" in guide


# -- damage and leftovers --

DAMAGES = {
    "a byte flipped": (lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]), "state", "damaged"),
    "a part missing": (lambda path: path.unlink(), "state", "is missing"),
    "a part truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "state", "is truncated"),
    "a part too long": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "state", "is too long"),
    "the commit flipped": (lambda path: path.write_bytes(path.read_bytes().replace(b'"step": ', b'"stop": ', 1)), "metadata", "checksum does not match"),
    "the commit empty": (lambda path: path.write_bytes(b""), "metadata", "is empty"),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("where", ["memory", "s3"], indirect=True)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped(where, damage):
    act, which, fault = DAMAGES[damage]
    fit(make(), saver(where), stop_at=5)
    path = next(where.place / key for key in where.names() if key.startswith(f"step_00000005/{which}"))
    act(path)
    with pytest.raises(CheckpointError, match=fault):
        where.store().restore(5)
    whole, again = make(), make()
    fit(whole)
    with pytest.warns(FitflaxWarning, match=f"skipped .*: step_00000005: .*{fault}"):
        fit(again, saver(where), resume="auto")
    assert_same_state(again, whole)


@in_memory
def test_uploads_without_a_commit_are_never_listed_and_are_removed_by_the_next_run(where):
    fit(make(), saver(where), stop_at=5)
    for step in (5, 6):
        (where.place / f"step_{step:08d}" / "state-00000000.00000").write_bytes(b"half")
    (where.place / "step_00000005" / "note.txt").write_bytes(b"somebody else's")
    assert where.store().steps() == [3, 5]
    fit(make(), saver(where), resume="auto", epochs=2)
    assert not [key for key in where.names() if "00000000." in key]
    assert "step_00000005/note.txt" in where.names()


@in_memory
def test_another_run_is_set_aside_and_deleted_once_the_new_one_has_saved(where):
    fit(make(), saver(where), epochs=1)
    with pytest.raises(DirectoryInUseError, match="holds checkpoints of run"):
        fit(make(), saver(where), epochs=1)
    store = where.store()
    store.claim("new", overwrite=True)
    assert store.steps() == [] and read_metadata(where.place / "step_00000004")["step"] == 4
    store.recover()
    assert store.steps() == [3, 4]  # Nothing has replaced it.
    fit(make(), saver(where, overwrite=True), epochs=1)
    assert where.store().steps() == [3, 4] and not [key for key in where.names() if ".old" in key]


@pytest.mark.slow
@in_memory
def test_checkpoints_beyond_the_resumed_step_are_replaced(where):
    fit(make(), saver(where, keep=None))
    path = where.store().path(6)
    whole, again = make(), make()
    fit(whole)
    fit(again, saver(where, keep=None), resume=path)
    assert where.store().steps() == [3, 6, 9, 12] and not [key for key in where.names() if ".old" in key]
    assert_same_state(again, whole)


# -- conditional writes --


@everywhere
def test_the_second_of_two_concurrent_writes_raises(where):
    bucket, key = where.place.bucket, f"{where.place.key}/note"
    tag = bucket.write(key, b"one", create=True)
    assert bucket.write(key, b"one", create=True) == tag  # The object already holds what is to be written.
    with pytest.raises(ChangedError, match="written by another process or run"):
        bucket.write(key, b"two", create=True)
    new = bucket.write(key, b"two", tag=tag)
    with pytest.raises(ChangedError):
        bucket.write(key, b"three", tag=tag)
    assert bucket.read(key) == (b"two", new)
    bucket.delete([key, f"{key}-that-is-not-there"])
    assert bucket.info(key) is None and bucket.is_empty(f"{where.place.key}/")
    with pytest.raises(FileNotFoundError):
        bucket.read(key)


@in_memory
def test_a_checkpoint_that_another_run_commits_during_a_save_is_an_error(where, monkeypatch):
    store = where.store()
    store.claim("a", overwrite=False)
    place, write = store.path(3), object_store.Bucket.write

    def slow(self, key, data, **options):
        if key.endswith("step_00000003/metadata.json") and options.get("create"):
            write(self, key, b"{}")
        return write(self, key, data, **options)

    monkeypatch.setattr(object_store.Bucket, "write", slow)
    with pytest.raises(DirectoryInUseError, match="Another run saved"):
        store.save(step=3, train={"w": np.ones(3)}, run={}, metadata={"run_id": "a"}, owner="me", keep=[])
    assert [info.key.rpartition("/")[2] for info in place.objects()] == ["metadata.json"]


# -- the lease --


@pytest.mark.mostly_slow
@everywhere
def test_two_runs_cannot_use_one_prefix_and_a_dead_run_blocks_it_only_briefly(where, monkeypatch):
    here = Lease(where.place)
    here.acquire()
    with pytest.raises(DirectoryInUseError, match="is in use by another run in this process"):
        Lease(where.place).acquire()
    here.release()
    with monkeypatch.context() as patch:
        patch.setattr(lock, "_machine", lambda: "another")
        far = Lease(where.place)
    far.acquire()
    lock._LIVE.discard(far._id)  # As if it were in another process.
    with pytest.warns(FitflaxWarning, match="Waiting up to 1 s"), pytest.raises(DirectoryInUseError, match="is in use by process"):
        Lease(where.place).acquire()  # It is renewed meanwhile.
    far._end.put(None)  # Dies.
    far._thread.join()
    second = Lease(where.place)
    with pytest.warns(FitflaxWarning, match="was in use by process"):
        second.acquire()
    monkeypatch.setattr(lock, "LEASE_SECONDS", 0.0)
    with pytest.raises(DirectoryInUseError, match="was taken over by"):
        far.check()
    far.release()
    second.check()
    second.release()
    assert where.names() == [".lease.json"]


@in_memory
def test_a_killed_process_on_the_same_machine_is_recognized_as_dead(where, monkeypatch):
    first = Lease(where.place)
    first.acquire()
    first._end.put(None)
    lock._LIVE.discard(first._id)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("the second process waited for the lease to expire"))
    second = Lease(where.place)
    second.acquire()
    second.release()


@in_memory
def test_a_zombie_counts_as_dead_and_a_live_process_on_this_machine_as_running(where):
    child = subprocess.Popen([sys.executable, "-c", ""])
    stat = pathlib.Path(f"/proc/{child.pid}/stat")
    end = time.monotonic() + 20
    while stat.exists() and ") Z" not in stat.read_text() and time.monotonic() < end:
        time.sleep(0.01)
    note = {"pid": child.pid, "start": "12345"}
    assert not lock._is_running(note)
    child.wait()
    assert not lock._is_running(note)
    assert lock._is_running({"pid": os.getppid(), "start": lock._start_of(os.getppid())})
    assert not lock._is_running({"pid": os.getppid(), "start": "1"})  # Another process has this number now.


@in_memory
def test_if_the_lease_is_lost_during_an_upload_nothing_is_committed_or_deleted(where, monkeypatch):
    store, other = where.store(), where.store()
    store.claim("a", overwrite=False)
    save = {"train": {"w": np.ones(3)}, "run": {}, "metadata": {"run_id": "a"}, "owner": "me", "keep": []}
    store.save(step=5, **save)
    write = object_store.Bucket.write

    def slow(self, key, data, **options):
        tag = write(self, key, data, **options)
        if "/step_00000010/state-" in key:  # Meanwhile, another run assumes that this one is dead.
            write(self, f"{where.place.key}/{lock.LEASE_FILE}", b'{"id": "b", "pid": 1, "host": "far"}')
            monkeypatch.setattr(lock, "LEASE_SECONDS", 0.0)
            for name in ("state-bbbbbbbb.00000", "metadata.json"):  # It may also complete the same step.
                write(self, f"{where.place.key}/step_00000010/{name}", b"of the other run")
        return tag

    monkeypatch.setattr(object_store.Bucket, "write", slow)
    with pytest.raises(DirectoryInUseError, match="taken over by process 1 on far"):
        store.save(step=10, **save)
    assert sorted(name for name in where.names() if "step_00000010" in name) == ["step_00000010/metadata.json", "step_00000010/state-bbbbbbbb.00000"]
    for act in (lambda: store.retain("me", []), lambda: store.drop_after(1)):
        with pytest.raises(DirectoryInUseError, match="taken over"):
            act()
    assert other.steps() == [5, 10] and other.restore(5).metadata["step"] == 5


@in_memory
def test_if_another_run_removes_parts_the_good_checkpoints_are_kept(where, monkeypatch):
    store = where.store()
    store.claim("a", overwrite=False)
    save = {"train": {"w": np.ones(3)}, "run": {}, "metadata": {"run_id": "a"}, "owner": "me", "keep": []}
    store.save(step=5, **save)
    write = object_store.Bucket.write

    def slow(self, key, data, **options):
        if key.endswith("step_00000010/metadata.json"):
            self.delete([info.key for info in (where.place / "step_00000010").objects()])
        return write(self, key, data, **options)

    monkeypatch.setattr(object_store.Bucket, "write", slow)
    with pytest.raises(DirectoryInUseError, match="removed parts"):
        store.save(step=10, **save)
    assert where.store().newest_good()[0].metadata["step"] == 5


@faulty
def test_a_commit_with_an_unknown_outcome_keeps_its_parts(where):
    store = where.store()
    store.claim("a", overwrite=False)
    where.proxy.swallow_response(is_commit, times=1)
    where.proxy.fail(lambda method, path: method == "GET" and urllib.parse.unquote(path).endswith("metadata.json"), status=403, times=None)
    with pytest.raises(CheckpointError, match="It is not known whether it was written"):
        store.save(step=3, train={"w": np.ones(3)}, run={}, metadata={"run_id": "a"}, owner="me", keep=[])
    where.proxy.clear()
    assert where.store().restore(3).train["w"].tolist() == [1, 1, 1]


@pytest.mark.slow
@in_memory
def test_the_root_of_a_bucket_can_be_the_directory(where):
    root = Where(where.url.rpartition("/runs")[0], None)
    whole, again = make(), make()
    fit(whole)
    fit(make(), saver(root), stop_at=5)
    fit(again, saver(root), resume="auto")
    assert_same_state(again, whole)
    assert root.store().steps() == [6, 9, 12]
    assert make_and_save(root.url + "/saved")


def make_and_save(url):
    trainer = make()
    trainer.build((X, Y))
    return trainer.save(url).is_dir()


@in_memory
def test_the_closing_file_of_a_replaced_checkpoint_is_removed(where):
    fit(make(), saver(where), stop_at=5)
    assert "step_00000005/closing.json" in where.names()
    store = where.store()
    store.claim("b", overwrite=True)
    store.save(step=5, train={"w": np.ones(3)}, run={}, metadata={"run_id": "b"}, owner="me", keep=[])
    assert "step_00000005/closing.json" not in where.names()


@in_memory
def test_releasing_a_lease_does_not_hold_the_guard_of_locks(where):
    """A heartbeat during which garbage is collected may need the guard while its lease is being released."""

    class Holder:
        pass

    holder = Holder()
    lock.lock_directory(where.place, holder)
    held = lock._TABLE[str(where.place)].lock
    released = held.release

    def release():
        taken = threading.Thread(target=lambda: lock._GUARD.acquire() and lock._GUARD.release())
        taken.start()
        taken.join(5)
        assert not taken.is_alive()
        released()

    held.release = release
    lock.release_all(holder)
    assert lock.holder_of(where.place) is None


@in_memory
def test_a_lease_whose_thread_cannot_be_started_does_not_block_the_next_run(where, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start new thread"):
        patch.setattr(threading.Thread, "start", fail)
        Lease(where.place).acquire()
    lease = Lease(where.place)
    lease.acquire()
    lease.release()


@pytest.mark.slow
def test_a_save_that_is_in_progress_when_the_process_ends_is_completed(servers, process_env):
    script = """
import numpy as np, fitflax
from flax import linen as nn
from fitflax.callbacks import ModelCheckpoint
trainer = fitflax.Trainer(nn.Dense(1))
trainer.compile("sgd", "mse")
saver = ModelCheckpoint("s3://BUCKET/run")
for checkpoint in trainer.train_loop(np.ones((8, 2)), np.ones((8, 1)), steps=10, every=fitflax.every(steps=5)):
    saver(checkpoint)
    break
"""
    server, _ = servers("s3")
    url = server.create_bucket("bucket-at-exit")
    script = script.replace("s3://BUCKET", url)
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], env=process_env | server.environment, check=True, timeout=100)
    assert CheckpointStore(f"{url}/run", storage_options=server.storage_options).steps() == [5]


@in_memory
def test_a_run_whose_lease_was_taken_over_saves_nothing_more(where, monkeypatch):
    trainer = make()

    def steal(batch, logs):
        if trainer.step == 4:
            (where.place / lock.LEASE_FILE).write_bytes(b'{"id": "another", "pid": 1, "host": "far"}')
            monkeypatch.setattr(lock, "LEASE_SECONDS", 0.0)

    with pytest.raises(DirectoryInUseError, match="taken over by process 1 on far"):
        fit(trainer, saver(where, asynchronous=False, on_save_error="warn"), LambdaCallback(on_train_batch_end=steal))
    assert where.store().steps() == [3]
    assert b"another" in (where.place / lock.LEASE_FILE).read_bytes()


# -- faults --


def is_part(method, path):
    return method == "PUT" and "/state-" in urllib.parse.unquote(path)


def is_commit(method, path):
    return method == "PUT" and urllib.parse.unquote(path).partition("?")[0].endswith("/metadata.json")


TRANSIENT = {
    "503 for a part": lambda proxy: proxy.fail(is_part, status=503, times=2),
    "429 for a commit": lambda proxy: proxy.fail(is_commit, status=429, times=2),
    "500 for a listing": lambda proxy: proxy.fail(lambda method, path: method == "GET" and "list-type" in path, status=500, times=2),
    "reset in the middle of a part": lambda proxy: proxy.reset(is_part, after_bytes=100, times=3),
    "reset in the middle of a commit": lambda proxy: proxy.reset(is_commit, after_bytes=100, times=2),
    "the answer to a part lost": lambda proxy: proxy.swallow_response(is_part, times=2),
    "the answer to a commit lost": lambda proxy: proxy.swallow_response(is_commit, times=1),
    "the answer to a commit lost by a reset": lambda proxy: proxy.swallow_response(is_commit, reset=True, times=1),
    "a delete lost": lambda proxy: proxy.swallow_response(lambda method, path: method in ("DELETE", "POST"), times=1),
    "reset while reading": lambda proxy: proxy.reset_response(
        lambda method, path: method == "GET" and "/state-" in urllib.parse.unquote(path), after_bytes=64, times=3
    ),
}


@faulty
@pytest.mark.parametrize("fault", TRANSIENT)
@pytest.mark.mostly_slow
def test_a_transient_fault_has_no_effect(where, fault, monkeypatch):
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 10.0)
    whole, again = make(), make()
    history = fit(whole).history
    TRANSIENT[fault](where.proxy)
    fit(make(), saver(where), stop_at=5)
    assert fit(again, saver(where), resume="auto").history == history
    assert_same_state(again, whole)
    where.store().verify()
    assert where.store().steps()[-1] == 12


def with_timeout(where, limit):
    """Returns the same place, for a client that waits `limit` for an answer."""
    return dataclasses.replace(where, options={**where.options, "client_options": {**where.options["client_options"], "timeout": limit}})


@pytest.mark.parametrize("where", [("s3", True)], indirect=True, ids=["s3"])
def test_a_large_object_is_uploaded_in_parts_and_a_failed_upload_leaves_none(where, monkeypatch):
    monkeypatch.setattr(object_store, "_MAX_PUT_BYTES", 1000)
    monkeypatch.setattr(object_store, "_PART_BYTES", 5 * 2**20)  # The minimum of S3.
    path, data = where.place / "model.safetensors", bytes(range(256)) * (6 * 2**12)
    where.proxy.fail(lambda method, path: method == "PUT" and "partNumber=2" in path, status=403)
    with pytest.raises(StorageError, match="Check the credentials"):
        path.write_bytes(data)
    assert not path.exists() and any(method == "DELETE" and "uploadId=" in path and status == 204 for method, path, status in where.proxy.log)
    where.proxy.clear()
    path.write_bytes(data)
    assert path.read_bytes() == data
    requests = [(method, urllib.parse.parse_qs(path.partition("?")[2])) for method, path, _ in where.proxy.log]
    (completed,) = [query["uploadId"] for method, query in requests if method == "POST" and "uploadId" in query]
    # A part of the failed upload may be answered after `clear`.
    assert sorted(query["partNumber"] for method, query in requests if method == "PUT" and query["uploadId"] == completed) == [["1"], ["2"]]


@pytest.mark.parametrize("where", [("s3", True)], indirect=True, ids=["s3"])
@pytest.mark.parametrize("seconds", [object_store.RETRY_SECONDS, 0.0])
def test_a_large_object_is_uploaded_again_if_the_store_has_forgotten_a_completed_upload(seconds, where, monkeypatch):
    """The response to the request that completes the upload is lost. obstore repeats the request, and some stores report that the upload does not exist."""
    monkeypatch.setattr(object_store, "_MAX_PUT_BYTES", 1000)
    monkeypatch.setattr(object_store, "RETRY_SECONDS", seconds)  # 0: the upload took longer than the limit.
    path = where.place / "model.safetensors"

    def completes(method, path):
        return method == "POST" and "uploadId=" in path

    where.proxy.swallow_response(completes, times=1)
    where.proxy.fail(completes, status=404, body=b"<Error><Code>NoSuchUpload</Code><Message>The upload does not exist.</Message></Error>", times=1)
    path.write_bytes(bytes(2000))
    assert path.read_bytes() == bytes(2000)
    assert [status for method, path, status in where.proxy.log if completes(method, path)] == [200, 404, 200]


@pytest.mark.parametrize("where", [("s3", True)], indirect=True, ids=["s3"])
def test_a_large_object_whose_upload_took_longer_than_the_limit_is_uploaded_again_only_once(where, monkeypatch):
    monkeypatch.setattr(object_store, "_MAX_PUT_BYTES", 1000)
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 0.0)

    def completes(method, path):
        return method == "POST" and "uploadId=" in path

    where.proxy.fail(completes, status=404, body=b"<Error><Code>NoSuchUpload</Code><Message>The upload does not exist.</Message></Error>", times=2)
    with pytest.raises(StorageError, match="Could not write") as caught:
        (where.place / "model.safetensors").write_bytes(bytes(2000))
    assert "the bucket does not exist" not in str(caught.value)
    assert [status for method, path, status in where.proxy.log if completes(method, path)] == [404, 404]


SLOW = {"a part": is_part, "a commit": is_commit, "a listing": lambda method, path: method == "GET" and "list-type" in path}


@faulty
@pytest.mark.parametrize("what", SLOW)
@pytest.mark.mostly_slow
def test_a_request_that_is_not_answered_in_time_is_sent_again(where, what, monkeypatch):
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 20.0)
    paths = []

    def is_first(method, path):
        if SLOW[what](method, path):
            paths.append(path)
        return len(paths) == 1 and SLOW[what](method, path)

    where.proxy.delay(30.0, is_first, times=None)
    fit(make(), saver(with_timeout(where, "1.5s")), stop_at=5)
    where.store().verify()
    assert where.store().steps() == [3, 5] and paths.count(paths[0]) > 1


PERSISTENT = {
    "503": (lambda proxy, match: proxy.fail(match, status=503, times=None), "503 Service Unavailable"),
    "403": (lambda proxy, match: proxy.fail(match, status=403, times=None), "Check the credentials"),
    "401": (lambda proxy, match: proxy.fail(match, status=401, times=None), "Check the credentials"),
    "an expired token": (
        lambda proxy, match: proxy.fail(
            match, status=400, body=b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>", times=None
        ),
        "ExpiredToken: The token has expired. Check the credentials",
    ),
    "resets": (lambda proxy, match: proxy.reset(match, after_bytes=10, times=None), "error sending request"),
    "no answers": (lambda proxy, match: proxy.delay(60.0, match, times=None), "error sending request: no answer in time"),
}


@faulty
@pytest.mark.parametrize("fault", PERSISTENT)
@pytest.mark.parametrize("match", [is_part, is_commit], ids=["part", "commit"])
@pytest.mark.slow
def test_a_persistent_fault_ends_the_run_and_earlier_checkpoints_stay_intact(where, fault, match):
    act, text = PERSISTENT[fault]
    trainer = make()

    def break_it(batch, logs):
        if trainer.step == 4:
            act(where.proxy, match)

    impatient = with_timeout(where, "1s" if fault == "no answers" else "5s")
    with pytest.raises(CheckpointError, match=f"(?s)Could not save {where.url}/step_.*{text}.*intact"):
        fit(trainer, saver(impatient, asynchronous=False), LambdaCallback(on_train_batch_end=break_it))
    where.proxy.clear()
    assert where.store().steps() == [3]
    where.store().verify()
    whole, again = make(), make()
    fit(whole)
    fit(again, saver(where), resume="auto")
    assert_same_state(again, whole)
    assert where.store().steps() == [6, 9, 12]


@faulty
@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
@pytest.mark.mostly_slow
def test_an_asynchronous_save_that_fails_is_reported_at_the_next_save(where, on_save_error):
    trainer, keep = make(), saver(where, on_save_error=on_save_error)

    def break_it(batch, logs):
        if trainer.step in (5, 8):
            keep._saver._thread.wait_until(lambda: keep._saver.is_idle)
            where.proxy.clear()
        if trainer.step == 5:
            where.proxy.fail(is_part, status=503, times=None)

    reported = pytest.warns(FitflaxWarning, match="Training continues without it") if on_save_error == "warn" else contextlib.nullcontext()
    failed = pytest.raises(CheckpointError) if on_save_error == "raise" else contextlib.nullcontext()
    with reported, failed as caught:
        fit(trainer, keep, LambdaCallback(on_train_batch_end=break_it))
    # The save in which the failure is reported is made synchronously, and succeeds.
    assert where.store().steps() == ([3, 9] if on_save_error == "raise" else [3, 9, 12])
    where.store().verify()
    assert caught is None or re.search(f"(?s)Could not save {where.url}/step_00000006: .*503 Service Unavailable.*intact", str(caught.value))
    whole, again = make(), make()
    fit(whole)
    fit(again, saver(where), resume="auto")
    assert_same_state(again, whole)


@faulty
@pytest.mark.slow
def test_a_run_can_continue_without_its_checkpoints(where):
    trainer = make()

    def break_it(batch, logs):
        if trainer.step == 4:
            where.proxy.fail(is_part, status=503, times=None)
        if trainer.step == 9:
            where.proxy.clear()

    with pytest.warns(FitflaxWarning, match=r"Training continues without it. Could not save .*step_0000000\d.*503"):
        fit(trainer, saver(where, on_save_error="warn", asynchronous=False), LambdaCallback(on_train_batch_end=break_it))
    assert trainer.step == 12 and where.store().steps() == [3, 9, 12]  # After a failure nothing is deleted.
    with pytest.raises(CallbackError, match="must be 'raise' or 'warn'"):
        ModelCheckpoint("x", on_save_error="ignore")


@faulty
@pytest.mark.mostly_slow
def test_errors_name_a_missing_bucket_and_a_missing_run(where):
    missing = f"{where.url.partition('://')[0]}://no-such-bucket/run"
    with pytest.raises(CheckpointError, match=r"no-such-bucket.*the bucket does not exist"):
        fit(make(), ModelCheckpoint(missing, storage_options=where.options))
    with pytest.raises(CheckpointNotFoundError, match=f"There is no checkpoint in {where.url}/nothing"):
        make().restore(f"{where.url}/nothing", storage_options=where.options)


def allow_unknown_keys(server, is_allowed):
    """Makes moto accept or refuse access keys that it has not issued."""
    connection = http.client.HTTPConnection(server.endpoint.removeprefix("http://"), timeout=60)
    connection.request("POST", "/moto-api/reset-auth", body="inf" if is_allowed else "0")
    assert connection.getresponse().status == 200
    connection.close()


SAVERS = {
    "a checkpoint": lambda url, options: ModelCheckpoint(url, storage_options=options),
    "a table": lambda url, options: CSVLogger(f"{url}/log.csv", storage_options=options),
    "event files": lambda url, options: TensorBoard(url, storage_options=options),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("where", [("s3", True)], indirect=True, ids=["s3"])
@pytest.mark.parametrize(("which", "refusal"), [*itertools.product(SAVERS, ("wrong credentials", "a missing bucket")), ("a checkpoint", "a read-only bucket")])
def test_a_store_that_refuses_is_one_error_before_the_first_step(where, servers, which, refusal):
    steps, url, server = [], where.url, servers("s3")[0]
    if refusal == "wrong credentials":
        allow_unknown_keys(server, False)
    elif refusal == "a missing bucket":
        url = "s3://no-such-bucket/run"
    else:
        where.proxy.fail(lambda method, path: method in ("PUT", "POST", "DELETE"), status=403, times=None)
    text = "the bucket does not exist" if refusal == "a missing bucket" else "Check the credentials"
    try:
        with pytest.raises((CheckpointError, CallbackError), match=rf"^.*{url}.*{text}.*$"):
            fit(make(), SAVERS[which](url, where.options), LambdaCallback(on_train_batch_begin=lambda batch, logs: steps.append(batch)))
    finally:
        allow_unknown_keys(server, True)
    assert not steps
    assert sum(status == 403 for _, _, status in where.proxy.log) <= 1  # A refused request is not repeated.


def test_unsupported_backends_options_and_urls_are_errors():
    with pytest.raises(CheckpointError, match="backend='orbax' writes only to file systems"):
        ModelCheckpoint("memory://x/run", backend="orbax")
    with pytest.raises(ConfigError, match=r"s3://bucket cannot be used with storage_options=\['no_such_option'\]"):
        ModelCheckpoint("s3://bucket/run", storage_options={"no_such_option": "1"})
    for url in ("s3://", "s3:///run", "s3://bucket/a//b", "s3://bucket/../x"):
        with pytest.raises(CheckpointError, match="takes a URL of the form s3://bucket/prefix"):
            ModelCheckpoint(url)
    with pytest.raises(CheckpointError, match="Pass it as a string: s3://bucket/run"):
        ModelCheckpoint(pathlib.Path("s3://bucket/run"))


@everywhere
def test_callbacks_can_be_pickled(where):
    fit(make(), pickle.loads(pickle.dumps(saver(where))), pickle.loads(pickle.dumps(CSVLogger(f"{where.url}/log.csv", storage_options=where.options))))
    assert pickle.loads(pickle.dumps(where.store())).latest() == 12


def test_a_storage_error_is_an_oserror_with_its_text():
    assert str(StorageError("text")) == "text" and isinstance(StorageError("text"), OSError)
