"""The pure steps: what happens to a batch in training, evaluation and prediction.

Everything here is traced: no clock, no print, and random keys only from the state's key and step. Steps are written for one replica's rows of the
batch; sums over replicas use the strategy.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.errors import ModifyScopeVariableError

import fitflax.steps.loss_scale as loss_scale
from fitflax.errors import LossError, ModelError
from fitflax.leaves import describe_shapes
from fitflax.logs import UNDEFINED
from fitflax.metrics import Mean, Metric
from fitflax.models import LinenModel, Model
from fitflax.models.base import Draws
from fitflax.parallel import Strategy
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps import gradient_accumulation
from fitflax.steps.example_weights import ratio
from fitflax.steps.forward_pass import MUTABLE_HINT, ComputeLoss, ForwardPass, Notes
from fitflax.steps.gradients import Gradients
from fitflax.steps.kept_values import NOTHING, Keep, Kept
from fitflax.steps.loss_and_metrics import Objective
from fitflax.steps.metric_state import EvalSums, TotalLoss, TrainSums, computed, rows_of, summed
from fitflax.steps.nonfinite import Suspects, find_suspects, named_suspects
from fitflax.steps.numerics import Numerics, start_average
from fitflax.steps.optimizer_arguments import global_loss, loss_functions
from fitflax.steps.random_streams import StreamKeys, Streams, split_key
from fitflax.steps.state_structure import same_types, strong_types

__all__ = ["Task", "TrainStep"]

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]

# Separates the key of initialization from those of steps.
_INIT = 0x1A17

# Replaces the norm if it is not kept; a NaN would set off jax_debug_nans.
UNKNOWN_NORM = np.float32(-1)


class _Update(NamedTuple):
    state: TrainState  # The state after it, except averaged parameters.
    metrics: dict[str, Metric]  # Metrics of the batch, over all replicas except for rows.
    loss: jax.Array  # Global.
    grads: PyTree  # Global, unscaled.
    norm: Any  # Its norm; negative unless it is kept.
    is_skipped: jax.Array | None  # Whether parameters did not change because the gradient overflowed; `None` without loss scaling.
    is_good: jax.Array  # Whether nothing failed that a smaller loss scale could not fix.
    sown: dict[str, PyTree]  # This replica's values that are kept.


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What is trained, and how: all that steps need besides state and batch."""

    model: Model
    strategy: Strategy
    objective: Objective
    optimizer: optax.GradientTransformationExtraArgs | None  # Optax transformation, called with `params`; `None` if nothing is trained.
    streams: Streams
    mutable: Any  # linen's filter for collections that may change.
    transient: tuple[str, ...]  # Collections that are removed after every call.
    compute_loss: ComputeLoss | None = None  # Replacement of `default_loss`; see `Trainer.compute_loss`.
    custom_step: TrainStep | None = None  # Replacement of the whole update; see `Trainer.train_step`.
    numerics: Numerics = dataclasses.field(default_factory=Numerics)

    @functools.cached_property
    def forward(self) -> ForwardPass:
        """The forward pass of the compiled loss and metrics."""
        return ForwardPass(self.model, self.strategy, self.objective, self.numerics, self.mutable, self.transient, self.compute_loss)

    @functools.cached_property
    def gradients(self) -> Gradients:
        """The gradient of the forward pass."""
        return Gradients(self.forward, self.strategy, self.numerics, self.streams)

    # -- initialization --

    def init_state(self, key: jax.Array, batch: Batch) -> TrainState:
        """Returns the state at step 0, from the shapes of `batch` alone; equal on all replicas."""
        # Any batch of these shapes must give the same state.
        x = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), batch.x)
        rngs = split_key(jax.random.fold_in(key, _INIT), ("params", *self.streams.init))
        variables, axes = self.model.init(rngs, x)
        params = variables.pop("params", {})
        model_state = {name: tree for name, tree in variables.items() if name not in self.transient}
        params, model_state = self.strategy.first((params, model_state))  # A module may use its replica's index.
        opt_state = () if self.optimizer is None else self.optimizer.init(params)
        averages = None if self.numerics.ema_decay is None else start_average(params)
        state = TrainState(step=jnp.int32(0), params=params, model_state=model_state, opt_state=opt_state, key=key, ema_params=averages, axes=axes)
        return cast(TrainState, strong_types(state))

    def init_optimizer(self, params: PyTree) -> PyTree:
        """Returns the optimizer's initial state for these parameters."""
        assert self.optimizer is not None
        return self.map_members(self.optimizer.init)(params)

    def map_members(self, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Returns a function of parts of a state, applied to each member of an ensemble."""
        return fn

    def init_eval_params(self, key: jax.Array, batch: Batch) -> PyTree:
        """Returns initial parameters of a module for evaluation, whose shapes show whether it fits."""
        rngs = split_key(key, ("params", *self.streams.init, *self.streams.eval))
        return cast(LinenModel, self.model).init_for_evaluation(rngs, batch.x)

    # -- steps --

    def batch_metrics(self, state: TrainState, batch: Batch, *, train: bool, notes: Notes) -> dict[str, Metric]:
        """Returns the metrics of one batch in the order in which they are shown, not summed over replicas. Only their structure is used, for empty sums."""
        if train and self.custom_step is not None:
            return self._run_custom_step(state, batch)[1]
        if train and self.numerics.accumulate_steps > 1:
            batch = gradient_accumulation.first_of(gradient_accumulation.split(batch, self.numerics.accumulate_steps, self.strategy))
        return self.forward(state.params, state.model_state, batch, draws=self._draws(state.key, train=train), train=train, notes=notes)[1].metrics

    def train_step(
        self, state: TrainState, sums: TrainSums, batch: Batch, *, keep: Keep = NOTHING
    ) -> tuple[TrainState, TrainSums, list[jax.Array], dict[str, Metric], Kept]:
        """Returns the state after one update, the epoch's sums, the step's values, this replica's rows, and what is kept.

        The values are the loss, the norm of the gradient, the steps since a bad one, and its culprit, float32 `[]` each (see `fitflax.logs`).
        """
        done = self._run_update(state, batch, keep)
        merged = {key: sums.metrics[key].merge(metric) for key, metric in summed(done.metrics).items()}
        is_good, suspects, first = done.is_good, Suspects(), jnp.int32(-1)
        if keep.culprit:
            suspects, are_bad = find_suspects(_suspects_of(done))
            first = jnp.where(are_bad.any(), jnp.argmax(are_bad), -1).astype(jnp.int32)
            # An optimizer can make a parameter infinite by itself; and a norm can overflow float32 although every number of the gradient is finite.
            are_good = ~are_bad[len(are_bad) - len(jax.tree.leaves(done.state.params)) :].any()
            is_good = ~are_bad.any() if done.is_skipped is None else is_good & are_good
        was_bad = sums.steps_since_bad >= 0
        since = jnp.where(was_bad, sums.steps_since_bad + 1, jnp.where(is_good, -1, 0))
        culprit = jnp.where(was_bad, sums.culprit, jnp.where(is_good, -1, first))
        has_no_weight = computed(done.metrics["loss"])[1] if "loss" in done.metrics else jnp.bool_(False)
        loss = jnp.where(has_no_weight, UNDEFINED, done.loss)
        values = [loss, jnp.asarray(done.norm), since.astype(jnp.float32), culprit.astype(jnp.float32)]
        kept = Kept(done.grads if keep.grads else (), self._gather_sown(done.sown), suspects)
        return self._with_ema(state, done), TrainSums(merged, since, culprit), values, rows_of(done.metrics), kept

    def _run_update(self, state: TrainState, batch: Batch, keep: Keep) -> _Update:
        if self.custom_step is None:
            return self.update(state, batch, keep=keep)
        new_state, metrics = self._run_custom_step(state, batch)
        metrics = self._reduce_metrics(metrics)
        loss = _defined(metrics["loss"]) if "loss" in metrics else jnp.float32(0)
        return _Update(new_state, metrics, loss, (), UNKNOWN_NORM, None, jnp.isfinite(loss), {})

    def suspects(self, state: TrainState, batch: Batch) -> list[tuple[str, jax.Array]]:
        """Returns the values of a step that may not be finite, as `named_suspects` does."""
        return _suspects_of(self._run_update(state, batch, NOTHING))

    def _gather_sown(self, sown: dict[str, PyTree]) -> dict[str, PyTree]:
        def joined(leaf: Any) -> jax.Array:
            every = self.strategy.gather(jnp.asarray(leaf))
            return cast(jax.Array, every.astype(jnp.float32).mean() if every.ndim == 1 else every.reshape(-1, *every.shape[2:]))

        return cast(dict[str, PyTree], jax.tree.map(joined, sown))

    def _with_ema(self, old: TrainState, done: _Update) -> TrainState:
        if self.numerics.ema_decay is None:
            return done.state
        averages = self.numerics.average(old.ema_params, done.state.params)
        if done.is_skipped is not None:
            averages = optax.tree.where(done.is_skipped, old.ema_params, averages)
        return same_types(dataclasses.replace(done.state, ema_params=averages), old)

    def update(self, state: TrainState, batch: Batch, *, unify: bool = True, keep: Keep = NOTHING) -> _Update:
        """Returns the results of one update by the compiled loss.

        With `unify=False`, collections are this replica's, for a custom step, after which they are unified.
        """
        assert self.optimizer is not None
        scale = state.opt_state.scale if self.numerics.is_scaled else None
        notes = Notes()
        share = self.gradients.of(state, batch, notes, scale, sown=keep.sown)
        loss, grads = self.strategy.sum((share.loss, share.grads))
        if scale is not None:
            grads = loss_scale.unscaled(grads, scale)
        at = global_loss(functools.partial(self.gradients.loss_at, state, batch), self.strategy, scale)  # Computes nothing until it is called.
        params = _with_leaves(state.params, self.strategy.agree(share.params)) if share.params else state.params
        updates, opt_state = self.optimizer.update(grads, state.opt_state, params, value=loss, grad=grads, **loss_functions(at))
        step, params = state.step + 1, optax.apply_updates(params, updates)
        model_state = self.strategy.unify(share.model_state) if unify else share.model_state
        metrics = self._reduce_metrics({key: share.metrics[key] for key in notes.order})
        norm = optax.tree.norm(grads).astype(jnp.float32) if keep.norm else UNKNOWN_NORM
        is_finite = jnp.isfinite(norm) if keep.norm else jnp.bool_(True)
        is_good, is_skipped = jnp.isfinite(loss) & is_finite, None
        if scale is not None:
            is_skipped = ~loss_scale.is_finite(grads)
            # At the smallest scale, a gradient that is not finite is as bad as without scaling.
            is_good = jnp.isfinite(loss) & (is_finite | (is_skipped & (scale > loss_scale.MIN_SCALE)))
            params, model_state = optax.tree.where(is_skipped, (state.params, state.model_state), (params, model_state))
        new_state = dataclasses.replace(state, step=step, params=params, model_state=model_state, opt_state=opt_state)
        return _Update(same_types(new_state, state), metrics, loss, grads, norm, is_skipped, is_good, share.sown)

    def weighted_logs(self, metrics: dict[str, Metric], batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Returns a batch's global metrics as the pairs that a custom step logs: each replica's share of the sum and of the weight."""
        replicas = self.strategy.sum(1)
        real = jnp.sum(batch.mask.astype(jnp.float32))
        pairs = {}
        for key, metric in summed(metrics).items():
            parts = list(metric.parts.values()) if isinstance(metric, TotalLoss) else [metric]
            if len(parts) == 1 and isinstance(parts[0], Mean) and parts[0].transform is None:
                pairs[key] = (jnp.sum(parts[0].total) / replicas, jnp.sum(parts[0].weight) / replicas)
            else:
                value, is_undefined = computed(metric)
                weight = jnp.where(is_undefined, 0.0, real)
                pairs[key] = (jnp.where(is_undefined, 0.0, value) * weight, weight)
        return pairs

    def _run_custom_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Metric]]:
        """Returns the results of a custom step, with its logs as metrics; replicas are made equal."""
        assert self.custom_step is not None
        try:
            result = self.custom_step(state, batch)
        except ModifyScopeVariableError as error:
            raise ModelError(f"train_step: {error}.{MUTABLE_HINT}") from error
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], TrainState) or not isinstance(result[1], Mapping):
            kinds = f"({', '.join(type(part).__name__ for part in result)})" if isinstance(result, tuple) else type(result).__name__
            raise ModelError(f"train_step must return (TrainState, dict). Received: {kinds}.")
        new_state, logs = result
        metrics: dict[str, Metric] = {}
        for key, pair in logs.items():
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise LossError(f"train_step must return logs as pairs (sum, weight). Received: {key!r} is {describe_shapes(pair)}.")
            if any(map(jnp.iscomplexobj, pair)):
                raise LossError(f"train_step must return logs of real numbers. Received: {key!r} is {describe_shapes(pair)}.")
            total, weight = (jnp.asarray(value, jnp.float32) for value in pair)
            metrics[key] = Mean(name=key).add(ratio(total, weight), weight)
        kept = {name: tree for name, tree in new_state.model_state.items() if name not in self.transient}
        # A custom step may not have synchronized the replicas.
        params, opt_state = self.strategy.agree((new_state.params, new_state.opt_state))
        new_state = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state, model_state=self.strategy.unify(kept))
        return same_types(new_state, state), metrics

    def eval_step(self, params: PyTree, model_state: dict[str, PyTree], key: jax.Array, sums: EvalSums, batch: Batch) -> tuple[EvalSums, dict[str, Metric]]:
        """Returns the evaluation's sums with one more batch, and this replica's rows. The module's state does not change."""
        _, forward = self.forward(params, model_state, batch, draws=self.streams.eval_draws(key, sums.index, self.strategy), train=False)
        metrics = self._reduce_metrics(forward.metrics)
        merged = {name: sums.metrics[name].merge(metric) for name, metric in summed(metrics).items()}
        return EvalSums(merged, sums.index + 1), rows_of(metrics)

    def predict_step(self, params: PyTree, model_state: dict[str, PyTree], key: jax.Array, index: jax.Array, x: PyTree) -> PyTree:
        """Returns the module's outputs for one batch."""
        return self._outputs(params, model_state, x, self.streams.eval_draws(key, index, self.strategy), train=False)

    def outputs(self, params: PyTree, model_state: dict[str, PyTree], key: jax.Array, x: PyTree, *, train: bool) -> PyTree:
        """Returns the module's outputs; random keys follow from `key`."""
        return self._outputs(params, model_state, x, self._draws(key, train=train), train=train)

    def _draws(self, key: jax.Array, *, train: bool) -> Draws:
        return self.streams.train_draws(key, self.strategy) if train else self.streams.eval_draws(key, jnp.int32(0), self.strategy)

    def _outputs(self, params: PyTree, model_state: dict[str, PyTree], x: PyTree, draws: Draws, *, train: bool) -> PyTree:
        params, x = self.numerics.narrow((params, x))
        return self.numerics.widen(self.model.apply({"params": params, **model_state}, x, train=train, draws=draws, mutable=self.mutable)[0])

    def merge(self, params: PyTree, model_state: Mapping[str, PyTree], *, train: bool) -> Any:
        """Returns a module with parameters and collections, and in training with different random streams on each replica."""
        several = train and self.strategy.num_replicas > 1

        def salt() -> jax.Array:
            try:
                return cast(jax.Array, self.strategy.replica_index())
            except NameError:  # Outside a step there is no replica.
                return cast(jax.Array, jnp.int32(0))

        return self.model.merge({"params": params, **model_state}, train=train, salt=salt if several else None)

    def step_rngs(self, state: TrainState) -> dict[str, jax.Array]:
        """Returns the keys of the training streams for the step after `state`."""
        return StreamKeys(self.streams.train_keys(jax.random.fold_in(state.key, state.step), self.strategy))

    def _reduce_metrics(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        """Returns metrics over all replicas: summed if they are additive, otherwise merged in the order of the replicas. Rows stay on their replica."""
        joined = rows_of(metrics)
        joined |= self.strategy.sum({key: metric for key, metric in metrics.items() if key not in joined and getattr(metric, "additive", False)})
        others = {key: metric for key, metric in metrics.items() if key not in joined}
        if others:
            joined |= gradient_accumulation.merge_all(self.strategy.gather(others))
        return {key: joined[key] for key in metrics}


def _suspects_of(done: _Update) -> list[tuple[str, jax.Array]]:
    loss = done.metrics.get("loss")
    parts = loss.parts if isinstance(loss, TotalLoss) else {}
    return named_suspects({name: _defined(part) for name, part in parts.items()}, done.loss, done.grads, done.state.params)


def _defined(metric: Metric) -> jax.Array:
    """Returns the value of a part of the loss, 0 if the total weight is 0: then the step is a good one that changes nothing."""
    value, is_undefined = computed(metric)
    return jnp.where(is_undefined, 0.0, value)


def _with_leaves(tree: PyTree, parts: Any) -> PyTree:
    """Returns nested dicts with the leaves of `parts` in place of their own."""
    if not isinstance(parts, dict):
        return parts
    return {key: _with_leaves(child, parts[key]) if key in parts else child for key, child in tree.items()}
