"""Computes gradients: differentiates the forward pass of a replica's rows, as a whole or in micro-batches."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from fitflax.metrics import Metric
from fitflax.parallel import Strategy
from fitflax.parallel.eager import jit_is_disabled
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps import gradient_accumulation
from fitflax.steps.example_weights import masked_weights
from fitflax.steps.forward_pass import ForwardPass, ForwardResult, Notes
from fitflax.steps.metric_state import rows_of
from fitflax.steps.numerics import Numerics
from fitflax.steps.random_streams import Streams
from fitflax.steps.state_structure import same_types

__all__ = ["Gradients", "LossAndGradient"]


class LossAndGradient(NamedTuple):
    """A replica's share of the global loss and of the (scaled) gradient, with metrics and collections."""

    loss: jax.Array
    grads: PyTree
    metrics: dict[str, Metric]
    model_state: dict[str, PyTree]
    sown: dict[str, PyTree]
    params: dict[str, Any]


def _overwritten(model_state: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Returns the collection that is replaced by its gradient, if there is one, such as the scales of Flax's fp8 operations.

    Each micro-batch and each replica gets the values from before the step, and the results are joined by their maximum, the rule of these operations: the
    largest magnitude of the whole batch.
    """
    return {name: tree for name, tree in model_state.items() if name == OVERWRITE_WITH_GRADIENT}


@dataclasses.dataclass(frozen=True, eq=False)
class Gradients:
    """Differentiates the forward pass. The attributes are those of `Task`."""

    forward: ForwardPass
    strategy: Strategy
    numerics: Numerics
    streams: Streams

    def of(self, state: TrainState, batch: Batch, notes: Notes, scale: jax.Array | None, *, sown: tuple[str, ...]) -> LossAndGradient:
        """Computes loss and gradient of a replica's rows of a batch, in micro-batches if `accumulate_steps` is more than 1.

        The gradient is that of the loss times `scale`. Sown values of the collections `sown` are kept, and `notes` is filled.
        """
        run = self._value_and_grad if self.numerics.accumulate_steps == 1 else self._accumulate
        return run(state, batch, jax.random.fold_in(state.key, state.step), notes, scale, sown=sown)

    def _value_and_grad(
        self,
        state: TrainState,
        batch: Batch,
        key: jax.Array,
        notes: Notes,
        scale: jax.Array | None,
        totals: gradient_accumulation.Totals | None = None,
        *,
        sown: tuple[str, ...],
    ) -> LossAndGradient:
        """Computes loss and gradient in one forward and backward pass; the gradient is that of the loss times `scale`."""
        draws = self.streams.train_draws(key, self.strategy)

        def loss_fn(params: PyTree, overwritten: dict[str, PyTree]) -> tuple[jax.Array, tuple[jax.Array, ForwardResult]]:
            model_state = {**state.model_state, **overwritten}
            loss, forward = self.forward(params, model_state, batch, draws=draws, train=True, notes=notes, totals=totals, sown=sown)
            return loss if scale is None else loss * scale, (loss, forward)

        arguments = state.params, _overwritten(state.model_state)
        (_, (loss, forward)), (grads, replaced) = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)(*arguments)
        model_state = {**forward.model_state, **replaced}
        return LossAndGradient(loss, self._with_param_sharding(state, grads), forward.metrics, model_state, forward.sown, forward.params)

    def _accumulate(self, state: TrainState, batch: Batch, key: jax.Array, notes: Notes, scale: jax.Array | None, *, sown: tuple[str, ...]) -> LossAndGradient:
        """Computes loss and gradient micro-batch by micro-batch, so that only one's activations are in memory.

        Sown values are those of the last micro-batch.
        """
        steps = self.numerics.accumulate_steps
        totals, batches = self._micro_batches(batch)

        def body(carry: tuple[jax.Array, PyTree, dict[str, PyTree]], each: tuple[jax.Array, Batch]) -> Any:
            (loss, grads, model_state), (index, micro) = carry, each
            before = dataclasses.replace(state, model_state={**model_state, **_overwritten(state.model_state)})
            one = self._value_and_grad(before, micro, jax.random.fold_in(key, index), notes, scale, totals, sown=sown)
            after = same_types(dataclasses.replace(before, model_state=one.model_state), before).model_state
            after |= jax.tree.map(jnp.maximum, _overwritten(model_state), _overwritten(after))
            return (loss + one.loss, self._with_param_sharding(state, optax.tree.add(grads, one.grads)), after), (one.metrics, one.sown, one.params)

        lowest = jax.tree.map(lambda leaf: jnp.full_like(leaf, -jnp.inf), _overwritten(state.model_state))
        first = (jnp.float32(0), self._with_param_sharding(state, optax.tree.zeros_like(state.params)), {**state.model_state, **lowest})
        (loss, grads, model_state), (metrics, *others) = jax.lax.scan(body, first, (jnp.arange(steps), batches))
        rows = rows_of(metrics)
        merged = gradient_accumulation.merge_all({name: metric for name, metric in metrics.items() if name not in rows})
        last = jax.tree.map(lambda leaf: leaf[-1], others)
        return LossAndGradient(loss, grads, self.strategy.unsplit(rows) | merged, model_state, *last)

    def _micro_batches(self, batch: Batch) -> tuple[gradient_accumulation.Totals, Batch]:
        mask, weights = masked_weights(batch)
        return gradient_accumulation.Totals.of(weights, mask, self.strategy), gradient_accumulation.split(batch, self.numerics.accumulate_steps, self.strategy)

    def _with_param_sharding(self, state: TrainState, grads: PyTree) -> PyTree:
        return self.strategy.pin(dataclasses.replace(state, params=grads, model_state={}, opt_state=(), ema_params=None)).params

    def loss_at(self, state: TrainState, batch: Batch, params: PyTree) -> jax.Array:
        """Returns this replica's share of the loss of the step from `state`, with the same keys and collections, at other parameters."""
        key, steps = jax.random.fold_in(state.key, state.step), self.numerics.accumulate_steps
        if steps == 1:
            return self.forward(params, state.model_state, batch, draws=self.streams.train_draws(key, self.strategy), train=True)[0]
        totals, batches = self._micro_batches(batch)

        def body(carry: tuple[jax.Array, dict[str, PyTree]], each: tuple[jax.Array, Batch]) -> Any:
            (loss, model_state), (index, micro) = carry, each
            draws = self.streams.train_draws(jax.random.fold_in(key, index), self.strategy)
            share, forward = self.forward(params, model_state, micro, draws=draws, train=True, totals=totals)
            before = dataclasses.replace(state, model_state=model_state)
            return (loss + share, same_types(dataclasses.replace(before, model_state=forward.model_state), before).model_state), None

        # As in training, only one micro-batch's activations are in memory in the backward pass.
        run = body if jit_is_disabled() else jax.checkpoint(body)
        (loss, _), _ = jax.lax.scan(run, (jnp.float32(0), state.model_state), (jnp.arange(steps), batches))
        return cast(jax.Array, loss)
