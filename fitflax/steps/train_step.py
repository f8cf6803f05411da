"""The pure steps of training, evaluation and prediction.

Everything here is traced: no clock, no print, and random keys only from the state's key and step. Steps are written for one replica's rows of the
batch; sums over replicas use the strategy. One `jax.vmap` trains the members of an ensemble on the same batches.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.errors import ModifyScopeVariableError
from typing_extensions import override

from fitflax.errors import ConfigError, LossError, MetricError, ModelError, did_you_mean
from fitflax.leaves import describe_shapes, named_leaves
from fitflax.logs import UNDEFINED, Kind, default_direction
from fitflax.metrics import Mean, Metric
from fitflax.models.base import Draws
from fitflax.state import AxisNames, Batch, PyTree, TrainState, global_norm, start_average
from fitflax.steps.gradients import MUTABLE_HINT, ForwardPass, Notes, StreamKeys, merge_all, ratio, split, split_key
from fitflax.steps.live_state import same_types, strong_types
from fitflax.steps.optimizer import MIN_SCALE, are_finite, loss_functions, unscaled
from fitflax.steps.outputs import NOTHING, EvalSums, Keep, Kept, Suspects, TotalLoss, TrainSums, collects, computed, rows_of, summed

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]

# Separates the key of initialization from those of steps.
_INIT = 0x1A17

# Replaces the norm if it is not kept; a NaN would trigger `jax_debug_nans`.
UNKNOWN_NORM = np.float32(-1)


class _Update(NamedTuple):
    state: TrainState  # The state after the update, except averaged parameters.
    metrics: dict[str, Metric]  # Metrics of the batch, over all replicas except for rows.
    loss: jax.Array  # The loss over all replicas.
    grads: PyTree  # The gradient over all replicas, without the loss scale.
    norm: Any  # Its norm; negative unless it is kept.
    is_skipped: jax.Array | None  # Whether parameters did not change because the gradient overflowed; `None` without loss scaling.
    is_good: jax.Array  # Whether what was checked is finite, except for a gradient that a smaller loss scale may make finite.
    sown: dict[str, PyTree]  # This replica's values that are kept.


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Task(ForwardPass):
    """Everything that steps need besides state and batch: the model, the losses and metrics, the optimizer and numerical settings."""

    optimizer: optax.GradientTransformationExtraArgs | None  # Optax transformation, called with `params`; `None` if nothing is trained.
    custom_step: TrainStep | None = None  # Replacement of the whole update; see `Trainer.train_step`.

    @property
    def uses_compiled_loss(self) -> bool:
        """Whether neither the loss nor the update is a custom one."""
        return self.compute_loss is None and self.custom_step is None

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
        """Returns initial parameters of the model to evaluate, whose shapes show whether it fits."""
        rngs = split_key(key, ("params", *self.streams.init, *self.streams.eval))
        return self.model.init_for_evaluation(rngs, batch.x)

    # -- steps --

    def batch_metrics(self, state: TrainState, batch: Batch, *, train: bool, notes: Notes) -> dict[str, Metric]:
        """Returns the metrics of one batch in the order in which they are shown, not summed over replicas. Only their structure is used, for empty sums."""
        if train and self.custom_step is not None:
            return self._run_custom_step(state, batch)[1]
        if train and self.numerics.accumulate_steps > 1:
            batch = jax.tree.map(lambda leaf: leaf[0], split(batch, self.numerics.accumulate_steps, self.strategy))
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
            names, values = zip(*_suspects_of(done), strict=True)
            suspects = Suspects(names)
            are_bad = ~are_finite(values)
            first = jnp.where(are_bad.any(), jnp.argmax(are_bad), -1).astype(jnp.int32)
            # An optimizer can return infinite parameters for finite gradients, and the norm can overflow float32 although the gradient is finite.
            are_good = ~are_bad[len(are_bad) - len(jax.tree.leaves(done.state.params)) :].any()
            is_good = ~are_bad.any() if done.is_skipped is None else is_good & are_good
        was_bad = sums.steps_since_bad >= 0
        since = jnp.where(was_bad, sums.steps_since_bad + 1, jnp.where(is_good, -1, 0))
        culprit = jnp.where(was_bad, sums.culprit, jnp.where(is_good, -1, first))
        has_no_weight = computed(done.metrics["loss"])[1] if "loss" in done.metrics else jnp.bool_(False)
        loss = jnp.where(has_no_weight, UNDEFINED, done.loss)
        logged = [loss, jnp.asarray(done.norm), since.astype(jnp.float32), culprit.astype(jnp.float32)]
        kept = Kept(done.grads if keep.grads else (), self._gather_sown(done.sown), suspects)
        return self._with_ema(state, done), TrainSums(merged, since, culprit), logged, rows_of(done.metrics), kept

    def _run_update(self, state: TrainState, batch: Batch, keep: Keep) -> _Update:
        if self.custom_step is None:
            return self.update(state, batch, keep=keep)
        new_state, metrics = self._run_custom_step(state, batch)
        metrics = self._reduce_metrics(metrics)
        loss = _defined(metrics["loss"]) if "loss" in metrics else jnp.float32(0)
        return _Update(new_state, metrics, loss, (), UNKNOWN_NORM, None, jnp.isfinite(loss), {})

    def suspects(self, state: TrainState, batch: Batch) -> list[tuple[str, jax.Array]]:
        """Returns the values of a step that may not be finite, with names such as "the gradient of Dense_0/kernel"; causes come first."""
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
        share, share_of_grads, forward = self.gradient(state, batch, notes, scale, sown=keep.sown)
        loss, grads = self.strategy.sum((share, share_of_grads))
        if scale is not None:
            grads = unscaled(grads, scale)
        functions = loss_functions(functools.partial(self.loss_at, state, batch), self.strategy, scale)
        params = _with_leaves(state.params, self.strategy.agree(forward.params)) if forward.params else state.params
        updates, opt_state = self.optimizer.update(grads, state.opt_state, params, value=loss, grad=grads, **functions)
        step, params = state.step + 1, optax.apply_updates(params, updates)
        model_state = self.strategy.unify(forward.model_state, state.model_state) if unify else forward.model_state
        metrics = self._reduce_metrics({key: forward.metrics[key] for key in notes.order})
        norm = global_norm(grads).astype(jnp.float32) if keep.norm else UNKNOWN_NORM
        is_norm_finite = jnp.isfinite(norm) if keep.norm else jnp.bool_(True)
        is_good, is_skipped = jnp.isfinite(loss) & is_norm_finite, None
        new_state = same_types(dataclasses.replace(state, step=step, params=params, model_state=model_state, opt_state=opt_state), state)
        if scale is not None:
            is_skipped = ~are_finite(jax.tree.leaves(grads)).all()
            # At the smallest scale, a gradient that is not finite is as bad as without scaling.
            is_good = jnp.isfinite(loss) & (is_norm_finite | (is_skipped & (scale > MIN_SCALE)))
            params, model_state = optax.tree.where(is_skipped, (state.params, state.model_state), (new_state.params, new_state.model_state))
            new_state = dataclasses.replace(new_state, params=params, model_state=model_state)
        return _Update(new_state, metrics, loss, grads, norm, is_skipped, is_good, forward.sown)

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
                if value.ndim:  # A custom step logs only numbers.
                    continue
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
        collections = self.strategy.unify(kept, state.model_state)
        new_state = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state, model_state=collections)
        return same_types(new_state, state), metrics

    def eval_step(self, params: PyTree, model_state: dict[str, PyTree], key: jax.Array, sums: EvalSums, batch: Batch) -> tuple[EvalSums, dict[str, Metric]]:
        """Returns the evaluation's sums with one more batch, and this replica's rows. The module's state does not change."""
        _, forward = self.forward(params, model_state, batch, draws=self.streams.eval_draws(key, sums.index, self.strategy), train=False)
        metrics = self._reduce_metrics(forward.metrics)
        merged = {name: sums.metrics[name].merge(metric) for name, metric in summed(metrics).items()}
        return EvalSums(merged, sums.index + 1), rows_of(metrics)

    def predict_step(self, params: PyTree, model_state: dict[str, PyTree], key: jax.Array, index: jax.Array, x: PyTree) -> PyTree:
        """Returns the module's outputs for batch number `index`."""
        return self.outputs(params, model_state, key, x, train=False, index=index)

    def outputs(self, params: PyTree, model_state: dict[str, PyTree], key: jax.Array, x: PyTree, *, train: bool, index: Any = None) -> PyTree:
        """Returns the module's outputs; random keys follow from `key` and, in evaluation, from `index`."""
        draws = self._draws(key, train=train, index=index)
        variables, x = self._narrowed(params, model_state, x)
        return self.numerics.widen(self.model.apply(variables, x, train=train, draws=draws, mutable=self.mutable)[0])

    def _draws(self, key: jax.Array, *, train: bool, index: Any = None) -> Draws:
        if train:
            return self.streams.train_draws(key, self.strategy)
        return self.streams.eval_draws(key, jnp.int32(0) if index is None else index, self.strategy)

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
            joined |= merge_all(self.strategy.gather(others))
        return {key: joined[key] for key in metrics}


