"""`RunStart`: begins or resumes a run in a tracker."""

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fitflax.integrations.interface import Tracker

__all__ = ["RunStart"]

# Settings that may change when a run is resumed.
_NOT_COMPARED = ("epochs", "log_every")


@dataclasses.dataclass(frozen=True)
class RunStart:
    """Everything that the sending thread needs to begin a run."""

    name: str  # The run's id in fitflax.
    run_id: str | None = None  # The tracker's id of the run, if known.
    config: Mapping[str, float | str | bool] = dataclasses.field(default_factory=dict)
    settings_before: str | None = None  # The `settings` that were last logged.
    changed_step: int = 0  # The step from which `config` applies, if it differs from those.

    @property
    def settings(self) -> str:
        """The hyperparameters that distinguish runs, as text."""
        return json.dumps({name: value for name, value in self.config.items() if name not in _NOT_COMPARED}, sort_keys=True)

    @property
    def has_changed(self) -> bool:
        """Whether the settings differ from those that were last logged."""
        return self.settings_before is not None and self.settings_before != self.settings

    def begin(self, tracker: Tracker, warn_later: Callable[[str], None]) -> tuple[str, int | None]:
        """Begins or resumes the run in the tracker, or begins a new one if settings have changed. Called in the sending thread.

        Returns:
            The tracker's id of the run, and the step up to which points are in the old run; `None` if there is no old run.
        """
        commit = _git_commit()
        config: dict[str, Any] = {**self.config, **({} if commit is None else {"git_commit": commit})}
        before, now = self.settings_before, self.settings
        # The name depends only on the run and its settings, so that a process without the id finds the run. A run that was killed before its first checkpoint
        # begins again as the same run, and has the same values.
        run_id = tracker.start(f"{self.name}-{_digest(before or now)}", self.run_id, config)
        if self.run_id not in (None, run_id):
            warn_later(
                f"This run was logged to {tracker.title} as {self.run_id}. It continues as {run_id}: the active run, or a new one if the old run was deleted."
            )
        if not self.has_changed or tracker.is_given or (tracker.last_step("loss") or 0) <= self.changed_step:
            return run_id, None
        tracker.finish("interrupted", {}, None)
        config |= {"resumed_from": run_id, "resumed_step": self.changed_step}
        return tracker.start(f"{self.name}-{_digest(now)}-{self.changed_step}", None, config), self.changed_step


def _digest(settings: str) -> str:
    return hashlib.sha256(settings.encode()).hexdigest()[:6]


def _git_commit() -> str | None:
    """Returns the commit of the script's git repository, or of the current directory's; `None` if there is no repository or no git."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    for directory in ([Path(script).resolve().parent] if script else []) + [Path.cwd()]:
        try:
            found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=directory, capture_output=True, timeout=10, check=False, text=True)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if found.returncode == 0 and found.stdout.strip():
            return found.stdout.strip()
    return None
