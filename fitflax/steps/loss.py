"""Applies the arguments `loss` and `metrics` of `compile` to a module's outputs: which function gets which output, and its log key.

Names are resolved when `compile` is called, so that a misspelling is an error there. Outputs are assigned by their structure only, so the assignment is the
same in every trace.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fitflax.losses as losses
from fitflax.errors import ConfigError, DataError, FitflaxError, LossError, MetricError, did_you_mean, is_of_debugger, warn
from fitflax.leaves import describe_shapes
from fitflax.losses import takes_labels, takes_logits
from fitflax.losses.shapes import broadcast_fault
from fitflax.metrics import Metric, resolve
from fitflax.metrics.base import metric_name
from fitflax.metrics.foreign import ForeignMetric, adapt_clu, adapt_nnx, is_clu, is_nnx
from fitflax.models.base import parameters_of
from fitflax.state import PyTree
from fitflax.steps.outputs import members_of

LossFn = Callable[..., jax.Array]

# Losses whose targets are probabilities.
_PROBABILITY_LOSSES = (losses.binary_crossentropy, losses.categorical_crossentropy)

# Common names of the arguments of a loss.
_TARGETS = {"y_true", "true", "target", "targets", "label", "labels"}
_OUTPUTS = {"y_pred", "y_hat", "pred", "preds", "prediction", "predictions", "output", "outputs", "logit", "logits"}


class MetricEntry(NamedTuple):
    """One metric that is logged."""

    key: str
    metric: Metric  # Its empty state.
    output: "_Output | None"  # The output that it gets; `None` for all outputs as they are.
    weighted: bool  # Whether it uses sample weights.


class Objective:
    """Losses and metrics by output.

    Args:
        loss: A name, a function `(outputs, targets) -> values`, a list or dict of them by output (`None` skips one), nested for nested outputs, or `None`.
        metrics: Names, metrics or functions of per-example values: a list, a dict by log key, or lists and dicts by output.
        weighted_metrics: The same, using sample weights.
        loss_weights: A factor of the loss, or factors by output.
    """

    def __init__(self, loss: Any = None, metrics: Any = None, weighted_metrics: Any = None, loss_weights: Any = None) -> None:
        self._loss = _map_spec(_resolve_loss, loss)
        kinds = ((metrics, False), (weighted_metrics, True))
        self._specs = [(_map_spec(functools.partial(_resolve_metric, is_weighted=is_weighted), spec), is_weighted) for spec, is_weighted in kinds]
        self._loss_weights = _map_spec(_check_loss_weight, loss_weights)

    @property
    def has_metrics(self) -> bool:
        """Whether there are metrics besides the loss."""
        return any(spec for spec, _ in self._specs)

    def losses(self, outputs: PyTree, targets: PyTree) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns the parts of the loss, multiplied by the loss weights, and `{"<output>_loss": values}` to log if there are several outputs."""
        parts: dict[str, jax.Array] = {}
        logged: dict[str, jax.Array] = {}
        for term in self._terms(outputs):
            values = _call_loss(term, outputs, targets)
            if term.output is not None:
                logged[f"{term.output.path}_loss"] = values
            parts["loss" if term.output is None else term.output.path] = values if term.weight is None else values * term.weight
        return parts, logged

    def _terms(self, outputs: PyTree) -> "list[_Term]":
        if self._loss is None:
            return []
        if members_of(outputs) is None or callable(self._loss):
            # A custom loss gets all outputs together; with a single output, so does any loss.
            loss = self._single(self._loss, "loss")
            if loss is None:
                raise LossError("The loss of the only output is None. Pass a loss for it.")
            weights, names = self._loss_weights, _present(members_of(outputs) or {})
            if names and (isinstance(weights, dict) or (isinstance(weights, list) and len(weights) > 1)):
                advice = "Pass one number, or pass a loss for each output: loss={output: function}."
                raise ConfigError(f"compile(loss_weights=...) has weights by output, but the loss is one function of the outputs {names}. {advice}")
            return [_Term(loss, self._single(weights, "loss_weights"), None)]
        return list(_terms_of(self._loss, self._loss_weights, outputs, None))

    @staticmethod
    def _single(spec: Any, name: str) -> Any:
        if isinstance(spec, dict):
            raise ConfigError(
                f"compile({name}=...) names the outputs {list(spec)}, but the module has one output without a name. Pass its {name} without a dict."
            )
        if isinstance(spec, list):
            if len(spec) != 1:
                raise ConfigError(f"compile({name}=...) has {len(spec)} entries, but the module has one output.")
            return spec[0]
        return spec

    @property
    def takes_logits(self) -> bool:
        """Whether a built-in loss takes logits."""
        return any(isinstance(loss, _NamedLoss) and takes_logits(loss.name) for loss in jax.tree.leaves(self._loss))

    @property
    def has_labels_to_check(self) -> bool:
        """Whether `check_labels` checks the targets of an output."""
        return any(isinstance(loss, _NamedLoss) and loss.is_bounded for loss in jax.tree.leaves(self._loss))

    def activation_faults(self, activations: PyTree) -> list[str]:
        """Returns messages about outputs that end with an activation that their built-in loss applies itself.

        `activations` has the structure of the module's outputs, with names of activations or `""`.
        """
        faults = []
        for loss, _, output in self._terms(activations):
            activation = activations if output is None else output.value
            if isinstance(loss, _NamedLoss) and takes_logits(loss.name) and activation in ("softmax", "sigmoid"):
                subject = "The module" if output is None else f"The module's output {output.path!r}"
                fault = f"{subject} ends with a {activation}, but the loss {loss!r} takes logits and applies the {activation} itself"
                faults.append(f"{fault}. Remove the {activation} from the module")
        return faults

    def check_labels(self, outputs: PyTree, targets: PyTree, weights: Any = None) -> None:
        """Raises `DataError` if integer labels are not in the range of classes, or probabilities not from 0 to 1.

        Takes the shapes of the module's outputs, and NumPy targets and weights. Targets may have fewer rows than weights. Labels of weight 0 are not checked.
        """
        for loss, _, output in self._terms(outputs):
            if not isinstance(loss, _NamedLoss) or not loss.is_bounded:
                continue
            shape = (outputs if output is None else output.value).shape
            target = targets if output is None else output.targets(targets)
            where = "y" if output is None or target is targets else f"y[{output.path!r}]"
            if weights is not None:
                target = np.asarray(target)
                target = _with_weight(target, np.asarray(weights)[: len(target)])
            if not np.size(target) or not shape:
                continue
            low, high = np.min(target), np.max(target)
            if loss.fn in _PROBABILITY_LOSSES:
                if not 0 <= low <= high <= 1:
                    raise DataError(f"{where} holds values from {low:g} to {high:g}, but {loss!r} takes 0, 1 or probabilities in between.")
            elif int(low) < 0 or int(high) >= shape[-1]:
                has = f"{shape[-1]} outputs, for labels 0 to {shape[-1] - 1}"
                raise DataError(f"{where} holds labels from {int(low)} to {int(high)}, but the module has {has}.")

    def entries(self, outputs: PyTree, taken: Sequence[str]) -> list[MetricEntry]:
        """Returns the metrics for outputs of this structure, with log keys that are not in `taken`."""
        members = members_of(outputs) or {}
        named_metrics = [(*entry, weighted) for spec, weighted in self._specs for entry in _flatten(spec, members)]
        is_only = len({name for name, *_ in named_metrics if name is not None}) == 1
        used = set(taken)
        result: list[MetricEntry] = []
        for name, key, metric, weighted in named_metrics:
            unique = _unique_key("" if name is None else f"{name}_", key, used, weighted)
            used.add(unique)
            result.append(MetricEntry(unique, metric, None if name is None else _Output(name, members, is_only), weighted))
        return result

    @staticmethod
    def update(entry: MetricEntry, outputs: PyTree, targets: PyTree, weights: jax.Array, logged: Mapping[str, Any] = MappingProxyType({})) -> Metric:
        """Returns the metric of `entry` over one batch.

        `logged` has the values of the loss as `loss`, and other logged values, for metrics that are computed from them.
        """
        if entry.output is not None:
            outputs, targets = entry.output.value, entry.output.targets(targets, MetricError)
        if any(not hasattr(leaf, "shape") for leaf in jax.tree.leaves(entry.metric.empty())):
            name = type(entry.metric).__name__
            raise MetricError(f"The metric {entry.key!r} must be a pytree of arrays: make {name} a flax.struct.dataclass.")
        try:
            if isinstance(entry.metric, ForeignMetric):
                return entry.metric.empty().update_from(logged, outputs, targets, weights)
            return entry.metric.empty().update(outputs, targets, weights)
        except Exception as error:
            if is_of_debugger(error):
                raise
            text = f"The metric {entry.key!r}"
            if not isinstance(error, FitflaxError):
                text = _failure(text, outputs, targets, error)
            elif str(error).startswith(f"Metric {entry.key!r}"):
                text = str(error)
            else:
                text += f": {error}"
            raise MetricError(text) from error


