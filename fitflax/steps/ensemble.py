"""Ensembles: a task whose state holds several members, which one `jax.vmap` trains on the same batches.

Every array of the state except the step, and every sum of metrics, has a leading axis of members.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from typing_extensions import override

from fitflax.axes import AxisNames
from fitflax.errors import ConfigError, MetricError, did_you_mean
from fitflax.logs import UNDEFINED, Kind, default_direction
from fitflax.metrics import Metric
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps.forward_pass import Notes
from fitflax.steps.kept_values import NOTHING, Keep, Kept
from fitflax.steps.metric_state import EvalSums, TrainSums, collects
from fitflax.steps.nonfinite import Suspects
from fitflax.steps.step_functions import Task

__all__ = ["BY_MEMBER", "EnsembleTask", "MeanOfMembers", "best_member", "member_of"]

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
    found: dict[str, Metric] = {key: MeanOfMembers(members[key]) for key in order}
    return found | {f"{key}{BY_MEMBER}": ByMember(metric.member) for key, metric in found.items()}  # type: ignore[attr-defined]


def _members(metrics: dict[str, Metric]) -> dict[str, Metric]:
    return {key: cast(Any, metric).member for key, metric in metrics.items() if not isinstance(metric, ByMember)}


def _axes(state: TrainState) -> TrainState:
    """Returns the axis of members of each part of a state, for `jax.vmap`."""
    mapped: Any = {"params": 0, "model_state": 0, "opt_state": 0, "key": 0, "ema_params": None if state.ema_params is None else 0}
    return dataclasses.replace(state, step=None, **mapped)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, eq=False)
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
        found = _metrics(metrics, inner.order or metrics)
        notes.given = {key: dataclasses.replace(cast(Any, metric), member=inner.given[base]) for key, metric, base in _bases(found) if base in inner.given}
        notes.outputs = inner.outputs
        return found

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
        first = jnp.argmax(after.steps_since_bad)  # The member that has been bad for longest, if any.
        since, culprit = after.steps_since_bad[first], after.culprit[first]
        mean_loss = jnp.where(loss[0] == UNDEFINED, UNDEFINED, loss.mean())  # All members have the weights of the same batch.
        values = [mean_loss, norm.mean(), since.astype(jnp.float32), culprit.astype(jnp.float32)]
        merged = _metrics(after.metrics, _members(sums.metrics))
        return new_state, TrainSums(merged, since, culprit), values, {}, Kept(grads, sown, suspects[-1])

    @override
    def eval_step(self, params: PyTree, model_state: dict[str, PyTree], key: jax.Array, sums: EvalSums, batch: Batch) -> tuple[EvalSums, dict[str, Metric]]:
        def one(params: PyTree, model_state: dict[str, PyTree], key: jax.Array, metrics: dict[str, Metric]) -> dict[str, Metric]:
            return Task.eval_step(self, params, model_state, key, EvalSums(metrics, sums.index), batch)[0].metrics

        members = _members(sums.metrics)
        return EvalSums(_metrics(jax.vmap(one)(params, model_state, key, members), members), sums.index + 1), {}

    @override
    def predict_step(self, params: PyTree, model_state: dict[str, PyTree], key: jax.Array, index: jax.Array, x: PyTree) -> PyTree:
        # Rows come first: outputs are `[batch, members, ...]`.
        run: Any = jax.vmap(lambda params, model_state, key: Task.predict_step(self, params, model_state, key, index, x), out_axes=1)
        return run(params, model_state, key)

    @override
    def outputs(self, params: PyTree, model_state: dict[str, PyTree], key: jax.Array, x: PyTree, *, train: bool) -> PyTree:
        run: Any = jax.vmap(lambda params, model_state, key: Task.outputs(self, params, model_state, key, x, train=train), out_axes=1)
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


def _bases(metrics: dict[str, Metric]) -> list[tuple[str, Metric, str]]:
    return [(key, metric, key.removesuffix(BY_MEMBER) if isinstance(metric, ByMember) else key) for key, metric in metrics.items()]
