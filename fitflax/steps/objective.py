"""What `compile(loss, metrics)` means for a module's outputs: which function sees which output, and under which log key.

Names are resolved when `compile` is called, so that a misspelling is an error there. Which output goes where can only be known once there are outputs;
that is decided from their structure alone, so it is the same at every trace.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fitflax.losses as losses
from fitflax.errors import ConfigError, DataError, FitflaxError, LossError, MetricError, did_you_mean, warn
from fitflax.losses.registry import takes_labels, takes_logits
from fitflax.losses.shapes import broadcast_fault
from fitflax.metrics import Metric
from fitflax.metrics.base import metric_name
from fitflax.metrics.clu import CluMetric, adapt_clu, is_clu
from fitflax.metrics.registry import resolve
from fitflax.state import PyTree
from fitflax.steps.model import describe_shapes

__all__ = ["MetricEntry", "Objective"]

LossFn = Callable[..., jax.Array]

# Those whose targets are 0, 1 or probabilities.
_OF_SHARES = (losses.binary_crossentropy, losses.categorical_crossentropy)


# What people call the arguments of a loss.
_TARGETS = {"y_true", "true", "target", "targets", "label", "labels"}
_OUTPUTS = {"y_pred", "y_hat", "pred", "preds", "prediction", "predictions", "output", "outputs", "logit", "logits"}


class MetricEntry(NamedTuple):
    """One metric that is logged.

    Attributes:
        key: Its log key.
        metric: Its empty state.
        output: The output it sees, by name; `None` for all of them as they are.
        weighted: Whether it uses sample weights.
    """

    key: str
    metric: Metric
    output: str | None
    weighted: bool


class Objective:
    """Losses and metrics by output.

    Args:
        loss: A name, a function `(outputs, targets) -> values`, a list or dict of them by output (`None` skips one), or `None`.
        metrics: Names, metrics or functions of per-example values: a list, a dict by log key, or lists and dicts by output.
        weighted_metrics: The same, using sample weights.
        loss_weights: A number, or numbers by output, that losses are multiplied with.

    Raises:
        LossError: An unknown loss, or something that is no loss.
        MetricError: An unknown metric, or something that is no metric.
        ConfigError: `loss_weights` that are no numbers.

    >>> objective = Objective("mse", ["mae"])
    >>> values, _ = objective.losses(jnp.ones((2, 3)), jnp.zeros((2, 3)))
    >>> values["loss"].tolist(), [entry.key for entry in objective.entries(jnp.ones((2, 3)), ("loss",))]
    ([1.0, 1.0], ['mae'])
    """

    def __init__(self, loss: Any = None, metrics: Any = None, weighted_metrics: Any = None, loss_weights: Any = None) -> None:
        self._loss = _map_spec(_resolve_loss, loss)
        self._specs = ((_map_spec(_resolve_metric, metrics), False), (_map_spec(_resolve_metric, weighted_metrics), True))
        _check_weighted(self._specs[1][0])
        self._loss_weights = _map_spec(_check_loss_weight, loss_weights)

    @property
    def has_label_loss(self) -> bool:
        """Whether a loss takes integer labels, or shares from 0 to 1, whose range can be checked."""
        return any(loss.is_bounded for loss in self._named_losses)

    @property
    def _named_losses(self) -> "list[_NamedLoss]":
        leaves = jax.tree.leaves(self._loss, is_leaf=lambda leaf: isinstance(leaf, _NamedLoss))
        return [leaf for leaf in leaves if isinstance(leaf, _NamedLoss)]

    @property
    def has_metrics(self) -> bool:
        """Whether there are metrics beside the loss."""
        return any(spec for spec, _ in self._specs)

    def losses(self, outputs: PyTree, targets: PyTree) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns the losses that add up to the whole, and what else is logged of them.

        Args:
            outputs: What the module returned.
            targets: The batch's targets.

        Returns:
            `{part: values}`, multiplied with the loss weights, and `{"<output>_loss": values}`, where there are several outputs.

        Raises:
            LossError: A loss does not fit its output and targets.
        """
        parts: dict[str, jax.Array] = {}
        logged: dict[str, jax.Array] = {}
        for term in self._terms(outputs):
            values = _call_loss(term, outputs, targets)
            parts[term.part] = values if term.weight is None else values * term.weight
            if term.output is not None:
                logged[f"{term.output.name}_loss"] = values
        return parts, logged

    def _terms(self, outputs: PyTree) -> "list[_Term]":
        """Returns the losses for outputs of this structure.

        Raises:
            LossError: Losses by output that do not fit the outputs.
            ConfigError: Weights that do not.
        """
        if self._loss is None:
            return []
        names = output_names(outputs)
        if names is None or callable(self._loss):
            # A function of the user's sees all outputs at once; so does any loss where there is only one output.
            loss = self._single(self._loss, "loss")
            if loss is None:
                raise LossError("The only output's loss is None.")
            return [_Term(loss, self._single(self._loss_weights, "loss_weights"), None)]
        by_output = _by_output(self._loss, names, "loss", LossError)
        weights = _by_output(self._loss_weights, names, "loss_weights", ConfigError)
        return [_Term(loss, weights[name], _Output(name, names)) for name, loss in by_output.items() if loss is not None]

    @staticmethod
    def _single(spec: Any, name: str) -> Any:
        if isinstance(spec, dict):
            raise ConfigError(f"compile({name}={list(spec)}) names outputs, but the module has only one output, without a name.")
        if isinstance(spec, list):
            if len(spec) != 1:
                raise ConfigError(f"compile({name}=...) has {len(spec)} entries, but the module has one output.")
            return spec[0]
        return spec

    @property
    def takes_logits(self) -> bool:
        """Whether a loss given by name takes logits."""
        return any(takes_logits(loss.name) for loss in self._named_losses)

    def unfit_activations(self, activations: PyTree) -> list[str]:
        """Returns, in words, where the module ends with an activation that a loss given by name applies itself.

        Args:
            activations: In the structure of the module's outputs, the names of activations, or `""`.
        """
        found = []
        for loss, _, output in self._terms(activations):
            activation = activations if output is None else output.of(activations)
            if isinstance(loss, _NamedLoss) and takes_logits(loss.name) and activation in ("softmax", "sigmoid"):
                where = "" if output is None else f" in its output {output.name!r}"
                found.append(f"The module ends{where} with a {activation}, which the loss {loss!r} applies itself: it takes logits. Leave it out of the module")
        return found

    def check_labels(self, outputs: PyTree, targets: PyTree, weights: Any = None) -> None:
        """Checks integer labels against the number of classes, and shares from 0 to 1, for targets that are all at hand.

        Args:
            outputs: The shapes of the module's outputs.
            targets: All targets, NumPy.
            weights: Sample weights, NumPy; a label whose weight is 0 counts nowhere and may be anything.

        Raises:
            DataError: A label is negative or not smaller than the number of classes, or a share lies outside of 0..1.
        """
        for loss, _, output in self._terms(outputs):
            if not isinstance(loss, _NamedLoss) or not loss.is_bounded:
                continue
            shape, target, where = outputs.shape if output is None else output.of(outputs).shape, targets, "y"
            if output is not None:
                target, where = output.targets(targets), f"y[{output.name!r}]"
            if weights is not None and np.shape(weights) == np.shape(target)[: np.ndim(weights)]:
                target = np.asarray(target)[np.asarray(weights) != 0]
            if not np.size(target) or not shape:
                continue
            low, high = np.min(target), np.max(target)
            if loss.fn in _OF_SHARES:
                if not 0 <= low <= high <= 1:
                    raise DataError(f"{where} holds {low:g} to {high:g}, but {loss!r} takes 0, 1 or probabilities between.")
            elif int(low) < 0 or int(high) >= shape[-1]:
                classes = shape[-1]
                raise DataError(f"{where} holds labels from {int(low)} to {int(high)}, but the module has {classes} outputs, for labels 0 to {classes - 1}.")

    def entries(self, outputs: PyTree, taken: Sequence[str]) -> list[MetricEntry]:
        """Returns the metrics for outputs of this structure, under keys that do not clash.

        Args:
            outputs: What the module returned, or its shapes.
            taken: Log keys in use already.

        Raises:
            MetricError: Metrics by output that do not fit the outputs.
        """
        names = output_names(outputs)
        used = set(taken)
        result: list[MetricEntry] = []
        for spec, weighted in self._specs:
            for output, key, metric in _flatten(spec, names):
                unique = _unique("" if output is None else f"{output}_", key, used, weighted)
                used.add(unique)
                result.append(MetricEntry(unique, metric, output, weighted))
        return result

    @staticmethod
    def update(entry: MetricEntry, outputs: PyTree, targets: PyTree, weights: jax.Array, logged: Mapping[str, Any] = MappingProxyType({})) -> Metric:
        """Returns `entry`'s metric over one batch.

        Args:
            entry: Which metric, of which output.
            outputs: What the module returned.
            targets: The batch's targets.
            weights: What examples count.
            logged: The loss's values as `loss`, and what else is logged, for metrics that are computed from these.

        Raises:
            MetricError: The metric fails on these outputs and targets.
        """
        if entry.output is not None:
            names = output_names(outputs)
            assert names is not None
            output = _Output(entry.output, names)
            outputs, targets = output.of(outputs), output.targets(targets, MetricError)
        if any(not hasattr(leaf, "shape") for leaf in jax.tree.leaves(entry.metric.empty())):
            name = type(entry.metric).__name__
            raise MetricError(f"The metric {entry.key!r} must be a pytree of arrays: make {name} a flax.struct.dataclass.")
        try:
            if isinstance(entry.metric, CluMetric):
                return entry.metric.empty().update_from(logged, outputs, targets, weights)
            return entry.metric.empty().update(outputs, targets, weights)
        except FitflaxError as error:
            names_itself = str(error).startswith(f"Metric {entry.key!r}")
            raise MetricError(str(error) if names_itself else f"The metric {entry.key!r}: {error}") from error
        except Exception as error:
            raise MetricError(
                f"The metric {entry.key!r} fails on outputs {describe_shapes(outputs)} and targets {describe_shapes(targets)}: {type(error).__name__}: {error}"
            ) from error