class _NamedLoss:
    """A built-in loss, applied to each output separately."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fn = losses.get(name)

    @property
    def is_bounded(self) -> bool:
        """Whether its targets are labels or probabilities, whose range can be checked."""
        return takes_labels(self.fn) or self.fn in _PROBABILITY_LOSSES

    def __repr__(self) -> str:
        return repr(self.name)


def _with_weight(target: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the labels whose weight is not 0; all labels if the weights have a different shape, such as that of another output.

    >>> _with_weight(np.array([[1, 2], [3, 4]]), np.array([[0.0], [1.0]])).tolist()
    [3, 4]
    """
    fits = weights.ndim <= target.ndim and all(width in (1, length) for width, length in zip(weights.shape, target.shape, strict=False))
    return target[np.broadcast_to(weights != 0, target.shape[: weights.ndim])] if fits else target


def _map_spec(resolve: Callable[[Any], Any], spec: Any) -> Any:
    """Returns nested lists and dicts with every entry resolved; tuples become lists."""
    if isinstance(spec, Mapping):
        return {key: _map_spec(resolve, value) for key, value in spec.items()}
    if isinstance(spec, list | tuple):
        return [_map_spec(resolve, value) for value in spec]
    return None if spec is None else resolve(spec)


def _resolve_loss(spec: Any) -> Any:
    if isinstance(spec, str):
        return _NamedLoss(spec)
    if not callable(spec) or isinstance(spec, type):
        raise LossError(f"A loss must be a name or a function (outputs, targets) -> one value per example. Received: {spec!r}.")
    _check_order("loss", spec, LossError)
    return spec


