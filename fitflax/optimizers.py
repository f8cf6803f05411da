"""Optimizers by name, and the learning rate inside an optax state: found, read and replaced without a new compilation.

An optimizer by name is optax's, with the learning rate, and nothing else, injected by `optax.inject_hyperparams`. Reading and setting work on any optax state
with exactly one injected `learning_rate`, wherever it is nested and wherever its arrays live. Gradient clipping, accumulation and the like are optax's own.
"""

import fnmatch
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fitflax.errors import OptimizerError, did_you_mean
from fitflax.leaves import named_leaves

__all__ = ["freeze", "get", "get_learning_rate", "get_learning_rates", "names", "set_learning_rate"]

ONLY_RATE = "learning_rate"
"""The name of an injected rate, and of the only one of an optimizer without labels."""

# Keras's default learning rate, or None for what Keras does not have: optax has no defaults, and inventing some would be guessing.
_OPTIMIZERS: dict[str, tuple[Callable[..., optax.GradientTransformation], float | None]] = {
    "adabelief": (optax.adabelief, None),
    "adadelta": (optax.adadelta, 0.001),
    "adafactor": (optax.adafactor, 0.001),
    "adagrad": (optax.adagrad, 0.001),
    "adam": (optax.adam, 0.001),
    "adamax": (optax.adamax, 0.001),
    "adamaxw": (optax.adamaxw, None),
    "adamw": (optax.adamw, 0.001),
    "adan": (optax.adan, None),
    "amsgrad": (optax.amsgrad, None),
    "lamb": (optax.lamb, 0.001),
    "lars": (optax.lars, None),
    "lion": (optax.lion, 0.001),
    "nadam": (optax.nadam, 0.001),
    "nadamw": (optax.nadamw, None),
    "novograd": (optax.novograd, None),
    "radam": (optax.radam, None),
    "rmsprop": (optax.rmsprop, 0.001),
    "sgd": (optax.sgd, 0.01),
    "sign_sgd": (optax.sign_sgd, None),
    "signum": (optax.signum, None),
    "yogi": (optax.yogi, None),
}


def get(name: str, learning_rate: Any = None) -> optax.GradientTransformation:
    """Returns optax's optimizer of that name, with a learning rate that can be read and, unless it is a schedule, set.

    All other hyperparameters have optax's defaults, which are not everywhere Keras's (`adamw` decays weights by 1e-4, in Keras by 4e-3). For others build it
    yourself: `optax.inject_hyperparams(optax.sgd, static_args=("momentum", "nesterov"))(learning_rate=0.1, momentum=0.9)`.

    Args:
        name: One of `names()`.
        learning_rate: A number of at least 0, or an optax schedule `step -> rate`; by default Keras's: 0.01 for `sgd`, 0.001 for the others that Keras has.

    Raises:
        OptimizerError: There is no such optimizer, the rate is no rate, or none is given and Keras has no default.

    >>> state = get("sgd").init({"w": np.ones(3, np.float32)})
    >>> get_learning_rate(state)
    Array(0.01, dtype=float32)
    """
    if not isinstance(name, str):
        raise OptimizerError(f"optimizers.get() takes a name. Received: {name!r}. An optax transformation needs no get().")
    if name not in _OPTIMIZERS:
        close = did_you_mean(name.lower(), _OPTIMIZERS)
        raise OptimizerError(f"There is no optimizer {name!r}.{close} Known: {names()}. Or give an optax transformation.")
    factory, default = _OPTIMIZERS[name]
    if learning_rate is None and default is None:
        raise OptimizerError(f"Keras has no {name!r}, so there is no default learning rate. Give learning_rate=.")
    rate = default if learning_rate is None else learning_rate if callable(learning_rate) else _number(learning_rate)
    static = tuple(parameter for parameter in inspect.signature(factory).parameters if parameter != "learning_rate")
    return cast(optax.GradientTransformation, optax.inject_hyperparams(factory, static_args=static)(learning_rate=rate))