def _suspects_of(done: _Update) -> list[tuple[str, jax.Array]]:
    loss = done.metrics.get("loss")
    parts = loss.parts if isinstance(loss, TotalLoss) else {}
    named = [(f"the loss of {name!r}", _defined(part)) for name, part in parts.items()] if len(parts) > 1 else [("the loss", done.loss)]
    for kind, tree in (("gradient of", done.grads), ("parameter", done.state.params)):
        named += [(f"the {kind} {path}", leaf) for path, leaf in named_leaves(tree)]
    return named


def _defined(metric: Metric) -> jax.Array:
    """Returns the value of a part of the loss; 0 if the total weight is 0, because such a step is not bad."""
    value, is_undefined = computed(metric)
    return jnp.where(is_undefined, 0.0, value)


def _with_leaves(tree: PyTree, parts: Any) -> PyTree:
    """Returns nested dicts with the leaves of `parts` in place of their own."""
    if not isinstance(parts, dict):
        return parts
    return {key: _with_leaves(child, parts[key]) if key in parts else child for key, child in tree.items()}


# -- ensembles: every array of the state except the step, and every sum of metrics, has a leading axis of members --

BY_MEMBER = "_by_member"
"""Suffix of the log keys of values by member."""


@struct.dataclass
class MeanOfMembers(Metric):
    """A metric of each member; its value is the mean over members. Arrays of `member` have a leading axis of members."""

    member: Any
    additive: ClassVar[bool] = False

    # For other metrics these are class attributes; here they depend on the instance.
    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the member's metric."""
        return str(self.member.name)

    @property
    def direction(self) -> Any:  # type: ignore[override]
        """Direction of the member's metric."""
        return getattr(self.member, "direction", None)

    @property
    def is_recorded(self) -> bool:  # type: ignore[override]
        """Whether the member's metric is recorded."""
        return bool(getattr(self.member, "is_recorded", True))

    @property
    def parts(self) -> Any:
        """Parts of a loss."""
        return getattr(self.member, "parts", {})

    @override
    def empty(self) -> Self:
        return dataclasses.replace(self, member=self.member.empty())

    @override
    def update(self, outputs: PyTree, targets: PyTree, weights: jax.Array) -> Self:
        raise NotImplementedError("The step updates the metrics of the members.")

    @override
    def merge(self, other: Any) -> Self:
        # An empty metric has no members yet.
        mine = jax.tree.map(lambda leaf, like: jnp.broadcast_to(leaf, jnp.shape(like)), self.member, other.member)
        return dataclasses.replace(self, member=jax.vmap(lambda one, another: one.merge(another))(mine, other.member))

    @override
    def compute(self) -> jax.Array:
        return self._by_member().mean(axis=0)

    def _by_member(self) -> jax.Array:
        return jax.vmap(lambda member: jnp.asarray(member.compute(), jnp.float32))(self.member)