def _resolve_metric(spec: Any, *, is_weighted: bool) -> tuple[str, Metric] | list[tuple[str, Metric]]:
    if is_clu(spec):
        adapted = adapt_clu(spec)
        named_metrics: list[tuple[str, Metric]] = list(adapted.items()) if isinstance(adapted, dict) else [(adapted.name, adapted)]
    elif is_nnx(spec):
        named_metrics = [*adapt_nnx(spec).items()]
    else:
        if not isinstance(spec, str):
            _check_order("metric", spec, MetricError)
        metric = resolve(spec)
        named_metrics = [(spec if isinstance(spec, str) else metric_name(metric), metric)]
    for _, metric in named_metrics:
        if is_weighted and isinstance(metric, ForeignMetric):
            raise MetricError(
                f"The metric {metric.name!r} of {metric.library} can mask examples, but not weight them. Pass it in metrics= instead of weighted_metrics=."
            )
    return named_metrics[0] if len(named_metrics) == 1 else named_metrics


def _check_order(what: str, fn: Any, error: type[FitflaxError]) -> None:
    """Raises `error` if a function's first two arguments are those of Keras, `(y_true, y_pred)`; warns if they have similar names."""
    names = list(parameters_of(fn))[:2]
    if len(names) == 2 and names[0] in _TARGETS and names[1] in _OUTPUTS:
        is_keras = names == ["y_true", "y_pred"]
        name = getattr(fn, "__name__", type(fn).__name__)
        advice = f"Swap its arguments, or pass lambda outputs, targets: {name}(targets, outputs)."
        called = f"the targets first, as in Keras, but is called with (outputs, targets). {advice}"
        if is_keras:
            by_name = " Or pass a loss by name: crossentropies given by name always take logits." if hasattr(fn, "from_logits") else ""
            raise error(f"The {what} {name}({', '.join(names)}) takes {called}{by_name}")
        warn(f"The {what} {name}({', '.join(names)}) seems to take {called}")


