"""What loops yield: `Checkpoint`, a lazy view of a run at one step, and `Summary`, the same with evaluation metrics.

Nothing is read or copied until it is asked for. The state is borrowed: a part that is read is copied then, and stays valid after later steps; a first
read after the loop has moved on is an error.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

from fitflax.checkpoints.run_at_step import RunAtStep
from fitflax.data import Position
from fitflax.errors import ConfigError, NotReadyError
from fitflax.logs import Kind, Logs, StepValues, flat_name
from fitflax.state import PyTree, TrainState

__all__ = ["Checkpoint", "Summary"]


class Checkpoint:
    """A run at one step, as yielded by a `TrainLoop`. Made by loops only.

    Attributes:
        run: What it is a view of; for the library's own callbacks.

    >>> import fitflax, optax, numpy as np
    >>> from flax import linen as nn
    >>> trainer = fitflax.Trainer(nn.Dense(1))
    >>> trainer.compile(optax.sgd(0.1), "mse")
    >>> [c.step for c in trainer.train_loop((np.ones((8, 2)), np.ones((8, 1))), steps=5, every=fitflax.every(steps=2))]
    [2, 4, 5]
    """

    def __init__(self, run: RunAtStep, groups: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.run = run
        self._groups: dict[str, Mapping[str, Any]] = dict(groups or {})

    def __repr__(self) -> str:
        return f"{type(self).__name__}(step={self.step}, epoch={self.epoch}, step_in_epoch={self.step_in_epoch})"

    def __copy__(self) -> Self:
        return self

    # -- where --

    @property
    def step(self) -> int:
        """Finished updates."""
        return self.run.point.step

    @property
    def epoch(self) -> int:
        """Index of the epoch, from 0."""
        return self.run.point.epoch

    @property
    def step_in_epoch(self) -> int:
        """Finished updates of the epoch."""
        return self.run.point.step_in_epoch

    @property
    def n_completed_steps(self) -> int:
        """Updates since the last checkpoint."""
        return self.run.point.n_completed_steps

    @property
    def epoch_ends(self) -> bool:
        """Whether the epoch ends here."""
        return self.run.point.epoch_ends

    @property
    def is_last(self) -> bool:
        """Whether no step follows in this run, as far as it is known yet."""
        return self.run.point.is_last

    @property
    def data_position(self) -> Position:
        """Passes finished, and real examples used of the present one."""
        return self.run.point.position

    @property
    def run_id(self) -> str:
        """The name of the run, by which directories tell runs apart."""
        return str(self.run.info()["run_id"])

    # -- the state --

    @property
    def state(self) -> TrainState:
        """The whole state, copied when first read."""
        return TrainState(**{field.name: self.run.part(field.name) for field in dataclasses.fields(TrainState)})

    @property
    def model_params(self) -> PyTree:
        """The parameters, copied when first read."""
        return self.run.part("params")

    @property
    def model_state(self) -> dict[str, PyTree]:
        """The module's other collections, copied when first read."""
        return dict(self.run.part("model_state"))

    @property
    def optimizer_state(self) -> PyTree:
        """The optax state, copied when first read."""
        return self.run.part("opt_state")

    @property
    def run_state(self) -> dict[str, Any]:
        """What a resume needs besides the state: sums of the running epoch, states of callbacks; made when it is read."""
        return self.run.run_state()

    @property
    def learning_rates(self) -> dict[str, Any]:
        """The injected learning rates, copies that are still on the device, by the names of `optimizers.get_learning_rates`."""
        return self.run.learning_rates()

    @property
    def params_norm(self) -> float:
        """The global L2 norm of the parameters; computed when first read."""
        return self.run.params_norm()

    # -- the step --

    def _values(self) -> StepValues:
        if self.run.step_values is None:
            raise NotReadyError(f"This process has not run step {self.step}; it was restored.")
        return self.run.step_values

    @property
    def loss(self) -> float:
        """The loss of this step alone."""
        return self._values().loss

    @property
    def has_gradients_norm(self) -> bool:
        """Whether the step computed the norm of its gradient."""
        return bool(self.run.keep.norm)

    @property
    def gradients_norm(self) -> float:
        """The global L2 norm of this step's gradient; NaN where `train_step` is overridden, whose gradients nobody knows.

        Raises:
            NotReadyError: The run is one of `fit`, and none of its callbacks said that it reads this.
        """
        if self.run.keep.norm is False:
            raise NotReadyError(f"The gradient's norm of step {self.step} was not computed: fit a callback whose needs_gradients_norm is True.")
        return self._values().gradients_norm

    @property
    def grads(self) -> PyTree:
        """The gradient of this step by parameter, global; an output of the step's own, so it needs no copy. `()` where `train_step` is overridden.

        Raises:
            NotReadyError: The run does not keep gradients.
        """
        if not self.run.keep.grads:
            raise NotReadyError(f"The gradient of step {self.step} was not kept: pass train_loop(grads=True), or fit a callback whose needs_grads is True.")
        return self.run.kept.grads

    @property
    def sown(self) -> dict[str, PyTree]:
        """What the module sowed in this step, by collection; outputs of the step's own. Numbers are averaged over replicas, arrays of all replicas joined.

        Of a batch that was split into micro-batches it is what the last one left; `{}` where `train_step` is overridden.

        Raises:
            NotReadyError: The run keeps no sown values.
        """
        if not self.run.keep.sown:
            raise NotReadyError(f"What was sown in step {self.step} was not kept: pass train_loop(sown=...), or fit a callback that names it in needs_sown.")
        return self.run.kept.sown

    @property
    def elapsed_time(self) -> float:
        """Seconds of training since the last checkpoint, without compilation and without the consumer's time. Waits for the device."""
        return self.run.timer.stop()

    # -- metrics --

    @property
    def logs(self) -> Logs:
        """The values of this step by flat name, shared by all who see this checkpoint: group `train` by key, others as `<group>_<key>`."""
        return self.run.logs

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
        return frozenset(flat_name(group, key) for group, values in self._groups.items() for key in values)

    def deferred_metrics(self) -> Callable[[], dict[str, dict[str, Any]]]:
        """Returns what gives the recorded ones of `metrics` as they are now, in another thread, which then waits for the step."""
        read, evaluated, evaluations, is_recorded = self.logs.deferred(), self.evaluated, self.evaluations, self.logs.is_recorded

        def metrics() -> dict[str, dict[str, Any]]:
            train = {key: value for key, value in read().items() if key not in evaluated and is_recorded(key)}
            others = {group: {key: value for key, value in values.items() if is_recorded(flat_name(group, key))} for group, values in evaluations.items()}
            return {"train": train, **others}

        return metrics

    def with_metrics(self, group: str, values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> "Summary":
        """Returns this checkpoint with the metrics of an evaluation; also put into the shared `logs`.

        Args:
            group: Their name.
            values: The metrics by key.
            kinds: By key, what is known of them.

        Raises:
            ConfigError: It has a group of that name already.
        """
        if group in self._groups:
            raise ConfigError(f"Two evaluations of one checkpoint are named {group!r}. Give one of them another name.")
        for key, value in values.items():
            self.logs[flat_name(group, key)] = value
        self.logs.kinds = {**self.logs.kinds, **{flat_name(group, key): kind for key, kind in kinds.items()}}
        return Summary(self.run, {**self._groups, group: values})


class Summary(Checkpoint):
    """A `Checkpoint` with evaluation metrics added. Made by an `EvalLoop`; several can follow one another.

    >>> issubclass(Summary, Checkpoint)
    True
    """
