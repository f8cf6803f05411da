"""`RayReport` reports a run to Ray Train or Ray Tune. `checkpoint_path` finds the checkpoint that was reported."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase, check_trigger, failure_since
from fitflax.callbacks.model_checkpoint import ModelCheckpoint, StoreCallback
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.resume import read_pointer, write_pointer
from fitflax.errors import CallbackError, ConfigError
from fitflax.integrations import import_package
from fitflax.integrations.tracker_base import Reading
from fitflax.parallel.launch import find_group, is_actor
from fitflax.storage.paths import is_url
from fitflax.triggers import Trigger
from fitflax.triggers import every as make_every

__all__ = ["RayReport", "checkpoint_path"]


def _import(name: str) -> Any:
    return import_package(name, owner="fitflax.integrations.ray")


class RayReport(Callback):
    """Reports a run to Ray, with `ray.train.report` in a worker of Ray Train and `ray.tune.report` in a trial of Ray Tune.

    When `every` fires, and once at the end, it reports the logged numbers under the names of `History`, and `step` and `epoch`. All workers report at the same
    steps, as Ray requires.

    With `checkpoint=`, each report waits for the save in progress and includes that callback's best or newest checkpoint. Ray Tune gets a copy, which it can
    pass to another trial. Ray Train gets only the path in a file, and so does Ray Tune if the checkpoint is in a bucket: `fit(resume=)` and `restore` follow
    the path, and `checkpoint_path` returns it. Ray's `num_to_keep` does not delete such a checkpoint; `ModelCheckpoint(keep=...)` does. Without `checkpoint=`,
    Ray Train's result has no metrics, because Ray keeps them only with checkpoints.

    Under Ray Train, each report also checks whether a node is about to be preempted. If so, the `ModelCheckpoint` saves the run at this step, and the run
    continues until Ray restarts it on other nodes. Include `every(seconds=...)` in `every` to check more often than once per epoch.

    Args:
        every: When to report; by default at the end of each epoch.
        checkpoint: The run's `ModelCheckpoint` or `BestCheckpoint`. List it before this callback.

    Raises:
        ImportError: The package ray is not installed.
        CallbackError: An argument has a wrong type. In `fit`: the process is neither a worker of Ray Train nor a trial of Ray Tune.

    Train in two workers of Ray Train::

        import fitflax
        import ray.train
        from fitflax.callbacks import ModelCheckpoint
        from fitflax.integrations.ray import RayReport
        from ray.train.v2.jax import JaxTrainer

        def train():
            fitflax.parallel.initialize()
            trainer = make_trainer()
            checkpoint = ModelCheckpoint("/shared/runs/a/checkpoints")
            trainer.fit(x, y, epochs=10, callbacks=[checkpoint, RayReport(checkpoint=checkpoint)], resume="auto", verbose=0)

        run = ray.train.RunConfig(name="a", storage_path="/shared/runs")
        result = JaxTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=2), run_config=run).fit()
    """

    phase = Phase.SAVE  # Called after the callback that saves, if it is listed after that.
    needs_gradients_norm = False

    def __init__(self, *, every: Trigger | None = None, checkpoint: StoreCallback | None = None) -> None:
        _import("ray")
        check_trigger("RayReport", every)
        if checkpoint is not None and not isinstance(checkpoint, StoreCallback):
            raise CallbackError(f"RayReport(checkpoint=...) must be the run's ModelCheckpoint or BestCheckpoint. Received: {checkpoint!r}.")
        self.every = every or make_every(epochs=1)
        self.checkpoint = checkpoint
        # The last reported values, and the exception that was being handled when the run began, if any.
        self._last: dict[str, float] = {}
        self._failure_before: BaseException | None = None
        self._noticed_nodes: frozenset[str] = frozenset()

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._last, self._failure_before = {}, sys.exception()
        _is_trial()

    @override
    def wants(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.is_last and not checkpoint.run.position.is_rescue

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._last = _numbers(checkpoint.step, checkpoint.logs) | {"step": checkpoint.step, "epoch": checkpoint.epoch + int(checkpoint.epoch_ends)}
        is_trial = _is_trial()
        if self.checkpoint is not None:
            checkpoint.run.saver.wait_as_callbacks()  # The checkpoint of these values may still be being written.
        self._report(is_trial)
        if not is_trial:
            self._save_before_preemption(checkpoint)

    def _save_before_preemption(self, checkpoint: Checkpoint) -> None:
        """Saves the run once per set of nodes that will be preempted. The run continues, because Ray treats an error as a failure and an end as success."""
        info = _import("ray.train").get_preemption_info()
        nodes = frozenset() if info is None else frozenset(info.preempted_node_to_ranks)
        if nodes - self._noticed_nodes and isinstance(self.checkpoint, ModelCheckpoint):
            self._noticed_nodes |= nodes
            self.checkpoint.save_now(checkpoint)

    @override
    def on_closing(self, checkpoint: Checkpoint, epoch: int, logs: Mapping[str, Any]) -> None:
        self._last |= _numbers(checkpoint.step, logs)

    @override
    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        was_interrupted = (self.trainer.stop_reason or "").startswith("interrupted by")
        if self.checkpoint is None or failure_since(self._failure_before) is not None or was_interrupted or _is_trial():
            return
        # A resumed run with nothing left to do may not have been reported by the earlier process.
        self._last = self._last or _numbers(self.trainer.step, logs) | {"step": self.trainer.step}
        self._report(is_trial=False)

    def _report(self, is_trial: bool) -> None:
        ray = _import("ray.tune" if is_trial else "ray.train")
        with self._ray_checkpoint(ray.Checkpoint, is_copy=is_trial) as checkpoint:
            ray.report(self._last, checkpoint=checkpoint)

    @contextlib.contextmanager
    def _ray_checkpoint(self, kind: Any, *, is_copy: bool) -> Iterator[Any]:
        """Yields the Ray checkpoint to report: a copy of the directory, or a file with its path."""
        path = None if self.checkpoint is None or jax.process_index() else self.checkpoint.chosen_path()
        if path is None:
            yield None
        elif is_copy and isinstance(path, Path):
            yield kind.from_directory(str(path))
        else:
            with tempfile.TemporaryDirectory() as directory:
                write_pointer(Path(directory), path)
                yield kind.from_directory(directory)


def _is_trial() -> bool:
    """Returns whether this process is a trial of Ray Tune rather than a worker of Ray Train. Raises a `CallbackError` if it is neither."""
    if find_group() is not None:
        return False
    if is_actor() and _import("ray.tune").get_context().get_trial_id() is not None:
        return True
    raise CallbackError("RayReport works only in a worker of Ray Train or a trial of Ray Tune. This process is neither.")


def _numbers(step: int, logs: Mapping[str, Any]) -> dict[str, float]:
    return dict(Reading(step, 0.0, dict(logs)).read().values)


def checkpoint_path(checkpoint: Any) -> str:
    """Returns the path or URL of a checkpoint that `RayReport` reported without copying it, for example for `trainer.restore`.

    Args:
        checkpoint: Ray's checkpoint, such as `result.checkpoint`. Those of `result.best_checkpoints` exist only if `ModelCheckpoint(keep=...)` kept them.

    Raises:
        ImportError: The package ray is not installed.
        ConfigError: `RayReport` did not report the checkpoint, or copied it, or it was deleted.
        CorruptCheckpointError: The file with the path is damaged.

    Restore the last checkpoint of a run of Ray Train::

        from fitflax.integrations.ray import checkpoint_path

        trainer = make_trainer()
        trainer.restore(checkpoint_path(result.checkpoint))
    """
    if not isinstance(checkpoint, _import("ray.train").Checkpoint):
        raise ConfigError(f"checkpoint_path(checkpoint) must be a checkpoint of Ray, such as result.checkpoint. Received: {checkpoint!r}.")
    with checkpoint.as_directory() as directory:
        path = read_pointer(Path(directory))
    if path is None:
        raise ConfigError(f"{checkpoint} was not reported by RayReport in a worker of Ray Train: it does not contain the path of a checkpoint.")
    if not is_url(path) and not Path(path).exists():
        raise ConfigError(f"The checkpoint {path} no longer exists. To keep more checkpoints, pass ModelCheckpoint(keep=...).")
    return path
