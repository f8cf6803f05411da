"""The loss of a batch and its gradient: the forward pass of one replica's rows, differentiated as a whole or in micro-batches.

A replica computes its share of the global loss, so gradients are summed over replicas. This module also derives the random keys of the forward pass, which
differ for each stream, step, replica, and batch of an evaluation.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import optax
from flax.errors import InvalidRngError, ModifyScopeVariableError
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from fitflax.errors import ConfigError, DataError, LossError, MetricError, ModelError
from fitflax.leaves import describe_shapes
from fitflax.metrics import Mean, Metric, weighted_sums
from fitflax.models import Model
from fitflax.models.base import RNG_HINT, Draws, is_dropout_error
from fitflax.parallel import Strategy
from fitflax.parallel.strategy import jit_is_disabled
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps.live_state import same_types
from fitflax.steps.loss import Objective
from fitflax.steps.optimizer import Numerics
from fitflax.steps.outputs import Returned, TotalLoss, map_outputs, rows_of

ComputeLoss = Callable[..., tuple[Any, dict[str, PyTree], dict[str, Any]]]

SCALAR = "scalar"
"""Name of a loss part that was returned as a scalar, which padding would falsify."""

OUTPUTS = "outputs"
"""The entry of `aux` that metrics are computed from; other entries are logged."""

MUTABLE_HINT = (
    " Pass mutable= with the collections that the module updates, and return the updated ones: "
    "outputs, updated = self.model.apply(variables, batch.x, mutable=['batch_stats'])."
)

_DROPOUT_HINT = (
    " Dropout is on in evaluation. Pass the mode to the module, self.model.apply(variables, batch.x, train=train, rngs=rngs), "
    "and use it there: nn.Dropout(rate, deterministic=not train)."
)

# Separates the keys of evaluations from those of steps, which are folded with the step.
_EVAL = 0xE7A1


@dataclasses.dataclass
class Notes:
    """Values that JAX transformations cannot return, recorded while a forward pass is traced."""

    order: list[str] = dataclasses.field(default_factory=list)  # Keys of the metrics in the order in which they are shown.
    compiled_metrics: dict[str, Metric] = dataclasses.field(default_factory=dict)  # Metrics as the user passed them to `compile`.
    outputs: PyTree = None  # Shapes of the module's outputs by name.
    keeps_returned: bool = False  # Whether to record `returned`; a forward pass inside another transformation would leak it.
    returned: Returned | None = None  # The module's outputs, valid only in the trace of the forward pass.


class Totals(NamedTuple):
    """Weights of all micro-batches of all replicas, which do not depend on the values of the loss."""

    real: jax.Array  # Number of real examples.
    weight: jax.Array  # Sum of the weights.
    shape: tuple[int, ...]  # Shape of the weights after the axis of examples.

    def weight_of(self, shape: tuple[int, ...]) -> jax.Array:
        """Returns the weight of a part of the loss with values of this shape for a micro-batch."""
        return self.weight * (math.prod(shape[1:]) // math.prod(self.shape))


class ForwardResult(NamedTuple):
    """Results of one forward pass, before sums over replicas; `params` are those that the module itself has written, as nested dicts."""

    metrics: dict[str, Metric]
    model_state: dict[str, PyTree]
    sown: dict[str, PyTree]
    params: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ForwardPass:
    """Computes loss, metrics and gradient of one replica's rows of a batch; the part of a `Task` that does not depend on the optimizer."""

    model: Model
    strategy: Strategy
    objective: Objective
    numerics: Numerics
    streams: "Streams"
    mutable: Any  # linen's filter for collections that may change.
    transient: tuple[str, ...]  # Collections that do not become part of the state.
    compute_loss: ComputeLoss | None = None  # Replacement of `default_loss`; see `Trainer.compute_loss`.

    def default_loss(self, *arguments: Any, **keywords: Any) -> Any:
        """Computes the default of `compute_loss`, called like an override; `aux["outputs"]` is used for the metrics."""
        return self.model.default_loss(self._compiled_losses, self.mutable, *arguments, **keywords)

    def _compiled_losses(self, outputs: PyTree, targets: PyTree) -> tuple[Any, dict[str, Any]]:
        """Returns the values of the compiled loss, and other values to log, including the outputs."""
        outputs = self.numerics.widen(outputs)
        parts, aux = self.objective.losses(outputs, targets)
        return parts["loss"] if set(parts) == {"loss"} else parts, {**aux, OUTPUTS: outputs}

    def forward(
        self,
        params: PyTree,
        model_state: dict[str, PyTree],
        batch: Batch,
        *,
        draws: Draws,
        train: bool,
        notes: Notes | None = None,
        totals: Totals | None = None,
        sown: tuple[str, ...] = (),
    ) -> tuple[jax.Array, ForwardResult]:
        """Returns this replica's share of the global loss, and the other results of the pass.

        `totals` are the weights of all micro-batches, if this is one of several; `sown` are the collections whose sown values are kept.
        """
        notes = notes or Notes()
        values, changed, aux = self._values(params, model_state, batch, draws=draws, train=train)
        parts = values if isinstance(values, Mapping) else {"loss": values}
        mask, weights = _masked_weights(batch)
        means: dict[str, Mean] = {}
        local = jnp.float32(0)
        for name, part in parts.items():
            _check_real("A loss", part)
            means[name], share = self._mean_part(name, jnp.asarray(part).astype(jnp.float32), batch, weights, mask, totals)
            local += share
        if sown_losses := jax.tree.leaves(changed.get("losses", ())) if "losses" in self.transient else []:
            for leaf in sown_losses:
                _check_real("A loss that a module sows", leaf)
            value = sum((jnp.sum(jnp.asarray(leaf, jnp.float32)) for leaf in sown_losses), start=jnp.float32(0))
            means["sown"], share = self._scalar_part(value, mask, totals)
            local += share
        if train and not means:
            raise LossError("There is nothing to minimize: compile() has no loss, and the module sows no 'losses'. Pass a loss: compile(optimizer, loss).")
        outputs = aux.pop(OUTPUTS, None)
        returned = Returned.of(outputs)
        notes.outputs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), returned).by_name()
        notes.returned = returned if notes.keeps_returned else None
        metrics: dict[str, Metric] = {"loss": TotalLoss(means)} if means else {}
        metrics |= {key: _aux_metric(key, value, weights, mask) for key, value in aux.items()}
        if outputs is None and self.objective.has_metrics:
            raise MetricError(
                f"compute_loss must return aux[{OUTPUTS!r}], from which the compiled metrics are computed. Return it, or compile without metrics."
            )
        outputs = map_outputs(jax.lax.stop_gradient, outputs)
        logged = jax.lax.stop_gradient(aux | {"loss": _per_example(parts, len(mask))})
        for entry in () if outputs is None else self.objective.entries(outputs, tuple(metrics)):
            metrics[entry.key] = self.objective.update(entry, outputs, batch.y, weights if entry.weighted else mask, logged)
            notes.compiled_metrics[entry.key] = entry.metric
        notes.order[:] = metrics
        kept = {name: tree for name, tree in changed.items() if name not in self.transient}
        written = kept.pop("params", {})
        # `stop_gradient` of the whole dict would sort the keys, but values are shown in the order of the keys.
        metrics = {key: jax.lax.stop_gradient(metric) for key, metric in metrics.items()}
        wanted, written = jax.lax.stop_gradient(({name: changed[name] for name in sown if name in changed}, written))
        return local, ForwardResult(metrics, {**model_state, **kept}, wanted, {} if self.numerics.is_half else written)  # Rounded values must not be stored.

    def _values(
        self, params: PyTree, model_state: dict[str, PyTree], batch: Batch, *, draws: Draws, train: bool
    ) -> tuple[Any, dict[str, PyTree], dict[str, Any]]:
        """Returns the results of `compute_loss`; parameters and inputs are cast to the compute dtype, and outputs and collections back."""
        variables, x = self._narrowed(params, model_state, batch.x)
        options = {"train": train, "draws": draws, "mutable": self.mutable}
        try:
            if self.compute_loss is None:
                outputs, changed = self.model.apply(variables, x, **options)
                values, aux = self._compiled_losses(outputs, batch.y)
            else:
                result = self.model.call_loss(self.compute_loss, variables, batch._replace(x=x), **options)
                if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[1], Mapping) or not isinstance(result[2], Mapping):
                    returned = describe_shapes(result)
                    raise LossError(f"compute_loss must return (values, new_model_state, aux), where the last two are dicts. Received: {returned}.")
                values, changed, aux = result[0], dict(result[1]), dict(result[2])
        except InvalidRngError as error:
            if not train and is_dropout_error(error):
                raise ModelError(f"compute_loss: {error}.{_DROPOUT_HINT}") from error
            raise ModelError(f"compute_loss: {error}.{RNG_HINT} It gets rngs={list(draws.rngs)} {'in training' if train else 'in evaluation'}.") from error
        except ModifyScopeVariableError as error:
            raise ModelError(f"compute_loss: {error}.{MUTABLE_HINT}") from error
        return values, self.numerics.as_stored(changed, model_state, variables), {key: self.numerics.widen(value) for key, value in aux.items()}

    def _narrowed(self, params: PyTree, model_state: Mapping[str, PyTree], x: PyTree) -> tuple[dict[str, PyTree], PyTree]:
        """Returns the variables and inputs of a call, with parameters, frozen ones included, and inputs in the compute dtype."""
        frozen = {name: model_state[name] for name in self.model.frozen if name in model_state}
        params, frozen, x = self.numerics.narrow((params, frozen, x))
        return {"params": params, **model_state, **frozen}, x

    def _mean_part(self, name: str, values: jax.Array, batch: Batch, weights: jax.Array, mask: jax.Array, totals: Totals | None) -> tuple[Mean, jax.Array]:
        """Returns the logged mean of one part of the loss, and this replica's share of its global mean."""
        if values.ndim == 0:
            if batch.weights is not None:
                raise LossError("The loss is a scalar, but the data is weighted. Return one value per example, [batch] or [batch, ...], instead of their mean.")
            mean, share = self._scalar_part(values, mask, totals)
            return dataclasses.replace(mean, name=SCALAR), share
        rows = batch.mask.shape[0]
        if values.shape[0] != rows:
            raise LossError(
                f"A loss must return one value per example, [{rows}] or [{rows}, ...]. "
                f"The loss{'' if name == 'loss' else f' of output {name!r}'} returned {list(values.shape)}."
            )
        if weights.ndim > values.ndim or any(have not in (1, want) for have, want in zip(weights.shape, values.shape, strict=False)):
            raise LossError(
                f"sample_weight {list(weights.shape)} does not fit the loss values {list(values.shape)}, aligned from the left. Sizes must be equal or 1. "
                f"Pass other weights, or a loss function that returns one value per weight, {list(weights.shape)}."
            )
        total, weight = weighted_sums(values, weights)
        whole = self.strategy.sum(jax.lax.stop_gradient(weight)) if totals is None else totals.weight_of(values.shape)
        return Mean().add(jax.lax.stop_gradient(values), weights), ratio(total, whole)

    def _scalar_part(self, value: jax.Array, mask: jax.Array, totals: Totals | None) -> tuple[Mean, jax.Array]:
        """Returns the same for a value that is the mean over this replica's examples, which is weighted by the number of real examples."""
        real = jnp.sum(mask)
        return Mean().add(jax.lax.stop_gradient(value), real), ratio(value * real, self.strategy.sum(real) if totals is None else totals.real)

    # -- gradients --

    def gradient(self, state: TrainState, batch: Batch, notes: Notes, scale: jax.Array | None, *, sown: tuple[str, ...]) -> Any:
        """Returns this replica's share of the loss, of the gradient of the loss times `scale`, and the `ForwardResult`.

        If `accumulate_steps` is more than 1, it runs micro-batch by micro-batch, so that only one's activations are in memory. Sown values are those of the
        last micro-batch. Fills `notes`.
        """
        key = jax.random.fold_in(state.key, state.step)
        if self.numerics.accumulate_steps == 1:
            return self._value_and_grad(state, batch, key, notes, scale, sown=sown)
        totals, batches = self._micro_batches(batch)

        def body(carry: tuple[jax.Array, PyTree, dict[str, PyTree]], each: tuple[jax.Array, Batch]) -> Any:
            (loss, grads, model_state), (index, micro) = carry, each
            before = dataclasses.replace(state, model_state={**model_state, **_overwritten(state.model_state)})
            share, new_grads, forward = self._value_and_grad(before, micro, jax.random.fold_in(key, index), notes, scale, totals, sown=sown)
            after = _same_collections(before, forward.model_state)
            after |= jax.tree.map(jnp.maximum, _overwritten(model_state), _overwritten(after))
            grads = self._with_param_sharding(state, optax.tree.add(grads, optax.tree.cast_like(new_grads, grads)))
            return (loss + share, grads, after), (forward.metrics, forward.sown, forward.params)

        lowest = jax.tree.map(lambda leaf: jnp.full_like(leaf, -jnp.inf), _overwritten(state.model_state))
        first = (jnp.float32(0), self._with_param_sharding(state, _zero_sums(state.params)), {**state.model_state, **lowest})
        (loss, grads, model_state), (metrics, *others) = jax.lax.scan(body, first, batches)
        rows = rows_of(metrics)
        merged = merge_all({name: metric for name, metric in metrics.items() if name not in rows})
        grads = optax.tree.cast_like(grads, state.params)
        return loss, grads, ForwardResult(self.strategy.unsplit(rows) | merged, model_state, *_entry(others, -1))

    def _value_and_grad(
        self,
        state: TrainState,
        batch: Batch,
        key: jax.Array,
        notes: Notes,
        scale: jax.Array | None,
        totals: Totals | None = None,
        *,
        sown: tuple[str, ...],
    ) -> tuple[jax.Array, PyTree, ForwardResult]:
        """Returns the same as `gradient`, from one forward and backward pass."""
        draws = self.streams.train_draws(key, self.strategy)

        def loss_fn(params: PyTree, overwritten: dict[str, PyTree]) -> tuple[jax.Array, tuple[jax.Array, ForwardResult]]:
            model_state = {**state.model_state, **overwritten}
            loss, forward = self.forward(params, model_state, batch, draws=draws, train=True, notes=notes, totals=totals, sown=sown)
            return loss if scale is None else loss * scale, (loss, forward)

        arguments = state.params, _overwritten(state.model_state)
        (_, (loss, forward)), (grads, replaced) = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)(*arguments)
        return loss, self._with_param_sharding(state, grads), forward._replace(model_state={**forward.model_state, **replaced})

    def loss_at(self, state: TrainState, batch: Batch, params: PyTree) -> jax.Array:
        """Returns this replica's share of the loss of the step from `state`, with the same keys and collections, at other parameters."""
        key = jax.random.fold_in(state.key, state.step)
        if self.numerics.accumulate_steps == 1:
            return self.forward(params, state.model_state, batch, draws=self.streams.train_draws(key, self.strategy), train=True)[0]
        totals, batches = self._micro_batches(batch)
        wide = optax.tree.cast_like(params, jax.eval_shape(_zero_sums, params))  # The gradient of the loop is a sum in these dtypes.

        def body(carry: tuple[jax.Array, dict[str, PyTree]], each: tuple[jax.Array, Batch]) -> Any:
            (loss, model_state), (index, micro) = carry, each
            draws = self.streams.train_draws(jax.random.fold_in(key, index), self.strategy)
            share, forward = self.forward(optax.tree.cast_like(wide, params), model_state, micro, draws=draws, train=True, totals=totals)
            return (loss + share, _same_collections(dataclasses.replace(state, model_state=model_state), forward.model_state)), None

        # As in training, only one micro-batch's activations are in memory in the backward pass.
        run = body if jit_is_disabled() else jax.checkpoint(body)
        return cast(jax.Array, jax.lax.scan(run, (jnp.float32(0), state.model_state), batches)[0][0])

    def _micro_batches(self, batch: Batch) -> tuple[Totals, tuple[jax.Array, Batch]]:
        """Returns totals over all replicas, and the micro-batches with their indices."""
        mask, weights = _masked_weights(batch)
        real, weight = self.strategy.sum((jnp.sum(mask), jnp.sum(weights)))
        steps = self.numerics.accumulate_steps
        return Totals(real, weight, weights.shape[1:]), (jnp.arange(steps), split(batch, steps, self.strategy))

    def _with_param_sharding(self, state: TrainState, grads: PyTree) -> PyTree:
        return self.strategy.pin(dataclasses.replace(state, params=grads, model_state={}, opt_state=(), ema_params=None)).params


