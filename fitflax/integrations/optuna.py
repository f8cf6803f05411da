"""`OptunaPruning` reports a run to an Optuna trial and stops it when Optuna prunes it. `resume_trials` resumes unfinished trials of a killed study."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from typing_extensions import override

from fitflax.callbacks.base import failure_since
from fitflax.callbacks.early_stopping import MonitorCallback
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.errors import CallbackError, ConfigError
from fitflax.integrations import import_package

__all__ = ["OptunaPruning", "resume_trials"]

_REASON = "OptunaPruning: "


def _optuna() -> Any:
    return import_package("optuna", owner="fitflax.integrations.optuna")


class OptunaPruning(MonitorCallback):
    """Reports a monitored value to an Optuna trial, and stops training when Optuna prunes the trial.

    A pruned run ends normally, with its last checkpoint and logs. Then `fit` raises `optuna.TrialPruned`, which `study.optimize` handles. A resumed run does
    not report values again.

    Args:
        trial: The trial. With several processes, the first one passes it; the others may pass `None`, and stop with the first.
        monitor: The flat name of the value.
        mode: `"min"`, `"max"`, or `None` for the direction that the loss or metric declares. It must be the study's direction.
        at: `"epoch"` to report at the end of each epoch, with the epoch's index, as Optuna's pruners expect; `"validation"` to report at each validation, with
            the step.

    Raises:
        ImportError: The package optuna is not installed.
        CallbackError: `trial` is not a trial or has several objectives, or `at` or `mode` is unknown.
        MonitorError: In `fit`: the value is not logged.
        optuna.TrialPruned: In `fit`: the trial was pruned. Raised after the run has ended.

    Tune the learning rate and prune bad trials::

        import optuna
        from fitflax.integrations.optuna import OptunaPruning

        def objective(trial):
            member = trainer.with_hyperparams(learning_rate=trial.suggest_float("learning_rate", 1e-4, 1.0, log=True))
            history = member.fit(x, y, epochs=10, validation_split=0.2, callbacks=[OptunaPruning(trial, "val_loss")], verbose=0)
            return history.history["val_loss"][-1]

        optuna.create_study(pruner=optuna.pruners.MedianPruner()).optimize(objective, n_trials=20)
    """

    def __init__(self, trial: Any, monitor: str = "val_loss", *, mode: str | None = None, at: str = "epoch") -> None:
        _optuna()
        super().__init__(monitor, mode)
        if (trial is None and jax.process_index() == 0) or (trial is not None and not (hasattr(trial, "report") and hasattr(trial, "should_prune"))):
            raise CallbackError(f"OptunaPruning(trial, ...) must be the trial that Optuna passes to the objective. Received: {trial!r}.")
        if at not in ("epoch", "validation"):
            raise CallbackError(f"OptunaPruning(at=...) must be 'epoch' or 'validation'. Received: {at!r}.")
        # A `FixedTrial` has no study.
        self._study = getattr(trial, "study", None)
        if self._study is not None and len(self._study.directions) > 1:
            raise CallbackError(
                "OptunaPruning needs a study with one objective; Optuna cannot prune others. Received: a trial of a study with several objectives."
            )
        self.trial = trial
        self.at = at
        self._reason = ""
        self._reported: set[int] = set()
        self._failure_before: BaseException | None = None

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        super().on_train_begin(logs)
        self._reason, self._failure_before = "", sys.exception()
        if self._study is not None:
            self._reported = set(self._study.get_trials(deepcopy=False)[self.trial.number].intermediate_values)

    @override
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self.at == "validation":
            super().on_checkpoint(checkpoint)

    @override
    def _observe(self, epoch: int, value: float) -> None:
        if self.trial is None or jax.process_index():
            return
        self._check_direction()
        step = self.trainer.step if self.at == "validation" else epoch
        if step not in self._reported:
            self.trial.report(value, step)
            self._reported.add(step)
        if self.trial.should_prune():
            self._stop(f"{self._monitor.key} is {value:g} at {'step' if self.at == 'validation' else 'epoch index'} {step}")

    def _check_direction(self) -> None:
        wanted = "minimize" if self._monitor.direction == "min" else "maximize"
        if self._study is not None and self._study.direction.name.lower() != wanted:
            key, direction = self._monitor.key, self._study.direction.name.lower()
            raise CallbackError(
                f"OptunaPruning monitors {key!r}, a value to {wanted}, but the study has direction={direction!r}. Create the study with direction={wanted!r}."
            )

    def _stop(self, reason: str) -> None:
        self._reason = reason
        self.trainer.stop(f"{_REASON}{reason}")

    @override
    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        reason = self.trainer.stop_reason
        if failure_since(self._failure_before) is None and reason is not None and reason.startswith(_REASON):
            pruned = _optuna().TrialPruned(reason.removeprefix(_REASON))
            pruned.is_in_all_processes = True  # So that `Interruption` does not note it as a failure.
            raise pruned

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"reason": self._reason}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["reason"]:
            self._stop(state["reason"])


def resume_trials(study: Any, objective: Callable[[Any], float | Sequence[float]]) -> list[int]:
    """Runs the trials of a study that a killed process left unfinished, with the same numbers and parameters.

    Call it before `study.optimize`. The objective finds the trial's checkpoint by the study and `trial.number`, for example with
    `ModelCheckpoint(f"runs/{trial.study.study_name}/trial-{trial.number}")` and `fit(resume="auto")`. No other process may use the study at that time,
    because its running trials would be treated as unfinished.

    Args:
        study: The study, loaded from its storage.
        objective: The objective, as for `study.optimize`.

    Returns:
        The numbers of the trials.

    Raises:
        ImportError: The package optuna is not installed.
        ConfigError: `study` is not an `optuna.Study`.
        Exception: Any error of the objective except `optuna.TrialPruned`. The trial is marked as failed.

    Resume a study of 20 trials::

        import optuna
        from fitflax.integrations.optuna import resume_trials

        study = optuna.create_study(study_name="rates", storage="sqlite:///runs/study.db", load_if_exists=True)
        resume_trials(study, objective)
        study.optimize(objective, n_trials=20 - len(study.trials))
    """
    optuna = _optuna()
    if not isinstance(study, optuna.Study):
        raise ConfigError(f"resume_trials(study, ...) must be an optuna.Study. Received: {study!r}.")
    numbers = []
    for frozen in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        trial = optuna.trial.Trial(study, frozen._trial_id)
        numbers.append(trial.number)
        try:
            values = objective(trial)
        except optuna.TrialPruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        except Exception:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            raise
        else:
            study.tell(trial, values)
    return numbers
