"""Hyperparameters that are part of the state, so that runs with different values share one compiled step."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

import fitflax.optimizers as optimizers
from fitflax.errors import OptimizerError, did_you_mean
from fitflax.state import TrainState

__all__ = ["COLLECTION", "hyperparams_of", "replace_by_path", "settable_by_path", "with_hyperparams"]

COLLECTION = "hyperparams"
"""The collection for the module's hyperparameters."""

# The field of optax's state with the schedules of hyperparameters.
_SCHEDULES = "hyperparams_states"


def hyperparams_of(state: TrainState) -> list[str]:
    """Returns the names of the hyperparameters that can be set: first the module's, then the optimizer's."""
    return list(dict.fromkeys([*state.model_state.get(COLLECTION, {}), *optimizers.get_hyperparams(state.opt_state)]))


def with_hyperparams(state: TrainState, values: Mapping[str, Any]) -> TrainState:
    """Returns a state with new values of hyperparameters in the module's collection `"hyperparams"` or in the optimizer state.

    Arrays keep their dtype, weak type and devices, so nothing is recompiled. Values are finite numbers by name; for an ensemble also a sequence with one
    number per member. The module's hyperparameters take precedence over the optimizer's.
    """
    for name, value in values.items():
        module_hyperparams = state.model_state.get(COLLECTION, {})
        if name in module_hyperparams:
            collection = {**module_hyperparams, name: optimizers.like(module_hyperparams[name], optimizers.finite(name, value))}
            state = dataclasses.replace(state, model_state={**state.model_state, COLLECTION: collection})
        elif module_hyperparams and name not in optimizers.get_hyperparams(state.opt_state):
            known = hyperparams_of(state)
            raise OptimizerError(f"There is no hyperparameter {name!r}. The module and the optimizer have: {', '.join(known)}.{did_you_mean(name, known)}")
        else:
            state = dataclasses.replace(state, opt_state=optimizers.set_hyperparam(state.opt_state, name, value))
    return state


def settable_by_path(opt_state: Any) -> dict[Any, Any]:
    """Returns the injected hyperparameters in an optax state by their JAX key path, without those that a schedule computes.

    >>> state = optimizers.get("sgd", 0.5).init(jax.numpy.ones(3))
    >>> [(jax.tree_util.keystr(path), float(value)) for path, value in settable_by_path(state).items()]
    [(".hyperparams['learning_rate']", 0.5)]
    >>> settable_by_path(optimizers.get("sgd", lambda step: 0.5).init(jax.numpy.ones(3)))
    {}
    """
    leaves = dict(jax.tree_util.tree_leaves_with_path(opt_state))
    names = {path: [getattr(entry, "name", None) for entry in path] for path in leaves}
    scheduled = {path[: where.index(_SCHEDULES)] + path[where.index(_SCHEDULES) + 1 :][:1] for path, where in names.items() if _SCHEDULES in where}
    return {path: leaf for path, leaf in leaves.items() if "hyperparams" in names[path][-2:-1] and path[:-2] + path[-1:] not in scheduled}


def replace_by_path(opt_state: Any, values: Mapping[Any, Any]) -> Any:
    """Returns an optax state with other arrays at these key paths.

    >>> tx = optimizers.get("sgd", 0.5)
    >>> changed = settable_by_path(optimizers.set_learning_rate(tx.init(jax.numpy.ones(3)), 0.25))
    >>> optimizers.get_learning_rate(replace_by_path(tx.init(jax.numpy.ones(3)), changed)).item()
    0.25
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: values.get(path, leaf), opt_state)
