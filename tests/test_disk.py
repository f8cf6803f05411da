"""Disk trouble during a run, through the public API: a clear error, intact earlier checkpoints, and a next start that resumes bit for bit without litter.

The trouble is real where possible: process limits, directories that are moved away, separate file systems. The tests of the store and of the writers cover
what each single call to the disk may do.
"""

import contextlib
import errno
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import pytest

import fitflax
from fitflax.callbacks import BestCheckpoint, CSVLogger, LambdaCallback, ModelCheckpoint, TensorBoard
from fitflax.callbacks.event_files import events_of
from fitflax.checkpoints import CheckpointStore, saver
from fitflax.errors import CallbackError, CheckpointError, DirectoryInUseError, FitflaxError, FitflaxWarning
from tests.run_script import TRAIN, VALID, at, differences, directory_of, make_trainer, rows_of, state_of, steps_in

NEWEST = 12


def start(
    root: pathlib.Path, *callbacks: Any, asynchronous: bool = True, trainer: fitflax.Trainer | None = None, writers: bool = True
) -> tuple[fitflax.Trainer, fitflax.History]:
    """Runs the same script again: it saves at every step, and writes everything that a run can write."""
    trainer = trainer or make_trainer()
    files = [
        ModelCheckpoint(root / "checkpoints", every=fitflax.every(steps=1), asynchronous=asynchronous),
        BestCheckpoint(root / "best", asynchronous=asynchronous),
        CSVLogger(root / "log.csv"),
    ]
    options = {"validation_data": VALID, "resume": "auto", "callbacks": [*(files if writers else files[:1]), *callbacks]}
    return trainer, trainer.fit(TRAIN, batch_size=4, steps=NEWEST, verbose=0, **options)


@contextlib.contextmanager
def another_process() -> Iterator[None]:
    """Makes this process look like another one, which did not write what is on the disk."""
    modules = [module for name, module in sys.modules.items() if name.startswith("fitflax.") and hasattr(module, "PROCESS")]
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "PROCESS", "0123abcd")
        yield


def start_again(root: pathlib.Path, *callbacks: Any, **options: Any) -> dict[str, Any]:
    """Runs the script to its end as a new process would, and returns the result of `everything`."""
    with another_process():
        return everything(root, *start(root, *callbacks, **options))


def leftovers(directory: pathlib.Path) -> list[str]:
    """Returns what is in a checkpoint directory besides checkpoints and the files of the run."""
    run_files = {".run.json", ".lock", "retention.json"}
    return sorted(entry.name for entry in directory.iterdir() if entry.name not in run_files and not entry.name.startswith("step_"))


