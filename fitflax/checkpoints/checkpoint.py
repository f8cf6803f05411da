"""What loops yield: `Checkpoint`, a lazy view of a run at one step, and `Summary`, the same with evaluation metrics.

Values are read or copied on first access and stay valid after later steps. The state is borrowed from the loop, so a first access after the loop has
advanced is an error. Modules of fitflax use the `RunView` of a checkpoint.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import jax

from fitflax.checkpoints.saver import Saver, Snapshots
from fitflax.data import Position
from fitflax.errors import ConfigError, NotReadyError
from fitflax.logs import Kind, Logs, StepValues, flat_name
from fitflax.optimizers import get_learning_rates
from fitflax.state import PyTree, TrainState
from fitflax.steps.live_state import LiveState
from fitflax.steps.outputs import NOTHING, Keep, Kept
from fitflax.storage import Location
from fitflax.triggers import Moment


class Timer:
    """Measures the training time between two checkpoints, until the device has finished, excluding compilation, evaluations and the consumer.

    Attributes:
        seconds_evaluating: The time of all evaluations by an `EvalLoop` since the run began.
    """

    def __init__(self, clock: Callable[[], float], seconds_evaluating: float = 0.0) -> None:
        self.seconds_evaluating = seconds_evaluating
        self._clock = clock
        self._begin = clock()
        self._end: float | None = None
        self._values: StepValues | None = None
        self._excluded = 0.0

    @contextlib.contextmanager
    def excluding(self) -> Iterator[None]:
        """Excludes the time of a block."""
        begin = self._clock()
        try:
            yield
        finally:
            self._excluded += self._clock() - begin

    def pause(self, values: StepValues | None) -> None:
        """Records that the loop yields to the consumer now; `values` may still be computed on the device."""
        self._end, self._values = self._clock(), values
        if values is not None:
            values.before_read = self.stop  # Later, it would be unknown when the device finished.

    def stop(self, *, wait: bool = True) -> float:
        """Returns the measured seconds.

        With `wait`, this includes the work that the device still had to do when the loop yielded, but not its idle time.
        """
        values = self._values
        if not wait:
            self._values = None
        elif values is not None and not values.is_ready:  # Ready values stay, because another thread may be about to return from `wait`.
            values.wait()
            if self._values is not None:  # Otherwise, another thread has stopped it.
                self._end, self._values = self._clock(), None
        end = self._clock() if self._end is None else self._end
        return max(end - self._begin - self._excluded, 0.0)


@dataclasses.dataclass(frozen=True)
class RunPosition:
    """The position of a run at a checkpoint. All values are on the host; public ones are described in `Checkpoint`."""

    moment: Moment  # The same in all processes.
    epoch: int
    step_in_epoch: int
    data_position: Position
    n_completed_steps: int
    used: tuple[int, ...] = ()  # The examples of the current pass that each process has used, if each has its own shard.
    is_last: bool = False
    is_rescue: bool = False  # Whether the run is ending because of a signal or an exception.
    is_repeat: bool = False  # Whether this step already was a checkpoint before it was known to be the last.


@dataclasses.dataclass(kw_only=True, eq=False)
class RunView:
    """A run at one step, for the library's own modules: the live state, what else a resume needs, and the saver.

    Checkpoints and summaries share it. Copies and values are made on first access.

    Args:
        live: The live state, borrowed.
        step_values: The step's own values, still on the device; `None` if this process has not run a step.
        run_state: Returns what a resume needs besides the state. Call it before the loop advances.
        info: Returns what is saved with every checkpoint of the run, as JSON.
        joined: Returns the states of the data of all processes if each has its own shard, else `None`; all of them must call it.
        kept: What the step kept besides its values; `None` if an earlier process ran it.
        savers: The directories in which this checkpoint will be saved, with the names of the owners.
        before_saving: Called once before the checkpoint is saved. Functions that they return are added to `uploads`.
        uploads: Functions that wait for uploads of logs. Called before the checkpoint is completed.
    """

    position: RunPosition
    live: LiveState
    logs: Logs
    step_values: StepValues | None
    timer: Timer
    run_state: Callable[[], dict[str, Any]]
    info: Callable[[], dict[str, Any]]
    saver: Saver
    joined: Callable[[], dict[str, Any] | None] = lambda: None
    keep: Keep = NOTHING
    kept: Kept | None = None
    savers: list[tuple[Location, str]] = dataclasses.field(default_factory=list)
    before_saving: list[Callable[[], Callable[[], None] | None]] = dataclasses.field(default_factory=list)
    uploads: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    num_saves: int = 0

    def __post_init__(self) -> None:
        self.snapshots = Snapshots(self.live, self.saver)
        self._version = self.live.version
        # Copied parts of the state and values computed from it, by name.
        self._parts: dict[str, Any] = {}

    def borrow(self) -> TrainState:
        """Returns the live state without a copy. Do not keep it beyond this step. Raises `NotReadyError` if the loop has advanced."""
        step = self.position.moment.step
        if self.live.step != step:
            raise NotReadyError(f"The state of step {step} is gone: the loop is at step {self.live.step}. Read it before the loop advances.")
        return self.live.borrow()

    def cached(self, name: str, make: Callable[[TrainState], Any]) -> Any:
        """Returns `make` of the live state, computed on first use."""
        if self.live.step == self.position.moment.step and self.live.version != self._version:
            # A callback has replaced the state of this step.
            self._parts.clear()
            self._version = self.live.version
        if name not in self._parts:
            self._parts[name] = make(self.borrow())
        return self._parts[name]

    def part(self, name: str) -> PyTree:
        """Returns a field of the state, copied on first access."""
        return self.cached(name, lambda state: state.axes if name == "axes" else self.live.strategy.copy(getattr(state, name)))

    def finish_steps(self, *, asynchronous: bool) -> None:
        """Waits for the dispatched steps if a save would wait for them, so that the wait is not counted as time spent on saving."""
        if not asynchronous or self.snapshots.waits:  # In this order: `waits` reserves device memory for a copy, which only asynchronous saves make.
            self.timer.stop()
            jax.block_until_ready(self.borrow())


class Checkpoint:
    """A run at one step, as yielded by a `TrainLoop`. Only loops create it.

    Attributes:
        run: The underlying view, for the library's own callbacks.

    >>> import fitflax, optax, numpy as np
    >>> from flax import linen as nn
    >>> trainer = fitflax.Trainer(nn.Dense(1))
    >>> trainer.compile(optax.sgd(0.1), "mse")
    >>> [c.step for c in trainer.train_loop((np.ones((8, 2)), np.ones((8, 1))), steps=5, every=fitflax.every(steps=2))]
    [2, 4, 5]
    """

    def __init__(self, run: RunView, groups: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.run = run
        self._groups: dict[str, Mapping[str, Any]] = dict(groups or {})

    def __repr__(self) -> str:
        return f"{type(self).__name__}(step={self.step}, epoch={self.epoch}, step_in_epoch={self.step_in_epoch})"

    def __copy__(self) -> Self:
        return self

    # -- the position --

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self.run.position.moment.step

    @property
    def epoch(self) -> int:
        """The index of the epoch, from 0."""
        return self.run.position.epoch

    @property
    def step_in_epoch(self) -> int:
        """The number of completed steps of the epoch."""
        return self.run.position.step_in_epoch

    @property
    def n_completed_steps(self) -> int:
        """The number of steps since the last checkpoint."""
        return self.run.position.n_completed_steps

    @property
    def epoch_ends(self) -> bool:
        """Whether the epoch ends here."""
        return self.run.position.moment.epoch_ends

    @property
    def is_last(self) -> bool:
        """Whether this is the last step of the run, as far as is known at this step."""
        return self.run.position.is_last

    @property
    def data_position(self) -> Position:
        """The number of finished passes over the data, and of real examples used in the current pass."""
        return self.run.position.data_position

    @property
    def run_id(self) -> str:
        """The identifier of the run."""
        return str(self.run.info()["run_id"])

    # -- the state --

    @property
    def state(self) -> TrainState:
        """The whole state, copied on first access."""
        return TrainState(**{field.name: self.run.part(field.name) for field in dataclasses.fields(TrainState)})

    @property
    def model_params(self) -> PyTree:
        """The parameters, copied on first access."""
        return self.run.part("params")

    @property
    def model_state(self) -> dict[str, PyTree]:
        """The module's other collections, copied on first access."""
        return dict(self.run.part("model_state"))

    @property
    def optimizer_state(self) -> PyTree:
        """The Optax state, copied on first access."""
        return self.run.part("opt_state")

    @property
    def run_state(self) -> dict[str, Any]:
        """What a resume needs besides the state, such as sums of the current epoch and states of callbacks. Created on access."""
        self.run.borrow()  # Only for its check that the loop has not advanced.
        return self.run.run_state()

    @property
    def learning_rates(self) -> dict[str, Any]:
        """Copies of the injected learning rates, still on the device, named as by `optimizers.get_learning_rates`."""
        return dict(self.run.cached("learning rates", lambda state: self.run.live.strategy.copy(get_learning_rates(state.opt_state))))

    @property
    def params_norm(self) -> float:
        """The global L2 norm of the parameters, computed on first access."""
        self.run.timer.stop()  # Reading the norm waits for the step.
        return float(self.run.cached("norm of params", lambda state: jax.device_get(self.run.live.strategy.norm(state.params))))

    # -- the step --

    def _values(self) -> StepValues:
        if self.run.step_values is None:
            raise NotReadyError(f"Step {self.step} was restored from a checkpoint, so its loss and gradients are not available. Run a step first.")
        return self.run.step_values

    @property
    def loss(self) -> float:
        """The loss of this step alone."""
        return self._values().loss

    @property
    def has_gradients_norm(self) -> bool:
        """Whether the step computed the norm of its gradients."""
        return bool(self.run.keep.norm)

    @property
    def gradients_norm(self) -> float:
        """The global L2 norm of this step's gradients; NaN if `train_step` is overridden, because its gradients are not known.

        Raises:
            NotReadyError: The run was started by `fit`, and none of its callbacks needs the norm.
        """
        if self.run.keep.norm is False:
            raise NotReadyError(f"The gradient norm of step {self.step} was not computed. Use a callback with needs_gradients_norm = True.")
        return self._values().gradients_norm

    @property
    def grads(self) -> PyTree:
        """The global gradients of this step, by parameter; `()` if `train_step` is overridden. They are an output of the step, so they need no copy.

        Raises:
            NotReadyError: The run does not keep gradients.
        """
        if not self.run.keep.grads:
            raise NotReadyError(f"The gradients of step {self.step} were not kept. Pass train_loop(grads=True), or use a callback with needs_grads = True.")
        return () if self.run.kept is None else self.run.kept.grads

    @property
    def sown(self) -> dict[str, PyTree]:
        """The values that the module sowed in this step, by collection. Numbers are averaged over replicas; arrays of all replicas are joined.

        With micro-batches, these are the values of the last one. `{}` if `train_step` is overridden.

        Raises:
            NotReadyError: The run does not keep sown values.
        """
        if not self.run.keep.sown:
            raise NotReadyError(
                f"The values sown in step {self.step} were not kept. Pass train_loop(sown=...), or use a callback that names the collection in needs_sown."
            )
        return {} if self.run.kept is None else self.run.kept.sown

    @property
    def elapsed_time(self) -> float:
        """Seconds of training since the last checkpoint, excluding compilation, evaluations and the caller's work between steps. Waits for the device.

        A caller that waits for the state itself must read this value first.
        """
        return self.run.timer.stop()

    # -- metrics --

    @property
    def logs(self) -> Logs:
        """The values of this step by flat name: `<key>` for group `train`, `<group>_<key>` for others. Shared by all callbacks that get this checkpoint."""
        return self.run.logs

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """`{group: {key: value}}`: group `train` over the epoch so far, then the groups of evaluations."""
        train = {key: value for key, value in self.logs.items() if key not in self.evaluated}
        return {"train": train, **self.evaluations}

    @property
    def evaluations(self) -> dict[str, dict[str, Any]]:
        """`{group: {key: value}}`: the evaluations at this step. Does not wait for the device."""
        return {group: dict(values) for group, values in self._groups.items()}

    @property
    def evaluated(self) -> frozenset[str]:
        """The flat names of the values that were evaluated at this step."""
        return frozenset(flat_name(group, key) for group, values in self._groups.items() for key in values)

    def deferred_metrics(self) -> Callable[[], dict[str, dict[str, Any]]]:
        """Returns a function that gives the recorded `metrics` as of now. Call it in another thread, because it waits for the step."""
        read, evaluated, evaluations, is_recorded = self.logs.deferred(), self.evaluated, self.evaluations, self.logs.is_recorded

        def metrics() -> dict[str, dict[str, Any]]:
            train = {key: value for key, value in read().items() if key not in evaluated and is_recorded(key)}
            others = {group: {key: value for key, value in values.items() if is_recorded(flat_name(group, key))} for group, values in evaluations.items()}
            return {"train": train, **others}

        return metrics

    def with_metrics(self, group: str, values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> "Summary":
        """Returns this checkpoint with the metrics of an evaluation added, and adds them to the shared `logs`.

        Args:
            group: The name of the group.
            values: The metrics by key.
            kinds: The kind of each metric, by key.

        Raises:
            ConfigError: There already is a group with that name.
        """
        if group in self._groups:
            raise ConfigError(f"Two evaluations of one checkpoint are named {group!r}. Give one of them another name.")
        for key, value in values.items():
            self.logs[flat_name(group, key)] = value
        self.logs.kinds = {**self.logs.kinds, **{flat_name(group, key): kind for key, kind in kinds.items()}}
        return Summary(self.run, {**self._groups, group: values})


class Summary(Checkpoint):
    """A `Checkpoint` with evaluation metrics added. Created by an `EvalLoop`; several can be chained.

    >>> issubclass(Summary, Checkpoint)
    True
    """