def _overwritten(model_state: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Returns the collection that is replaced by its gradient, if there is one, such as the scales of Flax's fp8 operations.

    Each micro-batch and each replica gets the values from before the step. The result is the maximum over all of them, because these operations need the
    largest magnitude in the whole batch.
    """
    return {name: tree for name, tree in model_state.items() if name == OVERWRITE_WITH_GRADIENT}


def _same_collections(before: TrainState, model_state: dict[str, PyTree]) -> dict[str, PyTree]:
    return same_types(dataclasses.replace(before, model_state=model_state), before).model_state


def _aux_metric(key: str, value: Any, weights: jax.Array, mask: jax.Array) -> Mean:
    if isinstance(value, Mapping | list | tuple):
        raise LossError(f"compute_loss must return aux as a flat dict of scalars or values per example. Received: aux[{key!r}] is a {type(value).__name__}.")
    value = jax.lax.stop_gradient(jnp.asarray(value))
    if value.ndim == 0:
        return Mean(name=key).add(value, jnp.sum(mask))
    if len(value) != len(mask):
        raise LossError(f"compute_loss's aux[{key!r}] must be a scalar or [{len(mask)}, ...], one value per example. Received: {list(value.shape)}.")
    return Mean(name=key).add(value, weights if weights.ndim <= value.ndim else mask)


def _check_real(what: str, value: Any) -> None:
    if jnp.iscomplexobj(value):
        raise LossError(f"{what} must be real. Received: {describe_shapes(value)}. Take the magnitude, abs(values), or the real part.")


# -- weights of examples --


def _masked_weights(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns which rows are real, float32 `[batch]`, and their weights, `[batch]` or `[batch, ...]`."""
    mask = batch.mask.astype(jnp.float32)
    if batch.weights is None:
        return mask, mask
    return mask, mask.reshape(mask.shape + (1,) * (batch.weights.ndim - mask.ndim)) * batch.weights


def ratio(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `total / weight`, 0 where the weight is 0, with a finite gradient there."""
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)


def _per_example(parts: Mapping[str, Any], rows: int) -> jax.Array:
    """Returns the sum of the parts of the loss for each example, `[rows]`; a scalar part is added to each of them."""
    values = [jnp.asarray(part, jnp.float32) for part in parts.values()]
    return sum((value if value.ndim < 2 else value.reshape(rows, -1).mean(axis=1) for value in values), start=jnp.zeros(rows, jnp.float32))


# -- micro-batches --


def split(batch: Batch, steps: int, strategy: Strategy) -> Batch:
    """Returns a batch of `[rows, ...]` as micro-batches, `[steps, rows / steps, ...]`."""
    rows = batch.mask.shape[0]
    if rows % steps:
        raise DataError(
            f"compile(accumulate_steps={steps}) cannot split the {rows} examples of a replica into {steps} equal micro-batches. Use a batch size that is "
            "divisible by accumulate_steps times the number of replicas."
        )
    return cast(Batch, strategy.split(batch, steps))


def merge_all(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Returns metrics over parts of one batch, merged along the first axis of their leaves, in order."""
    if jax.tree.leaves(metrics)[0].shape[0] == 1:
        return cast(dict[str, Metric], _entry(metrics, 0))

    def merged(sums: dict[str, Any], share: dict[str, Any]) -> tuple[dict[str, Any], None]:
        return {key: getattr(metric, "merge_part", metric.merge)(share[key]) for key, metric in sums.items()}, None

    # A loop compiles much faster than a chain of merges.
    return cast(dict[str, Metric], jax.lax.scan(merged, _entry(metrics, 0), _entry(metrics, slice(1, None)))[0])


def _zero_sums(params: PyTree) -> PyTree:
    """Returns zeros like the parameters, but in float32 if these are narrower, because a long sum in half precision loses small terms."""

    def one(leaf: jax.Array) -> jax.Array:
        is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
        return jnp.zeros_like(leaf, jnp.float32 if is_narrow else None)

    return jax.tree.map(one, params)


def _entry(tree: PyTree, index: Any) -> Any:
    """Returns the entries at an index along the first axis."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


# -- random keys --


def split_key(key: jax.Array, names: tuple[str, ...]) -> dict[str, jax.Array]:
    """Returns a key for each name, independent of the other names."""
    return {name: jax.random.fold_in(key, zlib.crc32(name.encode())) for name in names}


@jax.tree_util.register_pytree_with_keys_class
class StreamKeys(dict[str, jax.Array]):
    """A dict of keys by stream, with an error that says how to name a missing stream. It is registered as a pytree; otherwise JAX would treat it as a leaf.

    >>> StreamKeys(dropout=1)["noise"]
    Traceback (most recent call last):
    fitflax.errors.ConfigError: step_rngs(state) has no random stream 'noise'. It has: ['dropout']. Name it: Trainer(rngs=('dropout', 'noise')).
    """

    def __missing__(self, name: str) -> jax.Array:
        raise ConfigError(f"step_rngs(state) has no random stream {name!r}. It has: {list(self)}. Name it: Trainer(rngs={(*self, name)}).")

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, jax.Array]], tuple[str, ...]]:
        """Returns the keys in the order of their names, as of a plain dict."""
        names = tuple(sorted(self))
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], keys: Any) -> Self:
        """Returns the dict with other values."""
        return cls(zip(names, keys, strict=True))


class Streams(NamedTuple):
    """Names of the module's random streams at initialization, in training and in evaluation."""

    init: tuple[str, ...]
    train: tuple[str, ...]
    eval: tuple[str, ...]

    def train_keys(self, key: jax.Array, strategy: Strategy) -> dict[str, jax.Array]:
        """Returns the keys of a training pass, different on each replica."""
        return _replica_keys(self.train, key, strategy)

    def train_draws(self, key: jax.Array, strategy: Strategy) -> Draws:
        """Returns the `Draws` of a training pass, different on each replica."""
        return Draws(self.train_keys(key, strategy), None if strategy.num_replicas == 1 else strategy.replica_index)

    def eval_draws(self, key: jax.Array, index: jax.Array, strategy: Strategy) -> Draws:
        """Returns the `Draws` of batch number `index` of an evaluation, different on each replica."""

        def salt() -> jax.Array:
            return cast(jax.Array, index * strategy.num_replicas + strategy.replica_index())

        return Draws(_replica_keys(self.eval, jax.random.fold_in(jax.random.fold_in(key, _EVAL), index), strategy), salt)


def _replica_keys(names: tuple[str, ...], key: jax.Array, strategy: Strategy) -> dict[str, jax.Array]:
    return split_key(jax.random.fold_in(key, strategy.replica_index()), names) if names else {}