def everything(root: pathlib.Path, trainer: fitflax.Trainer, history: fitflax.History) -> dict[str, Any]:
    """Returns what two runs must have in common at their end."""
    return {
        "state": state_of(trainer),
        "history": rows_of(history),
        "checkpoints": directory_of(root / "checkpoints"),
        "best": directory_of(root / "best"),
        "csv": (root / "log.csv").read_text(),
        "litter": [leftovers(root / name) for name in ("checkpoints", "best")],
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that never had any trouble."""
    root = tmp_path_factory.mktemp("never")
    result = everything(root, *start(root))
    assert list(result["checkpoints"]) == ["step_00000010", "step_00000011", "step_00000012"] and result["litter"] == [[], []]
    return result


@pytest.fixture(scope="module")
def shared() -> fitflax.Trainer:
    return make_trainer()


@pytest.fixture
def trainer(shared: fitflax.Trainer) -> fitflax.Trainer:
    shared.build((TRAIN[0][:4], TRAIN[1][:4]))
    return shared


# -- what may happen to a directory --


@contextlib.contextmanager
def file_size_limit(root: pathlib.Path) -> Iterator[None]:
    """Files cannot grow beyond a few hundred bytes, which is less than any checkpoint, as with a quota or a full disk."""
    seconds = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)  # Otherwise JAX caches what it compiles meanwhile, and leaves truncated files.
    try:
        with limit(resource.RLIMIT_FSIZE, 600):
            yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


@contextlib.contextmanager
def no_descriptors(root: pathlib.Path) -> Iterator[None]:
    """No more files can be opened; those that are open can still be written."""
    with limit(resource.RLIMIT_NOFILE, 0):
        yield


@contextlib.contextmanager
def limit(which: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


@contextlib.contextmanager
def read_only(root: pathlib.Path) -> Iterator[None]:
    """Nothing can be created in the directory. Permissions do not stop root, so the error is simulated for root."""
    directory = root / "checkpoints"
    if os.geteuid() != 0:
        directory.chmod(0o555)
        yield
        directory.chmod(0o755)
        return
    mkdir = os.mkdir

    def refuse(path: Any, *arguments: Any, **options: Any) -> None:
        if pathlib.Path(path).parent == directory:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        mkdir(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        yield


@contextlib.contextmanager
def gone(root: pathlib.Path) -> Iterator[None]:
    """The directory is missing, as when its mount is lost."""
    os.rename(root / "checkpoints", root / "elsewhere")
    yield
    os.rename(root / "elsewhere", root / "checkpoints")


@contextlib.contextmanager
def replaced_by_a_file(root: pathlib.Path) -> Iterator[None]:
    with gone(root):
        (root / "checkpoints").write_text("a file")
        yield
        (root / "checkpoints").unlink()


TROUBLES: dict[Callable[[pathlib.Path], AbstractContextManager[None]], str] = {
    file_size_limit: "File too large",
    no_descriptors: "Too many open files",
    read_only: "Permission denied",
    gone: "is gone",
    replaced_by_a_file: "is gone",
}


def run_into(trouble: Callable[[pathlib.Path], AbstractContextManager[None]], root: pathlib.Path, trainer: fitflax.Trainer, **options: Any) -> str:
    """Starts a run that meets trouble after step 6; returns the message of the error that ended it."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        # The save in progress when the trouble began may be complete, while the checkpoint that it replaces is still there.
        warnings.filterwarnings("ignore", "(?s).* was saved, but .* could not be cleaned up", FitflaxWarning)
        begins = at(trainer, "on_train_batch_end", 6, lambda step: stack.enter_context(trouble(root)))
        with pytest.raises(CheckpointError) as caught:
            start(root, begins, trainer=trainer, **options)
    return str(caught.value)


# -- a run that meets trouble --


@pytest.mark.parametrize(("trouble", "asynchronous"), [*((trouble, True) for trouble in TROUBLES), (file_size_limit, False)])
@pytest.mark.slow
def test_the_run_ends_with_a_clear_error_and_the_next_start_resumes_bit_for_bit(trouble, asynchronous, trainer, undisturbed, tmp_path):
    message = run_into(trouble, tmp_path, trainer, asynchronous=asynchronous)
    assert str(tmp_path / "checkpoints") in message and TROUBLES[trouble] in message
    assert message.endswith("Earlier checkpoints are intact.") == (TROUBLES[trouble] != "is gone")
    assert 6 <= trainer.step < NEWEST  # One of the next saves fails, long before the end.
    store = CheckpointStore(tmp_path / "checkpoints")
    newest = store.latest()
    assert newest is not None and newest <= 6
    store.verify()
    began: list[int] = []
    again = make_trainer()
    result = start_again(tmp_path, LambdaCallback(on_train_begin=lambda logs: began.append(again.step)), trainer=again)
    assert began == [newest]
    assert not differences(result, undisturbed)


@pytest.mark.slow
def test_a_run_whose_first_save_fails_starts_over(trainer, undisturbed, tmp_path):
    limited = contextlib.ExitStack()
    with limited, pytest.raises(CheckpointError, match="File too large"):
        start(tmp_path, at(trainer, "on_train_begin", 0, lambda step: limited.enter_context(file_size_limit(tmp_path))), trainer=trainer)
    assert steps_in(tmp_path / "checkpoints") == []
    assert not differences(start_again(tmp_path), undisturbed)


def test_after_a_background_save_fails_the_next_is_immediate_and_nothing_is_deleted(trainer, tmp_path, monkeypatch):
    save = CheckpointStore.save

    def fail_once(self: CheckpointStore, *, step: int, **options: Any) -> Any:
        if step == 6:
            raise CheckpointError("No space left on device")
        return save(self, step=step, **options)

    monkeypatch.setattr(CheckpointStore, "save", fail_once)
    saving = ModelCheckpoint(tmp_path, every=fitflax.every(steps=2), keep=2)
    with pytest.raises(CheckpointError, match="No space left on device"):
        trainer.fit(TRAIN, batch_size=4, steps=20, verbose=0, callbacks=[saving])
    assert steps_in(tmp_path) in ([2, 4, 8], [2, 4, 10])
    CheckpointStore(tmp_path).verify()


def test_a_callback_that_does_not_know_of_anothers_failed_save_deletes_nothing_either(trainer, tmp_path, monkeypatch):
    save, submitted = CheckpointStore.save, threading.Event()

    def fail_once(self: CheckpointStore, *, step: int, owner: str, **options: Any) -> Any:
        if owner.startswith("Best") and step == 15:
            assert submitted.wait(20)
            raise CheckpointError("No space left on device")
        return save(self, step=step, owner=owner, **options)

    monkeypatch.setattr(CheckpointStore, "save", fail_once)
    falling = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(score=-epoch))
    best = BestCheckpoint(tmp_path / "best", monitor="score", mode="min")
    regular = ModelCheckpoint(tmp_path / "all", every=fitflax.every(epochs=1), keep=2)
    with pytest.raises(CheckpointError, match="No space left on device"):
        trainer.fit(
            TRAIN, batch_size=4, epochs=6, verbose=0, callbacks=[falling, best, regular, at(trainer, "on_train_batch_end", 16, lambda _: submitted.set())]
        )
    assert steps_in(tmp_path / "all")[:2] == [5, 10] and steps_in(tmp_path / "all")[-1] >= 20
    assert (best.best_step, steps_in(tmp_path / "best")) == (steps_in(tmp_path / "best")[-1], [10, best.best_step])
    kept = CheckpointStore(tmp_path / "best").restore().run["callbacks"][best.state_key]["kept"]
    assert kept == [[-3.0, 20]]


