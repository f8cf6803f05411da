"""What a trainer keeps between calls: its task, its state, its data sources, the ID of the run, and requests to stop."""

import secrets
from collections.abc import Mapping
from typing import Any

import optax

from fitflax.checkpoints.formats.checkpoint_files import Saved
from fitflax.checkpoints.restore.partial import RestoreReport
from fitflax.checkpoints.writer.saver import NICENESS_ON_HOST, Saver
from fitflax.data import Position, Source
from fitflax.data.sources import OneShotSource
from fitflax.errors import ConfigError, OptimizerError, warn
from fitflax.loops.current_task import CurrentTask, MakeTask
from fitflax.loops.held_state import HeldState
from fitflax.loops.input_sources import Intake
from fitflax.models import OwnVariables
from fitflax.parallel import Strategy
from fitflax.steps.loss_and_metrics import Objective
from fitflax.steps.step_dispatch import Program

__all__ = ["Session"]


class Session:
    """The parts that the calls of a trainer share. Arguments are those of `CurrentTask` and `HeldState`."""

    def __init__(self, make_task: MakeTask, strategy: Strategy, seed: int, own: OwnVariables | None = None, members: int | None = None) -> None:
        self.strategy, self.seed, self.members = strategy, seed, members
        self.task = CurrentTask(make_task, strategy)
        self.state = HeldState(self.task, strategy, seed, own, members)
        self.intake = Intake(strategy, seed)
        self.run_id = secrets.token_hex(8)  # In checkpoint directories.
        self.stop_reason: str | None = None
        self.is_stopping = False
        self.is_fitting = False

    # -- what must be there --

    def need_trainable(self, what: str) -> Program:
        """Returns the program."""
        if self.state.is_serving:
            raise OptimizerError(
                f"{what} needs the optimizer state, but the trainer has only an InferenceState. To continue a run, call restore(path). To start a new run "
                "from its parameters, call restore(path, weights_only=True)."
            )
        return self.task.need_compiled(what)

    def need_idle(self, what: str) -> Program:
        """Returns the program for another run; raises `ConfigError` if `fit` is running, and errors of `need_trainable`."""
        if self.is_fitting:
            advice = f"Use another trainer there, or call {what}() after fit() has returned."
            raise ConfigError(f"{what}() was called while fit() is running, from a callback or another thread. {advice}")
        return self.need_trainable(what)

    # -- stopping --

    def stop(self, reason: str) -> None:
        """Requests that training stops; the first reason is kept."""
        if not self.is_stopping:
            self.is_stopping, self.stop_reason = True, reason

    def clear_stop(self) -> None:
        """Clears a request to stop."""
        self.is_stopping, self.stop_reason = False, None

    def note_exhausted(self) -> None:
        """Requests a stop and warns because the data ended before training did."""
        self.stop("data_exhausted")
        advice = "Pass data that can be iterated over again: arrays, or a function that returns a new iterator, `lambda: ...`."
        warn(f"The data ended before the run did, so training stops early. {advice}")

    # -- task and state --

    def compile(self, given: Any, optimizer: optax.GradientTransformation, objective: Objective, **settings: Any) -> None:
        """Replaces the task; arguments as in `CurrentTask.replace`.

        Parameters and collections stay, and so does the optimizer state if the optimizer is the same object. If it fails, the session stays as it
        was; but if the old optimizer state had been released already, the session is no longer compiled.
        """
        before = dict(vars(self.task))
        is_new = self.task.replace(given, optimizer, objective, **settings)
        try:
            self.state.match_task(is_new_optimizer=is_new)
        except BaseException:
            if self.task.is_compiled:
                vars(self.task).update(before)
            raise

    def restore(
        self,
        saved: Saved,
        batch: Any,
        *,
        weights_only: bool = False,
        partial: bool = False,
        mapping: Mapping[str, str | None] | None = None,
        cast: bool = False,
    ) -> RestoreReport:
        """Replaces the live state with a saved one, and takes its run ID unless only a part is restored; arguments as in `HeldState.restore`."""
        report = self.state.restore(saved, batch, weights_only=weights_only, partial=partial, mapping=mapping, cast=cast)
        if not (weights_only or partial):
            self.run_id = str(saved.metadata.get("run_id", self.run_id))
        return report

    def twin(self) -> "Session":
        """Returns a session with a copy of the state and the same compiled steps, independent of this one."""
        other = self.fresh(self.seed)
        other.state.copy_from(self.state)
        return other

    def fresh(self, seed: int, make_task: MakeTask | None = None, *, is_member: bool = False) -> "Session":
        """Returns a session with the same task and compiled steps but no state; with `make_task`, it makes its own task and compiles again."""
        own, members = None if self.state.own is None else self.state.own.copy(), None if is_member else self.members
        other = Session(make_task or self.task.make_task, self.strategy, seed, own, members)
        other.task.copy_from(self.task, compiles_again=make_task is not None)
        other.state.hyperparams = self.state.hyperparams
        return other

    # -- runs --

    def begin_run(self) -> None:
        """Creates a new run ID."""
        self.run_id = secrets.token_hex(8)

    def make_saver(self) -> Saver:
        """Returns a saver for one run."""
        return Saver(niceness=NICENESS_ON_HOST if self.strategy.is_on_host else 0)

    def next_position(self, source: Source) -> Position:
        """Returns where a new run begins in the data: a new pass, or the current position of an iterator."""
        if isinstance(source, OneShotSource):
            return Position(examples=source.taken)
        last = Position() if self.state.last_progress is None else self.state.last_progress.position
        return Position(last.passes + (last.examples > 0))
