"""What loops yield: `Checkpoint`, a lazy view of a run at one step, and `Summary`, the same with evaluation metrics.

Nothing is read or copied until it is asked for. The state is borrowed: a part that is read is copied then, and stays valid after later steps; a first
read after the loop has moved on is an error.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import jax

from fitflax.checkpoints.point import Point, Timer
from fitflax.checkpoints.saving import Saver
from fitflax.checkpoints.trees import Plain, host_copy, only_split, to_plain, unpack
from fitflax.data import Position
from fitflax.errors import ConfigError, NotReadyError
from fitflax.logs import Kind, Logs, StepValues
from fitflax.optimizers import get_learning_rates
from fitflax.parallel import Strategy
from fitflax.parallel.packed import Packed
from fitflax.state import PyTree, TrainState
from fitflax.steps.live import LiveState
from fitflax.steps.task import NOTHING, Keep, Kept

__all__ = ["Checkpoint", "Summary"]


class Checkpoint:
    """A run at one step, as yielded by a `TrainLoop`. Made by loops only.

    Attributes:
        point: Where the run is.
        logs: The values of this step by flat name, shared by all who see this checkpoint: group `train` by key, others as `<group>_<key>`.
        step_values: The step's own values, still on the device; `None` if no step was made in this process.
        saver: Who saves for the run.

    >>> import fitflax, optax, numpy as np
    >>> from flax import linen as nn
    >>> trainer = fitflax.Trainer(nn.Dense(1))
    >>> trainer.compile(optax.sgd(0.1), "mse")
    >>> [c.step for c in trainer.train_loop((np.ones((8, 2)), np.ones((8, 1))), steps=5, every=fitflax.every(steps=2))]
    [2, 4, 5]
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
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        parts: dict[str, PyTree] | None = None,
    ) -> None:
        self.point = point
        self.logs = logs
        self.step_values = step_values
        # Whose checkpoint of the run this is to be: directories, and the names under which they are wanted there.
        self.savers: list[tuple[Path, str]] = []
        # What is to be done before it is saved, once, and how often it was.
        self.before_saving: list[Callable[[], None]] = []
        self.num_saves = 0
        self._live = live
        self._version = live.version
        self._timer = timer
        self._make_run_state = run_state
        self._join = joined
        self._make_info = info
        self.saver = saver
        self._keep = keep
        self._kept = kept
        self._groups: dict[str, Mapping[str, Any]] = dict(groups or {})
        # Shared with summaries made from this checkpoint, so that no part is copied twice.
        self._parts: dict[str, PyTree] = {} if parts is None else parts

    def __repr__(self) -> str:
        return f"{type(self).__name__}(step={self.step}, epoch={self.epoch}, step_in_epoch={self.step_in_epoch})"

    @property
    def step(self) -> int:
        """Finished updates."""
        return self.point.step

    @property
    def epoch(self) -> int:
        """Index of the epoch, from 0."""
        return self.point.epoch

    @property
    def step_in_epoch(self) -> int:
        """Finished updates of the epoch."""
        return self.point.step_in_epoch

    @property
    def n_completed_steps(self) -> int:
        """Updates since the last checkpoint."""
        return self.point.n_completed_steps

    @property
    def data_position(self) -> Position:
        """Passes finished, and real examples used of the present one."""
        return self.point.position

    @property
    def strategy(self) -> Strategy:
        """Where the state lies."""
        return self._live.strategy

    def borrow(self) -> TrainState:
        """Returns the live state, not copied; it must not be kept beyond this checkpoint.

        Raises:
            NotReadyError: The loop has moved on.
        """
        if self._live.step != self.step:
            raise NotReadyError(f"The state of step {self.step} is gone: the loop is at step {self._live.step}. Read it before the loop goes on.")
        return self._live.borrow()

    def _drop_replaced(self) -> None:
        if self._live.step == self.step and self._live.version != self._version:
            # A callback put another state in place: this step's state is that one now.
            self._parts.clear()
            self._version = self._live.version

    def _part(self, name: str) -> PyTree:
        self._drop_replaced()
        if name not in self._parts:
            part = getattr(self.borrow(), name)
            self._parts[name] = part if name == "axes" else self._live.copy(part)
        return self._parts[name]

    @property
    def state(self) -> TrainState:
        """The whole state, copied when first read."""
        return TrainState(**{field.name: self._part(field.name) for field in dataclasses.fields(TrainState)})

    @property
    def model_params(self) -> PyTree:
        """The parameters, copied when first read."""
        return self._part("params")

    @property
    def model_state(self) -> dict[str, PyTree]:
        """The module's other collections, copied when first read."""
        return dict(self._part("model_state"))

    @property
    def optimizer_state(self) -> PyTree:
        """The optax state, copied when first read."""
        return self._part("opt_state")

    def _values(self) -> StepValues:
        if self.step_values is None:
            raise NotReadyError(f"This process has not run step {self.step}; it was restored.")
        return self.step_values

    @property
    def loss(self) -> float:
        """The loss of this step alone."""
        return self._values().loss

    @property
    def has_gradients_norm(self) -> bool:
        """Whether the step computed the norm of its gradient."""
        return bool(self._keep.norm)

    @property
    def gradients_norm(self) -> float:
        """The global L2 norm of this step's gradient; NaN where `train_step` is overridden, whose gradients nobody knows.

        Raises:
            NotReadyError: The run is one of `fit`, and none of its callbacks said that it reads this.
        """
        if self._keep.norm is False:
            raise NotReadyError(f"The gradient's norm of step {self.step} was not computed: fit a callback whose needs_gradients_norm is True.")
        return self._values().gradients_norm

    @property
    def learning_rates(self) -> dict[str, Any]:
        """The injected learning rates, copies that are still on the device, by the names of `optimizers.get_learning_rates`."""
        self._drop_replaced()
        if "learning_rates" not in self._parts:
            self._parts["learning_rates"] = self._live.copy(get_learning_rates(self.borrow().opt_state))
        return dict(self._parts["learning_rates"])

    @property
    def run_id(self) -> str:
        """The name of the run, by which directories tell runs apart."""
        return str(self.info["run_id"])

    @property
    def params_norm(self) -> float:
        """The global L2 norm of the parameters; computed when first read."""
        self._drop_replaced()
        if "params_norm" not in self._parts:
            self._parts["params_norm"] = float(self.strategy.norm(self.borrow().params))
        return float(self._parts["params_norm"])

    @property
    def grads(self) -> PyTree:
        """The gradient of this step by parameter, global; an output of the step's own, so it needs no copy. `()` where `train_step` is overridden.

        Raises:
            NotReadyError: The run does not keep gradients.
        """
        if not self._keep.grads:
            raise NotReadyError(f"The gradient of step {self.step} was not kept: pass train_loop(grads=True), or fit a callback whose needs_grads is True.")
        return self._what_was_kept().grads

    @property
    def sown(self) -> dict[str, PyTree]:
        """What the module sowed in this step, by collection; outputs of the step's own. Numbers are averaged over replicas, arrays of all replicas joined.

        Of a batch that was split into micro-batches it is what the last one left; `{}` where `train_step` is overridden.

        Raises:
            NotReadyError: The run keeps no sown values.
        """
        if not self._keep.sown:
            raise NotReadyError(f"What was sown in step {self.step} was not kept: pass train_loop(sown=...), or fit a callback that names it in needs_sown.")
        return self._what_was_kept().sown

    def _what_was_kept(self) -> Kept:
        return self._kept or Kept((), {})  # Nothing of a step that an earlier process made.

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """`{group: {key: value}}`: group `train` over the epoch so far, then the groups of evaluations."""
        train = {key: value for key, value in self.logs.items() if key not in self.evaluated}
        return {"train": train, **self.evaluations}

    @property
    def evaluations(self) -> dict[str, dict[str, Any]]:
        """`{group: {key: value}}` of what was evaluated at this very step; waits for nothing."""
        return {group: dict(values) for group, values in self._groups.items()}

    @property
    def evaluated(self) -> frozenset[str]:
        """Flat names of the values that were evaluated at this very step."""
        return frozenset(f"{group}_{key}" for group, values in self._groups.items() for key in values)

    @property
    def elapsed_time(self) -> float:
        """Seconds of training since the last checkpoint, without compilation and without the consumer's time. Waits for the device."""
        return self._timer.stop()

    @property
    def run_state(self) -> dict[str, Any]:
        """What a resume needs besides the state: sums of the running epoch, states of callbacks; made when it is read."""
        self.borrow()  # For its check: what is made now is of this step only while the loop is here.
        return self._make_run_state()

    def with_metrics(self, group: str, values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> "Summary":
        """Returns this checkpoint with the metrics of an evaluation; also put into the shared `logs`.

        Raises:
            ConfigError: It has a group of that name already.
        """
        if group in self._groups:
            raise ConfigError(f"Two evaluations of one checkpoint are named {group!r}. Give one of them another name.")
        for key, value in values.items():
            self.logs[f"{group}_{key}"] = value
        self.logs.kinds = {**self.logs.kinds, **{f"{group}_{key}": kind for key, kind in kinds.items()}}
        return self._again(Summary, {**self._groups, group: values})

    def _again(self, kind: "type[Summary]", groups: Mapping[str, Mapping[str, Any]]) -> "Summary":
        made = kind(
            point=self.point,
            live=self._live,
            logs=self.logs,
            step_values=self.step_values,
            timer=self._timer,
            run_state=self._make_run_state,
            joined=self._join,
            info=self._make_info,
            saver=self.saver,
            keep=self._keep,
            kept=self._kept,
            groups=groups,
            parts=self._parts,
        )
        made._version = self._version
        return made

    # -- for whoever saves the run --

    @property
    def info(self) -> dict[str, Any]:
        """What is saved with every checkpoint of the run, as JSON."""
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
            self._parts["snapshot"] = weakref.ref(snapshot)  # Gone with the last save, not with this checkpoint, which the user may keep.
        return snapshot

    def deferred_metrics(self) -> Callable[[], dict[str, dict[str, Any]]]:
        """Returns what gives the recorded ones of `metrics` as they are now, in another thread, which then waits for the step."""
        read, evaluated, evaluations, is_recorded = self.logs.deferred(), self.evaluated, self.evaluations, self.logs.is_recorded

        def metrics() -> dict[str, dict[str, Any]]:
            train = {key: value for key, value in read().items() if key not in evaluated and is_recorded(key)}
            others = {group: {key: value for key, value in values.items() if is_recorded(f"{group}_{key}")} for group, values in evaluations.items()}
            return {"train": train, **others}

        return metrics

    def __copy__(self) -> Self:
        return self


def _unpacked(packed: Packed) -> tuple[Plain, Plain]:
    plains = unpack(packed, lists_in=["run"])
    return plains["train"], plains["run"]


class Summary(Checkpoint):
    """A `Checkpoint` with evaluation metrics added. Made by an `EvalLoop`; several can follow one another.

    >>> issubclass(Summary, Checkpoint)
    True
    """
