"""Saves a run at one of its checkpoints, or one state under any name.

A run is saved synchronously from the live state, from a snapshot in the saver's thread, or by all processes together.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.collective_save import CollectiveSave
from fitflax.checkpoints.formats.checkpoint_files import BACKENDS, METADATA_FILE, is_checkpoint, write_own_shards
from fitflax.checkpoints.formats.msgpack_format import PART, STATE_FILE
from fitflax.checkpoints.formats.orbax_format import TRAIN_DIRECTORY
from fitflax.checkpoints.formats.partial_epoch import PARTIAL_EPOCH_FILE
from fitflax.checkpoints.formats.plain_tree import Plain, only_split, to_plain
from fitflax.checkpoints.store.checkpoint_store import CheckpointStore
from fitflax.checkpoints.store.local_files import disk_errors, put_back, replaced_by, write_in_place
from fitflax.checkpoints.store.object_directory import write_to_bucket
from fitflax.checkpoints.writer.snapshot import host_copy
from fitflax.errors import CheckpointError, warn
from fitflax.parallel.host_memory import spans_processes
from fitflax.state import PyTree
from fitflax.storage import Location, ObjectPath, locate

__all__ = ["save_checkpoint", "save_run"]


def save_run(checkpoint: Checkpoint, store: CheckpointStore, *, owner: str, keep: Collection[int], asynchronous: bool) -> None:
    """Saves the run in a store: synchronously from the live state, or with `asynchronous`, by the run's saver from a snapshot.

    `keep` are the other steps that the owner keeps. Raises `CheckpointError` if this save failed, or an earlier one of the saver. In the latter case, this
    one was tried synchronously.
    """
    waiting, checkpoint.run.before_saving = checkpoint.run.before_saving, []
    for put_on_disk in waiting:
        put_on_disk()
    checkpoint.run.num_saves += 1
    also = [name for directory, name in checkpoint.run.savers if directory == store.directory and name != owner]
    save = _RunSave(checkpoint, store, {"step": checkpoint.step, "owner": owner, "keep": keep, "also": also}, asynchronous=asynchronous)
    if spans_processes(checkpoint.run.borrow()):
        save.collectively()
        return
    save.data = checkpoint.run.join_data()
    if jax.process_index() == 0:
        save.save_alone()


class _RunSave:
    """One save of a run; `options` are arguments of `CheckpointStore.save`."""

    def __init__(self, checkpoint: Checkpoint, store: CheckpointStore, options: Mapping[str, Any], *, asynchronous: bool) -> None:
        self._checkpoint = checkpoint
        self._store = store
        self._options = options
        self._saver = checkpoint.run.saver
        self._asynchronous = asynchronous
        self.data: dict[str, Any] = {}  # What all processes together know about the data.

    def save_alone(self) -> None:
        if self._asynchronous:
            self._checkpoint.run.snapshots.wait_for_room()
            # After a failure, no snapshot is made: the failed save may still hold the memory.
            if not self._saver.has_failed and self._saver.submit(self._save_later(None)):
                return
        earlier = self._saver.settle()
        with _note_earlier(earlier):
            self._save_now(None)
        if earlier is not None:
            raise earlier

    def collectively(self) -> None:
        """Saves together with all other processes, which reach the same save. If it fails in one, it fails in all."""
        checkpoint, saver = self._checkpoint, self._saver
        if self._asynchronous:
            checkpoint.run.snapshots.wait_for_room()  # Before the meeting, where other processes would wait.
        failure = saver.failure
        try:
            what = f"step {checkpoint.step} in {self._store.directory}"
            collective = CollectiveSave.meet(what, earlier=None if failure is None else str(failure), is_rescue=checkpoint.run.position.is_rescue)
        except CheckpointError as error:
            if not checkpoint.run.position.is_rescue:
                raise
            # The error that ended the run is more important to the user.
            warn(f"Step {checkpoint.step} was not saved. {error}")
            return
        is_leader = jax.process_index() == 0
        with collective.abort_on_error():
            self.data = checkpoint.run.join_data()
        if self._asynchronous and collective.earlier is None:
            with collective.abort_on_error():
                job = functools.partial(collective.lead, self._save_later(collective)) if is_leader else self._save_shards_later(collective)
            if not saver.submit(job, on_skip=collective.abort):
                collective.abort()  # Another save has failed. All processes learn of it at the next meeting.
            return
        with collective.abort_on_error():
            earlier = saver.settle()
            if earlier is None and collective.earlier is not None:
                earlier = CheckpointError(f"An earlier save failed in another process: {collective.earlier}")
            with _note_earlier(earlier):
                if is_leader:
                    collective.lead(lambda: self._save_now(collective))
                else:
                    collective.follow(lambda path: write_own_shards(path, to_plain(checkpoint.run.borrow(), root="train", may_span=True)), self._place)
        if earlier is not None:
            raise earlier

    def _run(self) -> dict[str, Any]:
        return {**self._checkpoint.run_state, **self.data}

    def _write(self, collective: CollectiveSave | None, **contents: Any) -> None:
        options = dict(self._options)
        if self._saver.has_lost or (collective is not None and collective.earlier is not None):
            # Keep everything: steps that the owner wants may be missing.
            options["keep"] = {*options["keep"], *self._store.steps()}
        self._store.save(collective=collective, **contents, **options)

    def _save_now(self, collective: CollectiveSave | None) -> None:
        run = self._run()
        metadata = {**self._metadata(run), "metrics": self._checkpoint.deferred_metrics()()}
        self._write(collective, train=self._checkpoint.run.borrow(), run=run, metadata=metadata)

    def _save_later(self, collective: CollectiveSave | None) -> Callable[[], None]:
        """Returns a function that saves the run as it is now."""
        checkpoint, run = self._checkpoint, self._run()
        metadata, metrics = self._metadata(run), checkpoint.deferred_metrics()
        # Of the run's state, the next step changes only the sums.
        arrays = checkpoint.run.snapshot({"sums": run.pop("sums")} if "sums" in run else {})
        rest = host_copy(to_plain(run, root="run", keep_lists=True), only_numpy=not checkpoint.run.snapshots.wait_for_steps)

        def work() -> None:
            train, sums = arrays()
            plain_run = Plain({**rest.tree, **sums.tree}, {**rest.key_impls, **sums.key_impls})
            self._write(collective, train=train, run=plain_run, metadata={**metadata, "metrics": metrics()})

        return work

    def _save_shards_later(self, collective: CollectiveSave) -> Callable[[], None]:
        """Returns a function that writes this process's shards of the state as it is now."""
        arrays = self._checkpoint.run.snapshot({})
        return lambda: collective.follow(lambda path: write_own_shards(path, arrays()[0]), self._place)

    @property
    def _place(self) -> ObjectPath | None:
        """The location of the checkpoint, if it is in a bucket."""
        path = self._store.path(self._checkpoint.step)
        return path if isinstance(path, ObjectPath) else None

    def _metadata(self, run: Mapping[str, Any]) -> dict[str, Any]:
        checkpoint = self._checkpoint
        return {
            **checkpoint.run.info(),
            "history": run["callbacks"].get("History", {}).get("rows", []),
            "step": checkpoint.step,
            "epoch": checkpoint.epoch,
            "step_in_epoch": checkpoint.step_in_epoch,
            "data_position": checkpoint.data_position._asdict(),
        }