def test_a_failure_of_the_last_save_is_raised_before_fit_returns(trainer, tmp_path):
    limited = contextlib.ExitStack()

    def begin(step: int) -> None:
        while steps_in(tmp_path) != [5, 10]:
            pass  # They may still be in progress.
        limited.enter_context(file_size_limit(tmp_path))

    callbacks = [ModelCheckpoint(tmp_path, every=fitflax.every(steps=5)), at(trainer, "on_train_batch_end", NEWEST, begin)]
    with limited, pytest.raises(CheckpointError, match=r"step_00000012: .*File too large"):
        trainer.fit(TRAIN, batch_size=4, steps=NEWEST, verbose=0, callbacks=callbacks)
    CheckpointStore(tmp_path).verify()
    assert steps_in(tmp_path) == [5, 10] and leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_deleted_directory_is_reported_as_gone_and_the_next_start_begins_a_new_run(trainer, tmp_path):
    directory = tmp_path / "checkpoints"

    def delete(step: int) -> None:
        os.rename(directory, tmp_path / "trash")  # Immediate, because something is being written.
        shutil.rmtree(tmp_path / "trash")

    with pytest.raises(CheckpointError, match=re.escape(f"{directory} is gone")):
        start(tmp_path, at(trainer, "on_train_batch_end", 6, delete), trainer=trainer, writers=False)
    with another_process():
        start(tmp_path, writers=False)
    assert steps_in(directory) == [10, 11, 12] and leftovers(directory) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_on_a_disk_too_full_for_cleanup_continues_and_keeps_more_than_requested(asynchronous, trainer, undisturbed, tmp_path, monkeypatch):
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if pathlib.Path(target).name == "retention.json" and pathlib.Path(target).parent.name == "checkpoints" and trainer.step > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(
        FitflaxWarning, match=r"was saved, but .* could not be cleaned up: .*No space left on device.* More checkpoints are kept than you asked for"
    ):
        start(tmp_path, asynchronous=asynchronous, trainer=trainer)
    assert steps_in(tmp_path / "checkpoints")[-4:] == [9, 10, 11, 12]
    monkeypatch.undo()
    CheckpointStore(tmp_path / "checkpoints").verify()
    result = start_again(tmp_path)
    # Checkpoints that were kept too long are excluded: the next save would delete them, but there is no further save.
    result["checkpoints"] = {name: result["checkpoints"][name] for name in undisturbed["checkpoints"]}
    assert not differences(result, undisturbed)