def freeze(optimizer: optax.GradientTransformation, patterns: str | Sequence[str]) -> optax.GradientTransformation:
    """Returns an optimizer that never changes some of the parameters, and keeps no state for them; `optax.multi_transform` does the work.

    A pattern is a path of parameters, as in `Trainer.summary` and in errors: `"backbone"` is all below it, `"*"` stands for any part of one name, as do `?`
    and `[abc]`, and a name `**` for any number of names: `"Dense_[01]"`, `"encoder/*/kernel"`, `"**/bias"`. Parameters that some pattern matches are frozen;
    batch statistics and other collections go on as the module says. XLA leaves out what only their gradients would need.

    Args:
        optimizer: What trains the others.
        patterns: One, or several.

    Raises:
        OptimizerError: `optimizer` is none, or there is no pattern; once there are parameters: a pattern matches none of them, or all are frozen.

    >>> params = {"backbone": {"kernel": np.ones(3)}, "head": {"kernel": np.ones(3)}}
    >>> tx = freeze(get("sgd", 1.0), "backbone")
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> float(updates["backbone"]["kernel"].sum()), float(updates["head"]["kernel"].sum())
    (0.0, -3.0)
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        raise OptimizerError(f"freeze() takes an optax transformation, such as optimizers.get('adam'). Received: {optimizer!r}.")
    wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns) if isinstance(patterns, Sequence) else ()
    if not wanted or not all(isinstance(pattern, str) and pattern for pattern in wanted):
        raise OptimizerError(f"freeze() takes patterns of paths, such as 'backbone' or '**/bias'. Received: {patterns!r}.")

    def labels(params: Any) -> Any:
        paths = [path for path, _ in named_leaves(params)]
        for pattern in wanted:
            if not any(_is_below(path.split("/"), pattern.split("/")) for path in paths):
                prefix = " Paths begin below params." if pattern.startswith("params/") else did_you_mean(pattern, [*paths, *_parents(paths)])
                raise OptimizerError(f"freeze(): no parameter is {pattern!r}, or below it.{prefix} There are: {', '.join(paths)}.")
        is_frozen = [any(_is_below(path.split("/"), pattern.split("/")) for pattern in wanted) for path in paths]
        if all(is_frozen):
            raise OptimizerError(f"freeze({list(wanted)}) leaves nothing to train: it matches all of {', '.join(paths)}.")
        return jax.tree.unflatten(jax.tree.structure(params), ["frozen" if one else "trained" for one in is_frozen])

    return cast(optax.GradientTransformation, optax.multi_transform({"trained": optimizer, "frozen": optax.set_to_zero()}, labels))


def _is_below(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Returns whether a path, name by name, is what a pattern stands for or lies below it."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_is_below(path[start:], pattern[1:]) for start in range(len(path)))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _is_below(path[1:], pattern[1:])


def _parents(paths: Sequence[str]) -> list[str]:
    return sorted({"/".join(path.split("/")[:end]) for path in paths for end in range(1, path.count("/") + 1)})


def names() -> list[str]:
    """Returns the names that `get` knows, sorted.

    >>> "adam" in names()
    True
    """
    return sorted(_OPTIMIZERS)


def get_learning_rate(opt_state: Any) -> jax.Array | None:
    """Returns the injected learning rate of an optax state, or `None` where there is none.

    Under a schedule it is the rate of the last update. Nothing waits for the device: the array may still be on its way.

    Args:
        opt_state: Any optax state; chains, `optax.multi_transform`, `optax.MultiSteps` and the like are searched.

    Returns:
        A float array of shape `[]`, the state's own.

    Raises:
        OptimizerError: There are several.

    >>> get_learning_rate(optax.chain(optax.clip(1.0), get("adam", 0.5)).init(np.ones(3, np.float32)))
    Array(0.5, dtype=float32)
    >>> get_learning_rate(optax.adam(0.5).init(np.ones(3, np.float32))) is None
    True
    """
    found = _find_one(opt_state)
    return None if found is None else cast(jax.Array, found[1].hyperparams["learning_rate"])


def get_learning_rates(opt_state: Any) -> dict[str, jax.Array]:
    """Returns all injected learning rates of an optax state, by the label of `optax.multi_transform` that they belong to.

    The only rate of an optimizer without labels is `"learning_rate"`; several without a label of their own have their paths for names.

    >>> tx = optax.multi_transform({"a": get("sgd", 0.5), "b": get("adam", 0.25)}, {"w": "a", "v": "b"})
    >>> {label: float(rate) for label, rate in get_learning_rates(tx.init({"w": np.ones(2), "v": np.ones(2)})).items()}
    {'a': 0.5, 'b': 0.25}
    """
    rates: list[Any] = []
    trees = [opt_state]
    while trees:
        # Without paths, which take longer than all the rest; but for labels.
        nodes = jax.tree.leaves(trees.pop(), is_leaf=lambda node: _is_injected(node) or _is_partition(node))
        if any(_is_partition(node) for node in nodes):
            return {label: node.hyperparams[ONLY_RATE] for label, (_, node) in _by_label(opt_state).items()}
        injected = [node for node in nodes if _is_injected(node)]
        rates += [node.hyperparams[ONLY_RATE] for node in injected if ONLY_RATE in node.hyperparams]
        trees += [node.inner_state for node in injected]
    if len(rates) < 2:
        return {ONLY_RATE: rates[0]} if rates else {}
    return {label: node.hyperparams[ONLY_RATE] for label, (_, node) in _by_label(opt_state).items()}


def set_learning_rate(opt_state: Any, value: Any, label: str | None = None) -> Any:
    """Returns an optax state with another learning rate in the place of the old one; `opt_state` is not changed.

    The new array has the old one's dtype, weak type and sharding, so that what was compiled for the old state takes the new one.

    Args:
        opt_state: An optax state with one injected `learning_rate`.
        value: The new rate, a number of at least 0.
        label: Which one, of `get_learning_rates`, where there are several.

    Raises:
        OptimizerError: The rate is no rate; the state has no injected rate, or several and no `label`, or none of that label; or a schedule sets it, which
            would overrule the new value.

    >>> state = set_learning_rate(get("sgd").init(np.ones(3, np.float32)), 0.5)
    >>> get_learning_rate(state)
    Array(0.5, dtype=float32)
    """
    number = _number(value)
    found = _find_one(opt_state) if label is None else _find_labelled(opt_state, label)
    if found is None:
        raise OptimizerError(
            "The learning rate cannot be set: this optimizer holds it as a constant. Give the optimizer by name, or wrap it: "
            "optax.inject_hyperparams(optax.adam)(learning_rate=0.001)."
        )
    path, node = found
    if "learning_rate" in getattr(node, "hyperparams_states", ()):
        raise OptimizerError(
            f"The learning rate cannot be set: a schedule computes it before every update (opt_state{jax.tree_util.keystr(path)}), and a value put beside it "
            "would be ignored. Give a number instead of the schedule: compile(..., learning_rate=0.001), optimizers.get or optax.inject_hyperparams."
        )
    target = (*path, jax.tree_util.GetAttrKey("hyperparams"), jax.tree_util.DictKey("learning_rate"))
    return jax.tree_util.tree_map_with_path(lambda leaf_path, leaf: _like(leaf, number) if leaf_path == target else leaf, opt_state)


_Path = tuple[Any, ...]


def _find_one(opt_state: Any) -> tuple[_Path, Any] | None:
    """Returns path and node of the one `inject_hyperparams` state that has a learning rate."""
    found = list(_find_all(opt_state))
    if len(found) > 1:
        labels = list(_by_label(opt_state))
        raise OptimizerError(f"This optimizer has several learning rates: {labels}. Read and set each by its name: trainer.learning_rates.")
    return found[0] if found else None


def _find_labelled(opt_state: Any, label: str) -> tuple[_Path, Any]:
    found = _by_label(opt_state)
    if label not in found:
        raise OptimizerError(f"This optimizer has no learning rate {label!r} that can be set: {list(found)}.{did_you_mean(label, found)}")
    return found[label]


def _by_label(opt_state: Any) -> dict[str, tuple[_Path, Any]]:
    """Returns path and node of each injected rate by its name, `a/b` where one label lies in another."""
    found = list(_find_all(opt_state))
    labels = ["/".join(str(child.key) for parent, child in itertools.pairwise(path) if getattr(parent, "name", None) == "inner_states") for path, _ in found]
    if labels == [""]:
        return {ONLY_RATE: found[0]}
    is_name = [bool(label) and labels.count(label) == 1 for label in labels]
    return {label if named else f"opt_state{jax.tree_util.keystr(place[0])}": place for label, named, place in zip(labels, is_name, found, strict=True)}


def _find_all(tree: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    for place, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_injected):
        if _is_injected(node):
            if "learning_rate" in node.hyperparams:
                yield (*path, *place), node
            yield from _find_all(node.inner_state, (*path, *place, jax.tree_util.GetAttrKey("inner_state")))


def _is_partition(node: Any) -> bool:
    return isinstance(getattr(node, "inner_states", None), dict)


def _is_injected(node: Any) -> bool:
    return isinstance(getattr(node, "hyperparams", None), dict)


def _number(value: Any) -> float:
    scalar = isinstance(value, (int, float))
    if isinstance(value, (np.generic, np.ndarray, jax.Array)):
        scalar = value.ndim == 0 and (jnp.issubdtype(value.dtype, np.floating) or jnp.issubdtype(value.dtype, np.integer))
    # A Python float: optax injects neither NumPy scalars nor, as a rate, integers.
    number = float(value) if scalar and not isinstance(value, bool) else math.nan
    if not 0 <= number < math.inf:
        raise OptimizerError(f"A learning rate is a finite number of at least 0. Received: {value!r}.")
    return number


def _like(old: Any, number: float) -> Any:
    """Returns `number` as an array that no compiled function can tell from `old`."""
    if not isinstance(old, jax.Array):
        return np.asarray(number, np.result_type(old))
    value = number if old.weak_type else np.asarray(number, old.dtype)
    # Whether an array is committed to its devices is part of what a function is compiled for. No aliasing: the state's buffers are donated.
    return jax.device_put(value, old.sharding if old.committed else None, may_alias=False)
