"""A run at one step, for the library's own modules: the live state, what else a resume needs, and the saver."""

from collections.abc import Callable
from typing import Any

import jax

from fitflax.checkpoints.formats.plain_tree import Plain
from fitflax.checkpoints.run_position import RunPosition, Timer
from fitflax.checkpoints.writer.saver import Saver
from fitflax.checkpoints.writer.snapshot import Snapshots
from fitflax.errors import NotReadyError
from fitflax.logs import Logs, StepValues
from fitflax.optimizers import get_learning_rates
from fitflax.parallel import Strategy
from fitflax.state import PyTree, TrainState
from fitflax.steps.kept_values import NOTHING, Keep, Kept
from fitflax.steps.live_state import LiveState
from fitflax.storage import Location

__all__ = ["RunView"]


class RunView:
    """A view of a run that checkpoints and summaries share. Copies and values are made on first access.

    Args:
        live: The live state, borrowed.
        step_values: The step's own values, still on the device; `None` if this process has not run a step.
        run_state: Returns what a resume needs besides the state.
        info: Returns what is saved with every checkpoint of the run, as JSON.
        joined: Returns what all processes together know about the data; all of them must call it.
        kept: What the step kept besides its values; `None` if an earlier process ran it.
    """

    def __init__(
        self,
        *,
        position: RunPosition,
        live: LiveState,
        logs: Logs,
        step_values: StepValues | None,
        timer: Timer,
        run_state: Callable[[], dict[str, Any]],
        info: Callable[[], dict[str, Any]],
        saver: Saver,
        joined: Callable[[], dict[str, Any] | None] = lambda: None,
        keep: Keep = NOTHING,
        kept: Kept | None = None,
    ) -> None:
        self.position = position
        self.logs = logs
        self.step_values = step_values
        self.timer = timer
        self.saver = saver
        self.keep = keep
        self.kept = kept or Kept((), {})
        self.info = info
        self.savers: list[tuple[Location, str]] = []  # The directories in which this checkpoint will be saved, with the names of the owners.
        self.before_saving: list[Callable[[], None]] = []  # Called once before the checkpoint is saved.
        self.num_saves = 0
        self.snapshots = Snapshots(live, saver)
        self._live = live
        self._version = live.version
        self._make_run_state = run_state
        self._join = joined
        # Copied parts of the state and values computed from it, by name.
        self._parts: dict[str, Any] = {}

    @property
    def strategy(self) -> Strategy:
        """The strategy by which the state is laid out."""
        return self._live.strategy

    def borrow(self) -> TrainState:
        """Returns the live state without a copy. Do not keep it beyond this step. Raises `NotReadyError` if the loop has advanced."""
        step = self.position.step
        if self._live.step != step:
            raise NotReadyError(f"The state of step {step} is gone: the loop is at step {self._live.step}. Read it before the loop advances.")
        return self._live.borrow()

    def _cached(self, name: str, make: Callable[[TrainState], Any]) -> Any:
        """Returns `make` of the live state, computed on first use."""
        if self._live.step == self.position.step and self._live.version != self._version:
            # A callback has replaced the state of this step.
            self._parts.clear()
            self._version = self._live.version
        if name not in self._parts:
            self._parts[name] = make(self.borrow())
        return self._parts[name]

    def part(self, name: str) -> PyTree:
        """Returns a field of the state, copied on first access."""
        return self._cached(name, lambda state: state.axes if name == "axes" else self._live.copy(getattr(state, name)))

    def learning_rates(self) -> dict[str, Any]:
        """Returns copies of the injected learning rates, still on the device."""
        return dict(self._cached("learning rates", lambda state: self._live.copy(get_learning_rates(state.opt_state))))

    def params_norm(self) -> float:
        """Returns the global L2 norm of the parameters."""
        return float(self._cached("norm of params", lambda state: float(jax.device_get(self.strategy.norm(state.params)))))

    # -- for saving --

    def run_state(self) -> dict[str, Any]:
        """Returns what a resume needs besides the state, as of now. Raises `NotReadyError` if the loop has advanced."""
        self.borrow()  # Only for its check that the loop has not advanced.
        return self._make_run_state()

    def join_data(self) -> dict[str, Any]:
        """Returns what all processes together know about the data, as part of what a resume needs. All of them must call it."""
        data = self._join()
        return {} if data is None else {"data": data}

    def finish_steps(self) -> None:
        """Waits for the dispatched steps if a snapshot would wait for them, so that the wait is not counted as time spent on saving."""
        if self.snapshots.wait_for_steps:
            jax.block_until_ready(self.borrow())

    def snapshot(self, extra: dict[str, PyTree]) -> Callable[[], tuple[Plain, Plain]]:
        """Returns a function that gives the state, and `extra` as part of `run`, as they are now; see `Snapshots`."""
        return self.snapshots.take(self.borrow(), extra)
