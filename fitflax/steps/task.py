"""The pure steps: WHAT happens to a batch in training, evaluation and prediction.

Everything here is traced: no clock, no print, no randomness but keys derived from the state's key and step. A `Task` holds what the steps need and never
changes. Steps are written for one replica's share of the batch; sums over replicas go through the strategy.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax.errors import InvalidRngError, ModifyScopeVariableError

import fitflax.steps.accumulation as accumulation
import fitflax.steps.loss_scale as loss_scale
from fitflax.errors import LossError, MetricError, ModelError
from fitflax.metrics import Mean, Metric, weighted_sums
from fitflax.parallel import Strategy
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps.model import RNG_HINT, Model, describe_shapes
from fitflax.steps.numerics import Numerics, start_average
from fitflax.steps.objective import Objective
from fitflax.steps.structure import same_types, strong_types
from fitflax.steps.sums import EvalSums, TotalLoss, TrainSums, as_vector, rows_of, summed
from fitflax.steps.suspects import Suspects, find_suspects, named_suspects

__all__ = ["NOTHING", "SCALAR", "ComputeLoss", "Keep", "Kept", "Streams", "Task", "TrainStep", "split_key"]

ComputeLoss = Callable[..., tuple[Any, dict[str, PyTree], dict[str, Any]]]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]

# What keys are folded with, so that initialization, evaluation and steps never share one.
_INIT, _EVAL = 0x1A17, 0xE7A1

SCALAR = "scalar"
"""The name of a part of the loss that was returned as one number, which padding would falsify."""

_MUTABLE_HINT = (
    " Name the collections that the module changes, outputs, changed = self.model.apply(variables, batch.x, mutable=['batch_stats']), and return what changed."
)

OUTPUTS = "outputs"
"""The entry of `aux` that metrics are computed from; the others reach the logs."""


class Keep(NamedTuple):
    """What of a step besides its loss and metrics leaves it, where somebody wants it.

    Attributes:
        norm: The gradient's norm, and a watch for gradients that are not finite. XLA can no longer compute a gradient where it is used, so it is written to
            memory and read once more: a step of 100 MB of parameters and little else takes 1.4 times as long, one of 2000 arrays 1.3 times. `None` where the
            update is the user's own, so that there is none.
        grads: The gradient, which takes as much memory as the parameters.
        sown: Collections of sown values, by name.
        culprit: What first was not finite, of the parts of the loss, the gradient and the updated parameters, all of which are read for it.
    """

    norm: bool | None = False
    grads: bool = False
    sown: tuple[str, ...] = ()
    culprit: bool = False


NOTHING = Keep()


class Kept(NamedTuple):
    """What of a step is kept, equal on all replicas.

    Attributes:
        grads: The gradient, or `()`.
        sown: Sown values by collection: numbers averaged over replicas, arrays of all replicas joined along their first axis.
        suspects: The names of what was looked at for values that are not finite.
    """

    grads: PyTree
    sown: dict[str, PyTree]
    suspects: Suspects = Suspects()


class Streams(NamedTuple):
    """Names of the random streams that the module is given, by occasion."""

    init: tuple[str, ...]
    train: tuple[str, ...]
    eval: tuple[str, ...]


def split_key(key: jax.Array, names: tuple[str, ...]) -> dict[str, jax.Array]:
    """Returns a key for each name; a name's key does not depend on the other names.

    >>> sorted(split_key(jax.random.key(0), ("params", "dropout")))
    ['dropout', 'params']
    """
    return {name: jax.random.fold_in(key, zlib.crc32(name.encode())) for name in names}


@dataclasses.dataclass
class _Notes:
    """What JAX loses on the way out of a transformation, noted while a pass is traced.

    Attributes:
        order: The keys of the metrics as they are shown.
        given: The metrics as the user gave them.
        shapes: The shape of the values of each part of the loss.
    """

    order: list[str] = dataclasses.field(default_factory=list)
    given: dict[str, Metric] = dataclasses.field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


class _Update(NamedTuple):
    """What one update yields.

    Attributes:
        state: The state after it, but for averaged parameters.
        metrics: The batch's, joined over replicas but for rows.
        loss: Global, as are the gradient and its norm.
        grads: The gradient, never scaled.
        norm: Its norm, NaN unless that is kept.
        is_skipped: Whether parameters stay as they were, because the gradient overflowed; `None` where that cannot be.
        is_good: Whether nothing went wrong that a smaller scale of the loss could not mend.
        sown: This replica's sown values that are kept.
    """

    state: TrainState
    metrics: dict[str, Metric]
    loss: jax.Array
    grads: PyTree
    norm: jax.Array
    is_skipped: jax.Array | None
    is_good: jax.Array
    sown: dict[str, PyTree]


class _Losses(NamedTuple):
    """What one forward pass yields, before it is summed over replicas."""

    metrics: dict[str, Metric]
    model_state: dict[str, PyTree]
    sown: dict[str, PyTree]


class _Pass(NamedTuple):
    """What a pass forward and back yields of this replica's share: its part of the global loss and of the (scaled) gradient, metrics and collections."""

    loss: jax.Array
    grads: PyTree
    metrics: dict[str, Metric]
    model_state: dict[str, PyTree]
    sown: dict[str, PyTree]


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What is trained, and how: all that steps need besides state and batch.

    Attributes:
        model: The module's pure functions.
        strategy: Joins replicas.
        objective: Losses and metrics.
        optimizer: Any optax transformation, called with `params`; `None` where nothing is trained.
        streams: Names of random streams.
        mutable: linen's filter for collections that may change.
        transient: Collections that are taken out after every call.
        compute_loss: Replaces `default_loss`; see `Trainer.compute_loss`.
        custom_step: Replaces the whole update; see `Trainer.train_step`.
        numerics: How updates are computed.
    """

    model: Model
    strategy: Strategy
    objective: Objective
    optimizer: optax.GradientTransformationExtraArgs | None
    streams: Streams
    mutable: Any
    transient: tuple[str, ...]
    compute_loss: ComputeLoss | None = None
    custom_step: TrainStep | None = None
    numerics: Numerics = dataclasses.field(default_factory=Numerics)

    # -- initialization --

    def init_state(self, key: jax.Array, batch: Batch) -> TrainState:
        """Returns the state at step 0, from the shapes of `batch` alone; equal on all replicas."""
        # Values of the batch must not reach the parameters, so that any batch of these shapes gives the same state.
        x = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), batch.x)
        rngs = split_key(jax.random.fold_in(key, _INIT), ("params", *self.streams.init))
        variables, axes = self.model.init(rngs, x)
        params = variables.pop("params", {})
        model_state = {name: tree for name, tree in variables.items() if name not in self.transient}
        params, model_state = self.strategy.first((params, model_state))  # A module may ask for its replica's number.
        opt_state = () if self.optimizer is None else self.optimizer.init(params)
        averages = None if self.numerics.ema_decay is None else start_average(params)
        state = TrainState(step=jnp.int32(0), params=params, model_state=model_state, opt_state=opt_state, key=key, ema_params=averages, axes=axes)
        return cast(TrainState, strong_types(state))

    # -- one forward pass --

    def default_loss(
        self, params: PyTree, model_state: dict[str, PyTree], batch: Batch, *, rngs: dict[str, jax.Array], train: bool
    ) -> tuple[Any, dict[str, PyTree], dict[str, Any]]:
        """Returns `(values, new_model_state, aux)` of the compiled loss; `aux["outputs"]` feeds the metrics."""
        outputs, changed = self.model.apply({"params": params, **model_state}, batch.x, train=train, rngs=rngs, mutable=self.mutable)
        outputs = self.numerics.widen(outputs)
        parts, aux = self.objective.losses(outputs, batch.y)
        values = parts["loss"] if set(parts) == {"loss"} else parts
        return values, changed, {**aux, OUTPUTS: outputs}

    def _forward(
        self,
        params: PyTree,
        model_state: dict[str, PyTree],
        batch: Batch,
        *,
        rngs: dict[str, jax.Array],
        train: bool,
        notes: _Notes | None = None,
        totals: Mapping[str, jax.Array] | None = None,
        sown: tuple[str, ...] = (),
    ) -> tuple[jax.Array, _Losses]:
        """Returns this replica's part of the global loss, and the rest of what the pass yields.

        Args:
            params: The parameters.
            model_state: The other collections.
            batch: The share of the batch.
            rngs: A key for each random stream.
            train: Whether this is training.
            notes: Where to note what JAX loses.
            totals: The global weight of each part of the loss, where this is one of several micro-batches.
            sown: Collections whose sown values are kept.
        """
        notes = notes or _Notes()
        values, changed, aux = self._values(params, model_state, batch, rngs=rngs, train=train)
        parts = values if isinstance(values, Mapping) else {"loss": values}
        mask, weights = _masked_weights(batch)
        means: dict[str, Mean] = {}
        local = jnp.float32(0)
        for name, part in parts.items():
            part = jnp.asarray(part).astype(jnp.float32)
            notes.shapes[name] = part.shape
            means[name], share = self._mean_part(name, part, batch, weights, mask, totals)
            local += share
        sown_losses = [leaf for leaf in jax.tree.leaves(changed.get("losses", ())) if "losses" in self.transient]
        if sown_losses:
            value = sum((jnp.sum(jnp.asarray(leaf, jnp.float32)) for leaf in sown_losses), start=jnp.float32(0))
            notes.shapes["sown"] = ()
            means["sown"], share = self._scalar_part("sown", value, mask, totals)
            local += share
        if train and not means:
            raise LossError("There is nothing to minimize: compile() has no loss, and the module sows no 'losses'. Give one: compile(optimizer, loss).")
        metrics: dict[str, Metric] = {"loss": TotalLoss(means)} if means else {}
        outputs = aux.get(OUTPUTS)
        for key, value in aux.items():
            if key != OUTPUTS:
                if isinstance(value, Mapping | list | tuple):
                    raise LossError(f"compute_loss's aux is a flat dict of values per example or scalars. aux[{key!r}] is a {type(value).__name__}.")
                metrics[key] = self._aux_metric(key, jax.lax.stop_gradient(jnp.asarray(value)), weights, mask)
        if outputs is None and self.objective.has_metrics:
            raise MetricError(f"compute_loss returns no aux[{OUTPUTS!r}], which the compiled metrics are computed from.")
        if isinstance(outputs, dict):
            outputs = {name: jax.lax.stop_gradient(output) for name, output in outputs.items()}  # In the module's order, which JAX would sort.
        else:
            outputs = jax.lax.stop_gradient(outputs)
        logged = jax.lax.stop_gradient({key: value for key, value in aux.items() if key != OUTPUTS} | {"loss": _per_example(parts, batch.mask.shape[0])})
        for entry in () if outputs is None else self.objective.entries(outputs, tuple(metrics)):
            chosen = weights if entry.weighted else mask
            metrics[entry.key] = self.objective.update(entry, outputs, batch.y, chosen, logged)
            notes.given[entry.key] = entry.metric
        notes.order[:] = metrics
        kept = {name: tree for name, tree in changed.items() if name not in self.transient}
        # One by one: mapping over the dict would sort it, and its order is the order in which values are shown.
        metrics = {key: jax.tree.map(jax.lax.stop_gradient, metric) for key, metric in metrics.items()}
        wanted = jax.lax.stop_gradient({name: changed[name] for name in sown if name in changed})
        return local, _Losses(metrics, {**model_state, **kept}, wanted)

    def _values(
        self, params: PyTree, model_state: dict[str, PyTree], batch: Batch, *, rngs: dict[str, jax.Array], train: bool
    ) -> tuple[Any, dict[str, PyTree], dict[str, Any]]:
        """Returns what `compute_loss` does; parameters and inputs reach it in the compute dtype, outputs and collections leave in their own."""
        compute = self.compute_loss or self.default_loss
        params, x = self.numerics.narrow((params, batch.x))
        try:
            values, changed, aux = _checked_triple(compute(params, model_state, batch._replace(x=x), rngs=rngs, train=train))
        except InvalidRngError as error:
            raise ModelError(f"compute_loss: {error}.{RNG_HINT} It gets rngs={list(rngs)} {'in training' if train else 'in evaluation'}.") from error
        except ModifyScopeVariableError as error:
            raise ModelError(f"compute_loss: {error}.{_MUTABLE_HINT}") from error
        return values, self.numerics.as_stored(changed, model_state), {key: self.numerics.widen(value) for key, value in aux.items()}

    def _mean_part(
        self, name: str, values: jax.Array, batch: Batch, weights: jax.Array, mask: jax.Array, totals: Mapping[str, jax.Array] | None
    ) -> tuple[Mean, jax.Array]:
        """Returns the logged mean of one part of the loss, and this replica's share of its global mean."""
        if values.ndim == 0:
            if batch.weights is not None:
                raise LossError("The loss is a scalar, but the data is weighted. Return one value per example, [batch] or [batch, ...], instead of their mean.")
            mean, share = self._scalar_part(name, values, mask, totals)
            return dataclasses.replace(mean, name=SCALAR), share
        rows = batch.mask.shape[0]
        if values.shape[0] != rows:
            raise LossError(
                f"A loss returns one value per example: [{rows}] or [{rows}, ...] here. "
                f"{'It' if name == 'loss' else f'That of output {name!r}'} returned {list(values.shape)}."
            )
        if weights.ndim > values.ndim or any(have not in (1, want) for have, want in zip(weights.shape, values.shape, strict=False)):
            raise LossError(f"sample_weight {list(weights.shape)} does not fit the loss's values {list(values.shape)}, aligned from the left.")
        total, weight = weighted_sums(values, weights)
        return Mean().add(values, weights), _ratio(total, self.strategy.sum(jax.lax.stop_gradient(weight)) if totals is None else totals[name])

    def _scalar_part(self, name: str, value: jax.Array, mask: jax.Array, totals: Mapping[str, jax.Array] | None) -> tuple[Mean, jax.Array]:
        """The same for a value that already is the mean of this replica's examples: averaged by the number of real ones."""
        real = jnp.sum(mask)
        return Mean().add(value, real), _ratio(value * real, self.strategy.sum(real) if totals is None else totals[name])

    def _aux_metric(self, key: str, value: jax.Array, weights: jax.Array, mask: jax.Array) -> Mean:
        if value.ndim == 0:
            return Mean(name=key).add(value, jnp.sum(mask))
        if value.shape[0] != mask.shape[0]:
            raise LossError(f"compute_loss's aux[{key!r}] must be a scalar or [{mask.shape[0]}, ...], one value per example. It is {list(value.shape)}.")
        return Mean(name=key).add(value, weights if weights.ndim <= value.ndim else mask)

    # -- steps --

    def batch_metrics(self, state: TrainState, batch: Batch, *, train: bool, given: dict[str, Metric]) -> dict[str, Metric]:
        """Returns the metrics of one batch in the order in which they are shown, not joined over replicas; notes in `given` those that users gave.

        Only their structure is used, which sums are made from.
        """
        if train and self.custom_step is not None:
            return self._custom(state, batch)[1]
        rngs = self._rngs(self.streams.train if train else self.streams.eval, state.key)
        if train and self.numerics.accumulate_steps > 1:
            batch = accumulation.first_of(accumulation.split(batch, self.numerics.accumulate_steps, self.strategy))
        return self._forward(state.params, state.model_state, batch, rngs=rngs, train=train, notes=_Notes(given=given))[1].metrics

    def train_step(
        self, state: TrainState, sums: TrainSums, batch: Batch, *, keep: Keep = NOTHING
    ) -> tuple[TrainState, TrainSums, jax.Array, dict[str, Metric], Kept]:
        """Returns the state after one update, the epoch's sums, the step's values for logs (see `fitflax.logs`), this replica's rows, and what is kept."""
        done = self._done(state, batch, keep)
        merged = {key: sums.metrics[key].merge(metric) for key, metric in summed(done.metrics).items()}
        is_good, suspects, first = done.is_good, Suspects(), jnp.int32(-1)
        if keep.culprit:
            suspects, are_bad = find_suspects(_suspects_of(done))
            first = jnp.where(are_bad.any(), jnp.argmax(are_bad), -1).astype(jnp.int32)
            # An optimizer can spoil a parameter by itself; and a norm can be too large for a float32 where no number of the gradient is.
            are_good = ~are_bad[len(are_bad) - len(jax.tree.leaves(done.state.params)) :].any()
            is_good = ~are_bad.any() if done.is_skipped is None else is_good & are_good
        was_bad = sums.steps_since_bad >= 0
        since = jnp.where(was_bad, sums.steps_since_bad + 1, jnp.where(is_good, -1, 0))
        culprit = jnp.where(was_bad, sums.culprit, jnp.where(is_good, -1, first))
        values = as_vector([done.loss, done.norm, since.astype(jnp.float32), culprit.astype(jnp.float32)], merged)
        kept = Kept(done.grads if keep.grads else (), self._join_sown(done.sown), suspects)
        return self._averaged(state, done), TrainSums(merged, since, culprit), values, rows_of(done.metrics), kept

    def _done(self, state: TrainState, batch: Batch, keep: Keep) -> _Update:
        """Returns what an update yields, the compiled loss's or the user's own."""
        if self.custom_step is None:
            return self.update(state, batch, keep=keep)
        new_state, metrics = self._custom(state, batch)
        metrics = self._join(metrics)
        loss = metrics["loss"].compute() if "loss" in metrics else jnp.float32(0)
        return _Update(new_state, metrics, loss, (), jnp.float32(jnp.nan), None, jnp.isfinite(loss), {})

    def suspects(self, state: TrainState, batch: Batch) -> list[tuple[str, jax.Array]]:
        """Returns what of a step may be to blame for values that are not finite, as `named_suspects` does."""
        return _suspects_of(self._done(state, batch, NOTHING))

    def _join_sown(self, sown: dict[str, PyTree]) -> dict[str, PyTree]:
        def joined(leaf: Any) -> jax.Array:
            every = self.strategy.gather(jnp.asarray(leaf))
            return cast(jax.Array, every.astype(jnp.float32).mean() if every.ndim == 1 else every.reshape(-1, *every.shape[2:]))

        return cast(dict[str, PyTree], jax.tree.map(joined, sown))

    def _averaged(self, old: TrainState, done: _Update) -> TrainState:
        """Returns the state after an update, averaged parameters as well."""
        if self.numerics.ema_decay is None:
            return done.state
        averages = self.numerics.average(old.ema_params, done.state.params)
        if done.is_skipped is not None:
            averages = optax.tree.where(done.is_skipped, old.ema_params, averages)
        return same_types(dataclasses.replace(done.state, ema_params=averages), old)

    def update(self, state: TrainState, batch: Batch, *, unify: bool = True, keep: Keep = NOTHING) -> _Update:
        """Returns what one update by the compiled loss yields.

        With `unify=False` the collections are this replica's, for a custom step, after which they are unified anyway.
        """
        assert self.optimizer is not None
        scale = state.opt_state.scale if self.numerics.is_scaled else None
        notes = _Notes()
        run = self._back if self.numerics.accumulate_steps == 1 else self._accumulate
        share = run(state, batch, jax.random.fold_in(state.key, state.step), notes, scale, sown=keep.sown)
        loss, grads = self.strategy.sum((share.loss, share.grads))
        if scale is not None:
            grads = loss_scale.unscaled(grads, scale)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        step, params = state.step + 1, optax.apply_updates(state.params, updates)
        model_state = self.strategy.unify(share.model_state) if unify else share.model_state
        metrics = self._join({key: share.metrics[key] for key in notes.order})
        norm = optax.tree.norm(grads).astype(jnp.float32) if keep.norm else jnp.float32(jnp.nan)
        is_finite = jnp.isfinite(norm) if keep.norm else jnp.bool_(True)
        is_good, is_skipped = jnp.isfinite(loss) & is_finite, None
        if scale is not None:
            is_skipped = ~loss_scale.is_finite(grads)
            # Where there is no smaller scale to try, a gradient that is not finite is as bad as without scaling.
            is_good = jnp.isfinite(loss) & (is_finite | (is_skipped & (scale > loss_scale.MIN_SCALE)))
            params, model_state = optax.tree.where(is_skipped, (state.params, state.model_state), (params, model_state))
        new_state = dataclasses.replace(state, step=step, params=params, model_state=model_state, opt_state=opt_state)
        return _Update(same_types(new_state, state), metrics, loss, grads, norm, is_skipped, is_good, share.sown)

    def _back(
        self,
        state: TrainState,
        batch: Batch,
        key: jax.Array,
        notes: _Notes,
        scale: jax.Array | None,
        totals: Mapping[str, jax.Array] | None = None,
        *,
        sown: tuple[str, ...],
    ) -> _Pass:
        """Returns what a pass forward and back yields; the gradient is that of the loss times `scale`."""
        rngs = self._rngs(self.streams.train, key)

        def loss_fn(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, _Losses]]:
            loss, forward = self._forward(params, state.model_state, batch, rngs=rngs, train=True, notes=notes, totals=totals, sown=sown)
            return loss if scale is None else loss * scale, (loss, forward)

        (_, (loss, forward)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return _Pass(loss, self._pinned(state, grads), forward.metrics, forward.model_state, forward.sown)

    def _pinned(self, state: TrainState, grads: PyTree) -> PyTree:
        """Returns a gradient that lies where the parameters do."""
        return self.strategy.pin(dataclasses.replace(state, params=grads, model_state={}, opt_state=(), ema_params=None)).params

    def _accumulate(self, state: TrainState, batch: Batch, key: jax.Array, notes: _Notes, scale: jax.Array | None, *, sown: tuple[str, ...]) -> _Pass:
        """Returns the same of a batch that is worked on in micro-batches, one after another; only one's activations are in memory at a time.

        Sown values are those of the last micro-batch.
        """
        steps = self.numerics.accumulate_steps
        batches = accumulation.split(batch, steps, self.strategy)
        totals = self._total_weights(state, batch, accumulation.first_of(batches))

        def body(carry: tuple[jax.Array, PyTree, dict[str, PyTree]], each: tuple[jax.Array, Batch]) -> Any:
            (loss, grads, model_state), (index, micro) = carry, each
            before = dataclasses.replace(state, model_state=model_state)
            one = self._back(before, micro, jax.random.fold_in(key, index), notes, scale, totals, sown=sown)
            after = same_types(dataclasses.replace(before, model_state=one.model_state), before)
            return (loss + one.loss, self._pinned(state, optax.tree.add(grads, one.grads)), after.model_state), (one.metrics, one.sown)

        first = (jnp.float32(0), self._pinned(state, optax.tree.zeros_like(state.params)), state.model_state)
        (loss, grads, model_state), (metrics, sown_values) = jax.lax.scan(body, first, (jnp.arange(steps), batches))
        rows = rows_of(metrics)
        merged = accumulation.merge_all({name: metric for name, metric in metrics.items() if name not in rows})
        return _Pass(loss, grads, accumulation.join_rows(rows, self.strategy) | merged, model_state, cast(dict[str, PyTree], accumulation.last_of(sown_values)))

    def _total_weights(self, state: TrainState, batch: Batch, micro: Batch) -> dict[str, jax.Array]:
        """Returns the weight of each part of the loss over all micro-batches and replicas; only the shapes of one micro-batch's values are needed for it."""
        notes = _Notes()
        forward = functools.partial(self._forward, rngs=self._rngs(self.streams.train, state.key), train=True, notes=notes)
        jax.eval_shape(forward, state.params, state.model_state, micro)
        mask, weights = _masked_weights(batch)
        return {name: self.strategy.sum(accumulation.total_weight(shape, weights, mask)) for name, shape in notes.shapes.items()}

    def weighted_logs(self, metrics: dict[str, Metric], batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Returns a batch's global metrics as the pairs that a custom step logs: each replica's share of the sum, and of the weight."""
        replicas = self.strategy.num_replicas
        real = jnp.sum(batch.mask.astype(jnp.float32))
        pairs = {}
        for key, metric in summed(metrics).items():
            parts = list(metric.parts.values()) if isinstance(metric, TotalLoss) else [metric]
            if len(parts) == 1 and isinstance(parts[0], Mean) and parts[0].transform is None:
                pairs[key] = (jnp.sum(parts[0].total) / replicas, jnp.sum(parts[0].weight) / replicas)
            else:
                pairs[key] = (metric.compute() * real, real)
        return pairs

    def _custom(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Metric]]:
        """Returns the result of the user's own update, its logs as metrics; replicas made equal."""
        assert self.custom_step is not None
        try:
            result = self.custom_step(state, batch)
        except ModifyScopeVariableError as error:
            raise ModelError(f"train_step: {error}.{_MUTABLE_HINT}") from error
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], TrainState) or not isinstance(result[1], Mapping):
            kinds = f"({', '.join(type(part).__name__ for part in result)})" if isinstance(result, tuple) else type(result).__name__
            raise ModelError(f"train_step returns (TrainState, dict). Received: {kinds}.")
        new_state, logs = result
        metrics: dict[str, Metric] = {}
        for key, pair in logs.items():
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise LossError(f"train_step's logs are pairs (sum, weight). {key!r} is {describe_shapes(pair)}.")
            total, weight = (jnp.asarray(value, jnp.float32) for value in pair)
            metrics[key] = Mean(name=key).add(_ratio(total, weight), weight)
        kept = {name: tree for name, tree in new_state.model_state.items() if name not in self.transient}
        # A user's update may well forget the other replicas.
        params, opt_state = self.strategy.agree((new_state.params, new_state.opt_state))
        new_state = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state, model_state=self.strategy.unify(kept))
        return same_types(new_state, state), metrics

    def eval_step(
        self, params: PyTree, model_state: dict[str, PyTree], key: jax.Array, sums: EvalSums, batch: Batch
    ) -> tuple[EvalSums, jax.Array, dict[str, Metric]]:
        """Returns the evaluation's sums with one more batch, their values, and this replica's rows. The module's state does not change."""
        rngs = self._rngs(self.streams.eval, jax.random.fold_in(jax.random.fold_in(key, _EVAL), sums.index))
        _, forward = self._forward(params, model_state, batch, rngs=rngs, train=False)
        metrics = self._join(forward.metrics)
        merged = {name: sums.metrics[name].merge(metric) for name, metric in summed(metrics).items()}
        return EvalSums(merged, sums.index + 1), as_vector([], merged), rows_of(metrics)

    def predict_step(self, params: PyTree, model_state: dict[str, PyTree], key: jax.Array, index: jax.Array, x: PyTree) -> PyTree:
        """Returns the module's outputs for one batch."""
        return self.outputs(params, model_state, jax.random.fold_in(jax.random.fold_in(key, _EVAL), index), x, train=False)

    def outputs(self, params: PyTree, model_state: dict[str, PyTree], key: jax.Array, x: PyTree, *, train: bool) -> PyTree:
        """Returns what the module returns; its random keys follow from `key`."""
        rngs = self._rngs(self.streams.train if train else self.streams.eval, key)
        params, x = self.numerics.narrow((params, x))
        return self.numerics.widen(self.model.apply({"params": params, **model_state}, x, train=train, rngs=rngs, mutable=self.mutable)[0])

    def step_rngs(self, state: TrainState) -> dict[str, jax.Array]:
        """Returns the keys of the streams of training for the step that follows a state."""
        return self._rngs(self.streams.train, jax.random.fold_in(state.key, state.step))

    def _rngs(self, names: tuple[str, ...], key: jax.Array) -> dict[str, jax.Array]:
        return split_key(jax.random.fold_in(key, self.strategy.replica_index()), names) if names else {}

    def _join(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        """Returns metrics of all replicas: added where they allow it, merged in the order of the replicas otherwise; rows stay each replica's own."""
        joined = rows_of(metrics)
        joined |= self.strategy.sum({key: metric for key, metric in metrics.items() if key not in joined and getattr(metric, "additive", False)})
        others = {key: metric for key, metric in metrics.items() if key not in joined}
        if others:
            joined |= accumulation.merge_all(self.strategy.gather(others))
        return {key: joined[key] for key in metrics}


def _suspects_of(done: _Update) -> list[tuple[str, jax.Array]]:
    loss = done.metrics.get("loss")
    parts = loss.parts if isinstance(loss, TotalLoss) else {}
    return named_suspects({name: part.compute() for name, part in parts.items()}, done.loss, done.grads, done.state.params)


def _checked_triple(result: Any) -> tuple[Any, dict[str, PyTree], dict[str, Any]]:
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[1], Mapping) or not isinstance(result[2], Mapping):
        raise LossError(f"compute_loss returns (values, new_model_state, aux), the last two dicts. Received: {describe_shapes(result)}.")
    return result[0], dict(result[1]), dict(result[2])


def _per_example(parts: Mapping[str, Any], rows: int) -> jax.Array:
    """Returns the sum of the parts of the loss for each example, `[rows]`; a part that is one number counts for all of them."""
    values = [jnp.asarray(part, jnp.float32) for part in parts.values()]
    return sum((value if value.ndim < 2 else value.reshape(rows, -1).mean(axis=1) for value in values), start=jnp.zeros(rows, jnp.float32))


def _ratio(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `total / weight`, 0 where the weight is 0, with a finite gradient there."""
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)


def _masked_weights(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns which rows are real, float32 `[batch]`, and what they count, `[batch]` or `[batch, ...]`."""
    mask = batch.mask.astype(jnp.float32)
    return mask, mask if batch.weights is None else _from_left(mask, batch.weights.ndim) * batch.weights


def _from_left(array: jax.Array, ndim: int) -> jax.Array:
    return array.reshape(array.shape + (1,) * (ndim - array.ndim))
