"""Saves a run at one of its checkpoints, or one state under any name.

A run is saved synchronously from the live state, from a snapshot in the saver's thread, or by all processes together.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax

from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.checkpoint_files import BACKENDS, METADATA_FILE, PARTIAL_EPOCH_FILE, is_checkpoint, write_checkpoint, write_local_shards
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.checkpoints.directories import disk_errors, put_back, replaced_by, write_in_place, write_to_bucket
from fitflax.checkpoints.msgpack_format import PART, STATE_FILE
from fitflax.checkpoints.orbax_format import TRAIN_DIRECTORY
from fitflax.checkpoints.plain_tree import Plain, only_split, to_plain
from fitflax.checkpoints.saver import host_copy
from fitflax.checkpoints.shard_format import CollectiveSave
from fitflax.errors import CheckpointError, warn
from fitflax.parallel.placement import spans_processes
from fitflax.state import PyTree
from fitflax.storage import Location, ObjectPath, absolute, locate


def save_run(checkpoint: Checkpoint, store: CheckpointStore, *, owner: str, keep: Collection[int], asynchronous: bool) -> None:
    """Saves the run in a store: synchronously from the live state, or with `asynchronous`, by the run's saver from a snapshot.

    `keep` are the other steps that the owner keeps. Raises `CheckpointError` if this save failed, or an earlier one of the saver. In the latter case, this
    one was tried synchronously.
    """
    run = checkpoint.run
    waiting, run.before_saving = run.before_saving, []
    for sync in waiting:
        run.uploads.extend(filter(None, [sync()]))
    run.num_saves += 1
    also = [name for directory, name in run.savers if absolute(directory) == absolute(store.directory) and name != owner]
    save = _RunSave(checkpoint, store, {"step": checkpoint.step, "owner": owner, "keep": keep, "also": also}, asynchronous=asynchronous)
    if spans_processes(run.borrow()):
        save.collectively()
        return
    save.join_data()
    if jax.process_index() == 0:
        save.save_alone()


class _RunSave:
    """One save of a run; `options` are arguments of `CheckpointStore.save`."""

    def __init__(self, checkpoint: Checkpoint, store: CheckpointStore, options: Mapping[str, Any], *, asynchronous: bool) -> None:
        self._checkpoint, self._run, self._saver = checkpoint, checkpoint.run, checkpoint.run.saver
        self._store, self._options, self._asynchronous = store, options, asynchronous
        self._uploads = list(checkpoint.run.uploads)
        # Held because the earlier save that holds it may finish before this one takes it.
        self._shared = self._run.snapshots.shared() if asynchronous else None
        self._data: dict[str, Any] = {}

    def join_data(self) -> None:
        """Gathers the states of the data of all processes, if each has its own shard. All of them must call it."""
        data = self._run.joined()
        self._data = {} if data is None else {"data": data}

    def _stop_timer(self) -> None:
        """Waits for the step if this save does. Otherwise, the timer would not know when the step finished."""
        if not self._asynchronous or self._run.snapshots.waits:  # In this order, as in `finish_steps`.
            self._run.timer.stop()

    def save_alone(self) -> None:
        self._stop_timer()
        if self._asynchronous:
            self._wait_for_room()
            # After a failure, no snapshot is made: the failed save may still hold the memory.
            if self._saver.failure is None and self._saver.submit(self._save_later(None)):
                return
        earlier = self._saver.settle()
        with _earlier_failure(earlier):
            self._save_now(None)

    def collectively(self) -> None:
        """Saves together with all other processes, which reach the same save. If it fails in one, it fails in all."""
        step, saver, is_rescue = self._checkpoint.step, self._saver, self._run.position.is_rescue
        if self._asynchronous:
            self._wait_for_room()  # Before the meeting, where other processes would wait.
        failure = saver.failure
        try:
            what = f"step {step} in {self._store.directory}"
            collective = CollectiveSave.meet(what, earlier=None if failure is None else str(failure), is_rescue=is_rescue)
        except CheckpointError as error:
            if not is_rescue:
                raise
            # The error that ended the run is more important to the user.
            warn(f"Step {step} was not saved. {error}")
            return
        is_leader = jax.process_index() == 0
        path = self._store.path(step)
        place = path if isinstance(path, ObjectPath) else None
        is_later = self._asynchronous and collective.earlier is None
        with collective.abort_on_error():
            self._stop_timer()
            self.join_data()
            if is_later and is_leader:
                job = functools.partial(collective.lead, self._save_later(collective))
            elif is_later:
                arrays = self._run.snapshots.take(self._run.borrow(), {})
                job = functools.partial(collective.follow, lambda path: self._write_shards(path, arrays()[0]), place)
            else:
                earlier = saver.settle()
                if earlier is None and collective.earlier is not None:
                    earlier = CheckpointError(f"An earlier save failed in another process: {collective.earlier}")
                with _earlier_failure(earlier):
                    if is_leader:
                        collective.lead(lambda: self._save_now(collective))
                    else:
                        collective.follow(lambda path: self._write_shards(path, to_plain(self._run.borrow(), root="train", may_span=True)), place)
        if is_later and not saver.submit(job, on_skip=collective.abort):
            collective.abort()  # Another save has failed. All processes learn of it at the next meeting.

    def _wait_for_room(self) -> None:
        position, snapshots = self._run.position, self._run.snapshots
        self._saver.memory.touch()  # The saver's thread may not be done, because it has a low priority. Two threads take half of the time.
        if position.is_last or position.is_rescue:
            self._saver.wait_until_idle()  # Otherwise, this one is skipped if an earlier save fails, and no later one tries again.
        snapshots.wait_for_room()

    def _save_now(self, collective: CollectiveSave | None) -> None:
        run = {**self._checkpoint.run_state, **self._data}
        metadata = {**self._metadata(run), "metrics": self._checkpoint.deferred_metrics()()}
        self._write(collective, train=self._run.borrow(), run=run, metadata=metadata)

    def _save_later(self, collective: CollectiveSave | None) -> Callable[[], None]:
        """Returns a function that saves the run as it is now."""
        run = {**self._checkpoint.run_state, **self._data}
        metadata, metrics, snapshots = self._metadata(run), self._checkpoint.deferred_metrics(), self._run.snapshots
        # Of the run's state, the next step changes only the sums.
        arrays = snapshots.take(self._run.borrow(), {"sums": run.pop("sums")} if "sums" in run else {})
        rest = host_copy(to_plain(run, root="run", keep_lists=True), only_numpy=not snapshots.waits)

        def work() -> None:
            train, sums = arrays()
            plain_run = Plain({**rest.tree, **sums.tree}, {**rest.key_impls, **sums.key_impls})
            self._write(collective, train=train, run=plain_run, metadata={**metadata, "metrics": metrics()})

        return work

    def _write(self, collective: CollectiveSave | None, **contents: Any) -> None:
        options = dict(self._options)
        if self._saver.has_lost or (collective is not None and collective.earlier is not None):
            # Keep everything: steps that the owner wants may be missing.
            options["keep"] = {*options["keep"], *self._store.steps()}
        self._wait_for_uploads()
        self._store.save(collective=collective, **contents, **options)

    def _write_shards(self, path: Location, train: Plain) -> dict[str, dict[str, int]]:
        self._wait_for_uploads()
        return write_local_shards(path, train)

    def _wait_for_uploads(self) -> None:
        """Waits until the logs are uploaded, so that no resume finds a checkpoint without them. If an upload fails, its callback raises the error later."""
        for wait in self._uploads:
            wait()

    def _metadata(self, run: Mapping[str, Any]) -> dict[str, Any]:
        checkpoint = self._checkpoint
        return {
            **self._run.info(),
            "history": run["callbacks"].get("History", {}).get("rows", []),
            "step": checkpoint.step,
            "epoch": checkpoint.epoch,
            "step_in_epoch": checkpoint.step_in_epoch,
            "data_position": checkpoint.data_position._asdict(),
        }


@contextlib.contextmanager
def _earlier_failure(earlier: BaseException | None) -> Iterator[None]:
    """Raises an earlier failure after the body, or adds a note about it to an exception of the body."""
    try:
        yield
    except Exception as error:
        if earlier is not None:
            error.add_note(f"An earlier save also failed: {earlier}")
        raise
    if earlier is not None:
        raise earlier


def save_checkpoint(
    path: str | os.PathLike[str], *, train: PyTree, run: PyTree, metadata: Mapping[str, Any], storage_options: Mapping[str, Any] | None = None
) -> Location:
    """Writes one checkpoint to a directory or URL of any name and returns it. An older checkpoint there is replaced once the new one is complete."""
    location = locate(path, owner="save(path)", error=CheckpointError, options=storage_options)
    place = absolute(location)  # `.` and `..` cannot be renamed.

    def save(collective: CollectiveSave | None = None) -> None:
        write = functools.partial(write_checkpoint, train=train, run=run, metadata=metadata, collective=collective)
        with disk_errors("save", location):
            if isinstance(place, ObjectPath):
                _check_replaceable(place, location)
                write_to_bucket(place, write)
                return
            place.parent.mkdir(parents=True, exist_ok=True)
            for aside in replaced_by(place):
                put_back(aside, place)
            _check_replaceable(place, location)
            write_in_place(place, write)

    if spans_processes(train):
        collective = CollectiveSave.meet(f"{location}")
        if jax.process_index():
            bucket_place = place if isinstance(place, ObjectPath) else None
            collective.follow(lambda path: write_local_shards(path, only_split(to_plain(train, root="train", may_span=True))), bucket_place)
        else:
            collective.lead(functools.partial(save, collective))
    elif jax.process_index() == 0:
        save()
    return location


def _check_replaceable(path: Location, shown_as: Location) -> None:
    """Raises `CheckpointError` if replacing what is at `path` would delete more than a checkpoint."""
    known = {METADATA_FILE, PARTIAL_EPOCH_FILE}
    if isinstance(path, ObjectPath):
        names = [name for name, _ in path.named_objects()]
        is_replaceable = all(name in {*known, STATE_FILE} or PART.fullmatch(name) for name in names) and not (path.key and path.is_file())
    elif not os.path.lexists(path):
        is_replaceable = True
    elif path.is_symlink() or not path.is_dir() or not is_checkpoint(path):
        is_replaceable = False
    elif (path / TRAIN_DIRECTORY).exists() and not (path / TRAIN_DIRECTORY / "_METADATA").exists():
        is_replaceable = False  # Not written by Orbax: `train` is also a common name for data.
    else:
        is_replaceable = {entry.name for entry in path.iterdir()} <= known.union(*(backend.FILES for backend in BACKENDS.values()))
    if not is_replaceable:
        raise CheckpointError(f"{shown_as} already exists and is not a checkpoint, so it was not replaced. Choose another path, or remove it.")