def _check_loss_weight(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise ConfigError(f"loss_weights must be numbers. Received: {value!r}.")
    return float(value)


class _Output(NamedTuple):
    name: str
    members: dict[Any, PyTree]  # All outputs by name, including those that are `None`.
    is_only: bool  # Whether no other output has a loss, or a metric; then it gets all targets if they are not given by output.
    parent: "_Output | None" = None  # The output that this one is nested in.

    @property
    def path(self) -> str:
        """The path of the output: its name, after the names of the outputs that it is nested in."""
        return str(self.name) if self.parent is None else f"{self.parent.path}/{self.name}"

    @property
    def value(self) -> PyTree:
        """The output itself."""
        return self.members[self.name]

    def targets(self, targets: PyTree, error: type[FitflaxError] = LossError, *, takes_any: bool = False) -> PyTree:
        """Returns the targets of this output; raises `error` if there are none.

        `takes_any` allows a mapping that is not by output, for a custom loss.
        """
        if self.parent is not None:
            targets = self.parent.targets(targets, error)
        named = None if type(targets) in (list, tuple) else members_of(targets)  # Tuples and lists are matched by position below.
        if named is not None and named.get(self.name) is not None:
            return named[self.name]
        if isinstance(targets, Mapping) and not (takes_any and self.is_only and set(targets).isdisjoint(self.members)):
            raise error(f"The output {self.path!r} has no targets. Received: targets for {list(targets)}.{did_you_mean(self.name, targets)}")
        present = _present(self.members)
        for names in (list(self.members), present):
            if isinstance(targets, list | tuple) and len(targets) == len(names):
                return targets[names.index(self.name)]
        if self.is_only:
            return targets
        what, each = ("metric", "metrics={key: metric}") if error is MetricError else ("loss", "a function")
        raise error(
            f"The module has the outputs {present}, so targets must be {len(present)} arrays or a dict. Received: {describe_shapes(targets)}. "
            f"To compute a {what} from all outputs together, pass {each}."
        )


class _Term(NamedTuple):
    loss: Any  # A `_NamedLoss`, or a custom loss.
    weight: float | None  # Its factor, if there is one.
    output: _Output | None  # The output that it gets; `None` for all outputs as they are.


def _terms_of(loss: Any, weights: Any, outputs: PyTree, parent: _Output | None) -> "Iterator[_Term]":
    """Yields the terms of a list or dict of losses for `outputs`, which have names and are the output `parent`, or all outputs."""
    members = members_of(outputs)
    if members is None:
        where = "" if parent is None else f" for the output {parent.path!r}"
        raise LossError(f"compile(loss=...) has several losses{where}, which is one output: {describe_shapes(outputs)}. Pass one loss for it.")
    by_output = _by_output(loss, members, "loss", LossError, parent)
    by_weight = _by_output(weights, members, "loss_weights", ConfigError, parent)
    wanted = {name: each for name, each in by_output.items() if each is not None}
    for name, each in wanted.items():
        output, weight = _Output(name, members, len(wanted) == 1, parent), by_weight[name]
        if isinstance(each, dict | list):
            yield from _terms_of(each, weight, output.value, output)
        elif isinstance(weight, dict | list):
            raise ConfigError(f"compile(loss_weights=...) has several weights for the output {output.path!r}, which has one loss. Pass one number.")
        else:
            yield _Term(each, weight, output)


def _present(members: Mapping[Any, PyTree]) -> list[Any]:
    return [name for name, output in members.items() if output is not None]


def _by_position(spec: Sequence[Any], members: Mapping[Any, PyTree]) -> dict[str, Any] | None:
    """Returns a list as a dict by output, or `None` if its length does not match. Outputs that are `None` may have the entry `None`."""
    if len(spec) == len(members) and all(entry is None or output is not None for output, entry in zip(members.values(), spec, strict=True)):
        return {name: entry for (name, output), entry in zip(members.items(), spec, strict=True) if output is not None}
    names = _present(members)
    return dict(zip(names, spec, strict=True)) if len(spec) == len(names) else None


def _by_output(spec: Any, members: Mapping[Any, PyTree], what: str, error: type[FitflaxError], parent: _Output | None = None) -> dict[str, Any]:
    names = _present(members)
    if isinstance(spec, dict):
        unknown = [key for key in spec if key not in names]
        if unknown:
            whose = "the module's outputs" if parent is None else f"the outputs in {parent.path!r}"
            raise error(f"compile({what}=...) names the outputs {unknown}, but {whose} are {names}.{did_you_mean(unknown[0], names)}")
        return {name: spec.get(name) for name in names}
    if isinstance(spec, list):
        placed = _by_position(spec, members)
        if placed is None:
            raise error(f"compile({what}=...) has {len(spec)} entries, but the module has {len(names)} outputs: {names}.")
        return placed
    return dict.fromkeys(names, spec)


def _call_loss(term: _Term, outputs: PyTree, targets: PyTree) -> jax.Array:
    loss, output, where = term.loss, term.output, ""
    if output is not None:
        outputs, targets, where = output.value, output.targets(targets, takes_any=not isinstance(loss, _NamedLoss)), f" of output {output.path!r}"
    has_targets = bool(jax.tree.leaves(targets))
    advice = "Yield (x, y), pass y= or validation_data=(x, y), or set Trainer(inputs=..., targets=...) to select keys of dicts."
    if isinstance(loss, _NamedLoss) and not has_targets:
        raise LossError(f"The loss {loss!r}{where} needs targets, but the batches have none. {advice}")
    fn = loss.fn if isinstance(loss, _NamedLoss) else loss
    try:
        values = fn(outputs, targets) if has_targets else fn(outputs)
    except Exception as error:
        if is_of_debugger(error) or isinstance(error, FitflaxError):
            raise
        name = repr(loss) if isinstance(loss, _NamedLoss) else getattr(loss, "__name__", repr(loss))
        hint = ". Leave out from_logits=: crossentropies of fitflax always take logits." if "'from_logits'" in str(error) else ""
        if not has_targets and isinstance(error, TypeError):
            hint = f". The batches have no targets. {advice}"
        raise LossError(_failure(f"The loss {name}{where}", outputs, targets, error) + hint) from error
    if not hasattr(values, "shape") and not isinstance(values, int | float):
        raise LossError(f"A loss must return one array of values per example. The loss{where} returned a {type(values).__name__}: {describe_shapes(values)}.")
    if has_targets and not isinstance(loss, _NamedLoss) and (fault := broadcast_fault(fn, values, outputs, targets)) is not None:
        raise LossError(f"The loss {getattr(fn, '__name__', repr(fn))}{where} {fault}.")
    return jnp.asarray(values)


def _failure(subject: str, outputs: PyTree, targets: PyTree, error: Exception) -> str:
    return f"{subject} fails on outputs {describe_shapes(outputs)} and targets {describe_shapes(targets)}: {type(error).__name__}: {error}"


def _flatten(spec: Any, members: Mapping[Any, PyTree]) -> list[tuple[str | None, str, Metric]]:
    """Returns `(output, key, metric)` for every metric; there are no `members` if there is a single output."""
    names = _present(members)
    if isinstance(spec, dict) and set(spec) & set(names):
        placed: Any = _by_output(spec, members, "metrics", MetricError)
    elif isinstance(spec, dict) or not members:
        # Keys are log keys, not outputs: these metrics get all outputs.
        if members and any(isinstance(value, list | dict) for value in spec.values()):
            raise MetricError(f"compile(metrics=...) names {sorted(spec)}, but the module's outputs are {names}.{did_you_mean(next(iter(spec)), names)}")
        placed = {None: spec}
    else:
        entries = spec if isinstance(spec, list) else [spec]
        placed = _by_position(entries, members)
        if placed is None and any(isinstance(entry, list | dict) for entry in entries):
            raise MetricError(f"compile(metrics=...) has {len(entries)} entries, but the module has {len(names)} outputs: {names}.")
        placed = dict.fromkeys(names, entries) if placed is None else placed
    return [(name, key, metric) for name, entry in placed.items() for key, metric in _one_output(entry)]


def _one_output(spec: Any) -> list[tuple[str, Metric]]:
    if spec is None:
        return []
    if isinstance(spec, dict):
        for key, value in spec.items():
            if isinstance(value, list | dict):
                raise MetricError(f"compile(metrics=...) has several metrics under {key!r}, which is not an output of the module. Pass one metric per log key.")
        return [(key, value[1]) for key, value in spec.items() if value is not None]
    if isinstance(spec, list):
        return [found for entry in spec for found in _one_output(entry)]
    return [spec]


def _unique_key(prefix: str, key: str, used: set[str], weighted: bool) -> str:
    key = f"{prefix}weighted_{key}" if weighted and f"{prefix}{key}" in used else f"{prefix}{key}"
    if key not in used:
        return key
    return next(f"{key}_{number}" for number in range(1, len(used) + 2) if f"{key}_{number}" not in used)