def test_a_log_that_cannot_be_written_ends_the_run_after_its_state_is_saved(trainer, undisturbed, tmp_path, monkeypatch):
    """The files that people read are part of a run, too: a run that continued without them could not be resumed to the same files."""
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if trainer.step == 10 and os.path.samestat(os.fstat(descriptor), os.stat(tmp_path / "log.csv")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CallbackError, match=re.escape(f"CSVLogger cannot write {tmp_path / 'log.csv'}: No space left on device")):
        start(tmp_path, trainer=trainer)
    monkeypatch.undo()
    CheckpointStore(tmp_path / "checkpoints").verify()
    assert steps_in(tmp_path / "checkpoints")[-1] == 10
    assert not differences(start_again(tmp_path), undisturbed)


# -- before the first step --


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "file"
    path.write_text("a file")
    return path


@pytest.mark.parametrize("make", [ModelCheckpoint, BestCheckpoint])
def test_a_directory_that_cannot_be_created_is_an_error_before_the_first_step(make, trainer, file):
    calls: list[str] = []
    begins = LambdaCallback(on_train_begin=lambda logs: calls.append("on_train_begin"))
    nowhere = pathlib.Path("/proc/fitflax/run")  # Not even root can create a directory there.
    cases = {file: DirectoryInUseError, file / "run": DirectoryInUseError} | ({nowhere: CheckpointError} if nowhere.parent.parent.is_dir() else {})
    for directory, error in cases.items():
        with pytest.raises(error, match=re.escape(str(directory))):
            trainer.fit(TRAIN, batch_size=4, validation_data=VALID, verbose=0, callbacks=[make(directory), begins])
    assert (trainer.step, calls, file.read_text()) == (0, [], "a file")


# -- single checkpoints --


def test_a_manual_save_that_fails_leaves_the_earlier_checkpoint(trainer, tmp_path):
    path = trainer.save(tmp_path / "final")
    before = directory_of_one(path)
    trainer.train_on_batch((TRAIN[0][:4], TRAIN[1][:4]))
    with file_size_limit(tmp_path), pytest.raises(CheckpointError, match=rf"Could not save {re.escape(str(path))}: .*File too large"):
        trainer.save(path)
    assert directory_of_one(path) == before and os.listdir(tmp_path) == ["final"]
    trainer.save(path)
    assert directory_of_one(path) != before and os.listdir(tmp_path) == ["final"]


def directory_of_one(path: pathlib.Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


@pytest.mark.parametrize("trouble", [file_size_limit, no_descriptors])
def test_a_failed_save_of_a_store_keeps_earlier_checkpoints_and_leaves_no_litter(trouble, tmp_path):
    store = CheckpointStore(tmp_path)
    store.claim("run", overwrite=False)

    def save(step: int) -> None:
        store.save(step=step, train={"w": list(range(1000))}, run={}, metadata={"run_id": "run"}, owner="me", keep=[])

    save(1)
    with trouble(tmp_path), pytest.raises(CheckpointError, match=rf"step_00000002.*{TROUBLES[trouble]}.*Earlier checkpoints are intact"):
        save(2)
    assert (store.steps(), leftovers(tmp_path)) == ([1], [])
    store.verify()
    save(2)
    assert (store.steps(), leftovers(tmp_path)) == ([2], [])


# -- separate file systems --


def mount(directory: pathlib.Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], check=True)