@struct.dataclass
class ByMember(MeanOfMembers):
    """A metric of each member; its value is an array of the members' values."""

    @override
    def compute(self) -> jax.Array:
        return self._by_member()


def _metrics(members: dict[str, Metric], order: Iterable[str]) -> dict[str, Metric]:
    """Returns the metrics to log: means over members, then values by member."""
    means: dict[str, Metric] = {key: MeanOfMembers(members[key]) for key in order}
    return means | {f"{key}{BY_MEMBER}": ByMember(metric.member) for key, metric in means.items()}  # type: ignore[attr-defined]


def _members(metrics: dict[str, Metric]) -> dict[str, Metric]:
    return {key: cast(Any, metric).member for key, metric in metrics.items() if not isinstance(metric, ByMember)}


def _axes(state: TrainState) -> TrainState:
    """Returns the axis of members of each part of a state, for `jax.vmap`."""
    mapped: Any = {"params": 0, "model_state": 0, "opt_state": 0, "key": 0, "ema_params": None if state.ema_params is None else 0}
    return dataclasses.replace(state, step=None, **mapped)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class EnsembleTask(Task):
    """A task of several members."""

    members: int = 1

    @override
    def init_state(self, key: jax.Array, batch: Batch) -> TrainState:
        state = jax.vmap(lambda key: Task.init_state(self, key, batch))(key)
        return dataclasses.replace(state, step=state.step[0], axes=AxisNames(is_known=False))

    @override
    def map_members(self, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        return jax.vmap(fn)

    @override
    def init_eval_params(self, key: jax.Array, batch: Batch) -> PyTree:
        return jax.vmap(lambda key: Task.init_eval_params(self, key, batch))(key)

    @override
    def batch_metrics(self, state: TrainState, batch: Batch, *, train: bool, notes: Notes) -> dict[str, Metric]:
        inner = Notes()
        run: Any = jax.vmap(lambda state: Task.batch_metrics(self, state, batch, train=train, notes=inner), in_axes=(_axes(state),))
        metrics = run(state)
        if rows := [key for key, metric in metrics.items() if collects(metric)]:
            raise MetricError(
                f"An ensemble does not support metrics that collect rows: {', '.join(rows)}. Leave them out, or evaluate one member, trainer.select(member)."
            )
        logged = _metrics(metrics, inner.order or metrics)
        bases = {key: key.removesuffix(BY_MEMBER) if isinstance(metric, ByMember) else key for key, metric in logged.items()}
        compiled = inner.compiled_metrics
        notes.compiled_metrics = {key: dataclasses.replace(cast(Any, logged[key]), member=compiled[base]) for key, base in bases.items() if base in compiled}
        notes.outputs = inner.outputs
        return logged

    @override
    def train_step(
        self, state: TrainState, sums: TrainSums, batch: Batch, *, keep: Keep = NOTHING
    ) -> tuple[TrainState, TrainSums, list[jax.Array], dict[str, Metric], Kept]:
        axes, suspects = _axes(state), list[Suspects]()

        def one(state: TrainState, metrics: dict[str, Metric]) -> Any:
            before = TrainSums(metrics, sums.steps_since_bad, sums.culprit)
            new_state, after, values, _, kept = Task.train_step(self, state, before, batch, keep=keep)
            suspects.append(kept.suspects)
            return new_state, after, values[:2], (kept.grads, kept.sown)

        run = jax.vmap(one, in_axes=(axes, 0), out_axes=(axes, 0, 0, 0))
        new_state, after, (loss, norm), (grads, sown) = run(state, _members(sums.metrics))
        first = jnp.argmax(after.steps_since_bad)  # The member with the earliest bad step, if any.
        since, culprit = after.steps_since_bad[first], after.culprit[first]
        mean_loss = jnp.where(loss[0] == UNDEFINED, UNDEFINED, loss.mean())  # All members have the weights of the same batch.
        values = [mean_loss, norm.mean(), since.astype(jnp.float32), culprit.astype(jnp.float32)]
        merged = _metrics(after.metrics, _members(sums.metrics))
        return new_state, TrainSums(merged, since, culprit), values, {}, Kept(grads, sown, suspects[-1])

    @override
    def suspects(self, state: TrainState, batch: Batch) -> list[tuple[str, jax.Array]]:
        names: list[str] = []

        def values_of(state: TrainState) -> list[jax.Array]:
            names[:], values = zip(*Task.suspects(self, state, batch), strict=True)
            return list(values)

        run: Any = jax.vmap(values_of, in_axes=(_axes(state),))
        values = run(state)  # Fills `names`.
        return list(zip(names, values, strict=True))

    @override
    def eval_step(self, params: PyTree, model_state: dict[str, PyTree], key: jax.Array, sums: EvalSums, batch: Batch) -> tuple[EvalSums, dict[str, Metric]]:
        def one(params: PyTree, model_state: dict[str, PyTree], key: jax.Array, metrics: dict[str, Metric]) -> dict[str, Metric]:
            return Task.eval_step(self, params, model_state, key, EvalSums(metrics, sums.index), batch)[0].metrics

        members = _members(sums.metrics)
        return EvalSums(_metrics(jax.vmap(one)(params, model_state, key, members), members), sums.index + 1), {}

    @override
    def outputs(self, params: PyTree, model_state: dict[str, PyTree], key: jax.Array, x: PyTree, *, train: bool, index: Any = None) -> PyTree:
        # Rows come first: outputs are `[batch, members, ...]`.
        run: Any = jax.vmap(lambda params, model_state, key: Task.outputs(self, params, model_state, key, x, train=train, index=index), out_axes=1)
        return run(params, model_state, key)


def member_of(state: TrainState, number: int) -> TrainState:
    """Returns the state of one member."""
    axes = _axes(state)
    parts = {name: jax.tree.map(lambda leaf: leaf[number], getattr(state, name)) for name in ("params", "model_state", "opt_state", "key", "ema_params")}
    return dataclasses.replace(axes, step=state.step, **parts)


def best_member(history: Mapping[str, Sequence[Any]], key: str, kinds: Mapping[str, Kind]) -> int:
    """Returns the index of the member with the best value in the last epoch; values that are not finite are never the best.

    `key` is a log key without `BY_MEMBER`, and `kinds` are by key of training.

    >>> best_member({"loss_by_member": [[3.0, 1.0, float("nan")]]}, "loss", {})
    1
    """
    known = [name.removesuffix(BY_MEMBER) for name in history if name.endswith(BY_MEMBER)]
    if key not in known:
        raise ConfigError(f"The history has no values of {key!r} by member.{did_you_mean(key, known)} Available: {', '.join(known) or 'none before fit()'}.")
    kind = kinds.get(key) or kinds.get(key.partition("_")[2])
    direction = default_direction(key) or (None if kind is None else kind.direction)
    if direction is None:
        raise ConfigError(f"It is unknown whether a higher or a lower {key!r} is better. Pass select() the number of a member, or give the metric a direction.")
    values = np.asarray(history[key + BY_MEMBER][-1], np.float64)
    if values.ndim != 1 or not np.isfinite(values).any():
        raise ConfigError(f"No member has a finite {key!r} in the last epoch. Received: {values.tolist()}. Pass select() the number of a member.")
    return int(np.argmin(np.where(np.isfinite(values), -values if direction == "max" else values, np.inf)))
