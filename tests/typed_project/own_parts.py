"""A custom callback and custom trainers."""

from collections.abc import Mapping, MutableMapping
from typing import Any, assert_type

import jax
import jax.numpy as jnp
from typing_extensions import override

import fitflax
from fitflax.callbacks import Callback
from fitflax.state import Batch, PyTree


class Reporter(Callback):
    """Records losses, halves the learning rate when they rise, and stops when they are good enough."""

    def __init__(self, good: float) -> None:
        self.good = good
        self.losses: list[float] = []

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self.losses = []

    @override
    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        if batch == 0:
            print(f"{batch}: {logs['loss']}, {assert_type(self.trainer.step, int)} of {self.params['steps']} steps")

    @override
    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any]) -> None:
        self.losses.append(float(logs["loss"]))
        logs["lowest"] = min(self.losses)
        if len(self.losses) > 1 and self.losses[-1] > self.losses[-2]:
            self.trainer.learning_rate = assert_type(self.trainer.learning_rate, float) / 2
        self.trainer.learning_rates = assert_type(self.trainer.learning_rates, dict[str, float])
        if self.losses[-1] < self.good:
            self.trainer.stop(f"{type(self).__name__} saw {self.losses[-1]}")

    @override
    def on_checkpoint(self, checkpoint: fitflax.Checkpoint) -> None:
        print(assert_type(checkpoint.step, int), assert_type(checkpoint.loss, float))

    @override
    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        print(assert_type(self.trainer.stop_training, bool), assert_type(self.trainer.stop_reason, str | None))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(map(float, state["losses"]))


class Regularized(fitflax.Trainer):
    """Adds the size of the parameters to the loss."""

    @override
    def compute_loss(
        self, params: PyTree, model_state: dict[str, PyTree], batch: Batch, *, rngs: dict[str, jax.Array], train: bool
    ) -> tuple[Any, dict[str, PyTree], dict[str, Any]]:
        values, model_state, aux = super().compute_loss(params, model_state, batch, rngs=rngs, train=train)
        size = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return values + 1e-3 * size, model_state, {**aux, "size": size}


class Stepped(fitflax.Trainer):
    """Counts the examples of its steps."""

    @override
    def train_step(self, state: fitflax.TrainState, batch: Batch) -> tuple[fitflax.TrainState, dict[str, tuple[jax.Array, jax.Array]]]:
        state, logs = super().train_step(state, batch)
        examples = jnp.sum(batch.mask)
        return assert_type(state, fitflax.TrainState), {**logs, "examples": (examples, 0 * examples + 1)}