@contextlib.contextmanager
def really_full(root: pathlib.Path) -> Iterator[None]:
    """Not a byte is left on the file system."""
    filler = root / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    yield
    filler.unlink()


@contextlib.contextmanager
def really_read_only(root: pathlib.Path) -> Iterator[None]:
    """Another file system is mounted over the directory, and is read-only."""
    mount(root / "checkpoints", "ro,size=4k")
    yield
    subprocess.run(["umount", str(root / "checkpoints")], check=True)


def scalars(root: pathlib.Path) -> dict[str, str]:
    """Returns all scalars in the event files except measured times."""
    values: dict[str, str] = {}
    for path in sorted((root / "tensorboard").rglob("*.tfevents.*")):
        for record in events_of(path):
            for value in record.event.summary.value:
                if not value.tag.startswith("time/") and value.HasField("simple_value"):
                    values[f"{path.parent.name}/{value.tag}/{record.event.step}"] = float(value.simple_value).hex()
    return values


def scenario(top: pathlib.Path) -> dict[str, Any]:
    """Runs on a separate file system; returns, for each trouble, the error, and how the resumed run differs from one without trouble."""
    mount(top, "size=2m")
    outcome: dict[str, Any] = {}

    def complete_run(root: pathlib.Path, *callbacks: Any, **options: Any) -> dict[str, Any]:
        return {**start_again(root, TensorBoard(root / "tensorboard"), *callbacks, **options), "scalars": scalars(root)}

    for name in ("never", "really_full", "really_read_only"):
        (top / name).mkdir()
    undisturbed = complete_run(top / "never")
    for trouble in (really_full, really_read_only):
        root, trainer = top / trouble.__name__, make_trainer()
        with contextlib.ExitStack() as stack:

            def begin(step: int, stack: contextlib.ExitStack = stack, trouble: Any = trouble, root: pathlib.Path = root) -> None:
                # Not during a save: the old checkpoint that it deletes would make room for each one that follows.
                for each in list(saver._WORKING):
                    each.wait()
                stack.enter_context(trouble(root))

            begins = at(trainer, "on_train_batch_end", 6, begin)
            try:
                start(root, TensorBoard(root / "tensorboard"), begins, trainer=trainer)
            except FitflaxError as error:
                outcome[trouble.__name__] = {"error": str(error), "step": trainer.step}
        CheckpointStore(root / "checkpoints").verify()
        outcome[trouble.__name__]["differences"] = differences(complete_run(root), undisturbed)
        outcome[trouble.__name__]["scalars"] = len(undisturbed["scalars"])
    return outcome


@pytest.mark.slow
def test_a_run_resumes_after_a_real_file_system_is_full_or_read_only(tmp_path, process_env):
    """Runs in a process with its own mounts, which Linux allows any user by default."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("needs unshare, and a kernel that lets users make mounts of their own")
    (tmp_path / "disk").mkdir()
    command = ["unshare", "-rm", sys.executable, __file__, str(tmp_path / "disk")]
    result = subprocess.run(command, env=process_env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    outcome = json.loads(result.stdout)
    for name, fault in (("really_full", "No space left on device"), ("really_read_only", "Read-only file system")):
        assert fault in outcome[name]["error"] and str(tmp_path / "disk") in outcome[name]["error"]
        assert outcome[name]["step"] < NEWEST and outcome[name]["differences"] == [] and outcome[name]["scalars"] > 5


if __name__ == "__main__":
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # tensorboardX imports it if it is installed, which takes seconds.
    print(json.dumps(scenario(pathlib.Path(sys.argv[1]))))
