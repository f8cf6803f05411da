"""The forward pass of one replica: its share of the global loss, and the metrics of its rows."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError, ModifyScopeVariableError

from fitflax.errors import LossError, MetricError, ModelError
from fitflax.leaves import describe_shapes
from fitflax.metrics import Mean, Metric, weighted_sums
from fitflax.models import Model
from fitflax.models.base import RNG_HINT, Draws, is_dropout_error
from fitflax.parallel import Strategy
from fitflax.state import Batch, PyTree
from fitflax.steps.example_weights import masked_weights, per_example, ratio
from fitflax.steps.gradient_accumulation import Totals
from fitflax.steps.loss_and_metrics import Objective
from fitflax.steps.metric_state import TotalLoss
from fitflax.steps.model_outputs import Returned, map_outputs
from fitflax.steps.numerics import Numerics

__all__ = ["MUTABLE_HINT", "SCALAR", "ComputeLoss", "ForwardPass", "ForwardResult", "Notes"]

ComputeLoss = Callable[..., tuple[Any, dict[str, PyTree], dict[str, Any]]]

SCALAR = "scalar"
"""Name of a loss part that was returned as a scalar, which padding would falsify."""

MUTABLE_HINT = (
    " Pass mutable= with the collections that the module updates, and return the updated ones: "
    "outputs, updated = self.model.apply(variables, batch.x, mutable=['batch_stats'])."
)

_DROPOUT_HINT = (
    " Dropout is on in evaluation. Pass the mode to the module, self.model.apply(variables, batch.x, train=train, rngs=rngs), "
    "and use it there: nn.Dropout(rate, deterministic=not train)."
)

OUTPUTS = "outputs"
"""The entry of `aux` that metrics are computed from; other entries are logged."""


@dataclasses.dataclass
class Notes:
    """Values that JAX transformations do not pass on, recorded while a pass is traced."""

    order: list[str] = dataclasses.field(default_factory=list)  # Keys of the metrics in the order in which they are shown.
    given: dict[str, Metric] = dataclasses.field(default_factory=dict)  # Metrics as the user gave them.
    outputs: PyTree = None  # Shapes of the module's outputs by name.
    keeps_returned: bool = False  # Whether to record `returned`; a pass inside another transformation would leak it.
    returned: Returned | None = None  # The module's outputs, valid in the trace of the pass only.


class ForwardResult(NamedTuple):
    """Results of one forward pass, before sums over replicas; `params` are those that the module itself has written, as nested dicts."""

    metrics: dict[str, Metric]
    model_state: dict[str, PyTree]
    sown: dict[str, PyTree]
    params: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPass:
    """Computes the loss and the metrics of one replica's rows of a batch. The attributes are those of `Task`."""

    model: Model
    strategy: Strategy
    objective: Objective
    numerics: Numerics
    mutable: Any
    transient: tuple[str, ...]
    compute_loss: ComputeLoss | None

    def default_loss(self, *arguments: Any, **keywords: Any) -> Any:
        """Computes the default of `compute_loss`, called like an override; `aux["outputs"]` is used for the metrics."""
        return self.model.default_loss(self._compiled_losses, self.mutable, *arguments, **keywords)

    def _compiled_losses(self, outputs: PyTree, targets: PyTree) -> tuple[Any, dict[str, Any]]:
        """Returns the values of the compiled loss, and other values to log, including the outputs."""
        outputs = self.numerics.widen(outputs)
        parts, aux = self.objective.losses(outputs, targets)
        return parts["loss"] if set(parts) == {"loss"} else parts, {**aux, OUTPUTS: outputs}

    def __call__(
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
        mask, weights = masked_weights(batch)
        means: dict[str, Mean] = {}
        local = jnp.float32(0)
        for name, part in parts.items():
            _check_real("A loss", part)
            means[name], share = self._mean_part(name, jnp.asarray(part).astype(jnp.float32), batch, weights, mask, totals)
            local += share
        sown_losses = [leaf for leaf in jax.tree.leaves(changed.get("losses", ())) if "losses" in self.transient]
        for leaf in sown_losses:
            _check_real("A loss that a module sows", leaf)
        if sown_losses:
            value = sum((jnp.sum(jnp.asarray(leaf, jnp.float32)) for leaf in sown_losses), start=jnp.float32(0))
            means["sown"], share = self._scalar_part("sown", value, mask, totals)
            local += share
        if train and not means:
            raise LossError("There is nothing to minimize: compile() has no loss, and the module sows no 'losses'. Pass a loss: compile(optimizer, loss).")
        metrics: dict[str, Metric] = {"loss": TotalLoss(means)} if means else {}
        outputs = aux.get(OUTPUTS)
        returned = Returned.of(outputs)
        notes.outputs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), returned).by_name()
        notes.returned = returned if notes.keeps_returned else None
        for key, value in aux.items():
            if key != OUTPUTS:
                if isinstance(value, Mapping | list | tuple):
                    raise LossError(
                        f"compute_loss must return aux as a flat dict of scalars or values per example. Received: aux[{key!r}] is a {type(value).__name__}."
                    )
                metrics[key] = self._aux_metric(key, jax.lax.stop_gradient(jnp.asarray(value)), weights, mask)
        if outputs is None and self.objective.has_metrics:
            raise MetricError(
                f"compute_loss must return aux[{OUTPUTS!r}], from which the compiled metrics are computed. Return it, or compile without metrics."
            )
        outputs = map_outputs(jax.lax.stop_gradient, outputs)
        logged = jax.lax.stop_gradient({key: value for key, value in aux.items() if key != OUTPUTS} | {"loss": per_example(parts, batch.mask.shape[0])})
        for entry in () if outputs is None else self.objective.entries(outputs, tuple(metrics)):
            chosen = weights if entry.weighted else mask
            metrics[entry.key] = self.objective.update(entry, outputs, batch.y, chosen, logged)
            notes.given[entry.key] = entry.metric
        notes.order[:] = metrics
        kept = {name: tree for name, tree in changed.items() if name not in self.transient}
        written = {} if self.numerics.is_half else jax.lax.stop_gradient(kept.pop("params", {}))  # Rounded values must not be stored.
        kept.pop("params", None)
        # Not `jax.tree.map` over the dict, which would sort the keys, and their order is that in which values are shown.
        metrics = {key: jax.tree.map(jax.lax.stop_gradient, metric) for key, metric in metrics.items()}
        wanted = jax.lax.stop_gradient({name: changed[name] for name in sown if name in changed})
        return local, ForwardResult(metrics, {**model_state, **kept}, wanted, written)

    def _values(
        self, params: PyTree, model_state: dict[str, PyTree], batch: Batch, *, draws: Draws, train: bool
    ) -> tuple[Any, dict[str, PyTree], dict[str, Any]]:
        """Returns the results of `compute_loss`; parameters and inputs are cast to the compute dtype, outputs and collections back to their own."""
        params, x = self.numerics.narrow((params, batch.x))
        variables, options = {"params": params, **model_state}, {"train": train, "draws": draws, "mutable": self.mutable}
        try:
            if self.compute_loss is None:
                outputs, changed = self.model.apply(variables, x, **options)
                values, aux = self._compiled_losses(outputs, batch.y)
            else:
                values, changed, aux = _checked_triple(self.model.call_loss(self.compute_loss, variables, batch._replace(x=x), **options))
        except InvalidRngError as error:
            if not train and is_dropout_error(error):
                raise ModelError(f"compute_loss: {error}.{_DROPOUT_HINT}") from error
            raise ModelError(f"compute_loss: {error}.{RNG_HINT} It gets rngs={list(draws.rngs)} {'in training' if train else 'in evaluation'}.") from error
        except ModifyScopeVariableError as error:
            raise ModelError(f"compute_loss: {error}.{MUTABLE_HINT}") from error
        return values, self.numerics.as_stored(changed, model_state), {key: self.numerics.widen(value) for key, value in aux.items()}

    def _mean_part(self, name: str, values: jax.Array, batch: Batch, weights: jax.Array, mask: jax.Array, totals: Totals | None) -> tuple[Mean, jax.Array]:
        """Returns the logged mean of one part of the loss, and this replica's share of its global mean."""
        if values.ndim == 0:
            if batch.weights is not None:
                raise LossError("The loss is a scalar, but the data is weighted. Return one value per example, [batch] or [batch, ...], instead of their mean.")
            mean, share = self._scalar_part(name, values, mask, totals)
            return dataclasses.replace(mean, name=SCALAR), share
        rows = batch.mask.shape[0]
        if values.shape[0] != rows:
            raise LossError(
                f"A loss must return one value per example, [{rows}] or [{rows}, ...]. "
                f"The loss{'' if name == 'loss' else f' of output {name!r}'} returned {list(values.shape)}."
            )
        if weights.ndim > values.ndim or any(have not in (1, want) for have, want in zip(weights.shape, values.shape, strict=False)):
            raise LossError(
                f"sample_weight {list(weights.shape)} does not fit the loss values {list(values.shape)}, aligned from the left. Sizes must be equal or 1."
            )
        total, weight = weighted_sums(values, weights)
        whole = self.strategy.sum(jax.lax.stop_gradient(weight)) if totals is None else totals.weight_of(values.shape)
        return Mean().add(jax.lax.stop_gradient(values), weights), ratio(total, whole)

    def _scalar_part(self, name: str, value: jax.Array, mask: jax.Array, totals: Totals | None) -> tuple[Mean, jax.Array]:
        """Returns the same for a value that is already the mean of this replica's examples: it is weighted by the number of real ones."""
        real = jnp.sum(mask)
        return Mean().add(jax.lax.stop_gradient(value), real), ratio(value * real, self.strategy.sum(real) if totals is None else totals.real)

    def _aux_metric(self, key: str, value: jax.Array, weights: jax.Array, mask: jax.Array) -> Mean:
        if value.ndim == 0:
            return Mean(name=key).add(value, jnp.sum(mask))
        if value.shape[0] != mask.shape[0]:
            raise LossError(f"compute_loss's aux[{key!r}] must be a scalar or [{mask.shape[0]}, ...], one value per example. Received: {list(value.shape)}.")
        return Mean(name=key).add(value, weights if weights.ndim <= value.ndim else mask)


def _check_real(what: str, value: Any) -> None:
    if jnp.iscomplexobj(value):
        raise LossError(f"{what} must be real. Received: {describe_shapes(value)}. Take the magnitude, abs(values), or the real part.")


def _checked_triple(result: Any) -> tuple[Any, dict[str, PyTree], dict[str, Any]]:
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[1], Mapping) or not isinstance(result[2], Mapping):
        raise LossError(f"compute_loss must return (values, new_model_state, aux), where the last two are dicts. Received: {describe_shapes(result)}.")
    return result[0], dict(result[1]), dict(result[2])
