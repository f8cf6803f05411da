"""Hyperparameters that are part of the state, so that runs with different values share one compiled step."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import fitflax.optimizers as optimizers
from fitflax.errors import OptimizerError, did_you_mean
from fitflax.state import TrainState

__all__ = ["COLLECTION", "hyperparams_of", "with_hyperparams"]

COLLECTION = "hyperparams"
"""The collection for the module's hyperparameters."""


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
