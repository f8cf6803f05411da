"""What loops yield: `Checkpoint`, a lazy view of a run at one step, and `Summary`, the same with evaluation metrics.

Values are read or copied on first access and stay valid after later steps. The state is borrowed from the loop, so a first access after the loop has
advanced is an error.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

from fitflax.checkpoints.run_view import RunView
from fitflax.data import Position
from fitflax.errors import ConfigError, NotReadyError
from fitflax.logs import Kind, Logs, StepValues, flat_name
from fitflax.state import PyTree, TrainState

__all__ = ["Checkpoint", "Summary"]


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
        return self.run.position.step

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
        return self.run.position.epoch_ends

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
        return self.run.run_state()

    @property
    def learning_rates(self) -> dict[str, Any]:
        """Copies of the injected learning rates, still on the device, named as by `optimizers.get_learning_rates`."""
        return self.run.learning_rates()

    @property
    def params_norm(self) -> float:
        """The global L2 norm of the parameters, computed on first access."""
        return self.run.params_norm()

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
        return self.run.kept.grads

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
        return self.run.kept.sown

    @property
    def elapsed_time(self) -> float:
        """Seconds of training since the last checkpoint, without compilation and the caller's work between steps. Waits for the device."""
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