class _NamedLoss:
    """A loss given by name: applied to each output by itself."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fn = losses.get(name)

    @property
    def is_bounded(self) -> bool:
        """Whether its targets are labels, or shares from 0 to 1, whose range can be checked."""
        return takes_labels(self.fn) or self.fn in _OF_SHARES

    def __repr__(self) -> str:
        return repr(self.name)


def _map_spec(resolve: Callable[[Any], Any], spec: Any) -> Any:
    """Returns a spec of lists and dicts with every entry resolved; tuples become lists."""
    if isinstance(spec, Mapping):
        return {key: _map_spec(resolve, value) for key, value in spec.items()}
    if isinstance(spec, list | tuple):
        return [_map_spec(resolve, value) for value in spec]
    return None if spec is None else resolve(spec)


def _resolve_loss(spec: Any) -> Any:
    if isinstance(spec, str):
        return _NamedLoss(spec)
    if not callable(spec) or isinstance(spec, type):
        raise LossError(f"A loss is a name or a function (outputs, targets) -> one value per example. Received: {spec!r}.")
    _check_order("loss", spec, LossError)
    return spec


def _resolve_metric(spec: Any) -> tuple[str, Metric] | list[tuple[str, Metric]]:
    if is_clu(spec):
        adapted = adapt_clu(spec)
        return list(adapted.items()) if isinstance(adapted, dict) else (adapted.name, adapted)
    if not isinstance(spec, str):
        _check_order("metric", spec, MetricError)
    metric = resolve(spec)
    return spec if isinstance(spec, str) else metric_name(metric), metric


def _check_order(what: str, fn: Any, error: type[FitflaxError]) -> None:
    """Checks that a function's first two arguments are not those of Keras, in its order.

    Raises:
        FitflaxError: They are, of the class `error`.
    """
    try:
        names = list(inspect.signature(fn).parameters)[:2]
    except (TypeError, ValueError):
        return  # Whatever it is, it says nothing of its arguments.
    if len(names) == 2 and names[0] in _TARGETS and names[1] in _OUTPUTS:
        is_keras = names == ["y_true", "y_pred"]
        name = getattr(fn, "__name__", type(fn).__name__)
        advice = f"Swap its arguments, or give lambda outputs, targets: {name}(targets, outputs)."
        called = f"the targets first, as in Keras, but is called with (outputs, targets). {advice}"
        if is_keras:
            raise error(f"The {what} {name}({', '.join(names)}) takes {called}")
        warn(f"The {what} {name}({', '.join(names)}) seems to take {called}")


def _check_weighted(spec: Any) -> None:
    for _, metric in _one_output(spec) if not isinstance(spec, dict) else [entry for value in spec.values() for entry in _one_output(value)]:
        if isinstance(metric, CluMetric):
            raise MetricError(f"The metric {metric.name!r} of clu can leave examples out, but not weigh them. Give it in metrics=, not in weighted_metrics=.")


def _check_loss_weight(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise ConfigError(f"loss_weights must be numbers. Received: {value!r}.")
    return float(value)


def output_names(outputs: PyTree) -> tuple[str, ...] | None:
    """Returns the names of several outputs, or `None` for a single one.

    >>> output_names((1, 2)), output_names({"a": 1}), output_names(jnp.ones(2))
    (('output_1', 'output_2'), ('a',), None)
    """
    if isinstance(outputs, Mapping):
        return tuple(outputs)
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return tuple(outputs._fields)
    if isinstance(outputs, list | tuple):
        return tuple(f"output_{index + 1}" for index in range(len(outputs)))
    return None


class _Output(NamedTuple):
    """One of several outputs."""

    name: str
    names: tuple[str, ...]

    def of(self, outputs: PyTree) -> PyTree:
        """Returns it, of what the module returned."""
        return outputs[self.name] if isinstance(outputs, Mapping) else outputs[self.names.index(self.name)]

    def targets(self, targets: PyTree, error: type[FitflaxError] = LossError) -> PyTree:
        """Returns the targets that belong to it.

        Raises:
            FitflaxError: There are none, of the class `error`.
        """
        if isinstance(targets, Mapping):
            if self.name not in targets:
                raise error(f"The output {self.name!r} has no targets: the targets are {list(targets)}.{did_you_mean(self.name, targets)}")
            return targets[self.name]
        if isinstance(targets, list | tuple) and len(targets) == len(self.names):
            return targets[self.names.index(self.name)]
        what, each = ("metric", "metrics={key: metric}") if error is MetricError else ("loss", "a function")
        raise error(
            f"The module has the outputs {list(self.names)}, so targets must be {len(self.names)} arrays or a dict. Received: {describe_shapes(targets)}. "
            f"A {what} of all outputs together is given as {each}."
        )


class _Term(NamedTuple):
    """One of the losses that add up to the whole.

    Attributes:
        loss: A `_NamedLoss`, or the user's function.
        weight: What it is multiplied with, if anything.
        output: Which output it sees; `None` for all of them as they are.
    """

    loss: Any
    weight: float | None
    output: _Output | None

    @property
    def part(self) -> str:
        """The name of this part of the loss."""
        return "loss" if self.output is None else self.output.name


def _by_output(spec: Any, names: Sequence[str], what: str, error: type[FitflaxError]) -> dict[str, Any]:
    if isinstance(spec, dict):
        unknown = [key for key in spec if key not in names]
        if unknown:
            raise error(f"compile({what}=...) names the outputs {unknown}, but the module's outputs are {list(names)}.{did_you_mean(unknown[0], names)}")
        return {name: spec.get(name) for name in names}
    if isinstance(spec, list):
        if len(spec) != len(names):
            raise error(f"compile({what}=...) has {len(spec)} entries, but the module has {len(names)} outputs: {list(names)}.")
        return dict(zip(names, spec, strict=True))
    return dict.fromkeys(names, spec)


def _call_loss(term: _Term, outputs: PyTree, targets: PyTree) -> jax.Array:
    loss, output, where = term.loss, term.output, ""
    if output is not None:
        outputs, targets, where = output.of(outputs), output.targets(targets), f" of output {output.name!r}"
    has_targets = bool(jax.tree.leaves(targets))
    if isinstance(loss, _NamedLoss) and not has_targets:
        advice = "Yield (x, y), pass y=, give validation_data=(x, y), or name Trainer(targets=...)."
        raise LossError(f"The loss {loss!r}{where} needs targets, but the batches hold none. {advice}")
    fn = loss.fn if isinstance(loss, _NamedLoss) else loss
    try:
        values = fn(outputs, targets) if has_targets else fn(outputs)
    except FitflaxError:
        raise
    except Exception as error:
        name = repr(loss) if isinstance(loss, _NamedLoss) else getattr(loss, "__name__", repr(loss))
        raise LossError(
            f"The loss {name}{where} fails on outputs {describe_shapes(outputs)} and targets {describe_shapes(targets)}: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(values, "shape") and not isinstance(values, int | float):
        raise LossError(f"A loss returns one array of values per example. The loss{where} returned a {type(values).__name__}: {describe_shapes(values)}.")
    if (fault := broadcast_fault(fn, values, outputs, targets)) is not None:
        raise LossError(f"The loss {getattr(fn, '__name__', repr(fn))}{where} {fault}.")
    return jnp.asarray(values)


def _flatten(spec: Any, names: Sequence[str] | None) -> list[tuple[str | None, str, Metric]]:
    """Returns `(output, key, metric)` for every metric in a spec."""
    if spec is None:
        return []
    if names is None:
        return [(None, key, metric) for key, metric in _one_output(spec)]
    if isinstance(spec, dict) and set(spec) & set(names):
        by_output = _by_output(spec, names, "metrics", MetricError)
        return [(name, key, metric) for name in names for key, metric in _one_output(by_output[name])]
    if isinstance(spec, dict):
        if any(isinstance(value, list | dict) for value in spec.values()):
            raise MetricError(f"compile(metrics=...) names {sorted(spec)}, but the module's outputs are {list(names)}.{did_you_mean(next(iter(spec)), names)}")
        # Log keys instead of outputs: these see everything.
        return [(None, key, metric) for key, metric in _one_output(spec)]
    entries = spec if isinstance(spec, list) else [spec]
    if len(entries) != len(names):
        if any(isinstance(entry, list | dict) for entry in entries):
            raise MetricError(f"compile(metrics=...) has {len(entries)} entries, but the module has {len(names)} outputs: {list(names)}.")
        entries = [entries] * len(names)
    return [(name, key, metric) for name, entry in zip(names, entries, strict=True) for key, metric in _one_output(entry)]


def _one_output(spec: Any) -> list[tuple[str, Metric]]:
    if spec is None:
        return []
    if isinstance(spec, dict):
        for key, value in spec.items():
            if isinstance(value, list | dict):
                raise MetricError(f"compile(metrics=...) has several metrics under {key!r}, which is no output of the module; as a log key it takes one.")
        return [(key, value[1]) for key, value in spec.items() if value is not None]
    if isinstance(spec, list):
        return functools.reduce(lambda found, entry: found + _one_output(entry), spec, [])
    return [spec]


def _unique(prefix: str, key: str, used: set[str], weighted: bool) -> str:
    key = f"{prefix}weighted_{key}" if weighted and f"{prefix}{key}" in used else f"{prefix}{key}"
    if key not in used:
        return key
    return next(f"{key}_{number}" for number in range(1, len(used) + 2) if f"{key}_{number}" not in used)