@contextlib.contextmanager
def _note_earlier(earlier: BaseException | None) -> Iterator[None]:
    """Adds a note about an earlier failure to exceptions of the body."""
    try:
        yield
    except Exception as error:
        if earlier is not None:
            error.add_note(f"An earlier save also failed: {earlier}")
        raise


def save_checkpoint(
    path: str | os.PathLike[str], *, train: PyTree, run: PyTree, metadata: Mapping[str, Any], storage_options: Mapping[str, Any] | None = None
) -> Location:
    """Writes one checkpoint to a directory or URL of any name and returns it. An older checkpoint there is replaced once the new one is complete."""
    given = locate(path, owner="save(path)", error=CheckpointError, options=storage_options)
    place = given if isinstance(given, ObjectPath) else None
    # abspath, because `.` and `..` cannot be renamed.
    path = Path(os.path.abspath(given))

    def save(collective: CollectiveSave | None = None) -> None:
        if place is not None:
            _save_in_bucket(place, collective, train=train, run=run, metadata=metadata)
            return
        with disk_errors("save", given):
            path.parent.mkdir(parents=True, exist_ok=True)
            for aside in replaced_by(path):
                put_back(aside, path)
            if os.path.lexists(path) and not _is_only_checkpoint(path):
                raise CheckpointError(f"{given} already exists and is not a checkpoint, so it was not replaced. Choose another path, or remove it.")
            write_in_place(path, train=train, run=run, metadata=metadata, collective=collective)

    if spans_processes(train):
        collective = CollectiveSave.meet(f"{given}")
        if jax.process_index():
            collective.follow(lambda part: write_own_shards(part, only_split(to_plain(train, root="train", may_span=True))), place)
        else:
            collective.lead(functools.partial(save, collective))
    elif jax.process_index() == 0:
        save()
    return given


def _save_in_bucket(place: ObjectPath, collective: CollectiveSave | None = None, *, train: PyTree, run: PyTree, metadata: Mapping[str, Any]) -> None:
    with disk_errors("save", place):
        names = [name for name, _ in place.named_objects()]
        if any(name not in (METADATA_FILE, PARTIAL_EPOCH_FILE, STATE_FILE) and not PART.fullmatch(name) for name in names) or (place.key and place.is_file()):
            raise CheckpointError(f"{place} already exists and is not a checkpoint, so it was not replaced. Choose another URL, or remove it.")
        commit = place.bucket.info((place / METADATA_FILE).key)
        write_to_bucket(place, train=train, run=run, metadata=metadata, tag=None if commit is None else commit.tag, collective=collective)


def _is_only_checkpoint(path: Path) -> bool:
    """Returns whether `path` contains a checkpoint and nothing else that replacing it would delete."""
    if path.is_symlink() or not path.is_dir() or not is_checkpoint(path):
        return False
    if (path / TRAIN_DIRECTORY).exists() and not (path / TRAIN_DIRECTORY / "_METADATA").exists():
        return False  # Not written by Orbax: `train` is also a common name for data.
    known = {METADATA_FILE, PARTIAL_EPOCH_FILE}.union(*(backend.FILES for backend in BACKENDS.values()))
    return {entry.name for entry in path.iterdir()} <= known
