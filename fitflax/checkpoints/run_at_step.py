"""A run at one step, for the library's own modules: the live state, what a resume needs besides, and who saves it."""

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from fitflax.checkpoints.point import Point, Timer
from fitflax.checkpoints.saving import Saver
from fitflax.checkpoints.trees import Plain, host_copy, only_split, to_plain, unpack
from fitflax.errors import NotReadyError
from fitflax.logs import Logs, StepValues
from fitflax.optimizers import get_learning_rates
from fitflax.parallel import Strategy
from fitflax.parallel.packed import Packed
from fitflax.state import PyTree, TrainState
from fitflax.steps.live import LiveState
from fitflax.steps.task import NOTHING, Keep, Kept

__all__ = ["RunAtStep"]


class RunAtStep:
    """What a checkpoint, and the summaries made of it, are views of. Nothing is copied or made until it is asked for.

    Args:
        point: Where the run is.
        live: The state; borrowed.
        logs: The values of this step by flat name.
        step_values: The step's own values, still on the device; `None` if no step was made in this process.
        timer: Measures the stretch of training that ends here.
        run_state: Makes what a resume needs besides the state.
        info: Makes what is saved with every checkpoint of the run, as JSON.
        saver: Who saves for the run.
        joined: Returns what all processes together know of the data; all of them call it.
        keep: What of the step is kept besides its values.
        kept: What was kept; `None` of a step that an earlier process made.

    Attributes:
        savers: Whose checkpoint of the run this is to be: directories, and the names under which they are wanted there.
        before_saving: What is to be done before it is saved, once.
        num_saves: How often it was saved.
    """

    def __init__(
        self,
        *,
        point: Point,
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
        self.point = point
        self.logs = logs
        self.step_values = step_values
        self.timer = timer
        self.saver = saver
        self.keep = keep
        self.kept = kept or Kept((), {})
        self.savers: list[tuple[Path, str]] = []
        self.before_saving: list[Callable[[], None]] = []
        self.num_saves = 0
        self._live = live
        self._version = live.version
        self._make_run_state = run_state
        self._make_info = info
        self._join = joined
        # Parts of the state that were copied, and what was computed of it, by name; so that nothing is copied twice.
        self._parts: dict[str, Any] = {}

    @property
    def strategy(self) -> Strategy:
        """Where the state lies."""
        return self._live.strategy

    def borrow(self) -> TrainState:
        """Returns the live state, not copied; it must not be kept beyond this step.

        Raises:
            NotReadyError: The loop has moved on.
        """
        step = self.point.step
        if self._live.step != step:
            raise NotReadyError(f"The state of step {step} is gone: the loop is at step {self._live.step}. Read it before the loop goes on.")
        return self._live.borrow()

    def _once(self, name: str, make: Callable[[TrainState], Any]) -> Any:
        """Returns what `make` makes of the live state, made when it is first asked for."""
        self._drop_replaced()
        if name not in self._parts:
            self._parts[name] = make(self.borrow())
        return self._parts[name]

    def _drop_replaced(self) -> None:
        if self._live.step == self.point.step and self._live.version != self._version:
            # A callback put another state in place: this step's state is that one now.
            self._parts.clear()
            self._version = self._live.version

    def part(self, name: str) -> PyTree:
        """Returns a field of the state, copied when first read."""
        return self._once(name, lambda state: state.axes if name == "axes" else self._live.copy(getattr(state, name)))

    def learning_rates(self) -> dict[str, Any]:
        """Returns the injected learning rates, copies that are still on the device."""
        return dict(self._once("learning rates", lambda state: self._live.copy(get_learning_rates(state.opt_state))))

    def params_norm(self) -> float:
        """Returns the global L2 norm of the parameters."""
        return float(self._once("norm of params", lambda state: float(self.strategy.norm(state.params))))

    # -- for whoever saves the run --

    def run_state(self) -> dict[str, Any]:
        """Returns what a resume needs besides the state, made now.

        Raises:
            NotReadyError: The loop has moved on.
        """
        self.borrow()  # For its check: what is made now is of this step only while the loop is here.
        return self._make_run_state()

    def info(self) -> dict[str, Any]:
        """Returns what is saved with every checkpoint of the run, as JSON."""
        return self._make_info()

    def join_data(self) -> dict[str, Any]:
        """Returns what all processes together know of the data, as a part of what a resume needs; all of them call it."""
        data = self._join()
        return {} if data is None else {"data": data}

    @property
    def snapshots_wait(self) -> bool:
        """Whether a copy of the state goes to the host at once."""
        return self._live.snapshots_wait

    def snapshot(self, beside: dict[str, PyTree]) -> Callable[[], tuple[Plain, Plain]]:
        """Returns what gives the state, and what is `beside` it in `run`, as they are now; one copy for all who save this step at the same time."""
        state = self.borrow()
        self._drop_replaced()
        reference = self._parts.get("snapshot")
        snapshot: Callable[[], tuple[Plain, Plain]] | None = None if reference is None else reference()
        if snapshot is None:
            if self.snapshots_wait:
                train = to_plain(state, root="train", may_span=True)
                train = only_split(train) if jax.process_index() else train
                copies = host_copy(train), host_copy(to_plain(beside, root="run", keep_lists=True))
                snapshot = lambda: copies  # noqa: E731
            else:
                snapshot = functools.partial(_unpacked, self._live.snapshot({"train": state, "run": beside}))
            self._parts["snapshot"] = weakref.ref(snapshot)  # Gone with the last save, not with the checkpoint, which the user may keep.
        return snapshot


def _unpacked(packed: Packed) -> tuple[Plain, Plain]:
    plains = unpack(packed, lists_in=["run"])
    return plains["train"], plains["run"]
