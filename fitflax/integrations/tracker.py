"""`TrackerLogger` sends a run's logs to an experiment tracker. `Tracker` is the interface of trackers."""

import copy
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from typing_extensions import override

from fitflax.callbacks.base import check_number, failure_since
from fitflax.callbacks.model_checkpoint import StoreCallback
from fitflax.callbacks.step_logger import Clock, StepLogger, learning_rates
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.errors import CallbackError, FitflaxError, warn
from fitflax.integrations.outbox import Ending, Outbox, RunStart
from fitflax.integrations.tracker_base import Point, Reading, Tracker, reading_of, readings_of_state, state_of
from fitflax.leaves import flat
from fitflax.logs import Logs
from fitflax.triggers import Trigger

__all__ = ["Point", "Tracker", "TrackerLogger"]

# The shortest interval for which speed is logged.
_SPEED_SECONDS = 1.0


class TrackerLogger(StepLogger):
    """Logs a run to an experiment tracker, any `Tracker`. `WandbLogger` and `MLflowLogger` are its subclasses.

    When `every` fires, at the end of each epoch, and at each validation, it logs:

    * `loss` and the metrics over the epoch so far, `val_loss` and other results of this step's evaluations, under the names of `History`; `step/loss` of the
      step alone, and `step/gradients_norm` if another callback needs it; `epoch` at the end of each epoch;
    * `learning_rate` if it can be read; `learning_rate/<label>` of parameter groups with different rates;
    * `time/steps_per_second` and `time/examples_per_second` without evaluations, at most once per second; `time/validation_seconds`;
    * sown numbers and images, and images of metrics.

    At the beginning it logs hyperparameters: settings of `fit` and `compile`, the module's fields, the configuration from `fit(config=...)`, and the commit of
    the script's git repository.

    A thread reads the values from the device and sends them every two seconds; training never waits for it. If the tracker is down or slow, there is one
    warning, and values are sent later. Values that cannot be sent by the end are reported in a second warning and kept in the last checkpoint; run the script
    again with `resume` to send them. With several processes, only the first one logs.

    A resumed run continues the tracker's run. It repeats the steps after its checkpoint with the same values, which are not logged twice. If settings have
    changed and the tracker already has values beyond the checkpoint, a new run begins, whose hyperparameters name the old one.

    Args:
        tracker: The tracker to log to.
        every: When to log values of training, in addition to the end of each epoch and of a loop without `fit`; by default every 50 steps.
        sown: The collection whose sown values are logged; `None` for none.
        checkpoint: The run's `BestCheckpoint` or `ModelCheckpoint`, whose best or newest checkpoint is uploaded at the end. If it is in a bucket, only its URL
            is logged.
        interval: Seconds between two requests. Each sends everything logged since the last one.
        end_seconds: The maximum time that the end of the run waits for a slow tracker.

    Attributes:
        run_id: The tracker's id of the run; `None` until it is known.
        num_lost: The number of points that were dropped because too many were waiting.

    Raises:
        CallbackError: An argument has a wrong type or value.

    >>> class Memory(Tracker):
    ...     def start(self, name, run_id, config):
    ...         self.points = []
    ...         return name
    ...     def log(self, points):
    ...         self.points += points
    ...     def finish(self, status, summary, artifact):
    ...         print(status, [(point.step, sorted(point.values)) for point in self.points])
    >>> import fitflax, numpy as np
    >>> from flax import linen as nn
    >>> trainer = fitflax.Trainer(nn.Dense(1))
    >>> trainer.compile("sgd", "mse")
    >>> _ = trainer.fit(np.zeros((8, 2)), np.ones((8, 1)), callbacks=[TrackerLogger(Memory())], verbose=0)
    finished [(1, ['epoch', 'learning_rate', 'loss', 'step/loss'])]
    """

    needs_gradients_norm = False

    def __init__(
        self,
        tracker: Tracker,
        *,
        every: Trigger | None = None,
        sown: str | None = "summaries",
        checkpoint: StoreCallback | None = None,
        interval: float = 2.0,
        end_seconds: float = 60.0,
    ) -> None:
        super().__init__(every=every, sown=sown)
        name = type(self).__name__
        if not isinstance(tracker, Tracker):
            raise CallbackError(f"{name}(tracker) must be a Tracker. Received: {tracker!r}.")
        if checkpoint is not None and not isinstance(checkpoint, StoreCallback):
            raise CallbackError(f"{name}(checkpoint=...) must be the run's BestCheckpoint or ModelCheckpoint. Received: {checkpoint!r}.")
        check_number(name, "interval", interval, "a number of seconds, at least 0", zero=True)
        check_number(name, "end_seconds", end_seconds, "a number of seconds, at least 0", zero=True)
        self.tracker = tracker
        self.checkpoint = checkpoint
        self.interval = float(interval)
        self.end_seconds = float(end_seconds)
        self._lost_before = 0
        self._outbox: Outbox | None = None
        self._plain_config: dict[str, Any] = {}
        self._reset("", 0)

    def _reset(self, name: str, step: int) -> None:
        self._name = name
        self._first_step = step
        self._run_id: str | None = None
        # The settings that were last logged, and the step from which other settings apply that were not logged; `None` if there are none.
        self._logged: tuple[str | None, int | None] = None, None
        self._start: RunStart | None = None
        # Readings that an earlier process or call of `fit` did not send.
        self._pending: list[Reading] = []
        self._written: tuple[int, frozenset[str]] = (-1, frozenset())
        self._has_rates = True
        self._clock = Clock(min_seconds=_SPEED_SECONDS)
        self._failure_before: BaseException | None = None

    @property
    @override
    def state_key(self) -> str:
        suffix = f"({type(self.tracker).__name__})" if type(self) is TrackerLogger else ""
        return f"{type(self).__name__}{suffix}"

    @property
    @override
    def _is_open(self) -> bool:
        return self._outbox is not None

    @property
    def run_id(self) -> str | None:
        """The tracker's id of the run; `None` until it is known."""
        return (None if self._outbox is None else self._outbox.run_id) or self._run_id

    @property
    def num_lost(self) -> int:
        """The number of points that were dropped because too many were waiting."""
        return self._lost_before + (0 if self._outbox is None else self._outbox.num_lost)

    # -- a run --

    @override
    def open_run(self, run_id: str, step: int) -> None:
        self.close()
        is_known, known_id, logged, pending = run_id == self._name, self._run_id, self._logged, self._pending
        self._reset(run_id, step)
        if is_known:
            self._run_id, self._logged, self._pending = known_id, logged, [reading for reading in pending if reading.step <= step]
        self._lost_before, self._plain_run, self._plain_config = 0, None, {}
        tracker = copy.copy(self.tracker)
        tracker.prepare()
        self._outbox = Outbox(tracker, resumed=step > 0 or not tracker.is_given, interval=self.interval)

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._failure_before = sys.exception()
        if self.params.get("resumed_step") is None:
            self._begin()

    def _begin(self) -> None:
        """Begins the run in the tracker, after a resume has restored the state."""
        if self._outbox is None or self._start is not None:
            return
        settings_before, changed_step = self._logged
        self._start = RunStart(self._name, self._run_id, self._settings, settings_before, self._first_step if changed_step is None else changed_step)
        self._outbox.begin(self._start)
        for reading in self._pending:
            self._outbox.put(reading)
        self._pending = []

    @property
    def _settings(self) -> dict[str, Any]:
        known = {name: self.params.get(name) for name in ("epochs", "log_every")}
        return flat({**{name: value for name, value in known.items() if value is not None}, **self.params.get("hyperparameters", {}), **self._plain_config})

    def _logged_settings(self) -> tuple[str | None, int | None]:
        """Returns the settings that were last logged, and the step from which others apply."""
        start, outbox = self._start, self._outbox
        if start is None or outbox is None:
            return self._logged
        if outbox.run_id is None and start.has_changed:
            return start.settings_before, start.changed_step
        return start.settings, None

    def _keep_for_next_call(self, outbox: Outbox, *, has_ended: bool) -> None:
        self._run_id, self._logged = self.run_id, self._logged_settings()
        if not has_ended:
            self._pending = [*self._pending, *dict.fromkeys(outbox.unsent)]
        self._outbox, self._lost_before = None, outbox.num_lost

    @override
    def close(self) -> None:
        if self._outbox is None:
            return
        if self._plain_run is not None:
            self._end(Ending("finished", {}))
        else:
            self._outbox.abandon()
            self._keep_for_next_call(self._outbox, has_ended=False)

    @override
    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        error, reason = failure_since(self._failure_before), self.trainer.stop_reason
        status = "finished" if error is None else "failed"
        if isinstance(error, KeyboardInterrupt) or (error is None and reason is not None and reason.startswith("interrupted by")):
            status = "interrupted"
        summary: dict[str, float | str] = dict(Reading(0, 0.0, dict(logs)).read().values)
        self._end(Ending(status, summary | ({} if reason is None else {"stop_reason": reason}), self._artifact()))

    def _artifact(self) -> tuple[str, Path | str] | None:
        if self.checkpoint is None:
            return None
        try:
            path = self.checkpoint.chosen_path()
        except (OSError, FitflaxError) as error:
            warn(f"{type(self).__name__} does not upload a checkpoint, because the directory of checkpoints cannot be listed: {error}")
            return None
        if path is None:
            return None
        name = "newest" if getattr(self.checkpoint, "best_step", None) is None else "best"
        return f"{name}-checkpoint", path if isinstance(path, Path) else str(path)

    def _end(self, ending: Ending) -> None:
        outbox = self._outbox
        if outbox is None:
            return
        self._begin()
        has_ended = False
        try:
            has_ended = outbox.end(ending, seconds=self.end_seconds)
        finally:
            self._keep_for_next_call(outbox, has_ended=has_ended)
        self._give_warnings(outbox)
        title, unsent = outbox.tracker.title, self._pending
        nor_checkpoint = "" if ending.artifact is None else ", nor the checkpoint"
        lost = f" {outbox.num_lost} older points were dropped, because too many were waiting." if outbox.num_lost else ""
        if unsent and not has_ended:
            steps = f"step {unsent[0].step}" if len(unsent) == 1 else f"{len(unsent)} points, of steps {unsent[0].step} to {unsent[-1].step}"
            again = "" if self._plain_run is not None else " To send those that are in the run's last checkpoint, resume the run."
            warn(f"{title} did not receive {steps}{nor_checkpoint}.{again}{lost}")
        elif not has_ended:
            warn(f"{title} received all values, but not the end of the run{nor_checkpoint}, and may show the run as running.{lost}")
        elif lost:
            warn(f"{title} did not receive all points.{lost}")

    def _give_warnings(self, outbox: Outbox) -> None:
        for message in outbox.take_warnings():
            warn(message)

    # -- resuming --

    @override
    def state_dict(self) -> dict[str, Any]:
        outbox = self._outbox
        if outbox is None:
            return {}
        settings, changed_step = self._logged_settings()
        return {
            "run_id": self.run_id or "",
            "settings": settings or "",
            "changed_step": -1 if changed_step is None else changed_step,
            # Only this process saves this state, so it must not contain arrays that span several processes.
            **state_of([*self._pending, *outbox.unsent], numbers_only=jax.process_count() > 1),
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._run_id = state["run_id"] or None
        changed_step = state.get("changed_step", -1)
        self._logged = state["settings"] or None, None if changed_step < 0 else changed_step
        self._pending = readings_of_state(state)
        self._begin()

    @override
    def load_closing(self, step: int, epoch: int, logs: Logs) -> None:
        outbox = self._outbox
        if outbox is None:
            return
        self._begin()
        reading = Reading(step, time.time(), logs.host_values)
        for other in outbox.unsent:
            if other.step == step:
                reading.drop(other.names)
        outbox.put(reading)

    # -- events --

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self._open_plain_run(checkpoint) is not None:
            self._plain_config = checkpoint.run.info().get("config", {})
        self._log(checkpoint)
        if self._plain_run is not None and checkpoint.is_last:
            self._end(Ending("finished", {}))  # A loop without a trainer may never call `close`.

    @override
    def on_closing(self, checkpoint: Checkpoint, epoch: int, logs: Mapping[str, Any]) -> None:
        self._log(checkpoint, is_closing=True)

    def _log(self, checkpoint: Checkpoint, *, is_closing: bool = False) -> None:
        outbox, now = self._outbox, time.time()
        assert outbox is not None
        self._begin()
        self._give_warnings(outbox)
        rates: dict[str, Any] = {}
        if self._has_rates:  # Skipped if there are none, because finding them takes as long as everything else here.
            rates = learning_rates(checkpoint)
            self._has_rates = bool(rates)
        extra = {"epoch": checkpoint.epoch + 1.0} if checkpoint.epoch_ends and not is_closing else {}
        extra |= self._clock.rates(self._clock.read(checkpoint, self.params))
        reading = reading_of(checkpoint, now, extra=extra, scalars=rates, sown=self._sown(checkpoint))
        step, written = self._written
        if step == checkpoint.step:  # If a partial epoch ends at this step, only new values are added.
            reading.drop(written)
            reading.drop_media()
        self._written = checkpoint.step, (written if step == checkpoint.step else frozenset()) | reading.names
        outbox.put(reading)
