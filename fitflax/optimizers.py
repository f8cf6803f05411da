"""Optimizers by name, and reading and setting the learning rate and other hyperparameters in a state without recompilation.

Reading and setting work for any optax state with a `learning_rate` of `optax.inject_hyperparams`, however it is nested. For gradient clipping and so on, use
optax.
"""

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fitflax.errors import OptimizerError, did_you_mean
from fitflax.leaves import as_patterns, listed, matching, named_leaves, on_host
from fitflax.state import TrainState

__all__ = ["freeze", "get", "get_hyperparams", "get_learning_rate", "get_learning_rates", "names", "set_hyperparam", "set_learning_rate", "train_only"]

_Number = float | np.ndarray[Any, Any]
_Path = tuple[Any, ...]

ONLY_RATE = "learning_rate"
"""The hyperparameter's name, and the label of the only rate of an optimizer without labels."""

# The collection of a module's hyperparameters.
_COLLECTION = "hyperparams"

# Keras's default learning rate, or None if Keras does not have the optimizer; optax has no defaults.
_DEFAULT_RATES: dict[str, float | None] = {
    **dict.fromkeys(("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "lamb", "lion", "nadam", "rmsprop"), 0.001),
    "sgd": 0.01,
    **dict.fromkeys(("adabelief", "adamaxw", "adan", "amsgrad", "lars", "nadamw", "novograd", "radam", "sign_sgd", "signum", "yogi"), None),
}


def get(name: str, learning_rate: Any = None) -> optax.GradientTransformation:
    """Returns the optax optimizer `name`, with a learning rate that can be read and, unless it is a schedule, set.

    Other hyperparameters have optax's defaults, which sometimes differ from Keras's (the weight decay of `adamw` is 1e-4; in Keras it is 4e-3). For other
    values, build the optimizer yourself: `optax.inject_hyperparams(optax.sgd, static_args=("momentum", "nesterov"))(learning_rate=0.1, momentum=0.9)`. The
    rate is float32, even for parameters of lower precision, as with `hyperparam_dtype=jnp.float32` of `optax.inject_hyperparams`.

    Args:
        name: One of `names()`.
        learning_rate: A number of at least 0, or an optax schedule `step -> rate`; by default Keras's: 0.01 for `sgd`, 0.001 for its other optimizers.

    Raises:
        OptimizerError: There is no such optimizer, the learning rate is invalid, or it is missing and Keras has no default.

    >>> state = get("sgd").init({"w": np.ones(3, np.float32)})
    >>> get_learning_rate(state)
    Array(0.01, dtype=float32)
    """
    if not isinstance(name, str):
        raise OptimizerError(f"optimizers.get() takes a name. Received: {name!r}. Pass an optax transformation to compile() directly.")
    if name not in _DEFAULT_RATES:
        close = did_you_mean(name.lower(), names())
        raise OptimizerError(f"There is no optimizer {name!r}.{close} Pass an optax transformation, or one of these names: {names()}.")
    factory, default = getattr(optax, name), _DEFAULT_RATES[name]
    if learning_rate is None and default is None:
        raise OptimizerError(f"{name!r} has no default learning rate, because Keras does not have this optimizer. Pass learning_rate=.")
    rate = default if learning_rate is None else learning_rate if callable(learning_rate) else _checked_rate(learning_rate)
    static = tuple(parameter for parameter in inspect.signature(factory).parameters if parameter != "learning_rate")
    # float32 for parameters of any dtype, because in bfloat16 0.1 * 0.999 is 0.1 again.
    injected = optax.inject_hyperparams(_keeping_dtypes(factory), static_args=static, hyperparam_dtype=jnp.float32)
    return cast(optax.GradientTransformation, injected(learning_rate=rate))


def _keeping_dtypes(factory: Callable[..., optax.GradientTransformation]) -> Callable[..., optax.GradientTransformation]:
    """Wraps an optimizer of optax so that its state keeps its dtypes, although float32 hyperparameters turn bfloat16 gradients into float32 updates."""

    @functools.wraps(factory)
    def made(*arguments: Any, **options: Any) -> optax.GradientTransformation:
        inner = optax.with_extra_args_support(factory(*arguments, **options))

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            updates, new_state = inner.update(updates, state, params, **extra)
            return updates, jax.tree.map(lambda new, old: new if new.dtype == old.dtype else new.astype(old.dtype), new_state, state)

        return optax.GradientTransformationExtraArgs(inner.init, update)

    return made


def freeze(optimizer: optax.GradientTransformation, patterns: str | Sequence[str]) -> optax.GradientTransformation:
    """Returns an optimizer that leaves the matched parameters unchanged and keeps no state for them; uses `optax.multi_transform`.

    A pattern is a parameter path, as in `Trainer.summary` and in errors: `"backbone"` matches everything below it. `*`, `?` and `[abc]` match within one
    name, and a name `**` matches any number of names: `"Dense_[01]"`, `"encoder/*/kernel"`, `"**/bias"`. Parameters that match any pattern are frozen. Batch
    statistics and other collections are still updated by the module. XLA removes computations that only the frozen parameters' gradients need.

    Args:
        optimizer: The optimizer of the other parameters.
        patterns: One or more patterns.

    Raises:
        OptimizerError: `optimizer` is not an optax transformation, or there is no pattern. When the optimizer state is initialized: a pattern matches no
            parameter, or all parameters are frozen.

    >>> params = {"backbone": {"kernel": np.ones(3)}, "head": {"kernel": np.ones(3)}}
    >>> tx = freeze(get("sgd", 1.0), "backbone")
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> float(updates["backbone"]["kernel"].sum()), float(updates["head"]["kernel"].sum())
    (0.0, -3.0)
    """
    return _partly_frozen(optimizer, patterns, "freeze", are_frozen=True)


def train_only(optimizer: optax.GradientTransformation, patterns: str | Sequence[str]) -> optax.GradientTransformation:
    """Returns an optimizer that changes only the matched parameters: `freeze` for all others.

    Args:
        optimizer: The optimizer of the matched parameters.
        patterns: One or more patterns, as in `freeze`.

    Raises:
        OptimizerError: `optimizer` is not an optax transformation, or there is no pattern. When the optimizer state is initialized: a pattern matches no
            parameter.

    >>> params = {"backbone": {"kernel": np.ones(3)}, "head": {"kernel": np.ones(3)}}
    >>> tx = train_only(get("sgd", 1.0), "head")
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> float(updates["backbone"]["kernel"].sum()), float(updates["head"]["kernel"].sum())
    (0.0, -3.0)
    """
    return _partly_frozen(optimizer, patterns, "train_only", are_frozen=False)


def _partly_frozen(optimizer: optax.GradientTransformation, patterns: str | Sequence[str], owner: str, *, are_frozen: bool) -> optax.GradientTransformation:
    """Returns an optimizer that freezes the matched parameters or, unless `are_frozen`, all others."""
    if not isinstance(optimizer, optax.GradientTransformation):
        raise OptimizerError(f"{owner}() takes an optax transformation, such as optimizers.get('adam'). Received: {optimizer!r}.")
    wanted = as_patterns(patterns, owner=f"{owner}()", error=OptimizerError)

    def labels(params: Any) -> Any:
        paths = [path for path, _ in named_leaves(params)]
        are_matched = matching(paths, wanted, owner=f"{owner}()", error=OptimizerError)
        if are_frozen and all(are_matched):
            raise OptimizerError(f"freeze({list(wanted)}) leaves nothing to train. Pass patterns that do not match all of the parameters: {listed(paths)}.")
        return jax.tree.unflatten(jax.tree.structure(params), ["frozen" if is_matched == are_frozen else "trained" for is_matched in are_matched])

    return cast(optax.GradientTransformation, optax.multi_transform({"trained": optimizer, "frozen": optax.set_to_zero()}, labels))


def names() -> list[str]:
    """Returns the names that `get` accepts, sorted.

    >>> "adam" in names()
    True
    """
    return sorted(_DEFAULT_RATES)


def get_learning_rate(opt_state: Any) -> jax.Array | None:
    """Returns the injected learning rate of an optax state, or `None` if there is none.

    With a schedule, it is the rate of the last update. The call does not wait for the device.

    Args:
        opt_state: Any optax state; nested states, such as those of `optax.chain` and `optax.MultiSteps`, are searched.

    Raises:
        OptimizerError: There are several learning rates.

    >>> get_learning_rate(optax.chain(optax.clip(1.0), get("adam", 0.5)).init(np.ones(3, np.float32)))
    Array(0.5, dtype=float32)
    >>> get_learning_rate(optax.adam(0.5).init(np.ones(3, np.float32))) is None
    True
    """
    rates = _learning_rates(opt_state)
    if len(rates) > 1:
        raise _several_rates(rates)
    return next(iter(rates.values()), None)


def get_learning_rates(opt_state: Any) -> dict[str, jax.Array]:
    """Returns all injected learning rates of an optax state, by their label in `optax.multi_transform`.

    If there is only one rate and it has no label, its key is `"learning_rate"`. The key of any other rate without a unique label is its path in the state.

    Args:
        opt_state: The optax state.

    Returns:
        `{label: rate}`; rates are scalar arrays `[]`.

    >>> tx = optax.multi_transform({"a": get("sgd", 0.5), "b": get("adam", 0.25)}, {"w": "a", "v": "b"})
    >>> {label: float(rate) for label, rate in get_learning_rates(tx.init({"w": np.ones(2), "v": np.ones(2)})).items()}
    {'a': 0.5, 'b': 0.25}
    """
    rates: dict[str, jax.Array] = {}
    for label, rate in _learning_rates(opt_state).items():
        rates |= {name: rate[number] for number, name in enumerate(_member_labels(label, rate))} if np.ndim(rate) else {label: rate}
    return rates


def _member_labels(label: str, rate: Any) -> list[str]:
    """Returns the labels of the members' rates; none if there is only one rate, because this is not an ensemble."""
    prefix = "" if label == ONLY_RATE else f"{label}/"
    return [f"{prefix}member {number}" for number in range(len(rate))] if np.ndim(rate) else []


def _learning_rates(opt_state: Any) -> dict[str, jax.Array]:
    return {label: node.hyperparams[ONLY_RATE] for label, (_, node) in _nodes_by_label(opt_state).items()}


def set_learning_rate(opt_state: Any, value: Any, label: str | None = None) -> Any:
    """Returns a new optax state with another learning rate; `opt_state` is not changed.

    The new array has the dtype, weak type and sharding of the old one, so compiled functions are not recompiled.

    Args:
        opt_state: An optax state with an injected `learning_rate`.
        value: The new rate, a number of at least 0.
        label: A key of `get_learning_rates`, if there are several rates.

    Raises:
        OptimizerError: The rate is invalid; the state has no injected rate, no rate with that label, or several rates and no `label` is given; or a schedule
            sets the rate and would override the new value.

    >>> state = set_learning_rate(get("sgd").init(np.ones(3, np.float32)), 0.5)
    >>> get_learning_rate(state)
    Array(0.5, dtype=float32)
    """
    number = _checked_rate(value)
    rate_nodes = _nodes_by_label(opt_state)
    if label is None and len(rate_nodes) > 1:
        raise _several_rates(rate_nodes)
    rates: dict[str, tuple[str, int | None]] = {group: (group, None) for group in rate_nodes}
    for group, (_, node) in rate_nodes.items():
        rates |= {name: (group, member) for member, name in enumerate(_member_labels(group, node.hyperparams[ONLY_RATE]))}
    if label is not None and label not in rates:
        raise OptimizerError(f"This optimizer has no learning rate {label!r} that can be set. Available: {list(rates)}.{did_you_mean(label, rates)}")
    if not rate_nodes:
        raise OptimizerError(
            "The learning rate cannot be set, because it is a constant in this optimizer. Pass the optimizer by name, or wrap it: "
            "optax.inject_hyperparams(optax.adam)(learning_rate=0.001)."
        )
    group, member = rates[label or next(iter(rates))]
    path, node = rate_nodes[group]
    if _is_scheduled(node, ONLY_RATE):
        raise OptimizerError(
            f"The learning rate cannot be set, because a schedule computes it before every update (opt_state{jax.tree_util.keystr(path)}). "
            "Use a number instead of the schedule, in compile(..., learning_rate=0.001), optimizers.get or optax.inject_hyperparams."
        )
    old = node.hyperparams[ONLY_RATE]
    new = number if member is None else np.where(np.arange(len(old)) == member, number, on_host(old))
    return replace_by_path(opt_state, {_path_of(path, ONLY_RATE): _like(old, new)})


def get_hyperparams(opt_state: Any) -> dict[str, jax.Array]:
    """Returns the hyperparameters of `optax.inject_hyperparams` in an optax state by name; if a name occurs several times, the first value.

    Args:
        opt_state: The optax state.

    >>> {name: float(value) for name, value in get_hyperparams(optax.inject_hyperparams(optax.adam)(0.5).init(np.ones(3))).items() if name == "b1"}
    {'b1': 0.8999999761581421}
    """
    values: dict[str, jax.Array] = {}
    for _, node in _find_injected(opt_state, None):
        values = {**node.hyperparams, **values}
    return values


def set_hyperparam(opt_state: Any, name: str, value: Any) -> Any:
    """Returns a new optax state with another value of an injected hyperparameter, without recompilation; `opt_state` is not changed.

    Args:
        opt_state: An optax state of `optax.inject_hyperparams`.
        name: The name of the hyperparameter, such as `"weight_decay"`.
        value: A finite number; for an ensemble also one number per member, `[members]`.

    Raises:
        OptimizerError: The value is not a finite number; the state has no such hyperparameter, or several; or a schedule sets it.

    >>> state = optax.inject_hyperparams(optax.adamw)(1e-3, weight_decay=0.1).init(np.ones(3))
    >>> get_hyperparams(set_hyperparam(state, "weight_decay", 0.5))["weight_decay"].item()
    0.5
    """
    number = _finite(name, value)
    if name == ONLY_RATE and np.min(number) < 0:
        raise OptimizerError(f"A learning rate must be a finite number of at least 0. Received: {value!r}.")
    nodes = list(_find_injected(opt_state, name))
    known = list(get_hyperparams(opt_state))
    if not nodes:
        have = f"It has: {', '.join(known)}." if known else "It has none."
        meant = did_you_mean(ONLY_RATE if name == "lr" else name, known)
        advice = f" Inject it: optax.inject_hyperparams(optax.adamw)(learning_rate=0.001, {name}=...)."
        raise OptimizerError(f"The optimizer has no injected hyperparameter {name!r}. {have}{meant or advice}")
    if len(nodes) > 1:
        advice = "Use trainer.learning_rates, or inject it only once." if name == ONLY_RATE else "Inject it only once."
        raise OptimizerError(f"This optimizer has {len(nodes)} hyperparameters named {name!r}. {advice}")
    path, node = nodes[0]
    if _is_scheduled(node, name):
        raise OptimizerError(f"{name!r} cannot be set, because a schedule computes it before every update. Use a number instead of the schedule.")
    return replace_by_path(opt_state, {_path_of(path, name): _like(node.hyperparams[name], number)})


def with_hyperparams(state: TrainState, values: Mapping[str, Any]) -> TrainState:
    """Returns a state with new values of hyperparameters in the module's collection `"hyperparams"` or in the optimizer state.

    Arrays keep their dtype, weak type and devices, so nothing is recompiled. Values are finite numbers by name; for an ensemble also a sequence with one
    number per member. The module's hyperparameters take precedence over the optimizer's.
    """
    for name, value in values.items():
        module_hyperparams = state.model_state.get(_COLLECTION, {})
        if name in module_hyperparams:
            collection = {**module_hyperparams, name: _like(module_hyperparams[name], _finite(name, value))}
            state = dataclasses.replace(state, model_state={**state.model_state, _COLLECTION: collection})
        elif module_hyperparams and name not in get_hyperparams(state.opt_state):
            known = list(dict.fromkeys([*module_hyperparams, *get_hyperparams(state.opt_state)]))
            raise OptimizerError(f"There is no hyperparameter {name!r}. The module and the optimizer have: {', '.join(known)}.{did_you_mean(name, known)}")
        else:
            state = dataclasses.replace(state, opt_state=set_hyperparam(state.opt_state, name, value))
    return state


def settable_by_path(opt_state: Any) -> dict[Any, Any]:
    """Returns the injected hyperparameters in an optax state by their JAX key path, without those that a schedule computes.

    >>> state = get("sgd", 0.5).init(jax.numpy.ones(3))
    >>> [(jax.tree_util.keystr(path), float(value)) for path, value in settable_by_path(state).items()]
    [(".hyperparams['learning_rate']", 0.5)]
    >>> settable_by_path(get("sgd", lambda step: 0.5).init(jax.numpy.ones(3)))
    {}
    """
    nodes = _find_injected(opt_state, None)
    return {_path_of(path, name): value for path, node in nodes for name, value in node.hyperparams.items() if not _is_scheduled(node, name)}


def replace_by_path(opt_state: Any, values: Mapping[Any, Any]) -> Any:
    """Returns an optax state with other arrays at these key paths.

    >>> tx = get("sgd", 0.5)
    >>> changed = settable_by_path(set_learning_rate(tx.init(jax.numpy.ones(3)), 0.25))
    >>> get_learning_rate(replace_by_path(tx.init(jax.numpy.ones(3)), changed)).item()
    0.25
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: values.get(path, leaf), opt_state)


def _path_of(path: _Path, name: str) -> _Path:
    return (*path, jax.tree_util.GetAttrKey("hyperparams"), jax.tree_util.DictKey(name))


def _is_scheduled(node: Any, name: str) -> bool:
    return name in getattr(node, "hyperparams_states", ())


def _several_rates(labels: Iterable[str]) -> OptimizerError:
    return OptimizerError(f"This optimizer has several learning rates: {list(labels)}. Use trainer.learning_rates to read and set them by name.")


def _nodes_by_label(opt_state: Any) -> dict[str, tuple[_Path, Any]]:
    """Returns the path and node of each injected rate by label, `a/b` for a label inside another one."""
    nodes = list(_find_injected(opt_state))
    labels = ["/".join(str(child.key) for parent, child in itertools.pairwise(path) if getattr(parent, "name", None) == "inner_states") for path, _ in nodes]
    if labels == [""]:
        return {ONLY_RATE: nodes[0]}
    is_name = [bool(label) and labels.count(label) == 1 for label in labels]
    return {label if named else f"opt_state{jax.tree_util.keystr(place[0])}": place for label, named, place in zip(labels, is_name, nodes, strict=True)}


def _find_injected(tree: Any, name: str | None = ONLY_RATE, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    if not any(map(_is_injected, jax.tree.leaves(tree, is_leaf=_is_injected))):
        return  # Most trees are moments of parameters, and computing their paths is slow.
    for place, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_injected):
        if _is_injected(node):
            if name is None or name in node.hyperparams:
                yield (*path, *place), node
            yield from _find_injected(node.inner_state, name, (*path, *place, jax.tree_util.GetAttrKey("inner_state")))


def _is_injected(node: Any) -> bool:
    return isinstance(getattr(node, "hyperparams", None), dict)


def _checked_rate(value: Any) -> float:
    number = _finite_float(value)
    if number is None or number < 0:
        raise OptimizerError(f"A learning rate must be a finite number of at least 0. Received: {value!r}.")
    return number


def _finite_float(value: Any) -> float | None:
    """Returns a finite number as a Python float, because optax injects neither NumPy scalars nor integer rates; `None` for other values."""
    scalar = isinstance(value, (int, float))
    if isinstance(value, (np.generic, np.ndarray, jax.Array)):
        scalar = value.ndim == 0 and (jnp.issubdtype(value.dtype, np.floating) or jnp.issubdtype(value.dtype, np.integer))
    number = float(value) if scalar and not isinstance(value, bool) else math.nan
    return number if math.isfinite(number) else None


def _finite(name: str, value: Any) -> _Number:
    """Returns a finite number as a Python float or a sequence of them as an array; raises `OptimizerError` for other values."""
    several = list(value) if isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 1 else None
    numbers = [_finite_float(each) for each in ([value] if several is None else several)]
    if not numbers or None in numbers:
        raise OptimizerError(f"{name} must be a finite number. Received: {value!r}.")
    return cast(float, numbers[0]) if several is None else np.asarray(numbers)


def _like(old: Any, number: _Number) -> Any:
    """Returns `number` as an array with the dtype, weak type, shape and placement of `old`, so that nothing is recompiled; several numbers need an ensemble."""
    if np.ndim(number) and np.shape(number) != np.shape(old):
        members = f"the ensemble has {np.shape(old)[0]} members" if np.ndim(old) == 1 else "this trainer is not an ensemble"
        raise OptimizerError(f"A hyperparameter takes one value, or one for each member of an ensemble. Received: {np.size(number)} values, but {members}.")
    if not isinstance(old, jax.Array):
        return np.asarray(number, np.result_type(old))
    value = number if old.weak_type and old.ndim == 0 else np.broadcast_to(np.asarray(number, old.dtype), old.shape).copy()
    # Compiled functions depend on whether an array is committed to its devices. No aliasing, because the state's buffers are donated.
    return jax.device_put(value, old.sharding if old.committed else None, may_alias=False)
