"""How a run is saved at one of its checkpoints: at once from the live state, from a copy in the saver's thread, or by all processes together."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax

from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.joint import JointSave
from fitflax.checkpoints.orbax_format import write_part
from fitflax.checkpoints.store import CheckpointStore
from fitflax.checkpoints.trees import Plain, host_copy, to_plain
from fitflax.errors import CheckpointError, warn
from fitflax.parallel.host_memory import spans_processes

__all__ = ["save_run"]


def save_run(checkpoint: Checkpoint, store: CheckpointStore, *, owner: str, keep: Collection[int], asynchronous: bool) -> None:
    """Saves the run in a store: at once from the live state, or from a copy on the host while the loop goes on.

    Args:
        checkpoint: Where the run is.
        store: Where it is saved.
        owner: Who wants it.
        keep: What this owner keeps besides.
        asynchronous: Whether the run's saver does it.

    Raises:
        CheckpointError: This save failed, or an earlier one of the saver's; then this one was made at once before, as far as the disk let it.
    """
    waiting, checkpoint.run.before_saving = checkpoint.run.before_saving, []
    for put_on_disk in waiting:
        put_on_disk()
    checkpoint.run.num_saves += 1
    also = [name for directory, name in checkpoint.run.savers if directory == store.directory and name != owner]
    save = _RunSave(checkpoint, store, {"step": checkpoint.step, "owner": owner, "keep": keep, "also": also}, asynchronous=asynchronous)
    if spans_processes(checkpoint.run.borrow()):
        save.jointly()
        return
    save.data = checkpoint.run.join_data()
    if jax.process_index() == 0:  # The first process saves what it has whole.
        save.here()


class _RunSave:
    """One save of a run.

    Args:
        checkpoint: Where the run is.
        store: Where it is saved.
        options: What the store is told of it.
        asynchronous: Whether the run's saver does it.

    Attributes:
        data: What all processes together know of the data.
    """

    def __init__(self, checkpoint: Checkpoint, store: CheckpointStore, options: Mapping[str, Any], *, asynchronous: bool) -> None:
        self._checkpoint = checkpoint
        self._store = store
        self._options = options
        self._saver = checkpoint.run.saver
        self._asynchronous = asynchronous
        self.data: dict[str, Any] = {}

    def here(self) -> None:
        """Saves in this process."""
        if self._asynchronous:
            self._saver.wait_for_room()
            if self._saver.submit(self._later(None)):
                return
        earlier = self._saver.settle()
        with _noting(earlier):
            self._now(None)
        if earlier is not None:
            raise earlier

    def jointly(self) -> None:
        """Saves together with all other processes, which come to the same save; what fails in one fails in all."""
        checkpoint, saver = self._checkpoint, self._saver
        if self._asynchronous:
            saver.wait_for_room()
        failure = saver.failure
        try:
            what = f"step {checkpoint.step} in {self._store.directory}"
            joint = JointSave.meet(what, earlier=None if failure is None else str(failure), is_rescue=checkpoint.run.point.is_rescue)
        except CheckpointError as error:
            if not checkpoint.run.point.is_rescue:
                raise
            # What this process is being left for is what the user is to hear of.
            warn(f"Step {checkpoint.step} is not saved. {error}")
            return
        is_leader = jax.process_index() == 0
        with joint.or_give_up():
            self.data = checkpoint.run.join_data()
        if self._asynchronous and joint.earlier is None:
            with joint.or_give_up():
                job = functools.partial(joint.lead, self._later(joint)) if is_leader else self._parts_later(joint)
            if not saver.submit(job, left_out=joint.give_up):
                joint.give_up()  # Another save has failed meanwhile, which all processes hear of when they meet again.
            return
        with joint.or_give_up():
            earlier = saver.settle()
            if earlier is None and joint.earlier is not None:
                earlier = CheckpointError(f"An earlier save has failed in another process: {joint.earlier}")
            with _noting(earlier):
                if is_leader:
                    joint.lead(lambda: self._now(joint))
                else:
                    joint.follow(lambda path: write_part(path, to_plain(checkpoint.run.borrow(), root="train", may_span=True)))
        if earlier is not None:
            raise earlier

    def _run(self) -> dict[str, Any]:
        return {**self._checkpoint.run_state, **self.data}

    def _write(self, joint: JointSave | None, **contents: Any) -> None:
        options = dict(self._options)
        if self._saver.has_lost or (joint is not None and joint.earlier is not None):
            # Nothing is deleted any more: what the owner keeps may be steps that are not there.
            options["keep"] = {*options["keep"], *self._store.steps()}
        self._store.save(joint=joint, **contents, **options)

    def _now(self, joint: JointSave | None) -> None:
        run = self._run()
        metadata = {**self._metadata(run), "metrics": self._checkpoint.deferred_metrics()()}
        self._write(joint, train=self._checkpoint.run.borrow(), run=run, metadata=metadata)

    def _later(self, joint: JointSave | None) -> Callable[[], None]:
        """Returns what saves the run as it is now."""
        checkpoint, run = self._checkpoint, self._run()
        metadata, metrics = self._metadata(run), checkpoint.deferred_metrics()
        # Of the run's state, the next step takes the sums alone.
        arrays = checkpoint.run.snapshot({"sums": run.pop("sums")} if "sums" in run else {})
        rest = host_copy(to_plain(run, root="run", keep_lists=True), only_numpy=not checkpoint.run.snapshots_wait)

        def work() -> None:
            train, sums = arrays()
            plain_run = Plain({**rest.tree, **sums.tree}, {**rest.key_impls, **sums.key_impls})
            self._write(joint, train=train, run=plain_run, metadata={**metadata, "metrics": metrics()})

        return work

    def _parts_later(self, joint: JointSave) -> Callable[[], None]:
        """Returns what writes this process's parts of the state as it is now."""
        arrays = self._checkpoint.run.snapshot({})
        return lambda: joint.follow(lambda path: write_part(path, arrays()[0]))

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
def _noting(earlier: BaseException | None) -> Iterator[None]:
    """Adds what failed before to what fails within."""
    try:
        yield
    except Exception as error:
        if earlier is not None:
            error.add_note(f"An earlier save had failed, too: {earlier}")
        raise
